/* SPDX-License-Identifier: MIT */
/*
 * Items of the resident kernel of few rows (ffn/cuda/few_resident.cuh, few_products.cuh): warps take
 * them by one counter, each a further one while it does another; down waits for the activations of
 * its tile; the next command's planner sets the counters back. A block is one warp here, and the
 * planner is any block of the next command: it has itself met all others after their last item.
 *
 * Claims: each item of a command is done once; down finds all activations of its tile, of this
 * command; nobody waits for ever.
 *
 * Planted mistakes, each of which Spin must find:
 *   BUG_DOWN_FIRST  items of down are taken before those that they wait for
 *   BUG_RESET_EARLY a warp sets the counter back once it has none left, others may have
 *   BUG_ACTED_STAYS the planner leaves the tiles' counters as they are
 *   BUG_DO_NOT_MEET the next command begins before all have done their items
 */
#define WARPS    3
#define COMMANDS 2
#define TILES    2
#define GATE     2 /* items of a tile */
#define DOWN     1
#define ITEMS    (TILES * (GATE + DOWN))

#ifdef BUG_DOWN_FIRST
#define IS_DOWN(i)  ((i) < TILES * DOWN)
#define GATE_NUMBER(i) ((i) - TILES * DOWN)
#define DOWN_NUMBER(i) (i)
#else
#define IS_DOWN(i)  ((i) >= TILES * GATE)
#define GATE_NUMBER(i) (i)
#define DOWN_NUMBER(i) ((i) - TILES * GATE)
#endif

byte taken, planned, multiplied, planning;
byte acted[TILES], written[TILES]; /* written: for the check */
byte done[ITEMS];

proctype Warp(byte id)
{
    byte turn = 1, at, next, i;
    bool plans;
    do
    :: turn <= COMMANDS ->
        atomic { plans = planning < turn; if :: plans -> planning = turn :: else fi }
        if
        :: plans ->
            i = 0;
            do
            :: i < TILES ->
#ifndef BUG_ACTED_STAYS
                acted[i] = 0;
#endif
                written[i] = 0;
                i++
            :: else -> break
            od;
            taken = 0;
            planned = turn
        :: else
        fi;
        (planned == turn);
        at = id;
        do
        :: at < ITEMS ->
            atomic { next = WARPS + taken; taken++ }
            if
            :: !IS_DOWN(at) ->
                written[GATE_NUMBER(at) / GATE]++;
                acted[GATE_NUMBER(at) / GATE]++
            :: IS_DOWN(at) ->
                (acted[DOWN_NUMBER(at) / DOWN] == GATE);
                assert(written[DOWN_NUMBER(at) / DOWN] == GATE)
            fi;
            done[at]++;
            assert(done[at] == turn);
            at = next
        :: else -> break
        od;
#ifdef BUG_RESET_EARLY
        taken = 0;
#endif
        multiplied++;
#ifndef BUG_DO_NOT_MEET
        (multiplied >= turn * WARPS);
#endif
        i = 0;
        do
        :: i < ITEMS -> assert(done[i] >= turn); i++
        :: else -> break
        od;
        turn++
    :: else -> break
    od
}

init
{
    byte i = 0;
    atomic {
        do
        :: i < WARPS -> run Warp(i); i++
        :: else -> break
        od
    }
}
