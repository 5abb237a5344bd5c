/* SPDX-License-Identifier: MIT */
/*
 * Connections of the HTTP server: reading requests, writing answers, deadlines and limits.
 *
 * Owns every connection and the bytes of the request each is handling. Runs only on the thread of
 * its event_base. It never looks into a body, never blocks, and never frees a connection while one
 * of its own functions may still be on the stack: dead connections are freed from an event of their
 * own.
 */
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

#include "http/http_server_private.h"

static void connection_process(connection_t *connection);

static void timer_set(connection_t *connection, uint32_t milliseconds)
{
    struct timeval delay = {milliseconds / 1000, (milliseconds % 1000) * 1000};
    event_add(connection->timer, &delay);
}

static void request_release(connection_t *connection)
{
    http_request_t *request = &connection->request;
    connection->server->stats.body_bytes -= request->body_capacity;
    free(request->head_text);
    free(request->path);
    free(request->body);
    memset(request, 0, sizeof(*request));
    request->connection = connection;
}

void http_connection_kill(connection_t *connection)
{
    XP_ASSERT(connection->magic == CONNECTION_MAGIC);
    if (connection->state == CONNECTION_DEAD)
        return;
    http_server_t *server = connection->server;
    bool handling = connection->state == CONNECTION_HANDLING;
    connection->state = CONNECTION_DEAD;
    event_del(connection->timer);
    bufferevent_disable(connection->bev, EV_READ | EV_WRITE);
    bufferevent_setcb(connection->bev, NULL, NULL, NULL, NULL);
    if (connection->previous)
        connection->previous->next = connection->next;
    else
        server->connections = connection->next;
    if (connection->next)
        connection->next->previous = connection->previous;
    server->stats.connections--;
    connection->previous = NULL;
    connection->next = server->dead;
    server->dead = connection;
    event_active(server->reap, EV_TIMEOUT, 0);
    void (*on_close)(void *) = connection->request.on_close;
    if (handling && on_close)
        on_close(connection->request.context);
}

void http_connection_free(connection_t *connection)
{
    request_release(connection);
    event_free(connection->timer);
    bufferevent_free(connection->bev);
    connection->magic = 0;
    free(connection);
}

static struct evbuffer *connection_output(const connection_t *connection)
{
    return bufferevent_get_output(connection->bev);
}

/* Ends the connection once everything queued has been sent. */
static void connection_finish(connection_t *connection)
{
    connection->state = CONNECTION_FLUSHING;
    bufferevent_setwatermark(connection->bev, EV_WRITE, 0, 0);
    event_del(connection->timer);
    if (evbuffer_get_length(connection_output(connection)))
        return;
    if (!connection->linger) {
        http_connection_kill(connection);
        return;
    }
    connection->state = CONNECTION_LINGERING;
    shutdown(bufferevent_getfd(connection->bev), SHUT_WR);
    timer_set(connection, CONNECTION_LINGER_MS);
}

/* The answer is complete: next request, or the end. */
static void request_complete(connection_t *connection)
{
    request_release(connection);
    if (!connection->keep_alive || connection->server->quiescing) {
        connection_finish(connection);
        return;
    }
    connection->state = CONNECTION_HEAD;
    connection->scanned = 0;
    connection->idle = true;
    timer_set(connection, connection->server->config.idle_timeout_ms);
    /* Input that waited raises no further read event by itself. */
    if (!connection->in_process)
        bufferevent_trigger(connection->bev, EV_READ,
                            BEV_TRIG_IGNORE_WATERMARKS | BEV_TRIG_DEFER_CALLBACKS);
}

static void write_head(http_request_t *request, int status, const char *content_type,
                       const char *headers, int64_t length, bool chunked)
{
    connection_t *connection = request->connection;
    struct evbuffer *output = connection_output(connection);
    evbuffer_add_printf(output, "HTTP/1.1 %d %s\r\n", status, http_status_text(status));
    if (content_type)
        evbuffer_add_printf(output, "Content-Type: %s\r\n", content_type);
    if (headers && headers[0])
        evbuffer_add(output, headers, strlen(headers));
    if (chunked)
        evbuffer_add_printf(output, "Transfer-Encoding: chunked\r\n");
    else if (length >= 0)
        evbuffer_add_printf(output, "Content-Length: %lld\r\n", (long long)length);
    if (!connection->keep_alive || connection->server->quiescing)
        evbuffer_add_printf(output, "Connection: close\r\n");
    evbuffer_add(output, "\r\n", 2);
}

