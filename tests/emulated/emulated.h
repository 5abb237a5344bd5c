// SPDX-License-Identifier: MIT
// CUDA's language for one host thread: every thread of a grid is a fiber, so that kernels with
// barriers, warp operations and spinning blocks run, in an order that the test chooses. For the
// sources of src/ffn/cuda that are compiled with this folder before src/ on the include path.
//
// Finds what a GPU may only show at times: lanes of a warp that meet at different operations,
// copies that are used too early or written over too early (see emulated_copies_t), addresses
// outside of what was allocated, a grid that waits for ever. It knows one order of memory, the
// sequential one.
#ifndef XPOOL_TESTS_EMULATED_H
#define XPOOL_TESTS_EMULATED_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <algorithm>
#include <functional>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __shared__       // entries that have such variables are not run here
#define __forceinline__  inline
#define __align__(bytes) alignas(bytes)
#define __launch_bounds__(...)
#define __maxnreg__(...)

#define EMULATED_CHECK(condition, ...)                                                             \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            printf("%s:%d: failed: %s: ", __FILE__, __LINE__, #condition);                         \
            printf(__VA_ARGS__);                                                                   \
            printf("\n");                                                                          \
            fflush(stdout);                                                                        \
            _exit(1);                                                                              \
        }                                                                                          \
    } while (0)
#include <unistd.h>

using std::max;
using std::min;

