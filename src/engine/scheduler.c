/* SPDX-License-Identifier: MIT */
/* Admission, batch forming, preemption. Engine thread only; allocates nothing after init. */
#include "engine/scheduler.h"

#include <stdlib.h>
#include <string.h>

/* A chunk is never cut below this: small chunks pay for all weights and do little. */
#define MIN_CHUNK_ROWS 32u

enum { KIND_DECODE = 0, KIND_PREFILL = 1, KIND_MIXED = 2 }; /* transport_kind_t */

xp_status_t engine_scheduler_init(engine_pages_t *pages, bool prefix_cache, uint32_t capacity,
                                  uint32_t decode_rows, uint32_t prefill_rows, uint32_t max_rows,
                                  uint32_t prompt_rows, uint64_t ttft_ns, uint64_t tbt_ns,
                                  engine_scheduler_t *scheduler_out)
{
    engine_scheduler_t scheduler = {.pages = pages,
                                    .prefix_cache = prefix_cache,
                                    .max_running = decode_rows,
                                    .prefill_rows = prefill_rows,
                                    .max_rows = max_rows,
                                    .prompt_rows = prompt_rows,
                                    .ttft_ns = ttft_ns,
                                    .tbt_ns = tbt_ns,
                                    .admit_pages = UINT32_MAX,
                                    .capacity = capacity};
    scheduler.waiting = calloc(capacity, sizeof(engine_sequence_t *));
    scheduler.running = calloc(decode_rows, sizeof(engine_sequence_t *));
    if (!scheduler.waiting || !scheduler.running) {
        engine_scheduler_fini(&scheduler);
        return xp_fail(XP_NO_MEMORY, "scheduler of %u sequences", capacity);
    }
    *scheduler_out = scheduler;
    return XP_OK;
}

void engine_scheduler_fini(engine_scheduler_t *scheduler)
{
    free(scheduler->waiting);
    free(scheduler->running);
    memset(scheduler, 0, sizeof *scheduler);
}

xp_status_t engine_batch_init(uint32_t decode_rows, engine_batch_t *batch_out)
{
    engine_batch_t batch = {0};
    batch.sequences = calloc(decode_rows, sizeof(engine_sequence_t *));
    batch.spans = calloc(decode_rows, sizeof *batch.spans);
    if (!batch.sequences || !batch.spans) {
        engine_batch_fini(&batch);
        return xp_fail(XP_NO_MEMORY, "batch of %u sequences", decode_rows);
    }
    *batch_out = batch;
    return XP_OK;
}

void engine_batch_fini(engine_batch_t *batch)
{
    free(batch->sequences);
    free(batch->spans);
    memset(batch, 0, sizeof *batch);
}

/* ---- ordered lists --------------------------------------------------------------------------- */

static void list_insert(engine_sequence_t **list, uint32_t *count, uint32_t capacity,
                        engine_sequence_t *sequence)
{
    XP_ASSERT(*count < capacity);
    uint32_t at = (*count)++;
    for (; at > 0 && list[at - 1]->request > sequence->request; at--)
        list[at] = list[at - 1];
    list[at] = sequence;
}

static void list_remove(engine_sequence_t **list, uint32_t *count,
                        const engine_sequence_t *sequence)
{
    uint32_t at = 0;
    while (at < *count && list[at] != sequence)
        at++;
    XP_ASSERT(at < *count);
    --*count;
    memmove(list + at, list + at + 1, (*count - at) * sizeof *list);
}

static void waiting_insert(engine_scheduler_t *scheduler, engine_sequence_t *sequence)
{
    sequence->state = ENGINE_SEQUENCE_WAITING;
    list_insert(scheduler->waiting, &scheduler->waiting_count, scheduler->capacity, sequence);
}

/* ---- pages ----------------------------------------------------------------------------------- */

static uint32_t pages_for(const engine_scheduler_t *scheduler, uint32_t tokens)
{
    return (tokens + scheduler->pages->page_tokens - 1) / scheduler->pages->page_tokens;
}

