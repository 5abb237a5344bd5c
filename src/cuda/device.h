/* SPDX-License-Identifier: MIT */
/*
 * Devices of the driver, and the one that a process works on.
 *
 * A cuda_device_t holds the device's primary context, which torch and every runtime-API library of
 * the same process use too, so their pointers are valid here. It is constant once open; a thread
 * that calls into it for the first time makes the context current with cuda_device_use().
 */
#ifndef XPOOL_CUDA_DEVICE_H
#define XPOOL_CUDA_DEVICE_H

#include <stdbool.h>

#include "cuda/driver.h"
#include "cuda/image.h"

#define CUDA_DEVICES_MAX     64
#define CUDA_DEVICE_NAME_MAX 128

typedef struct cuda_device_info {
    int ordinal; /* as this process sees it */
    char name[CUDA_DEVICE_NAME_MAX];
    char uuid[41];   /* "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx" */
    char bus_id[16]; /* "0000:3b:00.0" */
    uint64_t memory_bytes, l2_bytes;
    int capability; /* 90 = 9.0 */
    int multiprocessors;
    bool vmm; /* virtual memory management with descriptors */
    bool cooperative;
    bool mps; /* this process is an MPS client there */
} cuda_device_info_t;

typedef struct cuda_device {
    const cuda_driver_t *driver;
    int ordinal, device;
    cuda_context_t context;
    uint64_t granularity_bytes; /* smallest unit of VMM */
    cuda_device_info_t info;
} cuda_device_t;

/* Describes up to `limit` devices; count_out says how many there are. */
xp_status_t cuda_devices_list(const cuda_driver_t *driver, cuda_device_info_t *infos,
                              uint32_t limit, uint32_t *count_out);

/* Retains the primary context of `ordinal` and makes it current for this thread. XP_NOT_FOUND with
 * the number of devices when there is none of that ordinal. */
xp_status_t cuda_device_open(const cuda_driver_t *driver, int ordinal, cuda_device_t *device_out);
void cuda_device_close(cuda_device_t *device); /* accepts one that was never opened (all zero) */
xp_status_t cuda_device_use(const cuda_device_t *device);

/* Device code, loaded as a whole: all functions are resolved and loaded before this returns, so
 * that no launch behind a spinning kernel has to load one. */
typedef struct cuda_module {
    const cuda_device_t *device;
    cuda_module_handle_t handle;
} cuda_module_t;
xp_status_t cuda_module_load(const cuda_device_t *device, const cuda_image_t *image,
                             const char *const *names, uint32_t count, cuda_module_t *module_out,
                             cuda_function_t *functions_out);
void cuda_module_unload(cuda_module_t *module); /* accepts all zero */

/* Launch in one dimension. parameters: pointers to the arguments, as cuLaunchKernel takes them. */
xp_status_t cuda_launch(const cuda_device_t *device, cuda_function_t function, uint32_t blocks,
                        uint32_t threads, cuda_stream_t stream, void **parameters);
#endif
