/* SPDX-License-Identifier: MIT */
/*
 * Matrix products of every variant and dtype against double references, and the promise that a
 * row's result depends on nothing but the row.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/mman.h>
#include <cmocka.h>

#include "kernels/kernels.h"
#include "reference.h"

typedef struct shape {
    uint32_t rows, columns;
} shape_t;

/* Columns are raised to the dtype's block. Hidden sizes of the models we serve, and edges. */
static const shape_t shapes[] = {{1, 32},   {15, 64},   {16, 96},    {17, 192}, {33, 48},
                                 {48, 576}, {100, 320}, {130, 1536}, {64, 256}, {31, 2048}};

static const xp_dtype_t dtypes[] = {XP_DTYPE_F32,  XP_DTYPE_F16,  XP_DTYPE_BF16, XP_DTYPE_Q8_0,
                                    XP_DTYPE_Q4_0, XP_DTYPE_Q4_1, XP_DTYPE_Q4_K, XP_DTYPE_Q6_K};
#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

typedef struct problem {
    kernels_matrix_t w;  /* packed or not */
    uint8_t *checkpoint; /* the same in checkpoint order */
    float *x;
    size_t x_stride;
    uint32_t x_rows;
    void *scratch;
} problem_t;

static void *aligned(size_t bytes)
{
    void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    assert_non_null(memory);
    return memory;
}

static problem_t problem_make(xp_dtype_t dtype, shape_t shape, uint32_t x_rows, bool pack,
                              uint64_t seed)
{
    uint32_t block = xp_dtype_block_elements(dtype);
    uint32_t columns = (shape.columns + block - 1) / block * block;
    size_t bytes = kernels_matrix_bytes(dtype, shape.rows, columns);
    problem_t p = {.w = {.dtype = dtype, .rows = shape.rows, .columns = columns},
                   .x_rows = x_rows,
                   .x_stride = columns + 3};
    p.checkpoint = aligned(bytes);
    p.w.data = aligned(bytes);
    reference_fill(dtype, p.checkpoint, shape.rows, columns, &seed);
    memcpy(p.w.data, p.checkpoint, bytes);
    if (pack)
        assert_int_equal(kernels_matrix_pack(&p.w), XP_OK);
    p.x = aligned(sizeof(float) * p.x_stride * x_rows);
    for (size_t i = 0; i < p.x_stride * x_rows; i++)
        p.x[i] = reference_uniform(&seed);
    p.scratch = aligned(kernels_scratch_bytes(x_rows, columns));
    return p;
}

static void problem_free(problem_t *p)
{
    free(p->checkpoint);
    free(p->w.data);
    free(p->x);
    free(p->scratch);
}

/* Root of the mean squared error of `y`, and of a plain FP32 dot product in order, both against
 * doubles. */
static void problem_errors(const problem_t *p, const float *y, size_t y_stride, double *ours,
                           double *plain, double *size)
{
    size_t row_bytes = xp_dtype_row_bytes(p->w.dtype, p->w.columns);
    double ours_sum = 0, plain_sum = 0, size_sum = 0;
    double *row = aligned(sizeof(double) * p->w.columns);
    for (uint32_t n = 0; n < p->w.rows; n++) {
        for (uint32_t k = 0; k < p->w.columns; k++)
            row[k] = reference_element(p->w.dtype, p->checkpoint + n * row_bytes, k);
        for (uint32_t r = 0; r < p->x_rows; r++) {
            const float *x = p->x + r * p->x_stride;
            double exact = 0;
            float single = 0;
            for (uint32_t k = 0; k < p->w.columns; k++) {
                exact += row[k] * (double)x[k];
                single += (float)row[k] * x[k];
            }
            double error = (double)y[r * y_stride + n] - exact;
            ours_sum += error * error;
            plain_sum += ((double)single - exact) * ((double)single - exact);
            size_sum += exact * exact;
        }
    }
    double count = (double)p->w.rows * p->x_rows;
    *ours = sqrt(ours_sum / count);
    *plain = sqrt(plain_sum / count);
    *size = sqrt(size_sum / count);
    free(row);
}

