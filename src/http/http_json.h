/* SPDX-License-Identifier: MIT */
/*
 * JSON of the HTTP interface: a bounded reader and a writer.
 *
 * The reader is jansson behind a scan that bounds nesting and the number of values, so that a body
 * of a few megabytes cannot become gigabytes of objects. The writer appends to a growing buffer;
 * its first failure sticks, so that a writer of many fields checks once at the end.
 */
#ifndef XPOOL_HTTP_HTTP_JSON_H
#define XPOOL_HTTP_HTTP_JSON_H

#include <jansson.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/status.h"

#define HTTP_JSON_MAX_DEPTH      64
#define HTTP_JSON_MAX_VALUES     2000000u
#define HTTP_JSON_MAX_CONTAINERS 100000u

/* Parses one JSON object. XP_INVALID says line and column. Duplicate keys, numbers that do not fit,
 * NaN, invalid UTF-8 and anything after the object are errors. The caller owns `*object_out`. */
xp_status_t http_json_parse_object(const char *text, size_t length, json_t **object_out);

typedef struct http_text {
    xp_buf_t buf;
    xp_status_t status; /* first failure */
} http_text_t;

void http_text_init(http_text_t *text, size_t maximum_bytes);
void http_text_fini(http_text_t *text);
void http_text_clear(http_text_t *text); /* keeps the memory, forgets a failure */
void http_text_append(http_text_t *text, const char *bytes, size_t length);
void http_text_puts(http_text_t *text, const char *string);
void http_text_printf(http_text_t *text, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* A JSON string with its quotes. Invalid UTF-8 becomes U+FFFD. */
void http_text_json(http_text_t *text, const char *bytes, size_t length);
void http_text_json_string(http_text_t *text, const char *string); /* NULL: null */
/* Nine significant digits, which restores a float; null for NaN, -9999 for what is below it. */
void http_text_json_float(http_text_t *text, float value);

/* Bytes of the UTF-8 character at `data`, or 0 when it is not valid or not whole. */
size_t http_utf8_length(const char *data, size_t length);
#endif
