/* SPDX-License-Identifier: MIT */
/*
 * The engine thread: takes submissions and cancellations, watches time limits, steps, and sends the
 * results. It sleeps when there is nothing to do and pauses while the event ring lacks room; pauses
 * still see cancellations and stop.
 */
#include <sched.h>
#include <stdio.h>
#include <string.h>

#include "engine/engine_private.h"

static bool is_live(const engine_t *engine)
{
    return engine->scheduler.waiting_count + engine->scheduler.running_count > 0;
}

static void end_all(engine_t *engine, engine_finish_t finish, const char *error)
{
    engine_scheduler_t *scheduler = &engine->scheduler;
    while (scheduler->running_count > 0)
        engine_sequence_end(engine, scheduler->running[0], finish, error);
    while (scheduler->waiting_count > 0)
        engine_sequence_end(engine, scheduler->waiting[0], finish, error);
}

/* Takes over what others left under the lock. */
static void take_requests(engine_t *engine, bool *cancel_out, bool *stop_out)
{
    pthread_mutex_lock(&engine->lock);
    engine->attention = false;
    for (uint32_t i = 0; i < engine->inbox_count; i++)
        engine_scheduler_add(&engine->scheduler, &engine->sequences[engine->inbox[i]]);
    engine->inbox_count = 0;
    *cancel_out = engine->cancel_wanted;
    engine->cancel_wanted = false;
    if (engine->flush_wanted)
        engine_pages_flush(&engine->pages);
    engine->flush_wanted = false;
    *stop_out = engine->stopping;
    pthread_mutex_unlock(&engine->lock);
}

static engine_sequence_t *find_cancelled(engine_sequence_t *const *list, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        if (list[i]->cancel)
            return list[i];
    return NULL;
}

/* A sequence somebody cancelled, or NULL. Looks only at those the scheduler has: other slots may be
 * in the hands of a submitter. */
static engine_sequence_t *next_cancelled(engine_t *engine)
{
    const engine_scheduler_t *scheduler = &engine->scheduler;
    pthread_mutex_lock(&engine->lock);
    engine_sequence_t *found = find_cancelled(scheduler->running, scheduler->running_count);
    if (!found)
        found = find_cancelled(scheduler->waiting, scheduler->waiting_count);
    pthread_mutex_unlock(&engine->lock);
    return found;
}

static void end_overdue(engine_t *engine, uint64_t now_ns)
{
    engine_scheduler_t *scheduler = &engine->scheduler;
    const uint64_t queue = engine->config.queue_timeout_ns;
    const uint64_t total = engine->config.request_timeout_ns;
    for (uint32_t i = scheduler->waiting_count; i-- > 0;) {
        engine_sequence_t *sequence = scheduler->waiting[i];
        uint64_t age = now_ns - sequence->arrival_ns;
        if (queue && !sequence->admitted_before && age > queue)
            engine_sequence_end(engine, sequence, ENGINE_FINISH_TIMEOUT,
                                "the request waited longer than the queue time limit");
        else if (total && age > total)
            engine_sequence_end(engine, sequence, ENGINE_FINISH_TIMEOUT,
                                "the request took longer than its time limit");
    }
    for (uint32_t i = scheduler->running_count; total && i-- > 0;) {
        engine_sequence_t *sequence = scheduler->running[i];
        if (now_ns - sequence->arrival_ns > total)
            engine_sequence_end(engine, sequence, ENGINE_FINISH_TIMEOUT,
                                "the request took longer than its time limit");
    }
}

/* The ceiling was lowered below what these need: no grant will ever let them in. */
static void end_impossible(engine_t *engine)
{
    engine_scheduler_t *scheduler = &engine->scheduler;
    const uint32_t context = engine_elastic_context(engine);
    for (uint32_t i = scheduler->waiting_count; engine->elastic.rank && i-- > 0;) {
        engine_sequence_t *sequence = scheduler->waiting[i];
        if (sequence->count <= context)
            continue;
        if (sequence->count > sequence->prompt_count)
            engine_sequence_end(engine, sequence, ENGINE_FINISH_LENGTH, NULL);
        else {
            char text[sizeof((engine_event_t){0}.error)];
            snprintf(text, sizeof text,
                     "the prompt of %u tokens does not fit any more: the KV Cache's ceiling is now "
                     "%u tokens; raise it (`xpool kv set MODEL --ceiling=TOKENS`, or lower the "
                     "floors of the other models), or send a shorter prompt",
                     sequence->prompt_count, context);
            engine_sequence_end(engine, sequence, ENGINE_FINISH_TOO_LONG, text);
        }
    }
}

