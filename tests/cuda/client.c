/* SPDX-License-Identifier: MIT */
/* Both ends of a test's Instance. Every wait has a limit. */
#include "client.h"

#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/memfd.h"
#include "transport/arena.h"

#define SAMPLES_MAX  200000u
#define PASS_LIMIT_S 60.0

enum { DO_LOOP = 1, DO_GRAPH, DO_EAGER, DO_ROUND_TRIPS, DO_PING_PONG, DO_PUT, DO_EXIT };
typedef struct job {
    uint32_t what, count;
} job_t;

typedef struct self {
    kit_t kit;
    client_setup_t setup;
    transport_cuda_life_t life;
    transport_cuda_client_t *client;
    cuda_address_t in, out, samples, wrong;
    cuda_graph_exec_t graph;
    cuda_event_t start, end;
    board_line_t *line;
    uint32_t life_index;
    uint16_t *values;
} self_t;

static void self_idle(self_t *self)
{
    xp_clock_t clock = xp_clock_system();
    CHECK_OK(cuda_stream_wait(&self->kit.device, self->kit.stream, &clock, kit_in(PASS_LIMIT_S)));
}

static void self_live(self_t *self, uint32_t rows)
{
    transport_live_t live = {.rows = rows};
    CHECK_OK(transport_cuda_client_live_write(self->client, &live, self->kit.stream));
}

static void self_layers(self_t *self, uint32_t layers)
{
    const uint32_t hidden = self->setup.geometry.hidden, rows = self->setup.rows;
    for (uint32_t layer = 0; layer < layers; layer++) {
        transport_tensor_t in = kit_tensor(layer % 2 ? self->out : self->in, rows, hidden);
        transport_tensor_t out = kit_tensor(layer % 2 ? self->in : self->out, rows, hidden);
        void *parameters[] = {&self->setup.compute_ns};
        if (self->setup.compute_ns)
            CHECK_OK(cuda_launch(&self->kit.device, self->kit.kernels[KIT_COMPUTE], 1, 1,
                                 self->kit.stream, parameters));
        CHECK_OK(transport_cuda_client_call(self->client, layer, 0, &in, &out, self->kit.stream));
    }
}

/* One checked replay with `live` rows; returns elements that are wrong. */
static xp_status_t self_replay(self_t *self, uint64_t seed, uint32_t live, uint64_t *wrong)
{
    const uint64_t count = (uint64_t)live * self->setup.geometry.hidden;
    const uint16_t add = CLIENT_LAYERS * (CLIENT_LAYERS + 1) / 2;
    for (uint64_t i = 0; i < count; i++)
        self->values[i] = kit_value(seed, i);
    kit_write(&self->kit, self->in, self->values, count * 2);
    self_live(self, live);
    CHECK_OK(cuda_graph_launch(&self->kit.device, self->graph, self->kit.stream));
    self_idle(self);
    XP_TRY(transport_cuda_client_finish(self->client, kit_in(10)));
    kit_read(&self->kit, self->in, self->values, count * 2);
    for (uint64_t i = 0; i < count; i++)
        *wrong += self->values[i] != (uint16_t)(kit_value(seed, i) + add);
    return XP_OK;
}

static void self_loop(self_t *self)
{
    uint64_t seed = (uint64_t)self->setup.seed << 32;
    while (!__atomic_load_n(&self->line->stop, __ATOMIC_ACQUIRE)) {
        uint64_t wrong = 0;
        uint32_t live = 1 + (uint32_t)(kit_value(seed, 1) % self->setup.rows);
        xp_status_t status = self_replay(self, seed++, live, &wrong);
        if (status != XP_OK) {
            fprintf(stderr, "client %u: %s\n", self->life_index, xp_error_last()->text);
            __atomic_store_n(&self->line->ended, (uint32_t)status + 1, __ATOMIC_RELEASE);
            return;
        }
        __atomic_fetch_add(&self->line->wrong, wrong, __ATOMIC_RELAXED);
        __atomic_fetch_add(&self->line->replays, 1, __ATOMIC_RELEASE);
    }
}

