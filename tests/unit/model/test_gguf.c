/* SPDX-License-Identifier: MIT */
/*
 * GGUF fronts built by hand, byte by byte from the format's description: every value type, both
 * versions, every truncation, flipped bytes, absurd counts.
 */
#include "support.h"

#include "model/gguf.h"

static uint8_t bytes[8192];
static size_t used;

static void put_word(uint64_t value, size_t width)
{
    for (size_t i = 0; i < width; i++)
        bytes[used++] = (uint8_t)(value >> (8 * i));
}

static void put_text(const char *text)
{
    put_word(strlen(text), 8);
    memcpy(bytes + used, text, strlen(text));
    used += strlen(text);
}

static void put_header(uint32_t version, uint64_t tensors, uint64_t pairs)
{
    used = 0;
    memcpy(bytes, "GGUF", 4);
    used = 4;
    put_word(version, 4);
    put_word(tensors, 8);
    put_word(pairs, 8);
}

static void put_key(const char *key, uint32_t type)
{
    put_text(key);
    put_word(type, 4);
}

static void put_tensor(const char *name, uint32_t type, uint64_t columns, uint64_t rows,
                       uint64_t offset)
{
    put_text(name);
    put_word(2, 4);
    put_word(columns, 8);
    put_word(rows, 8);
    put_word(type, 4);
    put_word(offset, 8);
}

static xp_status_t parse(uint64_t data_bytes, gguf_file_t **file)
{
    uint64_t front = (used + 31) / 32 * 32;
    *file = NULL;
    return gguf_parse(bytes, used, front + data_bytes, "x.gguf", file);
}

/* Every value type, an array of each kind, two tensors. */
static void put_example(uint32_t version)
{
    put_header(version, 2, 15);
    put_key("u8", 0), put_word(200, 1);
    put_key("i8", 1), put_word(0x80, 1);
    put_key("u16", 2), put_word(60000, 2);
    put_key("i16", 3), put_word(0xffff, 2);
    put_key("u32", 4), put_word(4000000000u, 4);
    put_key("i32", 5), put_word(7, 4);
    put_key("f32", 6), put_word(0x3fc00000, 4);
    put_key("bool", 7), put_word(1, 1);
    put_key("text", 8), put_text("hello");
    put_key("u64", 10), put_word(1ull << 40, 8);
    put_key("i64", 11), put_word(~0ull, 8);
    put_key("f64", 12), put_word(0xbff8000000000000ull, 8);
    put_key("words", 9), put_word(8, 4), put_word(3, 8);
    put_text("a"), put_text(""), put_text("ccc");
    put_key("numbers", 9), put_word(3, 4), put_word(2, 8), put_word(0xfffe, 2), put_word(5, 2);
    put_key("flags", 9), put_word(7, 4), put_word(2, 8), put_word(0, 1), put_word(1, 1);
    put_tensor("plain", 0, 4, 2, 0);
    put_tensor("blocks", 8, 64, 3, 32);
}

static const uint64_t example_data = 32 + 3 * 2 * 34;

