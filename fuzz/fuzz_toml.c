/* SPDX-License-Identifier: MIT */
/*
 * Fuzz target: a configuration file, and behind a NUL byte one KEY=VALUE of the command line. What
 * loads must dump as TOML that loads again to the same values, and as JSON.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "config/dump.h"
#include "config/resolve.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_dump(const config_t *config)
{
    xp_buf_t toml, json;
    xp_buf_init(&toml, 1u << 26);
    xp_buf_init(&json, 1u << 26);
    XP_ASSERT(config_dump_toml(config, &toml) == XP_OK);
    XP_ASSERT(config_dump_json(config, &json) == XP_OK);
    config_t *again = NULL;
    xp_status_t status = config_load_text(toml.data, toml.length, "dump", "/", NULL, &again, NULL);
    /* A dump spells out every default, which may only make it too long. */
    if (status == XP_OK) {
        XP_ASSERT(again->model_count == config->model_count);
        for (uint32_t i = 0; i < config->model_count; i++)
            XP_ASSERT(strcmp(again->models[i].path, config->models[i].path) == 0);
        XP_ASSERT(memcmp(&again->deadlines, &config->deadlines, sizeof(again->deadlines)) == 0);
        XP_ASSERT(memcmp(&again->scheduler, &config->scheduler, sizeof(again->scheduler)) == 0);
    } else {
        XP_ASSERT(toml.length > CONFIG_TREE_MAX_BYTES);
    }
    config_destroy(again);
    xp_buf_fini(&toml);
    xp_buf_fini(&json);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const uint8_t *end = memchr(data, 0, size);
    size_t length = end ? (size_t)(end - data) : size;
    char *setting = NULL;
    config_overrides_t overrides = {0};
    config_t *config = NULL;
    if (end) {
        setting = strndup((const char *)end + 1, size - length - 1);
        char *equals = setting ? strchr(setting, '=') : NULL;
        if (equals) {
            overrides.keys[0] = setting;
            overrides.values[0] = equals + 1;
            overrides.count = 1;
        }
    }
    xp_buf_t report;
    xp_buf_init(&report, 1u << 20);
    if (config_load_text((const char *)data, length, "fuzz", "/", &overrides, &config, &report) ==
        XP_OK)
        check_dump(config);
    else
        XP_ASSERT(report.length > 0 && xp_error_last()->text[0]);
    xp_buf_fini(&report);
    config_destroy(config);
    free(setting);
    return 0;
}
