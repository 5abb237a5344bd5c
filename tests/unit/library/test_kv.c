/* SPDX-License-Identifier: MIT */
/* xpool_kv_*: the range, commands of a group of one and of two ranks, answers, reports, and what is
 * refused. The test plays the daemon. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "kv/channel.h"
#include "library/private.h"

enum { TOKEN_BYTES = 128, BUNDLE_TOKENS = 32, FLOOR = 2, CEILING = 50, RESERVED = 60 };
#define TOKENS(bundles) ((uint32_t)((bundles)*BUNDLE_TOKENS))

typedef struct fixture {
    int fd, daemon_bell, bells[2];
    kv_channel_t *channel;
    kv_group_entry_t *group;
    xpool_kv_t *kvs[2];
    uint32_t sequence;
} fixture_t;

static fixture_t f;

static uint64_t room_left;

static uint64_t room(void *context)
{
    return room_left;
}

static library_kv_place_t place(uint32_t rank)
{
    return (library_kv_place_t){.channel_fd = f.fd,
                                .daemon_bell = f.daemon_bell,
                                .bell = f.bells[rank],
                                .partition = rank,
                                .room_bytes = room,
                                .name = "xpool-kv:test"};
}

static void make_channel(uint32_t ranks)
{
    const uint64_t pool = 1u << 30;
    kv_group_plan_t plan = {.partition_count = ranks,
                            .bundle_bytes = BUNDLE_TOKENS * TOKEN_BYTES,
                            .token_bytes = TOKEN_BYTES,
                            .bundle_tokens = BUNDLE_TOKENS,
                            .page_tokens = 16,
                            .floor_bundles = FLOOR,
                            .ceiling_bundles = CEILING,
                            .reserved_bundles = RESERVED,
                            .elastic = true};
    memset(&f, 0, sizeof(f));
    room_left = UINT64_MAX;
    assert_int_equal(kv_channel_create(7, &pool, 1, &plan, 1, &f.fd, &f.channel), XP_OK);
    assert_int_equal(kv_bell_create(&f.daemon_bell), XP_OK);
    for (uint32_t r = 0; r < ranks; r++)
        assert_int_equal(kv_bell_create(&f.bells[r]), XP_OK);
    f.group = &f.channel->groups[0];
}

static void command(uint32_t bundles, bool trim)
{
    kv_group_command_publish(f.group, ++f.sequence, bundles, trim);
}

static void start(uint32_t ranks)
{
    make_channel(ranks);
    command(FLOOR, false);
    for (uint32_t r = 0; r < ranks; r++) {
        library_kv_place_t at = place(r);
        assert_int_equal(library_kv_open(&at, TOKEN_BYTES, &f.kvs[r]), XP_OK);
    }
}

static int tear_down(void **state)
{
    for (uint32_t r = 0; r < 2; r++) {
        xpool_kv_close(f.kvs[r]);
        if (f.bells[r] > 0)
            close(f.bells[r]);
    }
    close(f.fd);
    close(f.daemon_bell);
    kv_channel_unmap(f.channel);
    return 0;
}

static xpool_kv_info_t info(uint32_t rank)
{
    xpool_kv_info_t out = {.struct_bytes = sizeof(out)};
    assert_int_equal(xpool_kv_info(f.kvs[rank], &out), XPOOL_OK);
    return out;
}

static xpool_status_t poll_rank(uint32_t rank, uint32_t step, uint32_t least,
                                xpool_kv_command_t *out)
{
    *out = (xpool_kv_command_t){.struct_bytes = sizeof(*out)};
    return xpool_kv_poll(f.kvs[rank], step, least, out);
}

static void expect_completion(uint32_t rank, uint32_t bundles)
{
    uint64_t cell = kv_partition_completion(&f.channel->partitions[rank]);
    assert_int_equal(KV_CELL_SEQUENCE(cell), f.sequence);
    assert_int_equal(KV_CELL_VALUE(cell), bundles);
}

static void test_range(void **state)
{
    start(1);
    xpool_kv_info_t at = info(0);
    assert_int_equal(at.elastic, 1);
    assert_int_equal(at.leader, 1);
    assert_int_equal(at.token_bytes, TOKEN_BYTES);
    assert_int_equal(at.bundle_tokens, BUNDLE_TOKENS);
    assert_int_equal(at.reserved_tokens, TOKENS(RESERVED));
    assert_int_equal(at.floor_tokens, TOKENS(FLOOR));
    assert_int_equal(at.ceiling_tokens, TOKENS(CEILING));
    assert_int_equal(at.mapped_tokens, TOKENS(FLOOR));
    assert_true(at.reserved_bytes >= (uint64_t)TOKENS(RESERVED) * TOKEN_BYTES);
    memset(at.address, 7, (size_t)at.mapped_tokens * TOKEN_BYTES);
    expect_completion(0, FLOOR);
    assert_int_equal(f.channel->partitions[0].state, KV_PARTITION_OPEN);
}

static void test_grow_and_shrink(void **state)
{
    xpool_kv_command_t out;
    start(1);
    assert_int_equal(poll_rank(0, 1, 0, &out), XPOOL_RETRY);
    command(10, false);
    kv_bell_ring(f.bells[0]);
    assert_int_equal(poll_rank(0, 2, 0, &out), XPOOL_OK);
    assert_int_equal(out.order, XPOOL_KV_GROW);
    assert_int_equal(out.tokens, TOKENS(10));
    assert_int_equal(out.trim, 0);
    expect_completion(0, 10);
    assert_int_equal(xpool_kv_release(f.kvs[0], out.tokens), XPOOL_OK);
    assert_int_equal(poll_rank(0, 3, 0, &out), XPOOL_RETRY);
    uint64_t count;
    assert_int_equal(read(f.bells[0], &count, sizeof(count)), -1); /* emptied */

    uint8_t *memory = info(0).address;
    memset(memory, 7, (size_t)TOKENS(10) * TOKEN_BYTES);
    command(3, true);
    assert_int_equal(poll_rank(0, 4, 0, &out), XPOOL_OK);
    assert_int_equal(out.order, XPOOL_KV_SHRINK);
    assert_int_equal(out.tokens, TOKENS(3));
    assert_int_equal(out.trim, 1);
    /* Live requests have more: that is said at once, and later what they have left. */
    assert_int_equal(xpool_kv_release(f.kvs[0], TOKENS(6) - 5), XPOOL_OK);
    expect_completion(0, 6);
    assert_int_equal(info(0).mapped_tokens, TOKENS(6));
    assert_int_equal(xpool_kv_release(f.kvs[0], TOKENS(3)), XPOOL_OK);
    expect_completion(0, 3);

    /* What comes back shows nothing of what was there. */
    command(10, false);
    assert_int_equal(poll_rank(0, 5, 0, &out), XPOOL_OK);
    for (size_t i = (size_t)TOKENS(3) * TOKEN_BYTES; i < (size_t)TOKENS(10) * TOKEN_BYTES; i++)
        assert_int_equal(memory[i], 0);
    assert_int_equal(memory[0], 7);
    assert_ptr_equal(info(0).address, memory);
}

