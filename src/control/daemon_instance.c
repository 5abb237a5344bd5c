/* SPDX-License-Identifier: MIT */
/*
 * Instances as the daemon sees them: ranks register, are checked against the plan, offer their
 * arenas, warm up and serve; any rank's end is the Instance's. A rank of the native engine or of
 * another engine's library takes the same steps; the latter first states its workload, and serves
 * only once its own HTTP has answered. Runs on the daemon's event loop thread.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "control/daemon_kv.h"
#include "control/daemon_private.h"
#include "control/planner_kv.h"
#include "transport/transport.h"

#define WORKLOAD_TIMEOUT_NS (5 * XP_NS_PER_S) /* from a library's Hello to its Workload */
#define STUCK_LIMIT         3 /* Generations in a row that may fail over one request */
#define WATCH_SUBMISSIONS   2 /* an AtnAgent has so many times deadlines.submission ... */
#define WATCH_SLACK_S       1 /* ... and this */
#define WATCH_GAP_NS        (2 * XP_NS_PER_S) /* between two looks: the daemon stood still too */
/* Of deadlines.registration, how long a rank waits for its predecessor's end: less than it would
 * wait for us, so that it is told why. */
#define WAIT_SHARE 0.875

static const config_model_t *configured(const daemon_instance_t *instance)
{
    return &instance->daemon->config->models[instance->index];
}

static const plan_model_t *planned(const daemon_instance_t *instance)
{
    return &instance->daemon->planned->models[instance->index];
}

/* ---- state ------------------------------------------------------------------------------------
 */

bool daemon_instance_present(const daemon_instance_t *instance)
{
    for (uint32_t r = 0; r < instance->rank_count; r++)
        if (instance->ranks[r].participant)
            return true;
    return false;
}

uint64_t daemon_instance_weight_bytes(const daemon_instance_t *instance)
{
    uint64_t bytes = 0;
    for (uint32_t r = 0; r < instance->rank_count; r++)
        bytes += instance->ranks[r].weight_bytes;
    return bytes;
}

uint32_t daemon_instance_ranks_initialized(const daemon_instance_t *instance)
{
    uint32_t count = 0;
    for (uint32_t r = 0; r < instance->rank_count; r++)
        count += instance->ranks[r].state == RANK_INITIALIZED;
    return count;
}

const char *daemon_instance_progress(const daemon_instance_t *instance, char *out, size_t size)
{
    config_engine_t engine = configured(instance)->engine;
    out[0] = '\0';
    if (engine != CONFIG_ENGINE_NATIVE)
        snprintf(out, size, " (%s, %u of %u rank(s) initialised)",
                 instance->engine[0] ? instance->engine : config_engine_name(engine),
                 daemon_instance_ranks_initialized(instance), instance->rank_count);
    return out;
}

static daemon_instance_state_t state_of_ranks(const daemon_instance_t *instance)
{
    if (instance->ending || !daemon_instance_present(instance))
        return INSTANCE_ABSENT;
    daemon_rank_state_t least = RANK_INITIALIZED;
    bool library = false;
    for (uint32_t r = 0; r < instance->rank_count; r++) {
        const daemon_rank_t *rank = &instance->ranks[r];
        if (rank->state < least)
            least = rank->state;
        library = library || (rank->participant && rank->participant->library);
    }
    switch (least) {
    case RANK_OFFERED:
        return INSTANCE_OFFERED;
    case RANK_ATTACHED:
        return INSTANCE_ATTACHED;
    case RANK_INITIALIZING:
        return INSTANCE_INITIALIZING;
    case RANK_INITIALIZED:
        return library && instance->port && !instance->was_healthy ? INSTANCE_INITIALIZED
                                                                   : INSTANCE_SERVING;
    default:
        return INSTANCE_LOADING;
    }
}

void daemon_instance_refresh(daemon_instance_t *instance)
{
    daemon_instance_state_t state = state_of_ranks(instance);
    if (state == INSTANCE_SERVING && instance->state != INSTANCE_SERVING) {
        instance->absence[0] = '\0';
        if (instance->port)
            xp_log_info("model %s serves on %s:%u", configured(instance)->id, instance->host,
                        instance->port);
        else
            xp_log_info("model %s: its engine runs, without HTTP", configured(instance)->id);
    }
    instance->state = state;
    daemon_send_backend(instance->daemon, instance);
}

