/* SPDX-License-Identifier: MIT */
/*
 * Elastic KV on one GPU: what a grant of 1 GiB takes from demand to usable memory, what it takes
 * from the donor, what others on the GPU notice of it, that the memory really moves, that nothing
 * old is ever seen, and that captured graphs stay right. Prints one JSON row a line.
 *
 * Processes: two Instance Ranks with libxpool's own ranges (xpool_kv_*), one that watches the
 * device's memory, an Instance and an AtnAgent that exchange mailbox rows; all under MPS. This one
 * has the daemon's market on a thread and touches no device.
 *
 *   cuda_kv_bench [ROUNDS [GRANT_MIB]]
 *
 * Over the fake driver (LD_LIBRARY_PATH=BUILD/tests/fake-cuda cuda_kv_bench 3 64) kernels compute
 * nothing: what they would say, and the hops, are left out.
 */
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "base/memfd.h"
#include "client.h"
#include "cuda/stream.h"
#include "cuda/vmm.h"
#include "kv/backing.h"
#include "kv/market.h"
#include "library/private.h"

CUDA_IMAGE_DECLARE(benches_kv_bench);

#define BUNDLES       32 /* of a grant */
#define BUNDLE_TOKENS 256
#define FLOOR         2
#define ROUNDS_MAX    64
#define SLOTS         64 /* read by the captured graph */
#define STEP_LIMIT_NS (5 * XP_NS_PER_S)
#define HOP_TRIPS     200000u
#define BLOCKS        264
#define THREADS       256

enum { KV_FILL = 0, KV_WRONG, KV_GATHER, KV_KERNELS };
enum {
    DO_DEMAND = 1,
    DO_IDLE,
    DO_SHRUNK,
    DO_CAPTURE,
    DO_REPLAY,
    DO_FLOOR,
    DO_LEAVE_PATTERN,
    DO_RAW,
    DO_FREE,
    DO_AWAIT_FREE,
    DO_CLEARING,
    DO_QUIT
};

/* Ways of clearing a grant, and what they are called in rows. */
static const struct {
    const char *name;
    kv_clearing_t way;
} clearings[] = {
    {"memset", {0, 0, 0}},
    {"memset_4mib", {0, 0, 4}},
    {"blocks_8", {8, 0, 0}},
    {"blocks_16", {16, 0, 0}},
    {"blocks_32", {32, 0, 0}},
    {"blocks_8_pieces", {8, 256, 0}},
    {"blocks_16_pieces", {16, 256, 0}},
};

typedef struct order {
    uint32_t what, check;
    uint64_t value;
} order_t;

/* What the driver's own calls take for the bytes of a grant, ms. */
typedef struct floors {
    double grow, clear, shrink, grow_whole, shrink_whole;
} floors_t;

typedef struct answer {
    uint64_t ns, map_ns, at_ns; /* of the demand; in xpool_kv_poll; when it ended */
    uint64_t wrong, words, bytes;
    floors_t floors;
} answer_t;

static double median(double *values, uint32_t count);

/* ---- an Instance Rank -------------------------------------------------------------------------
 */

typedef struct holder {
    kit_t kit;
    cuda_module_t module;
    cuda_function_t kernels[KV_KERNELS];
    xpool_kv_t *kv;
    xpool_kv_info_t info;
    int bell;
    uint32_t step;
    bool fake;
    uint64_t seed, token_words;
    uint64_t map_ns, shrink_ns; /* of the last command that moved memory */
    cuda_address_t count, slots, sums;
    cuda_graph_exec_t graph;
} holder_t;

static void holder_idle(holder_t *self)
{
    xp_clock_t clock = xp_clock_system();
    CHECK_OK(cuda_stream_wait(&self->kit.device, self->kit.stream, &clock, kit_in(10)));
}

static void holder_info(holder_t *self)
{
    self->info.struct_bytes = sizeof(self->info);
    CHECK(xpool_kv_info(self->kv, &self->info) == XPOOL_OK);
}

static uint64_t words_of(const holder_t *self, uint32_t tokens)
{
    return tokens * self->token_words;
}

static void fill_at(holder_t *self, cuda_address_t at, uint64_t words)
{
    void *parameters[] = {&at, &words, &self->seed};
    CHECK_OK(cuda_launch(&self->kit.device, self->kernels[KV_FILL], BLOCKS, THREADS,
                         self->kit.stream, parameters));
    holder_idle(self);
}

static uint64_t wrong_at(holder_t *self, cuda_address_t at, uint64_t first, uint64_t words,
                         uint32_t zero)
{
    uint64_t count = 0;
    void *parameters[] = {&at, &first, &words, &self->seed, &zero, &self->count};
    kit_write(&self->kit, self->count, &count, sizeof(count));
    CHECK_OK(cuda_launch(&self->kit.device, self->kernels[KV_WRONG], BLOCKS, THREADS,
                         self->kit.stream, parameters));
    holder_idle(self);
    kit_read(&self->kit, self->count, &count, sizeof(count));
    return count;
}

