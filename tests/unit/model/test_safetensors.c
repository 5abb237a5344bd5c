/* SPDX-License-Identifier: MIT */
/*
 * safetensors files built by hand: reading, sharding, tied names, and every way to be broken. The
 * file and the tensor must be named, and nothing may leak (run under ASan).
 */
#include "support.h"

#include "model/checkpoint.h"
#include "model/spec.h"

static char folder[64];
static model_spec_t spec;
static checkpoint_t *checkpoint;

static const char config[] =
    "{\"architectures\": [\"LlamaForCausalLM\"], \"hidden_size\": 4, \"num_hidden_layers\": 1, "
    "\"vocab_size\": 3, \"num_attention_heads\": 2, \"intermediate_size\": 4}";

static int set_up(void **state)
{
    (void)state;
    make_folder(folder);
    write_file(folder, "config.json", config, strlen(config));
    checkpoint = NULL;
    return model_spec_load(folder, &spec) == XP_OK ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    checkpoint_close(checkpoint);
    remove_folder(folder);
    return 0;
}

/* Writes a file of `header` and `bytes` data bytes 0, 1, 2, ... */
static size_t put(const char *name, const char *header, size_t bytes)
{
    static uint8_t file[4096];
    uint64_t length = strlen(header);
    memcpy(file, &length, 8);
    memcpy(file + 8, header, length);
    for (size_t i = 0; i < bytes; i++)
        file[8 + length + i] = (uint8_t)i;
    write_file(folder, name, file, 8 + length + bytes);
    return 8 + length + bytes;
}

static xp_status_t open_checkpoint(void)
{
    checkpoint_close(checkpoint);
    checkpoint = NULL;
    return checkpoint_open(folder, &spec, &checkpoint);
}

#define MATRIX "{\"model.a\":{\"dtype\":\"F32\",\"shape\":[3,4],\"data_offsets\":[0,48]}}"

static void test_reading(void **state)
{
    (void)state;
    put("model.safetensors",
        "{\"__metadata__\":{\"format\":\"pt\"},"
        "\"model.b\":{\"dtype\":\"BF16\",\"shape\":[3,4],\"data_offsets\":[12,36]},"
        "\"model.c\":{\"dtype\":\"F16\",\"shape\":[6],\"data_offsets\":[0,12]},"
        "\"model.layers.0.mlp.up_proj.weight\":{\"dtype\":\"F32\",\"shape\":[],"
        "\"data_offsets\":[36,40]},"
        "\"model.layers.1.mlp.up_proj.weight\":{\"dtype\":\"I64\",\"shape\":[2],"
        "\"data_offsets\":[40,56]},"
        "\"odd\":{\"dtype\":\"I64\",\"shape\":[2],\"data_offsets\":[56,72]},"
        "\"deep\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1],\"data_offsets\":[72,73]}}",
        73);
    check_ok(open_checkpoint());
    /* The spec has one layer, so layer 1 (multi-token prediction) is not listed. */
    assert_int_equal(checkpoint_tensor_count(checkpoint), 5);
    const checkpoint_tensor_t *tensor = checkpoint_tensor_find(checkpoint, "model.b");
    assert_non_null(tensor);
    assert_int_equal(tensor->dtype, XP_DTYPE_BF16);
    uint8_t out[24];
    check_ok(checkpoint_read_rows(checkpoint, tensor, 0, 3, 0, 4, out));
    for (uint8_t i = 0; i < 24; i++)
        assert_int_equal(out[i], 12 + i);
    /* Rows 1 and 2, columns 2 and 3: bytes 8+4.. of each row. */
    check_ok(checkpoint_read_rows(checkpoint, tensor, 1, 2, 2, 2, out));
    const uint8_t wanted[8] = {24, 25, 26, 27, 32, 33, 34, 35};
    assert_memory_equal(out, wanted, 8);
    check_ok(checkpoint_read_rows(checkpoint, tensor, 3, 0, 0, 4, out));
    check_fails(checkpoint_read_rows(checkpoint, tensor, 2, 2, 0, 4, out), XP_INVALID,
                "model.safetensors|model.b|3 x 4");
    check_fails(checkpoint_read_rows(checkpoint, tensor, 0, 1, 2, UINT64_MAX, out), XP_INVALID,
                "model.b");
    tensor = checkpoint_tensor_find(checkpoint, "model.c");
    check_ok(checkpoint_read_rows(checkpoint, tensor, 0, 1, 1, 3, out));
    assert_int_equal(out[0], 2);
    tensor = checkpoint_tensor_find(checkpoint, "model.layers.0.mlp.up_proj.weight");
    assert_true(checkpoint_tensor_is_ffn(tensor));
    float scalar;
    uint8_t scalar_bytes[4] = {36, 37, 38, 39};
    check_ok(checkpoint_read_f32(checkpoint, tensor, &scalar));
    assert_memory_equal(&scalar, scalar_bytes, 4);
    /* Types we cannot read are an error only for whoever asks. */
    uint64_t shape[1] = {2};
    check_fails(checkpoint_tensor_require(checkpoint, "odd", 1, shape, &tensor), XP_UNSUPPORTED,
                "model.safetensors|odd|I64|F32, F16, BF16");
    check_fails(checkpoint_read_f32(checkpoint, checkpoint_tensor_find(checkpoint, "deep"), NULL),
                XP_UNSUPPORTED, "deep|U8[5-d]");
    shape[0] = 5;
    check_fails(checkpoint_tensor_require(checkpoint, "model.c", 1, shape, &tensor), XP_INVALID,
                "model.safetensors|model.c|[6]|[5]");
    check_fails(checkpoint_tensor_require(checkpoint, "model.d", 1, shape, &tensor), XP_INVALID,
                "model.d|missing|nearest|model.b");
    assert_int_equal(checkpoint_bytes(checkpoint, NULL, NULL), 57);
    assert_null(checkpoint_gguf(checkpoint));
    assert_null(checkpoint_tensor_at(checkpoint, 5));
}