/* Memory that the machine does not have would end the process at its first use. */
static void test_no_room(void **state)
{
    xpool_kv_command_t out;
    start(1);
    room_left = 1 << 20;
    command(10, false);
    assert_int_equal(poll_rank(0, 1, 0, &out), XPOOL_OK);
    assert_int_equal(out.tokens, TOKENS(FLOOR));
    expect_completion(0, FLOOR);
}

/* The daemon rings too when no command came of it. */
static void test_words_without_a_command(void **state)
{
    xpool_kv_command_t out;
    uint64_t rung;
    start(1);
    assert_int_equal(info(0).admit_tokens, UINT32_MAX);
    f.group->admit_bundles = FLOOR;
    kv_bell_ring(f.bells[0]);
    assert_int_equal(poll_rank(0, 1, 0, &out), XPOOL_RETRY);
    assert_int_equal(read(f.bells[0], &rung, sizeof(rung)), -1); /* else a loop would spin on it */
    assert_int_equal(info(0).admit_tokens, TOKENS(FLOOR));
    f.group->admit_bundles = 1u << 31;
    assert_int_equal(info(0).admit_tokens, UINT32_MAX);
}

static void test_newest_command_counts(void **state)
{
    xpool_kv_command_t out;
    start(1);
    command(10, false);
    command(4, false);
    assert_int_equal(poll_rank(0, 1, 0, &out), XPOOL_OK);
    assert_int_equal(out.tokens, TOKENS(4));
    expect_completion(0, 4);
    command(4, true); /* only the prefix cache is to go */
    assert_int_equal(poll_rank(0, 2, 0, &out), XPOOL_OK);
    assert_int_equal(out.order, XPOOL_KV_SHRINK);
    assert_int_equal(out.tokens, TOKENS(4));
    assert_int_equal(out.trim, 1);
    assert_int_equal(xpool_kv_release(f.kvs[0], out.tokens), XPOOL_OK);
    expect_completion(0, 4);
}

