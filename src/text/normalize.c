/* SPDX-License-Identifier: MIT */
/* Normalizers: text in, text out, each into a bounded buffer of the caller's. No state, any thread.
 */
#include "text/internal.h"

#include <string.h>

xp_status_t text_replace(const text_regex_t *regex, text_matcher_t *matcher, const char *text,
                         size_t length, const char *content, size_t content_length, xp_buf_t *out)
{
    text_matches_t matches;
    size_t done = 0, start, end;
    bool found;
    text_matches_init(&matches, regex, matcher, text, length);
    for (;;) {
        XP_TRY(text_matches_next(&matches, &start, &end, &found));
        if (!found)
            break;
        XP_TRY(xp_buf_append(out, text + done, start - done));
        XP_TRY(xp_buf_append(out, content, content_length));
        done = end;
    }
    return xp_buf_append(out, text + done, length - done);
}

static xp_status_t strip(const normalizer_t *normalizer, const char *text, size_t length,
                         xp_buf_t *out)
{
    size_t start = 0, step;
    if (normalizer->left) {
        while (start < length && text_is_space(text_utf8_decode(text + start, &step)))
            start += step;
    }
    if (normalizer->right) {
        while (length > start && text_is_space(text_utf8_decode_before(text, text + length, &step)))
            length -= step;
    }
    return xp_buf_append(out, text + start, length - start);
}

static xp_status_t apply(const normalizer_t *normalizer, text_matcher_t *matcher, const char *text,
                         size_t length, xp_buf_t *out)
{
    switch (normalizer->kind) {
    case NORMALIZER_FORM:
        return text_normalize(normalizer->form, text, length, out);
    case NORMALIZER_LOWERCASE:
        return text_lowercase(text, length, out);
    case NORMALIZER_PREPEND:
        if (length)
            XP_TRY(xp_buf_append(out, normalizer->content, normalizer->content_length));
        return xp_buf_append(out, text, length);
    case NORMALIZER_REPLACE:
        return text_replace(normalizer->regex, matcher, text, length, normalizer->content,
                            normalizer->content_length, out);
    case NORMALIZER_STRIP:
        return strip(normalizer, text, length, out);
    }
    return XP_OK;
}

/* Whether the stage took the text's first character away without putting something in its place. */
static xp_status_t loses_begin(const normalizer_t *normalizer, text_matcher_t *matcher,
                               const char *text, size_t length, bool *loses_out)
{
    size_t start, end;
    bool found = false;
    if (!length)
        return XP_OK;
    if (normalizer->kind == NORMALIZER_STRIP) {
        *loses_out |= normalizer->left && text_is_space(text_utf8_decode(text, &end));
    } else if (normalizer->kind == NORMALIZER_REPLACE && !normalizer->content_length) {
        text_matches_t matches;
        text_matches_init(&matches, normalizer->regex, matcher, text, length);
        XP_TRY(text_matches_next(&matches, &start, &end, &found));
        *loses_out |= found && start == 0 && end > 0;
    }
    return XP_OK;
}

xp_status_t tokenizer_normalize(const tokenizer_t *tokenizer, text_matcher_t *matcher,
                                const char *text, size_t length, bool *begin_lost_out,
                                xp_buf_t *out)
{
    bool lost = false;
    xp_status_t status = XP_OK;
    xp_buf_t buffers[2];
    xp_buf_init(&buffers[0], TEXT_MAX_EXPANDED_BYTES);
    xp_buf_init(&buffers[1], TEXT_MAX_EXPANDED_BYTES);
    for (size_t i = 0; i < tokenizer->normalizer_count; i++) {
        xp_buf_t *target = &buffers[i & 1];
        xp_buf_clear(target);
        XP_TRY_GOTO(status, done,
                    loses_begin(&tokenizer->normalizers[i], matcher, text, length, &lost));
        XP_TRY_GOTO(status, done, apply(&tokenizer->normalizers[i], matcher, text, length, target));
        text = target->data ? target->data : "";
        length = target->length;
    }
    status = xp_buf_append(out, text, length);
    if (status == XP_OK)
        *begin_lost_out = lost;
done:
    xp_buf_fini(&buffers[0]);
    xp_buf_fini(&buffers[1]);
    return status;
}
