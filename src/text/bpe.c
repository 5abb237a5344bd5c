/* SPDX-License-Identifier: MIT */
/*
 * Byte-pair encoding of one piece: symbols in a linked list, possible merges in a binary heap, so a
 * long piece costs O(n log n). Reads the immutable tokenizer, writes only the caller's scratch.
 *
 * Two ways to rank a merge: by its place in the list of merges, or (SentencePiece) by the score of
 * the token it makes. Ties go to the leftmost pair.
 */
#include "text/internal.h"

#include <stdlib.h>
#include <string.h>

/* ---- table of merges ---- */

static size_t merge_slot(const bpe_t *bpe, int32_t left, int32_t right)
{
    uint64_t key = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    key *= 0x9E3779B97F4A7C15u;
    size_t at = (size_t)(key >> 24) & (bpe->merge_capacity - 1);
    while (bpe->merges[at].left >= 0 &&
           (bpe->merges[at].left != left || bpe->merges[at].right != right))
        at = (at + 1) & (bpe->merge_capacity - 1);
    return at;
}

xp_status_t bpe_init_merges(bpe_t *bpe, size_t expected)
{
    size_t capacity = 64;
    while (capacity < expected * 2)
        capacity *= 2;
    bpe->merges = malloc(capacity * sizeof(*bpe->merges));
    if (!bpe->merges)
        return xp_fail(XP_NO_MEMORY, "no memory for %zu merges", expected);
    for (size_t i = 0; i < capacity; i++)
        bpe->merges[i].left = -1;
    bpe->merge_capacity = capacity;
    return XP_OK;
}

xp_status_t bpe_add_merge(bpe_t *bpe, int32_t left, int32_t right, uint32_t rank, int32_t id)
{
    XP_ASSERT(bpe->merge_count * 2 <= bpe->merge_capacity);
    bpe_merge_t *merge = &bpe->merges[merge_slot(bpe, left, right)];
    if (merge->left < 0)
        bpe->merge_count++;
    *merge = (bpe_merge_t){.left = left, .right = right, .rank = rank, .id = id};
    return XP_OK;
}

void bpe_fini(bpe_t *bpe)
{
    free(bpe->merges);
    free(bpe->ranks);
    bpe->merges = NULL;
    bpe->ranks = NULL;
}

void bpe_scratch_fini(bpe_scratch_t *scratch)
{
    free(scratch->symbols);
    free(scratch->heap);
    xp_buf_fini(&scratch->affixed);
    *scratch = (bpe_scratch_t){0};
}

/* ---- symbols ---- */

static xp_status_t add_symbol(bpe_scratch_t *scratch, int32_t id, size_t start, size_t length)
{
    if (scratch->symbol_count == scratch->symbol_capacity) {
        size_t capacity = scratch->symbol_capacity ? scratch->symbol_capacity * 2 : 256;
        bpe_symbol_t *symbols = realloc(scratch->symbols, capacity * sizeof(*symbols));
        if (!symbols)
            return xp_fail(XP_NO_MEMORY, "no memory for a piece of %zu characters", capacity);
        scratch->symbols = symbols;
        scratch->symbol_capacity = capacity;
    }
    int32_t at = (int32_t)scratch->symbol_count;
    scratch->symbols[scratch->symbol_count++] = (bpe_symbol_t){
        .start = (uint32_t)start,
        .length = (uint32_t)length,
        .id = id,
        .previous = at - 1,
        .next = at + 1, /* the last one is corrected when all are known */
    };
    return XP_OK;
}

static bool before(const bpe_candidate_t *a, const bpe_candidate_t *b)
{
    return a->rank != b->rank ? a->rank < b->rank : a->position < b->position;
}

static xp_status_t heap_push(bpe_scratch_t *scratch, bpe_candidate_t candidate)
{
    if (scratch->heap_count == scratch->heap_capacity) {
        size_t capacity = scratch->heap_capacity ? scratch->heap_capacity * 2 : 256;
        bpe_candidate_t *heap = realloc(scratch->heap, capacity * sizeof(*heap));
        if (!heap)
            return xp_fail(XP_NO_MEMORY, "no memory for %zu merges", capacity);
        scratch->heap = heap;
        scratch->heap_capacity = capacity;
    }
    size_t at = scratch->heap_count++;
    while (at > 0) {
        size_t parent = (at - 1) / 2;
        if (!before(&candidate, &scratch->heap[parent]))
            break;
        scratch->heap[at] = scratch->heap[parent];
        at = parent;
    }
    scratch->heap[at] = candidate;
    return XP_OK;
}

