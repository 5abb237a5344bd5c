/* SPDX-License-Identifier: MIT */
/* What the scheduler of an FFN device knows, and how it begins; scheduler_steps.h has its steps. */
#ifndef XPOOL_STAGE_SCHEDULER_STATE_H
#define XPOOL_STAGE_SCHEDULER_STATE_H

#include "ffn/cuda/dispatch.h"
#include "fabric/policy.h"
#include "stage/job.h"
#include "stage/table.h"

#define STAGE_EVENTS     8u   /* lines taken in one turn */
#define STAGE_LINES      128u /* Instance Ranks of one FfnAgent; stage.h's STAGE_LINES_MAX */
#define STAGE_LOOK_TURNS 32u  /* orders, ages and failures are looked at every so many turns */
#define STAGE_SEVERAL    0xffffffffu
#define STAGE_CLOSED_NS  100000u /* after so long a wait: are the arenas closed? */

typedef enum stage_phase {
    STAGE_IDLE = 0,
    STAGE_GATHERING,
    STAGE_QUEUED,
    STAGE_RUNNING,
    STAGE_PARTIALS,
    STAGE_JOB
} stage_phase_t;

/* One Instance: what was copied of its description, and its live Invocation. */
typedef struct stage_work {
    stage_about_t about;
    uint32_t now; /* as in the table */
    uint32_t phase;
    uint32_t abandoned; /* detached while an Invocation is in flight */
    uint32_t ranks;
    uint32_t alone; /* one rank, one member, for every layer: stage_scheduler_alone() */
    uint64_t taken; /* sequence of the last Invocation that ended here */
    /* the live one */
    stage_line_t line; /* of the rank that came first */
    uint32_t gathered; /* ranks, bits */
    uint32_t first_rank;
    uint32_t rows; /* of all DP ranks */
    uint32_t group, member, members;
    uint32_t missing; /* PARTIALS: members, bits by position */
    uint32_t lane, lane_held;
    uint32_t urgent;
    uint32_t decode_rows; /* of the model: ffn_cuda_lease_takes() */
    uint32_t few_rows;
    uint64_t since_ns; /* of the phase */
    uint64_t arrival, passes;
    uint32_t job;      /* stage_job_kind_t that follows or goes on */
    uint32_t job_wide; /* its rows are FP32 */
    const void *job_from;
    uint64_t job_next;                     /* first element that no chunk has covered */
    uint64_t invocations, invocation_rows; /* totals */
} stage_work_t;

typedef struct stage_lane {
    uint64_t ticket;
    uint32_t instance, reserved;
} stage_lane_t;

typedef struct stage_line_at {
    const stage_line_t *line;
    uint32_t instance, rank, dp, reserved;
} stage_line_at_t;

/* A chunk for the other threads of the block; `number` grows with each. */
typedef struct stage_chunk {
    uint64_t number;
    uint32_t instance, reserved;
    uint64_t begin, end;
    stage_job_t job;
} stage_chunk_t;

typedef struct stage_scheduler {
    stage_table_t *table;
    const ffn_cuda_dispatch_t *dispatch; /* NULL: echo */
    uint64_t timeout_ns, random_state, arrivals, tickets;
    uint32_t instances, ffn, policy, lanes;
    uint32_t line_count, relist;
    uint64_t turn;
    uint32_t lanes_free;      /* bits */
    uint64_t queued, waiting; /* Instances, bits: QUEUED, PARTIALS */
    uint64_t jobs;            /* JOB */
    uint32_t failed, closing, leave;
    stage_line_t incoming; /* the line that is being taken; here, since it is indexed */
    ffn_cuda_poster_t poster;
    ffn_cuda_dispatch_t own_dispatch; /* a copy: constant, and near */
    stage_chunk_t chunk;              /* the one that is being done, or the last one */
    uint32_t chunk_busy, job_cursor, look_cursor;
    stage_counts_t counts;
    stage_lane_t lane[FFN_CUDA_MAX_LANES];
    stage_line_at_t lines[STAGE_LINES];
    uint64_t briefs[STAGE_LINES]; /* of the lines that changed */
    stage_work_t work[FABRIC_MAX_INSTANCES];
} stage_scheduler_t;

PROTOCOL_FUNCTION uint32_t stage_count_bits(uint64_t bits)
{
#ifdef __CUDA_ARCH__
    return (uint32_t)__popcll((long long)bits);
#else
    return (uint32_t)__builtin_popcountll(bits);
#endif
}
PROTOCOL_FUNCTION uint32_t stage_first_bit(uint64_t bits)
{
#ifdef __CUDA_ARCH__
    return (uint32_t)__ffsll((long long)bits) - 1;
#else
    return (uint32_t)__builtin_ctzll(bits);
#endif
}

/* ---- start ---------------------------------------------------------------------------------- */
PROTOCOL_FUNCTION void stage_scheduler_begin(stage_scheduler_t *s, stage_table_t *table)
{
    s->table = table;
    s->dispatch = 0;
    if (table->dispatch) {
        s->own_dispatch = *(const ffn_cuda_dispatch_t *)(uintptr_t)table->dispatch;
        s->dispatch = &s->own_dispatch;
    }
    s->timeout_ns = table->submission_timeout_ns;
    s->random_state = table->seed;
    s->instances = table->instances;
    s->ffn = table->ffn;
    s->policy = table->policy;
    s->lanes = s->dispatch ? s->dispatch->lane_count : table->echo_lanes;
    s->lanes_free = s->lanes >= 32 ? 0xffffffffu : (1u << s->lanes) - 1;
    s->arrivals = s->tickets = 0;
    s->line_count = s->relist = 0;
    s->turn = 0;
    s->queued = s->waiting = s->jobs = 0;
    s->failed = s->closing = s->leave = 0;
    s->poster.lease = s->poster.left = 0;
    s->poster.commands = s->poster.requests = 0;
    s->chunk.number = 0;
    s->chunk_busy = s->job_cursor = s->look_cursor = 0;
    s->counts.invocations = s->counts.rows = s->counts.resident = s->counts.host = 0;
    s->counts.abandoned = s->counts.dropped = s->counts.queue_ns = s->counts.execute_ns = 0;
    s->counts.lanes_peak = s->counts.lanes_in_use = s->counts.turns = 0;
    s->counts.longest_turn_ns = s->counts.cuts = 0;
    for (uint32_t i = 0; i < FFN_CUDA_MAX_LANES; i++)
        s->lane[i].ticket = 0;
    for (uint32_t i = 0; i < FABRIC_MAX_INSTANCES; i++) {
        s->work[i].now = 0;
        s->work[i].phase = STAGE_IDLE;
        s->work[i].abandoned = 0;
        s->work[i].taken = 0;
        s->work[i].gathered = 0;
        s->work[i].lane_held = 0;
        s->work[i].invocations = s->work[i].invocation_rows = 0;
    }
}
#endif
