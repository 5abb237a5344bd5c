/* SPDX-License-Identifier: MIT */
/*
 * Execution of every kind of layer against doubles, whole and as tensor parallel shards, and the
 * promise that a row's output depends on nothing but the row.
 */
#include <unistd.h>

#include "support.h"

#include "ffn/private.h"

#define ROWS 21

/* Sizes that are no multiple of the vector width, but of 32 where weights are quantised. */
static synth_options_t synth_of(model_architecture_t architecture)
{
    synth_options_t options;
    model_synth_defaults(architecture, &options);
    options.layers = 2;
    options.hidden = 96;
    options.intermediate = 160;
    options.moe_intermediate = 64;
    options.experts = 12;
    options.top_k = 3;
    options.dtype = XP_DTYPE_F32;
    return options;
}

/* Compares rows of layer `layer` with the reference; returns how many rows were compared. */
static uint32_t compare(const fixture_t *f, uint32_t layer, uint32_t rows, const float *in,
                        const float *out, double tolerance)
{
    uint32_t hidden = f->spec.hidden, compared = 0;
    double *exact = malloc(sizeof(double) * rows * hidden), size = 0;
    bool *sure = malloc(rows);
    reference_layer(f, layer, rows, in, exact, sure);
    for (size_t i = 0; i < (size_t)rows * hidden; i++)
        size = fmax(size, fabs(exact[i]));
    assert_true(size > 0);
    for (uint32_t r = 0; r < rows; r++) {
        if (!sure[r])
            continue;
        compared++;
        for (uint32_t n = 0; n < hidden; n++) {
            double error = fabs((double)out[r * hidden + n] - exact[r * hidden + n]);
            if (!(error <= tolerance * size))
                fail_msg("%s layer %u row %u column %u: %g, exact %g (size %g)",
                         f->spec.architecture_name, layer, r, n, (double)out[r * hidden + n],
                         exact[r * hidden + n], size);
        }
    }
    free(exact);
    free(sure);
    return compared;
}

/* Every layer, whole and as 2 and 4 shards where the sizes allow it. */
static void check_model(const fixture_t *f, uint32_t most_shards)
{
    uint32_t hidden = f->spec.hidden;
    float *in = random_rows(ROWS, hidden, 11);
    float *out = malloc(sizeof(float) * ROWS * hidden),
          *sum = malloc(sizeof(float) * ROWS * hidden);
    for (uint32_t shards = 1; shards <= most_shards; shards *= 2) {
        ffn_runtime_t *runtime = runtime_make(2, 1, 64);
        for (uint32_t rank = 0; rank < shards; rank++) {
            ffn_install_t install = install_of(f);
            install.model = rank;
            install.tp_rank = rank;
            install.tp_size = shards;
            install_ok(runtime, &install);
        }
        for (uint32_t layer = 0; layer < f->spec.layers; layer++) {
            memset(sum, 0, sizeof(float) * ROWS * hidden);
            for (uint32_t rank = 0; rank < shards; rank++) {
                assert_int_equal(ffn_runtime_execute(runtime, 0, rank, layer, ROWS, in, out),
                                 XP_OK);
                for (size_t i = 0; i < ROWS * hidden; i++)
                    sum[i] += out[i];
            }
            assert_true(compare(f, layer, ROWS, in, sum, 4e-6) > ROWS / 2);
        }
        ffn_runtime_destroy(runtime);
    }
    free(in);
    free(out);
    free(sum);
}

static void test_families(void **state)
{
    (void)state;
    static const model_architecture_t families[] = {
        MODEL_ARCH_LLAMA,     MODEL_ARCH_QWEN2,       MODEL_ARCH_QWEN3,
        MODEL_ARCH_QWEN3_MOE, MODEL_ARCH_DEEPSEEK_V2, MODEL_ARCH_GLM4_MOE_LITE};
    for (size_t i = 0; i < sizeof(families) / sizeof(families[0]); i++)
        for (int normalize = 0; normalize < 2; normalize++) {
            synth_options_t options = synth_of(families[i]);
            options.normalize_top_k = normalize;
            options.dtype = normalize ? XP_DTYPE_BF16 : XP_DTYPE_F32;
            fixture_t *f = fixture_synth(&options);
            check_model(f, 4);
            fixture_close(f);
        }
}

