/* SPDX-License-Identifier: MIT */
/* Thin over the driver; the ladders of cuda_block_* are what the fake driver's tests walk. */
#include "cuda/vmm.h"

#include <fcntl.h>
#include <inttypes.h>
#include <unistd.h>

static cuda_allocation_properties_t properties_of(const cuda_device_t *device)
{
    return (cuda_allocation_properties_t){
        .type = CUDA_ALLOCATION_PINNED,
        .handle_types = CUDA_HANDLE_DESCRIPTOR,
        .location = {.type = CUDA_LOCATION_DEVICE, .id = device->device},
    };
}

xp_status_t cuda_vmm_granularity(const cuda_device_t *device, uint64_t *bytes_out)
{
    cuda_allocation_properties_t properties = properties_of(device);
    size_t bytes;
    XP_TRY(CUDA_CALL(device->driver, cuMemGetAllocationGranularity, &bytes, &properties,
                     CUDA_GRANULARITY_MINIMUM));
    if (bytes == 0 || (bytes & (bytes - 1)))
        return xp_fail(XP_IO, "the driver says that memory comes in pieces of %zu bytes", bytes);
    *bytes_out = bytes;
    return XP_OK;
}

uint64_t cuda_vmm_round_up(const cuda_device_t *device, uint64_t bytes)
{
    uint64_t unit = device->granularity_bytes;
    return (bytes + unit - 1) / unit * unit;
}

xp_status_t cuda_vmm_reserve(const cuda_device_t *device, uint64_t bytes,
                             cuda_address_t *address_out)
{
    return CUDA_CALL(device->driver, cuMemAddressReserve, address_out, bytes, 0, 0, 0);
}

void cuda_vmm_unreserve(const cuda_device_t *device, cuda_address_t address, uint64_t bytes)
{
    CUDA_IGNORE(device->driver, cuMemAddressFree, address, bytes);
}

xp_status_t cuda_vmm_create(const cuda_device_t *device, uint64_t bytes,
                            cuda_memory_handle_t *handle_out)
{
    cuda_allocation_properties_t properties = properties_of(device);
    xp_status_t status = CUDA_CALL(device->driver, cuMemCreate, handle_out, bytes, &properties, 0);
    return status == XP_OK
               ? XP_OK
               : xp_fail_context(status, "%" PRIu64 " bytes of cuda:%d", bytes, device->ordinal);
}

void cuda_vmm_release(const cuda_device_t *device, cuda_memory_handle_t handle)
{
    CUDA_IGNORE(device->driver, cuMemRelease, handle);
}

xp_status_t cuda_vmm_export(const cuda_device_t *device, cuda_memory_handle_t handle, int *fd_out)
{
    int fd = -1;
    XP_TRY(CUDA_CALL(device->driver, cuMemExportToShareableHandle, &fd, handle,
                     CUDA_HANDLE_DESCRIPTOR, 0));
    if (fcntl(fd, F_SETFD, FD_CLOEXEC) != 0) {
        xp_status_t status = xp_fail_errno(XP_IO, "the driver's descriptor %d is not usable", fd);
        close(fd);
        return status;
    }
    *fd_out = fd;
    return XP_OK;
}

xp_status_t cuda_vmm_import(const cuda_device_t *device, int fd, cuda_memory_handle_t *handle_out)
{
    return CUDA_CALL(device->driver, cuMemImportFromShareableHandle, handle_out,
                     (void *)(uintptr_t)fd, CUDA_HANDLE_DESCRIPTOR);
}

xp_status_t cuda_vmm_map_only(const cuda_device_t *device, cuda_address_t address, uint64_t bytes,
                              cuda_memory_handle_t handle)
{
    return CUDA_CALL(device->driver, cuMemMap, address, bytes, 0, handle, 0);
}

xp_status_t cuda_vmm_access(const cuda_device_t *device, cuda_address_t address, uint64_t bytes)
{
    cuda_access_t access = {.location = {.type = CUDA_LOCATION_DEVICE, .id = device->device},
                            .flags = CUDA_ACCESS_READ_WRITE};
    return CUDA_CALL(device->driver, cuMemSetAccess, address, bytes, &access, 1);
}

xp_status_t cuda_vmm_map(const cuda_device_t *device, cuda_address_t address, uint64_t bytes,
                         cuda_memory_handle_t handle)
{
    XP_TRY(cuda_vmm_map_only(device, address, bytes, handle));
    xp_status_t status = cuda_vmm_access(device, address, bytes);
    if (status != XP_OK)
        CUDA_IGNORE(device->driver, cuMemUnmap, address, bytes);
    return status;
}

xp_status_t cuda_vmm_unmap(const cuda_device_t *device, cuda_address_t address, uint64_t bytes)
{
    return CUDA_CALL(device->driver, cuMemUnmap, address, bytes);
}

/* The handle is taken over: released when this fails. */
static xp_status_t block_place(const cuda_device_t *device, cuda_memory_handle_t handle,
                               uint64_t bytes, cuda_block_t *block_out)
{
    cuda_address_t address;
    xp_status_t status = cuda_vmm_reserve(device, bytes, &address);
    if (status != XP_OK)
        goto release;
    status = cuda_vmm_map(device, address, bytes, handle);
    if (status != XP_OK)
        goto unreserve;
    *block_out = (cuda_block_t){device, handle, address, bytes};
    return XP_OK;
unreserve:
    cuda_vmm_unreserve(device, address, bytes);
release:
    cuda_vmm_release(device, handle);
    return status;
}

xp_status_t cuda_block_create(const cuda_device_t *device, uint64_t bytes, cuda_block_t *block_out)
{
    if (bytes == 0)
        return xp_fail(XP_INVALID, "a device allocation of no bytes");
    cuda_memory_handle_t handle;
    bytes = cuda_vmm_round_up(device, bytes);
    XP_TRY(cuda_vmm_create(device, bytes, &handle));
    return block_place(device, handle, bytes, block_out);
}

xp_status_t cuda_block_import(const cuda_device_t *device, int fd, uint64_t bytes,
                              cuda_block_t *block_out)
{
    if (bytes == 0)
        return xp_fail(XP_INVALID, "a received device allocation of no bytes");
    cuda_memory_handle_t handle;
    bytes = cuda_vmm_round_up(device, bytes);
    xp_status_t status = cuda_vmm_import(device, fd, &handle);
    /* What a peer sent is no device memory of that size: the peer's fault, whatever the driver
     * calls it. */
    if (status == XP_OK)
        status = block_place(device, handle, bytes, block_out);
    if (status == XP_INVALID)
        status =
            xp_fail_context(XP_PEER, "a received descriptor of %" PRIu64 " device bytes", bytes);
    return status;
}

void cuda_block_destroy(cuda_block_t *block)
{
    if (block->handle) {
        CUDA_IGNORE(block->device->driver, cuMemUnmap, block->address, block->bytes);
        cuda_vmm_unreserve(block->device, block->address, block->bytes);
        cuda_vmm_release(block->device, block->handle);
    }
    *block = (cuda_block_t){0};
}
