/* SPDX-License-Identifier: MIT */
/*
 * The daemon's part in the data plane between GPUs: life words, the MPS controller, and descriptors
 * of device memory on their way from those who made it to those who map it. The daemon maps none
 * and touches no device. Runs on the daemon's event loop thread.
 *
 * An Instance is attached when every member FfnAgent has the arenas of all its ranks; then its
 * ranks get the stages. With the relay the FfnAgents get the AtnAgents' relay arenas instead, the
 * AtnAgents the stages and, last, the ranks' own arenas. With provider nvshmem these all lie in the
 * agents' symmetric heap: only the id to join with passes through here, and the ranks' own arenas.
 * Whoever mapped something of an Instance confirms that it has let go before a successor is
 * attached.
 *
 * Instances that outlive their Generation are attached to the next one in the same order, once no
 * former agent lives. Their open requests lie in their own arenas (relay) or in the stages, whose
 * descriptors wait here for the next FfnAgents (direct lane).
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/memfd.h"
#include "control/daemon_private.h"
#include "control/gpus.h"
#include "cuda/mps.h"
#include "cuda/mps_watch.h"
#include "stage/stage.h"
#include "transport/cuda_life.h"

#define MPS_COMMAND_NS  (2 * XP_NS_PER_S)
#define MPS_LOOK_NS     (5 * XP_NS_PER_S)
#define TERMINATE_NS    (3 * XP_NS_PER_S) /* for MPS to end a client's work */
#define LIFE_FIRST_WORD 1u                /* 0 is nobody's */
#define STAGE_FD_ABSENT (-1)
/* The daemon gives a Generation up before its Instances do, and names the reason. */
#define PAUSE_GRACE_NS (5 * XP_NS_PER_S)

typedef struct plane_instance {
    /* Bits of FfnAgents (low half) and of ranks whose AtnAgent (from PLANE_ATN_BIT on). */
    uint64_t asked;     /* were told to attach */
    uint64_t attached;  /* have confirmed it */
    uint64_t detaching; /* were told to let go and have not confirmed it */
    uint64_t lease;
    /* One that goes on, as the agents found it. */
    uint64_t answered;
    bool open;
} plane_instance_t;
#define PLANE_ATN_BIT 32u

struct daemon_plane {
    daemon_t *daemon;
    bool relay;
    bool heap;      /* provider nvshmem */
    bool id_passed; /* PE 0's id went to the others */
    bool keep;      /* Instances outlive a Generation */
    int life_fd;
    life_page_t *life;
    transport_life_watch_t *watch;
    daemon_participant_t *life_owner[LIFE_WORDS];
    uint32_t next_life;
    mps_t *mps;
    struct event *on_mps_death;
    mps_watch_t *mps_watch;
    bool mps_answers;
    char mps_problem[200];
    int stages[FABRIC_MAX_FFN][CONFIG_MAX_MODELS];
    int kept[FABRIC_MAX_FFN][CONFIG_MAX_MODELS]; /* stages of the last Generation */
    int partials[FABRIC_MAX_FFN][CONFIG_MAX_MODELS];
    int relays[CONFIG_MAX_MODELS][FABRIC_MAX_RANKS];
    plane_instance_t instances[CONFIG_MAX_MODELS];
};

static const fabric_plan_instance_t *plan_of(const daemon_plane_t *plane, uint32_t instance)
{
    return &plane->daemon->planned->plan.instances[instance];
}

/* ---- MPS --------------------------------------------------------------------------------------
 */

static void on_mps_death(evutil_socket_t fd, short events, void *context)
{
    daemon_plane_t *plane = context;
    char what[96];
    snprintf(what, sizeof(what), "the MPS controller (pid %d) died", (int)mps_pid(plane->mps));
    plane->mps_answers = false;
    daemon_fail(plane->daemon, "mps", what);
}

