// SPDX-License-Identifier: MIT
// Values of a tensor for the emulated kernels: rounded to its type, and as bytes.
#ifndef XPOOL_TESTS_EMULATED_VALUES_H
#define XPOOL_TESTS_EMULATED_VALUES_H

#include "emulated.h"

#include "ffn/cuda/ptx.cuh"

#include "../cuda/ffn_device.h"

typedef std::vector<unsigned char> bytes_t;

static uint16_t pack(float value, uint32_t dtype)
{
    uint16_t bits;
    if (dtype == FFN_CUDA_BF16)
        return ptx_from_float<__nv_bfloat16>(value).bits;
    const _Float16 half = (_Float16)value;
    memcpy(&bits, &half, 2);
    return bits;
}

static float unpack(uint16_t bits, uint32_t dtype)
{
    _Float16 half;
    if (dtype == FFN_CUDA_BF16)
        return __uint_as_float((uint32_t)bits << 16);
    memcpy(&half, &bits, 2);
    return (float)half;
}

// Values as rounded, and their bytes.
static void fill(uint64_t count, uint64_t seed, float scale, uint32_t dtype, bytes_t *bytes,
                 std::vector<float> *values)
{
    const uint32_t each = dtype == FFN_CUDA_F32 ? 4 : 2;
    values->resize(count);
    bytes->resize(count * each);
    for (uint64_t i = 0; i < count; i++) {
        const float value = ffn_kit_value(seed, i) * scale;
        const uint16_t bits = each == 2 ? pack(value, dtype) : 0;
        (*values)[i] = each == 2 ? unpack(bits, dtype) : value;
        if (each == 2)
            memcpy(bytes->data() + i * 2, &bits, 2);
        else
            memcpy(bytes->data() + i * 4, &value, 4);
    }
    emulated_allow(bytes->data(), bytes->size());
}
#endif
