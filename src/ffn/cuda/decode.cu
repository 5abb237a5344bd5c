// SPDX-License-Identifier: MIT
// The whole FFN of one layer for 1 to 16 rows in one cooperative launch: router, gate and up, down.
//
// Few rows make this a matter of streaming weights. Every warp does the same: it copies weights into a
// ring of its own in shared memory (cp.async, 16 bytes a lane), multiplies what has come on tensor
// cores, and starts the next copy into that place. Nobody waits for another warp to get or to free
// a place, so a few warps suffice, and what is under way is what the ring holds.
//
//   slot    a tile of 16 weight rows by a unit of the inner dimension: one copy, one wait
//   unit    at most BYTES of each row, so many that the warps get equal numbers of them
//   pass    up to TILES tiles over the whole inner dimension; the units of a pass go round the warps,
//           and the warps' sums are added in the warps' order when the pass ends. The input rows'
//           piece of a unit is loaded once for all tiles of the pass, a unit ahead
//   gate    a block owns a range of (gate row, up row) pairs over all chosen parts; a tile is 8 gate
//           rows above their 8 up rows, so that one lane holds both sums of a pair
//   down    a block owns a range of output columns; the inner dimension runs over all chosen parts in
//           ascending order, the shared part last, so the sum over experts stays in the registers
//
// Copies run ahead over all borders: passes, the barrier between gate and down (weights depend on
// nothing), and, in the resident kernel, from one layer to the next: the first weights of a dense
// layer, the router of a layer of experts.
//
// Which warp multiplies which part of the inner dimension depends on the layer's shape alone. So a row
// gives the same bits alone and among 15 others, and whichever block has its pairs. Lanes read 16
// contiguous bytes of a row as four K pairs of two products; rows and weights use the same order of K,
// so it does not matter which.
//
// A layer of experts is short, and a trip to L2 and back takes as long as 5 MB of weights. So a logit is
// one word with the Invocation's number in it, which all blocks look for at once and choose by
// themselves; and what describes a layer is fetched while another one runs.
//
// Nothing waits without a partner that is already running: the launch is cooperative. Needs sm_90.
#include "ffn/cuda/decode_shape.h"
#include "ffn/cuda/dispatch_steps.h"
#include "ffn/cuda/ptx.cuh"
#include "ffn/cuda/route.cuh"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 900

#define DECODE_LOOKS 64u // polls of the queue between two looks at `stop`
#define COMMAND_WORDS ((uint32_t)(sizeof(ffn_cuda_command_t) / 8))

// What does not change while a Lane exists.
struct decode_lane_t {
    const ffn_cuda_lane_t *lane;
    ffn_cuda_meeting_t *meeting;
    uint64_t *logits;
    char *activations;
    uint64_t pitch; // elements
    uint32_t (*cycles)[FFN_CUDA_MAX_BLOCKS];
    uint32_t (*trace)[FFN_CUDA_MAX_BLOCKS];
    uint32_t share[2][2]; // of gate and of down: begin, end
};

// What a layer is.
struct decode_layer_t {
    const ffn_cuda_layer_t *at;
    ffn_cuda_signature_t signature;
    const ffn_cuda_part_t *parts;
    const void *router;
    const float *bias;
    ffn_cuda_part_t dense; // the only part of a dense layer
    uint32_t next;
    uint32_t last_width; // width of the dense or shared part; 0 = none
    uint32_t unit[3];    // bytes of a unit: of `hidden`, of `intermediate`, of `last_width`
};

// What an Invocation is.
struct decode_call_t {
    ffn_cuda_command_t command; // of which lane, layers, layer, rows, input, output, partial also
                                // without a queue
    decode_lane_t lane;
    uint64_t acted_target;
    uint32_t number;         // the Invocation's, of its meeting: what its logits are marked with
    uint32_t experts_chosen; // parts of `intermediate` width
    uint32_t leave;
    uint64_t began_ns;
};

struct decode_state_t {
    decode_call_t call;
    decode_lane_t lanes[FFN_CUDA_MAX_LANES];
    decode_layer_t layers[2];
    uint32_t now; // index of the current or coming layer in `layers`
    uint32_t ahead; // the first copies of layers[now] are under way
    uint32_t ahead_share[2][2];
    uint32_t look_ahead;
    float router[16][FFN_CUDA_DECODE_ROWS]; // sums of a warp
    uint32_t expert_mask[FFN_CUDA_MAX_EXPERTS];
    float weight[FFN_CUDA_DECODE_ROWS][FFN_CUDA_MAX_TOP_K];
    uint16_t chosen[FFN_CUDA_DECODE_ROWS][FFN_CUDA_MAX_TOP_K];
    uint16_t part_of[FFN_CUDA_MAX_EXPERTS + 1], mask_of[FFN_CUDA_MAX_EXPERTS + 1];
    float bias[FFN_CUDA_MAX_EXPERTS];
    ffn_cuda_part_t parts[FFN_CUDA_MAX_EXPERTS + 1]; // of the current layer of experts
};
static_assert(sizeof(decode_state_t) <= DECODE_STATE_BYTES, "DECODE_STATE_BYTES is too small");
static_assert(sizeof(ffn_cuda_command_t) == 128, "a command is read by 16 lanes");

template <uint32_t W, uint32_t T, uint32_t B, uint32_t D> struct decode_shape_t {
    static constexpr uint32_t WARPS = W, TILES = T, BYTES = B, DEPTH = D;
    static constexpr uint32_t THREADS = W * 32, STEPS = B / 64;
    static constexpr uint32_t SLOT_BYTES = 16 * B, RING_BYTES = W * D * SLOT_BYTES;
    static constexpr uint32_t COPIES = B / 32;    // of 512 bytes, a slot
    static constexpr uint32_t PIECES = B / 16;    // of a row
    static constexpr uint32_t ROWS = 32 / PIECES; // of a copy
    static_assert(D * SLOT_BYTES >= FFN_CUDA_MAX_EXPERTS * 4, "a warp's ring holds a row's scores");
    static_assert(W >= 2 && W <= 16, "warps have their parts");
};