static xp_status_t start_mps(daemon_plane_t *plane)
{
    const config_t *config = plane->daemon->config;
    char name[64], devices[GPUS_TEXT_BYTES];
    char pipe[PATH_MAX], log[PATH_MAX];
    XP_TRY(gpus_mps_folders(config, name, pipe, log));
    XP_TRY(gpus_controller_list(config, devices));
    mps_options_t options = {.root = getenv(GPUS_MPS_ROOT_VARIABLE),
                             .name = name,
                             .devices = devices,
                             .command_limit_ns = MPS_COMMAND_NS};
    XP_TRY(mps_start(&options, &plane->mps));
    xp_log_info("MPS controller %d %s for GPUs %s", (int)mps_pid(plane->mps),
                mps_adopted(plane->mps) ? "taken over" : "started", devices);
    plane->on_mps_death =
        event_new(plane->daemon->base, mps_pidfd(plane->mps), EV_READ, on_mps_death, plane);
    if (!plane->on_mps_death || event_add(plane->on_mps_death, NULL) != 0)
        return xp_fail(XP_NO_MEMORY, "no memory to watch the MPS controller");
    plane->mps_answers = true; /* mps_start() has asked */
    return mps_watch_create(plane->mps, MPS_LOOK_NS, &plane->mps_watch);
}

/* It has answered, or had its time. */
static bool terminated(const daemon_plane_t *plane, const daemon_participant_t *participant)
{
    return mps_watch_terminate(plane->mps_watch, participant->pid) ||
           xp_monotonic_ns() >= participant->terminate_until_ns;
}

bool daemon_plane_terminate(daemon_participant_t *participant)
{
    const daemon_plane_t *plane = participant->daemon->plane;
    if (!plane || !plane->mps_watch || participant->role != xpw_Role_ROLE_INSTANCE ||
        !participant->life_index || participant->was_killed)
        return false;
    if (!participant->terminate_until_ns)
        participant->terminate_until_ns = xp_monotonic_ns() + TERMINATE_NS;
    return !terminated(plane, participant);
}

static void kill_terminated(daemon_t *daemon)
{
    for (uint32_t i = 0; i < DAEMON_MAX_PARTICIPANTS; i++) {
        daemon_participant_t *participant = &daemon->participants[i];
        if (participant->used && participant->terminate_until_ns && !participant->was_killed &&
            terminated(daemon->plane, participant))
            daemon_participant_kill(participant);
    }
}

void daemon_plane_tick(daemon_t *daemon)
{
    daemon_plane_t *plane = daemon->plane;
    if (plane && plane->mps_watch)
        kill_terminated(daemon);
    if (!plane || !plane->mps_watch || daemon->failed)
        return;
    plane->mps_answers = mps_watch_look(plane->mps_watch) == XP_OK;
    if (!plane->mps_answers)
        snprintf(plane->mps_problem, sizeof(plane->mps_problem), "%.199s", xp_error_last()->text);
}

const char *daemon_plane_problem(const daemon_t *daemon)
{
    const daemon_plane_t *plane = daemon->plane;
    return plane && plane->mps && !plane->mps_answers ? plane->mps_problem : NULL;
}

/* ---- start and end ----------------------------------------------------------------------------
 */

xp_status_t daemon_plane_start(daemon_t *daemon)
{
    if (!daemon->planned->cuda)
        return XP_OK;
    daemon_plane_t *plane = calloc(1, sizeof(*plane));
    if (!plane)
        return xp_fail(XP_NO_MEMORY, "no memory for the data plane's descriptors");
    daemon->plane = plane;
    plane->daemon = daemon;
    plane->life_fd = -1;
    plane->next_life = LIFE_FIRST_WORD;
    plane->relay = fabric_provider_relays(daemon->planned->plan.provider);
    plane->heap = fabric_provider_heap(daemon->planned->plan.provider);
    plane->keep = daemon->config->keep_requests && daemon->config->deadlines.reform > 0;
    memset(plane->stages, 0xff, sizeof(plane->stages)); /* STAGE_FD_ABSENT */
    memset(plane->kept, 0xff, sizeof(plane->kept));
    memset(plane->partials, 0xff, sizeof(plane->partials));
    memset(plane->relays, 0xff, sizeof(plane->relays));
    XP_TRY(transport_life_make(&plane->life_fd));
    XP_TRY(transport_life_map(plane->life_fd, &plane->life));
    XP_TRY(transport_life_watch_create(plane->life, NULL, NULL, &plane->watch));
    return start_mps(plane);
}

static void close_fd(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = STAGE_FD_ABSENT;
}

