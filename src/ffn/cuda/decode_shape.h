/* SPDX-License-Identifier: MIT */
/* Sizes of the decode kernels (decode.cu) that the launching side needs too. */
#ifndef XPOOL_FFN_CUDA_DECODE_SHAPE_H
#define XPOOL_FFN_CUDA_DECODE_SHAPE_H

/* X(number, warps, tiles of 16 weight rows a pass, bytes of each row a slot, slots under way a
 * warp). 16 times the first and the last two is what one multiprocessor has under way: 4.2 TB/s
 * over 132 multiprocessors at 1 us of latency need 32 KiB; more keeps the rate up when warps wait
 * for each other, and covers the barrier between gate and down: 160 KiB are 5 us.
 */
#define DECODE_VARIANTS(X)                                                                         \
    X(0, 8, 4, 256, 5)                                                                             \
    X(1, 8, 2, 256, 5)                                                                             \
    X(2, 8, 6, 256, 4)                                                                             \
    X(3, 12, 2, 256, 3)                                                                            \
    X(4, 8, 4, 256, 4)
#define DECODE_VARIANT_COUNT 5u

/* Shared memory besides the ring, the sums and the tiles' addresses. */
#define DECODE_STATE_BYTES (26u * 1024u)
#define DECODE_SHARED_BYTES(warps, tiles, bytes, depth)                                            \
    ((warps) * (depth)*16u * (bytes) + (warps) * (tiles) * (1024u + 16u) + DECODE_STATE_BYTES)
#endif
