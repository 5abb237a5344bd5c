// SPDX-License-Identifier: MIT
// A layer of up to FEW_ROWS_MOST rows, which is a matter of streaming the chosen experts' weights once:
// router and plan, gate and up with the activation, down. ffn_bulk_reduce() sums the pairs. Same
// workspace and same results, but for rounding, as the grouped products (grouped.cu), whose tiles of 128
// rows and 256 weight rows are too coarse here.
//
// Warps are on their own: each takes items (few_steps.h) in turn and keeps a ring of copies under way;
// nothing meets within a launch but the router's blocks, of which the last one plans. Launches never wait
// for others.
#include "ffn/cuda/few_steps.h"
#include "ffn/cuda/ptx.cuh"
#include "ffn/cuda/route.cuh"
#include "ffn/cuda/router.cuh"
#include "ffn/cuda/usage.h"

static __device__ __forceinline__ const ffn_cuda_layer_t *lane_layer(const ffn_cuda_lane_t *lane)
{
    return lane->layers + lane->layer;
}

// ---- router and plan -------------------------------------------------------------------------------
#define FEW_ROUTE_WARPS (FEW_ROUTE_THREADS / 32u)
#define FEW_ROUTE_SUMS  (FEW_ROUTE_EXPERTS * FEW_ROUTE_ROWS)
static_assert(FEW_ROUTE_SUMS == FEW_ROUTE_THREADS, "a thread adds one logit's parts");
static_assert(FFN_CUDA_MAX_EXPERTS == FEW_ROUTE_THREADS, "a thread counts one expert");
static_assert(FFN_CUDA_MAX_EXPERTS * FEW_ROWS_MOST <= 65536, "a pair takes 16 bits while it is placed");

struct few_route_t {
    ffn_cuda_signature_t signature;
    union {
        float part[FEW_ROUTE_WARPS][FEW_ROUTE_SUMS];         // of the logits, by warps
        float logits[FEW_ROUTE_WARPS][FFN_CUDA_MAX_EXPERTS]; // of the row that a warp chooses for
    };
    uint32_t count[FFN_CUDA_MAX_EXPERTS]; // pairs; later where they begin
    uint32_t warp_sum[FEW_ROUTE_WARPS];
    uint16_t pair[FEW_ROWS_MOST * FFN_CUDA_MAX_TOP_K];
    uint32_t last;
};

// This warp's steps of the inner dimension: 16 experts from `expert` on by 32 rows from `first` on.
template <typename T, int PIECES>
static __device__ __forceinline__ void few_logits(const ffn_cuda_lane_t *lane,
                                                  const ffn_cuda_signature_t &s, const char *router,
                                                  uint32_t expert, uint32_t first, uint32_t rows,
                                                  float *part)
{
    const uint32_t warp = threadIdx.x / 32, l = threadIdx.x % 32, g = l / 4, t = l % 4;
    float sum[FEW_ROUTE_ROWS / 8][4] = {};
    // What does not exist is read from something that does, and dropped.
    const uint64_t low_at = (uint64_t)min(expert + g, s.experts - 1) * s.hidden;
    const uint64_t high_at = (uint64_t)min(expert + g + 8, s.experts - 1) * s.hidden;
    const char *x_at[FEW_ROUTE_ROWS / 8];
#pragma unroll
    for (uint32_t n = 0; n < FEW_ROUTE_ROWS / 8; n++)
        x_at[n] = (const char *)lane->input + (uint64_t)min(first + n * 8 + g, rows - 1) * s.hidden * 2;
#pragma unroll 4
    for (uint32_t step = warp; step * 32 < s.hidden; step += FEW_ROUTE_WARPS) {
        const uint32_t inside = step * 32 + t * 8 < s.hidden ? 0xffffffffu : 0u;
        const uint32_t k = (step * 32 + t * 8) & inside;
        uint32_t a[PIECES][4], b[PIECES][4];
        uint4 x[FEW_ROUTE_ROWS / 8];
#pragma unroll
        for (uint32_t n = 0; n < FEW_ROUTE_ROWS / 8; n++)
            x[n] = __ldg((const uint4 *)(x_at[n] + (uint64_t)k * 2));
        router_weights<T, PIECES>(router, low_at + k, a);
        router_weights<T, PIECES>(router, high_at + k, b);
#pragma unroll
        for (uint32_t n = 0; n < FEW_ROUTE_ROWS / 8; n++) {
            x[n].x &= inside, x[n].y &= inside, x[n].z &= inside, x[n].w &= inside;
#pragma unroll
            for (int piece = PIECES - 1; piece >= 0; piece--) {
                ptx_mma<T>(sum[n], a[piece][0], b[piece][0], a[piece][1], b[piece][1], x[n].x, x[n].y);
                ptx_mma<T>(sum[n], a[piece][2], b[piece][2], a[piece][3], b[piece][3], x[n].z, x[n].w);
            }
        }
    }
    const float scale = PIECES > 1 ? 1.0f / piece_scale<T>() : 1.0f;
#pragma unroll
    for (uint32_t n = 0; n < FEW_ROUTE_ROWS / 8; n++)
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            part[(n * 4 + i) * 32 + l] = sum[n][i] * scale;
}

