/* SPDX-License-Identifier: MIT */
/*
 * Parsers of HTTP/1.1 heads and chunked bodies.
 *
 * Owns nothing and runs on any thread. It never reads past the length it is given, never allocates
 * and never decides what a connection does next; the server and the gateway do.
 */
#include "http/http_message.h"

#include <string.h>
#include <strings.h>

size_t http_head_find(const char *data, size_t length, size_t *scanned)
{
    /* Three bytes of overlap: an empty line may have begun in the part seen before. */
    size_t start = *scanned > 3 ? *scanned - 3 : 0;
    for (size_t i = start; i < length; i++) {
        if (data[i] != '\n')
            continue;
        if (i + 1 < length && data[i + 1] == '\n')
            return i + 2;
        if (i + 2 < length && data[i + 1] == '\r' && data[i + 2] == '\n')
            return i + 3;
    }
    *scanned = length;
    return 0;
}

bool http_slice_equals(http_slice_t slice, const char *text)
{
    return slice.length == strlen(text) && !memcmp(slice.data, text, slice.length);
}

bool http_slice_equals_case(http_slice_t slice, const char *text)
{
    return slice.length == strlen(text) && !strncasecmp(slice.data, text, slice.length);
}

static http_slice_t slice_trim(http_slice_t slice)
{
    while (slice.length && (slice.data[0] == ' ' || slice.data[0] == '\t')) {
        slice.data++;
        slice.length--;
    }
    while (slice.length &&
           (slice.data[slice.length - 1] == ' ' || slice.data[slice.length - 1] == '\t'))
        slice.length--;
    return slice;
}

/* Cuts the part before the next comma off `list`; false when nothing is left. */
static bool slice_next_item(http_slice_t *list, http_slice_t *item_out)
{
    if (!list->data)
        return false;
    const char *comma = memchr(list->data, ',', list->length);
    size_t length = comma ? (size_t)(comma - list->data) : list->length;
    *item_out = slice_trim((http_slice_t){list->data, length});
    if (comma) {
        list->data += length + 1;
        list->length -= length + 1;
    } else {
        *list = (http_slice_t){NULL, 0};
    }
    return true;
}

bool http_slice_has_token(http_slice_t list, const char *token)
{
    http_slice_t item;
    while (slice_next_item(&list, &item))
        if (http_slice_equals_case(item, token))
            return true;
    return false;
}

const http_slice_t *http_head_header(const http_head_t *head, const char *name)
{
    for (uint32_t i = 0; i < head->header_count; i++)
        if (http_slice_equals_case(head->headers[i].name, name))
            return &head->headers[i].value;
    return NULL;
}

bool http_header_is_hop_by_hop(http_slice_t name)
{
    static const char *const names[] = {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    };
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        if (http_slice_equals_case(name, names[i]))
            return true;
    return false;
}

/* The characters a method or a header name may have (RFC 9110, 5.6.2). */
static bool is_token_character(unsigned char c)
{
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
           (c && strchr("!#$%&'*+-.^_`|~", c));
}

static bool is_token(http_slice_t slice)
{
    for (size_t i = 0; i < slice.length; i++)
        if (!is_token_character((unsigned char)slice.data[i]))
            return false;
    return slice.length > 0;
}

/* Cuts one line off `*text`, without its LF or CRLF. */
static http_slice_t take_line(http_slice_t *text)
{
    const char *end = memchr(text->data, '\n', text->length);
    size_t length = end ? (size_t)(end - text->data) : text->length;
    http_slice_t line = {text->data, length};
    size_t used = end ? length + 1 : length;
    text->data += used;
    text->length -= used;
    if (line.length && line.data[line.length - 1] == '\r')
        line.length--;
    return line;
}

static xp_status_t parse_length(http_slice_t value, http_head_t *head)
{
    http_slice_t item;
    while (slice_next_item(&value, &item)) {
        uint64_t length = 0;
        if (!item.length || item.length > 18)
            return xp_fail(XP_INVALID, "Content-Length is not a number");
        for (size_t i = 0; i < item.length; i++) {
            if (item.data[i] < '0' || item.data[i] > '9')
                return xp_fail(XP_INVALID, "Content-Length is not a number");
            length = length * 10 + (uint64_t)(item.data[i] - '0');
        }
        if (head->has_length && head->length != length)
            return xp_fail(XP_INVALID, "Content-Length is given twice with different values");
        head->has_length = true;
        head->length = length;
    }
    return XP_OK;
}

