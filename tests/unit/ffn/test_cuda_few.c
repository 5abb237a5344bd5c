/* SPDX-License-Identifier: MIT */
/*
 * The products of few rows (ffn/cuda/few.cu) followed lane by lane on the host: its own index
 * functions, a product of tensor cores by the layout that the PTX manual gives, and a plain layer
 * of experts as the reference. Whole numbers, so that sums are exact whatever their order.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "ffn/cuda/few_steps.h"

#define LANES      32u
#define CHUNK      8u /* elements of 16 bytes */
#define POISON     1e30f
#define MOST_TILES ((FEW_ROWS_MOST * 32 / FEW_TILE_ROWS) + 512 + 4)

typedef struct layer {
    ffn_cuda_signature_t s;
    uint32_t rows;
    uint32_t *chosen;        /* [rows][top_k], ascending */
    float *gate, *up, *down; /* [parts][width][hidden], [parts][hidden][width] */
    float *input;            /* [rows][hidden] */
    ffn_cuda_tile_t *tiles;
    uint32_t tile_count[2];
    uint32_t *row_ids, *pair_at; /* of pairs */
    float *activations, *products;
} layer_t;

static uint64_t seed;
static uint32_t draw(uint32_t below)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 33) % below;
}

static void *take(uint64_t count, size_t size)
{
    void *memory = calloc(count ? count : 1, size);
    assert_non_null(memory);
    return memory;
}

static uint32_t part_width(const layer_t *l, uint32_t part)
{
    return l->s.experts && part == l->s.experts ? l->s.shared_intermediate : l->s.intermediate;
}

/* Every part has room for the larger width. */
static uint64_t part_room(const layer_t *l)
{
    const uint32_t width =
        l->s.intermediate > l->s.shared_intermediate ? l->s.intermediate : l->s.shared_intermediate;
    return (uint64_t)width * l->s.hidden;
}

static uint64_t layer_pairs(const layer_t *l)
{
    return l->s.experts ? (uint64_t)l->rows * l->s.top_k : 0;
}

static uint64_t activation_room(const layer_t *l)
{
    return layer_pairs(l) * l->s.intermediate +
           (uint64_t)l->rows * (l->s.experts ? l->s.shared_intermediate : l->s.intermediate);
}

static void layer_make(layer_t *l, const ffn_cuda_signature_t *s, uint32_t rows, uint32_t skew)
{
    memset(l, 0, sizeof(*l));
    l->s = *s;
    l->rows = rows;
    const uint64_t room = part_room(l) * (s->experts + 1), pairs = layer_pairs(l);
    l->gate = take(room, sizeof(float));
    l->up = take(room, sizeof(float));
    l->down = take(room, sizeof(float));
    l->input = take((uint64_t)rows * s->hidden, sizeof(float));
    l->chosen = take(pairs, sizeof(uint32_t));
    l->row_ids = take(pairs, sizeof(uint32_t));
    l->pair_at = take(pairs, sizeof(uint32_t));
    l->tiles = take(MOST_TILES, sizeof(ffn_cuda_tile_t));
    l->activations = take(activation_room(l), sizeof(float));
    l->products = take((pairs + rows) * s->hidden, sizeof(float));
    for (uint64_t i = 0; i < room; i++) {
        l->gate[i] = (float)draw(5) - 2;
        l->up[i] = (float)draw(5) - 2;
        l->down[i] = (float)draw(3) - 1;
    }
    for (uint64_t i = 0; i < (uint64_t)rows * s->hidden; i++)
        l->input[i] = (float)draw(5) - 2;
    for (uint64_t i = 0; i < activation_room(l); i++)
        l->activations[i] = POISON;
    for (uint64_t i = 0; i < (pairs + rows) * s->hidden; i++)
        l->products[i] = POISON;
    /* skew: the first experts are chosen more often. */
    for (uint32_t row = 0; s->experts && row < rows; row++) {
        bool taken[FFN_CUDA_MAX_EXPERTS] = {false};
        for (uint32_t i = 0; i < s->top_k; i++) {
            uint32_t e =
                draw(skew && draw(skew) ? (s->top_k * 2 < s->experts ? s->top_k * 2 : s->experts)
                                        : s->experts);
            while (taken[e])
                e = (e + 1) % s->experts;
            taken[e] = true;
        }
        for (uint32_t e = 0, i = 0; e < s->experts; e++)
            if (taken[e])
                l->chosen[row * s->top_k + i++] = e;
    }
}

static void layer_free(layer_t *l)
{
    void *all[] = {l->gate,  l->up,      l->down,    l->input,       l->chosen,
                   l->tiles, l->row_ids, l->pair_at, l->activations, l->products};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
        free(all[i]);
}

