/* SPDX-License-Identifier: MIT */
/*
 * Shards in device memory: every matrix against the checkpoint's own bytes, for all families, types
 * and splits; dummy weights; adoption; refusals; every driver call failed in turn.
 */
#include "cuda_support.h"

#include <fcntl.h>

static void config_of(const cuda_device_t *device, ffn_cuda_config_t *config)
{
    *config = (ffn_cuda_config_t){
        .device = device, .lanes = 1, .max_rows = 16, .cpu = -1, .block_bytes = 96u << 10};
}

/* One matrix on the device against `want(row, column)` of the shard's part of the checkpoint. */
static void check_matrix(const fixture_t *f, const ffn_install_t *install, const char *name,
                         layout_axis_t axis, uint32_t whole_rows, uint32_t whole_columns,
                         const void *at, xp_dtype_t dtype)
{
    uint32_t rows = whole_rows, columns = whole_columns, first_row = 0, first_column = 0;
    if (axis == LAYOUT_ROWS) {
        rows /= install->tp_size;
        first_row = install->tp_rank * rows;
    } else if (axis == LAYOUT_COLUMNS) {
        columns /= install->tp_size;
        first_column = install->tp_rank * columns;
    }
    const uint32_t pitch = axis == LAYOUT_COLUMNS ? (columns + 7) / 8 * 8 : columns;
    const uint32_t padded = axis == LAYOUT_ROWS ? (rows + 7) / 8 * 8 : rows;
    const size_t bytes = xp_dtype_row_bytes(dtype, 1);
    double *whole = NULL;
    if (!install->dummy)
        whole = reference_matrix(f, name, whole_rows, whole_columns);
    const uint64_t seed = ffn_dummy_seed(name);
    const float scale = ffn_dummy_scale(whole_columns);
    for (uint32_t r = 0; r < padded; r++)
        for (uint32_t c = 0; c < pitch; c++) {
            const uint64_t element = (uint64_t)(first_row + r) * whole_columns + first_column + c;
            float value = 0;
            uint32_t want = 0, got = 0;
            if (r < rows && c < columns)
                value = whole ? (float)whole[element] : ffn_dummy_value(seed, element, scale);
            kernels_convert(XP_DTYPE_F32, &value, dtype, &want, 1);
            memcpy(&got, (const uint8_t *)at + ((uint64_t)r * pitch + c) * bytes, bytes);
            if (got != want)
                fail_msg("%s [%u][%u] of shard %u/%u: %x, not %x", name, r, c, install->tp_rank,
                         install->tp_size, got, want);
        }
    free(whole);
}

static void check_part(const fixture_t *f, const ffn_install_t *install, const char *prefix,
                       uint32_t width, const ffn_cuda_part_t *part, xp_dtype_t dtype)
{
    const uint32_t hidden = f->spec.hidden;
    char name[160];
    snprintf(name, sizeof(name), "%sgate_proj.weight", prefix);
    check_matrix(f, install, name, LAYOUT_ROWS, width, hidden, part->gate, dtype);
    snprintf(name, sizeof(name), "%sup_proj.weight", prefix);
    check_matrix(f, install, name, LAYOUT_ROWS, width, hidden, part->up, dtype);
    snprintf(name, sizeof(name), "%sdown_proj.weight", prefix);
    check_matrix(f, install, name, LAYOUT_COLUMNS, hidden, width, part->down, dtype);
}

