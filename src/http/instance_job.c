/* SPDX-License-Identifier: MIT */
/*
 * Jobs: from a parsed body to submissions, and from the engine's events to the client.
 *
 * Owns every job and the table from engine ids to sequences. Runs on the HTTP thread. It never
 * writes a body's format itself (instance_openai.c, instance_sglang.c do) and never waits: the
 * first sequence of a job is refused with 429 when the engine's queue is full, further ones of the
 * same job wait here until another ends.
 */
#include "http/instance_private.h"

#include <event2/util.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/log.h"

/* How the engine's text begins when its FFN side is lost and it takes no more requests; and what
 * the text of a request says that ended in the queue. The events carry no other sign. */
#define FFN_LOST_TEXT     "the FFN call failed"
#define QUEUE_LIMIT_TEXT  "queue time limit"
#define CONTEXT_CODE      "context_length_exceeded"
#define NORMALIZER_SHRINK 4u /* bytes of text for each byte left, at most */

static instance_sequence_t **bucket_of(http_instance_t *instance, uint64_t request)
{
    return &instance->buckets[(request * 0x9e3779b97f4a7c15ull) >> 54];
}

static instance_sequence_t *sequence_find(http_instance_t *instance, uint64_t request)
{
    instance_sequence_t *sequence = *bucket_of(instance, request);
    while (sequence && sequence->request != request)
        sequence = sequence->hash_next;
    return sequence;
}

static void sequence_unlink(http_instance_t *instance, instance_sequence_t *sequence)
{
    instance_sequence_t **link = bucket_of(instance, sequence->request);
    while (*link != sequence)
        link = &(*link)->hash_next;
    *link = sequence->hash_next;
}

static void sequence_close(instance_sequence_t *sequence)
{
    instance_job_t *job = sequence->job;
    if (sequence->state == SEQUENCE_OPEN) {
        sequence_unlink(job->instance, sequence);
        job->open_count--;
    } else if (sequence->state == SEQUENCE_WAITING) {
        job->waiting_count--;
        job->instance->waiting_count--;
    }
    sequence->state = SEQUENCE_DONE;
}

void instance_job_free(instance_job_t *job)
{
    if (!job)
        return;
    XP_ASSERT(job->magic == JOB_MAGIC && !job->request);
    http_instance_t *instance = job->instance;
    for (uint32_t i = 0; i < job->sequence_count; i++) {
        instance_sequence_t *sequence = &job->sequences[i];
        sequence_close(sequence);
        xp_buf_fini(&sequence->text);
        free(sequence->ids);
        instance_logprobs_fini(&sequence->output);
        instance_logprobs_fini(&sequence->prompt);
    }
    free(job->sequences);
    http_api_request_fini(&job->api);
    TAILQ_REMOVE(&instance->jobs, job, entry);
    instance->job_count--;
    job->magic = 0;
    free(job);
}

static void job_free_if_over(instance_job_t *job)
{
    if (!job->request && !job->open_count)
        instance_job_free(job);
}

/* Gives up what the engine still does for this job; its last events will come. */
static void job_cancel(instance_job_t *job)
{
    for (uint32_t i = 0; i < job->sequence_count; i++) {
        instance_sequence_t *sequence = &job->sequences[i];
        if (sequence->state == SEQUENCE_OPEN)
            engine_cancel(job->instance->config.engine, sequence->request);
        else
            sequence_close(sequence);
    }
}

static void job_on_close(void *context)
{
    instance_job_t *job = context;
    XP_ASSERT(job->magic == JOB_MAGIC);
    job->request = NULL;
    job->instance->disconnected++;
    job_cancel(job);
    job_free_if_over(job);
}

/* The answer is complete; the request object is the server's again. */
static http_request_t *job_release_request(instance_job_t *job)
{
    http_request_t *request = job->request;
    job->request = NULL;
    http_request_watch(request, NULL, NULL, NULL);
    return request;
}

void instance_job_reply(instance_job_t *job)
{
    http_reply_text(job_release_request(job), 200, "application/json", &job->instance->text);
}

void instance_job_send(instance_job_t *job)
{
    http_text_t *text = &job->instance->text;
    if (!job->request)
        return;
    if (text->status != XP_OK) {
        http_text_clear(text);
        instance_job_fail(job, 500, NULL, "a piece of the answer is too large");
        return;
    }
    if (!job->begun) {
        http_request_stream_begin(job->request, 200, "text/event-stream; charset=utf-8",
                                  "Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n", -1);
        job->begun = true;
    }
    bool taken = http_request_stream_write(job->request, text->buf.data, text->buf.length);
    http_text_clear(text);
    if (!taken) {
        http_request_abort_slow(job_release_request(job));
        job_cancel(job);
    }
}

