// SPDX-License-Identifier: MIT
// The resident kernel of few rows: the phases of few.cu within one cooperative launch, a command after the
// other, without the host.
//
//   router    units over all blocks; the last one plans, all wait for that
//   gate      items over all warps. Who has none left copies the weights of its first item of down
//   down      once all activations are written
//   sum       of a row's pairs, once all products are written: four columns a thread
//
// Blocks meet by counters of the queue, which only grow and are zero when the kernel begins. What other
// blocks write while the kernel runs is read past L1, or after the block's acquire, which empties it.
// Nothing waits without a partner that is already running: the launch is cooperative.
#ifndef XPOOL_FFN_CUDA_FEW_RESIDENT_CUH
#define XPOOL_FFN_CUDA_FEW_RESIDENT_CUH

#include "ffn/cuda/command.cuh"
#include "ffn/cuda/few_products.cuh"
#include "ffn/cuda/few_route.cuh"

typedef few_route_t<FEW_WARPS> few_router_t;
static_assert(sizeof(few_router_t) <= FEW_WARPS * FEW_RING_BYTES, "it lies where the rings are");

// What an Invocation is; in shared memory.
struct few_call_t {
    ffn_cuda_command_t command;
    ffn_cuda_lane_t lane; // copies of the command's
    ffn_cuda_layer_t layer;
    ffn_cuda_signature_t signature;
    uint64_t began_ns;
    uint32_t leave;
};

// Adds the time since the command was seen; one thread.
static __device__ __forceinline__ void few_mark(const few_call_t &call, uint32_t which)
{
    if (call.lane.workspace.trace)
        ptx_add_relaxed(&call.lane.workspace.trace[which][blockIdx.x],
                        (uint32_t)(ptx_clock_ns() - call.began_ns));
}

// All threads of all blocks: what each has written before, all see after. marks: which and the next.
static __device__ __forceinline__ void few_meet(const few_call_t &call, uint32_t mark, uint64_t *word,
                                                uint64_t target)
{
    __syncthreads();
    if (threadIdx.x == 0) {
        few_mark(call, mark);
        ptx_add_release(word, 1);
        while (ptx_load_acquire(word) < target)
            ;
        few_mark(call, mark + 1);
    }
    __syncthreads();
}

// All threads, once call.command is there: the Lane, the layer.
static __device__ __forceinline__ void few_call_read(few_call_t &call, few_router_t &route)
{
    const uint32_t thread = threadIdx.x, lane_words = sizeof(ffn_cuda_lane_t) / 8;
    const ffn_cuda_layer_t *layer = call.command.layers + call.command.layer;
    static_assert(sizeof(ffn_cuda_lane_t) / 8 + sizeof(ffn_cuda_layer_t) / 8 <= FEW_THREADS,
                  "a word a thread");
    if (thread < lane_words)
        ((unsigned long long *)&call.lane)[thread] =
            __ldcg((const unsigned long long *)call.command.lane + thread);
    else if (thread - lane_words < sizeof(ffn_cuda_layer_t) / 8)
        ((unsigned long long *)&call.layer)[thread - lane_words] =
            __ldcg((const unsigned long long *)layer + thread - lane_words);
    __syncthreads();
    few_signature(route, &call.layer);
    __syncthreads();
    if (thread < sizeof(call.signature) / 4)
        ((uint32_t *)&call.signature)[thread] = ((const uint32_t *)&route.signature)[thread];
    if (thread == 0)
        few_mark(call, 0);
}

// Router and plan; returns once the plan is there. turn: Invocations with rows so far, this one included.
static __device__ __forceinline__ void few_call_route(few_call_t &call, few_router_t &route,
                                                      ffn_cuda_queue_t *queue, uint64_t turn)
{
    const uint32_t rows = call.command.rows;
    const uint32_t groups = few_parts(rows, FEW_ROUTE_ROWS);
    const uint32_t units = few_parts(route.signature.experts, FEW_ROUTE_EXPERTS) * groups;
    bool plans = units == 0 && blockIdx.x == 0;
#pragma unroll 1
    for (uint32_t unit = blockIdx.x; unit < units; unit += gridDim.x)
        plans = few_unit(route, &call.lane, &call.layer, call.command.input, rows, unit, groups);
    if (threadIdx.x == 0)
        few_mark(call, 1);
    if (plans) { // the last unit of all was this block's last one
        few_plan(route, &call.lane, &call.layer, rows);
        __syncthreads();
        if (threadIdx.x == 0)
            ptx_add_release(&queue->planned, 1);
    }
    if (threadIdx.x == 0) {
        while (ptx_load_acquire(&queue->planned) < turn)
            ;
        few_mark(call, 2);
    }
    __syncthreads();
}