/* All of a started runtime's tables for that model. */
static void check_tables(const fixture_t *f, const ffn_install_t *install,
                         const ffn_cuda_runtime_t *runtime)
{
    const ffn_cuda_dispatch_t *d = ffn_cuda_runtime_tables(runtime);
    const ffn_cuda_dispatch_model_t *m = &d->models[install->model];
    assert_int_equal(m->layers, f->spec.layers);
    assert_int_equal(m->hidden, f->spec.hidden);
    for (uint32_t l = 0; l < m->layers; l++) {
        const model_ffn_t *ffn = &f->spec.ffn[l];
        const ffn_cuda_layer_t *layer = &d->layers[m->first_layer + l];
        const ffn_cuda_signature_t *s = layer->signature;
        const xp_dtype_t dtype = cuda_dtype_plain(s->dtype);
        char prefix[96], name[160];
        assert_int_equal(layer->next, m->first_layer + (l + 1) % m->layers);
        assert_int_equal(s->hidden, f->spec.hidden);
        assert_int_equal(s->intermediate, (ffn->intermediate / install->tp_size + 7) / 8 * 8);
        snprintf(prefix, sizeof(prefix), "model.layers.%u.mlp.", l);
        if (ffn->kind == MODEL_FFN_DENSE) {
            check_part(f, install, prefix, ffn->intermediate, layer->parts, dtype);
            continue;
        }
        assert_int_equal(s->experts, ffn->experts);
        snprintf(name, sizeof(name), "%sgate.weight", prefix);
        check_matrix(f, install, name, LAYOUT_WHOLE, ffn->experts, f->spec.hidden, layer->router,
                     cuda_dtype_plain(s->router_dtype));
        assert_int_equal(layer->bias != NULL, ffn->correction_bias);
        if (layer->bias) {
            snprintf(name, sizeof(name), "%sgate.e_score_correction_bias", prefix);
            check_matrix(f, install, name, LAYOUT_WHOLE, 1, ffn->experts, layer->bias,
                         XP_DTYPE_F32);
        }
        for (uint32_t e = 0; e < ffn->experts; e++) {
            snprintf(prefix, sizeof(prefix), "model.layers.%u.mlp.experts.%u.", l, e);
            check_part(f, install, prefix, ffn->intermediate, &layer->parts[e], dtype);
        }
        if (ffn->shared_intermediate) {
            snprintf(prefix, sizeof(prefix), "model.layers.%u.mlp.shared_experts.", l);
            check_part(f, install, prefix, ffn->shared_intermediate, &layer->parts[ffn->experts],
                       dtype);
        }
    }
}

static void install_and_check(const fixture_t *f, ffn_install_t install,
                              const ffn_cuda_weights_t *kept, ffn_cuda_load_report_t *report)
{
    cuda_device_t device;
    ffn_cuda_config_t config;
    ffn_cuda_runtime_t *runtime = NULL;
    device_ok(&device);
    config_of(&device, &config);
    assert_int_equal(ffn_cuda_runtime_create(&config, &runtime), XP_OK);
    if (ffn_cuda_runtime_install(runtime, &install, kept, report) != XP_OK)
        fail_msg("install: %s", xp_error_last()->text);
    if (ffn_cuda_runtime_start(runtime) != XP_OK)
        fail_msg("start: %s", xp_error_last()->text);
    check_tables(f, &install, runtime);
    ffn_cuda_runtime_destroy(runtime);
    cuda_device_close(&device);
    assert_int_equal(fake_objects(), 0);
    assert_int_equal(fake.contexts, 0);
}

static void test_all_families(void **state)
{
    (void)state;
    SKIP_WITHOUT_DEVICE_CODE();
    static const xp_dtype_t types[] = {XP_DTYPE_BF16, XP_DTYPE_F16, XP_DTYPE_F32};
    for (uint32_t a = 0; a < MODEL_ARCH_COUNT; a++) {
        fixture_t *f = family_of((model_architecture_t)a, types[a % 3]);
        for (uint32_t tp = 1; tp <= 2; tp++)
            for (uint32_t dummy = 0; dummy < 2; dummy++) {
                ffn_cuda_load_report_t report;
                ffn_install_t install = install_of(f);
                install.model = a;
                install.tp_size = tp;
                install.tp_rank = tp - 1;
                install.dummy = dummy;
                install.readers = tp == 1 ? 3 : 1;
                fake_ffn_reset();
                install_and_check(f, install, NULL, &report);
                assert_false(report.adopted);
                assert_int_equal(report.read, dummy ? 0 : report.bytes);
            }
        fixture_close(f);
    }
}

/* A width that is no multiple of 8 (here 36 a shard of 4) is padded with zeros; types change. */
static void test_padding_and_types(void **state)
{
    (void)state;
    SKIP_WITHOUT_DEVICE_CODE();
    static const xp_dtype_t wanted[] = {XP_DTYPE_BF16, XP_DTYPE_F16, XP_DTYPE_AUTO};
    for (uint32_t i = 0; i < 3; i++) {
        synth_options_t options;
        model_synth_defaults(i == 1 ? MODEL_ARCH_GLM4_MOE_LITE : MODEL_ARCH_DEEPSEEK_V2, &options);
        options.layers = 2;
        options.intermediate = 144;
        options.moe_intermediate = 80;
        options.dtype = i == 0 ? XP_DTYPE_F32 : XP_DTYPE_BF16;
        fixture_t *f = fixture_synth(&options);
        ffn_cuda_load_report_t report;
        ffn_install_t install = install_of(f);
        install.dtype = wanted[i];
        install.tp_size = 4;
        install.tp_rank = 3;
        fake_ffn_reset();
        install_and_check(f, install, NULL, &report);
        fixture_close(f);
    }
}

