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

/* Foremost first: the larger item, the earlier one among equals. */
static void foremost(const uint64_t *bytes, uint32_t items, uint32_t *order)
{
    for (uint32_t i = 0; i < items; i++) {
        order[i] = 0;
        for (uint32_t j = 0; j < items; j++)
            order[i] += bytes[j] > bytes[i] || (bytes[j] == bytes[i] && j < i); /* its rank */
    }
}

/* Whether `a` is to be preferred: the first device where they differ holds a more foremost item. */
static bool precedes(const uint32_t *a, const uint32_t *b, const uint32_t *rank, uint32_t items,
                     uint32_t devices)
{
    for (uint32_t d = 0; d < devices; d++)
        for (uint32_t r = 0; r < items; r++)
            for (uint32_t i = 0; i < items; i++)
                if (rank[i] == r && (a[i] >> d & 1) != (b[i] >> d & 1))
                    return a[i] >> d & 1;
    return false;
}

/* Every assignment, no pruning: smallest largest load, then as planner.h states it. */
static bool exhaustive(const uint64_t *bytes, const uint32_t *tp, uint32_t items,
                       const uint64_t *capacity, uint32_t devices, uint64_t *best_out,
                       uint32_t *masks_out)
{
    uint32_t masks[8], rank[8];
    bool found = false;
    uint64_t best = UINT64_MAX;
    foremost(bytes, items, rank);
    for (uint32_t i = 0; i < items; i++)
        masks[i] = 1;
    for (;;) {
        uint64_t load[8] = {0}, largest = 0;
        bool valid = true;
        for (uint32_t i = 0; i < items; i++) {
            valid = valid && (uint32_t)__builtin_popcount(masks[i]) == tp[i];
            for (uint32_t d = 0; d < devices; d++)
                if (masks[i] & (1u << d))
                    load[d] += bytes[i];
        }
        for (uint32_t d = 0; d < devices; d++) {
            valid = valid && load[d] <= capacity[d];
            if (load[d] > largest)
                largest = load[d];
        }
        if (valid && (largest < best ||
                      (largest == best && precedes(masks, masks_out, rank, items, devices)))) {
            best = largest;
            found = true;
            memcpy(masks_out, masks, items * sizeof(*masks));
        }
        uint32_t i = items;
        while (i-- > 0) {
            if (++masks[i] < 1u << devices)
                break;
            masks[i] = 1;
        }
        if (i == UINT32_MAX)
            break;
    }
    *best_out = best;
    return found;
}

static void placement_is_the_exhaustive_optimum(void **state)
{
    for (int round = 0; round < 3000; round++) {
        uint32_t devices = 1 + (uint32_t)(next_random() % 4);
        uint32_t items = 1 + (uint32_t)(next_random() % (devices == 4 ? 4 : devices == 3 ? 5 : 7));
        uint64_t bytes[8], capacity[8], best;
        uint32_t tp[8], want[8] = {0}, got[8];
        /* Few sizes, so that many are equal; many; and such that a table's buckets are wide. */
        uint64_t sizes = round % 3 == 0 ? 3 : 20, unit = round % 5 == 0 ? 1234567891011ull : 1;
        for (uint32_t i = 0; i < items; i++) {
            bytes[i] = (1 + next_random() % sizes) * unit + (unit > 1 ? next_random() % 3 : 0);
            tp[i] = 1 + (uint32_t)(next_random() % 3 == 0 ? next_random() % devices : 0);
        }
        for (uint32_t d = 0; d < devices; d++)
            capacity[d] = unit * (round % 2 ? 40 : 5 + next_random() % 40);
        bool fits = exhaustive(bytes, tp, items, capacity, devices, &best, want);
        xp_status_t status = planner_place(bytes, tp, items, capacity, devices, FAR, got);
        assert_int_equal(status, fits ? XP_OK : XP_NO_MEMORY);
        if (!fits)
            continue;
        assert_memory_equal(got, want, items * sizeof(*got));
    }
}

static uint64_t largest_load(const uint64_t *bytes, const uint32_t *tp, const uint32_t *masks,
                             uint32_t items, uint32_t devices)
{
    uint64_t largest = 0;
    for (uint32_t d = 0; d < devices; d++) {
        uint64_t load = 0;
        for (uint32_t i = 0; i < items; i++) {
            assert_int_equal(__builtin_popcount(masks[i]), tp[i]);
            load += masks[i] >> d & 1 ? bytes[i] : 0;
        }
        largest = load > largest ? load : largest;
    }
    return largest;
}

/* With so many of them the average is reached, which nothing can beat. */
static void sixty_unequal_sets_are_placed_in_time(void **state)
{
    enum { ITEMS = 60 };
    for (int round = 0; round < 9; round++) {
        uint32_t devices = 2u << round % 3, tp[ITEMS], masks[ITEMS];
        uint64_t bytes[ITEMS], capacity[8], total = 0;
        for (int i = 0; i < ITEMS; i++) {
            /* 100 MiB to 100 GiB in the pages of GPUs. */
            bytes[i] = (50 + next_random() % 50000) << 21;
            tp[i] = 1 + (i % 9 == 0);
            total += bytes[i] * tp[i];
        }
        for (int d = 0; d < 8; d++)
            capacity[d] = (uint64_t)1 << 45;
        uint64_t began = xp_monotonic_ns();
        assert_int_equal(planner_place(bytes, tp, ITEMS, capacity, devices, FAR, masks), XP_OK);
        print_message("%u devices: %.1f ms\n", devices, (double)(xp_monotonic_ns() - began) / 1e6);
        uint64_t average = (total / devices + (1u << 21) - 1) >> 21 << 21;
        assert_int_equal(largest_load(bytes, tp, masks, ITEMS, devices), average);
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
        cmocka_unit_test(sixty_unequal_sets_are_placed_in_time),
        cmocka_unit_test(a_search_past_its_time_is_an_error_that_names_the_setting),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
