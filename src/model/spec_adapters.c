/* SPDX-License-Identifier: MIT */
/*
 * What is particular to each architecture in config.json: biases, norms, windows, and the FFN of
 * every layer. One function an architecture, listed in spec_families (spec.c). Keys, defaults and
 * layer rules are those of transformers 5.8.1, models/<model_type>/. Owns no state.
 */
#include <string.h>

#include "model/spec_private.h"

static xp_status_t adapt_activation(const config_reader_t *reader, model_activation_t *out)
{
    const char *name = NULL;
    XP_TRY(config_string(reader, "hidden_act", &name));
    if (!name || strcmp(name, "silu") == 0 || strcmp(name, "swish") == 0)
        *out = MODEL_ACT_SILU;
    else if (strcmp(name, "gelu_pytorch_tanh") == 0)
        *out = MODEL_ACT_GELU_TANH;
    else
        return xp_fail(XP_UNSUPPORTED,
                       "%s: \"hidden_act\" \"%.64s\" is not supported; known are silu, "
                       "gelu_pytorch_tanh",
                       reader->where, name);
    return XP_OK;
}

static xp_status_t adapt_refuse_true(const config_reader_t *reader, const char *key)
{
    bool value = false;
    XP_TRY(config_bool(reader, key, false, &value));
    if (value)
        return xp_fail(XP_UNSUPPORTED, "%s: \"%s\": true is not supported", reader->where, key);
    return XP_OK;
}

static xp_status_t adapt_attention_bias(const config_reader_t *reader, model_spec_t *spec)
{
    bool bias = false;
    XP_TRY(config_bool(reader, "attention_bias", false, &bias));
    spec->qkv_bias = spec->o_bias = bias;
    return XP_OK;
}

/* Fills every layer with the dense FFN of "intermediate_size". */
static xp_status_t adapt_dense(const config_reader_t *reader, model_spec_t *spec)
{
    model_ffn_t ffn = {.kind = MODEL_FFN_DENSE, .routed_scale = 1};
    XP_TRY(adapt_activation(reader, &ffn.activation));
    XP_TRY(config_u32(reader, "intermediate_size", NULL, 1, SPEC_MAX_INTERMEDIATE, CONFIG_REQUIRED,
                      &ffn.intermediate));
    for (uint32_t layer = 0; layer < spec->layers; layer++)
        spec->ffn[layer] = ffn;
    return XP_OK;
}

/* Counts layers that use the sliding window; `layer_types` (transformers 5) wins over
 * max_window_layers. */
static xp_status_t adapt_windowed_layers(const config_reader_t *reader, const model_spec_t *spec,
                                         uint32_t *count_out)
{
    json_t *types;
    uint32_t first, count = 0;
    XP_TRY(config_array(reader, "layer_types", &types));
    XP_TRY(config_u32(reader, "max_window_layers", NULL, 0, UINT32_MAX, 28, &first));
    if (!types) {
        *count_out = first < spec->layers ? spec->layers - first : 0;
        return XP_OK;
    }
    if (json_array_size(types) != spec->layers)
        return xp_fail(XP_INVALID, "%s: \"layer_types\" has %zu entries for %u layers",
                       reader->where, json_array_size(types), spec->layers);
    for (uint32_t layer = 0; layer < spec->layers; layer++) {
        const char *type = json_string_value(json_array_get(types, layer));
        bool sliding = type && strcmp(type, "sliding_attention") == 0;
        if (!sliding && (!type || strcmp(type, "full_attention") != 0))
            return xp_fail(XP_UNSUPPORTED,
                           "%s: \"layer_types\"[%u] is \"%.64s\"; known are full_attention, "
                           "sliding_attention",
                           reader->where, layer, type ? type : "?");
        count += sliding;
    }
    *count_out = count;
    return XP_OK;
}

/* The spec holds one window for the whole model, so a window that only some layers use is refused;
 * one that no position can reach is none. */
