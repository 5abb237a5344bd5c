/* SPDX-License-Identifier: MIT */
/*
 * The CUDA Transport between one Instance and one AtnAgent (a process of its own) on one device.
 * Rows and widths of all kinds, eager and captured, refusals, limits, close, life words,
 * misbehaving peers, attach and detach.
 */
#include <string.h>
#include <unistd.h>

#include "agent.h"

#define LIFE_CLIENT 3
#define LIFE_SERVER 4
#define LAYERS      48
#define LIMIT_S     20.0

static kit_t kit;
static int life_fd;
static transport_cuda_life_t life;
static agent_t agent;

typedef struct pair {
    transport_geometry_t geometry;
    transport_cuda_client_t *client;
    uint32_t slot;
    cuda_address_t in, out;
} pair_t;

static void pair_make_limit(pair_t *pair, uint32_t hidden, uint32_t max_rows, uint64_t limit_ns)
{
    int fd;
    memset(pair, 0, sizeof(*pair));
    pair->geometry = (transport_geometry_t){
        .hidden = hidden, .max_rows = max_rows, .dtype = XP_DTYPE_BF16, .dp_size = 1};
    CHECK_OK(transport_cuda_client_create(&kit.device, &pair->geometry, &life, limit_ns, 0,
                                          &pair->client));
    CHECK_OK(transport_cuda_client_export(pair->client, &fd));
    CHECK_OK(agent_attach(&agent, fd, &pair->geometry, LIFE_CLIENT, &pair->slot));
    close(fd);
    pair->in = kit_alloc(&kit, (uint64_t)max_rows * hidden * 2 + 16);
    pair->out = kit_alloc(&kit, (uint64_t)max_rows * hidden * 2 + 16);
}

static void pair_make(pair_t *pair, uint32_t hidden, uint32_t max_rows)
{
    pair_make_limit(pair, hidden, max_rows, 10 * XP_NS_PER_S);
}

static void pair_free(pair_t *pair)
{
    CHECK_OK(agent_detach(&agent, pair->slot));
    transport_cuda_client_destroy(pair->client);
    kit_free(&kit, pair->in);
    kit_free(&kit, pair->out);
}

static void stream_idle(void)
{
    xp_clock_t clock = xp_clock_system();
    CHECK_OK(cuda_stream_wait(&kit.device, kit.stream, &clock, kit_in(LIMIT_S)));
}

static void set_live(pair_t *pair, uint32_t rows)
{
    transport_live_t record = {.rows = rows};
    CHECK_OK(transport_cuda_client_live_write(pair->client, &record, kit.stream));
}

/* One call of `captured` rows with `live` of them, whole or as three launches; checks every element
 * of the output. */
static void check_one(pair_t *pair, uint32_t layer, uint32_t captured, uint32_t live,
                      uint32_t off_elements, bool apart)
{
    const uint32_t hidden = pair->geometry.hidden;
    const uint64_t count = (uint64_t)captured * hidden;
    uint16_t *values = malloc(count * 2 + 2);
    CHECK(values);
    for (uint64_t i = 0; i < count; i++)
        values[i] = kit_value(layer * 131 + captured, i);
    kit_write(&kit, pair->in + off_elements * 2, values, count * 2);
    memset(values, 0x5a, count * 2);
    kit_write(&kit, pair->out + off_elements * 2, values, count * 2);
    set_live(pair, live);
    transport_tensor_t in = kit_tensor(pair->in + off_elements * 2, captured, hidden);
    transport_tensor_t out = kit_tensor(pair->out + off_elements * 2, captured, hidden);
    if (apart) {
        CHECK_OK(transport_cuda_client_put(pair->client, layer, 0, &in, kit.stream));
        CHECK_OK(transport_cuda_client_wait(pair->client, kit.stream));
        CHECK_OK(transport_cuda_client_take(pair->client, &out, kit.stream));
    } else {
        CHECK_OK(transport_cuda_client_call(pair->client, layer, 0, &in, &out, kit.stream));
    }
    stream_idle();
    CHECK_OK(transport_cuda_client_finish(pair->client, kit_in(LIMIT_S)));
    kit_read(&kit, pair->out + off_elements * 2, values, count * 2);
    const uint64_t answered = (uint64_t)(live < captured ? live : captured) * hidden;
    for (uint64_t i = 0; i < count; i++) {
        uint16_t wanted = i < answered
                              ? (uint16_t)(kit_value(layer * 131 + captured, i) + layer + 1)
                              : 0x5a5a; /* rows past the live ones are nobody's */
        if (values[i] != wanted) {
            fprintf(stderr, "hidden %u captured %u live %u: element %llu is %u, not %u\n", hidden,
                    captured, live, (unsigned long long)i, values[i], wanted);
            exit(1);
        }
    }
    free(values);
}