static cuda_address_t range_of(const holder_t *self)
{
    return (cuda_address_t)(uintptr_t)self->info.address;
}

/* Takes the commands that are there. */
static void holder_serve(holder_t *self)
{
    for (;;) {
        xpool_kv_command_t command = {.struct_bytes = sizeof(command)};
        const uint64_t begin_ns = xp_monotonic_ns();
        xpool_status_t status = xpool_kv_poll(self->kv, ++self->step, 1, &command);
        if (status == XPOOL_RETRY)
            return;
        CHECK(status == XPOOL_OK);
        const uint64_t polled_ns = xp_monotonic_ns();
        CHECK(xpool_kv_release_after(self->kv, command.tokens, self->kit.stream) == XPOOL_OK);
        if (command.order == XPOOL_KV_GROW)
            self->map_ns = polled_ns - begin_ns;
        else
            self->shrink_ns = xp_monotonic_ns() - begin_ns;
    }
}

static void holder_wait(holder_t *self, int socket, uint32_t limit_ms)
{
    struct pollfd files[2] = {{.fd = self->bell, .events = POLLIN},
                              {.fd = socket, .events = POLLIN}};
    poll(files, socket >= 0 ? 2 : 1, (int)limit_ms);
    holder_serve(self);
}

static void holder_report(holder_t *self, uint32_t demand, uint32_t tokens, uint32_t live,
                          uint64_t since_ns)
{
    xpool_kv_report_t report = {.struct_bytes = sizeof(report),
                                .demand = demand,
                                .demand_tokens = tokens,
                                .live_tokens = live,
                                .running = live > 1,
                                .waiting = demand != XPOOL_KV_NONE,
                                .demand_deadline_ns = UINT64_MAX,
                                .demand_since_ns = since_ns,
                                .last_activity_ns = since_ns,
                                .earliest_deadline_ns = UINT64_MAX};
    CHECK(xpool_kv_report(self->kv, &report) == XPOOL_OK);
}

/* From the demand until the memory may be used; then, with check, that it is all zeroes, that what
 * was there before is as it was, and a pattern into everything. */
static answer_t holder_demand(holder_t *self, const order_t *order)
{
    answer_t answer = {0};
    const uint32_t tokens = (uint32_t)order->value;
    holder_info(self);
    const uint32_t before = self->info.mapped_tokens;
    const uint64_t begin_ns = xp_monotonic_ns();
    holder_report(self, XPOOL_KV_PREFILL, tokens, 1, begin_ns);
    do {
        holder_wait(self, -1, 100);
        holder_info(self);
        CHECK(xp_monotonic_ns() - begin_ns < STEP_LIMIT_NS);
    } while (self->info.mapped_tokens < tokens);
    answer.at_ns = xp_monotonic_ns();
    answer.ns = answer.at_ns - begin_ns;
    answer.map_ns = self->map_ns;
    holder_report(self, XPOOL_KV_NONE, 0, tokens, answer.at_ns);
    if (order->check && !self->fake) {
        const uint64_t had = words_of(self, before), has = words_of(self, self->info.mapped_tokens);
        answer.wrong = wrong_at(self, range_of(self), had, has, 1);
        answer.wrong += wrong_at(self, range_of(self), 0, had, 0);
        answer.words = has;
        fill_at(self, range_of(self), has);
    }
    return answer;
}

static uint64_t host_pattern(uint64_t seed, uint64_t index)
{
    uint64_t x = (seed + 1) * 0x9e3779b97f4a7c15ull + index * 0xbf58476d1ce4e5b9ull;
    x ^= x >> 29;
    x *= 0x94d049bb133111ebull;
    return (x ^ x >> 32) | 1;
}

/* A graph that reads tokens of the range; the range's addresses are in it for good. */
static void holder_capture(holder_t *self)
{
    cuda_address_t range = range_of(self);
    void *parameters[] = {&range, &self->token_words, &self->slots, &self->sums};
    CHECK_OK(cuda_capture_begin(&self->kit.device, self->kit.stream));
    CHECK_OK(cuda_launch(&self->kit.device, self->kernels[KV_GATHER], SLOTS, THREADS,
                         self->kit.stream, parameters));
    CHECK_OK(cuda_capture_end(&self->kit.device, self->kit.stream, &self->graph));
}

