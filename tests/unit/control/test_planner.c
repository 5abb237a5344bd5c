/* SPDX-License-Identifier: MIT */
/* Placement against an exhaustive search written here. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "control/planner.h"

#define FAR (xp_monotonic_ns() + 20 * XP_NS_PER_S)

static uint64_t random_state = 88172645463325252ull;
static uint64_t next_random(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

/* Every assignment, no pruning: smallest largest load, then the lowest masks in item order. Masks
 * are compared as the planner states it: lower device indices first, that is the lower mask value.
 */
static bool exhaustive(const uint64_t *bytes, const uint32_t *tp, uint32_t items,
                       const uint64_t *capacity, uint32_t devices, uint64_t *best_out,
                       uint32_t *masks_out)
{
    uint32_t masks[8] = {0};
    bool found = false;
    uint64_t best = UINT64_MAX;
    for (;;) {
        uint64_t load[8] = {0}, largest = 0;
        bool valid = true;
        for (uint32_t i = 0; i < items; i++) {
            valid = valid && (uint32_t)__builtin_popcount(masks[i] + 1) == tp[i];
            for (uint32_t d = 0; d < devices; d++)
                if ((masks[i] + 1) & (1u << d))
                    load[d] += bytes[i];
        }
        for (uint32_t d = 0; d < devices; d++) {
            valid = valid && load[d] <= capacity[d];
            if (load[d] > largest)
                largest = load[d];
        }
        if (valid && largest < best) { /* the first of equals is the lowest: item 0 turns slowest */
            best = largest;
            found = true;
            for (uint32_t i = 0; i < items; i++)
                masks_out[i] = masks[i] + 1;
        }
        uint32_t i = items;
        while (i-- > 0) {
            if (++masks[i] < (1u << devices) - 1)
                break;
            masks[i] = 0;
        }
        if (i == UINT32_MAX)
            break;
    }
    *best_out = best;
    return found;
}

static void placement_is_the_exhaustive_optimum(void **state)
{
    for (int round = 0; round < 400; round++) {
        uint32_t devices = 1 + (uint32_t)(next_random() % 3);
        uint32_t items = 1 + (uint32_t)(next_random() % 5);
        uint64_t bytes[8], capacity[8], best;
        uint32_t tp[8], want[8], got[8];
        for (uint32_t i = 0; i < items; i++) {
            bytes[i] = 1 + next_random() % 20;
            tp[i] = 1 + (uint32_t)(next_random() % 4 == 0 && devices > 1);
        }
        for (uint32_t d = 0; d < devices; d++)
            capacity[d] = round % 2 ? 40 : 10 + next_random() % 40;
        bool fits = exhaustive(bytes, tp, items, capacity, devices, &best, want);
        xp_status_t status = planner_place(bytes, tp, items, capacity, devices, FAR, got);
        assert_int_equal(status, fits ? XP_OK : XP_NO_MEMORY);
        if (!fits)
            continue;
        assert_memory_equal(got, want, items * sizeof(*got));
    }
}

static void a_search_past_its_time_is_an_error_that_names_the_setting(void **state)
{
    uint64_t bytes[40], capacity[3] = {1u << 30, 1u << 30, 1u << 30};
    uint32_t tp[40], masks[40];
    for (int i = 0; i < 40; i++) {
        bytes[i] = 1000 + next_random() % 100000;
        tp[i] = 1;
    }
    xp_status_t status =
        planner_place(bytes, tp, 40, capacity, 3, xp_monotonic_ns() + 50 * XP_NS_PER_MS, masks);
    if (status == XP_OK)
        return; /* a perfectly balanced answer was proved in time */
    assert_int_equal(status, XP_TIMEOUT);
    assert_non_null(strstr(xp_error_last()->text, "ffn.placement.timeout_seconds"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(placement_is_the_exhaustive_optimum),
        cmocka_unit_test(a_search_past_its_time_is_an_error_that_names_the_setting),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