void daemon_plane_stop(daemon_t *daemon)
{
    daemon_plane_t *plane = daemon->plane;
    if (!plane)
        return;
    if (plane->on_mps_death)
        event_free(plane->on_mps_death);
    mps_watch_destroy(plane->mps_watch);
    if (plane->mps && mps_stop(plane->mps) != XP_OK)
        xp_log_warn("%s", xp_error_last()->text);
    mps_destroy(plane->mps);
    transport_life_watch_destroy(plane->watch);
    if (plane->life)
        xp_memfd_unmap(plane->life);
    close_fd(&plane->life_fd);
    for (uint32_t i = 0; i < CONFIG_MAX_MODELS; i++) {
        for (uint32_t f = 0; f < FABRIC_MAX_FFN; f++) {
            close_fd(&plane->stages[f][i]);
            close_fd(&plane->kept[f][i]);
            close_fd(&plane->partials[f][i]);
        }
        for (uint32_t r = 0; r < FABRIC_MAX_RANKS; r++)
            close_fd(&plane->relays[i][r]);
    }
    free(plane);
    daemon->plane = NULL;
}

/* ---- life words -------------------------------------------------------------------------------
 */

/* A word that no live process has; those of the dead are used again last, when no kernel of theirs
 * can still look at them. */
static uint32_t take_life_word(daemon_plane_t *plane, daemon_participant_t *participant)
{
    while (plane->life_owner[plane->next_life])
        plane->next_life =
            plane->next_life + 1 < LIFE_WORDS ? plane->next_life + 1 : LIFE_FIRST_WORD;
    uint32_t index = plane->next_life;
    plane->next_life = index + 1 < LIFE_WORDS ? index + 1 : LIFE_FIRST_WORD;
    transport_life_renew(plane->life, index);
    plane->life_owner[index] = participant;
    if (participant->pidfd >= 0 &&
        transport_life_watch_add(plane->watch, participant->pidfd, index) != XP_OK)
        xp_log_warn("%s", xp_error_last()->text); /* the process holds its word itself */
    return index;
}

bool daemon_plane_keeps(const daemon_instance_t *instance)
{
    const daemon_plane_t *plane = instance->daemon->plane;
    if (!plane || instance->ending || !plane->keep)
        return false;
    for (uint32_t r = 0; r < instance->rank_count; r++)
        if (!instance->ranks[r].participant || instance->ranks[r].state < RANK_ATTACHED)
            return false;
    return true;
}

static uint64_t pause_ns(const daemon_plane_t *plane, const daemon_participant_t *participant)
{
    double seconds = plane->daemon->config->deadlines.reform;
    if (participant->role != xpw_Role_ROLE_INSTANCE || !plane->keep)
        return 0;
    return (uint64_t)(seconds * (double)XP_NS_PER_S) + PAUSE_GRACE_NS;
}

void daemon_plane_greet(daemon_participant_t *participant)
{
    daemon_plane_t *plane = participant->daemon->plane;
    if (!plane || participant->life_index)
        return;
    _Static_assert(DAEMON_MAX_PARTICIPANTS < LIFE_WORDS - 1, "there is a free word for everybody");
    participant->life_index = take_life_word(plane, participant);
    xpw_Envelope envelope = {.which_body = xpw_Envelope_device_plane_tag};
    envelope.body.device_plane.life_index = participant->life_index;
    envelope.body.device_plane.relay = plane->relay;
    envelope.body.device_plane.keep = plane->keep;
    envelope.body.device_plane.pause_ns = pause_ns(plane, participant);
    int fds[2] = {plane->life_fd, participant->daemon->plan_fd};
    wire_channel_send(participant->channel, &envelope, fds,
                      participant->role == xpw_Role_ROLE_INSTANCE ? 2 : 1);
}

void daemon_plane_end_word(daemon_participant_t *participant)
{
    daemon_plane_t *plane = participant->daemon ? participant->daemon->plane : NULL;
    if (plane && participant->life_index)
        life_word_end(&plane->life->word[participant->life_index]);
}

