/* SPDX-License-Identifier: MIT */
/*
 * Re-lays matrices out into panels (layout in ops.h) and reads single rows back.
 *
 * Packing runs at load time on a loader thread and takes one temporary buffer of 16 rows. It moves
 * bits only: no weight changes its value.
 */
#include <stdlib.h>
#include <string.h>

#include "kernels/ops.h"
#include "kernels/quant.h"

bool kernels_pack_supported(xp_dtype_t dtype, uint32_t columns)
{
    switch (dtype) {
    case XP_DTYPE_F32:
    case XP_DTYPE_F16:
        return true;
    case XP_DTYPE_BF16:
        return columns % 2 == 0;
    case XP_DTYPE_Q8_0:
    case XP_DTYPE_Q4_0:
    case XP_DTYPE_Q4_1:
    case XP_DTYPE_Q4_K:
    case XP_DTYPE_Q6_K:
        return columns % xp_dtype_block_elements(dtype) == 0;
    default:
        return false;
    }
}

static void pack_store_u32(uint8_t *at, uint32_t value)
{
    memcpy(at, &value, sizeof(value));
}

/* Eight nibbles of ascending columns in one word, lowest first. */
static uint32_t pack_nibbles(const uint8_t *integers)
{
    uint32_t word = 0;
    for (uint32_t j = 0; j < 8; j++)
        word |= (uint32_t)(integers[j] & 15u) << (4 * j);
    return word;
}

static void pack_q4_lane(const uint8_t *block, uint32_t header_bytes, uint32_t lane, uint8_t *out)
{
    uint8_t integers[32];
    for (uint32_t i = 0; i < 16; i++) {
        integers[i] = block[header_bytes + i] & 15u;
        integers[16 + i] = block[header_bytes + i] >> 4;
    }
    for (uint32_t h = 0; h < header_bytes; h += 2)
        memcpy(out + 16 * h + 2 * lane, block + h, 2);
    for (uint32_t g = 0; g < 4; g++)
        pack_store_u32(out + 16 * header_bytes + 64 * g + 4 * lane, pack_nibbles(integers + 8 * g));
}

static void pack_q4_k_lane(const uint8_t *block, uint32_t lane, uint8_t *out)
{
    uint32_t fields[16], words[3] = {0, 0, 0};
    for (uint32_t s = 0; s < 8; s++)
        quant_q4_k_scale(block + 4, s, &fields[s], &fields[8 + s]);
    for (uint32_t f = 0; f < 15; f++)
        words[f / 5] |= fields[f] << (6 * (f % 5));
    for (uint32_t w = 0; w < 3; w++)
        words[w] |= (fields[15] >> (2 * w) & 3u) << 30;
    memcpy(out + 2 * lane, block, 2);
    memcpy(out + 32 + 2 * lane, block + 2, 2);
    for (uint32_t w = 0; w < 3; w++)
        pack_store_u32(out + 64 + 64 * w + 4 * lane, words[w]);
    uint8_t integers[256];
    quant_q4_k_integers(block, integers);
    for (uint32_t g = 0; g < 32; g++)
        pack_store_u32(out + 256 + 64 * g + 4 * lane, pack_nibbles(integers + 8 * g));
}

static void pack_q6_k_lane(const uint8_t *block, uint32_t lane, uint8_t *out)
{
    memcpy(out + 2 * lane, block + 208, 2);
    for (uint32_t s = 0; s < 16; s++)
        out[32 + 16 * s + lane] = block[192 + s];
    uint8_t integers[256];
    quant_q6_k_integers(block, integers);
    for (uint32_t g = 0; g < 32; g++)
        pack_store_u32(out + 288 + 64 * g + 4 * lane, pack_nibbles(integers + 8 * g));
    for (uint32_t g = 0; g < 16; g++) {
        uint32_t word = 0;
        for (uint32_t j = 0; j < 16; j++)
            word |= (uint32_t)(integers[16 * g + j] >> 4) << (2 * j);
        pack_store_u32(out + 288 + 2048 + 64 * g + 4 * lane, word);
    }
}

/* One row of `columns` into lane `lane` of its panel. */
static void pack_lane(xp_dtype_t dtype, const uint8_t *row, uint32_t columns, uint32_t lane,
                      uint8_t *panel)
{
    uint32_t elements = xp_dtype_block_elements(dtype);
    size_t bytes = xp_dtype_block_bytes(dtype);
    for (uint32_t b = 0; b < columns / elements; b++) {
        const uint8_t *block = row + b * bytes;
        uint8_t *out = panel + b * bytes * KERNELS_PANEL;
        switch (dtype) {
        case XP_DTYPE_F32:
            memcpy(out + 4 * lane, block, 4);
            break;
        case XP_DTYPE_F16:
            memcpy(out + 2 * lane, block, 2);
            break;
        case XP_DTYPE_BF16:
            memcpy(panel + (size_t)(b / 2) * 64 + 4 * lane + 2 * (b % 2), block, 2);
            break;
        case XP_DTYPE_Q8_0:
            memcpy(out + 2 * lane, block, 2);
            for (uint32_t i = 0; i < 32; i++)
                out[32 + 16 * i + lane] = block[2 + i];
            break;
        case XP_DTYPE_Q4_0:
            pack_q4_lane(block, 2, lane, out);
            break;
        case XP_DTYPE_Q4_1:
            pack_q4_lane(block, 4, lane, out);
            break;
        case XP_DTYPE_Q4_K:
            pack_q4_k_lane(block, lane, out);
            break;
        default:
            pack_q6_k_lane(block, lane, out);
            break;
        }
    }
}