static bpe_candidate_t heap_pop(bpe_scratch_t *scratch)
{
    bpe_candidate_t top = scratch->heap[0], last = scratch->heap[--scratch->heap_count];
    size_t at = 0;
    for (;;) {
        size_t child = at * 2 + 1;
        if (child >= scratch->heap_count)
            break;
        if (child + 1 < scratch->heap_count &&
            before(&scratch->heap[child + 1], &scratch->heap[child]))
            child++;
        if (!before(&scratch->heap[child], &last))
            break;
        scratch->heap[at] = scratch->heap[child];
        at = child;
    }
    if (scratch->heap_count)
        scratch->heap[at] = last;
    return top;
}

/* The merge of two neighbours, if there is one. */
static bool find_merge(const tokenizer_t *tokenizer, const char *piece, const bpe_symbol_t *left,
                       const bpe_symbol_t *right, uint32_t *rank, int32_t *id)
{
    const bpe_t *bpe = &tokenizer->bpe;
    if (bpe->ranks) {
        /* Symbols are whole parts of the piece, so the pair's text is one stretch of it. */
        size_t length = (size_t)left->length + right->length;
        if (length > bpe->longest)
            return false;
        int32_t found = text_map_get(&tokenizer->map, piece + left->start, length);
        if (found < 0 || bpe->ranks[found] == UINT32_MAX)
            return false;
        *rank = bpe->ranks[found];
        *id = found;
        return true;
    }
    const bpe_merge_t *merge = &bpe->merges[merge_slot(bpe, left->id, right->id)];
    if (merge->left < 0)
        return false;
    *rank = merge->rank;
    *id = merge->id;
    return true;
}

static xp_status_t consider(const tokenizer_t *tokenizer, bpe_scratch_t *scratch, const char *piece,
                            int32_t left)
{
    uint32_t rank;
    int32_t id;
    int32_t right = scratch->symbols[left].next;
    if (!find_merge(tokenizer, piece, &scratch->symbols[left], &scratch->symbols[right], &rank,
                    &id))
        return XP_OK;
    return heap_push(scratch,
                     (bpe_candidate_t){.rank = rank, .position = (uint32_t)left, .id = id});
}

static xp_status_t merge_all(const tokenizer_t *tokenizer, bpe_scratch_t *scratch,
                             const char *piece)
{
    bpe_symbol_t *symbols = scratch->symbols;
    scratch->heap_count = 0;
    for (size_t i = 0; i + 1 < scratch->symbol_count; i++)
        XP_TRY(consider(tokenizer, scratch, piece, (int32_t)i));
    /* Every merge removes a symbol and adds at most two candidates: the loop ends. */
    while (scratch->heap_count) {
        bpe_candidate_t top = heap_pop(scratch);
        bpe_symbol_t *left = &symbols[top.position];
        if (!left->length || left->next < 0)
            continue;
        bpe_symbol_t *right = &symbols[left->next];
        uint32_t rank;
        int32_t id;
        /* The candidate may be of an earlier state of these symbols. */
        if (!find_merge(tokenizer, piece, left, right, &rank, &id) || id != top.id)
            continue;
        left->id = id;
        left->length += right->length;
        right->length = 0;
        left->next = right->next;
        if (right->next >= 0)
            symbols[right->next].previous = (int32_t)top.position;
        if (left->previous >= 0)
            XP_TRY(consider(tokenizer, scratch, piece, left->previous));
        if (left->next >= 0)
            XP_TRY(consider(tokenizer, scratch, piece, (int32_t)top.position));
    }
    return XP_OK;
}

/* ---- one piece ---- */

static xp_status_t character_id(const tokenizer_t *tokenizer, bpe_scratch_t *scratch,
                                const char *piece, size_t at, size_t step, size_t length,
                                int32_t *id_out, const char **text_out, size_t *length_out)
{
    const bpe_t *bpe = &tokenizer->bpe;
    const char *text = piece + at;
    bool prefixed = at > 0 && bpe->prefix[0], suffixed = at + step == length && bpe->suffix[0];
    if (prefixed || suffixed) {
        xp_buf_clear(&scratch->affixed);
        if (prefixed)
            XP_TRY(xp_buf_append_text(&scratch->affixed, bpe->prefix));
        XP_TRY(xp_buf_append(&scratch->affixed, text, step));
        if (suffixed)
            XP_TRY(xp_buf_append_text(&scratch->affixed, bpe->suffix));
        text = scratch->affixed.data;
        step = scratch->affixed.length;
        *id_out = text_map_get(&tokenizer->map, text, step);
    } else {
        size_t decoded;
        uint32_t code_point = text_utf8_decode(text, &decoded);
        *id_out = code_point < 0x180 ? bpe->letters[code_point]
                                     : text_map_get(&tokenizer->map, text, step);
    }
    *text_out = text;
    *length_out = step;
    return XP_OK;
}

