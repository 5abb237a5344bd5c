/* SPDX-License-Identifier: MIT */
/*
 * Model spec from GGUF metadata: llama, qwen2, qwen3, qwen3moe. Key names from the gguf Python
 * package (gguf/constants.py). What the metadata leaves out (biases, tied embeddings, dense layers
 * of a MoE model) is read from the tensor directory. Of tensor data only rope_freqs.weight, a few
 * hundred bytes, is read: Llama 3's rotary scaling is stored nowhere else.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "model/spec_private.h"

typedef struct gguf_spec_reader {
    const gguf_file_t *file;
    const char *prefix; /* "llama" */
} gguf_spec_reader_t;

static void spec_key(const gguf_spec_reader_t *reader, const char *key, char out[128])
{
    snprintf(out, 128, "%s.%s", reader->prefix, key);
}

/* `fallback` < 0 makes the key required. */
static xp_status_t spec_get_u32(const gguf_spec_reader_t *reader, const char *key, uint32_t minimum,
                                uint32_t maximum, int64_t fallback, uint32_t *value_out)
{
    char name[128];
    uint64_t value = 0;
    spec_key(reader, key, name);
    xp_status_t status = gguf_get_u64(reader->file, name, &value);
    if (status == XP_NOT_FOUND) {
        if (fallback < 0)
            return xp_fail(XP_INVALID, "%s: the key \"%s\" is missing", gguf_path(reader->file),
                           name);
        *value_out = (uint32_t)fallback;
        return XP_OK;
    }
    if (status != XP_OK)
        return status;
    if (value < minimum || value > maximum)
        return xp_fail(XP_INVALID, "%s: the key \"%s\" is %" PRIu64 ", allowed are %u to %u",
                       gguf_path(reader->file), name, value, minimum, maximum);
    *value_out = (uint32_t)value;
    return XP_OK;
}

static xp_status_t spec_get_double(const gguf_spec_reader_t *reader, const char *key,
                                   double minimum, double maximum, double fallback,
                                   double *value_out)
{
    char name[128];
    double value = 0;
    spec_key(reader, key, name);
    xp_status_t status = gguf_get_f64(reader->file, name, &value);
    if (status == XP_NOT_FOUND) {
        *value_out = fallback;
        return XP_OK;
    }
    if (status != XP_OK)
        return status;
    if (!(value >= minimum && value <= maximum))
        return xp_fail(XP_INVALID, "%s: the key \"%s\" is %g, allowed are %g to %g",
                       gguf_path(reader->file), name, value, minimum, maximum);
    *value_out = value;
    return XP_OK;
}

static const gguf_tensor_t *spec_find_tensor(const gguf_file_t *file, const char *name)
{
    for (size_t i = 0; i < gguf_tensor_count(file); i++) {
        const gguf_tensor_t *tensor = gguf_tensor_at(file, i);
        if (strcmp(tensor->name, name) == 0)
            return tensor;
    }
    return NULL;
}

static xp_status_t spec_gguf_token(const gguf_file_t *file, const char *key, int32_t *token)
{
    uint64_t value = 0;
    xp_status_t status = gguf_get_u64(file, key, &value);
    if (status == XP_NOT_FOUND)
        return XP_OK;
    if (status != XP_OK)
        return status;
    /* Converters write all ones for "no such token". */
    *token = value <= INT32_MAX ? (int32_t)value : -1;
    return XP_OK;
}

static xp_status_t spec_gguf_tokens(const gguf_file_t *file, model_spec_t *spec)
{
    static const char *const end_keys[] = {"tokenizer.ggml.eos_token_id",
                                           "tokenizer.ggml.eot_token_id",
                                           "tokenizer.ggml.eom_token_id"};
    spec->bos_token = spec->pad_token = -1;
    XP_TRY(spec_gguf_token(file, "tokenizer.ggml.bos_token_id", &spec->bos_token));
    XP_TRY(spec_gguf_token(file, "tokenizer.ggml.padding_token_id", &spec->pad_token));
    for (size_t i = 0; i < sizeof(end_keys) / sizeof(end_keys[0]); i++) {
        int32_t token = -1;
        bool known = false;
        XP_TRY(spec_gguf_token(file, end_keys[i], &token));
        for (uint32_t k = 0; k < spec->eos_count; k++)
            known = known || spec->eos_tokens[k] == token;
        if (token >= 0 && !known)
            spec->eos_tokens[spec->eos_count++] = token;
    }
    return XP_OK;
}

