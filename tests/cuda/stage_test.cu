// SPDX-License-Identifier: MIT
// Device code of the direct lane's tests: whole round trips in one kernel, with every element
// checked, and the floors: words, and rows with a word, sent to and fro between two GPUs.
#include "stage/job.h"
#include "stage/records.h"
#include "transport/cuda_rows.cuh"

// One block plays an Instance Rank: `count` layers from put to take. The echo of M members gives
// input * M (M + 1) / 2 + layer; all values are small whole numbers.
extern "C" __global__ void
stage_test_round_trips(const __grid_constant__ stage_put_t put, mailbox_arena_t *arena,
                       transport_device_state_t *state, const transport_live_t *live,
                       uint32_t direct, uint32_t members, uint64_t partial_stride, uint32_t count,
                       const uint32_t *life, uint32_t *samples_ns, uint32_t sample_limit,
                       uint32_t *wrong)
{
    __shared__ uint32_t over;
    const uint32_t threads = blockDim.x, thread = threadIdx.x;
    const uint64_t elements = live->rows * put.row_bytes / 2;
    for (uint32_t i = 0; i < count; i++) {
        const uint64_t start = transport_clock_ns();
        for (uint64_t e = thread * 8; e < elements; e += threads * 8) {
            stage_eight_t eight;
            for (int k = 0; k < 8; k++)
                eight.value[k] = stage_bits((float)((e + k + i) % 32), FFN_CUDA_BF16);
            for (uint32_t t = 0; t < put.count; t++)
                *(stage_eight_t *)((uint16_t *)put.targets[t].input + e) = eight;
        }
        __syncthreads();
        if (thread == 0) {
            stage_put_t own = put;
            uint32_t missing = direct;
            own.layer = i % 32;
            stage_device_put(&own, state, live);
            uint64_t next = start + LIFE_LOOK_NS;
            while (!transport_device_wait_begin(state) &&
                   !stage_device_wait_look(arena, state, direct, &missing)) {
                const uint64_t now = transport_clock_ns();
                if (now < next)
                    continue;
                next = now + LIFE_LOOK_NS;
                if (transport_device_wait_life(life, state, now - start, 10000000000ull))
                    break;
            }
            over = state->status;
        }
        __syncthreads();
        if (over)
            return;
        for (uint64_t e = thread; e < elements; e += threads) {
            float value = 0;
            if (direct)
                for (uint32_t m = 0; m < members; m++)
                    value +=
                        ((const volatile float *)((const char *)arena +
                                                  arena->partial_offset))[m * partial_stride + e];
            else
                value = stage_value(
                    ((const volatile uint16_t *)((const char *)arena + arena->output_offset))[e],
                    FFN_CUDA_BF16);
            if (value != (float)((e + i) % 32 * (members * (members + 1) / 2) + i % 32))
                atomicAdd(wrong, 1u);
        }
        __syncthreads();
        if (thread == 0) {
            transport_device_take(state);
            if (i < sample_limit)
                samples_ns[i] = (uint32_t)(transport_clock_ns() - start);
        }
    }
}

// `mine` is in this GPU's memory, `theirs` and `payload` in the other's. vecs: 16-byte parts that
// travel before the word. Ends by itself when the other side stays away.
extern "C" __global__ void stage_test_ping(uint64_t *mine, uint64_t *theirs, uint4 *payload,
                                           uint32_t vecs, uint32_t count, uint32_t first,
                                           uint32_t *samples_ns)
{
    __shared__ uint32_t late;
    if (threadIdx.x == 0)
        late = 0;
    __syncthreads();
    for (uint32_t i = 1; i <= count; i++) {
        const uint64_t start = transport_clock_ns();
        for (int turn = 0; turn < 2; turn++) {
            if ((turn == 0) == (first != 0)) {
                for (uint32_t v = threadIdx.x; v < vecs; v += blockDim.x)
                    payload[v] = make_uint4(i, v, i, v);
                __syncthreads();
                if (threadIdx.x == 0)
                    PROTOCOL_STORE_RELEASE(theirs, (uint64_t)i);
            } else {
                if (threadIdx.x == 0)
                    while (PROTOCOL_LOAD_ACQUIRE(mine) != i)
                        if (transport_clock_ns() - start >
                            (i == 1 ? 5000000000ull : 1000000000ull)) {
                            late = 1;
                            break;
                        }
                __syncthreads();
                if (late)
                    return;
            }
        }
        if (first && threadIdx.x == 0)
            samples_ns[i - 1] = (uint32_t)(transport_clock_ns() - start);
    }
}

// Stands for attention in captured graphs: sets the next layer's input from this one's output.
extern "C" __global__ void stage_test_fill(uint16_t *rows, uint64_t elements, uint32_t seed)
{
    for (uint64_t e = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; e < elements;
         e += (uint64_t)gridDim.x * blockDim.x)
        rows[e] = stage_bits((float)((e + seed) % 32), FFN_CUDA_BF16);
}

// wrong += elements of `rows` that are not what the echo makes of stage_test_fill's.
extern "C" __global__ void stage_test_check(const uint16_t *rows, uint64_t elements, uint32_t seed,
                                            uint32_t layer, uint32_t members, uint32_t *wrong)
{
    for (uint64_t e = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; e < elements;
         e += (uint64_t)gridDim.x * blockDim.x)
        if (stage_value(rows[e], FFN_CUDA_BF16) !=
            (float)((e + seed) % 32 * (members * (members + 1) / 2) + layer))
            atomicAdd(wrong, 1u);
}
