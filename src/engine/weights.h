/* SPDX-License-Identifier: MIT */
/*
 * The attention side's weights: embeddings, norms, attention projections and the output head, in
 * one anonymous mapping. The FFN's tensors are never read.
 */
#ifndef XPOOL_ENGINE_WEIGHTS_H
#define XPOOL_ENGINE_WEIGHTS_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "kernels/kernels.h"
#include "model/checkpoint.h"
#include "model/spec.h"

typedef struct engine_layer {
    /* q, k and v projections: one matrix of q_dim + 2 * kv_dim rows where their types agree, else
     * three. Their outputs lie side by side in this order. */
    kernels_matrix_t qkv[3];
    uint32_t qkv_count;
    kernels_matrix_t o;               /* [hidden][q_dim] */
    float *attention_norm, *ffn_norm; /* [hidden] */
    float *q_norm, *k_norm;           /* [head_dim]; NULL without q/k norm */
    float *qkv_bias;                  /* [q_dim + 2 * kv_dim]; NULL without */
    float *o_bias;                    /* [hidden]; NULL without */
} engine_layer_t;

typedef struct engine_weights {
    void *region;
    size_t bytes;
    kernels_matrix_t embedding, head; /* [vocab][hidden]; the same memory when tied */
    float *final_norm;                /* [hidden] */
    engine_layer_t *layers;
    uint32_t layer_count;
} engine_weights_t;

typedef void (*engine_weights_progress_t)(void *context, uint64_t done_bytes, uint64_t total_bytes);

/* Checks every tensor's presence and shape, then allocates, then reads. With `checkpoint` NULL the
 * weights are seeded random ones. Errors name file and tensor. */
xp_status_t engine_weights_load(const model_spec_t *spec, const checkpoint_t *checkpoint,
                                xp_dtype_t dtype, engine_weights_progress_t progress,
                                void *progress_context, engine_weights_t *weights_out);
void engine_weights_fini(engine_weights_t *weights); /* accepts a zeroed object */

/* Bytes of the region engine_weights_load() would allocate. */
xp_status_t engine_weights_measure(const model_spec_t *spec, const checkpoint_t *checkpoint,
                                   xp_dtype_t dtype, uint64_t *bytes_out);
#endif
