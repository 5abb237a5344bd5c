/* SPDX-License-Identifier: MIT */
/*
 * Matrix products with AVX2, FMA and F16C: two vectors ("halves") hold one column of the 16 rows of
 * a panel.
 *
 * Pure functions, any thread. One decoder per dtype serves both uses, direct streaming (the decoded
 * vectors meet 1 to 4 input rows in registers) and decoding into a tile, so the weights and the
 * order of additions are the same in both. Chosen at run time; never called without AVX2.
 */
#include "kernels/matmul_avx2.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define ALWAYS_INLINE KERNELS_UNCHECKED static inline __attribute__((always_inline))

#define DIRECT_AHEAD 2048 /* bytes ahead in each panel */
/* Two panels at once hide the latency of the multiply-adds for one row of a plain type. Decoding a
 * quantised type hides it as well, and then a single stream is better; with more rows the registers
 * run out. */
#define MAX_HALVES  4
#define DIRECT_ROWS 4

/* Where decoded columns go. ROWS 0: into the tile; otherwise into the accumulators. Lives in
 * registers after inlining. */
typedef struct sink {
    __m256 sum[MAX_HALVES][DIRECT_ROWS];
    const float *x[DIRECT_ROWS];
    float *tile;
    size_t stride;
    size_t ahead; /* distance of the prefetch, bytes */
} sink_t;

/* Starts fetching the cache line that lies `ahead` of `at`. The hardware's own prefetcher loses a
 * stream at every page and at the end of every panel, and panels of small models are short. A
 * prefetch never faults, so running past the matrix is harmless. */
ALWAYS_INLINE void sink_prefetch(const sink_t *sink, const uint8_t *at)
{
    _mm_prefetch((const char *)((uintptr_t)at + sink->ahead), _MM_HINT_T0);
}

/* Column k of HALVES half panels. */
ALWAYS_INLINE void sink_take(sink_t *sink, const int HALVES, const int ROWS, size_t k,
                             const __m256 *w)
{
    if (ROWS == 0) {
        _mm256_storeu_ps(sink->tile + k * sink->stride, w[0]);
        _mm256_storeu_ps(sink->tile + k * sink->stride + 8, w[1]);
        return;
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) {
        __m256 x = _mm256_broadcast_ss(sink->x[r] + k);
#pragma GCC unroll 4
        for (int h = 0; h < HALVES; h++)
            sink->sum[h][r] = _mm256_fmadd_ps(w[h], x, sink->sum[h][r]);
    }
}

/* Sixteen lanes of `bytes` bytes each at panel[h / 2] + offset: the address of half h. */
ALWAYS_INLINE const uint8_t *half_at(const uint8_t *const *panel, int h, size_t offset,
                                     uint32_t lane_bytes)
{
    return panel[h / 2] + offset + (size_t)(h % 2) * 8 * lane_bytes;
}

ALWAYS_INLINE __m256 load_f16(const uint8_t *at)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at));
}

ALWAYS_INLINE __m256i load_words(const uint8_t *at)
{
    return _mm256_loadu_si256((const __m256i *)at);
}

ALWAYS_INLINE void block_f32(sink_t *sink, const int HALVES, const int ROWS,
                             const uint8_t *const *panel, uint32_t count)
{
#pragma GCC unroll 2
    for (size_t k = 0; k < count; k++) {
        __m256 w[MAX_HALVES];
#pragma GCC unroll 4
        for (int h = 0; h < HALVES; h++) {
            w[h] = _mm256_loadu_ps((const float *)half_at(panel, h, 64 * k, 4));
            if (h % 2 == 0)
                sink_prefetch(sink, half_at(panel, h, 64 * k, 4));
        }
        sink_take(sink, HALVES, ROWS, k, w);
    }
}

