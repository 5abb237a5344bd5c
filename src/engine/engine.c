/* SPDX-License-Identifier: MIT */
/*
 * Creating, starting and stopping an engine, and the calls other threads make. Everything another
 * thread leaves goes through fields under the engine's lock; the engine thread is in loop.c.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include "engine/engine_private.h"
#include "engine/rope.h"

#define DEFAULT_PAGE_TOKENS 16u
#define MAX_PAGE_TOKENS     4096u

/* ---- creation -------------------------------------------------------------------------------- */

static xp_status_t config_check(const engine_config_t *config)
{
    if (!config->path || !config->model_id)
        return xp_fail(XP_INVALID, "an engine needs a model id and a checkpoint path");
    if (config->decode_rows == 0 || config->prefill_rows == 0)
        return xp_fail(XP_INVALID, "%s: decode_rows %u and prefill_rows %u have to be at least 1",
                       config->model_id, config->decode_rows, config->prefill_rows);
    if ((uint64_t)config->decode_rows + config->queue_limit > ENGINE_MAX_SEQUENCES)
        return xp_fail(XP_INVALID, "%s: decode_rows %u plus queue limit %u is more than %u",
                       config->model_id, config->decode_rows, config->queue_limit,
                       ENGINE_MAX_SEQUENCES);
    if (config->max_rows && config->max_rows < config->decode_rows)
        return xp_fail(XP_INVALID, "%s: %u rows of one FFN call are less than decode_rows %u",
                       config->model_id, config->max_rows, config->decode_rows);
    if (config->page_tokens > MAX_PAGE_TOKENS)
        return xp_fail(XP_INVALID, "%s: %u tokens a KV page, at most %u", config->model_id,
                       config->page_tokens, MAX_PAGE_TOKENS);
    if (!config->ffn.call || !config->clock.now_ns)
        return xp_fail(XP_INVALID, "%s: an engine needs an FFN and a clock", config->model_id);
    if (config->dtype >= XP_DTYPE_COUNT || xp_dtype_is_quantized(config->dtype))
        return xp_fail(XP_INVALID, "%s: dtype has to be auto, float32, bfloat16 or float16",
                       config->model_id);
    return XP_OK;
}

static xp_status_t spec_check(const model_spec_t *spec)
{
    if (!model_architecture_has_native_engine(spec->architecture))
        return xp_fail(XP_UNSUPPORTED,
                       "%s: the native engine does not do this architecture's attention yet",
                       spec->architecture_name);
    if (spec->heads == 0 || spec->kv_heads == 0 || spec->heads % spec->kv_heads)
        return xp_fail(XP_INVALID, "%s: %u attention heads do not divide into %u key/value heads",
                       spec->architecture_name, spec->heads, spec->kv_heads);
    float inverse[512], scale;
    return engine_rope_frequencies(&spec->rope, spec->head_dim, inverse, &scale);
}

/* KV Cache size and the context that fits in it. */
static xp_status_t kv_plan(const engine_config_t *config, const model_spec_t *spec,
                           uint32_t *page_tokens_out, uint32_t *pages_out, uint32_t *context_out,
                           bool *kv_limited_out)
{
    uint32_t context = spec->max_positions;
    if (config->max_context) {
        if (spec->max_positions && config->max_context > spec->max_positions)
            return xp_fail(XP_INVALID, "%s: max_context %u is more than the checkpoint's %u",
                           config->model_id, config->max_context, spec->max_positions);
        context = config->max_context;
    }
    if (context < 2)
        return xp_fail(XP_INVALID, "%s: a context of %u tokens", config->model_id, context);
    const uint32_t page_tokens = config->page_tokens ? config->page_tokens : DEFAULT_PAGE_TOKENS;
    const uint64_t token_bytes = model_kv_bytes_per_token(spec, XP_DTYPE_F32);
    uint64_t tokens = config->kv_bytes    ? config->kv_bytes / token_bytes
                      : config->kv_tokens ? config->kv_tokens
                                          : (uint64_t)context + page_tokens - 1;
    uint64_t pages = tokens / page_tokens;
    if (pages == 0)
        return xp_fail(XP_INVALID,
                       "%s: a KV Cache of %llu tokens holds no page of %u tokens (%llu bytes each)",
                       config->model_id, (unsigned long long)tokens, page_tokens,
                       (unsigned long long)(token_bytes * page_tokens));
    if (pages >= ENGINE_PAGE_NONE)
        pages = ENGINE_PAGE_NONE - 1;
    const bool kv_limited = pages * page_tokens < context;
    if (kv_limited)
        context = (uint32_t)(pages * page_tokens);
    /* Attention over everything equals a window that nothing ever leaves. */
    if (spec->sliding_window && spec->sliding_window < context)
        return xp_fail(XP_UNSUPPORTED,
                       "%s: sliding-window attention (%u tokens) with a context of %u; set "
                       "max_context to at most %u",
                       config->model_id, spec->sliding_window, context, spec->sliding_window);
    *page_tokens_out = page_tokens;
    *pages_out = (uint32_t)pages;
    *context_out = context;
    *kv_limited_out = kv_limited;
    return XP_OK;
}

