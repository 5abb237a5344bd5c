/* SPDX-License-Identifier: MIT */
/* The stage protocol (stage/records.h, stage/scheduler_steps.h): one Instance of two ranks (attention
 * TP) and an Execution Group of two FfnAgents, of which the first reduces and answers both ranks. Each
 * rank writes its line into both stages, the first rank the rows as well; each member forms the
 * Invocation by itself. The Instance may die at any moment; then the host detaches it at both members,
 * and attaches a successor, whose sequences begin anew. Checked: members compute the rows of the
 * Invocation they have agreed on; what is reduced is of that Invocation; a rank takes its own answer;
 * arenas are written only while they are mapped; everything comes to its end.
 *
 *   Rank    stage_device_put, stage_device_wait_look
 *   Member  stage_scheduler_line, _run, _done, _partials, _chunk_done, _order, _closed
 *   Host    stage_ffn_attach, stage_ffn_detach, in the order that stage.h demands
 *
 * Planted mistakes, each of which Spin must find:
 *   BUG_LINE_FIRST       a rank publishes its line before its rows
 *   BUG_READY_FIRST      a member publishes its word before its partial
 *   BUG_ANY_WORD         the first member takes any word of the other for this Invocation's
 *   BUG_DETACH_RUNNING   a detach is confirmed while the Invocation is being executed
 *   BUG_ATTACH_EARLY     the successor is attached at one member before the other has detached
 *   BUG_KEEP_WORDS       lines and words of the predecessor stay in the stage
 *   BUG_ONE_RANK         a member does not wait for the second rank's line
 */
#define RANKS   2
#define MEMBERS 2
#define ROUNDS  2
#define LIVES   2
#define VALUE(life, s) ((life) * 4 + (s))

#define EMPTY    0
#define ATTACHED 1
#define WORD(turn, state) ((turn) * 2 + (state))
#define STATE(word)       ((word) % 2)

#define AT(m, r) ((m) * RANKS + (r))

/* In the stages. */
byte line[MEMBERS * RANKS], input[MEMBERS];
/* In the first member's partials. */
byte ready, partial;
/* In the arenas. */
byte answer[RANKS], output[RANKS];
/* Orders. */
byte wanted[MEMBERS], now[MEMBERS];

byte life, dead; /* the host's */
bool mapped, ended;
bool closed; /* the arenas */

proctype Rank(byte r)
{
    byte mine = 0, sequence;
    do
    :: mine == LIVES -> break
    :: mine < LIVES && life == mine + 1 ->
        mine++;
        sequence = 0;
        do
        :: sequence == ROUNDS -> break
        :: true -> break /* dies here */
        :: sequence < ROUNDS ->
            sequence++;
#ifdef BUG_LINE_FIRST
            line[AT(0, r)] = sequence;
            line[AT(1, r)] = sequence;
#endif
            if
            :: r == 0 -> input[0] = VALUE(mine, sequence); input[1] = VALUE(mine, sequence)
            :: else -> skip
            fi;
#ifndef BUG_LINE_FIRST
            line[AT(0, r)] = sequence;
            if
            :: true -> skip
            :: true -> break /* dies between two members */
            fi;
            line[AT(1, r)] = sequence;
#endif
            if
            :: answer[r] == sequence -> assert(output[r] == VALUE(mine, sequence))
            :: true -> break /* dies while it waits */
            fi
        od;
        dead++
    od
}

#define IDLE     0
#define RUNNING  1
#define PARTIALS 2
#define JOB      3
#define DROPPED  4 /* until the host's order */

proctype Member(byte m)
{
    byte taken = 0, phase = IDLE, own = 0, sequence = 0, r, sum;
    do
    :: ended -> break
    :: wanted[m] != now[m] &&
#ifdef BUG_DETACH_RUNNING
       true ->
#else
       /* what is gathered or waited for is dropped */
       (phase == IDLE || phase == PARTIALS || phase == DROPPED) ->
#endif
        if
        :: STATE(wanted[m]) == ATTACHED -> phase = IDLE; taken = 0
        :: else ->
#ifndef BUG_DETACH_RUNNING
            phase = IDLE
#endif
        fi;
        now[m] = wanted[m]
    :: phase == IDLE && STATE(now[m]) == ATTACHED && wanted[m] == now[m] &&
#ifdef BUG_ONE_RANK
       line[AT(m, 0)] > taken ->
#else
       line[AT(m, 0)] > taken && line[AT(m, 1)] > taken ->
       assert(line[AT(m, 0)] == line[AT(m, 1)]);
#endif
        if
        :: true ->
            sequence = line[AT(m, 0)];
            phase = RUNNING
        :: m == 1 -> /* its copy of a line is nonsense */
            closed = true;
            phase = DROPPED
        fi
    :: phase == PARTIALS && closed -> phase = DROPPED /* the other member brings nothing */
    :: phase == RUNNING ->
        own = input[m];
        if
        :: m == 0 -> phase = PARTIALS
        :: else ->
#ifdef BUG_READY_FIRST
            ready = sequence;
            partial = own;
#else
            partial = own;
            ready = sequence;
#endif
            taken = sequence;
            phase = IDLE
        fi
    :: phase == PARTIALS &&
#ifdef BUG_ANY_WORD
       ready != 0 ->
#else
       ready == sequence ->
#endif
        assert(partial == own);
        phase = JOB
    :: phase == JOB ->
        r = 0;
        do
        :: r < RANKS ->
            assert(mapped);
            output[r] = own;
            assert(mapped);
            answer[r] = sequence;
            r++
        :: else -> break
        od;
        taken = sequence;
        phase = IDLE
    od
}

active proctype Host()
{
    byte turn = 0, m, n;
    run Member(0);
    run Member(1);
    run Rank(0);
    run Rank(1);
    n = 0;
    do
    :: n == LIVES -> break
    :: else ->
        /* A successor has arenas of its own, and finds stages without words of its predecessor. */
        d_step {
            dead = 0;
            closed = false;
            answer[0] = 0;
            answer[1] = 0;
            output[0] = 0;
            output[1] = 0;
            mapped = true;
#ifndef BUG_KEEP_WORDS
            line[0] = 0;
            line[1] = 0;
            line[2] = 0;
            line[3] = 0;
            ready = 0;
#endif
        }
        turn++;
        wanted[0] = WORD(turn, ATTACHED);
        wanted[1] = WORD(turn, ATTACHED);
        now[0] == wanted[0];
        now[1] == wanted[1];
        life = n + 1;
        dead == RANKS;
        turn++;
        wanted[0] = WORD(turn, EMPTY);
        wanted[1] = WORD(turn, EMPTY);
        now[0] == wanted[0];
#ifndef BUG_ATTACH_EARLY
        now[1] == wanted[1];
#endif
        mapped = false;
        n++
    od;
    ended = true
}
