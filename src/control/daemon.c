/* SPDX-License-Identifier: MIT */
/*
 * The daemon's Generation: states, deadlines, verdicts, canonical failure, ordered end.
 * Runs on the daemon's event loop thread. It touches no device and reads no weight.
 */
#include "control/daemon.h"

#include <errno.h>
#include <event2/thread.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/process.h"
#include "control/daemon_kv.h"
#include "control/daemon_private.h"
#include "control/gpus.h"

/* After a canonical failure everyone ends by itself; who has not by then is killed, so that the
 * whole system is gone within a second. */
#define FAILURE_GRACE_MS 600
#define TICK_MS          500

const char *daemon_state_name(daemon_state_t state)
{
    static const char *const names[] = {
        "REGISTERING", "PLANNED", "PREPARING_JOIN", "JOINED",   "PREPARING_EXECUTION",
        "EXECUTABLE",  "READY",   "QUIESCING",      "DRAINING", "FINALIZING",
        "STOPPED"};
    return names[state];
}

const char *daemon_instance_state_name(daemon_instance_state_t state)
{
    static const char *const names[] = {
        "absent",   "loading",      "waiting for its AtnAgent",
        "attached", "initialising", "waiting for its HTTP /health to answer",
        "serving"};
    return names[state];
}

static void set_state(daemon_t *daemon, daemon_state_t state)
{
    if (daemon->state == state)
        return;
    xp_log_info("Generation %llu: %s -> %s", (unsigned long long)daemon->planned->plan.generation,
                daemon_state_name(daemon->state), daemon_state_name(state));
    daemon->state = state;
}

void daemon_set_deadline(daemon_t *daemon, double seconds)
{
    struct timeval when = {.tv_sec = (time_t)seconds,
                           .tv_usec = (suseconds_t)((seconds - (double)(time_t)seconds) * 1e6)};
    event_del(daemon->on_deadline);
    event_add(daemon->on_deadline, &when);
}

static void send_to(daemon_participant_t *participant, const xpw_Envelope *envelope, const int *fds,
                    uint32_t fd_count)
{
    if (!participant || !participant->channel)
        return;
    xp_status_t status = wire_channel_send(participant->channel, envelope, fds, fd_count);
    if (status == XP_CLOSED)
        return; /* it is leaving; its end is told elsewhere */
    if (status != XP_OK) {
        char who[160];
        daemon_participant_describe(participant, who, sizeof(who));
        xp_log_warn("cannot send %s to %s: %s", wire_body_name(envelope->which_body), who,
                    xp_error_last()->text);
    }
}

void daemon_send_stop(daemon_participant_t *participant, xpw_StopPhase phase, double seconds)
{
    if (participant && phase != xpw_StopPhase_STOP_QUIESCE && !participant->told_to_stop) {
        double patience = seconds + participant->daemon->config->deadlines.stop;
        participant->told_to_stop = true;
        participant->end_by_ns = xp_monotonic_ns() + (uint64_t)(patience * (double)XP_NS_PER_S);
    }
    xpw_Envelope envelope = {.which_body = xpw_Envelope_stop_tag};
    envelope.body.stop.phase = phase;
    envelope.body.stop.seconds = (uint32_t)(seconds + 0.5);
    send_to(participant, &envelope, NULL, 0);
}

void daemon_send_backend(daemon_t *daemon, const daemon_instance_t *instance)
{
    if (!daemon->gateway)
        return;
    xpw_Envelope envelope = {.which_body = xpw_Envelope_backend_tag};
    xpw_Backend *backend = &envelope.body.backend;
    snprintf(backend->model, sizeof(backend->model), "%s",
             daemon->config->models[instance->index].id);
    snprintf(backend->host, sizeof(backend->host), "%s", instance->host);
    backend->port = instance->port;
    backend->max_context = instance->max_context;
    if (instance->state == INSTANCE_SERVING && instance->port) {
        backend->state = WIRE_BACKEND_UP;
    } else if (instance->state == INSTANCE_SERVING) {
        backend->state = WIRE_BACKEND_DOWN;
        snprintf(backend->reason, sizeof(backend->reason), "its engine serves no HTTP");
    } else if (instance->state == INSTANCE_ABSENT && instance->absence[0]) {
        backend->state = WIRE_BACKEND_DOWN;
        snprintf(backend->reason, sizeof(backend->reason), "%s", instance->absence);
    } else {
        backend->state = WIRE_BACKEND_STARTING;
        snprintf(backend->reason, sizeof(backend->reason), "the model is starting (%s)",
                 daemon_instance_state_name(instance->state));
    }
    send_to(daemon->gateway, &envelope, NULL, 0);
}

