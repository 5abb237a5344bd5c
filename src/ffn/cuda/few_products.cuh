// SPDX-License-Identifier: MIT
// Products of few rows (few.cu): a warp's items of gate and up, or of down. Warps are on their own: each
// takes items (few_steps.h) in turn and keeps a ring of copies under way.
#ifndef XPOOL_FFN_CUDA_FEW_PRODUCTS_CUH
#define XPOOL_FFN_CUDA_FEW_PRODUCTS_CUH

#include "ffn/cuda/few_steps.h"
#include "ffn/cuda/ptx.cuh"

// An item with the addresses of this lane's chunks.
struct few_source_t {
    few_item_t item;
    ffn_cuda_tile_t tile;
    const char *weights[4];
    const char *rows[FEW_TILE_ROWS / 8];
    uint32_t have; // bits: 0 to 3 weight rows that exist, 4 and up rows of input
};

static __device__ __forceinline__ few_source_t few_source_at(const few_plan_t &p,
                                                             const ffn_cuda_lane_t *lane,
                                                             const void *input,
                                                             const ffn_cuda_part_t *parts,
                                                             uint32_t number)
{
    const uint32_t l = threadIdx.x % 32;
    few_source_t source;
    source.item = few_item_at(&p, number);
    const uint4 tile = ptx_load_l2(lane->workspace.tiles + source.item.tile);
    source.tile = {tile.x, tile.y, tile.z, 0};
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
            source.rows[n] =
                (const char *)input +
                (source.item.last ? source.tile.first + row
                                  : __ldcg(lane->workspace.row_ids + source.tile.first + row)) *
                    pitch;
    }
    return source;
}

#define FEW_WEIGHTS 1u // what of a slot is copied
#define FEW_ROWS    2u
#define FEW_BOTH    (FEW_WEIGHTS | FEW_ROWS)

// Starts the copies of the slot whose first step is `step`, as one group also past the end, where there
// is nothing. A row's pieces follow each other: memory gives neighbours for less than it gives strangers.
template <uint32_t TILES, uint32_t WHAT>
static __device__ __forceinline__ void few_slot_copy(const few_source_t &source, uint32_t to,
                                                     uint32_t step, uint64_t policy)
{
    const uint32_t l = threadIdx.x % 32;
#pragma unroll
    for (uint32_t which = WHAT & FEW_WEIGHTS ? 0 : 4; which < (WHAT & FEW_ROWS ? 4 + TILES : 4); which++)
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
                ptx_copy_sixteen(chunk, source.rows[which - 4] + (bytes ? at * 2 : 0), bytes);
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

// Starts the copies of an item's first slots, all but one of the ring. ring: of this warp.
template <uint32_t TILES, uint32_t WHAT>
static __device__ __forceinline__ void few_item_begin(const few_source_t &source, unsigned char *ring,
                                                      uint64_t policy)
{
    static_assert(FEW_SLOTS(TILES) >= 2, "one slot is copied while another one is used");
#pragma unroll
    for (uint32_t i = 0; i < FEW_SLOTS(TILES) - 1; i++)
        few_slot_copy<TILES, WHAT>(source, ptx_shared(ring) + i * FEW_SLOT_BYTES(TILES),
                                   i * FEW_SLOT_STEPS, policy);
}

// One item; meanwhile `next` is looked up, if there is one. begun: its first slots have their weights
// under way already, and nothing else is. activation: of gate.
template <typename T, uint32_t TILES>
static __device__ __forceinline__ few_source_t
few_item_run(const few_plan_t &p, const ffn_cuda_lane_t *lane, const void *input,
             const ffn_cuda_part_t *parts, uint32_t activation, const few_source_t &source,
             uint32_t next, bool begun, unsigned char *ring, uint64_t policy)
{
    constexpr uint32_t SLOTS = FEW_SLOTS(TILES);
    constexpr uint32_t SLOT_BYTES = FEW_SLOT_BYTES(TILES);
    const uint32_t at = ptx_shared(ring);
    const uint32_t steps = few_parts(source.item.depth, FEW_STEP_DEPTH);
    float low[TILES][4] = {}, high[TILES][4] = {};
    if (begun)
        few_item_begin<TILES, FEW_ROWS>(source, ring, policy);
    else
        few_item_begin<TILES, FEW_BOTH>(source, ring, policy);
    uint32_t ahead = SLOTS - 1; // the slot that is copied next
    const few_source_t after =
        next < p.items ? few_source_at(p, lane, input, parts, next) : source;
    uint32_t slot = 0;
#pragma unroll 1
    for (uint32_t step = 0; step < steps; step += FEW_SLOT_STEPS) {
        ptx_copies_wait<SLOTS - 2>();
        // Into the slot of the turn before, whose values this lane has used.
        few_slot_copy<TILES, FEW_BOTH>(source, at + ahead * SLOT_BYTES,
                                       step + (SLOTS - 1) * FEW_SLOT_STEPS, policy);
        few_slot_multiply<T, TILES>(source, ring + slot * SLOT_BYTES, step, low, high);
        ahead = ahead + 1 == SLOTS ? 0 : ahead + 1;
        slot = slot + 1 == SLOTS ? 0 : slot + 1;
    }
    few_store<T, TILES>(p, lane, source, activation, low, high);
    return after;
}

// Weights of the first item, while its rows are not there yet.
static __device__ __forceinline__ void few_weights_begin(const few_source_t &at, unsigned char *ring,
                                                         uint64_t policy)
{
    switch (few_parts(at.tile.rows, 8)) {
    case 0:
    case 1:
        few_item_begin<1, FEW_WEIGHTS>(at, ring, policy);
        break;
    case 2:
        few_item_begin<2, FEW_WEIGHTS>(at, ring, policy);
        break;
    case 3:
        few_item_begin<3, FEW_WEIGHTS>(at, ring, policy);
        break;
    default:
        few_item_begin<4, FEW_WEIGHTS>(at, ring, policy);
        break;
    }
}

// All items of this warp, from `number` on, which `at` describes.
template <typename T>
static __device__ __forceinline__ void
few_items(const few_plan_t &p, const ffn_cuda_lane_t *lane, const void *input,
          const ffn_cuda_part_t *parts, uint32_t activation, few_source_t at, uint32_t number,
          bool begun, unsigned char *ring, uint64_t policy)
{
    while (number < p.items) {
        number += FEW_WARPS * gridDim.x;
        // All lanes of a warp have the same tile.
        switch (few_parts(at.tile.rows, 8)) {
        case 0:
        case 1:
            at = few_item_run<T, 1>(p, lane, input, parts, activation, at, number, begun, ring, policy);
            break;
        case 2:
            at = few_item_run<T, 2>(p, lane, input, parts, activation, at, number, begun, ring, policy);
            break;
        case 3:
            at = few_item_run<T, 3>(p, lane, input, parts, activation, at, number, begun, ring, policy);
            break;
        default:
            at = few_item_run<T, 4>(p, lane, input, parts, activation, at, number, begun, ring, policy);
            break;
        }
        begun = false;
    }
}
#endif
