/* SPDX-License-Identifier: MIT */
/*
 * What the kernels of module stage do with rows, by one host thread: put, take, and a round of the
 * relay. The decisions are those of the headers that the GPU runs; here is only the copying.
 * HOST_KERNELS_AT: where a PE's memory is in this process; by default where the address says.
 * HOST_KERNELS_NOW_NS: the device's clock.
 */
#ifndef XPOOL_TESTS_HOST_KERNELS_H
#define XPOOL_TESTS_HOST_KERNELS_H

#include <stdbool.h>
#include <string.h>

#include "fabric/records.h"
#include "stage/job.h"
#include "stage/records.h"
#include "stage/relay.h"

#ifndef HOST_KERNELS_NOW_NS
#define HOST_KERNELS_NOW_NS() 0
#endif
#ifndef HOST_KERNELS_AT
#define HOST_KERNELS_AT(address, pe) ((char *)(uintptr_t)(address))
#endif

static void host_put(const stage_put_t *put, transport_device_state_t *state,
                     const transport_live_t *live, const void *input)
{
    if (stage_put_allowed(state))
        for (uint32_t t = 0; t < put->count; t++)
            memcpy((char *)(uintptr_t)put->targets[t].input + stage_put_offset(put, live), input,
                   stage_put_bytes(put, live));
    stage_device_put(put, state, live);
}
static void host_take(const stage_take_t *take, transport_device_state_t *state, void *output)
{
    stage_job_t job = {.kind = take->members ? STAGE_JOB_REDUCE : STAGE_JOB_COPY,
                       .dtype = take->dtype,
                       .narrow = 1,
                       .members = take->members,
                       .consumers = 1,
                       .from = (void *)(uintptr_t)(take->members ? take->partial : take->output),
                       .stride = take->partial_stride};
    job.to[0] = (stage_job_to_t){.rows = output, .count = state->rows * take->row_bytes / 2};
    if (transport_device_take_allowed(state))
        stage_job_run(&job, 0, job.to[0].count, 0, 1);
    else
        memset(output, 0xff, take->captured * take->row_bytes);
    transport_device_take(state);
}

/* Between two Generations: transport_carry of transport/cuda_kernels.cu. */
static void host_carry(mailbox_arena_t *behind, const mailbox_arena_t *ahead,
                       uint64_t output_offset, uint64_t bytes, uint64_t sequence, uint32_t status)
{
    memcpy((char *)behind + output_offset, (const char *)ahead + output_offset, bytes);
    mailbox_response_publish(behind, sequence, status);
}

static bool host_relay_busy[TRANSPORT_RESIDENT_SLOTS];
/* A round of a slot's warp: cuda_resident.cuh with the handler of relay.cu. */
static void host_relay_round(transport_resident_t *table, stage_relay_t *relay, uint32_t index)
{
    transport_slot_t *slot = &table->slot[index];
    const stage_relay_slot_t *own = &relay->slot[index];
    mailbox_arena_t *arena = (mailbox_arena_t *)(uintptr_t)slot->arena;
    if (transport_slot_turn(slot->wanted) != transport_slot_turn(slot->now)) {
        if (transport_slot_state(slot->wanted) == TRANSPORT_SLOT_ATTACHED)
            slot->answered = arena->response.sequence;
        host_relay_busy[index] = false;
        slot->now = slot->wanted;
    }
    if (transport_slot_state(slot->now) != TRANSPORT_SLOT_ATTACHED)
        return;
    mailbox_request_t request;
    if (mailbox_request_read(arena, slot->answered, &request) != MAILBOX_LIVE)
        return;
    if (request.layer >= own->layers) {
        slot->answered = request.sequence;
        slot->requests++;
        slot->total_rows += request.rows;
        mailbox_response_publish(arena, request.sequence, XP_INVALID);
        return;
    }
    uint32_t group =
        own->uniform ? own->uniform : ((const uint32_t *)(uintptr_t)own->groups)[request.layer];
    uint32_t members = fabric_group_size(group);
    uint32_t direct = own->direct && members > 1 ? (1u << members) - 1 : 0, missing = direct;
    uint64_t before = 0;
    for (uint32_t i = 0; i < own->rank / own->tp; i++)
        before += request.dp_rows[i];
    if (!host_relay_busy[index]) {
        host_relay_busy[index] = true;
        if (own->observed)
            relay->began_ns[index] = HOST_KERNELS_NOW_NS();
        for (uint32_t left = group; left; left &= left - 1) {
            uint32_t f = fabric_group_first(left);
            char *input = HOST_KERNELS_AT(own->input[f], own->pe[f]);
            if (own->rank % own->tp == 0)
                memcpy(input + before * slot->row_bytes, (char *)arena + slot->input_offset,
                       request.rows * slot->row_bytes);
            stage_line_t *line = (stage_line_t *)HOST_KERNELS_AT(own->line[f], own->pe[f]);
            stage_line_fill(line, &request);
            stage_line_publish(line, &request);
        }
        return;
    }
    transport_device_state_t state = {
        .sequence = request.sequence, .phase = TRANSPORT_PHASE_LIVE, .rows = request.rows};
    if (!stage_device_wait_look((mailbox_arena_t *)(uintptr_t)own->arena, &state, direct, &missing))
        return;
    host_relay_busy[index] = false;
    stage_take_t take = {.output = own->output,
                         .partial = own->partial,
                         .partial_stride = own->partial_stride,
                         .members = direct ? members : 0,
                         .dtype = own->dtype,
                         .row_bytes = slot->row_bytes};
    uint32_t status = state.status;
    host_take(&take, &state, (char *)arena + slot->output_offset);
    slot->answered = request.sequence;
    slot->requests++;
    slot->total_rows += request.rows;
    mailbox_response_publish(arena, request.sequence, status);
    if (own->observed && status == XP_OK)
        stage_relay_record(relay, index, request.sequence, request.layer, request.rows,
                           request.kind, HOST_KERNELS_NOW_NS());
}
#endif
