// SPDX-License-Identifier: MIT
// How the decode kernel reads weights: copies into each warp's ring and the products of what has come.
#ifndef XPOOL_FFN_CUDA_DECODE_STREAM_CUH
#define XPOOL_FFN_CUDA_DECODE_STREAM_CUH

#include "ffn/cuda/decode_pairs.cuh"

static __device__ __forceinline__ uint32_t phase_bytes(const decode_layer_t &layer, bool down)
{
    return 2 * (down ? layer.last_width : layer.signature.hidden);
}

// ---- copies --------------------------------------------------------------------------------------
// What is `<true>` is for layers of experts, whose down is pairs_run()'s.

// Begins the pass.
template <bool EXPERTS>
static __device__ __forceinline__ void cursor_locate(decode_shared_t &shared,
                                                     const decode_phase_t &p, decode_cursor_t *c)
{
    const decode_state_t &sh = shared.state;
    const decode_layer_t &layer = sh.layers[sh.now];
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    c->first = pass_begin(p, c->pass);
    c->live = pass_begin(p, c->pass + 1) - c->first;
    c->tile = 0;
    c->bytes = phase_bytes(layer, !EXPERTS && c->down);
    c->size = layer.unit[!EXPERTS && c->down];
    __syncwarp(); // all lanes have read what was there
    if (lane < c->live) {
        const char *low, *high;
        if (!EXPERTS && c->down) {
            low = (const char *)layer.dense.down +
                  (uint64_t)(p.base + (c->first + lane) * 16) * c->bytes;
            high = low + 8 * (uint64_t)c->bytes;
        } else {
            uint32_t v = p.base + (c->first + lane) * 8;
            ffn_cuda_part_t part;
            if constexpr (EXPERTS) {
                const uint32_t index =
                    min(v / layer.signature.intermediate, sh.call.experts_chosen);
                part = part_at(sh, index);
                v -= index * layer.signature.intermediate;
            } else {
                part = layer.dense;
            }
            low = (const char *)part.gate + (uint64_t)v * c->bytes;
            high = (const char *)part.up + (uint64_t)v * c->bytes;
        }
        shared.rows_at[warp][lane][0] = (unsigned long long)low;
        shared.rows_at[warp][lane][1] = (unsigned long long)high;
    }
    __syncwarp();
}

// Goes on to the next unit that exists.
template <bool EXPERTS>
static __device__ __forceinline__ void cursor_settle(decode_shared_t &shared,
                                                     const decode_phase_t &gate,
                                                     const decode_phase_t &down, decode_cursor_t *c)
{
    while (!c->ended && c->unit * c->size >= c->bytes) {
        c->unit = threadIdx.x / 32;
        c->pass++;
        if (!c->down && c->pass >= gate.passes) {
            c->down = true;
            c->pass = 0;
            if constexpr (EXPERTS) {
                pairs_begin(shared.state, c);
                return;
            }
        }
        c->ended = !EXPERTS && c->down && c->pass >= down.passes;
        if (!c->ended)
            cursor_locate<EXPERTS>(shared, phase_pick(!EXPERTS && c->down, gate, down), c);
    }
}

