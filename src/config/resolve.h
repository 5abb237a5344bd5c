/* SPDX-License-Identifier: MIT */
/*
 * Private to src/config and its tests: how sources become one config_t, the errors found on the
 * way, and the record of where each value came from. One thread, the one that loads.
 */
#ifndef XPOOL_CONFIG_RESOLVE_H
#define XPOOL_CONFIG_RESOLVE_H

#include "base/buf.h"
#include "config/config.h"
#include "config/settings.h"
#include "config/tree.h"

#define CONFIG_MAX_ISSUES   64 /* kept; more are counted */
#define CONFIG_SHOWN_ISSUES 8
#define CONFIG_MAX_WARNINGS 16
#define CONFIG_MAX_KEY      160 /* a key as shown in messages */

typedef struct config_issue {
    const config_origin_t *origin; /* NULL: no place to name */
    uint32_t line, column, order;
    char text[480];
} config_issue_t;

typedef struct config_issues {
    uint32_t count, total;
    config_issue_t items[CONFIG_MAX_ISSUES];
} config_issues_t;

/* At the node's value, or at its key. node NULL: nowhere. */
void config_issue_add(config_issues_t *issues, const config_node_t *node, bool at_key,
                      const char *format, ...) __attribute__((format(printf, 4, 5)));
void config_issue_add_at(config_issues_t *issues, const config_origin_t *origin, uint32_t line,
                         uint32_t column, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
/* "file.toml:12:3", "env XPOOL_X", "cli", "default". */
void config_origin_format(const config_origin_t *origin, uint32_t line, uint32_t column, char *out,
                          size_t size);
/* One issue a line, in the order of the file, at most CONFIG_SHOWN_ISSUES, then how many more. */
xp_status_t config_issues_report(config_issues_t *issues, xp_buf_t *text_out);

typedef enum config_slot_state {
    CONFIG_SLOT_UNSET = 0,
    CONFIG_SLOT_DEFAULT,
    CONFIG_SLOT_DERIVED, /* worked out from this process's surroundings: "auto" in the digest */
    CONFIG_SLOT_SET,
    CONFIG_SLOT_FAILED, /* an issue was added; no follow-up errors about it */
} config_slot_state_t;

typedef struct config_slot {
    const char *origin;
    const config_node_t *node; /* NULL for defaults */
    config_slot_state_t state;
} config_slot_t;

typedef struct config_device_table {
    config_device_t values; /* name, kind and index from the key; the settings that were given */
    const config_node_t *node;
    config_slot_t slots[CONFIG_SETTINGS_MAX];
} config_device_table_t;

struct config_record {
    config_arena_t arena;
    config_slot_t root[CONFIG_SETTINGS_MAX];
    config_slot_t models[CONFIG_MAX_MODELS][CONFIG_SETTINGS_MAX];
    uint32_t device_count; /* distinct devices, attention side first */
    const config_device_t *devices[2 * CONFIG_MAX_DEVICES];
    config_slot_t device_slots[2 * CONFIG_MAX_DEVICES][CONFIG_SETTINGS_MAX];
    uint32_t warning_count;
    char *warnings[CONFIG_MAX_WARNINGS];
};

typedef struct config_resolver {
    config_t *config;
    struct config_record *record;
    config_issues_t issues;
    config_origin_t file_origin, cli_origin, default_origin;
    char file_folder[CONFIG_MAX_PATH];    /* absolute; "" without a file */
    char current_folder[CONFIG_MAX_PATH]; /* absolute */
    const config_node_t *model_nodes[CONFIG_MAX_MODELS];
    uint32_t device_table_count;
    config_device_table_t device_tables[2 * CONFIG_MAX_DEVICES];
    bool out_of_memory;
    bool running; /* as in config_overrides_t */
} config_resolver_t;

void config_warn(config_resolver_t *resolver, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* values.c: checks `node` against `setting` and, unless base is NULL, writes the value at
 * base + setting->offset. False after an issue was added. */
bool config_value_read(config_resolver_t *resolver, const config_setting_t *setting,
                       const config_node_t *node, const char *key, void *base);
/* "string \"x\"", "integer 5", "a list": what a message says was found. */
void config_node_describe(const config_node_t *node, char *out, size_t size);
/* "cpu:3" or "cuda:0"; false for anything else. Fills name, kind and index. */
bool config_device_parse(const char *text, config_device_t *device_out);
/* "512MiB", "1.5GiB", "4096". */
bool config_size_parse(const char *text, uint64_t *bytes_out);
/* "0-3,6" without doubles; false when malformed or too many. */
bool config_cpus_parse(const char *text, uint32_t *cpus_out, uint32_t *count_out);
bool config_address_valid(const char *text);
/* Joins and tidies; understands file:// when `uri`. On failure `reason` says why. */
bool config_path_resolve(const char *folder, const char *text, bool uri, char *out, size_t size,
                         char *reason, size_t reason_size);

/* walk.c: every node of the tree to its setting; unknown keys. */
void config_walk(config_resolver_t *resolver, const config_node_t *root);
/* finish.c: aliases, defaults, worked-out values and the checks that need several settings. */
void config_finish(config_resolver_t *resolver);
/* digest.c */
xp_status_t config_digest_text(const config_t *config, xp_buf_t *text_out);
xp_status_t config_digest_compute(config_t *config);

/* As config_load_report(), with the TOML text given; `name` is shown in messages, relative paths
 * count from `folder`. text NULL: no file. */
xp_status_t config_load_text(const char *text, size_t length, const char *name, const char *folder,
                             const config_overrides_t *overrides, config_t **config_out,
                             xp_buf_t *report);

const void *config_setting_base(const config_t *config, const config_setting_t *setting,
                                uint32_t item);
uint32_t config_scope_items(const config_t *config, config_scope_t scope);
const config_slot_t *config_setting_slot(const config_t *config, const config_setting_t *setting,
                                         uint32_t item);
/* The key with its item: models[2].id, devices."cpu:0".threads. */
xp_status_t config_setting_item_key(const config_t *config, const config_setting_t *setting,
                                    uint32_t item, char *out, size_t size);
/* Whether the setting has a value for that item: threads of a GPU, for example, have none. */
bool config_setting_applies(const config_t *config, const config_setting_t *setting, uint32_t item);
/* How the registry's keys of a kind of device begin: devices."cpu:N", devices."cuda:N". */
const char *config_device_pattern(config_device_kind_t kind);
bool config_setting_of_device(const config_setting_t *setting, config_device_kind_t kind);
#endif
