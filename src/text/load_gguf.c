/* SPDX-License-Identifier: MIT */
/*
 * A tokenizer from GGUF metadata (tokenizer.ggml.*): "gpt2", byte-level BPE whose splitting is
 * named by tokenizer.ggml.pre, and "llama", SentencePiece BPE ranked by scores. Runs on the loading
 * thread; the file is closed when loading returns.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "model/gguf.h"
#include "text/load_json.h"

/* Token types of GGUF. */
enum { GGUF_NORMAL = 1, GGUF_UNKNOWN, GGUF_CONTROL, GGUF_USER, GGUF_UNUSED, GGUF_BYTE };

static const char LLAMA3_PATTERN[] =
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}|"
    " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
static const char QWEN2_PATTERN[] =
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}|"
    " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
/* Letters with case in the Unicode version DeepSeek's tokenizer was made with, code point by code
 * point as its own class lists them. */
static const char DEEPSEEK_LETTERS[] =
    "\\s?[A-Za-z\u00B5\u00C0-\u00D6\u00D8-\u00F6\u00F8-\u01BA\u01BC-\u01BF\u01C4-\u0293\u0295-"
    "\u02AF"
    "\u0370-\u0373\u0376\u0377\u037B-\u037D\u037F\u0386\u0388-\u038A\u038C\u038E-\u03A1\u03A3-"
    "\u03F5"
    "\u03F7-\u0481\u048A-\u052F\u0531-\u0556\u10A0-\u10C5\u13A0-\u13F5\u13F8-\u13FD\u1C90-\u1CBA"
    "\u1CBD-\u1CBF\u1D00-\u1D2B\u1D6B-\u1D77\u1D79-\u1D9A\u1E00-\u1F15\u1F18-\u1F1D\u1F20-\u1F45"
    "\u1F48-\u1F4D\u1F50-\u1F57\u1F59\u1F5B\u1F5D\u1F5F-\u1F7D\u1F80-\u1FB4\u1FB6-\u1FBC\u1FBE"
    "\u1FC2-\u1FC4\u1FC6-\u1FCC\u1FD0-\u1FD3\u1FD6-\u1FDB\u1FE0-\u1FEC\u1FF2-\u1FF4\u1FF6-\u1FFC"
    "\u2102\u2107\u210A-\u2113\u2115\u2119-\u211D\u2124\u2126\u2128\u212A-\u212D\u212F-\u2134\u2139"
    "\u213C-\u213F\u2145-\u2149\u214E\u2183\u2184\u2C00-\u2C7B\u2C7E-\u2CE4\u2CEB-"
    "\u2CEE\u2CF2\u2CF3"
    "\uA640-\uA66D\uA680-\uA69B\uA722-\uA76F\uA771-\uA787\uA78B-\uA78E\uAB70-\uABBF\uFB00-\uFB06"
    "\uFB13-\uFB17\uFF21-\uFF3A\uFF41-\uFF5A\U00010400-\U0001044F\U000104B0-\U000104D3"
    "\U000104D8-\U000104FB\U00010C80-\U00010CB2\U00010CC0-\U00010CF2\U000118A0-\U000118DF"
    "\U0001E900-\U0001E943]+";
static const char DEEPSEEK_PUNCTUATION[] =
    "\\s?[!-/:-~\uFF01-\uFF0F\uFF1A-\uFF5E\u2018-\u201F\u3000-\u3002]+";
static const char DEEPSEEK_IDEOGRAPHS[] = "[\u4E00-\u9FA5\u0800-\u4E00\uAC00-\uD7FF]+";

/* Optional members keep the default they hold. */
static xp_status_t optional_bool(const gguf_file_t *file, const char *key, bool *value)
{
    xp_status_t status = gguf_get_bool(file, key, value);
    return status == XP_NOT_FOUND ? XP_OK : status;
}

