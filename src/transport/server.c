/* SPDX-License-Identifier: MIT */
/*
 * The AtnAgent's side of the mailbox, the doorbell page, and the close that anyone may do. A server
 * is used by the AtnAgent's service thread only. It trusts nothing that the Instance wrote: the
 * geometry it works by is its own copy, and each field of a request is loaded once and checked.
 */
#include "transport/transport.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/memfd.h"
#include "transport/arena.h"
#include "transport/doorbell.h"
#include "transport/wait.h"

_Static_assert(sizeof(mailbox_request_t) == MAILBOX_LINE, "the request record is one line");
_Static_assert(sizeof(mailbox_response_t) == MAILBOX_LINE, "the response record is one line");
_Static_assert(sizeof(mailbox_arena_t) <= MAILBOX_HEADER_BYTES, "the header is one page");
_Static_assert(sizeof(doorbell_page_t) <= MAILBOX_HEADER_BYTES, "the doorbells are one page");

struct transport_server {
    transport_geometry_t geometry;
    mailbox_arena_t *arena;
    uint64_t answered; /* our own count of responses */
};

xp_status_t transport_tensor_check(const transport_geometry_t *geometry,
                                   const transport_tensor_t *tensor, const char *what)
{
    if (!tensor)
        return xp_fail(XP_INVALID, "no %s tensor", what);
    if (tensor->dtype != geometry->dtype)
        return xp_fail(XP_INVALID, "%s tensor has dtype %s, the arena %s", what,
                       xp_dtype_name(tensor->dtype), xp_dtype_name(geometry->dtype));
    if (tensor->rank != 2)
        return xp_fail(XP_INVALID, "%s tensor has rank %u, not 2", what, tensor->rank);
    if (tensor->width != geometry->hidden)
        return xp_fail(XP_INVALID, "%s tensor has width %llu, the arena %u", what,
                       (unsigned long long)tensor->width, geometry->hidden);
    if (tensor->row_stride != tensor->width)
        return xp_fail(XP_INVALID, "%s tensor is not contiguous: row stride %llu, width %llu", what,
                       (unsigned long long)tensor->row_stride, (unsigned long long)tensor->width);
    return XP_OK;
}

xp_status_t transport_sizes_check(const transport_geometry_t *geometry, xp_status_t status)
{
    if (!geometry)
        return xp_fail(status, "no Transport geometry");
    if (geometry->hidden == 0 || geometry->hidden > MAILBOX_MAX_HIDDEN)
        return xp_fail(status, "Transport rows of width %u; allowed are 1 to %u", geometry->hidden,
                       MAILBOX_MAX_HIDDEN);
    if (geometry->max_rows == 0 || geometry->max_rows > MAILBOX_MAX_ROWS)
        return xp_fail(status, "Transport capacity of %u rows; allowed are 1 to %u",
                       geometry->max_rows, MAILBOX_MAX_ROWS);
    if (geometry->dp_size == 0 || geometry->dp_size > MAILBOX_MAX_DP)
        return xp_fail(status, "attention DP of %u ranks; allowed are 1 to %d", geometry->dp_size,
                       MAILBOX_MAX_DP);
    return XP_OK;
}

xp_status_t transport_geometry_check(const transport_geometry_t *geometry, xp_status_t status)
{
    XP_TRY(transport_sizes_check(geometry, status));
    if (geometry->dtype != XP_DTYPE_F32)
        return xp_fail(status, "Transport on a CPU device carries f32 rows, not %s",
                       xp_dtype_name(geometry->dtype));
    return XP_OK;
}

xp_status_t transport_server_create(int arena_fd, const transport_geometry_t *expected,
                                    transport_server_t **server_out)
{
    XP_TRY(transport_geometry_check(expected, XP_INVALID));
    uint64_t bytes, needed = transport_arena_bytes(expected);
    XP_TRY(xp_memfd_check(arena_fd, &bytes));
    if (bytes != needed)
        return xp_fail(XP_PEER, "Transport arena has %llu bytes, its geometry needs %llu",
                       (unsigned long long)bytes, (unsigned long long)needed);
    transport_server_t *server = calloc(1, sizeof(*server));
    if (!server)
        return xp_fail(XP_NO_MEMORY, "no memory for a Transport server");

    xp_status_t status;
    void *address = NULL;
    XP_TRY_GOTO(status, fail, xp_memfd_map(arena_fd, needed, &address));
    server->arena = address;
    server->geometry = *expected;
    const mailbox_arena_t *arena = server->arena;
    uint32_t magic = PROTOCOL_LOAD_RELAXED(&arena->magic);
    uint32_t abi = PROTOCOL_LOAD_RELAXED(&arena->abi);
    if (magic != MAILBOX_MAGIC) {
        status = xp_fail(XP_PEER, "descriptor is no Transport arena (magic %#x)", magic);
        goto fail;
    }
    if (abi != MAILBOX_ABI) {
        status = xp_fail(XP_PEER, "Transport arena has ABI %u, this build %u", abi, MAILBOX_ABI);
        goto fail;
    }
    uint32_t hidden = PROTOCOL_LOAD_RELAXED(&arena->hidden);
    uint32_t max_rows = PROTOCOL_LOAD_RELAXED(&arena->max_rows);
    uint32_t dtype = PROTOCOL_LOAD_RELAXED(&arena->dtype);
    uint32_t dp_size = PROTOCOL_LOAD_RELAXED(&arena->dp_size);
    if (hidden != expected->hidden || max_rows != expected->max_rows ||
        dtype != (uint32_t)expected->dtype || dp_size != expected->dp_size) {
        status = xp_fail(XP_PEER,
                         "Transport arena is %u x %u, dtype %u, DP %u; planned are %u x %u, dtype "
                         "%u, DP %u",
                         max_rows, hidden, dtype, dp_size, expected->max_rows, expected->hidden,
                         (unsigned)expected->dtype, expected->dp_size);
        goto fail;
    }
    /* An arena outlives AtnAgents: this one goes on where the last one stopped. */
    server->answered = PROTOCOL_LOAD_ACQUIRE(&arena->response.sequence);
    *server_out = server;
    return XP_OK;
fail:
    transport_server_destroy(server);
    return status;
}

