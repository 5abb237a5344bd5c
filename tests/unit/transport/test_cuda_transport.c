/* SPDX-License-Identifier: MIT */
/*
 * The CUDA Transport's host side and the decisions of its kernels, over the fake driver: kernels
 * are played by the same functions of transport/cuda_device.h that the GPU runs.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "../cuda/fake_driver.h"
#include "base/clock.h"
#include "transport/cuda_control.h"

#define HIDDEN 8
#define ROWS   4
#define SOON   (xp_monotonic_ns() + 5 * XP_NS_PER_S)

/* In place of the device code, so that these tests need no nvcc. */
static const unsigned char code[1];
extern const cuda_image_t cuda_image_transport_cuda_kernels;
const cuda_image_t cuda_image_transport_cuda_kernels = {"transport_cuda_kernels", code, code + 1};

static const transport_geometry_t geometry = {
    .hidden = HIDDEN, .max_rows = ROWS, .dtype = XP_DTYPE_BF16, .dp_size = 1};

/* ---- kernels -------------------------------------------------------------------------------- */
static void run_put(const fake_launch_t *launch)
{
    mailbox_arena_t *arena = fake_pointer(launch, 0);
    transport_device_state_t *state = fake_pointer(launch, 1);
    const transport_live_t *live = fake_pointer(launch, 2);
    uint32_t captured = (uint32_t)fake_argument(launch, 4);
    if (state->status == XP_OK && state->phase == TRANSPORT_PHASE_IDLE)
        memcpy((char *)arena + fake_argument(launch, 7), fake_pointer(launch, 5),
               transport_device_rows(live, captured) * fake_argument(launch, 6));
    transport_device_put(arena, state, live, (uint32_t)fake_argument(launch, 3), captured);
}

static uint64_t wait_looks, wait_elapsed_ns;
static void run_wait(const fake_launch_t *launch)
{
    transport_device_state_t *state = fake_pointer(launch, 1);
    if (transport_device_wait_begin(state))
        return;
    transport_patience_t patience;
    transport_clock_t clock;
    memcpy(&patience, launch->values[2], sizeof(patience));
    transport_device_wait_start(&clock, 0);
    /* Time passes by looks: a wait without an answer ends by its limit. */
    for (uint64_t i = 0; !transport_device_wait_look(fake_pointer(launch, 0), state); i++)
        if (i >= wait_looks &&
            transport_device_wait_life(&patience, state, &clock, wait_elapsed_ns))
            break;
}

static void run_take(const fake_launch_t *launch)
{
    transport_device_state_t *state = fake_pointer(launch, 1);
    if (transport_device_take_allowed(state))
        memcpy(fake_pointer(launch, 3), (char *)fake_pointer(launch, 0) + fake_argument(launch, 5),
               state->rows * fake_argument(launch, 4));
    else
        memset(fake_pointer(launch, 3), 0xff, fake_argument(launch, 2) * fake_argument(launch, 4));
    transport_device_take(state);
}

static void step(void);
static void part(fake_launch_t *to, const fake_kernel_t *kernel, const fake_launch_t *from,
                 const int *arguments, int count)
{
    memset(to, 0, sizeof(*to));
    to->kernel = kernel;
    for (int i = 0; i < count; i++)
        memcpy(to->values[i], from->values[arguments[i]], FAKE_VALUE_MAX);
}
static const fake_kernel_t kernels[12];
static void run_call(const fake_launch_t *launch)
{
    static fake_launch_t one;
    part(&one, &kernels[0], launch, (const int[]){0, 1, 2, 3, 4, 5, 7, 8}, 8);
    run_put(&one);
    step();
    part(&one, &kernels[1], launch, (const int[]){0, 1, 10}, 3);
    run_wait(&one);
    part(&one, &kernels[2], launch, (const int[]){0, 1, 4, 6, 7, 9}, 6);
    run_take(&one);
}

