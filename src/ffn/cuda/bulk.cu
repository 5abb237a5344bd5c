// SPDX-License-Identifier: MIT
// Everything of a bulk FFN (many rows) but its matrix products: router with top-k, the grouping of
// rows by expert, the activation between library products, and the FP32 sums at the end. Counts stay
// on the device: the grids are made for the workspace's rows and blocks past the live rows leave.
//
// A pair is a row with one of its experts. Pairs are laid out in expert order; where a pair lies inside
// its expert depends on the run, its values do not, and the sum over a row's experts is in ascending
// expert order with the shared part last.
#include "ffn/cuda/tables.h"
#include "ffn/cuda/ptx.cuh"
#include "ffn/cuda/route.cuh"
#include "ffn/cuda/router.cuh"
#include "ffn/cuda/bulk_shape.h"
#include "ffn/cuda/maps.cuh"
#include "ffn/cuda/usage.h"

static __device__ __forceinline__ const ffn_cuda_layer_t *lane_layer(const ffn_cuda_lane_t *lane)
{
    return lane->layers + lane->layer;
}

// The steps of the inner dimension that one half of the warps multiplies.
template <typename T, int PIECES, int EIGHTS>
static __device__ __forceinline__ void route_steps(const router_place_t<EIGHTS> &place,
                                                   uint32_t begin, uint32_t end,
                                                   float (&sum)[EIGHTS][4])
{
    constexpr int COUNT = 8 / EIGHTS / (PIECES == 1 ? 1 : 2); // as many as registers hold
#pragma unroll 1
    for (uint32_t step = begin; step < end; step += COUNT) {
        router_batch_t<PIECES, EIGHTS, COUNT> batch;
        router_batch_load<PIECES, EIGHTS, COUNT>(place, step, 1, &batch);
        router_batch_multiply<T, PIECES, EIGHTS, COUNT>(place, step, 1, batch, sum);
    }
}

// logits [EIGHTS * 8][experts] of the block's rows, in shared memory. Two warps share 16 experts, each one
// half of the inner dimension; lanes read 16 contiguous bytes of a row as four K pairs of two products, as in
// decode.cu. The order of a row's sums does not depend on EIGHTS.
template <typename T, int EIGHTS>
static __device__ __forceinline__ void route_logits(const ffn_cuda_lane_t *lane,
                                                    const ffn_cuda_signature_t &s, uint32_t first,
                                                    uint32_t rows, float *logits)
{
    constexpr uint32_t PAIRS = BULK_ROUTE_THREADS / 64;
    const uint32_t warp = threadIdx.x / 32, l = threadIdx.x % 32, g = l / 4, t = l % 4;
    const uint32_t second = warp / PAIRS, steps = (s.hidden + 31) / 32;
    const uint32_t half = (steps / 2 + 7) / 8 * 8; // a multiple of every batch
    const uint32_t begin = second ? half : 0, end = second ? steps : min(half, steps);
    const bool wide = s.router_dtype == FFN_CUDA_F32;
    const float scale = wide ? 1.0f / piece_scale<T>() : 1.0f;
    const char *router = (const char *)lane_layer(lane)->router;
    const char *input = (const char *)lane->input;
    for (uint32_t tiles = 0; tiles * 16 < s.experts; tiles += PAIRS) {
        float sum[EIGHTS][4] = {};
        const uint32_t low = (tiles + warp % PAIRS) * 16 + g, high = low + 8;
        if (low - g < s.experts) {
            router_place_t<EIGHTS> place;
            // What does not exist is read from something that does, and dropped: a step's loads are
            // then free of branches and under way together.
            place.low_at = (uint64_t)min(low, s.experts - 1) * s.hidden;
            place.high_at = (uint64_t)min(high, s.experts - 1) * s.hidden;
            place.router = router;
            place.hidden = s.hidden;
#pragma unroll
            for (int n = 0; n < EIGHTS; n++)
                place.x_at[n] = input + (uint64_t)(first + min(n * 8 + g, rows - 1)) * s.hidden * 2;
            if (wide)
                route_steps<T, 3, EIGHTS>(place, begin, end, sum);
            else
                route_steps<T, 1, EIGHTS>(place, begin, end, sum);
        }
#pragma unroll
        for (uint32_t turn = 0; turn < 2; turn++) {
#pragma unroll
            for (int n = 0; n < EIGHTS; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const uint32_t expert = i / 2 ? high : low, row = n * 8 + t * 2 + i % 2;
                    float *at = logits + row * s.experts + expert;
                    if (turn == second && expert < s.experts)
                        *at = sum[n][i] * scale + (second ? *at : 0.0f);
                }
            __syncthreads();
        }
    }
}

