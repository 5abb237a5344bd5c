/* SPDX-License-Identifier: MIT */
/*
 * How the device scheduler (module stage) hands Invocations to the FFN runtime of its device: one
 * source for C and CUDA. The runtime (ffn/cuda_runtime.h) makes all of it; the scheduler gets the
 * device address of one ffn_cuda_dispatch_t and is the only one who posts.
 *
 * An Invocation owns a Lane from the moment the scheduler fills it until the Lane's `done` word
 * holds the Invocation's ticket. The scheduler writes the Lane's per-Invocation fields
 * (ffn/cuda/tables.h) and its answer, then posts it one of two ways:
 *
 *   resident  what the lease in force takes (ffn_cuda_lease_takes): a command in the queue of the
 *             resident kernel, ffn_cuda_command_post(). No host. The kernel writes `output` or
 *             `partial`, then one word of one consumer, then `done`. The rest of the answer (more
 *             consumers, slices) is the scheduler's, once `done` is there.
 *   host      everything else, and always right: a request in the host ring, in mapped host
 *             memory, ffn_cuda_request_post(). A host thread fires the Lane's captured launches;
 *             their first kernel gathers `sources`, their last one serves all consumers, then
 *             `done`.
 *
 * The lease: `lease` is written by the host only; odd = in force, of the kernel that its second bit
 * names: the decode kernel, up to the model's decode_rows, or that of few rows, from there up to
 * few_rows. The scheduler looks at it each
 * turn (ffn_cuda_lease_look), which tells the host that no command of the old lease will follow.
 * The host ends a lease so: even number, wait for `lease_seen`, stop word of the queue; what was
 * posted before is executed. A command that finds no lease, or a kernel that has left, is refused
 * and goes to the host ring.
 */
#ifndef XPOOL_FFN_CUDA_DISPATCH_H
#define XPOOL_FFN_CUDA_DISPATCH_H

#include "base/protocol_atomics.h"
#include "ffn/cuda/tables.h"

#define FFN_CUDA_DISPATCH_ABI  3u
#define FFN_CUDA_MAX_LANES     32u
#define FFN_CUDA_MAX_MODELS    64u
#define FFN_CUDA_MAX_CONSUMERS 8u
/* More than Lanes, and a Lane has one request at most: the ring never overflows. */
#define FFN_CUDA_RING_ENTRIES 64u

/* Rows that the host's launches gather into the Lane's input before they begin. */
typedef struct ffn_cuda_source {
    const void *rows; /* [count][hidden], 16-bit */
    uint32_t first, count;
} ffn_cuda_source_t;

typedef struct ffn_cuda_consumer {
    void *rows;     /* gets [count][hidden] of output or partial; NULL: it is there already */
    uint64_t *word; /* gets `value` after the rows, with release at system scope; or NULL */
    uint64_t value;
    uint32_t first, count; /* its slice of the Lane's rows */
} ffn_cuda_consumer_t;

/* What becomes of a Lane's Invocation; written by the scheduler before it posts. */
typedef struct ffn_cuda_answer {
    ffn_cuda_consumer_t consumers[FFN_CUDA_MAX_CONSUMERS];
    ffn_cuda_source_t sources[FFN_CUDA_MAX_CONSUMERS];
    uint32_t consumer_count, source_count;
    uint64_t ticket; /* not 0, never twice in a row on one Lane: what `done` gets */
    /* for the record of this Invocation */
    uint32_t instance, rank, kind, layer_of_model;
} ffn_cuda_answer_t;

/* A Lane as the scheduler sees it. */
typedef struct ffn_cuda_dispatch_lane {
    ffn_cuda_lane_t *lane;
    ffn_cuda_answer_t *answer;
    uint64_t *done;
    /* The Lane's own rows, [buffer_rows][hidden] 16-bit each; NULL when buffer_rows is 0. For
     * gathered inputs, and for outputs that more than one consumer gets a slice of. */
    void *input, *output;
} ffn_cuda_dispatch_lane_t;

