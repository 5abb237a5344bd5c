/* SPDX-License-Identifier: MIT */
/*
 * The host objects of module stage over the fake driver: FfnAgents, clients and the relay in one
 * process, also with a symmetric heap over ordinary memory. Kernels are played by the same
 * functions that the GPU runs; resident ones take turns after each launch and at each read of the
 * host. Every driver call is failed in turn.
 */
#include "host_rig.h"

#include <unistd.h>

#include "observe/observe.h"

static void test_deliveries(void **state)
{
    static const uint32_t attention[][2] = {{1, 1}, {2, 1}, {1, 2}}, groups[] = {1, 2, 3};
    for (int by = 0; by < WAYS; by++)
        for (uint32_t delivery = 0; delivery < 3; delivery++)
            for (uint32_t a = 0; a < 3; a++)
                for (uint32_t g = 0; g < 3; g++) {
                    plan_make(delivery, attention[a][0], attention[a][1], groups[g]);
                    go_by(by);
                    carried = 0;
                    ok(make_all());
                    for (uint32_t n = 0; n < 6; n++)
                        pass(n % LAYERS, (const uint32_t[]){n, (n * 5) % 7}, a == 0 && n % 2 == 0);
                    for (uint32_t f = 0; f < 2; f++) {
                        stage_ffn_counters_t counters;
                        uint64_t dropped, invocations, rows;
                        ok(stage_ffn_look(ffn[f], SOON, &dropped));
                        assert_int_equal(dropped, 0);
                        ok(stage_ffn_counters(ffn[f], SOON, &counters));
                        bool member = groups[g] >> f & 1;
                        assert_int_equal(counters.invocations, member ? 6 : 0);
                        if (!member)
                            continue;
                        ok(stage_ffn_instance_counters(ffn[f], 0, SOON, &invocations, &rows));
                        assert_int_equal(invocations, 6);
                        assert_int_equal(rows, counters.rows);
                    }
                    assert_true((by == 3) == (carried != 0));
                    destroy_all();
                }
}

/* What the observer's file says. */
static uint32_t read_observed(const char *folder, observe_record_t *records, uint32_t limit)
{
    char path[300];
    observe_reader_t *reader;
    snprintf(path, sizeof(path), "%s/atnagent-cuda:0-%d.observe", folder, getpid());
    ok(observe_reader_open(path, &reader));
    assert_string_equal(observe_reader_header(reader)->instance[0], "tales");
    uint32_t count = 0;
    while (count < limit && observe_reader_next(reader, &records[count]) == XP_OK)
        count++;
    observe_reader_close(reader);
    unlink(path);
    return count;
}

/* Each request that the relay answers is one record; what is not taken in time is counted. */
static void test_observed(void **state)
{
    char folder[] = "/tmp/xpool-observed-XXXXXX";
    assert_non_null(mkdtemp(folder));
    for (int by = 1; by < WAYS; by++) {
        observe_t *observe;
        observe_record_t records[8 * RECORDS];
        plan_make(FABRIC_DELIVERY_DIRECT_PARTIAL, 1, 2, 3);
        go_by(by);
        ok(make_all());
        ok(observe_open(folder, OBSERVE_ATN, "cuda:0", 8 * RECORDS, &observe));
        observe_name_instance(observe, 0, plan.instances[0].id);
        const uint64_t began_ns = xp_monotonic_ns();
        for (uint32_t n = 0; n < 5; n++)
            pass(n % LAYERS, (const uint32_t[]){n, n + 1}, false);
        assert_int_equal(stage_atn_observe(atn, observe), 0);
        for (uint32_t n = 0; n < RECORDS; n++)
            pass(0, (const uint32_t[]){1, 1}, false);
        assert_int_equal(stage_atn_observe(atn, observe), RECORDS);
        observe_close(observe);
        uint32_t seen[2] = {0};
        assert_int_equal(read_observed(folder, records, 8 * RECORDS), 10 + RECORDS);
        for (uint32_t i = 0; i < 10; i++) {
            const observe_record_t *one = &records[i];
            assert_true(one->rank < 2 && one->instance == 0);
            const uint32_t n = seen[one->rank]++;
            assert_int_equal(one->layer, n % LAYERS);
            assert_int_equal(one->rows, n + one->rank);
            assert_int_equal(one->sequence, n + 1);
            assert_int_equal(one->request, n + 1);
            assert_int_equal(one->lane, OBSERVE_NONE);
            /* Both clocks are one here: the tie is off by what an attach takes. */
            assert_true(one->end_ns + XP_NS_PER_S > began_ns + one->duration_ns);
            assert_true(one->end_ns < xp_monotonic_ns() + XP_NS_PER_S);
        }
        assert_int_equal(seen[0], 5);
        destroy_all();
    }
    rmdir(folder);
}

