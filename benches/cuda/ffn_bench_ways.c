/* SPDX-License-Identifier: MIT */
/* cuda_ffn_bench: layers of experts for more rows than decode has, each way beside the others. */
#include <math.h>
#include <string.h>

#include "ffn_bench.h"
#include "samples.h"

/* ---- few rows and bulk, by steps ---------------------------------------------------------------
 */
enum { WAY_BULK, WAY_FEW, WAY_DECODE, WAYS };
static const char *const way_names[WAYS] = {"bulk", "few", "decode"};

static xp_status_t way_queue(ffn_kit_t *kit, const ffn_kit_model_t *m, uint32_t way, uint32_t rows,
                             const bench_lanes_t *l, uint32_t index)
{
    const cuda_address_t lane = l->at[index];
    if (way == WAY_DECODE)
        return ffn_cuda_decode(&kit->kernels, lane, kit->stream);
    if (way == WAY_BULK)
        return ffn_cuda_bulk(&kit->kernels, &m->signature, rows, 0, lane, kit->stream);
    return ffn_cuda_few(&kit->kernels, &m->signature, rows, 0, lane, kit->stream);
}

static cuda_graph_exec_t way_capture(ffn_kit_t *kit, const ffn_kit_model_t *m, bench_lanes_t *l,
                                     uint32_t way, uint32_t rows)
{
    cuda_graph_exec_t graph;
    CHECK_OK(cuda_capture_begin(&kit->device, kit->stream));
    for (uint32_t i = 0; i < l->count; i++)
        CHECK_OK(way_queue(kit, m, way, rows, l, i));
    CHECK_OK(cuda_capture_end(&kit->device, kit->stream, &graph));
    return graph;
}

/* Distinct experts that the rows of the latest bulk or few launch chose; dense: the one part. */
static uint32_t experts_chosen(ffn_kit_t *kit, const ffn_kit_model_t *m, const bench_lanes_t *l,
                               uint32_t rows)
{
    bool seen[FFN_CUDA_MAX_EXPERTS] = {false};
    const uint32_t pairs = rows * m->signature.top_k;
    uint32_t count = 0;
    if (pairs == 0)
        return 1;
    uint32_t *chosen = malloc(pairs * sizeof(*chosen));
    CHECK(chosen);
    ffn_kit_read(kit, (cuda_address_t)(uintptr_t)l->lane[0].workspace.chosen, chosen,
                 pairs * sizeof(*chosen));
    for (uint32_t i = 0; i < pairs; i++) {
        CHECK(chosen[i] < m->signature.experts);
        count += !seen[chosen[i]];
        seen[chosen[i]] = true;
    }
    free(chosen);
    return count;
}

/* The first Lane's layer by that way: its output, for comparing ways with each other. */
static void way_output(ffn_kit_t *kit, const ffn_kit_model_t *m, const bench_lanes_t *l,
                       uint32_t way, uint32_t rows, float *out)
{
    const uint32_t elements = rows * m->signature.hidden;
    uint16_t *packed = malloc(elements * 2);
    CHECK(packed);
    ffn_kit_set(kit, l->output, 0xff, (uint64_t)elements * 2);
    CHECK_OK(way_queue(kit, m, way, rows, l, 0));
    ffn_kit_wait(kit, kit->stream);
    ffn_kit_read(kit, l->output, packed, (uint64_t)elements * 2);
    for (uint32_t i = 0; i < elements; i++)
        out[i] = ffn_kit_to_float(packed[i], (ffn_cuda_dtype_t)m->signature.dtype);
    free(packed);
}

/* Post to answer by the resident kernel of few rows, and when its blocks reach each step. */
static void few_resident(ffn_kit_t *kit, const char *kind, bench_lanes_t *l, uint32_t rows,
                         double floor_us)
{
    static const char *const names[FFN_CUDA_TRACE_MARKS] = {
        "read", "logits", "plan", "a warp", "products", "all products", "", "end"};
    const uint64_t trace_bytes = FFN_CUDA_TRACE_MARKS * FFN_CUDA_MAX_BLOCKS * sizeof(uint32_t);
    cuda_address_t trace = ffn_kit_alloc(kit, trace_bytes);
    char metric[96], note[700], text[500] = "";
    const bench_resident_t plain = bench_resident_us(kit, l, BENCH_FEW, 0);
    const bench_resident_t paused = bench_resident_us(kit, l, BENCH_FEW, 20000);
    for (uint32_t i = 0; i < l->count; i++)
        l->lane[i].workspace.trace = (void *)(uintptr_t)trace;
    bench_lanes_rows(kit, l, rows);
    bench_resident_us(kit, l, BENCH_FEW, 0);
    bench_trace_text(kit, trace, names, text, sizeof(text));
    for (uint32_t i = 0; i < l->count; i++)
        l->lane[i].workspace.trace = NULL;
    bench_lanes_rows(kit, l, rows);
    snprintf(metric, sizeof(metric), "ffn.%s.few%u.resident_us", kind, rows);
    snprintf(note, sizeof(note),
             "resident, mailbox included: P50 %.2f us, P99 %.2f, with 20 us between %.2f;%s",
             plain.p50_us, plain.p99_us, paused.mean_us, text);
    bench_row(metric, plain.mean_us, "us", floor_us, NAN, NULL, note);
    samples_name(plain.samples, metric);
    ffn_kit_free(kit, trace);
}

