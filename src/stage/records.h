/* SPDX-License-Identifier: MIT */
/*
 * Stages: what an Instance writes into an FfnAgent's device memory, and what its members write to
 * each other. One source for C and CUDA: layouts and transitions, static functions only.
 * verify/stage.pml models exactly these.
 *
 * A stage belongs to one Instance and one FfnAgent. It has a line for each Instance Rank and one
 * input area, in which the rows of the attention DP ranks lie one after another: every rank knows
 * the counts of all, so each writes its own rows at their place and nobody has to gather them.
 * Under attention TP the rows of a DP rank come from its first rank; the others publish only their
 * line.
 *
 *   line of a rank   EMPTY/TAKEN s ── stage_line_publish(t > s) ──▶ LIVE t ── answered ──▶ TAKEN t
 *
 * | word                | writer            | reader            | rewritten after            |
 * | brief, after line   | Instance Rank     | FfnAgent          | the answer of all members  |
 * | partial.sequence    | member            | first member      | the answer (next lines)    |
 * | response, partial   | first member,     | Instance Rank     | the next lines of all      |
 * |  of the arena       |  each member      |  (or relay)       |  ranks                     |
 *
 * Sequences are the Transport's, one count an Instance over all layers, and grow; a stage sees only
 * those of its own layers. All ranks of an Instance use the same number for the same layer.
 */
#ifndef XPOOL_STAGE_RECORDS_H
#define XPOOL_STAGE_RECORDS_H

#include "fabric/plan.h"
#include "transport/cuda_device.h"

#define STAGE_MAGIC          0x31475358u /* "XSG1" */
#define STAGE_PARTIALS_MAGIC 0x31505358u /* "XSP1" */
#define STAGE_ABI            2u
#define STAGE_HEADER_BYTES   4096u
#define STAGE_MAX_MEMBERS    FABRIC_MAX_FFN

/* ---- stage: Instance Ranks to an FfnAgent --------------------------------------------------- */
typedef mailbox_request_t stage_line_t;

/* The word that is polled: the sequence's low half and, so that the common case is one trip to
 * memory, what a rank that is alone says in its line. */
typedef struct stage_brief {
    uint64_t word; /* published last */
    uint8_t pad[MAILBOX_LINE - 8];
} stage_brief_t;
#define STAGE_BRIEF_LAYER_BITS 10u
#define STAGE_BRIEF_ROWS_BITS  17u
#define STAGE_BRIEF_KIND_BITS  2u
#define STAGE_BRIEF_LONG       (1ull << 63) /* does not fit: the line says it */

typedef struct stage_head {
    uint32_t magic, abi;
    uint64_t bytes, generation;
    uint32_t instance, ffn, ranks, dp_size, hidden, max_rows, dtype, reserved;
    uint8_t pad[MAILBOX_LINE - 56];
} stage_head_t;

typedef struct stage_page {
    stage_head_t head;                    /* constant, written by the FfnAgent */
    stage_line_t lines[FABRIC_MAX_RANKS]; /* one cache line each, the rank's */
    stage_brief_t briefs[FABRIC_MAX_RANKS];
    /* input rows at STAGE_HEADER_BYTES */
} stage_page_t;

/* Lines and briefs of one page lie at a fixed distance. */
PROTOCOL_FUNCTION uint64_t *stage_line_brief(const stage_line_t *line)
{
    return (uint64_t *)((uintptr_t)line + FABRIC_MAX_RANKS * sizeof(stage_line_t));
}

PROTOCOL_FUNCTION uint64_t stage_brief_make(const stage_line_t *line)
{
    const uint32_t rows_at = 32 + STAGE_BRIEF_LAYER_BITS, kind_at = rows_at + STAGE_BRIEF_ROWS_BITS;
    const uint64_t low = line->sequence & 0xffffffffu;
    if (line->layer >> STAGE_BRIEF_LAYER_BITS || line->rows >> STAGE_BRIEF_ROWS_BITS ||
        line->kind >> STAGE_BRIEF_KIND_BITS || line->rows != line->dp_rows[0])
        return STAGE_BRIEF_LONG | low;
    return low | (uint64_t)line->layer << 32 | (uint64_t)line->rows << rows_at |
           (uint64_t)line->kind << kind_at;
}

/* What a brief says, after `taken`, the last sequence that was answered; of the fields below
 * dp_rows the first one only, and no deadline. 0: it does not say it. Sequences grow by less than
 * the half of what fits the low half, since a pass has fewer layers. */
