/* SPDX-License-Identifier: MIT */
/*
 * The `ffn.*` rows: decode and prefill of real layer shapes, with the device's copy rate in the
 * same run as the floor. Every series goes round over distinct layers of more than four times the
 * L2 in all.
 *
 * usage: cuda_ffn_bench [quick] [dense-decode] [moe-decode] [dense-prefill] [moe-prefill]
 *                       [split] [read] [few] [bulk-split]   (when named)
 * Rows go to stdout as lines of JSON; benches/cuda/ffn_on_device makes the file.
 */
#include <math.h>
#include <string.h>
#include <unistd.h>

#include "ffn/cuda/bulk_shape.h"
#include "ffn_bench.h"
#include "samples.h"

enum { REPEATS = 7, SAMPLES = 2048 };

double bench_copy_rate; /* bytes read plus bytes written, a second */
static bool quick;
static uint32_t sample_count = SAMPLES; /* of a resident series */

static int compare_doubles(const void *a, const void *b)
{
    const double left = *(const double *)a, right = *(const double *)b;
    return left < right ? -1 : left > right;
}

static int compare_samples(const void *a, const void *b)
{
    const uint32_t left = *(const uint32_t *)a, right = *(const uint32_t *)b;
    return left < right ? -1 : left > right;
}

double bench_median(double *values, uint32_t count)
{
    qsort(values, count, sizeof(*values), compare_doubles);
    return values[count / 2];
}

static void number(char *text, size_t bytes, double value)
{
    if (isnan(value))
        snprintf(text, bytes, "null");
    else
        snprintf(text, bytes, "%.4f", value);
}

/* NAN: null. */
void bench_row(const char *metric, double value, const char *unit, double floor, double peer,
               const char *target, const char *note)
{
    char floor_text[32], peer_text[32];
    number(floor_text, sizeof(floor_text), floor);
    number(peer_text, sizeof(peer_text), peer);
    printf("{\"metric\": \"%s\", \"value\": %.4f, \"unit\": \"%s\", \"floor\": %s, \"peer\": %s, "
           "\"target\": %s%s%s, \"note\": \"%s\"}\n",
           metric, value, unit, floor_text, peer_text, target ? "\"" : "", target ? target : "null",
           target ? "\"" : "", note);
}

void bench_begin(ffn_kit_t *kit)
{
    CHECK_OK(CUDA_CALL(kit->device.driver, cuEventRecord, kit->start, kit->stream));
}

double bench_end_us(ffn_kit_t *kit)
{
    CHECK_OK(CUDA_CALL(kit->device.driver, cuEventRecord, kit->end, kit->stream));
    ffn_kit_wait(kit, kit->stream);
    return ffn_kit_elapsed(kit) * 1e3;
}

static void measure_copy(ffn_kit_t *kit)
{
    const uint64_t bytes = (uint64_t)2 << 30;
    cuda_address_t from = ffn_kit_alloc(kit, bytes), to = ffn_kit_alloc(kit, bytes);
    double times[REPEATS];
    ffn_kit_fill(kit, from, bytes / 2, 5, 1.0f, FFN_CUDA_BF16);
    for (uint32_t i = 0; i < REPEATS + 2; i++) {
        bench_begin(kit);
        for (uint32_t j = 0; j < 3; j++)
            CHECK_OK(
                CUDA_CALL(kit->device.driver, cuMemcpyDtoDAsync, to, from, bytes, kit->stream));
        const double us = bench_end_us(kit) / 3;
        if (i >= 2)
            times[i - 2] = us;
    }
    bench_copy_rate = 2.0 * (double)bytes / bench_median(times, REPEATS) * 1e6;
    bench_row("ffn.copy_tb_s", bench_copy_rate / 1e12, "TB/s", NAN, NAN, NULL,
              "device copy, bytes read plus bytes written");
    ffn_kit_free(kit, to);
    ffn_kit_free(kit, from);
}

