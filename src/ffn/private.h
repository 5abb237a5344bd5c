/* SPDX-License-Identifier: MIT */
/* What the files of this folder share: layers, GraphTemplates, lanes, the runtime itself. */
#ifndef XPOOL_FFN_PRIVATE_H
#define XPOOL_FFN_PRIVATE_H

#include <pthread.h>
#include <stdatomic.h>

#include "ffn/ffn.h"
#include "kernels/kernels.h"

#define FFN_MAX_TEMPLATES  256
#define FFN_MAX_CAPACITIES 16  /* powers of two: 1 .. 32768 rows */
#define FFN_ROW_CHUNK      512 /* most rows computed at once; longer inputs go in pieces */
#define FFN_TILE_COLUMNS   128 /* output columns of the largest work item */

/* One gated FFN: a dense layer, one expert, or the fused shared experts. */
typedef struct ffn_triple {
    kernels_matrix_t gate, up, down;
} ffn_triple_t;

/* Execution Signature: everything that shapes the structure of a layer's execution, and nothing
 * else. Zeroed before it is filled, so that memcmp compares it. */
typedef struct ffn_signature {
    uint32_t kind, activation;
    uint32_t hidden, intermediate; /* of this shard */
    uint32_t gate_dtype, up_dtype, down_dtype;
    /* MoE only */
    uint32_t router_dtype;
    uint32_t experts, top_k, router, normalize, correction_bias, groups, top_groups;
    uint32_t shared_intermediate, shared_gate_dtype, shared_up_dtype, shared_down_dtype;
    double routed_scale;
} ffn_signature_t;

/* How one Execution Capacity is run. */
typedef struct ffn_capacity {
    uint32_t rows;
    uint32_t piece_rows;   /* rows computed at once with the workspace at hand */
    uint32_t gate_columns; /* columns of one work item of gate and up */
    uint32_t down_columns;
    bool gate_inline, down_inline; /* too little work to wake the team */
} ffn_capacity_t;

/* GraphTemplate: the prepared plan that all layers of one signature share. */
typedef struct ffn_template {
    ffn_signature_t signature;
    uint32_t users;      /* layers; 0 = free slot */
    uint32_t row_floats; /* activations of one row */
    uint32_t capacities;
    ffn_capacity_t capacity[FFN_MAX_CAPACITIES];
} ffn_template_t;

/* What a layer's router chose since start; under the runtime's `team` lock. */
typedef struct ffn_chosen {
    uint64_t executions, rows, experts; /* as in ffn_usage_t */
    uint64_t chosen[];                  /* [experts] rows that chose each */
} ffn_chosen_t;

/* Bytes of a layer's; 0 for a dense one. */
static inline uint64_t ffn_chosen_bytes(const model_ffn_t *ffn)
{
    return ffn->kind == MODEL_FFN_MOE
               ? sizeof(ffn_chosen_t) + (uint64_t)ffn->experts * sizeof(uint64_t)
               : 0;
}

typedef struct ffn_layer {
    ffn_template_t *template;
    model_ffn_t rule;      /* router rule; widths of the whole model */
    ffn_triple_t *triples; /* dense: 1; MoE: experts, then the shared one if any */
    kernels_matrix_t router;
    const float *bias;   /* e_score_correction_bias or NULL */
    ffn_chosen_t *usage; /* in the model's; NULL: dense */
} ffn_layer_t;

typedef struct ffn_model {
    bool installed;
    char id[96];
    uint32_t hidden, layers;
    uint64_t bytes;        /* as ffn_install_bytes() */
    void *weights;         /* mapping of the memfd, readable only */
    ffn_weights_t kept;    /* the same for others; fd -1: none */
    ffn_layer_t *layer;    /* [layers] */
    ffn_triple_t *triples; /* of all layers */
    uint8_t *usage;        /* likewise: ffn_chosen_t behind one another */
} ffn_model_t;

/* One expert's part of an Invocation. */
typedef struct ffn_active {
    const ffn_triple_t *triple;
    const uint32_t *row_ids; /* NULL: all rows in order */
    const float
        *row_weights; /* NULL: weight 1, and it is the only part (dense) or the shared one */
    uint32_t rows;
    uint32_t width;     /* of gate and up in this shard */
    size_t activations; /* offset in the lane's activations, floats */
} ffn_active_t;

/* Workspace of an Executor Lane. */
typedef struct ffn_lane {
    float *activations; /* act(gate) * up of every (row, expert) pair */
    float *logits;      /* [FFN_ROW_CHUNK or max_rows][max_experts] */
    uint32_t *row_ids;  /* grouped by expert: [rows * MODEL_MAX_TOP_K] */
    float *row_weights; /* the same order */
    uint32_t *chosen;   /* [rows][top_k] */
    float *chosen_weights;
    ffn_active_t active[MODEL_MAX_EXPERTS + 1];
    uint32_t offsets[MODEL_MAX_EXPERTS + 1];
} ffn_lane_t;

struct ffn_runtime {
    ffn_runtime_config_t config;
    xp_pool_t *pool;
    pthread_mutex_t team; /* held while the pool computes, and while models or workspaces change */
    ffn_lane_t *lane;     /* [lanes] */
    uint8_t *workspace;   /* memory of all lanes and threads */
    uint64_t workspace_bytes;
    uint32_t max_hidden, max_width, max_experts; /* what the workspace was made for */
    size_t activation_floats;                    /* of one lane */
    uint8_t *kernels_scratch;                    /* kernels_scratch_bytes() a thread */
    float *tiles; /* [threads][FFN_ROW_CHUNK or max_rows][FFN_TILE_COLUMNS] */
    size_t tile_floats;
    ffn_model_t model[FFN_MAX_MODELS];
    ffn_template_t template[FFN_MAX_TEMPLATES];
    ffn_stats_t stats;
};

/* template.c */
xp_status_t ffn_template_acquire(ffn_runtime_t *runtime, const ffn_signature_t *signature,
                                 ffn_template_t **template_out);
void ffn_template_release(ffn_runtime_t *runtime, ffn_template_t *template);
/* Recomputes what depends on the workspace (after it has grown). */
void ffn_template_plan(const ffn_runtime_t *runtime, ffn_template_t *template);

/* The smallest Execution Capacity that holds `rows`. */
static inline const ffn_capacity_t *ffn_template_capacity(const ffn_template_t *template,
                                                          uint32_t rows)
{
    uint32_t c = 0;
    while (template->capacity[c].rows < rows && c + 1 < template->capacities)
        c++;
    return &template->capacity[c];
}

/* execute.c */
void ffn_execute_layer(ffn_runtime_t *runtime, ffn_lane_t *lane, const ffn_layer_t *layer,
                       uint32_t rows, const float *in, float *out);
#endif
