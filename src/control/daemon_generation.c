/* SPDX-License-Identifier: MIT */
/*
 * From one Generation to the next: when an agent dies, the Generation fails, and its agents make
 * room for others while Instances keep their arenas and open requests. Holds the descriptors of
 * complete weight shards meanwhile; maps none of them. Runs on the daemon's event loop thread.
 *
 *   failure ─ agents are told and end ─┐
 *             new agents register ─────┴▶ plan and Fabric arena of the next Generation ─▶ Join ...
 *
 * The agents of a failed Generation are *former*: nothing they say counts, and no arena is handed
 * to a new AtnAgent while one of them lives, since it may still write there.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "control/daemon_private.h"

#define FORMER_GRACE_MS 600
/* A Generation that computed nothing and did not last this long brought nothing. So many of them in
 * a row, and the next failure is the last. */
#define BARREN_NS    (10 * XP_NS_PER_S)
#define BARREN_LIMIT 4

/* A shard whose memory an FfnAgent has offered: one descriptor an allocation. */
typedef struct kept_shard {
    uint32_t blocks, have; /* none: blocks is 0 */
    uint64_t identity, content;
    int fd[DAEMON_KEPT_BLOCKS];
    uint64_t bytes[DAEMON_KEPT_BLOCKS];
} kept_shard_t;

struct daemon_generation {
    struct event *on_grace;
    kept_shard_t kept[FABRIC_MAX_FFN][FABRIC_MAX_INSTANCES];
    uint64_t first_content[FABRIC_MAX_FFN][FABRIC_MAX_INSTANCES]; /* as read first; stays */
    bool read_once[FABRIC_MAX_FFN][FABRIC_MAX_INSTANCES];
    uint32_t barren;
    bool computed;          /* this Generation, by what an agent of a GPU has told */
    uint64_t fallen;        /* agents that died before it had its plan, by PE; each once */
    uint64_t executable_ns; /* of this Generation */
};

/* ---- weights ----------------------------------------------------------------------------------
 */

static void drop_shard(kept_shard_t *shard)
{
    for (uint32_t b = 0; b < shard->blocks; b++)
        if (shard->fd[b] >= 0)
            close(shard->fd[b]);
    *shard = (kept_shard_t){0};
}

/* Every byte of a shard that is read again is compared: the digest of a checkpoint is of samples.
 */
static bool same_as_first(daemon_t *daemon, uint32_t ffn, uint32_t weights, uint64_t content)
{
    daemon_generation_t *self = daemon->generation;
    if (self->read_once[ffn][weights] && self->first_content[ffn][weights] != content) {
        const config_model_t *model =
            &daemon->config->models[daemon->planned->weights[weights].first_model];
        char how[128];
        snprintf(how, sizeof(how), ": ffnagent %s read other FFN weights",
                 daemon->config->ffn[ffn].name);
        daemon_checkpoint_differs(model, how);
        daemon_fail(daemon, "daemon", xp_error_last()->text);
        return false;
    }
    self->first_content[ffn][weights] = content;
    self->read_once[ffn][weights] = true;
    return true;
}

void daemon_generation_keep(daemon_participant_t *agent, const xpw_KeptWeights *message,
                            wire_descriptors_t *fds)
{
    daemon_t *daemon = agent->daemon;
    const plan_result_t *planned = daemon->planned;
    bool known = agent->role == xpw_Role_ROLE_FFNAGENT && message->weights < planned->weights_count;
    kept_shard_t *shard = known ? &daemon->generation->kept[agent->index][message->weights] : NULL;
    if (known && message->refused) {
        xp_log_warn("ffnagent %s: the weights kept for it are not those of its shard any more",
                    agent->name);
        drop_shard(shard);
        return;
    }
    if (!known || fds->count != 1 || message->blocks == 0 || message->blocks > DAEMON_KEPT_BLOCKS ||
        message->block >= message->blocks ||
        !(planned->weights[message->weights].group >> agent->index & 1)) {
        daemon_participant_violates(agent, "weights that are not in the plan");
        return;
    }
    if (message->block == 0) {
        if (!same_as_first(daemon, agent->index, message->weights, message->content))
            return;
        drop_shard(shard);
        *shard = (kept_shard_t){
            .blocks = message->blocks, .identity = message->identity, .content = message->content};
        memset(shard->fd, 0xff, sizeof(shard->fd)); /* -1: not here yet */
    }
    if (message->blocks != shard->blocks || message->block != shard->have ||
        message->identity != shard->identity || message->content != shard->content) {
        daemon_participant_violates(agent, "weights out of order");
        return;
    }
    shard->fd[shard->have] = wire_descriptors_take(fds, 0);
    shard->bytes[shard->have++] = message->bytes;
}

