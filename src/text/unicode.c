/* SPDX-License-Identifier: MIT */
/*
 * UTF-8 and Unicode helpers of the tokenizer. Owns nothing; pure functions, any thread. Never reads
 * past a given length and, except where stated, expects UTF-8 that was checked before.
 */
#include "text/unicode.h"

#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

static bool range_has(const text_range_t *ranges, size_t count, uint32_t code_point)
{
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (code_point > ranges[middle].last)
            low = middle + 1;
        else if (code_point < ranges[middle].first)
            high = middle;
        else
            return true;
    }
    return false;
}

/* "Lu", ...; NULL when the code point was assigned by Unicode 14. */
static const char *new_category(uint32_t code_point)
{
    size_t low = 0, high = text_new_categories_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (code_point > text_new_categories[middle].last)
            low = middle + 1;
        else if (code_point < text_new_categories[middle].first)
            high = middle;
        else
            return text_new_categories[middle].category;
    }
    return NULL;
}

static const char *category_of(uint32_t code_point)
{
    const char *category = new_category(code_point);
    return category ? category : utf8proc_category_string((utf8proc_int32_t)code_point);
}

bool text_is_space(uint32_t code_point)
{
    if (code_point < 0x80)
        return code_point == ' ' || (code_point >= 0x09 && code_point <= 0x0D);
    return code_point == 0x85 || code_point == 0xA0 || code_point == 0x1680 ||
           (code_point >= 0x2000 && code_point <= 0x200A) || code_point == 0x2028 ||
           code_point == 0x2029 || code_point == 0x202F || code_point == 0x205F ||
           code_point == 0x3000;
}

bool text_is_word(uint32_t code_point)
{
    const char *category = category_of(code_point);
    if (category[0] == 'L' || category[0] == 'M' || !strcmp(category, "Nd") ||
        !strcmp(category, "Nl") || !strcmp(category, "Pc"))
        return true;
    if (code_point == 0x200C || code_point == 0x200D)
        return true;
    /* The regex engine's table also has the superscripts and fractions of Latin-1; this one not. */
    return code_point > 0xFF && range_has(text_word_extra, text_word_extra_count, code_point);
}

bool text_is_numeric(uint32_t code_point)
{
    if (code_point < 0x80)
        return code_point >= '0' && code_point <= '9';
    return category_of(code_point)[0] == 'N' ||
           range_has(text_numeric_extra, text_numeric_extra_count, code_point);
}

bool text_is_punctuation(uint32_t code_point)
{
    bool punctuation = category_of(code_point)[0] == 'P';
    if (code_point < 0x80)
        return punctuation || (code_point && strchr("$+<=>^`|~", (int)code_point));
    return punctuation !=
           range_has(text_punctuation_differs, text_punctuation_differs_count, code_point);
}

text_step_t text_utf8_step(const char *bytes, size_t length, size_t *length_out)
{
    const uint8_t *p = (const uint8_t *)bytes;
    uint8_t lead = p[0], low = 0x80, high = 0xBF;
    size_t need;
    *length_out = 1;
    if (lead < 0x80)
        return TEXT_STEP_VALID;
    if (lead >= 0xC2 && lead <= 0xDF)
        need = 2;
    else if (lead >= 0xE0 && lead <= 0xEF)
        need = 3;
    else if (lead >= 0xF0 && lead <= 0xF4)
        need = 4;
    else
        return TEXT_STEP_INVALID;
    /* Overlong forms, surrogates and code points past U+10FFFF show in the second byte. */
    if (lead == 0xE0)
        low = 0xA0;
    else if (lead == 0xED)
        high = 0x9F;
    else if (lead == 0xF0)
        low = 0x90;
    else if (lead == 0xF4)
        high = 0x8F;
    for (size_t i = 1; i < need; i++) {
        if (i == length)
            return TEXT_STEP_INCOMPLETE;
        if (p[i] < low || p[i] > high)
            return TEXT_STEP_INVALID;
        low = 0x80;
        high = 0xBF;
        *length_out = i + 1;
    }
    return TEXT_STEP_VALID;
}

bool text_utf8_valid(const char *bytes, size_t length)
{
    for (size_t at = 0, step; at < length; at += step) {
        if (text_utf8_step(bytes + at, length - at, &step) != TEXT_STEP_VALID)
            return false;
    }
    return true;
}

uint32_t text_utf8_decode(const char *bytes, size_t *length_out)
{
    const uint8_t *p = (const uint8_t *)bytes;
    if (p[0] < 0x80) {
        *length_out = 1;
        return p[0];
    }
    if (p[0] < 0xE0) {
        *length_out = 2;
        return (uint32_t)(p[0] & 0x1F) << 6 | (p[1] & 0x3F);
    }
    if (p[0] < 0xF0) {
        *length_out = 3;
        return (uint32_t)(p[0] & 0x0F) << 12 | (uint32_t)(p[1] & 0x3F) << 6 | (p[2] & 0x3F);
    }
    *length_out = 4;
    return (uint32_t)(p[0] & 0x07) << 18 | (uint32_t)(p[1] & 0x3F) << 12 |
           (uint32_t)(p[2] & 0x3F) << 6 | (p[3] & 0x3F);
}

uint32_t text_utf8_decode_before(const char *start, const char *end, size_t *length_out)
{
    const char *p = end - 1;
    while (p > start && ((uint8_t)*p & 0xC0) == 0x80)
        p--;
    return text_utf8_decode(p, length_out);
}