struct uint4 {
    uint32_t x, y, z, w;
};
struct alignas(8) uint2 {
    uint32_t x, y;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
static inline uint2 make_uint2(uint32_t x, uint32_t y)
{
    return {x, y};
}
static inline float2 make_float2(float x, float y)
{
    return {x, y};
}
static inline float4 make_float4(float x, float y, float z, float w)
{
    return {x, y, z, w};
}

// When the bytes of an asynchronous copy arrive: at once, only when they are waited for, or at
// either.
enum emulated_copies_t { EMULATED_EARLY, EMULATED_LATE, EMULATED_MIXED };

struct emulated_copy_t {
    unsigned char *to;
    const unsigned char *from;
    uint32_t bytes, filled; // read; written, the rest zeros
};

enum emulated_op_t {
    EMULATED_NONE,
    EMULATED_SYNCWARP,
    EMULATED_SHUFFLE,
    EMULATED_REDUCE,
    EMULATED_PRODUCT,
    EMULATED_SYNCTHREADS,
};

struct emulated_dim_t {
    uint32_t x, y, z;
};

struct emulated_fiber_t {
    void *stack_pointer;
    unsigned char *stack;
    emulated_dim_t thread, block;
    uint32_t warp; // of the grid
    bool ended, waits;
    std::vector<emulated_copy_t> open;                // not committed
    std::vector<std::vector<emulated_copy_t>> groups; // committed, not arrived
    unsigned char *shared;
};

struct emulated_meeting_t {
    emulated_op_t op;
    uint32_t arrived;
    uint32_t fiber[32]; // of a warp, by lane
    uint64_t value[32], result[32];
    uint32_t source[32];
    const void *argument[32];
};

struct emulated_grid_t {
    std::vector<emulated_fiber_t> fibers;
    std::vector<emulated_meeting_t> warps;
    std::vector<uint32_t> blocks; // threads at the block's barrier
    std::vector<uint32_t> counts; // those of them that say yes
    std::vector<uint32_t> ready;
    std::vector<std::vector<unsigned char>> shared;
    std::vector<std::pair<const unsigned char *, uint64_t>> memory; // what may be read and written
    emulated_dim_t grid, block;
    uint32_t now;
    emulated_copies_t copies;
    uint64_t random, idle; // idle: switches since a fiber did more than look
    void *main_stack;
    std::function<void()> entry;
    std::function<void()> outside; // what others do: called between any two steps of the grid
};
extern emulated_grid_t emulated;

#define threadIdx (emulated.fibers[emulated.now].thread)
#define blockIdx  (emulated.fibers[emulated.now].block)
#define gridDim   (emulated.grid)

static inline uint32_t emulated_random()
{
    emulated.random = emulated.random * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(emulated.random >> 33);
}

// Runs `entry` in `blocks` times `threads` fibers until all have ended. order: seed of the order.
void emulated_run(uint32_t blocks, uint32_t threads, uint32_t shared_bytes,
                  emulated_copies_t copies, uint64_t order, const std::function<void()> &entry);
void emulated_yield(bool idle); // the fiber stays ready; idle: it only looked
void emulated_wait();           // until somebody makes it ready
void emulated_allow(const void *at, uint64_t bytes);
void emulated_forbid_all();
void emulated_look(const void *at, uint64_t bytes); // checks that it was allowed
// Meets the other lanes: the last one runs `all` over the warp's meeting.
uint64_t emulated_meet(emulated_op_t op, uint64_t value, uint32_t source, const void *argument,
                       void (*all)(emulated_meeting_t *));
void emulated_syncthreads();

// ---- CUDA's functions
// ----------------------------------------------------------------------------
#define __syncthreads() emulated_syncthreads()
static inline uint32_t __syncthreads_count(bool value)
{
    uint32_t *const count = &emulated.counts[blockIdx.x];
    *count += value;
    emulated_syncthreads();
    const uint32_t all = *count;
    emulated_syncthreads();
    if (threadIdx.x == 0)
        *count = 0;
    emulated_syncthreads();
    return all;
}
static inline void __syncwarp()
{
    emulated_meet(EMULATED_SYNCWARP, 0, 0, NULL, [](emulated_meeting_t *) {});
}
#define __trap() EMULATED_CHECK(false, "trap")
static inline void __threadfence_system()
{
}

static inline void emulated_shuffle(emulated_meeting_t *m)
{
    for (uint32_t i = 0; i < 32; i++)
        m->result[i] = m->value[m->source[i] % 32];
}
template <typename V> static inline V emulated_exchange(V value, uint32_t source)
{
    static_assert(sizeof(V) <= 8, "a register or two");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(V));
    bits = emulated_meet(EMULATED_SHUFFLE, bits, source, NULL, emulated_shuffle);
    memcpy(&value, &bits, sizeof(V));
    return value;
}
template <typename V> static inline V __shfl_sync(uint32_t, V value, uint32_t lane)
{
    return emulated_exchange(value, lane);
}
template <typename V> static inline V __shfl_xor_sync(uint32_t, V value, uint32_t bits)
{
    return emulated_exchange(value, (threadIdx.x % 32) ^ bits);
}
template <typename V> static inline V __shfl_up_sync(uint32_t, V value, uint32_t by)
{
    const uint32_t lane = threadIdx.x % 32;
    return emulated_exchange(value, lane >= by ? lane - by : lane);
}
static inline uint32_t __ballot_sync(uint32_t, bool value)
{
    return (uint32_t)emulated_meet(EMULATED_REDUCE, value, 0, NULL, [](emulated_meeting_t *m) {
        uint32_t all = 0;
        for (uint32_t i = 0; i < 32; i++)
            all |= (uint32_t)(m->value[i] != 0) << i;
        for (uint32_t i = 0; i < 32; i++)
            m->result[i] = all;
    });
}
static inline uint32_t __reduce_max_sync(uint32_t, uint32_t value)
{
    return (uint32_t)emulated_meet(EMULATED_REDUCE, value, 1, NULL, [](emulated_meeting_t *m) {
        const uint64_t most = *std::max_element(m->value, m->value + 32);
        for (uint32_t i = 0; i < 32; i++)
            m->result[i] = most;
    });
}
static inline uint32_t __reduce_min_sync(uint32_t, uint32_t value)
{
    return (uint32_t)emulated_meet(EMULATED_REDUCE, value, 2, NULL, [](emulated_meeting_t *m) {
        const uint64_t least = *std::min_element(m->value, m->value + 32);
        for (uint32_t i = 0; i < 32; i++)
            m->result[i] = least;
    });
}
static inline uint32_t __popc(uint32_t bits)
{
    return (uint32_t)__builtin_popcount(bits);
}
static inline uint32_t __ffs(uint32_t bits)
{
    return (uint32_t)__builtin_ffs((int)bits);
}
static inline float __uint_as_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static inline uint32_t __float_as_uint(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}
template <typename V> static inline V __ldcg(const V *at)
{
    return *at;
}
static inline uint32_t atomicAdd(uint32_t *at, uint32_t value)
{
    const uint32_t before = *at;
    *at += value;
    return before;
}
static inline uint32_t atomicOr(uint32_t *at, uint32_t bits)
{
    const uint32_t before = *at;
    *at |= bits;
    return before;
}
static inline long long clock64()
{
    return 1;
}
#endif
