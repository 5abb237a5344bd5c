/* SPDX-License-Identifier: MIT */
/*
 * The FFN kernels of one device, from the host's side: loading, workspaces, launches.
 *
 * A launch only queues work on a stream, may be captured, and takes its sizes from the Lane in
 * device memory (ffn/cuda/tables.h); what the host gives is an upper bound, the Execution Capacity.
 * The loaded kernels are constant and may be used by every thread whose current context is the
 * device's.
 */
#ifndef XPOOL_FFN_CUDA_KERNELS_H
#define XPOOL_FFN_CUDA_KERNELS_H

#include "cuda/device.h"
#include "ffn/cuda/few_shape.h"
#include "ffn/cuda/tables.h"

#define FFN_CUDA_CAPABILITY 90 /* compute capability 9.0; no other device runs them */

enum {
    FFN_KERNEL_BULK_ROUTE = 0, /* and the two larger ones, BULK_ROUTE_SIZES in all */
    FFN_KERNEL_BULK_PLAN = FFN_KERNEL_BULK_ROUTE + 3,
    FFN_KERNEL_BULK_REDUCE,
    FFN_KERNEL_REDUCE,
    FFN_KERNEL_ACTIVATE,
    FFN_KERNEL_GATE_BF16,
    FFN_KERNEL_DOWN_BF16,
    FFN_KERNEL_GATE_F16,
    FFN_KERNEL_DOWN_F16,
    FFN_KERNEL_DECODE,
    FFN_KERNEL_FEW_ROUTE,
    FFN_KERNEL_FEW_BF16,
    FFN_KERNEL_FEW_F16,
    FFN_KERNEL_FEW_RESIDENT,
    FFN_KERNEL_COUNT
};

typedef struct ffn_cuda_kernels {
    const cuda_device_t *device;
    cuda_module_t decode, bulk, grouped, few;
    cuda_function_t function[FFN_KERNEL_COUNT];
    ffn_cuda_map_t map; /* the form of all maps of the grouped products */
    uint32_t blocks;    /* of the cooperative and persistent grids: one a multiprocessor */
} ffn_cuda_kernels_t;

/* Loads all kernels and checks that the decode grid fits. XP_UNSUPPORTED: not a device of compute
 * capability 9.0, no cooperative launches, or a build without nvcc. `blocks` 0: one for each
 * multiprocessor; fewer leave room for others (a Lane's workspace stays with one number). */
xp_status_t ffn_cuda_kernels_load(const cuda_device_t *device, uint32_t blocks,
                                  ffn_cuda_kernels_t *kernels_out);
void ffn_cuda_kernels_unload(ffn_cuda_kernels_t *kernels); /* accepts all zero */

/* What the workspaces of a device's Lanes must hold: the maxima over the layers it serves. Zeroed,
 * then widened by ffn_cuda_limits_add(); bulk_rows is the caller's. */
typedef struct ffn_cuda_limits {
    uint32_t hidden, experts, top_k;
    uint32_t decode_rows;     /* most rows of the decode kernel */
    uint32_t decode_elements; /* activations of one decode row: all parts that they can choose */
    uint32_t row_elements;    /* activations of one bulk row */
    uint32_t bulk_rows;       /* most rows of a bulk launch; 0 = decode only */
} ffn_cuda_limits_t;

/* Widens `limits` to what one more signature needs. */
void ffn_cuda_limits_add(ffn_cuda_limits_t *limits, const ffn_cuda_signature_t *signature);

/* Exact bytes of a workspace; 256-byte alignment is expected. */
uint64_t ffn_cuda_workspace_bytes(const ffn_cuda_limits_t *limits);
/* Lays a workspace out over `base`, of ffn_cuda_workspace_bytes(), zeroed by the caller. */
void ffn_cuda_workspace_carve(const ffn_cuda_limits_t *limits, cuda_address_t base,
                              ffn_cuda_workspace_t *workspace_out);

/* From the cycles that each block took with `shares` (host copies of a workspace's tables; all
 * zero: equal parts), better shares in place. Call it a few times, with a launch of a large dense
 * layer before each. Results do not depend on shares: which block computes a sum does not change
 * it. */
void ffn_cuda_shares_adjust(uint32_t blocks, const uint32_t (*cycles)[FFN_CUDA_MAX_BLOCKS],
                            uint32_t (*shares)[FFN_CUDA_MAX_BLOCKS + 1]);

/* XP_INVALID with the reason when the kernels cannot run layers of that signature. */
xp_status_t ffn_cuda_signature_check(const ffn_cuda_signature_t *signature);

/* Most rows of a layer that the decode kernel takes. */
static inline uint32_t ffn_cuda_decode_rows(const ffn_cuda_signature_t *signature)
{
    return signature->experts ? FFN_CUDA_DECODE_ROWS : FFN_CUDA_DENSE_ROWS;
}

