/* SPDX-License-Identifier: MIT */
/*
 * Matrix products with AVX-512: one vector holds one column of the 16 rows of a panel.
 *
 * Pure functions, any thread. One decoder per dtype serves both uses, direct streaming (the decoded
 * vector meets 1 to 8 input rows in registers) and decoding into a tile, so the weights and the
 * order of additions are the same in both. Chosen at run time; never called without AVX-512.
 */
#include "kernels/matmul_avx512.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define ALWAYS_INLINE KERNELS_UNCHECKED static inline __attribute__((always_inline))

#define DIRECT_PANELS 2
#define FUSED_ROWS    16
#define DIRECT_AHEAD  2048 /* bytes ahead in each panel */

/* Where decoded columns go. ROWS 0: into the tile; otherwise into the accumulators, with the input
 * rows at x[r] (direct) or, for more of them than there are registers for addresses, at fixed
 * distances from `block` (fused). Lives in registers after inlining. */
typedef struct sink {
    __m512 sum[DIRECT_PANELS][FUSED_ROWS];
    const float *x[KERNELS_DIRECT_ROWS];
    const float *block;
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

/* Column k of PANELS panels. */
ALWAYS_INLINE void sink_take(sink_t *sink, const int PANELS, const int ROWS, size_t k,
                             const __m512 *w)
{
    if (ROWS == 0) {
        _mm512_storeu_ps(sink->tile + k * sink->stride, w[0]);
        return;
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
        __m512 x = _mm512_set1_ps(
            ROWS <= KERNELS_DIRECT_ROWS ? sink->x[r][k] : sink->block[r * KERNELS_X_STRIDE + k]);
#pragma GCC unroll 2
        for (int p = 0; p < PANELS; p++)
            sink->sum[p][r] = _mm512_fmadd_ps(w[p], x, sink->sum[p][r]);
    }
}

ALWAYS_INLINE __m512 load_f16(const uint8_t *at)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at));
}

ALWAYS_INLINE void block_f32(sink_t *sink, const int PANELS, const int ROWS,
                             const uint8_t *const *panel, uint32_t count)
{
#pragma GCC unroll 4
    for (size_t k = 0; k < count; k++) {
        __m512 w[DIRECT_PANELS];
#pragma GCC unroll 2
        for (int p = 0; p < PANELS; p++) {
            w[p] = _mm512_loadu_ps(panel[p] + 64 * k);
            sink_prefetch(sink, panel[p] + 64 * k);
        }
        sink_take(sink, PANELS, ROWS, k, w);
    }
}

ALWAYS_INLINE void block_f16(sink_t *sink, const int PANELS, const int ROWS,
                             const uint8_t *const *panel, uint32_t count)
{
#pragma GCC unroll 4
    for (size_t k = 0; k < count; k++) {
        __m512 w[DIRECT_PANELS];
#pragma GCC unroll 2
        for (int p = 0; p < PANELS; p++) {
            w[p] = load_f16(panel[p] + 32 * k);
            if (k % 2 == 0)
                sink_prefetch(sink, panel[p] + 32 * k);
        }
        sink_take(sink, PANELS, ROWS, k, w);
    }
}

ALWAYS_INLINE void block_bf16(sink_t *sink, const int PANELS, const int ROWS,
                              const uint8_t *const *panel, uint32_t count)
{
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
#pragma GCC unroll 2
    for (size_t k = 0; k < count; k += 2) {
        __m512i pair[DIRECT_PANELS];
        __m512 w[DIRECT_PANELS];
#pragma GCC unroll 2
        for (int p = 0; p < PANELS; p++) {
            pair[p] = _mm512_loadu_si512(panel[p] + 32 * k);
            sink_prefetch(sink, panel[p] + 32 * k);
            w[p] = _mm512_castsi512_ps(_mm512_slli_epi32(pair[p], 16));
        }
        sink_take(sink, PANELS, ROWS, k, w);
#pragma GCC unroll 2
        for (int p = 0; p < PANELS; p++)
            w[p] = _mm512_castsi512_ps(_mm512_and_si512(pair[p], upper));
        sink_take(sink, PANELS, ROWS, k + 1, w);
    }
}