// The block's logits [rows][experts] to `logits` in memory; parts are added in the order of the warps.
template <typename T>
static __device__ __forceinline__ void few_logits_block(few_route_t &sh, const ffn_cuda_lane_t *lane,
                                                        uint32_t block, uint32_t rows, float *logits)
{
    const ffn_cuda_signature_t &s = sh.signature;
    const uint32_t tiles = few_parts(s.experts, FEW_ROUTE_EXPERTS);
    const uint32_t expert = block % tiles * FEW_ROUTE_EXPERTS;
    const uint32_t first = block / tiles * FEW_ROUTE_ROWS;
    if (first >= rows)
        return;
    const char *router = (const char *)lane_layer(lane)->router;
    if (s.router_dtype == FFN_CUDA_F32)
        few_logits<T, 3>(lane, s, router, expert, first, rows, sh.part[threadIdx.x / 32]);
    else
        few_logits<T, 1>(lane, s, router, expert, first, rows, sh.part[threadIdx.x / 32]);
    __syncthreads();
    const uint32_t l = threadIdx.x % 32, i = threadIdx.x / 32;
    const uint32_t e = expert + few_sum_weight(i % 4, l), row = first + few_sum_row(i / 4, i % 4, l);
    float sum = 0.0f;
#pragma unroll
    for (uint32_t w = 0; w < FEW_ROUTE_WARPS; w++)
        sum += sh.part[w][threadIdx.x];
    if (e < s.experts && row < rows)
        logits[(uint64_t)row * s.experts + e] = sum;
}

// One block, after all logits: chooses, and writes what ffn_bulk_plan() and ffn_bulk_place() write.
static __device__ __forceinline__ void few_choose(few_route_t &sh, const ffn_cuda_lane_t *lane,
                                                  uint32_t rows, const float *logits)
{
    const ffn_cuda_workspace_t &w = lane->workspace;
    const ffn_cuda_signature_t &s = sh.signature;
    const uint32_t thread = threadIdx.x, warp = thread / 32, l = thread % 32;
    const float *bias = lane_layer(lane)->bias;
    sh.count[thread] = 0;
    __syncthreads();
    for (uint32_t row = warp; s.experts && row < rows; row += FEW_ROUTE_WARPS) {
        uint32_t expert, rank = 0;
        float weight;
        for (uint32_t e = l; e < s.experts; e += 32)
            sh.logits[warp][e] = __ldcg(logits + (uint64_t)row * s.experts + e);
        __syncwarp();
        route_row(s, sh.logits[warp], bias, &expert, &weight);
        __syncwarp();
        // Ascending by expert: the order in which the sum is taken.
        for (uint32_t i = 0; i < s.top_k; i++)
            rank += __shfl_sync(ROUTE_ALL, expert, i) < expert;
        if (l < s.top_k) {
            const uint32_t at = row * s.top_k + rank;
            w.chosen[at] = expert;
            w.weights[at] = weight;
            sh.pair[at] = few_pair_pack(expert, atomicAdd(&sh.count[expert], 1));
        }
    }
    __syncthreads();
    const uint32_t count = sh.count[thread], own = few_count_pack(count);
    const uint32_t distinct = __syncthreads_count(count != 0);
    ffn_cuda_usage_expert(lane_layer(lane)->usage, thread, count);
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
    for (uint32_t i = 0; i < FEW_ROUTE_WARPS; i++) {
        sum += i < warp ? sh.warp_sum[i] : 0;
        all += sh.warp_sum[i];
    }
    few_tiles_write(w.tiles, thread, count, sum - own);
    sh.count[thread] = (sum - own) & 0xffff;
    const uint32_t routed = all >> 16;
    const uint32_t width = s.experts ? s.shared_intermediate : s.intermediate;
    const uint32_t last = width ? few_parts(rows, FEW_TILE_ROWS) : 0;
    if (thread < last)
        w.tiles[routed + thread] = {s.experts, thread * FEW_TILE_ROWS,
                                    min(FEW_TILE_ROWS, rows - thread * FEW_TILE_ROWS), 0};
    if (thread == 0) {
        w.tile_count[0] = routed;
        w.tile_count[1] = last;
        ffn_cuda_usage_execution(lane_layer(lane)->usage, rows, distinct);
    }
    __syncthreads();
    for (uint32_t pair = thread; s.experts && pair < rows * s.top_k; pair += FEW_ROUTE_THREADS) {
        const uint32_t at = sh.count[few_pair_expert(sh.pair[pair])] + few_pair_place(sh.pair[pair]);
        w.row_ids[at] = pair / s.top_k;
        w.pair_at[pair] = at;
    }
}

