/* SPDX-License-Identifier: MIT */
/*
 * Synthetic checkpoints as one GGUF file (version 3), in the form llama.cpp's converter gives them:
 * Llama's q and k rows permuted, experts merged, norms, biases and routers in F32. Owns its file
 * until it is committed.
 */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "model/synth_private.h"

#define SYNTH_GGUF_ALIGNMENT 32u

enum { KV_UINT32 = 4, KV_INT32 = 5, KV_FLOAT32 = 6, KV_BOOL = 7, KV_STRING = 8, KV_ARRAY = 9 };

typedef struct synth_gguf {
    synth_job_t *job;
    const char *architecture; /* "llama" */
    xp_buf_t pairs, directory;
    uint32_t pair_count, tensor_count;
    uint64_t offset; /* in the data part */
    synth_file_t file;
    bool writing;
} synth_gguf_t;

/* ---- Metadata ---------------------------------------------------------------------------------
 */

static xp_status_t kv_word(xp_buf_t *buf, uint64_t value, uint32_t bytes)
{
    uint8_t word[8];
    for (uint32_t i = 0; i < bytes; i++)
        word[i] = (uint8_t)(value >> (8 * i));
    return xp_buf_append(buf, word, bytes);
}

static xp_status_t kv_text(xp_buf_t *buf, const char *text)
{
    XP_TRY(kv_word(buf, strlen(text), 8));
    return xp_buf_append_text(buf, text);
}

/* Keys that begin with a dot get the architecture in front. */
static xp_status_t kv_key(synth_gguf_t *gguf, const char *key, uint32_t type)
{
    char name[128];
    snprintf(name, sizeof(name), "%s%s", key[0] == '.' ? gguf->architecture : "", key);
    gguf->pair_count++;
    XP_TRY(kv_text(&gguf->pairs, name));
    return kv_word(&gguf->pairs, type, 4);
}

static xp_status_t kv_string(synth_gguf_t *gguf, const char *key, const char *value)
{
    XP_TRY(kv_key(gguf, key, KV_STRING));
    return kv_text(&gguf->pairs, value);
}

static xp_status_t kv_u32(synth_gguf_t *gguf, const char *key, uint32_t value)
{
    XP_TRY(kv_key(gguf, key, KV_UINT32));
    return kv_word(&gguf->pairs, value, 4);
}

static xp_status_t kv_f32(synth_gguf_t *gguf, const char *key, double value)
{
    float narrow = (float)value;
    uint32_t bits;
    memcpy(&bits, &narrow, sizeof(bits));
    XP_TRY(kv_key(gguf, key, KV_FLOAT32));
    return kv_word(&gguf->pairs, bits, 4);
}

static xp_status_t kv_bool(synth_gguf_t *gguf, const char *key, bool value)
{
    XP_TRY(kv_key(gguf, key, KV_BOOL));
    return kv_word(&gguf->pairs, value, 1);
}

static xp_status_t kv_array(synth_gguf_t *gguf, const char *key, uint32_t type, uint64_t count)
{
    XP_TRY(kv_key(gguf, key, KV_ARRAY));
    XP_TRY(kv_word(&gguf->pairs, type, 4));
    return kv_word(&gguf->pairs, count, 8);
}

static uint32_t synth_gguf_file_type(xp_dtype_t dtype)
{
    switch (dtype) {
    case XP_DTYPE_F16:
        return 1;
    case XP_DTYPE_Q4_0:
        return 2;
    case XP_DTYPE_Q4_1:
        return 3;
    case XP_DTYPE_Q8_0:
        return 7;
    case XP_DTYPE_Q4_K:
        return 14;
    case XP_DTYPE_Q6_K:
        return 18;
    case XP_DTYPE_BF16:
        return 32;
    default:
        return 0;
    }
}

static xp_dtype_t synth_gguf_matrix_dtype(const synth_options_t *options)
{
    return options->quant != XP_DTYPE_AUTO ? options->quant : options->dtype;
}

