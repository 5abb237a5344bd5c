/* SPDX-License-Identifier: MIT */
/* What the parts of the model spec share: the table of architectures and the last checks. */
#ifndef XPOOL_MODEL_SPEC_PRIVATE_H
#define XPOOL_MODEL_SPEC_PRIVATE_H

#include "model/config_reader.h"
#include "model/gguf.h"
#include "model/spec.h"

#define SPEC_MAX_VOCAB        (1u << 24)
#define SPEC_MAX_HEADS        1024u
#define SPEC_MAX_HEAD_DIM     1024u
#define SPEC_MAX_INTERMEDIATE (1u << 20)
#define SPEC_MAX_POSITIONS    (1u << 27)
#define SPEC_MAX_GROUPS       64u

/* One architecture. The defaults are those of the family's configuration class in transformers
 * 5.8.1 (models/<model_type>/configuration_<model_type>.py), which apply where config.json lacks
 * the key. */
typedef struct spec_family {
    model_architecture_t architecture;
    const char *class_name; /* config.json "architectures" */
    const char *model_type; /* config.json "model_type", used when "architectures" is absent */
    const char *gguf_name;  /* GGUF general.architecture; NULL: not read from GGUF */
    bool native_engine;
    bool latent;               /* MLA: head widths come from the adapter */
    uint32_t default_kv_heads; /* 0 = as many as heads */
    uint32_t default_head_dim; /* 0 = hidden / heads */
    uint32_t default_positions;
    double default_epsilon;
    int32_t default_bos, default_eos; /* -1 = none */
    /* Fills what is particular to the family: biases, norms, FFN of every layer. */
    xp_status_t (*adapt)(const config_reader_t *reader, model_spec_t *spec);
} spec_family_t;

extern const spec_family_t spec_families[MODEL_ARCH_COUNT];

/* "LlamaForCausalLM, Qwen2ForCausalLM, ..." for messages; `out` holds `capacity` bytes. */
void spec_family_list(bool gguf, char *out, size_t capacity);

/* Checks that hold whatever the source: divisibility, even rotary width, MoE bounds. */
xp_status_t spec_check(const model_spec_t *spec, const char *where);

xp_status_t spec_from_gguf(const gguf_file_t *file, model_spec_t *spec_out);

/* Adapters (spec_adapters.c). */
xp_status_t spec_adapt_llama(const config_reader_t *reader, model_spec_t *spec);
xp_status_t spec_adapt_qwen2(const config_reader_t *reader, model_spec_t *spec);
xp_status_t spec_adapt_qwen3(const config_reader_t *reader, model_spec_t *spec);
xp_status_t spec_adapt_qwen3_moe(const config_reader_t *reader, model_spec_t *spec);
xp_status_t spec_adapt_deepseek_v2(const config_reader_t *reader, model_spec_t *spec);
xp_status_t spec_adapt_glm4_moe_lite(const config_reader_t *reader, model_spec_t *spec);

/* rope_theta, rope_scaling and rope_parameters (spec_rope.c). */
xp_status_t spec_read_rope(const config_reader_t *reader, model_spec_t *spec);
#endif
