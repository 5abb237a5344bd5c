// SPDX-License-Identifier: MIT
// The floor of provider nvshmem: rows and a word to and fro between two PEs by the library's own
// put with signal, by one block.
#include "base/protocol_atomics.h"
#include "transport/cuda_rows.cuh"

#include <nvshmem.h>
#include <nvshmemx.h>

// word, payload: symmetric addresses, the word zero. Ends by itself when the other side stays away:
// late is 1 then.
extern "C" __global__ void nvshmem_test_ping(uint64_t *word, char *payload, const char *source,
                                             uint32_t bytes, uint32_t count, uint32_t first,
                                             int peer, uint32_t *samples_ns, uint32_t *late_out)
{
    __shared__ uint32_t late;
    if (threadIdx.x == 0)
        late = 0;
    __syncthreads();
    for (uint32_t i = 1; i <= count; i++) {
        const uint64_t start = transport_clock_ns();
        for (int turn = 0; turn < 2; turn++) {
            if ((turn == 0) == (first != 0)) {
                if (bytes)
                    nvshmemx_putmem_signal_nbi_block(payload, source, bytes, word, i,
                                                     NVSHMEM_SIGNAL_SET, peer);
                else if (threadIdx.x == 0)
                    nvshmemx_signal_op(word, i, NVSHMEM_SIGNAL_SET, peer);
                __syncthreads();
            } else {
                if (threadIdx.x == 0)
                    while (PROTOCOL_LOAD_ACQUIRE(word) != i)
                        if (transport_clock_ns() - start >
                            (i == 1 ? 10000000000ull : 1000000000ull)) {
                            late = *late_out = 1;
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
