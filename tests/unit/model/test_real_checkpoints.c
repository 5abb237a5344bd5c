/* SPDX-License-Identifier: MIT */
/*
 * The tales checkpoints of the repository, and the real configurations beside it, against facts
 * written down by hand from their config.json files. Skips what lies in ../shared when that is
 * absent.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "model/checkpoint.h"
#include "model/inventory.h"
#include "model/spec.h"

static model_spec_t spec;

static void load(const char *path)
{
    xp_status_t status = model_spec_load(path, &spec);
    if (status != XP_OK)
        print_error("%s\n", xp_error_last()->text);
    assert_int_equal(status, XP_OK);
}

static bool load_shared(const char *name)
{
    char path[4096];
    snprintf(path, sizeof(path), "%s/../shared/data/%s", XPOOL_SOURCE_DIR, name);
    if (access(path, R_OK) != 0)
        return false;
    size_t length = strlen(path);
    if (strcmp(path + length - 5, ".json") != 0) {
        load(path);
        return true;
    }
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    static char text[1 << 16];
    length = fread(text, 1, sizeof(text), file);
    fclose(file);
    xp_status_t status = model_spec_parse(text, length, path, &spec);
    if (status != XP_OK)
        print_error("%s\n", xp_error_last()->text);
    assert_int_equal(status, XP_OK);
    return true;
}

static xp_status_t require_tensor(void *context, const inventory_tensor_t *wanted)
{
    const checkpoint_tensor_t *tensor;
    size_t *count = ((void **)context)[1];
    ++*count;
    return checkpoint_tensor_require(((void **)context)[0], wanted->name, wanted->dimensions,
                                     wanted->shape, &tensor);
}

/* Opens the checkpoint and checks that it holds exactly the tensors of the inventory. */
static checkpoint_t *open_complete(const char *path)
{
    checkpoint_t *checkpoint = NULL;
    size_t count = 0;
    xp_status_t status = checkpoint_open(path, &spec, &checkpoint);
    if (status != XP_OK)
        print_error("%s\n", xp_error_last()->text);
    assert_int_equal(status, XP_OK);
    void *context[2] = {checkpoint, &count};
    status = model_inventory_visit(&spec, require_tensor, context);
    if (status != XP_OK)
        print_error("%s\n", xp_error_last()->text);
    assert_int_equal(status, XP_OK);
    assert_int_equal(checkpoint_tensor_count(checkpoint), count);
    return checkpoint;
}

static bool is_ffn(const checkpoint_tensor_t *tensor, void *context)
{
    (void)context;
    return checkpoint_tensor_is_ffn(tensor);
}

static void test_tales_qwen3_moe(void **state)
{
    (void)state;
    load(XPOOL_SOURCE_DIR "/models/tales/qwen3-moe");
    assert_int_equal(spec.architecture, MODEL_ARCH_QWEN3_MOE);
    assert_string_equal(spec.architecture_name, "Qwen3MoeForCausalLM");
    assert_int_equal(spec.hidden, 192);
    assert_int_equal(spec.layers, 6);
    assert_int_equal(spec.vocab, 4096);
    assert_int_equal(spec.heads, 4);
    assert_int_equal(spec.kv_heads, 2);
    assert_int_equal(spec.head_dim, 64);
    assert_true(spec.qk_norm);
    assert_false(spec.qkv_bias);
    assert_false(spec.tied_embeddings);
    assert_int_equal(spec.max_positions, 1024);
    assert_int_equal(spec.eos_count, 2);
    assert_int_equal(spec.eos_tokens[0], 2);
    assert_int_equal(spec.eos_tokens[1], 0);
    assert_int_equal(spec.bos_token, 0);
    assert_int_equal(spec.checkpoint_dtype, XP_DTYPE_BF16);
    assert_float_equal(spec.rope.theta, 10000, 0);
    assert_float_equal(spec.norm_epsilon, 1e-6, 0);
    for (uint32_t i = 0; i < spec.layers; i++) {
        assert_int_equal(spec.ffn[i].kind, MODEL_FFN_MOE);
        assert_int_equal(spec.ffn[i].intermediate, 32);
        assert_int_equal(spec.ffn[i].experts, 16);
        assert_int_equal(spec.ffn[i].top_k, 4);
        assert_true(spec.ffn[i].normalize_top_k);
        assert_int_equal(spec.ffn[i].router, MODEL_ROUTER_SOFTMAX);
    }
    assert_true(model_kv_bytes_per_token(&spec, XP_DTYPE_F32) == 2ull * 6 * 2 * 64 * 4);
    checkpoint_t *checkpoint = open_complete(XPOOL_SOURCE_DIR "/models/tales/qwen3-moe");
    /* README.md of the models: 4,248,768 parameters, all BF16. */
    assert_int_equal(checkpoint_bytes(checkpoint, NULL, NULL), 4248768 * 2);
    /* Router and experts of six layers. */
    assert_int_equal(checkpoint_bytes(checkpoint, is_ffn, NULL),
                     6 * (16 * 192 + 16 * 3 * 32 * 192) * 2);
    checkpoint_close(checkpoint);
}