static void run_arena_start(const fake_launch_t *launch)
{
    memcpy(fake_pointer(launch, 0), launch->values[1], sizeof(mailbox_arena_t));
}
static void run_close(const fake_launch_t *launch)
{
    mailbox_close(fake_pointer(launch, 0), (uint32_t)fake_argument(launch, 1));
}
static void run_live_write(const fake_launch_t *launch)
{
    memcpy(fake_pointer(launch, 0), launch->values[1], sizeof(transport_live_t));
}
static void run_recover(const fake_launch_t *launch)
{
    transport_device_state_t *state = fake_pointer(launch, 0);
    if (state->phase == TRANSPORT_PHASE_IDLE)
        state->status = XP_OK;
}
static void run_carry(const fake_launch_t *launch)
{
    mailbox_arena_t *behind = fake_pointer(launch, 0), *ahead = fake_pointer(launch, 1);
    uint64_t offset = fake_argument(launch, 2);
    memcpy((char *)behind + offset, (char *)ahead + offset, fake_argument(launch, 3));
    mailbox_response_publish(behind, fake_argument(launch, 4), (uint32_t)fake_argument(launch, 5));
}
static void run_slot_describe(const fake_launch_t *launch)
{
    transport_slot_t value, *slot = fake_pointer(launch, 0);
    memcpy(&value, launch->values[1], sizeof(value));
    memcpy(slot, &value, offsetof(transport_slot_t, pad0));
    slot->requests = slot->total_rows = 0;
    slot->ended = 0;
    slot->wanted = value.wanted;
}
static void run_post(const fake_launch_t *launch)
{
    PROTOCOL_STORE_RELEASE((uint32_t *)fake_pointer(launch, 0), (uint32_t)fake_argument(launch, 1));
}

/* The resident kernel, one step at each of the host's reads. */
static transport_resident_t *table;
static bool silent;
static void run_resident(const fake_launch_t *launch)
{
    table = fake_pointer(launch, 0);
    assert_int_equal(table->magic, TRANSPORT_RESIDENT_MAGIC);
    assert_int_equal(launch->threads, (table->slots + 1) * 32);
    assert_int_equal(launch->blocks, 1);
}
static void step_slot(transport_slot_t *slot)
{
    mailbox_arena_t *arena = (mailbox_arena_t *)(uintptr_t)slot->arena;
    mailbox_request_t request;
    if (transport_slot_turn(slot->wanted) != transport_slot_turn(slot->now)) {
        if (transport_slot_state(slot->wanted) == TRANSPORT_SLOT_ATTACHED)
            slot->answered = PROTOCOL_LOAD_ACQUIRE(&arena->response.sequence);
        slot->now = slot->wanted;
    }
    if (transport_slot_state(slot->now) != TRANSPORT_SLOT_ATTACHED)
        return;
    mailbox_look_t look = mailbox_request_read(arena, slot->answered, &request);
    if (look == MAILBOX_LIVE && !transport_slot_request_valid(slot, &request))
        look = MAILBOX_NONSENSE;
    if (mailbox_closed(arena)) {
        slot->reason = mailbox_closed(arena);
        slot->now = transport_slot_word(transport_slot_turn(slot->now), TRANSPORT_SLOT_DROPPED);
    } else if (look == MAILBOX_NONSENSE) {
        mailbox_close(arena, XP_PEER);
        slot->reason = XP_PEER;
        slot->now = transport_slot_word(transport_slot_turn(slot->now), TRANSPORT_SLOT_DROPPED);
    } else if (look == MAILBOX_LIVE && request.layer < 100) {
        const uint16_t *in = (const uint16_t *)((char *)arena + slot->input_offset);
        uint16_t *out = (uint16_t *)((char *)arena + slot->output_offset);
        for (uint64_t i = 0; i < request.rows * slot->row_bytes / 2; i++)
            out[i] = (uint16_t)(in[i] + request.layer + 1);
        slot->answered = request.sequence;
        slot->requests++;
        slot->total_rows += request.rows;
        mailbox_response_publish(arena, request.sequence,
                                 request.layer < 50   ? XP_OK
                                 : request.layer < 60 ? XP_INVALID
                                                      : 99);
    }
}
static void step(void)
{
    for (uint32_t i = 0; table && !silent && i < table->slots; i++)
        step_slot(&table->slot[i]);
}
static void step_after_put(const fake_launch_t *launch)
{
    if (launch->kernel->run == run_put)
        step();
}
static bool resident_busy(cuda_stream_t stream)
{
    return false;
}

