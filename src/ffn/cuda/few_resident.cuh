// SPDX-License-Identifier: MIT
// The resident kernel of few rows: the steps of few.cu within one cooperative launch, a command after the
// other, without the host.
//
//   router    units over all blocks: logits; once a group of rows has all, its blocks choose, a row a warp.
//             The last one plans, all wait for that
//   products  items of gate and behind them those of down, in one stream: a warp takes the next one when it
//             is done, since multiprocessors do not get equal parts of the memory's rate. Down waits for the
//             activations of its own tile, which were written long ago
//   sum       of a row's pairs, once all products are written: four columns a thread
//
// Between two commands the layer that usually follows is read and its router brought to L2.
//
// Blocks meet by words that are zero before a command, that only grow, or that name the command. What other
// blocks write while the kernel runs is read past L1, or after an acquire of the same block, which empties it.
// Nothing waits without a partner that is already running: the launch is cooperative. An item that waits was
// taken after the one that it waits for, and items of gate wait for nothing.
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
    // What usually follows, read ahead; its address is `next_at`.
    const ffn_cuda_layer_t *next_at;
    ffn_cuda_layer_t next;
    ffn_cuda_signature_t next_signature;
    few_plan_t plans[2];
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

// All threads, once call.command is there: the Lane, the layer. Then a barrier of the block.
static __device__ __forceinline__ void few_call_read(few_call_t &call, few_router_t &route)
{
    const uint32_t thread = threadIdx.x, lane_words = sizeof(ffn_cuda_lane_t) / 8;
    const uint32_t layer_words = sizeof(ffn_cuda_layer_t) / 8;
    const ffn_cuda_layer_t *layer = call.command.layers + call.command.layer;
    const bool known = layer == call.next_at;
    static_assert(lane_words + layer_words <= FEW_THREADS, "a word a thread");
    if (thread < lane_words)
        ((unsigned long long *)&call.lane)[thread] =
            __ldcg((const unsigned long long *)call.command.lane + thread);
    else if (thread - lane_words < layer_words)
        ((unsigned long long *)&call.layer)[thread - lane_words] =
            known ? ((const unsigned long long *)&call.next)[thread - lane_words]
                  : __ldcg((const unsigned long long *)layer + thread - lane_words);
    __syncthreads();
    const ffn_cuda_signature_t *signature = known ? &call.next_signature : call.layer.signature;
    if (thread < sizeof(call.signature) / 4)
        ((uint32_t *)&call.signature)[thread] = ((uint32_t *)&route.signature)[thread] =
            ((const uint32_t *)signature)[thread];
    if (thread == 0)
        few_mark(call, 0);
}

