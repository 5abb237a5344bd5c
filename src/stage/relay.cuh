// SPDX-License-Identifier: MIT
// The AtnAgent's resident kernel but for the way in which it reaches the stages: takes requests
// from the Instances' arenas, speaks the stage protocol for them, and answers from its relay
// arenas. The way is the writer's, a device class of static functions that a whole warp calls:
//     rows(slot, ffn, offset, from, bytes, lane)   bytes of rows into the stage of `ffn`
//     lines(slot, group, value, lane)              the line into the stages of the group (bits),
//     after
//                                                  all rows; `value` of lane 0
// Device code only.
#ifndef XPOOL_STAGE_RELAY_CUH
#define XPOOL_STAGE_RELAY_CUH

#include "stage/job.h"
#include "stage/relay.h"
#include "transport/cuda_resident.cuh"

static_assert(TRANSPORT_SERVE_PENDING == -1, "statuses are not negative");

#define RELAY_ROUND 16u // looks for an answer between two at everything else

// Eight independent loads in flight a lane: a warp alone has to fill the link.
static __device__ void relay_copy(void *to, const void *from, uint64_t bytes, uint32_t lane)
{
    if ((((uintptr_t)to | (uintptr_t)from) & 15) != 0) {
        transport_rows_copy(to, from, bytes, lane, 32);
        return;
    }
    const uint4 *wide_from = (const uint4 *)from;
    uint4 *wide_to = (uint4 *)to;
    const uint64_t count = bytes / 16;
    uint64_t i = lane;
    for (; i + 7 * 32 < count; i += 8 * 32) {
        uint4 part[8];
#pragma unroll
        for (int k = 0; k < 8; k++)
            part[k] = wide_from[i + 32 * k];
#pragma unroll
        for (int k = 0; k < 8; k++)
            wide_to[i + 32 * k] = part[k];
    }
    for (; i < count; i += 32)
        wide_to[i] = wide_from[i];
    for (uint64_t j = count * 8 + lane; j < bytes / 2; j += 32)
        ((uint16_t *)to)[j] = ((const uint16_t *)from)[j];
}

// Adds the members' partials in PE order and casts once; as stage_job_run() does, in few registers,
// since a warp that spills would spill on the way of every answer.
static __device__ void relay_reduce(const stage_relay_slot_t *slot, uint32_t members, void *output,
                                    uint64_t elements, uint32_t lane)
{
    const float *from = (const float *)slot->partial;
    if (slot->hidden % 8 != 0) {
        for (uint64_t i = lane; i < elements; i += 32) {
            float sum = from[i];
            for (uint32_t m = 1; m < members; m++)
                sum += from[i + m * slot->partial_stride];
            ((uint16_t *)output)[i] = stage_bits(sum, slot->dtype);
        }
        return;
    }
    for (uint64_t i = lane * 4; i < elements; i += 32 * 4) {
        float4 sum = *(const float4 *)(from + i);
        for (uint32_t m = 1; m < members; m++) {
            const float4 part = *(const float4 *)(from + i + m * slot->partial_stride);
            sum = make_float4(sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w);
        }
        *(uint2 *)((uint16_t *)output + i) = make_uint2(
            stage_bits(sum.x, slot->dtype) | (uint32_t)stage_bits(sum.y, slot->dtype) << 16,
            stage_bits(sum.z, slot->dtype) | (uint32_t)stage_bits(sum.w, slot->dtype) << 16);
    }
}

// Not inlined, and called with words: the way of an answer has no registers for it.
static __device__ __noinline__ void relay_record(stage_relay_t *relay, uint32_t slot,
                                                 uint64_t sequence, uint32_t layer, uint32_t rows,
                                                 uint32_t kind)
{
    stage_relay_record(relay, slot, sequence, layer, rows, kind, transport_clock_ns());
}