void daemon_instance_stop(daemon_instance_t *instance, xpw_StopPhase phase, double seconds)
{
    for (uint32_t r = 0; r < instance->rank_count; r++)
        daemon_send_stop(instance->ranks[r].participant, phase, seconds);
}

/* ---- arenas -----------------------------------------------------------------------------------
 */

void daemon_instance_close_arenas(daemon_instance_t *instance, xp_status_t reason)
{
    for (uint32_t r = 0; r < instance->rank_count; r++)
        if (instance->ranks[r].arena_fd >= 0 && !instance->daemon->plane)
            transport_arena_close(instance->ranks[r].arena_fd, reason);
}

bool daemon_instance_waits(const daemon_instance_t *instance)
{
    bool waits = false;
    for (uint32_t r = 0; r < instance->rank_count; r++)
        waits = waits || (instance->ranks[r].waiting && instance->ranks[r].participant);
    return waits && !instance->ending;
}

/* A rank of the same attention DP rank that has the answer which `behind` waits for. */
static const daemon_rank_t *rank_ahead(const daemon_instance_t *instance, uint32_t behind,
                                       const uint64_t *answered)
{
    uint32_t tp = configured(instance)->attention_tp;
    for (uint32_t r = behind - behind % tp; r < behind - behind % tp + tp; r++)
        if (instance->ranks[r].waiting && answered[r] == answered[behind] + 1)
            return &instance->ranks[r];
    return NULL;
}

/* Ranks submit a layer together; who has got a layer cannot submit it again. Under attention TP the
 * others' answer is the same rows, under attention DP it is not. */
static bool level_ranks(const daemon_instance_t *instance, uint64_t *answered, bool *open,
                        char *why, size_t size)
{
    uint64_t most = 0;
    for (uint32_t r = 0; r < instance->rank_count; r++)
        most = answered[r] > most ? answered[r] : most;
    for (uint32_t r = 0; r < instance->rank_count; r++) {
        const daemon_rank_t *rank = &instance->ranks[r];
        if (!rank->waiting || answered[r] == most)
            continue;
        const daemon_rank_t *ahead = rank_ahead(instance, r, answered);
        transport_geometry_t geometry = {.hidden = rank->offer.hidden,
                                         .max_rows = rank->offer.max_rows,
                                         .dtype = (xp_dtype_t)rank->offer.dtype,
                                         .dp_size = configured(instance)->attention_dp};
        if (!ahead || transport_arena_carry(ahead->arena_fd, rank->arena_fd, &geometry) != XP_OK) {
            snprintf(why, size, "its ranks had answers %llu and %llu when Generation %llu failed",
                     (unsigned long long)most, (unsigned long long)answered[r],
                     (unsigned long long)instance->daemon->last_failure.generation);
            return false;
        }
        answered[r]++;
        open[r] = false;
    }
    return true;
}

bool daemon_instance_stuck(daemon_rank_t *rank, uint64_t answered, bool open, char *why,
                           size_t size)
{
    bool same = open && rank->stuck_count && rank->stuck_sequence == answered;
    rank->stuck_count = open ? (same ? rank->stuck_count + 1 : 1) : 0;
    rank->stuck_sequence = answered;
    if (rank->stuck_count <= STUCK_LIMIT)
        return false;
    snprintf(why, size, "%u Generations in a row failed over its request %llu", rank->stuck_count,
             (unsigned long long)answered + 1);
    return true;
}

/* Whether the next Generation can go on where the last one stopped; fills in why not. Nobody else
 * is in the arenas now. */
static bool can_go_on(daemon_instance_t *instance, char *why, size_t size)
{
    uint64_t answered[FABRIC_MAX_RANKS] = {0};
    bool open[FABRIC_MAX_RANKS];
    for (uint32_t r = 0; r < instance->rank_count; r++) {
        const daemon_rank_t *rank = &instance->ranks[r];
        if (rank->waiting &&
            transport_arena_look(rank->arena_fd, &answered[r], &open[r]) != XP_OK) {
            snprintf(why, size, "its arena cannot be read: %.180s", xp_error_last()->text);
            return false;
        }
    }
    if (!level_ranks(instance, answered, open, why, size))
        return false;
    for (uint32_t r = 0; r < instance->rank_count; r++) {
        daemon_rank_t *rank = &instance->ranks[r];
        if (!rank->waiting)
            continue;
        if (daemon_instance_stuck(rank, answered[r], open[r], why, size))
            return false;
    }
    return true;
}