// slot_copy() of a layer of experts: gate and down share their instructions.
static __device__ __forceinline__ void experts_copy(decode_shared_t &shared,
                                                    const decode_phase_t &gate,
                                                    const decode_phase_t &down, decode_cursor_t *c,
                                                    uint64_t policy)
{
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t row0 = lane / DECODE_PIECES, piece = lane % DECODE_PIECES;
    if (!c->ended) {
        const bool is_down = c->down;
        const uint32_t start = is_down ? c->unit : c->unit * c->size;
        const uint32_t present = start + piece * 16 < c->bytes ? 16 : 0; // past the end: zeros
        const uint32_t pitch = is_down ? c->size : c->bytes;
        const char *low, *high;
        uint32_t v = row0, v_high = row0 + 8, count = c->live;
        if (is_down) {
            low = c->from + (present ? start : 0);
            high = low + 8 * (uint64_t)pitch;
        } else {
            const uint64_t skip = (uint64_t)row0 * pitch + (present ? start + piece * 16 : 0);
            low = (const char *)shared.rows_at[warp][c->tile][0] + skip;
            high = (const char *)shared.rows_at[warp][c->tile][1] + skip;
            v += gate.base + (c->first + c->tile) * 8 - gate.first;
            v_high = v;
            count = piece * 16 < c->size ? gate.count : 0;
        }
        // Rows that this block does not own are left as they are: nobody looks at their sums.
        const uint32_t to = ptx_shared(shared.ring[warp][c->slot]) + row0 * DECODE_BYTES +
                            (piece ^ row0 * 4) * 16;
#pragma unroll
        for (uint32_t i = 0; i < DECODE_COPIES; i++) {
            const bool upper = i >= DECODE_COPIES / 2;
            const uint32_t n = (upper ? i - DECODE_COPIES / 2 : i) * DECODE_ROWS;
            if ((upper ? v_high : v) + n < count)
                ptx_copy_sixteen(to + i * 512, (upper ? high : low) + (uint64_t)n * pitch, present,
                                 policy);
        }
        if (is_down) {
            pairs_settle(shared.state, c);
        } else if (++c->tile == c->live) {
            c->tile = 0;
            c->unit += DECODE_WARPS;
            cursor_settle<true>(shared, gate, down, c);
        }
    }
    ptx_copies_commit();
    c->slot = c->slot + 1 == DECODE_DEPTH ? 0 : c->slot + 1;
}

// slot_copy() of a dense layer.
static __device__ __forceinline__ void dense_copy(decode_shared_t &shared, const decode_phase_t &gate,
                                                  const decode_phase_t &down, decode_cursor_t *c,
                                                  uint64_t policy)
{
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t row0 = lane / DECODE_PIECES, piece = lane % DECODE_PIECES;
    if (!c->ended) {
        const bool is_down = c->down;
        const uint32_t along = c->unit * c->size + piece * 16;
        const uint32_t present = along < c->bytes ? 16 : 0; // past the end: zeros
        const uint64_t skip = (uint64_t)row0 * c->bytes + (present ? along : 0);
        const char *low = (const char *)shared.rows_at[warp][c->tile][0] + skip;
        const char *high = (const char *)shared.rows_at[warp][c->tile][1] + skip;
        const uint64_t stride = (uint64_t)DECODE_ROWS * c->bytes;
        // Rows that this block does not own are left as they are: nobody looks at their sums.
        const uint32_t first = is_down ? down.first : gate.first;
        const uint32_t count = piece * 16 < c->size ? (is_down ? down.count : gate.count) : 0;
        const uint32_t v = (is_down ? down.base + (c->first + c->tile) * 16
                                    : gate.base + (c->first + c->tile) * 8) +
                           row0 - first;
        const uint32_t v_high = v + (is_down ? 8 : 0);
        // Every other row is moved by 64 bytes, so that reads of two rows fall on all banks.
        const uint32_t to = ptx_shared(shared.ring[warp][c->slot]) + row0 * DECODE_BYTES +
                            (piece ^ row0 * 4) * 16;
#pragma unroll
        for (uint32_t i = 0; i < DECODE_COPIES; i++) {
            const bool upper = i >= DECODE_COPIES / 2;
            const uint32_t n = upper ? i - DECODE_COPIES / 2 : i;
            if ((upper ? v_high : v) + n * DECODE_ROWS < count)
                ptx_copy_sixteen(to + i * 512, (upper ? high : low) + n * stride, present, policy);
        }
        if (++c->tile == c->live) {
            c->tile = 0;
            c->unit += DECODE_WARPS;
            cursor_settle<false>(shared, gate, down, c);
        }
    }
    ptx_copies_commit();
    c->slot = c->slot + 1 == DECODE_DEPTH ? 0 : c->slot + 1;
}

