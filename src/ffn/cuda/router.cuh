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

// Eight weights as they lie in memory.
template <int PIECES> struct router_raw_t {
    uint4 part[PIECES > 1 ? 2 : 1];
};

template <int PIECES>
static __device__ __forceinline__ router_raw_t<PIECES> router_load(const char *router, uint64_t at)
{
    router_raw_t<PIECES> raw;
    if constexpr (PIECES == 1) {
        raw.part[0] = ptx_load(router + at * 2);
    } else {
        raw.part[0] = ptx_load(router + at * 4);
        raw.part[1] = ptx_load(router + at * 4 + 16);
    }
    return raw;
}

template <typename T, int PIECES>
static __device__ __forceinline__ void router_pieces(const router_raw_t<PIECES> &raw,
                                                     uint32_t (&pieces)[PIECES][4])
{
    if constexpr (PIECES == 1) {
        pieces[0][0] = raw.part[0].x, pieces[0][1] = raw.part[0].y;
        pieces[0][2] = raw.part[0].z, pieces[0][3] = raw.part[0].w;
    } else {
        float w[8] = {__uint_as_float(raw.part[0].x), __uint_as_float(raw.part[0].y),
                      __uint_as_float(raw.part[0].z), __uint_as_float(raw.part[0].w),
                      __uint_as_float(raw.part[1].x), __uint_as_float(raw.part[1].y),
                      __uint_as_float(raw.part[1].z), __uint_as_float(raw.part[1].w)};
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
}

// What a lane reads of COUNT steps of 32 elements: of its two of 16 experts and of EIGHTS rows.
template <int PIECES, int EIGHTS, int COUNT> struct router_batch_t {
    router_raw_t<PIECES> low[COUNT], high[COUNT];
    uint4 x[COUNT][EIGHTS];
};

// Where a lane's experts begin (elements) and its rows.
template <int EIGHTS> struct router_place_t {
    const char *router;
    uint64_t low_at, high_at;
    const char *x_at[EIGHTS];
    uint32_t hidden;
};

// From step `first` on, `stride` apart; past `hidden` something that exists is read instead, so that there
// are no branches. All lanes. Without the barrier the last loads would wait for the first products, and so
// memory's latency pass several times.
template <int PIECES, int EIGHTS, int COUNT>
static __device__ __forceinline__ void router_batch_load(const router_place_t<EIGHTS> &p,
                                                         uint32_t first, uint32_t stride,
                                                         router_batch_t<PIECES, EIGHTS, COUNT> *batch)
{
#pragma unroll
    for (uint32_t i = 0; i < COUNT; i++) {
        const uint32_t at = (first + i * stride) * 32 + threadIdx.x % 4 * 8;
        const uint32_t k = at < p.hidden ? at : 0;
        batch->low[i] = router_load<PIECES>(p.router, p.low_at + k);
        batch->high[i] = router_load<PIECES>(p.router, p.high_at + k);
#pragma unroll
        for (uint32_t n = 0; n < EIGHTS; n++)
            batch->x[i][n] = ptx_load(p.x_at[n] + (uint64_t)k * 2);
    }
    __syncwarp();
}

// Adds the products of 16 experts with EIGHTS times 8 rows; what is past `hidden` counts as 0.
template <typename T, int PIECES, int EIGHTS, int COUNT>
static __device__ __forceinline__ void
router_batch_multiply(const router_place_t<EIGHTS> &p, uint32_t first, uint32_t stride,
                      const router_batch_t<PIECES, EIGHTS, COUNT> &batch, float (&sum)[EIGHTS][4])
{
#pragma unroll
    for (uint32_t i = 0; i < COUNT; i++) {
        const uint32_t at = (first + i * stride) * 32 + threadIdx.x % 4 * 8;
        const uint32_t inside = at < p.hidden ? 0xffffffffu : 0u;
        uint32_t a[PIECES][4], b[PIECES][4];
        router_pieces<T, PIECES>(batch.low[i], a);
        router_pieces<T, PIECES>(batch.high[i], b);
#pragma unroll
        for (uint32_t n = 0; n < EIGHTS; n++) {
            const uint4 x = batch.x[i][n];
            const uint32_t v[4] = {x.x & inside, x.y & inside, x.z & inside, x.w & inside};
#pragma unroll
            for (int piece = PIECES - 1; piece >= 0; piece--) {
                ptx_mma<T>(sum[n], a[piece][0], b[piece][0], a[piece][1], b[piece][1], v[0], v[1]);
                ptx_mma<T>(sum[n], a[piece][2], b[piece][2], a[piece][3], b[piece][3], v[2], v[3]);
            }
        }
    }
}
#endif
