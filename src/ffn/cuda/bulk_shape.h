/* SPDX-License-Identifier: MIT */
/* Sizes of the bulk kernels that the launching side needs too. */
#ifndef XPOOL_FFN_CUDA_BULK_SHAPE_H
#define XPOOL_FFN_CUDA_BULK_SHAPE_H

#include "ffn/cuda/tables.h"

#define BULK_THREADS      256u
#define BULK_PLAN_THREADS 512u /* an expert a thread, and a tensor map a warp */
#define BULK_PLAN_MAP_BLOCKS(experts)                                                              \
    ((FFN_CUDA_MAPS(experts) + BULK_PLAN_THREADS / 32 - 1) / (BULK_PLAN_THREADS / 32))
#define BULK_ROUTE_THREADS 512u
/* Rows of one router block, whose logits fill shared memory: 8, 16 or 32, so many that the grid
 * fits at once where it can. */
#define BULK_ROUTE_SIZES                3u
#define BULK_ROUTE_ROWS(size)           (8u << (size))
#define BULK_ROUTE_BYTES(size, experts) (BULK_ROUTE_ROWS(size) * (experts)*4u)

#define GROUPED_THREADS 384u /* one warp group that copies, two that compute */
#define GROUPED_ROWS    128u /* FFN_CUDA_TILE_ROWS */
#define GROUPED_COLUMNS                                                                            \
    256u /* weight rows of a tile: 128 of gate and 128 of up, or 256 of down                       \
          */
#define GROUPED_DEPTH       64u /* inner dimension of a stage: 128 bytes a row */
#define GROUPED_STAGES      4u
#define GROUPED_STAGE_BYTES ((GROUPED_ROWS + GROUPED_COLUMNS) * GROUPED_DEPTH * 2u)
#define GROUPED_BOX_ROWS    128u /* of a tensor map: GROUPED_DEPTH elements of so many rows */
#define GROUPED_BOX_BYTES   (GROUPED_BOX_ROWS * GROUPED_DEPTH * 2u)
/* The stages begin at a multiple of 1024 bytes. */
#define GROUPED_SHARED_BYTES (GROUPED_STAGES * GROUPED_STAGE_BYTES + 1024u + 256u)
#endif
