/* SPDX-License-Identifier: MIT */
/*
 * Regular expressions of tokenizers (private to src/text).
 *
 * Published tokenizers are written for Oniguruma; we run PCRE2. A pattern is translated: classes
 * become what the library's engine holds them to be (unicode.h), and the few constructs that mean
 * something else in PCRE2 are rewritten. A construct we cannot carry over exactly is
 * XP_UNSUPPORTED.
 */
#ifndef XPOOL_TEXT_REGEX_H
#define XPOOL_TEXT_REGEX_H

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"

typedef struct text_regex text_regex_t;
typedef struct text_matcher text_matcher_t;

#define TEXT_REGEX_MAX_PATTERN 65536

/* An immutable pattern; literal: matched as plain text. */
xp_status_t text_regex_create(const char *pattern, size_t length, bool literal,
                              text_regex_t **regex_out);
void text_regex_destroy(text_regex_t *regex); /* accepts NULL */

/* What one thread needs to match; used with any number of patterns. */
xp_status_t text_matcher_create(text_matcher_t **matcher_out);
void text_matcher_destroy(text_matcher_t *matcher); /* accepts NULL */

/* Iterates over the non-overlapping matches in one subject of valid UTF-8. */
typedef struct text_matches {
    const text_regex_t *regex;
    text_matcher_t *matcher;
    const char *subject;
    size_t length;
    size_t next;     /* where the search goes on */
    size_t last_end; /* an empty match here would repeat the last one; SIZE_MAX before the first */
} text_matches_t;
void text_matches_init(text_matches_t *matches, const text_regex_t *regex, text_matcher_t *matcher,
                       const char *subject, size_t length);
/* `*found_out` false: no more. */
xp_status_t text_matches_next(text_matches_t *matches, size_t *start_out, size_t *end_out,
                              bool *found_out);
#endif
