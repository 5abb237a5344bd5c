/* SPDX-License-Identifier: MIT */
/*
 * A blocking client that sends exact bytes and returns exact bytes, and a thread that runs an event
 * loop.
 *
 * The bytes are taken apart here by the simplest means, not by the code under test.
 */
#ifndef XPOOL_TESTS_HTTP_CLIENT_H
#define XPOOL_TESTS_HTTP_CLIENT_H

#include <arpa/inet.h>
#include <event2/event.h>
#include <event2/thread.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include <setjmp.h>

#include <cmocka.h>

#include <jansson.h>

#define CLIENT_BYTES (4u << 20)

typedef struct loop {
    struct event_base *base;
    pthread_t thread;
} loop_t;

static inline void *loop_run(void *context)
{
    loop_t *loop = context;
    event_base_loop(loop->base, EVLOOP_NO_EXIT_ON_EMPTY);
    return NULL;
}

/* The base is made first and started once everything hangs on it. */
static inline void loop_init(loop_t *loop)
{
    evthread_use_pthreads();
    loop->base = event_base_new();
}

static inline void loop_stop(loop_t *loop)
{
    event_base_loopbreak(loop->base);
    pthread_join(loop->thread, NULL);
}

/* Runs a function on the loop's thread and waits for it. */
typedef struct loop_call {
    void (*function)(void *);
    void *context;
    pthread_mutex_t lock;
    pthread_cond_t done;
    bool over;
} loop_call_t;

static inline void loop_call_run(evutil_socket_t fd, short what, void *context)
{
    loop_call_t *call = context;
    call->function(call->context);
    pthread_mutex_lock(&call->lock);
    call->over = true;
    pthread_cond_signal(&call->done);
    pthread_mutex_unlock(&call->lock);
}

static inline void loop_do(loop_t *loop, void (*function)(void *), void *context)
{
    loop_call_t call = {.function = function,
                        .context = context,
                        .lock = PTHREAD_MUTEX_INITIALIZER,
                        .done = PTHREAD_COND_INITIALIZER};
    struct timeval now = {0, 0};
    event_base_once(loop->base, -1, EV_TIMEOUT, loop_call_run, &call, &now);
    pthread_mutex_lock(&call.lock);
    while (!call.over)
        pthread_cond_wait(&call.done, &call.lock);
    pthread_mutex_unlock(&call.lock);
}

static inline void loop_nothing(void *context)
{
}

/* Returns once the loop runs: a break that comes before is forgotten by libevent. */
static inline void loop_start(loop_t *loop)
{
    assert_int_equal(pthread_create(&loop->thread, NULL, loop_run, loop), 0);
    loop_do(loop, loop_nothing, NULL);
}

/* `receive_bytes` bounds what the kernel takes in for a client that does not read; 0 = its default.
 */
static inline int client_connect_buffer(uint16_t port, int receive_bytes)
{
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (receive_bytes)
        setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &receive_bytes, sizeof(receive_bytes));
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    struct timeval limit = {10, 0};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
    assert_int_equal(connect(fd, (struct sockaddr *)&address, sizeof(address)), 0);
    return fd;
}

static inline int client_connect(uint16_t port)
{
    return client_connect_buffer(port, 0);
}

static inline int client_connect_small(uint16_t port)
{
    return client_connect_buffer(port, 4096);
}

static inline void client_send_bytes(int fd, const char *bytes, size_t length)
{
    while (length) {
        ssize_t sent = send(fd, bytes, length, MSG_NOSIGNAL);
        if (sent <= 0)
            return; /* the server may refuse in the middle */
        bytes += sent;
        length -= (size_t)sent;
    }
}

static inline void client_send(int fd, const char *text)
{
    client_send_bytes(fd, text, strlen(text));
}

/* One response, or what came until the end. `text` is NUL-terminated and static per call of the
 * test. */
typedef struct response {
    int status;
    char *text; /* everything as received */
    char *body; /* decoded when chunked */
    size_t length, body_length;
    bool complete; /* the framing said it is over */
} response_t;

static inline void response_free(response_t *response)
{
    free(response->text);
    free(response->body);
    memset(response, 0, sizeof(*response));
}

/* A request with this body. */
static inline void client_send_post(int fd, const char *path, const char *body)
{
    char text[1024];
    snprintf(text, sizeof(text), "POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %zu\r\n\r\n%s",
             path, strlen(body), body);
    client_send(fd, text);
}

/* Decodes "hex\r\n payload \r\n" pieces of `data`. True when the last piece is there. */
static inline bool client_dechunk(const char *data, const char *end, char *out, size_t *out_length)
{
    *out_length = 0;
    for (;;) {
        char *after;
        const char *line = memmem(data, (size_t)(end - data), "\r\n", 2);
        if (!line)
            return false;
        size_t size = strtoul(data, &after, 16);
        data = line + 2;
        if (!size)
            return end - data >= 2;
        if ((size_t)(end - data) < size + 2)
            return false;
        memcpy(out + *out_length, data, size);
        *out_length += size;
        data += size + 2;
    }
}