static xp_status_t adapt_sliding_window(const config_reader_t *reader, bool per_layer,
                                        model_spec_t *spec)
{
    bool used = false;
    uint32_t window, layers = spec->layers;
    XP_TRY(config_bool(reader, "use_sliding_window", false, &used));
    if (!used)
        return XP_OK;
    bool absent = json_is_null(json_object_get(reader->object, "sliding_window"));
    XP_TRY(config_u32(reader, "sliding_window", NULL, 0, SPEC_MAX_POSITIONS, absent ? 0 : 4096,
                      &window));
    if (per_layer)
        XP_TRY(adapt_windowed_layers(reader, spec, &layers));
    if (window == 0 || layers == 0 || window >= spec->max_positions)
        return XP_OK;
    if (layers != spec->layers)
        return xp_fail(XP_UNSUPPORTED,
                       "%s: \"sliding_window\" %u holds for %u of %u layers; only all or none is "
                       "supported",
                       reader->where, window, layers, spec->layers);
    spec->sliding_window = window;
    return XP_OK;
}

xp_status_t spec_adapt_llama(const config_reader_t *reader, model_spec_t *spec)
{
    XP_TRY(adapt_attention_bias(reader, spec));
    XP_TRY(adapt_refuse_true(reader, "mlp_bias"));
    return adapt_dense(reader, spec);
}

xp_status_t spec_adapt_qwen2(const config_reader_t *reader, model_spec_t *spec)
{
    spec->qkv_bias = true;
    XP_TRY(adapt_sliding_window(reader, true, spec));
    return adapt_dense(reader, spec);
}

xp_status_t spec_adapt_qwen3(const config_reader_t *reader, model_spec_t *spec)
{
    spec->qk_norm = true;
    XP_TRY(adapt_attention_bias(reader, spec));
    XP_TRY(adapt_sliding_window(reader, true, spec));
    return adapt_dense(reader, spec);
}

/* True when `layer` is listed; entries were checked to be integers. */
static bool adapt_listed(const json_t *list, uint32_t layer)
{
    for (size_t i = 0; i < json_array_size(list); i++) {
        if (json_integer_value(json_array_get(list, i)) == (json_int_t)layer)
            return true;
    }
    return false;
}

xp_status_t spec_adapt_qwen3_moe(const config_reader_t *reader, model_spec_t *spec)
{
    model_ffn_t moe = {.kind = MODEL_FFN_MOE,
                       .router = MODEL_ROUTER_SOFTMAX,
                       .routed_scale = 1,
                       .groups = 1,
                       .top_groups = 1};
    model_ffn_t dense = {.kind = MODEL_FFN_DENSE, .routed_scale = 1};
    uint32_t step = 0;
    json_t *dense_layers;
    spec->qk_norm = true;
    XP_TRY(adapt_attention_bias(reader, spec));
    XP_TRY(adapt_sliding_window(reader, false, spec));
    XP_TRY(adapt_activation(reader, &moe.activation));
    dense.activation = moe.activation;
    /* Configurations written by transformers 5 may call it num_local_experts. */
    XP_TRY(config_u32(reader, "num_experts", "num_local_experts", 0, MODEL_MAX_EXPERTS, 128,
                      &moe.experts));
    XP_TRY(config_u32(reader, "num_experts_per_tok", NULL, 1, MODEL_MAX_TOP_K, 8, &moe.top_k));
    XP_TRY(config_u32(reader, "moe_intermediate_size", NULL, 1, SPEC_MAX_INTERMEDIATE, 768,
                      &moe.intermediate));
    XP_TRY(config_u32(reader, "intermediate_size", NULL, 1, SPEC_MAX_INTERMEDIATE, 6144,
                      &dense.intermediate));
    XP_TRY(config_bool(reader, "norm_topk_prob", false, &moe.normalize_top_k));
    XP_TRY(config_u32(reader, "decoder_sparse_step", NULL, 1, MODEL_MAX_LAYERS, 1, &step));
    XP_TRY(config_array(reader, "mlp_only_layers", &dense_layers));
    for (size_t i = 0; i < json_array_size(dense_layers); i++) {
        if (!json_is_integer(json_array_get(dense_layers, i)))
            return xp_fail(XP_INVALID, "%s: \"mlp_only_layers\"[%zu] is no integer", reader->where,
                           i);
    }
    for (uint32_t layer = 0; layer < spec->layers; layer++) {
        bool sparse =
            moe.experts > 0 && (layer + 1) % step == 0 && !adapt_listed(dense_layers, layer);
        spec->ffn[layer] = sparse ? moe : dense;
    }
    return XP_OK;
}

