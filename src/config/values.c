/* SPDX-License-Identifier: MIT */
/*
 * One value: from a node of the tree to the type its setting asks for, with bounds, and the message
 * when it does not fit. Runs on the loading thread; touches neither files nor other settings.
 */
#include "config/resolve.h"

#include <arpa/inet.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_CPU_NUMBER    1023
#define MAX_ARGUMENT      4096
#define MAX_DEVICE_NUMBER 1023

void config_node_describe(const config_node_t *node, char *out, size_t size)
{
    switch (node->kind) {
    case CONFIG_NODE_STRING:
        if (node->length == 0)
            snprintf(out, size, "an empty string");
        else
            snprintf(out, size, "string \"%.60s%s\"", node->text, node->length > 60 ? "..." : "");
        break;
    case CONFIG_NODE_INTEGER:
        snprintf(out, size, "integer %lld", (long long)node->integer);
        break;
    case CONFIG_NODE_FLOAT:
        snprintf(out, size, "number %g", node->real);
        break;
    case CONFIG_NODE_BOOLEAN:
        snprintf(out, size, "%s", node->boolean ? "true" : "false");
        break;
    case CONFIG_NODE_DATE:
        snprintf(out, size, "a date");
        break;
    case CONFIG_NODE_LIST:
        snprintf(out, size, node->count ? "a list" : "an empty list");
        break;
    case CONFIG_NODE_TABLE:
        snprintf(out, size, "a table");
        break;
    }
}

/* "KEY: found X, allowed: Y (why)". Always false, so that readers can return it. */
static bool mismatch(config_resolver_t *resolver, const config_setting_t *setting,
                     const config_node_t *node, const char *key, const char *why)
{
    char found[128];
    config_node_describe(node, found, sizeof(found));
    xp_buf_t allowed;
    xp_buf_init(&allowed, 1024);
    if (config_setting_allowed(setting, &allowed) != XP_OK)
        resolver->out_of_memory = true;
    config_issue_add(&resolver->issues, node, false, "%s: found %s, allowed: %s%s%s%s", key, found,
                     allowed.data ? allowed.data : "?", why ? " (" : "", why ? why : "",
                     why ? ")" : "");
    xp_buf_fini(&allowed);
    return false;
}

/* TOML text is UTF-8; what a command line or environment holds need not be. */
static bool valid_utf8(const char *text)
{
    const unsigned char *p = (const unsigned char *)text;
    while (*p) {
        size_t tail = *p < 0x80 ? 0 : *p < 0xc2 ? 4 : *p < 0xe0 ? 1 : *p < 0xf0 ? 2 : 3;
        if (tail > 3 || *p > 0xf4 || (*p == 0xe0 && p[1] < 0xa0) || (*p == 0xed && p[1] > 0x9f) ||
            (*p == 0xf0 && p[1] < 0x90) || (*p == 0xf4 && p[1] > 0x8f))
            return false;
        for (p++; tail; tail--, p++)
            if ((*p & 0xc0) != 0x80)
                return false;
    }
    return true;
}

/* The text of a node for settings that hold text. On a command line `123` and `true` are words too.
 */
static const char *text_of(const config_node_t *node)
{
    const char *text = NULL;
    if (node->kind == CONFIG_NODE_STRING)
        text = strlen(node->text) == node->length ? node->text : NULL;
    else if (node->raw && node->kind != CONFIG_NODE_LIST && node->kind != CONFIG_NODE_TABLE)
        text = node->raw;
    return text && valid_utf8(text) ? text : NULL;
}