/* All that waited before are to be handed on: once a Generation. */
static bool none_handed_on(const daemon_instance_t *instance)
{
    for (uint32_t r = 0; r < instance->rank_count; r++)
        if (instance->ranks[r].waiting && instance->ranks[r].attached_at_agent)
            return false;
    return true;
}

void daemon_instance_try_attach(daemon_instance_t *instance)
{
    daemon_t *daemon = instance->daemon;
    char why[256];
    if (daemon->plane) {
        daemon_plane_try_attach(instance);
        return;
    }
    if (daemon->state < DAEMON_JOINED || instance->ending)
        return;
    if (daemon_instance_waits(instance) && none_handed_on(instance) &&
        !can_go_on(instance, why, sizeof(why))) {
        xp_log_err("model %s: %s", configured(instance)->id, why);
        daemon_instance_end(instance, why);
        return;
    }
    for (uint32_t r = 0; r < instance->rank_count; r++) {
        daemon_rank_t *rank = &instance->ranks[r];
        const daemon_participant_t *agent = daemon->atn[planned(instance)->rank_atn[r]];
        if ((rank->state != RANK_OFFERED && !rank->waiting) || rank->attached_at_agent || !agent ||
            !agent->joined)
            continue;
        rank->lease = ++daemon->next_lease;
        rank->attached_at_agent = true;
        xpw_Envelope envelope = {.which_body = xpw_Envelope_arena_attach_tag};
        xpw_ArenaAttach *attach = &envelope.body.arena_attach;
        attach->instance = instance->index;
        attach->rank = r;
        attach->hidden = rank->offer.hidden;
        attach->max_rows = rank->offer.max_rows;
        attach->dtype = rank->offer.dtype;
        attach->dp_size = configured(instance)->attention_dp;
        attach->lease = rank->lease;
        if (wire_channel_send(agent->channel, &envelope, &rank->arena_fd, 1) != XP_OK)
            xp_log_error("cannot hand an arena to its AtnAgent");
    }
}

/* Whether the rank's request has waited for `limit_ns`, as far as was seen; `anew`: begin again. */
static bool stands_still(daemon_rank_t *rank, uint64_t now, uint64_t limit_ns, bool anew)
{
    uint64_t answered = 0;
    bool open = false;
    if (rank->arena_fd < 0 || !rank->attached_at_agent ||
        transport_arena_look(rank->arena_fd, &answered, &open) != XP_OK || !open) {
        rank->open_since_ns = 0;
        return false;
    }
    if (anew || !rank->open_since_ns || rank->open_sequence != answered) {
        rank->open_since_ns = now;
        rank->open_sequence = answered;
    }
    return now - rank->open_since_ns > limit_ns;
}

void daemon_instances_watch(daemon_t *daemon)
{
    /* An AtnAgent that runs finds out by itself, and first. */
    double limit = WATCH_SUBMISSIONS * daemon->config->deadlines.submission + WATCH_SLACK_S;
    uint64_t now = xp_monotonic_ns();
    bool executes = daemon->state >= DAEMON_EXECUTABLE && daemon->state <= DAEMON_DRAINING;
    bool anew = now - daemon->watched_ns > WATCH_GAP_NS;
    if (daemon->plane || daemon->failed || daemon->reforming || !executes)
        return;
    daemon->watched_ns = now;
    for (uint32_t i = 0; i < daemon->config->model_count; i++) {
        daemon_instance_t *instance = &daemon->instances[i];
        for (uint32_t r = 0; r < instance->rank_count && !instance->ending; r++) {
            daemon_rank_t *rank = &instance->ranks[r];
            char who[80], what[256];
            if (!stands_still(rank, now, (uint64_t)(limit * (double)XP_NS_PER_S), anew))
                continue;
            snprintf(who, sizeof(who), "atnagent %s",
                     daemon->config->atn[planned(instance)->rank_atn[r]].name);
            snprintf(what, sizeof(what),
                     "no answer to request %llu of model %.96s within %g s (deadlines.submission "
                     "is %g s)",
                     (unsigned long long)rank->open_sequence + 1, configured(instance)->id, limit,
                     daemon->config->deadlines.submission);
            daemon_generation_fail(daemon, who, what);
            return;
        }
    }
}

