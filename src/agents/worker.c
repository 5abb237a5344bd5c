/* SPDX-License-Identifier: MIT */
/* A job thread with its end reported through an eventfd. */
#include "agents/worker.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

static void *worker_main(void *argument)
{
    worker_t *worker = argument;
    worker->status = worker->job(worker->context);
    if (worker->status != XP_OK)
        snprintf(worker->error, sizeof(worker->error), "%s", xp_error_last()->text);
    uint64_t one = 1;
    ssize_t wrote = write(worker->event_fd, &one, sizeof(one));
    (void)wrote; /* an eventfd at 0 always takes a 1 */
    return NULL;
}

static void worker_on_done(evutil_socket_t fd, short events, void *argument)
{
    worker_t *worker = argument;
    uint64_t count;
    if (read(fd, &count, sizeof(count)) != sizeof(count))
        return;
    pthread_join(worker->thread, NULL); /* it has written its last word */
    worker->joined = true;
    worker->done(worker->context, worker->status, worker->error);
}

xp_status_t worker_start(worker_t *worker, struct event_base *base,
                         xp_status_t (*job)(void *context),
                         void (*done)(void *context, xp_status_t status, const char *error),
                         void *context)
{
    xp_status_t status;
    *worker = (worker_t){.job = job, .done = done, .context = context, .event_fd = -1};
    worker->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (worker->event_fd < 0)
        return xp_fail_errno(XP_IO, "cannot make an eventfd");
    worker->on_done = event_new(base, worker->event_fd, EV_READ, worker_on_done, worker);
    if (!worker->on_done || event_add(worker->on_done, NULL) != 0) {
        status = xp_fail(XP_NO_MEMORY, "no memory for a worker's event");
        goto fail;
    }
    /* Signals are the event loop's. */
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int error = pthread_create(&worker->thread, NULL, worker_main, worker);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (error) {
        status = xp_fail(XP_IO, "cannot start a thread: %s", strerror(error));
        goto fail;
    }
    worker->started = true;
    return XP_OK;
fail:
    worker_fini(worker);
    return status;
}

bool worker_join(worker_t *worker, int milliseconds)
{
    if (!worker->started || worker->joined)
        return true;
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += milliseconds / 1000;
    until.tv_nsec += (long)(milliseconds % 1000) * 1000000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000;
    }
    worker->joined = pthread_timedjoin_np(worker->thread, NULL, &until) == 0;
    return worker->joined;
}

void worker_fini(worker_t *worker)
{
    if (worker->on_done)
        event_free(worker->on_done);
    if (worker->event_fd >= 0)
        close(worker->event_fd);
    worker->on_done = NULL;
    worker->event_fd = -1;
}
