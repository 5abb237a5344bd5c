// SPDX-License-Identifier: MIT
// The whole FFN of one layer for 1 to 16 rows in one cooperative launch: router, gate and up, down.
//
// Few rows make this a matter of streaming weights. A block is 8 computing warps and 5 that only start
// copies: 4 for weights, one for rows. Weights flow through a ring of stages in shared memory; a stage is
// one tile (16 weight rows) by one chunk of the inner dimension, copied by the bulk copy engine. A warp
// starts such a copy every 45 ns at best, a kilobyte is due every 34 ns: hence four weight warps, with
// four rows of every stage each. They run ahead over the border between the two phases, since weights
// depend on nothing: while the grid meets, the ring fills with `down`. Where the next layer is known
// before it is asked for (the resident kernel, dense layers), the ring fills with its first stages.
//
//   phase 1  a block owns a range of (gate row, up row) pairs over all chosen parts; a tile is 8 gate
//            rows above their 8 up rows, so that one lane holds both sums of a pair
//   phase 2  a block owns a range of output columns; the inner dimension runs over all chosen parts in
//            ascending order, the shared part last, so the sum over experts stays in the registers
//
// Products are of 16 x 8 x 16 on tensor cores for any number of rows. The order in which one row's
// terms are added depends on the layer's shape and the grid, never on the other rows: a row gives the
// same bits alone and among 15 others. Lanes read 16 contiguous bytes of a row as four K pairs of two
// products; rows and weights use the same order of K, so it does not matter which.
//
// Nothing waits without a partner that is already running: the launch is cooperative. Needs sm_90.
#include "ffn/cuda/dispatch_steps.h"
#include "ffn/cuda/ptx.cuh"
#include "ffn/cuda/route.cuh"
#include "ffn/cuda/decode_shape.h"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 900
#include "ffn/cuda/decode_phase.cuh"

// ---- the weight warps ----------------------------------------------------------------------------
struct decode_ring_t {
    uint32_t stage, parity;
};

// Slots for chunks of rows: as many as the live rows leave room for, from the first one on in every
// layer. A slot's barriers have gone round as often as the slot was used: a parity bit for each.
struct decode_slots_t {
    uint32_t slot, parities;
};

static __device__ __forceinline__ void slot_next(decode_slots_t *slots, uint32_t rows)
{
    slots->parities ^= 1u << slots->slot;
    if (++slots->slot == DECODE_ROW_BUFFERS / slot_rows(rows))
        slots->slot = 0;
}

static __device__ __forceinline__ void ring_next(decode_ring_t *ring)
{
    if (++ring->stage == DECODE_STAGES) {
        ring->stage = 0;
        ring->parity ^= 1;
    }
}

#define COPY_ROWS (DECODE_TILE / DECODE_COPY_WARPS) // rows of a stage that one weight warp copies

static __device__ __forceinline__ uint32_t copy_warp()
{
    return threadIdx.x / 32 - DECODE_WARPS;
}

// This warp's rows of the next stage, of which `live` exist; one lane.
static __device__ __forceinline__ void stage_fill(decode_shared_t &sh, decode_ring_t *ring,
                                                  const char *const (&from)[COPY_ROWS],
                                                  uint32_t live, uint32_t bytes, uint64_t policy)
{
    const uint32_t full = ptx_shared(&sh.full[ring->stage]);
    const uint32_t to = ptx_shared(sh.ring[ring->stage][copy_warp() * COPY_ROWS]);
    ptx_barrier_wait(ptx_shared(&sh.empty[ring->stage]), ring->parity ^ 1);
    ptx_barrier_expect(full, live * bytes);
#pragma unroll
    for (uint32_t i = 0; i < COPY_ROWS; i++)
        if (i < live)
            ptx_bulk_load_stream(to + i * DECODE_PITCH, from[i], bytes, full, policy);
    ring_next(ring);
}

// Addresses of the gate and up rows of a panel: entries [tile][0..7] gate, [8..15] up.
static __device__ __forceinline__ void rows_locate(decode_shared_t &sh, const decode_phase_t &p,
                                                   const ffn_cuda_signature_t &s,
                                                   const ffn_cuda_part_t *parts,
                                                   uint32_t experts_chosen, uint32_t panel,
                                                   uint32_t thread, uint32_t threads)
{
    const uint32_t tiles = panel_tiles(p, panel);
    for (uint32_t i = thread; i < tiles * DECODE_TILE; i += threads) {
        const uint32_t tile = i / DECODE_TILE, row = i % DECODE_TILE;
        const uint32_t pair = (panel * p.panel_tiles + tile) * p.tile_rows + row % p.tile_rows;
        const char *at = NULL;
        if (pair < p.count) {
            const uint32_t v = p.first + pair;
            const uint32_t index = min(v / s.intermediate, experts_chosen);
            const ffn_cuda_part_t *part = &parts[sh.part_of[index]];
            at = (const char *)(row < p.tile_rows ? part->gate : part->up) +
                 (uint64_t)(v - index * s.intermediate) * s.hidden * 2;
        }
        sh.row_at[tile][row] = at;
    }
}