/* ---- verdicts ---------------------------------------------------------------------------------
 */

static void add_reason(daemon_verdict_t *verdict, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
static void add_reason(daemon_verdict_t *verdict, const char *format, ...)
{
    if (verdict->reason_count == DAEMON_MAX_REASONS)
        return;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(verdict->reasons[verdict->reason_count++], 256, format, arguments);
    va_end(arguments);
}

void daemon_verdict(const daemon_t *daemon, daemon_verdict_t *verdict_out)
{
    daemon_verdict_t verdict = {.fabric_executable = true};
    if (daemon->failed)
        add_reason(&verdict, "canonical failure: %s: %.120s", daemon->failure.who,
                   daemon->failure.what);
    if (daemon->state >= DAEMON_QUIESCING)
        add_reason(&verdict, "stopping (%s): %s", daemon_state_name(daemon->state),
                   daemon->stop_reason);
    if (daemon->reforming && !daemon->failed)
        add_reason(&verdict, "Generation %llu failed (%.40s: %.100s); the next one forms",
                   (unsigned long long)daemon->last_failure.generation, daemon->last_failure.who,
                   daemon->last_failure.what);
    if (verdict.reason_count)
        verdict.fabric_executable = false;
    for (uint32_t a = 0; a < daemon->config->atn_count; a++) {
        const daemon_participant_t *agent = daemon->atn[a];
        if (agent && agent->joined)
            continue;
        verdict.fabric_executable = false;
        add_reason(&verdict, "atnagent %s %s", daemon->config->atn[a].name,
                   agent ? "has not joined the Fabric" : "is not registered");
    }
    for (uint32_t f = 0; f < daemon->config->ffn_count; f++) {
        const daemon_participant_t *agent = daemon->ffn[f];
        if (agent && agent->executable)
            continue;
        verdict.fabric_executable = false;
        if (!agent)
            add_reason(&verdict, "ffnagent %s is not registered", daemon->config->ffn[f].name);
        else if (!agent->joined)
            add_reason(&verdict, "ffnagent %s has not joined the Fabric",
                       daemon->config->ffn[f].name);
        else
            add_reason(&verdict, "ffnagent %s loads weights: %.0f of %.0f MiB%s%s",
                       daemon->config->ffn[f].name, (double)agent->progress_done / 1048576.0,
                       (double)daemon->planned->ffn[f].weight_bytes / 1048576.0,
                       agent->progress_what[0] ? ", " : "", agent->progress_what);
    }
    if (daemon_plane_problem(daemon)) {
        verdict.fabric_executable = false;
        add_reason(&verdict, "%.250s", daemon_plane_problem(daemon));
    }
    if (daemon->gateway_seen && !daemon->gateway)
        add_reason(&verdict, "the gateway has gone; start it again with `xpool gateway`");
    verdict.serving_healthy = verdict.fabric_executable;
    for (uint32_t i = 0; i < daemon->config->model_count; i++) {
        const daemon_instance_t *instance = &daemon->instances[i];
        char progress[128];
        if (daemon_instance_waits(instance)) {
            verdict.serving_healthy = false;
            add_reason(&verdict, "model %s: its open requests wait for the next Generation",
                       daemon->config->models[i].id);
            continue;
        }
        if (instance->state == INSTANCE_SERVING) {
            verdict.serving_healthy = verdict.serving_healthy && instance->healthy;
            continue;
        }
        verdict.serving_healthy = false;
        if (instance->state == INSTANCE_ABSENT)
            add_reason(&verdict, "model %s: %.200s", daemon->config->models[i].id,
                       instance->absence[0] ? instance->absence : "its Instance is not registered");
        else
            add_reason(&verdict, "model %s: %s%s", daemon->config->models[i].id,
                       daemon_instance_state_name(instance->state),
                       daemon_instance_progress(instance, progress, sizeof(progress)));
    }
    verdict.system_ready = verdict.reason_count == 0;
    *verdict_out = verdict;
}

/* ---- transitions ------------------------------------------------------------------------------
 */

static bool all_agents(const daemon_t *daemon, bool joined, bool executable)
{
    for (uint32_t a = 0; a < daemon->config->atn_count; a++)
        if (!daemon->atn[a] || (joined && !daemon->atn[a]->joined))
            return false;
    for (uint32_t f = 0; f < daemon->config->ffn_count; f++)
        if (!daemon->ffn[f] || (joined && !daemon->ffn[f]->joined) ||
            (executable && !daemon->ffn[f]->executable))
            return false;
    return true;
}

static void send_joins(daemon_t *daemon)
{
    int fds[3] = {daemon->plan_fd, daemon->descriptors.arena_fd, daemon->descriptors.doorbell_fd};
    uint32_t count = daemon->plane ? 1 : 3; /* GPUs: there is no Fabric arena in host memory */
    xpw_Envelope envelope = {.which_body = xpw_Envelope_join_tag};
    envelope.body.join.generation = daemon->planned->plan.generation;
    for (uint32_t a = 0; a < daemon->config->atn_count; a++) {
        envelope.body.join.pe = a;
        daemon_plane_greet(daemon->atn[a]);
        send_to(daemon->atn[a], &envelope, fds, count);
    }
    for (uint32_t f = 0; f < daemon->config->ffn_count; f++) {
        envelope.body.join.pe = daemon->config->atn_count + f;
        daemon_plane_greet(daemon->ffn[f]);
        send_to(daemon->ffn[f], &envelope, fds, count);
    }
}

void daemon_advance(daemon_t *daemon)
{
    if (daemon->failed || daemon->state >= DAEMON_QUIESCING)
        return;
    if (daemon->state == DAEMON_REGISTERING && all_agents(daemon, false, false) &&
        daemon_generation_formed(daemon)) {
        set_state(daemon, DAEMON_PLANNED);
        set_state(daemon, DAEMON_PREPARING_JOIN);
        daemon_generation_deadline(daemon, daemon->config->deadlines.startup);
        send_joins(daemon);
    }
    if (daemon->state == DAEMON_PREPARING_JOIN && all_agents(daemon, true, false)) {
        set_state(daemon, DAEMON_JOINED);
        set_state(daemon, DAEMON_PREPARING_EXECUTION);
        xpw_Envelope envelope = {.which_body = xpw_Envelope_prepare_tag};
        envelope.body.prepare.generation = daemon->planned->plan.generation;
        for (uint32_t f = 0; f < daemon->config->ffn_count; f++) {
            envelope.body.prepare.memory_bytes = daemon->planned->ffn[f].budget_bytes;
            daemon_generation_hand(daemon, f);
            daemon_plane_hand(daemon, f);
            send_to(daemon->ffn[f], &envelope, NULL, 0);
        }
        for (uint32_t i = 0; i < daemon->config->model_count; i++)
            daemon_instance_try_attach(&daemon->instances[i]);
    }
    if (daemon->state == DAEMON_PREPARING_EXECUTION && all_agents(daemon, true, true)) {
        set_state(daemon, DAEMON_EXECUTABLE);
        daemon_generation_executable(daemon);
        event_del(daemon->on_deadline);
    }
    if (daemon->state == DAEMON_EXECUTABLE || daemon->state == DAEMON_READY) {
        for (uint32_t i = 0; i < daemon->config->model_count; i++)
            daemon_instance_initialize(&daemon->instances[i]);
        daemon_verdict_t verdict;
        daemon_verdict(daemon, &verdict);
        if (daemon->state == DAEMON_EXECUTABLE && verdict.system_ready) {
            set_state(daemon, DAEMON_READY);
            if (!daemon->ready_ns) {
                daemon->ready_ns = xp_monotonic_ns();
                xp_log_info("System Ready after %.1f s",
                            (double)(daemon->ready_ns - daemon->started_ns) / 1e9);
            }
        }
    }
}

/* ---- canonical failure ------------------------------------------------------------------------
 */

static void now_rfc3339(char *out, size_t size)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    struct tm tm;
    gmtime_r(&now.tv_sec, &tm);
    size_t used = strftime(out, size, "%Y-%m-%dT%H:%M:%S", &tm);
    snprintf(out + used, size - used, ".%03ldZ", now.tv_nsec / 1000000);
}

