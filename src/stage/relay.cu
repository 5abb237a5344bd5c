// SPDX-License-Identifier: MIT
// The relay between GPUs of one host: stages are mapped, and written by plain stores.
#include "stage/relay.cuh"

struct relay_stores_t {
    static __device__ void rows(const stage_relay_slot_t *slot, uint32_t ffn, uint64_t offset,
                                const void *from, uint64_t bytes, uint32_t lane)
    {
        relay_copy((char *)slot->input[ffn] + offset, from, bytes, lane);
    }

    static __device__ void lines(const stage_relay_slot_t *slot, uint32_t group,
                                 const stage_line_t &value, uint32_t lane)
    {
        if (lane != 0)
            return;
        for (uint32_t left = group; left; left &= left - 1)
            stage_line_fill((stage_line_t *)slot->line[__ffs(left) - 1], &value);
        for (uint32_t left = group; left; left &= left - 1)
            stage_line_publish((stage_line_t *)slot->line[__ffs(left) - 1], &value);
    }
};

extern "C" __global__ void __launch_bounds__((TRANSPORT_RESIDENT_SLOTS + 1) * 32)
    stage_relay(transport_resident_t *table, const life_page_t *life, void *context)
{
    transport_resident_run(table, life, relay_handler_t<relay_stores_t>(context));
}

extern "C" __global__ void stage_relay_describe(stage_relay_slot_t *slot, stage_relay_slot_t value,
                                                mailbox_arena_t header, uint64_t *clock_ns)
{
    relay_describe(slot, value, header, clock_ns);
}
