/* SPDX-License-Identifier: MIT */
/* Detokenising and stop strings of one request. Engine thread only. */
#include "engine/text.h"

#include <string.h>

#define FIRST_BYTES 1024u

xp_status_t engine_text_init(engine_text_t *text)
{
    static const char filler[FIRST_BYTES];
    memset(text, 0, sizeof *text);
    xp_buf_init(&text->pending, ENGINE_TEXT_MAX_BYTES);
    XP_TRY(xp_buf_append(&text->pending, filler, FIRST_BYTES));
    xp_buf_clear(&text->pending);
    return XP_OK;
}

void engine_text_fini(engine_text_t *text)
{
    xp_buf_fini(&text->pending);
}

void engine_text_begin(engine_text_t *text, const tokenizer_t *tokenizer,
                       const engine_sampling_t *sampling)
{
    xp_buf_clear(&text->pending);
    text->ready = 0;
    text->has_tokenizer = tokenizer != NULL;
    if (tokenizer)
        tokenizer_stream_init(&text->stream, tokenizer, sampling->skip_special_tokens);
}

/* Earliest match at or after `from`; of several at one place the first in the list. */
static int32_t find_stop(const engine_text_t *text, const engine_sampling_t *sampling, size_t from,
                         size_t *at_out)
{
    int32_t found = -1;
    size_t best = text->pending.length;
    for (uint32_t i = 0; i < sampling->stop_count; i++) {
        const char *match = memmem(text->pending.data + from, text->pending.length - from,
                                   sampling->stops[i], strlen(sampling->stops[i]));
        if (match && (size_t)(match - text->pending.data) < best) {
            best = (size_t)(match - text->pending.data);
            found = (int32_t)i;
        }
    }
    *at_out = best;
    return found;
}

/* First place from which the text could still grow into a stop string. */
static size_t find_hold(const engine_text_t *text, const engine_sampling_t *sampling, size_t from)
{
    const size_t length = text->pending.length;
    size_t hold = length;
    for (uint32_t i = 0; i < sampling->stop_count; i++) {
        size_t stop = strlen(sampling->stops[i]);
        size_t at = length > from + stop - 1 ? length - (stop - 1) : from;
        for (; at < hold; at++)
            if (memcmp(text->pending.data + at, sampling->stops[i], length - at) == 0)
                hold = at;
    }
    return hold;
}

xp_status_t engine_text_push(engine_text_t *text, int32_t token, const engine_sampling_t *sampling,
                             bool check_stops, int32_t *stop_out)
{
    *stop_out = -1;
    if (!text->has_tokenizer)
        return XP_OK;
    XP_TRY(tokenizer_stream_push(&text->stream, token, &text->pending));
    if (!check_stops || sampling->stop_count == 0) {
        text->ready = text->pending.length;
        return XP_OK;
    }
    size_t at;
    int32_t stop = find_stop(text, sampling, text->ready, &at);
    if (stop < 0) {
        text->ready = find_hold(text, sampling, text->ready);
        return XP_OK;
    }
    if (sampling->include_stop)
        at += strlen(sampling->stops[stop]);
    text->pending.length = at;
    text->pending.data[at] = '\0';
    text->ready = at;
    *stop_out = stop;
    return XP_OK;
}

xp_status_t engine_text_finish(engine_text_t *text, bool stopped)
{
    if (stopped || !text->has_tokenizer)
        return XP_OK;
    xp_status_t status = tokenizer_stream_finish(&text->stream, &text->pending);
    text->ready = text->pending.length;
    return status;
}

uint32_t engine_text_take(engine_text_t *text, char *out, size_t size)
{
    size_t length = text->ready;
    if (length > size - 1) {
        length = size - 1;
        while (length > 0 && ((uint8_t)text->pending.data[length] & 0xC0) == 0x80)
            length--;
    }
    if (length > 0) {
        memcpy(out, text->pending.data, length);
        memmove(text->pending.data, text->pending.data + length, text->pending.length - length + 1);
        text->pending.length -= length;
        text->ready -= length;
    }
    out[length] = '\0';
    return (uint32_t)length;
}
