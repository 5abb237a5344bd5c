/* SPDX-License-Identifier: MIT */
/*
 * The native Instance's jobs: one HTTP request that generates, with its sequences in the engine.
 *
 * A job lives until its client has been answered (or has gone) and the engine has sent the last
 * event of each of its sequences. Everything belongs to the HTTP thread.
 */
#ifndef XPOOL_HTTP_INSTANCE_PRIVATE_H
#define XPOOL_HTTP_INSTANCE_PRIVATE_H

#include <sys/queue.h>

#include "http/http_api.h"
#include "http/http_route.h"
#include "http/http_server.h"
#include "http/instance_server.h"

#define INSTANCE_BUCKETS        1024u
#define INSTANCE_DRAIN_EVENTS   64u
#define INSTANCE_DRAIN_ROUNDS   16u
#define INSTANCE_MAX_TEXT_BYTES (64u << 20)
#define JOB_MAGIC               0x6a6f6221u

typedef struct instance_job instance_job_t;

/* Log-probabilities of consecutive tokens; `top` has `stride` entries a token. */
typedef struct instance_logprobs {
    uint32_t count, capacity, stride;
    engine_logprob_t *chosen;
    engine_logprob_t *top;
    uint8_t *top_count;
} instance_logprobs_t;

typedef enum sequence_state { SEQUENCE_WAITING = 0, SEQUENCE_OPEN, SEQUENCE_DONE } sequence_state_t;

typedef struct instance_sequence {
    instance_job_t *job;
    struct instance_sequence *hash_next;
    uint64_t request; /* the engine's id while OPEN */
    uint32_t index;   /* of the choice; prompt = index / n */
    sequence_state_t state;
    bool begun;    /* streaming: its first chunk was sent */
    xp_buf_t text; /* generated; kept only where a later message repeats it */
    int32_t *ids;
    uint32_t id_count, id_capacity;
    instance_logprobs_t output, prompt;
    uint32_t offset; /* characters of the text before the next token (text_offset) */
    engine_finish_t finish;
    int32_t stop_token;
    char stop_text[ENGINE_MAX_STOP_BYTES];
    uint32_t prompt_tokens, completion_tokens, cached_tokens;
    uint64_t total_ns;
} instance_sequence_t;

struct instance_job {
    uint32_t magic;
    http_instance_t *instance;
    TAILQ_ENTRY(instance_job) entry; /* oldest first */
    http_request_t *request;         /* NULL once answered or gone */
    http_api_request_t api;
    char id[48];
    int64_t created;
    bool begun; /* the stream's head was sent */
    uint32_t sequence_count, open_count, waiting_count;
    instance_sequence_t *sequences;
};

struct http_instance {
    http_instance_config_t config;
    char *model_id, *chat_reason;
    http_server_t *server;
    struct event *engine_event;
    engine_event_t *events; /* INSTANCE_DRAIN_EVENTS */
    TAILQ_HEAD(instance_jobs, instance_job) jobs;
    uint32_t job_count, waiting_count;
    instance_sequence_t *buckets[INSTANCE_BUCKETS];
    size_t longest_token_bytes; /* of the vocabulary; 0 without a tokenizer */
    engine_sampling_t scratch;  /* one submission's parameters */
    http_text_t text;           /* one answer or chunk, reused */
    uint64_t id_seed, id_next;
    uint64_t rejected, disconnected;
    bool quiescing;
    char engine_error[256]; /* "" while the engine takes requests */
};

/* instance_job.c */
void instance_job_start(http_instance_t *instance, http_request_t *request, http_api_kind_t kind);
/* Ends the answer with an error, whichever form that takes now, and cancels what is open. */
void instance_job_fail(instance_job_t *job, int status, const char *code, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* Sends instance->text as a piece of the stream; a client too slow to take it is dropped. */
void instance_job_send(instance_job_t *job);
/* Sends instance->text as the whole answer. */
void instance_job_reply(instance_job_t *job);
/* Ends the stream. */
void instance_job_end_stream(instance_job_t *job);
void instance_job_free(instance_job_t *job);
void instance_on_engine(int fd, short what, void *context);

/* The prompt a sequence continues. */
static inline const http_api_prompt_t *sequence_prompt(const instance_sequence_t *sequence)
{
    return &sequence->job->api.prompts[sequence->index / sequence->job->api.n];
}

/* instance_tokens.c */
xp_status_t instance_logprobs_add(instance_logprobs_t *list, const engine_logprob_t *chosen,
                                  const engine_logprob_t *top, uint32_t top_count);
void instance_logprobs_fini(instance_logprobs_t *list);
/* Raw bytes of a token; "" for ids without text. */
http_slice_t instance_token_bytes(const http_instance_t *instance, int32_t id);
/* True for a token that ends the answer and is no part of its text: EOS or a stop id. */
bool instance_ends_content(const instance_sequence_t *sequence, int32_t token);
/* Bytes of the longest token. */
size_t instance_longest_token(const http_instance_t *instance);
/* Ids of one prompt text. Fills `problem` on failure. `*ids_out` is malloc'd. */
xp_status_t instance_tokenize(const http_instance_t *instance, const char *text, size_t length,
                              bool add_special_tokens, int32_t **ids_out, uint32_t *count_out,
                              http_problem_t *problem);
/* The rendered prompt of a chat body. */
xp_status_t instance_render_chat(const http_instance_t *instance, const http_api_request_t *request,
                                 xp_buf_t *text_out, http_problem_t *problem);
void instance_tokenize_path(http_instance_t *instance, http_request_t *request);
void instance_detokenize_path(http_instance_t *instance, http_request_t *request);

/* instance_openai.c: writes into instance->text. */
void instance_openai_reply(instance_job_t *job);
/* Chunks for one engine event of one sequence; `last` when all sequences have ended. */
void instance_openai_stream(instance_job_t *job, instance_sequence_t *sequence,
                            const engine_event_t *event, bool last);
/* instance_sglang.c */
void instance_sglang_reply(instance_job_t *job);
void instance_sglang_stream(instance_job_t *job, instance_sequence_t *sequence, bool last);

/* instance_metrics.c */
void instance_metrics_path(http_instance_t *instance, http_request_t *request);
#endif
