/* SPDX-License-Identifier: MIT */
/*
 * Finding a checkpoint's chat template, recognising it, and rendering. Loading runs once; a loaded
 * template is immutable and may be used by several threads.
 */
#include "text/chat_template.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/gguf.h"
#include "text/chat_private.h"
#include "text/locate.h"
#include "text/unicode.h"

#define CONFIG_MAX_BYTES  (64u << 20)
#define CHAT_MAX_MESSAGES 65536

struct chat_template {
    const chat_renderer_t *renderer;
    char *bos;
};

/* chat_fingerprint() of the templates that a renderer is equal to. */
static const struct {
    uint64_t fingerprint;
    const char *name;
} known_templates[] = {
    {0x9eac41f4cf1c724a, "chatml"},
    {0xb30a1a3de03bb511, "chatml"}, /* sets add_generation_prompt to false where it is not given */
    {0x4d40d06fc0317bb9, "smollm2"},
    {0xe81683eafdd6fbe4, "qwen2"},
    {0x1f97847e3c9557bd, "qwen2.5"},
    {0xf5278821aa73b2b3, "qwen3"},
    {0xa8af7d74953109e1, "llama3"},
};

static const chat_renderer_t *find_renderer(const char *name)
{
    for (const chat_renderer_t *renderer = chat_renderers; renderer->name; renderer++) {
        if (!strcmp(renderer->name, name))
            return renderer;
    }
    return NULL;
}

const char *const *chat_template_names(void)
{
    static const char *const names[] = {"chatml", "smollm2", "qwen2", "qwen2.5",
                                        "qwen3",  "llama3",  NULL};
    return names;
}

static void list_names(char *out, size_t size)
{
    size_t used = 0;
    out[0] = '\0';
    for (const char *const *name = chat_template_names(); *name; name++) {
        int added = snprintf(out + used, size - used, "%s%s", used ? ", " : "", *name);
        used += added > 0 && (size_t)added < size - used ? (size_t)added : 0;
    }
}

/* ---- where the template's text comes from ---- */

typedef struct source {
    char where[TEXT_MAX_PATH + 32];
    char *text; /* NULL: there is none */
    size_t length;
    char *bos; /* NULL: not said */
} source_t;

static void source_fini(source_t *source)
{
    free(source->text);
    free(source->bos);
}

static xp_status_t copy_text(const char *text, size_t length, char **copy_out)
{
    char *copy = malloc(length + 1);
    if (!copy)
        return xp_fail(XP_NO_MEMORY, "no memory for a chat template");
    memcpy(copy, text, length);
    copy[length] = '\0';
    *copy_out = copy;
    return XP_OK;
}

static xp_status_t read_gguf(const char *path, source_t *source)
{
    gguf_file_t *file;
    const char *text;
    size_t length;
    uint64_t id;
    XP_TRY(gguf_open(path, &file));
    snprintf(source->where, sizeof(source->where), "%s: tokenizer.chat_template", path);
    xp_status_t status = gguf_get_string(file, "tokenizer.chat_template", &text, &length);
    if (status == XP_OK) {
        source->length = length;
        status = copy_text(text, length, &source->text);
    } else if (status == XP_NOT_FOUND)
        status = XP_OK;
    if (status == XP_OK && gguf_get_u64(file, "tokenizer.ggml.bos_token_id", &id) == XP_OK &&
        gguf_array_string(file, "tokenizer.ggml.tokens", (size_t)id, &text, &length) == XP_OK)
        status = copy_text(text, length, &source->bos);
    gguf_close(file);
    return status;
}

/* "chat_template" is a text, or a list of {"name", "template"} of which "default" counts. */
static const json_t *template_in(const json_t *config)
{
    const json_t *value = json_object_get(config, "chat_template");
    for (size_t i = 0; i < json_array_size(value); i++) {
        const json_t *entry = json_array_get(value, i);
        const char *name = json_string_value(json_object_get(entry, "name"));
        if (name && !strcmp(name, "default"))
            return json_object_get(entry, "template");
    }
    return value;
}