static xp_status_t optional_id(const gguf_file_t *file, const char *key, int64_t *value)
{
    uint64_t number;
    xp_status_t status = gguf_get_u64(file, key, &number);
    if (status == XP_NOT_FOUND)
        return XP_OK;
    /* Writers store "none" as the largest number of the type. */
    if (status == XP_OK && number < TEXT_MAX_TOKENS)
        *value = (int64_t)number;
    return status;
}

/* What tokenizer.ggml.pre stands for. */
typedef struct pre_entry {
    const char *name;
    enum { PRE_GPT2 = 0, PRE_SMOLLM, PRE_LLAMA3, PRE_QWEN2, PRE_DEEPSEEK } kind;
} pre_entry_t;
static const pre_entry_t PRE_TABLE[] = {
    {"default", PRE_GPT2},          {"gpt-2", PRE_GPT2},       {"gpt2", PRE_GPT2},
    {"smollm", PRE_SMOLLM},         {"llama-bpe", PRE_LLAMA3}, {"llama3", PRE_LLAMA3},
    {"llama-v3", PRE_LLAMA3},       {"qwen2", PRE_QWEN2},      {"deepseek-r1-qwen", PRE_QWEN2},
    {"deepseek-llm", PRE_DEEPSEEK},
};

static xp_status_t add_pre(tokenizer_t *tokenizer, const char *name, size_t length, bool *bos)
{
    const pre_entry_t *entry = NULL;
    for (size_t i = 0; i < sizeof(PRE_TABLE) / sizeof(PRE_TABLE[0]); i++) {
        if (strlen(PRE_TABLE[i].name) == length && !memcmp(PRE_TABLE[i].name, name, length))
            entry = &PRE_TABLE[i];
    }
    if (!entry)
        return xp_fail(XP_UNSUPPORTED, "tokenizer.ggml.pre \"%.*s\" is not supported",
                       (int)(length < 64 ? length : 64), name);
    switch (entry->kind) {
    case PRE_GPT2:
        return add_byte_level(tokenizer, false, true);
    case PRE_SMOLLM:
        XP_TRY(add_class(tokenizer, text_is_numeric, SPLIT_ISOLATED));
        return add_byte_level(tokenizer, false, true);
    case PRE_LLAMA3:
        *bos = true;
        tokenizer->bpe.ignore_merges = true;
        XP_TRY(add_split(tokenizer, LLAMA3_PATTERN));
        break;
    case PRE_QWEN2:
        tokenizer->normalizers[tokenizer->normalizer_count++] =
            (normalizer_t){.kind = NORMALIZER_FORM, .form = TEXT_NFC};
        XP_TRY(add_split(tokenizer, QWEN2_PATTERN));
        break;
    case PRE_DEEPSEEK:
        XP_TRY(add_split(tokenizer, "[\\r\\n]"));
        XP_TRY(add_split(tokenizer, DEEPSEEK_LETTERS));
        XP_TRY(add_split(tokenizer, DEEPSEEK_PUNCTUATION));
        XP_TRY(add_split(tokenizer, "\\s+$"));
        XP_TRY(add_split(tokenizer, DEEPSEEK_IDEOGRAPHS));
        XP_TRY(add_split(tokenizer, "\\p{N}+"));
        break;
    }
    return add_byte_level(tokenizer, false, false);
}

#define GGUF_MAX_TOKEN_TYPE 255 /* known are 1 to 6; the rest counts as normal */

static xp_status_t token_kind(const gguf_file_t *file, size_t types, size_t id, int *kind_out)
{
    double value = GGUF_NORMAL;
    if (id < types)
        XP_TRY(gguf_array_f64(file, "tokenizer.ggml.token_type", id, &value));
    if (!(value >= 0 && value <= GGUF_MAX_TOKEN_TYPE))
        return xp_fail(XP_INVALID, "tokenizer.ggml.token_type[%zu]: %g is no token type (0 to %d)",
                       id, value, GGUF_MAX_TOKEN_TYPE);
    *kind_out = (int)value;
    return XP_OK;
}