/* The FFN side is lost: nothing half-computed may reach a client. */
static void engine_fail(engine_t *engine, xp_status_t status)
{
    char text[sizeof engine->failure];
    snprintf(text, sizeof text, "the FFN call failed (%s): %.200s", xp_status_name(status),
             xp_error_last()->text);
    pthread_mutex_lock(&engine->lock);
    engine->failed = true;
    memcpy(engine->failure, text, sizeof text);
    pthread_mutex_unlock(&engine->lock);
    end_all(engine, ENGINE_FINISH_ERROR, text);
    engine_pages_flush(&engine->pages);
}

/* A prompt counts once, when its first rows were computed. */
static void count_admitted(engine_t *engine)
{
    pthread_mutex_lock(&engine->lock);
    for (uint32_t i = 0; i < engine->batch.count; i++) {
        engine_sequence_t *sequence = engine->batch.sequences[i];
        if (sequence->counted)
            continue;
        sequence->counted = true;
        engine->stats.prompt_tokens += sequence->prompt_count;
        engine->stats.cached_tokens += sequence->cached_tokens;
    }
    pthread_mutex_unlock(&engine->lock);
}

static bool step(engine_t *engine, uint64_t now_ns)
{
    engine_scheduler_t *scheduler = &engine->scheduler;
    /* Everything the step may send has to fit: a token and the first PROMPT event of each running
     * sequence, and the PROMPT events of one chunk. */
    if (engine_event_room(engine) < 2 * scheduler->max_running + ENGINE_PROMPT_ROWS)
        return false;
    uint32_t before = scheduler->waiting_count;
    engine_scheduler_admit(scheduler, now_ns);
    engine_scheduler_pick(scheduler, &engine->batch);
    if (engine->batch.rows == 0)
        return scheduler->waiting_count != before;
    xp_error_clear();
    const uint64_t begin_ns = xp_clock_now_ns(&engine->config.clock);
    xp_status_t status = engine_model_step(&engine->model, engine->batch.spans, engine->batch.count,
                                           engine->batch.kind, engine->batch.slo_deadline_ns);
    if (status != XP_OK) {
        engine_fail(engine, status);
        return true;
    }
    engine_scheduler_took(scheduler, &engine->batch,
                          xp_clock_now_ns(&engine->config.clock) - begin_ns);
    count_admitted(engine);
    engine_scheduler_computed(scheduler, &engine->batch);
    engine_output_batch(engine);
    engine->steps++;
    return true;
}

bool engine_iterate(engine_t *engine)
{
    bool cancel, stop, done = false;
    take_requests(engine, &cancel, &stop);
    engine_sequence_t *sequence;
    while (cancel && (sequence = next_cancelled(engine)) != NULL)
        engine_sequence_end(engine, sequence, ENGINE_FINISH_ABORT, NULL);

    const uint64_t now_ns = xp_clock_now_ns(&engine->config.clock);
    end_overdue(engine, now_ns);
    end_impossible(engine);
    if (engine->failed)
        end_all(engine, ENGINE_FINISH_ERROR, engine->failure);
    if (stop && now_ns >= engine->stop_deadline_ns)
        end_all(engine, ENGINE_FINISH_ABORT, NULL);
    engine->batch.rows = 0;
    done = engine_elastic_apply(engine);
    if (is_live(engine))
        done |= step(engine, now_ns);
    engine_elastic_end_stuck(engine);
    engine_elastic_report(engine, now_ns);

    pthread_mutex_lock(&engine->lock);
    done |= engine_flush_ending(engine);
    engine_stats_publish(engine);
    pthread_mutex_unlock(&engine->lock);
    return done;
}

static void wait_a_moment(engine_t *engine)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    uint64_t ns = (uint64_t)until.tv_nsec + ENGINE_PAUSE_NS;
    until.tv_sec += (time_t)(ns / XP_NS_PER_S);
    until.tv_nsec = (long)(ns % XP_NS_PER_S);
    pthread_cond_timedwait(&engine->wake, &engine->lock, &until);
}

void *engine_thread_main(void *context)
{
    engine_t *engine = context;
    pthread_setname_np(pthread_self(), "xpool-engine");
    if (engine->home_cpu >= 0 && engine->home_cpu < CPU_SETSIZE) {
        /* Best effort, like the other members' pinning: a missing core only costs speed. */
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET((unsigned)engine->home_cpu, &set);
        pthread_setaffinity_np(pthread_self(), sizeof set, &set);
    }
    for (bool ended = false; !ended;) {
        bool done = engine_iterate(engine);
        pthread_mutex_lock(&engine->lock);
        ended = engine->stopping && !is_live(engine) && engine->inbox_count == 0;
        if (!done && !ended && !engine->attention) {
            /* With work at hand but no room, or a time limit to watch, look again soon. */
            engine->paused = is_live(engine) || engine->ending_count > 0;
            if (engine->paused)
                wait_a_moment(engine);
            while (!engine->paused && !engine->attention)
                pthread_cond_wait(&engine->wake, &engine->lock);
            engine->paused = false;
        }
        if (ended)
            engine->thread_ended = true;
        pthread_mutex_unlock(&engine->lock);
    }
    return NULL;
}
