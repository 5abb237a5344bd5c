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
#define CACHE_LINE_FLOATS 16u

static void scores_plain(const float *query, const float *const *keys, uint32_t head_dim,
                         float scale, float *scores)
{
    for (uint32_t j = 0; j < ENGINE_ATTENTION_BLOCK; j++) {
        /* Four partial sums: shorter chains lose less to rounding. */
        float sum[4] = {0};
        uint32_t d = 0;
        for (; d + 4 <= head_dim; d += 4)
            for (uint32_t i = 0; i < 4; i++)
                sum[i] += query[d + i] * keys[j][d + i];
        for (; d < head_dim; d++)
            sum[0] += query[d] * keys[j][d];
        scores[j] = ((sum[0] + sum[1]) + (sum[2] + sum[3])) * scale;
    }
}

static void accumulate_plain(float *out, const float *weights, size_t weight_stride, uint32_t heads,
                             const float *const *values, uint32_t count, uint32_t head_dim)
{
    for (uint32_t h = 0; h < heads; h++)
        for (uint32_t j = 0; j < count; j++)
            for (uint32_t d = 0; d < head_dim; d++)
                out[h * head_dim + d] += weights[h * weight_stride + j] * values[j][d];
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

/* Addresses of `count` consecutive positions' rows; the rest of the block repeats the last one. */
static void block_rows(const engine_attention_t *attention, uint32_t layer,
                       const engine_attention_tile_t *tile, uint32_t kv_head, uint32_t position,
                       uint32_t count, const float **keys)
{
    const engine_kv_t *kv = attention->kv;
    uint32_t page_tokens = kv->page_tokens;
    uint32_t index = position / page_tokens, offset = position % page_tokens;
    for (uint32_t j = 0; j < count; j++) {
        size_t slot = (size_t)tile->pages[index] * page_tokens + offset;
        keys[j] = engine_kv_row(kv, layer, slot) + (size_t)kv_head * attention->head_dim;
        if (++offset == page_tokens) {
            offset = 0;
            index++;
        }
    }
    for (uint32_t j = count; j < ENGINE_ATTENTION_BLOCK; j++)
        keys[j] = keys[count - 1];
}

/* Asks for the rows of a block ahead of their use: neighbours in time lie a whole token apart,
 * which no hardware prefetcher follows. */
static void block_prefetch(const engine_attention_t *attention, uint32_t layer,
                           const engine_attention_tile_t *tile, uint32_t kv_head, uint32_t position,
                           uint32_t end, uint32_t offset_floats)
{
    const float *rows[ENGINE_ATTENTION_BLOCK];
    if (position >= end)
        return;
    uint32_t count = end - position;
    if (count > ENGINE_ATTENTION_BLOCK)
        count = ENGINE_ATTENTION_BLOCK;
    block_rows(attention, layer, tile, kv_head, position, count, rows);
    for (uint32_t j = 0; j < count; j++)
        for (uint32_t d = 0; d < attention->head_dim; d += CACHE_LINE_FLOATS)
            __builtin_prefetch(rows[j] + offset_floats + d);
}

void engine_attention_run(const engine_attention_t *attention, uint32_t layer,
                          const engine_attention_tile_t *tile, uint32_t kv_head,
                          uint32_t first_head, uint32_t head_count, const float *query,
                          size_t query_stride, float *out, size_t out_stride, float *scores)
{
    const uint32_t head_dim = attention->head_dim;
    const size_t stride = attention->score_stride;
    const uint32_t end = tile->position + tile->rows; /* positions the last row sees */
    const float *rows[ENGINE_ATTENTION_BLOCK];
    XP_ASSERT(tile->rows <= attention->tile_rows && end <= attention->score_stride);

    for (uint32_t position = 0; position < end; position += ENGINE_ATTENTION_BLOCK) {
        uint32_t count = end - position;
        if (count > ENGINE_ATTENTION_BLOCK)
            count = ENGINE_ATTENTION_BLOCK;
        block_rows(attention, layer, tile, kv_head, position, count, rows);
        block_prefetch(attention, layer, tile, kv_head, position + ENGINE_ATTENTION_BLOCK, end, 0);
        uint32_t first = position > tile->position ? position - tile->position : 0;
        for (uint32_t r = first; r < tile->rows; r++) {
            const float *q = query + (size_t)(tile->first_row + r) * query_stride +
                             (size_t)first_head * head_dim;
            for (uint32_t h = 0; h < head_count; h++)
                attention->ops->scores(q + (size_t)h * head_dim, rows, head_dim, attention->scale,
                                       scores + ((size_t)r * head_count + h) * stride + position);
        }
    }

    block_prefetch(attention, layer, tile, kv_head, 0, end, attention->kv->row_floats);
    for (uint32_t r = 0; r < tile->rows; r++) {
        for (uint32_t h = 0; h < head_count; h++)
            kernels_softmax(scores + ((size_t)r * head_count + h) * stride, tile->position + r + 1);
        memset(out + (size_t)(tile->first_row + r) * out_stride + (size_t)first_head * head_dim, 0,
               (size_t)head_count * head_dim * sizeof *out);
    }

    for (uint32_t position = 0; position < end; position += ENGINE_ATTENTION_BLOCK) {
        uint32_t count = end - position;
        if (count > ENGINE_ATTENTION_BLOCK)
            count = ENGINE_ATTENTION_BLOCK;
        block_rows(attention, layer, tile, kv_head, position, count, rows);
        for (uint32_t j = 0; j < ENGINE_ATTENTION_BLOCK; j++)
            rows[j] += attention->kv->row_floats; /* V follows K */
        block_prefetch(attention, layer, tile, kv_head, position + ENGINE_ATTENTION_BLOCK, end,
                       attention->kv->row_floats);
        uint32_t first = position > tile->position ? position - tile->position : 0;
        for (uint32_t r = first; r < tile->rows; r++) {
            uint32_t seen = tile->position + r + 1 - position;
            if (seen > count)
                seen = count;
            float *o =
                out + (size_t)(tile->first_row + r) * out_stride + (size_t)first_head * head_dim;
            for (uint32_t h = 0; h < head_count; h += 2)
                attention->ops->accumulate(
                    o + (size_t)h * head_dim,
                    scores + ((size_t)r * head_count + h) * stride + position, stride,
                    head_count - h >= 2 ? 2 : 1, rows, seen, head_dim);
        }
    }
}
