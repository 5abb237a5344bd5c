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
#include "config/address.h"
#include "control/participant.h"
#include "http/gateway.h"

#define STATS_PERIOD_MS   500
#define LINGER_MS         150 /* after a failure */
#define TELL_AFTER_MS     100 /* of it, for answers that Instances still end by themselves */
#define DRAIN_PERIOD_MS   20
#define DRAIN_DEFAULT_S   3 /* where a Stop names no limit */
#define DRAIN_SHARE_OF_10 8 /* of the limit; the rest is for ending, before the daemon kills */

typedef struct gateway {
    struct event_base *base;
    participant_t *participant;
    http_gateway_t *http;
    struct event *on_stats, *on_drain;
    char host[CONFIG_MAX_HOST];
    uint64_t stop_limit_ns; /* deadlines.stop */
    uint64_t drain_deadline_ns;
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

static void on_drain(evutil_socket_t fd, short events, void *context)
{
    gateway_t *self = context;
    uint32_t open = http_gateway_open_requests(self->http);
    if (open && xp_monotonic_ns() < self->drain_deadline_ns)
        return;
    if (open)
        xp_log_warn("%u answer(s) were not wholly sent when the time to stop was over", open);
    participant_bye(self->participant, "told to end");
}

static void on_stop(void *context, xpw_StopPhase phase, uint32_t seconds)
{
    gateway_t *self = context;
    http_gateway_quiesce(self->http);
    if (phase != xpw_StopPhase_STOP_FINALIZE || self->drain_deadline_ns)
        return;
    /* The Instances are done; the last of their answers may still be on its way to a client. */
    uint64_t limit_ns = (seconds ? seconds : DRAIN_DEFAULT_S) * XP_NS_PER_S;
    if (limit_ns > self->stop_limit_ns)
        limit_ns = self->stop_limit_ns; /* the message counts whole seconds */
    self->drain_deadline_ns = xp_monotonic_ns() + limit_ns / 10 * DRAIN_SHARE_OF_10;
    struct timeval period = {.tv_usec = DRAIN_PERIOD_MS * 1000};
    event_add(self->on_drain, &period);
    on_drain(-1, 0, self);
}

/* Whoever still waits for an answer is told, before this process ends. */
static void on_failed(void *context)
{
    gateway_t *self = context;
    http_gateway_fail(self->http, "the system has failed; its log says why", TELL_AFTER_MS);
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
    participant_handlers_t handlers = {.message = on_message,
                                       .stop = on_stop,
                                       .failed = on_failed,
                                       .context = self,
                                       .linger_ms = LINGER_MS};
    self->stop_limit_ns = (uint64_t)(config->deadlines.stop * (double)XP_NS_PER_S);
    http_gateway_config_t http = {
        .host = self->host,
        .response_timeout_ms = (uint32_t)(config->deadlines.request * 1000.0),
    };
    if (config_address_split(config->gateway.http, self->host, &http.port) != XP_OK) {
        xp_log_error("cannot start");
        goto done;
    }
    self->base = event_base_new();
    if (self->base) {
        self->on_stats = event_new(self->base, -1, EV_PERSIST, on_stats, self);
        self->on_drain = event_new(self->base, -1, EV_PERSIST, on_drain, self);
    }
    struct timeval period = {.tv_usec = STATS_PERIOD_MS * 1000};
    if (!self->base || !self->on_stats || !self->on_drain ||
        event_add(self->on_stats, &period) != 0 ||
        http_gateway_create(&http, self->base, &self->http) != XP_OK) {
        xp_log_error("cannot start");
        goto done;
    }
    if (participant_create(self->base, config, xpw_Role_ROLE_GATEWAY, config->gateway.http, 0, "",
                           &handlers, &self->participant) != XP_OK) {
        exit_code = participant_start_error();
        goto done;
    }
    xpw_Envelope envelope = {.which_body = xpw_Envelope_listening_tag};
    /* For people, who open http://HOST:PORT. */
    char *shown = envelope.body.listening.host;
    snprintf(shown, sizeof(envelope.body.listening.host), strchr(self->host, ':') ? "[%s]" : "%s",
             self->host);
    envelope.body.listening.port = http_gateway_port(self->http);
    participant_send(self->participant, &envelope, NULL, 0);
    xp_log_info("the door is open at http://%s:%u", shown, http_gateway_port(self->http));
    event_base_dispatch(self->base);
    exit_code = participant_exit_code(self->participant);
done:
    participant_destroy(self->participant);
    http_gateway_destroy(self->http);
    if (self->on_stats)
        event_free(self->on_stats);
    if (self->on_drain)
        event_free(self->on_drain);
    if (self->base)
        event_base_free(self->base);
    free(self);
    return exit_code;
}