static void test_tied_names(void **state)
{
    (void)state;
    spec.tied_embeddings = true;
    put("model.safetensors",
        "{\"lm_head.weight\":{\"dtype\":\"F32\",\"shape\":[3,4],\"data_offsets\":[0,48]}}", 48);
    check_ok(open_checkpoint());
    assert_null(checkpoint_tensor_find(checkpoint, "lm_head.weight"));
    assert_non_null(checkpoint_tensor_find(checkpoint, "model.embed_tokens.weight"));
    put("model.safetensors",
        "{\"lm_head.weight\":{\"dtype\":\"F32\",\"shape\":[3,4],\"data_offsets\":[48,96]},"
        "\"model.embed_tokens.weight\":{\"dtype\":\"F32\",\"shape\":[3,4],\"data_offsets\":[0,48]}"
        "}",
        96);
    check_ok(open_checkpoint());
    assert_int_equal(checkpoint_tensor_count(checkpoint), 1);
    assert_int_equal(checkpoint_tensor_at(checkpoint, 0)->bytes, 48);
    spec.tied_embeddings = false;
    check_ok(open_checkpoint());
    assert_int_equal(checkpoint_tensor_count(checkpoint), 2);
}

static void test_shards(void **state)
{
    (void)state;
    const char *index = "{\"metadata\":{},\"weight_map\":{\"model.a\":\"one.safetensors\","
                        "\"model.b\":\"two.safetensors\"}}";
    write_file(folder, "model.safetensors.index.json", index, strlen(index));
    put("one.safetensors", MATRIX, 48);
    check_fails(open_checkpoint(), XP_INVALID, "index.json|two.safetensors");
    put("two.safetensors",
        "{\"model.b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
        "\"model.a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}",
        8);
    check_ok(open_checkpoint());
    /* The second shard's own model.a is not where the index puts it, so it does not count. */
    assert_int_equal(checkpoint_tensor_count(checkpoint), 2);
    assert_int_equal(checkpoint_tensor_find(checkpoint, "model.a")->bytes, 48);
    assert_int_equal(checkpoint_tensor_find(checkpoint, "model.b")->file, 1);
    put("two.safetensors", "{\"x\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4);
    check_fails(open_checkpoint(), XP_INVALID, "two.safetensors|model.b|missing");
    put("two.safetensors", "{\"model.b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}",
        3);
    check_fails(open_checkpoint(), XP_INVALID, "two.safetensors|model.b|truncated");
    index = "{\"weight_map\":{\"model.a\":\"../one.safetensors\"}}";
    write_file(folder, "model.safetensors.index.json", index, strlen(index));
    check_fails(open_checkpoint(), XP_INVALID, "index.json|model.a|../one.safetensors");
    index = "{\"weight_map\":[]}";
    write_file(folder, "model.safetensors.index.json", index, strlen(index));
    check_fails(open_checkpoint(), XP_INVALID, "index.json|weight_map");
    write_file(folder, "model.safetensors.index.json", "{", 1);
    check_fails(open_checkpoint(), XP_INVALID, "index.json:1:");
    /* A whole model.safetensors is taken before the index, as transformers does. */
    put("model.safetensors", MATRIX, 48);
    check_ok(open_checkpoint());
    assert_int_equal(checkpoint_tensor_count(checkpoint), 1);
}

static void test_no_weights(void **state)
{
    (void)state;
    check_fails(open_checkpoint(), XP_NOT_FOUND, "model.safetensors");
}

static void test_broken_headers(void **state)
{
    (void)state;
    static const struct {
        const char *header;
        size_t bytes;
        const char *words;
    } cases[] = {
        {"", 0, "begin with {"},
        {"[]", 0, "begin with {"},
        {"{", 0, "not valid JSON"},
        {"{\"a\":1}", 0, "\"a\"|data_offsets"},
        {"{\"a\":{\"dtype\":1,\"shape\":[],\"data_offsets\":[0,4]}}", 4, "\"a\"|dtype"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]}}", 4, "\"a\""},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]}}", 4,
         "\"a\"|ends before"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[-4,0]}}", 4,
         "\"a\"|data_offsets"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}}", 4, "\"a\"|shape"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[\"1\"],\"data_offsets\":[0,4]}}", 4, "\"a\"|shape"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4]}}", 4, "\"a\"|8|4"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,4]}}", 4,
         "\"a\"|impossible"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 3, "\"a\"|truncated"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}", 8, "\"a\"|no tensor"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 8, "end at data byte"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
         "\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[4,12]}}",
         12, "\"a\"|\"b\"|overlap"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
         "\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}",
         8, "duplicate"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        put("model.safetensors", cases[i].header, cases[i].bytes);
        check_fails(open_checkpoint(), XP_INVALID, cases[i].words);
        assert_non_null(strstr(xp_error_last()->text, "model.safetensors"));
        assert_null(checkpoint);
    }
}