// A block for 16 experts by 32 rows. The logits lie where down will write: nobody needs that yet.
extern "C" __global__ void __launch_bounds__(FEW_ROUTE_THREADS) ffn_few_route(
    const ffn_cuda_lane_t *lane)
{
    __shared__ few_route_t sh;
    const uint32_t rows = min(lane->rows, FEW_ROWS_MOST);
    float *logits = lane->workspace.products;
    if (threadIdx.x < sizeof(sh.signature) / 4)
        ((uint32_t *)&sh.signature)[threadIdx.x] =
            ((const uint32_t *)lane_layer(lane)->signature)[threadIdx.x];
    __syncthreads();
    if (sh.signature.experts && sh.signature.dtype == FFN_CUDA_BF16)
        few_logits_block<__nv_bfloat16>(sh, lane, blockIdx.x, rows, logits);
    else if (sh.signature.experts)
        few_logits_block<__half>(sh, lane, blockIdx.x, rows, logits);
    __threadfence();
    __syncthreads();
    uint32_t *arrived = &lane->workspace.tile_count[2];
    if (threadIdx.x == 0) {
        sh.last = atomicAdd(arrived, 1) + 1 == gridDim.x;
        __threadfence();
        if (sh.last)
            *arrived = 0; // the next launch begins after this one's end
    }
    __syncthreads();
    if (sh.last)
        few_choose(sh, lane, rows, logits);
}

// ---- products ----------------------------------------------------------------------------------------
// An item with the addresses of this lane's chunks.
struct few_source_t {
    few_item_t item;
    ffn_cuda_tile_t tile;
    const char *weights[4];
    const char *rows[FEW_TILE_ROWS / 8];
    uint32_t have; // bits: 0 to 3 weight rows that exist, 4 and up rows of input
};

static __device__ __forceinline__ void few_row_copy(uint32_t to, const void *from, uint32_t bytes)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}

static __device__ __forceinline__ few_source_t few_source_at(const few_plan_t &p,
                                                             const ffn_cuda_lane_t *lane,
                                                             const ffn_cuda_part_t *parts,
                                                             uint32_t number)
{
    const uint32_t l = threadIdx.x % 32;
    few_source_t source;
    source.item = few_item_at(&p, number);
    source.tile = lane->workspace.tiles[source.item.tile];
    source.have = 0;
    const ffn_cuda_part_t part = parts[source.tile.part];
    const uint64_t pitch = (uint64_t)source.item.depth * 2;
#pragma unroll
    for (uint32_t which = 0; which < 4; which++) {
        const uint32_t row = few_weight_row(&p, &source.item, which, l);
        const void *matrix = p.down ? part.down : which < 2 ? part.gate : part.up;
        source.weights[which] = (const char *)matrix + row * pitch;
        source.have |= row < source.item.limit ? 1u << which : 0;
    }
#pragma unroll
    for (uint32_t n = 0; n < FEW_TILE_ROWS / 8; n++) {
        const uint32_t row = few_input_row(n, l);
        source.rows[n] = NULL;
        if (row >= source.tile.rows)
            continue;
        source.have |= 16u << n;
        if (p.down)
            source.rows[n] = (const char *)lane->workspace.activations +
                             few_activation_at(&p, &source.item, source.tile.first, row, 0) * 2;
        else
            source.rows[n] = (const char *)lane->input +
                             (source.item.last ? source.tile.first + row
                                               : lane->workspace.row_ids[source.tile.first + row]) *
                                 pitch;
    }
    return source;
}

