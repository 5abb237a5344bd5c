/* SPDX-License-Identifier: MIT */
/*
 * The arena, the nodes, and laying one source over another. Runs on the thread that loads the
 * configuration; never does I/O, never decides what a key means.
 */
#include "config/tree.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ARENA_BLOCK_BYTES 16384

struct config_arena_block {
    struct config_arena_block *next;
    size_t used, size;
    _Alignas(16) char data[];
};

void config_arena_fini(config_arena_t *arena)
{
    struct config_arena_block *block = arena->blocks;
    while (block) {
        struct config_arena_block *next = block->next;
        free(block);
        block = next;
    }
    arena->blocks = NULL;
}

void *config_arena_alloc(config_arena_t *arena, size_t bytes)
{
    if (bytes > SIZE_MAX / 2)
        return NULL;
    bytes = (bytes + 15) & ~(size_t)15;
    struct config_arena_block *block = arena->blocks;
    if (!block || block->size - block->used < bytes) {
        size_t size = bytes > ARENA_BLOCK_BYTES ? bytes : ARENA_BLOCK_BYTES;
        block = calloc(1, sizeof(*block) + size);
        if (!block)
            return NULL;
        block->size = size;
        block->next = arena->blocks;
        arena->blocks = block;
    }
    void *memory = block->data + block->used;
    block->used += bytes;
    return memory;
}

char *config_arena_copy(config_arena_t *arena, const char *text, size_t length)
{
    char *copy = config_arena_alloc(arena, length + 1);
    if (copy && length)
        memcpy(copy, text, length);
    return copy;
}

config_node_t *config_node_create(config_arena_t *arena, config_node_kind_t kind,
                                  const config_origin_t *origin)
{
    config_node_t *node = config_arena_alloc(arena, sizeof(*node));
    if (node) {
        node->kind = kind;
        node->origin = origin;
        node->key = "";
        node->text = "";
    }
    return node;
}

void config_node_append(config_node_t *parent, config_node_t *child)
{
    child->next = NULL;
    if (parent->last)
        parent->last->next = child;
    else
        parent->first = child;
    parent->last = child;
    parent->count++;
}

config_node_t *config_node_child(const config_node_t *table, const char *key, size_t length)
{
    for (config_node_t *child = table->first; child; child = child->next)
        if (child->key_length == length && memcmp(child->key, key, length) == 0)
            return child;
    return NULL;
}

static bool bare_key_byte(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '-';
}

/* Skips one TOML string that begins at `at`; returns the offset behind it. An unfinished string
 * ends with the text: the parser reports it. */
static size_t skip_string(const char *text, size_t length, size_t at)
{
    char quote = text[at];
    bool escapes = quote == '"';
    if (at + 2 < length && text[at + 1] == quote && text[at + 2] == quote) {
        at += 3;
        while (at < length) {
            if (escapes && text[at] == '\\') {
                at += 2;
            } else if (text[at] == quote && at + 2 < length && text[at + 1] == quote &&
                       text[at + 2] == quote) {
                at += 3;
                /* Up to two more quotes belong to the string's end. */
                while (at < length && text[at] == quote)
                    at++;
                return at;
            } else {
                at++;
            }
        }
        return length;
    }
    for (at++; at < length && text[at] != quote && text[at] != '\n'; at++)
        if (escapes && text[at] == '\\')
            at++;
    return at < length && text[at] == quote ? at + 1 : at;
}

static bool precheck_fail(config_toml_error_t *error_out, uint32_t line, size_t column,
                          const char *text)
{
    error_out->line = line;
    error_out->column = (uint32_t)column;
    snprintf(error_out->text, sizeof(error_out->text), "%s", text);
    return false;
}

/* Whether a [table] or [[list of tables]] header that begins at `at` has a key, or is empty. */
static bool header_has_key(const char *text, size_t length, size_t at)
{
    at++;
    if (at < length && text[at] == '[')
        at++;
    while (at < length && (text[at] == ' ' || text[at] == '\t'))
        at++;
    return at >= length || bare_key_byte(text[at]) || text[at] == '"' || text[at] == '\'' ||
           text[at] == ']' || text[at] == '[';
}