static void pages_give_back(engine_scheduler_t *scheduler, engine_sequence_t *sequence)
{
    while (sequence->page_count > 0)
        engine_pages_release(scheduler->pages, sequence->pages[--sequence->page_count]);
    sequence->tree_pages = 0;
    sequence->computed = 0;
}

static void preempt(engine_scheduler_t *scheduler, engine_sequence_t *sequence)
{
    pages_give_back(scheduler, sequence);
    list_remove(scheduler->running, &scheduler->running_count, sequence);
    waiting_insert(scheduler, sequence);
    sequence->stalled = false;
    sequence->preemptions++;
    scheduler->preemptions++;
}

static bool another_runs(const engine_scheduler_t *scheduler, const engine_sequence_t *sequence)
{
    for (uint32_t i = 0; i < scheduler->running_count; i++)
        if (scheduler->running[i] != sequence && !scheduler->running[i]->stalled)
            return true;
    return false;
}

/* A grant may still bring the page that the sequence lacks. */
static bool may_stall(const engine_scheduler_t *scheduler, const engine_sequence_t *sequence)
{
    if (scheduler->pages->live_count >= scheduler->most_pages)
        return false;
    if (!sequence->stalled)
        return true; /* the demand is not out yet */
    const uint64_t stalled_ns = scheduler->now_ns - sequence->stalled_ns;
    if (scheduler->refused)
        return stalled_ns < ENGINE_REFUSED_NS && another_runs(scheduler, sequence);
    return stalled_ns < scheduler->patience_ns;
}

typedef enum page_outcome { PAGE_THERE, PAGE_STALLED, PAGE_PREEMPTED } page_outcome_t;

/* Sees to it that the page of the sequence's next row exists. PAGE_PREEMPTED when the sequence
 * itself had to make room. */
static page_outcome_t page_ensure(engine_scheduler_t *scheduler, engine_sequence_t *sequence)
{
    const uint32_t needed = pages_for(scheduler, sequence->computed + 1);
    while (sequence->page_count < needed) {
        uint32_t page;
        if (engine_pages_take(scheduler->pages, &page) == XP_OK) {
            sequence->pages[sequence->page_count++] = page;
            continue;
        }
        if (may_stall(scheduler, sequence)) {
            if (!sequence->stalled) {
                sequence->stalled_ns = scheduler->now_ns;
                scheduler->stalls++;
            }
            sequence->stalled = true;
            return PAGE_STALLED;
        }
        engine_sequence_t *youngest = scheduler->running[scheduler->running_count - 1];
        preempt(scheduler, youngest);
        if (youngest == sequence)
            return PAGE_PREEMPTED;
    }
    sequence->stalled = false;
    return PAGE_THERE;
}

static uint64_t sequence_deadline(const engine_scheduler_t *scheduler,
                                  const engine_sequence_t *sequence)
{
    if (sequence->count > sequence->prompt_count)
        return scheduler->tbt_ns ? sequence->last_token_ns + scheduler->tbt_ns : UINT64_MAX;
    return scheduler->ttft_ns ? sequence->arrival_ns + scheduler->ttft_ns : UINT64_MAX;
}

/* Before an admission evicts, free memory is asked for: a moment's wait against prefixes that would
 * have to be computed again. */
static bool spares_cache(engine_scheduler_t *scheduler, engine_sequence_t *sequence, uint32_t all)
{
    const engine_pages_t *pages = scheduler->pages;
    if (pages->limit >= scheduler->most_pages)
        return false;
    if (sequence->asked_ns == 0)
        sequence->asked_ns = scheduler->now_ns;
    else if (!scheduler->growing &&
             (scheduler->refused || scheduler->now_ns - sequence->asked_ns >= ENGINE_ASK_NS))
        return false;
    const uint64_t wanted = (uint64_t)all + pages->idle_count;
    scheduler->prefill_shortage = (engine_shortage_t){
        .kind = ENGINE_SHORTAGE_CACHE,
        .pages = wanted < scheduler->most_pages ? (uint32_t)wanted : scheduler->most_pages,
        .deadline_ns = UINT64_MAX,
        .since_ns = sequence->asked_ns};
    return true;
}

