/* SPDX-License-Identifier: MIT */
/* What the daemon's own files share. Everything here belongs to the daemon's event loop thread. */
#ifndef XPOOL_CONTROL_DAEMON_PRIVATE_H
#define XPOOL_CONTROL_DAEMON_PRIVATE_H

#include <event2/event.h>
#include <event2/http.h>
#include <sys/types.h>

#include "config/config.h"
#include "control/planner.h"
#include "fabric/fabric.h"
#include "model/digest.h"
#include "wire/channel.h"

#define DAEMON_MAX_PARTICIPANTS 128
#define DAEMON_MAX_REASONS      24
#define DAEMON_KEPT_BLOCKS      32 /* allocations of one weight shard */

/* The life of a Generation, in order. */
typedef enum daemon_state {
    DAEMON_REGISTERING = 0,
    DAEMON_PLANNED,
    DAEMON_PREPARING_JOIN,
    DAEMON_JOINED,
    DAEMON_PREPARING_EXECUTION,
    DAEMON_EXECUTABLE,
    DAEMON_READY,
    DAEMON_QUIESCING,
    DAEMON_DRAINING,
    DAEMON_FINALIZING,
    DAEMON_STOPPED,
} daemon_state_t;

typedef struct daemon daemon_t;
struct daemon_kv;                                     /* daemon_kv.c: the KV market */
typedef struct daemon_generation daemon_generation_t; /* daemon_generation.c */
typedef struct daemon_plane daemon_plane_t; /* daemon_plane.c; only where devices are GPUs */

typedef struct daemon_participant {
    daemon_t *daemon;
    bool used;
    wire_channel_t *channel;
    xpw_Role role; /* NONE before Hello */
    char name[96];
    uint32_t index; /* AtnAgent, FfnAgent or Instance index */
    pid_t pid;
    int pidfd; /* -1 where the kernel has none: then only the socket tells */
    struct event *on_death;
    bool said_bye, was_killed;
    bool former;        /* agent of a failed Generation: nothing it says counts */
    bool refused;       /* nothing it says counts any more */
    bool library;       /* an Instance Rank of another engine, through libxpool */
    bool told_to_stop;  /* was sent STOP_DRAIN or STOP_FINALIZE */
    uint64_t end_by_ns; /* then; where it leaves alone it is killed after this */
    uint32_t rank;      /* Instance */
    /* An Instance Rank whose predecessor is still leaving: nothing counts it yet. */
    bool waits;
    bool has_workload; /* it came meanwhile */
    xpw_Workload workload;
    uint64_t since_ns;       /* connected, or a client's last question */
    bool joined, executable; /* agents */
    uint64_t progress_done, progress_total;
    char progress_what[96];
    xpw_Executable execution; /* FfnAgent */
    char kernels[16];
    bool wants_down;     /* client waiting for DownDone */
    uint32_t life_index; /* CUDA: its life word; 0 = none */
    /* CUDA: MPS is to end its work on the device first; until then at most. 0: not asked. */
    uint64_t terminate_until_ns;
    xpw_PlaneStats plane_stats;                  /* CUDA: agents */
    xpw_ExpertUsage usage[FABRIC_MAX_INSTANCES]; /* FfnAgent, by weight set */
} daemon_participant_t;

/* How far one Instance Rank is. */
typedef enum daemon_rank_state {
    RANK_ABSENT = 0,
    RANK_HELLO,        /* of a library: its Workload has not come yet */
    RANK_ADMITTED,     /* loads its side */
    RANK_OFFERED,      /* its arena waits for the AtnAgent */
    RANK_ATTACHED,     /* its AtnAgent has the arena */
    RANK_INITIALIZING, /* warms up through real FFN execution */
    RANK_INITIALIZED,  /* past the initialisation barrier */
} daemon_rank_state_t;

/* The state of the Instance follows from its ranks' (daemon_instance_refresh). */
typedef enum daemon_instance_state {
    INSTANCE_ABSENT = 0,
    INSTANCE_LOADING,
    INSTANCE_OFFERED,
    INSTANCE_ATTACHED,
    INSTANCE_INITIALIZING,
    INSTANCE_INITIALIZED, /* a library's: its HTTP /health has not answered yet */
    INSTANCE_SERVING,
} daemon_instance_state_t;

