/* SPDX-License-Identifier: MIT */
/*
 * The courier: a resident kernel that carries what an FfnAgent's scheduler and execution have
 * written into its own heap to PEs whose memory is not mapped here, by NVSHMEM's put with signal.
 * Scheduler and compute kernels write plain stores and know nothing of it: an *outbox* in this PE's
 * heap stands for each rank's relay arena, a *mirror* for the partials of another first member.
 *
 * A route is one word that the scheduler publishes, and the rows before it. The steps are plain
 * functions that host threads run too. One source for C and CUDA.
 *
 *   host: wanted (turn, ATTACHED or EMPTY) ──▶ courier: now, after all that it sent has arrived
 */
#ifndef XPOOL_STAGE_COURIER_H
#define XPOOL_STAGE_COURIER_H

#include "stage/records.h"

#define STAGE_COURIER_MAGIC   0x31435358u /* "XSC1" */
#define STAGE_COURIER_THREADS 288u        /* a warp for orders, eight for routes */
#define STAGE_COURIER_WARPS   8u
#define STAGE_ROUTES_MAX      (STAGE_COURIER_WARPS * 32u * 2u)

typedef enum stage_route_kind {
    STAGE_ROUTE_ROWS = 0, /* rows of one consumer, then a 64-bit word */
    STAGE_ROUTE_ALL,      /* rows of all DP ranks, then a 64-bit word */
    STAGE_ROUTE_CLOSED    /* a 32-bit word alone */
} stage_route_kind_t;

typedef struct stage_route {
    uint64_t word, rows;       /* here */
    uint64_t to_word, to_rows; /* at `pe`: symmetric addresses */
    uint64_t line;             /* stage_line_t here: how many rows */
    uint64_t row_bytes;
    uint32_t kind, pe, unit;
    uint32_t dp, dp_size, max_rows;
} stage_route_t;

/* One an Instance. */
typedef struct stage_courier_unit {
    uint32_t wanted; /* host: transport_slot_word() of EMPTY or ATTACHED */
    uint32_t now;    /* courier: the same, when it has obeyed */
    uint8_t pad[MAILBOX_LINE - 8];
} stage_courier_unit_t;

typedef struct stage_courier_table {
    uint32_t magic, routes, own_life, reserved;
    uint8_t pad0[MAILBOX_LINE - 16];
    uint32_t stop;  /* host */
    uint32_t leave; /* courier: of the warp for orders to the others */
    uint8_t pad1[MAILBOX_LINE - 8];
    stage_courier_unit_t unit[FABRIC_MAX_INSTANCES];
    stage_route_t route[STAGE_ROUTES_MAX];
} stage_courier_table_t;

/* The value of the route's word that is to be sent, or 0. `last`: sent before. acquire: the rows
 * before the word may be read by this thread, and by those it meets. */
PROTOCOL_FUNCTION uint64_t stage_route_due(uint64_t word, uint32_t kind, uint64_t last)
{
    const uint64_t value = kind == STAGE_ROUTE_CLOSED
                               ? PROTOCOL_LOAD_ACQUIRE((const uint32_t *)(uintptr_t)word)
                               : PROTOCOL_LOAD_ACQUIRE((const uint64_t *)(uintptr_t)word);
    return value == last ? 0 : value;
}

/* Bytes of the rows that go with it. The line is an Instance's: whatever it says, no more than the
 * plan's rows travel. */
PROTOCOL_FUNCTION uint64_t stage_route_bytes(const stage_route_t *route)
{
    const stage_line_t *line = (const stage_line_t *)(uintptr_t)route->line;
    uint64_t rows = 0;
    if (route->kind == STAGE_ROUTE_CLOSED)
        return 0;
    for (uint32_t i = 0; i < MAILBOX_MAX_DP; i++) {
        const uint32_t count = PROTOCOL_LOAD_RELAXED(&line->dp_rows[i]);
        if (i < route->dp_size && (route->kind == STAGE_ROUTE_ALL || i == route->dp))
            rows += count < route->max_rows ? count : route->max_rows;
    }
    return rows * route->row_bytes;
}
#endif