template <typename S> struct decode_shared_t {
    unsigned char ring[S::WARPS][S::DEPTH][S::SLOT_BYTES];
    float sums[2][S::WARPS][S::TILES * 4][32];
    unsigned long long rows_at[S::WARPS][S::TILES][2]; // rows 0 and 8 of each tile that a warp copies
    decode_state_t state;
};

static __device__ __forceinline__ uint64_t clock_ns()
{
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// Adds the time since the command was seen; one thread.
static __device__ __forceinline__ void decode_mark(const decode_call_t &call, uint32_t which)
{
    if (call.lane.trace)
        ptx_add_relaxed(&call.lane.trace[which][blockIdx.x], (uint32_t)(clock_ns() - call.began_ns));
}

// ---- shares --------------------------------------------------------------------------------------
// A block's share of a phase.
struct decode_phase_t {
    uint32_t first, count; // pairs of rows, or output columns
    uint32_t base;         // of the first tile: pairs lie in tiles of 8 that do not cross parts
    uint32_t tiles, passes;
    uint32_t parts; // sections of the inner dimension
};

static __device__ __forceinline__ uint32_t ceil_div(uint32_t a, uint32_t b)
{
    return (a + b - 1) / b;
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

template <typename S>
static __device__ __forceinline__ decode_phase_t phase_of(const decode_state_t &sh, bool down)
{
    const decode_layer_t &layer = sh.layers[sh.now];
    const decode_call_t &call = sh.call;
    const uint32_t total =
        down ? layer.signature.hidden
             : call.experts_chosen * layer.signature.intermediate + layer.last_width;
    const uint32_t begin = call.lane.share[down][0], end = call.lane.share[down][1];
    decode_phase_t p;
    p.first = (uint32_t)((uint64_t)total * begin / FFN_CUDA_SHARE_ONE);
    p.count = (uint32_t)((uint64_t)total * end / FFN_CUDA_SHARE_ONE) - p.first;
    p.base = down ? p.first : p.first / 8 * 8;
    p.tiles = p.count ? ceil_div(p.first + p.count - p.base, down ? 16 : 8) : 0;
    p.passes = ceil_div(p.tiles, S::TILES);
    p.parts = down ? call.experts_chosen + (layer.last_width != 0) : 1;
    return p;
}

// By value: an address of either would put both into local memory.
static __device__ __forceinline__ decode_phase_t phase_pick(bool is_down, const decode_phase_t &gate,
                                                            const decode_phase_t &down)
{
    return {is_down ? down.first : gate.first, is_down ? down.count : gate.count,
            is_down ? down.base : gate.base,   is_down ? down.tiles : gate.tiles,
            is_down ? down.passes : gate.passes, is_down ? down.parts : gate.parts};
}

static __device__ __forceinline__ uint32_t pass_begin(const decode_phase_t &p, uint32_t pass)
{
    return p.tiles * pass / p.passes;
}

// Which of a layer's widths a part has: 0 `hidden`, 1 `intermediate`, 2 the last part's.
static __device__ __forceinline__ uint32_t part_kind(const decode_state_t &sh, bool down,
                                                     uint32_t part)
{
    return !down ? 0 : (part < sh.call.experts_chosen ? 1 : 2);
}

static __device__ __forceinline__ uint32_t part_bytes(const decode_layer_t &layer, uint32_t kind)
{
    return 2 * (kind == 0   ? layer.signature.hidden
                : kind == 1 ? layer.signature.intermediate
                            : layer.last_width);
}

// Of a dimension of so many bytes: as few rounds of the warps as there can be, equal units.
template <typename S> static __device__ __forceinline__ uint32_t unit_bytes(uint32_t bytes)
{
    const uint32_t rounds = max(ceil_div(bytes, S::BYTES * S::WARPS), 1u);
    return max(ceil_div(bytes, rounds * S::WARPS * 64) * 64, 64u);
}

static __device__ __forceinline__ ffn_cuda_part_t part_at(const decode_state_t &sh, uint32_t index)
{
    const decode_layer_t &layer = sh.layers[sh.now];
    return layer.signature.experts ? sh.parts[sh.part_of[index]] : layer.dense;
}

// ---- copies --------------------------------------------------------------------------------------
// The next slot that this warp copies; all lanes hold the same.
struct decode_cursor_t {
    uint32_t bytes, size; // of a row; of a unit
    uint32_t tile, live;  // of the pass: next, how many
    uint32_t first;       // tile of the pass, in the phase
    uint32_t unit, pass, part, slot;
    bool down, ended;
};

// Begins the pass, or another part of it.
template <typename S>
static __device__ __forceinline__ void cursor_locate(decode_shared_t<S> &shared,
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
        shared.rows_at[warp][lane][0] = (unsigned long long)low;
        shared.rows_at[warp][lane][1] = (unsigned long long)high;
    }
    __syncwarp();
}

// Goes on to the next unit that exists.
template <typename S>
static __device__ __forceinline__ void cursor_settle(decode_shared_t<S> &shared,
                                                     const decode_phase_t &gate,
                                                     const decode_phase_t &down, decode_cursor_t *c)
{
    while (!c->ended && c->unit * c->size >= c->bytes) {
        c->unit = threadIdx.x / 32;
        if (!c->down) {
            c->down = ++c->pass >= gate.passes;
            c->pass = c->down ? 0 : c->pass;
        } else if (++c->part >= down.parts) {
            c->part = 0;
            c->pass++;
        }
        c->ended = c->down && c->pass >= down.passes;
        if (!c->ended)
            cursor_locate<S>(shared, phase_pick(c->down, gate, down), c);
    }
}

// Starts the copy of the next slot, as one group also where there is none.
template <typename S>
static __device__ __forceinline__ void slot_copy(decode_shared_t<S> &shared,
                                                 const decode_phase_t &gate,
                                                 const decode_phase_t &down, decode_cursor_t *c,
                                                 uint64_t policy)
{
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t row0 = lane / S::PIECES, piece = lane % S::PIECES;
    if (!c->ended) {
        const uint32_t along = c->unit * c->size + piece * 16;
        const uint32_t present = along < c->bytes ? 16 : 0; // past the end: zeros
        const uint64_t skip = (uint64_t)row0 * c->bytes + (present ? along : 0);
        const char *low = (const char *)shared.rows_at[warp][c->tile][0] + skip;
        const char *high = (const char *)shared.rows_at[warp][c->tile][1] + skip;
        const uint64_t stride = (uint64_t)S::ROWS * c->bytes;
        // Rows that this block does not own are left as they are: nobody looks at their sums.
        const uint32_t first = c->down ? down.first : gate.first;
        const uint32_t count = piece * 16 < c->size ? (c->down ? down.count : gate.count) : 0;
        const uint32_t v = (c->down ? down.base + (c->first + c->tile) * 16
                                    : gate.base + (c->first + c->tile) * 8) +
                           row0 - first;
        const uint32_t v_high = v + (c->down ? 8 : 0);
        // Every other row is moved by 64 bytes, so that reads of two rows fall on all banks.
        uint32_t to = ptx_shared(shared.ring[warp][c->slot]) + row0 * S::BYTES;
        if (S::ROWS % 2 == 0)
            to += (piece ^ (row0 & 1) * 4) * 16;
#pragma unroll
        for (uint32_t i = 0; i < S::COPIES; i++) {
            const bool upper = i >= S::COPIES / 2;
            const uint32_t n = upper ? i - S::COPIES / 2 : i;
            uint32_t at = to + i * 512;
            if (S::ROWS % 2 != 0)
                at += (piece ^ (i & 1) * 4) * 16;
            if ((upper ? v_high : v) + n * S::ROWS < count)
                ptx_copy_sixteen(at, (upper ? high : low) + n * stride, present, policy);
        }
        if (++c->tile == c->live) {
            c->tile = 0;
            c->unit += S::WARPS;
            cursor_settle<S>(shared, gate, down, c);
        }
    }
    ptx_copies_commit();
    c->slot = c->slot + 1 == S::DEPTH ? 0 : c->slot + 1;
}

// From the first slot of the layer on; the ring is empty.
template <typename S>
static __device__ __forceinline__ void cursor_begin(decode_shared_t<S> &shared,
                                                    const decode_phase_t &gate,
                                                    const decode_phase_t &down, decode_cursor_t *c,
                                                    uint64_t policy)
{
    c->unit = threadIdx.x / 32;
    c->pass = c->part = c->slot = 0;
    c->down = gate.passes == 0;
    c->ended = c->down && down.passes == 0;
    c->bytes = c->size = 0;
    if (!c->ended) {
        cursor_locate<S>(shared, phase_pick(c->down, gate, down), c);
        cursor_settle<S>(shared, gate, down, c);
    }
#pragma unroll 1
    for (uint32_t i = 0; i < S::DEPTH; i++)
        slot_copy<S>(shared, gate, down, c, policy);
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
template <typename S, typename T>
static __device__ __forceinline__ void
pass_store(const decode_state_t &sh, const float (*sums)[S::TILES * 4][32], const decode_phase_t &p,
           bool down, uint32_t tile, uint32_t live, uint32_t first_row)
{
    for (uint32_t i = threadIdx.x; i < live * (down ? 128 : 64); i += S::THREADS) {
        const uint32_t lane = i % 32, row = first_row + lane % 4 * 2;
        if (down) {
            const uint32_t which = i / 32; // tile * 4 + number of the lane's sum
            if (row + which % 2 >= sh.call.command.rows)
                continue;
            float sum = 0.0f;
#pragma unroll
            for (uint32_t w = 0; w < S::WARPS; w++)
                sum += sums[w][which][lane];
            column_store<T>(sh, p, p.base + (tile + which / 4) * 16 + which % 4 / 2 * 8 + lane / 4,
                            row + which % 2, sum);
        } else {
            const uint32_t which = i / 64 * 4 + i / 32 % 2;
            if (row + i / 32 % 2 >= sh.call.command.rows)
                continue;
            float gate = 0.0f, up = 0.0f;
#pragma unroll
            for (uint32_t w = 0; w < S::WARPS; w++) {
                gate += sums[w][which][lane];
                up += sums[w][which + 2][lane];
            }
            pair_store<T>(sh, p, p.base + (tile + i / 64) * 8 + lane / 4, row + i / 32 % 2, gate, up);
        }
    }
}

// The next unit that this warp multiplies.
struct decode_place_t {
    uint32_t bytes, size;
    uint32_t unit, pass, part;
    bool ended;
};

template <typename S>
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
    }
}