/* Takes the lease of one rank's arena back. */
static void release_arena(daemon_instance_t *instance, uint32_t index)
{
    daemon_t *daemon = instance->daemon;
    daemon_rank_t *rank = &instance->ranks[index];
    const daemon_participant_t *agent = daemon->atn[planned(instance)->rank_atn[index]];
    if (daemon->plane)
        daemon_plane_release(instance);
    if (rank->attached_at_agent && agent) {
        xpw_Envelope envelope = {.which_body = xpw_Envelope_arena_detach_tag};
        envelope.body.arena_detach.instance = instance->index;
        envelope.body.arena_detach.rank = index;
        wire_channel_send(agent->channel, &envelope, NULL, 0);
    }
    rank->attached_at_agent = rank->waiting = false;
    rank->stuck_count = 0;
    if (rank->arena_fd >= 0) {
        if (!daemon->plane)
            transport_arena_close(rank->arena_fd, XP_CLOSED);
        close(rank->arena_fd);
        rank->arena_fd = -1;
    }
}

/* The Instance is over: its leases are taken back at once, and its ranks, which may still be there,
 * have deadlines.stop to end. */
static void begin_end(daemon_instance_t *instance, const char *why)
{
    if (!instance->absence[0]) /* else it told why itself */
        snprintf(instance->absence, sizeof(instance->absence), "%s", why);
    instance->ending = true;
    instance->ending_ns = xp_monotonic_ns();
    for (uint32_t r = 0; r < instance->rank_count; r++) {
        release_arena(instance, r);
        daemon_kv_leave(instance->daemon, instance->index, r, false);
        daemon_send_stop(instance->ranks[r].participant, xpw_StopPhase_STOP_FINALIZE,
                         instance->daemon->config->deadlines.stop);
    }
    instance->healthy = instance->was_healthy = false;
    instance->healthy_at_ns = 0;
    instance->port = 0;
    memset(&instance->stats, 0, sizeof(instance->stats));
}

void daemon_instance_end(daemon_instance_t *instance, const char *why)
{
    begin_end(instance, why);
    daemon_instance_refresh(instance);
}

void daemon_instance_attached(daemon_t *daemon, uint32_t atn_index,
                              const xpw_ArenaAttached *attached)
{
    if (attached->instance >= daemon->config->model_count)
        return;
    daemon_instance_t *instance = &daemon->instances[attached->instance];
    if (attached->rank >= instance->rank_count)
        return;
    daemon_rank_t *rank = &instance->ranks[attached->rank];
    if (attached->lease != rank->lease || (rank->state != RANK_OFFERED && !rank->waiting))
        return; /* of an Instance that has gone meanwhile */
    if (attached->error[0]) {
        /* The Instance is not to blame; it leaves in order, and its model says why. */
        char why[256];
        snprintf(why, sizeof(why), "its arena was not attached: %.200s", attached->error);
        xp_log_err("model %s: %s", configured(instance)->id, why);
        daemon_instance_end(instance, why);
        return;
    }
    rank->waiting = false;
    if (rank->state == RANK_OFFERED) {
        rank->state = RANK_ATTACHED;
        xpw_Envelope answer = {.which_body = xpw_Envelope_attached_tag};
        answer.body.attached.atn_pe = atn_index;
        wire_channel_send(rank->participant->channel, &answer, &daemon->descriptors.doorbell_fd, 1);
    } /* else it knows the bell, and that it is attached, from before */
    daemon_instance_refresh(instance);
    daemon_advance(daemon);
}

void daemon_instance_initialize(daemon_instance_t *instance)
{
    /* All at once: the first FFN call of one rank waits for those of the others. */
    if (instance->state != INSTANCE_ATTACHED)
        return;
    for (uint32_t r = 0; r < instance->rank_count; r++) {
        instance->ranks[r].state = RANK_INITIALIZING;
        xpw_Envelope envelope = {.which_body = xpw_Envelope_initialize_tag};
        wire_channel_send(instance->ranks[r].participant->channel, &envelope, NULL, 0);
    }
    daemon_instance_refresh(instance);
}