ALWAYS_INLINE void block_f16(sink_t *sink, const int HALVES, const int ROWS,
                             const uint8_t *const *panel, uint32_t count)
{
#pragma GCC unroll 2
    for (size_t k = 0; k < count; k++) {
        __m256 w[MAX_HALVES];
#pragma GCC unroll 4
        for (int h = 0; h < HALVES; h++) {
            w[h] = load_f16(half_at(panel, h, 32 * k, 2));
            if (h % 2 == 0 && k % 2 == 0)
                sink_prefetch(sink, half_at(panel, h, 32 * k, 2));
        }
        sink_take(sink, HALVES, ROWS, k, w);
    }
}

ALWAYS_INLINE void block_bf16(sink_t *sink, const int HALVES, const int ROWS,
                              const uint8_t *const *panel, uint32_t count)
{
    const __m256i upper = _mm256_set1_epi32((int)0xffff0000u);
    for (size_t k = 0; k < count; k += 2) {
        __m256i pair[MAX_HALVES];
        __m256 w[MAX_HALVES];
#pragma GCC unroll 4
        for (int h = 0; h < HALVES; h++) {
            pair[h] = load_words(half_at(panel, h, 32 * k, 4));
            if (h % 2 == 0)
                sink_prefetch(sink, half_at(panel, h, 32 * k, 4));
            w[h] = _mm256_castsi256_ps(_mm256_slli_epi32(pair[h], 16));
        }
        sink_take(sink, HALVES, ROWS, k, w);
#pragma GCC unroll 4
        for (int h = 0; h < HALVES; h++)
            w[h] = _mm256_castsi256_ps(_mm256_and_si256(pair[h], upper));
        sink_take(sink, HALVES, ROWS, k + 1, w);
    }
}

ALWAYS_INLINE void block_q8_0(sink_t *sink, const int HALVES, const int ROWS,
                              const uint8_t *const *panel, uint32_t count)
{
    for (size_t b = 0; b < count / 32; b++) {
        __m256 d[MAX_HALVES];
#pragma GCC unroll 4
        for (int h = 0; h < HALVES; h++) {
            d[h] = load_f16(half_at(panel, h, 544 * b, 2));
            if (h % 2 == 0)
                sink_prefetch(sink, half_at(panel, h, 544 * b, 2));
        }
#pragma GCC unroll 4
        for (size_t i = 0; i < 32; i++) {
            __m256 w[MAX_HALVES];
#pragma GCC unroll 4
            for (int h = 0; h < HALVES; h++) {
                const uint8_t *q = half_at(panel, h, 544 * b + 32 + 16 * i, 1);
                if (h % 2 == 0 && i % 4 == 0)
                    sink_prefetch(sink, q + 32);
                __m256i integers = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)q));
                w[h] = _mm256_mul_ps(d[h], _mm256_cvtepi32_ps(integers));
            }
            sink_take(sink, HALVES, ROWS, 32 * b + i, w);
        }
    }
}

/*
 * Eight nibbles a lane: columns k .. k+7. Converting an integer to FP32 would compete with the
 * multiply-adds for the same two ports, so the nibble q is put into the top mantissa bits of 1.0
 * instead, which gives v = 1 + q/16; then w = (16 d) v + (m - 16 d) = d q + m. The caller passes
 * scale = 16 d and offset = m - 16 d.
 */
ALWAYS_INLINE void nibbles_take(sink_t *sink, const int HALVES, const int ROWS,
                                const uint8_t *const *panel, size_t offset_bytes,
                                const __m256 *scale, const __m256 *offset, size_t k)
{
    const __m256i mask = _mm256_set1_epi32(15 << 19), one = _mm256_set1_epi32(0x3f800000);
    __m256i q[MAX_HALVES];
#pragma GCC unroll 4
    for (int h = 0; h < HALVES; h++) {
        q[h] = load_words(half_at(panel, h, offset_bytes, 4));
        if (h % 2 == 0)
            sink_prefetch(sink, half_at(panel, h, offset_bytes, 4));
    }
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
        __m256 w[MAX_HALVES];
#pragma GCC unroll 4
        for (int h = 0; h < HALVES; h++) {
            __m256i moved =
                j < 5 ? _mm256_slli_epi32(q[h], 19 - 4 * j) : _mm256_srli_epi32(q[h], 4 * j - 19);
            moved = _mm256_or_si256(_mm256_and_si256(moved, mask), one);
            w[h] = _mm256_fmadd_ps(scale[h], _mm256_castsi256_ps(moved), offset[h]);
        }
        sink_take(sink, HALVES, ROWS, k + (size_t)j, w);
    }
}