/* As few_plan() does it, rows in any order. */
static void layer_plan(layer_t *l)
{
    static uint16_t pair[FEW_ROWS_MOST * FFN_CUDA_MAX_TOP_K];
    static uint32_t order[FEW_ROWS_MOST], count[FFN_CUDA_MAX_EXPERTS], begin[FFN_CUDA_MAX_EXPERTS];
    memset(count, 0, sizeof(count));
    for (uint32_t i = 0; i < l->rows; i++)
        order[i] = i;
    for (uint32_t i = l->rows; i > 1; i--) {
        const uint32_t other = draw(i), kept = order[i - 1];
        order[i - 1] = order[other];
        order[other] = kept;
    }
    for (uint32_t i = 0; l->s.experts && i < l->rows; i++)
        for (uint32_t k = 0; k < l->s.top_k; k++) {
            const uint32_t at = order[i] * l->s.top_k + k, e = l->chosen[at];
            pair[at] = few_pair_pack(e, count[e]++);
        }
    uint32_t sum = 0;
    for (uint32_t e = 0; e < FFN_CUDA_MAX_EXPERTS; e++) {
        few_tiles_write(l->tiles, e, count[e], sum);
        begin[e] = sum & 0xffff;
        sum += few_count_pack(count[e]);
    }
    assert_int_equal(sum & 0xffff, layer_pairs(l));
    l->tile_count[0] = sum >> 16;
    const uint32_t width = l->s.experts ? l->s.shared_intermediate : l->s.intermediate;
    l->tile_count[1] = width ? few_parts(l->rows, FEW_TILE_ROWS) : 0;
    for (uint32_t i = 0; i < l->tile_count[1]; i++) {
        const uint32_t left = l->rows - i * FEW_TILE_ROWS;
        l->tiles[l->tile_count[0] + i] = (ffn_cuda_tile_t){
            l->s.experts, i * FEW_TILE_ROWS, left < FEW_TILE_ROWS ? left : FEW_TILE_ROWS, 0};
    }
    for (uint32_t at = 0; at < layer_pairs(l); at++) {
        const uint32_t place = begin[few_pair_expert(pair[at])] + few_pair_place(pair[at]);
        l->row_ids[place] = at / l->s.top_k;
        l->pair_at[at] = place;
    }
}

/* d (16 x 8) += a (16 x 16) b (16 x 8), each lane with its registers' pairs, by the PTX manual's
 * figures of mma.m16n8k16 with 16-bit elements. */
static void warp_product(float (*d)[4], const float (*a)[4][2], const float (*b)[2][2])
{
    float left[16][16], right[16][8];
    for (uint32_t lane = 0; lane < LANES; lane++) {
        const uint32_t group = lane >> 2, in_group = lane % 4;
        for (uint32_t i = 0; i < 8; i++) {
            const uint32_t row = i < 2 || (i >= 4 && i < 6) ? group : group + 8;
            const uint32_t column = in_group * 2 + (i & 1) + (i >= 4 ? 8 : 0);
            left[row][column] = a[lane][i / 2][i % 2];
        }
        for (uint32_t i = 0; i < 4; i++)
            right[in_group * 2 + (i & 1) + (i >= 2 ? 8 : 0)][group] = b[lane][i / 2][i % 2];
    }
    for (uint32_t lane = 0; lane < LANES; lane++)
        for (uint32_t i = 0; i < 4; i++) {
            const uint32_t row = (lane >> 2) + (i < 2 ? 0 : 8), column = lane % 4 * 2 + (i & 1);
            for (uint32_t k = 0; k < 16; k++)
                d[lane][i] += left[row][k] * right[k][column];
        }
}

/* Elements pair * 2 and + 1 of a chunk: what one 32-bit register holds. */
static void chunk_pair(const float *chunk, uint32_t pair, float out[2])
{
    out[0] = chunk[pair * 2];
    out[1] = chunk[pair * 2 + 1];
}