/* The library's way for lists of merges: unknown characters become bytes or unk before merging. */
static xp_status_t make_symbols(const tokenizer_t *tokenizer, bpe_scratch_t *scratch,
                                const char *piece, size_t length)
{
    const bpe_t *bpe = &tokenizer->bpe;
    size_t unknown = 0, unknown_start = 0; /* bytes not yet added as unk */
    for (size_t at = 0, step; at < length; at += step) {
        const char *text;
        size_t text_length;
        int32_t id;
        text_utf8_decode(piece + at, &step);
        XP_TRY(character_id(tokenizer, scratch, piece, at, step, length, &id, &text, &text_length));
        if (id >= 0) {
            if (unknown)
                XP_TRY(add_symbol(scratch, bpe->unk, unknown_start, unknown));
            unknown = 0;
            XP_TRY(add_symbol(scratch, id, at, step));
            continue;
        }
        if (bpe->byte_fallback) {
            bool all = true;
            for (size_t i = 0; i < text_length; i++)
                all = all && bpe->bytes[(uint8_t)text[i]] >= 0;
            if (all) {
                /* An unk that waits stays behind these, as it does in the library. */
                for (size_t i = 0; i < text_length; i++)
                    XP_TRY(add_symbol(scratch, bpe->bytes[(uint8_t)text[i]], at, 1));
                continue;
            }
        }
        if (bpe->unk < 0)
            continue; /* without an unk token, unknown characters vanish */
        if (unknown && !bpe->fuse_unk) {
            XP_TRY(add_symbol(scratch, bpe->unk, unknown_start, unknown));
            unknown = 0;
        }
        if (!unknown)
            unknown_start = at;
        unknown += step;
    }
    return unknown ? add_symbol(scratch, bpe->unk, unknown_start, unknown) : XP_OK;
}

/* SentencePiece's way: characters stay text until no merge is left, then what is no token becomes
 * bytes. */
static xp_status_t push_scored(const tokenizer_t *tokenizer, const char *piece,
                               const bpe_symbol_t *symbol, text_ids_t *ids)
{
    const bpe_t *bpe = &tokenizer->bpe;
    if (symbol->id >= 0)
        return text_ids_push(ids, symbol->id);
    for (uint32_t i = 0; i < symbol->length; i++) {
        int32_t id = bpe->bytes[(uint8_t)piece[symbol->start + i]];
        if (id < 0 && i == 0)
            return bpe->unk >= 0 ? text_ids_push(ids, bpe->unk) : XP_OK;
        if (id >= 0)
            XP_TRY(text_ids_push(ids, id));
    }
    return XP_OK;
}

xp_status_t bpe_encode(const tokenizer_t *tokenizer, bpe_scratch_t *scratch, const char *piece,
                       size_t length, text_ids_t *ids)
{
    const bpe_t *bpe = &tokenizer->bpe;
    if (!length)
        return XP_OK;
    if (length > INT32_MAX)
        return xp_fail(XP_INVALID, "a piece of %zu bytes is too long", length);
    if (bpe->ignore_merges) {
        int32_t id = text_map_get(&tokenizer->map, piece, length);
        if (id >= 0)
            return text_ids_push(ids, id);
    }
    scratch->symbol_count = 0;
    if (bpe->ranks) {
        for (size_t at = 0, step; at < length; at += step) {
            text_utf8_decode(piece + at, &step);
            int32_t id = text_map_get(&tokenizer->map, piece + at, step);
            if (id >= 0 && bpe->ranks[id] == UINT32_MAX)
                id = -1;
            XP_TRY(add_symbol(scratch, id, at, step));
        }
    } else {
        XP_TRY(make_symbols(tokenizer, scratch, piece, length));
    }
    if (!scratch->symbol_count)
        return XP_OK;
    scratch->symbols[scratch->symbol_count - 1].next = -1;
    XP_TRY(merge_all(tokenizer, scratch, piece));
    for (int32_t at = 0; at >= 0; at = scratch->symbols[at].next) {
        const bpe_symbol_t *symbol = &scratch->symbols[at];
        XP_TRY(bpe->ranks ? push_scored(tokenizer, piece, symbol, ids)
                          : text_ids_push(ids, symbol->id));
    }
    return XP_OK;
}