static void test_quantized(void **state)
{
    (void)state;
    static const xp_dtype_t quants[] = {XP_DTYPE_Q8_0, XP_DTYPE_Q4_0, XP_DTYPE_Q4_1, XP_DTYPE_Q4_K,
                                        XP_DTYPE_Q6_K};
    for (size_t i = 0; i < sizeof(quants) / sizeof(quants[0]); i++)
        for (int moe = 0; moe < 2; moe++) {
            bool wide = xp_dtype_block_elements(quants[i]) == 256;
            synth_options_t options = synth_of(moe ? MODEL_ARCH_QWEN3_MOE : MODEL_ARCH_LLAMA);
            options.gguf = true;
            options.quant = quants[i];
            options.head_dim = wide ? 64 : options.head_dim;
            options.hidden = wide ? 256 : 96;
            options.intermediate = wide ? 512 : 192;
            options.moe_intermediate = wide ? 512 : 64;
            fixture_t *f = fixture_synth(&options);
            check_model(f, 2);
            fixture_close(f);
        }
}

/* The three trained models of the repository: real routers, real weights. */
static void test_tales(void **state)
{
    (void)state;
    static const char *const names[] = {"qwen3-moe", "deepseek-v2", "glm4-moe-lite"};
    for (size_t i = 0; i < 3; i++) {
        fixture_t *f = calloc(1, sizeof(*f));
        char path[400];
        snprintf(path, sizeof(path), "%s/models/tales/%s", XPOOL_SOURCE_DIR, names[i]);
        fixture_open(f, path);
        check_model(f, 4);
        fixture_close(f);
    }
}

/* A row alone, in any batch, on any team, in any lane gives the same bits. 700 rows go in pieces.
 */
static void test_rows_identical(void **state)
{
    (void)state;
    static const model_architecture_t families[] = {MODEL_ARCH_QWEN3, MODEL_ARCH_QWEN3_MOE,
                                                    MODEL_ARCH_GLM4_MOE_LITE};
    static const uint32_t counts[] = {1, 2, 3, 5, 8, 16, 17, 33, 250, 600, 700};
    const uint32_t most = 700;
    for (size_t i = 0; i < 3; i++) {
        synth_options_t options = synth_of(families[i]);
        options.dtype = XP_DTYPE_BF16;
        fixture_t *f = fixture_synth(&options);
        uint32_t hidden = f->spec.hidden, layer = f->spec.layers - 1;
        float *in = random_rows(most, hidden, 5);
        float *alone = malloc(sizeof(float) * most * hidden);
        float *out = malloc(sizeof(float) * most * hidden);
        for (uint32_t threads = 1; threads <= 3; threads++) {
            ffn_runtime_t *runtime = runtime_make(threads, 2, most);
            ffn_install_t install = install_of(f);
            install_ok(runtime, &install);
            for (uint32_t r = 0; threads == 1 && r < most; r++)
                assert_int_equal(ffn_runtime_execute(runtime, 0, 0, layer, 1, in + r * hidden,
                                                     alone + r * hidden),
                                 XP_OK);
            for (size_t c = 0; c < sizeof(counts) / sizeof(counts[0]); c++) {
                memset(out, 0xee, sizeof(float) * most * hidden);
                assert_int_equal(
                    ffn_runtime_execute(runtime, threads % 2, 0, layer, counts[c], in, out), XP_OK);
                assert_memory_equal(out, alone, sizeof(float) * counts[c] * hidden);
            }
            ffn_runtime_destroy(runtime);
        }
        free(in);
        free(alone);
        free(out);
        fixture_close(f);
    }
}

