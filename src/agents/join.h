/* SPDX-License-Identifier: MIT */
/* What both kinds of agent do with a Join message: map the plan and attach to the Fabric. */
#ifndef XPOOL_AGENTS_JOIN_H
#define XPOOL_AGENTS_JOIN_H

#include "fabric/fabric.h"
#include "wire/wire.h"

/* `fds`: plan, Fabric arena, doorbell page; all are closed with the message by the caller. The plan
 * is copied to the heap and checked. fabric_out NULL: an agent of a GPU, whose Join carries the
 * plan alone. */
xp_status_t agent_join(const xpw_Join *join, const wire_descriptors_t *fds,
                       fabric_plan_t **plan_out, fabric_t **fabric_out);
#endif
