/* SPDX-License-Identifier: MIT */
/* Programs as children: started without this process's signals, and never waited for without a
 * limit. */
#ifndef XPOOL_BASE_PROCESS_H
#define XPOOL_BASE_PROCESS_H

#include <spawn.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/status.h"

/* posix_spawnp() of a program for which no signal is blocked, whatever this thread blocks, and
 * which SIGPIPE ends. actions: NULL for none; session: it leads one of its own. Returns an errno, 0
 * for none. */
int xp_child_spawn(const char *program, const posix_spawn_file_actions_t *actions, bool session,
                   char *const arguments[], char *const environment[], pid_t *pid_out);

/* Waits until the child ends. XP_OK: it did by itself, and *wait_status_out is waitpid()'s.
 * XP_TIMEOUT: it had not by deadline_ns and was killed; one that the system does not let end within
 * XP_CHILD_GRACE_NS of that is left unreaped. XP_NOT_FOUND: no child of ours. Records no error. */
#define XP_CHILD_GRACE_NS 1000000000ull
xp_status_t xp_child_reap(pid_t pid, uint64_t deadline_ns, int *wait_status_out);

/* From here on SIGTERM and SIGINT do nothing and are blocked. Unlike SIG_IGN that loses none which
 * is pending: whoever takes them over and unblocks them gets it. */
void xp_process_hold_stop_signals(void);
#endif