// Blocks of EIGHTS * 8 rows: a few rows go to many blocks, many rows read the router's weights less often.
template <int EIGHTS> static __device__ __forceinline__ void route_block(const ffn_cuda_lane_t *lane)
{
    extern __shared__ float logits[];
    __shared__ ffn_cuda_signature_t s;
    const ffn_cuda_layer_t *layer = lane_layer(lane);
    const ffn_cuda_workspace_t &w = lane->workspace;
    const uint32_t first = blockIdx.x * EIGHTS * 8, warp = threadIdx.x / 32;
    const uint32_t l = threadIdx.x % 32;
    if (first >= lane->rows)
        return;
    const uint32_t rows = min(EIGHTS * 8u, lane->rows - first);
    if (threadIdx.x < sizeof(s) / 4)
        ((uint32_t *)&s)[threadIdx.x] = ((const uint32_t *)layer->signature)[threadIdx.x];
    __syncthreads();
    if (s.dtype == FFN_CUDA_BF16)
        route_logits<__nv_bfloat16, EIGHTS>(lane, s, first, rows, logits);
    else
        route_logits<__half, EIGHTS>(lane, s, first, rows, logits);
    for (uint32_t row = warp; row < rows; row += BULK_ROUTE_THREADS / 32) {
        uint32_t expert;
        float weight;
        route_row(s, logits + row * s.experts, layer->bias, &expert, &weight);
        // Ascending by expert: the order in which the sum is taken.
        uint32_t rank = 0;
        for (uint32_t i = 0; i < s.top_k; i++)
            rank += __shfl_sync(ROUTE_ALL, expert, i) < expert;
        if (l < s.top_k) {
            const uint64_t at = (uint64_t)(first + row) * s.top_k + rank;
            w.chosen[at] = expert;
            w.weights[at] = weight;
            w.pair_at[at] = atomicAdd(&w.counts[expert], 1); // its place inside its expert
        }
    }
}

extern "C" __global__ void __launch_bounds__(BULK_ROUTE_THREADS, 1) ffn_bulk_route_8(
    const ffn_cuda_lane_t *lane)
{
    route_block<1>(lane);
}
extern "C" __global__ void __launch_bounds__(BULK_ROUTE_THREADS, 1) ffn_bulk_route_16(
    const ffn_cuda_lane_t *lane)
{
    route_block<2>(lane);
}
extern "C" __global__ void __launch_bounds__(BULK_ROUTE_THREADS, 1) ffn_bulk_route_32(
    const ffn_cuda_lane_t *lane)
{
    route_block<4>(lane);
}

// Inclusive sum over the block, one value a thread; `total` is that of all.
static __device__ __forceinline__ uint32_t block_sum(uint32_t value, uint32_t *total)
{
    __shared__ uint32_t warps[BULK_PLAN_THREADS / 32];
    const uint32_t warp = threadIdx.x / 32, l = threadIdx.x % 32;
#pragma unroll
    for (uint32_t d = 1; d < 32; d *= 2) {
        const uint32_t before = __shfl_up_sync(ROUTE_ALL, value, d);
        value += l >= d ? before : 0;
    }
    __syncthreads(); // those of the sum before have been read
    if (l == 31)
        warps[warp] = value;
    __syncthreads();
    *total = 0;
#pragma unroll
    for (uint32_t i = 0; i < BULK_PLAN_THREADS / 32; i++) {
        value += i < warp ? warps[i] : 0;
        *total += warps[i];
    }
    return value;
}

