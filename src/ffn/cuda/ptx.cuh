// SPDX-License-Identifier: MIT
// The instructions that CUDA C++ has no word for, one function each: shared-memory barriers, bulk
// copies, tensor-core products, orders at device and system scope.
#ifndef XPOOL_FFN_CUDA_PTX_CUH
#define XPOOL_FFN_CUDA_PTX_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

static __device__ __forceinline__ uint32_t ptx_shared(const void *pointer)
{
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

// The block's shared memory, whose size the launch gives.
static __device__ __forceinline__ unsigned char *ptx_dynamic_shared()
{
    extern __shared__ __align__(128) unsigned char memory[];
    return memory;
}
static __device__ __forceinline__ uint64_t ptx_clock_ns()
{
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}
// This multiprocessor's number, and how many numbers there are.
static __device__ __forceinline__ void ptx_multiprocessor(uint32_t *number, uint32_t *count)
{
    asm("mov.u32 %0, %%smid;" : "=r"(*number));
    asm("mov.u32 %0, %%nsmid;" : "=r"(*count));
}

// ---- orders on words of global memory ----------------------------------------------------------
static __device__ __forceinline__ uint64_t ptx_load_acquire(const uint64_t *word)
{
    uint64_t value;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}
static __device__ __forceinline__ uint64_t ptx_load_relaxed(const uint64_t *word)
{
    uint64_t value;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}
static __device__ __forceinline__ void ptx_store_relaxed(uint64_t *word, uint64_t value)
{
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
static __device__ __forceinline__ uint64_t ptx_load_acquire_system(const uint64_t *word)
{
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}
static __device__ __forceinline__ uint32_t ptx_load_relaxed_system(const uint32_t *word)
{
    uint32_t value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}
static __device__ __forceinline__ void ptx_store_relaxed_system(uint64_t *word, uint64_t value)
{
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
static __device__ __forceinline__ void ptx_store_release_system(uint64_t *word, uint64_t value)
{
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
// Orders what this thread and, by barriers, its block have read and written, at system scope.
static __device__ __forceinline__ void ptx_fence_system()
{
    asm volatile("fence.acq_rel.sys;" ::: "memory");
}
static __device__ __forceinline__ void ptx_store_release(uint64_t *word, uint64_t value)
{
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
// Acquire and release at device scope; answers the value before.
static __device__ __forceinline__ uint64_t ptx_add_acq_rel(uint64_t *word, uint64_t value)
{
    uint64_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;"
                 : "=l"(before)
                 : "l"(word), "l"(value)
                 : "memory");
    return before;
}
// At device scope, in no order with others.
static __device__ __forceinline__ uint64_t ptx_add_answered(uint64_t *word, uint64_t value)
{
    uint64_t before;
    asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;"
                 : "=l"(before)
                 : "l"(word), "l"(value)
                 : "memory");
    return before;
}
// Release at device scope, without an answer.
static __device__ __forceinline__ void ptx_add_release(uint64_t *word, uint64_t value)
{
    asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
static __device__ __forceinline__ void ptx_add_relaxed(uint32_t *word, uint32_t value)
{
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
static __device__ __forceinline__ void ptx_add_release(uint32_t *word, uint32_t value)
{
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
static __device__ __forceinline__ uint32_t ptx_load_acquire(const uint32_t *word)
{
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}
static __device__ __forceinline__ uint64_t ptx_swap_if_system(uint64_t *word, uint64_t expected,
                                                              uint64_t value)
{
    uint64_t before;
    asm volatile("atom.acq_rel.sys.global.cas.b64 %0, [%1], %2, %3;"
                 : "=l"(before)
                 : "l"(word), "l"(expected), "l"(value)
                 : "memory");
    return before;
}

// Brings it to L2; address and size are multiples of 16 bytes.
static __device__ __forceinline__ void ptx_prefetch(const void *address, uint32_t bytes)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes) : "memory");
#endif
}

// 16 bytes. Unlike those of __ldg() they are read before the barriers that follow.
static __device__ __forceinline__ uint4 ptx_load(const void *address)
{
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address)
                 : "memory");
    return v;
}

static __device__ __forceinline__ uint32_t ptx_load_word(const void *address)
{
    uint32_t v;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
    return v;
}

// ---- loads of data that other blocks or kernels write while this kernel runs: past L1 ------------
static __device__ __forceinline__ uint4 ptx_load_l2(const void *address)
{
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address)
                 : "memory");
    return v;
}

// Zeros where `wanted` is not set.
static __device__ __forceinline__ uint4 ptx_load_l2_if(const void *address, bool wanted)
{
    uint4 v;
    asm volatile("{\n"
                 ".reg .pred wanted;\n"
                 "setp.ne.u32 wanted, %5, 0;\n"
                 "mov.u32 %0, 0;\n"
                 "mov.u32 %1, 0;\n"
                 "mov.u32 %2, 0;\n"
                 "mov.u32 %3, 0;\n"
                 "@wanted ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];\n"
                 "}"
                 : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
                 : "l"(address), "r"((uint32_t)wanted)
                 : "memory");
    return v;
}

// Asks for a line to come into L2.
static __device__ __forceinline__ void ptx_prefetch_line(const void *address)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}

