/* SPDX-License-Identifier: MIT */
/*
 * Transport on a CPU device: the rank-local mailbox between one Instance Rank and its AtnAgent.
 *
 * The arena is an anonymous memfd made by the Instance (the arena belongs to the Instance, so that
 * it outlives agents) and passed by descriptor: Instance -> daemon -> AtnAgent. One live request an
 * arena. Layout, sequence rules and transitions are in transport/mailbox.h, which also compiles as
 * CUDA. *Closed* is terminal. Waits spin a bounded time, then sleep on a futex, and always end by
 * the deadline, a response, close, or failure.
 */
#ifndef XPOOL_TRANSPORT_TRANSPORT_H
#define XPOOL_TRANSPORT_TRANSPORT_H

#include <stdbool.h>
#include <stdint.h>

#include "base/dtype.h"
#include "base/status.h"
#include "observe/observe.h"

typedef struct transport_geometry {
    uint32_t hidden; /* width of a row, elements */
    uint32_t max_rows;
    xp_dtype_t dtype;  /* F32 on CPU; BF16, F16 on CUDA */
    uint32_t dp_size;  /* attention DP ranks whose row counts travel with a request; 1 = none */
    uint32_t partials; /* CUDA: areas for the members' FP32 rows (Direct Partial); 0 = none */
} transport_geometry_t;

typedef enum transport_kind {
    TRANSPORT_DECODE = 0,
    TRANSPORT_PREFILL,
    TRANSPORT_MIXED
} transport_kind_t;

/* One FFN call of one layer. */
typedef struct transport_request {
    uint32_t layer;
    uint32_t rows;            /* 0 .. max_rows */
    uint32_t kind;            /* transport_kind_t */
    uint64_t slo_deadline_ns; /* CLOCK_MONOTONIC; 0 = none: for the deadline policy */
    const uint32_t *dp_rows;  /* dp_size counts, or NULL when dp_size is 1 */
    uint8_t execution;        /* for the observer only; stays in this process */
} transport_request_t;

/* The caller's tensor as handed to put/take; checked before anything is published. */
typedef struct transport_tensor {
    void *data;
    xp_dtype_t dtype;
    uint32_t rank; /* must be 2 */
    uint64_t rows, width;
    uint64_t row_stride; /* elements; must equal width (contiguous) */
} transport_tensor_t;

/* ---- Instance side ---------------------------------------------------------------------- */
typedef struct transport_client transport_client_t;

/* Creates arena (memfd "xpool-transport") and client. */
xp_status_t transport_client_create(const transport_geometry_t *geometry, uint32_t spin_ns,
                                    transport_client_t **client_out);
void transport_client_destroy(transport_client_t *client);
int transport_client_fd(const transport_client_t *client); /* borrowed */

/* The AtnAgent's doorbell: `doorbell_fd` (duplicated) is the Generation's doorbell memfd, pe the
 * AtnAgent's PE. Before it is set, put() works but wakes nobody. */
xp_status_t transport_client_set_doorbell(transport_client_t *client, int doorbell_fd, uint32_t pe);

/* Publishes a request (copies rows in). XP_INVALID with nothing published when tensor or layer is
 * wrong, XP_RETRY when one is live already, XP_CLOSED / XP_FATAL after close. */
xp_status_t transport_client_put(transport_client_t *client, const transport_request_t *request,
                                 const transport_tensor_t *input);
/* Waits for the live request's response until deadline_ns (CLOCK_MONOTONIC). XP_TIMEOUT leaves the
 * request live. */
xp_status_t transport_client_wait(transport_client_t *client, uint64_t deadline_ns);
/* Copies the response rows into the caller's storage and frees the mailbox for the next request. */
xp_status_t transport_client_take(transport_client_t *client, const transport_tensor_t *output);
/* The rows inside the arena, for a caller that converts them on the way: while no request is live
 * it may write the input rows in place and hand this pointer to put(); between wait() and take() it
 * may read the output rows in place and hand this pointer to take(). Both are then not copied. */
void *transport_client_input(const transport_client_t *client);
const void *transport_client_output(const transport_client_t *client);
/* put + wait + take. */
xp_status_t transport_client_call(transport_client_t *client, const transport_request_t *request,
                                  const transport_tensor_t *input, const transport_tensor_t *output,
                                  uint64_t deadline_ns);
typedef struct transport_stats {
    uint64_t requests, rows, spins, sleeps, wait_ns;
} transport_stats_t;
void transport_client_stats(const transport_client_t *client, transport_stats_t *stats_out);
/* From now on take() records each call; `observe` (may be NULL) outlives the client. */
void transport_client_observe(transport_client_t *client, observe_t *observe, uint32_t instance,
                              uint32_t rank);

/* ---- AtnAgent side ---------------------------------------------------------------------- */
typedef struct transport_server transport_server_t;

/* Maps a received arena descriptor (duplicated). Checks size, magic, ABI, geometry: XP_PEER if
 * wrong. */
xp_status_t transport_server_create(int arena_fd, const transport_geometry_t *expected,
                                    transport_server_t **server_out);
void transport_server_destroy(transport_server_t *server);
/* The geometry it was created with, which is the arena's. */
transport_geometry_t transport_server_geometry(const transport_server_t *server);

/* A request seen and not yet answered. `input`/`output` point into the arena. Every field was read
 * once and checked against the geometry (the peer is not trusted). */
typedef struct transport_pending {
    uint64_t sequence;
    uint32_t layer, rows, kind;
    uint64_t slo_deadline_ns;
    uint32_t dp_rows[8];
    const void *input;
    void *output;
} transport_pending_t;
/* XP_OK with the unanswered request (again at every poll until it is completed), XP_RETRY when
 * there is none, XP_CLOSED (no message) after close, XP_PEER when the record is nonsense. */
xp_status_t transport_server_poll(transport_server_t *server, transport_pending_t *pending_out);
/* Answers `sequence`; the output rows were written before. */
void transport_server_complete(transport_server_t *server, uint64_t sequence, xp_status_t status);
/* Terminal close by the AtnAgent, with waking. */
void transport_server_close(transport_server_t *server, xp_status_t reason);

/* ---- Both and the daemon: terminal close ------------------------------------------------ */
/* Marks the arena closed with a reason (XP_CLOSED for an ordered end, XP_FATAL for a canonical
 * failure) and wakes the waiter. For a process that only holds the descriptor (the daemon). */
xp_status_t transport_arena_close(int arena_fd, xp_status_t reason);
/* How far the arena is while no AtnAgent has it: the last request that was answered, and whether
 * the one after it waits. The words are the peer's: for comparing only. */
xp_status_t transport_arena_look(int arena_fd, uint64_t *answered_out, bool *waiting_out);
/* While no AtnAgent has either arena: the request that waits in `behind` was answered in `ahead`,
 * whose rank gets the same rows (attention TP): hands that answer on. XP_PEER unless the arenas are
 * of this geometry and `behind` is one request behind. */
xp_status_t transport_arena_carry(int ahead_fd, int behind_fd,
                                  const transport_geometry_t *geometry);
#endif
