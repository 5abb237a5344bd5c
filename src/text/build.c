/* SPDX-License-Identifier: MIT */
/*
 * Building a tokenizer: what both loaders (tokenizer.json, GGUF) share. Runs once, on the loading
 * thread; afterwards the tokenizer is immutable.
 */
#include "text/internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

tokenizer_t *tokenizer_new(size_t expected_tokens)
{
    tokenizer_t *tokenizer = calloc(1, sizeof(*tokenizer));
    if (!tokenizer) {
        xp_fail(XP_NO_MEMORY, "no memory for a tokenizer");
        return NULL;
    }
    tokenizer->bpe.unk = -1;
    tokenizer->bpe.prefix = tokenizer->bpe.suffix = "";
    if (text_map_init(&tokenizer->map, expected_tokens) != XP_OK ||
        text_map_init(&tokenizer->added_map, 64) != XP_OK) {
        tokenizer_destroy(tokenizer);
        return NULL;
    }
    return tokenizer;
}

void tokenizer_destroy(tokenizer_t *tokenizer)
{
    if (!tokenizer)
        return;
    for (size_t i = 0; i < tokenizer->normalizer_count; i++)
        text_regex_destroy(tokenizer->normalizers[i].regex);
    for (size_t i = 0; i < tokenizer->pretokenizer_count; i++)
        text_regex_destroy(tokenizer->pretokenizers[i].regex);
    for (size_t i = 0; i < tokenizer->decoder.stage_count; i++)
        text_regex_destroy(tokenizer->decoder.stages[i].regex);
    bpe_fini(&tokenizer->bpe);
    text_map_fini(&tokenizer->map);
    text_map_fini(&tokenizer->added_map);
    free(tokenizer->raw.tokens);
    free(tokenizer->normal.tokens);
    free(tokenizer->added);
    free(tokenizer->tokens);
    text_arena_fini(&tokenizer->arena);
    free(tokenizer);
}

xp_status_t tokenizer_copy(tokenizer_t *tokenizer, const char *text, size_t length,
                           const char **copy_out)
{
    char *copy = text_arena_take(&tokenizer->arena, length + 1);
    if (!copy)
        return xp_fail(XP_NO_MEMORY, "no memory for the vocabulary");
    if (length)
        memcpy(copy, text, length);
    copy[length] = '\0';
    *copy_out = copy;
    return XP_OK;
}

/* Makes room for `id` and returns its slot. */
static xp_status_t token_slot(tokenizer_t *tokenizer, int64_t id, token_t **slot_out)
{
    if (id < 0 || id >= TEXT_MAX_TOKENS)
        return xp_fail(XP_INVALID, "token id %lld is outside 0..%u", (long long)id,
                       TEXT_MAX_TOKENS - 1);
    if ((uint64_t)id >= tokenizer->token_capacity) {
        uint32_t capacity = tokenizer->token_capacity ? tokenizer->token_capacity : 1024;
        while (capacity <= (uint64_t)id)
            capacity *= 2;
        token_t *tokens = realloc(tokenizer->tokens, capacity * sizeof(*tokens));
        if (!tokens)
            return xp_fail(XP_NO_MEMORY, "no memory for %u tokens", capacity);
        memset(tokens + tokenizer->token_capacity, 0,
               (capacity - tokenizer->token_capacity) * sizeof(*tokens));
        tokenizer->tokens = tokens;
        tokenizer->token_capacity = capacity;
    }
    if ((uint64_t)id >= tokenizer->token_count)
        tokenizer->token_count = (uint32_t)id + 1;
    *slot_out = &tokenizer->tokens[id];
    return XP_OK;
}

static xp_status_t check_token(const char *text, size_t length)
{
    if (length > TEXT_MAX_TOKEN_BYTES)
        return xp_fail(XP_INVALID, "a token of %zu bytes; at most %u", length,
                       TEXT_MAX_TOKEN_BYTES);
    if (!text_utf8_valid(text, length))
        return xp_fail(XP_INVALID, "a token is not valid UTF-8");
    return XP_OK;
}

xp_status_t tokenizer_add_model_token(tokenizer_t *tokenizer, const char *text, size_t length,
                                      int64_t id)
{
    token_t *token = NULL;
    const char *copy = "";
    XP_TRY(check_token(text, length));
    XP_TRY(tokenizer_copy(tokenizer, text, length, &copy));
    XP_TRY(token_slot(tokenizer, id, &token));
    XP_TRY(text_map_put(&tokenizer->map, copy, length, (int32_t)id));
    token->text = copy;
    token->length = (uint32_t)length;
    token->flags |= TOKEN_PRESENT;
    if (length > tokenizer->bpe.longest)
        tokenizer->bpe.longest = (uint32_t)length;
    return XP_OK;
}

