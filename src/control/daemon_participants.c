/* SPDX-License-Identifier: MIT */
/*
 * Registration and messages of participants, their deaths, and the leases of Transport arenas.
 * Runs on the daemon's event loop thread.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
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
#include "control/daemon_kv.h"
#include "control/daemon_private.h"

#define LAST_WORDS         64                 /* packets read of a process that has died */
#define PROC_TEXT_MAX      4096               /* of /proc/PID/stat and status */
#define PROC_FLAGS_ENDING  0x204u             /* Linux: PF_EXITING, PF_DUMPCORE */
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
    daemon_plane_farewell(participant);
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
    daemon_plane_end_word(participant);
    /* By pidfd where there is one: a number may already be somebody else's. */
    if (participant->pidfd < 0 ||
        syscall(SYS_pidfd_send_signal, participant->pidfd, SIGKILL, NULL, 0) != 0)
        kill(participant->pid, SIGKILL);
}

/* A file of /proc as text; empty where there is none. */
static void read_proc(pid_t pid, const char *file, char *out, size_t size)
{
    char path[64];
    snprintf(path, sizeof(path), "/proc/%d/%s", (int)pid, file);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t got = fd >= 0 ? read(fd, out, size - 1) : 0;
    out[got > 0 ? got : 0] = '\0';
    if (fd >= 0)
        close(fd);
}

static bool has_died(const daemon_participant_t *participant)
{
    struct pollfd state = {.fd = participant->pidfd, .events = POLLIN};
    return participant->pidfd >= 0 && poll(&state, 1, 0) == 1;
}

bool daemon_participant_dying(const daemon_participant_t *participant)
{
    char text[PROC_TEXT_MAX], state;
    unsigned int flags;
    unsigned long long pending;
    if (has_died(participant))
        return true; /* /proc may know it no more */
    read_proc(participant->pid, "stat", text, sizeof(text));
    const char *after_name = strrchr(text, ')'); /* the name may hold anything */
    if (after_name && sscanf(after_name, ") %c %*d %*d %*d %*d %*d %u", &state, &flags) == 2 &&
        (state == 'Z' || state == 'X' || flags & PROC_FLAGS_ENDING))
        return true;
    read_proc(participant->pid, "status", text, sizeof(text));
    const char *shared = strstr(text, "\nShdPnd:");
    return shared && sscanf(shared, "\nShdPnd: %llx", &pending) == 1 &&
           pending >> (SIGKILL - 1) & 1;
}

/* ---- going away -------------------------------------------------------------------------------
 */

/* By itself: it said so, or, as an engine whose own main process ends it, was told to and did. */
static bool ended_in_order(const daemon_participant_t *participant)
{
    return participant->said_bye || (participant->library && participant->told_to_stop);
}

void daemon_participant_gone(daemon_participant_t *participant)
{
    daemon_t *daemon = participant->daemon;
    char who[160];
    daemon_participant_describe(participant, who, sizeof(who));
    bool ordered = ended_in_order(participant), library = participant->library;
    bool former = participant->former, was_killed = participant->was_killed;
    bool stopping = daemon->failed || daemon->state >= DAEMON_QUIESCING;
    xpw_Role role = participant->role;
    uint32_t index = participant->index, rank = participant->rank;
    if (role == xpw_Role_ROLE_NONE || role == xpw_Role_ROLE_CLIENT || participant->waits) {
        daemon_participant_free(participant);
        return;
    }
    if (!ordered && stopping && !daemon->failed && !participant->was_killed && !former) {
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
        const char *id = daemon->config->models[index].id;
        char why[256];
        if (ordered)
            snprintf(why, sizeof(why), "its Instance was stopped; start it with `xpool serve %s`",
                     id);
        else if (library) /* an engine that its user stops ends without a word to us */
            snprintf(why, sizeof(why),
                     "its Instance (rank %u, pid %d) died or was stopped; start it again with "
                     "`xpool serve %s`",
                     rank, pid, id);
        else
            snprintf(why, sizeof(why),
                     "its Instance (pid %d) died; start it again with `xpool serve %s`", pid, id);
        daemon_instance_rank_gone(&daemon->instances[index], rank, why);
        break;
    }
    case xpw_Role_ROLE_ATNAGENT:
        if (!former)
            daemon->atn[index] = NULL;
        break;
    case xpw_Role_ROLE_FFNAGENT:
        if (!former)
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
    /* What still drains rests on it too, and would wait for it until deadlines.drain. */
    bool draining = daemon->state == DAEMON_DRAINING && !daemon->reforming && !was_killed;
    if (agent && (!stopping || draining) && !ordered && !former) {
        char what[128];
        snprintf(what, sizeof(what), "its process (pid %d) died", pid);
        daemon_generation_fail(daemon, short_name, what);
    }
    event_active(daemon->on_tick, EV_TIMEOUT, 0); /* continue the stop, advance */
}

