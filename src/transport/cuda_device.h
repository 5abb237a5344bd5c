/* SPDX-License-Identifier: MIT */
/*
 * What the CUDA Transport keeps in device memory, and the steps that its kernels take on it.
 *
 * Compiles as C and as CUDA: the kernels (cuda_kernels.cu, cuda_resident.cuh) add only the copying
 * of rows and the counting of blocks, so that the decisions are tested on the host. Memory order:
 * what crosses processes goes through transport/mailbox.h. The state is the Instance's own; put,
 * wait and take are ordered by the stream they are launched on.
 *
 *      put: IDLE ─▶ LIVE      wait: LIVE ─▶ ANSWERED      take: ANSWERED ─▶ IDLE
 *
 * The first status that is not XP_OK stays (`status`), and every later put, wait and take of the
 * pass does nothing but return at once; take then poisons its output, so that no old rows are
 * mistaken for an answer. The host reads the status after the pass.
 */
#ifndef XPOOL_TRANSPORT_CUDA_DEVICE_H
#define XPOOL_TRANSPORT_CUDA_DEVICE_H

#include "base/status.h"
#include "transport/cuda_life.h"
#include "transport/mailbox.h"

/* ---- Instance --------------------------------------------------------------------------- */
typedef enum transport_phase {
    TRANSPORT_PHASE_IDLE = 0,
    TRANSPORT_PHASE_LIVE,
    TRANSPORT_PHASE_ANSWERED
} transport_phase_t;

typedef struct transport_device_state {
    uint64_t sequence; /* of the last request published */
    uint32_t phase;    /* transport_phase_t */
    uint32_t status;   /* xp_status_t of this pass */
    uint32_t rows;     /* of the live request */
    uint32_t arrived;  /* blocks of the running put or take that are through */
    uint64_t requests, total_rows;
    uint64_t looks;   /* at the response, by waits */
    uint64_t wait_ns; /* in waits */
} transport_device_state_t;

/* ---- notice: what the Instance's own host tells its waits
 *
 * One word an Instance Rank, in host memory that the device maps, so that it reaches a wait however
 * many launches are queued behind it. Its host alone writes it. Between two Generations nobody
 * answers, and requests stay open: the word is odd while such a pause lasts. It counts up, so that
 * a wait sees a pause that was over between two of its looks. The end is for good, and no pause.
 * The word says nothing of answers: whoever answers, and when, is in the arena.
 */
#define TRANSPORT_NOTICE_END (1u << 31) /* with it: the xp_status_t of the end */

PROTOCOL_FUNCTION int transport_notice_paused(uint32_t notice)
{
    return !(notice & TRANSPORT_NOTICE_END) && (notice & 1u);
}
/* 0, or why it is the end. */
PROTOCOL_FUNCTION uint32_t transport_notice_end(uint32_t notice)
{
    const uint32_t reason = notice & ~TRANSPORT_NOTICE_END;
    if (!(notice & TRANSPORT_NOTICE_END))
        return 0;
    return reason && reason < XP_STATUS_COUNT ? reason : (uint32_t)XP_PEER;
}

/* A wait is never longer than this, pauses included: below the watchdogs of engines. */
#define TRANSPORT_WAIT_MAX_NS 240000000000ull

/* How long a wait lasts at most; an argument of its launch. */
typedef struct transport_patience {
    uint64_t life, notice; /* addresses of the words */
    uint64_t limit_ns;     /* outside of pauses */
    uint64_t pause_ns;     /* of one pause */
} transport_patience_t;

/* What differs from replay to replay of a captured graph; written by the host before each. */
typedef struct transport_live {
    uint32_t rows; /* at most the captured rows; the rest is padding and never travels */
    uint32_t kind; /* transport_kind_t */
    uint64_t slo_deadline_ns;
    uint32_t dp_rows[MAILBOX_MAX_DP];
} transport_live_t;

/* Rows that a pass moves: the live ones, within what was captured. */
PROTOCOL_FUNCTION uint32_t transport_device_rows(const transport_live_t *live, uint32_t captured)
{
    return live->rows < captured ? live->rows : captured;
}

