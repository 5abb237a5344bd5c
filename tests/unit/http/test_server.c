/* SPDX-License-Identifier: MIT */
/* The HTTP server over real sockets: framing, keep-alive, limits and deadlines, as exact bytes. */
#include "http_client.h"

#include <stdatomic.h>

#include "http/http_server.h"

typedef struct fixture {
    loop_t loop;
    http_server_t *server;
    uint16_t port;
    /* Paths that end in /wait are kept; the loop's thread owns the pointer. */
    http_request_t *waiting;
    atomic_uint closed, drained, handled;
    size_t stream_bytes;
} fixture_t;

static fixture_t f;

static void on_close(void *context)
{
    f.waiting = NULL;
    f.closed++;
}

/* Produces until the buffer is full, and again when it has drained. */
static void produce(void *context)
{
    char piece[8192];
    memset(piece, 'x', sizeof(piece));
    f.drained++;
    while (f.stream_bytes && http_request_stream_write(f.waiting, piece, sizeof(piece)))
        f.stream_bytes -= sizeof(piece);
    if (f.stream_bytes)
        return;
    http_request_t *request = f.waiting;
    f.waiting = NULL;
    http_request_stream_end(request);
}

static void on_request(void *context, http_request_t *request)
{
    const char *path = http_request_path(request);
    http_slice_t body = http_request_body(request);
    f.handled++;
    if (!strcmp(path, "/wait")) {
        f.waiting = request;
        http_request_watch(request, on_close, NULL, NULL);
    } else if (!strcmp(path, "/stream") || !strcmp(path, "/flood")) {
        http_request_stream_begin(request, 200, "text/plain", NULL, -1);
        if (path[1] == 'f') {
            f.waiting = request;
            http_request_watch(request, on_close, produce, NULL);
            produce(NULL);
            return;
        }
        http_request_stream_write(request, "one", 3);
        http_request_stream_write(request, "", 0);
        http_request_stream_write(request, "two!", 4);
        http_request_stream_end(request);
    } else if (!strcmp(path, "/abort")) {
        http_request_stream_begin(request, 200, "text/plain", NULL, 100);
        http_request_stream_write(request, "part", 4);
        http_request_abort(request);
    } else {
        char text[256];
        int length = snprintf(text, sizeof(text), "%.64s %zu", path, body.length);
        http_request_reply(request, 200, "text/plain", NULL, text, (size_t)length);
    }
}

static void answer_waiting(void *context)
{
    http_request_reply(f.waiting, 200, "text/plain", NULL, "late", 4);
}

static void start(http_server_config_t config)
{
    memset(&f, 0, sizeof(f));
    config.on_request = on_request;
    loop_init(&f.loop);
    assert_int_equal(http_server_create(&config, f.loop.base, &f.server), XP_OK);
    f.port = http_server_port(f.server);
    loop_start(&f.loop);
}

static int stop(void **state)
{
    loop_stop(&f.loop);
    http_server_destroy(f.server);
    /* A connection whose callback is still due is freed behind it. */
    event_base_loop(f.loop.base, EVLOOP_NONBLOCK);
    event_base_free(f.loop.base);
    return 0;
}

static void expect(int fd, const char *text)
{
    response_t r = client_receive(fd);
    assert_string_equal(r.text, text);
    response_free(&r);
}

static void exchange(const char *sent, int status, const char *part)
{
    int fd = client_connect(f.port);
    client_send(fd, sent);
    response_t r = client_receive(fd);
    if (r.status != status || !strstr(r.text, part))
        print_error("sent: %.200s\ngot: %s\n", sent, r.text);
    assert_int_equal(r.status, status);
    assert_non_null(strstr(r.text, part));
    response_free(&r);
    close(fd);
}

