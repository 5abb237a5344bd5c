/* SPDX-License-Identifier: MIT */
/*
 * The FFN kernels against the CPU reference, for many shapes: decode (launch, captured graph,
 * resident), bulk, cuBLASLt, sums of partials.
 *
 * usage: cuda_ffn_kernels [small] [decode] [resident] [bulk] [few] [padded] [library]
 *                         [reduce]
 *        cuda_ffn_kernels planted
 * small: few rows and shapes, for compute-sanitizer. No group named: all of them. Every case runs,
 * also after one that failed. planted: nothing but errors for compute-sanitizer to find.
 */
#include <math.h>
#include <string.h>

#include "ffn_kit.h"

/* BF16 keeps 8 bits: an activation and the output are each rounded once, by up to 2^-8, on an
 * average (of squares) by 1.7e-3. A sum of many activations is off by such an average; of few, one
 * may be most of it. Then the bound is 2^-8 = 3.9e-3 times the condition of down's columns, 1.075
 * for 8 of 4096 rows; and the output's average is added by squares. */
#define FEW_ACTIVATIONS 32u
static double tolerance(const ffn_cuda_signature_t *s, bool partial)
{
    const uint32_t activations = s->experts ? s->top_k * s->intermediate : s->intermediate;
    if (s->dtype == FFN_CUDA_BF16 && activations < FEW_ACTIVATIONS)
        return partial ? 4.2e-3 : 4.5e-3;
    if (s->dtype == FFN_CUDA_BF16)
        return partial ? 3e-3 : 4e-3;
    return partial ? 5e-4 : 6e-4;
}

typedef struct test_lane {
    ffn_cuda_lane_t lane;
    cuda_address_t at, workspace, input, output, partial;
    uint64_t seed;
    uint32_t max_rows;
} test_lane_t;

static bool small;
static double slack = 1; /* over the tolerance */
static uint32_t cases, compared, unfair, failed;
static double worst;

static void lane_make(ffn_kit_t *kit, const ffn_kit_model_t *m, uint32_t max_rows, uint32_t bulk,
                      test_lane_t *l)
{
    const uint64_t elements = (uint64_t)max_rows * m->signature.hidden;
    ffn_cuda_limits_t limits = {.bulk_rows = bulk};
    memset(l, 0, sizeof(*l));
    ffn_cuda_limits_add(&limits, &m->signature);
    l->max_rows = max_rows;
    l->workspace = ffn_kit_alloc(kit, ffn_cuda_workspace_bytes(&limits));
    ffn_cuda_workspace_carve(&limits, l->workspace, &l->lane.workspace);
    l->at = ffn_kit_alloc(kit, sizeof(l->lane));
    l->input = ffn_kit_alloc(kit, elements * 2);
    l->output = ffn_kit_alloc(kit, elements * 2 + 2);
    l->partial = ffn_kit_alloc(kit, elements * 4 + 4);
    l->lane.layers = (void *)(uintptr_t)m->layer_at;
    l->lane.input = (void *)(uintptr_t)l->input;
}

static void lane_free(ffn_kit_t *kit, test_lane_t *l)
{
    const cuda_address_t all[] = {l->workspace, l->at, l->input, l->output, l->partial};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
        ffn_kit_free(kit, all[i]);
}

/* New rows of input, poisoned outputs, the Lane's words. */
static void lane_set(ffn_kit_t *kit, const ffn_kit_model_t *m, test_lane_t *l, uint32_t layer,
                     uint32_t rows, bool partial, uint64_t seed)
{
    const uint64_t elements = (uint64_t)l->max_rows * m->signature.hidden;
    l->seed = seed;
    ffn_kit_fill(kit, l->input, elements, seed, 1.0f, (ffn_cuda_dtype_t)m->signature.dtype);
    ffn_kit_set(kit, l->output, 0xff, elements * 2 + 2);
    ffn_kit_set(kit, l->partial, 0xff, elements * 4 + 4);
    l->lane.layer = layer;
    l->lane.rows = rows;
    l->lane.output = partial ? NULL : (void *)(uintptr_t)l->output;
    l->lane.partial = partial ? (float *)(uintptr_t)l->partial : NULL;
    ffn_kit_write(kit, l->at, &l->lane, sizeof(l->lane));
}

static void lane_row(ffn_kit_t *kit, const ffn_kit_model_t *m, const test_lane_t *l, uint32_t row,
                     float *out)
{
    const uint32_t hidden = m->signature.hidden;
    uint16_t *packed = malloc(hidden * 2);
    CHECK(packed);
    if (l->lane.output) {
        ffn_kit_read(kit, l->output + (uint64_t)row * hidden * 2, packed, hidden * 2);
        for (uint32_t i = 0; i < hidden; i++)
            out[i] = ffn_kit_to_float(packed[i], (ffn_cuda_dtype_t)m->signature.dtype);
    } else {
        ffn_kit_read(kit, l->partial + (uint64_t)row * hidden * 4, out, hidden * 4);
    }
    free(packed);
}

