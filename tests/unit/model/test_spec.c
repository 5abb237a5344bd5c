/* SPDX-License-Identifier: MIT */
/*
 * config.json and generation_config.json: defaults of each family, both spellings of transformers 4
 * and 5, and precise errors. Expected values are those of transformers 5.8.1's configuration
 * classes.
 */
#include "support.h"

#include "model/spec.h"

static model_spec_t spec;

static xp_status_t parse(const char *json)
{
    return model_spec_parse(json, strlen(json), "dir/config.json", &spec);
}

/* The keys every family needs, with `extra` in front. */
static xp_status_t parse_family(const char *name, const char *extra)
{
    char json[4096];
    snprintf(json, sizeof(json),
             "{\"architectures\": [\"%s\"], %s \"hidden_size\": 512, \"num_hidden_layers\": 4, "
             "\"vocab_size\": 1000, \"num_attention_heads\": 8, \"intermediate_size\": 1024, "
             "\"moe_intermediate_size\": 96, \"num_experts_per_tok\": 4}",
             name, extra);
    return parse(json);
}

static void test_defaults(void **state)
{
    (void)state;
    check_ok(parse_family("LlamaForCausalLM", ""));
    assert_int_equal(spec.kv_heads, 8);
    assert_int_equal(spec.head_dim, 64);
    assert_int_equal(spec.max_positions, 2048);
    assert_float_equal(spec.norm_epsilon, 1e-6, 0);
    assert_float_equal(spec.rope.theta, 10000, 0);
    assert_int_equal(spec.rope.scaling, MODEL_ROPE_NONE);
    assert_false(spec.tied_embeddings);
    assert_int_equal(spec.bos_token, 1);
    assert_int_equal(spec.eos_tokens[0], 2);
    assert_int_equal(spec.pad_token, -1);
    assert_int_equal(spec.checkpoint_dtype, XP_DTYPE_AUTO);

    check_ok(parse_family("Qwen2ForCausalLM", "\"num_key_value_heads\": 2,"));
    assert_int_equal(spec.head_dim, 64);
    assert_true(spec.qkv_bias);
    assert_int_equal(spec.max_positions, 32768);
    assert_int_equal(spec.bos_token, -1);
    assert_int_equal(spec.eos_count, 0);

    check_ok(parse_family("Qwen3ForCausalLM", "\"num_key_value_heads\": null,"));
    assert_int_equal(spec.kv_heads, 8);
    assert_int_equal(spec.head_dim, 128);
    assert_true(spec.qk_norm);

    check_ok(parse_family("Qwen3MoeForCausalLM", ""));
    assert_int_equal(spec.kv_heads, 4);
    assert_int_equal(spec.head_dim, 64);
    assert_int_equal(spec.ffn[0].kind, MODEL_FFN_MOE);
    assert_int_equal(spec.ffn[0].experts, 128);
    assert_false(spec.ffn[0].normalize_top_k);

    check_ok(parse_family("DeepseekV2ForCausalLM", ""));
    assert_int_equal(spec.q_lora_rank, 1536);
    assert_int_equal(spec.kv_lora_rank, 512);
    assert_int_equal(spec.head_dim, 192);
    assert_int_equal(spec.ffn[0].kind, MODEL_FFN_MOE);
    assert_int_equal(spec.ffn[0].shared_intermediate, 192);
    assert_int_equal(spec.ffn[0].experts, 64);

    check_ok(parse_family("Glm4MoeLiteForCausalLM", "\"num_key_value_heads\": 8,"));
    assert_int_equal(spec.ffn[0].kind, MODEL_FFN_DENSE);
    assert_int_equal(spec.ffn[1].kind, MODEL_FFN_MOE);
    assert_int_equal(spec.head_dim, 256);
    assert_float_equal(spec.norm_epsilon, 1e-5, 0);
    assert_float_equal(spec.ffn[1].routed_scale, 1.8, 0);
    assert_int_equal(spec.bos_token, 0);
    assert_int_equal(spec.eos_tokens[0], 1);
}