void transport_server_destroy(transport_server_t *server)
{
    if (!server)
        return;
    xp_memfd_unmap(server->arena);
    free(server);
}

transport_geometry_t transport_server_geometry(const transport_server_t *server)
{
    return server->geometry;
}

xp_status_t transport_server_poll(transport_server_t *server, transport_pending_t *pending_out)
{
    const transport_geometry_t *geometry = &server->geometry;
    mailbox_request_t request;
    switch (mailbox_request_read(server->arena, server->answered, &request)) {
    case MAILBOX_NONE:
        return mailbox_closed(server->arena) ? XP_CLOSED : XP_RETRY;
    case MAILBOX_NONSENSE:
        return xp_fail(XP_PEER, "a Transport request does not follow sequence %llu",
                       (unsigned long long)server->answered);
    case MAILBOX_LIVE:
        break;
    }
    if (mailbox_closed(server->arena))
        return XP_CLOSED;
    if (request.rows > geometry->max_rows)
        return xp_fail(XP_PEER, "a Transport request of %u rows in an arena of %u", request.rows,
                       geometry->max_rows);
    if (request.layer >= MAILBOX_LAYER_LIMIT || request.kind >= MAILBOX_KIND_COUNT)
        return xp_fail(XP_PEER, "a Transport request of layer %u and kind %u", request.layer,
                       request.kind);
    for (uint32_t i = 0; geometry->dp_size > 1 && i < geometry->dp_size; i++)
        if (request.dp_rows[i] > geometry->max_rows)
            return xp_fail(XP_PEER, "a Transport request with %u rows of DP rank %u",
                           request.dp_rows[i], i);
    *pending_out = (transport_pending_t){
        .sequence = request.sequence,
        .layer = request.layer,
        .rows = request.rows,
        .kind = request.kind,
        .slo_deadline_ns = request.slo_deadline_ns,
        .input = (const char *)server->arena + transport_arena_input_offset(geometry),
        .output = (char *)server->arena + transport_arena_output_offset(geometry),
    };
    memcpy(pending_out->dp_rows, request.dp_rows, sizeof(request.dp_rows));
    if (geometry->dp_size == 1)
        pending_out->dp_rows[0] = request.rows;
    return XP_OK;
}

void transport_server_complete(transport_server_t *server, uint64_t sequence, xp_status_t status)
{
    XP_ASSERT(sequence == server->answered + 1);
    server->answered = sequence;
    mailbox_response_publish(server->arena, sequence, (uint32_t)status);
    transport_bell_ring(&server->arena->response.bell);
}

static void arena_close(mailbox_arena_t *arena, xp_status_t reason)
{
    mailbox_close(arena, (uint32_t)reason);
    transport_bell_ring(&arena->response.bell);
}

void transport_server_close(transport_server_t *server, xp_status_t reason)
{
    arena_close(server->arena, reason);
}

/* The header alone, by a process that only holds the descriptor. */
static xp_status_t arena_header_map(int arena_fd, mailbox_arena_t **arena_out)
{
    uint64_t bytes;
    void *address;
    XP_TRY(xp_memfd_check(arena_fd, &bytes));
    if (bytes < MAILBOX_HEADER_BYTES)
        return xp_fail(XP_PEER, "Transport arena has only %llu bytes", (unsigned long long)bytes);
    XP_TRY(xp_memfd_map(arena_fd, MAILBOX_HEADER_BYTES, &address));
    mailbox_arena_t *arena = address;
    if (PROTOCOL_LOAD_RELAXED(&arena->magic) != MAILBOX_MAGIC) {
        xp_memfd_unmap(address);
        return xp_fail(XP_PEER, "descriptor is no Transport arena");
    }
    *arena_out = arena;
    return XP_OK;
}