/* After all rows were written, by one thread. */
PROTOCOL_FUNCTION void transport_device_put(mailbox_arena_t *arena, transport_device_state_t *state,
                                            const transport_live_t *live, uint32_t layer,
                                            uint32_t captured)
{
    if (state->status != XP_OK)
        return;
    if (state->phase != TRANSPORT_PHASE_IDLE) {
        state->status = XP_INVALID;
        return;
    }
    /* Whether the arena is closed is for the wait to find: a look here would cost each layer a trip
     * to memory, and nobody answers a request in a closed arena. */
    state->rows = transport_device_rows(live, captured);
    state->sequence++;
    state->phase = TRANSPORT_PHASE_LIVE;
    state->requests++;
    state->total_rows += state->rows;
    arena->request.slo_deadline_ns = live->slo_deadline_ns;
    arena->request.layer = layer;
    arena->request.rows = state->rows;
    arena->request.kind = live->kind;
    arena->request.dp_rows[0] = live->dp_rows[0] ? live->dp_rows[0] : state->rows;
    for (int i = 1; i < MAILBOX_MAX_DP; i++)
        arena->request.dp_rows[i] = live->dp_rows[i];
    mailbox_request_publish(arena, state->sequence);
}

/* One look of a wait. Returns 1 when the wait is over. */
PROTOCOL_FUNCTION int transport_device_wait_look(const mailbox_arena_t *arena,
                                                 transport_device_state_t *state)
{
    uint32_t answer = 0, closed = 0;
    switch (mailbox_response_wait_look(arena, state->sequence, &answer, &closed)) {
    case MAILBOX_LIVE:
        state->phase = answer == XP_OK ? TRANSPORT_PHASE_ANSWERED : TRANSPORT_PHASE_IDLE;
        state->status = answer < XP_STATUS_COUNT ? answer : (uint32_t)XP_PEER;
        return 1;
    case MAILBOX_NONE:
        break;
    case MAILBOX_NONSENSE:
        state->status = XP_PEER;
        return 1;
    }
    if (closed)
        state->status = closed < XP_STATUS_COUNT ? closed : (uint32_t)XP_PEER;
    return closed != 0;
}

/* Before the first look. Returns 1 when there is nothing to wait for. */
PROTOCOL_FUNCTION int transport_device_wait_begin(transport_device_state_t *state)
{
    if (state->status == XP_OK && state->phase != TRANSPORT_PHASE_LIVE)
        state->status = XP_INVALID;
    return state->status != XP_OK;
}

/* How long a wait has been going on, and under which notice. */
typedef struct transport_clock {
    uint64_t begin_ns; /* of the wait */
    uint64_t since_ns; /* of the limit that holds now */
    uint32_t seen;     /* the notice, once looked at */
    uint32_t looked;
} transport_clock_t;

PROTOCOL_FUNCTION void transport_device_wait_start(transport_clock_t *clock, uint64_t now_ns)
{
    clock->begin_ns = clock->since_ns = now_ns;
    clock->seen = clock->looked = 0;
}

/* Between looks, every LIFE_LOOK_NS: the own process's end and the limits. Returns 1 when over.
 * In a pause, and again after it, the time counts from its begin; what began before the wait's
 * first look here counts from the wait's begin. acquire: pairs with the host's release in
 * transport_cuda_client_pause and _end. */
PROTOCOL_FUNCTION int transport_device_wait_life(const transport_patience_t *patience,
                                                 transport_device_state_t *state,
                                                 transport_clock_t *clock, uint64_t now_ns)
{
    const uint32_t end = life_word_look((const uint32_t *)(uintptr_t)patience->life);
    const uint32_t notice = PROTOCOL_LOAD_ACQUIRE((const uint32_t *)(uintptr_t)patience->notice);
    if (clock->looked && notice != clock->seen)
        clock->since_ns = now_ns;
    clock->seen = notice;
    clock->looked = 1;
    const uint64_t limit_ns =
        transport_notice_paused(notice) ? patience->pause_ns : patience->limit_ns;
    if (end)
        state->status = XP_CANCELLED;
    else if (transport_notice_end(notice))
        state->status = transport_notice_end(notice);
    else if (now_ns - clock->since_ns >= limit_ns ||
             now_ns - clock->begin_ns >= TRANSPORT_WAIT_MAX_NS)
        state->status = XP_TIMEOUT;
    return state->status != XP_OK;
}