static void test_both_spellings(void **state)
{
    (void)state;
    check_ok(parse_family("LlamaForCausalLM",
                          "\"rope_theta\": 500000.0, \"torch_dtype\": \"bfloat16\","
                          "\"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8.0, "
                          "\"low_freq_factor\": 1.0, \"high_freq_factor\": 4.0, "
                          "\"original_max_position_embeddings\": 8192},"));
    assert_int_equal(spec.checkpoint_dtype, XP_DTYPE_BF16);
    assert_int_equal(spec.rope.scaling, MODEL_ROPE_LLAMA3);
    assert_float_equal(spec.rope.theta, 500000, 0);
    assert_float_equal(spec.rope.factor, 8, 0);
    assert_float_equal(spec.rope.original_max_positions, 8192, 0);
    check_ok(parse_family("LlamaForCausalLM",
                          "\"dtype\": \"float16\", \"rope_parameters\": {\"rope_type\": "
                          "\"linear\", \"factor\": 2, \"rope_theta\": 1e6},"));
    assert_int_equal(spec.checkpoint_dtype, XP_DTYPE_F16);
    assert_int_equal(spec.rope.scaling, MODEL_ROPE_LINEAR);
    assert_float_equal(spec.rope.theta, 1e6, 0);
    assert_float_equal(spec.rope.factor, 2, 0);
    /* The older "type", and a factor left to be derived: 32768 / 8192. */
    check_ok(parse_family("Qwen3ForCausalLM",
                          "\"num_key_value_heads\": 8, \"rope_scaling\": {\"type\": \"yarn\", "
                          "\"original_max_position_embeddings\": 8192},"));
    assert_int_equal(spec.rope.scaling, MODEL_ROPE_YARN);
    assert_float_equal(spec.rope.factor, 4, 0);
    assert_float_equal(spec.rope.beta_fast, 32, 0);
    assert_float_equal(spec.rope.beta_slow, 1, 0);
    assert_float_equal(spec.rope.attention_factor, 0, 0);
    check_ok(parse_family("Qwen3ForCausalLM",
                          "\"num_key_value_heads\": 8, \"rope_parameters\": {\"rope_theta\": "
                          "5000, \"rope_type\": \"default\"}, \"rope_scaling\": null,"));
    assert_float_equal(spec.rope.theta, 5000, 0);
    assert_int_equal(spec.rope.scaling, MODEL_ROPE_NONE);
    check_ok(parse_family("Qwen3MoeForCausalLM", "\"num_local_experts\": 16,"));
    assert_int_equal(spec.ffn[0].experts, 16);
    /* Without architectures the model type selects. */
    check_ok(parse("{\"model_type\": \"qwen2\", \"hidden_size\": 512, \"num_hidden_layers\": 4, "
                   "\"vocab_size\": 9, \"num_attention_heads\": 8, \"intermediate_size\": 4, "
                   "\"num_key_value_heads\": 8}"));
    assert_int_equal(spec.architecture, MODEL_ARCH_QWEN2);
}

static void test_layer_kinds(void **state)
{
    (void)state;
    check_ok(parse_family("Qwen3MoeForCausalLM",
                          "\"decoder_sparse_step\": 2, \"mlp_only_layers\": [3],"));
    assert_int_equal(spec.ffn[0].kind, MODEL_FFN_DENSE);
    assert_int_equal(spec.ffn[1].kind, MODEL_FFN_MOE);
    assert_int_equal(spec.ffn[3].kind, MODEL_FFN_DENSE);
    assert_int_equal(spec.ffn[3].intermediate, 1024);
    assert_int_equal(spec.ffn[1].intermediate, 96);
    check_ok(parse_family("DeepseekV2ForCausalLM",
                          "\"first_k_dense_replace\": 1, \"moe_layer_freq\": 2, \"n_group\": 8, "
                          "\"topk_group\": 3, \"topk_method\": \"group_limited_greedy\", "
                          "\"routed_scaling_factor\": 16,"));
    assert_int_equal(spec.ffn[1].kind, MODEL_FFN_DENSE);
    assert_int_equal(spec.ffn[2].kind, MODEL_FFN_MOE);
    assert_int_equal(spec.ffn[2].groups, 8);
    assert_int_equal(spec.ffn[2].top_groups, 3);
    assert_float_equal(spec.ffn[2].routed_scale, 16, 0);
    check_ok(parse_family("Glm4MoeLiteForCausalLM",
                          "\"num_key_value_heads\": 8, \"mlp_layer_types\": [\"dense\", "
                          "\"dense\", \"sparse\", \"sparse\"], \"n_shared_experts\": 2,"));
    assert_int_equal(spec.ffn[1].kind, MODEL_FFN_DENSE);
    assert_int_equal(spec.ffn[2].kind, MODEL_FFN_MOE);
    assert_int_equal(spec.ffn[2].shared_intermediate, 192);
}

