/* SPDX-License-Identifier: MIT */
/*
 * GGUF files as models: metadata that is missing, wrong or beyond us, tensor types we do not read,
 * and shapes that do not fit the names. Files are built by hand from a list of keys and tensors.
 */
#include "support.h"

#include "model/checkpoint.h"
#include "model/spec.h"

static uint8_t bytes[1 << 20];
static size_t used;
static char folder[64], path[128];
static model_spec_t spec;

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

typedef struct pair {
    const char *key;
    const char *text; /* a string value, or NULL for the number */
    uint32_t number;
} pair_t;

typedef struct entry {
    const char *name;
    uint32_t type, dimensions;
    uint64_t shape[3];
} entry_t;

/* Writes model.gguf; each tensor gets 64 KiB of zeros. */
static void put_file(const pair_t *pairs, size_t pair_count, const entry_t *entries,
                     size_t entry_count)
{
    used = 0;
    memcpy(bytes, "GGUF\3\0\0\0", 8);
    used = 8;
    put_word(entry_count, 8);
    put_word(pair_count, 8);
    for (size_t i = 0; i < pair_count; i++) {
        put_text(pairs[i].key);
        put_word(pairs[i].text ? 8 : 4, 4);
        if (pairs[i].text)
            put_text(pairs[i].text);
        else
            put_word(pairs[i].number, 4);
    }
    for (size_t i = 0; i < entry_count; i++) {
        put_text(entries[i].name);
        put_word(entries[i].dimensions, 4);
        for (uint32_t k = 0; k < entries[i].dimensions; k++)
            put_word(entries[i].shape[k], 8);
        put_word(entries[i].type, 4);
        put_word(i * 65536, 8);
    }
    size_t front = (used + 31) / 32 * 32;
    memset(bytes + used, 0, front - used + entry_count * 65536);
    write_file(folder, "model.gguf", bytes, front + entry_count * 65536);
}

static pair_t pairs[24];
static entry_t entries[8];
static size_t pair_count, entry_count;

/* A good llama of one layer, to be spoiled. */
static void start_llama(void)
{
    const pair_t good[] = {
        {"general.architecture", "llama", 0},       {"llama.block_count", NULL, 1},
        {"llama.context_length", NULL, 128},        {"llama.embedding_length", NULL, 32},
        {"llama.feed_forward_length", NULL, 64},    {"llama.attention.head_count", NULL, 4},
        {"llama.attention.head_count_kv", NULL, 2},
    };
    const entry_t tensors[] = {
        {"token_embd.weight", 0, 2, {32, 10}},
        {"blk.0.attn_q.weight", 0, 2, {32, 32}},
        {"blk.0.ffn_gate.weight", 6, 2, {32, 64}},
        {"blk.1.ffn_gate.weight", 0, 2, {32, 64}},
        {"something.else", 0, 1, {3}},
    };
    pair_count = sizeof(good) / sizeof(good[0]);
    memcpy(pairs, good, sizeof(good));
    entry_count = sizeof(tensors) / sizeof(tensors[0]);
    memcpy(entries, tensors, sizeof(tensors));
}

static void set_pair(const char *key, const char *text, uint32_t number)
{
    size_t at = 0;
    while (at < pair_count && strcmp(pairs[at].key, key) != 0)
        at++;
    pairs[at] = (pair_t){key, text, number};
    pair_count = at == pair_count ? at + 1 : pair_count;
}

static void drop_pair(const char *key)
{
    for (size_t i = 0; i < pair_count; i++) {
        if (strcmp(pairs[i].key, key) == 0)
            pairs[i] = pairs[--pair_count];
    }
}

static xp_status_t load(void)
{
    put_file(pairs, pair_count, entries, entry_count);
    return model_spec_load(path, &spec);
}

static int set_up(void **state)
{
    (void)state;
    make_folder(folder);
    snprintf(path, sizeof(path), "%s/model.gguf", folder);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    remove_folder(folder);
    return 0;
}