// The tiles of the grouped products. An expert a thread: how many pairs it has, and where they end.
static __device__ __forceinline__ void plan_tiles(const ffn_cuda_lane_t *lane,
                                                  const ffn_cuda_signature_t &s, uint32_t count,
                                                  uint32_t end)
{
    const ffn_cuda_workspace_t &w = lane->workspace;
    const uint32_t e = threadIdx.x, rows = lane->rows;
    const uint32_t mine = (count + FFN_CUDA_TILE_ROWS - 1) / FFN_CUDA_TILE_ROWS;
    const uint32_t distinct = __syncthreads_count(count != 0);
    uint32_t routed;
    ffn_cuda_usage_expert(lane_layer(lane)->usage, e, count);
    const uint32_t tile_end = block_sum(mine, &routed);
    for (uint32_t i = 0; i < mine; i++) {
        const uint32_t done = i * FFN_CUDA_TILE_ROWS;
        w.tiles[tile_end - mine + i] = {e, end - count + done,
                                        min(FFN_CUDA_TILE_ROWS, count - done), 0};
    }
    const uint32_t last_width = s.experts ? s.shared_intermediate : s.intermediate;
    const uint32_t last = last_width ? (rows + FFN_CUDA_TILE_ROWS - 1) / FFN_CUDA_TILE_ROWS : 0;
    for (uint32_t i = e; i < last; i += BULK_PLAN_THREADS)
        w.tiles[routed + i] = {s.experts, i * FFN_CUDA_TILE_ROWS,
                               min(FFN_CUDA_TILE_ROWS, rows - i * FFN_CUDA_TILE_ROWS), 0};
    if (e == 0) {
        w.tile_count[0] = routed;
        w.tile_count[1] = last;
        w.taken[0] = 0;
        w.taken[1] = 0;
        ffn_cuda_usage_execution(lane_layer(lane)->usage, rows, distinct);
    }
}

// The first block plans the tiles; the next give each pair its place, all over the same sums; the last
// make the tensor maps.
extern "C" __global__ void __launch_bounds__(BULK_PLAN_THREADS)
    ffn_bulk_plan(const ffn_cuda_lane_t *lane, const __grid_constant__ ffn_cuda_map_t form)
{
    __shared__ uint32_t first[FFN_CUDA_MAX_EXPERTS];
    static_assert(FFN_CUDA_MAX_EXPERTS <= BULK_PLAN_THREADS, "an expert a thread");
    const ffn_cuda_workspace_t &w = lane->workspace;
    const ffn_cuda_signature_t &s = *lane_layer(lane)->signature;
    const uint32_t e = threadIdx.x, pair = (blockIdx.x - 1) * BULK_PLAN_THREADS + e;
    const uint32_t map_block = gridDim.x - BULK_PLAN_MAP_BLOCKS(s.experts);
    if (blockIdx.x >= map_block) {
        map_make(lane, s, form, (blockIdx.x - map_block) * (BULK_PLAN_THREADS / 32) + e / 32);
        return;
    }
    const uint32_t count = e < s.experts ? w.counts[e] : 0;
    uint32_t all;
    const uint32_t end = block_sum(count, &all);
    if (blockIdx.x == 0) {
        plan_tiles(lane, s, count, end);
        return;
    }
    if (e < s.experts)
        first[e] = end - count;
    __syncthreads();
    if (pair >= lane->rows * s.top_k)
        return;
    const uint32_t at = first[w.chosen[pair]] + w.pair_at[pair];
    w.row_ids[at] = pair / s.top_k;
    w.pair_at[pair] = at;
}

template <typename T>
static __device__ __forceinline__ void store_four(const ffn_cuda_lane_t *lane, uint64_t at, float4 v)
{
    if (lane->output)
        *(uint2 *)((T *)lane->output + at) = make_uint2(ptx_pack<T>(v.x, v.y), ptx_pack<T>(v.z, v.w));
    else
        *(float4 *)(lane->partial + at) = v;
}

static __device__ __forceinline__ void add_four(float4 *sum, float weight, float4 v)
{
    sum->x = fmaf(weight, v.x, sum->x);
    sum->y = fmaf(weight, v.y, sum->y);
    sum->z = fmaf(weight, v.z, sum->z);
    sum->w = fmaf(weight, v.w, sum->w);
}

