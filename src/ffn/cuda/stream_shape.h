/* SPDX-License-Identifier: MIT */
/* Sizes of the streaming decode kernels (stream.cu) that the launching side needs too. */
#ifndef XPOOL_FFN_CUDA_STREAM_SHAPE_H
#define XPOOL_FFN_CUDA_STREAM_SHAPE_H

/* X(number, warps, tiles of 16 weight rows a unit, bytes of each row a unit, units under way a
 * warp). The product of the last four and 16 is what one multiprocessor has under way. 4.2 TB/s
 * over 132 multiprocessors at 1 us of latency need 32 KiB; twice that and more keeps the rate up
 * when warps wait for each other, and covers the barrier between gate and down: 192 KiB are 6 us.
 */
#define STREAM_VARIANTS(X)                                                                         \
    X(0, 8, 2, 256, 3)                                                                             \
    X(1, 8, 4, 128, 3)                                                                             \
    X(2, 4, 4, 256, 3)                                                                             \
    X(3, 8, 1, 512, 3)                                                                             \
    X(4, 8, 2, 256, 2)                                                                             \
    X(5, 6, 2, 256, 4)
#define STREAM_VARIANT_COUNT 6u

/* Shared memory besides the ring and the sums. */
#define STREAM_STATE_BYTES (10u * 1024u)
#define STREAM_SHARED_BYTES(warps, tiles, bytes, depth)                                            \
    ((warps) * (depth) * (tiles)*16u * (bytes) + (warps) * (tiles)*512u + STREAM_STATE_BYTES)
#endif
