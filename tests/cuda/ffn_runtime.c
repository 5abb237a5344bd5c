/* SPDX-License-Identifier: MIT */
/*
 * The FFN runtime on a GPU: loading, all families through the host ring and the resident kernel
 * against the CPU runtime, models of real size with dummy weights against sampled reference rows,
 * steady decoding without host launches, decode beside bulk, weights that survive.
 *
 * usage: cuda_ffn_runtime [plan] [families] [real] [mixed] [load] [library] [bulk]
 *
 * Without arguments all but `bulk` and `limit`, which measure only (`limit`: decode beside bulk
 * that has fewer multiprocessors), and `plan`, which needs no GPU: it prints what the models of
 * real size take.
 */
#include <math.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/pool.h"
#include "ffn/cuda/library.h"
#include "ffn/cuda_runtime.h"
#include "ffn/dummy.h"
#include "ffn/route.h"
#include "ffn_kit.h"
#include "ffn_load.h"
#include "ffn_real.h"
#include "ffn_scheduler.h"
#include "kernels/kernels.h"
#include "model/synth.h"
#include "samples.h"

CUDA_IMAGE_DECLARE(tests_ffn_scheduler);

#define WAIT_NS      (20 * XP_NS_PER_S)
#define MOST_ROWS    8192u
#define SMALL_ROWS   300u
#define DECODE_COUNT 2000u

static uint32_t cases, failed, compared, unfair;
static double worst;
/* Of metrics: FfnAgents have cuBLASLt for dense bulk, "grouped" is without it. */
static const char *family_of_rows = "ffn.runtime.grouped";

/* ---- a runtime with the test's scheduler -----------------------------------------------------
 */
typedef struct scene {
    ffn_kit_t *kit;
    ffn_cuda_config_t config;
    ffn_cuda_runtime_t *runtime;
    cuda_module_t module;
    cuda_function_t function;
    cuda_stream_t stream;
    ffn_scheduler_page_t *page; /* mapped */
    cuda_address_t page_at;
    uint64_t orders[FFN_SCHEDULER_SLOTS];
    cuda_address_t input[2], output[2], partial[2]; /* of slots 0 and 1 */
} scene_t;

static void scene_failed(void *context, xp_status_t status, const char *text)
{
    (void)context;
    printf("failed: the runtime: %s: %s\n", xp_status_name(status), text);
    failed++;
}

static void scene_open_with(ffn_kit_t *kit, uint32_t max_rows, uint32_t max_hidden, bool resident,
                            bool cuts, bool library, scene_t *scene)
{
    static const char *const names[] = {"test_scheduler"};
    void *address;
    memset(scene, 0, sizeof(*scene));
    scene->kit = kit;
    scene->config = (ffn_cuda_config_t){
        .device = &kit->device,
        .lanes = FFN_SCHEDULER_SLOTS,
        .max_rows = max_rows,
        .resident = resident,
        .cuts = cuts,
        .library = library,
        .records = 4096,
        .cpu = -1,
        .failed = scene_failed,
    };
    CHECK_OK(ffn_cuda_runtime_create(&scene->config, &scene->runtime));
    CHECK_OK(cuda_module_load(&kit->device, &cuda_image_tests_ffn_scheduler, names, 1,
                              &scene->module, &scene->function));
    CHECK_OK(cuda_stream_create(&kit->device, true, &scene->stream));
    CHECK_OK(cuda_host_alloc(&kit->device, sizeof(*scene->page), &address));
    scene->page = address;
    memset(address, 0, sizeof(*scene->page));
    CHECK_OK(CUDA_CALL(kit->device.driver, cuMemHostGetDevicePointer, &scene->page_at, address, 0));
    for (uint32_t i = 0; i < 2; i++) {
        const uint32_t rows = i ? max_rows : SMALL_ROWS;
        scene->input[i] = ffn_kit_alloc(kit, (uint64_t)rows * max_hidden * 2);
        scene->output[i] = ffn_kit_alloc(kit, (uint64_t)rows * max_hidden * 2);
        scene->partial[i] = ffn_kit_alloc(kit, (uint64_t)rows * max_hidden * 4);
    }
}

static void scene_open(ffn_kit_t *kit, uint32_t max_rows, uint32_t max_hidden, bool resident,
                       bool library, scene_t *scene)
{
    scene_open_with(kit, max_rows, max_hidden, resident, false, library, scene);
}

static void scene_start(scene_t *scene)
{
    const uint64_t start = xp_monotonic_ns();
    CHECK_OK(ffn_cuda_runtime_start(scene->runtime));
    cuda_address_t dispatch = ffn_cuda_runtime_dispatch(scene->runtime);
    void *parameters[] = {&dispatch, &scene->page_at};
    ffn_cuda_stats_t stats;
    CHECK_OK(cuda_launch(&scene->kit->device, scene->function, 1, 1, scene->stream, parameters));
    CHECK_OK(ffn_cuda_runtime_stats(scene->runtime, &stats));
    printf(
        "# started in %.2f s: %u signatures, %u executables, %.1f MiB of Lanes, %.1f of tables\n",
        (double)(xp_monotonic_ns() - start) / 1e9, stats.signatures, stats.templates,
        (double)stats.workspace_bytes / 1048576, (double)stats.table_bytes / 1048576);
}