// A block takes rows in turn; a thread four columns. One cast, at the end.
template <typename T> static __device__ __forceinline__ void reduce_rows(const ffn_cuda_lane_t *lane)
{
    const ffn_cuda_workspace_t &w = lane->workspace;
    const ffn_cuda_signature_t &s = *lane_layer(lane)->signature;
    const uint32_t rows = lane->rows, top_k = s.experts ? s.top_k : 0, hidden = s.hidden;
    const bool last = s.experts == 0 || s.shared_intermediate;
    for (uint32_t row = blockIdx.x; row < rows; row += gridDim.x)
        for (uint32_t column = threadIdx.x * 4; column < hidden; column += BULK_THREADS * 4) {
            float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 8
            for (uint32_t i = 0; i < top_k; i++) {
                const uint64_t pair = (uint64_t)row * top_k + i;
                const uint64_t at = (uint64_t)w.pair_at[pair] * hidden + column;
                add_four(&sum, w.weights[pair], __ldcs((const float4 *)(w.products + at)));
            }
            const uint64_t at = ((uint64_t)rows * top_k + row) * hidden + column;
            if (last)
                add_four(&sum, 1.0f, __ldcs((const float4 *)(w.products + at)));
            store_four<T>(lane, (uint64_t)row * hidden + column, sum);
        }
}

extern "C" __global__ void __launch_bounds__(BULK_THREADS) ffn_bulk_reduce(
    const ffn_cuda_lane_t *lane)
{
    if (lane_layer(lane)->signature->dtype == FFN_CUDA_BF16)
        reduce_rows<__nv_bfloat16>(lane);
    else
        reduce_rows<__half>(lane);
}

// Partials of an Execution Group, added in PE order in FP32, cast once.
extern "C" __global__ void __launch_bounds__(BULK_THREADS) ffn_reduce(const ffn_cuda_lane_t *lane)
{
    const ffn_cuda_signature_t &s = *lane_layer(lane)->signature;
    const uint64_t count = (uint64_t)lane->rows * s.hidden;
    for (uint64_t at = ((uint64_t)blockIdx.x * BULK_THREADS + threadIdx.x) * 4; at < count;
         at += (uint64_t)gridDim.x * BULK_THREADS * 4) {
        float4 sum = make_float4(0, 0, 0, 0);
        for (uint32_t i = 0; i < lane->partial_count; i++)
            add_four(&sum, 1.0f, *(const float4 *)(lane->partials[i] + at));
        if (s.dtype == FFN_CUDA_BF16)
            store_four<__nv_bfloat16>(lane, at, sum);
        else
            store_four<__half>(lane, at, sum);
    }
}

// gate[i] = act(gate[i]) * up[i], both [rows][width] as a library's products left them.
template <typename T>
static __device__ __forceinline__ void activate_all(uint4 *gate, const uint4 *up, uint64_t count,
                                                    uint32_t activation)
{
    const uint64_t step = (uint64_t)gridDim.x * BULK_THREADS;
#pragma unroll 2
    for (uint64_t i = (uint64_t)blockIdx.x * BULK_THREADS + threadIdx.x; i < count; i += step) {
        const uint4 g = __ldcs(gate + i), u = __ldcs(up + i);
        const uint32_t gs[4] = {g.x, g.y, g.z, g.w}, us[4] = {u.x, u.y, u.z, u.w};
        uint32_t out[4];
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const float2 a = ptx_unpack<T>(gs[n]), b = ptx_unpack<T>(us[n]);
            out[n] = ptx_pack<T>(ptx_activate(activation, a.x, b.x),
                                 ptx_activate(activation, a.y, b.y));
        }
        gate[i] = make_uint4(out[0], out[1], out[2], out[3]);
    }
}

extern "C" __global__ void __launch_bounds__(BULK_THREADS)
    ffn_activate(void *gate, const void *up, uint64_t elements, uint32_t dtype, uint32_t activation)
{
    if (dtype == FFN_CUDA_BF16)
        activate_all<__nv_bfloat16>((uint4 *)gate, (const uint4 *)up, elements / 8, activation);
    else
        activate_all<__half>((uint4 *)gate, (const uint4 *)up, elements / 8, activation);
}
