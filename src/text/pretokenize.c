/* SPDX-License-Identifier: MIT */
/*
 * Pre-tokenizers: a text goes through the stages depth first, each handing its pieces to the next
 * and the last one to the model, so that memory stays that of the longest piece. Runs on the
 * caller's thread with the caller's buffers.
 */
#include "text/internal.h"

#include <string.h>

static xp_status_t run_stage(pretokenize_context_t *context, size_t stage, const char *text,
                             size_t length, bool at_start);

xp_status_t pretokenize(pretokenize_context_t *context, size_t stage, const char *text,
                        size_t length, bool at_start)
{
    if (!length)
        return XP_OK;
    if (stage == context->tokenizer->pretokenizer_count)
        return context->emit(context->emit_context, text, length);
    return run_stage(context, stage, text, length, at_start);
}

/* ---- joining matches and the text between them as the behaviour says ---- */

typedef struct joiner {
    pretokenize_context_t *context;
    size_t stage;
    const char *text;
    bool at_start;
    split_behavior_t behavior;
    bool pending; /* a piece that may still grow */
    bool last_match;
    size_t start, end;
} joiner_t;

static xp_status_t joiner_pass(joiner_t *joiner, size_t start, size_t end)
{
    return pretokenize(joiner->context, joiner->stage + 1, joiner->text + start, end - start,
                       joiner->at_start && start == 0);
}

static xp_status_t joiner_flush(joiner_t *joiner)
{
    if (!joiner->pending)
        return XP_OK;
    joiner->pending = false;
    return joiner_pass(joiner, joiner->start, joiner->end);
}

static xp_status_t joiner_add(joiner_t *joiner, size_t start, size_t end, bool match)
{
    if (joiner->behavior == SPLIT_ISOLATED)
        return joiner_pass(joiner, start, end);
    if (joiner->behavior == SPLIT_REMOVED)
        return match ? XP_OK : joiner_pass(joiner, start, end);
    bool grows = false;
    if (joiner->behavior == SPLIT_CONTIGUOUS)
        grows = match == joiner->last_match;
    else if (joiner->behavior == SPLIT_PREVIOUS)
        grows = match && !joiner->last_match;
    else /* SPLIT_NEXT: a match waits for text behind it */
        grows = !match && joiner->last_match;
    joiner->last_match = match;
    if (joiner->pending && grows) {
        joiner->end = end;
        return XP_OK;
    }
    XP_TRY(joiner_flush(joiner));
    joiner->pending = true;
    joiner->start = start;
    joiner->end = end;
    return XP_OK;
}

static xp_status_t split_by_regex(joiner_t *joiner, const text_regex_t *regex, bool invert,
                                  size_t length)
{
    text_matches_t matches;
    size_t done = 0, start, end;
    bool found;
    text_matches_init(&matches, regex, joiner->context->matcher, joiner->text, length);
    for (;;) {
        XP_TRY(text_matches_next(&matches, &start, &end, &found));
        if (!found)
            break;
        if (start > done)
            XP_TRY(joiner_add(joiner, done, start, invert));
        XP_TRY(joiner_add(joiner, start, end, !invert));
        done = end;
    }
    if (done < length)
        XP_TRY(joiner_add(joiner, done, length, invert));
    return joiner_flush(joiner);
}

static xp_status_t split_by_class(joiner_t *joiner, bool (*member)(uint32_t), size_t length)
{
    /* Each member is a match of its own, what lies between is one stretch. */
    size_t done = 0;
    for (size_t at = 0, step; at < length; at += step) {
        if (!member(text_utf8_decode(joiner->text + at, &step)))
            continue;
        if (at > done)
            XP_TRY(joiner_add(joiner, done, at, false));
        XP_TRY(joiner_add(joiner, at, at + step, true));
        done = at + step;
    }
    if (done < length)
        XP_TRY(joiner_add(joiner, done, length, false));
    return joiner_flush(joiner);
}

static xp_status_t bytes_to_letters(const char *text, size_t length, xp_buf_t *out)
{
    char chunk[512];
    size_t filled = 0;
    for (size_t i = 0; i < length; i++) {
        filled += text_utf8_encode(text_byte_to_letter((uint8_t)text[i]), chunk + filled);
        if (filled + 4 > sizeof(chunk)) {
            XP_TRY(xp_buf_append(out, chunk, filled));
            filled = 0;
        }
    }
    return xp_buf_append(out, chunk, filled);
}

static xp_status_t metaspace(pretokenize_context_t *context, size_t stage, const char *text,
                             size_t length, bool at_start)
{
    const pretokenizer_t *pretokenizer = &context->tokenizer->pretokenizers[stage];
    xp_buf_t *buffer = &context->buffers[stage];
    size_t mark = strlen(pretokenizer->replacement);
    bool begins =
        text[0] == ' ' || (length >= mark && !memcmp(text, pretokenizer->replacement, mark));
    bool prefix = pretokenizer->scheme == METASPACE_ALWAYS ||
                  (pretokenizer->scheme == METASPACE_FIRST && at_start);
    xp_buf_clear(buffer);
    if (prefix && !begins)
        XP_TRY(xp_buf_append(buffer, pretokenizer->replacement, mark));
    for (size_t done = 0; done < length;) {
        const char *space = memchr(text + done, ' ', length - done);
        size_t end = space ? (size_t)(space - text) : length;
        XP_TRY(xp_buf_append(buffer, text + done, end - done));
        if (space)
            XP_TRY(xp_buf_append(buffer, pretokenizer->replacement, mark));
        done = end + (space ? 1 : 0);
    }
    if (!pretokenizer->split)
        return pretokenize(context, stage + 1, buffer->data, buffer->length, at_start);
    joiner_t joiner = {.context = context,
                       .stage = stage,
                       .text = buffer->data,
                       .at_start = at_start,
                       .behavior = SPLIT_NEXT};
    return split_by_regex(&joiner, pretokenizer->regex, false, buffer->length);
}

static xp_status_t run_stage(pretokenize_context_t *context, size_t stage, const char *text,
                             size_t length, bool at_start)
{
    const pretokenizer_t *pretokenizer = &context->tokenizer->pretokenizers[stage];
    xp_buf_t *buffer = &context->buffers[stage];
    joiner_t joiner = {.context = context,
                       .stage = stage,
                       .text = text,
                       .at_start = at_start,
                       .behavior = pretokenizer->behavior};
    switch (pretokenizer->kind) {
    case PRETOKENIZER_SPLIT:
        return split_by_regex(&joiner, pretokenizer->regex, pretokenizer->invert, length);
    case PRETOKENIZER_CLASS:
        return split_by_class(&joiner, pretokenizer->member, length);
    case PRETOKENIZER_SPACE_PREFIX:
        if (text[0] == ' ')
            return pretokenize(context, stage + 1, text, length, at_start);
        xp_buf_clear(buffer);
        XP_TRY(xp_buf_append(buffer, " ", 1));
        XP_TRY(xp_buf_append(buffer, text, length));
        return pretokenize(context, stage + 1, buffer->data, buffer->length, at_start);
    case PRETOKENIZER_BYTES:
        xp_buf_clear(buffer);
        XP_TRY(bytes_to_letters(text, length, buffer));
        return pretokenize(context, stage + 1, buffer->data, buffer->length, at_start);
    case PRETOKENIZER_METASPACE:
        return metaspace(context, stage, text, length, at_start);
    }
    return XP_OK;
}
