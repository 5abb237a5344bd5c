/* SPDX-License-Identifier: MIT */
/*
 * Failpoints: named places at which a test lets a process die or linger. Compiled always; without
 * XPOOL_FAILPOINTS in the environment one is a load and a branch.
 *
 *   XPOOL_FAILPOINTS="kv.rank.applied=kill@3,kv.daemon.rung=sleep:20"
 *
 * names points and what happens there: `kill` (SIGKILL to oneself) or `sleep:MILLISECONDS`; `@N` at
 * the Nth passage only (counted from 1), otherwise at each. Any thread.
 */
#ifndef XPOOL_BASE_FAILPOINT_H
#define XPOOL_BASE_FAILPOINT_H

#include <stdbool.h>

/* -1: the environment has not been looked at; 0: nothing is armed; 1: something is. */
extern int xp_failpoint_armed;
void xp_failpoint_pass(const char *name);

static inline void xp_failpoint(const char *name)
{
    if (__builtin_expect(__atomic_load_n(&xp_failpoint_armed, __ATOMIC_ACQUIRE) != 0, 0))
        xp_failpoint_pass(name);
}
#endif
