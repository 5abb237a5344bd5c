/* SPDX-License-Identifier: MIT */
/*
 * Records of the KV market: a live run, with ranks in threads of their own that answer over the
 * real channel, replays to identical decisions; whatever is no record is refused.
 */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "control/kv_record.h"
#include "kv/market.h"
#include "kv/rank.h"

#define RANKS   3
#define LIVE_NS (500 * XP_NS_PER_MS)

typedef struct live {
    kv_channel_t *channel;
    int fd, bell, bells[RANKS];
    atomic_bool stop;
    kv_market_t market;
    kv_record_ring_t ring;
} live_t;

typedef struct actor {
    live_t *live;
    uint32_t partition;
} actor_t;

/* One Instance: asks for more, uses it for a while, and needs less again. */
static void *act(void *context)
{
    const actor_t *actor = context;
    live_t *live = actor->live;
    kv_rank_t rank;
    uint32_t bundles, live_bundles = 1, turn = 0;
    if (kv_rank_open(live->fd, live->bell, live->bells[actor->partition], actor->partition,
                     &rank) != XP_OK ||
        kv_rank_start(&rank, &bundles) != XP_OK ||
        kv_rank_ready(&rank, rank.group->bundle_bytes, rank.group->bundle_tokens, bundles) != XP_OK)
        return NULL;
    uint64_t since = xp_monotonic_ns();
    while (!atomic_load(&live->stop)) {
        kv_command_t command;
        if (kv_rank_pending(&rank) && kv_rank_poll(&rank, turn, live_bundles, &command)) {
            bundles = command.bundles > live_bundles ? command.bundles : live_bundles;
            kv_rank_complete(&rank, bundles);
        }
        uint32_t wants = 10 + (turn / 20 * 7 + actor->partition * 31) % 50;
        if (turn++ % 20 == 19) {
            live_bundles = 1;
            since = xp_monotonic_ns();
        } else if (bundles >= wants) {
            live_bundles = wants;
        }
        kv_report_t report = {.live_bundles = live_bundles,
                              .running = live_bundles > 1,
                              .waiting = bundles < wants,
                              .demand_kind = bundles < wants ? KV_DEMAND_PREFILL : KV_DEMAND_NONE,
                              .demand_bundles = wants,
                              .demand_since_ns = since,
                              .demand_deadline_ns = since + (5 + actor->partition) * XP_NS_PER_MS,
                              .earliest_deadline_ns = since + 20 * XP_NS_PER_MS,
                              .last_activity_ns = since};
        kv_rank_report(&rank, &report);
        nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    }
    kv_rank_close(&rank);
    return NULL;
}

static void run_live(live_t *live)
{
    uint64_t pool = 80 * 4096;
    kv_group_plan_t groups[RANKS];
    actor_t actors[RANKS];
    pthread_t threads[RANKS];
    kv_market_settings_t settings = {.mode = KV_POLICY_DEADLINE,
                                     .patience_ns = 20 * XP_NS_PER_MS,
                                     .hold_ns = XP_NS_PER_MS,
                                     .answer_ns = 100 * XP_NS_PER_S};
    memset(live, 0, sizeof(*live));
    for (uint32_t g = 0; g < RANKS; g++)
        groups[g] = (kv_group_plan_t){.instance = g,
                                      .partition_count = 1,
                                      .bundle_bytes = 4096,
                                      .token_bytes = 256,
                                      .bundle_tokens = 16,
                                      .page_tokens = 16,
                                      .floor_bundles = 2,
                                      .ceiling_bundles = 60,
                                      .reserved_bundles = 60,
                                      .elastic = true};
    assert_int_equal(kv_channel_create(1, &pool, 1, groups, RANKS, &live->fd, &live->channel),
                     XP_OK);
    kv_market_init(&live->market, live->channel, &settings);
    assert_int_equal(kv_record_ring_init(1, RANKS, &live->ring), XP_OK);
    live->market.record = kv_record_ring_add;
    live->market.record_context = &live->ring;
    assert_int_equal(kv_bell_create(&live->bell), XP_OK);
    for (uint32_t p = 0; p < RANKS; p++) {
        assert_int_equal(kv_bell_create(&live->bells[p]), XP_OK);
        kv_market_start(&live->market, p, 0);
        actors[p] = (actor_t){live, p};
        assert_int_equal(pthread_create(&threads[p], NULL, act, &actors[p]), 0);
    }
    static kv_market_step_t step;
    uint64_t end = xp_monotonic_ns() + LIVE_NS;
    for (uint64_t now = 0; now < end;) {
        now = xp_monotonic_ns();
        kv_market_step(&live->market, now, &step);
        for (uint32_t g = 0; g < RANKS; g++)
            if (step.faults[g])
                fail_msg("%s", step.fault_text[g]);
        nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    }
    atomic_store(&live->stop, true);
    for (uint32_t p = 0; p < RANKS; p++)
        pthread_join(threads[p], NULL);
}