static void test_tales_deepseek_v2(void **state)
{
    (void)state;
    load(XPOOL_SOURCE_DIR "/models/tales/deepseek-v2");
    assert_int_equal(spec.architecture, MODEL_ARCH_DEEPSEEK_V2);
    assert_int_equal(spec.q_lora_rank, 0);
    assert_int_equal(spec.kv_lora_rank, 64);
    assert_int_equal(spec.qk_nope_head_dim, 32);
    assert_int_equal(spec.qk_rope_head_dim, 16);
    assert_int_equal(spec.v_head_dim, 32);
    assert_true(spec.rope.interleaved);
    assert_int_equal(spec.ffn[0].kind, MODEL_FFN_DENSE);
    assert_int_equal(spec.ffn[0].intermediate, 512);
    for (uint32_t i = 1; i < spec.layers; i++) {
        assert_int_equal(spec.ffn[i].kind, MODEL_FFN_MOE);
        assert_int_equal(spec.ffn[i].experts, 16);
        assert_int_equal(spec.ffn[i].top_k, 3);
        assert_int_equal(spec.ffn[i].shared_intermediate, 32);
        assert_false(spec.ffn[i].normalize_top_k);
        assert_false(spec.ffn[i].correction_bias);
        assert_float_equal(spec.ffn[i].routed_scale, 1, 0);
    }
    assert_true(model_kv_bytes_per_token(&spec, XP_DTYPE_BF16) == 6ull * (64 + 16) * 2);
    checkpoint_t *checkpoint = open_complete(XPOOL_SOURCE_DIR "/models/tales/deepseek-v2");
    assert_int_equal(checkpoint_bytes(checkpoint, NULL, NULL), 4245312 * 2);
    checkpoint_close(checkpoint);
}

static void test_tales_glm4_moe_lite(void **state)
{
    (void)state;
    load(XPOOL_SOURCE_DIR "/models/tales/glm4-moe-lite");
    assert_int_equal(spec.architecture, MODEL_ARCH_GLM4_MOE_LITE);
    assert_int_equal(spec.q_lora_rank, 96);
    assert_float_equal(spec.norm_epsilon, 1e-5, 0);
    assert_int_equal(spec.ffn[0].kind, MODEL_FFN_DENSE);
    assert_int_equal(spec.ffn[1].router, MODEL_ROUTER_SIGMOID);
    assert_true(spec.ffn[1].correction_bias);
    assert_true(spec.ffn[1].normalize_top_k);
    assert_int_equal(spec.ffn[1].top_k, 4);
    assert_float_equal(spec.ffn[1].routed_scale, 1.8, 0);
    checkpoint_t *checkpoint = open_complete(XPOOL_SOURCE_DIR "/models/tales/glm4-moe-lite");
    const checkpoint_tensor_t *bias =
        checkpoint_tensor_find(checkpoint, "model.layers.1.mlp.gate.e_score_correction_bias");
    assert_non_null(bias);
    assert_int_equal(bias->dtype, XP_DTYPE_F32);
    assert_true(checkpoint_tensor_is_ffn(bias));
    float values[16], largest = 0;
    assert_int_equal(checkpoint_read_f32(checkpoint, bias, values), XP_OK);
    for (int i = 0; i < 16; i++)
        largest = values[i] > largest ? values[i] : largest;
    assert_true(largest > 0 && largest < 0.2f);
    checkpoint_close(checkpoint);
}

static void test_tinystories(void **state)
{
    (void)state;
    if (!load_shared("tinystories-656k"))
        skip();
    assert_int_equal(spec.architecture, MODEL_ARCH_LLAMA);
    assert_int_equal(spec.head_dim, 16);
    assert_int_equal(spec.kv_heads, 4);
    assert_true(spec.tied_embeddings);
    assert_int_equal(spec.checkpoint_dtype, XP_DTYPE_F32);
    assert_int_equal(spec.eos_count, 1);
    assert_int_equal(spec.eos_tokens[0], 2);
    checkpoint_t *checkpoint = open_complete(XPOOL_SOURCE_DIR "/../shared/data/tinystories-656k");
    assert_null(checkpoint_tensor_find(checkpoint, "lm_head.weight"));
    checkpoint_close(checkpoint);
}

static void test_qwen2_config(void **state)
{
    (void)state;
    if (!load_shared("model-configs/Qwen2.5-0.5B.json"))
        skip();
    assert_int_equal(spec.architecture, MODEL_ARCH_QWEN2);
    assert_int_equal(spec.hidden, 896);
    assert_int_equal(spec.head_dim, 64);
    assert_true(spec.qkv_bias);
    assert_false(spec.o_bias);
    assert_false(spec.qk_norm);
    assert_true(spec.tied_embeddings);
    assert_int_equal(spec.sliding_window, 0);
    assert_int_equal(spec.pad_token, -1);
    assert_float_equal(spec.rope.theta, 1e6, 0);
}