static xp_status_t weights_open(engine_t *engine)
{
    const engine_config_t *config = &engine->config;
    checkpoint_t *checkpoint = NULL;
    if (!config->dummy)
        XP_TRY(checkpoint_open(config->path, &engine->spec, &checkpoint));
    xp_status_t status =
        engine_weights_load(&engine->spec, checkpoint, config->dtype, config->progress,
                            config->progress_context, &engine->weights);
    checkpoint_close(checkpoint);
    return status;
}

static xp_status_t region_map(size_t bytes, void **region_out)
{
    void *region = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (region == MAP_FAILED)
        return xp_fail_errno(XP_NO_MEMORY, "%zu bytes of request tables", bytes);
    *region_out = region;
    return XP_OK;
}

static xp_status_t sequences_create(engine_t *engine)
{
    const uint32_t count = engine->sequence_count;
    const size_t tokens = (size_t)engine->max_context + 1;
    const size_t pages =
        (engine->max_context + engine->pages.page_tokens - 1) / engine->pages.page_tokens;
    engine->sequences = calloc(count, sizeof *engine->sequences);
    engine->ending = calloc(count, sizeof *engine->ending);
    engine->free_slots = calloc(count, sizeof *engine->free_slots);
    engine->inbox = calloc(count, sizeof *engine->inbox);
    engine->sampling_rows = calloc(ENGINE_LOGIT_ROWS, sizeof *engine->sampling_rows);
    engine->event_capacity = 4 * engine->config.decode_rows + 2 * ENGINE_PROMPT_ROWS;
    if (engine->event_capacity < ENGINE_MIN_EVENTS)
        engine->event_capacity = ENGINE_MIN_EVENTS;
    engine->events = calloc(engine->event_capacity, sizeof *engine->events);
    if (!engine->sequences || !engine->ending || !engine->free_slots || !engine->inbox ||
        !engine->sampling_rows || !engine->events)
        return xp_fail(XP_NO_MEMORY, "tables of %u requests", count);
    void *region = NULL;
    engine->token_region_bytes = count * tokens * sizeof(int32_t);
    XP_TRY(region_map(engine->token_region_bytes, &region));
    engine->token_region = region;
    engine->page_region_bytes = count * pages * sizeof(uint32_t);
    XP_TRY(region_map(engine->page_region_bytes, &region));
    engine->page_region = region;
    for (uint32_t i = 0; i < count; i++) {
        engine->sequences[i].tokens = engine->token_region + i * tokens;
        engine->sequences[i].pages = engine->page_region + i * pages;
        XP_TRY(engine_text_init(&engine->sequences[i].text));
        engine->free_slots[i] = count - 1 - i;
    }
    engine->free_slot_count = count;
    return XP_OK;
}

