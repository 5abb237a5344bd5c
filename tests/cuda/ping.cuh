// SPDX-License-Identifier: MIT
// Rows and a word to and fro between two GPUs, timed by the side that begins. How they get there is
// the caller's.
#ifndef XPOOL_TESTS_CUDA_PING_CUH
#define XPOOL_TESTS_CUDA_PING_CUH

#include "base/protocol_atomics.h"
#include "transport/cuda_rows.cuh"

// By one block. send(i): the rows, then the value i into the other side's word, by all threads;
// mine: the word that the other side sends. The first round may take first_limit_ns, each further
// one a second; true: the other side stayed away.
template <typename Send>
static __device__ bool ping(uint64_t *mine, uint32_t count, bool first, uint64_t first_limit_ns,
                            uint32_t *samples_ns, Send send)
{
    __shared__ uint32_t late;
    if (threadIdx.x == 0)
        late = 0;
    __syncthreads();
    for (uint32_t i = 1; i <= count; i++) {
        const uint64_t start = transport_clock_ns();
        for (int turn = 0; turn < 2; turn++) {
            if ((turn == 0) == first) {
                send(i);
            } else {
                if (threadIdx.x == 0)
                    while (PROTOCOL_LOAD_ACQUIRE(mine) != i)
                        if (transport_clock_ns() - start >
                            (i == 1 ? first_limit_ns : 1000000000ull)) {
                            late = 1;
                            break;
                        }
                __syncthreads();
                if (late)
                    return true;
            }
        }
        if (first && threadIdx.x == 0)
            samples_ns[i - 1] = (uint32_t)(transport_clock_ns() - start);
    }
    return false;
}
#endif