/* The reference of a row, kept: decode and resident compute the same. */
static bool reference_row(const ffn_kit_model_t *m, uint32_t layer, uint64_t seed, uint32_t row,
                          float *want)
{
    enum { PLACES = 4096 };
    static struct {
        uint64_t model, seed;
        uint32_t layer, row;
        bool fair;
        float *values;
    } kept[PLACES];
    const uint32_t hidden = m->signature.hidden;
    uint32_t at = 0;
    while (at < PLACES && kept[at].values &&
           (kept[at].model != m->seed || kept[at].seed != seed || kept[at].layer != layer ||
            kept[at].row != row))
        at++;
    CHECK(at < PLACES);
    if (!kept[at].values) {
        kept[at].values = malloc(hidden * sizeof(float));
        CHECK(kept[at].values);
        kept[at].fair = ffn_kit_reference(m, layer, seed, row, kept[at].values);
        kept[at].model = m->seed;
        kept[at].seed = seed;
        kept[at].layer = layer;
        kept[at].row = row;
    }
    memcpy(want, kept[at].values, hidden * sizeof(float));
    return kept[at].fair;
}

/* Compares up to `limit` of the live rows with the reference, and what lies past them with poison.
 */
static void lane_compare(ffn_kit_t *kit, const ffn_kit_model_t *m, const test_lane_t *l,
                         uint32_t limit, const char *what)
{
    const uint32_t hidden = m->signature.hidden, rows = l->lane.rows;
    float *got = malloc(hidden * 4), *want = malloc(hidden * 4);
    const double limit_error = slack * tolerance(&m->signature, l->lane.output == NULL);
    CHECK(got && want);
    cases++;
    for (uint32_t i = 0; i < limit && i < rows; i++) {
        const uint32_t row = rows <= limit ? i : (uint32_t)((uint64_t)i * (rows - 1) / (limit - 1));
        if (!reference_row(m, l->lane.layer, l->seed, row, want)) {
            unfair++;
            continue;
        }
        lane_row(kit, m, l, row, got);
        const double error = ffn_kit_error(got, want, hidden);
        compared++;
        worst = fmax(worst, error / limit_error);
        if (!(error <= limit_error)) {
            printf("failed: %s: hidden %u width %u experts %u top %u shared %u type %u "
                   "rows %u: row %u is off by %.2e\n",
                   what, hidden, m->signature.intermediate, m->signature.experts,
                   m->signature.top_k, m->signature.shared_intermediate, m->signature.dtype, rows,
                   row, error);
            printf("  got %g %g %g %g, want %g %g %g %g\n", (double)got[0], (double)got[1],
                   (double)got[2], (double)got[3], (double)want[0], (double)want[1],
                   (double)want[2], (double)want[3]);
            failed++;
            break;
        }
    }
    uint16_t after;
    const uint64_t end = (uint64_t)rows * hidden;
    ffn_kit_read(kit, l->lane.output ? l->output + end * 2 : l->partial + end * 4, &after, 2);
    if (after != 0xffff) {
        printf("failed: %s: rows %u: something was written past the live rows\n", what, rows);
        failed++;
    }
    free(want);
    free(got);
}

static ffn_cuda_signature_t dense(uint32_t hidden, uint32_t width, uint32_t dtype)
{
    return (ffn_cuda_signature_t){
        .hidden = hidden, .intermediate = width, .dtype = dtype, .routed_scale = 1.0f};
}

static ffn_cuda_signature_t moe(uint32_t hidden, uint32_t width, uint32_t experts, uint32_t top_k)
{
    return (ffn_cuda_signature_t){.hidden = hidden,
                                  .intermediate = width,
                                  .dtype = FFN_CUDA_BF16,
                                  .experts = experts,
                                  .top_k = top_k,
                                  .normalize = 1,
                                  .groups = 1,
                                  .top_groups = 1,
                                  .routed_scale = 1.0f};
}

typedef struct shape {
    ffn_cuda_signature_t signature;
    bool bias;
} shape_t;