/* A dense layer by the library, with a plan for just that number of rows. first: bulk's output. */
static void few_library(ffn_kit_t *kit, const char *kind, const ffn_kit_model_t *m,
                        const bench_lanes_t *l, uint32_t rows, double floor_us, const float *first)
{
    enum { ROUNDS = 9 };
    double times[ROUNDS];
    char metric[96], note[160];
    const uint32_t elements = rows * m->signature.hidden;
    ffn_library_t *library;
    ffn_library_plan_t *plan;
    cuda_graph_exec_t graph;
    if (ffn_library_open(&kit->kernels, &library) != XP_OK) {
        printf("skipped: cuBLASLt: %s\n", xp_error_last()->text);
        return;
    }
    CHECK_OK(ffn_library_plan_make(library, &m->signature, rows, 0, &plan));
    cuda_address_t scratch = ffn_kit_alloc(kit, ffn_library_scratch_bytes(plan));
    /* Loads the library's kernels; and what it gives. */
    uint16_t *packed = malloc(elements * 2);
    float *other = malloc(elements * sizeof(*other));
    CHECK(packed && other);
    for (uint32_t i = l->count; i-- > 0;)
        CHECK_OK(ffn_library_run(plan, &m->part[l->lane[i].layer],
                                 (cuda_address_t)(uintptr_t)l->lane[i].input, l->output, 0, scratch,
                                 kit->stream));
    ffn_kit_wait(kit, kit->stream);
    ffn_kit_read(kit, l->output, packed, (uint64_t)elements * 2);
    for (uint32_t i = 0; i < elements; i++)
        other[i] = ffn_kit_to_float(packed[i], (ffn_cuda_dtype_t)m->signature.dtype);
    const double error = ffn_kit_error(other, first, elements);
    CHECK_OK(cuda_capture_begin(&kit->device, kit->stream));
    for (uint32_t i = 0; i < l->count; i++)
        CHECK_OK(ffn_library_run(plan, &m->part[l->lane[i].layer],
                                 (cuda_address_t)(uintptr_t)l->lane[i].input, l->output, 0, scratch,
                                 kit->stream));
    CHECK_OK(cuda_capture_end(&kit->device, kit->stream, &graph));
    for (uint32_t round = 0; round < ROUNDS + 2; round++) {
        bench_begin(kit);
        CHECK_OK(cuda_graph_launch(&kit->device, graph, kit->stream));
        times[round < 2 ? 0 : round - 2] = bench_end_us(kit) / l->count;
    }
    const double us = bench_median(times, ROUNDS);
    snprintf(metric, sizeof(metric), "ffn.%s.few%u.library_us", kind, rows);
    snprintf(
        note, sizeof(note),
        "cuBLASLt, captured, %.2f of the floor; least %.1f, most %.1f; off by %.1e from bulk's "
        "rows%s",
        us / floor_us, times[0], times[ROUNDS - 1], error, error < 0.01 ? "" : ": WRONG");
    bench_row(metric, us, "us", floor_us, NAN, NULL, note);
    cuda_graph_destroy(&kit->device, graph);
    free(other);
    free(packed);
    ffn_kit_free(kit, scratch);
    ffn_library_plan_free(plan);
    ffn_library_close(library);
}

/* All ways that a layer of few rows can be computed, in turn within each round, so that they see
 * the same clocks. */