static const fake_kernel_t kernels[12] = {
    {"transport_put", run_put, {8, 8, 8, 4, 4, 8, 8, 8}},
    {"transport_wait", run_wait, {8, 8, sizeof(transport_patience_t)}},
    {"transport_take", run_take, {8, 8, 4, 8, 8, 8}},
    {"transport_arena_start", run_arena_start, {8, sizeof(mailbox_arena_t)}},
    {"transport_close", run_close, {8, 4}},
    {"transport_live_write", run_live_write, {8, sizeof(transport_live_t)}},
    {"transport_recover", run_recover, {8}},
    {"transport_slot_describe", run_slot_describe, {8, sizeof(transport_slot_t)}},
    {"transport_post", run_post, {8, 4}},
    {"resident", run_resident, {8, 8, 8}},
    {"transport_call", run_call, {8, 8, 8, 4, 4, 8, 8, 8, 8, 8, sizeof(transport_patience_t)}},
    {"transport_carry", run_carry, {8, 8, 8, 8, 8, 4}},
};
#define RESIDENT ((cuda_function_t)(uintptr_t)&kernels[9])

/* ---- the pair ------------------------------------------------------------------------------- */
static cuda_device_t device;
static int life_fd;
static transport_cuda_life_t life;
static transport_cuda_client_t *client;
static transport_cuda_server_t *server;
static uint32_t slot;
static uint16_t in[ROWS * HIDDEN], out[ROWS * HIDDEN];

static xp_status_t make_server(void)
{
    return transport_cuda_server_create(&device, &life, 2, RESIDENT, 0, &server);
}
static xp_status_t make_client(void)
{
    return transport_cuda_client_create(&device, &geometry, &life, 100, 1000, &client);
}
static xp_status_t attach(void)
{
    int fd;
    XP_TRY(transport_cuda_client_export(client, &fd));
    xp_status_t status = transport_cuda_server_attach(server, fd, &geometry, 6, SOON, &slot);
    close(fd);
    return status;
}

static int setup(void **state)
{
    fake_reset(kernels, 12);
    fake.before_read = step;
    fake.after_launch = step_after_put;
    fake.busy = resident_busy;
    table = NULL;
    silent = false;
    wait_looks = 0;
    wait_elapsed_ns = 0;
    assert_int_equal(cuda_device_open(&fake_driver, 0, &device), XP_OK);
    assert_int_equal(transport_life_make(&life_fd), XP_OK);
    assert_int_equal(transport_cuda_life_open(&device, life_fd, 6, &life), XP_OK);
    assert_int_equal(make_server(), XP_OK);
    assert_int_equal(make_client(), XP_OK);
    assert_int_equal(attach(), XP_OK);
    return 0;
}

static int teardown(void **state)
{
    transport_cuda_client_destroy(client);
    transport_cuda_server_destroy(server);
    transport_cuda_life_close(&life);
    close(life_fd);
    cuda_device_close(&device);
    return fake_objects() == 0 && fake.contexts == 0 ? 0 : -1;
}

static transport_tensor_t tensor(uint16_t *data, uint32_t rows)
{
    return (transport_tensor_t){.data = data,
                                .dtype = XP_DTYPE_BF16,
                                .rank = 2,
                                .rows = rows,
                                .width = HIDDEN,
                                .row_stride = HIDDEN};
}

static void says(const char *text)
{
    if (!strstr(xp_error_last()->text, text))
        fail_msg("'%s' does not say '%s'", xp_error_last()->text, text);
}

static xp_status_t call(uint32_t layer, uint32_t captured, uint32_t live)
{
    transport_live_t record = {.rows = live, .kind = TRANSPORT_PREFILL, .slo_deadline_ns = 5};
    transport_tensor_t input = tensor(in, captured), output = tensor(out, captured);
    for (int i = 0; i < ROWS * HIDDEN; i++) {
        in[i] = (uint16_t)(1000 + i);
        out[i] = 7;
    }
    XP_TRY(transport_cuda_client_live_write(client, &record, NULL));
    XP_TRY(transport_cuda_client_call(client, layer, 0, &input, &output, NULL));
    return transport_cuda_client_finish(client, SOON);
}

static void check_rows(uint32_t layer, uint32_t rows)
{
    for (uint32_t i = 0; i < ROWS * HIDDEN; i++)
        assert_int_equal(out[i], i < rows * HIDDEN ? 1000 + i + layer + 1 : 7);
}

