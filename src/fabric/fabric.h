/* SPDX-License-Identifier: MIT */
/*
 * The Fabric: data plane between AtnAgents and FfnAgents of one Generation.
 *
 * What an agent program needs: make (daemon), attach, run the service of its role, stop. Inside,
 * providers implement fabric_provider_t (provider.h) and pass one conformance suite
 * (tests/integration/fabric/). This issue has the provider `shm`.
 *
 * Memory: the daemon makes two anonymous memfds a Generation: the Fabric arena (agents and daemon)
 * and the doorbell page (agents, daemon and Instances; one cache line a PE: a counter and a sleeper
 * flag).
 */
#ifndef XPOOL_FABRIC_FABRIC_H
#define XPOOL_FABRIC_FABRIC_H

#include <stdbool.h>
#include <stdint.h>

#include "base/clock.h"
#include "base/status.h"
#include "fabric/plan.h"
#include "observe/observe.h"
#include "transport/transport.h"

typedef struct fabric fabric_t;

/* ---- making and joining ----------------------------------------------------------------- */
typedef struct fabric_descriptors {
    int arena_fd, doorbell_fd;
} fabric_descriptors_t;

/* Bytes of the Fabric arena for this plan (planner's ledger). */
xp_status_t fabric_shm_bytes(const fabric_plan_t *plan, uint64_t *bytes_out);
/* Daemon: makes both memfds, sealed in size, initialised from the plan. Caller closes them. */
xp_status_t fabric_shm_make(const fabric_plan_t *plan, fabric_descriptors_t *descriptors_out);

/* For the next Generation, once every agent of the last one is dead: a new arena in place of the
 * old one, and the same doorbell page, which Instances have. On an error nothing has changed. */
xp_status_t fabric_shm_renew(const fabric_plan_t *plan, fabric_descriptors_t *descriptors);

#define FABRIC_PE_OBSERVER UINT32_MAX /* the daemon: reads counters, sets failure and shutdown */
/* Maps the arena as participant `pe`. Descriptors are duplicated. Checks ABI, size, plan digest. */
xp_status_t fabric_attach(const char *provider, const fabric_plan_t *plan,
                          const fabric_descriptors_t *descriptors, uint32_t pe,
                          fabric_t **fabric_out);
void fabric_detach(fabric_t *fabric); /* accepts NULL; services must have stopped */

/* ---- failure and shutdown --------------------------------------------------------------- */
/* First caller wins (compare-and-swap); every wait in every participant ends with XP_FATAL. `text`
 * is kept (127 bytes). Returns true if this call was the first. */
bool fabric_fail(fabric_t *fabric, uint32_t pe, const char *text);
/* XP_OK while there is none; else XP_FATAL with the canonical text recorded. */
xp_status_t fabric_failure(const fabric_t *fabric, uint32_t *pe_out);
/* Ordered end: services return XP_CLOSED once nothing is in flight. */
void fabric_shutdown(fabric_t *fabric);

/* ---- AtnAgent service ------------------------------------------------------------------- */
typedef struct fabric_atn fabric_atn_t;
xp_status_t fabric_atn_create(fabric_t *fabric, xp_clock_t clock, fabric_atn_t **atn_out);
void fabric_atn_destroy(fabric_atn_t *atn);
/* Hands an arena to the service (thread-safe, any time; takes ownership of `server` on XP_OK).
 * XP_INVALID when its geometry is not that of the plan's Instance. */
xp_status_t fabric_atn_attach(fabric_atn_t *atn, uint32_t instance, uint32_t rank,
                              transport_server_t *server);
/* Takes it back: its in-flight Submission is given up without disturbing others (lane released,
 * result dropped), then the arena is closed and unmapped. Returns at once; done by the service.
 * XP_OK too, once, for an arena that the service itself dropped since it was attached (closed by
 * its Instance, or nonsense in it); XP_NOT_FOUND where there is no such rank here or no arena. */
xp_status_t fabric_atn_detach(fabric_atn_t *atn, uint32_t instance, uint32_t rank);
/* Before run: each Submission that was answered is recorded. `observe` may be NULL. */
void fabric_atn_observe(fabric_atn_t *atn, observe_t *observe);
/* Before run: arenas outlive a failure of the Generation. The service then leaves them open, for
 * whoever decides what becomes of their requests. */
void fabric_atn_keep_arenas(fabric_atn_t *atn);
/* The service loop, on a thread of the caller's: XP_CLOSED after shutdown, XP_FATAL on failure. */
xp_status_t fabric_atn_run(fabric_atn_t *atn);

/* ---- FfnAgent service (the first FfnAgent also runs the Coordinator, in the same loop) ---- */
/* Computes one shard's partial: out[rows][hidden]. Must not block on the Fabric. */
typedef xp_status_t (*fabric_execute_t)(void *context, uint32_t lane, uint32_t weights,
                                        uint32_t layer, uint32_t rows, const float *in, float *out);
typedef struct fabric_ffn fabric_ffn_t;
xp_status_t fabric_ffn_create(fabric_t *fabric, xp_clock_t clock, fabric_execute_t execute,
                              void *execute_context, fabric_ffn_t **ffn_out);
void fabric_ffn_destroy(fabric_ffn_t *ffn);
/* Before run: each executed shard is recorded; `describe` fills in what the execution knows of it
 * (GraphTemplate, Execution Capacity). `observe` may be NULL. */
typedef void (*fabric_describe_t)(void *context, uint32_t weights, uint32_t layer, uint32_t rows,
                                  observe_record_t *record);
void fabric_ffn_observe(fabric_ffn_t *ffn, observe_t *observe, fabric_describe_t describe);
xp_status_t fabric_ffn_run(fabric_ffn_t *ffn);

/* ---- counters: live in the arena, written by their PE, read by anyone ------------------- */
typedef struct fabric_pe_counters {
    uint64_t submissions;     /* AtnAgent: handed to the Fabric; FfnAgent: executed shards */
    uint64_t invocations;     /* completed */
    uint64_t rows;            /* over all invocations */
    uint64_t eager, longform; /* invocations by form */
    uint64_t abandoned;       /* given up because their Instance went away */
    uint64_t busy_ns;         /* FfnAgent: time in execute */
    uint64_t queue_ns;        /* Coordinator: Submission to lane, summed */
    uint64_t sleeps, spins;
    uint64_t lanes_leased; /* Coordinator: leases given, a running total */
    uint64_t lanes_peak;   /* Coordinator: most Lanes ever leased at once */
    uint64_t lanes_in_use; /* Coordinator: Lanes leased now, a gauge */
} fabric_pe_counters_t;
void fabric_counters(const fabric_t *fabric, uint32_t pe, fabric_pe_counters_t *counters_out);
/* Per Instance (index in the plan): invocations and rows completed, for state and metrics. */
void fabric_instance_counters(const fabric_t *fabric, uint32_t instance, uint64_t *invocations_out,
                              uint64_t *rows_out);
#endif
