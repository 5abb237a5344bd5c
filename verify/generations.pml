/* SPDX-License-Identifier: MIT */
/* Requests over Generations on the direct lane: one Instance of one rank that puts request after request
 * into the stages of an Execution Group of two FfnAgents, of which the first reduces and answers. The
 * FfnAgents die at any step, one after the other. Once both are gone the daemon hands their stages to the
 * next two, each of which takes up, at its own time, what the arena does not answer. Meanwhile the
 * Instance's wait is in a pause. Time passes only when nothing else can. Checked: each request is
 * answered, with the rows of its own; parts that are added are of one request; a wait runs into its limit
 * only in a pause that no Generation ends.
 *
 *   Rank     stage_device_put, stage_device_wait_look, transport_device_wait_life
 *   Member   stage_ffn_resume, then stage_scheduler_line, _run, _done, _partials, _chunk_done
 *   Daemon   suspend_instances, daemon_plane_hand, daemon_plane_try_attach, attached_everywhere
 *
 * Planted mistakes, each of which Spin must find:
 *   BUG_CLEAR_STAGE      the next FfnAgent clears the stage that it takes over
 *   BUG_CLEAR_PARTS      the first member clears its parts when it attaches, not when it makes them
 *   BUG_COUNT_FROM_ZERO  what is answered counts from 0 instead of from the arena
 *   BUG_FORMER_LIVES     stages are handed on while former FfnAgents live
 *   BUG_NO_PAUSE         the Instance is not told of the pause
 *   BUG_ANSWER_FIRST     the answer is published before its rows
 */
#define ROUNDS      2
#define GENERATIONS 2
#define VALUE(s)    ((s) + 10)
#define AT(m, g)    (2 * (g) + (m))

byte line[2], input[2];      /* in the stages */
byte ready, part;            /* in the first member's partials */
byte answer, output;         /* in the arena */
bool paused;                 /* the notice */
bool dead[2 * GENERATIONS], attached[2 * GENERATIONS];
bool through, none_comes;

active proctype Rank()
{
    byte sequence = 0;
    do
    :: sequence == ROUNDS -> break
    :: sequence < ROUNDS ->
        sequence++;
        output = 0; /* what was there has been taken */
        input[0] = VALUE(sequence);
        input[1] = VALUE(sequence);
        line[0] = sequence;
        line[1] = sequence;
        if
        :: answer == sequence -> assert(output == VALUE(sequence))
        :: timeout ->
            assert(paused && none_comes);
            break
        fi
    od;
    through = true
}

proctype Member(byte m; byte mine)
{
    byte taken, sequence, own;
    {
#ifdef BUG_CLEAR_STAGE
        line[m] = 0;
#endif
#ifdef BUG_CLEAR_PARTS
        if
        :: m == 0 -> ready = 0
        :: else -> skip
        fi;
#endif
#ifdef BUG_COUNT_FROM_ZERO
        taken = 0;
#else
        taken = answer;
#endif
        attached[AT(m, mine)] = true;
        do
        :: through -> break
        :: line[m] > taken ->
            sequence = line[m];
            own = input[m];
            if
            :: m == 1 ->
                part = own;
                ready = sequence
            :: else ->
                ready == sequence || through;
                if
                :: through -> break
                :: else -> skip
                fi;
                assert(part == own);
#ifdef BUG_ANSWER_FIRST
                answer = sequence;
                output = own
#else
                output = own;
                answer = sequence
#endif
            fi;
            taken = sequence
        od
    } unless { dead[AT(m, mine)] }
}

active proctype Daemon()
{
    byte mine = 0, first;
    do
    :: true ->
        d_step {
            ready = 0; /* partials are made anew with each Generation */
            part = 0
        };
        run Member(0, mine);
        run Member(1, mine);
        (attached[AT(0, mine)] && attached[AT(1, mine)]) || through;
        paused = false; /* attached_everywhere */
        if
        :: through -> break
        :: true -> break /* lives on */
        :: mine + 1 < GENERATIONS ->
#ifndef BUG_FORMER_LIVES
            if
            :: first = 0
            :: first = 1
            fi;
            dead[AT(first, mine)] = true;
#endif
#ifndef BUG_NO_PAUSE
            paused = true;
#endif
#ifndef BUG_FORMER_LIVES
            dead[AT(1 - first, mine)] = true;
#endif
            if
            :: true -> none_comes = true; break /* deadlines.reform */
            :: true -> mine++
            fi
        fi
    od
}
