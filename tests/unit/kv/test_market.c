/* SPDX-License-Identifier: MIT */
/* The market's books: life of a group, credits, deaths at every step, faults, steering. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "kv/market.h"

#define MS        1000000ull
#define POOL      100
#define ANSWER_NS (50 * MS)

static kv_channel_t *channel;
static int channel_fd;
static kv_market_t market;
static kv_market_step_t step;
static uint64_t now;

/* Two groups of one pool; the first has two ranks on it. A bundle is 16 bytes of one rank. */
static int fresh(void **state)
{
    uint64_t bytes = POOL * 16;
    kv_group_plan_t groups[2] = {{.partition_count = 2,
                                  .bundle_bytes = 16,
                                  .token_bytes = 1,
                                  .bundle_tokens = 16,
                                  .page_tokens = 16,
                                  .floor_bundles = 5,
                                  .ceiling_bundles = 40,
                                  .reserved_bundles = 40,
                                  .elastic = true}};
    groups[1] = groups[0];
    groups[1].instance = 1;
    groups[1].partition_count = 1;
    groups[1].ceiling_bundles = groups[1].reserved_bundles = 80;
    kv_market_settings_t settings = {.mode = KV_POLICY_DEADLINE,
                                     .patience_ns = 10000 * MS,
                                     .hold_ns = 0,
                                     .answer_ns = ANSWER_NS};
    (void)state;
    now = 1000 * MS;
    assert_int_equal(kv_channel_create(1, &bytes, 1, groups, 2, &channel_fd, &channel), XP_OK);
    kv_market_init(&market, channel, &settings);
    return 0;
}

static int done(void **state)
{
    (void)state;
    kv_channel_unmap(channel);
    close(channel_fd);
    return 0;
}

static xp_status_t set(uint32_t group, uint32_t floor, uint32_t ceiling)
{
    const kv_market_size_t size = {group, floor, ceiling};
    return kv_market_set(&market, &size, 1);
}

static void steps(void)
{
    now += MS;
    kv_market_step(&market, now, &step);
}

static uint64_t charged(void)
{
    return kv_market_charged_bytes(&market, 0) / 16;
}

/* One rank does all that its newest command says, or only as far as `mapped`. */
static void answer(uint32_t partition, uint32_t mapped)
{
    const kv_group_entry_t *group = &channel->groups[channel->partitions[partition].group];
    kv_command_t command = kv_group_command(group);
    kv_partition_open(&channel->partitions[partition], 16, 16);
    kv_partition_complete(&channel->partitions[partition], command.sequence,
                          mapped ? mapped : command.bundles);
}

static void begin(void)
{
    kv_market_start(&market, 0, 0);
    kv_market_start(&market, 1, 0);
    steps();
    for (uint32_t p = 0; p < 3; p++)
        answer(p, 0);
    steps();
    assert_int_equal(market.groups[0].state, KV_MARKET_PRESENT);
    assert_int_equal(market.groups[1].state, KV_MARKET_PRESENT);
    assert_int_equal(charged(), 15);
}

static void report(uint32_t group, uint32_t live, uint32_t demand)
{
    kv_report_t text = {.live_bundles = live,
                        .running = live > 0,
                        .demand_kind = demand ? KV_DEMAND_PREFILL : KV_DEMAND_NONE,
                        .demand_bundles = demand,
                        .demand_since_ns = now,
                        .demand_deadline_ns = now + 100 * MS,
                        .earliest_deadline_ns = KV_NO_DEADLINE};
    kv_group_report_write(&channel->groups[group], &text);
}

/* Group 0 asks for 30 bundles and both of its ranks have them. */
static void begin_with_a_grant(void)
{
    begin();
    report(0, 5, 30);
    steps();
    answer(0, 0);
    answer(1, 0);
    steps();
}

static void a_group_begins_with_its_floor(void **state)
{
    assert_int_equal(charged(), 15); /* kept for those that are not there */
    begin();
    assert_int_equal(kv_group_command(&channel->groups[0]).sequence, 1);
    assert_int_equal(kv_group_command(&channel->groups[0]).bundles, 5);
}

