/* SPDX-License-Identifier: MIT */
/* Requests of two ranks (attention TP) over Generations by the relay. Each rank has an arena, and each
 * Generation an AtnAgent for each of them, which puts the rank's line and, from the first one, its rows, and an
 * FfnAgent, which waits for both lines and answers both AtnAgents. All three die at any step, one after the
 * other, so that one rank may have an answer that the other one lacks, may have put the next request already,
 * and may die again while it is handed on. Checked: lines that meet are of one layer; each request of each rank
 * is answered once by the old or the new Generation, with the rows of its own.
 *
 *   Rank     stage_device_put, stage_device_wait_look
 *   Atn      stage_atn_resume (atn_level, transport_cuda_server_carry), then the relay's kernel
 *   Ffn      stage_scheduler_line, stage_publish_all
 *   Daemon   suspend_instances, ask_atnagents, attached_everywhere
 *
 * Planted mistakes, each of which Spin must find:
 *   BUG_NO_LOOK        each AtnAgent goes on where its own rank stands
 *   BUG_SERVE_FIRST    an AtnAgent puts what is open before it looks at the other rank's arena
 *   BUG_WORD_FIRST     the answer that is handed on is published before its rows
 *   BUG_FORMER_LIVES   arenas are handed on while former agents live
 *   BUG_FORMER_LINES   the next Generation's stage has the lines of the former one
 */
#define ROUNDS      2
#define GENERATIONS 3
#define VALUE(s)    ((s) + 10)
#define FFN         2 /* the agents are 0, 1 (AtnAgents of the ranks) and this one */
#define OTHER       (1 - r)

byte request[2], input[2], answer[2], output[2]; /* in the ranks' arenas */
byte line[2], rows;                              /* in the stage */
byte word[2], back[2];                           /* in the relay arenas */
byte alive;
bool dead[3], through[2];

proctype Rank(byte r)
{
    byte sequence = 0;
    do
    :: sequence == ROUNDS -> break
    :: sequence < ROUNDS ->
        sequence++;
        input[r] = VALUE(sequence);
        request[r] = sequence;
        answer[r] == sequence;
        assert(output[r] == VALUE(sequence))
    od;
    through[r] = true
}

inline level()
{
#ifdef BUG_NO_LOOK
    seen = answer[r];
#else
    seen = answer[OTHER];
#endif
    if
    :: seen > answer[r] ->
        assert(seen == answer[r] + 1 && request[r] == seen);
#ifdef BUG_WORD_FIRST
        answer[r] = seen;
        output[r] = output[OTHER]
#else
        output[r] = output[OTHER];
        answer[r] = seen
#endif
    :: else -> skip
    fi;
    seen = 0
}

inline put()
{
    sequence = request[r];
    if
    :: r == 0 -> rows = input[r]
    :: else -> skip
    fi;
    line[r] = sequence
}

proctype Atn(byte r)
{
    byte taken, seen, sequence;
    {
#ifdef BUG_SERVE_FIRST
        if
        :: request[r] > answer[r] -> put()
        :: else -> skip
        fi;
#endif
        level();
        taken = answer[r];
        do
        :: through[r] -> break
        :: request[r] > taken ->
            put();
            word[r] == sequence;
            output[r] = back[r];
            answer[r] = sequence;
            taken = sequence
        od
    } unless { dead[r] };
    alive--
}

proctype Ffn()
{
    byte taken = 0, value;
    {
        do
        :: through[0] && through[1] -> break
        :: line[0] > taken && line[1] > taken ->
            assert(line[0] == line[1]);
            taken = line[0];
            value = rows;
            assert(value == VALUE(taken));
            back[0] = value;
            word[0] = taken;
            back[1] = value;
            word[1] = taken
        od
    } unless { dead[FFN] };
    alive--
}

active proctype Daemon()
{
    byte generation = 1;
    atomic {
        run Rank(0);
        run Rank(1)
    };
    do
    :: true ->
        atomic {
            alive = alive + 3;
            run Ffn();
            run Atn(0);
            run Atn(1)
        };
        if
        :: true -> break /* lives on */
        :: generation < GENERATIONS ->
            generation++;
#ifdef BUG_FORMER_LIVES
            alive > 0 -> dead[FFN] = true; /* its AtnAgents go on */
#else
            do
            :: !dead[0] -> dead[0] = true
            :: !dead[1] -> dead[1] = true
            :: !dead[FFN] -> dead[FFN] = true
            :: alive == 0 -> break
            od;
#endif
            skip;
            d_step {
#ifndef BUG_FORMER_LINES
                line[0] = 0;
                line[1] = 0;
#endif
                word[0] = 0;
                word[1] = 0;
                back[0] = 0;
                back[1] = 0;
                rows = 0;
                dead[0] = false;
                dead[1] = false;
                dead[FFN] = false
            }
        fi
    od
}