#define SHAPES_MAX 32
static uint32_t shapes_make(shape_t *shapes)
{
    uint32_t n = 0;
    shapes[n++] = (shape_t){dense(256, 512, FFN_CUDA_BF16), false};
    shapes[n++] = (shape_t){dense(136, 88, FFN_CUDA_F16), false};
    shapes[n] = (shape_t){moe(128, 64, 8, 2), false};
    n++;
    shapes[n] = (shape_t){moe(192, 72, 16, 4), true}; /* as GLM: sigmoid, bias, FP32 router */
    shapes[n].signature.router = 1;
    shapes[n].signature.router_dtype = FFN_CUDA_F32;
    shapes[n].signature.shared_intermediate = 72;
    shapes[n].signature.routed_scale = 1.8f;
    n++;
    if (small)
        return n;
    shapes[n] = (shape_t){dense(1032, 2056, FFN_CUDA_BF16), false};
    shapes[n++].signature.activation = 1;
    shapes[n++] = (shape_t){dense(1024, 3072, FFN_CUDA_F16), false};
    shapes[n++] = (shape_t){dense(4096, 8, FFN_CUDA_BF16), false};
    shapes[n++] = (shape_t){dense(64, 40000, FFN_CUDA_BF16), false}; /* more tiles than a panel */
    shapes[n++] = (shape_t){moe(512, 256, 128, 8), false};
    shapes[n++] = (shape_t){moe(264, 136, 40, 1), false};
    shapes[n] = (shape_t){moe(512, 128, 64, 6), false}; /* as DeepSeek-V2: not normalised, shared */
    shapes[n].signature.normalize = 0;
    shapes[n].signature.shared_intermediate = 256;
    n++;
    shapes[n] = (shape_t){moe(256, 96, 64, 6), true}; /* groups, sigmoid */
    shapes[n].signature.router = 1;
    shapes[n].signature.groups = 8;
    shapes[n].signature.top_groups = 3;
    shapes[n].signature.routed_scale = 2.5f;
    n++;
    shapes[n] = (shape_t){moe(256, 96, 48, 4), false}; /* groups, softmax */
    shapes[n].signature.groups = 4;
    shapes[n].signature.top_groups = 2;
    n++;
    shapes[n] = (shape_t){moe(320, 128, 24, 3), true};
    shapes[n].signature.dtype = FFN_CUDA_F16;
    shapes[n].signature.router = 1;
    shapes[n].signature.router_dtype = FFN_CUDA_F32;
    n++;
    shapes[n] = (shape_t){moe(256, 128, 512, 22), false};
    n++;
    shapes[n++] = (shape_t){moe(512, 1280, 64, 8), false}; /* bulk: more launches than one */
    return n;
}

/* ---- decode
 * -------------------------------------------------------------------------------------- */
static void test_decode(ffn_kit_t *kit, const ffn_kit_model_t *m)
{
    static const uint32_t counts[] = {0, 1, 2, 5, 8, 9, 16, 17, 24, 32};
    const uint32_t hidden = m->signature.hidden, most = ffn_cuda_decode_rows(&m->signature);
    test_lane_t l;
    lane_make(kit, m, most, 0, &l);
    uint16_t *all = malloc(hidden * 2 * most), *one = malloc(hidden * 2);
    CHECK(all && one);
    for (uint32_t i = 0; i < sizeof(counts) / sizeof(counts[0]) && counts[i] <= most; i++) {
        lane_set(kit, m, &l, i % m->layers, counts[i], i % 2, 100 + i);
        CHECK_OK(ffn_cuda_decode(&kit->kernels, l.at, kit->stream));
        ffn_kit_wait(kit, kit->stream);
        lane_compare(kit, m, &l, 3, "decode");
    }
    /* A row gives the same bits alone and among others. */
    lane_set(kit, m, &l, 0, most, false, 99);
    CHECK_OK(ffn_cuda_decode(&kit->kernels, l.at, kit->stream));
    ffn_kit_wait(kit, kit->stream);
    ffn_kit_read(kit, l.output, all, hidden * 2 * most);
    for (uint32_t row = 0; row < most; row += 5) {
        l.lane.input = (void *)(uintptr_t)(l.input + (uint64_t)row * hidden * 2);
        l.lane.rows = 1;
        ffn_kit_write(kit, l.at, &l.lane, sizeof(l.lane));
        CHECK_OK(ffn_cuda_decode(&kit->kernels, l.at, kit->stream));
        ffn_kit_wait(kit, kit->stream);
        ffn_kit_read(kit, l.output, one, hidden * 2);
        if (memcmp(one, all + (size_t)row * hidden, hidden * 2) != 0) {
            printf("failed: decode: hidden %u width %u experts %u: row %u alone has "
                   "other bits\n",
                   hidden, m->signature.intermediate, m->signature.experts, row);
            failed++;
        }
    }
    /* Who computes a row does not change it: the same bits with very uneven shares. */
    static uint32_t shares[2][FFN_CUDA_MAX_BLOCKS + 1], cycles[2][FFN_CUDA_MAX_BLOCKS];
    for (uint32_t round = 0; round < 4; round++) {
        for (uint32_t i = 0; i < FFN_CUDA_MAX_BLOCKS; i++)
            cycles[0][i] = cycles[1][i] = 1000 + i * 7919 % 1000;
        ffn_cuda_shares_adjust(kit->kernels.blocks, cycles, shares);
    }
    ffn_kit_write(kit, (cuda_address_t)(uintptr_t)l.lane.workspace.shares, shares, sizeof(shares));
    CHECK_OK(ffn_cuda_decode(&kit->kernels, l.at, kit->stream));
    ffn_kit_wait(kit, kit->stream);
    ffn_kit_read(kit, l.output, one, hidden * 2);
    if (memcmp(one, all + (size_t)(most - 1) / 5 * 5 * hidden, hidden * 2) != 0) {
        printf("failed: decode: hidden %u width %u experts %u: other shares, other bits\n", hidden,
               m->signature.intermediate, m->signature.experts);
        failed++;
    }
    memset(shares, 0, sizeof(shares));
    /* Captured once, fired for other layers and rows. */
    cuda_graph_exec_t graph;
    l.lane.input = (void *)(uintptr_t)l.input;
    CHECK_OK(cuda_capture_begin(&kit->device, kit->stream));
    CHECK_OK(ffn_cuda_decode(&kit->kernels, l.at, kit->stream));
    CHECK_OK(cuda_capture_end(&kit->device, kit->stream, &graph));
    for (uint32_t i = 0; i < 3; i++) {
        lane_set(kit, m, &l, i % m->layers, 3 + i * 4, false, 200 + i);
        CHECK_OK(cuda_graph_launch(&kit->device, graph, kit->stream));
        ffn_kit_wait(kit, kit->stream);
        lane_compare(kit, m, &l, 2, "decode graph");
    }
    cuda_graph_destroy(&kit->device, graph);
    free(one);
    free(all);
    lane_free(kit, &l);
}