static void a_late_rank_keeps_the_group_starting(void **state)
{
    kv_market_start(&market, 0, 0);
    steps();
    answer(0, 0);
    steps();
    assert_int_equal(market.groups[0].state, KV_MARKET_STARTING);
    now += 10 * ANSWER_NS; /* loading has a deadline of its own */
    steps();
    assert_int_equal(step.faults[0], KV_FAULT_NONE);
    answer(1, 0);
    steps();
    assert_int_equal(market.groups[0].state, KV_MARKET_PRESENT);
}

static void both_ranks_complete_before_a_credit(void **state)
{
    begin();
    report(0, 5, 30);
    steps();
    assert_true(step.ring[0]);
    assert_int_equal(charged(), 2 * 30 + 5);
    answer(0, 0);
    answer(1, 0);
    steps();
    report(0, 0, 0);
    report(1, 5, 80);
    steps();
    kv_command_t shrink = kv_group_command(&channel->groups[0]);
    assert_int_equal(shrink.bundles, 10); /* 35 are free, 40 more are wanted: 20 of each rank */
    answer(0, 0);
    steps();
    assert_int_equal(charged(), 65); /* the other has not released */
    answer(1, 0);
    steps();
    assert_int_equal(kv_group_command(&channel->groups[1]).bundles, 80);
    assert_int_equal(charged(), 100);
}

static void a_shrink_goes_on_as_requests_leave(void **state)
{
    begin_with_a_grant();
    report(0, 10, 0);
    report(1, 5, 60);
    steps();
    assert_int_equal(kv_group_command(&channel->groups[0]).bundles, 20);
    answer(0, 28); /* meanwhile it has admitted more */
    answer(1, 26);
    steps();
    assert_int_equal(charged(), 2 * 28 + 5);
    answer(0, 20);
    steps();
    assert_int_equal(charged(), 2 * 26 + 5);
    answer(1, 20);
    steps();
    assert_int_equal(charged(), 2 * 20 + 60); /* and the grant is out */
}

static void a_shrink_that_stands_still_is_asked_again(void **state)
{
    begin_with_a_grant();
    report(0, 10, 0);
    report(1, 5, 60);
    steps();
    answer(0, 28); /* both agree on what they reach, and stop there */
    answer(1, 28);
    report(0, 28, 0);
    steps();
    kv_command_t before = kv_group_command(&channel->groups[0]);
    now += 600 * MS;
    steps(); /* its live requests are still there */
    assert_int_equal(kv_group_command(&channel->groups[0]).sequence, before.sequence);
    report(0, 22, 0);
    steps();
    kv_command_t again = kv_group_command(&channel->groups[0]);
    assert_int_equal(again.sequence, before.sequence + 1);
    assert_int_equal(again.bundles, 22);
    answer(0, 0);
    answer(1, 0);
    steps();
    assert_int_equal(charged(), 2 * 22 + 5);
}

static void a_grant_without_memory_is_taken_back(void **state)
{
    begin();
    report(0, 5, 30);
    steps();
    answer(0, 30);
    answer(1, 18); /* the system had no more */
    steps();
    kv_command_t less = kv_group_command(&channel->groups[0]);
    assert_int_equal(less.bundles, 18);
    answer(0, 0);
    answer(1, 0);
    steps();
    assert_int_equal(charged(), 2 * 18 + 5);
    assert_int_equal(kv_group_command(&channel->groups[0]).sequence, less.sequence); /* a pause */
    now += 1100 * MS;
    steps();
    assert_int_equal(kv_group_command(&channel->groups[0]).bundles, 30);
}

