/* SPDX-License-Identifier: MIT */
/* The gateway over real sockets, with backends played by threads that send exact bytes. */
#include "http_client.h"

#include <errno.h>
#include <stdatomic.h>

#include "http/gateway.h"

/* One backend: accepts connections one after the other, keeps the request, and sends its script. */
typedef struct backend {
    int listener;
    uint16_t port;
    pthread_t thread;
    atomic_bool stop;
    const char *first, *second; /* sent at once, and after `go` */
    atomic_bool go, reset;
    size_t flood; /* bytes of payload after `first` */
    atomic_size_t flooded;
    atomic_uint accepted, closed_by_peer;
    char request[16384];
} backend_t;

static void backend_serve(backend_t *b, int fd)
{
    size_t have = 0;
    char *end = NULL;
    struct timeval brief = {0, 50000};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &brief, sizeof(brief));
    memset(b->request, 0, sizeof(b->request));
    while (!b->stop) {
        ssize_t got = recv(fd, b->request + have, sizeof(b->request) - 1 - have, 0);
        if (got == 0) {
            b->closed_by_peer++;
            return;
        }
        have += got > 0 ? (size_t)got : 0;
        end = strstr(b->request, "\r\n\r\n");
        const char *length = strstr(b->request, "Content-Length: ");
        if (end && length &&
            have >= (size_t)(end + 4 - b->request) + strtoul(length + 16, NULL, 10))
            break;
    }
    b->accepted++;
    if (b->first)
        client_send(fd, b->first);
    char piece[4096];
    memset(piece, 'f', sizeof(piece));
    struct timeval wait = {0, 100000};
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof(wait));
    while (b->flooded < b->flood && !b->stop) {
        ssize_t sent = send(fd, piece, sizeof(piece), MSG_NOSIGNAL);
        if (sent > 0)
            b->flooded += (size_t)sent;
    }
    while (!b->go && !b->stop) {
        char byte;
        ssize_t got = recv(fd, &byte, 1, 0);
        if (got == 0 || (got < 0 && errno != EAGAIN)) {
            b->closed_by_peer++;
            return;
        }
    }
    if (b->reset) {
        struct linger now = {1, 0};
        setsockopt(fd, SOL_SOCKET, SO_LINGER, &now, sizeof(now));
    } else if (b->second) {
        client_send(fd, b->second);
    }
}

static void *backend_run(void *context)
{
    backend_t *b = context;
    struct pollfd poller = {.fd = b->listener, .events = POLLIN};
    while (!b->stop) {
        if (poll(&poller, 1, 50) <= 0)
            continue;
        int fd = accept(b->listener, NULL, NULL);
        if (fd >= 0) {
            backend_serve(b, fd);
            close(fd);
        }
    }
    return NULL;
}

static void backend_start(backend_t *b)
{
    struct sockaddr_in address = {.sin_family = AF_INET};
    socklen_t length = sizeof(address);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    memset(b, 0, sizeof(*b));
    b->listener = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(bind(b->listener, (struct sockaddr *)&address, sizeof(address)), 0);
    assert_int_equal(listen(b->listener, 16), 0);
    getsockname(b->listener, (struct sockaddr *)&address, &length);
    b->port = ntohs(address.sin_port);
    pthread_create(&b->thread, NULL, backend_run, b);
}

static void backend_stop(backend_t *b)
{
    b->stop = true;
    pthread_join(b->thread, NULL);
    close(b->listener);
}

static struct {
    loop_t loop;
    http_gateway_t *gateway;
    uint16_t port;
    backend_t a, b;
} f;

typedef struct set {
    const char *model;
    uint16_t port;
    http_backend_state_t state;
    const char *reason;
} set_t;

static void do_set(void *context)
{
    set_t *set = context;
    assert_int_equal(http_gateway_set_backend(f.gateway, set->model, "127.0.0.1", set->port,
                                              set->state, set->reason),
                     XP_OK);
}

static void set_backend(const char *model, uint16_t port, http_backend_state_t state,
                        const char *reason)
{
    set_t set = {model, port, state, reason};
    loop_do(&f.loop, do_set, &set);
}