void daemon_plane_farewell(daemon_participant_t *participant)
{
    daemon_plane_t *plane = participant->daemon ? participant->daemon->plane : NULL;
    uint32_t index = participant->life_index;
    if (!plane || !index)
        return;
    if (plane->heap && participant->role != xpw_Role_ROLE_INSTANCE)
        stage_heap_sweep(participant->pid);
    transport_life_watch_remove(plane->watch, index);
    daemon_plane_end_word(participant);
    plane->life_owner[index] = NULL;
}

/* ---- attaching --------------------------------------------------------------------------------
 */

static void send_arena(daemon_instance_t *instance, const daemon_participant_t *agent, uint32_t r,
                       const int *fds, uint32_t fd_count)
{
    daemon_plane_t *plane = instance->daemon->plane;
    const fabric_plan_instance_t *planned = plan_of(plane, instance->index);
    xpw_Envelope envelope = {.which_body = xpw_Envelope_arena_attach_tag};
    xpw_ArenaAttach *attach = &envelope.body.arena_attach;
    attach->instance = instance->index;
    attach->rank = r;
    attach->hidden = planned->hidden;
    attach->max_rows = planned->max_rows;
    attach->dtype = planned->dtype;
    attach->dp_size = planned->atn_dp;
    attach->lease = plane->instances[instance->index].lease;
    attach->life_index = instance->ranks[r].participant->life_index;
    /* With the relay, FfnAgents know its arenas only, which are fresh. */
    attach->resume =
        instance->ranks[r].waiting && plane->relay == (agent->role == xpw_Role_ROLE_ATNAGENT);
    if (wire_channel_send(agent->channel, &envelope, fds, fd_count) != XP_OK)
        xp_log_error("cannot hand an arena to its agent");
}

static void send_stage(daemon_plane_t *plane, const daemon_participant_t *to, xpw_StageKind kind,
                       uint32_t instance, uint32_t ffn)
{
    xpw_Envelope envelope = {.which_body = xpw_Envelope_stage_grant_tag};
    envelope.body.stage_grant.kind = kind;
    envelope.body.stage_grant.instance = instance;
    envelope.body.stage_grant.ffn = ffn;
    int fd = kind == xpw_StageKind_STAGE_ROWS ? plane->stages[ffn][instance]
                                              : plane->partials[ffn][instance];
    if (wire_channel_send(to->channel, &envelope, &fd, 1) != XP_OK)
        xp_log_error("cannot hand on a descriptor of device memory");
}

/* All ranks are there with their arenas, every member can execute, and nothing of a former Instance
 * is mapped any more. */
static bool can_attach(const daemon_instance_t *instance, uint32_t members)
{
    const daemon_t *daemon = instance->daemon;
    const daemon_plane_t *plane = daemon->plane;
    const plane_instance_t *own = &plane->instances[instance->index];
    if (own->asked || own->detaching || instance->ending)
        return false;
    for (uint32_t r = 0; r < instance->rank_count; r++) {
        uint32_t a = plan_of(plane, instance->index)->rank_atn[r];
        const daemon_rank_t *rank = &instance->ranks[r];
        if ((rank->state != RANK_OFFERED && !rank->waiting) || !daemon->atn[a] ||
            !daemon->atn[a]->joined ||
            (plane->relay && !plane->heap && plane->relays[instance->index][r] < 0))
            return false;
    }
    for (uint32_t f = 0; f < daemon->config->ffn_count; f++)
        if ((members & 1u << f) && (!daemon->ffn[f] || !daemon->ffn[f]->executable ||
                                    (!plane->heap && plane->stages[f][instance->index] < 0)))
            return false;
    return true;
}

void daemon_plane_try_attach(daemon_instance_t *instance)
{
    daemon_t *daemon = instance->daemon;
    daemon_plane_t *plane = daemon->plane;
    plane_instance_t *own = &plane->instances[instance->index];
    uint32_t members = stage_members(plan_of(plane, instance->index));
    if (!can_attach(instance, members))
        return;
    own->lease = ++daemon->next_lease;
    own->asked = members;
    own->attached = 0;
    own->open = false;
    for (uint32_t f = 0; f < daemon->config->ffn_count; f++)
        for (uint32_t r = 0; (members & 1u << f) && r < (plane->heap ? 1 : instance->rank_count);
             r++)
            send_arena(instance, daemon->ffn[f], r,
                       plane->relay ? &plane->relays[instance->index][r]
                                    : &instance->ranks[r].arena_fd,
                       plane->heap ? 0 : 1);
}