static void test_zero_rows_and_zero_output(void **state)
{
    (void)state;
    synth_options_t options = synth_of(MODEL_ARCH_QWEN3_MOE);
    fixture_t *f = fixture_synth(&options);
    ffn_runtime_config_t config = {.threads = 1, .lanes = 1, .max_rows = 4, .zero_output = true};
    ffn_runtime_t *runtime = NULL;
    assert_int_equal(ffn_runtime_create(&config, &runtime), XP_OK);
    ffn_install_t install = install_of(f);
    install_ok(runtime, &install);
    float *in = random_rows(4, f->spec.hidden, 3), *out = random_rows(4, f->spec.hidden, 4);
    assert_int_equal(ffn_runtime_execute(runtime, 0, 0, 0, 0, in, out), XP_OK);
    assert_true(out[0] != 0);
    assert_int_equal(ffn_runtime_execute(runtime, 0, 0, 0, 3, in, out), XP_OK);
    for (uint32_t i = 0; i < 3 * f->spec.hidden; i++)
        assert_true(out[i] == 0);
    assert_true(out[3 * f->spec.hidden] != 0);
    ffn_stats_t stats;
    ffn_runtime_stats(runtime, &stats);
    assert_int_equal(stats.executions, 2);
    assert_int_equal(stats.rows, 3);
    ffn_runtime_destroy(runtime);

    /* By a file: zeros while it exists, and only then. */
    char path[] = "/tmp/xpool-zero-XXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    config.zero_output = false;
    config.zero_path = path;
    assert_int_equal(ffn_runtime_create(&config, &runtime), XP_OK);
    install_ok(runtime, &install);
    assert_int_equal(ffn_runtime_execute(runtime, 0, 0, 0, 1, in, out), XP_OK);
    assert_true(out[0] == 0);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(ffn_runtime_execute(runtime, 0, 0, 0, 1, in, out), XP_OK);
    assert_true(out[0] != 0);
    ffn_runtime_destroy(runtime);
    free(in);
    free(out);
    fixture_close(f);
}

/* Marks the experts of a row by the checkpoint's own router, in doubles; false: too close to call.
 */
static bool mark_experts(const fixture_t *f, uint32_t layer, const float *x, uint64_t *rows_of)
{
    const model_ffn_t *ffn = &f->spec.ffn[layer];
    char name[160];
    double logits[MODEL_MAX_EXPERTS], weights[MODEL_MAX_EXPERTS];
    snprintf(name, sizeof(name), "model.layers.%u.mlp.gate.weight", layer);
    double *router = reference_matrix(f, name, ffn->experts, f->spec.hidden);
    for (uint32_t e = 0; e < ffn->experts; e++) {
        logits[e] = 0;
        for (uint32_t k = 0; k < f->spec.hidden; k++)
            logits[e] += router[(size_t)e * f->spec.hidden + k] * (double)x[k];
    }
    free(router);
    bool sure = reference_route(ffn, logits, NULL, weights) > 1e-5;
    for (uint32_t e = 0; e < ffn->experts; e++)
        rows_of[e] += weights[e] != 0;
    return sure;
}

/* Three live rows of a batch of 32: what the padded rows behind them would choose is neither read
 * (their experts' weights are not there) nor counted. */