/* Replays it with slots that have memory now; counts sums that are not what the pattern gives. */
static answer_t holder_replay(holder_t *self)
{
    uint32_t slots[SLOTS];
    uint64_t sums[SLOTS];
    answer_t answer = {.words = SLOTS};
    holder_info(self);
    for (uint32_t i = 0; i < SLOTS; i++)
        slots[i] = (uint32_t)(host_pattern(self->step + 99, i) % self->info.mapped_tokens);
    slots[0] = self->info.mapped_tokens - 1;
    kit_write(&self->kit, self->slots, slots, sizeof(slots));
    CHECK_OK(cuda_graph_launch(&self->kit.device, self->graph, self->kit.stream));
    holder_idle(self);
    kit_read(&self->kit, self->sums, sums, sizeof(sums));
    for (uint32_t i = 0; i < SLOTS && !self->fake; i++) {
        uint64_t expected = 0;
        for (uint64_t w = 0; w < self->token_words; w++)
            expected += host_pattern(self->seed, words_of(self, slots[i]) + w) * (2 * w + 1);
        answer.wrong += expected != sums[i];
    }
    return answer;
}

/* The driver's own calls for the bytes of a grant: so many handles, and one. */
static void floor_round(holder_t *self, cuda_address_t at, uint64_t bytes, uint32_t handles,
                        double *grow_ms, double *clear_ms, double *shrink_ms)
{
    cuda_memory_handle_t handle[BUNDLES];
    const cuda_device_t *device = &self->kit.device;
    const uint64_t each = bytes / handles, begin_ns = xp_monotonic_ns();
    for (uint32_t i = 0; i < handles; i++) {
        CHECK_OK(cuda_vmm_create(device, each, &handle[i]));
        CHECK_OK(cuda_vmm_map_only(device, at + i * each, each, handle[i]));
    }
    CHECK_OK(cuda_vmm_access(device, at, bytes));
    const uint64_t open_ns = xp_monotonic_ns();
    CHECK_OK(CUDA_CALL(device->driver, cuMemsetD8Async, at, 0, bytes, self->kit.stream));
    holder_idle(self);
    const uint64_t clear_ns = xp_monotonic_ns();
    CHECK_OK(cuda_vmm_unmap(device, at, bytes));
    for (uint32_t i = 0; i < handles; i++)
        cuda_vmm_release(device, handle[i]);
    *grow_ms = (double)(open_ns - begin_ns) / 1e6;
    *clear_ms = (double)(clear_ns - open_ns) / 1e6;
    *shrink_ms = (double)(xp_monotonic_ns() - clear_ns) / 1e6;
}

static answer_t holder_floor(holder_t *self, uint64_t bytes)
{
    enum { REPEATS = 11 };
    double grow[2][REPEATS], clear[2][REPEATS], shrink[2][REPEATS];
    cuda_address_t at;
    CHECK_OK(cuda_vmm_reserve(&self->kit.device, bytes, &at));
    for (uint32_t i = 0; i < REPEATS; i++)
        for (uint32_t w = 0; w < 2; w++)
            floor_round(self, at, bytes, w ? 1 : BUNDLES, &grow[w][i], &clear[w][i], &shrink[w][i]);
    cuda_vmm_unreserve(&self->kit.device, at, bytes);
    return (answer_t){.floors = {.grow = median(grow[0], REPEATS),
                                 .clear = median(clear[0], REPEATS),
                                 .shrink = median(shrink[0], REPEATS),
                                 .grow_whole = median(grow[1], REPEATS),
                                 .shrink_whole = median(shrink[1], REPEATS)}};
}

/* Memory straight from the driver: with `leave`, a pattern is left in it; else counted is what is
 * not 0 in it. What somebody would see who did not clear it. */
static answer_t holder_raw(holder_t *self, uint64_t bytes, bool leave)
{
    cuda_block_t block;
    answer_t answer = {.words = bytes / 8};
    CHECK_OK(cuda_block_create(&self->kit.device, bytes, &block));
    if (leave)
        fill_at(self, block.address, bytes / 8);
    else
        answer.wrong = wrong_at(self, block.address, 0, bytes / 8, 1);
    cuda_block_destroy(&block);
    return answer;
}

static void holder_open(holder_t *self, char **argv)
{
    static const char *const names[KV_KERNELS] = {"kv_fill", "kv_wrong", "kv_gather"};
    const int socket = kit_role_socket(argv);
    library_kv_place_t place = {.channel_fd = kit_role_life(argv),
                                .partition = kit_role_number(argv, 0),
                                .name = "kv-bench"};
    uint64_t token_bytes;
    CHECK(kit_receive(socket, &token_bytes, sizeof(token_bytes), &place.daemon_bell));
    CHECK(kit_receive(socket, &token_bytes, sizeof(token_bytes), &place.bell));
    kit_open(&self->kit, 1 << 20);
    CHECK_OK(cuda_module_load(&self->kit.device, &cuda_image_benches_kv_bench, names, KV_KERNELS,
                              &self->module, self->kernels));
    self->fake = strncmp(self->kit.device.info.name, "Fake", 4) == 0;
    self->count = kit_alloc(&self->kit, 256);
    self->slots = kit_alloc(&self->kit, SLOTS * sizeof(uint32_t));
    self->sums = kit_alloc(&self->kit, SLOTS * sizeof(uint64_t));
    self->seed = 1000 + place.partition;
    self->token_words = token_bytes / 8;
    self->bell = place.bell;
    place.device = &self->kit.device;
    CHECK_OK(library_kv_open(&place, token_bytes, &self->kv));
    holder_info(self);
    for (uint32_t i = 0; i < 2 * KV_READY_BUNDLES_CUDA; i++) /* until the ready pool is full */
        holder_serve(self);
    if (!self->fake)
        fill_at(self, range_of(self), words_of(self, self->info.mapped_tokens));
}

