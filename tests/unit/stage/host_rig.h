/* SPDX-License-Identifier: MIT */
/*
 * The host objects of module stage over the fake driver, for one test program: two FfnAgents, an
 * Instance of up to two ranks and, by the relay, an AtnAgent, in one process; also with a symmetric
 * heap over ordinary memory. Kernels are played by the same functions that the GPU runs; resident
 * ones take turns after each launch and at each read of the host.
 */
#ifndef XPOOL_TEST_HOST_RIG_H
#define XPOOL_TEST_HOST_RIG_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "../cuda/fake_driver.h"
#include "base/clock.h"
#include "fabric/records.h"
#include "heap_plugin.h"
#include "stage/control.h"
#include "stage/courier_host.h"
#include "stage/heap.h"
#include "stage/relay.h"
#include "stage/scheduler_steps.h"

#define HOST_KERNELS_AT(address, pe)                                                               \
    (heap_memory ? at_pe(address, pe) : (char *)(uintptr_t)(address))
/* It counts from 1970 on a GPU: more than 56 bits. */
#define HOST_KERNELS_NOW_NS() (xp_monotonic_ns() + 1790000000000000000u)
#include "host_kernels.h"

#define HIDDEN  16
#define ROWS    8
#define LAYERS  4
#define RECORDS 16u /* of the relay, for the observers */
#define SOON    (xp_monotonic_ns() + 5 * XP_NS_PER_S)

/* In place of the device code, so that these tests need no nvcc. */
static const unsigned char code[1];
#define IMAGE(name)                                                                                \
    extern const cuda_image_t cuda_image_##name;                                                   \
    const cuda_image_t cuda_image_##name = {#name, code, code + 1};
IMAGE(transport_cuda_kernels)
IMAGE(stage_kernels)
IMAGE(stage_scheduler)
IMAGE(stage_relay)

/* ---- kernels -------------------------------------------------------------------------------- */
static void run_put(const fake_launch_t *launch)
{
    stage_put_t put;
    memcpy(&put, launch->values[0], sizeof(put));
    host_put(&put, fake_pointer(launch, 1), fake_pointer(launch, 2), fake_pointer(launch, 3));
}
static void step(void);
static void wait_for(const mailbox_arena_t *arena, transport_device_state_t *state, uint32_t direct,
                     const void *limits)
{
    uint32_t missing = direct;
    transport_patience_t patience;
    transport_clock_t clock;
    memcpy(&patience, limits, sizeof(patience));
    transport_device_wait_start(&clock, 0);
    if (transport_device_wait_begin(state))
        return;
    for (uint64_t looks = 0; !stage_device_wait_look(arena, state, direct, &missing); looks++) {
        step();
        if (transport_device_wait_life(&patience, state, &clock, looks))
            break;
    }
}
static void run_wait(const fake_launch_t *launch)
{
    wait_for(fake_pointer(launch, 0), fake_pointer(launch, 1), (uint32_t)fake_argument(launch, 2),
             launch->values[3]);
}
static void run_take(const fake_launch_t *launch)
{
    stage_take_t take;
    memcpy(&take, launch->values[0], sizeof(take));
    host_take(&take, fake_pointer(launch, 1), fake_pointer(launch, 2));
}
static void run_call(const fake_launch_t *launch)
{
    stage_put_t put;
    stage_take_t take;
    memcpy(&put, launch->values[0], sizeof(put));
    memcpy(&take, launch->values[1], sizeof(take));
    host_put(&put, fake_pointer(launch, 3), fake_pointer(launch, 4), fake_pointer(launch, 5));
    wait_for(fake_pointer(launch, 2), fake_pointer(launch, 3), (uint32_t)fake_argument(launch, 7),
             launch->values[8]);
    host_take(&take, fake_pointer(launch, 3), fake_pointer(launch, 6));
}
static void run_describe(const fake_launch_t *launch)
{
    stage_instance_t *instance = fake_pointer(launch, 0);
    memcpy(&instance->about, launch->values[1], sizeof(instance->about));
    instance->reason = 0;
    if (fake_argument(launch, 2))
        instance->wanted = (uint32_t)fake_argument(launch, 2);
}
static void run_page_start(const fake_launch_t *launch)
{
    memset(fake_pointer(launch, 0), 0, sizeof(stage_page_t));
    memcpy(fake_pointer(launch, 0), launch->values[1], sizeof(stage_head_t));
}
static void run_partials_start(const fake_launch_t *launch)
{
    stage_partials_t *partials = fake_pointer(launch, 0);
    partials->magic = STAGE_PARTIALS_MAGIC;
    partials->abi = STAGE_ABI;
    partials->bytes = fake_argument(launch, 1);
    partials->instance = (uint32_t)fake_argument(launch, 2);
    partials->ffn = (uint32_t)fake_argument(launch, 3);
    partials->members = (uint32_t)fake_argument(launch, 4);
    partials->rows = (uint32_t)fake_argument(launch, 5);
    partials->hidden = (uint32_t)fake_argument(launch, 6);
    memset(partials->ready, 0, sizeof(partials->ready));
}
static void run_post(const fake_launch_t *launch)
{
    PROTOCOL_STORE_RELEASE((uint32_t *)fake_pointer(launch, 0), (uint32_t)fake_argument(launch, 1));
}
static void run_close(const fake_launch_t *launch)
{
    mailbox_close(fake_pointer(launch, 0), (uint32_t)fake_argument(launch, 1));
}
static void run_arena_start(const fake_launch_t *launch)
{
    memcpy(fake_pointer(launch, 0), launch->values[1], sizeof(mailbox_arena_t));
}
static void run_live_write(const fake_launch_t *launch)
{
    memcpy(fake_pointer(launch, 0), launch->values[1], sizeof(transport_live_t));
}
static void run_slot_describe(const fake_launch_t *launch)
{
    transport_slot_t value, *slot = fake_pointer(launch, 0);
    memcpy(&value, launch->values[1], sizeof(value));
    memcpy(slot, &value, offsetof(transport_slot_t, pad0));
    slot->wanted = value.wanted;
}
static void run_nothing(const fake_launch_t *launch)
{
}