static void for_each_variant(void (*check)(void))
{
    unsigned tried = 0;
    for (unsigned v = 0; v < KERNELS_VARIANT_COUNT; v++)
        if (kernels_variant_supported((kernels_variant_t)v)) {
            assert_int_equal(kernels_select_variant((kernels_variant_t)v), XP_OK);
            check();
            tried++;
        }
    assert_true(tried >= 1);
    assert_int_equal(kernels_select(), XP_OK);
}

static void check_accuracy(void)
{
    for (size_t d = 0; d < COUNT(dtypes); d++)
        for (size_t s = 0; s < COUNT(shapes); s++)
            for (int pack = 0; pack < 2; pack++) {
                uint32_t x_rows = (uint32_t)(1 + (s * 7 + d) % 19);
                problem_t p = problem_make(dtypes[d], shapes[s], x_rows, pack, 1000 * d + s);
                size_t y_stride = p.w.rows + 5;
                float *y = aligned(sizeof(float) * y_stride * x_rows);
                for (size_t i = 0; i < y_stride * x_rows; i++)
                    y[i] = 777.0f;
                kernels_matmul_range(&p.w, p.x, p.x_stride, x_rows, y, y_stride, 0, p.w.rows,
                                     p.scratch);
                double ours, plain, size;
                problem_errors(&p, y, y_stride, &ours, &plain, &size);
                if (!(ours <= 2 * plain + 1e-7 * size))
                    fail_msg("%s %s %ux%u rows %u pack %d: error %g, plain %g, size %g",
                             kernels_variant_name(kernels_selected()), xp_dtype_name(dtypes[d]),
                             p.w.rows, p.w.columns, x_rows, pack, ours, plain, size);
                for (uint32_t r = 0; r < x_rows; r++)
                    for (size_t n = p.w.rows; n < y_stride; n++)
                        assert_true(y[r * y_stride + n] == 777.0f);
                free(y);
                problem_free(&p);
            }
}

static void test_accuracy(void **state)
{
    (void)state;
    for_each_variant(check_accuracy);
}

/* Every way to compute a row must give the same bits. */
static void check_rows_identical(void)
{
    static const uint32_t row_counts[] = {1,  2,  3,  4,  5,  6,  7,  8,  9,
                                          12, 13, 14, 15, 16, 17, 29, 40, 257};
    xp_pool_t *pool = NULL;
    assert_int_equal(xp_pool_create(3, NULL, 0, &pool), XP_OK);
    for (size_t d = 0; d < COUNT(dtypes); d++)
        for (int pack = 0; pack < 2; pack++) {
            const uint32_t most = 300;
            problem_t p = problem_make(dtypes[d], (shape_t){77, 576}, most, pack, 42 + d);
            free(p.scratch);
            p.scratch = aligned(3 * kernels_scratch_bytes(most, p.w.columns));
            size_t stride = p.w.rows;
            float *alone = aligned(sizeof(float) * stride * most);
            float *y = aligned(sizeof(float) * stride * most);
            for (uint32_t r = 0; r < most; r++)
                kernels_matmul_range(&p.w, p.x + r * p.x_stride, p.x_stride, 1, alone + r * stride,
                                     stride, 0, p.w.rows, p.scratch);
            for (size_t c = 0; c < COUNT(row_counts); c++) {
                uint32_t rows = row_counts[c];
                memset(y, 0xee, sizeof(float) * stride * most);
                kernels_matmul_range(&p.w, p.x, p.x_stride, rows, y, stride, 0, p.w.rows,
                                     p.scratch);
                assert_memory_equal(y, alone, sizeof(float) * stride * rows);
            }
            memset(y, 0xee, sizeof(float) * stride * most);
            kernels_matmul(pool, &p.w, p.x, p.x_stride, most, y, stride, p.scratch);
            assert_memory_equal(y, alone, sizeof(float) * stride * most);
            /* Ranges: the middle 32 columns, then a range that ends inside a panel. */
            memset(y, 0xee, sizeof(float) * stride * most);
            kernels_matmul_range(&p.w, p.x, p.x_stride, 9, y, stride, 16, 48, p.scratch);
            for (uint32_t r = 0; r < 9; r++)
                assert_memory_equal(y + r * stride + 16, alone + r * stride + 16, 32 * 4);
            kernels_matmul_range(&p.w, p.x, p.x_stride, 2, y, stride, 32, 41, p.scratch);
            for (uint32_t r = 0; r < 2; r++)
                assert_memory_equal(y + r * stride + 32, alone + r * stride + 32, 9 * 4);
            /* Gathered rows. */
            for (uint32_t rows = 1; rows < 20; rows += 5) {
                uint32_t ids[20];
                for (uint32_t i = 0; i < rows; i++)
                    ids[i] = (i * 97 + 11) % most;
                kernels_matmul_gather_range(&p.w, p.x, p.x_stride, ids, rows, y, stride, 0,
                                            p.w.rows, p.scratch);
                for (uint32_t i = 0; i < rows; i++)
                    assert_memory_equal(y + i * stride, alone + ids[i] * stride, stride * 4);
            }
            free(alone);
            free(y);
            problem_free(&p);
        }
    xp_pool_destroy(pool);
}

