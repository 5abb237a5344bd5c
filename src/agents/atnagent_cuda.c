/* SPDX-License-Identifier: MIT */
/*
 * AtnAgent of a GPU. On the direct lane rows pass it by: it holds its place in the Generation and
 * touches no device. With the relay it owns the resident kernel that carries rows and answers. One
 * thread, the event loop's; no call on the device waits longer than ATTACH_LIMIT_NS. Joining the
 * symmetric heap of provider nvshmem has a thread of its own.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "agents/agents.h"
#include "agents/environment.h"
#include "agents/heap.h"
#include "agents/join.h"
#include "base/clock.h"
#include "base/log.h"
#include "control/participant.h"
#include "observe/observe.h"
#include "stage/stage.h"

#define ATTACH_LIMIT_NS (2 * XP_NS_PER_S)
#define DETACH_LIMIT_NS (5 * XP_NS_PER_S)
#define OBSERVE_MS      20 /* between two looks at what the relay recorded */

typedef struct atnagent {
    const config_t *config;
    const config_device_t *configured;
    uint32_t index;
    int ordinal;
    struct event_base *base;
    participant_t *participant;
    fabric_plan_t *plan;
    /* With the relay. */
    bool relay;
    bool keep; /* Instances outlive the Generation */
    int life_fd;
    uint32_t life_index;
    cuda_device_t device;
    transport_cuda_life_t life;
    agent_heap_t heap; /* provider nvshmem */
    stage_atn_t *stage;
    observe_t *observe; /* NULL: nobody looks, or rows pass by */
    uint64_t lost;      /* records that came faster */
    struct event *on_observe;
    uint32_t opened[FABRIC_MAX_INSTANCES]; /* bits of FfnAgents whose stages are mapped */
    bool finalizing;
} atnagent_t;

static uint64_t within(uint64_t limit_ns)
{
    return xp_monotonic_ns() + limit_ns;
}

static xp_status_t on_plane(atnagent_t *self, const xpw_DevicePlane *plane, wire_descriptors_t *fds)
{
    if (self->life_fd >= 0 || fds->count != 1)
        return xp_fail(XP_PEER, "DevicePlane out of order");
    self->life_fd = wire_descriptors_take(fds, 0);
    self->life_index = plane->life_index;
    self->relay = plane->relay;
    self->keep = plane->keep;
    return XP_OK;
}

static xp_status_t offer_relays(atnagent_t *self)
{
    for (uint32_t i = 0; i < self->plan->instance_count; i++) {
        const fabric_plan_instance_t *instance = &self->plan->instances[i];
        for (uint32_t r = 0; r < fabric_plan_ranks(instance); r++) {
            int fd;
            if (instance->rank_atn[r] != self->index)
                continue;
            XP_TRY(stage_atn_export(self->stage, i, r, &fd));
            xpw_Envelope envelope = {.which_body = xpw_Envelope_stage_offer_tag};
            envelope.body.stage_offer.kind = xpw_StageKind_STAGE_RELAY;
            envelope.body.stage_offer.instance = i;
            envelope.body.stage_offer.rank = r;
            xp_status_t status = participant_send(self->participant, &envelope, &fd, 1);
            close(fd);
            XP_TRY(status);
        }
    }
    return XP_OK;
}

static xp_status_t open_device(atnagent_t *self)
{
    const cuda_driver_t *driver;
    XP_TRY(cuda_driver_load(&driver));
    return cuda_device_open(driver, self->ordinal, &self->device);
}

static void drain_records(atnagent_t *self)
{
    if (self->stage && self->observe)
        self->lost += stage_atn_observe(self->stage, self->observe);
}

static void on_observe(evutil_socket_t fd, short events, void *context)
{
    drain_records(context);
}

static xp_status_t start_observer(atnagent_t *self)
{
    const struct timeval period = {.tv_usec = OBSERVE_MS * 1000};
    XP_TRY(observe_open(self->config->observe.folder, OBSERVE_ATN, self->configured->name,
                        self->config->observe.records, &self->observe));
    if (!self->observe)
        return XP_OK;
    for (uint32_t i = 0; i < self->plan->instance_count; i++)
        observe_name_instance(self->observe, i, self->plan->instances[i].id);
    self->on_observe = event_new(self->base, -1, EV_PERSIST, on_observe, self);
    return self->on_observe && event_add(self->on_observe, &period) == 0
               ? XP_OK
               : xp_fail(XP_NO_MEMORY, "no memory for the timer of the observer");
}

static xp_status_t start_relay(atnagent_t *self)
{
    XP_TRY(start_observer(self));
    XP_TRY(transport_cuda_life_open(&self->device, self->life_fd, self->life_index, &self->life));
    XP_TRY(stage_atn_create(&self->device, self->plan, self->index, &self->life, self->heap.heap,
                            self->observe ? self->config->observe.records : 0, &self->stage));
    return self->heap.heap ? XP_OK : offer_relays(self);
}