/* What is kept for this FfnAgent, before its Prepare. */
void daemon_generation_hand(daemon_t *daemon, uint32_t ffn)
{
    if (!daemon->ffn[ffn])
        return;
    for (uint32_t w = 0; w < daemon->planned->weights_count; w++) {
        kept_shard_t *shard = &daemon->generation->kept[ffn][w];
        /* Its FfnAgent died while it offered: nobody can adopt it, and the next one needs room. */
        if (shard->have < shard->blocks)
            drop_shard(shard);
        xpw_Envelope envelope = {.which_body = xpw_Envelope_kept_weights_tag};
        envelope.body.kept_weights = (xpw_KeptWeights){.weights = w,
                                                       .blocks = shard->blocks,
                                                       .identity = shard->identity,
                                                       .content = shard->content};
        for (uint32_t b = 0; b < shard->blocks; b++) {
            envelope.body.kept_weights.block = b;
            envelope.body.kept_weights.bytes = shard->bytes[b];
            if (wire_channel_send(daemon->ffn[ffn]->channel, &envelope, &shard->fd[b], 1) != XP_OK)
                xp_log_error("cannot hand on kept weights");
        }
    }
}

uint64_t daemon_generation_kept_bytes(const daemon_t *daemon, uint32_t ffn)
{
    uint64_t bytes = 0;
    for (uint32_t w = 0; w < daemon->planned->weights_count; w++) {
        const kept_shard_t *shard = &daemon->generation->kept[ffn][w];
        for (uint32_t b = 0; b < shard->have; b++)
            bytes += shard->bytes[b];
    }
    return bytes;
}

/* ---- the end of one ---------------------------------------------------------------------------
 */

static bool former_left(const daemon_t *daemon)
{
    for (uint32_t i = 0; i < DAEMON_MAX_PARTICIPANTS; i++)
        if (daemon->participants[i].used && daemon->participants[i].former)
            return true;
    return false;
}

static void on_grace(evutil_socket_t fd, short events, void *context)
{
    daemon_t *daemon = context;
    for (uint32_t i = 0; i < DAEMON_MAX_PARTICIPANTS; i++) {
        daemon_participant_t *participant = &daemon->participants[i];
        if (!participant->used || !participant->former || participant->was_killed)
            continue;
        char who[160];
        daemon_participant_describe(participant, who, sizeof(who));
        xp_log_warn("%s did not end with its Generation: killed", who);
        daemon_participant_kill(participant);
    }
}

static double seconds_left(const daemon_t *daemon)
{
    double since = (double)(xp_monotonic_ns() - daemon->pause_began_ns) / 1e9;
    double left = daemon->config->deadlines.reform - since;
    return left > 0.001 ? left : 0.001;
}

void daemon_generation_deadline(daemon_t *daemon, double seconds)
{
    double left = daemon->reforming ? seconds_left(daemon) : seconds;
    daemon_set_deadline(daemon, left < seconds ? left : seconds);
}

void daemon_generation_told(daemon_t *daemon, const xpw_PlaneStats *stats)
{
    daemon->generation->computed = daemon->generation->computed || stats->invocations > 0;
}

/* Did this Generation bring anything? On GPUs whoever counted it may be the one that died. */
static bool was_barren(const daemon_t *daemon)
{
    fabric_pe_counters_t counters;
    uint64_t since = daemon->generation->executable_ns;
    daemon_pe_counters(daemon, daemon->config->atn_count, &counters);
    return counters.invocations == 0 && !daemon->generation->computed &&
           (!since || xp_monotonic_ns() - since < BARREN_NS);
}

/* On GPUs Instances that cannot be kept end too: their kernels wait for rows that nobody will
 * bring.
 */
static void tell_former(daemon_t *daemon)
{
    xpw_Envelope envelope = {.which_body = xpw_Envelope_failure_tag};
    envelope.body.failure = daemon->last_failure;
    for (uint32_t i = 0; i < DAEMON_MAX_PARTICIPANTS; i++) {
        daemon_participant_t *participant = &daemon->participants[i];
        bool agent = participant->role == xpw_Role_ROLE_ATNAGENT ||
                     participant->role == xpw_Role_ROLE_FFNAGENT;
        bool instance = daemon->plane && participant->role == xpw_Role_ROLE_INSTANCE &&
                        !participant->waits &&
                        !daemon_plane_keeps(&daemon->instances[participant->index]);
        if (!participant->used || participant->former || (!agent && !instance))
            continue;
        participant->former = agent;
        wire_channel_send(participant->channel, &envelope, NULL, 0);
    }
    memset(daemon->atn, 0, sizeof(daemon->atn));
    memset(daemon->ffn, 0, sizeof(daemon->ffn));
}

