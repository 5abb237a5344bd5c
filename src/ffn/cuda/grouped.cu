// SPDX-License-Identifier: MIT
// Products of many rows with the experts that they chose: gate and up with the activation, then down.
//
// The tiles come from ffn_bulk_plan(): 128 rows of one part each, with counts known on the device only.
// A block takes (tile, 256 weight rows) in turn. One warp group copies rows and weights into a ring of
// swizzled stages; two compute, 64 rows each, with the sums of 64 x 256 in registers (wgmma). For gate
// and up the 256 are 128 rows of each, so that the activation needs no second pass. A launch does a share
// of all these, one after the other in the order of the tiles, so that shares of one Invocation stream an
// expert's weights once. Needs sm_90a.
#include "ffn/cuda/tables.h"
#include "ffn/cuda/ptx.cuh"
#include "ffn/cuda/bulk_shape.h"

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

struct grouped_shared_t {
    unsigned char stage[GROUPED_STAGES][GROUPED_STAGE_BYTES];
    uint64_t full[GROUPED_STAGES], empty[GROUPED_STAGES];
};

// d (64 x 256, FP32) = a (64 x 16) times b (256 x 16) transposed, plus d where `add` is not 0.
template <typename T>
static __device__ __forceinline__ void product(float (&d)[128], uint64_t a, uint64_t b,
                                               uint32_t add);
template <>
__device__ __forceinline__ void product<__nv_bfloat16>(float (&d)[128], uint64_t a, uint64_t b, uint32_t add)
{
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %130, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
                 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
                 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
                 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
                 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
                 "%128, %129, adds, 1, 1, 0, 0;\n}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
                   "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
                   "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
                   "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                   "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
                   "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
                   "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
                   "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
                   "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]),
                   "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]),
                   "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), "+f"(d[64]), "+f"(d[65]),
                   "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]),
                   "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]),
                   "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]),
                   "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]),
                   "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]),
                   "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]),
                   "+f"(d[102]), "+f"(d[103]), "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]),
                   "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), "+f"(d[112]), "+f"(d[113]),
                   "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]),
                   "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]),
                   "+f"(d[126]), "+f"(d[127])
                 : "l"(a), "l"(b), "r"(add));
}
template <>
__device__ __forceinline__ void product<__half>(float (&d)[128], uint64_t a, uint64_t b, uint32_t add)
{
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %130, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
                 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
                 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
                 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
                 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
                 "%128, %129, adds, 1, 1, 0, 0;\n}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
                   "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
                   "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
                   "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                   "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
                   "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
                   "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
                   "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
                   "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]),
                   "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]),
                   "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), "+f"(d[64]), "+f"(d[65]),
                   "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]),
                   "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]),
                   "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]),
                   "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]),
                   "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]),
                   "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]),
                   "+f"(d[102]), "+f"(d[103]), "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]),
                   "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), "+f"(d[112]), "+f"(d[113]),
                   "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]),
                   "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]),
                   "+f"(d[126]), "+f"(d[127])
                 : "l"(a), "l"(b), "r"(add));
}

static __device__ __forceinline__ void products_begin()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
static __device__ __forceinline__ void products_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int PENDING> static __device__ __forceinline__ void products_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// A matrix of rows of 128 bytes, swizzled by 128: eight rows are 1024 bytes apart from the next.
static __device__ __forceinline__ uint64_t matrix_at(uint32_t shared)
{
    return (uint64_t)((shared & 0x3ffff) >> 4) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 |
           (uint64_t)1 << 62;
}

static __device__ __forceinline__ void copy_sixteen(uint32_t to, const void *from, uint32_t bytes)
{
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(bytes)
                 : "memory");
}
// Arrives on the barrier once this thread's copies so far are there.
static __device__ __forceinline__ void copies_arrive(uint32_t barrier)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// One piece of work: a tile and the first weight row.
struct grouped_work_t {
    ffn_cuda_tile_t tile;
    uint32_t column, width, depth;
    bool shared_part;
};

