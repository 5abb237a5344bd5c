/* SPDX-License-Identifier: MIT */
/*
 * What a request body asks for, after all checks that need neither engine nor tokenizer.
 *
 * Three readers fill one structure: OpenAI's chat completions, OpenAI's text completions, and
 * SGLang's native /generate. A field that would change the answer and that we do not implement is
 * refused by name; fields that only inform (user, metadata, store) are ignored. JSON null counts as
 * absent.
 */
#ifndef XPOOL_HTTP_HTTP_API_H
#define XPOOL_HTTP_HTTP_API_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/engine.h"
#include "http/http_error.h"
#include "text/chat_template.h"

#define HTTP_API_MAX_CHOICES   128 /* n */
#define HTTP_API_MAX_SEQUENCES 256 /* prompts x n */
#define HTTP_API_MAX_MESSAGES  4096

typedef enum http_api_kind {
    HTTP_API_CHAT = 0,
    HTTP_API_COMPLETION,
    HTTP_API_GENERATE
} http_api_kind_t;

/* Either text or ids. */
typedef struct http_api_prompt {
    const char *text; /* points into the JSON; NULL when ids are given */
    size_t length;
    int32_t *ids; /* owned */
    uint32_t id_count;
} http_api_prompt_t;

typedef struct http_api_request {
    http_api_kind_t kind;
    json_t *root;      /* owned; texts point into it */
    const char *model; /* NULL when not given */
    bool stream, include_usage;
    uint32_t n;             /* answers a prompt */
    bool echo;              /* completions */
    bool discard_generated; /* max_tokens 0: only the echo is wanted */
    bool logprobs;          /* report them */
    uint32_t top_logprobs;
    int64_t logprob_start; /* /generate: first prompt position reported; -1 = none */
    bool text_in_logprobs; /* /generate */
    bool batch;            /* /generate: answer a list */
    uint32_t prompt_count; /* completions and /generate */
    http_api_prompt_t *prompts;
    engine_sampling_t *sampling; /* one a prompt; for chat exactly one */
    uint32_t sampling_count;
    uint32_t message_count; /* chat */
    chat_message_t *messages;
    chat_options_t options;
    char **owned; /* strings made for messages and options */
    uint32_t owned_count, owned_capacity;
} http_api_request_t;

/* Reads one body. On failure `problem_out` is filled and nothing is left to free. On success the
 * caller calls http_api_request_fini(). */
xp_status_t http_api_parse(http_api_kind_t kind, const char *body, size_t length,
                           http_api_request_t *request_out, http_problem_t *problem_out);
void http_api_request_fini(http_api_request_t *request);

/* Helpers shared by the readers and the small paths. A missing or null field leaves the value
 * alone. */
xp_status_t http_api_bool(const json_t *object, const char *key, bool *value,
                          http_problem_t *problem);
xp_status_t http_api_number(const json_t *object, const char *key, double low, double high,
                            double *value, http_problem_t *problem);
xp_status_t http_api_integer(const json_t *object, const char *key, int64_t low, int64_t high,
                             int64_t *value, http_problem_t *problem);
xp_status_t http_api_string(const json_t *object, const char *key, const char **value,
                            http_problem_t *problem);
/* Token ids of a JSON array; `*ids_out` is malloc'd. */
xp_status_t http_api_ids(const json_t *array, const char *param, int32_t **ids_out,
                         uint32_t *count_out, http_problem_t *problem);
/* messages[] of a chat body into request->messages, with tools and template options. */
xp_status_t http_api_parse_messages(http_api_request_t *request, http_problem_t *problem);
/* stop: a string or an array of strings. */
xp_status_t http_api_stops(const json_t *value, const char *param, engine_sampling_t *sampling,
                           http_problem_t *problem);
xp_status_t http_api_stop_ids(const json_t *value, const char *param, engine_sampling_t *sampling,
                              http_problem_t *problem);
/* Fills request->prompts from a string, strings, ids or arrays of ids. */
xp_status_t http_api_prompts(http_api_request_t *request, const json_t *value, const char *param,
                             http_problem_t *problem);
/* The reader of /generate (http_api_generate.c); request->root is set. */
xp_status_t http_api_parse_generate(http_api_request_t *request, http_problem_t *problem);
#endif