/* An installed weight set: its layer l is layer `first_layer + l` of the table. */
typedef struct ffn_cuda_dispatch_model {
    uint32_t first_layer, layers; /* layers 0: nothing is installed there */
    uint32_t hidden, dtype;       /* ffn_cuda_dtype_t */
    uint32_t decode_rows;         /* most rows that the decode kernel takes of any layer of it */
    uint32_t few_rows;            /* likewise the resident kernel of few rows; or 0 */
    /* What an Invocation reads, KiB: of a dense layer, the first `dense_layers`; of a layer of
     * experts, `shared_kib` and `row_kib` a row, but no more than all experts. */
    uint32_t dense_layers, dense_kib, shared_kib, row_kib, experts_kib;
} ffn_cuda_dispatch_model_t;

/* One request to the host thread, one cache line. */
typedef struct ffn_cuda_request {
    uint64_t sequence; /* n + 1 for the n-th request; published last */
    uint32_t lane, layer, rows;
    uint32_t urgent; /* decode: before and between the pieces of bulk work */
    uint64_t input, output,
        partial; /* as in the Lane, for launches whose addresses are arguments */
    uint64_t reserved[2];
} ffn_cuda_request_t;

/* Mapped host memory. */
typedef struct ffn_cuda_ring {
    ffn_cuda_request_t entries[FFN_CUDA_RING_ENTRIES];
    uint32_t lease_seen; /* the scheduler's: the last value of `lease` it has acted on */
    uint32_t pad0[15];
    uint32_t bell; /* the host's: a futex for its own threads; the device never rings */
    uint32_t pad1[15];
} ffn_cuda_ring_t;

/* In device memory; constant while the scheduler runs, but for the words it points at. */
typedef struct ffn_cuda_dispatch {
    uint32_t abi, lane_count, layer_count;
    uint32_t max_rows;    /* of an Invocation */
    uint32_t buffer_rows; /* of the Lanes' own input and output */
    uint32_t max_hidden;
    uint32_t cuts; /* whether short commands may cut long ones */
    uint32_t reserved;
    const ffn_cuda_layer_t *layers;
    ffn_cuda_queue_t *queue;
    const uint32_t *lease;   /* device memory: ffn_cuda_lease_few() */
    const uint32_t *failure; /* device memory; an xp_status_t once the runtime has failed */
    ffn_cuda_ring_t *ring;
    ffn_cuda_dispatch_lane_t lanes[FFN_CUDA_MAX_LANES];
    ffn_cuda_dispatch_model_t models[FFN_CUDA_MAX_MODELS];
} ffn_cuda_dispatch_t;

/* The scheduler's own count; zeroed when it starts, which is once in a runtime's life. */
typedef struct ffn_cuda_poster {
    uint32_t lease;
    uint32_t left;     /* the kernel of this lease has left by itself */
    uint64_t commands; /* posted in this lease */
    uint64_t requests; /* posted to the ring */
    uint32_t cuts;     /* posted in this lease */
    /* The latest command, which cuts may be posted into: what it reads, its Lane and ticket, how
     * many cuts were posted since. */
    uint32_t long_kib, long_lane, long_cuts;
    uint64_t long_ticket;
} ffn_cuda_poster_t;

/* Once a turn. Not 0 while commands may be posted. acquire: pairs with the host's store, which
 * follows the zeroing of the queue. release: pairs with the host's load, so every command of the
 * old lease is in the queue before the host ends the kernel. */
PROTOCOL_FUNCTION int ffn_cuda_lease_look(const ffn_cuda_dispatch_t *dispatch,
                                          ffn_cuda_poster_t *poster)
{
    const uint32_t lease = PROTOCOL_LOAD_ACQUIRE(dispatch->lease);
    if (lease != poster->lease) {
        poster->lease = lease;
        poster->left = 0;
        poster->commands = 0;
        poster->cuts = poster->long_kib = 0;
        PROTOCOL_STORE_RELEASE(&dispatch->ring->lease_seen, lease);
    }
    return lease % 2 == 1 && !poster->left;
}

/* Whether a lease of that number is of the kernel of few rows; even ones are of none. */
PROTOCOL_FUNCTION int ffn_cuda_lease_few(uint32_t lease)
{
    return lease % 4 == 3;
}

/* Not 0 when the kernel of the scheduler's lease is for Invocations of so many rows. decode_rows,
 * few_rows: of their model. Each kernel has rows of its own, so that a row decodes to the same bits
 * under any lease. */