typedef struct daemon_rank {
    daemon_participant_t *participant;
    daemon_rank_state_t state;
    int arena_fd;
    xpw_ArenaOffer offer;
    uint64_t lease; /* names the current attachment */
    bool attached_at_agent;
    bool waiting;            /* attached before, to an AtnAgent of a failed Generation */
    uint64_t stuck_sequence; /* answered when the last Generation failed, the next one open: */
    uint32_t stuck_count;    /* so often in a row */
    uint64_t open_sequence, open_since_ns; /* seen waiting in its arena; 0: none */
    uint64_t weight_bytes, kv_bytes;
} daemon_rank_t;

typedef struct daemon_instance {
    daemon_t *daemon;
    uint32_t index, rank_count;
    daemon_instance_state_t state;
    daemon_rank_t ranks[FABRIC_MAX_RANKS];
    /* One rank has gone: the leases are taken back, the other ranks are told to end, and a new
     * Instance may come when the last of them has. */
    bool ending;
    uint64_t ending_ns;
    bool left;    /* its user has asked it to end */
    bool replace; /* had to end with its Generation, or as the next one began; none came since */
    uint64_t admitted_ns;                   /* the first rank's Hello, for deadlines.startup */
    char engine[64];                        /* a library's name and release */
    uint8_t checkpoint[MODEL_DIGEST_BYTES]; /* of the configured path, at the start */
    uint64_t stamp;                         /* of the same files */
    char host[64];
    uint32_t port; /* 0: no HTTP */
    uint32_t max_context;
    xpw_InstanceStats stats;
    char absence[256]; /* why it is not there, once it was */
    bool healthy;      /* its own HTTP health answered */
    bool was_healthy;  /* did so once */
    uint64_t healthy_at_ns;
    bool probing;
} daemon_instance_t;

struct daemon {
    const config_t *config;
    struct event_base *base;
    plan_result_t *planned;
    int plan_fd;
    fabric_descriptors_t descriptors;
    fabric_t *fabric; /* observer; NULL where devices are GPUs */
    daemon_plane_t *plane;
    struct daemon_kv *kv;
    daemon_generation_t *generation;
    bool forming;             /* a Generation failed; the next one has no plan yet */
    bool reforming;           /* ... and does not execute yet */
    uint64_t pause_began_ns;  /* of the failure that began it */
    double last_pause_s;      /* how long the last such pause was */
    uint64_t watched_ns;      /* when the arenas were last looked at */
    uint64_t reforms;         /* Generations that failed and were replaced */
    xpw_Failure last_failure; /* of the last of them; generation 0: none */
    daemon_state_t state;
    bool hand_stopped; /* an agent left while no Instance was there */
    int listener, lock;
    struct event *on_accept, *on_term, *on_int, *on_deadline, *on_tick;
    struct evhttp *http;
    struct evconnlistener *http_listener; /* of `http` */
    bool crowded;                         /* few descriptors are left */
    uint16_t http_port;
    daemon_participant_t participants[DAEMON_MAX_PARTICIPANTS];
    daemon_participant_t *atn[FABRIC_MAX_ATN], *ffn[FABRIC_MAX_FFN], *gateway;
    pid_t atn_pid[FABRIC_MAX_ATN], ffn_pid[FABRIC_MAX_FFN]; /* of whoever registered last */
    daemon_instance_t instances[CONFIG_MAX_MODELS];
    char gateway_host[64];
    uint32_t gateway_port;
    bool gateway_seen; /* one was there: its absence is then a fault */
    xpw_GatewayStats gateway_stats;
    uint64_t next_lease, started_ns, ready_ns;
    /* the canonical failure */
    bool failed;
    xpw_Failure failure;
    /* the ordered end */
    char stop_reason[128];
    bool forced; /* somebody had to be killed */
    char forced_names[512];
    uint32_t kill_rounds;
    int exit_code;
};

/* daemon.c */
const char *daemon_state_name(daemon_state_t state);
const char *daemon_instance_state_name(daemon_instance_state_t state);
void daemon_advance(daemon_t *daemon); /* takes every transition that is due */
void daemon_fail(daemon_t *daemon, const char *who, const char *what);
void daemon_describe_failure(const daemon_t *daemon, const char *who, const char *what,
                             xpw_Failure *failure_out);
void daemon_set_deadline(daemon_t *daemon, double seconds);
xp_status_t daemon_make_plan_memfd(const fabric_plan_t *plan, int *fd_out);
/* True when the Fabric itself has failed: it becomes the canonical failure, named by the PE that
 * claimed it rather than by whoever reports it first. */