// Starts the copies of the slot whose first step is `step`, as one group also past the end, where there
// is nothing. A row's pieces follow each other: memory gives neighbours for less than it gives strangers.
template <uint32_t TILES>
static __device__ __forceinline__ void few_slot_copy(const few_source_t &source, uint32_t to,
                                                     uint32_t step, uint64_t policy)
{
    const uint32_t l = threadIdx.x % 32;
#pragma unroll
    for (uint32_t which = 0; which < 4 + TILES; which++)
#pragma unroll
        for (uint32_t i = 0; i < FEW_SLOT_STEPS; i++) {
            const uint32_t at = few_chunk_at(step + i, l);
            const uint32_t bytes = at < source.item.depth ? 16 : 0; // past the depth: zeros
            const uint32_t chunk = to + few_slot_at(i, which, TILES, l);
            if (!(source.have >> which & 1) || (step + i) * FEW_STEP_DEPTH >= source.item.depth)
                continue;
            if (which < 4)
                ptx_copy_sixteen(chunk, source.weights[which] + (bytes ? at * 2 : 0), bytes, policy);
            else
                few_row_copy(chunk, source.rows[which - 4] + (bytes ? at * 2 : 0), bytes);
        }
    ptx_copies_commit();
}

// Reads what this lane has copied, and multiplies.
template <typename T, uint32_t TILES>
static __device__ __forceinline__ void few_slot_multiply(const few_source_t &source,
                                                         const unsigned char *slot, uint32_t step,
                                                         float (&low)[TILES][4],
                                                         float (&high)[TILES][4])
{
    const uint32_t l = threadIdx.x % 32;
    __syncwarp(); // the tensor cores take all lanes at once
#pragma unroll
    for (uint32_t i = 0; i < FEW_SLOT_STEPS; i++) {
        uint4 a[4], x[TILES];
        if ((step + i) * FEW_STEP_DEPTH >= source.item.depth)
            break;
#pragma unroll
        for (uint32_t which = 0; which < 4; which++)
            a[which] = *(const uint4 *)(slot + few_slot_at(i, which, TILES, l));
#pragma unroll
        for (uint32_t n = 0; n < TILES; n++)
            x[n] = *(const uint4 *)(slot + few_slot_at(i, 4 + n, TILES, l));
#pragma unroll
        for (uint32_t n = 0; n < TILES; n++) {
            ptx_mma<T>(low[n], a[0].x, a[1].x, a[0].y, a[1].y, x[n].x, x[n].y);
            ptx_mma<T>(high[n], a[2].x, a[3].x, a[2].y, a[3].y, x[n].x, x[n].y);
            ptx_mma<T>(low[n], a[0].z, a[1].z, a[0].w, a[1].w, x[n].z, x[n].w);
            ptx_mma<T>(high[n], a[2].z, a[3].z, a[2].w, a[3].w, x[n].z, x[n].w);
        }
    }
}

template <typename T, uint32_t TILES>
static __device__ __forceinline__ void few_store(const few_plan_t &p, const ffn_cuda_lane_t *lane,
                                                 const few_source_t &source, uint32_t activation,
                                                 const float (&low)[TILES][4],
                                                 const float (&high)[TILES][4])
{
    const uint32_t l = threadIdx.x % 32;
    const few_item_t &item = source.item;
#pragma unroll
    for (uint32_t n = 0; n < TILES; n++)
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            const uint32_t row = few_sum_row(n, i, l);
            const uint32_t weight_row = item.column + few_sum_weight(i, l);
            if (row >= source.tile.rows)
                continue;
            if (p.down) {
                const uint64_t at = few_product_at(&p, &item, source.tile.first, row, weight_row);
                if (weight_row < item.limit)
                    lane->workspace.products[at] = low[n][i];
                if (weight_row + FEW_HALF_ROWS < item.limit)
                    lane->workspace.products[at + FEW_HALF_ROWS] = high[n][i];
            } else if (weight_row < item.limit) {
                ((T *)lane->workspace.activations)[few_activation_at(
                    &p, &item, source.tile.first, row, weight_row)] =
                    ptx_from_float<T>(ptx_activate(activation, low[n][i], high[n][i]));
            }
        }
}

