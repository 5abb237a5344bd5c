/* SPDX-License-Identifier: MIT */
/* AVX-512 inner loops of attention. Called only where kernels_selected() says so. */
#include "engine/attention.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* Lane sums of sixteen vectors, in the order of the vectors. */
ALWAYS_INLINE __m512 sum_sixteen(__m512 v[16])
{
    __m512 pair[8], four[4];
    for (int i = 0; i < 8; i++)
        pair[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]),
                                _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
    for (int i = 0; i < 4; i++) {
        __m512d a = _mm512_castps_pd(pair[2 * i]), b = _mm512_castps_pd(pair[2 * i + 1]);
        four[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                                _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    /* Each 128-bit lane of four[i] now holds partial sums of vectors 4i .. 4i + 3. */
    __m512 low = _mm512_add_ps(_mm512_shuffle_f32x4(four[0], four[1], 0x44),
                               _mm512_shuffle_f32x4(four[0], four[1], 0xEE));
    __m512 high = _mm512_add_ps(_mm512_shuffle_f32x4(four[2], four[3], 0x44),
                                _mm512_shuffle_f32x4(four[2], four[3], 0xEE));
    return _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88),
                         _mm512_shuffle_f32x4(low, high, 0xDD));
}

/* Columns d .. d + 15, as far as `mask` says. */
ALWAYS_INLINE void dots_step(__m512 *sum, const float *query, const int HEADS, const float *keys,
                             const int KEYS, const size_t head_dim, size_t d, __mmask16 mask)
{
    __m512 q[2];
#pragma GCC unroll 2
    for (int h = 0; h < HEADS; h++)
        q[h] = _mm512_maskz_loadu_ps(mask, query + h * head_dim + d);
#pragma GCC unroll 16
    for (int j = 0; j < KEYS; j++) {
        __m512 key = _mm512_maskz_loadu_ps(mask, keys + j * head_dim + d);
#pragma GCC unroll 2
        for (int h = 0; h < HEADS; h++)
            sum[h * KEYS + j] = _mm512_fmadd_ps(q[h], key, sum[h * KEYS + j]);
    }
}

/* KEYS keys and HEADS heads, 16 products: result[h * KEYS + j]. */
ALWAYS_INLINE __m512 dots(const float *query, const int HEADS, const float *keys, const int KEYS,
                          const size_t head_dim)
{
    __m512 sum[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        sum[i] = _mm512_setzero_ps();
    size_t d = 0;
    for (; d + 16 <= head_dim; d += 16)
        dots_step(sum, query, HEADS, keys, KEYS, head_dim, d, 0xFFFF);
    if (d < head_dim)
        dots_step(sum, query, HEADS, keys, KEYS, head_dim, d,
                  (__mmask16)((1u << (head_dim - d)) - 1));
    return sum_sixteen(sum);
}

ALWAYS_INLINE void scores_of(const float *query, uint32_t heads, const float *keys, uint32_t count,
                             const size_t head_dim, float scale, float *scores, size_t stride)
{
    const __m512 factor = _mm512_set1_ps(scale);
    if (heads == 1) {
        __m512 products = _mm512_mul_ps(dots(query, 1, keys, 16, head_dim), factor);
        _mm512_mask_storeu_ps(scores, (__mmask16)((1u << count) - 1), products);
        return;
    }
    for (uint32_t j = 0; j < count; j += 8) {
        uint32_t here = count - j < 8 ? count - j : 8;
        __mmask16 mask = (__mmask16)((1u << here) - 1);
        __m512 products = _mm512_mul_ps(dots(query, 2, keys + j * head_dim, 8, head_dim), factor);
        _mm512_mask_storeu_ps(scores + j, mask, products);
        _mm512_mask_storeu_ps(scores + stride + j, mask,
                              _mm512_shuffle_f32x4(products, products, 0xEE));
    }
}

/* The usual widths are constants, so that rows are addressed by offsets. */
static void scores_avx512(const float *query, uint32_t heads, const float *keys, uint32_t count,
                          uint32_t head_dim, float scale, float *scores, size_t stride)
{
    if (head_dim == 64)
        scores_of(query, heads, keys, count, 64, scale, scores, stride);
    else if (head_dim == 128)
        scores_of(query, heads, keys, count, 128, scale, scores, stride);
    else
        scores_of(query, heads, keys, count, head_dim, scale, scores, stride);
}

/* COLUMNS vectors of one or two heads stay in registers while the positions pass. */
ALWAYS_INLINE void accumulate_columns(float *out, const float *weights, size_t weight_stride,
                                      const int HEADS, const int COLUMNS, const float *values,
                                      uint32_t count, const size_t head_dim, size_t d,
                                      __mmask16 mask)
{
    __m512 sum[2][4];
#pragma GCC unroll 2
    for (int h = 0; h < HEADS; h++)
#pragma GCC unroll 4
        for (int c = 0; c < COLUMNS; c++)
            sum[h][c] = _mm512_maskz_loadu_ps(mask, out + h * head_dim + d + c * 16);
    for (size_t j = 0; j < count; j++) {
        __m512 weight[2];
#pragma GCC unroll 2
        for (int h = 0; h < HEADS; h++)
            weight[h] = _mm512_set1_ps(weights[h * weight_stride + j]);
#pragma GCC unroll 4
        for (int c = 0; c < COLUMNS; c++) {
            __m512 value = _mm512_maskz_loadu_ps(mask, values + j * head_dim + d + c * 16);
#pragma GCC unroll 2
            for (int h = 0; h < HEADS; h++)
                sum[h][c] = _mm512_fmadd_ps(weight[h], value, sum[h][c]);
        }
    }
#pragma GCC unroll 2
    for (int h = 0; h < HEADS; h++)
#pragma GCC unroll 4
        for (int c = 0; c < COLUMNS; c++)
            _mm512_mask_storeu_ps(out + h * head_dim + d + c * 16, mask, sum[h][c]);
}

ALWAYS_INLINE void accumulate_heads(float *out, const float *weights, size_t weight_stride,
                                    const int HEADS, const float *values, uint32_t count,
                                    const size_t head_dim)
{
    size_t d = 0;
    for (; d + 64 <= head_dim; d += 64)
        accumulate_columns(out, weights, weight_stride, HEADS, 4, values, count, head_dim, d,
                           0xFFFF);
    for (; d < head_dim; d += 16) {
        size_t left = head_dim - d;
        __mmask16 mask = left >= 16 ? 0xFFFF : (__mmask16)((1u << left) - 1);
        accumulate_columns(out, weights, weight_stride, HEADS, 1, values, count, head_dim, d, mask);
    }
}

static void accumulate_avx512(float *out, const float *weights, size_t weight_stride,
                              uint32_t heads, const float *values, uint32_t count,
                              uint32_t head_dim)
{
    if (heads == 1)
        accumulate_heads(out, weights, weight_stride, 1, values, count, head_dim);
    else if (head_dim == 64)
        accumulate_heads(out, weights, weight_stride, 2, values, count, 64);
    else
        accumulate_heads(out, weights, weight_stride, 2, values, count, head_dim);
}

const engine_attention_ops_t engine_attention_avx512 = {.scores = scores_avx512,
                                                        .accumulate = accumulate_avx512};
#endif