/* The rank is told once that it waits: on CPUs it notices nothing. */
static void pause_rank(const daemon_t *daemon, daemon_rank_t *rank)
{
    xpw_Envelope envelope = {.which_body = xpw_Envelope_pause_tag};
    envelope.body.pause.generation = daemon->last_failure.generation;
    if (!rank->waiting)
        wire_channel_send(rank->participant->channel, &envelope, NULL, 0);
    rank->waiting = true;
}

/* Arenas wait for the next Generation; on GPUs Instances that cannot be kept end and are started
 * anew. */
static void suspend_instances(daemon_t *daemon)
{
    char why[256];
    snprintf(why, sizeof(why), "Generation %llu failed: %.150s; start it again",
             (unsigned long long)daemon->last_failure.generation, daemon->last_failure.who);
    for (uint32_t i = 0; i < daemon->config->model_count; i++) {
        daemon_instance_t *instance = &daemon->instances[i];
        bool keeps = daemon_plane_keeps(instance);
        for (uint32_t r = 0; r < instance->rank_count; r++) {
            daemon_rank_t *rank = &instance->ranks[r];
            if (keeps)
                pause_rank(daemon, rank);
            rank->waiting = rank->waiting || rank->attached_at_agent;
            rank->attached_at_agent = false;
            rank->lease = 0;
        }
        if (daemon->plane && !keeps && daemon_instance_present(instance) && !instance->ending) {
            instance->replace = !instance->left;
            daemon_instance_end(instance, why);
        }
    }
    daemon_plane_forget(daemon);
}

static void end_generation(daemon_t *daemon, const char *who, const char *what)
{
    daemon_generation_t *self = daemon->generation;
    daemon_describe_failure(daemon, who, what, &daemon->last_failure);
    xp_log_err("canonical failure of Generation %llu: %s: %s (%s)",
               (unsigned long long)daemon->last_failure.generation, who, what,
               daemon->last_failure.when);
    if (daemon->fabric) {
        char text[128];
        snprintf(text, sizeof(text), "%.50s: %.70s", who, what);
        fabric_fail(daemon->fabric, FABRIC_PE_OBSERVER, text);
    }
    self->barren = was_barren(daemon) ? self->barren + 1 : 0;
    self->executable_ns = self->fallen = 0;
    self->computed = false;
    tell_former(daemon);
    if (!daemon->reforming)
        daemon->pause_began_ns = xp_monotonic_ns();
    daemon->reforming = daemon->forming = true;
    daemon->reforms++;
    suspend_instances(daemon);
    daemon->planned->plan.generation++;
    daemon->state = DAEMON_REGISTERING;
    xp_log_info("Generation %llu: REGISTERING; open requests wait up to %g s (deadlines.reform)",
                (unsigned long long)daemon->planned->plan.generation,
                daemon->config->deadlines.reform);
    evtimer_add(self->on_grace, &(struct timeval){.tv_usec = FORMER_GRACE_MS * 1000});
    daemon_generation_deadline(daemon, daemon->config->deadlines.registration);
}

/* The bit of the agent that is called so; the highest for anybody else. */
static uint64_t bit_of(const daemon_t *daemon, const char *who)
{
    const config_t *config = daemon->config;
    const char *device = strchr(who, ' ');
    bool ffn = strncmp(who, "ffnagent ", 9) == 0;
    uint32_t index;
    if (!device || !config_device_find(config, ffn, device + 1, &index))
        return (uint64_t)1 << 63;
    return (uint64_t)1 << (ffn ? config->atn_count + index : index);
}

/* An agent fell before the Generation had its plan. Whether it is one more of those that fell
 * together: all of them bring as little as one. Who falls again begins anew. */
static bool fell_together(daemon_t *daemon, const char *who)
{
    daemon_generation_t *self = daemon->generation;
    uint64_t bit = bit_of(daemon, who);
    bool together = self->fallen && !(self->fallen & bit);
    self->fallen = together ? self->fallen | bit : bit;
    return together;
}

