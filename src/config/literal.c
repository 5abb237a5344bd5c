/* SPDX-License-Identifier: MIT */
/* Values and bounds as text: TOML literals for dumps and digests, "allowed" for messages and pages.
 */
#include "config/settings.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

xp_status_t config_text_quote(const char *text, xp_buf_t *text_out)
{
    XP_TRY(xp_buf_append(text_out, "\"", 1));
    for (const char *c = text; *c; c++) {
        unsigned char byte = (unsigned char)*c;
        if (byte == '"' || byte == '\\')
            XP_TRY(xp_buf_printf(text_out, "\\%c", byte));
        else if (byte < 0x20 || byte == 0x7f)
            XP_TRY(xp_buf_printf(text_out, "\\u%04X", byte));
        else
            XP_TRY(xp_buf_append(text_out, c, 1));
    }
    return xp_buf_append(text_out, "\"", 1);
}

static xp_status_t append_size(double bytes, bool quoted, xp_buf_t *text_out)
{
    static const char *const units[] = {"", "KiB", "MiB", "GiB", "TiB"};
    uint64_t value = (uint64_t)bytes;
    unsigned unit = 0;
    while (value && value % 1024 == 0 && unit < 4) {
        value /= 1024;
        unit++;
    }
    const char *quote = quoted && unit ? "\"" : "";
    return xp_buf_printf(text_out, "%s%llu%s%s", quote, (unsigned long long)value, units[unit],
                         quote);
}

/* The shortest text that reads back as the same number. */
static xp_status_t append_real(double value, xp_buf_t *text_out)
{
    char text[40];
    for (int digits = 6; digits <= 17; digits++) {
        snprintf(text, sizeof(text), "%.*g", digits, value);
        if (strtod(text, NULL) == value)
            break;
    }
    return xp_buf_append_text(text_out, text);
}

xp_status_t config_setting_allowed(const config_setting_t *setting, xp_buf_t *text_out)
{
    switch (setting->type) {
    case CONFIG_TYPE_STRING:
        return xp_buf_printf(text_out, "a string of at most %zu bytes", setting->size - 1);
    case CONFIG_TYPE_ID:
        return xp_buf_printf(text_out,
                             "1 to %zu visible ASCII characters without quotes or backslashes",
                             setting->size - 1);
    case CONFIG_TYPE_PATH:
        return xp_buf_printf(text_out, "a path of at most %zu bytes", setting->size - 1);
    case CONFIG_TYPE_MODEL_PATH:
        return xp_buf_printf(text_out, "a path or file://");
    case CONFIG_TYPE_PROGRAM:
        return xp_buf_printf(text_out, "a program's name or path");
    case CONFIG_TYPE_URI:
        return xp_buf_printf(text_out, "an absolute path or file://");
    case CONFIG_TYPE_ADDRESS:
        return xp_buf_printf(text_out, "HOST:PORT, such as 127.0.0.1:8000 or [::1]:8000");
    case CONFIG_TYPE_BOOLEAN:
        return xp_buf_printf(text_out, "true or false");
    case CONFIG_TYPE_INTEGER:
        return xp_buf_printf(text_out, "an integer from %.0f to %.0f", setting->minimum,
                             setting->maximum);
    case CONFIG_TYPE_FLOAT:
        XP_TRY(xp_buf_printf(text_out, "a number from "));
        XP_TRY(append_real(setting->minimum, text_out));
        XP_TRY(xp_buf_printf(text_out, " to "));
        return append_real(setting->maximum, text_out);
    case CONFIG_TYPE_SIZE:
        XP_TRY(xp_buf_printf(text_out, "bytes, or a string such as \"512MiB\" or \"8GiB\", from "));
        XP_TRY(append_size(setting->minimum, false, text_out));
        XP_TRY(xp_buf_printf(text_out, " to "));
        return append_size(setting->maximum, false, text_out);
    case CONFIG_TYPE_CHOICE:
        XP_TRY(xp_buf_printf(text_out, "one of "));
        for (const config_choice_t *choice = setting->choices; choice->name; choice++)
            XP_TRY(xp_buf_printf(text_out, "%s%s", choice == setting->choices ? "" : ", ",
                                 choice->name));
        return XP_OK;
    case CONFIG_TYPE_DEVICES:
        return xp_buf_printf(text_out,
                             "a list of 1 to %d different device names such as [\"cpu:0\"] or "
                             "[\"cuda:0\"]",
                             CONFIG_MAX_DEVICES);
    case CONFIG_TYPE_CUDA_DEVICES:
        return xp_buf_printf(text_out, "a list of 1 to %d different GPU numbers such as [0, 1]",
                             CONFIG_MAX_DEVICES);
    case CONFIG_TYPE_CPUS:
        return xp_buf_printf(text_out,
                             "a list of different CPU numbers, at most %d, such as [0, 1, 6] or "
                             "\"0-3,6\"",
                             CONFIG_MAX_CPUS);
    case CONFIG_TYPE_STRINGS:
        return xp_buf_printf(text_out, "a list of at most %d strings", CONFIG_MAX_ENGINE_ARGS);
    }
    return XP_OK;
}