template <class Writer> struct relay_handler_t {
    stage_relay_t *relay;
    uint32_t missing, direct, members; // of the request in flight
    uint32_t looks;
    __device__ explicit relay_handler_t(void *context)
        : relay((stage_relay_t *)context), missing(0), direct(0), members(0), looks(0)
    {
    }

    __device__ int begin(const transport_view_t &view)
    {
        const stage_relay_slot_t *slot = &relay->slot[view.slot];
        if (view.request.layer >= slot->layers)
            return XP_INVALID;
        if (view.lane == 0 && slot->observed)
            relay->began_ns[view.slot] = transport_clock_ns();
        const uint32_t group =
            slot->uniform ? slot->uniform : ((const uint32_t *)slot->groups)[view.request.layer];
        members = __popc(group);
        direct = slot->direct && members > 1 ? (1u << members) - 1 : 0;
        missing = direct ? direct : 1;
        const uint32_t dp = slot->rank / slot->tp;
        uint64_t before = 0;
        if (view.lane == 0)
            for (uint32_t i = 0; i < MAILBOX_MAX_DP; i++)
                before += i < dp ? view.request.dp_rows[i] : 0;
        before = transport_from_lane0(before);
        const uint64_t bytes = slot->rank % slot->tp ? 0 : view.request.rows * view.row_bytes;
        for (uint32_t left = bytes ? group : 0; left; left &= left - 1)
            Writer::rows(slot, __ffs(left) - 1, before * view.row_bytes, view.input, bytes,
                         view.lane);
        __syncwarp();
        stage_line_t value = view.request; // as the Instance Rank itself would write it; of lane 0
        for (uint32_t i = 0; slot->dp == 1 && i < MAILBOX_MAX_DP; i++)
            value.dp_rows[i] = i ? 0 : value.rows;
        Writer::lines(slot, group, value, view.lane);
        return TRANSPORT_SERVE_PENDING;
    }

    __device__ int poll(const transport_view_t &view)
    {
        const stage_relay_slot_t *slot = &relay->slot[view.slot];
        const mailbox_arena_t *arena = (const mailbox_arena_t *)slot->arena;
        uint32_t status = XP_OK, over = 0;
        if (view.lane == 0) {
            transport_device_state_t state;
            state.sequence = view.request.sequence;
            state.status = XP_OK;
            state.phase = TRANSPORT_PHASE_LIVE;
            // Whether the arena was closed is a trip to memory of its own.
            over = stage_device_wait_answer(arena, &state, direct, &missing) ||
                   (looks++ % RELAY_ROUND == 0 &&
                    stage_device_wait_closed(arena, &state, direct, &missing));
            status = state.status;
        }
        const uint64_t both = transport_from_lane0((uint64_t)over << 32 | status);
        if (!(both >> 32))
            return TRANSPORT_SERVE_PENDING;
        if ((uint32_t)both != XP_OK)
            return (int)(uint32_t)both;
        __syncwarp();
        const uint64_t bytes = view.request.rows * view.row_bytes;
        if (direct) {
            relay_reduce(slot, members, view.output, bytes / 2, view.lane);
        } else {
            relay_copy(view.output, (const void *)slot->output, bytes, view.lane);
        }
        return XP_OK;
    }

    __device__ void answered(const transport_view_t &view, int status)
    {
        if (view.lane == 0 && status == XP_OK && relay->slot[view.slot].observed)
            relay_record(relay, view.slot, view.request.sequence, view.request.layer,
                         view.request.rows, view.request.kind);
    }

    // What the FfnAgents still write goes to the relay arena, which stays; they are detached too
    // before the slot is used again.
    __device__ void abandon(const transport_view_t &)
    {
    }
};

// A slot's description and a fresh relay arena: no words of an earlier Instance in it.
static __device__ void relay_describe(stage_relay_slot_t *slot, const stage_relay_slot_t &value,
                                      const mailbox_arena_t &header, uint64_t *clock_ns)
{
    mailbox_arena_t *arena = (mailbox_arena_t *)value.arena;
    if (threadIdx.x == 0) {
        *clock_ns = transport_clock_ns();
        *slot = value;
        *arena = header;
    }
    mailbox_partial_t *partials = mailbox_partial_at(arena, 0);
    for (uint32_t i = threadIdx.x; i < MAILBOX_MAX_PARTIALS; i += blockDim.x) {
        partials[i].status = 0;
        partials[i].sequence = 0;
    }
}
#endif