void http_request_reply(http_request_t *request, int status, const char *content_type,
                        const char *headers, const char *body, size_t length)
{
    connection_t *connection = request->connection;
    XP_ASSERT(connection->state == CONNECTION_HANDLING && !request->streaming);
    write_head(request, status, content_type, headers, (int64_t)length, false);
    if (!request->is_head)
        evbuffer_add(connection_output(connection), body, length);
    request_complete(connection);
}

void http_request_fail(http_request_t *request, const http_problem_t *problem)
{
    http_text_t text;
    http_text_init(&text, 64 * 1024);
    http_problem_write(problem, &text);
    http_text_append(&text, "\n", 1);
    http_request_reply(request, problem->status, "application/json",
                       http_problem_headers(problem->status), text.buf.data ? text.buf.data : "",
                       text.buf.length);
    http_text_fini(&text);
}

void http_request_stream_begin(http_request_t *request, int status, const char *content_type,
                               const char *headers, int64_t length)
{
    connection_t *connection = request->connection;
    XP_ASSERT(connection->state == CONNECTION_HANDLING && !request->streaming);
    request->streaming = true;
    request->stream_chunked = length < 0 && request->head.minor == 1;
    if (length < 0 && !request->stream_chunked)
        connection->keep_alive = false;
    write_head(request, status, content_type, headers, length, request->stream_chunked);
}

size_t http_request_unsent(const http_request_t *request)
{
    return evbuffer_get_length(connection_output(request->connection));
}

bool http_request_writable(http_request_t *request)
{
    connection_t *connection = request->connection;
    if (http_request_unsent(request) <= connection->server->config.max_output_bytes)
        return true;
    connection->drain_wanted = true;
    return false;
}

bool http_request_stream_write(http_request_t *request, const char *bytes, size_t length)
{
    connection_t *connection = request->connection;
    XP_ASSERT(connection->state == CONNECTION_HANDLING && request->streaming);
    if (!length || request->is_head)
        return true;
    if (!http_request_writable(request))
        return false;
    struct evbuffer *output = connection_output(connection);
    if (request->stream_chunked)
        evbuffer_add_printf(output, "%zx\r\n", length);
    evbuffer_add(output, bytes, length);
    if (request->stream_chunked)
        evbuffer_add(output, "\r\n", 2);
    return true;
}

void http_request_stream_end(http_request_t *request)
{
    connection_t *connection = request->connection;
    XP_ASSERT(connection->state == CONNECTION_HANDLING && request->streaming);
    if (request->stream_chunked && !request->is_head)
        evbuffer_add(connection_output(connection), "0\r\n\r\n", 5);
    request_complete(connection);
}

void http_request_abort(http_request_t *request)
{
    connection_t *connection = request->connection;
    XP_ASSERT(connection->state == CONNECTION_HANDLING);
    request_release(connection);
    connection_finish(connection);
}

void http_request_abort_slow(http_request_t *request)
{
    connection_t *connection = request->connection;
    XP_ASSERT(connection->state == CONNECTION_HANDLING);
    connection->server->stats.slow_readers++;
    request->on_close = NULL;
    http_connection_kill(connection);
}

void http_request_watch(http_request_t *request, void (*on_close)(void *context),
                        void (*on_drain)(void *context), void *context)
{
    request->on_close = on_close;
    request->on_drain = on_drain;
    request->context = context;
}

const http_head_t *http_request_head(const http_request_t *request)
{
    return &request->head;
}

const char *http_request_path(const http_request_t *request)
{
    return request->path;
}

http_slice_t http_request_query(const http_request_t *request)
{
    return request->query;
}

http_slice_t http_request_body(const http_request_t *request)
{
    return (http_slice_t){request->body ? request->body : "", request->body_length};
}

bool http_request_is_head(const http_request_t *request)
{
    return request->is_head;
}