/* The type most weights have, by general.file_type (llama.cpp's LLAMA_FTYPE numbers). */
static xp_dtype_t spec_gguf_dtype(const gguf_file_t *file)
{
    uint64_t type;
    if (gguf_get_u64(file, "general.file_type", &type) != XP_OK)
        return XP_DTYPE_AUTO;
    switch (type) {
    case 0:
        return XP_DTYPE_F32;
    case 1:
        return XP_DTYPE_F16;
    case 2:
        return XP_DTYPE_Q4_0;
    case 3:
        return XP_DTYPE_Q4_1;
    case 7:
        return XP_DTYPE_Q8_0;
    case 14:
    case 15:
        return XP_DTYPE_Q4_K;
    case 18:
        return XP_DTYPE_Q6_K;
    case 32:
        return XP_DTYPE_BF16;
    default:
        return XP_DTYPE_AUTO;
    }
}

/* Llama 3's frequency factors as transformers computes them (modeling_rope_utils.py): what each
 * rotary frequency is divided by. */
static double spec_llama3_divisor(const model_rope_t *rope, uint32_t head_dim, uint32_t i)
{
    double frequency = pow(rope->theta, -2.0 * i / head_dim);
    double wavelength = 2 * M_PI / frequency;
    double low = rope->original_max_positions / rope->low_freq_factor;
    double high = rope->original_max_positions / rope->high_freq_factor;
    if (wavelength < high)
        return 1;
    if (wavelength > low)
        return rope->factor;
    double smooth = (rope->original_max_positions / wavelength - rope->low_freq_factor) /
                    (rope->high_freq_factor - rope->low_freq_factor);
    return 1 / ((1 - smooth) / rope->factor + smooth);
}

/* rope_freqs.weight holds Llama 3's divisors ready computed. Every published Llama 3 uses the same
 * corner values, so they are taken as given and checked against each stored divisor; anything else
 * is refused rather than served wrong. */
static xp_status_t spec_gguf_rope_tensor(const gguf_file_t *file, const gguf_tensor_t *tensor,
                                         const model_spec_t *spec, model_rope_t *rope)
{
    float divisors[SPEC_MAX_HEAD_DIM / 2];
    uint32_t count = spec->head_dim / 2;
    if (tensor->dtype != XP_DTYPE_F32 || tensor->dimensions != 1 || tensor->shape[0] != count)
        return xp_fail(XP_UNSUPPORTED, "%s: tensor \"%s\" is no F32 vector of %u", gguf_path(file),
                       tensor->name, count);
    int fd = open(gguf_path(file), O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return xp_fail_errno(XP_IO, "cannot open %s", gguf_path(file));
    size_t want = count * sizeof(float), have = 0;
    while (have < want) {
        ssize_t got =
            pread(fd, (char *)divisors + have, want - have, (off_t)(tensor->offset + have));
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0) {
            xp_status_t status = got < 0 ? xp_fail_errno(XP_IO, "cannot read %s", gguf_path(file))
                                         : xp_fail(XP_INVALID, "%s: tensor \"%s\" is cut off",
                                                   gguf_path(file), tensor->name);
            close(fd);
            return status;
        }
        have += (size_t)got;
    }
    close(fd);
    model_rope_t candidate = *rope;
    candidate.scaling = MODEL_ROPE_LLAMA3;
    candidate.factor = count ? (double)divisors[count - 1] : 1;
    candidate.low_freq_factor = 1;
    candidate.high_freq_factor = 4;
    candidate.original_max_positions = 8192;
    for (uint32_t i = 0; i < count; i++) {
        double wanted = spec_llama3_divisor(&candidate, spec->head_dim, i);
        if (!(fabs((double)divisors[i] - wanted) <= 1e-3 * wanted))
            return xp_fail(XP_UNSUPPORTED,
                           "%s: tensor \"%s\" holds rotary divisors other than Llama 3's "
                           "(element %u is %g)",
                           gguf_path(file), tensor->name, i, (double)divisors[i]);
    }
    *rope = candidate;
    return XP_OK;
}