static void scene_close(scene_t *scene)
{
    ffn_kit_t *kit = scene->kit;
    PROTOCOL_STORE_RELEASE(&scene->page->quit, 1u);
    ffn_kit_wait(kit, scene->stream);
    const uint64_t start = xp_monotonic_ns();
    CHECK_OK(ffn_cuda_runtime_stop(scene->runtime, start + XP_NS_PER_S));
    printf("# stopped in %.1f ms\n", (double)(xp_monotonic_ns() - start) / 1e6);
    ffn_cuda_runtime_destroy(scene->runtime);
    for (uint32_t i = 0; i < 2; i++) {
        ffn_kit_free(kit, scene->input[i]);
        ffn_kit_free(kit, scene->output[i]);
        ffn_kit_free(kit, scene->partial[i]);
    }
    cuda_host_free(&kit->device, scene->page);
    cuda_stream_destroy(&kit->device, scene->stream);
    cuda_module_unload(&scene->module);
}

static void scene_post(scene_t *scene, uint32_t slot, const ffn_order_t *order)
{
    ffn_order_line_t *line = &scene->page->line[slot];
    const uint64_t sequence = ++scene->orders[slot];
    ffn_order_t filled = *order;
    filled.sequence = sequence - 1;
    line->order = filled;
    PROTOCOL_STORE_RELEASE(&line->order.sequence, sequence);
}

static bool scene_done(const scene_t *scene, uint32_t slot)
{
    return PROTOCOL_LOAD_ACQUIRE(&scene->page->line[slot].answered) == scene->orders[slot];
}

static void scene_wait(scene_t *scene, uint32_t slot)
{
    const uint64_t limit = xp_monotonic_ns() + WAIT_NS;
    while (!scene_done(scene, slot)) {
        CHECK(xp_monotonic_ns() < limit);
        CHECK(ffn_cuda_runtime_health(scene->runtime) == XP_OK);
    }
}

/* Waits until the lease is the one for that order, which is posted to the host meanwhile. */
static void scene_lease(scene_t *scene, uint32_t slot, const ffn_order_t *order)
{
    const uint64_t limit = xp_monotonic_ns() + WAIT_NS;
    const uint32_t wanted = order->few ? FFN_CUDA_LEASE_FEW : FFN_CUDA_LEASE_DECODE;
    ffn_order_t once = *order;
    once.count = 1;
    once.resident = 0;
    for (;;) {
        ffn_cuda_stats_t stats;
        CHECK_OK(ffn_cuda_runtime_stats(scene->runtime, &stats));
        CHECK(xp_monotonic_ns() < limit);
        if (stats.lease_in_force == wanted)
            return;
        if (stats.lease_in_force) {
            scene_post(scene, slot, &once);
            scene_wait(scene, slot);
        }
    }
}

static char folder[256];

static const char *real_path(uint32_t model)
{
    static char path[REAL_MODELS][512];
    char file[600];
    snprintf(path[model], sizeof(path[model]), "%s/%s", folder, real_models[model].name);
    snprintf(file, sizeof(file), "%s/config.json", path[model]);
    mkdir(path[model], 0700);
    FILE *out = fopen(file, "w");
    CHECK(out && fputs(real_models[model].config, out) >= 0 && fclose(out) == 0);
    return path[model];
}

/* ---- reference of dummy weights --------------------------------------------------------------
 */
typedef struct product {
    uint64_t seed;
    uint32_t rows, columns;
    xp_dtype_t dtype;
    const float *x;
    float *out;
} product_t;

static void product_run(void *context, uint32_t member, uint32_t members)
{
    const product_t *p = context;
    const float scale = ffn_dummy_scale(p->columns);
    float *row = malloc(p->columns * sizeof(*row));
    uint8_t *packed = malloc(p->columns * sizeof(*row));
    CHECK(row && packed);
    for (uint32_t r = member; r < p->rows; r += members) {
        double sum = 0;
        for (uint32_t k = 0; k < p->columns; k++)
            row[k] = ffn_dummy_value(p->seed, (uint64_t)r * p->columns + k, scale);
        if (p->dtype != XP_DTYPE_F32) {
            kernels_convert(XP_DTYPE_F32, row, p->dtype, packed, p->columns);
            kernels_convert(p->dtype, packed, XP_DTYPE_F32, row, p->columns);
        }
        for (uint32_t k = 0; k < p->columns; k++)
            sum += (double)row[k] * p->x[k];
        p->out[r] = (float)sum;
    }
    free(row);
    free(packed);
}

static void multiply(xp_pool_t *pool, const char *name, uint32_t rows, uint32_t columns,
                     const float *x, float *out)
{
    product_t product = {.seed = ffn_dummy_seed(name),
                         .rows = rows,
                         .columns = columns,
                         .dtype = XP_DTYPE_BF16,
                         .x = x,
                         .out = out};
    xp_pool_run(pool, product_run, &product);
}

static void reference_part(xp_pool_t *pool, const model_spec_t *spec, const char *prefix,
                           uint32_t width, float weight, const float *x, float *out)
{
    char name[160];
    float *gate = malloc(width * sizeof(*gate)), *up = malloc(width * sizeof(*up));
    float *down = malloc(spec->hidden * sizeof(*down));
    CHECK(gate && up && down);
    snprintf(name, sizeof(name), "%sgate_proj.weight", prefix);
    multiply(pool, name, width, spec->hidden, x, gate);
    snprintf(name, sizeof(name), "%sup_proj.weight", prefix);
    multiply(pool, name, width, spec->hidden, x, up);
    for (uint32_t i = 0; i < width; i++)
        gate[i] = gate[i] / (1 + expf(-gate[i])) * up[i];
    snprintf(name, sizeof(name), "%sdown_proj.weight", prefix);
    multiply(pool, name, spec->hidden, width, gate, down);
    for (uint32_t h = 0; h < spec->hidden; h++)
        out[h] += weight * down[h];
    free(gate);
    free(up);
    free(down);
}

