/* SPDX-License-Identifier: MIT */
/*
 * The Instance's side of the mailbox: owns arena and client. One thread at a time uses a client.
 * Publishes nothing before every check has passed, and never waits past the given deadline.
 */
#include "transport/transport.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/memfd.h"
#include "transport/arena.h"
#include "transport/doorbell.h"
#include "transport/wait.h"

/* A wait looks for close at least this often, should a closer have died between closing and
 * ringing. */
#define CLIENT_TICK_NS (100 * XP_NS_PER_MS)

typedef enum client_state { CLIENT_IDLE = 0, CLIENT_LIVE, CLIENT_ANSWERED } client_state_t;

struct transport_client {
    transport_geometry_t geometry;
    mailbox_arena_t *arena;
    int arena_fd;
    doorbell_page_t *doorbell; /* NULL: nobody to ring yet */
    uint32_t doorbell_pe;
    client_state_t state;
    uint64_t sequence; /* of the last request published */
    uint32_t rows;     /* of that request */
    uint64_t requests, total_rows;
    transport_waiter_t waiter;
    observe_t *observe;        /* NULL: nobody looks */
    observe_record_t observed; /* of the live request */
    uint64_t put_ns;           /* only while observed */
};

xp_status_t transport_client_create(const transport_geometry_t *geometry, uint32_t spin_ns,
                                    transport_client_t **client_out)
{
    XP_TRY(transport_geometry_check(geometry, XP_INVALID));
    transport_client_t *client = calloc(1, sizeof(*client));
    if (!client)
        return xp_fail(XP_NO_MEMORY, "no memory for a Transport client");
    client->arena_fd = -1;
    client->geometry = *geometry;
    transport_waiter_init(&client->waiter, spin_ns);

    xp_status_t status;
    void *address = NULL;
    uint64_t bytes = transport_arena_bytes(geometry);
    XP_TRY_GOTO(status, fail, xp_memfd_create("xpool-transport", bytes, &client->arena_fd));
    XP_TRY_GOTO(status, fail, xp_memfd_map(client->arena_fd, bytes, &address));
    client->arena = address;
    client->arena->magic = MAILBOX_MAGIC;
    client->arena->abi = MAILBOX_ABI;
    client->arena->bytes = bytes;
    client->arena->hidden = geometry->hidden;
    client->arena->max_rows = geometry->max_rows;
    client->arena->dtype = (uint32_t)geometry->dtype;
    client->arena->dp_size = geometry->dp_size;
    client->arena->input_offset = transport_arena_input_offset(geometry);
    client->arena->output_offset = transport_arena_output_offset(geometry);
    *client_out = client;
    return XP_OK;
fail:
    transport_client_destroy(client);
    return status;
}

static void client_ring(transport_client_t *client)
{
    if (client->doorbell)
        transport_bell_ring(&client->doorbell->lines[client->doorbell_pe].bell);
}

void transport_client_destroy(transport_client_t *client)
{
    if (!client)
        return;
    if (client->arena && mailbox_close(client->arena, XP_CLOSED))
        client_ring(client);
    xp_memfd_unmap(client->doorbell);
    xp_memfd_unmap(client->arena);
    if (client->arena_fd >= 0)
        close(client->arena_fd);
    free(client);
}

int transport_client_fd(const transport_client_t *client)
{
    return client->arena_fd;
}

xp_status_t transport_client_set_doorbell(transport_client_t *client, int doorbell_fd, uint32_t pe)
{
    doorbell_page_t *page;
    XP_TRY(transport_doorbell_map(doorbell_fd, pe, &page));
    xp_memfd_unmap(client->doorbell);
    client->doorbell = page;
    client->doorbell_pe = pe;
    /* A request that is already live was published for whoever listens to this bell. */
    if (client->state == CLIENT_LIVE)
        client_ring(client);
    return XP_OK;
}