/* Prefix-cache hits and pages for all known tokens, or nothing. */
static bool pages_reserve(engine_scheduler_t *scheduler, engine_sequence_t *sequence)
{
    engine_pages_t *pages = scheduler->pages;
    uint32_t matched = 0;
    /* Prompt log-probabilities need every prompt row computed. The last token is always computed:
     * its logits are wanted. */
    if (scheduler->prefix_cache &&
        !(sequence->sampling.prompt_logprobs && sequence->prompt_sent < sequence->prompt_count))
        matched = engine_pages_match(pages, sequence->tokens,
                                     (sequence->count - 1) / pages->page_tokens, sequence->pages);
    sequence->page_count = sequence->tree_pages = matched;
    sequence->computed = matched * pages->page_tokens;
    const uint32_t needed = pages_for(scheduler, sequence->count);
    /* Those who run will each want a page soon; admitting into that margin would only preempt. */
    const uint32_t more = needed - matched + scheduler->running_count;
    const uint32_t all = pages->live_count + more;
    if (engine_pages_available(pages) < more || all > scheduler->admit_pages) {
        if (all <= scheduler->most_pages)
            scheduler->prefill_shortage =
                (engine_shortage_t){.kind = ENGINE_SHORTAGE_PREFILL,
                                    .pages = all,
                                    .deadline_ns = sequence_deadline(scheduler, sequence),
                                    .since_ns = sequence->arrival_ns};
        pages_give_back(scheduler, sequence);
        return false;
    }
    if (pages->free_count < needed - matched && spares_cache(scheduler, sequence, all)) {
        pages_give_back(scheduler, sequence);
        return false;
    }
    while (sequence->page_count < needed) {
        xp_status_t status = engine_pages_take(pages, &sequence->pages[sequence->page_count]);
        XP_ASSERT(status == XP_OK);
        sequence->page_count++;
    }
    return true;
}

/* ---- scheduling ------------------------------------------------------------------------------ */

void engine_scheduler_add(engine_scheduler_t *scheduler, engine_sequence_t *sequence)
{
    waiting_insert(scheduler, sequence);
}

static bool anyone_stalls(const engine_scheduler_t *scheduler)
{
    for (uint32_t i = 0; i < scheduler->running_count; i++)
        if (scheduler->running[i]->stalled)
            return true;
    return false;
}

void engine_scheduler_admit(engine_scheduler_t *scheduler, uint64_t now_ns)
{
    scheduler->now_ns = now_ns;
    /* Pages that come belong to those who stall. */
    if (scheduler->hold || anyone_stalls(scheduler))
        return;
    scheduler->prefill_shortage.kind = ENGINE_SHORTAGE_NONE;
    while (scheduler->waiting_count > 0 && scheduler->running_count < scheduler->max_running) {
        engine_sequence_t *sequence = scheduler->waiting[0];
        /* Strictly in order: a small request that overtakes would starve a large one. */
        if (!pages_reserve(scheduler, sequence))
            return;
        list_remove(scheduler->waiting, &scheduler->waiting_count, sequence);
        list_insert(scheduler->running, &scheduler->running_count, scheduler->max_running,
                    sequence);
        sequence->state = ENGINE_SEQUENCE_RUNNING;
        sequence->stalled = false;
        sequence->asked_ns = 0;
        if (!sequence->admitted_before) {
            sequence->admitted_before = true;
            sequence->admitted_ns = now_ns;
            sequence->cached_tokens = sequence->computed;
        }
    }
}

static void batch_add(const engine_scheduler_t *scheduler, engine_batch_t *batch,
                      engine_sequence_t *sequence, uint32_t rows)
{
    batch->sequences[batch->count] = sequence;
    batch->spans[batch->count] = (engine_span_t){.tokens = sequence->tokens + sequence->computed,
                                                 .pages = sequence->pages,
                                                 .position = sequence->computed,
                                                 .rows = rows};
    batch->count++;
    batch->rows += rows;
    uint64_t deadline = sequence_deadline(scheduler, sequence);
    if (deadline < batch->slo_deadline_ns)
        batch->slo_deadline_ns = deadline;
}

