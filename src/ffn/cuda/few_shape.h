/* SPDX-License-Identifier: MIT */
/* Sizes of the products of few rows (few.cu) that the launching side needs too. */
#ifndef XPOOL_FFN_CUDA_FEW_SHAPE_H
#define XPOOL_FFN_CUDA_FEW_SHAPE_H

#define FEW_ROWS_MOST  128u /* of an Invocation */
#define FEW_TILE_ROWS  32u  /* of one part that a warp multiplies at once */
#define FEW_HALF_ROWS  16u  /* weight rows of half an item */
#define FEW_STEP_DEPTH 32u  /* inner dimension of a step: 16 bytes a lane and row */
#define FEW_SLOT_STEPS 2u   /* of a slot: whole lines of 128 bytes */

/* A multiprocessor has FEW_WARPS rings under way, 200 KiB less one slot each; 4.2 TB/s at 1 us of
 * latency need 32 KiB of it, the rest is for warps that are between two items. */
#define FEW_WARPS        8u
#define FEW_THREADS      (FEW_WARPS * 32u)
#define FEW_CHUNK_BYTES  512u
#define FEW_RING_BYTES   25600u
#define FEW_SHARED_BYTES (FEW_WARPS * FEW_RING_BYTES)
/* Slots of the ring, with so many eights of rows. */
#define FEW_SLOT_BYTES(tiles) (FEW_SLOT_STEPS * (4u + (tiles)) * FEW_CHUNK_BYTES)
#define FEW_SLOTS(tiles)      (FEW_RING_BYTES / FEW_SLOT_BYTES(tiles))

#define FEW_ROUTE_THREADS 512u /* an expert a thread, where they are counted */
#define FEW_ROUTE_EXPERTS 16u  /* of a router block */
#define FEW_ROUTE_ROWS    32u
#endif