/* Latent attention of DeepSeek-V2 and GLM. head_dim becomes the whole width of a query head. */
static xp_status_t adapt_latent_attention(const config_reader_t *reader, int64_t q_lora,
                                          model_spec_t *spec)
{
    bool absent = json_is_null(json_object_get(reader->object, "q_lora_rank"));
    bool glm = spec->architecture == MODEL_ARCH_GLM4_MOE_LITE;
    XP_TRY(config_u32(reader, "q_lora_rank", NULL, 0, MODEL_MAX_HIDDEN, absent ? 0 : q_lora,
                      &spec->q_lora_rank));
    XP_TRY(config_u32(reader, "kv_lora_rank", NULL, 1, MODEL_MAX_HIDDEN, 512, &spec->kv_lora_rank));
    XP_TRY(config_u32(reader, "qk_nope_head_dim", NULL, 1, SPEC_MAX_HEAD_DIM, glm ? 192 : 128,
                      &spec->qk_nope_head_dim));
    XP_TRY(config_u32(reader, "qk_rope_head_dim", NULL, 1, SPEC_MAX_HEAD_DIM, 64,
                      &spec->qk_rope_head_dim));
    XP_TRY(config_u32(reader, "v_head_dim", NULL, 1, SPEC_MAX_HEAD_DIM, glm ? 256 : 128,
                      &spec->v_head_dim));
    spec->head_dim = spec->qk_nope_head_dim + spec->qk_rope_head_dim;
    /* Bias on the latent projections exists in the configuration class but in no checkpoint. */
    return adapt_refuse_true(reader, "attention_bias");
}

/* Keys DeepSeek-V2 and GLM share: sizes of routed and shared experts. Fills dense and MoE shapes.
 */
static xp_status_t adapt_shared_expert_moe(const config_reader_t *reader, bool glm,
                                           model_ffn_t *dense, model_ffn_t *moe)
{
    uint32_t shared = 0;
    XP_TRY(adapt_activation(reader, &moe->activation));
    dense->activation = moe->activation;
    XP_TRY(config_u32(reader, "intermediate_size", NULL, 1, SPEC_MAX_INTERMEDIATE, CONFIG_REQUIRED,
                      &dense->intermediate));
    XP_TRY(config_u32(reader, "moe_intermediate_size", NULL, 1, SPEC_MAX_INTERMEDIATE,
                      CONFIG_REQUIRED, &moe->intermediate));
    XP_TRY(config_u32(reader, "n_routed_experts", "num_local_experts", 1, MODEL_MAX_EXPERTS, 64,
                      &moe->experts));
    XP_TRY(config_u32(reader, "num_experts_per_tok", NULL, 1, MODEL_MAX_TOP_K,
                      glm ? 4 : CONFIG_REQUIRED, &moe->top_k));
    bool none = json_is_null(json_object_get(reader->object, "n_shared_experts"));
    XP_TRY(config_u32(reader, "n_shared_experts", NULL, 0, MODEL_MAX_EXPERTS,
                      none ? 0 : (glm ? 1 : 2), &shared));
    if ((uint64_t)shared * moe->intermediate > SPEC_MAX_INTERMEDIATE)
        return xp_fail(XP_INVALID, "%s: %u shared experts of %u are wider than %u", reader->where,
                       shared, moe->intermediate, SPEC_MAX_INTERMEDIATE);
    moe->shared_intermediate = shared * moe->intermediate;
    XP_TRY(config_bool(reader, "norm_topk_prob", glm, &moe->normalize_top_k));
    return config_double(reader, "routed_scaling_factor", 1e-6, 1e6, glm ? 1.8 : 1.0,
                         &moe->routed_scale);
}

static xp_status_t adapt_expect(const config_reader_t *reader, const char *key, const char *wanted)
{
    const char *found;
    XP_TRY(config_string(reader, key, &found));
    if (found && strcmp(found, wanted) != 0)
        return xp_fail(XP_UNSUPPORTED, "%s: \"%s\" \"%.64s\" is not supported, only \"%s\"",
                       reader->where, key, found, wanted);
    return XP_OK;
}