static xp_status_t spec_gguf_rope(const gguf_spec_reader_t *reader, model_spec_t *spec)
{
    model_rope_t rope = {0};
    const char *type = NULL;
    size_t length = 0;
    uint32_t width, original;
    char name[128];
    XP_TRY(spec_get_double(reader, "rope.freq_base", 1, 1e15, 10000.0, &rope.theta));
    XP_TRY(
        spec_get_u32(reader, "rope.dimension_count", 1, SPEC_MAX_HEAD_DIM, spec->head_dim, &width));
    if (width != spec->head_dim)
        return xp_fail(XP_UNSUPPORTED,
                       "%s: the key \"%s.rope.dimension_count\" is %u but heads are %u wide; "
                       "partial rotation is not supported",
                       gguf_path(reader->file), reader->prefix, width, spec->head_dim);
    spec_key(reader, "rope.scaling.type", name);
    xp_status_t status = gguf_get_string(reader->file, name, &type, &length);
    if (status != XP_OK && status != XP_NOT_FOUND)
        return status;
    double factor = 0;
    /* Older converters wrote the linear factor under another name. */
    XP_TRY(spec_get_double(reader, "rope.scale_linear", 1e-3, 1e6, 1, &factor));
    XP_TRY(spec_get_double(reader, "rope.scaling.factor", 1e-3, 1e6, factor, &factor));
    if (type && length == 4 && memcmp(type, "yarn", 4) == 0) {
        rope.scaling = MODEL_ROPE_YARN;
        rope.factor = factor;
        XP_TRY(spec_get_u32(reader, "rope.scaling.original_context_length", 1, SPEC_MAX_POSITIONS,
                            spec->max_positions, &original));
        rope.original_max_positions = original;
        XP_TRY(
            spec_get_double(reader, "rope.scaling.yarn_beta_fast", 1e-3, 1e6, 32, &rope.beta_fast));
        XP_TRY(
            spec_get_double(reader, "rope.scaling.yarn_beta_slow", 1e-3, 1e6, 1, &rope.beta_slow));
    } else if (!type || (length == 6 && memcmp(type, "linear", 6) == 0)) {
        rope.scaling = factor == 1 ? MODEL_ROPE_NONE : MODEL_ROPE_LINEAR;
        rope.factor = factor == 1 ? 0 : factor;
    } else if (!(length == 4 && memcmp(type, "none", 4) == 0)) {
        return xp_fail(XP_UNSUPPORTED,
                       "%s: the key \"%s\" is \"%.*s\"; known are none, linear, yarn",
                       gguf_path(reader->file), name, (int)(length < 64 ? length : 64), type);
    }
    const gguf_tensor_t *freqs = spec_find_tensor(reader->file, "rope_freqs.weight");
    if (freqs)
        XP_TRY(spec_gguf_rope_tensor(reader->file, freqs, spec, &rope));
    spec->rope = rope;
    return XP_OK;
}

static xp_status_t spec_gguf_ffn(const gguf_spec_reader_t *reader, model_spec_t *spec)
{
    model_ffn_t dense = {.kind = MODEL_FFN_DENSE, .routed_scale = 1};
    model_ffn_t moe = {.kind = MODEL_FFN_MOE,
                       .router = MODEL_ROUTER_SOFTMAX,
                       .normalize_top_k = true, /* not stored; llama.cpp always does for qwen3moe */
                       .routed_scale = 1,
                       .groups = 1,
                       .top_groups = 1};
    bool sparse = spec->architecture == MODEL_ARCH_QWEN3_MOE;
    char name[128];
    XP_TRY(spec_get_u32(reader, "feed_forward_length", 1, SPEC_MAX_INTERMEDIATE,
                        sparse ? 1 : CONFIG_REQUIRED, &dense.intermediate));
    if (sparse) {
        XP_TRY(spec_get_u32(reader, "expert_count", 1, MODEL_MAX_EXPERTS, CONFIG_REQUIRED,
                            &moe.experts));
        XP_TRY(spec_get_u32(reader, "expert_used_count", 1, MODEL_MAX_TOP_K, CONFIG_REQUIRED,
                            &moe.top_k));
        XP_TRY(spec_get_u32(reader, "expert_feed_forward_length", 1, SPEC_MAX_INTERMEDIATE,
                            CONFIG_REQUIRED, &moe.intermediate));
        spec_key(reader, "expert_weights_norm", name);
        xp_status_t status = gguf_get_bool(reader->file, name, &moe.normalize_top_k);
        if (status != XP_OK && status != XP_NOT_FOUND)
            return status;
    } else {
        uint32_t experts = 0;
        XP_TRY(spec_get_u32(reader, "expert_count", 0, UINT32_MAX, 0, &experts));
        if (experts)
            return xp_fail(XP_UNSUPPORTED,
                           "%s: \"%s\" with %u experts (Mixtral and its kin) is not supported",
                           gguf_path(reader->file), reader->prefix, experts);
    }
    for (uint32_t layer = 0; layer < spec->layers; layer++) {
        /* Dense layers of a MoE model show only in the directory. */
        snprintf(name, sizeof(name), "blk.%u.ffn_gate.weight", layer);
        spec->ffn[layer] =
            sparse && !(dense.intermediate > 1 && spec_find_tensor(reader->file, name)) ? moe
                                                                                        : dense;
    }
    return XP_OK;
}