/* The Instance goes, also in the middle; another one comes. */
static void test_successor(void **state)
{
    for (int by = 0; by < WAYS; by++) {
        plan_make(FABRIC_DELIVERY_REPLICATED_COMPLETE, 2, 1, 3);
        go_by(by);
        ok(make_all());
        pass(0, (const uint32_t[]){3}, false);
        transport_tensor_t from = tensor(in[0], ROWS);
        ok(stage_client_put(client[0], 1, 0, &from, NULL)); /* and dies */
        for (uint32_t r = 0; r < 2; r++) {
            if (by)
                ok(stage_atn_detach(atn, 0, r, SOON));
            stage_client_destroy(client[r]);
            client[r] = NULL;
        }
        for (uint32_t f = 0; f < 2; f++)
            ok(stage_ffn_detach(ffn[f], 0, SOON));
        ok(make_clients());
        ok(attach_ffns());
        for (uint32_t r = 0; r < 2 && by; r++)
            ok(attach_rank(r));
        if (!by)
            ok(open_stages());
        for (uint32_t n = 0; n < 3; n++) /* its first request has the predecessor's number */
            pass(n, (const uint32_t[]){n}, false);
        destroy_all();
    }
}

static void test_refusals(void **state)
{
    int fd, fds[2];
    plan_make(FABRIC_DELIVERY_SINGLE_COMPLETE, 1, 1, 2);
    plan.instances[0].dtype = XP_DTYPE_F32;
    assert_int_equal(make_ffn(0), XP_UNSUPPORTED);
    says("bf16 or f16");
    plan.instances[0].dtype = XP_DTYPE_BF16;
    ok(make_all());
    assert_int_equal(stage_ffn_export(ffn[0], 0, &fd), XP_NOT_FOUND);
    says("no Execution Group");
    assert_int_equal(stage_ffn_export_partials(ffn[1], 0, &fd), XP_NOT_FOUND);
    ok(stage_client_export(client[0], &fds[0]));
    assert_int_equal(stage_ffn_attach(ffn[1], 0, fds, 1, SOON), XP_INVALID);
    says("attached already");
    assert_int_equal(stage_client_open(client[0], 0, fds[0]), XP_INVALID);
    assert_int_equal(stage_client_open(client[0], 1, fds[0]), XP_INVALID);
    says("open already");
    ok(stage_ffn_detach(ffn[1], 0, SOON));
    assert_int_equal(stage_ffn_detach(ffn[1], 0, SOON), XP_NOT_FOUND);
    assert_int_equal(stage_ffn_attach(ffn[1], 0, fds, 2, SOON), XP_INVALID);
    /* Another Instance's arena. */
    transport_geometry_t other = stage_geometry(&plan.instances[0]);
    other.hidden = HIDDEN / 2;
    transport_cuda_client_t *stranger;
    ok(transport_cuda_client_create(&device, &other, &life, 1, 0, &stranger));
    close(fds[0]);
    ok(transport_cuda_client_export(stranger, &fds[0]));
    assert_int_equal(stage_ffn_attach(ffn[1], 0, fds, 1, SOON), XP_PEER);
    says("planned are");
    transport_cuda_client_destroy(stranger);
    close(fds[0]);
    ok(attach_ffns());
    transport_tensor_t from = tensor(in[0], ROWS);
    assert_int_equal(stage_client_put(client[0], LAYERS, 0, &from, NULL), XP_INVALID);
    says("layer 4");
    stage_client_destroy(client[0]);
    ok(make_clients());
    assert_int_equal(stage_client_put(client[0], 0, 0, &from, NULL), XP_RETRY);
    says("not open yet");
}

