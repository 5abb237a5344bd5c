/* SPDX-License-Identifier: MIT */
/*
 * Kernels, control stream and staging buffer of this module. Everything is taken by
 * stage_control_init(), before any kernel spins.
 */
#include "stage/control.h"

#include <string.h>

CUDA_IMAGE_DECLARE(stage_kernels);

_Static_assert(sizeof(stage_table_t) <= STAGE_CONTROL_BYTES, "the table is moved at once");

xp_status_t stage_control_init(const cuda_device_t *device, stage_control_t *control_out)
{
    static const char *const names[STAGE_KERNEL_COUNT] = {
#define X(enumerator, kernel) #kernel,
        STAGE_KERNELS(X)
#undef X
    };
    stage_control_t control = {.device = device};
    xp_status_t status;
    XP_TRY_GOTO(status, fail, cuda_device_use(device));
    XP_TRY_GOTO(status, fail,
                cuda_module_load(device, &cuda_image_stage_kernels, names, STAGE_KERNEL_COUNT,
                                 &control.module, control.kernels));
    XP_TRY_GOTO(status, fail, cuda_host_alloc(device, STAGE_CONTROL_BYTES, &control.staging));
    XP_TRY_GOTO(status, fail, cuda_stream_create(device, true, &control.stream));
    *control_out = control;
    return XP_OK;
fail:
    stage_control_fini(&control);
    return status;
}

void stage_control_fini(stage_control_t *control)
{
    if (control->device) {
        cuda_stream_destroy(control->device, control->stream);
        cuda_host_free(control->device, control->staging);
        cuda_module_unload(&control->module);
    }
    *control = (stage_control_t){0};
}

xp_status_t stage_control_launch(stage_control_t *control, stage_kernel_t kernel, uint32_t threads,
                                 void **parameters)
{
    return cuda_launch(control->device, control->kernels[kernel], 1, threads, control->stream,
                       parameters);
}

xp_status_t stage_control_wait(stage_control_t *control, uint64_t deadline_ns)
{
    xp_clock_t clock = xp_clock_system();
    return cuda_stream_wait(control->device, control->stream, &clock, deadline_ns);
}

xp_status_t stage_control_read(stage_control_t *control, cuda_address_t from, uint64_t bytes,
                               uint64_t deadline_ns, void *to)
{
    XP_ASSERT(bytes <= STAGE_CONTROL_BYTES);
    XP_TRY(CUDA_CALL(control->device->driver, cuMemcpyDtoHAsync, control->staging, from, bytes,
                     control->stream));
    XP_TRY(stage_control_wait(control, deadline_ns));
    memcpy(to, control->staging, bytes);
    return XP_OK;
}

xp_status_t stage_control_write(stage_control_t *control, cuda_address_t to, const void *from,
                                uint64_t bytes, uint64_t deadline_ns)
{
    XP_ASSERT(bytes <= STAGE_CONTROL_BYTES);
    memcpy(control->staging, from, bytes);
    XP_TRY(CUDA_CALL(control->device->driver, cuMemcpyHtoDAsync, to, control->staging, bytes,
                     control->stream));
    return stage_control_wait(control, deadline_ns);
}

xp_status_t stage_control_post(stage_control_t *control, cuda_address_t word, uint32_t value)
{
    void *parameters[] = {&word, &value};
    return stage_control_launch(control, STAGE_KERNEL_POST, 1, parameters);
}