static bool is_decoding(const engine_sequence_t *sequence)
{
    return sequence->count - sequence->computed == 1;
}

static bool batch_holds(const engine_batch_t *batch, const engine_sequence_t *sequence)
{
    for (uint32_t i = 0; i < batch->count; i++)
        if (batch->sequences[i] == sequence)
            return true;
    return false;
}

static engine_sequence_t *most_urgent_prefill(const engine_scheduler_t *scheduler,
                                              const engine_batch_t *batch, uint32_t prompt_rows)
{
    engine_sequence_t *best = NULL;
    uint64_t best_deadline = 0;
    for (uint32_t i = 0; i < scheduler->running_count; i++) {
        engine_sequence_t *sequence = scheduler->running[i];
        if (is_decoding(sequence) || batch_holds(batch, sequence) ||
            (sequence->sampling.prompt_logprobs && prompt_rows == 0))
            continue;
        uint64_t deadline = sequence_deadline(scheduler, sequence);
        if (!best || deadline < best_deadline) {
            best = sequence;
            best_deadline = deadline;
        }
    }
    return best;
}

/* Prefill rows of the next step. Those who decode wait for the whole step, so beside them a chunk
 * is only as long as their SLO allows. */
static uint32_t chunk_budget(const engine_scheduler_t *scheduler, uint32_t decode_rows)
{
    uint64_t budget = scheduler->prefill_rows;
    if (decode_rows > 0 && scheduler->tbt_ns > 0 && scheduler->prefill_row_ns > 0) {
        uint64_t fits = scheduler->tbt_ns / scheduler->prefill_row_ns;
        if (fits < MIN_CHUNK_ROWS)
            fits = MIN_CHUNK_ROWS;
        if (fits < budget)
            budget = fits;
    }
    const uint32_t room = scheduler->max_rows - decode_rows;
    return budget < room ? (uint32_t)budget : room;
}

void engine_scheduler_took(engine_scheduler_t *scheduler, const engine_batch_t *batch,
                           uint64_t step_ns)
{
    if (batch->kind == KIND_DECODE || batch->rows < MIN_CHUNK_ROWS)
        return; /* mostly the cost of the weights, not of a row */
    uint64_t row_ns = step_ns / batch->rows;
    scheduler->prefill_row_ns =
        scheduler->prefill_row_ns ? (3 * scheduler->prefill_row_ns + row_ns) / 4 : row_ns;
}

/* The demand of those who stall: a page for each who runs, since they come to need one in turn. */
static void note_stalls(engine_scheduler_t *scheduler)
{
    engine_shortage_t *shortage = &scheduler->decode_shortage;
    *shortage = (engine_shortage_t){.deadline_ns = UINT64_MAX, .since_ns = UINT64_MAX};
    for (uint32_t i = 0; i < scheduler->running_count; i++) {
        const engine_sequence_t *sequence = scheduler->running[i];
        if (!sequence->stalled)
            continue;
        const uint64_t deadline = sequence_deadline(scheduler, sequence);
        shortage->kind = ENGINE_SHORTAGE_DECODE;
        if (deadline < shortage->deadline_ns)
            shortage->deadline_ns = deadline;
        if (sequence->stalled_ns < shortage->since_ns)
            shortage->since_ns = sequence->stalled_ns;
    }
    const uint32_t pages = scheduler->pages->live_count + scheduler->running_count;
    shortage->pages = pages < scheduler->most_pages ? pages : scheduler->most_pages;
}

