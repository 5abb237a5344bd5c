/* SPDX-License-Identifier: MIT */
/*
 * Answers in OpenAI's form: chat and text completions, whole and streamed.
 *
 * Owns nothing; writes into the Instance's reused text buffer and sends it. Runs on the HTTP
 * thread. It never talks to the engine.
 */
#include <math.h>
#include <string.h>

#include "http/instance_private.h"

static const char *finish_name(engine_finish_t finish)
{
    return finish == ENGINE_FINISH_STOP ? "\"stop\"" : "\"length\"";
}

static void write_envelope(const instance_job_t *job, http_text_t *text, bool chunk)
{
    bool chat = job->api.kind == HTTP_API_CHAT;
    http_text_puts(text, "{\"id\":\"");
    http_text_puts(text, job->id);
    http_text_puts(text, chat && chunk ? "\",\"object\":\"chat.completion.chunk\""
                         : chat        ? "\",\"object\":\"chat.completion\""
                                       : "\",\"object\":\"text_completion\"");
    http_text_printf(text, ",\"created\":%lld,\"model\":", (long long)job->created);
    http_text_json_string(text, job->instance->model_id);
    http_text_puts(text, ",\"system_fingerprint\":null");
}

static void write_usage(const instance_job_t *job, http_text_t *text)
{
    uint64_t prompt = 0, completion = 0, cached = 0;
    for (uint32_t i = 0; i < job->api.prompt_count; i++)
        prompt += job->api.prompts[i].id_count;
    for (uint32_t i = 0; i < job->sequence_count; i++) {
        completion += job->sequences[i].completion_tokens;
        /* A prompt counts once, however many answers it gets. */
        if (i % job->api.n == 0)
            cached += job->sequences[i].cached_tokens;
    }
    http_text_printf(text,
                     "{\"prompt_tokens\":%llu,\"completion_tokens\":%llu,\"total_tokens\":%llu,"
                     "\"prompt_tokens_details\":{\"cached_tokens\":%llu}}",
                     (unsigned long long)prompt, (unsigned long long)completion,
                     (unsigned long long)(prompt + completion), (unsigned long long)cached);
}

/* "token": text, "logprob": number, "bytes": [...] */
static void write_chat_token(const http_instance_t *instance, http_text_t *text,
                             const engine_logprob_t *token)
{
    http_slice_t bytes = instance_token_bytes(instance, token->id);
    http_text_puts(text, "{\"token\":");
    http_text_json(text, bytes.data, bytes.length);
    http_text_puts(text, ",\"logprob\":");
    http_text_json_float(text, token->logprob);
    http_text_puts(text, ",\"bytes\":[");
    for (size_t i = 0; i < bytes.length; i++)
        http_text_printf(text, i ? ",%u" : "%u", (unsigned char)bytes.data[i]);
    http_text_puts(text, "]");
}

static void write_chat_logprobs(const http_instance_t *instance, http_text_t *text,
                                const instance_logprobs_t *list)
{
    http_text_puts(text, "{\"content\":[");
    for (uint32_t i = 0; i < list->count; i++) {
        if (i)
            http_text_puts(text, ",");
        write_chat_token(instance, text, &list->chosen[i]);
        http_text_puts(text, ",\"top_logprobs\":[");
        for (uint32_t t = 0; t < list->top_count[i]; t++) {
            if (t)
                http_text_puts(text, ",");
            write_chat_token(instance, text, &list->top[(size_t)i * list->stride + t]);
            http_text_puts(text, "}");
        }
        http_text_puts(text, "]}");
    }
    http_text_puts(text, "],\"refusal\":null}");
}

