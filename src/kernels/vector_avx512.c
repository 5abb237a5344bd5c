/* SPDX-License-Identifier: MIT */
/*
 * Elementwise kernels and reductions with AVX-512, and this variant's table.
 *
 * Pure functions, any thread. Tails use masks of the same arithmetic, so an element's result does
 * not depend on its place. Reductions keep four vectors of partial sums, added in one fixed tree.
 */
#include "kernels/matmul_avx512.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <math.h>

/* e^x: x = n ln2 + r with |r| <= ln2/2, the Taylor series of e^r to degree 7 (relative error below
 * 2^-27 there), scaled by 2^n. Overflow gives infinity, underflow zero, NaN stays NaN. */
static inline __m512 vector_exp(__m512 x)
{
    const __m512 low = _mm512_set1_ps(-110.0f), high = _mm512_set1_ps(100.0f);
    /* The operand order keeps a NaN in x. */
    x = _mm512_max_ps(low, _mm512_min_ps(high, x));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)),
                                    _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    /* ln2 in two parts, the first with few enough bits that n times it is exact. */
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440054690583e-4f), r);
    __m512 p = _mm512_set1_ps(1.0f / 5040);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 720));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

static inline __mmask16 vector_tail(size_t count)
{
    return count >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << count) - 1u);
}

/* x / (1 + e^-t) */
static inline __m512 vector_gate(__m512 x, __m512 t)
{
    __m512 e = vector_exp(_mm512_sub_ps(_mm512_setzero_ps(), t));
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
}

static void avx512_silu_mul(const float *gate, const float *up, float *y, size_t count)
{
    for (size_t i = 0; i < count; i += 16) {
        __mmask16 mask = vector_tail(count - i);
        __m512 x = _mm512_maskz_loadu_ps(mask, gate + i);
        __m512 u = _mm512_maskz_loadu_ps(mask, up + i);
        _mm512_mask_storeu_ps(y + i, mask, _mm512_mul_ps(vector_gate(x, x), u));
    }
}

/* 0.5 x (1 + tanh(s)) equals x / (1 + e^-2s). */
static void avx512_gelu_tanh_mul(const float *gate, const float *up, float *y, size_t count)
{
    const __m512 cubic = _mm512_set1_ps(0.044715f), twice = _mm512_set1_ps(1.5957691216057308f);
    for (size_t i = 0; i < count; i += 16) {
        __mmask16 mask = vector_tail(count - i);
        __m512 x = _mm512_maskz_loadu_ps(mask, gate + i);
        __m512 u = _mm512_maskz_loadu_ps(mask, up + i);
        __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
        __m512 t = _mm512_mul_ps(twice, _mm512_fmadd_ps(cubic, cube, x));
        _mm512_mask_storeu_ps(y + i, mask, _mm512_mul_ps(vector_gate(x, t), u));
    }
}

static float avx512_dot(const float *a, const float *b, size_t count)
{
    __m512 sum[4];
    for (int s = 0; s < 4; s++)
        sum[s] = _mm512_setzero_ps();
    size_t i = 0;
    for (; i + 64 <= count; i += 64)
#pragma GCC unroll 4
        for (int s = 0; s < 4; s++)
            sum[s] = _mm512_fmadd_ps(_mm512_loadu_ps(a + i + 16 * s),
                                     _mm512_loadu_ps(b + i + 16 * s), sum[s]);
    for (int s = 0; i < count; i += 16, s++) {
        __mmask16 mask = vector_tail(count - i);
        sum[s & 3] = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(mask, a + i),
                                     _mm512_maskz_loadu_ps(mask, b + i), sum[s & 3]);
    }
    sum[0] = _mm512_add_ps(_mm512_add_ps(sum[0], sum[1]), _mm512_add_ps(sum[2], sum[3]));
    return _mm512_reduce_add_ps(sum[0]);
}

static void avx512_rms_norm(const float *x, const float *weight, double epsilon, float *y,
                            size_t count)
{
    double mean = (double)avx512_dot(x, x, count) / (double)count;
    __m512 scale = _mm512_set1_ps((float)(1.0 / sqrt(mean + epsilon)));
    for (size_t i = 0; i < count; i += 16) {
        __mmask16 mask = vector_tail(count - i);
        __m512 value = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, x + i), scale);
        value = _mm512_mul_ps(value, _mm512_maskz_loadu_ps(mask, weight + i));
        _mm512_mask_storeu_ps(y + i, mask, value);
    }
}

static void avx512_add(float *y, const float *x, size_t count)
{
    for (size_t i = 0; i < count; i += 16) {
        __mmask16 mask = vector_tail(count - i);
        __m512 sum =
            _mm512_add_ps(_mm512_maskz_loadu_ps(mask, y + i), _mm512_maskz_loadu_ps(mask, x + i));
        _mm512_mask_storeu_ps(y + i, mask, sum);
    }
}

static void avx512_axpy(float *y, float a, const float *x, size_t count)
{
    __m512 factor = _mm512_set1_ps(a);
    for (size_t i = 0; i < count; i += 16) {
        __mmask16 mask = vector_tail(count - i);
        __m512 sum = _mm512_fmadd_ps(factor, _mm512_maskz_loadu_ps(mask, x + i),
                                     _mm512_maskz_loadu_ps(mask, y + i));
        _mm512_mask_storeu_ps(y + i, mask, sum);
    }
}

static void avx512_softmax(float *x, size_t count)
{
    if (count == 0)
        return;
    __m512 largest = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
    for (size_t i = 0; i < count; i += 16) {
        __mmask16 mask = vector_tail(count - i);
        largest = _mm512_mask_max_ps(largest, mask, largest, _mm512_maskz_loadu_ps(mask, x + i));
    }
    largest = _mm512_set1_ps(_mm512_reduce_max_ps(largest));
    for (size_t i = 0; i < count; i += 16) {
        __mmask16 mask = vector_tail(count - i);
        __m512 e = vector_exp(_mm512_sub_ps(_mm512_maskz_loadu_ps(mask, x + i), largest));
        sum = _mm512_mask_add_ps(sum, mask, sum, e);
        _mm512_mask_storeu_ps(x + i, mask, e);
    }
    __m512 scale = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(sum));
    for (size_t i = 0; i < count; i += 16) {
        __mmask16 mask = vector_tail(count - i);
        _mm512_mask_storeu_ps(x + i, mask,
                              _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, x + i), scale));
    }
}

const kernels_ops_t kernels_ops_avx512 = {
    .variant = KERNELS_AVX512,
    .decode = matmul_avx512_decode,
    .micro = matmul_avx512_micro,
    .micro_rows = 14,
    .micro_panels = 2,
    .direct = matmul_avx512_direct,
    .direct_rows = 8,
    .direct_limit = 16,
    .fused = matmul_avx512_fused,
    .fused_rows = 16,
    .silu_mul = avx512_silu_mul,
    .gelu_tanh_mul = avx512_gelu_tanh_mul,
    .rms_norm = avx512_rms_norm,
    .add = avx512_add,
    .axpy = avx512_axpy,
    .dot = avx512_dot,
    .softmax = avx512_softmax,
};
#endif