/* ---- residents ------------------------------------------------------------------------------ */
/* A round of the courier's block: stage/nvshmem/courier.cu. */
static stage_courier_table_t *couriers[2];
static uint64_t courier_last[2][STAGE_ROUTES_MAX];
static uint64_t carried;
static void run_courier(const fake_launch_t *launch)
{
    int index = couriers[0] ? 1 : 0;
    assert_null(couriers[index]);
    couriers[index] = fake_pointer(launch, 0);
    assert_int_equal(couriers[index]->magic, STAGE_COURIER_MAGIC);
    assert_int_equal(launch->blocks, 1);
}
static void courier_round(int index)
{
    stage_courier_table_t *table = couriers[index];
    if (table->stop) {
        couriers[index] = NULL;
        return;
    }
    for (uint32_t u = 0; u < FABRIC_MAX_INSTANCES; u++) {
        stage_courier_unit_t *unit = &table->unit[u];
        if (unit->wanted == unit->now)
            continue;
        unit->now = unit->wanted;
        for (uint32_t r = 0; r < table->routes; r++)
            if (table->route[r].unit == u)
                courier_last[index][r] = 0;
    }
    for (uint32_t r = 0; r < table->routes; r++) {
        const stage_route_t *route = &table->route[r];
        if (transport_slot_state(table->unit[route->unit].now) != TRANSPORT_SLOT_ATTACHED)
            continue;
        uint64_t value = stage_route_due(route->word, route->kind, courier_last[index][r]);
        if (!value)
            continue;
        courier_last[index][r] = value;
        carried++;
        if (route->kind == STAGE_ROUTE_CLOSED) {
            *(uint32_t *)at_pe(route->to_word, route->pe) = (uint32_t)value;
            continue;
        }
        memcpy(at_pe(route->to_rows, route->pe), (const void *)(uintptr_t)route->rows,
               stage_route_bytes(route));
        PROTOCOL_STORE_RELEASE((uint64_t *)at_pe(route->to_word, route->pe), value);
    }
}

