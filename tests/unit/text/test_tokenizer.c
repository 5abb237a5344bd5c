/* SPDX-License-Identifier: MIT */
/*
 * Tokenizers: small ones written here, whose ids can be worked out by hand, golden vectors of the
 * `tokenizers` library (golden_tales.jsonl; ../shared where it lies beside the checkout),
 * streaming, and what must be refused.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <jansson.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "text/internal.h"
#include "text/tokenizer.h"

#define TALES  XPOOL_SOURCE_DIR "/models/tales/qwen3-moe"
#define SHARED XPOOL_SOURCE_DIR "/../shared/data/tokenizers/"

#define MODEL(vocab, merges, more)                                                                 \
    "\"model\":{\"type\":\"BPE\",\"vocab\":{" vocab "},\"merges\":[" merges "]" more "}"
#define LETTERS "\"a\":0,\"b\":1,\"c\":2,\"ab\":3,\"bc\":4,\"abc\":5,\"<unk>\":6,\"x\":7"
#define MERGES  "\"b c\",[\"a\",\"b\"],\"ab c\""

static tokenizer_t *parse(const char *json)
{
    tokenizer_t *tokenizer = NULL;
    xp_status_t status = tokenizer_parse_json(json, strlen(json), "here", &tokenizer);
    if (status != XP_OK)
        print_error("%s\n", xp_error_last()->text);
    assert_int_equal(status, XP_OK);
    return tokenizer;
}

static void check_ids(const tokenizer_t *tokenizer, const char *text, size_t length, bool specials,
                      bool parse_special, const int32_t *wanted, size_t count)
{
    int32_t *ids;
    size_t got;
    assert_int_equal(tokenizer_encode(tokenizer, text, length, specials, parse_special, &ids, &got),
                     XP_OK);
    bool same = got == count && (!count || !memcmp(ids, wanted, count * sizeof(*ids)));
    if (!same) {
        print_error("\"%s\" gave", text);
        for (size_t i = 0; i < got; i++)
            print_error(" %d", ids[i]);
        print_error("\n");
    }
    free(ids);
    assert_true(same);
}
#define CHECK(tokenizer, text, ...)                                                                \
    check_ids(tokenizer, text, strlen(text), true, true, (const int32_t[]){__VA_ARGS__},           \
              sizeof((const int32_t[]){__VA_ARGS__}) / sizeof(int32_t))

static void check_text(const tokenizer_t *tokenizer, const int32_t *ids, size_t count, bool skip,
                       const char *wanted, size_t length)
{
    xp_buf_t text;
    xp_buf_init(&text, 1 << 20);
    assert_int_equal(tokenizer_decode(tokenizer, ids, count, skip, &text), XP_OK);
    assert_int_equal(text.length, length);
    if (length)
        assert_memory_equal(text.data, wanted, length);
    xp_buf_fini(&text);
}
#define CHECK_TEXT(tokenizer, wanted, skip, ...)                                                   \
    check_text(tokenizer, (const int32_t[]){__VA_ARGS__},                                          \
               sizeof((const int32_t[]){__VA_ARGS__}) / sizeof(int32_t), skip, wanted,             \
               strlen(wanted))

/* ---- merging ---- */

