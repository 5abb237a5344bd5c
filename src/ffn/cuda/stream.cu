// SPDX-License-Identifier: MIT
// The whole FFN of one layer for 1 to 16 rows in one cooperative launch: router, gate and up, down.
//
// Few rows make this a matter of streaming weights. Every warp does the same: it copies weights into a
// ring of its own in shared memory (cp.async, 16 bytes a lane), multiplies what has come on tensor
// cores, and starts the next copy into that place. Nobody waits for another warp to get or to free
// a place, so a few warps suffice, and what is under way is what the ring holds.
//
//   unit    TILES x 16 weight rows by BYTES of each: what a warp copies and multiplies at a time
//   pass    up to TILES tiles over the whole inner dimension; the units of a pass go round the warps,
//           and the warps' sums are added in the warps' order when the pass ends
//   gate    a block owns a range of (gate row, up row) pairs over all chosen parts; a tile is 8 gate
//           rows above their 8 up rows, so that one lane holds both sums of a pair
//   down    a block owns a range of output columns; the inner dimension runs over all chosen parts in
//           ascending order, the shared part last, so the sum over experts stays in the registers
//
// Copies run ahead over all borders: passes, the barrier between gate and down (weights depend on
// nothing), and, in the resident kernel, from one dense layer to the next.
//
// Which warp multiplies which part of the inner dimension depends on the layer's shape alone. So a row
// gives the same bits alone and among 15 others, and whichever block has its pairs. Lanes read 16
// contiguous bytes of a row as four K pairs of two products; rows and weights use the same order of K,
// so it does not matter which. Rows come straight from L2 into registers: a block reads them once a
// pass, a few percent of what it reads of weights at 1 row.
//
// Nothing waits without a partner that is already running: the launch is cooperative. Needs sm_90.
#include "ffn/cuda/dispatch_steps.h"
#include "ffn/cuda/ptx.cuh"
#include "ffn/cuda/route.cuh"
#include "ffn/cuda/stream_shape.h"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 900

#define STREAM_LOOKS 64u // polls of the queue between two looks at `stop`

// What a layer's execution needs; written by warp 0 between two block barriers.
struct stream_call_t {
    // of the Lane
    const void *input;
    void *output;
    float *partial;
    float *logits;
    char *activations;
    uint64_t pitch; // elements
    ffn_cuda_meeting_t *meeting;
    uint64_t routed_target, acted_target;
    uint32_t (*cycles)[FFN_CUDA_MAX_BLOCKS];
    uint32_t (*trace)[FFN_CUDA_MAX_BLOCKS];
    uint32_t rows;
    uint32_t share[2][2]; // of gate and of down: begin, end
    // of the layer
    const ffn_cuda_layer_t *layer;
    const ffn_cuda_part_t *parts;
    const void *router;
    const float *bias;
    uint32_t next;
    uint32_t experts_chosen; // parts of `intermediate` width
    uint32_t last_width;     // width of the dense or shared part; 0 = none
    // of the command
    uint64_t *answer, *done;
    uint64_t answer_value, done_value, began_ns;
    const ffn_cuda_answer_t *about;
    uint32_t leave;
};

struct stream_state_t {
    stream_call_t call;
    ffn_cuda_signature_t signature;
    float router[16][FFN_CUDA_DECODE_ROWS]; // sums of a warp
    uint32_t expert_mask[FFN_CUDA_MAX_EXPERTS];
    float weight[FFN_CUDA_DECODE_ROWS][FFN_CUDA_MAX_TOP_K];
    uint16_t chosen[FFN_CUDA_DECODE_ROWS][FFN_CUDA_MAX_TOP_K];
    uint16_t part_of[FFN_CUDA_MAX_EXPERTS + 1], mask_of[FFN_CUDA_MAX_EXPERTS + 1];
    uint32_t ahead; // copies of `ahead_layer`'s first units are under way
    const ffn_cuda_layer_t *ahead_layer;
    uint32_t ahead_share[2][2];
};
static_assert(sizeof(stream_state_t) <= STREAM_STATE_BYTES, "STREAM_STATE_BYTES is too small");

template <uint32_t W, uint32_t T, uint32_t B, uint32_t D> struct stream_shape_t {
    static constexpr uint32_t WARPS = W, TILES = T, BYTES = B, DEPTH = D;
    static constexpr uint32_t THREADS = W * 32, STEPS = B / 64;
    static constexpr uint32_t TILE_BYTES = 16 * B, SLOT_BYTES = T * TILE_BYTES;
    static constexpr uint32_t COPIES = B / 32;   // of 512 bytes, a tile
    static constexpr uint32_t PIECES = B / 16;   // of a row
    static constexpr uint32_t ROWS = 32 / PIECES; // of a copy
    static_assert(T * COPIES <= 32, "a bit for each copy of a unit");
    static_assert(D * T * TILE_BYTES >= FFN_CUDA_MAX_EXPERTS * 4, "a warp's ring holds a row's scores");
};