static stage_scheduler_t schedulers[8];
static bool scheduling[8], still;
static uint64_t now_ns;
static void run_scheduler(const fake_launch_t *launch)
{
    stage_table_t *table = fake_pointer(launch, 0);
    assert_int_equal(table->magic, STAGE_TABLE_MAGIC);
    assert_int_equal(launch->blocks, 1);
    for (int i = 0; i < 8; i++)
        if (!scheduling[i]) {
            scheduling[i] = true;
            stage_scheduler_begin(&schedulers[i], table);
            return;
        }
    fail();
}
static void scheduler_turns(int index)
{
    stage_scheduler_t *s = &schedulers[index];
    for (int n = 0; scheduling[index] && n < 100; n++) {
        uint32_t changed[STAGE_LINES / 32] = {0};
        for (uint32_t i = 0; i < s->line_count; i++)
            if (stage_scheduler_line_changed(s, i))
                changed[i / 32] |= 1u << i % 32;
        if (!stage_scheduler_turn(s, changed, stage_scheduler_lanes_ended(s), now_ns))
            scheduling[index] = false;
        else if (stage_scheduler_chunk(s))
            stage_scheduler_chunk_run(s, now_ns);
    }
}

static transport_resident_t *relay_table;
static stage_relay_t *relay;
static void run_relay(const fake_launch_t *launch)
{
    relay_table = fake_pointer(launch, 0);
    relay = fake_pointer(launch, 2);
    memset(host_relay_busy, 0, sizeof(host_relay_busy));
}
static void run_relay_describe(const fake_launch_t *launch)
{
    stage_relay_slot_t *slot = fake_pointer(launch, 0);
    memcpy(slot, launch->values[1], sizeof(*slot));
    memset((char *)(uintptr_t)slot->arena, 0, MAILBOX_HEADER_BYTES);
    memcpy((char *)(uintptr_t)slot->arena, launch->values[2], sizeof(mailbox_arena_t));
    *(uint64_t *)fake_pointer(launch, 3) = HOST_KERNELS_NOW_NS();
}
static void run_carry(const fake_launch_t *launch)
{
    host_carry(fake_pointer(launch, 0), fake_pointer(launch, 1), fake_argument(launch, 2),
               fake_argument(launch, 3), fake_argument(launch, 4),
               (uint32_t)fake_argument(launch, 5));
}
static void step(void)
{
    if (still)
        return;
    for (int round = 0; round < 3; round++) {
        for (uint32_t i = 0; relay_table && i < relay_table->slots; i++)
            host_relay_round(relay_table, relay, i);
        for (int i = 0; i < 8; i++)
            scheduler_turns(i);
        for (int i = 0; i < 2; i++)
            if (couriers[i])
                courier_round(i);
    }
    if (relay_table && relay_table->stop)
        relay_table = NULL;
}
static void step_after(const fake_launch_t *launch)
{
    step();
}

static const fake_kernel_t kernels[] = {
    {"stage_put", run_put, {sizeof(stage_put_t), 8, 8, 8}},
    {"stage_wait", run_wait, {8, 8, 4, sizeof(transport_patience_t)}},
    {"stage_take", run_take, {sizeof(stage_take_t), 8, 8}},
    {"stage_call",
     run_call,
     {sizeof(stage_put_t), sizeof(stage_take_t), 8, 8, 8, 8, 8, 4, sizeof(transport_patience_t)}},
    {"stage_describe", run_describe, {8, sizeof(stage_about_t), 4}},
    {"stage_page_start", run_page_start, {8, sizeof(stage_head_t)}},
    {"stage_partials_start", run_partials_start, {8, 8, 4, 4, 4, 4, 4}},
    {"stage_post", run_post, {8, 4}},
    {"stage_close", run_close, {8, 4}},
    {"stage_scheduler", run_scheduler, {8, 8}},
    {"stage_relay", run_relay, {8, 8, 8}},
    {"stage_relay_nvshmem", run_relay, {8, 8, 8}},
    {"stage_courier", run_courier, {8, 8}},
    {"stage_relay_describe",
     run_relay_describe,
     {8, sizeof(stage_relay_slot_t), sizeof(mailbox_arena_t), 8}},
    {"transport_put", run_nothing, {8}},
    {"transport_wait", run_nothing, {8}},
    {"transport_take", run_nothing, {8}},
    {"transport_call", run_nothing, {8}},
    {"transport_arena_start", run_arena_start, {8, sizeof(mailbox_arena_t)}},
    {"transport_close", run_close, {8, 4}},
    {"transport_carry", run_carry, {8, 8, 8, 8, 8, 4}},
    {"transport_live_write", run_live_write, {8, sizeof(transport_live_t)}},
    {"transport_recover", run_nothing, {8}},
    {"transport_slot_describe", run_slot_describe, {8, sizeof(transport_slot_t)}},
    {"transport_post", run_post, {8, 4}},
};

