/* SPDX-License-Identifier: MIT */
/*
 * Answers of SGLang's native /generate, whole and streamed.
 *
 * Owns nothing; writes into the Instance's reused text buffer and sends it. Runs on the HTTP
 * thread. As SGLang does by default, every message of a stream repeats the whole text so far.
 */
#include <math.h>

#include "http/instance_private.h"

#define STREAM_BEHIND_BYTES (64u << 10) /* unsent: the client does not keep up */

/* [logprob, id, text or null] */
static void write_entry(const instance_job_t *job, http_text_t *text, const engine_logprob_t *token)
{
    http_text_puts(text, "[");
    http_text_json_float(text, token->logprob);
    http_text_printf(text, ",%d,", token->id);
    if (job->api.text_in_logprobs) {
        http_slice_t bytes = instance_token_bytes(job->instance, token->id);
        http_text_json(text, bytes.data, bytes.length);
    } else {
        http_text_puts(text, "null");
    }
    http_text_puts(text, "]");
}

static void write_token_logprobs(const instance_job_t *job, http_text_t *text,
                                 const instance_logprobs_t *list, uint32_t start)
{
    http_text_puts(text, "[");
    for (uint32_t i = start; i < list->count; i++) {
        if (i > start)
            http_text_puts(text, ",");
        write_entry(job, text, &list->chosen[i]);
    }
    http_text_puts(text, "]");
}

static void write_top_logprobs(const instance_job_t *job, http_text_t *text,
                               const instance_logprobs_t *list, uint32_t start)
{
    http_text_puts(text, "[");
    for (uint32_t i = start; i < list->count; i++) {
        if (i > start)
            http_text_puts(text, ",");
        if (!list->top_count[i]) {
            http_text_puts(text, "null");
            continue;
        }
        http_text_puts(text, "[");
        for (uint32_t t = 0; t < list->top_count[i]; t++) {
            if (t)
                http_text_puts(text, ",");
            write_entry(job, text, &list->top[(size_t)i * list->stride + t]);
        }
        http_text_puts(text, "]");
    }
    http_text_puts(text, "]");
}

static void write_finish(const instance_sequence_t *sequence, http_text_t *text)
{
    if (sequence->finish == ENGINE_FINISH_NONE) {
        http_text_puts(text, "null");
    } else if (sequence->finish == ENGINE_FINISH_LENGTH) {
        http_text_printf(text, "{\"type\":\"length\",\"length\":%u}", sequence->completion_tokens);
    } else if (sequence->stop_token >= 0) {
        http_text_printf(text, "{\"type\":\"stop\",\"matched\":%d}", sequence->stop_token);
    } else {
        http_text_puts(text, "{\"type\":\"stop\",\"matched\":");
        http_text_json_string(text, sequence->stop_text);
        http_text_puts(text, "}");
    }
}

static void write_logprobs(const instance_sequence_t *sequence, http_text_t *text)
{
    const instance_job_t *job = sequence->job;
    /* Without a start no prompt position is reported, as in SGLang. */
    uint32_t start =
        job->api.logprob_start < 0 || job->api.logprob_start > (int64_t)sequence->prompt.count
            ? sequence->prompt.count
            : (uint32_t)job->api.logprob_start;
    http_text_puts(text, ",\"input_token_logprobs\":");
    write_token_logprobs(job, text, &sequence->prompt, start);
    http_text_puts(text, ",\"output_token_logprobs\":");
    write_token_logprobs(job, text, &sequence->output, 0);
    if (!job->api.top_logprobs)
        return;
    http_text_puts(text, ",\"input_top_logprobs\":");
    write_top_logprobs(job, text, &sequence->prompt, start);
    http_text_puts(text, ",\"output_top_logprobs\":");
    write_top_logprobs(job, text, &sequence->output, 0);
}

static void write_answer(const instance_sequence_t *sequence, http_text_t *text)
{
    const instance_job_t *job = sequence->job;
    http_text_puts(text, "{\"text\":");
    http_text_json(text, sequence->text.data ? sequence->text.data : "", sequence->text.length);
    http_text_puts(text, ",\"output_ids\":[");
    for (uint32_t i = 0; i < sequence->id_count; i++)
        http_text_printf(text, i ? ",%d" : "%d", sequence->ids[i]);
    http_text_puts(text, "],\"meta_info\":{\"id\":\"");
    http_text_puts(text, job->id);
    if (job->sequence_count > 1)
        http_text_printf(text, "-%u", sequence->index);
    http_text_puts(text, "\",\"finish_reason\":");
    write_finish(sequence, text);
    http_text_printf(text, ",\"prompt_tokens\":%u,\"completion_tokens\":%u,\"cached_tokens\":%u",
                     sequence_prompt(sequence)->id_count, sequence->completion_tokens,
                     sequence->cached_tokens);
    if (job->api.logprobs)
        write_logprobs(sequence, text);
    if (sequence->finish != ENGINE_FINISH_NONE)
        http_text_printf(text, ",\"e2e_latency\":%.6f", (double)sequence->total_ns / 1e9);
    http_text_puts(text, "}");
    if (job->api.batch && job->api.stream)
        http_text_printf(text, ",\"index\":%u", sequence->index);
    http_text_puts(text, "}");
}

void instance_sglang_reply(instance_job_t *job)
{
    http_text_t *text = &job->instance->text;
    http_text_clear(text);
    if (job->api.batch)
        http_text_puts(text, "[");
    for (uint32_t i = 0; i < job->sequence_count; i++) {
        if (i)
            http_text_puts(text, ",");
        write_answer(&job->sequences[i], text);
    }
    http_text_puts(text, job->api.batch ? "]\n" : "\n");
    instance_job_reply(job);
}

void instance_sglang_stream(instance_job_t *job, instance_sequence_t *sequence, bool last)
{
    /* An event holds all that the ones before it hold, so their bytes grow with the square of the
     * answer: a client that is behind gets fewer of them, not a broken stream. */
    if (sequence->finish == ENGINE_FINISH_NONE && job->request &&
        http_request_unsent(job->request) > STREAM_BEHIND_BYTES)
        return;
    http_text_t *text = &job->instance->text;
    http_text_clear(text);
    http_text_puts(text, "data: ");
    write_answer(sequence, text);
    http_text_puts(text, "\n\n");
    if (last)
        http_text_puts(text, "data: [DONE]\n\n");
    instance_job_send(job);
    if (last)
        instance_job_end_stream(job);
}