static void do_remove(void *context)
{
    http_gateway_remove_backend(f.gateway, context);
}

static void do_stats(void *context)
{
    http_gateway_stats(f.gateway, context);
}

static http_gateway_stats_t stats(void)
{
    http_gateway_stats_t out;
    loop_do(&f.loop, do_stats, &out);
    return out;
}

static void do_open_requests(void *context)
{
    *(uint32_t *)context = http_gateway_open_requests(f.gateway);
}

static uint32_t open_requests(void)
{
    uint32_t count;
    loop_do(&f.loop, do_open_requests, &count);
    return count;
}

static void start(http_gateway_config_t config)
{
    memset(&f, 0, sizeof(f));
    loop_init(&f.loop);
    assert_int_equal(http_gateway_create(&config, f.loop.base, &f.gateway), XP_OK);
    f.port = http_gateway_port(f.gateway);
    loop_start(&f.loop);
    backend_start(&f.a);
    backend_start(&f.b);
    set_backend("a", f.a.port, HTTP_BACKEND_UP, NULL);
    set_backend("org/b", f.b.port, HTTP_BACKEND_UP, NULL);
}

static int set_up(void **state)
{
    start((http_gateway_config_t){.gone_timeout_ms = 200});
    return 0;
}

static int tear_down(void **state)
{
    loop_stop(&f.loop);
    http_gateway_destroy(f.gateway);
    /* A connection whose callback is still due is freed behind it. */
    event_base_loop(f.loop.base, EVLOOP_NONBLOCK);
    event_base_free(f.loop.base);
    backend_stop(&f.a);
    backend_stop(&f.b);
    return 0;
}

static int send_chat(const char *model)
{
    char body[256], text[512];
    int fd = client_connect(f.port);
    snprintf(body, sizeof(body), "{\"model\":\"%s\",  \"x\": 1.50}", model);
    snprintf(text, sizeof(text),
             "POST /v1/chat/completions?q=%%20 HTTP/1.1\r\nHost: door\r\nX-Own: v\r\n"
             "Connection: keep-alive\r\nContent-Length: %zu\r\n\r\n%s",
             strlen(body), body);
    client_send(fd, text);
    return fd;
}

static void passes_bytes_on(void **state)
{
    f.b.first = "HTTP/1.1 201 Created\r\nContent-Type: application/json\r\nX-Back: w\r\n"
                "Keep-Alive: timeout=1\r\nContent-Length: 9\r\n\r\n{\"a\": 1 }";
    f.b.go = true;
    int fd = send_chat("org/b");
    response_t r = client_receive(fd);
    assert_int_equal(r.status, 201);
    assert_string_equal(r.body, "{\"a\": 1 }");
    assert_non_null(strstr(r.text, "\r\nX-Back: w\r\n"));
    assert_null(strstr(r.text, "Keep-Alive"));
    response_free(&r);
    char expected[512];
    snprintf(expected, sizeof(expected),
             "POST /v1/chat/completions?q=%%20 HTTP/1.1\r\nHost: 127.0.0.1:%u\r\nX-Own: v\r\n"
             "Content-Length: 29\r\nConnection: close\r\n\r\n{\"model\":\"org/b\",  \"x\": 1.50}",
             f.b.port);
    assert_string_equal(f.b.request, expected);
    /* The client's connection is kept, and may go to another model. */
    f.a.first = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n";
    f.a.go = true;
    client_send(
        fd, "POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 13\r\n\r\n{\"model\":\"a\"}");
    r = client_receive(fd);
    assert_string_equal(r.body, "hi");
    assert_true(r.complete);
    response_free(&r);
    close(fd);
    assert_int_equal(f.a.accepted, 1);
    assert_int_equal(f.b.accepted, 1);
}

#define SSE                                                                                        \
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"

/* Reads exactly what is there now, waiting for `part` to appear. */
static void receive_until(int fd, char *text, size_t bytes, const char *part)
{
    size_t have = strlen(text);
    while (!strstr(text, part)) {
        ssize_t got = recv(fd, text + have, bytes - 1 - have, 0);
        if (got <= 0)
            fail_msg("\"%s\" did not come, only \"%s\"", part, text);
        have += (size_t)got;
        text[have] = '\0';
    }
}

