/* SPDX-License-Identifier: MIT */
/* Chance in the races of the stage: what happens next, and when. */
#ifndef XPOOL_TESTS_TSAN_RACE_DICE_H
#define XPOOL_TESTS_TSAN_RACE_DICE_H

#include <sched.h>

#include "stage/scheduler_steps.h"

static uint64_t dice(uint64_t *state)
{
    return stage_random_next(state);
}
/* Other interleavings than those of the machine's own rhythm. */
static void dawdle(uint64_t *state)
{
    uint64_t what = dice(state) % 16;
    if (what < 3)
        sched_yield();
    else if (what == 3)
        for (volatile uint32_t n = 0; n < 2000; n++)
            ;
}
#endif
