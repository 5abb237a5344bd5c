/* SPDX-License-Identifier: MIT */
/*
 * The direct lane and the relay on two GPUs, by real processes: Instances on cuda:0 under MPS,
 * FfnAgents on cuda:1 (without MPS) and, for groups of two, on cuda:0 as well. The echo stands for
 * the execution. Prints one JSON row a line.
 *
 *   stage_device [thousands of round trips] [parts]
 *   parts: probe,direct,split,partials,relay,kill (all of them without the argument)
 *
 * Every wait has a limit. Exit code 77 where there are not two GPUs.
 *
 * One more part, shapes: 2 AtnAgents with 1 and 2 FfnAgents, both roles on each GPU, all
 * deliveries, attention DP and TP, by both lanes.
 */
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "fabric/records.h"
#include "stage_roles.h"

static order_t order_of(uint32_t what, uint32_t instance, uint32_t other)
{
    return (order_t){.what = what, .instance = instance, .other = other};
}

/* ---- the parent ----------------------------------------------------------------------------- */
static int life_fd;
static const char *mps_pipe; /* or NULL */
static uint32_t spawned;     /* life words are not used twice */
static agent_t ffns[MEMBERS_MAX], relays[2];
static fabric_plan_t plan;
static uint32_t scene_now, variant_now;
static bool by_relay;

static answer_t ask(agent_t *agent, order_t order, int fd, int *fd_out)
{
    answer_t answer;
    CHECK(kit_send(agent->socket, &order, sizeof(order), fd));
    if (!kit_receive(agent->socket, &answer, sizeof(answer), fd_out)) {
        fprintf(stderr, "process %d does not answer order %u\n", agent->pid, order.what);
        exit(1);
    }
    if (answer.status != XP_OK)
        xp_fail(answer.status, "process %d, order %u: %s", agent->pid, order.what, answer.text);
    return answer;
}
static void must(agent_t *agent, order_t order, int fd, int *fd_out)
{
    CHECK_OK(ask(agent, order, fd, fd_out).status);
}
static void ready(agent_t *agent)
{
    answer_t answer;
    CHECK(kit_receive(agent->socket, &answer, sizeof(answer), NULL));
}

static void start_ffn(uint32_t index)
{
    /* FfnAgent 0 is on cuda:1, FfnAgent 1 on cuda:0; under MPS where attention is, too. */
    if (index == 0 && plan.atn_count == 1)
        unsetenv("CUDA_MPS_PIPE_DIRECTORY");
    agent_spawn("ffn", life_fd, index | scene_now << 8 | variant_now << 12 | ++spawned << 16,
                index == 0, &ffns[index]);
    if (mps_pipe)
        setenv("CUDA_MPS_PIPE_DIRECTORY", mps_pipe, 1);
}

static bool is_of(const fabric_plan_instance_t *one, uint32_t atn)
{
    bool found = false;
    for (uint32_t rank = 0; rank < fabric_plan_ranks(one); rank++)
        found = found || one->rank_atn[rank] == atn;
    return found;
}

static void scene_up(uint32_t scene, bool use_relay)
{
    scene_plan(scene, &plan);
    scene_now = scene;
    by_relay = use_relay;
    for (uint32_t f = 0; f < plan.ffn_count; f++)
        start_ffn(f);
    for (uint32_t f = 0; f < plan.ffn_count; f++)
        ready(&ffns[f]);
    for (uint32_t i = 0; i < plan.instance_count; i++)
        for (uint32_t first = 0; first < plan.ffn_count; first++) {
            if (!(stage_reducers(&plan.instances[i]) >> first & 1))
                continue;
            int fd;
            must(&ffns[first], order_of(ORDER_EXPORT_PARTIALS, i, 0), -1, &fd);
            for (uint32_t f = 0; f < plan.ffn_count; f++)
                if (f != first)
                    must(&ffns[f], order_of(ORDER_IMPORT, i, first), fd, NULL);
            close(fd);
        }
    for (uint32_t f = 0; f < plan.ffn_count; f++)
        must(&ffns[f], order_of(ORDER_START, 0, 0), -1, NULL);
    for (uint32_t a = 0; use_relay && a < plan.atn_count; a++) {
        agent_spawn("relay", life_fd, relay_number(scene, a), ++spawned, &relays[a]);
        ready(&relays[a]);
        for (uint32_t i = 0; i < plan.instance_count; i++)
            for (uint32_t f = 0; f < plan.ffn_count; f++) {
                if (!is_of(&plan.instances[i], a) || !(stage_members(&plan.instances[i]) >> f & 1))
                    continue;
                int fd;
                must(&ffns[f], order_of(ORDER_EXPORT, i, 0), -1, &fd);
                must(&relays[a], order_of(ORDER_OPEN, i, f), fd, NULL);
                close(fd);
            }
    }
}