// The input rows' piece of a unit; zeros for rows that do not exist or did not choose the part.
template <typename S, int NB>
static __device__ __forceinline__ void place_load(const decode_state_t &sh, bool down,
                                                  const decode_place_t &place,
                                                  uint4 (&x)[S::STEPS][NB])
{
    const decode_call_t &call = sh.call;
    const uint32_t lane = threadIdx.x % 32, row = lane / 4;
    const uint32_t mask = place.ended ? 0 : (down ? sh.mask_of[place.part] : 0xffff);
    const uint32_t along = place.unit * place.size + lane % 4 * 16;
#pragma unroll
    for (int n = 0; n < NB; n++) {
        const uint32_t input = n * 8 + row;
        const bool asked = input < call.command.rows && mask >> input & 1;
        const char *from =
            along + (down ? call.lane.activations +
                                (input * call.lane.pitch +
                                 (uint64_t)place.part * sh.layers[sh.now].signature.intermediate) *
                                    2
                          : (const char *)call.command.input + (uint64_t)input * place.bytes);
#pragma unroll
        for (uint32_t s = 0; s < S::STEPS; s++)
            x[s][n] = ptx_load_l2_if(from + s * 64, asked && s * 64 < place.size &&
                                                        along + s * 64 < place.bytes);
    }
}

