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

// logits [experts] in shared memory, overwritten with the scores that the choice is made by; every
// lane calls. Lane i < top_k gets the i-th best expert and its final weight.
// HELD: experts of a lane, so that 32 * HELD is enough.
template <uint32_t HELD>
static __device__ __forceinline__ void route_held(const ffn_cuda_signature_t &s, float *logits,
                                                  const float *bias, uint32_t *expert_out,
                                                  float *weight_out)
{
    const uint32_t lane = threadIdx.x % ROUTE_LANES;
    const uint32_t sigmoid = s.router;
    float score[HELD];
    uint32_t rank[HELD];
    float largest = -INFINITY, sum = 0.0f;
    // A NaN is not the largest; it makes the sum a NaN, and with it all scores, as on the CPU.
#pragma unroll
    for (uint32_t i = 0; i < HELD; i++) {
        const uint32_t e = i * ROUTE_LANES + lane;
        score[i] = e < s.experts ? logits[e] : -INFINITY;
        if (e < s.experts && score[i] > largest)
            largest = score[i];
    }
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
        if (e < s.experts) {
            score[i] = sigmoid ? 1.0f / (1.0f + expf(-score[i])) : score[i] * scale;
            const float choice = bias ? score[i] + bias[e] : score[i];
            logits[e] = choice;
            rank[i] = route_rank(choice);
        }
    }
    __syncwarp();
    if (s.groups > 1 && s.top_groups < s.groups) {
        // A lane scores a group; `kept` has a bit for each group that may be chosen from.
        const uint32_t size = s.experts / s.groups;
        uint32_t group_rank = ROUTE_TAKEN, kept = 0;
        if (lane < s.groups)
            group_rank = route_rank(route_group_score(logits + lane * size, size, sigmoid));
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
    float total = 0.0f;
    uint32_t mine = 0, taken = 0; // a bit for each of this lane's experts
    float mine_score = 0.0f;
    for (uint32_t n = 0; n < s.top_k; n++) {
        uint32_t best_rank = ROUTE_TAKEN, best_index = 0xffffffffu;
        float best_score = 0.0f;
#pragma unroll
        for (uint32_t i = 0; i < HELD; i++)
            if (!(taken >> i & 1) && rank[i] > best_rank) {
                best_rank = rank[i];
                best_index = i * ROUTE_LANES + lane;
                best_score = score[i];
            }
        const uint32_t best = route_best(best_rank, best_index);
        // The warp's best is its holder's best, whose score is at hand there.
        const float value = __shfl_sync(ROUTE_ALL, best_score, best % ROUTE_LANES);
        if (best % ROUTE_LANES == lane)
            taken |= 1u << best / ROUTE_LANES;
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

static __device__ __forceinline__ void route_row(const ffn_cuda_signature_t &s, float *logits,
                                                 const float *bias, uint32_t *expert_out,
                                                 float *weight_out)
{
    if (s.experts <= 4 * ROUTE_LANES)
        route_held<4>(s, logits, bias, expert_out, weight_out);
    else
        route_held<FFN_CUDA_MAX_EXPERTS / ROUTE_LANES>(s, logits, bias, expert_out, weight_out);
}
#endif
