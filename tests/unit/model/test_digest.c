/* SPDX-License-Identifier: MIT */
/* The digest of a checkpoint: the same wherever it lies, another one for another size, name, header
 * or set of weights. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "model/digest.h"

#define LARGE_BYTES (3u << 20)

static char folder[64];

static int setup(void **state)
{
    strcpy(folder, "/tmp/xpool-digest-XXXXXX");
    return mkdtemp(folder) ? 0 : -1;
}

static int teardown(void **state)
{
    char command[128];
    snprintf(command, sizeof(command), "rm -rf %s", folder);
    return system(command);
}

static void write_file(const char *where, const char *name, size_t bytes, int seed)
{
    char path[256], *data = malloc(bytes);
    assert_non_null(data);
    for (size_t i = 0; i < bytes; i++)
        data[i] = (char)(i * 31 + i / 977 + (size_t)seed);
    snprintf(path, sizeof(path), "%s/%s", where, name);
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(data, 1, bytes, file), bytes);
    fclose(file);
    free(data);
}

static void make(char out[128], const char *name, size_t bytes, int seed)
{
    snprintf(out, 128, "%s/%s", folder, name);
    assert_int_equal(mkdir(out, 0700), 0);
    write_file(out, "config.json", 100, 0);
    write_file(out, "model-00001-of-00002.safetensors", bytes, seed);
    write_file(out, "model-00002-of-00002.safetensors", 1000, seed);
    write_file(out, "model.safetensors.index.json", 10, seed);
}

static bool same(const char *left, const char *right)
{
    uint8_t a[MODEL_DIGEST_BYTES], b[MODEL_DIGEST_BYTES];
    assert_int_equal(model_checkpoint_digest(left, a), XP_OK);
    assert_int_equal(model_checkpoint_digest(right, b), XP_OK);
    return memcmp(a, b, sizeof(a)) == 0;
}

static void test_folders(void **state)
{
    char first[128], twin[128], other[128], longer[128];
    make(first, "first", LARGE_BYTES, 1);
    make(twin, "twin", LARGE_BYTES, 1);
    make(other, "other", LARGE_BYTES, 2);
    make(longer, "longer", LARGE_BYTES + 1, 1);
    assert_true(same(first, twin));
    assert_false(same(first, other));
    assert_false(same(first, longer));
    write_file(twin, "tokenizer.json", 10, 0);
    assert_true(same(first, twin)); /* not what the FFN depends on */
    write_file(twin, "config.json", 100, 1);
    assert_false(same(first, twin));
    write_file(twin, "config.json", 100, 0);
    write_file(twin, "model-00002-of-00002.safetensors", 1000, 7);
    assert_false(same(first, twin));
}

static void test_gguf(void **state)
{
    char path[128], inside[160];
    snprintf(path, sizeof(path), "%s/gguf", folder);
    assert_int_equal(mkdir(path, 0700), 0);
    write_file(path, "m.gguf", LARGE_BYTES, 1);
    snprintf(inside, sizeof(inside), "%s/m.gguf", path);
    assert_true(same(path, inside));
}

static void test_stamp(void **state)
{
    char path[128], inside[160];
    make(path, "stamped", 5000, 1);
    uint64_t before = model_checkpoint_stamp(path);
    assert_true(before != 0);
    assert_true(model_checkpoint_stamp(path) == before);
    write_file(path, "model-00002-of-00002.safetensors", 1001, 1); /* another size */
    uint64_t after = model_checkpoint_stamp(path);
    assert_true(after != before);
    snprintf(inside, sizeof(inside), "%s/config.json", path);
    assert_true(model_checkpoint_stamp(inside) != 0);
    assert_int_equal(unlink(inside), 0);
    assert_true(model_checkpoint_stamp(path) != after);
    assert_true(model_checkpoint_stamp("/nowhere/at/all") == 0);
}

static void test_errors(void **state)
{
    uint8_t digest[MODEL_DIGEST_BYTES];
    char path[128];
    assert_int_equal(model_checkpoint_digest("/nowhere/at/all", digest), XP_NOT_FOUND);
    snprintf(path, sizeof(path), "%s/empty", folder);
    assert_int_equal(mkdir(path, 0700), 0);
    assert_int_equal(model_checkpoint_digest(path, digest), XP_NOT_FOUND);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_folders), cmocka_unit_test(test_gguf),
                                       cmocka_unit_test(test_stamp), cmocka_unit_test(test_errors)};
    return cmocka_run_group_tests(tests, setup, teardown);
}