void instance_job_end_stream(instance_job_t *job)
{
    if (job->request)
        http_request_stream_end(job_release_request(job));
}

void instance_job_fail(instance_job_t *job, int status, const char *code, const char *format, ...)
{
    http_problem_t problem = {.status = status, .code = code};
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(problem.message, sizeof(problem.message), format, arguments);
    va_end(arguments);
    http_request_t *request = job_release_request(job);
    if (!job->begun) {
        http_request_fail(request, &problem);
    } else {
        http_text_t *text = &job->instance->text;
        http_text_clear(text);
        http_text_puts(text, "data: ");
        http_problem_write(&problem, text);
        http_text_puts(text, "\n\n");
        http_request_stream_write(request, text->buf.data, text->buf.length);
        http_request_stream_end(request);
        http_text_clear(text);
    }
    job_cancel(job);
}

/* Submits one sequence. XP_RETRY: the engine's queue is full. */
static xp_status_t sequence_submit(instance_sequence_t *sequence)
{
    instance_job_t *job = sequence->job;
    http_instance_t *instance = job->instance;
    const http_api_request_t *api = &job->api;
    uint32_t prompt = sequence->index / api->n;
    const engine_sampling_t *base = &api->sampling[api->sampling_count > 1 ? prompt : 0];
    engine_sampling_t *sampling = &instance->scratch;
    *sampling = *base;
    /* One seed gives different answers of one prompt, the same ones each time. */
    sampling->seed += sequence->index % api->n;
    uint64_t request;
    XP_TRY(engine_submit(instance->config.engine, api->prompts[prompt].ids,
                         api->prompts[prompt].id_count, sampling, &request));
    instance_sequence_t **bucket = bucket_of(instance, request);
    sequence->request = request;
    sequence->hash_next = *bucket;
    *bucket = sequence;
    sequence->state = SEQUENCE_OPEN;
    job->waiting_count--;
    instance->waiting_count--;
    job->open_count++;
    instance->engine_error[0] = '\0';
    return XP_OK;
}

static void job_fail_submit(instance_job_t *job, const instance_sequence_t *sequence,
                            xp_status_t status)
{
    http_instance_t *instance = job->instance;
    const char *text = xp_error_last()->text;
    switch (status) {
    case XP_RETRY:
        instance->rejected++;
        instance_job_fail(job, 429, "queue_full", "the queue of model %s is full; try again later",
                          instance->model_id);
        break;
    case XP_INVALID:
    case XP_UNSUPPORTED: {
        /* The context may have become shorter since the prompt was looked at. */
        bool fits = job->api.prompts[sequence->index / job->api.n].id_count <
                    engine_max_context(instance->config.engine);
        instance_job_fail(job, 400, fits ? NULL : CONTEXT_CODE, "%s", text);
        break;
    }
    case XP_CLOSED:
        snprintf(instance->engine_error, sizeof(instance->engine_error), "%.255s",
                 text[0] ? text : "the engine has stopped");
        instance_job_fail(job, 503, NULL, "model %s is not serving: %s", instance->model_id,
                          instance->engine_error);
        break;
    default:
        instance_job_fail(job, 500, NULL, "%s", text);
        break;
    }
}

/* Submits what it can of a job. Only a job of which nothing is open is refused when the queue is
 * full. */
static void job_submit(instance_job_t *job)
{
    for (uint32_t i = 0; i < job->sequence_count && job->waiting_count && job->request; i++) {
        instance_sequence_t *sequence = &job->sequences[i];
        if (sequence->state != SEQUENCE_WAITING)
            continue;
        xp_error_clear();
        xp_status_t status = sequence_submit(sequence);
        if (status == XP_RETRY && job->open_count)
            return;
        if (status != XP_OK)
            job_fail_submit(job, sequence, status);
    }
}

static void submit_waiting(http_instance_t *instance)
{
    instance_job_t *next;
    for (instance_job_t *job = TAILQ_FIRST(&instance->jobs); job && instance->waiting_count;
         job = next) {
        next = TAILQ_NEXT(job, entry);
        if (!job->waiting_count)
            continue;
        job_submit(job);
        job_free_if_over(job);
    }
}

