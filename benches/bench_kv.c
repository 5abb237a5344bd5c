/* SPDX-License-Identifier: MIT */
/*
 * Elastic KV on the CPU: how long a request that needs 256 MiB more waits, from its submission to
 * its first row, and what the system itself takes for the same bytes.
 *
 * Two engines of a small synthetic model with a wide KV Cache, the daemon's market on a third
 * thread, the real control channel between them. The FFN answers at once. Prints JSON rows.
 */
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/clock.h"
#include "engine/engine.h"
#include "kernels/kernels.h"
#include "kv/market.h"
#include "model/synth.h"

#define GRANT_BYTES (256ull << 20)
#define ROUNDS      9
#define ENGINES     2

static struct bench {
    kv_channel_t *channel;
    kv_market_t market;
    int channel_fd, bell;
    atomic_bool stop;
    engine_t *engines[ENGINES];
    kv_rank_t ranks[ENGINES];
    atomic_uint_least64_t first_row_ns[ENGINES];
    pthread_mutex_t lock; /* of the market */
} bench;

static void die(const char *what)
{
    fprintf(stderr, "bench_kv: %s: %s\n", what, xp_error_last()->text);
    exit(1);
}

static xp_status_t ffn(void *context, uint32_t layer, uint32_t rows, uint32_t kind,
                       uint64_t slo_deadline_ns, const float *in, float *out)
{
    atomic_uint_least64_t *first = context;
    uint64_t never = 0;
    atomic_compare_exchange_strong(first, &never, xp_monotonic_ns());
    memset(out, 0, sizeof *out);
    return XP_OK;
}

static void market_step(uint64_t *next_ns_out)
{
    kv_market_step_t step;
    pthread_mutex_lock(&bench.lock);
    kv_market_step(&bench.market, xp_monotonic_ns(), &step);
    pthread_mutex_unlock(&bench.lock);
    for (uint32_t g = 0; g < ENGINES; g++) {
        if (step.ring[g])
            engine_kv_look(bench.engines[g]);
        if (step.faults[g])
            fprintf(stderr, "bench_kv: group %u: %s\n", g, step.fault_text[g]);
    }
    *next_ns_out = step.next_ns;
}

static void *market_main(void *context)
{
    while (!atomic_load(&bench.stop)) {
        uint64_t next_ns, now_ns = xp_monotonic_ns();
        market_step(&next_ns);
        uint64_t wait_ms = next_ns > now_ns ? (next_ns - now_ns) / XP_NS_PER_MS : 0;
        struct pollfd bell = {.fd = bench.bell, .events = POLLIN};
        poll(&bell, 1, wait_ms > 20 ? 20 : (int)wait_ms);
        kv_bell_clear(bench.bell);
    }
    return NULL;
}

static void drain(uint32_t e)
{
    static engine_event_t events[64];
    while (engine_drain(bench.engines[e], events, 64) > 0)
        ;
}

static void wait_idle(uint32_t e)
{
    engine_stats_t stats;
    do {
        usleep(500);
        drain(e);
        engine_stats(bench.engines[e], &stats);
    } while (stats.running + stats.waiting > 0);
}

/* From the submission of a prompt of `tokens` to its first row. */
static double admitted_ms(uint32_t e, uint32_t tokens)
{
    int32_t *ids = calloc(tokens, sizeof *ids);
    engine_sampling_t sampling;
    uint64_t request;
    engine_sampling_default(&sampling);
    sampling.max_new_tokens = 1;
    atomic_store(&bench.first_row_ns[e], 0);
    if (!ids)
        die("memory");
    const uint64_t begin_ns = xp_monotonic_ns();
    if (engine_submit(bench.engines[e], ids, tokens, &sampling, &request) != XP_OK)
        die("engine_submit");
    while (atomic_load(&bench.first_row_ns[e]) == 0) {
        if (xp_monotonic_ns() - begin_ns > 20 * XP_NS_PER_S)
            die("nothing was admitted within 20 s");
        usleep(100);
    }
    engine_cancel(bench.engines[e], request);
    wait_idle(e);
    free(ids);
    return (double)(atomic_load(&bench.first_row_ns[e]) - begin_ns) / 1e6;
}

