/* SPDX-License-Identifier: MIT */
/*
 * The registry of settings: one row a setting. Parsing, bounds, help, reference page, example
 * files, dump, digest and suggestions all read this table, so they cannot drift. Constant data.
 */
#ifndef XPOOL_CONFIG_SETTINGS_H
#define XPOOL_CONFIG_SETTINGS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/status.h"
#include "config/config.h"

#define CONFIG_SOURCE_CLI  1u
#define CONFIG_SOURCE_ENV  2u
#define CONFIG_SOURCE_TOML 4u

#define CONFIG_SETTINGS_MAX 64

typedef enum config_type {
    CONFIG_TYPE_STRING = 0,
    CONFIG_TYPE_ID,   /* a model id: visible ASCII without quotes and backslash */
    CONFIG_TYPE_PATH, /* absolute, or relative to the file's folder (elsewhere: the current one) */
    CONFIG_TYPE_MODEL_PATH, /* as PATH, or file:// */
    CONFIG_TYPE_PROGRAM,    /* as PATH when it holds a slash, else looked up by whoever runs it */
    CONFIG_TYPE_URI,        /* absolute path or file:// */
    CONFIG_TYPE_ADDRESS,    /* HOST:PORT */
    CONFIG_TYPE_BOOLEAN,
    CONFIG_TYPE_INTEGER,
    CONFIG_TYPE_FLOAT,
    CONFIG_TYPE_SIZE, /* bytes, or text with KiB, MiB, GiB, TiB */
    CONFIG_TYPE_CHOICE,
    CONFIG_TYPE_DEVICES,
    CONFIG_TYPE_CUDA_DEVICES, /* alias form: an integer N means cuda:N */
    CONFIG_TYPE_CPUS,
    CONFIG_TYPE_STRINGS,
} config_type_t;

typedef enum config_scope {
    CONFIG_SCOPE_ROOT = 0, /* offsets in config_t */
    CONFIG_SCOPE_MODEL,    /* in config_model_t; keys begin with models[]. */
    /* In config_device_t; keys begin with devices."cpu:N". or devices."cuda:N". */
    CONFIG_SCOPE_DEVICE,
} config_scope_t;

typedef struct config_choice {
    const char *name; /* NULL ends a list; later names of one value are synonyms */
    int value;
} config_choice_t;

typedef struct config_setting {
    const char *key;
    config_scope_t scope;
    config_type_t type;
    size_t offset, size;
    size_t count_offset; /* of the uint32_t element count of list types */
    double minimum, maximum;
    const config_choice_t *choices; /* NULL where the destination holds a name, see names */
    const char *default_text;       /* as typed on a command line; NULL: none, or worked out */
    const char *default_note; /* how the default is worked out, or what an empty value means */
    const char *environment;  /* variable that may set it, or NULL */
    unsigned sources;
    const char *alias_of; /* another spelling of this key */
    const char *example;  /* value for the example file when the default says too little */
    const char *help;
} config_setting_t;

extern const config_setting_t config_settings[];
extern const uint32_t config_setting_count;

/* By the key as written in the registry. NULL when there is none. */
const config_setting_t *config_setting_find(const char *key);
uint32_t config_setting_index(const config_setting_t *setting);
/* Whether some setting's key begins with `prefix` and a dot. */
bool config_setting_is_section(const char *prefix);
/* The registry key, or section, that looks most like `key`; false when none is near. */
bool config_setting_nearest(const char *key, char *nearest_out, size_t size);

/* "an integer from 1 to 16", "one of fifo, random, deadline", ... */
xp_status_t config_setting_allowed(const config_setting_t *setting, xp_buf_t *text_out);
/* The value at `base` (config_t, config_model_t or config_device_t) as a TOML literal. */
xp_status_t config_setting_literal(const config_setting_t *setting, const void *base,
                                   xp_buf_t *text_out);
/* Appends `text` as a TOML basic string. */
xp_status_t config_text_quote(const char *text, xp_buf_t *text_out);

/* Edit distance (insert, delete, replace, swap of neighbours), at most `limit` + 1. */
uint32_t config_text_distance(const char *left, const char *right, uint32_t limit);
/* The candidate nearest to `word`, or NULL when none is near enough to be meant. */
const char *config_text_nearest(const char *word, const char *const *candidates, uint32_t count);

/* A list of every setting for a terminal; `xpool help settings`. */
xp_status_t config_settings_help(xp_buf_t *text_out);
#endif
