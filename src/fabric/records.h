/* SPDX-License-Identifier: MIT */
/*
 * The Fabric arena's typed records. Plain layouts that mean the same in C and CUDA.
 *
 * A record is written by one PE and published by its first word, a sequence or ticket that only
 * grows: body first, then the word with release. A reader loads the word with acquire and then each
 * field once. The writer writes a record again only after the reader, by a record of its own, has
 * shown that it is done with it; docs/designs/protocol.md lists these chains. Every PE has its own
 * copy of what others publish to it; in the provider `shm` all copies lie in one memory.
 */
#ifndef XPOOL_FABRIC_RECORDS_H
#define XPOOL_FABRIC_RECORDS_H

#include <stdint.h>

#include "fabric/plan.h"
#include "transport/mailbox.h"

#define FABRIC_ARENA_MAGIC    0x31414658u /* "XFA1" */
#define FABRIC_ABI            1u
#define FABRIC_FAILURE_TEXT   128
#define FABRIC_PAGE           4096u
#define FABRIC_ROUTING_REPEAT 1u /* every shard routes by itself, from the same rows */

/* ---- header --------------------------------------------------------------------------------- */
/* Failure word: 0, or (pe + 1) << 8 | index of the text. Who fails takes a text of its own, writes
 * it, and then claims the word by compare-and-swap, which decides whose failure is the canonical
 * one; so the canonical text is complete when the word is seen. With all texts taken the index is
 * the number of texts, and there is none. */
#define FABRIC_FAILURE_TEXTS 16

typedef struct fabric_header {
    uint32_t magic, abi;
    uint64_t bytes, plan_digest, generation, plan_offset, plan_bytes;
    uint8_t pad0[MAILBOX_LINE - 48];
    uint64_t failure;       /* any PE or the daemon */
    uint32_t shutdown;      /* the daemon; 0 or 1 */
    uint32_t failure_taken; /* texts given out */
    uint8_t pad1[MAILBOX_LINE - 16];
    char failure_texts[FABRIC_FAILURE_TEXTS][FABRIC_FAILURE_TEXT];
} fabric_header_t;

typedef enum fabric_pe_state {
    FABRIC_PE_ABSENT = 0,
    FABRIC_PE_RUNNING,
    FABRIC_PE_LEFT
} fabric_pe_state_t;

/* Written by its PE, read by anyone. */
typedef struct fabric_pe_record {
    uint32_t state; /* fabric_pe_state_t */
    uint8_t pad0[MAILBOX_LINE - 4];
    uint64_t counters[16]; /* fabric_pe_counters_t in its order */
} fabric_pe_record_t;

/* Added to by whichever FfnAgent led the Invocation. */
typedef struct fabric_instance_record {
    uint64_t invocations, rows;
    uint8_t pad[MAILBOX_LINE - 16];
} fabric_instance_record_t;

/* ---- slot: one (Instance, rank) ------------------------------------------------------------- */
/* AtnAgent to Coordinator. In the eager form the input rows lie in the slot already. */
typedef struct fabric_submission {
    uint64_t sequence; /* of this slot */
    uint64_t request;  /* Transport sequence; must agree over the ranks */
    uint64_t slo_deadline_ns;
    uint64_t submitted_ns;            /* for the queue statistics only */
    uint32_t layer, rows, kind, form; /* form: FABRIC_FORM_EAGER or FABRIC_FORM_LONG */
    uint32_t dp_rows[FABRIC_MAX_RANKS];
    uint8_t pad[2 * MAILBOX_LINE - 80];
} fabric_submission_t;

/* Coordinator to AtnAgent, long form: the Lane and where this rank's rows begin in it. */
typedef struct fabric_admission {
    uint64_t sequence;
    uint32_t lane, row_offset;
    uint8_t pad[MAILBOX_LINE - 16];
} fabric_admission_t;

typedef enum fabric_source {
    FABRIC_SOURCE_SLOT = 1, /* the slot's output area */
    FABRIC_SOURCE_LANE,     /* the Lane's output area, from row_offset */
    FABRIC_SOURCE_NONE      /* never executed: dropped by the Coordinator */
} fabric_source_t;

/* The group's first member (or, for a drop, the Coordinator) to AtnAgent. */
typedef struct fabric_commit {
    uint64_t sequence;
    uint32_t source, lane;
    uint8_t pad[MAILBOX_LINE - 16];
} fabric_commit_t;

/* A member to a consumer under DIRECT_PARTIAL: its partial lies in the Lane. */
typedef struct fabric_direct_partial {
    uint64_t sequence;
    uint32_t lane, reserved;
} fabric_direct_partial_t;

typedef struct fabric_slot {
    fabric_submission_t submission;
    /* AtnAgent's words; each is a slot sequence. */
    uint64_t input_ready; /* to the group: this rank's rows are in the Lane */
    uint64_t output_ack;  /* to the Coordinator: the Lane's output has been copied */
    uint64_t abandon;     /* to the Coordinator: submissions up to here have lost their Instance */
    uint8_t pad0[MAILBOX_LINE - 24];
    fabric_admission_t admission;
    fabric_commit_t commit;
    fabric_direct_partial_t partial_ready[FABRIC_MAX_FFN];
} fabric_slot_t;