static xp_status_t synth_gguf_model_pairs(synth_gguf_t *gguf)
{
    const model_spec_t *spec = gguf->job->spec;
    const model_ffn_t *last = &spec->ffn[spec->layers - 1];
    XP_TRY(kv_string(gguf, "general.architecture", gguf->architecture));
    XP_TRY(kv_string(gguf, "general.name", "synthetic"));
    XP_TRY(kv_u32(gguf, "general.alignment", SYNTH_GGUF_ALIGNMENT));
    XP_TRY(kv_u32(gguf, "general.quantization_version", 2));
    XP_TRY(kv_u32(gguf, "general.file_type",
                  synth_gguf_file_type(synth_gguf_matrix_dtype(gguf->job->options))));
    XP_TRY(kv_u32(gguf, ".block_count", spec->layers));
    XP_TRY(kv_u32(gguf, ".context_length", spec->max_positions));
    XP_TRY(kv_u32(gguf, ".embedding_length", spec->hidden));
    XP_TRY(kv_u32(gguf, ".feed_forward_length", gguf->job->options->intermediate));
    XP_TRY(kv_u32(gguf, ".attention.head_count", spec->heads));
    XP_TRY(kv_u32(gguf, ".attention.head_count_kv", spec->kv_heads));
    XP_TRY(kv_u32(gguf, ".attention.key_length", spec->head_dim));
    XP_TRY(kv_u32(gguf, ".attention.value_length", spec->head_dim));
    XP_TRY(kv_f32(gguf, ".attention.layer_norm_rms_epsilon", spec->norm_epsilon));
    XP_TRY(kv_f32(gguf, ".rope.freq_base", spec->rope.theta));
    XP_TRY(kv_u32(gguf, ".rope.dimension_count", spec->head_dim));
    XP_TRY(kv_u32(gguf, ".vocab_size", spec->vocab));
    if (spec->rope.scaling == MODEL_ROPE_LINEAR || spec->rope.scaling == MODEL_ROPE_YARN) {
        bool yarn = spec->rope.scaling == MODEL_ROPE_YARN;
        XP_TRY(kv_string(gguf, ".rope.scaling.type", yarn ? "yarn" : "linear"));
        XP_TRY(kv_f32(gguf, ".rope.scaling.factor", spec->rope.factor));
        if (yarn)
            XP_TRY(kv_u32(gguf, ".rope.scaling.original_context_length",
                          (uint32_t)spec->rope.original_max_positions));
    }
    if (last->kind == MODEL_FFN_MOE) {
        XP_TRY(kv_u32(gguf, ".expert_count", last->experts));
        XP_TRY(kv_u32(gguf, ".expert_used_count", last->top_k));
        XP_TRY(kv_u32(gguf, ".expert_feed_forward_length", last->intermediate));
        XP_TRY(kv_bool(gguf, ".expert_weights_norm", last->normalize_top_k));
    }
    return XP_OK;
}

static xp_status_t synth_gguf_tokenizer_pairs(synth_gguf_t *gguf)
{
    enum { NORMAL = 1, CONTROL = 3 };
    uint32_t vocab = gguf->job->spec->vocab;
    char left[64], right[64], merge[160];
    XP_TRY(kv_string(gguf, "tokenizer.ggml.model", "gpt2"));
    XP_TRY(kv_string(gguf, "tokenizer.ggml.pre", "qwen2"));
    XP_TRY(kv_u32(gguf, "tokenizer.ggml.bos_token_id", 0));
    XP_TRY(kv_u32(gguf, "tokenizer.ggml.eos_token_id", 2));
    XP_TRY(kv_u32(gguf, "tokenizer.ggml.padding_token_id", 0));
    XP_TRY(kv_bool(gguf, "tokenizer.ggml.add_bos_token", false));
    XP_TRY(kv_string(gguf, "tokenizer.chat_template", synth_chat_template));
    XP_TRY(kv_array(gguf, "tokenizer.ggml.tokens", KV_STRING, vocab));
    for (uint32_t id = 0; id < vocab; id++) {
        synth_token_text(id, left);
        XP_TRY(kv_text(&gguf->pairs, left));
    }
    XP_TRY(kv_array(gguf, "tokenizer.ggml.token_type", KV_INT32, vocab));
    for (uint32_t id = 0; id < vocab; id++)
        XP_TRY(kv_word(&gguf->pairs, id < SYNTH_SPECIALS ? CONTROL : NORMAL, 4));
    XP_TRY(kv_array(gguf, "tokenizer.ggml.merges", KV_STRING, vocab - SYNTH_MIN_VOCAB));
    for (uint32_t i = 0; SYNTH_MIN_VOCAB + i < vocab; i++) {
        synth_merge(i, left, right);
        snprintf(merge, sizeof(merge), "%s %s", left, right);
        XP_TRY(kv_text(&gguf->pairs, merge));
    }
    return XP_OK;
}

