/* SPDX-License-Identifier: MIT */
/*
 * CPU compute kernels on FP32 activations and weights kept in their checkpoint dtype.
 *
 * Every kernel exists in plain C and, where it pays, in AVX2+FMA+F16C and AVX-512 variants, chosen
 * at run time (kernels_select()). Accumulation is FP32. The result of one row never depends on how
 * many other rows are in the call, nor on the number of threads: a row alone and the same row among
 * 256 give bit-identical outputs within one variant. (That is what makes a request's tokens the
 * same alone and in a batch.) So the order of additions along k is fixed per variant.
 */
#ifndef XPOOL_KERNELS_KERNELS_H
#define XPOOL_KERNELS_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"
#include "base/pool.h"
#include "base/status.h"

typedef enum kernels_variant {
    KERNELS_PLAIN = 0,
    KERNELS_AVX2,
    KERNELS_AVX512,
    KERNELS_VARIANT_COUNT
} kernels_variant_t;

const char *kernels_variant_name(kernels_variant_t variant);
bool kernels_variant_supported(kernels_variant_t variant);
/* Best supported variant, or the one named by XPOOL_KERNELS=plain|avx2|avx512 (ignored with
 * XP_INVALID if the host lacks it). Called once by each process before use; tests switch by
 * kernels_select_variant(). */
xp_status_t kernels_select(void);
xp_status_t kernels_select_variant(kernels_variant_t variant);
kernels_variant_t kernels_selected(void);

/* A weight matrix: rows x columns, row-major in `dtype`; each row xp_dtype_row_bytes(dtype,
 * columns) bytes, at `data`, 64-byte aligned base. The kernels may want the matrix re-laid-out for
 * speed: then kernels_matrix_pack() is called once at load and `packed` is set; the packed form has
 * exactly the same number of bytes (plus < 4 KiB) and is made in place. */
typedef struct kernels_matrix {
    xp_dtype_t dtype;
    uint32_t rows, columns;
    bool packed;
    void *data;
} kernels_matrix_t;

/* Bytes to allocate for a matrix of this shape, including packing slack. */
size_t kernels_matrix_bytes(xp_dtype_t dtype, uint32_t rows, uint32_t columns);

/* Re-lays the matrix out in place (load time only: takes a temporary buffer of 16 rows) and sets
 * `packed`. A shape or dtype without a packed form stays as it is, which is not an error: every
 * kernel takes both forms. XP_NO_MEMORY when the temporary buffer cannot be had; the matrix is
 * unchanged. */
xp_status_t kernels_matrix_pack(kernels_matrix_t *w);
/* Whether a matrix of this kind has a packed form. */
bool kernels_pack_supported(xp_dtype_t dtype, uint32_t columns);

/* Scratch one thread needs for any call with up to max_rows x max_columns inputs. */
size_t kernels_scratch_bytes(uint32_t max_rows, uint32_t max_columns);

/* y[r][n] = sum_k x[r][k] * W[n][k], for r < x_rows, n in [first, last).
 * x: x_rows x columns, row stride x_stride floats. y: row stride y_stride floats; y points at
 * column 0. One thread; callers split [0, rows) over a pool in multiples of KERNELS_SPLIT. */
#define KERNELS_SPLIT 16
void kernels_matmul_range(const kernels_matrix_t *w, const float *x, size_t x_stride,
                          uint32_t x_rows, float *y, size_t y_stride, uint32_t first, uint32_t last,
                          void *scratch);

/* The same with row r of the input at x + row_ids[r] * x_stride (MoE: the rows of one expert), and
 * with y pointing at column `first`, so that a tile of the output may be stored alone. row_ids NULL
 * means 0, 1, 2, ... */
void kernels_matmul_gather_range(const kernels_matrix_t *w, const float *x, size_t x_stride,
                                 const uint32_t *row_ids, uint32_t x_rows, float *y,
                                 size_t y_stride, uint32_t first, uint32_t last, void *scratch);

/* The same on a whole pool; `scratch` holds kernels_scratch_bytes() times the pool's threads.
 * Few rows: streams the weights once; many rows: blocked GEMM on dequantised panels. */
void kernels_matmul(xp_pool_t *pool, const kernels_matrix_t *w, const float *x, size_t x_stride,
                    uint32_t x_rows, float *y, size_t y_stride, void *scratch);

/* Columns one work item should take when `rows` output columns are shared dynamically by `threads`:
 * a multiple of KERNELS_SPLIT, some items a thread so that a late thread holds nobody up. */
uint32_t kernels_split_chunk(uint32_t rows, uint32_t threads);

/* One row to FP32 (embedding lookup). */
void kernels_dequantize_row(const kernels_matrix_t *w, uint32_t row, float *out);

/* Converts `count` plain elements (F32, F16, BF16) to another plain type, round to nearest even. */
void kernels_convert(xp_dtype_t from, const void *in, xp_dtype_t to, void *out, size_t count);

/* y[i] = act(gate[i]) * up[i]; SiLU: x / (1 + exp(-x)), error <= 2 ulp-ish against libm. */
void kernels_silu_mul(const float *gate, const float *up, float *y, size_t count);
void kernels_gelu_tanh_mul(const float *gate, const float *up, float *y, size_t count);

/* y = x / sqrt(mean(x^2) + epsilon) * weight, one row of `count`. y may be x. */
void kernels_rms_norm(const float *x, const float *weight, double epsilon, float *y, size_t count);

/* y[i] += x[i];  y[i] += a * x[i];  dot;  in-place softmax over count (max subtracted). */
void kernels_add(float *y, const float *x, size_t count);
void kernels_axpy(float *y, float a, const float *x, size_t count);
float kernels_dot(const float *a, const float *b, size_t count);
void kernels_softmax(float *x, size_t count);
#endif
