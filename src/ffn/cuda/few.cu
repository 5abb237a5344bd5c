// SPDX-License-Identifier: MIT
// A layer of up to FEW_ROWS_MOST rows, which is a matter of streaming the chosen experts' weights once:
// router and plan, gate and up with the activation, down. ffn_bulk_reduce() sums the pairs. Same
// workspace and same results, but for rounding, as the grouped products (grouped.cu), whose tiles of 128
// rows and 256 weight rows are too coarse here.
//
// Warps are on their own: each takes items (few_steps.h) in turn and keeps a ring of copies under way;
// nothing meets within a launch but the router's blocks (few_route.cuh). Launches never wait
// for others.
#include "ffn/cuda/few_route.cuh"

extern "C" __global__ void __launch_bounds__(FEW_ROUTE_THREADS) ffn_few_route(
    const ffn_cuda_lane_t *lane)
{
    __shared__ few_route_t sh;
    few_route(sh, lane);
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