ALWAYS_INLINE void block_q8_0(sink_t *sink, const int PANELS, const int ROWS,
                              const uint8_t *const *panel, uint32_t count)
{
    for (size_t b = 0; b < count / 32; b++) {
        __m512 d[DIRECT_PANELS];
#pragma GCC unroll 2
        for (int p = 0; p < PANELS; p++) {
            d[p] = load_f16(panel[p] + 544 * b);
            sink_prefetch(sink, panel[p] + 544 * b);
        }
#pragma GCC unroll 8
        for (size_t i = 0; i < 32; i++) {
            __m512 w[DIRECT_PANELS];
#pragma GCC unroll 2
            for (int p = 0; p < PANELS; p++) {
                const uint8_t *q = panel[p] + 544 * b + 32 + 16 * i;
                if (i % 4 == 0)
                    sink_prefetch(sink, q + 32);
                __m512i integers = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)q));
                w[p] = _mm512_mul_ps(d[p], _mm512_cvtepi32_ps(integers));
            }
            sink_take(sink, PANELS, ROWS, 32 * b + i, w);
        }
    }
}

/* Eight nibbles a lane at `words`: w = scale * table[nibble] + offset, columns k .. k+7. The table
 * look-up uses the low four bits of a lane only, so shifting is all the unpacking there is. */
ALWAYS_INLINE void nibbles_take(sink_t *sink, const int PANELS, const int ROWS, const int OFFSET,
                                const uint8_t *const *words, const __m512 *scale,
                                const __m512 *offset, __m512 table, size_t k)
{
    __m512i q[DIRECT_PANELS];
#pragma GCC unroll 2
    for (int p = 0; p < PANELS; p++) {
        q[p] = _mm512_loadu_si512(words[p]);
        sink_prefetch(sink, words[p]);
    }
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
        __m512 w[DIRECT_PANELS];
#pragma GCC unroll 2
        for (int p = 0; p < PANELS; p++) {
            __m512i shifted = j == 0 ? q[p] : _mm512_srli_epi32(q[p], 4 * j);
            __m512 value = _mm512_permutexvar_ps(shifted, table);
            w[p] = OFFSET ? _mm512_fmadd_ps(scale[p], value, offset[p])
                          : _mm512_mul_ps(scale[p], value);
        }
        sink_take(sink, PANELS, ROWS, k + (size_t)j, w);
    }
}

ALWAYS_INLINE __m512 table_unsigned(void)
{
    return _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
}

/* Q4_0 (OFFSET 0) and Q4_1 (OFFSET 1). */
ALWAYS_INLINE void block_q4(sink_t *sink, const int PANELS, const int ROWS, const int OFFSET,
                            const uint8_t *const *panel, uint32_t count)
{
    const size_t block_bytes = OFFSET ? 320 : 288, header = OFFSET ? 64 : 32;
    const __m512 table =
        OFFSET ? table_unsigned() : _mm512_sub_ps(table_unsigned(), _mm512_set1_ps(8));
    for (size_t b = 0; b < count / 32; b++) {
        __m512 d[DIRECT_PANELS], m[DIRECT_PANELS];
        const uint8_t *at[DIRECT_PANELS];
#pragma GCC unroll 2
        for (int p = 0; p < PANELS; p++) {
            at[p] = panel[p] + block_bytes * b;
            d[p] = load_f16(at[p]);
            sink_prefetch(sink, at[p]);
            m[p] = OFFSET ? load_f16(at[p] + 32) : _mm512_setzero_ps();
            at[p] += header;
        }
#pragma GCC unroll 1
        for (size_t g = 0; g < 4; g++) {
            nibbles_take(sink, PANELS, ROWS, OFFSET, at, d, m, table, 32 * b + 8 * g);
#pragma GCC unroll 2
            for (int p = 0; p < PANELS; p++)
                at[p] += 64;
        }
    }
}

/* Six-bit field of a Q4_K panel block as FP32; `words` is the start of its three words. */
ALWAYS_INLINE __m512 q4_k_field(const uint8_t *words, uint32_t field)
{
    const __m512i mask = _mm512_set1_epi32(63);
    __m512i value;
    if (field < 15) {
        value = _mm512_loadu_si512(words + 64 * (field / 5));
        value = _mm512_and_si512(
            _mm512_srlv_epi32(value, _mm512_set1_epi32((int)(6 * (field % 5)))), mask);
    } else {
        value = _mm512_srli_epi32(_mm512_loadu_si512(words), 30);
        __m512i middle = _mm512_srli_epi32(_mm512_loadu_si512(words + 64), 30);
        __m512i high = _mm512_srli_epi32(_mm512_loadu_si512(words + 128), 30);
        value = _mm512_or_si512(value, _mm512_slli_epi32(middle, 2));
        value = _mm512_or_si512(value, _mm512_slli_epi32(high, 4));
    }
    return _mm512_cvtepi32_ps(value);
}