xp_status_t transport_arena_close(int arena_fd, xp_status_t reason)
{
    if (reason != XP_CLOSED && reason != XP_FATAL)
        return xp_fail(XP_INVALID, "an arena is closed as closed or fatal, not as %s",
                       xp_status_name(reason));
    mailbox_arena_t *arena;
    XP_TRY(arena_header_map(arena_fd, &arena));
    arena_close(arena, reason);
    xp_memfd_unmap(arena);
    return XP_OK;
}

xp_status_t transport_arena_look(int arena_fd, uint64_t *answered_out, bool *waiting_out)
{
    mailbox_arena_t *arena;
    XP_TRY(arena_header_map(arena_fd, &arena));
    uint64_t answered = PROTOCOL_LOAD_ACQUIRE(&arena->response.sequence);
    *waiting_out = PROTOCOL_LOAD_ACQUIRE(&arena->request.sequence) != answered;
    *answered_out = answered;
    xp_memfd_unmap(arena);
    return XP_OK;
}

static xp_status_t arena_carry(transport_server_t *ahead, transport_server_t *behind)
{
    transport_pending_t pending;
    XP_TRY(transport_server_poll(behind, &pending));
    if (pending.sequence != ahead->answered)
        return xp_fail(XP_PEER, "request %llu has no answer in an arena that has answered %llu",
                       (unsigned long long)pending.sequence, (unsigned long long)ahead->answered);
    const transport_geometry_t *geometry = &behind->geometry;
    uint32_t status = PROTOCOL_LOAD_RELAXED(&ahead->arena->response.status);
    if (status >= XP_STATUS_COUNT)
        return xp_fail(XP_PEER, "an answer of unknown status %u", status);
    memcpy(pending.output, (const char *)ahead->arena + transport_arena_output_offset(geometry),
           pending.rows * transport_row_bytes(geometry));
    transport_server_complete(behind, pending.sequence, (xp_status_t)status);
    return XP_OK;
}

xp_status_t transport_arena_carry(int ahead_fd, int behind_fd, const transport_geometry_t *geometry)
{
    transport_server_t *ahead = NULL, *behind = NULL;
    xp_status_t status;
    XP_TRY_GOTO(status, done, transport_server_create(ahead_fd, geometry, &ahead));
    XP_TRY_GOTO(status, done, transport_server_create(behind_fd, geometry, &behind));
    status = arena_carry(ahead, behind);
    if (status == XP_RETRY || status == XP_CLOSED)
        status = xp_fail(XP_PEER, "no request waits in an arena that is behind another one");
done:
    transport_server_destroy(ahead);
    transport_server_destroy(behind);
    return status;
}

xp_status_t transport_doorbell_make(uint32_t pes, int *fd_out)
{
    int fd;
    void *address;
    if (pes == 0 || pes > DOORBELL_MAX_PES)
        return xp_fail(XP_INVALID, "doorbells for %u PEs; allowed are 1 to %d", pes,
                       DOORBELL_MAX_PES);
    XP_TRY(xp_memfd_create("xpool-doorbell", MAILBOX_HEADER_BYTES, &fd));
    xp_status_t status = xp_memfd_map(fd, MAILBOX_HEADER_BYTES, &address);
    if (status != XP_OK) {
        close(fd);
        return status;
    }
    doorbell_page_t *page = address;
    page->magic = DOORBELL_MAGIC;
    page->abi = DOORBELL_ABI;
    page->pes = pes;
    xp_memfd_unmap(address);
    *fd_out = fd;
    return XP_OK;
}

xp_status_t transport_doorbell_renew(int fd)
{
    doorbell_page_t *page;
    XP_TRY(transport_doorbell_map(fd, 0, &page));
    for (uint32_t pe = 0; pe < DOORBELL_MAX_PES; pe++)
        PROTOCOL_STORE_TOTAL(&page->lines[pe].bell.sleepers, 0u);
    xp_memfd_unmap(page);
    return XP_OK;
}

xp_status_t transport_doorbell_map(int fd, uint32_t pe, doorbell_page_t **page_out)
{
    uint64_t bytes;
    void *address;
    XP_TRY(xp_memfd_check(fd, &bytes));
    if (bytes != MAILBOX_HEADER_BYTES)
        return xp_fail(XP_PEER, "a doorbell page has %llu bytes", (unsigned long long)bytes);
    XP_TRY(xp_memfd_map(fd, MAILBOX_HEADER_BYTES, &address));
    const doorbell_page_t *page = address;
    xp_status_t status = XP_OK;
    uint32_t pes = PROTOCOL_LOAD_RELAXED(&page->pes);
    if (PROTOCOL_LOAD_RELAXED(&page->magic) != DOORBELL_MAGIC ||
        PROTOCOL_LOAD_RELAXED(&page->abi) != DOORBELL_ABI)
        status = xp_fail(XP_PEER, "descriptor is no doorbell page of ABI %u", DOORBELL_ABI);
    else if (pes > DOORBELL_MAX_PES || pe >= pes)
        status = xp_fail(XP_PEER, "PE %u has no doorbell; the page has %u", pe, pes);
    if (status != XP_OK) {
        xp_memfd_unmap(address);
        return status;
    }
    *page_out = address;
    return XP_OK;
}