static xp_status_t client_check_reason(uint32_t reason)
{
    if (!reason)
        return XP_OK;
    if (reason == XP_CLOSED)
        return xp_fail(XP_CLOSED, "the Transport arena is closed");
    return xp_fail(XP_FATAL, "the Transport arena was closed by a failure of its Generation");
}

static xp_status_t client_check_open(const transport_client_t *client)
{
    return client_check_reason(mailbox_closed(client->arena));
}

static xp_status_t client_check_tensor(const transport_client_t *client,
                                       const transport_tensor_t *tensor, uint32_t rows,
                                       const char *what)
{
    XP_TRY(transport_tensor_check(&client->geometry, tensor, what));
    if (tensor->rows != rows)
        return xp_fail(XP_INVALID, "%s tensor has %llu rows, the request %u", what,
                       (unsigned long long)tensor->rows, rows);
    if (!tensor->data && rows)
        return xp_fail(XP_INVALID, "%s tensor has no data", what);
    return XP_OK;
}

static xp_status_t client_check_request(const transport_client_t *client,
                                        const transport_request_t *request)
{
    const transport_geometry_t *geometry = &client->geometry;
    if (!request)
        return xp_fail(XP_INVALID, "no request");
    if (request->layer >= MAILBOX_LAYER_LIMIT)
        return xp_fail(XP_INVALID, "layer %u is past the limit of %u", request->layer,
                       MAILBOX_LAYER_LIMIT);
    if (request->rows > geometry->max_rows)
        return xp_fail(XP_INVALID, "%u rows, the arena holds %u", request->rows,
                       geometry->max_rows);
    if (request->kind >= MAILBOX_KIND_COUNT)
        return xp_fail(XP_INVALID, "unknown request kind %u", request->kind);
    if (geometry->dp_size > 1 && !request->dp_rows)
        return xp_fail(XP_INVALID, "attention DP of %u ranks needs their row counts",
                       geometry->dp_size);
    for (uint32_t i = 0; geometry->dp_size > 1 && i < geometry->dp_size; i++)
        if (request->dp_rows[i] > geometry->max_rows)
            return xp_fail(XP_INVALID, "DP rank %u has %u rows, the arena holds %u", i,
                           request->dp_rows[i], geometry->max_rows);
    return XP_OK;
}

void *transport_client_input(const transport_client_t *client)
{
    return (char *)client->arena + transport_arena_input_offset(&client->geometry);
}

const void *transport_client_output(const transport_client_t *client)
{
    return (const char *)client->arena + transport_arena_output_offset(&client->geometry);
}

static void client_observe_put(transport_client_t *client, const transport_request_t *request)
{
    client->put_ns = xp_monotonic_ns();
    client->observed.layer = request->layer;
    client->observed.rows = request->rows;
    client->observed.step = (uint8_t)request->kind;
    client->observed.execution = request->execution;
}

static void client_observe_take(transport_client_t *client)
{
    client->observed.end_ns = xp_monotonic_ns();
    client->observed.duration_ns = client->observed.end_ns - client->put_ns;
    client->observed.sequence = client->observed.request = client->sequence;
    observe_write(client->observe, &client->observed);
}

xp_status_t transport_client_put(transport_client_t *client, const transport_request_t *request,
                                 const transport_tensor_t *input)
{
    if (client->state != CLIENT_IDLE)
        return xp_fail(XP_RETRY, "a request is live already");
    XP_TRY(client_check_open(client));
    XP_TRY(client_check_request(client, request));
    XP_TRY(client_check_tensor(client, input, request->rows, "input"));

    mailbox_arena_t *arena = client->arena;
    if (client->observe)
        client_observe_put(client, request);
    if (request->rows && input->data != transport_client_input(client))
        memcpy(transport_client_input(client), input->data,
               request->rows * transport_row_bytes(&client->geometry));
    arena->request.slo_deadline_ns = request->slo_deadline_ns;
    arena->request.layer = request->layer;
    arena->request.rows = request->rows;
    arena->request.kind = request->kind;
    arena->request.dp_rows[0] = request->rows;
    for (uint32_t i = 0; client->geometry.dp_size > 1 && i < client->geometry.dp_size; i++)
        arena->request.dp_rows[i] = request->dp_rows[i];
    client->sequence++;
    client->rows = request->rows;
    client->state = CLIENT_LIVE;
    client->requests++;
    client->total_rows += request->rows;
    mailbox_request_publish(arena, client->sequence);
    client_ring(client);
    return XP_OK;
}