static float self_elapsed_us(self_t *self)
{
    float ms;
    CHECK_OK(CUDA_CALL(self->kit.device.driver, cuEventElapsedTime, &ms, self->start, self->end));
    return ms * 1000;
}

static void self_mark(self_t *self, cuda_event_t event)
{
    CHECK_OK(CUDA_CALL(self->kit.device.driver, cuEventRecord, event, self->kit.stream));
}

static client_times_t self_graph_times(self_t *self, uint32_t count, bool eager)
{
    client_times_t times = {0};
    uint32_t *samples = calloc(count, sizeof(*samples));
    CHECK(samples);
    for (uint32_t i = 0; i < count + 20; i++) {
        self_live(self, self->setup.rows);
        self_mark(self, self->start);
        if (eager)
            self_layers(self, CLIENT_LAYERS);
        else
            CHECK_OK(cuda_graph_launch(&self->kit.device, self->graph, self->kit.stream));
        self_mark(self, self->end);
        self_idle(self);
        if (i >= 20)
            samples[i - 20] = (uint32_t)(self_elapsed_us(self) * 1000);
    }
    CHECK_OK(transport_cuda_client_finish(self->client, kit_in(10)));
    times.each = kit_summarise(samples, count);
    times.per_layer_us = times.each.p50_us / CLIENT_LAYERS;
    times.done = (uint64_t)count * CLIENT_LAYERS;
    free(samples);
    return times;
}

static client_times_t self_kernel_samples(self_t *self, uint32_t count)
{
    uint32_t kept = count < SAMPLES_MAX ? count : SAMPLES_MAX;
    uint32_t *samples = calloc(kept, sizeof(*samples)), wrong;
    client_times_t times = {.done = count};
    CHECK(samples);
    self_idle(self);
    kit_read(&self->kit, self->samples, samples, kept * 4ull);
    kit_read(&self->kit, self->wrong, &wrong, 4);
    times.wrong = wrong;
    times.each = kit_summarise(samples, kept);
    free(samples);
    return times;
}

static client_times_t self_round_trips(self_t *self, uint32_t count)
{
    uint32_t zero = 0, limit = SAMPLES_MAX;
    uint64_t row_bytes = transport_row_bytes(&self->setup.geometry);
    uint64_t input = transport_arena_input_offset(&self->setup.geometry);
    uint64_t output = transport_arena_output_offset(&self->setup.geometry);
    cuda_address_t live = transport_cuda_client_live(self->client), state = live - 256;
    transport_patience_t patience = transport_cuda_client_parts(self->client).patience;
    cuda_block_t arena;
    patience.limit_ns = 10 * XP_NS_PER_S;
    int fd;
    CHECK_OK(transport_cuda_client_export(self->client, &fd));
    CHECK_OK(cuda_block_import(&self->kit.device, fd,
                               transport_cuda_arena_bytes(&self->kit.device, &self->setup.geometry),
                               &arena));
    close(fd);
    kit_write(&self->kit, self->wrong, &zero, 4);
    self_live(self, self->setup.rows);
    void *parameters[] = {&arena.address, &state,    &live,          &count, &row_bytes,  &input,
                          &output,        &patience, &self->samples, &limit, &self->wrong};
    CHECK_OK(cuda_launch(&self->kit.device, self->kit.kernels[KIT_ROUND_TRIPS], 1, 256,
                         self->kit.stream, parameters));
    client_times_t times = self_kernel_samples(self, count);
    CHECK_OK(transport_cuda_client_finish(self->client, kit_in(10)));
    transport_device_state_t after;
    CHECK_OK(transport_cuda_client_state(self->client, kit_in(10), &after));
    times.done = after.requests;
    cuda_block_destroy(&arena);
    return times;
}