PROTOCOL_FUNCTION int ffn_cuda_lease_takes(const ffn_cuda_poster_t *poster, uint32_t rows,
                                           uint32_t decode_rows, uint32_t few_rows)
{
    if (ffn_cuda_lease_few(poster->lease))
        return rows > decode_rows && rows <= few_rows;
    return poster->lease % 2 == 1 && rows <= decode_rows;
}

/* A command is cut by one that reads less than so small a part of what it reads, ... */
#define FFN_CUDA_CUT_PART 2u
/* ... and so often at most, so that it ends however many short ones there are. */
#define FFN_CUDA_CUTS_MOST 4u

/* What an Invocation of a layer of the model reads, KiB. */
PROTOCOL_FUNCTION uint32_t ffn_cuda_invocation_kib(const ffn_cuda_dispatch_model_t *model,
                                                   uint32_t layer, uint32_t rows)
{
    const uint32_t routed = rows * model->row_kib;
    if (layer < model->dense_layers)
        return rows ? model->dense_kib : 0;
    return rows ? model->shared_kib + (routed < model->experts_kib ? routed : model->experts_kib)
                : 0;
}

/* What a Lane's per-Invocation fields are. */
typedef struct ffn_cuda_invocation {
    uint32_t layer, rows;
    uint32_t kib; /* ffn_cuda_invocation_kib(); 0: it neither cuts nor is cut */
    const void *input;
    void *output;
    float *partial;
} ffn_cuda_invocation_t;

/* Fills an entry but for its sequence. */
PROTOCOL_FUNCTION void ffn_cuda_command_fill(const ffn_cuda_dispatch_t *dispatch,
                                             ffn_cuda_command_t *entry, uint32_t lane,
                                             const ffn_cuda_invocation_t *given, uint64_t ticket,
                                             uint64_t *word, uint64_t value, uint32_t cuts)
{
    const ffn_cuda_dispatch_lane_t *own = &dispatch->lanes[lane];
    entry->lane = own->lane;
    entry->answer = word;
    entry->answer_value = value;
    entry->done = own->done;
    entry->done_value = ticket;
    entry->about = own->answer;
    entry->layers = dispatch->layers;
    entry->input = given->input;
    entry->output = given->output;
    entry->partial = given->partial;
    entry->layer = given->layer;
    entry->rows = given->rows;
    entry->lane_number = lane;
    entry->cuts = cuts;
}

/* Whether such an Invocation is to cut the latest command: it is short beside that, which has not
 * ended. */
PROTOCOL_FUNCTION int ffn_cuda_cut_helps(const ffn_cuda_dispatch_t *dispatch,
                                         const ffn_cuda_poster_t *poster, uint32_t kib)
{
    return kib && kib < poster->long_kib / FFN_CUDA_CUT_PART &&
           poster->long_cuts < FFN_CUDA_CUTS_MOST &&
           PROTOCOL_LOAD_RELAXED(dispatch->lanes[poster->long_lane].done) != poster->long_ticket;
}

/* As ffn_cuda_invocation_post(), into the latest command. acq_rel: pairs with the kernel's acquire
 * of the entry, or of the command that comes after it; a kernel that leaves swaps
 * FFN_CUDA_QUEUE_LEFT into the entry of the cut that it would do next. */
PROTOCOL_FUNCTION int ffn_cuda_cut_post(const ffn_cuda_dispatch_t *dispatch,
                                        ffn_cuda_poster_t *poster, uint32_t lane,
                                        const ffn_cuda_invocation_t *given, uint64_t ticket,
                                        uint64_t *word, uint64_t value)
{
    ffn_cuda_command_t *entry = &dispatch->queue->cuts[poster->cuts % FFN_CUDA_QUEUE_ENTRIES];
    uint64_t before = PROTOCOL_LOAD_RELAXED(&entry->sequence);
    ffn_cuda_command_fill(dispatch, entry, lane, given, ticket, word, value, poster->cuts);
    if (before != FFN_CUDA_QUEUE_LEFT &&
        PROTOCOL_CAS_NEAR(&entry->sequence, &before,
                          FFN_CUDA_CUT_WORD(poster->cuts + 1, poster->commands))) {
        poster->cuts++;
        poster->long_cuts++;
        return 1;
    }
    poster->left = 1;
    return 0;
}

