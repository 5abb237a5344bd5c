/* SPDX-License-Identifier: MIT */
/*
 * Loading: reads the file, lays environment and command line over it, resolves, and hands out one
 * immutable config_t. Runs on the calling thread at start; later only the getters are used, from
 * any thread.
 */
#include "config/handoff.h"
#include "config/resolve.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

extern char **environ;

#define REPORT_MAX_BYTES 65536

void config_destroy(config_t *config)
{
    if (!config)
        return;
    for (uint32_t i = 0; i < config->model_count; i++)
        for (uint32_t j = 0; j < config->models[i].engine_arg_count; j++)
            free(config->models[i].engine_args[j]);
    if (config->record) {
        config_arena_fini(&config->record->arena);
        free(config->record);
    }
    free(config);
}

static xp_status_t no_memory(void)
{
    return xp_fail(XP_NO_MEMORY, "no memory for the configuration");
}

static xp_status_t overlay_environment(config_resolver_t *resolver, config_node_t *root)
{
    config_arena_t *arena = &resolver->record->arena;
    for (uint32_t i = 0; i < config_setting_count; i++) {
        const config_setting_t *setting = &config_settings[i];
        const char *value = setting->environment ? getenv(setting->environment) : NULL;
        if (!value || !value[0]) /* an empty line in an .env file means "not set" */
            continue;
        config_origin_t *origin = config_arena_alloc(arena, sizeof(*origin));
        if (!origin)
            return no_memory();
        *origin = (config_origin_t){CONFIG_ORIGIN_ENVIRONMENT, setting->environment};
        config_node_t *node = config_node_from_text(arena, value, origin);
        if (!node)
            return no_memory();
        char reason[128];
        const char *after;
        xp_status_t status =
            config_node_overlay(arena, root, setting->key, node, reason, sizeof(reason), &after);
        if (status == XP_NO_MEMORY)
            return status;
        if (status != XP_OK)
            config_issue_add_at(&resolver->issues, origin, 0, 0, "%s: %s", setting->key, reason);
    }
    return XP_OK;
}

/* A misspelt variable would be ignored in silence; other programs' XPOOL_ names are left alone. */
static void warn_environment(config_resolver_t *resolver)
{
    for (char **entry = environ; entry && *entry; entry++) {
        char name[64];
        size_t length = strcspn(*entry, "=");
        if (strncmp(*entry, "XPOOL_", 6) != 0 || length >= sizeof(name))
            continue;
        memcpy(name, *entry, length);
        name[length] = '\0';
        bool known = strcmp(name, "XPOOL_CONFIG") == 0 || /* and those that are no settings */
                     strcmp(name, CONFIG_HANDOFF_VARIABLE) == 0 ||
                     strcmp(name, "XPOOL_PYTHON") == 0 || strcmp(name, "XPOOL_MODEL_ID") == 0;
        const char *nearest =
            config_text_distance(name, "XPOOL_CONFIG", 2) <= 2 ? "XPOOL_CONFIG" : NULL;
        for (uint32_t i = 0; i < config_setting_count && !known; i++) {
            const char *candidate = config_settings[i].environment;
            if (!candidate)
                continue;
            known = strcmp(name, candidate) == 0;
            if (config_text_distance(name, candidate, 2) <= 2)
                nearest = candidate;
        }
        if (!known && nearest)
            config_warn(resolver, "environment variable %s is ignored; did you mean %s?", name,
                        nearest);
    }
}

static xp_status_t overlay_command_line(config_resolver_t *resolver, config_node_t *root,
                                        const config_overrides_t *overrides)
{
    config_arena_t *arena = &resolver->record->arena;
    for (uint32_t i = 0; overrides && i < overrides->count; i++) {
        config_node_t *node =
            config_node_from_text(arena, overrides->values[i], &resolver->cli_origin);
        if (!node)
            return no_memory();
        char reason[128];
        const char *key = overrides->keys[i], *after;
        xp_status_t status =
            config_node_overlay(arena, root, key, node, reason, sizeof(reason), &after);
        if (status == XP_NO_MEMORY)
            return status;
        if (status != XP_OK)
            config_issue_add_at(&resolver->issues, &resolver->cli_origin, 0, 0, "%.*s: %s",
                                (int)(strcspn(key, "=") < 80 ? strcspn(key, "=") : 80), key,
                                reason);
    }
    return XP_OK;
}

/* The record that config_load() returns in, cut at a whole line where the report is longer. */
static xp_status_t fail_with_report(const xp_buf_t *report)
{
    if (report->length < XP_ERROR_TEXT_MAX)
        return xp_fail(XP_INVALID, "%s", report->data);
    char text[XP_ERROR_TEXT_MAX];
    size_t length = sizeof(text) - 64;
    memcpy(text, report->data, length);
    text[length] = '\0';
    char *last = strrchr(text, '\n');
    if (last)
        *last = '\0';
    return xp_fail(XP_INVALID, "%s\n... (xpool config check shows more)", text);
}