/* ---- the set: two FfnAgents, an Instance of two ranks ---------------------------------------- */
static cuda_device_t device;
static int life_fd;
static transport_cuda_life_t life;
static fabric_plan_t plan;
static stage_ffn_t *ffn[2];
static stage_client_t *client[2];
static stage_atn_t *atn;
static stage_path_t path;
static stage_heap_t *heaps[PES]; /* with provider nvshmem */
static int resident[2];          /* index of their streams */
static int kept[2] = {-1, -1};   /* the first Instance's stages of a former Generation */
static int kept_stages[2][FABRIC_MAX_INSTANCES]; /* of all Instances */
static _Alignas(16) uint16_t in[2][ROWS * HIDDEN], out[2][ROWS * HIDDEN];

static bool resident_busy(cuda_stream_t stream)
{
    for (int f = 0, s = 0; f < 2; f++) {
        if (!resident[f] || stream != &fake.stream[resident[f] - 1])
            continue;
        for (int i = 0; i < 8; i++)
            s |= scheduling[i] && schedulers[i].ffn == (uint32_t)f;
        return s;
    }
    return false;
}

static void plan_make(uint32_t delivery, uint32_t tp, uint32_t dp, uint32_t group)
{
    memset(&plan, 0, sizeof(plan));
    plan.atn_count = 1;
    plan.ffn_count = 2;
    plan.lanes = 2;
    plan.submission_timeout_ns = 1000000;
    plan.instance_count = 1;
    fabric_plan_instance_t *instance = &plan.instances[0];
    strcpy(instance->id, "tales");
    instance->hidden = HIDDEN;
    instance->layers = LAYERS;
    instance->max_rows = ROWS;
    instance->dtype = XP_DTYPE_BF16;
    instance->atn_tp = tp;
    instance->atn_dp = dp;
    instance->delivery = delivery;
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        instance->layer_group[layer] = group;
}

/* The stream made last, or `back` before it: the driver takes the first free ones in order. */
static int new_stream(const bool *before, int back)
{
    for (int i = FAKE_OBJECTS - 1; i >= 0; i--)
        if (fake.stream[i].used && !before[i] && back-- == 0)
            return i + 1;
    return 0;
}