// All units of a phase; NB times 8 rows. Copies of what comes after them are started on the way.
template <typename S, typename T, int NB>
static __device__ __forceinline__ void
phase_run(decode_shared_t<S> &shared, bool is_down, const decode_phase_t &gate,
          const decode_phase_t &down, decode_cursor_t *c, uint32_t *slot, uint32_t *buffer,
          uint64_t policy)
{
    const decode_state_t &sh = shared.state;
    const decode_phase_t p = phase_pick(is_down, gate, down);
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4;
    const unsigned char *const mine = shared.ring[warp][0] + row * S::BYTES + lane % 4 * 16;
    const uint32_t odd = row % 2 * 64;
    decode_place_t place;
    uint4 x[S::STEPS][NB];
    place.unit = warp;
    place.pass = place.part = 0;
    place.ended = p.passes == 0;
    place.bytes = part_bytes(sh.layers[sh.now], part_kind(sh, is_down, 0));
    place.size = sh.layers[sh.now].unit[part_kind(sh, is_down, 0)];
    place_settle<S>(sh, is_down, p, &place);
    place_load<S, NB>(sh, is_down, place, x);
#pragma unroll 1
    for (uint32_t pass = 0; pass < p.passes; pass++) {
        const uint32_t tile = pass_begin(p, pass), live = pass_begin(p, pass + 1) - tile;
        float sum[S::TILES][NB][4];
#pragma unroll
        for (uint32_t t = 0; t < S::TILES; t++)
#pragma unroll
            for (int n = 0; n < NB; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    sum[t][n][i] = 0.0f;
#pragma unroll 1
        while (!place.ended && place.pass == pass) {
            const uint32_t size = place.size;
            uint4 later[S::STEPS][NB];
            place.unit += S::WARPS;
            place_settle<S>(sh, is_down, p, &place);
            place_load<S, NB>(sh, is_down, place, later);
#pragma unroll
            for (uint32_t t = 0; t < S::TILES; t++) {
                if (t >= live)
                    break;
                ptx_copies_wait<S::DEPTH - 1>();
                __syncwarp();
                const unsigned char *const at = mine + *slot * S::SLOT_BYTES;
#pragma unroll
                for (uint32_t s = 0; s < S::STEPS; s++) {
                    if (s * 64 >= size)
                        break;
                    const unsigned char *a = at + (s * 64 ^ odd);
                    const uint4 low = *(const uint4 *)a;
                    const uint4 high = *(const uint4 *)(a + 8 * S::BYTES);
#pragma unroll
                    for (int n = 0; n < NB; n++) {
                        ptx_mma<T>(sum[t][n], low.x, high.x, low.y, high.y, x[s][n].x, x[s][n].y);
                        ptx_mma<T>(sum[t][n], low.z, high.z, low.w, high.w, x[s][n].z, x[s][n].w);
                    }
                }
                __syncwarp();
                *slot = *slot + 1 == S::DEPTH ? 0 : *slot + 1;
                slot_copy<S>(shared, gate, down, c, policy);
            }
#pragma unroll
            for (uint32_t s = 0; s < S::STEPS; s++)
#pragma unroll
                for (int n = 0; n < NB; n++)
                    x[s][n] = later[s][n];
        }
        // Two buffers: who is at the next sums' barrier has read these.
#pragma unroll
        for (int n = 0; n < NB; n++) {
            float(*sums)[S::TILES * 4][32] = shared.sums[*buffer];
#pragma unroll
            for (uint32_t t = 0; t < S::TILES; t++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    sums[warp][t * 4 + i][lane] = sum[t][n][i];
            __syncthreads();
            pass_store<S, T>(sh, sums, p, is_down, tile, live, n * 8);
            *buffer ^= 1;
        }
    }
}

// ---- router --------------------------------------------------------------------------------------
// Where this block's rows of the router lie: one after another in the ring, if all fit.
template <typename S>
static __device__ __forceinline__ bool router_fits(const ffn_cuda_signature_t &s, uint32_t row_bytes)
{
    return ceil_div(s.experts, gridDim.x) * row_bytes <= S::RING_BYTES;
}

static __device__ __forceinline__ uint32_t router_row_bytes(const ffn_cuda_signature_t &s)
{
    return s.hidden * (s.router_dtype == FFN_CUDA_F32 ? 4 : 2);
}

// Starts the copies of what choosing takes: this block's rows of the router (each thread those pieces
// that it multiplies), the parts' addresses, the bias. The ring is empty.
template <typename S>
static __device__ __forceinline__ void experts_fetch(decode_shared_t<S> &shared, uint64_t policy)
{
    decode_state_t &sh = shared.state;
    const decode_layer_t &layer = sh.layers[sh.now];
    const ffn_cuda_signature_t &s = layer.signature;
    const uint32_t row_bytes = router_row_bytes(s), element = row_bytes / s.hidden;
    if (router_fits<S>(s, row_bytes)) {
        uint32_t to = ptx_shared(shared.ring[0][0]);
        for (uint32_t e = blockIdx.x; e < s.experts; e += gridDim.x, to += row_bytes) {
            const char *from = (const char *)layer.router + (uint64_t)e * row_bytes;
            for (uint32_t k = threadIdx.x * 8; k < s.hidden; k += S::THREADS * 8)
                for (uint32_t i = 0; i < element / 2; i++)
                    ptx_copy_sixteen(to + k * element + i * 16,
                                     from + (uint64_t)k * element + i * 16, 16, policy);
        }
    }
    const uint32_t words = (s.experts + (layer.last_width != 0)) * sizeof(ffn_cuda_part_t) / 8;
    for (uint32_t i = threadIdx.x; i < words; i += S::THREADS)
        ptx_copy_eight(ptx_shared(sh.parts) + i * 8, (const char *)layer.parts + i * 8);
    if (layer.bias)
        for (uint32_t i = threadIdx.x; i < s.experts; i += S::THREADS)
            ptx_copy_four(ptx_shared(sh.bias) + i * 4, layer.bias + i);
    ptx_copies_commit();
}

// One expert's logits of all rows: a thread takes 8 elements of every THREADS * 8, for each row; the
// sums of a row are added in the order of the warps. So a row's logit does not depend on how many rows
// there are, and an expert's weights are read once. weights: in shared or in global memory.
template <typename S, typename T>
static __device__ __forceinline__ void router_sums(decode_state_t &sh, const char *weights, bool wide)
{
    enum { AT_ONCE = 8 }; // rows whose elements are loaded before the first is used
    const uint32_t hidden = sh.layers[sh.now].signature.hidden, rows = sh.call.command.rows;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const char *input = (const char *)sh.call.command.input;
    float sum[FFN_CUDA_DECODE_ROWS];
#pragma unroll
    for (uint32_t r = 0; r < FFN_CUDA_DECODE_ROWS; r++)
        sum[r] = 0.0f;
    for (uint32_t k = threadIdx.x * 8; k < hidden; k += S::THREADS * 8) {
        float w[8];
#pragma unroll
        for (uint32_t first = 0; first < FFN_CUDA_DECODE_ROWS; first += AT_ONCE) {
            if (first >= rows)
                break;
            uint4 x[AT_ONCE];
#pragma unroll
            for (uint32_t r = 0; r < AT_ONCE; r++)
                x[r] = ptx_load_l2_if(input + ((uint64_t)(first + r) * hidden + k) * 2,
                                      first + r < rows);
            if (first == 0) {
                ptx_copies_wait<0>();
                if (wide) {
                    *(float4 *)&w[0] = *(const float4 *)(weights + (uint64_t)k * 4);
                    *(float4 *)&w[4] = *(const float4 *)(weights + (uint64_t)k * 4 + 16);
                } else {
                    const uint4 packed = *(const uint4 *)(weights + (uint64_t)k * 2);
                    const uint32_t ws[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        *(float2 *)&w[i * 2] = ptx_unpack<T>(ws[i]);
                }
            }
#pragma unroll
            for (uint32_t r = 0; r < AT_ONCE; r++) {
                const uint32_t xs[4] = {x[r].x, x[r].y, x[r].z, x[r].w};
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float2 pair = ptx_unpack<T>(xs[i]);
                    sum[first + r] = fmaf(pair.x, w[i * 2], sum[first + r]);
                    sum[first + r] = fmaf(pair.y, w[i * 2 + 1], sum[first + r]);
                }
            }
        }
    }
#pragma unroll
    for (uint32_t r = 0; r < FFN_CUDA_DECODE_ROWS; r++) {
        if (r >= rows)
            break;
        for (uint32_t d = 16; d; d /= 2)
            sum[r] += __shfl_xor_sync(ROUTE_ALL, sum[r], d);
        if (lane == 0)
            sh.router[warp][r] = sum[r];
    }
}

// A row's logits as soon as all blocks have written theirs, and its experts; one warp. scratch: a float
// for each expert.
template <uint32_t HELD>
static __device__ __forceinline__ void row_choose(decode_state_t &sh, uint32_t row, float *scratch)
{
    const decode_layer_t &layer = sh.layers[sh.now];
    const ffn_cuda_signature_t &s = layer.signature;
    const uint32_t lane = threadIdx.x % 32, number = sh.call.number;
    const uint64_t *at = sh.call.lane.logits + row * s.experts;
    float logit[HELD];
    bool missing;
    do {
        uint64_t word[HELD];
        missing = false;
#pragma unroll
        for (uint32_t i = 0; i < HELD; i++) {
            word[i] = (uint64_t)number << 32;
            if (i * 32 + lane < s.experts)
                word[i] = ptx_load_relaxed(at + i * 32 + lane);
        }
#pragma unroll
        for (uint32_t i = 0; i < HELD; i++) {
            logit[i] = __uint_as_float((uint32_t)word[i]);
            missing = missing || (uint32_t)(word[i] >> 32) != number;
        }
    } while (missing);
    __syncwarp();
    if (threadIdx.x == 0 && row == 0)
        decode_mark(sh.call, 2);
    uint32_t expert;
    float weight;
    route_held<HELD>(s, logit, scratch, layer.bias ? sh.bias : NULL, &expert, &weight);
    if (lane < s.top_k) {
        sh.chosen[row][lane] = (uint16_t)expert;
        sh.weight[row][lane] = weight;
        atomicOr(&sh.expert_mask[expert], 1u << row);
    }
    __syncwarp();
}

// All threads; what experts_fetch() started is under way, and the ring holds nothing else.
template <typename S> static __device__ __forceinline__ void route_all(decode_shared_t<S> &shared)
{
    decode_state_t &sh = shared.state;
    decode_call_t &call = sh.call;
    const decode_layer_t &layer = sh.layers[sh.now];
    const ffn_cuda_signature_t &s = layer.signature;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, rows = call.command.rows;
    const bool wide = s.router_dtype == FFN_CUDA_F32;
    const uint32_t row_bytes = router_row_bytes(s);
    const bool near = router_fits<S>(s, row_bytes);
    uint32_t held = 0;
    for (uint32_t e = threadIdx.x; e < s.experts; e += S::THREADS)
        sh.expert_mask[e] = 0;
    for (uint32_t e = blockIdx.x; e < s.experts; e += gridDim.x, held++) {
        const char *w = near ? (const char *)shared.ring + held * row_bytes
                             : (const char *)layer.router + (uint64_t)e * row_bytes;
        if (held)
            __syncthreads(); // the sums before are stored
        if (s.dtype == FFN_CUDA_BF16)
            router_sums<S, __nv_bfloat16>(sh, w, wide);
        else
            router_sums<S, __half>(sh, w, wide);
        __syncthreads();
        if (threadIdx.x < rows) {
            float logit = 0.0f;
#pragma unroll
            for (uint32_t i = 0; i < S::WARPS; i++)
                logit += sh.router[i][threadIdx.x];
            ptx_store_relaxed(&call.lane.logits[threadIdx.x * s.experts + e],
                              (uint64_t)call.number << 32 | __float_as_uint(logit));
        }
    }
    ptx_copies_wait<0>();
    __syncthreads(); // the router's rows are read, the parts' addresses are there
    if (threadIdx.x == 0)
        decode_mark(call, 1);
    // Nothing is under way in the ring; a warp's scores take a part of its own.
    float *scratch = (float *)shared.ring[warp][0];
    for (uint32_t row = warp; row < rows; row += S::WARPS) {
        if (s.experts <= 128)
            row_choose<4>(sh, row, scratch);
        else
            row_choose<FFN_CUDA_MAX_EXPERTS / 32>(sh, row, scratch);
    }
    __syncthreads();
    if (warp == 0) {
        uint32_t count = 0;
        for (uint32_t first = 0; first < s.experts; first += 32) {
            const uint32_t e = first + lane, mask = e < s.experts ? sh.expert_mask[e] : 0;
            const uint32_t chosen = __ballot_sync(ROUTE_ALL, mask != 0);
            if (mask) {
                const uint32_t at = count + __popc(chosen & ((1u << lane) - 1));
                sh.part_of[at] = (uint16_t)e;
                sh.mask_of[at] = (uint16_t)mask;
            }
            count += __popc(chosen);
        }
        if (lane == 0) {
            call.experts_chosen = count;
            sh.part_of[count] = (uint16_t)s.experts;
            sh.mask_of[count] = 0xffff;
        }
    }
    __syncthreads();
}

// ---- one layer -----------------------------------------------------------------------------------
// What every thread keeps between layers.
struct decode_role_t {
    decode_cursor_t cursor;
    uint32_t slot;   // the next one to multiply
    uint32_t buffer; // of sums, the next
    uint64_t policy;
};

// Describes the layer in layers[which]; one warp.
template <typename S>
static __device__ __forceinline__ void layer_fetch(decode_state_t &sh, uint32_t which,
                                                   const ffn_cuda_layer_t *at)
{
    const uint32_t lane = threadIdx.x % 32;
    decode_layer_t &layer = sh.layers[which];
    const ffn_cuda_layer_t l = *at;
    if (lane < sizeof(ffn_cuda_signature_t) / 4)
        ((uint32_t *)&layer.signature)[lane] = ((const uint32_t *)l.signature)[lane];
    const ffn_cuda_part_t first = l.parts[0];
    __syncwarp();
    if (lane == 0) {
        const ffn_cuda_signature_t &s = layer.signature;
        layer.at = at;
        layer.parts = l.parts;
        layer.router = l.router;
        layer.bias = l.bias;
        layer.dense = first;
        layer.next = l.next;
        layer.last_width = s.experts ? s.shared_intermediate : s.intermediate;
        layer.unit[0] = unit_bytes<S>(s.hidden * 2);
        layer.unit[1] = unit_bytes<S>(s.intermediate * 2);
        layer.unit[2] = unit_bytes<S>(layer.last_width * 2);
    }
    __syncwarp();
}

// Fills `held` from the Lane; one thread.
static __device__ __forceinline__ void lane_fetch(const ffn_cuda_lane_t *lane, decode_lane_t *held)
{
    const ffn_cuda_workspace_t &w = lane->workspace;
    uint32_t(*shares)[FFN_CUDA_MAX_BLOCKS + 1] = w.shares;
    const uint32_t number = block_number();
    held->lane = lane;
    held->meeting = w.meeting;
    held->logits = w.logits;
    held->activations = (char *)w.decode_activations;
    held->pitch = w.decode_pitch;
    held->cycles = w.cycles;
    held->trace = w.trace;
    for (uint32_t i = 0; i < 2; i++)
        for (uint32_t end = 0; end < 2; end++)
            held->share[i][end] =
                __ldcg(&shares[i][gridDim.x]) // 0: equal shares
                    ? __ldcg(&shares[i][number + end])
                    : (uint32_t)((uint64_t)(number + end) * FFN_CUDA_SHARE_ONE / gridDim.x);
}

// Once call.command is there: the Lane's description by warp 0, the layer's by warp 1.
template <typename S>
static __device__ __forceinline__ void call_read(decode_state_t &sh, bool resident)
{
    decode_call_t &call = sh.call;
    if (threadIdx.x == 0) {
        decode_lane_t *held = &sh.lanes[call.command.lane_number % FFN_CUDA_MAX_LANES];
        if (!resident || held->lane != call.command.lane)
            lane_fetch(call.command.lane, held);
        call.lane = *held;
        call.experts_chosen = 0;
        sh.part_of[0] = 0; // of a dense layer
        sh.mask_of[0] = 0xffff;
        if (call.command.rows > FFN_CUDA_DECODE_ROWS)
            __trap();
    }
    if (threadIdx.x / 32 != 1 || call.command.rows == 0)
        return;
    const ffn_cuda_layer_t *layer = call.command.layers + call.command.layer;
    const uint32_t now = sh.now;
    const bool same = sh.layers[now].at == layer, other = sh.layers[now ^ 1].at == layer;
    __syncwarp();
    if (!same && !other)
        layer_fetch<S>(sh, now ^ 1, layer);
    if (threadIdx.x == 32 && !same) {
        sh.now = now ^ 1;
        sh.ahead = 0;
    }
    __syncwarp();
}

// Whether what was loaded ahead is what this Invocation begins with.
static __device__ __forceinline__ bool ahead_holds(const decode_state_t &sh)
{
    bool holds = sh.ahead;
    if (sh.layers[sh.now].signature.experts == 0)
        for (uint32_t i = 0; i < 4; i++)
            holds = holds && sh.call.lane.share[i / 2][i % 2] == sh.ahead_share[i / 2][i % 2];
    return holds;
}

// Makes the layer that should come next, where it is described, the current one; one thread, at the end
// of a layer.
static __device__ __forceinline__ void ahead_choose(decode_state_t &sh)
{
    const decode_layer_t &layer = sh.layers[sh.now];
    const ffn_cuda_layer_t *next = sh.call.command.layers + layer.next;
    const bool same = next == layer.at;
    sh.ahead = sh.look_ahead && layer.next != FFN_CUDA_NO_LAYER &&
               (same || sh.layers[sh.now ^ 1].at == next);
    if (!sh.ahead)
        return;
    sh.now ^= !same;
    sh.call.experts_chosen = 0;
    for (uint32_t i = 0; i < 4; i++)
        sh.ahead_share[i / 2][i % 2] = sh.call.lane.share[i / 2][i % 2];
}

// All threads; sh.call is filled. Answers with all of this block's outputs written, not yet visible.
template <typename S, typename T, int NB>
static __device__ __forceinline__ void layer_phases(decode_shared_t<S> &shared, decode_role_t *role,
                                                    bool hit)
{
    decode_state_t &sh = shared.state;
    decode_call_t &call = sh.call;
    const decode_phase_t gate = phase_of<S>(sh, false), down = phase_of<S>(sh, true);
    if (!hit || sh.layers[sh.now].signature.experts) {
        cursor_begin<S>(shared, gate, down, &role->cursor, role->policy);
        role->slot = 0;
    }
#pragma unroll 1
    for (uint32_t phase = 0; phase < 2; phase++) {
        const uint32_t began = (uint32_t)clock64();
        phase_run<S, T, NB>(shared, phase, gate, down, &role->cursor, &role->slot, &role->buffer,
                            role->policy);
        __syncthreads(); // all threads' values before the arrival
        if (threadIdx.x == 0) {
            if (phase == 0)
                ptx_add_release(&call.lane.meeting->acted, 1);
            call.lane.cycles[phase][block_number()] = (uint32_t)clock64() - began;
            decode_mark(call, phase ? 6 : 4);
            if (phase == 0) {
                while (ptx_load_acquire(&call.lane.meeting->acted) < call.acted_target)
                    ;
                decode_mark(call, 5);
            } else {
                ahead_choose(sh); // the others are done with this layer
            }
        } else if (threadIdx.x / 32 == S::WARPS - 1 && phase == 0) {
            // Meanwhile: what the layer that should come next is.
            const decode_layer_t &layer = sh.layers[sh.now];
            const ffn_cuda_layer_t *next = call.command.layers + layer.next;
            if (layer.next != FFN_CUDA_NO_LAYER && next != layer.at &&
                sh.layers[sh.now ^ 1].at != next)
                layer_fetch<S>(sh, sh.now ^ 1, next);
        }
        __syncthreads();
    }
}

template <typename S>
static __device__ __forceinline__ void layer_run(decode_shared_t<S> &shared, decode_role_t *role)
{
    decode_state_t &sh = shared.state;
    decode_call_t &call = sh.call;
    const ffn_cuda_signature_t &s = sh.layers[sh.now].signature;
    const bool hit = ahead_holds(sh);
    if (threadIdx.x == 0)
        decode_mark(call, 0);
    if (threadIdx.x == 32) {
        // Of this Invocation, fewer than all blocks have arrived, since this one has not: the rest of
        // the division is theirs.
        const uint64_t number =
            ptx_load_relaxed(&call.lane.meeting->acted) / gridDim.x + 1;
        call.acted_target = number * gridDim.x;
        call.number = (uint32_t)number;
    }
    if (!hit) { // what was loaded ahead, if anything, is dropped
        ptx_copies_wait<0>();
        __syncthreads();
        if (s.experts)
            experts_fetch<S>(shared, role->policy);
    }
    if (s.experts)
        route_all<S>(shared);
    if (threadIdx.x == 0)
        decode_mark(call, 3);
    const bool wide = call.command.rows > 8;
    if (s.dtype == FFN_CUDA_BF16) {
        if (wide)
            layer_phases<S, __nv_bfloat16, 2>(shared, role, hit);
        else
            layer_phases<S, __nv_bfloat16, 1>(shared, role, hit);
    } else {
        if (wide)
            layer_phases<S, __half, 2>(shared, role, hit);
        else
            layer_phases<S, __half, 1>(shared, role, hit);
    }
}

// All threads, at the end of a layer, its successor in layers[now]: starts on that.
template <typename S>
static __device__ __forceinline__ void layer_ahead(decode_shared_t<S> &shared, decode_role_t *role)
{
    decode_state_t &sh = shared.state;
    ptx_copies_wait<0>();
    __syncwarp();
    if (sh.layers[sh.now].signature.experts) {
        experts_fetch<S>(shared, role->policy);
        return;
    }
    const decode_phase_t gate = phase_of<S>(sh, false), down = phase_of<S>(sh, true);
    cursor_begin<S>(shared, gate, down, &role->cursor, role->policy);
    role->slot = 0;
}

// ---- commands ------------------------------------------------------------------------------------
// What ends a command, kept while the next one is read.
struct command_end_t {
    uint64_t *answer, *done;
    uint64_t answer_value, done_value, began_ns;
    const ffn_cuda_answer_t *about;
    ffn_cuda_meeting_t *meeting;
    uint32_t (*trace)[FFN_CUDA_MAX_BLOCKS];
    uint32_t rows;
};

// One thread of each block, when all of the block's outputs are written: the last one publishes the
// words that end the command, then its record. The answer first: what follows is on nobody's way.
static __device__ __forceinline__ void command_end(const command_end_t &end, ffn_cuda_queue_t *queue,
                                                   uint64_t sequence)
{
    ffn_cuda_record_t record;
    __threadfence_system(); // also what lies in another device's memory
    const uint64_t ended = ptx_add_acq_rel(&end.meeting->ended, 1) + 1;
    if (end.trace)
        ptx_add_relaxed(&end.trace[7][blockIdx.x], (uint32_t)(clock_ns() - end.began_ns));
    if (ended % gridDim.x != 0)
        return;
    // The queue's word first: who sees the answer may fill that entry again. One release for both: each
    // waits for the rows to arrive.
    if (end.answer) {
        ptx_store_relaxed_system(&queue->answered, sequence);
        ptx_store_release_system(end.answer, end.answer_value);
    } else {
        ptx_store_release_system(&queue->answered, sequence);
    }
    ffn_cuda_counters_t *counters =
        (ffn_cuda_counters_t *)__ldcg((const unsigned long long *)&queue->counters);
    if (counters) {
        ffn_cuda_record_begin(end.about, end.rows, &record);
        record.capacity = FFN_CUDA_DECODE_ROWS;
        record.lane = record.graph_template = FFN_CUDA_NO_LANE;
        record.resident = 1;
        record.end_ns = clock_ns();
        record.duration_ns = record.end_ns - end.began_ns;
    }
    if (end.done)
        ptx_store_release_system(end.done, end.done_value);
    if (counters)
        ffn_cuda_record_end(counters, &record);
}

// Waits for the command `sequence` and reads it; warp 0. False: leave.
static __device__ __forceinline__ bool command_wait(decode_state_t &sh, ffn_cuda_queue_t *queue,
                                                    uint64_t sequence)
{
    ffn_cuda_command_t *entry = &queue->entries[(sequence - 1) % FFN_CUDA_QUEUE_ENTRIES];
    unsigned long long seen = 0;
    if (threadIdx.x == 0) {
        for (uint32_t looks = 1;; looks++) {
            seen = ptx_load_acquire_system(&entry->sequence);
            if (seen == sequence || seen == FFN_CUDA_QUEUE_LEFT)
                break;
            if (looks % DECODE_LOOKS == 0 && ptx_load_relaxed_system(&queue->stop))
                ptx_swap_if_system(&entry->sequence, seen, FFN_CUDA_QUEUE_LEFT);
        }
        sh.call.began_ns = clock_ns();
    }
    seen = __shfl_sync(ROUTE_ALL, seen, 0);
    if (seen == FFN_CUDA_QUEUE_LEFT)
        return false;
    if (threadIdx.x < COMMAND_WORDS)
        ((unsigned long long *)&sh.call.command)[threadIdx.x] =
            __ldcg((const unsigned long long *)entry + threadIdx.x);
    __syncwarp();
    return sh.call.command.lane != NULL;
}

// The launch's only Invocation, as the Lane has it; warp 0.
static __device__ __forceinline__ void command_of_lane(decode_state_t &sh,
                                                       const ffn_cuda_lane_t *lane)
{
    if (threadIdx.x == 0) {
        ffn_cuda_command_t &command = sh.call.command;
        command.lane = (ffn_cuda_lane_t *)lane;
        command.layers = lane->layers;
        command.layer = lane->layer;
        command.rows = lane->rows;
        command.input = lane->input;
        command.output = lane->output;
        command.partial = lane->partial;
        command.lane_number = 0;
        sh.call.began_ns = clock_ns();
    }
    __syncwarp();
}

// One layer of `given`, or, where `queue` is not NULL, those of its commands until it says to leave.
template <typename S>
static __device__ __forceinline__ void decode_main(const ffn_cuda_lane_t *given,
                                                   ffn_cuda_queue_t *queue, uint32_t look_ahead)
{
    extern __shared__ __align__(128) unsigned char memory[];
    decode_shared_t<S> &shared = *(decode_shared_t<S> *)memory;
    decode_state_t &sh = shared.state;
    decode_role_t role;
    role.policy = ptx_policy_stream();
    role.slot = role.buffer = 0;
    if (threadIdx.x < FFN_CUDA_MAX_LANES)
        sh.lanes[threadIdx.x].lane = NULL;
    if (threadIdx.x == 0) {
        sh.now = sh.ahead = 0;
        sh.look_ahead = look_ahead;
        sh.layers[0].at = sh.layers[1].at = NULL;
        sh.layers[0].signature.experts = 0;
    }
    __syncthreads();
#pragma unroll 1
    for (uint64_t sequence = 1;; sequence++) {
        if (threadIdx.x < 32) {
            bool stays = true;
            if (queue)
                stays = command_wait(sh, queue, sequence);
            else
                command_of_lane(sh, given);
            if (threadIdx.x == 0)
                sh.call.leave = !stays;
        }
        __syncthreads(); // all are done with the Invocation before
        if (sh.call.leave)
            break;
        call_read<S>(sh, queue != NULL);
        __syncthreads();
        const uint32_t rows = sh.call.command.rows;
        if (rows)
            layer_run<S>(shared, &role);
        if (!queue)
            break;
        // Warp 0 waits for the next command while warp 1 ends this one.
        command_end_t end = {};
        if (threadIdx.x == 32) {
            const decode_call_t &call = sh.call;
            end.answer = call.command.answer;
            end.answer_value = call.command.answer_value;
            end.done = call.command.done;
            end.done_value = call.command.done_value;
            end.about = call.command.about;
            end.began_ns = call.began_ns;
            end.meeting = call.lane.meeting;
            end.trace = call.lane.trace;
            end.rows = rows;
        }
        const bool ahead = rows && sh.ahead;
        __syncthreads(); // the command may be written over
        if (threadIdx.x == 32)
            command_end(end, queue, sequence);
        __syncwarp();
        if (ahead) // of sh.call it reads what call_read() writes, not the command
            layer_ahead<S>(shared, &role);
    }
    ptx_copies_wait<0>();
}

#define DECODE_KERNEL(number, warps, tiles, bytes, depth)                                          \
    static_assert(sizeof(decode_shared_t<decode_shape_t<warps, tiles, bytes, depth>>) <=           \
                      DECODE_SHARED_BYTES(warps, tiles, bytes, depth),                             \
                  "DECODE_SHARED_BYTES is too small");                                             \
    extern "C" __global__ void __launch_bounds__(warps * 32, 1)                                    \
        ffn_decode_##number(const ffn_cuda_lane_t *lane, ffn_cuda_queue_t *queue,                  \
                            uint32_t look_ahead)                                                   \
    {                                                                                              \
        decode_main<decode_shape_t<warps, tiles, bytes, depth>>(lane, queue, look_ahead);          \
    }
#else
#define DECODE_KERNEL(number, warps, tiles, bytes, depth)                                          \
    extern "C" __global__ void ffn_decode_##number(const ffn_cuda_lane_t *lane,                    \
                                                   ffn_cuda_queue_t *queue, uint32_t look_ahead)   \
    {                                                                                              \
        __trap();                                                                                  \
    }
#endif
DECODE_VARIANTS(DECODE_KERNEL)