static void scene_down(void)
{
    for (uint32_t a = 0; by_relay && a < plan.atn_count; a++) {
        must(&relays[a], order_of(ORDER_STOP, 0, 0), -1, NULL);
        agent_ended(&relays[a]);
    }
    for (uint32_t f = 0; f < plan.ffn_count; f++) {
        answer_t looked = ask(&ffns[f], order_of(ORDER_LOOK, 0, 0), -1, NULL);
        CHECK(looked.status == XP_OK && looked.values[0] == 0);
        answer_t counted = ask(&ffns[f], order_of(ORDER_COUNTERS, 0, 0), -1, NULL);
        answer_t stopped = ask(&ffns[f], order_of(ORDER_STOP, 0, 0), -1, NULL);
        CHECK_OK(stopped.status);
        printf("FfnAgent %u: %llu Invocations, %llu turns, longest %.1f us; stopped in %.0f us\n",
               f, (unsigned long long)counted.values[0], (unsigned long long)counted.values[1],
               (double)counted.values[2] / 1e3, (double)stopped.ns / 1e3);
        agent_ended(&ffns[f]);
    }
}

/* All ranks of an Instance. */
static void ranks_up(uint32_t instance, agent_t *clients)
{
    const fabric_plan_instance_t *one = &plan.instances[instance];
    const uint32_t ranks = fabric_plan_ranks(one), members = stage_members(one);
    const bool floors = plan.ffn_count == 1 && ranks == 1 && !by_relay;
    uint32_t words[FABRIC_MAX_RANKS];
    int arenas[FABRIC_MAX_RANKS], fd;
    for (uint32_t rank = 0; rank < ranks; rank++) {
        words[rank] = ++spawned;
        agent_spawn("client", life_fd,
                    client_number(instance, rank, scene_now, variant_now, by_relay), words[rank],
                    &clients[rank]);
    }
    for (uint32_t rank = 0; rank < ranks; rank++) {
        ready(&clients[rank]);
        must(&clients[rank], order_of(ORDER_EXPORT, 0, 0), -1, &arenas[rank]);
    }
    for (uint32_t f = 0; f < plan.ffn_count; f++) {
        if (!(members >> f & 1))
            continue;
        for (uint32_t rank = 0; rank < ranks; rank++) {
            order_t give = order_of(ranks == 1 ? ORDER_ATTACH : ORDER_HAND, instance, floors);
            fd = arenas[rank];
            if (by_relay)
                must(&relays[one->rank_atn[rank]],
                     (order_t){.what = ORDER_EXPORT, .instance = instance, .rows = rank}, -1, &fd);
            must(&ffns[f], give, fd, NULL);
            if (by_relay)
                close(fd);
        }
        if (ranks > 1)
            must(&ffns[f], order_of(ORDER_ATTACH, instance, 0), -1, NULL);
    }
    for (uint32_t rank = 0; rank < ranks; rank++) {
        if (by_relay) {
            const order_t attach = {ORDER_ATTACH, instance, words[rank], rank, 0};
            must(&relays[one->rank_atn[rank]], attach, arenas[rank], NULL);
        }
        for (uint32_t f = 0; !by_relay && f < plan.ffn_count; f++) {
            if (!(members >> f & 1))
                continue;
            must(&ffns[f], order_of(ORDER_EXPORT, instance, floors), -1, &fd);
            must(&clients[rank], order_of(ORDER_OPEN, instance, f), fd, NULL);
            close(fd);
        }
        close(arenas[rank]);
    }
}