static void test_values(void **state)
{
    (void)state;
    for (uint32_t version = 2; version <= 3; version++) {
        gguf_file_t *file;
        uint64_t word;
        double number;
        bool flag;
        const char *text;
        size_t length;
        put_example(version);
        size_t front = (used + 31) / 32 * 32;
        check_ok(parse(example_data, &file));
        memset(bytes, 0xee, sizeof(bytes)); /* the front part was copied */
        check_ok(gguf_get_u64(file, "u8", &word));
        assert_int_equal(word, 200);
        check_fails(gguf_get_u64(file, "i8", &word), XP_INVALID, "x.gguf|i8|-128");
        check_ok(gguf_get_f64(file, "i8", &number));
        assert_true(number == -128);
        check_ok(gguf_get_u64(file, "u16", &word));
        assert_int_equal(word, 60000);
        check_ok(gguf_get_f64(file, "i16", &number));
        assert_true(number == -1);
        check_ok(gguf_get_u64(file, "u32", &word));
        assert_int_equal(word, 4000000000u);
        check_ok(gguf_get_u64(file, "i32", &word));
        assert_int_equal(word, 7);
        check_ok(gguf_get_f64(file, "f32", &number));
        assert_true(number == 1.5);
        check_fails(gguf_get_u64(file, "f32", &word), XP_INVALID, "f32|float32|integer");
        check_ok(gguf_get_bool(file, "bool", &flag));
        assert_true(flag);
        check_ok(gguf_get_string(file, "text", &text, &length));
        assert_int_equal(length, 5);
        assert_memory_equal(text, "hello", 5);
        check_ok(gguf_get_u64(file, "u64", &word));
        assert_true(word == 1ull << 40);
        check_fails(gguf_get_u64(file, "i64", &word), XP_INVALID, "-1");
        check_ok(gguf_get_f64(file, "f64", &number));
        assert_true(number == -1.5);
        check_ok(gguf_array_count(file, "words", &length));
        assert_int_equal(length, 3);
        check_ok(gguf_array_string(file, "words", 1, &text, &length));
        assert_int_equal(length, 0);
        check_ok(gguf_array_string(file, "words", 2, &text, &length));
        assert_int_equal(length, 3);
        assert_memory_equal(text, "ccc", 3);
        check_ok(gguf_array_f64(file, "numbers", 0, &number));
        assert_true(number == -2);
        check_ok(gguf_array_f64(file, "flags", 1, &number));
        assert_true(number == 1);
        check_fails(gguf_get_bool(file, "text", &flag), XP_INVALID, "text|string|bool");
        assert_int_equal(gguf_get_bool(file, "absent", &flag), XP_NOT_FOUND);
        assert_int_equal(gguf_tensor_count(file), 2);
        const gguf_tensor_t *tensor = gguf_tensor_at(file, 1);
        assert_string_equal(tensor->name, "blocks");
        assert_int_equal(tensor->dtype, XP_DTYPE_Q8_0);
        assert_int_equal(tensor->bytes, 204);
        assert_int_equal(tensor->offset, front + 32);
        assert_null(gguf_tensor_at(file, 2));
        gguf_close(file);
    }
    gguf_close(NULL);
}

static void test_every_truncation(void **state)
{
    (void)state;
    gguf_file_t *file;
    put_example(3);
    size_t whole = used;
    for (size_t cut = 0; cut < whole; cut++) {
        /* The file itself ends there. */
        check_fails(gguf_parse(bytes, cut, cut, "x.gguf", &file), XP_INVALID, "x.gguf|truncated");
        /* Only its front part was given. */
        check_fails(gguf_parse(bytes, cut, whole + example_data + 64, "x.gguf", &file), XP_INVALID,
                    "x.gguf");
    }
    for (uint64_t data = 0; data < example_data; data += 4)
        check_fails(parse(data, &file), XP_INVALID, "x.gguf|tensor|truncated");
    check_ok(parse(example_data, &file));
    gguf_close(file);
}

/* Any one byte changed, in turn: an error or a file, never a crash (ASan and UBSan watch). */
static void test_every_byte_flipped(void **state)
{
    (void)state;
    gguf_file_t *file;
    put_example(3);
    size_t whole = used;
    static const uint8_t masks[] = {0x01, 0x80, 0xff, 0x10};
    for (size_t at = 0; at < whole; at++) {
        for (size_t k = 0; k < sizeof(masks); k++) {
            bytes[at] ^= masks[k];
            if (parse(example_data, &file) == XP_OK) {
                assert_true(gguf_tensor_count(file) <= 2);
                gguf_close(file);
            }
            bytes[at] ^= masks[k];
        }
    }
}

static void test_bad_headers(void **state)
{
    (void)state;
    gguf_file_t *file;
    put_header(3, 0, 0);
    check_ok(parse(0, &file));
    gguf_close(file);
    bytes[0] = 'g';
    check_fails(parse(0, &file), XP_INVALID, "no GGUF file");
    put_header(1, 0, 0);
    check_fails(parse(0, &file), XP_UNSUPPORTED, "version 1");
    put_header(0x03000000, 0, 0);
    check_fails(parse(0, &file), XP_UNSUPPORTED, "big endian");
    put_header(3, ~0ull, 0);
    check_fails(parse(0, &file), XP_INVALID, "tensors");
    put_header(3, 262144, 0);
    check_fails(parse(0, &file), XP_INVALID, "tensor directory|truncated");
    put_header(3, 0, ~0ull);
    check_fails(parse(0, &file), XP_INVALID, "keys");
    put_header(3, 0, 1);
    put_word(~0ull, 8);
    check_fails(parse(0, &file), XP_INVALID, "a key");
    put_header(3, 0, 1);
    put_key("k", 13);
    check_fails(parse(0, &file), XP_INVALID, "\"k\"|type 13");
    put_header(3, 0, 1);
    put_key("k", 9), put_word(8, 4), put_word(~0ull, 8);
    check_fails(parse(0, &file), XP_INVALID, "\"k\"|elements");
    put_header(3, 0, 1);
    put_key("k", 9), put_word(8, 4), put_word(1u << 27, 8);
    check_fails(parse(0, &file), XP_INVALID, "string array|truncated");
    put_header(3, 0, 1);
    put_key("k", 9), put_word(9, 4), put_word(1, 8);
    check_fails(parse(0, &file), XP_INVALID, "\"k\"|unsupported");
    put_header(3, 0, 2);
    put_key("k", 0), put_word(0, 1), put_key("k", 0), put_word(0, 1);
    check_fails(parse(0, &file), XP_INVALID, "\"k\"|twice");
    put_header(3, 0, 1);
    put_key("general.alignment", 4), put_word(33, 4);
    check_fails(parse(0, &file), XP_INVALID, "general.alignment|33");
}

