/* SPDX-License-Identifier: MIT */
/*
 * Registration and messages of participants, their deaths, and the leases of Transport arenas.
 * Runs on the daemon's event loop thread.
 */
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "control/daemon_private.h"
#include "transport/transport.h"

#define LAST_WORDS         64                 /* packets read of a process that has died */
#define HELLO_TIMEOUT_NS   (5 * XP_NS_PER_S)  /* a connection that says nothing */
#define REFUSED_TIMEOUT_NS (1 * XP_NS_PER_S)  /* one that was refused and does not leave */
#define CLIENT_TIMEOUT_NS  (60 * XP_NS_PER_S) /* a command that asks nothing more */

void daemon_participant_describe(const daemon_participant_t *participant, char *out, size_t size)
{
    snprintf(out, size, "%s %s (pid %d)", wire_role_name(participant->role), participant->name,
             (int)participant->pid);
}

uint32_t daemon_participants_left(const daemon_t *daemon)
{
    uint32_t left = 0;
    for (uint32_t i = 0; i < DAEMON_MAX_PARTICIPANTS; i++)
        left += daemon->participants[i].used &&
                daemon->participants[i].role != xpw_Role_ROLE_CLIENT &&
                daemon->participants[i].role != xpw_Role_ROLE_NONE;
    return left;
}

void daemon_participant_free(daemon_participant_t *participant)
{
    if (participant->on_death)
        event_free(participant->on_death);
    if (participant->pidfd >= 0)
        close(participant->pidfd);
    wire_channel_destroy(participant->channel);
    *participant = (daemon_participant_t){.pidfd = -1};
}

void daemon_participant_kill(daemon_participant_t *participant)
{
    participant->was_killed = true;
    /* By pidfd where there is one: a number may already be somebody else's. */
    if (participant->pidfd < 0 ||
        syscall(SYS_pidfd_send_signal, participant->pidfd, SIGKILL, NULL, 0) != 0)
        kill(participant->pid, SIGKILL);
}

/* ---- arenas -----------------------------------------------------------------------------------
 */

void daemon_try_attach(daemon_t *daemon, daemon_instance_t *instance)
{
    uint32_t atn = daemon->planned->models[instance->index].atn_index;
    if (instance->state != INSTANCE_OFFERED || instance->attached_at_agent || !daemon->atn[atn] ||
        !daemon->atn[atn]->joined)
        return;
    instance->lease = ++daemon->next_lease;
    instance->attached_at_agent = true;
    xpw_Envelope envelope = {.which_body = xpw_Envelope_arena_attach_tag};
    xpw_ArenaAttach *attach = &envelope.body.arena_attach;
    attach->instance = instance->index;
    attach->rank = 0;
    attach->hidden = instance->offer.hidden;
    attach->max_rows = instance->offer.max_rows;
    attach->dtype = instance->offer.dtype;
    attach->dp_size = 1;
    attach->lease = instance->lease;
    if (wire_channel_send(daemon->atn[atn]->channel, &envelope, &instance->arena_fd, 1) != XP_OK)
        xp_log_error("cannot hand an arena to its AtnAgent");
}

void daemon_instance_release(daemon_t *daemon, daemon_instance_t *instance, const char *why)
{
    uint32_t atn = daemon->planned->models[instance->index].atn_index;
    if (instance->attached_at_agent && daemon->atn[atn]) {
        xpw_Envelope envelope = {.which_body = xpw_Envelope_arena_detach_tag};
        envelope.body.arena_detach.instance = instance->index;
        wire_channel_send(daemon->atn[atn]->channel, &envelope, NULL, 0);
    }
    instance->attached_at_agent = false;
    if (instance->arena_fd >= 0) {
        transport_arena_close(instance->arena_fd, XP_CLOSED);
        close(instance->arena_fd);
        instance->arena_fd = -1;
    }
    instance->state = INSTANCE_ABSENT;
    instance->participant = NULL;
    instance->healthy = false;
    instance->port = 0;
    memset(&instance->stats, 0, sizeof(instance->stats));
    snprintf(instance->absence, sizeof(instance->absence), "%s", why);
    daemon_send_backend(daemon, instance);
}

