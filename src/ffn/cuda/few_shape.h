/* SPDX-License-Identifier: MIT */
/* Sizes of the products of few rows (few.cu) that the launching side needs too. */
#ifndef XPOOL_FFN_CUDA_FEW_SHAPE_H
#define XPOOL_FFN_CUDA_FEW_SHAPE_H

#define FEW_ROWS_MOST  64u /* of an Invocation */
#define FEW_TILE_ROWS  32u /* of one part that a warp multiplies at once */
#define FEW_HALF_ROWS  16u /* weight rows of half an item */
#define FEW_STEP_DEPTH 32u /* inner dimension of a step: 16 bytes a lane and row */

/* How a multiprocessor's rings are shared. A slot holds 64 bytes of each row a step. Memory opens a
 * page for each row: long slots need fewer of them; many warps bear its latency better. 4.2 TB/s at
 * 1 us need 32 KiB under way a multiprocessor. */
#define FEW_WARPS        6u
#define FEW_SLOT_STEPS   4u
#define FEW_THREADS      (FEW_WARPS * 32u)
#define FEW_CHUNK_BYTES  512u
#define FEW_SHARED_BYTES (220u * 1024u)
#define FEW_RING_BYTES   (FEW_SHARED_BYTES / FEW_WARPS / FEW_CHUNK_BYTES * FEW_CHUNK_BYTES)
/* Of the ring, with so many eights of rows. */
#define FEW_SLOT_BYTES(tiles) (FEW_SLOT_STEPS * (4u + (tiles)) * FEW_CHUNK_BYTES)
#define FEW_SLOTS(tiles)      (FEW_RING_BYTES / FEW_SLOT_BYTES(tiles))

#define FEW_ROUTE_THREADS 512u /* of the router's own launch */
#define FEW_ROUTE_PARTS   16u  /* that the inner dimension of a logit is cut into */
#define FEW_ROUTE_EXPERTS 16u  /* of a router's unit */
#define FEW_ROUTE_ROWS    8u
#define FEW_ROUTE_ARRIVED (1u + FEW_ROWS_MOST / FEW_ROUTE_ROWS) /* counters of arrivals */
#endif
