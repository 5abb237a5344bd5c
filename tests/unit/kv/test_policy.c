/* SPDX-License-Identifier: MIT */
/* The KV policy over single snapshots: who is served, from whom, and what is refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "kv/policy.h"

#define MS 1000000ull

static kv_policy_snapshot_t s;
static kv_policy_decisions_t d;

static int fresh(void **state)
{
    (void)state;
    memset(&s, 0, sizeof(s));
    s.now_ns = 10000 * MS;
    s.patience_ns = 5000 * MS;
    s.hold_ns = 100 * MS;
    s.pool_count = 1;
    s.pool_bytes[0] = 100;
    return 0;
}

/* One bundle is one byte. A group with `mapped` bundles of which requests use `live`. */
static kv_policy_group_t *add(uint32_t mapped, uint32_t live)
{
    kv_policy_group_t *group = &s.groups[s.group_count++];
    *group = (kv_policy_group_t){.bundle_bytes = 1,
                                 .member_count = 1,
                                 .floor_bundles = 5,
                                 .floor_wanted = 5,
                                 .ceiling_bundles = 90,
                                 .mapped_bundles = mapped,
                                 .goal_bundles = mapped,
                                 .live_bundles = live,
                                 .present = true,
                                 .answered = true,
                                 .idle = live == 0,
                                 .earliest_deadline_ns = KV_NO_DEADLINE,
                                 .last_activity_ns = 1};
    return group;
}

static void wants(kv_policy_group_t *group, uint32_t bundles, int64_t due_ms)
{
    group->demand_kind = KV_DEMAND_PREFILL;
    group->demand_bundles = bundles;
    group->demand_since_ns = s.now_ns - 100 * MS;
    group->demand_deadline_ns = (uint64_t)((int64_t)s.now_ns + due_ms * (int64_t)MS);
    group->idle = false;
}

/* Its demand has waited so long that others wait for it. */
static void starves(kv_policy_group_t *group)
{
    group->demand_since_ns = s.now_ns - s.patience_ns;
}

/* The command that `group` got, 0 for none. */
static uint32_t told(uint32_t group)
{
    for (uint32_t c = 0; c < d.command_count; c++)
        if (d.commands[c].group == group)
            return d.commands[c].bundles;
    return 0;
}

static void free_bytes_come_first(void **state)
{
    wants(add(10, 10), 40, 50);
    add(50, 0);
    kv_policy_decide(&s, &d);
    assert_int_equal(d.command_count, 1);
    assert_int_equal(told(0), 40);
    assert_int_equal(d.commands[0].reason, KV_REASON_GRANT);
}

static void idle_donors_give_before_busy_ones(void **state)
{
    wants(add(10, 10), 40, 50);
    add(40, 10)->earliest_deadline_ns = s.now_ns + 9000 * MS;
    add(30, 0);
    kv_policy_decide(&s, &d);
    /* 20 are free, 30 are wanted: 10 from the idle one, however patient the busy one is. */
    assert_int_equal(d.command_count, 1);
    assert_int_equal(told(2), 20);
    assert_int_equal(d.commands[0].for_group, 0);
    assert_false(d.refused[0]);
}

static void the_longest_idle_gives_first(void **state)
{
    wants(add(10, 10), 20, 50);
    add(45, 0)->last_activity_ns = 50;
    add(45, 0)->last_activity_ns = 40;
    kv_policy_decide(&s, &d);
    assert_int_equal(told(2), 35);
    assert_int_equal(told(1), 0);
}

static void the_latest_deadline_gives_first(void **state)
{
    wants(add(10, 10), 20, 50);
    add(45, 10)->earliest_deadline_ns = s.now_ns + 10 * MS;
    add(45, 10)->earliest_deadline_ns = s.now_ns + 20 * MS;
    kv_policy_decide(&s, &d);
    assert_int_equal(told(2), 35);
    assert_int_equal(told(1), 0);
}