void daemon_participant_violates(daemon_participant_t *participant, const char *what)
{
    char who[160];
    daemon_participant_describe(participant, who, sizeof(who));
    xp_log_warn("dropping %s: %s", who, what);
    if (participant->role != xpw_Role_ROLE_NONE && participant->role != xpw_Role_ROLE_CLIENT)
        daemon_participant_kill(participant);
    daemon_participant_gone(participant);
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
    daemon_participant_gone(participant);
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
    daemon_participant_gone(participant);
}

/* ---- messages ---------------------------------------------------------------------------------
 */

void daemon_participant_refuse(daemon_participant_t *participant, const char *format, ...)
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
    participant->waits = false;
    participant->refused = true;
    participant->since_ns = xp_monotonic_ns();
    envelope.body.refused.stopping =
        participant->daemon->state >= DAEMON_QUIESCING && !participant->daemon->failed;
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

/* The news that `before` has died, which its successor was faster than: that one is nobody of the
 * Generation that ends with it. */
static void bury(daemon_participant_t *before, daemon_participant_t *successor)
{
    xpw_Role role = successor->role;
    successor->role = xpw_Role_ROLE_NONE;
    on_process_death(-1, 0, before);
    successor->role = role;
}

static void register_agent(daemon_t *daemon, daemon_participant_t *participant)
{
    bool ffn = participant->role == xpw_Role_ROLE_FFNAGENT;
    daemon_participant_t **slots = ffn ? daemon->ffn : daemon->atn;
    uint32_t index;
    if (!config_device_find(daemon->config, ffn, participant->name, &index)) {
        daemon_participant_refuse(participant, "device %s is not in %s.devices", participant->name,
                                  ffn ? "ffn" : "atn");
        return;
    }
    if (slots[index] && has_died(slots[index]))
        bury(slots[index], participant);
    if (slots[index]) {
        daemon_participant_refuse(participant, "device %s already has its agent (pid %d)",
                                  participant->name, (int)slots[index]->pid);
        return;
    }
    if (daemon->state != DAEMON_REGISTERING) {
        daemon_participant_refuse(participant, "Generation %llu is %s: agents cannot join any more",
                                  (unsigned long long)daemon->planned->plan.generation,
                                  daemon_state_name(daemon->state));
        return;
    }
    participant->index = index;
    slots[index] = participant;
    (ffn ? daemon->ffn_pid : daemon->atn_pid)[index] = participant->pid;
}

static void log_registered(const daemon_participant_t *participant)
{
    char who[160];
    if (participant->role == xpw_Role_ROLE_NONE || participant->waits)
        return;
    daemon_participant_describe(participant, who, sizeof(who));
    xp_log_info("registered %s", who);
}

static void on_hello(daemon_participant_t *participant, const xpw_Hello *hello)
{
    daemon_t *daemon = participant->daemon;
    if (participant->role != xpw_Role_ROLE_NONE) {
        daemon_participant_violates(participant, "a second Hello");
        return;
    }
    participant->role = hello->role;
    snprintf(participant->name, sizeof(participant->name), "%s", hello->name);
    snprintf(participant->kernels, sizeof(participant->kernels), "%s", hello->kernels);
    if (hello->abi != WIRE_ABI) {
        daemon_participant_refuse(participant,
                                  "control ABI %u, the daemon (%s) speaks %u: use the same build",
                                  hello->abi, XPOOL_VERSION, WIRE_ABI);
        return;
    }
    if (strcmp(hello->version, XPOOL_VERSION) != 0) {
        daemon_participant_refuse(participant, "version %s, the daemon is %s: use the same build",
                                  hello->version, XPOOL_VERSION);
        return;
    }
    if (hello->role == xpw_Role_ROLE_CLIENT)
        return;
    if (memcmp(hello->digest, daemon->config->digest, sizeof(hello->digest)) != 0) {
        daemon_participant_refuse(
            participant,
            "its resolved configuration differs from the daemon's; compare `xpool config dump` "
            "in both environments (the daemon read %s)",
            daemon->config->source_path[0] ? daemon->config->source_path : "no file");
        return;
    }
    if (daemon->failed) {
        daemon_participant_refuse(participant, "the Generation has failed: %s: %.200s",
                                  daemon->failure.who, daemon->failure.what);
        return;
    }
    if (daemon->state >= DAEMON_QUIESCING) {
        daemon_participant_refuse(participant, "the system is stopping (%s)", daemon->stop_reason);
        return;
    }
    watch_process(daemon, participant);
    switch (hello->role) {
    case xpw_Role_ROLE_ATNAGENT:
    case xpw_Role_ROLE_FFNAGENT:
        register_agent(daemon, participant);
        break;
    case xpw_Role_ROLE_INSTANCE:
        participant->rank = hello->rank;
        participant->library = hello->library;
        daemon_instance_register(participant);
        break;
    case xpw_Role_ROLE_GATEWAY:
        if (daemon->gateway) {
            daemon_participant_refuse(participant, "a gateway is running already (pid %d)",
                                      (int)daemon->gateway->pid);
            return;
        }
        daemon->gateway = participant;
        daemon->gateway_seen = true;
        for (uint32_t i = 0; i < daemon->config->model_count; i++)
            daemon_send_backend(daemon, &daemon->instances[i]);
        break;
    default:
        daemon_participant_refuse(participant, "unknown role %d", (int)hello->role);
        return;
    }
    log_registered(participant);
}