// The rows' sums, as ffn_bulk_reduce() adds them.
template <typename T> static __device__ __forceinline__ void few_sum(const few_call_t &call)
{
    const ffn_cuda_signature_t &s = call.signature;
    const ffn_cuda_workspace_t &w = call.lane.workspace;
    const uint32_t rows = call.command.rows, top_k = s.experts ? s.top_k : 0;
    const uint32_t quarters = s.hidden / 4;
    const bool last = s.experts == 0 || s.shared_intermediate;
    for (uint32_t i = blockIdx.x * FEW_THREADS + threadIdx.x; i < rows * quarters;
         i += gridDim.x * FEW_THREADS) {
        const uint32_t row = i / quarters, column = i % quarters * 4;
        float sum[4] = {};
#pragma unroll 8
        for (uint32_t k = 0; k < top_k + last; k++) {
            const uint32_t pair = row * top_k + k;
            const bool routed = k < top_k;
            const uint64_t at = routed ? __ldcg(w.pair_at + pair) : rows * top_k + row;
            const float weight = routed ? __ldcg(w.weights + pair) : 1.0f;
            const float4 v = __ldcg((const float4 *)(w.products + at * s.hidden + column));
            sum[0] = fmaf(weight, v.x, sum[0]);
            sum[1] = fmaf(weight, v.y, sum[1]);
            sum[2] = fmaf(weight, v.z, sum[2]);
            sum[3] = fmaf(weight, v.w, sum[3]);
        }
        const uint64_t at = (uint64_t)row * s.hidden + column;
        if (call.command.output)
            *(uint2 *)((T *)call.command.output + at) =
                make_uint2(ptx_pack<T>(sum[0], sum[1]), ptx_pack<T>(sum[2], sum[3]));
        else
            *(float4 *)(call.command.partial + at) = make_float4(sum[0], sum[1], sum[2], sum[3]);
    }
}

// All of the block's part of gate, down and the sums.
template <typename T>
static __device__ __forceinline__ void few_call_products(const few_call_t &call, unsigned char *ring,
                                                         ffn_cuda_queue_t *queue, uint64_t turn,
                                                         uint64_t policy)
{
    const ffn_cuda_lane_t *lane = &call.lane;
    const ffn_cuda_part_t *parts = call.layer.parts;
    const void *input = call.command.input;
    const uint32_t rows = call.command.rows, act = call.signature.activation;
    const uint32_t number = few_first_item(blockIdx.x, gridDim.x, threadIdx.x / 32);
    {
        const few_plan_t gate =
            few_plan_make(&call.signature, rows, lane->workspace.tile_count, 0);
        if (number < gate.items)
            few_items<T>(gate, lane, input, parts, act,
                         few_source_at(gate, lane, input, parts, number), number, false, ring,
                         policy);
    }
    const few_plan_t down = few_plan_make(&call.signature, rows, lane->workspace.tile_count, 1);
    few_source_t first = {};
    if (number < down.items) {
        first = few_source_at(down, lane, input, parts, number);
        few_weights_begin(first, ring, policy);
    }
    few_meet(call, 3, &queue->acted, turn * gridDim.x);
    if (number < down.items)
        few_items<T>(down, lane, input, parts, act, first, number, true, ring, policy);
    few_meet(call, 5, &queue->multiplied, turn * gridDim.x);
    few_sum<T>(call);
}

static __device__ __forceinline__ void few_resident(few_call_t &call, unsigned char *memory,
                                                    ffn_cuda_queue_t *queue)
{
    const uint64_t policy = ptx_policy_stream();
    unsigned char *ring = memory + threadIdx.x / 32 * FEW_RING_BYTES;
    uint64_t turn = 0;
#pragma unroll 1
    for (uint64_t sequence = 1;; sequence++) {
        if (threadIdx.x < 32) {
            const bool stays = command_wait(call.command, call.began_ns, queue, sequence);
            if (threadIdx.x == 0)
                call.leave = !stays;
        }
        __syncthreads(); // all are done with the Invocation before
        if (call.leave)
            break;
        few_router_t &route = *(few_router_t *)memory;
        few_call_read(call, route);
        const uint32_t rows = call.command.rows;
        if (rows > FEW_ROWS_MOST)
            __trap();
        if (rows) {
            turn++;
            __syncthreads();
            few_call_route(call, route, queue, turn);
            if (call.signature.dtype == FFN_CUDA_BF16)
                few_call_products<__nv_bfloat16>(call, ring, queue, turn, policy);
            else
                few_call_products<__half>(call, ring, queue, turn, policy);
        }
        // Warp 0 waits for the next command while warp 1 ends this one.
        command_end_t end = {};
        if (threadIdx.x == 32) {
            end.answer = call.command.answer;
            end.answer_value = call.command.answer_value;
            end.done = call.command.done;
            end.done_value = call.command.done_value;
            end.about = call.command.about;
            end.began_ns = call.began_ns;
            end.meeting = call.lane.workspace.meeting;
            end.trace = call.lane.workspace.trace;
            end.rows = rows;
            end.capacity = FEW_ROWS_MOST;
        }
        __syncthreads(); // the rows are written, the command may be written over
        if (threadIdx.x == 32)
            command_end(end, queue, sequence);
        __syncwarp();
    }
    ptx_copies_wait<0>();
}
#endif
