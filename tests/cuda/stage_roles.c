/* SPDX-License-Identifier: MIT */
/* The roles of the direct lane's device test. Every wait has a limit. */
#include "stage_roles.h"

#include <poll.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "fabric/records.h"
#include "stage/table.h"

enum { TEST_ROUND_TRIPS, TEST_PING, TEST_FILL, TEST_CHECK, TEST_KERNELS };
CUDA_IMAGE_DECLARE(tests_stage_test);

/* Attention side of an Instance of the scenes with several AtnAgents. */
typedef struct shape {
    uint32_t delivery, tp, dp, group, atn; /* atn: of rank 0; the others follow in turn */
} shape_t;

static const shape_t mesh[] = {
    {FABRIC_DELIVERY_DIRECT_PARTIAL, 1, 1, 3, 0},
    {FABRIC_DELIVERY_SINGLE_COMPLETE, 1, 2, 3, 0},
    {FABRIC_DELIVERY_REPLICATED_COMPLETE, 2, 1, 3, 0},
    {FABRIC_DELIVERY_SINGLE_COMPLETE, 1, 1, 2, 1},
    {FABRIC_DELIVERY_DIRECT_PARTIAL, 2, 1, 3, 0},
};
static const shape_t fan_in[] = {
    {FABRIC_DELIVERY_SINGLE_COMPLETE, 1, 2, 1, 0},
    {FABRIC_DELIVERY_REPLICATED_COMPLETE, 2, 1, 1, 0},
};

static void plan_shape(const shape_t *shape, fabric_plan_instance_t *instance)
{
    instance->atn_tp = shape->tp;
    instance->atn_dp = shape->dp;
    instance->delivery = shape->delivery;
    for (uint32_t rank = 0; rank < shape->tp * shape->dp; rank++)
        instance->rank_atn[rank] = (shape->atn + rank) % 2;
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        instance->layer_group[layer] = shape->group;
}

void scene_plan(uint32_t scene, fabric_plan_t *plan)
{
    static const struct {
        uint32_t atn, ffn, instances;
    } sizes[SCENES] = {{1, 1, 3},
                       {1, 2, 2},
                       {2, 2, sizeof(mesh) / sizeof(*mesh)},
                       {2, 1, sizeof(fan_in) / sizeof(*fan_in)}};
    CHECK(scene < SCENES);
    memset(plan, 0, sizeof(*plan));
    plan->atn_count = sizes[scene].atn;
    plan->ffn_count = sizes[scene].ffn;
    plan->lanes = 4;
    plan->generation = 1;
    plan->submission_timeout_ns = 5 * XP_NS_PER_S;
    const char *heap = getenv(HEAP_VARIABLE);
    plan->provider = !heap                      ? FABRIC_PROVIDER_P2P
                     : strcmp(heap, "far") == 0 ? FABRIC_PROVIDER_NVSHMEM_FAR
                                                : FABRIC_PROVIDER_NVSHMEM;
    plan->instance_count = sizes[scene].instances;
    for (uint32_t i = 0; i < plan->instance_count; i++) {
        fabric_plan_instance_t *instance = &plan->instances[i];
        snprintf(instance->id, sizeof(instance->id), "scene%u-%u", scene, i);
        instance->weights = i;
        instance->hidden = WIDTH;
        instance->layers = LAYERS;
        instance->max_rows = scene == SCENE_ONE && i == INSTANCE_BULK ? BULK_ROWS : ROWS;
        instance->dtype = XP_DTYPE_BF16;
        if (scene == SCENE_MESH) {
            plan_shape(&mesh[i], instance);
        } else if (scene == SCENE_FAN_IN) {
            plan_shape(&fan_in[i], instance);
        } else {
            const shape_t shape = {scene == SCENE_TWO && i == 0 ? FABRIC_DELIVERY_DIRECT_PARTIAL
                                                                : FABRIC_DELIVERY_SINGLE_COMPLETE,
                                   1, 1, scene == SCENE_ONE ? 1 : 3, 0};
            plan_shape(&shape, instance);
        }
    }
}

static answer_t answer_of(xp_status_t status)
{
    answer_t answer = {.status = status};
    if (status != XP_OK)
        snprintf(answer.text, sizeof(answer.text), "%s", xp_error_last()->text);
    return answer;
}

/* ---- what a way between two GPUs costs ------------------------------------------------------ */
double hop_compute_us(const answer_t *before, const answer_t *after)
{
    const double noted = (double)(after->values[4] - before->values[4]);
    CHECK(noted > 0);
    return (double)(after->values[6] - before->values[6]) / noted / 1e3;
}