/* Two Instances of one model: their stages and partials differ in nothing but whose they are. */
static void test_whose_stage(void **state)
{
    int fd;
    plan_make(FABRIC_DELIVERY_SINGLE_COMPLETE, 1, 1, 3);
    plan.generation = 7;
    plan.instances[1] = plan.instances[0];
    plan.instance_count = 2;
    ok(make_ffn(0));
    ok(make_ffn(1));
    ok(stage_ffn_export_partials(ffn[0], 1, &fd));
    assert_int_equal(stage_ffn_import_partials(ffn[1], 0, 0, fd), XP_PEER);
    says("for Instance 1");
    ok(stage_ffn_import_partials(ffn[1], 1, 0, fd));
    close(fd);
    ok(stage_ffn_export(ffn[0], 0, &fd));
    assert_int_equal(stage_ffn_import_partials(ffn[1], 0, 0, fd), XP_PEER);
    says("no partials");
    ok(stage_atn_create(&device, &plan, 0, &life, NULL, RECORDS, &atn));
    assert_int_equal(stage_atn_open(atn, 1, 0, fd), XP_PEER);
    says("for Instance 0 in Generation 7");
    ok(stage_atn_open(atn, 0, 0, fd));
    stage_client_config_t config = {.device = &device,
                                    .instance = &plan.instances[1],
                                    .index = 1,
                                    .generation = 7,
                                    .life = &life,
                                    .limit_ns = 20};
    ok(stage_client_create(&config, &client[0]));
    assert_int_equal(stage_client_open(client[0], 0, fd), XP_PEER);
    says("for Instance 0");
    stage_client_destroy(client[0]);
    config.index = 0;
    config.generation = 6;
    ok(stage_client_create(&config, &client[0]));
    assert_int_equal(stage_client_open(client[0], 0, fd), XP_PEER);
    says("in Generation 6");
    close(fd);
}

static void test_partials_are_needed(void **state)
{
    plan_make(FABRIC_DELIVERY_SINGLE_COMPLETE, 1, 1, 3);
    ok(make_ffn(1));
    assert_int_equal(stage_ffn_start(ffn[1]), XP_INVALID);
    says("partials of FfnAgent 0");
}