struct grouped_plan_t {
    const ffn_cuda_tile_t *tiles;
    uint32_t routed, routed_blocks, last_blocks;
    uint32_t begin, end; // of the pieces of work that this launch does
    uint32_t intermediate, last_width, hidden;
    uint64_t pairs;
};

template <bool DOWN>
static __device__ __forceinline__ grouped_plan_t plan_read(const ffn_cuda_lane_t *lane,
                                                           const ffn_cuda_signature_t &s,
                                                           uint32_t share, uint32_t shares)
{
    grouped_plan_t p;
    p.tiles = lane->workspace.tiles;
    p.intermediate = s.intermediate;
    p.last_width = s.experts ? s.shared_intermediate : s.intermediate;
    p.hidden = s.hidden;
    p.pairs = s.experts ? (uint64_t)lane->rows * s.top_k : 0;
    p.routed = lane->workspace.tile_count[0];
    const uint32_t per = DOWN ? GROUPED_COLUMNS : GROUPED_COLUMNS / 2;
    p.routed_blocks = ((DOWN ? s.hidden : p.intermediate) + per - 1) / per;
    p.last_blocks = ((DOWN ? s.hidden : p.last_width) + per - 1) / per;
    const uint64_t total = p.routed * p.routed_blocks + lane->workspace.tile_count[1] * p.last_blocks;
    p.begin = (uint32_t)(total * share / shares);
    p.end = (uint32_t)(total * (share + 1) / shares);
    return p;
}

template <bool DOWN>
static __device__ __forceinline__ grouped_work_t work_at(const grouped_plan_t &p, uint32_t number)
{
    grouped_work_t w;
    const uint32_t per = DOWN ? GROUPED_COLUMNS : GROUPED_COLUMNS / 2;
    w.shared_part = number >= p.routed * p.routed_blocks;
    const uint32_t inside = w.shared_part ? number - p.routed * p.routed_blocks : number;
    const uint32_t blocks = w.shared_part ? p.last_blocks : p.routed_blocks;
    w.tile = p.tiles[(w.shared_part ? p.routed : 0) + inside / blocks];
    w.column = inside % blocks * per;
    w.width = w.shared_part ? p.last_width : p.intermediate;
    w.depth = DOWN ? w.width : p.hidden;
    return w;
}

