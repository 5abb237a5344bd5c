/* SPDX-License-Identifier: MIT */
/* Elementwise kernels and reductions of every variant against doubles from libm. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <cmocka.h>

#include "kernels/kernels.h"
#include "reference.h"

#define MOST 1031

static const size_t counts[] = {1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 192, 576, MOST};
#define COUNTS (sizeof(counts) / sizeof(counts[0]))

static float a[MOST], b[MOST], y[MOST + 8], z[MOST + 8];

static void for_each_variant(void (*check)(void))
{
    for (unsigned v = 0; v < KERNELS_VARIANT_COUNT; v++)
        if (kernels_variant_supported((kernels_variant_t)v)) {
            assert_int_equal(kernels_select_variant((kernels_variant_t)v), XP_OK);
            check();
        }
    assert_int_equal(kernels_select(), XP_OK);
}

static void fill(uint64_t seed, float scale)
{
    for (size_t i = 0; i < MOST; i++) {
        a[i] = scale * reference_uniform(&seed);
        b[i] = reference_uniform(&seed);
    }
}

static double silu(double x)
{
    return x / (1 + exp(-x));
}

static double gelu_tanh(double x)
{
    return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

static void check_gate(void (*kernel)(const float *, const float *, float *, size_t),
                       double (*exact)(double), double tolerance)
{
    static const float scales[] = {0.01f, 1, 10, 80, 1000};
    for (size_t s = 0; s < 5; s++) {
        fill(s, scales[s]);
        for (size_t c = 0; c < COUNTS; c++) {
            size_t count = counts[c];
            for (size_t i = 0; i < MOST + 8; i++)
                y[i] = 777;
            kernel(a, b, y, count);
            for (size_t i = 0; i < count; i++) {
                double want = exact((double)a[i]) * (double)b[i];
                double error = fabs((double)y[i] - want);
                if (!(error <= tolerance * fabs(want) + 1e-37))
                    fail_msg("%s: f(%g) * %g: %g, exact %g",
                             kernels_variant_name(kernels_selected()), (double)a[i], (double)b[i],
                             (double)y[i], want);
                /* The same element at any place and count. */
                kernel(a + i, b + i, z, 1);
                assert_true(memcmp(z, y + i, 4) == 0);
            }
            assert_true(y[count] == 777);
        }
    }
    /* In place, and the ends of the range. */
    float ends[8] = {0, -0.0f, INFINITY, -200, 88.5f, -88.5f, 3e38f, -3e38f};
    float ones[8] = {1, 1, 1, 1, 1, 1, 1, 1}, not_a_number[1] = {NAN};
    kernel(ends, ones, ends, 8);
    assert_true(ends[0] == 0 && ends[1] == 0 && ends[2] == INFINITY);
    for (int i = 3; i < 8; i += 2)
        assert_true(fabsf(ends[i]) < 1e-30f);
    assert_true(ends[4] == 88.5f && ends[6] == 3e38f);
    kernel(not_a_number, ones, z, 1);
    assert_true(isnan(z[0]));
}

static void check_gates(void)
{
    /* Relative to the exact value: a few units in the last place (6e-8). */
    check_gate(kernels_silu_mul, silu, 5e-7);
}

static void check_gelu(void)
{
    /* 1 + tanh cancels for negative arguments in the plain form, so the error is measured against
     * the argument there. */
    for (size_t s = 0; s < 4; s++) {
        fill(40 + s, (float)(1 << (2 * s)));
        kernels_gelu_tanh_mul(a, b, y, MOST);
        for (size_t i = 0; i < MOST; i++) {
            double want = gelu_tanh((double)a[i]) * (double)b[i];
            assert_true(fabs((double)y[i] - want) <=
                        5e-7 * fabs((double)a[i] * (double)b[i]) + 1e-37);
            kernels_gelu_tanh_mul(a + i, b + i, z, 1);
            assert_true(memcmp(z, y + i, 4) == 0);
        }
    }
}