static void test_sliding_window(void **state)
{
    (void)state;
    const char *heads = "\"num_key_value_heads\": 8, \"use_sliding_window\": true, ";
    char extra[512];
    snprintf(extra, sizeof(extra), "%s\"sliding_window\": 1024, \"max_window_layers\": 0,", heads);
    check_ok(parse_family("Qwen2ForCausalLM", extra));
    assert_int_equal(spec.sliding_window, 1024);
    snprintf(extra, sizeof(extra), "%s\"sliding_window\": 1024, \"max_window_layers\": 4,", heads);
    check_ok(parse_family("Qwen2ForCausalLM", extra));
    assert_int_equal(spec.sliding_window, 0);
    snprintf(extra, sizeof(extra), "%s\"sliding_window\": 1024, \"max_window_layers\": 2,", heads);
    check_fails(parse_family("Qwen2ForCausalLM", extra), XP_UNSUPPORTED, "sliding_window|2 of 4");
    snprintf(extra, sizeof(extra), "%s\"sliding_window\": 99999, \"max_window_layers\": 2,", heads);
    check_ok(parse_family("Qwen2ForCausalLM", extra));
    assert_int_equal(spec.sliding_window, 0);
}

static void test_errors(void **state)
{
    (void)state;
    const char *llama = "LlamaForCausalLM";
    check_fails(parse("{"), XP_INVALID, "dir/config.json:1:");
    check_fails(parse("[]"), XP_INVALID, "dir/config.json|no object");
    check_fails(parse("{}"), XP_INVALID, "architectures|missing");
    check_fails(parse("{\"architectures\": [\"MambaForCausalLM\"]}"), XP_UNSUPPORTED,
                "MambaForCausalLM|LlamaForCausalLM|Glm4MoeLiteForCausalLM");
    check_fails(parse("{\"architectures\": \"LlamaForCausalLM\"}"), XP_INVALID,
                "architectures|a string|wanted an array");
    check_fails(parse("{\"architectures\": [7]}"), XP_INVALID, "architectures");
    check_fails(parse("{\"architectures\": [\"LlamaForCausalLM\"]}"), XP_INVALID,
                "dir/config.json: \"hidden_size\" is missing");
    check_fails(parse("{\"architectures\": [\"LlamaForCausalLM\"], \"hidden_size\": \"big\"}"),
                XP_INVALID, "hidden_size|a string|an integer");
    check_fails(parse_family(llama, "\"num_key_value_heads\": 0,"), XP_INVALID,
                "num_key_value_heads|is 0|1 to 1024");
    check_fails(parse_family(llama, "\"num_key_value_heads\": 3,"), XP_INVALID, "divide");
    check_fails(parse_family(llama, "\"head_dim\": 63,"), XP_INVALID, "odd");
    check_fails(parse_family(llama, "\"head_dim\": -4,"), XP_INVALID, "head_dim|-4");
    check_fails(parse_family(llama, "\"head_dim\": 64.5,"), XP_INVALID, "head_dim|fraction");
    check_fails(parse_family(llama, "\"head_dim\": true,"), XP_INVALID, "head_dim|boolean");
    check_fails(parse_family(llama, "\"rms_norm_eps\": -1,"), XP_INVALID, "rms_norm_eps");
    check_fails(parse_family(llama, "\"rms_norm_eps\": \"x\","), XP_INVALID, "rms_norm_eps");
    check_fails(parse_family(llama, "\"tie_word_embeddings\": 1,"), XP_INVALID,
                "tie_word_embeddings|true or false");
    check_fails(parse_family(llama, "\"hidden_act\": \"relu\","), XP_UNSUPPORTED,
                "hidden_act|relu|silu");
    check_fails(parse_family(llama, "\"mlp_bias\": true,"), XP_UNSUPPORTED, "mlp_bias");
    check_fails(parse_family(llama, "\"rope_scaling\": {\"type\": \"dynamic\", \"factor\": 2},"),
                XP_UNSUPPORTED, "rope_scaling.rope_type|dynamic|yarn");
    check_fails(parse_family(llama, "\"rope_scaling\": {\"rope_type\": \"llama3\"},"), XP_INVALID,
                "rope_scaling.factor|missing");
    check_fails(parse_family(llama, "\"partial_rotary_factor\": 0.5,"), XP_UNSUPPORTED,
                "partial_rotary_factor");
    check_fails(parse_family(llama, "\"eos_token_id\": [1,2,3,4,5,6,7,8,9],"), XP_UNSUPPORTED,
                "eos_token_id|9");
    check_fails(parse_family(llama, "\"eos_token_id\": \"</s>\","), XP_INVALID, "eos_token_id");
    check_fails(parse_family(llama, "\"quantization_config\": {\"quant_method\": \"gptq\"},"),
                XP_UNSUPPORTED, "quantization_config|gptq|GGUF");
    check_fails(parse_family("Qwen3MoeForCausalLM", "\"num_experts\": 2,"), XP_INVALID,
                "4 of 2 experts");
    check_fails(parse_family("Qwen3MoeForCausalLM", "\"num_experts\": 100000,"), XP_INVALID,
                "num_experts|100000|512");
    check_fails(parse_family("Qwen3MoeForCausalLM", "\"mlp_only_layers\": [\"a\"],"), XP_INVALID,
                "mlp_only_layers");
    check_fails(parse_family("DeepseekV2ForCausalLM", "\"scoring_func\": \"sigmoid\","),
                XP_UNSUPPORTED, "scoring_func|sigmoid");
    check_fails(parse_family("DeepseekV2ForCausalLM", "\"topk_method\": \"noaux_tc\","),
                XP_UNSUPPORTED, "topk_method|noaux_tc");
    check_fails(
        parse_family("Glm4MoeLiteForCausalLM", "\"num_key_value_heads\": 8, \"n_group\": 5,"),
        XP_INVALID, "64 experts|5 groups");
    check_fails(parse_family("Glm4MoeLiteForCausalLM",
                             "\"num_key_value_heads\": 8, \"mlp_layer_types\": [\"dense\"],"),
                XP_INVALID, "mlp_layer_types|1 entries");
}

