// SPDX-License-Identifier: MIT
// Device code of the FFN tests and benchmarks: seeded values, and a writer of the resident kernel's
// queue that waits for each answer, as a Coordinator does.
#include "ffn/cuda/ptx.cuh"
#include "ffn/cuda/tables.h"
#include "ffn_device.h"

// values[i] = ffn_kit_value(seed, i) * scale, of `dtype`.
extern "C" __global__ void test_fill(void *values, uint64_t count, uint64_t seed, float scale,
                                     uint32_t dtype)
{
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count;
         i += (uint64_t)gridDim.x * blockDim.x) {
        const float value = ffn_kit_value(seed, i) * scale;
        if (dtype == FFN_CUDA_BF16)
            ((__nv_bfloat16 *)values)[i] = __float2bfloat16_rn(value);
        else if (dtype == FFN_CUDA_F16)
            ((__half *)values)[i] = __float2half_rn(value);
        else
            ((float *)values)[i] = value;
    }
}

// Posts commands `first` + 1 ... `first` + count, of the Lanes in turn; waits for each answer when
// `wait` is set, else for the last one only. samples[i]: nanoseconds from post to answer. One thread.
extern "C" __global__ void test_post(ffn_cuda_queue_t *queue, ffn_cuda_lane_t **lanes,
                                     uint32_t lane_count, uint64_t first, uint32_t count,
                                     uint32_t pause_ns, uint64_t *answer, uint32_t *samples)
{
    for (uint32_t i = 0; i < count; i++) {
        const uint64_t sequence = first + i + 1;
        ffn_cuda_command_t *entry = &queue->entries[(sequence - 1) % FFN_CUDA_QUEUE_ENTRIES];
        const uint64_t before = ptx_load_acquire_system(&entry->sequence);
        uint64_t start, end;
        entry->lane = lanes[(sequence - 1) % lane_count];
        entry->answer = answer;
        entry->answer_value = sequence;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
        if (ptx_swap_if_system(&entry->sequence, before, sequence) != before)
            return; // the kernel has left
        while (ptx_load_acquire_system(answer) != sequence)
            ;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(end));
        if (samples)
            samples[i] = (uint32_t)(end - start);
        do
            asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
        while (start - end < pause_ns);
    }
}

// Posts the command that ends the lease.
extern "C" __global__ void test_leave(ffn_cuda_queue_t *queue, uint64_t sequence)
{
    ffn_cuda_command_t *entry = &queue->entries[(sequence - 1) % FFN_CUDA_QUEUE_ENTRIES];
    const uint64_t before = ptx_load_acquire_system(&entry->sequence);
    entry->lane = NULL;
    ptx_swap_if_system(&entry->sequence, before, sequence);
}

extern "C" __global__ void test_stop(ffn_cuda_queue_t *queue)
{
    *(volatile uint32_t *)&queue->stop = 1;
}
