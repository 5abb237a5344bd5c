/* SPDX-License-Identifier: MIT */
/* Private to src/transport: offsets of an arena and checks that both sides make. */
#ifndef XPOOL_TRANSPORT_ARENA_H
#define XPOOL_TRANSPORT_ARENA_H

#include "transport/mailbox.h"
#include "transport/transport.h"

/* Bounds of a geometry; `status` is what to fail with (XP_INVALID for a caller's, XP_PEER else). */
xp_status_t transport_geometry_check(const transport_geometry_t *geometry, xp_status_t status);
/* What of it is the same on every kind of device: all but the dtype. */
xp_status_t transport_sizes_check(const transport_geometry_t *geometry, xp_status_t status);

/* A caller's tensor fits the geometry but for its rows: dtype, rank, width, contiguity. `what`
 * names it in the error (XP_INVALID). */
xp_status_t transport_tensor_check(const transport_geometry_t *geometry,
                                   const transport_tensor_t *tensor, const char *what);

static inline uint64_t transport_row_bytes(const transport_geometry_t *geometry)
{
    return xp_dtype_row_bytes(geometry->dtype, geometry->hidden);
}
/* Row areas start on pages, so that an arena's untouched rows cost no memory. */
static inline uint64_t transport_area_bytes(const transport_geometry_t *geometry)
{
    uint64_t bytes = geometry->max_rows * transport_row_bytes(geometry);
    return (bytes + MAILBOX_HEADER_BYTES - 1) / MAILBOX_HEADER_BYTES * MAILBOX_HEADER_BYTES;
}
static inline uint64_t transport_arena_input_offset(const transport_geometry_t *geometry)
{
    (void)geometry;
    return MAILBOX_HEADER_BYTES;
}
static inline uint64_t transport_arena_output_offset(const transport_geometry_t *geometry)
{
    return MAILBOX_HEADER_BYTES + transport_area_bytes(geometry);
}
static inline uint64_t transport_partial_bytes(const transport_geometry_t *geometry)
{
    uint64_t bytes = (uint64_t)geometry->max_rows * geometry->hidden * sizeof(float);
    return (bytes + MAILBOX_HEADER_BYTES - 1) / MAILBOX_HEADER_BYTES * MAILBOX_HEADER_BYTES;
}
/* Of the areas for Direct Partial; 0 where there is none. */
static inline uint64_t transport_arena_partial_offset(const transport_geometry_t *geometry)
{
    return geometry->partials ? MAILBOX_HEADER_BYTES + 2 * transport_area_bytes(geometry) : 0;
}
static inline uint64_t transport_arena_bytes(const transport_geometry_t *geometry)
{
    return MAILBOX_HEADER_BYTES + 2 * transport_area_bytes(geometry) +
           geometry->partials * transport_partial_bytes(geometry);
}
#endif
