/* SPDX-License-Identifier: MIT */
/* Element conversion on the way into and out of the arena. Runs on the caller's thread. */
#include "library/convert.h"

#include <stdint.h>
#include <string.h>

size_t library_dtype_bytes(uint32_t dtype)
{
    switch (dtype) {
    case XPOOL_F32:
        return 4;
    case XPOOL_F16:
    case XPOOL_BF16:
        return 2;
    default:
        return 0;
    }
}

static inline uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

static inline float value_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

static inline uint32_t choose(uint32_t mask, uint32_t yes, uint32_t no)
{
    return (yes & mask) | (no & ~mask);
}

/* All ones where true. */
static inline uint32_t mask_of(int condition)
{
    return 0u - (uint32_t)(condition != 0);
}

static inline float f16_to_f32(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16, rest = half & 0x7fffu;
    /* Normal: the exponent's bias grows by 112. Infinity and NaN: by another 112. */
    uint32_t wide = (rest << 13) + (112u << 23);
    wide += mask_of(rest >= 0x7c00u) & (112u << 23);
    /* Subnormal: so many units of 2^-24, exactly. */
    uint32_t small = bits_of((float)(int32_t)rest * 0x1p-24f);
    return value_of(sign | choose(mask_of(rest < 0x0400u), small, wide));
}

static inline uint16_t f32_to_f16(float value)
{
    uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
    /* Normal: rebias, round on the 13 bits that go. A carry into the exponent is right. */
    uint32_t normal = (rest - (112u << 23) + 0x0fffu + (rest >> 13 & 1u)) >> 13;
    /* Below 2^-14: adding 0.5 leaves a sum whose last bit is 2^-24, so the addition itself rounds
     * to nearest even. */
    uint32_t small = bits_of(value_of(rest) + 0.5f) - bits_of(0.5f);
    uint32_t half = choose(mask_of(rest < 0x38800000u), small, normal);
    /* From 65520 on, halfway to the next step after the largest, it is infinity. */
    half = choose(mask_of(rest >= 0x477ff000u), 0x7c00u, half);
    half = choose(mask_of(rest > 0x7f800000u), 0x7e00u | (rest >> 13 & 0x03ffu), half);
    return (uint16_t)(sign | half);
}

static inline uint16_t f32_to_bf16(float value)
{
    uint32_t bits = bits_of(value);
    uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    uint32_t nan = bits >> 16 | 0x0040u;
    return (uint16_t)choose(mask_of((bits & 0x7fffffffu) > 0x7f800000u), nan, rounded);
}

void library_rows_to_f32(uint32_t dtype, const void *from, size_t elements, float *to)
{
    const uint16_t *restrict half = from;
    float *restrict out = to;
    if (dtype == XPOOL_F32)
        memcpy(to, from, elements * sizeof(float));
    else if (dtype == XPOOL_BF16)
        for (size_t i = 0; i < elements; i++)
            out[i] = value_of((uint32_t)half[i] << 16);
    else
        for (size_t i = 0; i < elements; i++)
            out[i] = f16_to_f32(half[i]);
}

void library_rows_from_f32(uint32_t dtype, const float *from, size_t elements, void *to)
{
    const float *restrict in = from;
    uint16_t *restrict half = to;
    if (dtype == XPOOL_F32)
        memcpy(to, from, elements * sizeof(float));
    else if (dtype == XPOOL_BF16)
        for (size_t i = 0; i < elements; i++)
            half[i] = f32_to_bf16(in[i]);
    else
        for (size_t i = 0; i < elements; i++)
            half[i] = f32_to_f16(in[i]);
}