/* Of one rank. */
static agent_t client_up(uint32_t instance)
{
    agent_t client;
    CHECK(fabric_plan_ranks(&plan.instances[instance]) == 1);
    ranks_up(instance, &client);
    return client;
}

static void detach(uint32_t instance)
{
    const fabric_plan_instance_t *one = &plan.instances[instance];
    for (uint32_t rank = 0; by_relay && rank < fabric_plan_ranks(one); rank++)
        must(&relays[one->rank_atn[rank]],
             (order_t){.what = ORDER_DETACH, .instance = instance, .rows = rank}, -1, NULL);
    for (uint32_t f = 0; f < plan.ffn_count; f++)
        if (stage_members(one) >> f & 1)
            must(&ffns[f], order_of(ORDER_DETACH, instance, 0), -1, NULL);
}

static void ranks_down(uint32_t instance, agent_t *clients)
{
    for (uint32_t rank = 0; rank < fabric_plan_ranks(&plan.instances[instance]); rank++) {
        must(&clients[rank], order_of(ORDER_STOP, 0, 0), -1, NULL);
        agent_ended(&clients[rank]);
    }
    detach(instance);
}

static void client_down(agent_t *client, uint32_t instance)
{
    ranks_down(instance, client);
}

static void row(const char *metric, answer_t answer, double value, const char *unit, double floor,
                const char *target, const char *what)
{
    char note[300];
    snprintf(note, sizeof(note), "%s; P50 %.3f, P99 %.3f, max %.1f us of %llu, %llu wrong", what,
             answer.times.p50_us, answer.times.p99_us, answer.times.max_us,
             (unsigned long long)answer.done, (unsigned long long)answer.wrong);
    kit_row(metric, value, unit, floor, target, note);
    kit_samples(&answer.times, metric);
    CHECK(answer.wrong == 0);
}

/* P50 and, as a row of its own, P99. */
static void row_both(const char *metric, answer_t answer, double floor, const char *what)
{
    char name[120];
    row(metric, answer, answer.times.p50_us, "us", floor, NULL, what);
    snprintf(name, sizeof(name), "%.*s_p99_us", (int)(strlen(metric) - strlen("_us")), metric);
    kit_row(name, answer.times.p99_us, "us", -1, NULL, "P99 of the row before");
}

static hop_floor_t hop_floor = {-1, -1, -1};

static void measure_floors(agent_t *client)
{
    static const uint32_t payloads[] = {0, WIDTH * 2, 64 * 1024};
    for (int i = 0; i < 3; i++) {
        char what[120];
        must(&ffns[0], (order_t){ORDER_PING, INSTANCE_A, 0, payloads[i], 20000}, -1, NULL);
        answer_t answer =
            ask(client, (order_t){ORDER_PING, INSTANCE_A, 0, payloads[i], 20000}, -1, NULL);
        CHECK_OK(answer.status);
        snprintf(what, sizeof(what),
                 "raw round trip between two GPUs, %u bytes and a word each way", payloads[i]);
        row(i == 0   ? "hop.cuda.raw_flag_us"
            : i == 1 ? "hop.cuda.raw_put_signal_us"
                     : "hop.cuda.raw_put_signal_64k_us",
            answer, answer.times.p50_us, "us", -1, NULL, what);
        if (i == 1) {
            hop_floor.p50_us = answer.times.p50_us;
            hop_floor.p99_us = answer.times.p99_us;
        }
    }
}

static void measure_rows(agent_t *client, const char *way)
{
    static const uint32_t rows[] = {1, 4, 16, 64, 128, 512};
    for (int i = 0; i < 6; i++) {
        char metric[80], what[160];
        answer_t answer = ask(client, (order_t){ORDER_GRAPH, 0, 0, rows[i], 300}, -1, NULL);
        CHECK_OK(answer.status);
        snprintf(metric, sizeof(metric), "hop.cuda.%s.graph_layer_%urows_us", way, rows[i]);
        snprintf(
            what, sizeof(what),
            "a layer of a captured graph of %d, %u rows of %d BF16, echo (times: a replay / %d)",
            LAYERS, rows[i], WIDTH, LAYERS);
        row_both(metric, answer, hop_floor.p50_us, what);
    }
}