ALWAYS_INLINE void block_q4_k(sink_t *sink, const int PANELS, const int ROWS,
                              const uint8_t *const *panel, uint32_t first, uint32_t count)
{
    const __m512 table = table_unsigned();
    for (size_t s = first / 32; s < (first + count) / 32; s++) {
        __m512 scale[DIRECT_PANELS], offset[DIRECT_PANELS];
        const uint8_t *at[DIRECT_PANELS];
#pragma GCC unroll 2
        for (int p = 0; p < PANELS; p++) {
            const uint8_t *block = panel[p];
            scale[p] = _mm512_mul_ps(load_f16(block), q4_k_field(block + 64, s));
            offset[p] = _mm512_mul_ps(load_f16(block + 32), q4_k_field(block + 64, 8 + s));
            offset[p] = _mm512_sub_ps(_mm512_setzero_ps(), offset[p]);
            at[p] = block + 256 + 256 * s;
        }
#pragma GCC unroll 1
        for (size_t g = 0; g < 4; g++) {
            nibbles_take(sink, PANELS, ROWS, 1, at, scale, offset, table, 32 * s - first + 8 * g);
#pragma GCC unroll 2
            for (int p = 0; p < PANELS; p++)
                at[p] += 64;
        }
    }
}

ALWAYS_INLINE void block_q6_k(sink_t *sink, const int PANELS, const int ROWS,
                              const uint8_t *const *panel, uint32_t first, uint32_t count)
{
    const __m512i low_mask = _mm512_set1_epi32(15), mask = _mm512_set1_epi32(63);
    for (size_t s = first / 16; s < (first + count) / 16; s++) {
        __m512 scale[DIRECT_PANELS], offset[DIRECT_PANELS];
        __m512i high[DIRECT_PANELS];
#pragma GCC unroll 2
        for (int p = 0; p < PANELS; p++) {
            const uint8_t *block = panel[p];
            __m512i integers =
                _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(block + 32 + 16 * s)));
            scale[p] = _mm512_mul_ps(load_f16(block), _mm512_cvtepi32_ps(integers));
            offset[p] = _mm512_mul_ps(scale[p], _mm512_set1_ps(-32));
            high[p] = _mm512_loadu_si512(block + 288 + 2048 + 64 * s);
            sink_prefetch(sink, block + 288 + 2048 + 64 * s);
        }
#pragma GCC unroll 2
        for (size_t g = 0; g < 2; g++) {
            __m512i low[DIRECT_PANELS];
#pragma GCC unroll 2
            for (int p = 0; p < PANELS; p++) {
                low[p] = _mm512_loadu_si512(panel[p] + 288 + 64 * (2 * s + g));
                sink_prefetch(sink, panel[p] + 288 + 64 * (2 * s + g));
            }
#pragma GCC unroll 8
            for (uint32_t j = 0; j < 8; j++) {
                __m512 w[DIRECT_PANELS];
                const uint32_t i = 8 * g + j;
#pragma GCC unroll 2
                for (int p = 0; p < PANELS; p++) {
                    __m512i nibble = _mm512_srli_epi32(low[p], 4 * j);
                    __m512i upper = i < 2 ? _mm512_slli_epi32(high[p], 4 - 2 * i)
                                          : _mm512_srli_epi32(high[p], 2 * i - 4);
                    /* Bits 0..3 from the nibble, the rest from the upper part. */
                    __m512i integer = _mm512_ternarylogic_epi32(low_mask, nibble, upper, 0xca);
                    integer = _mm512_and_si512(integer, mask);
                    /* scale * (q - 32), with the product rounded once. */
                    w[p] = _mm512_fmadd_ps(scale[p], _mm512_cvtepi32_ps(integer), offset[p]);
                }
                sink_take(sink, PANELS, ROWS, 16 * s - first + i, w);
            }
        }
    }
}