static xp_status_t parse_headers(http_slice_t text, http_head_t *head)
{
    bool keep_alive = false;
    while (text.length) {
        http_slice_t line = take_line(&text);
        if (!line.length)
            break;
        if (line.data[0] == ' ' || line.data[0] == '\t')
            return xp_fail(XP_INVALID, "a header is folded over several lines");
        if (head->header_count == HTTP_MAX_HEADERS)
            return xp_fail(XP_INVALID, "more than %d headers", HTTP_MAX_HEADERS);
        const char *colon = memchr(line.data, ':', line.length);
        if (!colon)
            return xp_fail(XP_INVALID, "a header has no colon");
        http_header_t header;
        header.name = (http_slice_t){line.data, (size_t)(colon - line.data)};
        if (!is_token(header.name))
            return xp_fail(XP_INVALID, "a header's name has a character it must not have");
        header.value = slice_trim((http_slice_t){colon + 1, line.length - header.name.length - 1});
        for (size_t i = 0; i < header.value.length; i++) {
            unsigned char c = (unsigned char)header.value.data[i];
            if ((c < 0x20 && c != '\t') || c == 0x7f)
                return xp_fail(XP_INVALID, "header %.*s has a control character",
                               (int)(header.name.length < 40 ? header.name.length : 40),
                               header.name.data);
        }
        head->headers[head->header_count++] = header;
        if (http_slice_equals_case(header.name, "content-length")) {
            XP_TRY(parse_length(header.value, head));
        } else if (http_slice_equals_case(header.name, "transfer-encoding")) {
            if (head->chunked || !http_slice_equals_case(header.value, "chunked"))
                return xp_fail(XP_UNSUPPORTED, "Transfer-Encoding is not just \"chunked\"");
            head->chunked = true;
        } else if (http_slice_equals_case(header.name, "connection")) {
            head->close |= http_slice_has_token(header.value, "close");
            keep_alive |= http_slice_has_token(header.value, "keep-alive");
        } else if (http_slice_equals_case(header.name, "expect")) {
            head->expect_continue = http_slice_equals_case(header.value, "100-continue");
        }
    }
    if (head->chunked && head->has_length)
        return xp_fail(XP_INVALID, "both Content-Length and Transfer-Encoding are given");
    if (head->minor == 0) {
        if (head->chunked)
            return xp_fail(XP_INVALID, "Transfer-Encoding in an HTTP/1.0 message");
        if (!keep_alive)
            head->close = true;
    }
    return XP_OK;
}

static xp_status_t parse_version(http_slice_t version, int *minor_out)
{
    if (http_slice_equals(version, "HTTP/1.1"))
        *minor_out = 1;
    else if (http_slice_equals(version, "HTTP/1.0"))
        *minor_out = 0;
    else
        return xp_fail(XP_UNSUPPORTED, "the protocol is not HTTP/1.1 or HTTP/1.0");
    return XP_OK;
}

xp_status_t http_head_parse_request(const char *data, size_t length, http_head_t *head_out)
{
    http_head_t head;
    memset(&head, 0, offsetof(http_head_t, headers));
    http_slice_t text = {data, length};
    http_slice_t line = take_line(&text);
    const char *first = memchr(line.data, ' ', line.length);
    if (!first)
        return xp_fail(XP_INVALID, "the request line is not METHOD TARGET HTTP/1.1");
    head.method = (http_slice_t){line.data, (size_t)(first - line.data)};
    http_slice_t rest = {first + 1, line.length - head.method.length - 1};
    const char *second = memchr(rest.data, ' ', rest.length);
    if (!second)
        return xp_fail(XP_INVALID, "the request line is not METHOD TARGET HTTP/1.1");
    head.target = (http_slice_t){rest.data, (size_t)(second - rest.data)};
    if (!is_token(head.method) || head.method.length > 32)
        return xp_fail(XP_INVALID, "the method is not a word");
    if (!head.target.length || head.target.length > HTTP_MAX_TARGET_BYTES)
        return xp_fail(XP_INVALID, "the target is empty or longer than %d bytes",
                       HTTP_MAX_TARGET_BYTES);
    for (size_t i = 0; i < head.target.length; i++)
        if ((unsigned char)head.target.data[i] <= 0x20 || head.target.data[i] == 0x7f)
            return xp_fail(XP_INVALID, "the target has a control character");
    XP_TRY(parse_version((http_slice_t){second + 1, rest.length - head.target.length - 1},
                         &head.minor));
    XP_TRY(parse_headers(text, &head));
    if (head.minor == 1 && !http_head_header(&head, "host"))
        return xp_fail(XP_INVALID, "the Host header is missing");
    *head_out = head;
    return XP_OK;
}