void bench_lanes_make(ffn_kit_t *kit, const ffn_kit_model_t *m, uint32_t count, uint32_t max_rows,
                      uint32_t bulk, bench_lanes_t *l)
{
    const uint64_t elements = (uint64_t)max_rows * m->signature.hidden;
    ffn_cuda_limits_t limits = {.bulk_rows = bulk};
    ffn_cuda_workspace_t workspace;
    memset(l, 0, sizeof(*l));
    ffn_cuda_limits_add(&limits, &m->signature);
    l->count = count;
    l->workspace = ffn_kit_alloc(kit, ffn_cuda_workspace_bytes(&limits));
    ffn_cuda_workspace_carve(&limits, l->workspace, &workspace);
    l->output = ffn_kit_alloc(kit, elements * 2);
    for (uint32_t i = 0; i < count; i++) {
        l->at[i] = ffn_kit_alloc(kit, sizeof(ffn_cuda_lane_t));
        l->input[i] = ffn_kit_alloc(kit, elements * 2);
        ffn_kit_fill(kit, l->input[i], elements, 9000 + i, 1.0f,
                     (ffn_cuda_dtype_t)m->signature.dtype);
        l->lane[i] = (ffn_cuda_lane_t){
            .layers = (void *)(uintptr_t)m->layer_at,
            .workspace = workspace, /* they run one after the other */
            .layer = i % m->layers,
            .input = (void *)(uintptr_t)l->input[i],
            .output = (void *)(uintptr_t)l->output,
        };
    }
}

void bench_lanes_rows(ffn_kit_t *kit, bench_lanes_t *l, uint32_t rows)
{
    for (uint32_t i = 0; i < l->count; i++) {
        l->lane[i].rows = rows;
        ffn_kit_write(kit, l->at[i], &l->lane[i], sizeof(l->lane[i]));
    }
}

void bench_lanes_free(ffn_kit_t *kit, bench_lanes_t *l)
{
    for (uint32_t i = 0; i < l->count; i++) {
        ffn_kit_free(kit, l->at[i]);
        ffn_kit_free(kit, l->input[i]);
    }
    ffn_kit_free(kit, l->output);
    ffn_kit_free(kit, l->workspace);
}

/* Fits the blocks' shares to what each multiprocessor gets, prints how uneven they were, and goes
 * back to equal shares, which all rows are measured with. */
static void lanes_calibrate(ffn_kit_t *kit, bench_lanes_t *l)
{
    enum { ROUNDS = 8 };
    static uint32_t shares[2][FFN_CUDA_MAX_BLOCKS + 1], cycles[2][FFN_CUDA_MAX_BLOCKS];
    const ffn_cuda_workspace_t *w = &l->lane[0].workspace;
    const uint32_t blocks = kit->kernels.blocks;
    memset(shares, 0, sizeof(shares));
    for (uint32_t round = 0; round <= ROUNDS; round++) {
        static double times[2][FFN_CUDA_MAX_BLOCKS];
        memset(times, 0, sizeof(times));
        for (uint32_t i = 0; i < 6; i++) {
            CHECK_OK(ffn_cuda_decode(&kit->kernels, l->at[i % l->count], kit->stream));
            ffn_kit_wait(kit, kit->stream);
            ffn_kit_read(kit, (cuda_address_t)(uintptr_t)w->cycles, cycles, sizeof(cycles));
            for (uint32_t b = 0; b < blocks; b++)
                for (uint32_t phase = 0; phase < 2; phase++)
                    times[phase][b] += cycles[phase][b] / 6.0;
        }
        for (uint32_t phase = 0; phase < 2; phase++) {
            double least = times[phase][0], most = 0, sum = 0;
            for (uint32_t b = 0; b < blocks; b++) {
                const double t = times[phase][b];
                least = t < least ? t : least;
                most = t > most ? t : most;
                sum += t / blocks;
                cycles[phase][b] = (uint32_t)t;
            }
            if (round % ROUNDS == 0 || round == 2)
                printf("# round %u phase %u: cycles least %.0f mean %.0f most %.0f\n", round, phase,
                       least, sum, most);
        }
        if (round < ROUNDS) {
            ffn_cuda_shares_adjust(blocks, cycles, shares);
            ffn_kit_write(kit, (cuda_address_t)(uintptr_t)w->shares, shares, sizeof(shares));
        }
    }
}

/* Microseconds a layer of a captured sequence of decode launches. */
static double decode_graph_us(ffn_kit_t *kit, bench_lanes_t *l)
{
    const uint32_t launches = l->count * (quick ? 2 : 4);
    cuda_graph_exec_t graph;
    double times[REPEATS];
    CHECK_OK(cuda_capture_begin(&kit->device, kit->stream));
    for (uint32_t i = 0; i < launches; i++)
        CHECK_OK(ffn_cuda_decode(&kit->kernels, l->at[i % l->count], kit->stream));
    CHECK_OK(cuda_capture_end(&kit->device, kit->stream, &graph));
    for (uint32_t i = 0; i < REPEATS + 2; i++) {
        bench_begin(kit);
        CHECK_OK(cuda_graph_launch(&kit->device, graph, kit->stream));
        const double us = bench_end_us(kit) / launches;
        if (i >= 2)
            times[i - 2] = us;
    }
    cuda_graph_destroy(&kit->device, graph);
    return bench_median(times, REPEATS);
}