/* Which resident kernel. */
enum { RESIDENT_PLAIN, RESIDENT_AHEAD, RESIDENT_FEW };
static const char *const resident_names[] = {"resident", "resident, looking ahead",
                                             "resident, few rows"};

static void resident_launch(ffn_kit_t *kit, cuda_address_t queue, uint32_t which)
{
    CHECK_OK(which == RESIDENT_FEW
                 ? ffn_cuda_few_resident(&kit->kernels, queue, kit->stream)
                 : ffn_cuda_resident(&kit->kernels, queue, which == RESIDENT_AHEAD, kit->stream));
}

/* Lanes of different layers and rows in turn through a resident kernel, twice around the queue.
 */
static void test_resident(ffn_kit_t *kit, const ffn_kit_model_t *m, uint32_t which, bool stop)
{
    enum { LANES = 5 };
    const bool few = which == RESIDENT_FEW;
    const uint32_t bulk = few ? ffn_cuda_few_rows(&m->signature) : 0;
    const uint32_t decode[LANES] = {1, 16, 0, 7, m->signature.experts ? 30 : 12};
    const uint32_t wide[LANES] = {17, small ? 33 : 64, 0, 32, 40};
    const uint32_t *rows = few ? wide : decode;
    test_lane_t lanes[LANES];
    if (few && bulk == 0)
        return;
    cuda_address_t queue = ffn_kit_alloc(kit, sizeof(ffn_cuda_queue_t));
    cuda_address_t list = ffn_kit_alloc(kit, sizeof(cuda_address_t) * LANES);
    cuda_address_t answer = ffn_kit_alloc(kit, 256), samples = 0;
    const uint32_t rounds = 2 * FFN_CUDA_QUEUE_ENTRIES / LANES * LANES;
    for (uint32_t i = 0; i < LANES; i++) {
        lane_make(kit, m, few ? bulk : ffn_cuda_decode_rows(&m->signature), bulk, &lanes[i]);
        /* Lanes 1, 2 and 3 follow each other's layers, 0 and 4 do not. */
        lane_set(kit, m, &lanes[i], (i + i / 4) % m->layers, rows[i], i % 2, 300 + i);
        ffn_kit_write(kit, list + i * sizeof(cuda_address_t), &lanes[i].at, sizeof(cuda_address_t));
    }
    if (small) {
        /* The sanitizer runs one kernel at a time: the whole queue is there before the launch. */
        ffn_cuda_command_t commands[2 * LANES + 1];
        memset(commands, 0, sizeof(commands));
        for (uint32_t i = 0; i <= 2 * LANES; i++) {
            commands[i].sequence = i + 1;
            if (i < 2 * LANES) {
                const ffn_cuda_lane_t *lane = &lanes[i % LANES].lane;
                commands[i].lane = (ffn_cuda_lane_t *)(uintptr_t)lanes[i % LANES].at;
                commands[i].layers = lane->layers;
                commands[i].input = lane->input;
                commands[i].output = lane->output;
                commands[i].partial = lane->partial;
                commands[i].layer = lane->layer;
                commands[i].rows = lane->rows;
                commands[i].lane_number = i % 2; /* two Lanes may have one number */
            }
        }
        ffn_kit_write(kit, queue, commands, sizeof(commands));
        resident_launch(kit, queue, which);
    } else {
        uint32_t lane_count = LANES, pause_ns = 0, posted = rounds;
        uint64_t first = 0, last = (uint64_t)rounds + 1;
        void *post[] = {&queue, &list, &lane_count, &first, &posted, &pause_ns, &answer, &samples};
        void *leave[] = {&queue, &last};
        resident_launch(kit, queue, which);
        CHECK_OK(CUDA_CALL(kit->device.driver, cuLaunchKernel, kit->function[FFN_KIT_POST], 1, 1, 1,
                           1, 1, 1, 0, kit->side, post, NULL));
        CHECK_OK(CUDA_CALL(kit->device.driver, cuLaunchKernel,
                           kit->function[stop ? FFN_KIT_STOP : FFN_KIT_LEAVE], 1, 1, 1, 1, 1, 1, 0,
                           kit->side, leave, NULL));
    }
    ffn_kit_wait(kit, kit->side);
    ffn_kit_wait(kit, kit->stream);
    for (uint32_t i = 0; i < LANES; i++) {
        lane_compare(kit, m, &lanes[i], few ? 4 : 2, resident_names[which]);
        lane_free(kit, &lanes[i]);
    }
    ffn_kit_free(kit, answer);
    ffn_kit_free(kit, list);
    ffn_kit_free(kit, queue);
}