static void test_spec_errors(void **state)
{
    (void)state;
    start_llama();
    check_ok(load());
    assert_int_equal(spec.kv_heads, 2);
    assert_int_equal(spec.head_dim, 8);
    assert_int_equal(spec.vocab, 10);
    assert_true(spec.tied_embeddings);
    assert_float_equal(spec.rope.theta, 10000, 0);
    /* The folder that holds only this file is the same model. */
    check_ok(model_spec_load(folder, &spec));
    assert_true(spec.is_gguf);
    set_pair("general.architecture", "mamba", 0);
    check_fails(load(), XP_UNSUPPORTED, "model.gguf|mamba|llama, qwen2, qwen3, qwen3moe");
    static const char *const needed[] = {"general.architecture",      "llama.block_count",
                                         "llama.context_length",      "llama.embedding_length",
                                         "llama.feed_forward_length", "llama.attention.head_count"};
    for (size_t i = 0; i < sizeof(needed) / sizeof(needed[0]); i++) {
        start_llama();
        drop_pair(needed[i]);
        xp_status_t status = load();
        assert_true(status == XP_INVALID || status == XP_NOT_FOUND);
        assert_non_null(strstr(xp_error_last()->text, needed[i]));
        assert_non_null(strstr(xp_error_last()->text, "model.gguf"));
    }
    static const struct {
        const char *key, *text;
        uint32_t number;
        xp_status_t status;
        const char *words;
    } bad[] = {
        {"llama.block_count", NULL, 100000, XP_INVALID, "llama.block_count|100000|256"},
        {"llama.block_count", "many", 0, XP_INVALID, "llama.block_count|string"},
        {"llama.attention.head_count_kv", NULL, 3, XP_INVALID, "divide"},
        {"llama.attention.key_length", NULL, 7, XP_UNSUPPORTED, "differ|7"},
        {"llama.rope.dimension_count", NULL, 4, XP_UNSUPPORTED, "dimension_count|4|8"},
        {"llama.rope.scaling.type", "longrope", 0, XP_UNSUPPORTED, "rope.scaling.type|longrope"},
        {"llama.expert_count", NULL, 8, XP_UNSUPPORTED, "8 experts"},
        {"llama.embedding_length", NULL, 64, XP_INVALID, "token_embd.weight|64"},
        {"split.count", NULL, 3, XP_UNSUPPORTED, "3 parts"},
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        start_llama();
        set_pair(bad[i].key, bad[i].text, bad[i].number);
        if (strcmp(bad[i].key, "llama.attention.key_length") == 0)
            set_pair("llama.attention.value_length", NULL, 8);
        check_fails(load(), bad[i].status, bad[i].words);
        assert_non_null(strstr(xp_error_last()->text, "model.gguf"));
    }
    start_llama();
    entries[0].name = "renamed";
    check_fails(load(), XP_INVALID, "token_embd.weight|missing");
    start_llama();
    entries[4] = (entry_t){"rope_freqs.weight", 0, 1, {4}};
    check_fails(load(), XP_UNSUPPORTED, "rope_freqs.weight|Llama 3");
}

static void test_tensor_errors(void **state)
{
    (void)state;
    checkpoint_t *checkpoint;
    const checkpoint_tensor_t *tensor;
    uint64_t shape[2] = {64, 32};
    start_llama();
    check_ok(load());
    check_ok(checkpoint_open(path, &spec, &checkpoint));
    /* Layer 1 does not exist for a model of one layer. */
    assert_int_equal(checkpoint_tensor_count(checkpoint), 4);
    assert_non_null(checkpoint_tensor_find(checkpoint, "something.else"));
    check_fails(checkpoint_tensor_require(checkpoint, "model.layers.0.mlp.gate_proj.weight", 2,
                                          shape, &tensor),
                XP_UNSUPPORTED, "model.gguf|model.layers.0.mlp.gate_proj.weight|Q5_0|Q4_K");
    shape[0] = 32;
    check_ok(checkpoint_tensor_require(checkpoint, "model.layers.0.self_attn.q_proj.weight", 2,
                                       shape, &tensor));
    assert_int_equal(tensor->permute_heads, 4);
    assert_non_null(checkpoint_gguf(checkpoint));
    checkpoint_close(checkpoint);
    entries[1].shape[1] = 30;
    check_ok(load());
    check_fails(checkpoint_open(path, &spec, &checkpoint), XP_INVALID, "blk.0.attn_q.weight|30");
    start_llama();
    entries[3] = (entry_t){"blk.0.ffn_up_exps.weight", 0, 2, {32, 8}};
    check_ok(load());
    check_fails(checkpoint_open(path, &spec, &checkpoint), XP_INVALID,
                "blk.0.ffn_up_exps.weight|2 dimensions");
    entries[3] = (entry_t){"blk.0.ffn_up_exps.weight", 0, 3, {4, 1, 4000}};
    check_ok(load());
    check_fails(checkpoint_open(path, &spec, &checkpoint), XP_INVALID, "blk.0.ffn_up_exps.weight");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_spec_errors, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_tensor_errors, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