static xp_status_t check_bias(const http_instance_t *instance, const http_api_request_t *api,
                              http_problem_t *problem)
{
    uint32_t vocab = engine_spec(instance->config.engine)->vocab;
    for (uint32_t i = 0; i < api->sampling[0].bias_count; i++)
        if ((uint32_t)api->sampling[0].bias[i].id >= vocab)
            return http_problem_set(problem, 400, NULL, "logit_bias",
                                    "'logit_bias' names token %d; the vocabulary has %u",
                                    api->sampling[0].bias[i].id, vocab);
    return XP_OK;
}

static xp_status_t too_long(const http_instance_t *instance, const http_api_request_t *api,
                            size_t tokens, http_problem_t *problem)
{
    return http_problem_set(problem, 400, CONTEXT_CODE,
                            api->kind == HTTP_API_CHAT ? "messages" : NULL,
                            "this model's maximum context length is %u tokens, and the prompt has "
                            "at least %zu",
                            engine_max_context(instance->config.engine), tokens);
}

static xp_status_t tokenize_prompt(http_instance_t *instance, const http_api_request_t *api,
                                   http_api_prompt_t *prompt, const char *text, size_t length,
                                   bool special, http_problem_t *problem)
{
    /* A text that cannot fit however it is cut into tokens is not tokenized, which would hold the
     * loop up. The factor leaves room for what a normaliser may shorten. */
    size_t least = instance->longest_token_bytes
                       ? length / (NORMALIZER_SHRINK * instance->longest_token_bytes)
                       : 0;
    if (least >= engine_max_context(instance->config.engine))
        return too_long(instance, api, least, problem);
    return instance_tokenize(instance, text, length, special, &prompt->ids, &prompt->id_count,
                             problem);
}

/* Gives every prompt its ids and checks them against the context. */
static xp_status_t prepare_prompts(http_instance_t *instance, http_api_request_t *api,
                                   http_problem_t *problem)
{
    if (api->kind == HTTP_API_CHAT) {
        xp_buf_t rendered;
        xp_buf_init(&rendered, TOKENIZER_MAX_TEXT_BYTES);
        api->prompts = calloc(1, sizeof(*api->prompts));
        if (!api->prompts)
            return http_problem_set(problem, 503, NULL, NULL, "no memory for a prompt");
        api->prompt_count = 1;
        xp_status_t status = instance_render_chat(instance, api, &rendered, problem);
        if (status == XP_OK)
            /* The template has the special tokens in its text already. */
            status =
                tokenize_prompt(instance, api, &api->prompts[0], rendered.data ? rendered.data : "",
                                rendered.length, false, problem);
        xp_buf_fini(&rendered);
        XP_TRY(status);
    }
    for (uint32_t i = 0; i < api->prompt_count; i++) {
        http_api_prompt_t *prompt = &api->prompts[i];
        if (!prompt->ids)
            XP_TRY(tokenize_prompt(instance, api, prompt, prompt->text, prompt->length, true,
                                   problem));
        if (prompt->id_count >= engine_max_context(instance->config.engine))
            return too_long(instance, api, prompt->id_count, problem);
    }
    return XP_OK;
}

static void make_id(http_instance_t *instance, http_api_kind_t kind, char *out, size_t out_bytes)
{
    static const char *const prefixes[] = {"chatcmpl-", "cmpl-", ""};
    uint64_t mixed = (instance->id_seed + ++instance->id_next) * 0xbf58476d1ce4e5b9ull;
    mixed ^= mixed >> 31;
    snprintf(out, out_bytes, "%s%016llx%08llx", prefixes[kind], (unsigned long long)mixed,
             (unsigned long long)(instance->id_next & 0xffffffffu));
}

