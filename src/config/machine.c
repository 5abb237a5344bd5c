/* SPDX-License-Identifier: MIT */
/*
 * How much memory processes started now could take: what the kernel calls available, bounded by
 * every cgroup limit above this process. Reads /proc and /sys/fs/cgroup only, below roots that a
 * test may move. Never fails: what cannot be read does not bound.
 */
#include "config/resolve.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_FILE_BYTES 65536
#define MAX_LEVELS     64

static bool read_file(const char *path, char *out, size_t size)
{
    FILE *file = fopen(path, "re");
    if (!file)
        return false;
    size_t length = fread(out, 1, size - 1, file);
    out[length] = '\0';
    fclose(file);
    return length > 0;
}

/* The number behind `name` at the start of a line. */
static bool find_number(const char *text, const char *name, uint64_t *number_out)
{
    size_t length = strlen(name);
    for (const char *line = text; line && *line;) {
        if (strncmp(line, name, length) == 0 && (line[length] == ' ' || line[length] == '\t')) {
            *number_out = strtoull(line + length, NULL, 10);
            return true;
        }
        line = strchr(line, '\n');
        if (line)
            line++;
    }
    return false;
}

static bool read_number(const char *folder, const char *name, uint64_t *number_out)
{
    char path[PATH_MAX], text[64], *end;
    if (snprintf(path, sizeof(path), "%s/%s", folder, name) >= (int)sizeof(path) ||
        !read_file(path, text, sizeof(text)))
        return false;
    *number_out = strtoull(text, &end, 10); /* "max" is no number: no limit */
    return end != text;
}

/* Limit minus use, where page cache counts as free because the kernel takes it back. */
static uint64_t cgroup_room(const char *folder, const char *limit_file, const char *use_file,
                            const char *cache_name)
{
    uint64_t limit, use = 0, cache = 0;
    char path[PATH_MAX], *statistics;
    if (!read_number(folder, limit_file, &limit))
        return UINT64_MAX;
    read_number(folder, use_file, &use);
    statistics = malloc(MAX_FILE_BYTES);
    if (statistics && snprintf(path, sizeof(path), "%s/memory.stat", folder) < (int)sizeof(path) &&
        read_file(path, statistics, MAX_FILE_BYTES)) {
        uint64_t part;
        char name[64];
        snprintf(name, sizeof(name), "%sinactive_file", cache_name);
        if (find_number(statistics, name, &part))
            cache += part;
        snprintf(name, sizeof(name), "%sactive_file", cache_name);
        if (find_number(statistics, name, &part))
            cache += part;
    }
    free(statistics);
    use = use > cache ? use - cache : 0;
    return limit > use ? limit - use : 0;
}

/* The smallest room from the process's own cgroup up to the root of the mount. */
static uint64_t hierarchy_room(const char *mount, const char *group, const char *limit_file,
                               const char *use_file, const char *cache_name)
{
    char folder[PATH_MAX];
    uint64_t room = UINT64_MAX;
    size_t root = strlen(mount);
    if (snprintf(folder, sizeof(folder), "%s%s", mount, group) >= (int)sizeof(folder))
        return room;
    for (int level = 0; level < MAX_LEVELS; level++) {
        uint64_t here = cgroup_room(folder, limit_file, use_file, cache_name);
        if (here < room)
            room = here;
        char *slash = strrchr(folder, '/');
        if (strlen(folder) <= root || !slash || (size_t)(slash - folder) < root)
            break;
        *slash = '\0';
    }
    return room;
}

uint64_t config_machine_memory(const char *proc_root, const char *cgroup_root)
{
    char path[PATH_MAX], *text = malloc(MAX_FILE_BYTES);
    uint64_t available = 0, room = UINT64_MAX;
    if (!text)
        return 0;
    snprintf(path, sizeof(path), "%s/meminfo", proc_root);
    if (read_file(path, text, MAX_FILE_BYTES) && find_number(text, "MemAvailable:", &available))
        available *= 1024;
    snprintf(path, sizeof(path), "%s/self/cgroup", proc_root);
    if (read_file(path, text, MAX_FILE_BYTES)) {
        char *rest = text, *line;
        while ((line = strsep(&rest, "\n")) != NULL) {
            /* HIERARCHY:CONTROLLERS:PATH; version 2 has 0 and no controllers. */
            char *controllers = strchr(line, ':');
            char *group = controllers ? strchr(controllers + 1, ':') : NULL;
            uint64_t here = UINT64_MAX;
            if (!group)
                continue;
            *group++ = '\0';
            controllers++;
            if (!*controllers) {
                here = hierarchy_room(cgroup_root, group, "memory.max", "memory.current", "");
            } else if (strcmp(controllers, "memory") == 0) {
                snprintf(path, sizeof(path), "%s/memory", cgroup_root);
                here = hierarchy_room(path, group, "memory.limit_in_bytes", "memory.usage_in_bytes",
                                      "total_");
            }
            if (here < room)
                room = here;
        }
    }
    free(text);
    if (available == 0)
        return room == UINT64_MAX ? 0 : room;
    return available < room ? available : room;
}

uint64_t config_machine_room(void *unused)
{
    const uint64_t bytes = config_machine_memory("/proc", "/sys/fs/cgroup");
    return bytes ? bytes : UINT64_MAX;
}