static void end_loop_when_alone(daemon_t *daemon)
{
    if (daemon_participants_left(daemon) == 0)
        event_base_loopbreak(daemon->base);
}

void daemon_describe_failure(const daemon_t *daemon, const char *who, const char *what,
                             xpw_Failure *failure_out)
{
    failure_out->generation = daemon->planned->plan.generation;
    snprintf(failure_out->who, sizeof(failure_out->who), "%s", who);
    snprintf(failure_out->what, sizeof(failure_out->what), "%s", what);
    now_rfc3339(failure_out->when, sizeof(failure_out->when));
}

void daemon_fail(daemon_t *daemon, const char *who, const char *what)
{
    if (daemon->failed) {
        xp_log_debug("after the canonical failure: %s: %s", who, what);
        return;
    }
    daemon->failed = true;
    xpw_Failure *failure = &daemon->failure;
    daemon_describe_failure(daemon, who, what, failure);
    xp_log_err("canonical failure of Generation %llu: %s: %s (%s)",
               (unsigned long long)failure->generation, failure->who, failure->what, failure->when);
    daemon->exit_code = 1;
    snprintf(daemon->stop_reason, sizeof(daemon->stop_reason), "canonical failure");

    /* First whoever waits in shared memory, then whoever reads its socket. */
    if (daemon->fabric) {
        char text[128];
        snprintf(text, sizeof(text), "%.50s: %.70s", who, what);
        fabric_fail(daemon->fabric, FABRIC_PE_OBSERVER, text);
    }
    for (uint32_t i = 0; i < daemon->config->model_count; i++)
        daemon_instance_close_arenas(&daemon->instances[i], XP_FATAL);
    xpw_Envelope envelope = {.which_body = xpw_Envelope_failure_tag};
    envelope.body.failure = *failure;
    for (uint32_t i = 0; i < DAEMON_MAX_PARTICIPANTS; i++)
        if (daemon->participants[i].used)
            send_to(&daemon->participants[i], &envelope, NULL, 0);
    set_state(daemon, DAEMON_FINALIZING);
    daemon_set_deadline(daemon, FAILURE_GRACE_MS / 1000.0);
    end_loop_when_alone(daemon);
}

