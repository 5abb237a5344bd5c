/* SPDX-License-Identifier: MIT */
/*
 * The native Instance's engine: attention, KV Cache, scheduling and sampling of one model.
 *
 * One engine thread owns all state; others talk to it through engine_submit(), engine_cancel() and
 * events. The FFN of every layer is done elsewhere through engine_ffn_t: one call a layer carries
 * the rows of all running sequences. Continuous batching with chunked prefill, paged KV, radix
 * prefix cache.
 */
#ifndef XPOOL_ENGINE_ENGINE_H
#define XPOOL_ENGINE_ENGINE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/clock.h"
#include "base/status.h"
#include "kv/rank.h"
#include "model/checkpoint.h"
#include "model/spec.h"
#include "text/tokenizer.h"

/* out = FFN(in) for `layer`; rows x hidden FP32, contiguous. Blocks. XP_FATAL or XP_CLOSED ends the
 * engine: every open request ends with ENGINE_FINISH_ERROR. slo_deadline_ns: earliest SLO deadline
 * of the batch. kind: transport_kind_t. */
typedef struct engine_ffn {
    xp_status_t (*call)(void *context, uint32_t layer, uint32_t rows, uint32_t kind,
                        uint64_t slo_deadline_ns, const float *in, float *out);
    void *context;
} engine_ffn_t;

typedef struct engine_config {
    const char *model_id;
    const char *path;
    xp_dtype_t dtype; /* AUTO keeps the checkpoint's types */
    bool dummy;       /* load_format = "dummy" */
    uint32_t threads;
    const uint32_t *cpus;
    uint32_t cpu_count;
    uint32_t decode_rows;  /* most sequences decoded in one step */
    uint32_t prefill_rows; /* most prompt tokens in one step (chunk) */
    uint32_t max_rows;     /* most rows of one FFN call; 0 = decode_rows + prefill_rows */
    uint32_t max_context;  /* tokens; 0 = the checkpoint's */
    uint64_t kv_bytes;     /* KV Cache budget; 0 = from kv_tokens */
    uint32_t kv_tokens;    /* capacity in tokens when kv_bytes is 0 */
    uint32_t page_tokens;  /* 0 = 16 */
    /* Elastic KV: this rank's place in the control channel, borrowed; NULL: all of the KV Cache is
     * there for good. Its geometry replaces kv_bytes, kv_tokens and page_tokens, which say what
     * addresses are reserved; what has memory follows the daemon's commands. */
    kv_rank_t *kv_rank;
    uint64_t (*kv_room_bytes)(void *context); /* see kv_backing_options_t; NULL: not known */
    void *kv_room_context;
    bool prefix_cache;
    uint32_t queue_limit;        /* waiting requests at most, besides the decode_rows that may run;
                                  * more: XP_RETRY */
    uint64_t queue_timeout_ns;   /* waiting longer ends the request; 0 = no limit */
    uint64_t request_timeout_ns; /* 0 = no limit */
    uint64_t ttft_ns, tbt_ns;    /* SLO */
    engine_ffn_t ffn;
    xp_clock_t clock;
    void (*progress)(void *context, uint64_t done_bytes, uint64_t total_bytes);
    void *progress_context;
} engine_config_t;

typedef struct engine engine_t;

/* Loads the attention side (everything but the FFN) and makes the KV Cache. No thread yet. */
xp_status_t engine_create(const engine_config_t *config, engine_t **engine_out);
/* Stops the thread, frees everything. */
void engine_destroy(engine_t *engine);
xp_status_t engine_start(engine_t *engine);
/* Ends: no new requests (XP_CLOSED); open ones finish until deadline_ns (of the engine's clock),
 * then they end with ENGINE_FINISH_ABORT. Returns when the thread has stopped, which takes as long
 * as an FFN call in progress: close its Transport where that may hang. What was not drained can
 * still be drained afterwards. */
void engine_stop(engine_t *engine, uint64_t deadline_ns);

const model_spec_t *engine_spec(const engine_t *engine);
const tokenizer_t *engine_tokenizer(const engine_t *engine); /* NULL if the checkpoint has none */
uint32_t engine_max_context(const engine_t *engine);

#define ENGINE_MAX_STOPS      16
#define ENGINE_MAX_STOP_BYTES 128
#define ENGINE_MAX_STOP_IDS   16
#define ENGINE_MAX_LOGPROBS   20
#define ENGINE_MAX_BIAS       300

typedef struct engine_sampling {
    float temperature;                         /* 0 = greedy */
    float top_p;                               /* 1 = off */
    int32_t top_k;                             /* <= 0 = off */
    float min_p;                               /* 0 = off */
    float presence_penalty, frequency_penalty; /* 0 = off, over generated tokens (OpenAI) */
    float repetition_penalty;                  /* 1 = off, over prompt and generated (HF) */
    bool has_seed;
    uint64_t seed;           /* same request and seed: same tokens, whatever else runs */
    uint32_t max_new_tokens; /* 0 = until the context ends */
    uint32_t min_new_tokens;
    bool ignore_eos;
    uint32_t stop_count;
    char stops[ENGINE_MAX_STOPS][ENGINE_MAX_STOP_BYTES]; /* UTF-8, NUL-terminated */
    uint32_t stop_id_count;
    int32_t stop_ids[ENGINE_MAX_STOP_IDS];
    bool include_stop;        /* keep the stop string in the text */
    bool want_logprobs;       /* of the sampled token */
    bool skip_special_tokens; /* in text; true by default */
    uint32_t top_logprobs;    /* 0 .. ENGINE_MAX_LOGPROBS */
    bool prompt_logprobs;     /* echo + logprobs: computed for prompt tokens too */
    uint32_t bias_count;      /* logit_bias */
    struct {
        int32_t id;
        float bias;
    } bias[ENGINE_MAX_BIAS];
} engine_sampling_t;
void engine_sampling_default(engine_sampling_t *sampling); /* temperature 1, everything off */