/* ---- Lane ----------------------------------------------------------------------------------- */
/* Coordinator to each member of the group; one copy a member. */
typedef struct fabric_execution {
    uint64_t ticket; /* number of the lease, growing over the Generation */
    uint32_t instance, layer, form, ranks;
    uint64_t sequences[FABRIC_MAX_RANKS]; /* slot sequences of the ranks */
    uint32_t dp_rows[FABRIC_MAX_RANKS];
    uint8_t pad[MAILBOX_LINE - 56];
} fabric_execution_t;

/* The group's first member, before its compute: how this Invocation's rows are routed to experts.
 */
typedef struct fabric_routing {
    uint64_t ticket;
    uint32_t mode, rows;
    uint8_t pad[MAILBOX_LINE - 16];
} fabric_routing_t;

typedef struct fabric_ticket_line {
    uint64_t ticket;
    uint8_t pad[MAILBOX_LINE - 8];
} fabric_ticket_line_t;

typedef struct fabric_lane {
    fabric_execution_t execution[FABRIC_MAX_FFN];
    fabric_routing_t routing;
    fabric_ticket_line_t partial_ready[FABRIC_MAX_FFN]; /* member to the first member */
    fabric_ticket_line_t completion;                    /* first member to Coordinator */
} fabric_lane_t;

/* ---- where everything lies: computed from the plan, never read from memory ---------------- */
typedef struct fabric_layout {
    uint64_t bytes;
    uint64_t plan, pes, instances, slots, lanes; /* offsets of the tables */
    uint32_t slot_base[FABRIC_MAX_INSTANCES];    /* first slot of an Instance */
    uint32_t slot_count;
    uint64_t slot_input[FABRIC_MAX_INSTANCES]; /* eager form only, 0 otherwise */
    uint64_t slot_output[FABRIC_MAX_INSTANCES];
    uint64_t lane_input, lane_output, lane_partial; /* of Lane 0; 0 when no Instance needs them */
    uint64_t lane_rows_bytes;                       /* one input or output area */
    uint64_t lane_partial_bytes;                    /* one member's partial area */
    uint32_t lane_partials;                         /* members at most */
} fabric_layout_t;

void fabric_layout_compute(const fabric_plan_t *plan, fabric_layout_t *layout_out);
uint64_t fabric_plan_digest(const fabric_plan_t *plan);

static inline uint64_t fabric_slot_offset(const fabric_layout_t *layout, uint32_t instance,
                                          uint32_t rank)
{
    return layout->slots + (uint64_t)(layout->slot_base[instance] + rank) * sizeof(fabric_slot_t);
}
static inline uint64_t fabric_lane_offset(const fabric_layout_t *layout, uint32_t lane)
{
    return layout->lanes + (uint64_t)lane * sizeof(fabric_lane_t);
}
static inline uint64_t fabric_lane_input(const fabric_layout_t *layout, uint32_t lane)
{
    return layout->lane_input + lane * layout->lane_rows_bytes;
}
static inline uint64_t fabric_lane_output(const fabric_layout_t *layout, uint32_t lane)
{
    return layout->lane_output + lane * layout->lane_rows_bytes;
}
static inline uint64_t fabric_lane_partial(const fabric_layout_t *layout, uint32_t lane,
                                           uint32_t member)
{
    return layout->lane_partial +
           ((uint64_t)lane * layout->lane_partials + member) * layout->lane_partial_bytes;
}

/* ---- small facts about a plan --------------------------------------------------------------- */
static inline uint32_t fabric_group_size(uint32_t group)
{
    return (uint32_t)__builtin_popcount(group);
}
static inline uint32_t fabric_group_first(uint32_t group)
{
    return (uint32_t)__builtin_ctz(group);
}
/* Position of FfnAgent `ffn` in the group, in PE order. */
static inline uint32_t fabric_group_member(uint32_t group, uint32_t ffn)
{
    return (uint32_t)__builtin_popcount(group & ((1u << ffn) - 1));
}
/* PE bits of the group's FfnAgents. */
static inline uint32_t fabric_group_pes(const fabric_plan_t *plan, uint32_t group)
{
    return group << plan->atn_count;
}
static inline uint32_t fabric_coordinator_pe(const fabric_plan_t *plan)
{
    return plan->atn_count;
}
static inline uint64_t fabric_row_bytes(const fabric_plan_instance_t *instance)
{
    return (uint64_t)instance->hidden * sizeof(float);
}
/* The form of this Instance's Submissions. */
static inline uint32_t fabric_instance_form(const fabric_plan_instance_t *instance)
{
    if (instance->form != FABRIC_FORM_AUTO)
        return instance->form;
    return fabric_plan_ranks(instance) == 1 ? FABRIC_FORM_EAGER : FABRIC_FORM_LONG;
}
/* Every member delivers its partial to the consumers, who reduce. */
static inline int fabric_is_direct(const fabric_plan_instance_t *instance, uint32_t group)
{
    return instance->delivery == FABRIC_DELIVERY_DIRECT_PARTIAL && fabric_group_size(group) > 1;
}
#endif
