// SPDX-License-Identifier: MIT
// Device code of kv_bench: patterns in memory, what differs from them, and reads of token rows at the
// stride of a token, as attention does them.
#include <stdint.h>

// A function of place and seed, never 0.
static __device__ uint64_t pattern(uint64_t seed, uint64_t index)
{
    uint64_t x = (seed + 1) * 0x9e3779b97f4a7c15ull + index * 0xbf58476d1ce4e5b9ull;
    x ^= x >> 29;
    x *= 0x94d049bb133111ebull;
    return (x ^ x >> 32) | 1;
}

static __device__ uint64_t first_of_thread()
{
    return (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
}

static __device__ uint64_t threads_in_all()
{
    return (uint64_t)gridDim.x * blockDim.x;
}

extern "C" __global__ void kv_fill(uint64_t *at, uint64_t words, uint64_t seed)
{
    for (uint64_t i = first_of_thread(); i < words; i += threads_in_all())
        at[i] = pattern(seed, i);
}

// Adds to *count the words of [first, words) that are not the pattern, or, with `zero`, not 0.
extern "C" __global__ void kv_wrong(const uint64_t *at, uint64_t first, uint64_t words, uint64_t seed,
                                    uint32_t zero, unsigned long long *count)
{
    unsigned long long wrong = 0;
    for (uint64_t i = first + first_of_thread(); i < words; i += threads_in_all())
        wrong += at[i] != (zero ? 0 : pattern(seed, i));
    if (wrong)
        atomicAdd(count, wrong);
}

// A block a slot: the weighted sum of all words of the token that lies there.
extern "C" __global__ void kv_gather(const uint64_t *tokens, uint64_t token_words, const uint32_t *slots,
                                     unsigned long long *sums)
{
    const uint64_t *token = tokens + slots[blockIdx.x] * token_words;
    unsigned long long sum = 0;
    if (threadIdx.x == 0)
        sums[blockIdx.x] = 0;
    __syncthreads();
    for (uint64_t i = threadIdx.x; i < token_words; i += blockDim.x)
        sum += token[i] * (2 * i + 1);
    atomicAdd(&sums[blockIdx.x], sum);
}
