/* SPDX-License-Identifier: MIT */
/*
 * Reading checkpoints against values that the gguf and safetensors packages computed
 * (tests/reference/make_gguf.py writes both). XPOOL_TEST_FIXTURES names that folder; without it the
 * tests skip.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "model/checkpoint.h"
#include "model/convert.h"
#include "model/gguf.h"
#include "model/inventory.h"
#include "model/spec.h"

static const char *fixtures;
static float *expected;
static model_spec_t spec;

static int load_expected(void **state)
{
    (void)state;
    fixtures = getenv("XPOOL_TEST_FIXTURES");
    if (!fixtures)
        return 0;
    char path[4096];
    snprintf(path, sizeof(path), "%s/expected.f32", fixtures);
    FILE *file = fopen(path, "rb");
    if (!file || fseek(file, 0, SEEK_END) != 0)
        return -1;
    long bytes = ftell(file);
    rewind(file);
    expected = malloc((size_t)bytes);
    size_t got = fread(expected, 1, (size_t)bytes, file);
    fclose(file);
    return got == (size_t)bytes ? 0 : -1;
}

static int free_expected(void **state)
{
    (void)state;
    free(expected);
    return 0;
}

static void check(xp_status_t status)
{
    if (status != XP_OK)
        print_error("%s\n", xp_error_last()->text);
    assert_int_equal(status, XP_OK);
}

static void assert_same(const float *found, const float *wanted, size_t count, const char *name)
{
    for (size_t i = 0; i < count; i++) {
        if (memcmp(&found[i], &wanted[i], sizeof(float)) != 0 && found[i] != wanted[i]) {
            print_error("%s: element %zu is %.9g, wanted %.9g\n", name, i, (double)found[i],
                        (double)wanted[i]);
            fail();
        }
    }
}

/* A part of the rows and of the columns, on block borders, against the same part of the whole. */
static void check_part(const checkpoint_t *checkpoint, const checkpoint_tensor_t *tensor,
                       const float *wanted, uint64_t rows, uint64_t columns)
{
    uint32_t block = xp_dtype_block_elements(tensor->dtype);
    uint64_t first_row = rows / 3, row_count = rows - rows / 3 - rows / 5;
    uint64_t first_column = columns / block / 2 * block;
    uint64_t column_count = columns - first_column;
    if (row_count == 0 || column_count == 0)
        return;
    size_t row_bytes = xp_dtype_row_bytes(tensor->dtype, column_count);
    uint8_t *stored = malloc(row_count * row_bytes);
    float *values = malloc(row_count * column_count * sizeof(float));
    check(checkpoint_read_rows(checkpoint, tensor, first_row, row_count, first_column, column_count,
                               stored));
    convert_to_f32(tensor->dtype, stored, row_count * column_count, values);
    for (uint64_t i = 0; i < row_count; i++)
        assert_same(values + i * column_count, wanted + (first_row + i) * columns + first_column,
                    column_count, tensor->name);
    free(stored);
    free(values);
}

static void test_every_tensor(void **state)
{
    (void)state;
    if (!fixtures)
        skip();
    char path[4096], line[1024], open_name[256] = "";
    checkpoint_t *checkpoint = NULL;
    size_t seen = 0, in_checkpoint = 0;
    snprintf(path, sizeof(path), "%s/manifest.txt", fixtures);
    FILE *manifest = fopen(path, "r");
    assert_non_null(manifest);
    while (fgets(line, sizeof(line), manifest)) {
        char name[256], tensor_name[256], dtype[16];
        unsigned long long rows, columns, at;
        assert_int_equal(sscanf(line, "%255[^\t]\t%255[^\t]\t%15[^\t]\t%llu\t%llu\t%llu", name,
                                tensor_name, dtype, &rows, &columns, &at),
                         6);
        if (strcmp(name, open_name) != 0) {
            /* The checkpoint before must have held nothing more than the manifest says. */
            if (checkpoint)
                assert_int_equal(checkpoint_tensor_count(checkpoint), in_checkpoint);
            checkpoint_close(checkpoint);
            snprintf(path, sizeof(path), "%s/%s", fixtures, name);
            check(model_spec_load(path, &spec));
            check(checkpoint_open(path, &spec, &checkpoint));
            snprintf(open_name, sizeof(open_name), "%s", name);
            in_checkpoint = 0;
        }
        const checkpoint_tensor_t *tensor;
        uint64_t shape[2] = {rows, columns};
        bool vector = rows == 1;
        if (vector)
            shape[0] = columns;
        check(checkpoint_tensor_require(checkpoint, tensor_name, vector ? 1 : 2, shape, &tensor));
        char lower[16];
        for (size_t i = 0; i <= strlen(dtype); i++)
            lower[i] = (char)(dtype[i] >= 'A' && dtype[i] <= 'Z' ? dtype[i] + 32 : dtype[i]);
        assert_string_equal(xp_dtype_name(tensor->dtype), lower);
        float *values = malloc(rows * columns * sizeof(float));
        check(checkpoint_read_f32(checkpoint, tensor, values));
        assert_same(values, expected + at, rows * columns, tensor_name);
        free(values);
        check_part(checkpoint, tensor, expected + at, rows, columns);
        in_checkpoint++;
        seen++;
    }
    assert_int_equal(checkpoint_tensor_count(checkpoint), in_checkpoint);
    checkpoint_close(checkpoint);
    fclose(manifest);
    assert_true(seen > 300);
}