static xp_status_t make_ffn(uint32_t f)
{
    stage_ffn_config_t config = {.device = &device,
                                 .plan = &plan,
                                 .ffn = f,
                                 .life = &life,
                                 .heap = heaps[1 + f],
                                 .kept = kept_stages[f]};
    bool before[FAKE_OBJECTS];
    for (uint32_t i = 0; i < FABRIC_MAX_INSTANCES; i++)
        kept_stages[f][i] = i == 0 ? kept[f] : -1;
    for (int i = 0; i < FAKE_OBJECTS; i++)
        before[i] = fake.stream[i].used;
    XP_TRY(stage_ffn_create(&config, &ffn[f]));
    /* The courier's is made after the scheduler's. */
    resident[f] = new_stream(before, plan.provider == FABRIC_PROVIDER_NVSHMEM_FAR);
    return XP_OK;
}
static xp_status_t exchange_partials(void)
{
    if (heaps[0])
        return XP_OK;
    for (uint32_t first = 0; first < 2; first++) {
        if (!(stage_reducers(&plan.instances[0]) >> first & 1))
            continue;
        int fd;
        XP_TRY(stage_ffn_export_partials(ffn[first], 0, &fd));
        xp_status_t status = stage_ffn_import_partials(ffn[1 - first], 0, first, fd);
        close(fd);
        XP_TRY(status);
    }
    return XP_OK;
}
static xp_status_t attach_rank(uint32_t rank)
{
    int fd;
    XP_TRY(stage_client_export(client[rank], &fd));
    xp_status_t status = stage_atn_attach(atn, 0, rank, fd, 7, SOON);
    close(fd);
    return status;
}
/* resume: of a former Generation, on the direct lane. */
static uint64_t answered[2];
static bool waits[2];
static xp_status_t hand_arenas(bool resume)
{
    uint32_t ranks = fabric_plan_ranks(&plan.instances[0]);
    int fds[2] = {-1, -1};
    xp_status_t status = XP_OK;
    for (uint32_t r = 0; !heaps[0] && r < ranks && status == XP_OK; r++)
        status = path == STAGE_DIRECT ? stage_client_export(client[r], &fds[r])
                                      : stage_atn_export(atn, 0, r, &fds[r]);
    for (uint32_t f = 0; f < 2 && status == XP_OK; f++)
        if (stage_members(&plan.instances[0]) >> f & 1)
            status = resume ? stage_ffn_resume(ffn[f], 0, fds, ranks, SOON, &answered[f], &waits[f])
                            : stage_ffn_attach(ffn[f], 0, heaps[0] ? NULL : fds, ranks, SOON);
    for (uint32_t r = 0; r < 2; r++)
        if (fds[r] >= 0)
            close(fds[r]);
    return status;
}
static xp_status_t attach_ffns(void)
{
    return hand_arenas(false);
}
static xp_status_t open_stages(void)
{
    for (uint32_t f = 0; f < 2 && !heaps[0]; f++) {
        if (!(stage_members(&plan.instances[0]) >> f & 1))
            continue;
        int fd;
        XP_TRY(stage_ffn_export(ffn[f], 0, &fd));
        xp_status_t status = XP_OK;
        if (path == STAGE_RELAY)
            status = stage_atn_open(atn, 0, f, fd);
        for (uint32_t r = 0;
             path == STAGE_DIRECT && status == XP_OK && r < fabric_plan_ranks(&plan.instances[0]);
             r++)
            status = stage_client_open(client[r], f, fd);
        close(fd);
        XP_TRY(status);
    }
    return XP_OK;
}
static xp_status_t make_clients(void)
{
    for (uint32_t r = 0; r < fabric_plan_ranks(&plan.instances[0]); r++) {
        stage_client_config_t config = {.device = &device,
                                        .instance = &plan.instances[0],
                                        .rank = r,
                                        .path = path,
                                        .life = &life,
                                        .limit_ns = 20};
        XP_TRY(stage_client_create(&config, &client[r]));
    }
    return XP_OK;
}
static xp_status_t make_heaps(void)
{
    unsigned char id[XPOOL_NVSHMEM_ID_BYTES];
    for (uint32_t pe = 0; fabric_provider_heap(plan.provider) && pe < PES; pe++) {
        XP_TRY(stage_heap_wrap(&plugin, &plan, &heaps[pe]));
        if (pe == 0)
            XP_TRY(stage_heap_make_id(heaps[pe], id));
        XP_TRY(stage_heap_join(heaps[pe], &device, pe, id));
    }
    return XP_OK;
}
static xp_status_t make_all(void)
{
    XP_TRY(make_heaps());
    for (uint32_t f = 0; f < 2; f++)
        XP_TRY(make_ffn(f));
    XP_TRY(exchange_partials());
    for (uint32_t f = 0; f < 2; f++)
        XP_TRY(stage_ffn_start(ffn[f]));
    XP_TRY(make_clients());
    if (path == STAGE_RELAY)
        XP_TRY(stage_atn_create(&device, &plan, 0, &life, heaps[0], RECORDS, &atn));
    XP_TRY(attach_ffns());
    XP_TRY(open_stages());
    for (uint32_t r = 0; path == STAGE_RELAY && r < fabric_plan_ranks(&plan.instances[0]); r++)
        XP_TRY(attach_rank(r));
    return XP_OK;
}
static void destroy_agents(void)
{
    stage_atn_destroy(atn);
    atn = NULL;
    for (uint32_t f = 0; f < 2; f++) {
        stage_ffn_destroy(ffn[f]);
        ffn[f] = NULL;
        resident[f] = 0;
    }
    for (uint32_t pe = 0; pe < PES; pe++) {
        stage_heap_close(heaps[pe]);
        heaps[pe] = NULL;
    }
    free(heap_memory);
    heap_memory = NULL;
    memset(joined, 0, sizeof(joined));
    memset(couriers, 0, sizeof(couriers));
}
static void destroy_all(void)
{
    for (uint32_t r = 0; r < 2; r++) {
        stage_client_destroy(client[r]);
        client[r] = NULL;
    }
    destroy_agents();
}
/* The ways that rows take: 0 direct, 1 relay, 2 relay over the symmetric heap, 3 the same where no
 * other PE's memory is mapped. After plan_make(). */
#define WAYS 4
static void go_by(int way)
{
    static const uint32_t providers[WAYS] = {FABRIC_PROVIDER_P2P, FABRIC_PROVIDER_P2P_RELAY,
                                             FABRIC_PROVIDER_NVSHMEM, FABRIC_PROVIDER_NVSHMEM_FAR};
    path = way ? STAGE_RELAY : STAGE_DIRECT;
    plan.provider = providers[way];
}