static void merges_by_rank(void **state)
{
    (void)state;
    tokenizer_t *tokenizer = parse("{" MODEL(LETTERS, MERGES, "") "}");
    CHECK(tokenizer, "abc", 0, 4); /* "b c" comes first, "a bc" is no merge */
    CHECK(tokenizer, "ab", 3);
    CHECK(tokenizer, "abab", 3, 3); /* the leftmost of equals */
    CHECK(tokenizer, "aabcb", 0, 0, 4, 1);
    CHECK(tokenizer, "aqb", 3); /* unknown and no unk token: it vanishes before merging */
    check_ids(tokenizer, "", 0, true, true, NULL, 0);
    CHECK_TEXT(tokenizer, "a bc", false, 0, 4); /* without a decoder tokens are joined by a space */
    assert_int_equal(tokenizer_vocab_size(tokenizer), 8);
    assert_int_equal(tokenizer_token_id(tokenizer, "abc", 3), 5);
    assert_int_equal(tokenizer_token_id(tokenizer, "abd", 3), -1);
    assert_string_equal(tokenizer_token_text(tokenizer, 3), "ab");
    assert_null(tokenizer_token_text(tokenizer, 8));
    assert_null(tokenizer_token_text(tokenizer, -1));
    tokenizer_destroy(tokenizer);

    tokenizer = parse("{" MODEL(LETTERS, MERGES, ",\"ignore_merges\":true") "}");
    CHECK(tokenizer, "abc", 5);
    CHECK(tokenizer, "abcx", 0, 4, 7);
    tokenizer_destroy(tokenizer);
}

static void unknown_characters(void **state)
{
    (void)state;
    tokenizer_t *tokenizer = parse("{" MODEL(LETTERS, MERGES, ",\"unk_token\":\"<unk>\"") "}");
    CHECK(tokenizer, "aqqb", 0, 6, 6, 1);
    tokenizer_destroy(tokenizer);
    tokenizer = parse("{" MODEL(LETTERS, MERGES, ",\"unk_token\":\"<unk>\",\"fuse_unk\":true") "}");
    CHECK(tokenizer, "aqqb", 0, 6, 1);
    tokenizer_destroy(tokenizer);
    /* é is C3 A9: both bytes are there; q's byte is not. */
    tokenizer = parse("{" MODEL(LETTERS ",\"<0xC3>\":8,\"<0xA9>\":9", MERGES,
                                ",\"unk_token\":\"<unk>\",\"byte_fallback\":true") "}");
    CHECK(tokenizer, "a\u00e9q", 0, 8, 9, 6);
    tokenizer_destroy(tokenizer);
    tokenizer = parse("{" MODEL("\"a\":0,\"##b\":1,\"a##\":2,\"ab\":3", "\"a ##b\"",
                                ",\"continuing_subword_prefix\":\"##\"") "}");
    CHECK(tokenizer, "abb", 3, 1);
    tokenizer_destroy(tokenizer);
}

/* ---- added tokens, normalizers, post-processors ---- */

static void added_tokens(void **state)
{
    (void)state;
    tokenizer_t *tokenizer = parse(
        "{\"added_tokens\":["
        "{\"id\":9,\"content\":\"<s>\",\"special\":true},"
        "{\"id\":10,\"content\":\"<l>\",\"special\":true,\"lstrip\":true},"
        "{\"id\":11,\"content\":\"<r>\",\"special\":true,\"rstrip\":true},"
        "{\"id\":12,\"content\":\"abx\",\"single_word\":true,\"normalized\":false},"
        "{\"id\":13,\"content\":\"<s><l>\",\"normalized\":false},"
        "{\"id\":3,\"content\":\"ab\",\"normalized\":false,\"special\":true}],"
        "\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":"
        "\"<s>\",\"type_id\":0}},{\"Sequence\":{\"id\":\"A\",\"type_id\":0}}],\"special_tokens\":{"
        "\"<s>\":{\"id\":\"<s>\",\"ids\":[9],\"tokens\":[\"<s>\"]}}}," MODEL(LETTERS ",\" \":8",
                                                                             MERGES, "") "}");
    check_ids(tokenizer, "<s>a", 4, false, true, (const int32_t[]){9, 0}, 2);
    CHECK(tokenizer, "a <l> b", 9, 0, 10, 8, 1);
    CHECK(tokenizer, "a <r> b", 9, 0, 8, 11, 1);
    CHECK(tokenizer, "<s><l><s>", 9, 13, 9); /* the longest wins */
    CHECK(tokenizer, "a abx", 9, 0, 8, 12);
    CHECK(tokenizer, "abxc", 9, 3, 7,
          2); /* no word of its own, and skipped as a whole: "ab" in it is text */
    CHECK(tokenizer, "ab", 9, 3);
    /* Specials as plain text, other added tokens still found. */
    check_ids(tokenizer, "<s><l>x", 7, false, false, (const int32_t[]){13, 7}, 2);
    check_ids(tokenizer, "<s>", 3, false, false, NULL, 0);
    assert_true(tokenizer_token_is_special(tokenizer, 9));
    assert_true(tokenizer_token_is_special(tokenizer, 3));
    assert_false(tokenizer_token_is_special(tokenizer, 13));
    assert_false(tokenizer_token_is_special(tokenizer, 99));
    tokenizer_destroy(tokenizer);
}

