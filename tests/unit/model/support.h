/* SPDX-License-Identifier: MIT */
/* What the tests of src/model share: the cmocka includes, temporary folders, messages. */
#ifndef XPOOL_TESTS_UNIT_MODEL_SUPPORT_H
#define XPOOL_TESTS_UNIT_MODEL_SUPPORT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/status.h"

static inline void check_ok(xp_status_t status)
{
    if (status != XP_OK)
        print_error("%s\n", xp_error_last()->text);
    assert_int_equal(status, XP_OK);
}

/* The call must fail with this status, and its message must hold every word of the list (separated
 * by
 * '|'). */
static inline void check_fails(xp_status_t status, xp_status_t wanted, const char *words)
{
    char list[512];
    snprintf(list, sizeof(list), "%s", words);
    if (status != wanted)
        print_error("status %s, message: %s\n", xp_status_name(status), xp_error_last()->text);
    assert_int_equal(status, wanted);
    for (char *word = strtok(list, "|"); word; word = strtok(NULL, "|")) {
        if (!strstr(xp_error_last()->text, word))
            print_error("no \"%s\" in: %s\n", word, xp_error_last()->text);
        assert_non_null(strstr(xp_error_last()->text, word));
    }
}

/* A new empty folder; remove it with remove_folder(). */
static inline void make_folder(char path[64])
{
    snprintf(path, 64, "/tmp/xpool-model-XXXXXX");
    assert_non_null(mkdtemp(path));
}

static inline void remove_folder(const char *path)
{
    char command[128];
    snprintf(command, sizeof(command), "rm -rf '%s'", path);
    assert_int_equal(system(command), 0);
}

static inline void write_file(const char *folder, const char *name, const void *data, size_t length)
{
    char path[256];
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(data, 1, length, file), length);
    assert_int_equal(fclose(file), 0);
}

static inline char *read_file(const char *folder, const char *name, size_t *length_out)
{
    char path[256];
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    assert_int_equal(fseek(file, 0, SEEK_END), 0);
    long length = ftell(file);
    rewind(file);
    char *data = malloc((size_t)length + 1);
    assert_int_equal(fread(data, 1, (size_t)length, file), (size_t)length);
    data[length] = '\0';
    fclose(file);
    *length_out = (size_t)length;
    return data;
}
#endif
