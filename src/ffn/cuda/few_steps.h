/* SPDX-License-Identifier: MIT */
/*
 * Products of up to FEW_ROWS_MOST rows with the experts that they chose, one to a few rows an
 * expert: which warp does what, where its lanes read and write. One source for C and CUDA: few.cu
 * computes with it, tests/unit/ffn/test_cuda_few.c follows every lane on the host.
 *
 * An *item* is a tile (up to FEW_TILE_ROWS rows of one part) and 32 weight rows: 16 of gate with
 * the same 16 of up, or 32 of down. A warp does an item alone, over the whole inner dimension, so
 * the order of a sum depends on the shape only. Weights are the A side of the tensor cores' 16 x 8
 * x 16 product, rows of input its B side, 8 at a time.
 *
 * A lane copies 16 bytes of each of its weight rows and input rows a step, and reads back nothing
 * but what it copied itself: the ring of a warp needs no barrier. Lane l holds weight rows l / 4
 * and l / 4 + 8 of both halves and input row l / 4 of each eight, elements (l % 4) * 8 to + 8 of a
 * step: the tensor cores' four K pairs of two products. Which K is which does not matter, as long
 * as both sides agree.
 */
#ifndef XPOOL_FFN_CUDA_FEW_STEPS_H
#define XPOOL_FFN_CUDA_FEW_STEPS_H

#include "base/protocol_atomics.h"
#include "ffn/cuda/few_shape.h"
#include "ffn/cuda/tables.h"

/* What one launch does; the same for all its warps. */
typedef struct few_plan {
    uint32_t routed, last; /* tiles of routed pairs; of the shared part or the dense one */
    uint32_t routed_blocks, last_blocks; /* items of such a tile */
    uint32_t items;
    uint32_t down, intermediate, last_width, hidden;
    uint64_t pairs;
} few_plan_t;

PROTOCOL_FUNCTION uint32_t few_parts(uint32_t whole, uint32_t part)
{
    return (whole + part - 1) / part;
}

/* tile_count: of the workspace. */
PROTOCOL_FUNCTION few_plan_t few_plan_make(const ffn_cuda_signature_t *s, uint32_t rows,
                                           const uint32_t *tile_count, uint32_t down)
{
    few_plan_t p;
    const uint32_t per = down ? 2 * FEW_HALF_ROWS : FEW_HALF_ROWS;
    p.down = down;
    p.intermediate = s->intermediate;
    p.last_width = s->experts ? s->shared_intermediate : s->intermediate;
    p.hidden = s->hidden;
    p.pairs = s->experts ? (uint64_t)rows * s->top_k : 0;
    p.routed = tile_count[0];
    p.last = tile_count[1];
    p.routed_blocks = few_parts(down ? s->hidden : p.intermediate, per);
    p.last_blocks = few_parts(down ? s->hidden : p.last_width, per);
    p.items = p.routed * p.routed_blocks + p.last * p.last_blocks;
    return p;
}

typedef struct few_item {
    uint32_t tile;   /* its number in the workspace's tiles */
    uint32_t column; /* first weight row of each half; of down the second half follows the first */
    uint32_t last;   /* of the shared part, or dense */
    uint32_t limit;  /* weight rows that exist */
    uint32_t depth;  /* inner dimension */
    uint32_t width;  /* of the part's activations */
} few_item_t;

/* number < items. Routed: one tile's items follow each other. Shared or dense: all tiles of the
 * same weights do, so that memory is read once. */
PROTOCOL_FUNCTION few_item_t few_item_at(const few_plan_t *p, uint32_t number)
{
    few_item_t item;
    uint32_t block;
    item.last = number >= p->routed * p->routed_blocks;
    if (item.last) {
        const uint32_t inside = number - p->routed * p->routed_blocks;
        item.tile = p->routed + inside % p->last;
        block = inside / p->last;
    } else {
        item.tile = number / p->routed_blocks;
        block = number % p->routed_blocks;
    }
    item.column = block * (p->down ? 2 * FEW_HALF_ROWS : FEW_HALF_ROWS);
    item.width = item.last ? p->last_width : p->intermediate;
    item.limit = p->down ? p->hidden : item.width;
    item.depth = p->down ? item.width : p->hidden;
    return item;
}

