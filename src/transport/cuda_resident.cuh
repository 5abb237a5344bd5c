// SPDX-License-Identifier: MIT
// The AtnAgent's resident kernel as a skeleton: one block, a warp an arena and one warp that watches
// life words; no shared memory, so that it costs no one an SM.
//
// What is done with a request is the handler's: a device class with
//     int  begin(const transport_view_t &view);    all lanes of the warp, same arguments
//     int  poll(const transport_view_t &view);      as long as the last call said SERVE_PENDING
//     void answered(const transport_view_t &view, int status);   after the answer was published
//     void abandon(const transport_view_t &view);   the arena goes while a request is in flight
// begin and poll return TRANSPORT_SERVE_PENDING or the xp_status_t to answer with, never wait, and
// leave the output rows written when they answer XP_OK. Kernel:
//     extern "C" __global__ void NAME(transport_resident_t *table, const life_page_t *life,
//                                     void *context)
//     { transport_resident_run(table, life, handler_t(context)); }
#ifndef XPOOL_TRANSPORT_CUDA_RESIDENT_CUH
#define XPOOL_TRANSPORT_CUDA_RESIDENT_CUH

#include "transport/cuda_device.h"
#include "transport/cuda_rows.cuh"

#define TRANSPORT_SERVE_PENDING (-1)
// Commands of the host and ends of processes are looked at every so many rounds (about 10 us).
#define TRANSPORT_ROUNDS_PER_LOOK 16u
#define TRANSPORT_WATCH_NS        20000u
// After this long without a request a warp naps between looks; a nap is far below a hop.
#define TRANSPORT_IDLE_NS     1000000u
#define TRANSPORT_IDLE_NAP_NS 200u

struct transport_view_t {
    uint32_t slot, lane;
    mailbox_request_t request; // deadline and DP rows on lane 0 only
    uint64_t row_bytes;
    const void *input;
    void *output;
};

static __device__ __forceinline__ uint64_t transport_from_lane0(uint64_t value)
{
    return __shfl_sync(0xffffffffu, (unsigned long long)value, 0);
}

// The watching warp: copies the life words of host memory into the table, so that only this warp
// waits for the bus.
static __device__ void transport_resident_watch(transport_resident_t *table,
                                                const life_page_t *life)
{
    const uint32_t lane = threadIdx.x % 32;
    for (;;) {
        if (lane < table->slots) {
            transport_slot_t *slot = &table->slot[lane];
            const uint32_t wanted = PROTOCOL_LOAD_ACQUIRE(&slot->wanted);
            if (transport_slot_state(wanted) == TRANSPORT_SLOT_ATTACHED) {
                const uint32_t end = life_word_look(&life->word[slot->life]);
                if (end)
                    PROTOCOL_STORE_RELEASE(&slot->ended, end);
            }
        }
        uint32_t leave = 0;
        if (lane == 0) {
            const uint32_t end = life_word_look(&life->word[table->own_life]);
            if (end)
                PROTOCOL_STORE_RELEASE(&table->ended, end);
            leave = end | PROTOCOL_LOAD_ACQUIRE(&table->stop);
        }
        if (transport_from_lane0(leave))
            return;
        __nanosleep(TRANSPORT_WATCH_NS);
    }
}

// Lane 0 only. Takes over a wanted slot: sequence numbers go on where the last AtnAgent stopped.
static __device__ void transport_slot_attach(transport_slot_t *slot)
{
    const mailbox_arena_t *arena = (const mailbox_arena_t *)slot->arena;
    slot->answered = PROTOCOL_LOAD_ACQUIRE(&arena->response.sequence);
    slot->reason = XP_OK;
}