// How many of this warp's rows of a tile exist, when `rest` pairs or columns are left from its first on.
static __device__ __forceinline__ uint32_t rows_live(const decode_phase_t &p, uint32_t rest)
{
    const uint32_t before = copy_warp() * COPY_ROWS % p.tile_rows;
    return rest > before ? min(rest - before, COPY_ROWS) : 0;
}

// Stages [begin, end) of the phase; rows of panel 0 are located before the call.
static __device__ void weights_gate(decode_shared_t &sh, decode_ring_t *ring,
                                    const decode_phase_t &p, const ffn_cuda_signature_t &s,
                                    const ffn_cuda_part_t *parts, uint32_t experts_chosen,
                                    uint32_t begin, uint32_t end, uint64_t policy)
{
    const uint32_t lane = threadIdx.x % 32;
    uint32_t number = 0;
    for (uint32_t panel = 0; panel < p.panels && number < end; panel++) {
        const uint32_t tiles = panel_tiles(p, panel);
        if (panel) {
            __syncwarp();
            copiers_meet();
            rows_locate(sh, p, s, parts, experts_chosen, panel, copy_warp() * 32 + lane,
                        DECODE_COPY_WARPS * 32);
            copiers_meet();
        }
        const uint32_t step = p.group * p.chunk;
        for (uint32_t group = 0; group < s.hidden && number < end; group += step)
            for (uint32_t first = 0; first < tiles && number < end; first += p.side)
                for (uint32_t k = group; k < min(group + step, s.hidden); k += p.chunk) {
                    const uint32_t bytes = min(p.chunk, s.hidden - k) * 2;
                    for (uint32_t tile = first; tile < min(first + p.side, tiles);
                         tile++, number++) {
                        if (number < begin || number >= end || lane)
                            continue;
                        const uint32_t rest =
                            p.count - (panel * p.panel_tiles + tile) * p.tile_rows;
                        const char *const *at = &sh.row_at[tile][copy_warp() * COPY_ROWS];
                        const char *from[COPY_ROWS];
#pragma unroll
                        for (uint32_t i = 0; i < COPY_ROWS; i++)
                            from[i] = at[i] + (uint64_t)k * 2;
                        stage_fill(sh, ring, from, rows_live(p, rest), bytes, policy);
                    }
                }
    }
    __syncwarp();
}

static __device__ void weights_down(decode_shared_t &sh, decode_ring_t *ring,
                                    const decode_phase_t &p, uint64_t policy)
{
    const decode_call_t &call = sh.call;
    const uint32_t lane = threadIdx.x % 32;
    for (uint32_t panel = 0; panel < p.panels; panel++) {
        const uint32_t tiles = panel_tiles(p, panel);
        const void *held = NULL; // `down` of 32 parts, one a lane
        for (uint32_t part = 0; part < p.parts; part++) {
            if (part % 32 == 0)
                held = part + lane < p.parts ? call.parts[sh.part_of[part + lane]].down : NULL;
            const char *down =
                (const char *)__shfl_sync(ROUTE_ALL, (unsigned long long)held, part % 32);
            const uint32_t width = phase_part_width(sh.signature, call, true, part);
            if (lane)
                continue;
            for (uint32_t k = 0; k < width; k += p.chunk) {
                const uint32_t bytes = min(p.chunk, width - k) * 2;
                for (uint32_t tile = 0; tile < tiles; tile++) {
                    const uint32_t before = (panel * p.panel_tiles + tile) * p.tile_rows;
                    const char *first =
                        down + ((uint64_t)(p.first + before + copy_warp() * COPY_ROWS) * width + k) * 2;
                    const char *from[COPY_ROWS];
#pragma unroll
                    for (uint32_t i = 0; i < COPY_ROWS; i++)
                        from[i] = first + (uint64_t)i * width * 2;
                    stage_fill(sh, ring, from, rows_live(p, p.count - before), bytes, policy);
                }
            }
        }
        __syncwarp();
    }
}

// ---- the row warp --------------------------------------------------------------------------------
static __device__ void rows_send(decode_shared_t &sh, decode_slots_t *slots, const decode_phase_t &p,
                                 bool down)
{
    const decode_call_t &call = sh.call;
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t live_rows = (1u << call.rows) - 1;
    for (uint32_t panel = 0; panel < p.panels; panel++) {
        for (uint32_t part = 0; part < p.parts; part++) {
            const uint32_t width = phase_part_width(sh.signature, call, down, part);
            const uint32_t mask = down ? sh.mask_of[part] & live_rows : live_rows;
            const char *from =
                down ? call.activations +
                           (lane * call.pitch + (uint64_t)part * sh.signature.intermediate) * 2
                     : (const char *)call.input + (uint64_t)lane * width * 2;
            for (uint32_t k = 0; k < width; k += p.chunk) {
                const uint32_t bytes = min(p.chunk, width - k) * 2;
                const uint32_t full = ptx_shared(&sh.rows_full[slots->slot]);
                const uint32_t parity = slots->parities >> slots->slot & 1;
                ptx_barrier_wait(ptx_shared(&sh.rows_empty[slots->slot]), parity ^ 1);
                if (lane == 0)
                    ptx_barrier_expect(full, __popc(mask) * bytes);
                __syncwarp();
                if (mask >> lane & 1)
                    ptx_bulk_load(ptx_shared(sh.rows[slots->slot * slot_rows(call.rows) + lane]),
                                  from + (uint64_t)k * 2, bytes, full);
                slot_next(slots, call.rows);
            }
        }
    }
}