static xp_status_t sync_create(engine_t *engine)
{
    pthread_condattr_t attributes;
    if (pthread_mutex_init(&engine->lock, NULL) != 0)
        return xp_fail(XP_NO_MEMORY, "engine lock");
    engine->created_lock = true;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    int error = pthread_cond_init(&engine->wake, &attributes);
    pthread_condattr_destroy(&attributes);
    if (error)
        return xp_fail(XP_NO_MEMORY, "engine condition");
    engine->created_wake = true;
    engine->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (engine->event_fd < 0)
        return xp_fail_errno(XP_IO, "eventfd of the engine");
    return XP_OK;
}

static xp_status_t kv_create(engine_t *engine, uint32_t pages, uint32_t page_tokens)
{
    const engine_config_t *config = &engine->config;
    const model_spec_t *spec = &engine->spec;
    if (config->kv_rank) {
        const kv_group_entry_t *group = config->kv_rank->group;
        XP_TRY(engine_kv_create_elastic(
            engine->model_id, group->reserved_bundles, group->bundle_tokens / page_tokens,
            page_tokens, spec->layers, spec->kv_heads, spec->head_dim, config->kv_room_bytes,
            config->kv_room_context, &engine->kv));
    } else {
        XP_TRY(engine_kv_create(engine->model_id, pages, page_tokens, spec->layers, spec->kv_heads,
                                spec->head_dim, &engine->kv));
    }
    XP_TRY(engine_pages_init(pages, page_tokens, &engine->pages));
    return engine_elastic_open(engine);
}

static xp_status_t engine_build(engine_t *engine)
{
    const engine_config_t *config = &engine->config;
    uint32_t page_tokens = 0, pages = 0;
    XP_TRY(sync_create(engine));
    XP_TRY(model_spec_load(config->path, &engine->spec));
    XP_TRY(spec_check(&engine->spec));
    XP_TRY(engine_elastic_prepare(engine));
    XP_TRY(kv_plan(config, &engine->spec, &page_tokens, &pages, &engine->max_context,
                   &engine->kv_limited));
    xp_status_t status = tokenizer_load(config->path, &engine->tokenizer);
    if (status != XP_OK && status != XP_NOT_FOUND)
        return status;
    XP_TRY(weights_open(engine));
    XP_TRY(kv_create(engine, pages, page_tokens));
    XP_TRY(xp_pool_create(config->threads ? config->threads : 1, config->cpus, config->cpu_count,
                          &engine->pool));
    engine->max_rows =
        config->max_rows ? config->max_rows : config->decode_rows + config->prefill_rows;
    XP_TRY(engine_model_init(&engine->spec, &engine->weights, &engine->kv, engine->pool,
                             &config->ffn, engine->max_rows, engine->max_context, &engine->model));
    engine->sequence_count = config->decode_rows + config->queue_limit;
    XP_TRY(sequences_create(engine));
    XP_TRY(engine_scheduler_init(&engine->pages, config->prefix_cache, engine->sequence_count,
                                 config->decode_rows, config->prefill_rows, engine->max_rows,
                                 ENGINE_PROMPT_ROWS, config->ttft_ns, config->tbt_ns,
                                 &engine->scheduler));
    XP_TRY(engine_batch_init(config->decode_rows, &engine->batch));
    if (getrandom(&engine->entropy, sizeof engine->entropy, 0) != sizeof engine->entropy)
        return xp_fail_errno(XP_IO, "getrandom");
    engine_stats_publish(engine);
    return XP_OK;
}

xp_status_t engine_create(const engine_config_t *config, engine_t **engine_out)
{
    XP_TRY(config_check(config));
    engine_t *engine = calloc(1, sizeof *engine);
    if (!engine)
        return xp_fail(XP_NO_MEMORY, "engine of %s", config->model_id);
    engine->config = *config;
    engine->event_fd = -1;
    engine->home_cpu = config->cpus && config->cpu_count > 0 ? (int32_t)config->cpus[0] : -1;
    snprintf(engine->model_id, sizeof engine->model_id, "%s", config->model_id);
    xp_status_t status = engine_build(engine);
    if (status != XP_OK) {
        engine_destroy(engine);
        return status;
    }
    /* The caller's strings and lists need not outlive the call. */
    engine->config.model_id = engine->model_id;
    engine->config.path = NULL;
    engine->config.cpus = NULL;
    *engine_out = engine;
    return XP_OK;
}