static void end_live(live_t *live)
{
    kv_record_ring_fini(&live->ring);
    kv_channel_unmap(live->channel);
    close(live->fd);
    close(live->bell);
    for (uint32_t p = 0; p < RANKS; p++)
        close(live->bells[p]);
}

static void a_live_run_replays_to_the_same_decisions(void **state)
{
    static live_t live;
    (void)state;
    run_live(&live);
    uint64_t bytes = kv_record_ring_bytes(&live.ring);
    uint8_t *file = malloc(bytes);
    kv_record_replay_t replay;
    kv_record_ring_write(&live.ring, file);
    assert_int_equal(kv_record_replay(file, bytes, &replay), XP_OK);
    assert_int_equal(replay.different, 0);
    assert_true(replay.records >= 20 && replay.commands >= replay.records);

    /* It is the snapshots that decide: with another order of demands it differs. */
    kv_record_header_t header;
    memcpy(&header, file, sizeof(header));
    uint64_t record = (bytes - sizeof(header)) / header.record_count;
    for (uint64_t r = 0; r < header.record_count; r++) {
        uint32_t mode = KV_POLICY_STATIC;
        memcpy(file + sizeof(header) + r * record + 3 * sizeof(uint64_t), &mode, sizeof(mode));
    }
    assert_int_equal(kv_record_replay(file, bytes, &replay), XP_OK);
    assert_int_equal(replay.different, header.record_count);
    assert_int_equal(replay.first_different, 0);
    free(file);
    end_live(&live);
}

static void the_ring_keeps_the_newest(void **state)
{
    static kv_policy_snapshot_t snapshot;
    static kv_policy_decisions_t decisions;
    kv_record_ring_t ring;
    kv_record_replay_t replay;
    (void)state;
    snapshot.pool_count = 1;
    snapshot.group_count = 2;
    snapshot.groups[0].bundle_bytes = snapshot.groups[1].bundle_bytes = 1;
    assert_int_equal(kv_record_ring_init(1, 2, &ring), XP_OK);
    ring.capacity = 100;
    for (uint64_t i = 0; i < ring.capacity + 10; i++) {
        snapshot.now_ns = i;
        kv_policy_decide(&snapshot, &decisions);
        kv_record_ring_add(&ring, &snapshot, &decisions);
    }
    uint64_t bytes = kv_record_ring_bytes(&ring);
    uint8_t *file = malloc(bytes);
    kv_record_ring_write(&ring, file);
    assert_int_equal(kv_record_replay(file, bytes, &replay), XP_OK);
    assert_int_equal(replay.records, ring.capacity);
    assert_int_equal(replay.span_ns, ring.capacity - 1);
    /* Cut anywhere, it is refused. */
    for (uint64_t length = 0; length < bytes; length += 1 + length / 3)
        assert_int_equal(kv_record_replay(file, length, &replay), XP_INVALID);
    /* Damaged anywhere, it is refused or replays; it never reads past its end. */
    uint64_t seed = 1;
    for (int round = 0; round < 2000; round++) {
        seed = seed * 6364136223846793005ull + 1442695040888963407ull;
        uint64_t at = (seed >> 33) % (bytes < 4096 ? bytes : 4096);
        uint8_t was = file[at];
        file[at] ^= (uint8_t)(1 + (seed >> 20) % 255);
        kv_record_replay(file, bytes, &replay);
        file[at] = was;
    }
    free(file);
    kv_record_ring_fini(&ring);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_live_run_replays_to_the_same_decisions),
        cmocka_unit_test(the_ring_keeps_the_newest),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
