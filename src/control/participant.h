/* SPDX-License-Identifier: MIT */
/*
 * A process's side of the control channel: connects to the daemon, proves its configuration, and
 * turns the messages that mean the same for every role (Refused, Failure, Stop, a lost daemon) into
 * one way of ending. Used by AtnAgent, FfnAgent, Instance and Gateway, and by libxpool; runs on
 * their event loop's thread.
 */
#ifndef XPOOL_CONTROL_PARTICIPANT_H
#define XPOOL_CONTROL_PARTICIPANT_H

#include <event2/event.h>

#include "config/config.h"
#include "wire/channel.h"

typedef struct participant participant_t;

typedef struct participant_handlers {
    /* Messages of the role. Descriptors not taken are closed after the call. */
    void (*message)(void *context, const xpw_Envelope *envelope, wire_descriptors_t *fds);
    /* The daemon (or, by participant_leave_requested, the user) wants an ordered end. The role ends
     * by itself in time and then calls participant_bye(). */
    void (*stop)(void *context, xpw_StopPhase phase, uint32_t seconds);
    /* The Generation failed, or the daemon is lost: the process is about to end with exit code 1.
     * Release what others could wait for (close arenas); must not block. May be NULL. */
    void (*failed)(void *context);
    /* Library mode only, instead of log lines: how the connection ended, in words. XP_CLOSED: the
     * system is stopping and takes nobody any more; XP_INVALID: refused; XP_FATAL: the canonical
     * failure, this process's own one, or a lost daemon. `failed` has been called before. */
    void (*ended)(void *context, xp_status_t how, const char *text);
    void *context;
    /* After a failure the loop runs on for so long, so that clients are told (Gateway); 0 = at
     * once. */
    uint32_t linger_ms;
} participant_handlers_t;

/* Waits until the daemon answers at its socket (deadlines.registration): what it starts for others,
 * the MPS controller of the attention GPUs, is then there. XP_TIMEOUT without one. */
xp_status_t participant_await_daemon(const config_t *config);

/* Connects (retrying until deadlines.registration), sends Hello, installs SIGTERM and SIGINT
 * handlers: the first asks the daemon for leave (Leave), the second ends the process with 130.
 * Under `xpool up` (XPOOL_UNDER_UP in the environment) SIGINT is left to `up`, and the process dies
 * with its parent. */
xp_status_t participant_create(struct event_base *base, const config_t *config, xpw_Role role,
                               const char *name, uint32_t rank, const char *kernels,
                               const participant_handlers_t *handlers,
                               participant_t **participant_out);
/* The same inside somebody else's process (libxpool): no signal handler, no bond with a parent, not
 * one line of log; Workload follows the Hello. `handlers` needs `ended`. Connects on the calling
 * thread; afterwards everything runs on the loop's thread. */
xp_status_t participant_create_library(struct event_base *base, const config_t *config,
                                       const char *name, uint32_t rank,
                                       const xpw_Workload *workload,
                                       const participant_handlers_t *handlers,
                                       participant_t **participant_out);
void participant_destroy(participant_t *participant);
/* The daemon ended, or hung up, before it had said a word: an exit code of its own, since in an
 * ordered end that is no fault. */
#define PARTICIPANT_UNHEARD 75
/* After a start that failed: logs why and gives the exit code (0 when it was told to end before).
 */
int participant_start_error(void);

xp_status_t participant_send(participant_t *participant, const xpw_Envelope *envelope,
                             const int *fds, uint32_t fd_count);
/* Reports what ended the Generation for this process; the daemon's Failure answer ends it. */
void participant_fail(participant_t *participant, const char *what);
/* Says goodbye and leaves the event loop; participant_exit_code() is 0 then. */
void participant_bye(participant_t *participant, const char *reason);
/* Ends the event loop with this exit code, without a word. */
void participant_end(participant_t *participant, int exit_code);
int participant_exit_code(const participant_t *participant);

/* For a child of `xpool up`: dies with its parent. Called first thing by every role. */
void participant_bind_to_parent(void);
#endif
