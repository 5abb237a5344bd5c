/* SPDX-License-Identifier: MIT */
/*
 * The HTTP server: its listening socket, the list of its connections, and its limits.
 *
 * Owns the listener and the list; http_connection.c owns what happens on each connection. Runs only
 * on the thread of its event_base. It never blocks after http_server_create(), which resolves the
 * host's name.
 */
#include <errno.h>
#include <event2/listener.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/log.h"
#include "http/http_server_private.h"

#define LISTEN_BACKLOG  512
#define ACCEPT_PAUSE_MS 100u

static void server_on_reap(evutil_socket_t fd, short what, void *context)
{
    http_server_t *server = context;
    /* Those killed while this runs go to the next round. */
    connection_t *dead = server->dead;
    server->dead = NULL;
    while (dead) {
        connection_t *next = dead->next;
        http_connection_free(dead);
        dead = next;
    }
}

/* Makes room by closing the connection that has been idle longest; the list is newest first. */
static bool server_evict_idle(http_server_t *server)
{
    connection_t *oldest = NULL;
    for (connection_t *c = server->connections; c; c = c->next)
        if (http_connection_is_idle(c))
            oldest = c;
    if (!oldest)
        return false;
    http_connection_kill(oldest);
    return true;
}

static void server_on_accept(struct evconnlistener *listener, evutil_socket_t fd,
                             struct sockaddr *address, int length, void *context)
{
    http_server_t *server = context;
    server->stats.accepted++;
    if (server->stats.connections >= server->config.max_connections && !server_evict_idle(server)) {
        static const char body[] = "{\"error\":{\"message\":\"too many connections\","
                                   "\"type\":\"server_error\",\"param\":null,"
                                   "\"code\":\"service_unavailable\"}}\n";
        char busy[512];
        int bytes =
            snprintf(busy, sizeof(busy),
                     "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
                     "Retry-After: 2\r\nConnection: close\r\nContent-Length: %zu\r\n\r\n%s",
                     sizeof(body) - 1, body);
        server->stats.refused++;
        /* Best effort: the socket buffer of a new connection is empty, so this does not block. */
        if (send(fd, busy, (size_t)bytes, MSG_DONTWAIT | MSG_NOSIGNAL) > 0)
            shutdown(fd, SHUT_WR);
        close(fd);
        return;
    }
    http_connection_start(server, fd);
}

static void server_on_resume(evutil_socket_t fd, short what, void *context)
{
    http_server_t *server = context;
    evconnlistener_enable(server->listener);
}

/* Out of descriptors, mostly. Accepting again at once would spin, so it rests a moment. */
static void server_on_accept_error(struct evconnlistener *listener, void *context)
{
    http_server_t *server = context;
    int error = EVUTIL_SOCKET_ERROR();
    if (!(server->accept_errors++ & 255))
        xp_log_warn("http port %u: accept: %s", server->port, evutil_socket_error_to_string(error));
    evconnlistener_disable(listener);
    struct timeval pause = {0, ACCEPT_PAUSE_MS * 1000};
    event_add(server->resume, &pause);
}

static xp_status_t server_listen(http_server_t *server)
{
    const char *host =
        server->config.host && server->config.host[0] ? server->config.host : "127.0.0.1";
    char port[8];
    snprintf(port, sizeof(port), "%u", server->config.port);
    struct addrinfo hints = {.ai_family = AF_UNSPEC,
                             .ai_socktype = SOCK_STREAM,
                             .ai_flags = AI_PASSIVE | AI_NUMERICSERV};
    struct addrinfo *found = NULL;
    int error = getaddrinfo(host, port, &hints, &found);
    if (error)
        return xp_fail(XP_INVALID, "cannot listen on \"%s\": %s", host, gai_strerror(error));
    server->listener =
        evconnlistener_new_bind(server->base, server_on_accept, server,
                                LEV_OPT_CLOSE_ON_FREE | LEV_OPT_REUSEABLE | LEV_OPT_CLOSE_ON_EXEC,
                                LISTEN_BACKLOG, found->ai_addr, (int)found->ai_addrlen);
    int saved = errno;
    freeaddrinfo(found);
    errno = saved;
    if (!server->listener)
        return xp_fail_errno(XP_IO, "cannot listen on %s port %u", host, server->config.port);
    evconnlistener_set_error_cb(server->listener, server_on_accept_error);
    struct sockaddr_storage bound;
    socklen_t bound_length = sizeof(bound);
    if (getsockname(evconnlistener_get_fd(server->listener), (struct sockaddr *)&bound,
                    &bound_length))
        return xp_fail_errno(XP_IO, "getsockname");
    server->port = ntohs(bound.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&bound)->sin6_port
                                                     : ((struct sockaddr_in *)&bound)->sin_port);
    return XP_OK;
}

