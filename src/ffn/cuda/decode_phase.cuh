// SPDX-License-Identifier: MIT
// The decode kernel's shared memory, and how a layer's work is divided: shares of blocks, panels of
// tiles, chunks of the inner dimension, and the order in which a block goes through them. Included by
// decode.cu alone, which says what the phases are.
#ifndef XPOOL_FFN_CUDA_DECODE_PHASE_CUH
#define XPOOL_FFN_CUDA_DECODE_PHASE_CUH

#include "ffn/cuda/decode_shape.h"
#include "ffn/cuda/dispatch_steps.h"
#include "ffn/cuda/ptx.cuh"

// What a layer's execution needs, in shared memory; written by thread 0 between two block barriers.
struct decode_call_t {
    const ffn_cuda_layer_t *layer;
    const ffn_cuda_part_t *parts;
    const void *input;
    void *output;
    float *partial;
    float *logits;
    char *activations;
    uint64_t pitch;
    ffn_cuda_meeting_t *meeting;
    uint64_t routed_target, acted_target;
    uint64_t *answer, *answered;
    uint64_t answer_value, sequence;
    uint64_t *done;
    uint64_t done_value, began_ns;
    const ffn_cuda_answer_t *about;
    uint32_t rows, order;
    uint32_t experts_chosen; // parts of `intermediate` width
    uint32_t last_width;     // width of the dense or shared part; 0 = none
    uint32_t leave;
    uint32_t share[2][2];             // of each phase: begin, end
    uint32_t (*cycles)[FFN_CUDA_MAX_BLOCKS];
    uint32_t down_began; // clock
};

struct decode_shared_t {
    unsigned char ring[DECODE_STAGES][DECODE_TILE][DECODE_PITCH];
    unsigned char rows[DECODE_ROW_BUFFERS][DECODE_PITCH];
    float sums[DECODE_WARPS][8][32];
    const char *row_at[DECODE_PANEL_TILES][DECODE_TILE];
    uint64_t full[DECODE_STAGES], empty[DECODE_STAGES];
    uint64_t rows_full[DECODE_ROW_SLOTS], rows_empty[DECODE_ROW_SLOTS];
    uint32_t expert_mask[FFN_CUDA_MAX_EXPERTS];
    float weight[FFN_CUDA_DECODE_ROWS][FFN_CUDA_MAX_TOP_K];
    uint16_t chosen[FFN_CUDA_DECODE_ROWS][FFN_CUDA_MAX_TOP_K];
    uint16_t part_of[FFN_CUDA_MAX_EXPERTS + 1], mask_of[FFN_CUDA_MAX_EXPERTS + 1];
    ffn_cuda_signature_t signature;
    decode_call_t call;
    const ffn_cuda_layer_t *ahead; // the layer whose first stages are in the ring, or NULL
    uint32_t ahead_stages;
    uint32_t ahead_order; // order_key() of its stages
};
static_assert(sizeof(decode_shared_t) <= DECODE_SHARED_BYTES, "DECODE_SHARED_BYTES is too small");

// A block's share of a phase.
struct decode_phase_t {
    uint32_t first, count;        // pairs of rows, or output columns
    uint32_t tile_rows;           // of these in a tile: 8 pairs or 16 columns
    uint32_t panels, panel_tiles; // tiles whose sums are held at once
    uint32_t split;               // warps that share a tile, by chunks
    uint32_t parts;               // sections of the inner dimension
    uint32_t chunk;               // elements of a step
    uint32_t group, side;         // chunks in a row, and tiles side by side, in the order of stages
};

static __device__ __forceinline__ void consumers_meet()
{
    asm volatile("bar.sync 1, %0;" ::"n"(DECODE_WARPS * 32) : "memory");
}

static __device__ __forceinline__ void copiers_meet()
{
    asm volatile("bar.sync 2, %0;" ::"n"(DECODE_COPY_WARPS * 32) : "memory");
}

static __device__ __forceinline__ uint32_t ceil_div(uint32_t a, uint32_t b)
{
    return (a + b - 1) / b;
}

static __device__ __forceinline__ uint32_t slot_rows(uint32_t rows)
{
    return rows <= 4 ? 4 : (rows <= 8 ? 8 : 16);
}

// This block's number among those that share the work: its multiprocessor's where there is a block on
// each, since what a multiprocessor gets of the memory's rate is its own.
static __device__ __forceinline__ uint32_t block_number()
{
    uint32_t number, count;
    asm("mov.u32 %0, %%smid;" : "=r"(number));
    asm("mov.u32 %0, %%nsmid;" : "=r"(count));
    return count == gridDim.x ? number : blockIdx.x;
}

