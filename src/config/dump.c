/* SPDX-License-Identifier: MIT */
/* Prints a resolved configuration as TOML or JSON. Reads only; any thread. */
#include "config/dump.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config/resolve.h"

#define LITERAL_MAX_BYTES 1048576
#define COMMENT_COLUMN    56
#define JSON_REAL_DIGITS  15

void config_digest_hex(const config_t *config, char hex_out[65])
{
    for (size_t i = 0; i < sizeof(config->digest); i++)
        snprintf(hex_out + 2 * i, 3, "%02x", config->digest[i]);
}

static const char *origin_of(const config_t *config, const config_setting_t *setting, uint32_t item)
{
    const char *origin = config_setting_slot(config, setting, item)->origin;
    return origin ? origin : "default";
}

static xp_status_t check_record(const config_t *config)
{
    return config->record ? XP_OK
                          : xp_fail(XP_INVALID, "this configuration was not made by config_load()");
}

/* ---- TOML --------------------------------------------------------------------------------------
 */

static xp_status_t dump_line(const config_t *config, const config_setting_t *setting, uint32_t item,
                             xp_buf_t *text_out)
{
    char key[CONFIG_MAX_KEY];
    size_t start = text_out->length;
    if (setting->scope == CONFIG_SCOPE_MODEL)
        snprintf(key, sizeof(key), "%s", setting->key + strlen("models[]."));
    else
        XP_TRY(config_setting_item_key(config, setting, item, key, sizeof(key)));
    /* An unpinned device has no list of CPUs, and an empty one is no value that can be given; nor
     * is the memory of a GPU that the driver has not been asked for. */
    if (setting->scope == CONFIG_SCOPE_DEVICE) {
        const config_device_t *device = config_setting_base(config, setting, item);
        if ((setting->type == CONFIG_TYPE_CPUS && device->cpu_count == 0) ||
            (setting->type == CONFIG_TYPE_SIZE && device->memory_bytes == 0))
            return XP_OK;
    }
    XP_TRY(xp_buf_printf(text_out, "%s = ", key));
    XP_TRY(config_setting_literal(setting, config_setting_base(config, setting, item), text_out));
    size_t width = text_out->length - start;
    return xp_buf_printf(text_out, "%*s # %s\n",
                         (int)(width < COMMENT_COLUMN ? COMMENT_COLUMN - width : 0), "",
                         origin_of(config, setting, item));
}

xp_status_t config_dump_toml(const config_t *config, xp_buf_t *text_out)
{
    char hex[65];
    XP_TRY(check_record(config));
    config_digest_hex(config, hex);
    XP_TRY(xp_buf_printf(text_out, "# file: %s\n# digest: %s\n",
                         config->source_path[0] ? config->source_path : "none", hex));
    for (uint32_t i = 0; i < config_setting_count; i++) {
        const config_setting_t *setting = &config_settings[i];
        if (setting->scope == CONFIG_SCOPE_MODEL || setting->alias_of)
            continue;
        for (uint32_t item = 0; item < config_scope_items(config, setting->scope); item++)
            if (config_setting_applies(config, setting, item))
                XP_TRY(dump_line(config, setting, item, text_out));
    }
    for (uint32_t item = 0; item < config->model_count; item++) {
        XP_TRY(xp_buf_append_text(text_out, "\n[[models]]\n"));
        for (uint32_t i = 0; i < config_setting_count; i++)
            if (config_settings[i].scope == CONFIG_SCOPE_MODEL)
                XP_TRY(dump_line(config, &config_settings[i], item, text_out));
    }
    return XP_OK;
}

/* ---- JSON --------------------------------------------------------------------------------------
 */

static json_t *json_of(const config_setting_t *setting, const void *base)
{
    if (setting->type == CONFIG_TYPE_SIZE)
        return json_integer((json_int_t) *
                            (const uint64_t *)((const char *)base + setting->offset));
    xp_buf_t literal;
    xp_buf_init(&literal, LITERAL_MAX_BYTES);
    json_t *value = NULL;
    /* The TOML literals of settings are JSON values as well. */
    if (config_setting_literal(setting, base, &literal) == XP_OK)
        value = json_loadb(literal.data, literal.length, JSON_DECODE_ANY, NULL);
    xp_buf_fini(&literal);
    return value;
}

