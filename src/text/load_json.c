/* SPDX-License-Identifier: MIT */
/*
 * tokenizer.json: the model and the added tokens. Runs on the loading thread; the JSON tree lives
 * only as long as loading does.
 */
#include "text/load_json.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static xp_status_t load_vocab(tokenizer_t *tokenizer, json_t *vocab)
{
    const char *key;
    json_t *value;
    json_object_foreach(vocab, key, value)
    {
        if (!json_is_integer(value))
            return xp_fail(XP_INVALID, "model.vocab: the id of \"%.64s\" must be a whole number",
                           key);
        XP_TRY(tokenizer_add_model_token(tokenizer, key, strlen(key), json_integer_value(value)));
    }
    tokenizer->model_count = (uint32_t)json_object_size(vocab);
    return XP_OK;
}

/* "a b" or ["a", "b"]. */
static xp_status_t split_merge(const json_t *merge, size_t index, const char **left,
                               size_t *left_length, const char **right, size_t *right_length)
{
    if (json_is_string(merge)) {
        const char *text = json_string_value(merge);
        size_t length = json_string_length(merge);
        const char *space = memchr(text, ' ', length);
        if (space && !memchr(space + 1, ' ', length - (size_t)(space + 1 - text))) {
            *left = text;
            *left_length = (size_t)(space - text);
            *right = space + 1;
            *right_length = length - *left_length - 1;
            return XP_OK;
        }
    } else if (json_array_size(merge) == 2) {
        const json_t *first = json_array_get(merge, 0), *second = json_array_get(merge, 1);
        if (json_is_string(first) && json_is_string(second)) {
            *left = json_string_value(first);
            *left_length = json_string_length(first);
            *right = json_string_value(second);
            *right_length = json_string_length(second);
            return XP_OK;
        }
    }
    return xp_fail(XP_INVALID, "model.merges[%zu] must be two tokens", index);
}

static xp_status_t load_merges(tokenizer_t *tokenizer, const json_t *merges)
{
    bpe_t *bpe = &tokenizer->bpe;
    size_t count = json_array_size(merges), prefix = strlen(bpe->prefix);
    char *joined = malloc(2 * TEXT_MAX_TOKEN_BYTES);
    xp_status_t status = XP_OK;
    if (!joined)
        return xp_fail(XP_NO_MEMORY, "no memory for %zu merges", count);
    XP_TRY_GOTO(status, done, bpe_init_merges(bpe, count));
    for (size_t i = 0; i < count; i++) {
        const json_t *merge = json_array_get(merges, i);
        const char *left = "", *right = "";
        size_t left_length = 0, right_length = 0;
        if (json_is_string(merge) && !strncmp(json_string_value(merge), "#version", 8))
            continue;
        XP_TRY_GOTO(status, done,
                    split_merge(merge, i, &left, &left_length, &right, &right_length));
        int32_t left_id = text_map_get(&tokenizer->map, left, left_length);
        int32_t right_id = text_map_get(&tokenizer->map, right, right_length);
        if (left_id < 0 || right_id < 0 || right_length < prefix) {
            status = xp_fail(XP_INVALID, "model.merges[%zu]: \"%.64s\" is not in the vocabulary", i,
                             left_id < 0 ? left : right);
            goto done;
        }
        memcpy(joined, left, left_length);
        memcpy(joined + left_length, right + prefix, right_length - prefix);
        int32_t id = text_map_get(&tokenizer->map, joined, left_length + right_length - prefix);
        if (id < 0) {
            status = xp_fail(XP_INVALID,
                             "model.merges[%zu]: \"%.64s\" with \"%.64s\" is not in the vocabulary",
                             i, left, right);
            goto done;
        }
        XP_TRY_GOTO(status, done, bpe_add_merge(bpe, left_id, right_id, (uint32_t)i, id));
    }
done:
    free(joined);
    return status;
}

