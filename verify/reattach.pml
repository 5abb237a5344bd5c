/* SPDX-License-Identifier: MIT */
/* The mailbox over Generations: an AtnAgent dies at any step, and the daemon gives the
 * arena to the next one, which submits the unanswered request again. Checked: the Instance gets every
 * answer, once and with the rows of its own request; nobody sleeps for ever.
 *
 * Planted mistakes, each of which Spin must find:
 *   BUG_TWO_AGENTS       the next AtnAgent gets the arena while the former one lives
 *   BUG_COUNT_FROM_ZERO  the next AtnAgent counts answers anew instead of from the arena
 *   BUG_SLEEP_FIRST      the next AtnAgent waits for its bell before it has looked
 *   BUG_NO_TICK          the Instance's wait has no tick: a death between publishing and ringing
 */
#include "bell.pml"

#define ROUNDS 2
#define AGENTS 2

Bell doorbell, answer;
byte request_sequence, request_rows;
byte response_sequence, response_rows;
bool dead[AGENTS];

active proctype Instance()
{
    byte sequence = 0, seen, word;
    do
    :: sequence == ROUNDS -> break
    :: else ->
        sequence++;
        request_rows = sequence;
        request_sequence = sequence; /* mailbox_request_publish */
        RING(doorbell);
        do
        :: true ->
            OBSERVE(answer, seen);
            word = response_sequence; /* mailbox_response_read */
            if
            :: word == sequence ->
                assert(response_rows == sequence + 10);
                break
            :: word != sequence ->
                assert(word == sequence - 1);
                SLEEP(answer, seen)
            fi
        od;
progress_answered:
        skip
    od
}

proctype AtnAgent(byte me)
{
    byte answered, seen, word;
    {
#ifdef BUG_COUNT_FROM_ZERO
        answered = 0;
#else
        answered = response_sequence; /* transport_server_create */
#endif
#ifdef BUG_SLEEP_FIRST
        OBSERVE(doorbell, seen);
        SLEEP(doorbell, seen);
#endif
        do
        :: answered == ROUNDS -> break
        :: else ->
            OBSERVE(doorbell, seen);
            word = request_sequence; /* mailbox_request_read */
            if
            :: word == answered + 1 ->
                assert(request_rows == answered + 1);
                answered++;
                response_rows = answered + 10;
                response_sequence = answered; /* mailbox_response_publish */
                RING(answer)
            :: word != answered + 1 ->
                assert(word == answered);
                SLEEP(doorbell, seen)
            fi
        od
    } unless { dead[me] }
}

active proctype Daemon()
{
    byte me = 0;
    run AtnAgent(0);
    do
    :: me + 1 < AGENTS ->
#ifndef BUG_TWO_AGENTS
        dead[me] = true;
        /* transport_doorbell_renew, once the process has ended */
        atomic {
            doorbell.sleepers = 0;
            doorbell.asleep = false
        };
#endif
        me++;
        run AtnAgent(me)
    :: true -> break
    od
}

#ifndef BUG_NO_TICK
/* CLIENT_TICK_NS: the Instance looks now and then without having been rung. A look that finds nothing
 * changes nothing, and is left out. */
active proctype Tick()
{
end:
    do
    :: answer.asleep && response_sequence == request_sequence -> answer.asleep = false
    od
}
#endif
