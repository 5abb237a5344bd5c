/* SPDX-License-Identifier: MIT */
/*
 * From one Generation to the next: all agents are killed at some step of a request, and those of
 * the next Generation take it up where it lies, in the Instance's arena or in the stages. Every
 * driver call of that is failed in turn.
 */
#include "host_rig.h"

/* All agents are killed; those of the next Generation take the Instance's requests up. */
static uint64_t next_fails_at; /* of its driver calls; 0: none */
static xp_status_t next_generation(void)
{
    xp_status_t status = XP_OK;
    for (uint32_t f = 0; f < 2; f++)
        if (path == STAGE_DIRECT && stage_members(&plan.instances[0]) >> f & 1)
            XP_TRY_GOTO(status, done, stage_ffn_export(ffn[f], 0, &kept[f]));
    memset(scheduling, 0, sizeof(scheduling));
    relay_table = NULL;
    memset(couriers, 0, sizeof(couriers));
    destroy_agents();
    fake.fail_at = next_fails_at;
    plan.generation++;
    XP_TRY_GOTO(status, done, make_heaps());
    for (uint32_t f = 0; f < 2; f++)
        XP_TRY_GOTO(status, done, make_ffn(f));
    XP_TRY_GOTO(status, done, exchange_partials());
    for (uint32_t f = 0; f < 2; f++)
        XP_TRY_GOTO(status, done, stage_ffn_start(ffn[f]));
    if (path == STAGE_RELAY)
        XP_TRY_GOTO(status, done,
                    stage_atn_create(&device, &plan, 0, &life, heaps[0], RECORDS, &atn));
    still = false;
    XP_TRY_GOTO(status, done, hand_arenas(path == STAGE_DIRECT));
    if (path == STAGE_RELAY) {
        XP_TRY_GOTO(status, done, open_stages());
        XP_TRY_GOTO(status, done, attach_rank(0));
    }
done:
    for (uint32_t f = 0; f < 2; f++) {
        if (kept[f] >= 0)
            close(kept[f]);
        kept[f] = -1;
    }
    still = false;
    return status;
}

/* All agents die while a request is open: before anybody saw it, with the first member's part done,
 * with the answer in the arena; and between two requests. The Instance's launches stay what they
 * were. */
static void test_generations(void **state)
{
    static const uint32_t groups[] = {1, 2, 3};
    for (int by = 0; by < WAYS; by++)
        for (uint32_t delivery = 0; delivery < 3; delivery++)
            for (uint32_t g = 0; g < 3; g++) {
                plan_make(delivery, 1, 1, groups[g]);
                go_by(by);
                ok(make_all());
                cuda_graph_exec_t graph;
                cuda_stream_t stream;
                static _Alignas(16) uint16_t row[HIDDEN], row_out[HIDDEN];
                transport_tensor_t from = tensor(row, 1), to = tensor(row_out, 1);
                ok(cuda_stream_create(&device, false, &stream));
                ok(cuda_capture_begin(&device, stream));
                ok(stage_client_call(client[0], 3, 0, &from, &to, stream));
                ok(cuda_capture_end(&device, stream, &graph));
                uint64_t sequence = 0;
                for (uint32_t progress = 0; progress < 4; progress++) {
                    uint32_t rows = 3 + progress;
                    pass(progress % LAYERS, &rows, true);
                    sequence++;
                    still = true;
                    if (progress < 3) {
                        pass_begin(1, &rows, false);
                        sequence++;
                    }
                    for (uint32_t i = 0; relay_table && progress && i < relay_table->slots; i++)
                        host_relay_round(relay_table, relay, i);
                    if (progress == 1)
                        scheduler_turns(0);
                    for (int i = 0; progress == 2 && i < 6; i++)
                        scheduler_turns(i % 2);
                    ok(next_generation());
                    for (uint32_t f = 0; f < 2 && by == 0; f++) {
                        bool part = delivery == FABRIC_DELIVERY_DIRECT_PARTIAL && groups[g] == 3;
                        bool open =
                            progress < 2 && !(progress == 1 && f == 0 && (part || groups[g] == 1));
                        if (!(groups[g] >> f & 1))
                            continue;
                        assert_true(stage_ffn_adopted(ffn[f], 0));
                        assert_int_equal(waits[f], open);
                        assert_int_equal(answered[f], sequence - open);
                    }
                    if (by == 1) {
                        transport_cuda_report_t report;
                        ok(stage_atn_report(atn, 0, 0, SOON, &report));
                        assert_int_equal(report.found_open, progress < 3);
                    }
                    if (progress < 3)
                        pass_end(1, &rows, false);
                    /* What was captured before goes where it went. */
                    row[0] = stage_bits(7, FFN_CUDA_BF16);
                    transport_live_t live = {.rows = 1};
                    ok(stage_client_live_write(client[0], &live, stream));
                    ok(cuda_graph_launch(&device, graph, stream));
                    ok(stage_client_finish(client[0], SOON));
                    uint32_t members = fabric_group_size(groups[g]);
                    assert_int_equal(
                        row_out[0],
                        stage_bits(7 * (float)(members * (members + 1) / 2) + 3, FFN_CUDA_BF16));
                    sequence++;
                }
                cuda_graph_destroy(&device, graph);
                cuda_stream_destroy(&device, stream);
                destroy_all();
            }
}

/* Several ranks on the direct lane: one may have put the next line already, but none may have an
 * answer that another one lacks. */