static void normalized_tokens(void **state)
{
    (void)state;
    tokenizer_t *tokenizer =
        parse("{\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"NFC\"},"
              "{\"type\":\"Lowercase\"}]},\"added_tokens\":["
              "{\"id\":9,\"content\":\"CAF\\u00c9\",\"normalized\":true}]," MODEL(
                  LETTERS ",\"\\u00e9\":8", MERGES, "") "}");
    CHECK(tokenizer, "aBcAFE\xCC\x81x", 3, 9, 7);
    CHECK(tokenizer, "xcafe\xCC\x81", 7, 9);
    CHECK(tokenizer, "CaF\xC3\x89", 9);
    tokenizer_destroy(tokenizer);
}

static void invalid_utf8(void **state)
{
    (void)state;
    tokenizer_t *tokenizer = parse("{" MODEL("\"a\":0,\"\\ufffd\":1,\"\\u0001\":2", "", "") "}");
    check_ids(tokenizer, "a\xF0\x9F\x98z\xFF\xC3", 7, false, true, (const int32_t[]){0, 1, 1, 1},
              4);
    check_ids(tokenizer, "\0a", 2, false, true, (const int32_t[]){0}, 1);
    tokenizer_destroy(tokenizer);
}

/* ---- decoding ---- */

#define FALLBACK                                                                                   \
    "\"decoder\":{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"Replace\",\"pattern\":{"         \
    "\"String\":\"\\u2581\"},\"content\":\" \"},{\"type\":\"ByteFallback\"},{\"type\":\"Fuse\"},"  \
    "{\"type\":\"Strip\",\"content\":\" \",\"start\":1,\"stop\":0}]}"

static void byte_fallback_decoding(void **state)
{
    (void)state;
    tokenizer_t *tokenizer =
        parse("{" FALLBACK "," MODEL("\"\\u2581a\":0,\"b\":1,\"\\u2581\":2,\"<0xC3>\":3,"
                                     "\"<0xA9>\":4,\"<0x20>\":5",
                                     "", "") "}");
    CHECK_TEXT(tokenizer, "ab a", false, 0, 1, 0);
    CHECK_TEXT(tokenizer, " a", false, 2, 0);
    CHECK_TEXT(tokenizer, "b\u00e9b", false, 1, 3, 4, 1);
    /* One wrong byte spoils its whole run, a U+FFFD for each. */
    CHECK_TEXT(tokenizer, "b\uFFFD\uFFFD\uFFFDb\u00e9", false, 1, 3, 4, 4, 1, 3, 4);
    CHECK_TEXT(tokenizer, "\uFFFD", false, 3);
    tokenizer_destroy(tokenizer);
}

static uint64_t next_random(uint64_t *seed)
{
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return *seed >> 33;
}

