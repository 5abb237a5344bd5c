// SPDX-License-Identifier: MIT
// Down of layers of experts, by pairs of a row and a part that it chose.
//
// A section of the inner dimension (a part, or an equal piece of a wide
// one) of one tile of 16 output columns is one warp's: sections go round the warps, and a warp needs
// nobody for any of them. Of the input it loads the rows that chose the part, close together, so 8
// columns of a product mostly hold all of them. What a section adds to a row is a row of `pairs` in
// shared memory; when all sections of a window are there, a thread adds up a (row, column): its
// parts ascending, the pieces of each in order, the last part at the end. How a part is cut depends on
// the layer's shape alone, so a row gives the same bits alone and among others.
//
//   window  sections whose first pair is of the same PAIRS_WINDOW; one for most layers. Two buffers:
//           who is at the next window's barrier has read this one
//   slot    16 rows of weights by DECODE_BYTES of a section
//   chunk   PAIRS_CHUNK slots, whose input is loaded a chunk ahead
#ifndef XPOOL_FFN_CUDA_DECODE_PAIRS_CUH
#define XPOOL_FFN_CUDA_DECODE_PAIRS_CUH

#include "ffn/cuda/decode_state.cuh"

#define PAIRS_CHUNK  2u
#define PAIRS_BUFFER (DECODE_WARPS * DECODE_TILES * 4 * 32 / 16)    // rows of 16 columns
#define PAIRS_WINDOW (PAIRS_BUFFER - FFN_CUDA_DECODE_ROWS)
#define PAIRS_PIECE  1536u // most bytes of a section
static_assert(PAIRS_BUFFER > 2 * FFN_CUDA_DECODE_ROWS, "a window holds several sections");
static_assert(DECODE_ROWS == 2, "a copy takes two rows");

// How the layer's parts are cut: so that 8 warps have work at one row, into equal pieces.
static __device__ __forceinline__ void pairs_describe(decode_layer_t *layer)
{
    const ffn_cuda_signature_t &s = layer->signature;
    const uint32_t bytes = s.intermediate * 2;
    const uint32_t least = s.experts ? ceil_div(DECODE_WARPS, s.top_k) : 1;
    const uint32_t count = max(ceil_div(bytes, PAIRS_PIECE), least);
    layer->piece = max(ceil_div(bytes, count * 64) * 64, 64u);
    layer->pieces[0] = ceil_div(bytes, layer->piece);
    layer->pieces[1] = ceil_div(layer->last_width * 2, layer->piece);
}

// Where a section lies; its part's pieces lie one after another.
struct pairs_section_t {
    uint32_t part, pitch, begin, bytes; // pitch: of a row of weights; begin, bytes: of the section
    uint32_t piece;
};

static __device__ __forceinline__ uint32_t pairs_sections(const decode_state_t &sh)
{
    const decode_layer_t &layer = sh.layers[sh.now];
    return sh.call.experts_chosen * layer.pieces[0] + layer.pieces[1];
}

static __device__ __forceinline__ pairs_section_t pairs_section(const decode_state_t &sh,
                                                                uint32_t section)
{
    const decode_layer_t &layer = sh.layers[sh.now];
    const uint32_t chosen = sh.call.experts_chosen, each = layer.pieces[0];
    pairs_section_t at;
    at.part = each == 1 ? section : section / each;
    at.part = min(at.part, chosen);
    at.piece = section - at.part * each;
    at.pitch = 2 * (at.part < chosen ? layer.signature.intermediate : layer.last_width);
    at.begin = at.piece * layer.piece;
    at.bytes = min(layer.piece, at.pitch - at.begin);
    return at;
}