bool daemon_fail_from_fabric(daemon_t *daemon)
{
    uint32_t pe;
    if (!daemon->fabric || daemon->forming || fabric_failure(daemon->fabric, &pe) == XP_OK)
        return false; /* while one forms, that is the Fabric of the last one */
    const config_t *config = daemon->config;
    char who[64] = "fabric", what[512];
    if (pe < config->atn_count)
        snprintf(who, sizeof(who), "atnagent %s", config->atn[pe].name);
    else if (pe - config->atn_count < config->ffn_count)
        snprintf(who, sizeof(who), "ffnagent %s", config->ffn[pe - config->atn_count].name);
    snprintf(what, sizeof(what), "%.500s", xp_error_last()->text);
    daemon_generation_fail(daemon, who, what);
    return true;
}

/* ---- ordered end ------------------------------------------------------------------------------
 */

static bool any_instance(const daemon_t *daemon)
{
    for (uint32_t i = 0; i < daemon->config->model_count; i++)
        if (daemon_instance_present(&daemon->instances[i]))
            return true;
    return false;
}

void daemon_stop(daemon_t *daemon, const char *reason)
{
    if (daemon->failed || (daemon->state >= DAEMON_QUIESCING && !daemon->hand_stopped))
        return;
    daemon->hand_stopped = false;
    snprintf(daemon->stop_reason, sizeof(daemon->stop_reason), "%s", reason);
    xp_log_info("stopping in order: %s", reason);
    set_state(daemon, DAEMON_QUIESCING);
    daemon_send_stop(daemon->gateway, xpw_StopPhase_STOP_QUIESCE, 0);
    for (uint32_t i = 0; i < daemon->config->model_count; i++)
        daemon_instance_stop(&daemon->instances[i], xpw_StopPhase_STOP_QUIESCE, 0);
    set_state(daemon, DAEMON_DRAINING);
    /* Between two Generations nothing that is open can finish. */
    for (uint32_t i = 0; i < daemon->config->model_count; i++)
        daemon_instance_stop(&daemon->instances[i],
                             daemon->reforming ? xpw_StopPhase_STOP_FINALIZE
                                               : xpw_StopPhase_STOP_DRAIN,
                             daemon->config->deadlines.drain);
    daemon_set_deadline(daemon, daemon->config->deadlines.drain + daemon->config->deadlines.stop);
}

