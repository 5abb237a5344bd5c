// SPDX-License-Identifier: MIT
// The courier's resident kernel: one block. Warp 0 follows the host's orders and watches the life
// word; each lane of the others looks at a route, and the warp carries what has come.
#include "stage/courier.h"
#include "stage/nvshmem/plugin.h"
#include "transport/cuda_rows.cuh"

#include <nvshmem.h>
#include <nvshmemx.h>

#define COURIER_WATCH_NS 20000u
#define COURIER_SHARE    (STAGE_ROUTES_MAX / STAGE_COURIER_WARPS / 32u) // routes of a lane

static __device__ void carry(const stage_route_t *route, uint64_t value, uint32_t lane)
{
    const uint64_t bytes = stage_route_bytes(route);
    const int pe = (int)route->pe;
    if (route->kind == STAGE_ROUTE_CLOSED) {
        if (lane == 0)
            nvshmem_uint32_p((uint32_t *)route->to_word, (uint32_t)value, pe);
    } else if (bytes) {
        nvshmemx_putmem_signal_nbi_warp((void *)route->to_rows, (const void *)route->rows, bytes,
                                        (uint64_t *)route->to_word, value, NVSHMEM_SIGNAL_SET, pe);
    } else if (lane == 0) {
        nvshmemx_signal_op((uint64_t *)route->to_word, value, NVSHMEM_SIGNAL_SET, pe);
    }
    __syncwarp();
}

// What is attached, as this warp has last seen it, is in shared memory: the warp for orders asks
// all of them to let go of an Instance, and answers the host when they have.
struct courier_block_t {
    uint32_t word[FABRIC_MAX_INSTANCES];                      // of the order, by warp 0
    uint32_t seen[STAGE_COURIER_WARPS][FABRIC_MAX_INSTANCES]; // by each warp
    uint32_t leave;
};
template <typename T> using block_ref = cuda::atomic_ref<T, cuda::thread_scope_block>;

static __device__ void follow(stage_courier_table_t *table, const life_page_t *life,
                              courier_block_t *block)
{
    const uint32_t lane = threadIdx.x % 32;
    for (;;) {
        uint32_t stop = 0;
        if (lane == 0)
            stop = PROTOCOL_LOAD_ACQUIRE(&table->stop) |
                   (life ? life_word_look(&life->word[table->own_life]) : 0);
        stop = __shfl_sync(0xffffffffu, stop, 0);
        if (stop)
            break;
        for (uint32_t unit = lane; unit < FABRIC_MAX_INSTANCES; unit += 32) {
            stage_courier_unit_t *own = &table->unit[unit];
            const uint32_t wanted = PROTOCOL_LOAD_ACQUIRE(&own->wanted);
            if (wanted == PROTOCOL_LOAD_RELAXED(&own->now))
                continue;
            block_ref<uint32_t>(block->word[unit]).store(wanted, cuda::memory_order_release);
            bool all = true;
            for (uint32_t warp = 0; warp < STAGE_COURIER_WARPS; warp++)
                all &=
                    block_ref<uint32_t>(block->seen[warp][unit]).load(cuda::memory_order_acquire) ==
                    wanted;
            if (all)
                PROTOCOL_STORE_RELEASE(&own->now, wanted);
        }
        __nanosleep(COURIER_WATCH_NS / 20);
    }
    if (lane == 0)
        block_ref<uint32_t>(block->leave).store(1u, cuda::memory_order_release);
}

static __device__ void serve(stage_courier_table_t *table, courier_block_t *block, uint32_t warp)
{
    const uint32_t lane = threadIdx.x % 32, routes = table->routes;
    uint64_t last[COURIER_SHARE], at[COURIER_SHARE];
    uint32_t word[COURIER_SHARE], kind[COURIER_SHARE]; // word: the order that each route follows
#pragma unroll
    for (uint32_t n = 0; n < COURIER_SHARE; n++) {
        const uint32_t index = (warp * COURIER_SHARE + n) * 32 + lane;
        last[n] = 0;
        word[n] = 0;
        at[n] = index < routes ? table->route[index].word : 0;
        kind[n] = index < routes ? table->route[index].kind : 0;
    }
    for (;;) {
        uint32_t leave = 0; // all lanes leave together
        if (lane == 0)
            leave = block_ref<uint32_t>(block->leave).load(cuda::memory_order_acquire);
        if (__shfl_sync(0xffffffffu, leave, 0))
            break;
        // New orders: what was sent has arrived before the answer.
        for (uint32_t base = 0; base < FABRIC_MAX_INSTANCES; base += 32) {
            const uint32_t unit = base + lane;
            const uint32_t wanted =
                block_ref<uint32_t>(block->word[unit]).load(cuda::memory_order_acquire);
            const bool fresh = wanted != block->seen[warp][unit];
            if (!__any_sync(0xffffffffu, fresh))
                continue;
                // Routes turn to the order before it is answered, and none is being carried now.
#pragma unroll
            for (uint32_t n = 0; n < COURIER_SHARE; n++) {
                const uint32_t index = (warp * COURIER_SHARE + n) * 32 + lane;
                if (index >= routes)
                    continue;
                const uint32_t own = table->route[index].unit;
                const uint32_t now =
                    block_ref<uint32_t>(block->word[own]).load(cuda::memory_order_acquire);
                if (now != word[n]) {
                    word[n] = now;
                    last[n] = 0;
                }
            }
            __syncwarp();
            if (lane == 0)
                nvshmem_quiet();
            __syncwarp();
            if (fresh)
                block_ref<uint32_t>(block->seen[warp][unit])
                    .store(wanted, cuda::memory_order_release);
        }
#pragma unroll
        for (uint32_t n = 0; n < COURIER_SHARE; n++) {
            const uint32_t index = (warp * COURIER_SHARE + n) * 32 + lane;
            const bool on =
                index < routes && transport_slot_state(word[n]) == TRANSPORT_SLOT_ATTACHED;
            const uint64_t value = on ? stage_route_due(at[n], kind[n], last[n]) : 0;
            for (uint32_t due = __ballot_sync(0xffffffffu, value != 0); due; due &= due - 1) {
                const uint32_t from = __ffs(due) - 1;
                __syncwarp(); // what that lane has acquired, all lanes may read
                carry(&table->route[(warp * COURIER_SHARE + n) * 32 + from],
                      __shfl_sync(0xffffffffu, (unsigned long long)value, from), lane);
                if (lane == from)
                    last[n] = value;
            }
        }
    }
    if (lane == 0)
        nvshmem_quiet();
}

extern "C" __global__ void __launch_bounds__(STAGE_COURIER_THREADS)
    stage_courier(stage_courier_table_t *table, const life_page_t *life)
{
    __shared__ courier_block_t block;
    for (uint32_t i = threadIdx.x; i < sizeof(block) / 4; i += blockDim.x)
        ((uint32_t *)&block)[i] = 0;
    __syncthreads();
    if (threadIdx.x < 32)
        follow(table, life, &block);
    else
        serve(table, &block, threadIdx.x / 32 - 1);
}