void hop_rows(const char *way, const answer_t *trips, const hop_floor_t *floor,
              const char *floor_text)
{
    const double whole[] = {trips->times.p50_us, trips->times.p99_us};
    static const char *const names[] = {"p50", "p99"};
    if (floor->p50_us <= 0 || floor->compute_us < 0) {
        printf("%s: floor or execution not measured in this run, so nothing over the floor\n", way);
        return;
    }
    for (int i = 0; i < 2; i++) {
        char metric[80], note[400];
        snprintf(metric, sizeof(metric), "hop.cuda.%s.%s_over_floor", way, names[i]);
        snprintf(
            note, sizeof(note),
            "(whole round trip of 1 row of %d BF16 %.3f us, less the execution's %.3f us) over "
            "the floor; execution: mean of the echo's rows as the scheduler notes them; floor: "
            "P50 of %s (P99 %.3f); all in this run; with the execution in it %.3f; "
            "%llu round trips, %llu wrong",
            WIDTH, whole[i], floor->compute_us, floor_text, floor->p99_us, whole[i] / floor->p50_us,
            (unsigned long long)trips->done, (unsigned long long)trips->wrong);
        kit_row(metric, (whole[i] - floor->compute_us) / floor->p50_us, "x", floor->p50_us, NULL,
                note);
    }
}

void hop_split_rows(const char *way, const char *between, const answer_t *before,
                    const answer_t *trips, const answer_t *after, uint32_t rows,
                    const hop_floor_t *floor)
{
    static const char *const parts[] = {"put",  "hops",   "scheduler", "echo",
                                        "take", "answer", "longest"};
    static const char *const notes[] = {
        "first store of rows to line published",
        "line published to line seen, and answer published to answer seen; both ways",
        "line seen to rows begun",
        "rows of the echo, as the scheduler sees it",
        "answer seen to rows read and checked",
        "rows written to word published (waits for the rows to arrive)",
        "longest from line seen to word published, since the start"};
    const double noted = (double)(after->values[4] - before->values[4]);
    double spent[8] = {0}, client_us[3];
    CHECK(noted > 0 && trips->done > 0);
    for (int i = 5; i < 8; i++)
        spent[i] = (double)(after->values[i] - before->values[i]) / noted / 1e3;
    for (int i = 0; i < 3; i++)
        client_us[i] = (double)trips->values[i] / (double)trips->done / 1e3;
    const double values[] = {client_us[0],
                             client_us[1] - spent[5] - spent[6] - spent[7],
                             spent[5],
                             spent[6],
                             client_us[2],
                             spent[7],
                             (double)after->values[8] / 1e3};
    for (int i = 0; i < 7; i++) {
        char metric[96], note[400];
        snprintf(metric, sizeof(metric), "hop.cuda.%s.split.%s_%urows_us", way, parts[i], rows);
        snprintf(note, sizeof(note),
                 "mean of %llu, %u rows of %d BF16: %s%s; whole round trip P50 %.3f, P99 %.3f us, "
                 "%llu wrong",
                 (unsigned long long)trips->done, rows, WIDTH, notes[i], i == 1 ? between : "",
                 trips->times.p50_us, trips->times.p99_us, (unsigned long long)trips->wrong);
        kit_row(metric, values[i], "us", floor->p50_us, NULL, note);
    }
    CHECK(trips->wrong == 0);
}

void hop_bulk_row(const char *way, const answer_t *bulk, double execute_us)
{
    char metric[80], note[300];
    const double bytes = (double)BULK_ROWS * WIDTH * 2, whole_us = (double)bulk->values[2] / 1e3;
    snprintf(metric, sizeof(metric), "hop.cuda.%s.bulk_gbs", way);
    snprintf(note, sizeof(note),
             "%d x %d BF16 over what a layer of them takes beyond its execution: %.0f us, of which "
             "%.0f us the echo with its answer over the link; the relay's copies of both ways and "
             "put and take are in it",
             BULK_ROWS, WIDTH, whole_us, execute_us);
    CHECK(bulk->wrong == 0 && whole_us > execute_us);
    kit_row(metric, bytes / (whole_us - execute_us) / 1e3, "GB/s", -1, NULL, note);
}

/* ---- what every role has -------------------------------------------------------------------- */
typedef struct role {
    cuda_device_t device;
    cuda_module_t module;
    cuda_function_t kernels[TEST_KERNELS];
    cuda_stream_t stream, side;
    cuda_address_t samples, wrong; /* device */
    void *pinned;
    transport_cuda_life_t life;
    fabric_plan_t plan;
    int socket;
} role_t;
#define PINNED_BYTES (SAMPLES_MAX * sizeof(uint32_t))

