// SPDX-License-Identifier: MIT
// Router and plan of few rows (few.cu): logits, choices, and which rows each expert has.
#ifndef XPOOL_FFN_CUDA_FEW_ROUTE_CUH
#define XPOOL_FFN_CUDA_FEW_ROUTE_CUH

#include "ffn/cuda/few_steps.h"
#include "ffn/cuda/ptx.cuh"
#include "ffn/cuda/route.cuh"
#include "ffn/cuda/router.cuh"
#include "ffn/cuda/usage.h"

static __device__ __forceinline__ const ffn_cuda_layer_t *lane_layer(const ffn_cuda_lane_t *lane)
{
    return lane->layers + lane->layer;
}

#define FEW_ROUTE_SUMS (FEW_ROUTE_EXPERTS * FEW_ROUTE_ROWS)
static_assert(FEW_ROUTE_ROWS == 8 && FEW_ROUTE_EXPERTS == 16, "a product of the tensor cores");
static_assert(FFN_CUDA_MAX_EXPERTS * FEW_ROWS_MOST <= 65536,
              "a pair takes 16 bits while it is placed");

// Of a block of WARPS warps; results do not depend on their number.
template <uint32_t WARPS> struct few_route_t {
    ffn_cuda_signature_t signature;
    union {
        float part[FEW_ROUTE_PARTS][FEW_ROUTE_SUMS];         // of the logits
        float scratch[FEW_ROUTE_ROWS][FFN_CUDA_MAX_EXPERTS]; // of the row that a warp chooses for
    };
    uint32_t count[FFN_CUDA_MAX_EXPERTS]; // pairs; later where they begin
    uint32_t warp_sum[WARPS];
    uint16_t pair[FEW_ROWS_MOST * FFN_CUDA_MAX_TOP_K];
    uint32_t distinct; // experts that have pairs
    uint32_t tiles[2]; // routed, of the last part
    uint32_t last;
};

// Whether this block is the last of `blocks` to arrive, which sees what all of them have written
// (past its own cache) and sets the counter back: the next router begins after this one's end.
template <uint32_t WARPS>
static __device__ __forceinline__ bool few_last(few_route_t<WARPS> &sh, uint64_t *arrived,
                                                uint32_t blocks)
{
    __syncthreads();
    if (threadIdx.x == 0) {
        sh.last = ptx_add_acq_rel(arrived, 1) + 1 == blocks;
        if (sh.last)
            *arrived = 0;
    }
    __syncthreads();
    return sh.last;
}

// 16 experts' logits of 8 rows to `logits` [rows][experts] in memory: FEW_ROUTE_PARTS share the inner
// dimension, a warp takes parts in turn, and they are added in their order.
template <typename T, int PIECES, uint32_t WARPS>
static __device__ __forceinline__ void few_logits(few_route_t<WARPS> &sh, const ffn_cuda_layer_t *layer,
                                                  const void *input, uint32_t expert, uint32_t first,
                                                  uint32_t rows, float *logits)
{
    static_assert(FEW_ROUTE_SUMS <= WARPS * 32, "a thread adds one logit's parts");
    const ffn_cuda_signature_t &s = sh.signature;
    const uint32_t l = threadIdx.x % 32, g = l / 4;
    router_place_t<1> place;
    // What does not exist is read from something that does, and dropped.
    place.low_at = (uint64_t)min(expert + g, s.experts - 1) * s.hidden;
    place.high_at = (uint64_t)min(expert + g + 8, s.experts - 1) * s.hidden;
    place.x_at[0] = (const char *)input + (uint64_t)min(first + g, rows - 1) * s.hidden * 2;
    place.router = (const char *)layer->router;
    place.hidden = s.hidden;
    const float scale = PIECES > 1 ? 1.0f / piece_scale<T>() : 1.0f;
    // So many parts' loads are under way together.
    constexpr uint32_t ALL = (FEW_ROUTE_PARTS + WARPS - 1) / WARPS, ONCE = PIECES == 1 ? ALL : 1;
    const uint32_t warp = threadIdx.x / 32;
#pragma unroll 1
    for (uint32_t first_part = warp; first_part < FEW_ROUTE_PARTS; first_part += ONCE * WARPS) {
        float sum[ONCE][1][4] = {};
#pragma unroll 1
        for (uint32_t step = 0; step * 32 < s.hidden; step += FEW_ROUTE_PARTS * 4) {
            router_batch_t<PIECES, 1, 4> batch[ONCE];
#pragma unroll
            for (uint32_t n = 0; n < ONCE; n++)
                router_batch_load<PIECES, 1, 4>(place, step + first_part + n * WARPS,
                                                FEW_ROUTE_PARTS, &batch[n]);
#pragma unroll
            for (uint32_t n = 0; n < ONCE; n++)
                router_batch_multiply<T, PIECES, 1, 4>(place, step + first_part + n * WARPS,
                                                       FEW_ROUTE_PARTS, batch[n], sum[n]);
        }
#pragma unroll
        for (uint32_t n = 0; n < ONCE; n++)
#pragma unroll
            for (uint32_t i = 0; i < 4; i++)
                if (first_part + n * WARPS < FEW_ROUTE_PARTS)
                    sh.part[first_part + n * WARPS][i * 32 + l] = sum[n][0][i] * scale;
    }
    __syncthreads();
    const uint32_t i = threadIdx.x / 32;
    const uint32_t e = expert + few_sum_weight(i, l), row = first + few_sum_row(0, i, l);
    if (threadIdx.x >= FEW_ROUTE_SUMS || e >= s.experts || row >= rows)
        return;
    float all = 0.0f;
#pragma unroll
    for (uint32_t part = 0; part < FEW_ROUTE_PARTS; part++)
        all += sh.part[part][threadIdx.x];
    logits[(uint64_t)row * s.experts + e] = all;
}

