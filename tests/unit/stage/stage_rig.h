/* SPDX-License-Identifier: MIT */
/*
 * Stages, schedulers and Instance Ranks in ordinary memory: the steps of the kernels, run by a test
 * turn by turn, or by threads. An FFN runtime is played by rig_runtime(): it executes what the
 * scheduler posts by the numbers of the echo job (stage/job.h).
 */
#ifndef XPOOL_TESTS_STAGE_RIG_H
#define XPOOL_TESTS_STAGE_RIG_H

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "stage/scheduler_steps.h"

#define RIG_FFN       3
#define RIG_INSTANCES 4
#define RIG_RANKS     4
#define RIG_ROWS      6
#define RIG_HIDDEN    16
#define RIG_LAYERS    8
#define RIG_LANES     2
#define RIG_TOTAL     (RIG_ROWS * RIG_RANKS)
#define RIG_DECODE    3 /* rows of the decode kernel, then of that of few rows */
#define RIG_FEW       20

typedef struct rig_arena {
    _Alignas(4096) char bytes[4096 + 2 * 4096 + RIG_FFN * 4096];
} rig_arena_t;
#define RIG_INPUT   4096u
#define RIG_OUTPUT  8192u
#define RIG_PARTIAL 12288u

typedef struct rig_stage {
    _Alignas(4096) char bytes[4096 + RIG_TOTAL * RIG_HIDDEN * 2];
} rig_stage_t;
typedef struct rig_partials {
    _Alignas(4096) char bytes[4096 + RIG_FFN * RIG_TOTAL * RIG_HIDDEN * 4];
} rig_partials_t;

typedef struct rig_rank {
    rig_arena_t *arena;
    transport_device_state_t state;
    transport_live_t live;
    uint32_t direct, missing; /* of the last put */
    uint32_t layer;
    _Alignas(16) uint16_t in[RIG_ROWS * RIG_HIDDEN];
    _Alignas(16) uint16_t out[RIG_ROWS * RIG_HIDDEN];
} rig_rank_t;

typedef struct rig_instance {
    uint32_t tp, dp, delivery;
    uint32_t group[RIG_LAYERS];
    rig_rank_t rank[RIG_RANKS];
} rig_instance_t;

typedef struct rig_ffn {
    stage_table_t *table;
    stage_scheduler_t *scheduler;
    rig_stage_t *stage[RIG_INSTANCES];
    rig_partials_t *partials[RIG_INSTANCES];
    float *scratch[RIG_INSTANCES];
    uint32_t turns[RIG_INSTANCES];
    /* the runtime that is played */
    ffn_cuda_dispatch_t *dispatch;
    ffn_cuda_ring_t *ring;
    ffn_cuda_queue_t *queue;
    ffn_cuda_lane_t lanes[RIG_LANES];
    ffn_cuda_answer_t answers[RIG_LANES];
    uint64_t done[RIG_LANES];
    _Alignas(16) uint16_t lane_out[RIG_LANES][RIG_TOTAL * RIG_HIDDEN];
    uint32_t lease, failure;
    uint64_t commands, requests;
    uint32_t cuts;
} rig_ffn_t;

typedef struct rig {
    uint32_t ffns, instances;
    rig_ffn_t ffn[RIG_FFN];
    rig_instance_t instance[RIG_INSTANCES];
    uint64_t now_ns;
} rig_t;

static inline void *rig_alloc(size_t bytes)
{
    void *memory = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    if (!memory)
        abort();
    memset(memory, 0, bytes);
    return memory;
}

static inline uint32_t rig_ranks(const rig_instance_t *instance)
{
    return instance->tp * instance->dp;
}
static inline int rig_is_direct(const rig_instance_t *instance, uint32_t layer)
{
    return instance->delivery == FABRIC_DELIVERY_DIRECT_PARTIAL &&
           __builtin_popcount(instance->group[layer]) > 1;
}