static void check_call(pair_t *pair, uint32_t layer, uint32_t captured, uint32_t live,
                       uint32_t off_elements)
{
    check_one(pair, layer, captured, live, off_elements, false);
    check_one(pair, layer, captured, live, off_elements, true);
}

static void test_shapes(void)
{
    const uint32_t widths[] = {8, 1001, 2048, 5120};
    for (uint32_t w = 0; w < 4; w++) {
        pair_t pair;
        pair_make(&pair, widths[w], 600);
        const uint32_t rows[] = {1, 2, 3, 7, 16, 100, 600};
        uint32_t layer = 0;
        for (uint32_t r = 0; r < 7; r++) {
            check_call(&pair, layer++, rows[r], rows[r], 0);
            check_call(&pair, layer++, rows[r], 0, 0);
            check_call(&pair, layer++, rows[r], rows[r] / 2, 0);
            check_call(&pair, layer++, rows[r], 600, 0);
        }
        check_call(&pair, 999, 5, 5, 1); /* off the 16-byte grid */
        transport_cuda_report_t report;
        CHECK_OK(agent_report(&agent, pair.slot, &report));
        CHECK(report.requests == 58 && report.now == TRANSPORT_SLOT_ATTACHED);
        pair_free(&pair);
    }
}

static void test_checks(void)
{
    pair_t pair;
    pair_make(&pair, 64, 8);
    transport_tensor_t good = kit_tensor(pair.in, 2, 64), bad;
#define REFUSED(change)                                                                            \
    do {                                                                                           \
        bad = good;                                                                                \
        bad.change;                                                                                \
        CHECK(transport_cuda_client_call(pair.client, 0, 0, &bad, &good, kit.stream) ==            \
              XP_INVALID);                                                                         \
        CHECK(transport_cuda_client_call(pair.client, 0, 0, &good, &bad, kit.stream) ==            \
              XP_INVALID);                                                                         \
    } while (0)
    REFUSED(dtype = XP_DTYPE_F16);
    REFUSED(rank = 3);
    REFUSED(width = 63);
    REFUSED(rows = 9);
    REFUSED(row_stride = 128);
    REFUSED(data = NULL);
#undef REFUSED
    CHECK(transport_cuda_client_put(pair.client, MAILBOX_LAYER_LIMIT, 0, &good, kit.stream) ==
          XP_INVALID);
    stream_idle();
    transport_device_state_t state;
    CHECK_OK(transport_cuda_client_state(pair.client, kit_in(LIMIT_S), &state));
    CHECK(state.sequence == 0 && state.status == XP_OK); /* nothing was published */
    check_call(&pair, 5, 8, 8, 0);

    /* A descriptor that is no arena, and one of another geometry. */
    int fd;
    uint32_t slot;
    transport_geometry_t other = pair.geometry;
    other.hidden = 128;
    CHECK_OK(transport_cuda_client_export(pair.client, &fd));
    CHECK(agent_attach(&agent, fd, &other, LIFE_CLIENT, &slot) == XP_PEER);
    close(fd);
    pair_free(&pair);
}

