/* SPDX-License-Identifier: MIT */
/*
 * Decoders against the gguf package: tests/reference/make_quant_vectors.py wrote the blocks and the
 * values it makes of them. Row-major, packed, and as the matrix products of every variant use them.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <cmocka.h>

#include "base/buf.h"
#include "kernels/kernels.h"
#include "reference.h"

#define COLUMNS 256
#define ROWS    16

typedef struct vectors {
    char *file;
    size_t length, at;
} vectors_t;

static const void *take(vectors_t *v, size_t bytes)
{
    assert_true(v->length - v->at >= bytes);
    v->at += bytes;
    return v->file + v->at - bytes;
}

static uint32_t take_u32(vectors_t *v)
{
    uint32_t value;
    memcpy(&value, take(v, 4), 4);
    return value;
}

static void check_products(const kernels_matrix_t *w, const float *values)
{
    static float identity[COLUMNS * COLUMNS], y[COLUMNS * ROWS];
    void *scratch = malloc(kernels_scratch_bytes(COLUMNS, COLUMNS));
    for (uint32_t k = 0; k < COLUMNS; k++)
        identity[k * COLUMNS + k] = 1;
    for (unsigned v = 0; v < KERNELS_VARIANT_COUNT; v++) {
        if (!kernels_variant_supported((kernels_variant_t)v))
            continue;
        assert_int_equal(kernels_select_variant((kernels_variant_t)v), XP_OK);
        for (uint32_t rows = 1; rows <= COLUMNS; rows += 85) {
            kernels_matmul_range(w, identity, COLUMNS, rows, y, ROWS, 0, ROWS, scratch);
            for (uint32_t k = 0; k < rows; k++)
                for (uint32_t n = 0; n < ROWS; n++) {
                    double want = (double)values[n * COLUMNS + k], most = 0;
                    for (uint32_t i = k / 16 * 16; i < k / 16 * 16 + 16; i++)
                        most = fmax(most, fabs((double)values[n * COLUMNS + i]));
                    /* AVX2 rounds the offset m - 16 d of a block; otherwise equal. */
                    double allowed = v == KERNELS_AVX2 ? 4e-7 * most + 1e-7 * fabs(want) : 0;
                    assert_true(fabs((double)y[k * ROWS + n] - want) <= allowed);
                }
        }
    }
    assert_int_equal(kernels_select(), XP_OK);
    free(scratch);
}

static void test_vectors(void **state)
{
    (void)state;
    vectors_t v = {0};
    assert_int_equal(xp_file_read(XPOOL_SOURCE_DIR "/tests/unit/kernels/quant_vectors.bin", 1 << 20,
                                  &v.file, &v.length),
                     XP_OK);
    assert_memory_equal(take(&v, 4), "XPQV", 4);
    uint32_t types = 0;
    while (v.at < v.length) {
        char name[16] = {0};
        uint32_t length = take_u32(&v);
        assert_true(length < sizeof(name));
        memcpy(name, take(&v, length), length);
        xp_dtype_t dtype = XP_DTYPE_AUTO;
        for (unsigned d = 0; d < XP_DTYPE_COUNT; d++)
            if (!strcmp(name, xp_dtype_name((xp_dtype_t)d)))
                dtype = (xp_dtype_t)d;
        assert_true(xp_dtype_is_quantized(dtype));
        uint32_t blocks = take_u32(&v);
        assert_int_equal(blocks * xp_dtype_block_elements(dtype), ROWS * COLUMNS);
        size_t bytes = (size_t)blocks * xp_dtype_block_bytes(dtype);
        const void *data = take(&v, bytes);
        float values[ROWS * COLUMNS], out[COLUMNS];
        memcpy(values, take(&v, sizeof(values)), sizeof(values));

        kernels_matrix_t w = {.dtype = dtype, .rows = ROWS, .columns = COLUMNS};
        w.data = aligned_alloc(64, kernels_matrix_bytes(dtype, ROWS, COLUMNS));
        memcpy(w.data, data, bytes);
        for (int pack = 0; pack < 2; pack++) {
            for (uint32_t n = 0; n < ROWS; n++) {
                kernels_dequantize_row(&w, n, out);
                for (uint32_t k = 0; k < COLUMNS; k++)
                    assert_true(out[k] == values[n * COLUMNS + k]);
            }
            assert_int_equal(kernels_matrix_pack(&w), XP_OK);
            assert_true(w.packed);
        }
        check_products(&w, values);
        free(w.data);
        types++;
    }
    assert_int_equal(types, 5);
    free(v.file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_vectors)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