static void test_qwen3_configs(void **state)
{
    (void)state;
    if (!load_shared("model-configs/Qwen3-0.6B.json"))
        skip();
    assert_int_equal(spec.head_dim, 128);
    assert_int_equal(spec.heads, 16);
    assert_true(spec.tied_embeddings);
    assert_true(load_shared("model-configs/Qwen3-14B.json"));
    assert_int_equal(spec.layers, 40);
    assert_int_equal(spec.ffn[39].intermediate, 17408);
    assert_false(spec.tied_embeddings);
    assert_int_equal(spec.sliding_window, 0);
}

static void test_qwen3_moe_config(void **state)
{
    (void)state;
    if (!load_shared("model-configs/Qwen3-30B-A3B.json"))
        skip();
    assert_int_equal(spec.layers, 48);
    assert_int_equal(spec.ffn[47].experts, 128);
    assert_int_equal(spec.ffn[47].top_k, 8);
    assert_int_equal(spec.ffn[0].intermediate, 768);
    /* 2 x 48 layers x 4 heads x 128, two bytes each. */
    assert_true(model_kv_bytes_per_token(&spec, XP_DTYPE_BF16) == 98304);
}

static void test_deepseek_config(void **state)
{
    (void)state;
    if (!load_shared("model-configs/DeepSeek-V2-Lite-Chat.json"))
        skip();
    assert_int_equal(spec.layers, 27);
    assert_int_equal(spec.rope.scaling, MODEL_ROPE_YARN);
    assert_float_equal(spec.rope.factor, 40, 0);
    assert_float_equal(spec.rope.mscale, 0.707, 0);
    assert_float_equal(spec.rope.mscale_all_dim, 0.707, 0);
    assert_float_equal(spec.rope.original_max_positions, 4096, 0);
    assert_int_equal(spec.ffn[0].kind, MODEL_FFN_DENSE);
    assert_int_equal(spec.ffn[0].intermediate, 10944);
    assert_int_equal(spec.ffn[26].kind, MODEL_FFN_MOE);
    assert_int_equal(spec.ffn[26].shared_intermediate, 2816);
    assert_int_equal(spec.ffn[26].groups, 1);
}

static void test_glm_config(void **state)
{
    (void)state;
    if (!load_shared("model-configs/GLM-4.7-Flash.json"))
        skip();
    assert_int_equal(spec.layers, 47);
    assert_int_equal(spec.eos_count, 3);
    assert_int_equal(spec.eos_tokens[2], 154829);
    assert_int_equal(spec.head_dim, 256);
    assert_int_equal(spec.ffn[46].shared_intermediate, 1536);
    assert_int_equal(spec.checkpoint_dtype, XP_DTYPE_BF16);
}

/* The real SmolLM2 GGUF, where scripts/test or scripts/demo has fetched it. */
static void test_smollm2_gguf(void **state)
{
    (void)state;
    const char *path = getenv("XPOOL_TEST_SMOLLM2");
    if (!path)
        path = XPOOL_SOURCE_DIR "/.xpool-cache/models/SmolLM2-135M-Instruct.Q4_1.gguf";
    if (access(path, R_OK) != 0)
        skip();
    load(path);
    assert_string_equal(spec.architecture_name, "LlamaForCausalLM");
    assert_true(spec.is_gguf);
    assert_int_equal(spec.layers, 30);
    assert_int_equal(spec.hidden, 576);
    assert_int_equal(spec.heads, 9);
    assert_int_equal(spec.kv_heads, 3);
    assert_int_equal(spec.head_dim, 64);
    assert_int_equal(spec.vocab, 49152);
    assert_int_equal(spec.ffn[29].intermediate, 1536);
    assert_true(spec.tied_embeddings);
    assert_float_equal(spec.rope.theta, 100000, 0);
    assert_float_equal(spec.norm_epsilon, 1e-5, 1e-11);
    assert_int_equal(spec.eos_tokens[0], 2);
    assert_int_equal(spec.max_positions, 8192);
    assert_int_equal(spec.checkpoint_dtype, XP_DTYPE_Q4_1);
    checkpoint_t *checkpoint = open_complete(path);
    const checkpoint_tensor_t *query =
        checkpoint_tensor_find(checkpoint, "model.layers.3.self_attn.q_proj.weight");
    assert_int_equal(query->dtype, XP_DTYPE_Q4_1);
    assert_int_equal(query->permute_heads, 9);
    checkpoint_close(checkpoint);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tales_qwen3_moe),     cmocka_unit_test(test_tales_deepseek_v2),
        cmocka_unit_test(test_tales_glm4_moe_lite), cmocka_unit_test(test_tinystories),
        cmocka_unit_test(test_qwen2_config),        cmocka_unit_test(test_qwen3_configs),
        cmocka_unit_test(test_qwen3_moe_config),    cmocka_unit_test(test_deepseek_config),
        cmocka_unit_test(test_glm_config),          cmocka_unit_test(test_smollm2_gguf),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
