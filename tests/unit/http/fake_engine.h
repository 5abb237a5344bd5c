/* SPDX-License-Identifier: MIT */
/*
 * A stand-in for engine, tokenizer and chat template, for tests of the HTTP interface alone.
 *
 * It defines the functions of engine.h, tokenizer.h and chat_template.h that src/http calls, in the
 * test's own object, so that the real archives are not pulled in. One thread gives every open
 * request its next token each `tick_us`. The text is fixed: a request starts at character seed (0
 * without one) of fake_script and goes round; token ids are bytes, so a character of several bytes
 * takes several tokens.
 */
#ifndef XPOOL_TESTS_HTTP_FAKE_ENGINE_H
#define XPOOL_TESTS_HTTP_FAKE_ENGINE_H

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "engine/engine.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

#define FAKE_EOS     256
#define FAKE_BOS     257
#define FAKE_VOCAB   260
#define FAKE_CONTEXT 512
#define FAKE_OPEN    64
#define FAKE_EVENTS  256

static const char fake_script[] = "Hello \xe2\x82\xac world. ";

struct tokenizer {
    int unused;
};
struct chat_template {
    int unused;
};
static struct tokenizer fake_tokenizer;
static struct chat_template fake_chat_template;

typedef struct fake_request {
    uint64_t id;
    engine_sampling_t sampling;
    uint32_t prompt_count, sent, held, prompt_sent;
    int32_t prompt[FAKE_CONTEXT];
    char pending[1024];
    bool cancelled;
} fake_request_t;

struct engine {
    pthread_mutex_t lock;
    pthread_t thread;
    int fd;
    atomic_bool stop;
    /* What a test sets. */
    atomic_uint tick_us;
    atomic_bool paused;
    atomic_uint queue_limit; /* open requests at most */
    atomic_uint eos_after;   /* tokens; 0 = never */
    atomic_int fail_after;   /* tokens until fail_finish; -1 = never */
    atomic_int fail_finish;
    _Atomic(const char *) fail_text; /* NULL: the text of an engine whose FFN side is lost */
    atomic_bool closed, no_tokenizer;
    /* What a test looks at. */
    atomic_uint submitted, cancelled, open, flushed;
    engine_sampling_t last_sampling;
    int32_t last_ids[FAKE_CONTEXT];
    uint32_t last_count;
    uint64_t next_id;
    fake_request_t requests[FAKE_OPEN];
    engine_event_t events[FAKE_EVENTS];
    uint32_t event_head, event_count;
};

static model_spec_t fake_spec;

static void fake_push(engine_t *e, const engine_event_t *event)
{
    e->events[(e->event_head + e->event_count++) % FAKE_EVENTS] = *event;
    uint64_t one = 1;
    if (write(e->fd, &one, sizeof(one)) < 0)
        abort();
}

static bool fake_whole(const char *p, size_t n)
{
    size_t i = 0;
    while (i < n) {
        unsigned char c = (unsigned char)p[i];
        i += c < 0x80 ? 1 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : 4;
    }
    return i == n;
}

/* Moves what may be shown from pending into the event. True when a stop string was met. */
static bool fake_text(fake_request_t *r, engine_event_t *event, bool last)
{
    size_t length = strlen(r->pending), show = length;
    bool stopped = false;
    for (uint32_t s = 0; s < r->sampling.stop_count; s++) {
        const char *stop = r->sampling.stops[s], *at = strstr(r->pending, stop);
        if (at && !stopped) {
            stopped = true;
            show = (size_t)(at - r->pending) + (r->sampling.include_stop ? strlen(stop) : 0);
            snprintf(event->stop_text, sizeof(event->stop_text), "%s", stop);
        }
        for (size_t k = strlen(stop) - 1; !at && !last && k > 0; k--)
            if (k <= length && !memcmp(r->pending + length - k, stop, k) && length - k < show)
                show = length - k;
    }
    while (show && !fake_whole(r->pending, show))
        show--;
    memcpy(event->text, r->pending, show);
    event->text[show] = '\0';
    event->text_length = (uint32_t)show;
    memmove(r->pending, r->pending + show, length - show + 1);
    return stopped;
}

static void fake_logprobs(engine_event_t *event, int32_t id, uint32_t index, uint32_t top)
{
    event->logprob = (engine_logprob_t){id, -0.25f - (float)index};
    event->top_count = top;
    for (uint32_t t = 0; t < top; t++)
        event->top[t] =
            (engine_logprob_t){(id + (int32_t)t) % 128, -0.25f - (float)(index + 2 * t)};
}

static void fake_prompt(engine_t *e, fake_request_t *r)
{
    engine_event_t event = {.request = r->id, .type = ENGINE_EVENT_PROMPT, .stop_token = -1};
    event.position = r->prompt_sent;
    event.token = r->prompt[r->prompt_sent];
    event.logprob = (engine_logprob_t){event.token, NAN};
    if (r->prompt_sent)
        fake_logprobs(&event, event.token, r->prompt_sent, r->sampling.top_logprobs);
    r->prompt_sent++;
    fake_push(e, &event);
}