/* `over`: also over the floor, by DESIGN's definition. */
static void measure_trips(agent_t *client, const char *way, uint32_t thousands, bool over)
{
    char metric[80];
    answer_t all = {.status = XP_OK};
    for (uint32_t left = thousands; left; left -= left < 250 ? left : 250) {
        answer_t answer = ask(
            client, (order_t){ORDER_TRIPS, 0, 0, 1, (left < 250 ? left : 250) * 1000}, -1, NULL);
        CHECK_OK(answer.status);
        answer.done += all.done;
        answer.wrong += all.wrong;
        all = answer;
    }
    snprintf(metric, sizeof(metric), "hop.cuda.%s.round_trip_us", way);
    row(metric, all, all.times.p50_us, "us", hop_floor.p50_us, NULL,
        "whole layer in one kernel, 1 row of 2048, every element checked");
    if (over)
        hop_rows(way, &all, &hop_floor, "the raw put of 4096 bytes and a word between two GPUs");
}

/* The floors, and what the echo of a row takes: by FfnAgents that keep notes, which costs them a
 * look at the clock, so apart from the round trips. */
static void measure_floors_and_compute(void)
{
    if (hop_floor.compute_us >= 0)
        return;
    const uint32_t variant = variant_now;
    variant_now = VARIANT_NOTES;
    scene_up(SCENE_ONE, false);
    agent_t client = client_up(INSTANCE_A);
    if (hop_floor.p50_us < 0)
        measure_floors(&client);
    answer_t before = ask(&ffns[0], order_of(ORDER_COUNTERS, 0, 0), -1, NULL);
    CHECK_OK(before.status);
    answer_t trips = ask(&client, (order_t){ORDER_TRIPS, 0, 0, 1, 20000}, -1, NULL);
    CHECK_OK(trips.status);
    answer_t after = ask(&ffns[0], order_of(ORDER_COUNTERS, 0, 0), -1, NULL);
    CHECK_OK(after.status);
    hop_floor.compute_us = hop_compute_us(&before, &after);
    row("hop.cuda.echo_row_us", trips, hop_floor.compute_us, "us", -1, NULL,
        "what stands for the execution in round trips: mean of the echo of 1 row of 2048 BF16; "
        "round trips with notes");
    client_down(&client, INSTANCE_A);
    scene_down();
    variant_now = variant;
}

static void part_probe(void)
{
    scene_up(SCENE_ONE, false);
    for (int under_mps = 0; under_mps < 2; under_mps++) {
        agent_t probe;
        int fd;
        if (under_mps && !mps_pipe)
            break;
        if (!under_mps)
            unsetenv("CUDA_MPS_PIPE_DIRECTORY");
        setenv("CUDA_VISIBLE_DEVICES", "0", 1);
        agent_spawn("probe", life_fd, 0, 0, &probe);
        setenv("CUDA_VISIBLE_DEVICES", "0,1", 1);
        if (mps_pipe)
            setenv("CUDA_MPS_PIPE_DIRECTORY", mps_pipe, 1);
        must(&ffns[0], order_of(ORDER_EXPORT, INSTANCE_A, 0), -1, &fd);
        answer_t answer = ask(&probe, order_of(ORDER_OPEN, 0, 0), fd, NULL);
        close(fd);
        printf("memory of cuda:1 in a process that sees cuda:0 only%s: %s\n",
               under_mps ? ", under MPS" : "",
               answer.status == XP_OK ? "can be mapped" : answer.text);
        agent_ended(&probe);
    }
    scene_down();
}