static void few_rows(ffn_kit_t *kit, const char *kind, const ffn_kit_model_t *m, bench_lanes_t *l,
                     uint32_t rows)
{
    enum { ROUNDS = 9 };
    static double times[WAYS][ROUNDS];
    const ffn_cuda_signature_t *s = &m->signature;
    const uint32_t ways = rows <= ffn_cuda_decode_rows(s) ? WAYS : WAY_DECODE;
    float *first = malloc(rows * s->hidden * 4), *other = malloc(rows * s->hidden * 4);
    cuda_graph_exec_t graph[WAYS];
    double error[WAYS] = {0};
    CHECK(first && other);
    bench_lanes_rows(kit, l, rows);
    for (uint32_t way = 0; way < ways; way++)
        graph[way] = way_capture(kit, m, l, way, rows);
    way_output(kit, m, l, WAY_BULK, rows, first);
    const uint32_t experts = experts_chosen(kit, m, l, rows);
    for (uint32_t way = WAY_FEW; way < ways; way++) {
        way_output(kit, m, l, way, rows, other);
        error[way] = ffn_kit_error(other, first, rows * s->hidden);
    }
    for (uint32_t round = 0; round < ROUNDS + 2; round++)
        for (uint32_t way = 0; way < ways; way++) {
            bench_begin(kit);
            CHECK_OK(cuda_graph_launch(&kit->device, graph[way], kit->stream));
            const double us = bench_end_us(kit) / l->count;
            if (round >= 2)
                times[way][round - 2] = us;
        }
    const double floor_us = experts * 6.0 * s->hidden * s->intermediate / bench_copy_rate * 1e6;
    for (uint32_t way = 0; way < ways; way++) {
        char metric[96], note[200];
        const double us = bench_median(times[way], ROUNDS);
        snprintf(metric, sizeof(metric), "ffn.%s.few%u.%s_us", kind, rows, way_names[way]);
        snprintf(note, sizeof(note),
                 "captured launches, %.2f of the floor; least %.1f, most %.1f; %u expert%s; off by "
                 "%.1e from bulk's rows%s",
                 us / floor_us, times[way][0], times[way][ROUNDS - 1], experts,
                 experts == 1 ? "" : "s", error[way], error[way] < 0.01 ? "" : ": WRONG");
        bench_row(metric, us, "us", floor_us, NAN, NULL, note);
        cuda_graph_destroy(&kit->device, graph[way]);
    }
    few_resident(kit, kind, l, rows, floor_us);
    if (s->experts == 0)
        few_library(kit, kind, m, l, rows, floor_us, first);
    free(other);
    free(first);
}

static void few_layers(ffn_kit_t *kit, const char *kind, const ffn_cuda_signature_t *s,
                       const uint32_t *counts, uint32_t count)
{
    const uint32_t most = counts[count - 1];
    ffn_kit_model_t m;
    bench_lanes_t l;
    ffn_kit_model_make(kit, s, 4, 7, false, &m);
    bench_lanes_make(kit, &m, 16, most, most, &l);
    for (uint32_t c = 0; c < count; c++)
        few_rows(kit, kind, &m, &l, counts[c]);
    bench_lanes_free(kit, &l);
    ffn_kit_model_free(kit, &m);
}

void bench_few(ffn_kit_t *kit)
{
    /* 1 to 16 rows are for GPUs that hold another role too: there is no decode kernel. */
    static const uint32_t moe[] = {1, 4, 8, 16, 17, 24, 32, 48, 64};
    static const uint32_t dense[] = {8, 16, 17, 24, 32, 48, 64};
    const ffn_cuda_signature_t s = bench_signature_moe(), d = bench_signature_dense();
    few_layers(kit, "moe", &s, moe, sizeof(moe) / sizeof(moe[0]));
    few_layers(kit, "dense", &d, dense, sizeof(dense) / sizeof(dense[0]));
}

enum { SPLIT_STEPS = 64, SPLIT_ROUNDS = 5, SPLIT_LAYERS = 3 };

/* An event after each launch of a layer. */
typedef struct split_watch {
    ffn_kit_t *kit;
    cuda_event_t event[SPLIT_STEPS];
    const char *step[SPLIT_STEPS];
    uint32_t count;
} split_watch_t;

static void split_queued(void *context, const char *step)
{
    split_watch_t *watch = context;
    CHECK(watch->count < SPLIT_STEPS);
    watch->step[watch->count] = step;
    CHECK_OK(CUDA_CALL(watch->kit->device.driver, cuEventRecord, watch->event[watch->count++],
                       watch->kit->stream));
}

/* Where the time of a bulk layer goes, by launches. A copy goes before each layer, so that all of
 * its launches are queued when the first begins and no step waits for the host. */
