/* SPDX-License-Identifier: MIT */
/*
 * An Instance Rank's side: the Transport client's arena, state and live record, the mapped stages,
 * and the launches of put, wait, take. One thread at a time uses a client. Launches nothing before
 * every check has passed; never waits but in create, finish, counters and destroy.
 */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "fabric/records.h"
#include "stage/control.h"

#define CLIENT_START_NS   (10 * XP_NS_PER_S)
#define CLIENT_BLOCKS_MAX 128u
#define CLIENT_BLOCK_WORK (16u << 10) /* bytes a block moves before another one is worth it */
/* Up to so many one launch of one block does all: two more launches would cost more than the block,
 * whose threads have 64 KiB in flight at once. */
#define CLIENT_CALL_BYTES (64u << 10)

struct stage_client {
    const cuda_device_t *device;
    fabric_plan_instance_t plan;
    uint32_t index, rank, dp, dtype;
    uint64_t generation;
    stage_path_t path;
    uint64_t call_bytes;
    transport_geometry_t geometry;
    stage_control_t control;
    transport_cuda_client_t *transport;
    transport_cuda_parts_t parts;
    cuda_block_t stages[STAGE_MAX_MEMBERS];
    uint32_t opened;  /* FfnAgents, bits */
    uint32_t answers; /* members that answer the last put with a partial; 0: complete rows */
};

xp_status_t stage_client_create(const stage_client_config_t *config, stage_client_t **client_out)
{
    uint32_t dtype;
    XP_TRY(stage_plan_check(config->instance));
    XP_TRY(stage_dtype(config->instance, &dtype));
    if (config->rank >= fabric_plan_ranks(config->instance))
        return xp_fail(XP_INVALID, "rank %u; %.48s has %u", config->rank, config->instance->id,
                       fabric_plan_ranks(config->instance));
    stage_client_t *client = calloc(1, sizeof(*client));
    if (!client)
        return xp_fail(XP_NO_MEMORY, "no memory for a stage client");
    client->device = config->device;
    client->plan = *config->instance;
    client->index = config->index;
    client->generation = config->generation;
    client->rank = config->rank;
    client->dp = config->rank / config->instance->atn_tp;
    client->dtype = dtype;
    client->path = config->path;
    client->call_bytes = config->call_bytes ? config->call_bytes : CLIENT_CALL_BYTES;
    client->geometry = stage_geometry(config->instance);
    xp_status_t status;
    XP_TRY_GOTO(status, fail, stage_control_init(config->device, &client->control));
    XP_TRY_GOTO(status, fail,
                transport_cuda_client_create(config->device, &client->geometry, config->life,
                                             config->limit_ns, config->pause_ns,
                                             &client->transport));
    client->parts = transport_cuda_client_parts(client->transport);
    *client_out = client;
    return XP_OK;
fail:
    stage_client_destroy(client);
    return status;
}

void stage_client_destroy(stage_client_t *client)
{
    if (!client)
        return;
    transport_cuda_client_destroy(client->transport);
    for (uint32_t ffn = 0; ffn < STAGE_MAX_MEMBERS; ffn++)
        cuda_block_destroy(&client->stages[ffn]);
    stage_control_fini(&client->control);
    free(client);
}

xp_status_t stage_client_export(const stage_client_t *client, int *fd_out)
{
    return transport_cuda_client_export(client->transport, fd_out);
}

xp_status_t stage_client_open(stage_client_t *client, uint32_t ffn, int stage_fd)
{
    if (client->path != STAGE_DIRECT)
        return xp_fail(XP_INVALID, "stages are opened on the direct lane only");
    if (ffn >= STAGE_MAX_MEMBERS || !(stage_members(&client->plan) >> ffn & 1))
        return xp_fail(XP_INVALID, "FfnAgent %u is in no Execution Group of %.48s", ffn,
                       client->plan.id);
    if (client->opened >> ffn & 1)
        return xp_fail(XP_INVALID, "the stage of FfnAgent %u is open already", ffn);
    cuda_block_t block;
    stage_head_t page;
    XP_TRY(cuda_block_import(client->device, stage_fd, stage_page_bytes(&client->plan), &block));
    xp_status_t status;
    XP_TRY_GOTO(status, fail,
                stage_control_read(&client->control, block.address, sizeof(page),
                                   xp_monotonic_ns() + CLIENT_START_NS, &page));
    XP_TRY_GOTO(status, fail,
                stage_head_check(&page, &client->plan, client->index, client->generation, ffn));
    client->stages[ffn] = block;
    client->opened |= 1u << ffn;
    return XP_OK;
fail:
    cuda_block_destroy(&block);
    return status;
}

