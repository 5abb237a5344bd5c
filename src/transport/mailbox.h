/* SPDX-License-Identifier: MIT */
/*
 * The mailbox between one Instance Rank and its AtnAgent: layout, sequence rules and transitions.
 *
 * One source for C and CUDA. Only static functions on shared memory: no call into the system, no
 * wait, no state of its own. verify/mailbox.pml models exactly these functions.
 *
 *                request.sequence = n+1          response.sequence = n+1
 *      IDLE n  ───────────────────────▶  LIVE n+1  ───────────────────────▶  ANSWERED n+1
 *        ▲       mailbox_request_publish             mailbox_response_publish      │
 *        └───────────────────────── the Instance has taken the rows ◀──────────────┘
 *      any state ── mailbox_close ──▶ CLOSED (terminal)
 *
 * Who writes what: the Instance `request`, the input rows and the bell's sleepers; the AtnAgent
 * `response`, the output rows and the bell's counter; anyone `closed`, once. A side writes its
 * record and rows only in the states that give them to it: the Instance in IDLE, the AtnAgent in
 * LIVE. The peer's memory is not trusted: every field is loaded once and checked before use.
 */
#ifndef XPOOL_TRANSPORT_MAILBOX_H
#define XPOOL_TRANSPORT_MAILBOX_H

#include <stdint.h>

#include "base/protocol_atomics.h"

#define MAILBOX_MAGIC        0x31544d58u /* "XMT1" */
#define MAILBOX_ABI          1u
#define MAILBOX_MAX_DP       8
#define MAILBOX_LAYER_LIMIT  1024u /* no model has more layers; the plan's own bound is tighter */
#define MAILBOX_MAX_ROWS     65536u
#define MAILBOX_MAX_HIDDEN   65536u
#define MAILBOX_KIND_COUNT   3u
#define MAILBOX_HEADER_BYTES 4096u
#define MAILBOX_LINE         64

/* ---- bell: "something may have changed"
 *
 * counter moves on with each ring; sleepers counts those asleep on it. A waiter loads counter,
 * looks at what it waits for, and only then waits for counter to move, so a ring in between is not
 * lost.
 */
typedef struct mailbox_bell {
    uint32_t counter;
    uint32_t sleepers;
} mailbox_bell_t;

/* acquire: pairs with the counter's increment in mailbox_bell_ring. What was published before a
 * ring that this load has seen is visible to the look that follows. */
PROTOCOL_FUNCTION uint32_t mailbox_bell_observe(const mailbox_bell_t *bell)
{
    return PROTOCOL_LOAD_ACQUIRE(&bell->counter);
}

/* Returns 1 when a sleeper has to be woken by the host. Both operations are in the one total order,
 * as are those of mailbox_bell_sleep: either the ringer sees the sleeper or the sleeper the ring.
 */
PROTOCOL_FUNCTION int mailbox_bell_ring(mailbox_bell_t *bell)
{
    PROTOCOL_ADD_TOTAL(&bell->counter, 1u);
    return PROTOCOL_LOAD_TOTAL(&bell->sleepers) != 0;
}

/* Declares a sleeper. Returns 1 when the counter is still `seen` and the caller may sleep on it
 * (the futex compares once more); mailbox_bell_awake follows in either case. */
PROTOCOL_FUNCTION int mailbox_bell_sleep(mailbox_bell_t *bell, uint32_t seen)
{
    PROTOCOL_ADD_TOTAL(&bell->sleepers, 1u);
    return PROTOCOL_LOAD_TOTAL(&bell->counter) == seen;
}

PROTOCOL_FUNCTION void mailbox_bell_awake(mailbox_bell_t *bell)
{
    PROTOCOL_ADD_TOTAL(&bell->sleepers, (uint32_t)-1);
}

/* ---- doorbell page: one line a PE, shared by the agents, the Instances and the daemon ------- */
#define DOORBELL_MAGIC   0x31424458u /* "XDB1" */
#define DOORBELL_ABI     1u
#define DOORBELL_MAX_PES 32

typedef struct doorbell_line {
    mailbox_bell_t bell;
    uint8_t pad[MAILBOX_LINE - sizeof(mailbox_bell_t)];
} doorbell_line_t;

