/* SPDX-License-Identifier: MIT */
/* Joining the symmetric heap: the event loop's thread, and a worker for the collective call. */
#include "agents/heap.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "control/gpus.h"

static xp_status_t join_job(void *context)
{
    agent_heap_t *self = context;
    uint64_t began_ns = xp_monotonic_ns();
    xp_log_info("joining NVSHMEM as PE %u", self->pe);
    XP_TRY(cuda_device_use(self->device));
    XP_TRY(stage_heap_join(self->heap, self->device, self->pe, self->id));
    self->joined = true;
    xp_log_info("joined NVSHMEM as PE %u in %.2f s", self->pe,
                (double)(xp_monotonic_ns() - began_ns) / 1e9);
    return XP_OK;
}

static void join_done(void *context, xp_status_t status, const char *error)
{
    agent_heap_t *self = context;
    self->done(self->context, status, error);
}

xp_status_t agent_heap_begin(agent_heap_t *self, const config_t *config, const fabric_plan_t *plan,
                             participant_t *participant)
{
    stage_heap_place_t place;
    XP_TRY(gpus_nvshmem(config, &place));
    XP_TRY(stage_heap_open(&place, plan, &self->heap));
    if (self->pe != 0)
        return XP_OK;
    xpw_Envelope envelope = {.which_body = xpw_Envelope_fabric_id_tag};
    XP_TRY(stage_heap_make_id(self->heap, self->id));
    envelope.body.fabric_id.generation = plan->generation;
    memcpy(envelope.body.fabric_id.id, self->id, sizeof(self->id));
    XP_TRY(participant_send(participant, &envelope, NULL, 0));
    return worker_start(&self->worker, self->base, join_job, join_done, self);
}

xp_status_t agent_heap_on_id(agent_heap_t *self, const xpw_FabricId *id)
{
    _Static_assert(sizeof(id->id) == XPOOL_NVSHMEM_ID_BYTES, "an id fits its message");
    if (!self->heap || self->pe == 0 || self->worker.started)
        return xp_fail(XP_PEER, "FabricId out of order");
    memcpy(self->id, id->id, sizeof(self->id));
    return worker_start(&self->worker, self->base, join_job, join_done, self);
}

void agent_heap_end(agent_heap_t *self, int exit_code)
{
    if (!self->heap)
        return;
    fflush(NULL);
    stage_heap_sweep(getpid());
    _exit(exit_code);
}