/* A death at each step of an operation: every byte returns once, when the last process is gone. */
static void deaths_return_every_byte(void **state)
{
    for (int at = 0; at < 6; at++) {
        if (at)
            fresh(NULL);
        begin();
        report(0, 5, 30);
        if (at >= 1)
            steps(); /* the command is out */
        if (at >= 2)
            answer(0, 0); /* one rank has voted with its memory */
        if (at >= 3)
            answer(1, 0);
        if (at >= 4)
            steps();
        if (at >= 5) {
            report(0, 0, 0);
            report(1, 5, 80);
            steps(); /* it shrinks */
            answer(1, 0);
        }
        uint64_t before = charged();
        kv_market_leave(&market, 0);
        steps();
        assert_int_equal(charged(), before); /* its process still has them */
        kv_market_end(&market, 0);
        kv_market_end(&market, 0);
        uint64_t rest = kv_policy_charge(&market.snapshot.groups[1]);
        assert_int_equal(charged(), 10 + rest);
        steps();
        if (at == 5) {
            assert_int_equal(kv_group_command(&channel->groups[1]).bundles, 80);
            answer(2, 0);
            steps();
        }
        /* It may come back, with cells as new. */
        kv_market_start(&market, 0, 0);
        assert_int_equal(kv_partition_completion(&channel->partitions[1]), 0);
        answer(0, 0);
        answer(1, 0);
        steps();
        assert_int_equal(market.groups[0].state, KV_MARKET_PRESENT);
        if (at < 5)
            done(NULL);
    }
}

static void silence_between_two_generations_is_none(void **state)
{
    begin();
    report(0, 5, 30);
    steps();
    answer(0, 0); /* the other stands in a layer that nobody computes */
    market.paused = true;
    for (int i = 0; i < 5; i++) {
        now += ANSWER_NS;
        steps();
        assert_int_equal(step.faults[0], KV_FAULT_NONE);
    }
    market.paused = false;
    now += ANSWER_NS - 2 * MS;
    steps();
    assert_int_equal(step.faults[0], KV_FAULT_NONE);
    steps();
    assert_int_equal(step.faults[0], KV_FAULT_LATE);
    now += ANSWER_NS;
    steps();
    assert_int_equal(step.faults[0], KV_FAULT_SILENT);
}

static void silence_is_reported_then_a_fault(void **state)
{
    begin();
    report(0, 5, 30);
    steps();
    assert_true(step.next_ns <= now + ANSWER_NS);
    answer(0, 0); /* the other says nothing */
    now += ANSWER_NS;
    steps();
    assert_int_equal(step.faults[0], KV_FAULT_LATE);
    steps();
    assert_int_equal(step.faults[0], KV_FAULT_NONE); /* once */
    now += ANSWER_NS;
    steps();
    assert_int_equal(step.faults[0], KV_FAULT_SILENT);
    assert_int_equal(step.faults[1], KV_FAULT_NONE);
}

static void nonsense_is_a_fault_and_no_credit(void **state)
{
    begin();
    kv_partition_complete(&channel->partitions[2], 1, 6); /* more than it was given */
    steps();
    assert_int_equal(step.faults[1], KV_FAULT_BROKEN);
    kv_partition_complete(&channel->partitions[2], 2, 5); /* a command of the future */
    steps();
    assert_int_equal(step.faults[1], KV_FAULT_BROKEN);
    kv_partition_complete(&channel->partitions[2], 1, 0);
    steps();
    assert_int_equal(step.faults[1], KV_FAULT_BROKEN);
    kv_partition_complete(&channel->partitions[2], 1, 5);
    channel->partitions[2].bundle_bytes = 17;
    steps();
    assert_int_equal(step.faults[1], KV_FAULT_BROKEN);
    assert_int_equal(charged(), 15);
    /* Wild reports are bounded, whatever they say. */
    kv_report_t wild;
    memset(&wild, 0xff, sizeof(wild));
    kv_group_report_write(&channel->groups[0], &wild);
    steps();
    assert_int_equal(kv_group_command(&channel->groups[0]).sequence, 1);
}

