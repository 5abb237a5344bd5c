/* SPDX-License-Identifier: MIT */
/*
 * Model spec: the table of architectures, reading config.json and generation_config.json, and the
 * checks that hold for every source. Owns no state, runs in any thread, never touches a weight. The
 * architecture, never the model's name, selects the adapter.
 */
#include "model/spec.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/buf.h"
#include "model/source.h"
#include "model/spec_private.h"

/* Larger configuration files are no configuration files. */
#define SPEC_MAX_CONFIG_BYTES (4u << 20)

const spec_family_t spec_families[MODEL_ARCH_COUNT] = {
    [MODEL_ARCH_LLAMA] = {MODEL_ARCH_LLAMA, "LlamaForCausalLM", "llama", "llama", true, false, 0, 0,
                          2048, 1e-6, 1, 2, spec_adapt_llama},
    [MODEL_ARCH_QWEN2] = {MODEL_ARCH_QWEN2, "Qwen2ForCausalLM", "qwen2", "qwen2", true, false, 32,
                          0, 32768, 1e-6, -1, -1, spec_adapt_qwen2},
    [MODEL_ARCH_QWEN3] = {MODEL_ARCH_QWEN3, "Qwen3ForCausalLM", "qwen3", "qwen3", true, false, 32,
                          128, 32768, 1e-6, -1, -1, spec_adapt_qwen3},
    [MODEL_ARCH_QWEN3_MOE] = {MODEL_ARCH_QWEN3_MOE, "Qwen3MoeForCausalLM", "qwen3_moe", "qwen3moe",
                              true, false, 4, 0, 32768, 1e-6, -1, -1, spec_adapt_qwen3_moe},
    [MODEL_ARCH_DEEPSEEK_V2] = {MODEL_ARCH_DEEPSEEK_V2, "DeepseekV2ForCausalLM", "deepseek_v2",
                                NULL, false, true, 0, 0, 2048, 1e-6, 1, 2, spec_adapt_deepseek_v2},
    [MODEL_ARCH_GLM4_MOE_LITE] = {MODEL_ARCH_GLM4_MOE_LITE, "Glm4MoeLiteForCausalLM",
                                  "glm4_moe_lite", NULL, false, true, 20, 0, 202752, 1e-5, 0, 1,
                                  spec_adapt_glm4_moe_lite},
};

const char *model_architecture_name(model_architecture_t architecture)
{
    return (unsigned)architecture < MODEL_ARCH_COUNT ? spec_families[architecture].class_name : "?";
}

bool model_architecture_has_native_engine(model_architecture_t architecture)
{
    return (unsigned)architecture < MODEL_ARCH_COUNT && spec_families[architecture].native_engine;
}

uint64_t model_kv_bytes_per_token(const model_spec_t *spec, xp_dtype_t kv_dtype)
{
    uint64_t elements = spec->kv_lora_rank ? (uint64_t)spec->kv_lora_rank + spec->qk_rope_head_dim
                                           : 2ull * spec->kv_heads * spec->head_dim;
    return spec->layers * elements * xp_dtype_block_bytes(kv_dtype);
}

void spec_family_list(bool gguf, char *out, size_t capacity)
{
    size_t length = 0;
    out[0] = '\0';
    for (unsigned i = 0; i < MODEL_ARCH_COUNT; i++) {
        const char *name = gguf ? spec_families[i].gguf_name : spec_families[i].class_name;
        if (!name || length >= capacity)
            continue;
        int written = snprintf(out + length, capacity - length, "%s%s", length ? ", " : "", name);
        length += written > 0 ? (size_t)written : 0;
    }
}

static xp_status_t spec_check_moe(const model_ffn_t *ffn, uint32_t layer, const char *where)
{
    if (ffn->top_k > ffn->experts)
        return xp_fail(XP_INVALID, "%s: layer %u chooses %u of %u experts", where, layer,
                       ffn->top_k, ffn->experts);
    if (ffn->groups == 0 || ffn->experts % ffn->groups)
        return xp_fail(XP_INVALID, "%s: layer %u: %u experts do not divide into %u groups", where,
                       layer, ffn->experts, ffn->groups);
    if (ffn->top_groups == 0 || ffn->top_groups > ffn->groups)
        return xp_fail(XP_INVALID, "%s: layer %u chooses %u of %u expert groups", where, layer,
                       ffn->top_groups, ffn->groups);
    if (ffn->top_k > ffn->experts / ffn->groups * ffn->top_groups)
        return xp_fail(XP_INVALID, "%s: layer %u chooses %u experts from %u groups of %u", where,
                       layer, ffn->top_k, ffn->top_groups, ffn->experts / ffn->groups);
    return XP_OK;
}

