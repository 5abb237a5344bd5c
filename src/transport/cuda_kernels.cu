// SPDX-License-Identifier: MIT
// Kernels of the Instance's side of the mailbox, and those by which a host thread reaches words that
// kernels poll. The decisions are in transport/cuda_device.h; here is what only a GPU does.
//
// put and take are of many blocks and never wait; wait is of one block. A kernel of many blocks that
// also waits can deadlock: blocks that wait keep those from running that would bring the answer.
#include "transport/cuda_device.h"
#include "transport/cuda_rows.cuh"

extern "C" __global__ void transport_put(mailbox_arena_t *arena, transport_device_state_t *state,
                                         const transport_live_t *live, uint32_t layer,
                                         uint32_t captured, const void *input, uint64_t row_bytes,
                                         uint64_t input_offset)
{
    if (state->status == XP_OK && state->phase == TRANSPORT_PHASE_IDLE)
        transport_rows_copy((char *)arena + input_offset, input,
                            transport_device_rows(live, captured) * row_bytes,
                            (uint64_t)blockIdx.x * blockDim.x + threadIdx.x,
                            (uint64_t)gridDim.x * blockDim.x);
    __syncthreads();
    if (threadIdx.x == 0 && transport_last_block(&state->arrived))
        transport_device_put(arena, state, live, layer, captured);
}

// By one thread, on a copy of the state.
static __device__ void wait_by_looking(const mailbox_arena_t *arena, transport_device_state_t *state,
                                       const transport_patience_t &patience)
{
    if (transport_device_wait_begin(state))
        return;
    const uint64_t start = transport_clock_ns();
    uint64_t next = start + LIFE_LOOK_NS, now = start;
    transport_clock_t clock;
    transport_device_wait_start(&clock, start);
    for (;;) {
        state->looks++;
        if (transport_device_wait_look(arena, state))
            break;
        now = transport_clock_ns();
        if (now < next)
            continue;
        next = now + LIFE_LOOK_NS;
        if (transport_device_wait_life(&patience, state, &clock, now))
            break;
    }
    state->wait_ns += now - start;
}

extern "C" __global__ void transport_wait(mailbox_arena_t *arena, transport_device_state_t *state,
                                          const __grid_constant__ transport_patience_t patience)
{
    if (threadIdx.x != 0)
        return;
    // Counted in registers; the state is written once, at the end.
    transport_device_state_t local = *state;
    wait_by_looking(arena, &local, patience);
    *state = local;
}

extern "C" __global__ void transport_take(const mailbox_arena_t *arena,
                                          transport_device_state_t *state, uint32_t captured,
                                          void *output, uint64_t row_bytes, uint64_t output_offset)
{
    const uint64_t thread = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    const uint64_t threads = (uint64_t)gridDim.x * blockDim.x;
    if (transport_device_take_allowed(state))
        transport_rows_copy(output, (const char *)arena + output_offset, state->rows * row_bytes,
                            thread, threads);
    else
        transport_rows_poison(output, captured * row_bytes, thread, threads);
    __syncthreads();
    if (threadIdx.x == 0 && transport_last_block(&state->arrived))
        transport_device_take(state);
}

