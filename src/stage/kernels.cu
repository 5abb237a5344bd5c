// SPDX-License-Identifier: MIT
// Kernels of an Instance Rank on the direct lane, and those by which a host thread reaches words
// that the scheduler polls. The decisions are in stage/records.h; here is what only a GPU does.
//
// Peer stores are posted: rows first, then one release at system scope, then nothing. put and take
// are of many blocks and never wait; wait is of one block (transport/cuda_kernels.cu says why).
#include "stage/job.h"
#include "stage/table.h"
#include "transport/cuda_rows.cuh"

#define CALL_AHEAD 4u  // 16-byte parts of its rows that a thread of a call loads first of all
#define WAIT_ROUND 16u // looks for an answer between two at everything else; 5 us at most

// All targets get the rows; each 16 bytes are read once.
static __device__ __forceinline__ void rows_to_targets(const stage_put_t &put, uint64_t offset,
                                                       const void *input, uint64_t bytes,
                                                       uint64_t thread, uint64_t threads)
{
    if (put.count == 1) {
        transport_rows_copy((char *)put.targets[0].input + offset, input, bytes, thread, threads);
        return;
    }
    if (((offset | (uintptr_t)input) & 15) == 0) {
        const uint64_t count = bytes / 16;
        for (uint64_t i = thread; i < count; i += 4 * threads) {
            uint4 value[4]; // loads in flight together
#pragma unroll
            for (uint32_t n = 0; n < 4; n++)
                if (i + n * threads < count)
                    value[n] = ((const uint4 *)input)[i + n * threads];
            for (uint32_t t = 0; t < put.count; t++) {
                uint4 *to = (uint4 *)((char *)put.targets[t].input + offset);
#pragma unroll
                for (uint32_t n = 0; n < 4; n++)
                    if (i + n * threads < count)
                        to[i + n * threads] = value[n];
            }
        }
        for (uint64_t j = count * 8 + thread; j < bytes / 2; j += threads)
            for (uint32_t t = 0; t < put.count; t++)
                ((uint16_t *)((char *)put.targets[t].input + offset))[j] =
                    ((const uint16_t *)input)[j];
    } else {
        for (uint64_t j = thread; j < bytes / 2; j += threads)
            for (uint32_t t = 0; t < put.count; t++)
                ((uint16_t *)((char *)put.targets[t].input + offset))[j] =
                    ((const uint16_t *)input)[j];
    }
}

// By a warp, each lane with a copy of the state: one lane a target, so that no line waits for the
// one before.
static __device__ __forceinline__ void
put_lines(const stage_put_t &put, transport_device_state_t *state, const transport_live_t *live)
{
    stage_line_t line;
    if (stage_device_put_line(&put, state, live, &line) && threadIdx.x < put.count)
        stage_target_put(&put, threadIdx.x, &line);
}
static_assert(STAGE_MAX_MEMBERS <= 32, "a warp publishes");

extern "C" __global__ void stage_put(const __grid_constant__ stage_put_t put,
                                     transport_device_state_t *state, const transport_live_t *live,
                                     const void *input)
{
    if (stage_put_allowed(state))
        rows_to_targets(put, stage_put_offset(&put, live), input, stage_put_bytes(&put, live),
                        (uint64_t)blockIdx.x * blockDim.x + threadIdx.x,
                        (uint64_t)gridDim.x * blockDim.x);
    __shared__ uint32_t last;
    __syncthreads();
    if (threadIdx.x == 0)
        last = transport_last_block(&state->arrived);
    __syncthreads();
    if (threadIdx.x >= 32 || !last)
        return;
    transport_device_state_t local = *state;
    put_lines(put, &local, live);
    __syncwarp();
    if (threadIdx.x == 0)
        *state = local;
}

// By one thread, on a copy of the state.
static __device__ void wait_by_looking(const mailbox_arena_t *arena,
                                       transport_device_state_t *state, uint32_t direct,
                                       const transport_patience_t &patience)
{
    if (transport_device_wait_begin(state))
        return;
    const uint64_t start = transport_clock_ns();
    uint64_t next = start + LIFE_LOOK_NS, now = start;
    transport_clock_t clock;
    transport_device_wait_start(&clock, start);
    uint32_t missing = direct;
    uint64_t looks = 0;
    // Most looks are for the answer alone; some microseconds of them make a round.
    for (;;) {
        looks++;
        if (stage_device_wait_answer(arena, state, direct, &missing))
            break;
        if (looks % WAIT_ROUND != 0)
            continue;
        if (stage_device_wait_closed(arena, state, direct, &missing))
            break;
        now = transport_clock_ns();
        if (now < next)
            continue;
        next = now + LIFE_LOOK_NS;
        if (transport_device_wait_life(&patience, state, &clock, now))
            break;
    }
    state->looks += looks;
    state->wait_ns += transport_clock_ns() - start;
}