/* Nothing is written on failure. */
static void test_output_untouched(void **state)
{
    (void)state;
    memset(&spec, 0x5a, sizeof(spec));
    model_spec_t before = spec;
    assert_int_not_equal(parse("{\"architectures\": [\"LlamaForCausalLM\"]}"), XP_OK);
    assert_memory_equal(&spec, &before, sizeof(spec));
}

static const char small_config[] =
    "{\"architectures\": [\"LlamaForCausalLM\"], \"hidden_size\": 64, \"num_hidden_layers\": 1, "
    "\"vocab_size\": 100, \"num_attention_heads\": 4, \"intermediate_size\": 64, "
    "\"eos_token_id\": 5, \"bos_token_id\": 6}";

static void test_folders(void **state)
{
    (void)state;
    char folder[64];
    make_folder(folder);
    check_fails(model_spec_load(folder, &spec), XP_NOT_FOUND, "config.json|.gguf|no checkpoint");
    check_fails(model_spec_load("/nonexistent/model", &spec), XP_NOT_FOUND, "/nonexistent/model");
    check_fails(model_spec_load("", &spec), XP_INVALID, "empty");
    write_file(folder, "config.json", small_config, strlen(small_config));
    check_ok(model_spec_load(folder, &spec));
    assert_int_equal(spec.eos_tokens[0], 5);
    const char *generation = "{\"eos_token_id\": [7, 8], \"pad_token_id\": 9}";
    write_file(folder, "generation_config.json", generation, strlen(generation));
    check_ok(model_spec_load(folder, &spec));
    assert_int_equal(spec.eos_count, 2);
    assert_int_equal(spec.eos_tokens[1], 8);
    assert_int_equal(spec.pad_token, 9);
    assert_int_equal(spec.bos_token, 6);
    write_file(folder, "generation_config.json", "{\"eos_token_id\": {}}", 20);
    check_fails(model_spec_load(folder, &spec), XP_INVALID, "generation_config.json|eos_token_id");
    write_file(folder, "generation_config.json", "nonsense", 8);
    check_fails(model_spec_load(folder, &spec), XP_INVALID, "generation_config.json:1:");
    write_file(folder, "generation_config.json", "{}", 2);
    write_file(folder, "a.gguf", "x", 1);
    write_file(folder, "b.gguf", "x", 1);
    check_fails(model_spec_load(folder, &spec), XP_INVALID, "2 .gguf files");
    write_file(folder, "model.safetensors", "x", 1);
    check_ok(model_spec_load(folder, &spec));
    assert_false(spec.is_gguf);
    char file[128];
    snprintf(file, sizeof(file), "%s/config.json", folder);
    check_fails(model_spec_load(file, &spec), XP_INVALID, "no .gguf");
    snprintf(file, sizeof(file), "%s/a.gguf", folder);
    check_fails(model_spec_load(file, &spec), XP_INVALID, "a.gguf|truncated");
    remove_folder(folder);
    make_folder(folder);
    write_file(folder, "config.json", small_config, strlen(small_config));
    write_file(folder, "pytorch_model.bin", "x", 1);
    check_fails(model_spec_load(folder, &spec), XP_UNSUPPORTED, "PyTorch|safetensors");
    remove_folder(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults),    cmocka_unit_test(test_both_spellings),
        cmocka_unit_test(test_layer_kinds), cmocka_unit_test(test_sliding_window),
        cmocka_unit_test(test_errors),      cmocka_unit_test(test_output_untouched),
        cmocka_unit_test(test_folders),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
