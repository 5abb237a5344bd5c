// SPDX-License-Identifier: MIT
// Products of few rows (few.cu): a warp's items of gate and up, or of down. Warps are on their own: each
// takes items (few_steps.h) in turn and keeps a ring of copies under way.
#ifndef XPOOL_FFN_CUDA_FEW_PRODUCTS_CUH
#define XPOOL_FFN_CUDA_FEW_PRODUCTS_CUH

#include "ffn/cuda/few_steps.h"
#include "ffn/cuda/ptx.cuh"

// What a launch or a command multiplies: the items of one plan after those of the one before.
struct few_stream_t {
    const few_plan_t *plans;
    uint32_t count;   // of plans
    uint32_t meeting; // down comes behind its gate in this stream: it waits for its tile's activations
    const ffn_cuda_workspace_t *workspace;
    const void *input;
    const ffn_cuda_part_t *parts;
    uint32_t activation;
    uint64_t *taken; // NULL: a warp takes each one that is as many further as the grid has warps
};

// An item with the addresses of this lane's chunks.
struct few_source_t {
    few_item_t item;
    ffn_cuda_tile_t tile;
    const char *weights[4];
    const char *rows[FEW_TILE_ROWS / 8];
    uint32_t have;  // bits: 0 to 3 weight rows that exist, 4 and up rows of input
    uint32_t plan;  // of the stream; its `count`: there is no such item
    uint32_t there; // its rows of input are written
};

static __device__ __forceinline__ bool few_acted(const few_stream_t &stream, const few_item_t &item,
                                                 uint32_t down)
{
    return ptx_load_acquire(&stream.workspace->tiles[item.tile].acted) ==
           (item.last ? stream.plans[down - 1].last_blocks : stream.plans[down - 1].routed_blocks);
}

static __device__ __forceinline__ few_source_t few_source_at(const few_stream_t &stream,
                                                             uint32_t number)
{
    const uint32_t l = threadIdx.x % 32;
    const ffn_cuda_workspace_t &w = *stream.workspace;
    few_source_t source = {};
    while (source.plan < stream.count && number >= stream.plans[source.plan].items)
        number -= stream.plans[source.plan++].items;
    if (source.plan == stream.count)
        return source;
    const few_plan_t &p = stream.plans[source.plan];
    source.item = few_item_at(&p, number);
    const uint4 tile = ptx_load_l2(w.tiles + source.item.tile);
    source.tile = {tile.x, tile.y, tile.z, 0};
    const ffn_cuda_part_t part = stream.parts[source.tile.part];
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
        if (row >= source.tile.rows)
            continue;
        source.have |= 16u << n;
        if (p.down)
            source.rows[n] = (const char *)w.activations +
                             few_activation_at(&p, &source.item, source.tile.first, row, 0) * 2;
        else
            source.rows[n] = (const char *)stream.input +
                             (source.item.last ? source.tile.first + row
                                               : __ldcg(w.row_ids + source.tile.first + row)) *
                                 pitch;
    }
    source.there = !stream.meeting || !p.down ||
                   __ballot_sync(0xffffffffu, few_acted(stream, source.item, source.plan)) ==
                       0xffffffffu;
    return source;
}

// The warp's next item. In ascending order: what an item waits for has been taken before.
static __device__ __forceinline__ uint32_t few_take(const few_stream_t &stream, uint32_t number)
{
    const uint32_t warps = FEW_WARPS * gridDim.x;
    if (!stream.taken)
        return number + warps;
    uint32_t taken = 0;
    if (threadIdx.x % 32 == 0)
        taken = warps + (uint32_t)ptx_add_answered(stream.taken, 1);
    return __shfl_sync(0xffffffffu, taken, 0);
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
static __device__ __forceinline__ void few_store(const few_stream_t &stream,
                                                 const few_source_t &source,
                                                 const float (&low)[TILES][4],
                                                 const float (&high)[TILES][4])
{
    const uint32_t l = threadIdx.x % 32;
    const few_plan_t &p = stream.plans[source.plan];
    const ffn_cuda_workspace_t &w = *stream.workspace;
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
                    w.products[at] = low[n][i];
                if (weight_row + FEW_HALF_ROWS < item.limit)
                    w.products[at + FEW_HALF_ROWS] = high[n][i];
            } else if (weight_row < item.limit) {
                ((T *)w.activations)[few_activation_at(&p, &item, source.tile.first, row,
                                                       weight_row)] =
                    ptx_from_float<T>(ptx_activate(stream.activation, low[n][i], high[n][i]));
            }
        }
    if (!stream.meeting || p.down)
        return;
    __syncwarp(); // all lanes' values before the release
    if (l == 0)
        ptx_add_release(&w.tiles[item.tile].acted, 1);
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

// One item; meanwhile the next one is looked up.
template <typename T, uint32_t TILES>
static __device__ __forceinline__ few_source_t few_item_run(const few_stream_t &stream,
                                                            const few_source_t &source,
                                                            uint32_t *number, unsigned char *ring,
                                                            uint64_t policy)
{
    constexpr uint32_t SLOTS = FEW_SLOTS(TILES);
    constexpr uint32_t SLOT_BYTES = FEW_SLOT_BYTES(TILES);
    const uint32_t at = ptx_shared(ring);
    const uint32_t steps = few_parts(source.item.depth, FEW_STEP_DEPTH);
    float low[TILES][4] = {}, high[TILES][4] = {};
    if (source.there) {
        few_item_begin<TILES, FEW_BOTH>(source, ring, policy);
    } else { // the weights depend on nothing
        few_item_begin<TILES, FEW_WEIGHTS>(source, ring, policy);
        while (!few_acted(stream, source.item, source.plan))
            ;
        __syncwarp();
        few_item_begin<TILES, FEW_ROWS>(source, ring, policy);
    }
    uint32_t ahead = SLOTS - 1; // the slot that is copied next
    *number = few_take(stream, *number);
    const few_source_t after = few_source_at(stream, *number);
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
    few_store<T, TILES>(stream, source, low, high);
    return after;
}

// All items of this warp. ring: of this warp.
template <typename T>
static __device__ __forceinline__ void few_items(const few_stream_t &stream, unsigned char *ring,
                                                 uint64_t policy)
{
    uint32_t number = few_first_item(blockIdx.x, gridDim.x, threadIdx.x / 32);
    few_source_t at = few_source_at(stream, number);
    while (at.plan < stream.count) {
        // All lanes of a warp have the same tile.
        switch (few_parts(at.tile.rows, 8)) {
        case 0:
        case 1:
            at = few_item_run<T, 1>(stream, at, &number, ring, policy);
            break;
        case 2:
            at = few_item_run<T, 2>(stream, at, &number, ring, policy);
            break;
        case 3:
            at = few_item_run<T, 3>(stream, at, &number, ring, policy);
            break;
        default:
            at = few_item_run<T, 4>(stream, at, &number, ring, policy);
            break;
        }
    }
}
#endif
