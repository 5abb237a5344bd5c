// SPDX-License-Identifier: MIT
// How the blocks of the decode kernel choose experts: each computes some logits, all choose from all.
#ifndef XPOOL_FFN_CUDA_DECODE_ROUTE_CUH
#define XPOOL_FFN_CUDA_DECODE_ROUTE_CUH

#include "ffn/cuda/decode_state.cuh"
#include "ffn/cuda/usage.h"

// ---- router --------------------------------------------------------------------------------------
// Where this block's rows of the router lie: one after another in the ring, if all fit.
static __device__ __forceinline__ bool router_fits(const ffn_cuda_signature_t &s, uint32_t row_bytes)
{
    return ceil_div(s.experts, gridDim.x) * row_bytes <= DECODE_RING_BYTES;
}

static __device__ __forceinline__ uint32_t router_row_bytes(const ffn_cuda_signature_t &s)
{
    return s.hidden * (s.router_dtype == FFN_CUDA_F32 ? 4 : 2);
}

// Starts the copies of what choosing takes: this block's rows of the router (each thread those pieces
// that it multiplies), the parts' addresses, the bias. The ring is empty.
static __device__ __forceinline__ void experts_fetch(decode_shared_t &shared, uint64_t policy)
{
    decode_state_t &sh = shared.state;
    const decode_layer_t &layer = sh.layers[sh.now];
    const ffn_cuda_signature_t &s = layer.signature;
    const uint32_t row_bytes = router_row_bytes(s), element = row_bytes / s.hidden;
    if (router_fits(s, row_bytes)) {
        uint32_t to = ptx_shared(shared.ring[0][0]);
        for (uint32_t e = blockIdx.x; e < s.experts; e += gridDim.x, to += row_bytes) {
            const char *from = (const char *)layer.router + (uint64_t)e * row_bytes;
            for (uint32_t k = threadIdx.x * 8; k < s.hidden; k += DECODE_THREADS * 8)
                for (uint32_t i = 0; i < element / 2; i++)
                    ptx_copy_sixteen(to + k * element + i * 16,
                                     from + (uint64_t)k * element + i * 16, 16, policy);
        }
    }
    const uint32_t words = (s.experts + (layer.last_width != 0)) * sizeof(ffn_cuda_part_t) / 8;
    for (uint32_t i = threadIdx.x; i < words; i += DECODE_THREADS)
        ptx_copy_eight(ptx_shared(sh.parts) + i * 8, (const char *)layer.parts + i * 8);
    if (layer.bias)
        for (uint32_t i = threadIdx.x; i < s.experts; i += DECODE_THREADS)
            ptx_copy_four(ptx_shared(sh.bias) + i * 4, layer.bias + i);
    ptx_copies_commit();
}

#define ROUTER_ROWS  16u // whose sums a thread holds
#define ROUTE_COUNTS 32u // the thread that numbers Invocations

// acted: of the meeting. Of this Invocation, fewer than all blocks have arrived, since this one has not:
// the rest of the division is theirs. One thread.
static __device__ __forceinline__ void call_number(decode_call_t &call, uint64_t acted)
{
    const uint64_t number = acted / gridDim.x + 1;
    call.acted_target = number * gridDim.x;
    call.number = (uint32_t)number;
}