static void keeps_connections_and_pipelines(void **state)
{
    start((http_server_config_t){0});
    int fd = client_connect(f.port);
    client_send(fd, "\r\nGET /a HTTP/1.1\r\nHost: x\r\n\r\nPOST /b?q=1 HTTP/1.1\r\nHost: x\r\n"
                    "Content-Length: 3\r\n\r\nxyzGET http://x/c HTTP/1.1\r\nHost: x\r\n\r\nHEAD /d "
                    "HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    expect(fd, "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 4\r\n\r\n/a 0");
    expect(fd, "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 4\r\n\r\n/b 3");
    expect(fd, "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 4\r\n\r\n/c 0");
    /* HEAD: the length of what is not sent, and then the end. */
    expect(fd, "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 4\r\n"
               "Connection: close\r\n\r\n");
    close(fd);
}

static void streams_in_chunks(void **state)
{
    start((http_server_config_t){0});
    int fd = client_connect(f.port);
    client_send(fd, "GET /stream HTTP/1.1\r\nHost: x\r\n\r\nGET /next HTTP/1.1\r\nHost: x\r\n\r\n");
    expect(fd, "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n"
               "3\r\none\r\n4\r\ntwo!\r\n0\r\n\r\n");
    expect(fd, "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 7\r\n\r\n/next 0");
    close(fd);
    fd = client_connect(f.port);
    client_send(fd, "GET /stream HTTP/1.0\r\n\r\n");
    expect(fd, "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\nonetwo!");
    close(fd);
    fd = client_connect(f.port);
    client_send(fd, "GET /abort HTTP/1.1\r\nHost: x\r\n\r\n");
    response_t r = client_receive(fd);
    assert_false(r.complete);
    response_free(&r);
    close(fd);
}

static void reads_chunked_bodies(void **state)
{
    start((http_server_config_t){.max_body_bytes = 1000});
    static const char text[] = "POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
                               "5\r\nhello\r\n3;x=y\r\nabc\r\n0\r\nT: v\r\n\r\n"
                               "GET /d HTTP/1.1\r\nHost: x\r\n\r\n";
    for (size_t step = 1; step < sizeof(text); step += 7) {
        int fd = client_connect(f.port), on = 1;
        setsockopt(fd, IPPROTO_TCP, 1, &on, sizeof(on)); /* TCP_NODELAY */
        for (size_t at = 0; at < sizeof(text) - 1; at += step) {
            size_t left = sizeof(text) - 1 - at;
            client_send_bytes(fd, text + at, left < step ? left : step);
            if (step < 20)
                usleep(100);
        }
        expect(fd, "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 4\r\n\r\n/c 8");
        expect(fd, "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 4\r\n\r\n/d 0");
        close(fd);
    }
    exchange("POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nfff\r\n", 413,
             "1000");
    exchange("POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5z\r\n", 400,
             "hexadecimal");
}

static void refuses_with_json(void **state)
{
    start((http_server_config_t){.max_body_bytes = 10});
    exchange("nonsense\r\n\r\n", 400, "\"type\":\"invalid_request_error\"");
    exchange("GET / HTTP/1.1\r\n\r\n", 400, "Host");
    exchange("GET /%zz HTTP/1.1\r\nHost: x\r\n\r\n", 400, "escape");
    exchange("GET / HTTP/3.0\r\nHost: x\r\n\r\n", 501, "HTTP/1.1 or");
    exchange("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 11\r\n\r\n", 413,
             "\"code\":\"request_too_large\"");
    exchange("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 11\r\nExpect: 100-continue\r\n\r\n",
             413, "11 bytes");
    int fd = client_connect(f.port);
    client_send(fd,
                "POST /e HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n");
    char interim[26] = "";
    assert_int_equal(recv(fd, interim, 25, MSG_WAITALL), 25);
    assert_string_equal(interim, "HTTP/1.1 100 Continue\r\n\r\n");
    client_send(fd, "ok");
    expect(fd, "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 4\r\n\r\n/e 2");
    close(fd);
}

/* The refusal reaches a client that is still sending a large body. */
static void a_refusal_is_not_lost(void **state)
{
    start((http_server_config_t){.max_body_bytes = 1000});
    int fd = client_connect(f.port);
    char *large = calloc(1, 4u << 20);
    client_send(fd, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4194304\r\n\r\n");
    client_send_bytes(fd, large, 4u << 20);
    response_t r = client_receive(fd);
    assert_int_equal(r.status, 413);
    response_free(&r);
    assert_true(client_closed(fd, 5000));
    free(large);
    close(fd);
}

static void bounds_heads(void **state)
{
    start((http_server_config_t){.max_head_bytes = 2000});
    char text[4096];
    size_t used = (size_t)sprintf(text, "GET / HTTP/1.1\r\nHost: x\r\nA: ");
    memset(text + used, 'a', 2500);
    strcpy(text + used + 2500, "\r\n\r\n");
    exchange(text, 431, "2000 bytes");
    strcpy(text + used + 1900, "\r\n\r\n");
    exchange(text, 200, "/ 0");
}

static void deadlines(void **state)
{
    start((http_server_config_t){
        .head_timeout_ms = 300, .body_timeout_ms = 300, .idle_timeout_ms = 300});
    /* A byte now and then does not help: the deadline is over the whole head. */
    int fd = client_connect(f.port);
    static const char head[] = "GET / HTTP/1.1\r\nHost: x\r\nA: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
    for (size_t i = 0; i < sizeof(head) - 1; i++) {
        client_send_bytes(fd, head + i, 1);
        usleep(10000);
    }
    response_t r = client_receive(fd);
    assert_int_equal(r.status, 408);
    response_free(&r);
    close(fd);
    exchange("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nab", 408, "body");
    /* Idle connections end silently: before a request, and after one. */
    fd = client_connect(f.port);
    assert_true(client_closed(fd, 3000));
    close(fd);
    fd = client_connect(f.port);
    client_send(fd, "GET /a HTTP/1.1\r\nHost: x\r\n\r\n");
    expect(fd, "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 4\r\n\r\n/a 0");
    assert_false(client_closed(fd, 100));
    assert_true(client_closed(fd, 3000));
    close(fd);
    /* A request that is being handled has no deadline here. */
    fd = client_connect(f.port);
    client_send(fd, "GET /wait HTTP/1.1\r\nHost: x\r\n\r\n");
    assert_false(client_closed(fd, 800));
    close(fd);
    wait_for(f.closed == 1);
}

static void bounds_connections(void **state)
{
    start((http_server_config_t){.max_connections = 3});
    int fds[3];
    for (int i = 0; i < 3; i++) {
        fds[i] = client_connect(f.port);
        client_send(fds[i], i < 2 ? "GET /wait HTTP/1.1\r\nHost: x\r\n\r\n"
                                  : "GET /a HTTP/1.1\r\nHost: x\r\n\r\n");
    }
    response_t r = client_receive(fds[2]);
    assert_int_equal(r.status, 200);
    response_free(&r);
    /* The idle one makes room; then there is none to make. */
    int more = client_connect(f.port);
    client_send(more, "GET /wait HTTP/1.1\r\nHost: x\r\n\r\n");
    assert_true(client_closed(fds[2], 2000));
    wait_for(f.handled == 4);
    int refused = client_connect(f.port);
    r = client_receive(refused);
    assert_int_equal(r.status, 503);
    assert_true(r.complete);
    assert_non_null(strstr(r.body, "too many connections"));
    response_free(&r);
    close(refused);
    close(more);
    for (int i = 0; i < 3; i++)
        close(fds[i]);
}

static void bounds_all_bodies(void **state)
{
    start((http_server_config_t){.max_total_body_bytes = 100000, .max_body_bytes = 90000});
    char *body = calloc(1, 80000);
    memset(body, ' ', 79999);
    int first = client_connect(f.port);
    client_send(first, "POST /wait HTTP/1.1\r\nHost: x\r\nContent-Length: 80000\r\n\r\n");
    client_send_bytes(first, body, 80000);
    wait_for(f.handled == 1);
    int second = client_connect(f.port);
    client_send(second, "POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 80000\r\n\r\n");
    client_send_bytes(second, body, 80000);
    response_t r = client_receive(second);
    assert_int_equal(r.status, 503);
    response_free(&r);
    close(second);
    close(first);
    wait_for(f.closed == 1);
    second = client_connect(f.port);
    client_send(second, "POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 80000\r\n\r\n");
    client_send_bytes(second, body, 80000);
    r = client_receive(second);
    assert_int_equal(r.status, 200);
    response_free(&r);
    close(second);
    free(body);
}

/* Back-pressure: the producer stops while the client does not read, and goes on when it does. */
static void a_full_buffer_holds_the_producer(void **state)
{
    start((http_server_config_t){.max_output_bytes = 64 * 1024});
    f.stream_bytes = 1024u * 8192u;
    int fd = client_connect(f.port);
    client_send(fd, "GET /flood HTTP/1.0\r\n\r\n");
    wait_for(f.drained > 0);
    usleep(300000);
    assert_true(f.stream_bytes > 0);
    size_t total = 0;
    char *bytes = malloc(1u << 16);
    for (ssize_t got; (got = recv(fd, bytes, 1u << 16, 0)) > 0;)
        total += (size_t)got;
    assert_true(total > 1024u * 8192u);
    assert_true(f.drained > 1);
    free(bytes);
    close(fd);
}

static void a_client_that_never_reads_is_closed(void **state)
{
    start((http_server_config_t){.max_output_bytes = 64 * 1024, .write_timeout_ms = 400});
    f.stream_bytes = 8192u * 8192u;
    int fd = client_connect(f.port);
    client_send(fd, "GET /flood HTTP/1.1\r\nHost: x\r\n\r\n");
    wait_for(f.closed == 1);
    close(fd);
}

/* Thousands of pipelined requests of a client that does not read do not grow the output without
 * bound. */
static void pipelining_is_bounded(void **state)
{
    start((http_server_config_t){.max_output_bytes = 16 * 1024});
    int fd = client_connect(f.port);
    static const char one[] = "GET /aaaaaaaaaaaaaaaa HTTP/1.1\r\nHost: x\r\n\r\n";
    struct timeval brief = {0, 300000};
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &brief, sizeof(brief));
    size_t sent = 0;
    while (sent < 400000 && send(fd, one, sizeof(one) - 1, MSG_NOSIGNAL) == sizeof(one) - 1)
        sent++;
    assert_true(sent < 400000);
    uint32_t handled;
    do { /* what was read before the limit is still answered */
        handled = f.handled;
        usleep(200000);
    } while (f.handled != handled);
    clock_t busy = clock();
    usleep(300000);
    assert_int_equal(f.handled, handled);
    assert_true(clock() - busy < CLOCKS_PER_SEC / 10); /* waiting costs nothing */
    close(fd);
}

/* What is sent ahead of an answer is kept within bounds, without spinning, and answered in the end.
 */
static void input_ahead_is_bounded(void **state)
{
    start((http_server_config_t){.max_body_bytes = 300000});
    int fd = client_connect(f.port);
    char *body = calloc(1, 200000);
    client_send(fd, "GET /wait HTTP/1.1\r\nHost: x\r\n\r\n"
                    "POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 200000\r\n\r\n");
    client_send_bytes(fd, body, 200000);
    wait_for(f.handled == 1);
    clock_t busy = clock();
    usleep(300000);
    assert_true(clock() - busy < CLOCKS_PER_SEC / 10);
    loop_do(&f.loop, answer_waiting, NULL);
    response_t r = client_receive(fd);
    assert_string_equal(r.body, "late");
    response_free(&r);
    r = client_receive(fd);
    assert_string_equal(r.body, "/a 200000");
    response_free(&r);
    free(body);
    close(fd);
}

static void quiesce(void *context)
{
    http_server_quiesce(f.server);
}

static void quiescing_closes_after_the_answer(void **state)
{
    start((http_server_config_t){0});
    loop_do(&f.loop, quiesce, NULL);
    int fd = client_connect(f.port);
    client_send(fd, "GET /a HTTP/1.1\r\nHost: x\r\n\r\n");
    expect(fd, "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 4\r\n"
               "Connection: close\r\n\r\n/a 0");
    assert_true(client_closed(fd, 2000));
    close(fd);
}

static void a_taken_port_is_an_error(void **state)
{
    start((http_server_config_t){0});
    http_server_config_t config = {.port = f.port, .on_request = on_request};
    http_server_t *second = NULL;
    assert_int_equal(http_server_create(&config, f.loop.base, &second), XP_IO);
    assert_non_null(strstr(xp_error_last()->text, "cannot listen"));
    assert_null(second);
    config.host = "not an address";
    assert_int_equal(http_server_create(&config, f.loop.base, &second), XP_INVALID);
}

#define CASE(name) cmocka_unit_test_teardown(name, stop)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(keeps_connections_and_pipelines),
        CASE(streams_in_chunks),
        CASE(reads_chunked_bodies),
        CASE(refuses_with_json),
        CASE(a_refusal_is_not_lost),
        CASE(bounds_heads),
        CASE(deadlines),
        CASE(bounds_connections),
        CASE(bounds_all_bodies),
        CASE(a_full_buffer_holds_the_producer),
        CASE(a_client_that_never_reads_is_closed),
        CASE(pipelining_is_bounded),
        CASE(input_ahead_is_bounded),
        CASE(quiescing_closes_after_the_answer),
        CASE(a_taken_port_is_an_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