static void role_open(role_t *role, int ordinal, int life_fd, uint32_t life_index, uint32_t scene,
                      int socket)
{
    static const char *const names[TEST_KERNELS] = {"stage_test_round_trips", "stage_test_ping",
                                                    "stage_test_fill", "stage_test_check"};
    const cuda_driver_t *driver;
    memset(role, 0, sizeof(*role));
    role->socket = socket;
    scene_plan(scene, &role->plan);
    CHECK_OK(cuda_driver_load(&driver));
    CHECK_OK(cuda_device_open(driver, ordinal, &role->device));
    CHECK_OK(cuda_module_load(&role->device, &cuda_image_tests_stage_test, names, TEST_KERNELS,
                              &role->module, role->kernels));
    CHECK_OK(cuda_stream_create(&role->device, false, &role->stream));
    CHECK_OK(cuda_stream_create(&role->device, true, &role->side));
    CHECK_OK(cuda_host_alloc(&role->device, PINNED_BYTES, &role->pinned));
    CHECK_OK(CUDA_CALL(driver, cuMemAlloc, &role->samples, PINNED_BYTES));
    CHECK_OK(CUDA_CALL(driver, cuMemAlloc, &role->wrong, 256));
    CHECK_OK(transport_cuda_life_open(&role->device, life_fd, life_index, &role->life));
}

static void role_close(role_t *role)
{
    const cuda_driver_t *driver = role->device.driver;
    transport_cuda_life_close(&role->life);
    CUDA_IGNORE(driver, cuMemFree, role->wrong);
    CUDA_IGNORE(driver, cuMemFree, role->samples);
    cuda_host_free(&role->device, role->pinned);
    cuda_stream_destroy(&role->device, role->side);
    cuda_stream_destroy(&role->device, role->stream);
    cuda_module_unload(&role->module);
    cuda_device_close(&role->device);
}

static void role_wait(role_t *role, cuda_stream_t stream, double seconds)
{
    xp_clock_t clock = xp_clock_system();
    CHECK_OK(cuda_stream_wait(&role->device, stream, &clock, kit_in(seconds)));
}

static void role_zero(role_t *role, cuda_address_t at, uint64_t bytes)
{
    CHECK_OK(CUDA_CALL(role->device.driver, cuMemsetD8Async, at, 0, bytes, role->side));
    role_wait(role, role->side, 10);
}

static void role_read(role_t *role, cuda_address_t from, uint64_t bytes)
{
    CHECK(bytes <= PINNED_BYTES);
    CHECK_OK(
        CUDA_CALL(role->device.driver, cuMemcpyDtoHAsync, role->pinned, from, bytes, role->side));
    role_wait(role, role->side, 10);
}

static uint32_t role_wrong(role_t *role)
{
    role_read(role, role->wrong, sizeof(uint32_t));
    return *(const uint32_t *)role->pinned;
}

/* One side of the floors. Both sides' words are zero before the first of them starts. */
static void role_ping(role_t *role, cuda_address_t mine, cuda_address_t theirs, uint32_t bytes,
                      uint32_t count, uint32_t first)
{
    cuda_address_t payload = theirs + 4096;
    uint32_t vecs = bytes / 16;
    void *parameters[] = {&mine, &theirs, &payload, &vecs, &count, &first, &role->samples};
    role_zero(role, mine, 256);
    CHECK_OK(
        cuda_launch(&role->device, role->kernels[TEST_PING], 1, 256, role->stream, parameters));
}

/* ---- provider nvshmem ----------------------------------------------------------------------- */
static double free_mib(const cuda_device_t *device)
{
    size_t free_bytes, total_bytes;
    CHECK_OK(CUDA_CALL(device->driver, cuMemGetInfo, &free_bytes, &total_bytes));
    return (double)free_bytes / 1048576.0;
}

stage_heap_t *role_join(const cuda_device_t *device, const fabric_plan_t *plan, int socket)
{
    stage_heap_place_t place;
    stage_heap_t *heap;
    join_t join;
    if (!getenv(HEAP_VARIABLE))
        return NULL;
    CHECK_OK(stage_heap_find(NULL, NULL, 0, &place));
    CHECK_OK(stage_heap_open(&place, plan, &heap));
    CHECK(kit_receive(socket, &join, sizeof(join), NULL));
    if (join.make) {
        printf("PE 0 makes the id\n");
        CHECK_OK(stage_heap_make_id(heap, join.id));
        CHECK(kit_send(socket, &join, sizeof(join), -1));
    }
    double before = free_mib(device);
    const char *share = getenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"),
               *pipe = getenv("CUDA_MPS_PIPE_DIRECTORY");
    printf("PE %u of %u (process %d) begins to join on cuda:%d: MPS %s, share %s, %.0f MiB free\n",
           join.pe, plan->atn_count + plan->ffn_count, getpid(), device->ordinal,
           pipe ? pipe : "none", share ? share : "whole", before);
    fflush(stdout);
    uint64_t start_ns = xp_monotonic_ns();
    if (stage_heap_join(heap, device, join.pe, join.id) != XP_OK) {
        fprintf(stderr, "PE %u: %s\n", join.pe, xp_error_last()->text);
        stage_heap_sweep(getpid());
        _exit(1); /* exit() would have the library wait for the other PEs */
    }
    printf("PE %u of %u on cuda:%d joined in %.0f ms: heap %.1f MiB, the device has %.1f MiB less "
           "(with what other processes took meanwhile)\n",
           join.pe, plan->atn_count + plan->ffn_count, device->ordinal,
           (double)(xp_monotonic_ns() - start_ns) / 1e6, (double)stage_heap_bytes(plan) / 1048576.0,
           before - free_mib(device));
    fflush(stdout);
    return heap;
}