PROTOCOL_FUNCTION int stage_brief_read(uint64_t brief, uint64_t taken, stage_line_t *line_out)
{
    const uint32_t rows_at = 32 + STAGE_BRIEF_LAYER_BITS, kind_at = rows_at + STAGE_BRIEF_ROWS_BITS;
    const uint32_t step = (uint32_t)brief - (uint32_t)taken;
    if ((brief & STAGE_BRIEF_LONG) || step == 0 || step >> 31)
        return 0;
    line_out->sequence = taken + step;
    line_out->slo_deadline_ns = 0;
    line_out->layer = (uint32_t)(brief >> 32) & ((1u << STAGE_BRIEF_LAYER_BITS) - 1);
    line_out->rows = (uint32_t)(brief >> rows_at) & ((1u << STAGE_BRIEF_ROWS_BITS) - 1);
    line_out->kind = (uint32_t)(brief >> kind_at) & ((1u << STAGE_BRIEF_KIND_BITS) - 1);
    line_out->reserved = 0;
    line_out->dp_rows[0] = line_out->rows;
    for (int i = 1; i < MAILBOX_MAX_DP; i++)
        line_out->dp_rows[i] = 0;
    return 1;
}

/* Instance Rank, no line of it live: rows and the other fields of the line were written before, by
 * this thread or by threads that this one has met in a barrier. release: pairs with
 * stage_line_changed. */
PROTOCOL_FUNCTION void stage_line_publish(stage_line_t *line, const stage_line_t *value)
{
    line->sequence = value->sequence;
    PROTOCOL_PUBLISH(stage_line_brief(line), stage_brief_make(value));
}

/* FfnAgent: is there a line after `taken`, the last one answered? Its brief goes to *brief_out.
 * acquire: pairs with stage_line_publish. What this thread, or one that it meets in a barrier,
 * reads afterwards of line and rows is of the sequence that was found, or of a later one. */
PROTOCOL_FUNCTION int stage_line_changed(const stage_line_t *line, uint64_t taken,
                                         uint64_t *brief_out)
{
    const uint64_t brief = PROTOCOL_LOAD_ACQUIRE(stage_line_brief(line));
    if ((uint32_t)brief == (uint32_t)taken)
        return 0;
    *brief_out = brief;
    return 1;
}

/* FfnAgent, after stage_line_changed() has found one, so that its order holds here and sequence and
 * fields come in one trip to memory. Fields are loaded once into *line_out, which is written only
 * for MAILBOX_LIVE. An Instance that writes the next line before the answer may mix the two: its
 * fields are checked like any others. */
PROTOCOL_FUNCTION mailbox_look_t stage_line_read(const stage_line_t *line, uint64_t taken,
                                                 stage_line_t *line_out)
{
    /* All loads before the first store: a device keeps the order that is written here, and a store
     * waits for the load before it, so field by field would be a trip to memory each. */
    const uint64_t sequence = PROTOCOL_LOAD_RELAXED(&line->sequence);
    const uint64_t deadline = PROTOCOL_LOAD_RELAXED(&line->slo_deadline_ns);
    const uint32_t layer = PROTOCOL_LOAD_RELAXED(&line->layer);
    const uint32_t rows = PROTOCOL_LOAD_RELAXED(&line->rows);
    const uint32_t kind = PROTOCOL_LOAD_RELAXED(&line->kind);
    const uint32_t counts[MAILBOX_MAX_DP] = {
        PROTOCOL_LOAD_RELAXED(&line->dp_rows[0]), PROTOCOL_LOAD_RELAXED(&line->dp_rows[1]),
        PROTOCOL_LOAD_RELAXED(&line->dp_rows[2]), PROTOCOL_LOAD_RELAXED(&line->dp_rows[3]),
        PROTOCOL_LOAD_RELAXED(&line->dp_rows[4]), PROTOCOL_LOAD_RELAXED(&line->dp_rows[5]),
        PROTOCOL_LOAD_RELAXED(&line->dp_rows[6]), PROTOCOL_LOAD_RELAXED(&line->dp_rows[7])};
    if (sequence == taken)
        return MAILBOX_NONE;
    if (sequence < taken)
        return MAILBOX_NONSENSE;
    line_out->sequence = sequence;
    line_out->slo_deadline_ns = deadline;
    line_out->layer = layer;
    line_out->rows = rows;
    line_out->kind = kind;
    line_out->reserved = 0;
    for (int i = 0; i < MAILBOX_MAX_DP; i++)
        line_out->dp_rows[i] = counts[i];
    return MAILBOX_LIVE;
}

/* ---- partials: members to the group's first member ------------------------------------------ */
/* One an Instance where an FfnAgent reduces. The areas belong to the Instance and not to a Lane, so
 * no member holds a Lane while it waits for another: any number of Lanes is free of deadlock. */