static void floors_and_live_requests_stay(void **state)
{
    wants(add(10, 10), 85, 50);
    add(45, 0);
    add(45, 20);
    kv_policy_decide(&s, &d);
    /* 40 and 25 can be had; 75 are wanted. */
    assert_int_equal(d.command_count, 0);
    assert_true(d.refused[0]);
    s.groups[0].demand_bundles = 75;
    kv_policy_decide(&s, &d);
    assert_int_equal(told(1), 5);
    assert_int_equal(told(2), 20);
    assert_false(d.refused[0]);
}

static void an_absent_instance_keeps_its_floor(void **state)
{
    wants(add(10, 10), 90, 50);
    kv_policy_group_t *absent = add(0, 0);
    absent->present = absent->answered = false;
    absent->floor_bundles = absent->floor_wanted = 11;
    kv_policy_decide(&s, &d);
    assert_int_equal(d.command_count, 0);
    s.groups[0].demand_bundles = 89;
    kv_policy_decide(&s, &d);
    assert_int_equal(told(0), 89);
}

static void the_earliest_deadline_is_served_first(void **state)
{
    wants(add(20, 20), 60, 90);
    wants(add(20, 20), 60, 30);
    kv_policy_decide(&s, &d);
    assert_int_equal(told(1), 60);
    assert_int_equal(told(0), 0);
    s.mode = KV_POLICY_ARRIVAL;
    s.groups[0].demand_since_ns -= MS;
    kv_policy_decide(&s, &d);
    assert_int_equal(told(0), 60);
    assert_int_equal(told(1), 0);
    s.mode = KV_POLICY_STATIC;
    kv_policy_decide(&s, &d);
    assert_int_equal(d.command_count, 0);
}

static void overdue_ones_go_by_the_oldest_grant(void **state)
{
    wants(add(10, 10), 50, 1);
    wants(add(10, 10), 70, -500);
    wants(add(10, 10), 70, -10);
    s.groups[1].granted_ns = s.now_ns - 300 * MS;
    s.groups[2].granted_ns = s.now_ns - 900 * MS;
    kv_policy_decide(&s, &d);
    assert_int_equal(told(2), 70);
    assert_int_equal(told(1), 0);
    assert_int_equal(told(0), 0);
}

static void patience_makes_overdue(void **state)
{
    wants(add(20, 20), 60, 90);
    wants(add(20, 20), 60, 0);
    s.groups[1].demand_deadline_ns = KV_NO_DEADLINE;
    kv_policy_decide(&s, &d);
    assert_int_equal(told(0), 60);
    s.groups[1].demand_since_ns = s.now_ns - s.patience_ns;
    kv_policy_decide(&s, &d);
    assert_int_equal(told(1), 60);
}

static void both_sizes_count_while_an_operation_is_open(void **state)
{
    wants(add(10, 10), 30, 50);
    kv_policy_group_t *other = add(10, 10);
    other->goal_bundles = 80; /* grows: has not answered */
    other->answered = false;
    kv_policy_decide(&s, &d);
    assert_int_equal(d.command_count, 0);
    other->goal_bundles = 20;
    other->mapped_bundles = 80; /* shrinks: has not answered */
    kv_policy_decide(&s, &d);
    assert_int_equal(d.command_count, 0);
    assert_false(d.refused[0]); /* it is on its way */
    other->mapped_bundles = 20;
    other->answered = true;
    kv_policy_decide(&s, &d);
    assert_int_equal(told(0), 30);
}

static void one_attempt_at_a_time_on_a_pool(void **state)
{
    wants(add(10, 10), 40, 50);
    kv_policy_group_t *slow = add(30, 10), *other = add(60, 0);
    slow->goal_bundles = 20; /* 10 are on their way, 30 are wanted */
    slow->answered = false;
    kv_policy_decide(&s, &d);
    assert_int_equal(d.command_count, 0);
    assert_false(d.refused[0]);
    slow->mapped_bundles = 20;
    slow->answered = true;
    kv_policy_decide(&s, &d);
    assert_int_equal(told(2), 40);
    (void)other;
}