/* Q4_0 (MINIMUM 0, m = -8 d) and Q4_1 (MINIMUM 1). */
ALWAYS_INLINE void block_q4(sink_t *sink, const int HALVES, const int ROWS, const int MINIMUM,
                            const uint8_t *const *panel, uint32_t count)
{
    const size_t block_bytes = MINIMUM ? 320 : 288, header = MINIMUM ? 64 : 32;
    for (size_t b = 0; b < count / 32; b++) {
        __m256 scale[MAX_HALVES], offset[MAX_HALVES];
#pragma GCC unroll 4
        for (int h = 0; h < HALVES; h++) {
            __m256 d = load_f16(half_at(panel, h, block_bytes * b, 2));
            if (h % 2 == 0)
                sink_prefetch(sink, half_at(panel, h, block_bytes * b, 2));
            scale[h] = _mm256_mul_ps(d, _mm256_set1_ps(16));
            offset[h] =
                MINIMUM
                    ? _mm256_sub_ps(load_f16(half_at(panel, h, block_bytes * b + 32, 2)), scale[h])
                    : _mm256_mul_ps(d, _mm256_set1_ps(-24));
        }
        for (size_t g = 0; g < 4; g++)
            nibbles_take(sink, HALVES, ROWS, panel, block_bytes * b + header + 64 * g, scale,
                         offset, 32 * b + 8 * g);
    }
}

/* Six-bit field of a Q4_K panel block as FP32; half h of the three words at offset 64. */
ALWAYS_INLINE __m256 q4_k_field(const uint8_t *const *panel, int h, uint32_t field)
{
    __m256i value;
    if (field < 15) {
        value = load_words(half_at(panel, h, 64 + 64 * (size_t)(field / 5), 4));
        value = _mm256_srlv_epi32(value, _mm256_set1_epi32((int)(6 * (field % 5))));
        value = _mm256_and_si256(value, _mm256_set1_epi32(63));
    } else {
        value = _mm256_srli_epi32(load_words(half_at(panel, h, 64, 4)), 30);
        __m256i middle = _mm256_srli_epi32(load_words(half_at(panel, h, 128, 4)), 30);
        __m256i high = _mm256_srli_epi32(load_words(half_at(panel, h, 192, 4)), 30);
        value = _mm256_or_si256(value, _mm256_slli_epi32(middle, 2));
        value = _mm256_or_si256(value, _mm256_slli_epi32(high, 4));
    }
    return _mm256_cvtepi32_ps(value);
}

ALWAYS_INLINE void block_q4_k(sink_t *sink, const int HALVES, const int ROWS,
                              const uint8_t *const *panel, uint32_t first, uint32_t count)
{
    for (size_t s = first / 32; s < (first + count) / 32; s++) {
        __m256 scale[MAX_HALVES], offset[MAX_HALVES];
#pragma GCC unroll 4
        for (int h = 0; h < HALVES; h++) {
            __m256 d = load_f16(half_at(panel, h, 0, 2));
            __m256 dmin = load_f16(half_at(panel, h, 32, 2));
            scale[h] = _mm256_mul_ps(d, q4_k_field(panel, h, s));
            scale[h] = _mm256_mul_ps(scale[h], _mm256_set1_ps(16));
            offset[h] = _mm256_mul_ps(dmin, q4_k_field(panel, h, 8 + s));
            offset[h] = _mm256_sub_ps(_mm256_setzero_ps(), _mm256_add_ps(offset[h], scale[h]));
        }
        for (size_t g = 0; g < 4; g++)
            nibbles_take(sink, HALVES, ROWS, panel, 256 + 256 * s + 64 * g, scale, offset,
                         32 * s - first + 8 * g);
    }
}

