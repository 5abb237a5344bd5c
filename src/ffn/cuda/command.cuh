// SPDX-License-Identifier: MIT
// How a block of a resident kernel gets its commands from the queue, and how the last of all blocks ends
// one. Waits for nothing else.
#ifndef XPOOL_FFN_CUDA_COMMAND_CUH
#define XPOOL_FFN_CUDA_COMMAND_CUH

#include "ffn/cuda/dispatch_steps.h"
#include "ffn/cuda/ptx.cuh"

#define COMMAND_LOOKS 64u // polls of the queue between two looks at `stop`
#define COMMAND_WORDS ((uint32_t)(sizeof(ffn_cuda_command_t) / 8))
static_assert(sizeof(ffn_cuda_command_t) == 128, "a command is read by 16 lanes");

// What ends a command, kept while the next one is read.
struct command_end_t {
    uint64_t *answer, *done;
    uint64_t answer_value, done_value, began_ns;
    const ffn_cuda_answer_t *about;
    ffn_cuda_meeting_t *meeting;
    uint32_t (*trace)[FFN_CUDA_MAX_BLOCKS];
    uint32_t rows, capacity;
};

// One thread, of the command that has been executed.
static __device__ __forceinline__ command_end_t
command_end_of(const ffn_cuda_command_t &command, uint64_t began_ns, ffn_cuda_meeting_t *meeting,
               uint32_t (*trace)[FFN_CUDA_MAX_BLOCKS], uint32_t capacity)
{
    command_end_t end;
    end.answer = command.answer;
    end.answer_value = command.answer_value;
    end.done = command.done;
    end.done_value = command.done_value;
    end.about = command.about;
    end.began_ns = began_ns;
    end.meeting = meeting;
    end.trace = trace;
    end.rows = command.rows;
    end.capacity = capacity;
    return end;
}

// One thread of each block, when all of the block's outputs are written: the last one publishes the
// words that end the command, then its record. The answer first: what follows is on nobody's way.
// answered: gets `sequence`.
static __device__ __forceinline__ void command_end(const command_end_t &end, ffn_cuda_queue_t *queue,
                                                   uint64_t *answered, uint64_t sequence)
{
    ffn_cuda_record_t record;
    ptx_fence_system(); // also what lies in another device's memory
    const uint64_t ended = ptx_add_answered(&end.meeting->ended, 1) + 1;
    if (end.trace)
        ptx_add_relaxed(&end.trace[7][blockIdx.x], (uint32_t)(ptx_clock_ns() - end.began_ns));
    if (ended % gridDim.x != 0)
        return;
    // One fence after all blocks' additions and before both words: each waits for the rows to arrive.
    ptx_fence_system();
    if (end.answer)
        ptx_store_relaxed_system(end.answer, end.answer_value);
    ptx_store_relaxed_system(answered, sequence);
    ffn_cuda_counters_t *counters =
        (ffn_cuda_counters_t *)__ldcg((const unsigned long long *)&queue->counters);
    if (counters) {
        ffn_cuda_record_begin(end.about, end.rows, &record);
        record.capacity = end.capacity;
        record.lane = record.graph_template = FFN_CUDA_NO_LANE;
        record.resident = 1;
        record.end_ns = ptx_clock_ns();
        record.duration_ns = record.end_ns - end.began_ns;
    }
    if (end.done)
        ptx_store_release_system(end.done, end.done_value);
    if (counters)
        ffn_cuda_record_end(counters, &record);
}

// Of an entry that is there; a whole warp, the block's first.
static __device__ __forceinline__ void command_read(ffn_cuda_command_t &command,
                                                    const ffn_cuda_command_t *entry)
{
    if (threadIdx.x < COMMAND_WORDS)
        ((unsigned long long *)&command)[threadIdx.x] =
            __ldcg((const unsigned long long *)entry + threadIdx.x);
    __syncwarp();
}

// Waits for the command `sequence` and reads it into shared memory, with the time; a whole warp, the
// block's first. False: leave.
static __device__ __forceinline__ bool command_wait(ffn_cuda_command_t &command, uint64_t &began_ns,
                                                    ffn_cuda_queue_t *queue, uint64_t sequence)
{
    ffn_cuda_command_t *entry = &queue->entries[(sequence - 1) % FFN_CUDA_QUEUE_ENTRIES];
    unsigned long long seen = 0;
    if (threadIdx.x == 0) {
        for (uint32_t looks = 1;; looks++) {
            seen = ptx_load_acquire_system(&entry->sequence);
            if (seen == sequence || seen == FFN_CUDA_QUEUE_LEFT)
                break;
            if (looks % COMMAND_LOOKS == 0 && ptx_load_relaxed_system(&queue->stop))
                ptx_swap_if_system(&entry->sequence, seen, FFN_CUDA_QUEUE_LEFT);
        }
        began_ns = ptx_clock_ns();
    }
    seen = __shfl_sync(0xffffffffu, seen, 0);
    if (seen == FFN_CUDA_QUEUE_LEFT)
        return false;
    command_read(command, entry);
    return command.lane != NULL;
}
#endif
