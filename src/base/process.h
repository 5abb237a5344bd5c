/* SPDX-License-Identifier: MIT */
/* The end of a child process, never waited for without a limit. */
#ifndef XPOOL_BASE_PROCESS_H
#define XPOOL_BASE_PROCESS_H

#include <stdint.h>
#include <sys/types.h>

#include "base/status.h"

/* Waits until the child ends. XP_OK: it did by itself, and *wait_status_out is waitpid()'s.
 * XP_TIMEOUT: it had not by deadline_ns and was killed; one that the system does not let end within
 * XP_CHILD_GRACE_NS of that is left unreaped. XP_NOT_FOUND: no child of ours. Records no error. */
#define XP_CHILD_GRACE_NS 1000000000ull
xp_status_t xp_child_reap(pid_t pid, uint64_t deadline_ns, int *wait_status_out);

/* From here on SIGTERM and SIGINT do nothing and are blocked. Unlike SIG_IGN that loses none which
 * is pending: whoever takes them over and unblocks them gets it. */
void xp_process_hold_stop_signals(void);
#endif