xp_status_t config_setting_literal(const config_setting_t *setting, const void *base,
                                   xp_buf_t *text_out)
{
    const char *at = (const char *)base + setting->offset;
    uint32_t count = 0;
    switch (setting->type) {
    case CONFIG_TYPE_STRING:
    case CONFIG_TYPE_ID:
    case CONFIG_TYPE_PATH:
    case CONFIG_TYPE_MODEL_PATH:
    case CONFIG_TYPE_PROGRAM:
    case CONFIG_TYPE_URI:
    case CONFIG_TYPE_ADDRESS:
        return config_text_quote(at, text_out);
    case CONFIG_TYPE_BOOLEAN:
        return xp_buf_append_text(text_out, *(const bool *)at ? "true" : "false");
    case CONFIG_TYPE_INTEGER:
        return xp_buf_printf(text_out, "%llu",
                             (unsigned long long)(setting->size == 8   ? *(const uint64_t *)at
                                                  : setting->size == 4 ? *(const uint32_t *)at
                                                                       : *(const uint16_t *)at));
    case CONFIG_TYPE_FLOAT:
        return append_real(*(const double *)at, text_out);
    case CONFIG_TYPE_SIZE:
        return append_size((double)*(const uint64_t *)at, true, text_out);
    case CONFIG_TYPE_CHOICE:
        if (setting->size != sizeof(int))
            return config_text_quote(at, text_out);
        for (const config_choice_t *choice = setting->choices; choice->name; choice++)
            if (choice->value == *(const int *)at)
                return config_text_quote(choice->name, text_out);
        return xp_fail(XP_INVALID, "%s holds no known choice", setting->key);
    case CONFIG_TYPE_DEVICES:
    case CONFIG_TYPE_CUDA_DEVICES:
    case CONFIG_TYPE_CPUS:
    case CONFIG_TYPE_STRINGS:
        break;
    }
    count = *(const uint32_t *)((const char *)base + setting->count_offset);
    XP_TRY(xp_buf_append_text(text_out, "["));
    for (uint32_t i = 0; i < count; i++) {
        if (i)
            XP_TRY(xp_buf_append_text(text_out, ", "));
        if (setting->type == CONFIG_TYPE_CPUS)
            XP_TRY(xp_buf_printf(text_out, "%u", ((const uint32_t *)at)[i]));
        else if (setting->type == CONFIG_TYPE_STRINGS)
            XP_TRY(config_text_quote(((char *const *)at)[i], text_out));
        else
            XP_TRY(config_text_quote(((const config_device_t *)at)[i].name, text_out));
    }
    return xp_buf_append_text(text_out, "]");
}