/* One row of a layer. False: the choice of experts hangs on the last bits. */
static bool reference_row(xp_pool_t *pool, const model_spec_t *spec, uint32_t layer, const float *x,
                          float *out)
{
    const model_ffn_t *ffn = &spec->ffn[layer];
    char prefix[128], name[160];
    memset(out, 0, spec->hidden * sizeof(*out));
    snprintf(prefix, sizeof(prefix), "model.layers.%u.mlp.", layer);
    if (ffn->kind == MODEL_FFN_DENSE) {
        reference_part(pool, spec, prefix, ffn->intermediate, 1, x, out);
        return true;
    }
    float logits[MODEL_MAX_EXPERTS], moved[MODEL_MAX_EXPERTS], bias[MODEL_MAX_EXPERTS];
    float weights[MODEL_MAX_TOP_K], unused[MODEL_MAX_TOP_K];
    uint32_t chosen[MODEL_MAX_TOP_K], other[MODEL_MAX_TOP_K];
    snprintf(name, sizeof(name), "%sgate.weight", prefix);
    multiply(pool, name, ffn->experts, spec->hidden, x, logits);
    snprintf(name, sizeof(name), "%sgate.e_score_correction_bias", prefix);
    for (uint32_t e = 0; e < ffn->experts; e++) {
        bias[e] = ffn_dummy_value(ffn_dummy_seed(name), e, ffn_dummy_scale(ffn->experts));
        /* Alternately up and down by what sums in another order may differ. */
        moved[e] = logits[e] + (e % 2 ? 2e-5f : -2e-5f);
    }
    const float *shift = ffn->correction_bias ? bias : NULL;
    ffn_route_row(ffn, logits, shift, chosen, weights);
    ffn_route_row(ffn, moved, shift, other, unused);
    if (memcmp(chosen, other, ffn->top_k * sizeof(chosen[0])))
        return false;
    for (uint32_t i = 0; i < ffn->top_k; i++) {
        snprintf(prefix, sizeof(prefix), "model.layers.%u.mlp.experts.%u.", layer, chosen[i]);
        reference_part(pool, spec, prefix, ffn->intermediate, weights[i], x, out);
    }
    snprintf(prefix, sizeof(prefix), "model.layers.%u.mlp.shared_experts.", layer);
    if (ffn->shared_intermediate)
        reference_part(pool, spec, prefix, ffn->shared_intermediate, 1, x, out);
    return true;
}

/* ---- comparing -------------------------------------------------------------------------------
 */
static void input_row(uint64_t seed, uint32_t row, uint32_t hidden, xp_dtype_t dtype, float *x)
{
    uint16_t *packed = malloc(hidden * 2);
    CHECK(packed);
    for (uint32_t k = 0; k < hidden; k++)
        x[k] = ffn_kit_value(seed, (uint64_t)row * hidden + k);
    kernels_convert(XP_DTYPE_F32, x, dtype, packed, hidden);
    kernels_convert(dtype, packed, XP_DTYPE_F32, x, hidden);
    free(packed);
}

static void compare_row(const scene_t *scene, uint32_t slot, uint32_t row, uint32_t hidden,
                        xp_dtype_t dtype, bool partial, const float *want, const char *what)
{
    float *got = malloc(hidden * sizeof(*got));
    uint16_t *packed = malloc(hidden * 2);
    CHECK(got && packed);
    if (partial) {
        ffn_kit_read(scene->kit, scene->partial[slot] + (uint64_t)row * hidden * 4, got,
                     hidden * 4);
    } else {
        ffn_kit_read(scene->kit, scene->output[slot] + (uint64_t)row * hidden * 2, packed,
                     hidden * 2);
        kernels_convert(dtype, packed, XP_DTYPE_F32, got, hidden);
    }
    /* Activations are rounded between the two products, outputs at the end. */
    const double limit = dtype == XP_DTYPE_BF16 ? 8e-3 : 2e-3;
    const double error = ffn_kit_error(got, want, hidden);
    compared++;
    worst = fmax(worst, error / limit);
    if (!(error <= limit)) {
        printf("failed: %s: row %u is off by %.2e (%g %g, want %g %g)\n", what, row, error,
               (double)got[0], (double)got[1], (double)want[0], (double)want[1]);
        failed++;
    }
    free(got);
    free(packed);
}

/* ---- families --------------------------------------------------------------------------------
 */
/* Rows 0 to 64, and one number more. */
#define FAMILY_COUNTS 66u

static uint32_t family_rows(uint32_t i)
{
    return i < FAMILY_COUNTS - 1 ? i : SMALL_ROWS;
}

typedef struct family {
    model_spec_t spec;
    ffn_runtime_t *cpu;
    xp_dtype_t dtype;
    float *x, *want; /* [SMALL_ROWS][hidden] */
} family_t;

/* Which kernels execute. */
enum { BY_HOST, BY_DECODE, BY_FEW };
static const char *const way_names[] = {"host", "resident", "resident, few rows"};

static void family_case(scene_t *scene, const family_t *family, uint32_t layer, uint32_t number,
                        uint32_t resident)
{
    const uint32_t rows = family_rows(number), hidden = family->spec.hidden;
    const bool partial = (number + layer) % 2;
    const uint64_t seed = 1000 + layer * 100 + number;
    char what[160];
    ffn_kit_fill(scene->kit, scene->input[0], (uint64_t)SMALL_ROWS * hidden, seed, 1,
                 family->dtype == XP_DTYPE_F16 ? FFN_CUDA_F16 : FFN_CUDA_BF16);
    const ffn_order_t order = {
        .layer = layer,
        .layers = 1,
        .rows = rows,
        .count = 1,
        .resident = resident != BY_HOST,
        .few = resident == BY_FEW,
        .urgent = rows <= FFN_CUDA_DECODE_ROWS,
        .input = (void *)(uintptr_t)scene->input[0],
        .output = partial ? NULL : (void *)(uintptr_t)scene->output[0],
        .partial = partial ? (float *)(uintptr_t)scene->partial[0] : NULL,
    };
    if (resident)
        scene_lease(scene, 0, &order);
    scene_post(scene, 0, &order);
    scene_wait(scene, 0);
    for (uint32_t r = 0; r < rows; r++)
        input_row(seed, r, hidden, family->dtype, family->x + (size_t)r * hidden);
    CHECK_OK(ffn_runtime_execute(family->cpu, 0, 0, layer, rows, family->x, family->want));
    snprintf(what, sizeof(what), "%s layer %u, %u rows, %s", family->spec.architecture_name, layer,
             rows, way_names[resident]);
    cases++;
    if (resident && scene->page->line[0].by_host) {
        printf("failed: %s: fired by the host\n", what);
        failed++;
    }
    for (uint32_t r = 0; r<rows; r += rows> 20 ? rows / 10 : 1)
        compare_row(scene, 0, r, hidden, family->dtype, partial, family->want + (size_t)r * hidden,
                    what);
}

