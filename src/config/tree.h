/* SPDX-License-Identifier: MIT */
/*
 * The tree of values a configuration is made of, before it is checked: what the TOML file, the
 * environment and the command line said, each node with its origin and position.
 *
 * Plain C types on purpose: toml_reader.cpp is the only C++ file of the module and fills this tree.
 * Nodes and their texts live in one arena and are never freed one by one. Owned by the thread that
 * loads the configuration; nothing here does I/O.
 */
#ifndef XPOOL_CONFIG_TREE_H
#define XPOOL_CONFIG_TREE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

#define CONFIG_TREE_MAX_DEPTH 32      /* tables and lists inside each other */
#define CONFIG_TREE_MAX_BYTES 1048576 /* of one TOML text */
#define CONFIG_TREE_MAX_DOTS  64      /* parts of one dotted key */

typedef struct config_arena {
    struct config_arena_block *blocks;
} config_arena_t;

void config_arena_fini(config_arena_t *arena);
/* Zeroed memory, or NULL when the system has none. */
void *config_arena_alloc(config_arena_t *arena, size_t bytes);
/* A NUL-terminated copy. */
char *config_arena_copy(config_arena_t *arena, const char *text, size_t length);

typedef enum config_origin_kind {
    CONFIG_ORIGIN_DEFAULT = 0,
    CONFIG_ORIGIN_FILE,
    CONFIG_ORIGIN_ENVIRONMENT,
    CONFIG_ORIGIN_CLI,
} config_origin_kind_t;

typedef struct config_origin {
    config_origin_kind_t kind;
    const char *name; /* file as the user named it, environment variable; "" otherwise */
} config_origin_t;

typedef enum config_node_kind {
    CONFIG_NODE_STRING = 0,
    CONFIG_NODE_INTEGER,
    CONFIG_NODE_FLOAT,
    CONFIG_NODE_BOOLEAN,
    CONFIG_NODE_DATE, /* no setting takes one; kept so that the error can say so */
    CONFIG_NODE_LIST,
    CONFIG_NODE_TABLE,
} config_node_kind_t;

typedef struct config_node {
    config_node_kind_t kind;
    const config_origin_t *origin;
    uint32_t line, column;         /* of the value, from 1; 0 outside files */
    uint32_t key_line, key_column; /* of its key */
    const char *key;               /* NUL-terminated; "" inside a list */
    size_t key_length;             /* differs from strlen(key) when the key holds a NUL */
    const char *text;              /* STRING: the value */
    size_t length;
    const char *raw; /* environment and command line: the value as typed; else NULL */
    int64_t integer;
    double real;
    bool boolean;
    struct config_node *first, *last, *next; /* LIST, TABLE: children in order */
    uint32_t count;
    /* What a source of lower precedence said for the same key: still checked, never used. */
    const struct config_node *shadowed;
} config_node_t;

config_node_t *config_node_create(config_arena_t *arena, config_node_kind_t kind,
                                  const config_origin_t *origin);
void config_node_append(config_node_t *parent, config_node_t *child);
/* The child of a table by key, or NULL. */
config_node_t *config_node_child(const config_node_t *table, const char *key, size_t length);

typedef struct config_toml_error {
    uint32_t line, column;
    char text[256];
} config_toml_error_t;

/* Parses TOML 1.0. XP_INVALID fills `*error_out`; XP_NO_MEMORY. Never throws. */
xp_status_t config_toml_parse(config_arena_t *arena, const char *text, size_t length,
                              const config_origin_t *origin, config_node_t **root_out,
                              config_toml_error_t *error_out);

/* Refuses what the parser does not take well: keys of more than CONFIG_TREE_MAX_DOTS parts, which
 * would nest its own objects without bound, and table headers that begin with no key, on which it
 * asserts. False with `*error_out` filled. */
bool config_toml_precheck(const char *text, size_t length, config_toml_error_t *error_out);

/* A value as typed on a command line or in an environment variable: a TOML value, or where it is
 * none, the text itself as a string. NULL when out of memory. */
config_node_t *config_node_from_text(config_arena_t *arena, const char *text,
                                     const config_origin_t *origin);

/* Puts `value` at the dotted path `key` (bare, quoted and [index] parts; ends at NUL or '=').
 * Tables are merged, everything else is replaced and remembered as shadowed. On XP_INVALID,
 * `reason` says why. `*after_out`: where the key ended. */
xp_status_t config_node_overlay(config_arena_t *arena, config_node_t *root, const char *key,
                                config_node_t *value, char *reason, size_t reason_size,
                                const char **after_out);

#ifdef __cplusplus
}
#endif
#endif
