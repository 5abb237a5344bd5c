/* SPDX-License-Identifier: MIT */
/*
 * What a variant (plain C, AVX2, AVX-512) supplies, and the packed layout that all variants share.
 *
 * Panels. A packed matrix is a sequence of panels of KERNELS_PANEL (16) consecutive rows; the 16
 * rows of a panel take the same bytes as in checkpoint order, so packing is in place, panel by
 * panel. rows % 16 rows at the end stay in checkpoint order. Inside a panel the 16 rows lie side by
 * side, so that one vector holds the same column of 16 rows ("lanes") and every output has its own
 * lane:
 *
 *   F32   [k][16] f32
 *   F16   [k][16] f16
 *   BF16  [k/2][16][2] bf16: a 32-bit lane holds columns k (low half) and k+1; odd widths unpacked
 *   Q8_0  a block of 32 columns: f16 d[16], int8 q[32][16]
 *   Q4_0  a block of 32 columns: f16 d[16], u32 q[4][16]; nibble j of q[g] is column 8g + j
 *   Q4_1  a block of 32 columns: f16 d[16], f16 m[16], u32 q[4][16] likewise
 *   Q4_K  a block of 256 columns: f16 d[16], f16 dmin[16], u32 s[3][16], u32 q[32][16]; the 16
 *         six-bit fields (8 scales, then 8 minima): field f < 15 lies in s[f/5] at bit 6*(f%5),
 *         field 15 in bits 30..31 of s[0], s[1], s[2] (lowest first)
 *   Q6_K  a block of 256 columns: f16 d[16], int8 s[16][16], u32 low[32][16] (nibbles),
 *         u32 high[16][16]; two-bit field j of high[g] belongs to column 16g + j
 *
 * Order of additions. Columns are cut into blocks of KERNELS_K_BLOCK. In a block each output is one
 * chain of multiply-adds over ascending k, starting from zero; block sums are added in ascending
 * order. Every path of a variant keeps this order, so results do not depend on how many rows a
 * call has, how columns are split, or how many threads run.
 */
#ifndef XPOOL_KERNELS_OPS_H
#define XPOOL_KERNELS_OPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/kernels.h"

#define KERNELS_PANEL       16
#define KERNELS_K_BLOCK     128 /* a tile of 32 columns takes 16 KiB, and leaves L1 to the inputs */
#define KERNELS_DIRECT_ROWS 8   /* most rows that a direct kernel of any variant takes */
#define KERNELS_ROW_CHUNK   252 /* rows of one GEMM pass: a multiple of 14, 6 and 4 */

/* For the unrolled vector kernels: a sanitizer's check on each of their loads makes compiling take
 * minutes. tests/unit/kernels/test_matmul.c runs them between guard pages instead, in every build.
 */
#define KERNELS_UNCHECKED __attribute__((no_sanitize("address", "undefined")))

/* Input rows copied for the GEMM: a stride of 9 cache lines spreads the rows over the cache sets.
 */
#define KERNELS_X_STRIDE (KERNELS_K_BLOCK + 16)

typedef struct kernels_ops {
    kernels_variant_t variant;

    /* Decodes columns [k0, k0 + count) of a packed panel: tile[k * stride + lane]. k0 is a multiple
     * of KERNELS_K_BLOCK. `ahead` bytes behind what is read lies what will be wanted next. */
    void (*decode)(xp_dtype_t dtype, const uint8_t *panel, uint32_t k0, uint32_t count, float *tile,
                   size_t stride, size_t ahead);

    /* c[r][16 * panels] (+)= x[r][0..k) * tile[0..k)[16 * panels] for r < rows <= micro_rows and
     * panels <= micro_panels; x has stride KERNELS_X_STRIDE. */
    void (*micro)(uint32_t rows, uint32_t panels, uint32_t k, const float *x, const float *tile,
                  float *c, size_t c_stride, bool accumulate);
    uint32_t micro_rows, micro_panels;

    /* Streams `panels` packed panels for 1..direct_rows rows: y[r][16 * panels] = all columns. NULL
     * where the variant has none. */
    void (*direct)(xp_dtype_t dtype, const uint8_t *panel, size_t panel_bytes, uint32_t panels,
                   uint32_t columns, uint32_t rows, const float *const *x, float *y,
                   size_t y_stride);
    uint32_t direct_rows;
    /* Most rows for which several such calls are faster than copying the rows for a GEMM, for
     * dtypes that are decoded by next to nothing. */
    uint32_t direct_limit;

    /* Decoding and product in one pass, for more rows than `direct` takes and at most fused_rows:
     * c[r][16 * panels] (+)= columns [k0, k0 + count) of `panels` packed panels.
     * x holds those columns of the rows with stride KERNELS_X_STRIDE; its rows up to fused_rows may
     * be read. fused_rows 0 where the variant has none. */
    void (*fused)(xp_dtype_t dtype, const uint8_t *panel, size_t panel_bytes, uint32_t panels,
                  uint32_t k0, uint32_t count, uint32_t rows, const float *x, float *c,
                  size_t c_stride);
    uint32_t fused_rows;

    void (*silu_mul)(const float *gate, const float *up, float *y, size_t count);
    void (*gelu_tanh_mul)(const float *gate, const float *up, float *y, size_t count);
    void (*rms_norm)(const float *x, const float *weight, double epsilon, float *y, size_t count);
    void (*add)(float *y, const float *x, size_t count);
    void (*axpy)(float *y, float a, const float *x, size_t count);
    float (*dot)(const float *a, const float *b, size_t count);
    void (*softmax)(float *x, size_t count);
} kernels_ops_t;

/* Start of the block that holds column k of a packed panel. Inline, so that it folds for a constant
 * dtype. */
static inline const uint8_t *kernels_panel_block(const uint8_t *panel, xp_dtype_t dtype, size_t k)
{
    switch (dtype) {
    case XP_DTYPE_F32:
        return panel + k * 64;
    case XP_DTYPE_F16:
    case XP_DTYPE_BF16:
        return panel + k * 32;
    case XP_DTYPE_Q8_0:
        return panel + k / 32 * 544;
    case XP_DTYPE_Q4_0:
        return panel + k / 32 * 288;
    case XP_DTYPE_Q4_1:
        return panel + k / 32 * 320;
    case XP_DTYPE_Q4_K:
        return panel + k / 256 * 2304;
    default:
        return panel + k / 256 * 3360;
    }
}

extern const kernels_ops_t kernels_ops_plain, kernels_ops_avx2, kernels_ops_avx512;

/* Decodes columns [first, first + count) of one lane (row) of a packed panel. Plain C. */
void kernels_pack_decode_lane(xp_dtype_t dtype, const uint8_t *panel, uint32_t first,
                              uint32_t count, uint32_t lane, float *out);
#endif
