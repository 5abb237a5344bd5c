/* SPDX-License-Identifier: MIT */
/* Heads and chunked bodies: what RFC 9112 allows is read, what it forbids is refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "http/http_message.h"

static xp_status_t parse(const char *text, http_head_t *head)
{
    return http_head_parse_request(text, strlen(text), head);
}

static void reads_a_request(void **state)
{
    http_head_t head;
    assert_int_equal(parse("POST /v1/x?a=b HTTP/1.1\r\nHost: h\r\ncontent-LENGTH:  12 \r\n"
                           "Connection: Keep-Alive, close\r\nX: \r\n\r\n",
                           &head),
                     XP_OK);
    assert_true(http_slice_equals(head.method, "POST"));
    assert_true(http_slice_equals(head.target, "/v1/x?a=b"));
    assert_true(head.has_length && head.length == 12);
    assert_true(head.close);
    assert_int_equal(head.minor, 1);
    assert_int_equal(http_head_header(&head, "x")->length, 0);
    assert_null(http_head_header(&head, "y"));
    assert_int_equal(parse("GET / HTTP/1.0\r\n\r\n", &head), XP_OK);
    assert_true(head.close);
    assert_int_equal(parse("GET / HTTP/1.1\nHost: h\n\n", &head), XP_OK);
}

static void refuses_broken_requests(void **state)
{
    static const char *const bad[] = {
        "GET /\r\n\r\n",
        "GET / HTTP/2.0\r\nHost: h\r\n\r\n",
        "GET / HTTP/1.1\r\n\r\n",
        "G@T / HTTP/1.1\r\nHost: h\r\n\r\n",
        "GET  / HTTP/1.1\r\nHost: h\r\n\r\n",
        "GET / HTTP/1.1 \r\nHost: h\r\n\r\n",
        "GET /\x01 HTTP/1.1\r\nHost: h\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: h\r\n folded\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: h\r\nno colon\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: h\r\nName : v\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: h\r\nA: b\rc\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: -1\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1, 2\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 99999999999999999999\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: "
        "chunked\r\n\r\n",
        "POST / HTTP/1.0\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n",
    };
    http_head_t head;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        if (parse(bad[i], &head) == XP_OK)
            fail_msg("accepted: %s", bad[i]);
    }
}

static void bounds_headers(void **state)
{
    char text[8192];
    http_head_t head;
    for (int count = HTTP_MAX_HEADERS - 1; count <= HTTP_MAX_HEADERS; count++) {
        size_t used = (size_t)sprintf(text, "GET / HTTP/1.1\r\nHost: h\r\n");
        for (int i = 0; i < count; i++)
            used += (size_t)sprintf(text + used, "a%d: b\r\n", i);
        strcpy(text + used, "\r\n");
        assert_int_equal(parse(text, &head) == XP_OK, count == HTTP_MAX_HEADERS - 1);
    }
}

static void reads_a_response(void **state)
{
    static const char text[] = "HTTP/1.1 429 Slow down\r\nRetry-After: 1\r\n\r\n";
    http_head_t head;
    assert_int_equal(http_head_parse_response(text, sizeof(text) - 1, &head), XP_OK);
    assert_int_equal(head.status, 429);
    assert_false(head.has_length);
    assert_int_not_equal(http_head_parse_response("HTTP/1.1 2x0 OK\r\n\r\n", 19, &head), XP_OK);
    assert_int_not_equal(http_head_parse_response("nonsense\r\n\r\n", 12, &head), XP_OK);
}

/* The end is found wherever the bytes happen to be split. */
static void finds_the_end(void **state)
{
    static const char text[] = "GET / HTTP/1.1\r\nHost: h\r\n\r\nrest";
    size_t length = strlen(text) - 4;
    for (size_t step = 1; step < sizeof(text); step++) {
        size_t scanned = 0, found = 0, have = 0;
        while (!found && have < strlen(text)) {
            have = have + step < strlen(text) ? have + step : strlen(text);
            found = http_head_find(text, have, &scanned);
        }
        assert_int_equal(found, length);
    }
}

static size_t decode(const char *text, size_t length, size_t step, char *out, bool *done)
{
    http_chunk_decoder_t decoder = {0};
    size_t used = 0, filled = 0;
    while (used < length && !decoder.done) {
        size_t part = length - used < step ? length - used : step, consumed;
        http_slice_t payload;
        if (http_chunk_decode(&decoder, text + used, part, &consumed, &payload) != XP_OK)
            return SIZE_MAX;
        memcpy(out + filled, payload.data, payload.length);
        filled += payload.length;
        used += consumed;
    }
    out[filled] = '\0';
    *done = decoder.done;
    return filled;
}

static void decodes_chunks(void **state)
{
    static const char text[] = "5\r\nhello\r\n1;ext=\"x\"\r\n,\r\n00A\r\n 123456789\r\n0\r\n"
                               "Trailer: x\r\n\r\nnext";
    char out[64];
    bool done;
    for (size_t step = 1; step < sizeof(text); step++) {
        assert_int_equal(decode(text, sizeof(text) - 1, step, out, &done), 16);
        assert_string_equal(out, "hello, 123456789");
        assert_true(done);
    }
    static const char *const bad[] = {"\r\n", "g\r\n",  "5\r\nhelloX\r\n",      "-1\r\n",
                                      "5\rX", "5x\r\n", "fffffffffffffffff\r\n"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_int_equal(decode(bad[i], strlen(bad[i]), 100, out, &done), SIZE_MAX);
}

static void bounds_chunk_lines(void **state)
{
    char text[HTTP_MAX_TRAILER_BYTES + 64], out[16];
    bool done;
    memset(text, 'x', sizeof(text));
    memcpy(text, "1;", 2);
    assert_int_equal(decode(text, sizeof(text), 4096, out, &done), SIZE_MAX);
    memset(text, 'x', sizeof(text));
    memcpy(text, "0\r\n", 3);
    assert_int_equal(decode(text, sizeof(text), 4096, out, &done), SIZE_MAX);
}

static xp_status_t path(const char *text, char *out, size_t bytes)
{
    return http_path_decode((http_slice_t){text, strlen(text)}, out, bytes);
}

static void decodes_paths(void **state)
{
    char out[16];
    assert_int_equal(path("/a%2Fb%20c+d", out, sizeof(out)), XP_OK);
    assert_string_equal(out, "/a/b c+d");
    assert_int_not_equal(path("/%", out, sizeof(out)), XP_OK);
    assert_int_not_equal(path("/%4", out, sizeof(out)), XP_OK);
    assert_int_not_equal(path("/%zz", out, sizeof(out)), XP_OK);
    assert_int_not_equal(path("/%00", out, sizeof(out)), XP_OK);
    assert_int_not_equal(path("/0123456789abcdef", out, sizeof(out)), XP_OK);
    http_slice_t query = {"a=1&model=x%2Fy+z&b", 19};
    assert_true(http_query_value(query, "model", out, sizeof(out)));
    assert_string_equal(out, "x/y z");
    assert_false(http_query_value(query, "b", out, sizeof(out)));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reads_a_request),    cmocka_unit_test(refuses_broken_requests),
        cmocka_unit_test(bounds_headers),     cmocka_unit_test(reads_a_response),
        cmocka_unit_test(finds_the_end),      cmocka_unit_test(decodes_chunks),
        cmocka_unit_test(bounds_chunk_lines), cmocka_unit_test(decodes_paths),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
