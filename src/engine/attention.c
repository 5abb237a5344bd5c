/* SPDX-License-Identifier: MIT */
/*
 * Attention of one tile and the plain C inner loops. Runs on any member of the engine's team; owns
 * nothing and allocates nothing.
 */
#include "engine/attention.h"

#include <string.h>

#include "kernels/kernels.h"

#define SCORE_SPACE_BYTES (4u << 20)
#define MAX_TILE_ROWS     16u

static void scores_plain(const float *query, uint32_t heads, const float *keys, uint32_t count,
                         uint32_t head_dim, float scale, float *scores, size_t score_stride)
{
    for (uint32_t h = 0; h < heads; h++)
        for (uint32_t j = 0; j < count; j++) {
            const float *q = query + (size_t)h * head_dim, *key = keys + (size_t)j * head_dim;
            /* Four partial sums: shorter chains lose less to rounding. */
            float sum[4] = {0};
            uint32_t d = 0;
            for (; d + 4 <= head_dim; d += 4)
                for (uint32_t i = 0; i < 4; i++)
                    sum[i] += q[d + i] * key[d + i];
            for (; d < head_dim; d++)
                sum[0] += q[d] * key[d];
            scores[h * score_stride + j] = ((sum[0] + sum[1]) + (sum[2] + sum[3])) * scale;
        }
}

static void accumulate_plain(float *out, const float *weights, size_t weight_stride, uint32_t heads,
                             const float *values, uint32_t count, uint32_t head_dim)
{
    for (uint32_t h = 0; h < heads; h++)
        for (uint32_t j = 0; j < count; j++)
            for (uint32_t d = 0; d < head_dim; d++)
                out[h * head_dim + d] +=
                    weights[h * weight_stride + j] * values[(size_t)j * head_dim + d];
}

const engine_attention_ops_t engine_attention_plain = {.scores = scores_plain,
                                                       .accumulate = accumulate_plain};

const engine_attention_ops_t *engine_attention_select(void)
{
#if defined(__x86_64__)
    switch (kernels_selected()) {
    case KERNELS_AVX512:
        return &engine_attention_avx512;
    case KERNELS_AVX2:
        return &engine_attention_avx2;
    default:
        break;
    }
#endif
    return &engine_attention_plain;
}

static uint32_t score_stride(uint32_t max_context)
{
    return (max_context + ENGINE_ATTENTION_BLOCK - 1) / ENGINE_ATTENTION_BLOCK *
           ENGINE_ATTENTION_BLOCK;
}

uint32_t engine_attention_tile_rows(uint32_t group, uint32_t max_context)
{
    uint64_t row_bytes = (uint64_t)group * score_stride(max_context) * sizeof(float);
    uint64_t rows = SCORE_SPACE_BYTES / row_bytes;
    return rows < 1 ? 1 : rows > MAX_TILE_ROWS ? MAX_TILE_ROWS : (uint32_t)rows;
}

size_t engine_attention_scratch_floats(uint32_t group, uint32_t max_context)
{
    return (size_t)engine_attention_tile_rows(group, max_context) * group *
           score_stride(max_context);
}

/* Consecutive positions of one page, as many as one call of the inner loops takes. */
typedef struct attention_block {
    uint32_t position, count;
    const float *keys; /* values follow part_floats later */
} attention_block_t;

/* The block that begins at `position`; false at `end`. */
static bool block_at(const engine_kv_t *kv, uint32_t layer, const engine_attention_tile_t *tile,
                     uint32_t kv_head, uint32_t position, uint32_t end,
                     attention_block_t *block_out)
{
    if (position >= end)
        return false;
    uint32_t offset = position % kv->page_tokens;
    uint32_t count = kv->page_tokens - offset;
    if (count > ENGINE_ATTENTION_BLOCK)
        count = ENGINE_ATTENTION_BLOCK;
    if (count > end - position)
        count = end - position;
    const float *part = engine_kv_part(kv, layer, tile->pages[position / kv->page_tokens], kv_head);
    *block_out = (attention_block_t){
        .position = position, .count = count, .keys = part + (size_t)offset * kv->head_dim};
    return true;
}

/* First row of the tile that sees the block's first position. */
static uint32_t block_first_row(const engine_attention_tile_t *tile, const attention_block_t *block)
{
    return block->position > tile->position ? block->position - tile->position : 0;
}

void engine_attention_run(const engine_attention_t *attention, uint32_t layer,
                          const engine_attention_tile_t *tile, uint32_t kv_head,
                          uint32_t first_head, uint32_t head_count, const float *query,
                          size_t query_stride, float *out, size_t out_stride, float *scores)
{
    const engine_kv_t *kv = attention->kv;
    const uint32_t head_dim = attention->head_dim;
    const size_t stride = attention->score_stride;
    const uint32_t end = tile->position + tile->rows; /* positions the last row sees */
    attention_block_t block;
    XP_ASSERT(tile->rows <= attention->tile_rows && end <= attention->score_stride);

    for (uint32_t at = 0; block_at(kv, layer, tile, kv_head, at, end, &block); at += block.count) {
        for (uint32_t r = block_first_row(tile, &block); r < tile->rows; r++) {
            const float *q = query + (size_t)(tile->first_row + r) * query_stride +
                             (size_t)first_head * head_dim;
            for (uint32_t h = 0; h < head_count; h += 2)
                attention->ops->scores(q + (size_t)h * head_dim, head_count - h >= 2 ? 2 : 1,
                                       block.keys, block.count, head_dim, attention->scale,
                                       scores + ((size_t)r * head_count + h) * stride + at, stride);
        }
    }

    for (uint32_t r = 0; r < tile->rows; r++) {
        for (uint32_t h = 0; h < head_count; h++)
            kernels_softmax(scores + ((size_t)r * head_count + h) * stride, tile->position + r + 1);
        memset(out + (size_t)(tile->first_row + r) * out_stride + (size_t)first_head * head_dim, 0,
               (size_t)head_count * head_dim * sizeof *out);
    }

    for (uint32_t at = 0; block_at(kv, layer, tile, kv_head, at, end, &block); at += block.count) {
        for (uint32_t r = block_first_row(tile, &block); r < tile->rows; r++) {
            uint32_t seen = tile->position + r + 1 - at;
            if (seen > block.count)
                seen = block.count;
            float *o =
                out + (size_t)(tile->first_row + r) * out_stride + (size_t)first_head * head_dim;
            for (uint32_t h = 0; h < head_count; h += 2)
                attention->ops->accumulate(o + (size_t)h * head_dim,
                                           scores + ((size_t)r * head_count + h) * stride + at,
                                           stride, head_count - h >= 2 ? 2 : 1,
                                           block.keys + kv->part_floats, seen, head_dim);
        }
    }
}
