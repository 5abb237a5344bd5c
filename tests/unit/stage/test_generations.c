/* SPDX-License-Identifier: MIT */
/*
 * From one Generation to the next: all agents are killed at some step of a request, and those of
 * the next Generation take it up where it lies, in the Instance's arena or in the stages. Every
 * driver call of that is failed in turn.
 */
#include "host_rig.h"

/* By the relay, one rank after the other, each with the arenas of all. */
static bool last_rank_first;
static uint32_t handed_from[2]; /* whom each rank has its last answer from */
static xp_status_t resume_ranks(void)
{
    uint32_t ranks = fabric_plan_ranks(&plan.instances[0]);
    int fds[2] = {-1, -1};
    xp_status_t status = XP_OK;
    for (uint32_t r = 0; r < ranks && status == XP_OK; r++)
        status = stage_client_export(client[r], &fds[r]);
    for (uint32_t i = 0; i < ranks && status == XP_OK; i++) {
        uint32_t r = last_rank_first ? ranks - 1 - i : i;
        status = stage_atn_resume(atn, 0, r, fds, ranks, 7, SOON, &handed_from[r]);
    }
    for (uint32_t r = 0; r < 2; r++)
        if (fds[r] >= 0)
            close(fds[r]);
    return status;
}

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
        XP_TRY_GOTO(status, done, resume_ranks());
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

/* What the agents did of layer 1 when they were killed. */
enum {
    NOBODY_SAW_IT,
    ONE_LINE_IS_PUT,
    ALL_LINES_ARE_PUT,
    IT_IS_COMPUTED,
    ONE_IS_ANSWERED,
    ONE_PUTS_THE_NEXT,
    ALL_ARE_ANSWERED,
    PROGRESSES
};
/* The first or second rank is the one. */
static void progress_by_relay(uint32_t progress, uint32_t one, const uint32_t *rows)
{
    still = true;
    pass_begin(1, rows, false);
    for (uint32_t r = 0; r < 2; r++)
        if (progress >= ALL_LINES_ARE_PUT || (progress == ONE_LINE_IS_PUT && r == one))
            host_relay_round(relay_table, relay, r);
    for (int n = 0; n < 8 && progress >= IT_IS_COMPUTED; n++) {
        for (int i = 0; i < 8; i++)
            scheduler_turns(i);
        for (int i = 0; i < 2; i++)
            if (couriers[i])
                courier_round(i);
    }
    if (progress >= ONE_IS_ANSWERED)
        host_relay_round(relay_table, relay, one);
    if (progress == ALL_ARE_ANSWERED)
        host_relay_round(relay_table, relay, 1 - one);
    if (progress == ONE_PUTS_THE_NEXT) {
        rank_take(one);
        rank_check(one, 1, rows);
        rank_begin(one, 2, rows, false);
    }
}

/* Several ranks by the relay: one may have its answer and have put the next line, and the other
 * gets the same rows, of attention TP. Of attention DP they are nowhere. */