static void streams_without_waiting(void **state)
{
    char text[8192] = "";
    f.a.first = SSE "9\r\ndata: 1\n\n\r\n4\r\ndata";
    f.a.second = "\r\n5\r\n: 2\n\n\r\n0\r\n\r\n";
    int fd = send_chat("a");
    receive_until(fd, text, sizeof(text), "data: 1\n\n");
    receive_until(fd, text, sizeof(text), "\r\ndata\r\n");
    f.a.go = true;
    receive_until(fd, text, sizeof(text), ": 2\n\n");
    receive_until(fd, text, sizeof(text), "0\r\n\r\n");
    close(fd);
}

static void a_client_that_leaves_closes_the_backend(void **state)
{
    char text[8192] = "";
    f.a.first = SSE "9\r\ndata: 1\n\n\r\n";
    int fd = send_chat("a");
    receive_until(fd, text, sizeof(text), "data: 1\n\n");
    close(fd);
    wait_for(f.a.closed_by_peer == 1);
    /* Also before the first byte of an answer. */
    f.a.first = NULL;
    fd = send_chat("a");
    wait_for(f.a.accepted == 2);
    close(fd);
    wait_for(f.a.closed_by_peer == 2);
    http_gateway_stats_t s = stats();
    assert_int_equal(s.disconnects, 2);
    assert_int_equal(s.open, 0);
}

static void a_backend_that_dies_in_a_stream(void **state)
{
    for (int reset = 0; reset < 2; reset++) {
        f.a.go = false;
        f.a.reset = reset;
        f.a.first = SSE "9\r\ndata: 1\n\n\r\n";
        int fd = send_chat("a");
        wait_for(f.a.accepted == (unsigned)reset + 1);
        usleep(50000);
        f.a.go = true;
        response_t r = client_receive(fd);
        assert_int_equal(r.status, 200);
        assert_true(r.complete);
        assert_string_equal(r.body,
                            "data: 1\n\ndata: {\"error\":{\"message\":\"model a: its server ended "
                            "the connection before the answer was complete\",\"type\":"
                            "\"server_error\",\"param\":null,\"code\":\"backend_failed\"}}\n\n");
        response_free(&r);
        close(fd);
    }
    /* In the middle of an event, that event is ended first. */
    f.a.reset = false;
    f.a.first = SSE "6\r\ndata: \r\n";
    int fd = send_chat("a");
    response_t r = client_receive(fd);
    assert_non_null(strstr(r.body, "data: \n\ndata: {\"error\""));
    response_free(&r);
    close(fd);
    assert_int_equal(stats().models[0].errors, 3);
}

/* An engine's main process may keep its connections open for seconds after a part of it died. */
static void a_backend_that_is_gone_but_keeps_its_connection(void **state)
{
    char text[8192] = "";
    f.a.first = f.b.first = SSE "9\r\ndata: 1\n\n\r\n";
    int fd = send_chat("a"), other = send_chat("org/b");
    receive_until(fd, text, sizeof(text), "data: 1\n\n");
    wait_for(f.b.accepted == 1);
    set_backend("a", 0, HTTP_BACKEND_DOWN, "rank 0 died");
    receive_until(fd, text, sizeof(text), "model a: its Instance has gone: rank 0 died");
    receive_until(fd, text, sizeof(text), "0\r\n\r\n");
    wait_for(f.a.closed_by_peer == 1);
    close(fd);
    /* What is back is another Instance: the timer does not touch it, nor other models. */
    set_backend("a", f.a.port, HTTP_BACKEND_UP, NULL);
    text[0] = '\0';
    fd = send_chat("a");
    receive_until(fd, text, sizeof(text), "data: 1\n\n");
    usleep(400000);
    assert_int_equal(open_requests(), 2);
    close(fd);
    close(other);
    wait_for(open_requests() == 0);
}