/* ---- Tensors ----------------------------------------------------------------------------------
 */

/* Hugging Face part names behind "model.layers.N." and the names they take behind "blk.N.". */
static const struct {
    const char *hf, *gguf;
} synth_gguf_names[] = {
    {"input_layernorm", "attn_norm"},
    {"post_attention_layernorm", "ffn_norm"},
    {"self_attn.q_proj", "attn_q"},
    {"self_attn.k_proj", "attn_k"},
    {"self_attn.v_proj", "attn_v"},
    {"self_attn.o_proj", "attn_output"},
    {"self_attn.q_norm", "attn_q_norm"},
    {"self_attn.k_norm", "attn_k_norm"},
    {"mlp.gate_proj", "ffn_gate"},
    {"mlp.up_proj", "ffn_up"},
    {"mlp.down_proj", "ffn_down"},
    {"mlp.gate", "ffn_gate_inp"},
    {"mlp.experts.0.gate_proj", "ffn_gate_exps"},
    {"mlp.experts.0.up_proj", "ffn_up_exps"},
    {"mlp.experts.0.down_proj", "ffn_down_exps"},
};

/* False for a tensor that is part of another one (experts but the first). */
static bool synth_gguf_name(const char *hf, char out[96])
{
    unsigned layer;
    int used = 0;
    if (sscanf(hf, "model.layers.%u.%n", &layer, &used) != 1 || used == 0) {
        const char *name = strcmp(hf, "model.embed_tokens.weight") == 0 ? "token_embd.weight"
                           : strcmp(hf, "model.norm.weight") == 0       ? "output_norm.weight"
                                                                        : "output.weight";
        snprintf(out, 96, "%s", name);
        return true;
    }
    const char *part = hf + used, *dot = strrchr(part, '.');
    size_t length = (size_t)(dot - part);
    for (size_t i = 0; i < sizeof(synth_gguf_names) / sizeof(synth_gguf_names[0]); i++) {
        const char *known = synth_gguf_names[i].hf;
        if (strlen(known) == length && memcmp(known, part, length) == 0) {
            snprintf(out, 96, "blk.%u.%s%s", layer, synth_gguf_names[i].gguf, dot);
            return true;
        }
    }
    return false;
}

static xp_dtype_t synth_gguf_dtype(const synth_options_t *options, const inventory_tensor_t *tensor)
{
    bool router = strstr(tensor->name, "mlp.gate.") != NULL;
    return tensor->dimensions == 1 || router ? XP_DTYPE_F32 : synth_gguf_matrix_dtype(options);
}

/* Where GGUF puts Llama's rows: place pair*2 + half of a head holds row half*d/2 + pair. */
typedef struct synth_permutation {
    uint64_t width; /* rows of a head */
} synth_permutation_t;

static uint64_t synth_permuted_row(const void *context, uint64_t place)
{
    uint64_t width = ((const synth_permutation_t *)context)->width, within = place % width;
    return place - within + within % 2 * (width / 2) + within / 2;
}

static uint32_t synth_gguf_type(xp_dtype_t dtype)
{
    static const uint32_t types[XP_DTYPE_COUNT] = {
        [XP_DTYPE_F32] = 0,  [XP_DTYPE_F16] = 1,   [XP_DTYPE_Q4_0] = 2,  [XP_DTYPE_Q4_1] = 3,
        [XP_DTYPE_Q8_0] = 8, [XP_DTYPE_Q4_K] = 12, [XP_DTYPE_Q6_K] = 14, [XP_DTYPE_BF16] = 30};
    return types[dtype];
}