static void family_run(ffn_kit_t *kit, model_architecture_t architecture, xp_dtype_t dtype)
{
    static family_t family;
    synth_options_t options;
    char path[512];
    scene_t scene;
    model_synth_defaults(architecture, &options);
    options.layers = 3;
    options.dtype = dtype;
    options.force = true;
    snprintf(path, sizeof(path), "%s/family-%u", folder, architecture);
    CHECK_OK(model_synth_write(&options, path));
    CHECK_OK(model_spec_load(path, &family.spec));
    family.dtype = dtype == XP_DTYPE_F16 ? XP_DTYPE_F16 : XP_DTYPE_BF16;
    const ffn_install_t install = {
        .model_id = "family", .path = path, .dtype = family.dtype, .tp_size = 1, .readers = 2};
    scene_open(kit, SMALL_ROWS, family.spec.hidden, true, false, &scene);
    CHECK_OK(ffn_cuda_runtime_install(scene.runtime, &install, NULL, NULL));
    scene_start(&scene);
    const ffn_runtime_config_t config = {.threads = 4, .lanes = 1, .max_rows = SMALL_ROWS};
    CHECK_OK(ffn_runtime_create(&config, &family.cpu));
    CHECK_OK(ffn_runtime_install(family.cpu, &install));
    family.x = malloc((size_t)SMALL_ROWS * family.spec.hidden * 4);
    family.want = malloc((size_t)SMALL_ROWS * family.spec.hidden * 4);
    CHECK(family.x && family.want);
    const uint32_t few_rows = ffn_cuda_runtime_tables(scene.runtime)->models[0].few_rows;
    static const uint32_t ways[] = {BY_DECODE, BY_FEW, BY_HOST};
    for (uint32_t w = 0; w < 3; w++)
        for (uint32_t l = 0; l < family.spec.layers; l++)
            for (uint32_t i = 0; i < FAMILY_COUNTS; i++) {
                const uint32_t rows = family_rows(i);
                const uint32_t decode = family.spec.ffn[l].kind == MODEL_FFN_MOE
                                            ? FFN_CUDA_DECODE_ROWS
                                            : FFN_CUDA_DENSE_ROWS;
                if (ways[w] == BY_HOST || (ways[w] == BY_DECODE && rows <= decode) ||
                    (ways[w] == BY_FEW && rows > FFN_CUDA_DENSE_ROWS && rows <= few_rows))
                    family_case(&scene, &family, l, i, ways[w]);
            }
    scene_close(&scene);
    ffn_runtime_destroy(family.cpu);
    free(family.x);
    free(family.want);
}

static void test_families(ffn_kit_t *kit)
{
    for (uint32_t a = 0; a < MODEL_ARCH_COUNT; a++)
        family_run(kit, (model_architecture_t)a,
                   a % 3 == 0   ? XP_DTYPE_F32
                   : a % 3 == 1 ? XP_DTYPE_BF16
                                : XP_DTYPE_F16);
}

/* ---- real sizes ------------------------------------------------------------------------------
 */
static void real_install(scene_t *scene, uint32_t model, const ffn_cuda_weights_t *kept)
{
    ffn_cuda_load_report_t report;
    const ffn_install_t install = {.model = model,
                                   .model_id = real_models[model].name,
                                   .path = real_path(model),
                                   .dtype = XP_DTYPE_AUTO,
                                   .dummy = true,
                                   .tp_size = 1};
    CHECK_OK(ffn_cuda_runtime_install(scene->runtime, &install, kept, &report));
    printf("# %s: %.2f GB %s in %.3f s\n", real_models[model].name, (double)report.bytes / 1e9,
           report.adopted ? "adopted" : "made up", (double)report.took_ns / 1e9);
}

