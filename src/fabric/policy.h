/* SPDX-License-Identifier: MIT */
/* Lane admission: which waiting Invocation gets the next free Lane. Pure, any thread. */
#ifndef XPOOL_FABRIC_POLICY_H
#define XPOOL_FABRIC_POLICY_H

#include "fabric/plan.h"

/* An Invocation passed over this often by later arrivals goes first, whatever the policy says. */
#define FABRIC_PASS_LIMIT 64

typedef struct fabric_waiting {
    uint64_t arrival;     /* number in order of arrival; unique */
    uint64_t deadline_ns; /* 0 = none: after all that have one */
    uint32_t instance;
    uint32_t passes;
} fabric_waiting_t;

/* Index of the one to admit; count >= 1. Counts a pass for each earlier arrival left waiting.
 * `random_state` is advanced by the random policy only. */
uint32_t fabric_policy_choose(fabric_policy_t policy, uint64_t *random_state,
                              fabric_waiting_t *waiting, uint32_t count);
#endif