static bool serves_a_rank(const atnagent_t *self)
{
    for (uint32_t i = 0; i < self->plan->instance_count; i++)
        for (uint32_t r = 0; r < fabric_plan_ranks(&self->plan->instances[i]); r++)
            if (self->plan->instances[i].rank_atn[r] == self->index)
                return true;
    return false;
}

static xp_status_t send_joined(atnagent_t *self)
{
    xpw_Envelope envelope = {.which_body = xpw_Envelope_joined_tag};
    envelope.body.joined.generation = self->plan->generation;
    return participant_send(self->participant, &envelope, NULL, 0);
}

static void heap_joined(void *context, xp_status_t status, const char *error)
{
    atnagent_t *self = context;
    if (status != XP_OK) {
        participant_fail(self->participant, error);
        return;
    }
    status = serves_a_rank(self) ? start_relay(self) : XP_OK;
    if (status == XP_OK)
        status = send_joined(self);
    if (status != XP_OK)
        participant_fail(self->participant, xp_error_last()->text);
}

static xp_status_t on_join(atnagent_t *self, const xpw_Join *join, wire_descriptors_t *fds)
{
    if (self->plan || self->life_fd < 0)
        return xp_fail(XP_PEER, "Join out of order");
    XP_TRY(agent_join(join, fds, &self->plan, NULL));
    if (fabric_provider_heap(self->plan->provider)) { /* with or without ranks: all PEs join */
        XP_TRY(open_device(self));
        self->heap = (agent_heap_t){.device = &self->device,
                                    .pe = join->pe,
                                    .base = self->base,
                                    .done = heap_joined,
                                    .context = self};
        return agent_heap_begin(&self->heap, self->config, self->plan, self->participant);
    }
    if (self->relay && serves_a_rank(self)) {
        XP_TRY(open_device(self));
        XP_TRY(start_relay(self));
    }
    return send_joined(self);
}

static xp_status_t on_stage(atnagent_t *self, const xpw_StageGrant *grant, wire_descriptors_t *fds)
{
    if (!self->stage || fds->count != 1 || grant->instance >= self->plan->instance_count ||
        grant->ffn >= self->plan->ffn_count)
        return xp_fail(XP_PEER, "StageGrant out of order");
    if (self->opened[grant->instance] & 1u << grant->ffn)
        return XP_OK; /* for a former Instance, or another rank */
    XP_TRY(stage_atn_open(self->stage, grant->instance, grant->ffn, fds->fds[0]));
    self->opened[grant->instance] |= 1u << grant->ffn;
    return XP_OK;
}

/* What was found in the arena of an Instance of a former Generation. */
static void tell_found(atnagent_t *self, xpw_ArenaAttached *attached)
{
    transport_cuda_report_t report;
    if (stage_atn_report(self->stage, attached->instance, attached->rank, within(ATTACH_LIMIT_NS),
                         &report) != XP_OK)
        return; /* a device that does not tell is found out by those who wait */
    attached->answered = report.found_answered;
    attached->open = report.found_open;
}

static void on_attach(atnagent_t *self, const xpw_ArenaAttach *attach, wire_descriptors_t *fds)
{
    xpw_Envelope envelope = {.which_body = xpw_Envelope_arena_attached_tag};
    xpw_ArenaAttached *attached = &envelope.body.arena_attached;
    attached->instance = attach->instance;
    attached->rank = attach->rank;
    attached->lease = attach->lease;
    xp_status_t status;
    uint32_t from = attach->rank;
    if (self->stage && attach->resume) /* a look at each rank's arena */
        status =
            stage_atn_resume(self->stage, attach->instance, attach->rank, fds->fds, fds->count,
                             attach->life_index, within(ATTACH_LIMIT_NS * (1 + fds->count)), &from);
    else if (self->stage && fds->count == 1)
        status = stage_atn_attach(self->stage, attach->instance, attach->rank, fds->fds[0],
                                  attach->life_index, within(ATTACH_LIMIT_NS));
    else
        status = xp_fail(XP_PEER, "ArenaAttach out of order or without its descriptor");
    if (status != XP_OK) {
        xp_log_error("cannot attach an arena");
        snprintf(attached->error, sizeof(attached->error), "%.255s", xp_error_last()->text);
    } else if (attach->resume) {
        tell_found(self, attached);
        if (from != attach->rank)
            xp_log_info("model %s: rank %u got its last answer from rank %u",
                        self->plan->instances[attach->instance].id, attach->rank, from);
    }
    participant_send(self->participant, &envelope, NULL, 0);
    /* A device that does not answer may still write to what is mapped: none of it is let go but
     * with this process. */
    if (attach->resume && status == XP_TIMEOUT)
        participant_fail(self->participant, attached->error);
}