xp_status_t http_head_parse_response(const char *data, size_t length, http_head_t *head_out)
{
    http_head_t head;
    memset(&head, 0, offsetof(http_head_t, headers));
    http_slice_t text = {data, length};
    http_slice_t line = take_line(&text);
    if (line.length < 12 || line.data[8] != ' ')
        return xp_fail(XP_INVALID, "the status line is not HTTP/1.1 NNN");
    XP_TRY(parse_version((http_slice_t){line.data, 8}, &head.minor));
    for (int i = 9; i < 12; i++) {
        if (line.data[i] < '0' || line.data[i] > '9')
            return xp_fail(XP_INVALID, "the status code is not a number");
        head.status = head.status * 10 + (line.data[i] - '0');
    }
    if (head.status < 100 || (line.length > 12 && line.data[12] != ' '))
        return xp_fail(XP_INVALID, "the status code is not a number from 100 to 999");
    XP_TRY(parse_headers(text, &head));
    *head_out = head;
    return XP_OK;
}

static int hex_value(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    if (c >= 'A' && c <= 'F')
        return c - 'A' + 10;
    return -1;
}

static xp_status_t percent_decode(http_slice_t encoded, bool plus_is_space, char *out,
                                  size_t out_bytes)
{
    size_t used = 0;
    for (size_t i = 0; i < encoded.length; i++) {
        char c = encoded.data[i];
        if (c == '%') {
            int high = i + 2 < encoded.length ? hex_value(encoded.data[i + 1]) : -1;
            int low = i + 2 < encoded.length ? hex_value(encoded.data[i + 2]) : -1;
            if (high < 0 || low < 0)
                return xp_fail(XP_INVALID, "a %%-escape of the target is broken");
            c = (char)(high * 16 + low);
            if (!c)
                return xp_fail(XP_INVALID, "the target holds a NUL");
            i += 2;
        } else if (c == '+' && plus_is_space) {
            c = ' ';
        }
        if (used + 1 >= out_bytes)
            return xp_fail(XP_INVALID, "the path is longer than %zu bytes", out_bytes - 1);
        out[used++] = c;
    }
    out[used] = '\0';
    return XP_OK;
}

xp_status_t http_path_decode(http_slice_t encoded, char *out, size_t out_bytes)
{
    return percent_decode(encoded, false, out, out_bytes);
}

bool http_query_value(http_slice_t query, const char *name, char *out, size_t out_bytes)
{
    while (query.length) {
        const char *end = memchr(query.data, '&', query.length);
        size_t length = end ? (size_t)(end - query.data) : query.length;
        http_slice_t item = {query.data, length};
        size_t used = end ? length + 1 : length;
        query.data += used;
        query.length -= used;
        const char *equals = memchr(item.data, '=', item.length);
        if (!equals)
            continue;
        http_slice_t key = {item.data, (size_t)(equals - item.data)};
        if (!http_slice_equals(key, name))
            continue;
        http_slice_t value = {equals + 1, item.length - key.length - 1};
        return percent_decode(value, true, out, out_bytes) == XP_OK;
    }
    return false;
}

enum {
    CHUNK_SIZE = 0,  /* hexadecimal digits */
    CHUNK_EXTENSION, /* ignored up to the line's end */
    CHUNK_SIZE_LF,   /* the LF after the size line's CR */
    CHUNK_DATA,
    CHUNK_DATA_CR, /* line end after the payload */
    CHUNK_DATA_LF,
    CHUNK_TRAILER, /* at the start of a trailer line */
    CHUNK_TRAILER_LINE,
    CHUNK_TRAILER_LF, /* the LF of the empty line that ends the message */
};

static xp_status_t chunk_size_done(http_chunk_decoder_t *decoder)
{
    if (!decoder->has_digit)
        return xp_fail(XP_INVALID, "a chunk has no size");
    decoder->has_digit = false;
    decoder->line_bytes = 0;
    decoder->state = decoder->remaining ? CHUNK_DATA : CHUNK_TRAILER;
    return XP_OK;
}

