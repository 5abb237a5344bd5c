// SPDX-License-Identifier: MIT
// The router rules of ffn/route.c for one warp and one row: the same choices, ties and NaN rules.
// Scores in FP32. A value's rank is an integer that grows with it; a NaN ranks below every number,
// a taken expert below everything, and the lowest expert wins among equals.
#ifndef XPOOL_FFN_CUDA_ROUTE_CUH
#define XPOOL_FFN_CUDA_ROUTE_CUH

#include "ffn/cuda/tables.h"

#define ROUTE_LANES   32u
#define ROUTE_ALL     0xffffffffu
#define ROUTE_TAKEN   0u
#define ROUTE_NAN     1u

static __device__ __forceinline__ uint32_t route_rank(float value)
{
    if (isnan(value))
        return ROUTE_NAN;
    const uint32_t bits = __float_as_uint(value + 0.0f); // one zero
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

static __device__ __forceinline__ float route_group_score(const float *choice, uint32_t size,
                                                          uint32_t sigmoid)
{
    float first = -INFINITY, second = -INFINITY;
    for (uint32_t i = 0; i < size; i++) {
        const float value = choice[i];
        if (value > first) {
            second = first;
            first = value;
        } else if (value > second) {
            second = value;
        }
    }
    return sigmoid && size > 1 ? first + second : first;
}

// The best of the warp's (rank, index) pairs: highest rank, then lowest index.
static __device__ __forceinline__ uint32_t route_best(uint32_t rank, uint32_t index)
{
    const uint32_t top = __reduce_max_sync(ROUTE_ALL, rank);
    return __reduce_min_sync(ROUTE_ALL, rank == top ? index : 0xffffffffu);
}

// Each lane's own in their order, the best first; of equal ones the lower expert, which comes first.
template <uint32_t HELD>
static __device__ __forceinline__ void route_sort(uint32_t (&rank)[HELD], uint32_t (&expert)[HELD],
                                                  float (&score)[HELD])
{
#pragma unroll
    for (uint32_t round = 0; round < HELD; round++)
#pragma unroll
        for (uint32_t i = round % 2; i + 1 < HELD; i += 2)
            if (rank[i + 1] > rank[i]) {
                const uint32_t r = rank[i], e = expert[i];
                const float v = score[i];
                rank[i] = rank[i + 1], expert[i] = expert[i + 1], score[i] = score[i + 1];
                rank[i + 1] = r, expert[i + 1] = e, score[i + 1] = v;
            }
}

// score: the logits of experts lane, lane + 32, ...; every lane calls. Lane i < top_k gets the i-th best
// expert and its final weight. HELD: experts of a lane, so that 32 * HELD is enough. scratch [experts] in
// shared memory, used where experts are in groups.
template <uint32_t HELD>
static __device__ __forceinline__ void route_held(const ffn_cuda_signature_t &s, float (&score)[HELD],
                                                  float *scratch, const float *bias,
                                                  uint32_t *expert_out, float *weight_out)
{
    const uint32_t lane = threadIdx.x % ROUTE_LANES;
    const uint32_t sigmoid = s.router;
    const bool grouped = s.groups > 1 && s.top_groups < s.groups;
    uint32_t rank[HELD], expert[HELD];
    float largest = -INFINITY, sum = 0.0f;
    // A NaN is not the largest; it makes the sum a NaN, and with it all scores, as on the CPU.
#pragma unroll
    for (uint32_t i = 0; i < HELD; i++)
        if (i * ROUTE_LANES + lane < s.experts && score[i] > largest)
            largest = score[i];
    if (!sigmoid) {
        for (uint32_t d = ROUTE_LANES / 2; d; d /= 2)
            largest = fmaxf(largest, __shfl_xor_sync(ROUTE_ALL, largest, d));
#pragma unroll
        for (uint32_t i = 0; i < HELD; i++)
            if (i * ROUTE_LANES + lane < s.experts) {
                score[i] = expf(score[i] - largest);
                sum += score[i];
            }
        for (uint32_t d = ROUTE_LANES / 2; d; d /= 2)
            sum += __shfl_xor_sync(ROUTE_ALL, sum, d);
    }
    const float scale = 1.0f / sum;
#pragma unroll
    for (uint32_t i = 0; i < HELD; i++) {
        const uint32_t e = i * ROUTE_LANES + lane;
        rank[i] = ROUTE_TAKEN;
        expert[i] = e;
        if (e < s.experts) {
            score[i] = sigmoid ? 1.0f / (1.0f + expf(-score[i])) : score[i] * scale;
            const float choice = bias ? score[i] + bias[e] : score[i];
            if (grouped)
                scratch[e] = choice;
            rank[i] = route_rank(choice);
        }
    }
    if (grouped) {
        // A lane scores a group; `kept` has a bit for each group that may be chosen from.
        const uint32_t size = s.experts / s.groups;
        uint32_t group_rank = ROUTE_TAKEN, kept = 0;
        __syncwarp();
        if (lane < s.groups)
            group_rank = route_rank(route_group_score(scratch + lane * size, size, sigmoid));
        for (uint32_t n = 0; n < s.top_groups; n++) {
            const uint32_t best = route_best(group_rank, lane);
            kept |= 1u << best;
            if (best == lane)
                group_rank = ROUTE_TAKEN;
        }
#pragma unroll
        for (uint32_t i = 0; i < HELD; i++)
            if (i * ROUTE_LANES + lane < s.experts &&
                !(kept >> (i * ROUTE_LANES + lane) / size & 1))
                rank[i] = ROUTE_TAKEN;
    }
    route_sort<HELD>(rank, expert, score);
    float total = 0.0f, mine_score = 0.0f;
    uint32_t mine = 0;
    for (uint32_t n = 0; n < s.top_k; n++) {
        const uint32_t top = __reduce_max_sync(ROUTE_ALL, rank[0]);
        uint32_t holders = __ballot_sync(ROUTE_ALL, rank[0] == top);
        if (holders & (holders - 1)) { // equal ones: the lowest expert
            const uint32_t lowest =
                __reduce_min_sync(ROUTE_ALL, rank[0] == top ? expert[0] : 0xffffffffu);
            holders = __ballot_sync(ROUTE_ALL, rank[0] == top && expert[0] == lowest);
        }
        const uint32_t holder = __ffs(holders) - 1;
        const uint32_t best = __shfl_sync(ROUTE_ALL, expert[0], holder);
        const float value = __shfl_sync(ROUTE_ALL, score[0], holder);
        if (holder == lane) {
#pragma unroll
            for (uint32_t i = 0; i + 1 < HELD; i++)
                rank[i] = rank[i + 1], expert[i] = expert[i + 1], score[i] = score[i + 1];
            rank[HELD - 1] = ROUTE_TAKEN;
        }
        total += value;
        if (n == lane) {
            mine = best;
            mine_score = value;
        }
    }
    if (s.normalize)
        mine_score /= total + 1e-20f; // the families' own guard against a zero sum
    *expert_out = mine;
    *weight_out = mine_score * s.routed_scale;
}

// The same of softmax without bias and groups, with fewer instructions that wait for each other, as a warp
// that nobody else waits with has it: same bits. False, and nothing is answered: two scores are equal.
// scratch: 64 words in shared memory, aligned to 16 bytes.
template <uint32_t HELD>
static __device__ __forceinline__ bool route_plain(const ffn_cuda_signature_t &s,
                                                   const float (&logit)[HELD], float *scratch,
                                                   uint32_t *expert_out, float *weight_out)
{
    const uint32_t lane = threadIdx.x % ROUTE_LANES, experts = s.experts, top_k = s.top_k;
    uint32_t rank[HELD], expert[HELD], top = 0, equal = 0;
    float score[HELD], sum = 0.0f, total = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < HELD; i++)
        top = max(top, i * ROUTE_LANES + lane < experts ? route_rank(logit[i]) : ROUTE_TAKEN);
    top = __reduce_max_sync(ROUTE_ALL, top);
    const float largest =
        top <= ROUTE_NAN ? -INFINITY : __uint_as_float(top >> 31 ? top ^ 0x80000000u : ~top);
#pragma unroll
    for (uint32_t i = 0; i < HELD; i++) {
        const float e = expf(logit[i] - largest);
        score[i] = i * ROUTE_LANES + lane < experts ? e : 0.0f;
        sum += score[i];
    }
    for (uint32_t d = ROUTE_LANES / 2; d; d /= 2)
        sum += __shfl_xor_sync(ROUTE_ALL, sum, d);
    const float scale = 1.0f / sum;
#pragma unroll
    for (uint32_t i = 0; i < HELD; i++) {
        score[i] *= scale;
        expert[i] = i * ROUTE_LANES + lane;
        const uint32_t r = route_rank(score[i]);
        rank[i] = expert[i] < experts ? r : ROUTE_TAKEN;
    }
    route_sort<HELD>(rank, expert, score);
#pragma unroll 1
    for (uint32_t n = 0; n < top_k; n++) {
        const uint32_t best = __reduce_max_sync(ROUTE_ALL, rank[0]);
        const bool mine = rank[0] == best;
        const uint32_t holders = __ballot_sync(ROUTE_ALL, mine);
        equal |= holders & (holders - 1);
        if (mine) {
            scratch[n] = score[0];
            ((uint32_t *)scratch)[ROUTE_LANES + n] = expert[0];
#pragma unroll
            for (uint32_t i = 0; i + 1 < HELD; i++)
                rank[i] = rank[i + 1], expert[i] = expert[i + 1], score[i] = score[i + 1];
            rank[HELD - 1] = ROUTE_TAKEN;
        }
    }
    __syncwarp();
    if (equal)
        return false;
#pragma unroll 1
    for (uint32_t n = 0; n < top_k; n += 4) {
        const float4 v = *(const float4 *)(scratch + n);
        total += v.x;
        total += n + 1 < top_k ? v.y : 0.0f;
        total += n + 2 < top_k ? v.z : 0.0f;
        total += n + 3 < top_k ? v.w : 0.0f;
    }
    const float mine_score = scratch[lane];
    *expert_out = ((const uint32_t *)scratch)[ROUTE_LANES + lane];
    *weight_out = (s.normalize ? mine_score / (total + 1e-20f) : mine_score) * s.routed_scale;
    return true;
}

// logits [experts] in shared memory, overwritten.
template <uint32_t HELD>
static __device__ __forceinline__ void route_loaded(const ffn_cuda_signature_t &s, float *logits,
                                                    const float *bias, uint32_t *expert_out,
                                                    float *weight_out)
{
    float score[HELD];
#pragma unroll
    for (uint32_t i = 0; i < HELD; i++) {
        const uint32_t e = i * ROUTE_LANES + threadIdx.x % ROUTE_LANES;
        score[i] = e < s.experts ? logits[e] : -INFINITY;
    }
    __syncwarp();
    route_held<HELD>(s, score, logits, bias, expert_out, weight_out);
}

static __device__ __forceinline__ void route_row(const ffn_cuda_signature_t &s, float *logits,
                                                 const float *bias, uint32_t *expert_out,
                                                 float *weight_out)
{
    if (s.experts <= 4 * ROUTE_LANES)
        route_loaded<4>(s, logits, bias, expert_out, weight_out);
    else
        route_loaded<FFN_CUDA_MAX_EXPERTS / ROUTE_LANES>(s, logits, bias, expert_out, weight_out);
}
#endif