/* What was joined ends with the process, and only so: the library's own end would wait for PEs that
 * have gone. */
static void role_exit(stage_heap_t *heap)
{
    fflush(stdout);
    if (heap) {
        stage_heap_sweep(getpid());
        _exit(0);
    }
    exit(0);
}

/* ---- FfnAgent ------------------------------------------------------------------------------- */
static void ffn_role(int argc, char **argv)
{
    role_t role;
    order_t order;
    stage_ffn_t *ffn;
    cuda_block_t pages[3] = {0}, arenas[3] = {0}; /* a second mapping each, for the floors */
    int held[FABRIC_MAX_RANKS];                   /* ORDER_HAND: arenas, until the attach */
    uint32_t held_count = 0;
    const int socket = kit_role_socket(argv);
    const uint32_t a = kit_role_number(argv, 0), index = a & 0xff;
    const uint32_t variant = a >> 12 & 0xf;
    role_open(&role, (int)kit_role_number(argv, 1), kit_role_life(argv), a >> 16, a >> 8 & 0xf,
              socket);
    stage_ffn_config_t config = {.device = &role.device,
                                 .plan = &role.plan,
                                 .ffn = index,
                                 .life = &role.life,
                                 .own_elements = variant & VARIANT_HELPERS ? 1 : 0,
                                 .notes = variant & VARIANT_NOTES};
    stage_heap_t *heap = role_join(&role.device, &role.plan, socket);
    config.heap = heap;
    CHECK_OK(stage_ffn_create(&config, &ffn));
    if (heap) {
        printf("FfnAgent %u is ready\n", index);
        fflush(stdout);
    }
    answer_t answer = answer_of(XP_OK);
    CHECK(kit_send(socket, &answer, sizeof(answer), -1));
    for (int fd; kit_receive(socket, &order, sizeof(order), &fd);) {
        int out = -1;
        uint64_t dropped = 0, start_ns = xp_monotonic_ns();
        stage_ffn_counters_t counters;
        const fabric_plan_instance_t *plan = &role.plan.instances[order.instance];
        transport_geometry_t geometry = stage_geometry(plan);
        switch (order.what) {
        case ORDER_EXPORT:
            answer = answer_of(stage_ffn_export(ffn, order.instance, &out));
            if (answer.status == XP_OK && order.other && !pages[order.instance].handle)
                CHECK_OK(cuda_block_import(
                    &role.device, out, STAGE_HEADER_BYTES + (uint64_t)plan->max_rows * WIDTH * 2,
                    &pages[order.instance]));
            break;
        case ORDER_EXPORT_PARTIALS:
            answer = answer_of(stage_ffn_export_partials(ffn, order.instance, &out));
            break;
        case ORDER_IMPORT:
            answer = answer_of(stage_ffn_import_partials(ffn, order.instance, order.other, fd));
            break;
        case ORDER_START:
            answer = answer_of(stage_ffn_start(ffn));
            break;
        case ORDER_HAND:
            CHECK(held_count < FABRIC_MAX_RANKS && fd >= 0);
            held[held_count++] = fd;
            fd = -1;
            answer = answer_of(XP_OK);
            break;
        case ORDER_ATTACH:
            CHECK(heap || (held_count ? held_count : 1) == fabric_plan_ranks(plan));
            answer = answer_of(stage_ffn_attach(ffn, order.instance,
                                                heap         ? NULL
                                                : held_count ? held
                                                             : &fd,
                                                fabric_plan_ranks(plan), SOON));
            while (held_count)
                close(held[--held_count]);
            if (answer.status == XP_OK && order.other) {
                cuda_block_destroy(&arenas[order.instance]); /* a predecessor's */
                CHECK_OK(cuda_block_import(&role.device, fd,
                                           transport_cuda_arena_bytes(&role.device, &geometry),
                                           &arenas[order.instance]));
            }
            break;
        case ORDER_DETACH:
            answer = answer_of(stage_ffn_detach(ffn, order.instance, kit_in(2)));
            break;
        case ORDER_LOOK:
            answer = answer_of(stage_ffn_look(ffn, SOON, &dropped));
            answer.values[0] = dropped;
            break;
        case ORDER_COUNTERS:
            answer = answer_of(stage_ffn_counters(ffn, SOON, &counters));
            answer.values[0] = counters.invocations;
            answer.values[1] = counters.turns;
            answer.values[2] = counters.longest_turn_ns;
            answer.values[3] = counters.execute_ns;
            answer.values[4] = counters.noted;
            answer.values[5] = counters.noted_taken_ns;
            answer.values[6] = counters.noted_job_ns;
            answer.values[7] = counters.noted_answer_ns;
            answer.values[8] = counters.noted_longest_ns;
            break;
        case ORDER_PING:
            role_ping(&role, pages[order.instance].address + STAGE_HEADER_BYTES,
                      arenas[order.instance].address + transport_cuda_output_offset(&geometry),
                      order.rows, order.count, 0);
            answer = answer_of(XP_OK);
            break;
        case ORDER_STOP:
            role_wait(&role, role.stream, 10);
            start_ns = xp_monotonic_ns();
            answer = answer_of(stage_ffn_stop(ffn, kit_in(2)));
            break;
        default:
            CHECK(false);
        }
        answer.ns = xp_monotonic_ns() - start_ns;
        CHECK(kit_send(socket, &answer, sizeof(answer), out));
        if (fd >= 0)
            close(fd);
        if (out >= 0)
            close(out);
        if (order.what == ORDER_STOP)
            break;
    }
    for (int i = 0; i < 3; i++) {
        cuda_block_destroy(&pages[i]);
        cuda_block_destroy(&arenas[i]);
    }
    stage_ffn_destroy(ffn);
    role_close(&role);
    role_exit(heap);
}

