/* SPDX-License-Identifier: MIT */
/*
 * Installing shards: exact ledgers, budgets, whole or nothing, broken checkpoints, conversion,
 * dummy weights, where the memory is, and what execution may not do.
 */
#include "support.h"

#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>

static fixture_t *fixture_of(model_architecture_t architecture, xp_dtype_t dtype)
{
    synth_options_t options;
    model_synth_defaults(architecture, &options);
    options.layers = 3;
    options.dtype = dtype;
    return fixture_synth(&options);
}

static uint32_t count_open_files(void)
{
    uint32_t count = 0;
    DIR *dir = opendir("/proc/self/fd");
    assert_non_null(dir);
    while (readdir(dir))
        count++;
    closedir(dir);
    return count;
}

/* How many mappings of this process have `text` in their line, and how many bytes they span. */
static uint64_t mapped_bytes(const char *text)
{
    char line[1024];
    uint64_t bytes = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    assert_non_null(maps);
    while (fgets(line, sizeof(line), maps)) {
        unsigned long long first, last;
        if (strstr(line, text) && sscanf(line, "%llx-%llx", &first, &last) == 2)
            bytes += last - first;
    }
    fclose(maps);
    return bytes;
}

static void test_ledger_and_memory(void **state)
{
    (void)state;
    fixture_t *f = fixture_of(MODEL_ARCH_QWEN3_MOE, XP_DTYPE_BF16);
    ffn_runtime_t *runtime = runtime_make(2, 2, 32);
    uint64_t bytes;
    assert_int_equal(ffn_install_bytes(&f->spec, f->checkpoint, XP_DTYPE_AUTO, 1, &bytes), XP_OK);
    ffn_install_t install = install_of(f);
    install.model = 7;
    install.model_id = "tiny-moe";
    uint32_t files = count_open_files();
    install_ok(runtime, &install);
    assert_int_equal(count_open_files(), files + 1); /* the shard's, for the next process */
    assert_int_equal(ffn_runtime_model_bytes(runtime, 7), bytes);
    uint64_t mapped = mapped_bytes("xpool-ffn:tiny-moe");
    assert_true(mapped > 0 && mapped <= bytes);
    ffn_stats_t stats;
    ffn_runtime_stats(runtime, &stats);
    assert_int_equal(stats.weight_bytes, bytes);
    assert_int_equal(stats.workspace_bytes,
                     ffn_workspace_bytes(2, 2, 32, f->spec.hidden, ffn_workspace_width(&f->spec, 1),
                                         f->spec.ffn[0].experts));
    /* All layers of this model have one structure. */
    assert_int_equal(stats.signatures, 1);
    assert_int_equal(stats.templates, 1);
    assert_int_equal(ffn_runtime_install(runtime, &install), XP_INVALID);
    ffn_runtime_uninstall(runtime, 7);
    ffn_runtime_stats(runtime, &stats);
    assert_int_equal(stats.weight_bytes, 0);
    assert_int_equal(stats.templates, 0);
    assert_int_equal(mapped_bytes("xpool-ffn:"), 0);
    float row[128] = {0};
    assert_int_equal(ffn_runtime_execute(runtime, 0, 7, 0, 1, row, row), XP_INVALID);
    install_ok(runtime, &install);
    ffn_runtime_destroy(runtime);
    assert_int_equal(mapped_bytes("xpool-ffn:"), 0);
    fixture_close(f);
}