static void on_detach(atnagent_t *self, const xpw_ArenaDetach *detach)
{
    xpw_Envelope envelope = {.which_body = xpw_Envelope_arena_detached_tag};
    xpw_ArenaDetached *detached = &envelope.body.arena_detached;
    detached->instance = detach->instance;
    detached->rank = detach->rank;
    xp_status_t status = self->stage ? stage_atn_detach(self->stage, detach->instance, detach->rank,
                                                        within(DETACH_LIMIT_NS))
                                     : xp_fail(XP_PEER, "ArenaDetach out of order");
    if (status != XP_OK && status != XP_NOT_FOUND)
        snprintf(detached->error, sizeof(detached->error), "%.255s", xp_error_last()->text);
    participant_send(self->participant, &envelope, NULL, 0);
}

static void on_message(void *context, const xpw_Envelope *envelope, wire_descriptors_t *fds)
{
    atnagent_t *self = context;
    xp_status_t status = XP_OK;
    switch (envelope->which_body) {
    case xpw_Envelope_device_plane_tag:
        status = on_plane(self, &envelope->body.device_plane, fds);
        break;
    case xpw_Envelope_join_tag:
        status = on_join(self, &envelope->body.join, fds);
        break;
    case xpw_Envelope_fabric_id_tag:
        status = agent_heap_on_id(&self->heap, &envelope->body.fabric_id);
        break;
    case xpw_Envelope_stage_grant_tag:
        status = on_stage(self, &envelope->body.stage_grant, fds);
        break;
    case xpw_Envelope_arena_attach_tag:
        on_attach(self, &envelope->body.arena_attach, fds);
        break;
    case xpw_Envelope_arena_detach_tag:
        on_detach(self, &envelope->body.arena_detach);
        break;
    default:
        xp_log_warn("ignored %s", wire_body_name(envelope->which_body));
    }
    if (status != XP_OK)
        participant_fail(self->participant, xp_error_last()->text);
}

static void on_stop(void *context, xpw_StopPhase phase, uint32_t seconds)
{
    atnagent_t *self = context;
    if (phase != xpw_StopPhase_STOP_FINALIZE || self->finalizing)
        return;
    self->finalizing = true;
    drain_records(self);
    if (self->stage)
        (void)stage_atn_close_all(self->stage, XP_CLOSED);
    participant_bye(self->participant, "told to end");
}

static void on_failed(void *context)
{
    atnagent_t *self = context;
    /* Arenas that are kept go to the next AtnAgent, and what waits in them; their Instances hear by
     * themselves when there is none. */
    if (self->stage && !self->keep)
        (void)stage_atn_close_all(self->stage, XP_FATAL);
}

int atnagent_cuda_run(const config_t *config, const char *device)
{
    participant_bind_to_parent();
    signal(SIGPIPE, SIG_IGN);
    xp_log_identify("atnagent", device);
    int exit_code = 1;
    atnagent_t *self = calloc(1, sizeof(*self));
    if (!self)
        return 1;
    participant_handlers_t handlers = {
        .message = on_message, .stop = on_stop, .failed = on_failed, .context = self};
    self->config = config;
    self->life_fd = -1;
    self->configured = config_device_find(config, false, device, &self->index);
    XP_ASSERT(self->configured);
    if (environment_agent(config, self->configured, false, &self->ordinal) != XP_OK) {
        xp_log_error("cannot start");
        goto done;
    }
    self->base = event_base_new();
    if (!self->base || participant_create(self->base, config, xpw_Role_ROLE_ATNAGENT, device, 0,
                                          "cuda", &handlers, &self->participant) != XP_OK) {
        exit_code = participant_start_error();
        goto done;
    }
    event_base_dispatch(self->base);
    exit_code = participant_exit_code(self->participant);
    if (!self->heap.joined) /* the thread that joins holds the device */
        agent_heap_end(&self->heap, exit_code);
done:
    drain_records(self);
    if (self->lost)
        xp_log_warn("%llu records of the observer were lost; a larger observe.records keeps more",
                    (unsigned long long)self->lost);
    if (self->on_observe)
        event_free(self->on_observe);
    participant_destroy(self->participant);
    stage_atn_destroy(self->stage);
    observe_close(self->observe);
    transport_cuda_life_close(&self->life);
    agent_heap_end(&self->heap, exit_code);
    cuda_device_close(&self->device);
    if (self->life_fd >= 0)
        close(self->life_fd);
    free(self->plan);
    if (self->base)
        event_base_free(self->base);
    free(self);
    return exit_code;
}