template <bool DOWN>
static __device__ __forceinline__ void grouped_copy(grouped_shared_t &sh,
                                                    const ffn_cuda_lane_t *lane,
                                                    const grouped_plan_t &p,
                                                    const ffn_cuda_part_t *parts)
{
    const uint32_t thread = threadIdx.x % 128, piece = thread % 8, row0 = thread / 8;
    // Read once: after each copy the compiler would read the Lane again.
    const char *const input = (const char *)lane->input;
    const char *const activations = (const char *)lane->workspace.activations;
    const uint32_t *const row_ids = lane->workspace.row_ids;
    const uint32_t ring = ptx_shared(sh.stage[0]), full = ptx_shared(sh.full);
    const uint32_t empty = ptx_shared(sh.empty);
    // Rows of a thread are 16 apart, so that its place in the swizzle is the same in all of them.
    const uint32_t place = row0 * 128 + (piece ^ row0 % 8) * 16;
    uint32_t stage = 0, parity = 0;
    for (uint32_t number = p.begin + blockIdx.x; number < p.end; number += gridDim.x) {
        const grouped_work_t w = work_at<DOWN>(p, number);
        const ffn_cuda_part_t part = parts[w.tile.part];
        const uint64_t pitch = (uint64_t)w.depth * 2;
        const char *rows[GROUPED_ROWS / 16]; // where this thread's piece of each of its rows begins
#pragma unroll
        for (uint32_t i = 0; i < GROUPED_ROWS / 16; i++) {
            const uint32_t row = i * 16 + row0, at = w.tile.first + row;
            rows[i] = NULL;
            if (row >= w.tile.rows)
                continue;
            if (DOWN)
                rows[i] = activations + (w.shared_part ? p.pairs * p.intermediate * 2 : 0) + at * pitch;
            else
                rows[i] = input + (w.shared_part ? at : row_ids[at]) * pitch;
            rows[i] += piece * 16;
        }
        const uint32_t rest = (DOWN ? p.hidden : w.width) - w.column; // weight rows from there on
        const uint64_t skip = (w.column + row0) * pitch + piece * 16;
        const char *first = (const char *)(DOWN ? part.down : part.gate) + skip;
        const char *second = DOWN ? first + 128 * pitch : (const char *)part.up + skip;
        const uint32_t first_rows = min(rest, 128u);
        const uint32_t second_rows = DOWN ? min(rest - first_rows, 128u) : first_rows;
        // How many of this thread's eight rows of each half exist.
        const uint32_t first_count = first_rows > row0 ? (first_rows - row0 + 15) / 16 : 0;
        const uint32_t second_count = second_rows > row0 ? (second_rows - row0 + 15) / 16 : 0;
        for (uint32_t k = 0; k < w.depth; k += GROUPED_DEPTH) {
            const uint32_t bytes = k + piece * 8 < w.depth ? 16 : 0; // past the end: zeros
            const uint64_t along = bytes ? (uint64_t)k * 2 : 0;
            const uint32_t to = ring + stage * GROUPED_STAGE_BYTES + place;
            ptx_barrier_wait(empty + stage * 8, parity ^ 1);
            const char *from = first + along;
#pragma unroll
            for (uint32_t i = 0; i < 8; i++, from += 16 * pitch)
                if (i < first_count)
                    copy_sixteen(to + (i + 8) * 2048, bytes ? from : input, bytes);
            from = second + along;
#pragma unroll
            for (uint32_t i = 0; i < 8; i++, from += 16 * pitch)
                if (i < second_count)
                    copy_sixteen(to + (i + 16) * 2048, bytes ? from : input, bytes);
#pragma unroll
            for (uint32_t i = 0; i < GROUPED_ROWS / 16; i++)
                if (rows[i])
                    copy_sixteen(to + i * 2048, bytes ? rows[i] + along : input, bytes);
            copies_arrive(full + stage * 8);
            if (++stage == GROUPED_STAGES) {
                stage = 0;
                parity ^= 1;
            }
        }
    }
    // The block may not end with copies under way.
    asm volatile("cp.async.wait_all;" ::: "memory");
}