/* Every rank can write all of the channel: what the daemon made constant it knows by itself. */
static void what_a_rank_writes_over_constants_is_nobodys_harm(void **state)
{
    begin();
    channel->pool_count = channel->group_count = channel->partition_count = UINT32_MAX;
    channel->pools[0].bytes = UINT64_MAX;
    for (uint32_t g = 0; g < 2; g++) {
        kv_group_entry_t *group = &channel->groups[g];
        group->first_partition = group->partition_count = group->instance = UINT32_MAX;
        group->bundle_bytes = group->token_bytes = 1;
        group->bundle_tokens = group->page_tokens = 0;
        group->reserved_bundles = UINT32_MAX;
        group->elastic = 0;
    }
    for (uint32_t p = 0; p < 3; p++)
        channel->partitions[p].pool = UINT32_MAX;
    report(1, 5, 60);
    steps();
    assert_int_equal(step.faults[1], KV_FAULT_NONE);
    assert_int_equal(kv_group_command(&channel->groups[1]).bundles, 60);
    channel->partitions[2].group = 1;
    answer(2, 0);
    steps();
    assert_int_equal(charged(), 10 + 60);
    assert_int_equal(set(1, 5, 81), XP_INVALID); /* its range ends at 80 */
    assert_int_equal(kv_market_possible_bundles(&market, 1), 80);
    kv_market_end(&market, 0);
    kv_market_start(&market, 0, 0);
    steps();
    assert_int_equal(channel->partitions[0].state, KV_PARTITION_ABSENT);
    assert_int_equal(channel->partitions[1].state, KV_PARTITION_ABSENT);
}

static void floors_and_ceilings_change_live(void **state)
{
    begin();
    assert_int_equal(set(0, 0, 40), XP_INVALID);
    assert_int_equal(set(0, 6, 5), XP_INVALID);
    assert_int_equal(set(0, 5, 41), XP_INVALID);
    assert_non_null(strstr(xp_error_last()->text, "640"));
    assert_int_equal(set(1, 80, 80), XP_OK); /* 10 remain for the other */
    assert_int_equal(set(0, 11, 40), XP_NO_MEMORY);
    assert_int_equal(set(1, 5, 80), XP_OK);
    assert_int_equal(set(0, 20, 40), XP_OK);
    steps();
    assert_int_equal(kv_group_command(&channel->groups[0]).bundles, 20);
    answer(0, 0);
    answer(1, 0);
    steps();
    assert_int_equal(set(0, 5, 10), XP_OK);
    steps();
    assert_int_equal(kv_group_command(&channel->groups[0]).bundles, 10);
}

static void sizes_are_set_together_or_not_at_all(void **state)
{
    begin();
    /* The second has no room beside the first's new floor, or is nonsense: nothing has changed. */
    const kv_market_size_t late[2] = {{0, 20, 30}, {1, 70, 80}};
    assert_int_equal(kv_market_set(&market, late, 2), XP_NO_MEMORY);
    assert_non_null(strstr(xp_error_last()->text, "room for 240"));
    const kv_market_size_t wrong[2] = {{0, 20, 30}, {1, 70, 60}};
    assert_int_equal(kv_market_set(&market, wrong, 2), XP_INVALID);
    steps();
    for (uint32_t g = 0; g < 2; g++) {
        assert_int_equal(market.snapshot.groups[g].floor_wanted, 5);
        assert_int_equal(market.snapshot.groups[g].floor_bundles, 5);
        assert_int_equal(market.snapshot.groups[g].ceiling_bundles, g ? 80 : 40);
        assert_int_equal(channel->groups[g].floor_bundles, 5);
    }
    /* Neither order alone would do: each floor fits only beside the other's new one. */
    assert_int_equal(set(1, 70, 80), XP_OK);
    const kv_market_size_t swap[2] = {{0, 40, 40}, {1, 20, 80}};
    assert_int_equal(kv_market_set(&market, swap, 2), XP_OK);
    assert_int_equal(market.snapshot.groups[0].floor_wanted, 40);
    assert_int_equal(channel->groups[1].floor_bundles, 20);
}

