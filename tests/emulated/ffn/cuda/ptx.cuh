// SPDX-License-Identifier: MIT
// src/ffn/cuda/ptx.cuh for emulated.h: the same functions, as far as what is emulated uses them.
#ifndef XPOOL_FFN_CUDA_PTX_CUH
#define XPOOL_FFN_CUDA_PTX_CUH

#include "emulated.h"

struct __nv_bfloat16 {
    uint16_t bits;
};
struct __half {
    _Float16 value;
};

static inline unsigned char *ptx_dynamic_shared()
{
    return emulated.fibers[emulated.now].shared;
}
static inline uint32_t ptx_shared(const void *pointer)
{
    return (uint32_t)((const unsigned char *)pointer - ptx_dynamic_shared());
}
static inline uint64_t ptx_clock_ns()
{
    return 1;
}
static inline void ptx_multiprocessor(uint32_t *number, uint32_t *count)
{
    *number = blockIdx.x;
    *count = gridDim.x;
}

// ---- words ---------------------------------------------------------------------------------------
static inline uint64_t emulated_load(const uint64_t *word)
{
    emulated_look(word, 8);
    emulated_yield(true);
    return *word;
}
static inline void emulated_store(uint64_t *word, uint64_t value)
{
    emulated_look(word, 8);
    *word = value;
    emulated_yield(false);
}
static inline uint64_t emulated_add(uint64_t *word, uint64_t value)
{
    emulated_look(word, 8);
    const uint64_t before = *word;
    *word += value;
    emulated_yield(false);
    return before;
}
#define ptx_load_relaxed         emulated_load
#define ptx_load_acquire_system  emulated_load
#define ptx_store_relaxed        emulated_store
#define ptx_store_release        emulated_store
#define ptx_store_relaxed_system emulated_store
#define ptx_store_release_system emulated_store
#define ptx_add_acq_rel          emulated_add
#define ptx_add_answered         emulated_add
static inline void ptx_fence_system()
{
    __threadfence_system();
}
static inline uint64_t ptx_load_acquire(const uint64_t *word)
{
    return emulated_load(word);
}
static inline uint32_t ptx_load_relaxed_system(const uint32_t *word)
{
    emulated_look(word, 4);
    emulated_yield(true);
    return *word;
}
static inline void ptx_add_release(uint64_t *word, uint64_t value)
{
    emulated_add(word, value);
}
static inline void ptx_add_release(uint32_t *word, uint32_t value)
{
    emulated_look(word, 4);
    *word += value;
    emulated_yield(false);
}
static inline uint32_t ptx_load_acquire(const uint32_t *word)
{
    emulated_look(word, 4);
    emulated_yield(true);
    return *word;
}
static inline void ptx_prefetch(const void *address, uint32_t bytes)
{
    EMULATED_CHECK((uintptr_t)address % 16 == 0 && bytes % 16 == 0, "a prefetch that is not aligned");
    emulated_look(address, bytes);
}
static inline void ptx_add_relaxed(uint32_t *word, uint32_t value)
{
    emulated_look(word, 4);
    *word += value;
}
static inline uint64_t ptx_swap_if_system(uint64_t *word, uint64_t expected, uint64_t value)
{
    emulated_look(word, 8);
    const uint64_t before = *word;
    *word = before == expected ? value : before;
    emulated_yield(false);
    return before;
}

static inline uint4 ptx_load_l2_if(const void *address, bool wanted)
{
    uint4 v = {0, 0, 0, 0};
    if (wanted) {
        EMULATED_CHECK((uintptr_t)address % 16 == 0, "a load of 16 bytes that is not aligned");
        emulated_look(address, 16);
        memcpy(&v, address, 16);
    }
    return v;
}
static inline uint4 ptx_load_l2(const void *address)
{
    return ptx_load_l2_if(address, true);
}
static inline uint4 ptx_load(const void *address)
{
    return ptx_load_l2_if(address, true);
}

static inline void ptx_prefetch_line(const void *address)
{
    emulated_look(address, 16);
}