static void test_budget(void **state)
{
    (void)state;
    fixture_t *f = fixture_of(MODEL_ARCH_GLM4_MOE_LITE, XP_DTYPE_F32);
    uint64_t bytes;
    assert_int_equal(ffn_install_bytes(&f->spec, f->checkpoint, XP_DTYPE_AUTO, 2, &bytes), XP_OK);
    uint64_t workspace =
        ffn_workspace_bytes(1, 1, 16, f->spec.hidden, ffn_workspace_width(&f->spec, 2), 8);
    for (int fits = 0; fits < 2; fits++) {
        ffn_runtime_config_t config = {
            .threads = 1, .lanes = 1, .max_rows = 16, .memory_bytes = bytes + workspace - !fits};
        ffn_runtime_t *runtime = NULL;
        assert_int_equal(ffn_runtime_create(&config, &runtime), XP_OK);
        ffn_install_t install = install_of(f);
        install.tp_size = 2;
        install.tp_rank = 1;
        xp_status_t status = ffn_runtime_install(runtime, &install);
        assert_int_equal(status, fits ? XP_OK : XP_NO_MEMORY);
        if (!fits) {
            char needed[32], left[32];
            snprintf(needed, sizeof(needed), "%llu", (unsigned long long)bytes);
            snprintf(left, sizeof(left), "%llu", (unsigned long long)config.memory_bytes);
            assert_non_null(strstr(xp_error_last()->text, needed));
            assert_non_null(strstr(xp_error_last()->text, left));
            ffn_stats_t stats;
            ffn_runtime_stats(runtime, &stats);
            assert_int_equal(stats.weight_bytes, 0);
        } else {
            install.model = 1;
            assert_int_equal(ffn_runtime_install(runtime, &install), XP_NO_MEMORY);
        }
        ffn_runtime_destroy(runtime);
    }
    fixture_close(f);
}

static void expect_failure(const char *path, const ffn_install_t *install, const char *word,
                           const char *other_word)
{
    ffn_runtime_t *runtime = runtime_make(1, 1, 4);
    ffn_install_t copy = *install;
    copy.path = path;
    xp_status_t status = ffn_runtime_install(runtime, &copy);
    assert_true(status != XP_OK);
    if (!strstr(xp_error_last()->text, word) || !strstr(xp_error_last()->text, other_word))
        fail_msg("\"%s\" does not name %s and %s", xp_error_last()->text, word, other_word);
    ffn_stats_t stats;
    ffn_runtime_stats(runtime, &stats);
    assert_int_equal(stats.weight_bytes, 0);
    assert_int_equal(stats.templates, 0);
    assert_int_equal(mapped_bytes("xpool-ffn:"), 0);
    ffn_runtime_destroy(runtime);
}

static void weights_path(const fixture_t *f, char *path, size_t capacity)
{
    DIR *dir = opendir(f->path);
    assert_non_null(dir);
    path[0] = '\0';
    for (struct dirent *entry; (entry = readdir(dir));)
        if (strstr(entry->d_name, ".safetensors") && !strstr(entry->d_name, ".json"))
            snprintf(path, capacity, "%s/%s", f->path, entry->d_name);
    closedir(dir);
    assert_true(path[0] != '\0');
}

/* Overwrites the first occurrence of `from` behind `anchor` in the file by `to`, of the same
 * length. */
static void patch(const char *path, const char *anchor, const char *from, const char *to)
{
    FILE *file = fopen(path, "r+b");
    assert_non_null(file);
    static char text[1 << 16];
    size_t length = fread(text, 1, sizeof(text), file);
    char *start = memmem(text, length, anchor, strlen(anchor));
    assert_non_null(start);
    char *at = memmem(start, length - (size_t)(start - text), from, strlen(from));
    assert_non_null(at);
    fseek(file, at - text, SEEK_SET);
    fwrite(to, 1, strlen(to), file);
    fclose(file);
}

static void test_broken_checkpoints(void **state)
{
    (void)state;
    char path[1024];
    fixture_t *f = fixture_of(MODEL_ARCH_QWEN3_MOE, XP_DTYPE_F32);
    ffn_install_t install = install_of(f);
    weights_path(f, path, sizeof(path));

    /* A tensor that is missing: it has another name of the same length. */
    patch(path, "", "layers.1.mlp.experts.5.up_proj", "layers.1.mlp.experts.5.up_prqj");
    expect_failure(f->path, &install, "model.layers.1.mlp.experts.5.up_proj.weight", "safetensors");
    patch(path, "", "layers.1.mlp.experts.5.up_prqj", "layers.1.mlp.experts.5.up_proj");

    /* A shape that the config does not mean. */
    const char *gate = "layers.2.mlp.experts.0.gate_proj";
    patch(path, gate, "[64,128]", "[128,64]");
    expect_failure(f->path, &install, "128", gate);
    patch(path, gate, "[128,64]", "[64,128]");

    install.tp_size = 3;
    expect_failure(f->path, &install, "do not divide", "3");
    install.tp_size = 1;
    install.dtype = XP_DTYPE_Q4_0;
    expect_failure(f->path, &install, "q4_0", "plain");
    install.dtype = XP_DTYPE_AUTO;

    struct stat info;
    assert_int_equal(stat(path, &info), 0);
    assert_int_equal(truncate(path, info.st_size - 4000), 0);
    expect_failure(f->path, &install, "safetensors", "");
    expect_failure("/nonexistent/xpool", &install, "/nonexistent/xpool", "");
    fixture_close(f);
}

