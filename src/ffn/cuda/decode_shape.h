/* SPDX-License-Identifier: MIT */
/* Sizes of the decode kernel (decode.cu) that the launching side needs too. */
#ifndef XPOOL_FFN_CUDA_DECODE_SHAPE_H
#define XPOOL_FFN_CUDA_DECODE_SHAPE_H

/* DECODE_WARPS * DECODE_DEPTH * 4 KiB is what one multiprocessor has under way: 4.2 TB/s over 132
 * multiprocessors at 1 us of latency need 32 KiB; more keeps the rate up when warps wait for each
 * other, and covers the barrier between gate and down: 160 KiB are 5 us. */
#define DECODE_WARPS   8u
#define DECODE_TILES   4u   /* of 16 weight rows, a pass */
#define DECODE_BYTES   256u /* of each weight row, a slot */
#define DECODE_DEPTH   5u   /* slots under way a warp */
#define DECODE_THREADS (DECODE_WARPS * 32u)

/* Of a thread. A resident kernel that took all 65,536 registers of every multiprocessor would let
 * no kernel of anybody else start; 10,240 of them stay free. Checked when the kernel is loaded. */
#define DECODE_MOST_REGISTERS 216u

/* Shared memory besides the ring, the sums and the tiles' addresses. */
#define DECODE_STATE_BYTES (30u * 1024u)
/* Of ffn_cuda_queue_t.aside, a block. */
#define FFN_CUDA_ASIDE_BYTES DECODE_STATE_BYTES
#define DECODE_SHARED_BYTES                                                                        \
    (DECODE_WARPS * DECODE_DEPTH * 16u * DECODE_BYTES +                                            \
     DECODE_WARPS * DECODE_TILES * (1024u + 32u) + DECODE_STATE_BYTES)
#endif