static void real_check(scene_t *scene, xp_pool_t *pool, uint32_t model, uint32_t layer,
                       uint32_t rows, uint32_t resident)
{
    model_spec_t *spec = malloc(sizeof(*spec));
    CHECK(spec);
    CHECK_OK(model_spec_load(real_path(model), spec));
    const uint32_t hidden = spec->hidden, slot = rows > SMALL_ROWS;
    const uint64_t seed = 77 + model * 10 + layer;
    float *x = malloc(hidden * 4), *want = malloc(hidden * 4);
    char what[160];
    CHECK(x && want);
    ffn_kit_fill(scene->kit, scene->input[slot], (uint64_t)rows * hidden, seed, 1, FFN_CUDA_BF16);
    const ffn_order_t order = {
        .model = model,
        .layer = layer,
        .layers = 1,
        .rows = rows,
        .count = 1,
        .resident = resident != BY_HOST,
        .few = resident == BY_FEW,
        .urgent = rows <= FFN_CUDA_DECODE_ROWS,
        .input = (void *)(uintptr_t)scene->input[slot],
        .output = (void *)(uintptr_t)scene->output[slot],
    };
    if (resident)
        scene_lease(scene, slot, &order);
    scene_post(scene, slot, &order);
    scene_wait(scene, slot);
    snprintf(what, sizeof(what), "%s layer %u, %u rows, %s", real_models[model].name, layer, rows,
             way_names[resident]);
    if (resident && scene->page->line[slot].by_host) {
        printf("failed: %s: fired by the host\n", what);
        failed++;
    }
    cases++;
    for (uint32_t i = 0, done = 0; i < rows && done < 2; i++) {
        const uint32_t row = (uint32_t)((uint64_t)i * 7919 % rows);
        input_row(seed, row, hidden, XP_DTYPE_BF16, x);
        if (!reference_row(pool, spec, layer, x, want)) {
            unfair++;
            continue;
        }
        compare_row(scene, slot, row, hidden, XP_DTYPE_BF16, false, want, what);
        done++;
    }
    printf("# %s: %.1f us\n", what, scene->page->line[slot].samples[0] / 1e3);
    free(x);
    free(want);
    free(spec);
}

static int compare_samples(const void *a, const void *b)
{
    const uint32_t left = *(const uint32_t *)a, right = *(const uint32_t *)b;
    return left < right ? -1 : left > right;
}

static void print_row(const char *metric, double value, const char *unit, const char *note)
{
    ffn_kit_row(metric, value, unit, NAN, NULL, note);
}

/* P50 and P99 of a slot's last order. */
static void print_samples(const scene_t *scene, uint32_t slot, uint32_t count, const char *metric,
                          const char *note)
{
    static uint32_t samples[FFN_SCHEDULER_SAMPLES];
    char name[128];
    count = count < FFN_SCHEDULER_SAMPLES ? count : FFN_SCHEDULER_SAMPLES;
    memcpy(samples, scene->page->line[slot].samples, count * sizeof(samples[0]));
    qsort(samples, count, sizeof(samples[0]), compare_samples);
    snprintf(name, sizeof(name), "%s.p50_us", metric);
    print_row(name, samples[count / 2] / 1e3, "us", note);
    samples_keep(metric, samples, count);
    snprintf(name, sizeof(name), "%s.p99_us", metric);
    print_row(name, samples[count - 1 - count / 100] / 1e3, "us", note);
}

static ffn_order_t decode_order(const scene_t *scene, uint32_t model, bool resident)
{
    return (ffn_order_t){
        .model = model,
        .layers = 6,
        .rows = 1,
        .count = DECODE_COUNT,
        .resident = resident,
        .urgent = 1,
        .input = (void *)(uintptr_t)scene->input[0],
        .output = (void *)(uintptr_t)scene->output[0],
    };
}

/* Decoding of one model, alone and while another one's 8192-row prefill runs. */
static void mixed_run(scene_t *scene, uint32_t decode, uint32_t bulk)
{
    ffn_cuda_stats_t before, after;
    char metric[128], note[256];
    for (uint32_t resident = 0; resident < 2; resident++) {
        const ffn_order_t order = decode_order(scene, decode, resident);
        if (resident)
            scene_lease(scene, 0, &order);
        CHECK_OK(ffn_cuda_runtime_stats(scene->runtime, &before));
        scene_post(scene, 0, &order);
        scene_wait(scene, 0);
        CHECK_OK(ffn_cuda_runtime_stats(scene->runtime, &after));
        snprintf(metric, sizeof(metric), "%s.%s.%s", family_of_rows, real_models[decode].name,
                 resident ? "resident" : "host");
        snprintf(note, sizeof(note), "1 row, 6 layers in turn, post to done; %llu host launches",
                 (unsigned long long)(after.host_launches - before.host_launches));
        print_samples(scene, 0, DECODE_COUNT, metric, note);
        if (resident &&
            (after.host_launches != before.host_launches || scene->page->line[0].by_host)) {
            printf("failed: %u of %u steady decode Invocations went to the host\n",
                   scene->page->line[0].by_host, DECODE_COUNT);
            failed++;
        }
    }
    /* Bulk until the decoding is done. */
    const ffn_order_t order = decode_order(scene, decode, true);
    const ffn_order_t prefill = {
        .model = bulk,
        .layers = 6,
        .rows = MOST_ROWS,
        .count = 6,
        .input = (void *)(uintptr_t)scene->input[1],
        .output = (void *)(uintptr_t)scene->output[1],
    };
    const uint64_t start = xp_monotonic_ns();
    uint32_t chunks = 0;
    scene_post(scene, 1, &prefill);
    scene_post(scene, 0, &order);
    while (!scene_done(scene, 0)) {
        if (scene_done(scene, 1)) {
            chunks += prefill.count;
            scene_post(scene, 1, &prefill);
        }
        CHECK(xp_monotonic_ns() - start < WAIT_NS);
        CHECK(ffn_cuda_runtime_health(scene->runtime) == XP_OK);
    }
    const double seconds = (double)(xp_monotonic_ns() - start) / 1e9;
    snprintf(metric, sizeof(metric), "%s.%s.beside_bulk", family_of_rows, real_models[decode].name);
    snprintf(note, sizeof(note), "1 row beside chunks of %u rows of %s; %u chunks in %.2f s",
             MOST_ROWS, real_models[bulk].name, chunks, seconds);
    print_samples(scene, 0, DECODE_COUNT, metric, note);
    scene_wait(scene, 1);
    snprintf(metric, sizeof(metric), "%s.bulk_beside_%s", family_of_rows, real_models[decode].name);
    print_samples(scene, 1, prefill.count, metric, note);
}

