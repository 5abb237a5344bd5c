/* SPDX-License-Identifier: MIT */
/* A daemon in a process of its own, for tests that speak with it. Include cmocka.h first. */
#ifndef XPOOL_TESTS_FORKED_DAEMON_H
#define XPOOL_TESTS_FORKED_DAEMON_H

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "config/config.h"
#include "control/daemon.h"
#include "wire/wire.h"

/* Returns once it takes connections. It ends with the test. */
static inline pid_t daemon_fork(const config_t *config, uint64_t patience_ns)
{
    pid_t daemon = fork();
    if (daemon == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        xp_log_configure(config->logging.level, config->logging.format, config->logging.color);
        _exit(daemon_run(config));
    }
    uint64_t deadline = xp_monotonic_ns() + patience_ns;
    int fd;
    while (wire_connect(config->daemon.socket, &fd) != XP_OK) {
        assert_true(xp_monotonic_ns() < deadline);
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    }
    close(fd);
    return daemon;
}

static inline void say(int fd, const xpw_Envelope *envelope, const int *fds, uint32_t count)
{
    assert_int_equal(wire_send(fd, envelope, fds, count), XP_OK);
}

static inline void say_hello(int fd, const config_t *config, xpw_Role role, const char *name,
                             uint32_t rank, bool library)
{
    xpw_Envelope envelope = {.which_body = xpw_Envelope_hello_tag};
    xpw_Hello *hello = &envelope.body.hello;
    hello->abi = WIRE_ABI;
    snprintf(hello->version, sizeof(hello->version), "%s", XPOOL_VERSION);
    hello->role = role;
    snprintf(hello->name, sizeof(hello->name), "%s", name);
    hello->rank = rank;
    hello->library = library;
    memcpy(hello->digest, config->digest, sizeof(hello->digest));
    say(fd, &envelope, NULL, 0);
}

/* A connection whose Hello has been said. */
static inline int daemon_hello(const config_t *config, xpw_Role role, const char *name,
                               uint32_t rank, bool library)
{
    int fd;
    assert_int_equal(wire_connect(config->daemon.socket, &fd), XP_OK);
    say_hello(fd, config, role, name, rank, library);
    return fd;
}
#endif