static void weights_close(ffn_cuda_weights_t *weights)
{
    for (uint32_t i = 0; i < weights->count; i++)
        close(weights->fd[i]);
    weights->count = 0;
}

/* The next process maps what the last one exported, and reads nothing, unless it is not that. */
static void test_weights_survive(void **state)
{
    (void)state;
    SKIP_WITHOUT_DEVICE_CODE();
    fixture_t *f = family_of(MODEL_ARCH_QWEN3_MOE, XP_DTYPE_BF16);
    ffn_install_t install = install_of(f);
    cuda_device_t device;
    ffn_cuda_config_t config;
    ffn_cuda_runtime_t *runtime = NULL;
    ffn_cuda_weights_t weights = {0};
    ffn_cuda_load_report_t report;
    fake_ffn_reset();
    device_ok(&device);
    config_of(&device, &config);
    assert_int_equal(ffn_cuda_runtime_create(&config, &runtime), XP_OK);
    assert_int_equal(ffn_cuda_runtime_export(runtime, 0, &weights), XP_INVALID);
    assert_int_equal(ffn_cuda_runtime_install(runtime, &install, NULL, &report), XP_OK);
    assert_int_equal(ffn_cuda_runtime_export(runtime, 0, &weights), XP_OK);
    assert_true(weights.count > 1); /* the limit of this test's allocations is small */
    /* The process ends; the descriptors stay with the daemon. */
    ffn_cuda_runtime_destroy(runtime);
    cuda_device_close(&device);
    assert_int_equal(fake_objects(), 0);

    install_and_check(f, install, &weights, &report);
    assert_true(report.adopted);
    assert_int_equal(report.read, 0);

    ffn_install_t other = install; /* another shard: loaded, not adopted */
    other.tp_size = 2;
    install_and_check(f, other, &weights, &report);
    assert_false(report.adopted);
    /* Bytes that changed since they were complete. */
    const uint64_t content = weights.content;
    weights.content ^= 1;
    install_and_check(f, install, &weights, &report);
    assert_false(report.adopted);
    weights.content = content;
    /* A descriptor of something else. */
    const int fd = weights.fd[0];
    weights.fd[0] = open("/dev/null", O_RDONLY | O_CLOEXEC);
    assert_true(weights.fd[0] >= 0);
    device_ok(&device);
    assert_int_equal(ffn_cuda_runtime_create(&config, &runtime), XP_OK);
    assert_int_equal(ffn_cuda_runtime_install(runtime, &install, &weights, &report), XP_OK);
    assert_false(report.adopted);
    ffn_cuda_runtime_destroy(runtime);
    cuda_device_close(&device);
    close(weights.fd[0]);
    weights.fd[0] = fd;
    weights_close(&weights);
    fixture_close(f);
}

/* The daemon compares the sum of a shard that is read again with that of the first time: what lies
 * between tensors must not count. */
static void test_the_same_sum_each_time(void **state)
{
    (void)state;
    SKIP_WITHOUT_DEVICE_CODE();
    fixture_t *f = family_of(MODEL_ARCH_GLM4_MOE_LITE, XP_DTYPE_BF16);
    ffn_install_t install = install_of(f);
    uint64_t content[2];
    for (uint32_t i = 0; i < 2; i++) {
        cuda_device_t device;
        ffn_cuda_config_t config;
        ffn_cuda_runtime_t *runtime = NULL;
        ffn_cuda_weights_t weights = {0};
        fake_ffn_reset();
        fake.garbage = i ? 0x5a : 0;
        device_ok(&device);
        config_of(&device, &config);
        assert_int_equal(ffn_cuda_runtime_create(&config, &runtime), XP_OK);
        assert_int_equal(ffn_cuda_runtime_install(runtime, &install, NULL, NULL), XP_OK);
        assert_int_equal(ffn_cuda_runtime_export(runtime, 0, &weights), XP_OK);
        content[i] = weights.content;
        weights_close(&weights);
        ffn_cuda_runtime_destroy(runtime);
        cuda_device_close(&device);
    }
    fake.garbage = 0;
    assert_int_equal(content[0], content[1]);
    fixture_close(f);
}

