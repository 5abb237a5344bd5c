/* SPDX-License-Identifier: MIT */
/*
 * Causal attention of query rows over the paged KV Cache.
 *
 * One (row, head) is always computed in the same order: the scores of all positions from 0, one
 * softmax over them, then the values added in position order. So its result depends neither on the
 * other rows of the step, nor on chunking, paging or the number of threads.
 */
#ifndef XPOOL_ENGINE_ATTENTION_H
#define XPOOL_ENGINE_ATTENTION_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "engine/kv.h"

/* Positions that one call of the inner loops takes at most; a block never crosses a page. */
#define ENGINE_ATTENTION_BLOCK 16

typedef struct engine_attention_ops {
    /* scores[h][j] = scale * dot(query[h], keys[j]) for j < count, h < heads (1 or 2). Rows of
     * query and keys are head_dim floats, one behind the other; ENGINE_ATTENTION_BLOCK rows of keys
     * may be read. `score_stride` lies between heads. */
    void (*scores)(const float *query, uint32_t heads, const float *keys, uint32_t count,
                   uint32_t head_dim, float scale, float *scores, size_t score_stride);
    /* out[h][d] += sum over j < count, ascending, of weights[h][j] * values[j][d], for h < heads (1
     * or 2). `weight_stride` lies between heads; rows of out and values are head_dim apart. */
    void (*accumulate)(float *out, const float *weights, size_t weight_stride, uint32_t heads,
                       const float *values, uint32_t count, uint32_t head_dim);
} engine_attention_ops_t;

extern const engine_attention_ops_t engine_attention_plain;
#if defined(__x86_64__)
extern const engine_attention_ops_t engine_attention_avx2;
extern const engine_attention_ops_t engine_attention_avx512;
#endif
/* The table of kernels_selected(). */
const engine_attention_ops_t *engine_attention_select(void);

/* Consecutive query rows of one sequence: row first_row + i stands at position + i. */
typedef struct engine_attention_tile {
    uint32_t first_row, rows, position;
    const uint32_t *pages; /* of the sequence */
} engine_attention_tile_t;

typedef struct engine_attention {
    const engine_attention_ops_t *ops;
    const engine_kv_t *kv;
    uint32_t heads, kv_heads, head_dim;
    float scale;
    uint32_t score_stride; /* floats of one score row: the context rounded up to the block */
    uint32_t tile_rows;    /* most rows of one tile */
} engine_attention_t;

/* Rows one tile may have, so that a member's scores stay below a few MiB. */
uint32_t engine_attention_tile_rows(uint32_t group, uint32_t max_context);
/* Floats of score space one member needs. */
size_t engine_attention_scratch_floats(uint32_t group, uint32_t max_context);

/* Heads [first_head, first_head + head_count) of one KV head's group, for one tile. `query` and
 * `out` are [rows][stride] with head h at h * head_dim. `scores` is the member's score space. */
void engine_attention_run(const engine_attention_t *attention, uint32_t layer,
                          const engine_attention_tile_t *tile, uint32_t kv_head,
                          uint32_t first_head, uint32_t head_count, const float *query,
                          size_t query_stride, float *out, size_t out_stride, float *scores);
#endif