void engine_destroy(engine_t *engine)
{
    if (!engine)
        return;
    if (engine->started)
        engine_stop(engine, 0);
    engine_batch_fini(&engine->batch);
    engine_scheduler_fini(&engine->scheduler);
    for (uint32_t i = 0; engine->sequences && i < engine->sequence_count; i++)
        engine_text_fini(&engine->sequences[i].text);
    free(engine->sequences);
    free(engine->ending);
    free(engine->free_slots);
    free(engine->inbox);
    free(engine->sampling_rows);
    free(engine->events);
    if (engine->token_region)
        munmap(engine->token_region, engine->token_region_bytes);
    if (engine->page_region)
        munmap(engine->page_region, engine->page_region_bytes);
    engine_model_fini(&engine->model);
    xp_pool_destroy(engine->pool);
    engine_pages_fini(&engine->pages);
    engine_kv_fini(&engine->kv);
    engine_weights_fini(&engine->weights);
    tokenizer_destroy(engine->tokenizer);
    if (engine->event_fd >= 0)
        close(engine->event_fd);
    if (engine->created_wake)
        pthread_cond_destroy(&engine->wake);
    if (engine->created_lock)
        pthread_mutex_destroy(&engine->lock);
    free(engine);
}

/* ---- life ------------------------------------------------------------------------------------ */

xp_status_t engine_start(engine_t *engine)
{
    XP_ASSERT(!engine->started);
    XP_TRY(engine_elastic_start(engine));
    engine->started = true;
    int error = pthread_create(&engine->thread, NULL, engine_thread_main, engine);
    if (error) {
        engine->started = false;
        errno = error;
        return xp_fail_errno(XP_NO_MEMORY, "%s: the engine's thread", engine->model_id);
    }
    return XP_OK;
}

static void wake(engine_t *engine)
{
    engine->attention = true;
    pthread_cond_signal(&engine->wake);
}

void engine_stop(engine_t *engine, uint64_t deadline_ns)
{
    pthread_mutex_lock(&engine->lock);
    const bool join = engine->started && !engine->stopping;
    engine->stopping = true;
    engine->stop_deadline_ns = deadline_ns;
    wake(engine);
    pthread_mutex_unlock(&engine->lock);
    if (join)
        pthread_join(engine->thread, NULL);
}

const model_spec_t *engine_spec(const engine_t *engine)
{
    return &engine->spec;
}

const tokenizer_t *engine_tokenizer(const engine_t *engine)
{
    return engine->tokenizer;
}

uint32_t engine_max_context(const engine_t *engine)
{
    return engine_elastic_context(engine);
}

/* ---- requests -------------------------------------------------------------------------------- */

static xp_status_t prompt_check(const engine_t *engine, const int32_t *ids, uint32_t count)
{
    const uint32_t context = engine_elastic_context(engine);
    if (count == 0)
        return xp_fail(XP_INVALID, "the prompt is empty");
    if (count >= context) {
        if (engine->kv_limited || context < engine->max_context)
            return xp_fail(XP_INVALID,
                           "the prompt of %u tokens leaves no room for an answer: the KV Cache "
                           "holds %u tokens",
                           count, context);
        return xp_fail(XP_INVALID,
                       "the prompt of %u tokens leaves no room for an answer in the context of %u "
                       "tokens",
                       count, context);
    }
    for (uint32_t i = 0; i < count; i++)
        if (ids[i] < 0 || (uint32_t)ids[i] >= engine->spec.vocab)
            return xp_fail(XP_INVALID, "prompt token %u is %d; the vocabulary is 0 to %u", i,
                           ids[i], engine->spec.vocab - 1);
    return XP_OK;
}

/* Lock held. */
static xp_status_t open_check(const engine_t *engine)
{
    if (engine->failed)
        return xp_fail(XP_CLOSED, "%s: %s", engine->model_id, engine->failure);
    if (engine->stopping)
        return xp_fail(XP_CLOSED, "%s is stopping", engine->model_id);
    return XP_OK;
}

