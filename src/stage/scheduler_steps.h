/* SPDX-License-Identifier: MIT */
/*
 * The scheduler of an FFN device, step by step: plain functions on one struct, which run in the
 * resident kernel (scheduler.cu) and on host threads (tests/unit/stage, tests/tsan).
 *
 *   per Instance
 *   IDLE ─first line─▶ GATHERING ─all ranks agree─▶ QUEUED ─Lane─▶ RUNNING ─done─▶ (JOB) ─▶ IDLE
 *                                                                     └─▶ PARTIALS ─all─▶ JOB ─▶
 * IDLE
 *
 * Every member of an Execution Group forms an Invocation by itself, from the lines in its own
 * stage. A member whose partial goes to the consumers or to the first member is done with its
 * Lane's done; the first member then waits for the words of the others without holding a Lane, and
 * reduces.
 *
 * One thread runs the steps; others of its block look at lines (stage_scheduler_line_changed) and
 * do chunks of jobs between turns. A turn does a bounded amount of work: STAGE_EVENTS lines, one
 * look at each Lane and each waiting Instance, one chunk of a job posted.
 */
#ifndef XPOOL_STAGE_SCHEDULER_STEPS_H
#define XPOOL_STAGE_SCHEDULER_STEPS_H

#include "stage/scheduler_state.h"

/* ---- endings -------------------------------------------------------------------------------- */
/* The first failure stays; the scheduler leaves with it. Its lines are written before its kind:
 * release, pairs with the host's read of the whole record after it has seen the kind. */
PROTOCOL_FUNCTION void stage_scheduler_fail(stage_scheduler_t *s, uint32_t kind, uint32_t instance,
                                            uint32_t a, uint32_t b, const stage_line_t *line_b,
                                            uint64_t waited_ns, uint32_t status)
{
    stage_failure_t *failure = &s->table->failure;
    const stage_line_t *line_a = &s->work[instance].line;
    if (s->failed)
        return;
    s->failed = 1;
    s->leave = 1;
    failure->instance = instance;
    failure->a = a;
    failure->b = b;
    failure->sequence_a = line_a->sequence;
    failure->layer_a = line_a->layer;
    failure->rows_a = line_a->rows;
    failure->sequence_b = line_b ? line_b->sequence : 0;
    failure->layer_b = line_b ? line_b->layer : 0;
    failure->rows_b = line_b ? line_b->rows : 0;
    failure->waited_ns = waited_ns;
    failure->status = status;
    PROTOCOL_PUBLISH(&failure->kind, kind);
}

PROTOCOL_FUNCTION void stage_scheduler_release(stage_scheduler_t *s, stage_work_t *work)
{
    if (!work->lane_held)
        return;
    s->lane[work->lane].ticket = 0;
    s->lanes_free |= 1u << work->lane;
    s->counts.lanes_in_use--;
    work->lane_held = 0;
}

/* Back to IDLE; a Lane that is held is given back. */
PROTOCOL_FUNCTION void stage_scheduler_end(stage_scheduler_t *s, uint32_t instance)
{
    stage_work_t *work = &s->work[instance];
    stage_scheduler_release(s, work);
    s->queued &= ~(1ull << instance);
    s->waiting &= ~(1ull << instance);
    s->jobs &= ~(1ull << instance);
    if (work->phase != STAGE_IDLE && work->line.sequence > work->taken)
        work->taken = work->line.sequence;
    work->gathered = 0;
    work->phase = STAGE_IDLE;
}

/* Nonsense from an Instance, or its arena was closed: no effect on others. */
PROTOCOL_FUNCTION void stage_scheduler_drop(stage_scheduler_t *s, uint32_t instance,
                                            uint32_t reason)
{
    stage_instance_t *described = &s->table->instance[instance];
    stage_work_t *work = &s->work[instance];
    for (uint32_t rank = 0; rank < work->ranks; rank++)
        mailbox_close((mailbox_arena_t *)(uintptr_t)work->about.arenas[rank], reason);
    stage_scheduler_end(s, instance);
    s->counts.dropped++;
    described->reason = reason;
    work->now = transport_slot_word(transport_slot_turn(work->now), TRANSPORT_SLOT_DROPPED);
    PROTOCOL_STORE_RELEASE(&described->now, work->now);
    s->relist = 1;
}

/* ---- lines ---------------------------------------------------------------------------------- */
/* Any thread of the block, before a turn and met by the thread that takes it: does the line at
 * `index` want a look? Its order is that of stage_line_changed(). */
PROTOCOL_FUNCTION int stage_scheduler_line_changed(stage_scheduler_t *s, uint32_t index)
{
    const stage_line_at_t *at = &s->lines[index];
    const stage_work_t *work = &s->work[at->instance];
    if (work->phase > STAGE_GATHERING || (work->gathered >> at->rank & 1))
        return 0;
    return stage_line_changed(at->line, work->taken, &s->briefs[index]);
}

