/* SPDX-License-Identifier: MIT */
/*
 * What leaving the FFN to CrossPool costs an engine a layer on CPU devices: xpool_rank_ffn() as an
 * engine calls it, through the real AtnAgent and FfnAgent that run beside it, against the same
 * layer computed in this process by the same kernels and as many threads. Prints one JSON row a
 * line. benches/bench_shim.py starts the system.
 *
 * A call has four one-way hops between processes, so the floor is two raw round trips.
 */
#include <errno.h>
#include <string.h>

#include "ffn/ffn.h"
#include "kernels/kernels.h"
#include "pingpong.h"
#include "xpool/xpool.h"

#define SHIM_MAX_ROWS 128
#define SHIM_CALLS    2000
#define SHIM_BULK     100 /* calls of many rows */

typedef struct shim {
    const char *label; /* in the metric's name */
    const char *model;
    xpool_config_t *config;
    xpool_model_info_t info;
    xpool_rank_t *rank;
    ffn_runtime_t *runtime;
    float *in, *out;
    uint64_t *samples;
} shim_t;

static void shim_check(xpool_status_t status, const char *what)
{
    if (status == XPOOL_OK)
        return;
    fprintf(stderr, "bench_shim: %s: %s\n", what, xpool_error());
    exit(1);
}

static void shim_open(shim_t *shim, const char *path)
{
    shim_check(xpool_config_open(path, &shim->config), "configuration");
    shim->info.struct_bytes = sizeof(shim->info);
    shim_check(xpool_config_model_info(shim->config, shim->model, &shim->info), "plan");
    const char *checkpoint = xpool_config_model_path(shim->config, shim->model);
    xpool_rank_options_t options = {.struct_bytes = sizeof(options),
                                    .model_id = shim->model,
                                    .engine = "bench_shim",
                                    .checkpoint = checkpoint,
                                    .hidden = shim->info.hidden,
                                    .layers = shim->info.layers,
                                    .attention_tp = 1,
                                    .attention_dp = 1,
                                    .decode_rows = shim->info.decode_rows,
                                    .prefill_rows = shim->info.prefill_rows,
                                    .dtype = XPOOL_F32};
    shim_check(xpool_rank_open(shim->config, &options, &shim->rank), "registration");
    shim_check(xpool_rank_wait_executable(shim->rank, 0), "start-up");
    ffn_runtime_config_t runtime = {.threads = 1, .lanes = 1, .max_rows = SHIM_MAX_ROWS};
    ffn_install_t install = {.model = 0,
                             .model_id = shim->model,
                             .path = checkpoint,
                             .dtype = XP_DTYPE_AUTO,
                             .tp_size = 1,
                             .readers = 1};
    CHECK(kernels_select() == XP_OK);
    CHECK(ffn_runtime_create(&runtime, &shim->runtime) == XP_OK);
    CHECK(ffn_runtime_install(shim->runtime, &install) == XP_OK);
    size_t floats = (size_t)SHIM_MAX_ROWS * shim->info.hidden;
    shim->in = malloc(floats * sizeof(float));
    shim->out = malloc(floats * sizeof(float));
    shim->samples = malloc(SHIM_CALLS * sizeof(uint64_t));
    CHECK(shim->in && shim->out && shim->samples);
    for (size_t i = 0; i < floats; i++)
        shim->in[i] = (float)(int)(i * 2654435761u % 2001u) / 1000.0f - 1.0f;
}

static bench_times_t shim_here(const shim_t *shim, uint32_t rows, uint32_t calls)
{
    for (uint32_t i = 0; i < calls + calls / 4; i++) {
        uint64_t start_ns = xp_monotonic_ns();
        CHECK(ffn_runtime_execute(shim->runtime, 0, 0, i % shim->info.layers, rows, shim->in,
                                  shim->out) == XP_OK);
        shim->samples[i % calls] = xp_monotonic_ns() - start_ns;
    }
    return bench_summary(shim->samples, calls);
}

static bench_times_t shim_there(const shim_t *shim, uint32_t rows, uint32_t calls, uint32_t dtype)
{
    for (uint32_t i = 0; i < calls + calls / 4; i++) {
        xpool_ffn_call_t call = {.struct_bytes = sizeof(call),
                                 .layer = i % shim->info.layers,
                                 .rows = rows,
                                 .dtype = dtype,
                                 .step = rows > 16 ? XPOOL_PREFILL : XPOOL_DECODE,
                                 .input = shim->in,
                                 .output = shim->out};
        uint64_t start_ns = xp_monotonic_ns();
        shim_check(xpool_rank_ffn(shim->rank, &call), "call");
        shim->samples[i % calls] = xp_monotonic_ns() - start_ns;
    }
    return bench_summary(shim->samples, calls);
}

static void shim_row(const shim_t *shim, uint32_t rows, double floor_us)
{
    uint32_t calls = rows > 16 ? SHIM_BULK : SHIM_CALLS;
    bench_times_t there = shim_there(shim, rows, calls, XPOOL_F32);
    bench_times_t half = shim_there(shim, rows, calls, XPOOL_BF16);
    bench_times_t here = shim_here(shim, rows, calls);
    printf("{\"metric\": \"shim.cpu.%s.rows%u_us\", \"value\": %.3f, \"unit\": \"us\", "
           "\"floor\": %.3f, \"peer\": null, \"target\": null, \"note\": \"P50 of a call, %.1f us "
           "(P99 %.1f, bfloat16 %.1f), less the same layer in process, %.1f us; floor: two raw "
           "round trips\"}\n",
           shim->label, rows, there.p50_us - here.p50_us, floor_us, there.p50_us, there.p99_us,
           half.p50_us, here.p50_us);
    fflush(stdout);
}

int main(int argc, char **argv)
{
    static const uint32_t rows[] = {1, 16, SHIM_MAX_ROWS};
    if (argc < 4 || argc % 2) {
        fprintf(stderr, "usage: bench_shim CONFIG (LABEL MODEL)...\n");
        return 2;
    }
    sched_getaffinity(0, sizeof(all_cpus), &all_cpus);
    uint64_t *samples = malloc(20000 * sizeof(*samples));
    CHECK(samples);
    bench_times_t raw = raw_ping_pong(false, true, samples, 20000);
    free(samples);
    printf("{\"metric\": \"shim.cpu.raw_spin_us\", \"value\": %.3f, \"unit\": \"us\", \"floor\": "
           "%.3f, \"peer\": null, \"target\": null, \"note\": \"raw round trip of two spinning "
           "processes, P50\"}\n",
           raw.p50_us, raw.p50_us);
    for (int i = 2; i + 1 < argc; i += 2) {
        shim_t shim = {.label = argv[i], .model = argv[i + 1]};
        shim_open(&shim, argv[1]);
        for (uint32_t r = 0; r < sizeof(rows) / sizeof(rows[0]); r++)
            shim_row(&shim, rows[r], 2 * raw.p50_us);
        xpool_rank_close(shim.rank);
        ffn_runtime_destroy(shim.runtime);
        xpool_config_close(shim.config);
        free(shim.in);
        free(shim.out);
        free(shim.samples);
    }
    return 0;
}
