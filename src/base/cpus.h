/* SPDX-License-Identifier: MIT */
/* How many CPUs a cgroup quota leaves: the part of xp_usable_cpus() that a test can feed. */
#ifndef XPOOL_BASE_CPUS_H
#define XPOOL_BASE_CPUS_H

#include <stdint.h>

/* `membership` is the text of /proc/self/cgroup, `mount` the folder where cgroups are mounted
 * (/sys/fs/cgroup). The tightest quota on the way up from the process's own group, rounded up to
 * whole CPUs; 0 when there is none. Version 2 ("0::/path", cpu.max) and version 1 ("N:cpu:/path",
 * cpu.cfs_quota_us) are read. */
uint32_t xp_cpus_quota(const char *membership, const char *mount);
#endif