xp_status_t config_load_text(const char *text, size_t length, const char *name, const char *folder,
                             const config_overrides_t *overrides, config_t **config_out,
                             xp_buf_t *report)
{
    xp_status_t status;
    config_t *config = calloc(1, sizeof(*config));
    config_resolver_t *resolver = calloc(1, sizeof(*resolver));
    xp_buf_t own_report;
    xp_buf_init(&own_report, REPORT_MAX_BYTES);
    if (config)
        config->record = calloc(1, sizeof(*config->record));
    if (!config || !resolver || !config->record) {
        status = no_memory();
        goto done;
    }
    config_arena_t *arena = &config->record->arena;
    resolver->config = config;
    resolver->record = config->record;
    resolver->file_origin = (config_origin_t){CONFIG_ORIGIN_FILE, name};
    resolver->cli_origin = (config_origin_t){CONFIG_ORIGIN_CLI, ""};
    resolver->default_origin = (config_origin_t){CONFIG_ORIGIN_DEFAULT, ""};
    snprintf(resolver->file_folder, sizeof(resolver->file_folder), "%s", folder ? folder : "");
    if (!getcwd(resolver->current_folder, sizeof(resolver->current_folder))) {
        status = xp_fail_errno(XP_IO, "cannot tell the current folder");
        goto done;
    }

    config_node_t *root = NULL;
    if (text) {
        config_toml_error_t error;
        status = config_toml_parse(arena, text, length, &resolver->file_origin, &root, &error);
        if (status == XP_NO_MEMORY)
            goto done;
        if (status != XP_OK)
            config_issue_add_at(&resolver->issues, &resolver->file_origin, error.line, error.column,
                                "%s", error.text);
    } else {
        root = config_node_create(arena, CONFIG_NODE_TABLE, &resolver->default_origin);
        if (!root) {
            status = no_memory();
            goto done;
        }
    }
    if (root) {
        warn_environment(resolver);
        XP_TRY_GOTO(status, done, overlay_environment(resolver, root));
        XP_TRY_GOTO(status, done, overlay_command_line(resolver, root, overrides));
        resolver->running = overrides && overrides->running;
        config_walk(resolver, root);
        config_finish(resolver);
    }
    if (resolver->out_of_memory) {
        status = no_memory();
        goto done;
    }
    if (resolver->issues.total) {
        XP_TRY_GOTO(status, done, config_issues_report(&resolver->issues, &own_report));
        status = fail_with_report(&own_report);
        if (report)
            xp_buf_append(report, own_report.data, own_report.length);
        goto done;
    }
    XP_TRY_GOTO(status, done, config_digest_compute(config));
    *config_out = config;
    config = NULL;
    status = XP_OK;
done:
    xp_buf_fini(&own_report);
    free(resolver);
    config_destroy(config);
    return status;
}

/* The folder relative paths count from, free of symbolic links: the file's, or for pipes and
 * devices the current one. */
static xp_status_t folder_of(const char *path, char *folder_out, size_t size, char *source_out,
                             size_t source_size)
{
    char text[PATH_MAX], resolved[PATH_MAX];
    struct stat info;
    if (snprintf(text, sizeof(text), "%s", path) >= (int)sizeof(text))
        return xp_fail(XP_INVALID, "the configuration's path is too long");
    char *slash = strrchr(text, '/');
    const char *base = slash ? slash + 1 : text;
    char name[PATH_MAX];
    snprintf(name, sizeof(name), "%s", base);
    if (stat(path, &info) == 0 && !S_ISREG(info.st_mode))
        snprintf(text, sizeof(text), ".");
    else if (!slash)
        snprintf(text, sizeof(text), ".");
    else
        slash[slash == text ? 1 : 0] = '\0';
    if (!realpath(text, resolved))
        return xp_fail_errno(XP_IO, "cannot resolve the folder of %s", path);
    const char *root = strcmp(resolved, "/") == 0 ? "" : resolved;
    if (snprintf(folder_out, size, "%s", root) >= (int)size ||
        snprintf(source_out, source_size, "%s/%s", root, name) >= (int)source_size)
        return xp_fail(XP_INVALID, "%s: the path is longer than %zu bytes", path, source_size - 1);
    return XP_OK;
}

xp_status_t config_load_report(const config_overrides_t *overrides, config_t **config_out,
                               xp_buf_t *report)
{
    xp_status_t status;
    char *text = NULL, folder[CONFIG_MAX_PATH] = "", source[CONFIG_MAX_PATH] = "";
    char *handed_on = NULL;
    size_t length = 0;
    config_t *config = NULL;
    config_overrides_t merged;
    const char *path =
        overrides && overrides->config_path ? overrides->config_path : getenv("XPOOL_CONFIG");
    if (path && !path[0])
        path = NULL;
    if (path) {
        XP_TRY_GOTO(status, done, xp_file_read(path, CONFIG_TREE_MAX_BYTES, &text, &length));
        XP_TRY_GOTO(status, done, folder_of(path, folder, sizeof(folder), source, sizeof(source)));
    }
    XP_TRY_GOTO(
        status, done,
        config_handoff_read(getenv(CONFIG_HANDOFF_VARIABLE), overrides, &handed_on, &merged));
    status = config_load_text(text, length, path ? path : "", folder, &merged, &config, report);
    if (status != XP_OK)
        goto reported;
    snprintf(config->source_path, sizeof(config->source_path), "%s", source);
    *config_out = config;
    free(text);
    free(handed_on);
    return XP_OK;
done:
    xp_fail_context(status, "configuration");
reported:
    free(text);
    free(handed_on);
    if (report && report->length == 0)
        xp_buf_append_text(report, xp_error_last()->text);
    return status;
}