/* The legacy form has no bytes, so a token that is no whole text is written as "bytes:\xNN...". */
static void write_token_string(const http_instance_t *instance, http_text_t *text, int32_t id)
{
    http_slice_t bytes = instance_token_bytes(instance, id);
    size_t valid = 0;
    while (valid < bytes.length) {
        size_t step = http_utf8_length(bytes.data + valid, bytes.length - valid);
        if (!step)
            break;
        valid += step;
    }
    if (valid == bytes.length) {
        http_text_json(text, bytes.data, bytes.length);
        return;
    }
    http_text_puts(text, "\"bytes:");
    for (size_t i = 0; i < bytes.length; i++)
        http_text_printf(text, "\\\\x%02x", (unsigned char)bytes.data[i]);
    http_text_puts(text, "\"");
}

/* Characters that begin in this token, as it appears in the text. */
static uint32_t token_characters(const instance_job_t *job, int32_t id)
{
    const tokenizer_t *tokenizer = engine_tokenizer(job->instance->config.engine);
    http_slice_t bytes = instance_token_bytes(job->instance, id);
    uint32_t count = 0;
    if (tokenizer && job->api.sampling[0].skip_special_tokens &&
        tokenizer_token_is_special(tokenizer, id))
        return 0;
    for (size_t i = 0; i < bytes.length; i++)
        count += ((unsigned char)bytes.data[i] & 0xc0) != 0x80;
    return count;
}

/* An object from token text to log-probability: the likeliest ones and the chosen one. */
static void write_top_object(const http_instance_t *instance, http_text_t *text,
                             const instance_logprobs_t *list, uint32_t index)
{
    const engine_logprob_t *top = list->top + (size_t)index * list->stride;
    const engine_logprob_t *chosen = &list->chosen[index];
    uint32_t count = list->top_count[index];
    bool has_chosen = false;
    if (isnan(chosen->logprob) || !list->stride) {
        http_text_puts(text, "null");
        return;
    }
    http_text_puts(text, "{");
    for (uint32_t t = 0; t <= count; t++) {
        const engine_logprob_t *token = t < count ? &top[t] : chosen;
        if (t == count && has_chosen)
            break;
        has_chosen |= token->id == chosen->id;
        if (t)
            http_text_puts(text, ",");
        write_token_string(instance, text, token->id);
        http_text_puts(text, ":");
        http_text_json_float(text, token->logprob);
    }
    http_text_puts(text, "}");
}

/* Two lists one after the other (prompt and output), either of which may be empty. */
static void write_completion_logprobs(instance_sequence_t *sequence, http_text_t *text,
                                      const instance_logprobs_t *first,
                                      const instance_logprobs_t *second)
{
    const http_instance_t *instance = sequence->job->instance;
    static const char *const names[] = {"{\"tokens\":[", "],\"token_logprobs\":[",
                                        "],\"top_logprobs\":[", "],\"text_offset\":["};
    const instance_logprobs_t *lists[] = {first, second};
    bool no_top = !second->stride && !first->stride;
    for (uint32_t field = 0; field < 4; field++) {
        bool comma = false;
        if (field == 3 && no_top)
            http_text_puts(text, ",\"text_offset\":[");
        else if (field == 2 && no_top)
            http_text_puts(text, "],\"top_logprobs\":null");
        else
            http_text_puts(text, names[field]);
        for (uint32_t l = 0; l < 2; l++) {
            const instance_logprobs_t *list = lists[l];
            for (uint32_t i = 0; i < list->count && !(field == 2 && no_top); i++) {
                if (comma)
                    http_text_puts(text, ",");
                comma = true;
                if (field == 0) {
                    write_token_string(instance, text, list->chosen[i].id);
                } else if (field == 1) {
                    http_text_json_float(text, list->chosen[i].logprob);
                } else if (field == 2) {
                    write_top_object(instance, text, list, i);
                } else {
                    http_text_printf(text, "%u", sequence->offset);
                    sequence->offset += token_characters(sequence->job, list->chosen[i].id);
                }
            }
        }
    }
    http_text_puts(text, "]}");
}