static void part_direct(uint32_t thousands)
{
    measure_floors_and_compute();
    scene_up(SCENE_ONE, false);
    agent_t client = client_up(INSTANCE_A);
    measure_trips(&client, "direct", thousands, true);
    measure_rows(&client, "direct");
    agent_t bulk = client_up(INSTANCE_BULK);
    answer_t answer = ask(&bulk, (order_t){ORDER_BULK, 0, 0, 0, 30}, -1, NULL);
    CHECK_OK(answer.status);
    double bytes = (double)BULK_ROWS * WIDTH * 2, put = bytes / (double)answer.values[0],
           copy = bytes / (double)answer.values[1];
    char note[200];
    snprintf(
        note, sizeof(note),
        "put of 8192 x 2048 BF16: %.1f us, %.0f GB/s; peer copy in the same run %.0f GB/s; the "
        "whole layer with the echo of one block %.0f us",
        (double)answer.values[0] / 1e3, put, copy, (double)answer.values[2] / 1e3);
    kit_row("hop.cuda.peer_copy_gbs", copy, "GB/s", -1, NULL,
            "copy engine, 8192 x 2048 BF16, from GPU to GPU");
    kit_row("hop.cuda.direct.bulk_gbs", put, "GB/s", copy, NULL, note);
    CHECK(answer.wrong == 0);
    client_down(&bulk, INSTANCE_BULK);
    client_down(&client, INSTANCE_A);
    scene_down();
}

/* Where the time of a round trip goes. */
static void measure_split(agent_t *client, const char *way, const char *between, uint32_t rows)
{
    const uint32_t count = 20000;
    answer_t before = ask(&ffns[0], order_of(ORDER_COUNTERS, 0, 0), -1, NULL);
    CHECK_OK(before.status);
    answer_t trips = ask(client, (order_t){ORDER_TRIPS, 0, 1, rows, count}, -1, NULL);
    CHECK_OK(trips.status);
    answer_t after = ask(&ffns[0], order_of(ORDER_COUNTERS, 0, 0), -1, NULL);
    CHECK_OK(after.status);
    hop_split_rows(way, between, &before, &trips, &after, rows, &hop_floor);
}

static void part_split(void)
{
    static const uint32_t rows[] = {1, 4, 16};
    variant_now = VARIANT_NOTES;
    scene_up(SCENE_ONE, false);
    agent_t client = client_up(INSTANCE_A);
    if (hop_floor.p50_us < 0)
        measure_floors(&client);
    for (int i = 0; i < 3; i++)
        measure_split(&client, "direct", "", rows[i]);
    client_down(&client, INSTANCE_A);
    scene_down();
    /* The choices that are defaults, against what they replaced. */
    variant_now = VARIANT_HELPERS | VARIANT_SMALL_CALLS;
    scene_up(SCENE_ONE, false);
    client = client_up(INSTANCE_A);
    measure_trips(&client, "direct_by_helpers", 20, false);
    measure_rows(&client, "direct_by_helpers_small_calls");
    client_down(&client, INSTANCE_A);
    scene_down();
    variant_now = 0;
}

static void part_partials(uint32_t thousands)
{
    scene_up(SCENE_TWO, false);
    agent_t direct = client_up(0), complete = client_up(1);
    measure_trips(&direct, "direct_partial_2", thousands, false);
    measure_rows(&direct, "direct_partial_2");
    measure_trips(&complete, "complete_2", thousands / 4 + 1, false);
    measure_rows(&complete, "complete_2");
    client_down(&direct, 0);
    client_down(&complete, 1);
    scene_down();
}

