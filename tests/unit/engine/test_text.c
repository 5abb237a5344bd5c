/* SPDX-License-Identifier: MIT */
/* Streaming text and stop strings: every way of cutting a text into tokens against a search in the
 * whole text. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "engine/text.h"

static tokenizer_t *tokenizer;

static int set_up(void **state)
{
    (void)state;
    return tokenizer_load(XPOOL_SOURCE_DIR "/models/tales/qwen3-moe", &tokenizer) == XP_OK ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    tokenizer_destroy(tokenizer);
    return 0;
}

/* Tokens of single bytes, so that every character and stop string is cut everywhere. */
static uint32_t byte_tokens(const char *text, int32_t *ids)
{
    uint32_t count = 0;
    for (const char *c = text; *c; c++) {
        int32_t found = -1;
        for (uint32_t id = 0; id < tokenizer_vocab_size(tokenizer) && found < 0; id++) {
            const char *bytes;
            if (!tokenizer_token_is_special(tokenizer, (int32_t)id) &&
                tokenizer_token_bytes(tokenizer, (int32_t)id, &bytes) == 1 && bytes[0] == *c)
                found = (int32_t)id;
        }
        assert_true(found >= 0);
        ids[count++] = found;
    }
    return count;
}

typedef struct result {
    char text[4096];
    int32_t stop;
    uint32_t used; /* tokens until the end */
} result_t;

static void stream(const int32_t *ids, uint32_t count, const engine_sampling_t *sampling,
                   size_t piece_bytes, result_t *result)
{
    engine_text_t text;
    assert_int_equal(engine_text_init(&text), XP_OK);
    engine_text_begin(&text, tokenizer, sampling);
    memset(result, 0, sizeof *result);
    result->stop = -1;
    char piece[300];
    for (uint32_t i = 0; i < count && result->stop < 0; i++) {
        assert_int_equal(engine_text_push(&text, ids[i], sampling, true, &result->stop), XP_OK);
        result->used = i + 1;
        uint32_t length = engine_text_take(&text, piece, piece_bytes);
        assert_int_equal(strlen(piece), length);
        assert_true((piece[0] & 0xC0) != 0x80); /* begins a character */
        strcat(result->text, piece);
        /* What went out can never be taken back: it must not reach into a later match. */
    }
    assert_int_equal(engine_text_finish(&text, result->stop >= 0), XP_OK);
    while (engine_text_take(&text, piece, piece_bytes) > 0)
        strcat(result->text, piece);
    engine_text_fini(&text);
}

static engine_sampling_t with_stops(uint32_t count, const char *const *stops)
{
    engine_sampling_t sampling;
    engine_sampling_default(&sampling);
    sampling.stop_count = count;
    for (uint32_t i = 0; i < count; i++)
        strcpy(sampling.stops[i], stops[i]);
    return sampling;
}

static void without_stops_the_text_is_whole(void **state)
{
    (void)state;
    const char *samples[] = {"plain", "caf\xC3\xA9 \xF0\x9F\xA6\x8A!", "\xE2\x82\xAC\xE2\x82\xAC",
                             ""};
    int32_t ids[200];
    for (uint32_t i = 0; i < 4; i++) {
        engine_sampling_t sampling = with_stops(0, NULL);
        result_t result;
        stream(ids, byte_tokens(samples[i], ids), &sampling, 256, &result);
        assert_string_equal(result.text, samples[i]);
        stream(ids, byte_tokens(samples[i], ids), &sampling, 5, &result);
        assert_string_equal(result.text, samples[i]);
    }
}

