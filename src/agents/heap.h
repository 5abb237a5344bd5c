/* SPDX-License-Identifier: MIT */
/*
 * An agent's place in the symmetric heap of provider nvshmem. Joining is collective and cannot be
 * called off, so it has a thread of its own; who waits too long is ended by the daemon's deadline.
 */
#ifndef XPOOL_AGENTS_HEAP_H
#define XPOOL_AGENTS_HEAP_H

#include "agents/worker.h"
#include "control/participant.h"
#include "stage/heap.h"

typedef struct agent_heap {
    worker_t worker;
    stage_heap_t *heap;
    const cuda_device_t *device; /* open */
    uint32_t pe;
    unsigned char id[XPOOL_NVSHMEM_ID_BYTES];
    _Atomic bool joined; /* by the worker */
    struct event_base *base;
    /* On the loop: all have joined, or why not. */
    void (*done)(void *context, xp_status_t status, const char *error);
    void *context;
} agent_heap_t;

/* After Join; the caller has set device, pe, base, done and context. PE 0 makes the id and sends it
 * to the daemon; the others wait for agent_heap_on_id(). The plan outlives the object. */
xp_status_t agent_heap_begin(agent_heap_t *self, const config_t *config, const fabric_plan_t *plan,
                             participant_t *participant);
xp_status_t agent_heap_on_id(agent_heap_t *self, const xpw_FabricId *id);
/* At the end of a process that has begun: never returns. The library's own end would wait for PEs
 * that have gone. Does nothing in a process that has not begun. */
void agent_heap_end(agent_heap_t *self, int exit_code);
#endif
