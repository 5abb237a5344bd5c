/* SPDX-License-Identifier: MIT */
/*
 * Synthetic checkpoints: from options to config.json, from that to the spec (by the same parser
 * that reads real ones), and from the spec to files. Owns nothing past a call. It never touches
 * files that it did not name itself.
 */
#include "model/synth.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "model/source.h"
#include "model/synth_private.h"

#define SYNTH_MAX_SHARDS 999u

static const char *const synth_names[MODEL_ARCH_COUNT] = {
    [MODEL_ARCH_LLAMA] = "llama",
    [MODEL_ARCH_QWEN2] = "qwen2",
    [MODEL_ARCH_QWEN3] = "qwen3",
    [MODEL_ARCH_QWEN3_MOE] = "qwen3-moe",
    [MODEL_ARCH_DEEPSEEK_V2] = "deepseek-v2",
    [MODEL_ARCH_GLM4_MOE_LITE] = "glm4-moe-lite",
};

model_architecture_t model_synth_architecture(const char *name)
{
    for (unsigned i = 0; i < MODEL_ARCH_COUNT; i++) {
        if (strcmp(name, synth_names[i]) == 0)
            return (model_architecture_t)i;
    }
    return MODEL_ARCH_COUNT;
}

const char *model_synth_architecture_name(model_architecture_t architecture)
{
    return (unsigned)architecture < MODEL_ARCH_COUNT ? synth_names[architecture] : "?";
}

static bool synth_is_latent(model_architecture_t architecture)
{
    return architecture == MODEL_ARCH_DEEPSEEK_V2 || architecture == MODEL_ARCH_GLM4_MOE_LITE;
}

void model_synth_defaults(model_architecture_t architecture, synth_options_t *options_out)
{
    bool latent = synth_is_latent(architecture);
    *options_out = (synth_options_t){
        .architecture = architecture,
        .layers = 4,
        .hidden = 128,
        .vocab = 512,
        .context = 2048,
        .heads = 4,
        .kv_heads = latent ? 4 : 2,
        .head_dim = 32,
        .intermediate = 256,
        .moe_intermediate = 64,
        .experts = 8,
        .top_k = 2,
        .dense_layers = latent ? 1 : 0,
        .groups = latent ? 4 : 1,
        .top_groups = latent ? 2 : 1,
        .shared_experts = !latent                                  ? 0
                          : architecture == MODEL_ARCH_DEEPSEEK_V2 ? 2
                                                                   : 1,
        .routed_scale = !latent                                  ? 1.0
                        : architecture == MODEL_ARCH_DEEPSEEK_V2 ? 2.5
                                                                 : 1.8,
        .normalize_top_k = architecture != MODEL_ARCH_DEEPSEEK_V2,
        .dtype = XP_DTYPE_F32,
        .shards = 1,
    };
}

/* ---- config.json ------------------------------------------------------------------------------
 */

static const char *synth_bool(bool value)
{
    return value ? "true" : "false";
}

/* The keys of YaRN in the published files: DeepSeek's name the mscale pair, the others leave it
 * out. */
static xp_status_t synth_config_yarn(const synth_options_t *options, xp_buf_t *text)
{
    uint32_t original = options->context / 4 ? options->context / 4 : 1;
    if (options->architecture == MODEL_ARCH_DEEPSEEK_V2)
        return xp_buf_printf(text,
                             "{\"type\": \"yarn\", \"factor\": 4.0, \"beta_fast\": 32, "
                             "\"beta_slow\": 1, \"mscale\": 0.707, \"mscale_all_dim\": 0.707, "
                             "\"original_max_position_embeddings\": %u},\n",
                             original);
    return xp_buf_printf(text,
                         "{\"rope_type\": \"yarn\", \"factor\": 4.0, "
                         "\"original_max_position_embeddings\": %u},\n",
                         original);
}

static xp_status_t synth_config_rope(const synth_options_t *options, xp_buf_t *text)
{
    XP_TRY(xp_buf_append_text(text, "  \"rope_theta\": 10000.0,\n  \"rope_scaling\": "));
    switch (options->rope) {
    case MODEL_ROPE_LINEAR:
        return xp_buf_append_text(text, "{\"rope_type\": \"linear\", \"factor\": 4.0},\n");
    case MODEL_ROPE_LLAMA3:
        return xp_buf_append_text(text, "{\"rope_type\": \"llama3\", \"factor\": 8.0, "
                                        "\"low_freq_factor\": 1.0, \"high_freq_factor\": 4.0, "
                                        "\"original_max_position_embeddings\": 8192},\n");
    case MODEL_ROPE_YARN:
        return synth_config_yarn(options, text);
    default:
        return xp_buf_append_text(text, "null,\n");
    }
}

