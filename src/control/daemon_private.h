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
#include "wire/channel.h"

#define DAEMON_MAX_PARTICIPANTS 128
#define DAEMON_MAX_REASONS      24

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
    bool refused;            /* nothing it says counts any more */
    uint64_t since_ns;       /* connected, or a client's last question */
    bool joined, executable; /* agents */
    uint64_t progress_done, progress_total;
    char progress_what[96];
    xpw_Executable execution; /* FfnAgent */
    char kernels[16];
    bool wants_down; /* client waiting for DownDone */
} daemon_participant_t;

typedef enum daemon_instance_state {
    INSTANCE_ABSENT = 0,
    INSTANCE_ADMITTED, /* said Hello, loads its side */
    INSTANCE_OFFERED,  /* its arena waits for the AtnAgent */
    INSTANCE_ATTACHED,
    INSTANCE_INITIALIZING, /* warms up through real FFN execution */
    INSTANCE_SERVING,
} daemon_instance_state_t;

typedef struct daemon_instance {
    daemon_t *daemon;
    uint32_t index;
    daemon_instance_state_t state;
    daemon_participant_t *participant;
    int arena_fd;
    xpw_ArenaOffer offer;
    uint64_t admitted_ns; /* for deadlines.startup */
    uint64_t lease;       /* names the current attachment */
    bool attached_at_agent;
    char host[64];
    uint32_t port;
    uint64_t weight_bytes, kv_bytes;
    uint32_t max_context;
    xpw_InstanceStats stats;
    char absence[256]; /* why it is not there, once it was */
    bool healthy;      /* its own HTTP health answered */
    uint64_t healthy_at_ns;
    bool probing;
} daemon_instance_t;

struct daemon {
    const config_t *config;
    struct event_base *base;
    plan_result_t *planned;
    int plan_fd;
    fabric_descriptors_t descriptors;
    fabric_t *fabric; /* observer */
    daemon_state_t state;
    bool hand_stopped; /* an agent left while no Instance was there */
    int listener, lock;
    struct event *on_accept, *on_term, *on_int, *on_deadline, *on_tick;
    struct evhttp *http;
    uint16_t http_port;
    daemon_participant_t participants[DAEMON_MAX_PARTICIPANTS];
    daemon_participant_t *atn[FABRIC_MAX_ATN], *ffn[FABRIC_MAX_FFN], *gateway;
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

/* daemon_participants.c */
void daemon_on_accept(evutil_socket_t fd, short events, void *context);
void daemon_participant_free(daemon_participant_t *participant);
void daemon_participant_kill(daemon_participant_t *participant); /* SIGKILL, by pidfd */
void daemon_drop_silent(daemon_t *daemon); /* connections and Instances past their time */
uint32_t daemon_participants_left(const daemon_t *daemon); /* without clients */
void daemon_instance_release(daemon_t *daemon, daemon_instance_t *instance, const char *why);
void daemon_try_attach(daemon_t *daemon, daemon_instance_t *instance);
void daemon_participant_describe(const daemon_participant_t *participant, char *out, size_t size);

/* daemon_status.c */
xp_status_t daemon_status_start(daemon_t *daemon);
void daemon_status_stop(daemon_t *daemon);
void daemon_status_probe(daemon_t *daemon); /* asks every Instance's /health, without waiting */
#endif
