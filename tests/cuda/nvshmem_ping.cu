// SPDX-License-Identifier: MIT
// The floor of provider nvshmem: rows and a word to and fro between two PEs by the library's own
// put with signal, by one block.
#include "ping.cuh"

#include <nvshmem.h>
#include <nvshmemx.h>

// word, payload: symmetric addresses, the word zero. Ends by itself when the other side stays away:
// late is 1 then.
extern "C" __global__ void nvshmem_test_ping(uint64_t *word, char *payload, const char *source,
                                             uint32_t bytes, uint32_t count, uint32_t first,
                                             int peer, uint32_t *samples_ns, uint32_t *late_out)
{
    const bool late = ping(word, count, first != 0, 10000000000ull, samples_ns, [=](uint32_t i) {
        if (bytes)
            nvshmemx_putmem_signal_nbi_block(payload, source, bytes, word, i, NVSHMEM_SIGNAL_SET,
                                             peer);
        else if (threadIdx.x == 0)
            nvshmemx_signal_op(word, i, NVSHMEM_SIGNAL_SET, peer);
        __syncthreads();
    });
    if (late && threadIdx.x == 0)
        *late_out = 1;
}
