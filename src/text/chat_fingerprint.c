/* SPDX-License-Identifier: MIT */
/*
 * Reading a Jinja template into a form without its accidents, and hashing that form. This decides
 * whether a checkpoint's template is one we render, so it must never call two templates the same
 * that render differently; calling two the same that do render the same is only a convenience.
 *
 * The form is a row of items: text that is put out (neighbours joined, whether it stood outside of
 * tags or as a string inside of one), expressions that are put out, and statements. Pure functions.
 */
#include "text/chat_private.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#define MAX_TOKENS 4096 /* of one tag */

typedef struct token {
    enum { TOKEN_NAME = 1, TOKEN_TEXT, TOKEN_OPERATOR } kind;
    const char *start; /* for TEXT: in the reader's `strings` buffer, by offset */
    size_t length;
} jinja_token_t;

typedef struct reader {
    const char *text;
    size_t length, at;
    xp_buf_t constant; /* text put out, not yet followed by something else */
    uint64_t hash;
    jinja_token_t *tokens;
    size_t token_count;
    char *strings; /* decoded string literals of one tag */
    size_t strings_used;
} reader_t;

static void hash_bytes(reader_t *reader, const void *bytes, size_t length)
{
    const unsigned char *p = bytes;
    for (size_t i = 0; i < length; i++)
        reader->hash = (reader->hash ^ p[i]) * 0x100000001B3u;
}

static void hash_item(reader_t *reader, char kind, const char *bytes, size_t length)
{
    uint64_t size = length;
    hash_bytes(reader, &kind, 1);
    hash_bytes(reader, &size, sizeof(size)); /* so that no two rows of items look alike */
    hash_bytes(reader, bytes, length);
}

static void flush_constant(reader_t *reader)
{
    if (reader->constant.length)
        hash_item(reader, 'T', reader->constant.data, reader->constant.length);
    xp_buf_clear(&reader->constant);
}

/* ---- tags ---- */

static int hex4(const char *p)
{
    int value = 0;
    for (int i = 0; i < 4; i++) {
        if (!isxdigit((unsigned char)p[i]))
            return -1;
        value = value * 16 + (isdigit((unsigned char)p[i]) ? p[i] - '0' : (p[i] | 32) - 'a' + 10);
    }
    return value;
}

/* One escape behind a backslash, as Python decodes it; rare ones are refused. */
static xp_status_t decode_escape(reader_t *reader, size_t end)
{
    static const char from[] = "nrtbfav'\"\\", to[] = "\n\r\t\b\f\a\v'\"\\";
    char c = reader->text[reader->at];
    const char *known = c ? strchr(from, c) : NULL;
    if (known) {
        reader->strings[reader->strings_used++] = to[known - from];
        reader->at++;
        return XP_OK;
    }
    int value = c == 'u' && end - reader->at > 5 ? hex4(reader->text + reader->at + 1) : -1;
    if (value <= 0 || value > 0x7F)
        return xp_fail(XP_INVALID, "an escape in a string is not understood");
    reader->strings[reader->strings_used++] = (char)value;
    reader->at += 5;
    return XP_OK;
}

static xp_status_t take_string(reader_t *reader)
{
    char quote = reader->text[reader->at++];
    size_t start = reader->strings_used;
    while (reader->at < reader->length && reader->text[reader->at] != quote) {
        if (reader->text[reader->at] != '\\') {
            reader->strings[reader->strings_used++] = reader->text[reader->at++];
            continue;
        }
        if (++reader->at == reader->length)
            break;
        XP_TRY(decode_escape(reader, reader->length));
    }
    if (reader->at == reader->length)
        return xp_fail(XP_INVALID, "a string does not end");
    reader->at++;
    reader->tokens[reader->token_count++] =
        (jinja_token_t){TOKEN_TEXT, reader->strings + start, reader->strings_used - start};
    return XP_OK;
}

static bool is_name(char c)
{
    return isalnum((unsigned char)c) || c == '_';
}

static bool token_is(const jinja_token_t *token, const char *text)
{
    return token->kind != TOKEN_TEXT && token->length == strlen(text) &&
           !memcmp(token->start, text, token->length);
}

/* a['b'] is written a.b where b is a name. */
static void fold_subscript(reader_t *reader)
{
    size_t n = reader->token_count;
    jinja_token_t *tokens = reader->tokens;
    if (n < 4 || !token_is(&tokens[n - 1], "]") || tokens[n - 2].kind != TOKEN_TEXT ||
        !token_is(&tokens[n - 3], "["))
        return;
    bool subject = tokens[n - 4].kind == TOKEN_NAME || token_is(&tokens[n - 4], "]");
    bool plain = tokens[n - 2].length > 0 && !isdigit((unsigned char)tokens[n - 2].start[0]);
    for (size_t i = 0; i < tokens[n - 2].length; i++)
        plain = plain && is_name(tokens[n - 2].start[i]);
    /* Behind a keyword the bracket is a list. */
    static const char *const keywords[] = {"in", "not", "and", "or", "if", "else", "is"};
    for (size_t i = 0; i < sizeof(keywords) / sizeof(keywords[0]); i++)
        subject = subject && !token_is(&tokens[n - 4], keywords[i]);
    if (!subject || !plain)
        return;
    jinja_token_t name = tokens[n - 2];
    tokens[n - 3] = (jinja_token_t){TOKEN_OPERATOR, ".", 1};
    tokens[n - 2] = (jinja_token_t){TOKEN_NAME, name.start, name.length};
    reader->token_count--;
}

