/* SPDX-License-Identifier: MIT */
/*
 * What an FfnAgent tells the daemon while it loads its shards: how far it is, by a timer, and at
 * once which kept shards it has no use for. The loader's thread counts; the event loop's thread
 * tells. Both kinds of FfnAgent have one.
 */
#ifndef XPOOL_AGENTS_LOADING_H
#define XPOOL_AGENTS_LOADING_H

#include <stdatomic.h>

#include "control/participant.h"
#include "fabric/plan.h"

typedef struct agent_loading {
    participant_t *participant;
    struct event *on_progress, *on_refused;
    int refused_fd; /* an eventfd: the loop has something to tell */
    _Atomic uint64_t done_before, done_bytes;
    _Atomic(const char *) model; /* its id, lives in the configuration */
    _Atomic uint64_t refused;    /* bits of weight sets */
    uint64_t told;               /* of them; the loop's */
    /* The loader's until it has ended. */
    uint32_t weights; /* what is being loaded */
    uint64_t adopted; /* bits of shards taken over */
    uint64_t adopted_bytes, read_bytes;
} agent_loading_t;

/* `*loading` is zero but for nothing; agent_loading_fini() takes it in any state after this. */
xp_status_t agent_loading_init(agent_loading_t *loading, struct event_base *base);
void agent_loading_fini(agent_loading_t *loading);

/* Loop: starts the timer; what is told goes to `participant`. */
xp_status_t agent_loading_begin(agent_loading_t *loading, participant_t *participant);
/* Loop: no more of the timer; tells what there is to tell. The loader has ended. */
void agent_loading_end(agent_loading_t *loading);

/* Loader: a weight set of this model is next. `model_id` lives as long as the process. */
void agent_loading_next(agent_loading_t *loading, uint32_t weights, const char *model_id);
/* Loader: callbacks of ffn_install_t; `context` is the agent_loading_t. */
void agent_loading_count(void *context, uint64_t done_bytes, uint64_t total_bytes);
void agent_loading_refuse(void *context);
/* Loader: the weight set is there, `bytes` of it, taken over or after `read_bytes` were read. */
void agent_loading_installed(agent_loading_t *loading, uint64_t bytes, bool adopted,
                             uint64_t read_bytes, uint64_t took_ns);

/* The FfnAgents (bits) that hold a weight set, over all layers of all Instances that use it, and
 * the first such Instance. 0: none uses it. */
uint32_t agent_loading_group(const fabric_plan_t *plan, uint32_t weights, uint32_t *instance_out);
#endif