static void test_refusal(void)
{
    pair_t pair;
    pair_make(&pair, 64, 8);
    transport_tensor_t in = kit_tensor(pair.in, 2, 64), out = kit_tensor(pair.out, 2, 64);
    uint16_t values[128];
    set_live(&pair, 2);
    CHECK_OK(transport_cuda_client_call(pair.client, 1000, 0, &in, &out, kit.stream));
    /* The rest of the pass returns at once and publishes nothing. */
    CHECK_OK(transport_cuda_client_call(pair.client, 1, 0, &in, &out, kit.stream));
    stream_idle();
    CHECK(transport_cuda_client_finish(pair.client, kit_in(LIMIT_S)) == XP_INVALID);
    kit_read(&kit, pair.out, values, sizeof(values));
    for (int i = 0; i < 128; i++)
        CHECK(values[i] == 0xffff);
    transport_device_state_t state;
    CHECK_OK(transport_cuda_client_state(pair.client, kit_in(LIMIT_S), &state));
    CHECK(state.sequence == 1);
    check_call(&pair, 2, 8, 8, 0); /* and the next pass is served */
    /* Take and wait without a put are the caller's mistake, and say so. */
    CHECK_OK(transport_cuda_client_take(pair.client, &out, kit.stream));
    stream_idle();
    CHECK(transport_cuda_client_finish(pair.client, kit_in(LIMIT_S)) == XP_INVALID);
    check_call(&pair, 3, 8, 8, 0);
    pair_free(&pair);
}

static cuda_graph_exec_t capture_layers(pair_t *pair, uint32_t captured, uint32_t compute_ns)
{
    cuda_graph_exec_t graph;
    CHECK_OK(cuda_capture_begin(&kit.device, kit.stream));
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        cuda_address_t from = layer % 2 ? pair->out : pair->in,
                       to = layer % 2 ? pair->in : pair->out;
        transport_tensor_t in = kit_tensor(from, captured, pair->geometry.hidden);
        transport_tensor_t out = kit_tensor(to, captured, pair->geometry.hidden);
        void *parameters[] = {&compute_ns};
        if (compute_ns)
            CHECK_OK(
                cuda_launch(&kit.device, kit.kernels[KIT_COMPUTE], 1, 1, kit.stream, parameters));
        CHECK_OK(transport_cuda_client_call(pair->client, layer, 0, &in, &out, kit.stream));
    }
    CHECK_OK(cuda_capture_end(&kit.device, kit.stream, &graph));
    return graph;
}

static void test_graph(void)
{
    enum { HIDDEN = 2048, CAPTURED = 16 };
    pair_t pair;
    pair_make(&pair, HIDDEN, CAPTURED);
    cuda_graph_exec_t graph = capture_layers(&pair, CAPTURED, 0);
    static uint16_t values[CAPTURED * HIDDEN];
    for (uint32_t replay = 0; replay < 60; replay++) {
        const uint32_t live = replay % (CAPTURED + 1);
        for (uint32_t i = 0; i < CAPTURED * HIDDEN; i++)
            values[i] = kit_value(replay, i);
        kit_write(&kit, pair.in, values, sizeof(values));
        set_live(&pair, live);
        CHECK_OK(cuda_graph_launch(&kit.device, graph, kit.stream));
        stream_idle();
        CHECK_OK(transport_cuda_client_finish(pair.client, kit_in(LIMIT_S)));
        kit_read(&kit, pair.in, values, sizeof(values)); /* an even number of layers ends there */
        for (uint32_t i = 0; i < live * HIDDEN; i++)
            CHECK(values[i] == (uint16_t)(kit_value(replay, i) + LAYERS * (LAYERS + 1) / 2));
    }
    /* A process's end in the middle of a graph: the wait and the rest of the graph return at once.
     */
    uint64_t worst_ns = 0;
    for (uint32_t round = 0; round < 20; round++) {
        agent_hold(&agent, 1u << pair.slot);
        CHECK_OK(cuda_graph_launch(&kit.device, graph, kit.stream));
        usleep(1000 + 100 * round);
        CHECK(CUDA_CALL(kit.device.driver, cuStreamQuery, kit.stream) == XP_RETRY);
        uint64_t start_ns = xp_monotonic_ns();
        life_word_end(&life.page->word[LIFE_CLIENT]);
        while (CUDA_CALL(kit.device.driver, cuStreamQuery, kit.stream) == XP_RETRY)
            CHECK(xp_monotonic_ns() - start_ns < XP_NS_PER_S);
        uint64_t took_ns = xp_monotonic_ns() - start_ns;
        worst_ns = took_ns > worst_ns ? took_ns : worst_ns;
        CHECK(transport_cuda_client_finish(pair.client, kit_in(LIMIT_S)) == XP_CANCELLED);
        /* The warp has seen it too and dropped the arena. */
        transport_cuda_report_t report;
        do {
            CHECK_OK(agent_report(&agent, pair.slot, &report));
        } while (report.now == TRANSPORT_SLOT_ATTACHED &&
                 xp_monotonic_ns() - start_ns < XP_NS_PER_S);
        CHECK(report.now == TRANSPORT_SLOT_DROPPED && report.reason == XP_CANCELLED);
        agent_hold(&agent, 0);
        CHECK(transport_cuda_client_call(pair.client, 0, 0, NULL, NULL, kit.stream) == XP_INVALID);
        pair_free(&pair);
        cuda_graph_destroy(&kit.device, graph);
        transport_life_renew(life.page, LIFE_CLIENT);
        pair_make(&pair, HIDDEN, CAPTURED);
        graph = capture_layers(&pair, CAPTURED, 0);
    }
    char note[160];
    snprintf(
        note, sizeof(note),
        "life word set to stream idle, worst of 20, waiting inside a captured graph of %d layers",
        LAYERS);
    kit_row("transport.cuda.life_drain_us", (double)worst_ns / 1e3, "us", -1, "<= 5000", note);
    cuda_graph_destroy(&kit.device, graph);
    pair_free(&pair);
}