/* Puts `value` (taken over) at the dotted `path` below `object`, making objects on the way. */
static bool json_put(json_t *object, const char *path, json_t *value)
{
    for (;;) {
        const char *dot = strchr(path, '.');
        if (!dot)
            return json_object_set_new(object, path, value) == 0;
        char part[CONFIG_MAX_KEY];
        size_t length = (size_t)(dot - path);
        if (length >= sizeof(part))
            break;
        memcpy(part, path, length);
        part[length] = '\0';
        json_t *inner = json_object_get(object, part);
        if (!inner) {
            inner = json_object();
            if (json_object_set_new(object, part, inner) != 0)
                break;
        }
        object = inner;
        path = dot + 1;
    }
    json_decref(value);
    return false;
}

static bool dump_item(const config_t *config, const config_setting_t *setting, uint32_t item,
                      json_t *values, json_t *models, json_t *origins)
{
    char key[CONFIG_MAX_KEY], path[CONFIG_MAX_KEY];
    json_t *value = json_of(setting, config_setting_base(config, setting, item));
    if (!value)
        return false;
    json_t *target = values;
    if (config_setting_item_key(config, setting, item, key, sizeof(key)) != XP_OK) {
        json_decref(value);
        return false;
    }
    if (setting->scope == CONFIG_SCOPE_MODEL) {
        target = json_array_get(models, item);
        snprintf(path, sizeof(path), "%s", setting->key + strlen("models[]."));
    } else if (setting->scope == CONFIG_SCOPE_DEVICE) {
        snprintf(path, sizeof(path), "devices.%s.%s", config->record->devices[item]->name,
                 strrchr(setting->key, '.') + 1);
    } else {
        snprintf(path, sizeof(path), "%s", setting->key);
    }
    return json_put(target, path, value) &&
           json_object_set_new(origins, key, json_string(origin_of(config, setting, item))) == 0;
}

xp_status_t config_dump_json(const config_t *config, xp_buf_t *text_out)
{
    xp_status_t status = XP_OK;
    char hex[65], *text = NULL;
    XP_TRY(check_record(config));
    config_digest_hex(config, hex);
    json_t *root = json_object(), *values = json_object(), *models = json_array();
    json_t *origins = json_object(), *warnings = json_array();
    bool good = root && values && models && origins && warnings;
    for (uint32_t i = 0; good && i < config->model_count; i++)
        good = json_array_append_new(models, json_object()) == 0;
    for (uint32_t i = 0; good && i < config_warning_count(config); i++)
        good = json_array_append_new(warnings, json_string(config_warning(config, i))) == 0;
    for (uint32_t i = 0; good && i < config_setting_count; i++) {
        const config_setting_t *setting = &config_settings[i];
        if (setting->alias_of)
            continue;
        for (uint32_t item = 0; good && item < config_scope_items(config, setting->scope); item++)
            if (config_setting_applies(config, setting, item) &&
                !dump_item(config, setting, item, values, models, origins)) {
                good = false;
                status =
                    xp_fail(XP_INVALID, "the value of %s cannot be written as JSON", setting->key);
            }
    }
    good = good && json_object_set(values, "models", models) == 0 &&
           json_object_set_new(root, "source", json_string(config->source_path)) == 0 &&
           json_object_set_new(root, "digest", json_string(hex)) == 0 &&
           json_object_set(root, "values", values) == 0 &&
           json_object_set(root, "origins", origins) == 0 &&
           json_object_set(root, "warnings", warnings) == 0;
    if (good)
        text = json_dumps(root, JSON_INDENT(2) | JSON_REAL_PRECISION(JSON_REAL_DIGITS));
    if (text) {
        status = xp_buf_printf(text_out, "%s\n", text);
        free(text);
    } else if (status == XP_OK) {
        status = xp_fail(XP_NO_MEMORY, "no memory to write the configuration as JSON");
    }
    json_decref(root);
    json_decref(values);
    json_decref(models);
    json_decref(origins);
    json_decref(warnings);
    return status;
}