static client_times_t self_ping_pong(self_t *self, uint32_t count)
{
    uint32_t zero = 0, first = 1;
    cuda_block_t arena;
    int fd;
    CHECK(count <= SAMPLES_MAX);
    CHECK_OK(transport_cuda_client_export(self->client, &fd));
    CHECK_OK(cuda_block_import(&self->kit.device, fd,
                               transport_cuda_arena_bytes(&self->kit.device, &self->setup.geometry),
                               &arena));
    close(fd);
    kit_write(&self->kit, self->wrong, &zero, 4);
    cuda_address_t words = arena.address + transport_arena_output_offset(&self->setup.geometry);
    void *parameters[] = {&words, &count, &first, &self->samples};
    CHECK_OK(cuda_launch(&self->kit.device, self->kit.kernels[KIT_PING_PONG], 1, 1,
                         self->kit.stream, parameters));
    client_times_t times = self_kernel_samples(self, count);
    cuda_block_destroy(&arena);
    return times;
}

/* The put launch alone. */
static client_times_t self_put_times(self_t *self, uint32_t count)
{
    const uint32_t hidden = self->setup.geometry.hidden, rows = self->setup.rows;
    client_times_t times = {.done = count};
    uint32_t *samples = calloc(count, sizeof(*samples));
    transport_tensor_t in = kit_tensor(self->in, rows, hidden);
    transport_tensor_t out = kit_tensor(self->out, rows, hidden);
    CHECK(samples);
    self_live(self, rows);
    for (uint32_t i = 0; i < count + 3; i++) {
        self_mark(self, self->start);
        CHECK_OK(transport_cuda_client_put(self->client, 0, 0, &in, self->kit.stream));
        self_mark(self, self->end);
        CHECK_OK(transport_cuda_client_wait(self->client, self->kit.stream));
        CHECK_OK(transport_cuda_client_take(self->client, &out, self->kit.stream));
        self_idle(self);
        if (i >= 3)
            samples[i - 3] = (uint32_t)(self_elapsed_us(self) * 1000);
    }
    CHECK_OK(transport_cuda_client_finish(self->client, kit_in(10)));
    times.each = kit_summarise(samples, count);
    free(samples);
    return times;
}

static void self_open(self_t *self, char **argv, int board_fd)
{
    void *board;
    const transport_geometry_t *geometry = &self->setup.geometry;
    uint64_t bytes = (uint64_t)geometry->max_rows * geometry->hidden * 2;
    uint64_t pinned = bytes > SAMPLES_MAX * 4ull ? bytes : SAMPLES_MAX * 4ull;
    kit_open(&self->kit, pinned);
    self->life_index = kit_role_number(argv, 0);
    CHECK_OK(transport_cuda_life_open(&self->kit.device, kit_role_life(argv), self->life_index,
                                      &self->life));
    CHECK_OK(xp_memfd_map(board_fd, MAILBOX_HEADER_BYTES, &board));
    self->line = (board_line_t *)board + self->setup.line;
    self->in = kit_alloc(&self->kit, bytes);
    self->out = kit_alloc(&self->kit, bytes);
    self->samples = kit_alloc(&self->kit, SAMPLES_MAX * 4ull);
    self->wrong = kit_alloc(&self->kit, 256);
    self->values = malloc(bytes);
    CHECK(self->values);
    CHECK_OK(cuda_event_create(&self->kit.device, true, &self->start));
    CHECK_OK(cuda_event_create(&self->kit.device, true, &self->end));
    CHECK_OK(transport_cuda_client_create(&self->kit.device, geometry, &self->life,
                                          self->setup.limit_ns, 0, &self->client));
    CHECK_OK(cuda_capture_begin(&self->kit.device, self->kit.stream));
    self_layers(self, CLIENT_LAYERS);
    CHECK_OK(cuda_capture_end(&self->kit.device, self->kit.stream, &self->graph));
}

static client_times_t self_do(self_t *self, const job_t *job)
{
    switch (job->what) {
    case DO_GRAPH:
        return self_graph_times(self, job->count, false);
    case DO_EAGER:
        return self_graph_times(self, job->count, true);
    case DO_ROUND_TRIPS:
        return self_round_trips(self, job->count);
    case DO_PING_PONG:
        return self_ping_pong(self, job->count);
    case DO_PUT:
        return self_put_times(self, job->count);
    default:
        return (client_times_t){0};
    }
}

