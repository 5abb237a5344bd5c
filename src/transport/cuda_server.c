/* SPDX-License-Identifier: MIT */
/*
 * The AtnAgent's side: owns the resident kernel, its table and the mappings of the arenas. One
 * thread uses a server. The kernel trusts nothing that Instances wrote; here the header of a
 * received arena is read once and compared with what was planned.
 */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "transport/cuda_control.h"

#define SERVER_START_NS      (10 * XP_NS_PER_S)
#define SERVER_STOP_NS       (1 * XP_NS_PER_S)
#define SERVER_NAP_NS        (50 * XP_NS_PER_US)
#define SERVER_CARRY_THREADS 1024

struct transport_cuda_server {
    const cuda_device_t *device;
    transport_control_t control;
    cuda_stream_t resident;
    cuda_address_t table;
    uint32_t slots;
    bool launched;
    cuda_block_t arenas[TRANSPORT_RESIDENT_SLOTS]; /* all zero: free */
    uint32_t turns[TRANSPORT_RESIDENT_SLOTS];      /* of the last order to each slot */
    uint64_t answered[TRANSPORT_RESIDENT_SLOTS];   /* in the arena, as it was attached */
    bool open[TRANSPORT_RESIDENT_SLOTS];           /* a request after that */
};

static cuda_address_t server_slot(const transport_cuda_server_t *server, uint32_t slot)
{
    return server->table + offsetof(transport_resident_t, slot) + slot * sizeof(transport_slot_t);
}

static xp_status_t server_launch(transport_cuda_server_t *server, const transport_cuda_life_t *life,
                                 cuda_function_t function, cuda_address_t context)
{
    const cuda_driver_t *driver = server->device->driver;
    XP_TRY(CUDA_CALL(driver, cuMemsetD8Async, server->table, 0, sizeof(transport_resident_t),
                     server->control.stream));
    const struct {
        uint64_t at;
        uint32_t value;
    } words[] = {
        {offsetof(transport_resident_t, magic), TRANSPORT_RESIDENT_MAGIC},
        {offsetof(transport_resident_t, slots), server->slots},
        {offsetof(transport_resident_t, own_life), life->index},
    };
    for (uint32_t i = 0; i < sizeof(words) / sizeof(words[0]); i++)
        XP_TRY(
            transport_control_post(&server->control, server->table + words[i].at, words[i].value));
    XP_TRY(transport_control_wait(&server->control, xp_monotonic_ns() + SERVER_START_NS));
    cuda_address_t page = life->address;
    void *parameters[] = {&server->table, &page, &context};
    XP_TRY(cuda_launch(server->device, function, 1, (server->slots + 1) * 32, server->resident,
                       parameters));
    server->launched = true;
    return XP_OK;
}

xp_status_t transport_cuda_server_create(const cuda_device_t *device,
                                         const transport_cuda_life_t *life, uint32_t slots,
                                         cuda_function_t function, cuda_address_t context,
                                         transport_cuda_server_t **server_out)
{
    if (slots == 0 || slots > TRANSPORT_RESIDENT_SLOTS)
        return xp_fail(XP_INVALID, "%u Instance Ranks on one device; allowed are 1 to %d", slots,
                       TRANSPORT_RESIDENT_SLOTS);
    transport_cuda_server_t *server = calloc(1, sizeof(*server));
    if (!server)
        return xp_fail(XP_NO_MEMORY, "no memory for a Transport server");
    server->device = device;
    server->slots = slots;
    xp_status_t status;
    XP_TRY_GOTO(status, fail, transport_control_init(device, &server->control));
    XP_TRY_GOTO(status, fail, cuda_stream_create(device, true, &server->resident));
    XP_TRY_GOTO(
        status, fail,
        CUDA_CALL(device->driver, cuMemAlloc, &server->table, sizeof(transport_resident_t)));
    XP_TRY_GOTO(status, fail, server_launch(server, life, function, context));
    *server_out = server;
    return XP_OK;
fail:
    transport_cuda_server_destroy(server);
    return status;
}

/* Polls until the slot's warp has answered the last order with `wanted`, or has dropped the arena.
 */
static xp_status_t server_await(transport_cuda_server_t *server, uint32_t slot, uint32_t wanted,
                                uint64_t deadline_ns)
{
    for (;;) {
        transport_slot_t seen;
        XP_TRY(transport_control_read(&server->control, server_slot(server, slot), sizeof(seen),
                                      deadline_ns, &seen));
        bool answered = transport_slot_turn(seen.now) == server->turns[slot];
        if (answered && transport_slot_state(seen.now) == wanted)
            return XP_OK;
        if (answered)
            return xp_fail(XP_PEER, "the arena of slot %u was dropped at once: %s", slot,
                           seen.reason < XP_STATUS_COUNT ? xp_status_name((xp_status_t)seen.reason)
                                                         : "unknown");
        if (xp_monotonic_ns() >= deadline_ns)
            return xp_fail(XP_TIMEOUT, "the resident kernel of cuda:%d does not answer (slot %u)",
                           server->device->ordinal, slot);
        struct timespec nap = {.tv_nsec = SERVER_NAP_NS};
        nanosleep(&nap, NULL);
    }
}