/* ---- tests ---------------------------------------------------------------------------------- */
static void test_calls(void **state)
{
    transport_device_state_t seen;
    transport_cuda_report_t report;
    uint32_t calls = 0, rows = 0;
    for (uint32_t captured = 0; captured <= ROWS; captured++)
        for (uint32_t live = 0; live <= ROWS; live++) {
            uint32_t moved = live < captured ? live : captured;
            assert_int_equal(call(calls, captured, live), XP_OK);
            check_rows(calls, moved);
            calls++;
            rows += moved;
        }
    assert_int_equal(transport_cuda_client_state(client, SOON, &seen), XP_OK);
    assert_int_equal(seen.sequence, calls);
    assert_int_equal(seen.requests, calls);
    assert_int_equal(seen.total_rows, rows);
    assert_int_equal(transport_cuda_server_report(server, slot, SOON, &report), XP_OK);
    assert_int_equal(report.requests, calls);
    assert_int_equal(report.rows, rows);
    assert_int_equal(report.now, TRANSPORT_SLOT_ATTACHED);
}

/* More rows than one block moves: three launches, the same result. */
static void test_many_rows(void **state)
{
    enum { WIDE = 4096, MANY = 5 };
    static uint16_t from[MANY * WIDE], to[MANY * WIDE];
    const transport_geometry_t wide = {
        .hidden = WIDE, .max_rows = MANY, .dtype = XP_DTYPE_F16, .dp_size = 1};
    transport_cuda_client_t *many;
    uint32_t many_slot;
    int fd;
    assert_int_equal(transport_cuda_client_create(&device, &wide, &life, 100, 0, &many), XP_OK);
    assert_int_equal(transport_cuda_client_export(many, &fd), XP_OK);
    assert_int_equal(transport_cuda_server_attach(server, fd, &wide, 6, SOON, &many_slot), XP_OK);
    close(fd);
    for (uint32_t rows = 1; rows <= MANY; rows++) {
        transport_tensor_t input = tensor(from, rows), output = tensor(to, rows);
        transport_live_t record = {.rows = rows};
        input.width = input.row_stride = output.width = output.row_stride = WIDE;
        input.dtype = output.dtype = XP_DTYPE_F16;
        for (uint32_t i = 0; i < MANY * WIDE; i++)
            from[i] = (uint16_t)(i * 7 + rows);
        uint64_t calls = fake.calls;
        assert_int_equal(transport_cuda_client_live_write(many, &record, NULL), XP_OK);
        assert_int_equal(transport_cuda_client_call(many, rows, 0, &input, &output, NULL), XP_OK);
        assert_int_equal(fake.calls - calls, rows * WIDE * 2 > 16384 ? 4 : 2);
        assert_int_equal(transport_cuda_client_finish(many, SOON), XP_OK);
        for (uint32_t i = 0; i < rows * WIDE; i++)
            assert_int_equal(to[i], (uint16_t)(from[i] + rows + 1));
    }
    assert_int_equal(transport_cuda_server_detach(server, many_slot, SOON), XP_OK);
    transport_cuda_client_destroy(many);
}

static void test_graph(void **state)
{
    cuda_stream_t stream;
    cuda_graph_exec_t graph;
    transport_tensor_t input = tensor(in, ROWS), output = tensor(out, ROWS);
    assert_int_equal(cuda_stream_create(&device, false, &stream), XP_OK);
    assert_int_equal(cuda_capture_begin(&device, stream), XP_OK);
    for (uint32_t layer = 0; layer < 48; layer += 2) {
        assert_int_equal(transport_cuda_client_call(client, layer, 0, &input, &output, stream),
                         XP_OK);
        assert_int_equal(transport_cuda_client_call(client, layer + 1, 0, &output, &input, stream),
                         XP_OK);
    }
    assert_int_equal(cuda_capture_end(&device, stream, &graph), XP_OK);
    for (uint32_t live = 0; live <= ROWS; live++) {
        transport_live_t record = {.rows = live};
        for (int i = 0; i < ROWS * HIDDEN; i++)
            in[i] = (uint16_t)i;
        assert_int_equal(transport_cuda_client_live_write(client, &record, stream), XP_OK);
        assert_int_equal(cuda_graph_launch(&device, graph, stream), XP_OK);
        assert_int_equal(transport_cuda_client_finish(client, SOON), XP_OK);
        for (uint32_t i = 0; i < ROWS * HIDDEN; i++)
            assert_int_equal(in[i], i < live * HIDDEN ? i + 48 * 49 / 2 : i);
    }
    /* A death on the way: the rest of the graph publishes nothing, and the output is poison. */
    transport_device_state_t before, after;
    assert_int_equal(transport_cuda_client_state(client, SOON, &before), XP_OK);
    silent = true;
    life_word_end(&life.page->word[6]);
    assert_int_equal(cuda_graph_launch(&device, graph, stream), XP_OK);
    assert_int_equal(transport_cuda_client_state(client, SOON, &after), XP_OK);
    assert_int_equal(after.sequence, before.sequence + 1);
    assert_int_equal(in[0], 0xffff);
    assert_int_equal(transport_cuda_client_finish(client, SOON), XP_CANCELLED);
    assert_int_equal(transport_cuda_client_call(client, 0, 0, &input, &output, stream),
                     XP_CANCELLED);
    cuda_graph_destroy(&device, graph);
    cuda_stream_destroy(&device, stream);
}

