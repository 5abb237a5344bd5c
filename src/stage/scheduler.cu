// SPDX-License-Identifier: MIT
// The resident scheduler of an FFN device: one block.
//
//   warp 0   its lanes look at the lines; lane 0 takes the steps (stage/scheduler_steps.h)
//   warp 1   watches our process's life word, so that no other warp waits for the bus
//   others   do chunks of jobs: rows to several consumers, reductions, the echo
//
// Warp 0 never waits: a chunk is posted and looked for in later turns; what is small it does
// itself, since a warp that has to be told begins later than it would be through. A turn in which
// nothing has changed is one load of each line and a few instructions. All polled words lie in this
// device's memory.
#include "stage/scheduler_steps.h"
#include "transport/cuda_rows.cuh"

#define STAGE_HELPERS  (STAGE_THREADS - 64u)
#define STAGE_WATCH_NS 20000u
#define STAGE_POSTED   1 // the hardware barrier at which helpers sleep

// Between warp 0 and the helpers, in shared memory.
struct stage_block_t {
    uint32_t ended; // helper warps that are through with the chunk
    uint32_t leave;
    uint32_t changed[STAGE_LINES / 32]; // in memory, since it is indexed
    // warp 0's own: kept here, since a register spilled would be a trip to memory in each turn
    uint32_t own_elements, notes;
    uint64_t seen_ns, begun_ns; // of the line, of its job
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

// Warp 0 arrives, and goes on; the helpers sleep there. It arrives once for each chunk and once for
// the end, and never again before all helpers have said that they are through with the chunk.
static __device__ __forceinline__ void helpers_wake()
{
    asm volatile("barrier.cta.arrive %0, %1;" ::"n"(STAGE_POSTED), "n"(STAGE_HELPERS + 32)
                 : "memory");
}
static __device__ __forceinline__ void helpers_sleep()
{
    asm volatile("barrier.cta.sync %0, %1;" ::"n"(STAGE_POSTED), "n"(STAGE_HELPERS + 32)
                 : "memory");
}

static __device__ void help(const stage_scheduler_t *s, stage_block_t *block)
{
    const uint32_t helper = threadIdx.x - 64;
    for (;;) {
        helpers_sleep();
        if (block_ref<uint32_t>(block->leave).load(cuda::memory_order_acquire))
            return;
        stage_job_run(&s->chunk.job, s->chunk.begin, s->chunk.end, helper, STAGE_HELPERS);
        __syncwarp();
        if (threadIdx.x % 32 == 0)
            block_ref<uint32_t>(block->ended).fetch_add(1u, cuda::memory_order_acq_rel);
    }
}

// The chunk is through: publishes what it has to, by lane 0.
static __device__ __noinline__ void chunk_end(stage_scheduler_t *s, const stage_block_t *block)
{
    const uint64_t now = transport_clock_ns();
    const bool whole = s->chunk.begin == 0;
    stage_scheduler_chunk_done(s, now);
    if (!block->notes || !whole || s->work[s->chunk.instance].phase == STAGE_JOB)
        return;
    const uint64_t end = transport_clock_ns();
    stage_notes_t *noted = &s->table->noted;
    noted->count++;
    noted->taken_ns += block->begun_ns - block->seen_ns;
    noted->job_ns += now - block->begun_ns;
    noted->answer_ns += end - now;
    if (end - block->seen_ns > noted->longest_ns)
        noted->longest_ns = end - block->seen_ns;
}

static __device__ void schedule(stage_scheduler_t *s, stage_table_t *table, stage_block_t *block)
{
    const uint32_t lane = threadIdx.x % 32;
    enum { LEAVE = 0, ON = 1, OWN = 2, HELPERS = 4 };
    if (lane == 0)
        stage_scheduler_begin(s, table);
    __syncwarp();
    for (;;) {
        uint32_t changed[STAGE_LINES / 32], any = 0;
        const uint32_t lines = s->line_count;
        // Up to 32 lines are one trip to memory.
#pragma unroll
        for (uint32_t word = 0; word < STAGE_LINES / 32; word++) {
            const uint32_t index = word * 32 + lane;
            changed[word] =
                word * 32 < lines && index < lines && stage_scheduler_line_changed(s, index);
        }
        uint32_t ended = s->dispatch && stage_scheduler_lane_ended(s, lane);
#pragma unroll
        for (uint32_t word = 0; word < STAGE_LINES / 32; word++) {
            changed[word] = __ballot_sync(0xffffffffu, changed[word]);
            any |= changed[word];
        }
        ended = __ballot_sync(0xffffffffu, ended);
        __syncwarp(); // what a lane has acquired, lane 0 may read
        int next = ON;
        if (lane == 0) {
            const bool through =
                s->chunk_busy &&
                block_ref<uint32_t>(block->ended).load(cuda::memory_order_acquire) ==
                    STAGE_HELPERS / 32;
            if (through)
                chunk_end(s, block);
            if (!any && !ended && !through && stage_scheduler_quiet(s)) {
                s->turn++;
            } else {
                const uint64_t start = transport_clock_ns();
                if (any)
                    block->seen_ns = start;
#pragma unroll
                for (uint32_t word = 0; word < STAGE_LINES / 32; word++)
                    block->changed[word] = changed[word];
                next = stage_scheduler_turn(s, block->changed, ended, start) ? ON : LEAVE;
                if (next && stage_scheduler_chunk(s)) {
                    const bool own = s->chunk.end - s->chunk.begin <= block->own_elements &&
                                     stage_job_is_plain(&s->chunk.job, s->chunk.end);
                    block_ref<uint32_t>(block->ended).store(0u, cuda::memory_order_release);
                    next |= own ? OWN : HELPERS;
                    if (block->notes)
                        block->begun_ns = transport_clock_ns();
                }
                // Not while rows wait: the clock is far away.
                const uint64_t took = next & OWN ? 0 : transport_clock_ns() - start;
                if (took > s->counts.longest_turn_ns)
                    s->counts.longest_turn_ns = took;
            }
        }
        next = __shfl_sync(0xffffffffu, next, 0);
        if (!next)
            break;
        __syncwarp();
        if (next & HELPERS)
            helpers_wake();
        if (next & OWN) {
            stage_job_form_t form;
            stage_job_form_make(&s->chunk.job, &form);
            stage_job_run_plain(&form, s->chunk.job.from, s->chunk.begin, s->chunk.end, lane, 32);
            __syncwarp();
            if (lane == 0)
                chunk_end(s, block);
            __syncwarp();
        }
    }
    if (lane == 0) {
        // The helpers' chunk is short, and they must be asleep before they are called once more.
        while (s->chunk_busy &&
               block_ref<uint32_t>(block->ended).load(cuda::memory_order_acquire) !=
                   STAGE_HELPERS / 32)
            ;
        s->counts.turns = s->turn;
        table->counts = s->counts;
        block_ref<uint32_t>(block->leave).store(1u, cuda::memory_order_release);
    }
    __syncwarp();
    helpers_wake();
}

// Half of a multiprocessor's registers and no more: while the resident decode kernel holds all
// other multiprocessors, the kernels of the control streams find their place beside this block
// only.
extern "C" __global__ void __launch_bounds__(STAGE_THREADS, 2)
    stage_scheduler(stage_table_t *table, const life_page_t *life)
{
    __shared__ stage_scheduler_t scheduler;
    __shared__ stage_block_t block;
    if (threadIdx.x == 0) {
        block.ended = 0;
        block.leave = 0;
        block.own_elements = table->own_elements;
        block.notes = table->notes;
        block.seen_ns = block.begun_ns = 0;
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
