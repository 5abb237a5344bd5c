// SPDX-License-Identifier: MIT
// Candidate: the phases for up to 16 rows in little code.
//
// Included by decode.cu. What phase_run() does, in the same order of sums, so with the same bits; but a
// tile's products are one case of a switch, and the copy of the next slot is there once, not once a tile.
// The loop fits the instruction cache, and a pass may have DECODE_PASS_TILES tiles, so the input rows
// are read that much less often: of 16 rows they are a third of what comes from L2 otherwise.
#ifndef XPOOL_FFN_CUDA_DECODE_LEAN_CUH
#define XPOOL_FFN_CUDA_DECODE_LEAN_CUH

// One slot's products.
template <typename T, int NB>
static __device__ __forceinline__ void lean_multiply(const unsigned char *from, uint32_t odd,
                                                     uint32_t size,
                                                     const uint4 (&x)[NB][DECODE_STEPS],
                                                     float (&sum)[NB][4])
{
#pragma unroll
    for (uint32_t s = 0; s < DECODE_STEPS; s++) {
        if (s * 64 >= size)
            break;
        const unsigned char *a = from + (s * 64 ^ odd);
        const uint4 low = *(const uint4 *)a;
        const uint4 high = *(const uint4 *)(a + 8 * DECODE_BYTES);
#pragma unroll
        for (int n = 0; n < NB; n++) {
            ptx_mma<T>(sum[n], low.x, high.x, low.y, high.y, x[n][s].x, x[n][s].y);
            ptx_mma<T>(sum[n], low.z, high.z, low.w, high.w, x[n][s].z, x[n][s].w);
        }
    }
}

template <typename T, int NB>
static __device__ __forceinline__ void
lean_run(decode_shared_t &shared, bool is_down, const decode_phase_t &gate,
         const decode_phase_t &down, decode_cursor_t *c, uint32_t *slot, uint32_t *buffer,
         uint64_t policy)
{
    constexpr uint32_t TILES = DECODE_PASS_TILES;
    static_assert(TILES <= 10, "lean_run() has 10 cases");
    const decode_state_t &sh = shared.state;
    const decode_phase_t &p = is_down ? down : gate; // in shared memory
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4;
    const unsigned char *const mine = shared.ring[warp][0] + row * DECODE_BYTES + lane % 4 * 16;
    const uint32_t odd = row % 2 * 64;
    decode_place_t place;
    uint4 held[NB][DECODE_STEPS];
    place.unit = warp;
    place.pass = place.part = 0;
    place.ended = p.passes == 0;
    place.bytes = part_bytes(sh.layers[sh.now], part_kind(sh, is_down, 0));
    place.size = sh.layers[sh.now].unit[part_kind(sh, is_down, 0)];
    place_mask(sh, is_down, p, &place);
    place_settle(sh, is_down, p, &place);
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
            uint4 later[NB][DECODE_STEPS];
            place.unit += DECODE_WARPS;
            place_settle(sh, is_down, p, &place);
            place_load<NB>(sh, is_down, place, later);
#pragma unroll 1
            for (uint32_t t = 0; t < live; t++) {
                ptx_copies_wait<DECODE_DEPTH - 1>();
                __syncwarp();
                const unsigned char *const from = mine + *slot * DECODE_SLOT_BYTES;
                switch (t) {
#define LEAN_CASE(N)                                                                               \
    case N:                                                                                        \
        if constexpr (N < TILES)                                                                   \
            lean_multiply<T, NB>(from, odd, size, held, sum[N < TILES ? N : 0]);                   \
        break;
                    LEAN_CASE(0)
                    LEAN_CASE(1)
                    LEAN_CASE(2)
                    LEAN_CASE(3)
                    LEAN_CASE(4)
                    LEAN_CASE(5)
                    LEAN_CASE(6)
                    LEAN_CASE(7)
                    LEAN_CASE(8)
                    LEAN_CASE(9)
#undef LEAN_CASE
                }
                __syncwarp();
                *slot = *slot + 1 == DECODE_DEPTH ? 0 : *slot + 1;
                slot_copy(shared, gate, down, c, policy);
            }
#pragma unroll
            for (int n = 0; n < NB; n++)
#pragma unroll
                for (uint32_t s = 0; s < DECODE_STEPS; s++)
                    held[n][s] = later[n][s];
        }
        // As in phase_run(), but as many tiles at a time as a buffer holds.
        const uint32_t wanted = is_down || NB == 1 ? 0xffffffff : pass_mask(sh, p, pass);
#pragma unroll
        for (int n = 0; n < NB; n++) {
            if (NB > 1 && (wanted >> n * 8 & 0xff) == 0)
                continue; // nobody's
#pragma unroll
            for (uint32_t first = 0; first < TILES; first += DECODE_TILES) {
                float(*sums)[DECODE_TILES * 4][32] = shared.sums[*buffer];
                if (first >= live)
                    break;
#pragma unroll
                for (uint32_t t = 0; t < DECODE_TILES; t++)
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        if (first + t < TILES)
                            sums[warp][t * 4 + i][lane] = sum[first + t < TILES ? first + t : 0][n][i];
                __syncthreads();
                pass_store<T>(sh, sums, p, is_down, tile + first, min(live - first, DECODE_TILES),
                              n * 8);
                *buffer ^= 1;
            }
        }
    }
}
#endif