static void test_ends(void **state)
{
    /* An answered error ends the pass, not the client. */
    assert_int_equal(call(50, ROWS, 2), XP_INVALID);
    says("refused request 1");
    for (int i = 0; i < ROWS * HIDDEN; i++)
        assert_int_equal(out[i], 0xffff);
    assert_int_equal(call(1, ROWS, 2), XP_OK);
    check_rows(1, 2);
    /* An unknown status is the AtnAgent's fault, and terminal. */
    assert_int_equal(call(60, ROWS, 2), XP_PEER);
    assert_int_equal(call(1, ROWS, 2), XP_PEER);
}

static void test_timeout(void **state)
{
    wait_looks = 3;
    wait_elapsed_ns = 99;
    assert_int_equal(call(0, ROWS, 2), XP_OK); /* answered in time */
    wait_elapsed_ns = 100;
    assert_int_equal(call(100, ROWS, 2), XP_TIMEOUT);
    says("no answer from the FFN tier to request 2");
    assert_int_equal(call(1, ROWS, 2), XP_TIMEOUT);
}

/* Between two Generations a request waits longer, and the end is told without a launch. */
static void test_pause(void **state)
{
    wait_looks = 3;
    transport_cuda_client_pause(client, true);
    transport_cuda_client_pause(client, true);
    wait_elapsed_ns = 999;
    assert_int_equal(call(0, ROWS, 2), XP_OK);
    transport_cuda_client_pause(client, false);
    wait_elapsed_ns = 99;
    assert_int_equal(call(1, ROWS, 2), XP_OK);
    transport_cuda_client_pause(client, true);
    wait_elapsed_ns = 1000;
    assert_int_equal(call(100, ROWS, 2), XP_TIMEOUT);
    says("no next Generation answered request 3");
}

static void test_notice_end(void **state)
{
    transport_cuda_client_pause(client, true);
    transport_cuda_client_end(client, XP_FATAL);
    transport_cuda_client_end(client, XP_CLOSED);
    transport_cuda_client_pause(client, false);
    assert_int_equal(call(100, ROWS, 2), XP_FATAL);
    says("failure of its Generation");
}

static void test_close(void **state)
{
    assert_int_equal(transport_cuda_server_close(server, slot, XP_FATAL), XP_OK);
    assert_int_equal(transport_cuda_server_close(server, slot, XP_CLOSED),
                     XP_OK); /* the first stays */
    assert_int_equal(call(0, ROWS, 2), XP_FATAL);
    says("failure of its Generation");
    assert_int_equal(transport_cuda_server_close(server, 1, XP_FATAL), XP_INVALID);
}