void daemon_hand_stop(daemon_t *daemon, const char *who)
{
    if (!daemon->hand_stopped)
        xp_log_info("%s was stopped by hand and no Instance is left: this Generation is over; the "
                    "daemon waits for `xpool down` or SIGTERM",
                    who);
    daemon->hand_stopped = true;
    snprintf(daemon->stop_reason, sizeof(daemon->stop_reason), "%.80s was stopped by hand", who);
    set_state(daemon, DAEMON_QUIESCING);
    event_del(daemon->on_deadline);
}

/* Called after any participant has gone, and by the tick. */
static void continue_stop(daemon_t *daemon)
{
    if (daemon->failed || daemon->hand_stopped) {
        if (daemon->failed)
            end_loop_when_alone(daemon);
        return;
    }
    if (daemon->state == DAEMON_DRAINING && !any_instance(daemon)) {
        set_state(daemon, DAEMON_FINALIZING);
        daemon_set_deadline(daemon, daemon->config->deadlines.stop);
        if (daemon->fabric)
            fabric_shutdown(daemon->fabric);
        for (uint32_t i = 0; i < DAEMON_MAX_PARTICIPANTS; i++) {
            daemon_participant_t *participant = &daemon->participants[i];
            if (participant->used && participant->role != xpw_Role_ROLE_CLIENT)
                daemon_send_stop(participant, xpw_StopPhase_STOP_FINALIZE,
                                 daemon->config->deadlines.stop);
        }
    }
    if (daemon->state == DAEMON_FINALIZING)
        end_loop_when_alone(daemon);
}

