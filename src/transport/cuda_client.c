/* SPDX-License-Identifier: MIT */
/*
 * The Instance's side of the mailbox on a CUDA device: owns arena, state and live record. One
 * thread at a time uses a client. Launches nothing before every check has passed; never waits but
 * in create, finish, state and destroy, each with a limit.
 */
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "transport/cuda_control.h"

#define CLIENT_START_NS   (10 * XP_NS_PER_S)
#define CLIENT_CLOSE_NS   (1 * XP_NS_PER_S)
#define CLIENT_LIVE_AT    256u /* of the private memory; the state comes first */
#define CLIENT_PRIVATE    512u
#define CLIENT_BLOCKS_MAX 64u
#define CLIENT_BLOCK_WORK (16u << 10) /* bytes a block moves before another one is worth it */

_Static_assert(sizeof(transport_device_state_t) <= CLIENT_LIVE_AT, "state and live record fit");
_Static_assert(CLIENT_LIVE_AT + sizeof(transport_live_t) <= CLIENT_PRIVATE, "live record fits");

struct transport_cuda_client {
    const cuda_device_t *device;
    transport_geometry_t geometry;
    transport_control_t control;
    cuda_block_t arena;
    cuda_address_t memory; /* state and live record; ours alone */
    uint32_t *notice;      /* pinned */
    transport_patience_t patience;
    xp_status_t ended; /* not XP_OK: for good */
};

static cuda_address_t client_live_record(const transport_cuda_client_t *client)
{
    return client->memory + CLIENT_LIVE_AT;
}

static xp_status_t client_start(transport_cuda_client_t *client)
{
    const transport_geometry_t *geometry = &client->geometry;
    mailbox_arena_t header = transport_cuda_header(geometry);
    const cuda_driver_t *driver = client->device->driver;
    XP_TRY(CUDA_CALL(driver, cuMemsetD8Async, client->arena.address, 0, MAILBOX_HEADER_BYTES,
                     client->control.stream));
    XP_TRY(CUDA_CALL(driver, cuMemsetD8Async, client->memory, 0, CLIENT_PRIVATE,
                     client->control.stream));
    void *parameters[] = {&client->arena.address, &header};
    XP_TRY(transport_control_launch(&client->control, TRANSPORT_KERNEL_ARENA_START, parameters));
    return transport_control_wait(&client->control, xp_monotonic_ns() + CLIENT_START_NS);
}

static xp_status_t client_make_notice(transport_cuda_client_t *client)
{
    void *memory;
    XP_TRY(cuda_host_alloc(client->device, MAILBOX_LINE, &memory));
    memset(memory, 0, MAILBOX_LINE);
    client->notice = memory;
    return CUDA_CALL(client->device->driver, cuMemHostGetDevicePointer, &client->patience.notice,
                     memory, 0);
}

xp_status_t transport_cuda_client_create(const cuda_device_t *device,
                                         const transport_geometry_t *geometry,
                                         const transport_cuda_life_t *life, uint64_t limit_ns,
                                         uint64_t pause_ns, transport_cuda_client_t **client_out)
{
    XP_TRY(transport_cuda_geometry_check(geometry, XP_INVALID));
    transport_cuda_client_t *client = calloc(1, sizeof(*client));
    if (!client)
        return xp_fail(XP_NO_MEMORY, "no memory for a Transport client");
    client->device = device;
    client->geometry = *geometry;
    client->patience = (transport_patience_t){
        .life = transport_cuda_life_word(life),
        .limit_ns = limit_ns < TRANSPORT_WAIT_MAX_NS ? limit_ns : TRANSPORT_WAIT_MAX_NS,
        .pause_ns = pause_ns < TRANSPORT_WAIT_MAX_NS ? pause_ns : TRANSPORT_WAIT_MAX_NS};

    xp_status_t status;
    XP_TRY_GOTO(status, fail, transport_control_init(device, &client->control));
    XP_TRY_GOTO(
        status, fail,
        cuda_block_create(device, transport_cuda_arena_bytes(device, geometry), &client->arena));
    XP_TRY_GOTO(status, fail,
                CUDA_CALL(device->driver, cuMemAlloc, &client->memory, CLIENT_PRIVATE));
    XP_TRY_GOTO(status, fail, client_make_notice(client));
    XP_TRY_GOTO(status, fail, client_start(client));
    *client_out = client;
    return XP_OK;
fail:
    transport_cuda_client_destroy(client);
    return status;
}

