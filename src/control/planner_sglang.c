/* SPDX-License-Identifier: MIT */
/*
 * The ledger of an SGLang Instance: weights and KV Cache as SGLang splits them over its ranks. Pure
 * computation from the model's tensor list; an engine's own process (interpreter, activations) is
 * outside a device's budget.
 */
#include "control/planner_sglang.h"

#include <string.h>

#include "model/inventory.h"

#define LAST_PORT       55535 /* SGLang wants the port 10000 above too */
#define VOCABULARY_UNIT 64    /* SGLang pads embedding and head to whole units of rows */

xp_status_t planner_check_sglang(const config_model_t *model, const model_spec_t *spec)
{
    if (spec->is_gguf)
        return xp_fail(XP_UNSUPPORTED,
                       "models[%s].path: %s is a GGUF file; an SGLang Instance takes a folder in "
                       "Hugging Face layout, engine = \"native\" takes both",
                       model->id, model->path);
    if (model->chat_template[0])
        return xp_fail(XP_UNSUPPORTED,
                       "models[%s].chat_template names a template of the native engine; give "
                       "SGLang's own by engine_args = [\"--chat-template\", \"...\"]",
                       model->id);
    if (model->port > LAST_PORT)
        return xp_fail(XP_INVALID, "models[%s].port: %u; SGLang takes ports up to %d", model->id,
                       model->port, LAST_PORT);
    uint32_t tp = model->attention_tp, dp = model->attention_dp;
    if (tp > 1 && dp > 1)
        return xp_fail(XP_UNSUPPORTED,
                       "models[%s]: attention_tp = %u with attention_dp = %u; an SGLang Instance "
                       "has the one or the other above 1",
                       model->id, tp, dp);
    if (dp > 1 &&
        (spec->architecture == MODEL_ARCH_LLAMA || spec->architecture == MODEL_ARCH_QWEN2 ||
         spec->architecture == MODEL_ARCH_QWEN3))
        return xp_fail(XP_UNSUPPORTED,
                       "models[%s].attention_dp: attention data parallelism of SGLang is supported "
                       "for MoE models, not for %s; use attention_dp = 1",
                       model->id, spec->architecture_name);
    if (spec->heads % tp != 0)
        return xp_fail(XP_INVALID,
                       "models[%s].attention_tp: %u does not divide the model's %u attention heads",
                       model->id, tp, spec->heads);
    if (!spec->kv_lora_rank && spec->kv_heads % tp != 0 && tp % spec->kv_heads != 0)
        return xp_fail(XP_INVALID,
                       "models[%s].attention_tp: %u and the model's %u KV heads do not divide each "
                       "other",
                       model->id, tp, spec->kv_heads);
    return XP_OK;
}

typedef struct ledger {
    const model_spec_t *spec;
    uint32_t tp, head_ranks; /* that share a layer's heads, and lm_head */
    uint64_t elements;       /* of one rank */
} ledger_t;

static bool ends_with(const char *name, const char *end)
{
    size_t length = strlen(name), tail = strlen(end);
    return length >= tail && strcmp(name + length - tail, end) == 0;
}

static bool holds(const char *name, const char *part)
{
    return strstr(name, part) != NULL;
}

static xp_status_t ledger_add(void *context, const inventory_tensor_t *tensor)
{
    ledger_t *ledger = context;
    const model_spec_t *spec = ledger->spec;
    const char *name = tensor->name;
    if (holds(name, ".mlp."))
        return XP_OK; /* the FFN side's */
    uint64_t rows = tensor->shape[0], columns = tensor->dimensions == 2 ? tensor->shape[1] : 1;
    uint64_t tp = ledger->tp;
    if (holds(name, "embed_tokens") || holds(name, "lm_head")) {
        uint64_t ranks = holds(name, "lm_head") ? ledger->head_ranks : tp;
        rows = (rows + VOCABULARY_UNIT * ranks - 1) / (VOCABULARY_UNIT * ranks) * VOCABULARY_UNIT;
    } else if (holds(name, ".q_proj.") || holds(name, ".q_b_proj.")) {
        rows /= tp;
    } else if (holds(name, ".o_proj.weight")) {
        columns /= tp;
    } else if (holds(name, ".k_proj.") || holds(name, ".v_proj.")) {
        rows /= tp < spec->kv_heads ? tp : spec->kv_heads; /* past that, heads are repeated */
    } else if (ends_with(name, ".kv_b_proj.weight")) {
        rows = 2 * (rows / tp); /* kept as it is, and once more split for the absorbed form */
    }
    ledger->elements += rows * columns; /* latent projections and norms are whole on every rank */
    return XP_OK;
}

/* Attention DP ranks share lm_head unless SGLang is told that each has its own. */
static uint32_t head_ranks(const config_model_t *model)
{
    for (uint32_t i = 0; i < model->engine_arg_count; i++)
        if (strcmp(model->engine_args[i], "--enable-dp-lm-head") == 0)
            return model->attention_tp;
    return model->attention_tp * model->attention_dp;
}

/* What a rank computes in, named to SGLang: its own choice for float32 would be float16. */
static xp_dtype_t resolved_dtype(const config_model_t *model, const model_spec_t *spec)
{
    if (model->dtype != XP_DTYPE_AUTO)
        return model->dtype;
    switch (spec->checkpoint_dtype) {
    case XP_DTYPE_F32:
    case XP_DTYPE_F16:
    case XP_DTYPE_BF16:
        return spec->checkpoint_dtype;
    default:
        return XP_DTYPE_BF16;
    }
}

void planner_sglang_ledger(const config_model_t *model, plan_model_t *planned)
{
    const model_spec_t *spec = &planned->spec;
    ledger_t ledger = {.spec = spec, .tp = model->attention_tp, .head_ranks = head_ranks(model)};
    xp_status_t status = model_inventory_visit(spec, ledger_add, &ledger);
    XP_ASSERT(status == XP_OK); /* the visitor cannot fail */
    planned->dtype = resolved_dtype(model, spec);
    uint64_t element_bytes = xp_dtype_block_bytes(planned->dtype);
    planned->attention_bytes = ledger.elements * element_bytes;
    /* Latents are the same for all heads: every TP rank holds them all. */
    uint32_t kv_heads =
        spec->kv_heads > model->attention_tp ? spec->kv_heads / model->attention_tp : 1;
    uint64_t elements = spec->kv_lora_rank ? (uint64_t)spec->kv_lora_rank + spec->qk_rope_head_dim
                                           : 2ull * kv_heads * spec->head_dim;
    planned->kv_bytes_per_token = spec->layers * elements * element_bytes;
    planned->workspace_bytes = planned->kv_bytes_per_token; /* the pool's slot for padding rows */
}