static void cut_on_progress(void *context, uint64_t done, uint64_t total)
{
    (void)done;
    (void)total;
    struct stat info;
    if (stat(context, &info) == 0 && info.st_size > 64 * 1024)
        assert_int_equal(truncate(context, 64 * 1024), 0);
}

/* The file shrinks after it was opened and checked: the readers fail, and nothing is left. */
static void test_file_cut_while_loading(void **state)
{
    (void)state;
    for (uint32_t readers = 1; readers <= 4; readers += 3) {
        char path[1024];
        fixture_t *f = fixture_of(MODEL_ARCH_QWEN3, XP_DTYPE_F32);
        weights_path(f, path, sizeof(path));
        ffn_install_t install = install_of(f);
        install.readers = readers;
        install.progress = cut_on_progress;
        install.progress_context = path;
        expect_failure(f->path, &install, "safetensors", "model.layers.");
        fixture_close(f);
    }
}

typedef struct progress_log {
    pthread_mutex_t lock;
    uint64_t most, total, calls;
} progress_log_t;

static void log_progress(void *context, uint64_t done, uint64_t total)
{
    progress_log_t *log = context;
    pthread_mutex_lock(&log->lock);
    log->most = done > log->most ? done : log->most;
    log->total = total;
    log->calls++;
    pthread_mutex_unlock(&log->lock);
}

static void run_layer(ffn_runtime_t *runtime, uint32_t model, uint32_t rows, const float *in,
                      float *out)
{
    assert_int_equal(ffn_runtime_execute(runtime, 0, model, 1, rows, in, out), XP_OK);
}

static double largest(const float *x, size_t count)
{
    double most = 0;
    for (size_t i = 0; i < count; i++)
        most = fmax(most, fabs((double)x[i]));
    return most;
}

static void test_conversion(void **state)
{
    (void)state;
    fixture_t *f = fixture_of(MODEL_ARCH_GLM4_MOE_LITE, XP_DTYPE_BF16);
    const uint32_t rows = 5, hidden = f->spec.hidden;
    float *in = random_rows(rows, hidden, 2);
    static const struct {
        xp_dtype_t dtype;
        double tolerance;
    } cases[] = {{XP_DTYPE_F32, 0}, {XP_DTYPE_BF16, 0}, {XP_DTYPE_F16, 2e-3}};
    float *kept = malloc(sizeof(float) * rows * hidden),
          *out = malloc(sizeof(float) * rows * hidden);
    ffn_runtime_t *runtime = runtime_make(1, 1, 16);
    ffn_install_t install = install_of(f);
    install_ok(runtime, &install);
    run_layer(runtime, 0, rows, in, kept);
    for (uint32_t i = 0; i < 3; i++) {
        progress_log_t log = {.lock = PTHREAD_MUTEX_INITIALIZER};
        install.model = i + 1;
        install.dtype = cases[i].dtype;
        install.readers = 1 + 2 * i;
        install.progress = log_progress;
        install.progress_context = &log;
        install_ok(runtime, &install);
        assert_true(log.calls > 0 && log.most == log.total);
        uint64_t bytes;
        assert_int_equal(ffn_install_bytes(&f->spec, f->checkpoint, cases[i].dtype, 1, &bytes),
                         XP_OK);
        assert_int_equal(ffn_runtime_model_bytes(runtime, i + 1), bytes);
        run_layer(runtime, i + 1, rows, in, out);
        /* BF16 weights are exact in FP32, so that result has the same bits. */
        for (size_t k = 0; k < rows * hidden; k++)
            assert_true(fabs((double)out[k] - (double)kept[k]) <=
                        cases[i].tolerance * largest(kept, rows * hidden));
    }
    ffn_runtime_destroy(runtime);
    free(in);
    free(kept);
    free(out);
    fixture_close(f);
}

