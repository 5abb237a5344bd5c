/* SPDX-License-Identifier: MIT */
/*
 * Finding added tokens in text: at each place the longest one that begins there, from left to
 * right, without overlap. Owns the sorted copy of the tokens; searching writes nothing.
 */
#include "text/internal.h"

#include <stdlib.h>
#include <string.h>

static int compare_tokens(const void *a, const void *b)
{
    const added_token_t *left = a, *right = b;
    size_t shorter = left->length < right->length ? left->length : right->length;
    int order = memcmp(left->content, right->content, shorter);
    if (order)
        return order;
    if (left->length != right->length)
        return left->length < right->length ? -1 : 1;
    return (left->id > right->id) - (left->id < right->id);
}

xp_status_t added_set_init(added_set_t *set, const added_token_t *tokens, size_t count)
{
    if (!count)
        return XP_OK;
    set->tokens = malloc(count * sizeof(*tokens));
    if (!set->tokens)
        return xp_fail(XP_NO_MEMORY, "no memory for %zu added tokens", count);
    for (size_t i = 0; i < count; i++) {
        if (tokens[i].length) /* a normalizer may leave nothing of a token */
            set->tokens[set->count++] = tokens[i];
    }
    qsort(set->tokens, set->count, sizeof(*tokens), compare_tokens);
    size_t at = 0;
    for (unsigned byte = 0; byte < 257; byte++) {
        while (at < set->count && (uint8_t)set->tokens[at].content[0] < byte)
            at++;
        set->first[byte] = (uint32_t)at;
    }
    return XP_OK;
}

/* The longest token that begins at `text`. */
static const added_token_t *longest_at(const added_set_t *set, const char *text, size_t length)
{
    size_t low = set->first[(uint8_t)text[0]], high = set->first[(uint8_t)text[0] + 1];
    const added_token_t *found = NULL;
    /* [low, high) are the tokens that agree with the text in the first `depth` bytes. */
    for (size_t depth = 1; low < high; depth++) {
        while (low < high && set->tokens[low].length == depth)
            found = &set->tokens[low++];
        if (depth == length)
            break;
        uint8_t byte = (uint8_t)text[depth];
        size_t end = high;
        while (low < end) { /* first token whose byte is not smaller */
            size_t middle = (low + end) / 2;
            if ((uint8_t)set->tokens[middle].content[depth] < byte)
                low = middle + 1;
            else
                end = middle;
        }
        size_t begin = low;
        end = high;
        while (begin < end) { /* first token whose byte is larger */
            size_t middle = (begin + end) / 2;
            if ((uint8_t)set->tokens[middle].content[depth] <= byte)
                begin = middle + 1;
            else
                end = middle;
        }
        high = begin;
    }
    return found;
}

static bool stands_alone(const char *text, size_t length, size_t start, size_t end)
{
    size_t step;
    if (start > 0 && text_is_word(text_utf8_decode_before(text, text + start, &step)))
        return false;
    return end == length || !text_is_word(text_utf8_decode(text + end, &step));
}

xp_status_t added_set_split(const added_set_t *set, const char *text, size_t length,
                            bool parse_special, added_emit_t emit, void *context)
{
    size_t done = 0; /* everything before has been handed on */
    for (size_t at = 0; set->count && at < length;) {
        const added_token_t *token = NULL;
        if (set->first[(uint8_t)text[at]] != set->first[(uint8_t)text[at] + 1])
            token = longest_at(set, text + at, length - at);
        if (!token) {
            at++;
            continue;
        }
        size_t start = at, end = at + token->length, step;
        at = end;
        if (token->special && !parse_special)
            continue;
        if (token->single_word && !stands_alone(text, length, start, end))
            continue;
        if (token->lstrip) {
            while (start > done &&
                   text_is_space(text_utf8_decode_before(text, text + start, &step)))
                start -= step;
        }
        if (token->rstrip) {
            while (end < length && text_is_space(text_utf8_decode(text + end, &step)))
                end += step;
        }
        if (start < done)
            start = done; /* the white space in front went to the token before */
        if (start > done)
            XP_TRY(emit(context, text + done, start - done, done, NULL));
        XP_TRY(emit(context, text + start, end - start, start, token));
        if (end > done)
            done = end;
    }
    return done < length ? emit(context, text + done, length - done, done, NULL) : XP_OK;
}
