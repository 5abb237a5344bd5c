/* SPDX-License-Identifier: MIT */
/*
 * Decoding: ids to text. decoder_prepare() runs at load and turns every token into its bytes, so
 * that pushing a token into a stream copies bytes and allocates nothing but what the caller's
 * buffer grows. tokenizer_decode() is the same path over many tokens. A stream belongs to its
 * caller.
 */
#include "text/internal.h"

#include <stdlib.h>
#include <string.h>

#define STRIP_OVER UINT8_MAX

/* ---- at load: each token's own bytes ---- */

static xp_status_t strip_ends(const decoder_stage_t *stage, const char *text, size_t length,
                              xp_buf_t *out)
{
    size_t size = strlen(stage->character), start = 0;
    for (uint32_t i = 0; i < stage->start && length - start >= size; i++) {
        if (memcmp(text + start, stage->character, size) != 0)
            break;
        start += size;
    }
    for (uint32_t i = 0; i < stage->stop && length - start >= size; i++) {
        if (memcmp(text + length - size, stage->character, size) != 0)
            break;
        length -= size;
    }
    return xp_buf_append(out, text + start, length - start);
}

static xp_status_t metaspace(const decoder_stage_t *stage, bool first, const char *text,
                             size_t length, xp_buf_t *out)
{
    size_t size = strlen(stage->character);
    for (size_t at = 0, step; at < length; at += step) {
        text_utf8_decode(text + at, &step);
        if (step != size || memcmp(text + at, stage->character, size) != 0)
            XP_TRY(xp_buf_append(out, text + at, step));
        else if (!first || !stage->drop_first)
            XP_TRY(xp_buf_append(out, " ", 1));
    }
    return XP_OK;
}

static xp_status_t letters_to_bytes(const char *text, size_t length, xp_buf_t *out)
{
    size_t before = out->length;
    for (size_t at = 0, step; at < length; at += step) {
        int byte = text_letter_to_byte(text_utf8_decode(text + at, &step));
        if (byte < 0) { /* one foreign character, and the token stands for its own text */
            out->length = before;
            return xp_buf_append(out, text, length);
        }
        char raw = (char)byte;
        XP_TRY(xp_buf_append(out, &raw, 1));
    }
    return XP_OK;
}