bench_resident_t bench_resident_us(ffn_kit_t *kit, bench_lanes_t *l, uint32_t kernel,
                                   uint32_t pause_ns)
{
    static uint32_t samples[SAMPLES];
    cuda_address_t queue = ffn_kit_alloc(kit, sizeof(ffn_cuda_queue_t));
    cuda_address_t list = ffn_kit_alloc(kit, sizeof(l->at));
    cuda_address_t answer = ffn_kit_alloc(kit, 256), out = ffn_kit_alloc(kit, sizeof(samples));
    uint32_t lane_count = l->count, count = quick ? 256 : sample_count;
    uint64_t first = 0, last = (uint64_t)count + 1;
    void *post[] = {&queue, &list, &lane_count, &first, &count, &pause_ns, &answer, &out};
    void *leave[] = {&queue, &last};
    ffn_kit_write(kit, list, l->at, sizeof(l->at));
    CHECK_OK(kernel == BENCH_FEW
                 ? ffn_cuda_few_resident(&kit->kernels, queue, kit->stream)
                 : ffn_cuda_resident(&kit->kernels, queue, kernel == BENCH_AHEAD, kit->stream));
    CHECK_OK(CUDA_CALL(kit->device.driver, cuLaunchKernel, kit->function[FFN_KIT_POST], 1, 1, 1, 1,
                       1, 1, 0, kit->side, post, NULL));
    CHECK_OK(CUDA_CALL(kit->device.driver, cuLaunchKernel, kit->function[FFN_KIT_LEAVE], 1, 1, 1, 1,
                       1, 1, 0, kit->side, leave, NULL));
    ffn_kit_wait(kit, kit->side);
    ffn_kit_wait(kit, kit->stream);
    ffn_kit_read(kit, out, samples, count * sizeof(samples[0]));
    double sum = 0;
    for (uint32_t i = 8; i < count; i++)
        sum += samples[i];
    qsort(samples + 8, count - 8, sizeof(samples[0]), compare_samples);
    ffn_kit_free(kit, out);
    ffn_kit_free(kit, answer);
    ffn_kit_free(kit, list);
    ffn_kit_free(kit, queue);
    static uint32_t series;
    bench_resident_t times = {samples[8 + (count - 8) / 2] / 1e3,
                              samples[8 + (count - 8) * 99 / 100] / 1e3, sum / (count - 8) / 1e3,
                              ""};
    snprintf(times.samples, sizeof(times.samples), "%d-%u", getpid(), ++series);
    samples_keep(times.samples, samples + 8, count - 8);
    return times;
}

ffn_cuda_signature_t bench_signature_dense(void)
{
    return (ffn_cuda_signature_t){
        .hidden = 5120, .intermediate = 17408, .dtype = FFN_CUDA_BF16, .routed_scale = 1.0f};
}

ffn_cuda_signature_t bench_signature_moe(void)
{
    return (ffn_cuda_signature_t){.hidden = 2048,
                                  .intermediate = 768,
                                  .dtype = FFN_CUDA_BF16,
                                  .experts = 128,
                                  .top_k = 8,
                                  .normalize = 1,
                                  .groups = 1,
                                  .top_groups = 1,
                                  .routed_scale = 1.0f};
}