/* Only one of both fits: the one that came first or the one that is due first. */
static void the_order_of_demands_changes_live(void **state)
{
    for (uint32_t turn = 0; turn < 2; turn++) {
        if (turn) {
            done(state);
            fresh(state);
        }
        begin();
        assert_int_equal(kv_market_order(&market, turn ? KV_POLICY_DEADLINE : KV_POLICY_ARRIVAL),
                         XP_OK);
        kv_report_t early = {.live_bundles = 5,
                             .running = true,
                             .demand_kind = KV_DEMAND_PREFILL,
                             .demand_bundles = 40,
                             .demand_since_ns = now,
                             .demand_deadline_ns = now + 1000 * MS,
                             .earliest_deadline_ns = KV_NO_DEADLINE};
        kv_report_t urgent = early;
        urgent.demand_bundles = 60;
        urgent.demand_since_ns = now + 1;
        urgent.demand_deadline_ns = now + 10 * MS;
        kv_group_report_write(&channel->groups[0], &early);
        kv_group_report_write(&channel->groups[1], &urgent);
        steps();
        assert_int_equal(kv_group_command(&channel->groups[0]).bundles, turn ? 5 : 40);
        assert_int_equal(kv_group_command(&channel->groups[1]).bundles, turn ? 60 : 5);
    }
    market.settings.mode = KV_POLICY_STATIC;
    assert_int_equal(kv_market_order(&market, KV_POLICY_ARRIVAL), XP_UNSUPPORTED);
}

static void floors_of_others_bound_a_ceiling(void **state)
{
    begin();
    assert_int_equal(set(1, 80, 80), XP_OK);
    steps();
    /* 20 of the pool are left, and each of its bundles takes two. */
    assert_int_equal(channel->groups[0].ceiling_bundles, 10);
    assert_true(step.ring[0]); /* who waits for more is told */
    steps();
    assert_false(step.ring[0]);
    assert_int_equal(set(1, 5, 80), XP_OK);
    steps();
    assert_int_equal(channel->groups[0].ceiling_bundles, 40); /* as it was set */
    assert_true(step.ring[0]);
}

static void a_floor_of_somebody_absent_is_kept_once_it_is_free(void **state)
{
    kv_market_start(&market, 1, 0);
    answer(2, 0);
    steps();
    report(1, 80, 80);
    steps();
    answer(2, 0);
    steps();
    assert_int_equal(charged(), 90);
    assert_int_equal(set(0, 40, 40), XP_OK);
    steps();
    assert_int_equal(charged(), 90); /* the other's requests live in it */
    report(1, 10, 0);
    assert_int_equal(kv_market_trim(&market, 1), XP_OK);
    steps();
    kv_command_t command = kv_group_command(&channel->groups[1]);
    assert_true(command.trim && command.bundles == 10);
    answer(2, 0);
    steps();
    steps();
    assert_int_equal(charged(), 2 * 40 + 10);
    kv_market_start(&market, 0, 0);
    assert_int_equal(kv_group_command(&channel->groups[0]).bundles, 40);
}

static void trims_wait_for_their_turn(void **state)
{
    assert_int_equal(kv_market_trim(&market, 0), XP_RETRY);
    begin();
    report(0, 5, 30);
    steps();
    assert_int_equal(kv_market_trim(&market, 0), XP_OK);
    steps(); /* a command is open */
    assert_false(kv_group_command(&channel->groups[0]).trim);
    answer(0, 0);
    answer(1, 0);
    report(0, 7, 0);
    steps();
    kv_command_t command = kv_group_command(&channel->groups[0]);
    assert_true(command.trim && command.bundles == 7);
}

static void refusals_and_squeezes_are_told(void **state)
{
    begin_with_a_grant();
    report(0, 30, 0);
    report(1, 5, 60);
    steps();
    assert_true(channel->groups[1].refused_since_ns != 0);
    assert_true(step.ring[1]);
    assert_true(channel->groups[0].admit_bundles == UINT32_MAX);
    now += 100 * MS; /* it is overdue */
    steps();
    assert_true(channel->groups[0].admit_bundles == UINT32_MAX);
    now += 1000 * MS; /* it starves */
    steps();
    assert_int_equal(channel->groups[0].admit_bundles, 5);
    report(0, 5, 0);
    steps();
    assert_int_equal(channel->groups[1].refused_since_ns, 0);
    assert_true(channel->groups[0].admit_bundles == UINT32_MAX);
}