/* The vocabulary; tokens that are found whole in a text become added tokens. */
static xp_status_t load_tokens(tokenizer_t *tokenizer, const gguf_file_t *file, size_t count,
                               size_t types)
{
    const char *text;
    size_t length;
    int kind;
    for (size_t id = 0; id < count; id++) {
        XP_TRY(gguf_array_string(file, "tokenizer.ggml.tokens", id, &text, &length));
        xp_status_t status = tokenizer_add_model_token(tokenizer, text, length, (int64_t)id);
        if (status != XP_OK)
            return xp_fail_context(status, "tokenizer.ggml.tokens[%zu]", id);
    }
    tokenizer->model_count = (uint32_t)count;
    for (size_t id = 0; id < types; id++) {
        XP_TRY(token_kind(file, types, id, &kind));
        bool special = kind == GGUF_CONTROL || kind == GGUF_UNKNOWN;
        if (!special && kind != GGUF_USER)
            continue;
        XP_TRY(gguf_array_string(file, "tokenizer.ggml.tokens", id, &text, &length));
        added_token_t token = {.content = text, .length = length, .special = special};
        XP_TRY(tokenizer_add_token(tokenizer, &token));
    }
    return XP_OK;
}

static xp_status_t load_merges(tokenizer_t *tokenizer, const gguf_file_t *file)
{
    static const char key[] = "tokenizer.ggml.merges";
    size_t count;
    xp_status_t status = gguf_array_count(file, key, &count);
    if (status != XP_OK)
        return xp_fail_context(status, "a \"gpt2\" tokenizer needs %s", key);
    if (count > TEXT_MAX_TOKENS)
        return xp_fail(XP_INVALID, "%s: %zu merges; at most %u", key, count, TEXT_MAX_TOKENS);
    char *joined = malloc(2 * TEXT_MAX_TOKEN_BYTES);
    if (!joined)
        return xp_fail(XP_NO_MEMORY, "no memory for %zu merges", count);
    XP_TRY_GOTO(status, done, bpe_init_merges(&tokenizer->bpe, count));
    for (size_t i = 0; i < count; i++) {
        const char *text;
        size_t length;
        XP_TRY_GOTO(status, done, gguf_array_string(file, key, i, &text, &length));
        /* A token may itself hold spaces, so the separator is the one behind the first byte. */
        const char *space = length > 1 ? memchr(text + 1, ' ', length - 1) : NULL;
        int32_t left = -1, right = -1, id = -1;
        if (space && length < 2 * TEXT_MAX_TOKEN_BYTES) {
            size_t left_length = (size_t)(space - text), right_length = length - left_length - 1;
            left = text_map_get(&tokenizer->map, text, left_length);
            right = text_map_get(&tokenizer->map, space + 1, right_length);
            memcpy(joined, text, left_length);
            memcpy(joined + left_length, space + 1, right_length);
            id = text_map_get(&tokenizer->map, joined, left_length + right_length);
        }
        if (left < 0 || right < 0 || id < 0) {
            status = xp_fail(XP_INVALID, "%s[%zu] \"%.*s\" names no tokens of the vocabulary", key,
                             i, (int)(length < 64 ? length : 64), text);
            goto done;
        }
        XP_TRY_GOTO(status, done, bpe_add_merge(&tokenizer->bpe, left, right, (uint32_t)i, id));
    }
done:
    free(joined);
    return status;
}

static int compare_doubles_down(const void *a, const void *b)
{
    double left = *(const double *)a, right = *(const double *)b;
    return (left < right) - (left > right);
}