// ---- computing warps -----------------------------------------------------------------------------
template <typename T, int NB>
static __device__ __forceinline__ void tile_multiply(const unsigned char *a, const unsigned char *b,
                                                     uint32_t length, const uint32_t (&keep)[NB],
                                                     float (&sum)[NB][4])
{
    const uint32_t lane = threadIdx.x % 32, at = lane / 4 * DECODE_PITCH + lane % 4 * 16;
    a += at;
    b += at;
    const uint32_t steps = (length + 31) / 32;
#pragma unroll 4
    for (uint32_t i = 0; i < steps; i++) {
        uint4 low = *(const uint4 *)(a + i * 64);
        uint4 high = *(const uint4 *)(a + 8 * DECODE_PITCH + i * 64);
        // Past the end of the chunk lies what was there before.
        const uint32_t inside = i * 32 + lane % 4 * 8 < length ? 0xffffffffu : 0u;
        low.x &= inside, low.y &= inside, low.z &= inside, low.w &= inside;
        high.x &= inside, high.y &= inside, high.z &= inside, high.w &= inside;
#pragma unroll
        for (int n = 0; n < NB; n++) {
            uint4 x = *(const uint4 *)(b + n * 8 * DECODE_PITCH + i * 64);
            const uint32_t mask = keep[n] & inside;
            x.x &= mask, x.y &= mask, x.z &= mask, x.w &= mask;
            ptx_mma<T>(sum[n], low.x, high.x, low.y, high.y, x.x, x.y);
            ptx_mma<T>(sum[n], low.z, high.z, low.w, high.w, x.z, x.w);
        }
    }
}

static __device__ __forceinline__ float route_weight(const decode_shared_t &sh, uint32_t row,
                                                     uint32_t part)
{
    for (uint32_t i = 0; i < sh.signature.top_k; i++)
        if (sh.chosen[row][i] == part)
            return sh.weight[row][i];
    return 0.0f;
}

template <typename T, int NB>
static __device__ __forceinline__ void tile_activate(decode_shared_t &sh, const decode_phase_t &p,
                                                     uint32_t tile, const float (&sum)[NB][4])
{
    const decode_call_t &call = sh.call;
    const uint32_t lane = threadIdx.x % 32, pair = tile * p.tile_rows + lane / 4;
    if (pair >= p.count)
        return;
    const uint32_t v = p.first + pair;
    const uint32_t index = min(v / sh.signature.intermediate, call.experts_chosen);
    const bool routed = index < call.experts_chosen;
#pragma unroll
    for (int n = 0; n < NB; n++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const uint32_t row = n * 8 + lane % 4 * 2 + c;
            if (row >= call.rows || !(sh.mask_of[index] >> row & 1))
                continue;
            float value = ptx_activate(sh.signature.activation, sum[n][c], sum[n][2 + c]);
            if (routed)
                value *= route_weight(sh, row, sh.part_of[index]);
            ((T *)call.activations)[row * call.pitch + v] = ptx_from_float<T>(value);
        }
}

template <typename T, int NB>
static __device__ __forceinline__ void tile_output(decode_shared_t &sh, const decode_phase_t &p,
                                                   uint32_t tile, const float (&sum)[NB][4])
{
    const decode_call_t &call = sh.call;
    const uint32_t lane = threadIdx.x % 32, hidden = sh.signature.hidden;
#pragma unroll
    for (int n = 0; n < NB; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t column = tile * p.tile_rows + lane / 4 + i / 2 * 8;
            const uint32_t row = n * 8 + lane % 4 * 2 + i % 2;
            if (column >= p.count || row >= call.rows)
                continue;
            const uint64_t at = (uint64_t)row * hidden + p.first + column;
            if (call.output)
                ((T *)call.output)[at] = ptx_from_float<T>(sum[n][i]);
            else
                call.partial[at] = sum[n][i];
        }
}

// Where the computing warps are in the ring: the next stage's number modulo two rounds (whose second
// round has parity 1), and the row slots. Every warp waits for every stage and gives it back, also
// those that another one computes: a barrier tells one round from the next only to those who have seen
// the one before, and copies do not arrive in the order in which they were started.
struct decode_place_t {
    uint32_t number;
    decode_slots_t slots;
};