static xp_status_t synth_config_dense_list(const synth_options_t *options, xp_buf_t *text)
{
    XP_TRY(xp_buf_append_text(text, "  \"mlp_only_layers\": ["));
    for (uint32_t i = 0; i < options->dense_layers; i++)
        XP_TRY(xp_buf_printf(text, "%s%u", i ? ", " : "", i));
    return xp_buf_append_text(text, "],\n");
}

static xp_status_t synth_config_latent(const synth_options_t *options, xp_buf_t *text)
{
    bool glm = options->architecture == MODEL_ARCH_GLM4_MOE_LITE;
    if (glm)
        XP_TRY(xp_buf_printf(text, "  \"q_lora_rank\": %u,\n",
                             options->hidden / 2 ? options->hidden / 2 : 1));
    else
        XP_TRY(xp_buf_append_text(text, "  \"q_lora_rank\": null,\n"));
    XP_TRY(xp_buf_printf(text,
                         "  \"kv_lora_rank\": %u,\n  \"qk_nope_head_dim\": %u,\n"
                         "  \"qk_rope_head_dim\": %u,\n  \"v_head_dim\": %u,\n",
                         options->hidden / 4 ? options->hidden / 4 : 1, options->head_dim,
                         options->head_dim >= 4 ? options->head_dim / 4 * 2 : 2,
                         options->head_dim));
    const char *method = glm ? "noaux_tc" : options->groups > 1 ? "group_limited_greedy" : "greedy";
    XP_TRY(xp_buf_printf(text,
                         "  \"n_routed_experts\": %u,\n  \"n_shared_experts\": %u,\n"
                         "  \"num_experts_per_tok\": %u,\n  \"moe_intermediate_size\": %u,\n"
                         "  \"first_k_dense_replace\": %u,\n  \"n_group\": %u,\n"
                         "  \"topk_group\": %u,\n  \"topk_method\": \"%s\",\n"
                         "  \"norm_topk_prob\": %s,\n  \"routed_scaling_factor\": %.6f,\n",
                         options->experts, options->shared_experts, options->top_k,
                         options->moe_intermediate, options->dense_layers, options->groups,
                         options->top_groups, method, synth_bool(options->normalize_top_k),
                         options->routed_scale));
    if (!glm)
        return xp_buf_append_text(text,
                                  "  \"scoring_func\": \"softmax\",\n  \"moe_layer_freq\": 1,\n");
    /* transformers 5 reads the dense layers from this list and not from first_k_dense_replace. */
    XP_TRY(xp_buf_append_text(text, "  \"num_nextn_predict_layers\": 0,\n"
                                    "  \"partial_rotary_factor\": 1.0,\n  \"mlp_layer_types\": ["));
    for (uint32_t i = 0; i < options->layers; i++)
        XP_TRY(xp_buf_printf(text, "%s\"%s\"", i ? ", " : "",
                             i < options->dense_layers ? "dense" : "sparse"));
    return xp_buf_append_text(text, "],\n");
}

static xp_status_t synth_config_family(const synth_options_t *options, xp_buf_t *text)
{
    switch (options->architecture) {
    case MODEL_ARCH_LLAMA:
        return xp_buf_printf(text,
                             "  \"head_dim\": %u,\n  \"attention_bias\": false,\n"
                             "  \"mlp_bias\": false,\n",
                             options->head_dim);
    case MODEL_ARCH_QWEN2:
        XP_TRY(xp_buf_printf(text, "  \"head_dim\": %u,\n", options->head_dim));
        return xp_buf_printf(text,
                             "  \"use_sliding_window\": false,\n"
                             "  \"sliding_window\": null,\n  \"max_window_layers\": %u,\n",
                             options->layers);
    case MODEL_ARCH_QWEN3_MOE:
        XP_TRY(xp_buf_printf(text,
                             "  \"num_experts\": %u,\n  \"num_experts_per_tok\": %u,\n"
                             "  \"moe_intermediate_size\": %u,\n  \"norm_topk_prob\": %s,\n"
                             "  \"decoder_sparse_step\": 1,\n",
                             options->experts, options->top_k, options->moe_intermediate,
                             synth_bool(options->normalize_top_k)));
        XP_TRY(synth_config_dense_list(options, text));
        /* fall through */
    case MODEL_ARCH_QWEN3:
        return xp_buf_printf(text,
                             "  \"head_dim\": %u,\n  \"attention_bias\": false,\n"
                             "  \"use_sliding_window\": false,\n  \"sliding_window\": null,\n"
                             "  \"max_window_layers\": %u,\n",
                             options->head_dim, options->layers);
    default:
        XP_TRY(xp_buf_append_text(text, "  \"attention_bias\": false,\n"));
        return synth_config_latent(options, text);
    }
}

