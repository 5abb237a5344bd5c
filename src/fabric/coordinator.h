/* SPDX-License-Identifier: MIT */
/*
 * The Coordinator: forms Invocations from Submissions, leases Lanes, gives them back. Lives on the
 * first FfnAgent. A passive object: whoever holds it calls step, one at a time; step never blocks.
 */
#ifndef XPOOL_FABRIC_COORDINATOR_H
#define XPOOL_FABRIC_COORDINATOR_H

#include "fabric/internal.h"

typedef struct fabric_coordinator fabric_coordinator_t;

xp_status_t fabric_coordinator_create(fabric_t *fabric, xp_clock_t clock,
                                      fabric_coordinator_t **coordinator_out);
void fabric_coordinator_destroy(fabric_coordinator_t *coordinator);
/* Looks at everything once. XP_OK when something moved, XP_RETRY (no message) when nothing did,
 * XP_FATAL on a failure, which is then the Generation's. */
xp_status_t fabric_coordinator_step(fabric_coordinator_t *coordinator);
#endif