/* ---- AtnAgent: the relay -------------------------------------------------------------------- */
static void relay_role(int argc, char **argv)
{
    role_t role;
    order_t order;
    stage_atn_t *atn;
    const int socket = kit_role_socket(argv);
    const uint32_t a = kit_role_number(argv, 0), index = a >> 8;
    role_open(&role, (int)index, kit_role_life(argv), kit_role_number(argv, 1), a & 0xff, socket);
    stage_heap_t *heap = role_join(&role.device, &role.plan, socket);
    CHECK_OK(stage_atn_create(&role.device, &role.plan, index, &role.life, heap, 0, &atn));
    if (heap) {
        printf("AtnAgent %u is ready\n", index);
        fflush(stdout);
    }
    answer_t answer = answer_of(XP_OK);
    CHECK(kit_send(socket, &answer, sizeof(answer), -1));
    for (int fd; kit_receive(socket, &order, sizeof(order), &fd);) {
        int out = -1;
        switch (order.what) {
        case ORDER_EXPORT:
            answer = answer_of(stage_atn_export(atn, order.instance, order.rows, &out));
            break;
        case ORDER_OPEN:
            answer = answer_of(stage_atn_open(atn, order.instance, order.other, fd));
            break;
        case ORDER_ATTACH:
            answer =
                answer_of(stage_atn_attach(atn, order.instance, order.rows, fd, order.other, SOON));
            break;
        case ORDER_DETACH:
            answer = answer_of(stage_atn_detach(atn, order.instance, order.rows, kit_in(2)));
            break;
        case ORDER_STOP:
            stage_atn_destroy(atn);
            answer = answer_of(XP_OK);
            break;
        default:
            CHECK(false);
        }
        CHECK(kit_send(socket, &answer, sizeof(answer), out));
        if (fd >= 0)
            close(fd);
        if (out >= 0)
            close(out);
        if (order.what == ORDER_STOP)
            break;
    }
    role_close(&role);
    role_exit(heap);
}

/* ---- Instance ------------------------------------------------------------------------------- */
typedef struct self {
    role_t role;
    uint32_t instance, members, max_rows;
    uint32_t dp; /* this rank's part of attention DP */
    stage_client_t *client;
    transport_geometry_t geometry;
    cuda_address_t in, out;
    cuda_event_t start, end;
    cuda_graph_exec_t graph;
    uint32_t graph_rows;
    cuda_block_t page; /* of FfnAgent 0, for the floors */
} self_t;

/* Returns this rank's rows: with attention DP the second one has one less, so that no rank can pass
 * with rows at another one's place; none of one row. */
static uint32_t self_live(self_t *self, uint32_t rows)
{
    transport_live_t live = {0};
    for (uint32_t i = 0; i < self->role.plan.instances[self->instance].atn_dp; i++)
        live.dp_rows[i] = rows > i ? rows - i : 0;
    live.rows = live.dp_rows[self->dp];
    CHECK_OK(stage_client_live_write(self->client, &live, self->role.stream));
    return live.rows;
}

static void self_fill(self_t *self, uint32_t rows, uint32_t seed)
{
    uint64_t elements = (uint64_t)rows * WIDTH;
    seed += self->dp * 11;
    void *parameters[] = {&self->in, &elements, &seed};
    CHECK_OK(cuda_launch(&self->role.device, self->role.kernels[TEST_FILL], 64, 256,
                         self->role.stream, parameters));
}

static void self_check(self_t *self, uint32_t rows, uint32_t seed, uint32_t layer)
{
    uint64_t elements = (uint64_t)rows * WIDTH;
    seed += self->dp * 11;
    void *parameters[] = {&self->out, &elements, &seed, &layer, &self->members, &self->role.wrong};
    CHECK_OK(cuda_launch(&self->role.device, self->role.kernels[TEST_CHECK], 64, 256,
                         self->role.stream, parameters));
}