void client_main(int argc, char **argv)
{
    if (argc < 6 || strcmp(argv[1], "client") != 0)
        return;
    self_t self = {0};
    const int socket = kit_role_socket(argv);
    int board_fd, arena_fd, ready = 1;
    job_t job;
    if (!kit_receive(socket, &self.setup, sizeof(self.setup), &board_fd))
        exit(1);
    self_open(&self, argv, board_fd);
    CHECK_OK(transport_cuda_client_export(self.client, &arena_fd));
    CHECK(kit_send(socket, &ready, sizeof(ready), arena_fd));
    close(arena_fd);
    while (kit_receive(socket, &job, sizeof(job), NULL) && job.what != DO_EXIT) {
        if (job.what == DO_LOOP) {
            self_loop(&self);
            continue;
        }
        client_times_t times = self_do(&self, &job);
        CHECK(kit_send(socket, &times, sizeof(times), -1));
    }
    cuda_graph_destroy(&self.kit.device, self.graph);
    transport_cuda_client_destroy(self.client);
    transport_cuda_life_close(&self.life);
    kit_close(&self.kit);
    exit(0);
}

/* ---- the other end ------------------------------------------------------------------------ */
void client_start(int life_fd, int board_fd, uint32_t life_index, const client_setup_t *setup,
                  client_t *client_out)
{
    *client_out = (client_t){.life_index = life_index, .arena_fd = -1, .geometry = setup->geometry};
    agent_spawn("client", life_fd, life_index, 0, &client_out->role);
    CHECK(kit_send(client_out->role.socket, setup, sizeof(*setup), board_fd));
}

bool client_attach(client_t *client, agent_t *agent)
{
    int ready;
    if (client->arena_fd < 0 &&
        !kit_receive(client->role.socket, &ready, sizeof(ready), &client->arena_fd))
        return false;
    if (agent_attach(agent, client->arena_fd, &client->geometry, client->life_index,
                     &client->slot) != XP_OK)
        return false;
    client->attached = true;
    return true;
}

static client_times_t client_job(client_t *client, uint32_t what, uint32_t count)
{
    job_t job = {what, count};
    client_times_t times;
    CHECK(kit_send(client->role.socket, &job, sizeof(job), -1));
    CHECK(kit_receive(client->role.socket, &times, sizeof(times), NULL));
    return times;
}

void client_loop(client_t *client)
{
    job_t job = {DO_LOOP, 0};
    CHECK(kit_send(client->role.socket, &job, sizeof(job), -1));
}

client_times_t client_graph_times(client_t *client, uint32_t replays)
{
    return client_job(client, DO_GRAPH, replays);
}

client_times_t client_eager_times(client_t *client, uint32_t calls)
{
    return client_job(client, DO_EAGER, calls);
}

client_times_t client_round_trips(client_t *client, uint32_t count)
{
    return client_job(client, DO_ROUND_TRIPS, count);
}

client_times_t client_ping_pong(client_t *client, agent_t *agent, uint32_t count)
{
    CHECK_OK(agent_ping_pong(agent, client->arena_fd, &client->geometry, count));
    return client_job(client, DO_PING_PONG, count);
}

client_times_t client_put_times(client_t *client, uint32_t count)
{
    return client_job(client, DO_PUT, count);
}

void client_exit(client_t *client)
{
    job_t job = {DO_EXIT, 0};
    int status;
    CHECK(kit_send(client->role.socket, &job, sizeof(job), -1));
    CHECK(waitpid(client->role.pid, &status, 0) == client->role.pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    close(client->role.socket);
    close(client->arena_fd);
}

void client_kill(client_t *client)
{
    kill(client->role.pid, SIGKILL);
    waitpid(client->role.pid, NULL, 0);
    close(client->role.socket);
    if (client->arena_fd >= 0)
        close(client->arena_fd);
    client->arena_fd = -1;
}