static void test_generations_of_ranks(void **state)
{
    static const uint32_t attention[][2] = {{2, 1}, {1, 2}};
    for (uint32_t delivery = 0; delivery < 3; delivery++)
        for (uint32_t a = 0; a < 2; a++) {
            const uint32_t rows[] = {3, 2};
            plan_make(delivery, attention[a][0], attention[a][1], 3);
            ok(make_all());
            pass(0, rows, false);
            still = true;
            pass_begin(1, rows, false);
            ok(next_generation());
            pass_end(1, rows, false);
            /* The second rank puts when the next Generation is there. */
            still = true;
            transport_live_t live = {.rows = rows[0], .dp_rows = {3, 2}};
            transport_tensor_t from = tensor(in[0], ROWS), to = tensor(out[0], ROWS);
            ok(stage_client_live_write(client[0], &live, NULL));
            ok(stage_client_put(client[0], 2, 0, &from, NULL));
            ok(next_generation());
            live.rows = rows[a];
            from = tensor(in[1], ROWS);
            ok(stage_client_live_write(client[1], &live, NULL));
            ok(stage_client_put(client[1], 2, 0, &from, NULL));
            for (uint32_t r = 0; r < 2; r++) {
                to = tensor(out[r], ROWS);
                ok(stage_client_wait(client[r], NULL));
                ok(stage_client_take(client[r], &to, NULL));
                ok(stage_client_finish(client[r], SOON));
                assert_int_equal(out[r][1],
                                 stage_bits(3 * stage_value(in[a ? r : 0][1], FFN_CUDA_BF16) + 2,
                                            FFN_CUDA_BF16));
            }
            /* The words of the second rank are not written any more. */
            struct stage_put put;
            transport_cuda_parts_t parts;
            uint32_t direct;
            ok(stage_client_describe(client[1], 0, 1, &put, &direct, &parts));
            mailbox_arena_t *arena = (mailbox_arena_t *)(uintptr_t)parts.arena;
            arena->response.sequence--;
            mailbox_partial_at(arena, 0)->sequence--;
            assert_int_equal(next_generation(), XP_PEER);
            says("rank 0 had the answer to request 3, rank 1 that to 2");
            destroy_all();
        }
}

static void test_generations_refused(void **state)
{
    int fd;
    const uint32_t rows = 2;
    plan_make(FABRIC_DELIVERY_SINGLE_COMPLETE, 1, 1, 1);
    ok(make_all());
    pass(0, &rows, true);
    /* Not a stage of this Instance: the FfnAgent makes a fresh one. */
    ok(stage_client_export(client[0], &fd));
    memset(scheduling, 0, sizeof(scheduling));
    destroy_agents();
    kept[0] = fd;
    ok(make_ffn(0));
    kept[0] = -1;
    assert_false(stage_ffn_adopted(ffn[0], 0));
    ok(stage_ffn_start(ffn[0]));
    assert_int_equal(stage_ffn_resume(ffn[0], 0, &fd, 1, SOON, &answered[0], &waits[0]),
                     XP_UNSUPPORTED);
    says("could not take over the memory in which requests of tales wait");
    assert_int_equal(stage_ffn_resume(ffn[0], 1, &fd, 1, SOON, &answered[0], &waits[0]),
                     XP_INVALID);
    close(fd);
    destroy_all();
    plan_make(FABRIC_DELIVERY_SINGLE_COMPLETE, 1, 1, 3);
    plan.instances[0].layer_group[1] = 1;
    ok(make_all());
    assert_int_equal(next_generation(), XP_UNSUPPORTED);
    says("different Execution Groups");
    destroy_all();
    /* Who is no successor: the next Instance finds nothing of the former one. */
    plan_make(FABRIC_DELIVERY_SINGLE_COMPLETE, 1, 1, 1);
    ok(make_all());
    pass(0, &rows, true);
    still = true;
    pass_begin(1, &rows, false);
    ok(stage_ffn_export(ffn[0], 0, &kept[0]));
    memset(scheduling, 0, sizeof(scheduling));
    destroy_agents();
    stage_client_destroy(client[0]);
    still = false;
    ok(make_ffn(0));
    assert_true(stage_ffn_adopted(ffn[0], 0));
    close(kept[0]);
    kept[0] = -1;
    ok(make_ffn(1));
    ok(stage_ffn_start(ffn[0]));
    ok(make_clients());
    ok(attach_ffns());
    ok(open_stages());
    pass(0, &rows, true);
}

static void test_generation_ladders(void **state)
{
    for (int by = 0; by < WAYS; by++) {
        const uint32_t rows = 2;
        plan_make(FABRIC_DELIVERY_REPLICATED_COMPLETE, 1, 1, 3);
        go_by(by);
        int objects = fake_objects();
        for (uint64_t n = 1;; n++) {
            assert_true(n < 600);
            plan.generation = 0;
            ok(make_all());
            still = true;
            pass_begin(1, &rows, false);
            next_fails_at = n;
            xp_status_t status = next_generation();
            bool failed = fake.fail_at == 0;
            next_fails_at = fake.fail_at = 0;
            if (!failed)
                pass_end(1, &rows, false);
            destroy_all();
            assert_int_equal(fake_objects(), objects);
            if (!failed) {
                assert_int_equal(status, XP_OK);
                break;
            }
            assert_int_not_equal(status, XP_OK);
        }
    }
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_generations),
        TEST(test_generations_of_ranks),
        TEST(test_generations_refused),
        TEST(test_generation_ladders),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