static void test_padded_rows(void **state)
{
    (void)state;
    enum { LIVE = 3, CAPACITY = 32 };
    synth_options_t options = synth_of(MODEL_ARCH_QWEN3_MOE);
    options.experts = 48;
    fixture_t *f = fixture_synth(&options);
    const uint32_t hidden = f->spec.hidden, experts = f->spec.ffn[0].experts;
    ffn_runtime_t *runtime = runtime_make(2, 1, CAPACITY);
    ffn_install_t install = install_of(f);
    install_ok(runtime, &install);
    uint64_t live[MODEL_MAX_EXPERTS] = {0}, padded[MODEL_MAX_EXPERTS] = {0};
    float *in = random_rows(CAPACITY, hidden, 23);
    float *out = malloc(sizeof(float) * CAPACITY * hidden);
    float *again = malloc(sizeof(float) * LIVE * hidden);
    ffn_usage_t usage;
    assert_int_equal(ffn_runtime_usage(runtime, 0, &usage), XP_OK);
    assert_int_equal(usage.places, f->spec.layers * experts);
    assert_int_equal(usage.executions + usage.rows + usage.experts + usage.chosen + usage.most, 0);
    for (uint32_t r = 0; r < CAPACITY; r++)
        assert_true(mark_experts(f, 0, in + (size_t)r * hidden, r < LIVE ? live : padded));
    assert_int_equal(ffn_runtime_execute(runtime, 0, 0, 0, LIVE, in, again), XP_OK);
    uint32_t distinct = 0, extra = 0;
    uint64_t most = 0;
    for (uint32_t e = 0; e < experts; e++) {
        distinct += live[e] != 0;
        most = live[e] > most ? live[e] : most;
        if (live[e] || !padded[e])
            continue;
        extra++;
        ffn_triple_t *triple = &runtime->model[0].layer[0].triples[e];
        triple->gate.data = triple->up.data = triple->down.data = NULL; /* reading ends the test */
    }
    assert_true(extra > 10);
    memset(out, 0xee, sizeof(float) * CAPACITY * hidden);
    assert_int_equal(ffn_runtime_execute(runtime, 0, 0, 0, LIVE, in, out), XP_OK);
    assert_memory_equal(out, again, sizeof(float) * LIVE * hidden);
    uint32_t untouched;
    memcpy(&untouched, out + LIVE * hidden, sizeof(untouched));
    assert_int_equal(untouched, 0xeeeeeeee);
    assert_int_equal(ffn_runtime_usage(runtime, 0, &usage), XP_OK);
    assert_int_equal(usage.executions, 2);
    assert_int_equal(usage.rows, 2 * LIVE);
    assert_int_equal(usage.experts, 2 * distinct);
    assert_int_equal(usage.chosen, distinct);
    assert_int_equal(usage.least, 0);
    assert_int_equal(usage.most, 2 * most);
    for (uint32_t e = 0; e < experts; e++)
        assert_int_equal(runtime->model[0].layer[0].usage->chosen[e], 2 * live[e]);
    assert_int_equal(ffn_runtime_usage(runtime, 1, &usage), XP_INVALID);
    ffn_runtime_destroy(runtime);
    free(in);
    free(out);
    free(again);
    fixture_close(f);
}

/* A layer that spreads evenly, one that does not, and one without any row. */
static void test_usage_bins(void **state)
{
    (void)state;
    static const uint64_t even[4] = {10, 10, 10, 10}, uneven[4] = {0, 3, 5, 12}, none[4] = {0};
    ffn_usage_t usage = {0};
    ffn_usage_add(7, 20, 9, even, 4, &usage);
    assert_int_equal(usage.least, 10);
    assert_int_equal(usage.bins[4], 4); /* the mean itself: from 1 on */
    ffn_usage_add(1, 5, 4, uneven, 4, &usage);
    ffn_usage_add(0, 0, 0, none, 4, &usage);
    ffn_usage_add(0, 0, 0, none, 0, &usage);
    const ffn_usage_t want = {.executions = 8,
                              .rows = 25,
                              .experts = 13,
                              .places = 12,
                              .chosen = 7,
                              .least = 0,
                              .most = 12,
                              .bins = {1, 0, 1, 0, 5, 0, 0, 1}};
    assert_memory_equal(&usage, &want, sizeof(want));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_families),
        cmocka_unit_test(test_quantized),
        cmocka_unit_test(test_tales),
        cmocka_unit_test(test_rows_identical),
        cmocka_unit_test(test_zero_rows_and_zero_output),
        cmocka_unit_test(test_padded_rows),
        cmocka_unit_test(test_usage_bins),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
