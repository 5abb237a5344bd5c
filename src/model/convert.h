/* SPDX-License-Identifier: MIT */
/* Scalar conversion of stored elements to and from F32. Private to src/model: for small tensors,
 * synthetic checkpoints and tests; the compute kernels have their own. */
#ifndef XPOOL_MODEL_CONVERT_H
#define XPOOL_MODEL_CONVERT_H

#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"

float convert_f16_to_f32(uint16_t bits);
uint16_t convert_f32_to_f16(float value); /* round to nearest even */
uint16_t convert_f32_to_bf16(float value);

/* `elements` is a multiple of the dtype's block. */
void convert_to_f32(xp_dtype_t dtype, const void *data, size_t elements, float *out);
/* Quantises by the simplest rule of each format (extremes of the block set the scale). */
void convert_from_f32(xp_dtype_t dtype, const float *values, size_t elements, void *out);
#endif