ALWAYS_INLINE void block_q6_k(sink_t *sink, const int HALVES, const int ROWS,
                              const uint8_t *const *panel, uint32_t first, uint32_t count)
{
    const __m256i low_mask = _mm256_set1_epi32(15), high_mask = _mm256_set1_epi32(48);
    for (size_t s = first / 16; s < (first + count) / 16; s++) {
        __m256 scale[MAX_HALVES], offset[MAX_HALVES];
        __m256i high[MAX_HALVES];
#pragma GCC unroll 4
        for (int h = 0; h < HALVES; h++) {
            const uint8_t *scales = half_at(panel, h, 32 + 16 * s, 1);
            __m256i integers = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)scales));
            scale[h] =
                _mm256_mul_ps(load_f16(half_at(panel, h, 0, 2)), _mm256_cvtepi32_ps(integers));
            offset[h] = _mm256_mul_ps(scale[h], _mm256_set1_ps(-32));
            high[h] = load_words(half_at(panel, h, 288 + 2048 + 64 * s, 4));
            if (h % 2 == 0)
                sink_prefetch(sink, half_at(panel, h, 288 + 2048 + 64 * s, 4));
        }
#pragma GCC unroll 2
        for (size_t g = 0; g < 2; g++) {
            __m256i low[MAX_HALVES];
#pragma GCC unroll 4
            for (int h = 0; h < HALVES; h++) {
                low[h] = load_words(half_at(panel, h, 288 + 64 * (2 * s + g), 4));
                if (h % 2 == 0)
                    sink_prefetch(sink, half_at(panel, h, 288 + 64 * (2 * s + g), 4));
            }
#pragma GCC unroll 8
            for (uint32_t j = 0; j < 8; j++) {
                __m256 w[MAX_HALVES];
                const uint32_t i = 8 * g + j;
#pragma GCC unroll 4
                for (int h = 0; h < HALVES; h++) {
                    __m256i nibble = _mm256_and_si256(_mm256_srli_epi32(low[h], 4 * j), low_mask);
                    __m256i upper = i < 2 ? _mm256_slli_epi32(high[h], 4 - 2 * i)
                                          : _mm256_srli_epi32(high[h], 2 * i - 4);
                    upper = _mm256_or_si256(nibble, _mm256_and_si256(upper, high_mask));
                    /* scale * (q - 32), with the product rounded once. */
                    w[h] = _mm256_fmadd_ps(scale[h], _mm256_cvtepi32_ps(upper), offset[h]);
                }
                sink_take(sink, HALVES, ROWS, 16 * s - first + i, w);
            }
        }
    }
}

/* Columns [k0, k0 + count), at most KERNELS_K_BLOCK and within one block of 256. */
ALWAYS_INLINE void block_any(sink_t *sink, const xp_dtype_t dtype, const int HALVES, const int ROWS,
                             const uint8_t *const *panel, uint32_t k0, uint32_t count)
{
    const uint8_t *at[MAX_HALVES / 2];
    for (int p = 0; p < HALVES / 2; p++)
        at[p] = kernels_panel_block(panel[p], dtype, k0);
    switch (dtype) {
    case XP_DTYPE_F32:
        block_f32(sink, HALVES, ROWS, at, count);
        break;
    case XP_DTYPE_F16:
        block_f16(sink, HALVES, ROWS, at, count);
        break;
    case XP_DTYPE_BF16:
        block_bf16(sink, HALVES, ROWS, at, count);
        break;
    case XP_DTYPE_Q8_0:
        block_q8_0(sink, HALVES, ROWS, at, count);
        break;
    case XP_DTYPE_Q4_0:
        block_q4(sink, HALVES, ROWS, 0, at, count);
        break;
    case XP_DTYPE_Q4_1:
        block_q4(sink, HALVES, ROWS, 1, at, count);
        break;
    case XP_DTYPE_Q4_K:
        block_q4_k(sink, HALVES, ROWS, at, k0 % 256, count);
        break;
    default:
        block_q6_k(sink, HALVES, ROWS, at, k0 % 256, count);
        break;
    }
}