static void test_misuse(void **state)
{
    transport_tensor_t output = tensor(out, 1);
    assert_int_equal(transport_cuda_client_take(client, &output, NULL), XP_OK);
    assert_int_equal(transport_cuda_client_finish(client, SOON), XP_INVALID);
    assert_int_equal(transport_cuda_client_wait(client, NULL), XP_OK);
    assert_int_equal(transport_cuda_client_finish(client, SOON), XP_INVALID);
    assert_int_equal(call(3, 1, 1), XP_OK);
    /* Two puts in a row: the second would overwrite a live request. */
    silent = true;
    assert_int_equal(transport_cuda_client_put(client, 1, 0, &output, NULL), XP_OK);
    assert_int_equal(transport_cuda_client_put(client, 2, 0, &output, NULL), XP_OK);
    transport_device_state_t seen;
    assert_int_equal(transport_cuda_client_state(client, SOON, &seen), XP_OK);
    assert_int_equal(seen.sequence, 2);
    assert_int_equal(transport_cuda_client_finish(client, SOON), XP_INVALID);
    assert_int_equal(transport_cuda_client_finish(client, SOON), XP_INVALID); /* for good */
}

static void test_next_agent(void **state)
{
    transport_tensor_t input = tensor(in, 2), output = tensor(out, 2);
    assert_int_equal(call(3, 2, 2), XP_OK);
    silent = true;
    transport_live_t record = {.rows = 2};
    assert_int_equal(transport_cuda_client_live_write(client, &record, NULL), XP_OK);
    assert_int_equal(transport_cuda_client_put(client, 4, 0, &input, NULL), XP_OK);
    transport_cuda_server_destroy(server);
    silent = false;
    table = NULL;
    assert_int_equal(make_server(), XP_OK);
    assert_int_equal(attach(), XP_OK); /* finds request 2 unanswered, and answers it */
    assert_int_equal(transport_cuda_client_wait(client, NULL), XP_OK);
    assert_int_equal(transport_cuda_client_take(client, &output, NULL), XP_OK);
    assert_int_equal(transport_cuda_client_finish(client, SOON), XP_OK);
    assert_int_equal(out[0], 1005);
}

static void test_attach(void **state)
{
    int fd;
    uint32_t second, third;
    transport_geometry_t other = geometry;
    assert_int_equal(transport_cuda_client_export(client, &fd), XP_OK);
    other.hidden = HIDDEN * 2;
    assert_int_equal(transport_cuda_server_attach(server, fd, &other, 6, SOON, &second), XP_PEER);
    says("planned are");
    other = geometry;
    other.dtype = XP_DTYPE_F32;
    assert_int_equal(transport_cuda_server_attach(server, fd, &other, 6, SOON, &second),
                     XP_INVALID);
    assert_int_equal(transport_cuda_server_attach(server, fd, &geometry, LIFE_WORDS, SOON, &second),
                     XP_INVALID);
    /* No mailbox in it. */
    cuda_block_t block;
    int plain_fd;
    assert_int_equal(
        cuda_block_create(&device, transport_cuda_arena_bytes(&device, &geometry), &block), XP_OK);
    assert_int_equal(cuda_vmm_export(&device, block.handle, &plain_fd), XP_OK);
    assert_int_equal(transport_cuda_server_attach(server, plain_fd, &geometry, 6, SOON, &second),
                     XP_PEER);
    says("is no Transport arena");
    close(plain_fd);
    cuda_block_destroy(&block);
    /* A warp that does not answer keeps its mapping, and the slot with it, until it does. */
    silent = true;
    assert_int_equal(transport_cuda_server_attach(server, fd, &geometry, 6,
                                                  xp_monotonic_ns() + 2 * XP_NS_PER_MS, &second),
                     XP_TIMEOUT);
    says("does not answer");
    assert_int_equal(transport_cuda_server_attach(server, fd, &geometry, 6, SOON, &third),
                     XP_NO_MEMORY);
    silent = false;
    assert_int_equal(transport_cuda_server_detach(server, 1, SOON), XP_OK);
    assert_int_equal(transport_cuda_server_attach(server, fd, &geometry, 6, SOON, &second), XP_OK);
    assert_int_equal(second, 1);
    assert_int_equal(transport_cuda_server_attach(server, fd, &geometry, 6, SOON, &third),
                     XP_NO_MEMORY);
    assert_int_equal(transport_cuda_server_detach(server, second, SOON), XP_OK);
    assert_int_equal(transport_cuda_server_detach(server, second, SOON), XP_INVALID);
    close(fd);
}

