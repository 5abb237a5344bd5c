/* SPDX-License-Identifier: MIT */
/*
 * Model spec: what a checkpoint's config.json (or GGUF metadata) says about a model, in one plain
 * struct. The architecture, never the model's name, selects the adapter that fills it.
 */
#ifndef XPOOL_MODEL_SPEC_H
#define XPOOL_MODEL_SPEC_H

#include <stdbool.h>
#include <stdint.h>

#include "base/dtype.h"
#include "base/status.h"

#define MODEL_MAX_LAYERS  256
#define MODEL_MAX_EXPERTS 512
#define MODEL_MAX_TOP_K   32
#define MODEL_MAX_EOS     8
#define MODEL_MAX_HIDDEN  65536

typedef enum model_architecture {
    MODEL_ARCH_LLAMA = 0,   /* LlamaForCausalLM; GGUF "llama" */
    MODEL_ARCH_QWEN2,       /* Qwen2ForCausalLM; GGUF "qwen2" */
    MODEL_ARCH_QWEN3,       /* Qwen3ForCausalLM; GGUF "qwen3" */
    MODEL_ARCH_QWEN3_MOE,   /* Qwen3MoeForCausalLM; GGUF "qwen3moe" */
    MODEL_ARCH_DEEPSEEK_V2, /* DeepseekV2ForCausalLM: spec and FFN side; no native attention yet */
    MODEL_ARCH_GLM4_MOE_LITE,
    MODEL_ARCH_COUNT
} model_architecture_t;

typedef enum model_rope_scaling {
    MODEL_ROPE_NONE = 0,
    MODEL_ROPE_LINEAR,
    MODEL_ROPE_LLAMA3,
    MODEL_ROPE_YARN,
} model_rope_scaling_t;

typedef struct model_rope {
    double theta;
    model_rope_scaling_t scaling;
    double factor;                 /* all kinds but NONE */
    double low_freq_factor;        /* LLAMA3 */
    double high_freq_factor;       /* LLAMA3 */
    double original_max_positions; /* LLAMA3, YARN */
    double beta_fast, beta_slow;   /* YARN */
    double mscale, mscale_all_dim; /* YARN (DeepSeek) */
    double attention_factor;       /* YARN; 0 = derived */
    bool interleaved;              /* pairs (2i, 2i+1) instead of (i, i + d/2) */
} model_rope_t;

typedef enum model_ffn_kind { MODEL_FFN_DENSE = 0, MODEL_FFN_MOE } model_ffn_kind_t;
typedef enum model_router { MODEL_ROUTER_SOFTMAX = 0, MODEL_ROUTER_SIGMOID } model_router_t;
typedef enum model_activation { MODEL_ACT_SILU = 0, MODEL_ACT_GELU_TANH } model_activation_t;

/* One layer's FFN. Weight shapes (rows x columns, row-major): gate, up [intermediate, hidden],
 * down [hidden, intermediate]; for MoE one such triple an expert, router [experts, hidden]. */
typedef struct model_ffn {
    model_ffn_kind_t kind;
    model_activation_t activation;
    uint32_t intermediate; /* dense width, or one expert's width */
    uint32_t experts;      /* MoE only from here on */
    uint32_t top_k;
    model_router_t router;
    bool normalize_top_k;         /* divide the chosen weights by their sum */
    double routed_scale;          /* 1.0 when the family has none */
    bool correction_bias;         /* e_score_correction_bias, used for the choice only */
    uint32_t groups, top_groups;  /* group-limited choice; 1, 1 when absent */
    uint32_t shared_intermediate; /* width of the fused shared experts; 0 = none */
} model_ffn_t;

typedef struct model_spec {
    model_architecture_t architecture;
    char architecture_name[64]; /* as found: "Qwen3MoeForCausalLM" */
    uint32_t hidden;
    uint32_t layers;
    uint32_t vocab;
    uint32_t heads, kv_heads, head_dim; /* GQA */
    bool qkv_bias, o_bias;
    bool qk_norm; /* RMSNorm over head_dim on q and k */
    double norm_epsilon;
    model_rope_t rope;
    bool tied_embeddings;    /* lm_head is embed_tokens */
    uint32_t max_positions;  /* the checkpoint's own context limit, tokens */
    uint32_t sliding_window; /* 0 = none */
    /* MLA (DeepSeek-V2, GLM); zero for GQA */
    uint32_t q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim;
    int32_t bos_token, pad_token; /* -1 = none */
    int32_t eos_tokens[MODEL_MAX_EOS];
    uint32_t eos_count;          /* from generation_config.json, else config.json / GGUF */
    xp_dtype_t checkpoint_dtype; /* config's torch_dtype; AUTO when unknown */
    model_ffn_t ffn[MODEL_MAX_LAYERS];
    bool is_gguf;
} model_spec_t;

/* Reads `path`: a Hugging Face folder (config.json, generation_config.json if present), a .gguf
 * file, or a folder holding exactly one .gguf file. Touches no weight. Errors name the file and the
 * key. An unknown architecture is XP_UNSUPPORTED and lists the known ones. */
xp_status_t model_spec_load(const char *path, model_spec_t *spec_out);

/* The same from a config.json text (no generation_config). `where` is used in messages. */
xp_status_t model_spec_parse(const char *json, size_t length, const char *where,
                             model_spec_t *spec_out);

const char *model_architecture_name(model_architecture_t architecture);
bool model_architecture_has_native_engine(model_architecture_t architecture);

/* Exact bytes of one token's K and V over all layers at `kv_dtype` (GQA:
 * 2*layers*kv_heads*head_dim). */
uint64_t model_kv_bytes_per_token(const model_spec_t *spec, xp_dtype_t kv_dtype);
#endif
