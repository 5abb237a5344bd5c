/* SPDX-License-Identifier: MIT */
/*
 * Element types of tensors, plain and block-quantised.
 *
 * Block formats are those of GGUF (facts from the gguf Python package, gguf/quants.py):
 *   Q8_0  32 weights: f16 d, int8 q[32]                        w = d*q
 *   Q4_0  32 weights: f16 d, u8 q[16]; low nibbles = first 16  w = d*(q-8)
 *   Q4_1  32 weights: f16 d, f16 m, u8 q[16]                   w = d*q + m
 *   Q4_K  256 weights: f16 d, f16 dmin, u8 scales[12], u8 q[128]
 *   Q6_K  256 weights: u8 ql[128], u8 qh[64], int8 scales[16], f16 d
 */
#ifndef XPOOL_BASE_DTYPE_H
#define XPOOL_BASE_DTYPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum xp_dtype {
    XP_DTYPE_AUTO = 0, /* only in configuration: what the checkpoint holds */
    XP_DTYPE_F32,
    XP_DTYPE_F16,
    XP_DTYPE_BF16,
    XP_DTYPE_Q8_0,
    XP_DTYPE_Q4_0,
    XP_DTYPE_Q4_1,
    XP_DTYPE_Q4_K,
    XP_DTYPE_Q6_K,
    XP_DTYPE_COUNT
} xp_dtype_t;

const char *xp_dtype_name(xp_dtype_t dtype);        /* "f32", "bf16", "q4_1", ... */
uint32_t xp_dtype_block_elements(xp_dtype_t dtype); /* 1 for plain types, 32 or 256 */
uint32_t xp_dtype_block_bytes(xp_dtype_t dtype);    /* bytes of one block */
bool xp_dtype_is_quantized(xp_dtype_t dtype);

/* Bytes of one row of `columns` elements; 0 if columns is no multiple of the block. */
static inline size_t xp_dtype_row_bytes(xp_dtype_t dtype, uint64_t columns)
{
    uint32_t block = xp_dtype_block_elements(dtype);
    return columns % block ? 0 : (size_t)(columns / block) * xp_dtype_block_bytes(dtype);
}
#endif
