/* SPDX-License-Identifier: MIT */
/*
 * AtnAgent: owns one attention device's place in the Fabric and the leases of Transport arenas
 * there. The event loop thread speaks with the daemon; one service thread runs the data plane
 * (fabric_atn_run). Arenas come and go by message; the loop never touches a request.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "agents/agents.h"
#include "agents/join.h"
#include "agents/worker.h"
#include "base/clock.h"
#include "base/log.h"
#include "control/participant.h"

#define SERVICE_JOIN_MS 2000

typedef struct atnagent {
    const config_t *config;
    const char *device;
    struct event_base *base;
    participant_t *participant;
    fabric_plan_t *plan;
    fabric_t *fabric;
    fabric_atn_t *service;
    observe_t *observe;
    worker_t worker;
    bool finalizing;
} atnagent_t;

static xp_status_t service_job(void *context)
{
    atnagent_t *self = context;
    return fabric_atn_run(self->service);
}

static void service_done(void *context, xp_status_t status, const char *error)
{
    atnagent_t *self = context;
    if (status == XP_CLOSED || status == XP_OK)
        participant_bye(self->participant, "the Fabric was shut down");
    else
        participant_fail(self->participant, error);
}

static void on_join(atnagent_t *self, const xpw_Join *join, wire_descriptors_t *fds)
{
    if (self->fabric) {
        participant_fail(self->participant, "a second Join");
        return;
    }
    if (agent_join(join, fds, &self->plan, &self->fabric) != XP_OK ||
        fabric_atn_create(self->fabric, xp_clock_system(), &self->service) != XP_OK ||
        observe_open(self->config->observe.folder, OBSERVE_ATN, self->device,
                     self->config->observe.records, &self->observe) != XP_OK) {
        participant_fail(self->participant, xp_error_last()->text);
        return;
    }
    fabric_atn_observe(self->service, self->observe);
    fabric_atn_keep_arenas(self->service); /* what becomes of open requests is for the daemon */
    if (worker_start(&self->worker, self->base, service_job, service_done, self) != XP_OK) {
        participant_fail(self->participant, xp_error_last()->text);
        return;
    }
    xpw_Envelope envelope = {.which_body = xpw_Envelope_joined_tag};
    envelope.body.joined.generation = join->generation;
    participant_send(self->participant, &envelope, NULL, 0);
}

static void on_attach(atnagent_t *self, const xpw_ArenaAttach *attach, wire_descriptors_t *fds)
{
    xpw_Envelope envelope = {.which_body = xpw_Envelope_arena_attached_tag};
    xpw_ArenaAttached *attached = &envelope.body.arena_attached;
    attached->instance = attach->instance;
    attached->rank = attach->rank;
    attached->lease = attach->lease;
    transport_geometry_t geometry = {.hidden = attach->hidden,
                                     .max_rows = attach->max_rows,
                                     .dtype = (xp_dtype_t)attach->dtype,
                                     .dp_size = attach->dp_size};
    transport_server_t *server = NULL;
    xp_status_t status =
        fds->count == 1 && self->service
            ? transport_server_create(fds->fds[0], &geometry, &server)
            : xp_fail(XP_PEER, "ArenaAttach out of order or without its descriptor");
    if (status == XP_OK) {
        status = fabric_atn_attach(self->service, attach->instance, attach->rank, server);
        if (status != XP_OK)
            transport_server_destroy(server);
    }
    if (status != XP_OK) {
        xp_log_error("cannot attach an arena");
        snprintf(attached->error, sizeof(attached->error), "%.255s", xp_error_last()->text);
    }
    participant_send(self->participant, &envelope, NULL, 0);
}

static void on_message(void *context, const xpw_Envelope *envelope, wire_descriptors_t *fds)
{
    atnagent_t *self = context;
    switch (envelope->which_body) {
    case xpw_Envelope_join_tag:
        on_join(self, &envelope->body.join, fds);
        break;
    case xpw_Envelope_arena_attach_tag:
        on_attach(self, &envelope->body.arena_attach, fds);
        break;
    case xpw_Envelope_arena_detach_tag:
        if (self->service && fabric_atn_detach(self->service, envelope->body.arena_detach.instance,
                                               envelope->body.arena_detach.rank) != XP_OK)
            xp_log_error("cannot detach an arena");
        break;
    default:
        xp_log_warn("ignored %s", wire_body_name(envelope->which_body));
    }
}

static void on_stop(void *context, xpw_StopPhase phase, uint32_t seconds)
{
    atnagent_t *self = context;
    if (phase != xpw_StopPhase_STOP_FINALIZE || self->finalizing)
        return;
    self->finalizing = true;
    if (!self->service)
        participant_bye(self->participant, "stopped before it joined");
    else
        fabric_shutdown(self->fabric); /* the service ends and says goodbye */
}

static void on_failed(void *context)
{
    atnagent_t *self = context;
    if (self->fabric) /* whoever waits in shared memory must not wait for us */
        fabric_fail(self->fabric, FABRIC_PE_OBSERVER, "the control channel reported a failure");
}

int atnagent_run(const config_t *config, const char *device)
{
    const config_device_t *configured = config_device_find(config, false, device, NULL);
    if (configured && configured->kind == CONFIG_DEVICE_CUDA)
        return atnagent_cuda_run(config, device);
    participant_bind_to_parent();
    signal(SIGPIPE, SIG_IGN);
    xp_log_identify("atnagent", device);
    int exit_code = 1;
    atnagent_t *self = calloc(1, sizeof(*self));
    if (!self)
        return 1;
    participant_handlers_t handlers = {
        .message = on_message, .stop = on_stop, .failed = on_failed, .context = self};
    self->worker.event_fd = -1;
    self->config = config;
    self->device = device;
    if (!config_device_find(config, false, device, NULL)) {
        xp_log_err("device %s is not in atn.devices", device);
        exit_code = 2;
        goto done;
    }
    self->base = event_base_new();
    if (!self->base || participant_create(self->base, config, xpw_Role_ROLE_ATNAGENT, device, 0, "",
                                          &handlers, &self->participant) != XP_OK) {
        exit_code = participant_start_error();
        goto done;
    }
    event_base_dispatch(self->base);
    exit_code = participant_exit_code(self->participant);
    if (!worker_join(&self->worker, exit_code ? SERVICE_JOIN_MS / 10 : SERVICE_JOIN_MS)) {
        /* The service is stuck; nothing it holds outlives the process. */
        xp_log_err("the data plane did not stop");
        _exit(exit_code ? exit_code : 1);
    }
    worker_fini(&self->worker);
done:
    participant_destroy(self->participant);
    fabric_atn_destroy(self->service);
    observe_close(self->observe);
    fabric_detach(self->fabric);
    free(self->plan);
    if (self->base)
        event_base_free(self->base);
    free(self);
    return exit_code;
}