/* ---- going away -------------------------------------------------------------------------------
 */

void daemon_instance_rank_gone(daemon_instance_t *instance, uint32_t index, const char *why)
{
    daemon_t *daemon = instance->daemon;
    daemon_rank_t *gone = &instance->ranks[index];
    release_arena(instance, index);
    gone->participant = NULL;
    gone->state = RANK_ABSENT;
    daemon_kv_leave(daemon, instance->index, index, true);
    if (!instance->ending) {
        begin_end(instance, why);
        if (!daemon->failed && daemon->state < DAEMON_QUIESCING)
            xp_log_warn("model %s: %s", configured(instance)->id, instance->absence);
    }
    instance->ending = daemon_instance_present(instance);
    daemon_instance_refresh(instance);
}

static void kill_rank(daemon_instance_t *instance, uint32_t index, const char *why)
{
    daemon_participant_t *participant = instance->ranks[index].participant;
    if (!participant)
        return;
    if (!participant->terminate_until_ns)
        xp_log_err("model %s, rank %u (pid %d): %s: killed", configured(instance)->id, index,
                   (int)participant->pid, why);
    if (!instance->absence[0])
        snprintf(instance->absence, sizeof(instance->absence), "%s", why);
    if (daemon_plane_terminate(participant))
        return;
    daemon_participant_kill(participant);
    daemon_participant_gone(participant);
}

void daemon_instance_kill(daemon_instance_t *instance, const char *why)
{
    for (uint32_t r = 0; r < instance->rank_count; r++)
        kill_rank(instance, r, why);
}

void daemon_instances_drop_late(daemon_t *daemon)
{
    uint64_t now = xp_monotonic_ns();
    uint64_t startup_ns = (uint64_t)(daemon->config->deadlines.startup * (double)XP_NS_PER_S);
    uint64_t stop_ns = (uint64_t)(daemon->config->deadlines.stop * (double)XP_NS_PER_S);
    if (daemon->failed || daemon->state >= DAEMON_QUIESCING)
        return; /* the end has deadlines of its own */
    for (uint32_t i = 0; i < daemon->config->model_count; i++) {
        daemon_instance_t *instance = &daemon->instances[i];
        for (uint32_t r = 0; r < instance->rank_count; r++) {
            const daemon_rank_t *rank = &instance->ranks[r];
            if (rank->state == RANK_HELLO &&
                now - rank->participant->since_ns > WORKLOAD_TIMEOUT_NS)
                kill_rank(instance, r, "it sent no Workload");
            else if (instance->ending && now > instance->ending_ns + stop_ns)
                kill_rank(instance, r, "it did not end with its Instance (deadlines.stop)");
        }
        if (instance->state == INSTANCE_ABSENT || instance->state == INSTANCE_SERVING ||
            now - instance->admitted_ns < startup_ns || daemon->reforming ||
            (daemon->reforms && now - daemon->pause_began_ns < startup_ns))
            continue;
        char why[256];
        snprintf(why, sizeof(why),
                 "its Instance did not pass the initialisation barrier within %g s "
                 "(deadlines.startup; it was %s)",
                 daemon->config->deadlines.startup, daemon_instance_state_name(instance->state));
        daemon_instance_kill(instance, why);
    }
}

/* ---- registration -----------------------------------------------------------------------------
 */

/* It has its place already: that is free again, and the others of its Instance end. */
static void turn_away(daemon_instance_t *instance, daemon_participant_t *participant,
                      const char *why)
{
    daemon_instance_rank_gone(instance, participant->rank, why);
    daemon_participant_refuse(participant, "%s", why);
}

