/* SPDX-License-Identifier: MIT */
/* The mailbox of one arena: an Instance, its AtnAgent, and a daemon that may close the arena at any
 * moment. Checked: record and rows read are those of the sequence that was seen; the Instance gets
 * every answer or learns that the arena is closed; nobody sleeps for ever.
 *
 * Planted mistakes, each of which Spin must find:
 *   BUG_PUBLISH_FIRST        the sequence becomes visible before the rows (a store without release)
 *   BUG_OBSERVE_LATE         the bell is observed after the look instead of before it
 *   BUG_SLEEPERS_FIRST       the ringer looks for sleepers before it moves the counter
 *   BUG_UNDECLARED_SLEEPER   the sleeper is counted only after it sleeps
 *   BUG_FUTEX_WITHOUT_COMPARE  the futex does not compare the counter once more
 *   BUG_SILENT_CLOSE         transport_arena_close does not ring
 */
#include "bell.pml"

#define ROUNDS 2

Bell doorbell, answer;
byte request_sequence, request_rows;
byte response_sequence, response_rows;
bool closed;

active proctype Instance()
{
    byte sequence = 0, seen, word;
    do
    :: sequence == ROUNDS -> break
    :: else ->
        /* transport_client_put */
        if
        :: closed -> goto finished
        :: else -> skip
        fi;
        sequence++;
#ifdef BUG_PUBLISH_FIRST
        request_sequence = sequence;
        request_rows = sequence;
#else
        request_rows = sequence;
        request_sequence = sequence; /* mailbox_request_publish */
#endif
        RING(doorbell);
        /* transport_client_wait */
        do
        :: true ->
#ifndef BUG_OBSERVE_LATE
            OBSERVE(answer, seen);
#endif
            word = response_sequence; /* mailbox_response_read */
            if
            :: word == sequence ->
                assert(response_rows == sequence + 10);
                break
            :: word != sequence ->
                assert(word == sequence - 1);
                if
                :: closed -> goto finished /* mailbox_closed */
                :: else -> skip
                fi;
#ifdef BUG_OBSERVE_LATE
                OBSERVE(answer, seen);
#endif
                SLEEP(answer, seen)
            fi
        od;
progress_answered:
        skip /* transport_client_take */
    od;
finished:
    skip
}

active proctype AtnAgent()
{
    byte answered = 0, seen, word;
    do
    :: answered == ROUNDS -> break
    :: else ->
        /* fabric_atn_run: observe, look, wait */
#ifndef BUG_OBSERVE_LATE
        OBSERVE(doorbell, seen);
#endif
        word = request_sequence; /* transport_server_poll: mailbox_request_read */
        if
        :: word == answered + 1 ->
            if
            :: closed -> break
            :: else -> skip
            fi;
            assert(request_rows == answered + 1);
            answered++;
            response_rows = answered + 10;
            response_sequence = answered; /* mailbox_response_publish */
            RING(answer)                  /* transport_server_complete */
        :: word != answered + 1 ->
            assert(word == answered);
            if
            :: closed -> break
            :: else -> skip
            fi;
#ifdef BUG_OBSERVE_LATE
            OBSERVE(doorbell, seen);
#endif
            SLEEP(doorbell, seen)
        fi
    od
}

/* transport_arena_close, then fabric_atn_detach, whose inbox rings the AtnAgent; or nothing. */
active proctype Daemon()
{
    if
    :: true ->
        closed = true; /* mailbox_close */
#ifndef BUG_SILENT_CLOSE
        RING(answer);
#endif
        RING(doorbell)
    :: true -> skip
    fi
}