/* Whole characters at every step, and in sum what decoding gives. */
static void check_stream(const tokenizer_t *tokenizer, const int32_t *ids, size_t count, bool skip)
{
    xp_buf_t all, piece, sum;
    tokenizer_stream_t stream;
    xp_buf_init(&all, 1 << 20);
    xp_buf_init(&piece, 1 << 20);
    xp_buf_init(&sum, 1 << 20);
    assert_int_equal(tokenizer_decode(tokenizer, ids, count, skip, &all), XP_OK);
    tokenizer_stream_init(&stream, tokenizer, skip);
    for (size_t i = 0; i <= count; i++) {
        xp_buf_clear(&piece);
        assert_int_equal(i < count ? tokenizer_stream_push(&stream, ids[i], &piece)
                                   : tokenizer_stream_finish(&stream, &piece),
                         XP_OK);
        assert_true(text_utf8_valid(piece.data, piece.length));
        assert_int_equal(xp_buf_append(&sum, piece.data, piece.length), XP_OK);
    }
    assert_int_equal(sum.length, all.length);
    if (all.length)
        assert_memory_equal(sum.data, all.data, all.length);
    xp_buf_fini(&all);
    xp_buf_fini(&piece);
    xp_buf_fini(&sum);
}

static void streaming(void **state)
{
    (void)state;
    tokenizer_t *byte_level = NULL;
    tokenizer_t *fallback =
        parse("{\"added_tokens\":[{\"id\":9,\"content\":\"<s>\",\"special\":true}]," FALLBACK
              "," MODEL("\"\\u2581a\":0,\"b\":1,\"\\u2581\":2,\"<0xC3>\":3,\"<0xA9>\":4,"
                        "\"<0xF0>\":5,\"<0x9F>\":6,\"<0x98>\":7,\"<0x80>\":8,\"<s>\":9",
                        "", "") "}");
    assert_int_equal(tokenizer_load(TALES, &byte_level), XP_OK);
    uint64_t seed = 7;
    for (int round = 0; round < 4000; round++) {
        int32_t ids[24];
        size_t count = next_random(&seed) % 24;
        const tokenizer_t *tokenizer = round % 2 ? fallback : byte_level;
        for (size_t i = 0; i < count; i++) /* the first ids of tales are mostly single bytes */
            ids[i] = (int32_t)(next_random(&seed) % (round % 2 ? 10 : round % 4 ? 259 : 4096));
        check_stream(tokenizer, ids, count, next_random(&seed) % 2);
    }
    /* Longer than a stream can hold, but valid: given out in parts. */
    int32_t run[400];
    for (size_t i = 0; i < 400; i++)
        run[i] = (const int32_t[]){5, 6, 7, 8}[i % 4];
    check_stream(fallback, run, 400, false);
    check_stream(fallback, run, TOKENIZER_STREAM_HELD - 1, false); /* cut: all of it is spoiled */
    tokenizer_destroy(fallback);
    tokenizer_destroy(byte_level);
}

static void unknown_ids(void **state)
{
    (void)state;
    tokenizer_t *tokenizer = parse("{" MODEL("\"a\":0,\"b\":5", "", "") "}");
    xp_buf_t text;
    xp_buf_init(&text, 100);
    assert_int_equal(xp_buf_append_text(&text, "kept"), XP_OK);
    const int32_t lists[][2] = {{0, 3}, {0, 6}, {0, -1}, {0, INT32_MAX}};
    for (size_t i = 0; i < 4; i++) {
        assert_int_equal(tokenizer_decode(tokenizer, lists[i], 2, false, &text), XP_INVALID);
        assert_string_equal(text.data, "kept");
    }
    const char *bytes;
    assert_int_equal(tokenizer_token_bytes(tokenizer, 5, &bytes), 1);
    assert_int_equal(tokenizer_token_bytes(tokenizer, 3, &bytes), 0);
    xp_buf_fini(&text);
    tokenizer_destroy(tokenizer);
}

/* ---- golden vectors ---- */