template <uint32_t HELD>
static __device__ __forceinline__ void few_choose_row(const ffn_cuda_signature_t &s, float *scratch,
                                                      const float *bias, const float *logits,
                                                      uint32_t *expert_out, float *weight_out)
{
    float score[HELD];
#pragma unroll
    for (uint32_t i = 0; i < HELD; i++) {
        const uint32_t e = i * 32 + threadIdx.x % 32;
        score[i] = e < s.experts ? __ldcg(logits + e) : -INFINITY;
    }
    route_held<HELD>(s, score, scratch, bias, expert_out, weight_out);
}

// One block, after the logits of these rows: chooses, a warp for a row; for rows `share`, `share` + `shares`
// and so on of the group.
template <uint32_t WARPS>
static __device__ __forceinline__ void few_choose(few_route_t<WARPS> &sh, const ffn_cuda_lane_t *lane,
                                                  const float *bias, uint32_t first, uint32_t rows,
                                                  const float *logits, uint32_t share, uint32_t shares)
{
    const ffn_cuda_signature_t &s = sh.signature;
    const uint32_t l = threadIdx.x % 32;
    uint32_t *const chosen = lane->workspace.chosen;
    float *const weights = lane->workspace.weights;
#pragma unroll 1
    for (uint32_t of = threadIdx.x / 32 * shares + share; of < FEW_ROUTE_ROWS && first + of < rows;
         of += WARPS * shares) {
        const uint32_t row = first + of;
        const float *of_row = logits + (uint64_t)row * s.experts;
        uint32_t expert, rank = 0;
        float weight;
        if (s.experts <= 128)
            few_choose_row<4>(s, sh.scratch[of], bias, of_row, &expert, &weight);
        else
            few_choose_row<FFN_CUDA_MAX_EXPERTS / 32>(s, sh.scratch[of], bias, of_row, &expert,
                                                      &weight);
        // Ascending by expert: the order in which the sum is taken.
        for (uint32_t i = 0; i < s.top_k; i++)
            rank += __shfl_sync(ROUTE_ALL, expert, i) < expert;
        if (l < s.top_k) {
            const uint32_t at = row * s.top_k + rank;
            chosen[at] = expert;
            weights[at] = weight;
        }
    }
}

