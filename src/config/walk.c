/* SPDX-License-Identifier: MIT */
/*
 * Every node of the merged tree to the setting it means. What is no setting is an error with the
 * nearest key. Runs on the loading thread; checks that need several settings are in finish.c.
 */
#include "config/resolve.h"

#include <stdio.h>
#include <string.h>

/* Where a table of the tree stands: the registry's spelling and the user's. */
typedef struct place {
    config_scope_t scope;
    void *base;
    config_slot_t *slots;
    char pattern[CONFIG_MAX_KEY]; /* models[].slo  */
    char shown[CONFIG_MAX_KEY];   /* models[2].slo */
} place_t;

static bool bare_key(const char *key, size_t length)
{
    for (size_t i = 0; i < length; i++)
        if (!((key[i] >= 'a' && key[i] <= 'z') || (key[i] >= 'A' && key[i] <= 'Z') ||
              (key[i] >= '0' && key[i] <= '9') || key[i] == '_' || key[i] == '-'))
            return false;
    return length > 0;
}

/* prefix.key; keys that need quotes get them, so that "daemon.http" = 1 is not taken for a setting.
 */
static void join(const char *prefix, const config_node_t *node, char *out, size_t size)
{
    const char *quote = bare_key(node->key, node->key_length) ? "" : "\"";
    snprintf(out, size, "%.90s%s%s%.60s%s", prefix, prefix[0] ? "." : "", quote, node->key, quote);
}

static const char *source_name(config_origin_kind_t kind)
{
    return kind == CONFIG_ORIGIN_CLI           ? "the command line"
           : kind == CONFIG_ORIGIN_ENVIRONMENT ? "the environment"
                                               : "a file";
}

static unsigned source_bit(config_origin_kind_t kind)
{
    return kind == CONFIG_ORIGIN_CLI           ? CONFIG_SOURCE_CLI
           : kind == CONFIG_ORIGIN_ENVIRONMENT ? CONFIG_SOURCE_ENV
                                               : CONFIG_SOURCE_TOML;
}

static bool take(config_resolver_t *resolver, const config_setting_t *setting,
                 const config_node_t *node, const char *shown, void *base)
{
    if (!(setting->sources & source_bit(node->origin->kind))) {
        config_issue_add(&resolver->issues, node, true, "%s: %s cannot set it", shown,
                         source_name(node->origin->kind));
        return false;
    }
    return config_value_read(resolver, setting, node, shown, base);
}

static void take_setting(config_resolver_t *resolver, const place_t *place,
                         const config_setting_t *setting, const config_node_t *node,
                         const char *shown)
{
    config_slot_t *slot = &place->slots[config_setting_index(setting)];
    for (const config_node_t *below = node->shadowed; below; below = below->shadowed)
        take(resolver, setting, below, shown, NULL);
    slot->node = node;
    if (!take(resolver, setting, node, shown, place->base)) {
        slot->state = CONFIG_SLOT_FAILED;
        return;
    }
    char where[CONFIG_MAX_PATH + 64];
    config_origin_format(node->origin, node->line, node->column, where, sizeof(where));
    slot->state = CONFIG_SLOT_SET;
    slot->origin = config_arena_copy(&resolver->record->arena, where, strlen(where));
    if (!slot->origin) {
        slot->origin = "";
        resolver->out_of_memory = true;
    }
}

static void unknown_key(config_resolver_t *resolver, const config_node_t *node, const char *pattern,
                        const char *shown)
{
    char nearest[CONFIG_MAX_KEY];
    if (config_setting_nearest(pattern, nearest, sizeof(nearest)))
        config_issue_add(&resolver->issues, node, true, "%s: unknown key; did you mean %s?", shown,
                         nearest);
    else
        config_issue_add(&resolver->issues, node, true,
                         "%s: unknown key; xpool help settings "
                         "lists the known ones",
                         shown);
}

static void walk_table(config_resolver_t *resolver, const place_t *place,
                       const config_node_t *table);