size_t text_utf8_encode(uint32_t code_point, char out[4])
{
    if (code_point < 0x80) {
        out[0] = (char)code_point;
        return 1;
    }
    if (code_point < 0x800) {
        out[0] = (char)(0xC0 | code_point >> 6);
        out[1] = (char)(0x80 | (code_point & 0x3F));
        return 2;
    }
    if (code_point < 0x10000) {
        out[0] = (char)(0xE0 | code_point >> 12);
        out[1] = (char)(0x80 | (code_point >> 6 & 0x3F));
        out[2] = (char)(0x80 | (code_point & 0x3F));
        return 3;
    }
    out[0] = (char)(0xF0 | code_point >> 18);
    out[1] = (char)(0x80 | (code_point >> 12 & 0x3F));
    out[2] = (char)(0x80 | (code_point >> 6 & 0x3F));
    out[3] = (char)(0x80 | (code_point & 0x3F));
    return 4;
}

xp_status_t text_utf8_append_lossy(xp_buf_t *out, const char *bytes, size_t length)
{
    size_t good = 0; /* start of the valid stretch not yet appended */
    for (size_t at = 0, step; at < length; at += step) {
        text_step_t kind = text_utf8_step(bytes + at, length - at, &step);
        if (kind == TEXT_STEP_VALID)
            continue;
        if (kind == TEXT_STEP_INCOMPLETE)
            step = length - at;
        XP_TRY(xp_buf_append(out, bytes + good, at - good));
        XP_TRY(xp_buf_append(out, TEXT_REPLACEMENT, 3));
        good = at + step;
    }
    return good < length ? xp_buf_append(out, bytes + good, length - good) : XP_OK;
}

static bool is_opaque(uint32_t code_point)
{
    return code_point >= 0x7FD &&
           (range_has(text_normalize_opaque, text_normalize_opaque_count, code_point) ||
            new_category(code_point));
}

static xp_status_t normalize_segment(int options, const char *text, size_t length, xp_buf_t *out)
{
    if (!length)
        return XP_OK;
    utf8proc_uint8_t *mapped = NULL;
    utf8proc_ssize_t size = utf8proc_map((const utf8proc_uint8_t *)text, (utf8proc_ssize_t)length,
                                         &mapped, (utf8proc_option_t)options);
    if (size < 0)
        return xp_fail(size == UTF8PROC_ERROR_NOMEM ? XP_NO_MEMORY : XP_INVALID,
                       "Unicode normalization failed: %s", utf8proc_errmsg(size));
    xp_status_t status = xp_buf_append(out, mapped, (size_t)size);
    free(mapped);
    return status;
}

xp_status_t text_normalize(text_form_t form, const char *text, size_t length, xp_buf_t *out)
{
    static const int options[] = {
        [TEXT_NFC] = UTF8PROC_STABLE | UTF8PROC_COMPOSE,
        [TEXT_NFD] = UTF8PROC_STABLE | UTF8PROC_DECOMPOSE,
        [TEXT_NFKC] = UTF8PROC_STABLE | UTF8PROC_COMPOSE | UTF8PROC_COMPAT,
        [TEXT_NFKD] = UTF8PROC_STABLE | UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT,
    };
    /* ASCII is its own normal form, and all below U+0300 its own NFC: most text ends here. */
    uint8_t simple_below = form == TEXT_NFC ? 0xCC : 0x80;
    size_t simple = 0;
    while (simple < length && (uint8_t)text[simple] < simple_below)
        simple++;
    if (simple == length)
        return xp_buf_append(out, text, length);

    size_t segment = 0;
    for (size_t at = 0, step; at < length; at += step) {
        uint32_t code_point = text_utf8_decode(text + at, &step);
        if (code_point < 0x300 || !is_opaque(code_point))
            continue;
        XP_TRY(normalize_segment(options[form], text + segment, at - segment, out));
        XP_TRY(xp_buf_append(out, text + at, step));
        segment = at + step;
    }
    return normalize_segment(options[form], text + segment, length - segment, out);
}

xp_status_t text_lowercase(const char *text, size_t length, xp_buf_t *out)
{
    for (size_t at = 0, step; at < length; at += step) {
        uint32_t code_point = text_utf8_decode(text + at, &step);
        uint32_t lower = (uint32_t)utf8proc_tolower((utf8proc_int32_t)code_point);
        for (size_t i = 0; i < text_new_lower_count; i++) {
            if (code_point >= text_new_lower[i].first && code_point <= text_new_lower[i].last)
                lower = (uint32_t)((int32_t)code_point + text_new_lower[i].distance);
        }
        char encoded[4];
        XP_TRY(xp_buf_append(out, encoded, text_utf8_encode(lower, encoded)));
        if (code_point == 0x130) /* the one lower case of two code points: i with a dot above */
            XP_TRY(xp_buf_append(out, "\xCC\x87", 2));
    }
    return XP_OK;
}

/* Printable Latin-1 stands for itself, the other 68 bytes follow in order from U+0100. */
static bool byte_is_letter(uint32_t byte)
{
    return (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) ||
           (byte >= 0xAE && byte <= 0xFF);
}

uint32_t text_byte_to_letter(uint8_t byte)
{
    if (byte_is_letter(byte))
        return byte;
    if (byte <= 0x20)
        return 0x100u + byte;
    if (byte <= 0xA0)
        return 0x121u + byte - 0x7F;
    return 0x143;
}

int text_letter_to_byte(uint32_t code_point)
{
    if (code_point < 0x100)
        return byte_is_letter(code_point) ? (int)code_point : -1;
    if (code_point <= 0x120)
        return (int)code_point - 0x100;
    if (code_point <= 0x142)
        return (int)code_point - 0x121 + 0x7F;
    return code_point == 0x143 ? 0xAD : -1;
}