static void on_deadline(evutil_socket_t fd, short events, void *context)
{
    daemon_t *daemon = context;
    if (daemon->state < DAEMON_QUIESCING) {
        daemon_verdict_t verdict;
        daemon_verdict(daemon, &verdict);
        char what[512];
        bool registering = daemon->state == DAEMON_REGISTERING;
        int used = daemon->reforming ? snprintf(what, sizeof(what),
                                                "no next Generation within its time "
                                                "(deadlines.reform = %g s, registration, startup)",
                                                daemon->config->deadlines.reform)
                                     : snprintf(what, sizeof(what), "%s within %g s (deadlines.%s)",
                                                registering ? "not every agent registered"
                                                            : "the Fabric was not executable",
                                                registering ? daemon->config->deadlines.registration
                                                            : daemon->config->deadlines.startup,
                                                registering ? "registration" : "startup");
        for (uint32_t r = 0; r < verdict.reason_count && used < (int)sizeof(what) - 1; r++)
            if (!registering || strstr(verdict.reasons[r], "is not registered"))
                used +=
                    snprintf(what + used, sizeof(what) - (size_t)used, "; %s", verdict.reasons[r]);
        daemon_fail(daemon, "daemon", what);
        return;
    }
    /* Whoever was told to end and has not is named and killed. While Instances drain, that is they;
     * the others only waited for them and still end in order. */
    bool draining = daemon->state == DAEMON_DRAINING;
    for (uint32_t i = 0; i < DAEMON_MAX_PARTICIPANTS; i++) {
        daemon_participant_t *participant = &daemon->participants[i];
        if (!participant->used || participant->role == xpw_Role_ROLE_CLIENT ||
            participant->role == xpw_Role_ROLE_NONE || participant->was_killed ||
            participant->terminate_until_ns ||
            (draining && participant->role != xpw_Role_ROLE_INSTANCE))
            continue;
        char who[160];
        daemon_participant_describe(participant, who, sizeof(who));
        xp_log_err("%s did not end by itself in time: killed", who);
        size_t used = strlen(daemon->forced_names);
        snprintf(daemon->forced_names + used, sizeof(daemon->forced_names) - used, "%s%s",
                 used ? ", " : "", who);
        daemon->forced = true;
        if (!daemon_plane_terminate(participant))
            daemon_participant_kill(participant);
    }
    if (draining && daemon->kill_rounds == 0) {
        daemon->kill_rounds++;
        daemon_set_deadline(daemon, daemon->config->deadlines.stop);
        return; /* their deaths continue the stop */
    }
    if (daemon->state < DAEMON_FINALIZING)
        set_state(daemon, DAEMON_FINALIZING);
    /* A killed process's socket closes at once; should the kernel need longer, do not wait on it.
     */
    static const double grace_after_kill_s = 2;
    if (daemon->kill_rounds++ <= 1)
        daemon_set_deadline(daemon, grace_after_kill_s);
    else
        event_base_loopbreak(daemon->base);
}

static void on_signal(evutil_socket_t signal_number, short events, void *context)
{
    daemon_t *daemon = context;
    bool under_up = getenv("XPOOL_UNDER_UP") != NULL;
    if (signal_number == SIGINT && under_up)
        return;
    if (daemon->state >= DAEMON_QUIESCING && !daemon->hand_stopped) {
        /* A signal to the whole process group reaches the daemon and `up`, which passes it on: that
         * is one wish, not two. Force is `up`'s to decide. */
        if (under_up)
            return;
        xp_log_warn("second signal: killing whoever is left");
        on_deadline(-1, 0, daemon);
        return;
    }
    daemon_stop(daemon, signal_number == SIGINT ? "Ctrl-C" : "SIGTERM");
    continue_stop(daemon);
}

static void on_tick(evutil_socket_t fd, short events, void *context)
{
    daemon_t *daemon = context;
    daemon_descriptors_tick(daemon);
    if (!daemon->failed)
        daemon_fail_from_fabric(daemon);
    daemon_drop_silent(daemon);
    /* By now they have read that they are to end: what waits in an arena is not to be reported. */
    if (daemon->state == DAEMON_DRAINING && daemon->reforming)
        for (uint32_t i = 0; i < daemon->config->model_count; i++)
            daemon_instance_close_arenas(&daemon->instances[i], XP_CLOSED);
    daemon_participants_admit_waiting(daemon);
    daemon_plane_tick(daemon);
    daemon_instances_watch(daemon);
    daemon_status_probe(daemon);
    daemon_advance(daemon);
    continue_stop(daemon);
}

/* ---- start and end ----------------------------------------------------------------------------
 */