/* Each AtnAgent answers its rank by itself, so one rank may have an answer that another one lacks.
 * Who resumes a rank sees the arenas of all, and hands that answer on before it serves. */
static void send_resume(daemon_instance_t *instance, const daemon_participant_t *agent, uint32_t r)
{
    _Static_assert(FABRIC_MAX_RANKS <= WIRE_MAX_DESCRIPTORS, "the arenas of all ranks at once");
    int fds[FABRIC_MAX_RANKS];
    for (uint32_t i = 0; i < instance->rank_count; i++)
        fds[i] = instance->ranks[i].arena_fd;
    send_arena(instance, agent, r, fds, instance->rank_count);
}

/* With the relay, after the FfnAgents. */
static void ask_atnagents(daemon_instance_t *instance, uint32_t members)
{
    daemon_t *daemon = instance->daemon;
    daemon_plane_t *plane = daemon->plane;
    plane_instance_t *own = &plane->instances[instance->index];
    for (uint32_t r = 0; r < instance->rank_count; r++) {
        const daemon_participant_t *agent =
            daemon->atn[plan_of(plane, instance->index)->rank_atn[r]];
        if (!agent)
            return; /* it died meanwhile: the Generation is at its end */
        own->asked |= (uint64_t)1 << (PLANE_ATN_BIT + r);
        for (uint32_t f = 0; !plane->heap && f < daemon->config->ffn_count; f++)
            if (members & 1u << f)
                send_stage(plane, agent, xpw_StageKind_STAGE_ROWS, instance->index, f);
        if (instance->ranks[r].waiting)
            send_resume(instance, agent, r);
        else
            send_arena(instance, agent, r, &instance->ranks[r].arena_fd, 1);
    }
}

static void attached_everywhere(daemon_instance_t *instance, uint32_t members)
{
    daemon_t *daemon = instance->daemon;
    daemon_plane_t *plane = daemon->plane;
    const plane_instance_t *own = &plane->instances[instance->index];
    char why[256];
    if (daemon_instance_waits(instance) &&
        daemon_instance_stuck(&instance->ranks[0], own->answered, own->open, why, sizeof(why))) {
        xp_log_err("model %s: %s", daemon->config->models[instance->index].id, why);
        daemon_instance_end(instance, why);
        return;
    }
    for (uint32_t r = 0; r < instance->rank_count; r++) {
        daemon_rank_t *rank = &instance->ranks[r];
        /* One that goes on has the stages mapped, and its state. */
        for (uint32_t f = 0; !rank->waiting && !plane->relay && f < daemon->config->ffn_count; f++)
            if (members & 1u << f)
                send_stage(plane, rank->participant, xpw_StageKind_STAGE_ROWS, instance->index, f);
        if (!rank->waiting)
            rank->state = RANK_ATTACHED;
        rank->waiting = false;
        xpw_Envelope answer = {.which_body = xpw_Envelope_attached_tag};
        answer.body.attached.atn_pe = plan_of(plane, instance->index)->rank_atn[r];
        wire_channel_send(rank->participant->channel, &answer, NULL, 0);
    }
    daemon_instance_refresh(instance);
    daemon_advance(daemon);
}

static void on_attached(daemon_participant_t *agent, const xpw_ArenaAttached *attached)
{
    daemon_t *daemon = agent->daemon;
    daemon_plane_t *plane = daemon->plane;
    if (attached->instance >= daemon->config->model_count || attached->rank >= FABRIC_MAX_RANKS)
        return;
    daemon_instance_t *instance = &daemon->instances[attached->instance];
    plane_instance_t *own = &plane->instances[attached->instance];
    bool ffn = agent->role == xpw_Role_ROLE_FFNAGENT;
    uint64_t bit = (uint64_t)1 << (ffn ? agent->index : PLANE_ATN_BIT + attached->rank);
    if (attached->lease != own->lease || !(own->asked & bit))
        return; /* of an Instance that has gone meanwhile */
    if (attached->error[0]) {
        char why[320];
        snprintf(why, sizeof(why), "its arena was not attached by %s %s: %.200s",
                 ffn ? "ffnagent" : "atnagent", agent->name, attached->error);
        xp_log_err("model %s: %s", daemon->config->models[instance->index].id, why);
        instance->replace = daemon_instance_waits(instance) && !instance->left;
        daemon_instance_end(instance, why);
        return;
    }
    own->attached |= bit;
    if (attached->open || !own->open)
        own->answered = attached->answered;
    own->open = own->open || attached->open;
    uint32_t members = stage_members(plan_of(plane, instance->index));
    if (own->attached != own->asked)
        return;
    if (plane->relay && ffn)
        ask_atnagents(instance, members);
    else
        attached_everywhere(instance, members);
}

