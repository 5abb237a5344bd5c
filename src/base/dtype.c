/* SPDX-License-Identifier: MIT */
/* The table of element types. */
#include "base/dtype.h"

static const struct {
    const char *name;
    uint32_t elements, bytes;
} dtypes[XP_DTYPE_COUNT] = {
    [XP_DTYPE_AUTO] = {"auto", 1, 0},     [XP_DTYPE_F32] = {"f32", 1, 4},
    [XP_DTYPE_F16] = {"f16", 1, 2},       [XP_DTYPE_BF16] = {"bf16", 1, 2},
    [XP_DTYPE_Q8_0] = {"q8_0", 32, 34},   [XP_DTYPE_Q4_0] = {"q4_0", 32, 18},
    [XP_DTYPE_Q4_1] = {"q4_1", 32, 20},   [XP_DTYPE_Q4_K] = {"q4_k", 256, 144},
    [XP_DTYPE_Q6_K] = {"q6_k", 256, 210},
};

const char *xp_dtype_name(xp_dtype_t dtype)
{
    return (unsigned)dtype < XP_DTYPE_COUNT ? dtypes[dtype].name : "?";
}

uint32_t xp_dtype_block_elements(xp_dtype_t dtype)
{
    return (unsigned)dtype < XP_DTYPE_COUNT ? dtypes[dtype].elements : 1;
}

uint32_t xp_dtype_block_bytes(xp_dtype_t dtype)
{
    return (unsigned)dtype < XP_DTYPE_COUNT ? dtypes[dtype].bytes : 0;
}

bool xp_dtype_is_quantized(xp_dtype_t dtype)
{
    return xp_dtype_block_elements(dtype) > 1;
}
