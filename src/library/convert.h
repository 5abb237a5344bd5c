/* SPDX-License-Identifier: MIT */
/* Rows between the caller's element type and the arena's FP32. Straight loops that the compiler
 * vectorises; no allocation. Results round to nearest even; NaN stays NaN. */
#ifndef XPOOL_LIBRARY_CONVERT_H
#define XPOOL_LIBRARY_CONVERT_H

#include <stddef.h>

#include "xpool/xpool.h"

/* Bytes of one element; 0 for an unknown type. */
size_t library_dtype_bytes(uint32_t dtype);
/* `dtype` is known; `from` and `to` do not overlap. */
void library_rows_to_f32(uint32_t dtype, const void *from, size_t elements, float *to);
void library_rows_from_f32(uint32_t dtype, const float *from, size_t elements, void *to);
#endif
