/* SPDX-License-Identifier: MIT */
/* The HTTP server's connections, shared by http_server.c (listening) and http_connection.c. */
#ifndef XPOOL_HTTP_HTTP_SERVER_PRIVATE_H
#define XPOOL_HTTP_HTTP_SERVER_PRIVATE_H

#include <event2/buffer.h>
#include <event2/bufferevent.h>
#include <event2/event.h>

#include "http/http_server.h"

#define CONNECTION_MAGIC        0x68747470u
#define CONNECTION_INPUT_BYTES  (64u * 1024u) /* of pipelined requests; above max_head_bytes */
#define CONNECTION_LINGER_MS    2000u
#define CONNECTION_LINGER_BYTES (16u << 20) /* discarded at most after an early refusal */

typedef enum connection_state {
    CONNECTION_HEAD = 0, /* waiting for or reading a head */
    CONNECTION_BODY,
    CONNECTION_HANDLING, /* the application has the request */
    CONNECTION_FLUSHING, /* the last answer is on its way out, then the connection ends */
    CONNECTION_LINGERING,
    CONNECTION_DEAD,
} connection_state_t;

typedef struct connection connection_t;

struct http_request {
    connection_t *connection;
    http_head_t head;
    char *head_text; /* what head's slices point into */
    char *path;
    http_slice_t query;
    char *body;
    size_t body_length, body_capacity;
    bool is_head;
    bool streaming, stream_chunked;
    void (*on_close)(void *context);
    void (*on_drain)(void *context);
    void *context;
};

struct connection {
    uint32_t magic;
    http_server_t *server;
    connection_t *next, *previous; /* in the server's list, newest first */
    struct bufferevent *bev;
    struct event *timer;
    connection_state_t state;
    bool idle; /* in HEAD with no byte of a head yet */
    bool keep_alive;
    bool in_process; /* connection_process() is on the stack */
    bool linger;     /* discard input before closing, so that the refusal is not lost to a reset */
    bool drain_wanted;
    bool input_full; /* reading is off: enough pipelined input waits */
    size_t scanned, lingered;
    http_chunk_decoder_t chunk;
    http_request_t request;
};

struct http_server {
    http_server_config_t config;
    struct event_base *base;
    struct evconnlistener *listener;
    struct event *reap, *resume;
    connection_t *connections, *dead;
    uint16_t port;
    bool quiescing;
    uint32_t accept_errors;
    http_server_stats_t stats;
};

/* Makes a connection of an accepted socket and starts to read. Closes the socket on failure. */
void http_connection_start(http_server_t *server, evutil_socket_t fd);
/* Takes the connection out of service and tells the application; memory goes in the reap event. */
void http_connection_kill(connection_t *connection);
void http_connection_free(connection_t *connection);
/* True while it waits between requests with nothing left to send. */
bool http_connection_is_idle(const connection_t *connection);
/* True while a request is handled or bytes of an answer wait to be sent. */
bool http_connection_is_answering(const connection_t *connection);
#endif