static uint32_t synth_gguf_experts(const model_spec_t *spec, const char *hf)
{
    return strstr(hf, ".experts.0.") ? spec->ffn[spec->layers - 1].experts : 1;
}

static xp_status_t synth_gguf_describe(synth_gguf_t *gguf, const char *name, uint32_t dimensions,
                                       const uint64_t *shape, xp_dtype_t dtype, uint64_t bytes)
{
    XP_TRY(kv_text(&gguf->directory, name));
    XP_TRY(kv_word(&gguf->directory, dimensions, 4));
    for (uint32_t i = 0; i < dimensions; i++)
        XP_TRY(kv_word(&gguf->directory, shape[i], 8));
    XP_TRY(kv_word(&gguf->directory, synth_gguf_type(dtype), 4));
    XP_TRY(kv_word(&gguf->directory, gguf->offset, 8));
    gguf->offset +=
        (bytes + SYNTH_GGUF_ALIGNMENT - 1) / SYNTH_GGUF_ALIGNMENT * SYNTH_GGUF_ALIGNMENT;
    gguf->job->total_bytes += bytes;
    gguf->tensor_count++;
    return XP_OK;
}

static xp_status_t synth_gguf_pad(synth_gguf_t *gguf)
{
    static const uint8_t zeros[SYNTH_GGUF_ALIGNMENT];
    return synth_file_write(&gguf->file, zeros,
                            (SYNTH_GGUF_ALIGNMENT - gguf->file.written % SYNTH_GGUF_ALIGNMENT) %
                                SYNTH_GGUF_ALIGNMENT);
}

static xp_status_t synth_gguf_write_data(synth_gguf_t *gguf, const inventory_tensor_t *tensor,
                                         xp_dtype_t dtype, uint32_t experts)
{
    const model_spec_t *spec = gguf->job->spec;
    synth_permutation_t permutation = {.width = spec->head_dim};
    bool permuted =
        spec->architecture == MODEL_ARCH_LLAMA &&
        (strstr(tensor->name, ".q_proj.") != NULL || strstr(tensor->name, ".k_proj.") != NULL);
    const char *marker = strstr(tensor->name, ".experts.0.");
    for (uint32_t expert = 0; expert < experts; expert++) {
        char name[160];
        inventory_tensor_t one = *tensor;
        if (marker) {
            snprintf(name, sizeof(name), "%.*s.experts.%u.%s", (int)(marker - tensor->name),
                     tensor->name, expert, marker + strlen(".experts.0."));
            one.name = name;
        }
        XP_TRY(synth_write_tensor(gguf->job, &gguf->file, &one, dtype,
                                  permuted ? synth_permuted_row : NULL, &permutation));
    }
    return synth_gguf_pad(gguf);
}

static xp_status_t synth_gguf_tensor(void *context, const inventory_tensor_t *tensor)
{
    synth_gguf_t *gguf = context;
    char name[96];
    if (!synth_gguf_name(tensor->name, name))
        return XP_OK;
    xp_dtype_t dtype = synth_gguf_dtype(gguf->job->options, tensor);
    uint32_t experts = synth_gguf_experts(gguf->job->spec, tensor->name);
    if (gguf->writing)
        return synth_gguf_write_data(gguf, tensor, dtype, experts);
    uint64_t columns = tensor->shape[tensor->dimensions - 1];
    uint64_t rows = tensor->dimensions == 2 ? tensor->shape[0] : 1;
    if (columns % xp_dtype_block_elements(dtype))
        return xp_fail(XP_INVALID,
                       "%s has rows of %" PRIu64 ", which do not divide into %s blocks of %u",
                       tensor->name, columns, xp_dtype_name(dtype), xp_dtype_block_elements(dtype));
    uint64_t shape[3] = {columns, rows, experts};
    uint32_t dimensions = experts > 1 ? 3 : tensor->dimensions;
    return synth_gguf_describe(gguf, name, dimensions, shape, dtype,
                               experts * rows * xp_dtype_row_bytes(dtype, columns));
}

