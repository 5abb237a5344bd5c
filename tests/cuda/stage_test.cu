// SPDX-License-Identifier: MIT
// Device code of the direct lane's tests: whole round trips in one kernel, with every element
// checked, and the floors: words, and rows with a word, sent to and fro between two GPUs.
#include "stage/job.h"
#include "stage/records.h"
#include "transport/cuda_rows.cuh"
#include "ping.cuh"

#define WAIT_ROUND 16u // as in stage/kernels.cu

// One block plays an Instance Rank: `count` layers from put to take, as stage_call does them. The
// echo of M members gives input * M (M + 1) / 2 + layer; all values are small whole numbers. split:
// sums of nanoseconds until the lines are published, until the answer is seen, until it is taken;
// or NULL.
extern "C" __global__ void
stage_test_round_trips(const __grid_constant__ stage_put_t put, mailbox_arena_t *arena,
                       transport_device_state_t *state, const transport_live_t *live,
                       uint32_t direct, uint32_t members, uint64_t partial_stride, uint32_t count,
                       const __grid_constant__ transport_patience_t patience,
                       uint32_t *samples_ns, uint32_t sample_limit,
                       uint32_t *wrong, uint64_t *split)
{
    __shared__ uint32_t over;
    __shared__ transport_device_state_t local;
    __shared__ stage_put_t own;
    const uint32_t threads = blockDim.x, thread = threadIdx.x;
    const uint64_t elements = live->rows * put.row_bytes / 2;
    uint64_t put_ns = 0, wait_ns = 0, take_ns = 0;
    if (thread == 0) {
        local = *state;
        own = put;
        over = 0;
    }
    __syncthreads();
    for (uint32_t i = 0; i < count; i++) {
        const uint64_t start = transport_clock_ns();
        uint64_t published = 0, answered = 0;
        for (uint64_t e = thread * 8; e < elements; e += threads * 8) {
            stage_eight_t eight;
            for (int k = 0; k < 8; k++)
                eight.value[k] = stage_bits((float)((e + k + i) % 32), FFN_CUDA_BF16);
            for (uint32_t t = 0; t < put.count; t++)
                *(stage_eight_t *)((uint16_t *)put.targets[t].input + e) = eight;
        }
        if (thread == 0)
            own.layer = i % 32;
        __syncthreads();
        if (thread < 32) {
            transport_device_state_t copy = local;
            stage_line_t line;
            if (stage_device_put_line(&own, &copy, live, &line) && thread < put.count)
                stage_target_put(&put, thread, &line);
            __syncwarp();
            if (thread == 0) {
                uint32_t missing = direct, looks = 0;
                if (split)
                    published = transport_clock_ns();
                uint64_t next = start + LIFE_LOOK_NS;
                transport_clock_t clock;
                transport_device_wait_start(&clock, start);
                while (!transport_device_wait_begin(&copy)) {
                    if (stage_device_wait_answer(arena, &copy, direct, &missing))
                        break;
                    if (++looks % WAIT_ROUND != 0)
                        continue;
                    if (stage_device_wait_closed(arena, &copy, direct, &missing))
                        break;
                    const uint64_t now = transport_clock_ns();
                    if (now < next)
                        continue;
                    next = now + LIFE_LOOK_NS;
                    if (transport_device_wait_life(&patience, &copy, &clock, now))
                        break;
                }
                over = copy.status;
                local = copy;
                if (split)
                    answered = transport_clock_ns();
            }
        }
        __syncthreads();
        if (over)
            break;
        const char *base = (const char *)arena;
        for (uint64_t e = thread * 8; e < elements; e += threads * 8) {
            float value[8] = {0};
            if (direct & STAGE_ANSWER_MEMBERS) {
                const float *partial = (const float *)(base + arena->partial_offset) + e;
                for (uint32_t m = 0; m < members; m++)
                    for (int half = 0; half < 2; half++) {
                        const stage_four_t four =
                            ((const stage_four_t *)(partial + m * partial_stride))[half];
                        for (int k = 0; k < 4; k++)
                            value[half * 4 + k] += four.value[k];
                    }
            } else {
                const stage_eight_t eight =
                    *(const stage_eight_t *)((const uint16_t *)(base + arena->output_offset) + e);
                for (int k = 0; k < 8; k++)
                    value[k] = stage_value(eight.value[k], FFN_CUDA_BF16);
            }
            for (int k = 0; k < 8; k++)
                if (value[k] != (float)((e + k + i) % 32 * (members * (members + 1) / 2) + i % 32))
                    atomicAdd(wrong, 1u);
        }
        __syncthreads();
        if (thread == 0) {
            transport_device_take(&local);
            const uint64_t end = transport_clock_ns();
            if (i < sample_limit)
                samples_ns[i] = (uint32_t)(end - start);
            put_ns += published - start;
            wait_ns += answered - published;
            take_ns += end - answered;
        }
    }
    if (thread == 0) {
        *state = local;
        if (split) {
            split[0] = put_ns;
            split[1] = wait_ns;
            split[2] = take_ns;
        }
    }
}

// `mine` is in this GPU's memory, `theirs` and `payload` in the other's. vecs: 16-byte parts that
// travel before the word. Ends by itself when the other side stays away.
extern "C" __global__ void stage_test_ping(uint64_t *mine, uint64_t *theirs, uint4 *payload,
                                           uint32_t vecs, uint32_t count, uint32_t first,
                                           uint32_t *samples_ns)
{
    ping(mine, count, first != 0, 5000000000ull, samples_ns, [=](uint32_t i) {
        for (uint32_t v = threadIdx.x; v < vecs; v += blockDim.x)
            payload[v] = make_uint4(i, v, i, v);
        __syncthreads();
        if (threadIdx.x == 0)
            PROTOCOL_STORE_RELEASE(theirs, (uint64_t)i);
    });
}

// Another one in each column and row, so that rows at another one's place show.
static __device__ float test_value(uint64_t e, uint32_t seed)
{
    return (float)((e + e / 2048 * 5 + seed) % 32);
}

// Stands for attention in captured graphs: sets the next layer's input from this one's output.
extern "C" __global__ void stage_test_fill(uint16_t *rows, uint64_t elements, uint32_t seed)
{
    for (uint64_t e = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; e < elements;
         e += (uint64_t)gridDim.x * blockDim.x)
        rows[e] = stage_bits(test_value(e, seed), FFN_CUDA_BF16);
}

// wrong += elements of `rows` that are not what the echo makes of stage_test_fill's.
extern "C" __global__ void stage_test_check(const uint16_t *rows, uint64_t elements, uint32_t seed,
                                            uint32_t layer, uint32_t members, uint32_t *wrong)
{
    for (uint64_t e = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; e < elements;
         e += (uint64_t)gridDim.x * blockDim.x)
        if (stage_value(rows[e], FFN_CUDA_BF16) !=
            test_value(e, seed) * (float)(members * (members + 1) / 2) + (float)layer)
            atomicAdd(wrong, 1u);
}

// Two errors for compute-sanitizer to find: a race in shared memory between two warps, and a write of
// words[at], which is past the end. Two warps.
extern "C" __global__ void stage_test_planted(uint32_t *words, uint32_t at)
{
    __shared__ uint32_t passed[64];
    passed[threadIdx.x] = threadIdx.x + at;
    words[at] = passed[threadIdx.x ^ 32];
}