/* The place of each score among all of them, best first; equal scores share a place. */
static xp_status_t load_scores(tokenizer_t *tokenizer, const gguf_file_t *file, size_t count,
                               size_t types)
{
    static const char key[] = "tokenizer.ggml.scores";
    size_t scores;
    xp_status_t status = gguf_array_count(file, key, &scores);
    if (status != XP_OK)
        return xp_fail_context(status, "a \"llama\" tokenizer needs %s", key);
    if (scores != count)
        return xp_fail(XP_INVALID, "%s: %zu scores for %zu tokens", key, scores, count);
    double *sorted = calloc(count + 1, sizeof(*sorted));
    uint32_t *ranks = calloc(tokenizer->token_count + 1, sizeof(*ranks));
    if (!sorted || !ranks) {
        status = xp_fail(XP_NO_MEMORY, "no memory for %zu scores", count);
        goto fail;
    }
    for (size_t id = 0; id < count; id++) {
        XP_TRY_GOTO(status, fail, gguf_array_f64(file, key, id, &sorted[id]));
        if (isnan(sorted[id])) {
            status = xp_fail(XP_INVALID, "%s[%zu] is not a number", key, id);
            goto fail;
        }
    }
    qsort(sorted, count, sizeof(*sorted), compare_doubles_down);
    for (size_t id = 0; id < count; id++) {
        double score;
        int kind;
        XP_TRY_GOTO(status, fail, gguf_array_f64(file, key, id, &score));
        XP_TRY_GOTO(status, fail, token_kind(file, types, id, &kind));
        size_t low = 0, high = count;
        while (low < high) {
            size_t middle = (low + high) / 2;
            if (sorted[middle] > score)
                low = middle + 1;
            else
                high = middle;
        }
        /* Text never becomes a control token or a byte token by merging. */
        bool merges = kind == GGUF_NORMAL || kind == GGUF_USER;
        ranks[id] = merges ? (uint32_t)low : UINT32_MAX;
    }
    for (size_t id = count; id <= tokenizer->token_count; id++)
        ranks[id] = UINT32_MAX;
    free(sorted);
    tokenizer->bpe.ranks = ranks;
    return XP_OK;
fail:
    free(sorted);
    free(ranks);
    return status;
}

static xp_status_t add_replace(tokenizer_t *tokenizer)
{
    normalizer_t *normalizer = &tokenizer->normalizers[tokenizer->normalizer_count];
    *normalizer =
        (normalizer_t){.kind = NORMALIZER_REPLACE, .content = "\u2581", .content_length = 3};
    XP_TRY(text_regex_create(" ", 1, true, &normalizer->regex));
    tokenizer->normalizer_count++;
    return XP_OK;
}

static xp_status_t build_llama(tokenizer_t *tokenizer, const gguf_file_t *file, size_t count,
                               size_t types, bool *bos)
{
    bool prefix = true;
    int64_t unk = -1;
    decoder_t *decoder = &tokenizer->decoder;
    *bos = true;
    XP_TRY(optional_bool(file, "tokenizer.ggml.add_space_prefix", &prefix));
    XP_TRY(optional_id(file, "tokenizer.ggml.unknown_token_id", &unk));
    XP_TRY(load_scores(tokenizer, file, count, types));
    tokenizer->bpe.unk = unk < (int64_t)count ? (int32_t)unk : -1;
    tokenizer->bpe.byte_fallback = tokenizer->bpe.fuse_unk = true;
    if (prefix)
        tokenizer->normalizers[tokenizer->normalizer_count++] =
            (normalizer_t){.kind = NORMALIZER_PREPEND, .content = "\u2581", .content_length = 3};
    XP_TRY(add_replace(tokenizer));
    decoder_stage_t *stage = &decoder->stages[0];
    *stage = (decoder_stage_t){.kind = DECODER_REPLACE, .content = " ", .content_length = 1};
    XP_TRY(text_regex_create("\u2581", 3, true, &stage->regex));
    decoder->stage_count = 1;
    decoder->byte_fallback = true;
    if (prefix) {
        decoder->strip = 1;
        memcpy(decoder->strip_text, " ", 2);
    }
    return XP_OK;
}