/* LAYERS calls in one graph; each layer's answer overwrites the one before. */
static void self_capture(self_t *self, uint32_t rows)
{
    transport_tensor_t in = kit_tensor(self->in, rows, WIDTH),
                       out = kit_tensor(self->out, rows, WIDTH);
    cuda_graph_destroy(&self->role.device, self->graph);
    CHECK_OK(cuda_capture_begin(&self->role.device, self->role.stream));
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        CHECK_OK(stage_client_call(self->client, layer, 0, &in, &out, self->role.stream));
    CHECK_OK(cuda_capture_end(&self->role.device, self->role.stream, &self->graph));
    self->graph_rows = rows;
}

/* With `split`, values: sums of ns of put, wait and take. */
static answer_t self_trips(self_t *self, uint32_t rows, uint32_t count, bool split)
{
    stage_put_t put;
    transport_cuda_parts_t parts;
    uint32_t direct, kept = count < SAMPLES_MAX ? count : SAMPLES_MAX;
    uint64_t stride = transport_cuda_partial_bytes(&self->geometry) / sizeof(float);
    cuda_address_t live = stage_client_live(self->client), sums = split ? self->role.wrong + 64 : 0;
    CHECK_OK(stage_client_describe(self->client, 0, rows, &put, &direct, &parts));
    parts.patience.limit_ns = 10 * XP_NS_PER_S;
    self_live(self, rows);
    role_wait(&self->role, self->role.stream, 10);
    role_zero(&self->role, self->role.wrong, 4);
    void *parameters[] = {
        &put,           &parts.arena,      &parts.state, &live,           &direct,
        &self->members, &stride,           &count,       &parts.patience, &self->role.samples,
        &kept,          &self->role.wrong, &sums};
    CHECK_OK(cuda_launch(&self->role.device, self->role.kernels[TEST_ROUND_TRIPS], 1,
                         rows <= 2 ? 256 : 512, self->role.stream, parameters));
    role_wait(&self->role, self->role.stream, 60);
    answer_t answer = answer_of(stage_client_finish(self->client, SOON));
    answer.wrong = role_wrong(&self->role);
    answer.done = count;
    if (split) {
        role_read(&self->role, sums, 3 * sizeof(uint64_t));
        memcpy(answer.values, self->role.pinned, 3 * sizeof(uint64_t));
    }
    role_read(&self->role, self->role.samples, kept * 4ull);
    answer.times = kit_summarise(self->role.pinned, kept);
    return answer;
}

static answer_t self_graph(self_t *self, uint32_t rows, uint32_t count)
{
    static uint32_t samples[2000];
    CHECK(count <= 2000);
    self_capture(self, rows);
    role_zero(&self->role, self->role.wrong, 4);
    for (uint32_t i = 0; i < count + 10; i++) {
        float ms;
        const uint32_t own = self_live(self, rows);
        self_fill(self, own, i);
        CHECK_OK(
            CUDA_CALL(self->role.device.driver, cuEventRecord, self->start, self->role.stream));
        CHECK_OK(cuda_graph_launch(&self->role.device, self->graph, self->role.stream));
        CHECK_OK(CUDA_CALL(self->role.device.driver, cuEventRecord, self->end, self->role.stream));
        self_check(self, own, i, LAYERS - 1);
        role_wait(&self->role, self->role.stream, 20);
        CHECK_OK(
            CUDA_CALL(self->role.device.driver, cuEventElapsedTime, &ms, self->start, self->end));
        if (i >= 10)
            samples[i - 10] = (uint32_t)(ms * 1e6f / LAYERS);
    }
    answer_t answer = answer_of(stage_client_finish(self->client, SOON));
    answer.wrong = role_wrong(&self->role);
    answer.done = (uint64_t)count * LAYERS;
    answer.times = kit_summarise(samples, count);
    return answer;
}

/* values: P50 of the put's launch, of a peer copy of the same bytes (of who maps the stage), of the
 * whole layer; ns. */