static void bench_dense_decode(ffn_kit_t *kit)
{
    static const uint32_t counts[] = {1, 2, 4, 8, 16};
    const ffn_cuda_signature_t s = bench_signature_dense();
    const double bytes = 3.0 * s.hidden * s.intermediate * 2;
    ffn_kit_model_t m;
    bench_lanes_t l;
    ffn_kit_model_make(kit, &s, 6, 1, false, &m);
    bench_lanes_make(kit, &m, 6, FFN_CUDA_DENSE_ROWS, 0, &l);
    bench_lanes_rows(kit, &l, 1);
    const double equal = decode_graph_us(kit, &l);
    lanes_calibrate(kit, &l);
    printf("# captured launches, 1 row: %.2f us with equal shares, %.2f with fitted ones\n", equal,
           decode_graph_us(kit, &l));
    ffn_kit_set(kit, (cuda_address_t)(uintptr_t)l.lane[0].workspace.shares, 0,
                2 * sizeof(l.lane[0].workspace.shares[0]));
    for (uint32_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        char metric[96], note[200];
        const char *target = counts[i] == 1 ? ">= 0.95" : (counts[i] == 16 ? ">= 0.90" : NULL);
        bench_lanes_rows(kit, &l, counts[i]);
        const double floor_us = bytes / bench_copy_rate * 1e6;
        const double graph = decode_graph_us(kit, &l);
        const bench_resident_t plain = bench_resident_us(kit, &l, BENCH_PLAIN, 0);
        const bench_resident_t ahead = bench_resident_us(kit, &l, BENCH_AHEAD, 0);
        const bench_resident_t paused = bench_resident_us(kit, &l, BENCH_AHEAD, 20000);
        snprintf(metric, sizeof(metric), "ffn.dense.decode%u.copy_fraction", counts[i]);
        snprintf(
            note, sizeof(note),
            "resident kernel, mailbox included, no look-ahead: mean %.2f us, P50 %.2f, P99 %.2f",
            plain.mean_us, plain.p50_us, plain.p99_us);
        bench_row(metric, floor_us / plain.mean_us, "ratio", 1.0, NAN, target, note);
        samples_name(plain.samples, metric);
        snprintf(metric, sizeof(metric), "ffn.dense.decode%u.look_ahead_copy_fraction", counts[i]);
        snprintf(note, sizeof(note),
                 "the next layer's first weights load ahead: back to back mean "
                 "%.2f us, P99 %.2f; with 20 us between: mean %.2f",
                 ahead.mean_us, ahead.p99_us, paused.mean_us);
        bench_row(metric, floor_us / ahead.mean_us, "ratio", 1.0, NAN, NULL, note);
        samples_name(ahead.samples, metric);
        snprintf(metric, sizeof(metric), "ffn.dense.decode%u.graph_copy_fraction", counts[i]);
        snprintf(note, sizeof(note), "captured launches, %.2f us a layer", graph);
        bench_row(metric, floor_us / graph, "ratio", 1.0, NAN, NULL, note);
    }
    bench_lanes_free(kit, &l);
    ffn_kit_model_free(kit, &m);
}

static void bench_moe_decode(ffn_kit_t *kit)
{
    static const uint32_t counts[] = {1, 2, 4, 8, 16, 32};
    const ffn_cuda_signature_t s = bench_signature_moe();
    const double expert_bytes = 3.0 * s.hidden * s.intermediate * 2;
    ffn_kit_model_t m;
    bench_lanes_t l;
    ffn_kit_model_make(kit, &s, 4, 2, false, &m);
    bench_lanes_make(kit, &m, MAX_LANES, FFN_CUDA_DECODE_ROWS, 0, &l);
    for (uint32_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        char metric[96], note[200];
        /* Distinct experts of random rows, as counted over the Lanes. */
        double experts = 0;
        bench_lanes_rows(kit, &l, counts[i]);
        if (counts[i] == 1) {
            experts = s.top_k;
        } else {
            uint32_t chosen[FFN_CUDA_MAX_TOP_K];
            for (uint32_t lane = 0; lane < 2; lane++) {
                bool seen[FFN_CUDA_MAX_EXPERTS] = {false};
                for (uint32_t r = 0; r < counts[i]; r++) {
                    ffn_kit_chosen(&m, l.lane[lane].layer, 9000 + lane, r, chosen);
                    for (uint32_t k = 0; k < s.top_k; k++) {
                        experts += !seen[chosen[k]] / 2.0;
                        seen[chosen[k]] = true;
                    }
                }
            }
        }
        const double floor_us = experts * expert_bytes / bench_copy_rate * 1e6;
        const double graph = decode_graph_us(kit, &l);
        const bench_resident_t plain = bench_resident_us(kit, &l, BENCH_PLAIN, 0);
        snprintf(metric, sizeof(metric), "ffn.moe.decode%u.floor_ratio", counts[i]);
        snprintf(
            note, sizeof(note),
            "resident, mailbox included: mean %.2f us, P50 %.2f, P99 %.2f; %.1f experts a layer",
            plain.mean_us, plain.p50_us, plain.p99_us, experts);
        bench_row(metric, plain.mean_us / floor_us, "ratio", 1.0, NAN,
                  counts[i] == 1 ? "<= 1.3" : NULL, note);
        samples_name(plain.samples, metric);
        snprintf(metric, sizeof(metric), "ffn.moe.decode%u.graph_floor_ratio", counts[i]);
        snprintf(note, sizeof(note), "captured launches, %.2f us a layer", graph);
        bench_row(metric, graph / floor_us, "ratio", 1.0, NAN, NULL, note);
    }
    bench_lanes_free(kit, &l);
    ffn_kit_model_free(kit, &m);
}

