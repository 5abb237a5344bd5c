/* SPDX-License-Identifier: MIT */
/*
 * A plain FFN for tests: every layer's weights as float32, sums in double, no kernels of ours.
 * Dense gated FFN and softmax top-k MoE, straight from their formulas.
 */
#ifndef XPOOL_TESTS_REFERENCE_FFN_H
#define XPOOL_TESTS_REFERENCE_FFN_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/checkpoint.h"
#include "model/spec.h"

typedef struct reference_ffn {
    model_spec_t spec;
    /* [layers]: router, then for each expert (or the one dense FFN) gate, up, down */
    float *router[MODEL_MAX_LAYERS];
    float **expert[MODEL_MAX_LAYERS];
    uint64_t calls, rows;
} reference_ffn_t;

static inline float *reference_read(const checkpoint_t *checkpoint, const char *name, uint32_t rows,
                                    uint32_t columns)
{
    const uint64_t shape[2] = {rows, columns};
    const checkpoint_tensor_t *tensor;
    float *data = malloc((size_t)rows * columns * sizeof *data);
    if (!data || checkpoint_tensor_require(checkpoint, name, 2, shape, &tensor) != XP_OK ||
        checkpoint_read_f32(checkpoint, tensor, data) != XP_OK) {
        fprintf(stderr, "reference FFN: %s: %s\n", name, xp_error_last()->text);
        abort();
    }
    return data;
}

static inline void reference_ffn_load(reference_ffn_t *ffn, const char *path)
{
    checkpoint_t *checkpoint = NULL;
    memset(ffn, 0, sizeof *ffn);
    if (model_spec_load(path, &ffn->spec) != XP_OK ||
        checkpoint_open(path, &ffn->spec, &checkpoint) != XP_OK) {
        fprintf(stderr, "reference FFN: %s\n", xp_error_last()->text);
        abort();
    }
    static const char *const parts[3] = {"gate_proj", "up_proj", "down_proj"};
    for (uint32_t layer = 0; layer < ffn->spec.layers; layer++) {
        const model_ffn_t *shape = &ffn->spec.ffn[layer];
        const bool moe = shape->kind == MODEL_FFN_MOE;
        const uint32_t experts = moe ? shape->experts : 1, hidden = ffn->spec.hidden;
        char name[128];
        if (moe) {
            snprintf(name, sizeof name, "model.layers.%u.mlp.gate.weight", layer);
            ffn->router[layer] = reference_read(checkpoint, name, experts, hidden);
        }
        ffn->expert[layer] = calloc(3 * (size_t)experts, sizeof(float *));
        for (uint32_t e = 0; e < experts; e++)
            for (uint32_t i = 0; i < 3; i++) {
                if (moe)
                    snprintf(name, sizeof name, "model.layers.%u.mlp.experts.%u.%s.weight", layer,
                             e, parts[i]);
                else
                    snprintf(name, sizeof name, "model.layers.%u.mlp.%s.weight", layer, parts[i]);
                ffn->expert[layer][3 * e + i] =
                    i < 2 ? reference_read(checkpoint, name, shape->intermediate, hidden)
                          : reference_read(checkpoint, name, hidden, shape->intermediate);
            }
    }
    checkpoint_close(checkpoint);
}

static inline void reference_ffn_free(reference_ffn_t *ffn)
{
    for (uint32_t layer = 0; layer < ffn->spec.layers; layer++) {
        const model_ffn_t *shape = &ffn->spec.ffn[layer];
        const uint32_t experts = shape->kind == MODEL_FFN_MOE ? shape->experts : 1;
        free(ffn->router[layer]);
        for (uint32_t i = 0; ffn->expert[layer] && i < 3 * experts; i++)
            free(ffn->expert[layer][i]);
        free(ffn->expert[layer]);
    }
}

static inline double reference_dot(const float *a, const float *b, uint32_t count)
{
    double sum = 0;
    for (uint32_t i = 0; i < count; i++)
        sum += (double)a[i] * b[i];
    return sum;
}

static inline void reference_gated(float *const weights[3], uint32_t hidden, uint32_t width,
                                   const float *in, double scale, double *out)
{
    float *middle = malloc(width * sizeof *middle);
    for (uint32_t i = 0; i < width; i++) {
        double gate = reference_dot(weights[0] + (size_t)i * hidden, in, hidden);
        double up = reference_dot(weights[1] + (size_t)i * hidden, in, hidden);
        middle[i] = (float)(gate / (1.0 + exp(-gate)) * up);
    }
    for (uint32_t i = 0; i < hidden; i++)
        out[i] += scale * reference_dot(weights[2] + (size_t)i * width, middle, width);
    free(middle);
}

static inline void reference_row(const reference_ffn_t *ffn, uint32_t layer, const float *in,
                                 float *out)
{
    const model_ffn_t *shape = &ffn->spec.ffn[layer];
    const uint32_t hidden = ffn->spec.hidden;
    double *sum = calloc(hidden, sizeof *sum);
    if (shape->kind == MODEL_FFN_DENSE) {
        reference_gated(ffn->expert[layer], hidden, shape->intermediate, in, 1.0, sum);
    } else {
        double probability[MODEL_MAX_EXPERTS], total = 0, largest = -INFINITY, chosen_total = 0;
        uint32_t chosen[MODEL_MAX_TOP_K];
        for (uint32_t e = 0; e < shape->experts; e++) {
            probability[e] = reference_dot(ffn->router[layer] + (size_t)e * hidden, in, hidden);
            largest = fmax(largest, probability[e]);
        }
        for (uint32_t e = 0; e < shape->experts; e++)
            total += probability[e] = exp(probability[e] - largest);
        for (uint32_t k = 0; k < shape->top_k; k++) {
            uint32_t best = UINT32_MAX;
            for (uint32_t e = 0; e < shape->experts; e++) {
                bool taken = false;
                for (uint32_t j = 0; j < k; j++)
                    taken |= chosen[j] == e;
                if (!taken && (best == UINT32_MAX || probability[e] > probability[best]))
                    best = e;
            }
            chosen[k] = best;
            chosen_total += probability[best];
        }
        for (uint32_t k = 0; k < shape->top_k; k++)
            reference_gated(
                &ffn->expert[layer][3 * chosen[k]], hidden, shape->intermediate, in,
                probability[chosen[k]] / (shape->normalize_top_k ? chosen_total : total), sum);
    }
    for (uint32_t i = 0; i < hidden; i++)
        out[i] = (float)sum[i];
    free(sum);
}

static inline xp_status_t reference_ffn_call(void *context, uint32_t layer, uint32_t rows,
                                             uint32_t kind, uint64_t slo_deadline_ns,
                                             const float *in, float *out)
{
    reference_ffn_t *ffn = context;
    (void)kind;
    (void)slo_deadline_ns;
    ffn->calls++;
    ffn->rows += rows;
    for (uint32_t r = 0; r < rows; r++)
        reference_row(ffn, layer, in + (size_t)r * ffn->spec.hidden,
                      out + (size_t)r * ffn->spec.hidden);
    return XP_OK;
}
#endif
