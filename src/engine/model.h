/* SPDX-License-Identifier: MIT */
/*
 * The attention side's forward pass: embedding, every layer's attention, the FFN call between, the
 * output head. Works on spans: consecutive tokens of one sequence whose KV pages are given.
 */
#ifndef XPOOL_ENGINE_MODEL_H
#define XPOOL_ENGINE_MODEL_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "base/pool.h"
#include "base/status.h"
#include "engine/attention.h"
#include "engine/engine.h"
#include "engine/kv.h"
#include "engine/weights.h"
#include "model/spec.h"

/* Rows that one engine_model_logits() takes. */
#define ENGINE_LOGIT_ROWS 32u

typedef struct engine_span {
    const int32_t *tokens;
    const uint32_t *pages; /* covers positions 0 .. position + rows - 1 */
    uint32_t position, rows;
} engine_span_t;

typedef struct engine_model {
    const model_spec_t *spec;
    const engine_weights_t *weights;
    const engine_kv_t *kv;
    xp_pool_t *pool;
    engine_ffn_t ffn;
    uint32_t threads, max_rows, max_context;
    uint32_t q_dim, kv_dim, qkv_dim;
    float rope_inverse[512], rope_scale;
    engine_attention_t attention;

    /* Workspace, one mapping. */
    void *region;
    size_t region_bytes;
    float *x, *h, *qkv,
        *mixed;           /* [max_rows] x hidden, hidden, qkv_dim, the wider of q_dim and hidden */
    float *cosine, *sine; /* [max_rows][head_dim / 2] */
    float *gathered, *logits;       /* [ENGINE_LOGIT_ROWS] x hidden, vocab */
    float *scores;                  /* score space of every member */
    size_t scores_floats;           /* of one member */
    void *scratch;                  /* of kernels_matmul() */
    void *sampler;                  /* engine_sampler space of every member */
    size_t sampler_bytes;           /* of one member */
    uint32_t *positions;            /* [max_rows] */
    uint32_t *pages, *offsets;      /* [max_rows]: where the row's K and V go */
    int32_t *row_tokens;            /* [max_rows] */
    engine_attention_tile_t *tiles; /* [max_rows] */

    /* The step in progress. */
    uint32_t rows, tile_count, layer, head_split;
    atomic_uint next_item;
    uint64_t ffn_calls, ffn_rows; /* since creation */
} engine_model_t;

/* `weights`, `kv` and `pool` are borrowed. */
xp_status_t engine_model_init(const model_spec_t *spec, const engine_weights_t *weights,
                              const engine_kv_t *kv, xp_pool_t *pool, const engine_ffn_t *ffn,
                              uint32_t max_rows, uint32_t max_context, engine_model_t *model_out);
void engine_model_fini(engine_model_t *model); /* accepts a zeroed object */

/* Runs the spans (together 1 .. max_rows rows) through all layers and leaves their K and V in the
 * cache. A status other than XP_OK is that of the FFN call. */
xp_status_t engine_model_step(engine_model_t *model, const engine_span_t *spans,
                              uint32_t span_count, uint32_t kind, uint64_t slo_deadline_ns);

/* After a step: logits of `count` <= ENGINE_LOGIT_ROWS of its rows, [count][vocab], valid until the
 * next call. The caller may write on them. */
float *engine_model_logits(engine_model_t *model, const uint32_t *rows, uint32_t count);
#endif