bool config_device_parse(const char *text, config_device_t *device_out)
{
    config_device_kind_t kind;
    const char *digits;
    if (strncmp(text, "cpu:", 4) == 0) {
        kind = CONFIG_DEVICE_CPU;
        digits = text + 4;
    } else if (strncmp(text, "cuda:", 5) == 0) {
        kind = CONFIG_DEVICE_CUDA;
        digits = text + 5;
    } else {
        return false;
    }
    size_t count = strspn(digits, "0123456789");
    if (count == 0 || count > 4 || digits[count] || (count > 1 && digits[0] == '0'))
        return false;
    uint32_t index = (uint32_t)atoi(digits);
    if (index > MAX_DEVICE_NUMBER)
        return false;
    memset(device_out, 0, sizeof(*device_out));
    device_out->kind = kind;
    device_out->index = index;
    snprintf(device_out->name, sizeof(device_out->name), "%s", text);
    return true;
}

bool config_size_parse(const char *text, uint64_t *bytes_out)
{
    static const struct {
        const char *suffix;
        unsigned shift;
    } units[] = {{"", 0}, {"B", 0}, {"KiB", 10}, {"MiB", 20}, {"GiB", 30}, {"TiB", 40}};
    const char *p = text;
    uint64_t whole = 0;
    size_t digits = 0;
    for (; *p >= '0' && *p <= '9'; p++, digits++)
        if (__builtin_mul_overflow(whole, 10u, &whole) ||
            __builtin_add_overflow(whole, (uint64_t)(*p - '0'), &whole))
            return false;
    /* Six decimals are exact in the arithmetic below and more than anyone writes. */
    uint64_t fraction = 0, scale = 1;
    if (*p == '.') {
        size_t decimals = 0;
        for (p++; *p >= '0' && *p <= '9'; p++, decimals++) {
            if (decimals == 6)
                return false;
            fraction = fraction * 10 + (uint64_t)(*p - '0');
            scale *= 10;
        }
        if (decimals == 0)
            return false;
    }
    if (digits == 0)
        return false;
    while (*p == ' ')
        p++;
    for (size_t i = 0; i < sizeof(units) / sizeof(units[0]); i++) {
        if (strcmp(p, units[i].suffix) != 0)
            continue;
        if (fraction && units[i].shift == 0)
            return false;
        uint64_t bytes;
        if (__builtin_mul_overflow(whole, (uint64_t)1 << units[i].shift, &bytes) ||
            __builtin_add_overflow(bytes, (fraction << units[i].shift) / scale, &bytes))
            return false;
        *bytes_out = bytes;
        return true;
    }
    return false;
}

static bool add_cpu(uint64_t cpu, uint32_t *cpus, uint32_t *count)
{
    if (cpu > MAX_CPU_NUMBER || *count == CONFIG_MAX_CPUS)
        return false;
    for (uint32_t i = 0; i < *count; i++)
        if (cpus[i] == cpu)
            return false;
    cpus[(*count)++] = (uint32_t)cpu;
    return true;
}

static bool read_number(const char **at, uint64_t *number_out)
{
    const char *p = *at;
    uint64_t number = 0;
    size_t digits = 0;
    for (; *p >= '0' && *p <= '9' && digits < 5; p++, digits++)
        number = number * 10 + (uint64_t)(*p - '0');
    *at = p;
    *number_out = number;
    return digits > 0 && digits < 5;
}

bool config_cpus_parse(const char *text, uint32_t *cpus_out, uint32_t *count_out)
{
    uint32_t cpus[CONFIG_MAX_CPUS], count = 0;
    const char *p = text;
    for (;;) {
        uint64_t first, last;
        p += strspn(p, " ");
        if (!read_number(&p, &first))
            return false;
        last = first;
        if (*p == '-') {
            p++;
            if (!read_number(&p, &last) || last < first)
                return false;
        }
        for (uint64_t cpu = first; cpu <= last; cpu++)
            if (!add_cpu(cpu, cpus, &count))
                return false;
        p += strspn(p, " ");
        if (!*p)
            break;
        if (*p++ != ',')
            return false;
    }
    memcpy(cpus_out, cpus, count * sizeof(cpus[0]));
    *count_out = count;
    return true;
}

