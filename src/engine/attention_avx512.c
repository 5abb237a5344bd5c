/* SPDX-License-Identifier: MIT */
/* AVX-512 inner loops of attention. Called only where kernels_selected() says so. */
#include "engine/attention.h"

#if defined(__x86_64__)
#include <immintrin.h>

/* Lane sums of sixteen vectors, in the order of the vectors. */
static __m512 sum_sixteen(__m512 v[16])
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

static void scores_avx512(const float *query, const float *const *keys, uint32_t head_dim,
                          float scale, float *scores)
{
    __m512 sum[16];
    for (uint32_t j = 0; j < 16; j++)
        sum[j] = _mm512_setzero_ps();
    uint32_t d = 0;
    for (; d + 16 <= head_dim; d += 16) {
        __m512 q = _mm512_loadu_ps(query + d);
        for (uint32_t j = 0; j < 16; j++)
            sum[j] = _mm512_fmadd_ps(q, _mm512_loadu_ps(keys[j] + d), sum[j]);
    }
    if (d < head_dim) {
        __mmask16 mask = (__mmask16)((1u << (head_dim - d)) - 1);
        __m512 q = _mm512_maskz_loadu_ps(mask, query + d);
        for (uint32_t j = 0; j < 16; j++)
            sum[j] = _mm512_fmadd_ps(q, _mm512_maskz_loadu_ps(mask, keys[j] + d), sum[j]);
    }
    _mm512_storeu_ps(scores, _mm512_mul_ps(sum_sixteen(sum), _mm512_set1_ps(scale)));
}

/* 64 columns of one or two heads stay in registers while the positions pass. */
static inline void accumulate_columns(float *out, const float *weights, size_t weight_stride,
                                      uint32_t heads, const float *const *values, uint32_t count,
                                      uint32_t head_dim, uint32_t d)
{
    __m512 sum[2][4];
    for (uint32_t h = 0; h < heads; h++)
        for (uint32_t c = 0; c < 4; c++)
            sum[h][c] = _mm512_loadu_ps(out + h * head_dim + d + c * 16);
    for (uint32_t j = 0; j < count; j++)
        for (uint32_t h = 0; h < heads; h++) {
            __m512 weight = _mm512_set1_ps(weights[h * weight_stride + j]);
            for (uint32_t c = 0; c < 4; c++)
                sum[h][c] =
                    _mm512_fmadd_ps(weight, _mm512_loadu_ps(values[j] + d + c * 16), sum[h][c]);
        }
    for (uint32_t h = 0; h < heads; h++)
        for (uint32_t c = 0; c < 4; c++)
            _mm512_storeu_ps(out + h * head_dim + d + c * 16, sum[h][c]);
}

static void accumulate_avx512(float *out, const float *weights, size_t weight_stride,
                              uint32_t heads, const float *const *values, uint32_t count,
                              uint32_t head_dim)
{
    uint32_t d = 0;
    for (; d + 64 <= head_dim; d += 64) {
        if (heads == 2)
            accumulate_columns(out, weights, weight_stride, 2, values, count, head_dim, d);
        else
            accumulate_columns(out, weights, weight_stride, 1, values, count, head_dim, d);
    }
    for (; d < head_dim; d += 16) {
        uint32_t left = head_dim - d;
        __mmask16 mask = left >= 16 ? 0xFFFF : (__mmask16)((1u << left) - 1);
        for (uint32_t h = 0; h < heads; h++) {
            __m512 sum = _mm512_maskz_loadu_ps(mask, out + h * head_dim + d);
            for (uint32_t j = 0; j < count; j++)
                sum = _mm512_fmadd_ps(_mm512_set1_ps(weights[h * weight_stride + j]),
                                      _mm512_maskz_loadu_ps(mask, values[j] + d), sum);
            _mm512_mask_storeu_ps(out + h * head_dim + d, mask, sum);
        }
    }
}

const engine_attention_ops_t engine_attention_avx512 = {.scores = scores_avx512,
                                                        .accumulate = accumulate_avx512};
#endif
