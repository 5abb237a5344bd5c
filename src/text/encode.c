/* SPDX-License-Identifier: MIT */
/*
 * Encoding: text to ids. The order of the `tokenizers` library: added tokens in the raw text, then
 * the normalizers on what lies between, added tokens in the normalized text, pre-tokenizers, model,
 * post- processor. Each call owns its scratch memory; the tokenizer is only read.
 */
#include "text/internal.h"

#include <stdlib.h>
#include <string.h>

typedef struct encoder {
    const tokenizer_t *tokenizer;
    bool parse_special;
    bool at_start; /* the piece in work begins where the text does */
    text_matcher_t *matcher;
    xp_buf_t repaired, normalized;
    pretokenize_context_t pretokenize;
    bpe_scratch_t bpe;
    text_ids_t ids;
} encoder_t;

static xp_status_t encode_piece(void *context, const char *piece, size_t length)
{
    encoder_t *encoder = context;
    return bpe_encode(encoder->tokenizer, &encoder->bpe, piece, length, &encoder->ids);
}

static xp_status_t encode_normalized(void *context, const char *text, size_t length, size_t offset,
                                     const added_token_t *found)
{
    encoder_t *encoder = context;
    if (found)
        return text_ids_push(&encoder->ids, found->id);
    return pretokenize(&encoder->pretokenize, 0, text, length, encoder->at_start && offset == 0);
}

static xp_status_t encode_raw(void *context, const char *text, size_t length, size_t offset,
                              const added_token_t *found)
{
    encoder_t *encoder = context;
    if (found)
        return text_ids_push(&encoder->ids, found->id);
    bool begin_lost = false;
    if (encoder->tokenizer->normalizer_count) {
        xp_buf_clear(&encoder->normalized);
        XP_TRY(tokenizer_normalize(encoder->tokenizer, encoder->matcher, text, length, &begin_lost,
                                   &encoder->normalized));
        text = encoder->normalized.data;
        length = encoder->normalized.length;
    }
    encoder->at_start = offset == 0 && !begin_lost;
    return added_set_split(&encoder->tokenizer->normal, text, length, encoder->parse_special,
                           encode_normalized, encoder);
}

static xp_status_t encoder_init(encoder_t *encoder, const tokenizer_t *tokenizer,
                                bool parse_special)
{
    encoder->tokenizer = tokenizer;
    encoder->parse_special = parse_special;
    xp_buf_init(&encoder->repaired, TEXT_MAX_EXPANDED_BYTES);
    xp_buf_init(&encoder->normalized, TEXT_MAX_EXPANDED_BYTES);
    xp_buf_init(&encoder->bpe.affixed, TEXT_MAX_TOKEN_BYTES * 4);
    encoder->pretokenize.tokenizer = tokenizer;
    encoder->pretokenize.emit = encode_piece;
    encoder->pretokenize.emit_context = encoder;
    for (size_t i = 0; i < TEXT_MAX_STAGES; i++)
        xp_buf_init(&encoder->pretokenize.buffers[i], TEXT_MAX_EXPANDED_BYTES);
    if (tokenizer->needs_matcher)
        XP_TRY(text_matcher_create(&encoder->matcher));
    encoder->pretokenize.matcher = encoder->matcher;
    return XP_OK;
}

static void encoder_fini(encoder_t *encoder)
{
    text_matcher_destroy(encoder->matcher);
    xp_buf_fini(&encoder->repaired);
    xp_buf_fini(&encoder->normalized);
    for (size_t i = 0; i < TEXT_MAX_STAGES; i++)
        xp_buf_fini(&encoder->pretokenize.buffers[i]);
    bpe_scratch_fini(&encoder->bpe);
    free(encoder->ids.data);
}

static xp_status_t push_specials(text_ids_t *ids, const int32_t *specials, size_t count)
{
    for (size_t i = 0; i < count; i++)
        XP_TRY(text_ids_push(ids, specials[i]));
    return XP_OK;
}

xp_status_t tokenizer_encode(const tokenizer_t *tokenizer, const char *text, size_t length,
                             bool add_special_tokens, bool parse_special, int32_t **ids_out,
                             size_t *count_out)
{
    if (length > TOKENIZER_MAX_TEXT_BYTES)
        return xp_fail(XP_INVALID, "a text of %zu bytes is too long to tokenize; at most %u",
                       length, TOKENIZER_MAX_TEXT_BYTES);
    encoder_t *encoder = calloc(1, sizeof(*encoder));
    if (!encoder)
        return xp_fail(XP_NO_MEMORY, "no memory to tokenize");
    xp_status_t status;
    XP_TRY_GOTO(status, done, encoder_init(encoder, tokenizer, parse_special));
    if (!text_utf8_valid(text, length)) {
        XP_TRY_GOTO(status, done, text_utf8_append_lossy(&encoder->repaired, text, length));
        text = encoder->repaired.data;
        length = encoder->repaired.length;
    }
    if (add_special_tokens)
        XP_TRY_GOTO(status, done,
                    push_specials(&encoder->ids, tokenizer->prefix, tokenizer->prefix_count));
    XP_TRY_GOTO(status, done,
                added_set_split(&tokenizer->raw, text, length, parse_special, encode_raw, encoder));
    if (add_special_tokens)
        XP_TRY_GOTO(status, done,
                    push_specials(&encoder->ids, tokenizer->suffix, tokenizer->suffix_count));
    if (!encoder->ids.data) { /* no token at all: still something to free() */
        encoder->ids.data = malloc(sizeof(int32_t));
        if (!encoder->ids.data) {
            status = xp_fail(XP_NO_MEMORY, "no memory to tokenize");
            goto done;
        }
    }
    *ids_out = encoder->ids.data;
    *count_out = encoder->ids.count;
    encoder->ids.data = NULL;
done:
    encoder_fini(encoder);
    free(encoder);
    return status;
}
