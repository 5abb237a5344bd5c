/* SPDX-License-Identifier: MIT */
/*
 * The scheduler's table in its FfnAgent's device memory: what the host says of each Instance, its
 * orders, and what the scheduler says back. One source for C and CUDA.
 *
 * Orders and answers are words of a turn and a state, as in transport/cuda_device.h: memory is
 * unmapped only when the scheduler has said of this very detach that it is through. The host writes
 * by kernels of its control stream, with release.
 */
#ifndef XPOOL_STAGE_TABLE_H
#define XPOOL_STAGE_TABLE_H

#include "stage/records.h"

#define STAGE_TABLE_MAGIC 0x31545358u /* "XST1" */
#define STAGE_THREADS     256u        /* of the scheduler's block */

/* What the host says of an Instance; copied by the scheduler when it attaches it. */
typedef struct stage_about {
    /* constant from start on */
    uint32_t members;               /* FfnAgents (bits) of any of its groups; 0: not here */
    uint32_t uniform;               /* the group of every layer when they are alike, else 0 */
    uint32_t weights;               /* of the dispatch's models */
    uint32_t layers, hidden, dtype; /* dtype: ffn_cuda_dtype_t */
    uint32_t max_rows, tp, dp;
    uint32_t direct;         /* groups of several deliver partials to the consumers */
    uint64_t groups;         /* uint32_t [layers]: the group of each layer */
    uint64_t page, input;    /* stage_page_t and its rows */
    uint64_t partial_stride; /* elements from one area of a stage_partials_t to the next */
    uint64_t scratch;        /* FP32 rows, where a direct partial has several consumers; or 0 */
    uint64_t partials[STAGE_MAX_MEMBERS]; /* stage_partials_t of each first member that reduces */
    /* with each attach */
    uint64_t arenas[FABRIC_MAX_RANKS]; /* mailbox_arena_t, mapped */
    uint64_t output_offset, partial_offset, partial_bytes;
    uint64_t taken; /* the last sequence that was answered here: lines after it wait */
} stage_about_t;

typedef struct stage_instance {
    stage_about_t about; /* host */
    uint32_t wanted;     /* host: transport_slot_word() of EMPTY or ATTACHED; published last */
    uint32_t pad0;
    uint32_t now;    /* scheduler: any state, with the turn that it answers */
    uint32_t reason; /* xp_status_t, when DROPPED */
    uint64_t invocations, rows;
} stage_instance_t;

typedef enum stage_failure_kind {
    STAGE_FAILURE_NONE = 0,
    STAGE_FAILURE_DISAGREE,  /* two ranks of an Instance */
    STAGE_FAILURE_RANK,      /* a rank did not come in time */
    STAGE_FAILURE_MEMBER,    /* a member's partial did not come in time */
    STAGE_FAILURE_EXECUTION, /* this FfnAgent's own execution did not end in time */
    STAGE_FAILURE_LANE,      /* no Lane came free in time */
    STAGE_FAILURE_CAPACITY,  /* more rows than this FfnAgent's Lanes hold: a mistake in the plan */
    STAGE_FAILURE_RUNTIME    /* the FFN runtime failed; it knows why */
} stage_failure_kind_t;

/* `a` and `b`: ranks that disagree; the one that is missing is `b`, also as a member's FfnAgent. */
typedef struct stage_failure {
    uint32_t kind; /* stage_failure_kind_t; published last */
    uint32_t instance, a, b;
    uint64_t sequence_a, sequence_b;
    uint32_t layer_a, layer_b, rows_a, rows_b;
    uint64_t waited_ns;
    uint32_t status, reserved;
} stage_failure_t;

typedef struct stage_counts {
    uint64_t invocations, rows, resident, host, abandoned, dropped, queue_ns, execute_ns;
    uint64_t lanes_peak, lanes_in_use, turns, longest_turn_ns;
    uint64_t cuts; /* of `resident`: in the middle of a longer command */
} stage_counts_t;

/* Where the time of jobs of one chunk goes, summed, when `notes` is set: from the look that found
 * the line to the job's begin, to its end as the scheduler sees it, to the published answer. */
typedef struct stage_notes {
    uint64_t count, taken_ns, job_ns, answer_ns, longest_ns;
} stage_notes_t;

typedef struct stage_table {
    /* Host: constant. */
    uint32_t magic, instances, ffn, policy;
    uint64_t seed, submission_timeout_ns;
    uint64_t dispatch; /* ffn_cuda_dispatch_t, or 0: echo */
    uint32_t echo_lanes, own_life;
    uint32_t own_elements; /* jobs of at most so many are done by the scheduler's own warp */
    uint32_t notes;        /* not 0: keep stage_notes_t */
    uint8_t pad0[MAILBOX_LINE - 56];
    /* Host: orders. */
    uint32_t stop;     /* leave at once */
    uint32_t shutdown; /* finish what was taken, take nothing new, leave */
    uint8_t pad1[MAILBOX_LINE - 8];
    /* Scheduler. */
    uint32_t running;
    uint32_t ended; /* the watching warp's copy of our life word */
    uint8_t pad2[MAILBOX_LINE - 8];
    stage_failure_t failure;
    stage_counts_t counts;
    stage_notes_t noted;
    stage_instance_t instance[FABRIC_MAX_INSTANCES];
} stage_table_t;
#endif