/* Tokens up to the end of the tag; `close` is "}}" or "%}". `*trim_out`: it ended with a dash. */
static xp_status_t take_tag(reader_t *reader, const char *close, bool *trim_out)
{
    reader->token_count = 0;
    reader->strings_used = 0;
    int depth = 0;
    while (reader->at < reader->length) {
        const char *p = reader->text + reader->at;
        size_t left = reader->length - reader->at;
        if (isspace((unsigned char)*p)) {
            reader->at++;
            continue;
        }
        if (depth == 0 && left >= 2 && !memcmp(p, close, 2)) {
            reader->at += 2;
            *trim_out = false;
            return XP_OK;
        }
        if (left >= 3 && (*p == '-' || *p == '+') && !memcmp(p + 1, close, 2)) {
            if (*p == '+')
                return xp_fail(XP_INVALID, "a tag that ends with + is not understood");
            reader->at += 3;
            *trim_out = true;
            return XP_OK;
        }
        if (reader->token_count == MAX_TOKENS)
            return xp_fail(XP_INVALID, "a tag of more than %d words", MAX_TOKENS);
        if (*p == '"' || *p == '\'') {
            XP_TRY(take_string(reader));
            continue;
        }
        size_t length = 1;
        int kind = TOKEN_OPERATOR;
        if (is_name(*p)) {
            kind = TOKEN_NAME;
            while (length < left && is_name(p[length]))
                length++;
        } else if (left >= 2 && p[1] == '=' && strchr("=!<>", *p)) {
            length = 2;
        }
        depth += *p == '{' || *p == '(' || *p == '[';
        depth -= *p == '}' || *p == ')' || *p == ']';
        reader->tokens[reader->token_count++] = (jinja_token_t){kind, p, length};
        reader->at += length;
        fold_subscript(reader);
    }
    return xp_fail(XP_INVALID, "a tag does not end");
}

static void hash_tokens(reader_t *reader, char kind, size_t first, size_t end)
{
    flush_constant(reader);
    hash_item(reader, kind, "", 0);
    for (size_t i = first; i < end; i++) {
        const jinja_token_t *token = &reader->tokens[i];
        hash_item(reader, (char)('0' + token->kind), token->start, token->length);
    }
    hash_item(reader, ';', "", 0);
}

/* Whether the tag is a plain sum, whose parts may as well be put out one after the other. */
static bool is_sum(const reader_t *reader)
{
    static const char *const others[] = {"if", "else", "and", "or", "not", "in", "is",
                                         "==", "!=",   "<",   ">",  "<=",  ">=", "-",
                                         "*",  "/",    "%",   "~",  "="};
    int depth = 0;
    for (size_t i = 0; i < reader->token_count; i++) {
        const jinja_token_t *token = &reader->tokens[i];
        depth += token_is(token, "(") || token_is(token, "[") || token_is(token, "{");
        depth -= token_is(token, ")") || token_is(token, "]") || token_is(token, "}");
        for (size_t k = 0; depth == 0 && k < sizeof(others) / sizeof(others[0]); k++) {
            if (token_is(token, others[k]))
                return false;
        }
    }
    return true;
}

/* Parts of a sum that are one string each join the text around them. A sum of which no part is a
 * string might add numbers, and stays whole. */
static xp_status_t put_out(reader_t *reader)
{
    bool has_text = false;
    for (size_t i = 0; i < reader->token_count; i++)
        has_text = has_text || reader->tokens[i].kind == TOKEN_TEXT;
    if (!has_text || !is_sum(reader)) {
        hash_tokens(reader, 'E', 0, reader->token_count);
        return XP_OK;
    }
    int depth = 0;
    for (size_t first = 0, i = 0; i <= reader->token_count; i++) {
        const jinja_token_t *token = &reader->tokens[i];
        if (i < reader->token_count) {
            depth += token_is(token, "(") || token_is(token, "[") || token_is(token, "{");
            depth -= token_is(token, ")") || token_is(token, "]") || token_is(token, "}");
            if (depth != 0 || !token_is(token, "+"))
                continue;
        }
        if (i == first + 1 && reader->tokens[first].kind == TOKEN_TEXT)
            XP_TRY(xp_buf_append(&reader->constant, reader->tokens[first].start,
                                 reader->tokens[first].length));
        else
            hash_tokens(reader, 'E', first, i);
        first = i + 1;
    }
    return XP_OK;
}