cuda_address_t stage_client_live(const stage_client_t *client)
{
    return transport_cuda_client_live(client->transport);
}

xp_status_t stage_client_live_write(stage_client_t *client, const transport_live_t *live,
                                    cuda_stream_t stream)
{
    if (client->plan.atn_dp > 1 && live->dp_rows[client->dp] != live->rows)
        return xp_fail(XP_INVALID, "DP rank %u has %u live rows, its count among all says %u",
                       client->dp, live->rows, live->dp_rows[client->dp]);
    return transport_cuda_client_live_write(client->transport, live, stream);
}

/* ---- launches ------------------------------------------------------------------------------- */
static uint32_t client_blocks(uint64_t bytes)
{
    uint64_t blocks = (bytes + CLIENT_BLOCK_WORK - 1) / CLIENT_BLOCK_WORK;
    return blocks < 1 ? 1 : blocks > CLIENT_BLOCKS_MAX ? CLIENT_BLOCKS_MAX : (uint32_t)blocks;
}

/* Few rows: one small block, since a barrier among more threads costs more than they bring. */
static xp_status_t client_launch(stage_client_t *client, stage_kernel_t kernel, uint64_t bytes,
                                 cuda_stream_t stream, void **parameters)
{
    return cuda_launch(client->device, client->control.kernels[kernel], client_blocks(bytes),
                       bytes <= 4096 ? 256 : 512, stream, parameters);
}

static uint32_t client_call_threads(uint64_t bytes)
{
    /* Four loads of 16 bytes a thread are in flight; the largest block needs a multiprocessor of
     * its own, so it is for rows that are worth one. */
    return bytes <= 4096 ? 256 : bytes <= 2 * CLIENT_BLOCK_WORK ? 512 : 1024;
}

static uint64_t client_row_bytes(const stage_client_t *client)
{
    return xp_dtype_row_bytes(client->geometry.dtype, client->geometry.hidden);
}

static xp_status_t client_check(const stage_client_t *client, uint32_t layer,
                                const transport_tensor_t *input, const transport_tensor_t *output)
{
    XP_TRY(transport_cuda_client_check(client->transport, layer, input, output));
    if (layer >= client->plan.layers)
        return xp_fail(XP_INVALID, "layer %u; %.48s has %u", layer, client->plan.id,
                       client->plan.layers);
    uint32_t missing = stage_members(&client->plan) & ~client->opened;
    if (client->path == STAGE_DIRECT && missing)
        return xp_fail(XP_RETRY, "%.48s: the stage of FfnAgent %u is not open yet", client->plan.id,
                       fabric_group_first(missing));
    return XP_OK;
}

static void client_describe_put(stage_client_t *client, uint32_t layer, uint32_t captured,
                                stage_put_t *put)
{
    uint32_t group = client->plan.layer_group[layer];
    *put = (stage_put_t){.layer = layer,
                         .captured = captured,
                         .dp = client->dp,
                         .dp_size = client->plan.atn_dp,
                         .carries = 1,
                         .max_rows = client->plan.max_rows,
                         .row_bytes = client_row_bytes(client)};
    client->answers = 0;
    if (client->path == STAGE_RELAY) {
        put->relayed = 1;
        put->targets[put->count++] = (stage_target_t){
            .line = client->parts.arena + offsetof(mailbox_arena_t, request),
            .input = client->parts.arena + transport_cuda_input_offset(&client->geometry)};
        return;
    }
    put->gathered = 1;
    put->carries = client->rank % client->plan.atn_tp == 0;
    for (uint32_t left = group; left; left &= left - 1) {
        const cuda_block_t *stage = &client->stages[fabric_group_first(left)];
        put->targets[put->count++] =
            (stage_target_t){.line = stage->address + offsetof(stage_page_t, lines) +
                                     client->rank * sizeof(stage_line_t),
                             .input = stage->address + STAGE_HEADER_BYTES};
    }
    if (fabric_is_direct(&client->plan, group))
        client->answers = (1u << fabric_group_size(group)) - 1;
}

/* Who answers the last put, as the kernels take it. */
static uint32_t client_direct(const stage_client_t *client)
{
    return client->answers | (client->path == STAGE_RELAY ? STAGE_ANSWER_STATUS : 0);
}

static void client_describe_take(const stage_client_t *client, uint32_t captured,
                                 stage_take_t *take)
{
    *take = (stage_take_t){
        .output = client->parts.arena + transport_cuda_output_offset(&client->geometry),
        .partial = client->parts.arena + transport_cuda_partial_offset(&client->geometry),
        .partial_stride = transport_cuda_partial_bytes(&client->geometry) / sizeof(float),
        .members = (uint32_t)__builtin_popcount(client->answers),
        .dtype = client->dtype,
        .narrow = client->geometry.hidden % 8 != 0,
        .captured = captured,
        .row_bytes = client_row_bytes(client)};
}