/* Columns [k0, k0 + count), at most KERNELS_K_BLOCK and within one block of 256. */
ALWAYS_INLINE void block_any(sink_t *sink, const xp_dtype_t dtype, const int PANELS, const int ROWS,
                             const uint8_t *const *panel, uint32_t k0, uint32_t count)
{
    const uint8_t *at[DIRECT_PANELS];
    for (int p = 0; p < PANELS; p++)
        at[p] = kernels_panel_block(panel[p], dtype, k0);
    switch (dtype) {
    case XP_DTYPE_F32:
        block_f32(sink, PANELS, ROWS, at, count);
        break;
    case XP_DTYPE_F16:
        block_f16(sink, PANELS, ROWS, at, count);
        break;
    case XP_DTYPE_BF16:
        block_bf16(sink, PANELS, ROWS, at, count);
        break;
    case XP_DTYPE_Q8_0:
        block_q8_0(sink, PANELS, ROWS, at, count);
        break;
    case XP_DTYPE_Q4_0:
        block_q4(sink, PANELS, ROWS, 0, at, count);
        break;
    case XP_DTYPE_Q4_1:
        block_q4(sink, PANELS, ROWS, 1, at, count);
        break;
    case XP_DTYPE_Q4_K:
        block_q4_k(sink, PANELS, ROWS, at, k0 % 256, count);
        break;
    default:
        block_q6_k(sink, PANELS, ROWS, at, k0 % 256, count);
        break;
    }
}

/* PANELS panels, ROWS rows, all columns. */
ALWAYS_INLINE void direct_panels(const xp_dtype_t dtype, const int PANELS, const int ROWS,
                                 const uint8_t *panel, size_t panel_bytes, uint32_t columns,
                                 const float *const *x, float *y, size_t y_stride)
{
    const uint8_t *at[DIRECT_PANELS];
    sink_t sink;
    for (int p = 0; p < PANELS; p++)
        at[p] = panel + (size_t)p * panel_bytes;
    for (uint32_t k0 = 0; k0 < columns; k0 += KERNELS_K_BLOCK) {
        uint32_t count = columns - k0 < KERNELS_K_BLOCK ? columns - k0 : KERNELS_K_BLOCK;
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            sink.x[r] = x[r] + k0;
#pragma GCC unroll 2
            for (int p = 0; p < PANELS; p++)
                sink.sum[p][r] = _mm512_setzero_ps();
        }
        size_t offset = (size_t)(kernels_panel_block(panel, dtype, k0) - panel);
        sink.ahead = DIRECT_AHEAD;
        if (offset + DIRECT_AHEAD >= panel_bytes)
            sink.ahead += (PANELS - 1) * panel_bytes; /* into the next group of panels */
        block_any(&sink, dtype, PANELS, ROWS, at, k0, count);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
            for (int p = 0; p < PANELS; p++) {
                float *out = y + r * y_stride + p * KERNELS_PANEL;
                __m512 sum = sink.sum[p][r];
                if (k0 > 0)
                    sum = _mm512_add_ps(_mm512_loadu_ps(out), sum);
                _mm512_storeu_ps(out, sum);
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

ALWAYS_INLINE void direct_rows(const xp_dtype_t dtype, const int ROWS, const direct_call_t *call)
{
    uint32_t p = 0;
    for (; p + DIRECT_PANELS <= call->panels; p += DIRECT_PANELS)
        direct_panels(dtype, DIRECT_PANELS, ROWS, call->panel + p * call->panel_bytes,
                      call->panel_bytes, call->columns, call->x, call->y + p * KERNELS_PANEL,
                      call->y_stride);
    for (; p < call->panels; p++)
        direct_panels(dtype, 1, ROWS, call->panel + p * call->panel_bytes, call->panel_bytes,
                      call->columns, call->x, call->y + p * KERNELS_PANEL, call->y_stride);
}

/* ROWS >= rows, of which the last ones are only computed. */
ALWAYS_INLINE void fused_panels(const xp_dtype_t dtype, const int PANELS, const int ROWS,
                                const uint8_t *panel, size_t panel_bytes, uint32_t k0,
                                uint32_t count, uint32_t rows, const float *x, float *c,
                                size_t c_stride)
{
    const uint8_t *at[DIRECT_PANELS];
    /* The same columns of the next panels are next. */
    sink_t sink = {.block = x, .ahead = PANELS * panel_bytes};
    for (int p = 0; p < PANELS; p++)
        at[p] = panel + (size_t)p * panel_bytes;
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int p = 0; p < PANELS; p++)
            sink.sum[p][r] = _mm512_setzero_ps();
    block_any(&sink, dtype, PANELS, ROWS, at, k0, count);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
        if ((uint32_t)r >= rows)
            break;
#pragma GCC unroll 2
        for (int p = 0; p < PANELS; p++) {
            float *out = c + r * c_stride + p * KERNELS_PANEL;
            __m512 sum = sink.sum[p][r];
            if (k0 > 0)
                sum = _mm512_add_ps(_mm512_loadu_ps(out), sum);
            _mm512_storeu_ps(out, sum);
        }
    }
}

