/* SPDX-License-Identifier: MIT */
/*
 * Translation from Oniguruma's syntax to PCRE2's, and matching. A compiled pattern is shared by
 * threads; a matcher belongs to one. Matching never allocates past what the matcher holds, but for
 * PCRE2's own bounded heap when the just-in-time compiler is absent.
 */
#include "text/regex.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "text/unicode.h"

#define REGEX_MAX_OUTPUT    (4u << 20)
#define REGEX_MAX_GROUPS    200
#define REGEX_JIT_STACK     (4u << 20)
#define REGEX_MATCH_LIMIT   50000000u
#define REGEX_HEAP_LIMIT_KB 65536u

struct text_regex {
    pcre2_code *code;
    char *literal;
    size_t literal_length;
};

struct text_matcher {
    pcre2_match_data *data;
    pcre2_match_context *context;
    pcre2_jit_stack *stack;
};

/* ---- translation ---- */

typedef struct translator {
    const char *pattern;
    size_t length, at;
    xp_buf_t out;
    size_t atom; /* where in `out` the last whole atom begins, for interval quantifiers */
    size_t groups[REGEX_MAX_GROUPS];
    size_t depth;
} translator_t;

#define SPACE_SET                                                                                  \
    "\\x09-\\x0d\\x20\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}"        \
    "\\x{205f}\\x{3000}"

static xp_status_t refuse(const translator_t *t, const char *what)
{
    return xp_fail(XP_UNSUPPORTED, "regex: %s at byte %zu of \"%.120s\" is not supported", what,
                   t->at, t->pattern);
}

static xp_status_t emit(translator_t *t, const char *text)
{
    return xp_buf_append_text(&t->out, text);
}

static xp_status_t emit_ranges(translator_t *t, const text_range_t *ranges, size_t count)
{
    for (size_t i = 0; i < count; i++)
        XP_TRY(xp_buf_printf(&t->out, "\\x{%x}-\\x{%x}", ranges[i].first, ranges[i].last));
    return XP_OK;
}

static xp_status_t emit_category(translator_t *t, const char *name)
{
    XP_TRY(xp_buf_printf(&t->out, "\\p{%s}", name));
    for (size_t i = 0; i < text_new_categories_count; i++) {
        const text_category_range_t *range = &text_new_categories[i];
        if (!strncmp(range->category, name, strlen(name)))
            XP_TRY(xp_buf_printf(&t->out, "\\x{%x}-\\x{%x}", range->first, range->last));
    }
    return XP_OK;
}

/* The inside of a class for the property `name`. */
static xp_status_t emit_property(translator_t *t, const char *name)
{
    static const char *const categories[] = {
        "L",  "Lu", "Ll", "Lt", "Lm", "Lo", "M",  "Mn", "Mc", "Me", "N",  "Nd",
        "Nl", "No", "P",  "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "S",  "Sm",
        "Sc", "Sk", "So", "Z",  "Zs", "Zl", "Zp", "C",  "Cc", "Cf", "Co",
    };
    for (size_t i = 0; i < sizeof(categories) / sizeof(categories[0]); i++) {
        if (!strcmp(name, categories[i]))
            return emit_category(t, name);
    }
    if (!strcmp(name, "Han")) {
        XP_TRY(emit(t, "\\p{sc:Han}"));
        return emit_ranges(t, text_new_han, text_new_han_count);
    }
    static const char *const scripts[] = {"Latin",  "Greek",  "Cyrillic", "Hiragana", "Katakana",
                                          "Hangul", "Arabic", "Hebrew",   "Thai",     "Devanagari"};
    for (size_t i = 0; i < sizeof(scripts) / sizeof(scripts[0]); i++) {
        if (!strcmp(name, scripts[i]))
            return xp_buf_printf(&t->out, "\\p{sc:%s}", name);
    }
    return xp_fail(XP_UNSUPPORTED, "regex: property \\p{%s} is not supported", name);
}

static xp_status_t emit_word_set(translator_t *t)
{
    static const char *const parts[] = {"L", "M", "Nd", "Nl", "Pc"};
    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++)
        XP_TRY(emit_category(t, parts[i]));
    return emit_ranges(t, text_word_extra, text_word_extra_count);
}