// Starts the copy of the next slot, as one group also where there is none.
template <bool EXPERTS>
static __device__ __forceinline__ void slot_copy(decode_shared_t &shared, const decode_phase_t &gate,
                                                 const decode_phase_t &down, decode_cursor_t *c,
                                                 uint64_t policy)
{
    if constexpr (EXPERTS)
        experts_copy(shared, gate, down, c, policy);
    else
        dense_copy(shared, gate, down, c, policy);
}

// From the first slot of the pass on; the ring is empty.
template <bool EXPERTS>
static __device__ __forceinline__ void cursor_begin(decode_shared_t &shared,
                                                    const decode_phase_t &gate,
                                                    const decode_phase_t &down, bool in_down,
                                                    uint32_t pass, decode_cursor_t *c,
                                                    uint64_t policy)
{
    c->unit = threadIdx.x / 32;
    c->slot = 0;
    c->down = in_down || pass >= gate.passes;
    c->pass = c->down && !in_down ? 0 : pass;
    c->ended = c->down && c->pass >= down.passes;
    c->bytes = c->size = 0;
    if (EXPERTS && c->down) {
        pairs_begin(shared.state, c);
    } else if (!c->ended) {
        cursor_locate<EXPERTS>(shared, phase_pick(!EXPERTS && c->down, gate, down), c);
        cursor_settle<EXPERTS>(shared, gate, down, c);
    }
#pragma unroll 1
    for (uint32_t i = 0; i < DECODE_DEPTH; i++)
        slot_copy<EXPERTS>(shared, gate, down, c, policy);
}

// ---- products ------------------------------------------------------------------------------------
static __device__ __forceinline__ float route_weight(const decode_state_t &sh, uint32_t top_k,
                                                     uint32_t row, uint32_t part)
{
    float weight = 0.0f;
    for (uint32_t i = 0; i < top_k; i++)
        weight = sh.chosen[row][i] == part ? sh.weight[row][i] : weight;
    return weight;
}

// One value of each half of a tile: gate above up. v: of the pair.
template <typename T, bool EXPERTS>
static __device__ __forceinline__ void pair_store(const decode_state_t &sh, const decode_phase_t &p,
                                                  uint32_t v, uint32_t row, float gate, float up)
{
    const decode_layer_t &layer = sh.layers[sh.now];
    const decode_call_t &call = sh.call;
    if (v - p.first >= p.count || row >= call.command.rows)
        return;
    float weight = 1.0f;
    if constexpr (EXPERTS) {
        const uint32_t index = min(v / layer.signature.intermediate, call.experts_chosen);
        if (!(sh.mask_of[index] >> row & 1))
            return;
        if (index < call.experts_chosen)
            weight = route_weight(sh, layer.signature.top_k, row, sh.part_of[index]);
    }
    const float value = ptx_activate(layer.signature.activation, gate, up) * weight;
    ((T *)call.lane.activations)[row * call.lane.pitch + v] = ptx_from_float<T>(value);
}

// The warps' sums of 8 rows of input, added and stored. All threads.
template <typename T, bool EXPERTS>
static __device__ __forceinline__ void
pass_store(const decode_state_t &sh, const float (*sums)[DECODE_TILES * 4][32], const decode_phase_t &p,
           bool down, uint32_t tile, uint32_t live, uint32_t first_row)
{
    for (uint32_t i = threadIdx.x; i < live * (down ? 128 : 64); i += DECODE_THREADS) {
        const uint32_t lane = i % 32, row = first_row + lane % 4 * 2;
        if (down) {
            const uint32_t which = i / 32; // tile * 4 + number of the lane's sum
            if (row + which % 2 >= sh.call.command.rows)
                continue;
            float sum = 0.0f;
#pragma unroll
            for (uint32_t w = 0; w < DECODE_WARPS; w++)
                sum += sums[w][which][lane];
            column_store<T>(sh, p, p.base + (tile + which / 4) * 16 + which % 4 / 2 * 8 + lane / 4,
                            row + which % 2, sum);
        } else {
            const uint32_t which = i / 64 * 4 + i / 32 % 2;
            if (row + i / 32 % 2 >= sh.call.command.rows)
                continue;
            float gate = 0.0f, up = 0.0f;
#pragma unroll
            for (uint32_t w = 0; w < DECODE_WARPS; w++) {
                gate += sums[w][which][lane];
                up += sums[w][which + 2][lane];
            }
            pair_store<T, EXPERTS>(sh, p, p.base + (tile + i / 64) * 8 + lane / 4, row + i / 32 % 2,
                                   gate, up);
        }
    }
}