xp_status_t transport_client_wait(transport_client_t *client, uint64_t deadline_ns)
{
    if (client->state == CLIENT_ANSWERED)
        return XP_OK;
    if (client->state == CLIENT_IDLE)
        return xp_fail(XP_INVALID, "no request is live");
    mailbox_arena_t *arena = client->arena;
    for (;;) {
        uint32_t seen = mailbox_bell_observe(&arena->response.bell), answer, closed;
        switch (mailbox_response_wait_look(arena, client->sequence, &answer, &closed)) {
        case MAILBOX_LIVE:
            if (answer == XP_OK) {
                client->state = CLIENT_ANSWERED;
                return XP_OK;
            }
            client->state = CLIENT_IDLE;
            if (answer >= XP_STATUS_COUNT)
                return xp_fail(XP_PEER, "the AtnAgent answered with unknown status %u", answer);
            return xp_fail((xp_status_t)answer, "the AtnAgent refused the request: %s",
                           xp_status_name((xp_status_t)answer));
        case MAILBOX_NONE:
            break;
        case MAILBOX_NONSENSE:
            return xp_fail(XP_PEER, "the AtnAgent's response sequence is out of order");
        }
        XP_TRY(client_check_reason(closed));
        uint64_t now_ns = xp_monotonic_ns();
        if (now_ns >= deadline_ns)
            return xp_fail(XP_TIMEOUT, "no answer from the FFN tier before the deadline");
        uint64_t tick_ns = now_ns + CLIENT_TICK_NS;
        transport_bell_wait(&client->waiter, &arena->response.bell, seen,
                            tick_ns < deadline_ns ? tick_ns : deadline_ns);
    }
}

xp_status_t transport_client_take(transport_client_t *client, const transport_tensor_t *output)
{
    if (client->state != CLIENT_ANSWERED)
        return xp_fail(XP_INVALID, "no answer to take");
    XP_TRY(client_check_tensor(client, output, client->rows, "output"));
    if (client->rows && output->data != transport_client_output(client))
        memcpy(output->data, transport_client_output(client),
               client->rows * transport_row_bytes(&client->geometry));
    client->state = CLIENT_IDLE;
    if (client->observe)
        client_observe_take(client);
    return XP_OK;
}

xp_status_t transport_client_call(transport_client_t *client, const transport_request_t *request,
                                  const transport_tensor_t *input, const transport_tensor_t *output,
                                  uint64_t deadline_ns)
{
    /* The output is checked first: a request whose answer has nowhere to go is not published. */
    XP_TRY(client_check_request(client, request));
    XP_TRY(client_check_tensor(client, output, request->rows, "output"));
    XP_TRY(transport_client_put(client, request, input));
    XP_TRY(transport_client_wait(client, deadline_ns));
    return transport_client_take(client, output);
}

void transport_client_stats(const transport_client_t *client, transport_stats_t *stats_out)
{
    *stats_out = (transport_stats_t){.requests = client->requests,
                                     .rows = client->total_rows,
                                     .spins = client->waiter.spins,
                                     .sleeps = client->waiter.sleeps,
                                     .wait_ns = client->waiter.wait_ns};
}

void transport_client_observe(transport_client_t *client, observe_t *observe, uint32_t instance,
                              uint32_t rank)
{
    client->observe = observe;
    client->observed = (observe_record_t){.instance = (uint16_t)instance,
                                          .rank = (uint16_t)rank,
                                          .lane = OBSERVE_NONE,
                                          .graph_template = OBSERVE_NONE};
}