static void disjoint_pools_proceed(void **state)
{
    s.pool_count = 2;
    s.pool_bytes[1] = 100;
    wants(add(10, 10), 40, 50);
    add(30, 10);
    add(60, 0);
    s.groups[1].goal_bundles = 20;
    s.groups[1].answered = false;
    wants(add(10, 10), 40, 50);
    add(90, 0);
    s.groups[3].pools[0] = s.groups[4].pools[0] = 1;
    kv_policy_decide(&s, &d);
    assert_int_equal(d.command_count, 1);
    assert_int_equal(told(4), 60);
}

static void groups_may_span_pools(void **state)
{
    s.pool_count = 2;
    s.pool_bytes[1] = 60;
    kv_policy_group_t *wide = add(10, 10);
    wide->member_count = 2;
    wide->pools[1] = 1;
    wants(wide, 50, 20);
    add(60, 0);
    add(30, 0)->pools[0] = 1;
    kv_policy_decide(&s, &d);
    /* Pool 0 has 30 free, pool 1 has 20; 40 are wanted on both. */
    assert_int_equal(told(1), 50);
    assert_int_equal(told(2), 10);
    s.groups[2].live_bundles = 25; /* now pool 1 cannot give it: pool 0 is not asked */
    s.groups[2].idle = false;
    kv_policy_decide(&s, &d);
    assert_int_equal(d.command_count, 0);
    assert_true(d.refused[0]);
}

static void a_fresh_grant_is_not_taken_back(void **state)
{
    wants(add(10, 10), 60, -1);
    kv_policy_group_t *granted = add(60, 10);
    wants(granted, 60, 50);
    granted->granted_ns = s.now_ns - MS;
    add(10, 10);
    kv_policy_decide(&s, &d);
    assert_int_equal(d.command_count, 0);
    assert_true(d.refused[0]);
    granted->granted_ns = s.now_ns - s.hold_ns;
    kv_policy_decide(&s, &d);
    assert_int_equal(told(1), 30);
}

static void who_is_being_met_gives_nothing(void **state)
{
    kv_policy_group_t *first = add(40, 10);
    wants(first, 50, 10);
    wants(add(30, 30), 60, 20);
    add(30, 30);
    kv_policy_decide(&s, &d); /* the first cannot be met: what it does not use is the second's */
    assert_true(d.refused[0]);
    assert_int_equal(told(0), 10);
    s.groups[1].live_bundles = 20;
    kv_policy_decide(&s, &d); /* the first gets them */
    assert_int_equal(d.command_count, 1);
    assert_int_equal(told(1), 20);
    assert_int_equal(d.commands[0].for_group, 0);
}

/* Overload makes every queue late: who is late by more than its target has nothing left to keep,
 * and goes behind those who have. */
static void what_is_late_goes_last(void **state)
{
    kv_policy_group_t *late = add(10, 10);
    wants(late, 70, -70); /* of a target of 30 */
    wants(add(10, 10), 70, 20);
    kv_policy_decide(&s, &d);
    assert_int_equal(told(1), 70);
    assert_int_equal(told(0), 0);
    late->demand_deadline_ns = s.now_ns - 40 * MS; /* of 60 */
    kv_policy_decide(&s, &d);
    assert_int_equal(told(0), 70);
    late->demand_deadline_ns = s.now_ns - 70 * MS;
    late->demand_kind = KV_DEMAND_DECODE; /* live work has no such target */
    kv_policy_decide(&s, &d);
    assert_int_equal(told(0), 70);
}

