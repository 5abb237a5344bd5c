/* SPDX-License-Identifier: MIT */
/* The bounded JSON reader and the writer; jansson reads back what the writer wrote. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <math.h>

#include "http/http_error.h"
#include "http/http_json.h"

static xp_status_t parse(const char *text, size_t length)
{
    json_t *root = NULL;
    xp_status_t status = http_json_parse_object(text, length, &root);
    assert_true((status == XP_OK) == (root != NULL));
    json_decref(root);
    return status;
}

/* "{"a": [ item, item, ... ]}" with `count` items. */
static char *repeated(const char *item, size_t count, size_t *length_out)
{
    size_t step = strlen(item) + 1;
    char *text = malloc(count * step + 16), *end = text;
    end += sprintf(end, "{\"a\":[");
    for (size_t i = 0; i < count; i++) {
        memcpy(end, item, step - 1);
        end[step - 1] = ',';
        end += step;
    }
    end += sprintf(end - 1, "]}") - 1;
    *length_out = (size_t)(end - text);
    return text;
}

static void bounds_values_and_containers(void **state)
{
    size_t length;
    char *text = repeated("1", HTTP_JSON_MAX_VALUES, &length);
    assert_int_equal(parse(text, length), XP_OK);
    free(text);
    text = repeated("1", HTTP_JSON_MAX_VALUES + 2, &length);
    assert_int_equal(parse(text, length), XP_INVALID);
    assert_non_null(strstr(xp_error_last()->text, "values"));
    free(text);
    text = repeated("{}", HTTP_JSON_MAX_CONTAINERS - 2, &length);
    assert_int_equal(parse(text, length), XP_OK);
    free(text);
    text = repeated("{}", HTTP_JSON_MAX_CONTAINERS, &length);
    assert_int_equal(parse(text, length), XP_INVALID);
    free(text);
}

static void bounds_nesting(void **state)
{
    for (int extra = 0; extra < 2; extra++) {
        char text[256] = "{\"a\":", *end = text + 5;
        for (int i = 1; i < HTTP_JSON_MAX_DEPTH + extra; i++)
            *end++ = '[';
        for (int i = 1; i < HTTP_JSON_MAX_DEPTH + extra; i++)
            *end++ = ']';
        *end++ = '}';
        assert_int_equal(parse(text, (size_t)(end - text)), extra ? XP_INVALID : XP_OK);
    }
    /* Brackets in strings are no nesting. */
    char text[300] = "{\"a\":\"\\\"";
    memset(text + strlen(text), '[', 100);
    strcat(text, "\"}");
    assert_int_equal(parse(text, strlen(text)), XP_OK);
}

static void refuses_what_is_no_object(void **state)
{
    static const char *const bad[] = {"",
                                      "1",
                                      "[]",
                                      "{",
                                      "{\"a\"}",
                                      "{\"a\":}",
                                      "{'a':1}",
                                      "{\"a\":1,}",
                                      "{\"a\":01}",
                                      "{\"a\":NaN}",
                                      "{\"a\":Infinity}",
                                      "{} {}",
                                      "{\"a\":\"\\u0000\"}",
                                      "{\"a\":\"\xff\"}",
                                      "{\"a\":\"\\ud800\"}",
                                      "{\"a\":1e400}",
                                      "{\"a\":123456789012345678901}"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        if (parse(bad[i], strlen(bad[i])) != XP_INVALID)
            fail_msg("accepted: %s", bad[i]);
        assert_true(xp_error_last()->text[0]);
    }
    assert_int_equal(parse("{}\0", 3), XP_INVALID);
    assert_int_equal(parse("{}garbage", 2), XP_OK); /* the length is believed, not a terminator */
}

/* Every byte value, alone and after a letter, and random bytes: what is written parses, and valid
 * text comes back unchanged. */
static void writer_output_parses(void **state)
{
    uint32_t random = 12345;
    for (int round = 0; round < 5000; round++) {
        char bytes[16];
        size_t length = round < 256 ? 1 : round < 512 ? 2 : 1 + (size_t)(round % 15);
        for (size_t i = 0; i < length; i++) {
            random = random * 1664525u + 1013904223u;
            bytes[i] = (char)(random >> 24);
        }
        if (round < 512)
            bytes[length - 1] = (char)(round % 256);
        if (round >= 256 && round < 512)
            bytes[0] = 'x';
        http_text_t text;
        json_error_t error;
        http_text_init(&text, 1000);
        http_text_json(&text, bytes, length);
        json_t *value =
            json_loadb(text.buf.data, text.buf.length, JSON_DECODE_ANY | JSON_ALLOW_NUL, &error);
        assert_non_null(value);
        json_t *same = json_stringn(bytes, length); /* NULL when it is not UTF-8 */
        if (same)
            assert_true(json_equal(same, value));
        else
            assert_non_null(strstr(text.buf.data, "\\ufffd"));
        json_decref(same);
        json_decref(value);
        http_text_fini(&text);
    }
}

static void writes_floats(void **state)
{
    static const float values[] = {0, -0.5f, -1.0f / 3, -9999, 1e-30f, -123.456f, 3.4028235e38f};
    http_text_t text;
    http_text_init(&text, 1000);
    for (size_t i = 0; i < 6; i++) {
        http_text_clear(&text);
        http_text_json_float(&text, values[i]);
        assert_true(strtof(text.buf.data, NULL) == values[i]);
    }
    http_text_clear(&text);
    http_text_json_float(&text, NAN);
    http_text_json_float(&text, -INFINITY);
    assert_string_equal(text.buf.data, "null-9999.0");
    http_text_fini(&text);
}

static void a_failure_sticks(void **state)
{
    http_text_t text;
    http_text_init(&text, 8);
    http_text_puts(&text, "12345");
    http_text_puts(&text, "67890");
    http_text_puts(&text, "x");
    assert_int_equal(text.status, XP_NO_MEMORY);
    assert_string_equal(text.buf.data, "12345");
    http_text_fini(&text);
}

static void writes_errors(void **state)
{
    http_problem_t problem = {0};
    http_text_t text;
    http_text_init(&text, 1000);
    assert_int_equal(http_problem_set(&problem, 429, NULL, NULL, "busy \"%s\"", "now"), XP_INVALID);
    http_problem_write(&problem, &text);
    assert_string_equal(
        text.buf.data, "{\"error\":{\"message\":\"busy \\\"now\\\"\",\"type\":\"rate_limit_error\","
                       "\"param\":null,\"code\":\"rate_limit_exceeded\"}}");
    assert_string_equal(http_problem_headers(429), "Retry-After: 1\r\n");
    assert_string_equal(http_problem_headers(400), "");
    http_text_fini(&text);
}

static void a_null_character_is_named(void **state)
{
    static const char body[] = "{\"prompt\": \"a\\u0000b\"}";
    json_t *object = NULL;
    assert_int_equal(http_json_parse_object(body, sizeof(body) - 1, &object), XP_INVALID);
    assert_non_null(strstr(xp_error_last()->text, "has \\u0000"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bounds_values_and_containers),
        cmocka_unit_test(bounds_nesting),
        cmocka_unit_test(refuses_what_is_no_object),
        cmocka_unit_test(a_null_character_is_named),
        cmocka_unit_test(writer_output_parses),
        cmocka_unit_test(writes_floats),
        cmocka_unit_test(a_failure_sticks),
        cmocka_unit_test(writes_errors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