static void test_real(ffn_kit_t *kit, bool check, bool mixed, bool library)
{
    xp_pool_t *pool;
    scene_t scene;
    ffn_cuda_weights_t kept[REAL_MODELS];
    if (library) {
        ffn_library_t *found;
        if (ffn_library_open(&kit->kernels, &found) != XP_OK) {
            printf("failed: cuBLASLt: %s\n", xp_error_last()->text);
            failed++;
            return;
        }
        ffn_library_close(found);
    }
    family_of_rows = library ? "ffn.runtime" : "ffn.runtime.grouped";
    CHECK_OK(xp_pool_create(xp_usable_cpus() < 16 ? xp_usable_cpus() : 16, NULL, 0, &pool));
    scene_open(kit, MOST_ROWS, 5120, true, library, &scene);
    for (uint32_t m = 0; m < REAL_MODELS; m++) {
        real_install(&scene, m, NULL);
        CHECK_OK(ffn_cuda_runtime_export(scene.runtime, m, &kept[m]));
    }
    scene_start(&scene);
    const uint32_t cases_before = cases, failed_before = failed;
    for (uint32_t m = 0; check && m < REAL_MODELS; m++)
        for (uint32_t layer = 0; layer < 2; layer++) {
            real_check(&scene, pool, m, layer, 1, BY_DECODE);
            real_check(&scene, pool, m, layer, 16, BY_DECODE);
            real_check(&scene, pool, m, layer, 1, BY_HOST);
            if (ffn_cuda_runtime_tables(scene.runtime)->models[m].few_rows)
                real_check(&scene, pool, m, layer, 40, BY_FEW);
            real_check(&scene, pool, m, layer, 17, BY_HOST);
            real_check(&scene, pool, m, layer, 64, BY_HOST);
            real_check(&scene, pool, m, layer, 128, BY_HOST);
            real_check(&scene, pool, m, layer, MOST_ROWS, BY_HOST);
        }
    if (mixed) {
        mixed_run(&scene, 0, 1);
        mixed_run(&scene, 1, 0);
    }
    scene_close(&scene);
    if (check) {
        /* The next runtime finds the weights where they are. */
        scene_open(kit, SMALL_ROWS, 5120, true, false, &scene);
        for (uint32_t m = 0; m < REAL_MODELS; m++)
            real_install(&scene, m, &kept[m]);
        scene_start(&scene);
        real_check(&scene, pool, 0, 1, 1, BY_DECODE);
        real_check(&scene, pool, 3, 1, 5, BY_DECODE);
        scene_close(&scene);
        char note[240], metric[64];
        snprintf(metric, sizeof(metric), "%s.real_wrong", family_of_rows);
        snprintf(note, sizeof(note),
                 "%u cases: %s, %s, %s and %s together, 6 layers each, dummy weights, up to %u "
                 "rows; sampled rows against a reference in FP32",
                 cases - cases_before, real_models[0].name, real_models[1].name,
                 real_models[2].name, real_models[3].name, MOST_ROWS);
        ffn_kit_row(metric, failed - failed_before, "rows", NAN, "0", note);
    }
    for (uint32_t m = 0; m < REAL_MODELS; m++)
        for (uint32_t b = 0; b < kept[m].count; b++)
            close(kept[m].fd[b]);
    xp_pool_destroy(pool);
}

/* ---- the path of bulk work -------------------------------------------------------------------
 */
enum { BULK_COUNT = 24 };

/* The executions among the latest records with that many rows, ascending, microseconds. */
static uint32_t bulk_records(scene_t *scene, uint32_t rows, bool resident, double *us_out)
{
    static ffn_cuda_record_t records[4096];
    uint32_t samples[BULK_COUNT], kept = 0;
    uint64_t skipped;
    const uint32_t count = ffn_cuda_runtime_records(scene->runtime, records, 4096, &skipped);
    for (uint32_t i = 0; i < count && kept < BULK_COUNT; i++)
        if (records[i].rows == rows && records[i].resident == resident)
            samples[kept++] = (uint32_t)records[i].duration_ns;
    qsort(samples, kept, sizeof(samples[0]), compare_samples);
    for (uint32_t i = 0; i < kept; i++)
        us_out[i] = samples[i] / 1e3;
    return kept;
}

/* What lies between the scheduler's post and its `done`: the executables' own time by their
 * records, and what is left for ring, host thread, graph launch and the last word; or for the queue
 * of the resident kernel of few rows. */
static void bulk_run(scene_t *scene, uint32_t model, uint32_t rows, bool resident)
{
    char metric[128], note[256];
    double execution[BULK_COUNT];
    uint32_t samples[BULK_COUNT];
    const ffn_order_t order = {
        .model = model,
        .layers = 6,
        .rows = rows,
        .count = BULK_COUNT,
        .resident = resident,
        .few = resident,
        .urgent = rows <= 64, /* as the scheduler says of decoding */
        .input = (void *)(uintptr_t)scene->input[1],
        .output = (void *)(uintptr_t)scene->output[1],
    };
    const ffn_order_t decode = decode_order(scene, model, true);
    scene_lease(scene, resident ? 1 : 0, resident ? &order : &decode);
    bulk_records(scene, rows, resident, execution); /* what was before */
    scene_post(scene, 1, &order);
    scene_wait(scene, 1);
    memcpy(samples, scene->page->line[1].samples, sizeof(samples));
    const double first = samples[0] / 1e3;
    const uint32_t by_host = scene->page->line[1].by_host;
    qsort(samples, BULK_COUNT, sizeof(samples[0]), compare_samples);
    const double whole = samples[BULK_COUNT / 2] / 1e3;
    if (resident && by_host) {
        printf("failed: %u of %u rows' Invocations went to the host\n", by_host, rows);
        failed++;
        return;
    }
    /* The last record is written after `done`. */
    const uint64_t limit = xp_monotonic_ns() + WAIT_NS;
    uint32_t kept = 0;
    while (kept < BULK_COUNT) {
        kept += bulk_records(scene, rows, resident, execution + kept);
        CHECK(xp_monotonic_ns() < limit);
        if (kept < BULK_COUNT)
            usleep(1000);
    }
    const double median = execution[BULK_COUNT / 2];
    const char *name = model == 0 ? "dense" : rows <= FEW_ROWS_MOST ? "few" : "bulk";
    const char *way = resident ? ".resident" : "";
    snprintf(note, sizeof(note), "%u rows of %s, layers in turn, P50 of %u%s", rows,
             real_models[model].name, BULK_COUNT, resident ? ", no host" : "");
    snprintf(metric, sizeof(metric), "ffn.runtime.%s%u%s.post_to_done_us", name, rows, way);
    print_row(metric, whole, "us", note);
    snprintf(metric, sizeof(metric), "ffn.runtime.%s%u%s.execution_us", name, rows, way);
    print_row(metric, median, "us", note);
    if (resident)
        return;
    snprintf(metric, sizeof(metric), "ffn.runtime.%s%u.host_us", name, rows);
    print_row(metric, whole - median, "us", note);
    snprintf(metric, sizeof(metric), "ffn.runtime.%s%u.ends_lease_us", name, rows);
    print_row(metric, first - whole, "us",
              "the first one, while the resident kernel has its lease");
}