// Router and plan; returns once the plan is there. turn: Invocations with rows so far, this one included.
static __device__ __forceinline__ void few_call_route(few_call_t &call, few_router_t &route,
                                                      ffn_cuda_queue_t *queue, uint64_t turn)
{
    const ffn_cuda_signature_t &s = call.signature;
    const uint32_t rows = call.command.rows;
    const uint32_t groups = few_parts(rows, FEW_ROUTE_ROWS);
    const uint32_t tiles = few_parts(s.experts, FEW_ROUTE_EXPERTS), units = tiles * groups;
    uint64_t *const arrived = call.lane.workspace.arrived;
    bool plans = units == 0 && blockIdx.x == 0;
    // All logits first, so that nobody waits for a unit behind one that waits.
#pragma unroll 1
    for (uint32_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
        few_unit_logits(route, &call.lane, &call.layer, call.command.input, rows, unit);
        __syncthreads();
        if (threadIdx.x == 0)
            ptx_add_release(arrived + 1 + unit / tiles, (uint64_t)1);
    }
    if (threadIdx.x == 0)
        few_mark(call, 1);
#pragma unroll 1
    for (uint32_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
        if (threadIdx.x == 0)
            while (ptx_load_acquire(arrived + 1 + unit / tiles) < tiles)
                ;
        __syncthreads();
        few_choose(route, &call.lane, call.layer.bias, unit / tiles * FEW_ROUTE_ROWS, rows,
                   call.lane.workspace.products, unit % tiles, tiles);
        __syncthreads();
        if (threadIdx.x == 0)
            route.last = ptx_add_acq_rel(arrived, 1) + 1 == units;
        __syncthreads();
        plans = route.last;
    }
    if (plans) { // all have chosen, so nobody looks at the counters any more
        few_plan(route, &call.lane, &call.layer, rows);
        if (threadIdx.x <= groups)
            arrived[threadIdx.x] = 0;
        if (threadIdx.x == 32)
            queue->taken = 0; // whoever took of it has ended the command before
        __syncthreads();
        if (threadIdx.x == 0)
            ptx_store_release(&queue->planned,
                              turn << 24 | route.tiles[1] << 16 | route.tiles[0]);
    }
    if (threadIdx.x < 2) {
        uint64_t planned;
        do
            planned = ptx_load_acquire(&queue->planned);
        while (planned >> 24 != turn);
        const uint32_t count[2] = {(uint32_t)planned & 0xffff, (uint32_t)planned >> 16 & 0xff};
        call.plans[threadIdx.x] = few_plan_make(&s, rows, count, threadIdx.x);
        if (threadIdx.x == 0)
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

// All of the block's part of the products and the sums.
template <typename T>
static __device__ __forceinline__ void few_call_products(const few_call_t &call, unsigned char *ring,
                                                         ffn_cuda_queue_t *queue, uint64_t turn,
                                                         uint64_t policy)
{
    few_stream_t stream;
    stream.plans = call.plans;
    stream.count = 2;
    stream.meeting = 1;
    stream.taken = &queue->taken;
    stream.workspace = &call.lane.workspace;
    stream.input = call.command.input;
    stream.parts = call.layer.parts;
    stream.activation = call.signature.activation;
    few_items<T>(stream, ring, policy);
    if (threadIdx.x == 32)
        few_mark(call, 3);
    __syncthreads();
    if (threadIdx.x == 0) {
        few_mark(call, 4);
        ptx_add_release(&queue->multiplied, (uint64_t)1);
        while (ptx_load_acquire(&queue->multiplied) < turn * gridDim.x)
            ;
        few_mark(call, 5);
    }
    __syncthreads();
    few_sum<T>(call);
}

#define FEW_NEXT_FIRST 64u // the first thread that looks ahead: of warp 2

// Threads from FEW_NEXT_FIRST on, between two commands: reads what usually follows, and brings to L2 what
// that begins with.
static __device__ __forceinline__ void few_next(few_call_t &call, const ffn_cuda_layer_t *layer)
{
    const uint32_t thread = threadIdx.x - FEW_NEXT_FIRST;
    const ffn_cuda_signature_t *s = layer->signature;
    const uint64_t bytes =
        (uint64_t)s->experts * s->hidden * (s->router_dtype == FFN_CUDA_F32 ? 4 : 2);
    if (thread < sizeof(ffn_cuda_layer_t) / 8)
        ((unsigned long long *)&call.next)[thread] = ((const unsigned long long *)layer)[thread];
    if (thread < sizeof(*s) / 4)
        ((uint32_t *)&call.next_signature)[thread] = ((const uint32_t *)s)[thread];
    if (thread == 0)
        call.next_at = layer;
    for (uint64_t at = ((uint64_t)blockIdx.x * (FEW_THREADS - FEW_NEXT_FIRST) + thread) * 1024;
         at < bytes; at += (uint64_t)gridDim.x * (FEW_THREADS - FEW_NEXT_FIRST) * 1024)
        ptx_prefetch((const char *)layer->router + at,
                     (uint32_t)(bytes - at < 1024 ? bytes - at : 1024));
}

static __device__ __forceinline__ void few_resident(few_call_t &call, unsigned char *memory,
                                                    ffn_cuda_queue_t *queue)
{
    const uint64_t policy = ptx_policy_stream();
    unsigned char *ring = memory + threadIdx.x / 32 * FEW_RING_BYTES;
    uint64_t turn = 0;
    if (threadIdx.x == 0)
        call.next_at = NULL;
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
        if (threadIdx.x == 32)
            end = command_end_of(call.command, call.began_ns, call.lane.workspace.meeting,
                                 call.lane.workspace.trace, FEW_ROWS_MOST);
        const ffn_cuda_layer_t *next = NULL;
        if (threadIdx.x >= FEW_NEXT_FIRST && call.layer.next != FFN_CUDA_NO_LAYER)
            next = call.command.layers + call.layer.next;
        __syncthreads(); // the rows are written, the command may be written over
        if (threadIdx.x == 32)
            command_end(end, queue, &queue->answered, sequence);
        if (next)
            few_next(call, next);
        __syncwarp();
    }
    ptx_copies_wait<0>();
}
#endif
