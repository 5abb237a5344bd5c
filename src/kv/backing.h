/* SPDX-License-Identifier: MIT */
/*
 * The KV Cache's physical memory of one Instance Rank: one address range reserved for the ceiling,
 * of which a prefix, counted in bundles, has memory behind it.
 *
 * Addresses never change. What is added reads as zeroes, on the CPU as on a device, whoever had the
 * memory before; so nobody sees old contents. Two kinds: a memfd on the CPU, given back by punching
 * holes, and physical handles of the driver on a device, one a bundle.
 *
 * One thread at a time uses a backing (the engine thread, the scheduler of a server). It never
 * waits for work that still uses the range: before a shrink the caller sees to it that nobody does.
 */
#ifndef XPOOL_KV_BACKING_H
#define XPOOL_KV_BACKING_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "cuda/device.h"

typedef struct kv_backing kv_backing_t;

typedef struct kv_backing_options {
    const char *name;      /* of the memfd, shown in /proc/PID/maps */
    uint64_t bundle_bytes; /* any size on the CPU; a multiple of the device's granularity there */
    uint32_t ceiling_bundles;
    /* Bytes behind the ceiling that may be read, though they mean nothing (CPU). */
    uint64_t behind_bytes;
    /* CPU: bytes that the machine and this process's container can still give; UINT64_MAX or NULL:
     * not known. A container's limit and the machine's end both kill a process that touches one
     * page too many, so a grow asks before it touches anything. */
    uint64_t (*room_bytes)(void *context);
    void *room_context;
    /* CPU: memory comes when it is first touched, for an owner that has it to itself. */
    bool lazy;
    /* Device: handles kept ready, so that a grant pays for no creation. Their memory is lost to
     * others, so the caller charges all of them to the KV Capacity Pool. */
    uint32_t ready_bundles;
} kv_backing_options_t;

/* Nothing has memory yet. XP_INVALID: sizes that cannot be; XP_NO_MEMORY, XP_IO: the system's. */
xp_status_t kv_backing_create_memfd(const kv_backing_options_t *options,
                                    kv_backing_t **backing_out);
/* On a device; the calling thread has to have the device's context here and in
 * every later call. */
xp_status_t kv_backing_create_cuda(const kv_backing_options_t *options, const cuda_device_t *device,
                                   kv_backing_t **backing_out);
/* How a device's grants are cleared. */
typedef struct kv_clearing {
    uint32_t blocks;     /* of the kernel that clears; 0: the driver's memset, on the whole GPU */
    uint32_t piece_mib;  /* mapped, then cleared while the next one is mapped; 0: all at once */
    uint32_t memset_mib; /* of one memset; 0: a piece */
} kv_clearing_t;
/* Of all backings of this process, for benchmarks that compare: before their next grow. */
void kv_backing_clearing(kv_clearing_t clearing);
void kv_backing_destroy(kv_backing_t *backing); /* accepts NULL; nobody uses the range any more */

/* Makes the first `bundles` bundles have memory: more than before, fewer, or as many. Growing takes
 * all memory at once, so that no later touch can fail; where it fails (XP_NO_MEMORY, XP_IO) as many
 * are mapped as before. A shrink that fails (XP_IO) has given back some or none of them
 * (kv_backing_mapped()) and may be tried again. XP_FATAL: the device never answered, or its context
 * is lost: no shortage. XP_INVALID: more than the ceiling. */
xp_status_t kv_backing_resize(kv_backing_t *backing, uint32_t bundles);
/* Device: makes at most one handle for the ready pool; true when the pool wants more. For moments
 * in which nothing else is to be done. On the CPU there is no such pool. */
bool kv_backing_prepare(kv_backing_t *backing);
/* Device: gives the ready pool's memory back. */
void kv_backing_trim(kv_backing_t *backing);

uint64_t kv_backing_address(const kv_backing_t *backing); /* of the range; of this process */
uint32_t kv_backing_mapped(const kv_backing_t *backing);  /* bundles */
uint32_t kv_backing_ceiling(const kv_backing_t *backing);
uint64_t kv_backing_bundle_bytes(const kv_backing_t *backing);
uint64_t kv_backing_reserved_bytes(const kv_backing_t *backing);
uint64_t kv_backing_resident_bytes(const kv_backing_t *backing); /* mapped and ready */
int kv_backing_fd(const kv_backing_t *backing); /* the memfd; -1 on a device; the backing's own */

#endif