/* May take copy? Read by every block before any of them is through. */
PROTOCOL_FUNCTION int transport_device_take_allowed(const transport_device_state_t *state)
{
    return state->status == XP_OK && state->phase == TRANSPORT_PHASE_ANSWERED;
}

/* After all rows were copied, by one thread. */
PROTOCOL_FUNCTION void transport_device_take(transport_device_state_t *state)
{
    if (transport_device_take_allowed(state))
        state->phase = TRANSPORT_PHASE_IDLE;
    else if (state->status == XP_OK)
        state->status = XP_INVALID;
}

/* ---- AtnAgent ---------------------------------------------------------------------------
 *
 * One table a resident kernel, in the AtnAgent's device memory. The host describes a slot and then
 * publishes `wanted`; the slot's warp follows and answers in `now`. Both hold a state and the turn,
 * the number of the host's order, so that an answer to an earlier order is never taken for one to
 * this: memory is unmapped only when the warp has said of this very detach that it is through.
 * Words that host and kernel share change by kernels of the control stream (cuda_kernels.cu), with
 * release.
 */
#define TRANSPORT_RESIDENT_MAGIC 0x31535258u /* "XRS1" */
#define TRANSPORT_RESIDENT_SLOTS 24

typedef enum transport_slot_state {
    TRANSPORT_SLOT_EMPTY = 0,
    TRANSPORT_SLOT_ATTACHED,
    TRANSPORT_SLOT_DROPPED /* by the kernel, `reason` says why; the host detaches it */
} transport_slot_state_t;

PROTOCOL_FUNCTION uint32_t transport_slot_word(uint32_t turn, uint32_t state)
{
    return turn << 2 | state;
}
PROTOCOL_FUNCTION uint32_t transport_slot_state(uint32_t word)
{
    return word & 3u;
}
PROTOCOL_FUNCTION uint32_t transport_slot_turn(uint32_t word)
{
    return word >> 2;
}

typedef struct transport_slot {
    /* Host. */
    uint32_t wanted; /* word of EMPTY or ATTACHED; published after the rest of the line */
    uint32_t hidden, max_rows, dtype, dp_size;
    uint32_t life; /* the Instance's life word */
    uint64_t arena, row_bytes, input_offset, output_offset;
    uint8_t pad0[MAILBOX_LINE - 56];
    /* Kernel. */
    uint32_t now;    /* word of any state, with the turn that it answers */
    uint32_t reason; /* xp_status_t, when DROPPED */
    uint64_t answered, requests, total_rows;
    uint32_t ended; /* the watcher's copy of the Instance's life word */
    uint8_t pad1[MAILBOX_LINE - 36];
} transport_slot_t;

typedef struct transport_resident {
    uint32_t magic, slots;
    uint32_t own_life; /* the AtnAgent's life word */
    uint32_t pad0;
    uint32_t stop;    /* host: leave */
    uint32_t ended;   /* the watcher's copy of own_life's word */
    uint32_t running; /* kernel: 1 while it runs */
    uint8_t pad1[MAILBOX_LINE - 28];
    transport_slot_t slot[TRANSPORT_RESIDENT_SLOTS];
} transport_resident_t;

/* The bounds of what a request may say; the peer is not trusted. */
PROTOCOL_FUNCTION int transport_slot_request_valid(const transport_slot_t *slot,
                                                   const mailbox_request_t *request)
{
    if (request->rows > slot->max_rows || request->layer >= MAILBOX_LAYER_LIMIT ||
        request->kind >= MAILBOX_KIND_COUNT)
        return 0;
    /* All counts, so that the loop unrolls and the record stays in registers. */
    for (uint32_t i = 0; i < MAILBOX_MAX_DP; i++)
        if (slot->dp_size > 1 && i < slot->dp_size && request->dp_rows[i] > slot->max_rows)
            return 0;
    return 1;
}
#endif