static xp_status_t job_create(http_instance_t *instance, http_request_t *request,
                              http_api_request_t *api, instance_job_t **job_out)
{
    uint32_t count = api->prompt_count * api->n;
    instance_job_t *job = calloc(1, sizeof(*job));
    instance_sequence_t *sequences = calloc(count, sizeof(*sequences));
    if (!job || !sequences) {
        free(job);
        free(sequences);
        return xp_fail(XP_NO_MEMORY, "no memory for a request");
    }
    job->magic = JOB_MAGIC;
    job->instance = instance;
    job->request = request;
    job->api = *api;
    job->created = (int64_t)time(NULL);
    make_id(instance, api->kind, job->id, sizeof(job->id));
    job->sequences = sequences;
    job->sequence_count = job->waiting_count = count;
    instance->waiting_count += count;
    for (uint32_t i = 0; i < count; i++) {
        sequences[i].job = job;
        sequences[i].index = i;
        sequences[i].stop_token = -1;
        xp_buf_init(&sequences[i].text, INSTANCE_MAX_TEXT_BYTES);
        sequences[i].output.stride = sequences[i].prompt.stride = api->top_logprobs;
    }
    TAILQ_INSERT_TAIL(&instance->jobs, job, entry);
    instance->job_count++;
    *job_out = job;
    return XP_OK;
}

void instance_job_start(http_instance_t *instance, http_request_t *request, http_api_kind_t kind)
{
    http_problem_t problem = {0};
    http_api_request_t api;
    instance_job_t *job = NULL;
    if (instance->job_count >= instance->config.max_requests) {
        instance->rejected++;
        http_reply_problem(request, 429, NULL, NULL, "%u requests are open; try again later",
                           instance->job_count);
        return;
    }
    http_slice_t body = http_request_body(request);
    if (http_api_parse(kind, body.data, body.length, &api, &problem) != XP_OK) {
        http_request_fail(request, &problem);
        return;
    }
    xp_status_t status = XP_OK;
    if (api.model && strcmp(api.model, instance->model_id))
        status = http_problem_set(&problem, 404, "model_not_found", "model",
                                  "the model \"%.100s\" does not exist here; this is \"%.100s\"",
                                  api.model, instance->model_id);
    if (status == XP_OK)
        status = check_bias(instance, &api, &problem);
    if (status == XP_OK)
        status = prepare_prompts(instance, &api, &problem);
    if (status == XP_OK && job_create(instance, request, &api, &job) != XP_OK)
        status = http_problem_set(&problem, 503, NULL, NULL, "%s", xp_error_last()->text);
    if (status != XP_OK) {
        http_api_request_fini(&api);
        http_request_fail(request, &problem);
        return;
    }
    if (!api.echo) {
        /* The body's JSON may be large, and only an echo needs its texts again. */
        json_decref(job->api.root);
        job->api.root = NULL;
        job->api.model = NULL;
    }
    http_request_watch(request, job_on_close, NULL, job);
    job_submit(job);
    job_free_if_over(job);
}

static bool sequence_keeps_text(const instance_job_t *job)
{
    return !job->api.stream || job->api.kind == HTTP_API_GENERATE;
}

static xp_status_t sequence_add_id(instance_sequence_t *sequence, int32_t id)
{
    if (sequence->id_count == sequence->id_capacity) {
        uint32_t capacity = sequence->id_capacity ? sequence->id_capacity * 2 : 128;
        int32_t *ids = realloc(sequence->ids, capacity * sizeof(*ids));
        if (!ids)
            return xp_fail(XP_NO_MEMORY, "no memory for token ids");
        sequence->ids = ids;
        sequence->id_capacity = capacity;
    }
    sequence->ids[sequence->id_count++] = id;
    return XP_OK;
}

/* Notes what one event says, where a later message needs it. */
static xp_status_t sequence_record(instance_sequence_t *sequence, const engine_event_t *event)
{
    instance_job_t *job = sequence->job;
    if (event->type == ENGINE_EVENT_PROMPT) {
        const http_api_prompt_t *prompt = sequence_prompt(sequence);
        engine_logprob_t unknown = {.logprob = NAN};
        while (sequence->prompt.count <= event->position &&
               sequence->prompt.count < prompt->id_count) {
            uint32_t at = sequence->prompt.count;
            engine_logprob_t chosen = at == event->position ? event->logprob : unknown;
            chosen.id = prompt->ids[at];
            XP_TRY(instance_logprobs_add(
                &sequence->prompt, &chosen, event->top,
                at == event->position && !isnan(chosen.logprob) ? event->top_count : 0));
        }
        return XP_OK;
    }
    bool generate = job->api.kind == HTTP_API_GENERATE;
    if (!job->api.discard_generated && sequence_keeps_text(job)) {
        XP_TRY(xp_buf_append(&sequence->text, event->text, event->text_length));
        if (event->token >= 0 && generate)
            XP_TRY(sequence_add_id(sequence, event->token));
        /* OpenAI lists the tokens of the content, which the end token is not. */
        if (event->token >= 0 && job->api.logprobs &&
            (generate || !instance_ends_content(sequence, event->token))) {
            engine_logprob_t chosen = {.id = event->token, .logprob = event->logprob.logprob};
            XP_TRY(instance_logprobs_add(&sequence->output, &chosen, event->top, event->top_count));
        }
    }
    sequence->prompt_tokens = event->prompt_tokens;
    sequence->cached_tokens = event->cached_tokens;
    sequence->completion_tokens = job->api.discard_generated ? 0 : event->completion_tokens;
    if (event->finish != ENGINE_FINISH_NONE) {
        sequence->finish = job->api.discard_generated ? ENGINE_FINISH_LENGTH : event->finish;
        sequence->stop_token = event->stop_token;
        snprintf(sequence->stop_text, sizeof(sequence->stop_text), "%s", event->stop_text);
        sequence->total_ns = event->total_ns;
    }
    return XP_OK;
}

