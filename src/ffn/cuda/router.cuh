// SPDX-License-Identifier: MIT
// Weights of a router as the tensor cores take them.
//
// Router weights in FP32 are cut into three pieces of the activations' type whose products are exact,
// so that the logits are as good as FP32 ones; pieces are scaled so that FP16 does not lose the last.
#ifndef XPOOL_FFN_CUDA_ROUTER_CUH
#define XPOOL_FFN_CUDA_ROUTER_CUH

#include "ffn/cuda/ptx.cuh"

template <typename T> static __device__ __forceinline__ float piece_scale();
template <> __device__ __forceinline__ float piece_scale<__nv_bfloat16>()
{
    return 1.0f;
}
template <> __device__ __forceinline__ float piece_scale<__half>()
{
    return 256.0f;
}
template <typename T> static __device__ __forceinline__ float piece_back(uint32_t pair, int i)
{
    const float2 two = ptx_unpack<T>(pair);
    return i ? two.y : two.x;
}

template <typename T, int PIECES>
static __device__ __forceinline__ void router_weights(const char *router, uint64_t at,
                                                      uint32_t (&pieces)[PIECES][4])
{
    if (PIECES == 1) {
        const uint4 packed = __ldg((const uint4 *)(router + at * 2));
        pieces[0][0] = packed.x, pieces[0][1] = packed.y;
        pieces[0][2] = packed.z, pieces[0][3] = packed.w;
        return;
    }
    float w[8];
    *(float4 *)&w[0] = __ldg((const float4 *)(router + at * 4));
    *(float4 *)&w[4] = __ldg((const float4 *)(router + at * 4 + 16));
#pragma unroll
    for (int i = 0; i < 8; i++)
        w[i] *= piece_scale<T>();
#pragma unroll
    for (int n = 0; n < PIECES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            pieces[n][i] = ptx_pack<T>(w[i * 2], w[i * 2 + 1]);
            w[i * 2] -= piece_back<T>(pieces[n][i], 0);
            w[i * 2 + 1] -= piece_back<T>(pieces[n][i], 1);
        }
}
#endif