static void test_bad_tensors(void **state)
{
    (void)state;
    gguf_file_t *file;
    static const struct {
        uint32_t type;
        uint64_t columns, rows, offset;
        const char *words;
    } cases[] = {
        {0, 0, 1, 0, "\"t\"|impossible"},
        {0, 1ull << 40, 1ull << 40, 0, "\"t\"|impossible"},
        {8, 33, 1, 0, "\"t\"|33|q8_0"},
        {12, 128, 1, 0, "\"t\"|128|q4_k"},
        {0, 4, 1, 4, "\"t\"|offset 4"},
        {0, 4, 1, 1ull << 60, "\"t\"|past the end"},
        {0, 1024, 1024, 0, "\"t\"|past the end"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        put_header(3, 1, 0);
        put_tensor("t", cases[i].type, cases[i].columns, cases[i].rows, cases[i].offset);
        check_fails(parse(256, &file), XP_INVALID, cases[i].words);
    }
    put_header(3, 1, 0);
    put_text("t"), put_word(5, 4);
    for (int i = 0; i < 8; i++)
        put_word(1, 8);
    check_fails(parse(256, &file), XP_INVALID, "\"t\"|5 dimensions");
    put_header(3, 2, 0);
    put_tensor("a", 0, 16, 1, 0), put_tensor("b", 0, 16, 1, 32);
    check_fails(parse(256, &file), XP_INVALID, "\"a\"|\"b\"|overlap");
    put_header(3, 2, 0);
    put_tensor("a", 0, 8, 1, 0), put_tensor("a", 0, 8, 1, 32);
    check_fails(parse(256, &file), XP_INVALID, "\"a\"|twice");
    /* A type we do not read is listed all the same. */
    put_header(3, 1, 0);
    put_tensor("q5", 6, 32, 1, 0);
    check_ok(parse(256, &file));
    assert_int_equal(gguf_tensor_at(file, 0)->dtype, XP_DTYPE_COUNT);
    assert_int_equal(gguf_tensor_at(file, 0)->type, 6);
    gguf_close(file);
}

/* gguf_open() reads on until the front part is whole, however long it is. */
static void test_long_front(void **state)
{
    (void)state;
    char folder[64], path[128];
    make_folder(folder);
    size_t count = 400000, length = 0;
    uint8_t *data = malloc(count * 12 + 4096);
    put_header(3, 0, 1);
    put_key("words", 9), put_word(8, 4), put_word(count, 8);
    memcpy(data, bytes, used);
    length = used;
    for (size_t i = 0; i < count; i++) {
        uint64_t four = 4;
        memcpy(data + length, &four, 8);
        memcpy(data + length + 8, "word", 4);
        length += 12;
    }
    write_file(folder, "long.gguf", data, length);
    snprintf(path, sizeof(path), "%s/long.gguf", folder);
    gguf_file_t *file;
    const char *text;
    size_t text_length;
    check_ok(gguf_open(path, &file));
    check_ok(gguf_array_string(file, "words", count - 1, &text, &text_length));
    assert_int_equal(text_length, 4);
    gguf_close(file);
    write_file(folder, "long.gguf", data, length - 1);
    check_fails(gguf_open(path, &file), XP_INVALID, "long.gguf|truncated");
    write_file(folder, "long.gguf", data, 0);
    check_fails(gguf_open(path, &file), XP_INVALID, "empty");
    check_fails(gguf_open(folder, &file), XP_INVALID, "no regular file");
    check_fails(gguf_open("/nonexistent.gguf", &file), XP_NOT_FOUND, "/nonexistent.gguf");
    free(data);
    remove_folder(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_every_truncation),
        cmocka_unit_test(test_every_byte_flipped),
        cmocka_unit_test(test_bad_headers),
        cmocka_unit_test(test_bad_tensors),
        cmocka_unit_test(test_long_front),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
