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
    pthread_cond_t changed; /* `stop`, `asked` */
    bool stop;
    struct {
        pid_t client; /* 0: free */
        bool answered;
    } ending[MPS_CLIENTS_MAX];
    uint32_t asked;     /* of them, not answered */
    xp_status_t status; /* of the last answer */
    char text[XP_ERROR_TEXT_MAX];
};

/* False: told to stop. Lock held. */
static bool sleep_until(mps_watch_t *watch, uint64_t until_ns)
{
    struct timespec until = {.tv_sec = (time_t)(until_ns / XP_NS_PER_S),
                             .tv_nsec = (long)(until_ns % XP_NS_PER_S)};
    while (!watch->stop && !watch->asked && xp_monotonic_ns() < until_ns)
        pthread_cond_timedwait(&watch->changed, &watch->lock, &until);
    return !watch->stop;
}

/* Lock held, but for asking. */
static void end_clients(mps_watch_t *watch)
{
    for (uint32_t i = 0; i < MPS_CLIENTS_MAX && watch->asked && !watch->stop; i++) {
        if (!watch->ending[i].client || watch->ending[i].answered)
            continue;
        pid_t client = watch->ending[i].client;
        pthread_mutex_unlock(&watch->lock);
        (void)mps_terminate_client(watch->mps, client); /* who is no client has nothing to end */
        pthread_mutex_lock(&watch->lock);
        watch->ending[i].answered = true;
        watch->asked--;
    }
}

static void *run(void *context)
{
    mps_watch_t *watch = context;
    pthread_mutex_lock(&watch->lock);
    while (sleep_until(watch, xp_monotonic_ns() +
                                  (watch->status == XP_OK ? watch->period_ns : WATCH_AGAIN_NS))) {
        if (watch->asked) {
            end_clients(watch);
            continue;
        }
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

bool mps_watch_terminate(mps_watch_t *watch, pid_t client)
{
    uint32_t at = MPS_CLIENTS_MAX, vacant = MPS_CLIENTS_MAX;
    pthread_mutex_lock(&watch->lock);
    for (uint32_t i = 0; i < MPS_CLIENTS_MAX; i++) {
        if (watch->ending[i].client == client)
            at = i;
        else if (!watch->ending[i].client && vacant == MPS_CLIENTS_MAX)
            vacant = i;
    }
    bool over = at < MPS_CLIENTS_MAX ? watch->ending[at].answered : vacant == MPS_CLIENTS_MAX;
    if (at < MPS_CLIENTS_MAX && over) {
        watch->ending[at].client = 0;
    } else if (at == MPS_CLIENTS_MAX && !over) {
        watch->ending[vacant].client = client;
        watch->ending[vacant].answered = false;
        watch->asked++;
        pthread_cond_signal(&watch->changed);
    }
    pthread_mutex_unlock(&watch->lock);
    return over;
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