/* Both ranks, step by step: a shrink reaches both at one step, a grow is told to rank 0 when both
 * have mapped it. */
static void test_two_ranks(void **state)
{
    xpool_kv_command_t out;
    uint32_t step = 0, told = 0, switched[2] = {0, 0};
    start(2);
    assert_int_equal(info(0).leader, 1);
    assert_int_equal(info(1).leader, 0);
    command(10, false);
    for (; step < 12 && !told; step++) {
        /* Rank 1 is a step behind. */
        if (poll_rank(0, step, 0, &out) == XPOOL_OK) {
            assert_int_equal(out.order, XPOOL_KV_GROW);
            assert_int_equal(out.tokens, TOKENS(10));
            expect_completion(1, 10);
            told = step;
        }
        xpool_kv_command_t other;
        if (step > 0)
            assert_int_equal(poll_rank(1, step - 1, 0, &other), XPOOL_RETRY);
        for (uint32_t r = 0; r < 2; r++)
            if (!switched[r] && info(r).goal_tokens == TOKENS(10))
                switched[r] = step - r;
    }
    assert_true(told > 0);
    /* Each rank sees from the same step on that memory has come, though only rank 0 is told. */
    assert_true(switched[0] > 0 && switched[0] < told);
    assert_int_equal(switched[0], switched[1]);
    for (uint32_t r = 0; r < 2; r++)
        assert_int_equal(xpool_kv_release(f.kvs[r], TOKENS(10)), XPOOL_OK);

    uint32_t steps[2] = {0, 0};
    command(2, false);
    for (uint32_t end = step + 12; step < end; step++)
        for (uint32_t r = 0; r < 2; r++)
            if (poll_rank(r, step - r, TOKENS(5) - 3, &out) == XPOOL_OK) {
                assert_int_equal(out.order, XPOOL_KV_SHRINK);
                assert_int_equal(out.tokens, TOKENS(5)); /* what live requests can reach */
                steps[r] = step - r;
                assert_int_equal(xpool_kv_release(f.kvs[r], out.tokens), XPOOL_OK);
                expect_completion(r, 5);
            }
    assert_true(steps[0] > 0);
    assert_int_equal(steps[0], steps[1]);
}

