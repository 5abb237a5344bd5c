/* SPDX-License-Identifier: MIT */
/*
 * The two futex calls that XPool needs, on 32-bit words that may be shared between processes.
 *
 * Inline, stateless, any thread. Never FUTEX_PRIVATE: the words lie in memfds. Deadlines are
 * absolute CLOCK_MONOTONIC times, so that a wait that is restarted does not grow.
 */
#ifndef XPOOL_BASE_FUTEX_H
#define XPOOL_BASE_FUTEX_H

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define XP_FUTEX_FOREVER UINT64_MAX

/* Sleeps while *word == expected, until a wake or deadline_ns. Returns 0 when woken, EAGAIN when
 * *word differed, ETIMEDOUT, or EINTR. Spurious returns happen: callers check their condition. */
static inline int xp_futex_wait(const uint32_t *word, uint32_t expected, uint64_t deadline_ns)
{
    struct timespec until = {.tv_sec = (time_t)(deadline_ns / 1000000000u),
                             .tv_nsec = (long)(deadline_ns % 1000000000u)};
    long result =
        syscall(SYS_futex, word, FUTEX_WAIT_BITSET, expected,
                deadline_ns == XP_FUTEX_FOREVER ? NULL : &until, NULL, FUTEX_BITSET_MATCH_ANY);
    return result == 0 ? 0 : errno;
}

/* Wakes at most `count` sleepers. */
static inline void xp_futex_wake(const uint32_t *word, int count)
{
    syscall(SYS_futex, word, FUTEX_WAKE, count, NULL, NULL, 0);
}

static inline void xp_futex_wake_all(const uint32_t *word)
{
    xp_futex_wake(word, INT_MAX);
}
#endif