// One block, after all choices: what ffn_bulk_plan() and ffn_bulk_place() write. A thread has some
// experts that follow each other.
template <uint32_t WARPS>
static __device__ __forceinline__ void few_plan(few_route_t<WARPS> &sh, const ffn_cuda_lane_t *lane,
                                                const ffn_cuda_layer_t *layer, uint32_t rows)
{
    constexpr uint32_t THREADS = WARPS * 32, EACH = (FFN_CUDA_MAX_EXPERTS + THREADS - 1) / THREADS;
    const ffn_cuda_workspace_t &w = lane->workspace;
    const ffn_cuda_signature_t &s = sh.signature;
    const uint32_t thread = threadIdx.x, warp = thread / 32, l = thread % 32;
    const uint32_t pairs = s.experts ? rows * s.top_k : 0;
    for (uint32_t e = thread; e < FFN_CUDA_MAX_EXPERTS; e += THREADS)
        sh.count[e] = 0;
    if (thread == 0)
        sh.distinct = 0;
    __syncthreads();
    for (uint32_t pair = thread; pair < pairs; pair += THREADS) {
        const uint32_t expert = __ldcg(w.chosen + pair);
        sh.pair[pair] = few_pair_pack(expert, atomicAdd(&sh.count[expert], 1));
    }
    __syncthreads();
    uint32_t count[EACH], own = 0, distinct = 0;
#pragma unroll
    for (uint32_t i = 0; i < EACH; i++) {
        const uint32_t e = thread * EACH + i;
        count[i] = e < FFN_CUDA_MAX_EXPERTS ? sh.count[e] : 0;
        own += few_count_pack(count[i]);
        distinct += count[i] != 0;
    }
    if (distinct)
        atomicAdd(&sh.distinct, distinct);
    uint32_t sum = own;
#pragma unroll
    for (uint32_t d = 1; d < 32; d *= 2) {
        const uint32_t before = __shfl_up_sync(ROUTE_ALL, sum, d);
        sum += l >= d ? before : 0;
    }
    if (l == 31)
        sh.warp_sum[warp] = sum;
    __syncthreads();
    uint32_t all = 0;
#pragma unroll
    for (uint32_t i = 0; i < WARPS; i++) {
        sum += i < warp ? sh.warp_sum[i] : 0;
        all += sh.warp_sum[i];
    }
    uint32_t before = sum - own;
#pragma unroll
    for (uint32_t i = 0; i < EACH; i++) {
        const uint32_t e = thread * EACH + i;
        if (e >= FFN_CUDA_MAX_EXPERTS)
            break;
        sh.count[e] = before & 0xffff;
        few_tiles_write(w.tiles, e, count[i], before);
        ffn_cuda_usage_expert(layer->usage, e, count[i]);
        before += few_count_pack(count[i]);
    }
    __syncthreads();
    for (uint32_t pair = thread; pair < pairs; pair += THREADS) {
        const uint32_t at =
            sh.count[few_pair_expert(sh.pair[pair])] + few_pair_place(sh.pair[pair]);
        w.row_ids[at] = pair / s.top_k;
        w.pair_at[pair] = at;
    }
    const uint32_t routed = all >> 16;
    const uint32_t width = s.experts ? s.shared_intermediate : s.intermediate;
    const uint32_t last = width ? few_parts(rows, FEW_TILE_ROWS) : 0;
    if (thread < last)
        w.tiles[routed + thread] = {s.experts, thread * FEW_TILE_ROWS,
                                    min(FEW_TILE_ROWS, rows - thread * FEW_TILE_ROWS), 0};
    if (thread == 0) {
        w.tile_count[0] = sh.tiles[0] = routed;
        w.tile_count[1] = sh.tiles[1] = last;
        ffn_cuda_usage_execution(layer->usage, rows, sh.distinct);
    }
}

// One of the router's units: the logits of 16 experts for 8 rows. They lie where down will write: nobody
// needs that yet.
template <uint32_t WARPS>
static __device__ __forceinline__ void few_unit_logits(few_route_t<WARPS> &sh,
                                                       const ffn_cuda_lane_t *lane,
                                                       const ffn_cuda_layer_t *layer,
                                                       const void *input, uint32_t rows, uint32_t unit)
{
    const ffn_cuda_signature_t &s = sh.signature;
    float *const logits = lane->workspace.products;
    const uint32_t tiles = few_parts(s.experts, FEW_ROUTE_EXPERTS);
    const uint32_t expert = unit % tiles * FEW_ROUTE_EXPERTS, first = unit / tiles * FEW_ROUTE_ROWS;
    const bool wide = s.router_dtype == FFN_CUDA_F32;
    if (first >= rows)
        ; // a Capacity's rows that are not live
    else if (s.dtype == FFN_CUDA_BF16 && wide)
        few_logits<__nv_bfloat16, 3>(sh, layer, input, expert, first, rows, logits);
    else if (s.dtype == FFN_CUDA_BF16)
        few_logits<__nv_bfloat16, 1>(sh, layer, input, expert, first, rows, logits);
    else if (wide)
        few_logits<__half, 3>(sh, layer, input, expert, first, rows, logits);
    else
        few_logits<__half, 1>(sh, layer, input, expert, first, rows, logits);
}

// All threads, then a barrier of the block.
template <uint32_t WARPS>
static __device__ __forceinline__ void few_signature(few_route_t<WARPS> &sh,
                                                     const ffn_cuda_layer_t *layer)
{
    if (threadIdx.x < sizeof(sh.signature) / 4)
        ((uint32_t *)&sh.signature)[threadIdx.x] = ((const uint32_t *)layer->signature)[threadIdx.x];
}

// The whole router and plan of a launch, a block a unit. The last block of a group of rows chooses for them,
// the last of those plans: nobody waits for a block that has not begun.
template <uint32_t WARPS>
static __device__ __forceinline__ void few_route(few_route_t<WARPS> &sh, const ffn_cuda_lane_t *lane)
{
    const uint32_t rows = min(lane->rows, FEW_ROWS_MOST);
    const ffn_cuda_layer_t *layer = lane_layer(lane);
    few_signature(sh, layer);
    __syncthreads();
    if (sh.signature.experts) {
        const uint32_t tiles = few_parts(sh.signature.experts, FEW_ROUTE_EXPERTS);
        const uint32_t group = blockIdx.x / tiles;
        uint64_t *const arrived = lane->workspace.arrived;
        few_unit_logits(sh, lane, layer, lane->input, rows, blockIdx.x);
        if (!few_last(sh, arrived + 1 + group, tiles))
            return;
        few_choose(sh, lane, layer->bias, group * FEW_ROUTE_ROWS, rows, lane->workspace.products, 0, 1);
        if (!few_last(sh, arrived, gridDim.x / tiles))
            return;
    }
    few_plan(sh, lane, layer, rows);
}
#endif