// ---- copies of 16 bytes to shared memory that a thread waits for in groups, since sm_80 ----------
// bytes: 16, or 0 for zeros (nothing is read then).
static __device__ __forceinline__ void ptx_copy_sixteen(uint32_t to, const void *from, uint32_t bytes,
                                                        uint64_t policy)
{
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to),
                 "l"(from), "r"(bytes), "l"(policy)
                 : "memory");
}
// Of what is read again soon.
static __device__ __forceinline__ void ptx_copy_sixteen(uint32_t to, const void *from, uint32_t bytes)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}
// For small constant tables.
static __device__ __forceinline__ void ptx_copy_eight(uint32_t to, const void *from)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}
static __device__ __forceinline__ void ptx_copy_four(uint32_t to, const void *from)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
static __device__ __forceinline__ void ptx_copies_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits for all groups of this thread but the latest PENDING.
template <int PENDING> static __device__ __forceinline__ void ptx_copies_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// ---- tensor-core product of 16 x 16 by 16 x 8, FP32 sums, since sm_80 ----------------------------
template <typename T> static __device__ __forceinline__ void
ptx_mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1);
template <> __device__ __forceinline__ void ptx_mma<__nv_bfloat16>(float (&d)[4], uint32_t a0,
                                                                   uint32_t a1, uint32_t a2,
                                                                   uint32_t a3, uint32_t b0,
                                                                   uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <> __device__ __forceinline__ void ptx_mma<__half>(float (&d)[4], uint32_t a0, uint32_t a1,
                                                            uint32_t a2, uint32_t a3, uint32_t b0,
                                                            uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

template <typename T> static __device__ __forceinline__ float2 ptx_unpack(uint32_t pair);
template <> __device__ __forceinline__ float2 ptx_unpack<__nv_bfloat16>(uint32_t pair)
{
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}
template <> __device__ __forceinline__ float2 ptx_unpack<__half>(uint32_t pair)
{
    __half2 value;
    memcpy(&value, &pair, sizeof(value));
    return __half22float2(value);
}
template <typename T> static __device__ __forceinline__ T ptx_from_float(float value);
template <> __device__ __forceinline__ __nv_bfloat16 ptx_from_float<__nv_bfloat16>(float value)
{
    return __float2bfloat16_rn(value);
}
template <> __device__ __forceinline__ __half ptx_from_float<__half>(float value)
{
    return __float2half_rn(value);
}
template <typename T> static __device__ __forceinline__ uint32_t ptx_pack(float low, float high)
{
    T pair[2] = {ptx_from_float<T>(low), ptx_from_float<T>(high)};
    uint32_t value;
    memcpy(&value, pair, sizeof(value));
    return value;
}

static __device__ __forceinline__ float ptx_activate(uint32_t activation, float gate, float up)
{
    if (activation == 0) // SiLU
        return gate / (1.0f + __expf(-gate)) * up;
    const float inner = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
    return 0.5f * gate * (1.0f + tanhf(inner)) * up;
}

// ---- barriers in shared memory and copies that complete on them, since sm_90 ---------------------
static __device__ __forceinline__ uint64_t ptx_policy_stream()
{
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
static __device__ __forceinline__ void ptx_barrier_init(uint32_t barrier, uint32_t arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
static __device__ __forceinline__ void ptx_barrier_init_fence()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
static __device__ __forceinline__ void ptx_barrier_expect(uint32_t barrier, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}
static __device__ __forceinline__ void ptx_barrier_arrive(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
static __device__ __forceinline__ void ptx_barrier_wait(uint32_t barrier, uint32_t parity)
{
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@done bra ended;\n"
                 "bra again;\n"
                 "ended:\n"
                 "}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}
// Both addresses and the size are multiples of 16 bytes.
static __device__ __forceinline__ void ptx_bulk_load_stream(uint32_t to, const void *from,
                                                            uint32_t bytes, uint32_t barrier,
                                                            uint64_t policy)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1], %2, [%3], %4;" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
                 : "memory");
}
// Of a tensor map of two dimensions: the box that begins at element x of row y, zeros past its ends.
static __device__ __forceinline__ void ptx_map_load(uint32_t to, const void *map, uint32_t x, uint32_t y,
                                                    uint32_t barrier)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4}], [%2];" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(x), "r"(y)
                 : "memory");
}
// Before the first load by a map that an earlier kernel has written.
static __device__ __forceinline__ void ptx_map_acquire(const void *map)
{
    asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}
static __device__ __forceinline__ void ptx_fence_proxy_shared()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
#endif
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Of a map in shared memory: `rows` rows of `along` elements of 16 bits, one after the other.
static __device__ __forceinline__ void ptx_map_replace(uint32_t map, const void *from, uint32_t along,
                                                       uint32_t rows)
{
    asm volatile("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;" ::"r"(map),
                 "l"(from)
                 : "memory");
    asm volatile("tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%0], 0, %1;" ::"r"(map),
                 "r"(along)
                 : "memory");
    asm volatile("tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%0], 1, %1;" ::"r"(map),
                 "r"(rows)
                 : "memory");
    asm volatile("tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%0], 0, %1;" ::"r"(map),
                 "l"((uint64_t)along * 2)
                 : "memory");
}
// A warp: from shared memory to where later kernels load by it.
static __device__ __forceinline__ void ptx_map_publish(void *to, uint32_t map)
{
    asm volatile("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned "
                 "[%0], [%1], 128;" ::"l"(to),
                 "r"(map)
                 : "memory");
}
#endif
#endif
