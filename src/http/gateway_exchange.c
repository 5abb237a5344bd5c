/* SPDX-License-Identifier: MIT */
/*
 * Exchanges: sending a request to a backend and passing its answer on as it comes.
 *
 * Owns the connection to the backend. Runs on the HTTP thread. It never holds an answer back, never
 * changes its bytes, and never sends a request twice after a byte of it was sent: only a connection
 * that could not be made is tried once more.
 */
#include <event2/buffer.h>
#include <event2/bufferevent.h>
#include <event2/event.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "http/gateway_private.h"

static void exchange_connect(gateway_exchange_t *exchange);

void gateway_backend_release(gateway_backend_t *backend)
{
    if (--backend->references == 0)
        free(backend);
}

static void exchange_close_backend(gateway_exchange_t *exchange)
{
    if (!exchange->bev)
        return;
    struct evbuffer *output = bufferevent_get_output(exchange->bev);
    bufferevent_setcb(exchange->bev, NULL, NULL, NULL, NULL);
    bufferevent_disable(exchange->bev, EV_READ | EV_WRITE);
    /* The body in it belongs to the client's request, which may be freed before libevent lets go.
     */
    evbuffer_drain(output, evbuffer_get_length(output));
    bufferevent_free(exchange->bev);
    exchange->bev = NULL;
}

/* Everything but the client's request, which is answered, aborted or gone. */
static void exchange_free(gateway_exchange_t *exchange)
{
    http_gateway_t *gateway = exchange->gateway;
    XP_ASSERT(exchange->magic == EXCHANGE_MAGIC);
    exchange_close_backend(exchange);
    event_free(exchange->timer);
    TAILQ_REMOVE(&gateway->exchanges, exchange, entry);
    gateway->open--;
    exchange->backend->open--;
    gateway_backend_release(exchange->backend);
    exchange->magic = 0;
    free(exchange);
}

/* Ends the exchange and gives the request back for its last words. */
static http_request_t *exchange_finish(gateway_exchange_t *exchange)
{
    http_request_t *request = exchange->request;
    http_request_watch(request, NULL, NULL, NULL);
    exchange_free(exchange);
    return request;
}

static void exchange_on_client_close(void *context)
{
    gateway_exchange_t *exchange = context;
    exchange->gateway->disconnects++;
    exchange_free(exchange);
}