void transport_cuda_client_destroy(transport_cuda_client_t *client)
{
    if (!client)
        return;
    if (client->memory) {
        /* An AtnAgent that maps the arena sees the end even if it never hears of it otherwise. */
        if (transport_cuda_client_close(client, XP_CLOSED) == XP_OK)
            (void)transport_control_wait(&client->control, xp_monotonic_ns() + CLIENT_CLOSE_NS);
        CUDA_IGNORE(client->device->driver, cuMemFree, client->memory);
    }
    cuda_host_free(client->device, client->notice);
    cuda_block_destroy(&client->arena);
    transport_control_fini(&client->control);
    free(client);
}

xp_status_t transport_cuda_client_export(const transport_cuda_client_t *client, int *fd_out)
{
    return cuda_vmm_export(client->device, client->arena.handle, fd_out);
}

transport_cuda_parts_t transport_cuda_client_parts(const transport_cuda_client_t *client)
{
    return (transport_cuda_parts_t){
        .arena = client->arena.address, .state = client->memory, .patience = client->patience};
}

cuda_address_t transport_cuda_client_live(const transport_cuda_client_t *client)
{
    return client_live_record(client);
}

static xp_status_t client_check_open(const transport_cuda_client_t *client)
{
    if (client->ended == XP_OK)
        return XP_OK;
    return xp_fail(client->ended, "the Transport arena is at its end (%s)",
                   xp_status_name(client->ended));
}

xp_status_t transport_cuda_client_live_write(transport_cuda_client_t *client,
                                             const transport_live_t *live, cuda_stream_t stream)
{
    XP_TRY(client_check_open(client));
    if (live->rows > client->geometry.max_rows)
        return xp_fail(XP_INVALID, "%u live rows, the arena holds %u", live->rows,
                       client->geometry.max_rows);
    if (live->kind >= MAILBOX_KIND_COUNT)
        return xp_fail(XP_INVALID, "unknown request kind %u", live->kind);
    for (uint32_t i = 0; client->geometry.dp_size > 1 && i < client->geometry.dp_size; i++)
        if (live->dp_rows[i] > client->geometry.max_rows)
            return xp_fail(XP_INVALID, "DP rank %u has %u rows, the arena holds %u", i,
                           live->dp_rows[i], client->geometry.max_rows);
    cuda_address_t to = client_live_record(client);
    transport_live_t value = *live;
    void *parameters[] = {&to, &value};
    return cuda_launch(client->device, client->control.kernels[TRANSPORT_KERNEL_LIVE_WRITE], 1, 1,
                       stream, parameters);
}

static xp_status_t client_check_tensor(const transport_cuda_client_t *client,
                                       const transport_tensor_t *tensor, const char *what)
{
    XP_TRY(transport_tensor_check(&client->geometry, tensor, what));
    if (tensor->rows > client->geometry.max_rows)
        return xp_fail(XP_INVALID, "%s tensor has %llu rows, the arena holds %u", what,
                       (unsigned long long)tensor->rows, client->geometry.max_rows);
    if ((!tensor->data && tensor->rows) || (uintptr_t)tensor->data % 2)
        return xp_fail(XP_INVALID, "%s tensor has no data, or data off its elements", what);
    return XP_OK;
}

static xp_status_t client_check_layer(uint32_t layer)
{
    return layer < MAILBOX_LAYER_LIMIT ? XP_OK
                                       : xp_fail(XP_INVALID, "layer %u is past the limit of %u",
                                                 layer, MAILBOX_LAYER_LIMIT);
}