static void test_ends(void)
{
    pair_t pair;
    /* The limit. */
    pair_make_limit(&pair, 64, 8, 30 * XP_NS_PER_MS);
    transport_tensor_t in = kit_tensor(pair.in, 2, 64), out = kit_tensor(pair.out, 2, 64);
    set_live(&pair, 2);
    agent_hold(&agent, 1u << pair.slot);
    uint64_t start_ns = xp_monotonic_ns();
    CHECK_OK(transport_cuda_client_call(pair.client, 0, 0, &in, &out, kit.stream));
    stream_idle();
    uint64_t took_ns = xp_monotonic_ns() - start_ns;
    CHECK(took_ns >= 30 * XP_NS_PER_MS && took_ns < 60 * XP_NS_PER_MS);
    CHECK(transport_cuda_client_finish(pair.client, kit_in(LIMIT_S)) == XP_TIMEOUT);
    CHECK(transport_cuda_client_call(pair.client, 0, 0, &in, &out, kit.stream) == XP_TIMEOUT);
    agent_hold(&agent, 0);
    pair_free(&pair);
    /* Closed by the AtnAgent while the Instance waits. */
    pair_make(&pair, 64, 8);
    in = kit_tensor(pair.in, 2, 64), out = kit_tensor(pair.out, 2, 64);
    set_live(&pair, 2);
    agent_hold(&agent, 1u << pair.slot);
    CHECK_OK(transport_cuda_client_call(pair.client, 0, 0, &in, &out, kit.stream));
    usleep(2000);
    CHECK(CUDA_CALL(kit.device.driver, cuStreamQuery, kit.stream) == XP_RETRY);
    CHECK_OK(agent_close(&agent, pair.slot, XP_FATAL));
    stream_idle();
    CHECK(transport_cuda_client_finish(pair.client, kit_in(LIMIT_S)) == XP_FATAL);
    agent_hold(&agent, 0);
    pair_free(&pair);
    /* Closed by the Instance: the warp drops the arena. */
    pair_make(&pair, 64, 8);
    CHECK_OK(transport_cuda_client_close(pair.client, XP_CLOSED));
    transport_cuda_report_t report;
    uint64_t deadline_ns = kit_in(1);
    do {
        CHECK_OK(agent_report(&agent, pair.slot, &report));
    } while (report.now == TRANSPORT_SLOT_ATTACHED && xp_monotonic_ns() < deadline_ns);
    CHECK(report.now == TRANSPORT_SLOT_DROPPED && report.reason == XP_CLOSED);
    pair_free(&pair);
}