/* HALVES / 2 panels, ROWS rows, all columns. */
ALWAYS_INLINE void direct_panels(const xp_dtype_t dtype, const int HALVES, const int ROWS,
                                 const uint8_t *panel, size_t panel_bytes, uint32_t columns,
                                 const float *const *x, float *y, size_t y_stride)
{
    const uint8_t *at[MAX_HALVES / 2];
    sink_t sink;
    for (int p = 0; p < HALVES / 2; p++)
        at[p] = panel + (size_t)p * panel_bytes;
    for (uint32_t k0 = 0; k0 < columns; k0 += KERNELS_K_BLOCK) {
        uint32_t count = columns - k0 < KERNELS_K_BLOCK ? columns - k0 : KERNELS_K_BLOCK;
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) {
            sink.x[r] = x[r] + k0;
#pragma GCC unroll 4
            for (int h = 0; h < HALVES; h++)
                sink.sum[h][r] = _mm256_setzero_ps();
        }
        size_t offset = (size_t)(kernels_panel_block(panel, dtype, k0) - panel);
        sink.ahead = DIRECT_AHEAD;
        if (offset + DIRECT_AHEAD >= panel_bytes)
            sink.ahead += (HALVES / 2 - 1) * panel_bytes; /* into the next group of panels */
        block_any(&sink, dtype, HALVES, ROWS, at, k0, count);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
            for (int h = 0; h < HALVES; h++) {
                float *out = y + r * y_stride + h * 8;
                __m256 sum = sink.sum[h][r];
                if (k0 > 0)
                    sum = _mm256_add_ps(_mm256_loadu_ps(out), sum);
                _mm256_storeu_ps(out, sum);
            }
    }
}

typedef struct direct_call {
    const uint8_t *panel;
    size_t panel_bytes;
    uint32_t panels, columns;
    const float *const *x;
    float *y;
    size_t y_stride;
} direct_call_t;

ALWAYS_INLINE void direct_rows(const xp_dtype_t dtype, const int HALVES, const int ROWS,
                               const direct_call_t *call)
{
    uint32_t p = 0, step = (uint32_t)HALVES / 2;
    for (; p + step <= call->panels; p += step)
        direct_panels(dtype, HALVES, ROWS, call->panel + p * call->panel_bytes, call->panel_bytes,
                      call->columns, call->x, call->y + p * KERNELS_PANEL, call->y_stride);
    if (step > 1 && p < call->panels)
        direct_panels(dtype, 2, ROWS, call->panel + p * call->panel_bytes, call->panel_bytes,
                      call->columns, call->x, call->y + p * KERNELS_PANEL, call->y_stride);
}

#define DIRECT_OF_DTYPE(NAME, DTYPE, ONE_ROW_HALVES)                                               \
    KERNELS_UNCHECKED static void direct_##NAME(uint32_t rows, const direct_call_t *call)          \
    {                                                                                              \
        switch (rows) {                                                                            \
        case 1:                                                                                    \
            direct_rows(DTYPE, ONE_ROW_HALVES, 1, call);                                           \
            break;                                                                                 \
        case 2:                                                                                    \
            direct_rows(DTYPE, 2, 2, call);                                                        \
            break;                                                                                 \
        case 3:                                                                                    \
            direct_rows(DTYPE, 2, 3, call);                                                        \
            break;                                                                                 \
        default:                                                                                   \
            direct_rows(DTYPE, 2, 4, call);                                                        \
            break;                                                                                 \
        }                                                                                          \
    }                                                                                              \
    KERNELS_UNCHECKED static void decode_##NAME(const uint8_t *panel, uint32_t k0, uint32_t count, \
                                                float *tile, size_t stride, size_t ahead)          \
    {                                                                                              \
        sink_t sink = {.tile = tile, .stride = stride, .ahead = ahead};                            \
        block_any(&sink, DTYPE, 2, 0, &panel, k0, count);                                          \
    }
