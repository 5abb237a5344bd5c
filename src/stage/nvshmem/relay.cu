// SPDX-License-Identifier: MIT
// The relay over NVSHMEM: rows, line and signal go by device calls of the library, so that the
// FfnAgent's stage may lie on any PE. slot->line and slot->input are symmetric addresses.
#include "stage/nvshmem/plugin.h"
#include "stage/relay.cuh"

#include <nvshmem.h>
#include <nvshmemx.h>

struct relay_puts_t {
    static __device__ void rows(const stage_relay_slot_t *slot, uint32_t ffn, uint64_t offset,
                                const void *from, uint64_t bytes, uint32_t lane)
    {
        void *to = (char *)slot->input[ffn] + offset;
        if (slot->bounce) {
            // What another host's adapter reads has to lie on the heap. The answer to this request
            // comes before the next one is copied here.
            relay_copy((void *)slot->bounce, from, bytes, lane);
            __syncwarp();
            from = (const void *)slot->bounce;
        }
        nvshmemx_putmem_nbi_warp(to, from, bytes, (int)slot->pe[ffn]);
    }

    static __device__ void lines(const stage_relay_slot_t *slot, uint32_t group,
                                 const stage_line_t &value, uint32_t lane)
    {
        // Nobody reads the request of a relay arena: it is where lines are put from.
        stage_line_t *own = &((mailbox_arena_t *)slot->arena)->request;
        if (lane == 0)
            *own = value;
        __syncwarp();
        for (uint32_t left = group; left; left &= left - 1) {
            const uint32_t ffn = __ffs(left) - 1;
            nvshmemx_putmem_nbi_warp((void *)slot->line[ffn], own, sizeof(*own),
                                     (int)slot->pe[ffn]);
        }
        __syncwarp();
        if (lane == 0) {
            nvshmem_fence(); // rows and lines of all lanes before the word
            for (uint32_t left = group; left; left &= left - 1) {
                const uint32_t ffn = __ffs(left) - 1;
                nvshmemx_signal_op(stage_line_brief((const stage_line_t *)slot->line[ffn]),
                                   stage_brief_make(&value), NVSHMEM_SIGNAL_SET,
                                   (int)slot->pe[ffn]);
            }
        }
        __syncwarp();
    }
};

extern "C" __global__ void __launch_bounds__((TRANSPORT_RESIDENT_SLOTS + 1) * 32)
    stage_relay_nvshmem(transport_resident_t *table, const life_page_t *life, void *context)
{
    transport_resident_run(table, life, relay_handler_t<relay_puts_t>(context));
}

extern "C" __global__ void stage_relay_describe(stage_relay_slot_t *slot, stage_relay_slot_t value,
                                                mailbox_arena_t header, uint64_t *clock_ns)
{
    relay_describe(slot, value, header, clock_ns);
}