static void test_nonsense(void **state)
{
    /* The record of a request that does not fit, as a peer would write it. */
    transport_tensor_t input = tensor(in, 1);
    transport_cuda_report_t report;
    mailbox_arena_t *arena = (mailbox_arena_t *)(uintptr_t)table->slot[slot].arena;
    silent = true;
    assert_int_equal(transport_cuda_client_put(client, 0, 0, &input, NULL), XP_OK);
    arena->request.rows = ROWS + 1;
    silent = false;
    assert_int_equal(transport_cuda_server_report(server, slot, SOON, &report), XP_OK);
    assert_int_equal(report.now, TRANSPORT_SLOT_DROPPED);
    assert_int_equal(report.reason, XP_PEER);
    assert_int_equal(transport_cuda_client_wait(client, NULL), XP_OK);
    assert_int_equal(transport_cuda_client_finish(client, SOON), XP_PEER);
}

static void test_tensors(void **state)
{
    transport_tensor_t good = tensor(in, 2), bad;
    uint64_t calls = fake.calls;
#define REFUSED(change)                                                                            \
    do {                                                                                           \
        bad = good;                                                                                \
        bad.change;                                                                                \
        assert_int_equal(transport_cuda_client_call(client, 0, 0, &bad, &good, NULL), XP_INVALID); \
        assert_int_equal(transport_cuda_client_call(client, 0, 0, &good, &bad, NULL), XP_INVALID); \
    } while (0)
    REFUSED(dtype = XP_DTYPE_F32);
    REFUSED(rank = 1);
    REFUSED(width = HIDDEN - 1);
    REFUSED(rows = ROWS + 1);
    REFUSED(row_stride = HIDDEN + 1);
    REFUSED(data = NULL);
    REFUSED(data = (char *)in + 1);
#undef REFUSED
    assert_int_equal(transport_cuda_client_put(client, MAILBOX_LAYER_LIMIT, 0, &good, NULL),
                     XP_INVALID);
    transport_live_t live = {.rows = ROWS + 1};
    assert_int_equal(transport_cuda_client_live_write(client, &live, NULL), XP_INVALID);
    live = (transport_live_t){.kind = MAILBOX_KIND_COUNT};
    assert_int_equal(transport_cuda_client_live_write(client, &live, NULL), XP_INVALID);
    assert_int_equal(fake.calls, calls); /* nothing was launched */
    transport_geometry_t wrong = geometry;
    transport_cuda_client_t *none;
    wrong.dtype = XP_DTYPE_F32;
    assert_int_equal(transport_cuda_client_create(&device, &wrong, &life, 1, 0, &none), XP_INVALID);
    wrong = geometry;
    wrong.max_rows = MAILBOX_MAX_ROWS + 1;
    assert_int_equal(transport_cuda_client_create(&device, &wrong, &life, 1, 0, &none), XP_INVALID);
}

/* Each driver call of creating a client, a server and attaching fails in turn. */
static bool whole_failed;
static xp_status_t whole(void)
{
    transport_cuda_client_t *first_client = client;
    transport_cuda_server_t *first_server = server;
    transport_resident_t *first_table = table;
    client = NULL;
    server = NULL;
    table = NULL;
    xp_status_t status = make_server();
    if (status == XP_OK)
        status = make_client();
    if (status == XP_OK)
        status = attach();
    xp_error_t error = *xp_error_last();
    whole_failed = fake.fail_at == 0;
    fake.fail_at = 0;
    transport_cuda_client_destroy(client);
    transport_cuda_server_destroy(server);
    client = first_client;
    server = first_server;
    table = first_table;
    xp_fail(status, "%s", error.text);
    return status;
}

static void test_ladders(void **state)
{
    int objects = fake_objects();
    uint64_t n = 1;
    for (;; n++) {
        assert_true(n < 400);
        fake.fail_at = n;
        xp_status_t status = whole();
        assert_int_equal(fake_objects(), objects);
        if (!whole_failed) {
            assert_int_equal(status, XP_OK);
            break;
        }
        assert_int_not_equal(status, XP_OK);
        says(fake.failed);
    }
    assert_true(n > 40);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_calls),   TEST(test_many_rows), TEST(test_graph),      TEST(test_ends),
        TEST(test_timeout), TEST(test_pause),     TEST(test_notice_end), TEST(test_close),
        TEST(test_misuse),  TEST(test_attach),    TEST(test_next_agent), TEST(test_nonsense),
        TEST(test_tensors), TEST(test_ladders),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