/* What it had sent before it went is passed on. */
static void a_backend_that_ends_its_answer_while_it_goes(void **state)
{
    f.a.first = SSE "9\r\ndata: 1\n\n\r\n";
    f.a.second = "9\r\ndata: 2\n\n\r\n0\r\n\r\n";
    int fd = send_chat("a");
    wait_for(f.a.accepted == 1);
    set_backend("a", 0, HTTP_BACKEND_DOWN, "stopped");
    f.a.go = true;
    response_t r = client_receive(fd);
    assert_string_equal(r.body, "data: 1\n\ndata: 2\n\n");
    response_free(&r);
    close(fd);
}

static void a_backend_that_dies_otherwise(void **state)
{
    f.a.go = true;
    int fd = send_chat("a");
    response_t r = client_receive(fd);
    assert_int_equal(r.status, 502);
    assert_non_null(strstr(r.body, "\"code\":\"backend_failed\""));
    response_free(&r);
    close(fd);
    /* An answer with a length cannot be completed; the connection says so. */
    f.a.first = "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc";
    fd = send_chat("a");
    r = client_receive(fd);
    assert_int_equal(r.status, 200);
    assert_false(r.complete);
    assert_string_equal(r.body, "abc");
    response_free(&r);
    close(fd);
    f.a.first = "SSH-2.0-nonsense\r\n\r\n";
    fd = send_chat("a");
    r = client_receive(fd);
    assert_int_equal(r.status, 502);
    response_free(&r);
    close(fd);
    f.a.first = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n";
    fd = send_chat("a");
    r = client_receive(fd);
    assert_false(r.complete);
    response_free(&r);
    close(fd);
}

static void answers_that_end_by_close(void **state)
{
    f.a.go = true;
    f.a.first = "HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\nuntil the end";
    int fd = send_chat("a");
    response_t r = client_receive(fd);
    assert_true(r.complete);
    assert_string_equal(r.body, "until the end");
    response_free(&r);
    close(fd);
    f.a.first = "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n";
    fd = send_chat("a");
    r = client_receive(fd);
    assert_int_equal(r.status, 204);
    response_free(&r);
    close(fd);
}

static void statuses_pass(void **state)
{
    f.a.go = true;
    f.a.first = "HTTP/1.1 429 Too Many Requests\r\nRetry-After: 7\r\nContent-Length: 2\r\n\r\n{}";
    int fd = send_chat("a");
    response_t r = client_receive(fd);
    assert_int_equal(r.status, 429);
    assert_non_null(strstr(r.text, "\r\nRetry-After: 7\r\n"));
    response_free(&r);
    close(fd);
}

static void expect_error(int fd, int status, const char *code, const char *part)
{
    response_t r = client_receive(fd);
    if (r.status != status)
        print_error("%s\n", r.text);
    assert_int_equal(r.status, status);
    json_t *root = response_json(&r);
    if (code)
        assert_string_equal(json_text_at(root, "error.code"), code);
    if (!strstr(json_text_at(root, "error.message"), part))
        fail_msg("\"%s\" does not say \"%s\"", json_text_at(root, "error.message"), part);
    if (status == 503)
        assert_non_null(strstr(r.text, "\r\nRetry-After: "));
    json_decref(root);
    response_free(&r);
    close(fd);
}

static void do_fail(void *context)
{
    http_gateway_fail(f.gateway, "agent x died", 100);
}

/* Streams and whole answers, of every model. */
static void a_failed_system_tells_its_clients(void **state)
{
    char text[8192] = "";
    f.a.first = SSE "9\r\ndata: 1\n\n\r\n";
    int fd = send_chat("a"), other = send_chat("org/b");
    receive_until(fd, text, sizeof(text), "data: 1\n\n");
    wait_for(f.b.accepted == 1);
    loop_do(&f.loop, do_fail, NULL);
    receive_until(fd, text, sizeof(text), "its Instance has gone: agent x died");
    receive_until(fd, text, sizeof(text), "0\r\n\r\n");
    expect_error(other, 502, "backend_failed", "agent x died");
    close(fd);
    expect_error(send_chat("a"), 503, NULL, "agent x died");
}

static int send_body(const char *path, const char *body)
{
    int fd = client_connect(f.port);
    client_send_post(fd, path, body);
    return fd;
}

