/* SPDX-License-Identifier: MIT */
/* The parts of the tokenizer.json loader that live in two files (private to src/text). */
#ifndef XPOOL_TEXT_LOAD_JSON_H
#define XPOOL_TEXT_LOAD_JSON_H

#include <jansson.h>

#include "text/internal.h"

#define LOAD_MAX_DEPTH 8

/* Typed members of an object; absent or null gives the default. `what` names the object. */
xp_status_t load_text(const json_t *object, const char *what, const char *key, const char *fallback,
                      const char **text_out, size_t *length_out);
xp_status_t load_bool(const json_t *object, const char *what, const char *key, bool fallback,
                      bool *value_out);
xp_status_t load_uint(const json_t *object, const char *what, const char *key, uint32_t fallback,
                      uint32_t *value_out);
/* The member "type"; XP_INVALID when there is none. */
xp_status_t load_type(const json_t *object, const char *what, const char **type_out);
/* One character, stored NUL-terminated. */
xp_status_t load_character(const json_t *object, const char *what, const char *key,
                           const char *fallback, char character_out[8]);
/* {"String": …}, {"Regex": …} or a plain string. */
xp_status_t load_pattern(const json_t *object, const char *what, text_regex_t **regex_out);

xp_status_t load_normalizer(tokenizer_t *tokenizer, const json_t *json, int depth);
xp_status_t load_pretokenizer(tokenizer_t *tokenizer, const json_t *json, int depth);
xp_status_t load_postprocessor(tokenizer_t *tokenizer, const json_t *json, int depth);
xp_status_t load_decoder(tokenizer_t *tokenizer, const json_t *json);

/* Also used for GGUF: appends the stages of the byte alphabet. use_regex: GPT-2's pattern first. */
xp_status_t add_byte_level(tokenizer_t *tokenizer, bool add_prefix_space, bool use_regex);
xp_status_t add_split(tokenizer_t *tokenizer, const char *pattern);
xp_status_t add_class(tokenizer_t *tokenizer, bool (*member)(uint32_t), split_behavior_t behavior);
#endif