xp_status_t transport_cuda_server_next(const transport_cuda_server_t *server, uint32_t *slot_out)
{
    uint32_t slot = 0;
    while (slot < server->slots && server->arenas[slot].handle)
        slot++;
    if (slot == server->slots)
        return xp_fail(XP_NO_MEMORY, "all %u slots of cuda:%d have an Instance Rank", server->slots,
                       server->device->ordinal);
    *slot_out = slot;
    return XP_OK;
}

/* Maps a received arena and reads its header. */
static xp_status_t server_map(transport_cuda_server_t *server, int arena_fd,
                              const transport_geometry_t *expected, uint64_t deadline_ns,
                              cuda_block_t *arena_out, mailbox_arena_t *header_out)
{
    cuda_block_t arena;
    XP_TRY(cuda_block_import(server->device, arena_fd,
                             transport_cuda_arena_bytes(server->device, expected), &arena));
    xp_status_t status = transport_control_read(&server->control, arena.address,
                                                sizeof(*header_out), deadline_ns, header_out);
    if (status == XP_TIMEOUT)
        return status; /* the read may still go on: mapped until the process ends */
    if (status == XP_OK)
        status = transport_cuda_header_check(header_out, expected);
    if (status != XP_OK) {
        cuda_block_destroy(&arena);
        return status;
    }
    *arena_out = arena;
    return XP_OK;
}

xp_status_t transport_cuda_server_look(transport_cuda_server_t *server, int arena_fd,
                                       const transport_geometry_t *expected, uint64_t deadline_ns,
                                       uint64_t *answered_out)
{
    cuda_block_t arena;
    mailbox_arena_t header;
    XP_TRY(server_map(server, arena_fd, expected, deadline_ns, &arena, &header));
    cuda_block_destroy(&arena);
    *answered_out = header.response.sequence;
    return XP_OK;
}

xp_status_t transport_cuda_server_carry(transport_cuda_server_t *server, int ahead_fd,
                                        int behind_fd, const transport_geometry_t *expected,
                                        uint64_t deadline_ns)
{
    cuda_block_t ahead, behind;
    mailbox_arena_t from, to;
    XP_TRY(server_map(server, ahead_fd, expected, deadline_ns, &ahead, &from));
    xp_status_t status = server_map(server, behind_fd, expected, deadline_ns, &behind, &to);
    if (status != XP_OK) {
        cuda_block_destroy(&ahead);
        return status;
    }
    /* The record of who has got the answer may be the next request's already. */
    uint64_t sequence = from.response.sequence, offset = transport_arena_output_offset(expected);
    uint64_t bytes = to.request.rows * transport_row_bytes(expected);
    void *parameters[] = {&behind.address, &ahead.address, &offset,
                          &bytes,          &sequence,      &from.response.status};
    if (to.request.sequence != sequence || to.response.sequence + 1 != sequence ||
        to.request.rows > expected->max_rows || from.response.status >= XP_STATUS_COUNT)
        status = xp_fail(XP_PEER,
                         "an answer %llu of status %u is not for request %llu of %u rows, after "
                         "answer %llu",
                         (unsigned long long)sequence, from.response.status,
                         (unsigned long long)to.request.sequence, to.request.rows,
                         (unsigned long long)to.response.sequence);
    else
        status = cuda_launch(server->device, server->control.kernels[TRANSPORT_KERNEL_CARRY], 1,
                             SERVER_CARRY_THREADS, server->control.stream, parameters);
    if (status == XP_OK)
        status = transport_control_wait(&server->control, deadline_ns);
    if (status == XP_TIMEOUT)
        return status; /* the copy may still go on: mapped until the process ends */
    cuda_block_destroy(&behind);
    cuda_block_destroy(&ahead);
    return status;
}