bool config_address_valid(const char *text)
{
    char host[64];
    const char *colon = strrchr(text, ':');
    if (!colon || colon == text || (size_t)(colon - text) >= sizeof(host))
        return false;
    size_t length = (size_t)(colon - text);
    memcpy(host, text, length);
    host[length] = '\0';
    size_t digits = strspn(colon + 1, "0123456789");
    if (digits == 0 || digits > 5 || colon[1 + digits] || atoi(colon + 1) > 65535)
        return false;
    struct in6_addr address;
    if (host[0] == '[') {
        if (length < 3 || host[length - 1] != ']')
            return false;
        host[length - 1] = '\0';
        return inet_pton(AF_INET6, host + 1, &address) == 1;
    }
    if (strspn(host, "0123456789.") == length)
        return inet_pton(AF_INET, host, &address) == 1;
    return strspn(host, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-") ==
               length &&
           host[0] != '-' && host[0] != '.';
}

static int hex_digit(char c)
{
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
}

/* The path of a file:// address, with %XX decoded. */
static bool file_uri_path(const char *text, char *out, size_t size, char *reason,
                          size_t reason_size)
{
    const char *p = text + strlen("file://");
    if (strncmp(p, "localhost/", 10) == 0)
        p += 9;
    if (*p != '/') {
        snprintf(reason, reason_size, "file:// must name a path of this host, as file:///srv/x");
        return false;
    }
    size_t used = 0;
    for (; *p; p++) {
        int c = (unsigned char)*p;
        if (c == '%') {
            int high = hex_digit(p[1]), low = high < 0 ? -1 : hex_digit(p[2]);
            if (low < 0 || (high == 0 && low == 0)) {
                snprintf(reason, reason_size, "a %% is not followed by two hex digits");
                return false;
            }
            c = high * 16 + low;
            p += 2;
        }
        if (used + 1 >= size) {
            snprintf(reason, reason_size, "longer than %zu bytes", size - 1);
            return false;
        }
        out[used++] = (char)c;
    }
    out[used] = '\0';
    return true;
}

/* Length of "scheme" when text begins with scheme://, else 0. */
static size_t scheme_length(const char *text)
{
    size_t length =
        strspn(text, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-.");
    return length && strncmp(text + length, "://", 3) == 0 ? length : 0;
}

bool config_path_resolve(const char *folder, const char *text, bool uri, char *out, size_t size,
                         char *reason, size_t reason_size)
{
    char decoded[CONFIG_MAX_PATH], base[CONFIG_MAX_PATH];
    size_t scheme = uri ? scheme_length(text) : 0;
    if (scheme == 4 && strncmp(text, "file", 4) == 0) {
        if (!file_uri_path(text, decoded, sizeof(decoded), reason, reason_size))
            return false;
        text = decoded;
    } else if (scheme) {
        snprintf(reason, reason_size, "the scheme %.*s:// is not supported",
                 (int)(scheme > 32 ? 32 : scheme), text);
        return false;
    }
    if (!*text) {
        snprintf(reason, reason_size, "the path is empty");
        return false;
    }
    int length;
    if (text[0] == '/') {
        length = snprintf(out, size, "%s", text);
    } else {
        /* The folder is free of symbolic links, so leading ../ may be taken off it; later ones may
         * stand behind a link and are left to the kernel. */
        snprintf(base, sizeof(base), "%s", folder);
        for (;;) {
            if (text[0] == '.' && text[1] == '/') {
                text += 2;
            } else if (text[0] == '.' && text[1] == '.' && (text[2] == '/' || !text[2])) {
                char *slash = strrchr(base, '/');
                if (slash)
                    *slash = '\0';
                text += text[2] ? 3 : 2;
            } else {
                break;
            }
            while (*text == '/')
                text++;
        }
        if (text[0] == '.' && !text[1])
            text++;
        length = snprintf(out, size, "%s%s%s", base, *text || !base[0] ? "/" : "", text);
    }
    if (length < 0 || (size_t)length >= size) {
        snprintf(reason, reason_size, "the path is longer than %zu bytes", size - 1);
        return false;
    }
    while (length > 1 && out[length - 1] == '/')
        out[--length] = '\0';
    return true;
}

static bool read_text(config_resolver_t *resolver, const config_setting_t *setting,
                      const config_node_t *node, const char *key, char *out)
{
    const char *text = text_of(node);
    if (!text)
        return mismatch(resolver, setting, node, key, NULL);
    const char *folder =
        node->origin->kind == CONFIG_ORIGIN_FILE ? resolver->file_folder : resolver->current_folder;
    char resolved[CONFIG_MAX_PATH], reason[96] = "";
    bool optional = setting->default_text && !setting->default_text[0];
    if (strlen(text) >= setting->size) {
        snprintf(reason, sizeof(reason), "longer than %zu bytes", setting->size - 1);
        return mismatch(resolver, setting, node, key, reason);
    }
    if (!(optional && !text[0])) {
        switch (setting->type) {
        case CONFIG_TYPE_ID:
            if (!text[0])
                return mismatch(resolver, setting, node, key, NULL);
            for (const char *c = text; *c; c++)
                if (*c <= 0x20 || *c >= 0x7f || *c == '"' || *c == '\\')
                    return mismatch(resolver, setting, node, key, NULL);
            break;
        case CONFIG_TYPE_PROGRAM:
            if (!text[0])
                return mismatch(resolver, setting, node, key, NULL);
            if (!strchr(text, '/'))
                break;
            /* fall through */
        case CONFIG_TYPE_PATH:
        case CONFIG_TYPE_MODEL_PATH:
            if (!config_path_resolve(folder, text, setting->type == CONFIG_TYPE_MODEL_PATH,
                                     resolved, setting->size, reason, sizeof(reason)))
                return mismatch(resolver, setting, node, key, reason);
            text = resolved;
            break;
        case CONFIG_TYPE_URI:
            if (text[0] != '/' && !scheme_length(text))
                return mismatch(resolver, setting, node, key, NULL);
            if (!config_path_resolve(folder, text, true, resolved, setting->size, reason,
                                     sizeof(reason)))
                return mismatch(resolver, setting, node, key, reason);
            text = resolved;
            break;
        case CONFIG_TYPE_ADDRESS:
            if (!config_address_valid(text))
                return mismatch(resolver, setting, node, key, NULL);
            break;
        default:
            break;
        }
    }
    if (out)
        snprintf(out, setting->size, "%s", text);
    return true;
}

static bool read_number_setting(config_resolver_t *resolver, const config_setting_t *setting,
                                const config_node_t *node, const char *key, void *out)
{
    uint64_t whole = 0;
    double real = 0;
    if (setting->type == CONFIG_TYPE_FLOAT) {
        if (node->kind == CONFIG_NODE_FLOAT)
            real = node->real;
        else if (node->kind == CONFIG_NODE_INTEGER)
            real = (double)node->integer;
        else
            return mismatch(resolver, setting, node, key, NULL);
        if (!isfinite(real))
            return mismatch(resolver, setting, node, key, NULL);
    } else {
        if (node->kind == CONFIG_NODE_INTEGER && node->integer >= 0) {
            whole = (uint64_t)node->integer;
        } else if (setting->type == CONFIG_TYPE_SIZE && node->kind == CONFIG_NODE_STRING) {
            if (strlen(node->text) != node->length || !config_size_parse(node->text, &whole))
                return mismatch(resolver, setting, node, key, NULL);
        } else {
            return mismatch(resolver, setting, node, key, NULL);
        }
        real = (double)whole;
    }
    if (real < setting->minimum || real > setting->maximum)
        return mismatch(resolver, setting, node, key, NULL);
    if (!out)
        return true;
    if (setting->type == CONFIG_TYPE_FLOAT)
        *(double *)out = real;
    else if (setting->size == sizeof(uint64_t))
        *(uint64_t *)out = whole;
    else if (setting->size == sizeof(uint32_t))
        *(uint32_t *)out = (uint32_t)whole;
    else
        *(uint16_t *)out = (uint16_t)whole;
    return true;
}

static bool read_choice(config_resolver_t *resolver, const config_setting_t *setting,
                        const config_node_t *node, const char *key, void *out)
{
    const char *text = text_of(node);
    for (const config_choice_t *choice = setting->choices; text && choice->name; choice++) {
        if (strcmp(choice->name, text) != 0)
            continue;
        if (out && setting->size == sizeof(int))
            *(int *)out = choice->value;
        else if (out)
            snprintf(out, setting->size, "%s", choice->name);
        return true;
    }
    char why[96];
    const char *names[16];
    uint32_t count = 0;
    for (const config_choice_t *choice = setting->choices; choice->name && count < 16; choice++)
        names[count++] = choice->name;
    const char *nearest = text ? config_text_nearest(text, names, count) : NULL;
    snprintf(why, sizeof(why), "did you mean %s?", nearest ? nearest : "");
    return mismatch(resolver, setting, node, key, nearest ? why : NULL);
}

static bool add_device(config_resolver_t *resolver, const config_setting_t *setting,
                       const config_node_t *node, const char *key, const char *name,
                       config_device_t *devices, uint32_t *count)
{
    config_device_t device;
    if (!config_device_parse(name, &device)) {
        config_issue_add(&resolver->issues, node, false,
                         "%s: found \"%.60s\", allowed: device names such as cpu:0 or cuda:0", key,
                         name);
        return false;
    }
    for (uint32_t i = 0; i < *count; i++) {
        if (strcmp(devices[i].name, device.name) == 0) {
            config_issue_add(&resolver->issues, node, false, "%s: %s is listed twice", key,
                             device.name);
            return false;
        }
    }
    if (*count == CONFIG_MAX_DEVICES) {
        config_issue_add(&resolver->issues, node, false, "%s: more than %d devices", key,
                         CONFIG_MAX_DEVICES);
        return false;
    }
    devices[(*count)++] = device;
    return true;
}

static bool read_devices(config_resolver_t *resolver, const config_setting_t *setting,
                         const config_node_t *node, const char *key, void *base)
{
    config_device_t devices[CONFIG_MAX_DEVICES];
    uint32_t count = 0;
    bool alias = setting->type == CONFIG_TYPE_CUDA_DEVICES, good = true;
    if (node->kind == CONFIG_NODE_LIST) {
        for (const config_node_t *item = node->first; item; item = item->next) {
            char name[32];
            if (alias && item->kind == CONFIG_NODE_INTEGER && item->integer >= 0 &&
                item->integer <= MAX_DEVICE_NUMBER) {
                snprintf(name, sizeof(name), "cuda:%d", (int)item->integer);
                good &= add_device(resolver, setting, item, key, name, devices, &count);
            } else if (item->kind == CONFIG_NODE_STRING && strlen(item->text) == item->length) {
                good &= add_device(resolver, setting, item, key, item->text, devices, &count);
            } else {
                char found[128];
                config_node_describe(item, found, sizeof(found));
                config_issue_add(&resolver->issues, item, false,
                                 "%s: found %s, allowed: device names such as \"cpu:0\" or "
                                 "\"cuda:0\"%s",
                                 key, found, alias ? ", or N for cuda:N" : "");
                good = false;
            }
        }
    } else if (node->raw && text_of(node)) {
        /* On a command line `cpu:0,cpu:1` is kinder than brackets and quotes. */
        char text[512];
        if (strlen(text_of(node)) >= sizeof(text))
            return mismatch(resolver, setting, node, key, NULL);
        snprintf(text, sizeof(text), "%s", text_of(node));
        char *rest = text, *part;
        while (good && (part = strsep(&rest, ",")) != NULL) {
            char name[64];
            part += strspn(part, " ");
            part[strcspn(part, " ")] = '\0';
            bool number = alias && *part && strspn(part, "0123456789") == strlen(part);
            snprintf(name, sizeof(name), "%s%.50s", number ? "cuda:" : "", part);
            good = add_device(resolver, setting, node, key, name, devices, &count);
        }
    } else {
        return mismatch(resolver, setting, node, key, NULL);
    }
    if (good && count == 0)
        return mismatch(resolver, setting, node, key, NULL);
    if (good && base) {
        memcpy((char *)base + setting->offset, devices, count * sizeof(devices[0]));
        *(uint32_t *)((char *)base + setting->count_offset) = count;
    }
    return good;
}

static bool read_cpus(config_resolver_t *resolver, const config_setting_t *setting,
                      const config_node_t *node, const char *key, void *base)
{
    uint32_t cpus[CONFIG_MAX_CPUS], count = 0;
    if (node->kind == CONFIG_NODE_LIST) {
        if (node->count == 0)
            return mismatch(resolver, setting, node, key, NULL);
        for (const config_node_t *item = node->first; item; item = item->next) {
            if (item->kind != CONFIG_NODE_INTEGER || item->integer < 0 ||
                !add_cpu((uint64_t)item->integer, cpus, &count))
                return mismatch(resolver, setting, item, key, NULL);
        }
    } else {
        const char *text = text_of(node);
        if (!text || !config_cpus_parse(text, cpus, &count))
            return mismatch(resolver, setting, node, key, NULL);
    }
    if (base) {
        memcpy((char *)base + setting->offset, cpus, count * sizeof(cpus[0]));
        *(uint32_t *)((char *)base + setting->count_offset) = count;
    }
    return true;
}

static bool read_strings(config_resolver_t *resolver, const config_setting_t *setting,
                         const config_node_t *node, const char *key, void *base)
{
    if (node->kind != CONFIG_NODE_LIST || node->count > CONFIG_MAX_ENGINE_ARGS)
        return mismatch(resolver, setting, node, key, NULL);
    for (const config_node_t *item = node->first; item; item = item->next)
        if (item->kind != CONFIG_NODE_STRING || strlen(item->text) != item->length ||
            item->length > MAX_ARGUMENT)
            return mismatch(resolver, setting, item, key, NULL);
    if (!base)
        return true;
    char **strings = (char **)((char *)base + setting->offset);
    uint32_t *count = (uint32_t *)((char *)base + setting->count_offset);
    for (const config_node_t *item = node->first; item; item = item->next) {
        char *copy = strdup(item->text);
        if (!copy) {
            resolver->out_of_memory = true;
            return false;
        }
        strings[(*count)++] = copy;
    }
    return true;
}

bool config_value_read(config_resolver_t *resolver, const config_setting_t *setting,
                       const config_node_t *node, const char *key, void *base)
{
    void *out = base ? (char *)base + setting->offset : NULL;
    switch (setting->type) {
    case CONFIG_TYPE_STRING:
    case CONFIG_TYPE_ID:
    case CONFIG_TYPE_PATH:
    case CONFIG_TYPE_MODEL_PATH:
    case CONFIG_TYPE_PROGRAM:
    case CONFIG_TYPE_URI:
    case CONFIG_TYPE_ADDRESS:
        return read_text(resolver, setting, node, key, out);
    case CONFIG_TYPE_BOOLEAN:
        if (node->kind != CONFIG_NODE_BOOLEAN)
            return mismatch(resolver, setting, node, key, NULL);
        if (out)
            *(bool *)out = node->boolean;
        return true;
    case CONFIG_TYPE_INTEGER:
    case CONFIG_TYPE_FLOAT:
    case CONFIG_TYPE_SIZE:
        return read_number_setting(resolver, setting, node, key, out);
    case CONFIG_TYPE_CHOICE:
        return read_choice(resolver, setting, node, key, out);
    case CONFIG_TYPE_DEVICES:
    case CONFIG_TYPE_CUDA_DEVICES:
        return read_devices(resolver, setting, node, key, base);
    case CONFIG_TYPE_CPUS:
        return read_cpus(resolver, setting, node, key, base);
    case CONFIG_TYPE_STRINGS:
        return read_strings(resolver, setting, node, key, base);
    }
    return false;
}
