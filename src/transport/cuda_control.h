/* SPDX-License-Identifier: MIT */
/*
 * Private to src/transport: the kernels of the CUDA Transport and the stream by which a host thread
 * reaches device words while other kernels of the process spin. One thread uses a control.
 */
#ifndef XPOOL_TRANSPORT_CUDA_CONTROL_H
#define XPOOL_TRANSPORT_CUDA_CONTROL_H

#include "transport/arena.h"
#include "transport/cuda_transport.h"

/* X(enumerator, kernel) */
#define TRANSPORT_KERNELS(X)                                                                       \
    X(PUT, transport_put)                                                                          \
    X(WAIT, transport_wait)                                                                        \
    X(TAKE, transport_take)                                                                        \
    X(CALL, transport_call)                                                                        \
    X(ARENA_START, transport_arena_start)                                                          \
    X(CLOSE, transport_close)                                                                      \
    X(LIVE_WRITE, transport_live_write)                                                            \
    X(RECOVER, transport_recover)                                                                  \
    X(SLOT_DESCRIBE, transport_slot_describe)                                                      \
    X(POST, transport_post)                                                                        \
    X(CARRY, transport_carry)
typedef enum transport_kernel {
#define X(enumerator, kernel) TRANSPORT_KERNEL_##enumerator,
    TRANSPORT_KERNELS(X)
#undef X
        TRANSPORT_KERNEL_COUNT
} transport_kernel_t;

/* What one read brings at most. */
#define TRANSPORT_CONTROL_READ_MAX 512

typedef struct transport_control {
    const cuda_device_t *device;
    cuda_module_t module;
    cuda_function_t kernels[TRANSPORT_KERNEL_COUNT];
    cuda_stream_t stream;
    void *staging; /* pinned */
} transport_control_t;

xp_status_t transport_control_init(const cuda_device_t *device, transport_control_t *control_out);
void transport_control_fini(transport_control_t *control); /* accepts all zero */

/* One thread of `kernel` on the control stream, in order after what was launched there before. */
xp_status_t transport_control_launch(transport_control_t *control, transport_kernel_t kernel,
                                     void **parameters);
/* Until everything launched on the control stream has ended. */
xp_status_t transport_control_wait(transport_control_t *control, uint64_t deadline_ns);
/* Reads device memory, after what was launched before. */
xp_status_t transport_control_read(transport_control_t *control, cuda_address_t from,
                                   uint64_t bytes, uint64_t deadline_ns, void *to);
/* Stores `value` with release. */
xp_status_t transport_control_post(transport_control_t *control, cuda_address_t word,
                                   uint32_t value);

/* Bounds of a geometry on CUDA; `status` is what to fail with. */
xp_status_t transport_cuda_geometry_check(const transport_geometry_t *geometry, xp_status_t status);
#endif