static void test_every_truncation(void **state)
{
    (void)state;
    size_t length, whole = put("model.safetensors", MATRIX, 48);
    char *data = read_file(folder, "model.safetensors", &length);
    assert_int_equal(length, whole);
    for (size_t cut = 0; cut < whole; cut++) {
        write_file(folder, "model.safetensors", data, cut);
        check_fails(open_checkpoint(), XP_INVALID, "model.safetensors");
        if (cut >= whole - 48)
            assert_non_null(strstr(xp_error_last()->text, "model.a"));
    }
    /* A length word that claims anything. */
    for (int bit = 0; bit < 64; bit++) {
        uint64_t word;
        memcpy(&word, data, 8);
        word ^= 1ull << bit;
        char *copy = malloc(length);
        memcpy(copy, data, length);
        memcpy(copy, &word, 8);
        write_file(folder, "model.safetensors", copy, length);
        free(copy);
        check_fails(open_checkpoint(), XP_INVALID, "model.safetensors");
    }
    free(data);
}

/* A file that shrinks after it was opened. */
static void test_short_read(void **state)
{
    (void)state;
    size_t whole = put("model.safetensors", MATRIX, 48);
    check_ok(open_checkpoint());
    char path[128];
    float values[12];
    snprintf(path, sizeof(path), "%s/model.safetensors", folder);
    assert_int_equal(truncate(path, (off_t)whole - 4), 0);
    check_fails(
        checkpoint_read_f32(checkpoint, checkpoint_tensor_find(checkpoint, "model.a"), values),
        XP_INVALID, "model.safetensors|model.a|truncated");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_reading, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_tied_names, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_shards, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_no_weights, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_broken_headers, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_every_truncation, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_short_read, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