static void test_dummy(void **state)
{
    (void)state;
    fixture_t *f = fixture_of(MODEL_ARCH_DEEPSEEK_V2, XP_DTYPE_BF16);
    char path[1024];
    weights_path(f, path, sizeof(path));
    assert_int_equal(unlink(path), 0); /* dummy weights need the config only */
    const uint32_t rows = 3, hidden = f->spec.hidden;
    float *in = random_rows(rows, hidden, 2), *whole = random_rows(rows, hidden, 3);
    float *part = random_rows(rows, hidden, 4), *sum = calloc(rows * hidden, sizeof(float));
    ffn_runtime_t *runtime = runtime_make(1, 1, 16);
    ffn_install_t install = install_of(f);
    install.dummy = true;
    install.dtype = XP_DTYPE_F32;
    install_ok(runtime, &install);
    uint64_t bytes;
    assert_int_equal(ffn_install_bytes(&f->spec, NULL, XP_DTYPE_F32, 1, &bytes), XP_OK);
    assert_int_equal(ffn_runtime_model_bytes(runtime, 0), bytes);
    run_layer(runtime, 0, rows, in, whole);
    double size = largest(whole, rows * hidden);
    assert_true(size > 1e-3 && size < 100);
    for (uint32_t rank = 0; rank < 2; rank++) {
        install.model = 1 + rank;
        install.tp_size = 2;
        install.tp_rank = rank;
        install_ok(runtime, &install);
        run_layer(runtime, 1 + rank, rows, in, part);
        for (size_t i = 0; i < rows * hidden; i++)
            sum[i] += part[i];
    }
    for (size_t i = 0; i < rows * hidden; i++)
        assert_true(fabs((double)sum[i] - (double)whole[i]) <= 1e-5 * size);
    ffn_runtime_destroy(runtime);
    free(in);
    free(whole);
    free(part);
    free(sum);
    fixture_close(f);
}

static void count_refusal(void *context)
{
    (*(uint32_t *)context)++;
}

/* A shard that one runtime has loaded serves the next one without a byte read; another one, or one
 * that is not whole, is noticed and loaded anew. */