xp_status_t transport_cuda_server_attach(transport_cuda_server_t *server, int arena_fd,
                                         const transport_geometry_t *expected, uint32_t life_index,
                                         uint64_t deadline_ns, uint32_t *slot_out)
{
    XP_TRY(transport_cuda_geometry_check(expected, XP_INVALID));
    if (life_index >= LIFE_WORDS)
        return xp_fail(XP_INVALID, "life word %u; there are %d", life_index, LIFE_WORDS);
    uint32_t slot;
    XP_TRY(transport_cuda_server_next(server, &slot));
    xp_status_t status;
    cuda_block_t arena;
    mailbox_arena_t header;
    XP_TRY(server_map(server, arena_fd, expected, deadline_ns, &arena, &header));
    server->answered[slot] = header.response.sequence;
    server->open[slot] = header.request.sequence != header.response.sequence;
    cuda_address_t at = server_slot(server, slot);
    transport_slot_t description = {
        .wanted = transport_slot_word(++server->turns[slot], TRANSPORT_SLOT_ATTACHED),
        .hidden = expected->hidden,
        .max_rows = expected->max_rows,
        .dtype = (uint32_t)expected->dtype,
        .dp_size = expected->dp_size,
        .life = life_index,
        .arena = arena.address,
        .row_bytes = transport_row_bytes(expected),
        .input_offset = transport_arena_input_offset(expected),
        .output_offset = transport_arena_output_offset(expected),
    };
    void *parameters[] = {&at, &description};
    XP_TRY_GOTO(
        status, fail,
        transport_control_launch(&server->control, TRANSPORT_KERNEL_SLOT_DESCRIBE, parameters));
    /* From here on the warp may use the mapping: only a detach that it has confirmed unmaps it. */
    server->arenas[slot] = arena;
    status = server_await(server, slot, TRANSPORT_SLOT_ATTACHED, deadline_ns);
    if (status != XP_OK) {
        xp_error_t error = *xp_error_last();
        (void)transport_cuda_server_detach(server, slot, xp_monotonic_ns() + SERVER_STOP_NS);
        return xp_fail(status, "%s", error.text);
    }
    *slot_out = slot;
    return XP_OK;
fail:
    cuda_block_destroy(&arena);
    return status;
}

static xp_status_t server_check_slot(const transport_cuda_server_t *server, uint32_t slot)
{
    if (slot >= server->slots || !server->arenas[slot].handle)
        return xp_fail(XP_INVALID, "slot %u has no arena", slot);
    return XP_OK;
}

xp_status_t transport_cuda_server_detach(transport_cuda_server_t *server, uint32_t slot,
                                         uint64_t deadline_ns)
{
    XP_TRY(server_check_slot(server, slot));
    XP_TRY(transport_control_post(
        &server->control, server_slot(server, slot) + offsetof(transport_slot_t, wanted),
        transport_slot_word(++server->turns[slot], TRANSPORT_SLOT_EMPTY)));
    XP_TRY(server_await(server, slot, TRANSPORT_SLOT_EMPTY, deadline_ns));
    cuda_block_destroy(&server->arenas[slot]);
    return XP_OK;
}

xp_status_t transport_cuda_server_close(transport_cuda_server_t *server, uint32_t slot,
                                        xp_status_t reason)
{
    XP_TRY(server_check_slot(server, slot));
    uint32_t word = (uint32_t)reason;
    void *parameters[] = {&server->arenas[slot].address, &word};
    return transport_control_launch(&server->control, TRANSPORT_KERNEL_CLOSE, parameters);
}

xp_status_t transport_cuda_server_report(transport_cuda_server_t *server, uint32_t slot,
                                         uint64_t deadline_ns, transport_cuda_report_t *report_out)
{
    XP_TRY(server_check_slot(server, slot));
    transport_slot_t seen;
    XP_TRY(transport_control_read(&server->control, server_slot(server, slot), sizeof(seen),
                                  deadline_ns, &seen));
    *report_out = (transport_cuda_report_t){
        .now = transport_slot_state(seen.now),
        .reason = seen.reason < XP_STATUS_COUNT ? (xp_status_t)seen.reason : XP_PEER,
        .requests = seen.requests,
        .rows = seen.total_rows,
        .found_answered = server->answered[slot],
        .found_open = server->open[slot],
    };
    return XP_OK;
}

xp_status_t transport_cuda_server_stop(transport_cuda_server_t *server, uint64_t deadline_ns)
{
    if (!server->launched)
        return XP_OK;
    XP_TRY(transport_control_post(&server->control,
                                  server->table + offsetof(transport_resident_t, stop), 1));
    xp_clock_t clock = xp_clock_system();
    XP_TRY(cuda_stream_wait(server->device, server->resident, &clock, deadline_ns));
    server->launched = false;
    return XP_OK;
}

void transport_cuda_server_destroy(transport_cuda_server_t *server)
{
    if (!server)
        return;
    xp_status_t status = transport_cuda_server_stop(server, xp_monotonic_ns() + SERVER_STOP_NS);
    /* A kernel that does not leave keeps its memory; the end of the process takes both. */
    if (status == XP_OK || status == XP_FATAL) {
        for (uint32_t i = 0; i < server->slots; i++)
            cuda_block_destroy(&server->arenas[i]);
        if (server->table)
            CUDA_IGNORE(server->device->driver, cuMemFree, server->table);
        cuda_stream_destroy(server->device, server->resident);
        transport_control_fini(&server->control);
    }
    free(server);
}