static void test_bulk(ffn_kit_t *kit)
{
    static const uint32_t counts[] = {17, 32, 64, 128, 512, 1024, 4096, MOST_ROWS};
    enum { MODEL = 1 }; /* qwen3-30b-a3b */
    scene_t scene;
    scene_open(kit, MOST_ROWS, 2048, true, false, &scene);
    real_install(&scene, MODEL, NULL);
    ffn_kit_fill(kit, scene.input[1], (uint64_t)MOST_ROWS * 2048, 31, 1, FFN_CUDA_BF16);
    scene_start(&scene);
    for (uint32_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        bulk_run(&scene, MODEL, counts[i], false);
        if (counts[i] <= FEW_ROWS_MOST)
            bulk_run(&scene, MODEL, counts[i], true);
    }
    scene_close(&scene);
    /* A dense model, with cuBLASLt as FfnAgents have it. */
    scene_open(kit, MOST_ROWS, 5120, true, true, &scene);
    real_install(&scene, 0, NULL);
    ffn_kit_fill(kit, scene.input[1], (uint64_t)MOST_ROWS * 5120, 31, 1, FFN_CUDA_BF16);
    scene_start(&scene);
    for (uint32_t i = 0; i + 1 < sizeof(counts) / sizeof(counts[0]); i++)
        bulk_run(&scene, 0, counts[i], false);
    scene_close(&scene);
}

/* ---- two models that decode ------------------------------------------------------------------
 */
/* Short Invocations beside another model's long ones, as attention leaves them: with pauses. The
 * latest outputs of each have the bits of the same Invocations alone. */
enum { CUTS_KEPT = 48, CUTS_HIDDEN = 5120, CUTS_ROWS = 16 };

typedef struct cuts_side {
    ffn_order_t order;
    const char *name;
    uint64_t bytes; /* of an output */
    uint8_t *want, *got;
} cuts_side_t;

static void cuts_side_run(scene_t *scene, cuts_side_t *side, uint32_t slot)
{
    scene_lease(scene, slot, &side->order);
    scene_post(scene, slot, &side->order);
    scene_wait(scene, slot);
    ffn_kit_read(scene->kit, scene->output[slot], side->want, CUTS_KEPT * side->bytes);
}

/* cuts: how many of the short ones are to cut, at least. */
static void cuts_run(scene_t *scene, bool on, uint32_t other, uint32_t other_rows, uint32_t cuts)
{
    enum { MODEL = 1, PAUSE_NS = 45000, SHORT = 2400, LONG = 480 };
    char metric[128], note[256];
    cuts_side_t side[2] = {{.order = decode_order(scene, MODEL, true), .name = "short"},
                           {.order = decode_order(scene, other, true), .name = "long"}};
    side[1].order.rows = other_rows;
    for (uint32_t slot = 0; slot < 2; slot++) {
        cuts_side_t *s = &side[slot];
        const ffn_cuda_dispatch_t *tables = ffn_cuda_runtime_tables(scene->runtime);
        s->bytes = (uint64_t)s->order.rows * tables->models[s->order.model].hidden * 2;
        s->want = malloc(CUTS_KEPT * s->bytes);
        s->got = malloc(CUTS_KEPT * s->bytes);
        CHECK(s->want && s->got);
        s->order.input = (void *)(uintptr_t)scene->input[slot];
        s->order.output = (void *)(uintptr_t)scene->output[slot];
        s->order.output_step = s->bytes;
        s->order.outputs = CUTS_KEPT;
        s->order.pause_ns = PAUSE_NS;
        s->order.count = slot ? LONG : SHORT; /* the short ones are the last to end */
        cuts_side_run(scene, s, slot);
        snprintf(metric, sizeof(metric), "ffn.cuts.%s%u.%s.alone", real_models[other].name,
                 other_rows, s->name);
        if (!on)
            print_samples(scene, slot, s->order.count, metric,
                          "6 layers in turn, 45 us apart, post to done");
    }
    for (uint32_t slot = 2; slot-- > 0;)
        scene_post(scene, slot, &side[slot].order);
    for (uint32_t slot = 0; slot < 2; slot++)
        scene_wait(scene, slot);
    for (uint32_t slot = 0; slot < 2; slot++) {
        cuts_side_t *s = &side[slot];
        const ffn_order_line_t *line = &scene->page->line[slot];
        uint32_t wrong = 0;
        ffn_kit_read(scene->kit, scene->output[slot], s->got, CUTS_KEPT * s->bytes);
        for (uint32_t i = 0; i < CUTS_KEPT; i++)
            wrong += memcmp(s->want + i * s->bytes, s->got + i * s->bytes, s->bytes) != 0;
        cases++;
        const bool as_wanted = slot || !on ? line->cuts == 0
                               : cuts      ? line->cuts >= cuts
                                           : line->cuts == 0;
        if (wrong || line->by_host || !as_wanted) {
            printf("failed: cuts %s, %u rows of %s, the %s ones: %u of %u outputs have other bits "
                   "than "
                   "alone, %u by the host, %u cuts\n",
                   on ? "on" : "off", other_rows, real_models[other].name, s->name, wrong,
                   CUTS_KEPT, line->by_host, line->cuts);
            failed++;
        }
        snprintf(metric, sizeof(metric), "ffn.cuts.%s%u.%s.%s", real_models[other].name, other_rows,
                 s->name, on ? "cut" : "queued");
        snprintf(note, sizeof(note), "1 row of %s beside %u rows of %s; %u of %u cut",
                 real_models[MODEL].name, other_rows, real_models[other].name, line->cuts,
                 s->order.count);
        print_samples(scene, slot, LONG, metric, note); /* while both run */
        free(s->want);
        free(s->got);
    }
}