// ---- copies --------------------------------------------------------------------------------------
// The block's share of down is reckoned anew for each section: while gate and up run, it would only
// take registers.
static __device__ __forceinline__ void pairs_locate(const decode_state_t &sh, decode_cursor_t *c)
{
    const decode_phase_t down = phase_of<true>(sh, true);
    const uint32_t lane = threadIdx.x % 32, sections = pairs_sections(sh);
    while (c->section >= sections) {
        c->section -= sections;
        c->first++;
    }
    c->unit = 0;
    c->ended = c->first >= down.tiles;
    if (c->ended)
        return;
    const pairs_section_t at = pairs_section(sh, c->section);
    c->bytes = at.bytes;
    c->size = at.pitch;
    c->live = min(down.count - c->first * 16, 16u);
    c->from = (const char *)part_at(sh, at.part).down +
              (uint64_t)(down.base + c->first * 16 + lane / DECODE_PIECES) * at.pitch + at.begin +
              lane % DECODE_PIECES * 16;
}

static __device__ __forceinline__ void pairs_begin(const decode_state_t &sh, decode_cursor_t *c)
{
    c->down = true;
    c->section = threadIdx.x / 32;
    c->first = 0;
    pairs_locate(sh, c);
}

// Goes on to the next slot, which may be another section's.
static __device__ __forceinline__ void pairs_settle(const decode_state_t &sh, decode_cursor_t *c)
{
    c->unit += DECODE_BYTES;
    if (c->unit >= c->bytes) {
        c->section += DECODE_WARPS;
        pairs_locate(sh, c);
    }
}

// Starts the copy of the next slot, as one group also where there is none.
static __device__ __forceinline__ void pairs_copy(decode_shared_t &shared, decode_cursor_t *c,
                                                  uint64_t policy)
{
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t row0 = lane / DECODE_PIECES, piece = lane % DECODE_PIECES;
    if (!c->ended) {
        const bool present = c->unit + piece * 16 < c->bytes; // past the end: zeros
        const char *from = c->from + (present ? c->unit : 0);
        // Columns that this block does not own are left as they are: nobody looks at their sums.
        const uint32_t live = c->live - row0;
        const uint32_t stride = DECODE_ROWS * c->size;
        const uint32_t to = ptx_shared(shared.ring[warp][c->slot]) + row0 * DECODE_BYTES +
                            (piece ^ row0 * 4) * 16;
#pragma unroll
        for (uint32_t i = 0; i < DECODE_COPIES; i++)
            if ((int)live > (int)(i * DECODE_ROWS))
                ptx_copy_sixteen(to + i * 512, from + (uint64_t)i * stride, present ? 16 : 0, policy);
        pairs_settle(shared.state, c);
    }
    ptx_copies_commit();
    c->slot = c->slot + 1 == DECODE_DEPTH ? 0 : c->slot + 1;
}

// The slot that no copy has been started of comes into L2; nothing waits for it.
static __device__ __forceinline__ void pairs_prefetch(const decode_cursor_t &c)
{
    const uint32_t lane = threadIdx.x % 32;
    const uint64_t own = (uint64_t)(lane / DECODE_PIECES) * c.size + lane % DECODE_PIECES * 16;
    const uint32_t row = lane / 2, along = c.unit + lane % 2 * 128;
    if (!c.ended && row < c.live && along < c.bytes)
        ptx_prefetch_line(c.from - own + (uint64_t)row * c.size + along);
}

// ---- tables --------------------------------------------------------------------------------------
static __device__ __forceinline__ uint32_t pairs_live(const decode_state_t &sh)
{
    return 0xffffffff >> (32 - sh.call.command.rows);
}

// Each part's first pair and each row's parts. All warps but the first, once experts are chosen; seen by
// the others after the next barrier.
static __device__ __forceinline__ void pairs_prepare(decode_state_t &sh)
{
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t chosen = sh.call.experts_chosen, live = pairs_live(sh);
    if (warp == 1) {
        uint32_t before = 0;
        for (uint32_t first = 0; first < chosen; first += 32) {
            const uint32_t part = first + lane;
            const uint32_t own =
                part < chosen ? __popc(sh.mask_of[part] & live) * sh.layers[sh.now].pieces[0] : 0;
            uint32_t sum = own;
            for (uint32_t d = 1; d < 32; d *= 2) {
                const uint32_t left = __shfl_up_sync(ROUTE_ALL, sum, d);
                sum += lane >= d ? left : 0;
            }
            if (part < chosen)
                sh.pair_first[part] = (uint16_t)(before + sum - own);
            before += __shfl_sync(ROUTE_ALL, sum, 31);
        }
        if (lane == 0)
            sh.pair_first[chosen] = (uint16_t)before;
    } else if (warp != 0) {
        for (uint32_t row = warp - 2; row < sh.call.command.rows; row += DECODE_WARPS - 2) {
            uint32_t count = 0;
            for (uint32_t first = 0; first < chosen; first += 32) {
                const uint32_t part = first + lane;
                const bool asks = part < chosen && (sh.mask_of[part] >> row & 1);
                const uint32_t all = __ballot_sync(ROUTE_ALL, asks);
                if (asks)
                    sh.parts_of_row[row][count + __popc(all & ((1u << lane) - 1))] = (uint16_t)part;
                count += __popc(all);
            }
        }
    }
}