static void walk_models(config_resolver_t *resolver, const config_node_t *node)
{
    config_t *config = resolver->config;
    if (node->kind != CONFIG_NODE_LIST) {
        config_issue_add(&resolver->issues, node, true,
                         "models: found a single value, allowed: a list of tables; begin each "
                         "model with [[models]]");
        return;
    }
    if (node->count > CONFIG_MAX_MODELS) {
        config_issue_add(&resolver->issues, node, false, "models: found %u, allowed: at most %d",
                         node->count, CONFIG_MAX_MODELS);
        return;
    }
    for (const config_node_t *item = node->first; item; item = item->next) {
        uint32_t index = config->model_count++;
        resolver->model_nodes[index] = item;
        place_t place = {.scope = CONFIG_SCOPE_MODEL,
                         .base = &config->models[index],
                         .slots = resolver->record->models[index],
                         .pattern = "models[]"};
        snprintf(place.shown, sizeof(place.shown), "models[%u]", index);
        if (item->kind == CONFIG_NODE_TABLE) {
            walk_table(resolver, &place, item);
            continue;
        }
        char found[128];
        config_node_describe(item, found, sizeof(found));
        config_issue_add(&resolver->issues, item, false, "models[%u]: found %s, allowed: a table",
                         index, found);
        place.slots[config_setting_index(config_setting_find("models[].id"))].state =
            CONFIG_SLOT_FAILED;
    }
}

/* True when the key looks like a device's name, so that mistakes in it are reported as such. */
static bool walk_device(config_resolver_t *resolver, const config_node_t *node, const char *shown)
{
    if (!memchr(node->key, ':', node->key_length))
        return false;
    config_device_t device;
    if (strlen(node->key) != node->key_length || !config_device_parse(node->key, &device)) {
        config_issue_add(&resolver->issues, node, true,
                         "%s: no device name, allowed: names such as \"cpu:0\" or \"cuda:0\"",
                         shown);
        return true;
    }
    if (node->kind != CONFIG_NODE_TABLE) {
        char found[128];
        config_node_describe(node, found, sizeof(found));
        config_issue_add(&resolver->issues, node, false, "%s: found %s, allowed: a table", shown,
                         found);
        return true;
    }
    uint32_t limit = sizeof(resolver->device_tables) / sizeof(resolver->device_tables[0]);
    if (resolver->device_table_count == limit) {
        config_issue_add(&resolver->issues, node, true, "devices: more than %u device tables",
                         limit);
        return true;
    }
    config_device_table_t *table = &resolver->device_tables[resolver->device_table_count++];
    table->values = device;
    table->node = node;
    place_t place = {.scope = CONFIG_SCOPE_DEVICE, .base = &table->values, .slots = table->slots};
    snprintf(place.pattern, sizeof(place.pattern), "%s", config_device_pattern(device.kind));
    snprintf(place.shown, sizeof(place.shown), "%.100s", shown);
    walk_table(resolver, &place, node);
    return true;
}

static void walk_child(config_resolver_t *resolver, const place_t *place, const config_node_t *node)
{
    char pattern[CONFIG_MAX_KEY], shown[CONFIG_MAX_KEY];
    join(place->pattern, node, pattern, sizeof(pattern));
    join(place->shown, node, shown, sizeof(shown));
    if (place->scope == CONFIG_SCOPE_ROOT && strcmp(pattern, "models") == 0) {
        walk_models(resolver, node);
        return;
    }
    if (place->scope == CONFIG_SCOPE_ROOT && strcmp(place->pattern, "devices") == 0 &&
        walk_device(resolver, node, shown))
        return;
    const config_setting_t *setting = config_setting_find(pattern);
    if (setting && setting->scope == place->scope) {
        take_setting(resolver, place, setting, node, shown);
    } else if (config_setting_is_section(pattern)) {
        if (node->kind == CONFIG_NODE_TABLE) {
            place_t inner = *place;
            memcpy(inner.pattern, pattern, sizeof(inner.pattern));
            memcpy(inner.shown, shown, sizeof(inner.shown));
            walk_table(resolver, &inner, node);
        } else {
            char found[128];
            config_node_describe(node, found, sizeof(found));
            config_issue_add(&resolver->issues, node, false, "%s: found %s, allowed: a table",
                             shown, found);
        }
    } else {
        unknown_key(resolver, node, pattern, shown);
    }
}

/* Recursion follows sections of the registry, which are at most three deep. */
static void walk_table(config_resolver_t *resolver, const place_t *place,
                       const config_node_t *table)
{
    for (const config_node_t *node = table->first; node; node = node->next)
        walk_child(resolver, place, node);
}

void config_walk(config_resolver_t *resolver, const config_node_t *root)
{
    place_t place = {
        .scope = CONFIG_SCOPE_ROOT, .base = resolver->config, .slots = resolver->record->root};
    walk_table(resolver, &place, root);
}