xp_status_t spec_check(const model_spec_t *spec, const char *where)
{
    if (spec->heads % spec->kv_heads)
        return xp_fail(XP_INVALID, "%s: %u attention heads do not divide by %u key/value heads",
                       where, spec->heads, spec->kv_heads);
    uint32_t rotary = spec->kv_lora_rank ? spec->qk_rope_head_dim : spec->head_dim;
    if (rotary % 2)
        return xp_fail(XP_INVALID, "%s: the rotary head width %u is odd", where, rotary);
    if ((uint64_t)spec->heads * spec->head_dim > SPEC_MAX_INTERMEDIATE)
        return xp_fail(XP_INVALID, "%s: %u heads of %u are more than %u in all", where, spec->heads,
                       spec->head_dim, SPEC_MAX_INTERMEDIATE);
    for (uint32_t layer = 0; layer < spec->layers; layer++) {
        if (spec->ffn[layer].kind == MODEL_FFN_MOE)
            XP_TRY(spec_check_moe(&spec->ffn[layer], layer, where));
    }
    return XP_OK;
}

/* ---- config.json ------------------------------------------------------------------------------
 */

static xp_status_t spec_find_family(const config_reader_t *reader, const spec_family_t **family_out)
{
    char known[512];
    json_t *names;
    const char *model_type;
    XP_TRY(config_array(reader, "architectures", &names));
    XP_TRY(config_string(reader, "model_type", &model_type));
    const char *first = NULL;
    for (size_t i = 0; i < json_array_size(names); i++) {
        const char *name = json_string_value(json_array_get(names, i));
        if (!name)
            return xp_fail(XP_INVALID, "%s: \"architectures\"[%zu] is no string", reader->where, i);
        first = first ? first : name;
        for (unsigned k = 0; k < MODEL_ARCH_COUNT; k++) {
            if (strcmp(name, spec_families[k].class_name) == 0) {
                *family_out = &spec_families[k];
                return XP_OK;
            }
        }
    }
    /* A configuration saved without a model class names its type only. */
    for (unsigned k = 0; !first && model_type && k < MODEL_ARCH_COUNT; k++) {
        if (strcmp(model_type, spec_families[k].model_type) == 0) {
            *family_out = &spec_families[k];
            return XP_OK;
        }
    }
    if (!first && !model_type)
        return xp_fail(XP_INVALID, "%s: \"architectures\" is missing", reader->where);
    spec_family_list(false, known, sizeof(known));
    return xp_fail(XP_UNSUPPORTED, "%s: the architecture \"%.128s\" is not supported; known are %s",
                   reader->where, first ? first : model_type, known);
}

static xp_status_t spec_read_dtype(const config_reader_t *reader, xp_dtype_t *dtype_out)
{
    static const struct {
        const char *name;
        xp_dtype_t dtype;
    } names[] = {{"float32", XP_DTYPE_F32}, {"float16", XP_DTYPE_F16}, {"bfloat16", XP_DTYPE_BF16}};
    const char *text = NULL;
    XP_TRY(config_string(reader, "dtype", &text));
    if (!text)
        XP_TRY(config_string(reader, "torch_dtype", &text));
    *dtype_out = XP_DTYPE_AUTO;
    if (text && strncmp(text, "torch.", 6) == 0)
        text += 6;
    for (size_t i = 0; text && i < sizeof(names) / sizeof(names[0]); i++) {
        if (strcmp(text, names[i].name) == 0)
            *dtype_out = names[i].dtype;
    }
    return XP_OK;
}

static xp_status_t spec_token_value(const config_reader_t *reader, const char *key,
                                    const json_t *value, int32_t *token_out)
{
    if (!json_is_integer(value))
        return xp_fail(XP_INVALID, "%s: \"%s\" holds something that is no integer", reader->where,
                       key);
    json_int_t number = json_integer_value(value);
    if (number < -1 || number > INT32_MAX)
        return xp_fail(XP_INVALID, "%s: \"%s\" is %" JSON_INTEGER_FORMAT ", which is no token id",
                       reader->where, key, number);
    *token_out = (int32_t)number;
    return XP_OK;
}