static void golden_tales(void **state)
{
    (void)state;
    tokenizer_t *tokenizer;
    char *line = NULL;
    size_t capacity = 0, lines = 0;
    assert_int_equal(tokenizer_load(TALES, &tokenizer), XP_OK);
    assert_int_equal(tokenizer_vocab_size(tokenizer), 4096);
    FILE *file = fopen(XPOOL_SOURCE_DIR "/tests/unit/text/golden_tales.jsonl", "r");
    assert_non_null(file);
    while (getline(&line, &capacity, file) > 0) {
        json_t *golden = json_loads(line, JSON_ALLOW_NUL, NULL);
        const json_t *text = json_object_get(golden, "text");
        const json_t *list = json_object_get(golden, "ids");
        int32_t ids[512];
        size_t count = json_array_size(list);
        assert_true(count < 512);
        for (size_t i = 0; i < count; i++)
            ids[i] = (int32_t)json_integer_value(json_array_get(list, i));
        check_ids(tokenizer, json_string_value(text), json_string_length(text), true, true, ids,
                  count);
        for (int skip = 0; skip < 2; skip++) {
            const json_t *decoded = json_object_get(golden, skip ? "skipped" : "decoded");
            check_text(tokenizer, ids, count, skip, json_string_value(decoded),
                       json_string_length(decoded));
            check_stream(tokenizer, ids, count, skip);
        }
        json_decref(golden);
        lines++;
    }
    assert_true(lines > 100);
    free(line);
    fclose(file);
    tokenizer_destroy(tokenizer);
}

/* Texts of `inputs`, parted by a line "__ggml_vocab_test__", against lines of ids. */
static void check_vectors(const char *tokenizer_path, const char *inputs, const char *outputs)
{
    static const char separator[] = "\n__ggml_vocab_test__\n";
    tokenizer_t *tokenizer;
    char *texts, *lists;
    size_t length, cases = 0;
    if (xp_file_read(inputs, 1 << 20, &texts, &length) != XP_OK)
        skip();
    assert_int_equal(xp_file_read(outputs, 1 << 20, &lists, &length), XP_OK);
    assert_int_equal(tokenizer_load(tokenizer_path, &tokenizer), XP_OK);
    char *list = lists;
    for (char *text = texts; text;) {
        char *end = strstr(text, separator), *line_end = strchr(list, '\n');
        int32_t ids[1024];
        size_t count = 0;
        if (end)
            *end = '\0';
        if (line_end)
            *line_end = '\0';
        for (char *word = strtok(list, " "); word && count < 1024; word = strtok(NULL, " "))
            ids[count++] = (int32_t)strtol(word, NULL, 10);
        check_ids(tokenizer, text, strlen(text), false, true, ids, count);
        cases++;
        text = end ? end + strlen(separator) : NULL;
        list = line_end ? line_end + 1 : list + strlen(list);
    }
    assert_true(cases > 40);
    free(texts);
    free(lists);
    tokenizer_destroy(tokenizer);
}

static void golden_qwen2(void **state)
{
    (void)state;
    check_vectors(SHARED "qwen3.tokenizer.json", SHARED "qwen2.inp", SHARED "qwen2.out");
}

static void golden_deepseek(void **state)
{
    (void)state;
    check_vectors(SHARED "deepseek-llm.tokenizer.json", SHARED "deepseek-llm.inp",
                  SHARED "deepseek-llm.out");
}

/* ---- limits, threads ---- */

static void long_texts(void **state)
{
    (void)state;
    tokenizer_t *tokenizer;
    int32_t *ids;
    size_t count, length = 1 << 20;
    char *text = malloc(TOKENIZER_MAX_TEXT_BYTES + 1);
    assert_non_null(text);
    assert_int_equal(tokenizer_load(TALES, &tokenizer), XP_OK);
    /* One piece of a million letters: merging must not be quadratic. */
    memset(text, 'a', TOKENIZER_MAX_TEXT_BYTES + 1);
    assert_int_equal(tokenizer_encode(tokenizer, text, length, false, true, &ids, &count), XP_OK);
    check_text(tokenizer, ids, count, false, text, length);
    free(ids);
    ids = NULL;
    assert_int_equal(
        tokenizer_encode(tokenizer, text, TOKENIZER_MAX_TEXT_BYTES + 1, false, true, &ids, &count),
        XP_INVALID);
    assert_null(ids);
    free(text);
    tokenizer_destroy(tokenizer);
}

