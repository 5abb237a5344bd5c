/* SPDX-License-Identifier: MIT */
/*
 * A fixed team of threads that run one parallel region at a time.
 *
 * The calling thread takes part as member 0, so a pool of 1 starts no thread. Workers spin for a
 * short bounded time after a region and then sleep on a futex; they give way when there are more
 * runnable threads than cores, so that an oversubscribed machine does not collapse. All memory is
 * taken by xp_pool_create(); xp_pool_run() allocates nothing and makes no system call when the
 * team is already awake.
 */
#ifndef XPOOL_BASE_POOL_H
#define XPOOL_BASE_POOL_H

#include <stdint.h>

#include "base/status.h"

typedef struct xp_pool xp_pool_t;

/* `threads` 1..256. `cpus`: NULL, or `cpu_count` logical CPU numbers to which members are pinned in
 * turn (member 0, the caller, is not pinned). */
xp_status_t xp_pool_create(uint32_t threads, const uint32_t *cpus, uint32_t cpu_count,
                           xp_pool_t **pool_out);
void xp_pool_destroy(xp_pool_t *pool); /* accepts NULL */
uint32_t xp_pool_threads(const xp_pool_t *pool);

/* Runs function(context, member, members) on every member and returns when all have returned.
 * One caller at a time. */
typedef void (*xp_pool_function_t)(void *context, uint32_t member, uint32_t members);
void xp_pool_run(xp_pool_t *pool, xp_pool_function_t function, void *context);

/* Usable cores: affinity mask, bounded by the cgroup's CPU quota (rounded up); at least 1. */
uint32_t xp_usable_cpus(void);
#endif
