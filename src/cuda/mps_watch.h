/* SPDX-License-Identifier: MIT */
/*
 * Asks an MPS controller from time to time whether it answers, and to end clients, on a thread of
 * its own: a controller that hangs lets its asker wait for a whole command limit. Everything here
 * is called by the thread that owns the mps_t, which may use no other function of it that runs
 * commands meanwhile.
 */
#ifndef XPOOL_CUDA_MPS_WATCH_H
#define XPOOL_CUDA_MPS_WATCH_H

#include "cuda/mps.h"

typedef struct mps_watch mps_watch_t;

/* `mps` answers now and outlives the watch. Asked every period_ns, more often while it does not
 * answer. */
xp_status_t mps_watch_create(mps_t *mps, uint64_t period_ns, mps_watch_t **watch_out);
/* Never waits. XP_OK: it answered when it was last asked; else XP_PEER with what was wrong. */
xp_status_t mps_watch_look(mps_watch_t *watch);
/* Has MPS end the client's work on the device, before its process is killed; never waits. False: it
 * is under way, call again. True: the controller has answered, whatever, or so many clients are
 * waiting for it that this one is not asked for. */
bool mps_watch_terminate(mps_watch_t *watch, pid_t client);
/* Waits for a question that is under way, so for three command limits at most. Accepts NULL. */
void mps_watch_destroy(mps_watch_t *watch);
#endif
