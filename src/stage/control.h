/* SPDX-License-Identifier: MIT */
/*
 * Private to src/stage: a module's kernels and the stream by which a host thread reaches device
 * words while other kernels of the process spin. One thread uses a control.
 */
#ifndef XPOOL_STAGE_CONTROL_H
#define XPOOL_STAGE_CONTROL_H

#include "cuda/stream.h"
#include "stage/stage.h"
#include "stage/table.h"

/* X(enumerator, kernel), of kernels.cu */
#define STAGE_KERNELS(X)                                                                           \
    X(PUT, stage_put)                                                                              \
    X(WAIT, stage_wait)                                                                            \
    X(TAKE, stage_take)                                                                            \
    X(CALL, stage_call)                                                                            \
    X(DESCRIBE, stage_describe)                                                                    \
    X(PAGE_START, stage_page_start)                                                                \
    X(PARTIALS_START, stage_partials_start)                                                        \
    X(POST, stage_post)                                                                            \
    X(CLOSE, stage_close)
typedef enum stage_kernel {
#define X(enumerator, kernel) STAGE_KERNEL_##enumerator,
    STAGE_KERNELS(X)
#undef X
        STAGE_KERNEL_COUNT
} stage_kernel_t;

/* What one transfer brings at most: the scheduler's table. */
#define STAGE_CONTROL_BYTES (64u << 10)

typedef struct stage_control {
    const cuda_device_t *device;
    cuda_module_t module;
    cuda_function_t kernels[STAGE_KERNEL_COUNT];
    cuda_stream_t stream;
    void *staging; /* pinned */
} stage_control_t;

xp_status_t stage_control_init(const cuda_device_t *device, stage_control_t *control_out);
void stage_control_fini(stage_control_t *control); /* accepts all zero */

/* One block of `kernel` on the control stream, in order after what was launched there before. */
xp_status_t stage_control_launch(stage_control_t *control, stage_kernel_t kernel, uint32_t threads,
                                 void **parameters);
/* Until everything launched on the control stream has ended. */
xp_status_t stage_control_wait(stage_control_t *control, uint64_t deadline_ns);
/* Both after what was launched before; both wait. */
xp_status_t stage_control_read(stage_control_t *control, cuda_address_t from, uint64_t bytes,
                               uint64_t deadline_ns, void *to);
xp_status_t stage_control_write(stage_control_t *control, cuda_address_t to, const void *from,
                                uint64_t bytes, uint64_t deadline_ns);
/* Stores `value` with release. */
xp_status_t stage_control_post(stage_control_t *control, cuda_address_t word, uint32_t value);

/* ---- sizes.c ------------------------------------------------------------------------------ */
static inline uint64_t stage_total_rows(const fabric_plan_instance_t *instance)
{
    return (uint64_t)instance->max_rows * instance->atn_dp;
}
/* FP32 elements of one partial area of a stage_partials_t, and of a scratch. */
static inline uint64_t stage_partial_stride(const fabric_plan_instance_t *instance)
{
    return stage_total_rows(instance) * instance->hidden;
}
uint64_t stage_page_bytes(const fabric_plan_instance_t *instance);
/* 0: no partials (no scratch) at this FfnAgent. */
uint64_t stage_partials_bytes(const fabric_plan_instance_t *instance, uint32_t ffn);
uint64_t stage_scratch_bytes(const fabric_plan_instance_t *instance, uint32_t ffn);
uint32_t stage_partials_members(const fabric_plan_instance_t *instance, uint32_t ffn);
/* The group of every layer when they are alike, else 0. */
uint32_t stage_uniform_group(const fabric_plan_instance_t *instance);
/* Of 16-bit activations; XP_UNSUPPORTED names another type. */
xp_status_t stage_dtype(const fabric_plan_instance_t *instance, uint32_t *dtype_out);
/* The header of a received stage, or of received partials: are they what the plan says? Two
 * Instances of one model differ in their place only. XP_PEER. */
xp_status_t stage_head_check(const stage_head_t *head, const fabric_plan_instance_t *instance,
                             uint32_t index, uint64_t generation, uint32_t ffn);
xp_status_t stage_partials_check(const stage_partials_t *partials,
                                 const fabric_plan_instance_t *instance, uint32_t index,
                                 uint32_t ffn);
/* What this module needs of a plan: ranks, types, sizes. XP_INVALID or XP_UNSUPPORTED. */
xp_status_t stage_plan_check(const fabric_plan_instance_t *instance);
#endif