typedef enum engine_finish {
    ENGINE_FINISH_NONE = 0,
    ENGINE_FINISH_STOP,    /* EOS, stop id or stop string */
    ENGINE_FINISH_LENGTH,  /* max_new_tokens or the context's end */
    ENGINE_FINISH_ABORT,   /* cancelled or shut down */
    ENGINE_FINISH_TIMEOUT, /* queue or request time limit */
    ENGINE_FINISH_ERROR,   /* the FFN side failed; error text in the event */
    /* It waited, and the KV Cache's ceiling was lowered below its prompt; error text. No token has
     * been sent. */
    ENGINE_FINISH_TOO_LONG,
} engine_finish_t;

typedef struct engine_logprob {
    int32_t id;
    float logprob; /* natural log, of the unmodified distribution (before temperature) */
} engine_logprob_t;

/* One event of one request. `text` is whole UTF-8 characters, already cut at stop strings (text
 * that might begin a stop string is held back). Every sampled token, EOS and stop ids included, has
 * one TOKEN event; a TOKEN event with token -1 only carries text that did not fit before. PROMPT
 * events, one a prompt position from 0 on, come before the first TOKEN when prompt_logprobs was
 * asked. The last event of a request is FINISH: its token is -1, its text is what was held back. */
typedef struct engine_event {
    uint64_t request;
    enum { ENGINE_EVENT_TOKEN = 0, ENGINE_EVENT_PROMPT, ENGINE_EVENT_FINISH } type;
    int32_t token;  /* -1 in FINISH without token */
    char text[256]; /* NUL-terminated; may be "" */
    uint32_t text_length;
    engine_logprob_t logprob;
    uint32_t top_count;
    engine_logprob_t top[ENGINE_MAX_LOGPROBS];
    uint32_t position; /* PROMPT: index of the prompt token (position 0 has no logprob: NAN) */
    engine_finish_t finish;
    int32_t stop_token;                    /* matched EOS / stop id, else -1 */
    char stop_text[ENGINE_MAX_STOP_BYTES]; /* matched stop string, else "" */
    uint32_t prompt_tokens, completion_tokens, cached_tokens;
    uint64_t queue_ns, first_token_ns, total_ns;
    char error[256];
} engine_event_t;

/* Submits a prompt (ids copied). XP_RETRY: queue full (HTTP 429). XP_INVALID: empty prompt, id
 * outside the vocabulary, prompt + 1 > context, KV can never hold it. XP_CLOSED: stopping. */
xp_status_t engine_submit(engine_t *engine, const int32_t *ids, uint32_t count,
                          const engine_sampling_t *sampling, uint64_t *request_out);
/* Ends a request at the next step and frees its KV; its FINISH event (ABORT) still comes. Unknown
 * or finished ids are ignored. */
void engine_cancel(engine_t *engine, uint64_t request);

/* A command may have come by the KV control channel: the engine looks, also when it is asleep. Any
 * thread. */
void engine_kv_look(engine_t *engine);

/* One consumer (the HTTP loop): an eventfd that is readable while events wait, and a drain. The
 * event queue is bounded; when it is full the engine pauses, it never drops. */
int engine_event_fd(const engine_t *engine);
uint32_t engine_drain(engine_t *engine, engine_event_t *events_out, uint32_t maximum);

typedef struct engine_stats {
    uint64_t steps, ffn_calls, ffn_rows;
    uint64_t prompt_tokens, generated_tokens, cached_tokens;
    uint64_t requests, finished, aborted, failed, rejected;
    uint32_t running, waiting;
    uint32_t kv_pages, kv_pages_used,
        kv_pages_cached; /* used by running; held by the prefix cache only */
    uint32_t page_tokens;
    uint64_t kv_bytes, weight_bytes;
    uint64_t kv_backed_bytes; /* of kv_bytes, what has memory */
    uint32_t kv_backed_pages; /* that may be handed out */
    uint64_t kv_moved_pages, kv_evicted_pages, kv_stalls, preemptions;
    uint64_t kv_grow_failures; /* grants that the system had no memory for */
    char kv_grow_error[160];   /* the last one's reason */
    uint64_t ttft_sum_ns, ttft_count, tbt_sum_ns, tbt_count;
    double ttft_p50_ms, ttft_p99_ms, tbt_p50_ms, tbt_p99_ms; /* over the last 1024 */
} engine_stats_t;
void engine_stats(const engine_t *engine, engine_stats_t *stats_out); /* any thread */
void engine_flush_cache(engine_t *engine); /* forget cached prefixes nobody uses */

/* Test and CLI aid, before engine_start() only: logits [count][vocab] of one sequence from empty.
 */
xp_status_t engine_forward(engine_t *engine, const int32_t *ids, uint32_t count, float *logits_out);

/* Ledger: bytes of the attention side's weights, and of workspaces, for this spec. */
uint64_t engine_weight_bytes(const model_spec_t *spec, const checkpoint_t *checkpoint,
                             xp_dtype_t dtype);
uint64_t engine_workspace_bytes(const model_spec_t *spec, uint32_t threads, uint32_t max_rows,
                                uint32_t max_context);
#endif
