/* SPDX-License-Identifier: MIT */
/* Checkpoints of real size, as dimensions: for dummy weights. */
#ifndef XPOOL_TESTS_CUDA_FFN_REAL_H
#define XPOOL_TESTS_CUDA_FFN_REAL_H

typedef struct real_model {
    const char *name, *config;
} real_model_t;

#define REAL_COMMON                                                                                \
    "\"vocab_size\":1024,\"max_position_embeddings\":1024,\"rms_norm_eps\":1e-6,"                  \
    "\"rope_theta\":10000.0,\"hidden_act\":\"silu\",\"torch_dtype\":\"bfloat16\","
#define REAL_LATENT                                                                                \
    "\"kv_lora_rank\":512,\"qk_nope_head_dim\":128,\"qk_rope_head_dim\":64,\"v_head_dim\":128,"

/* Layers are fewer than the models have: enough that their weights are many times the L2. */
static const real_model_t real_models[] = {
    {"qwen3-14b", "{\"architectures\":[\"Qwen3ForCausalLM\"]," REAL_COMMON
                  "\"hidden_size\":5120,\"intermediate_size\":17408,\"num_hidden_layers\":6,"
                  "\"num_attention_heads\":40,\"num_key_value_heads\":8,\"head_dim\":128}"},
    {"qwen3-30b-a3b",
     "{\"architectures\":[\"Qwen3MoeForCausalLM\"]," REAL_COMMON
     "\"hidden_size\":2048,\"intermediate_size\":6144,\"moe_intermediate_size\":768,"
     "\"num_experts\":128,\"num_experts_per_tok\":8,\"norm_topk_prob\":true,"
     "\"decoder_sparse_step\":1,\"mlp_only_layers\":[],\"num_hidden_layers\":6,"
     "\"num_attention_heads\":32,\"num_key_value_heads\":4,\"head_dim\":128}"},
    {"deepseek-v2-lite",
     "{\"architectures\":[\"DeepseekV2ForCausalLM\"]," REAL_COMMON REAL_LATENT
     "\"hidden_size\":2048,\"intermediate_size\":10944,\"moe_intermediate_size\":1408,"
     "\"n_routed_experts\":64,\"num_experts_per_tok\":6,\"n_shared_experts\":2,\"n_group\":1,"
     "\"topk_group\":1,\"topk_method\":\"greedy\",\"scoring_func\":\"softmax\","
     "\"norm_topk_prob\":false,\"routed_scaling_factor\":1.0,\"first_k_dense_replace\":1,"
     "\"moe_layer_freq\":1,\"num_hidden_layers\":6,\"q_lora_rank\":null,"
     "\"num_attention_heads\":16,\"num_key_value_heads\":16}"},
    {"glm-4.7-flash",
     "{\"architectures\":[\"Glm4MoeLiteForCausalLM\"]," REAL_COMMON REAL_LATENT
     "\"hidden_size\":2048,\"intermediate_size\":10240,\"moe_intermediate_size\":1536,"
     "\"n_routed_experts\":64,\"num_experts_per_tok\":4,\"n_shared_experts\":1,\"n_group\":1,"
     "\"topk_group\":1,\"topk_method\":\"noaux_tc\",\"norm_topk_prob\":true,"
     "\"routed_scaling_factor\":1.8,\"first_k_dense_replace\":1,\"num_hidden_layers\":6,"
     "\"q_lora_rank\":768,\"num_attention_heads\":20,\"num_key_value_heads\":20}"},
};
#define REAL_MODELS (sizeof(real_models) / sizeof(real_models[0]))
#endif