static void bench_dense_prefill(ffn_kit_t *kit)
{
    enum { ROWS = 4096, LAYERS = 2 };
    const ffn_cuda_signature_t s = bench_signature_dense();
    const double flops = 6.0 * ROWS * s.hidden * s.intermediate;
    ffn_library_t *library;
    ffn_library_plan_t *plan;
    ffn_kit_model_t m;
    bench_lanes_t l;
    double times[REPEATS], act[REPEATS], own[REPEATS];
    char note[200];
    if (ffn_library_open(&kit->kernels, &library) != XP_OK) {
        printf("skipped: %s\n", xp_error_last()->text);
        return;
    }
    ffn_kit_model_make(kit, &s, LAYERS, 3, false, &m);
    bench_lanes_make(kit, &m, LAYERS, ROWS, ROWS, &l);
    bench_lanes_rows(kit, &l, ROWS);
    CHECK_OK(ffn_library_plan_make(library, &s, ROWS, 0, &plan));
    cuda_address_t scratch = ffn_kit_alloc(kit, ffn_library_scratch_bytes(plan));
    const uint64_t elements = (uint64_t)ROWS * s.intermediate;
    for (uint32_t i = 0; i < REPEATS + 2; i++) {
        const uint32_t at = i < 2 ? 0 : i - 2;
        bench_begin(kit);
        for (uint32_t layer = 0; layer < LAYERS; layer++)
            CHECK_OK(ffn_library_run(plan, &m.part[layer], l.input[layer], l.output, 0, scratch,
                                     kit->stream));
        times[at] = bench_end_us(kit) / LAYERS;
        bench_begin(kit);
        for (uint32_t layer = 0; layer < LAYERS; layer++)
            CHECK_OK(ffn_cuda_activate(&kit->kernels, scratch, scratch + elements * 2, elements,
                                       FFN_CUDA_BF16, 0, kit->stream));
        act[at] = bench_end_us(kit) / LAYERS;
        bench_begin(kit);
        for (uint32_t layer = 0; layer < LAYERS; layer++)
            CHECK_OK(ffn_cuda_bulk(&kit->kernels, &s, ROWS, 0, l.at[layer], kit->stream));
        own[at] = bench_end_us(kit) / LAYERS;
    }
    const double whole = bench_median(times, REPEATS), activation = bench_median(act, REPEATS);
    const double products = whole - activation;
    snprintf(note, sizeof(note),
             "whole layer %.1f us (%.0f TFLOP/s), of which the activation %.1f; peer: the three "
             "products alone",
             whole, flops / whole / 1e6, activation);
    bench_row("ffn.dense.prefill4096.cublaslt_ratio", products / whole, "ratio", NAN,
              flops / products / 1e6, ">= 0.95", note);
    snprintf(note, sizeof(note), "our grouped products on a dense layer: %.1f us",
             bench_median(own, REPEATS));
    bench_row("ffn.dense.prefill4096.grouped_tflop_s", flops / bench_median(own, REPEATS) / 1e6,
              "TFLOP/s", NAN, flops / products / 1e6, NULL, note);
    ffn_kit_free(kit, scratch);
    ffn_library_plan_free(plan);
    ffn_library_close(library);
    bench_lanes_free(kit, &l);
    ffn_kit_model_free(kit, &m);
}

/* The router's launch alone, a layer. It counts pairs too, which nobody reads here: back to zero.
 */