// One item; meanwhile `next` is looked up, if there is one. ring: of this warp.
template <typename T, uint32_t TILES>
static __device__ __forceinline__ few_source_t
few_item_run(const few_plan_t &p, const ffn_cuda_lane_t *lane, const ffn_cuda_part_t *parts,
             uint32_t activation, const few_source_t &source, uint32_t next, unsigned char *ring,
             uint64_t policy)
{
    constexpr uint32_t SLOTS = FEW_SLOTS(TILES);
    constexpr uint32_t SLOT_BYTES = FEW_SLOT_BYTES(TILES);
    static_assert(SLOTS >= 2, "one slot is copied while another one is used");
    const uint32_t at = ptx_shared(ring);
    const uint32_t steps = few_parts(source.item.depth, FEW_STEP_DEPTH);
    float low[TILES][4] = {}, high[TILES][4] = {};
#pragma unroll
    for (uint32_t i = 0; i < SLOTS - 1; i++)
        few_slot_copy<TILES>(source, at + i * SLOT_BYTES, i * FEW_SLOT_STEPS, policy);
    uint32_t ahead = SLOTS - 1; // the slot that is copied next
    const few_source_t after = next < p.items ? few_source_at(p, lane, parts, next) : source;
    uint32_t slot = 0;
#pragma unroll 1
    for (uint32_t step = 0; step < steps; step += FEW_SLOT_STEPS) {
        ptx_copies_wait<SLOTS - 2>();
        // Into the slot of the turn before, whose values this lane has used.
        few_slot_copy<TILES>(source, at + ahead * SLOT_BYTES, step + (SLOTS - 1) * FEW_SLOT_STEPS,
                             policy);
        few_slot_multiply<T, TILES>(source, ring + slot * SLOT_BYTES, step, low, high);
        ahead = ahead + 1 == SLOTS ? 0 : ahead + 1;
        slot = slot + 1 == SLOTS ? 0 : slot + 1;
    }
    few_store<T, TILES>(p, lane, source, activation, low, high);
    return after;
}

template <typename T>
static __device__ __forceinline__ void few(const ffn_cuda_lane_t *lane, uint32_t down)
{
    extern __shared__ __align__(128) unsigned char memory[];
    const ffn_cuda_layer_t *layer = lane_layer(lane);
    const uint32_t rows = min(lane->rows, FEW_ROWS_MOST), warp = threadIdx.x / 32;
    const few_plan_t p = few_plan_make(layer->signature, rows, lane->workspace.tile_count, down);
    const ffn_cuda_part_t *parts = layer->parts;
    const uint32_t act = layer->signature->activation;
    const uint64_t policy = ptx_policy_stream();
    unsigned char *ring = memory + warp * FEW_RING_BYTES;
    uint32_t number = few_first_item(blockIdx.x, gridDim.x, warp);
    if (number >= p.items)
        return;
    few_source_t at = few_source_at(p, lane, parts, number);
    while (number < p.items) {
        number += FEW_WARPS * gridDim.x;
        // All lanes of a warp have the same tile.
        switch (few_parts(at.tile.rows, 8)) {
        case 0:
        case 1:
            at = few_item_run<T, 1>(p, lane, parts, act, at, number, ring, policy);
            break;
        case 2:
            at = few_item_run<T, 2>(p, lane, parts, act, at, number, ring, policy);
            break;
        case 3:
            at = few_item_run<T, 3>(p, lane, parts, act, at, number, ring, policy);
            break;
        default:
            at = few_item_run<T, 4>(p, lane, parts, act, at, number, ring, policy);
            break;
        }
    }
}

extern "C" __global__ void __launch_bounds__(FEW_THREADS, 1)
    ffn_few_bf16(const ffn_cuda_lane_t *lane, uint32_t down)
{
    few<__nv_bfloat16>(lane, down);
}
extern "C" __global__ void __launch_bounds__(FEW_THREADS, 1)
    ffn_few_f16(const ffn_cuda_lane_t *lane, uint32_t down)
{
    few<__half>(lane, down);
}
