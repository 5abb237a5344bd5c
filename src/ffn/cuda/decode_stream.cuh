// SPDX-License-Identifier: MIT
// How the decode kernel reads weights: copies into each warp's ring and the products of what has come.
#ifndef XPOOL_FFN_CUDA_DECODE_STREAM_CUH
#define XPOOL_FFN_CUDA_DECODE_STREAM_CUH

#include "ffn/cuda/decode_state.cuh"

// ---- copies --------------------------------------------------------------------------------------
// The next slot that this warp copies; all lanes hold the same.
struct decode_cursor_t {
    uint32_t bytes, size; // of a row; of a unit
    uint32_t tile, live;  // of the pass: next, how many
    uint32_t first;       // tile of the pass, in the phase
    uint32_t unit, pass, part, slot;
    bool down, ended;
#if DECODE_PAIRS
    bool paired;      // down by pairs: `part` is the section, `first` the tile, `unit` and `bytes`
    const char *from; // of the section, `size` is the pitch of its rows; what this lane copies
#endif
#if DECODE_LEAN
    uint32_t origin, count; // the pass's first row of weights, counted from the first that is owned
#endif
};
#if DECODE_PAIRS
#include "ffn/cuda/candidates/decode_pairs.cuh"
#endif

// Begins the pass, or another part of it.
static __device__ __forceinline__ void cursor_locate(decode_shared_t &shared,
                                                     const decode_phase_t &p, decode_cursor_t *c)
{
    const decode_state_t &sh = shared.state;
    const decode_layer_t &layer = sh.layers[sh.now];
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t kind = part_kind(sh, c->down, c->part);
    c->first = pass_begin(p, c->pass);
    c->live = pass_begin(p, c->pass + 1) - c->first;
    c->tile = 0;
    c->bytes = part_bytes(layer, kind);
    c->size = layer.unit[kind];
#if DECODE_LEAN
    c->origin = p.base + c->first * (c->down ? 16 : 8) - p.first;
    c->count = p.count;
#endif
    __syncwarp(); // all lanes have read what was there
    if (lane < c->live) {
        const char *low, *high;
        if (c->down) {
            low = (const char *)part_at(sh, c->part).down +
                  (uint64_t)(p.base + (c->first + lane) * 16) * c->bytes;
            high = low + 8 * (uint64_t)c->bytes;
        } else {
            const uint32_t v = p.base + (c->first + lane) * 8;
            const uint32_t index = min(v / layer.signature.intermediate, sh.call.experts_chosen);
            const ffn_cuda_part_t part = part_at(sh, index);
            const uint64_t along = (uint64_t)(v - index * layer.signature.intermediate) * c->bytes;
            low = (const char *)part.gate + along;
            high = (const char *)part.up + along;
        }
        shared.tile_at(warp, lane)[0] = (unsigned long long)low;
        shared.tile_at(warp, lane)[1] = (unsigned long long)high;
    }
    __syncwarp();
}

// Goes on to the next unit that exists.
static __device__ __forceinline__ void cursor_settle(decode_shared_t &shared,
                                                     const decode_phase_t &gate,
                                                     const decode_phase_t &down, decode_cursor_t *c)
{
#if DECODE_PAIRS
    const decode_state_t &sh = shared.state;
#endif
    while (!c->ended && c->unit * c->size >= c->bytes) {
        c->unit = threadIdx.x / 32;
        if (!c->down) {
            c->down = ++c->pass >= gate.passes;
            c->pass = c->down ? 0 : c->pass;
#if DECODE_PAIRS
            if (c->down && sh.layers[sh.now].signature.experts) {
                pairs_begin(sh, down, c);
                return;
            }
#endif
        } else if (++c->part >= down.parts) {
            c->part = 0;
            c->pass++;
        }
        c->ended = c->down && c->pass >= down.passes;
        if (!c->ended)
            cursor_locate(shared, phase_pick(c->down, gate, down), c);
    }
}