template <typename T, bool DOWN>
static __device__ __forceinline__ void grouped_compute(grouped_shared_t &sh,
                                                       const ffn_cuda_lane_t *lane,
                                                       const grouped_plan_t &p, uint32_t activation)
{
    const uint32_t group = threadIdx.x / 128 - 1, thread = threadIdx.x % 128;
    const uint32_t warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
    uint32_t stage = 0, parity = 0;
    for (uint32_t number = p.begin + blockIdx.x; number < p.end; number += gridDim.x) {
        const grouped_work_t w = work_at<DOWN>(p, number);
        const bool live = group * 64 < w.tile.rows;
        float d[128];
        uint32_t add = 0, before = GROUPED_STAGES;
        for (uint32_t k = 0; k < w.depth; k += GROUPED_DEPTH) {
            ptx_barrier_wait(ptx_shared(&sh.full[stage]), parity);
            if (live) {
                // The copies were ordinary writes; the tensor cores read through another proxy.
                ptx_fence_proxy_shared();
                const uint32_t base = ptx_shared(sh.stage[stage]);
                const uint64_t a = matrix_at(base + group * 8192);
                const uint64_t b = matrix_at(base + GROUPED_ROWS * 128);
                products_begin();
#pragma unroll
                for (uint32_t i = 0; i < GROUPED_DEPTH / 16; i++) {
                    product<T>(d, a + i * 2, b + i * 2, add);
                    add = 1;
                }
                products_commit();
                products_wait<1>();
            }
            // This warp's products of the stage before are done with it; the other warps of the group
            // may be behind, so each gives the stage back for itself.
            if (thread % 32 == 0 && before < GROUPED_STAGES)
                ptx_barrier_arrive(ptx_shared(&sh.empty[before]));
            before = stage;
            if (++stage == GROUPED_STAGES) {
                stage = 0;
                parity ^= 1;
            }
        }
        products_wait<0>();
        if (thread % 32 == 0)
            ptx_barrier_arrive(ptx_shared(&sh.empty[before]));
        if (!live)
            continue;
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            const uint32_t row = group * 64 + warp * 16 + g + half * 8;
            if (row >= w.tile.rows)
                continue;
            const uint64_t at = w.tile.first + row;
            if (DOWN) {
                const uint64_t to =
                    ((w.shared_part ? p.pairs : 0) + at) * p.hidden + w.column + t * 2;
                float *out = lane->workspace.products + to;
#pragma unroll
                for (uint32_t j = 0; j < 32; j++)
                    if (w.column + j * 8 < p.hidden)
                        *(float2 *)(out + j * 8) =
                            make_float2(d[j * 4 + half * 2], d[j * 4 + half * 2 + 1]);
            } else {
                T *out = (T *)lane->workspace.activations +
                         (w.shared_part ? p.pairs * p.intermediate : 0) + at * w.width + w.column +
                         t * 2;
#pragma unroll
                for (uint32_t j = 0; j < 16; j++)
                    if (w.column + j * 8 < w.width)
                        *(uint32_t *)(out + j * 8) = ptx_pack<T>(
                            ptx_activate(activation, d[j * 4 + half * 2], d[64 + j * 4 + half * 2]),
                            ptx_activate(activation, d[j * 4 + half * 2 + 1],
                                         d[64 + j * 4 + half * 2 + 1]));
            }
        }
    }
}

template <typename T, bool DOWN>
static __device__ __forceinline__ void grouped(const ffn_cuda_lane_t *lane, uint32_t share,
                                               uint32_t shares)
{
    extern __shared__ unsigned char memory[];
    grouped_shared_t &sh =
        *(grouped_shared_t *)(((uintptr_t)memory + 1023) & ~(uintptr_t)1023);
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < GROUPED_STAGES; i++) {
            ptx_barrier_init(ptx_shared(&sh.full[i]), 128);
            ptx_barrier_init(ptx_shared(&sh.empty[i]), 8);
        }
        ptx_barrier_init_fence();
    }
    __syncthreads();
    const ffn_cuda_layer_t *layer = lane->layers + lane->layer;
    const grouped_plan_t p = plan_read<DOWN>(lane, *layer->signature, share, shares);
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        grouped_copy<DOWN>(sh, lane, p, layer->parts);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        grouped_compute<T, DOWN>(sh, lane, p, layer->signature->activation);
    }
}
#else
template <typename T, bool DOWN>
static __device__ __forceinline__ void grouped(const ffn_cuda_lane_t *, uint32_t, uint32_t)
{
    __trap();
}
#endif

extern "C" __global__ void __launch_bounds__(GROUPED_THREADS, 1)
    ffn_grouped_gate_bf16(const ffn_cuda_lane_t *lane, uint32_t share, uint32_t shares)
{
    grouped<__nv_bfloat16, false>(lane, share, shares);
}
extern "C" __global__ void __launch_bounds__(GROUPED_THREADS, 1)
    ffn_grouped_down_bf16(const ffn_cuda_lane_t *lane, uint32_t share, uint32_t shares)
{
    grouped<__nv_bfloat16, true>(lane, share, shares);
}
extern "C" __global__ void __launch_bounds__(GROUPED_THREADS, 1)
    ffn_grouped_gate_f16(const ffn_cuda_lane_t *lane, uint32_t share, uint32_t shares)
{
    grouped<__half, false>(lane, share, shares);
}
extern "C" __global__ void __launch_bounds__(GROUPED_THREADS, 1)
    ffn_grouped_down_f16(const ffn_cuda_lane_t *lane, uint32_t share, uint32_t shares)
{
    grouped<__half, true>(lane, share, shares);
}