PROTOCOL_FUNCTION int stage_line_valid(const stage_about_t *about, const stage_line_t *line,
                                       uint32_t dp, uint32_t group, uint32_t ffn)
{
    if (line->layer >= about->layers || line->kind >= MAILBOX_KIND_COUNT ||
        line->rows > about->max_rows || !(group >> ffn & 1) || line->rows != line->dp_rows[dp])
        return 0;
    for (uint32_t i = 0; about->dp > 1 && i < MAILBOX_MAX_DP; i++)
        if (i < about->dp && line->dp_rows[i] > about->max_rows)
            return 0;
    return 1;
}

PROTOCOL_FUNCTION int stage_lines_agree(const stage_line_t *a, const stage_line_t *b, uint32_t dp)
{
    if (a->sequence != b->sequence || a->layer != b->layer || a->kind != b->kind)
        return 0;
    for (uint32_t i = 0; i < MAILBOX_MAX_DP; i++)
        if (i < dp && a->dp_rows[i] != b->dp_rows[i])
            return 0;
    return 1;
}

PROTOCOL_FUNCTION uint32_t stage_layer_group(const stage_about_t *about, uint32_t layer)
{
    if (layer >= about->layers)
        return 0;
    return about->uniform ? about->uniform : ((const uint32_t *)(uintptr_t)about->groups)[layer];
}

/* Takes the line of one rank. */
PROTOCOL_FUNCTION void stage_scheduler_line(stage_scheduler_t *s, uint32_t index, uint64_t now_ns)
{
    const stage_line_at_t *at = &s->lines[index];
    stage_work_t *work = &s->work[at->instance];
    const stage_about_t *about = &work->about;
    stage_line_t *line = &s->incoming;
    if (transport_slot_state(work->now) != TRANSPORT_SLOT_ATTACHED || s->closing ||
        work->phase > STAGE_GATHERING || (work->gathered >> at->rank & 1))
        return;
    const mailbox_look_t look = stage_line_read(at->line, work->taken, line);
    if (look == MAILBOX_NONE)
        return;
    const uint32_t group = look == MAILBOX_LIVE ? stage_layer_group(about, line->layer) : 0;
    if (look == MAILBOX_NONSENSE || !stage_line_valid(about, line, at->dp, group, s->ffn)) {
        stage_scheduler_drop(s, at->instance, XP_PEER);
        return;
    }
    if (work->gathered == 0) {
        work->line = *line;
        work->first_rank = at->rank;
        work->phase = STAGE_GATHERING;
        work->since_ns = now_ns;
    } else if (!stage_lines_agree(&work->line, line, about->dp)) {
        stage_scheduler_fail(s, STAGE_FAILURE_DISAGREE, at->instance, work->first_rank, at->rank,
                             line, 0, XP_PEER);
        return;
    }
    work->gathered |= 1u << at->rank;
    if (work->gathered != (1u << work->ranks) - 1)
        return;
    uint32_t rows = line->dp_rows[0];
    for (uint32_t i = 1; about->dp > 1 && i < MAILBOX_MAX_DP; i++)
        if (i < about->dp)
            rows += line->dp_rows[i];
    work->rows = rows;
    work->group = group;
    work->members = stage_count_bits(group);
    work->member = stage_count_bits(group & ((1u << s->ffn) - 1));
    work->urgent = work->line.kind == 0 || work->rows <= work->decode_rows;
    work->phase = STAGE_QUEUED;
    work->arrival = s->arrivals++;
    work->passes = 0;
    work->since_ns = now_ns;
    s->queued |= 1ull << at->instance;
}

