/* SPDX-License-Identifier: MIT */
/*
 * From computed rows to events: sampling on the team, text, stop rules, the event ring. Engine
 * thread only (after it has ended: the consumer). The loop steps only while the ring has room for
 * everything a step can produce; what ends a request waits in `ending` until there is room, so
 * nothing is lost.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "engine/engine_private.h"

/* ---- ring ------------------------------------------------------------------------------------ */

uint32_t engine_event_room(engine_t *engine)
{
    pthread_mutex_lock(&engine->lock);
    uint32_t room = engine->event_capacity - engine->event_count;
    pthread_mutex_unlock(&engine->lock);
    return room;
}

/* The next free event, cleared. Lock held. */
static engine_event_t *event_begin(engine_t *engine, const engine_sequence_t *sequence)
{
    XP_ASSERT(engine->event_count < engine->event_capacity);
    uint32_t at = (engine->event_head + engine->event_count) % engine->event_capacity;
    engine_event_t *event = &engine->events[at];
    memset(event, 0, sizeof *event);
    event->request = sequence->request;
    event->token = event->stop_token = -1;
    event->logprob = (engine_logprob_t){.id = -1, .logprob = NAN};
    event->prompt_tokens = sequence->prompt_count;
    event->completion_tokens = sequence->count - sequence->prompt_count;
    event->cached_tokens = sequence->cached_tokens;
    return event;
}

static void event_commit(engine_t *engine)
{
    engine->event_count++;
    if (!engine->event_signalled) {
        uint64_t one = 1;
        engine->event_signalled = write(engine->event_fd, &one, sizeof one) == sizeof one;
    }
}

static void event_set_sample(engine_event_t *event, const engine_sample_t *sample)
{
    event->logprob = (engine_logprob_t){.id = sample->token, .logprob = sample->logprob};
    event->top_count = sample->top_count;
    memcpy(event->top, sample->top, sample->top_count * sizeof sample->top[0]);
}

/* ---- ends ------------------------------------------------------------------------------------ */

void engine_sequence_end(engine_t *engine, engine_sequence_t *sequence, engine_finish_t finish,
                         const char *error)
{
    engine_scheduler_remove(&engine->scheduler, sequence);
    /* A buffer at its limit only loses the replacement of a broken last character. */
    (void)engine_text_finish(&sequence->text, sequence->stop_string >= 0);
    sequence->state = ENGINE_SEQUENCE_ENDING;
    sequence->finish = finish;
    snprintf(sequence->error, sizeof sequence->error, "%.255s", error ? error : "");
    engine->ending[engine->ending_count++] = sequence;
    pthread_mutex_lock(&engine->lock);
    if (finish == ENGINE_FINISH_STOP || finish == ENGINE_FINISH_LENGTH)
        engine->stats.finished++;
    else if (finish == ENGINE_FINISH_ABORT)
        engine->stats.aborted++;
    else
        engine->stats.failed++;
    pthread_mutex_unlock(&engine->lock);
}

static void finish_event(engine_t *engine, engine_sequence_t *sequence, uint64_t now_ns)
{
    engine_event_t *event = event_begin(engine, sequence);
    event->type = ENGINE_EVENT_FINISH;
    event->finish = sequence->finish;
    event->text_length = engine_text_take(&sequence->text, event->text, sizeof event->text);
    event->stop_token = sequence->stop_token;
    if (sequence->stop_string >= 0)
        memcpy(event->stop_text, sequence->sampling.stops[sequence->stop_string],
               sizeof event->stop_text);
    event->queue_ns =
        (sequence->admitted_before ? sequence->admitted_ns : now_ns) - sequence->arrival_ns;
    event->first_token_ns =
        sequence->first_token_ns ? sequence->first_token_ns - sequence->arrival_ns : 0;
    event->total_ns = now_ns - sequence->arrival_ns;
    snprintf(event->error, sizeof event->error, "%s", sequence->error);
    event_commit(engine);
}

