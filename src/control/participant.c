/* SPDX-License-Identifier: MIT */
/* A process's side of the control channel. Runs on the event loop's thread only. */
#include "control/participant.h"

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/process.h"

#define CONNECT_RETRY_NS      (50 * XP_NS_PER_MS)
#define FAIL_ANSWER_TIMEOUT_S 2 /* how long a failed role waits for the canonical failure */

struct participant {
    struct event_base *base;
    wire_channel_t *channel;
    participant_handlers_t handlers;
    xpw_Role role;
    char name[96];
    struct event *on_term, *on_int, *on_fail_timeout;
    int exit_code;
    bool library, under_up, left, ending;
    bool heard; /* the daemon has said something */
    char own_failure[512];
};

void participant_bind_to_parent(void)
{
    const char *parent = getenv("XPOOL_UNDER_UP");
    if (!parent)
        return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    /* The parent may have died before prctl took effect. */
    if (atol(parent) != (long)getppid())
        raise(SIGKILL);
}

static void end_after_failure(participant_t *self)
{
    if (!self->handlers.linger_ms) {
        participant_end(self, 1);
        return;
    }
    self->ending = true;
    self->exit_code = 1;
    struct timeval linger = {.tv_usec = self->handlers.linger_ms * 1000};
    event_base_loopexit(self->base, &linger);
}