static void admit(daemon_instance_t *instance, uint32_t index)
{
    daemon_t *daemon = instance->daemon;
    daemon_rank_t *rank = &instance->ranks[index];
    const plan_model_t *model = planned(instance);
    xpw_Envelope envelope = {.which_body = xpw_Envelope_admitted_tag};
    xpw_Admitted *admitted = &envelope.body.admitted;
    admitted->generation = daemon->planned->plan.generation;
    admitted->instance = instance->index;
    admitted->hidden = model->spec.hidden;
    admitted->max_rows = model->max_rows;
    admitted->kv_tokens = model->kv_tokens;
    admitted->max_context = model->max_context;
    admitted->atn_index = model->rank_atn[index];
    admitted->dp_size = configured(instance)->attention_dp;
    admitted->spin_ns = daemon->planned->plan.spin_ns;
    admitted->submission_timeout_ns = daemon->planned->plan.submission_timeout_ns;
    if (!daemon->plane)
        admitted->pause_ns = (uint64_t)(daemon->config->deadlines.reform * (double)XP_NS_PER_S);
    int kv_fds[KV_DESCRIPTORS];
    if (daemon_kv_admit(daemon, instance->index, index, rank->participant->pid, admitted, kv_fds) !=
        XP_OK) {
        turn_away(instance, rank->participant, xp_error_last()->text);
        return;
    }
    rank->state = RANK_ADMITTED;
    daemon_plane_greet(rank->participant);
    /* An engine that makes its KV Cache itself gets no channel. */
    bool channel = planner_kv_ranges(daemon->config, daemon->planned);
    wire_channel_send(rank->participant->channel, &envelope, kv_fds, channel ? KV_DESCRIPTORS : 0);
}

/* Any process of the Instance is on its way out: killed, or told to end. */
static bool leaving(const daemon_instance_t *instance)
{
    for (uint32_t r = 0; r < instance->rank_count; r++) {
        const daemon_participant_t *participant = instance->ranks[r].participant;
        if (participant && (participant->told_to_stop || participant->said_bye ||
                            daemon_participant_dying(participant)))
            return true;
    }
    return instance->ending;
}

/* True: it waits, or was refused because that took too long. */
static bool waits_for_predecessor(daemon_instance_t *instance, daemon_participant_t *participant)
{
    daemon_t *daemon = instance->daemon;
    const char *id = configured(instance)->id;
    double seconds = daemon->config->deadlines.registration * WAIT_SHARE;
    if (!leaving(instance) && daemon_kv_vacant(daemon, instance->index))
        return false;
    if (xp_monotonic_ns() - participant->since_ns > (uint64_t)(seconds * (double)XP_NS_PER_S)) {
        daemon_participant_refuse(
            participant,
            "the former Instance of model %s has not ended within %g s (deadlines.registration)",
            id, seconds);
        return true;
    }
    if (!participant->waits)
        xp_log_info("model %s: rank %u of its next Instance (pid %d) waits for the end of the "
                    "former one",
                    id, participant->rank, (int)participant->pid);
    participant->waits = true;
    return true;
}

xp_status_t daemon_checkpoint_differs(const config_model_t *model, const char *how)
{
    return xp_fail(XP_INVALID,
                   "the checkpoint of model %s, %.300s, is not the one that the system started "
                   "with%s; put that back, or start everything again",
                   model->id, model->path, how);
}

xp_status_t daemon_instance_check_checkpoint(daemon_instance_t *instance)
{
    const config_model_t *model = configured(instance);
    uint8_t digest[MODEL_DIGEST_BYTES];
    uint64_t stamp = model_checkpoint_stamp(model->path);
    if (stamp == instance->stamp)
        return XP_OK;
    xp_status_t status = model_checkpoint_digest(model->path, digest);
    if (status != XP_OK)
        return xp_fail_context(status, "the checkpoint of model %s", model->id);
    if (memcmp(digest, instance->checkpoint, sizeof(digest)) != 0)
        return daemon_checkpoint_differs(model, "");
    instance->stamp = stamp;
    return XP_OK;
}