static void test_rows_identical(void **state)
{
    (void)state;
    for_each_variant(check_rows_identical);
}

/* Memory between two pages that may not be touched: at its start or, for `end`, at its very end. */
typedef struct guarded {
    uint8_t *map;
    size_t length;
    void *data;
} guarded_t;

static guarded_t guarded_make(size_t bytes, bool end)
{
    const size_t page = 4096;
    size_t inner = (bytes + page - 1) / page * page;
    guarded_t g = {.length = inner + 2 * page};
    g.map = mmap(NULL, g.length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(g.map != MAP_FAILED);
    assert_int_equal(mprotect(g.map + page, inner, PROT_READ | PROT_WRITE), 0);
    g.data = g.map + page + (end ? inner - bytes : 0);
    return g;
}

/* Direct, tiled and edge paths never touch a byte outside weights, inputs and outputs. */
static void check_guards(void)
{
    static const uint32_t row_counts[] = {1, 2, 3, 4, 5, 9, 14, 17};
    static const uint32_t columns[] = {32, 96, 288, 512};
    for (size_t d = 0; d < COUNT(dtypes); d++)
        for (size_t c = 0; c < COUNT(columns); c++)
            for (size_t i = 0; i < COUNT(row_counts); i++) {
                bool end = (i + c + d) % 2 == 0;
                uint32_t rows = row_counts[i];
                problem_t p = problem_make(
                    dtypes[d], (shape_t){16 * (1 + (uint32_t)i % 4) + (uint32_t)c, columns[c]},
                    rows, true, i);
                size_t k = p.w.columns;
                size_t w_bytes = kernels_matrix_bytes(p.w.dtype, p.w.rows, p.w.columns);
                guarded_t w = guarded_make(w_bytes, end);
                guarded_t x = guarded_make(rows * k * 4, end);
                guarded_t y = guarded_make(rows * p.w.rows * 4, end);
                memcpy(w.data, p.w.data, xp_dtype_row_bytes(dtypes[d], k) * p.w.rows);
                for (uint32_t r = 0; r < rows; r++)
                    memcpy((float *)x.data + r * k, p.x + r * p.x_stride, k * 4);
                kernels_matrix_t guarded = p.w;
                guarded.data = w.data;
                float *expected = aligned(rows * p.w.rows * 4);
                kernels_matmul_range(&guarded, x.data, k, rows, y.data, p.w.rows, 0, p.w.rows,
                                     p.scratch);
                kernels_matmul_range(&p.w, p.x, p.x_stride, rows, expected, p.w.rows, 0, p.w.rows,
                                     p.scratch);
                assert_memory_equal(y.data, expected, rows * p.w.rows * 4);
                free(expected);
                munmap(w.map, w.length);
                munmap(x.map, x.length);
                munmap(y.map, y.length);
                problem_free(&p);
            }
}

static void test_guards(void **state)
{
    (void)state;
    for_each_variant(check_guards);
}

static void test_dequantize_row(void **state)
{
    (void)state;
    for (size_t d = 0; d < COUNT(dtypes); d++)
        for (int pack = 0; pack < 2; pack++) {
            problem_t p = problem_make(dtypes[d], (shape_t){35, 512}, 1, pack, 7 + d);
            size_t row_bytes = xp_dtype_row_bytes(dtypes[d], p.w.columns);
            float out[512];
            for (uint32_t n = 0; n < p.w.rows; n++) {
                kernels_dequantize_row(&p.w, n, out);
                for (uint32_t k = 0; k < p.w.columns; k++)
                    assert_true(out[k] == (float)reference_element(
                                              dtypes[d], p.checkpoint + n * row_bytes, k));
            }
            problem_free(&p);
        }
}

/* The identity matrix as input returns the weights that a variant really uses. They may differ from
 * the dequantised value by the rounding of 16 d - m at most (AVX2); mostly they are equal. */
static void check_weights_used(void)
{
    for (size_t d = 0; d < COUNT(dtypes); d++) {
        problem_t p = problem_make(dtypes[d], (shape_t){16, 256}, 256, true, 99 + d);
        memset(p.x, 0, sizeof(float) * p.x_stride * p.x_rows);
        for (uint32_t k = 0; k < 256; k++)
            p.x[k * p.x_stride + k] = 1.0f;
        float *y = aligned(sizeof(float) * 16 * 256);
        kernels_matmul_range(&p.w, p.x, p.x_stride, 256, y, 16, 0, 16, p.scratch);
        size_t row_bytes = xp_dtype_row_bytes(dtypes[d], 256);
        for (uint32_t n = 0; n < 16; n++)
            for (uint32_t k = 0; k < 256; k++) {
                double w = reference_element(dtypes[d], p.checkpoint + n * row_bytes, k);
                assert_true(fabs((double)y[k * 16 + n] - w) <= 0x1p-24 * 0.5);
            }
        free(y);
        problem_free(&p);
    }
}

static void test_weights_used(void **state)
{
    (void)state;
    for_each_variant(check_weights_used);
}

static void test_odd_shapes_stay_unpacked(void **state)
{
    (void)state;
    problem_t p = problem_make(XP_DTYPE_BF16, (shape_t){20, 33}, 3, true, 5);
    assert_false(p.w.packed);
    float y[60];
    kernels_matmul_range(&p.w, p.x, p.x_stride, 3, y, 20, 0, 20, p.scratch);
    double ours, plain, size;
    problem_errors(&p, y, 20, &ours, &plain, &size);
    assert_true(ours <= 2 * plain + 1e-7 * size);
    problem_free(&p);
}

static void test_selection(void **state)
{
    (void)state;
    setenv("XPOOL_KERNELS", "plain", 1);
    assert_int_equal(kernels_select(), XP_OK);
    assert_int_equal(kernels_selected(), KERNELS_PLAIN);
    setenv("XPOOL_KERNELS", "sse9", 1);
    assert_int_equal(kernels_select(), XP_INVALID);
    assert_non_null(strstr(xp_error_last()->text, "sse9"));
    unsetenv("XPOOL_KERNELS");
    assert_int_equal(kernels_select(), XP_OK);
    assert_string_equal(kernels_variant_name(KERNELS_AVX512), "avx512");
    assert_int_equal(kernels_select_variant(KERNELS_VARIANT_COUNT), XP_INVALID);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_accuracy),
        cmocka_unit_test(test_rows_identical),
        cmocka_unit_test(test_guards),
        cmocka_unit_test(test_dequantize_row),
        cmocka_unit_test(test_weights_used),
        cmocka_unit_test(test_selection),
        cmocka_unit_test(test_odd_shapes_stay_unpacked),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
