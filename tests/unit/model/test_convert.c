/* SPDX-License-Identifier: MIT */
/*
 * Element conversion: F16 against the compiler's own half type for every bit pattern, BF16 and the
 * block formats against values worked out by hand. (tests/unit/model/test_fixtures.c compares with
 * the gguf package.)
 */
#include "support.h"

#include <math.h>

#include "model/convert.h"

static void test_every_half(void **state)
{
    (void)state;
    for (uint32_t bits = 0; bits < 65536; bits++) {
        uint16_t half_bits = (uint16_t)bits;
        _Float16 half;
        memcpy(&half, &half_bits, sizeof(half));
        float wanted = (float)half, found = convert_f16_to_f32(half_bits);
        if (isnan(wanted)) {
            assert_true(isnan(found));
            continue;
        }
        assert_memory_equal(&found, &wanted, sizeof(float));
        assert_int_equal(convert_f32_to_f16(found), half_bits);
    }
}

/* Around every half: the neighbours in between must round as the compiler rounds. */
static void test_rounding_to_half(void **state)
{
    (void)state;
    for (uint32_t bits = 0; bits < 65536; bits += 1) {
        float value = convert_f16_to_f32((uint16_t)bits);
        if (isnan(value) || isinf(value))
            continue;
        uint32_t raw;
        memcpy(&raw, &value, sizeof(raw));
        for (int32_t step = -3; step <= 3; step++) {
            uint32_t moved = raw + (uint32_t)(step * 0x0fff);
            float near;
            memcpy(&near, &moved, sizeof(near));
            if (isnan(near))
                continue;
            _Float16 half = (_Float16)near;
            uint16_t wanted;
            memcpy(&wanted, &half, sizeof(wanted));
            assert_int_equal(convert_f32_to_f16(near), wanted);
        }
    }
    assert_int_equal(convert_f32_to_f16(65519.0f), 0x7bff);
    assert_int_equal(convert_f32_to_f16(65520.0f), 0x7c00);
    assert_int_equal(convert_f32_to_f16(-INFINITY), 0xfc00);
    assert_true((convert_f32_to_f16(NAN) & 0x7fff) > 0x7c00);
}

static void test_bfloat(void **state)
{
    (void)state;
    const uint16_t stored[] = {0x3f80, 0xc000, 0x0000, 0x7f80};
    float values[4];
    convert_to_f32(XP_DTYPE_BF16, stored, 4, values);
    assert_true(values[0] == 1 && values[1] == -2 && values[2] == 0 && isinf(values[3]));
    assert_int_equal(convert_f32_to_bf16(1.0f), 0x3f80);
    /* 1 + 2^-8 lies half way: to even. 1 + 3*2^-8 too: up to the even one. */
    assert_int_equal(convert_f32_to_bf16(1.00390625f), 0x3f80);
    assert_int_equal(convert_f32_to_bf16(1.01171875f), 0x3f82);
    assert_true((convert_f32_to_bf16(NAN) & 0x7fff) > 0x7f80);
}

static void test_blocks_by_hand(void **state)
{
    (void)state;
    float out[256];
    uint8_t q8[34] = {0x00, 0x38, 2, 0xff}; /* d = 0.5 */
    convert_to_f32(XP_DTYPE_Q8_0, q8, 32, out);
    assert_true(out[0] == 1 && out[1] == -0.5f && out[2] == 0);
    uint8_t q40[18] = {0x00, 0x3c, 0x9f}; /* d = 1; low 15, high 9 */
    convert_to_f32(XP_DTYPE_Q4_0, q40, 32, out);
    assert_true(out[0] == 7 && out[16] == 1 && out[1] == -8);
    uint8_t q41[20] = {0x00, 0x40, 0x00, 0xbc, 0x31}; /* d = 2, m = -1; low 1, high 3 */
    convert_to_f32(XP_DTYPE_Q4_1, q41, 32, out);
    assert_true(out[0] == 1 && out[16] == 5 && out[2] == -1);
    /* d = 1, dmin = 0.5; sub-block 0: scale 2, minimum 4; sub-block 4: scale 16+1, minimum 32+3. */
    uint8_t q4k[144] = {0x00, 0x3c, 0x00, 0x38};
    q4k[4 + 0] = 2 | 1 << 6; /* high bits of scale 4: 1 */
    q4k[4 + 4] = 4 | 2 << 6; /* high bits of minimum 4: 2 */
    q4k[4 + 8] = 1 | 3 << 4; /* low nibbles of scale 4 and minimum 4 */
    q4k[16] = 5;             /* element 0 */
    q4k[16 + 64] = 7;        /* element 128, sub-block 4 */
    convert_to_f32(XP_DTYPE_Q4_K, q4k, 256, out);
    assert_true(out[0] == 2 * 5 - 0.5f * 4);
    assert_true(out[128] == 17 * 7 - 0.5f * 35);
    assert_true(out[32] == 0);
    uint8_t q6k[210] = {0};
    q6k[208] = 0x00, q6k[209] = 0x3c; /* d = 1 */
    q6k[192] = 3;                     /* scale of elements 0..15 */
    q6k[192 + 15] = 0xfe;             /* scale -2 of elements 240..255 */
    q6k[0] = 0x01;                    /* element 0: low nibble 1 */
    q6k[128] = 2;                     /* and high bits 2: 33 */
    q6k[64 + 63] = 0x70;              /* element 255: nibble 7 (half 1, at 127) */
    q6k[128 + 32 + 31] = 3 << 6;      /* high bits 3: 55 */
    convert_to_f32(XP_DTYPE_Q6_K, q6k, 256, out);
    assert_true(out[0] == 3 * (33 - 32));
    assert_true(out[255] == -2 * (55 - 32));
    assert_true(out[1] == 3 * -32);
}

/* Quantising and back stays within half a step of each format. */
static void test_quantising(void **state)
{
    (void)state;
    static const struct {
        xp_dtype_t dtype;
        float tolerance; /* for values in -1 .. 1 */
    } formats[] = {{XP_DTYPE_Q8_0, 0.006f}, {XP_DTYPE_Q4_0, 0.14f}, {XP_DTYPE_Q4_1, 0.08f},
                   {XP_DTYPE_Q4_K, 0.10f},  {XP_DTYPE_Q6_K, 0.05f}, {XP_DTYPE_F16, 0.0005f},
                   {XP_DTYPE_BF16, 0.005f}, {XP_DTYPE_F32, 0}};
    float values[256], back[256];
    uint8_t stored[1024];
    srand(1);
    for (int round = 0; round < 50; round++) {
        for (int i = 0; i < 256; i++)
            values[i] = round == 0 ? 0 : (float)rand() / (float)RAND_MAX * 2 - 1;
        for (size_t k = 0; k < sizeof(formats) / sizeof(formats[0]); k++) {
            convert_from_f32(formats[k].dtype, values, 256, stored);
            convert_to_f32(formats[k].dtype, stored, 256, back);
            for (int i = 0; i < 256; i++)
                assert_true(fabsf(back[i] - values[i]) <= formats[k].tolerance);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_half), cmocka_unit_test(test_rounding_to_half),
        cmocka_unit_test(test_bfloat),     cmocka_unit_test(test_blocks_by_hand),
        cmocka_unit_test(test_quantising),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