// The rows that chose a part of which the pass of gate and up has pairs; of a layer of experts.
static __device__ __forceinline__ uint32_t pass_mask(const decode_state_t &sh, const decode_phase_t &p,
                                                     uint32_t pass)
{
    const decode_layer_t &layer = sh.layers[sh.now];
    const uint32_t width = layer.signature.intermediate, last = sh.call.experts_chosen;
    const uint32_t v = p.base + pass_begin(p, pass) * 8;
    const uint32_t end = min((p.base + pass_begin(p, pass + 1) * 8 - 1) / width, last);
    uint32_t mask = 0;
    for (uint32_t index = min(v / width, last); index <= end; index++)
        mask |= sh.mask_of[index];
    return mask;
}

// The next unit that this warp multiplies.
struct decode_place_t {
    uint32_t unit, pass;
    uint32_t mask; // of experts: rows whose sums it adds to
    bool ended;
};

// What a phase multiplies: the input's rows and their units.
struct decode_input_t {
    const char *rows;
    uint64_t pitch;       // bytes
    uint32_t bytes, size; // of a row, of a unit
};

static __device__ __forceinline__ decode_input_t input_of(const decode_state_t &sh, bool down)
{
    const decode_call_t &call = sh.call;
    const decode_layer_t &layer = sh.layers[sh.now];
    const uint32_t bytes = phase_bytes(layer, down);
    return {down ? call.lane.activations : (const char *)call.command.input,
            down ? call.lane.pitch * 2 : bytes, bytes, layer.unit[down]};
}

template <bool EXPERTS>
static __device__ __forceinline__ void place_mask(const decode_state_t &sh, const decode_phase_t &p,
                                                  decode_place_t *place)
{
    place->mask = 0xffffffff >> (32 - sh.call.command.rows);
    if constexpr (EXPERTS)
        place->mask &= place->ended ? 0 : pass_mask(sh, p, place->pass);
}

template <bool EXPERTS>
static __device__ __forceinline__ void place_settle(const decode_state_t &sh, const decode_phase_t &p,
                                                    const decode_input_t &from, decode_place_t *place)
{
    while (!place->ended && place->unit * from.size >= from.bytes) {
        place->unit = threadIdx.x / 32;
        place->ended = ++place->pass >= p.passes;
        if constexpr (EXPERTS)
            place_mask<true>(sh, p, place);
    }
}

// A row's piece of a unit; zeros where it is not asked for.
static __device__ __forceinline__ void row_load(const decode_input_t &from, uint32_t unit,
                                                uint32_t input, bool asked, uint4 (&x)[DECODE_STEPS])
{
    const uint32_t along = unit * from.size + threadIdx.x % 4 * 16;
    const char *at = from.rows + input * from.pitch + along;
#pragma unroll
    for (uint32_t s = 0; s < DECODE_STEPS; s++)
        x[s] = ptx_load_l2_if(at + s * 64,
                              asked && s * 64 < from.size && along + s * 64 < from.bytes);
}

// The input rows' piece of a unit, as the products take it: row 8 * n + lane / 4 in x[n].
template <int NB>
static __device__ __forceinline__ void
place_load(const decode_input_t &from, const decode_place_t &place, uint4 (&x)[NB][DECODE_STEPS])
{
#pragma unroll
    for (int n = 0; n < NB; n++) {
        const uint32_t input = n * 8 + threadIdx.x % 32 / 4;
        row_load(from, place.unit, input, !place.ended && place.mask >> input & 1, x[n]);
    }
}

