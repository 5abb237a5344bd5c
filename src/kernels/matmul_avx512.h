/* SPDX-License-Identifier: MIT */
#ifndef XPOOL_KERNELS_MATMUL_AVX512_H
#define XPOOL_KERNELS_MATMUL_AVX512_H

#include "kernels/ops.h"

void matmul_avx512_decode(xp_dtype_t dtype, const uint8_t *panel, uint32_t k0, uint32_t count,
                          float *tile, size_t stride, size_t ahead);
void matmul_avx512_micro(uint32_t rows, uint32_t panels, uint32_t k, const float *x,
                         const float *tile, float *c, size_t c_stride, bool accumulate);
void matmul_avx512_direct(xp_dtype_t dtype, const uint8_t *panel, size_t panel_bytes,
                          uint32_t panels, uint32_t columns, uint32_t rows, const float *const *x,
                          float *y, size_t y_stride);
void matmul_avx512_fused(xp_dtype_t dtype, const uint8_t *panel, size_t panel_bytes,
                         uint32_t panels, uint32_t k0, uint32_t count, uint32_t rows,
                         const float *x, float *c, size_t c_stride);
#endif