/* ---- pools of GPUs ----------------------------------------------------------------------------
 */

/* Bundles: 100 planned, 3 stay free, a rank of group 1 takes 20 beside its KV Cache. */
static int fresh_gpu(void **state)
{
    fresh(state);
    kv_market_settings_t settings = market.settings;
    settings.observe = true;
    settings.kept_bytes[0] = 3 * 16;
    settings.rank_bytes[1] = 20 * 16;
    kv_market_init(&market, channel, &settings);
    return 0;
}

/* What a rank writes as its demand's kind is a number of a peer's. */
static void kinds_of_demands(void **state)
{
    begin_with_a_grant(); /* group 0 holds 30 and uses 5 of them */
    kv_report_t wish = {.live_bundles = 5,
                        .demand_bundles = 20,
                        .demand_since_ns = now,
                        .demand_deadline_ns = KV_NO_DEADLINE,
                        .earliest_deadline_ns = KV_NO_DEADLINE};
    for (uint64_t kind = KV_DEMAND_CACHE + 1; kind < 1ull << 40; kind <<= 8) {
        wish.demand_kind = kind;
        kv_group_report_write(&channel->groups[1], &wish);
        steps();
        assert_int_equal(kv_group_command(&channel->groups[1]).sequence, 1);
    }
    /* A prefix cache gets free memory, and nobody's. */
    wish.demand_kind = KV_DEMAND_CACHE;
    kv_group_report_write(&channel->groups[1], &wish);
    steps();
    assert_int_equal(kv_group_command(&channel->groups[1]).bundles, 20);
    answer(2, 0);
    steps();
    wish.demand_bundles = POOL - 60 + 1;
    kv_group_report_write(&channel->groups[1], &wish);
    steps();
    assert_int_equal(kv_group_command(&channel->groups[1]).sequence, 2);
    assert_int_equal(kv_group_command(&channel->groups[0]).bundles, 30);
}

static void captured(uint32_t partition, uint32_t free_bundles)
{
    kv_partition_capture(&channel->partitions[partition], free_bundles * 16ull, ++now);
}

static uint64_t pool(void)
{
    return market.snapshot.pool_bytes[0] / 16;
}

static void nobody_grows_before_all_have_captured(void **state)
{
    begin();
    report(1, 5, 40);
    steps();
    assert_int_equal(channel->groups[1].command >> 32, 1);
    assert_true(channel->groups[1].refused_since_ns != 0);
    assert_int_equal(channel->groups[1].ceiling_bundles,
                     80); /* what is planned, till it is known */
    /* The first two have captured while the third still takes memory: what they saw is too much. */
    captured(0, 200);
    captured(1, 150);
    steps();
    assert_int_equal(pool(), 15);
    assert_false(step.formed[0]);
    captured(2, 60);
    steps();
    assert_true(step.formed[0]);
    assert_int_equal(pool(), 15 + 60 - 3);
    assert_int_equal(channel->pools[0].observed_bytes, 72 * 16);
    assert_int_equal(kv_group_command(&channel->groups[1]).bundles, 40); /* met at once */
    assert_int_equal(channel->groups[1].ceiling_bundles, 72 - 10);
    steps();
    assert_false(step.formed[0]); /* once */
}

static void a_pool_is_never_more_than_planned(void **state)
{
    begin();
    for (uint32_t p = 0; p < 3; p++)
        kv_partition_capture(&channel->partitions[p], UINT64_MAX, ++now);
    steps();
    assert_int_equal(pool(), POOL);
}

static void a_device_that_is_full_leaves_the_floors(void **state)
{
    begin();
    for (uint32_t p = 0; p < 3; p++)
        captured(p, 0);
    steps();
    assert_true(step.formed[0]);
    assert_int_equal(pool(), 15);
    assert_int_equal(channel->groups[0].ceiling_bundles, 5);
    report(1, 5, 6);
    steps();
    assert_int_equal(channel->groups[1].command >> 32, 1);
}