static void check_reductions(void)
{
    for (size_t c = 0; c < COUNTS; c++) {
        size_t count = counts[c];
        fill(100 + c, 3);
        double dot = 0, squares = 0, size = 0, largest = -1e9, total = 0;
        for (size_t i = 0; i < count; i++) {
            dot += (double)a[i] * (double)b[i];
            squares += (double)a[i] * (double)a[i];
            size += fabs((double)a[i] * (double)b[i]);
            largest = fmax(largest, (double)a[i]);
        }
        assert_true(fabs((double)kernels_dot(a, b, count) - dot) <= 4e-7 * size);

        kernels_rms_norm(a, b, 1e-6, y, count);
        double scale = 1 / sqrt(squares / (double)count + 1e-6);
        for (size_t i = 0; i < count; i++)
            assert_true(fabs((double)y[i] - (double)a[i] * scale * (double)b[i]) <=
                        4e-7 * fabs((double)a[i] * scale * (double)b[i]) + 1e-37);
        memcpy(z, a, sizeof(a));
        kernels_rms_norm(z, b, 1e-6, z, count);
        assert_memory_equal(z, y, count * sizeof(float));

        for (size_t i = 0; i < count; i++)
            total += exp((double)a[i] - largest);
        memcpy(y, a, sizeof(a));
        y[count] = 555;
        kernels_softmax(y, count);
        for (size_t i = 0; i < count; i++)
            assert_true(fabs((double)y[i] - exp((double)a[i] - largest) / total) <=
                        1e-6 * exp((double)a[i] - largest) / total);
        assert_true(y[count] == 555);

        memcpy(y, a, sizeof(a));
        kernels_add(y, b, count);
        memcpy(z, a, sizeof(a));
        kernels_axpy(z, 0.37f, b, count);
        for (size_t i = 0; i < count; i++) {
            assert_true(y[i] == a[i] + b[i]);
            assert_true(fabs((double)z[i] - ((double)a[i] + (double)0.37f * (double)b[i])) <=
                        2.4e-7 * (fabs((double)a[i]) + 1));
        }
        if (count < MOST)
            assert_true(y[count] == a[count] && z[count] == a[count]);
    }
    kernels_softmax(y, 0);
    float masked[5] = {1, -INFINITY, 1, -INFINITY, -INFINITY};
    kernels_softmax(masked, 5);
    assert_true(masked[0] == 0.5f && masked[1] == 0 && masked[2] == 0.5f);
    float huge[3] = {3e38f, -3e38f, 3e38f};
    kernels_softmax(huge, 3);
    assert_true(huge[0] == 0.5f && huge[1] == 0);
}

static void test_silu(void **state)
{
    (void)state;
    for_each_variant(check_gates);
}

static void test_gelu(void **state)
{
    (void)state;
    for_each_variant(check_gelu);
}

static void test_reductions(void **state)
{
    (void)state;
    for_each_variant(check_reductions);
}

/* Every 16-bit pattern to FP32 and back, and halfway cases from FP32. */
static void test_convert(void **state)
{
    (void)state;
    for (uint32_t bits = 0; bits < 65536; bits++) {
        uint8_t bytes[2] = {(uint8_t)bits, (uint8_t)(bits >> 8)};
        uint16_t half, back;
        float single;
        memcpy(&half, bytes, 2);
        kernels_convert(XP_DTYPE_F16, &half, XP_DTYPE_F32, &single, 1);
        kernels_convert(XP_DTYPE_F32, &single, XP_DTYPE_F16, &back, 1);
        bool special = (bits >> 10 & 31) == 31;
        if (!special)
            assert_true((double)single == reference_half(bytes));
        else
            assert_true((bits & 1023) ? isnan(single) : isinf(single));
        if (!isnan(single))
            assert_int_equal(back, half);
        kernels_convert(XP_DTYPE_BF16, &half, XP_DTYPE_F32, &single, 1);
        uint32_t wide;
        memcpy(&wide, &single, 4);
        assert_int_equal(wide, bits << 16);
        kernels_convert(XP_DTYPE_F32, &single, XP_DTYPE_BF16, &back, 1);
        if (!isnan(single))
            assert_int_equal(back, half);
    }
    /* value, expected binary16, expected bfloat16: ties go to even, large values to infinity. */
    static const struct {
        float value;
        uint16_t f16, bf16;
    } cases[] = {
        {1.0f + 0x1p-11f, 0x3c00, 0x3f80},  {1.0f + 0x1.8p-10f, 0x3c02, 0x3f80},
        {65519.0f, 0x7bff, 0x4780},         {65520.0f, 0x7c00, 0x4780},
        {0x1p-25f, 0x0000, 0x3300},         {0x1.000002p-25f, 0x0001, 0x3300},
        {-0x1.8p-24f, 0x8002, 0xb3c0},      {1.0f + 0x1p-8f, 0x3c04, 0x3f80},
        {1.0f + 0x1.8p-7f, 0x3c0c, 0x3f82}, {3.4e38f, 0x7c00, 0x7f80},
        {0x1.ff8p-15f, 0x03ff, 0x3880},     {0x1.ffep-15f, 0x0400, 0x3880},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        uint16_t half;
        kernels_convert(XP_DTYPE_F32, &cases[i].value, XP_DTYPE_F16, &half, 1);
        if (half != cases[i].f16)
            fail_msg("case %zu: f16 %04x", i, half);
        kernels_convert(XP_DTYPE_F32, &cases[i].value, XP_DTYPE_BF16, &half, 1);
        if (half != cases[i].bf16)
            fail_msg("case %zu: bf16 %04x", i, half);
    }
    float not_a_number = NAN, back;
    uint16_t half;
    kernels_convert(XP_DTYPE_F32, &not_a_number, XP_DTYPE_F16, &half, 1);
    kernels_convert(XP_DTYPE_F16, &half, XP_DTYPE_F32, &back, 1);
    assert_true(isnan(back));
    kernels_convert(XP_DTYPE_F16, &half, XP_DTYPE_BF16, &half, 1);
    kernels_convert(XP_DTYPE_BF16, &half, XP_DTYPE_F32, &back, 1);
    assert_true(isnan(back));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_silu),
        cmocka_unit_test(test_gelu),
        cmocka_unit_test(test_reductions),
        cmocka_unit_test(test_convert),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
