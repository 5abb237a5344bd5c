/* SPDX-License-Identifier: MIT */
/*
 * Rotary position embedding: inverse frequencies of a model and the rotation of one head.
 *
 * Formulas are those of Hugging Face transformers (modeling_rope_utils.py), computed in float32
 * where it does so, because angles at far positions depend on that rounding.
 */
#ifndef XPOOL_ENGINE_ROPE_H
#define XPOOL_ENGINE_ROPE_H

#include <stdint.h>

#include "base/status.h"
#include "model/spec.h"

/* Fills inverse[head_dim / 2] and the factor by which cosines and sines are multiplied (YaRN).
 * XP_UNSUPPORTED names a scaling this build does not do. */
xp_status_t engine_rope_frequencies(const model_rope_t *rope, uint32_t head_dim, float *inverse,
                                    float *scale_out);

/* cosine[half] and sine[half] of one position. */
void engine_rope_angles(const float *inverse, float scale, uint32_t half, uint32_t position,
                        float *cosine, float *sine);

/* Rotates one head in place: pairs (i, i + half). */
static inline void engine_rope_rotate(float *head, uint32_t half, const float *cosine,
                                      const float *sine)
{
    for (uint32_t i = 0; i < half; i++) {
        float low = head[i], high = head[i + half];
        head[i] = low * cosine[i] - high * sine[i];
        head[i + half] = high * cosine[i] + low * sine[i];
    }
}
#endif