bool daemon_fail_from_fabric(daemon_t *daemon);
void daemon_stop(daemon_t *daemon, const char *reason);
/* An agent left and no Instance was there: the roles are being stopped one by one. */
void daemon_hand_stop(daemon_t *daemon, const char *who);
/* True when all of READY's conditions hold; fills reasons (each 256 bytes) otherwise. */
typedef struct daemon_verdict {
    bool fabric_executable, system_ready, serving_healthy;
    uint32_t reason_count;
    char reasons[DAEMON_MAX_REASONS][256];
} daemon_verdict_t;
void daemon_verdict(const daemon_t *daemon, daemon_verdict_t *verdict_out);
/* Accepts NULL. `seconds`: how long the participant has. */
void daemon_send_stop(daemon_participant_t *participant, xpw_StopPhase phase, double seconds);
void daemon_send_backend(daemon_t *daemon, const daemon_instance_t *instance);

/* daemon_generation.c */
xp_status_t daemon_generation_start(daemon_t *daemon);
void daemon_generation_stop(daemon_t *daemon); /* accepts a daemon that was not started */
/* The Generation has failed by an agent: the next one forms where that is allowed and not hopeless,
 * else it is the canonical failure that ends everything. */
void daemon_generation_fail(daemon_t *daemon, const char *who, const char *what);
/* An agent's process has ended; true: of the next Generation, without having registered. */
bool daemon_generation_unregistered(daemon_t *daemon, const xpw_AgentEnded *ended);
/* All agents are registered: whether the Generation has its plan and nobody of a former one lives.
 * Asked again until it is so. */
bool daemon_generation_formed(daemon_t *daemon);
void daemon_generation_executable(daemon_t *daemon);
/* What an agent of a GPU has counted. */
void daemon_generation_told(daemon_t *daemon, const xpw_PlaneStats *stats);
/* Of `seconds`, what the pause since a failure may still last. */
void daemon_generation_deadline(daemon_t *daemon, double seconds);
void daemon_generation_keep(daemon_participant_t *agent, const xpw_KeptWeights *message,
                            wire_descriptors_t *fds);
void daemon_generation_hand(daemon_t *daemon, uint32_t ffn);
uint64_t daemon_generation_kept_bytes(const daemon_t *daemon, uint32_t ffn);

/* daemon_participants.c */
void daemon_on_accept(evutil_socket_t fd, short events, void *context);
void daemon_participant_free(daemon_participant_t *participant);
void daemon_participant_kill(daemon_participant_t *participant); /* SIGKILL, by pidfd */
/* Its process has been killed or is exiting, which may take as long as its memory is big; false
 * where the system does not tell. */
