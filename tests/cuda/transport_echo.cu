// SPDX-License-Identifier: MIT
// Device code of the Transport's tests: a resident kernel that answers by itself, so that the mailbox is
// tested and timed without a Fabric, and kernels that play a misbehaving or a very fast Instance.
#include "transport/cuda_resident.cuh"

// Answers a request of layer n with input + n + 1, element by element, as 16-bit integers: exact, and
// different for each layer. Layers from 1000 on are refused. Slots in `hold` are left without answer, with
// bit 31 only at layer 0.
static __device__ uint4 add_to(uint4 four, uint32_t both)
{
    return make_uint4(__vadd2(four.x, both), __vadd2(four.y, both), __vadd2(four.z, both),
                      __vadd2(four.w, both));
}

struct echo_handler_t {
    const uint32_t *hold;
    __device__ explicit echo_handler_t(void *context) : hold((const uint32_t *)context)
    {
    }
    __device__ int poll(const transport_view_t &view)
    {
        // Looked at last, so that the load costs no time; rows written for nothing do no harm.
        const uint32_t held = PROTOCOL_LOAD_RELAXED(hold);
        if (view.request.layer >= 1000)
            return XP_INVALID;
        const uint16_t *in = (const uint16_t *)view.input;
        uint16_t *out = (uint16_t *)view.output;
        const uint64_t bytes = view.request.rows * view.row_bytes, count = bytes / 16;
        const uint16_t add = (uint16_t)(view.request.layer + 1);
        const uint32_t both = add * 0x10001u;
        if (view.row_bytes % 16 == 0) {
            uint64_t i = view.lane;
            for (; i + 7 * 32 < count; i += 8 * 32) {
                uint4 part[8]; // all loads of a turn in flight at once
#pragma unroll
                for (int k = 0; k < 8; k++)
                    part[k] = ((const uint4 *)in)[i + 32 * k];
#pragma unroll
                for (int k = 0; k < 8; k++)
                    ((uint4 *)out)[i + 32 * k] = add_to(part[k], both);
            }
            for (; i < count; i += 32)
                ((uint4 *)out)[i] = add_to(((const uint4 *)in)[i], both);
        } else {
            for (uint64_t i = view.lane; i < bytes / 2; i += 32)
                out[i] = (uint16_t)(in[i] + add);
        }
        const bool all_layers = held >> 31 == 0;
        return (held >> view.slot & 1) && (all_layers || view.request.layer == 0)
                   ? TRANSPORT_SERVE_PENDING
                   : XP_OK;
    }
    __device__ int begin(const transport_view_t &view)
    {
        return poll(view);
    }
    __device__ void answered(const transport_view_t &, int)
    {
    }
    __device__ void abandon(const transport_view_t &)
    {
    }
};

extern "C" __global__ void __launch_bounds__((TRANSPORT_RESIDENT_SLOTS + 1) * 32)
    transport_echo(transport_resident_t *table, const life_page_t *life, void *context)
{
    transport_resident_run(table, life, echo_handler_t(context));
}

// As transport_echo, and leaves after its first answer: for tools under which no two kernels run at once.
struct echo_once_t {
    echo_handler_t echo;
    transport_resident_t *table;
    __device__ int poll(const transport_view_t &view)
    {
        const int answer = echo.poll(view);
        if (view.lane == 0)
            PROTOCOL_STORE_RELEASE(&table->stop, 1u);
        return answer;
    }
    __device__ int begin(const transport_view_t &view)
    {
        return poll(view);
    }
    __device__ void answered(const transport_view_t &, int)
    {
    }
    __device__ void abandon(const transport_view_t &)
    {
    }
};

extern "C" __global__ void transport_echo_once(transport_resident_t *table, const life_page_t *life,
                                               void *context)
{
    transport_resident_run(table, life, echo_once_t{echo_handler_t(context), table});
}