/* Every agent that was asked lets go of all ranks. */
void daemon_plane_release(daemon_instance_t *instance)
{
    daemon_t *daemon = instance->daemon;
    daemon_plane_t *plane = daemon->plane;
    plane_instance_t *own = &plane->instances[instance->index];
    xpw_Envelope envelope = {.which_body = xpw_Envelope_arena_detach_tag};
    envelope.body.arena_detach.instance = instance->index;
    /* AtnAgents first: what they put meanwhile would reach a stage that is nobody's. */
    for (uint32_t r = 0; r < instance->rank_count; r++) {
        const daemon_participant_t *agent =
            daemon->atn[plan_of(plane, instance->index)->rank_atn[r]];
        envelope.body.arena_detach.rank = r;
        if ((own->asked >> (PLANE_ATN_BIT + r) & 1) && agent) {
            wire_channel_send(agent->channel, &envelope, NULL, 0);
            own->detaching |= (uint64_t)1 << (PLANE_ATN_BIT + r);
        }
    }
    envelope.body.arena_detach.rank = 0;
    for (uint32_t f = 0; f < daemon->config->ffn_count; f++)
        if ((own->asked >> f & 1) && daemon->ffn[f]) {
            wire_channel_send(daemon->ffn[f]->channel, &envelope, NULL, 0);
            own->detaching |= (uint64_t)1 << f;
        }
    own->asked = own->attached = 0;
    own->lease = 0;
}

void daemon_plane_forget(daemon_t *daemon)
{
    daemon_plane_t *plane = daemon->plane;
    if (plane)
        plane->id_passed = false;
    for (uint32_t i = 0; plane && i < CONFIG_MAX_MODELS; i++) {
        plane->instances[i] = (plane_instance_t){0};
        for (uint32_t f = 0; f < FABRIC_MAX_FFN; f++) {
            if (plane->stages[f][i] >=
                0) { /* else none was offered since, and the kept one holds */
                close_fd(&plane->kept[f][i]);
                plane->kept[f][i] = plane->stages[f][i];
                plane->stages[f][i] = STAGE_FD_ABSENT;
            }
            close_fd(&plane->partials[f][i]);
        }
        for (uint32_t r = 0; r < FABRIC_MAX_RANKS; r++)
            close_fd(&plane->relays[i][r]);
    }
}

void daemon_plane_hand(daemon_t *daemon, uint32_t ffn)
{
    daemon_plane_t *plane = daemon->plane;
    for (uint32_t i = 0; plane && i < daemon->config->model_count; i++) {
        /* By the relay nobody but agents maps stages. */
        if (plane->kept[ffn][i] >= 0 && !plane->relay && daemon->ffn[ffn] &&
            daemon_instance_waits(&daemon->instances[i])) {
            xpw_Envelope envelope = {.which_body = xpw_Envelope_kept_stage_tag};
            envelope.body.kept_stage.instance = i;
            if (wire_channel_send(daemon->ffn[ffn]->channel, &envelope, &plane->kept[ffn][i], 1) !=
                XP_OK)
                xp_log_error("cannot hand on the memory in which requests wait");
        } else {
            close_fd(&plane->kept[ffn][i]);
        }
    }
}

