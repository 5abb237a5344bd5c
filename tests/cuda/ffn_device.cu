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
        const ffn_cuda_lane_t *lane = lanes[(sequence - 1) % lane_count];
        entry->lane = lanes[(sequence - 1) % lane_count];
        entry->layers = lane->layers;
        entry->input = lane->input;
        entry->output = lane->output;
        entry->partial = lane->partial;
        entry->layer = lane->layer;
        entry->rows = lane->rows;
        entry->lane_number = (uint32_t)((sequence - 1) % lane_count);
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

// Two errors for compute-sanitizer to find: a race in shared memory between two warps, and a write of
// words[at], which is past the end. Two warps.
extern "C" __global__ void test_planted(uint32_t *words, uint32_t at)
{
    __shared__ uint32_t passed[64];
    passed[threadIdx.x] = threadIdx.x + at;
    words[at] = passed[threadIdx.x ^ 32];
}

// ---- how fast memory can be read at all ----------------------------------------------------------
// Every block reads its part of `bytes` and uses nothing: pieces next to each other, or, interleaved,
// pieces a grid apart. 192 KiB of a multiprocessor are under way.
#define READ_RING   (192u * 1024u)
#define READ_COPIERS 4u

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// Bulk copies of `piece` bytes, started by one thread in each of four warps.
extern "C" __global__ void __launch_bounds__(READ_COPIERS * 32, 1)
    test_read_bulk(const char *from, uint64_t bytes, uint32_t piece, uint32_t interleaved)
{
    extern __shared__ __align__(128) unsigned char ring[];
    __shared__ uint64_t full[READ_COPIERS][READ_RING / READ_COPIERS / 1024];
    const uint32_t warp = threadIdx.x / 32, stages = READ_RING / READ_COPIERS / piece;
    const uint64_t count = bytes / piece / gridDim.x;
    const uint64_t policy = ptx_policy_stream();
    if (threadIdx.x % 32)
        return;
    for (uint32_t i = 0; i < stages; i++)
        ptx_barrier_init(ptx_shared(&full[warp][i]), 1);
    ptx_barrier_init_fence();
    uint64_t number = 0;
    for (uint64_t i = warp; i < count + stages * READ_COPIERS; i += READ_COPIERS, number++) {
        const uint32_t slot = number % stages, barrier = ptx_shared(&full[warp][slot]);
        const uint64_t at = interleaved ? i * gridDim.x + blockIdx.x : blockIdx.x * count + i;
        if (number >= stages && i - stages * READ_COPIERS < count)
            ptx_barrier_wait(barrier, (number / stages - 1) & 1);
        if (i >= count)
            continue;
        ptx_barrier_expect(barrier, piece);
        ptx_bulk_load_stream(ptx_shared(ring + (warp * stages + slot) * piece), from + at * piece,
                             piece, barrier, policy);
    }
}
#else
extern "C" __global__ void test_read_bulk(const char *from, uint64_t bytes, uint32_t piece,
                                          uint32_t interleaved)
{
    __trap();
}
#endif

// Copies of 16 bytes a lane: 8 warps, three units of 8 KiB in each; a unit is `rows` rows of
// 8192 / rows bytes, `pitch` bytes apart.
extern "C" __global__ void __launch_bounds__(256, 1)
    test_read_async(const char *from, uint64_t bytes, uint32_t rows, uint32_t pitch)
{
    extern __shared__ __align__(128) unsigned char ring[];
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, length = 8192 / rows;
    const uint64_t policy = ptx_policy_stream();
    // A panel is `rows` rows of `pitch` bytes; its units go round the warps.
    const uint64_t panel = (uint64_t)rows * pitch, panels = bytes / panel / gridDim.x;
    const uint32_t units = pitch / length;
    uint32_t slot = 0;
    for (uint64_t p = 0; p < panels; p++)
        for (uint32_t unit = warp; unit < units; unit += 8) {
            const char *at = from + (blockIdx.x * panels + p) * panel + unit * length;
            const uint32_t to = ptx_shared(ring + (warp * 3 + slot) * 8192);
#pragma unroll
            for (uint32_t i = 0; i < 16; i++) {
                const uint32_t byte = i * 512 + lane * 16;
                ptx_copy_sixteen(to + byte, at + (uint64_t)(byte / length) * pitch + byte % length,
                                 16, policy);
            }
            ptx_copies_commit();
            ptx_copies_wait<2>();
            __syncwarp();
            slot = slot == 2 ? 0 : slot + 1;
        }
    ptx_copies_wait<0>();
}

// Loads of 16 bytes a thread, eight at once, a grid apart; 1024 threads a multiprocessor.
extern "C" __global__ void __launch_bounds__(512, 2)
    test_read_load(const uint4 *from, uint64_t bytes, uint32_t *sink)
{
    const uint64_t step = (uint64_t)gridDim.x * blockDim.x, count = bytes / 16;
    uint32_t mixed = 0;
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i + 7 * step < count;
         i += 8 * step) {
        uint4 v[8];
#pragma unroll
        for (int j = 0; j < 8; j++)
            v[j] = __ldcs(from + i + j * step);
#pragma unroll
        for (int j = 0; j < 8; j++)
            mixed ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    if (mixed == 0x12345678)
        *sink = mixed;
}