// One expert's logits of up to ROUTER_ROWS rows from `begin` on: a thread takes 8 elements of every
// THREADS * 8, for each row; the sums of a row are added in the order of the warps. So a row's logit does
// not depend on how many rows there are. weights: in shared or in global memory.
template <typename T>
static __device__ __forceinline__ void router_sums(decode_state_t &sh, const char *weights, bool wide,
                                                   uint32_t begin)
{
    enum { AT_ONCE = 8 }; // rows whose elements are loaded before the first is used
    const uint32_t hidden = sh.layers[sh.now].signature.hidden, rows = sh.call.command.rows - begin;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const char *input = (const char *)sh.call.command.input + (uint64_t)begin * hidden * 2;
    float sum[ROUTER_ROWS];
#pragma unroll
    for (uint32_t r = 0; r < ROUTER_ROWS; r++)
        sum[r] = 0.0f;
    for (uint32_t k = threadIdx.x * 8; k < hidden; k += DECODE_THREADS * 8) {
        float w[8];
#pragma unroll
        for (uint32_t first = 0; first < ROUTER_ROWS; first += AT_ONCE) {
            if (first >= rows)
                break;
            uint4 x[AT_ONCE];
#pragma unroll
            for (uint32_t r = 0; r < AT_ONCE; r++)
                x[r] = ptx_load_l2_if(input + ((uint64_t)(first + r) * hidden + k) * 2,
                                      first + r < rows);
            if (first == 0) {
                ptx_copies_wait<0>();
                if (wide) {
                    *(float4 *)&w[0] = *(const float4 *)(weights + (uint64_t)k * 4);
                    *(float4 *)&w[4] = *(const float4 *)(weights + (uint64_t)k * 4 + 16);
                } else {
                    const uint4 packed = *(const uint4 *)(weights + (uint64_t)k * 2);
                    const uint32_t ws[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        *(float2 *)&w[i * 2] = ptx_unpack<T>(ws[i]);
                }
            }
#pragma unroll
            for (uint32_t r = 0; r < AT_ONCE; r++) {
                if (first + r >= rows)
                    break;
                const uint32_t xs[4] = {x[r].x, x[r].y, x[r].z, x[r].w};
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float2 pair = ptx_unpack<T>(xs[i]);
                    sum[first + r] = fmaf(pair.x, w[i * 2], sum[first + r]);
                    sum[first + r] = fmaf(pair.y, w[i * 2 + 1], sum[first + r]);
                }
            }
        }
    }
#pragma unroll
    for (uint32_t r = 0; r < ROUTER_ROWS; r++) {
        if (r >= rows)
            break;
        for (uint32_t d = 16; d; d /= 2)
            sum[r] += __shfl_xor_sync(ROUTE_ALL, sum[r], d);
        if (lane == 0)
            sh.router[warp][begin + r] = sum[r];
    }
}

// A row's logits as soon as all blocks have written theirs, and its experts; one warp. scratch: a float
// for each expert.
template <uint32_t HELD>
static __device__ __forceinline__ void row_choose(decode_state_t &sh, uint32_t row, float *scratch)
{
    const decode_layer_t &layer = sh.layers[sh.now];
    const ffn_cuda_signature_t &s = layer.signature;
    const uint32_t lane = threadIdx.x % 32, number = sh.call.number;
    const uint64_t *at = sh.call.lane.logits + row * s.experts;
    float logit[HELD];
    bool missing;
    do {
        uint64_t word[HELD];
        missing = false;
#pragma unroll
        for (uint32_t i = 0; i < HELD; i++) {
            word[i] = (uint64_t)number << 32;
            if (i * 32 + lane < s.experts)
                word[i] = ptx_load_relaxed(at + i * 32 + lane);
        }
#pragma unroll
        for (uint32_t i = 0; i < HELD; i++) {
            logit[i] = __uint_as_float((uint32_t)word[i]);
            missing = missing || (uint32_t)(word[i] >> 32) != number;
        }
    } while (missing);
    __syncwarp();
    if (threadIdx.x == 0 && row == 0)
        decode_mark(sh.call, 2);
    uint32_t expert;
    float weight;
    const bool plain = HELD <= 4 && s.router == 0 && !layer.bias &&
                       (s.groups <= 1 || s.top_groups >= s.groups);
    if (!plain || !route_plain<HELD>(s, logit, scratch, &expert, &weight))
        route_held<HELD>(s, logit, scratch, layer.bias ? sh.bias : NULL, &expert, &weight);
    if (lane < s.top_k) {
        sh.chosen[row][lane] = (uint16_t)expert;
        sh.weight[row][lane] = weight;
        atomicOr(&sh.expert_mask[expert], 1u << row);
    }
    __syncwarp();
}