static xp_status_t read_config(const char *path, source_t *source)
{
    char *data;
    size_t length;
    json_error_t error;
    XP_TRY(xp_file_read(path, CONFIG_MAX_BYTES, &data, &length));
    /* model_max_length is often 10^30, which is no integer to the JSON reader. */
    json_t *config = json_loadb(data, length, JSON_ALLOW_NUL | JSON_DECODE_INT_AS_REAL, &error);
    free(data);
    if (!config)
        return xp_fail(XP_INVALID, "%s:%d:%d: %s", path, error.line, error.column, error.text);
    xp_status_t status = XP_OK;
    const json_t *text = template_in(config);
    const json_t *bos = json_object_get(config, "bos_token");
    if (json_is_object(bos))
        bos = json_object_get(bos, "content");
    if (text && !json_is_null(text) && !json_is_string(text))
        status = xp_fail(XP_INVALID, "%s: chat_template must be a text", path);
    if (status == XP_OK && json_is_string(text) && !source->text) {
        snprintf(source->where, sizeof(source->where), "%s: chat_template", path);
        source->length = json_string_length(text);
        status = copy_text(json_string_value(text), source->length, &source->text);
    }
    if (status == XP_OK && json_is_string(bos))
        status = copy_text(json_string_value(bos), json_string_length(bos), &source->bos);
    json_decref(config);
    return status;
}

static xp_status_t read_folder(const char *folder, source_t *source)
{
    char path[TEXT_MAX_PATH];
    snprintf(source->where, sizeof(source->where), "%s", folder);
    /* As in transformers, the file of its own wins. */
    if (text_path_exists(folder, "chat_template.jinja", path)) {
        XP_TRY(xp_file_read(path, CHAT_MAX_TEMPLATE_BYTES, &source->text, &source->length));
        snprintf(source->where, sizeof(source->where), "%s", path);
    }
    return text_path_exists(folder, "tokenizer_config.json", path) ? read_config(path, source)
                                                                   : XP_OK;
}

static xp_status_t read_source(const char *path, source_t *source)
{
    text_location_t location;
    XP_TRY(text_locate(path, &location));
    if (location.kind == TEXT_GGUF)
        return read_gguf(location.path, source);
    if (location.kind == TEXT_FILE) {
        char *slash = strrchr(location.path, '/');
        if (slash)
            *slash = '\0';
        return read_folder(slash ? location.path : ".", source);
    }
    return read_folder(location.path, source);
}

/* ---- loading ---- */

static xp_status_t recognise(const source_t *source, const chat_renderer_t **renderer_out)
{
    char names[256];
    uint64_t fingerprint = 0;
    list_names(names, sizeof(names));
    if (!source->text)
        return xp_fail(XP_NOT_FOUND,
                       "%s has no chat template (a base model?); models[].chat_template can name "
                       "one of %s",
                       source->where, names);
    xp_status_t status = chat_fingerprint(source->text, source->length, &fingerprint);
    if (status == XP_NO_MEMORY)
        return status;
    for (size_t i = 0; i < sizeof(known_templates) / sizeof(known_templates[0]); i++) {
        if (status == XP_OK && known_templates[i].fingerprint == fingerprint) {
            *renderer_out = find_renderer(known_templates[i].name);
            return XP_OK;
        }
    }
    return xp_fail(XP_UNSUPPORTED,
                   "%s: this chat template is unknown (fingerprint %016" PRIx64
                   "); set models[].chat_template to the one that fits: %s",
                   source->where, fingerprint, names);
}