xp_status_t tokenizer_add_token(tokenizer_t *tokenizer, const added_token_t *added)
{
    XP_TRY(check_token(added->content, added->length));
    if (!added->length)
        return XP_OK;
    int64_t id = text_map_get(&tokenizer->added_map, added->content, added->length);
    if (id < 0)
        id = text_map_get(&tokenizer->map, added->content, added->length);
    if (id < 0) {
        id = tokenizer->model_count;
        if (tokenizer->added_count && tokenizer->added_highest >= id)
            id = (int64_t)tokenizer->added_highest + 1;
    }
    if (tokenizer->added_count == tokenizer->added_capacity) {
        size_t capacity = tokenizer->added_capacity ? tokenizer->added_capacity * 2 : 32;
        added_token_t *tokens = realloc(tokenizer->added, capacity * sizeof(*tokens));
        if (!tokens)
            return xp_fail(XP_NO_MEMORY, "no memory for %zu added tokens", capacity);
        tokenizer->added = tokens;
        tokenizer->added_capacity = capacity;
    }
    added_token_t copy = *added;
    token_t *token = NULL;
    XP_TRY(tokenizer_copy(tokenizer, added->content, added->length, &copy.content));
    XP_TRY(token_slot(tokenizer, id, &token));
    XP_TRY(text_map_put(&tokenizer->added_map, copy.content, copy.length, (int32_t)id));
    copy.id = (int32_t)id;
    if (copy.id > tokenizer->added_highest)
        tokenizer->added_highest = copy.id;
    tokenizer->added[tokenizer->added_count++] = copy;
    token->text = copy.content;
    token->length = (uint32_t)copy.length;
    token->flags |= TOKEN_PRESENT | TOKEN_ADDED | (copy.special ? TOKEN_SPECIAL : 0);
    return XP_OK;
}

static xp_status_t sort_added(tokenizer_t *tokenizer)
{
    xp_status_t status = XP_OK;
    size_t count = tokenizer->added_count, raw_count = 0, normal_count = 0;
    added_token_t *raw = calloc(count + 1, sizeof(*raw)), *normal = calloc(count + 1, sizeof(*raw));
    text_matcher_t *matcher = NULL;
    xp_buf_t buffer;
    xp_buf_init(&buffer, TEXT_MAX_EXPANDED_BYTES);
    if (!raw || !normal) {
        status = xp_fail(XP_NO_MEMORY, "no memory for %zu added tokens", count);
        goto done;
    }
    XP_TRY_GOTO(status, done, text_matcher_create(&matcher));
    for (size_t i = 0; i < count; i++) {
        added_token_t token = tokenizer->added[i];
        bool lost;
        if (!token.normalized) {
            raw[raw_count++] = token;
            continue;
        }
        /* Normalized text is searched for normalized tokens. */
        xp_buf_clear(&buffer);
        XP_TRY_GOTO(
            status, done,
            tokenizer_normalize(tokenizer, matcher, token.content, token.length, &lost, &buffer));
        XP_TRY_GOTO(status, done,
                    tokenizer_copy(tokenizer, buffer.data, buffer.length, &token.content));
        token.length = buffer.length;
        normal[normal_count++] = token;
    }
    XP_TRY_GOTO(status, done, added_set_init(&tokenizer->raw, raw, raw_count));
    status = added_set_init(&tokenizer->normal, normal, normal_count);
done:
    text_matcher_destroy(matcher);
    xp_buf_fini(&buffer);
    free(raw);
    free(normal);
    return status;
}

xp_status_t tokenizer_finish(tokenizer_t *tokenizer)
{
    bpe_t *bpe = &tokenizer->bpe;
    for (unsigned byte = 0; byte < 256; byte++) {
        char name[8];
        snprintf(name, sizeof(name), "<0x%02X>", byte);
        bpe->bytes[byte] = text_map_get(&tokenizer->map, name, 6);
    }
    for (uint32_t letter = 0; letter < 0x180; letter++) {
        char text[4];
        bpe->letters[letter] = text_map_get(&tokenizer->map, text, text_utf8_encode(letter, text));
    }
    for (size_t i = 0; i < tokenizer->normalizer_count; i++)
        tokenizer->needs_matcher |= tokenizer->normalizers[i].regex != NULL;
    for (size_t i = 0; i < tokenizer->pretokenizer_count; i++)
        tokenizer->needs_matcher |= tokenizer->pretokenizers[i].regex != NULL;
    for (size_t i = 0; i < tokenizer->prefix_count + tokenizer->suffix_count; i++) {
        int32_t id = i < tokenizer->prefix_count ? tokenizer->prefix[i]
                                                 : tokenizer->suffix[i - tokenizer->prefix_count];
        if (!tokenizer_token_text(tokenizer, id))
            return xp_fail(XP_INVALID, "special token id %d is not in the vocabulary", id);
    }
    XP_TRY(sort_added(tokenizer));
    return decoder_prepare(tokenizer);
}

uint32_t tokenizer_vocab_size(const tokenizer_t *tokenizer)
{
    return tokenizer->token_count;
}

int32_t tokenizer_token_id(const tokenizer_t *tokenizer, const char *content, size_t length)
{
    int32_t id = text_map_get(&tokenizer->added_map, content, length);
    return id >= 0 ? id : text_map_get(&tokenizer->map, content, length);
}

static const token_t *token_at(const tokenizer_t *tokenizer, int32_t id)
{
    if (id < 0 || (uint32_t)id >= tokenizer->token_count)
        return NULL;
    const token_t *token = &tokenizer->tokens[id];
    return token->flags & TOKEN_PRESENT ? token : NULL;
}

const char *tokenizer_token_text(const tokenizer_t *tokenizer, int32_t id)
{
    const token_t *token = token_at(tokenizer, id);
    return token ? token->text : NULL;
}

bool tokenizer_token_is_special(const tokenizer_t *tokenizer, int32_t id)
{
    const token_t *token = token_at(tokenizer, id);
    return token && token->flags & TOKEN_SPECIAL;
}

size_t tokenizer_token_bytes(const tokenizer_t *tokenizer, int32_t id, const char **bytes_out)
{
    const token_t *token = token_at(tokenizer, id);
    *bytes_out = token ? token->bytes : "";
    return token ? token->bytes_length : 0;
}
