/* SPDX-License-Identifier: MIT */
/*
 * Chat templates: renderers in C for the supported families, chosen by recognising the checkpoint's
 * Jinja text; byte-exact against Jinja. An unknown template is XP_UNSUPPORTED and says how to
 * override: models[].chat_template = "chatml" | "smollm2" | "qwen3" | "qwen2.5" | ...
 * (chat_template_names()). Where the template writes a BOS token the rendered text holds it, so it
 * is encoded without adding special tokens. A template is immutable and may be used by several
 * threads.
 */
#ifndef XPOOL_TEXT_CHAT_TEMPLATE_H
#define XPOOL_TEXT_CHAT_TEMPLATE_H

#include <stdbool.h>
#include <stddef.h>

#include "base/buf.h"
#include "base/status.h"

typedef struct chat_template chat_template_t;

typedef struct chat_message {
    const char *role;            /* "system", "user", "assistant", "tool" */
    const char *content;         /* NUL-terminated UTF-8; NULL counts as "" */
    const char *reasoning;       /* reasoning_content, or NULL */
    const char *tool_calls_json; /* JSON array text, or NULL */
} chat_message_t;

typedef struct chat_options {
    bool add_generation_prompt;
    int enable_thinking;    /* -1 = not given, 0, 1 (Qwen3) */
    const char *tools_json; /* JSON array text, or NULL */
} chat_options_t;

/* `path` as in tokenizer_load(): tokenizer_config.json, chat_template.jinja or GGUF metadata.
 * `override_name`: NULL or "" to recognise. XP_NOT_FOUND when the checkpoint has no template (base
 * model). */
xp_status_t chat_template_load(const char *path, const char *override_name,
                               chat_template_t **template_out);
void chat_template_destroy(chat_template_t *chat_template);
const char *chat_template_name(const chat_template_t *chat_template);
const char *const *chat_template_names(void); /* NULL-terminated list of built-in renderers */
xp_status_t chat_template_render(const chat_template_t *chat_template,
                                 const chat_message_t *messages, size_t count,
                                 const chat_options_t *options, xp_buf_t *text_out);
#endif
