/* SPDX-License-Identifier: MIT */
/* Scalar conversions of plain elements, and decoding of row-major (checkpoint order) rows to FP32.
 */
#ifndef XPOOL_KERNELS_QUANT_H
#define XPOOL_KERNELS_QUANT_H

#include <stdint.h>
#include <string.h>

#include "base/dtype.h"

static inline float quant_from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

static inline uint32_t quant_to_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

static inline float quant_from_bf16(uint16_t half)
{
    return quant_from_bits((uint32_t)half << 16);
}

/* Exact for every binary16 value, subnormals, infinities and NaN included. */
static inline float quant_from_f16(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    uint32_t magnitude = half & 0x7fffu;
    if (magnitude >= 0x7c00u)
        return quant_from_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    if (magnitude >= 0x0400u)
        return quant_from_bits(sign | ((magnitude << 13) + ((127u - 15u) << 23)));
    /* Subnormal: magnitude counts units of 2^-24, which FP32 holds as a normal number. */
    return quant_from_bits(sign | quant_to_bits((float)magnitude * 0x1p-24f));
}

static inline uint16_t quant_load_u16(const uint8_t *bytes)
{
    uint16_t value;
    memcpy(&value, bytes, sizeof(value));
    return value;
}

static inline uint32_t quant_load_u32(const uint8_t *bytes)
{
    uint32_t value;
    memcpy(&value, bytes, sizeof(value));
    return value;
}

uint16_t quant_to_bf16(float value); /* round to nearest even; a NaN stays a quiet NaN */
uint16_t quant_to_f16(float value);

/* Scale and minimum number `index` (0..7) of a Q4_K block's 12 packed bytes, 6 bits each. */
static inline void quant_q4_k_scale(const uint8_t *packed, uint32_t index, uint32_t *scale_out,
                                    uint32_t *minimum_out)
{
    if (index < 4) {
        *scale_out = packed[index] & 63u;
        *minimum_out = packed[index + 4] & 63u;
    } else {
        *scale_out = (packed[index + 4] & 15u) | (uint32_t)(packed[index - 4] >> 6) << 4;
        *minimum_out = (uint32_t)(packed[index + 4] >> 4) | (uint32_t)(packed[index] >> 6) << 4;
    }
}

/* The integer weights of one 256-element block in order: 0..15 for Q4_K, 0..63 for Q6_K. */
void quant_q4_k_integers(const uint8_t *block, uint8_t *out);
void quant_q6_k_integers(const uint8_t *block, uint8_t *out);

/* Elements [first, first + count) of one row in checkpoint order. The products are ordered so that
 * each weight is rounded at most once and equals the value that the gguf Python package computes.
 */
void quant_decode_row(xp_dtype_t dtype, const uint8_t *row, uint32_t first, uint32_t count,
                      float *out);
#endif