static void test_generations_of_ranks_by_relay(void **state)
{
    static const uint32_t attention[][2] = {{2, 1}, {1, 2}};
    for (uint32_t at = 0; at < 3 * 3 * 2 * PROGRESSES * 4; at++) {
        const uint32_t way = 1 + at % 3, delivery = at / 3 % 3, a = at / 9 % 2;
        const uint32_t progress = at / 18 % PROGRESSES, one = at / (18 * PROGRESSES) % 2;
        const uint32_t rows[] = {3, 2};
        last_rank_first = at / (18 * PROGRESSES * 2) % 2;
        plan_make(delivery, attention[a][0], attention[a][1], 3);
        go_by((int)way);
        ok(make_all());
        pass(0, rows, false);
        progress_by_relay(progress, one, rows);
        bool differ = progress == ONE_IS_ANSWERED || progress == ONE_PUTS_THE_NEXT;
        if (differ && a == 1) {
            assert_int_equal(next_generation(), XP_PEER);
            says(one ? "rank 1 had the answer to request 2, rank 0 that to 1"
                     : "rank 0 had the answer to request 2, rank 1 that to 1");
            destroy_all();
            continue;
        }
        ok(next_generation());
        assert_int_equal(handed_from[one], one);
        assert_int_equal(handed_from[1 - one], differ ? one : 1 - one);
        if (differ) { /* handed on, and no other layer's */
            transport_cuda_report_t report;
            ok(stage_atn_report(atn, 0, 1 - one, SOON, &report));
            assert_int_equal(report.found_answered, 2);
            assert_false(report.found_open);
        }
        for (uint32_t i = 0; i < 2; i++) {
            uint32_t r = i ? one : 1 - one;
            if (progress == ONE_PUTS_THE_NEXT && r == one)
                continue;
            rank_take(r);
            rank_check(r, 1, rows);
            if (progress == ONE_PUTS_THE_NEXT)
                rank_begin(r, 2, rows, false);
        }
        if (progress == ONE_PUTS_THE_NEXT)
            pass_end(2, rows, false);
        pass(3, rows, false);
        destroy_all();
    }
    last_rank_first = false;
}

/* What lies in an arena is a peer's: more than one answer behind, or no request for it. */
static void test_generations_of_ranks_refused(void **state)
{
    const uint32_t rows[] = {3, 2};
    static const char *const said[] = {
        "rank 0 had the answer to request 2, rank 1 that to 0",
        "an answer 2 of status 0 is not for request 1 of 3 rows, after answer 1",
        "an answer 2 of status 0 is not for request 2 of 9 rows, after answer 1",
        "an answer 2 of status 99 is not for request 2 of 3 rows, after answer 1",
        "1 arenas for tales of 2 ranks",
    };
    for (uint32_t wrong = 0; wrong < sizeof(said) / sizeof(said[0]); wrong++) {
        struct stage_put put;
        transport_cuda_parts_t parts[2];
        mailbox_arena_t *arenas[2];
        uint32_t direct;
        plan_make(FABRIC_DELIVERY_REPLICATED_COMPLETE, 2, 1, 1);
        go_by(1);
        ok(make_all());
        pass(0, rows, false);
        progress_by_relay(ONE_IS_ANSWERED, 0, rows);
        for (uint32_t r = 0; r < 2; r++) {
            ok(stage_client_describe(client[r], 0, 1, &put, &direct, &parts[r]));
            arenas[r] = (mailbox_arena_t *)(uintptr_t)parts[r].arena;
        }
        if (wrong == 0)
            arenas[1]->response.sequence = 0;
        else if (wrong == 1)
            arenas[1]->request.sequence = 1;
        else if (wrong == 2)
            arenas[1]->request.rows = ROWS + 1;
        else if (wrong == 3)
            arenas[0]->response.status = 99;
        if (wrong == 4) {
            int fd;
            ok(next_generation());
            ok(stage_client_export(client[0], &fd));
            ok(stage_atn_detach(atn, 0, 0, SOON));
            assert_int_equal(stage_atn_resume(atn, 0, 0, &fd, 1, 7, SOON, &handed_from[0]),
                             XP_INVALID);
            close(fd);
        } else {
            assert_int_equal(next_generation(), XP_PEER);
        }
        says(said[wrong]);
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
    for (int by = 0; by <= WAYS; by++) {
        const bool several = by == WAYS; /* ranks by the relay, of which one has its answer */
        const uint32_t rows = 2;
        plan_make(FABRIC_DELIVERY_REPLICATED_COMPLETE, several ? 2 : 1, 1, 3);
        go_by(several ? 1 : by);
        int objects = fake_objects();
        for (uint64_t n = 1;; n++) {
            assert_true(n < 600);
            plan.generation = 0;
            ok(make_all());
            still = true;
            if (several)
                progress_by_relay(ONE_IS_ANSWERED, 0, &rows);
            else
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
        TEST(test_generations_of_ranks_by_relay),
        TEST(test_generations_of_ranks_refused),
        TEST(test_generations_refused),
        TEST(test_generation_ladders),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
