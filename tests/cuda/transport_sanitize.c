/* SPDX-License-Identifier: MIT */
/*
 * All kernels of the CUDA Transport, one after the other, for compute-sanitizer: it goes neither
 * with MPS, nor with memory that is mapped while a kernel runs, nor with kernels that wait for each
 * other. So everything is mapped first, over a table made by hand, and the resident kernel is
 * launched between put and wait and leaves after one answer. What waits by itself (call) finds its
 * answer published ahead.
 */
#include <stddef.h>
#include <string.h>
#include <unistd.h>

#include "base/memfd.h"
#include "kit.h"
#include "transport/arena.h"

#define WIDTH   1000 /* rows of 2000 bytes: with and without whole 16-byte pieces */
#define ROWS    40
#define LIMIT_S 30.0

static kit_t kit;
static transport_cuda_life_t life;
static transport_cuda_client_t *client;
static cuda_block_t arena;
static cuda_address_t in, out, table_at, state_at;
static transport_resident_t table;
static uint16_t values[ROWS * WIDTH];
static const transport_geometry_t geometry = {
    .hidden = WIDTH, .max_rows = ROWS, .dtype = XP_DTYPE_BF16, .dp_size = 1};

static void stream_idle(void)
{
    xp_clock_t clock = xp_clock_system();
    CHECK_OK(cuda_stream_wait(&kit.device, kit.stream, &clock, kit_in(LIMIT_S)));
}

static void make_table(void)
{
    transport_slot_t *slot = &table.slot[1];
    table.magic = TRANSPORT_RESIDENT_MAGIC;
    table.slots = 2;
    table.own_life = 1;
    slot->wanted = transport_slot_word(1, TRANSPORT_SLOT_ATTACHED);
    slot->hidden = WIDTH;
    slot->max_rows = ROWS;
    slot->dp_size = 1;
    slot->life = 1;
    slot->arena = arena.address;
    slot->row_bytes = transport_row_bytes(&geometry);
    slot->input_offset = transport_arena_input_offset(&geometry);
    slot->output_offset = transport_arena_output_offset(&geometry);
}

/* The resident kernel starts from the table each time, as an AtnAgent that comes anew. */
static void answer_once(void)
{
    void *parameters[] = {&table_at, &life.address, &kit.hold};
    CHECK_OK(cuda_launch(&kit.device, kit.kernels[KIT_ECHO_ONCE], 1, (table.slots + 1) * 32,
                         kit.stream, parameters));
}

static void check_output(uint32_t layer, uint32_t captured, uint32_t live, uint32_t off)
{
    CHECK_OK(transport_cuda_client_finish(client, kit_in(LIMIT_S)));
    kit_read(&kit, out + off * 2, values, captured * WIDTH * 2);
    for (uint32_t i = 0; i < (live < captured ? live : captured) * WIDTH; i++)
        CHECK(values[i] == (uint16_t)(kit_value(layer, i) + layer + 1));
}

static void check(uint32_t layer, uint32_t captured, uint32_t live, uint32_t off)
{
    transport_tensor_t input = kit_tensor(in + off * 2, captured, WIDTH);
    transport_tensor_t output = kit_tensor(out + off * 2, captured, WIDTH);
    transport_live_t record = {.rows = live};
    for (uint32_t i = 0; i < captured * WIDTH; i++)
        values[i] = kit_value(layer, i);
    kit_write(&kit, in + off * 2, values, captured * WIDTH * 2);
    kit_write(&kit, table_at, &table, sizeof(table));
    CHECK_OK(transport_cuda_client_live_write(client, &record, kit.stream));
    CHECK_OK(transport_cuda_client_put(client, layer, 0, &input, kit.stream));
    answer_once();
    CHECK_OK(transport_cuda_client_wait(client, kit.stream));
    CHECK_OK(transport_cuda_client_take(client, &output, kit.stream));
    stream_idle();
    check_output(layer, captured, live, off);

    /* The same in one launch; the output rows of the last answer are those of this one. */
    if (captured * WIDTH * 2 > 16384)
        return;
    void *parameters[] = {&arena.address, &state_at};
    CHECK_OK(cuda_launch(&kit.device, kit.kernels[KIT_ANSWER_AHEAD], 1, 1, kit.stream, parameters));
    CHECK_OK(transport_cuda_client_call(client, layer, 0, &input, &output, kit.stream));
    stream_idle();
    check_output(layer, captured, live, off);
}

int main(void)
{
    int life_fd, fd;
    setvbuf(stdout, NULL, _IOLBF, 0);
    kit_open(&kit, 1 << 20);
    CHECK_OK(transport_life_make(&life_fd));
    CHECK_OK(transport_cuda_life_open(&kit.device, life_fd, 1, &life));
    CHECK_OK(
        transport_cuda_client_create(&kit.device, &geometry, &life, 2 * XP_NS_PER_S, 0, &client));
    CHECK_OK(transport_cuda_client_export(client, &fd));
    CHECK_OK(cuda_block_import(&kit.device, fd, transport_cuda_arena_bytes(&kit.device, &geometry),
                               &arena));
    close(fd);
    in = kit_alloc(&kit, sizeof(values) + 16);
    out = kit_alloc(&kit, sizeof(values) + 16);
    table_at = kit_alloc(&kit, sizeof(table));
    state_at = transport_cuda_client_live(client) - 256;
    make_table();

    const uint32_t rows[] = {1, 2, 8, 9, ROWS};
    for (uint32_t r = 0; r < 5; r++) {
        check(r, rows[r], rows[r], 0);
        check(r + 10, rows[r], rows[r] / 2, 0);
        check(r + 20, rows[r], rows[r], 1);
    }
    /* A refusal, with its poison, by both kinds of launch. */
    transport_tensor_t input = kit_tensor(in, 2, WIDTH), output = kit_tensor(out, 2, WIDTH);
    kit_write(&kit, table_at, &table, sizeof(table));
    CHECK_OK(transport_cuda_client_put(client, 1000, 0, &input, kit.stream));
    answer_once();
    CHECK_OK(transport_cuda_client_wait(client, kit.stream));
    CHECK_OK(transport_cuda_client_take(client, &output, kit.stream));
    CHECK_OK(transport_cuda_client_call(client, 1, 0, &input, &output, kit.stream));
    stream_idle();
    CHECK(transport_cuda_client_finish(client, kit_in(LIMIT_S)) == XP_INVALID);
    check(1, 2, 2, 0);

    transport_cuda_client_destroy(client);
    cuda_block_destroy(&arena);
    kit_free(&kit, table_at);
    kit_free(&kit, in);
    kit_free(&kit, out);
    transport_cuda_life_close(&life);
    close(life_fd);
    kit_close(&kit);
    printf("ok transport_sanitize\n");
    return 0;
}
