// SPDX-License-Identifier: MIT
// The scheduler of the runtime's device test: one thread that posts Invocations as the stages'
// scheduler does, through the functions of ffn/cuda/dispatch.h. It measures each from post to
// `done`.
#include "ffn_scheduler.h"

struct slot_state_t {
    uint64_t orders; // done
    uint64_t ticket;
    uint64_t posted_ns, resume_ns;
    uint32_t index;
    uint32_t active, waiting;
};

static __device__ __forceinline__ uint64_t clock_ns()
{
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

static __device__ void slot_post(const ffn_cuda_dispatch_t *d, ffn_cuda_poster_t *poster,
                                 slot_state_t *state, ffn_order_line_t *line, const ffn_order_t &o,
                                 uint32_t slot)
{
    const ffn_cuda_dispatch_lane_t *own = &d->lanes[slot];
    ffn_cuda_answer_t *answer = own->answer;
    const uint32_t layer = o.layer + state->index % o.layers;
    own->lane->layer = d->models[o.model].first_layer + layer;
    own->lane->rows = o.rows;
    own->lane->input = o.input;
    own->lane->output =
        o.outputs ? (char *)o.output + state->index % o.outputs * o.output_step : o.output;
    own->lane->partial = o.partial;
    answer->consumer_count = answer->source_count = 0;
    answer->ticket = ++state->ticket;
    answer->instance = o.model;
    answer->layer_of_model = layer;
    state->posted_ns = clock_ns();
    // Any rows in a decode lease: its kernel takes more than it is given.
    const bool takes = o.resident && (ffn_cuda_lease_few(poster->lease) ==
                                      (o.rows > d->models[o.model].decode_rows && o.few));
    const uint32_t kib = ffn_cuda_invocation_kib(&d->models[o.model], layer, o.rows);
    const uint32_t cuts = poster->cuts;
    const bool posted =
        takes && ffn_cuda_command_post(d, poster, slot, kib, state->ticket, NULL, 0);
    line->cuts += poster->cuts != cuts;
    if (!posted) {
        line->by_host++;
        ffn_cuda_request_post(d, poster, slot, o.urgent);
    }
    state->waiting = 1;
}

static __device__ void slot_turn(const ffn_cuda_dispatch_t *d, ffn_cuda_poster_t *poster,
                                 slot_state_t *state, ffn_order_t *order, ffn_order_line_t *line,
                                 uint32_t slot, bool look)
{
    if (!state->active) {
        if (!look || PROTOCOL_LOAD_ACQUIRE(&line->order.sequence) != state->orders + 1)
            return;
        *order = line->order;
        line->by_host = line->cuts = 0;
        state->index = 0;
        state->active = 1;
        state->resume_ns = 0;
    }
    if (state->waiting) {
        if (!ffn_cuda_lane_done(d, slot, state->ticket))
            return;
        const uint64_t now = clock_ns();
        if (state->index < FFN_SCHEDULER_SAMPLES)
            line->samples[state->index] = (uint32_t)(now - state->posted_ns);
        state->waiting = 0;
        state->index++;
        state->resume_ns = now + order->pause_ns;
    }
    if (state->index == order->count) {
        state->active = 0;
        state->orders++;
        PROTOCOL_STORE_RELEASE(&line->answered, state->orders);
        return;
    }
    if (clock_ns() >= state->resume_ns)
        slot_post(d, poster, state, line, *order, slot);
}

extern "C" __global__ void test_scheduler(const ffn_cuda_dispatch_t *dispatch,
                                          ffn_scheduler_page_t *page)
{
    slot_state_t state[FFN_SCHEDULER_SLOTS] = {};
    ffn_order_t order[FFN_SCHEDULER_SLOTS];
    ffn_cuda_poster_t poster = {};
    const uint32_t slots = min(dispatch->lane_count, FFN_SCHEDULER_SLOTS);
    for (uint32_t turn = 0;; turn++) {
        // Host memory is looked at now and then only.
        const bool look = turn % 16 == 0;
        ffn_cuda_lease_look(dispatch, &poster);
        for (uint32_t slot = 0; slot < slots; slot++)
            slot_turn(dispatch, &poster, &state[slot], &order[slot], &page->line[slot], slot, look);
        if (!look)
            continue;
        const bool failed = PROTOCOL_LOAD_ACQUIRE(dispatch->failure) != 0;
        if (failed || PROTOCOL_LOAD_ACQUIRE(&page->quit)) {
            PROTOCOL_STORE_RELEASE(&page->ended, failed ? 2u : 1u);
            return;
        }
    }
}