/* Of somebody on whom nothing rests: free to leave, and its failure is its own. Everything else is
 * `violation`. */
static void on_loose_message(daemon_participant_t *participant, const xpw_Envelope *envelope,
                             const char *violation)
{
    switch (envelope->which_body) {
    case xpw_Envelope_leave_tag:
        daemon_send_stop(participant, xpw_StopPhase_STOP_FINALIZE, 0);
        break;
    case xpw_Envelope_fail_report_tag:
        xp_log_err("%s: %s", envelope->body.fail_report.who, envelope->body.fail_report.what);
        break;
    default:
        daemon_participant_violates(participant, violation);
    }
}

/* Of an Instance Rank that waits. Its Workload is kept. */
static void on_waiting_message(daemon_participant_t *participant, const xpw_Envelope *envelope)
{
    if (envelope->which_body != xpw_Envelope_workload_tag) {
        on_loose_message(participant, envelope, "a message an Instance may not send yet");
        return;
    }
    if (!participant->library || participant->has_workload) {
        daemon_participant_violates(participant, "a Workload out of order");
        return;
    }
    participant->workload = envelope->body.workload;
    participant->has_workload = true;
}

void daemon_participants_admit_waiting(daemon_t *daemon)
{
    bool admitted = false;
    if (daemon->failed)
        return; /* they have been told */
    for (uint32_t i = 0; i < DAEMON_MAX_PARTICIPANTS; i++) {
        daemon_participant_t *participant = &daemon->participants[i];
        if (!participant->used || !participant->waits || participant->told_to_stop)
            continue;
        if (daemon->state >= DAEMON_QUIESCING) {
            daemon_participant_refuse(participant, "the system is stopping (%s)",
                                      daemon->stop_reason);
            continue;
        }
        daemon_instance_register(participant);
        if (participant->waits || participant->role == xpw_Role_ROLE_NONE)
            continue;
        log_registered(participant);
        admitted = true;
        if (participant->has_workload) {
            xpw_Envelope envelope = {.which_body = xpw_Envelope_workload_tag};
            envelope.body.workload = participant->workload;
            daemon_instance_message(participant, &envelope, NULL);
        }
    }
    if (admitted)
        daemon_advance(daemon);
}

static void on_agent_message(daemon_participant_t *participant, const xpw_Envelope *envelope,
                             wire_descriptors_t *fds)
{
    daemon_t *daemon = participant->daemon;
    char who[160];
    if (daemon_plane_message(participant, envelope, fds))
        return;
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
        daemon_plane_executable(daemon);
        daemon_advance(daemon);
        break;
    case xpw_Envelope_expert_usage_tag:
        if (participant->role != xpw_Role_ROLE_FFNAGENT ||
            envelope->body.expert_usage.weights >= FABRIC_MAX_INSTANCES)
            daemon_participant_violates(participant, "ExpertUsage of no weight set");
        else
            participant->usage[envelope->body.expert_usage.weights] = envelope->body.expert_usage;
        break;
    case xpw_Envelope_arena_attached_tag:
        daemon_instance_attached(daemon, participant->index, &envelope->body.arena_attached);
        break;
    case xpw_Envelope_kept_weights_tag:
        daemon_generation_keep(participant, &envelope->body.kept_weights, fds);
        break;
    case xpw_Envelope_fail_report_tag:
        if (daemon->failed || !daemon_fail_from_fabric(daemon))
            daemon_generation_fail(daemon, who, envelope->body.fail_report.what);
        break;
    case xpw_Envelope_leave_tag: {
        bool instances = false;
        for (uint32_t i = 0; i < daemon->config->model_count; i++)
            instances = instances || daemon_instance_present(&daemon->instances[i]);
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
        daemon_participant_violates(participant, "a message an agent may not send");
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
    default:
        on_loose_message(participant, envelope, "a message a gateway may not send");
    }
}

