/* SPDX-License-Identifier: MIT */
/* Enumeration, the primary context, and device code. No state of its own. */
#include "cuda/device.h"

#include <stdio.h>
#include <string.h>

#include "cuda/vmm.h"

static xp_status_t attribute(const cuda_driver_t *driver, int device, int which, int *value_out)
{
    return CUDA_CALL(driver, cuDeviceGetAttribute, value_out, which, device);
}

static void uuid_text(const cuda_uuid_t *uuid, char text[41])
{
    const unsigned char *b = uuid->bytes;
    snprintf(text, 41, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x",
             b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13],
             b[14], b[15]);
}

static xp_status_t describe(const cuda_driver_t *driver, int ordinal, int device,
                            cuda_device_info_t *info_out)
{
    cuda_device_info_t info = {.ordinal = ordinal};
    cuda_uuid_t uuid;
    size_t bytes;
    int major, minor, vmm, descriptors, cooperative, mps, l2;
    XP_TRY(CUDA_CALL(driver, cuDeviceGetName, info.name, (int)sizeof(info.name), device));
    info.name[sizeof(info.name) - 1] = 0;
    XP_TRY(CUDA_CALL(driver, cuDeviceGetUuid, &uuid, device));
    uuid_text(&uuid, info.uuid);
    XP_TRY(CUDA_CALL(driver, cuDeviceGetPCIBusId, info.bus_id, (int)sizeof(info.bus_id), device));
    XP_TRY(CUDA_CALL(driver, cuDeviceTotalMem, &bytes, device));
    XP_TRY(attribute(driver, device, CUDA_ATTRIBUTE_CAPABILITY_MAJOR, &major));
    XP_TRY(attribute(driver, device, CUDA_ATTRIBUTE_CAPABILITY_MINOR, &minor));
    XP_TRY(attribute(driver, device, CUDA_ATTRIBUTE_MULTIPROCESSORS, &info.multiprocessors));
    XP_TRY(attribute(driver, device, CUDA_ATTRIBUTE_L2_BYTES, &l2));
    XP_TRY(attribute(driver, device, CUDA_ATTRIBUTE_VMM, &vmm));
    XP_TRY(attribute(driver, device, CUDA_ATTRIBUTE_VMM_DESCRIPTORS, &descriptors));
    XP_TRY(attribute(driver, device, CUDA_ATTRIBUTE_COOPERATIVE_LAUNCH, &cooperative));
    XP_TRY(attribute(driver, device, CUDA_ATTRIBUTE_MPS, &mps));
    info.memory_bytes = bytes;
    info.l2_bytes = (uint64_t)l2;
    info.capability = major * 10 + minor;
    info.vmm = vmm && descriptors;
    info.cooperative = cooperative != 0;
    info.mps = mps != 0;
    *info_out = info;
    return XP_OK;
}

xp_status_t cuda_devices_list(const cuda_driver_t *driver, cuda_device_info_t *infos,
                              uint32_t limit, uint32_t *count_out)
{
    int count, device;
    XP_TRY(CUDA_CALL(driver, cuDeviceGetCount, &count));
    for (int i = 0; i < count && (uint32_t)i < limit; i++) {
        XP_TRY(CUDA_CALL(driver, cuDeviceGet, &device, i));
        XP_TRY(describe(driver, i, device, &infos[i]));
    }
    *count_out = (uint32_t)count;
    return XP_OK;
}

xp_status_t cuda_device_open(const cuda_driver_t *driver, int ordinal, cuda_device_t *device_out)
{
    cuda_device_t opened = {.driver = driver, .ordinal = ordinal};
    int count;
    XP_TRY(CUDA_CALL(driver, cuDeviceGetCount, &count));
    if (ordinal < 0 || ordinal >= count)
        return xp_fail(XP_NOT_FOUND, "no device cuda:%d: this process sees %d", ordinal, count);
    XP_TRY(CUDA_CALL(driver, cuDeviceGet, &opened.device, ordinal));
    XP_TRY(describe(driver, ordinal, opened.device, &opened.info));
    if (!opened.info.vmm)
        return xp_fail(XP_UNSUPPORTED,
                       "cuda:%d (%s) cannot share memory by descriptor, which CrossPool needs",
                       ordinal, opened.info.name);
    XP_TRY(CUDA_CALL(driver, cuDevicePrimaryCtxRetain, &opened.context, opened.device));
    xp_status_t status = CUDA_CALL(driver, cuCtxSetCurrent, opened.context);
    if (status == XP_OK)
        status = cuda_vmm_granularity(&opened, &opened.granularity_bytes);
    if (status != XP_OK) {
        CUDA_IGNORE(driver, cuDevicePrimaryCtxRelease, opened.device);
        return status;
    }
    *device_out = opened;
    return XP_OK;
}

void cuda_device_close(cuda_device_t *device)
{
    if (device->context)
        CUDA_IGNORE(device->driver, cuDevicePrimaryCtxRelease, device->device);
    *device = (cuda_device_t){0};
}

xp_status_t cuda_device_use(const cuda_device_t *device)
{
    return CUDA_CALL(device->driver, cuCtxSetCurrent, device->context);
}

xp_status_t cuda_module_load(const cuda_device_t *device, const cuda_image_t *image,
                             const char *const *names, uint32_t count, cuda_module_t *module_out,
                             cuda_function_t *functions_out)
{
    const cuda_driver_t *driver = device->driver;
    if (image->begin == image->end)
        return xp_fail(
            XP_UNSUPPORTED,
            "this build has no device code (%s): it was made without nvcc; build it where "
            "the CUDA toolkit is",
            image->name);
    cuda_module_t module = {.device = device};
    xp_status_t status = CUDA_CALL(driver, cuModuleLoadData, &module.handle, image->begin);
    if (status != XP_OK)
        return xp_fail_context(status, "device code %s for cuda:%d (compute capability %d.%d)",
                               image->name, device->ordinal, device->info.capability / 10,
                               device->info.capability % 10);
    for (uint32_t i = 0; i < count; i++) {
        cuda_function_t function;
        status = CUDA_CALL(driver, cuModuleGetFunction, &function, module.handle, names[i]);
        if (status == XP_OK)
            status = CUDA_CALL(driver, cuFuncLoad, function);
        if (status != XP_OK) {
            xp_fail_context(status, "device function %s of %s", names[i], image->name);
            cuda_module_unload(&module);
            return status;
        }
        functions_out[i] = function;
    }
    *module_out = module;
    return XP_OK;
}

void cuda_module_unload(cuda_module_t *module)
{
    if (module->handle)
        CUDA_IGNORE(module->device->driver, cuModuleUnload, module->handle);
    *module = (cuda_module_t){0};
}

xp_status_t cuda_launch(const cuda_device_t *device, cuda_function_t function, uint32_t blocks,
                        uint32_t threads, cuda_stream_t stream, void **parameters)
{
    return CUDA_CALL(device->driver, cuLaunchKernel, function, blocks, 1, 1, threads, 1, 1, 0,
                     stream, parameters, NULL);
}