void daemon_instance_register(daemon_participant_t *participant)
{
    daemon_t *daemon = participant->daemon;
    const config_model_t *model = config_model_find(daemon->config, participant->name);
    if (!model) {
        daemon_participant_refuse(participant, "model %s is not in the configuration (models[].id)",
                                  participant->name);
        return;
    }
    daemon_instance_t *instance = &daemon->instances[model - daemon->config->models];
    bool library = model->engine != CONFIG_ENGINE_NATIVE;
    if (participant->library != library) {
        daemon_participant_refuse(
            participant,
            "models[%s].engine is \"%s\", this Instance runs %s; change the setting or start the "
            "other engine",
            model->id, config_engine_name(model->engine),
            participant->library ? "another engine through libxpool" : "the native engine");
        return;
    }
    if (participant->rank >= instance->rank_count) {
        daemon_participant_refuse(participant,
                                  "rank %u of model %s: attention_tp x attention_dp is %u, ranks "
                                  "count from 0",
                                  participant->rank, model->id, instance->rank_count);
        return;
    }
    daemon_rank_t *rank = &instance->ranks[participant->rank];
    if (waits_for_predecessor(instance, participant))
        return;
    participant->waits = false;
    if (rank->participant) {
        daemon_participant_refuse(participant, "model %s already has its Instance (pid %d)",
                                  model->id, (int)rank->participant->pid);
        return;
    }
    /* Another engine says itself what it loads. */
    if (!library && daemon_instance_check_checkpoint(instance) != XP_OK) {
        daemon_participant_refuse(participant, "%.400s", xp_error_last()->text);
        return;
    }
    if (!daemon_instance_present(instance)) {
        instance->admitted_ns = xp_monotonic_ns();
        instance->absence[0] = '\0';
        instance->engine[0] = '\0';
        instance->left = instance->replace = false;
    }
    participant->index = instance->index;
    participant->since_ns = xp_monotonic_ns();
    rank->participant = participant;
    rank->weight_bytes = rank->kv_bytes = 0;
    if (library)
        rank->state = RANK_HELLO;
    else
        admit(instance, participant->rank);
    daemon_instance_refresh(instance);
}

/* Why this workload is not the plan's; false when it is. */
static bool workload_differs(const daemon_instance_t *instance, const xpw_Workload *workload,
                             char *why, size_t size)
{
    const config_model_t *model = configured(instance);
    const plan_model_t *plan = planned(instance);
    if (memcmp(workload->checkpoint, instance->checkpoint, sizeof(instance->checkpoint)) != 0)
        snprintf(why, size,
                 "the engine loads %.300s, which differs from the checkpoint of the plan, %.300s "
                 "(models[%s].path)",
                 workload->path, model->path, model->id);
    else if (workload->hidden != plan->spec.hidden || workload->layers != plan->spec.layers)
        snprintf(why, size, "the engine has %u layers of width %u, the plan of model %s %u of %u",
                 workload->layers, workload->hidden, model->id, plan->spec.layers,
                 plan->spec.hidden);
    else if (workload->attention_tp != model->attention_tp ||
             workload->attention_dp != model->attention_dp)
        snprintf(why, size,
                 "the engine runs attention TP %u and DP %u, models[%s] has attention_tp = %u and "
                 "attention_dp = %u",
                 workload->attention_tp, workload->attention_dp, model->id, model->attention_tp,
                 model->attention_dp);
    else if (workload->prefill_rows > plan->max_rows)
        snprintf(why, size,
                 "the engine computes up to %u prompt tokens in one step, the plan of model %s has "
                 "room for %u rows; raise models[].prefill_rows or lower the engine's chunk "
                 "(SGLang: --chunked-prefill-size)",
                 workload->prefill_rows, model->id, plan->max_rows);
    else if (workload->decode_rows > plan->max_rows)
        snprintf(why, size,
                 "the engine decodes up to %u sequences in one step, the plan of model %s has room "
                 "for %u rows; raise models[].decode_rows or lower the engine's limit (SGLang: "
                 "--max-running-requests)",
                 workload->decode_rows, model->id, plan->max_rows);
    else
        return false;
    return true;
}

/* Somebody else's words, which become a label of a metric. */
static void take_engine_name(daemon_instance_t *instance, const char *name)
{
    snprintf(instance->engine, sizeof(instance->engine), "%s", name);
    for (char *at = instance->engine; *at; at++)
        if (*at < ' ' || *at > '~' || *at == '"' || *at == '\\')
            *at = '_';
}

static void on_workload(daemon_instance_t *instance, daemon_participant_t *participant,
                        const xpw_Workload *workload)
{
    daemon_t *daemon = instance->daemon;
    daemon_rank_t *rank = &instance->ranks[participant->rank];
    char why[700], who[130];
    if (rank->state != RANK_HELLO) {
        daemon_participant_violates(participant, "a Workload out of order");
        return;
    }
    if (!workload_differs(instance, workload, why, sizeof(why))) {
        take_engine_name(instance, workload->engine);
        admit(instance, participant->rank);
        daemon_instance_refresh(instance);
        return;
    }
    snprintf(who, sizeof(who), "instance %.96s", participant->name);
    turn_away(instance, participant, why);
    if (getenv("XPOOL_UNDER_UP") && !daemon->ready_ns)
        daemon_fail(daemon, who, why);
}