static void fake_step(engine_t *e, fake_request_t *r)
{
    engine_event_t event = {.request = r->id, .token = -1, .stop_token = -1};
    event.prompt_tokens = r->prompt_count;
    event.cached_tokens = r->prompt_count / 2;
    bool fail = e->fail_after >= 0 && (int)r->sent >= e->fail_after;
    if (r->cancelled || fail) {
        event.type = ENGINE_EVENT_FINISH;
        event.finish = r->cancelled ? ENGINE_FINISH_ABORT : (engine_finish_t)e->fail_finish;
        event.completion_tokens = r->sent;
        const char *text = e->fail_text;
        if (fail)
            snprintf(event.error, sizeof(event.error), "%s",
                     text ? text : "the FFN call failed (fatal): the FFN side is gone");
        fake_push(e, &event);
        r->id = 0;
        e->open--;
        return;
    }
    if (r->sampling.prompt_logprobs && r->prompt_sent < r->prompt_count) {
        fake_prompt(e, r);
        return;
    }
    bool eos = e->eos_after && r->sent >= e->eos_after && !r->sampling.ignore_eos;
    size_t script = sizeof(fake_script) - 1;
    int32_t id =
        eos ? FAKE_EOS
            : (unsigned char)
                  fake_script[(r->sent + (r->sampling.has_seed ? r->sampling.seed : 0)) % script];
    event.type = ENGINE_EVENT_TOKEN;
    event.token = id;
    fake_logprobs(&event, id, r->sent, r->sampling.top_logprobs);
    r->sent++;
    event.completion_tokens = r->sent;
    bool length = r->sampling.max_new_tokens && r->sent >= r->sampling.max_new_tokens;
    length |= r->prompt_count + r->sent >= FAKE_CONTEXT;
    if (!eos)
        snprintf(r->pending + strlen(r->pending), 8, "%c", id);
    bool stopped = fake_text(r, &event, false);
    char stop_text[ENGINE_MAX_STOP_BYTES];
    snprintf(stop_text, sizeof(stop_text), "%s", event.stop_text);
    event.stop_text[0] = '\0';
    fake_push(e, &event);
    if (!eos && !length && !stopped)
        return;
    /* Like the real engine: the end is an event of its own, with the text held back so far. */
    event.type = ENGINE_EVENT_FINISH;
    event.token = -1;
    event.top_count = 0;
    event.text_length = 0;
    event.text[0] = '\0';
    if (!stopped)
        fake_text(r, &event, true);
    event.finish = eos || stopped ? ENGINE_FINISH_STOP : ENGINE_FINISH_LENGTH;
    event.stop_token = eos ? FAKE_EOS : -1;
    snprintf(event.stop_text, sizeof(event.stop_text), "%s", stopped ? stop_text : "");
    event.total_ns = 1000000;
    fake_push(e, &event);
    r->id = 0;
    e->open--;
}

static void *fake_run(void *context)
{
    engine_t *e = context;
    while (!e->stop) {
        usleep(e->tick_us);
        pthread_mutex_lock(&e->lock);
        for (int i = 0; i < FAKE_OPEN; i++)
            if (e->requests[i].id && e->event_count + 2 <= FAKE_EVENTS &&
                (!e->paused || e->requests[i].cancelled))
                fake_step(e, &e->requests[i]);
        pthread_mutex_unlock(&e->lock);
    }
    return NULL;
}

static engine_t *fake_engine_new(void)
{
    engine_t *e = calloc(1, sizeof(*e));
    pthread_mutex_init(&e->lock, NULL);
    e->fd = eventfd(0, EFD_NONBLOCK);
    e->tick_us = 200;
    e->queue_limit = FAKE_OPEN;
    e->fail_after = -1;
    e->eos_after = 17;
    fake_spec.vocab = FAKE_VOCAB;
    fake_spec.eos_count = 1;
    fake_spec.eos_tokens[0] = FAKE_EOS;
    pthread_create(&e->thread, NULL, fake_run, e);
    return e;
}

void engine_destroy(engine_t *e)
{
    e->stop = true;
    pthread_join(e->thread, NULL);
    close(e->fd);
    free(e);
}

const model_spec_t *engine_spec(const engine_t *e)
{
    return &fake_spec;
}

const tokenizer_t *engine_tokenizer(const engine_t *e)
{
    return e->no_tokenizer ? NULL : &fake_tokenizer;
}

uint32_t engine_max_context(const engine_t *e)
{
    return FAKE_CONTEXT;
}

void engine_sampling_default(engine_sampling_t *s)
{
    memset(s, 0, sizeof(*s));
    s->temperature = s->top_p = s->repetition_penalty = 1;
    s->skip_special_tokens = true;
}

