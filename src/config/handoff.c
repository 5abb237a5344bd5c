/* SPDX-License-Identifier: MIT */
/*
 * What a process hands to the program that it becomes (`xpool exec`, `xpool serve` of SGLang), so
 * that libxpool resolves the same configuration there: settings of the command line travel in the
 * environment, one KEY=VALUE a line. Runs on the loading thread.
 */
#include "config/handoff.h"

#include <stdlib.h>
#include <string.h>

#define HANDOFF_MAX_BYTES (256u * 1024)

xp_status_t config_handoff_write(const config_overrides_t *overrides, xp_buf_t *text_out)
{
    for (uint32_t i = 0; i < overrides->count; i++) {
        const char *key = overrides->keys[i], *value = overrides->values[i];
        if (strchr(value, '\n'))
            return xp_fail(XP_INVALID,
                           "--set %.*s: a value with a line break cannot be handed on; put it into "
                           "the configuration file",
                           (int)strcspn(key, "="), key);
        XP_TRY(xp_buf_printf(text_out, "%.*s=%s\n", (int)strcspn(key, "="), key, value));
    }
    return XP_OK;
}

xp_status_t config_handoff_read(const char *text, const config_overrides_t *own, char **memory_out,
                                config_overrides_t *merged_out)
{
    *memory_out = NULL;
    *merged_out = own ? *own : (config_overrides_t){0};
    if (!text || !text[0])
        return XP_OK;
    if (strlen(text) > HANDOFF_MAX_BYTES)
        return xp_fail(XP_INVALID, "%s holds more than %u bytes", CONFIG_HANDOFF_VARIABLE,
                       HANDOFF_MAX_BYTES);
    char *memory = strdup(text);
    if (!memory)
        return xp_fail(XP_NO_MEMORY, "no memory for %s", CONFIG_HANDOFF_VARIABLE);
    config_overrides_t merged = {.config_path = merged_out->config_path,
                                 .running = merged_out->running};
    char *rest = memory, *line;
    while ((line = strsep(&rest, "\n")) != NULL) {
        if (!line[0])
            continue;
        const char *equals = strchr(line, '=');
        if (!equals || equals == line || merged.count == CONFIG_MAX_OVERRIDES) {
            xp_status_t status =
                xp_fail(XP_INVALID, "%s takes at most %d lines KEY=VALUE, not \"%.80s\"",
                        CONFIG_HANDOFF_VARIABLE, CONFIG_MAX_OVERRIDES, line);
            free(memory);
            return status;
        }
        merged.keys[merged.count] = line;
        merged.values[merged.count++] = equals + 1;
    }
    /* The process's own words come last: they win. */
    for (uint32_t i = 0; own && i < own->count; i++) {
        if (merged.count == CONFIG_MAX_OVERRIDES) {
            free(memory);
            return xp_fail(XP_INVALID, "more than %d settings by command line and %s",
                           CONFIG_MAX_OVERRIDES, CONFIG_HANDOFF_VARIABLE);
        }
        merged.keys[merged.count] = own->keys[i];
        merged.values[merged.count++] = own->values[i];
    }
    *memory_out = memory;
    *merged_out = merged;
    return XP_OK;
}