xp_status_t chat_template_load(const char *path, const char *override_name,
                               chat_template_t **template_out)
{
    const chat_renderer_t *renderer = NULL;
    xp_status_t status = XP_OK;
    source_t *source = calloc(1, sizeof(*source));
    chat_template_t *chat_template = calloc(1, sizeof(*chat_template));
    if (!source || !chat_template) {
        status = xp_fail(XP_NO_MEMORY, "no memory for a chat template");
        goto done;
    }
    if (override_name && override_name[0]) {
        renderer = find_renderer(override_name);
        if (!renderer) {
            char names[256];
            list_names(names, sizeof(names));
            status = xp_fail(XP_INVALID, "there is no chat template \"%.64s\"; there are %s",
                             override_name, names);
            goto done;
        }
    }
    XP_TRY_GOTO(status, done, read_source(path, source));
    if (!renderer)
        XP_TRY_GOTO(status, done, recognise(source, &renderer));
    chat_template->renderer = renderer;
    chat_template->bos = source->bos;
    source->bos = NULL;
    if (!chat_template->bos)
        XP_TRY_GOTO(status, done, copy_text("<|begin_of_text|>", 17, &chat_template->bos));
    *template_out = chat_template;
    chat_template = NULL;
done:
    if (source)
        source_fini(source);
    free(source);
    chat_template_destroy(chat_template);
    return status;
}

void chat_template_destroy(chat_template_t *chat_template)
{
    if (!chat_template)
        return;
    free(chat_template->bos);
    free(chat_template);
}

const char *chat_template_name(const chat_template_t *chat_template)
{
    return chat_template->renderer->name;
}

/* ---- rendering ---- */

/* A JSON array; NULL for none or an empty one. */
static xp_status_t parse_list(const char *json, const char *what, json_t **list_out)
{
    json_error_t error;
    *list_out = NULL;
    if (!json || !json[0])
        return XP_OK;
    json_t *list = json_loads(json, JSON_ALLOW_NUL | JSON_DECODE_ANY, &error);
    if (!list)
        return xp_fail(XP_INVALID, "%s: %s", what, error.text);
    if (!json_is_null(list) && !json_is_array(list)) {
        json_decref(list);
        return xp_fail(XP_INVALID, "%s must be a list", what);
    }
    if (json_array_size(list) == 0) {
        json_decref(list);
        return XP_OK;
    }
    *list_out = list;
    return XP_OK;
}

static xp_status_t check_messages(const chat_message_t *messages, size_t count)
{
    if (count > CHAT_MAX_MESSAGES)
        return xp_fail(XP_INVALID, "%zu messages; at most %d", count, CHAT_MAX_MESSAGES);
    for (size_t i = 0; i < count; i++) {
        const char *texts[] = {messages[i].role, messages[i].content, messages[i].reasoning};
        if (!messages[i].role)
            return xp_fail(XP_INVALID, "messages[%zu] has no role", i);
        for (size_t k = 0; k < 3; k++) {
            if (texts[k] && !text_utf8_valid(texts[k], strlen(texts[k])))
                return xp_fail(XP_INVALID, "messages[%zu] is not valid UTF-8", i);
        }
    }
    return XP_OK;
}

xp_status_t chat_template_render(const chat_template_t *chat_template,
                                 const chat_message_t *messages, size_t count,
                                 const chat_options_t *options, xp_buf_t *text_out)
{
    const chat_renderer_t *renderer = chat_template->renderer;
    xp_status_t status;
    json_t *tools = NULL;
    size_t before = text_out->length;
    XP_TRY(check_messages(messages, count));
    json_t **calls = calloc(count + 1, sizeof(json_t *));
    if (!calls)
        return xp_fail(XP_NO_MEMORY, "no memory for %zu messages", count);
    if (renderer->uses_tools) {
        XP_TRY_GOTO(status, done, parse_list(options->tools_json, "tools", &tools));
        for (size_t i = 0; i < count; i++)
            XP_TRY_GOTO(status, done,
                        parse_list(messages[i].tool_calls_json, "tool_calls", &calls[i]));
    }
    chat_input_t input = {.messages = messages,
                          .count = count,
                          .options = options,
                          .bos = chat_template->bos,
                          .tools = tools,
                          .calls = (const json_t *const *)calls};
    status = xp_buf_append(text_out, "", 0);
    if (status == XP_OK)
        status = renderer->render(&input, text_out);
    if (status != XP_OK && text_out->data) { /* outputs are written only on success */
        text_out->length = before;
        text_out->data[before] = '\0';
    }
done:
    for (size_t i = 0; i < count; i++)
        json_decref(calls[i]);
    json_decref(tools);
    free(calls);
    return status;
}