static double router_us(ffn_kit_t *kit, const ffn_cuda_signature_t *s, bench_lanes_t *l,
                        uint32_t rows)
{
    const uint32_t size = ffn_cuda_route_size(&kit->kernels, rows), each = BULK_ROUTE_ROWS(size);
    double times[REPEATS];
    for (uint32_t i = 0; i < REPEATS + 2; i++) {
        bench_begin(kit);
        for (uint32_t layer = 0; layer < l->count; layer++) {
            void *parameters[] = {&l->at[layer]};
            CHECK_OK(CUDA_CALL(kit->device.driver, cuLaunchKernel,
                               kit->kernels.function[FFN_KERNEL_BULK_ROUTE + size],
                               (rows + each - 1) / each, 1, 1, BULK_ROUTE_THREADS, 1, 1,
                               BULK_ROUTE_BYTES(size, s->experts), kit->stream, parameters, NULL));
        }
        times[i < 2 ? 0 : i - 2] = bench_end_us(kit) / l->count;
    }
    ffn_kit_set(kit, (cuda_address_t)(uintptr_t)l->lane[0].workspace.counts, 0,
                s->experts * sizeof(uint32_t));
    return bench_median(times, REPEATS);
}

static void bench_moe_prefill(ffn_kit_t *kit)
{
    static const uint32_t counts[] = {512, 2048, 4096, 8192};
    const ffn_cuda_signature_t s = bench_signature_moe();
    ffn_kit_model_t m;
    bench_lanes_t l;
    ffn_kit_model_make(kit, &s, 3, 4, false, &m);
    bench_lanes_make(kit, &m, 3, 8192, 8192, &l);
    for (uint32_t c = 0; c < sizeof(counts) / sizeof(counts[0]); c++) {
        double times[REPEATS];
        char metric[96], note[200];
        bench_lanes_rows(kit, &l, counts[c]);
        for (uint32_t i = 0; i < REPEATS + 2; i++) {
            bench_begin(kit);
            for (uint32_t layer = 0; layer < 3; layer++)
                CHECK_OK(ffn_cuda_bulk(&kit->kernels, &s, counts[c], 0, l.at[layer], kit->stream));
            times[i < 2 ? 0 : i - 2] = bench_end_us(kit) / 3;
        }
        const double us = bench_median(times, REPEATS);
        const double flops = 6.0 * counts[c] * s.top_k * s.hidden * s.intermediate;
        snprintf(metric, sizeof(metric), "ffn.moe.prefill%u.us", counts[c]);
        snprintf(note, sizeof(note), "whole layer, router included, %.0f TFLOP/s",
                 flops / us / 1e6);
        bench_row(metric, us, "us", NAN, NAN, NULL, note);
        snprintf(metric, sizeof(metric), "ffn.moe.prefill%u.router_us", counts[c]);
        bench_row(metric, router_us(kit, &s, &l, counts[c]), "us", NAN, NAN, NULL,
                  "of it: the router's launch, by itself");
    }
    bench_lanes_free(kit, &l);
    ffn_kit_model_free(kit, &m);
}

/* How fast memory can be read at all, in several patterns, over 3.2 GB. */
static void read_row(ffn_kit_t *kit, const char *name, uint32_t which, uint32_t blocks,
                     uint32_t threads, uint32_t shared, uint64_t bytes, void **parameters)
{
    double times[3];
    char metric[96], note[160];
    for (uint32_t i = 0; i < 4; i++) {
        bench_begin(kit);
        CHECK_OK(CUDA_CALL(kit->device.driver, cuLaunchKernel, kit->function[which], blocks, 1, 1,
                           threads, 1, 1, shared, kit->stream, parameters, NULL));
        const double us = bench_end_us(kit);
        if (i)
            times[i - 1] = us;
    }
    const double rate = (double)bytes / bench_median(times, 3) * 1e6;
    snprintf(metric, sizeof(metric), "ffn.read.%s.copy_fraction", name);
    snprintf(note, sizeof(note), "%.3f TB/s, reading only", rate / 1e12);
    bench_row(metric, rate / bench_copy_rate, "ratio", NAN, NAN, NULL, note);
}

