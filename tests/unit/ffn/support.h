/* SPDX-License-Identifier: MIT */
/*
 * Support for the FFN tests: temporary synthetic checkpoints, and one layer's FFN computed in
 * double arithmetic straight from the checkpoint's bytes, with none of the code under test.
 */
#ifndef XPOOL_TESTS_FFN_SUPPORT_H
#define XPOOL_TESTS_FFN_SUPPORT_H

#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#include "../kernels/reference.h"
#include "ffn/ffn.h"
#include "model/synth.h"

typedef struct temporary {
    char path[256];
} temporary_t;

static inline void temporary_make(temporary_t *folder)
{
    const char *root = getenv("TMPDIR");
    snprintf(folder->path, sizeof(folder->path), "%s/xpool-ffn-XXXXXX", root ? root : "/tmp");
    assert_non_null(mkdtemp(folder->path));
}

static inline void temporary_remove(const temporary_t *folder)
{
    DIR *dir = opendir(folder->path);
    for (struct dirent *entry; dir && (entry = readdir(dir));)
        if (entry->d_name[0] != '.')
            unlinkat(dirfd(dir), entry->d_name, 0);
    if (dir)
        closedir(dir);
    rmdir(folder->path);
}

typedef struct fixture {
    temporary_t folder;
    char path[512];
    model_spec_t spec;
    checkpoint_t *checkpoint;
} fixture_t;

static inline void fixture_open(fixture_t *f, const char *path)
{
    snprintf(f->path, sizeof(f->path), "%s", path);
    if (model_spec_load(path, &f->spec) != XP_OK ||
        checkpoint_open(path, &f->spec, &f->checkpoint) != XP_OK)
        fail_msg("%s: %s", path, xp_error_last()->text);
}

static inline fixture_t *fixture_synth(const synth_options_t *options)
{
    fixture_t *f = calloc(1, sizeof(*f));
    assert_non_null(f);
    temporary_make(&f->folder);
    if (model_synth_write(options, f->folder.path) != XP_OK)
        fail_msg("synth: %s", xp_error_last()->text);
    fixture_open(f, f->folder.path);
    return f;
}

static inline void fixture_close(fixture_t *f)
{
    checkpoint_close(f->checkpoint);
    if (f->folder.path[0])
        temporary_remove(&f->folder);
    free(f);
}

/* The whole matrix in doubles. */
static inline double *reference_matrix(const fixture_t *f, const char *name, uint32_t rows,
                                       uint32_t columns)
{
    const checkpoint_tensor_t *tensor = checkpoint_tensor_find(f->checkpoint, name);
    if (!tensor)
        fail_msg("no tensor %s", name);
    size_t row_bytes = xp_dtype_row_bytes(tensor->dtype, columns);
    uint8_t *bytes = malloc(row_bytes * rows);
    double *values = malloc(sizeof(double) * rows * columns);
    assert_int_equal(checkpoint_read_rows(f->checkpoint, tensor, 0, rows, 0, columns, bytes),
                     XP_OK);
    for (uint32_t n = 0; n < rows; n++)
        for (uint32_t k = 0; k < columns; k++)
            values[(size_t)n * columns + k] =
                reference_element(tensor->dtype, bytes + n * row_bytes, k);
    free(bytes);
    return values;
}

static inline double reference_activation(model_activation_t activation, double x)
{
    if (activation == MODEL_ACT_GELU_TANH)
        return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    return x / (1 + exp(-x));
}