static answer_t self_bulk(self_t *self, uint32_t count)
{
    enum { KINDS = 3 };
    static uint32_t samples[KINDS][200];
    const cuda_driver_t *driver = self->role.device.driver;
    const uint32_t rows = self->max_rows;
    const uint64_t bytes = (uint64_t)rows * WIDTH * 2;
    transport_tensor_t in = kit_tensor(self->in, rows, WIDTH),
                       out = kit_tensor(self->out, rows, WIDTH);
    CHECK(count <= 200);
    role_zero(&self->role, self->role.wrong, 4);
    for (uint32_t i = 0; i < count + 3; i++) {
        float ms[KINDS] = {0};
        uint64_t start_ns;
        self_live(self, rows);
        self_fill(self, rows, i);
        /* Before the put: the stage is nobody's then. */
        if (self->page.handle) {
            CHECK_OK(CUDA_CALL(driver, cuEventRecord, self->start, self->role.stream));
            CHECK_OK(CUDA_CALL(driver, cuMemcpyDtoDAsync, self->page.address + STAGE_HEADER_BYTES,
                               self->in, bytes, self->role.stream));
            CHECK_OK(CUDA_CALL(driver, cuEventRecord, self->end, self->role.stream));
            role_wait(&self->role, self->role.stream, 10);
            CHECK_OK(CUDA_CALL(driver, cuEventElapsedTime, &ms[1], self->start, self->end));
        }
        start_ns = xp_monotonic_ns();
        CHECK_OK(CUDA_CALL(driver, cuEventRecord, self->start, self->role.stream));
        CHECK_OK(stage_client_put(self->client, i % LAYERS, 0, &in, self->role.stream));
        CHECK_OK(CUDA_CALL(driver, cuEventRecord, self->end, self->role.stream));
        CHECK_OK(stage_client_wait(self->client, self->role.stream));
        CHECK_OK(stage_client_take(self->client, &out, self->role.stream));
        role_wait(&self->role, self->role.stream, 20);
        ms[2] = (float)(xp_monotonic_ns() - start_ns) / 1e6f;
        CHECK_OK(CUDA_CALL(driver, cuEventElapsedTime, &ms[0], self->start, self->end));
        self_check(self, rows, i, i % LAYERS);
        role_wait(&self->role, self->role.stream, 10);
        for (int k = 0; k < KINDS && i >= 3; k++)
            samples[k][i - 3] = (uint32_t)(ms[k] * 1e6f);
    }
    answer_t answer = answer_of(stage_client_finish(self->client, SOON));
    answer.wrong = role_wrong(&self->role);
    answer.done = count;
    for (int k = 0; k < KINDS; k++)
        answer.values[k] = (uint64_t)(kit_summarise(samples[k], count).p50_us * 1e3);
    return answer;
}

static answer_t self_ping(self_t *self, uint32_t bytes, uint32_t count)
{
    transport_cuda_parts_t parts;
    stage_put_t put;
    uint32_t direct;
    CHECK(count <= SAMPLES_MAX);
    CHECK_OK(stage_client_describe(self->client, 0, 1, &put, &direct, &parts));
    role_ping(&self->role, parts.arena + transport_cuda_output_offset(&self->geometry),
              self->page.address + STAGE_HEADER_BYTES, bytes, count, 1);
    role_wait(&self->role, self->role.stream, 20);
    answer_t answer = answer_of(XP_OK);
    role_read(&self->role, self->role.samples, count * 4ull);
    answer.times = kit_summarise(self->role.pinned, count);
    answer.done = count;
    return answer;
}

/* Replays, rows varied, until an order comes; ORDER_CLOSE is obeyed while a replay waits. */
static answer_t self_loop(self_t *self)
{
    answer_t answer = answer_of(XP_OK);
    order_t order;
    bool on = true;
    self_capture(self, ROWS);
    role_zero(&self->role, self->role.wrong, 4);
    answer_t begun = answer_of(XP_OK);
    CHECK(kit_send(self->role.socket, &begun, sizeof(begun), -1));
    for (uint32_t i = 0; on; i++) {
        uint32_t rows = self_live(self, kit_value(i, self->instance) % 33), seed = i;
        self_fill(self, rows, seed);
        CHECK_OK(cuda_graph_launch(&self->role.device, self->graph, self->role.stream));
        self_check(self, rows, seed, LAYERS - 1);
        uint64_t deadline_ns = kit_in(25);
        while (self->role.device.driver->cuStreamQuery(self->role.stream) ==
               CUDA_RESULT_NOT_READY) {
            struct pollfd ready = {.fd = self->role.socket, .events = POLLIN};
            CHECK(xp_monotonic_ns() < deadline_ns);
            if (poll(&ready, 1, 0) == 1) {
                CHECK(kit_receive(self->role.socket, &order, sizeof(order), NULL));
                if (order.what == ORDER_CLOSE)
                    CHECK_OK(stage_client_close(self->client, (xp_status_t)order.other));
                on = false;
            }
        }
        answer.status = stage_client_finish(self->client, SOON);
        if (answer.status != XP_OK)
            break;
        answer.done += LAYERS;
        struct pollfd ready = {.fd = self->role.socket, .events = POLLIN};
        if (on && poll(&ready, 1, 0) == 1) {
            CHECK(kit_receive(self->role.socket, &order, sizeof(order), NULL));
            on = false;
        }
    }
    uint64_t done = answer.done;
    answer = answer_of(answer.status);
    answer.done = done;
    answer.wrong = answer.status == XP_OK ? role_wrong(&self->role) : 0;
    return answer;
}