// put, wait and take in one launch, for rows that one block moves: it may wait, since it keeps no other
// block of its own from running.
extern "C" __global__ void transport_call(mailbox_arena_t *arena, transport_device_state_t *state,
                                          const transport_live_t *live, uint32_t layer,
                                          uint32_t captured, const void *input, void *output,
                                          uint64_t row_bytes, uint64_t input_offset,
                                          uint64_t output_offset,
                                          const __grid_constant__ transport_patience_t patience)
{
    __shared__ uint32_t answered, rows;
    // State, live rows and each thread's first 16 bytes are loaded at once, before it is known whether
    // and how many rows travel: one trip to memory instead of three.
    const bool wide = ((uintptr_t)input & 15) == 0;
    uint4 first = make_uint4(0, 0, 0, 0);
    if (wide && threadIdx.x < captured * row_bytes / 16)
        first = ((const uint4 *)input)[threadIdx.x];
    transport_device_state_t local = *state;
    const uint64_t bytes = transport_device_rows(live, captured) * row_bytes;
    if (local.status == XP_OK && local.phase == TRANSPORT_PHASE_IDLE) {
        char *to = (char *)arena + input_offset;
        const uint64_t taken = wide ? blockDim.x * 16ull : 0;
        if (wide && threadIdx.x < bytes / 16)
            ((uint4 *)to)[threadIdx.x] = first;
        if (bytes > taken)
            transport_rows_copy(to + taken, (const char *)input + taken, bytes - taken, threadIdx.x,
                                blockDim.x);
        else if (wide && threadIdx.x < bytes % 16 / 2)
            ((uint16_t *)to)[bytes / 16 * 8 + threadIdx.x] =
                ((const uint16_t *)input)[bytes / 16 * 8 + threadIdx.x];
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        transport_device_put(arena, &local, live, layer, captured);
        wait_by_looking(arena, &local, patience);
        answered = transport_device_take_allowed(&local);
        rows = local.rows;
    }
    __syncthreads();
    if (answered)
        transport_rows_copy(output, (const char *)arena + output_offset, rows * row_bytes,
                            threadIdx.x, blockDim.x);
    else
        transport_rows_poison(output, captured * row_bytes, threadIdx.x, blockDim.x);
    if (threadIdx.x == 0) {
        transport_device_take(&local);
        *state = local;
    }
}

// ---- host threads reach device words, by launches on a control stream -----------------------
extern "C" __global__ void transport_arena_start(mailbox_arena_t *arena, mailbox_arena_t value)
{
    if (threadIdx.x == 0)
        *arena = value;
}

extern "C" __global__ void transport_close(mailbox_arena_t *arena, uint32_t reason)
{
    if (threadIdx.x == 0)
        mailbox_close(arena, reason);
}

extern "C" __global__ void transport_live_write(transport_live_t *live, transport_live_t value)
{
    if (threadIdx.x == 0)
        *live = value;
}

// After an answered error the next pass may go on; what is terminal stays.
extern "C" __global__ void transport_recover(transport_device_state_t *state)
{
    if (threadIdx.x == 0 && state->phase == TRANSPORT_PHASE_IDLE)
        state->status = XP_OK;
}

// The description of a slot whose warp is not looking at it, and then its release: pairs with the
// acquiring loads of the resident kernel.
extern "C" __global__ void transport_slot_describe(transport_slot_t *slot, transport_slot_t value)
{
    if (threadIdx.x != 0)
        return;
    slot->hidden = value.hidden;
    slot->max_rows = value.max_rows;
    slot->dtype = value.dtype;
    slot->dp_size = value.dp_size;
    slot->life = value.life;
    slot->arena = value.arena;
    slot->row_bytes = value.row_bytes;
    slot->input_offset = value.input_offset;
    slot->output_offset = value.output_offset;
    slot->requests = 0;
    slot->total_rows = 0;
    PROTOCOL_STORE_RELEASE(&slot->ended, 0u);
    PROTOCOL_STORE_RELEASE(&slot->wanted, value.wanted);
}

// By one block: an answer that another rank of the Instance has, into the arena of one that waits for
// it. Thread 0's acquire (of what mailbox_response_publish released) happens before all threads' loads
// of the rows, and their stores before its release.
extern "C" __global__ void transport_carry(mailbox_arena_t *behind, const mailbox_arena_t *ahead,
                                           uint64_t output_offset, uint64_t bytes, uint64_t sequence,
                                           uint32_t status)
{
    if (threadIdx.x == 0)
        (void)PROTOCOL_LOAD_ACQUIRE(&ahead->response.sequence);
    __syncthreads();
    transport_rows_copy((char *)behind + output_offset, (const char *)ahead + output_offset, bytes,
                        threadIdx.x, blockDim.x);
    __syncthreads();
    if (threadIdx.x == 0)
        mailbox_response_publish(behind, sequence, status);
}

extern "C" __global__ void transport_post(uint32_t *word, uint32_t value)
{
    if (threadIdx.x == 0)
        PROTOCOL_STORE_RELEASE(word, value);
}
