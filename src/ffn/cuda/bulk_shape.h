/* SPDX-License-Identifier: MIT */
/* Sizes of the bulk kernels that the launching side needs too. */
#ifndef XPOOL_FFN_CUDA_BULK_SHAPE_H
#define XPOOL_FFN_CUDA_BULK_SHAPE_H

#define BULK_THREADS              256u
#define BULK_PLAN_THREADS         512u /* an expert a thread */
#define BULK_ROUTE_ROWS           16u  /* rows of one router block; its logits fill shared memory */
#define BULK_ROUTE_BYTES(experts) (BULK_ROUTE_ROWS * (experts)*4u)

#define GROUPED_THREADS 384u /* one warp group that copies, two that compute */
#define GROUPED_ROWS    128u /* FFN_CUDA_TILE_ROWS */
#define GROUPED_COLUMNS                                                                            \
    256u /* weight rows of a tile: 128 of gate and 128 of up, or 256 of down                       \
          */
#define GROUPED_DEPTH       64u /* inner dimension of a stage: 128 bytes a row */
#define GROUPED_STAGES      4u
#define GROUPED_STAGE_BYTES ((GROUPED_ROWS + GROUPED_COLUMNS) * GROUPED_DEPTH * 2u)
/* The stages begin at a multiple of 1024 bytes. */
#define GROUPED_SHARED_BYTES (GROUPED_STAGES * GROUPED_STAGE_BYTES + 1024u + 128u)
#endif