typedef struct doorbell_page {
    uint32_t magic, abi, pes;
    uint8_t pad[MAILBOX_LINE - 12];
    doorbell_line_t lines[DOORBELL_MAX_PES];
} doorbell_page_t;

/* ---- arena ------------------------------------------------------------------------------ */
typedef struct mailbox_request {
    uint64_t sequence; /* published last */
    uint64_t slo_deadline_ns;
    uint32_t layer, rows, kind, reserved;
    uint32_t dp_rows[MAILBOX_MAX_DP];
} mailbox_request_t;

typedef struct mailbox_response {
    uint64_t sequence; /* published last */
    uint32_t status;   /* xp_status_t */
    uint32_t reserved;
    mailbox_bell_t bell; /* the Instance waits here */
    uint8_t pad[MAILBOX_LINE - 24];
} mailbox_response_t;

typedef struct mailbox_arena {
    /* Constant from creation on. */
    uint32_t magic, abi;
    uint64_t bytes;
    uint32_t hidden, max_rows, dtype, dp_size;
    uint64_t input_offset, output_offset;
    uint64_t partial_offset;     /* Direct Partial: FP32 rows of each member; 0 = none */
    uint32_t partials, pad0;     /* such areas */
    mailbox_request_t request;   /* one line, the Instance's */
    mailbox_response_t response; /* one line, the AtnAgent's */
    uint32_t closed;             /* 0, or the xp_status_t of the end */
    uint8_t pad1[MAILBOX_LINE - 4];
} mailbox_arena_t;

/* Direct Partial: every member of the Execution Group answers by itself, with a line of its own in
 * the arena's first page. */
#define MAILBOX_MAX_PARTIALS   16
#define MAILBOX_PARTIALS_START 1024u
typedef struct mailbox_partial {
    uint64_t sequence; /* published last */
    uint32_t status;   /* xp_status_t */
    uint8_t pad[MAILBOX_LINE - 12];
} mailbox_partial_t;

PROTOCOL_FUNCTION mailbox_partial_t *mailbox_partial_at(mailbox_arena_t *arena, uint32_t member)
{
    return (mailbox_partial_t *)((char *)arena + MAILBOX_PARTIALS_START) + member;
}
PROTOCOL_FUNCTION const mailbox_partial_t *mailbox_partial_of(const mailbox_arena_t *arena,
                                                              uint32_t member)
{
    return (const mailbox_partial_t *)((const char *)arena + MAILBOX_PARTIALS_START) + member;
}

/* Instance, IDLE: the rows and every other field of *request were written before. release: pairs
 * with the load in mailbox_request_read. */
PROTOCOL_FUNCTION void mailbox_request_publish(mailbox_arena_t *arena, uint64_t sequence)
{
    PROTOCOL_PUBLISH(&arena->request.sequence, sequence);
}

typedef enum mailbox_look { MAILBOX_NONE = 0, MAILBOX_LIVE, MAILBOX_NONSENSE } mailbox_look_t;

/* AtnAgent: is there a request after `answered` (its own count, not the arena's)? Fields are loaded
 * once into *request_out, which is written only for MAILBOX_LIVE. acquire: pairs with
 * mailbox_request_publish, so record and rows are those of that sequence. */
PROTOCOL_FUNCTION mailbox_look_t mailbox_request_read(const mailbox_arena_t *arena,
                                                      uint64_t answered,
                                                      mailbox_request_t *request_out)
{
    uint64_t sequence = PROTOCOL_LOAD_ACQUIRE(&arena->request.sequence);
    if (sequence == answered)
        return MAILBOX_NONE;
    if (sequence != answered + 1)
        return MAILBOX_NONSENSE;
    request_out->sequence = sequence;
    request_out->slo_deadline_ns = PROTOCOL_LOAD_RELAXED(&arena->request.slo_deadline_ns);
    request_out->layer = PROTOCOL_LOAD_RELAXED(&arena->request.layer);
    request_out->rows = PROTOCOL_LOAD_RELAXED(&arena->request.rows);
    request_out->kind = PROTOCOL_LOAD_RELAXED(&arena->request.kind);
    request_out->reserved = 0;
    for (int i = 0; i < MAILBOX_MAX_DP; i++)
        request_out->dp_rows[i] = PROTOCOL_LOAD_RELAXED(&arena->request.dp_rows[i]);
    return MAILBOX_LIVE;
}