xp_status_t spec_adapt_deepseek_v2(const config_reader_t *reader, model_spec_t *spec)
{
    model_ffn_t dense = {.kind = MODEL_FFN_DENSE, .routed_scale = 1};
    model_ffn_t moe = {
        .kind = MODEL_FFN_MOE, .router = MODEL_ROUTER_SOFTMAX, .groups = 1, .top_groups = 1};
    uint32_t first_dense, frequency;
    const char *method;
    XP_TRY(adapt_latent_attention(reader, 1536, spec));
    XP_TRY(adapt_refuse_true(reader, "mlp_bias"));
    XP_TRY(adapt_shared_expert_moe(reader, false, &dense, &moe));
    XP_TRY(adapt_expect(reader, "scoring_func", "softmax"));
    XP_TRY(config_string(reader, "topk_method", &method));
    if (method && strcmp(method, "group_limited_greedy") == 0) {
        XP_TRY(
            config_u32(reader, "n_group", NULL, 1, SPEC_MAX_GROUPS, CONFIG_REQUIRED, &moe.groups));
        XP_TRY(config_u32(reader, "topk_group", NULL, 1, SPEC_MAX_GROUPS, CONFIG_REQUIRED,
                          &moe.top_groups));
    } else {
        XP_TRY(adapt_expect(reader, "topk_method", "greedy"));
    }
    XP_TRY(config_u32(reader, "first_k_dense_replace", NULL, 0, UINT32_MAX, 0, &first_dense));
    XP_TRY(config_u32(reader, "moe_layer_freq", NULL, 1, MODEL_MAX_LAYERS, 1, &frequency));
    spec->rope.interleaved = true;
    for (uint32_t layer = 0; layer < spec->layers; layer++)
        spec->ffn[layer] = layer >= first_dense && layer % frequency == 0 ? moe : dense;
    return XP_OK;
}

xp_status_t spec_adapt_glm4_moe_lite(const config_reader_t *reader, model_spec_t *spec)
{
    model_ffn_t dense = {.kind = MODEL_FFN_DENSE, .routed_scale = 1};
    model_ffn_t moe = {
        .kind = MODEL_FFN_MOE, .router = MODEL_ROUTER_SIGMOID, .correction_bias = true};
    uint32_t first_dense = 0;
    json_t *types;
    XP_TRY(adapt_latent_attention(reader, 768, spec));
    XP_TRY(adapt_shared_expert_moe(reader, true, &dense, &moe));
    XP_TRY(adapt_expect(reader, "scoring_func", "sigmoid"));
    XP_TRY(adapt_expect(reader, "topk_method", "noaux_tc"));
    XP_TRY(config_u32(reader, "n_group", NULL, 1, SPEC_MAX_GROUPS, 1, &moe.groups));
    XP_TRY(config_u32(reader, "topk_group", NULL, 1, SPEC_MAX_GROUPS, 1, &moe.top_groups));
    XP_TRY(config_bool(reader, "rope_interleave", true, &spec->rope.interleaved));
    /* Published files give first_k_dense_replace; transformers 5 writes one word a layer instead.
     */
    XP_TRY(config_u32(reader, "first_k_dense_replace", NULL, 0, UINT32_MAX, 1, &first_dense));
    XP_TRY(config_array(reader, "mlp_layer_types", &types));
    if (types && json_array_size(types) < spec->layers)
        return xp_fail(XP_INVALID, "%s: \"mlp_layer_types\" has %zu entries for %u layers",
                       reader->where, json_array_size(types), spec->layers);
    for (uint32_t layer = 0; layer < spec->layers; layer++) {
        const char *type = types ? json_string_value(json_array_get(types, layer)) : NULL;
        if (types && (!type || (strcmp(type, "dense") != 0 && strcmp(type, "sparse") != 0)))
            return xp_fail(XP_INVALID,
                           "%s: \"mlp_layer_types\"[%u] is neither \"dense\" nor \"sparse\"",
                           reader->where, layer);
        bool sparse = type ? strcmp(type, "sparse") == 0 : layer >= first_dense;
        spec->ffn[layer] = sparse ? moe : dense;
    }
    return XP_OK;
}
