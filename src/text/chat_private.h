/* SPDX-License-Identifier: MIT */
/* What recognising and rendering chat templates share (private to src/text). */
#ifndef XPOOL_TEXT_CHAT_PRIVATE_H
#define XPOOL_TEXT_CHAT_PRIVATE_H

#include <jansson.h>
#include <stdint.h>

#include "text/chat_template.h"

#define CHAT_MAX_TEMPLATE_BYTES (4u << 20)
#define CHAT_MAX_JSON_DEPTH     64

typedef struct chat_input {
    const chat_message_t *messages;
    size_t count;
    const chat_options_t *options;
    const char *bos;
    const json_t *tools;        /* non-empty array, or NULL */
    const json_t *const *calls; /* by message: non-empty array of tool calls, or NULL */
} chat_input_t;

typedef xp_status_t (*chat_render_t)(const chat_input_t *input, xp_buf_t *out);
typedef struct chat_renderer {
    const char *name;
    chat_render_t render;
    bool uses_tools; /* reads tools and tool calls */
} chat_renderer_t;

extern const chat_renderer_t chat_renderers[]; /* ends with a NULL name */

/* The number that stands for a Jinja template, the same for spellings that render the same text:
 * white space between tags, quotes, a['b'] or a.b, one output or several, and what trim_blocks and
 * lstrip_blocks remove. XP_INVALID when it is no Jinja we can read. */
xp_status_t chat_fingerprint(const char *text, size_t length, uint64_t *fingerprint_out);

/* Appends a value as Python's json.dumps(value, ensure_ascii=False) writes it. */
xp_status_t chat_append_json(const json_t *value, xp_buf_t *out);
#endif
