/* SPDX-License-Identifier: MIT */
/*
 * The symmetric heap of provider `nvshmem`: one allocation of the same size on every PE, in which
 * the stages, partials and relay arenas of a Generation lie. Where in it is a pure function of the
 * plan, so nobody has to tell anybody; bytes of another PE are reached by that PE's number and the
 * same offset.
 *
 *   find (no library is loaded) ─ open ─ [make_id, PE 0] ─ join, all PEs ─ module_ready ─ kernels
 *
 * A process joins once in its life and never leaves: agents are replaced at each Generation. After
 * join nothing here calls the library again but module_ready, which comes before the first kernel
 * that stays. One thread at a time.
 */
#ifndef XPOOL_STAGE_HEAP_H
#define XPOOL_STAGE_HEAP_H

#include <limits.h>

#include "cuda/device.h"
#include "fabric/plan.h"
#include "stage/nvshmem/plugin.h"

/* ---- what lies where: pure functions ----------------------------------------------------------
 */
typedef enum stage_heap_kind {
    STAGE_HEAP_PAGE = 0, /* owner: FfnAgent; its stage of the Instance */
    STAGE_HEAP_PARTIALS, /* owner: FfnAgent; where it reduces */
    STAGE_HEAP_RELAY,    /* owner: Instance Rank; its relay arena, on its AtnAgent's PE */
    /* NVSHMEM_FAR, for what the courier carries on: */
    STAGE_HEAP_OUTBOX, /* owner: FfnAgent, further: Instance Rank; in place of its relay arena */
    STAGE_HEAP_MIRROR  /* owner: FfnAgent, further: first member; in place of its partials */
} stage_heap_kind_t;

#define STAGE_HEAP_ALIGN_BYTES 4096u
#define STAGE_HEAP_NOWHERE     UINT64_MAX
/* What joining takes of a device beside the heap of the plan: 1940 MiB on an H200 (NVSHMEM 3.4),
 * its code, the CUDA runtime's memory and its own part of the heap together. */
#define STAGE_HEAP_OWN_BYTES (2048ull << 20)

/* Bytes that every PE allocates: what the fullest one needs. */
uint64_t stage_heap_bytes(const fabric_plan_t *plan);
/* Offset in the heap of its PE. STAGE_HEAP_NOWHERE: the plan has no such thing. */
uint64_t stage_heap_offset(const fabric_plan_t *plan, stage_heap_kind_t kind, uint32_t instance,
                           uint32_t owner, uint32_t further);

/* ---- the library --------------------------------------------------------------------------------
 * Overrides of where things are looked for. */
#define STAGE_HEAP_ROOT_VARIABLE   "XPOOL_NVSHMEM_ROOT"   /* nvidia/nvshmem of the wheel */
#define STAGE_HEAP_PLUGIN_VARIABLE "XPOOL_NVSHMEM_PLUGIN" /* libxpool_nvshmem.so */

typedef struct stage_heap_place {
    char host[PATH_MAX];   /* libnvshmem_host.so.3 */
    char plugin[PATH_MAX]; /* libxpool_nvshmem.so */
} stage_heap_place_t;

/* Looks for the wheel in `root` (a setting; may be NULL or ""), in the variable, beside the
 * interpreters in `pythons` and in the system's Python folders; for the plug-in in its variable and
 * beside the program. Loads nothing. XP_UNSUPPORTED says what is missing and where it was looked
 * for. */
xp_status_t stage_heap_find(const char *root, const char *const *pythons, uint32_t count,
                            stage_heap_place_t *place_out);

typedef struct stage_heap stage_heap_t;
/* Loads library and plug-in and sets the library's environment (the variables NVSHMEM_*): network
 * interface pinned, multicast off, no more memory than the plan's heap and STAGE_HEAP_OWN_BYTES.
 * The plan outlives the object. XP_UNSUPPORTED where they do not fit together. */
xp_status_t stage_heap_open(const stage_heap_place_t *place, const fabric_plan_t *plan,
                            stage_heap_t **heap_out);
/* The same with a plug-in that is there already: for tests. */
xp_status_t stage_heap_wrap(const xpool_nvshmem_plugin_t *plugin, const fabric_plan_t *plan,
                            stage_heap_t **heap_out);
/* PE 0: a fresh id, for all PEs of this Generation. */
xp_status_t stage_heap_make_id(stage_heap_t *heap, unsigned char id_out[XPOOL_NVSHMEM_ID_BYTES]);
/* Collective: returns when every PE of the plan has joined, or fails; the caller limits the time by
 * the life of its process. This PE's part of the heap is all zero afterwards. XP_UNSUPPORTED where
 * several PEs share the GPU without full multi-process support. The device's context is current. */
xp_status_t stage_heap_join(stage_heap_t *heap, const cuda_device_t *device, uint32_t pe,
                            const unsigned char id[XPOOL_NVSHMEM_ID_BYTES]);
/* Device code of the plug-in, or other code that calls NVSHMEM: loaded, and told of the heap. */
cuda_image_t stage_heap_image(const stage_heap_t *heap);
xp_status_t stage_heap_module_ready(stage_heap_t *heap, const cuda_module_t *module);
/* NVSHMEM_FAR: no other PE's memory is mapped, or treated so. */
bool stage_heap_far(const stage_heap_t *heap);
/* An address in this PE's heap: symmetric, that is, good for device calls with any PE. */
cuda_address_t stage_heap_at(const stage_heap_t *heap, uint64_t offset);
/* Where `pe`'s bytes at `offset` are mapped in this process; 0: they are not (another host). */
cuda_address_t stage_heap_peer(const stage_heap_t *heap, uint64_t offset, uint32_t pe);
/* Forgets it; the library stays, and what was joined ends with the process. Accepts NULL. */
void stage_heap_close(stage_heap_t *heap);

/* Removes what the library's processes leave in the file system when they are killed: the sockets
 * over which `pid` passed descriptors. Only files of this user. */
void stage_heap_sweep(int pid);
#endif