template <typename T, int NB>
static __device__ void compute_phase(decode_shared_t &sh, const decode_phase_t &p, bool down,
                                     decode_place_t *place)
{
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, rows = sh.call.rows;
    for (uint32_t panel = 0; panel < p.panels; panel++) {
        const uint32_t tiles = panel_tiles(p, panel);
        float sum[DECODE_SLOTS][NB][4];
#pragma unroll
        for (int slot = 0; slot < DECODE_SLOTS; slot++)
#pragma unroll
            for (int n = 0; n < NB; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    sum[slot][n][i] = 0.0f;
        for (uint32_t part = 0; part < p.parts; part++) {
            const uint32_t width = phase_part_width(sh.signature, sh.call, down, part);
            uint32_t keep[NB];
#pragma unroll
            for (int n = 0; n < NB; n++)
                keep[n] = !down || sh.mask_of[part] >> (n * 8 + lane / 4) & 1 ? 0xffffffffu : 0u;
            uint32_t turn = 0; // which of the warps that share a tile has this chunk
            for (uint32_t k = 0; k < width; k += p.chunk) {
                const uint32_t length = min(p.chunk, width - k);
                const uint32_t at = place->slots.slot;
                ptx_barrier_wait(ptx_shared(&sh.rows_full[at]), place->slots.parities >> at & 1);
#pragma unroll
                for (int slot = 0; slot < DECODE_SLOTS; slot++)
                    for (uint32_t i = 0; i < DECODE_WARPS; i++) {
                        const uint32_t tile = slot * DECODE_WARPS + i;
                        if (tile >= tiles)
                            break;
                        const uint32_t round = place->number >= DECODE_STAGES;
                        const uint32_t stage = place->number - round * DECODE_STAGES;
                        ptx_barrier_wait(ptx_shared(&sh.full[stage]), round);
                        if (warp == turn * tiles + i) {
                            tile_multiply<T, NB>(sh.ring[stage][0],
                                                 sh.rows[at * slot_rows(rows)], length, keep,
                                                 sum[slot]);
                            __syncwarp();
                        }
                        if (lane == 0)
                            ptx_barrier_arrive(ptx_shared(&sh.empty[stage]));
                        if (++place->number == 2 * DECODE_STAGES)
                            place->number = 0;
                    }
                __syncwarp();
                if (lane == 0)
                    ptx_barrier_arrive(ptx_shared(&sh.rows_empty[at]));
                slot_next(&place->slots, rows);
                turn = turn + 1 == p.split ? 0 : turn + 1;
            }
        }
        if (p.split > 1) {
            // Shares of a tile are added in the order of the warps.
            if (warp >= tiles && warp < tiles * p.split)
#pragma unroll
                for (int n = 0; n < NB; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        sh.sums[warp][n * 4 + i][lane] = sum[0][n][i];
            consumers_meet();
            if (warp < tiles)
                for (uint32_t other = warp + tiles; other < tiles * p.split; other += tiles)
#pragma unroll
                    for (int n = 0; n < NB; n++)
#pragma unroll
                        for (int i = 0; i < 4; i++)
                            sum[0][n][i] += sh.sums[other][n * 4 + i][lane];
            consumers_meet();
        }
#pragma unroll
        for (int slot = 0; slot < DECODE_SLOTS; slot++) {
            const uint32_t tile = slot * DECODE_WARPS + warp;
            if (tile >= tiles)
                continue;
            if (down)
                tile_output<T, NB>(sh, p, panel * p.panel_tiles + tile, sum[slot]);
            else
                tile_activate<T, NB>(sh, p, panel * p.panel_tiles + tile, sum[slot]);
        }
    }
}

// Gate and up of a dense layer in the order of `group` and `side` (which divides DECODE_WARPS); a tile
// is one warp's.
template <typename T, int NB>
static __device__ void compute_grouped(decode_shared_t &sh, const decode_phase_t &p,
                                       decode_place_t *place)
{
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, rows = sh.call.rows;
    const uint32_t hidden = sh.signature.hidden, step = p.group * p.chunk;
    uint32_t keep[NB];
#pragma unroll
    for (int n = 0; n < NB; n++)
        keep[n] = 0xffffffffu;
    for (uint32_t panel = 0; panel < p.panels; panel++) {
        const uint32_t tiles = panel_tiles(p, panel);
        float sum[DECODE_SLOTS][NB][4];
#pragma unroll
        for (int slot = 0; slot < DECODE_SLOTS; slot++)
#pragma unroll
            for (int n = 0; n < NB; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    sum[slot][n][i] = 0.0f;
        for (uint32_t group = 0; group < hidden; group += step) {
            const uint32_t end = min(group + step, hidden);
#pragma unroll
            for (int slot = 0; slot < DECODE_SLOTS; slot++)
                for (uint32_t first = 0; first < DECODE_WARPS; first += p.side) {
                    if (slot * DECODE_WARPS + first >= tiles)
                        break;
                    decode_slots_t at = place->slots;
                    for (uint32_t k = group; k < end; k += p.chunk) {
                        const uint32_t length = min(p.chunk, hidden - k);
                        ptx_barrier_wait(ptx_shared(&sh.rows_full[at.slot]),
                                         at.parities >> at.slot & 1);
                        for (uint32_t i = first; i < first + p.side; i++) {
                            if (slot * DECODE_WARPS + i >= tiles)
                                break;
                            const uint32_t round = place->number >= DECODE_STAGES;
                            const uint32_t stage = place->number - round * DECODE_STAGES;
                            ptx_barrier_wait(ptx_shared(&sh.full[stage]), round);
                            if (warp == i) {
                                tile_multiply<T, NB>(sh.ring[stage][0],
                                                     sh.rows[at.slot * slot_rows(rows)], length,
                                                     keep, sum[slot]);
                                __syncwarp();
                            }
                            if (lane == 0)
                                ptx_barrier_arrive(ptx_shared(&sh.empty[stage]));
                            if (++place->number == 2 * DECODE_STAGES)
                                place->number = 0;
                        }
                        slot_next(&at, rows);
                    }
                }
            // No tile needs this group's chunks of rows any more.
            __syncwarp();
            for (uint32_t k = group; k < end; k += p.chunk) {
                if (lane == 0)
                    ptx_barrier_arrive(ptx_shared(&sh.rows_empty[place->slots.slot]));
                slot_next(&place->slots, rows);
            }
        }
#pragma unroll
        for (int slot = 0; slot < DECODE_SLOTS; slot++) {
            const uint32_t tile = slot * DECODE_WARPS + warp;
            if (tile < tiles)
                tile_activate<T, NB>(sh, p, panel * p.panel_tiles + tile, sum[slot]);
        }
    }
}

static __device__ __forceinline__ void compute_dispatch(decode_shared_t &sh,
                                                        const decode_phase_t &p, bool down,
                                                        decode_place_t *place)
{
    const bool wide = sh.call.rows > 8;
    if (p.group > 1) { // never for more than 8 rows: their chunks fill the slots
        if (sh.signature.dtype == FFN_CUDA_BF16)
            compute_grouped<__nv_bfloat16, 1>(sh, p, place);
        else
            compute_grouped<__half, 1>(sh, p, place);
    } else if (sh.signature.dtype == FFN_CUDA_BF16) {
        if (wide)
            compute_phase<__nv_bfloat16, 2>(sh, p, down, place);
        else
            compute_phase<__nv_bfloat16, 1>(sh, p, down, place);
    } else {
        if (wide)
            compute_phase<__half, 2>(sh, p, down, place);
        else
            compute_phase<__half, 1>(sh, p, down, place);
    }
}

// ---- router: computing warps ---------------------------------------------------------------------
// One expert's logits of all rows: warp w takes elements w * 256 ... + 255 of every 2048, for each row;
// the eight sums of a row are added in the order of the warps. So a row's logit does not depend on how
// many rows there are, and an expert's weights are read once.
template <typename T>
static __device__ __forceinline__ void router_sums(decode_shared_t &sh, const char *input,
                                                   const char *weights, bool wide)
{
    const uint32_t hidden = sh.signature.hidden, rows = sh.call.rows;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float sum[FFN_CUDA_DECODE_ROWS];
#pragma unroll
    for (uint32_t r = 0; r < FFN_CUDA_DECODE_ROWS; r++)
        sum[r] = 0.0f;
    for (uint32_t k = warp * 256 + lane * 8; k < hidden; k += DECODE_WARPS * 256) {
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
        for (uint32_t r = 0; r < FFN_CUDA_DECODE_ROWS; r++) {
            if (r >= rows)
                break;
            const uint4 x = ptx_load_l2(input + ((uint64_t)r * hidden + k) * 2);
            const uint32_t xs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float2 pair = ptx_unpack<T>(xs[i]);
                sum[r] = fmaf(pair.x, w[i * 2], sum[r]);
                sum[r] = fmaf(pair.y, w[i * 2 + 1], sum[r]);
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
            sh.sums[warp][0][r] = sum[r];
    }
}

static __device__ void route_all(decode_shared_t &sh)
{
    decode_call_t &call = sh.call;
    const ffn_cuda_signature_t &s = sh.signature;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bool wide = s.router_dtype == FFN_CUDA_F32;
    for (uint32_t e = blockIdx.x; e < s.experts; e += gridDim.x) {
        const char *x = (const char *)call.input;
        const char *w = (const char *)call.layer->router + (uint64_t)e * s.hidden * (wide ? 4 : 2);
        if (s.dtype == FFN_CUDA_BF16)
            router_sums<__nv_bfloat16>(sh, x, w, wide);
        else
            router_sums<__half>(sh, x, w, wide);
        consumers_meet();
        if (threadIdx.x < call.rows) {
            float logit = 0.0f;
            for (uint32_t i = 0; i < DECODE_WARPS; i++)
                logit += sh.sums[i][0][threadIdx.x];
            call.logits[threadIdx.x * s.experts + e] = logit;
        }
        consumers_meet();
    }
    for (uint32_t e = threadIdx.x; e < s.experts; e += DECODE_WARPS * 32)
        sh.expert_mask[e] = 0;
    consumers_meet();
    if (threadIdx.x == 0) {
        ptx_add_acq_rel(&call.meeting->routed, 1);
        while (ptx_load_acquire(&call.meeting->routed) < call.routed_target)
            ;
    }
    consumers_meet();
    // The row slots are idle between layers; a warp's scores take a part of them.
    float *scores = (float *)sh.rows + warp * FFN_CUDA_MAX_EXPERTS;
    for (uint32_t row = warp; row < call.rows; row += DECODE_WARPS) {
        for (uint32_t e = lane; e < s.experts; e += 32)
            scores[e] = __ldcg(&call.logits[row * s.experts + e]);
        __syncwarp();
        uint32_t expert;
        float weight;
        route_row(s, scores, call.layer->bias, &expert, &weight);
        if (lane < s.top_k) {
            sh.chosen[row][lane] = (uint16_t)expert;
            sh.weight[row][lane] = weight;
            atomicOr(&sh.expert_mask[expert], 1u << row);
        }
        __syncwarp();
    }
    ptx_fence_proxy_shared();
    consumers_meet();
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
            call.last_width = s.shared_intermediate;
            sh.part_of[count] = (uint16_t)s.experts;
            sh.mask_of[count] = 0xffff;
        }
    }
}

// ---- one layer -----------------------------------------------------------------------------------
// What a role keeps between layers.
struct decode_role_t {
    decode_ring_t ring;   // weight warps, lane 0 of each
    decode_slots_t slots; // row warp
    decode_place_t place; // computing warps
};

static __device__ __forceinline__ void call_read(decode_shared_t &sh, const ffn_cuda_lane_t *lane)
{
    // By warp 0. The Lane's words change while the resident kernel runs: past L1.
    decode_call_t &call = sh.call;
    const uint32_t thread = threadIdx.x;
    const ffn_cuda_layer_t *layer = lane->layers + __ldcg(&lane->layer);
    const ffn_cuda_signature_t *signature = layer->signature;
    if (thread < sizeof(ffn_cuda_signature_t) / 4)
        ((uint32_t *)&sh.signature)[thread] = ((const uint32_t *)signature)[thread];
    if (thread == 0) {
        const ffn_cuda_workspace_t &w = lane->workspace;
        call.layer = layer;
        call.parts = layer->parts;
        call.rows = __ldcg(&lane->rows);
        call.order = w.decode_order;
        call.input = (const void *)__ldcg((const unsigned long long *)&lane->input);
        call.output = (void *)__ldcg((const unsigned long long *)&lane->output);
        call.partial = (float *)__ldcg((const unsigned long long *)&lane->partial);
        call.logits = w.logits;
        call.activations = (char *)w.decode_activations;
        call.pitch = w.decode_pitch;
        call.meeting = w.meeting;
        // Of this Invocation, fewer than all blocks have arrived, since this one has not: the
        // rest of the division is theirs.
        const uint64_t grid = gridDim.x;
        call.routed_target = (ptx_load_acquire(&w.meeting->routed) / grid + 1) * grid;
        call.acted_target = (ptx_load_acquire(&w.meeting->acted) / grid + 1) * grid;
        const uint32_t number = block_number();
        for (uint32_t i = 0; i < 2; i++) {
            const uint32_t *shares = w.shares[i];
            const bool equal = shares[gridDim.x] == 0;
            for (uint32_t end = 0; end < 2; end++)
                call.share[i][end] =
                    equal ? (uint32_t)((uint64_t)(number + end) * FFN_CUDA_SHARE_ONE / gridDim.x)
                          : shares[number + end];
        }
        call.cycles = w.cycles;
        call.experts_chosen = 0;
        call.last_width = signature->intermediate;
        sh.part_of[0] = 0;
        sh.mask_of[0] = 0xffff;
        if (call.rows > FFN_CUDA_DECODE_ROWS)
            __trap();
    }
}

// The ring's stages of a layer that was expected but not asked for are given back unread.
static __device__ __forceinline__ void ahead_drop(decode_shared_t &sh, decode_role_t *role)
{
    const uint32_t stages = sh.ahead_stages;
    for (uint32_t i = 0; i < stages; i++) {
        const uint32_t round = role->place.number >= DECODE_STAGES;
        const uint32_t stage = role->place.number - round * DECODE_STAGES;
        ptx_barrier_wait(ptx_shared(&sh.full[stage]), round);
        if (threadIdx.x % 32 == 0)
            ptx_barrier_arrive(ptx_shared(&sh.empty[stage]));
        if (++role->place.number == 2 * DECODE_STAGES)
            role->place.number = 0;
    }
}

// By the weight warps, at the end of a layer: starts on the layer that should come next.
static __device__ void ahead_load(decode_shared_t &sh, decode_role_t *role,
                                  const ffn_cuda_lane_t *lane, uint64_t policy)
{
    const uint32_t next = sh.call.layer->next;
    uint32_t stages = 0, key = 0;
    const ffn_cuda_layer_t *layer = NULL;
    if (next != FFN_CUDA_NO_LAYER) {
        layer = lane->layers + next;
        const ffn_cuda_signature_t s = *layer->signature;
        if (s.experts == 0) {
            // As many rows as now, it is hoped: the order depends on them.
            const decode_phase_t p = phase_gate(s, 0, s.intermediate, sh.call.share[0],
                                                sh.call.order, sh.call.rows);
            stages = min(panel_tiles(p, 0) * ceil_div(s.hidden, p.chunk), DECODE_STAGES);
            key = order_key(p);
            const uint32_t tiles = panel_tiles(p, 0);
            copiers_meet();
            for (uint32_t i = threadIdx.x - DECODE_WARPS * 32; i < tiles * DECODE_TILE;
                 i += DECODE_COPY_WARPS * 32) {
                const uint32_t pair = i / DECODE_TILE * p.tile_rows + i % p.tile_rows;
                const char *base = (const char *)(i % DECODE_TILE < p.tile_rows
                                                      ? layer->parts->gate
                                                      : layer->parts->up);
                sh.row_at[i / DECODE_TILE][i % DECODE_TILE] =
                    pair < p.count ? base + (uint64_t)(p.first + pair) * s.hidden * 2 : NULL;
            }
            copiers_meet();
            weights_gate(sh, &role->ring, p, s, layer->parts, 0, 0, stages, policy);
        }
    }
    if (threadIdx.x == DECODE_WARPS * 32) {
        sh.ahead = stages ? layer : NULL;
        sh.ahead_stages = stages;
        sh.ahead_order = key;
    }
}

// All threads; sh.call is filled. Answers with all of this block's outputs written.
static __device__ void layer_run(decode_shared_t &sh, decode_role_t *role, uint64_t policy)
{
    const uint32_t warp = threadIdx.x / 32;
    decode_call_t &call = sh.call;
    role->slots.slot = 0;
    role->place.slots.slot = 0;
    // Dense layers only are loaded ahead; for others the phase is known after the router.
    const bool dense = sh.signature.experts == 0;
    const bool hit = sh.ahead_stages && sh.ahead == call.layer && dense &&
                     sh.ahead_order == order_key(phase_gate(sh.signature, 0, call.last_width,
                                                            call.share[0], call.order, call.rows));
    const uint32_t begin = hit ? sh.ahead_stages : 0;
    if (!hit && warp < DECODE_WARPS)
        ahead_drop(sh, role);
    if (sh.signature.experts) {
        if (warp < DECODE_WARPS)
            route_all(sh);
        else // nothing to copy yet: bring the addresses near of which some will be chosen
            for (uint32_t i = threadIdx.x - DECODE_WARPS * 32;
                 i * 128 < sh.signature.experts * sizeof(ffn_cuda_part_t);
                 i += DECODE_THREADS - DECODE_WARPS * 32)
                ptx_prefetch((const char *)call.parts + i * 128);
        __syncthreads();
    }
    const decode_phase_t gate = phase_gate(sh.signature, call.experts_chosen, call.last_width,
                                           call.share[0], call.order, call.rows);
    const decode_phase_t down =
        phase_down(sh.signature, call.experts_chosen, call.last_width, call.share[1]);
    if (!hit)
        rows_locate(sh, gate, sh.signature, call.parts, call.experts_chosen, 0, threadIdx.x,
                    DECODE_THREADS);
    // Also for a hit: from here on the weight warps may write `ahead` for the next layer.
    __syncthreads();
    if (warp < DECODE_WARPS) {
        const uint32_t began = (uint32_t)clock64();
        compute_dispatch(sh, gate, false, &role->place);
        if (threadIdx.x == 0)
            call.cycles[0][block_number()] = (uint32_t)clock64() - began;
        __threadfence();
        ptx_fence_proxy();
        consumers_meet();
        if (threadIdx.x == 0)
            ptx_add_acq_rel(&call.meeting->acted, 1);
        compute_dispatch(sh, down, true, &role->place);
        if (threadIdx.x == 0)
            call.cycles[1][block_number()] = (uint32_t)clock64() - call.down_began;
        __threadfence_system();
    } else if (warp < DECODE_WARPS + DECODE_COPY_WARPS) {
        weights_gate(sh, &role->ring, gate, sh.signature, call.parts, call.experts_chosen, begin,
                     0xffffffffu, policy);
        weights_down(sh, &role->ring, down, policy);
    } else {
        ptx_fence_proxy();
        rows_send(sh, &role->slots, gate, false);
        while (ptx_load_acquire(&call.meeting->acted) < call.acted_target)
            ;
        call.down_began = (uint32_t)clock64();
        ptx_fence_proxy();
        rows_send(sh, &role->slots, down, true);
    }
}

static __device__ __forceinline__ void decode_begin(decode_shared_t &sh, decode_role_t *role)
{
    role->ring = {0, 0};
    role->slots = {0, 0};
    role->place = {0, {0, 0}};
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < DECODE_STAGES; i++) {
            ptx_barrier_init(ptx_shared(&sh.full[i]), DECODE_COPY_WARPS);
            ptx_barrier_init(ptx_shared(&sh.empty[i]), DECODE_WARPS);
        }
        for (uint32_t i = 0; i < DECODE_ROW_SLOTS; i++) {
            ptx_barrier_init(ptx_shared(&sh.rows_full[i]), 1);
            ptx_barrier_init(ptx_shared(&sh.rows_empty[i]), DECODE_WARPS);
        }
        ptx_barrier_init_fence();
        sh.ahead = NULL;
        sh.ahead_stages = 0;
        sh.ahead_order = 0;
    }
}