static __device__ __forceinline__ void phase_share(decode_phase_t *p, uint32_t total,
                                                   const uint32_t (&share)[2])
{
    p->first = (uint32_t)((uint64_t)total * share[0] / FFN_CUDA_SHARE_ONE);
    p->count = (uint32_t)((uint64_t)total * share[1] / FFN_CUDA_SHARE_ONE) - p->first;
    const uint32_t tiles = ceil_div(p->count, p->tile_rows);
    p->panels = ceil_div(tiles, DECODE_PANEL_TILES);
    p->panel_tiles = p->panels ? ceil_div(tiles, p->panels) : 0;
}

// The same for all blocks, whatever their shares are.
static __device__ __forceinline__ uint32_t phase_most_tiles(const decode_phase_t &p, uint32_t total)
{
    return ceil_div(DECODE_SHARE_MOST(ceil_div(total, gridDim.x)), p.tile_rows);
}

// A row of gate is read chunk by chunk. With one chunk of all tiles after the other, its next kilobyte
// comes after those of all the block's other rows, tens of megabytes later over the whole device, and
// every kilobyte opens a memory page of its own. With `group` chunks of `side` tiles at a time it comes
// a few kilobytes later. The chunks of the rows stay in their slots until all tiles have used them; half
// of the slots are the next group's. Every tile still adds its chunks in ascending order.
static __device__ __forceinline__ void phase_order(decode_phase_t *p, uint32_t order, uint32_t rows,
                                                   uint32_t hidden)
{
    const uint32_t most = DECODE_ROW_BUFFERS / slot_rows(rows) / 2;
    const uint32_t chunks = ceil_div(hidden, p->chunk);
    p->group = 1;
    p->side = DECODE_PANEL_TILES;
    if (order == 0 || p->split > 1 || most < 2)
        return;
    p->group = ceil_div(chunks, ceil_div(chunks, most));
    p->side = 1u << (31 - __clz(min(order, DECODE_WARPS))); // a power of two: it divides DECODE_WARPS
}

// Two phases of one layer have the same stages when their keys are equal.
static __device__ __forceinline__ uint32_t order_key(const decode_phase_t &p)
{
    return p.group << 8 | p.side;
}

static __device__ __forceinline__ decode_phase_t phase_gate(const ffn_cuda_signature_t &s,
                                                            uint32_t experts_chosen,
                                                            uint32_t last_width,
                                                            const uint32_t (&share)[2],
                                                            uint32_t order, uint32_t rows)
{
    const uint32_t total = experts_chosen * s.intermediate + last_width;
    decode_phase_t p;
    p.tile_rows = DECODE_TILE / 2;
    phase_share(&p, total, share);
    p.parts = 1;
    p.chunk = DECODE_CHUNK;
    // The split must not depend on what was chosen: the order of a row's sum would.
    p.split = s.experts ? 1 : DECODE_WARPS / max(1u, phase_most_tiles(p, total));
    p.split = max(1u, min(p.split, ceil_div(s.hidden, p.chunk)));
    phase_order(&p, s.experts ? 0 : order, rows, s.hidden);
    return p;
}

static __device__ __forceinline__ decode_phase_t phase_down(const ffn_cuda_signature_t &s,
                                                            uint32_t experts_chosen,
                                                            uint32_t last_width,
                                                            const uint32_t (&share)[2])
{
    decode_phase_t p;
    p.tile_rows = DECODE_TILE;
    phase_share(&p, s.hidden, share);
    p.parts = experts_chosen + (last_width != 0);
    p.split = max(1u, DECODE_WARPS / max(1u, phase_most_tiles(p, s.hidden)));
    // Small parts are cut so that several warps share them, but not below what a copy is worth.
    p.chunk = DECODE_CHUNK;
    if (s.experts) {
        const uint32_t pieces = ceil_div(s.intermediate, DECODE_CHUNK_LEAST);
        p.chunk = ceil_div(s.intermediate, min(pieces, p.split));
        p.chunk = min(DECODE_CHUNK, (p.chunk + 31) / 32 * 32);
    }
    p.split = min(p.split, ceil_div(s.experts ? s.intermediate : last_width, p.chunk));
    phase_order(&p, 0, 1, s.hidden);
    return p;
}

static __device__ __forceinline__ uint32_t phase_part_width(const ffn_cuda_signature_t &s,
                                                            const decode_call_t &call, bool down,
                                                            uint32_t part)
{
    if (!down)
        return s.hidden;
    return part < call.experts_chosen ? s.intermediate : call.last_width;
}

static __device__ __forceinline__ uint32_t panel_tiles(const decode_phase_t &p, uint32_t panel)
{
    const uint32_t tiles = ceil_div(p.count, p.tile_rows), before = panel * p.panel_tiles;
    return before >= tiles ? 0 : min(p.panel_tiles, tiles - before);
}
#endif