// The same of 8 rows that are asked for, without gaps, past the first `skip` of them.
static __device__ __forceinline__ void place_load_close(const decode_input_t &from,
                                                        const decode_place_t &place, uint32_t skip,
                                                        uint4 (&x)[DECODE_STEPS])
{
    uint32_t left = place.mask;
    for (uint32_t i = 0; i < skip + threadIdx.x % 32 / 4; i++)
        left &= left - 1;
    row_load(from, place.unit, left ? __ffs(left) - 1 : 0, left != 0, x);
}

static __device__ __forceinline__ uint32_t lane_value(uint32_t value, uint32_t lane, bool wanted)
{
    const uint32_t got = __shfl_sync(ROUTE_ALL, value, lane);
    return wanted ? got : 0;
}

// One slot's products with 8 rows that lie close, past the first `skip` of `mask`.
template <typename T, int NB>
static __device__ __forceinline__ void close_multiply(const unsigned char *at, uint32_t odd,
                                                      uint32_t size, uint32_t mask, uint32_t skip,
                                                      const uint4 (&x)[DECODE_STEPS],
                                                      float (&sum)[NB][4])
{
#pragma unroll
    for (int n = 0; n < NB; n++) {
        const uint32_t input = n * 8 + threadIdx.x % 32 / 4;
        const uint32_t number = __popc(mask & ((1u << input) - 1)) - skip;
        const bool asked = mask >> input & 1 && number < 8;
        const uint32_t lane = number % 8 * 4 + threadIdx.x % 4;
        if ((mask >> n * 8 & 0xff) == 0)
            continue;
#pragma unroll
        for (uint32_t s = 0; s < DECODE_STEPS; s++) {
            if (s * 64 >= size)
                break;
            const unsigned char *a = at + (s * 64 ^ odd);
            const uint4 low = *(const uint4 *)a;
            const uint4 high = *(const uint4 *)(a + 8 * DECODE_BYTES);
            const uint32_t b[4] = {lane_value(x[s].x, lane, asked), lane_value(x[s].y, lane, asked),
                                   lane_value(x[s].z, lane, asked), lane_value(x[s].w, lane, asked)};
            ptx_mma<T>(sum[n], low.x, high.x, low.y, high.y, b[0], b[1]);
            ptx_mma<T>(sum[n], low.z, high.z, low.w, high.w, b[2], b[3]);
        }
    }
}