// ---- products ------------------------------------------------------------------------------------
// The next chunk that this warp multiplies.
struct pairs_place_t {
    uint32_t section, tile, unit, bytes;
    uint32_t mask, count; // rows that chose the part
    uint32_t pair;        // the section's first, of the tile
    const char *from;     // of the section, in the first row of the activations
    bool ended;
};

static __device__ __forceinline__ void pairs_place(const decode_state_t &sh,
                                                   const decode_phase_t &down, pairs_place_t *p)
{
    const decode_call_t &call = sh.call;
    const uint32_t sections = pairs_sections(sh);
    while (p->section >= sections) {
        p->section -= sections;
        p->tile++;
    }
    p->unit = 0;
    p->ended = p->tile >= down.tiles;
    if (p->ended)
        return;
    const pairs_section_t at = pairs_section(sh, p->section);
    p->bytes = at.bytes;
    p->mask = sh.mask_of[at.part] & pairs_live(sh);
    p->count = __popc(p->mask);
    p->pair = sh.pair_first[at.part] + at.piece * p->count;
    p->from = call.lane.activations +
              (uint64_t)at.part * sh.layers[sh.now].signature.intermediate * 2 + at.begin;
}

// This lane's row of the section's, past the first `skip`; none: 32.
static __device__ __forceinline__ uint32_t pairs_row(uint32_t mask, uint32_t skip)
{
    for (uint32_t i = 0; i < skip + threadIdx.x % 32 / 4; i++)
        mask &= mask - 1;
    return mask ? __ffs(mask) - 1 : 32;
}

static __device__ __forceinline__ void pairs_load(const decode_state_t &sh, const pairs_place_t &p,
                                                  uint32_t row, uint32_t unit,
                                                  uint4 (&x)[DECODE_STEPS])
{
    const uint32_t along = unit + threadIdx.x % 4 * 16;
    const char *from = p.from + (uint64_t)(row % 32) * sh.call.lane.pitch * 2 + along;
#pragma unroll
    for (uint32_t s = 0; s < DECODE_STEPS; s++)
        x[s] = ptx_load_l2_if(from + s * 64, row < 32 && along + s * 64 < p.bytes);
}

// All pairs of one (row, column) where they are one window and a part is one section, added in order.
static __device__ __forceinline__ float pairs_add_whole(const decode_state_t &sh, const float *pairs,
                                                        uint32_t row, uint32_t column)
{
    enum { AT_ONCE = 8 }; // found before the first is added
    const uint32_t top_k = sh.layers[sh.now].signature.top_k;
    const uint32_t below = (1u << row) - 1;
    float sum = 0.0f;
#pragma unroll 1
    for (uint32_t first = 0; first < top_k; first += AT_ONCE) {
        float value[AT_ONCE];
#pragma unroll
        for (uint32_t i = 0; i < AT_ONCE; i++) {
            const uint32_t part = sh.parts_of_row[row][min(first + i, top_k - 1)];
            const uint32_t before = __popc(sh.mask_of[part] & below);
            value[i] = pairs[(sh.pair_first[part] + before) * 16 + column];
        }
#pragma unroll
        for (uint32_t i = 0; i < AT_ONCE; i++)
            if (first + i < top_k)
                sum += value[i];
    }
    return sum;
}