/* Llama 3 keeps its rotary divisors as a tensor (see spec_gguf.c); ours has the same corner values.
 */
static float synth_gguf_divisor(const model_rope_t *rope, uint32_t head_dim, uint32_t i)
{
    double wavelength = 2 * M_PI * pow(rope->theta, 2.0 * i / head_dim);
    double ratio = rope->original_max_positions / wavelength;
    if (ratio > rope->high_freq_factor)
        return 1;
    if (ratio < rope->low_freq_factor)
        return (float)rope->factor;
    double smooth =
        (ratio - rope->low_freq_factor) / (rope->high_freq_factor - rope->low_freq_factor);
    return (float)(1 / ((1 - smooth) / rope->factor + smooth));
}

static xp_status_t synth_gguf_write_file(synth_gguf_t *gguf)
{
    const model_spec_t *spec = gguf->job->spec;
    bool llama3 = spec->rope.scaling == MODEL_ROPE_LLAMA3;
    uint64_t pairs_count = spec->head_dim / 2;
    xp_buf_t head;
    xp_buf_init(&head, 64);
    XP_TRY(synth_gguf_model_pairs(gguf));
    XP_TRY(synth_gguf_tokenizer_pairs(gguf));
    XP_TRY(model_inventory_visit(spec, synth_gguf_tensor, gguf));
    if (llama3)
        XP_TRY(synth_gguf_describe(gguf, "rope_freqs.weight", 1, &pairs_count, XP_DTYPE_F32,
                                   pairs_count * 4));
    XP_TRY(synth_file_open(gguf->job->folder, "model.gguf", &gguf->file));
    xp_status_t status = xp_buf_append(&head, "GGUF\3\0\0\0", 8);
    if (status == XP_OK)
        status = kv_word(&head, gguf->tensor_count, 8);
    if (status == XP_OK)
        status = kv_word(&head, gguf->pair_count, 8);
    if (status == XP_OK)
        status = synth_file_write(&gguf->file, head.data, head.length);
    xp_buf_fini(&head);
    XP_TRY(status);
    XP_TRY(synth_file_write(&gguf->file, gguf->pairs.data, gguf->pairs.length));
    XP_TRY(synth_file_write(&gguf->file, gguf->directory.data, gguf->directory.length));
    XP_TRY(synth_gguf_pad(gguf));
    gguf->writing = true;
    XP_TRY(model_inventory_visit(spec, synth_gguf_tensor, gguf));
    for (uint32_t i = 0; llama3 && i < pairs_count; i++) {
        float divisor = synth_gguf_divisor(&spec->rope, spec->head_dim, i);
        XP_TRY(synth_file_write(&gguf->file, &divisor, sizeof(divisor)));
    }
    XP_TRY(synth_gguf_pad(gguf));
    return synth_file_commit(&gguf->file);
}

xp_status_t synth_write_gguf(synth_job_t *job)
{
    static const char *const names[MODEL_ARCH_COUNT] = {[MODEL_ARCH_LLAMA] = "llama",
                                                        [MODEL_ARCH_QWEN2] = "qwen2",
                                                        [MODEL_ARCH_QWEN3] = "qwen3",
                                                        [MODEL_ARCH_QWEN3_MOE] = "qwen3moe"};
    synth_gguf_t gguf = {.job = job, .architecture = names[job->options->architecture]};
    if (!gguf.architecture)
        return xp_fail(XP_UNSUPPORTED, "GGUF is not written for %s",
                       model_synth_architecture_name(job->options->architecture));
    if (job->spec->head_dim % 2)
        return xp_fail(XP_INVALID, "the head width %u is odd", job->spec->head_dim);
    xp_buf_init(&gguf.pairs, SYNTH_MAX_FILE_TEXT);
    xp_buf_init(&gguf.directory, SYNTH_MAX_FILE_TEXT);
    xp_status_t status = synth_gguf_write_file(&gguf);
    synth_file_abandon(&gguf.file);
    xp_buf_fini(&gguf.pairs);
    xp_buf_fini(&gguf.directory);
    return status;
}