xp_status_t config_load(const config_overrides_t *overrides, config_t **config_out)
{
    return config_load_report(overrides, config_out, NULL);
}

uint32_t config_warning_count(const config_t *config)
{
    return config->record ? config->record->warning_count : 0;
}

const char *config_warning(const config_t *config, uint32_t index)
{
    return index < config_warning_count(config) ? config->record->warnings[index] : NULL;
}

const config_model_t *config_model_find(const config_t *config, const char *model_id)
{
    for (uint32_t i = 0; i < config->model_count; i++)
        if (strcmp(config->models[i].id, model_id) == 0)
            return &config->models[i];
    return NULL;
}

xp_status_t config_model_path_of(const config_t *config, const char *model_id,
                                 const char **path_out)
{
    const config_model_t *model = config_model_find(config, model_id);
    if (!model) {
        const char *ids[CONFIG_MAX_MODELS];
        for (uint32_t i = 0; i < config->model_count; i++)
            ids[i] = config->models[i].id;
        const char *nearest = config_text_nearest(model_id, ids, config->model_count);
        return xp_fail(XP_NOT_FOUND, "no model \"%.96s\" is configured%s%s%s", model_id,
                       nearest ? "; did you mean " : "", nearest ? nearest : "",
                       nearest ? "?" : "");
    }
    *path_out = model->path;
    return XP_OK;
}

const config_device_t *config_device_find(const config_t *config, bool ffn_role, const char *name,
                                          uint32_t *index_out)
{
    const config_device_t *devices = ffn_role ? config->ffn : config->atn;
    uint32_t count = ffn_role ? config->ffn_count : config->atn_count;
    for (uint32_t i = 0; i < count; i++) {
        if (strcmp(devices[i].name, name) == 0) {
            if (index_out)
                *index_out = i;
            return &devices[i];
        }
    }
    return NULL;
}

uint32_t config_scope_items(const config_t *config, config_scope_t scope)
{
    return scope == CONFIG_SCOPE_ROOT    ? 1
           : scope == CONFIG_SCOPE_MODEL ? config->model_count
                                         : config->record->device_count;
}

const void *config_setting_base(const config_t *config, const config_setting_t *setting,
                                uint32_t item)
{
    return setting->scope == CONFIG_SCOPE_ROOT    ? (const void *)config
           : setting->scope == CONFIG_SCOPE_MODEL ? (const void *)&config->models[item]
                                                  : (const void *)config->record->devices[item];
}

const config_slot_t *config_setting_slot(const config_t *config, const config_setting_t *setting,
                                         uint32_t item)
{
    const struct config_record *record = config->record;
    uint32_t index = config_setting_index(setting);
    return setting->scope == CONFIG_SCOPE_ROOT    ? &record->root[index]
           : setting->scope == CONFIG_SCOPE_MODEL ? &record->models[item][index]
                                                  : &record->device_slots[item][index];
}

bool config_setting_applies(const config_t *config, const config_setting_t *setting, uint32_t item)
{
    return setting->scope != CONFIG_SCOPE_DEVICE ||
           config_setting_of_device(setting, config->record->devices[item]->kind);
}

const char *config_device_pattern(config_device_kind_t kind)
{
    return kind == CONFIG_DEVICE_CUDA ? "devices.\"cuda:N\"" : "devices.\"cpu:N\"";
}

bool config_setting_of_device(const config_setting_t *setting, config_device_kind_t kind)
{
    const char *pattern = config_device_pattern(kind);
    return setting->scope == CONFIG_SCOPE_DEVICE &&
           strncmp(setting->key, pattern, strlen(pattern)) == 0;
}

xp_status_t config_setting_item_key(const config_t *config, const config_setting_t *setting,
                                    uint32_t item, char *out, size_t size)
{
    int length;
    if (setting->scope == CONFIG_SCOPE_MODEL)
        length = snprintf(out, size, "models[%u]%s", item, setting->key + strlen("models[]"));
    else if (setting->scope == CONFIG_SCOPE_DEVICE)
        length = snprintf(out, size, "devices.\"%s\"%s", config->record->devices[item]->name,
                          setting->key +
                              strlen(config_device_pattern(config->record->devices[item]->kind)));
    else
        length = snprintf(out, size, "%s", setting->key);
    return length < (int)size ? XP_OK : xp_fail(XP_INVALID, "the key %s is too long", setting->key);
}