xp_status_t synth_config_json(const synth_options_t *options, xp_buf_t *text)
{
    static const char *const model_types[MODEL_ARCH_COUNT] = {
        "llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v2", "glm4_moe_lite"};
    static const char *const dtypes[] = {
        [XP_DTYPE_F32] = "float32", [XP_DTYPE_F16] = "float16", [XP_DTYPE_BF16] = "bfloat16"};
    XP_TRY(xp_buf_printf(text,
                         "{\n  \"architectures\": [\"%s\"],\n  \"model_type\": \"%s\",\n"
                         "  \"vocab_size\": %u,\n  \"hidden_size\": %u,\n"
                         "  \"intermediate_size\": %u,\n  \"num_hidden_layers\": %u,\n"
                         "  \"num_attention_heads\": %u,\n  \"num_key_value_heads\": %u,\n"
                         "  \"hidden_act\": \"silu\",\n  \"max_position_embeddings\": %u,\n",
                         model_architecture_name(options->architecture),
                         model_types[options->architecture], options->vocab, options->hidden,
                         options->intermediate, options->layers, options->heads, options->kv_heads,
                         options->context));
    XP_TRY(synth_config_family(options, text));
    XP_TRY(synth_config_rope(options, text));
    return xp_buf_printf(text,
                         "  \"rms_norm_eps\": 1e-06,\n  \"attention_dropout\": 0.0,\n"
                         "  \"initializer_range\": 0.02,\n  \"use_cache\": true,\n"
                         "  \"tie_word_embeddings\": %s,\n  \"bos_token_id\": 0,\n"
                         "  \"eos_token_id\": [2, 0],\n  \"pad_token_id\": 0,\n"
                         "  \"torch_dtype\": \"%s\"\n}\n",
                         synth_bool(options->tied), dtypes[options->dtype]);
}

/* ---- The folder -------------------------------------------------------------------------------
 */

static xp_status_t synth_make_folder(const char *folder)
{
    char path[MODEL_PATH_MAX];
    size_t length = strlen(folder);
    if (length == 0 || length >= sizeof(path))
        return xp_fail(XP_INVALID, "the output folder's path is empty or too long");
    memcpy(path, folder, length + 1);
    for (size_t i = 1; i <= length; i++) {
        if (path[i] != '/' && path[i] != '\0')
            continue;
        char kept = path[i];
        path[i] = '\0';
        if (mkdir(path, 0777) != 0 && errno != EEXIST)
            return xp_fail_errno(XP_IO, "cannot make the folder %s", path);
        path[i] = kept;
    }
    return XP_OK;
}

/* Shards of an earlier run, whatever their number was. */
static bool synth_old_shard(const char *folder, uint32_t shard, uint32_t shards, char *path)
{
    char name[64];
    snprintf(name, sizeof(name), "model-%05u-of-%05u.safetensors", shard + 1, shards);
    return model_source_join(folder, name, path) == XP_OK && access(path, F_OK) == 0;
}

static uint32_t synth_old_shards(const char *folder, char *path)
{
    for (uint32_t shards = 2; shards <= SYNTH_MAX_SHARDS; shards++) {
        if (synth_old_shard(folder, 0, shards, path))
            return shards;
    }
    return 0;
}

/* Refuses a folder that holds a checkpoint, or takes away exactly the files a run writes: leftovers
 * of another format or sharding would win over the new ones. */
static xp_status_t synth_clear_folder(const char *folder, bool force)
{
    static const char *const names[] = {"config.json",       "generation_config.json",
                                        "tokenizer.json",    "tokenizer_config.json",
                                        "model.safetensors", "model.safetensors.index.json",
                                        "model.gguf"};
    char path[MODEL_PATH_MAX];
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        XP_TRY(model_source_join(folder, names[i], path));
        if (access(path, F_OK) != 0)
            continue;
        if (!force)
            return xp_fail(XP_INVALID, "%s exists; --force replaces it", path);
        if (unlink(path) != 0)
            return xp_fail_errno(XP_IO, "cannot remove %s", path);
    }
    uint32_t shards = synth_old_shards(folder, path);
    if (shards && !force)
        return xp_fail(XP_INVALID, "%s exists; --force replaces it", path);
    for (uint32_t i = 0; i < shards; i++) {
        if (synth_old_shard(folder, i, shards, path) && unlink(path) != 0)
            return xp_fail_errno(XP_IO, "cannot remove %s", path);
    }
    return XP_OK;
}

