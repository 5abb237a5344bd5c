/* SPDX-License-Identifier: MIT */
/*
 * What Transport and Fabric cost a layer on CPU devices: the round trip of one call less the
 * compute, beside raw ping-pongs of the same waits in the same run. The roles are forked processes,
 * as in a real system. Prints one JSON row a line.
 *
 * The eager path has four one-way hops between processes (Instance, AtnAgent, FfnAgent and back),
 * so the floor is two raw round trips.
 */
#include <errno.h>
#include <string.h>

#include "base/pool.h"
#include "fabric/fabric.h"
#include "fabric/internal.h"
#include "pingpong.h"
#include "transport/transport.h"

#define BENCH_HIDDEN      576
#define BENCH_ROWS_MAX    16
#define BENCH_CALLS       20000
#define BENCH_SLEEP_CALLS 5000
#define BENCH_SPIN_NS     200000

/* ---- the system ----------------------------------------------------------------------------- */
typedef struct bench_system {
    fabric_plan_t plan;
    fabric_descriptors_t descriptors;
    fabric_t *observer;
    transport_geometry_t geometry;
    transport_client_t *client;
} bench_system_t;

static xp_status_t bench_execute(void *context, uint32_t lane, uint32_t weights, uint32_t layer,
                                 uint32_t rows, const float *in, float *out)
{
    for (uint32_t i = 0; i < rows * BENCH_HIDDEN; i++)
        out[i] = in[i] + (float)layer;
    return XP_OK;
}

static void bench_make(bench_system_t *bench, fabric_form_t form, uint32_t spin_ns)
{
    memset(bench, 0, sizeof(*bench));
    fabric_plan_t *plan = &bench->plan;
    *plan = (fabric_plan_t){.magic = FABRIC_PLAN_MAGIC,
                            .version = FABRIC_PLAN_VERSION,
                            .bytes = sizeof(*plan),
                            .generation = 1,
                            .atn_count = 1,
                            .ffn_count = 1,
                            .lanes = 1,
                            .submission_timeout_ns = 60 * XP_NS_PER_S,
                            .spin_ns = spin_ns,
                            .instance_count = 1,
                            .weights_count = 1};
    fabric_plan_instance_t *instance = &plan->instances[0];
    snprintf(instance->id, sizeof(instance->id), "bench");
    instance->hidden = BENCH_HIDDEN;
    instance->layers = 30;
    instance->max_rows = BENCH_ROWS_MAX;
    instance->dtype = XP_DTYPE_F32;
    instance->atn_tp = instance->atn_dp = 1;
    instance->delivery = FABRIC_DELIVERY_SINGLE_COMPLETE;
    instance->form = form;
    for (uint32_t layer = 0; layer < instance->layers; layer++)
        instance->layer_group[layer] = 1;
    CHECK(fabric_shm_make(plan, &bench->descriptors) == XP_OK);
    CHECK(fabric_attach("shm", plan, &bench->descriptors, FABRIC_PE_OBSERVER, &bench->observer) ==
          XP_OK);
    bench->geometry = (transport_geometry_t){
        .hidden = BENCH_HIDDEN, .max_rows = BENCH_ROWS_MAX, .dtype = XP_DTYPE_F32, .dp_size = 1};
    CHECK(transport_client_create(&bench->geometry, spin_ns, &bench->client) == XP_OK);
    CHECK(transport_client_set_doorbell(bench->client, bench->descriptors.doorbell_fd, 0) == XP_OK);
}

static void bench_free(bench_system_t *bench)
{
    transport_client_destroy(bench->client);
    fabric_detach(bench->observer);
    close(bench->descriptors.arena_fd);
    close(bench->descriptors.doorbell_fd);
}