/* ---- the runtime ---------------------------------------------------------------------------- */
static inline void rig_dispatch_make(rig_ffn_t *ffn)
{
    ffn->dispatch = rig_alloc(sizeof(*ffn->dispatch));
    ffn->ring = rig_alloc(sizeof(*ffn->ring));
    ffn->queue = rig_alloc(sizeof(*ffn->queue));
    ffn->dispatch->lane_count = RIG_LANES;
    ffn->dispatch->max_rows = ffn->dispatch->buffer_rows = RIG_TOTAL;
    ffn->dispatch->queue = ffn->queue;
    ffn->dispatch->cuts = 1;
    ffn->dispatch->ring = ffn->ring;
    ffn->dispatch->lease = &ffn->lease;
    ffn->dispatch->failure = &ffn->failure;
    for (uint32_t i = 0; i < RIG_LANES; i++)
        ffn->dispatch->lanes[i] = (ffn_cuda_dispatch_lane_t){.lane = &ffn->lanes[i],
                                                             .answer = &ffn->answers[i],
                                                             .done = &ffn->done[i],
                                                             .output = ffn->lane_out[i]};
    for (uint32_t i = 0; i < RIG_INSTANCES; i++)
        ffn->dispatch->models[i] = (ffn_cuda_dispatch_model_t){.first_layer = i * RIG_LAYERS,
                                                               .layers = RIG_LAYERS,
                                                               .decode_rows = RIG_DECODE,
                                                               .few_rows = RIG_FEW,
                                                               .row_kib = 4,
                                                               .experts_kib = 1 << 20};
}

/* Executes the Lane as member `member` would; host: and serves all consumers. */
static inline void rig_execute(rig_t *rig, rig_ffn_t *ffn, uint32_t index, const uint64_t *word,
                               uint64_t value, bool host)
{
    const ffn_cuda_lane_t *lane = &ffn->lanes[index];
    const ffn_cuda_answer_t *answer = &ffn->answers[index];
    const rig_instance_t *instance = &rig->instance[lane->layer / RIG_LAYERS];
    uint32_t layer = lane->layer % RIG_LAYERS, self = (uint32_t)(ffn - rig->ffn);
    uint32_t member = (uint32_t)__builtin_popcount(instance->group[layer] & ((1u << self) - 1));
    for (uint64_t i = 0; i < (uint64_t)lane->rows * RIG_HIDDEN; i++) {
        float x =
            stage_value(((const uint16_t *)lane->input)[i], FFN_CUDA_BF16) * (float)(member + 1) +
            (member ? 0.0f : (float)layer);
        if (lane->output)
            ((uint16_t *)lane->output)[i] = stage_bits(x, FFN_CUDA_BF16);
        else
            lane->partial[i] = x;
    }
    for (uint32_t c = 0; host && c < answer->consumer_count; c++) {
        const ffn_cuda_consumer_t *to = &answer->consumers[c];
        size_t size = lane->output ? 2 : 4;
        const char *from = lane->output ? (const char *)lane->output : (const char *)lane->partial;
        if (to->rows)
            memcpy(to->rows, from + to->first * RIG_HIDDEN * size, to->count * RIG_HIDDEN * size);
        if (to->word)
            PROTOCOL_STORE_RELEASE(to->word, to->value);
    }
    if (word)
        PROTOCOL_STORE_RELEASE((uint64_t *)(uintptr_t)word, value);
    PROTOCOL_STORE_RELEASE(&ffn->done[index], answer->ticket);
}