static void stops_cut_the_text(void **state)
{
    (void)state;
    static const char *const stops[] = {"END", "\n\n", "aab", "\xF0\x9F\xA6\x8A"};
    engine_sampling_t sampling = with_stops(4, stops);
    static const struct {
        const char *text, *want;
        int32_t stop;
    } rows[] = {
        {"one END two", "one ", 0},
        {"EEND", "E", 0},
        {"ENENDx", "EN", 0},
        {"aaab", "a", 2},
        {"aaaaaab!", "aaaa", 2},
        {"a\n b\n\nc", "a\n b", 1},
        {"fox \xF0\x9F\xA6\x8A", "fox ", 3},
        {"EN", "EN", -1},
        {"aa", "aa", -1},
        {"END", "", 0},
        {"x\n", "x\n", -1},
    };
    int32_t ids[200];
    for (uint32_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        result_t result;
        stream(ids, byte_tokens(rows[i].text, ids), &sampling, 256, &result);
        assert_string_equal(result.text, rows[i].want);
        assert_int_equal(result.stop, rows[i].stop);
    }
    sampling.include_stop = true;
    result_t result;
    stream(ids, byte_tokens("one END two", ids), &sampling, 256, &result);
    assert_string_equal(result.text, "one END");
}

/* Random texts over few letters; the reference searches the growing whole text. */
static void random_against_whole_text_search(void **state)
{
    (void)state;
    static const char *const stops[] = {"aba", "bb", "cabc", "aaaa"};
    srand(9);
    for (uint32_t turn = 0; turn < 3000; turn++) {
        engine_sampling_t sampling = with_stops(1 + turn % 4, stops);
        sampling.include_stop = turn & 4;
        char text[64] = "";
        uint32_t length = (uint32_t)rand() % 40;
        for (uint32_t i = 0; i < length; i++)
            text[i] = "abcd"[rand() % 4];
        text[length] = '\0';
        char want[64];
        strcpy(want, text);
        int32_t stop = -1;
        for (uint32_t end = 1; end <= length && stop < 0; end++) {
            /* Of those that complete at this character the one that begins first. */
            for (uint32_t i = 0; i < sampling.stop_count; i++) {
                uint32_t size = (uint32_t)strlen(stops[i]);
                if (end >= size && memcmp(text + end - size, stops[i], size) == 0 &&
                    (stop < 0 || size > strlen(stops[stop])))
                    stop = (int32_t)i;
            }
            if (stop >= 0)
                want[sampling.include_stop ? end : end - strlen(stops[stop])] = '\0';
        }
        int32_t ids[64];
        result_t result;
        stream(ids, byte_tokens(text, ids), &sampling, 2 + turn % 30, &result);
        assert_int_equal(result.stop, stop);
        assert_string_equal(result.text, want);
    }
}

static void unfinished_characters_become_replacements(void **state)
{
    (void)state;
    engine_sampling_t sampling = with_stops(0, NULL);
    int32_t ids[8];
    uint32_t count = byte_tokens("\xF0\x9F\xA6\x8A", ids);
    result_t result;
    stream(ids, count - 1, &sampling, 256, &result);
    xp_buf_t whole;
    xp_buf_init(&whole, 100);
    assert_int_equal(tokenizer_decode(tokenizer, ids, count - 1, true, &whole), XP_OK);
    assert_string_equal(result.text, whole.data);
    xp_buf_fini(&whole);
}

static void without_tokenizer_there_is_no_text(void **state)
{
    (void)state;
    engine_text_t text;
    engine_sampling_t sampling = with_stops(0, NULL);
    char out[10];
    int32_t stop = 7;
    assert_int_equal(engine_text_init(&text), XP_OK);
    engine_text_begin(&text, NULL, &sampling);
    assert_int_equal(engine_text_push(&text, 5, &sampling, true, &stop), XP_OK);
    assert_int_equal(stop, -1);
    assert_int_equal(engine_text_finish(&text, false), XP_OK);
    assert_int_equal(engine_text_take(&text, out, sizeof out), 0);
    engine_text_fini(&text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(without_stops_the_text_is_whole),
        cmocka_unit_test(stops_cut_the_text),
        cmocka_unit_test(random_against_whole_text_search),
        cmocka_unit_test(unfinished_characters_become_replacements),
        cmocka_unit_test(without_tokenizer_there_is_no_text),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
