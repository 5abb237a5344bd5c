/* SPDX-License-Identifier: MIT */
/* Shared by the tests of src/config: loading a text with overrides, and a folder that stands for a
 * checkpoint. Header only; one test program, one thread. */
#ifndef XPOOL_TESTS_CONFIG_TEST_H
#define XPOOL_TESTS_CONFIG_TEST_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "config/dump.h"
#include "config/resolve.h"

#define TEST_FOLDER XPOOL_SOURCE_DIR "/models/tales"
#define TEST_MODEL  "[[models]]\nid = \"a\"\npath = \"qwen3-moe\"\n"

static inline void clear_environment(void)
{
    unsetenv("XPOOL_CONFIG");
    unsetenv("XDG_RUNTIME_DIR");
    for (uint32_t i = 0; i < config_setting_count; i++)
        if (config_settings[i].environment)
            unsetenv(config_settings[i].environment);
}

/* Loads `text` as f.toml in the folder of the tales; settings are KEY=VALUE, NULL ends them. The
 * report of a failure is left in `report` when that is not NULL. */
static inline config_t *load_text(const char *text, const char *const *settings, char *report,
                                  size_t report_size)
{
    config_overrides_t overrides = {0};
    config_t *config = NULL;
    xp_buf_t buffer;
    xp_buf_init(&buffer, 1 << 20);
    for (; settings && settings[overrides.count]; overrides.count++) {
        overrides.keys[overrides.count] = settings[overrides.count];
        overrides.values[overrides.count] = strchr(settings[overrides.count], '=') + 1;
    }
    xp_status_t status = config_load_text(text, text ? strlen(text) : 0, "f.toml", TEST_FOLDER,
                                          &overrides, &config, &buffer);
    if (report)
        snprintf(report, report_size, "%s", buffer.data ? buffer.data : "");
    if (status != XP_OK && !report)
        fail_msg("does not load: %s", xp_error_last()->text);
    assert_true((status == XP_OK) == (config != NULL));
    xp_buf_fini(&buffer);
    return config;
}

static inline config_t *load(const char *text)
{
    return load_text(text, NULL, NULL, 0);
}

static inline const char *origin_of(const config_t *config, const char *key, uint32_t item)
{
    const config_setting_t *setting = config_setting_find(key);
    assert_non_null(setting);
    return config_setting_slot(config, setting, item)->origin;
}
#endif
