// SPDX-License-Identifier: MIT
// Shows that a context still computes: after a failure the Instance of instance.c launches it.
#include <stdint.h>

extern "C" __global__ void instance_mark(uint32_t *words, uint32_t count, uint32_t seed)
{
    const uint32_t at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count)
        words[at] = seed * 2654435761u + at;
}
