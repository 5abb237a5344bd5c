/* SPDX-License-Identifier: MIT */
/*
 * What the FFN kernels read from device memory: one source for C and CUDA.
 *
 * A kernel gets one Lane pointer. The Lane names the layer and the live rows; the layer names its
 * signature, weights and router. So one captured launch serves all layers of a signature: whoever
 * fires it (host, scheduler graph, Coordinator) writes the Lane's per-Invocation fields first.
 *
 * Weights are row-major, as in the checkpoint: gate and up [width][hidden], down [hidden][width],
 * router [experts][hidden]. Addresses are aligned to 16 bytes, hidden and every width are multiples
 * of 8 elements; a loader that meets another width pads it with rows and columns of zeros, which
 * changes no result. BF16 or FP16 weights and activations (the same type), FP32 accumulation.
 */
#ifndef XPOOL_FFN_CUDA_TABLES_H
#define XPOOL_FFN_CUDA_TABLES_H

#include <stdint.h>

#define FFN_CUDA_MAX_EXPERTS 512u
#define FFN_CUDA_MAX_TOP_K   32u
#define FFN_CUDA_MAX_GROUPS  32u
/* No launch of bulk work is to take much longer. The products reach about so many multiply-adds a
 * nanosecond at a few hundred rows; only the size of launches hangs on it. */
#define FFN_CUDA_PIECE_NS       300000u
#define FFN_CUDA_MACS_NS        250000u
#define FFN_CUDA_DECODE_ROWS    32u /* most rows of the decode kernel: layers of experts */
#define FFN_CUDA_DENSE_ROWS     16u /* most rows of it: dense layers */
#define FFN_CUDA_WIDTH_MULTIPLE 8u
#define FFN_CUDA_NO_LAYER       0xffffffffu
#define FFN_CUDA_QUEUE_ENTRIES  64u
#define FFN_CUDA_MAX_PARTIALS   16u
#define FFN_CUDA_MAX_BLOCKS     256u /* of the decode grid */
#define FFN_CUDA_TRACE_MARKS    8u
#define FFN_CUDA_SHARE_ONE      (1u << 20)
#define FFN_CUDA_TILE_ROWS      128u /* rows of one tile of the grouped GEMM */

typedef enum ffn_cuda_dtype {
    FFN_CUDA_BF16 = 0,
    FFN_CUDA_F16,
    FFN_CUDA_F32, /* router only */
} ffn_cuda_dtype_t;

/* Execution Signature, as the kernels see it. Dense: experts 0, width `intermediate`. */
typedef struct ffn_cuda_signature {
    uint32_t hidden;
    uint32_t intermediate; /* of this shard: dense width or one expert's; elements */
    uint32_t dtype;        /* ffn_cuda_dtype_t of weights and activations */
    uint32_t activation;   /* model_activation_t: 0 SiLU, 1 GELU (tanh) */
    /* MoE only */
    uint32_t experts, top_k;
    uint32_t router;       /* model_router_t: 0 softmax, 1 sigmoid */
    uint32_t router_dtype; /* ffn_cuda_dtype_t */
    uint32_t normalize;    /* divide the chosen weights by their sum */
    uint32_t groups, top_groups;
    uint32_t shared_intermediate; /* 0 = no shared experts */
    float routed_scale;
    uint32_t reserved[3];
} ffn_cuda_signature_t;

/* One gated FFN: the dense block, one expert, or the fused shared experts. */
typedef struct ffn_cuda_part {
    const void *gate, *up, *down;
} ffn_cuda_part_t;

/* Counters of a layer of experts since start, with [experts] counts of rows behind it
 * (ffn/cuda/usage.h). */
typedef struct ffn_cuda_usage {
    uint64_t executions; /* with live rows; each piece of bulk work is one */
    uint64_t rows;
    uint64_t experts; /* distinct ones that an execution reads, summed */
    uint64_t reserved[5];
} ffn_cuda_usage_t;

typedef struct ffn_cuda_layer {
    const ffn_cuda_signature_t *signature;
    const ffn_cuda_part_t *parts; /* dense: 1; MoE: experts, then the shared part if any */
    const void *router;           /* MoE */
    const float *bias;            /* e_score_correction_bias [experts] or NULL */
    uint32_t next;                /* the layer that usually follows, or FFN_CUDA_NO_LAYER */
    uint32_t reserved;
    ffn_cuda_usage_t *usage; /* MoE: what its router chose; or NULL */
} ffn_cuda_layer_t;

/* Words by which the blocks of one launch meet. All are counters that only grow, so that nothing
 * has to be reset between launches; zeroed once, when the workspace is made. */
typedef struct ffn_cuda_meeting {
    uint64_t routed; /* blocks whose logits are written */
    uint64_t pad0[15];
    uint64_t acted; /* blocks whose activations are written */
    uint64_t pad1[15];
    uint64_t ended; /* blocks whose outputs are written */
    uint64_t pad2[15];
} ffn_cuda_meeting_t;

