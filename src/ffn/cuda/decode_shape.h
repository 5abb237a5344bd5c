/* SPDX-License-Identifier: MIT */
/* Sizes of the decode kernels that the launching side needs too. */
#ifndef XPOOL_FFN_CUDA_DECODE_SHAPE_H
#define XPOOL_FFN_CUDA_DECODE_SHAPE_H

#define DECODE_WARPS       8u /* that compute */
#define DECODE_COPY_WARPS  4u /* that start copies of weights; one more does so for rows */
#define DECODE_THREADS     ((DECODE_WARPS + DECODE_COPY_WARPS + 1u) * 32u)
#define DECODE_TILE        16u  /* weight rows of a stage */
#define DECODE_CHUNK       512u /* elements of the inner dimension of a stage */
#define DECODE_CHUNK_LEAST 256u
/* 64 bytes more than the chunk: 16-byte reads of 8 rows then fall on all banks. */
#define DECODE_PITCH       (DECODE_CHUNK * 2u + 64u)
#define DECODE_STAGES      9u
#define DECODE_ROW_BUFFERS 48u /* chunks of rows: 3 slots of 16 rows, or 6 of 8, or 12 of 4 */
#define DECODE_ROW_SLOTS   12u
#define DECODE_SLOTS       4 /* tiles whose sums a warp holds */
#define DECODE_PANEL_TILES (DECODE_WARPS * DECODE_SLOTS)
/* The most that a block's share may be of an equal one. */
#define DECODE_SHARE_MOST(equal) ((equal) + (equal) / 8u + 1u)
#define DECODE_LOOKS             64u /* polls of the queue between two looks at `stop` */
/* One block a multiprocessor, and room for one of a scheduler beside it (228 KiB in all, of which
 * each block takes 1 KiB more than it asks for). */
#define DECODE_SHARED_BYTES (225u * 1024u)
#endif