xp_status_t engine_submit(engine_t *e, const int32_t *ids, uint32_t count,
                          const engine_sampling_t *sampling, uint64_t *request_out)
{
    xp_status_t status = XP_OK;
    pthread_mutex_lock(&e->lock);
    if (e->closed)
        status = xp_fail(XP_CLOSED, "the engine was stopped");
    else if (!count)
        status = xp_fail(XP_INVALID, "the prompt is empty");
    else if (e->open >= e->queue_limit)
        status = xp_fail(XP_RETRY, "the queue is full");
    for (uint32_t i = 0; i < count && status == XP_OK; i++)
        if (ids[i] >= FAKE_VOCAB)
            status = xp_fail(XP_INVALID, "token %d is outside the vocabulary", ids[i]);
    for (int i = 0; i < FAKE_OPEN && status == XP_OK; i++) {
        fake_request_t *r = &e->requests[i];
        if (r->id)
            continue;
        memset(r, 0, sizeof(*r));
        r->id = ++e->next_id;
        r->sampling = *sampling;
        r->prompt_count = count;
        memcpy(r->prompt, ids, count * sizeof(*ids));
        e->last_sampling = *sampling;
        e->last_count = count;
        memcpy(e->last_ids, ids, count * sizeof(*ids));
        e->open++;
        e->submitted++;
        *request_out = r->id;
        break;
    }
    pthread_mutex_unlock(&e->lock);
    return status;
}

void engine_cancel(engine_t *e, uint64_t request)
{
    pthread_mutex_lock(&e->lock);
    for (int i = 0; i < FAKE_OPEN; i++)
        if (e->requests[i].id == request && !e->requests[i].cancelled) {
            e->requests[i].cancelled = true;
            e->cancelled++;
        }
    pthread_mutex_unlock(&e->lock);
}

int engine_event_fd(const engine_t *e)
{
    return e->fd;
}

uint32_t engine_drain(engine_t *e, engine_event_t *out, uint32_t maximum)
{
    uint64_t value;
    pthread_mutex_lock(&e->lock);
    uint32_t n = 0;
    while (n < maximum && e->event_count) {
        out[n++] = e->events[e->event_head];
        e->event_head = (e->event_head + 1) % FAKE_EVENTS;
        e->event_count--;
    }
    if (!e->event_count && read(e->fd, &value, sizeof(value)) < 0)
        value = 0;
    pthread_mutex_unlock(&e->lock);
    return n;
}

void engine_stats(const engine_t *e, engine_stats_t *stats)
{
    stats->requests = e->submitted;
    stats->running = e->open;
}

void engine_flush_cache(engine_t *e)
{
    e->flushed++;
}

uint32_t tokenizer_vocab_size(const tokenizer_t *tokenizer)
{
    return FAKE_VOCAB;
}

const char *tokenizer_token_text(const tokenizer_t *tokenizer, int32_t id)
{
    return id <= FAKE_BOS ? "" : NULL;
}

bool tokenizer_token_is_special(const tokenizer_t *tokenizer, int32_t id)
{
    return id >= FAKE_EOS;
}

size_t tokenizer_token_bytes(const tokenizer_t *tokenizer, int32_t id, const char **bytes_out)
{
    static char bytes[256][2];
    if (id == FAKE_EOS || id == FAKE_BOS) {
        *bytes_out = id == FAKE_EOS ? "<eos>" : "<bos>";
        return 5;
    }
    bytes[id][0] = (char)id;
    *bytes_out = bytes[id];
    return 1;
}

xp_status_t tokenizer_encode(const tokenizer_t *tokenizer, const char *text, size_t length,
                             bool add_special_tokens, bool parse_special, int32_t **ids_out,
                             size_t *count_out)
{
    int32_t *ids = malloc((length + 1) * sizeof(*ids));
    size_t n = 0;
    if (add_special_tokens && length)
        ids[n++] = FAKE_BOS;
    for (size_t i = 0; i < length; i++)
        ids[n++] = (unsigned char)text[i];
    *ids_out = ids;
    *count_out = n;
    return XP_OK;
}

xp_status_t tokenizer_decode(const tokenizer_t *tokenizer, const int32_t *ids, size_t count,
                             bool skip_special_tokens, xp_buf_t *text_out)
{
    for (size_t i = 0; i < count; i++) {
        if (ids[i] >= FAKE_VOCAB)
            return xp_fail(XP_INVALID, "there is no token %d", ids[i]);
        if (ids[i] >= FAKE_EOS && skip_special_tokens)
            continue;
        const char *bytes;
        size_t length = tokenizer_token_bytes(tokenizer, ids[i], &bytes);
        XP_TRY(xp_buf_append(text_out, bytes, length));
    }
    return XP_OK;
}

const char *chat_template_name(const chat_template_t *chat_template)
{
    return "fake";
}

xp_status_t chat_template_render(const chat_template_t *chat_template,
                                 const chat_message_t *messages, size_t count,
                                 const chat_options_t *options, xp_buf_t *text_out)
{
    if (options->tools_json)
        return xp_fail(XP_UNSUPPORTED, "the chat template \"fake\" has no tools");
    for (size_t i = 0; i < count; i++)
        XP_TRY(xp_buf_printf(text_out, "%s:%s\n", messages[i].role,
                             messages[i].content ? messages[i].content : ""));
    if (options->enable_thinking >= 0)
        XP_TRY(xp_buf_printf(text_out, "thinking:%d\n", options->enable_thinking));
    return options->add_generation_prompt ? xp_buf_append_text(text_out, "assistant:") : XP_OK;
}
#endif