/* At most one Invocation. Returns whether there was one. */
static inline bool rig_runtime(rig_t *rig, uint32_t index)
{
    rig_ffn_t *ffn = &rig->ffn[index];
    ffn_cuda_command_t *command = &ffn->queue->entries[ffn->commands % FFN_CUDA_QUEUE_ENTRIES];
    ffn_cuda_command_t *cut = &ffn->queue->cuts[ffn->cuts % FFN_CUDA_QUEUE_ENTRIES];
    const uint64_t word = PROTOCOL_LOAD_ACQUIRE(&cut->sequence);
    /* In the middle of the next command, which is there then, or after the one before it. */
    if (word == FFN_CUDA_CUT_WORD(ffn->cuts + 1, ffn->commands + 1) ||
        (ffn->commands && word == FFN_CUDA_CUT_WORD(ffn->cuts + 1, ffn->commands))) {
        ffn->cuts++;
        rig_execute(rig, ffn, (uint32_t)(cut->lane - ffn->lanes), cut->answer, cut->answer_value,
                    false);
        return true;
    }
    if (PROTOCOL_LOAD_ACQUIRE(&command->sequence) == ffn->commands + 1) {
        uint32_t lane = (uint32_t)(command->lane - ffn->lanes);
        if (command->cuts > ffn->cuts)
            abort(); /* a cut that was posted before it is missing */
        ffn->commands++;
        rig_execute(rig, ffn, lane, command->answer, command->answer_value, false);
        return true;
    }
    ffn_cuda_request_t *request = &ffn->ring->entries[ffn->requests % FFN_CUDA_RING_ENTRIES];
    if (PROTOCOL_LOAD_ACQUIRE(&request->sequence) == ffn->requests + 1) {
        ffn->requests++;
        rig_execute(rig, ffn, request->lane, NULL, 0, true);
        return true;
    }
    return false;
}

/* ---- making --------------------------------------------------------------------------------- */
static inline void rig_describe(rig_t *rig, uint32_t f, uint32_t i)
{
    rig_ffn_t *ffn = &rig->ffn[f];
    const rig_instance_t *instance = &rig->instance[i];
    stage_about_t *about = &ffn->table->instance[i].about;
    uint32_t *groups = rig_alloc(sizeof(uint32_t) * RIG_LAYERS);
    about->uniform = instance->group[0];
    for (uint32_t layer = 0; layer < RIG_LAYERS; layer++) {
        groups[layer] = instance->group[layer];
        about->members |= groups[layer];
        if (groups[layer] != groups[0])
            about->uniform = 0;
    }
    about->weights = i;
    about->layers = RIG_LAYERS;
    about->hidden = RIG_HIDDEN;
    about->dtype = FFN_CUDA_BF16;
    about->max_rows = RIG_ROWS;
    about->tp = instance->tp;
    about->dp = instance->dp;
    about->direct = instance->delivery == FABRIC_DELIVERY_DIRECT_PARTIAL;
    about->groups = (uintptr_t)groups;
    about->page = (uintptr_t)ffn->stage[i];
    about->input = (uintptr_t)ffn->stage[i] + STAGE_HEADER_BYTES;
    about->partial_stride = RIG_TOTAL * RIG_HIDDEN;
    about->scratch = (uintptr_t)ffn->scratch[i];
    for (uint32_t first = 0; first < rig->ffns; first++)
        about->partials[first] = (uintptr_t)rig->ffn[first].partials[i];
    about->output_offset = RIG_OUTPUT;
    about->partial_offset = RIG_PARTIAL;
    about->partial_bytes = 4096;
}

