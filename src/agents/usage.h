/* SPDX-License-Identifier: MIT */
/* What both kinds of FfnAgents tell the daemon about the experts that routers chose. Event loop
 * thread. */
#ifndef XPOOL_AGENTS_USAGE_H
#define XPOOL_AGENTS_USAGE_H

#include "control/participant.h"
#include "fabric/plan.h"
#include "ffn/ffn.h"

typedef struct agent_usage {
    uint64_t told[FABRIC_MAX_INSTANCES]; /* executions, by weight set */
} agent_usage_t;

/* Sends what has been executed of a weight set, where that is more than it was. */
void agent_usage_send(agent_usage_t *sent, participant_t *participant, uint32_t weights,
                      const ffn_usage_t *usage);
#endif