static void sequence_begin(engine_t *engine, engine_sequence_t *sequence, const int32_t *ids,
                           uint32_t count, const engine_sampling_t *sampling)
{
    sequence->sampling = *sampling;
    memcpy(sequence->tokens, ids, count * sizeof *ids);
    sequence->prompt_count = sequence->count = count;
    sequence->cancel = sequence->admitted_before = sequence->counted = false;
    sequence->state = ENGINE_SEQUENCE_SUBMITTED;
    sequence->computed = sequence->page_count = sequence->tree_pages = 0;
    sequence->cached_tokens = sequence->prompt_sent = sequence->preemptions = 0;
    sequence->asked_ns = 0;
    sequence->admitted_ns = sequence->first_token_ns = sequence->last_token_ns = 0;
    sequence->finish = ENGINE_FINISH_NONE;
    sequence->stop_token = sequence->stop_string = -1;
    sequence->error[0] = '\0';
    engine_text_begin(&sequence->text, engine->tokenizer, &sequence->sampling);
}

xp_status_t engine_submit(engine_t *engine, const int32_t *ids, uint32_t count,
                          const engine_sampling_t *sampling, uint64_t *request_out)
{
    XP_TRY(prompt_check(engine, ids, count));
    XP_TRY(engine_sampling_check(sampling, engine->spec.vocab));
    if (sampling->stop_count > 0 && !engine->tokenizer)
        return xp_fail(XP_INVALID, "stop strings need a tokenizer, and the checkpoint has none");

    pthread_mutex_lock(&engine->lock);
    xp_status_t status = open_check(engine);
    if (status == XP_OK && engine->free_slot_count == 0) {
        engine->stats.rejected++;
        status = xp_fail(XP_RETRY, "%s: %u requests are open already", engine->model_id,
                         engine->sequence_count);
    }
    if (status != XP_OK) {
        pthread_mutex_unlock(&engine->lock);
        return status;
    }
    const uint32_t slot = engine->free_slots[--engine->free_slot_count];
    pthread_mutex_unlock(&engine->lock);

    /* The slot is ours alone until it is in the inbox. */
    engine_sequence_t *sequence = &engine->sequences[slot];
    sequence_begin(engine, sequence, ids, count, sampling);

    pthread_mutex_lock(&engine->lock);
    status = open_check(engine);
    if (status != XP_OK) {
        engine->free_slots[engine->free_slot_count++] = slot;
        pthread_mutex_unlock(&engine->lock);
        return status;
    }
    const uint64_t serial = ++engine->next_serial;
    sequence->request = serial << ENGINE_SLOT_BITS | slot;
    sequence->seed = sampling->has_seed ? sampling->seed : engine->entropy + serial;
    sequence->arrival_ns = xp_clock_now_ns(&engine->config.clock);
    engine->inbox[engine->inbox_count++] = slot;
    engine->stats.requests++;
    *request_out = sequence->request;
    wake(engine);
    pthread_mutex_unlock(&engine->lock);
    return XP_OK;
}

void engine_cancel(engine_t *engine, uint64_t request)
{
    const uint64_t slot = request & ((1u << ENGINE_SLOT_BITS) - 1);
    if (slot >= engine->sequence_count)
        return;
    pthread_mutex_lock(&engine->lock);
    if (request != 0 && engine->sequences[slot].request == request) {
        engine->sequences[slot].cancel = true;
        engine->cancel_wanted = true;
        wake(engine);
    }
    pthread_mutex_unlock(&engine->lock);
}

void engine_kv_look(engine_t *engine)
{
    pthread_mutex_lock(&engine->lock);
    wake(engine);
    pthread_mutex_unlock(&engine->lock);
}

int engine_event_fd(const engine_t *engine)
{
    return engine->event_fd;
}

static uint32_t ring_take(engine_t *engine, engine_event_t *events_out, uint32_t maximum)
{
    uint32_t taken = 0;
    while (taken < maximum && engine->event_count > 0) {
        events_out[taken++] = engine->events[engine->event_head];
        engine->event_head = (engine->event_head + 1) % engine->event_capacity;
        engine->event_count--;
    }
    return taken;
}

