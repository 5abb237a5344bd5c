/* SPDX-License-Identifier: MIT */
/* Element conversion against the compiler's own half type and against exact arithmetic: every
 * 16-bit pattern one way, every float of chosen ranges and every rounding border the other. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "library/convert.h"

static uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

static float value_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

/* The value of a 16-bit pattern, by its definition. */
static double half_value(uint32_t half, int exponent_bits, int fraction_bits)
{
    int bias = (1 << (exponent_bits - 1)) - 1,
        exponent = (int)(half >> fraction_bits) & ((1 << exponent_bits) - 1);
    double fraction = (double)(half & ((1u << fraction_bits) - 1)) / (double)(1 << fraction_bits);
    double sign = half & 0x8000u ? -1 : 1;
    if (exponent == (1 << exponent_bits) - 1)
        return fraction != 0 ? (double)NAN : sign * (double)INFINITY;
    if (exponent == 0)
        return sign * ldexp(fraction, 1 - bias);
    return sign * ldexp(1 + fraction, exponent - bias);
}

static void check_to_f32(uint32_t dtype, int exponent_bits, int fraction_bits)
{
    static uint16_t all[65536];
    static float out[65536];
    for (uint32_t i = 0; i < 65536; i++)
        all[i] = (uint16_t)i;
    library_rows_to_f32(dtype, all, 65536, out);
    for (uint32_t i = 0; i < 65536; i++) {
        double wanted = half_value(i, exponent_bits, fraction_bits);
        if (isnan(wanted))
            assert_true(isnan(out[i]));
        else if (bits_of((float)wanted) != bits_of(out[i]))
            fail_msg("pattern %04x: %a, not %a", i, (double)out[i], wanted);
    }
}

/* Nearest, ties to even: no neighbour is nearer, and of two equally near ones the even was taken.
 */
static void check_one(uint32_t dtype, int exponent_bits, int fraction_bits, uint32_t bits)
{
    float value = value_of(bits);
    uint16_t half;
    library_rows_from_f32(dtype, &value, 1, &half);
    double got = half_value(half, exponent_bits, fraction_bits);
    if (isnan(value)) {
        assert_true(isnan(got));
        return;
    }
    assert_int_equal(half >> 15, bits >> 31);
    uint32_t magnitude = half & 0x7fffu;
    uint32_t infinity = ((1u << exponent_bits) - 1) << fraction_bits;
    double largest = half_value(infinity - 1, exponent_bits, fraction_bits);
    double step = largest - half_value(infinity - 2, exponent_bits, fraction_bits);
    double exact = fabs((double)value);
    if (magnitude == infinity) {
        assert_true(exact >= largest + step / 2);
        return;
    }
    double error = fabs(half_value(magnitude, exponent_bits, fraction_bits) - exact);
    for (int side = -1; side <= 1; side += 2) {
        if (magnitude == 0 && side < 0)
            continue;
        uint32_t other = magnitude + (uint32_t)side;
        double reach =
            other == infinity ? largest + step : half_value(other, exponent_bits, fraction_bits);
        double there = fabs(reach - exact);
        if (there < error || (there == error && magnitude & 1))
            fail_msg("%08x -> %04x: %04x is nearer or even", bits, half, other);
    }
}

static void check_from_f32(uint32_t dtype, int exponent_bits, int fraction_bits)
{
    /* Around every representable value and the middle between it and the next. */
    for (uint32_t half = 0; half < 0x8000u; half++) {
        double low = half_value(half, exponent_bits, fraction_bits);
        double high = half_value(half + 1, exponent_bits, fraction_bits);
        if (isnan(low) || isinf(low))
            continue;
        double middle = isinf(high) || isnan(high) ? low * 1.0002 : (low + high) / 2;
        uint32_t places[2] = {bits_of((float)low), bits_of((float)middle)};
        for (int p = 0; p < 2; p++)
            for (int offset = -2; offset <= 2; offset++) {
                uint32_t bits = places[p] + (uint32_t)offset;
                check_one(dtype, exponent_bits, fraction_bits, bits & 0x7fffffffu);
                check_one(dtype, exponent_bits, fraction_bits, bits | 0x80000000u);
            }
    }
    uint32_t state = 1;
    for (int i = 0; i < 1000000; i++) {
        state = state * 1664525u + 1013904223u;
        check_one(dtype, exponent_bits, fraction_bits, state);
    }
    static const uint32_t special[] = {0x7f800000u, 0xff800000u, 0x7fc00000u, 0x7f800001u,
                                       0xffffffffu, 0x7f7fffffu, 1u,          0x80000000u,
                                       0x477fefffu, 0x477ff000u, 0x33000000u, 0x33000001u};
    for (size_t i = 0; i < sizeof(special) / sizeof(special[0]); i++)
        check_one(dtype, exponent_bits, fraction_bits, special[i]);
}

static void test_f16(void **state)
{
    check_to_f32(XPOOL_F16, 5, 10);
    check_from_f32(XPOOL_F16, 5, 10);
}

static void test_bf16(void **state)
{
    check_to_f32(XPOOL_BF16, 8, 7);
    check_from_f32(XPOOL_BF16, 8, 7);
}

static void test_f32(void **state)
{
    float in[3] = {1, -2, 3}, out[3] = {0};
    library_rows_to_f32(XPOOL_F32, in, 3, out);
    assert_memory_equal(in, out, sizeof(in));
    memset(out, 0, sizeof(out));
    library_rows_from_f32(XPOOL_F32, in, 3, out);
    assert_memory_equal(in, out, sizeof(in));
}

static void test_names(void **state)
{
    assert_int_equal(library_dtype_bytes(XPOOL_F32), 4);
    assert_int_equal(library_dtype_bytes(XPOOL_BF16), 2);
    assert_int_equal(library_dtype_bytes(7), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_f16), cmocka_unit_test(test_bf16),
                                       cmocka_unit_test(test_f32), cmocka_unit_test(test_names)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
