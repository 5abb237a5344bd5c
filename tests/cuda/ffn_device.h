/* SPDX-License-Identifier: MIT */
/* Seeded values, the same on host and device: uniform in [-1, 1). */
#ifndef XPOOL_TESTS_CUDA_FFN_DEVICE_H
#define XPOOL_TESTS_CUDA_FFN_DEVICE_H

#include <stdint.h>

#ifdef __CUDACC__
#define FFN_KIT_FUNCTION static inline __host__ __device__
#else
#define FFN_KIT_FUNCTION static inline
#endif

FFN_KIT_FUNCTION float ffn_kit_value(uint64_t seed, uint64_t index)
{
    uint64_t x = seed * 0x9e3779b97f4a7c15ull + (index + 1) * 0xd1342543de82ef95ull;
    x ^= x >> 32;
    x *= 0xdaba0b6eb09322e3ull;
    x ^= x >> 29;
    return (float)(int32_t)(uint32_t)(x >> 32) * (1.0f / 2147483648.0f);
}
#endif
