/* SPDX-License-Identifier: MIT */
/*
 * GGUF tensors under Hugging Face names: the table of names, merged expert tensors cut into one a
 * expert, reversed shapes, and the mark on Llama's permuted q and k. GGUF names from the gguf
 * package (gguf/constants.py, TENSOR_NAMES). Runs while opening; never reads tensor data.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/checkpoint_private.h"

static const struct {
    const char *gguf, *hf;
} gguf_model_names[] = {
    {"token_embd.weight", "model.embed_tokens.weight"},
    {"output_norm.weight", "model.norm.weight"},
    {"output.weight", "lm_head.weight"},
};

typedef enum gguf_role { GGUF_PLAIN = 0, GGUF_QUERY, GGUF_KEY, GGUF_EXPERTS } gguf_role_t;

/* Behind "blk.N." and behind "model.layers.N."; experts get "model.layers.N.mlp.experts.E." */
static const struct {
    const char *gguf, *hf;
    gguf_role_t role;
} gguf_layer_names[] = {
    {"attn_norm.weight", "input_layernorm.weight", GGUF_PLAIN},
    {"ffn_norm.weight", "post_attention_layernorm.weight", GGUF_PLAIN},
    {"attn_q.weight", "self_attn.q_proj.weight", GGUF_QUERY},
    {"attn_k.weight", "self_attn.k_proj.weight", GGUF_KEY},
    {"attn_v.weight", "self_attn.v_proj.weight", GGUF_PLAIN},
    {"attn_output.weight", "self_attn.o_proj.weight", GGUF_PLAIN},
    {"attn_q.bias", "self_attn.q_proj.bias", GGUF_QUERY},
    {"attn_k.bias", "self_attn.k_proj.bias", GGUF_KEY},
    {"attn_v.bias", "self_attn.v_proj.bias", GGUF_PLAIN},
    {"attn_output.bias", "self_attn.o_proj.bias", GGUF_PLAIN},
    {"attn_q_norm.weight", "self_attn.q_norm.weight", GGUF_PLAIN},
    {"attn_k_norm.weight", "self_attn.k_norm.weight", GGUF_PLAIN},
    {"ffn_gate.weight", "mlp.gate_proj.weight", GGUF_PLAIN},
    {"ffn_up.weight", "mlp.up_proj.weight", GGUF_PLAIN},
    {"ffn_down.weight", "mlp.down_proj.weight", GGUF_PLAIN},
    {"ffn_gate_inp.weight", "mlp.gate.weight", GGUF_PLAIN},
    {"ffn_gate_exps.weight", "gate_proj.weight", GGUF_EXPERTS},
    {"ffn_up_exps.weight", "up_proj.weight", GGUF_EXPERTS},
    {"ffn_down_exps.weight", "down_proj.weight", GGUF_EXPERTS},
};

static xp_status_t gguf_add_experts(checkpoint_t *checkpoint, const gguf_tensor_t *source,
                                    unsigned layer, const char *hf)
{
    char name[CHECKPOINT_MAX_NAME + 1];
    if (source->dimensions != 3 || source->shape[2] > MODEL_MAX_EXPERTS)
        return xp_fail(
            XP_INVALID, "%s: tensor \"%s\" has %u dimensions, wanted 3 with at most %d experts",
            gguf_path(checkpoint->gguf), source->name, source->dimensions, MODEL_MAX_EXPERTS);
    uint64_t experts = source->shape[2], bytes = source->bytes / experts;
    for (uint64_t expert = 0; expert < experts; expert++) {
        checkpoint_tensor_t tensor = {
            .dtype = source->dtype,
            .dimensions = 2,
            .shape = {source->shape[1], source->shape[0]},
            .bytes = bytes,
            .offset = source->offset + expert * bytes,
        };
        snprintf(name, sizeof(name), "model.layers.%u.mlp.experts.%" PRIu64 ".%s", layer, expert,
                 hf);
        char type[16];
        snprintf(type, sizeof(type), "ggml %u", source->type);
        XP_TRY(checkpoint_add_tensor(checkpoint, name, &tensor, type));
    }
    return XP_OK;
}