static xp_status_t build_gpt2(tokenizer_t *tokenizer, const gguf_file_t *file, bool *bos)
{
    const char *pre = "default";
    size_t length = strlen(pre);
    xp_status_t status = gguf_get_string(file, "tokenizer.ggml.pre", &pre, &length);
    if (status != XP_OK && status != XP_NOT_FOUND)
        return status;
    XP_TRY(load_merges(tokenizer, file));
    XP_TRY(add_pre(tokenizer, pre, length, bos));
    tokenizer->decoder.stages[0] = (decoder_stage_t){.kind = DECODER_BYTE_LEVEL};
    tokenizer->decoder.stage_count = 1;
    tokenizer->decoder.lossy = true;
    return XP_OK;
}

static xp_status_t add_ends(tokenizer_t *tokenizer, const gguf_file_t *file, bool bos)
{
    bool eos = false;
    int64_t bos_id = -1, eos_id = -1;
    XP_TRY(optional_bool(file, "tokenizer.ggml.add_bos_token", &bos));
    XP_TRY(optional_bool(file, "tokenizer.ggml.add_eos_token", &eos));
    XP_TRY(optional_id(file, "tokenizer.ggml.bos_token_id", &bos_id));
    XP_TRY(optional_id(file, "tokenizer.ggml.eos_token_id", &eos_id));
    if (bos && bos_id >= 0)
        tokenizer->prefix[tokenizer->prefix_count++] = (int32_t)bos_id;
    if (eos && eos_id >= 0)
        tokenizer->suffix[tokenizer->suffix_count++] = (int32_t)eos_id;
    return XP_OK;
}

xp_status_t tokenizer_build_gguf(const gguf_file_t *file, tokenizer_t **tokenizer_out)
{
    const char *model;
    size_t length, count, types = 0;
    bool bos = false;
    XP_TRY(gguf_get_string(file, "tokenizer.ggml.model", &model, &length));
    bool gpt2 = length == 4 && !memcmp(model, "gpt2", 4);
    if (!gpt2 && !(length == 5 && !memcmp(model, "llama", 5)))
        return xp_fail(XP_UNSUPPORTED, "tokenizer.ggml.model \"%.*s\" is not supported",
                       (int)(length < 64 ? length : 64), model);
    XP_TRY(gguf_array_count(file, "tokenizer.ggml.tokens", &count));
    if (!count || count > TEXT_MAX_TOKENS)
        return xp_fail(XP_INVALID, "tokenizer.ggml.tokens: %zu tokens, 1..%u are allowed", count,
                       TEXT_MAX_TOKENS);
    xp_status_t status = gguf_array_count(file, "tokenizer.ggml.token_type", &types);
    if (status != XP_OK && status != XP_NOT_FOUND)
        return status;
    if (types > count)
        types = count;
    tokenizer_t *tokenizer = tokenizer_new(count);
    if (!tokenizer)
        return XP_NO_MEMORY;
    XP_TRY_GOTO(status, fail, load_tokens(tokenizer, file, count, types));
    XP_TRY_GOTO(status, fail,
                gpt2 ? build_gpt2(tokenizer, file, &bos)
                     : build_llama(tokenizer, file, count, types, &bos));
    XP_TRY_GOTO(status, fail, add_ends(tokenizer, file, bos));
    XP_TRY_GOTO(status, fail, tokenizer_finish(tokenizer));
    *tokenizer_out = tokenizer;
    return XP_OK;
fail:
    tokenizer_destroy(tokenizer);
    return status;
}

xp_status_t tokenizer_load_gguf(const char *path, tokenizer_t **tokenizer_out)
{
    gguf_file_t *file;
    XP_TRY(gguf_open(path, &file));
    xp_status_t status = tokenizer_build_gguf(file, tokenizer_out);
    gguf_close(file);
    return status == XP_OK ? XP_OK : xp_fail_context(status, "%s", path);
}
