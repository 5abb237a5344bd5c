/* SPDX-License-Identifier: MIT */
/*
 * Typed reads from one JSON object of a checkpoint's configuration. Private to src/model.
 *
 * Every message names the file, the key (with the object it lies in), what was found and what is
 * allowed. A key that is null counts as absent, as transformers treats it.
 */
#ifndef XPOOL_MODEL_CONFIG_READER_H
#define XPOOL_MODEL_CONFIG_READER_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

typedef struct config_reader {
    const json_t *object;
    const char *where;  /* file name for messages */
    const char *prefix; /* "" or "rope_scaling." */
} config_reader_t;

/* Integer fallbacks: this value makes a key required. */
#define CONFIG_REQUIRED (-1)

/* NULL when absent or null. */
json_t *config_member(const config_reader_t *reader, const char *key);
/* The first of `key` and `alias` that is present gives the value. `alias` may be NULL. */
xp_status_t config_u32(const config_reader_t *reader, const char *key, const char *alias,
                       uint32_t minimum, uint32_t maximum, int64_t fallback, uint32_t *value_out);
xp_status_t config_double(const config_reader_t *reader, const char *key, double minimum,
                          double maximum, double fallback, double *value_out);
xp_status_t config_bool(const config_reader_t *reader, const char *key, bool fallback,
                        bool *value_out);
/* NULL when absent; lives as long as the JSON tree. */
xp_status_t config_string(const config_reader_t *reader, const char *key, const char **text_out);
/* XP_OK with NULL when absent. */
xp_status_t config_array(const config_reader_t *reader, const char *key, json_t **array_out);
xp_status_t config_object(const config_reader_t *reader, const char *key, json_t **object_out);

/* Parses a JSON text whose root must be an object; the caller owns `*root_out`. */
xp_status_t config_parse(const char *json, size_t length, const char *where, json_t **root_out);
#endif