xp_status_t transport_cuda_client_check(const transport_cuda_client_t *client, uint32_t layer,
                                        const transport_tensor_t *input,
                                        const transport_tensor_t *output)
{
    XP_TRY(client_check_open(client));
    XP_TRY(client_check_layer(layer));
    if (input)
        XP_TRY(client_check_tensor(client, input, "input"));
    if (output)
        XP_TRY(client_check_tensor(client, output, "output"));
    if (input && output && input->rows != output->rows)
        return xp_fail(XP_INVALID, "output tensor has %llu rows, the input %llu",
                       (unsigned long long)output->rows, (unsigned long long)input->rows);
    return XP_OK;
}

static uint32_t blocks_for(uint64_t bytes)
{
    uint64_t blocks = (bytes + CLIENT_BLOCK_WORK - 1) / CLIENT_BLOCK_WORK;
    return blocks < 1 ? 1 : blocks > CLIENT_BLOCKS_MAX ? CLIENT_BLOCKS_MAX : (uint32_t)blocks;
}

/* Few rows: one small block, since a barrier among more threads costs more than they bring. */
static xp_status_t client_launch(transport_cuda_client_t *client, transport_kernel_t kernel,
                                 uint64_t bytes, cuda_stream_t stream, void **parameters)
{
    return cuda_launch(client->device, client->control.kernels[kernel], blocks_for(bytes),
                       bytes <= 4096 ? 256 : 512, stream, parameters);
}

xp_status_t transport_cuda_client_put(transport_cuda_client_t *client, uint32_t layer,
                                      cuda_address_t live, const transport_tensor_t *input,
                                      cuda_stream_t stream)
{
    XP_TRY(client_check_open(client));
    XP_TRY(client_check_layer(layer));
    XP_TRY(client_check_tensor(client, input, "input"));
    uint32_t captured = (uint32_t)input->rows;
    uint64_t row_bytes = transport_row_bytes(&client->geometry);
    uint64_t offset = transport_arena_input_offset(&client->geometry);
    const void *data = input->data;
    if (!live)
        live = client_live_record(client);
    void *parameters[] = {&client->arena.address,
                          &client->memory,
                          &live,
                          &layer,
                          &captured,
                          &data,
                          &row_bytes,
                          &offset};
    return client_launch(client, TRANSPORT_KERNEL_PUT, captured * row_bytes, stream, parameters);
}

xp_status_t transport_cuda_client_wait(transport_cuda_client_t *client, cuda_stream_t stream)
{
    XP_TRY(client_check_open(client));
    void *parameters[] = {&client->arena.address, &client->memory, &client->patience};
    return cuda_launch(client->device, client->control.kernels[TRANSPORT_KERNEL_WAIT], 1, 1, stream,
                       parameters);
}

xp_status_t transport_cuda_client_take(transport_cuda_client_t *client,
                                       const transport_tensor_t *output, cuda_stream_t stream)
{
    XP_TRY(client_check_open(client));
    XP_TRY(client_check_tensor(client, output, "output"));
    uint32_t captured = (uint32_t)output->rows;
    uint64_t row_bytes = transport_row_bytes(&client->geometry);
    uint64_t offset = transport_arena_output_offset(&client->geometry);
    void *data = output->data;
    void *parameters[] = {
        &client->arena.address, &client->memory, &captured, &data, &row_bytes, &offset};
    return client_launch(client, TRANSPORT_KERNEL_TAKE, captured * row_bytes, stream, parameters);
}

xp_status_t transport_cuda_client_call(transport_cuda_client_t *client, uint32_t layer,
                                       cuda_address_t live, const transport_tensor_t *input,
                                       const transport_tensor_t *output, cuda_stream_t stream)
{
    XP_TRY(client_check_tensor(client, input, "input"));
    XP_TRY(client_check_tensor(client, output, "output"));
    if (input->rows != output->rows)
        return xp_fail(XP_INVALID, "output tensor has %llu rows, the input %llu",
                       (unsigned long long)output->rows, (unsigned long long)input->rows);
    uint64_t row_bytes = transport_row_bytes(&client->geometry);
    if (blocks_for(input->rows * row_bytes) > 1) {
        XP_TRY(transport_cuda_client_put(client, layer, live, input, stream));
        XP_TRY(transport_cuda_client_wait(client, stream));
        return transport_cuda_client_take(client, output, stream);
    }
    XP_TRY(client_check_open(client));
    XP_TRY(client_check_layer(layer));
    uint32_t captured = (uint32_t)input->rows;
    uint64_t input_offset = transport_arena_input_offset(&client->geometry);
    uint64_t output_offset = transport_arena_output_offset(&client->geometry);
    const void *from = input->data;
    void *to = output->data;
    if (!live)
        live = client_live_record(client);
    void *parameters[] = {&client->arena.address,
                          &client->memory,
                          &live,
                          &layer,
                          &captured,
                          &from,
                          &to,
                          &row_bytes,
                          &input_offset,
                          &output_offset,
                          &client->patience};
    return client_launch(client, TRANSPORT_KERNEL_CALL, captured * row_bytes, stream, parameters);
}