/* One item by one warp: what each lane copies, what it reads back, where its sums go. */
static void item_run(layer_t *l, const few_plan_t *p, uint32_t number)
{
    static float slot[FEW_SLOT_BYTES(FEW_TILE_ROWS / 8) / 16][CHUNK];
    const uint32_t slot_chunks =
        FEW_SLOT_BYTES(few_parts(l->tiles[few_item_at(p, number).tile].rows, 8)) / 16;
    static float low[FEW_TILE_ROWS / 8][LANES][4], high[FEW_TILE_ROWS / 8][LANES][4];
    const few_item_t item = few_item_at(p, number);
    const ffn_cuda_tile_t tile = l->tiles[item.tile];
    const uint32_t eights = few_parts(tile.rows, 8), steps = few_parts(item.depth, FEW_STEP_DEPTH);
    const uint64_t part_at = part_room(l) * tile.part;
    assert_int_equal(item.width, part_width(l, tile.part));
    assert_in_range(tile.rows, 1, FEW_TILE_ROWS);
    const uint32_t slots = FEW_SLOTS(eights);
    assert_true(slots >= 2 && FEW_SLOT_BYTES(eights) * slots <= FEW_RING_BYTES);
    memset(low, 0, sizeof(low));
    memset(high, 0, sizeof(high));
    for (uint32_t step = 0; step < steps; step++) {
        for (uint32_t i = 0; i < slot_chunks; i++)
            for (uint32_t e = 0; e < CHUNK; e++)
                slot[i][e] = POISON; /* what nobody copied may be anything but counts nowhere */
        for (uint32_t lane = 0; lane < LANES; lane++) {
            const uint32_t k = few_chunk_at(step, lane);
            for (uint32_t which = 0; which < 4 + eights; which++) {
                float *to = slot[few_slot_at(step % FEW_SLOT_STEPS, which, eights, lane) / 16];
                const float *from;
                assert_float_equal(to[0], POISON, 0); /* nobody else's */
                if (which < 4) {
                    const uint32_t row = few_weight_row(p, &item, which, lane);
                    const float *matrix = p->down ? l->down : which < 2 ? l->gate : l->up;
                    if (row >= item.limit)
                        continue;
                    from = matrix + part_at + (uint64_t)row * item.depth + k;
                } else {
                    const uint32_t row = few_input_row(which - 4, lane);
                    if (row >= tile.rows)
                        continue;
                    if (p->down) {
                        from = l->activations + few_activation_at(p, &item, tile.first, row, k);
                    } else {
                        const uint32_t of =
                            item.last ? tile.first + row : l->row_ids[tile.first + row];
                        from = l->input + (uint64_t)of * item.depth + k;
                    }
                }
                for (uint32_t e = 0; e < CHUNK; e++)
                    to[e] = k < item.depth ? from[e] : 0;
            }
        }
        for (uint32_t n = 0; n < eights; n++)
            for (uint32_t half = 0; half < 2; half++)
                for (uint32_t part = 0; part < 2; part++) {
                    float a[LANES][4][2], b[LANES][2][2];
                    for (uint32_t lane = 0; lane < LANES; lane++) {
                        const uint32_t in = step % FEW_SLOT_STEPS;
                        const float *first = slot[few_slot_at(in, half * 2, eights, lane) / 16];
                        const float *second =
                            slot[few_slot_at(in, half * 2 + 1, eights, lane) / 16];
                        const float *x = slot[few_slot_at(in, 4 + n, eights, lane) / 16];
                        /* registers in the order in which few_slot_multiply() names them */
                        chunk_pair(first, part * 2, a[lane][0]);
                        chunk_pair(second, part * 2, a[lane][1]);
                        chunk_pair(first, part * 2 + 1, a[lane][2]);
                        chunk_pair(second, part * 2 + 1, a[lane][3]);
                        chunk_pair(x, part * 2, b[lane][0]);
                        chunk_pair(x, part * 2 + 1, b[lane][1]);
                    }
                    warp_product(half ? high[n] : low[n], a, b);
                }
    }
    for (uint32_t lane = 0; lane < LANES; lane++)
        for (uint32_t n = 0; n < eights; n++)
            for (uint32_t i = 0; i < 4; i++) {
                const uint32_t row = few_sum_row(n, i, lane);
                const uint32_t weight_row = item.column + few_sum_weight(i, lane);
                if (row >= tile.rows)
                    continue;
                if (p->down) {
                    for (uint32_t half = 0; half < 2; half++) {
                        const uint32_t column = weight_row + half * FEW_HALF_ROWS;
                        if (column >= item.limit)
                            continue;
                        float *to = &l->products[few_product_at(p, &item, tile.first, row, column)];
                        assert_float_equal(*to, POISON, 0); /* written once */
                        *to = half ? high[n][lane][i] : low[n][lane][i];
                    }
                } else if (weight_row < item.limit) {
                    float *to =
                        &l->activations[few_activation_at(p, &item, tile.first, row, weight_row)];
                    assert_float_equal(*to, POISON, 0);
                    *to = low[n][lane][i] * high[n][lane][i];
                }
            }
}

/* All warps of the grid, in turn; every item by exactly one. */
static void phase_run(layer_t *l, uint32_t down, uint32_t blocks)
{
    const few_plan_t p = few_plan_make(&l->s, l->rows, l->tile_count, down);
    uint8_t *done = take(p.items, 1);
    for (uint32_t block = 0; block < blocks; block++)
        for (uint32_t warp = 0; warp < FEW_WARPS; warp++)
            for (uint32_t n = few_first_item(block, blocks, warp); n < p.items;
                 n += FEW_WARPS * blocks) {
                assert_int_equal(done[n]++, 0);
                item_run(l, &p, n);
            }
    for (uint32_t i = 0; i < p.items; i++)
        assert_int_equal(done[i], 1);
    free(done);
}