extern "C" __global__ void stage_wait(const mailbox_arena_t *arena, transport_device_state_t *state,
                                      uint32_t direct,
                                      const __grid_constant__ transport_patience_t patience)
{
    if (threadIdx.x != 0)
        return;
    transport_device_state_t local = *state; // counted in registers, written once
    wait_by_looking(arena, &local, direct, patience);
    *state = local;
}

// Both ends aligned to 16 bytes.
static __device__ __forceinline__ void rows_ahead(void *to, const void *from, uint64_t bytes,
                                                  uint64_t thread, uint64_t threads)
{
    const uint32_t count = (uint32_t)(bytes / 16), step = (uint32_t)threads;
    for (uint32_t i = (uint32_t)thread; i < count; i += 4 * step) {
        uint4 value[4]; // loads in flight together
#pragma unroll
        for (uint32_t n = 0; n < 4; n++)
            if (i + n * step < count)
                value[n] = ((const uint4 *)from)[i + n * step];
#pragma unroll
        for (uint32_t n = 0; n < 4; n++)
            if (i + n * step < count)
                ((uint4 *)to)[i + n * step] = value[n];
    }
    for (uint64_t j = count * 8ull + thread; j < bytes / 2; j += threads)
        ((uint16_t *)to)[j] = ((const uint16_t *)from)[j];
}

static __device__ __forceinline__ void rows_take(const stage_take_t &take, uint32_t rows,
                                                 void *output, uint64_t thread, uint64_t threads)
{
    const uint64_t bytes = rows * take.row_bytes;
    if (take.members == 0 && ((uintptr_t)output & 15) == 0) {
        rows_ahead(output, (const void *)take.output, bytes, thread, threads);
        return;
    }
    if (take.members == 0) {
        transport_rows_copy(output, (const void *)take.output, bytes, thread, threads);
        return;
    }
    stage_job_t job;
    job.kind = STAGE_JOB_REDUCE;
    job.dtype = take.dtype;
    job.wide = 0;
    job.members = take.members;
    job.member = job.layer = 0;
    job.consumers = 1;
    job.from = (const void *)take.partial;
    job.stride = take.partial_stride;
    job.to[0].rows = output;
    job.to[0].begin = 0;
    job.to[0].count = bytes / 2;
    if (take.narrow || ((uintptr_t)output & 15))
        stage_job_run_narrow(&job, 0, bytes / 2, thread, threads);
    else
        stage_job_run_wide(&job, 0, bytes / 2, thread, threads);
}

extern "C" __global__ void stage_take(const __grid_constant__ stage_take_t take,
                                      transport_device_state_t *state, void *output)
{
    const uint64_t thread = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    const uint64_t threads = (uint64_t)gridDim.x * blockDim.x;
    if (transport_device_take_allowed(state))
        rows_take(take, state->rows, output, thread, threads);
    else
        transport_rows_poison(output, take.captured * take.row_bytes, thread, threads);
    __syncthreads();
    if (threadIdx.x == 0 && transport_last_block(&state->arrived))
        transport_device_take(state);
}