static void test_failures(void **state)
{
    uint64_t dropped;
    plan_make(FABRIC_DELIVERY_SINGLE_COMPLETE, 2, 1, 1);
    ok(make_all());
    transport_tensor_t from = tensor(in[0], ROWS);
    transport_live_t live = {.rows = 2};
    ok(stage_client_live_write(client[0], &live, NULL));
    ok(stage_client_put(client[0], 2, 0, &from, NULL));
    ok(stage_ffn_look(ffn[0], SOON, &dropped));
    now_ns += 5000000;
    assert_int_equal(stage_ffn_look(ffn[0], SOON, &dropped), XP_FATAL);
    says("tales: rank 1 did not submit layer 2 within 5 ms of rank 0");
    ok(stage_ffn_fail(ffn[0], false));
    ok(stage_client_wait(client[0], NULL));
    assert_int_equal(stage_client_finish(client[0], SOON), XP_FATAL);
    destroy_all();

    ok(make_all());
    for (uint32_t r = 0; r < 2; r++) {
        ok(stage_client_live_write(client[r], &live, NULL));
        ok(stage_client_put(client[r], r, 0, &from, NULL));
    }
    assert_int_equal(stage_ffn_look(ffn[0], SOON, &dropped), XP_FATAL);
    says("tales: rank 0 (layer 0, request 1, 2 rows) and rank 1 (layer 1, request 1, 2 rows) "
         "disagree");
    destroy_all();

    /* Nonsense drops its Instance, and is said once. */
    plan_make(FABRIC_DELIVERY_SINGLE_COMPLETE, 1, 1, 1);
    ok(make_all());
    stage_line_t *line = (stage_line_t *)schedulers[0].lines[0].line;
    line->layer = 99;
    stage_line_publish(line, &(stage_line_t){.sequence = 1, .layer = 99});
    ok(stage_ffn_look(ffn[0], SOON, &dropped));
    assert_int_equal(dropped, 1);
    ok(stage_ffn_look(ffn[0], SOON, &dropped));
    assert_int_equal(dropped, 0);
    ok(stage_ffn_detach(ffn[0], 0, SOON));
    ok(stage_ffn_shutdown(ffn[0]));
    assert_int_equal(stage_ffn_look(ffn[0], SOON, &dropped), XP_CLOSED);
}

static void test_time_limit(void **state)
{
    plan_make(FABRIC_DELIVERY_SINGLE_COMPLETE, 1, 1, 1);
    ok(make_all());
    still = true;
    transport_tensor_t from = tensor(in[0], 1), to = tensor(out[0], 1);
    transport_live_t live = {.rows = 1};
    ok(stage_client_live_write(client[0], &live, NULL));
    ok(stage_client_call(client[0], 0, 0, &from, &to, NULL));
    assert_int_equal(stage_client_finish(client[0], SOON), XP_TIMEOUT);
    assert_int_equal(out[0][0], 0xffff);
    still = false;
}

static void test_sizes(void **state)
{
    stage_bytes_t bytes;
    plan_make(FABRIC_DELIVERY_SINGLE_COMPLETE, 1, 2, 3);
    plan.instances[0].max_rows = 8192;
    plan.instances[0].hidden = 2048;
    stage_ffn_bytes(&plan, 0, &bytes);
    assert_int_equal(bytes.stages, (64u << 20) + (2u << 20));
    assert_int_equal(bytes.partials, (256u << 20) + (2u << 20));
    stage_ffn_bytes(&plan, 1, &bytes);
    assert_int_equal(bytes.partials, 0);
    assert_int_equal(stage_reducers(&plan.instances[0]), 1);
    assert_int_equal(stage_geometry(&plan.instances[0]).partials, 0);
    plan.instances[0].delivery = FABRIC_DELIVERY_DIRECT_PARTIAL;
    assert_int_equal(stage_geometry(&plan.instances[0]).partials, 2);
    assert_int_equal(stage_arena_bytes(&plan.instances[0]),
                     (64u << 20) + (128u << 20) + (2u << 20));
    stage_ffn_bytes(&plan, 1, &bytes);
    assert_int_equal(bytes.partials, 128u << 20); /* scratch */
    assert_int_equal(stage_reducers(&plan.instances[0]), 0);
    assert_int_equal(stage_members(&plan.instances[0]), 3);
    assert_int_equal(stage_max_rows(&plan, 1), 16384);
    assert_int_equal(stage_buffer_rows(&plan, 1), 0);
    plan.instances[0].layer_group[2] = 2;
    assert_int_equal(stage_buffer_rows(&plan, 1), 16384);
    assert_int_equal(stage_buffer_rows(&plan, 0), 0);
}