static void refuse(const fixture_t *f, const ffn_install_t *install, xp_status_t status,
                   const char *text)
{
    cuda_device_t device;
    ffn_cuda_config_t config;
    ffn_cuda_runtime_t *runtime = NULL;
    fake_ffn_reset();
    device_ok(&device);
    config_of(&device, &config);
    assert_int_equal(ffn_cuda_runtime_create(&config, &runtime), XP_OK);
    assert_int_equal(ffn_cuda_runtime_install(runtime, install, NULL, NULL), status);
    if (!strstr(xp_error_last()->text, text))
        fail_msg("\"%s\" does not say \"%s\"", xp_error_last()->text, text);
    assert_int_equal(ffn_cuda_runtime_model_bytes(runtime, install->model), 0);
    ffn_cuda_runtime_destroy(runtime);
    cuda_device_close(&device);
    assert_int_equal(fake_objects(), 0);
    (void)f;
}

static void test_refusals(void **state)
{
    (void)state;
    SKIP_WITHOUT_DEVICE_CODE();
    synth_options_t options;
    model_synth_defaults(MODEL_ARCH_LLAMA, &options);
    options.layers = 2;
    options.gguf = true;
    options.quant = XP_DTYPE_Q8_0;
    fixture_t *f = fixture_synth(&options);
    ffn_install_t install = install_of(f);
    refuse(f, &install, XP_UNSUPPORTED, "q8_0");
    fixture_close(f);
    /* Plain GGUF is fine. */
    options.quant = XP_DTYPE_F16;
    f = fixture_synth(&options);
    install = install_of(f);
    ffn_cuda_load_report_t report;
    fake_ffn_reset();
    install_and_check(f, install, NULL, &report);
    install.dtype = XP_DTYPE_F32;
    refuse(f, &install, XP_UNSUPPORTED, "bfloat16");
    install.dtype = XP_DTYPE_AUTO;
    install.tp_size = 7;
    refuse(f, &install, XP_INVALID, "do not divide");
    install.tp_size = 1;
    install.model = FFN_CUDA_MAX_MODELS;
    refuse(f, &install, XP_INVALID, "model index");
    fixture_close(f);
}

static void test_budget(void **state)
{
    (void)state;
    SKIP_WITHOUT_DEVICE_CODE();
    fixture_t *f = family_of(MODEL_ARCH_QWEN3, XP_DTYPE_BF16);
    cuda_device_t device;
    ffn_cuda_config_t config;
    ffn_cuda_runtime_t *runtime = NULL;
    ffn_install_t install = install_of(f);
    fake_ffn_reset();
    device_ok(&device);
    config_of(&device, &config);
    config.memory_bytes = 150u << 10;
    assert_int_equal(ffn_cuda_runtime_create(&config, &runtime), XP_OK);
    assert_int_equal(ffn_cuda_runtime_install(runtime, &install, NULL, NULL), XP_NO_MEMORY);
    assert_non_null(strstr(xp_error_last()->text, "bytes of cuda:0"));
    ffn_cuda_runtime_destroy(runtime);
    cuda_device_close(&device);
    fixture_close(f);
}