static xp_status_t spec_read_token(const config_reader_t *reader, const char *key, int32_t *token)
{
    const json_t *value = config_member(reader, key);
    if (!value)
        return XP_OK;
    /* Some files list several begin tokens; the first is the one that is put in front. */
    if (json_is_array(value) && json_array_size(value) > 0)
        value = json_array_get(value, 0);
    return spec_token_value(reader, key, value, token);
}

/* Replaces the end tokens when the key is present. */
static xp_status_t spec_read_eos(const config_reader_t *reader, model_spec_t *spec)
{
    const char *key = "eos_token_id";
    const json_t *value = config_member(reader, key);
    if (!value)
        return XP_OK;
    size_t count = json_is_array(value) ? json_array_size(value) : 1;
    if (count > MODEL_MAX_EOS)
        return xp_fail(XP_UNSUPPORTED, "%s: \"%s\" lists %zu tokens, at most %d are supported",
                       reader->where, key, count, MODEL_MAX_EOS);
    uint32_t kept = 0;
    int32_t tokens[MODEL_MAX_EOS];
    for (size_t i = 0; i < count; i++) {
        int32_t token = -1;
        XP_TRY(spec_token_value(reader, key,
                                json_is_array(value) ? json_array_get(value, i) : value, &token));
        if (token >= 0)
            tokens[kept++] = token;
    }
    memcpy(spec->eos_tokens, tokens, kept * sizeof(tokens[0]));
    spec->eos_count = kept;
    return XP_OK;
}

static xp_status_t spec_read_tokens(const config_reader_t *reader, model_spec_t *spec)
{
    XP_TRY(spec_read_token(reader, "bos_token_id", &spec->bos_token));
    XP_TRY(spec_read_token(reader, "pad_token_id", &spec->pad_token));
    return spec_read_eos(reader, spec);
}

static xp_status_t spec_read_attention(const config_reader_t *reader, const spec_family_t *family,
                                       model_spec_t *spec)
{
    XP_TRY(config_u32(reader, "num_attention_heads", NULL, 1, SPEC_MAX_HEADS, CONFIG_REQUIRED,
                      &spec->heads));
    uint32_t kv_heads = family->default_kv_heads ? family->default_kv_heads : spec->heads;
    /* An explicit null means "as many as heads" in every family. */
    if (json_is_null(json_object_get(reader->object, "num_key_value_heads")))
        kv_heads = spec->heads;
    XP_TRY(config_u32(reader, "num_key_value_heads", NULL, 1, SPEC_MAX_HEADS, kv_heads,
                      &spec->kv_heads));
    if (family->latent)
        return XP_OK;
    uint32_t head_dim = family->default_head_dim;
    XP_TRY(config_u32(reader, "head_dim", NULL, 1, SPEC_MAX_HEAD_DIM, head_dim, &head_dim));
    if (!head_dim) {
        if (spec->hidden % spec->heads)
            return xp_fail(XP_INVALID,
                           "%s: \"head_dim\" is missing and \"hidden_size\" %u does not divide by "
                           "\"num_attention_heads\" %u",
                           reader->where, spec->hidden, spec->heads);
        head_dim = spec->hidden / spec->heads;
        if (head_dim > SPEC_MAX_HEAD_DIM)
            return xp_fail(XP_INVALID,
                           "%s: the head width %u (hidden_size / num_attention_heads) "
                           "is more than %u",
                           reader->where, head_dim, SPEC_MAX_HEAD_DIM);
    }
    spec->head_dim = head_dim;
    return XP_OK;
}

static xp_status_t spec_refuse_quantized(const config_reader_t *reader)
{
    json_t *quantization;
    XP_TRY(config_object(reader, "quantization_config", &quantization));
    if (!quantization)
        return XP_OK;
    const char *method = json_string_value(json_object_get(quantization, "quant_method"));
    return xp_fail(XP_UNSUPPORTED,
                   "%s: \"quantization_config\" (quant_method \"%.64s\") is not supported; use the "
                   "plain checkpoint or a GGUF file",
                   reader->where, method ? method : "?");
}

