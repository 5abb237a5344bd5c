/* SPDX-License-Identifier: MIT */
/*
 * Independent references for the kernel tests: seeded random data, and decoders of every weight
 * dtype written from the format's definition in double arithmetic, element by element. They share
 * no code with src/kernels.
 */
#ifndef XPOOL_TESTS_KERNELS_REFERENCE_H
#define XPOOL_TESTS_KERNELS_REFERENCE_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"

static inline uint64_t reference_next(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* Uniform in [-1, 1). */
static inline float reference_uniform(uint64_t *state)
{
    return (float)((double)(reference_next(state) >> 11) * 0x1p-52 - 1.0);
}

static inline double reference_half(const uint8_t *bytes)
{
    unsigned bits = (unsigned)bytes[0] | (unsigned)bytes[1] << 8;
    int exponent = (int)(bits >> 10 & 31u), fraction = (int)(bits & 1023u);
    double value = exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
    return bits & 0x8000u ? -value : value;
}

/* A normal, finite binary16 value near `value` (truncated); zero for one too small. */
static inline void reference_put_half(uint8_t *bytes, double value)
{
    int exponent;
    double fraction = frexp(fabs(value), &exponent);
    unsigned bits = 0;
    if (fabs(value) >= 0x1p-14)
        bits = (unsigned)(exponent + 14) << 10 | ((unsigned)(fraction * 2048.0) & 1023u);
    if (value < 0.0)
        bits |= 0x8000u;
    bytes[0] = (uint8_t)bits;
    bytes[1] = (uint8_t)(bits >> 8);
}

static inline double reference_element(xp_dtype_t dtype, const uint8_t *row, uint32_t k)
{
    const uint8_t *b;
    float single;
    switch (dtype) {
    case XP_DTYPE_F32:
        memcpy(&single, row + 4 * (size_t)k, 4);
        return single;
    case XP_DTYPE_F16:
        return reference_half(row + 2 * (size_t)k);
    case XP_DTYPE_BF16: {
        uint8_t bytes[4] = {0, 0, row[2 * (size_t)k], row[2 * (size_t)k + 1]};
        memcpy(&single, bytes, 4);
        return single;
    }
    case XP_DTYPE_Q8_0:
        b = row + (size_t)(k / 32) * 34;
        return reference_half(b) * (int8_t)b[2 + k % 32];
    case XP_DTYPE_Q4_0:
    case XP_DTYPE_Q4_1: {
        int header = dtype == XP_DTYPE_Q4_0 ? 2 : 4;
        b = row + (size_t)(k / 32) * (size_t)(16 + header);
        int nibble = k % 32 < 16 ? b[header + k % 16] % 16 : b[header + k % 16] / 16;
        if (dtype == XP_DTYPE_Q4_0)
            return reference_half(b) * (nibble - 8);
        return reference_half(b) * nibble + reference_half(b + 2);
    }
    case XP_DTYPE_Q4_K: {
        b = row + (size_t)(k / 256) * 144;
        uint32_t i = k % 256, s = i / 32;
        const uint8_t *packed = b + 4;
        int scale, minimum;
        if (s < 4) {
            scale = packed[s] % 64;
            minimum = packed[4 + s] % 64;
        } else {
            scale = packed[4 + s] % 16 + 16 * (packed[s - 4] / 64);
            minimum = packed[4 + s] / 16 + 16 * (packed[s] / 64);
        }
        /* 64 columns share 32 bytes: low nibbles first. */
        uint8_t byte = b[16 + 32 * (i / 64) + i % 32];
        int nibble = i % 64 < 32 ? byte % 16 : byte / 16;
        return reference_half(b) * scale * nibble - reference_half(b + 2) * minimum;
    }
    case XP_DTYPE_Q6_K: {
        b = row + (size_t)(k / 256) * 210;
        uint32_t i = k % 256, half = i / 128, j = i % 128;
        uint8_t low = b[64 * half + j % 64];
        int nibble = j < 64 ? low % 16 : low / 16;
        int upper = b[128 + 32 * half + j % 32] >> (2 * (j / 32)) & 3;
        return reference_half(b + 208) * (int8_t)b[192 + i / 16] * (nibble + 16 * upper - 32);
    }
    default:
        abort();
    }
}

/* Fills `rows` rows of random weights of size about 1/16 in checkpoint order. */
static inline void reference_fill(xp_dtype_t dtype, uint8_t *data, uint32_t rows, uint32_t columns,
                                  uint64_t *state)
{
    uint32_t block = xp_dtype_block_bytes(dtype);
    size_t blocks = (size_t)rows * columns / xp_dtype_block_elements(dtype);
    for (size_t i = 0; i < blocks; i++, data += block) {
        for (uint32_t j = 0; j < block; j++)
            data[j] = (uint8_t)reference_next(state);
        float value = reference_uniform(state) / 16;
        double d = (1.5 + (double)reference_uniform(state)) / 128;
        switch (dtype) {
        case XP_DTYPE_F32:
            memcpy(data, &value, 4);
            break;
        case XP_DTYPE_F16:
            reference_put_half(data, value);
            break;
        case XP_DTYPE_BF16:
            memcpy(data, (const uint8_t *)&value + 2, 2);
            break;
        case XP_DTYPE_Q8_0:
            reference_put_half(data, d / 16);
            break;
        case XP_DTYPE_Q4_0:
            reference_put_half(data, d);
            break;
        case XP_DTYPE_Q4_1:
            reference_put_half(data, d);
            reference_put_half(data + 2, -7.5 * d + (double)value);
            break;
        case XP_DTYPE_Q4_K:
            reference_put_half(data, d / 32);
            reference_put_half(data + 2, d / 4);
            break;
        default:
            reference_put_half(data + 208, d / 512);
            break;
        }
    }
}
#endif