/* A row gives the same bits among others as beside two of them, and with other blocks and
 * Capacities. */
typedef xp_status_t (*layer_call_t)(const ffn_cuda_kernels_t *, const ffn_cuda_signature_t *,
                                    uint32_t, uint32_t, cuda_address_t, cuda_stream_t);
static void test_alone(ffn_kit_t *kit, const ffn_kit_model_t *m, test_lane_t *l,
                       layer_call_t compute, uint32_t most, const char *what)
{
    const uint32_t hidden = m->signature.hidden;
    uint16_t *all = malloc((size_t)hidden * 2 * most), *some = malloc((size_t)hidden * 2 * 3);
    CHECK(all && some);
    lane_set(kit, m, l, 0, most, false, 899);
    CHECK_OK(compute(&kit->kernels, &m->signature, most, 0, l->at, kit->stream));
    ffn_kit_wait(kit, kit->stream);
    ffn_kit_read(kit, l->output, all, (uint64_t)hidden * 2 * most);
    for (uint32_t row = 0; row + 3 <= most; row += most / 4 + 13) {
        l->lane.input = (void *)(uintptr_t)(l->input + (uint64_t)row * hidden * 2);
        l->lane.rows = 3;
        ffn_kit_write(kit, l->at, &l->lane, sizeof(l->lane));
        CHECK_OK(
            compute(&kit->kernels, &m->signature, 3 + row % 30, 7 + row % 90, l->at, kit->stream));
        ffn_kit_wait(kit, kit->stream);
        ffn_kit_read(kit, l->output, some, hidden * 2 * 3);
        cases++;
        if (memcmp(some, all + (size_t)row * hidden, hidden * 2 * 3) != 0) {
            printf("failed: %s: hidden %u width %u experts %u: rows from %u alone have other "
                   "bits\n",
                   what, hidden, m->signature.intermediate, m->signature.experts, row);
            failed++;
        }
    }
    l->lane.input = (void *)(uintptr_t)l->input;
    free(some);
    free(all);
}

/* ---- bulk
 * ---------------------------------------------------------------------------------------- */
static void test_bulk(ffn_kit_t *kit, const ffn_kit_model_t *m)
{
    static const uint32_t counts[] = {0, 1, 17, 64, 129, 700, 2048, 8192};
    const uint32_t most = small ? 129 : (m->signature.hidden <= 512 ? 8192 : 700);
    test_lane_t l;
    lane_make(kit, m, most, most, &l);
    for (uint32_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        if (counts[i] > most)
            break;
        lane_set(kit, m, &l, i % m->layers, counts[i], i % 2, 400 + i);
        /* The Capacity may be larger than the live rows. */
        CHECK_OK(ffn_cuda_bulk(&kit->kernels, &m->signature, i % 3 ? most : counts[i], 0, l.at,
                               kit->stream));
        ffn_kit_wait(kit, kit->stream);
        lane_compare(kit, m, &l, 4, "bulk");
    }
    test_alone(kit, m, &l, ffn_cuda_bulk, most, "bulk");
    lane_free(kit, &l);
}

/* The products of few rows, as a row gets them with any others. */
static void test_few(ffn_kit_t *kit, const ffn_kit_model_t *m)
{
    static const uint32_t counts[] = {0, 1, 8, 17, 24, 32, 33, 48, 64};
    const uint32_t most = small ? 33 : ffn_cuda_few_rows(&m->signature);
    const char *what = "few rows";
    test_lane_t l;
    if (ffn_cuda_few_rows(&m->signature) == 0)
        return;
    lane_make(kit, m, most, most, &l);
    for (uint32_t i = 0; i < sizeof(counts) / sizeof(counts[0]) && counts[i] <= most; i++) {
        lane_set(kit, m, &l, i % m->layers, counts[i], i % 2, 800 + i);
        CHECK_OK(ffn_cuda_few(&kit->kernels, &m->signature, i % 3 ? most : counts[i], i % 4 * 11,
                              l.at, kit->stream));
        ffn_kit_wait(kit, kit->stream);
        lane_compare(kit, m, &l, 4, what);
    }
    test_alone(kit, m, &l, ffn_cuda_few, most, what);
    /* Captured once, fired for other layers and rows; two layers a graph, one after the other. */
    cuda_graph_exec_t graph;
    l.lane.input = (void *)(uintptr_t)l.input;
    CHECK_OK(cuda_capture_begin(&kit->device, kit->stream));
    for (uint32_t i = 0; i < 2; i++)
        CHECK_OK(ffn_cuda_few(&kit->kernels, &m->signature, most, 0, l.at, kit->stream));
    CHECK_OK(cuda_capture_end(&kit->device, kit->stream, &graph));
    for (uint32_t i = 0; i < 3; i++) {
        lane_set(kit, m, &l, i % m->layers, most - i * 11, false, 900 + i);
        CHECK_OK(cuda_graph_launch(&kit->device, graph, kit->stream));
        CHECK_OK(cuda_graph_launch(&kit->device, graph, kit->stream));
        ffn_kit_wait(kit, kit->stream);
        lane_compare(kit, m, &l, 2, what);
    }
    cuda_graph_destroy(&kit->device, graph);
    lane_free(kit, &l);
}