static void late_ones_go_by_arrival(void **state)
{
    wants(add(10, 10), 70, -60);
    wants(add(10, 10), 70, -55);
    s.groups[1].demand_since_ns -= MS;
    s.groups[0].granted_ns = s.now_ns - 900 * MS;
    s.groups[1].granted_ns = s.now_ns - 300 * MS;
    kv_policy_decide(&s, &d);
    assert_int_equal(told(1), 70);
    assert_int_equal(told(0), 0);
}

static void who_starves_goes_first(void **state)
{
    wants(add(10, 10), 70, -5);
    kv_policy_group_t *starved = add(10, 10);
    wants(starved, 70, -88);
    starved->demand_since_ns += MS; /* 99 ms ago, of a target of 11 */
    s.groups[0].granted_ns = s.now_ns - 900 * MS;
    kv_policy_decide(&s, &d);
    assert_int_equal(told(1), 70);
    starved->granted_ns = s.now_ns - 80 * MS; /* it was given something since then */
    kv_policy_decide(&s, &d);
    assert_int_equal(told(1), 0);
    assert_int_equal(told(0), 70);
}

static void a_starving_demand_keeps_its_pool(void **state)
{
    wants(add(10, 10), 80, -1);
    add(60, 60)->earliest_deadline_ns = s.now_ns + MS;
    kv_policy_group_t *small = add(10, 10);
    wants(small, 12, 20);
    kv_policy_decide(&s, &d); /* merely overdue: what it cannot have is not withheld from others */
    assert_true(d.refused[0]);
    assert_false(d.squeezed[1]);
    assert_int_equal(told(2), 12);
    starves(&s.groups[0]);
    kv_policy_decide(&s, &d);
    assert_true(d.refused[0]);
    assert_true(d.squeezed[1]);
    assert_int_equal(d.command_count, 0); /* a later prefill gets nothing, though 20 are free */
    assert_true(d.refused[2]);
    small->demand_kind = KV_DEMAND_DECODE; /* live work goes on */
    kv_policy_decide(&s, &d);
    assert_int_equal(told(2), 12);
}

static void a_demand_that_floors_forbid_is_refused_alone(void **state)
{
    kv_policy_group_t *greedy = add(10, 10);
    wants(greedy, 90, -1);
    starves(greedy);
    add(10, 10)->floor_bundles = 15;
    wants(add(10, 10), 30, 20);
    kv_policy_decide(&s, &d);
    assert_true(d.refused[0]);
    assert_int_equal(told(2), 30);
    for (uint32_t g = 0; g < 3; g++)
        assert_false(d.squeezed[g]);
}

static void only_as_many_as_needed_are_squeezed_and_the_same_again(void **state)
{
    wants(add(10, 10), 40, -1);
    starves(&s.groups[0]);
    add(45, 45)->earliest_deadline_ns = s.now_ns + 50 * MS;
    add(45, 45)->earliest_deadline_ns = s.now_ns + 60 * MS;
    kv_policy_decide(&s, &d);
    assert_false(d.squeezed[1]);
    assert_true(d.squeezed[2]);
    s.groups[2].squeezed = true;
    s.groups[2].earliest_deadline_ns = s.now_ns + MS; /* its deadlines move */
    kv_policy_decide(&s, &d);
    assert_false(d.squeezed[1]);
    assert_true(d.squeezed[2]);
}

static void a_lowered_ceiling_is_reached(void **state)
{
    kv_policy_group_t *group = add(50, 30);
    group->ceiling_bundles = 20;
    kv_policy_decide(&s, &d);
    assert_int_equal(told(0), 30);
    assert_int_equal(d.commands[0].reason, KV_REASON_CEILING);
    group->live_bundles = 2;
    kv_policy_decide(&s, &d);
    assert_int_equal(told(0), 20);
}

static void a_raised_floor_is_funded_first(void **state)
{
    wants(add(40, 40), 50, -1);
    kv_policy_group_t *group = add(10, 10);
    group->floor_wanted = 50;
    add(50, 10)->earliest_deadline_ns = s.now_ns;
    kv_policy_decide(&s, &d);
    assert_int_equal(told(2), 10);
    assert_int_equal(d.commands[0].for_group, 1);
}