xp_status_t stage_client_describe(stage_client_t *client, uint32_t layer, uint32_t captured,
                                  struct stage_put *put_out, uint32_t *direct_out,
                                  transport_cuda_parts_t *parts_out)
{
    XP_TRY(client_check(client, layer, NULL, NULL));
    client_describe_put(client, layer, captured, put_out);
    *direct_out = client_direct(client);
    *parts_out = client->parts;
    return XP_OK;
}

xp_status_t stage_client_put(stage_client_t *client, uint32_t layer, cuda_address_t live,
                             const transport_tensor_t *input, cuda_stream_t stream)
{
    XP_TRY(client_check(client, layer, input, NULL));
    stage_put_t put;
    client_describe_put(client, layer, (uint32_t)input->rows, &put);
    if (!live)
        live = stage_client_live(client);
    const void *data = input->data;
    void *parameters[] = {&put, &client->parts.state, &live, &data};
    uint64_t bytes = put.carries ? put.captured * put.row_bytes : 0;
    return client_launch(client, STAGE_KERNEL_PUT, bytes, stream, parameters);
}

xp_status_t stage_client_wait(stage_client_t *client, cuda_stream_t stream)
{
    XP_TRY(client_check(client, 0, NULL, NULL));
    uint32_t direct = client_direct(client);
    void *parameters[] = {&client->parts.arena, &client->parts.state, &direct,
                          &client->parts.patience};
    return client_launch(client, STAGE_KERNEL_WAIT, 0, stream, parameters);
}

xp_status_t stage_client_take(stage_client_t *client, const transport_tensor_t *output,
                              cuda_stream_t stream)
{
    XP_TRY(client_check(client, 0, NULL, output));
    stage_take_t take;
    client_describe_take(client, (uint32_t)output->rows, &take);
    void *data = output->data;
    void *parameters[] = {&take, &client->parts.state, &data};
    return client_launch(client, STAGE_KERNEL_TAKE, take.captured * take.row_bytes, stream,
                         parameters);
}

xp_status_t stage_client_call(stage_client_t *client, uint32_t layer, cuda_address_t live,
                              const transport_tensor_t *input, const transport_tensor_t *output,
                              cuda_stream_t stream)
{
    XP_TRY(client_check(client, layer, input, output));
    uint64_t bytes = input->rows * client_row_bytes(client);
    if (bytes > client->call_bytes) {
        XP_TRY(stage_client_put(client, layer, live, input, stream));
        XP_TRY(stage_client_wait(client, stream));
        return stage_client_take(client, output, stream);
    }
    stage_put_t put;
    stage_take_t take;
    client_describe_put(client, layer, (uint32_t)input->rows, &put);
    client_describe_take(client, (uint32_t)output->rows, &take);
    if (!live)
        live = stage_client_live(client);
    uint32_t direct = client_direct(client);
    const void *from = input->data;
    void *to = output->data;
    void *parameters[] = {&put, &take,   &client->parts.arena,   &client->parts.state, &live, &from,
                          &to,  &direct, &client->parts.patience};
    return cuda_launch(client->device, client->control.kernels[STAGE_KERNEL_CALL], 1,
                       client_call_threads(bytes), stream, parameters);
}

xp_status_t stage_client_finish(stage_client_t *client, uint64_t deadline_ns)
{
    return transport_cuda_client_finish(client->transport, deadline_ns);
}

xp_status_t stage_client_close(stage_client_t *client, xp_status_t reason)
{
    return transport_cuda_client_close(client->transport, reason);
}

void stage_client_pause(stage_client_t *client, bool paused)
{
    transport_cuda_client_pause(client->transport, paused);
}

void stage_client_end(stage_client_t *client, xp_status_t reason)
{
    transport_cuda_client_end(client->transport, reason);
}

xp_status_t stage_client_state_copy(const stage_client_t *client, transport_device_state_t *to,
                                    cuda_stream_t stream)
{
    return CUDA_CALL(client->device->driver, cuMemcpyDtoHAsync, to, client->parts.state,
                     sizeof(*to), stream);
}

xp_status_t stage_client_counters(stage_client_t *client, uint64_t deadline_ns,
                                  stage_client_counters_t *counters_out)
{
    transport_device_state_t state;
    XP_TRY(transport_cuda_client_state(client->transport, deadline_ns, &state));
    *counters_out = (stage_client_counters_t){.requests = state.requests,
                                              .rows = state.total_rows,
                                              .looks = state.looks,
                                              .wait_ns = state.wait_ns};
    return XP_OK;
}
