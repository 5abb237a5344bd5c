/* SPDX-License-Identifier: MIT */
/*
 * The native Instance's HTTP interface: OpenAI's and SGLang's paths over one engine.
 *
 * Runs on the thread of `base` and is the one consumer of the engine's events. Prompts are
 * tokenized on that thread. A client that disconnects, half-closes while it waits, or does not read
 * its stream is cancelled in the engine at once.
 */
#ifndef XPOOL_HTTP_INSTANCE_SERVER_H
#define XPOOL_HTTP_INSTANCE_SERVER_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "engine/engine.h"
#include "text/chat_template.h"

struct event_base;
typedef struct http_instance http_instance_t;

/* Strings are copied; engine and chat_template must outlive the server. 0 takes the default. */
typedef struct http_instance_config {
    const char *host; /* NULL: 127.0.0.1 */
    uint16_t port;    /* 0 = any free one */
    const char *model_id;
    engine_t *engine;
    const chat_template_t *chat_template; /* NULL: chat requests are refused with the reason */
    const char *chat_template_reason;
    int64_t created;          /* Unix seconds, reported by /v1/models */
    uint32_t max_connections; /* 1024 */
    uint32_t max_requests;    /* open at once, else 429: 512 */
    size_t max_body_bytes;    /* 8 MiB */
    size_t max_output_bytes;  /* unsent bytes of a stream before the client is dropped: 1 MiB */
    uint32_t head_timeout_ms, body_timeout_ms, idle_timeout_ms, write_timeout_ms;
} http_instance_config_t;

xp_status_t http_instance_create(const http_instance_config_t *config, struct event_base *base,
                                 http_instance_t **instance_out);
/* Closes all connections and cancels what is open. Before engine_destroy(). Accepts NULL. */
void http_instance_destroy(http_instance_t *instance);
uint16_t http_instance_port(const http_instance_t *instance);
/* New requests get 503 from now on; open ones go on. */
void http_instance_quiesce(http_instance_t *instance);
/* Requests being answered, answers not wholly sent to their client yet, and cancelled requests
 * whose last engine event has not come. */
uint32_t http_instance_open_requests(const http_instance_t *instance);
#endif