static void client_role(int argc, char **argv)
{
    static self_t self;
    order_t order;
    const int socket = kit_role_socket(argv);
    const uint32_t a = kit_role_number(argv, 0), life_index = kit_role_number(argv, 1);
    const uint32_t variant = a >> 12 & 0xf;
    const bool relay = a >> 16 & 1;
    const uint32_t rank = a >> 20;
    fabric_plan_t scene;
    scene_plan(a >> 8 & 0xf, &scene);
    self.instance = a & 0xff;
    role_open(&self.role, (int)scene.instances[self.instance].rank_atn[rank], kit_role_life(argv),
              life_index, a >> 8 & 0xf, socket);
    const fabric_plan_instance_t *plan = &self.role.plan.instances[self.instance];
    self.members = fabric_group_size(plan->layer_group[0]);
    self.max_rows = plan->max_rows;
    self.dp = rank / plan->atn_tp;
    self.geometry = stage_geometry(plan);
    stage_client_config_t config = {.device = &self.role.device,
                                    .instance = plan,
                                    .index = self.instance,
                                    .rank = rank,
                                    .generation = self.role.plan.generation,
                                    .path = relay ? STAGE_RELAY : STAGE_DIRECT,
                                    .life = &self.role.life,
                                    .limit_ns = 20 * XP_NS_PER_S,
                                    .call_bytes = variant & VARIANT_SMALL_CALLS ? 16u << 10 : 0};
    CHECK_OK(stage_client_create(&config, &self.client));
    CHECK_OK(CUDA_CALL(self.role.device.driver, cuMemAlloc, &self.in,
                       (uint64_t)plan->max_rows * WIDTH * 2));
    CHECK_OK(CUDA_CALL(self.role.device.driver, cuMemAlloc, &self.out,
                       (uint64_t)plan->max_rows * WIDTH * 2));
    CHECK_OK(cuda_event_create(&self.role.device, true, &self.start));
    CHECK_OK(cuda_event_create(&self.role.device, true, &self.end));
    answer_t answer = answer_of(XP_OK);
    CHECK(kit_send(socket, &answer, sizeof(answer), -1));
    for (int fd; kit_receive(socket, &order, sizeof(order), &fd);) {
        int out = -1;
        switch (order.what) {
        case ORDER_EXPORT:
            answer = answer_of(stage_client_export(self.client, &out));
            break;
        case ORDER_OPEN:
            answer = answer_of(stage_client_open(self.client, order.other, fd));
            if (answer.status == XP_OK && order.other == 0 && fabric_plan_ranks(plan) == 1)
                CHECK_OK(cuda_block_import(
                    &self.role.device, fd,
                    STAGE_HEADER_BYTES + (uint64_t)plan->max_rows * WIDTH * 2, &self.page));
            break;
        case ORDER_TRIPS:
            answer = self_trips(&self, order.rows, order.count, order.other != 0);
            break;
        case ORDER_GRAPH:
            answer = self_graph(&self, order.rows, order.count);
            break;
        case ORDER_BULK:
            answer = self_bulk(&self, order.count);
            break;
        case ORDER_PING:
            answer = self_ping(&self, order.rows, order.count);
            break;
        case ORDER_LOOP:
            answer = self_loop(&self);
            break;
        case ORDER_STOP:
            answer = answer_of(XP_OK);
            break;
        default: /* ORDER_CLOSE or ORDER_LOOP_END when the loop has ended by itself */
            answer = answer_of(XP_OK);
        }
        CHECK(kit_send(socket, &answer, sizeof(answer), out));
        if (fd >= 0)
            close(fd);
        if (out >= 0)
            close(out);
        if (order.what == ORDER_STOP)
            break;
    }
    cuda_graph_destroy(&self.role.device, self.graph);
    cuda_event_destroy(&self.role.device, self.start);
    cuda_event_destroy(&self.role.device, self.end);
    stage_client_destroy(self.client);
    cuda_block_destroy(&self.page);
    CUDA_IGNORE(self.role.device.driver, cuMemFree, self.in);
    CUDA_IGNORE(self.role.device.driver, cuMemFree, self.out);
    role_close(&self.role);
    exit(0);
}

/* What a process that sees only cuda:0 can map of cuda:1: says how devices must be made visible. */
static void probe_role(int argc, char **argv)
{
    const cuda_driver_t *driver;
    cuda_device_t device;
    cuda_block_t block;
    order_t order;
    int fd;
    const int socket = kit_role_socket(argv);
    CHECK_OK(cuda_driver_load(&driver));
    CHECK_OK(cuda_device_open(driver, 0, &device));
    CHECK(kit_receive(socket, &order, sizeof(order), &fd));
    answer_t answer = answer_of(
        cuda_block_import(&device, fd, STAGE_HEADER_BYTES + (uint64_t)ROWS * WIDTH * 2, &block));
    CHECK(kit_send(socket, &answer, sizeof(answer), -1));
    exit(0);
}

void stage_roles_main(int argc, char **argv)
{
    if (argc < 6)
        return;
    if (strcmp(argv[1], "ffn") == 0)
        ffn_role(argc, argv);
    if (strcmp(argv[1], "client") == 0)
        client_role(argc, argv);
    if (strcmp(argv[1], "relay") == 0)
        relay_role(argc, argv);
    if (strcmp(argv[1], "probe") == 0)
        probe_role(argc, argv);
}

bool stage_roles_usable(void)
{
    return cuda_image_tests_stage_test.begin != cuda_image_tests_stage_test.end;
}