// The chosen experts, ascending, and who chose them; one warp. HELD: experts of a lane.
template <uint32_t HELD> static __device__ __forceinline__ void parts_list(decode_state_t &sh)
{
    const uint32_t experts = sh.layers[sh.now].signature.experts, lane = threadIdx.x % 32;
    uint32_t mask[HELD], count = 0;
#pragma unroll
    for (uint32_t i = 0; i < HELD; i++)
        mask[i] = i * 32 + lane < experts ? sh.expert_mask[i * 32 + lane] : 0;
#pragma unroll
    for (uint32_t i = 0; i < HELD; i++) {
        const uint32_t chosen = __ballot_sync(ROUTE_ALL, mask[i] != 0);
        if (mask[i]) {
            const uint32_t at = count + __popc(chosen & ((1u << lane) - 1));
            sh.part_of[at] = (uint16_t)(i * 32 + lane);
            sh.mask_of[at] = mask[i];
        }
        count += __popc(chosen);
    }
    if (lane == 0) {
        sh.call.experts_chosen = count;
        sh.part_of[count] = (uint16_t)experts;
        sh.mask_of[count] = 0xffffffff;
    }
}

// All threads; what experts_fetch() started is under way, and the ring holds nothing else. acted: thread
// ROUTE_COUNTS has the meeting's.
static __device__ __forceinline__ void route_all(decode_shared_t &shared, uint64_t acted)
{
    decode_state_t &sh = shared.state;
    decode_call_t &call = sh.call;
    const decode_layer_t &layer = sh.layers[sh.now];
    const ffn_cuda_signature_t &s = layer.signature;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, rows = call.command.rows;
    const bool wide = s.router_dtype == FFN_CUDA_F32;
    const uint32_t row_bytes = router_row_bytes(s);
    const bool near = router_fits(s, row_bytes);
    uint32_t held = 0;
    for (uint32_t e = threadIdx.x; e < s.experts; e += DECODE_THREADS)
        sh.expert_mask[e] = 0;
    for (uint32_t e = blockIdx.x; e < s.experts; e += gridDim.x, held++) {
        const char *w = near ? (const char *)shared.ring + held * row_bytes
                             : (const char *)layer.router + (uint64_t)e * row_bytes;
        if (held)
            __syncthreads(); // the sums before are stored
        for (uint32_t begin = 0; begin < rows; begin += ROUTER_ROWS)
            if (s.dtype == FFN_CUDA_BF16)
                router_sums<__nv_bfloat16>(sh, w, wide, begin);
            else
                router_sums<__half>(sh, w, wide, begin);
        if (held == 0 && threadIdx.x == ROUTE_COUNTS)
            call_number(call, acted);
        __syncthreads();
        if (threadIdx.x < rows) {
            float logit = 0.0f;
#pragma unroll
            for (uint32_t i = 0; i < DECODE_WARPS; i++)
                logit += sh.router[i][threadIdx.x];
            ptx_store_relaxed(&call.lane.logits[threadIdx.x * s.experts + e],
                              (uint64_t)call.number << 32 | __float_as_uint(logit));
        }
    }
    if (held == 0 && threadIdx.x == ROUTE_COUNTS)
        call_number(call, acted);
    ptx_copies_wait<0>();
    __syncthreads(); // the router's rows are read, the parts' addresses are there
    if (threadIdx.x == 0)
        decode_mark(call, 1);
    // Nothing is under way in the ring; a warp's scores take a part of its own.
    float *scratch = (float *)shared.ring[warp][0];
    for (uint32_t row = warp; row < rows; row += DECODE_WARPS) {
        if (s.experts <= 128)
            row_choose<4>(sh, row, scratch);
        else
            row_choose<FFN_CUDA_MAX_EXPERTS / 32>(sh, row, scratch);
    }
    // A row's experts are all in warp 0's hands.
    if (rows > 1)
        __syncthreads();
    if (warp == 0) {
        if (s.experts <= 128)
            parts_list<4>(sh);
        else
            parts_list<FFN_CUDA_MAX_EXPERTS / 32>(sh);
    }
    __syncthreads();
    if (warp == 0 && blockIdx.x == 0) {
        for (uint32_t e = lane; e < s.experts; e += 32)
            ffn_cuda_usage_expert(layer.usage, e, __popc(sh.expert_mask[e]));
        if (lane == 0)
            ffn_cuda_usage_execution(layer.usage, rows, call.experts_chosen);
    }
}
#endif
