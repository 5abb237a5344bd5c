/* SPDX-License-Identifier: MIT */
/*
 * What the AtnAgent's resident kernel knows of the Instance Rank in each slot: where its lines and
 * rows go, and the relay arena in which the FfnAgents answer. One source for C and CUDA; written by
 * the host before the slot is attached.
 */
#ifndef XPOOL_STAGE_RELAY_H
#define XPOOL_STAGE_RELAY_H

#include "stage/records.h"

typedef struct stage_relay_slot {
    uint32_t uniform; /* the group of every layer when they are alike, else 0 */
    uint32_t layers, hidden, dtype, tp, dp, rank;
    uint32_t direct; /* groups of several deliver partials, which the relay reduces */
    uint64_t groups; /* uint32_t [layers] */
    uint64_t line[STAGE_MAX_MEMBERS], input[STAGE_MAX_MEMBERS]; /* in the stage of each FfnAgent */
    uint32_t pe[STAGE_MAX_MEMBERS];                             /* of each FfnAgent; over NVSHMEM */
    uint64_t bounce;          /* over NVSHMEM: rows are put from here; 0: from the arena */
    uint64_t arena;           /* the relay arena */
    uint64_t output, partial; /* addresses in it */
    uint64_t partial_stride;  /* elements */
} stage_relay_slot_t;

typedef struct stage_relay {
    stage_relay_slot_t slot[TRANSPORT_RESIDENT_SLOTS];
} stage_relay_t;
#endif