bool config_toml_precheck(const char *text, size_t length, config_toml_error_t *error_out)
{
    uint32_t line = 1, dots = 0, depth = 0;
    bool line_is_blank = true; /* up to here */
    size_t i = length >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0 ? 3 : 0, line_start = i;
    while (i < length) {
        bool blank = text[i] == ' ' || text[i] == '\t' || text[i] == '\r';
        switch (text[i]) {
        case '"':
        case '\'': {
            size_t end = skip_string(text, length, i);
            if (end > length)
                end = length;
            for (; i < end; i++) {
                if (text[i] == '\n') {
                    line++;
                    line_start = i + 1;
                }
            }
            line_is_blank = false;
            continue;
        }
        case '#':
            while (i < length && text[i] != '\n')
                i++;
            continue;
        case '\n':
            line++;
            line_start = i + 1;
            dots = 0;
            line_is_blank = blank = true;
            break;
        case '[':
        case '{':
            if (text[i] == '[' && depth == 0 && line_is_blank && !header_has_key(text, length, i))
                return precheck_fail(error_out, line, i - line_start + 1,
                                     "a table's header must begin with a key");
            depth++;
            dots = 0;
            break;
        case ']':
        case '}':
            depth -= depth > 0;
            dots = 0;
            break;
        case '=':
        case ',':
            dots = 0;
            break;
        case '.':
            if (++dots >= CONFIG_TREE_MAX_DOTS) {
                char reason[64];
                snprintf(reason, sizeof(reason), "a key of more than %d parts",
                         CONFIG_TREE_MAX_DOTS);
                return precheck_fail(error_out, line, i - line_start + 1, reason);
            }
            break;
        default:
            break;
        }
        line_is_blank = line_is_blank && blank;
        i++;
    }
    return true;
}

config_node_t *config_node_from_text(config_arena_t *arena, const char *text,
                                     const config_origin_t *origin)
{
    size_t length = strlen(text);
    config_node_t *node = NULL;
    char *document = config_arena_alloc(arena, length + 5);
    if (!document)
        return NULL;
    memcpy(document, "v = ", 4);
    memcpy(document + 4, text, length);
    config_toml_error_t error;
    config_node_t *root = NULL;
    xp_status_t status = config_toml_parse(arena, document, length + 4, origin, &root, &error);
    if (status == XP_NO_MEMORY)
        return NULL;
    /* One key only: a text with a line break must not smuggle in a second setting. A date is what a
     * bare word may look like by accident, and no setting takes one. */
    if (status == XP_OK && root->count == 1 && root->first->kind != CONFIG_NODE_DATE) {
        node = root->first;
        node->key = "";
        node->key_length = 0;
        node->next = NULL;
    } else {
        node = config_node_create(arena, CONFIG_NODE_STRING, origin);
        if (!node)
            return NULL;
        node->text = config_arena_copy(arena, text, length);
        node->length = length;
        if (!node->text)
            return NULL;
    }
    node->raw = config_arena_copy(arena, text, length);
    return node->raw ? node : NULL;
}