static void bench_read(ffn_kit_t *kit)
{
    static const uint32_t pieces[] = {1024, 2048, 4096, 8192, 16384};
    static const uint32_t units[][2] = {{1, 65536},  {16, 10240}, {32, 10240},
                                        {64, 10240}, {16, 34816}, {32, 34816}};
    const uint32_t blocks = kit->kernels.blocks;
    uint64_t bytes = (uint64_t)3 << 30;
    cuda_address_t from = ffn_kit_alloc(kit, bytes), sink = ffn_kit_alloc(kit, 256);
    char name[64];
    ffn_kit_fill(kit, from, bytes / 2, 8, 1.0f, FFN_CUDA_BF16);
    for (uint32_t interleaved = 0; interleaved < 2; interleaved++)
        for (uint32_t i = 0; i < 5; i++) {
            uint32_t piece = pieces[i];
            void *parameters[] = {&from, &bytes, &piece, &interleaved};
            snprintf(name, sizeof(name), "bulk%u%s", piece, interleaved ? "_interleaved" : "");
            read_row(kit, name, FFN_KIT_READ_BULK, blocks, 128, FFN_KIT_READ_SHARED, bytes,
                     parameters);
        }
    for (uint32_t i = 0; i < 6; i++) {
        uint32_t rows = units[i][0], pitch = units[i][1];
        const uint64_t panel = (uint64_t)rows * pitch;
        /* What is left over of panels and units is not read. */
        const uint64_t used =
            bytes / panel / blocks * blocks * rows * (pitch / (8192 / rows) * (8192 / rows));
        void *parameters[] = {&from, &bytes, &rows, &pitch};
        snprintf(name, sizeof(name), "async%u_pitch%u", rows, pitch);
        read_row(kit, name, FFN_KIT_READ_ASYNC, blocks, 256, FFN_KIT_READ_SHARED, used, parameters);
    }
    void *parameters[] = {&from, &bytes, &sink};
    read_row(kit, "load", FFN_KIT_READ_LOAD, blocks * 2, 512, 0, bytes, parameters);
    ffn_kit_free(kit, sink);
    ffn_kit_free(kit, from);
}

/* Where a layer's time goes: the mean over blocks and Invocations of each mark, and how far the
 * blocks' means are apart. Nanoseconds since the command was seen. */
void bench_trace_text(ffn_kit_t *kit, cuda_address_t trace, const char *const *names, char *text,
                      size_t size)
{
    const uint32_t invocations = quick ? 256 : sample_count;
    static uint32_t sums[FFN_CUDA_TRACE_MARKS][FFN_CUDA_MAX_BLOCKS];
    size_t used = 0;
    ffn_kit_read(kit, trace, sums, sizeof(sums));
    for (uint32_t m = 0; m < FFN_CUDA_TRACE_MARKS; m++) {
        double mean = 0, most = 0, least = 1e30;
        for (uint32_t b = 0; b < kit->kernels.blocks; b++) {
            const double ns = (double)sums[m][b] / invocations;
            mean += ns / kit->kernels.blocks;
            most = fmax(most, ns);
            least = fmin(least, ns);
        }
        if (mean > 0)
            used += (size_t)snprintf(text + used, size - used, " %s %.2f (%.2f-%.2f)", names[m],
                                     mean / 1e3, least / 1e3, most / 1e3);
        if (used >= size)
            return;
    }
}

/* Of gate and up in the latest Invocation, over the blocks. */
static double mean_cycles(ffn_kit_t *kit, const ffn_cuda_workspace_t *w)
{
    static uint32_t cycles[2][FFN_CUDA_MAX_BLOCKS];
    double mean = 0;
    ffn_kit_read(kit, (cuda_address_t)(uintptr_t)w->cycles, cycles, sizeof(cycles));
    for (uint32_t b = 0; b < kit->kernels.blocks; b++)
        mean += (double)cycles[0][b] / kit->kernels.blocks;
    return mean;
}