/* One shape: all its ranks at once, every element of every rank checked. */
static void measure_shape(uint32_t instance, const char *name)
{
    static const uint32_t rows[] = {1, 4, 64, 512};
    const uint32_t ranks = fabric_plan_ranks(&plan.instances[instance]);
    agent_t clients[FABRIC_MAX_RANKS];
    ranks_up(instance, clients);
    for (int i = 0; i < 4; i++) {
        char metric[96], what[200];
        answer_t slowest = {.status = XP_OK};
        uint64_t wrong = 0, done = 0;
        for (uint32_t rank = 0; rank < ranks; rank++) {
            const order_t order = {ORDER_GRAPH, 0, 0, rows[i], rows[i] < 64 ? 100 : 20};
            CHECK(kit_send(clients[rank].socket, &order, sizeof(order), -1));
        }
        for (uint32_t rank = 0; rank < ranks; rank++) {
            answer_t answer;
            CHECK(kit_receive(clients[rank].socket, &answer, sizeof(answer), NULL));
            if (answer.status != XP_OK)
                fprintf(stderr, "%s, rank %u: %s\n", name, rank, answer.text);
            CHECK_OK(answer.status);
            wrong += answer.wrong;
            done += answer.done;
            if (rank == 0 || answer.times.p50_us > slowest.times.p50_us)
                slowest = answer;
        }
        slowest.wrong = wrong;
        slowest.done = done;
        snprintf(metric, sizeof(metric), "hop.cuda.%s.%s.graph_layer_%urows_us",
                 by_relay ? "relay" : "direct", name, rows[i]);
        snprintf(what, sizeof(what),
                 "a layer of a captured graph of %d, %u rows of %d BF16 a rank (of the second one "
                 "of attention DP one less), echo, %u ranks (times: a replay / %d, the slowest's)",
                 LAYERS, rows[i], WIDTH, ranks, LAYERS);
        row_both(metric, slowest, hop_floor.p50_us, what);
    }
    ranks_down(instance, clients);
}

static void part_shapes(void)
{
    static const char *const fan_in[] = {"fan_in.single_dp2", "fan_in.replicated_tp2"};
    static const char *const mesh[] = {"mesh.direct_partial", "mesh.single_dp2",
                                       "mesh.replicated_tp2", "mesh.single",
                                       "mesh.direct_partial_tp2"};
    for (uint32_t relayed = 0; relayed < 2; relayed++)
        for (uint32_t scene = SCENE_MESH; scene <= SCENE_FAN_IN; scene++) {
            scene_up(scene, relayed);
            for (uint32_t i = 0; i < plan.instance_count; i++)
                measure_shape(i, (scene == SCENE_MESH ? mesh : fan_in)[i]);
            scene_down();
        }
}

static void part_relay(uint32_t thousands)
{
    enum { BULKS = 30, WARM = 3 };
    measure_floors_and_compute();
    scene_up(SCENE_ONE, true);
    agent_t client = client_up(INSTANCE_A);
    measure_trips(&client, "relay", thousands / 4 + 1, true);
    measure_rows(&client, "relay");
    client_down(&client, INSTANCE_A);
    agent_t bulk = client_up(INSTANCE_BULK);
    answer_t before = ask(&ffns[0], order_of(ORDER_COUNTERS, 0, 0), -1, NULL);
    answer_t answer = ask(&bulk, (order_t){ORDER_BULK, 0, 0, 0, BULKS}, -1, NULL);
    CHECK_OK(answer.status);
    answer_t after = ask(&ffns[0], order_of(ORDER_COUNTERS, 0, 0), -1, NULL);
    hop_bulk_row("relay", &answer,
                 (double)(after.values[3] - before.values[3]) / (BULKS + WARM) / 1e3);
    client_down(&bulk, INSTANCE_BULK);
    scene_down();
    variant_now = VARIANT_NOTES;
    scene_up(SCENE_ONE, true);
    client = client_up(INSTANCE_A);
    for (uint32_t rows = 1; rows <= 16; rows *= 4)
        measure_split(&client, "relay", HOP_RELAYED, rows);
    client_down(&client, INSTANCE_A);
    scene_down();
    variant_now = 0;
}

static void loop(agent_t *client)
{
    must(client, order_of(ORDER_LOOP, 0, 0), -1, NULL); /* answers when it begins, and once more */
}
static answer_t loop_end(agent_t *client, uint32_t what, uint32_t reason)
{
    return ask(client, order_of(what, 0, reason), -1, NULL);
}
static void nap_ms(uint32_t ms)
{
    usleep(ms * 1000);
}