/* Posts the filled Lane, whose fields are also in `given`, to the resident kernel, which has to
 * take it (ffn_cuda_lease_takes). `ticket` is its answer's; `word` gets `value` when the rows are
 * written (one consumer), or is NULL. 0: refused; nothing was posted, the host ring takes it. The
 * queue is never full: it has more entries than there are Lanes, so an entry holds the command of
 * the round before, and needs no look. acq_rel: pairs with the kernel's acquire of the entry; a
 * kernel that leaves swaps FFN_CUDA_QUEUE_LEFT into the entry it waits for, so exactly one of the
 * two happens. */
PROTOCOL_FUNCTION int ffn_cuda_invocation_post(const ffn_cuda_dispatch_t *dispatch,
                                               ffn_cuda_poster_t *poster, uint32_t lane,
                                               const ffn_cuda_invocation_t *given, uint64_t ticket,
                                               uint64_t *word, uint64_t value)
{
    const uint64_t next = poster->commands + 1;
    if (poster->lease % 2 == 0 || poster->left)
        return 0;
    if (ffn_cuda_cut_helps(dispatch, poster, given->kib))
        return ffn_cuda_cut_post(dispatch, poster, lane, given, ticket, word, value);
    ffn_cuda_command_t *entry =
        &dispatch->queue->entries[poster->commands % FFN_CUDA_QUEUE_ENTRIES];
    uint64_t before = next > FFN_CUDA_QUEUE_ENTRIES ? next - FFN_CUDA_QUEUE_ENTRIES : 0;
    ffn_cuda_command_fill(dispatch, entry, lane, given, ticket, word, value, poster->cuts);
    if (PROTOCOL_CAS_NEAR(&entry->sequence, &before, next)) {
        poster->commands = next;
        poster->long_kib = dispatch->cuts && !ffn_cuda_lease_few(poster->lease) ? given->kib : 0;
        poster->long_lane = lane;
        poster->long_ticket = ticket;
        poster->long_cuts = 0;
        return 1;
    }
    poster->left = 1;
    return 0;
}

/* The same with the fields as they are in the Lane; kib: as the Invocation's. */
PROTOCOL_FUNCTION int ffn_cuda_command_post(const ffn_cuda_dispatch_t *dispatch,
                                            ffn_cuda_poster_t *poster, uint32_t lane, uint32_t kib,
                                            uint64_t ticket, uint64_t *word, uint64_t value)
{
    const ffn_cuda_lane_t *filled = dispatch->lanes[lane].lane;
    ffn_cuda_invocation_t given;
    given.layer = filled->layer;
    given.rows = filled->rows;
    given.kib = kib;
    given.input = filled->input;
    given.output = filled->output;
    given.partial = filled->partial;
    return ffn_cuda_invocation_post(dispatch, poster, lane, &given, ticket, word, value);
}

/* Posts the filled Lane to the host. release: pairs with the host's acquire of the sequence. */
PROTOCOL_FUNCTION void ffn_cuda_request_post(const ffn_cuda_dispatch_t *dispatch,
                                             ffn_cuda_poster_t *poster, uint32_t lane,
                                             uint32_t urgent)
{
    const ffn_cuda_lane_t *filled = dispatch->lanes[lane].lane;
    ffn_cuda_request_t *entry = &dispatch->ring->entries[poster->requests % FFN_CUDA_RING_ENTRIES];
    entry->lane = lane;
    entry->layer = filled->layer;
    entry->rows = filled->rows;
    entry->urgent = urgent;
    entry->input = (uint64_t)(uintptr_t)filled->input;
    entry->output = (uint64_t)(uintptr_t)filled->output;
    entry->partial = (uint64_t)(uintptr_t)filled->partial;
    poster->requests++;
    PROTOCOL_PUBLISH(&entry->sequence, poster->requests);
}

/* Not 0 once the Lane's Invocation has ended and the Lane may be filled again. acquire: pairs with
 * the release of the launch that ended it, so its rows are visible. */
PROTOCOL_FUNCTION int ffn_cuda_lane_done(const ffn_cuda_dispatch_t *dispatch, uint32_t lane,
                                         uint64_t ticket)
{
    return PROTOCOL_LOAD_ACQUIRE(dispatch->lanes[lane].done) == ticket;
}
#endif