static fabric_atn_t *bench_atn(const bench_system_t *bench)
{
    fabric_t *fabric;
    fabric_atn_t *atn;
    transport_server_t *server;
    CHECK(fabric_attach("shm", &bench->plan, &bench->descriptors, 0, &fabric) == XP_OK);
    CHECK(fabric_atn_create(fabric, xp_clock_system(), &atn) == XP_OK);
    CHECK(transport_server_create(transport_client_fd(bench->client), &bench->geometry, &server) ==
          XP_OK);
    CHECK(fabric_atn_attach(atn, 0, 0, server) == XP_OK);
    return atn;
}

static pid_t bench_fork_ffn(const bench_system_t *bench, uint32_t cpu, uint32_t roles)
{
    pid_t pid = bench_fork(cpu, roles);
    if (pid == 0) {
        fabric_t *fabric;
        fabric_ffn_t *ffn;
        CHECK(fabric_attach("shm", &bench->plan, &bench->descriptors, 1, &fabric) == XP_OK);
        CHECK(fabric_ffn_create(fabric, xp_clock_system(), bench_execute, NULL, &ffn) == XP_OK);
        _exit(fabric_ffn_run(ffn) == XP_CLOSED ? 0 : 1);
    }
    return pid;
}

static pid_t bench_fork_atn(const bench_system_t *bench, uint32_t cpu, uint32_t roles)
{
    pid_t pid = bench_fork(cpu, roles);
    if (pid == 0)
        _exit(fabric_atn_run(bench_atn(bench)) == XP_CLOSED ? 0 : 1);
    return pid;
}

static uint64_t bench_busy_ns(const bench_system_t *bench)
{
    fabric_pe_counters_t counters;
    fabric_counters(bench->observer, 1, &counters);
    return counters.busy_ns;
}

/* Makes calls of `rows` rows; returns round trip less the mean compute. `atn`: the AtnAgent that
 * this thread itself drives, or NULL. */
static bench_times_t bench_drive(const bench_system_t *bench, fabric_atn_t *atn, uint32_t rows,
                                 uint64_t *samples, uint32_t count)
{
    static float in[BENCH_ROWS_MAX * BENCH_HIDDEN], out[BENCH_ROWS_MAX * BENCH_HIDDEN];
    uint64_t busy_ns = 0;
    transport_tensor_t input = {.data = in,
                                .dtype = XP_DTYPE_F32,
                                .rank = 2,
                                .rows = rows,
                                .width = BENCH_HIDDEN,
                                .row_stride = BENCH_HIDDEN};
    transport_tensor_t output = input;
    output.data = out;
    for (uint32_t i = 0; i < BENCH_WARM_UP + count; i++) {
        if (i == BENCH_WARM_UP)
            busy_ns = bench_busy_ns(bench);
        transport_request_t request = {.layer = i % 30, .rows = rows};
        in[0] = (float)(i & 0xffff);
        uint64_t start_ns = xp_monotonic_ns();
        CHECK(transport_client_put(bench->client, &request, &input) == XP_OK);
        /* Two of its looks find something: the request, and the commit. */
        for (uint32_t found = 0; atn && found < 2;) {
            bool moved = false;
            CHECK(fabric_atn_look(atn, &moved) == XP_OK);
            found += moved;
        }
        CHECK(transport_client_wait(bench->client, start_ns + 60 * XP_NS_PER_S) == XP_OK);
        CHECK(transport_client_take(bench->client, &output) == XP_OK);
        if (i >= BENCH_WARM_UP)
            samples[i - BENCH_WARM_UP] = xp_monotonic_ns() - start_ns;
        CHECK(out[0] == in[0] + (float)request.layer);
    }
    double compute_us = (double)(bench_busy_ns(bench) - busy_ns) / 1e3 / count;
    bench_times_t times = bench_summary(samples, count);
    return (bench_times_t){times.p50_us - compute_us, times.p99_us - compute_us};
}

static void bench_end(const bench_system_t *bench, pid_t first, pid_t second)
{
    fabric_shutdown(bench->observer);
    bench_reap(first);
    bench_reap(second);
    bench_unpin();
}