/* ---- which Invocation gets the next Lane: as fabric_policy_choose() ------------------------- */
PROTOCOL_FUNCTION uint64_t stage_random_next(uint64_t *state)
{
    /* splitmix64 (Vigna's published constants) */
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

PROTOCOL_FUNCTION uint32_t stage_scheduler_choose(stage_scheduler_t *s)
{
    uint32_t chosen = stage_first_bit(s->queued), oldest = chosen;
    if ((s->queued & (s->queued - 1)) == 0)
        return chosen;
    for (uint64_t left = s->queued; left; left &= left - 1) {
        const uint32_t i = stage_first_bit(left);
        const stage_work_t *work = &s->work[i];
        /* 0 wraps to the largest value: no deadline comes last. */
        const uint64_t mine = work->line.slo_deadline_ns - 1;
        const uint64_t best = s->work[chosen].line.slo_deadline_ns - 1;
        if (work->arrival < s->work[oldest].arrival)
            oldest = i;
        if (mine != best ? mine < best : work->arrival < s->work[chosen].arrival)
            chosen = i;
    }
    if (s->policy == FABRIC_POLICY_RANDOM) {
        uint64_t left = s->queued;
        for (uint64_t n = stage_random_next(&s->random_state) % stage_count_bits(s->queued); n; n--)
            left &= left - 1;
        chosen = stage_first_bit(left);
    }
    /* Passes grow with age, so whoever has reached the limit is led by the oldest. */
    if (s->policy == FABRIC_POLICY_FIFO || s->work[oldest].passes >= FABRIC_PASS_LIMIT)
        chosen = oldest;
    for (uint64_t left = s->queued; left; left &= left - 1) {
        stage_work_t *work = &s->work[stage_first_bit(left)];
        if (work->arrival < s->work[chosen].arrival)
            work->passes++;
    }
    return chosen;
}

/* ---- where an answer goes ------------------------------------------------------------------- */
PROTOCOL_FUNCTION int stage_is_direct(const stage_about_t *about, const stage_work_t *work)
{
    return about->direct && work->members > 1;
}

/* Slice of a rank: under DP its own rows, under TP all of its DP rank. */
PROTOCOL_FUNCTION void stage_rank_slice(const stage_about_t *about, const stage_line_t *line,
                                        uint32_t rank, uint32_t *first_out, uint32_t *count_out)
{
    *first_out = 0;
    *count_out = line->dp_rows[0];
    if (about->dp == 1)
        return;
    const uint32_t dp = rank / about->tp;
    uint32_t first = 0;
    for (uint32_t i = 0; i < MAILBOX_MAX_DP; i++)
        if (i < dp)
            first += line->dp_rows[i];
    *first_out = first;
    *count_out = line->dp_rows[dp];
}

/* What a rank gets: its complete rows, or the partial of this member. */
PROTOCOL_FUNCTION void *stage_rank_rows(const stage_about_t *about, const stage_work_t *work,
                                        uint32_t rank)
{
    const uint64_t at = stage_is_direct(about, work)
                            ? about->partial_offset + work->member * about->partial_bytes
                            : about->output_offset;
    return (void *)(uintptr_t)(about->arenas[rank] + at);
}

PROTOCOL_FUNCTION uint64_t *stage_rank_word(const stage_about_t *about, const stage_work_t *work,
                                            uint32_t rank)
{
    mailbox_arena_t *arena = (mailbox_arena_t *)(uintptr_t)about->arenas[rank];
    return stage_is_direct(about, work) ? &mailbox_partial_at(arena, work->member)->sequence
                                        : &arena->response.sequence;
}

/* Release: the rows were written before, by this thread or by threads it has met. Pairs with the
 * consumers' loads (stage_device_wait_look). */
PROTOCOL_FUNCTION void stage_publish_all(const stage_about_t *about, const stage_work_t *work)
{
    for (uint32_t rank = 0; rank < work->ranks; rank++)
        PROTOCOL_PUBLISH(stage_rank_word(about, work, rank), work->line.sequence);
}

PROTOCOL_FUNCTION stage_partials_t *stage_reducer_partials(const stage_about_t *about,
                                                           const stage_work_t *work)
{
    return (stage_partials_t *)(uintptr_t)about->partials[stage_first_bit(work->group)];
}
PROTOCOL_FUNCTION float *stage_partial_rows(const stage_about_t *about, stage_partials_t *partials,
                                            uint32_t member)
{
    return (float *)((char *)partials + STAGE_HEADER_BYTES) + member * about->partial_stride;
}

/* The Invocation goes on with a job of this block. wide: its rows are FP32 partials. */
PROTOCOL_FUNCTION void stage_job_start(stage_scheduler_t *s, uint32_t instance, uint32_t kind,
                                       const void *from, uint32_t wide)
{
    stage_work_t *work = &s->work[instance];
    work->job = kind;
    work->job_from = from;
    work->job_wide = wide;
    work->job_next = 0;
    work->phase = STAGE_JOB;
    s->jobs |= 1ull << instance;
}

PROTOCOL_FUNCTION uint64_t stage_job_elements(const stage_work_t *work)
{
    return (uint64_t)work->rows * work->about.hidden;
}

/* Does the job deliver to the ranks, or (a member's partial) to the first member? */
PROTOCOL_FUNCTION int stage_job_delivers(const stage_work_t *work)
{
    return work->job != STAGE_JOB_ECHO || work->members == 1 || stage_is_direct(&work->about, work);
}

PROTOCOL_FUNCTION void stage_job_describe(const stage_work_t *work, stage_job_t *job)
{
    const stage_about_t *about = &work->about;
    job->kind = work->job;
    job->dtype = about->dtype;
    job->narrow = about->hidden % 8 != 0;
    job->wide = work->job_wide;
    job->member = work->member;
    job->members = work->members;
    job->layer = work->line.layer;
    job->from = work->job_from;
    job->stride = about->partial_stride;
    if (stage_job_delivers(work)) {
        job->consumers = work->ranks;
        for (uint32_t rank = 0; rank < work->ranks; rank++) {
            uint32_t first, count;
            stage_rank_slice(about, &work->line, rank, &first, &count);
            job->to[rank].rows = stage_rank_rows(about, work, rank);
            job->to[rank].begin = (uint64_t)first * about->hidden;
            job->to[rank].count = (uint64_t)count * about->hidden;
        }
    } else {
        stage_partials_t *partials = stage_reducer_partials(about, work);
        job->consumers = 1;
        job->to[0].rows = stage_partial_rows(about, partials, work->member);
        job->to[0].begin = 0;
        job->to[0].count = stage_job_elements(work);
    }
}

/* ---- executing ------------------------------------------------------------------------------ */
/* Where this member's compute writes, and what has to follow it. */
typedef struct stage_plan {
    void *output;    /* complete rows, or NULL */
    float *partial;  /* or the partial */
    uint64_t *word;  /* one word that may be published with the rows, or NULL */
    uint32_t spread; /* the rows go on from there to the consumers */
} stage_plan_t;

PROTOCOL_FUNCTION void stage_plan_make(const stage_scheduler_t *s, const stage_about_t *about,
                                       const stage_work_t *work, stage_plan_t *plan_out)
{
    plan_out->output = 0;
    plan_out->partial = 0;
    plan_out->word = 0;
    plan_out->spread = 0;
    if (work->members == 1) {
        if (work->ranks == 1) {
            plan_out->output = stage_rank_rows(about, work, 0);
            plan_out->word = stage_rank_word(about, work, 0);
        } else {
            plan_out->output = s->dispatch ? s->dispatch->lanes[work->lane].output : 0;
            plan_out->spread = 1;
        }
    } else if (stage_is_direct(about, work)) {
        if (work->ranks == 1) {
            plan_out->partial = (float *)stage_rank_rows(about, work, 0);
            plan_out->word = stage_rank_word(about, work, 0);
        } else {
            plan_out->partial = (float *)(uintptr_t)about->scratch;
            plan_out->spread = 1;
        }
    } else {
        stage_partials_t *partials = stage_reducer_partials(about, work);
        plan_out->partial = stage_partial_rows(about, partials, work->member);
        if (work->member)
            plan_out->word = &partials->ready[work->member].sequence;
    }
}

/* What follows when the compute of this member has ended (and, for a host launch, has served its
 * consumers). */
PROTOCOL_FUNCTION void stage_scheduler_computed(stage_scheduler_t *s, uint32_t instance,
                                                uint64_t now_ns)
{
    stage_work_t *work = &s->work[instance];
    const stage_about_t *about = &work->about;
    s->counts.execute_ns += now_ns - work->since_ns;
    work->since_ns = now_ns;
    s->counts.invocations++;
    s->counts.rows += work->rows;
    work->invocations++;
    work->invocation_rows += work->rows;
    if (work->members > 1 && !about->direct && work->member == 0 && !work->abandoned) {
        stage_scheduler_release(s, work);
        work->missing = (1u << work->members) - 2;
        work->phase = STAGE_PARTIALS;
        s->waiting |= 1ull << instance;
        return;
    }
    stage_scheduler_end(s, instance);
}

/* The Lane is ours; fills it and posts. */
PROTOCOL_FUNCTION void stage_scheduler_run(stage_scheduler_t *s, uint32_t instance, uint64_t now_ns)
{
    stage_work_t *work = &s->work[instance];
    const stage_about_t *about = &work->about;
    stage_plan_t plan;
    s->counts.queue_ns += now_ns - work->since_ns;
    work->since_ns = now_ns;
    work->phase = STAGE_RUNNING;
    if (!s->dispatch) {
        stage_job_start(s, instance, STAGE_JOB_ECHO, (const void *)(uintptr_t)about->input,
                        work->members > 1);
        return;
    }
    stage_plan_make(s, about, work, &plan);
    if (work->rows > s->dispatch->max_rows ||
        (plan.spread && work->members == 1 && work->rows > s->dispatch->buffer_rows)) {
        stage_scheduler_fail(s, STAGE_FAILURE_CAPACITY, instance, work->first_rank, s->ffn, 0, 0,
                             XP_INVALID);
        return;
    }
    const ffn_cuda_dispatch_lane_t *own = &s->dispatch->lanes[work->lane];
    ffn_cuda_lane_t *lane = own->lane;
    ffn_cuda_answer_t *answer = own->answer;
    lane->layer = s->dispatch->models[about->weights].first_layer + work->line.layer;
    lane->rows = work->rows;
    lane->input = (const void *)(uintptr_t)about->input;
    lane->output = plan.output;
    lane->partial = plan.partial;
    answer->source_count = 0; /* the rows of all ranks lie one after another already */
    if (plan.spread) {
        answer->consumer_count = work->ranks;
        for (uint32_t rank = 0; rank < work->ranks; rank++) {
            ffn_cuda_consumer_t *to = &answer->consumers[rank];
            stage_rank_slice(about, &work->line, rank, &to->first, &to->count);
            to->rows = stage_rank_rows(about, work, rank);
            to->word = stage_rank_word(about, work, rank);
            to->value = work->line.sequence;
        }
    } else {
        answer->consumer_count = plan.word ? 1 : 0;
        answer->consumers[0].rows = 0;
        answer->consumers[0].word = plan.word;
        answer->consumers[0].value = work->line.sequence;
        answer->consumers[0].first = 0;
        answer->consumers[0].count = work->rows;
    }
    const uint64_t ticket = ++s->tickets;
    answer->ticket = ticket;
    answer->instance = instance;
    answer->rank = work->first_rank;
    answer->kind = work->line.kind;
    answer->layer_of_model = work->line.layer;
    s->lane[work->lane].ticket = ticket;
    s->lane[work->lane].instance = instance;
    work->job = STAGE_JOB_NONE;
    const uint32_t cuts = s->poster.cuts;
    if (ffn_cuda_lease_takes(&s->poster, work->rows, work->decode_rows, work->few_rows) &&
        ffn_cuda_command_post(s->dispatch, &s->poster, work->lane,
                              ffn_cuda_invocation_kib(&s->dispatch->models[about->weights],
                                                      work->line.layer, work->rows),
                              ticket, plan.spread ? 0 : plan.word, work->line.sequence)) {
        /* What the resident kernel does not do: further consumers, after its `done`. */
        if (plan.spread)
            work->job = STAGE_JOB_COPY;
        s->counts.resident++;
        s->counts.cuts += s->poster.cuts != cuts;
    } else {
        ffn_cuda_request_post(s->dispatch, &s->poster, work->lane, work->urgent);
        s->counts.host++;
    }
}

/* A Lane's Invocation has ended. */
PROTOCOL_FUNCTION void stage_scheduler_done(stage_scheduler_t *s, uint32_t lane, uint64_t now_ns)
{
    const uint32_t instance = s->lane[lane].instance;
    stage_work_t *work = &s->work[instance];
    const stage_about_t *about = &work->about;
    s->lane[lane].ticket = 0;
    if (work->job == STAGE_JOB_COPY && !work->abandoned) {
        stage_plan_t plan;
        stage_plan_make(s, about, work, &plan);
        stage_job_start(s, instance, STAGE_JOB_COPY,
                        plan.output ? plan.output : (const void *)plan.partial, !plan.output);
        return;
    }
    stage_scheduler_computed(s, instance, now_ns);
}

/* ---- the other members ---------------------------------------------------------------------- */
PROTOCOL_FUNCTION void stage_scheduler_partials(stage_scheduler_t *s, uint32_t instance)
{
    stage_work_t *work = &s->work[instance];
    const stage_about_t *about = &work->about;
    stage_partials_t *partials = stage_reducer_partials(about, work);
    for (uint32_t left = work->missing; left; left &= left - 1) {
        const uint32_t member = stage_first_bit(left);
        /* A newer one cannot be: no rank has its answer to this one yet. */
        const mailbox_look_t look =
            mailbox_word_read(&partials->ready[member].sequence, work->line.sequence);
        if (look == MAILBOX_LIVE)
            work->missing &= ~(1u << member);
        if (look == MAILBOX_NONSENSE) {
            stage_scheduler_fail(s, STAGE_FAILURE_MEMBER, instance, work->first_rank, member, 0, 0,
                                 XP_PEER);
            return;
        }
    }
    if (work->missing)
        return;
    s->waiting &= ~(1ull << instance);
    stage_job_start(s, instance, STAGE_JOB_REDUCE, stage_partial_rows(about, partials, 0), 0);
}

/* ---- jobs ----------------------------------------------------------------------------------- */
/* Posts the next chunk; decoding first, then in turn. The chunk is to be done by the other threads
 * (or by the caller), who then call stage_scheduler_chunk_done(). Returns 1 when there is one. */
PROTOCOL_FUNCTION int stage_scheduler_chunk(stage_scheduler_t *s)
{
    uint32_t chosen = STAGE_SEVERAL;
    if (s->chunk_busy || !s->jobs)
        return 0;
    for (uint64_t left = s->jobs; left; left &= left - 1) {
        const uint32_t i = stage_first_bit(left);
        if (chosen == STAGE_SEVERAL || s->work[i].urgent > s->work[chosen].urgent ||
            (s->work[i].urgent == s->work[chosen].urgent && chosen < s->job_cursor &&
             i >= s->job_cursor))
            chosen = i;
    }
    stage_work_t *work = &s->work[chosen];
    const uint64_t left = stage_job_elements(work) - work->job_next;
    s->job_cursor = chosen + 1;
    stage_job_describe(work, &s->chunk.job);
    s->chunk.instance = chosen;
    s->chunk.begin = work->job_next;
    work->job_next += left > STAGE_JOB_CHUNK ? STAGE_JOB_CHUNK : left;
    s->chunk.end = work->job_next;
    s->chunk_busy = 1;
    s->chunk.number++;
    return 1;
}

PROTOCOL_FUNCTION void stage_scheduler_chunk_done(stage_scheduler_t *s, uint64_t now_ns)
{
    const uint32_t instance = s->chunk.instance;
    stage_work_t *work = &s->work[instance];
    const stage_about_t *about = &work->about;
    s->chunk_busy = 0;
    if (work->job_next < stage_job_elements(work))
        return;
    s->jobs &= ~(1ull << instance);
    if (stage_job_delivers(work))
        stage_publish_all(about, work);
    else if (work->member)
        PROTOCOL_PUBLISH(&stage_reducer_partials(about, work)->ready[work->member].sequence,
                         work->line.sequence);
    if (work->job == STAGE_JOB_REDUCE)
        stage_scheduler_end(s, instance);
    else
        stage_scheduler_computed(s, instance, now_ns);
}

/* A chunk by one thread that does nothing else, as tests have it. */
PROTOCOL_FUNCTION void stage_scheduler_chunk_run(stage_scheduler_t *s, uint64_t now_ns)
{
    stage_job_run(&s->chunk.job, s->chunk.begin, s->chunk.end, 0, 1);
    stage_scheduler_chunk_done(s, now_ns);
}

/* ---- orders, ages, failures ----------------------------------------------------------------- */
/* The lines of every attached Instance, in order. */
PROTOCOL_FUNCTION void stage_scheduler_list_lines(stage_scheduler_t *s)
{
    s->line_count = 0;
    for (uint32_t i = 0; i < s->instances; i++) {
        const stage_work_t *work = &s->work[i];
        stage_page_t *page = (stage_page_t *)(uintptr_t)work->about.page;
        if (transport_slot_state(work->now) != TRANSPORT_SLOT_ATTACHED || work->abandoned)
            continue;
        for (uint32_t rank = 0; rank < work->ranks && s->line_count < STAGE_LINES; rank++) {
            stage_line_at_t *at = &s->lines[s->line_count++];
            at->line = &page->lines[rank];
            at->instance = i;
            at->rank = rank;
            at->dp = rank / work->about.tp;
        }
    }
    s->relist = 0;
}

/* Returns 1 when the order was carried out and answered. */
PROTOCOL_FUNCTION int stage_scheduler_order(stage_scheduler_t *s, uint32_t instance)
{
    stage_instance_t *described = &s->table->instance[instance];
    stage_work_t *work = &s->work[instance];
    if (transport_slot_turn(PROTOCOL_LOAD_RELAXED(&described->wanted)) ==
        transport_slot_turn(work->now))
        return 0;
    const uint32_t wanted = PROTOCOL_LOAD_ACQUIRE(&described->wanted);
    if (work->phase == STAGE_RUNNING || work->phase == STAGE_JOB) {
        /* It writes to the arenas: they stay until it has ended. */
        if (!work->abandoned)
            s->counts.abandoned++;
        work->abandoned = 1;
        return 0;
    }
    if (work->phase != STAGE_IDLE) {
        if (!work->abandoned)
            s->counts.abandoned++;
        stage_scheduler_end(s, instance);
    }
    work->abandoned = 0;
    if (transport_slot_state(wanted) == TRANSPORT_SLOT_ATTACHED) {
        work->about = described->about;
        work->decode_rows = FFN_CUDA_DENSE_ROWS;
        work->few_rows = 0;
        if (s->dispatch) {
            work->decode_rows = s->dispatch->models[work->about.weights].decode_rows;
            work->few_rows = s->dispatch->models[work->about.weights].few_rows;
        }
        work->ranks = work->about.tp * work->about.dp;
        work->alone = work->ranks == 1 && work->about.uniform == 1u << s->ffn;
        work->taken = work->about.taken; /* 0: the host has cleared the lines */
    }
    work->now = wanted;
    PROTOCOL_STORE_RELEASE(&described->now, wanted);
    return 1;
}

/* Who is waited for may have closed the arenas: a rank, or a member that found nonsense in its
 * line. One rank's arena a look, since each is a trip over the link. 1: so it was. */
PROTOCOL_FUNCTION int stage_scheduler_closed(stage_scheduler_t *s, uint32_t instance)
{
    const stage_work_t *work = &s->work[instance];
    const uint64_t rank = s->turn / STAGE_LOOK_TURNS / s->instances % work->ranks;
    const uint32_t reason =
        mailbox_closed((const mailbox_arena_t *)(uintptr_t)work->about.arenas[rank]);
    if (reason)
        stage_scheduler_drop(s, instance, reason < XP_STATUS_COUNT ? reason : (uint32_t)XP_PEER);
    return reason != 0;
}

PROTOCOL_FUNCTION void stage_scheduler_age(stage_scheduler_t *s, uint32_t instance, uint64_t now_ns)
{
    stage_work_t *work = &s->work[instance];
    if (work->phase == STAGE_IDLE)
        return;
    const uint64_t waited = now_ns - work->since_ns;
    if ((work->phase == STAGE_GATHERING || work->phase == STAGE_PARTIALS) &&
        waited >= STAGE_CLOSED_NS && stage_scheduler_closed(s, instance))
        return;
    if (waited < s->timeout_ns)
        return;
    uint32_t kind = STAGE_FAILURE_EXECUTION, missing = s->ffn;
    if (work->phase == STAGE_GATHERING) {
        kind = STAGE_FAILURE_RANK;
        missing = stage_first_bit(~work->gathered);
    } else if (work->phase == STAGE_QUEUED) {
        kind = STAGE_FAILURE_LANE;
    } else if (work->phase == STAGE_PARTIALS) {
        uint32_t group = work->group;
        kind = STAGE_FAILURE_MEMBER;
        for (uint32_t member = stage_first_bit(work->missing); member; member--)
            group &= group - 1;
        missing = stage_first_bit(group);
    }
    stage_scheduler_fail(s, kind, instance, work->first_rank, missing, 0, waited, XP_TIMEOUT);
}

/* Every STAGE_LOOK_TURNS turns; orders and ages of one Instance at a time, so that it stays short.
 */
PROTOCOL_FUNCTION void stage_scheduler_look(stage_scheduler_t *s, uint64_t now_ns)
{
    stage_table_t *table = s->table;
    const uint32_t stop = PROTOCOL_LOAD_RELAXED(&table->stop);
    const uint32_t ended = PROTOCOL_LOAD_RELAXED(&table->ended);
    const uint32_t shutdown = PROTOCOL_LOAD_RELAXED(&table->shutdown);
    if (stop | ended) {
        s->leave = 1;
        return;
    }
    s->closing = shutdown;
    if (s->dispatch) {
        /* Between looks the last lease is used: the host waits for `lease_seen` before it ends one.
         */
        ffn_cuda_lease_look(s->dispatch, &s->poster);
        const uint32_t failure = PROTOCOL_LOAD_ACQUIRE(s->dispatch->failure);
        if (failure)
            stage_scheduler_fail(s, STAGE_FAILURE_RUNTIME, 0, 0, s->ffn, 0, 0, failure);
    }
    if (s->instances) {
        const uint32_t one = s->look_cursor;
        s->look_cursor = one + 1 < s->instances ? one + 1 : 0;
        if (stage_scheduler_order(s, one))
            s->relist = 1;
        stage_scheduler_age(s, one, now_ns);
        table->instance[one].invocations = s->work[one].invocations;
        table->instance[one].rows = s->work[one].invocation_rows;
    }
    if (s->relist)
        stage_scheduler_list_lines(s);
    if (s->closing) {
        int idle = 1;
        for (uint32_t i = 0; i < s->instances; i++)
            if (s->work[i].phase > STAGE_GATHERING)
                idle = 0;
        if (idle)
            s->leave = 1;
    }
    s->counts.turns = s->turn;
    table->counts = s->counts;
}

/* Any thread of the block, between turns: may the Invocation of this Lane have ended? */
PROTOCOL_FUNCTION int stage_scheduler_lane_ended(const stage_scheduler_t *s, uint32_t lane)
{
    return lane < s->lanes && s->lane[lane].ticket &&
           PROTOCOL_LOAD_RELAXED(s->dispatch->lanes[lane].done) == s->lane[lane].ticket;
}

/* The same for all Lanes, by one thread. */
PROTOCOL_FUNCTION uint32_t stage_scheduler_lanes_ended(const stage_scheduler_t *s)
{
    uint32_t ended = 0;
    for (uint32_t lane = 0; s->dispatch && lane < s->lanes; lane++)
        if (stage_scheduler_lane_ended(s, lane))
            ended |= 1u << lane;
    return ended;
}

/* ---- a turn --------------------------------------------------------------------------------- */
/* Nothing to do but to look at lines and Lanes again? Then, when they have nothing new either, a
 * turn may be counted only (s->turn++): turns must be short for a line to be found soon. */
PROTOCOL_FUNCTION int stage_scheduler_quiet(const stage_scheduler_t *s)
{
    return s->waiting == 0 && (s->queued == 0 || s->lanes_free == 0) &&
           (s->jobs == 0 || s->chunk_busy) && s->turn % STAGE_LOOK_TURNS != 0;
}

/* The common case in a few steps, since every layer of every token waits for them: nothing else is
 * in hand, one line is new, and its Instance has one rank and this member alone. Returns 0 when
 * that is not so, and nothing has been done; else all is as after the general steps. */
PROTOCOL_FUNCTION int stage_scheduler_alone(stage_scheduler_t *s, uint32_t index, uint64_t now_ns)
{
    const stage_line_at_t *at = &s->lines[index];
    const uint32_t instance = at->instance;
    stage_work_t *work = &s->work[instance];
    stage_line_t line;
    if (!work->alone || !stage_brief_read(s->briefs[index], work->taken, &line) ||
        work->phase != STAGE_IDLE || transport_slot_state(work->now) != TRANSPORT_SLOT_ATTACHED)
        return 0;
    const uint32_t max_rows = work->about.max_rows, layers = work->about.layers;
    if (line.layer >= layers || line.kind >= MAILBOX_KIND_COUNT || line.rows > max_rows)
        return 0;
    if (s->dispatch && ((line.rows > work->decode_rows && line.rows > work->few_rows) ||
                        line.rows > s->dispatch->max_rows))
        return 0;
    work->urgent = line.kind == 0 || line.rows <= work->decode_rows;
    const uint32_t number = stage_first_bit(s->lanes_free);
    if (s->dispatch) {
        const ffn_cuda_dispatch_lane_t own = s->dispatch->lanes[number];
        const uint64_t arena = work->about.arenas[0];
        const uint64_t ticket = s->tickets + 1;
        uint64_t *word = &((mailbox_arena_t *)(uintptr_t)arena)->response.sequence;
        ffn_cuda_invocation_t given;
        given.layer = s->dispatch->models[work->about.weights].first_layer + line.layer;
        given.rows = line.rows;
        given.kib = ffn_cuda_invocation_kib(&s->dispatch->models[work->about.weights], line.layer,
                                            line.rows);
        given.input = (const void *)(uintptr_t)work->about.input;
        given.output = (void *)(uintptr_t)(arena + work->about.output_offset);
        given.partial = 0;
        own.lane->layer = given.layer;
        own.lane->rows = given.rows;
        own.lane->input = given.input;
        own.lane->output = given.output;
        own.lane->partial = given.partial;
        own.answer->source_count = 0;
        own.answer->consumer_count = 1;
        own.answer->consumers[0].rows = 0;
        own.answer->consumers[0].word = word;
        own.answer->consumers[0].value = line.sequence;
        own.answer->consumers[0].first = 0;
        own.answer->consumers[0].count = line.rows;
        own.answer->ticket = ticket;
        own.answer->instance = instance;
        own.answer->rank = 0;
        own.answer->kind = line.kind;
        own.answer->layer_of_model = line.layer;
        s->tickets = ticket;
        const uint32_t cuts = s->poster.cuts;
        if (ffn_cuda_lease_takes(&s->poster, line.rows, work->decode_rows, work->few_rows) &&
            ffn_cuda_invocation_post(s->dispatch, &s->poster, number, &given, ticket, word,
                                     line.sequence)) {
            s->counts.resident++;
            s->counts.cuts += s->poster.cuts != cuts;
        } else {
            ffn_cuda_request_post(s->dispatch, &s->poster, number, work->urgent);
            s->counts.host++;
        }
        s->lane[number].ticket = ticket;
        s->lane[number].instance = instance;
        work->job = STAGE_JOB_NONE;
        work->phase = STAGE_RUNNING;
    } else {
        s->lane[number].ticket = 0;
        work->phase = STAGE_JOB;
        work->job = STAGE_JOB_ECHO;
        work->job_from = (const void *)(uintptr_t)work->about.input;
        work->job_wide = 0;
        work->job_next = 0;
        s->jobs |= 1ull << instance;
    }
    work->line = line;
    work->gathered = 1;
    work->first_rank = 0;
    work->rows = line.rows;
    work->group = 1u << s->ffn;
    work->members = 1;
    work->member = 0;
    work->lane = number;
    work->lane_held = 1;
    work->arrival = s->arrivals++;
    work->passes = 0;
    work->since_ns = now_ns;
    s->lanes_free &= ~(1u << number);
    s->counts.lanes_in_use++;
    if (s->counts.lanes_in_use > s->counts.lanes_peak)
        s->counts.lanes_peak = s->counts.lanes_in_use;
    return 1;
}

/* changed: bit i of word i / 32 for each line that stage_scheduler_line_changed() found; ended:
 * bits of Lanes that stage_scheduler_lane_ended() found. Returns 1 while the scheduler is to go on.
 */
PROTOCOL_FUNCTION int stage_scheduler_turn(stage_scheduler_t *s,
                                           const uint32_t changed[STAGE_LINES / 32], uint32_t ended,
                                           uint64_t now_ns)
{
    const uint32_t words = STAGE_LINES / 32;
    uint32_t events = 0, only = STAGE_SEVERAL;
    for (uint32_t w = 0; w < words; w++)
        if (changed[w])
            only = only == STAGE_SEVERAL && (changed[w] & (changed[w] - 1)) == 0
                       ? w * 32 + stage_first_bit(changed[w])
                       : STAGE_LINES;
    if (only < STAGE_LINES && !ended && !s->closing && s->lanes_free && stage_scheduler_quiet(s) &&
        stage_scheduler_alone(s, only, now_ns)) {
        s->turn++;
        return 1;
    }
    /* Another word first in each turn, so that no line waits for ever behind busy ones. */
    for (uint32_t w = 0; w < words; w++) {
        const uint32_t word = (uint32_t)((s->turn + w) % words);
        for (uint32_t left = changed[word]; left && events < STAGE_EVENTS; left &= left - 1) {
            stage_scheduler_line(s, word * 32 + stage_first_bit(left), now_ns);
            events++;
        }
    }
    for (uint32_t left = ended; left; left &= left - 1) {
        const uint32_t lane = stage_first_bit(left);
        if (ffn_cuda_lane_done(s->dispatch, lane, s->lane[lane].ticket))
            stage_scheduler_done(s, lane, now_ns);
    }
    for (uint64_t left = s->waiting; left; left &= left - 1)
        stage_scheduler_partials(s, stage_first_bit(left));
    while (s->queued && s->lanes_free) {
        const uint32_t instance = stage_scheduler_choose(s);
        stage_work_t *work = &s->work[instance];
        work->lane = stage_first_bit(s->lanes_free);
        work->lane_held = 1;
        s->lanes_free &= ~(1u << work->lane);
        s->lane[work->lane].ticket = 0;
        s->queued &= ~(1ull << instance);
        s->counts.lanes_in_use++;
        if (s->counts.lanes_in_use > s->counts.lanes_peak)
            s->counts.lanes_peak = s->counts.lanes_in_use;
        stage_scheduler_run(s, instance, now_ns);
    }
    if (s->turn++ % STAGE_LOOK_TURNS == 0)
        stage_scheduler_look(s, now_ns);
    return !s->leave;
}
#endif