typedef struct stage_partials {
    uint32_t magic, abi;
    uint64_t bytes;
    uint32_t instance, ffn, members, rows, hidden, reserved;
    uint8_t pad[MAILBOX_LINE - 40];
    mailbox_partial_t ready[STAGE_MAX_MEMBERS]; /* by position in the group */
    /* FP32 areas [members][rows][hidden] at STAGE_HEADER_BYTES */
} stage_partials_t;

/* ---- Instance Rank -------------------------------------------------------------------------- */
/* Where one put goes: into the stages of the layer's members, or (relay) into its own arena. */
typedef struct stage_target {
    uint64_t line, input; /* addresses */
} stage_target_t;

typedef struct stage_put {
    uint32_t count; /* of targets */
    uint32_t layer, captured;
    uint32_t dp, dp_size; /* this rank's DP rank */
    uint32_t carries;     /* its rows travel; 0 for the further ranks of attention TP */
    uint32_t relayed;     /* the target is an arena's request, which has no brief */
    uint32_t gathered;    /* at their place among those of all DP ranks; 0: at the start */
    uint32_t max_rows;    /* of each DP rank */
    uint64_t row_bytes;
    stage_target_t targets[STAGE_MAX_MEMBERS];
} stage_put_t;

/* Where the answer lies in the arena, and how it is taken. */
typedef struct stage_take {
    uint64_t output, partial; /* addresses */
    uint64_t partial_stride;  /* FP32 elements from one member's area to the next */
    uint32_t members;         /* that answer with partials; 0: the complete rows are there */
    uint32_t dtype;           /* ffn_cuda_dtype_t */
    uint32_t narrow;          /* rows are not whole eights of elements */
    uint32_t captured;
    uint64_t row_bytes;
} stage_take_t;

/* Bytes that this rank's rows are away from the start of the input area. The counts may have been
 * written on the device, where nobody checked them: whatever they say, the rows stay within the
 * stage (the line carries the counts as they are, and is refused). */
PROTOCOL_FUNCTION uint64_t stage_put_offset(const stage_put_t *put, const transport_live_t *live)
{
    uint64_t before = 0;
    for (uint32_t i = 0; put->gathered && i < put->dp && i < MAILBOX_MAX_DP; i++)
        before += live->dp_rows[i] < put->max_rows ? live->dp_rows[i] : put->max_rows;
    return before * put->row_bytes;
}

/* Rows that this rank puts, and which of them travel. */
PROTOCOL_FUNCTION uint64_t stage_put_bytes(const stage_put_t *put, const transport_live_t *live)
{
    return put->carries ? transport_device_rows(live, put->captured) * put->row_bytes : 0;
}

/* May put write rows? Read by every block before any of them is through. */
PROTOCOL_FUNCTION int stage_put_allowed(const transport_device_state_t *state)
{
    return state->status == XP_OK && state->phase == TRANSPORT_PHASE_IDLE;
}

/* The fields of a line but its sequence: a few wide stores, since each goes over the link. */
PROTOCOL_FUNCTION void stage_line_fill(stage_line_t *line, const stage_line_t *value)
{
#ifdef __CUDA_ARCH__
    line->slo_deadline_ns = value->slo_deadline_ns;
    ((uint4 *)line)[1] = make_uint4(value->layer, value->rows, value->kind, 0);
    ((uint4 *)line)[2] =
        make_uint4(value->dp_rows[0], value->dp_rows[1], value->dp_rows[2], value->dp_rows[3]);
    ((uint4 *)line)[3] =
        make_uint4(value->dp_rows[4], value->dp_rows[5], value->dp_rows[6], value->dp_rows[7]);
#else
    line->slo_deadline_ns = value->slo_deadline_ns;
    line->layer = value->layer;
    line->rows = value->rows;
    line->kind = value->kind;
    line->reserved = 0;
    for (uint32_t i = 0; i < MAILBOX_MAX_DP; i++)
        line->dp_rows[i] = value->dp_rows[i];
#endif
}

/* After all rows were written: the line of the next Invocation, and the state after it. Returns 0
 * when there is none to publish. */