static void load_fixture(const char *name)
{
    char path[4096];
    snprintf(path, sizeof(path), "%s/%s", fixtures, name);
    check(model_spec_load(path, &spec));
}

static void test_gguf_specs(void **state)
{
    (void)state;
    if (!fixtures)
        skip();
    load_fixture("llama-q4_k.gguf");
    assert_string_equal(spec.architecture_name, "LlamaForCausalLM");
    assert_int_equal(spec.layers, 2);
    assert_int_equal(spec.hidden, 256);
    assert_int_equal(spec.heads, 4);
    assert_int_equal(spec.kv_heads, 2);
    assert_int_equal(spec.head_dim, 64);
    assert_int_equal(spec.vocab, 40);
    assert_int_equal(spec.ffn[1].intermediate, 512);
    assert_true(spec.tied_embeddings);
    assert_false(spec.qkv_bias);
    assert_float_equal(spec.rope.theta, 50000, 0);
    assert_int_equal(spec.eos_count, 2);
    assert_int_equal(spec.eos_tokens[0], 2);
    assert_int_equal(spec.eos_tokens[1], 3);
    assert_int_equal(spec.bos_token, 1);
    load_fixture("llama-bias.gguf");
    assert_true(spec.qkv_bias);
    assert_false(spec.o_bias);
    assert_false(spec.tied_embeddings);
    load_fixture("qwen2-q4_0.gguf");
    assert_int_equal(spec.architecture, MODEL_ARCH_QWEN2);
    assert_true(spec.qkv_bias);
    load_fixture("qwen3-f16.gguf");
    assert_int_equal(spec.architecture, MODEL_ARCH_QWEN3);
    assert_true(spec.qk_norm);
    load_fixture("qwen3moe-q6_k.gguf");
    assert_int_equal(spec.architecture, MODEL_ARCH_QWEN3_MOE);
    assert_int_equal(spec.ffn[0].kind, MODEL_FFN_MOE);
    assert_int_equal(spec.ffn[0].experts, 4);
    assert_int_equal(spec.ffn[0].top_k, 2);
    assert_int_equal(spec.ffn[0].intermediate, 512);
    assert_true(spec.ffn[0].normalize_top_k);
}

static void test_gguf_metadata(void **state)
{
    (void)state;
    if (!fixtures)
        skip();
    char path[4096];
    gguf_file_t *file;
    const char *text;
    size_t length, count;
    double number;
    uint64_t word;
    bool flag;
    snprintf(path, sizeof(path), "%s/llama-f16.gguf", fixtures);
    check(gguf_open(path, &file));
    check(gguf_array_count(file, "tokenizer.ggml.tokens", &count));
    assert_int_equal(count, 40);
    check(gguf_array_string(file, "tokenizer.ggml.tokens", 39, &text, &length));
    assert_int_equal(length, 7);
    assert_memory_equal(text, "token39", 7);
    check(gguf_array_string(file, "tokenizer.ggml.merges", 1, &text, &length));
    assert_memory_equal(text, "to k", 4);
    check(gguf_array_f64(file, "tokenizer.ggml.token_type", 3, &number));
    assert_float_equal(number, 1, 0);
    assert_int_equal(gguf_array_string(file, "tokenizer.ggml.tokens", 40, &text, &length),
                     XP_INVALID);
    assert_int_equal(gguf_array_f64(file, "tokenizer.ggml.tokens", 0, &number), XP_INVALID);
    assert_int_equal(gguf_array_count(file, "general.architecture", &count), XP_INVALID);
    assert_int_equal(gguf_get_u64(file, "no.such.key", &word), XP_NOT_FOUND);
    assert_int_equal(gguf_get_u64(file, "general.architecture", &word), XP_INVALID);
    assert_int_equal(gguf_get_bool(file, "llama.block_count", &flag), XP_INVALID);
    check(gguf_get_f64(file, "llama.block_count", &number));
    assert_float_equal(number, 2, 0);
    assert_string_equal(gguf_path(file), path);
    gguf_close(file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_tensor),
        cmocka_unit_test(test_gguf_specs),
        cmocka_unit_test(test_gguf_metadata),
    };
    return cmocka_run_group_tests(tests, load_expected, free_expected);
}