/* Instance, AtnAgent and FfnAgent as three processes, on cores of their own where there are
 * `cores`. */
static bench_times_t bench_three(fabric_form_t form, uint32_t rows, uint32_t spin_ns,
                                 uint32_t cores, uint64_t *samples, uint32_t count)
{
    bench_system_t bench;
    bench_make(&bench, form, spin_ns);
    pid_t ffn = bench_fork_ffn(&bench, 2, cores), atn = bench_fork_atn(&bench, 1, cores);
    bench_pin(0, cores);
    bench_times_t times = bench_drive(&bench, NULL, rows, samples, count);
    bench_end(&bench, atn, ffn);
    bench_free(&bench);
    return times;
}

/* The Fabric's half with a core each: Instance and AtnAgent on one thread, FfnAgent beside it. */
static bench_times_t bench_fabric_half(uint64_t *samples, uint32_t count)
{
    bench_system_t bench;
    bench_make(&bench, FABRIC_FORM_AUTO, BENCH_SPIN_NS);
    pid_t ffn = bench_fork_ffn(&bench, 1, 2);
    bench_pin(0, 2);
    fabric_atn_t *atn = bench_atn(&bench);
    bench_times_t times = bench_drive(&bench, atn, 1, samples, count);
    bench_end(&bench, ffn, 0);
    fabric_atn_destroy(atn);
    bench_free(&bench);
    return times;
}

/* Transport's half with a core each: the Instance, and a peer that answers at once. */
static bench_times_t bench_transport_half(uint64_t *samples, uint32_t count)
{
    bench_system_t bench;
    bench_make(&bench, FABRIC_FORM_AUTO, BENCH_SPIN_NS);
    pid_t peer = bench_fork(1, 2);
    if (peer == 0) {
        transport_server_t *server;
        transport_pending_t pending;
        CHECK(transport_server_create(transport_client_fd(bench.client), &bench.geometry,
                                      &server) == XP_OK);
        for (xp_status_t status = XP_RETRY; status != XP_CLOSED;) {
            status = transport_server_poll(server, &pending);
            if (status != XP_OK)
                continue;
            bench_execute(NULL, 0, 0, pending.layer, pending.rows, pending.input, pending.output);
            transport_server_complete(server, pending.sequence, XP_OK);
        }
        _exit(0);
    }
    bench_pin(0, 2);
    bench_times_t times = bench_drive(&bench, NULL, 1, samples, count);
    transport_arena_close(transport_client_fd(bench.client), XP_CLOSED);
    bench_end(&bench, peer, 0);
    bench_free(&bench);
    return times;
}

static void print_row(const char *metric, double value, double floor, const char *target,
                      const char *note)
{
    printf("{\"metric\": \"%s\", \"value\": %.3f, \"unit\": \"us\", \"floor\": %.3f, "
           "\"peer\": null, \"target\": %s%s%s, \"note\": \"%s\"}\n",
           metric, value, floor, target ? "\"" : "", target ? target : "null", target ? "\"" : "",
           note);
    fflush(stdout);
}