static xp_status_t refuse(char *reason, size_t size, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static xp_status_t refuse(char *reason, size_t size, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(reason, size, format, arguments);
    va_end(arguments);
    return XP_INVALID;
}

/* One part of a dotted path: a key (length set) or an index in brackets (index set). */
typedef struct path_part {
    const char *key;
    size_t length;
    bool is_index;
    uint32_t index;
} path_part_t;

static xp_status_t read_part(const char **at, bool first, path_part_t *part_out, char *reason,
                             size_t reason_size)
{
    const char *p = *at;
    path_part_t part = {0};
    if (*p == '[') {
        p++;
        part.is_index = true;
        size_t digits = 0;
        for (; *p >= '0' && *p <= '9'; p++, digits++) {
            if (digits >= 4)
                return refuse(reason, reason_size, "the index is too large");
            part.index = part.index * 10 + (uint32_t)(*p - '0');
        }
        if (digits == 0 || *p != ']')
            return refuse(reason, reason_size, "expected [NUMBER]");
        p++;
    } else {
        if (!first) {
            if (*p != '.')
                return refuse(reason, reason_size, "expected '.' or '='");
            p++;
        }
        if (*p == '"' || *p == '\'') {
            char quote = *p++;
            part.key = p;
            while (*p && *p != quote)
                p++;
            if (!*p)
                return refuse(reason, reason_size, "a quote is not closed");
            part.length = (size_t)(p - part.key);
            p++;
        } else {
            part.key = p;
            /* A device's colon needs no quotes here: the shell would eat them. */
            while (bare_key_byte(*p) || *p == ':')
                p++;
            part.length = (size_t)(p - part.key);
            if (part.length == 0)
                return refuse(reason, reason_size, "a part of the key is empty or needs quotes");
        }
    }
    *at = p;
    *part_out = part;
    return XP_OK;
}

/* Replaces `target` by `value` in place, so that its parent's list stays as it is. */
static xp_status_t replace_or_merge(config_arena_t *arena, config_node_t *target,
                                    config_node_t *value, uint32_t depth)
{
    if (target->kind == CONFIG_NODE_TABLE && value->kind == CONFIG_NODE_TABLE) {
        if (depth > CONFIG_TREE_MAX_DEPTH)
            return xp_fail(XP_INVALID, "tables are nested too deeply");
        for (config_node_t *child = value->first, *next; child; child = next) {
            next = child->next;
            config_node_t *old = config_node_child(target, child->key, child->key_length);
            if (old)
                XP_TRY(replace_or_merge(arena, old, child, depth + 1));
            else
                config_node_append(target, child);
        }
        return XP_OK;
    }
    config_node_t *old = config_node_create(arena, target->kind, target->origin);
    if (!old)
        return xp_fail(XP_NO_MEMORY, "no memory for the configuration");
    *old = *target;
    config_node_t *next = target->next;
    const char *key = target->key;
    size_t key_length = target->key_length;
    *target = *value;
    target->next = next;
    target->key = key;
    target->key_length = key_length;
    target->shadowed = old;
    return XP_OK;
}

xp_status_t config_node_overlay(config_arena_t *arena, config_node_t *root, const char *key,
                                config_node_t *value, char *reason, size_t reason_size,
                                const char **after_out)
{
    /* The whole key is read before the tree is touched, so that a mistake leaves nothing behind. */
    path_part_t parts[CONFIG_TREE_MAX_DEPTH] = {0};
    uint32_t count = 0;
    const char *p = key;
    do {
        if (count == CONFIG_TREE_MAX_DEPTH)
            return refuse(reason, reason_size, "the key has too many parts");
        XP_TRY(read_part(&p, count == 0, &parts[count], reason, reason_size));
        count++;
    } while (*p && *p != '=');
    *after_out = p;

    config_node_t *at = root;
    for (uint32_t i = 0; i < count; i++) {
        const path_part_t *part = &parts[i];
        bool last = i + 1 == count;
        config_node_t *child = NULL;
        if (part->is_index) {
            if (at->kind != CONFIG_NODE_LIST)
                return refuse(reason, reason_size, "[%u] stands behind what is no list",
                              part->index);
            child = at->first;
            for (uint32_t n = 0; child && n < part->index; n++)
                child = child->next;
            if (!child && part->index != at->count)
                return refuse(reason, reason_size, "index %u, but the list has %u elements",
                              part->index, at->count);
        } else {
            if (at->kind != CONFIG_NODE_TABLE)
                return refuse(reason, reason_size, "%.*s stands below what is no table",
                              (int)(part->length > 64 ? 64 : part->length), part->key);
            child = config_node_child(at, part->key, part->length);
        }
        if (last && child)
            return replace_or_merge(arena, child, value, i);
        if (!child) {
            child = last ? value
                         : config_node_create(
                               arena, parts[i + 1].is_index ? CONFIG_NODE_LIST : CONFIG_NODE_TABLE,
                               value->origin);
            if (!child)
                return xp_fail(XP_NO_MEMORY, "no memory for the configuration");
            if (!part->is_index) {
                child->key = config_arena_copy(arena, part->key, part->length);
                child->key_length = part->length;
                if (!child->key)
                    return xp_fail(XP_NO_MEMORY, "no memory for the configuration");
            }
            config_node_append(at, child);
        }
        at = child;
    }
    return XP_OK;
}