/* ---- going away -------------------------------------------------------------------------------
 */

/* The participant ended: by itself (said_bye) or not. Frees it. */
static void participant_gone(daemon_participant_t *participant)
{
    daemon_t *daemon = participant->daemon;
    char who[160];
    daemon_participant_describe(participant, who, sizeof(who));
    bool ordered = participant->said_bye;
    bool stopping = daemon->failed || daemon->state >= DAEMON_QUIESCING;
    xpw_Role role = participant->role;
    uint32_t index = participant->index;
    if (role == xpw_Role_ROLE_NONE || role == xpw_Role_ROLE_CLIENT) {
        daemon_participant_free(participant);
        return;
    }
    if (!ordered && stopping && !daemon->failed && !participant->was_killed) {
        /* It fell during the ordered end: that end was not clean. */
        xp_log_err("%s died while the system was stopping", who);
        daemon->exit_code = 1;
    }
    char short_name[130];
    snprintf(short_name, sizeof(short_name), "%s %.96s", wire_role_name(role), participant->name);
    int pid = (int)participant->pid;
    daemon_participant_free(participant);

    switch (role) {
    case xpw_Role_ROLE_INSTANCE: {
        char why[256];
        if (daemon->instances[index].absence[0]) /* it told why itself */
            snprintf(why, sizeof(why), "%s", daemon->instances[index].absence);
        else if (ordered)
            snprintf(why, sizeof(why), "its Instance was stopped; start it with `xpool serve %s`",
                     daemon->config->models[index].id);
        else
            snprintf(why, sizeof(why),
                     "its Instance (pid %d) died; start it again with `xpool serve %s`", pid,
                     daemon->config->models[index].id);
        if (!stopping)
            xp_log_warn("model %s: %s", daemon->config->models[index].id, why);
        daemon_instance_release(daemon, &daemon->instances[index], why);
        break;
    }
    case xpw_Role_ROLE_ATNAGENT:
        daemon->atn[index] = NULL;
        break;
    case xpw_Role_ROLE_FFNAGENT:
        daemon->ffn[index] = NULL;
        break;
    case xpw_Role_ROLE_GATEWAY:
        daemon->gateway = NULL;
        daemon->gateway_port = 0;
        if (!stopping)
            xp_log_warn("%s %s; start it again with `xpool gateway`", who,
                        ordered ? "was stopped" : "died");
        break;
    default:
        break;
    }
    bool agent = role == xpw_Role_ROLE_ATNAGENT || role == xpw_Role_ROLE_FFNAGENT;
    if (agent && !stopping && !ordered) {
        char what[128];
        snprintf(what, sizeof(what), "its process (pid %d) died", pid);
        daemon_fail(daemon, short_name, what);
    }
    event_active(daemon->on_tick, EV_TIMEOUT, 0); /* continue the stop, advance */
}

static void on_channel_closed(void *context, wire_channel_t *channel, xp_status_t status)
{
    daemon_participant_t *participant = context;
    if (status == XP_PEER) {
        char who[160];
        daemon_participant_describe(participant, who, sizeof(who));
        xp_log_warn("dropping %s: %s", who, xp_error_last()->text);
        participant->said_bye = false;
        if (participant->role != xpw_Role_ROLE_NONE && participant->role != xpw_Role_ROLE_CLIENT)
            daemon_participant_kill(
                participant); /* a peer that breaks the protocol is out of control */
    }
    participant_gone(participant);
}

static void on_message(void *context, wire_channel_t *channel, const xpw_Envelope *envelope,
                       wire_descriptors_t *fds);

static void on_process_death(evutil_socket_t fd, short events, void *context)
{
    daemon_participant_t *participant = context;
    wire_channel_t *channel = participant->channel;
    /* What it sent before it died is still in the socket: a Bye, or why it failed. */
    for (int i = 0; i < LAST_WORDS; i++) {
        xpw_Envelope envelope;
        wire_descriptors_t fds = {.count = 0};
        if (wire_receive(wire_channel_socket(channel), &envelope, &fds) != XP_OK)
            break;
        on_message(participant, channel, &envelope, &fds);
        wire_descriptors_close(&fds);
        if (participant->channel != channel)
            return; /* that message was its end */
    }
    participant_gone(participant);
}

