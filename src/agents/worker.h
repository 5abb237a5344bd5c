/* SPDX-License-Identifier: MIT */
/*
 * A thread of a role that does one long job beside the event loop (load weights, run the data
 * plane) and reports its end to the loop. The loop never waits for it but at the very end of the
 * process.
 */
#ifndef XPOOL_AGENTS_WORKER_H
#define XPOOL_AGENTS_WORKER_H

#include <event2/event.h>
#include <pthread.h>
#include <stdbool.h>

#include "base/status.h"

typedef struct worker {
    pthread_t thread;
    bool started, joined;
    int event_fd;
    struct event *on_done;
    xp_status_t (*job)(void *context);
    void (*done)(void *context, xp_status_t status, const char *error);
    void *context;
    xp_status_t status;
    char error[XP_ERROR_TEXT_MAX];
} worker_t;

/* Starts job(context) on its own thread; done() is called on the loop with its status and message.
 */
xp_status_t worker_start(worker_t *worker, struct event_base *base,
                         xp_status_t (*job)(void *context),
                         void (*done)(void *context, xp_status_t status, const char *error),
                         void *context);
/* Waits up to `milliseconds` for the thread to end; true when it has (or was never started). */
bool worker_join(worker_t *worker, int milliseconds);
void worker_fini(worker_t *worker); /* after a successful join */
#endif
