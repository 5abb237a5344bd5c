// SPDX-License-Identifier: MIT
// A layer of up to FEW_ROWS_MOST rows, which is a matter of streaming the chosen experts' weights once:
// router and plan, gate and up with the activation, down, and the sum of the pairs. Same workspace and same
// results, but for rounding, as the grouped products (grouped.cu), whose tiles of 128 rows and 256 weight
// rows are too coarse here.
//
// Two ways, with the same bits: launches one after the other, which never wait for others, the last one
// ffn_bulk_reduce(); or phases of a resident kernel (few_resident.cuh).
#include "ffn/cuda/few_products.cuh"
#include "ffn/cuda/few_resident.cuh"
#include "ffn/cuda/few_route.cuh"

extern "C" __global__ void __launch_bounds__(FEW_ROUTE_THREADS) ffn_few_route(
    const ffn_cuda_lane_t *lane)
{
    __shared__ few_route_t<FEW_ROUTE_THREADS / 32> sh;
    few_route(sh, lane);
}

template <typename T>
static __device__ __forceinline__ void few(const ffn_cuda_lane_t *lane, uint32_t down)
{
    const ffn_cuda_layer_t *layer = lane_layer(lane);
    const uint32_t rows = min(lane->rows, FEW_ROWS_MOST);
    const few_plan_t plan =
        few_plan_make(layer->signature, rows, lane->workspace.tile_count, down);
    few_stream_t stream;
    stream.plans = &plan;
    stream.count = 1;
    stream.meeting = 0;
    stream.taken = NULL;
    stream.workspace = &lane->workspace;
    stream.input = lane->input;
    stream.parts = layer->parts;
    stream.activation = layer->signature->activation;
    few_items<T>(stream, ptx_dynamic_shared() + threadIdx.x / 32 * FEW_RING_BYTES,
                 ptx_policy_stream());
}

extern "C" __global__ void __launch_bounds__(FEW_THREADS, 1)
    ffn_few_bf16(const ffn_cuda_lane_t *lane, uint32_t down)
{
    few<__nv_bfloat16>(lane, down);
}
extern "C" __global__ void __launch_bounds__(FEW_THREADS, 1)
    ffn_few_f16(const ffn_cuda_lane_t *lane, uint32_t down)
{
    few<__half>(lane, down);
}

extern "C" __global__ void __launch_bounds__(FEW_THREADS, 1)
    ffn_few_resident(ffn_cuda_queue_t *queue)
{
    __shared__ few_call_t call;
    few_resident(call, ptx_dynamic_shared(), queue);
}