DIRECT_OF_DTYPE(f32, XP_DTYPE_F32, 4)
DIRECT_OF_DTYPE(f16, XP_DTYPE_F16, 4)
DIRECT_OF_DTYPE(bf16, XP_DTYPE_BF16, 4)
DIRECT_OF_DTYPE(q8_0, XP_DTYPE_Q8_0, 2)
DIRECT_OF_DTYPE(q4_0, XP_DTYPE_Q4_0, 2)
DIRECT_OF_DTYPE(q4_1, XP_DTYPE_Q4_1, 2)
DIRECT_OF_DTYPE(q4_k, XP_DTYPE_Q4_K, 2)
DIRECT_OF_DTYPE(q6_k, XP_DTYPE_Q6_K, 2)

static const struct {
    void (*direct)(uint32_t rows, const direct_call_t *call);
    void (*decode)(const uint8_t *panel, uint32_t k0, uint32_t count, float *tile, size_t stride,
                   size_t ahead);
} by_dtype[XP_DTYPE_COUNT] = {
    [XP_DTYPE_F32] = {direct_f32, decode_f32},    [XP_DTYPE_F16] = {direct_f16, decode_f16},
    [XP_DTYPE_BF16] = {direct_bf16, decode_bf16}, [XP_DTYPE_Q8_0] = {direct_q8_0, decode_q8_0},
    [XP_DTYPE_Q4_0] = {direct_q4_0, decode_q4_0}, [XP_DTYPE_Q4_1] = {direct_q4_1, decode_q4_1},
    [XP_DTYPE_Q4_K] = {direct_q4_k, decode_q4_k}, [XP_DTYPE_Q6_K] = {direct_q6_k, decode_q6_k},
};

void matmul_avx2_direct(xp_dtype_t dtype, const uint8_t *panel, size_t panel_bytes, uint32_t panels,
                        uint32_t columns, uint32_t rows, const float *const *x, float *y,
                        size_t y_stride)
{
    direct_call_t call = {panel, panel_bytes, panels, columns, x, y, y_stride};
    by_dtype[dtype].direct(rows, &call);
}

void matmul_avx2_decode(xp_dtype_t dtype, const uint8_t *panel, uint32_t k0, uint32_t count,
                        float *tile, size_t stride, size_t ahead)
{
    by_dtype[dtype].decode(panel, k0, count, tile, stride, ahead);
}

ALWAYS_INLINE void micro_tile(const int ROWS, size_t k, const float *x, const float *tile, float *c,
                              size_t c_stride, bool accumulate)
{
    __m256 sum[6][2];
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++)
        sum[r][0] = sum[r][1] = _mm256_setzero_ps();
    for (size_t i = 0; i < k; i++) {
        __m256 low = _mm256_load_ps(tile + (size_t)i * KERNELS_PANEL);
        __m256 high = _mm256_load_ps(tile + (size_t)i * KERNELS_PANEL + 8);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++) {
            __m256 value = _mm256_broadcast_ss(x + r * KERNELS_X_STRIDE + i);
            sum[r][0] = _mm256_fmadd_ps(low, value, sum[r][0]);
            sum[r][1] = _mm256_fmadd_ps(high, value, sum[r][1]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            float *out = c + r * c_stride + 8 * h;
            __m256 value = sum[r][h];
            if (accumulate)
                value = _mm256_add_ps(_mm256_loadu_ps(out), value);
            _mm256_storeu_ps(out, value);
        }
}

#define MICRO_CASE(ROWS)                                                                           \
    case ROWS:                                                                                     \
        micro_tile(ROWS, k, x, tile, c, c_stride, accumulate);                                     \
        break;

KERNELS_UNCHECKED void matmul_avx2_micro(uint32_t rows, uint32_t panels, uint32_t k, const float *x,
                                         const float *tile, float *c, size_t c_stride,
                                         bool accumulate)
{
    (void)panels; /* micro_panels is 1 */
    switch (rows) {
        MICRO_CASE(1)
        MICRO_CASE(2)
        MICRO_CASE(3)
        MICRO_CASE(4)
        MICRO_CASE(5)
        MICRO_CASE(6)
    }
}
#endif
