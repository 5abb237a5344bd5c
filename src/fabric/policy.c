/* SPDX-License-Identifier: MIT */
/* The three Lane admission policies and their common guard against starvation. */
#include "fabric/policy.h"

#include <stdbool.h>

/* splitmix64 (Vigna's published constants): any seed, zero too, gives a full-period sequence. */
static uint64_t random_next(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static bool deadline_before(const fabric_waiting_t *a, const fabric_waiting_t *b)
{
    /* 0 wraps to the largest value: no deadline comes last. */
    uint64_t da = a->deadline_ns - 1, db = b->deadline_ns - 1;
    return da != db ? da < db : a->arrival < b->arrival;
}

uint32_t fabric_policy_choose(fabric_policy_t policy, uint64_t *random_state,
                              fabric_waiting_t *waiting, uint32_t count)
{
    uint32_t oldest = 0, chosen = 0;
    for (uint32_t i = 1; i < count; i++) {
        if (waiting[i].arrival < waiting[oldest].arrival)
            oldest = i;
        if (deadline_before(&waiting[i], &waiting[chosen]))
            chosen = i;
    }
    if (policy == FABRIC_POLICY_RANDOM)
        chosen = (uint32_t)(random_next(random_state) % count);
    /* Passes grow with age, so whoever has reached the limit is led by the oldest. */
    if (policy == FABRIC_POLICY_FIFO || waiting[oldest].passes >= FABRIC_PASS_LIMIT)
        chosen = oldest;
    for (uint32_t i = 0; i < count; i++)
        if (waiting[i].arrival < waiting[chosen].arrival)
            waiting[i].passes++;
    return chosen;
}