static void *encode_often(void *context)
{
    static const char text[] = "Once upon a time there was a little girl named Lily.";
    int32_t *first = NULL, *ids;
    size_t first_count = 0, count;
    for (int i = 0; i < 200; i++) {
        if (tokenizer_encode(context, text, sizeof(text) - 1, true, true, &ids, &count) != XP_OK)
            return (void *)text;
        bool same = !first || (count == first_count && !memcmp(first, ids, count * sizeof(*ids)));
        if (!same)
            return (void *)text;
        if (first) {
            free(ids);
        } else {
            first = ids;
            first_count = count;
        }
    }
    free(first);
    return NULL;
}

static void shared_by_threads(void **state)
{
    (void)state;
    tokenizer_t *tokenizer;
    pthread_t threads[4];
    void *failed;
    assert_int_equal(tokenizer_load(TALES, &tokenizer), XP_OK);
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, encode_often, tokenizer), 0);
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], &failed);
        assert_null(failed);
    }
    tokenizer_destroy(tokenizer);
}

/* ---- what is refused, with the words the message must hold ---- */

static void refused(void **state)
{
    (void)state;
#define GOOD         MODEL(LETTERS, MERGES, "")
#define WITH(member) "{" member "," GOOD "}"
    static const struct {
        const char *json;
        xp_status_t status;
        const char *words;
    } cases[] = {
        {"", XP_INVALID, "here:1"},
        {"[]", XP_INVALID, "model"},
        {"{\"model\":{\"type\":\"Unigram\"}}", XP_UNSUPPORTED, "Unigram"},
        {"{\"model\":{\"type\":\"BPE\"}}", XP_INVALID, "vocab"},
        {"{" MODEL("\"a\":\"x\"", "", "") "}", XP_INVALID, "\"a\""},
        {"{" MODEL("\"a\":-1", "", "") "}", XP_INVALID, "-1"},
        {"{" MODEL("\"a\":99999999999", "", "") "}", XP_INVALID, "99999999999"},
        {"{" MODEL("\"a\":4194304", "", "") "}", XP_INVALID, "4194304"},
        {"{" MODEL("\"a\":0", "\"a b\"", "") "}", XP_INVALID, "merges[0]"},
        {"{" MODEL("\"a\":0", "\"a a\"", "") "}", XP_INVALID, "merges[0]"},
        {"{" MODEL("\"a\":0", "\"a\"", "") "}", XP_INVALID, "merges[0]"},
        {"{" MODEL("\"a\":0", "[\"a\"]", "") "}", XP_INVALID, "merges[0]"},
        {"{" MODEL("\"a\":0", "7", "") "}", XP_INVALID, "merges[0]"},
        {"{" MODEL("\"a\":0", "", ",\"dropout\":0.1") "}", XP_UNSUPPORTED, "dropout"},
        {"{" MODEL("\"a\":0", "", ",\"unk_token\":\"u\"") "}", XP_INVALID, "unk_token"},
        {"{" MODEL("\"a\":0", "", ",\"fuse_unk\":1") "}", XP_INVALID, "fuse_unk"},
        {WITH("\"normalizer\":{\"type\":\"Nmt\"}"), XP_UNSUPPORTED, "Nmt"},
        {WITH("\"normalizer\":{}"), XP_INVALID, "normalizer"},
        {WITH("\"normalizer\":{\"type\":\"Sequence\"}"), XP_INVALID, "normalizers"},
        {WITH("\"pre_tokenizer\":{\"type\":\"BertPreTokenizer\"}"), XP_UNSUPPORTED, "BertPre"},
        {WITH("\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"(\"}}"), XP_INVALID,
         "("},
        {WITH("\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"[a&&b]\"}}"),
         XP_UNSUPPORTED, "&&"},
        {WITH("\"pre_tokenizer\":{\"type\":\"Split\",\"behavior\":\"Odd\",\"pattern\":{\"Regex\":"
              "\"a\"}}"),
         XP_UNSUPPORTED, "Odd"},
        {WITH("\"pre_tokenizer\":{\"type\":\"Metaspace\",\"replacement\":\"ab\"}"), XP_INVALID,
         "replacement"},
        {WITH("\"post_processor\":{\"type\":\"Odd\"}"), XP_UNSUPPORTED, "Odd"},
        {WITH("\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{"
              "\"id\":\"<s>\"}}],\"special_tokens\":{}}"),
         XP_INVALID, "ids"},
        {WITH("\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{"
              "\"id\":\"<s>\"}},{\"Sequence\":{\"id\":\"A\"}}],\"special_tokens\":{\"<s>\":{"
              "\"ids\":[77]}}}"),
         XP_INVALID, "77"},
        {WITH("\"decoder\":{\"type\":\"CTC\"}"), XP_UNSUPPORTED, "CTC"},
        {WITH("\"decoder\":{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"Fuse\"},{\"type\":"
              "\"ByteLevel\"}]}"),
         XP_UNSUPPORTED, "ByteLevel"},
        {WITH("\"added_tokens\":[{\"id\":1}]"), XP_INVALID, "added_tokens[0]"},
        {WITH("\"added_tokens\":{}"), XP_INVALID, "added_tokens"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        tokenizer_t *tokenizer = NULL;
        xp_error_clear();
        xp_status_t status =
            tokenizer_parse_json(cases[i].json, strlen(cases[i].json), "here", &tokenizer);
        if (status != cases[i].status || !strstr(xp_error_last()->text, cases[i].words))
            print_error("%s: %s\n", cases[i].json, xp_error_last()->text);
        assert_int_equal(status, cases[i].status);
        assert_non_null(strstr(xp_error_last()->text, cases[i].words));
        assert_non_null(strstr(xp_error_last()->text, "here"));
        assert_null(tokenizer);
    }
}

/* Deep nesting and cut files end in an error, not in a crash. */
static void hostile_files(void **state)
{
    (void)state;
    tokenizer_t *tokenizer = NULL;
    xp_buf_t json;
    xp_buf_init(&json, 1 << 20);
    assert_int_equal(xp_buf_append_text(&json, "{" GOOD ",\"normalizer\":"), XP_OK);
    for (int i = 0; i < 500; i++)
        assert_int_equal(xp_buf_append_text(&json, "{\"type\":\"Sequence\",\"normalizers\":["),
                         XP_OK);
    for (int i = 0; i < 500; i++)
        assert_int_equal(xp_buf_append_text(&json, "]}"), XP_OK);
    assert_int_equal(xp_buf_append_text(&json, "}"), XP_OK);
    assert_int_equal(tokenizer_parse_json(json.data, json.length, "here", &tokenizer), XP_INVALID);
    xp_buf_fini(&json);

    char *tales;
    size_t length;
    assert_int_equal(xp_file_read(TALES "/tokenizer.json", 1 << 24, &tales, &length), XP_OK);
    for (size_t cut = 0; cut < length; cut += length / 50)
        assert_int_equal(tokenizer_parse_json(tales, cut, "here", &tokenizer), XP_INVALID);
    free(tales);
    assert_int_equal(tokenizer_load("/nonexistent/model", &tokenizer), XP_NOT_FOUND);
    assert_int_equal(tokenizer_load(XPOOL_SOURCE_DIR "/src/text", &tokenizer), XP_NOT_FOUND);
    assert_non_null(strstr(xp_error_last()->text, "tokenizer.json"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(merges_by_rank),    cmocka_unit_test(unknown_characters),
        cmocka_unit_test(added_tokens),      cmocka_unit_test(normalized_tokens),
        cmocka_unit_test(invalid_utf8),      cmocka_unit_test(byte_fallback_decoding),
        cmocka_unit_test(streaming),         cmocka_unit_test(unknown_ids),
        cmocka_unit_test(golden_tales),      cmocka_unit_test(golden_qwen2),
        cmocka_unit_test(golden_deepseek),   cmocka_unit_test(long_texts),
        cmocka_unit_test(shared_by_threads), cmocka_unit_test(refused),
        cmocka_unit_test(hostile_files),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
