/* SPDX-License-Identifier: MIT */
/*
 * An HTTP/1.1 server over libevent's buffers, shared by the native Instance and the gateway.
 *
 * It exists beside evhttp because the interface needs what evhttp does not offer: errors as JSON
 * with the right status, a deadline over a whole head or body, a bound on what a slow reader may
 * leave unsent, and a call back the moment a waiting client goes away.
 *
 * One thread, the one that runs `base`, owns everything here. A connection handles one request at a
 * time; pipelined ones wait in its input buffer, which is bounded. A request object is valid from
 * on_request until the application has answered it (http_request_reply, http_request_stream_end,
 * http_request_abort) or its on_close was called, whichever comes first.
 */
#ifndef XPOOL_HTTP_HTTP_SERVER_H
#define XPOOL_HTTP_HTTP_SERVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "http/http_error.h"
#include "http/http_message.h"

struct event_base;
typedef struct http_server http_server_t;
typedef struct http_request http_request_t;

/* 0 in a number takes the default given beside it. */
typedef struct http_server_config {
    const char *host;            /* address to listen on; NULL: 127.0.0.1 */
    uint16_t port;               /* 0 = any free one */
    uint32_t max_connections;    /* 1024 */
    size_t max_head_bytes;       /* 32 KiB */
    size_t max_body_bytes;       /* 8 MiB */
    size_t max_total_body_bytes; /* of all connections: 128 MiB */
    size_t max_output_bytes;     /* unsent bytes of one stream: 1 MiB */
    uint32_t head_timeout_ms;    /* from the first byte to the head's end: 10 s */
    uint32_t body_timeout_ms;    /* from the head's end to the body's end: 60 s */
    uint32_t idle_timeout_ms;    /* between requests: 75 s */
    uint32_t write_timeout_ms;   /* no progress in sending: 60 s */
    void (*on_request)(void *context, http_request_t *request);
    void *context;
} http_server_config_t;

typedef struct http_server_stats {
    uint32_t connections, max_connections;
    uint64_t accepted, refused; /* refused: over max_connections */
    uint64_t requests, bad_requests;
    uint64_t body_bytes;   /* of requests being held now */
    uint64_t slow_readers; /* streams ended because the client did not read */
} http_server_stats_t;

xp_status_t http_server_create(const http_server_config_t *config, struct event_base *base,
                               http_server_t **server_out);
/* Closes every connection; open requests get their on_close. Accepts NULL. */
void http_server_destroy(http_server_t *server);
uint16_t http_server_port(const http_server_t *server);
void http_server_stats(const http_server_t *server, http_server_stats_t *stats_out);
/* Requests being handled, and answers of which bytes wait for their client. When this is 0 the
 * process may end without cutting an answer off: what is left is the kernel's to deliver. */
uint32_t http_server_open_answers(const http_server_t *server);
/* After the response in progress every connection is closed. */
void http_server_quiesce(http_server_t *server);

/* The request. */
const http_head_t *http_request_head(const http_request_t *request);
const char *http_request_path(const http_request_t *request); /* decoded, without the query */
http_slice_t http_request_query(const http_request_t *request);
http_slice_t http_request_body(const http_request_t *request);
bool http_request_is_head(const http_request_t *request);

/* Told once when the client has gone (or is thrown out) before the answer was complete; the request
 * is invalid afterwards. on_drain: unsent bytes fell below a quarter of max_output_bytes. Either
 * may be NULL. */
void http_request_watch(http_request_t *request, void (*on_close)(void *context),
                        void (*on_drain)(void *context), void *context);

/* Answers at once. `headers`: further header lines, each with CRLF; NULL or "" for none. */
void http_request_reply(http_request_t *request, int status, const char *content_type,
                        const char *headers, const char *body, size_t length);
void http_request_fail(http_request_t *request, const http_problem_t *problem);

/* Answers piece by piece; chunked for HTTP/1.1, ended by close for HTTP/1.0. `length` >= 0
 * announces a Content-Length instead. `content_type` may be NULL when `headers` has it. */
void http_request_stream_begin(http_request_t *request, int status, const char *content_type,
                               const char *headers, int64_t length);
/* False when more than max_output_bytes would wait unsent: nothing was queued then, and the caller
 * should give the client up (http_request_abort) or stop producing until on_drain. */
bool http_request_stream_write(http_request_t *request, const char *bytes, size_t length);
/* False when http_request_stream_write() would refuse; on_drain will be called then. */
bool http_request_writable(http_request_t *request);
size_t http_request_unsent(const http_request_t *request);
void http_request_stream_end(http_request_t *request);
/* Ends the connection after what was written, without finishing the answer, so that the client sees
 * it is incomplete. No on_close. */
void http_request_abort(http_request_t *request);
/* Ends the connection at once and counts the client as a slow reader. No on_close. */
void http_request_abort_slow(http_request_t *request);
#endif