static answer_t holder_do(holder_t *self, const order_t *order)
{
    answer_t answer = {0};
    switch (order->what) {
    case DO_DEMAND:
        return holder_demand(self, order);
    case DO_IDLE:
        holder_report(self, XPOOL_KV_NONE, 0, 1, xp_monotonic_ns());
        return answer;
    case DO_SHRUNK:
        answer.ns = self->shrink_ns;
        holder_info(self);
        answer.bytes = self->info.mapped_tokens * self->info.token_bytes;
        return answer;
    case DO_CAPTURE:
        holder_capture(self);
        return answer;
    case DO_REPLAY:
        return holder_replay(self);
    case DO_CLEARING:
        kv_backing_clearing(clearings[order->value].way);
        return answer;
    case DO_FLOOR:
        return holder_floor(self, order->value);
    default:
        return holder_raw(self, order->value, order->what == DO_LEAVE_PATTERN);
    }
}

static void holder_main(int argc, char **argv)
{
    if (argc < 6 || strcmp(argv[1], "holder") != 0)
        return;
    holder_t self = {0};
    const int socket = kit_role_socket(argv);
    holder_open(&self, argv);
    answer_t ready = {.bytes = self.fake};
    CHECK(kit_send(socket, &ready, sizeof(ready), -1));
    for (;;) {
        struct pollfd orders = {.fd = socket, .events = POLLIN};
        order_t order;
        holder_wait(&self, socket, 200);
        if (poll(&orders, 1, 0) != 1)
            continue;
        if (!kit_receive(socket, &order, sizeof(order), NULL) || order.what == DO_QUIT)
            break;
        answer_t answer = holder_do(&self, &order);
        CHECK(kit_send(socket, &answer, sizeof(answer), -1));
    }
    cuda_graph_destroy(&self.kit.device, self.graph);
    xpool_kv_close(self.kv);
    kit_free(&self.kit, self.sums);
    kit_free(&self.kit, self.slots);
    kit_free(&self.kit, self.count);
    cuda_module_unload(&self.module);
    kit_close(&self.kit);
    exit(0);
}

/* ---- who watches the device's memory ----------------------------------------------------------
 */

static uint64_t free_bytes(const kit_t *kit)
{
    size_t left, total;
    CHECK_OK(CUDA_CALL(kit->device.driver, cuMemGetInfo, &left, &total));
    return left;
}

/* DO_FREE: free bytes now, and in `words` the fewest since it was asked last; looks every ms from
 * then on with `check`, else not. DO_AWAIT_FREE: when there are `value`, at most a second later. */
static void watcher_main(int argc, char **argv)
{
    if (argc < 6 || strcmp(argv[1], "watcher") != 0)
        return;
    const int socket = kit_role_socket(argv);
    kit_t kit;
    kit_open(&kit, 1 << 20);
    answer_t ready = {0};
    CHECK(kit_send(socket, &ready, sizeof(ready), -1));
    uint64_t fewest = UINT64_MAX;
    bool look = false;
    for (;;) {
        struct pollfd orders = {.fd = socket, .events = POLLIN};
        order_t order;
        uint64_t now = look ? free_bytes(&kit) : UINT64_MAX;
        fewest = now < fewest ? now : fewest;
        if (poll(&orders, 1, look ? 1 : 200) != 1)
            continue;
        if (!kit_receive(socket, &order, sizeof(order), NULL) || order.what == DO_QUIT)
            break;
        answer_t answer = {.bytes = free_bytes(&kit), .words = fewest};
        const uint64_t begin_ns = xp_monotonic_ns();
        while (order.what == DO_AWAIT_FREE && answer.bytes < order.value &&
               xp_monotonic_ns() - begin_ns < XP_NS_PER_S) {
            usleep(100);
            answer.bytes = free_bytes(&kit);
        }
        answer.at_ns = xp_monotonic_ns();
        fewest = UINT64_MAX;
        look = order.check;
        CHECK(kit_send(socket, &answer, sizeof(answer), -1));
    }
    kit_close(&kit);
    exit(0);
}