template <class Handler>
static __device__ void transport_resident_serve(transport_resident_t *table, uint32_t index,
                                                Handler &handler)
{
    enum { GO_ON, LEAVE, ATTACH, DETACH, DROP };
    transport_slot_t *slot = &table->slot[index];
    transport_view_t view;
    view.slot = index;
    view.lane = threadIdx.x % 32;
    mailbox_arena_t *arena = nullptr;
    bool in_flight = false;
    uint32_t now = 0; // slot->now, which only this warp writes
    uint64_t answered = 0, idle_since = transport_clock_ns();

    for (uint32_t round = 0;; round++) {
        if (!arena || round % TRANSPORT_ROUNDS_PER_LOOK == 0) {
            uint32_t what = GO_ON, wanted = 0;
            if (view.lane == 0) {
                // Four loads in flight at once; an order is loaded again with acquire.
                wanted = PROTOCOL_LOAD_RELAXED(&slot->wanted);
                const uint32_t stop = PROTOCOL_LOAD_RELAXED(&table->stop);
                const uint32_t own = PROTOCOL_LOAD_RELAXED(&table->ended);
                const uint32_t ended = PROTOCOL_LOAD_RELAXED(&slot->ended);
                if (stop | own) {
                    what = LEAVE;
                } else if (transport_slot_turn(wanted) != transport_slot_turn(now)) {
                    wanted = PROTOCOL_LOAD_ACQUIRE(&slot->wanted);
                    what = transport_slot_state(wanted) == TRANSPORT_SLOT_ATTACHED ? ATTACH : DETACH;
                } else if (arena && ended) {
                    what = DROP;
                }
            }
            what = (uint32_t)transport_from_lane0(what);
            if (what != GO_ON && in_flight) {
                handler.abandon(view);
                in_flight = false;
            }
            if (what == LEAVE)
                return;
            if (what != GO_ON) {
                arena = nullptr;
                if (view.lane == 0) {
                    if (what == ATTACH)
                        transport_slot_attach(slot);
                    else if (what == DROP)
                        slot->reason = XP_CANCELLED;
                    now = what == DROP ? transport_slot_word(transport_slot_turn(now),
                                                             TRANSPORT_SLOT_DROPPED)
                                       : wanted;
                    PROTOCOL_STORE_RELEASE(&slot->now, now);
                }
                now = (uint32_t)transport_from_lane0(now);
            }
            if (transport_slot_state(now) != TRANSPORT_SLOT_ATTACHED) {
                __nanosleep(TRANSPORT_WATCH_NS);
                continue;
            }
            if (!arena) {
                arena = (mailbox_arena_t *)transport_from_lane0(slot->arena);
                answered = transport_from_lane0(slot->answered);
                view.row_bytes = transport_from_lane0(slot->row_bytes);
                view.input = (const char *)arena + transport_from_lane0(slot->input_offset);
                view.output = (char *)arena + transport_from_lane0(slot->output_offset);
                idle_since = transport_clock_ns();
            }
        }

        int answer = TRANSPORT_SERVE_PENDING;
        uint32_t drop = XP_OK;
        if (!in_flight) {
            uint32_t look = MAILBOX_NONE;
            if (view.lane == 0) {
                look = mailbox_request_read(arena, answered, &view.request);
                // Closed is terminal: no answer after it. The load is in flight together with the
                // record's; without a record it is made now and then.
                if (look == MAILBOX_LIVE || round % TRANSPORT_ROUNDS_PER_LOOK == 0)
                    drop = PROTOCOL_LOAD_RELAXED(&arena->closed);
                if (look == MAILBOX_LIVE && drop)
                    look = MAILBOX_NONE;
                if (look == MAILBOX_LIVE && !transport_slot_request_valid(slot, &view.request))
                    look = MAILBOX_NONSENSE;
                if (look == MAILBOX_NONSENSE) {
                    drop = XP_PEER;
                    mailbox_close(arena, XP_PEER);
                }
            }
            const uint64_t both = transport_from_lane0((uint64_t)look << 32 | drop);
            look = (uint32_t)(both >> 32);
            drop = (uint32_t)both;
            if (look == MAILBOX_LIVE) {
                view.request.sequence = transport_from_lane0(view.request.sequence);
                const uint64_t pair =
                    transport_from_lane0((uint64_t)view.request.layer << 32 | view.request.rows);
                view.request.layer = (uint32_t)(pair >> 32);
                view.request.rows = (uint32_t)pair;
                view.request.kind = (uint32_t)transport_from_lane0(view.request.kind);
                in_flight = true;
                __syncwarp(); // what lane 0 acquired, all lanes may read
                answer = handler.begin(view);
            } else if (drop == XP_OK && transport_clock_ns() - idle_since > TRANSPORT_IDLE_NS) {
                __nanosleep(TRANSPORT_IDLE_NAP_NS);
            }
        } else {
            answer = handler.poll(view);
        }
        if (drop != XP_OK) {
            now = transport_slot_word(transport_slot_turn(now), TRANSPORT_SLOT_DROPPED);
            if (view.lane == 0) {
                slot->reason = drop;
                PROTOCOL_STORE_RELEASE(&slot->now, now);
            }
            arena = nullptr;
        } else if (answer != TRANSPORT_SERVE_PENDING) {
            // The lanes' output rows happen before lane 0's release.
            __syncwarp();
            in_flight = false;
            answered = view.request.sequence;
            if (view.lane == 0) {
                mailbox_response_publish(arena, answered, (uint32_t)answer);
                slot->answered = answered;
                slot->requests++;
                slot->total_rows += view.request.rows;
            }
            handler.answered(view, answer);
            idle_since = transport_clock_ns();
        }
    }
}

template <class Handler>
static __device__ void transport_resident_run(transport_resident_t *table, const life_page_t *life,
                                              Handler handler)
{
    const uint32_t warp = threadIdx.x / 32;
    if (threadIdx.x == 0)
        PROTOCOL_STORE_RELEASE(&table->running, 1u);
    if (warp == table->slots)
        transport_resident_watch(table, life);
    else
        transport_resident_serve(table, warp, handler);
    __syncthreads();
    if (threadIdx.x == 0)
        PROTOCOL_STORE_RELEASE(&table->running, 0u);
}
#endif