/* Shapes are in rig->instance[]. dispatch: a runtime executes, else the echo. */
static inline void rig_make(rig_t *rig, bool dispatch, uint32_t policy)
{
    rig->now_ns = 1000;
    for (uint32_t i = 0; i < rig->instances; i++)
        for (uint32_t r = 0; r < rig_ranks(&rig->instance[i]); r++)
            rig->instance[i].rank[r].arena = rig_alloc(sizeof(rig_arena_t));
    for (uint32_t f = 0; f < rig->ffns; f++) {
        rig_ffn_t *ffn = &rig->ffn[f];
        ffn->table = rig_alloc(sizeof(*ffn->table));
        ffn->scheduler = rig_alloc(sizeof(*ffn->scheduler));
        for (uint32_t i = 0; i < rig->instances; i++) {
            ffn->stage[i] = rig_alloc(sizeof(rig_stage_t));
            ffn->partials[i] = rig_alloc(sizeof(rig_partials_t));
            ffn->scratch[i] = rig_alloc(RIG_TOTAL * RIG_HIDDEN * 4);
        }
        if (dispatch)
            rig_dispatch_make(ffn);
    }
    for (uint32_t f = 0; f < rig->ffns; f++) {
        rig_ffn_t *ffn = &rig->ffn[f];
        *ffn->table = (stage_table_t){.magic = STAGE_TABLE_MAGIC,
                                      .instances = rig->instances,
                                      .ffn = f,
                                      .policy = policy,
                                      .submission_timeout_ns = 1000000,
                                      .dispatch = (uintptr_t)ffn->dispatch,
                                      .echo_lanes = RIG_LANES};
        for (uint32_t i = 0; i < rig->instances; i++)
            rig_describe(rig, f, i);
        stage_scheduler_begin(ffn->scheduler, ffn->table);
    }
}

static inline void rig_free(rig_t *rig)
{
    for (uint32_t f = 0; f < rig->ffns; f++) {
        rig_ffn_t *ffn = &rig->ffn[f];
        for (uint32_t i = 0; i < rig->instances; i++) {
            free(ffn->stage[i]);
            free(ffn->partials[i]);
            free(ffn->scratch[i]);
            free((void *)(uintptr_t)ffn->table->instance[i].about.groups);
        }
        free(ffn->dispatch);
        free(ffn->ring);
        free(ffn->queue);
        free(ffn->table);
        free(ffn->scheduler);
    }
    for (uint32_t i = 0; i < rig->instances; i++)
        for (uint32_t r = 0; r < RIG_RANKS; r++)
            free(rig->instance[i].rank[r].arena);
}

/* ---- the host's orders ---------------------------------------------------------------------- */
static inline void rig_order(rig_t *rig, uint32_t f, uint32_t i, uint32_t state)
{
    rig_ffn_t *ffn = &rig->ffn[f];
    stage_instance_t *described = &ffn->table->instance[i];
    if (state == TRANSPORT_SLOT_ATTACHED) {
        memset(ffn->stage[i], 0, 4096);
        memset(ffn->partials[i], 0, 4096);
        for (uint32_t r = 0; r < rig_ranks(&rig->instance[i]); r++)
            described->about.arenas[r] = (uintptr_t)rig->instance[i].rank[r].arena;
    }
    PROTOCOL_STORE_RELEASE(&described->wanted, transport_slot_word(++ffn->turns[i], state));
}
static inline bool rig_ordered(const rig_t *rig, uint32_t f, uint32_t i)
{
    const rig_ffn_t *ffn = &rig->ffn[f];
    return transport_slot_turn(PROTOCOL_LOAD_ACQUIRE(&ffn->table->instance[i].now)) ==
           ffn->turns[i];
}

/* ---- one turn of an FfnAgent's scheduler, its jobs included --------------------------------- */
static inline bool rig_turn(rig_t *rig, uint32_t f, uint64_t now_ns)
{
    stage_scheduler_t *s = rig->ffn[f].scheduler;
    uint32_t changed[STAGE_LINES / 32] = {0}, any = 0;
    for (uint32_t i = 0; i < s->line_count; i++)
        if (stage_scheduler_line_changed(s, i)) {
            changed[i / 32] |= 1u << i % 32;
            any = 1;
        }
    const uint32_t ended = stage_scheduler_lanes_ended(s);
    if (!any && !ended && stage_scheduler_quiet(s)) {
        s->turn++;
        return true;
    }
    bool on = stage_scheduler_turn(s, changed, ended, now_ns);
    if (on && stage_scheduler_chunk(s))
        stage_scheduler_chunk_run(s, now_ns);
    return on;
}

