/* SPDX-License-Identifier: MIT */
/*
 * Scalar conversion of stored elements. Owns nothing, runs in any thread. The block layouts are
 * described in base/dtype.h; every product is rounded once to F32, as the gguf package does it, so
 * that results are equal bit for bit.
 */
#include "model/convert.h"

#include <math.h>
#include <string.h>

static uint32_t convert_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

static float convert_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

static uint16_t convert_load16(const uint8_t *data)
{
    return (uint16_t)(data[0] | data[1] << 8);
}

static void convert_store16(uint8_t *data, uint16_t value)
{
    data[0] = (uint8_t)value;
    data[1] = (uint8_t)(value >> 8);
}

float convert_f16_to_f32(uint16_t bits)
{
    uint32_t sign = (uint32_t)(bits & 0x8000u) << 16;
    uint32_t exponent = (bits >> 10) & 0x1fu, mantissa = bits & 0x3ffu;
    if (exponent == 0x1f)
        return convert_float(sign | 0x7f800000u | mantissa << 13);
    if (exponent == 0) {
        float value = (float)mantissa * 0x1p-24f;
        return sign ? -value : value;
    }
    return convert_float(sign | (exponent + 112) << 23 | mantissa << 13);
}

uint16_t convert_f32_to_f16(float value)
{
    uint32_t bits = convert_bits(value), sign = (bits >> 16) & 0x8000u;
    uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) /* rounds to 65536 or more */
        return (uint16_t)(sign | 0x7c00u);
    if (magnitude < 0x38800000u) {
        /* Subnormal: adding 0.5 lets the hardware round at the right bit. */
        float shifted = convert_float(magnitude) + 0.5f;
        return (uint16_t)(sign | (convert_bits(shifted) - 0x3f000000u));
    }
    uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return (uint16_t)(sign | ((rounded - 0x38000000u) >> 13));
}