static void on_detached(daemon_participant_t *agent, const xpw_ArenaDetached *detached)
{
    daemon_t *daemon = agent->daemon;
    if (detached->instance >= daemon->config->model_count || detached->rank >= FABRIC_MAX_RANKS)
        return;
    if (detached->error[0]) {
        char who[130], what[400];
        snprintf(who, sizeof(who), "%s %.96s", wire_role_name(agent->role), agent->name);
        snprintf(what, sizeof(what), "the arenas of %s cannot be let go: %.256s",
                 daemon->config->models[detached->instance].id, detached->error);
        daemon_generation_fail(daemon, who, what);
        return;
    }
    bool ffn = agent->role == xpw_Role_ROLE_FFNAGENT;
    uint32_t bit = ffn ? agent->index : PLANE_ATN_BIT + detached->rank;
    daemon->plane->instances[detached->instance].detaching &= ~((uint64_t)1 << bit);
    daemon_plane_try_attach(&daemon->instances[detached->instance]);
}

/* ---- stages -----------------------------------------------------------------------------------
 */

/* The members that add to `ffn`'s partials of the Instance. */
static uint32_t contributors(const fabric_plan_instance_t *instance, uint32_t ffn)
{
    uint32_t others = 0;
    for (uint32_t l = 0; l < instance->layers; l++)
        if ((uint32_t)__builtin_ctz(instance->layer_group[l]) == ffn)
            others |= instance->layer_group[l] & ~(1u << ffn);
    return others;
}

/* Whoever has offered its own stage can map the partials of others; before that it still loads. */
static void hand_partials(daemon_plane_t *plane, uint32_t instance, uint32_t first, uint32_t member)
{
    if ((contributors(plan_of(plane, instance), first) & 1u << member) &&
        plane->partials[first][instance] >= 0 && plane->stages[member][instance] >= 0 &&
        plane->daemon->ffn[member])
        send_stage(plane, plane->daemon->ffn[member], xpw_StageKind_STAGE_PARTIALS, instance,
                   first);
}

static void on_stage_offer(daemon_participant_t *agent, const xpw_StageOffer *offer,
                           wire_descriptors_t *fds)
{
    daemon_t *daemon = agent->daemon;
    daemon_plane_t *plane = daemon->plane;
    bool ffn = agent->role == xpw_Role_ROLE_FFNAGENT;
    bool relay = offer->kind == xpw_StageKind_STAGE_RELAY;
    if (plane->heap || offer->instance >= daemon->config->model_count || fds->count != 1 ||
        relay == ffn ||
        (relay && (offer->rank >= daemon->instances[offer->instance].rank_count ||
                   plan_of(plane, offer->instance)->rank_atn[offer->rank] != agent->index))) {
        daemon_participant_violates(agent, "memory that is not in the plan");
        return;
    }
    int *place = relay ? &plane->relays[offer->instance][offer->rank]
                 : offer->kind == xpw_StageKind_STAGE_ROWS
                     ? &plane->stages[agent->index][offer->instance]
                     : &plane->partials[agent->index][offer->instance];
    if (*place >= 0) {
        daemon_participant_violates(agent, "the same memory twice");
        return;
    }
    *place = wire_descriptors_take(fds, 0);
    if (offer->kind == xpw_StageKind_STAGE_ROWS) /* the same memory, or one that replaces it */
        close_fd(&plane->kept[agent->index][offer->instance]);
    daemon_instance_t *instance = &daemon->instances[offer->instance];
    if (offer->kind == xpw_StageKind_STAGE_ROWS && !plane->relay && !offer->adopted &&
        daemon_instance_waits(instance)) {
        char why[200];
        snprintf(why, sizeof(why),
                 "ffnagent %.96s could not take over the memory in which its requests wait",
                 agent->name);
        xp_log_err("model %s: %s", daemon->config->models[offer->instance].id, why);
        daemon_instance_end(instance, why);
    }
    for (uint32_t f = 0; !relay && f < daemon->config->ffn_count; f++) {
        if (offer->kind == xpw_StageKind_STAGE_PARTIALS)
            hand_partials(plane, offer->instance, agent->index, f);
        else
            hand_partials(plane, offer->instance, f, agent->index);
    }
    daemon_plane_try_attach(&daemon->instances[offer->instance]);
}

/* ---- joining: provider nvshmem ----------------------------------------------------------------
 */