/* out += weight * down(act(gate(x)) * up(x)) for each row with a weight that is not zero. */
static inline void reference_gated(const fixture_t *f, const char *prefix,
                                   model_activation_t activation, uint32_t width, uint32_t rows,
                                   const float *in, const double *weights, double *out)
{
    char name[160];
    uint32_t hidden = f->spec.hidden;
    snprintf(name, sizeof(name), "%sgate_proj.weight", prefix);
    double *gate = reference_matrix(f, name, width, hidden);
    snprintf(name, sizeof(name), "%sup_proj.weight", prefix);
    double *up = reference_matrix(f, name, width, hidden);
    snprintf(name, sizeof(name), "%sdown_proj.weight", prefix);
    double *down = reference_matrix(f, name, hidden, width);
    double *middle = malloc(sizeof(double) * width);
    for (uint32_t r = 0; r < rows; r++) {
        if (weights[r] == 0)
            continue;
        for (uint32_t n = 0; n < width; n++) {
            double g = 0, u = 0;
            for (uint32_t k = 0; k < hidden; k++) {
                g += gate[(size_t)n * hidden + k] * (double)in[(size_t)r * hidden + k];
                u += up[(size_t)n * hidden + k] * (double)in[(size_t)r * hidden + k];
            }
            middle[n] = reference_activation(activation, g) * u;
        }
        for (uint32_t n = 0; n < hidden; n++) {
            double sum = 0;
            for (uint32_t k = 0; k < width; k++)
                sum += down[(size_t)n * width + k] * middle[k];
            out[(size_t)r * hidden + n] += weights[r] * sum;
        }
    }
    free(gate);
    free(up);
    free(down);
    free(middle);
}

/* Expert weights of one row; returns the smallest gap between a chosen and a refused score, so that
 * a caller can leave out rows where FP32 may rightly choose differently. */
static inline double reference_route(const model_ffn_t *rule, const double *logits,
                                     const double *bias, double *weights)
{
    uint32_t experts = rule->experts, groups = rule->groups ? rule->groups : 1;
    uint32_t size = experts / groups;
    double score[MODEL_MAX_EXPERTS], choice[MODEL_MAX_EXPERTS], total = 0, gap = 1e9;
    bool open[MODEL_MAX_EXPERTS], chosen[MODEL_MAX_EXPERTS];
    double largest = logits[0];
    for (uint32_t e = 1; e < experts; e++)
        largest = fmax(largest, logits[e]);
    for (uint32_t e = 0; e < experts; e++)
        total += exp(logits[e] - largest);
    for (uint32_t e = 0; e < experts; e++) {
        score[e] = rule->router == MODEL_ROUTER_SIGMOID ? 1 / (1 + exp(-logits[e]))
                                                        : exp(logits[e] - largest) / total;
        choice[e] = score[e] + (bias ? bias[e] : 0);
        weights[e] = 0;
        chosen[e] = false;
    }
    /* A group is open when fewer than top_groups groups beat it. */
    double group_score[MODEL_MAX_EXPERTS];
    for (uint32_t g = 0; g < groups; g++) {
        double best = -1e300, second = -1e300;
        for (uint32_t i = 0; i < size; i++) {
            double c = choice[g * size + i];
            second = fmax(second, fmin(best, c));
            best = fmax(best, c);
        }
        group_score[g] = rule->router == MODEL_ROUTER_SIGMOID && size > 1 ? best + second : best;
    }
    for (uint32_t g = 0; g < groups; g++) {
        uint32_t better = 0;
        for (uint32_t h = 0; h < groups; h++)
            better +=
                group_score[h] > group_score[g] || (h < g && group_score[h] == group_score[g]);
        for (uint32_t i = 0; i < size; i++)
            open[g * size + i] = groups == 1 || better < rule->top_groups;
    }
    for (uint32_t g = 0; g < groups; g++)
        for (uint32_t h = 0; h < groups; h++)
            if (open[g * size] && !open[h * size])
                gap = fmin(gap, group_score[g] - group_score[h]);
    double sum = 0;
    for (uint32_t e = 0; e < experts; e++) {
        uint32_t better = 0;
        for (uint32_t o = 0; o < experts; o++)
            better += open[o] && (choice[o] > choice[e] || (o < e && choice[o] == choice[e]));
        chosen[e] = open[e] && better < rule->top_k;
        sum += chosen[e] ? score[e] : 0;
    }
    for (uint32_t e = 0; e < experts; e++) {
        if (chosen[e])
            weights[e] = score[e] / (rule->normalize_top_k ? sum : 1) * rule->routed_scale;
        for (uint32_t o = 0; o < experts; o++)
            if (chosen[e] && open[o] && !chosen[o])
                gap = fmin(gap, choice[e] - choice[o]);
    }
    return gap;
}