/* Who is not there yet will take its memory; when it has come, what is there is looked at again. */
static void models_that_come_later_are_counted(void **state)
{
    kv_market_start(&market, 0, 0);
    steps();
    answer(0, 0);
    answer(1, 0);
    steps();
    captured(0, 90);
    captured(1, 90);
    steps();
    assert_int_equal(pool(), 10 + 90 - 3 - 20);
    report(0, 5, 20);
    steps();
    answer(0, 0);
    answer(1, 0);
    steps();
    assert_int_equal(charged(), 45);
    kv_market_start(&market, 1, 0);
    steps();
    answer(2, 0);
    steps();
    assert_int_equal(pool(), 77); /* it loads */
    captured(2, 20);
    steps();
    assert_int_equal(pool(), 45 + 20 - 3); /* it took more than planned */
}

static void an_observation_before_memory_moved_is_left_out(void **state)
{
    begin();
    for (uint32_t p = 0; p < 3; p++)
        captured(p, 60);
    steps();
    assert_int_equal(pool(), 72);
    kv_market_leave(&market, 1);
    kv_market_end(&market, 1);
    kv_market_start(&market, 1, 0);
    steps();
    answer(2, 0);
    steps();
    captured(2, 80);
    report(0, 5, 20);
    market.settings.observe = false; /* the daemon is late to look */
    steps();
    answer(0, 0);
    answer(1, 0);
    steps();
    market.settings.observe = true;
    steps();
    assert_int_equal(pool(), 72);
    assert_false(step.formed[0]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_group_begins_with_its_floor, fresh, done),
        cmocka_unit_test_setup_teardown(a_late_rank_keeps_the_group_starting, fresh, done),
        cmocka_unit_test_setup_teardown(both_ranks_complete_before_a_credit, fresh, done),
        cmocka_unit_test_setup_teardown(a_shrink_goes_on_as_requests_leave, fresh, done),
        cmocka_unit_test_setup_teardown(a_shrink_that_stands_still_is_asked_again, fresh, done),
        cmocka_unit_test_setup_teardown(a_grant_without_memory_is_taken_back, fresh, done),
        cmocka_unit_test_setup_teardown(deaths_return_every_byte, fresh, done),
        cmocka_unit_test_setup_teardown(silence_between_two_generations_is_none, fresh, done),
        cmocka_unit_test_setup_teardown(silence_is_reported_then_a_fault, fresh, done),
        cmocka_unit_test_setup_teardown(nonsense_is_a_fault_and_no_credit, fresh, done),
        cmocka_unit_test_setup_teardown(what_a_rank_writes_over_constants_is_nobodys_harm, fresh,
                                        done),
        cmocka_unit_test_setup_teardown(floors_and_ceilings_change_live, fresh, done),
        cmocka_unit_test_setup_teardown(sizes_are_set_together_or_not_at_all, fresh, done),
        cmocka_unit_test_setup_teardown(the_order_of_demands_changes_live, fresh, done),
        cmocka_unit_test_setup_teardown(floors_of_others_bound_a_ceiling, fresh, done),
        cmocka_unit_test_setup_teardown(a_floor_of_somebody_absent_is_kept_once_it_is_free, fresh,
                                        done),
        cmocka_unit_test_setup_teardown(trims_wait_for_their_turn, fresh, done),
        cmocka_unit_test_setup_teardown(kinds_of_demands, fresh, done),
        cmocka_unit_test_setup_teardown(refusals_and_squeezes_are_told, fresh, done),
        cmocka_unit_test_setup_teardown(nobody_grows_before_all_have_captured, fresh_gpu, done),
        cmocka_unit_test_setup_teardown(a_pool_is_never_more_than_planned, fresh_gpu, done),
        cmocka_unit_test_setup_teardown(a_device_that_is_full_leaves_the_floors, fresh_gpu, done),
        cmocka_unit_test_setup_teardown(models_that_come_later_are_counted, fresh_gpu, done),
        cmocka_unit_test_setup_teardown(an_observation_before_memory_moved_is_left_out, fresh_gpu,
                                        done),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