/* ---- the daemon's part ------------------------------------------------------------------------
 */

static struct bench {
    kv_channel_t *channel;
    kv_market_t market;
    int channel_fd, bell, bells[2];
    atomic_bool stop;
    pthread_mutex_t lock; /* of the market */
    pthread_t thread;
    agent_t holders[2], watcher;
    uint64_t grant_bytes, token_bytes;
    uint32_t rounds;
    bool fake;
    uint64_t old_words, checked_words; /* words that showed old contents, of so many */
    bool failed;
} bench;

/* What is not as it has to be: said, and the rest is measured all the same. */
static void expect(bool holds, const char *what)
{
    if (holds || bench.fake)
        return;
    printf("FAILED: %s\n", what);
    bench.failed = true;
}

static void *market_main(void *context)
{
    while (!atomic_load(&bench.stop)) {
        kv_market_step_t step;
        pthread_mutex_lock(&bench.lock);
        kv_market_step(&bench.market, xp_monotonic_ns(), &step);
        pthread_mutex_unlock(&bench.lock);
        for (uint32_t g = 0; g < 2; g++) {
            if (step.ring[g])
                kv_bell_ring(bench.bells[g]);
            if (step.faults[g])
                fprintf(stderr, "kv_bench: group %u: %s\n", g, step.fault_text[g]);
        }
        struct pollfd bell = {.fd = bench.bell, .events = POLLIN};
        poll(&bell, 1, 20);
        kv_bell_clear(bench.bell);
    }
    return NULL;
}

static void market_begin(void)
{
    const uint64_t bundle = bench.grant_bytes / BUNDLES;
    const uint64_t pool = (BUNDLES + 2 * FLOOR) * bundle;
    kv_group_plan_t plans[2];
    for (uint32_t g = 0; g < 2; g++)
        plans[g] = (kv_group_plan_t){.instance = g,
                                     .partition_count = 1,
                                     .bundle_bytes = bundle,
                                     .token_bytes = bench.token_bytes,
                                     .bundle_tokens = BUNDLE_TOKENS,
                                     .page_tokens = 1,
                                     .floor_bundles = FLOOR,
                                     .ceiling_bundles = BUNDLES + FLOOR,
                                     .reserved_bundles = BUNDLES + FLOOR,
                                     .elastic = true};
    kv_market_settings_t settings = {.mode = KV_POLICY_DEADLINE,
                                     .patience_ns = XP_NS_PER_S,
                                     .hold_ns = 0,
                                     .answer_ns = 10 * XP_NS_PER_S};
    CHECK_OK(kv_channel_create(1, &pool, 1, plans, 2, &bench.channel_fd, &bench.channel));
    CHECK_OK(kv_bell_create(&bench.bell));
    pthread_mutex_init(&bench.lock, NULL);
    kv_market_init(&bench.market, bench.channel, &settings);
    for (uint32_t g = 0; g < 2; g++) {
        CHECK_OK(kv_bell_create(&bench.bells[g]));
        kv_market_start(&bench.market, g, 0);
    }
    CHECK(pthread_create(&bench.thread, NULL, market_main, NULL) == 0);
}

/* ---- orders -----------------------------------------------------------------------------------
 */

static answer_t ask(agent_t *role, uint32_t what, uint64_t value, bool check)
{
    order_t order = {.what = what, .check = check, .value = value};
    answer_t answer;
    CHECK(kit_send(role->socket, &order, sizeof(order), -1));
    CHECK(kit_receive(role->socket, &answer, sizeof(answer), NULL));
    return answer;
}

static void quit(agent_t *role)
{
    order_t order = {.what = DO_QUIT};
    CHECK(kit_send(role->socket, &order, sizeof(order), -1));
    agent_reap(role);
}

static answer_t role_ready(agent_t *role, const char *name)
{
    answer_t ready;
    if (!kit_receive(role->socket, &ready, sizeof(ready), NULL)) {
        int code = agent_reap(role);
        fprintf(stderr, "the %s did not start\n", name);
        exit(code == KIT_SKIP ? KIT_SKIP : 1);
    }
    return ready;
}

static void roles_begin(void)
{
    for (uint32_t g = 0; g < 2; g++) {
        agent_t *role = &bench.holders[g];
        agent_spawn("holder", bench.channel_fd, g, 0, role);
        CHECK(kit_send(role->socket, &bench.token_bytes, sizeof(uint64_t), bench.bell));
        CHECK(kit_send(role->socket, &bench.token_bytes, sizeof(uint64_t), bench.bells[g]));
    }
    agent_spawn("watcher", bench.channel_fd, 0, 0, &bench.watcher);
    for (uint32_t g = 0; g < 2; g++)
        bench.fake = role_ready(&bench.holders[g], "Instance Rank").bytes != 0;
    role_ready(&bench.watcher, "watcher");
}