bool engine_flush_ending(engine_t *engine)
{
    const uint64_t now_ns = xp_clock_now_ns(&engine->config.clock);
    uint32_t done = 0;
    while (done < engine->ending_count && engine->event_count < engine->event_capacity) {
        engine_sequence_t *sequence = engine->ending[done];
        if (sequence->text.ready >= sizeof((engine_event_t *)0)->text) {
            /* More text than one event holds: it goes ahead in TOKEN events without a token. */
            engine_event_t *event = event_begin(engine, sequence);
            event->type = ENGINE_EVENT_TOKEN;
            event->text_length = engine_text_take(&sequence->text, event->text, sizeof event->text);
            event_commit(engine);
            continue;
        }
        finish_event(engine, sequence, now_ns);
        sequence->state = ENGINE_SEQUENCE_FREE;
        sequence->request = 0;
        sequence->cancel = false;
        engine->free_slots[engine->free_slot_count++] = (uint32_t)(sequence - engine->sequences);
        done++;
    }
    engine->ending_count -= done;
    memmove(engine->ending, engine->ending + done, engine->ending_count * sizeof *engine->ending);
    return done > 0;
}

/* ---- tokens ---------------------------------------------------------------------------------- */

static bool holds_id(const int32_t *ids, uint32_t count, int32_t id)
{
    for (uint32_t i = 0; i < count; i++)
        if (ids[i] == id)
            return true;
    return false;
}

static void send_token(engine_t *engine, engine_sequence_t *sequence, const engine_sample_t *sample,
                       uint64_t now_ns)
{
    pthread_mutex_lock(&engine->lock);
    engine_event_t *event = event_begin(engine, sequence);
    event->type = ENGINE_EVENT_TOKEN;
    event->token = sample->token;
    event_set_sample(event, sample);
    event->text_length = engine_text_take(&sequence->text, event->text, sizeof event->text);
    event_commit(engine);
    engine->stats.generated_tokens++;
    if (sequence->first_token_ns == 0)
        engine_latency_add(&engine->ttft, now_ns - sequence->arrival_ns);
    else
        engine_latency_add(&engine->tbt, now_ns - sequence->last_token_ns);
    pthread_mutex_unlock(&engine->lock);
    if (sequence->first_token_ns == 0)
        sequence->first_token_ns = now_ns;
    sequence->last_token_ns = now_ns;
}

/* Adds a sampled token to its sequence, sends it, and ends the sequence where a rule says so. */
static void apply_token(engine_t *engine, engine_sequence_t *sequence,
                        const engine_sample_t *sample, uint64_t now_ns)
{
    const engine_sampling_t *sampling = &sequence->sampling;
    const int32_t token = sample->token;
    sequence->tokens[sequence->count++] = token;
    const uint32_t generated = sequence->count - sequence->prompt_count;
    const bool ends = (!sampling->ignore_eos &&
                       holds_id(engine->spec.eos_tokens, engine->spec.eos_count, token)) ||
                      holds_id(sampling->stop_ids, sampling->stop_id_count, token);
    xp_status_t status = XP_OK;
    if (!ends || sampling->include_stop)
        status = engine_text_push(&sequence->text, token, sampling,
                                  generated >= sampling->min_new_tokens, &sequence->stop_string);
    send_token(engine, sequence, sample, now_ns);
    if (status != XP_OK) {
        engine_sequence_end(engine, sequence, ENGINE_FINISH_ERROR, xp_error_last()->text);
    } else if (ends) {
        sequence->stop_token = token;
        engine_sequence_end(engine, sequence, ENGINE_FINISH_STOP, NULL);
    } else if (sequence->stop_string >= 0) {
        engine_sequence_end(engine, sequence, ENGINE_FINISH_STOP, NULL);
    } else if ((sampling->max_new_tokens > 0 && generated >= sampling->max_new_tokens) ||
               sequence->count >= engine_elastic_context(engine)) {
        engine_sequence_end(engine, sequence, ENGINE_FINISH_LENGTH, NULL);
    }
}

static void send_prompt(engine_t *engine, engine_sequence_t *sequence, uint32_t position,
                        const engine_sample_t *sample)
{
    pthread_mutex_lock(&engine->lock);
    engine_event_t *event = event_begin(engine, sequence);
    event->type = ENGINE_EVENT_PROMPT;
    event->token = sequence->tokens[position];
    event->position = position;
    event->logprob = (engine_logprob_t){.id = event->token, .logprob = NAN};
    if (sample)
        event_set_sample(event, sample);
    event_commit(engine);
    pthread_mutex_unlock(&engine->lock);
    sequence->prompt_sent = position + 1;
}

/* ---- sampling -------------------------------------------------------------------------------- */