// ---- copies --------------------------------------------------------------------------------------
static inline void emulated_arrive(const emulated_copy_t &copy)
{
    memset(copy.to, 0, copy.filled);
    if (copy.bytes)
        memcpy(copy.to, copy.from, copy.bytes);
}
static inline void emulated_copy(uint32_t to, const void *from, uint32_t bytes, uint32_t filled)
{
    emulated_fiber_t *fiber = &emulated.fibers[emulated.now];
    const emulated_copy_t copy = {fiber->shared + to, (const unsigned char *)from, bytes, filled};
    EMULATED_CHECK(to % filled == 0, "a copy that is not aligned");
    if (bytes) {
        EMULATED_CHECK((uintptr_t)from % filled == 0, "a copy from where nothing is aligned");
        emulated_look(from, bytes);
    }
    if (emulated.copies == EMULATED_EARLY ||
        (emulated.copies == EMULATED_MIXED && emulated_random() % 2))
        emulated_arrive(copy);
    else
        fiber->open.push_back(copy);
}
static inline uint64_t ptx_policy_stream()
{
    return 0;
}
static inline void ptx_copy_sixteen(uint32_t to, const void *from, uint32_t bytes, uint64_t)
{
    emulated_copy(to, from, bytes, 16);
}
static inline void ptx_copy_sixteen(uint32_t to, const void *from, uint32_t bytes)
{
    emulated_copy(to, from, bytes, 16);
}
static inline void ptx_copy_eight(uint32_t to, const void *from)
{
    emulated_copy(to, from, 8, 8);
}
static inline void ptx_copy_four(uint32_t to, const void *from)
{
    emulated_copy(to, from, 4, 4);
}
static inline void ptx_copies_commit()
{
    emulated_fiber_t *fiber = &emulated.fibers[emulated.now];
    fiber->groups.push_back({});
    fiber->groups.back().swap(fiber->open);
}
template <int PENDING> static inline void ptx_copies_wait()
{
    emulated_fiber_t *fiber = &emulated.fibers[emulated.now];
    while (fiber->groups.size() > PENDING) {
        for (const emulated_copy_t &copy : fiber->groups.front())
            emulated_arrive(copy);
        fiber->groups.erase(fiber->groups.begin());
    }
    if (PENDING == 0)
        EMULATED_CHECK(fiber->open.empty(), "waits for copies that are not committed");
}

// ---- products ------------------------------------------------------------------------------------
template <typename T> static inline float2 ptx_unpack(uint32_t pair);
template <> inline float2 ptx_unpack<__nv_bfloat16>(uint32_t pair)
{
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}
template <> inline float2 ptx_unpack<__half>(uint32_t pair)
{
    _Float16 value[2];
    memcpy(value, &pair, 4);
    return make_float2((float)value[0], (float)value[1]);
}
template <typename T> static inline T ptx_from_float(float value);
template <> inline __nv_bfloat16 ptx_from_float<__nv_bfloat16>(float value)
{
    uint32_t bits = __float_as_uint(value);
    if (value != value)
        return {0x7fff};
    bits += 0x7fff + (bits >> 16 & 1);
    return {(uint16_t)(bits >> 16)};
}
template <> inline __half ptx_from_float<__half>(float value)
{
    return {(_Float16)value};
}

template <typename T> static inline uint32_t ptx_pack(float low, float high)
{
    const T two[2] = {ptx_from_float<T>(low), ptx_from_float<T>(high)};
    uint32_t pair;
    memcpy(&pair, two, 4);
    return pair;
}

struct emulated_product_t {
    float d[4];
    uint32_t a[4], b[2];
};
template <typename T> static inline void emulated_product(emulated_meeting_t *m)
{
    float a[16][16], b[16][8], d[16][8];
    for (uint32_t lane = 0; lane < 32; lane++) {
        const emulated_product_t *of = (const emulated_product_t *)m->argument[lane];
        const uint32_t g = lane / 4, t = lane % 4 * 2;
        for (uint32_t i = 0; i < 4; i++) {
            const float2 pair = ptx_unpack<T>(of->a[i]);
            a[g + i % 2 * 8][t + i / 2 * 8] = pair.x;
            a[g + i % 2 * 8][t + i / 2 * 8 + 1] = pair.y;
            d[g + i / 2 * 8][t + i % 2] = of->d[i];
        }
        for (uint32_t i = 0; i < 2; i++) {
            const float2 pair = ptx_unpack<T>(of->b[i]);
            b[t + i * 8][g] = pair.x;
            b[t + i * 8 + 1][g] = pair.y;
        }
    }
    for (uint32_t i = 0; i < 16; i++)
        for (uint32_t j = 0; j < 8; j++) {
            float sum = 0;
            for (uint32_t k = 0; k < 16; k++)
                sum += a[i][k] * b[k][j];
            d[i][j] += sum;
        }
    for (uint32_t lane = 0; lane < 32; lane++) {
        emulated_product_t *of = (emulated_product_t *)(uintptr_t)m->argument[lane];
        for (uint32_t i = 0; i < 4; i++)
            of->d[i] = d[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
    }
}
template <typename T>
static inline void ptx_mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                           uint32_t b0, uint32_t b1)
{
    emulated_product_t of = {{d[0], d[1], d[2], d[3]}, {a0, a1, a2, a3}, {b0, b1}};
    emulated_meet(EMULATED_PRODUCT, 0, 0, &of, emulated_product<T>);
    memcpy(d, of.d, sizeof(of.d));
}

static inline float ptx_activate(uint32_t activation, float gate, float up)
{
    if (activation == 0)
        return gate / (1.0f + expf(-gate)) * up;
    const float inner = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
    return 0.5f * gate * (1.0f + tanhf(inner)) * up;
}
#endif
