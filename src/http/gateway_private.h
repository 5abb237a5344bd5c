/* SPDX-License-Identifier: MIT */
/*
 * The gateway's backends and exchanges. An exchange is one client request being answered by one
 * backend over a connection of its own. Everything belongs to the HTTP thread.
 */
#ifndef XPOOL_HTTP_GATEWAY_PRIVATE_H
#define XPOOL_HTTP_GATEWAY_PRIVATE_H

#include <sys/queue.h>
#include <sys/socket.h>

#include "http/gateway.h"
#include "http/http_route.h"
#include "http/http_server.h"

#define EXCHANGE_MAGIC       0x78636867u
#define EXCHANGE_HEAD_BYTES  (32u * 1024u)
#define EXCHANGE_MAX_INTERIM 4u /* 1xx answers before the real one */

/* Counted: the table holds one reference, each exchange one, so that counters of a removed model
 * stay valid for what is still open. */
typedef struct gateway_backend {
    TAILQ_ENTRY(gateway_backend) entry;
    uint32_t references;
    char model[HTTP_GATEWAY_MAX_ID];
    char host[128]; /* as it goes into the Host header, with the port */
    char reason[HTTP_GATEWAY_MAX_REASON];
    struct sockaddr_storage address;
    socklen_t address_length;
    http_backend_state_t state;
    int64_t created;
    uint64_t requests, errors;
    uint32_t open;
} gateway_backend_t;

typedef enum exchange_state {
    EXCHANGE_CONNECTING = 0,
    EXCHANGE_HEAD,
    EXCHANGE_BODY,
} exchange_state_t;

typedef enum exchange_framing {
    FRAMING_NONE = 0,
    FRAMING_LENGTH,
    FRAMING_CHUNKED,
    FRAMING_CLOSE,
} exchange_framing_t;

typedef struct gateway_exchange {
    uint32_t magic;
    TAILQ_ENTRY(gateway_exchange) entry;
    http_gateway_t *gateway;
    gateway_backend_t *backend;
    http_request_t *request;
    struct bufferevent *bev;
    struct event *timer; /* connect timeout, then the retry's delay */
    exchange_state_t state;
    exchange_framing_t framing;
    bool retried, retry_waits;
    bool events; /* the answer is an SSE stream */
    bool paused; /* the client's buffer is full */
    bool gone;   /* its backend went down while it was open */
    uint32_t interim;
    char last[2]; /* the last two bytes passed on: an event ends in "\n\n" */
    size_t scanned;
    uint64_t remaining;
    http_chunk_decoder_t chunk;
} gateway_exchange_t;

struct http_gateway {
    http_gateway_config_t config;
    struct event_base *base;
    http_server_t *server;
    TAILQ_HEAD(gateway_backends, gateway_backend) backends;
    TAILQ_HEAD(gateway_exchanges, gateway_exchange) exchanges;
    struct event *gone_timer; /* ends the exchanges that are `gone` */
    uint32_t backend_count, open;
    uint64_t requests, errors, disconnects, retries;
    http_text_t text; /* one answer, reused */
    bool quiescing;
};

/* gateway_exchange.c: takes the request over. */
void gateway_exchange_start(http_gateway_t *gateway, gateway_backend_t *backend,
                            http_request_t *request);
/* The backend went down: what it still sends is passed on for a while, then its exchanges end. */
void gateway_exchanges_gone(http_gateway_t *gateway, const gateway_backend_t *backend);
void gateway_exchanges_end_gone(http_gateway_t *gateway);
void gateway_backend_release(gateway_backend_t *backend);
#endif