xp_status_t daemon_make_plan_memfd(const fabric_plan_t *plan, int *fd_out)
{
    int fd = memfd_create("xpool-plan", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return xp_fail_errno(XP_IO, "cannot make a memfd for the plan");
    const char *bytes = (const char *)plan;
    for (size_t done = 0; done < sizeof(*plan);) {
        ssize_t wrote = write(fd, bytes + done, sizeof(*plan) - done);
        if (wrote < 0 && errno == EINTR)
            continue;
        if (wrote <= 0) {
            close(fd);
            return xp_fail_errno(XP_IO, "cannot write the plan");
        }
        done += (size_t)wrote;
    }
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL) != 0) {
        close(fd);
        return xp_fail_errno(XP_IO, "cannot seal the plan");
    }
    *fd_out = fd;
    return XP_OK;
}

static xp_status_t daemon_start(daemon_t *daemon)
{
    const config_t *config = daemon->config;
    XP_TRY(planner_make(config, 1, &daemon->planned));
    if (fabric_provider_heap(daemon->planned->plan.provider)) {
        stage_heap_place_t
            place; /* the agents look for it too; here it is known before they start */
        XP_TRY(gpus_nvshmem(config, &place));
    }
    for (uint32_t i = 0; i < config->model_count; i++) {
        daemon->instances[i].rank_count = daemon->planned->models[i].ranks;
        daemon->instances[i].stamp = model_checkpoint_stamp(config->models[i].path);
        XP_TRY(model_checkpoint_digest(config->models[i].path, daemon->instances[i].checkpoint));
    }
    XP_TRY(daemon_make_plan_memfd(&daemon->planned->plan, &daemon->plan_fd));
    if (!daemon->planned->cuda) {
        XP_TRY(fabric_shm_make(&daemon->planned->plan, &daemon->descriptors));
        XP_TRY(fabric_attach("shm", &daemon->planned->plan, &daemon->descriptors,
                             FABRIC_PE_OBSERVER, &daemon->fabric));
    }
    XP_TRY(daemon_generation_start(daemon));
    XP_TRY(daemon_kv_start(daemon));
    /* Whoever sees the daemon may open its GPU: the MPS controller is there before. */
    XP_TRY(wire_claim(config->daemon.socket, &daemon->lock));
    XP_TRY(daemon_plane_start(daemon));
    XP_TRY(wire_open(config->daemon.socket, &daemon->listener));
    daemon->on_accept =
        event_new(daemon->base, daemon->listener, EV_READ | EV_PERSIST, daemon_on_accept, daemon);
    /* What removing the signal events restores: ending is not cut short by one more signal. */
    xp_process_hold_stop_signals();
    daemon->on_term = evsignal_new(daemon->base, SIGTERM, on_signal, daemon);
    daemon->on_int = evsignal_new(daemon->base, SIGINT, on_signal, daemon);
    daemon->on_deadline = evtimer_new(daemon->base, on_deadline, daemon);
    daemon->on_tick = event_new(daemon->base, -1, EV_PERSIST, on_tick, daemon);
    struct timeval tick = {.tv_usec = TICK_MS * 1000};
    sigset_t both; /* `up` starts its children with SIGTERM blocked */
    sigemptyset(&both);
    sigaddset(&both, SIGTERM);
    sigaddset(&both, SIGINT);
    if (!daemon->on_accept || !daemon->on_term || !daemon->on_int || !daemon->on_deadline ||
        !daemon->on_tick || event_add(daemon->on_accept, NULL) ||
        event_add(daemon->on_term, NULL) || event_add(daemon->on_int, NULL) ||
        event_add(daemon->on_tick, &tick))
        return xp_fail(XP_NO_MEMORY, "no memory for the daemon's events");
    sigprocmask(SIG_UNBLOCK, &both, NULL);
    XP_TRY(daemon_status_start(daemon));
    daemon_set_deadline(daemon, config->deadlines.registration);
    return XP_OK;
}