/* ---- Instance Rank -------------------------------------------------------------------------- */
static inline uint16_t rig_input(uint32_t i, uint32_t dp, uint64_t pass, uint32_t element)
{
    return stage_bits((float)((i * 7 + dp * 5 + pass * 3 + element) % 24), FFN_CUDA_BF16);
}

/* rows of every DP rank */
static inline void rig_put(rig_t *rig, uint32_t i, uint32_t r, uint32_t layer,
                           const uint32_t *dp_rows, uint64_t pass)
{
    rig_instance_t *instance = &rig->instance[i];
    rig_rank_t *rank = &instance->rank[r];
    uint32_t dp = r / instance->tp;
    stage_put_t put = {.layer = layer,
                       .captured = RIG_ROWS,
                       .dp = dp,
                       .dp_size = instance->dp,
                       .carries = r % instance->tp == 0,
                       .gathered = 1,
                       .max_rows = RIG_ROWS,
                       .row_bytes = RIG_HIDDEN * 2};
    rank->live.rows = dp_rows[dp];
    rank->layer = layer;
    for (uint32_t d = 0; d < instance->dp; d++)
        rank->live.dp_rows[d] = dp_rows[d];
    for (uint32_t e = 0; e < dp_rows[dp] * RIG_HIDDEN; e++)
        rank->in[e] = rig_input(i, dp, pass, e);
    for (uint32_t f = 0; f < rig->ffns; f++)
        if (instance->group[layer] >> f & 1) {
            stage_page_t *page = (stage_page_t *)rig->ffn[f].stage[i];
            put.targets[put.count++] = (stage_target_t){
                .line = (uintptr_t)&page->lines[r], .input = (uintptr_t)page + STAGE_HEADER_BYTES};
        }
    rank->direct =
        rig_is_direct(instance, layer) ? (1u << __builtin_popcount(instance->group[layer])) - 1 : 0;
    rank->missing = rank->direct;
    if (stage_put_allowed(&rank->state))
        for (uint32_t t = 0; t < put.count; t++)
            memcpy((char *)(uintptr_t)put.targets[t].input + stage_put_offset(&put, &rank->live),
                   rank->in, stage_put_bytes(&put, &rank->live));
    stage_device_put(&put, &rank->state, &rank->live);
}

static inline bool rig_look(rig_t *rig, uint32_t i, uint32_t r)
{
    rig_rank_t *rank = &rig->instance[i].rank[r];
    return transport_device_wait_begin(&rank->state) ||
           stage_device_wait_look((mailbox_arena_t *)rank->arena, &rank->state, rank->direct,
                                  &rank->missing);
}

/* Takes the answer; returns how many elements are wrong. */
static inline uint64_t rig_take(rig_t *rig, uint32_t i, uint32_t r)
{
    rig_instance_t *instance = &rig->instance[i];
    rig_rank_t *rank = &instance->rank[r];
    uint32_t members = (uint32_t)__builtin_popcount(instance->group[rank->layer]);
    uint64_t wrong = 0;
    if (!transport_device_take_allowed(&rank->state))
        return 1;
    stage_job_t job = {.kind = rank->direct ? STAGE_JOB_REDUCE : STAGE_JOB_COPY,
                       .dtype = FFN_CUDA_BF16,
                       .members = members,
                       .consumers = 1,
                       .from = rank->arena->bytes + (rank->direct ? RIG_PARTIAL : RIG_OUTPUT),
                       .stride = 1024,
                       .elements = (uint64_t)rank->state.rows * RIG_HIDDEN};
    job.to[0] = (stage_job_to_t){.rows = rank->out, .count = job.elements};
    stage_job_run(&job, 0, job.elements, 0, 1);
    for (uint32_t e = 0; e < job.elements; e++) {
        float x = stage_value(rank->in[e], FFN_CUDA_BF16) * (float)(members * (members + 1) / 2) +
                  (float)rank->layer;
        wrong += rank->out[e] != stage_bits(x, FFN_CUDA_BF16);
    }
    transport_device_take(&rank->state);
    return wrong;
}
#endif