/* ---- messages ---------------------------------------------------------------------------------
 */

static void on_offer(daemon_instance_t *instance, daemon_participant_t *participant,
                     const xpw_ArenaOffer *offer, wire_descriptors_t *fds)
{
    daemon_rank_t *rank = &instance->ranks[participant->rank];
    const plan_model_t *model = planned(instance);
    if (rank->state != RANK_ADMITTED || fds->count != 1 || offer->hidden != model->spec.hidden ||
        offer->max_rows != model->max_rows ||
        offer->dtype != instance->daemon->planned->plan.instances[instance->index].dtype) {
        daemon_participant_violates(participant, "an arena that differs from the plan");
        return;
    }
    rank->arena_fd = wire_descriptors_take(fds, 0);
    rank->offer = *offer;
    rank->state = RANK_OFFERED;
    daemon_instance_refresh(instance);
    daemon_instance_try_attach(instance);
}

/* Where the daemon and the gateway reach what listens on every address. */
static void reachable_host(const char *host, char *out, size_t size)
{
    if (!host[0] || strcmp(host, "0.0.0.0") == 0)
        host = "127.0.0.1";
    else if (strcmp(host, "::") == 0)
        host = "::1";
    snprintf(out, size, "%s", host);
}

static void on_initialized(daemon_instance_t *instance, daemon_participant_t *participant,
                           const xpw_Initialized *initialized)
{
    daemon_rank_t *rank = &instance->ranks[participant->rank];
    if (rank->state != RANK_INITIALIZING) {
        daemon_participant_violates(participant, "Initialized out of order");
        return;
    }
    rank->state = RANK_INITIALIZED;
    rank->weight_bytes = initialized->weight_bytes;
    rank->kv_bytes = initialized->kv_bytes;
    reachable_host(initialized->host, instance->host, sizeof(instance->host));
    instance->port = initialized->port;
    instance->max_context =
        initialized->max_context ? initialized->max_context : planned(instance)->max_context;
    daemon_instance_refresh(instance);
    daemon_status_probe(instance->daemon);
    daemon_advance(instance->daemon);
}

static void on_fail_report(daemon_instance_t *instance, const xpw_FailReport *report)
{
    /* An Instance's own failure ends that Instance, not the Generation; but a system that
     * `xpool up` starts as a whole does not start without one of its models. */
    if (getenv("XPOOL_UNDER_UP") && !instance->daemon->ready_ns) {
        daemon_fail(instance->daemon, report->who, report->what);
        return;
    }
    xp_log_err("%s: %s", report->who, report->what);
    begin_end(instance, report->what);
    daemon_instance_refresh(instance);
}

void daemon_instance_message(daemon_participant_t *participant, const xpw_Envelope *envelope,
                             wire_descriptors_t *fds)
{
    daemon_instance_t *instance = &participant->daemon->instances[participant->index];
    if (instance->ending)
        return; /* what it says crossed its Stop */
    switch (envelope->which_body) {
    case xpw_Envelope_workload_tag:
        on_workload(instance, participant, &envelope->body.workload);
        break;
    case xpw_Envelope_arena_offer_tag:
        on_offer(instance, participant, &envelope->body.arena_offer, fds);
        break;
    case xpw_Envelope_initialized_tag:
        on_initialized(instance, participant, &envelope->body.initialized);
        break;
    case xpw_Envelope_instance_stats_tag:
        if (participant->rank == 0)
            instance->stats = envelope->body.instance_stats;
        break;
    case xpw_Envelope_fail_report_tag:
        on_fail_report(instance, &envelope->body.fail_report);
        break;
    case xpw_Envelope_leave_tag:
        instance->left = true;
        daemon_send_stop(participant, xpw_StopPhase_STOP_DRAIN,
                         participant->daemon->config->deadlines.drain);
        break;
    default:
        daemon_participant_violates(participant, "a message an Instance may not send");
    }
}
