/* SPDX-License-Identifier: MIT */
/* A rank's side of the channel: starting, commands, completions, reports, and ranks that switch
 * together. The daemon is played by the test. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "kv/rank.h"

typedef struct channel_fixture {
    int fd, daemon_bell, bells[3];
    kv_channel_t *channel;
    kv_group_entry_t *group;
    kv_rank_t ranks[3];
    uint32_t count;
} channel_fixture_t;

static channel_fixture_t f;

static void set_up(uint32_t ranks)
{
    memset(&f, 0, sizeof f);
    const uint64_t pool = 1u << 30;
    kv_group_plan_t plan = {.partition_count = ranks,
                            .bundle_bytes = 4096,
                            .token_bytes = 128,
                            .bundle_tokens = 32,
                            .page_tokens = 16,
                            .floor_bundles = 2,
                            .ceiling_bundles = 50,
                            .reserved_bundles = 60,
                            .elastic = true};
    assert_int_equal(kv_channel_create(7, &pool, 1, &plan, 1, &f.fd, &f.channel), XP_OK);
    assert_int_equal(kv_bell_create(&f.daemon_bell), XP_OK);
    f.group = &f.channel->groups[0];
    f.count = ranks;
    for (uint32_t i = 0; i < ranks; i++) {
        assert_int_equal(kv_bell_create(&f.bells[i]), XP_OK);
        assert_int_equal(kv_rank_open(f.fd, f.daemon_bell, f.bells[i], i, &f.ranks[i]), XP_OK);
    }
}

static void start(void)
{
    kv_group_command_publish(f.group, 1, 5, false);
    for (uint32_t i = 0; i < f.count; i++) {
        uint32_t bundles = 0;
        assert_int_equal(kv_rank_start(&f.ranks[i], &bundles), XP_OK);
        assert_int_equal(bundles, 5);
        assert_int_equal(kv_rank_ready(&f.ranks[i], 4096, 32, bundles), XP_OK);
        assert_false(kv_rank_pending(&f.ranks[i]));
    }
}

static void tear_down(void)
{
    for (uint32_t i = 0; i < f.count; i++) {
        kv_rank_close(&f.ranks[i]);
        kv_rank_close(&f.ranks[i]); /* accepts a closed one */
        close(f.bells[i]);
    }
    kv_channel_unmap(f.channel);
    close(f.fd);
    close(f.daemon_bell);
}

static bool daemon_rung(void)
{
    uint64_t count;
    return read(f.daemon_bell, &count, sizeof count) == sizeof count;
}

static void starting_confirms_the_geometry(void **state)
{
    (void)state;
    set_up(1);
    uint32_t bundles = 0;
    kv_rank_t *rank = &f.ranks[0];
    assert_int_equal(kv_rank_start(rank, &bundles), XP_PEER); /* nothing published */
    kv_group_command_publish(f.group, 1, 61, false);
    assert_int_equal(kv_rank_start(rank, &bundles), XP_PEER); /* more than is reserved */
    kv_group_command_publish(f.group, 1, 5, false);
    assert_int_equal(kv_rank_start(rank, &bundles), XP_OK);
    assert_int_equal(kv_rank_ready(rank, 8192, 64, bundles), XP_PEER);
    assert_int_equal(f.channel->partitions[0].state, KV_PARTITION_ABSENT);
    assert_int_equal(kv_rank_ready(rank, 4096, 32, bundles), XP_OK);
    assert_int_equal(f.channel->partitions[0].state, KV_PARTITION_OPEN);
    assert_int_equal(kv_partition_completion(&f.channel->partitions[0]), KV_CELL(1, 5));
    assert_true(daemon_rung());
    kv_rank_t other;
    assert_int_equal(kv_rank_open(f.fd, -1, -1, 1, &other), XP_PEER); /* no such partition */
    tear_down();
}

static void one_rank_takes_the_newest_command(void **state)
{
    (void)state;
    set_up(1);
    start();
    kv_rank_t *rank = &f.ranks[0];
    kv_command_t command;
    assert_false(kv_rank_poll(rank, 1, 0, &command));
    kv_group_command_publish(f.group, 2, 9, false);
    kv_group_command_publish(f.group, 3, 4, true); /* replaced the older one */
    assert_true(kv_rank_pending(rank));
    assert_true(kv_rank_poll(rank, 1, 0, &command));
    assert_int_equal(command.sequence, 3);
    assert_int_equal(command.bundles, 4);
    assert_true(command.trim);
    assert_false(kv_rank_pending(rank));
    assert_false(kv_rank_poll(rank, 1, 0, &command)); /* once */
    /* Nonsense is held within the geometry: page 0's bundle stays, the range is not left. */
    kv_group_command_publish(f.group, 4, 0, false);
    assert_true(kv_rank_poll(rank, 1, 0, &command));
    assert_int_equal(command.bundles, 1);
    kv_group_command_publish(f.group, 5, 4000, false);
    assert_true(kv_rank_poll(rank, 1, 0, &command));
    assert_int_equal(command.bundles, 60);
    tear_down();
}

