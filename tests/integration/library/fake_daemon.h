/* SPDX-License-Identifier: MIT */
/*
 * A daemon and an FFN tier of a few lines, on two threads of the test's process: says to one
 * participant what a test wants it to hear, and answers its arena with 2 x + layer.
 */
#ifndef FAKE_DAEMON_H
#define FAKE_DAEMON_H

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "config/config.h"
#include "transport/doorbell.h"
#include "transport/transport.h"
#include "wire/wire.h"

#define FAKE_HIDDEN   64
#define FAKE_MAX_ROWS 32

typedef enum fake_answer { FAKE_ADMIT = 0, FAKE_REFUSE, FAKE_STOPPING, FAKE_SILENT } fake_answer_t;

typedef struct fake_daemon {
    /* What it does, set before start. */
    fake_answer_t answer;
    const char *reason;
    uint32_t dp_size;
    uint64_t submission_timeout_ns;
    bool never_initialize;
    atomic_bool mute; /* the FFN tier takes requests and does not answer */
    /* What it saw. */
    xpw_Hello hello;
    xpw_Workload workload;
    xpw_Initialized initialized;
    char fail_report[256];
    atomic_bool has_initialized, has_fail_report, has_bye, has_stats, has_hung_up;
    atomic_uint requests;
    uint32_t last_kind, last_dp_rows[8];
    uint64_t last_slo;

    char path[108];
    int listener, lock, peer, orders[2];
    transport_server_t *_Atomic server;
    int arena_fd;
    pthread_t control, tier;
    atomic_bool stop;
} fake_daemon_t;

static inline void fake_sleep_ms(long milliseconds)
{
    nanosleep(
        &(struct timespec){.tv_sec = milliseconds / 1000, .tv_nsec = milliseconds % 1000 * 1000000},
        NULL);
}

static inline void fake_send(fake_daemon_t *fake, const xpw_Envelope *envelope, const int *fds,
                             uint32_t count)
{
    if (fake->peer >= 0)
        (void)wire_send(fake->peer, envelope, fds, count);
}

static inline void fake_on_workload(fake_daemon_t *fake)
{
    xpw_Envelope out = {0};
    switch (fake->answer) {
    case FAKE_ADMIT:
        out.which_body = xpw_Envelope_admitted_tag;
        out.body.admitted = (xpw_Admitted){.generation = 1,
                                           .hidden = FAKE_HIDDEN,
                                           .max_rows = FAKE_MAX_ROWS,
                                           .kv_tokens = 1024,
                                           .max_context = 512,
                                           .spin_ns = 20000,
                                           .submission_timeout_ns = fake->submission_timeout_ns,
                                           .dp_size = fake->dp_size};
        break;
    case FAKE_REFUSE:
    case FAKE_STOPPING:
        out.which_body = xpw_Envelope_refused_tag;
        out.body.refused.stopping = fake->answer == FAKE_STOPPING;
        snprintf(out.body.refused.reason, sizeof(out.body.refused.reason), "%s", fake->reason);
        break;
    case FAKE_SILENT:
        return;
    }
    fake_send(fake, &out, NULL, 0);
}

static inline void fake_on_offer(fake_daemon_t *fake, const xpw_ArenaOffer *offer,
                                 wire_descriptors_t *fds)
{
    transport_geometry_t geometry = {.hidden = offer->hidden,
                                     .max_rows = offer->max_rows,
                                     .dtype = (xp_dtype_t)offer->dtype,
                                     .dp_size = fake->dp_size ? fake->dp_size : 1};
    transport_server_t *server = NULL;
    fake->arena_fd = wire_descriptors_take(fds, 0);
    if (transport_server_create(fake->arena_fd, &geometry, &server) != XP_OK)
        abort();
    atomic_store(&fake->server, server);
    int doorbell = -1;
    if (transport_doorbell_make(1, &doorbell) != XP_OK)
        abort();
    xpw_Envelope out = {.which_body = xpw_Envelope_attached_tag};
    fake_send(fake, &out, &doorbell, 1);
    close(doorbell);
    if (fake->never_initialize)
        return;
    out = (xpw_Envelope){.which_body = xpw_Envelope_initialize_tag};
    fake_send(fake, &out, NULL, 0);
}