static xp_status_t spec_fill(const config_reader_t *reader, model_spec_t *spec)
{
    const spec_family_t *family;
    XP_TRY(spec_find_family(reader, &family));
    spec->architecture = family->architecture;
    snprintf(spec->architecture_name, sizeof(spec->architecture_name), "%s", family->class_name);
    XP_TRY(spec_refuse_quantized(reader));
    XP_TRY(config_u32(reader, "hidden_size", NULL, 1, MODEL_MAX_HIDDEN, CONFIG_REQUIRED,
                      &spec->hidden));
    XP_TRY(config_u32(reader, "num_hidden_layers", NULL, 1, MODEL_MAX_LAYERS, CONFIG_REQUIRED,
                      &spec->layers));
    XP_TRY(
        config_u32(reader, "vocab_size", NULL, 1, SPEC_MAX_VOCAB, CONFIG_REQUIRED, &spec->vocab));
    XP_TRY(
        config_double(reader, "rms_norm_eps", 0, 1, family->default_epsilon, &spec->norm_epsilon));
    XP_TRY(config_bool(reader, "tie_word_embeddings", false, &spec->tied_embeddings));
    XP_TRY(config_u32(reader, "max_position_embeddings", NULL, 1, SPEC_MAX_POSITIONS,
                      family->default_positions, &spec->max_positions));
    XP_TRY(spec_read_attention(reader, family, spec));
    XP_TRY(spec_read_rope(reader, spec));
    XP_TRY(spec_read_dtype(reader, &spec->checkpoint_dtype));
    spec->bos_token = family->default_bos;
    spec->pad_token = -1;
    if (family->default_eos >= 0) {
        spec->eos_tokens[0] = family->default_eos;
        spec->eos_count = 1;
    }
    XP_TRY(spec_read_tokens(reader, spec));
    XP_TRY(family->adapt(reader, spec));
    return spec_check(spec, reader->where);
}

xp_status_t model_spec_parse(const char *json, size_t length, const char *where,
                             model_spec_t *spec_out)
{
    json_t *root = NULL;
    model_spec_t *spec = NULL;
    xp_status_t status;
    XP_TRY(config_parse(json, length, where, &root));
    spec = calloc(1, sizeof(*spec));
    if (!spec) {
        status = xp_fail(XP_NO_MEMORY, "no memory for a model spec");
        goto done;
    }
    config_reader_t reader = {.object = root, .where = where, .prefix = ""};
    status = spec_fill(&reader, spec);
    if (status == XP_OK)
        *spec_out = *spec;
done:
    free(spec);
    json_decref(root);
    return status;
}

/* generation_config.json wins over config.json: it is what the publisher corrects later. */
static xp_status_t spec_apply_generation(const char *folder, model_spec_t *spec)
{
    char path[MODEL_PATH_MAX];
    char *text = NULL;
    size_t length = 0;
    json_t *root = NULL;
    XP_TRY(model_source_join(folder, "generation_config.json", path));
    xp_status_t status = xp_file_read(path, SPEC_MAX_CONFIG_BYTES, &text, &length);
    if (status == XP_NOT_FOUND) {
        xp_error_clear();
        return XP_OK;
    }
    if (status != XP_OK)
        return status;
    XP_TRY_GOTO(status, done, config_parse(text, length, path, &root));
    config_reader_t reader = {.object = root, .where = path, .prefix = ""};
    status = spec_read_tokens(&reader, spec);
done:
    json_decref(root);
    free(text);
    return status;
}

static xp_status_t spec_load_folder(const char *folder, model_spec_t *spec)
{
    char path[MODEL_PATH_MAX];
    char *text = NULL;
    size_t length = 0;
    XP_TRY(model_source_join(folder, "config.json", path));
    XP_TRY(xp_file_read(path, SPEC_MAX_CONFIG_BYTES, &text, &length));
    xp_status_t status = model_spec_parse(text, length, path, spec);
    free(text);
    if (status == XP_OK)
        status = spec_apply_generation(folder, spec);
    return status;
}

xp_status_t model_spec_load(const char *path, model_spec_t *spec_out)
{
    model_source_t *source = calloc(1, sizeof(*source));
    model_spec_t *spec = calloc(1, sizeof(*spec));
    gguf_file_t *file = NULL;
    xp_status_t status;
    if (!source || !spec) {
        status = xp_fail(XP_NO_MEMORY, "no memory for a model spec");
        goto done;
    }
    XP_TRY_GOTO(status, done, model_source_resolve(path, source));
    if (source->is_gguf) {
        XP_TRY_GOTO(status, done, gguf_open(source->path, &file));
        XP_TRY_GOTO(status, done, spec_from_gguf(file, spec));
    } else {
        XP_TRY_GOTO(status, done, spec_load_folder(source->path, spec));
    }
    *spec_out = *spec;
done:
    gguf_close(file);
    free(spec);
    free(source);
    return status;
}