/* A connection of the gateway takes two descriptors, and others need some too. */
static uint32_t default_connections(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) || limit.rlim_cur >= 2 * 1024 + 64)
        return 1024;
    return limit.rlim_cur > 128 ? (uint32_t)(limit.rlim_cur - 64) / 2 : 32;
}

xp_status_t http_server_create(const http_server_config_t *config, struct event_base *base,
                               http_server_t **server_out)
{
    xp_status_t status = XP_OK;
    http_server_t *server = calloc(1, sizeof(*server));
    if (!server)
        return xp_fail(XP_NO_MEMORY, "no memory for an HTTP server");
    server->config = *config;
    server->base = base;
    http_server_config_t *c = &server->config;
    c->max_connections = c->max_connections ? c->max_connections : default_connections();
    c->max_head_bytes = c->max_head_bytes ? c->max_head_bytes : 32 * 1024;
    c->max_body_bytes = c->max_body_bytes ? c->max_body_bytes : 8u << 20;
    c->max_total_body_bytes = c->max_total_body_bytes ? c->max_total_body_bytes : 128u << 20;
    c->max_output_bytes = c->max_output_bytes ? c->max_output_bytes : 1u << 20;
    c->head_timeout_ms = c->head_timeout_ms ? c->head_timeout_ms : 10000;
    c->body_timeout_ms = c->body_timeout_ms ? c->body_timeout_ms : 60000;
    c->idle_timeout_ms = c->idle_timeout_ms ? c->idle_timeout_ms : 75000;
    c->write_timeout_ms = c->write_timeout_ms ? c->write_timeout_ms : 60000;
    if (c->max_head_bytes >= CONNECTION_INPUT_BYTES)
        XP_TRY_GOTO(status, fail,
                    xp_fail(XP_INVALID, "max_head_bytes must be below %u", CONNECTION_INPUT_BYTES));
    server->stats.max_connections = c->max_connections;
    server->reap = evtimer_new(base, server_on_reap, server);
    server->resume = evtimer_new(base, server_on_resume, server);
    if (!server->reap || !server->resume)
        XP_TRY_GOTO(status, fail, xp_fail(XP_NO_MEMORY, "no memory for an HTTP server"));
    XP_TRY_GOTO(status, fail, server_listen(server));
    *server_out = server;
    return XP_OK;
fail:
    http_server_destroy(server);
    return status;
}

void http_server_destroy(http_server_t *server)
{
    if (!server)
        return;
    if (server->listener)
        evconnlistener_free(server->listener);
    while (server->connections)
        http_connection_kill(server->connections);
    server_on_reap(-1, 0, server);
    if (server->reap)
        event_free(server->reap);
    if (server->resume)
        event_free(server->resume);
    free(server);
}

uint16_t http_server_port(const http_server_t *server)
{
    return server->port;
}

void http_server_stats(const http_server_t *server, http_server_stats_t *stats_out)
{
    *stats_out = server->stats;
}

uint32_t http_server_open_answers(const http_server_t *server)
{
    uint32_t count = 0;
    for (const connection_t *c = server->connections; c; c = c->next)
        count += http_connection_is_answering(c);
    return count;
}

void http_server_quiesce(http_server_t *server)
{
    server->quiescing = true;
}