static inline void fake_on_message(fake_daemon_t *fake, const xpw_Envelope *in,
                                   wire_descriptors_t *fds)
{
    switch (in->which_body) {
    case xpw_Envelope_hello_tag:
        fake->hello = in->body.hello;
        break;
    case xpw_Envelope_workload_tag:
        fake->workload = in->body.workload;
        fake_on_workload(fake);
        break;
    case xpw_Envelope_arena_offer_tag:
        fake_on_offer(fake, &in->body.arena_offer, fds);
        break;
    case xpw_Envelope_initialized_tag:
        fake->initialized = in->body.initialized;
        atomic_store(&fake->has_initialized, true);
        break;
    case xpw_Envelope_instance_stats_tag:
        atomic_store(&fake->has_stats, true);
        break;
    case xpw_Envelope_fail_report_tag:
        snprintf(fake->fail_report, sizeof(fake->fail_report), "%s", in->body.fail_report.what);
        atomic_store(&fake->has_fail_report, true);
        xpw_Envelope out = {.which_body = xpw_Envelope_stop_tag}; /* as the daemon does */
        out.body.stop.phase = xpw_StopPhase_STOP_FINALIZE;
        fake_send(fake, &out, NULL, 0);
        break;
    case xpw_Envelope_bye_tag:
        atomic_store(&fake->has_bye, true);
        break;
    default:
        break;
    }
}

static inline void *fake_control(void *context)
{
    fake_daemon_t *fake = context;
    while (!atomic_load(&fake->stop)) {
        struct pollfd polls[3] = {{.fd = fake->listener, .events = POLLIN},
                                  {.fd = fake->peer, .events = POLLIN},
                                  {.fd = fake->orders[0], .events = POLLIN}};
        poll(polls, 3, 100);
        if (polls[0].revents && fake->peer < 0)
            fake->peer = accept4(fake->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (polls[1].revents) {
            xpw_Envelope in;
            wire_descriptors_t fds = {.count = 0};
            xp_status_t status = wire_receive(fake->peer, &in, &fds);
            if (status == XP_OK)
                fake_on_message(fake, &in, &fds);
            wire_descriptors_close(&fds);
            if (status != XP_OK && status != XP_RETRY) {
                close(fake->peer);
                fake->peer = -1;
                atomic_store(&fake->has_hung_up, true);
            }
        }
        if (polls[2].revents) {
            xpw_Envelope *order;
            if (read(fake->orders[0], &order, sizeof(order)) != sizeof(order))
                abort();
            if (order) {
                fake_send(fake, order, NULL, 0);
            } else {
                close(fake->peer); /* dies */
                fake->peer = -1;
            }
            free(order);
        }
    }
    return NULL;
}

static inline void *fake_tier(void *context)
{
    fake_daemon_t *fake = context;
    uint64_t answered = 0;
    while (!atomic_load(&fake->stop)) {
        transport_server_t *server = atomic_load(&fake->server);
        transport_pending_t pending;
        if (!server || transport_server_poll(server, &pending) != XP_OK ||
            pending.sequence == answered || atomic_load(&fake->mute)) {
            nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
            continue;
        }
        const float *in = pending.input;
        float *out = pending.output;
        for (uint32_t i = 0; i < pending.rows * FAKE_HIDDEN; i++)
            out[i] = 2 * in[i] + (float)pending.layer;
        fake->last_kind = pending.kind;
        fake->last_slo = pending.slo_deadline_ns;
        memcpy(fake->last_dp_rows, pending.dp_rows, sizeof(fake->last_dp_rows));
        answered = pending.sequence;
        atomic_fetch_add(&fake->requests, 1);
        transport_server_complete(server, pending.sequence, XP_OK);
    }
    return NULL;
}

/* Sends a message from the control thread; NULL closes the socket. */
static inline void fake_order(fake_daemon_t *fake, const xpw_Envelope *envelope)
{
    xpw_Envelope *copy = NULL;
    if (envelope) {
        copy = malloc(sizeof(*copy));
        if (!copy)
            abort();
        *copy = *envelope;
    }
    if (write(fake->orders[1], &copy, sizeof(copy)) != sizeof(copy))
        abort();
}

static inline void fake_start(fake_daemon_t *fake, const char *socket_path)
{
    snprintf(fake->path, sizeof(fake->path), "%s", socket_path);
    fake->peer = fake->arena_fd = -1;
    if (!fake->submission_timeout_ns)
        fake->submission_timeout_ns = 5 * XP_NS_PER_S;
    if (wire_listen(fake->path, &fake->listener, &fake->lock) != XP_OK ||
        pipe2(fake->orders, O_CLOEXEC) != 0 ||
        pthread_create(&fake->control, NULL, fake_control, fake) != 0 ||
        pthread_create(&fake->tier, NULL, fake_tier, fake) != 0)
        abort();
}

static inline void fake_stop(fake_daemon_t *fake)
{
    atomic_store(&fake->stop, true);
    pthread_join(fake->control, NULL);
    pthread_join(fake->tier, NULL);
    transport_server_destroy(atomic_load(&fake->server));
    if (fake->arena_fd >= 0)
        close(fake->arena_fd);
    if (fake->peer >= 0)
        close(fake->peer);
    close(fake->orders[0]);
    close(fake->orders[1]);
    wire_unlisten(fake->path, fake->listener, fake->lock);
}
#endif