/* Reads one response of a keep-alive connection, byte by byte at its end so that nothing of the
 * next is taken. */
static inline response_t client_receive(int fd)
{
    response_t r = {.text = calloc(1, CLIENT_BYTES), .body = calloc(1, CLIENT_BYTES)};
    char *head_end = NULL;
    for (;;) {
        size_t want = 1;
        if (head_end) {
            const char *length = strcasestr(r.text, "\r\nContent-Length: ");
            const char *chunked = strcasestr(r.text, "\r\nTransfer-Encoding: chunked");
            size_t have = (size_t)(r.text + r.length - head_end);
            if (chunked && chunked < head_end) {
                if (client_dechunk(head_end, r.text + r.length, r.body, &r.body_length)) {
                    r.complete = true;
                    break;
                }
            } else if (length && length < head_end) {
                size_t total = strtoul(length + 18, NULL, 10);
                memcpy(r.body, head_end, have);
                r.body_length = have;
                if (have == total) {
                    r.complete = true;
                    break;
                }
                want = total - have;
            } else {
                memcpy(r.body, head_end, have);
                r.body_length = have;
            }
        }
        if (r.length + want >= CLIENT_BYTES)
            break;
        ssize_t got = recv(fd, r.text + r.length, want, 0);
        if (got <= 0)
            break;
        r.length += (size_t)got;
        if (!head_end && (head_end = strstr(r.text, "\r\n\r\n")))
            head_end += 4;
    }
    if (!strncmp(r.text, "HTTP/1.1 ", 9))
        r.status = atoi(r.text + 9);
    r.body[r.body_length] = '\0';
    return r;
}

/* Reads until the peer closes, or sends nothing for a second, and keeps the last `length` bytes as
 * a text. Returns how many came in all. */
static inline size_t client_read_tail(int fd, char *tail, size_t length)
{
    char bytes[65536];
    size_t total = 0;
    struct pollfd poller = {.fd = fd, .events = POLLIN};
    memset(tail, 0, length + 1);
    while (poll(&poller, 1, 1000) > 0) {
        ssize_t got = recv(fd, bytes, sizeof(bytes), 0);
        if (got <= 0)
            break;
        size_t part = (size_t)got < length ? (size_t)got : length;
        memmove(tail, tail + part, length - part);
        memcpy(tail + length - part, bytes + got - part, part);
        total += (size_t)got;
    }
    return total;
}

/* True when the peer closes within `milliseconds`; what it sends meanwhile is thrown away. */
static inline bool client_closed(int fd, int milliseconds)
{
    char bytes[65536];
    struct pollfd poller = {.fd = fd, .events = POLLIN};
    while (poll(&poller, 1, milliseconds) > 0) {
        ssize_t got = recv(fd, bytes, sizeof(bytes), 0);
        if (got <= 0)
            return true;
    }
    return false;
}

static inline response_t client_request(uint16_t port, const char *method, const char *path,
                                        const char *body)
{
    int fd = client_connect(port);
    size_t size = strlen(body) + 1024;
    char *text = malloc(size);
    snprintf(text, size,
             "%s %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
             "Content-Length: %zu\r\n\r\n%s",
             method, path, strlen(body), body);
    client_send(fd, text);
    free(text);
    response_t r = client_receive(fd);
    close(fd);
    return r;
}

static inline json_t *response_json(const response_t *r)
{
    json_error_t error;
    json_t *root = json_loads(r->body, 0, &error);
    if (!root)
        print_error("not JSON (%s): %s\n", error.text, r->text);
    assert_non_null(root);
    return root;
}

/* A value by path: member names and indices, e.g. "choices.0.text". Borrowed; fails when absent. */
static inline json_t *json_at(json_t *root, const char *path)
{
    char copy[256], *save = NULL;
    snprintf(copy, sizeof(copy), "%s", path);
    for (char *part = strtok_r(copy, ".", &save); part; part = strtok_r(NULL, ".", &save)) {
        json_t *next = json_is_array(root) ? json_array_get(root, strtoul(part, NULL, 10))
                                           : json_object_get(root, part);
        if (!next)
            print_error("no \"%s\" of %s\n", part, path);
        assert_non_null(next);
        root = next;
    }
    return root;
}

static inline const char *json_text_at(json_t *root, const char *path)
{
    const char *text = json_string_value(json_at(root, path));
    assert_non_null(text);
    return text;
}

static inline long long json_int_at(json_t *root, const char *path)
{
    json_t *value = json_at(root, path);
    assert_true(json_is_integer(value));
    return json_integer_value(value);
}

/* Waits until the condition holds, 5 s at most. */
#define wait_for(condition)                                                                        \
    do {                                                                                           \
        int wait_left = 5000;                                                                      \
        while (!(condition) && wait_left-- > 0)                                                    \
            usleep(1000);                                                                          \
        assert_true(condition);                                                                    \
    } while (0)
#endif