/* The prompt as it is echoed: as sent, or decoded when it was sent as ids. */
static xp_status_t prompt_text(const instance_sequence_t *sequence, xp_buf_t *out)
{
    const http_api_prompt_t *prompt = sequence_prompt(sequence);
    const tokenizer_t *tokenizer = engine_tokenizer(sequence->job->instance->config.engine);
    if (prompt->text)
        return xp_buf_append(out, prompt->text, prompt->length);
    if (!tokenizer)
        return XP_OK;
    return tokenizer_decode(tokenizer, prompt->ids, prompt->id_count,
                            sequence->job->api.sampling[0].skip_special_tokens, out);
}

static void write_choice(instance_sequence_t *sequence, http_text_t *text)
{
    const instance_job_t *job = sequence->job;
    static const instance_logprobs_t none;
    const char *generated = sequence->text.data ? sequence->text.data : "";
    http_text_printf(text, "{\"index\":%u,", sequence->index);
    if (job->api.kind == HTTP_API_CHAT) {
        http_text_puts(text, "\"message\":{\"role\":\"assistant\",\"content\":");
        http_text_json(text, generated, sequence->text.length);
        http_text_puts(text, ",\"refusal\":null},\"logprobs\":");
        if (job->api.logprobs)
            write_chat_logprobs(job->instance, text, &sequence->output);
        else
            http_text_puts(text, "null");
    } else {
        xp_buf_t whole;
        xp_buf_init(&whole, INSTANCE_MAX_TEXT_BYTES);
        xp_status_t status = job->api.echo ? prompt_text(sequence, &whole) : XP_OK;
        if (status == XP_OK)
            status = xp_buf_append(&whole, generated, sequence->text.length);
        if (status != XP_OK)
            text->status = status;
        http_text_puts(text, "\"text\":");
        http_text_json(text, whole.data ? whole.data : "", whole.length);
        xp_buf_fini(&whole);
        http_text_puts(text, ",\"logprobs\":");
        if (job->api.logprobs)
            write_completion_logprobs(sequence, text, job->api.echo ? &sequence->prompt : &none,
                                      &sequence->output);
        else
            http_text_puts(text, "null");
    }
    http_text_puts(text, ",\"finish_reason\":");
    http_text_puts(text, finish_name(sequence->finish));
    http_text_puts(text, "}");
}

void instance_openai_reply(instance_job_t *job)
{
    http_text_t *text = &job->instance->text;
    http_text_clear(text);
    write_envelope(job, text, false);
    http_text_puts(text, ",\"choices\":[");
    for (uint32_t i = 0; i < job->sequence_count; i++) {
        if (i)
            http_text_puts(text, ",");
        write_choice(&job->sequences[i], text);
    }
    http_text_puts(text, "],\"usage\":");
    write_usage(job, text);
    http_text_puts(text, "}\n");
    instance_job_reply(job);
}

static void chunk_begin(instance_sequence_t *sequence, http_text_t *text)
{
    http_text_clear(text);
    http_text_puts(text, "data: ");
    write_envelope(sequence->job, text, true);
    http_text_printf(text, ",\"choices\":[{\"index\":%u,", sequence->index);
}

static void chunk_end(instance_job_t *job, http_text_t *text, const char *finish)
{
    http_text_puts(text, ",\"finish_reason\":");
    http_text_puts(text, finish ? finish : "null");
    /* Clients that asked for usage expect the field in every chunk (OpenAI's reference). */
    http_text_puts(text, job->api.include_usage ? "}],\"usage\":null}\n\n" : "}]}\n\n");
    instance_job_send(job);
}

static void chat_chunk(instance_sequence_t *sequence, const char *content, size_t length,
                       const instance_logprobs_t *list)
{
    http_text_t *text = &sequence->job->instance->text;
    chunk_begin(sequence, text);
    http_text_puts(text, "\"delta\":{\"content\":");
    http_text_json(text, content, length);
    http_text_puts(text, "},\"logprobs\":");
    if (list)
        write_chat_logprobs(sequence->job->instance, text, list);
    else
        http_text_puts(text, "null");
    chunk_end(sequence->job, text, NULL);
}

