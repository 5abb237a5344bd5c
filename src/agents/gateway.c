/* SPDX-License-Identifier: MIT */
/* Gateway: the one door. One event loop thread speaks with the daemon, which tells where every
 * model is, and forwards requests to the Instances. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agents/agents.h"
#include "base/clock.h"
#include "base/log.h"
#include "control/participant.h"
#include "http/gateway.h"

#define STATS_PERIOD_MS 500

typedef struct gateway {
    struct event_base *base;
    participant_t *participant;
    http_gateway_t *http;
    struct event *on_stats;
    char host[64];
} gateway_t;

static void on_message(void *context, const xpw_Envelope *envelope, wire_descriptors_t *fds)
{
    gateway_t *self = context;
    if (envelope->which_body != xpw_Envelope_backend_tag) {
        xp_log_warn("ignored %s", wire_body_name(envelope->which_body));
        return;
    }
    const xpw_Backend *backend = &envelope->body.backend;
    http_backend_state_t state = backend->state == WIRE_BACKEND_UP     ? HTTP_BACKEND_UP
                                 : backend->state == WIRE_BACKEND_DOWN ? HTTP_BACKEND_DOWN
                                                                       : HTTP_BACKEND_STARTING;
    if (http_gateway_set_backend(self->http, backend->model, backend->host, (uint16_t)backend->port,
                                 state, backend->reason) != XP_OK)
        xp_log_error("cannot route a model");
}

static void on_stop(void *context, xpw_StopPhase phase, uint32_t seconds)
{
    gateway_t *self = context;
    http_gateway_quiesce(self->http);
    if (phase == xpw_StopPhase_STOP_FINALIZE)
        participant_bye(self->participant, "told to end");
}

static void on_stats(evutil_socket_t fd, short events, void *context)
{
    gateway_t *self = context;
    http_gateway_stats_t stats;
    http_gateway_stats(self->http, &stats);
    xpw_Envelope envelope = {.which_body = xpw_Envelope_gateway_stats_tag};
    envelope.body.gateway_stats.requests = stats.requests;
    envelope.body.gateway_stats.open = stats.open;
    envelope.body.gateway_stats.errors = stats.errors;
    participant_send(self->participant, &envelope, NULL, 0);
}

int gateway_run(const config_t *config)
{
    participant_bind_to_parent();
    signal(SIGPIPE, SIG_IGN);
    xp_log_identify("gateway", "");
    int exit_code = 1;
    gateway_t *self = calloc(1, sizeof(*self));
    if (!self)
        return 1;
    participant_handlers_t handlers = {.message = on_message, .stop = on_stop, .context = self};
    snprintf(self->host, sizeof(self->host), "%s", config->gateway.http);
    char *colon = strrchr(self->host, ':');
    int port = colon ? atoi(colon + 1) : 0;
    if (colon)
        *colon = '\0';
    http_gateway_config_t http = {
        .host = self->host,
        .port = (uint16_t)port,
        .response_timeout_ms = (uint32_t)(config->deadlines.request * 1000.0),
    };
    self->base = event_base_new();
    if (self->base)
        self->on_stats = event_new(self->base, -1, EV_PERSIST, on_stats, self);
    struct timeval period = {.tv_usec = STATS_PERIOD_MS * 1000};
    if (!self->base || !self->on_stats || event_add(self->on_stats, &period) != 0 ||
        http_gateway_create(&http, self->base, &self->http) != XP_OK) {
        xp_log_error("cannot start");
        goto done;
    }
    if (participant_create(self->base, config, xpw_Role_ROLE_GATEWAY, config->gateway.http, 0, "",
                           &handlers, &self->participant) != XP_OK) {
        xp_log_error("cannot start");
        goto done;
    }
    xpw_Envelope envelope = {.which_body = xpw_Envelope_listening_tag};
    snprintf(envelope.body.listening.host, sizeof(envelope.body.listening.host), "%s", self->host);
    envelope.body.listening.port = http_gateway_port(self->http);
    participant_send(self->participant, &envelope, NULL, 0);
    xp_log_info("the door is open at http://%s:%u", self->host, http_gateway_port(self->http));
    event_base_dispatch(self->base);
    exit_code = participant_exit_code(self->participant);
done:
    participant_destroy(self->participant);
    http_gateway_destroy(self->http);
    if (self->on_stats)
        event_free(self->on_stats);
    if (self->base)
        event_base_free(self->base);
    free(self);
    return exit_code;
}