/* What the planner counts holds what the runtime takes; it counts in the device's own granules. */
static void test_ledger(void **state)
{
    (void)state;
    SKIP_WITHOUT_DEVICE_CODE();
    fixture_t *f[2] = {family_of(MODEL_ARCH_GLM4_MOE_LITE, XP_DTYPE_BF16),
                       family_of(MODEL_ARCH_QWEN3, XP_DTYPE_BF16)};
    const model_spec_t *specs[2] = {&f[0]->spec, &f[1]->spec};
    const uint32_t tp[2] = {2, 1};
    cuda_device_t device;
    ffn_cuda_config_t config;
    ffn_cuda_runtime_t *runtime = NULL;
    ffn_cuda_ledger_t ledger;
    uint64_t weights = 0;
    fake_ffn_reset();
    device_ok(&device);
    config_of(&device, &config);
    const uint32_t rows = 1500; /* more than fit into a Lane's own workspace */
    config.lanes = 3;
    config.max_rows = rows;
    config.buffer_rows = rows;
    config.resident = config.cuts = true;
    config.block_bytes = 0;
    assert_int_equal(ffn_cuda_runtime_create(&config, &runtime), XP_OK);
    for (uint32_t i = 0; i < 2; i++) {
        uint64_t bytes;
        ffn_install_t install = install_of(f[i]);
        install.model = i;
        install.tp_size = tp[i];
        assert_int_equal(ffn_cuda_runtime_install(runtime, &install, NULL, NULL), XP_OK);
        assert_int_equal(
            ffn_cuda_weight_bytes(specs[i], f[i]->checkpoint, XP_DTYPE_AUTO, tp[i], &bytes), XP_OK);
        const uint64_t taken = ffn_cuda_runtime_model_bytes(runtime, i);
        assert_int_equal(bytes,
                         (taken + FFN_CUDA_GRANULE - 1) / FFN_CUDA_GRANULE * FFN_CUDA_GRANULE);
        weights += taken;
    }
    assert_int_equal(ffn_cuda_runtime_start(runtime), XP_OK);
    assert_int_equal(ffn_cuda_runtime_bytes(specs, tp, 2, 3, rows, rows, false, &ledger), XP_OK);
    ffn_cuda_stats_t stats;
    assert_int_equal(ffn_cuda_runtime_stats(runtime, &stats), XP_OK);
    assert_int_equal(stats.weight_bytes, weights);
    assert_int_equal(
        ledger.lane_bytes,
        (uint64_t)3 * 2 * rows *
            (specs[0]->hidden > specs[1]->hidden ? specs[0]->hidden : specs[1]->hidden) * 2);
    const uint64_t lanes = ledger.lane_bytes + ledger.workspace_bytes;
    assert_true(lanes >= stats.workspace_bytes && lanes < stats.workspace_bytes + FFN_CUDA_GRANULE);
    assert_true(ledger.table_bytes >= stats.table_bytes &&
                ledger.table_bytes <=
                    stats.table_bytes + 6 * FFN_CUDA_GRANULE); /* any number of blocks */
    ffn_cuda_runtime_destroy(runtime);
    cuda_device_close(&device);
    fixture_close(f[0]);
    fixture_close(f[1]);
}

/* Each driver call of create, install and start fails once; nothing may be left of it. */
static void test_every_call_fails(void **state)
{
    (void)state;
    SKIP_WITHOUT_DEVICE_CODE();
    fixture_t *f = family_of(MODEL_ARCH_DEEPSEEK_V2, XP_DTYPE_BF16);
    uint32_t failures = 0;
    for (uint32_t dummy = 0; dummy < 2; dummy++)
        for (uint64_t at = 1;; at++) {
            cuda_device_t device;
            ffn_cuda_config_t config;
            ffn_cuda_runtime_t *runtime = NULL;
            ffn_install_t install = install_of(f);
            install.readers = 1;
            install.dummy = dummy;
            fake_ffn_reset();
            device_ok(&device);
            config_of(&device, &config);
            config.records = 8;
            fake.fail_at = at;
            xp_status_t status = ffn_cuda_runtime_create(&config, &runtime);
            if (status == XP_OK)
                status = ffn_cuda_runtime_install(runtime, &install, NULL, NULL);
            if (status == XP_OK)
                status = ffn_cuda_runtime_start(runtime);
            const bool reached = fake.failed != NULL;
            fake.fail_at = 0;
            /* The fake's cooperative launch goes through its ordinary one. */
            const char *name = !reached                                 ? "nothing"
                               : !strcmp(fake.failed, "cuLaunchKernel") ? "cuLaunch"
                                                                        : fake.failed;
            if (status != XP_OK && !strstr(xp_error_last()->text, name))
                fail_msg("call %llu (%s): \"%s\"", (unsigned long long)at, name,
                         xp_error_last()->text);
            ffn_cuda_runtime_destroy(runtime);
            cuda_device_close(&device);
            if (fake_objects() != 0)
                fail_msg("call %llu (%s) left %d objects", (unsigned long long)at, fake.failed,
                         fake_objects());
            if (status == XP_OK)
                break;
            failures++;
        }
    assert_true(failures > 100);
    fixture_close(f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_families),    cmocka_unit_test(test_padding_and_types),
        cmocka_unit_test(test_weights_survive), cmocka_unit_test(test_the_same_sum_each_time),
        cmocka_unit_test(test_refusals),        cmocka_unit_test(test_budget),
        cmocka_unit_test(test_ledger),          cmocka_unit_test(test_every_call_fails),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
