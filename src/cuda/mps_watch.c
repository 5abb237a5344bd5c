/* SPDX-License-Identifier: MIT */
/* The thread holds the lock but for asking; it takes no signal. */
#include "cuda/mps_watch.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "base/clock.h"

#define WATCH_AGAIN_NS (500 * XP_NS_PER_MS) /* while it does not answer */

struct mps_watch {
    mps_t *mps;
    uint64_t period_ns;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed; /* `stop` */
    bool stop;
    xp_status_t status; /* of the last answer */
    char text[XP_ERROR_TEXT_MAX];
};

/* False: told to stop. Lock held. */
static bool sleep_until(mps_watch_t *watch, uint64_t until_ns)
{
    struct timespec until = {.tv_sec = (time_t)(until_ns / XP_NS_PER_S),
                             .tv_nsec = (long)(until_ns % XP_NS_PER_S)};
    while (!watch->stop && xp_monotonic_ns() < until_ns)
        pthread_cond_timedwait(&watch->changed, &watch->lock, &until);
    return !watch->stop;
}

static void *run(void *context)
{
    mps_watch_t *watch = context;
    pthread_mutex_lock(&watch->lock);
    while (sleep_until(watch, xp_monotonic_ns() +
                                  (watch->status == XP_OK ? watch->period_ns : WATCH_AGAIN_NS))) {
        pthread_mutex_unlock(&watch->lock);
        xp_status_t status = mps_check(watch->mps);
        pthread_mutex_lock(&watch->lock);
        watch->status = status;
        if (status != XP_OK)
            snprintf(watch->text, sizeof(watch->text), "%s", xp_error_last()->text);
    }
    pthread_mutex_unlock(&watch->lock);
    return NULL;
}

static int start_thread(mps_watch_t *watch)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&watch->thread, NULL, run, watch);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

xp_status_t mps_watch_create(mps_t *mps, uint64_t period_ns, mps_watch_t **watch_out)
{
    mps_watch_t *watch = calloc(1, sizeof(*watch));
    if (!watch)
        return xp_fail(XP_NO_MEMORY, "no memory to watch the MPS controller");
    watch->mps = mps;
    watch->period_ns = period_ns;
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_mutex_init(&watch->lock, NULL);
    pthread_cond_init(&watch->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    if (start_thread(watch) != 0) {
        pthread_cond_destroy(&watch->changed);
        pthread_mutex_destroy(&watch->lock);
        free(watch);
        return xp_fail(XP_NO_MEMORY, "no thread to watch the MPS controller");
    }
    *watch_out = watch;
    return XP_OK;
}

xp_status_t mps_watch_look(mps_watch_t *watch)
{
    pthread_mutex_lock(&watch->lock);
    xp_status_t status = watch->status;
    if (status != XP_OK)
        status = xp_fail(XP_PEER, "%s", watch->text);
    pthread_mutex_unlock(&watch->lock);
    return status;
}

void mps_watch_destroy(mps_watch_t *watch)
{
    if (!watch)
        return;
    pthread_mutex_lock(&watch->lock);
    watch->stop = true;
    pthread_cond_signal(&watch->changed);
    pthread_mutex_unlock(&watch->lock);
    pthread_join(watch->thread, NULL);
    pthread_cond_destroy(&watch->changed);
    pthread_mutex_destroy(&watch->lock);
    free(watch);
}