/* AtnAgent, LIVE: the output rows were written before. release: pairs with mailbox_response_read.
 */
PROTOCOL_FUNCTION void mailbox_response_publish(mailbox_arena_t *arena, uint64_t sequence,
                                                uint32_t status)
{
    arena->response.status = status;
    PROTOCOL_PUBLISH(&arena->response.sequence, sequence);
}

/* Instance: MAILBOX_LIVE once `sequence` is answered. acquire: pairs with mailbox_response_publish.
 */
PROTOCOL_FUNCTION mailbox_look_t mailbox_response_read(const mailbox_arena_t *arena,
                                                       uint64_t sequence, uint32_t *status_out)
{
    uint64_t answered = PROTOCOL_LOAD_ACQUIRE(&arena->response.sequence);
    if (answered == sequence) {
        *status_out = PROTOCOL_LOAD_RELAXED(&arena->response.status);
        return MAILBOX_LIVE;
    }
    return answered == sequence - 1 ? MAILBOX_NONE : MAILBOX_NONSENSE;
}

/* Member of the Execution Group, LIVE: its partial's rows were written before. release: pairs with
 * mailbox_partial_read. */
PROTOCOL_FUNCTION void mailbox_partial_publish(mailbox_partial_t *partial, uint64_t sequence,
                                               uint32_t status)
{
    partial->status = status;
    PROTOCOL_PUBLISH(&partial->sequence, sequence);
}

/* A word that does not follow each sequence, since not every layer is the writer's: an older one is
 * no answer yet, a newer one nonsense. acquire: pairs with mailbox_partial_publish (with
 * mailbox_response_publish where the word is the response's). */
PROTOCOL_FUNCTION mailbox_look_t mailbox_word_read(const uint64_t *word, uint64_t sequence)
{
    uint64_t answered = PROTOCOL_LOAD_ACQUIRE(word);
    return answered == sequence  ? MAILBOX_LIVE
           : answered < sequence ? MAILBOX_NONE
                                 : MAILBOX_NONSENSE;
}

/* Instance: MAILBOX_LIVE once the member's partial of `sequence` is there. */
PROTOCOL_FUNCTION mailbox_look_t mailbox_partial_read(const mailbox_partial_t *partial,
                                                      uint64_t sequence, uint32_t *status_out)
{
    mailbox_look_t look = mailbox_word_read(&partial->sequence, sequence);
    if (look == MAILBOX_LIVE)
        *status_out = PROTOCOL_LOAD_RELAXED(&partial->status);
    return look;
}

/* Anyone. The first reason stays. Returns 1 for the call that closed. */
PROTOCOL_FUNCTION int mailbox_close(mailbox_arena_t *arena, uint32_t reason)
{
    uint32_t open = 0;
    return PROTOCOL_CAS(&arena->closed, &open, reason) ? 1 : 0;
}

/* acquire: pairs with mailbox_close. */
PROTOCOL_FUNCTION uint32_t mailbox_closed(const mailbox_arena_t *arena)
{
    return PROTOCOL_LOAD_ACQUIRE(&arena->closed);
}

/* Instance: one look of a wait for `sequence`. With MAILBOX_NONE, *closed_out is the reason of the
 * end or 0. What was answered before the close counts, also where both came between the two loads.
 */
PROTOCOL_FUNCTION mailbox_look_t mailbox_response_wait_look(const mailbox_arena_t *arena,
                                                            uint64_t sequence, uint32_t *status_out,
                                                            uint32_t *closed_out)
{
    mailbox_look_t look = mailbox_response_read(arena, sequence, status_out);
    *closed_out = 0;
    if (look != MAILBOX_NONE)
        return look;
    *closed_out = mailbox_closed(arena);
    return *closed_out ? mailbox_response_read(arena, sequence, status_out) : look;
}
#endif