/* Says why this process ends: to whoever embeds us, else to the log. */
static void tell_end(participant_t *self, xp_status_t how, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static void tell_end(participant_t *self, xp_status_t how, const char *format, ...)
{
    char text[XP_ERROR_TEXT_MAX];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    if (self->library)
        self->handlers.ended(self->handlers.context, how, text);
    else if (how == XP_CLOSED)
        xp_log_info("%s", text);
    else
        xp_log_err("%s", text);
}

static void on_message(void *context, wire_channel_t *channel, const xpw_Envelope *envelope,
                       wire_descriptors_t *fds)
{
    participant_t *self = context;
    if (self->ending)
        return;
    self->heard = true;
    switch (envelope->which_body) {
    case xpw_Envelope_refused_tag:
        if (envelope->body.refused.stopping) {
            tell_end(self, XP_CLOSED, "not needed: %s", envelope->body.refused.reason);
            participant_end(self, 0);
            return;
        }
        tell_end(self, XP_INVALID, "the daemon refused this %s: %s", wire_role_name(self->role),
                 envelope->body.refused.reason);
        participant_end(self, 1);
        return;
    case xpw_Envelope_failure_tag: {
        const xpw_Failure *failure = &envelope->body.failure;
        if (self->handlers.failed)
            self->handlers.failed(self->handlers.context);
        tell_end(self, XP_FATAL, "canonical failure of Generation %llu: %s: %s (%s)",
                 (unsigned long long)failure->generation, failure->who, failure->what,
                 failure->when);
        end_after_failure(self);
        return;
    }
    case xpw_Envelope_stop_tag:
        self->handlers.stop(self->handlers.context, envelope->body.stop.phase,
                            envelope->body.stop.seconds);
        return;
    default:
        self->handlers.message(self->handlers.context, envelope, fds);
    }
}

static void on_closed(void *context, wire_channel_t *channel, xp_status_t status)
{
    participant_t *self = context;
    if (self->ending)
        return;
    char why[XP_ERROR_TEXT_MAX];
    snprintf(why, sizeof(why), "%s", xp_error_last()->text);
    if (self->handlers.failed)
        self->handlers.failed(self->handlers.context);
    if (!self->heard && !self->library && !self->own_failure[0]) {
        tell_end(self, self->under_up ? XP_CLOSED : XP_FATAL,
                 "the daemon ended before it had answered (%.800s)", why);
        participant_end(self, PARTICIPANT_UNHEARD);
        return;
    }
    if (self->own_failure[0])
        tell_end(self, XP_FATAL, "ended by its own failure: %s", self->own_failure);
    else
        tell_end(self, XP_FATAL,
                 "canonical failure: daemon: the daemon died or dropped this process (%.800s)",
                 why);
    end_after_failure(self);
}

static void on_signal(evutil_socket_t signal_number, short events, void *context)
{
    participant_t *self = context;
    if (signal_number == SIGINT && self->under_up)
        return; /* Ctrl-C reaches the whole process group; `up` keeps the order */
    if (self->left) {
        xp_log_warn("second %s: ending at once", signal_number == SIGINT ? "Ctrl-C" : "SIGTERM");
        participant_end(self, 130);
        return;
    }
    self->left = true;
    xpw_Envelope envelope = {.which_body = xpw_Envelope_leave_tag};
    snprintf(envelope.body.leave.reason, sizeof(envelope.body.leave.reason), "%s",
             signal_number == SIGINT ? "Ctrl-C" : "SIGTERM");
    if (participant_send(self, &envelope, NULL, 0) != XP_OK)
        participant_end(self, 1);
}

static void on_fail_timeout(evutil_socket_t fd, short events, void *context)
{
    participant_t *self = context;
    tell_end(self, XP_FATAL, "ended by its own failure: %s", self->own_failure);
    participant_end(self, 1);
}

static xp_status_t connect_with_patience(const config_t *config, bool quiet, int *socket_out)
{
    uint64_t deadline =
        xp_monotonic_ns() + (uint64_t)(config->deadlines.registration * (double)XP_NS_PER_S);
    bool told = false;
    for (;;) {
        xp_status_t status = wire_connect(config->daemon.socket, socket_out);
        if (status != XP_RETRY)
            return status;
        if (xp_monotonic_ns() >= deadline)
            return xp_fail(XP_TIMEOUT,
                           "no daemon at %s within %g s (deadlines.registration); start it with "
                           "`xpool daemon serve` and the same configuration",
                           config->daemon.socket, config->deadlines.registration);
        sigset_t pending;
        if (!quiet && sigpending(&pending) == 0 && sigismember(&pending, SIGTERM))
            return xp_fail(XP_CANCELLED, "told to end before the daemon was there");
        if (!told && !quiet) {
            xp_log_info("waiting for the daemon at %s", config->daemon.socket);
            told = true;
        }
        nanosleep(&(struct timespec){.tv_nsec = (long)CONNECT_RETRY_NS}, NULL);
    }
}

xp_status_t participant_await_daemon(const config_t *config)
{
    int socket;
    XP_TRY(connect_with_patience(config, false, &socket));
    close(socket);
    return XP_OK;
}

static xp_status_t take_signals(participant_t *self)
{
    /* Removing a signal event restores what was there before: a signal that comes while the process
     * is already ending must not cut that short. */
    xp_process_hold_stop_signals();
    self->on_term = evsignal_new(self->base, SIGTERM, on_signal, self);
    self->on_int = evsignal_new(self->base, SIGINT, on_signal, self);
    if (!self->on_term || !self->on_int || event_add(self->on_term, NULL) != 0 ||
        event_add(self->on_int, NULL) != 0)
        return xp_fail(XP_NO_MEMORY, "no memory for signal events");
    /* `up` starts its children with SIGTERM blocked, so that none is lost before this point. */
    sigset_t both;
    sigemptyset(&both);
    sigaddset(&both, SIGTERM);
    sigaddset(&both, SIGINT);
    sigprocmask(SIG_UNBLOCK, &both, NULL);
    return XP_OK;
}

/* `workload` is NULL for our own programs. */
static xp_status_t create(struct event_base *base, const config_t *config,
                          const xpw_Envelope *hello, const xpw_Workload *workload,
                          const participant_handlers_t *handlers, participant_t **participant_out)
{
    xp_status_t status;
    int socket = -1;
    participant_t *self = calloc(1, sizeof(*self));
    if (!self)
        return xp_fail(XP_NO_MEMORY, "no memory for the control channel");
    self->base = base;
    self->handlers = *handlers;
    self->role = hello->body.hello.role;
    self->library = workload != NULL;
    self->under_up = getenv("XPOOL_UNDER_UP") != NULL;
    self->exit_code = 1;
    snprintf(self->name, sizeof(self->name), "%s", hello->body.hello.name);

    XP_TRY_GOTO(status, fail, connect_with_patience(config, self->library, &socket));
    status = wire_channel_create(base, socket, on_message, on_closed, self, &self->channel);
    if (status != XP_OK) {
        close(socket);
        goto fail;
    }
    self->on_fail_timeout = evtimer_new(base, on_fail_timeout, self);
    if (!self->on_fail_timeout) {
        status = xp_fail(XP_NO_MEMORY, "no memory for the control channel");
        goto fail;
    }
    if (!self->library)
        XP_TRY_GOTO(status, fail, take_signals(self));
    XP_TRY_GOTO(status, fail, wire_channel_send(self->channel, hello, NULL, 0));
    if (workload) {
        xpw_Envelope envelope = {.which_body = xpw_Envelope_workload_tag};
        envelope.body.workload = *workload;
        XP_TRY_GOTO(status, fail, wire_channel_send(self->channel, &envelope, NULL, 0));
    }
    *participant_out = self;
    return XP_OK;
fail:
    participant_destroy(self);
    return status;
}

static void fill_hello(xpw_Envelope *envelope, const config_t *config, xpw_Role role,
                       const char *name, uint32_t rank, const char *kernels)
{
    *envelope = (xpw_Envelope){.which_body = xpw_Envelope_hello_tag};
    xpw_Hello *hello = &envelope->body.hello;
    hello->abi = WIRE_ABI;
    snprintf(hello->version, sizeof(hello->version), "%s", XPOOL_VERSION);
    hello->role = role;
    snprintf(hello->name, sizeof(hello->name), "%s", name);
    hello->rank = rank;
    memcpy(hello->digest, config->digest, sizeof(hello->digest));
    snprintf(hello->kernels, sizeof(hello->kernels), "%s", kernels ? kernels : "");
}

xp_status_t participant_create(struct event_base *base, const config_t *config, xpw_Role role,
                               const char *name, uint32_t rank, const char *kernels,
                               const participant_handlers_t *handlers,
                               participant_t **participant_out)
{
    xpw_Envelope hello;
    fill_hello(&hello, config, role, name, rank, kernels);
    return create(base, config, &hello, NULL, handlers, participant_out);
}

xp_status_t participant_create_library(struct event_base *base, const config_t *config,
                                       const char *name, uint32_t rank,
                                       const xpw_Workload *workload,
                                       const participant_handlers_t *handlers,
                                       participant_t **participant_out)
{
    xpw_Envelope hello;
    fill_hello(&hello, config, xpw_Role_ROLE_INSTANCE, name, rank, NULL);
    hello.body.hello.library = true;
    return create(base, config, &hello, workload, handlers, participant_out);
}

int participant_start_error(void)
{
    if (xp_error_last()->status == XP_CANCELLED) {
        xp_log_info("%s", xp_error_last()->text);
        return 0;
    }
    xp_log_error("cannot start");
    return xp_error_last()->status == XP_CLOSED ? PARTICIPANT_UNHEARD : 1;
}

void participant_destroy(participant_t *self)
{
    if (!self)
        return;
    if (self->on_term)
        event_free(self->on_term);
    if (self->on_int)
        event_free(self->on_int);
    if (self->on_fail_timeout)
        event_free(self->on_fail_timeout);
    wire_channel_destroy(self->channel);
    free(self);
}

xp_status_t participant_send(participant_t *self, const xpw_Envelope *envelope, const int *fds,
                             uint32_t fd_count)
{
    return wire_channel_send(self->channel, envelope, fds, fd_count);
}

void participant_fail(participant_t *self, const char *what)
{
    if (self->ending || self->own_failure[0])
        return;
    snprintf(self->own_failure, sizeof(self->own_failure), "%s", what);
    xpw_Envelope envelope = {.which_body = xpw_Envelope_fail_report_tag};
    snprintf(envelope.body.fail_report.who, sizeof(envelope.body.fail_report.who), "%s %s",
             wire_role_name(self->role), self->name);
    snprintf(envelope.body.fail_report.what, sizeof(envelope.body.fail_report.what), "%s", what);
    struct timeval patience = {.tv_sec = FAIL_ANSWER_TIMEOUT_S};
    if (participant_send(self, &envelope, NULL, 0) != XP_OK ||
        event_add(self->on_fail_timeout, &patience) != 0) {
        tell_end(self, XP_FATAL, "ended by its own failure: %s", what);
        participant_end(self, 1);
    }
}

void participant_bye(participant_t *self, const char *reason)
{
    if (self->ending)
        return;
    xpw_Envelope envelope = {.which_body = xpw_Envelope_bye_tag};
    snprintf(envelope.body.bye.reason, sizeof(envelope.body.bye.reason), "%s", reason);
    bool sent = participant_send(self, &envelope, NULL, 0) == XP_OK;
    /* Who leaves because of its own failure has not ended in order. */
    participant_end(self, sent && !self->own_failure[0] ? 0 : 1);
}

void participant_end(participant_t *self, int exit_code)
{
    if (self->ending)
        return;
    self->ending = true;
    self->exit_code = exit_code;
    event_base_loopbreak(self->base);
}

int participant_exit_code(const participant_t *self)
{
    return self->exit_code;
}