typedef struct fused_call {
    const uint8_t *panel;
    size_t panel_bytes;
    uint32_t panels, k0, count, rows;
    const float *x;
    float *c;
    size_t c_stride;
} fused_call_t;

ALWAYS_INLINE void fused_rows(const xp_dtype_t dtype, const int PANELS, const int ROWS,
                              const fused_call_t *call)
{
    uint32_t p = 0;
    for (; p + PANELS <= call->panels; p += PANELS)
        fused_panels(dtype, PANELS, ROWS, call->panel + p * call->panel_bytes, call->panel_bytes,
                     call->k0, call->count, call->rows, call->x, call->c + p * KERNELS_PANEL,
                     call->c_stride);
    if (PANELS > 1 && p < call->panels)
        fused_panels(dtype, 1, ROWS, call->panel + p * call->panel_bytes, call->panel_bytes,
                     call->k0, call->count, call->rows, call->x, call->c + p * KERNELS_PANEL,
                     call->c_stride);
}

#define DIRECT_OF_DTYPE(NAME, DTYPE)                                                               \
    KERNELS_UNCHECKED static void direct_##NAME(uint32_t rows, const direct_call_t *call)          \
    {                                                                                              \
        switch (rows) {                                                                            \
        case 1:                                                                                    \
            direct_rows(DTYPE, 1, call);                                                           \
            break;                                                                                 \
        case 2:                                                                                    \
            direct_rows(DTYPE, 2, call);                                                           \
            break;                                                                                 \
        case 3:                                                                                    \
            direct_rows(DTYPE, 3, call);                                                           \
            break;                                                                                 \
        case 4:                                                                                    \
            direct_rows(DTYPE, 4, call);                                                           \
            break;                                                                                 \
        case 5:                                                                                    \
            direct_rows(DTYPE, 5, call);                                                           \
            break;                                                                                 \
        case 6:                                                                                    \
            direct_rows(DTYPE, 6, call);                                                           \
            break;                                                                                 \
        case 7:                                                                                    \
            direct_rows(DTYPE, 7, call);                                                           \
            break;                                                                                 \
        default:                                                                                   \
            direct_rows(DTYPE, 8, call);                                                           \
            break;                                                                                 \
        }                                                                                          \
    }                                                                                              \
    KERNELS_UNCHECKED static void fused_##NAME(const fused_call_t *call)                           \
    {                                                                                              \
        if (call->rows <= 12)                                                                      \
            fused_rows(DTYPE, 1, 12, call);                                                        \
        else                                                                                       \
            fused_rows(DTYPE, 1, 16, call);                                                        \
    }                                                                                              \
    KERNELS_UNCHECKED static void decode_##NAME(const uint8_t *panel, uint32_t k0, uint32_t count, \
                                                float *tile, size_t stride, size_t ahead)          \
    {                                                                                              \
        sink_t sink = {.tile = tile, .stride = stride, .ahead = ahead};                            \
        block_any(&sink, DTYPE, 1, 0, &panel, k0, count);                                          \
    }
DIRECT_OF_DTYPE(f32, XP_DTYPE_F32)
DIRECT_OF_DTYPE(f16, XP_DTYPE_F16)
DIRECT_OF_DTYPE(bf16, XP_DTYPE_BF16)
DIRECT_OF_DTYPE(q8_0, XP_DTYPE_Q8_0)
DIRECT_OF_DTYPE(q4_0, XP_DTYPE_Q4_0)
DIRECT_OF_DTYPE(q4_1, XP_DTYPE_Q4_1)
DIRECT_OF_DTYPE(q4_k, XP_DTYPE_Q4_K)
DIRECT_OF_DTYPE(q6_k, XP_DTYPE_Q6_K)