/* ---- messages ---------------------------------------------------------------------------------
 */

static void refuse(daemon_participant_t *participant, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
static void refuse(daemon_participant_t *participant, const char *format, ...)
{
    xpw_Envelope envelope = {.which_body = xpw_Envelope_refused_tag};
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(envelope.body.refused.reason, sizeof(envelope.body.refused.reason), format,
              arguments);
    va_end(arguments);
    xp_log_warn("refused %s (pid %d): %s", wire_role_name(participant->role), (int)participant->pid,
                envelope.body.refused.reason);
    participant->role = xpw_Role_ROLE_NONE;
    participant->refused = true;
    participant->since_ns = xp_monotonic_ns();
    envelope.body.refused.stopping =
        participant->daemon->state >= DAEMON_QUIESCING && !participant->daemon->failed;
    wire_channel_send(participant->channel, &envelope, NULL, 0);
}

static void send_admitted(daemon_t *daemon, daemon_participant_t *participant)
{
    const plan_model_t *model = &daemon->planned->models[participant->index];
    xpw_Envelope envelope = {.which_body = xpw_Envelope_admitted_tag};
    xpw_Admitted *admitted = &envelope.body.admitted;
    admitted->generation = daemon->planned->plan.generation;
    admitted->instance = participant->index;
    admitted->hidden = model->spec.hidden;
    admitted->max_rows = model->max_rows;
    admitted->kv_tokens = model->kv_tokens;
    admitted->max_context = model->max_context;
    admitted->atn_index = model->atn_index;
    admitted->spin_ns = daemon->planned->plan.spin_ns;
    admitted->submission_timeout_ns = daemon->planned->plan.submission_timeout_ns;
    wire_channel_send(participant->channel, &envelope, NULL, 0);
}

static void watch_process(daemon_t *daemon, daemon_participant_t *participant)
{
    participant->pidfd = (int)syscall(SYS_pidfd_open, participant->pid, 0);
    if (participant->pidfd < 0)
        return; /* an old kernel: the closing socket tells us */
    participant->on_death =
        event_new(daemon->base, participant->pidfd, EV_READ, on_process_death, participant);
    if (participant->on_death)
        event_add(participant->on_death, NULL);
}

static void register_agent(daemon_t *daemon, daemon_participant_t *participant)
{
    bool ffn = participant->role == xpw_Role_ROLE_FFNAGENT;
    daemon_participant_t **slots = ffn ? daemon->ffn : daemon->atn;
    uint32_t index;
    if (!config_device_find(daemon->config, ffn, participant->name, &index)) {
        refuse(participant, "device %s is not in %s.devices", participant->name,
               ffn ? "ffn" : "atn");
        return;
    }
    if (slots[index]) {
        refuse(participant, "device %s already has its agent (pid %d)", participant->name,
               (int)slots[index]->pid);
        return;
    }
    if (daemon->state != DAEMON_REGISTERING) {
        refuse(participant, "Generation %llu is %s: agents cannot join any more",
               (unsigned long long)daemon->planned->plan.generation,
               daemon_state_name(daemon->state));
        return;
    }
    participant->index = index;
    slots[index] = participant;
}

static void register_instance(daemon_t *daemon, daemon_participant_t *participant,
                              const xpw_Hello *hello)
{
    const config_model_t *model = config_model_find(daemon->config, participant->name);
    if (!model) {
        refuse(participant, "model %s is not in the configuration", participant->name);
        return;
    }
    uint32_t index = (uint32_t)(model - daemon->config->models);
    daemon_instance_t *instance = &daemon->instances[index];
    if (hello->rank >= model->attention_tp * model->attention_dp) {
        refuse(participant, "rank %u of model %s: it has %u rank(s)", hello->rank, model->id,
               model->attention_tp * model->attention_dp);
        return;
    }
    if (instance->participant) {
        refuse(participant, "model %s already has its Instance (pid %d)", model->id,
               (int)instance->participant->pid);
        return;
    }
    participant->index = index;
    instance->participant = participant;
    instance->state = INSTANCE_ADMITTED;
    instance->admitted_ns = xp_monotonic_ns();
    instance->absence[0] = '\0';
    send_admitted(daemon, participant);
    daemon_send_backend(daemon, instance);
}

static void protocol_error(daemon_participant_t *participant, const char *what);

static void on_hello(daemon_participant_t *participant, const xpw_Hello *hello)
{
    daemon_t *daemon = participant->daemon;
    if (participant->role != xpw_Role_ROLE_NONE) {
        protocol_error(participant, "a second Hello");
        return;
    }
    participant->role = hello->role;
    snprintf(participant->name, sizeof(participant->name), "%s", hello->name);
    snprintf(participant->kernels, sizeof(participant->kernels), "%s", hello->kernels);
    if (hello->abi != WIRE_ABI) {
        refuse(participant, "control ABI %u, the daemon (%s) speaks %u: use the same build",
               hello->abi, XPOOL_VERSION, WIRE_ABI);
        return;
    }
    if (strcmp(hello->version, XPOOL_VERSION) != 0) {
        refuse(participant, "version %s, the daemon is %s: use the same build", hello->version,
               XPOOL_VERSION);
        return;
    }
    if (hello->role == xpw_Role_ROLE_CLIENT)
        return;
    if (memcmp(hello->digest, daemon->config->digest, sizeof(hello->digest)) != 0) {
        refuse(participant,
               "its resolved configuration differs from the daemon's; compare `xpool config dump` "
               "in both environments (the daemon read %s)",
               daemon->config->source_path[0] ? daemon->config->source_path : "no file");
        return;
    }
    if (daemon->failed) {
        refuse(participant, "the Generation has failed: %s: %.200s", daemon->failure.who,
               daemon->failure.what);
        return;
    }
    if (daemon->state >= DAEMON_QUIESCING) {
        refuse(participant, "the system is stopping (%s)", daemon->stop_reason);
        return;
    }
    watch_process(daemon, participant);
    switch (hello->role) {
    case xpw_Role_ROLE_ATNAGENT:
    case xpw_Role_ROLE_FFNAGENT:
        register_agent(daemon, participant);
        break;
    case xpw_Role_ROLE_INSTANCE:
        register_instance(daemon, participant, hello);
        break;
    case xpw_Role_ROLE_GATEWAY:
        if (daemon->gateway) {
            refuse(participant, "a gateway is running already (pid %d)", (int)daemon->gateway->pid);
            return;
        }
        daemon->gateway = participant;
        daemon->gateway_seen = true;
        for (uint32_t i = 0; i < daemon->config->model_count; i++)
            daemon_send_backend(daemon, &daemon->instances[i]);
        break;
    default:
        refuse(participant, "unknown role %d", (int)hello->role);
        return;
    }
    if (participant->role != xpw_Role_ROLE_NONE) {
        char who[160];
        daemon_participant_describe(participant, who, sizeof(who));
        xp_log_info("registered %s", who);
    }
}

static void protocol_error(daemon_participant_t *participant, const char *what)
{
    char who[160];
    daemon_participant_describe(participant, who, sizeof(who));
    xp_log_warn("dropping %s: %s", who, what);
    if (participant->role != xpw_Role_ROLE_NONE && participant->role != xpw_Role_ROLE_CLIENT)
        daemon_participant_kill(participant);
    participant_gone(participant);
}

static void on_instance_message(daemon_participant_t *participant, const xpw_Envelope *envelope,
                                wire_descriptors_t *fds)
{
    daemon_t *daemon = participant->daemon;
    daemon_instance_t *instance = &daemon->instances[participant->index];
    switch (envelope->which_body) {
    case xpw_Envelope_arena_offer_tag: {
        const plan_model_t *model = &daemon->planned->models[instance->index];
        if (instance->state != INSTANCE_ADMITTED || fds->count != 1 ||
            envelope->body.arena_offer.hidden != model->spec.hidden ||
            envelope->body.arena_offer.max_rows != model->max_rows ||
            envelope->body.arena_offer.dtype != XP_DTYPE_F32) {
            protocol_error(participant, "an arena that differs from the plan");
            return;
        }
        instance->arena_fd = wire_descriptors_take(fds, 0);
        instance->offer = envelope->body.arena_offer;
        instance->state = INSTANCE_OFFERED;
        daemon_try_attach(daemon, instance);
        break;
    }
    case xpw_Envelope_initialized_tag: {
        if (instance->state != INSTANCE_INITIALIZING) {
            protocol_error(participant, "Initialized out of order");
            return;
        }
        const xpw_Initialized *initialized = &envelope->body.initialized;
        snprintf(instance->host, sizeof(instance->host), "%s", initialized->host);
        instance->port = initialized->port;
        instance->weight_bytes = initialized->weight_bytes;
        instance->kv_bytes = initialized->kv_bytes;
        instance->max_context = initialized->max_context;
        instance->state = INSTANCE_SERVING;
        instance->absence[0] = '\0';
        xp_log_info("model %s serves on %s:%u", daemon->config->models[instance->index].id,
                    instance->host, instance->port);
        daemon_send_backend(daemon, instance);
        daemon_status_probe(daemon);
        daemon_advance(daemon);
        break;
    }
    case xpw_Envelope_instance_stats_tag:
        instance->stats = envelope->body.instance_stats;
        break;
    case xpw_Envelope_fail_report_tag:
        /* An Instance's own failure ends that Instance, not the Generation; but a system that
         * `xpool up` starts as a whole does not start without one of its models. */
        if (getenv("XPOOL_UNDER_UP") && !daemon->ready_ns) {
            daemon_fail(daemon, envelope->body.fail_report.who, envelope->body.fail_report.what);
            break;
        }
        xp_log_err("%s: %s", envelope->body.fail_report.who, envelope->body.fail_report.what);
        snprintf(instance->absence, sizeof(instance->absence), "%.255s",
                 envelope->body.fail_report.what);
        daemon_send_stop(participant, xpw_StopPhase_STOP_FINALIZE, 0);
        break;
    case xpw_Envelope_leave_tag:
        daemon_send_stop(participant, xpw_StopPhase_STOP_DRAIN, daemon->config->deadlines.drain);
        break;
    default:
        protocol_error(participant, "a message an Instance may not send");
    }
}

static void on_agent_message(daemon_participant_t *participant, const xpw_Envelope *envelope)
{
    daemon_t *daemon = participant->daemon;
    char who[160];
    snprintf(who, sizeof(who), "%s %s", wire_role_name(participant->role), participant->name);
    switch (envelope->which_body) {
    case xpw_Envelope_joined_tag:
        participant->joined = true;
        daemon_advance(daemon);
        break;
    case xpw_Envelope_progress_tag:
        participant->progress_done = envelope->body.progress.done_bytes;
        if (participant->role == xpw_Role_ROLE_FFNAGENT)
            participant->progress_total = daemon->planned->ffn[participant->index].weight_bytes;
        snprintf(participant->progress_what, sizeof(participant->progress_what), "%s",
                 envelope->body.progress.what);
        break;
    case xpw_Envelope_executable_tag:
        participant->executable = true;
        participant->execution = envelope->body.executable;
        daemon_advance(daemon);
        break;
    case xpw_Envelope_arena_attached_tag: {
        const xpw_ArenaAttached *attached = &envelope->body.arena_attached;
        if (attached->instance >= daemon->config->model_count)
            break;
        daemon_instance_t *instance = &daemon->instances[attached->instance];
        if (attached->lease != instance->lease || instance->state != INSTANCE_OFFERED)
            break; /* of an Instance that has gone meanwhile */
        if (attached->error[0]) {
            /* The Instance is not to blame; it leaves in order, and its model says why. */
            xp_log_err("model %s: its arena was not attached: %s",
                       daemon->config->models[instance->index].id, attached->error);
            snprintf(instance->absence, sizeof(instance->absence),
                     "its arena was not attached: %.200s", attached->error);
            daemon_send_stop(instance->participant, xpw_StopPhase_STOP_FINALIZE, 0);
            break;
        }
        instance->state = INSTANCE_ATTACHED;
        xpw_Envelope answer = {.which_body = xpw_Envelope_attached_tag};
        answer.body.attached.atn_pe = participant->index;
        wire_channel_send(instance->participant->channel, &answer, &daemon->descriptors.doorbell_fd,
                          1);
        daemon_advance(daemon);
        break;
    }
    case xpw_Envelope_fail_report_tag:
        if (daemon->failed || !daemon_fail_from_fabric(daemon))
            daemon_fail(daemon, who, envelope->body.fail_report.what);
        break;
    case xpw_Envelope_leave_tag: {
        bool instances = false;
        for (uint32_t i = 0; i < daemon->config->model_count; i++)
            instances = instances || daemon->instances[i].participant;
        if (instances) {
            char reason[128];
            snprintf(reason, sizeof(reason), "%.80s was asked to stop (%.30s)", who,
                     envelope->body.leave.reason);
            daemon_stop(daemon, reason);
        } else if (daemon->state < DAEMON_QUIESCING || daemon->hand_stopped) {
            daemon_hand_stop(daemon, who);
            daemon_send_stop(participant, xpw_StopPhase_STOP_FINALIZE, 0);
        }
        break;
    }
    default:
        protocol_error(participant, "a message an agent may not send");
    }
}

static void on_gateway_message(daemon_participant_t *participant, const xpw_Envelope *envelope)
{
    daemon_t *daemon = participant->daemon;
    switch (envelope->which_body) {
    case xpw_Envelope_listening_tag:
        snprintf(daemon->gateway_host, sizeof(daemon->gateway_host), "%s",
                 envelope->body.listening.host);
        daemon->gateway_port = envelope->body.listening.port;
        break;
    case xpw_Envelope_gateway_stats_tag:
        daemon->gateway_stats = envelope->body.gateway_stats;
        break;
    case xpw_Envelope_leave_tag:
        daemon_send_stop(participant, xpw_StopPhase_STOP_FINALIZE, 0);
        break;
    case xpw_Envelope_fail_report_tag:
        xp_log_err("%s: %s", envelope->body.fail_report.who, envelope->body.fail_report.what);
        break;
    default:
        protocol_error(participant, "a message a gateway may not send");
    }
}

static void on_client_message(daemon_participant_t *participant, const xpw_Envelope *envelope)
{
    daemon_t *daemon = participant->daemon;
    participant->since_ns = xp_monotonic_ns();
    switch (envelope->which_body) {
    case xpw_Envelope_check_tag: {
        daemon_verdict_t verdict;
        daemon_verdict(daemon, &verdict);
        xpw_Envelope answer = {.which_body = xpw_Envelope_verdict_tag};
        xpw_Verdict *out = &answer.body.verdict;
        out->fabric_executable = verdict.fabric_executable;
        out->system_ready = verdict.system_ready;
        out->serving_healthy = verdict.serving_healthy;
        snprintf(out->state, sizeof(out->state), "%s", daemon_state_name(daemon->state));
        snprintf(out->gateway_host, sizeof(out->gateway_host), "%s", daemon->gateway_host);
        out->gateway_port = daemon->gateway_port;
        out->reasons_count = (pb_size_t)verdict.reason_count;
        for (uint32_t i = 0; i < verdict.reason_count; i++)
            snprintf(out->reasons[i], sizeof(out->reasons[i]), "%s", verdict.reasons[i]);
        if (daemon->failed)
            snprintf(out->failure, sizeof(out->failure), "%s: %s (%s)", daemon->failure.who,
                     daemon->failure.what, daemon->failure.when);
        wire_channel_send(participant->channel, &answer, NULL, 0);
        break;
    }
    case xpw_Envelope_down_tag:
        participant->wants_down = true;
        daemon_stop(daemon, "xpool down");
        event_active(daemon->on_tick, EV_TIMEOUT, 0);
        break;
    case xpw_Envelope_fail_report_tag:
        daemon_fail(daemon, envelope->body.fail_report.who, envelope->body.fail_report.what);
        break;
    default:
        protocol_error(participant, "a message a client may not send");
    }
}

static void on_message(void *context, wire_channel_t *channel, const xpw_Envelope *envelope,
                       wire_descriptors_t *fds)
{
    daemon_participant_t *participant = context;
    if (participant->refused)
        return;
    if (envelope->which_body == xpw_Envelope_hello_tag) {
        on_hello(participant, &envelope->body.hello);
        if (participant->role != xpw_Role_ROLE_NONE)
            daemon_advance(participant->daemon);
        return;
    }
    if (envelope->which_body == xpw_Envelope_bye_tag) {
        participant->said_bye = true;
        return;
    }
    switch (participant->role) {
    case xpw_Role_ROLE_INSTANCE:
        on_instance_message(participant, envelope, fds);
        break;
    case xpw_Role_ROLE_ATNAGENT:
    case xpw_Role_ROLE_FFNAGENT:
        on_agent_message(participant, envelope);
        break;
    case xpw_Role_ROLE_GATEWAY:
        on_gateway_message(participant, envelope);
        break;
    case xpw_Role_ROLE_CLIENT:
        on_client_message(participant, envelope);
        break;
    default:
        break; /* refused, or speaks before Hello: nothing it says counts */
    }
}

void daemon_drop_silent(daemon_t *daemon)
{
    uint64_t now = xp_monotonic_ns();
    for (uint32_t i = 0; i < DAEMON_MAX_PARTICIPANTS; i++) {
        daemon_participant_t *participant = &daemon->participants[i];
        if (!participant->used)
            continue;
        uint64_t limit = participant->refused                        ? REFUSED_TIMEOUT_NS
                         : participant->role == xpw_Role_ROLE_NONE   ? HELLO_TIMEOUT_NS
                         : participant->role == xpw_Role_ROLE_CLIENT ? CLIENT_TIMEOUT_NS
                                                                     : UINT64_MAX;
        if (!participant->wants_down && now - participant->since_ns > limit)
            participant_gone(participant);
    }
    uint64_t startup_ns = (uint64_t)(daemon->config->deadlines.startup * (double)XP_NS_PER_S);
    for (uint32_t i = 0; i < daemon->config->model_count; i++) {
        daemon_instance_t *instance = &daemon->instances[i];
        if (!instance->participant || instance->state == INSTANCE_SERVING || daemon->failed ||
            daemon->state >= DAEMON_QUIESCING || now - instance->admitted_ns < startup_ns)
            continue;
        snprintf(instance->absence, sizeof(instance->absence),
                 "its Instance did not pass the initialisation barrier within %g s "
                 "(deadlines.startup; it was %s)",
                 daemon->config->deadlines.startup, daemon_instance_state_name(instance->state));
        xp_log_err("model %s: %s: killed", daemon->config->models[i].id, instance->absence);
        daemon_participant_kill(instance->participant);
        participant_gone(instance->participant);
    }
}

void daemon_on_accept(evutil_socket_t listener, short events, void *context)
{
    daemon_t *daemon = context;
    for (int i = 0; i < 16; i++) {
        int fd = accept4((int)listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0)
            return;
        pid_t pid;
        uid_t uid;
        if (wire_peer(fd, &pid, &uid) != XP_OK || pid <= 0 || (uid != getuid() && uid != 0)) {
            xp_log_warn("refused a connection of another user, or from outside this process "
                        "namespace, to the control socket");
            close(fd);
            continue;
        }
        daemon_participant_t *slot = NULL;
        for (uint32_t p = 0; p < DAEMON_MAX_PARTICIPANTS && !slot; p++)
            if (!daemon->participants[p].used)
                slot = &daemon->participants[p];
        if (!slot) {
            xp_log_warn("refused a connection: %d are open", DAEMON_MAX_PARTICIPANTS);
            close(fd);
            continue;
        }
        *slot = (daemon_participant_t){
            .daemon = daemon, .used = true, .pid = pid, .pidfd = -1, .since_ns = xp_monotonic_ns()};
        if (wire_channel_create(daemon->base, fd, on_message, on_channel_closed, slot,
                                &slot->channel) != XP_OK) {
            xp_log_error("cannot take a connection");
            close(fd);
            *slot = (daemon_participant_t){.pidfd = -1};
        }
    }
}
