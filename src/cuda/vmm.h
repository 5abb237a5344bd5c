/* SPDX-License-Identifier: MIT */
/*
 * Device memory by virtual memory management: address ranges, physical handles, and both together.
 *
 * All sizes are multiples of the device's granularity (cuda_device_t); cuda_vmm_round_up() makes
 * them so. Mapping zeroes nothing: memory that came from another Instance is cleared by its owner.
 */
#ifndef XPOOL_CUDA_VMM_H
#define XPOOL_CUDA_VMM_H

#include "cuda/device.h"

xp_status_t cuda_vmm_granularity(const cuda_device_t *device, uint64_t *bytes_out);
uint64_t cuda_vmm_round_up(const cuda_device_t *device, uint64_t bytes);

/* Addresses without memory. */
xp_status_t cuda_vmm_reserve(const cuda_device_t *device, uint64_t bytes,
                             cuda_address_t *address_out);
void cuda_vmm_unreserve(const cuda_device_t *device, cuda_address_t address, uint64_t bytes);

/* Memory without addresses, exportable as a descriptor. The memory lives until every process has
 * released handle and mappings and closed the descriptors. */
xp_status_t cuda_vmm_create(const cuda_device_t *device, uint64_t bytes,
                            cuda_memory_handle_t *handle_out);
void cuda_vmm_release(const cuda_device_t *device, cuda_memory_handle_t handle);
/* The descriptor is the caller's and close-on-exec. */
xp_status_t cuda_vmm_export(const cuda_device_t *device, cuda_memory_handle_t handle, int *fd_out);
/* The descriptor stays the caller's. */
xp_status_t cuda_vmm_import(const cuda_device_t *device, int fd, cuda_memory_handle_t *handle_out);

/* Maps all of `handle` at `address` and makes it readable and writable from `device`; nothing is
 * mapped when it fails. Access is a call of its own so that many maps share one (cuda_vmm_map_only,
 * cuda_vmm_access). */
xp_status_t cuda_vmm_map(const cuda_device_t *device, cuda_address_t address, uint64_t bytes,
                         cuda_memory_handle_t handle);
xp_status_t cuda_vmm_map_only(const cuda_device_t *device, cuda_address_t address, uint64_t bytes,
                              cuda_memory_handle_t handle);
xp_status_t cuda_vmm_access(const cuda_device_t *device, cuda_address_t address, uint64_t bytes);
xp_status_t cuda_vmm_unmap(const cuda_device_t *device, cuda_address_t address, uint64_t bytes);

/* One allocation with an address. bytes is rounded up. All zero = none. */
typedef struct cuda_block {
    const cuda_device_t *device;
    cuda_memory_handle_t handle;
    cuda_address_t address;
    uint64_t bytes;
} cuda_block_t;
xp_status_t cuda_block_create(const cuda_device_t *device, uint64_t bytes, cuda_block_t *block_out);
/* Memory of another process, or device: `bytes` is what its maker said, rounded up here as there.
 */
xp_status_t cuda_block_import(const cuda_device_t *device, int fd, uint64_t bytes,
                              cuda_block_t *block_out);
void cuda_block_destroy(cuda_block_t *block); /* accepts all zero; no kernel may use it any more */
#endif