static xp_status_t run_stages(const decoder_t *decoder, text_matcher_t *matcher, bool first,
                              const token_t *token, xp_buf_t buffers[2], xp_buf_t **result_out)
{
    xp_buf_t *source = &buffers[0], *target = &buffers[1];
    xp_buf_clear(source);
    XP_TRY(xp_buf_append(source, token->text, token->length));
    for (size_t i = 0; i < decoder->stage_count; i++) {
        const decoder_stage_t *stage = &decoder->stages[i];
        xp_buf_clear(target);
        XP_TRY(xp_buf_append(target, "", 0));
        switch (stage->kind) {
        case DECODER_REPLACE:
            XP_TRY(text_replace(stage->regex, matcher, source->data, source->length, stage->content,
                                stage->content_length, target));
            break;
        case DECODER_METASPACE:
            XP_TRY(metaspace(stage, first, source->data, source->length, target));
            break;
        case DECODER_STRIP:
            XP_TRY(strip_ends(stage, source->data, source->length, target));
            break;
        case DECODER_BYTE_LEVEL:
            XP_TRY(letters_to_bytes(source->data, source->length, target));
            break;
        }
        xp_buf_t *swap = source;
        source = target;
        target = swap;
    }
    *result_out = source;
    return XP_OK;
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

/* The byte that "<0xHH>" stands for, or -1. */
static int byte_of(const char *text, size_t length)
{
    if (length != 6 || memcmp(text, "<0x", 3) != 0 || text[5] != '>')
        return -1;
    int high = hex_digit(text[3]), low = hex_digit(text[4]);
    return high < 0 || low < 0 ? -1 : high * 16 + low;
}

static xp_status_t prepare_token(tokenizer_t *tokenizer, text_matcher_t *matcher, token_t *token,
                                 xp_buf_t buffers[2])
{
    const decoder_t *decoder = &tokenizer->decoder;
    xp_buf_t *result;
    XP_TRY(run_stages(decoder, matcher, false, token, buffers, &result));
    int byte = decoder->byte_fallback ? byte_of(result->data, result->length) : -1;
    if (byte >= 0) {
        char raw = (char)byte;
        token->flags |= TOKEN_BYTE;
        token->bytes_length = token->first_length = 1;
        XP_TRY(tokenizer_copy(tokenizer, &raw, 1, &token->bytes));
        token->first = token->bytes;
        return XP_OK;
    }
    token->bytes_length = token->first_length = (uint32_t)result->length;
    if (result->length == token->length && !memcmp(result->data, token->text, token->length))
        token->bytes = token->text;
    else
        XP_TRY(tokenizer_copy(tokenizer, result->data, result->length, &token->bytes));
    token->first = token->bytes;
    if (decoder->first_differs) {
        XP_TRY(run_stages(decoder, matcher, true, token, buffers, &result));
        token->first_length = (uint32_t)result->length;
        XP_TRY(tokenizer_copy(tokenizer, result->data, result->length, &token->first));
    }
    return XP_OK;
}

xp_status_t decoder_prepare(tokenizer_t *tokenizer)
{
    decoder_t *decoder = &tokenizer->decoder;
    xp_status_t status = XP_OK;
    xp_buf_t buffers[2];
    text_matcher_t *matcher = NULL;
    xp_buf_init(&buffers[0], TEXT_MAX_EXPANDED_BYTES);
    xp_buf_init(&buffers[1], TEXT_MAX_EXPANDED_BYTES);
    for (size_t i = 0; i < decoder->stage_count; i++)
        decoder->first_differs |= decoder->stages[i].drop_first;
    XP_TRY_GOTO(status, done, text_matcher_create(&matcher));
    for (uint32_t id = 0; id < tokenizer->token_count; id++) {
        token_t *token = &tokenizer->tokens[id];
        token->bytes = token->first = "";
        if (token->flags & TOKEN_PRESENT)
            XP_TRY_GOTO(status, done, prepare_token(tokenizer, matcher, token, buffers));
    }
done:
    text_matcher_destroy(matcher);
    xp_buf_fini(&buffers[0]);
    xp_buf_fini(&buffers[1]);
    return status;
}

/* ---- streams ---- */

void tokenizer_stream_init(tokenizer_stream_t *stream, const tokenizer_t *tokenizer,
                           bool skip_special_tokens)
{
    *stream =
        (tokenizer_stream_t){.tokenizer = tokenizer, .skip_special_tokens = skip_special_tokens};
}

/* Appends text in its final form but for stripping the beginning of all text. */
static xp_status_t put(tokenizer_stream_t *stream, const char *text, size_t length, xp_buf_t *out)
{
    const decoder_t *decoder = &stream->tokenizer->decoder;
    if (decoder->strip && stream->stripped != STRIP_OVER && length) {
        size_t size = strlen(decoder->strip_text);
        while (stream->stripped < decoder->strip && length >= size &&
               !memcmp(text, decoder->strip_text, size)) {
            stream->stripped++;
            text += size;
            length -= size;
        }
        if (length)
            stream->stripped = STRIP_OVER;
    }
    return xp_buf_append(out, text, length);
}

/* Byte-level text: whole characters are given out, the begin of one is held (at most three bytes).
 */
static xp_status_t push_lossy(tokenizer_stream_t *stream, const char *bytes, size_t length,
                              xp_buf_t *out)
{
    size_t step;
    while (stream->held_count && length) {
        stream->held[stream->held_count++] = *bytes++;
        length--;
        text_step_t kind = text_utf8_step(stream->held, stream->held_count, &step);
        if (kind == TEXT_STEP_INCOMPLETE)
            continue;
        if (kind == TEXT_STEP_VALID) {
            XP_TRY(put(stream, stream->held, step, out));
        } else {
            /* The byte that broke the character may begin the next one. */
            bytes--;
            length++;
            XP_TRY(put(stream, TEXT_REPLACEMENT, 3, out));
        }
        stream->held_count = 0;
    }
    size_t good = 0;
    for (size_t at = 0; at < length; at += step) {
        text_step_t kind = text_utf8_step(bytes + at, length - at, &step);
        if (kind == TEXT_STEP_VALID)
            continue;
        XP_TRY(put(stream, bytes + good, at - good, out));
        if (kind == TEXT_STEP_INCOMPLETE) {
            stream->held_count = (uint8_t)(length - at);
            memcpy(stream->held, bytes + at, length - at);
            return XP_OK;
        }
        XP_TRY(put(stream, TEXT_REPLACEMENT, 3, out));
        good = at + step;
    }
    return good < length ? put(stream, bytes + good, length - good, out) : XP_OK;
}

/* How far `held` is whole characters; false when some part of it can never become valid. */
static bool run_is_sound(const tokenizer_stream_t *stream, size_t *whole_out)
{
    size_t at = 0, step;
    for (; at < stream->held_count; at += step) {
        text_step_t kind = text_utf8_step(stream->held + at, stream->held_count - at, &step);
        if (kind == TEXT_STEP_INCOMPLETE)
            break;
        if (kind == TEXT_STEP_INVALID)
            return false;
    }
    *whole_out = at;
    return true;
}

static xp_status_t put_replacements(tokenizer_stream_t *stream, size_t count, xp_buf_t *out)
{
    for (size_t i = 0; i < count; i++)
        XP_TRY(put(stream, TEXT_REPLACEMENT, 3, out));
    return XP_OK;
}

/* Byte fallback: a run of byte tokens is text if all of it is valid, else one U+FFFD for each byte.
 */
static xp_status_t push_byte(tokenizer_stream_t *stream, char byte, xp_buf_t *out)
{
    size_t whole;
    if (stream->spoiled)
        return put_replacements(stream, 1, out);
    stream->held[stream->held_count++] = byte;
    if (!run_is_sound(stream, &whole)) {
        stream->spoiled = true;
        XP_TRY(put_replacements(stream, stream->held_count, out));
        stream->held_count = 0;
    } else if (stream->held_count == TOKENIZER_STREAM_HELD) {
        XP_TRY(put(stream, stream->held, whole, out));
        stream->held_count -= (uint8_t)whole;
        memmove(stream->held, stream->held + whole, stream->held_count);
    }
    return XP_OK;
}

static xp_status_t end_run(tokenizer_stream_t *stream, xp_buf_t *out)
{
    size_t whole = 0, held = stream->held_count;
    bool sound = run_is_sound(stream, &whole) && whole == held;
    stream->spoiled = false;
    stream->held_count = 0;
    return sound ? put(stream, stream->held, held, out) : put_replacements(stream, held, out);
}

/* NULL, recorded, when the id is no token. `*skip_out`: it is special and not wanted. */
static const token_t *token_for(const tokenizer_stream_t *stream, int32_t id, bool *skip_out)
{
    const tokenizer_t *tokenizer = stream->tokenizer;
    if (id < 0 || (uint32_t)id >= tokenizer->token_count ||
        !(tokenizer->tokens[id].flags & TOKEN_PRESENT)) {
        xp_fail(XP_INVALID, "token id %d does not exist (ids are below %u)", id,
                tokenizer->token_count);
        return NULL;
    }
    const token_t *token = &tokenizer->tokens[id];
    *skip_out = stream->skip_special_tokens && token->flags & TOKEN_SPECIAL;
    return token;
}

static xp_status_t push_token(tokenizer_stream_t *stream, const token_t *token, xp_buf_t *out)
{
    const decoder_t *decoder = &stream->tokenizer->decoder;
    bool first = !stream->started;
    stream->started = true;
    if (token->flags & TOKEN_BYTE)
        return push_byte(stream, token->bytes[0], out);
    if (decoder->byte_fallback && (stream->held_count || stream->spoiled))
        XP_TRY(end_run(stream, out));
    if (decoder->join && !first)
        XP_TRY(put(stream, " ", 1, out));
    const char *bytes = first ? token->first : token->bytes;
    size_t length = first ? token->first_length : token->bytes_length;
    return decoder->lossy ? push_lossy(stream, bytes, length, out)
                          : put(stream, bytes, length, out);
}

xp_status_t tokenizer_stream_push(tokenizer_stream_t *stream, int32_t id, xp_buf_t *text_out)
{
    bool skip;
    const token_t *token = token_for(stream, id, &skip);
    if (!token)
        return XP_INVALID;
    return skip ? XP_OK : push_token(stream, token, text_out);
}

xp_status_t tokenizer_stream_finish(tokenizer_stream_t *stream, xp_buf_t *text_out)
{
    if (stream->tokenizer->decoder.byte_fallback)
        return end_run(stream, text_out);
    bool held = stream->held_count > 0;
    stream->held_count = 0;
    return held ? put(stream, TEXT_REPLACEMENT, 3, text_out) : XP_OK;
}

/* ---- all at once ---- */

/* The run of byte tokens from ids[at] on, which may be longer than a stream can hold. */
static xp_status_t decode_run(tokenizer_stream_t *stream, const int32_t *ids, size_t count,
                              size_t *at, xp_buf_t *run, xp_buf_t *out)
{
    xp_buf_clear(run);
    while (*at < count) {
        bool skip;
        const token_t *token = token_for(stream, ids[*at], &skip);
        if (!token)
            return XP_INVALID;
        if (!skip && !(token->flags & TOKEN_BYTE))
            break;
        if (!skip)
            XP_TRY(xp_buf_append(run, token->bytes, 1));
        ++*at;
    }
    stream->started = true;
    if (text_utf8_valid(run->data, run->length))
        return put(stream, run->data, run->length, out);
    return put_replacements(stream, run->length, out);
}

xp_status_t tokenizer_decode(const tokenizer_t *tokenizer, const int32_t *ids, size_t count,
                             bool skip_special_tokens, xp_buf_t *text_out)
{
    size_t before = text_out->length;
    xp_status_t status = XP_OK;
    tokenizer_stream_t stream;
    xp_buf_t run;
    xp_buf_init(&run, count);
    tokenizer_stream_init(&stream, tokenizer, skip_special_tokens);
    for (size_t at = 0; at < count;) {
        bool skip;
        const token_t *token = token_for(&stream, ids[at], &skip);
        if (!token) {
            status = XP_INVALID;
            goto done;
        }
        if (!skip && token->flags & TOKEN_BYTE) {
            XP_TRY_GOTO(status, done, decode_run(&stream, ids, count, &at, &run, text_out));
            continue;
        }
        if (!skip)
            XP_TRY_GOTO(status, done, push_token(&stream, token, text_out));
        at++;
    }
    status = tokenizer_stream_finish(&stream, text_out);
done:
    if (status != XP_OK && text_out->data) { /* outputs are written only on success */
        text_out->length = before;
        text_out->data[before] = '\0';
    }
    xp_buf_fini(&run);
    return status;
}