static void test_cuts(ffn_kit_t *kit)
{
    for (uint32_t cuts = 0; cuts < 2; cuts++) {
        scene_t scene;
        scene_open_with(kit, CUTS_KEPT * CUTS_ROWS, CUTS_HIDDEN, true, cuts, false, &scene);
        for (uint32_t m = 0; m < REAL_MODELS; m++)
            real_install(&scene, m, NULL);
        ffn_kit_fill(kit, scene.input[0], 5120, 31, 1, FFN_CUDA_BF16);
        ffn_kit_fill(kit, scene.input[1], (uint64_t)CUTS_ROWS * CUTS_HIDDEN, 32, 1, FFN_CUDA_BF16);
        scene_start(&scene);
        cuts_run(&scene, cuts, 2, 8, 50);
        cuts_run(&scene, cuts, 2, 1, 0); /* too short to be cut */
        cuts_run(&scene, cuts, 3, 16, 50);
        cuts_run(&scene, cuts, 0, 4, 50);
        scene_close(&scene);
    }
}

/* ---- what needs no GPU -----------------------------------------------------------------------
 */
static int print_plan(void)
{
    const model_spec_t *specs[REAL_MODELS];
    uint32_t tp[REAL_MODELS];
    ffn_cuda_ledger_t ledger;
    for (uint32_t m = 0; m < REAL_MODELS; m++) {
        model_spec_t *spec = malloc(sizeof(*spec));
        uint64_t bytes;
        CHECK(spec);
        CHECK_OK(model_spec_load(real_path(m), spec));
        CHECK_OK(ffn_cuda_weight_bytes(spec, NULL, XP_DTYPE_AUTO, 1, &bytes));
        printf("%s: %u layers, %.3f GB of weights\n", real_models[m].name, spec->layers,
               (double)bytes / 1e9);
        specs[m] = spec;
        tp[m] = 1;
    }
    CHECK_OK(ffn_cuda_runtime_bytes(specs, tp, REAL_MODELS, FFN_SCHEDULER_SLOTS, MOST_ROWS, 0, true,
                                    &ledger));
    printf("tables %.1f MiB, Lanes %.1f MiB, workspaces %.1f MiB\n",
           (double)ledger.table_bytes / 1048576, (double)ledger.lane_bytes / 1048576,
           (double)ledger.workspace_bytes / 1048576);
    for (uint32_t m = 0; m < REAL_MODELS; m++)
        free((void *)specs[m]);
    return 0;
}

/* At exit, however that comes: what was written lies in one folder of our own. */
static void folder_remove(void)
{
    char command[300];
    snprintf(command, sizeof(command), "rm -rf '%s'", folder);
    if (system(command) != 0)
        printf("%s is left\n", folder);
}

static bool wanted(int count, char **arguments, const char *step)
{
    for (int i = 1; i < count; i++)
        if (strcmp(arguments[i], step) == 0)
            return true;
    return count == 1;
}

int main(int count, char **arguments)
{
    ffn_kit_t kit;
    const char *root = getenv("TMPDIR");
    setvbuf(stdout, NULL, _IOLBF, 0);
    snprintf(folder, sizeof(folder), "%s/xpool-ffn-runtime-%d", root ? root : "/tmp", getpid());
    CHECK(mkdir(folder, 0700) == 0 && atexit(folder_remove) == 0);
    int code = 0;
    if (count > 1 && wanted(count, arguments, "plan")) {
        code = print_plan();
    } else {
        ffn_kit_open(&kit, 0);
        if (wanted(count, arguments, "families"))
            test_families(&kit);
        const bool real = wanted(count, arguments, "real"),
                   mixed = wanted(count, arguments, "mixed");
        if (real || mixed)
            test_real(&kit, real, mixed, false);
        if (count > 1 && wanted(count, arguments, "bulk"))
            test_bulk(&kit);
        if (count > 1 && wanted(count, arguments, "cuts"))
            test_cuts(&kit);
        if (wanted(count, arguments, "library"))
            test_real(&kit, true, true, true);
        if (wanted(count, arguments, "load"))
            ffn_load_measure(&kit, folder);
        ffn_kit_close(&kit);
        printf("%u cases, %u failed, %u rows compared, %u not comparable (ties), largest error "
               "%.2f of the tolerance\n",
               cases, failed, compared, unfair, worst);
        code = failed || unfair > compared ? 1 : 0;
    }
    return code;
}