// The window's pairs of one (row, column), added to `sum` in order. next: the row's part, piece: of it.
static __device__ __forceinline__ void pairs_add(const decode_state_t &sh, const float *pairs,
                                                 uint32_t window, uint32_t row, uint32_t column,
                                                 uint32_t *next, uint32_t *piece, float *sum)
{
    const decode_layer_t &layer = sh.layers[sh.now];
    const uint32_t top_k = layer.signature.top_k, chosen = sh.call.experts_chosen;
    const uint32_t below = (1u << row) - 1, live = pairs_live(sh);
    const uint32_t parts = top_k + (layer.last_width != 0);
    while (*next < parts) {
        const uint32_t part = *next < top_k ? sh.parts_of_row[row][*next] : chosen;
        const uint32_t mask = sh.mask_of[part] & live;
        const uint32_t pair = sh.pair_first[part] + *piece * __popc(mask);
        if (pair / PAIRS_WINDOW != window)
            break;
        *sum += pairs[(pair - window * PAIRS_WINDOW + __popc(mask & below)) * 16 + column];
        if (++*piece == layer.pieces[*next < top_k ? 0 : 1]) {
            *piece = 0;
            ++*next;
        }
    }
}

// One slot's products with 8 rows, in two sums (products that wait for each other are slow) that are then
// added.
template <typename T>
static __device__ __forceinline__ void pairs_multiply(const unsigned char *from, uint32_t odd,
                                                      const uint4 (&x)[DECODE_STEPS],
                                                      float (&sum)[4])
{
    float own[2][4] = {};
#pragma unroll
    for (uint32_t s = 0; s < DECODE_STEPS; s++) {
        const unsigned char *a = from + (s * 64 ^ odd);
        const uint4 low = *(const uint4 *)a;
        const uint4 high = *(const uint4 *)(a + 8 * DECODE_BYTES);
        ptx_mma<T>(own[s % 2], low.x, high.x, low.y, high.y, x[s].x, x[s].y);
        ptx_mma<T>(own[s % 2], low.z, high.z, low.w, high.w, x[s].z, x[s].w);
    }
#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
        sum[i] += own[0][i] + own[1][i];
}

// A section's sums of 8 rows, the first of them at `to`, of which `count` are live. Each value is one
// lane's.
static __device__ __forceinline__ void pairs_store(float *to, uint32_t count, const float (&sum)[4])
{
    const uint32_t n = threadIdx.x % 4 * 2;
    to += n * 16 + threadIdx.x % 32 / 4;
    if (n < count) {
        to[0] = sum[0];
        to[8] = sum[2];
    }
    if (n + 1 < count) {
        to[16] = sum[1];
        to[24] = sum[3];
    }
}

static __device__ __forceinline__ void pairs_restore(const float *from, uint32_t count,
                                                     float (&sum)[4])
{
    const uint32_t n = threadIdx.x % 4 * 2;
    from += n * 16 + threadIdx.x % 32 / 4;
    sum[0] = n < count ? from[0] : 0.0f;
    sum[2] = n < count ? from[8] : 0.0f;
    sum[1] = n + 1 < count ? from[16] : 0.0f;
    sum[3] = n + 1 < count ? from[24] : 0.0f;
}