/* Refuses what cannot become a request and ends the connection, since where the next message would
 * begin is unknown or not worth waiting for. */
static void connection_refuse(connection_t *connection, int status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static void connection_refuse(connection_t *connection, int status, const char *format, ...)
{
    http_problem_t problem = {.status = status};
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(problem.message, sizeof(problem.message), format, arguments);
    va_end(arguments);
    connection->server->stats.bad_requests++;
    connection->state = CONNECTION_HANDLING;
    connection->request.on_close = NULL;
    connection->keep_alive = false;
    connection->linger = true;
    http_request_fail(&connection->request, &problem);
}

static xp_status_t request_set_target(http_request_t *request)
{
    http_slice_t target = request->head.target;
    if (target.length > 7 && !strncasecmp(target.data, "http://", 7)) {
        /* Absolute form, which clients of a proxy send. */
        const char *slash = memchr(target.data + 7, '/', target.length - 7);
        target.length = slash ? target.length - (size_t)(slash - target.data) : 1;
        target.data = slash ? slash : "/";
    }
    const char *question = memchr(target.data, '?', target.length);
    size_t path_length = question ? (size_t)(question - target.data) : target.length;
    if (question)
        request->query = (http_slice_t){question + 1, target.length - path_length - 1};
    request->path = malloc(path_length + 1);
    if (!request->path)
        return xp_fail(XP_NO_MEMORY, "no memory for a path");
    return http_path_decode((http_slice_t){target.data, path_length}, request->path,
                            path_length + 1);
}

static bool body_reserve(connection_t *connection, size_t needed)
{
    http_request_t *request = &connection->request;
    http_server_t *server = connection->server;
    if (needed <= request->body_capacity)
        return true;
    size_t capacity = request->body_capacity ? request->body_capacity * 2 : 4096;
    if (capacity < needed)
        capacity = needed;
    if (capacity > server->config.max_body_bytes)
        capacity = server->config.max_body_bytes;
    uint64_t total = server->stats.body_bytes - request->body_capacity + capacity;
    char *body =
        total > server->config.max_total_body_bytes ? NULL : realloc(request->body, capacity);
    if (!body) {
        connection_refuse(connection, 503, "too many request bodies are being held");
        return false;
    }
    server->stats.body_bytes = total;
    request->body = body;
    request->body_capacity = capacity;
    return true;
}

/* One head is whole at the start of the input. False when the connection cannot go on. */
static bool connection_take_head(connection_t *connection, struct evbuffer *input, size_t length)
{
    http_server_t *server = connection->server;
    http_request_t *request = &connection->request;
    connection->idle = false;
    request->head_text = malloc(length);
    if (!request->head_text) {
        connection_refuse(connection, 503, "no memory");
        return false;
    }
    evbuffer_remove(input, request->head_text, length);
    xp_status_t status = http_head_parse_request(request->head_text, length, &request->head);
    if (status == XP_OK)
        status = request_set_target(request);
    if (status != XP_OK) {
        connection_refuse(connection, status == XP_UNSUPPORTED ? 501 : 400,
                          "not a valid HTTP request: %s", xp_error_last()->text);
        return false;
    }
    request->is_head = http_slice_equals(request->head.method, "HEAD");
    connection->keep_alive = !request->head.close;
    if (request->head.has_length && request->head.length > server->config.max_body_bytes) {
        connection_refuse(connection, 413, "the body has %llu bytes; the limit is %zu",
                          (unsigned long long)request->head.length, server->config.max_body_bytes);
        return false;
    }
    connection->state = CONNECTION_BODY;
    memset(&connection->chunk, 0, sizeof(connection->chunk));
    bool has_body = request->head.chunked || (request->head.has_length && request->head.length);
    if (has_body && request->head.expect_continue && !evbuffer_get_length(input)) {
        static const char go_on[] = "HTTP/1.1 100 Continue\r\n\r\n";
        evbuffer_add(connection_output(connection), go_on, sizeof(go_on) - 1);
    }
    timer_set(connection, server->config.body_timeout_ms);
    return true;
}

/* Moves bytes from the input into the body. True when the body is whole. */
static bool connection_take_body(connection_t *connection, struct evbuffer *input)
{
    http_server_t *server = connection->server;
    http_request_t *request = &connection->request;
    if (!request->head.chunked) {
        size_t want = request->head.has_length ? (size_t)request->head.length : 0;
        size_t have = evbuffer_get_length(input);
        size_t part = want - request->body_length < have ? want - request->body_length : have;
        /* Grows with what arrives, not with what was announced. */
        if (part && !body_reserve(connection, request->body_length + part))
            return false;
        if (part)
            evbuffer_remove(input, request->body + request->body_length, part);
        request->body_length += part;
        return request->body_length == want;
    }
    while (!connection->chunk.done) {
        size_t have = evbuffer_get_contiguous_space(input), used;
        if (!have)
            return false;
        http_slice_t payload;
        const char *data = (const char *)evbuffer_pullup(input, (ssize_t)have);
        if (http_chunk_decode(&connection->chunk, data, have, &used, &payload) != XP_OK) {
            connection_refuse(connection, 400, "not a valid HTTP request: %s",
                              xp_error_last()->text);
            return false;
        }
        /* The size that a chunk announces counts before its bytes are there. */
        if (payload.length + connection->chunk.remaining >
            server->config.max_body_bytes - request->body_length) {
            connection_refuse(connection, 413, "the body is longer than the limit of %zu bytes",
                              server->config.max_body_bytes);
            return false;
        }
        if (payload.length) {
            if (!body_reserve(connection, request->body_length + payload.length))
                return false;
            memcpy(request->body + request->body_length, payload.data, payload.length);
            request->body_length += payload.length;
        }
        evbuffer_drain(input, used);
    }
    return true;
}

/* True when a whole head was taken. */
static bool connection_read_head(connection_t *connection, struct evbuffer *input)
{
    http_server_t *server = connection->server;
    /* Empty lines before a request are forgiven (RFC 9112, 2.2). */
    while (connection->idle && evbuffer_get_length(input)) {
        char first = *(const char *)evbuffer_pullup(input, 1);
        if (first != '\r' && first != '\n')
            break;
        evbuffer_drain(input, 1);
    }
    size_t have = evbuffer_get_length(input);
    if (!have)
        return false;
    if (connection->idle) {
        connection->idle = false;
        timer_set(connection, server->config.head_timeout_ms);
    }
    if (have > server->config.max_head_bytes)
        have = server->config.max_head_bytes;
    const char *data = (const char *)evbuffer_pullup(input, (ssize_t)have);
    size_t length = http_head_find(data, have, &connection->scanned);
    if (length)
        return connection_take_head(connection, input, length);
    if (have == server->config.max_head_bytes)
        connection_refuse(connection, 431, "the request's headers are longer than %zu bytes",
                          server->config.max_head_bytes);
    return false;
}

/* libevent's own high watermark is of no use here: while a callback leaves the input full, libevent
 * calls it again and again. A client that has sent this much ahead is seen to leave only when it is
 * written to. */
static void connection_bound_input(connection_t *connection, size_t length)
{
    bool full = length >= CONNECTION_INPUT_BYTES;
    if (full == connection->input_full || connection->state == CONNECTION_DEAD)
        return;
    connection->input_full = full;
    if (full)
        bufferevent_disable(connection->bev, EV_READ);
    else
        bufferevent_enable(connection->bev, EV_READ);
}

static void connection_process(connection_t *connection)
{
    http_server_t *server = connection->server;
    struct evbuffer *input = bufferevent_get_input(connection->bev);
    if (connection->in_process)
        return;
    connection->in_process = true;
    /* Each turn consumes a request from an input of bounded size; a client that pipelines without
     * reading is held up by its own unsent answers. */
    for (;;) {
        if (connection->state == CONNECTION_HEAD) {
            if (evbuffer_get_length(connection_output(connection)) >
                server->config.max_output_bytes) {
                connection->drain_wanted = true;
                break;
            }
            if (!connection_read_head(connection, input))
                break;
        }
        if (connection->state != CONNECTION_BODY || !connection_take_body(connection, input))
            break;
        event_del(connection->timer);
        connection->state = CONNECTION_HANDLING;
        server->stats.requests++;
        server->config.on_request(server->config.context, &connection->request);
        if (connection->state != CONNECTION_HEAD)
            break;
    }
    if (connection->state == CONNECTION_LINGERING || connection->state == CONNECTION_FLUSHING) {
        connection->lingered += evbuffer_get_length(input);
        evbuffer_drain(input, evbuffer_get_length(input));
        if (connection->lingered > CONNECTION_LINGER_BYTES)
            http_connection_kill(connection);
    }
    connection->in_process = false;
    connection_bound_input(connection, evbuffer_get_length(input));
}

static void connection_on_read(struct bufferevent *bev, void *context)
{
    connection_process(context);
}

static void connection_on_write(struct bufferevent *bev, void *context)
{
    connection_t *connection = context;
    if (connection->state == CONNECTION_FLUSHING) {
        connection_finish(connection);
        return;
    }
    if (!connection->drain_wanted)
        return;
    connection->drain_wanted = false;
    if (connection->state == CONNECTION_HEAD)
        connection_process(connection);
    else if (connection->state == CONNECTION_HANDLING && connection->request.on_drain)
        connection->request.on_drain(connection->request.context);
}

static void connection_on_event(struct bufferevent *bev, short what, void *context)
{
    connection_t *connection = context;
    /* A client that closes its sending side after a request that is answered already still gets the
     * answer. */
    bool pending = evbuffer_get_length(connection_output(connection)) > 0;
    if ((what & BEV_EVENT_EOF) && pending &&
        (connection->state == CONNECTION_HEAD || connection->state == CONNECTION_FLUSHING)) {
        connection->linger = false;
        connection_finish(connection);
        return;
    }
    if (what & BEV_EVENT_TIMEOUT)
        connection->server->stats.slow_readers++;
    http_connection_kill(connection);
}

static void connection_on_timer(evutil_socket_t fd, short what, void *context)
{
    connection_t *connection = context;
    switch (connection->state) {
    case CONNECTION_HEAD:
        if (connection->idle)
            http_connection_kill(connection);
        else
            connection_refuse(connection, 408, "the request's headers took longer than %u ms",
                              connection->server->config.head_timeout_ms);
        break;
    case CONNECTION_BODY:
        connection_refuse(connection, 408, "the request's body took longer than %u ms",
                          connection->server->config.body_timeout_ms);
        break;
    case CONNECTION_LINGERING:
        http_connection_kill(connection);
        break;
    default:
        break;
    }
}

bool http_connection_is_idle(const connection_t *connection)
{
    return connection->state == CONNECTION_HEAD && connection->idle &&
           !evbuffer_get_length(connection_output(connection));
}

bool http_connection_is_answering(const connection_t *connection)
{
    return connection->state == CONNECTION_HANDLING ||
           evbuffer_get_length(connection_output(connection)) > 0;
}

void http_connection_start(http_server_t *server, evutil_socket_t fd)
{
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    connection_t *connection = calloc(1, sizeof(*connection));
    struct bufferevent *bev =
        connection ? bufferevent_socket_new(server->base, fd, BEV_OPT_CLOSE_ON_FREE) : NULL;
    struct event *timer = bev ? evtimer_new(server->base, connection_on_timer, connection) : NULL;
    if (!timer) {
        if (bev)
            bufferevent_free(bev);
        else
            close(fd);
        free(connection);
        return;
    }
    connection->magic = CONNECTION_MAGIC;
    connection->server = server;
    connection->bev = bev;
    connection->timer = timer;
    connection->idle = true;
    connection->request.connection = connection;
    connection->next = server->connections;
    if (connection->next)
        connection->next->previous = connection;
    server->connections = connection;
    server->stats.connections++;
    bufferevent_setcb(bev, connection_on_read, connection_on_write, connection_on_event,
                      connection);
    bufferevent_setwatermark(bev, EV_WRITE, server->config.max_output_bytes / 4, 0);
    struct timeval write_timeout = {server->config.write_timeout_ms / 1000,
                                    (server->config.write_timeout_ms % 1000) * 1000};
    bufferevent_set_timeouts(bev, NULL, &write_timeout);
    timer_set(connection, server->config.head_timeout_ms);
    bufferevent_enable(bev, EV_READ | EV_WRITE);
}
