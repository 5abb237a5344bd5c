/* SPDX-License-Identifier: MIT */
/*
 * Elementwise kernels and reductions with AVX2 and FMA, and this variant's table.
 *
 * Pure functions, any thread. Tails use masked loads and stores around the same arithmetic, so an
 * element's result does not depend on its place. Reductions keep four vectors of partial sums,
 * added in one fixed tree.
 */
#include "kernels/matmul_avx2.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <math.h>

/* The first `count` (at most 8) lanes. */
static inline __m256i vector_tail(size_t count)
{
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count < 8 ? (int)count : 8), lanes);
}

/* 2^n for integral -126 <= n <= 127. */
static inline __m256 vector_power(__m256i n)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}

/* e^x: x = n ln2 + r with |r| <= ln2/2, the Taylor series of e^r to degree 7 (relative error below
 * 2^-27 there), scaled by 2^n in two steps so that overflow gives infinity and underflow zero. NaN
 * stays NaN. */
static inline __m256 vector_exp(__m256 x)
{
    /* The operand order keeps a NaN in x. */
    x = _mm256_max_ps(_mm256_set1_ps(-110.0f), _mm256_min_ps(_mm256_set1_ps(100.0f), x));
    __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504088896341f)),
                               _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    /* ln2 in two parts, the first with few enough bits that n times it is exact. */
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440054690583e-4f), r);
    __m256 p = _mm256_set1_ps(1.0f / 5040);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 720));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 120));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 24));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 6));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.5f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
    __m256i whole = _mm256_cvtps_epi32(n);
    __m256i half = _mm256_srai_epi32(whole, 1);
    p = _mm256_mul_ps(p, vector_power(half));
    return _mm256_mul_ps(p, vector_power(_mm256_sub_epi32(whole, half)));
}

static inline float vector_sum(__m256 v)
{
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

/* x / (1 + e^-t) */
static inline __m256 vector_gate(__m256 x, __m256 t)
{
    __m256 e = vector_exp(_mm256_sub_ps(_mm256_setzero_ps(), t));
    return _mm256_div_ps(x, _mm256_add_ps(_mm256_set1_ps(1.0f), e));
}

static void avx2_silu_mul(const float *gate, const float *up, float *y, size_t count)
{
    for (size_t i = 0; i < count; i += 8) {
        __m256i mask = vector_tail(count - i);
        __m256 x = _mm256_maskload_ps(gate + i, mask), u = _mm256_maskload_ps(up + i, mask);
        _mm256_maskstore_ps(y + i, mask, _mm256_mul_ps(vector_gate(x, x), u));
    }
}

/* 0.5 x (1 + tanh(s)) equals x / (1 + e^-2s). */
static void avx2_gelu_tanh_mul(const float *gate, const float *up, float *y, size_t count)
{
    const __m256 cubic = _mm256_set1_ps(0.044715f), twice = _mm256_set1_ps(1.5957691216057308f);
    for (size_t i = 0; i < count; i += 8) {
        __m256i mask = vector_tail(count - i);
        __m256 x = _mm256_maskload_ps(gate + i, mask), u = _mm256_maskload_ps(up + i, mask);
        __m256 cube = _mm256_mul_ps(_mm256_mul_ps(x, x), x);
        __m256 t = _mm256_mul_ps(twice, _mm256_fmadd_ps(cubic, cube, x));
        _mm256_maskstore_ps(y + i, mask, _mm256_mul_ps(vector_gate(x, t), u));
    }
}

static float avx2_dot(const float *a, const float *b, size_t count)
{
    __m256 sum[4];
    for (int s = 0; s < 4; s++)
        sum[s] = _mm256_setzero_ps();
    size_t i = 0;
    for (; i + 32 <= count; i += 32)
#pragma GCC unroll 4
        for (int s = 0; s < 4; s++)
            sum[s] = _mm256_fmadd_ps(_mm256_loadu_ps(a + i + 8 * s), _mm256_loadu_ps(b + i + 8 * s),
                                     sum[s]);
    for (int s = 0; i < count; i += 8, s++) {
        __m256i mask = vector_tail(count - i);
        sum[s & 3] = _mm256_fmadd_ps(_mm256_maskload_ps(a + i, mask),
                                     _mm256_maskload_ps(b + i, mask), sum[s & 3]);
    }
    return vector_sum(_mm256_add_ps(_mm256_add_ps(sum[0], sum[1]), _mm256_add_ps(sum[2], sum[3])));
}

static void avx2_rms_norm(const float *x, const float *weight, double epsilon, float *y,
                          size_t count)
{
    double mean = (double)avx2_dot(x, x, count) / (double)count;
    __m256 scale = _mm256_set1_ps((float)(1.0 / sqrt(mean + epsilon)));
    for (size_t i = 0; i < count; i += 8) {
        __m256i mask = vector_tail(count - i);
        __m256 value = _mm256_mul_ps(_mm256_maskload_ps(x + i, mask), scale);
        value = _mm256_mul_ps(value, _mm256_maskload_ps(weight + i, mask));
        _mm256_maskstore_ps(y + i, mask, value);
    }
}

static void avx2_add(float *y, const float *x, size_t count)
{
    for (size_t i = 0; i < count; i += 8) {
        __m256i mask = vector_tail(count - i);
        __m256 sum =
            _mm256_add_ps(_mm256_maskload_ps(y + i, mask), _mm256_maskload_ps(x + i, mask));
        _mm256_maskstore_ps(y + i, mask, sum);
    }
}

static void avx2_axpy(float *y, float a, const float *x, size_t count)
{
    __m256 factor = _mm256_set1_ps(a);
    for (size_t i = 0; i < count; i += 8) {
        __m256i mask = vector_tail(count - i);
        __m256 sum = _mm256_fmadd_ps(factor, _mm256_maskload_ps(x + i, mask),
                                     _mm256_maskload_ps(y + i, mask));
        _mm256_maskstore_ps(y + i, mask, sum);
    }
}

static void avx2_softmax(float *x, size_t count)
{
    if (count == 0)
        return;
    float largest = x[0];
    for (size_t i = 1; i < count; i++)
        largest = x[i] > largest ? x[i] : largest;
    __m256 top = _mm256_set1_ps(largest), sum = _mm256_setzero_ps();
    for (size_t i = 0; i < count; i += 8) {
        __m256i mask = vector_tail(count - i);
        __m256 e = vector_exp(_mm256_sub_ps(_mm256_maskload_ps(x + i, mask), top));
        sum = _mm256_add_ps(sum, _mm256_and_ps(e, _mm256_castsi256_ps(mask)));
        _mm256_maskstore_ps(x + i, mask, e);
    }
    __m256 scale = _mm256_set1_ps(1.0f / vector_sum(sum));
    for (size_t i = 0; i < count; i += 8) {
        __m256i mask = vector_tail(count - i);
        _mm256_maskstore_ps(x + i, mask, _mm256_mul_ps(_mm256_maskload_ps(x + i, mask), scale));
    }
}

const kernels_ops_t kernels_ops_avx2 = {
    .variant = KERNELS_AVX2,
    .decode = matmul_avx2_decode,
    .micro = matmul_avx2_micro,
    .micro_rows = 6,
    .micro_panels = 1,
    .direct = matmul_avx2_direct,
    .direct_rows = 4,
    .direct_limit = 4,
    .silu_mul = avx2_silu_mul,
    .gelu_tanh_mul = avx2_gelu_tanh_mul,
    .rms_norm = avx2_rms_norm,
    .add = avx2_add,
    .axpy = avx2_axpy,
    .dot = avx2_dot,
    .softmax = avx2_softmax,
};
#endif