static const struct {
    void (*direct)(uint32_t rows, const direct_call_t *call);
    void (*fused)(const fused_call_t *call);
    void (*decode)(const uint8_t *panel, uint32_t k0, uint32_t count, float *tile, size_t stride,
                   size_t ahead);
} by_dtype[XP_DTYPE_COUNT] = {
    [XP_DTYPE_F32] = {direct_f32, fused_f32, decode_f32},
    [XP_DTYPE_F16] = {direct_f16, fused_f16, decode_f16},
    [XP_DTYPE_BF16] = {direct_bf16, fused_bf16, decode_bf16},
    [XP_DTYPE_Q8_0] = {direct_q8_0, fused_q8_0, decode_q8_0},
    [XP_DTYPE_Q4_0] = {direct_q4_0, fused_q4_0, decode_q4_0},
    [XP_DTYPE_Q4_1] = {direct_q4_1, fused_q4_1, decode_q4_1},
    [XP_DTYPE_Q4_K] = {direct_q4_k, fused_q4_k, decode_q4_k},
    [XP_DTYPE_Q6_K] = {direct_q6_k, fused_q6_k, decode_q6_k},
};

void matmul_avx512_direct(xp_dtype_t dtype, const uint8_t *panel, size_t panel_bytes,
                          uint32_t panels, uint32_t columns, uint32_t rows, const float *const *x,
                          float *y, size_t y_stride)
{
    direct_call_t call = {panel, panel_bytes, panels, columns, x, y, y_stride};
    by_dtype[dtype].direct(rows, &call);
}

void matmul_avx512_fused(xp_dtype_t dtype, const uint8_t *panel, size_t panel_bytes,
                         uint32_t panels, uint32_t k0, uint32_t count, uint32_t rows,
                         const float *x, float *c, size_t c_stride)
{
    fused_call_t call = {panel, panel_bytes, panels, k0, count, rows, x, c, c_stride};
    by_dtype[dtype].fused(&call);
}

void matmul_avx512_decode(xp_dtype_t dtype, const uint8_t *panel, uint32_t k0, uint32_t count,
                          float *tile, size_t stride, size_t ahead)
{
    by_dtype[dtype].decode(panel, k0, count, tile, stride, ahead);
}

ALWAYS_INLINE void micro_tile(const int ROWS, const int PANELS, uint32_t k, const float *x,
                              const float *tile, float *c, size_t c_stride, bool accumulate)
{
    __m512 sum[14][2];
#pragma GCC unroll 14
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int p = 0; p < PANELS; p++)
            sum[r][p] = _mm512_setzero_ps();
    for (size_t i = 0; i < k; i++) {
        __m512 w[2];
#pragma GCC unroll 2
        for (int p = 0; p < PANELS; p++)
            w[p] = _mm512_load_ps(tile + (size_t)i * (PANELS * KERNELS_PANEL) + p * KERNELS_PANEL);
#pragma GCC unroll 14
        for (int r = 0; r < ROWS; r++) {
            __m512 value = _mm512_set1_ps(x[r * KERNELS_X_STRIDE + i]);
#pragma GCC unroll 2
            for (int p = 0; p < PANELS; p++)
                sum[r][p] = _mm512_fmadd_ps(w[p], value, sum[r][p]);
        }
    }
#pragma GCC unroll 14
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int p = 0; p < PANELS; p++) {
            float *out = c + r * c_stride + p * KERNELS_PANEL;
            __m512 value = sum[r][p];
            if (accumulate)
                value = _mm512_add_ps(_mm512_loadu_ps(out), value);
            _mm512_storeu_ps(out, value);
        }
}

#define MICRO_CASE(ROWS)                                                                           \
    case ROWS:                                                                                     \
        if (panels == 2)                                                                           \
            micro_tile(ROWS, 2, k, x, tile, c, c_stride, accumulate);                              \
        else                                                                                       \
            micro_tile(ROWS, 1, k, x, tile, c, c_stride, accumulate);                              \
        break;

KERNELS_UNCHECKED void matmul_avx512_micro(uint32_t rows, uint32_t panels, uint32_t k,
                                           const float *x, const float *tile, float *c,
                                           size_t c_stride, bool accumulate)
{
    switch (rows) {
        MICRO_CASE(1)
        MICRO_CASE(2)
        MICRO_CASE(3)
        MICRO_CASE(4)
        MICRO_CASE(5)
        MICRO_CASE(6)
        MICRO_CASE(7)
        MICRO_CASE(8)
        MICRO_CASE(9)
        MICRO_CASE(10)
        MICRO_CASE(11)
        MICRO_CASE(12)
        MICRO_CASE(13)
        MICRO_CASE(14)
    }
}
#endif