/* The backend failed. What the client gets depends on what it has got already. */
static void exchange_fail(gateway_exchange_t *exchange, int status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static void exchange_fail(gateway_exchange_t *exchange, int status, const char *format, ...)
{
    http_problem_t problem = {.status = status};
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    snprintf(problem.message, sizeof(problem.message), "model %s: %s", exchange->backend->model,
             text);
    exchange->backend->errors++;
    exchange->gateway->errors++;
    bool begun = exchange->state == EXCHANGE_BODY, events = exchange->events;
    bool inside_event = exchange->last[0] != '\n' || exchange->last[1] != '\n';
    http_text_t *out = &exchange->gateway->text;
    http_request_t *request = exchange_finish(exchange);
    if (!begun) {
        http_request_fail(request, &problem);
    } else if (!events || !http_request_writable(request)) {
        http_request_abort(request);
    } else {
        http_text_clear(out);
        http_text_puts(out, inside_event ? "\n\ndata: " : "data: ");
        http_problem_write(&problem, out);
        http_text_puts(out, "\n\n");
        http_request_stream_write(request, out->buf.data, out->buf.length);
        http_request_stream_end(request);
    }
}

static void start_gone_timer(http_gateway_t *gateway)
{
    uint32_t milliseconds = gateway->config.gone_timeout_ms;
    struct timeval wait = {milliseconds / 1000, (suseconds_t)(milliseconds % 1000) * 1000};
    if (!evtimer_pending(gateway->gone_timer, NULL))
        evtimer_add(gateway->gone_timer, &wait);
}

void gateway_exchanges_gone(http_gateway_t *gateway, const gateway_backend_t *backend)
{
    gateway_exchange_t *exchange;
    bool any = false;
    TAILQ_FOREACH(exchange, &gateway->exchanges, entry)
    {
        if (exchange->backend != backend)
            continue;
        exchange->gone = true;
        any = true;
    }
    if (any)
        start_gone_timer(gateway);
}

void gateway_exchanges_end_gone(http_gateway_t *gateway)
{
    gateway_exchange_t *exchange = TAILQ_FIRST(&gateway->exchanges);
    bool waiting = false;
    while (exchange) {
        gateway_exchange_t *next = TAILQ_NEXT(exchange, entry);
        /* A client that reads slowly still gets what the backend has sent. */
        if (exchange->gone && exchange->paused)
            waiting = true;
        else if (exchange->gone)
            exchange_fail(exchange, 502, "its Instance has gone%s%s",
                          exchange->backend->reason[0] ? ": " : "", exchange->backend->reason);
        exchange = next;
    }
    if (waiting)
        start_gone_timer(gateway);
}

static bool is_event_stream(const http_head_t *head)
{
    const http_slice_t *type = http_head_header(head, "content-type");
    return type && type->length >= 17 && !strncasecmp(type->data, "text/event-stream", 17);
}

/* The answer's head is known: starts the client's answer. */
static xp_status_t exchange_begin_answer(gateway_exchange_t *exchange, const http_head_t *head)
{
    xp_buf_t lines;
    xp_buf_init(&lines, EXCHANGE_HEAD_BYTES + 8 * HTTP_MAX_HEADERS);
    xp_status_t status = XP_OK;
    for (uint32_t i = 0; i < head->header_count && status == XP_OK; i++) {
        const http_header_t *h = &head->headers[i];
        if (http_header_is_hop_by_hop(h->name) || http_slice_equals_case(h->name, "content-length"))
            continue;
        status = xp_buf_printf(&lines, "%.*s: %.*s\r\n", (int)h->name.length, h->name.data,
                               (int)h->value.length, h->value.data);
    }
    if (status == XP_OK) {
        bool empty = head->status == 204 || head->status == 304;
        exchange->framing = empty              ? FRAMING_NONE
                            : head->chunked    ? FRAMING_CHUNKED
                            : head->has_length ? FRAMING_LENGTH
                                               : FRAMING_CLOSE;
        exchange->remaining = head->length;
        exchange->events = is_event_stream(head);
        exchange->state = EXCHANGE_BODY;
        exchange->last[0] = exchange->last[1] = '\n';
        if (head->status >= 500) {
            exchange->backend->errors++;
            exchange->gateway->errors++;
        }
        int64_t length = empty ? 0 : head->has_length ? (int64_t)head->length : -1;
        http_request_stream_begin(exchange->request, head->status, NULL, lines.data, length);
    }
    xp_buf_fini(&lines);
    return status;
}

/* Reads the answer's head. False when more is needed or the exchange is over. */
static bool exchange_read_head(gateway_exchange_t *exchange, struct evbuffer *input)
{
    size_t have = evbuffer_get_length(input);
    if (!have)
        return false;
    if (have > EXCHANGE_HEAD_BYTES)
        have = EXCHANGE_HEAD_BYTES;
    const char *data = (const char *)evbuffer_pullup(input, (ssize_t)have);
    size_t length = http_head_find(data, have, &exchange->scanned);
    if (!length) {
        if (have == EXCHANGE_HEAD_BYTES)
            exchange_fail(exchange, 502, "its answer's headers are longer than %u bytes",
                          EXCHANGE_HEAD_BYTES);
        return false;
    }
    http_head_t head;
    xp_status_t status = http_head_parse_response(data, length, &head);
    exchange->scanned = 0;
    if (status == XP_OK && head.status < 200) {
        evbuffer_drain(input, length);
        if (++exchange->interim <= EXCHANGE_MAX_INTERIM)
            return exchange_read_head(exchange, input);
        status = xp_fail(XP_PEER, "too many interim answers");
    }
    if (status == XP_OK)
        status = exchange_begin_answer(exchange, &head);
    if (status != XP_OK) {
        exchange_fail(exchange, 502, "its answer is not valid HTTP: %s", xp_error_last()->text);
        return false;
    }
    evbuffer_drain(input, length);
    return true;
}

static void exchange_pass(gateway_exchange_t *exchange, const char *data, size_t length)
{
    if (!length)
        return;
    http_request_stream_write(exchange->request, data, length);
    exchange->last[0] = length > 1 ? data[length - 2] : exchange->last[1];
    exchange->last[1] = data[length - 1];
}

/* Passes on what is there. False when the exchange is over. */
static bool exchange_read_body(gateway_exchange_t *exchange, struct evbuffer *input)
{
    /* Each turn consumes a part of what one read brought; nothing is read while the client is full.
     */
    while (exchange->framing != FRAMING_NONE) {
        if (exchange->framing == FRAMING_LENGTH && !exchange->remaining)
            break;
        size_t have = evbuffer_get_contiguous_space(input);
        if (!have)
            return true;
        if (!http_request_writable(exchange->request)) {
            exchange->paused = true;
            bufferevent_disable(exchange->bev, EV_READ);
            return true;
        }
        const char *data = (const char *)evbuffer_pullup(input, (ssize_t)have);
        size_t used = have;
        http_slice_t payload = {data, have};
        if (exchange->framing == FRAMING_CHUNKED) {
            if (http_chunk_decode(&exchange->chunk, data, have, &used, &payload) != XP_OK) {
                exchange_fail(exchange, 502, "its answer is not valid HTTP: %s",
                              xp_error_last()->text);
                return false;
            }
        } else if (exchange->framing == FRAMING_LENGTH) {
            if (used > exchange->remaining)
                used = (size_t)exchange->remaining;
            payload.length = used;
            exchange->remaining -= used;
        }
        exchange_pass(exchange, payload.data, payload.length);
        evbuffer_drain(input, used);
        if (exchange->framing == FRAMING_CHUNKED && exchange->chunk.done)
            break;
    }
    http_request_stream_end(exchange_finish(exchange));
    return false;
}

static void exchange_process(gateway_exchange_t *exchange)
{
    struct evbuffer *input = bufferevent_get_input(exchange->bev);
    if (exchange->state == EXCHANGE_HEAD && !exchange_read_head(exchange, input))
        return;
    if (exchange->state == EXCHANGE_BODY)
        exchange_read_body(exchange, input);
}

static void exchange_on_read(struct bufferevent *bev, void *context)
{
    exchange_process(context);
}

static void exchange_on_client_drain(void *context)
{
    gateway_exchange_t *exchange = context;
    if (!exchange->paused)
        return;
    exchange->paused = false;
    bufferevent_enable(exchange->bev, EV_READ);
    exchange_process(exchange);
}

/* The request as the backend gets it: the client's own bytes, on a connection of its own. */
static void exchange_send_request(gateway_exchange_t *exchange)
{
    http_request_t *request = exchange->request;
    const http_head_t *head = http_request_head(request);
    http_slice_t body = http_request_body(request), query = http_request_query(request);
    struct evbuffer *output = bufferevent_get_output(exchange->bev);
    bool is_head = http_request_is_head(request);
    evbuffer_add_printf(output, "%.*s %s%s%.*s HTTP/1.1\r\nHost: %s\r\n",
                        is_head ? 3 : (int)head->method.length, is_head ? "GET" : head->method.data,
                        http_request_path(request), query.length ? "?" : "", (int)query.length,
                        query.data ? query.data : "", exchange->backend->host);
    for (uint32_t i = 0; i < head->header_count; i++) {
        const http_header_t *h = &head->headers[i];
        if (http_header_is_hop_by_hop(h->name) || http_slice_equals_case(h->name, "host") ||
            http_slice_equals_case(h->name, "content-length") ||
            http_slice_equals_case(h->name, "expect"))
            continue;
        evbuffer_add(output, h->name.data, h->name.length);
        evbuffer_add(output, ": ", 2);
        evbuffer_add(output, h->value.data, h->value.length);
        evbuffer_add(output, "\r\n", 2);
    }
    evbuffer_add_printf(output, "Content-Length: %zu\r\nConnection: close\r\n\r\n", body.length);
    evbuffer_add_reference(output, body.data, body.length, NULL, NULL);
}

static void timer_set(gateway_exchange_t *exchange, uint32_t milliseconds)
{
    struct timeval delay = {milliseconds / 1000, (milliseconds % 1000) * 1000};
    event_add(exchange->timer, &delay);
}

static void exchange_connect_failed(gateway_exchange_t *exchange, const char *why)
{
    exchange_close_backend(exchange);
    if (exchange->retried) {
        exchange_fail(exchange, 503, "its server cannot be reached: %s", why);
        return;
    }
    exchange->retried = exchange->retry_waits = true;
    exchange->gateway->retries++;
    timer_set(exchange, exchange->gateway->config.retry_delay_ms);
}

static void exchange_on_timer(evutil_socket_t fd, short what, void *context)
{
    gateway_exchange_t *exchange = context;
    if (exchange->retry_waits) {
        exchange->retry_waits = false;
        exchange_connect(exchange);
    } else if (exchange->state == EXCHANGE_CONNECTING) {
        exchange->retried = true; /* it waited long enough once */
        exchange_connect_failed(exchange, "the connection timed out");
    }
}

static void exchange_on_event(struct bufferevent *bev, short what, void *context)
{
    gateway_exchange_t *exchange = context;
    const http_gateway_config_t *config = &exchange->gateway->config;
    if (what & BEV_EVENT_CONNECTED) {
        int on = 1;
        struct timeval limit = {config->response_timeout_ms / 1000,
                                (config->response_timeout_ms % 1000) * 1000};
        setsockopt(bufferevent_getfd(bev), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
        event_del(exchange->timer);
        exchange->state = EXCHANGE_HEAD;
        bufferevent_set_timeouts(bev, &limit, &limit);
        exchange_send_request(exchange);
        bufferevent_enable(bev, EV_READ | EV_WRITE);
        return;
    }
    if (exchange->state == EXCHANGE_CONNECTING) {
        int error = EVUTIL_SOCKET_ERROR();
        exchange_connect_failed(exchange, error ? evutil_socket_error_to_string(error) : "refused");
        return;
    }
    if (what & BEV_EVENT_TIMEOUT) {
        exchange_fail(exchange, 504, "its server sent nothing for %u s",
                      config->response_timeout_ms / 1000);
        return;
    }
    if ((what & BEV_EVENT_EOF) && exchange->state == EXCHANGE_BODY &&
        exchange->framing == FRAMING_CLOSE) {
        http_request_stream_end(exchange_finish(exchange));
        return;
    }
    exchange_fail(exchange, 502, "its server ended the connection before the answer was complete");
}

static void exchange_connect(gateway_exchange_t *exchange)
{
    http_gateway_t *gateway = exchange->gateway;
    exchange->bev = bufferevent_socket_new(gateway->base, -1, BEV_OPT_CLOSE_ON_FREE);
    if (!exchange->bev) {
        exchange_fail(exchange, 503, "no memory for a connection");
        return;
    }
    timer_set(exchange, gateway->config.connect_timeout_ms);
    /* No callbacks yet: libevent reports some failures before this call returns. */
    if (bufferevent_socket_connect(exchange->bev, (struct sockaddr *)&exchange->backend->address,
                                   (int)exchange->backend->address_length) < 0) {
        exchange_connect_failed(exchange, evutil_socket_error_to_string(EVUTIL_SOCKET_ERROR()));
        return;
    }
    bufferevent_setcb(exchange->bev, exchange_on_read, NULL, exchange_on_event, exchange);
}

void gateway_exchange_start(http_gateway_t *gateway, gateway_backend_t *backend,
                            http_request_t *request)
{
    gateway_exchange_t *exchange = calloc(1, sizeof(*exchange));
    struct event *timer = exchange ? evtimer_new(gateway->base, exchange_on_timer, exchange) : NULL;
    if (!timer) {
        free(exchange);
        http_reply_problem(request, 503, NULL, NULL, "no memory for a request");
        return;
    }
    exchange->magic = EXCHANGE_MAGIC;
    exchange->gateway = gateway;
    exchange->backend = backend;
    exchange->request = request;
    exchange->timer = timer;
    TAILQ_INSERT_TAIL(&gateway->exchanges, exchange, entry);
    gateway->open++;
    gateway->requests++;
    backend->references++;
    backend->open++;
    backend->requests++;
    http_request_watch(request, exchange_on_client_close, exchange_on_client_drain, exchange);
    exchange_connect(exchange);
}