/* ---- padded rows -------------------------------------------------------------------------------
 * Three live rows of a batch captured for more. Experts that only the rows behind them would choose
 * have no weights at all (reading them ends the program), and the counters name each chosen expert.
 */
#define PADDED_LIVE     3u
#define PADDED_CAPACITY 32u

typedef struct padded_case {
    test_lane_t lane;
    uint64_t live[FFN_CUDA_MAX_EXPERTS]; /* live rows that choose each, by the reference */
    uint32_t distinct, absent;
} padded_case_t;

/* Rows whose choice hangs on the last bits are no reference: another seed. */
static uint64_t padded_seed(const ffn_kit_model_t *m)
{
    float *unused = malloc(m->signature.hidden * sizeof(float));
    CHECK(unused);
    for (uint64_t seed = 800; seed < 900; seed++) {
        uint32_t row = 0;
        while (row < PADDED_LIVE && ffn_kit_reference(m, 0, seed, row, unused))
            row++;
        if (row == PADDED_LIVE) {
            free(unused);
            return seed;
        }
    }
    CHECK(!"three rows without ties");
    return 0;
}

/* Takes the weights of experts of padded rows out of the table of layer 0. */
static void padded_take_out(ffn_kit_t *kit, const ffn_kit_model_t *m, padded_case_t *one)
{
    uint32_t chosen[FFN_CUDA_MAX_TOP_K];
    bool absent[FFN_CUDA_MAX_EXPERTS] = {false};
    ffn_cuda_part_t *parts = malloc(m->parts * sizeof(*parts));
    CHECK(parts);
    memcpy(parts, m->part, m->parts * sizeof(*parts));
    for (uint32_t row = 0; row < PADDED_CAPACITY; row++) {
        ffn_kit_chosen(m, 0, one->lane.seed, row, chosen);
        for (uint32_t i = 0; i < m->signature.top_k; i++) {
            one->live[chosen[i]] += row < PADDED_LIVE;
            absent[chosen[i]] = true;
        }
    }
    for (uint32_t e = 0; e < m->signature.experts; e++) {
        one->distinct += one->live[e] != 0;
        if (!absent[e] || one->live[e])
            continue;
        parts[e] = (ffn_cuda_part_t){NULL, NULL, NULL};
        one->absent++;
    }
    ffn_kit_write(kit, m->part_at, parts, m->parts * sizeof(*parts));
    free(parts);
}

/* After one execution with zeroed counters. */
static void padded_check(ffn_kit_t *kit, const ffn_kit_model_t *m, const padded_case_t *one,
                         const char *what)
{
    const uint64_t bytes = ffn_cuda_usage_bytes(m->signature.experts);
    ffn_cuda_usage_t *usage = malloc(bytes);
    CHECK(usage);
    ffn_kit_read(kit, m->usage, usage, bytes);
    lane_compare(kit, m, &one->lane, PADDED_LIVE, what);
    bool right =
        usage->executions == 1 && usage->rows == PADDED_LIVE && usage->experts == one->distinct;
    for (uint32_t e = 0; e < m->signature.experts; e++)
        right = right && ffn_cuda_usage_chosen(usage)[e] == one->live[e];
    if (!right) {
        printf("failed: %s: experts %u top %u: %llu executions of %llu rows read %llu experts, "
               "%u live rows choose %u\n",
               what, m->signature.experts, m->signature.top_k,
               (unsigned long long)usage->executions, (unsigned long long)usage->rows,
               (unsigned long long)usage->experts, PADDED_LIVE, one->distinct);
        failed++;
    }
    free(usage);
}

static void padded_fresh(ffn_kit_t *kit, const ffn_kit_model_t *m, padded_case_t *one)
{
    ffn_kit_set(kit, m->usage, 0, ffn_cuda_usage_bytes(m->signature.experts));
    lane_set(kit, m, &one->lane, 0, PADDED_LIVE, false, one->lane.seed);
}

static void padded_graph(ffn_kit_t *kit, const ffn_kit_model_t *m, padded_case_t *one,
                         uint32_t bulk_rows, bool few, const char *what)
{
    cuda_graph_exec_t graph;
    padded_fresh(kit, m, one);
    CHECK_OK(cuda_capture_begin(&kit->device, kit->stream));
    if (few)
        CHECK_OK(
            ffn_cuda_few(&kit->kernels, &m->signature, bulk_rows, 0, one->lane.at, kit->stream));
    else if (bulk_rows)
        CHECK_OK(
            ffn_cuda_bulk(&kit->kernels, &m->signature, bulk_rows, 0, one->lane.at, kit->stream));
    else
        CHECK_OK(ffn_cuda_decode(&kit->kernels, one->lane.at, kit->stream));
    CHECK_OK(cuda_capture_end(&kit->device, kit->stream, &graph));
    CHECK_OK(cuda_graph_launch(&kit->device, graph, kit->stream));
    ffn_kit_wait(kit, kit->stream);
    padded_check(kit, m, one, what);
    cuda_graph_destroy(&kit->device, graph);
}