template <typename S> struct stream_shared_t {
    unsigned char ring[S::WARPS][S::DEPTH][S::SLOT_BYTES];
    float sums[S::WARPS][S::TILES * 4][32];
    stream_state_t state;
};

static __device__ __forceinline__ uint64_t clock_ns()
{
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// Adds the time since the command was seen; thread 0.
static __device__ __forceinline__ void stream_mark(const stream_call_t &call, uint32_t which)
{
    if (threadIdx.x == 0 && call.trace)
        ptx_add_relaxed(&call.trace[which][blockIdx.x], (uint32_t)(clock_ns() - call.began_ns));
}

// ---- shares --------------------------------------------------------------------------------------
// A block's share of a phase.
struct stream_phase_t {
    uint32_t first, count; // pairs of rows, or output columns
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
static __device__ __forceinline__ stream_phase_t phase_of(const stream_state_t &sh, bool down)
{
    const stream_call_t &call = sh.call;
    const uint32_t total =
        down ? sh.signature.hidden : call.experts_chosen * sh.signature.intermediate + call.last_width;
    const uint32_t begin = call.share[down][0], end = call.share[down][1];
    stream_phase_t p;
    p.first = (uint32_t)((uint64_t)total * begin / FFN_CUDA_SHARE_ONE);
    p.count = (uint32_t)((uint64_t)total * end / FFN_CUDA_SHARE_ONE) - p.first;
    p.tiles = ceil_div(p.count, down ? 16 : 8);
    p.passes = ceil_div(p.tiles, S::TILES);
    p.parts = down ? call.experts_chosen + (call.last_width != 0) : 1;
    return p;
}

// By value: an address of either would put both into local memory.
static __device__ __forceinline__ stream_phase_t phase_pick(bool is_down, const stream_phase_t &gate,
                                                            const stream_phase_t &down)
{
    return {is_down ? down.first : gate.first, is_down ? down.count : gate.count,
            is_down ? down.tiles : gate.tiles, is_down ? down.passes : gate.passes,
            is_down ? down.parts : gate.parts};
}

static __device__ __forceinline__ uint32_t pass_begin(const stream_phase_t &p, uint32_t pass)
{
    return p.tiles * pass / p.passes;
}

static __device__ __forceinline__ uint32_t part_bytes(const stream_state_t &sh, bool down, uint32_t part)
{
    if (!down)
        return sh.signature.hidden * 2;
    return (part < sh.call.experts_chosen ? sh.signature.intermediate : sh.call.last_width) * 2;
}

// ---- copies --------------------------------------------------------------------------------------
// The next unit that this warp copies; all lanes hold the same but for `at` and `held`.
template <typename S> struct stream_cursor_t {
    const char *at[S::TILES * S::COPIES]; // this lane's 16 bytes of unit 0 in each row of the pass
    const char *held;                     // `down` of 32 parts, one a lane
    uint32_t exists;                      // a bit for each of `at`
    uint32_t bytes;                       // of a row
    uint32_t live;                        // tiles of the pass
    uint32_t unit, pass, part, slot;
    bool down, ended;
};

// Begins the pass, or another part of it.
template <typename S>
static __device__ __forceinline__ void cursor_locate(const stream_state_t &sh,
                                                     const stream_phase_t &p, stream_cursor_t<S> *c)
{
    const uint32_t lane = threadIdx.x % 32, row0 = lane / S::PIECES, piece = lane % S::PIECES;
    const uint32_t tile = pass_begin(p, c->pass);
    c->live = pass_begin(p, c->pass + 1) - tile;
    c->bytes = part_bytes(sh, c->down, c->part);
    c->exists = 0;
    if (c->down) {
        if (c->part % 32 == 0)
            c->held = c->part + lane < p.parts
                          ? (const char *)sh.call.parts[sh.part_of[c->part + lane]].down
                          : NULL;
        const char *down =
            (const char *)__shfl_sync(ROUTE_ALL, (unsigned long long)c->held, c->part % 32);
#pragma unroll
        for (uint32_t i = 0; i < S::TILES * S::COPIES; i++) {
            const uint32_t column = tile * 16 + i * S::ROWS + row0;
            const bool exists = i / S::COPIES < c->live && column < p.count;
            c->at[i] = down + (uint64_t)(p.first + (exists ? column : 0)) * c->bytes + piece * 16;
            c->exists |= (uint32_t)exists << i;
        }
    } else {
#pragma unroll
        for (uint32_t i = 0; i < S::TILES * S::COPIES; i++) {
            const uint32_t row = i % S::COPIES * S::ROWS + row0;
            const uint32_t pair = (tile + i / S::COPIES) * 8 + row % 8;
            const bool exists = i / S::COPIES < c->live && pair < p.count;
            const uint32_t v = p.first + (exists ? pair : 0);
            const uint32_t index = min(v / sh.signature.intermediate, sh.call.experts_chosen);
            const ffn_cuda_part_t *part = &sh.call.parts[sh.part_of[index]];
            c->at[i] = (const char *)(row < 8 ? part->gate : part->up) +
                       (uint64_t)(v - index * sh.signature.intermediate) * c->bytes + piece * 16;
            c->exists |= (uint32_t)exists << i;
        }
    }
}

// Goes on to the next unit that exists.
template <typename S>
static __device__ __forceinline__ void cursor_settle(const stream_state_t &sh,
                                                     const stream_phase_t &gate,
                                                     const stream_phase_t &down,
                                                     stream_cursor_t<S> *c)
{
    while (!c->ended && c->unit * S::BYTES >= c->bytes) {
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
            cursor_locate<S>(sh, phase_pick(c->down, gate, down), c);
    }
}

// Starts the copy of the next unit, as one group also where there is none.
template <typename S>
static __device__ __forceinline__ void unit_copy(const stream_state_t &sh,
                                                 const stream_phase_t &gate,
                                                 const stream_phase_t &down, uint32_t ring,
                                                 stream_cursor_t<S> *c, uint64_t policy)
{
    const uint32_t lane = threadIdx.x % 32, row0 = lane / S::PIECES, piece = lane % S::PIECES;
    if (!c->ended) {
        const uint32_t along = c->unit * S::BYTES;
        const uint32_t present = along + piece * 16 < c->bytes ? c->exists : 0; // past the end: zeros
        const uint32_t skip = present ? along : 0;
#pragma unroll
        for (uint32_t i = 0; i < S::TILES * S::COPIES; i++) {
            if (i / S::COPIES >= c->live)
                break;
            // Every other row is moved by 64 bytes, so that reads of two rows fall on all banks.
            const uint32_t odd = (i * S::ROWS + row0) & 1;
            const uint32_t to = ring + c->slot * S::SLOT_BYTES + i * 512 + row0 * S::BYTES +
                                (piece ^ odd * 4) * 16;
            ptx_copy_sixteen(to, c->at[i] + skip, present >> i & 1 ? 16 : 0, policy);
        }
        c->unit += S::WARPS;
        cursor_settle<S>(sh, gate, down, c);
    }
    ptx_copies_commit();
    c->slot = c->slot + 1 == S::DEPTH ? 0 : c->slot + 1;
}

// From the first unit of the layer on; the ring is empty.
template <typename S>
static __device__ __forceinline__ void cursor_begin(const stream_state_t &sh,
                                                    const stream_phase_t &gate,
                                                    const stream_phase_t &down, uint32_t ring,
                                                    stream_cursor_t<S> *c, uint64_t policy)
{
    c->unit = threadIdx.x / 32;
    c->pass = c->part = c->slot = 0;
    c->down = gate.passes == 0;
    c->ended = c->down && down.passes == 0;
    if (!c->ended)
        cursor_locate<S>(sh, phase_pick(c->down, gate, down), c);
    cursor_settle<S>(sh, gate, down, c);
#pragma unroll 1
    for (uint32_t i = 0; i < S::DEPTH; i++)
        unit_copy<S>(sh, gate, down, ring, c, policy);
}

// ---- products ------------------------------------------------------------------------------------
static __device__ __forceinline__ float route_weight(const stream_state_t &sh, uint32_t row,
                                                     uint32_t part)
{
    for (uint32_t i = 0; i < sh.signature.top_k; i++)
        if (sh.chosen[row][i] == part)
            return sh.weight[row][i];
    return 0.0f;
}

// One value of each half of a tile: gate above up.
template <typename T>
static __device__ __forceinline__ void pair_store(const stream_state_t &sh, const stream_phase_t &p,
                                                  uint32_t pair, uint32_t row, float gate, float up)
{
    const stream_call_t &call = sh.call;
    if (pair >= p.count || row >= call.rows)
        return;
    const uint32_t v = p.first + pair;
    const uint32_t index = min(v / sh.signature.intermediate, call.experts_chosen);
    if (!(sh.mask_of[index] >> row & 1))
        return;
    float value = ptx_activate(sh.signature.activation, gate, up);
    if (index < call.experts_chosen)
        value *= route_weight(sh, row, sh.part_of[index]);
    ((T *)call.activations)[row * call.pitch + v] = ptx_from_float<T>(value);
}

template <typename T>
static __device__ __forceinline__ void column_store(const stream_state_t &sh,
                                                    const stream_phase_t &p, uint32_t column,
                                                    uint32_t row, float value)
{
    const stream_call_t &call = sh.call;
    if (column >= p.count || row >= call.rows)
        return;
    const uint64_t at = (uint64_t)row * sh.signature.hidden + p.first + column;
    if (call.output)
        ((T *)call.output)[at] = ptx_from_float<T>(value);
    else
        call.partial[at] = value;
}

// The warps' sums of 8 rows of input, added and stored. All threads.
template <typename S, typename T>
static __device__ __forceinline__ void pass_store(stream_shared_t<S> &shared, const stream_phase_t &p,
                                                  bool down, uint32_t tile, uint32_t live,
                                                  uint32_t first_row)
{
    const stream_state_t &sh = shared.state;
    for (uint32_t i = threadIdx.x; i < live * (down ? 128 : 64); i += S::THREADS) {
        const uint32_t lane = i % 32, row = first_row + lane % 4 * 2;
        if (down) {
            const uint32_t which = i / 32; // tile * 4 + number of the lane's sum
            float sum = 0.0f;
#pragma unroll
            for (uint32_t w = 0; w < S::WARPS; w++)
                sum += shared.sums[w][which][lane];
            column_store<T>(sh, p, (tile + which / 4) * 16 + which % 4 / 2 * 8 + lane / 4,
                            row + which % 2, sum);
        } else {
            const uint32_t which = i / 64 * 4 + i / 32 % 2;
            float gate = 0.0f, up = 0.0f;
#pragma unroll
            for (uint32_t w = 0; w < S::WARPS; w++) {
                gate += shared.sums[w][which][lane];
                up += shared.sums[w][which + 2][lane];
            }
            pair_store<T>(sh, p, (tile + i / 64) * 8 + lane / 4, row + i / 32 % 2, gate, up);
        }
    }
}

// All units of a phase; NB times 8 rows. Copies of what comes after them are started on the way.
template <typename S, typename T, int NB>
static __device__ __forceinline__ void phase_run(stream_shared_t<S> &shared, bool is_down,
                                                 const stream_phase_t &gate,
                                                 const stream_phase_t &down, stream_cursor_t<S> *c,
                                                 uint32_t *slot, uint64_t policy)
{
    const stream_state_t &sh = shared.state;
    const stream_call_t &call = sh.call;
    const stream_phase_t p = phase_pick(is_down, gate, down);
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4;
    const unsigned char *const own = shared.ring[warp][0];
    const uint32_t ring = ptx_shared(own);
    const unsigned char *const mine = own + row * S::BYTES + lane % 4 * 16;
    const uint32_t odd = row % 2 * 64;
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
        for (uint32_t part = 0; part < p.parts; part++) {
            const uint32_t bytes = part_bytes(sh, is_down, part);
            const uint32_t mask = is_down ? sh.mask_of[part] : 0xffff;
            const char *from[NB];
            bool asked[NB]; // rows that exist and chose this part; the others are zeros
#pragma unroll
            for (int n = 0; n < NB; n++) {
                const uint32_t input = n * 8 + row;
                asked[n] = input < call.rows && mask >> input & 1;
                from[n] = lane % 4 * 16 +
                          (is_down ? call.activations +
                                         (input * call.pitch +
                                          (uint64_t)part * sh.signature.intermediate) * 2
                                   : (const char *)call.input + (uint64_t)input * bytes);
            }
#pragma unroll 1
            for (uint32_t unit = warp; unit * S::BYTES < bytes; unit += S::WARPS) {
                const uint32_t along = unit * S::BYTES;
                uint4 x[S::STEPS][NB];
#pragma unroll
                for (uint32_t s = 0; s < S::STEPS; s++)
#pragma unroll
                    for (int n = 0; n < NB; n++)
                        x[s][n] = ptx_load_l2_if(from[n] + along + s * 64,
                                                 asked[n] &&
                                                     along + s * 64 + lane % 4 * 16 < bytes);
                ptx_copies_wait<S::DEPTH - 1>();
                __syncwarp();
                const unsigned char *const at = mine + *slot * S::SLOT_BYTES;
#pragma unroll
                for (uint32_t s = 0; s < S::STEPS; s++)
#pragma unroll
                    for (uint32_t t = 0; t < S::TILES; t++) {
                        if (t >= live)
                            break;
                        const unsigned char *a = at + t * S::TILE_BYTES + (s * 64 ^ odd);
                        const uint4 low = *(const uint4 *)a;
                        const uint4 high = *(const uint4 *)(a + 8 * S::BYTES);
#pragma unroll
                        for (int n = 0; n < NB; n++) {
                            ptx_mma<T>(sum[t][n], low.x, high.x, low.y, high.y, x[s][n].x,
                                       x[s][n].y);
                            ptx_mma<T>(sum[t][n], low.z, high.z, low.w, high.w, x[s][n].z,
                                       x[s][n].w);
                        }
                    }
                __syncwarp();
                *slot = *slot + 1 == S::DEPTH ? 0 : *slot + 1;
                unit_copy<S>(sh, gate, down, ring, c, policy);
            }
        }
#pragma unroll
        for (int n = 0; n < NB; n++) {
#pragma unroll
            for (uint32_t t = 0; t < S::TILES; t++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    shared.sums[warp][t * 4 + i][lane] = sum[t][n][i];
            __syncthreads();
            pass_store<S, T>(shared, p, is_down, tile, live, n * 8);
            __syncthreads();
        }
    }
}

template <typename S>
static __device__ __forceinline__ void phase_dispatch(stream_shared_t<S> &shared, bool is_down,
                                                      const stream_phase_t &gate,
                                                      const stream_phase_t &down,
                                                      stream_cursor_t<S> *c, uint32_t *slot,
                                                      uint64_t policy)
{
    const bool wide = shared.state.call.rows > 8;
    if (shared.state.signature.dtype == FFN_CUDA_BF16) {
        if (wide)
            phase_run<S, __nv_bfloat16, 2>(shared, is_down, gate, down, c, slot, policy);
        else
            phase_run<S, __nv_bfloat16, 1>(shared, is_down, gate, down, c, slot, policy);
    } else {
        if (wide)
            phase_run<S, __half, 2>(shared, is_down, gate, down, c, slot, policy);
        else
            phase_run<S, __half, 1>(shared, is_down, gate, down, c, slot, policy);
    }
}

// ---- router --------------------------------------------------------------------------------------
// One expert's logits of all rows: warp w takes elements w * 256 ... + 255 of every WARPS * 256, for
// each row; the sums of a row are added in the order of the warps. So a row's logit does not depend on
// how many rows there are, and an expert's weights are read once.
template <typename S, typename T>
static __device__ __forceinline__ void router_sums(stream_state_t &sh, const char *weights, bool wide)
{
    enum { AT_ONCE = 8 }; // rows whose elements are loaded before the first is used
    const uint32_t hidden = sh.signature.hidden, rows = sh.call.rows;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const char *input = (const char *)sh.call.input;
    float sum[FFN_CUDA_DECODE_ROWS];
#pragma unroll
    for (uint32_t r = 0; r < FFN_CUDA_DECODE_ROWS; r++)
        sum[r] = 0.0f;
    for (uint32_t k = warp * 256 + lane * 8; k < hidden; k += S::WARPS * 256) {
        float w[8];
        if (wide) {
            *(float4 *)&w[0] = __ldg((const float4 *)(weights + (uint64_t)k * 4));
            *(float4 *)&w[4] = __ldg((const float4 *)(weights + (uint64_t)k * 4 + 16));
        } else {
            const uint4 packed = __ldg((const uint4 *)(weights + (uint64_t)k * 2));
            const uint32_t ws[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
            for (int i = 0; i < 4; i++)
                *(float2 *)&w[i * 2] = ptx_unpack<T>(ws[i]);
        }
#pragma unroll
        for (uint32_t first = 0; first < FFN_CUDA_DECODE_ROWS; first += AT_ONCE) {
            if (first >= rows)
                break;
            uint4 x[AT_ONCE];
#pragma unroll
            for (uint32_t r = 0; r < AT_ONCE; r++)
                x[r] = ptx_load_l2_if(input + ((uint64_t)(first + r) * hidden + k) * 2,
                                      first + r < rows);
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

template <typename S> static __device__ __forceinline__ void route_all(stream_shared_t<S> &shared)
{
    stream_state_t &sh = shared.state;
    stream_call_t &call = sh.call;
    const ffn_cuda_signature_t &s = sh.signature;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bool wide = s.router_dtype == FFN_CUDA_F32;
    for (uint32_t e = blockIdx.x; e < s.experts; e += gridDim.x) {
        const char *w = (const char *)call.router + (uint64_t)e * s.hidden * (wide ? 4 : 2);
        if (s.dtype == FFN_CUDA_BF16)
            router_sums<S, __nv_bfloat16>(sh, w, wide);
        else
            router_sums<S, __half>(sh, w, wide);
        __syncthreads();
        if (threadIdx.x < call.rows) {
            float logit = 0.0f;
            for (uint32_t i = 0; i < S::WARPS; i++)
                logit += sh.router[i][threadIdx.x];
            call.logits[threadIdx.x * s.experts + e] = logit;
        }
        __syncthreads();
    }
    // The addresses of parts, near of which some will be chosen.
    for (uint32_t i = threadIdx.x; i * 128 < s.experts * sizeof(ffn_cuda_part_t); i += S::THREADS)
        ptx_prefetch((const char *)call.parts + i * 128);
    if (threadIdx.x == 0)
        ptx_add_release(&call.meeting->routed, 1);
    stream_mark(call, 1);
    for (uint32_t e = threadIdx.x; e < s.experts; e += S::THREADS)
        sh.expert_mask[e] = 0;
    if (threadIdx.x == 0)
        while (ptx_load_acquire(&call.meeting->routed) < call.routed_target)
            ;
    __syncthreads();
    stream_mark(call, 2);
    // Nothing is under way in the ring; a warp's scores take a part of its own.
    float *scores = (float *)shared.ring[warp][0];
    for (uint32_t row = warp; row < call.rows; row += S::WARPS) {
        for (uint32_t e = lane; e < s.experts; e += 32)
            scores[e] = __ldcg(&call.logits[row * s.experts + e]);
        __syncwarp();
        uint32_t expert;
        float weight;
        route_row(s, scores, call.bias, &expert, &weight);
        if (lane < s.top_k) {
            sh.chosen[row][lane] = (uint16_t)expert;
            sh.weight[row][lane] = weight;
            atomicOr(&sh.expert_mask[expert], 1u << row);
        }
        __syncwarp();
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
template <typename S> struct stream_role_t {
    stream_cursor_t<S> cursor;
    uint32_t slot; // the next unit to multiply
    uint64_t policy;
};

// By warp 0: what hangs on the layer alone.
static __device__ __forceinline__ void layer_read(stream_state_t &sh, const ffn_cuda_layer_t *layer)
{
    const uint32_t thread = threadIdx.x;
    const ffn_cuda_signature_t *signature = layer->signature;
    if (thread < sizeof(ffn_cuda_signature_t) / 4)
        ((uint32_t *)&sh.signature)[thread] = ((const uint32_t *)signature)[thread];
    if (thread == 0) {
        stream_call_t &call = sh.call;
        const ffn_cuda_layer_t l = *layer;
        const uint32_t experts = signature->experts;
        const uint32_t last = experts ? signature->shared_intermediate : signature->intermediate;
        call.layer = layer;
        call.parts = l.parts;
        call.router = l.router;
        call.bias = l.bias;
        call.next = l.next;
        call.experts_chosen = 0;
        call.last_width = last;
        sh.part_of[0] = 0;
        sh.mask_of[0] = 0xffff;
    }
}

// By warp 0. The Lane's words change while the resident kernel runs: past L1.
static __device__ __forceinline__ void call_read(stream_state_t &sh, const ffn_cuda_lane_t *lane)
{
    stream_call_t &call = sh.call;
    const ffn_cuda_layer_t *layer = lane->layers + __ldcg(&lane->layer);
    const bool known = sh.ahead && sh.ahead_layer == layer;
    __syncwarp();
    if (threadIdx.x == 0) {
        const ffn_cuda_workspace_t &w = lane->workspace;
        const uint32_t rows = __ldcg(&lane->rows);
        const unsigned long long input = __ldcg((const unsigned long long *)&lane->input);
        const unsigned long long output = __ldcg((const unsigned long long *)&lane->output);
        const unsigned long long partial = __ldcg((const unsigned long long *)&lane->partial);
        ffn_cuda_meeting_t *meeting = w.meeting;
        uint32_t(*shares)[FFN_CUDA_MAX_BLOCKS + 1] = w.shares;
        float *logits = w.logits;
        char *activations = (char *)w.decode_activations;
        const uint64_t pitch = w.decode_pitch;
        uint32_t(*cycles)[FFN_CUDA_MAX_BLOCKS] = w.cycles;
        uint32_t(*trace)[FFN_CUDA_MAX_BLOCKS] = w.trace;
        const uint32_t number = block_number();
        // Of this Invocation, fewer than all blocks have arrived, since this one has not: the
        // rest of the division is theirs.
        const uint64_t grid = gridDim.x;
        const uint64_t routed = ptx_load_relaxed(&meeting->routed);
        const uint64_t acted = ptx_load_relaxed(&meeting->acted);
        uint32_t share[2][3];
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            share[i][0] = __ldcg(&shares[i][number]);
            share[i][1] = __ldcg(&shares[i][number + 1]);
            share[i][2] = __ldcg(&shares[i][gridDim.x]); // 0: equal shares
        }
        bool same = known;
#pragma unroll
        for (uint32_t i = 0; i < 2; i++)
#pragma unroll
            for (uint32_t end = 0; end < 2; end++) {
                const uint32_t at =
                    share[i][2] ? share[i][end]
                                : (uint32_t)((uint64_t)(number + end) * FFN_CUDA_SHARE_ONE / grid);
                same = same && at == sh.ahead_share[i][end];
                call.share[i][end] = at;
            }
        call.input = (const void *)input;
        call.output = (void *)output;
        call.partial = (float *)partial;
        call.logits = logits;
        call.activations = activations;
        call.pitch = pitch;
        call.meeting = meeting;
        call.routed_target = (routed / grid + 1) * grid;
        call.acted_target = (acted / grid + 1) * grid;
        call.cycles = cycles;
        call.trace = trace;
        call.rows = rows;
        sh.ahead = same;
        if (rows > FFN_CUDA_DECODE_ROWS)
            __trap();
    }
    if (!known)
        layer_read(sh, layer);
}

// All threads; sh.call is filled. Answers with all of this block's outputs written, not yet visible.
template <typename S>
static __device__ __forceinline__ void layer_run(stream_shared_t<S> &shared, stream_role_t<S> *role)
{
    stream_state_t &sh = shared.state;
    stream_call_t &call = sh.call;
    const uint32_t ring = ptx_shared(shared.ring[threadIdx.x / 32][0]);
    const bool hit = sh.ahead;
    stream_mark(call, 0);
    if (!hit) { // what was loaded ahead, if anything, is dropped
        ptx_copies_wait<0>();
        __syncwarp();
        if (sh.signature.experts)
            route_all<S>(shared);
        stream_mark(call, 3);
    }
    const stream_phase_t gate = phase_of<S>(sh, false), down = phase_of<S>(sh, true);
    if (!hit) {
        cursor_begin<S>(sh, gate, down, ring, &role->cursor, role->policy);
        role->slot = 0;
    }
    uint32_t began = (uint32_t)clock64();
    phase_dispatch<S>(shared, false, gate, down, &role->cursor, &role->slot, role->policy);
    // The barrier after the last pass orders all threads' activations before this arrival.
    if (threadIdx.x == 0) {
        ptx_add_release(&call.meeting->acted, 1);
        call.cycles[0][block_number()] = (uint32_t)clock64() - began;
        stream_mark(call, 4);
        while (ptx_load_acquire(&call.meeting->acted) < call.acted_target)
            ;
        stream_mark(call, 5);
        began = (uint32_t)clock64();
    }
    __syncthreads();
    phase_dispatch<S>(shared, true, gate, down, &role->cursor, &role->slot, role->policy);
    if (threadIdx.x == 0) {
        call.cycles[1][block_number()] = (uint32_t)clock64() - began;
        stream_mark(call, 6);
    }
}

// All threads, at the end of a layer: starts on the layer that should come next. Of a layer of experts
// only the router's rows are known before its rows are: they are brought near.
template <typename S>
static __device__ __forceinline__ void layer_ahead(stream_shared_t<S> &shared,
                                                   const ffn_cuda_lane_t *lane,
                                                   stream_role_t<S> *role)
{
    stream_state_t &sh = shared.state;
    const uint32_t next = sh.call.next;
    __syncthreads();
    if (next == FFN_CUDA_NO_LAYER)
        return;
    if (threadIdx.x < 32) {
        layer_read(sh, lane->layers + next);
        if (threadIdx.x < 4)
            ((uint32_t *)sh.ahead_share)[threadIdx.x] = ((uint32_t *)sh.call.share)[threadIdx.x];
    }
    __syncthreads();
    const ffn_cuda_signature_t &s = sh.signature;
    if (s.experts) {
        const uint64_t pitch = (uint64_t)s.hidden * (s.router_dtype == FFN_CUDA_F32 ? 4 : 2);
        for (uint32_t e = blockIdx.x; e < s.experts; e += gridDim.x)
            for (uint32_t i = threadIdx.x * 128; i < pitch; i += S::THREADS * 128)
                ptx_prefetch((const char *)sh.call.router + e * pitch + i);
        return;
    }
    const stream_phase_t gate = phase_of<S>(sh, false), down = phase_of<S>(sh, true);
    ptx_copies_wait<0>();
    __syncwarp();
    cursor_begin<S>(sh, gate, down, ptx_shared(shared.ring[threadIdx.x / 32][0]), &role->cursor,
                    role->policy);
    role->slot = 0;
    if (threadIdx.x == 0) {
        sh.ahead = 1;
        sh.ahead_layer = sh.call.layer;
    }
}

// The words that end a command, and its record; the thread that arrived last. The answer first: what
// follows is on nobody's way.
static __device__ __forceinline__ void command_end(const stream_call_t &call,
                                                   ffn_cuda_queue_t *queue, uint64_t sequence)
{
    ffn_cuda_record_t record;
    // The queue's word first: who sees the answer may fill that entry again.
    ptx_store_release_system(&queue->answered, sequence);
    if (call.answer)
        ptx_store_release_system(call.answer, call.answer_value);
    ffn_cuda_counters_t *counters =
        (ffn_cuda_counters_t *)__ldcg((const unsigned long long *)&queue->counters);
    if (counters) {
        ffn_cuda_record_begin(call.about, call.rows, &record);
        record.capacity = FFN_CUDA_DECODE_ROWS;
        record.lane = record.graph_template = FFN_CUDA_NO_LANE;
        record.resident = 1;
        record.end_ns = clock_ns();
        record.duration_ns = record.end_ns - call.began_ns;
    }
    if (call.done)
        ptx_store_release_system(call.done, call.done_value);
    if (counters)
        ffn_cuda_record_end(counters, &record);
}

// Waits for the command `sequence`; thread 0. NULL: leave.
static __device__ __forceinline__ const ffn_cuda_lane_t *
command_wait(stream_state_t &sh, ffn_cuda_queue_t *queue, uint64_t sequence)
{
    ffn_cuda_command_t *entry = &queue->entries[(sequence - 1) % FFN_CUDA_QUEUE_ENTRIES];
    uint64_t seen;
    for (uint32_t looks = 1;; looks++) {
        seen = ptx_load_acquire_system(&entry->sequence);
        if (seen == sequence || seen == FFN_CUDA_QUEUE_LEFT)
            break;
        if (looks % STREAM_LOOKS == 0 && ptx_load_relaxed_system(&queue->stop))
            ptx_swap_if_system(&entry->sequence, seen, FFN_CUDA_QUEUE_LEFT);
    }
    if (seen == FFN_CUDA_QUEUE_LEFT)
        return NULL;
    const unsigned long long lane = __ldcg((const unsigned long long *)&entry->lane);
    const unsigned long long answer = __ldcg((const unsigned long long *)&entry->answer);
    const unsigned long long answer_value = __ldcg((const unsigned long long *)&entry->answer_value);
    const unsigned long long done = __ldcg((const unsigned long long *)&entry->done);
    const unsigned long long done_value = __ldcg((const unsigned long long *)&entry->done_value);
    const unsigned long long about = __ldcg((const unsigned long long *)&entry->about);
    sh.call.began_ns = clock_ns();
    sh.call.answer = (uint64_t *)answer;
    sh.call.answer_value = answer_value;
    sh.call.done = (uint64_t *)done;
    sh.call.done_value = done_value;
    sh.call.about = (const ffn_cuda_answer_t *)about;
    return (const ffn_cuda_lane_t *)lane;
}

// One layer of `given`, or, where `queue` is not NULL, those of its commands until it says to leave.
template <typename S>
static __device__ __forceinline__ void stream_main(const ffn_cuda_lane_t *given,
                                                   ffn_cuda_queue_t *queue, uint32_t look_ahead)
{
    extern __shared__ __align__(128) unsigned char memory[];
    stream_shared_t<S> &shared = *(stream_shared_t<S> *)memory;
    stream_state_t &sh = shared.state;
    __shared__ const ffn_cuda_lane_t *lane_shared;
    stream_role_t<S> role;
    role.policy = ptx_policy_stream();
    role.slot = 0;
    if (threadIdx.x == 0)
        sh.ahead = 0;
    __syncthreads();
#pragma unroll 1
    for (uint64_t sequence = 1;; sequence++) {
        if (threadIdx.x < 32) {
            const ffn_cuda_lane_t *lane = given;
            if (threadIdx.x == 0) {
                if (queue)
                    lane = command_wait(sh, queue, sequence);
                else
                    sh.call.began_ns = clock_ns();
            }
            lane = (const ffn_cuda_lane_t *)__shfl_sync(ROUTE_ALL, (unsigned long long)lane, 0);
            if (lane)
                call_read(sh, lane);
            if (threadIdx.x == 0)
                lane_shared = lane;
        }
        __syncthreads();
        if (!lane_shared)
            break;
        const uint32_t rows = sh.call.rows;
        if (rows)
            layer_run<S>(shared, &role);
        if (!queue)
            break;
        __syncthreads();
        if (threadIdx.x == 0) {
            const uint64_t grid = gridDim.x;
            // All of the block's outputs, also those in another device's memory.
            __threadfence_system();
            const uint64_t ended = ptx_add_acq_rel(&sh.call.meeting->ended, 1) + 1;
            stream_mark(sh.call, 7);
            if (ended % grid == 0)
                command_end(sh.call, queue, sequence);
            if (rows)
                sh.ahead = 0;
        }
        if (look_ahead && rows)
            layer_ahead<S>(shared, lane_shared, &role);
        __syncthreads();
    }
    ptx_copies_wait<0>();
}

#define STREAM_KERNEL(number, warps, tiles, bytes, depth)                                          \
    static_assert(sizeof(stream_shared_t<stream_shape_t<warps, tiles, bytes, depth>>) <=           \
                      STREAM_SHARED_BYTES(warps, tiles, bytes, depth),                             \
                  "STREAM_SHARED_BYTES is too small");                                             \
    extern "C" __global__ void __launch_bounds__(warps * 32, 1)                                    \
        ffn_stream_##number(const ffn_cuda_lane_t *lane, ffn_cuda_queue_t *queue,                  \
                            uint32_t look_ahead)                                                   \
    {                                                                                              \
        stream_main<stream_shape_t<warps, tiles, bytes, depth>>(lane, queue, look_ahead);          \
    }
#else
#define STREAM_KERNEL(number, warps, tiles, bytes, depth)                                          \
    extern "C" __global__ void ffn_stream_##number(const ffn_cuda_lane_t *lane,                    \
                                                   ffn_cuda_queue_t *queue, uint32_t look_ahead)   \
    {                                                                                              \
        __trap();                                                                                  \
    }
#endif
STREAM_VARIANTS(STREAM_KERNEL)