static void test_kept_weights(void **state)
{
    (void)state;
    enum { ROWS = 5 };
    fixture_t *f = fixture_of(MODEL_ARCH_QWEN3_MOE, XP_DTYPE_BF16);
    const size_t elements = (size_t)ROWS * f->spec.hidden;
    float *in = calloc(elements, sizeof(float)), *first = calloc(elements, sizeof(float));
    float *second = calloc(elements, sizeof(float));
    for (size_t i = 0; i < elements; i++)
        in[i] = (float)(i % 17) / 17.0f - 0.4f;
    uint32_t refused = 0;
    ffn_load_report_t report = {0};
    ffn_weights_t kept;
    ffn_runtime_t *runtime = runtime_make(2, 1, ROWS);
    ffn_install_t install = install_of(f);
    install.report = &report;
    install.refused = count_refusal;
    install.refused_context = &refused;
    install.readers = 3;
    assert_int_equal(ffn_runtime_export(runtime, install.model, &kept), XP_NOT_FOUND);
    install_ok(runtime, &install);
    assert_false(report.adopted);
    assert_true(report.read == report.bytes && report.bytes > 0);
    assert_int_equal(ffn_runtime_execute(runtime, 0, install.model, 1, ROWS, in, first), XP_OK);
    assert_int_equal(ffn_runtime_export(runtime, install.model, &kept), XP_OK);
    assert_true(kept.bytes == report.bytes);
    ffn_runtime_destroy(runtime);

    /* Nobody can change it. */
    assert_ptr_equal(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, kept.fd, 0), MAP_FAILED);
    assert_int_equal(pwrite(kept.fd, "x", 1, 0), -1);

    static const struct {
        uint64_t content, identity;
        uint32_t tp_size;
        bool touched, adopted;
    } cases[] = {
        {.adopted = true, .tp_size = 1},
        {.adopted = true, .tp_size = 1},
        {.content = 1, .tp_size = 1},
        {.identity = 1, .tp_size = 1},
        {.tp_size = 2},
        {.touched = true, .tp_size = 1},
    };
    uint32_t expected = 0;
    for (size_t c = 0; c < sizeof(cases) / sizeof(cases[0]); c++) {
        ffn_weights_t offered = kept;
        offered.content ^= cases[c].content;
        offered.identity ^= cases[c].identity;
        install.kept = &offered;
        install.tp_size = cases[c].tp_size;
        if (cases[c].touched) {
            char file[600];
            snprintf(file, sizeof(file), "%s/model.safetensors", f->path);
            assert_int_equal(utimensat(AT_FDCWD, file,
                                       (const struct timespec[2]){{.tv_sec = 1}, {.tv_sec = 1}}, 0),
                             0);
        }
        uint32_t files = count_open_files();
        runtime = runtime_make(2, 1, ROWS);
        install_ok(runtime, &install);
        expected += !cases[c].adopted;
        assert_int_equal(report.adopted, cases[c].adopted);
        assert_true(report.read == (cases[c].adopted ? 0 : report.bytes));
        assert_int_equal(refused, expected);
        if (cases[c].tp_size == 1) {
            memset(second, 0, elements * sizeof(float));
            assert_int_equal(ffn_runtime_execute(runtime, 0, install.model, 1, ROWS, in, second),
                             XP_OK);
            assert_memory_equal(first, second, elements * sizeof(float));
        }
        ffn_runtime_destroy(runtime);
        assert_int_equal(count_open_files(), files);
    }
    assert_int_equal(mapped_bytes("xpool-ffn:"), 0);
    close(kept.fd);
    free(in);
    free(first);
    free(second);
    fixture_close(f);
}

static void test_bad_calls(void **state)
{
    (void)state;
    ffn_runtime_t *runtime = NULL;
    ffn_runtime_config_t config = {.threads = 1, .lanes = 0, .max_rows = 4};
    assert_int_equal(ffn_runtime_create(&config, &runtime), XP_INVALID);
    config.lanes = 1;
    config.max_rows = 0;
    assert_int_equal(ffn_runtime_create(&config, &runtime), XP_INVALID);
    config.max_rows = 4;
    config.threads = 0;
    assert_int_equal(ffn_runtime_create(&config, &runtime), XP_INVALID);
    assert_null(runtime);
    ffn_runtime_destroy(NULL);

    fixture_t *f = fixture_of(MODEL_ARCH_LLAMA, XP_DTYPE_F32);
    runtime = runtime_make(1, 1, 4);
    ffn_install_t install = install_of(f);
    install.model = FFN_MAX_MODELS;
    assert_int_equal(ffn_runtime_install(runtime, &install), XP_INVALID);
    install.model = 0;
    install.tp_rank = 1;
    assert_int_equal(ffn_runtime_install(runtime, &install), XP_INVALID);
    install.tp_rank = 0;
    install_ok(runtime, &install);
    float *rows = random_rows(5, f->spec.hidden, 1);
    assert_int_equal(ffn_runtime_execute(runtime, 1, 0, 0, 1, rows, rows), XP_INVALID);
    assert_int_equal(ffn_runtime_execute(runtime, 0, 1, 0, 1, rows, rows), XP_INVALID);
    assert_int_equal(ffn_runtime_execute(runtime, 0, 0, 3, 1, rows, rows), XP_INVALID);
    assert_int_equal(ffn_runtime_execute(runtime, 0, 0, 0, 5, rows, rows), XP_INVALID);
    assert_int_equal(ffn_runtime_execute(runtime, 0, FFN_MAX_MODELS, 0, 1, rows, rows), XP_INVALID);
    ffn_runtime_uninstall(runtime, 99);
    free(rows);
    ffn_runtime_destroy(runtime);
    fixture_close(f);
}