static int send_get(const char *path)
{
    char text[256];
    int fd = client_connect(f.port);
    snprintf(text, sizeof(text), "GET %s HTTP/1.1\r\nHost: x\r\n\r\n", path);
    client_send(fd, text);
    return fd;
}

static void routing_errors(void **state)
{
    expect_error(send_chat("c"), 404, "model_not_found", "\"a\", \"org/b\"");
    expect_error(send_body("/generate", "{\"text\":\"x\"}"), 400, "missing_required_parameter",
                 "\"a\", \"org/b\"");
    expect_error(send_body("/generate", "{\"model\":5}"), 400, NULL, "string");
    expect_error(send_body("/generate", "{\"model\":"), 400, "invalid_json", "line 1");
    expect_error(send_body("/nothing", "{}"), 404, "not_found", "/nothing");
    expect_error(send_body("/v1/models", "{}"), 405, "method_not_allowed", "GET");
    set_backend("a", 0, HTTP_BACKEND_DOWN, "exit status 137 at 12:00");
    set_backend("org/b", 0, HTTP_BACKEND_STARTING, "loading weights");
    expect_error(send_chat("a"), 503, "model_unavailable", "down: exit status 137 at 12:00");
    expect_error(send_chat("org/b"), 503, "model_unavailable", "starting: loading weights");
    loop_do(&f.loop, do_remove, "a");
    expect_error(send_chat("a"), 404, "model_not_found", "\"org/b\"");
    /* One model only: it need not be named. */
    expect_error(send_body("/tokenize", "{}"), 503, NULL, "loading weights");
    assert_int_equal(f.a.accepted + f.b.accepted, 0);
}

static void an_unreachable_backend(void **state)
{
    backend_t gone;
    backend_start(&gone);
    backend_stop(&gone);
    set_backend("a", gone.port, HTTP_BACKEND_UP, NULL);
    expect_error(send_chat("a"), 503, NULL, "cannot be reached");
    http_gateway_stats_t s = stats();
    assert_int_equal(s.retries, 1);
    assert_int_equal(s.open, 0);
}

