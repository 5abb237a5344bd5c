/* SPDX-License-Identifier: MIT */
/* What the CUDA FFN kernels' host side decides without a GPU: workspaces, signatures, shares. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "ffn/cuda/kernels.h"
#include "ffn/cuda/library.h"

static const ffn_cuda_signature_t moe = {.hidden = 2048,
                                         .intermediate = 768,
                                         .experts = 128,
                                         .top_k = 8,
                                         .groups = 1,
                                         .top_groups = 1,
                                         .routed_scale = 1.0f};
static const ffn_cuda_signature_t dense = {.hidden = 5120, .intermediate = 17408};

static void test_workspace(void **state)
{
    (void)state;
    const cuda_address_t base = (cuda_address_t)1 << 40;
    for (uint32_t rows = 0; rows <= 8192; rows = rows * 2 + 1) {
        ffn_cuda_limits_t limits = {.bulk_rows = rows};
        ffn_cuda_workspace_t w;
        ffn_cuda_limits_add(&limits, &moe);
        ffn_cuda_limits_add(&limits, &dense);
        const uint64_t bytes = ffn_cuda_workspace_bytes(&limits);
        ffn_cuda_workspace_carve(&limits, base, &w);
        assert_int_equal((uintptr_t)w.meeting, base);
        /* 32 rows of 8 choose all 128 experts; a dense row is less. */
        assert_int_equal(w.decode_pitch, 128 * 768);
        assert_true((cuda_address_t)(uintptr_t)w.decode_activations + 32 * w.decode_pitch * 2 <=
                    base + bytes);
        assert_int_equal((uintptr_t)w.decode_activations % 256, 0);
        if (rows == 0) {
            assert_null(w.products);
            continue;
        }
        /* Each expert may end in a tile that is not full. */
        assert_true(w.max_tiles >= (rows * 8 + 127) / 128 + 127);
        assert_true((cuda_address_t)(uintptr_t)w.activations + (uint64_t)rows * 17408 * 2 <=
                    (cuda_address_t)(uintptr_t)w.products);
        assert_true((cuda_address_t)(uintptr_t)w.products + (uint64_t)rows * 9 * 5120 * 4 <=
                    base + bytes);
    }
}

static void test_signatures(void **state)
{
    (void)state;
    assert_int_equal(ffn_cuda_signature_check(&moe), XP_OK);
    assert_int_equal(ffn_cuda_signature_check(&dense), XP_OK);
    ffn_cuda_signature_t s = dense;
    s.intermediate = 17404;
    assert_int_equal(ffn_cuda_signature_check(&s), XP_INVALID);
    assert_non_null(strstr(xp_error_last()->text, "multiples of 8"));
    s = moe;
    s.top_k = 33;
    assert_int_equal(ffn_cuda_signature_check(&s), XP_UNSUPPORTED);
    s = moe;
    s.groups = 8;
    s.top_groups = 0;
    assert_int_equal(ffn_cuda_signature_check(&s), XP_UNSUPPORTED);
    s = moe;
    s.router_dtype = FFN_CUDA_F16; /* weights are BF16 */
    assert_int_equal(ffn_cuda_signature_check(&s), XP_UNSUPPORTED);
    s = dense;
    s.dtype = FFN_CUDA_F32;
    assert_int_equal(ffn_cuda_signature_check(&s), XP_UNSUPPORTED);
}

/* Shares stay a division of the whole and within what the kernels reckon with, whatever is
 * measured. */
static void test_shares(void **state)
{
    (void)state;
    enum { BLOCKS = 132 };
    static uint32_t cycles[2][FFN_CUDA_MAX_BLOCKS], shares[2][FFN_CUDA_MAX_BLOCKS + 1];
    uint32_t seed = 1;
    for (uint32_t round = 0; round < 50; round++) {
        for (uint32_t i = 0; i < BLOCKS; i++)
            for (uint32_t phase = 0; phase < 2; phase++) {
                seed = seed * 1664525u + 1013904223u;
                cycles[phase][i] = round % 10 == 9 ? 0 : 1000 + (seed >> 8) % 100000;
            }
        ffn_cuda_shares_adjust(BLOCKS, cycles, shares);
        for (uint32_t phase = 0; phase < 2; phase++) {
            assert_int_equal(shares[phase][0], 0);
            assert_int_equal(shares[phase][BLOCKS], FFN_CUDA_SHARE_ONE);
            for (uint32_t i = 0; i < BLOCKS; i++) {
                assert_true(shares[phase][i] <= shares[phase][i + 1]);
                assert_true(shares[phase][i + 1] - shares[phase][i] <=
                            FFN_CUDA_SHARE_ONE / BLOCKS * 9 / 8);
            }
        }
    }
    /* A slow block gets less than an even part, a fast one more. */
    memset(shares, 0, sizeof(shares));
    for (uint32_t i = 0; i < BLOCKS; i++)
        cycles[0][i] = cycles[1][i] = i == 7 ? 1100 : (i == 9 ? 900 : 1000);
    ffn_cuda_shares_adjust(BLOCKS, cycles, shares);
    assert_true(shares[0][8] - shares[0][7] < FFN_CUDA_SHARE_ONE / BLOCKS);
    assert_true(shares[0][10] - shares[0][9] > FFN_CUDA_SHARE_ONE / BLOCKS);
}

static void test_library_plans_are_for_dense_layers(void **state)
{
    (void)state;
    ffn_library_plan_t *plan = NULL;
    assert_int_equal(ffn_library_plan_make(NULL, &moe, 64, 0, &plan), XP_INVALID);
    assert_int_equal(ffn_library_plan_make(NULL, &dense, 0, 0, &plan), XP_INVALID);
    assert_null(plan);
    ffn_library_plan_free(NULL);
    ffn_library_close(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_workspace),
        cmocka_unit_test(test_signatures),
        cmocka_unit_test(test_shares),
        cmocka_unit_test(test_library_plans_are_for_dense_layers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