/* One layer in doubles. sure[r] is false where the router's choice is too close to call in FP32. */
static inline void reference_layer(const fixture_t *f, uint32_t layer, uint32_t rows,
                                   const float *in, double *out, bool *sure)
{
    const model_ffn_t *ffn = &f->spec.ffn[layer];
    uint32_t hidden = f->spec.hidden, experts = ffn->experts;
    char prefix[128];
    double *weights = malloc(sizeof(double) * rows * (experts + 1));
    double *column = malloc(sizeof(double) * rows);
    memset(out, 0, sizeof(double) * rows * hidden);
    for (uint32_t r = 0; r < rows; r++) {
        column[r] = 1;
        sure[r] = true;
    }
    snprintf(prefix, sizeof(prefix), "model.layers.%u.mlp.", layer);
    if (ffn->kind == MODEL_FFN_DENSE) {
        reference_gated(f, prefix, ffn->activation, ffn->intermediate, rows, in, column, out);
    } else {
        char name[160];
        snprintf(name, sizeof(name), "%sgate.weight", prefix);
        double *router = reference_matrix(f, name, experts, hidden), *bias = NULL;
        if (ffn->correction_bias) {
            snprintf(name, sizeof(name), "%sgate.e_score_correction_bias", prefix);
            bias = reference_matrix(f, name, 1, experts);
        }
        for (uint32_t r = 0; r < rows; r++) {
            double logits[MODEL_MAX_EXPERTS];
            for (uint32_t e = 0; e < experts; e++) {
                logits[e] = 0;
                for (uint32_t k = 0; k < hidden; k++)
                    logits[e] +=
                        router[(size_t)e * hidden + k] * (double)in[(size_t)r * hidden + k];
            }
            sure[r] = reference_route(ffn, logits, bias, weights + r * experts) > 1e-5;
        }
        for (uint32_t e = 0; e < experts; e++) {
            for (uint32_t r = 0; r < rows; r++)
                column[r] = weights[r * experts + e];
            snprintf(prefix, sizeof(prefix), "model.layers.%u.mlp.experts.%u.", layer, e);
            reference_gated(f, prefix, ffn->activation, ffn->intermediate, rows, in, column, out);
        }
        if (ffn->shared_intermediate) {
            for (uint32_t r = 0; r < rows; r++)
                column[r] = 1;
            snprintf(prefix, sizeof(prefix), "model.layers.%u.mlp.shared_experts.", layer);
            reference_gated(f, prefix, ffn->activation, ffn->shared_intermediate, rows, in, column,
                            out);
        }
        free(router);
        free(bias);
    }
    free(weights);
    free(column);
}

static inline ffn_runtime_t *runtime_make(uint32_t threads, uint32_t lanes, uint32_t max_rows)
{
    ffn_runtime_config_t config = {.threads = threads, .lanes = lanes, .max_rows = max_rows};
    ffn_runtime_t *runtime = NULL;
    assert_int_equal(ffn_runtime_create(&config, &runtime), XP_OK);
    return runtime;
}

static inline ffn_install_t install_of(const fixture_t *f)
{
    return (ffn_install_t){.model_id = "m", .path = f->path, .tp_size = 1, .readers = 2};
}

static inline void install_ok(ffn_runtime_t *runtime, const ffn_install_t *install)
{
    if (ffn_runtime_install(runtime, install) != XP_OK)
        fail_msg("install: %s", xp_error_last()->text);
}

static inline float *random_rows(uint32_t rows, uint32_t columns, uint64_t seed)
{
    float *x = malloc(sizeof(float) * rows * columns);
    assert_non_null(x);
    for (size_t i = 0; i < (size_t)rows * columns; i++)
        x[i] = reference_uniform(&seed);
    return x;
}
#endif