static int setup(void **state)
{
    fake_reset(kernels, sizeof(kernels) / sizeof(kernels[0]));
    memset(scheduling, 0, sizeof(scheduling));
    relay_table = NULL;
    still = false;
    now_ns = 1000;
    path = STAGE_DIRECT;
    fake.before_read = step;
    fake.after_launch = step_after;
    fake.busy = resident_busy;
    assert_int_equal(cuda_device_open(&fake_driver, 0, &device), XP_OK);
    assert_int_equal(transport_life_make(&life_fd), XP_OK);
    assert_int_equal(transport_cuda_life_open(&device, life_fd, 6, &life), XP_OK);
    plan_make(FABRIC_DELIVERY_DIRECT_PARTIAL, 1, 1, 3);
    return 0;
}
static int teardown(void **state)
{
    destroy_all();
    transport_cuda_life_close(&life);
    close(life_fd);
    assert_int_equal(fake_objects(), 0);
    cuda_device_close(&device);
    return 0;
}

static void ok(xp_status_t status)
{
    if (status != XP_OK)
        fail_msg("%s", xp_error_last()->text);
}
static void says(const char *text)
{
    if (!strstr(xp_error_last()->text, text))
        fail_msg("\"%s\" does not say \"%s\"", xp_error_last()->text, text);
}
static transport_tensor_t tensor(void *data, uint32_t rows)
{
    return (transport_tensor_t){.data = data,
                                .dtype = XP_DTYPE_BF16,
                                .rank = 2,
                                .rows = rows,
                                .width = HIDDEN,
                                .row_stride = HIDDEN};
}

/* One layer by one rank. */
static void rank_begin(uint32_t r, uint32_t layer, const uint32_t *dp_rows, bool call)
{
    const fabric_plan_instance_t *p = &plan.instances[0];
    transport_live_t live = {.rows = dp_rows[r / p->atn_tp]};
    memcpy(live.dp_rows, dp_rows, p->atn_dp * sizeof(uint32_t));
    for (uint32_t i = 0; i < ROWS * HIDDEN; i++)
        in[r][i] = stage_bits((float)((i + layer + r / p->atn_tp) % 40), FFN_CUDA_BF16);
    memset(out[r], 0, sizeof(out[r]));
    transport_tensor_t from = tensor(in[r], ROWS), to = tensor(out[r], ROWS);
    ok(stage_client_live_write(client[r], &live, NULL));
    if (call)
        ok(stage_client_call(client[r], layer, 0, &from, &to, NULL));
    else
        ok(stage_client_put(client[r], layer, 0, &from, NULL));
}
static void rank_take(uint32_t r)
{
    transport_tensor_t to = tensor(out[r], ROWS);
    ok(stage_client_wait(client[r], NULL));
    ok(stage_client_take(client[r], &to, NULL));
}
static void rank_check(uint32_t r, uint32_t layer, const uint32_t *dp_rows)
{
    const fabric_plan_instance_t *p = &plan.instances[0];
    uint32_t members = fabric_group_size(p->layer_group[layer]);
    ok(stage_client_finish(client[r], SOON));
    for (uint32_t i = 0; i < dp_rows[r / p->atn_tp] * HIDDEN; i++)
        assert_int_equal(out[r][i], stage_bits(stage_value(in[r][i], FFN_CUDA_BF16) *
                                                       (float)(members * (members + 1) / 2) +
                                                   (float)layer,
                                               FFN_CUDA_BF16));
}

/* One layer by all ranks; call: in one launch (single ranks only). */
static void pass_begin(uint32_t layer, const uint32_t *dp_rows, bool call)
{
    for (uint32_t r = 0; r < fabric_plan_ranks(&plan.instances[0]); r++)
        rank_begin(r, layer, dp_rows, call);
}
static void pass_end(uint32_t layer, const uint32_t *dp_rows, bool call)
{
    uint32_t ranks = fabric_plan_ranks(&plan.instances[0]);
    for (uint32_t r = 0; !call && r < ranks; r++)
        rank_take(r);
    for (uint32_t r = 0; r < ranks; r++)
        rank_check(r, layer, dp_rows);
}
static void pass(uint32_t layer, const uint32_t *dp_rows, bool call)
{
    pass_begin(layer, dp_rows, call);
    pass_end(layer, dp_rows, call);
}
#endif
