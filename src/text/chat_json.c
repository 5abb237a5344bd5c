/* SPDX-License-Identifier: MIT */
/* JSON as Python's json.dumps(value, ensure_ascii=False) writes it, which is what Jinja's tojson is
 * in transformers. Pure functions, any thread. */
#include "text/chat_private.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static xp_status_t append_string(const char *text, size_t length, xp_buf_t *out)
{
    static const char plain[] = "\"\\\n\r\t\b\f", letters[] = "\"\\nrtbf";
    XP_TRY(xp_buf_append(out, "\"", 1));
    size_t done = 0;
    for (size_t at = 0; at < length; at++) {
        unsigned char c = (unsigned char)text[at];
        if (c >= 0x20 && c != '"' && c != '\\')
            continue;
        XP_TRY(xp_buf_append(out, text + done, at - done));
        const char *known = c ? strchr(plain, c) : NULL;
        if (known)
            XP_TRY(xp_buf_printf(out, "\\%c", letters[known - plain]));
        else
            XP_TRY(xp_buf_printf(out, "\\u%04x", c));
        done = at + 1;
    }
    XP_TRY(xp_buf_append(out, text + done, length - done));
    return xp_buf_append(out, "\"", 1);
}

/* Python's repr(float): the shortest digits that give the number back, with an exponent below 1e-4
 * and from 1e16 on. */
static xp_status_t append_real(double value, xp_buf_t *out)
{
    char text[40], digits[24];
    int precision = 0;
    do {
        snprintf(text, sizeof(text), "%.*e", precision, value);
    } while (strtod(text, NULL) != value && ++precision < 17);
    const char *p = text;
    int count = 0;
    bool negative = *p == '-';
    for (p += negative; *p != 'e'; p++) {
        if (*p != '.')
            digits[count++] = *p;
    }
    int exponent = atoi(p + 1);
    while (count > 1 && digits[count - 1] == '0')
        count--;
    if (negative)
        XP_TRY(xp_buf_append(out, "-", 1));
    if (exponent < -4 || exponent >= 16) {
        XP_TRY(xp_buf_append(out, digits, 1));
        if (count > 1)
            XP_TRY(xp_buf_printf(out, ".%.*s", count - 1, digits + 1));
        return xp_buf_printf(out, "e%c%02d", exponent < 0 ? '-' : '+', abs(exponent));
    }
    if (exponent < 0)
        return xp_buf_printf(out, "0.%.*s%.*s", -exponent - 1, "000", count, digits);
    for (int i = 0; i <= exponent; i++)
        XP_TRY(xp_buf_append(out, i < count ? &digits[i] : "0", 1));
    if (count <= exponent + 1)
        return xp_buf_append(out, ".0", 2);
    return xp_buf_printf(out, ".%.*s", count - exponent - 1, digits + exponent + 1);
}

static xp_status_t append_value(const json_t *value, int depth, xp_buf_t *out)
{
    if (depth > CHAT_MAX_JSON_DEPTH)
        return xp_fail(XP_INVALID, "JSON nested more than %d deep", CHAT_MAX_JSON_DEPTH);
    switch (json_typeof(value)) {
    case JSON_OBJECT: {
        const char *key;
        json_t *member;
        bool first = true;
        XP_TRY(xp_buf_append(out, "{", 1));
        json_object_foreach((json_t *)value, key, member)
        {
            if (!first)
                XP_TRY(xp_buf_append(out, ", ", 2));
            first = false;
            XP_TRY(append_string(key, strlen(key), out));
            XP_TRY(xp_buf_append(out, ": ", 2));
            XP_TRY(append_value(member, depth + 1, out));
        }
        return xp_buf_append(out, "}", 1);
    }
    case JSON_ARRAY:
        XP_TRY(xp_buf_append(out, "[", 1));
        for (size_t i = 0; i < json_array_size(value); i++) {
            if (i)
                XP_TRY(xp_buf_append(out, ", ", 2));
            XP_TRY(append_value(json_array_get(value, i), depth + 1, out));
        }
        return xp_buf_append(out, "]", 1);
    case JSON_STRING:
        return append_string(json_string_value(value), json_string_length(value), out);
    case JSON_INTEGER:
        return xp_buf_printf(out, "%" JSON_INTEGER_FORMAT, json_integer_value(value));
    case JSON_REAL:
        return append_real(json_real_value(value), out);
    case JSON_TRUE:
        return xp_buf_append(out, "true", 4);
    case JSON_FALSE:
        return xp_buf_append(out, "false", 5);
    case JSON_NULL:
        break;
    }
    return xp_buf_append(out, "null", 4);
}

xp_status_t chat_append_json(const json_t *value, xp_buf_t *out)
{
    return append_value(value, 0, out);
}
