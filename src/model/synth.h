/* SPDX-License-Identifier: MIT */
/*
 * Synthetic checkpoints: small, seeded, of every supported architecture, in Hugging Face layout or
 * as GGUF, for tests and demonstrations. The same seed and sizes give the same weights whatever the
 * format, the sharding or the machine (before rounding to the stored type).
 */
#ifndef XPOOL_MODEL_SYNTH_H
#define XPOOL_MODEL_SYNTH_H

#include <stdbool.h>
#include <stdint.h>

#include "base/dtype.h"
#include "base/status.h"
#include "model/spec.h"

typedef struct synth_options {
    model_architecture_t architecture;
    uint64_t seed;
    uint32_t layers, hidden, vocab, context;
    uint32_t heads, kv_heads, head_dim;
    uint32_t intermediate, moe_intermediate;
    uint32_t experts, top_k;
    uint32_t dense_layers; /* MoE families: how many first layers are dense */
    /* DeepSeek-V2 and GLM only; 1, 1, 0 and 1.0 for the others. */
    uint32_t groups, top_groups;
    uint32_t shared_experts;
    double routed_scale;
    bool normalize_top_k;
    bool tied;
    model_rope_scaling_t rope;
    xp_dtype_t dtype; /* F32, BF16, F16 */
    uint32_t shards;  /* safetensors files */
    bool gguf;
    xp_dtype_t quant; /* GGUF matrices; AUTO = dtype */
    bool force;       /* replace files of an earlier run */
    void (*progress)(void *context, uint64_t done_bytes, uint64_t total_bytes); /* may be NULL */
    void *progress_context;
} synth_options_t;

/* Sizes that run in milliseconds yet exercise everything: 4 layers, 8 experts. */
void model_synth_defaults(model_architecture_t architecture, synth_options_t *options_out);

/* "llama", "qwen3-moe", ...; MODEL_ARCH_COUNT when unknown. */
model_architecture_t model_synth_architecture(const char *name);
const char *model_synth_architecture_name(model_architecture_t architecture);

/* Writes the checkpoint into `folder`, which is made if absent. XP_INVALID when it holds one
 * already and `force` is off. Files appear under their names only when complete. */
xp_status_t model_synth_write(const synth_options_t *options, const char *folder);
#endif