uint32_t engine_drain(engine_t *engine, engine_event_t *events_out, uint32_t maximum)
{
    pthread_mutex_lock(&engine->lock);
    uint32_t taken = ring_take(engine, events_out, maximum);
    if (engine->thread_ended && engine->ending_count > 0) {
        /* The thread left these behind for want of room; it can no longer send them. */
        engine_flush_ending(engine);
        taken += ring_take(engine, events_out + taken, maximum - taken);
    }
    if (engine->event_count == 0 && engine->event_signalled) {
        uint64_t count;
        engine->event_signalled = read(engine->event_fd, &count, sizeof count) != sizeof count;
    }
    if (engine->paused && taken > 0)
        wake(engine);
    pthread_mutex_unlock(&engine->lock);
    return taken;
}

void engine_flush_cache(engine_t *engine)
{
    pthread_mutex_lock(&engine->lock);
    if (engine->started && !engine->thread_ended) {
        engine->flush_wanted = true;
        wake(engine);
    } else {
        engine_pages_flush(&engine->pages);
        engine_stats_publish(engine);
    }
    pthread_mutex_unlock(&engine->lock);
}

/* ---- forward and ledger ---------------------------------------------------------------------- */

static xp_status_t forward_chunks(engine_t *engine, const int32_t *ids, uint32_t count,
                                  const uint32_t *pages, float *logits_out)
{
    engine_model_t *model = &engine->model;
    const uint32_t vocab = engine->spec.vocab;
    for (uint32_t position = 0; position < count;) {
        uint32_t rows = count - position;
        if (rows > engine->max_rows)
            rows = engine->max_rows;
        engine_span_t span = {
            .tokens = ids + position, .pages = pages, .position = position, .rows = rows};
        XP_TRY(engine_model_step(model, &span, 1, 1, 0));
        for (uint32_t first = 0; first < rows; first += ENGINE_LOGIT_ROWS) {
            uint32_t index[ENGINE_LOGIT_ROWS], part = 0;
            while (part < ENGINE_LOGIT_ROWS && first + part < rows) {
                index[part] = first + part;
                part++;
            }
            memcpy(logits_out + (size_t)(position + first) * vocab,
                   engine_model_logits(model, index, part), (size_t)part * vocab * sizeof(float));
        }
        position += rows;
    }
    return XP_OK;
}

xp_status_t engine_forward(engine_t *engine, const int32_t *ids, uint32_t count, float *logits_out)
{
    if (engine->started)
        return xp_fail(XP_INVALID, "engine_forward() works only before engine_start()");
    if (count > engine->max_context)
        return xp_fail(XP_INVALID, "%u tokens in a context of %u", count, engine->max_context);
    if (count == 0)
        return XP_OK;
    for (uint32_t i = 0; i < count; i++)
        if (ids[i] < 0 || (uint32_t)ids[i] >= engine->spec.vocab)
            return xp_fail(XP_INVALID, "token %u is %d; the vocabulary is 0 to %u", i, ids[i],
                           engine->spec.vocab - 1);
    const uint32_t page_tokens = engine->pages.page_tokens;
    const uint32_t needed = (count + page_tokens - 1) / page_tokens;
    uint32_t *pages = engine->sequences[0].pages, taken = 0;
    xp_status_t status = XP_OK;
    for (; taken < needed; taken++)
        XP_TRY_GOTO(status, release, engine_pages_take(&engine->pages, &pages[taken]));
    status = forward_chunks(engine, ids, count, pages, logits_out);
release:
    while (taken > 0)
        engine_pages_release(&engine->pages, pages[--taken]);
    return status;
}

uint64_t engine_weight_bytes(const model_spec_t *spec, const checkpoint_t *checkpoint,
                             xp_dtype_t dtype)
{
    uint64_t bytes;
    return engine_weights_measure(spec, checkpoint, dtype, &bytes) == XP_OK ? bytes : 0;
}
