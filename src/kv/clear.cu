// SPDX-License-Identifier: MIT
// Clearing of a grant by few blocks: the driver's memset takes every multiprocessor and all of the
// memory's bandwidth, and others on the GPU wait for it.
#include <stdint.h>

extern "C" __global__ void __launch_bounds__(1024) kv_clear(uint4 *at, uint64_t count)
{
    const uint64_t threads = (uint64_t)gridDim.x * blockDim.x;
    const uint4 zero = {0, 0, 0, 0};
#pragma unroll 4
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += threads)
        __stcs(at + i, zero);
}