/* Reads "{Name}" or "{^Name}" or one letter behind \p. */
static xp_status_t take_property(translator_t *t, char name[32], bool *negated)
{
    size_t length = 0;
    if (t->at < t->length && t->pattern[t->at] == '{') {
        t->at++;
        if (t->at < t->length && t->pattern[t->at] == '^') {
            *negated = !*negated;
            t->at++;
        }
        while (t->at < t->length && t->pattern[t->at] != '}') {
            if (length >= 31)
                return refuse(t, "a property name");
            name[length++] = t->pattern[t->at++];
        }
        if (t->at == t->length)
            return xp_fail(XP_INVALID, "regex: unfinished \\p{ in \"%.120s\"", t->pattern);
        t->at++;
    } else {
        return refuse(t, "\\p without braces");
    }
    name[length] = '\0';
    return XP_OK;
}

static int hex_value(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

/* \xHH, \x{H...} or \uHHHH behind the letter. */
static xp_status_t take_code_point(translator_t *t, char letter)
{
    uint32_t value = 0;
    size_t digits = 0, most = letter == 'u' ? 4 : 2;
    bool braces = letter == 'x' && t->at < t->length && t->pattern[t->at] == '{';
    if (braces) {
        t->at++;
        most = 6;
    }
    while (digits < most && t->at < t->length && hex_value(t->pattern[t->at]) >= 0) {
        value = value * 16 + (uint32_t)hex_value(t->pattern[t->at++]);
        digits++;
    }
    if (braces && (t->at == t->length || t->pattern[t->at++] != '}'))
        return refuse(t, "this code point");
    if (!digits || value > 0x10FFFF || (value >= 0xD800 && value < 0xE000) ||
        (!braces && letter == 'x' && value > 0x7F))
        return refuse(t, "this code point");
    return xp_buf_printf(&t->out, "\\x{%x}", value);
}

/* An escape; `in_class` says where. t->at is behind the backslash. */
static xp_status_t translate_escape(translator_t *t, bool in_class)
{
    if (t->at == t->length)
        return xp_fail(XP_INVALID, "regex: \"%.120s\" ends with a backslash", t->pattern);
    char c = t->pattern[t->at++];
    char name[32];
    bool negated = false;
    switch (c) {
    case 'P':
        negated = true;
        /* fall through */
    case 'p':
        XP_TRY(take_property(t, name, &negated));
        if (in_class && negated)
            return refuse(t, "a negated property inside a class");
        if (!in_class)
            XP_TRY(emit(t, negated ? "[^" : "["));
        XP_TRY(emit_property(t, name));
        return in_class ? XP_OK : emit(t, "]");
    case 's':
        return emit(t, in_class ? SPACE_SET : "[" SPACE_SET "]");
    case 'S':
        return emit(t, in_class ? "\\S\\x{180e}" : "[^" SPACE_SET "]");
    case 'd':
    case 'D':
        if (in_class && c == 'D')
            return refuse(t, "\\D inside a class");
        if (!in_class)
            XP_TRY(emit(t, c == 'D' ? "[^" : "["));
        XP_TRY(emit_category(t, "Nd"));
        return in_class ? XP_OK : emit(t, "]");
    case 'w':
    case 'W':
        if (in_class && c == 'W')
            return refuse(t, "\\W inside a class");
        if (!in_class)
            XP_TRY(emit(t, c == 'W' ? "[^" : "["));
        XP_TRY(emit_word_set(t));
        return in_class ? XP_OK : emit(t, "]");
    case 'h': /* a hexadecimal digit there, horizontal white space in PCRE2 */
        return emit(t, in_class ? "0-9A-Fa-f" : "[0-9A-Fa-f]");
    case 'v': /* the one character there, a class in PCRE2 */
        return emit(t, "\\x0b");
    case 'n':
        return emit(t, "\\x0a");
    case 'r':
        return emit(t, "\\x0d");
    case 't':
        return emit(t, "\\x09");
    case 'f':
        return emit(t, "\\x0c");
    case 'a':
        return emit(t, "\\x07");
    case 'e':
        return emit(t, "\\x1b");
    case 'x':
    case 'u':
        return take_code_point(t, c);
    case 'A':
    case 'z':
        if (!in_class) {
            char text[3] = {'\\', c, '\0'};
            return emit(t, text);
        }
        break;
    default:
        if ((uint8_t)c >= 0x80) { /* an escaped character of several bytes stands for itself */
            t->at--;
            return XP_OK;
        }
        if (!((c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z')))
            return xp_buf_printf(&t->out, "\\x{%x}", (unsigned)(uint8_t)c);
        break;
    }
    t->at--;
    return refuse(t, "this escape");
}

static xp_status_t translate_class(translator_t *t)
{
    XP_TRY(emit(t, "["));
    if (t->at < t->length && t->pattern[t->at] == '^') {
        XP_TRY(emit(t, "^"));
        t->at++;
    }
    bool first = true;
    while (t->at < t->length) {
        char c = t->pattern[t->at];
        if (c == ']' && !first) {
            t->at++;
            return emit(t, "]");
        }
        first = false;
        if (c == '[' || c == ']')
            return refuse(t, "a bracket inside a class");
        if (c == '&' && t->at + 1 < t->length && t->pattern[t->at + 1] == '&')
            return refuse(t, "&& inside a class");
        t->at++;
        if (c == '\\') {
            XP_TRY(translate_escape(t, true));
        } else if (c == '-' || c == '^' || (uint8_t)c >= 0x80) {
            XP_TRY(xp_buf_append(&t->out, &c, 1));
        } else {
            XP_TRY(xp_buf_printf(&t->out, "\\x{%x}", (unsigned)(uint8_t)c));
        }
    }
    return xp_fail(XP_INVALID, "regex: unfinished class in \"%.120s\"", t->pattern);
}

/* Only the group openings that mean the same in both. */
static xp_status_t translate_group(translator_t *t)
{
    static const char *const openings[] = {"?:", "?=", "?!", "?<=", "?<!", "?>", "?i:", "?-i:"};
    if (t->depth == REGEX_MAX_GROUPS)
        return refuse(t, "nesting this deep");
    t->groups[t->depth++] = t->out.length;
    if (t->at == t->length || t->pattern[t->at] != '?')
        return emit(t, "(?:"); /* nothing here reads a capture */
    for (size_t i = 0; i < sizeof(openings) / sizeof(openings[0]); i++) {
        size_t length = strlen(openings[i]);
        if (t->length - t->at >= length && !memcmp(t->pattern + t->at, openings[i], length)) {
            t->at += length;
            return xp_buf_printf(&t->out, "(%s", openings[i]);
        }
    }
    /* Further in, alternatives behind it would be grouped differently. */
    if (t->at == 1 && t->length >= 4 && !memcmp(t->pattern + t->at, "?i)", 3)) {
        t->at += 3;
        t->depth--;
        return emit(t, "(?i)");
    }
    return refuse(t, "this kind of group");
}

/* "{m}", "{m,}", "{,n}", "{m,n}": its length, or 0 when the brace is a plain character. */
static size_t interval_length(const translator_t *t)
{
    size_t at = t->at + 1, digits = 0;
    for (; at < t->length && t->pattern[at] >= '0' && t->pattern[at] <= '9'; at++)
        digits++;
    if (at < t->length && t->pattern[at] == ',') {
        for (at++; at < t->length && t->pattern[at] >= '0' && t->pattern[at] <= '9'; at++)
            digits++;
    }
    return digits && at < t->length && t->pattern[at] == '}' ? at + 1 - t->at : 0;
}

static xp_status_t insert_at(translator_t *t, size_t where, const char *text)
{
    size_t length = strlen(text), old = t->out.length;
    XP_TRY(xp_buf_append_text(&t->out, text));
    memmove(t->out.data + where + length, t->out.data + where, old - where);
    memcpy(t->out.data + where, text, length);
    return XP_OK;
}

static xp_status_t translate_interval(translator_t *t, size_t length)
{
    const char *text = t->pattern + t->at;
    t->at += length;
    if (text[1] == ',') /* {,n} is from none there, a plain text in PCRE2 10.42 */
        XP_TRY(xp_buf_printf(&t->out, "{0%.*s", (int)length - 1, text + 1));
    else
        XP_TRY(xp_buf_append(&t->out, text, length));
    /* Behind an interval, + repeats there and makes it possessive in PCRE2; ? behind a fixed one
     * makes it optional there and lazy in PCRE2. */
    char next = t->at < t->length ? t->pattern[t->at] : '\0';
    if (next == '+' || (next == '?' && !memchr(text, ',', length))) {
        XP_TRY(insert_at(t, t->atom, "(?:"));
        XP_TRY(emit(t, ")"));
    }
    return XP_OK;
}

static xp_status_t translate(translator_t *t)
{
    while (t->at < t->length) {
        char c = t->pattern[t->at];
        if (c == '\0')
            return refuse(t, "a NUL");
        if (c == '*' || c == '+' || c == '?') {
            t->at++;
            XP_TRY(xp_buf_append(&t->out, &c, 1));
            continue;
        }
        size_t interval = c == '{' ? interval_length(t) : 0;
        if (interval) {
            XP_TRY(translate_interval(t, interval));
            continue;
        }
        size_t begin = t->out.length;
        t->at++;
        switch (c) {
        case '\\':
            XP_TRY(translate_escape(t, false));
            break;
        case '[':
            XP_TRY(translate_class(t));
            break;
        case '(':
            XP_TRY(translate_group(t));
            break;
        case ')':
            if (!t->depth)
                return xp_fail(XP_INVALID, "regex: unmatched ) in \"%.120s\"", t->pattern);
            begin = t->groups[--t->depth];
            XP_TRY(emit(t, ")"));
            break;
        case '{':
        case '}':
        case ']':
        case '#':
        case ' ':
            XP_TRY(xp_buf_printf(&t->out, "\\x{%x}", (unsigned)(uint8_t)c));
            break;
        default: {
            /* A quantifier binds to the whole character. */
            size_t step;
            if (text_utf8_step(t->pattern + t->at - 1, t->length - t->at + 1, &step) !=
                TEXT_STEP_VALID)
                return xp_fail(XP_INVALID, "regex: the pattern is not valid UTF-8");
            XP_TRY(xp_buf_append(&t->out, t->pattern + t->at - 1, step));
            t->at += step - 1;
            break;
        }
        }
        t->atom = begin;
    }
    if (t->depth)
        return xp_fail(XP_INVALID, "regex: unmatched ( in \"%.120s\"", t->pattern);
    return XP_OK;
}

/* ---- patterns ---- */

static xp_status_t compile(const char *source, const char *text, size_t length,
                           pcre2_code **code_out)
{
    pcre2_compile_context *context = pcre2_compile_context_create(NULL);
    if (!context)
        return xp_fail(XP_NO_MEMORY, "no memory for a regex");
    pcre2_set_newline(context, PCRE2_NEWLINE_LF);
    int error;
    PCRE2_SIZE where;
    /* MULTILINE: ^ and $ mean begin and end of a line in Oniguruma's own syntax. */
    pcre2_code *code = pcre2_compile((PCRE2_SPTR)text, length,
                                     PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE |
                                         PCRE2_NO_AUTO_CAPTURE | PCRE2_NEVER_BACKSLASH_C,
                                     &error, &where, context);
    pcre2_compile_context_free(context);
    if (!code) {
        char message[160];
        pcre2_get_error_message(error, (PCRE2_UCHAR *)message, sizeof(message));
        return xp_fail(XP_INVALID, "regex \"%.120s\": %s", source, message);
    }
    /* Without just-in-time support matching is slower, not different. */
    pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);
    *code_out = code;
    return XP_OK;
}

xp_status_t text_regex_create(const char *pattern, size_t length, bool literal,
                              text_regex_t **regex_out)
{
    xp_status_t status = XP_OK;
    if (length > TEXT_REGEX_MAX_PATTERN)
        return xp_fail(XP_INVALID, "regex of %zu bytes; at most %d", length,
                       TEXT_REGEX_MAX_PATTERN);
    text_regex_t *regex = calloc(1, sizeof(*regex));
    translator_t *t = calloc(1, sizeof(*t));
    char *copy = malloc(length + 1);
    if (!regex || !t || !copy) {
        status = xp_fail(XP_NO_MEMORY, "no memory for a regex");
        goto done;
    }
    memcpy(copy, pattern, length);
    copy[length] = '\0';
    if (literal) {
        regex->literal = copy;
        regex->literal_length = length;
        copy = NULL;
    } else {
        *t = (translator_t){.pattern = copy, .length = length};
        xp_buf_init(&t->out, REGEX_MAX_OUTPUT);
        XP_TRY_GOTO(status, done, xp_buf_append(&t->out, "", 0));
        XP_TRY_GOTO(status, done, translate(t));
        XP_TRY_GOTO(status, done, compile(copy, t->out.data, t->out.length, &regex->code));
    }
    *regex_out = regex;
    regex = NULL;
done:
    if (t)
        xp_buf_fini(&t->out);
    free(t);
    free(copy);
    text_regex_destroy(regex);
    return status;
}

void text_regex_destroy(text_regex_t *regex)
{
    if (!regex)
        return;
    pcre2_code_free(regex->code);
    free(regex->literal);
    free(regex);
}

/* ---- matching ---- */

xp_status_t text_matcher_create(text_matcher_t **matcher_out)
{
    text_matcher_t *matcher = calloc(1, sizeof(*matcher));
    if (!matcher)
        return xp_fail(XP_NO_MEMORY, "no memory for a matcher");
    matcher->data = pcre2_match_data_create(1, NULL);
    matcher->context = pcre2_match_context_create(NULL);
    if (!matcher->data || !matcher->context) {
        text_matcher_destroy(matcher);
        return xp_fail(XP_NO_MEMORY, "no memory for a matcher");
    }
    pcre2_set_match_limit(matcher->context, REGEX_MATCH_LIMIT);
    pcre2_set_heap_limit(matcher->context, REGEX_HEAP_LIMIT_KB);
    /* NULL without just-in-time support, which needs none. */
    matcher->stack = pcre2_jit_stack_create(64 * 1024, REGEX_JIT_STACK, NULL);
    if (matcher->stack)
        pcre2_jit_stack_assign(matcher->context, NULL, matcher->stack);
    *matcher_out = matcher;
    return XP_OK;
}

void text_matcher_destroy(text_matcher_t *matcher)
{
    if (!matcher)
        return;
    pcre2_jit_stack_free(matcher->stack);
    pcre2_match_context_free(matcher->context);
    pcre2_match_data_free(matcher->data);
    free(matcher);
}

void text_matches_init(text_matches_t *matches, const text_regex_t *regex, text_matcher_t *matcher,
                       const char *subject, size_t length)
{
    *matches = (text_matches_t){.regex = regex,
                                .matcher = matcher,
                                .subject = subject,
                                .length = length,
                                .last_end = SIZE_MAX};
}

static xp_status_t match_once(text_matches_t *m, size_t *start, size_t *end, bool *found)
{
    const text_regex_t *regex = m->regex;
    if (regex->literal) {
        const char *at = regex->literal_length ? memmem(m->subject + m->next, m->length - m->next,
                                                        regex->literal, regex->literal_length)
                                               : m->subject + m->next;
        *found = at;
        if (at) {
            *start = (size_t)(at - m->subject);
            *end = *start + regex->literal_length;
        }
        return XP_OK;
    }
    int count = pcre2_match(regex->code, (PCRE2_SPTR)m->subject, m->length, m->next,
                            PCRE2_NO_UTF_CHECK, m->matcher->data, m->matcher->context);
    if (count == PCRE2_ERROR_NOMATCH) {
        *found = false;
        return XP_OK;
    }
    if (count < 0) {
        char message[160];
        pcre2_get_error_message(count, (PCRE2_UCHAR *)message, sizeof(message));
        return xp_fail(XP_INVALID, "splitting the text failed: %s", message);
    }
    const PCRE2_SIZE *offsets = pcre2_get_ovector_pointer(m->matcher->data);
    *start = offsets[0];
    *end = offsets[1];
    *found = true;
    return XP_OK;
}

xp_status_t text_matches_next(text_matches_t *matches, size_t *start_out, size_t *end_out,
                              bool *found_out)
{
    while (matches->next <= matches->length) {
        size_t start, end;
        bool found;
        XP_TRY(match_once(matches, &start, &end, &found));
        if (!found)
            break;
        if (start == end && end == matches->last_end) {
            size_t step = 1;
            if (matches->next < matches->length)
                text_utf8_decode(matches->subject + matches->next, &step);
            matches->next += step;
            continue;
        }
        matches->next = end;
        matches->last_end = end;
        *start_out = start;
        *end_out = end;
        *found_out = true;
        return XP_OK;
    }
    *found_out = false;
    return XP_OK;
}