/* Llama's rotary pairs lie beside each other in GGUF; everything else keeps Hugging Face's order.
 */
static xp_status_t gguf_permutation(const checkpoint_t *checkpoint, const gguf_tensor_t *source,
                                    gguf_role_t role, uint32_t *heads_out)
{
    *heads_out = 0;
    if (checkpoint->architecture != MODEL_ARCH_LLAMA || (role != GGUF_QUERY && role != GGUF_KEY))
        return XP_OK;
    uint32_t heads = role == GGUF_QUERY ? checkpoint->heads : checkpoint->kv_heads;
    uint64_t rows = source->shape[source->dimensions == 1 ? 0 : 1];
    if (rows % (2ull * heads) || source->dimensions > 2 ||
        (source->dimensions == 1 && xp_dtype_is_quantized(source->dtype)))
        return xp_fail(XP_INVALID,
                       "%s: tensor \"%s\" with %" PRIu64 " rows is not made of %u heads",
                       gguf_path(checkpoint->gguf), source->name, rows, heads);
    *heads_out = heads;
    return XP_OK;
}

static xp_status_t gguf_add_plain(checkpoint_t *checkpoint, const gguf_tensor_t *source,
                                  gguf_role_t role, const char *name)
{
    checkpoint_tensor_t tensor = {
        .dtype = source->dtype,
        .dimensions = source->dimensions,
        .bytes = source->bytes,
        .offset = source->offset,
    };
    for (uint32_t i = 0; i < source->dimensions; i++)
        tensor.shape[i] = source->shape[source->dimensions - 1 - i];
    XP_TRY(gguf_permutation(checkpoint, source, role, &tensor.permute_heads));
    char type[16];
    snprintf(type, sizeof(type), "ggml %u", source->type);
    return checkpoint_add_tensor(checkpoint, name, &tensor, type);
}

static xp_status_t gguf_add_tensor(checkpoint_t *checkpoint, const gguf_tensor_t *source)
{
    char name[CHECKPOINT_MAX_NAME + 1];
    for (size_t i = 0; i < sizeof(gguf_model_names) / sizeof(gguf_model_names[0]); i++) {
        if (strcmp(source->name, gguf_model_names[i].gguf) == 0)
            return gguf_add_plain(checkpoint, source, GGUF_PLAIN, gguf_model_names[i].hf);
    }
    unsigned layer;
    int used = 0;
    if (sscanf(source->name, "blk.%5u.%n", &layer, &used) == 1 && used > 0) {
        for (size_t i = 0; i < sizeof(gguf_layer_names) / sizeof(gguf_layer_names[0]); i++) {
            if (strcmp(source->name + used, gguf_layer_names[i].gguf) != 0)
                continue;
            if (gguf_layer_names[i].role == GGUF_EXPERTS)
                return gguf_add_experts(checkpoint, source, layer, gguf_layer_names[i].hf);
            snprintf(name, sizeof(name), "model.layers.%u.%s", layer, gguf_layer_names[i].hf);
            return gguf_add_plain(checkpoint, source, gguf_layer_names[i].role, name);
        }
    }
    /* Unknown ones keep their name: nobody asks for them, but listings stay complete. */
    return gguf_add_plain(checkpoint, source, GGUF_PLAIN, source->name);
}

xp_status_t checkpoint_load_gguf(checkpoint_t *checkpoint, const char *path)
{
    uint32_t file;
    uint64_t bytes;
    XP_TRY(gguf_open(path, &checkpoint->gguf));
    XP_TRY(checkpoint_add_file(checkpoint, path, &file, &bytes));
    for (size_t i = 0; i < gguf_tensor_count(checkpoint->gguf); i++)
        XP_TRY(gguf_add_tensor(checkpoint, gguf_tensor_at(checkpoint->gguf, i)));
    return XP_OK;
}