static void answer_waiting_clients(daemon_t *daemon)
{
    for (uint32_t i = 0; i < DAEMON_MAX_PARTICIPANTS; i++) {
        daemon_participant_t *participant = &daemon->participants[i];
        if (!participant->used || !participant->wants_down)
            continue;
        xpw_Envelope envelope = {.which_body = xpw_Envelope_down_done_tag};
        envelope.body.down_done.clean = daemon->exit_code == 0;
        if (daemon->failed)
            snprintf(envelope.body.down_done.text, sizeof(envelope.body.down_done.text),
                     "canonical failure: %s: %s", daemon->failure.who, daemon->failure.what);
        else if (daemon->forced)
            snprintf(envelope.body.down_done.text, sizeof(envelope.body.down_done.text),
                     "killed because they did not end by themselves: %s", daemon->forced_names);
        send_to(participant, &envelope, NULL, 0);
    }
}

int daemon_run(const config_t *config)
{
    int exit_code = 1;
    daemon_t *daemon = calloc(1, sizeof(*daemon));
    if (!daemon) {
        xp_log_err("no memory for the daemon");
        return 1;
    }
    daemon->config = config;
    daemon->plan_fd = daemon->listener = daemon->lock = -1;
    daemon->descriptors = (fabric_descriptors_t){-1, -1};
    daemon->started_ns = xp_monotonic_ns();
    for (uint32_t i = 0; i < CONFIG_MAX_MODELS; i++) {
        daemon->instances[i].daemon = daemon;
        daemon->instances[i].index = i;
        for (uint32_t r = 0; r < FABRIC_MAX_RANKS; r++)
            daemon->instances[i].ranks[r].arena_fd = -1;
    }
    signal(SIGPIPE, SIG_IGN);
    daemon_descriptors_raise();
    for (uint32_t i = 0; i < DAEMON_MAX_PARTICIPANTS; i++)
        daemon->participants[i].pidfd = -1;
    daemon->base = event_base_new();
    if (!daemon->base) {
        xp_log_err("cannot make an event loop");
        goto done;
    }
    if (daemon_start(daemon) != XP_OK) {
        xp_log_error("the daemon cannot start");
        goto done;
    }
    xp_log_info("daemon at %s, HTTP on port %u, %u model(s), %u attention and %u FFN device(s)",
                config->daemon.socket, daemon->http_port, config->model_count, config->atn_count,
                config->ffn_count);
    event_base_dispatch(daemon->base);
    if (daemon->forced || daemon->failed)
        daemon->exit_code = 1;
    if (!daemon->failed)
        set_state(daemon, DAEMON_STOPPED);
    exit_code = daemon->exit_code;
    answer_waiting_clients(daemon);
    if (exit_code == 0)
        xp_log_info("stopped: every participant ended by itself");
done:
    daemon_status_stop(daemon);
    for (uint32_t i = 0; i < DAEMON_MAX_PARTICIPANTS; i++)
        if (daemon->participants[i].used)
            daemon_participant_free(&daemon->participants[i]);
    daemon_plane_stop(daemon);
    daemon_kv_stop(daemon);
    daemon_generation_stop(daemon);
    struct event **events[] = {&daemon->on_accept, &daemon->on_term, &daemon->on_int,
                               &daemon->on_deadline, &daemon->on_tick};
    for (size_t i = 0; i < sizeof(events) / sizeof(events[0]); i++)
        if (*events[i])
            event_free(*events[i]);
    for (uint32_t i = 0; i < CONFIG_MAX_MODELS; i++)
        for (uint32_t r = 0; r < FABRIC_MAX_RANKS; r++)
            if (daemon->instances[i].ranks[r].arena_fd >= 0)
                close(daemon->instances[i].ranks[r].arena_fd);
    wire_unlisten(config->daemon.socket, daemon->listener, daemon->lock);
    fabric_detach(daemon->fabric);
    if (daemon->descriptors.arena_fd >= 0)
        close(daemon->descriptors.arena_fd);
    if (daemon->descriptors.doorbell_fd >= 0)
        close(daemon->descriptors.doorbell_fd);
    if (daemon->plan_fd >= 0)
        close(daemon->plan_fd);
    planner_free(daemon->planned);
    if (daemon->base)
        event_base_free(daemon->base);
    free(daemon);
    return exit_code;
}