// Publishes the answer to the request that will come next, so that a wait finds it at once.
extern "C" __global__ void test_answer_ahead(mailbox_arena_t *arena, transport_device_state_t *state)
{
    mailbox_response_publish(arena, state->sequence + 1, XP_OK);
}

// An Instance that writes a record with `rows` rows and a sequence `skip` too high.
extern "C" __global__ void test_nonsense(mailbox_arena_t *arena, transport_device_state_t *state,
                                         uint32_t rows, uint32_t skip)
{
    arena->request.rows = rows;
    arena->request.layer = 0;
    arena->request.kind = 0;
    state->sequence += 1 + skip;
    state->phase = TRANSPORT_PHASE_LIVE;
    mailbox_request_publish(arena, state->sequence);
}

// `count` whole round trips by one block, as put, wait and take would do them; writes the time of each.
// wrong counts answers that are not input + layer + 1.
extern "C" __global__ void test_round_trips(mailbox_arena_t *arena, transport_device_state_t *state,
                                            const transport_live_t *live, uint32_t count,
                                            uint64_t row_bytes, uint64_t input_offset,
                                            uint64_t output_offset,
                                            const __grid_constant__ transport_patience_t patience,
                                            uint32_t *samples_ns, uint32_t sample_limit,
                                            uint32_t *wrong)
{
    __shared__ uint32_t over;
    const uint32_t threads = blockDim.x, thread = threadIdx.x;
    const uint64_t words = live->rows * row_bytes / 4;
    uint32_t *in = (uint32_t *)((char *)arena + input_offset);
    const volatile uint32_t *out = (const volatile uint32_t *)((char *)arena + output_offset);
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t layer = i % 64;
        const uint64_t start = transport_clock_ns();
        for (uint64_t w = thread; w < words; w += threads)
            in[w] = (uint32_t)(w * 2654435761u + i);
        __syncthreads();
        if (thread == 0) {
            transport_device_put(arena, state, live, layer, live->rows);
            uint64_t next = start + LIFE_LOOK_NS;
            transport_clock_t clock;
            transport_device_wait_start(&clock, start);
            while (!transport_device_wait_look(arena, state)) {
                const uint64_t now = transport_clock_ns();
                if (now < next)
                    continue;
                next = now + LIFE_LOOK_NS;
                if (transport_device_wait_life(&patience, state, &clock, now))
                    break;
            }
            over = state->status;
        }
        __syncthreads();
        if (over)
            return;
        for (uint64_t w = thread; w < words; w += threads)
            if (out[w] != __vadd2((uint32_t)(w * 2654435761u + i), (layer + 1) * 0x10001u))
                atomicAdd(wrong, 1u);
        __syncthreads();
        if (thread == 0) {
            transport_device_take(state);
            if (i < sample_limit)
                samples_ns[i] = (uint32_t)(transport_clock_ns() - start);
        }
    }
}

// The floor: two words, no records, no rows. `first` plays the Instance. Ends by itself when the other
// side stays away for a second.
extern "C" __global__ void test_ping_pong(uint64_t *words, uint32_t count, uint32_t first,
                                          uint32_t *samples_ns)
{
    for (uint32_t i = 1; i <= count; i++) {
        const uint64_t start = transport_clock_ns();
        if (first)
            PROTOCOL_STORE_RELEASE(&words[0], (uint64_t)i);
        while (PROTOCOL_LOAD_ACQUIRE(&words[first ? 8 : 0]) != i)
            if (transport_clock_ns() - start > (i == 1 ? 5000000000ull : 1000000000ull))
                return;
        if (!first)
            PROTOCOL_STORE_RELEASE(&words[8], (uint64_t)i);
        else
            samples_ns[i - 1] = (uint32_t)(transport_clock_ns() - start);
    }
}

// Stands for attention in captured graphs: `ns` of one block's time.
extern "C" __global__ void test_compute(uint32_t ns)
{
    const uint64_t start = transport_clock_ns();
    while (transport_clock_ns() - start < ns)
        continue;
}