static void padded_resident(ffn_kit_t *kit, const ffn_kit_model_t *m, padded_case_t *one,
                            uint32_t which)
{
    char what[64];
    ffn_cuda_command_t commands[2];
    cuda_address_t queue = ffn_kit_alloc(kit, sizeof(ffn_cuda_queue_t));
    padded_fresh(kit, m, one);
    memset(commands, 0, sizeof(commands));
    commands[0] = (ffn_cuda_command_t){.sequence = 1,
                                       .lane = (ffn_cuda_lane_t *)(uintptr_t)one->lane.at,
                                       .layers = one->lane.lane.layers,
                                       .input = one->lane.lane.input,
                                       .output = one->lane.lane.output,
                                       .rows = PADDED_LIVE};
    commands[1].sequence = 2; /* no Lane: leave */
    ffn_kit_write(kit, queue, commands, sizeof(commands));
    resident_launch(kit, queue, which);
    ffn_kit_wait(kit, kit->stream);
    snprintf(what, sizeof(what), "padded rows, %s", resident_names[which]);
    padded_check(kit, m, one, what);
    ffn_kit_free(kit, queue);
}

static void test_padded(ffn_kit_t *kit, const ffn_kit_model_t *m)
{
    static const uint32_t capacities[] = {4, 8, 16, PADDED_CAPACITY};
    padded_case_t one;
    memset(&one, 0, sizeof(one));
    lane_make(kit, m, PADDED_CAPACITY, PADDED_CAPACITY, &one.lane);
    one.lane.seed = padded_seed(m);
    padded_take_out(kit, m, &one);
    padded_graph(kit, m, &one, 0, false, "padded rows, decode graph");
    padded_resident(kit, m, &one, RESIDENT_PLAIN);
    if (ffn_cuda_few_rows(&m->signature))
        padded_resident(kit, m, &one, RESIDENT_FEW);
    for (uint32_t i = 0; i < sizeof(capacities) / sizeof(capacities[0]); i++)
        padded_graph(kit, m, &one, capacities[i], false, "padded rows, bulk graph");
    for (uint32_t i = 0; i < sizeof(capacities) / sizeof(capacities[0]); i++)
        if (capacities[i] <= ffn_cuda_few_rows(&m->signature))
            padded_graph(kit, m, &one, capacities[i], true, "padded rows, graph of few rows");
    printf("padded rows: experts %u top %u: %u live rows read %u experts; %u more would be read "
           "with the %u padded ones\n",
           m->signature.experts, m->signature.top_k, PADDED_LIVE, one.distinct, one.absent,
           PADDED_CAPACITY - PADDED_LIVE);
    ffn_kit_write(kit, m->part_at, m->part, m->parts * sizeof(*m->part));
    lane_free(kit, &one.lane);
}

static void test_library(ffn_kit_t *kit, const ffn_kit_model_t *m)
{
    static const uint32_t counts[] = {1, 17, 33, 100, 512, 2048, 8192};
    ffn_library_t *library;
    if (ffn_library_open(&kit->kernels, &library) != XP_OK) {
        printf("skipped: cuBLASLt: %s\n", xp_error_last()->text);
        return;
    }
    const uint32_t most = small ? 33 : 8192;
    test_lane_t l;
    lane_make(kit, m, most, 0, &l);
    for (uint32_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        ffn_library_plan_t *plan;
        const bool partial = i % 2;
        if (counts[i] > most)
            break;
        lane_set(kit, m, &l, i % m->layers, counts[i], partial, 500 + i);
        CHECK_OK(ffn_library_plan_make(library, &m->signature, counts[i], i == 5 ? 64 : 0, &plan));
        cuda_address_t scratch = ffn_kit_alloc(kit, ffn_library_scratch_bytes(plan));
        CHECK_OK(ffn_library_run(plan, &m->part[i % m->layers], l.input, partial ? 0 : l.output,
                                 partial ? l.partial : 0, scratch, kit->stream));
        ffn_kit_wait(kit, kit->stream);
        /* Here gate and up are rounded too, before the activation. */
        slack = 1.6;
        lane_compare(kit, m, &l, 2, "cuBLASLt");
        slack = 1;
        ffn_kit_free(kit, scratch);
        ffn_library_plan_free(plan);
    }
    lane_free(kit, &l);
    ffn_library_close(library);
}