static xp_status_t load_model(tokenizer_t *tokenizer, const json_t *model)
{
    bpe_t *bpe = &tokenizer->bpe;
    json_t *vocab = json_object_get(model, "vocab");
    const json_t *merges = json_object_get(model, "merges");
    const json_t *dropout = json_object_get(model, "dropout");
    const char *text = NULL;
    size_t length = 0;
    if (!json_is_object(vocab) || !json_is_array(merges))
        return xp_fail(XP_INVALID, "model: \"vocab\" and \"merges\" are needed");
    if (dropout && !json_is_null(dropout) && json_number_value(dropout) != 0)
        return xp_fail(XP_UNSUPPORTED, "model: dropout is not supported");
    XP_TRY(load_bool(model, "model", "fuse_unk", false, &bpe->fuse_unk));
    XP_TRY(load_bool(model, "model", "byte_fallback", false, &bpe->byte_fallback));
    XP_TRY(load_bool(model, "model", "ignore_merges", false, &bpe->ignore_merges));
    XP_TRY(load_text(model, "model", "continuing_subword_prefix", "", &text, &length));
    XP_TRY(tokenizer_copy(tokenizer, text, length, &bpe->prefix));
    XP_TRY(load_text(model, "model", "end_of_word_suffix", "", &text, &length));
    XP_TRY(tokenizer_copy(tokenizer, text, length, &bpe->suffix));
    if (strlen(bpe->prefix) > TEXT_MAX_TOKEN_BYTES || strlen(bpe->suffix) > TEXT_MAX_TOKEN_BYTES)
        return xp_fail(XP_INVALID, "model: prefix or suffix is too long");
    XP_TRY(load_vocab(tokenizer, vocab));
    XP_TRY(load_text(model, "model", "unk_token", NULL, &text, &length));
    if (text) {
        bpe->unk = text_map_get(&tokenizer->map, text, length);
        if (bpe->unk < 0)
            return xp_fail(XP_INVALID, "model.unk_token \"%.64s\" is not in the vocabulary", text);
    }
    return load_merges(tokenizer, merges);
}

static xp_status_t load_added(tokenizer_t *tokenizer, const json_t *list)
{
    if (!list || json_is_null(list))
        return XP_OK;
    if (!json_is_array(list))
        return xp_fail(XP_INVALID, "added_tokens must be a list");
    if (json_array_size(list) > TEXT_MAX_TOKENS)
        return xp_fail(XP_INVALID, "added_tokens: more than %u", TEXT_MAX_TOKENS);
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *json = json_array_get(list, i);
        added_token_t token = {0};
        char what[48];
        snprintf(what, sizeof(what), "added_tokens[%zu]", i);
        XP_TRY(load_text(json, what, "content", NULL, &token.content, &token.length));
        if (!token.content)
            return xp_fail(XP_INVALID, "%s: \"content\" is missing", what);
        XP_TRY(load_bool(json, what, "special", false, &token.special));
        XP_TRY(load_bool(json, what, "lstrip", false, &token.lstrip));
        XP_TRY(load_bool(json, what, "rstrip", false, &token.rstrip));
        XP_TRY(load_bool(json, what, "single_word", false, &token.single_word));
        XP_TRY(load_bool(json, what, "normalized", !token.special, &token.normalized));
        XP_TRY(tokenizer_add_token(tokenizer, &token));
    }
    return XP_OK;
}

static xp_status_t load_root(const json_t *root, tokenizer_t **tokenizer_out)
{
    const json_t *model = json_object_get(root, "model");
    const json_t *type = json_object_get(model, "type");
    if (!json_is_object(model))
        return xp_fail(XP_INVALID, "\"model\" is missing: this is no tokenizer.json");
    if (type && (!json_is_string(type) || strcmp(json_string_value(type), "BPE") != 0))
        return xp_fail(XP_UNSUPPORTED, "model \"%.64s\" is not supported, only BPE",
                       json_is_string(type) ? json_string_value(type) : "?");
    tokenizer_t *tokenizer = tokenizer_new(json_object_size(json_object_get(model, "vocab")));
    if (!tokenizer)
        return XP_NO_MEMORY;
    xp_status_t status;
    XP_TRY_GOTO(status, fail, load_model(tokenizer, model));
    XP_TRY_GOTO(status, fail, load_normalizer(tokenizer, json_object_get(root, "normalizer"), 0));
    XP_TRY_GOTO(status, fail,
                load_pretokenizer(tokenizer, json_object_get(root, "pre_tokenizer"), 0));
    XP_TRY_GOTO(status, fail,
                load_postprocessor(tokenizer, json_object_get(root, "post_processor"), 0));
    XP_TRY_GOTO(status, fail, load_decoder(tokenizer, json_object_get(root, "decoder")));
    XP_TRY_GOTO(status, fail, load_added(tokenizer, json_object_get(root, "added_tokens")));
    XP_TRY_GOTO(status, fail, tokenizer_finish(tokenizer));
    *tokenizer_out = tokenizer;
    return XP_OK;
fail:
    tokenizer_destroy(tokenizer);
    return status;
}

xp_status_t tokenizer_parse_json(const char *json, size_t length, const char *where,
                                 tokenizer_t **tokenizer_out)
{
    json_error_t error;
    if (length > TEXT_MAX_FILE_BYTES)
        return xp_fail(XP_INVALID, "%s: %zu bytes; at most %u", where, length, TEXT_MAX_FILE_BYTES);
    json_t *root = json_loadb(json, length, JSON_ALLOW_NUL, &error);
    if (!root)
        return xp_fail(XP_INVALID, "%s:%d:%d: %s", where, error.line, error.column, error.text);
    xp_status_t status = load_root(root, tokenizer_out);
    json_decref(root);
    return status == XP_OK ? XP_OK : xp_fail_context(status, "%s", where);
}