static void sample_region(void *context, uint32_t member, uint32_t members)
{
    engine_t *engine = context;
    const uint32_t vocab = engine->spec.vocab;
    void *space = (char *)engine->model.sampler + member * engine->model.sampler_bytes;
    (void)members;
    for (;;) {
        uint32_t at = atomic_fetch_add_explicit(&engine->next_sample, 1, memory_order_relaxed);
        if (at >= engine->sampling_count)
            return;
        struct engine_sampling_row *row = &engine->sampling_rows[at];
        const engine_sequence_t *sequence = row->sequence;
        float *logits = engine->sampling_logits + (size_t)at * vocab;
        if (row->prompt >= 0) {
            row->status =
                engine_sampler_logprobs(logits, vocab, sequence->tokens[row->prompt],
                                        sequence->sampling.top_logprobs, space, &row->sample);
        } else {
            engine_sample_input_t input = {.sampling = &sequence->sampling,
                                           .tokens = sequence->tokens,
                                           .prompt_count = sequence->prompt_count,
                                           .count = sequence->count,
                                           .seed = sequence->seed,
                                           .eos = engine->spec.eos_tokens,
                                           .eos_count = engine->spec.eos_count};
            row->status = engine_sampler_run(&input, vocab, logits, space, &row->sample);
        }
        if (row->status != XP_OK)
            snprintf(row->error, sizeof row->error, "%.127s", xp_error_last()->text);
    }
}

static void sample_rows(engine_t *engine)
{
    uint32_t rows[ENGINE_LOGIT_ROWS];
    if (engine->sampling_count == 0)
        return;
    for (uint32_t i = 0; i < engine->sampling_count; i++)
        rows[i] = engine->sampling_rows[i].row;
    engine->sampling_logits = engine_model_logits(&engine->model, rows, engine->sampling_count);
    atomic_store_explicit(&engine->next_sample, 0, memory_order_relaxed);
    if (engine->sampling_count == 1)
        sample_region(engine, 0, 1);
    else
        xp_pool_run(engine->pool, sample_region, engine);

    const uint64_t now_ns = xp_clock_now_ns(&engine->config.clock);
    for (uint32_t i = 0; i < engine->sampling_count; i++) {
        struct engine_sampling_row *row = &engine->sampling_rows[i];
        if (row->sequence->state != ENGINE_SEQUENCE_RUNNING)
            continue; /* an earlier row ended it */
        if (row->status != XP_OK)
            engine_sequence_end(engine, row->sequence, ENGINE_FINISH_ERROR, row->error);
        else if (row->prompt >= 0)
            send_prompt(engine, row->sequence, (uint32_t)row->prompt, &row->sample);
        else
            apply_token(engine, row->sequence, &row->sample, now_ns);
    }
    engine->sampling_count = 0;
}

static void add_row(engine_t *engine, engine_sequence_t *sequence, uint32_t row, int32_t prompt)
{
    engine->sampling_rows[engine->sampling_count++] =
        (struct engine_sampling_row){.sequence = sequence, .row = row, .prompt = prompt};
    if (engine->sampling_count == ENGINE_LOGIT_ROWS)
        sample_rows(engine);
}

void engine_output_batch(engine_t *engine)
{
    const engine_batch_t *batch = &engine->batch;
    uint32_t first = 0;
    for (uint32_t i = 0; i < batch->count; i++) {
        engine_sequence_t *sequence = batch->sequences[i];
        const engine_span_t *span = &batch->spans[i];
        const uint32_t known = sequence->count, end = span->position + span->rows;
        if (sequence->sampling.prompt_logprobs && sequence->prompt_sent == 0)
            send_prompt(engine, sequence, 0, NULL);
        if (sequence->sampling.prompt_logprobs)
            for (uint32_t r = 0; r < span->rows; r++) {
                uint32_t predicted = span->position + r + 1;
                if (predicted < sequence->prompt_count && predicted >= sequence->prompt_sent &&
                    sequence->state == ENGINE_SEQUENCE_RUNNING)
                    add_row(engine, sequence, first + r, (int32_t)predicted);
            }
        if (end == known && sequence->state == ENGINE_SEQUENCE_RUNNING)
            add_row(engine, sequence, first + span->rows - 1, -1);
        first += span->rows;
    }
    sample_rows(engine);
}
