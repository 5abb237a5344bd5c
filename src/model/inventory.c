/* SPDX-License-Identifier: MIT */
/*
 * The list of a model's tensors. Owns nothing, runs in any thread. Names and shapes are those of
 * the published checkpoints of each family (one tensor an expert, not the fused layout).
 */
#include "model/inventory.h"

#include <stdarg.h>
#include <stdio.h>

typedef struct inventory {
    inventory_visit_t visit;
    void *context;
    const model_spec_t *spec;
    uint32_t layer;
} inventory_t;

static xp_status_t inventory_emit(const inventory_t *inventory, inventory_role_t role,
                                  uint64_t rows, uint64_t columns, const char *format, ...)
    __attribute__((format(printf, 5, 6)));

/* `columns` 0 makes a vector of `rows`. */
static xp_status_t inventory_emit(const inventory_t *inventory, inventory_role_t role,
                                  uint64_t rows, uint64_t columns, const char *format, ...)
{
    char name[160];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(name, sizeof(name), format, arguments);
    va_end(arguments);
    inventory_tensor_t tensor = {
        .name = name, .role = role, .dimensions = columns ? 2 : 1, .shape = {rows, columns}};
    return inventory->visit(inventory->context, &tensor);
}

static xp_status_t inventory_linear(const inventory_t *inventory, const char *part, uint64_t rows,
                                    uint64_t columns, bool bias)
{
    XP_TRY(inventory_emit(inventory, INVENTORY_LINEAR, rows, columns, "model.layers.%u.%s.weight",
                          inventory->layer, part));
    if (bias)
        XP_TRY(inventory_emit(inventory, INVENTORY_BIAS, rows, 0, "model.layers.%u.%s.bias",
                              inventory->layer, part));
    return XP_OK;
}

static xp_status_t inventory_norm(const inventory_t *inventory, const char *part, uint64_t width)
{
    return inventory_emit(inventory, INVENTORY_NORM, width, 0, "model.layers.%u.%s.weight",
                          inventory->layer, part);
}

static xp_status_t inventory_grouped_attention(const inventory_t *inventory)
{
    const model_spec_t *spec = inventory->spec;
    uint64_t query = (uint64_t)spec->heads * spec->head_dim;
    uint64_t key = (uint64_t)spec->kv_heads * spec->head_dim;
    XP_TRY(inventory_linear(inventory, "self_attn.q_proj", query, spec->hidden, spec->qkv_bias));
    XP_TRY(inventory_linear(inventory, "self_attn.k_proj", key, spec->hidden, spec->qkv_bias));
    XP_TRY(inventory_linear(inventory, "self_attn.v_proj", key, spec->hidden, spec->qkv_bias));
    if (spec->qk_norm) {
        XP_TRY(inventory_norm(inventory, "self_attn.q_norm", spec->head_dim));
        XP_TRY(inventory_norm(inventory, "self_attn.k_norm", spec->head_dim));
    }
    return inventory_linear(inventory, "self_attn.o_proj", spec->hidden, query, spec->o_bias);
}

static xp_status_t inventory_latent_attention(const inventory_t *inventory)
{
    const model_spec_t *spec = inventory->spec;
    uint64_t query = (uint64_t)spec->heads * (spec->qk_nope_head_dim + spec->qk_rope_head_dim);
    if (spec->q_lora_rank) {
        XP_TRY(inventory_linear(inventory, "self_attn.q_a_proj", spec->q_lora_rank, spec->hidden,
                                false));
        XP_TRY(inventory_norm(inventory, "self_attn.q_a_layernorm", spec->q_lora_rank));
        XP_TRY(inventory_linear(inventory, "self_attn.q_b_proj", query, spec->q_lora_rank, false));
    } else {
        XP_TRY(inventory_linear(inventory, "self_attn.q_proj", query, spec->hidden, false));
    }
    XP_TRY(inventory_linear(inventory, "self_attn.kv_a_proj_with_mqa",
                            (uint64_t)spec->kv_lora_rank + spec->qk_rope_head_dim, spec->hidden,
                            false));
    XP_TRY(inventory_norm(inventory, "self_attn.kv_a_layernorm", spec->kv_lora_rank));
    XP_TRY(inventory_linear(inventory, "self_attn.kv_b_proj",
                            (uint64_t)spec->heads * (spec->qk_nope_head_dim + spec->v_head_dim),
                            spec->kv_lora_rank, false));
    return inventory_linear(inventory, "self_attn.o_proj", spec->hidden,
                            (uint64_t)spec->heads * spec->v_head_dim, false);
}

static xp_status_t inventory_gated(const inventory_t *inventory, const char *part, uint64_t width)
{
    char name[96];
    uint64_t hidden = inventory->spec->hidden;
    snprintf(name, sizeof(name), "%s.gate_proj", part);
    XP_TRY(inventory_linear(inventory, name, width, hidden, false));
    snprintf(name, sizeof(name), "%s.up_proj", part);
    XP_TRY(inventory_linear(inventory, name, width, hidden, false));
    snprintf(name, sizeof(name), "%s.down_proj", part);
    return inventory_linear(inventory, name, hidden, width, false);
}

static xp_status_t inventory_ffn(const inventory_t *inventory)
{
    const model_ffn_t *ffn = &inventory->spec->ffn[inventory->layer];
    char name[64];
    if (ffn->kind == MODEL_FFN_DENSE)
        return inventory_gated(inventory, "mlp", ffn->intermediate);
    XP_TRY(inventory_linear(inventory, "mlp.gate", ffn->experts, inventory->spec->hidden, false));
    if (ffn->correction_bias)
        XP_TRY(inventory_emit(inventory, INVENTORY_CORRECTION, ffn->experts, 0,
                              "model.layers.%u.mlp.gate.e_score_correction_bias",
                              inventory->layer));
    for (uint32_t expert = 0; expert < ffn->experts; expert++) {
        snprintf(name, sizeof(name), "mlp.experts.%u", expert);
        XP_TRY(inventory_gated(inventory, name, ffn->intermediate));
    }
    if (ffn->shared_intermediate)
        XP_TRY(inventory_gated(inventory, "mlp.shared_experts", ffn->shared_intermediate));
    return XP_OK;
}

xp_status_t model_inventory_visit(const model_spec_t *spec, inventory_visit_t visit, void *context)
{
    inventory_t inventory = {.visit = visit, .context = context, .spec = spec};
    XP_TRY(inventory_emit(&inventory, INVENTORY_EMBEDDING, spec->vocab, spec->hidden,
                          "model.embed_tokens.weight"));
    for (uint32_t layer = 0; layer < spec->layers; layer++) {
        inventory.layer = layer;
        XP_TRY(inventory_norm(&inventory, "input_layernorm", spec->hidden));
        XP_TRY(spec->kv_lora_rank ? inventory_latent_attention(&inventory)
                                  : inventory_grouped_attention(&inventory));
        XP_TRY(inventory_norm(&inventory, "post_attention_layernorm", spec->hidden));
        XP_TRY(inventory_ffn(&inventory));
    }
    XP_TRY(inventory_emit(&inventory, INVENTORY_NORM, spec->hidden, 0, "model.norm.weight"));
    if (!spec->tied_embeddings)
        XP_TRY(inventory_emit(&inventory, INVENTORY_LINEAR, spec->vocab, spec->hidden,
                              "lm_head.weight"));
    return XP_OK;
}