#if DECODE_LEAN
// The copies of one slot. low, high: this lane's piece of rows row0 and 8 + row0 of the tile.
static __device__ __forceinline__ void lean_copies(decode_shared_t &shared, const decode_cursor_t &c,
                                                   const char *low, const char *high, uint32_t row0,
                                                   uint32_t piece, uint32_t present, uint64_t policy)
{
    static_assert(DECODE_ROWS == 2, "an even number of rows a copy");
    const int height = c.down ? 16 : 8;
    const int origin = (int)(c.origin + c.tile * height);
    const int begin = max(-origin, 0), end = min((int)c.count - origin, height);
    uint32_t owned = ((1u << end) - 1) & ~((1u << begin) - 1);
    owned |= c.down ? 0 : owned << 8;
    owned = piece * 16 < c.size ? owned >> row0 : 0;
    const uint32_t stride = DECODE_ROWS * c.bytes;
    // Every other row is moved by 64 bytes, so that reads of two rows fall on all banks.
    const uint32_t to = ptx_shared(shared.ring[threadIdx.x / 32][c.slot]) + row0 * DECODE_BYTES +
                        (piece ^ row0 * 4) * 16;
#pragma unroll
    for (uint32_t i = 0; i < DECODE_COPIES; i++) {
        const char *from = i < DECODE_COPIES / 2 ? low : high;
        const uint64_t rows = i % (DECODE_COPIES / 2);
        if (owned >> i * 2 & 1)
            ptx_copy_sixteen(to + i * 512, from + rows * stride, present, policy);
    }
}
#endif

// Starts the copy of the next slot, as one group also where there is none.
static __device__ __forceinline__ void slot_copy(decode_shared_t &shared,
                                                 const decode_phase_t &gate,
                                                 const decode_phase_t &down, decode_cursor_t *c,
                                                 uint64_t policy)
{
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t row0 = lane / DECODE_PIECES, piece = lane % DECODE_PIECES;
#if DECODE_PAIRS
    if (c->paired) {
        pairs_copy(shared, down, c, policy);
        return;
    }
#endif
    if (!c->ended) {
        const uint32_t along = c->unit * c->size + piece * 16;
        const uint32_t present = along < c->bytes ? 16 : 0; // past the end: zeros
        const uint64_t skip = (uint64_t)row0 * c->bytes + (present ? along : 0);
        const unsigned long long *const rows_at = shared.tile_at(warp, c->tile);
        const char *low = (const char *)rows_at[0] + skip;
        const char *high = (const char *)rows_at[1] + skip;
        [[maybe_unused]] const uint64_t stride = (uint64_t)DECODE_ROWS * c->bytes;
#if DECODE_LEAN
        lean_copies(shared, *c, low, high, row0, piece, present, policy);
#else
        // Rows that this block does not own are left as they are: nobody looks at their sums.
        const uint32_t first = c->down ? down.first : gate.first;
        const uint32_t count = piece * 16 < c->size ? (c->down ? down.count : gate.count) : 0;
        const uint32_t v = (c->down ? down.base + (c->first + c->tile) * 16
                                    : gate.base + (c->first + c->tile) * 8) +
                           row0 - first;
        const uint32_t v_high = v + (c->down ? 8 : 0);
        // Every other row is moved by 64 bytes, so that reads of two rows fall on all banks.
        uint32_t to = ptx_shared(shared.ring[warp][c->slot]) + row0 * DECODE_BYTES;
        if (DECODE_ROWS % 2 == 0)
            to += (piece ^ (row0 & 1) * 4) * 16;
#pragma unroll
        for (uint32_t i = 0; i < DECODE_COPIES; i++) {
            const bool upper = i >= DECODE_COPIES / 2;
            const uint32_t n = upper ? i - DECODE_COPIES / 2 : i;
            uint32_t at = to + i * 512;
            if (DECODE_ROWS % 2 != 0)
                at += (piece ^ (i & 1) * 4) * 16;
            if ((upper ? v_high : v) + n * DECODE_ROWS < count)
                ptx_copy_sixteen(at, (upper ? high : low) + n * stride, present, policy);
        }
#endif
        if (++c->tile == c->live) {
            c->tile = 0;
            c->unit += DECODE_WARPS;
            cursor_settle(shared, gate, down, c);
        }
    }
    ptx_copies_commit();
    c->slot = c->slot + 1 == DECODE_DEPTH ? 0 : c->slot + 1;
}

