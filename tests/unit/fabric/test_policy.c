/* SPDX-License-Identifier: MIT */
/* Lane admission policies: order, ties, seeds, and that nobody starves. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "fabric/policy.h"

static void test_fifo(void **state)
{
    uint64_t random = 1;
    fabric_waiting_t waiting[] = {{5, 1, 0, 0}, {3, 0, 1, 0}, {9, 2, 2, 0}};
    assert_int_equal(fabric_policy_choose(FABRIC_POLICY_FIFO, &random, waiting, 3), 1);
    assert_int_equal(waiting[0].passes + waiting[1].passes + waiting[2].passes, 0);
    assert_int_equal(random, 1);
}

static void test_deadline(void **state)
{
    uint64_t random = 1;
    fabric_waiting_t waiting[] = {
        {1, 0, 0, 0}, {2, 500, 1, 0}, {3, 400, 2, 0}, {4, 400, 3, 0}, {5, UINT64_MAX, 4, 0}};
    assert_int_equal(fabric_policy_choose(FABRIC_POLICY_DEADLINE, &random, waiting, 5), 2);
    /* Both earlier arrivals were passed over, the later ones were not. */
    assert_int_equal(waiting[0].passes, 1);
    assert_int_equal(waiting[1].passes, 1);
    assert_int_equal(waiting[3].passes, 0);
    waiting[2].deadline_ns = 0;
    assert_int_equal(fabric_policy_choose(FABRIC_POLICY_DEADLINE, &random, waiting, 5), 3);
    fabric_waiting_t none[] = {{8, 0, 0, 0}, {7, 0, 1, 0}};
    assert_int_equal(fabric_policy_choose(FABRIC_POLICY_DEADLINE, &random, none, 2), 1);
    assert_int_equal(fabric_policy_choose(FABRIC_POLICY_DEADLINE, &random, none, 1), 0);
}

static void test_random(void **state)
{
    uint64_t a = 42, b = 42, c = 43;
    uint32_t seen[4] = {0}, differ = 0;
    for (uint32_t i = 0; i < 4000; i++) {
        fabric_waiting_t waiting[] = {{1, 0, 0, 0}, {2, 0, 1, 0}, {3, 0, 2, 0}, {4, 0, 3, 0}};
        uint32_t first = fabric_policy_choose(FABRIC_POLICY_RANDOM, &a, waiting, 4);
        seen[first]++;
        assert_int_equal(first, fabric_policy_choose(FABRIC_POLICY_RANDOM, &b, waiting, 4));
        differ += first != fabric_policy_choose(FABRIC_POLICY_RANDOM, &c, waiting, 4);
    }
    for (uint32_t i = 0; i < 4; i++) /* 1000 expected, sigma 27: six sigma */
        assert_in_range(seen[i], 830, 1170);
    assert_true(differ > 1000);
}

/* One without deadline among a stream of urgent ones is passed over a bounded number of times. */
static void test_no_starvation(void **state)
{
    for (uint32_t policy = FABRIC_POLICY_RANDOM; policy <= FABRIC_POLICY_DEADLINE; policy++) {
        uint64_t random = 3;
        fabric_waiting_t waiting[2] = {{1, 0, 0, 0}, {2, 100, 1, 0}};
        uint32_t rounds = 0;
        while (fabric_policy_choose(policy, &random, waiting, 2) != 0) {
            waiting[1] = (fabric_waiting_t){3 + rounds, 100, 1, 0};
            rounds++;
            assert_true(rounds <= FABRIC_PASS_LIMIT);
        }
        if (policy == FABRIC_POLICY_DEADLINE)
            assert_int_equal(rounds, FABRIC_PASS_LIMIT);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fifo),
        cmocka_unit_test(test_deadline),
        cmocka_unit_test(test_random),
        cmocka_unit_test(test_no_starvation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