static void job_fail_finish(instance_job_t *job, const engine_event_t *event)
{
    http_instance_t *instance = job->instance;
    const char *text = event->error;
    switch (event->finish) {
    case ENGINE_FINISH_ABORT:
        instance_job_fail(job, 503, NULL, "model %s is stopping; the request was ended%s%s",
                          instance->model_id, text[0] ? ": " : "", text);
        break;
    case ENGINE_FINISH_TIMEOUT:
        if (strstr(text, QUEUE_LIMIT_TEXT))
            instance_job_fail(job, 503, "queue_timeout", "model %s: %s", instance->model_id, text);
        else
            instance_job_fail(job, 504, NULL, "model %s: %s", instance->model_id,
                              text[0] ? text : "the request took longer than its time limit");
        break;
    case ENGINE_FINISH_TOO_LONG:
        instance_job_fail(job, 400, CONTEXT_CODE, "model %s: %s", instance->model_id, text);
        break;
    default:
        /* One request's own failure, of the sampler or the text, leaves the model healthy. */
        if (!strncmp(text, FFN_LOST_TEXT, strlen(FFN_LOST_TEXT)))
            snprintf(instance->engine_error, sizeof(instance->engine_error), "%s", text);
        instance_job_fail(job, 500, NULL, "model %s failed: %s", instance->model_id,
                          text[0] ? text : "no reason known");
        break;
    }
}

static void job_progress(instance_job_t *job, instance_sequence_t *sequence,
                         const engine_event_t *event)
{
    bool last = !job->open_count && !job->waiting_count;
    if (event->finish > ENGINE_FINISH_LENGTH) {
        job_fail_finish(job, event);
        return;
    }
    if (!job->api.stream) {
        if (!last)
            return;
        if (job->api.kind == HTTP_API_GENERATE)
            instance_sglang_reply(job);
        else
            instance_openai_reply(job);
        return;
    }
    if (event->type == ENGINE_EVENT_PROMPT)
        return;
    if (job->api.kind == HTTP_API_GENERATE)
        instance_sglang_stream(job, sequence, last);
    else
        instance_openai_stream(job, sequence, event, last);
}

static void handle_event(http_instance_t *instance, const engine_event_t *event)
{
    instance_sequence_t *sequence = sequence_find(instance, event->request);
    if (!sequence)
        return;
    instance_job_t *job = sequence->job;
    xp_status_t status = job->request ? sequence_record(sequence, event) : XP_OK;
    bool finished = event->finish != ENGINE_FINISH_NONE;
    if (finished)
        sequence_close(sequence);
    if (status != XP_OK)
        instance_job_fail(job, 500, NULL, "%s", xp_error_last()->text);
    else if (job->request)
        job_progress(job, sequence, event);
    job_free_if_over(job);
    if (finished && instance->waiting_count)
        submit_waiting(instance);
}

void instance_on_engine(int fd, short what, void *context)
{
    http_instance_t *instance = context;
    /* Bounded rounds, so that a fast engine does not keep the loop from its sockets; the descriptor
     * stays readable while events wait. */
    for (uint32_t round = 0; round < INSTANCE_DRAIN_ROUNDS; round++) {
        uint32_t count =
            engine_drain(instance->config.engine, instance->events, INSTANCE_DRAIN_EVENTS);
        for (uint32_t i = 0; i < count; i++)
            handle_event(instance, &instance->events[i]);
        if (count < INSTANCE_DRAIN_EVENTS)
            break;
    }
}
