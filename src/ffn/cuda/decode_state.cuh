// SPDX-License-Identifier: MIT
// What a block of the decode kernel keeps in shared memory, and which part of a layer is its share.
#ifndef XPOOL_FFN_CUDA_DECODE_STATE_CUH
#define XPOOL_FFN_CUDA_DECODE_STATE_CUH

#include "ffn/cuda/decode_shape.h"
#include "ffn/cuda/ptx.cuh"
#include "ffn/cuda/route.cuh"

#define DECODE_SLOT_BYTES (16 * DECODE_BYTES)
#define DECODE_STEPS      (DECODE_BYTES / 64)
#define DECODE_COPIES     (DECODE_BYTES / 32)  // of 512 bytes, a slot
#define DECODE_PIECES     (DECODE_BYTES / 16)  // of a row
#define DECODE_ROWS       (32 / DECODE_PIECES) // of a copy
#define DECODE_RING_BYTES (DECODE_WARPS * DECODE_DEPTH * DECODE_SLOT_BYTES)
static_assert(DECODE_DEPTH * DECODE_SLOT_BYTES >= FFN_CUDA_MAX_EXPERTS * 4,
              "a warp's ring holds a row's scores");
static_assert(DECODE_WARPS >= 2 && DECODE_WARPS <= 16, "warps have their parts");

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
    ffn_cuda_usage_t *usage;
    ffn_cuda_part_t dense; // the only part of a dense layer
    uint32_t next;
    uint32_t last_width; // width of the dense or shared part; 0 = none
    uint32_t unit[2];    // bytes of a unit: of `hidden`, of a dense layer's `intermediate`
    uint32_t piece;      // of a layer of experts: bytes of a section of down
    uint32_t pieces[2];  // sections of an expert, of the last part
};

// What an Invocation is.
struct decode_call_t {
    ffn_cuda_command_t command; // of which lane, layers, layer, rows, input, output, partial also
                                // without a queue
    decode_lane_t lane;
    uint64_t acted_target;
    uint32_t number;         // the Invocation's, of its meeting: what its logits are marked with
    uint32_t experts_chosen; // parts of `intermediate` width
    uint64_t began_ns;
};

// A block's share of a phase.
struct decode_phase_t {
    uint32_t first, count; // pairs of rows, or output columns
    uint32_t base;         // of the first tile: pairs lie in tiles of 8 that do not cross parts
    uint32_t tiles, passes;
};

struct decode_state_t {
    decode_call_t call;
    decode_lane_t lanes[FFN_CUDA_MAX_LANES];
    decode_layer_t layers[2];
    uint32_t now; // index of the current or coming layer in `layers`
    uint32_t ahead; // the first copies of layers[now] are under way
    uint32_t ahead_share[2][2];
    uint32_t look_ahead;
    const ffn_cuda_layer_t *table; // of the latest Invocation
    float router[16][FFN_CUDA_DECODE_ROWS]; // sums of a warp
    union {
        uint32_t expert_mask[FFN_CUDA_MAX_EXPERTS];
        // Once experts are chosen: a row's parts but the last, ascending.
        uint16_t parts_of_row[FFN_CUDA_DECODE_ROWS][FFN_CUDA_MAX_TOP_K];
    };
    float weight[FFN_CUDA_DECODE_ROWS][FFN_CUDA_MAX_TOP_K];
    uint16_t chosen[FFN_CUDA_DECODE_ROWS][FFN_CUDA_MAX_TOP_K];
    uint16_t part_of[FFN_CUDA_MAX_EXPERTS + 1];
    uint32_t mask_of[FFN_CUDA_MAX_EXPERTS + 1]; // rows that chose it
    union {
        float bias[FFN_CUDA_MAX_EXPERTS];
        uint16_t pair_first[FFN_CUDA_MAX_EXPERTS + 1]; // once experts are chosen: pairs before a part's
    };
    ffn_cuda_part_t parts[FFN_CUDA_MAX_EXPERTS + 1]; // of the current layer of experts
};
static_assert(sizeof(decode_state_t) <= DECODE_STATE_BYTES, "DECODE_STATE_BYTES is too small");

// What a block does next, and who may cut in meanwhile.
enum decode_turn_t { DECODE_COMMAND, DECODE_CUT, DECODE_RESUME, DECODE_LEAVE };

struct decode_cuts_t {
    const uint32_t *at; // holds `word` once there is a cut; NULL: none is taken
    uint32_t word;
    uint32_t seen[2]; // in a pass, by its number's last bit: who is at the next pass has read it
    uint32_t seen_waiting;
    uint32_t turn; // decode_turn_t
    // Which commands are done; one thread writes, before a barrier.
    uint64_t sequence;    // of the latest command
    uint32_t done;        // cuts
    uint32_t place;       // where the command that lies aside goes on; 0: none does
    uint32_t cut, resume; // next is a cut, the command that lies aside
    unsigned char *aside; // this block's, of the queue's
};

