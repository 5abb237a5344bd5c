/* SPDX-License-Identifier: MIT */
/* Demands for a prefix cache's sake: free bytes only, after everybody else. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "kv/policy.h"

#define MIB (1ull << 20)

static kv_policy_snapshot_t s;
static kv_policy_decisions_t d;

static kv_policy_group_t *add(uint32_t mapped, uint32_t live, kv_demand_kind_t kind, uint32_t wants)
{
    kv_policy_group_t *group = &s.groups[s.group_count++];
    *group = (kv_policy_group_t){.bundle_bytes = MIB,
                                 .member_count = 1,
                                 .floor_bundles = 1,
                                 .floor_wanted = 1,
                                 .ceiling_bundles = 100,
                                 .mapped_bundles = mapped,
                                 .goal_bundles = mapped,
                                 .present = true,
                                 .answered = true,
                                 .demand_kind = kind,
                                 .demand_bundles = wants,
                                 .live_bundles = live,
                                 .idle = live == 0,
                                 .demand_deadline_ns = KV_NO_DEADLINE,
                                 .demand_since_ns = 1,
                                 .earliest_deadline_ns = KV_NO_DEADLINE,
                                 .last_activity_ns = 1};
    return group;
}

/* The bundles that `group` was told to have; 0: nothing. */
static uint32_t told(uint32_t group)
{
    for (uint32_t i = 0; i < d.command_count; i++)
        if (d.commands[i].group == group)
            return d.commands[i].bundles;
    return 0;
}

static int set_up(void **state)
{
    (void)state;
    memset(&s, 0, sizeof s);
    s.now_ns = 1000 * 1000000000ull; /* everything that waits is overdue by now */
    s.patience_ns = 1000;
    s.pool_count = 1;
    s.pool_bytes[0] = 100 * MIB;
    return 0;
}

static void free_bytes_are_given(void **state)
{
    (void)state;
    add(10, 5, KV_DEMAND_CACHE, 60);
    add(40, 0, KV_DEMAND_NONE, 0);
    kv_policy_decide(&s, &d);
    assert_int_equal(told(0), 60);
    assert_int_equal(d.command_count, 1);
}

static void nobody_gives_for_a_cache(void **state)
{
    (void)state;
    add(10, 5, KV_DEMAND_CACHE, 61);
    add(40, 0, KV_DEMAND_NONE, 0);
    add(1, 0, KV_DEMAND_NONE, 0);
    kv_policy_decide(&s, &d);
    assert_int_equal(d.command_count, 0);
    assert_true(d.refused[0]);
    assert_false(d.squeezed[1] || d.squeezed[2]);
}

static void those_who_wait_go_first(void **state)
{
    (void)state;
    for (s.mode = KV_POLICY_DEADLINE; s.mode <= KV_POLICY_ARRIVAL; s.mode++) {
        s.group_count = 0;
        add(10, 5, KV_DEMAND_CACHE, 60);
        kv_policy_group_t *waits = add(40, 40, KV_DEMAND_PREFILL, 80);
        waits->demand_since_ns = s.now_ns; /* later, and not overdue */
        kv_policy_decide(&s, &d);
        assert_int_equal(told(1), 80);
        assert_int_equal(told(0), 0);
        assert_true(d.refused[0]);
    }
}

static void a_cache_that_grew_is_a_donor_at_once(void **state)
{
    (void)state;
    kv_policy_group_t *grown = add(90, 5, KV_DEMAND_CACHE, 60);
    grown->granted_ns = s.now_ns - 1;
    s.hold_ns = 1000000000;
    add(10, 10, KV_DEMAND_DECODE, 60);
    kv_policy_decide(&s, &d);
    assert_int_equal(told(0), 40);
}

static void a_raised_floor_is_not_held_up_by_it(void **state)
{
    (void)state;
    kv_policy_group_t *group = add(10, 5, KV_DEMAND_CACHE, 90);
    group->floor_wanted = 20;
    add(60, 60, KV_DEMAND_NONE, 0);
    kv_policy_decide(&s, &d);
    assert_int_equal(told(0), 20);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(free_bytes_are_given, set_up),
        cmocka_unit_test_setup(nobody_gives_for_a_cache, set_up),
        cmocka_unit_test_setup(those_who_wait_go_first, set_up),
        cmocka_unit_test_setup(a_cache_that_grew_is_a_donor_at_once, set_up),
        cmocka_unit_test_setup(a_raised_floor_is_not_held_up_by_it, set_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