static void completion_chunk(instance_sequence_t *sequence, const char *content, size_t length,
                             const instance_logprobs_t *first, const instance_logprobs_t *second,
                             const char *finish)
{
    http_text_t *text = &sequence->job->instance->text;
    chunk_begin(sequence, text);
    http_text_puts(text, "\"text\":");
    http_text_json(text, content, length);
    http_text_puts(text, ",\"logprobs\":");
    if (second)
        write_completion_logprobs(sequence, text, first, second);
    else
        http_text_puts(text, "null");
    chunk_end(sequence->job, text, finish);
}

/* What comes before a sequence's first token: the role, or the echoed prompt. */
static void stream_opening(instance_sequence_t *sequence)
{
    instance_job_t *job = sequence->job;
    http_text_t *text = &job->instance->text;
    static const instance_logprobs_t none;
    if (job->api.kind == HTTP_API_CHAT) {
        chunk_begin(sequence, text);
        http_text_puts(text,
                       "\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null");
        chunk_end(job, text, NULL);
    } else if (job->api.echo) {
        xp_buf_t whole;
        xp_buf_init(&whole, INSTANCE_MAX_TEXT_BYTES);
        xp_status_t status = prompt_text(sequence, &whole);
        if (status == XP_OK)
            completion_chunk(sequence, whole.data ? whole.data : "", whole.length, &none,
                             job->api.logprobs ? &sequence->prompt : NULL, NULL);
        else
            instance_job_fail(job, 500, NULL, "%s", xp_error_last()->text);
        xp_buf_fini(&whole);
    }
}

static void stream_token(instance_sequence_t *sequence, const engine_event_t *event)
{
    instance_job_t *job = sequence->job;
    static const instance_logprobs_t none;
    bool with_logprob =
        job->api.logprobs && event->token >= 0 && !instance_ends_content(sequence, event->token);
    if (job->api.discard_generated || (!event->text_length && !with_logprob))
        return;
    engine_logprob_t chosen = {.id = event->token, .logprob = event->logprob.logprob};
    uint8_t top_count = (uint8_t)(event->top_count < job->api.top_logprobs ? event->top_count
                                                                           : job->api.top_logprobs);
    instance_logprobs_t one = {.count = 1,
                               .stride = job->api.top_logprobs,
                               .chosen = &chosen,
                               .top = (engine_logprob_t *)event->top,
                               .top_count = &top_count};
    if (job->api.kind == HTTP_API_CHAT)
        chat_chunk(sequence, event->text, event->text_length, with_logprob ? &one : NULL);
    else
        completion_chunk(sequence, event->text, event->text_length, &none,
                         with_logprob ? &one : NULL, NULL);
}

static void stream_finish(instance_sequence_t *sequence)
{
    instance_job_t *job = sequence->job;
    http_text_t *text = &job->instance->text;
    if (job->api.kind == HTTP_API_CHAT) {
        chunk_begin(sequence, text);
        http_text_puts(text, "\"delta\":{},\"logprobs\":null");
        chunk_end(job, text, finish_name(sequence->finish));
    } else {
        completion_chunk(sequence, "", 0, NULL, NULL, finish_name(sequence->finish));
    }
}

void instance_openai_stream(instance_job_t *job, instance_sequence_t *sequence,
                            const engine_event_t *event, bool last)
{
    http_text_t *text = &job->instance->text;
    /* Each step may lose the client, and then the rest is for nobody. */
    if (!sequence->begun && job->request) {
        sequence->begun = true;
        stream_opening(sequence);
    }
    if (job->request)
        stream_token(sequence, event);
    if (job->request && event->finish != ENGINE_FINISH_NONE)
        stream_finish(sequence);
    if (!job->request || !last)
        return;
    http_text_clear(text);
    if (job->api.include_usage) {
        http_text_puts(text, "data: ");
        write_envelope(job, text, true);
        http_text_puts(text, ",\"choices\":[],\"usage\":");
        write_usage(job, text);
        http_text_puts(text, "}\n\n");
    }
    http_text_puts(text, "data: [DONE]\n\n");
    instance_job_send(job);
    instance_job_end_stream(job);
}