/* A donor whose queue never ends, and a demand that needs its memory: with the squeeze the demand
 * waits for the donor's live requests and no longer. */
static uint32_t rounds_until_met(bool squeeze)
{
    uint64_t ends[10];
    fresh(NULL);
    wants(add(10, 10), 60, -1);
    starves(&s.groups[0]);
    add(90, 90);
    for (uint32_t r = 0; r < 10; r++)
        ends[r] = s.now_ns + (r + 1) * 10 * MS;
    for (uint32_t round = 1; round <= 200; round++) {
        s.now_ns += 10 * MS;
        kv_policy_decide(&s, &d);
        for (uint32_t c = 0; c < d.command_count; c++) {
            kv_policy_group_t *group = &s.groups[d.commands[c].group];
            group->goal_bundles = group->mapped_bundles = d.commands[c].bundles;
            if (d.commands[c].group == 0)
                return round;
        }
        s.groups[1].squeezed = d.squeezed[1];
        uint32_t live = 0; /* ten requests of nine bundles; each that ends is followed by another */
        for (uint32_t r = 0; r < 10; r++) {
            bool admits = !(squeeze && d.squeezed[1]) && s.groups[1].goal_bundles >= 90;
            if (ends[r] <= s.now_ns && admits)
                ends[r] = s.now_ns + 100 * MS;
            live += ends[r] > s.now_ns ? 9 : 0;
        }
        s.groups[1].live_bundles = live;
    }
    return 0;
}

static void a_busy_donor_does_not_starve_a_demand(void **state)
{
    uint32_t rounds = rounds_until_met(true);
    assert_in_range(rounds, 1, 12);               /* the longest live request lasts ten */
    assert_int_equal(rounds_until_met(false), 0); /* it is the squeeze that does it */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(free_bytes_come_first, fresh),
        cmocka_unit_test_setup(idle_donors_give_before_busy_ones, fresh),
        cmocka_unit_test_setup(the_longest_idle_gives_first, fresh),
        cmocka_unit_test_setup(the_latest_deadline_gives_first, fresh),
        cmocka_unit_test_setup(floors_and_live_requests_stay, fresh),
        cmocka_unit_test_setup(an_absent_instance_keeps_its_floor, fresh),
        cmocka_unit_test_setup(the_earliest_deadline_is_served_first, fresh),
        cmocka_unit_test_setup(overdue_ones_go_by_the_oldest_grant, fresh),
        cmocka_unit_test_setup(patience_makes_overdue, fresh),
        cmocka_unit_test_setup(both_sizes_count_while_an_operation_is_open, fresh),
        cmocka_unit_test_setup(one_attempt_at_a_time_on_a_pool, fresh),
        cmocka_unit_test_setup(disjoint_pools_proceed, fresh),
        cmocka_unit_test_setup(groups_may_span_pools, fresh),
        cmocka_unit_test_setup(a_fresh_grant_is_not_taken_back, fresh),
        cmocka_unit_test_setup(who_is_being_met_gives_nothing, fresh),
        cmocka_unit_test_setup(a_starving_demand_keeps_its_pool, fresh),
        cmocka_unit_test_setup(what_is_late_goes_last, fresh),
        cmocka_unit_test_setup(late_ones_go_by_arrival, fresh),
        cmocka_unit_test_setup(who_starves_goes_first, fresh),
        cmocka_unit_test_setup(a_demand_that_floors_forbid_is_refused_alone, fresh),
        cmocka_unit_test_setup(only_as_many_as_needed_are_squeezed_and_the_same_again, fresh),
        cmocka_unit_test_setup(a_lowered_ceiling_is_reached, fresh),
        cmocka_unit_test_setup(a_raised_floor_is_funded_first, fresh),
        cmocka_unit_test_setup(a_busy_donor_does_not_starve_a_demand, fresh),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