xp_status_t transport_cuda_client_state(transport_cuda_client_t *client, uint64_t deadline_ns,
                                        transport_device_state_t *state_out)
{
    return transport_control_read(&client->control, client->memory, sizeof(*state_out), deadline_ns,
                                  state_out);
}

xp_status_t transport_cuda_client_finish(transport_cuda_client_t *client, uint64_t deadline_ns)
{
    XP_TRY(client_check_open(client));
    transport_device_state_t state;
    XP_TRY(transport_cuda_client_state(client, deadline_ns, &state));
    if (state.status == XP_OK)
        return XP_OK;
    xp_status_t status = state.status < XP_STATUS_COUNT ? (xp_status_t)state.status : XP_PEER;
    if (state.phase == TRANSPORT_PHASE_IDLE &&
        (status == XP_INVALID || status == XP_UNSUPPORTED || status == XP_RETRY)) {
        void *parameters[] = {&client->memory};
        XP_TRY(transport_control_launch(&client->control, TRANSPORT_KERNEL_RECOVER, parameters));
        XP_TRY(transport_control_wait(&client->control, deadline_ns));
        return xp_fail(status, "the AtnAgent refused request %llu: %s",
                       (unsigned long long)state.sequence, xp_status_name(status));
    }
    client->ended = status;
    switch (status) {
    case XP_TIMEOUT:
        if (transport_notice_paused(*client->notice))
            return xp_fail(status,
                           "no next Generation answered request %llu (deadlines.reform; a request "
                           "waits for %llu s at most)",
                           (unsigned long long)state.sequence,
                           (unsigned long long)(client->patience.pause_ns / XP_NS_PER_S));
        return xp_fail(status, "no answer from the FFN tier to request %llu within %llu ms",
                       (unsigned long long)state.sequence,
                       (unsigned long long)(client->patience.limit_ns / XP_NS_PER_MS));
    case XP_CANCELLED:
        return xp_fail(status, "the life word of this process says that it is at its end");
    case XP_CLOSED:
        return xp_fail(status, "the Transport arena is closed");
    case XP_FATAL:
        return xp_fail(status, "the Transport arena was closed by a failure of its Generation");
    default:
        return xp_fail(status, "Transport request %llu ended with: %s",
                       (unsigned long long)state.sequence, xp_status_name(status));
    }
}

void transport_cuda_client_pause(transport_cuda_client_t *client, bool paused)
{
    uint32_t notice = PROTOCOL_LOAD_RELAXED(client->notice);
    /* Only an end that comes meanwhile makes this fail, and that one stays. */
    if (!transport_notice_end(notice) && transport_notice_paused(notice) != paused)
        (void)PROTOCOL_CAS(client->notice, &notice, notice + 1);
}

void transport_cuda_client_end(transport_cuda_client_t *client, xp_status_t reason)
{
    uint32_t notice = PROTOCOL_LOAD_RELAXED(client->notice);
    /* Again when a pause has begun or ended meanwhile. */
    while (!transport_notice_end(notice) &&
           !PROTOCOL_CAS(client->notice, &notice, TRANSPORT_NOTICE_END | (uint32_t)reason))
        ;
}

xp_status_t transport_cuda_client_close(transport_cuda_client_t *client, xp_status_t reason)
{
    uint32_t word = (uint32_t)reason;
    void *parameters[] = {&client->arena.address, &word};
    return transport_control_launch(&client->control, TRANSPORT_KERNEL_CLOSE, parameters);
}
