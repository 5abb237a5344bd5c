/* SPDX-License-Identifier: MIT */
/* One rig on one thread, turn by turn: what the tests of the scheduler share. */
#ifndef XPOOL_TESTS_STAGE_SCHEDULER_RIG_H
#define XPOOL_TESTS_STAGE_SCHEDULER_RIG_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "stage_rig.h"

static rig_t rig;

static void make(bool dispatch, uint32_t policy)
{
    rig_make(&rig, dispatch, policy);
    for (uint32_t f = 0; f < rig.ffns; f++)
        for (uint32_t i = 0; i < rig.instances; i++)
            rig_order(&rig, f, i, TRANSPORT_SLOT_ATTACHED);
}
static int teardown(void **state)
{
    rig_free(&rig);
    memset(&rig, 0, sizeof(rig));
    return 0;
}
static void shape(uint32_t i, uint32_t tp, uint32_t dp, uint32_t delivery, uint32_t group)
{
    rig.instance[i].tp = tp;
    rig.instance[i].dp = dp;
    rig.instance[i].delivery = delivery;
    for (uint32_t layer = 0; layer < RIG_LAYERS; layer++)
        rig.instance[i].group[layer] = group;
    if (rig.instances <= i)
        rig.instances = i + 1;
}
static void turns(uint32_t count)
{
    for (uint32_t n = 0; n < count; n++)
        for (uint32_t f = 0; f < rig.ffns; f++) {
            rig.now_ns += 10;
            rig_turn(&rig, f, rig.now_ns);
            if (rig.ffn[f].dispatch)
                rig_runtime(&rig, f);
        }
}
#define SETTLE (2 * STAGE_LOOK_TURNS * RIG_INSTANCES)

static void attach_all(void)
{
    turns(SETTLE);
    for (uint32_t f = 0; f < rig.ffns; f++)
        for (uint32_t i = 0; i < rig.instances; i++) {
            assert_true(rig_ordered(&rig, f, i));
            assert_int_equal(transport_slot_state(rig.ffn[f].table->instance[i].now),
                             TRANSPORT_SLOT_ATTACHED);
        }
}

/* One layer of one Instance from put to take. */
static void pass(uint32_t i, uint32_t layer, const uint32_t *dp_rows, uint64_t number)
{
    uint32_t ranks = rig_ranks(&rig.instance[i]);
    for (uint32_t r = 0; r < ranks; r++)
        rig_put(&rig, i, r, layer, dp_rows, number);
    for (uint32_t n = 0, over = 0; over != ranks; n++) {
        assert_true(n < 2000);
        turns(1);
        over = 0;
        for (uint32_t r = 0; r < ranks; r++)
            over +=
                rig.instance[i].rank[r].state.phase != TRANSPORT_PHASE_LIVE || rig_look(&rig, i, r);
    }
    for (uint32_t r = 0; r < ranks; r++)
        assert_int_equal(rig_take(&rig, i, r), 0);
    turns(4);
}

static const uint32_t rows_of[][RIG_RANKS] = {{1, 2, 3, 4}, {0, 3, 0, 1}, {6, 6, 6, 6},
                                              {0, 0, 0, 0}, {5, 0, 0, 0}, {0, 0, 0, 6}};
#define ROWS_OF (sizeof(rows_of) / sizeof(rows_of[0]))
#endif