/* One tile of the grouped GEMM: up to FFN_CUDA_TILE_ROWS rows of one part. */
typedef struct ffn_cuda_tile {
    uint32_t part;
    uint32_t first; /* row of `activations` (routed pairs in expert order, then the shared rows) */
    uint32_t rows;
    uint32_t acted; /* resident kernel of few rows: items of gate that are written; 0 at first */
} ffn_cuda_tile_t;

/* A tensor map, as the driver encodes it. */
typedef struct ffn_cuda_map {
    uint64_t words[16];
} ffn_cuda_map_t;
/* Of a layer: gate, up and down of each expert and of the part behind them; activations of routed
 * pairs, and of that part. */
#define FFN_CUDA_MAPS(experts) (((experts) + 1) * 3 + 2)

/* Buffers of one Lane in device memory, carved by ffn_cuda_workspace_carve(). */
typedef struct ffn_cuda_workspace {
    ffn_cuda_meeting_t *meeting;
    /* decode: at most ffn_cuda_decode_rows() rows. Multiprocessors do not get equal parts of the
     * memory's rate, so each may get its own part of the work: shares[phase][i] is where the i-th's
     * part begins, in units of 1 / FFN_CUDA_SHARE_ONE, for phase 0 (gate and up) and 1 (down); all
     * zero: equal parts. cycles[phase][i]: how long it took in the latest launch.
     * ffn_cuda_shares_adjust(). */
    uint32_t (*shares)[FFN_CUDA_MAX_BLOCKS + 1];
    uint32_t (*cycles)[FFN_CUDA_MAX_BLOCKS];
    /* NULL, or [FFN_CUDA_TRACE_MARKS]: to each mark every block adds the nanoseconds since it saw
     * the command: its words read, logits written, all logits seen, experts known, gate and up
     * done, all activations seen, down done, rows visible. The kernel of few rows: words read,
     * logits written, plan seen, a warp done, all its products written, everybody's seen, none,
     * rows visible. Only for measuring; the resident kernels. */
    uint32_t (*trace)[FFN_CUDA_MAX_BLOCKS];
    uint64_t *logits;         /* [rows][experts]: FP32 below, the Invocation's number above */
    void *decode_activations; /* [rows][decode_pitch] 16-bit */
    uint64_t decode_pitch;    /* elements: chosen experts * intermediate + shared */
    /* bulk: at most bulk_rows rows */
    uint32_t bulk_rows, max_tiles;
    uint32_t *counts;     /* [experts] pairs of each expert; 0 between Invocations */
    uint32_t *tile_count; /* [2]: tiles of routed pairs, tiles of the shared part */
    uint64_t *arrived;    /* [FEW_ROUTE_ARRIVED]: of ffn_few_route(), 0 between launches: groups of
                             rows that have chosen; blocks of each group */
    uint32_t *chosen;     /* [rows][top_k] experts, ascending */
    float *weights;       /* [rows][top_k] in that order */
    uint32_t *pair_at; /* [rows][top_k] position of that pair in expert order; until it is planned,
                          inside its expert */
    uint32_t *row_ids; /* [pairs] row of the pair at that position */
    ffn_cuda_tile_t *tiles;
    uint32_t *taken;      /* [2]: pieces of work of gate, of down */
    ffn_cuda_map_t *maps; /* [FFN_CUDA_MAPS(experts)] */
    void *activations;    /* routed [pairs][intermediate], then shared [rows][shared]; 16-bit */
    float *products;      /* [pairs + rows][hidden] */
} ffn_cuda_workspace_t;

/* An Executor Lane on this device. */
typedef struct ffn_cuda_lane {
    /* constant while the Lane exists */
    const ffn_cuda_layer_t *layers;
    ffn_cuda_workspace_t workspace;
    /* per Invocation, written before the launch or the queue entry */
    uint32_t layer;    /* index in `layers` */
    uint32_t rows;     /* live rows; 0 is allowed */
    const void *input; /* [rows][hidden], 16-bit, aligned to 16 bytes */
    void *output;      /* [rows][hidden], 16-bit: the complete result; or NULL */
    float *partial;    /* [rows][hidden]: this shard's partial, when output is NULL */
    /* ffn_reduce: partials in PE order, of partial_count FfnAgents */
    const float *partials[FFN_CUDA_MAX_PARTIALS];
    uint32_t partial_count;
    uint32_t reserved;
} ffn_cuda_lane_t;

/* The command queue of the resident decode kernel, in device memory, zeroed before each lease. One
 * writer (the Coordinator) fills entries in order; every block of the kernel reads each. Entry n
 * (from 0) is at n % FFN_CUDA_QUEUE_ENTRIES and is live when its sequence is n + 1. The writer may
 * fill it once answered >= n + 1 - FFN_CUDA_QUEUE_ENTRIES, and publishes it by compare-and-swap
 * from what the round before has left there: a block that sees `stop` swaps FFN_CUDA_QUEUE_LEFT
 * into the entry that it waits for, so that all blocks leave before the same command or all execute
 * it. */