// From the first slot of the layer on; the ring is empty.
static __device__ __forceinline__ void cursor_begin(decode_shared_t &shared,
                                                    const decode_phase_t &gate,
                                                    const decode_phase_t &down, decode_cursor_t *c,
                                                    uint64_t policy)
{
    c->unit = threadIdx.x / 32;
    c->pass = c->part = c->slot = 0;
    c->down = gate.passes == 0;
    c->ended = c->down && down.passes == 0;
    c->bytes = c->size = 0;
#if DECODE_PAIRS
    c->paired = false;
    if (c->down && shared.state.layers[shared.state.now].signature.experts)
        pairs_begin(shared.state, down, c);
    else
#endif
    if (!c->ended) {
        cursor_locate(shared, phase_pick(c->down, gate, down), c);
        cursor_settle(shared, gate, down, c);
    }
#pragma unroll 1
    for (uint32_t i = 0; i < DECODE_DEPTH; i++)
        slot_copy(shared, gate, down, c, policy);
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
template <typename T>
static __device__ __forceinline__ void pair_store(const decode_state_t &sh, const decode_phase_t &p,
                                                  uint32_t v, uint32_t row, float gate, float up)
{
    const decode_layer_t &layer = sh.layers[sh.now];
    const decode_call_t &call = sh.call;
    if (v - p.first >= p.count || row >= call.command.rows)
        return;
    const uint32_t index = min(v / layer.signature.intermediate, call.experts_chosen);
    if (!(sh.mask_of[index] >> row & 1))
        return;
    float value = ptx_activate(layer.signature.activation, gate, up);
    if (index < call.experts_chosen)
        value *= route_weight(sh, layer.signature.top_k, row, sh.part_of[index]);
    ((T *)call.lane.activations)[row * call.lane.pitch + v] = ptx_from_float<T>(value);
}

template <typename T>
static __device__ __forceinline__ void column_store(const decode_state_t &sh,
                                                    const decode_phase_t &p, uint32_t column,
                                                    uint32_t row, float value)
{
    const ffn_cuda_command_t &command = sh.call.command;
    if (column - p.first >= p.count || row >= command.rows)
        return;
    const uint64_t at = (uint64_t)row * sh.layers[sh.now].signature.hidden + column;
    if (command.output)
        ((T *)command.output)[at] = ptx_from_float<T>(value);
    else
        command.partial[at] = value;
}

// The warps' sums of 8 rows of input, added and stored. All threads.
template <typename T>
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
            pair_store<T>(sh, p, p.base + (tile + i / 64) * 8 + lane / 4, row + i / 32 % 2, gate, up);
        }
    }
}

// The rows that chose a part of which the pass of gate and up has pairs.
static __device__ __forceinline__ uint32_t pass_mask(const decode_state_t &sh, const decode_phase_t &p,
                                                     uint32_t pass)
{
    const decode_layer_t &layer = sh.layers[sh.now];
    const uint32_t width = layer.signature.intermediate, last = sh.call.experts_chosen;
    if (layer.signature.experts == 0)
        return 0xffffffff;
    const uint32_t v = p.base + pass_begin(p, pass) * 8;
    const uint32_t end = min((p.base + pass_begin(p, pass + 1) * 8 - 1) / width, last);
    uint32_t mask = 0;
    for (uint32_t index = min(v / width, last); index <= end; index++)
        mask |= sh.mask_of[index];
    return mask;
}

// The next unit that this warp multiplies.
struct decode_place_t {
    uint32_t bytes, size;
    uint32_t unit, pass, part;
    uint32_t mask; // rows whose sums it adds to
    bool ended;
};

static __device__ __forceinline__ void place_mask(const decode_state_t &sh, bool down,
                                                  const decode_phase_t &p, decode_place_t *place)
{
    const uint32_t rows = 0xffffffff >> (32 - sh.call.command.rows);
    place->mask = 0;
    if (!place->ended)
        place->mask = rows & (down ? sh.mask_of[place->part] : pass_mask(sh, p, place->pass));
}

static __device__ __forceinline__ void place_settle(const decode_state_t &sh, bool down,
                                                    const decode_phase_t &p, decode_place_t *place)
{
    while (!place->ended && place->unit * place->size >= place->bytes) {
        const uint32_t kind = part_kind(sh, down, place->part + 1);
        place->unit = threadIdx.x / 32;
        if (++place->part >= p.parts) {
            place->part = 0;
            place->ended = ++place->pass >= p.passes;
        } else if (down) {
            place->bytes = part_bytes(sh.layers[sh.now], kind);
            place->size = sh.layers[sh.now].unit[kind];
        }
        if (place->part == 0) {
            const uint32_t first = part_kind(sh, down, 0);
            place->bytes = part_bytes(sh.layers[sh.now], first);
            place->size = sh.layers[sh.now].unit[first];
        }
        place_mask(sh, down, p, place);
    }
}

// A row's piece of a unit; zeros where it is not asked for.
static __device__ __forceinline__ void row_load(const decode_state_t &sh, bool down,
                                                const decode_place_t &place, uint32_t input, bool asked,
                                                uint4 (&x)[DECODE_STEPS])
{
    const decode_call_t &call = sh.call;
    const uint32_t along = place.unit * place.size + threadIdx.x % 4 * 16;
    const char *from =
        along +
        (down ? call.lane.activations +
                    (input * call.lane.pitch +
                     (uint64_t)place.part * sh.layers[sh.now].signature.intermediate) *
                        2
              : (const char *)call.command.input + (uint64_t)input * place.bytes);
#pragma unroll
    for (uint32_t s = 0; s < DECODE_STEPS; s++)
        x[s] = ptx_load_l2_if(from + s * 64,
                              asked && s * 64 < place.size && along + s * 64 < place.bytes);
}