PROTOCOL_FUNCTION int stage_device_put_line(const stage_put_t *put, transport_device_state_t *state,
                                            const transport_live_t *live, stage_line_t *line_out)
{
    if (state->status != XP_OK)
        return 0;
    if (state->phase != TRANSPORT_PHASE_IDLE) {
        state->status = XP_INVALID;
        return 0;
    }
    line_out->slo_deadline_ns = live->slo_deadline_ns;
    line_out->layer = put->layer;
    line_out->rows = transport_device_rows(live, put->captured);
    line_out->kind = live->kind;
    line_out->reserved = 0;
    for (uint32_t i = 0; i < MAILBOX_MAX_DP; i++)
        line_out->dp_rows[i] = put->dp_size > 1 ? live->dp_rows[i] : i ? 0 : line_out->rows;
    state->rows = line_out->rows;
    state->sequence++;
    line_out->sequence = state->sequence;
    state->phase = TRANSPORT_PHASE_LIVE;
    state->requests++;
    state->total_rows += line_out->rows;
    return 1;
}

/* One thread for all targets, or one for each: a release waits for what its thread wrote before,
 * and so for the line of the target before. */
PROTOCOL_FUNCTION void stage_target_put(const stage_put_t *put, uint32_t target,
                                        const stage_line_t *value)
{
    stage_line_t *line = (stage_line_t *)(uintptr_t)put->targets[target].line;
    stage_line_fill(line, value);
    if (put->relayed)
        PROTOCOL_PUBLISH(&line->sequence, value->sequence);
    else
        stage_line_publish(line, value);
}

/* Both, by one thread. */
PROTOCOL_FUNCTION void stage_device_put(const stage_put_t *put, transport_device_state_t *state,
                                        const transport_live_t *live)
{
    stage_line_t line;
    if (!stage_device_put_line(put, state, live, &line))
        return;
    for (uint32_t t = 0; t < put->count; t++)
        stage_target_put(put, t, &line);
}

/* Who answers a put: members (bits), each with a partial; none of them: the response. FfnAgents
 * answer with rows or not at all; with this bit a status is read as well, which a relay writes and
 * which is a trip to memory of its own. */
#define STAGE_ANSWER_STATUS  (1u << 31)
#define STAGE_ANSWER_MEMBERS ((1u << STAGE_MAX_MEMBERS) - 1)

/* One look for the answer. *missing: members not seen yet, as in `direct` before the first look.
 * Returns 1 when over. */
PROTOCOL_FUNCTION int stage_device_wait_answer(const mailbox_arena_t *arena,
                                               transport_device_state_t *state, uint32_t direct,
                                               uint32_t *missing)
{
    const uint32_t members = direct & STAGE_ANSWER_MEMBERS;
    uint32_t answer = XP_OK;
    mailbox_look_t look = MAILBOX_LIVE;
    if (members == 0) {
        look = mailbox_word_read(&arena->response.sequence, state->sequence);
        if (look == MAILBOX_LIVE && (direct & STAGE_ANSWER_STATUS))
            answer = PROTOCOL_LOAD_RELAXED(&arena->response.status);
    }
    for (uint32_t left = *missing & members; left && look != MAILBOX_NONSENSE; left &= left - 1) {
        uint32_t member = 0;
        while (!(left >> member & 1))
            member++;
        look = mailbox_word_read(&mailbox_partial_of(arena, member)->sequence, state->sequence);
        if (look == MAILBOX_LIVE)
            *missing &= ~(1u << member);
    }
    if (look == MAILBOX_NONSENSE) {
        state->status = XP_PEER;
        return 1;
    }
    if (answer != XP_OK) {
        state->status = answer < XP_STATUS_COUNT ? answer : (uint32_t)XP_PEER;
        state->phase = TRANSPORT_PHASE_IDLE; /* the client may go on with the next pass */
        return 1;
    }
    if (members ? (*missing & members) == 0 : look == MAILBOX_LIVE) {
        state->phase = TRANSPORT_PHASE_ANSWERED;
        return 1;
    }
    return 0;
}

/* Was the arena closed? Every so many looks for the answer: each is a trip to memory of its own. An
 * answer that came between that look and this one was before the close, and counts. Returns 1 when
 * over. */
PROTOCOL_FUNCTION int stage_device_wait_closed(const mailbox_arena_t *arena,
                                               transport_device_state_t *state, uint32_t direct,
                                               uint32_t *missing)
{
    const uint32_t closed = mailbox_closed(arena);
    if (!closed)
        return 0;
    if (!stage_device_wait_answer(arena, state, direct, missing))
        state->status = closed < XP_STATUS_COUNT ? closed : (uint32_t)XP_PEER;
    return 1;
}

/* One look of a wait, both questions. Returns 1 when over. */
PROTOCOL_FUNCTION int stage_device_wait_look(const mailbox_arena_t *arena,
                                             transport_device_state_t *state, uint32_t direct,
                                             uint32_t *missing)
{
    return stage_device_wait_answer(arena, state, direct, missing) ||
           stage_device_wait_closed(arena, state, direct, missing);
}
#endif
