/* SPDX-License-Identifier: MIT */
/*
 * The gateway: one door that routes requests by `model` to the Instances.
 *
 * Runs on the thread of `base`; every function here is called on that thread. Answers are passed on
 * byte for byte as they come, with bounded buffers in both directions. A client that leaves takes
 * its backend connection with it; a backend that dies ends the client's answer with an error.
 */
#ifndef XPOOL_HTTP_GATEWAY_H
#define XPOOL_HTTP_GATEWAY_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

#define HTTP_GATEWAY_MAX_MODELS 64
#define HTTP_GATEWAY_MAX_ID     96
#define HTTP_GATEWAY_MAX_REASON 256

struct event_base;
typedef struct http_gateway http_gateway_t;

/* 0 takes the default. */
typedef struct http_gateway_config {
    const char *host;             /* NULL: 127.0.0.1 */
    uint16_t port;                /* 0 = any free one */
    uint32_t max_connections;     /* 1024 */
    size_t max_body_bytes;        /* 8 MiB */
    size_t max_output_bytes;      /* unsent to one client before its backend is held up: 256 KiB */
    uint32_t connect_timeout_ms;  /* 2 s */
    uint32_t response_timeout_ms; /* a backend that sends nothing: 10 min */
    uint32_t retry_delay_ms;      /* before the one retry of a refused connection: 50 ms */
    uint32_t gone_timeout_ms;     /* open requests of a backend that went down: 1 s */
    uint32_t head_timeout_ms, body_timeout_ms, idle_timeout_ms, write_timeout_ms;
} http_gateway_config_t;

typedef enum http_backend_state {
    HTTP_BACKEND_UP = 0,
    HTTP_BACKEND_STARTING,
    HTTP_BACKEND_DOWN,
} http_backend_state_t;

typedef struct http_gateway_model_stats {
    char model[HTTP_GATEWAY_MAX_ID];
    http_backend_state_t state;
    uint64_t requests, errors; /* errors: backend unreachable, broken or 5xx */
    uint32_t open;
} http_gateway_model_stats_t;

typedef struct http_gateway_stats {
    uint64_t requests, errors, disconnects, retries;
    uint32_t open, connections;
    uint32_t model_count;
    http_gateway_model_stats_t models[HTTP_GATEWAY_MAX_MODELS];
} http_gateway_stats_t;

xp_status_t http_gateway_create(const http_gateway_config_t *config, struct event_base *base,
                                http_gateway_t **gateway_out);
void http_gateway_destroy(http_gateway_t *gateway); /* accepts NULL */
uint16_t http_gateway_port(const http_gateway_t *gateway);

/* Adds a model or changes where and how it is. `host` is an address or a name (resolved here and
 * now); NULL and port 0 are allowed while it is not UP. `reason` (may be NULL) is told to clients
 * while it is not UP. Open requests go on; those of a backend that goes DOWN have gone_timeout_ms
 * for what its server still sends, since that server may outlive its engine by seconds.
 * XP_NO_MEMORY past HTTP_GATEWAY_MAX_MODELS. */
xp_status_t http_gateway_set_backend(http_gateway_t *gateway, const char *model_id,
                                     const char *host, uint16_t port, http_backend_state_t state,
                                     const char *reason);
/* The model becomes unknown; its open requests go on. Unknown ids are ignored. */
void http_gateway_remove_backend(http_gateway_t *gateway, const char *model_id);

/* Every model is down for good, with this reason; open requests have `milliseconds` for what their
 * server still sends and are then told so. */
void http_gateway_fail(http_gateway_t *gateway, const char *reason, uint32_t milliseconds);
/* New requests get 503 from now on; open ones go on. */
void http_gateway_quiesce(http_gateway_t *gateway);
/* Requests being answered, and answers not wholly sent to their client yet. */
uint32_t http_gateway_open_requests(const http_gateway_t *gateway);
void http_gateway_stats(const http_gateway_t *gateway, http_gateway_stats_t *stats_out);
#endif
