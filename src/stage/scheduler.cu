// SPDX-License-Identifier: MIT
// The resident scheduler of an FFN device: one block.
//
//   warp 0   its lanes look at the lines; lane 0 takes the steps (stage/scheduler_steps.h)
//   warp 1   watches our process's life word, so that no other warp waits for the bus
//   others   do chunks of jobs: rows to several consumers, reductions, the echo
//
// Warp 0 never waits: a chunk is posted and looked for in later turns. All polled words lie in this
// device's memory.
#include "stage/scheduler_steps.h"
#include "transport/cuda_rows.cuh"

#define STAGE_HELPERS   (STAGE_THREADS - 64u)
#define STAGE_WATCH_NS  20000u
#define STAGE_HELPER_NS 40u

// Between warp 0 and the helpers, in shared memory.
struct stage_block_t {
    uint64_t posted; // number of the chunk to do
    uint32_t ended;  // helper warps that are through with it
    uint32_t leave;
    uint32_t changed[STAGE_LINES / 32]; // in memory, since it is indexed
};

template <typename T> using block_ref = cuda::atomic_ref<T, cuda::thread_scope_block>;

static __device__ void watch(stage_table_t *table, const life_page_t *life, stage_block_t *block)
{
    if (threadIdx.x % 32 != 0)
        return;
    while (!block_ref<uint32_t>(block->leave).load(cuda::memory_order_acquire)) {
        if (life && life_word_look(&life->word[table->own_life]))
            PROTOCOL_STORE_RELEASE(&table->ended, 1u);
        __nanosleep(STAGE_WATCH_NS);
    }
}

static __device__ void help(const stage_scheduler_t *s, stage_block_t *block)
{
    const uint32_t helper = threadIdx.x - 64;
    uint64_t seen = 0;
    for (;;) {
        // One lane polls; what it acquired is visible to its warp behind the barrier.
        uint32_t leave = 0;
        uint64_t posted = seen;
        if (threadIdx.x % 32 == 0) {
            leave = block_ref<uint32_t>(block->leave).load(cuda::memory_order_acquire);
            posted = block_ref<uint64_t>(block->posted).load(cuda::memory_order_acquire);
        }
        leave = __shfl_sync(0xffffffffu, leave, 0);
        posted = __shfl_sync(0xffffffffu, (unsigned long long)posted, 0);
        if (leave)
            return;
        if (posted == seen) {
            __nanosleep(STAGE_HELPER_NS);
            continue;
        }
        seen = posted;
        __syncwarp();
        stage_job_run(&s->chunk.job, s->chunk.begin, s->chunk.end, helper, STAGE_HELPERS);
        __syncwarp();
        if (threadIdx.x % 32 == 0)
            block_ref<uint32_t>(block->ended).fetch_add(1u, cuda::memory_order_acq_rel);
    }
}

static __device__ void schedule(stage_scheduler_t *s, stage_table_t *table, stage_block_t *block)
{
    const uint32_t lane = threadIdx.x % 32;
    if (lane == 0)
        stage_scheduler_begin(s, table);
    __syncwarp();
    for (;;) {
        uint32_t changed[STAGE_LINES / 32];
        // All loads of a turn are in flight together.
#pragma unroll
        for (uint32_t word = 0; word < STAGE_LINES / 32; word++) {
            const uint32_t index = word * 32 + lane;
            changed[word] = index < s->line_count && stage_scheduler_line_changed(s, index);
        }
        uint32_t ended = s->dispatch && stage_scheduler_lane_ended(s, lane);
#pragma unroll
        for (uint32_t word = 0; word < STAGE_LINES / 32; word++)
            changed[word] = __ballot_sync(0xffffffffu, changed[word]);
#pragma unroll
        for (uint32_t word = 0; word < STAGE_LINES / 32; word++)
            if (lane == 0)
                block->changed[word] = changed[word];
        ended = __ballot_sync(0xffffffffu, ended);
        int on = 1;
        if (lane == 0) {
            const uint64_t start = transport_clock_ns();
            if (s->chunk_busy &&
                block_ref<uint32_t>(block->ended).load(cuda::memory_order_acquire) ==
                    STAGE_HELPERS / 32)
                stage_scheduler_chunk_done(s, start);
            on = stage_scheduler_turn(s, block->changed, ended, start);
            if (on && stage_scheduler_chunk(s)) {
                block_ref<uint32_t>(block->ended).store(0u, cuda::memory_order_relaxed);
                block_ref<uint64_t>(block->posted)
                    .store(s->chunk.number, cuda::memory_order_release);
            }
            const uint64_t took = transport_clock_ns() - start;
            if (took > s->counts.longest_turn_ns)
                s->counts.longest_turn_ns = took;
        }
        if (!__shfl_sync(0xffffffffu, on, 0))
            break;
        __syncwarp();
    }
    if (lane == 0) {
        s->counts.turns = s->turn;
        table->counts = s->counts;
        block_ref<uint32_t>(block->leave).store(1u, cuda::memory_order_release);
    }
}

extern "C" __global__ void __launch_bounds__(STAGE_THREADS)
    stage_scheduler(stage_table_t *table, const life_page_t *life)
{
    __shared__ stage_scheduler_t scheduler;
    __shared__ stage_block_t block;
    if (threadIdx.x == 0) {
        block.posted = 0;
        block.ended = 0;
        block.leave = 0;
        PROTOCOL_STORE_RELEASE(&table->running, 1u);
    }
    __syncthreads();
    if (threadIdx.x < 32)
        schedule(&scheduler, table, &block);
    else if (threadIdx.x < 64)
        watch(table, life, &block);
    else
        help(&scheduler, &block);
    __syncthreads();
    if (threadIdx.x == 0)
        PROTOCOL_STORE_RELEASE(&table->running, 0u);
}