int main(void)
{
    uint64_t *samples = malloc(BENCH_CALLS * sizeof(uint64_t));
    CHECK(samples);
    CHECK(sched_getaffinity(0, sizeof(all_cpus), &all_cpus) == 0);
    uint32_t cpus = xp_usable_cpus();
    char note[256];
    const char *cores = cpus >= 3 ? "a core for each of the three processes"
                                  : "three processes on two cores: not a core each, so they give "
                                    "way to each other";
    bench_times_t spin = raw_ping_pong(false, true, samples, BENCH_CALLS);
    bench_times_t sleep = raw_ping_pong(true, true, samples, BENCH_SLEEP_CALLS);
    bench_times_t placed = raw_ping_pong(true, false, samples, BENCH_SLEEP_CALLS);
    print_row("hop.cpu.raw_spin_us", spin.p50_us, spin.p50_us, NULL,
              "raw round trip of two spinning processes, P50");
    print_row("hop.cpu.raw_sleep_us", sleep.p50_us, sleep.p50_us, NULL,
              "raw round trip over two futex wakes, a core each, P50");
    print_row("hop.cpu.raw_sleep_placed_us", placed.p50_us, placed.p50_us, NULL,
              "raw round trip over two futex wakes, placed by the kernel, P50");
    if (cpus < 3 && placed.p50_us < sleep.p50_us)
        sleep = placed; /* the roles below are not pinned either */

    bench_times_t times = bench_three(FABRIC_FORM_AUTO, 1, BENCH_SPIN_NS, 3, samples, BENCH_CALLS);
    snprintf(note, sizeof(note),
             "P50, eager, 1 row of %d f32, P99 %.1f us; floor: two raw round "
             "trips; %s",
             BENCH_HIDDEN, times.p99_us, cores);
    print_row("hop.cpu.spin_us", times.p50_us, 2 * spin.p50_us, "<= 3", note);

    times = bench_three(FABRIC_FORM_AUTO, 1, 0, 3, samples, BENCH_SLEEP_CALLS);
    snprintf(note, sizeof(note),
             "P50, eager, 1 row, P99 %.1f us; floor: two raw round trips (four "
             "wakes); %s",
             times.p99_us, cores);
    print_row("hop.cpu.sleep_us", times.p50_us, 2 * sleep.p50_us, "<= 15", note);

    if (cpus >= 3) {
        times = bench_three(FABRIC_FORM_AUTO, 1, 0, UINT32_MAX, samples, BENCH_SLEEP_CALLS);
        snprintf(
            note, sizeof(note),
            "P50, eager, 1 row, P99 %.1f us; as hop.cpu.sleep_us, but placed by the kernel, as "
            "agents are that nobody pins",
            times.p99_us);
        print_row("hop.cpu.sleep_placed_us", times.p50_us, 2 * placed.p50_us, NULL, note);
    }

    times = bench_three(FABRIC_FORM_AUTO, 16, BENCH_SPIN_NS, 3, samples, BENCH_CALLS);
    snprintf(note, sizeof(note), "P50, eager, 16 rows, P99 %.1f us", times.p99_us);
    print_row("hop.cpu.spin_16rows_us", times.p50_us, 2 * spin.p50_us, NULL, note);

    times = bench_three(FABRIC_FORM_LONG, 1, BENCH_SPIN_NS, 3, samples, BENCH_CALLS);
    snprintf(note, sizeof(note), "P50, long form, 1 row, P99 %.1f us; floor: three raw round trips",
             times.p99_us);
    print_row("hop.cpu.long_spin_us", times.p50_us, 3 * spin.p50_us, NULL, note);

    times = bench_three(FABRIC_FORM_LONG, 1, 0, 3, samples, BENCH_SLEEP_CALLS);
    snprintf(note, sizeof(note), "P50, long form, 1 row, P99 %.1f us", times.p99_us);
    print_row("hop.cpu.long_sleep_us", times.p50_us, 3 * sleep.p50_us, NULL, note);

    if (cpus >= 2) {
        bench_times_t transport = bench_transport_half(samples, BENCH_CALLS);
        print_row("hop.cpu.transport_half_us", transport.p50_us, spin.p50_us, NULL,
                  "P50, Instance and an answering peer, a core each; compute included");
        bench_times_t fabric = bench_fabric_half(samples, BENCH_CALLS);
        print_row("hop.cpu.fabric_half_us", fabric.p50_us, spin.p50_us, NULL,
                  "P50, Instance and AtnAgent on one thread, FfnAgent beside it, a core each");
        print_row("hop.cpu.halves_us", transport.p50_us + fabric.p50_us, 2 * spin.p50_us, "<= 3",
                  "computed: sum of the two halves, where every process has a core");
    }
    free(samples);
    return 0;
}
