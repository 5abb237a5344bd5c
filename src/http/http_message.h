/* SPDX-License-Identifier: MIT */
/*
 * The wire form of HTTP/1.1 messages: heads and chunked bodies.
 *
 * Pure functions over (pointer, length); no I/O and no allocation. Used by the server for requests
 * and by the gateway for the responses of its backends. Strict where leniency lets two parties
 * disagree about where a message ends: a message that has both Content-Length and
 * Transfer-Encoding, several different lengths, folded headers or control characters is refused.
 */
#ifndef XPOOL_HTTP_HTTP_MESSAGE_H
#define XPOOL_HTTP_HTTP_MESSAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

#define HTTP_MAX_HEADERS       100
#define HTTP_MAX_CHUNK_LINE    256
#define HTTP_MAX_TRAILER_BYTES 8192
#define HTTP_MAX_TARGET_BYTES  4096

typedef struct http_slice {
    const char *data;
    size_t length;
} http_slice_t;

typedef struct http_header {
    http_slice_t name, value;
} http_header_t;

/* Every slice points into the text that was parsed. */
typedef struct http_head {
    http_slice_t method, target; /* requests */
    int status;                  /* responses */
    int minor;                   /* HTTP/1.<minor>: 0 or 1 */
    bool chunked;                /* Transfer-Encoding: chunked */
    bool has_length;             /* Content-Length was given */
    uint64_t length;
    bool close; /* the connection ends after this message */
    bool expect_continue;
    uint32_t header_count;
    http_header_t headers[HTTP_MAX_HEADERS];
} http_head_t;

/* Length of the head with its empty line, or 0 when `data` does not hold all of it yet. `*scanned`
 * keeps what was looked at by earlier calls; start with 0. */
size_t http_head_find(const char *data, size_t length, size_t *scanned);
/* `data` is one whole head as http_head_find() measured it. XP_INVALID says what is wrong. */
xp_status_t http_head_parse_request(const char *data, size_t length, http_head_t *head_out);
xp_status_t http_head_parse_response(const char *data, size_t length, http_head_t *head_out);
/* First header of that name, ignoring case; NULL when absent. */
const http_slice_t *http_head_header(const http_head_t *head, const char *name);
/* True for headers that belong to one connection and are not passed on by a proxy. */
bool http_header_is_hop_by_hop(http_slice_t name);

bool http_slice_equals(http_slice_t slice, const char *text);      /* exact */
bool http_slice_equals_case(http_slice_t slice, const char *text); /* ignoring ASCII case */
/* True when the comma-separated list holds the token, ignoring case. */
bool http_slice_has_token(http_slice_t list, const char *token);

/* Decodes %XX of a path into `out` (NUL-terminated). XP_INVALID for broken escapes, NUL or
 * overlength. */
xp_status_t http_path_decode(http_slice_t encoded, char *out, size_t out_bytes);
/* Value of one parameter of a query string, decoded. False when absent or malformed. */
bool http_query_value(http_slice_t query, const char *name, char *out, size_t out_bytes);

/* Incremental decoder of a chunked body. Zero-initialise. */
typedef struct http_chunk_decoder {
    uint8_t state;
    bool done; /* the last chunk and the trailers were consumed */
    bool has_digit;
    uint32_t line_bytes;
    uint64_t remaining;
} http_chunk_decoder_t;

/* Consumes bytes until a piece of payload, the end, or all of `data`. `*payload_out` may be empty.
 * Call again with the rest until consumed == length or done. XP_INVALID for a broken body. */
xp_status_t http_chunk_decode(http_chunk_decoder_t *decoder, const char *data, size_t length,
                              size_t *consumed_out, http_slice_t *payload_out);

const char *http_status_text(int status);
#endif
