// SPDX-License-Identifier: MIT
// Products of many rows with the experts that they chose: gate and up with the activation, then down.
//
// The tiles come from ffn_bulk_plan(): 128 rows of one part each, with counts known on the device only.
// A block takes (tile, 256 weight rows) in turn. One warp group fills a ring of swizzled stages; two
// compute, 64 rows each, with the sums of 64 x 256 in registers (wgmma). Weights, and for down the rows
// too, come by tensor maps, which one thread asks for; the rows of gate and up lie anywhere and are
// gathered, 16 bytes a lane. For gate and up the 256 are 128 rows of each, so that the activation needs
// no second pass. A launch does a share of all these, one after the other in the order of the tiles, so
// that shares of one Invocation stream an expert's weights once. Needs sm_90a.
#include "ffn/cuda/tables.h"
#include "ffn/cuda/ptx.cuh"
#include "ffn/cuda/bulk_shape.h"

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

struct grouped_shared_t {
    unsigned char stage[GROUPED_STAGES][GROUPED_STAGE_BYTES];
    uint64_t full[GROUPED_STAGES], empty[GROUPED_STAGES];
    uint4 work[GROUPED_STAGES]; // of the piece that begins with this stage: column, first row, rows, part?
    uint32_t number;            // that thread 0 of the copying group has taken for all of it
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

// bytes: 16, or 0 for zeros. Without a branch, so that a thread's copies follow each other at once.
static __device__ __forceinline__ void copy_sixteen_if(uint32_t to, const void *from, uint32_t bytes,
                                                       bool wanted)
{
    asm volatile("{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %3, 0;\n"
                 "@wanted cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n}" ::"r"(to),
                 "l"(from), "r"(bytes), "r"((uint32_t)wanted)
                 : "memory");
}
// As ptx_activate() but for the last bits: SiLU, or GELU by tanh, which is the same form of another
// argument. Without branches, so that many are under way at once.
static __device__ __forceinline__ float grouped_activate(bool gelu, float gate, float up)
{
    const float curved = gate * fmaf(0.07135481627f, gate * gate, 1.5957691216f);
    const float along = gelu ? curved : gate;
    return __fdividef(gate, 1.0f + __expf(-along)) * up;
}
// Arrives on the barrier once this thread's copies so far are there.
static __device__ __forceinline__ void copies_arrive(uint32_t barrier)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// A piece of work: rows of a tile, and the first weight row.
struct grouped_work_t {
    uint32_t column, first, rows, shared_part; // rows: 0 where there is no more work
    uint32_t part;                             // known to those that copy
};

struct grouped_plan_t {
    const ffn_cuda_tile_t *tiles;
    uint32_t *taken;
    uint32_t taken_before; // by earlier launches of this Invocation, beyond what they did
    uint32_t routed, routed_blocks, last_blocks;
    uint32_t end; // of the pieces of work that this launch does
    uint32_t experts, intermediate, last_width, hidden;
    uint64_t pairs;
};

template <bool DOWN>
static __device__ __forceinline__ grouped_plan_t plan_read(const ffn_cuda_lane_t *lane,
                                                           const ffn_cuda_signature_t &s,
                                                           uint32_t share, uint32_t shares)
{
    grouped_plan_t p;
    p.tiles = lane->workspace.tiles;
    p.taken = lane->workspace.taken + DOWN;
    p.experts = s.experts;
    p.intermediate = s.intermediate;
    p.last_width = s.experts ? s.shared_intermediate : s.intermediate;
    p.hidden = s.hidden;
    p.pairs = s.experts ? (uint64_t)lane->rows * s.top_k : 0;
    p.routed = lane->workspace.tile_count[0];
    const uint32_t per = DOWN ? GROUPED_COLUMNS : GROUPED_COLUMNS / 2;
    p.routed_blocks = ((DOWN ? s.hidden : p.intermediate) + per - 1) / per;
    p.last_blocks = ((DOWN ? s.hidden : p.last_width) + per - 1) / per;
    const uint32_t total = p.routed * p.routed_blocks + lane->workspace.tile_count[1] * p.last_blocks;
    // Whole rounds of the grid, so that only the last share may end with a part of one.
    const uint32_t rounds = (total + gridDim.x - 1) / gridDim.x;
    p.end = min(total, (uint32_t)((uint64_t)rounds * (share + 1) / shares) * gridDim.x);
    p.taken_before = share * gridDim.x;
    return p;
}

// The next piece of work: each block takes one too many in each launch, which ends it.
static __device__ __forceinline__ uint32_t take(const grouped_plan_t &p)
{
    return atomicAdd(p.taken, 1) - p.taken_before;
}

template <bool DOWN>
static __device__ __forceinline__ grouped_work_t work_at(const grouped_plan_t &p, uint32_t number)
{
    const uint32_t routed = p.routed * p.routed_blocks;
    const uint32_t per = DOWN ? GROUPED_COLUMNS : GROUPED_COLUMNS / 2;
    if (number >= p.end)
        return {0, 0, 0, 0, 0};
    const uint32_t shared_part = number >= routed, inside = number - (shared_part ? routed : 0);
    const uint32_t blocks = shared_part ? p.last_blocks : p.routed_blocks, at = inside / blocks;
    const uint4 tile = ptx_load(p.tiles + (shared_part ? p.routed : 0) + at);
    return {(inside - at * blocks) * per, tile.y, tile.z, shared_part, tile.x};
}
static __device__ __forceinline__ uint4 work_words(const grouped_work_t &w)
{
    return make_uint4(w.column, w.first, w.rows, w.shared_part);
}

// The weights of a stage: two boxes of 128 rows, gate's and up's or one after the other of down's.
template <bool DOWN>
static __device__ __forceinline__ void weights_copy(uint32_t stage, uint32_t full,
                                                    const ffn_cuda_map_t *map, uint32_t k,
                                                    uint32_t column)
{
    const uint32_t to = stage + GROUPED_ROWS * GROUPED_DEPTH * 2, half = GROUPED_BOX_BYTES;
    ptx_map_load(to, DOWN ? map + 2 : map, k, column, full);
    ptx_map_load(to + half, DOWN ? map + 2 : map + 1, k, DOWN ? column + 128 : column, full);
}

// One thread. The rows are contiguous: they come like the weights.
static __device__ __forceinline__ void down_copy(grouped_shared_t &sh, const ffn_cuda_lane_t *lane,
                                                 const grouped_plan_t &p)
{
    const ffn_cuda_map_t *const maps = lane->workspace.maps;
    const uint32_t ring = ptx_shared(sh.stage[0]), full = ptx_shared(sh.full);
    const uint32_t empty = ptx_shared(sh.empty);
    uint32_t stage = 0, parity = 0;
    grouped_work_t next = work_at<true>(p, take(p));
    while (next.rows) {
        const grouped_work_t w = next;
        const uint32_t depth = w.shared_part ? p.last_width : p.intermediate;
        const ffn_cuda_map_t *map = maps + w.part * 3;
        const ffn_cuda_map_t *rows = maps + (p.experts + 1) * 3 + w.shared_part;
        // The next piece is taken, and its tile read, while this one is copied.
        const uint32_t number = take(p), ahead = depth > 2 * GROUPED_DEPTH ? 2 * GROUPED_DEPTH : 0;
        ptx_map_acquire(map + 2);
        ptx_map_acquire(rows);
        for (uint32_t k = 0; k < depth; k += GROUPED_DEPTH) {
            const uint32_t to = ring + stage * GROUPED_STAGE_BYTES;
            ptx_barrier_wait(empty + stage * 8, parity ^ 1);
            if (k == 0)
                sh.work[stage] = work_words(w);
            ptx_barrier_expect(full + stage * 8, GROUPED_STAGE_BYTES);
            ptx_map_load(to, rows, k, w.first, full + stage * 8);
            weights_copy<true>(to, full + stage * 8, map, k, w.column);
            if (k == ahead)
                next = work_at<true>(p, number);
            if (++stage == GROUPED_STAGES) {
                stage = 0;
                parity ^= 1;
            }
        }
    }
    ptx_barrier_wait(empty + stage * 8, parity ^ 1);
    sh.work[stage] = work_words(next);
    ptx_barrier_arrive(full + stage * 8);
}

// Where this thread's piece of each of its rows begins, in units of 16 bytes from the input. Row ids are
// read by one call and used by a later one.
#define GATE_ROWS (GROUPED_ROWS / 16)
#define GATE_NONE 0xffffffffu
static __device__ __forceinline__ void row_ids_read(const uint32_t *row_ids, const grouped_work_t &w,
                                                    uint32_t (&ids)[GATE_ROWS])
{
#pragma unroll
    for (uint32_t i = 0; i < GATE_ROWS; i++) {
        const uint32_t row = i * 16 + threadIdx.x % 128 / 8, at = w.first + row;
        ids[i] = GATE_NONE;
        if (row < w.rows)
            ids[i] = w.shared_part ? at : ptx_load_word(row_ids + at);
    }
}

static __device__ __forceinline__ void copiers_meet()
{
    asm volatile("bar.sync 1, 128;" ::: "memory");
}

// A warp group: all gather rows, the first thread takes work and asks for weights.
static __device__ __forceinline__ void gate_copy(grouped_shared_t &sh, const ffn_cuda_lane_t *lane,
                                                 const grouped_plan_t &p)
{
    const uint32_t thread = threadIdx.x % 128, piece = thread % 8, row0 = thread / 8;
    // Read once: after each copy the compiler would read the Lane again.
    const char *const input = (const char *)lane->input;
    const uint32_t *const row_ids = lane->workspace.row_ids;
    const ffn_cuda_map_t *const maps = lane->workspace.maps;
    const uint32_t ring = ptx_shared(sh.stage[0]), full = ptx_shared(sh.full);
    const uint32_t empty = ptx_shared(sh.empty);
    // Rows of a thread are 16 apart, so that its place in the swizzle is the same in all of them.
    const uint32_t place = row0 * 128 + (piece ^ row0 % 8) * 16;
    // The next piece is taken, its tile read, and its row ids, while this one is copied.
    const uint32_t last = (p.hidden - 1) / GROUPED_DEPTH * GROUPED_DEPTH;
    const uint32_t told = min(3 * GROUPED_DEPTH, last), seen = min(5 * GROUPED_DEPTH, last);
    uint32_t stage = 0, parity = 0, ids[GATE_ROWS];
    if (thread == 0)
        sh.number = take(p);
    copiers_meet();
    grouped_work_t next = work_at<false>(p, sh.number);
    row_ids_read(row_ids, next, ids);
    while (next.rows) {
        const grouped_work_t w = next;
        const ffn_cuda_map_t *map = maps + w.part * 3;
        uint32_t rows[GATE_ROWS], number = 0;
#pragma unroll
        for (uint32_t i = 0; i < GATE_ROWS; i++)
            rows[i] = ids[i] == GATE_NONE ? GATE_NONE : ids[i] * (p.hidden / 8) + piece;
        if (thread == 0) {
            number = take(p);
            ptx_map_acquire(map);
            ptx_map_acquire(map + 1);
        }
        for (uint32_t k = 0; k < p.hidden; k += GROUPED_DEPTH) {
            const uint32_t bytes = k + piece * 8 < p.hidden ? 16 : 0; // past the end: zeros
            const char *from = input + (bytes ? (uint64_t)k * 2 : 0);
            const uint32_t to = ring + stage * GROUPED_STAGE_BYTES;
            ptx_barrier_wait(empty + stage * 8, parity ^ 1);
            if (thread == 0) {
                if (k == 0)
                    sh.work[stage] = work_words(w);
                ptx_barrier_expect(full + stage * 8, 2 * GROUPED_BOX_BYTES);
                weights_copy<false>(to, full + stage * 8, map, k, w.column);
            }
#pragma unroll
            for (uint32_t i = 0; i < GATE_ROWS; i++)
                copy_sixteen_if(to + place + i * 2048, from + (uint64_t)rows[i] * 16, bytes,
                                rows[i] != GATE_NONE);
            copies_arrive(full + stage * 8);
            if (k == told) {
                copiers_meet(); // all have read the number before
                if (thread == 0)
                    sh.number = number;
                copiers_meet();
                next = work_at<false>(p, sh.number);
            }
            if (k == seen)
                row_ids_read(row_ids, next, ids);
            if (++stage == GROUPED_STAGES) {
                stage = 0;
                parity ^= 1;
            }
        }
    }
    ptx_barrier_wait(empty + stage * 8, parity ^ 1);
    if (thread == 0) {
        sh.work[stage] = work_words(next);
        ptx_barrier_arrive(full + stage * 8);
    }
    copies_arrive(full + stage * 8);
    // The block may not end with copies under way.
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// Of four lanes with four values each: lane t gets the t-th value of all four.
static __device__ __forceinline__ uint4 transpose_four(const uint32_t (&v)[4], uint32_t t)
{
    const bool odd = t & 1, high = t & 2;
    const uint32_t a = __shfl_xor_sync(0xffffffffu, odd ? v[0] : v[1], 1);
    const uint32_t b = __shfl_xor_sync(0xffffffffu, odd ? v[2] : v[3], 1);
    const uint2 low = odd ? make_uint2(a, v[1]) : make_uint2(v[0], a);
    const uint2 top = odd ? make_uint2(b, v[3]) : make_uint2(v[2], b);
    const uint32_t c = __shfl_xor_sync(0xffffffffu, high ? low.x : top.x, 2);
    const uint32_t e = __shfl_xor_sync(0xffffffffu, high ? low.y : top.y, 2);
    return high ? make_uint4(c, e, top.x, top.y) : make_uint4(low.x, low.y, c, e);
}

// Four lanes hold a row's 8 columns of each eight; they exchange, so that each stores 16 bytes and all four
// 64 contiguous ones.
template <typename T, bool DOWN>
static __device__ __forceinline__ void grouped_store(const ffn_cuda_lane_t *lane,
                                                     const grouped_plan_t &p,
                                                     const grouped_work_t &w, uint32_t activation,
                                                     const float (&d)[128], uint32_t row0,
                                                     uint32_t t)
{
#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
        const uint32_t row = row0 + half * 8;
        const uint64_t at = w.first + row;
        const bool live = row < w.rows;
        const uint32_t width = w.shared_part ? p.last_width : p.intermediate;
        if (DOWN) {
            const bool odd = t & 1;
            const uint32_t column = w.column + (odd ? 8 + (t - 1) * 2 : t * 2);
            float *out = lane->workspace.products +
                         ((w.shared_part ? p.pairs : 0) + at) * p.hidden + column;
#pragma unroll
            for (uint32_t j = 0; j < 32; j += 2) {
                const float *x = d + j * 4 + half * 2, *y = x + 4;
                const float a = __shfl_xor_sync(0xffffffffu, odd ? x[0] : y[0], 1);
                const float b = __shfl_xor_sync(0xffffffffu, odd ? x[1] : y[1], 1);
                if (live && column + j * 8 < p.hidden)
                    *(float4 *)(out + j * 8) =
                        odd ? make_float4(a, b, y[0], y[1]) : make_float4(x[0], x[1], a, b);
            }
        } else {
            T *out = (T *)lane->workspace.activations +
                     (w.shared_part ? p.pairs * p.intermediate : 0) + at * width + w.column +
                     t * 8;
#pragma unroll
            for (uint32_t j = 0; j < 16; j += 4) {
                uint32_t v[4];
#pragma unroll
                for (uint32_t i = 0; i < 4; i++) {
                    const float *gate = d + (j + i) * 4 + half * 2, *up = gate + 64;
                    v[i] = ptx_pack<T>(grouped_activate(activation != 0, gate[0], up[0]),
                                       grouped_activate(activation != 0, gate[1], up[1]));
                }
                const uint4 all = transpose_four(v, t);
                if (live && w.column + (j + t) * 8 < width)
                    *(uint4 *)(out + j * 8) = all;
            }
        }
    }
}

template <typename T, bool DOWN>
static __device__ __forceinline__ void grouped_compute(grouped_shared_t &sh,
                                                       const ffn_cuda_lane_t *lane,
                                                       const grouped_plan_t &p, uint32_t activation)
{
    const uint32_t group = threadIdx.x / 128 - 1, thread = threadIdx.x % 128;
    const uint32_t warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
    uint32_t stage = 0, parity = 0;
    for (;;) {
        ptx_barrier_wait(ptx_shared(&sh.full[stage]), parity);
        const uint4 words = sh.work[stage];
        const grouped_work_t w = {words.x, words.y, words.z, words.w, 0};
        if (w.rows == 0)
            return;
        const uint32_t depth = !DOWN ? p.hidden : (w.shared_part ? p.last_width : p.intermediate);
        const bool live = group * 64 < w.rows;
        float d[128];
        uint32_t add = 0, before = GROUPED_STAGES;
        for (uint32_t k = 0; k < depth; k += GROUPED_DEPTH) {
            ptx_barrier_wait(ptx_shared(&sh.full[stage]), parity);
            if (live) {
                // Gathered rows were ordinary writes; the tensor cores read through another proxy.
                if (!DOWN)
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
            __syncwarp();
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
        if (live)
            grouped_store<T, DOWN>(lane, p, w, activation, d, group * 64 + warp * 16 + g, t);
    }
}

template <typename T, bool DOWN>
static __device__ __forceinline__ void grouped(const ffn_cuda_lane_t *lane, uint32_t share,
                                               uint32_t shares)
{
    static_assert(sizeof(grouped_shared_t) + 1024 <= GROUPED_SHARED_BYTES, "shared memory");
    extern __shared__ unsigned char memory[];
    grouped_shared_t &sh =
        *(grouped_shared_t *)(((uintptr_t)memory + 1023) & ~(uintptr_t)1023);
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < GROUPED_STAGES; i++) {
            ptx_barrier_init(ptx_shared(&sh.full[i]), DOWN ? 1 : 129);
            ptx_barrier_init(ptx_shared(&sh.empty[i]), 8);
        }
        ptx_barrier_init_fence();
    }
    __syncthreads();
    const ffn_cuda_layer_t *layer = lane->layers + lane->layer;
    if (!DOWN && blockIdx.x == 0) // for the next Invocation; planned is planned
        for (uint32_t e = threadIdx.x; e < layer->signature->experts; e += GROUPED_THREADS)
            lane->workspace.counts[e] = 0;
    const grouped_plan_t p = plan_read<DOWN>(lane, *layer->signature, share, shares);
    if (threadIdx.x < 128) {
        if (!DOWN)
            gate_copy(sh, lane, p);
        else if (threadIdx.x == 0)
            down_copy(sh, lane, p);
    } else {
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