static void trim(uint32_t e)
{
    engine_stats_t stats;
    uint64_t begin_ns = xp_monotonic_ns();
    for (;;) {
        pthread_mutex_lock(&bench.lock);
        (void)kv_market_trim(&bench.market, e);
        pthread_mutex_unlock(&bench.lock);
        kv_bell_ring(bench.bell);
        usleep(2000);
        engine_stats(bench.engines[e], &stats);
        if (stats.kv_backed_bytes < GRANT_BYTES / 2)
            break;
        if (xp_monotonic_ns() - begin_ns > 10 * XP_NS_PER_S)
            die("trim");
    }
    usleep(5000); /* until its completion is credited */
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(double *values, uint32_t count)
{
    qsort(values, count, sizeof *values, compare);
    return values[count / 2];
}

/* What the system takes for the bytes, in this process's page table too. */
static double floor_ms(bool fallocated)
{
    double took[ROUNDS];
    for (uint32_t i = 0; i < ROUNDS; i++) {
        int fd = memfd_create("bench-kv-floor", MFD_CLOEXEC);
        if (fd < 0 || ftruncate(fd, GRANT_BYTES) != 0)
            die("memfd");
        void *at = mmap(NULL, GRANT_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        const uint64_t begin_ns = xp_monotonic_ns();
        int failed = fallocated ? posix_fallocate(fd, 0, GRANT_BYTES)
                                : madvise(at, GRANT_BYTES, MADV_POPULATE_WRITE);
        took[i] = (double)(xp_monotonic_ns() - begin_ns) / 1e6;
        if (at == MAP_FAILED || failed)
            die("the floor's memory");
        munmap(at, GRANT_BYTES);
        close(fd);
    }
    return median(took, ROUNDS);
}

static void print_row(const char *metric, double value, double floor, const char *note)
{
    printf("{\"metric\": \"%s\", \"value\": %.3f, \"unit\": \"ms\", \"floor\": %.3f, \"target\": "
           "null, \"note\": \"%s\"}\n",
           metric, value, floor, note);
    fflush(stdout);
}

static void open_all(const char *path, uint32_t *tokens_out)
{
    model_spec_t *spec = calloc(1, sizeof *spec);
    if (!spec || model_spec_load(path, spec) != XP_OK)
        die("model_spec_load");
    const uint64_t token_bytes = model_kv_bytes_per_token(spec, XP_DTYPE_F32);
    const uint32_t bundle_tokens =
        kv_bundle_tokens(token_bytes, 16, KV_BUNDLE_TARGET_BYTES_CPU, KV_BUNDLE_GRANULE_BYTES_CPU);
    const uint64_t bundle_bytes = bundle_tokens * token_bytes;
    const uint32_t grant = (uint32_t)(GRANT_BYTES / bundle_bytes), least = 1;
    kv_group_plan_t plans[ENGINES];
    for (uint32_t g = 0; g < ENGINES; g++)
        plans[g] = (kv_group_plan_t){.instance = g,
                                     .partition_count = 1,
                                     .bundle_bytes = bundle_bytes,
                                     .token_bytes = token_bytes,
                                     .bundle_tokens = bundle_tokens,
                                     .page_tokens = 16,
                                     .floor_bundles = least,
                                     .ceiling_bundles = grant + least,
                                     .reserved_bundles = grant + least,
                                     .elastic = true};
    const uint64_t pool = (grant + 2 * least) * bundle_bytes;
    kv_market_settings_t settings = {.mode = KV_POLICY_DEADLINE,
                                     .patience_ns = XP_NS_PER_S,
                                     .hold_ns = 0,
                                     .answer_ns = 10 * XP_NS_PER_S};
    if (kv_channel_create(1, &pool, 1, plans, ENGINES, &bench.channel_fd, &bench.channel) !=
            XP_OK ||
        kv_bell_create(&bench.bell) != XP_OK)
        die("channel");
    pthread_mutex_init(&bench.lock, NULL);
    kv_market_init(&bench.market, bench.channel, &settings);
    for (uint32_t g = 0; g < ENGINES; g++) {
        kv_market_start(&bench.market, g, 0);
        engine_config_t config = {.model_id = g ? "b" : "a",
                                  .path = path,
                                  .threads = 1,
                                  .decode_rows = 1,
                                  .prefill_rows = 16,
                                  .kv_rank = &bench.ranks[g],
                                  .queue_limit = 4,
                                  .ffn = {.call = ffn, .context = &bench.first_row_ns[g]},
                                  .clock = xp_clock_system()};
        if (kv_rank_open(bench.channel_fd, bench.bell, -1, g, &bench.ranks[g]) != XP_OK ||
            engine_create(&config, &bench.engines[g]) != XP_OK ||
            engine_start(bench.engines[g]) != XP_OK)
            die("engine");
    }
    *tokens_out = (grant + least) * bundle_tokens - 1;
    free(spec);
}

int main(void)
{
    char folder[] = "/tmp/xpool-bench-kv-XXXXXX", command[64];
    double from_free[ROUNDS], from_donor[ROUNDS];
    uint32_t tokens;
    synth_options_t options;
    pthread_t market;
    if (kernels_select() != XP_OK || !mkdtemp(folder))
        die("start");
    model_synth_defaults(MODEL_ARCH_LLAMA, &options);
    options.layers = 8;
    options.heads = options.kv_heads = 8;
    options.head_dim = 128;
    options.context = 8192;
    options.force = true;
    if (model_synth_write(&options, folder) != XP_OK)
        die("model_synth_write");
    open_all(folder, &tokens);
    if (pthread_create(&market, NULL, market_main, NULL) != 0)
        die("thread");
    usleep(20000);
    for (uint32_t i = 0; i < ROUNDS; i++) {
        trim(0);
        from_free[i] = admitted_ms(0, tokens);
    }
    /* From here on the one that asks is funded by the other, which is idle and holds all. */
    for (uint32_t i = 0; i < ROUNDS; i++)
        from_donor[i] = admitted_ms((i + 1) % ENGINES, tokens);
    const double populate = floor_ms(false), allocate = floor_ms(true);
    char note[160];
    snprintf(note, sizeof note,
             "P50 of %d, 256 MiB from demand to admitted request, free bytes; floor: fallocate of "
             "as much; MADV_POPULATE_WRITE %.1f ms",
             ROUNDS, populate);
    print_row("kv.cpu.grant_256mib_ms", median(from_free, ROUNDS), allocate, note);
    snprintf(note, sizeof note, "P50 of %d, as above, all of it taken from an idle donor", ROUNDS);
    print_row("kv.cpu.grant_256mib_donor_ms", median(from_donor, ROUNDS), allocate, note);

    atomic_store(&bench.stop, true);
    pthread_join(market, NULL);
    for (uint32_t g = 0; g < ENGINES; g++) {
        engine_destroy(bench.engines[g]);
        kv_rank_close(&bench.ranks[g]);
    }
    kv_channel_unmap(bench.channel);
    snprintf(command, sizeof command, "rm -r %s", folder);
    return system(command) == 0 ? 0 : 1;
}
