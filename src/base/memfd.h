/* SPDX-License-Identifier: MIT */
/*
 * Shared memory without names: anonymous memfds, sealed in size, passed by descriptor.
 *
 * A mapping of one memfd is shared within a process: mapping it twice gives the same address and
 * counts the users. Agents that run as threads of one process (tests, thread sanitizer) therefore
 * meet on one address, and the observer of an agent's own process costs no second mapping.
 * Thread-safe. Never used on a message path.
 */
#ifndef XPOOL_BASE_MEMFD_H
#define XPOOL_BASE_MEMFD_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* Zero-filled memory of `bytes`, close-on-exec, sealed against shrinking and growing, so that no
 * holder of the descriptor can make another's access fault. `name` shows in /proc/PID/maps. */
xp_status_t xp_memfd_create(const char *name, uint64_t bytes, int *fd_out);

/* The same, to be frozen once it is filled. */
xp_status_t xp_memfd_create_fillable(const char *name, uint64_t bytes, int *fd_out);
/* From now on nobody can write to it, whoever holds the descriptor. No writable mapping may exist
 * any more, in any process. */
xp_status_t xp_memfd_freeze(int fd);
/* XP_PEER unless the descriptor is frozen memory of exactly `bytes`. */
xp_status_t xp_memfd_check_frozen(int fd, uint64_t bytes);

/* Size of a received descriptor. XP_PEER when it is no memfd sealed against shrinking. */
xp_status_t xp_memfd_check(int fd, uint64_t *bytes_out);

/* Maps the first `bytes` readable and writable. The descriptor may be closed afterwards. */
xp_status_t xp_memfd_map(int fd, uint64_t bytes, void **address_out);
/* The same of frozen memory, readable only. */
xp_status_t xp_memfd_map_frozen(int fd, uint64_t bytes, void **address_out);
void xp_memfd_unmap(void *address); /* accepts NULL */

/* Duplicates with close-on-exec. */
xp_status_t xp_fd_duplicate(int fd, int *fd_out);
#endif