static void on_fabric_id(daemon_participant_t *agent, const xpw_FabricId *id)
{
    daemon_t *daemon = agent->daemon;
    daemon_plane_t *plane = daemon->plane;
    if (!plane->heap || plane->id_passed || agent != daemon->atn[0] ||
        id->generation != daemon->planned->plan.generation) {
        daemon_participant_violates(agent, "an id that nobody asked for");
        return;
    }
    plane->id_passed = true;
    xpw_Envelope envelope = {.which_body = xpw_Envelope_fabric_id_tag};
    envelope.body.fabric_id = *id;
    /* All of them are registered: they were sent Join together. One that has died meanwhile ends
     * the Generation by its death. */
    for (uint32_t a = 1; a < daemon->config->atn_count; a++)
        if (daemon->atn[a])
            wire_channel_send(daemon->atn[a]->channel, &envelope, NULL, 0);
    for (uint32_t f = 0; f < daemon->config->ffn_count; f++)
        if (daemon->ffn[f])
            wire_channel_send(daemon->ffn[f]->channel, &envelope, NULL, 0);
}

/* ---- messages ---------------------------------------------------------------------------------
 */

bool daemon_plane_message(daemon_participant_t *agent, const xpw_Envelope *envelope,
                          wire_descriptors_t *fds)
{
    if (!agent->daemon->plane)
        return false;
    switch (envelope->which_body) {
    case xpw_Envelope_stage_offer_tag:
        on_stage_offer(agent, &envelope->body.stage_offer, fds);
        return true;
    case xpw_Envelope_arena_attached_tag:
        on_attached(agent, &envelope->body.arena_attached);
        return true;
    case xpw_Envelope_arena_detached_tag:
        on_detached(agent, &envelope->body.arena_detached);
        return true;
    case xpw_Envelope_fabric_id_tag:
        on_fabric_id(agent, &envelope->body.fabric_id);
        return true;
    case xpw_Envelope_plane_stats_tag:
        agent->plane_stats = envelope->body.plane_stats;
        daemon_generation_told(agent->daemon, &agent->plane_stats);
        return true;
    default:
        return false;
    }
}

void daemon_plane_executable(daemon_t *daemon)
{
    for (uint32_t i = 0; daemon->plane && i < daemon->config->model_count; i++)
        daemon_plane_try_attach(&daemon->instances[i]);
}

/* ---- counters ---------------------------------------------------------------------------------
 */

void daemon_pe_counters(const daemon_t *daemon, uint32_t pe, fabric_pe_counters_t *counters_out)
{
    if (!daemon->plane) {
        fabric_counters(daemon->fabric, pe, counters_out);
        return;
    }
    uint32_t atn = daemon->config->atn_count;
    const daemon_participant_t *agent = pe < atn ? daemon->atn[pe] : daemon->ffn[pe - atn];
    *counters_out = (fabric_pe_counters_t){0};
    if (!agent)
        return;
    const xpw_PlaneStats *stats = &agent->plane_stats;
    *counters_out = (fabric_pe_counters_t){.submissions = stats->submissions,
                                           .invocations = stats->invocations,
                                           .rows = stats->rows,
                                           .eager = stats->invocations,
                                           .abandoned = stats->abandoned,
                                           .busy_ns = stats->busy_ns,
                                           .queue_ns = stats->queue_ns,
                                           .lanes_leased = stats->submissions,
                                           .lanes_peak = stats->lanes_peak,
                                           .lanes_in_use = stats->lanes_in_use};
}

void daemon_instance_counters(const daemon_t *daemon, uint32_t instance, uint64_t *invocations_out,
                              uint64_t *rows_out)
{
    if (!daemon->plane) {
        fabric_instance_counters(daemon->fabric, instance, invocations_out, rows_out);
        return;
    }
    /* As its groups' first members count them. */
    *invocations_out = *rows_out = 0;
    const fabric_plan_instance_t *planned = &daemon->planned->plan.instances[instance];
    uint32_t first = 0;
    for (uint32_t l = 0; l < planned->layers; l++)
        first |= planned->layer_group[l] & -planned->layer_group[l];
    for (uint32_t f = 0; f < daemon->config->ffn_count; f++) {
        const daemon_participant_t *agent = daemon->ffn[f];
        if (!(first & 1u << f) || !agent || instance >= agent->plane_stats.instance_rows_count)
            continue;
        *invocations_out += agent->plane_stats.instance_invocations[instance];
        *rows_out += agent->plane_stats.instance_rows[instance];
    }
}
