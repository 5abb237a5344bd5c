/* SPDX-License-Identifier: MIT */
/*
 * Dummy weights (`load_format = "dummy"`): an element's value is a function of its tensor's name
 * and its place in the whole matrix, so shards of any split fit together, and the host can compute
 * what a device was filled with. One source for C and CUDA.
 */
#ifndef XPOOL_FFN_DUMMY_H
#define XPOOL_FFN_DUMMY_H

#include <stdint.h>

#include "base/protocol_atomics.h"

PROTOCOL_FUNCTION uint64_t ffn_dummy_mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

PROTOCOL_FUNCTION uint64_t ffn_dummy_seed(const char *name)
{
    uint64_t seed = 0x9e3779b97f4a7c15u;
    for (const char *c = name; *c; c++)
        seed = ffn_dummy_mix(seed + (uint8_t)*c);
    return seed;
}

/* element: row * columns of the whole matrix + column. scale: ffn_dummy_scale(). */
PROTOCOL_FUNCTION float ffn_dummy_value(uint64_t seed, uint64_t element, float scale)
{
    return scale * (float)(int32_t)ffn_dummy_mix((seed + element) * 0x9e3779b97f4a7c15u);
}

#ifndef __CUDACC__
#include <math.h>

/* Uniform values of variance 1 / columns, which keeps the size of activations. */
static inline float ffn_dummy_scale(uint32_t whole_columns)
{
    return sqrtf(3.0f / (float)whole_columns) * 0x1p-31f;
}
#endif
#endif