/* A record that does not fit, and a sequence that does not follow: only that arena goes. */
static void test_nonsense(void)
{
    for (uint32_t kind = 0; kind < 2; kind++) {
        pair_t pair, other;
        pair_make(&pair, 64, 8);
        pair_make(&other, 64, 8);
        transport_tensor_t in = kit_tensor(pair.in, 2, 64), out = kit_tensor(pair.out, 2, 64);
        /* The arena as a peer would map it. */
        int fd;
        cuda_block_t arena;
        CHECK_OK(transport_cuda_client_export(pair.client, &fd));
        CHECK_OK(cuda_block_import(
            &kit.device, fd, transport_cuda_arena_bytes(&kit.device, &pair.geometry), &arena));
        close(fd);
        cuda_address_t state = transport_cuda_client_live(pair.client) - 256;
        uint32_t rows = kind ? 1 : 9, skip = kind ? 5 : 0;
        void *parameters[] = {&arena.address, &state, &rows, &skip};
        CHECK_OK(cuda_launch(&kit.device, kit.kernels[KIT_NONSENSE], 1, 1, kit.stream, parameters));
        CHECK_OK(transport_cuda_client_wait(pair.client, kit.stream));
        stream_idle();
        CHECK(transport_cuda_client_finish(pair.client, kit_in(LIMIT_S)) == XP_PEER);
        CHECK(transport_cuda_client_call(pair.client, 0, 0, &in, &out, kit.stream) == XP_PEER);
        check_call(&other, 7, 8, 8, 0);
        cuda_block_destroy(&arena);
        pair_free(&pair);
        pair_free(&other);
    }
}

/* The arena outlives the AtnAgent: the next one answers what is unanswered. */
static void test_next_agent(void)
{
    pair_t pair;
    pair_make(&pair, 64, 8);
    check_call(&pair, 1, 8, 8, 0);
    uint16_t values[512];
    for (int i = 0; i < 512; i++)
        values[i] = kit_value(77, (uint64_t)i);
    kit_write(&kit, pair.in, values, sizeof(values));
    transport_tensor_t in = kit_tensor(pair.in, 8, 64), out = kit_tensor(pair.out, 8, 64);
    set_live(&pair, 8);
    agent_hold(&agent, 1u << pair.slot);
    CHECK_OK(transport_cuda_client_call(pair.client, 9, 0, &in, &out, kit.stream));
    usleep(2000);
    agent_stop(&agent);
    agent_start(life_fd, LIFE_SERVER + 1, 4, &agent);
    int fd;
    CHECK_OK(transport_cuda_client_export(pair.client, &fd));
    CHECK_OK(agent_attach(&agent, fd, &pair.geometry, LIFE_CLIENT, &pair.slot));
    close(fd);
    stream_idle();
    CHECK_OK(transport_cuda_client_finish(pair.client, kit_in(LIMIT_S)));
    kit_read(&kit, pair.out, values, sizeof(values));
    for (int i = 0; i < 512; i++)
        CHECK(values[i] == (uint16_t)(kit_value(77, (uint64_t)i) + 10));
    pair_free(&pair);
}

int main(int argc, char **argv)
{
    agent_main(argc, argv);
    setvbuf(stdout, NULL, _IOLBF, 0);
    mps_t *mps = agent_mps_begin();
    kit_open(&kit, 8 << 20);
    CHECK_OK(transport_life_make(&life_fd));
    CHECK_OK(transport_cuda_life_open(&kit.device, life_fd, LIFE_CLIENT, &life));
    agent_start(life_fd, LIFE_SERVER, 4, &agent);
    printf("device %s, capability %d, MPS %d\n", kit.device.info.name, kit.device.info.capability,
           kit.device.info.mps);
    const struct {
        const char *name;
        void (*run)(void);
    } tests[] = {{"shapes", test_shapes}, {"checks", test_checks}, {"refusal", test_refusal},
                 {"graph", test_graph},   {"ends", test_ends},     {"nonsense", test_nonsense}};
    for (uint32_t i = 0; i < sizeof(tests) / sizeof(tests[0]); i++) {
        uint64_t start_ns = xp_monotonic_ns();
        tests[i].run();
        printf("ok %s (%.2f s)\n", tests[i].name, (double)(xp_monotonic_ns() - start_ns) / 1e9);
    }
    test_next_agent();
    printf("ok next_agent\n");
    printf("ok own_end (%.0f us)\n", (double)agent_own_end(&agent) / 1e3);
    transport_cuda_life_close(&life);
    close(life_fd);
    kit_close(&kit);
    agent_mps_end(mps);
    printf("ok all\n");
    return 0;
}