// The input rows' piece of a unit, as the products take it: row 8 * n + lane / 4 in x[n].
template <int NB>
static __device__ __forceinline__ void place_load(const decode_state_t &sh, bool down,
                                                  const decode_place_t &place,
                                                  uint4 (&x)[NB][DECODE_STEPS])
{
#pragma unroll
    for (int n = 0; n < NB; n++) {
        const uint32_t input = n * 8 + threadIdx.x % 32 / 4;
        row_load(sh, down, place, input, place.mask >> input & 1, x[n]);
    }
}

// The same of 8 rows that are asked for, without gaps, past the first `skip` of them.
static __device__ __forceinline__ void place_load_close(const decode_state_t &sh, bool down,
                                                        const decode_place_t &place, uint32_t skip,
                                                        uint4 (&x)[DECODE_STEPS])
{
    uint32_t left = place.mask;
    for (uint32_t i = 0; i < skip + threadIdx.x % 32 / 4; i++)
        left &= left - 1;
    row_load(sh, down, place, left ? __ffs(left) - 1 : 0, left != 0, x);
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

// All units of a phase; NB times 8 rows. Copies of what comes after them are started on the way.
template <typename T, int NB>
static __device__ __forceinline__ void
phase_run(decode_shared_t &shared, bool is_down, const decode_phase_t &gate,
          const decode_phase_t &down, decode_cursor_t *c, uint32_t *slot, uint32_t *buffer,
          uint64_t policy)
{
    // Of many rows few are asked for at a time, and what is loaded ahead has no gaps.
    constexpr bool MANY = NB > 2;
    constexpr uint32_t TILES = MANY ? DECODE_TILES / 2 : DECODE_TILES;
    constexpr int HELD = MANY ? 1 : NB;
    const decode_state_t &sh = shared.state;
    const decode_phase_t p = phase_pick(is_down, gate, down);
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4;
    const unsigned char *const mine = shared.ring[warp][0] + row * DECODE_BYTES + lane % 4 * 16;
    const uint32_t odd = row % 2 * 64;
    decode_place_t place;
    uint4 held[HELD][DECODE_STEPS];
    place.unit = warp;
    place.pass = place.part = 0;
    place.ended = p.passes == 0;
    place.bytes = part_bytes(sh.layers[sh.now], part_kind(sh, is_down, 0));
    place.size = sh.layers[sh.now].unit[part_kind(sh, is_down, 0)];
    place_mask(sh, is_down, p, &place);
    place_settle(sh, is_down, p, &place);
    if constexpr (MANY)
        place_load_close(sh, is_down, place, 0, held[0]);
    else
        place_load<NB>(sh, is_down, place, held);
#pragma unroll 1
    for (uint32_t pass = 0; pass < p.passes; pass++) {
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
            const uint32_t size = place.size;
            const decode_place_t at_hand = place;
            uint4 later[HELD][DECODE_STEPS];
            place.unit += DECODE_WARPS;
            place_settle(sh, is_down, p, &place);
            if constexpr (MANY)
                place_load_close(sh, is_down, place, 0, later[0]);
            else
                place_load<NB>(sh, is_down, place, later);
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
                        place_load_close(sh, is_down, at_hand, skip, more);
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
                slot_copy(shared, gate, down, c, policy);
            }
#pragma unroll
            for (int n = 0; n < HELD; n++)
#pragma unroll
                for (uint32_t s = 0; s < DECODE_STEPS; s++)
                    held[n][s] = later[n][s];
        }
        // Two buffers: who is at the next sums' barrier has read these.
        const uint32_t wanted = is_down || NB == 1 ? 0xffffffff : pass_mask(sh, p, pass);
#pragma unroll
        for (int n = 0; n < NB; n++) {
            float(*sums)[DECODE_TILES * 4][32] = shared.sums[*buffer];
            if (NB > 1 && (wanted >> n * 8 & 0xff) == 0)
                continue; // nobody's
#pragma unroll
            for (uint32_t t = 0; t < TILES; t++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    sums[warp][t * 4 + i][lane] = sum[t][n][i];
            __syncthreads();
            pass_store<T>(sh, sums, p, is_down, tile, live, n * 8);
            *buffer ^= 1;
        }
    }
}
#endif
