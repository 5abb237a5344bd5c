/* SPDX-License-Identifier: MIT */
/*
 * Unicode as the `tokenizers` library sees it (private to src/text).
 *
 * utf8proc and PCRE2 know the Unicode version they were built with, the library carries several
 * others. Since tokens must be equal, the measured differences are tables (unicode_tables.c,
 * written by tests/reference/text_unicode_tables.py) laid over the libraries' own data.
 */
#ifndef XPOOL_TEXT_UNICODE_H
#define XPOOL_TEXT_UNICODE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/status.h"

typedef struct text_range {
    uint32_t first, last;
} text_range_t;
typedef struct text_category_range {
    uint32_t first, last;
    char category[3]; /* "Lu", "Nd", ... */
} text_category_range_t;
typedef struct text_lower_range {
    uint32_t first, last;
    int32_t distance;
} text_lower_range_t;

/* Assigned after Unicode 14, with the category the library's regex engine gives them. */
extern const text_category_range_t text_new_categories[];
extern const size_t text_new_categories_count;
/* What \w holds there beside L, M, Nd, Nl and Pc. */
extern const text_range_t text_word_extra[];
extern const size_t text_word_extra_count;
extern const text_range_t text_new_han[];
extern const size_t text_new_han_count;
extern const text_range_t text_numeric_extra[];
extern const size_t text_numeric_extra_count;
extern const text_range_t text_punctuation_differs[];
extern const size_t text_punctuation_differs_count;
/* Too new for the library's normal forms, which leave them and everything across them alone. */
extern const text_range_t text_normalize_opaque[];
extern const size_t text_normalize_opaque_count;
extern const text_lower_range_t text_new_lower[];
extern const size_t text_new_lower_count;

/* The character classes of Rust's char and regex crate, which the library uses outside regexes. */
bool text_is_space(uint32_t code_point);
bool text_is_word(uint32_t code_point);
bool text_is_numeric(uint32_t code_point);
bool text_is_punctuation(uint32_t code_point);

typedef enum text_step { TEXT_STEP_VALID = 0, TEXT_STEP_INVALID, TEXT_STEP_INCOMPLETE } text_step_t;

/* Looks at the sequence that starts at `bytes` (length >= 1). VALID: one character of `*length_out`
 * bytes. INVALID: the longest prefix that could have begun a character, to be replaced by one
 * U+FFFD. INCOMPLETE: all `length` bytes begin a character that more bytes could finish. */
text_step_t text_utf8_step(const char *bytes, size_t length, size_t *length_out);
bool text_utf8_valid(const char *bytes, size_t length);
/* Decodes one character of valid UTF-8. */
uint32_t text_utf8_decode(const char *bytes, size_t *length_out);
/* The character that ends right before `end` of valid UTF-8; start < end. */
uint32_t text_utf8_decode_before(const char *start, const char *end, size_t *length_out);
size_t text_utf8_encode(uint32_t code_point, char out[4]);
/* Appends `bytes`, each invalid sequence replaced by U+FFFD. */
xp_status_t text_utf8_append_lossy(xp_buf_t *out, const char *bytes, size_t length);

typedef enum text_form { TEXT_NFC = 0, TEXT_NFD, TEXT_NFKC, TEXT_NFKD } text_form_t;

/* Append the transformed valid UTF-8 text. */
xp_status_t text_normalize(text_form_t form, const char *text, size_t length, xp_buf_t *out);
xp_status_t text_lowercase(const char *text, size_t length, xp_buf_t *out);

/* GPT-2's byte alphabet: every byte as a printable character. */
uint32_t text_byte_to_letter(uint8_t byte);
/* -1 when the character is not of the alphabet. */
int text_letter_to_byte(uint32_t code_point);

#define TEXT_REPLACEMENT "\xEF\xBF\xBD"
#endif