/* Most rows that are given to it: above, the grouped products are sooner ready (H200, 32 rows of
 * Qwen3-30B-A3B: 293 us, the decode kernel 604, docs/designs/cuda.md). */
static inline uint32_t ffn_cuda_streamed_rows(const ffn_cuda_signature_t *signature)
{
    const uint32_t most = ffn_cuda_decode_rows(signature);
    return most < FFN_CUDA_DENSE_ROWS ? most : FFN_CUDA_DENSE_ROWS;
}

/* The layer of `lane` (device address of a ffn_cuda_lane_t) for its live rows, 0 to
 * ffn_cuda_decode_rows(). One cooperative launch. */
xp_status_t ffn_cuda_decode(const ffn_cuda_kernels_t *kernels, cuda_address_t lane,
                            cuda_stream_t stream);

/* The resident decode kernel over `queue` (device address of a zeroed ffn_cuda_queue_t). Ends by a
 * command without Lane or by the queue's `stop`. look_ahead: while it waits, it loads the first
 * weights of the layer that should come next. Occupies all multiprocessors it was given. */
xp_status_t ffn_cuda_resident(const ffn_cuda_kernels_t *kernels, cuda_address_t queue,
                              bool look_ahead, cuda_stream_t stream);

/* Told after each launch that a call queues, with its name; for measuring. NULL: nobody is. */
typedef struct ffn_cuda_watch {
    void (*queued)(void *context, const char *step);
    void *context;
} ffn_cuda_watch_t;

/* The layer of `lane` for its live rows, 0 to capacity_rows, in as many launches as it takes, for
 * layers of `signature`. Dense layers go through the grouped products too; ffn/cuda/library.h does
 * them with cuBLASLt. blocks: of the grouped products; 0 = all. */
xp_status_t ffn_cuda_bulk(const ffn_cuda_kernels_t *kernels, const ffn_cuda_signature_t *signature,
                          uint32_t capacity_rows, uint32_t blocks, cuda_address_t lane,
                          cuda_stream_t stream);
/* Of the router's launches for that many rows: FFN_KERNEL_BULK_ROUTE + it. */
uint32_t ffn_cuda_route_size(const ffn_cuda_kernels_t *kernels, uint32_t capacity_rows);
xp_status_t ffn_cuda_bulk_watched(const ffn_cuda_kernels_t *kernels,
                                  const ffn_cuda_signature_t *signature, uint32_t capacity_rows,
                                  uint32_t blocks, cuda_address_t lane, cuda_stream_t stream,
                                  const ffn_cuda_watch_t *watch);

/* Most rows for which ffn_cuda_few() computes layers of that signature; 0: none. */
uint32_t ffn_cuda_few_rows(const ffn_cuda_signature_t *signature);
/* The same layer for live rows and a capacity of up to ffn_cuda_few_rows(), by launches that stream
 * each chosen expert's weights once at nearly the rate of memory; same workspace. blocks: of the
 * products; 0 = all. Another order of sums than ffn_cuda_bulk(), so last bits differ. */
xp_status_t ffn_cuda_few(const ffn_cuda_kernels_t *kernels, const ffn_cuda_signature_t *signature,
                         uint32_t capacity_rows, uint32_t blocks, cuda_address_t lane,
                         cuda_stream_t stream);
xp_status_t ffn_cuda_few_watched(const ffn_cuda_kernels_t *kernels,
                                 const ffn_cuda_signature_t *signature, uint32_t capacity_rows,
                                 uint32_t blocks, cuda_address_t lane, cuda_stream_t stream,
                                 const ffn_cuda_watch_t *watch);

/* The resident kernel of few rows over `queue`, as ffn_cuda_resident(): commands of up to
 * ffn_cuda_few_rows() rows, with the bits of ffn_cuda_few(). */
xp_status_t ffn_cuda_few_resident(const ffn_cuda_kernels_t *kernels, cuda_address_t queue,
                                  cuda_stream_t stream);

/* output = partials[0] + ... of the Lane, in that order, in FP32, cast once. */
xp_status_t ffn_cuda_reduce(const ffn_cuda_kernels_t *kernels, uint32_t capacity_rows,
                            uint32_t hidden, cuda_address_t lane, cuda_stream_t stream);
/* gate = act(gate) * up over `elements` (a multiple of 8) values of `dtype`. */
xp_status_t ffn_cuda_activate(const ffn_cuda_kernels_t *kernels, cuda_address_t gate,
                              cuda_address_t up, uint64_t elements, ffn_cuda_dtype_t dtype,
                              uint32_t activation, cuda_stream_t stream);
#endif