xp_status_t kernels_matrix_pack(kernels_matrix_t *w)
{
    if (w->packed || !kernels_pack_supported(w->dtype, w->columns))
        return XP_OK;
    size_t row_bytes = xp_dtype_row_bytes(w->dtype, w->columns);
    size_t panel_bytes = row_bytes * KERNELS_PANEL;
    uint32_t panels = w->rows / KERNELS_PANEL;
    if (panels > 0 && panel_bytes > 0) {
        uint8_t *copy = malloc(panel_bytes);
        if (!copy)
            return xp_fail(XP_NO_MEMORY, "no memory to pack a matrix (%zu bytes)", panel_bytes);
        for (uint32_t p = 0; p < panels; p++) {
            uint8_t *panel = (uint8_t *)w->data + p * panel_bytes;
            memcpy(copy, panel, panel_bytes);
            for (uint32_t lane = 0; lane < KERNELS_PANEL; lane++)
                pack_lane(w->dtype, copy + lane * row_bytes, w->columns, lane, panel);
        }
        free(copy);
    }
    w->packed = true;
    return XP_OK;
}

static void pack_unpack_lane_q4(const uint8_t *words, uint32_t groups, uint32_t lane, uint8_t *out)
{
    for (uint32_t g = 0; g < groups; g++) {
        uint32_t word = quant_load_u32(words + 64 * g + 4 * lane);
        for (uint32_t j = 0; j < 8; j++)
            out[8 * g + j] = word >> (4 * j) & 15u;
    }
}

static uint32_t pack_q4_k_field(const uint8_t *words, uint32_t lane, uint32_t field)
{
    uint32_t s[3];
    for (uint32_t w = 0; w < 3; w++)
        s[w] = quant_load_u32(words + 64 * w + 4 * lane);
    if (field < 15)
        return s[field / 5] >> (6 * (field % 5)) & 63u;
    return s[0] >> 30 | (s[1] >> 30) << 2 | (s[2] >> 30) << 4;
}

/* One block of one lane of a packed panel. */
static void pack_decode_block(xp_dtype_t dtype, const uint8_t *block, uint32_t lane, float *out)
{
    float d = quant_from_f16(quant_load_u16(block + 2 * lane));
    uint8_t q[256];
    switch (dtype) {
    case XP_DTYPE_Q8_0:
        for (uint32_t i = 0; i < 32; i++)
            out[i] = d * (float)(int8_t)block[32 + 16 * i + lane];
        break;
    case XP_DTYPE_Q4_0:
        pack_unpack_lane_q4(block + 32, 4, lane, q);
        for (uint32_t i = 0; i < 32; i++)
            out[i] = d * (float)((int)q[i] - 8);
        break;
    case XP_DTYPE_Q4_1: {
        float m = quant_from_f16(quant_load_u16(block + 32 + 2 * lane));
        pack_unpack_lane_q4(block + 64, 4, lane, q);
        for (uint32_t i = 0; i < 32; i++)
            out[i] = d * (float)q[i] + m;
        break;
    }
    case XP_DTYPE_Q4_K: {
        float dmin = quant_from_f16(quant_load_u16(block + 32 + 2 * lane));
        pack_unpack_lane_q4(block + 256, 32, lane, q);
        for (uint32_t s = 0; s < 8; s++) {
            float ds = d * (float)pack_q4_k_field(block + 64, lane, s);
            float m = dmin * (float)pack_q4_k_field(block + 64, lane, 8 + s);
            for (uint32_t i = 0; i < 32; i++)
                out[32 * s + i] = ds * (float)q[32 * s + i] - m;
        }
        break;
    }
    default:
        pack_unpack_lane_q4(block + 288, 32, lane, q);
        for (uint32_t s = 0; s < 16; s++) {
            float ds = d * (float)(int8_t)block[32 + 16 * s + lane];
            uint32_t high = quant_load_u32(block + 288 + 2048 + 64 * s + 4 * lane);
            for (uint32_t i = 0; i < 16; i++) {
                int integer = (int)(q[16 * s + i] | (high >> (2 * i) & 3u) << 4) - 32;
                out[16 * s + i] = ds * (float)integer;
            }
        }
        break;
    }
}

void kernels_pack_decode_lane(xp_dtype_t dtype, const uint8_t *panel, uint32_t first,
                              uint32_t count, uint32_t lane, float *out)
{
    const uint32_t last = first + count;
    switch (dtype) {
    case XP_DTYPE_F32:
        for (uint32_t k = first; k < last; k++)
            memcpy(out++, panel + 64 * (size_t)k + 4 * lane, 4);
        return;
    case XP_DTYPE_F16:
        for (uint32_t k = first; k < last; k++)
            *out++ = quant_from_f16(quant_load_u16(panel + 32 * (size_t)k + 2 * lane));
        return;
    case XP_DTYPE_BF16:
        for (uint32_t k = first; k < last; k++)
            *out++ = quant_from_bf16(
                quant_load_u16(panel + 64 * (size_t)(k / 2) + 4 * lane + 2 * (k % 2)));
        return;
    default:
        break;
    }
    uint32_t elements = xp_dtype_block_elements(dtype);
    size_t bytes = (size_t)xp_dtype_block_bytes(dtype) * KERNELS_PANEL;
    float whole[256];
    for (uint32_t k = first; k < last;) {
        uint32_t skip = k % elements,
                 take = elements - skip < last - k ? elements - skip : last - k;
        pack_decode_block(dtype, panel + k / elements * bytes, lane, whole);
        memcpy(out, whole + skip, take * sizeof(float));
        k += take;
        out += take;
    }
}