// put, wait and take in one launch, for rows that one block moves: it may wait, since it keeps no
// other block of its own from running.
extern "C" __global__ void __launch_bounds__(1024)
    stage_call(const __grid_constant__ stage_put_t put, const __grid_constant__ stage_take_t take,
               const mailbox_arena_t *arena, transport_device_state_t *state,
               const transport_live_t *live, const void *input, void *output, uint32_t direct,
               const __grid_constant__ transport_patience_t patience)
{
    __shared__ uint32_t answered, rows;
    // State, live rows and each thread's first bytes are loaded at once, before it is known whether
    // and how many rows travel: one trip to memory instead of three.
    const bool wide = ((uintptr_t)input & 15) == 0;
    const uint64_t captured = put.carries ? put.captured * put.row_bytes / 16 : 0;
    uint4 first[CALL_AHEAD];
#pragma unroll
    for (uint32_t n = 0; n < CALL_AHEAD; n++)
        if (wide && threadIdx.x + n * blockDim.x < captured)
            first[n] = ((const uint4 *)input)[threadIdx.x + n * blockDim.x];
    transport_device_state_t local = *state;
    const uint64_t bytes = stage_put_bytes(&put, live);
    if (stage_put_allowed(&local) && bytes) {
        const uint64_t offset = stage_put_offset(&put, live);
        const uint64_t taken = wide && offset % 16 == 0 ? CALL_AHEAD * blockDim.x * 16ull : 0;
        for (uint32_t t = 0; taken && t < put.count; t++) {
            uint4 *to = (uint4 *)((char *)put.targets[t].input + offset);
#pragma unroll
            for (uint32_t n = 0; n < CALL_AHEAD; n++)
                if (threadIdx.x + n * blockDim.x < bytes / 16)
                    to[threadIdx.x + n * blockDim.x] = first[n];
        }
        if (bytes > taken)
            rows_to_targets(put, offset + taken, (const char *)input + taken, bytes - taken,
                            threadIdx.x, blockDim.x);
        else if (threadIdx.x < bytes % 16 / 2) {
            const uint64_t at = bytes / 16 * 8 + threadIdx.x;
            for (uint32_t t = 0; t < put.count; t++)
                ((uint16_t *)((char *)put.targets[t].input + offset))[at] =
                    ((const uint16_t *)input)[at];
        }
    }
    __syncthreads();
    if (threadIdx.x < 32)
        put_lines(put, &local, live);
    if (threadIdx.x == 0) {
        wait_by_looking(arena, &local, direct, patience);
        answered = transport_device_take_allowed(&local);
        rows = local.rows;
    }
    __syncthreads();
    if (answered)
        rows_take(take, rows, output, threadIdx.x, blockDim.x);
    else
        transport_rows_poison(output, take.captured * take.row_bytes, threadIdx.x, blockDim.x);
    if (threadIdx.x == 0) {
        transport_device_take(&local);
        *state = local;
    }
}

// ---- host threads reach device words, by launches on a control stream -----------------------
// An Instance's description in the scheduler's table; `wanted` is released after it, and pairs with
// the scheduler's acquire.
extern "C" __global__ void stage_describe(stage_instance_t *instance, stage_about_t about,
                                          uint32_t wanted)
{
    if (threadIdx.x != 0)
        return;
    instance->about = about;
    instance->reason = 0;
    if (wanted)
        PROTOCOL_STORE_RELEASE(&instance->wanted, wanted);
}

// A stage without lines of an earlier Instance.
extern "C" __global__ void stage_page_start(stage_page_t *page, stage_head_t head)
{
    uint64_t *words = (uint64_t *)page->lines;
    for (uint32_t i = threadIdx.x; i < (sizeof(page->lines) + sizeof(page->briefs)) / 8;
         i += blockDim.x)
        words[i] = 0;
    if (threadIdx.x == 0)
        page->head = head;
}

extern "C" __global__ void stage_partials_start(stage_partials_t *partials, uint64_t bytes,
                                                uint32_t instance, uint32_t ffn, uint32_t members,
                                                uint32_t rows, uint32_t hidden)
{
    if (threadIdx.x == 0) {
        partials->magic = STAGE_PARTIALS_MAGIC;
        partials->abi = STAGE_ABI;
        partials->bytes = bytes;
        partials->instance = instance;
        partials->ffn = ffn;
        partials->members = members;
        partials->rows = rows;
        partials->hidden = hidden;
        partials->reserved = 0;
    }
    uint64_t *words = (uint64_t *)partials->ready;
    for (uint32_t i = threadIdx.x; i < sizeof(partials->ready) / 8; i += blockDim.x)
        words[i] = 0;
}

extern "C" __global__ void stage_post(uint32_t *word, uint32_t value)
{
    if (threadIdx.x == 0)
        PROTOCOL_STORE_RELEASE(word, value);
}

extern "C" __global__ void stage_close(mailbox_arena_t *arena, uint32_t reason)
{
    if (threadIdx.x == 0)
        mailbox_close(arena, reason);
}