static void split_rows(ffn_kit_t *kit, const ffn_kit_model_t *m, bench_lanes_t *l, uint32_t rows,
                       uint32_t way, cuda_address_t filler, uint64_t filler_bytes)
{
    static split_watch_t watch;
    static double times[SPLIT_STEPS][SPLIT_ROUNDS * SPLIT_LAYERS], whole[SPLIT_ROUNDS];
    const ffn_cuda_watch_t watched = {split_queued, &watch};
    const char *name = way_names[way];
    char metric[96], note[160];
    double sum = 0;
    bench_lanes_rows(kit, l, rows);
    watch.kit = kit;
    for (uint32_t i = 0; i < SPLIT_STEPS; i++)
        CHECK_OK(cuda_event_create(&kit->device, true, &watch.event[i]));
    for (uint32_t round = 0; round < SPLIT_ROUNDS + 1; round++)
        for (uint32_t layer = 0; layer < SPLIT_LAYERS; layer++) {
            CHECK_OK(CUDA_CALL(kit->device.driver, cuMemcpyDtoDAsync, filler, filler + filler_bytes,
                               filler_bytes, kit->stream));
            watch.count = 0;
            split_queued(&watch, "begun");
            CHECK_OK(way == WAY_FEW ? ffn_cuda_few_watched(&kit->kernels, &m->signature, rows, 0,
                                                           l->at[layer], kit->stream, &watched)
                                    : ffn_cuda_bulk_watched(&kit->kernels, &m->signature, rows, 0,
                                                            l->at[layer], kit->stream, &watched));
            ffn_kit_wait(kit, kit->stream);
            for (uint32_t i = 1; round && i < watch.count; i++) {
                float milliseconds;
                CHECK_OK(CUDA_CALL(kit->device.driver, cuEventElapsedTime, &milliseconds,
                                   watch.event[i - 1], watch.event[i]));
                times[i][(round - 1) * SPLIT_LAYERS + layer] = (double)milliseconds * 1e3;
            }
        }
    cuda_graph_exec_t graph = way_capture(kit, m, l, way, rows);
    for (uint32_t round = 0; round < SPLIT_ROUNDS + 2; round++) {
        bench_begin(kit);
        CHECK_OK(cuda_graph_launch(&kit->device, graph, kit->stream));
        whole[round < 2 ? 0 : round - 2] = bench_end_us(kit) / l->count;
    }
    cuda_graph_destroy(&kit->device, graph);
    for (uint32_t i = 1; i < watch.count; i++) {
        double us = bench_median(times[i], SPLIT_ROUNDS * SPLIT_LAYERS);
        uint32_t launches = 1;
        /* Launches of one step follow each other. */
        for (; i + 1 < watch.count && !strcmp(watch.step[i], watch.step[i + 1]); i++, launches++)
            us += bench_median(times[i + 1], SPLIT_ROUNDS * SPLIT_LAYERS);
        snprintf(metric, sizeof(metric), "ffn.moe.split%u.%s.%s_us", rows, name, watch.step[i]);
        snprintf(note, sizeof(note), "%u launch%s, with an event behind each", launches,
                 launches == 1 ? "" : "es");
        bench_row(metric, us, "us", NAN, NAN, NULL, note);
        sum += us;
    }
    snprintf(metric, sizeof(metric), "ffn.moe.split%u.%s.whole_us", rows, name);
    snprintf(note, sizeof(note), "captured, a layer; the steps above are %.1f us together", sum);
    bench_row(metric, bench_median(whole, SPLIT_ROUNDS), "us", NAN, NAN, NULL, note);
    for (uint32_t i = 0; i < SPLIT_STEPS; i++)
        cuda_event_destroy(&kit->device, watch.event[i]);
}

void bench_bulk_split(ffn_kit_t *kit)
{
    static const uint32_t counts[] = {64, 128, 512, 1024, 2048, 4096, 8192};
    const uint64_t filler_bytes = (uint64_t)512 << 20;
    const ffn_cuda_signature_t s = bench_signature_moe();
    ffn_kit_model_t m;
    bench_lanes_t l;
    cuda_address_t filler = ffn_kit_alloc(kit, 2 * filler_bytes);
    ffn_kit_model_make(kit, &s, SPLIT_LAYERS, 8, false, &m);
    bench_lanes_make(kit, &m, SPLIT_LAYERS, 8192, 8192, &l);
    for (uint32_t c = 0; c < sizeof(counts) / sizeof(counts[0]); c++) {
        split_rows(kit, &m, &l, counts[c], WAY_BULK, filler, filler_bytes);
        if (counts[c] <= ffn_cuda_few_rows(&s))
            split_rows(kit, &m, &l, counts[c], WAY_FEW, filler, filler_bytes);
    }
    bench_lanes_free(kit, &l);
    ffn_kit_model_free(kit, &m);
    ffn_kit_free(kit, filler);
}
