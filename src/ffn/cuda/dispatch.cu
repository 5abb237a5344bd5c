// SPDX-License-Identifier: MIT
// The launches around a Lane's products: gathering inputs, cutting an Invocation into pieces,
// delivering the answer; and those of loading: dummy weights, the sum over a shard, the device's clock.
// Nothing here waits.
#include "ffn/cuda/dispatch_steps.h"
#include "ffn/cuda/ptx.cuh"
#include "ffn/dummy.h"

#define DISPATCH_THREADS 256u

static __device__ __forceinline__ uint64_t clock_ns()
{
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// All threads of the grid; four copies of 16 bytes are under way at once in each.
static __device__ __forceinline__ void slice_copy(const ffn_cuda_slice_t &slice)
{
    const uint64_t step = (uint64_t)gridDim.x * DISPATCH_THREADS, count = slice.bytes / 16;
    const uint4 *from = (const uint4 *)slice.from;
    uint4 *to = (uint4 *)slice.to;
    uint64_t i = (uint64_t)blockIdx.x * DISPATCH_THREADS + threadIdx.x;
    for (; i + 3 * step < count; i += 4 * step) {
        const uint4 a = ptx_load_l2(from + i), b = ptx_load_l2(from + i + step);
        const uint4 c = ptx_load_l2(from + i + 2 * step), d = ptx_load_l2(from + i + 3 * step);
        to[i] = a, to[i + step] = b, to[i + 2 * step] = c, to[i + 3 * step] = d;
    }
    for (; i < count; i += step)
        to[i] = ptx_load_l2(from + i);
}

extern "C" __global__ void __launch_bounds__(DISPATCH_THREADS)
    ffn_gather(const ffn_cuda_lane_t *lane, const ffn_cuda_answer_t *answer, ffn_cuda_run_t *run)
{
    if (blockIdx.x == 0 && threadIdx.x == 0)
        run->began_ns = clock_ns();
    const uint32_t sources = min(answer->source_count, FFN_CUDA_MAX_CONSUMERS);
    for (uint32_t i = 0; i < sources; i++)
        slice_copy(ffn_cuda_source_slice(lane, &answer->sources[i]));
}

extern "C" __global__ void ffn_piece(const ffn_cuda_lane_t *lane, ffn_cuda_lane_t *piece,
                                     uint32_t first, uint32_t most)
{
    ffn_cuda_piece_set(lane, piece, first, most);
}

// The last block to arrive publishes: every block's rows are then visible to the whole system.
extern "C" __global__ void __launch_bounds__(DISPATCH_THREADS)
    ffn_publish(const ffn_cuda_publishing_t p)
{
    __shared__ uint32_t last;
    const uint32_t consumers = min(p.answer->consumer_count, FFN_CUDA_MAX_CONSUMERS);
    for (uint32_t i = 0; i < consumers; i++)
        slice_copy(ffn_cuda_consumer_slice(p.lane, &p.answer->consumers[i]));
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0)
        last = ptx_add_acq_rel(&p.run->arrived, 1) + 1 == gridDim.x;
    __syncthreads();
    if (last && threadIdx.x == 0) {
        p.run->arrived = 0; // grids of different Capacities differ; a Lane's launches do not overlap
        __threadfence_system();
        ffn_cuda_publish_words(&p, clock_ns());
    }
}

// ---- loading ---------------------------------------------------------------------------------------
template <typename T> static __device__ __forceinline__ T fill_cast(float value)
{
    return ptx_from_float<T>(value);
}
template <> __device__ __forceinline__ float fill_cast<float>(float value)
{
    return value;
}

// to [padded_rows][pitch]: rows [first_row, + rows) and columns [first_column, + columns) of the whole
// matrix, zeros around them.
template <typename T>
static __device__ __forceinline__ void fill_all(T *to, uint32_t padded_rows, uint32_t pitch,
                                                uint32_t rows, uint32_t columns, uint64_t first_row,
                                                uint64_t first_column, uint64_t whole_columns,
                                                uint64_t seed, float scale)
{
    const uint64_t count = (uint64_t)padded_rows * pitch, step = (uint64_t)gridDim.x * DISPATCH_THREADS;
    for (uint64_t i = (uint64_t)blockIdx.x * DISPATCH_THREADS + threadIdx.x; i < count; i += step) {
        const uint64_t row = i / pitch, column = i % pitch;
        const uint64_t element = (first_row + row) * whole_columns + first_column + column;
        to[i] = fill_cast<T>(row < rows && column < columns ? ffn_dummy_value(seed, element, scale)
                                                            : 0.0f);
    }
}

extern "C" __global__ void __launch_bounds__(DISPATCH_THREADS)
    ffn_fill(void *to, uint32_t dtype, uint32_t padded_rows, uint32_t pitch, uint32_t rows,
             uint32_t columns, uint64_t first_row, uint64_t first_column, uint64_t whole_columns,
             uint64_t seed, float scale)
{
    if (dtype == FFN_CUDA_BF16)
        fill_all((__nv_bfloat16 *)to, padded_rows, pitch, rows, columns, first_row, first_column,
                 whole_columns, seed, scale);
    else if (dtype == FFN_CUDA_F16)
        fill_all((__half *)to, padded_rows, pitch, rows, columns, first_row, first_column,
                 whole_columns, seed, scale);
    else
        fill_all((float *)to, padded_rows, pitch, rows, columns, first_row, first_column,
                 whole_columns, seed, scale);
}

// *sum += over all 8-byte words of a function of word and place; the order does not matter.
extern "C" __global__ void __launch_bounds__(DISPATCH_THREADS)
    ffn_digest(const uint64_t *words, uint64_t count, uint64_t first, uint64_t *sum)
{
    const uint64_t step = (uint64_t)gridDim.x * DISPATCH_THREADS;
    uint64_t mine = 0;
#pragma unroll 4
    for (uint64_t i = (uint64_t)blockIdx.x * DISPATCH_THREADS + threadIdx.x; i < count; i += step)
        mine += ffn_dummy_mix(__ldcs((const unsigned long long *)words + i) ^
                              ffn_dummy_mix(first + i + 1));
    for (uint32_t d = 16; d; d /= 2)
        mine += __shfl_xor_sync(0xffffffffu, mine, d);
    if (threadIdx.x % 32 == 0)
        atomicAdd((unsigned long long *)sum, (unsigned long long)mine);
}

extern "C" __global__ void ffn_clock(uint64_t *now)
{
    ptx_store_release_system(now, clock_ns());
}
