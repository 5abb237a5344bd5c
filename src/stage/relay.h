/* SPDX-License-Identifier: MIT */
/*
 * What the AtnAgent's resident kernel knows of the Instance Rank in each slot: where its lines and
 * rows go, and the relay arena in which the FfnAgents answer. One source for C and CUDA; written by
 * the host before the slot is attached. And the books for the observers: one record a request that
 * was carried and answered, written after the answer.
 */
#ifndef XPOOL_STAGE_RELAY_H
#define XPOOL_STAGE_RELAY_H

#include "ffn/cuda/dispatch_steps.h"
#include "stage/records.h"

typedef struct stage_relay_slot {
    uint32_t uniform; /* the group of every layer when they are alike, else 0 */
    uint32_t layers, hidden, dtype, tp, dp, rank;
    uint32_t direct;   /* groups of several deliver partials, which the relay reduces */
    uint32_t instance; /* its place in the plan, for records */
    uint32_t observed; /* requests are recorded */
    uint64_t groups;   /* uint32_t [layers] */
    uint64_t line[STAGE_MAX_MEMBERS], input[STAGE_MAX_MEMBERS]; /* in the stage of each FfnAgent */
    uint32_t pe[STAGE_MAX_MEMBERS];                             /* of each FfnAgent; over NVSHMEM */
    uint64_t bounce;          /* over NVSHMEM: rows are put from here; 0: from the arena */
    uint64_t arena;           /* the relay arena */
    uint64_t output, partial; /* addresses in it */
    uint64_t partial_stride;  /* elements */
} stage_relay_slot_t;

typedef struct stage_relay {
    stage_relay_slot_t slot[TRANSPORT_RESIDENT_SLOTS];
    uint64_t began_ns[TRANSPORT_RESIDENT_SLOTS]; /* the request in flight, where observed */
    uint64_t clock_ns;                           /* the device's, when a slot was described */
    ffn_cuda_counters_t counters;                /* of what is observed, and the ring of records */
} stage_relay_t;

/* The request of slot `index` was answered; its rank alone calls. now_ns: of the device's clock. */
PROTOCOL_FUNCTION void stage_relay_record(stage_relay_t *relay, uint32_t index, uint64_t sequence,
                                          uint32_t layer, uint32_t rows, uint32_t kind,
                                          uint64_t now_ns)
{
    const stage_relay_slot_t *slot = &relay->slot[index];
    ffn_cuda_record_t record = {0};
    record.end_ns = now_ns;
    record.duration_ns = now_ns > relay->began_ns[index] ? now_ns - relay->began_ns[index] : 0;
    record.ticket = sequence;
    record.layer = layer;
    record.rows = rows;
    record.instance = (uint16_t)slot->instance;
    record.rank = (uint16_t)slot->rank;
    record.kind = (uint8_t)kind;
    ffn_cuda_record_end(&relay->counters, &record);
}
#endif