struct decode_shared_t {
    unsigned char ring[DECODE_WARPS][DECODE_DEPTH][DECODE_SLOT_BYTES];
    float sums[2][DECODE_WARPS][DECODE_TILES * 4][32];
    // Rows 0 and 8 of each tile that a warp copies.
    unsigned long long rows_at[DECODE_WARPS][DECODE_TILES][2];
    decode_cuts_t cuts;
    decode_state_t state;
};
static_assert(sizeof(decode_shared_t) <= DECODE_SHARED_BYTES, "DECODE_SHARED_BYTES is too small");

static __device__ __forceinline__ uint64_t clock_ns()
{
    return ptx_clock_ns();
}

// Adds the time since the command was seen; one thread.
static __device__ __forceinline__ void decode_mark(const decode_call_t &call, uint32_t which)
{
    if (call.lane.trace)
        ptx_add_relaxed(&call.lane.trace[which][blockIdx.x], (uint32_t)(clock_ns() - call.began_ns));
}

// ---- shares --------------------------------------------------------------------------------------
static __device__ __forceinline__ uint32_t ceil_div(uint32_t a, uint32_t b)
{
    return (a + b - 1) / b;
}

// This block's number among those that share the work: its multiprocessor's where there is a block on
// each, since what a multiprocessor gets of the memory's rate is its own.
static __device__ __forceinline__ uint32_t block_number()
{
    uint32_t number, count;
    ptx_multiprocessor(&number, &count);
    return count == gridDim.x ? number : blockIdx.x;
}

template <bool EXPERTS>
static __device__ __forceinline__ decode_phase_t phase_of(const decode_state_t &sh, bool down)
{
    const decode_layer_t &layer = sh.layers[sh.now];
    const decode_call_t &call = sh.call;
    const uint32_t chosen = EXPERTS ? call.experts_chosen * layer.signature.intermediate : 0;
    const uint32_t total = down ? layer.signature.hidden : chosen + layer.last_width;
    const uint32_t begin = call.lane.share[down][0], end = call.lane.share[down][1];
    decode_phase_t p;
    p.first = (uint32_t)((uint64_t)total * begin / FFN_CUDA_SHARE_ONE);
    p.count = (uint32_t)((uint64_t)total * end / FFN_CUDA_SHARE_ONE) - p.first;
    p.base = down ? p.first : p.first / 8 * 8;
    p.tiles = p.count ? ceil_div(p.first + p.count - p.base, down ? 16 : 8) : 0;
    // A dense layer, of no more than 16 rows, may begin before its rows are known.
    if constexpr (EXPERTS)
        p.passes = ceil_div(p.tiles, call.command.rows > 16 ? DECODE_TILES / 2 : DECODE_TILES);
    else
        p.passes = ceil_div(p.tiles, DECODE_TILES);
    return p;
}

// By value: an address of either would put both into local memory.
static __device__ __forceinline__ decode_phase_t phase_pick(bool is_down, const decode_phase_t &gate,
                                                            const decode_phase_t &down)
{
    return {is_down ? down.first : gate.first, is_down ? down.count : gate.count,
            is_down ? down.base : gate.base, is_down ? down.tiles : gate.tiles,
            is_down ? down.passes : gate.passes};
}

static __device__ __forceinline__ uint32_t pass_begin(const decode_phase_t &p, uint32_t pass)
{
    return p.tiles * pass / p.passes;
}

// Of a dimension of so many bytes: as few rounds of the warps as there can be, equal units.
static __device__ __forceinline__ uint32_t unit_bytes(uint32_t bytes)
{
    const uint32_t rounds = max(ceil_div(bytes, DECODE_BYTES * DECODE_WARPS), 1u);
    return max(ceil_div(bytes, rounds * DECODE_WARPS * 64) * 64, 64u);
}

// Of the current layer of experts.
static __device__ __forceinline__ ffn_cuda_part_t part_at(const decode_state_t &sh, uint32_t index)
{
    return sh.parts[sh.part_of[index]];
}

// ---- copies and results, of all kinds of products ------------------------------------------------
// The next slot that this warp copies; all lanes hold the same but `from`.
struct decode_cursor_t {
    uint32_t bytes, size; // of a row; of a unit
    uint32_t tile, live;  // of the pass: next, how many
    uint32_t first;       // tile of the pass, in the phase
    uint32_t unit, pass, slot;
    bool down, ended;
    // In down of experts (decode_pairs.cuh) `first` is the tile, `unit` and `bytes` are of the section,
    // `size` is the pitch of its rows.
    uint32_t section;
    const char *from; // what this lane copies of the section
};

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
#endif