/* A backend that comes up between the two attempts is reached. */
static void one_retry_of_a_refused_connection(void **state)
{
    tear_down(state);
    start((http_gateway_config_t){.retry_delay_ms = 500});
    backend_t late;
    backend_start(&late);
    uint16_t port = late.port;
    backend_stop(&late);
    set_backend("a", port, HTTP_BACKEND_UP, NULL);
    int fd = send_chat("a");
    wait_for(stats().retries == 1);
    int listener = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    assert_int_equal(bind(listener, (struct sockaddr *)&address, sizeof(address)), 0);
    listen(listener, 1);
    int peer = accept(listener, NULL, NULL);
    client_send(peer, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
    response_t r = client_receive(fd);
    assert_string_equal(r.body, "ok");
    response_free(&r);
    close(fd);
    close(peer);
    close(listener);
}

static void a_silent_backend_times_out(void **state)
{
    tear_down(state);
    start((http_gateway_config_t){.response_timeout_ms = 300});
    expect_error(send_chat("a"), 504, NULL, "sent nothing");
    wait_for(f.a.closed_by_peer == 1);
}

/* A client that does not read holds its backend up; nothing piles up in between, and nothing is
 * lost. */
static void back_pressure(void **state)
{
    enum { TOTAL = 32 << 20 };
    static char head[128];
    tear_down(state);
    start((http_gateway_config_t){.max_output_bytes = 64 * 1024});
    snprintf(head, sizeof(head), "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n", TOTAL);
    f.a.first = head;
    f.a.flood = TOTAL;
    f.a.go = true;
    int fd = send_chat("a");
    wait_for(f.a.flooded > 0);
    size_t before;
    do {
        before = f.a.flooded;
        usleep(300000);
    } while (f.a.flooded != before);
    assert_true(before < TOTAL);
    size_t total = 0;
    char *bytes = malloc(1u << 16);
    for (ssize_t got; total < TOTAL && (got = recv(fd, bytes, 1u << 16, 0)) > 0;)
        total += (size_t)got;
    assert_true(total >= TOTAL);
    free(bytes);
    close(fd);
}

/* When the timer of a gone backend ends, this client has not read yet what came before. */
static void a_slow_client_of_a_gone_backend(void **state)
{
    enum { TOTAL = 16 << 20 };
    char head[128];
    tear_down(state);
    start((http_gateway_config_t){.max_output_bytes = 64 * 1024, .gone_timeout_ms = 200});
    snprintf(head, sizeof(head), "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n", 2 * TOTAL);
    f.a.first = head;
    f.a.flood = TOTAL;
    int fd = send_chat("a");
    wait_for(f.a.flooded > 0);
    size_t before;
    do {
        before = f.a.flooded;
        usleep(300000);
    } while (f.a.flooded != before);
    set_backend("a", 0, HTTP_BACKEND_DOWN, "rank 0 died");
    usleep(500000);
    assert_int_equal(open_requests(), 1);
    assert_true(client_closed(fd, 2000));
    wait_for(open_requests() == 0);
    close(fd);
}

static void lists_and_counts(void **state)
{
    set_backend("c", 0, HTTP_BACKEND_DOWN, "why");
    set_backend("d", 0, HTTP_BACKEND_STARTING, "loading");
    response_t r = client_request(f.port, "GET", "/v1/models", "");
    json_t *root = response_json(&r);
    assert_int_equal(json_array_size(json_at(root, "data")), 4);
    assert_string_equal(json_text_at(root, "data.0.state"), "up");
    assert_string_equal(json_text_at(root, "data.2.id"), "c");
    assert_string_equal(json_text_at(root, "data.2.state"), "down");
    assert_string_equal(json_text_at(root, "data.3.state"), "starting");
    assert_string_equal(json_text_at(root, "data.0.id"), "a");
    assert_string_equal(json_text_at(root, "data.1.id"), "org/b");
    assert_string_equal(json_text_at(root, "data.1.object"), "model");
    assert_true(json_int_at(root, "data.1.created") > 1600000000);
    json_decref(root);
    response_free(&r);
    r = client_request(f.port, "GET", "/v1/models/org/b", "");
    assert_int_equal(r.status, 200);
    root = response_json(&r);
    assert_string_equal(json_text_at(root, "id"), "org/b");
    assert_string_equal(json_text_at(root, "state"), "up");
    json_decref(root);
    response_free(&r);
    expect_error(send_get("/v1/models/c"), 503, "model_unavailable", "model c is down: why");
    expect_error(send_get("/v1/models/d"), 503, "model_unavailable", "starting: loading");
    expect_error(send_get("/v1/models/e"), 404, "model_not_found", "\"org/b\"");
    r = client_request(f.port, "GET", "/health", "");
    assert_string_equal(r.body, "{\"status\":\"ok\",\"models\":{\"a\":\"up\",\"org/"
                                "b\":\"up\",\"c\":\"down\",\"d\":\"starting\"}}\n");
    response_free(&r);
    f.b.first = "HTTP/1.1 500 Oh\r\nContent-Length: 2\r\n\r\n{}";
    f.b.go = true;
    r = client_request(f.port, "GET", "/get_model_info?model=org%2Fb", "");
    assert_int_equal(r.status, 500);
    response_free(&r);
    r = client_request(f.port, "GET", "/metrics", "");
    assert_non_null(strstr(r.body, "\nxpool_gateway_requests_total{model=\"org/b\"} 1\n"));
    assert_non_null(strstr(r.body, "\nxpool_gateway_errors_total{model=\"org/b\"} 1\n"));
    assert_non_null(strstr(r.body, "\nxpool_gateway_model_up{model=\"c\"} 0\n"));
    response_free(&r);
}

static void do_quiesce(void *context)
{
    http_gateway_quiesce(f.gateway);
}

static void quiescing_and_removal_leave_open_requests(void **state)
{
    f.a.first = SSE "9\r\ndata: 1\n\n\r\n";
    f.a.second = "9\r\ndata: 2\n\n\r\n0\r\n\r\n";
    int fd = send_chat("a");
    wait_for(f.a.accepted == 1);
    loop_do(&f.loop, do_remove, "a");
    loop_do(&f.loop, do_quiesce, NULL);
    expect_error(send_chat("org/b"), 503, NULL, "stopping");
    f.a.go = true;
    response_t r = client_receive(fd);
    assert_string_equal(r.body, "data: 1\n\ndata: 2\n\n");
    assert_true(r.complete);
    response_free(&r);
    close(fd);
    wait_for(open_requests() == 0);
}

/* The backend is done and gone, and its answer waits for a client that reads slowly. */
static void an_unsent_answer_is_open(void **state)
{
    enum { TOTAL = 16 << 20 };
    static const char end[] = "D\r\n0\r\n\r\n";
    char tail[sizeof(end)];
    tear_down(state);
    start((http_gateway_config_t){.max_output_bytes = 2 * TOTAL});
    f.a.first = "HTTP/1.1 200 OK\r\n\r\n"; /* ends when its connection does */
    f.a.flood = TOTAL;
    f.a.second = "THE END";
    f.a.go = true;
    static const char body[] = "{\"model\":\"a\"}";
    char text[256];
    int fd = client_connect_small(f.port);
    snprintf(text, sizeof(text),
             "POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %zu\r\n\r\n%s",
             sizeof(body) - 1, body);
    client_send(fd, text);
    wait_for(f.a.flooded >= TOTAL);
    wait_for(stats().open == 0);
    assert_int_equal(open_requests(), 1);
    loop_do(&f.loop, do_quiesce, NULL);
    assert_int_equal(open_requests(), 1);
    assert_true(client_read_tail(fd, tail, sizeof(end) - 1) > TOTAL);
    assert_string_equal(tail, end);
    wait_for(open_requests() == 0);
    close(fd);
}

static void destroying_with_open_requests(void **state)
{
    int fd = send_chat("a");
    wait_for(f.a.accepted == 1);
    tear_down(state);
    assert_true(client_closed(fd, 2000));
    close(fd);
    start((http_gateway_config_t){0});
}

static void backends_are_checked(void **state)
{
    assert_int_equal(http_gateway_set_backend(f.gateway, "", "127.0.0.1", 1, HTTP_BACKEND_UP, NULL),
                     XP_INVALID);
    assert_int_equal(http_gateway_set_backend(f.gateway, "x", NULL, 0, HTTP_BACKEND_UP, NULL),
                     XP_INVALID);
    assert_int_equal(
        http_gateway_set_backend(f.gateway, "x", "no such host.invalid", 1, HTTP_BACKEND_UP, NULL),
        XP_INVALID);
    for (int i = 2; i < HTTP_GATEWAY_MAX_MODELS; i++) {
        char id[16];
        sprintf(id, "m%d", i);
        assert_int_equal(http_gateway_set_backend(f.gateway, id, NULL, 0, HTTP_BACKEND_DOWN, NULL),
                         XP_OK);
    }
    assert_int_equal(
        http_gateway_set_backend(f.gateway, "one more", NULL, 0, HTTP_BACKEND_DOWN, NULL),
        XP_NO_MEMORY);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(passes_bytes_on),
        CASE(streams_without_waiting),
        CASE(a_client_that_leaves_closes_the_backend),
        CASE(a_backend_that_dies_in_a_stream),
        CASE(a_backend_that_is_gone_but_keeps_its_connection),
        CASE(a_backend_that_ends_its_answer_while_it_goes),
        CASE(a_failed_system_tells_its_clients),
        CASE(a_backend_that_dies_otherwise),
        CASE(answers_that_end_by_close),
        CASE(statuses_pass),
        CASE(routing_errors),
        CASE(an_unreachable_backend),
        CASE(one_retry_of_a_refused_connection),
        CASE(a_silent_backend_times_out),
        CASE(back_pressure),
        CASE(a_slow_client_of_a_gone_backend),
        CASE(lists_and_counts),
        CASE(quiescing_and_removal_leave_open_requests),
        CASE(an_unsent_answer_is_open),
        CASE(destroying_with_open_requests),
        CASE(backends_are_checked),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