// All units of a phase from the pass `begin` on, of gate for a layer of experts; NB times 8 rows. Copies of
// what comes after them are started on the way. Answers the number of passes that are done: fewer than all
// where a cut has come.
template <typename T, int NB, bool EXPERTS>
static __device__ __forceinline__ uint32_t
phase_run(decode_shared_t &shared, bool is_down, const decode_phase_t &gate,
          const decode_phase_t &down, uint32_t begin, decode_cursor_t *c, uint32_t *slot,
          uint32_t *buffer, uint64_t policy)
{
    // Of many rows few are asked for at a time, and what is loaded ahead has no gaps.
    constexpr bool MANY = NB > 2;
    constexpr uint32_t TILES = EXPERTS && MANY ? DECODE_TILES / 2 : DECODE_TILES;
    constexpr int HELD = MANY ? 1 : NB;
    const decode_state_t &sh = shared.state;
    const decode_phase_t p = phase_pick(is_down, gate, down);
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4;
    const unsigned char *const mine = shared.ring[warp][0] + row * DECODE_BYTES + lane % 4 * 16;
    const uint32_t odd = row % 2 * 64;
    decode_place_t place;
    uint4 held[HELD][DECODE_STEPS];
    const decode_input_t from = input_of(sh, is_down);
    place.unit = warp;
    place.pass = begin;
    place.ended = begin >= p.passes;
    place_mask<EXPERTS>(sh, p, &place);
    place_settle<EXPERTS>(sh, p, from, &place);
    if constexpr (MANY)
        place_load_close(from, place, 0, held[0]);
    else
        place_load<NB>(from, place, held);
#pragma unroll 1
    for (uint32_t pass = begin; pass < p.passes; pass++) {
        // Looked at when the products are done, a trip to L2 later.
        const uint32_t *const cut_at = threadIdx.x == 0 ? shared.cuts.at : NULL;
        const uint32_t look = cut_at ? ptx_load_relaxed_system(cut_at) : 0;
        const uint32_t tile = pass_begin(p, pass), live = pass_begin(p, pass + 1) - tile;
        float sum[TILES][NB][4];
#pragma unroll
        for (uint32_t t = 0; t < TILES; t++)
#pragma unroll
            for (int n = 0; n < NB; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    sum[t][n][i] = 0.0f;
#pragma unroll 1
        while (!place.ended && place.pass == pass) {
            const uint32_t size = from.size;
            const decode_place_t at_hand = place;
            uint4 later[HELD][DECODE_STEPS];
            place.unit += DECODE_WARPS;
            place_settle<EXPERTS>(sh, p, from, &place);
            if constexpr (MANY)
                place_load_close(from, place, 0, later[0]);
            else
                place_load<NB>(from, place, later);
#pragma unroll
            for (uint32_t t = 0; t < TILES; t++) {
                if (t >= live)
                    break;
                ptx_copies_wait<DECODE_DEPTH - 1>();
                __syncwarp();
                const unsigned char *const at = mine + *slot * DECODE_SLOT_BYTES;
                if constexpr (MANY) {
                    close_multiply<T, NB>(at, odd, size, at_hand.mask, 0, held[0], sum[t]);
#pragma unroll 1
                    for (uint32_t skip = 8; skip < __popc(at_hand.mask); skip += 8) {
                        uint4 more[DECODE_STEPS];
                        place_load_close(from, at_hand, skip, more);
                        close_multiply<T, NB>(at, odd, size, at_hand.mask, skip, more, sum[t]);
                    }
                } else {
#pragma unroll
                    for (uint32_t s = 0; s < DECODE_STEPS; s++) {
                        if (s * 64 >= size)
                            break;
                        const unsigned char *a = at + (s * 64 ^ odd);
                        const uint4 low = *(const uint4 *)a;
                        const uint4 high = *(const uint4 *)(a + 8 * DECODE_BYTES);
#pragma unroll
                        for (int n = 0; n < NB; n++) {
                            const uint4 b = held[n][s];
                            ptx_mma<T>(sum[t][n], low.x, high.x, low.y, high.y, b.x, b.y);
                            ptx_mma<T>(sum[t][n], low.z, high.z, low.w, high.w, b.z, b.w);
                        }
                    }
                }
                __syncwarp();
                *slot = *slot + 1 == DECODE_DEPTH ? 0 : *slot + 1;
                slot_copy<EXPERTS>(shared, gate, down, c, policy);
            }
#pragma unroll
            for (int n = 0; n < HELD; n++)
#pragma unroll
                for (uint32_t s = 0; s < DECODE_STEPS; s++)
                    held[n][s] = later[n][s];
        }
        if (cut_at && look == shared.cuts.word)
            shared.cuts.seen[pass % 2] = 1;
        // Two buffers: who is at the next sums' barrier has read these.
        uint32_t wanted = 0xffffffff;
        if constexpr (EXPERTS && NB > 1)
            wanted = pass_mask(sh, p, pass);
#pragma unroll
        for (uint32_t first = 0; first < TILES; first += DECODE_TILES) {
            if (first > 0 && first >= live)
                break;
#pragma unroll
            for (int n = 0; n < NB; n++) {
                float(*sums)[DECODE_TILES * 4][32] = shared.sums[*buffer];
                if (EXPERTS && NB > 1 && (wanted >> n * 8 & 0xff) == 0)
                    continue; // nobody's
#pragma unroll
                for (uint32_t t = first; t < min(first + DECODE_TILES, TILES); t++)
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        sums[warp][(t - first) * 4 + i][lane] = sum[t][n][i];
                __syncthreads();
                pass_store<T, EXPERTS>(sh, sums, p, is_down, tile + first,
                                       min(live - first, DECODE_TILES), n * 8);
                *buffer ^= 1;
            }
        }
        if (shared.cuts.seen[pass % 2])
            return pass + 1;
    }
    return p.passes;
}
#endif
