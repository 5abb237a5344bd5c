/* SPDX-License-Identifier: MIT */
/*
 * The bounded JSON reader and the JSON writer.
 *
 * Owns nothing beyond the objects of its callers; runs on any thread. It never logs and never
 * decides what an HTTP status a bad body gets.
 */
#include "http/http_json.h"

#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

/* Counts nesting and values without understanding them; jansson checks the grammar afterwards. */
static xp_status_t json_scan(const char *text, size_t length)
{
    uint32_t depth = 0, values = 0, containers = 0;
    bool in_string = false;
    for (size_t i = 0; i < length; i++) {
        char c = text[i];
        if (in_string) {
            if (c == '\\')
                i++;
            else if (c == '"')
                in_string = false;
            continue;
        }
        switch (c) {
        case '"':
            in_string = true;
            break;
        case '{':
        case '[':
            if (++depth > HTTP_JSON_MAX_DEPTH)
                return xp_fail(XP_INVALID, "invalid JSON: nested deeper than %d levels at byte %zu",
                               HTTP_JSON_MAX_DEPTH, i);
            if (++containers > HTTP_JSON_MAX_CONTAINERS)
                return xp_fail(XP_INVALID, "invalid JSON: more than %u objects and arrays",
                               HTTP_JSON_MAX_CONTAINERS);
            break;
        case '}':
        case ']':
            if (depth)
                depth--;
            break;
        case ',':
            if (++values > HTTP_JSON_MAX_VALUES)
                return xp_fail(XP_INVALID, "invalid JSON: more than %u values",
                               HTTP_JSON_MAX_VALUES);
            break;
        default:
            break;
        }
    }
    return XP_OK;
}

xp_status_t http_json_parse_object(const char *text, size_t length, json_t **object_out)
{
    XP_TRY(json_scan(text, length));
    json_error_t error;
    json_t *root = json_loadb(text, length, JSON_REJECT_DUPLICATES, &error);
    if (!root && json_error_code(&error) == json_error_null_character)
        return xp_fail(XP_INVALID,
                       "a string at line %d, column %d has \\u0000, which no text holds",
                       error.line, error.column);
    if (!root)
        return xp_fail(XP_INVALID, "invalid JSON at line %d, column %d: %s", error.line,
                       error.column, error.text);
    if (!json_is_object(root)) {
        json_decref(root);
        return xp_fail(XP_INVALID, "the body must be a JSON object");
    }
    *object_out = root;
    return XP_OK;
}

void http_text_init(http_text_t *text, size_t maximum_bytes)
{
    xp_buf_init(&text->buf, maximum_bytes);
    text->status = XP_OK;
}

void http_text_fini(http_text_t *text)
{
    xp_buf_fini(&text->buf);
}

void http_text_clear(http_text_t *text)
{
    xp_buf_clear(&text->buf);
    text->status = XP_OK;
}

void http_text_append(http_text_t *text, const char *bytes, size_t length)
{
    if (text->status == XP_OK)
        text->status = xp_buf_append(&text->buf, bytes, length);
}

void http_text_puts(http_text_t *text, const char *string)
{
    http_text_append(text, string, strlen(string));
}

void http_text_printf(http_text_t *text, const char *format, ...)
{
    /* Only short scalars are printed this way, so a fixed buffer does; anything longer is an error.
     */
    char line[512];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line, sizeof(line), format, arguments);
    va_end(arguments);
    XP_ASSERT(length >= 0 && (size_t)length < sizeof(line));
    http_text_append(text, line, (size_t)length);
}

size_t http_utf8_length(const char *data, size_t length)
{
    const unsigned char *p = (const unsigned char *)data;
    if (!length)
        return 0;
    if (p[0] < 0x80)
        return 1;
    size_t need = p[0] >= 0xf0 && p[0] <= 0xf4 ? 4 : p[0] >= 0xe0 ? 3 : p[0] >= 0xc2 ? 2 : 0;
    if (p[0] > 0xf4 || !need || need > length)
        return 0;
    for (size_t i = 1; i < need; i++)
        if ((p[i] & 0xc0) != 0x80)
            return 0;
    /* Overlong forms, surrogates and values past U+10FFFF. */
    if ((p[0] == 0xe0 && p[1] < 0xa0) || (p[0] == 0xed && p[1] > 0x9f) ||
        (p[0] == 0xf0 && p[1] < 0x90) || (p[0] == 0xf4 && p[1] > 0x8f))
        return 0;
    return need;
}

void http_text_json(http_text_t *text, const char *bytes, size_t length)
{
    http_text_append(text, "\"", 1);
    size_t plain = 0; /* start of the run not yet written */
    for (size_t i = 0; i < length;) {
        unsigned char c = (unsigned char)bytes[i];
        size_t step = http_utf8_length(bytes + i, length - i);
        if (step && c >= 0x20 && c != '"' && c != '\\' && c != 0x7f) {
            i += step;
            continue;
        }
        http_text_append(text, bytes + plain, i - plain);
        if (!step) {
            http_text_puts(text, "\\ufffd");
        } else if (c == '"' || c == '\\') {
            char escape[2] = {'\\', (char)c};
            http_text_append(text, escape, 2);
        } else if (c == '\n') {
            http_text_append(text, "\\n", 2);
        } else if (c == '\t') {
            http_text_append(text, "\\t", 2);
        } else if (c == '\r') {
            http_text_append(text, "\\r", 2);
        } else {
            http_text_printf(text, "\\u%04x", c);
        }
        i++;
        plain = i;
    }
    http_text_append(text, bytes + plain, length - plain);
    http_text_append(text, "\"", 1);
}

void http_text_json_string(http_text_t *text, const char *string)
{
    if (string)
        http_text_json(text, string, strlen(string));
    else
        http_text_puts(text, "null");
}

void http_text_json_float(http_text_t *text, float value)
{
    if (isnan(value))
        http_text_puts(text, "null");
    else if (value < -9999.0f)
        http_text_puts(text, "-9999.0");
    else if (value > 9999.0f)
        http_text_puts(text, "9999.0");
    else
        http_text_printf(text, "%.9g", (double)value);
}