static void part_kill(void)
{
    uint64_t wrong = 0, detach_ns = 0;
    scene_up(SCENE_ONE, false);
    agent_t other = client_up(INSTANCE_B);
    loop(&other);
    for (uint32_t n = 0; n < 10; n++) {
        agent_t victim = client_up(INSTANCE_A);
        loop(&victim);
        nap_ms(20 + kit_value(n, 7) % 50);
        agent_kill(&victim);
        uint64_t start_ns = xp_monotonic_ns();
        detach(INSTANCE_A);
        uint64_t took = xp_monotonic_ns() - start_ns;
        detach_ns = took > detach_ns ? took : detach_ns;
    }
    answer_t answer = loop_end(&other, ORDER_LOOP_END, 0);
    CHECK_OK(answer.status);
    wrong += answer.wrong;
    CHECK(answer.done > 0);
    printf("10 Instances killed; the other did %llu layers, %llu wrong; longest detach %.1f ms\n",
           (unsigned long long)answer.done, (unsigned long long)answer.wrong,
           (double)detach_ns / 1e6);

    /* The FfnAgent dies: who holds the arena closes it, and the wait ends. */
    loop(&other);
    nap_ms(50);
    agent_kill(&ffns[0]);
    uint64_t start_ns = xp_monotonic_ns();
    answer = loop_end(&other, ORDER_CLOSE, XP_FATAL);
    double took_ms = (double)(xp_monotonic_ns() - start_ns) / 1e6;
    CHECK(answer.status == XP_FATAL);
    CHECK(took_ms < 1000);
    agent_kill(&other);
    kit_row("stage.cuda.ffn_kill_ms", took_ms, "ms", -1, "< 1000",
            "from the close of the arena to the end of the Instance's wait after SIGKILL of the "
            "FfnAgent");

    /* And all of it works again on the same GPUs. */
    scene_up(SCENE_ONE, false);
    other = client_up(INSTANCE_B);
    answer = ask(&other, (order_t){ORDER_TRIPS, 0, 0, 16, 1000}, -1, NULL);
    CHECK_OK(answer.status);
    wrong += answer.wrong;
    client_down(&other, INSTANCE_B);
    scene_down();
    kit_row("stage.cuda.kill_wrong", (double)wrong, "elements", -1, "0",
            "SIGKILL of 10 Instances and an FfnAgent, then a fresh start");
    CHECK(wrong == 0);
}

int main(int argc, char **argv)
{
    stage_roles_main(argc, argv);
    const uint32_t thousands = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 20;
    const char *parts = argc > 2 ? argv[2] : "probe,direct,split,partials,relay,kill";
    setvbuf(stdout, NULL, _IOLBF, 0);
    setenv("CUDA_MODULE_LOADING", "EAGER", 1);
    setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID", 1);
    if (!stage_roles_usable()) {
        printf("skipped: built without nvcc\n");
        return KIT_SKIP;
    }
    /* A look by a child: the parent stays without a context. */
    pid_t child = fork();
    if (child == 0) {
        const cuda_driver_t *driver;
        cuda_device_info_t infos[2];
        uint32_t count = 0;
        _exit(cuda_driver_load(&driver) != XP_OK ||
              cuda_devices_list(driver, infos, 2, &count) != XP_OK || count < 2);
    }
    int status;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
        printf("skipped: there are no two GPUs\n");
        return KIT_SKIP;
    }
    setenv("CUDA_VISIBLE_DEVICES", "0,1", 1);
    mps_options_t options = {.name = "cuda-0", .devices = "0,1"};
    mps_t *mps = NULL;
    if (mps_start(&options, &mps) == XP_OK) {
        mps_pipe = mps_pipe_folder(mps);
        setenv("CUDA_MPS_PIPE_DIRECTORY", mps_pipe, 1);
        setenv("CUDA_MPS_LOG_DIRECTORY", mps_log_folder(mps), 1);
    } else {
        printf("without MPS: %s\n", xp_error_last()->text);
    }
    CHECK_OK(transport_life_make(&life_fd));
    if (strstr(parts, "probe"))
        part_probe();
    if (strstr(parts, "direct"))
        part_direct(thousands);
    if (strstr(parts, "split"))
        part_split();
    if (strstr(parts, "partials"))
        part_partials(thousands);
    if (argc < 3 || strstr(parts, "shapes"))
        part_shapes();
    if (strstr(parts, "relay"))
        part_relay(thousands);
    if (strstr(parts, "kill"))
        part_kill();
    agent_mps_end(mps);
    printf("stage_device: all parts passed (%s)\n", parts);
    return 0;
}