void engine_scheduler_pick(engine_scheduler_t *scheduler, engine_batch_t *batch)
{
    batch->count = batch->rows = 0;
    batch->slo_deadline_ns = UINT64_MAX;
    /* Pages first: a preemption takes from the end of the list, behind the one being served. */
    for (uint32_t i = 0; i < scheduler->running_count; i++) {
        engine_sequence_t *sequence = scheduler->running[i];
        if (is_decoding(sequence) && page_ensure(scheduler, sequence) == PAGE_PREEMPTED)
            break;
    }
    note_stalls(scheduler);
    uint32_t prompt_rows = scheduler->prompt_rows;
    for (uint32_t i = 0; i < scheduler->running_count; i++) {
        engine_sequence_t *sequence = scheduler->running[i];
        if (is_decoding(sequence) && !sequence->stalled && batch->rows < scheduler->max_rows)
            batch_add(scheduler, batch, sequence, 1);
    }
    const uint32_t decode_rows = batch->rows;
    uint32_t budget = chunk_budget(scheduler, decode_rows);
    while (budget > 0) {
        engine_sequence_t *sequence = most_urgent_prefill(scheduler, batch, prompt_rows);
        if (!sequence)
            break;
        uint32_t rows = sequence->count - sequence->computed;
        if (rows > budget)
            rows = budget;
        if (sequence->sampling.prompt_logprobs) {
            if (rows > prompt_rows)
                rows = prompt_rows;
            prompt_rows -= rows;
        }
        batch_add(scheduler, batch, sequence, rows);
        budget -= rows;
    }
    batch->kind = decode_rows == batch->rows ? KIND_DECODE
                  : decode_rows == 0         ? KIND_PREFILL
                                             : KIND_MIXED;
    if (batch->slo_deadline_ns == UINT64_MAX)
        batch->slo_deadline_ns = 0;
}

void engine_scheduler_computed(engine_scheduler_t *scheduler, const engine_batch_t *batch)
{
    const uint32_t page_tokens = scheduler->pages->page_tokens;
    for (uint32_t i = 0; i < batch->count; i++) {
        engine_sequence_t *sequence = batch->sequences[i];
        sequence->computed += batch->spans[i].rows;
        if (!scheduler->prefix_cache)
            continue;
        while ((sequence->tree_pages + 1) * page_tokens <= sequence->computed) {
            uint32_t at = sequence->tree_pages++;
            uint32_t parent = at > 0 ? sequence->pages[at - 1] : ENGINE_PAGE_NONE;
            sequence->pages[at] = engine_pages_insert(scheduler->pages, parent,
                                                      sequence->tokens + (size_t)at * page_tokens,
                                                      sequence->pages[at]);
        }
    }
}

engine_shortage_t engine_scheduler_shortage(const engine_scheduler_t *scheduler)
{
    if (scheduler->decode_shortage.kind != ENGINE_SHORTAGE_NONE && anyone_stalls(scheduler))
        return scheduler->decode_shortage;
    if (scheduler->waiting_count > 0)
        return scheduler->prefill_shortage;
    return (engine_shortage_t){.kind = ENGINE_SHORTAGE_NONE};
}

uint64_t engine_scheduler_earliest_deadline_ns(const engine_scheduler_t *scheduler)
{
    uint64_t earliest = UINT64_MAX;
    for (uint32_t i = 0; i < scheduler->running_count + scheduler->waiting_count; i++) {
        const engine_sequence_t *sequence = i < scheduler->running_count
                                                ? scheduler->running[i]
                                                : scheduler->waiting[i - scheduler->running_count];
        const uint64_t deadline = sequence_deadline(scheduler, sequence);
        if (deadline < earliest)
            earliest = deadline;
    }
    return earliest;
}

void engine_scheduler_rename_pages(engine_scheduler_t *scheduler)
{
    for (uint32_t i = 0; i < scheduler->running_count; i++) {
        engine_sequence_t *sequence = scheduler->running[i];
        for (uint32_t at = 0; at < sequence->page_count; at++)
            sequence->pages[at] = engine_pages_moved(scheduler->pages, sequence->pages[at]);
    }
}

void engine_scheduler_remove(engine_scheduler_t *scheduler, engine_sequence_t *sequence)
{
    if (sequence->state == ENGINE_SEQUENCE_WAITING)
        list_remove(scheduler->waiting, &scheduler->waiting_count, sequence);
    else if (sequence->state == ENGINE_SEQUENCE_RUNNING)
        list_remove(scheduler->running, &scheduler->running_count, sequence);
    sequence->stalled = false;
    pages_give_back(scheduler, sequence);
}