uint16_t convert_f32_to_bf16(float value)
{
    uint32_t bits = convert_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(bits >> 16 | 0x40u);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static void convert_block_q8_0(const uint8_t *block, float *out)
{
    float d = convert_f16_to_f32(convert_load16(block));
    for (int i = 0; i < 32; i++)
        out[i] = (float)(int8_t)block[2 + i] * d;
}

static void convert_block_q4_0(const uint8_t *block, float *out)
{
    float d = convert_f16_to_f32(convert_load16(block));
    for (int i = 0; i < 16; i++) {
        out[i] = d * (float)((block[2 + i] & 15) - 8);
        out[i + 16] = d * (float)((block[2 + i] >> 4) - 8);
    }
}

static void convert_block_q4_1(const uint8_t *block, float *out)
{
    float d = convert_f16_to_f32(convert_load16(block));
    float m = convert_f16_to_f32(convert_load16(block + 2));
    for (int i = 0; i < 16; i++) {
        out[i] = d * (float)(block[4 + i] & 15) + m;
        out[i + 16] = d * (float)(block[4 + i] >> 4) + m;
    }
}

/* Sub-block j of 8: its 6-bit scale and minimum, packed in 12 bytes (gguf/quants.py, Q4_K). */
static void convert_q4_k_scale(const uint8_t *scales, int j, uint8_t *scale, uint8_t *minimum)
{
    if (j < 4) {
        *scale = scales[j] & 63;
        *minimum = scales[j + 4] & 63;
    } else {
        *scale = (uint8_t)((scales[j + 4] & 15) | ((scales[j - 4] >> 2) & 0x30));
        *minimum = (uint8_t)((scales[j + 4] >> 4) | ((scales[j] >> 2) & 0x30));
    }
}

static void convert_block_q4_k(const uint8_t *block, float *out)
{
    float d = convert_f16_to_f32(convert_load16(block));
    float dmin = convert_f16_to_f32(convert_load16(block + 2));
    const uint8_t *scales = block + 4, *quants = block + 16;
    for (int j = 0; j < 8; j++) {
        uint8_t scale, minimum;
        convert_q4_k_scale(scales, j, &scale, &minimum);
        float factor = d * (float)scale, offset = dmin * (float)minimum;
        for (int i = 0; i < 32; i++) {
            uint8_t pair = quants[j / 2 * 32 + i];
            uint8_t q = j % 2 ? pair >> 4 : pair & 15;
            out[j * 32 + i] = factor * (float)q - offset;
        }
    }
}

static void convert_block_q6_k(const uint8_t *block, float *out)
{
    const uint8_t *low = block, *high = block + 128, *scales = block + 192;
    float d = convert_f16_to_f32(convert_load16(block + 208));
    for (int i = 0; i < 256; i++) {
        /* Each half of 128 keeps its low nibbles in 64 bytes and its high pairs in 32. */
        int half = i / 128, at = i % 128;
        uint8_t nibble = low[half * 64 + at % 64];
        nibble = at < 64 ? nibble & 15 : nibble >> 4;
        uint8_t pair = (high[half * 32 + at % 32] >> (at / 32 * 2)) & 3;
        int q = (nibble | pair << 4) - 32;
        out[i] = d * (float)(int8_t)scales[i / 16] * (float)q;
    }
}

void convert_to_f32(xp_dtype_t dtype, const void *data, size_t elements, float *out)
{
    const uint8_t *bytes = data;
    void (*block_function)(const uint8_t *, float *) = NULL;
    switch (dtype) {
    case XP_DTYPE_F32:
        memcpy(out, data, elements * sizeof(float));
        return;
    case XP_DTYPE_F16:
        for (size_t i = 0; i < elements; i++)
            out[i] = convert_f16_to_f32(convert_load16(bytes + 2 * i));
        return;
    case XP_DTYPE_BF16:
        for (size_t i = 0; i < elements; i++)
            out[i] = convert_float((uint32_t)convert_load16(bytes + 2 * i) << 16);
        return;
    case XP_DTYPE_Q8_0:
        block_function = convert_block_q8_0;
        break;
    case XP_DTYPE_Q4_0:
        block_function = convert_block_q4_0;
        break;
    case XP_DTYPE_Q4_1:
        block_function = convert_block_q4_1;
        break;
    case XP_DTYPE_Q4_K:
        block_function = convert_block_q4_k;
        break;
    case XP_DTYPE_Q6_K:
        block_function = convert_block_q6_k;
        break;
    default:
        return;
    }
    uint32_t block = xp_dtype_block_elements(dtype), size = xp_dtype_block_bytes(dtype);
    for (size_t i = 0; i < elements / block; i++)
        block_function(bytes + i * size, out + i * block);
}

/* ---- To quantised blocks ----------------------------------------------------------------------
 */

static int convert_clamp(float value, int low, int high)
{
    int rounded = (int)lrintf(value);
    return rounded < low ? low : (rounded > high ? high : rounded);
}

static void convert_range(const float *values, int count, float *minimum, float *maximum)
{
    *minimum = *maximum = values[0];
    for (int i = 1; i < count; i++) {
        *minimum = values[i] < *minimum ? values[i] : *minimum;
        *maximum = values[i] > *maximum ? values[i] : *maximum;
    }
}

/* The element of the largest size, with its sign. */
static float convert_extreme(const float *values, int count)
{
    float extreme = 0;
    for (int i = 0; i < count; i++)
        extreme = fabsf(values[i]) > fabsf(extreme) ? values[i] : extreme;
    return extreme;
}

static void convert_to_q8_0(const float *values, uint8_t *block)
{
    float d = fabsf(convert_extreme(values, 32)) / 127, inverse = d > 0 ? 1 / d : 0;
    convert_store16(block, convert_f32_to_f16(d));
    for (int i = 0; i < 32; i++)
        block[2 + i] = (uint8_t)(int8_t)convert_clamp(values[i] * inverse, -127, 127);
}

static void convert_to_q4_0(const float *values, uint8_t *block)
{
    float d = convert_extreme(values, 32) / -8, inverse = d != 0 ? 1 / d : 0;
    convert_store16(block, convert_f32_to_f16(d));
    for (int i = 0; i < 16; i++) {
        int low = convert_clamp(values[i] * inverse + 8, 0, 15);
        int high = convert_clamp(values[i + 16] * inverse + 8, 0, 15);
        block[2 + i] = (uint8_t)(low | high << 4);
    }
}

static void convert_to_q4_1(const float *values, uint8_t *block)
{
    float minimum, maximum;
    convert_range(values, 32, &minimum, &maximum);
    float d = (maximum - minimum) / 15, inverse = d > 0 ? 1 / d : 0;
    convert_store16(block, convert_f32_to_f16(d));
    convert_store16(block + 2, convert_f32_to_f16(minimum));
    for (int i = 0; i < 16; i++) {
        int low = convert_clamp((values[i] - minimum) * inverse, 0, 15);
        int high = convert_clamp((values[i + 16] - minimum) * inverse, 0, 15);
        block[4 + i] = (uint8_t)(low | high << 4);
    }
}

static void convert_to_q4_k(const float *values, uint8_t *block)
{
    float factor[8], offset[8], largest_factor = 0, largest_offset = 0;
    int scales[8], minimums[8];
    for (int j = 0; j < 8; j++) {
        float minimum, maximum;
        convert_range(values + j * 32, 32, &minimum, &maximum);
        minimum = minimum < 0 ? minimum : 0; /* the format subtracts a non-negative offset */
        factor[j] = (maximum - minimum) / 15;
        offset[j] = -minimum;
        largest_factor = fmaxf(largest_factor, factor[j]);
        largest_offset = fmaxf(largest_offset, offset[j]);
    }
    uint16_t d_bits = convert_f32_to_f16(largest_factor / 63);
    uint16_t dmin_bits = convert_f32_to_f16(largest_offset / 63);
    float d = convert_f16_to_f32(d_bits), dmin = convert_f16_to_f32(dmin_bits);
    memset(block, 0, 144);
    convert_store16(block, d_bits);
    convert_store16(block + 2, dmin_bits);
    for (int j = 0; j < 8; j++) {
        scales[j] = d > 0 ? convert_clamp(factor[j] / d, 0, 63) : 0;
        minimums[j] = dmin > 0 ? convert_clamp(offset[j] / dmin, 0, 63) : 0;
        if (j < 4) {
            block[4 + j] |= (uint8_t)scales[j];
            block[8 + j] |= (uint8_t)minimums[j];
        } else {
            block[8 + j] |= (uint8_t)((scales[j] & 15) | (minimums[j] & 15) << 4);
            block[j] |= (uint8_t)((scales[j] >> 4) << 6);
            block[4 + j] |= (uint8_t)((minimums[j] >> 4) << 6);
        }
        float step = d * (float)scales[j], base = dmin * (float)minimums[j];
        for (int i = 0; i < 32; i++) {
            int q = step > 0 ? convert_clamp((values[j * 32 + i] + base) / step, 0, 15) : 0;
            block[16 + j / 2 * 32 + i] |= (uint8_t)(q << (j % 2 * 4));
        }
    }
}

static void convert_to_q6_k(const float *values, uint8_t *block)
{
    float factor[16], largest = 0;
    for (int j = 0; j < 16; j++) {
        factor[j] = convert_extreme(values + j * 16, 16) / -32;
        largest = fabsf(factor[j]) > fabsf(largest) ? factor[j] : largest;
    }
    uint16_t d_bits = convert_f32_to_f16(largest / -128);
    float d = convert_f16_to_f32(d_bits);
    memset(block, 0, 210);
    convert_store16(block + 208, d_bits);
    for (int j = 0; j < 16; j++) {
        int scale = d != 0 ? convert_clamp(factor[j] / d, -128, 127) : 0;
        float step = d * (float)scale;
        block[192 + j] = (uint8_t)(int8_t)scale;
        for (int k = 0; k < 16; k++) {
            int i = j * 16 + k, half = i / 128, at = i % 128;
            int q = step != 0 ? convert_clamp(values[i] / step + 32, 0, 63) : 32;
            block[half * 64 + at % 64] |= (uint8_t)((q & 15) << (at < 64 ? 0 : 4));
            block[128 + half * 32 + at % 32] |= (uint8_t)((q >> 4) << (at / 32 * 2));
        }
    }
}

void convert_from_f32(xp_dtype_t dtype, const float *values, size_t elements, void *out)
{
    uint8_t *bytes = out;
    void (*block_function)(const float *, uint8_t *) = NULL;
    switch (dtype) {
    case XP_DTYPE_F32:
        memcpy(out, values, elements * sizeof(float));
        return;
    case XP_DTYPE_F16:
        for (size_t i = 0; i < elements; i++)
            convert_store16(bytes + 2 * i, convert_f32_to_f16(values[i]));
        return;
    case XP_DTYPE_BF16:
        for (size_t i = 0; i < elements; i++)
            convert_store16(bytes + 2 * i, convert_f32_to_bf16(values[i]));
        return;
    case XP_DTYPE_Q8_0:
        block_function = convert_to_q8_0;
        break;
    case XP_DTYPE_Q4_0:
        block_function = convert_to_q4_0;
        break;
    case XP_DTYPE_Q4_1:
        block_function = convert_to_q4_1;
        break;
    case XP_DTYPE_Q4_K:
        block_function = convert_to_q4_k;
        break;
    case XP_DTYPE_Q6_K:
        block_function = convert_to_q6_k;
        break;
    default:
        return;
    }
    uint32_t block = xp_dtype_block_elements(dtype), size = xp_dtype_block_bytes(dtype);
    for (size_t i = 0; i < elements / block; i++)
        block_function(values + i * block, bytes + i * size);
}
