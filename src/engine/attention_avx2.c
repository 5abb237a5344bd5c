/* SPDX-License-Identifier: MIT */
/* AVX2 + FMA inner loops of attention. Called only where kernels_selected() says so. */
#include "engine/attention.h"

#if defined(__x86_64__)
#include <immintrin.h>

static __m256i tail_mask(uint32_t left)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)left),
                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

/* Lane sums of eight vectors, in the order of the vectors. */
static __m256 sum_eight(const __m256 v[8])
{
    __m256 ab = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
    __m256 cd = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
    return _mm256_add_ps(_mm256_permute2f128_ps(ab, cd, 0x20),
                         _mm256_permute2f128_ps(ab, cd, 0x31));
}

/* Products of one head with eight keys. */
static inline __m256 dots(const float *query, const float *keys, size_t head_dim)
{
    __m256 sum[8];
    for (int j = 0; j < 8; j++)
        sum[j] = _mm256_setzero_ps();
    size_t d = 0;
    for (; d + 8 <= head_dim; d += 8) {
        __m256 q = _mm256_loadu_ps(query + d);
        for (size_t j = 0; j < 8; j++)
            sum[j] = _mm256_fmadd_ps(q, _mm256_loadu_ps(keys + j * head_dim + d), sum[j]);
    }
    if (d < head_dim) {
        __m256i mask = tail_mask((uint32_t)(head_dim - d));
        __m256 q = _mm256_maskload_ps(query + d, mask);
        for (size_t j = 0; j < 8; j++)
            sum[j] = _mm256_fmadd_ps(q, _mm256_maskload_ps(keys + j * head_dim + d, mask), sum[j]);
    }
    return sum_eight(sum);
}

static void scores_avx2(const float *query, uint32_t heads, const float *keys, uint32_t count,
                        uint32_t head_dim, float scale, float *scores, size_t stride)
{
    const __m256 factor = _mm256_set1_ps(scale);
    for (uint32_t j = 0; j < count; j += 8)
        for (uint32_t h = 0; h < heads; h++) {
            __m256 products =
                dots(query + (size_t)h * head_dim, keys + (size_t)j * head_dim, head_dim);
            /* tail_mask(8 or more) is all ones. */
            _mm256_maskstore_ps(scores + h * stride + j, tail_mask(count - j),
                                _mm256_mul_ps(products, factor));
        }
}

/* 32 columns of one or two heads stay in registers while the positions pass. */
static inline void accumulate_columns(float *out, const float *weights, size_t weight_stride,
                                      uint32_t heads, const float *values, uint32_t count,
                                      uint32_t head_dim, uint32_t d)
{
    __m256 sum[2][4];
    for (uint32_t h = 0; h < heads; h++)
        for (uint32_t c = 0; c < 4; c++)
            sum[h][c] = _mm256_loadu_ps(out + h * head_dim + d + c * 8);
    for (uint32_t j = 0; j < count; j++)
        for (uint32_t h = 0; h < heads; h++) {
            __m256 weight = _mm256_broadcast_ss(weights + h * weight_stride + j);
            for (uint32_t c = 0; c < 4; c++)
                sum[h][c] = _mm256_fmadd_ps(
                    weight, _mm256_loadu_ps(values + (size_t)j * head_dim + d + c * 8), sum[h][c]);
        }
    for (uint32_t h = 0; h < heads; h++)
        for (uint32_t c = 0; c < 4; c++)
            _mm256_storeu_ps(out + h * head_dim + d + c * 8, sum[h][c]);
}

static void accumulate_avx2(float *out, const float *weights, size_t weight_stride, uint32_t heads,
                            const float *values, uint32_t count, uint32_t head_dim)
{
    uint32_t d = 0;
    for (; d + 32 <= head_dim; d += 32) {
        if (heads == 2)
            accumulate_columns(out, weights, weight_stride, 2, values, count, head_dim, d);
        else
            accumulate_columns(out, weights, weight_stride, 1, values, count, head_dim, d);
    }
    for (; d < head_dim; d += 8) {
        __m256i mask = tail_mask(head_dim - d);
        for (uint32_t h = 0; h < heads; h++) {
            __m256 sum = _mm256_maskload_ps(out + h * head_dim + d, mask);
            for (uint32_t j = 0; j < count; j++)
                sum = _mm256_fmadd_ps(_mm256_broadcast_ss(weights + h * weight_stride + j),
                                      _mm256_maskload_ps(values + (size_t)j * head_dim + d, mask),
                                      sum);
            _mm256_maskstore_ps(out + h * head_dim + d, mask, sum);
        }
    }
}

const engine_attention_ops_t engine_attention_avx2 = {.scores = scores_avx2,
                                                      .accumulate = accumulate_avx2};
#endif