// All of down. The cursor is DECODE_DEPTH slots ahead and in down.
template <typename T>
static __device__ __forceinline__ void pairs_run(decode_shared_t &shared, decode_cursor_t *c,
                                                 uint32_t *slot, uint64_t policy)
{
    constexpr uint32_t HELD = PAIRS_CHUNK, ROWS = 2; // rows of a thread's sums
    const decode_state_t &sh = shared.state;
    const decode_phase_t down = phase_of<true>(sh, true);
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const unsigned char *const mine =
        shared.ring[warp][0] + lane / 4 * DECODE_BYTES + lane % 4 * 16;
    const uint32_t odd = lane / 4 % 2 * 64;
    const uint32_t all = sh.pair_first[sh.call.experts_chosen] +
                         sh.call.command.rows * sh.layers[sh.now].pieces[1];
    const uint32_t windows = ceil_div(all, PAIRS_WINDOW);
    const bool whole = windows == 1 && sh.layers[sh.now].pieces[0] == 1 &&
                       sh.layers[sh.now].pieces[1] == 0;
    pairs_place_t place = {};
    uint4 held[HELD][DECODE_STEPS];
    float sum[4] = {};
    uint32_t turn = 0;
    place.section = warp;
    pairs_place(sh, down, &place);
    uint32_t row = place.ended ? 32 : pairs_row(place.mask, 0);
#pragma unroll
    for (uint32_t u = 0; u < HELD; u++)
        pairs_load(sh, place, row, u * DECODE_BYTES, held[u]);
#pragma unroll 1
    for (uint32_t tile = 0; tile < down.tiles; tile++) {
        float total[ROWS] = {};
        uint32_t next[ROWS] = {}, piece[ROWS] = {};
#pragma unroll 1
        for (uint32_t window = 0; window < windows; window++, turn ^= 1) {
            float *const pairs = &shared.sums[turn][0][0][0];
#pragma unroll 1
            while (!place.ended && place.tile == tile && place.pair / PAIRS_WINDOW == window) {
                const pairs_place_t at = place;
                const bool ends = at.unit + HELD * DECODE_BYTES >= at.bytes;
                float *const to = pairs + (at.pair - window * PAIRS_WINDOW) * 16;
                uint4 later[HELD][DECODE_STEPS];
                place.unit += HELD * DECODE_BYTES;
                if (ends) {
                    place.section += DECODE_WARPS;
                    pairs_place(sh, down, &place);
                    row = place.ended ? 32 : pairs_row(place.mask, 0);
                }
#pragma unroll
                for (uint32_t u = 0; u < HELD; u++)
                    pairs_load(sh, place, row, place.unit + u * DECODE_BYTES, later[u]);
#pragma unroll 1
                for (uint32_t unit = at.unit;
                     unit < min(at.unit + HELD * DECODE_BYTES, at.bytes); unit += DECODE_BYTES) {
                    ptx_copies_wait<DECODE_DEPTH - 1>();
                    __syncwarp();
                    const unsigned char *const from = mine + *slot * DECODE_SLOT_BYTES;
                    pairs_multiply<T>(from, odd, held[0], sum);
                    // Few parts are chosen by more than 8 rows; their sums stay where they end.
#pragma unroll 1
                    for (uint32_t skip = 8; skip < at.count; skip += 8) {
                        uint4 more[DECODE_STEPS];
                        float other[4] = {};
                        pairs_load(sh, at, pairs_row(at.mask, skip), unit, more);
                        if (unit)
                            pairs_restore(to + skip * 16, at.count - skip, other);
                        pairs_multiply<T>(from, odd, more, other);
                        pairs_store(to + skip * 16, at.count - skip, other);
                    }
                    __syncwarp();
                    *slot = *slot + 1 == DECODE_DEPTH ? 0 : *slot + 1;
                    pairs_copy(shared, c, policy);
#pragma unroll
                    for (uint32_t u = 0; u + 1 < HELD; u++)
#pragma unroll
                        for (uint32_t s = 0; s < DECODE_STEPS; s++)
                            held[u][s] = held[u + 1][s];
                }
                if (ends) {
                    pairs_store(to, at.count, sum);
                    sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
                }
#pragma unroll
                for (uint32_t u = 0; u < HELD; u++)
#pragma unroll
                    for (uint32_t s = 0; s < DECODE_STEPS; s++)
                        held[u][s] = later[u][s];
            }
            __syncthreads();
#pragma unroll
            for (uint32_t r = 0; r < ROWS; r++) {
                const uint32_t of = r * 16 + threadIdx.x / 16;
                if (of >= sh.call.command.rows)
                    continue;
                if (whole)
                    total[r] = pairs_add_whole(sh, pairs, of, threadIdx.x % 16);
                else
                    pairs_add(sh, pairs, window, of, threadIdx.x % 16, &next[r], &piece[r],
                              &total[r]);
            }
        }
#pragma unroll
        for (uint32_t r = 0; r < ROWS; r++)
            column_store<T>(sh, down, down.base + tile * 16 + threadIdx.x % 16,
                            r * 16 + threadIdx.x / 16, total[r]);
    }
}
#endif