/* ---- text between tags ---- */

static bool is_blank(const char *text, size_t length)
{
    for (size_t i = 0; i < length; i++) {
        if (!isspace((unsigned char)text[i]))
            return false;
    }
    return true;
}

typedef struct edges {
    bool strip_front;  /* the tag before ended with a dash */
    bool skip_newline; /* trim_blocks: a statement or comment stood before */
    bool line_begins;  /* nothing but a line's begin stood before */
} edges_t;

static xp_status_t take_text(reader_t *reader, size_t start, size_t end, const edges_t *edges,
                             const char *tag, size_t tag_left)
{
    const char *text = reader->text + start;
    size_t length = end - start;
    bool line_begins = edges->line_begins;
    if (edges->strip_front) {
        while (length && isspace((unsigned char)*text)) {
            text++;
            length--;
        }
    } else if (edges->skip_newline && length && *text == '\n') {
        text++;
        length--;
        line_begins = true;
    }
    if (tag && tag_left >= 3 && tag[2] == '-') {
        while (length && isspace((unsigned char)text[length - 1]))
            length--;
    } else if (tag && tag[1] != '{' && !(tag_left >= 3 && tag[2] == '+')) {
        size_t line = length; /* lstrip_blocks: white space from the line's begin to a statement */
        while (line && text[line - 1] != '\n')
            line--;
        if ((line > 0 || line_begins) && is_blank(text + line, length - line))
            length = line;
    }
    return xp_buf_append(&reader->constant, text, length);
}

static xp_status_t take_comment(reader_t *reader, bool *trim_out)
{
    const char *end = memmem(reader->text + reader->at, reader->length - reader->at, "#}", 2);
    if (!end)
        return xp_fail(XP_INVALID, "a comment does not end");
    *trim_out = end > reader->text + reader->at && end[-1] == '-';
    reader->at = (size_t)(end - reader->text) + 2;
    return XP_OK;
}

static xp_status_t read_all(reader_t *reader)
{
    edges_t edges = {.line_begins = true};
    while (reader->at < reader->length) {
        size_t start = reader->at, tag = start;
        while (tag + 1 < reader->length &&
               !(reader->text[tag] == '{' && strchr("{%#", reader->text[tag + 1])))
            tag++;
        bool found = tag + 1 < reader->length;
        size_t end = found ? tag : reader->length;
        const char *open = found ? reader->text + tag : NULL;
        XP_TRY(take_text(reader, start, end, &edges, open, reader->length - end));
        if (!found)
            break;
        reader->at = tag + 2;
        if (reader->at < reader->length && strchr("-+", reader->text[reader->at]))
            reader->at++;
        edges = (edges_t){.skip_newline = open[1] != '{'};
        if (open[1] == '#') {
            XP_TRY(take_comment(reader, &edges.strip_front));
        } else if (open[1] == '{') {
            XP_TRY(take_tag(reader, "}}", &edges.strip_front));
            XP_TRY(put_out(reader));
        } else {
            XP_TRY(take_tag(reader, "%}", &edges.strip_front));
            /* Marks for training that put nothing out. */
            if (reader->token_count == 1 && (token_is(&reader->tokens[0], "generation") ||
                                             token_is(&reader->tokens[0], "endgeneration")))
                continue;
            hash_tokens(reader, 'S', 0, reader->token_count);
        }
    }
    flush_constant(reader);
    return XP_OK;
}

xp_status_t chat_fingerprint(const char *text, size_t length, uint64_t *fingerprint_out)
{
    if (length > CHAT_MAX_TEMPLATE_BYTES)
        return xp_fail(XP_INVALID, "a chat template of %zu bytes; at most %u", length,
                       CHAT_MAX_TEMPLATE_BYTES);
    if (memchr(text, '\r', length) || memchr(text, '\0', length))
        return xp_fail(XP_INVALID, "the chat template holds control characters");
    if (length && text[length - 1] == '\n') /* Jinja drops one newline at the end */
        length--;
    reader_t reader = {.text = text, .length = length, .hash = 0xCBF29CE484222325u};
    xp_buf_init(&reader.constant, 2 * (size_t)CHAT_MAX_TEMPLATE_BYTES);
    reader.tokens = calloc(MAX_TOKENS + 1, sizeof(*reader.tokens));
    reader.strings = malloc(length + 1);
    xp_status_t status = reader.tokens && reader.strings
                             ? read_all(&reader)
                             : xp_fail(XP_NO_MEMORY, "no memory for a chat template");
    if (status == XP_OK)
        *fingerprint_out = reader.hash;
    free(reader.tokens);
    free(reader.strings);
    xp_buf_fini(&reader.constant);
    return status;
}