static void answer_verdict(daemon_participant_t *participant)
{
    daemon_t *daemon = participant->daemon;
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
    out->http_port = daemon->http_port;
    out->reasons_count = (pb_size_t)verdict.reason_count;
    for (uint32_t i = 0; i < verdict.reason_count; i++)
        snprintf(out->reasons[i], sizeof(out->reasons[i]), "%s", verdict.reasons[i]);
    if (daemon->failed)
        snprintf(out->failure, sizeof(out->failure), "%s: %s (%s)", daemon->failure.who,
                 daemon->failure.what, daemon->failure.when);
    _Static_assert(CONFIG_MAX_MODELS <= 64, "a bit a model");
    for (uint32_t i = 0; i < daemon->config->model_count; i++)
        out->replace |= (uint64_t)daemon->instances[i].replace << i;
    wire_channel_send(participant->channel, &answer, NULL, 0);
}

static void on_client_message(daemon_participant_t *participant, const xpw_Envelope *envelope)
{
    daemon_t *daemon = participant->daemon;
    participant->since_ns = xp_monotonic_ns();
    switch (envelope->which_body) {
    case xpw_Envelope_check_tag:
        answer_verdict(participant);
        break;
    case xpw_Envelope_agent_ended_tag:
        daemon_generation_unregistered(daemon, &envelope->body.agent_ended);
        answer_verdict(participant);
        break;
    case xpw_Envelope_down_tag:
        participant->wants_down = true;
        daemon_stop(daemon, "xpool down");
        event_active(daemon->on_tick, EV_TIMEOUT, 0);
        break;
    case xpw_Envelope_fail_report_tag:
        daemon_fail(daemon, envelope->body.fail_report.who, envelope->body.fail_report.what);
        break;
    case xpw_Envelope_kv_ask_tag:
        daemon_kv_ask(participant, &envelope->body.kv_ask);
        break;
    default:
        daemon_participant_violates(participant, "a message a client may not send");
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
    if (participant->former)
        return;
    if (participant->waits) {
        on_waiting_message(participant, envelope);
        return;
    }
    switch (participant->role) {
    case xpw_Role_ROLE_INSTANCE:
        daemon_instance_message(participant, envelope, fds);
        break;
    case xpw_Role_ROLE_ATNAGENT:
    case xpw_Role_ROLE_FFNAGENT:
        on_agent_message(participant, envelope, fds);
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

/* It wanted to leave, was told that it may, and is still there. */
static void end_late(daemon_participant_t *participant)
{
    char who[160];
    if (participant->was_killed)
        return;
    daemon_participant_describe(participant, who, sizeof(who));
    xp_log_err("%s was told to end and did not within its time (deadlines.drain, stop): killed",
               who);
    daemon_participant_kill(participant);
}

void daemon_drop_silent(daemon_t *daemon)
{
    uint64_t now = xp_monotonic_ns();
    /* The end of all has deadlines of its own. */
    bool singly = !daemon->failed && (daemon->state < DAEMON_QUIESCING || daemon->hand_stopped);
    for (uint32_t i = 0; i < DAEMON_MAX_PARTICIPANTS; i++) {
        daemon_participant_t *participant = &daemon->participants[i];
        if (!participant->used)
            continue;
        uint64_t limit = participant->refused                        ? REFUSED_TIMEOUT_NS
                         : participant->role == xpw_Role_ROLE_NONE   ? HELLO_TIMEOUT_NS
                         : participant->role == xpw_Role_ROLE_CLIENT ? CLIENT_TIMEOUT_NS
                                                                     : UINT64_MAX;
        if (!participant->wants_down && now - participant->since_ns > limit)
            daemon_participant_gone(participant);
        else if (singly && participant->told_to_stop && now > participant->end_by_ns)
            end_late(participant);
    }
    daemon_instances_drop_late(daemon);
}

void daemon_on_accept(evutil_socket_t listener, short events, void *context)
{
    daemon_t *daemon = context;
    for (int i = 0; i < 16; i++) {
        int fd = accept4((int)listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0) {
            if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS)
                daemon_descriptors_none_left(daemon);
            return;
        }
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
