/* SPDX-License-Identifier: MIT */
/*
 * Raw samples of the device tests and benchmarks. Where XPOOL_TEST_SAMPLES names a folder, a series
 * is kept there as a file of lines "value times", the values ascending, in the unit in which it was
 * taken (ns). What cannot be written is left out: a measurement does not fail for that.
 * benches/results.py makes one file of the folder.
 */
#ifndef XPOOL_TESTS_CUDA_SAMPLES_H
#define XPOOL_TESTS_CUDA_SAMPLES_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* False: no samples are kept. */
static inline int samples_path(const char *name, char *path, size_t bytes)
{
    const char *folder = getenv("XPOOL_TEST_SAMPLES");
    return folder && snprintf(path, bytes, "%s/%s", folder, name) < (int)bytes;
}

static inline void samples_keep(const char *name, const uint32_t *ascending, uint32_t count)
{
    char path[512];
    FILE *out = samples_path(name, path, sizeof(path)) ? fopen(path, "w") : NULL;
    if (!out)
        return;
    for (uint32_t i = 0, times; i < count; i += times) {
        for (times = 1; i + times < count && ascending[i + times] == ascending[i];)
            times++;
        fprintf(out, "%u %u\n", ascending[i], times);
    }
    fclose(out);
}

/* A metric's own name for series `name`; a second series of one metric becomes METRIC.2. */
static inline void samples_name(const char *name, const char *metric)
{
    char from[512], to[512], numbered[160];
    if (!name[0] || !samples_path(name, from, sizeof(from)))
        return;
    for (uint32_t n = 1; n < 100; n++) {
        snprintf(numbered, sizeof(numbered), n == 1 ? "%s" : "%s.%u", metric, n);
        if (samples_path(numbered, to, sizeof(to)) && access(to, F_OK) != 0) {
            rename(from, to);
            return;
        }
    }
}
#endif
