/* SPDX-License-Identifier: MIT */
/*
 * Counts the CPUs this process may use: its affinity mask, bounded by the cgroup's CPU quota.
 *
 * Runs at start-up on any thread; reads /proc and /sys, keeps nothing.
 */
#include "base/cpus.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/pool.h"

#define CPUS_TEXT_BYTES 8192
#define CPUS_MAX_DEPTH  64 /* folders walked up from the process's group */

static bool cpus_read_text(const char *path, char *text, size_t capacity)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    size_t length = 0;
    while (length + 1 < capacity) {
        ssize_t got = read(fd, text + length, capacity - 1 - length);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            break;
        length += (size_t)got;
    }
    close(fd);
    text[length] = '\0';
    return length > 0;
}

static uint32_t cpus_from_quota(long long quota, long long period)
{
    if (quota <= 0 || period <= 0)
        return 0;
    long long cpus = (quota + period - 1) / period;
    return cpus > 100000 ? 0 : (uint32_t)cpus;
}

/* The quota set on one group's folder itself; 0 when none. */
static uint32_t cpus_of_folder(const char *folder, bool version2)
{
    char path[4096 + 64], text[128];
    long long quota = 0, period = 0;
    if (version2) {
        snprintf(path, sizeof(path), "%s/cpu.max", folder);
        if (!cpus_read_text(path, text, sizeof(text)) ||
            sscanf(text, "%lld %lld", &quota, &period) != 2)
            return 0; /* "max" or absent */
        return cpus_from_quota(quota, period);
    }
    snprintf(path, sizeof(path), "%s/cpu.cfs_quota_us", folder);
    if (!cpus_read_text(path, text, sizeof(text)) || sscanf(text, "%lld", &quota) != 1)
        return 0;
    snprintf(path, sizeof(path), "%s/cpu.cfs_period_us", folder);
    if (!cpus_read_text(path, text, sizeof(text)) || sscanf(text, "%lld", &period) != 1)
        return 0;
    return cpus_from_quota(quota, period);
}

static uint32_t cpus_minimum(uint32_t a, uint32_t b)
{
    return a == 0 || (b != 0 && b < a) ? b : a;
}

/* The tightest quota of `root`/`group` and its parents. In a container the path named in
 * /proc/self/cgroup may lie outside the mounted tree; the walk still ends at the mounted root. */
static uint32_t cpus_of_group(const char *root, const char *group, bool version2)
{
    char folder[4096];
    int length = snprintf(folder, sizeof(folder), "%s%s", root, group);
    if (length < 0 || (size_t)length >= sizeof(folder))
        return cpus_of_folder(root, version2);
    size_t root_length = strlen(root);
    uint32_t cpus = 0;
    for (int depth = 0; depth < CPUS_MAX_DEPTH && strlen(folder) > root_length; depth++) {
        cpus = cpus_minimum(cpus, cpus_of_folder(folder, version2));
        char *slash = strrchr(folder, '/');
        if (!slash || (size_t)(slash - folder) < root_length)
            break;
        *slash = '\0';
    }
    return cpus_minimum(cpus, cpus_of_folder(root, version2));
}

static bool cpus_list_has(const char *list, size_t length, const char *word)
{
    size_t word_length = strlen(word);
    for (size_t at = 0; at < length;) {
        const char *comma = memchr(list + at, ',', length - at);
        size_t end = comma ? (size_t)(comma - list) : length;
        if (end - at == word_length && !memcmp(list + at, word, word_length))
            return true;
        at = end + 1;
    }
    return false;
}

uint32_t xp_cpus_quota(const char *membership, const char *mount)
{
    uint32_t cpus = 0;
    for (const char *line = membership; *line;) {
        size_t line_length = strcspn(line, "\n");
        const char *first = memchr(line, ':', line_length);
        const char *second =
            first ? memchr(first + 1, ':', line_length - (size_t)(first + 1 - line)) : NULL;
        if (second) {
            size_t list_length = (size_t)(second - first - 1);
            char group[2048], root[4096];
            snprintf(group, sizeof(group), "%.*s", (int)(line_length - (size_t)(second + 1 - line)),
                     second + 1);
            if (list_length == 0) {
                snprintf(root, sizeof(root), "%s", mount);
                cpus = cpus_minimum(cpus, cpus_of_group(root, group, true));
            } else if (cpus_list_has(first + 1, list_length, "cpu")) {
                snprintf(root, sizeof(root), "%s/cpu", mount);
                cpus = cpus_minimum(cpus, cpus_of_group(root, group, false));
                snprintf(root, sizeof(root), "%s/%.*s", mount, (int)list_length, first + 1);
                cpus = cpus_minimum(cpus, cpus_of_group(root, group, false));
            }
        }
        line += line_length + (line[line_length] == '\n');
    }
    return cpus;
}

uint32_t xp_usable_cpus(void)
{
    uint32_t cpus = 0;
    cpu_set_t *set = NULL;
    /* The mask grows with the machine; the call says EINVAL until the set is large enough. */
    for (int count = 1024; count <= 1 << 16 && cpus == 0; count *= 2) {
        set = CPU_ALLOC(count);
        if (!set)
            break;
        size_t bytes = CPU_ALLOC_SIZE(count);
        if (sched_getaffinity(0, bytes, set) == 0)
            cpus = (uint32_t)CPU_COUNT_S(bytes, set);
        else if (errno != EINVAL)
            count = 1 << 16;
        CPU_FREE(set);
    }
    if (cpus == 0) {
        long online = sysconf(_SC_NPROCESSORS_ONLN);
        cpus = online > 0 ? (uint32_t)online : 1;
    }
    char membership[CPUS_TEXT_BYTES];
    if (cpus_read_text("/proc/self/cgroup", membership, sizeof(membership)))
        cpus = cpus_minimum(cpus, xp_cpus_quota(membership, "/sys/fs/cgroup"));
    return cpus;
}