static const uint32_t all_tokens = (BUNDLES + FLOOR) * BUNDLE_TOKENS;

static answer_t demand(uint32_t g, bool check)
{
    answer_t answer = ask(&bench.holders[g], DO_DEMAND, all_tokens, check);
    ask(&bench.holders[g], DO_IDLE, 0, false);
    bench.old_words += answer.wrong;
    bench.checked_words += answer.words;
    return answer;
}

/* Down to its floor; the time of the release itself is in the answer. */
static answer_t trim(uint32_t g)
{
    const uint64_t begin_ns = xp_monotonic_ns();
    answer_t answer;
    do {
        pthread_mutex_lock(&bench.lock);
        const bool here = bench.market.snapshot.groups[g].mapped_bundles == FLOOR;
        if (!here && bench.market.snapshot.groups[g].answered)
            (void)kv_market_trim(&bench.market, g);
        pthread_mutex_unlock(&bench.lock);
        answer = ask(&bench.holders[g], DO_SHRUNK, 0, false);
        if (here)
            return answer;
        kv_bell_ring(bench.bell);
        usleep(300);
    } while (xp_monotonic_ns() - begin_ns < STEP_LIMIT_NS);
    fprintf(stderr, "kv_bench: Instance %u keeps %llu bytes\n", g,
            (unsigned long long)answer.bytes);
    exit(1);
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(double *values, uint32_t count)
{
    qsort(values, count, sizeof(*values), compare);
    return values[count / 2];
}

static double ms(uint64_t ns)
{
    return (double)ns / 1e6;
}

/* ---- what is measured -------------------------------------------------------------------------
 */

static void grants(const floors_t *floors)
{
    double from_free[ROUNDS_MAX], from_donor[ROUNDS_MAX], map[ROUNDS_MAX], shrink[ROUNDS_MAX];
    char note[240];
    const uint32_t rounds = bench.rounds;
    const double mib = (double)(bench.grant_bytes >> 20);
    for (uint32_t i = 0; i < rounds; i++) {
        answer_t answer = demand(0, true);
        from_free[i] = ms(answer.ns);
        map[i] = ms(answer.map_ns);
        trim(0);
    }
    demand(1, true);
    for (uint32_t i = 0; i < rounds; i++) {
        from_donor[i] = ms(demand(i % 2, true).ns);
        shrink[i] = ms(ask(&bench.holders[(i + 1) % 2], DO_SHRUNK, 0, false).ns);
    }
    trim((rounds + 1) % 2);
    const double p50 = median(from_free, rounds);
    snprintf(
        note, sizeof(note),
        "%.0f MiB from demand to usable memory, free bytes, P50 of %u, longest %.2f; floor: the "
        "driver's calls for %d handles and clearing, which is %.2f of it; one handle of all "
        "instead of them %.2f ms",
        mib, rounds, from_free[rounds - 1], BUNDLES, floors->clear, floors->grow_whole);
    kit_row("kv.cuda.grant_1gib_ms", p50, "ms", floors->grow + floors->clear, "<= 5", note);
    const double donor = median(from_donor, rounds);
    snprintf(note, sizeof(note),
             "as above, all of it taken from an idle donor, longest %.2f; floor: its unmapping too",
             from_donor[rounds - 1]);
    kit_row("kv.cuda.grant_1gib_donor_ms", donor, "ms",
            floors->grow + floors->clear + floors->shrink, "<= 5", note);
    snprintf(note, sizeof(note), "the rank's part of a grant: map, access, clear; of %u", rounds);
    kit_row("kv.cuda.map_1gib_ms", median(map, rounds), "ms", floors->grow + floors->clear, NULL,
            note);
    const double p50_shrink = median(shrink, rounds);
    snprintf(note, sizeof(note),
             "the donor's part: event, unmap, release, completion; of %u, longest %.2f; floor: "
             "unmap and release, one handle of all %.2f ms",
             rounds, shrink[rounds - 1], floors->shrink_whole);
    kit_row("kv.cuda.shrink_1gib_ms", p50_shrink, "ms", floors->shrink, NULL, note);
}

/* The device's free memory follows within a second, and never shows more than the pool in use. */
static void memory(uint64_t base_free)
{
    char note[200];
    /* Two handles stay in the ready pool. */
    const uint64_t ready = KV_READY_BUNDLES_CUDA * (bench.grant_bytes / BUNDLES);
    const uint64_t wanted = bench.grant_bytes - ready - bench.grant_bytes / 64;
    ask(&bench.watcher, DO_FREE, 0, true);
    for (uint32_t i = 1; i < 6; i++)
        demand(i % 2, false);
    demand(0, false);
    answer_t full = ask(&bench.watcher, DO_FREE, 0, false);
    const uint64_t begin_ns = xp_monotonic_ns();
    pthread_mutex_lock(&bench.lock);
    CHECK_OK(kv_market_trim(&bench.market, 0));
    pthread_mutex_unlock(&bench.lock);
    kv_bell_ring(bench.bell);
    answer_t fallen = ask(&bench.watcher, DO_AWAIT_FREE, full.bytes + wanted, false);
    trim(0);
    snprintf(note, sizeof(note), "from the command until the device has %llu MiB more free",
             (unsigned long long)((fallen.bytes - full.bytes) >> 20));
    if (!bench.fake)
        kit_row("kv.cuda.device_memory_falls_ms", ms(fallen.at_ns - begin_ns), "ms", -1, "<= 1000",
                note);
    const double used = (double)base_free - (double)full.words;
    const double excess = (used - (double)bench.grant_bytes) / (1 << 20);
    snprintf(note, sizeof(note),
             "fewest free bytes in six grants from donors against those at the start less one "
             "grant, looked at every ms");
    if (!bench.fake)
        kit_row("kv.cuda.pool_excess_mib", excess > 0 ? excess : 0, "MiB", -1, "<= 16", note);
    expect(fallen.bytes >= full.bytes + wanted, "the device's memory did not come back");
    expect(excess <= 16, "more than the pool was in use");
}

static void contents(void)
{
    char note[200];
    ask(&bench.holders[0], DO_LEAVE_PATTERN, bench.grant_bytes, false);
    answer_t raw = ask(&bench.holders[1], DO_RAW, bench.grant_bytes, false);
    snprintf(note, sizeof(note),
             "of %llu words handed over or kept; memory straight from the driver, not cleared, "
             "shows %.1f %% of another process's",
             (unsigned long long)bench.checked_words,
             100.0 * (double)raw.wrong / (double)raw.words);
    if (bench.fake)
        return;
    kit_row("kv.cuda.old_words", (double)bench.old_words, "words", -1, "0", note);
    expect(bench.old_words == 0 && bench.checked_words > 0, "old contents were seen");
}

static void graphs(void)
{
    uint64_t wrong = 0, sums = 0;
    demand(0, true);
    ask(&bench.holders[0], DO_CAPTURE, 0, false);
    for (uint32_t i = 0; i < 4; i++) {
        for (uint32_t r = 0; r < 3; r++) {
            answer_t answer = ask(&bench.holders[0], DO_REPLAY, 0, false);
            wrong += answer.wrong;
            sums += answer.words;
        }
        if (i % 2 == 0)
            trim(0);
        else
            demand(0, true);
    }
    trim(0);
    if (bench.fake)
        return;
    char note[160];
    snprintf(
        note, sizeof(note),
        "of %llu token sums of a graph captured before two shrinks and grows, replayed before, "
        "between and after them",
        (unsigned long long)sums);
    kit_row("kv.cuda.replay_wrong", (double)wrong, "sums", -1, "0", note);
    expect(wrong == 0, "a captured graph read wrong tokens");
}

/* ---- what others notice -----------------------------------------------------------------------
 */

static struct hops {
    client_t client;
    client_times_t times;
    atomic_bool done;
} hops;

static void *hops_main(void *context)
{
    hops.times = client_round_trips(&hops.client, HOP_TRIPS);
    atomic_store(&hops.done, true);
    return NULL;
}

/* Grants from donors, one after the other, while round trips are counted; how many. */
static uint32_t busy_hops(uint32_t *turn, double *p50_out, double *longest_out)
{
    enum { KEPT = 1024 };
    static double took[KEPT];
    pthread_t thread;
    uint32_t count = 0;
    atomic_store(&hops.done, false);
    CHECK(pthread_create(&thread, NULL, hops_main, NULL) == 0);
    while (!atomic_load(&hops.done)) {
        const double one = ms(demand((*turn)++ % 2, false).ns);
        took[count++ % KEPT] = one;
    }
    pthread_join(thread, NULL);
    const uint32_t kept = count < KEPT ? count : KEPT;
    CHECK(kept > 0);
    *p50_out = median(took, kept);
    *longest_out = took[kept - 1]; /* sorted now */
    return count;
}

/* Round trips of an Instance and an AtnAgent, at rest and while memory moves without a pause. */
static void neighbours(void)
{
    int life_fd, board_fd;
    agent_t agent;
    client_setup_t setup = {
        .geometry = {.hidden = 2048, .max_rows = 1, .dtype = XP_DTYPE_BF16, .dp_size = 1},
        .rows = 1,
        .line = 2,
        .limit_ns = 20 * XP_NS_PER_S,
    };
    CHECK_OK(transport_life_make(&life_fd));
    CHECK_OK(xp_memfd_create("board", MAILBOX_HEADER_BYTES, &board_fd));
    agent_start(life_fd, 1, 8, &agent);
    client_start(life_fd, board_fd, 2, &setup, &hops.client);
    CHECK(client_attach(&hops.client, &agent));
    client_round_trips(&hops.client, 20000);
    client_times_t rest = client_round_trips(&hops.client, HOP_TRIPS);
    demand(1, false);
    double p50, longest;
    uint32_t turn = 0, count = busy_hops(&turn, &p50, &longest);
    client_times_t at_once = hops.times;
    client_times_t after = client_round_trips(&hops.client, HOP_TRIPS);
    const client_times_t *busy = &at_once;
    char note[300];
    snprintf(note, sizeof(note),
             "P99 of an Instance's mailbox hop during %u grants of %llu MiB from a donor (longest "
             "%.2f ms) over that at rest; us P50/P99/longest: rest %.2f/%.2f/%.1f, grants "
             "%.2f/%.2f/%.1f, rest again %.2f/%.2f/%.1f",
             count, (unsigned long long)(bench.grant_bytes >> 20), longest, rest.each.p50_us,
             rest.each.p99_us, rest.each.max_us, busy->each.p50_us, busy->each.p99_us,
             busy->each.max_us, after.each.p50_us, after.each.p99_us, after.each.max_us);
    kit_row("kv.cuda.pingpong_p99_ratio", busy->each.p99_us / rest.each.p99_us, "ratio", -1, "<= 2",
            note);
    expect(rest.wrong + busy->wrong + after.wrong == 0 && count > 1, "hops were wrong");
    for (uint32_t i = 0; i < sizeof(clearings) / sizeof(clearings[0]); i++) {
        char metric[80];
        for (uint32_t g = 0; g < 2; g++)
            ask(&bench.holders[g], DO_CLEARING, i, false);
        demand(turn++ % 2, false); /* the first one in this way */
        count = busy_hops(&turn, &p50, &longest);
        snprintf(metric, sizeof(metric), "kv.cuda.clear.%s.pingpong_p99_ratio", clearings[i].name);
        snprintf(note, sizeof(note),
                 "blocks %u, pieces of %u MiB, memsets of %u MiB (0: one); %u grants from a donor "
                 "meanwhile, P50 %.2f, longest %.2f ms; hop P50/P99/longest %.2f/%.2f/%.1f us",
                 clearings[i].way.blocks, clearings[i].way.piece_mib, clearings[i].way.memset_mib,
                 count, p50, longest, hops.times.each.p50_us, hops.times.each.p99_us,
                 hops.times.each.max_us);
        kit_row(metric, hops.times.each.p99_us / rest.each.p99_us, "ratio", -1, NULL, note);
        expect(hops.times.wrong == 0, "hops were wrong");
    }
    trim((turn + 1) % 2);
    CHECK_OK(agent_detach(&agent, hops.client.slot));
    client_exit(&hops.client);
    agent_stop(&agent);
}

int main(int argc, char **argv)
{
    agent_main(argc, argv);
    client_main(argc, argv);
    holder_main(argc, argv);
    watcher_main(argc, argv);
    setvbuf(stdout, NULL, _IOLBF, 0);
    bench.rounds = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 15;
    const uint64_t mib = argc > 2 ? strtoul(argv[2], NULL, 10) : 1024;
    if (bench.rounds < 1 || bench.rounds > ROUNDS_MAX || mib < 64 || mib > 16384 || mib % 64) {
        fprintf(stderr, "usage: cuda_kv_bench [ROUNDS, 1 to %d [GRANT_MIB, a multiple of 64]]\n",
                ROUNDS_MAX);
        return 2;
    }
    bench.grant_bytes = mib << 20;
    bench.token_bytes = bench.grant_bytes / BUNDLES / BUNDLE_TOKENS;
    mps_t *mps = agent_mps_begin();
    market_begin();
    roles_begin();
    floors_t floors = ask(&bench.holders[0], DO_FLOOR, bench.grant_bytes, false).floors;
    uint64_t base_free = ask(&bench.watcher, DO_FREE, 0, false).bytes;
    grants(&floors);
    memory(base_free);
    graphs();
    contents();
    if (mps && !bench.fake)
        neighbours();
    else
        printf("hops of others: left out, %s\n", bench.fake ? "a rehearsal" : "there is no MPS");
    for (uint32_t g = 0; g < 2; g++)
        quit(&bench.holders[g]);
    quit(&bench.watcher);
    atomic_store(&bench.stop, true);
    kv_bell_ring(bench.bell);
    pthread_join(bench.thread, NULL);
    kv_channel_unmap(bench.channel);
    agent_mps_end(mps);
    printf("%s kv_bench\n", bench.failed ? "FAILED" : "ok");
    return bench.failed;
}