typedef struct lane_thread {
    ffn_runtime_t *runtime;
    uint32_t lane, hidden;
    const float *in, *expected;
} lane_thread_t;

static void *lane_main(void *context)
{
    lane_thread_t *t = context;
    float *out = malloc(sizeof(float) * 8 * t->hidden);
    for (uint32_t i = 0; i < 200; i++) {
        uint32_t model = (i + t->lane) % 2, rows = 1 + (i + t->lane) % 8;
        if (ffn_runtime_execute(t->runtime, t->lane, model, 2, rows, t->in, out) != XP_OK ||
            memcmp(out, t->expected, sizeof(float) * rows * t->hidden)) {
            free(out);
            return t;
        }
    }
    free(out);
    return NULL;
}

/* Lanes on several threads at once, while another model comes and goes. */
static void test_lanes_together(void **state)
{
    (void)state;
    fixture_t *f = fixture_of(MODEL_ARCH_QWEN3_MOE, XP_DTYPE_BF16);
    fixture_t *other = fixture_of(MODEL_ARCH_GLM4_MOE_LITE, XP_DTYPE_F32);
    uint32_t hidden = f->spec.hidden;
    ffn_runtime_t *runtime = runtime_make(2, 3, 8);
    ffn_install_t install = install_of(f);
    install_ok(runtime, &install);
    install.model = 1;
    install_ok(runtime, &install);
    float *in = random_rows(8, hidden, 77), *expected = random_rows(8, hidden, 78);
    assert_int_equal(ffn_runtime_execute(runtime, 0, 0, 2, 8, in, expected), XP_OK);
    pthread_t threads[3];
    lane_thread_t contexts[3];
    for (uint32_t i = 0; i < 3; i++) {
        contexts[i] = (lane_thread_t){runtime, i, hidden, in, expected};
        assert_int_equal(pthread_create(&threads[i], NULL, lane_main, &contexts[i]), 0);
    }
    for (uint32_t i = 0; i < 5; i++) {
        ffn_install_t coming = install_of(other);
        coming.model = 2;
        install_ok(runtime, &coming);
        ffn_runtime_uninstall(runtime, 2);
    }
    for (uint32_t i = 0; i < 3; i++) {
        void *result;
        assert_int_equal(pthread_join(threads[i], &result), 0);
        assert_null(result);
    }
    ffn_runtime_destroy(runtime);
    free(in);
    free(expected);
    fixture_close(f);
    fixture_close(other);
}

/* Execution takes no memory: the allocator's books do not change. (Sanitizers keep their own.) */
static void test_execute_allocates_nothing(void **state)
{
    (void)state;
    fixture_t *f = fixture_of(MODEL_ARCH_GLM4_MOE_LITE, XP_DTYPE_BF16);
    ffn_runtime_t *runtime = runtime_make(2, 1, 64);
    ffn_install_t install = install_of(f);
    install_ok(runtime, &install);
    float *in = random_rows(64, f->spec.hidden, 1), *out = random_rows(64, f->spec.hidden, 2);
    struct mallinfo2 before = mallinfo2();
    for (uint32_t i = 0; i < 50; i++)
        assert_int_equal(ffn_runtime_execute(runtime, 0, 0, i % f->spec.layers, 1 + i, in, out),
                         XP_OK);
    struct mallinfo2 after = mallinfo2();
    assert_int_equal(before.uordblks, after.uordblks);
    assert_int_equal(before.arena, after.arena);
    ffn_runtime_destroy(runtime);
    free(in);
    free(out);
    fixture_close(f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ledger_and_memory),  cmocka_unit_test(test_budget),
        cmocka_unit_test(test_broken_checkpoints), cmocka_unit_test(test_file_cut_while_loading),
        cmocka_unit_test(test_conversion),         cmocka_unit_test(test_dummy),
        cmocka_unit_test(test_kept_weights),       cmocka_unit_test(test_bad_calls),
        cmocka_unit_test(test_lanes_together),     cmocka_unit_test(test_execute_allocates_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