static xp_status_t spec_gguf_vocab(const gguf_file_t *file, model_spec_t *spec)
{
    const gguf_tensor_t *embedding = spec_find_tensor(file, "token_embd.weight");
    if (!embedding)
        return xp_fail(XP_INVALID, "%s: tensor \"token_embd.weight\" is missing", gguf_path(file));
    if (embedding->dimensions != 2 || embedding->shape[0] != spec->hidden ||
        embedding->shape[1] > SPEC_MAX_VOCAB)
        return xp_fail(XP_INVALID,
                       "%s: tensor \"%s\" has %u dimensions, rows of %" PRIu64
                       "; wanted a matrix with rows of %u and at most %u of them",
                       gguf_path(file), embedding->name, embedding->dimensions, embedding->shape[0],
                       spec->hidden, SPEC_MAX_VOCAB);
    spec->vocab = (uint32_t)embedding->shape[1];
    return XP_OK;
}

xp_status_t spec_from_gguf(const gguf_file_t *file, model_spec_t *spec)
{
    const char *name = NULL;
    size_t length = 0;
    const spec_family_t *family = NULL;
    XP_TRY(gguf_get_string(file, "general.architecture", &name, &length));
    for (unsigned i = 0; i < MODEL_ARCH_COUNT; i++) {
        const char *known = spec_families[i].gguf_name;
        if (known && strlen(known) == length && memcmp(known, name, length) == 0)
            family = &spec_families[i];
    }
    if (!family) {
        char known[256];
        spec_family_list(true, known, sizeof(known));
        return xp_fail(XP_UNSUPPORTED,
                       "%s: the GGUF architecture \"%.*s\" is not supported; known are %s",
                       gguf_path(file), (int)(length < 64 ? length : 64), name, known);
    }
    uint64_t split = 0;
    if (gguf_get_u64(file, "split.count", &split) == XP_OK && split > 1)
        return xp_fail(XP_UNSUPPORTED,
                       "%s is one of %" PRIu64 " parts of a split model; join them first",
                       gguf_path(file), split);
    gguf_spec_reader_t reader = {.file = file, .prefix = family->gguf_name};
    spec->architecture = family->architecture;
    spec->is_gguf = true;
    snprintf(spec->architecture_name, sizeof(spec->architecture_name), "%s", family->class_name);
    XP_TRY(spec_get_u32(&reader, "embedding_length", 1, MODEL_MAX_HIDDEN, CONFIG_REQUIRED,
                        &spec->hidden));
    XP_TRY(
        spec_get_u32(&reader, "block_count", 1, MODEL_MAX_LAYERS, CONFIG_REQUIRED, &spec->layers));
    XP_TRY(spec_get_u32(&reader, "context_length", 1, SPEC_MAX_POSITIONS, CONFIG_REQUIRED,
                        &spec->max_positions));
    XP_TRY(spec_get_u32(&reader, "attention.head_count", 1, SPEC_MAX_HEADS, CONFIG_REQUIRED,
                        &spec->heads));
    XP_TRY(spec_get_u32(&reader, "attention.head_count_kv", 1, SPEC_MAX_HEADS, spec->heads,
                        &spec->kv_heads));
    uint32_t derived = spec->hidden % spec->heads ? 0 : spec->hidden / spec->heads;
    uint32_t value_length = 0;
    XP_TRY(
        spec_get_u32(&reader, "attention.key_length", 1, SPEC_MAX_HEAD_DIM,
                     derived && derived <= SPEC_MAX_HEAD_DIM ? (int64_t)derived : CONFIG_REQUIRED,
                     &spec->head_dim));
    XP_TRY(spec_get_u32(&reader, "attention.value_length", 1, SPEC_MAX_HEAD_DIM, spec->head_dim,
                        &value_length));
    if (value_length != spec->head_dim)
        return xp_fail(XP_UNSUPPORTED, "%s: key heads of %u and value heads of %u differ",
                       gguf_path(file), spec->head_dim, value_length);
    XP_TRY(spec_get_double(&reader, "attention.layer_norm_rms_epsilon", 0, 1,
                           family->default_epsilon, &spec->norm_epsilon));
    XP_TRY(
        spec_get_u32(&reader, "attention.sliding_window", 0, UINT32_MAX, 0, &spec->sliding_window));
    if (spec->sliding_window >= spec->max_positions)
        spec->sliding_window = 0;
    XP_TRY(spec_gguf_vocab(file, spec));
    XP_TRY(spec_gguf_rope(&reader, spec));
    XP_TRY(spec_gguf_tokens(file, spec));
    XP_TRY(spec_gguf_ffn(&reader, spec));
    spec->qk_norm =
        spec->architecture == MODEL_ARCH_QWEN3 || spec->architecture == MODEL_ARCH_QWEN3_MOE;
    spec->qkv_bias = spec_find_tensor(file, "blk.0.attn_q.bias") != NULL;
    spec->o_bias = spec_find_tensor(file, "blk.0.attn_output.bias") != NULL;
    spec->tied_embeddings = spec_find_tensor(file, "output.weight") == NULL;
    spec->checkpoint_dtype = spec_gguf_dtype(file);
    return spec_check(spec, gguf_path(file));
}