extern "C" __global__ void __launch_bounds__(DECODE_THREADS, 1)
    ffn_decode(const ffn_cuda_lane_t *lane)
{
    extern __shared__ __align__(128) unsigned char memory[];
    decode_shared_t &sh = *(decode_shared_t *)memory;
    decode_role_t role;
    decode_begin(sh, &role);
    if (threadIdx.x < 32)
        call_read(sh, lane);
    __syncthreads();
    if (sh.call.rows)
        layer_run(sh, &role, ptx_policy_stream());
}

static __device__ __forceinline__ uint64_t command_clock()
{
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// The words that end a command, and its record; the thread that arrived last. The answer first: what
// follows is on nobody's way.
static __device__ __forceinline__ void command_end(const decode_call_t &call,
                                                   ffn_cuda_queue_t *queue, uint64_t sequence)
{
    ffn_cuda_record_t record;
    // The queue's word first: who sees the answer may fill that entry again. One release for both: each
    // waits for the rows to arrive.
    if (call.answer) {
        ptx_store_relaxed_system(&queue->answered, sequence);
        ptx_store_release_system(call.answer, call.answer_value);
    } else {
        ptx_store_release_system(&queue->answered, sequence);
    }
    ffn_cuda_counters_t *counters =
        (ffn_cuda_counters_t *)__ldcg((const unsigned long long *)&queue->counters);
    if (counters) {
        ffn_cuda_record_begin(call.about, call.rows, &record);
        record.capacity = FFN_CUDA_DECODE_ROWS;
        record.lane = record.graph_template = FFN_CUDA_NO_LANE;
        record.resident = 1;
        record.end_ns = command_clock();
        record.duration_ns = record.end_ns - call.began_ns;
    }
    if (call.done)
        ptx_store_release_system(call.done, call.done_value);
    if (counters)
        ffn_cuda_record_end(counters, &record);
}

// Waits for the command `sequence`; thread 0. False: leave.
static __device__ bool command_wait(decode_shared_t &sh, ffn_cuda_queue_t *queue, uint64_t sequence,
                                    const ffn_cuda_lane_t **lane_out)
{
    ffn_cuda_command_t *entry = &queue->entries[(sequence - 1) % FFN_CUDA_QUEUE_ENTRIES];
    uint64_t seen;
    for (uint32_t looks = 1;; looks++) {
        seen = ptx_load_acquire_system(&entry->sequence);
        if (seen == sequence || seen == FFN_CUDA_QUEUE_LEFT)
            break;
        if (looks % DECODE_LOOKS == 0 && ptx_load_relaxed_system(&queue->stop))
            ptx_swap_if_system(&entry->sequence, seen, FFN_CUDA_QUEUE_LEFT);
    }
    *lane_out = NULL;
    if (seen == FFN_CUDA_QUEUE_LEFT)
        return false;
    *lane_out = (const ffn_cuda_lane_t *)__ldcg((const unsigned long long *)&entry->lane);
    sh.call.answer = (uint64_t *)__ldcg((const unsigned long long *)&entry->answer);
    sh.call.answer_value = __ldcg((const unsigned long long *)&entry->answer_value);
    sh.call.done = (uint64_t *)__ldcg((const unsigned long long *)&entry->done);
    sh.call.done_value = __ldcg((const unsigned long long *)&entry->done_value);
    sh.call.about =
        (const ffn_cuda_answer_t *)__ldcg((const unsigned long long *)&entry->about);
    sh.call.began_ns = command_clock();
    return *lane_out != NULL;
}

extern "C" __global__ void __launch_bounds__(DECODE_THREADS, 1)
    ffn_decode_resident(ffn_cuda_queue_t *queue, uint32_t look_ahead)
{
    extern __shared__ __align__(128) unsigned char memory[];
    decode_shared_t &sh = *(decode_shared_t *)memory;
    __shared__ const ffn_cuda_lane_t *lane_shared;
    const uint32_t warp = threadIdx.x / 32;
    const uint64_t policy = ptx_policy_stream();
    decode_role_t role;
    decode_begin(sh, &role);
    for (uint64_t sequence = 1;; sequence++) {
        if (threadIdx.x < 32) {
            const ffn_cuda_lane_t *lane = NULL;
            if (threadIdx.x == 0)
                sh.call.leave = !command_wait(sh, queue, sequence, &lane);
            lane = (const ffn_cuda_lane_t *)__shfl_sync(ROUTE_ALL, (unsigned long long)lane, 0);
            if (lane)
                call_read(sh, lane);
            if (threadIdx.x == 0)
                lane_shared = lane;
        }
        __syncthreads();
        if (sh.call.leave)
            break;
        const uint32_t rows = sh.call.rows;
        if (rows)
            layer_run(sh, &role, policy);
        if (warp < DECODE_WARPS) {
            consumers_meet();
            if (threadIdx.x == 0) {
                const uint64_t grid = gridDim.x;
                const uint64_t ended = ptx_add_acq_rel(&sh.call.meeting->ended, 1) + 1;
                if (ended % grid == 0)
                    command_end(sh.call, queue, sequence);
            }
        } else if (warp < DECODE_WARPS + DECODE_COPY_WARPS && rows) {
            if (look_ahead)
                ahead_load(sh, &role, lane_shared, policy);
            else if (threadIdx.x == DECODE_WARPS * 32)
                sh.ahead_stages = 0;
        }
        __syncthreads();
    }
    if (warp < DECODE_WARPS)
        ahead_drop(sh, &role);
}

#else
extern "C" __global__ void ffn_decode(const ffn_cuda_lane_t *lane)
{
    __trap();
}
extern "C" __global__ void ffn_decode_resident(ffn_cuda_queue_t *queue, uint32_t look_ahead)
{
    __trap();
}
#endif
