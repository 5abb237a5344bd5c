/* SPDX-License-Identifier: MIT */
/* Polls, since a pidfd cannot be had everywhere. Any thread. */
#include "base/process.h"

#include <errno.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>

#include "base/clock.h"

#define REAP_NAP_NS (2 * XP_NS_PER_MS)

int xp_child_spawn(const char *program, const posix_spawn_file_actions_t *actions, bool session,
                   char *const arguments[], char *const environment[], pid_t *pid_out)
{
    posix_spawnattr_t attributes;
    sigset_t none, normal;
    int error = posix_spawnattr_init(&attributes);
    if (error)
        return error;
    sigemptyset(&none);
    sigemptyset(&normal);
    sigaddset(&normal, SIGPIPE);
    posix_spawnattr_setsigmask(&attributes, &none);
    posix_spawnattr_setsigdefault(&attributes, &normal);
    posix_spawnattr_setflags(&attributes, (short)(POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF |
                                                  (session ? POSIX_SPAWN_SETSID : 0)));
    error = posix_spawnp(pid_out, program, actions, &attributes, arguments, environment);
    posix_spawnattr_destroy(&attributes);
    return error;
}

xp_status_t xp_child_reap(pid_t pid, uint64_t deadline_ns, int *wait_status_out)
{
    bool killed = false;
    for (;;) {
        int wait_status;
        pid_t who = waitpid(pid, &wait_status, WNOHANG);
        if (who == pid && !killed)
            *wait_status_out = wait_status;
        if (who == pid)
            return killed ? XP_TIMEOUT : XP_OK;
        if (who < 0 && errno != EINTR)
            return XP_NOT_FOUND;
        if (xp_monotonic_ns() >= deadline_ns) {
            if (killed)
                return XP_TIMEOUT;
            kill(pid, SIGKILL);
            killed = true;
            deadline_ns = xp_monotonic_ns() + XP_CHILD_GRACE_NS;
        }
        nanosleep(&(struct timespec){.tv_nsec = REAP_NAP_NS}, NULL);
    }
}

static void do_nothing(int signal_number)
{
    (void)signal_number;
}

void xp_process_hold_stop_signals(void)
{
    sigset_t both;
    sigemptyset(&both);
    sigaddset(&both, SIGTERM);
    sigaddset(&both, SIGINT);
    sigprocmask(SIG_BLOCK, &both, NULL);
    signal(SIGTERM, do_nothing);
    signal(SIGINT, do_nothing);
}