/* Decoding, with the time of each step. */
static void bench_split_of(ffn_kit_t *kit, const char *name, const ffn_cuda_signature_t *s,
                           uint32_t layers, const uint32_t *counts, uint32_t count_of_counts)
{
    static const char *const names[FFN_CUDA_TRACE_MARKS] = {
        "read", "logits", "all logits", "begin", "gate", "all gate", "down", "end"};
    const double part_bytes = 3.0 * s->hidden * s->intermediate * 2;
    const uint32_t lane_count = s->experts ? MAX_LANES : layers;
    ffn_kit_model_t m;
    bench_lanes_t l;
    ffn_kit_model_make(kit, s, layers, 6, false, &m);
    bench_lanes_make(kit, &m, lane_count, ffn_cuda_decode_rows(s), 0, &l);
    const uint64_t trace_bytes = FFN_CUDA_TRACE_MARKS * FFN_CUDA_MAX_BLOCKS * sizeof(uint32_t);
    cuda_address_t trace = ffn_kit_alloc(kit, trace_bytes);
    for (uint32_t c = 0; c < count_of_counts; c++) {
        const uint32_t rows = counts[c];
        double parts = s->experts ? s->top_k : 1;
        if (s->experts && rows > 1) { /* distinct experts, as two Lanes choose them */
            parts = 0;
            for (uint32_t lane = 0; lane < 2; lane++) {
                uint32_t chosen[FFN_CUDA_MAX_TOP_K];
                bool seen[FFN_CUDA_MAX_EXPERTS] = {false};
                for (uint32_t r = 0; r < rows; r++) {
                    ffn_kit_chosen(&m, l.lane[lane].layer, 9000 + lane, r, chosen);
                    for (uint32_t k = 0; k < s->top_k; k++) {
                        parts += !seen[chosen[k]] / 2.0;
                        seen[chosen[k]] = true;
                    }
                }
            }
        }
        const double floor_us = parts * part_bytes / bench_copy_rate * 1e6;
        char metric[96], note[700], text[500] = "";
        for (uint32_t i = 0; i < l.count; i++)
            l.lane[i].workspace.trace = NULL;
        bench_lanes_rows(kit, &l, rows);
        const double graph = decode_graph_us(kit, &l);
        const bench_resident_t ahead = bench_resident_us(kit, &l, BENCH_AHEAD, 0);
        const bench_resident_t plain = bench_resident_us(kit, &l, BENCH_PLAIN, 0);
        for (uint32_t i = 0; i < l.count; i++)
            l.lane[i].workspace.trace = (void *)(uintptr_t)trace;
        bench_lanes_rows(kit, &l, rows);
        ffn_kit_set(kit, trace, 0, trace_bytes);
        bench_resident_us(kit, &l, BENCH_AHEAD, 0);
        bench_trace_text(kit, trace, names, text, sizeof(text));
        const double gate_cycles = mean_cycles(kit, &l.lane[0].workspace);
        snprintf(metric, sizeof(metric), "ffn.%s.decode%u.split.%s", name, rows,
                 s->experts ? "floor_ratio" : "copy_fraction");
        snprintf(note, sizeof(note),
                 "resident %.2f us (P99 %.2f), look-ahead %.2f, captured %.2f; floor %.2f;%s; %.0f "
                 "cycles of gate",
                 plain.mean_us, plain.p99_us, ahead.mean_us, graph, floor_us, text, gate_cycles);
        bench_row(metric, s->experts ? plain.mean_us / floor_us : floor_us / plain.mean_us, "ratio",
                  1.0, NAN, NULL, note);
    }
    ffn_kit_free(kit, trace);
    bench_lanes_free(kit, &l);
    ffn_kit_model_free(kit, &m);
}

static void bench_split(ffn_kit_t *kit)
{
    static const uint32_t dense[] = {1, 4, 8, 16}, moe[] = {1, 4, 8, 16, 32};
    const ffn_cuda_signature_t s = bench_signature_dense(), e = bench_signature_moe();
    sample_count = 512;
    bench_split_of(kit, "dense", &s, 6, dense, 4);
    bench_split_of(kit, "moe", &e, 4, moe, 5);
    sample_count = SAMPLES;
}

static bool wanted(int count, char **arguments, const char *group)
{
    bool any = false;
    for (int i = 1; i < count; i++) {
        if (strcmp(arguments[i], group) == 0)
            return true;
        any = any || strcmp(arguments[i], "quick") != 0;
    }
    return !any;
}

int main(int count, char **arguments)
{
    ffn_kit_t kit;
    for (int i = 1; i < count; i++)
        quick = quick || strcmp(arguments[i], "quick") == 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
    ffn_kit_open(&kit, 0);
    measure_copy(&kit);
    if (wanted(count, arguments, "dense-decode"))
        bench_dense_decode(&kit);
    if (wanted(count, arguments, "moe-decode"))
        bench_moe_decode(&kit);
    if (wanted(count, arguments, "dense-prefill"))
        bench_dense_prefill(&kit);
    if (wanted(count, arguments, "moe-prefill"))
        bench_moe_prefill(&kit);
    for (int i = 1; i < count; i++) { /* only when asked for */
        if (strcmp(arguments[i], "read") == 0)
            bench_read(&kit);
        if (strcmp(arguments[i], "split") == 0)
            bench_split(&kit);
        if (strcmp(arguments[i], "few") == 0) {
            sample_count = 512;
            bench_few(&kit);
            sample_count = SAMPLES;
        }
        if (strcmp(arguments[i], "bulk-split") == 0)
            bench_bulk_split(&kit);
    }
    ffn_kit_close(&kit);
    return 0;
}