bool daemon_participant_dying(const daemon_participant_t *participant);
void daemon_participant_gone(daemon_participant_t *participant); /* it ended; frees it */
void daemon_participant_refuse(daemon_participant_t *participant, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* A peer that breaks the protocol is out of control: killed and dropped. */
void daemon_participant_violates(daemon_participant_t *participant, const char *what);
void daemon_drop_silent(daemon_t *daemon); /* connections and Instances past their time */
/* Instance Ranks that wait for their predecessors: those whose turn has come register. */
void daemon_participants_admit_waiting(daemon_t *daemon);
uint32_t daemon_participants_left(const daemon_t *daemon); /* without clients */
void daemon_participant_describe(const daemon_participant_t *participant, char *out, size_t size);

/* daemon_instance.c */
/* Its name, rank and kind are known. Ends registered, refused or, where what it replaces is still
 * leaving, waiting: until then for at most WAIT_SHARE of deadlines.registration. */
void daemon_instance_register(daemon_participant_t *participant);
void daemon_instance_message(daemon_participant_t *participant, const xpw_Envelope *envelope,
                             wire_descriptors_t *fds);
void daemon_instance_attached(daemon_t *daemon, uint32_t atn_index,
                              const xpw_ArenaAttached *attached);
/* One of its ranks has gone, for this reason. */
void daemon_instance_rank_gone(daemon_instance_t *instance, uint32_t rank, const char *why);
void daemon_instance_try_attach(daemon_instance_t *instance);
/* A rank's open request waits for the next Generation. */
bool daemon_instance_waits(const daemon_instance_t *instance);
/* A rank that goes on, as its arena was found: whether too many Generations in a row have failed
 * over the same request; fills in why then. */
bool daemon_instance_stuck(daemon_rank_t *rank, uint64_t answered, bool open, char *why,
                           size_t size);
/* XP_INVALID: its checkpoint on disk is not the one of the start, with which what is loaded would
 * not go together. Reads files only where one was written since. */
xp_status_t daemon_instance_check_checkpoint(daemon_instance_t *instance);
/* XP_INVALID with the words for that; `how` follows them: "" or ": " and what was seen. */
xp_status_t daemon_checkpoint_differs(const config_model_t *model, const char *how);
/* An AtnAgent that stands still tells nobody: a request that stays in an arena far longer than
 * deadlines.submission fails the Generation. On CPUs. */
void daemon_instances_watch(daemon_t *daemon);
/* Tells the ranks to warm up, once all are attached. */
void daemon_instance_initialize(daemon_instance_t *instance);
/* Takes over what its ranks and its health say into its state, and tells the gateway. */
void daemon_instance_refresh(daemon_instance_t *instance);
void daemon_instance_stop(daemon_instance_t *instance, xpw_StopPhase phase, double seconds);
/* " (sglang 0.5.13.post1, 1 of 2 ranks initialised)" for another engine's Instance, "" for a native
 * one; returns `out`. */
const char *daemon_instance_progress(const daemon_instance_t *instance, char *out, size_t size);
uint32_t daemon_instance_ranks_initialized(const daemon_instance_t *instance);
bool daemon_instance_present(const daemon_instance_t *instance); /* any of its ranks is there */
void daemon_instance_close_arenas(daemon_instance_t *instance, xp_status_t reason);
uint64_t daemon_instance_weight_bytes(const daemon_instance_t *instance);
void daemon_instances_drop_late(daemon_t *daemon); /* past deadlines.startup, or not ending */

/* Kills every process of it; `why` is shown. */
void daemon_instance_kill(daemon_instance_t *instance, const char *why);
/* Its ranks are told to end, its arenas are taken back; `why` is shown. */
void daemon_instance_end(daemon_instance_t *instance, const char *why);

/* daemon_plane.c: nothing of it does anything where devices are CPUs */
xp_status_t daemon_plane_start(daemon_t *daemon);
void daemon_plane_stop(daemon_t *daemon);
void daemon_plane_tick(daemon_t *daemon);
/* Why the system is not ready, or NULL. */
const char *daemon_plane_problem(const daemon_t *daemon);
/* Its life word; before Join or Admitted. */
void daemon_plane_greet(daemon_participant_t *participant);
void daemon_plane_farewell(daemon_participant_t *participant);
void daemon_plane_end_word(daemon_participant_t *participant); /* its kernels leave */
/* An Instance that does not end by itself is to be killed. True: MPS ends its work on the device
 * first, without harm to others, and the tick kills it then. False: kill it. */
bool daemon_plane_terminate(daemon_participant_t *participant);
/* Of an agent; false: not one of the plane's messages. */
bool daemon_plane_message(daemon_participant_t *agent, const xpw_Envelope *envelope,
                          wire_descriptors_t *fds);
void daemon_plane_executable(daemon_t *daemon); /* one more FfnAgent is */
void daemon_plane_try_attach(daemon_instance_t *instance);
void daemon_plane_release(daemon_instance_t *instance);
void daemon_plane_forget(daemon_t *daemon); /* what agents of a failed Generation had */
/* Whether the Instance, with what is open, outlives its Generation. */
bool daemon_plane_keeps(const daemon_instance_t *instance);
/* To an FfnAgent, before its Prepare: the stages in which requests wait. */
void daemon_plane_hand(daemon_t *daemon, uint32_t ffn);
/* On CPUs from the Fabric arena, on GPUs as the agents have told. */
void daemon_pe_counters(const daemon_t *daemon, uint32_t pe, fabric_pe_counters_t *counters_out);
void daemon_instance_counters(const daemon_t *daemon, uint32_t instance, uint64_t *invocations_out,
                              uint64_t *rows_out);

/* daemon_descriptors.c */
void daemon_descriptors_raise(void); /* the process's limit, as far as the system allows */
/* Visitors of the status pages leave a quarter of the descriptors to participants. */
void daemon_descriptors_guard(daemon_t *daemon, struct evhttp_bound_socket *bound);
void daemon_descriptors_none_left(daemon_t *daemon); /* the control socket rests until a tick */
void daemon_descriptors_tick(daemon_t *daemon);

/* daemon_status.c */
xp_status_t daemon_status_start(daemon_t *daemon);
void daemon_status_stop(daemon_t *daemon);
void daemon_status_probe(daemon_t *daemon); /* asks every Instance's /health, without waiting */
#endif