static void completions_only_fall(void **state)
{
    (void)state;
    set_up(1);
    start();
    kv_rank_t *rank = &f.ranks[0];
    kv_command_t command;
    kv_group_command_publish(f.group, 2, 2, false);
    assert_true(kv_rank_poll(rank, 1, 4, &command));
    (void)daemon_rung();
    const uint32_t mapped[] = {4, 4, 5, 3, 3, 2};
    const uint32_t said[] = {4, 4, 4, 3, 3, 2};
    const bool rings[] = {true, false, false, true, false, true};
    for (uint32_t i = 0; i < 6; i++) {
        kv_rank_complete(rank, mapped[i]);
        assert_int_equal(kv_partition_completion(&f.channel->partitions[0]), KV_CELL(2, said[i]));
        assert_int_equal(daemon_rung(), rings[i]);
    }
    tear_down();
}

static void a_new_demand_rings_and_usage_does_not(void **state)
{
    (void)state;
    set_up(2);
    start();
    (void)daemon_rung();
    kv_rank_t *rank = &f.ranks[0];
    kv_report_t report = {.live_tokens = 3, .earliest_deadline_ns = KV_NO_DEADLINE}, seen;
    kv_rank_report(rank, &report);
    assert_false(daemon_rung());
    report.demand_kind = KV_DEMAND_PREFILL;
    report.demand_bundles = 9;
    report.demand_deadline_ns = 100;
    report.demand_since_ns = 50;
    kv_rank_report(rank, &report);
    assert_true(daemon_rung());
    report.live_tokens = 4;
    kv_rank_report(rank, &report);
    assert_false(daemon_rung());
    assert_true(kv_group_report_read(f.group, &seen));
    assert_memory_equal(&seen, &report, sizeof seen);
    /* Refusals name the demand they mean. */
    assert_false(kv_rank_refused(rank));
    f.group->refused_since_ns = 49;
    assert_false(kv_rank_refused(rank));
    f.group->refused_since_ns = 50;
    assert_true(kv_rank_refused(rank));
    report.demand_kind = KV_DEMAND_NONE;
    kv_rank_report(rank, &report);
    assert_false(kv_rank_refused(rank));
    assert_false(daemon_rung());
    report.live_tokens = 99;
    kv_rank_report(&f.ranks[1], &report); /* not the leader */
    assert_true(kv_group_report_read(f.group, &seen));
    assert_int_equal(seen.live_tokens, 4);
    tear_down();
}

static void bells_are_heard(void **state)
{
    (void)state;
    set_up(1);
    uint64_t count;
    kv_bell_ring(f.bells[0]);
    kv_rank_rung(&f.ranks[0]);
    assert_int_equal(read(kv_rank_bell(&f.ranks[0]), &count, sizeof count), -1);
    tear_down();
}

/* Three ranks whose steps differ by at most one, polled in random order, commands at random
 * moments: all apply the same goals at the same steps, and a shrink goes no further than the rank
 * that can give least. */
static void ranks_switch_together(void **state)
{
    (void)state;
    enum { RANKS = 3, COMMANDS = 400, LOG = 4096 };
    static struct {
        uint32_t step, sequence, bundles;
    } log[RANKS][LOG];
    uint32_t logged[RANKS] = {0}, step[RANKS] = {0}, least[RANKS] = {1, 1, 1}, sequence = 1;
    bool trims[COMMANDS + 1] = {false};
    set_up(RANKS);
    start();
    srand(11);
    while (sequence < COMMANDS || logged[0] == 0 || log[0][logged[0] - 1].sequence != COMMANDS) {
        if (sequence < COMMANDS && rand() % 4 == 0) {
            trims[++sequence] = rand() % 3 == 0;
            kv_group_command_publish(f.group, sequence, 1 + (uint32_t)rand() % 50, trims[sequence]);
        }
        uint32_t r = (uint32_t)rand() % RANKS, slowest = UINT32_MAX;
        for (uint32_t i = 0; i < RANKS; i++)
            slowest = step[i] < slowest ? step[i] : slowest;
        if (step[r] > slowest)
            continue; /* a step's collective waits for all of the step before */
        step[r]++;
        least[r] = 1 + (uint32_t)rand() % 20;
        const uint32_t goal = f.ranks[r].goal;
        kv_command_t command;
        if (kv_rank_poll(&f.ranks[r], step[r], least[r], &command)) {
            assert_true(logged[r] < LOG && command.sequence <= COMMANDS);
            assert_int_equal(command.trim, trims[command.sequence]);
            log[r][logged[r]].step = step[r];
            log[r][logged[r]].sequence = command.sequence;
            log[r][logged[r]++].bundles = command.bundles;
            /* What it voted for a shrink is what it can reach; the common goal is no lower. */
            uint64_t vote = kv_partition_vote_read(f.ranks[r].partition);
            if (command.bundles < goal)
                assert_true(command.bundles >= (KV_CELL_VALUE(vote) & ~KV_COMMAND_TRIM));
            kv_rank_complete(&f.ranks[r], command.bundles);
        }
    }
    /* The others are at most one step behind the last switch. */
    for (uint32_t r = 0; r < RANKS; r++)
        for (uint32_t i = 0; i < logged[r] && i < logged[0]; i++)
            assert_memory_equal(&log[r][i], &log[0][i], sizeof log[0][0]);
    assert_true(logged[0] > 20);
    assert_true(logged[1] + 1 >= logged[0] && logged[2] + 1 >= logged[0]);
    tear_down();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(starting_confirms_the_geometry),
        cmocka_unit_test(one_rank_takes_the_newest_command),
        cmocka_unit_test(completions_only_fall),
        cmocka_unit_test(a_new_demand_rings_and_usage_does_not),
        cmocka_unit_test(bells_are_heard),
        cmocka_unit_test(ranks_switch_together),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
