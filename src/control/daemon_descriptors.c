/* SPDX-License-Identifier: MIT */
/*
 * The daemon's descriptors are for its participants. Whoever only looks at the status pages gets a
 * connection while a quarter of all descriptors is free; the others wait in the listener's queue
 * until some that are open have ended, at the latest by their timeout. Where not one is left,
 * nothing is accepted until the next tick: a listener that is asked again at once would keep the
 * loop busy and fill the log.
 *
 * Runs on the daemon's event loop thread; never closes a connection that was accepted.
 */
#include <event2/listener.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/log.h"
#include "control/daemon_private.h"

#define WANTED_DESCRIPTORS 4096u /* some for each participant and each weight shard */

void daemon_descriptors_raise(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= WANTED_DESCRIPTORS)
        return;
    limit.rlim_cur = limit.rlim_max < WANTED_DESCRIPTORS ? limit.rlim_max : WANTED_DESCRIPTORS;
    (void)setrlimit(RLIMIT_NOFILE, &limit); /* else what there is has to do */
}

/* A new descriptor is the lowest free one: so many are taken. */
static bool for_visitors(const daemon_t *daemon)
{
    struct rlimit limit;
    int lowest = fcntl(daemon->listener, F_DUPFD_CLOEXEC, 0);
    if (lowest < 0)
        return false;
    close(lowest);
    return getrlimit(RLIMIT_NOFILE, &limit) != 0 ||
           (rlim_t)lowest < limit.rlim_cur - limit.rlim_cur / 4;
}

/* Once a connection, before libevent makes its buffers. */
static struct bufferevent *on_visitor(struct event_base *base, void *context)
{
    daemon_t *daemon = context;
    if (!for_visitors(daemon))
        evconnlistener_disable(daemon->http_listener);
    return NULL; /* the ordinary buffers */
}

/* `context` is libevent's own. */
static void on_accept_error(struct evconnlistener *listener, void *context)
{
    evconnlistener_disable(listener);
}

void daemon_descriptors_guard(daemon_t *daemon, struct evhttp_bound_socket *bound)
{
    daemon->http_listener = evhttp_bound_socket_get_listener(bound);
    evconnlistener_set_error_cb(daemon->http_listener, on_accept_error);
    evhttp_set_bevcb(daemon->http, on_visitor, daemon);
}

void daemon_descriptors_none_left(daemon_t *daemon)
{
    event_del(daemon->on_accept);
}

void daemon_descriptors_tick(daemon_t *daemon)
{
    bool crowded = !for_visitors(daemon);
    if (crowded && !daemon->crowded)
        xp_log_warn("few descriptors are left (ulimit -n): connections to daemon.http wait");
    daemon->crowded = crowded;
    if (!crowded)
        evconnlistener_enable(daemon->http_listener);
    event_add(daemon->on_accept, NULL);
}