/* Each driver call from making to a whole pass fails in turn; nothing is left each time. */
static void test_ladders(void **state)
{
    for (int by = 0; by < WAYS; by++) {
        plan_make(FABRIC_DELIVERY_REPLICATED_COMPLETE, 1, 1, 3);
        go_by(by);
        int objects = fake_objects();
        uint64_t n = 1;
        for (;; n++) {
            assert_true(n < 600);
            fake.fail_at = n;
            xp_status_t status = make_all();
            xp_error_t error = *xp_error_last();
            bool failed = fake.fail_at == 0;
            fake.fail_at = 0;
            destroy_all();
            assert_int_equal(fake_objects(), objects);
            if (!failed) {
                assert_int_equal(status, XP_OK);
                break;
            }
            assert_int_not_equal(status, XP_OK);
            xp_fail(status, "%s", error.text);
            says(fake.failed);
        }
        assert_true(n > 100);
    }
}

static void test_heap_refusals(void **state)
{
    unsigned char id[XPOOL_NVSHMEM_ID_BYTES] = {0};
    int fd;
    plan_make(FABRIC_DELIVERY_SINGLE_COMPLETE, 1, 1, 3);
    go_by(2);
    ok(stage_heap_wrap(&plugin, &plan, &heaps[0]));
    assert_int_equal(stage_heap_join(heaps[0], &device, 3, id), XP_INVALID);
    says("PE 3 of 3");
    assert_int_equal(stage_heap_join(heaps[0], &device, 0, id), XP_FATAL);
    says("cannot join NVSHMEM");
    ok(stage_heap_make_id(heaps[0], id));
    sharing_says = XPOOL_NVSHMEM_LIMITED;
    assert_int_equal(stage_heap_join(heaps[0], &device, 0, id), XP_UNSUPPORTED);
    says("limited multi-process support: MPS must run there");
    sharing_says = XPOOL_NVSHMEM_FULL;
    memset(joined, 0, sizeof(joined));
    ok(stage_heap_join(heaps[0], &device, 0, id));
    for (uint64_t i = 0; i < heap_bytes; i++)
        assert_int_equal(heap_memory[i], 0);
    assert_int_equal(stage_heap_join(heaps[0], &device, 0, id), XP_INVALID);
    says("joins again");
    assert_true(stage_heap_peer(heaps[0], 4096, 2) ==
                (uint64_t)(uintptr_t)heap_memory + 2 * heap_bytes + 4096);
    destroy_all();
    sharing_says = XPOOL_NVSHMEM_ALONE;
    heap_modules = 0;
    ok(make_all());
    assert_int_equal(heap_modules, 1);
    assert_int_equal(stage_atn_export(atn, 0, 0, &fd), XP_INVALID);
    says("not exported");
    assert_int_equal(stage_atn_open(atn, 0, 0, -1), XP_INVALID);
    assert_int_equal(stage_ffn_export(ffn[0], 0, &fd), XP_INVALID);
    assert_int_equal(stage_ffn_import_partials(ffn[1], 0, 0, -1), XP_INVALID);
    destroy_all();
    /* Far: closing the outbox closes the relay's arena, and the Instance sees it. */
    go_by(3);
    ok(make_all());
    assert_int_equal(heap_modules, 4);
    stage_line_t *line = (stage_line_t *)schedulers[0].lines[0].line;
    const stage_line_t nonsense = {.sequence = 1, .layer = 99};
    stage_line_fill(line, &nonsense);
    stage_line_publish(line, &nonsense);
    step();
    mailbox_arena_t *arena =
        (mailbox_arena_t *)(heap_memory + stage_heap_offset(&plan, STAGE_HEAP_RELAY, 0, 0, 0));
    assert_int_equal(mailbox_closed(arena), XP_PEER);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_deliveries), TEST(test_observed),      TEST(test_successor),
        TEST(test_refusals),   TEST(test_whose_stage),   TEST(test_partials_are_needed),
        TEST(test_failures),   TEST(test_time_limit),    TEST(test_sizes),
        TEST(test_ladders),    TEST(test_heap_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