/* The item of this warp's n-th turn is n * warps of the grid further. Neighbouring numbers are on
 * different multiprocessors, so that what is left over at the end is spread over all. */
PROTOCOL_FUNCTION uint32_t few_first_item(uint32_t block, uint32_t blocks, uint32_t warp)
{
    return warp * blocks + block;
}

/* Row of weights that chunk `which` (0 to 3) of a step holds for that lane: 0 and 1 of the lower
 * half, 2 and 3 of the upper one. For gate and up the halves are matrices, for down rows of one. */
PROTOCOL_FUNCTION uint32_t few_weight_row(const few_plan_t *p, const few_item_t *item,
                                          uint32_t which, uint32_t lane)
{
    return item->column + which % 2 * 8 + lane / 4 + (p->down && which >= 2 ? FEW_HALF_ROWS : 0);
}

/* First element of the lane's chunk in that step; past the depth there are zeros. */
PROTOCOL_FUNCTION uint32_t few_chunk_at(uint32_t step, uint32_t lane)
{
    return step * FEW_STEP_DEPTH + lane % 4 * 8;
}

/* Input row of the tile that chunk n of a step holds for that lane. */
PROTOCOL_FUNCTION uint32_t few_input_row(uint32_t n, uint32_t lane)
{
    return n * 8 + lane / 4;
}

/* Bytes from the start of a warp's slot to the lane's 16; `which` counts weights, then rows. */
PROTOCOL_FUNCTION uint32_t few_slot_at(uint32_t step, uint32_t which, uint32_t tiles, uint32_t lane)
{
    return (step * (4 + tiles) + which) * FEW_CHUNK_BYTES + lane * 16;
}

/* Of the i-th of the lane's four sums of a half: its weight row, after `column` of that half, and
 * its row of the tile, in the n-th eight. */
PROTOCOL_FUNCTION uint32_t few_sum_weight(uint32_t i, uint32_t lane)
{
    return i / 2 * 8 + lane / 4;
}
PROTOCOL_FUNCTION uint32_t few_sum_row(uint32_t n, uint32_t i, uint32_t lane)
{
    return n * 8 + lane % 4 * 2 + i % 2;
}

/* Where gate's result of a row goes, and down's; first: of the tile. Elements. */
PROTOCOL_FUNCTION uint64_t few_activation_at(const few_plan_t *p, const few_item_t *item,
                                             uint64_t first, uint32_t row, uint32_t weight_row)
{
    return (item->last ? p->pairs * p->intermediate : 0) + (first + row) * item->width + weight_row;
}
PROTOCOL_FUNCTION uint64_t few_product_at(const few_plan_t *p, const few_item_t *item,
                                          uint64_t first, uint32_t row, uint32_t column)
{
    return ((item->last ? p->pairs : 0) + first + row) * p->hidden + column;
}

/* ---- the plan ----------------------------------------------------------------------------------
 */
/* A pair while it is placed: its expert, and its place among those of that expert. */
PROTOCOL_FUNCTION uint16_t few_pair_pack(uint32_t expert, uint32_t place)
{
    return (uint16_t)(expert * FEW_ROWS_MOST + place);
}
PROTOCOL_FUNCTION uint32_t few_pair_expert(uint16_t pair)
{
    return pair / FEW_ROWS_MOST;
}
PROTOCOL_FUNCTION uint32_t few_pair_place(uint16_t pair)
{
    return pair % FEW_ROWS_MOST;
}

/* Pairs below, tiles above: one sum over the experts gives both. */
PROTOCOL_FUNCTION uint32_t few_count_pack(uint32_t pairs)
{
    return few_parts(pairs, FEW_TILE_ROWS) << 16 | pairs;
}

/* The tiles of one expert; before: sum of few_count_pack() over those before it. */
PROTOCOL_FUNCTION void few_tiles_write(ffn_cuda_tile_t *tiles, uint32_t expert, uint32_t pairs,
                                       uint32_t before)
{
    for (uint32_t done = 0; done < pairs; done += FEW_TILE_ROWS) {
        ffn_cuda_tile_t tile;
        tile.part = expert;
        tile.first = (before & 0xffff) + done;
        tile.rows = pairs - done < FEW_TILE_ROWS ? pairs - done : FEW_TILE_ROWS;
        tile.acted = 0;
        tiles[(before >> 16) + done / FEW_TILE_ROWS] = tile;
    }
}
#endif
