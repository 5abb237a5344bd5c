// SPDX-License-Identifier: MIT
// Copying and filling of rows by any number of threads, the device's clock, and the last block of a
// launch. Device code only.
#ifndef XPOOL_TRANSPORT_CUDA_ROWS_CUH
#define XPOOL_TRANSPORT_CUDA_ROWS_CUH

#include <stdint.h>

#include "base/protocol_atomics.h"

static __device__ __forceinline__ uint64_t transport_clock_ns()
{
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// Thread `thread` of `threads` copies its part. Rows are whole 2-byte elements; the arena's areas are
// page-aligned, the caller's tensor need not be.
static __device__ __forceinline__ void transport_rows_copy(void *to, const void *from,
                                                           uint64_t bytes, uint64_t thread,
                                                           uint64_t threads)
{
    if ((((uintptr_t)to | (uintptr_t)from) & 15) == 0) {
        const uint4 *wide_from = (const uint4 *)from;
        uint4 *wide_to = (uint4 *)to;
        uint64_t count = bytes / 16;
        uint64_t i = thread;
        // Four independent loads in flight a thread.
        for (; i + 3 * threads < count; i += 4 * threads) {
            uint4 a = wide_from[i], b = wide_from[i + threads];
            uint4 c = wide_from[i + 2 * threads], d = wide_from[i + 3 * threads];
            wide_to[i] = a;
            wide_to[i + threads] = b;
            wide_to[i + 2 * threads] = c;
            wide_to[i + 3 * threads] = d;
        }
        for (; i < count; i += threads)
            wide_to[i] = wide_from[i];
        for (uint64_t j = count * 8 + thread; j < bytes / 2; j += threads)
            ((uint16_t *)to)[j] = ((const uint16_t *)from)[j];
    } else {
        for (uint64_t j = thread; j < bytes / 2; j += threads)
            ((uint16_t *)to)[j] = ((const uint16_t *)from)[j];
    }
}

// All ones: not a number, in BF16, FP16 and FP32.
static __device__ __forceinline__ void transport_rows_poison(void *to, uint64_t bytes,
                                                             uint64_t thread, uint64_t threads)
{
    for (uint64_t j = thread; j < bytes / 2; j += threads)
        ((uint16_t *)to)[j] = 0xffff;
}

// Counts blocks of this launch that are through, in a word that is 0 between launches. True for the
// last one; what the others wrote before is then visible to it (acquire and release of the same
// word), and with a release of its own to whoever acquires that. Called by one thread after the
// block's barrier.
static __device__ __forceinline__ bool transport_last_block(uint32_t *count)
{
    if (gridDim.x == 1)
        return true;
    cuda::atomic_ref<uint32_t, cuda::thread_scope_device> arrived(*count);
    if (arrived.fetch_add(1u, cuda::memory_order_acq_rel) + 1 != gridDim.x)
        return false;
    arrived.store(0u, cuda::memory_order_relaxed);
    return true;
}
#endif
