/* SPDX-License-Identifier: MIT */
/*
 * Decoding of plain and block-quantised rows in checkpoint order, in plain C.
 *
 * Pure functions, any thread. This is the reference form that every packed form must agree with,
 * and the path of rows that are not packed.
 */
#include "kernels/quant.h"

#include "base/status.h"

uint16_t quant_to_bf16(float value)
{
    uint32_t bits = quant_to_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(bits >> 16 | 0x40u);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

uint16_t quant_to_f16(float value)
{
    uint32_t bits = quant_to_bits(value);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000u);
    uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu));
    if (magnitude >= 0x477ff000u) /* 65520 and more round to infinity */
        return sign | 0x7c00u;
    if (magnitude >= 0x38800000u) { /* normal in binary16: 2^-14 and more */
        uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
        return (uint16_t)(sign | ((rounded - ((127u - 15u) << 23)) >> 13));
    }
    /* Subnormal: adding 0.5 aligns the binary point so that the FPU itself rounds to 2^-24. */
    float aligned = quant_from_bits(magnitude) + 0.5f;
    return (uint16_t)(sign | (quant_to_bits(aligned) - 0x3f000000u));
}

void quant_q4_k_integers(const uint8_t *block, uint8_t *out)
{
    const uint8_t *q = block + 16;
    for (uint32_t half = 0; half < 4; half++, q += 32, out += 64)
        for (uint32_t i = 0; i < 32; i++) {
            out[i] = q[i] & 15u;
            out[32 + i] = q[i] >> 4;
        }
}

void quant_q6_k_integers(const uint8_t *block, uint8_t *out)
{
    const uint8_t *low = block, *high = block + 128;
    for (uint32_t half = 0; half < 2; half++, low += 64, high += 32, out += 128)
        for (uint32_t i = 0; i < 32; i++) {
            uint32_t h = high[i];
            out[i] = (uint8_t)((low[i] & 15u) | (h & 3u) << 4);
            out[32 + i] = (uint8_t)((low[32 + i] & 15u) | (h >> 2 & 3u) << 4);
            out[64 + i] = (uint8_t)(low[i] >> 4 | (h >> 4 & 3u) << 4);
            out[96 + i] = (uint8_t)(low[32 + i] >> 4 | (h >> 6) << 4);
        }
}

static void quant_decode_q8_0(const uint8_t *block, float *out)
{
    float d = quant_from_f16(quant_load_u16(block));
    for (uint32_t i = 0; i < 32; i++)
        out[i] = d * (float)(int8_t)block[2 + i];
}

static void quant_decode_q4_0(const uint8_t *block, float *out)
{
    float d = quant_from_f16(quant_load_u16(block));
    for (uint32_t i = 0; i < 16; i++) {
        out[i] = d * (float)((int)(block[2 + i] & 15u) - 8);
        out[16 + i] = d * (float)((int)(block[2 + i] >> 4) - 8);
    }
}

static void quant_decode_q4_1(const uint8_t *block, float *out)
{
    float d = quant_from_f16(quant_load_u16(block));
    float m = quant_from_f16(quant_load_u16(block + 2));
    for (uint32_t i = 0; i < 16; i++) {
        /* The product of 11 and 4 bits is exact, so only the sum rounds. */
        out[i] = d * (float)(block[4 + i] & 15u) + m;
        out[16 + i] = d * (float)(block[4 + i] >> 4) + m;
    }
}

static void quant_decode_q4_k(const uint8_t *block, float *out)
{
    float d = quant_from_f16(quant_load_u16(block));
    float dmin = quant_from_f16(quant_load_u16(block + 2));
    uint8_t q[256];
    quant_q4_k_integers(block, q);
    for (uint32_t s = 0; s < 8; s++) {
        uint32_t scale, minimum;
        quant_q4_k_scale(block + 4, s, &scale, &minimum);
        float ds = d * (float)scale, m = dmin * (float)minimum;
        for (uint32_t i = 0; i < 32; i++)
            out[32 * s + i] = ds * (float)q[32 * s + i] - m;
    }
}

static void quant_decode_q6_k(const uint8_t *block, float *out)
{
    float d = quant_from_f16(quant_load_u16(block + 208));
    const int8_t *scales = (const int8_t *)(block + 192);
    uint8_t q[256];
    quant_q6_k_integers(block, q);
    for (uint32_t s = 0; s < 16; s++) {
        float ds = d * (float)scales[s];
        for (uint32_t i = 0; i < 16; i++)
            out[16 * s + i] = ds * (float)((int)q[16 * s + i] - 32);
    }
}

void quant_decode_row(xp_dtype_t dtype, const uint8_t *row, uint32_t first, uint32_t count,
                      float *out)
{
    static void (*const decoders[XP_DTYPE_COUNT])(const uint8_t *, float *) = {
        [XP_DTYPE_Q8_0] = quant_decode_q8_0, [XP_DTYPE_Q4_0] = quant_decode_q4_0,
        [XP_DTYPE_Q4_1] = quant_decode_q4_1, [XP_DTYPE_Q4_K] = quant_decode_q4_k,
        [XP_DTYPE_Q6_K] = quant_decode_q6_k,
    };
    switch (dtype) {
    case XP_DTYPE_F32:
        memcpy(out, row + 4 * (size_t)first, 4 * (size_t)count);
        return;
    case XP_DTYPE_F16:
        for (uint32_t i = 0; i < count; i++)
            out[i] = quant_from_f16(quant_load_u16(row + 2 * ((size_t)first + i)));
        return;
    case XP_DTYPE_BF16:
        for (uint32_t i = 0; i < count; i++)
            out[i] = quant_from_bf16(quant_load_u16(row + 2 * ((size_t)first + i)));
        return;
    default:
        break;
    }
    XP_ASSERT((unsigned)dtype < XP_DTYPE_COUNT && decoders[dtype]);
    uint32_t elements = xp_dtype_block_elements(dtype), bytes = xp_dtype_block_bytes(dtype);
    float whole[256];
    for (uint32_t k = first; k < first + count;) {
        uint32_t skip = k % elements, take = elements - skip;
        const uint8_t *block = row + (size_t)(k / elements) * bytes;
        if (take > first + count - k)
            take = first + count - k;
        if (take == elements) {
            decoders[dtype](block, out);
        } else {
            decoders[dtype](block, whole);
            memcpy(out, whole + skip, take * sizeof(float));
        }
        k += take;
        out += take;
    }
}