void daemon_generation_fail(daemon_t *daemon, const char *who, const char *what)
{
    daemon_generation_t *self = daemon->generation;
    char text[sizeof(((xpw_Failure *)0)->what)];
    if (daemon->failed || daemon->state >= DAEMON_QUIESCING || !daemon->ready_ns ||
        daemon->config->deadlines.reform <= 0) {
        daemon_fail(daemon, who, what);
        return;
    }
    bool registering = daemon->state == DAEMON_REGISTERING;
    bool together = registering && fell_together(daemon, who);
    if (!together && self->barren >= BARREN_LIMIT) {
        snprintf(text, sizeof(text),
                 "%.400s (after %u attempts at Generations that computed nothing)", what,
                 self->barren);
        daemon_fail(daemon, who, text);
        return;
    }
    if (registering) {
        /* Nothing rests on it yet: its place is free again. */
        self->barren += !together;
        xp_log_warn("%s: %s; Generation %llu waits for another one", who, what,
                    (unsigned long long)daemon->planned->plan.generation);
        return;
    }
    end_generation(daemon, who, what);
}

bool daemon_generation_unregistered(daemon_t *daemon, const xpw_AgentEnded *ended)
{
    bool ffn = ended->role == xpw_Role_ROLE_FFNAGENT;
    uint32_t index;
    char who[130], what[320];
    if ((!ffn && ended->role != xpw_Role_ROLE_ATNAGENT) || daemon->state != DAEMON_REGISTERING ||
        !daemon->reforming || !config_device_find(daemon->config, ffn, ended->device, &index) ||
        (ffn ? daemon->ffn : daemon->atn)[index] ||
        (uint32_t)(ffn ? daemon->ffn_pid : daemon->atn_pid)[index] == ended->pid)
        return false; /* its end is known, or ends nothing */
    snprintf(who, sizeof(who), "%s %s", wire_role_name(ended->role), ended->device);
    snprintf(what, sizeof(what),
             "its process (pid %u) %s before it had registered; what it said itself is in the "
             "standard error of `xpool up`",
             ended->pid, ended->how);
    daemon_generation_fail(daemon, who, what);
    return true;
}

/* ---- the next one -----------------------------------------------------------------------------
 */

bool daemon_generation_formed(daemon_t *daemon)
{
    if (!daemon->forming)
        return true;
    if (former_left(daemon))
        return false;
    xp_status_t status;
    fabric_t *fabric = NULL;
    int plan_fd = -1;
    /* FfnAgents read anew, Instances keep what they read at the start. */
    for (uint32_t i = 0; i < daemon->config->model_count; i++)
        XP_TRY_GOTO(status, fail, daemon_instance_check_checkpoint(&daemon->instances[i]));
    XP_TRY_GOTO(status, fail, daemon_make_plan_memfd(&daemon->planned->plan, &plan_fd));
    if (daemon->fabric) {
        XP_TRY_GOTO(status, fail, fabric_shm_renew(&daemon->planned->plan, &daemon->descriptors));
        XP_TRY_GOTO(status, fail,
                    fabric_attach("shm", &daemon->planned->plan, &daemon->descriptors,
                                  FABRIC_PE_OBSERVER, &fabric));
        fabric_detach(daemon->fabric);
        daemon->fabric = fabric;
    }
    close(daemon->plan_fd);
    daemon->plan_fd = plan_fd;
    daemon->forming = false;
    return true;
fail:
    if (plan_fd >= 0)
        close(plan_fd);
    (void)status;
    daemon_fail(daemon, "daemon", xp_error_last()->text);
    return false;
}

void daemon_generation_executable(daemon_t *daemon)
{
    daemon->generation->executable_ns = xp_monotonic_ns();
    if (!daemon->reforming)
        return;
    daemon->reforming = false;
    daemon->last_pause_s = (double)(xp_monotonic_ns() - daemon->pause_began_ns) / 1e9;
    xp_log_info("Generation %llu executes %.2f s after the failure of its predecessor",
                (unsigned long long)daemon->planned->plan.generation, daemon->last_pause_s);
}

xp_status_t daemon_generation_start(daemon_t *daemon)
{
    daemon->generation = calloc(1, sizeof(*daemon->generation));
    if (daemon->generation)
        daemon->generation->on_grace = evtimer_new(daemon->base, on_grace, daemon);
    if (!daemon->generation || !daemon->generation->on_grace)
        return xp_fail(XP_NO_MEMORY, "no memory for the Generation's upkeep");
    return XP_OK;
}

void daemon_generation_stop(daemon_t *daemon)
{
    daemon_generation_t *self = daemon->generation;
    if (!self)
        return;
    for (uint32_t f = 0; f < FABRIC_MAX_FFN; f++)
        for (uint32_t w = 0; w < FABRIC_MAX_INSTANCES; w++)
            drop_shard(&self->kept[f][w]);
    if (self->on_grace)
        event_free(self->on_grace);
    free(self);
    daemon->generation = NULL;
}