/* Two shards' partials: the sum of what two half-width models compute. */
static void test_reduce(ffn_kit_t *kit, const ffn_kit_model_t *m)
{
    enum { PARTIALS = 3, ROWS = 77 };
    const uint32_t hidden = m->signature.hidden, count = ROWS * hidden;
    test_lane_t l;
    lane_make(kit, m, ROWS, 0, &l);
    cuda_address_t partial = ffn_kit_alloc(kit, (uint64_t)count * 4 * PARTIALS);
    uint16_t *got = malloc(count * 2);
    CHECK(got);
    lane_set(kit, m, &l, 0, ROWS, false, 600);
    for (uint32_t i = 0; i < PARTIALS; i++) {
        ffn_kit_fill(kit, partial + (uint64_t)i * count * 4, count, 700 + i, 1.0f, FFN_CUDA_F32);
        l.lane.partials[i] = (const float *)(uintptr_t)(partial + (uint64_t)i * count * 4);
    }
    l.lane.partial_count = PARTIALS;
    ffn_kit_write(kit, l.at, &l.lane, sizeof(l.lane));
    CHECK_OK(ffn_cuda_reduce(&kit->kernels, ROWS, hidden, l.at, kit->stream));
    ffn_kit_wait(kit, kit->stream);
    ffn_kit_read(kit, l.output, got, count * 2);
    for (uint32_t i = 0; i < count; i++) {
        float want = 0;
        for (uint32_t p = 0; p < PARTIALS; p++)
            want += ffn_kit_value(700 + p, i);
        const float value = ffn_kit_to_float(got[i], (ffn_cuda_dtype_t)m->signature.dtype);
        CHECK(fabsf(value - want) <= fabsf(want) / 256 + 1e-7f);
    }
    cases++;
    free(got);
    ffn_kit_free(kit, partial);
    lane_free(kit, &l);
}

/* A word past the end of an allocation is still within the driver's, so this ends well without the
 * tool. With it the launch may fail. */
static int planted(ffn_kit_t *kit)
{
    xp_clock_t clock = xp_clock_system();
    cuda_address_t words = ffn_kit_alloc(kit, 4);
    uint32_t at = 1;
    void *parameters[] = {&words, &at};
    CHECK_OK(CUDA_CALL(kit->device.driver, cuLaunchKernel, kit->function[FFN_KIT_PLANTED], 1, 1, 1,
                       64, 1, 1, 0, kit->stream, parameters, NULL));
    const xp_status_t status =
        cuda_stream_wait(&kit->device, kit->stream, &clock, xp_monotonic_ns() + 10000000000ull);
    printf("planted: the launch %s\n", status == XP_OK ? "ended" : "failed");
    return 0;
}

static bool wanted(int count, char **arguments, const char *group)
{
    bool any = false;
    for (int i = 1; i < count; i++) {
        if (strcmp(arguments[i], group) == 0)
            return true;
        any = any || strcmp(arguments[i], "small") != 0;
    }
    return !any;
}

int main(int count, char **arguments)
{
    shape_t shapes[SHAPES_MAX];
    ffn_kit_t kit;
    for (int i = 1; i < count; i++)
        small = small || strcmp(arguments[i], "small") == 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
    ffn_kit_open(&kit, small ? 12 : 0);
    if (count == 2 && strcmp(arguments[1], "planted") == 0)
        return planted(&kit);
    const uint32_t n = shapes_make(shapes);
    for (uint32_t i = 0; i < n; i++) {
        const ffn_cuda_signature_t *s = &shapes[i].signature;
        ffn_kit_model_t m;
        const uint64_t start = xp_monotonic_ns();
        const uint32_t before = failed;
        ffn_kit_model_make(&kit, s, s->experts ? 2 : 3, 1000 + i * 100000, shapes[i].bias, &m);
        if (wanted(count, arguments, "decode"))
            test_decode(&kit, &m);
        if (wanted(count, arguments, "resident")) {
            test_resident(&kit, &m, RESIDENT_PLAIN, false);
            test_resident(&kit, &m, RESIDENT_AHEAD, i % 2);
        }
        if (wanted(count, arguments, "bulk"))
            test_bulk(&kit, &m);
        if (wanted(count, arguments, "few")) {
            test_few(&kit, &m);
            test_resident(&kit, &m, RESIDENT_FEW, i % 2);
        }
        if (wanted(count, arguments, "padded") && s->experts)
            test_padded(&kit, &m);
        if (wanted(count, arguments, "library") && s->experts == 0)
            test_library(&kit, &m);
        if (wanted(count, arguments, "reduce"))
            test_reduce(&kit, &m);
        ffn_kit_model_free(&kit, &m);
        printf("hidden %u width %u type %u experts %u top %u shared %u: %u failed, %.1f s\n",
               s->hidden, s->intermediate, s->dtype, s->experts, s->top_k, s->shared_intermediate,
               failed - before, (double)(xp_monotonic_ns() - start) / 1e9);
    }
    ffn_kit_close(&kit);
    printf("%u cases, %u failed, %u rows compared, %u not comparable (ties), largest error %.2f of "
           "the tolerance\n",
           cases, failed, compared, unfair, worst);
    return failed || unfair * 4 > compared ? 1 : 0;
}