static void test_reports(void **state)
{
    kv_report_t seen;
    xpool_kv_report_t report = {.struct_bytes = sizeof(report),
                                .demand = XPOOL_KV_DECODE,
                                .demand_tokens = TOKENS(7) + 1,
                                .demand_deadline_ns = 900,
                                .demand_since_ns = 800,
                                .live_tokens = TOKENS(1) + 1,
                                .cached_tokens = 9,
                                .running = 2,
                                .waiting = 1,
                                .last_activity_ns = 700,
                                .earliest_deadline_ns = 950};
    start(1);
    uint64_t rung;
    (void)!read(f.daemon_bell, &rung, sizeof(rung));
    assert_int_equal(xpool_kv_report(f.kvs[0], &report), XPOOL_OK);
    assert_true(kv_group_report_read(f.group, &seen));
    assert_int_equal(seen.demand_kind, KV_DEMAND_DECODE);
    assert_int_equal(seen.demand_bundles, 8);
    assert_int_equal(seen.demand_deadline_ns, 900);
    assert_int_equal(seen.live_bundles, 2);
    assert_int_equal(seen.live_tokens, TOKENS(1) + 1);
    assert_int_equal(seen.cached_tokens, 9);
    assert_int_equal(seen.running, 2);
    assert_int_equal(seen.waiting, 1);
    assert_int_equal(seen.last_activity_ns, 700);
    assert_int_equal(seen.earliest_deadline_ns, 950);
    assert_int_equal(read(f.daemon_bell, &rung, sizeof(rung)), sizeof(rung));

    assert_false(xpool_kv_refused(f.kvs[0]));
    PROTOCOL_PUBLISH(&f.group->refused_since_ns, (uint64_t)800);
    assert_true(xpool_kv_refused(f.kvs[0]));

    report.demand_tokens = UINT32_MAX; /* no more than there can be */
    assert_int_equal(xpool_kv_report(f.kvs[0], &report), XPOOL_OK);
    assert_true(kv_group_report_read(f.group, &seen));
    assert_int_equal(seen.demand_bundles, CEILING);
    report.demand = XPOOL_KV_NONE;
    assert_int_equal(xpool_kv_report(f.kvs[0], &report), XPOOL_OK);
    assert_true(kv_group_report_read(f.group, &seen));
    assert_int_equal(seen.demand_kind, KV_DEMAND_NONE);
    assert_int_equal(seen.demand_bundles, 0);
    report.demand = 3;
    assert_int_equal(xpool_kv_report(f.kvs[0], &report), XPOOL_INVALID);
}

static void test_refusals(void **state)
{
    xpool_kv_t *kv = NULL;
    make_channel(1);
    library_kv_place_t at = place(0);
    assert_int_equal(library_kv_open(&at, TOKEN_BYTES, &kv), XP_PEER); /* no first command */
    command(FLOOR, false);
    assert_int_equal(library_kv_open(&at, TOKEN_BYTES + 4, &kv), XP_INVALID);
    assert_non_null(strstr(xpool_error(), "132 bytes in the engine and 128 in the plan"));
    at.partition = 5;
    assert_int_equal(library_kv_open(&at, TOKEN_BYTES, &kv), XP_PEER);
    assert_null(kv);
    at = place(0);
    assert_int_equal(library_kv_open(&at, TOKEN_BYTES, &f.kvs[0]), XP_OK);
    assert_int_equal(xpool_kv_release(f.kvs[0], 0), XPOOL_INVALID);
    assert_int_equal(xpool_kv_release(f.kvs[0], TOKENS(FLOOR) + 1), XPOOL_INVALID);
    assert_int_equal(xpool_kv_poll(f.kvs[0], 0, 0, NULL), XPOOL_INVALID);
    xpool_kv_info_t small = {.struct_bytes = 8};
    assert_int_equal(xpool_kv_info(f.kvs[0], &small), XPOOL_INVALID);
    assert_int_equal(xpool_kv_open(NULL, NULL, &kv), XPOOL_INVALID);
    xpool_kv_close(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_range, tear_down),
        cmocka_unit_test_teardown(test_grow_and_shrink, tear_down),
        cmocka_unit_test_teardown(test_no_room, tear_down),
        cmocka_unit_test_teardown(test_words_without_a_command, tear_down),
        cmocka_unit_test_teardown(test_newest_command_counts, tear_down),
        cmocka_unit_test_teardown(test_two_ranks, tear_down),
        cmocka_unit_test_teardown(test_reports, tear_down),
        cmocka_unit_test_teardown(test_refusals, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