/* One row through one part, plainly. */
static void reference(const layer_t *l, uint32_t part, uint32_t row, double *out)
{
    const uint32_t width = part_width(l, part), hidden = l->s.hidden;
    const uint64_t at = part_room(l) * part;
    double *act = take(width, sizeof(*act));
    for (uint32_t i = 0; i < width; i++) {
        double gate = 0, up = 0;
        for (uint32_t h = 0; h < hidden; h++) {
            const double x = (double)l->input[row * hidden + h];
            gate += (double)l->gate[at + (uint64_t)i * hidden + h] * x;
            up += (double)l->up[at + (uint64_t)i * hidden + h] * x;
        }
        act[i] = gate * up;
    }
    for (uint32_t h = 0; h < hidden; h++) {
        out[h] = 0;
        for (uint32_t i = 0; i < width; i++)
            out[h] += (double)l->down[at + (uint64_t)h * width + i] * act[i];
    }
    free(act);
}

static void run(const ffn_cuda_signature_t *s, uint32_t rows, uint32_t skew, uint32_t blocks)
{
    layer_t l;
    double *want = take(s->hidden, sizeof(*want));
    layer_make(&l, s, rows, skew);
    layer_plan(&l);
    phase_run(&l, 0, blocks);
    phase_run(&l, 1, blocks);
    for (uint32_t row = 0; row < rows; row++) {
        const uint32_t parts = s->experts ? s->top_k : 0;
        const bool last = s->experts == 0 || s->shared_intermediate;
        for (uint32_t i = 0; i < parts + last; i++) {
            const uint32_t part = i < parts ? l.chosen[row * s->top_k + i] : s->experts;
            const uint64_t at = i < parts ? l.pair_at[row * s->top_k + i] : layer_pairs(&l) + row;
            reference(&l, part, row, want);
            for (uint32_t h = 0; h < s->hidden; h++)
                assert_float_equal(l.products[at * s->hidden + h], want[h], 0);
        }
    }
    layer_free(&l);
    free(want);
}

static void test_layers(void **state)
{
    (void)state;
    static const ffn_cuda_signature_t shapes[] = {
        {.hidden = 64, .intermediate = 48, .experts = 16, .top_k = 4},
        {.hidden = 40, .intermediate = 24, .experts = 8, .top_k = 2, .shared_intermediate = 56},
        {.hidden = 72, .intermediate = 16, .experts = 5, .top_k = 1, .shared_intermediate = 8},
        {.hidden = 136, .intermediate = 88}, /* dense */
        {.hidden = 8, .intermediate = 8, .experts = 24, .top_k = 3},
    };
    static const uint32_t rows[] = {1, 17, 24, 33, 48, 64}, blocks[] = {1, 3, 131};
    seed = 4;
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++)
        for (size_t r = 0; r < sizeof(rows) / sizeof(rows[0]); r++)
            run(&shapes[i], rows[r], r % 2 * 4, blocks[(i + r) % 3]);
}

/* The largest numbers that fields have to hold. */
static void test_limits(void **state)
{
    (void)state;
    const ffn_cuda_signature_t s = {.hidden = 8, .intermediate = 8, .experts = 512, .top_k = 32};
    seed = 9;
    run(&s, FEW_ROWS_MOST, 0, 7);
    run(&s, FEW_ROWS_MOST, 8, 7);
}

/* Each logit is summed by one thread of one block. */
static void test_router_blocks(void **state)
{
    (void)state;
    static uint8_t seen[FEW_ROWS_MOST][FFN_CUDA_MAX_EXPERTS];
    static const uint32_t experts[] = {8, 40, 128, 512}, rows[] = {1, 17, 32, 33, 64};
    for (size_t i = 0; i < 4; i++)
        for (size_t r = 0; r < 5; r++) {
            const uint32_t tiles = few_parts(experts[i], FEW_ROUTE_EXPERTS);
            memset(seen, 0, sizeof(seen));
            for (uint32_t block = 0; block < tiles * few_parts(rows[r], FEW_ROUTE_ROWS); block++)
                for (uint32_t thread = 0; thread < FEW_ROUTE_EXPERTS * FEW_ROUTE_ROWS; thread++) {
                    const uint32_t lane = thread % 32, v = thread / 32;
                    const uint32_t e =
                        block % tiles * FEW_ROUTE_EXPERTS + few_sum_weight(v % 4, lane);
                    const uint32_t row =
                        block / tiles * FEW_ROUTE_ROWS + few_sum_row(v / 4, v % 4, lane);
                    if (e < experts[i] && row < rows[r])
                        seen[row][e]++;
                }
            for (uint32_t row = 0; row < rows[r]; row++)
                for (uint32_t e = 0; e < experts[i]; e++)
                    assert_int_equal(seen[row][e], 1);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_layers),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_router_blocks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