static xp_status_t chunk_step(http_chunk_decoder_t *decoder, char c)
{
    switch (decoder->state) {
    case CHUNK_SIZE: {
        int digit = hex_value(c);
        if (digit >= 0) {
            if (decoder->remaining >> 40)
                return xp_fail(XP_INVALID, "a chunk's size is too large");
            decoder->remaining = decoder->remaining * 16 + (uint64_t)digit;
            decoder->has_digit = true;
        } else if (!decoder->has_digit) {
            return xp_fail(XP_INVALID, "a chunk has no size");
        } else if (c == ';' || c == ' ' || c == '\t') {
            decoder->state = CHUNK_EXTENSION;
        } else if (c == '\r') {
            decoder->state = CHUNK_SIZE_LF;
        } else if (c == '\n') {
            return chunk_size_done(decoder);
        } else {
            return xp_fail(XP_INVALID, "a chunk's size is not hexadecimal");
        }
        break;
    }
    case CHUNK_EXTENSION:
        if (c == '\r')
            decoder->state = CHUNK_SIZE_LF;
        else if (c == '\n')
            return chunk_size_done(decoder);
        break;
    case CHUNK_SIZE_LF:
        if (c != '\n')
            return xp_fail(XP_INVALID, "a chunk's size line has a bare CR");
        return chunk_size_done(decoder);
    case CHUNK_DATA_CR:
        if (c == '\r') {
            decoder->state = CHUNK_DATA_LF;
            break;
        }
        /* fall through */
    case CHUNK_DATA_LF:
        if (c != '\n')
            return xp_fail(XP_INVALID, "a chunk is longer than its size");
        decoder->state = CHUNK_SIZE;
        decoder->line_bytes = 0;
        break;
    case CHUNK_TRAILER:
        if (c == '\r')
            decoder->state = CHUNK_TRAILER_LF;
        else if (c == '\n')
            decoder->done = true;
        else
            decoder->state = CHUNK_TRAILER_LINE;
        break;
    case CHUNK_TRAILER_LINE:
        if (c == '\n')
            decoder->state = CHUNK_TRAILER;
        break;
    case CHUNK_TRAILER_LF:
        if (c != '\n')
            return xp_fail(XP_INVALID, "a trailer has a bare CR");
        decoder->done = true;
        break;
    default:
        return xp_fail(XP_INVALID, "a chunk decoder is in no known state");
    }
    return XP_OK;
}

xp_status_t http_chunk_decode(http_chunk_decoder_t *decoder, const char *data, size_t length,
                              size_t *consumed_out, http_slice_t *payload_out)
{
    size_t used = 0;
    http_slice_t payload = {data, 0};
    while (used < length && !decoder->done) {
        if (decoder->state == CHUNK_DATA) {
            size_t part = length - used;
            if (part > decoder->remaining)
                part = (size_t)decoder->remaining;
            payload = (http_slice_t){data + used, part};
            used += part;
            decoder->remaining -= part;
            if (!decoder->remaining)
                decoder->state = CHUNK_DATA_CR;
            break;
        }
        uint32_t limit =
            decoder->state >= CHUNK_TRAILER ? HTTP_MAX_TRAILER_BYTES : HTTP_MAX_CHUNK_LINE;
        if (++decoder->line_bytes > limit)
            return xp_fail(XP_INVALID, "a chunk's size line or the trailers are too long");
        XP_TRY(chunk_step(decoder, data[used]));
        used++;
    }
    *consumed_out = used;
    *payload_out = payload;
    return XP_OK;
}

const char *http_status_text(int status)
{
    switch (status) {
    case 200:
        return "OK";
    case 201:
        return "Created";
    case 202:
        return "Accepted";
    case 204:
        return "No Content";
    case 400:
        return "Bad Request";
    case 401:
        return "Unauthorized";
    case 403:
        return "Forbidden";
    case 404:
        return "Not Found";
    case 405:
        return "Method Not Allowed";
    case 408:
        return "Request Timeout";
    case 409:
        return "Conflict";
    case 413:
        return "Content Too Large";
    case 415:
        return "Unsupported Media Type";
    case 422:
        return "Unprocessable Content";
    case 429:
        return "Too Many Requests";
    case 431:
        return "Request Header Fields Too Large";
    case 500:
        return "Internal Server Error";
    case 501:
        return "Not Implemented";
    case 502:
        return "Bad Gateway";
    case 503:
        return "Service Unavailable";
    case 504:
        return "Gateway Timeout";
    case 505:
        return "HTTP Version Not Supported";
    default:
        return "Status";
    }
}