#define FFN_CUDA_QUEUE_LEFT (~(uint64_t)0)

typedef struct ffn_cuda_command {
    uint64_t sequence;     /* published last */
    ffn_cuda_lane_t *lane; /* NULL: leave (the lease ends) */
    uint64_t *answer;      /* word that gets answer_value, with release at system scope, or NULL */
    uint64_t answer_value;
    uint64_t *done; /* word that gets done_value after `answer`, likewise, or NULL */
    uint64_t done_value;
    const struct ffn_cuda_answer *about; /* for the record (ffn/cuda/dispatch.h), or NULL */
    /* What the Lane holds too; here the kernel gets it in one read. */
    const ffn_cuda_layer_t *layers;
    const void *input;
    void *output;
    float *partial;
    uint32_t layer, rows;
    uint32_t lane_number; /* the Lane's among those of the queue; only makes it faster */
    uint32_t cuts;        /* of a command: how many cuts were posted before it */
    uint32_t reserved[6];
} ffn_cuda_command_t;

/* A cut is a short command that a block executes in the middle of a long one: cut k (from 1) is at
 * cuts[(k - 1) % FFN_CUDA_QUEUE_ENTRIES] and is live when its sequence is
 * FFN_CUDA_CUT_WORD(k, n). It was posted after command n and before n + 1, while n was not done; a
 * block executes it between its first product of n and its start of n + 1. So every block does it
 * in the same place of the order, and none that waits in it waits for one that waits for n. */
#define FFN_CUDA_CUT_BITS 20
/* 31 bits, so that its low half is never that of FFN_CUDA_QUEUE_LEFT. */
#define FFN_CUDA_CUT_WORD(cut, command)                                                            \
    ((uint64_t)(((uint32_t)(command) << FFN_CUDA_CUT_BITS |                                        \
                 ((uint32_t)(cut) & ((1u << FFN_CUDA_CUT_BITS) - 1))) &                            \
                0x7fffffffu))

/* What one Invocation was. */
typedef struct ffn_cuda_record {
    uint64_t end_ns, duration_ns; /* of the device's clock */
    uint64_t ticket;
    uint32_t layer, rows,
        capacity; /* layer of the model; capacity: rows the launches were made for */
    uint16_t instance, rank;
    uint16_t lane, graph_template; /* of the resident kernel: 0xffff both */
    uint8_t kind, resident;
} ffn_cuda_record_t;

/* A place of the ring of records, in mapped host memory, one cache line. It is written again
 * whether it was read or not, so each word says in its low byte of which round of the ring it is:
 * a reader sees what is mixed, in whatever order the words become visible. */
#define FFN_CUDA_RECORD_WORDS 6
typedef struct ffn_cuda_record_place {
    uint64_t index; /* 1, 2, ... of the record; published last */
    uint64_t words[FFN_CUDA_RECORD_WORDS];
    uint64_t pad;
} ffn_cuda_record_place_t;

/* Counters and records of a device's Invocations, in device memory. */
typedef struct ffn_cuda_counters {
    uint64_t invocations, rows, busy_ns; /* fired by the host */
    uint64_t resident_invocations, resident_rows, resident_busy_ns;
    uint64_t records_taken;           /* records begun */
    ffn_cuda_record_place_t *records; /* [record_capacity] in mapped host memory, or NULL */
    uint64_t record_capacity;
    uint64_t reserved[7];
} ffn_cuda_counters_t;

typedef struct ffn_cuda_queue {
    ffn_cuda_command_t entries[FFN_CUDA_QUEUE_ENTRIES];
    ffn_cuda_command_t cuts[FFN_CUDA_QUEUE_ENTRIES];
    uint64_t answered; /* commands done */
    uint64_t pad0[15];
    /* The resident kernel of few rows: by which its blocks meet within a command.
     * planned: the latest plan's command, counted from 1 on over those with rows, above its tiles:
     * of the last part in 8 bits, of routed pairs in 16. multiplied: blocks whose products are
     * written, over all commands. */
    uint64_t planned;
    uint64_t pad2[15];
    uint64_t multiplied;
    uint64_t pad3[15];
    uint64_t taken; /* items of the command's products, after each warp's first; 0 before it */
    uint64_t pad4[15];
    uint32_t stop; /* not 0: leave without a command (failure, shutdown) */
    uint32_t pad1[13];
    uint64_t cuts_answered;
    uint64_t pad5[7];
    ffn_cuda_counters_t *counters; /* written with the zeroes, before the lease; or NULL */
    /* Likewise: [blocks][FFN_CUDA_ASIDE_BYTES], where a block puts what it knows of a command that
     * is cut; or NULL: none is. */
    unsigned char *aside;
} ffn_cuda_queue_t;
#endif