static xp_status_t synth_check(const synth_options_t *options)
{
    if (options->vocab < SYNTH_MIN_VOCAB || options->vocab > (1u << 24))
        return xp_fail(XP_INVALID, "the vocabulary is %u, allowed are %u (every byte) to %u",
                       options->vocab, SYNTH_MIN_VOCAB, 1u << 24);
    if (options->dtype < XP_DTYPE_F32 || options->dtype > XP_DTYPE_BF16)
        return xp_fail(XP_INVALID, "the type %s is not one of f32, bf16, f16",
                       xp_dtype_name(options->dtype));
    if (options->quant != XP_DTYPE_AUTO && !options->gguf)
        return xp_fail(XP_INVALID, "only GGUF can be quantised");
    if (options->shards < 1 || options->shards > SYNTH_MAX_SHARDS ||
        (options->gguf && options->shards > 1))
        return xp_fail(XP_INVALID, "%u files: safetensors take 1 to %u, GGUF 1", options->shards,
                       SYNTH_MAX_SHARDS);
    if (options->layers > MODEL_MAX_LAYERS || options->dense_layers > options->layers)
        return xp_fail(XP_INVALID, "%u layers, the first %u dense; the limit is %d layers",
                       options->layers, options->dense_layers, MODEL_MAX_LAYERS);
    if (options->heads && options->hidden % options->heads)
        return xp_fail(XP_INVALID,
                       "hidden size %u does not divide by %u heads, which transformers demands",
                       options->hidden, options->heads);
    bool latent = synth_is_latent(options->architecture);
    if (!latent && (options->groups != 1 || options->top_groups != 1 || options->shared_experts ||
                    options->routed_scale != 1))
        return xp_fail(XP_UNSUPPORTED, "%s has no expert groups, shared experts or routed scale",
                       model_synth_architecture_name(options->architecture));
    if (latent && options->shared_experts == 0)
        return xp_fail(XP_UNSUPPORTED, "%s without shared experts, which transformers demands",
                       model_synth_architecture_name(options->architecture));
    bool yarn = options->rope == MODEL_ROPE_YARN;
    if (options->rope != MODEL_ROPE_NONE && latent &&
        !(yarn && options->architecture == MODEL_ARCH_DEEPSEEK_V2))
        return xp_fail(XP_UNSUPPORTED, "this rotary scaling is not written for %s",
                       model_synth_architecture_name(options->architecture));
    return XP_OK;
}

static xp_status_t synth_write_texts(const synth_options_t *options, const char *folder,
                                     const xp_buf_t *config)
{
    xp_buf_t text;
    xp_status_t status;
    xp_buf_init(&text, SYNTH_MAX_FILE_TEXT);
    XP_TRY_GOTO(status, done, synth_tokenizer_json(options->vocab, &text));
    XP_TRY_GOTO(status, done, synth_write_text(folder, "tokenizer.json", &text));
    xp_buf_clear(&text);
    XP_TRY_GOTO(status, done, synth_tokenizer_config_json(options->context, &text));
    XP_TRY_GOTO(status, done, synth_write_text(folder, "tokenizer_config.json", &text));
    xp_buf_clear(&text);
    XP_TRY_GOTO(status, done,
                xp_buf_append_text(&text,
                                   "{\n  \"do_sample\": false,\n"
                                   "  \"eos_token_id\": [2, 0],\n  \"pad_token_id\": 0\n}\n"));
    XP_TRY_GOTO(status, done, synth_write_text(folder, "generation_config.json", &text));
    status = synth_write_text(folder, "config.json", config);
done:
    xp_buf_fini(&text);
    return status;
}

xp_status_t model_synth_write(const synth_options_t *options, const char *folder)
{
    xp_status_t status;
    xp_buf_t config;
    xp_buf_init(&config, 1u << 20);
    model_spec_t *spec = calloc(1, sizeof(*spec));
    if (!spec) {
        status = xp_fail(XP_NO_MEMORY, "no memory for a model spec");
        goto done;
    }
    XP_TRY_GOTO(status, done, synth_check(options));
    XP_TRY_GOTO(status, done, synth_config_json(options, &config));
    XP_TRY_GOTO(
        status, done,
        model_spec_parse(config.data, config.length, "the config.json to be written", spec));
    XP_TRY_GOTO(status, done, synth_make_folder(folder));
    XP_TRY_GOTO(status, done, synth_clear_folder(folder, options->force));
    synth_job_t job = {.options = options, .spec = spec, .folder = folder};
    if (options->gguf) {
        status = synth_write_gguf(&job);
    } else {
        XP_TRY_GOTO(status, done, synth_write_safetensors(&job));
        status = synth_write_texts(options, folder, &config);
    }
done:
    free(spec);
    xp_buf_fini(&config);
    return status;
}
