/* SPDX-License-Identifier: MIT */
/*
 * Records that no honest peer would write. Each ends the Generation with a text that names the
 * record, or is ignored; none ends in rows that are not the answer. The test writes as the peer
 * would, through the daemon's participant.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "fabric/internal.h"
#include "rig.h"

/* Whoever runs ends with the canonical failure, which contains `expected`. */
static void check_failed(rig_t *rig, const char *expected)
{
    rig_join(rig, 0);
    assert_int_equal(fabric_failure(rig->observer, NULL), XP_FATAL);
    char canonical[XP_ERROR_TEXT_MAX];
    snprintf(canonical, sizeof(canonical), "%s", xp_error_last()->text);
    if (!strstr(canonical, expected))
        fprintf(stderr, "canonical failure: %s\n", canonical);
    assert_non_null(strstr(canonical, expected));
    for (uint32_t pe = 0; pe < rig->plan.atn_count + rig->plan.ffn_count; pe++)
        if (rig->agents[pe].started) {
            assert_int_equal(rig->agents[pe].result, XP_FATAL);
            assert_string_equal(rig->agents[pe].text, canonical);
        }
}

/* An invalid record of a peer agent ends the Generation with a text that says whose. */
static void test_bad_records(void **state)
{
    static rig_t rig;
    for (uint32_t kind = 0; kind < 5; kind++) {
        rig_plan(&rig, 1, 1, 1, 1);
        rig.plan.instances[0].form = kind == 3 || kind == 4 ? FABRIC_FORM_LONG : FABRIC_FORM_AUTO;
        rig_start(&rig);
        fabric_t *observer = rig.observer;
        uint64_t slot = fabric_slot_offset(&observer->layout, 0, 0);
        fabric_submission_t submission = {.sequence = 1, .form = FABRIC_FORM_EAGER};
        const char *expected = "AtnAgent PE 0 published an invalid Submission for model-0";
        switch (kind) {
        case 0:
            submission.sequence = 9;
            break;
        case 1:
            submission.layer = 4;
            break;
        case 2:
            submission.dp_rows[0] = submission.rows = 17;
            break;
        case 3:
            break; /* the wrong form */
        default: {
            /* A Lane Execution out of nowhere, of an Instance that does not exist. */
            fabric_execution_t execution = {.ticket = 1, .instance = 5};
            fabric_publish(observer, 2, fabric_lane_offset(&observer->layout, 0), &execution,
                           sizeof(execution));
            expected = "the Coordinator published an invalid Lane Execution";
        }
        }
        if (kind < 4)
            fabric_publish(observer, 2, slot + offsetof(fabric_slot_t, submission), &submission,
                           sizeof(submission));
        fabric_signal(observer, 3);
        check_failed(&rig, expected);
        rig_free(&rig);
    }
}

/* ---- an AtnAgent alone; the test is Coordinator and FfnAgents ---------------------------------
 */
#define TEST_ROWS 2u

typedef struct lone {
    rig_t rig;
    rig_client_t client;
    uint64_t slot;
} lone_t;

/* One Instance over two FfnAgents, two Lanes, and one request of two rows on its way. */
static void lone_start(lone_t *lone, uint32_t form, uint32_t delivery)
{
    rig_t *rig = &lone->rig;
    rig_plan(rig, 1, 2, 1, 2);
    rig->plan.instances[0].form = form;
    rig->plan.instances[0].delivery = delivery;
    rig_make(rig);
    rig_join_agent(rig, 0);
    RIG_CHECK(pthread_create(&rig->agents[0].thread, NULL, rig_agent_main, &rig->agents[0]) == 0);
    rig->agents[0].started = true;
    lone->slot = fabric_slot_offset(&rig->observer->layout, 0, 0);
    rig_client_create(rig, 0, 0, &lone->client);
    rig_client_attach(&lone->client);
    for (uint32_t i = 0; i < TEST_ROWS * RIG_HIDDEN; i++)
        lone->client.in[i] = (float)i;
    transport_tensor_t in = rig_tensor(&lone->client, lone->client.in, TEST_ROWS);
    transport_request_t request = {.layer = 1, .rows = TEST_ROWS};
    assert_int_equal(transport_client_put(lone->client.client, &request, &in), XP_OK);
    uint64_t at = lone->slot + offsetof(fabric_slot_t, submission);
    for (uint64_t until_ns = rig_in(10000);
         fabric_word(rig->observer, at) != 1 && xp_monotonic_ns() < until_ns;)
        usleep(200);
    assert_int_equal(fabric_word(rig->observer, at), 1);
}

static void lone_publish(lone_t *lone, size_t field, const void *record, size_t bytes)
{
    fabric_publish(lone->rig.observer, 1, lone->slot + field, record, bytes);
    fabric_signal(lone->rig.observer, 1);
}

static void lone_admit(lone_t *lone, uint64_t sequence, uint32_t lane, uint32_t row_offset)
{
    fabric_admission_t admission = {.sequence = sequence, .lane = lane, .row_offset = row_offset};
    lone_publish(lone, offsetof(fabric_slot_t, admission), &admission, sizeof(admission));
}

static void lone_commit(lone_t *lone, uint64_t sequence, uint32_t source, uint32_t lane)
{
    fabric_commit_t commit = {.sequence = sequence, .source = source, .lane = lane};
    lone_publish(lone, offsetof(fabric_slot_t, commit), &commit, sizeof(commit));
}

static void lone_partial(lone_t *lone, uint64_t sequence, uint32_t member, uint32_t lane)
{
    fabric_direct_partial_t partial = {.sequence = sequence, .lane = lane};
    lone_publish(lone, offsetof(fabric_slot_t, partial_ready) + member * sizeof(partial), &partial,
                 sizeof(partial));
}

/* Until the AtnAgent has put its rows into the Lane and says so. */
static void lone_wait_input(lone_t *lone)
{
    uint64_t at = lone->slot + offsetof(fabric_slot_t, input_ready);
    for (uint64_t until_ns = rig_in(10000);
         fabric_word(lone->rig.observer, at) != 1 && xp_monotonic_ns() < until_ns;)
        usleep(200);
    assert_int_equal(fabric_word(lone->rig.observer, at), 1);
}

static void lone_expect_failure(lone_t *lone, const char *expected)
{
    assert_int_equal(transport_client_wait(lone->client.client, rig_in(10000)), XP_FATAL);
    check_failed(&lone->rig, expected);
    rig_client_destroy(&lone->client);
    rig_free(&lone->rig);
}

static void lone_expect_nothing(lone_t *lone)
{
    assert_int_equal(transport_client_wait(lone->client.client, rig_in(20)), XP_TIMEOUT);
    assert_int_equal(fabric_failure(lone->rig.observer, NULL), XP_OK);
}

static void fill(lone_t *lone, uint64_t offset, float value)
{
    float *rows = fabric_local(lone->rig.observer, offset);
    for (uint32_t i = 0; i < TEST_ROWS * RIG_HIDDEN; i++)
        rows[i] = value + (float)i;
}

/* The request is answered with value + i for element i of its rows, times `scale`. */
static void lone_expect_rows(lone_t *lone, float value, float scale)
{
    assert_int_equal(transport_client_wait(lone->client.client, rig_in(10000)), XP_OK);
    transport_tensor_t out = rig_tensor(&lone->client, lone->client.out, TEST_ROWS);
    assert_int_equal(transport_client_take(lone->client.client, &out), XP_OK);
    for (uint32_t i = 0; i < TEST_ROWS * RIG_HIDDEN; i++)
        assert_true(lone->client.out[i] == scale * (value + (float)i));
    fabric_shutdown(lone->rig.observer);
    rig_join(&lone->rig, 0);
    assert_int_equal(lone->rig.agents[0].result, XP_CLOSED);
    rig_client_destroy(&lone->client);
    rig_free(&lone->rig);
}

static void test_bad_admission(void **state)
{
    static lone_t lone;
    static const struct {
        uint32_t lane, row_offset;
        const char *text;
    } bad[] = {
        {2, 0, "the Coordinator admitted model-0 to Lane 2, rows from 0"},
        {UINT32_MAX, 0, "the Coordinator admitted model-0 to Lane 4294967295, rows from 0"},
        {0, 15, "the Coordinator admitted model-0 to Lane 0, rows from 15"}, /* two rows of 16 */
        {1, UINT32_MAX, "the Coordinator admitted model-0 to Lane 1, rows from 4294967295"},
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        lone_start(&lone, FABRIC_FORM_LONG, FABRIC_DELIVERY_SINGLE_COMPLETE);
        lone_admit(&lone, 1, bad[i].lane, bad[i].row_offset);
        lone_expect_failure(&lone, bad[i].text);
    }
    /* Of another Submission, whatever it says: not looked at. */
    static const uint64_t foreign[] = {0, 2, UINT64_MAX};
    lone_start(&lone, FABRIC_FORM_LONG, FABRIC_DELIVERY_SINGLE_COMPLETE);
    for (size_t i = 0; i < 3; i++) {
        lone_admit(&lone, foreign[i], 99, UINT32_MAX);
        lone_expect_nothing(&lone);
    }
    lone_admit(&lone, 1, 1, 3);
    lone_wait_input(&lone);
    const fabric_layout_t *layout = &lone.rig.observer->layout;
    uint64_t first = 3 * RIG_HIDDEN * sizeof(float);
    const float *input = fabric_local(lone.rig.observer, fabric_lane_input(layout, 1) + first);
    for (uint32_t i = 0; i < TEST_ROWS * RIG_HIDDEN; i++)
        assert_true(input[i] == (float)i);
    fill(&lone, fabric_lane_output(layout, 1) + first, 500.0f);
    lone_commit(&lone, 1, FABRIC_SOURCE_LANE, 1);
    lone_expect_rows(&lone, 500.0f, 1.0f);
    /* An eager Submission is not admitted: the record is nobody's. */
    lone_start(&lone, FABRIC_FORM_EAGER, FABRIC_DELIVERY_SINGLE_COMPLETE);
    lone_admit(&lone, 1, 99, UINT32_MAX);
    lone_expect_nothing(&lone);
    fill(&lone, lone.rig.observer->layout.slot_output[0], 600.0f);
    lone_commit(&lone, 1, FABRIC_SOURCE_SLOT, 0);
    lone_expect_rows(&lone, 600.0f, 1.0f);
}

static void test_bad_commit(void **state)
{
    static lone_t lone;
    static const struct {
        uint32_t form, delivery;
        bool admitted; /* to Lane 1 before the commit comes */
        uint32_t source, lane;
    } bad[] = {
        {FABRIC_FORM_EAGER, FABRIC_DELIVERY_SINGLE_COMPLETE, false, 0, 0},
        {FABRIC_FORM_EAGER, FABRIC_DELIVERY_SINGLE_COMPLETE, false, 77, 0},
        {FABRIC_FORM_EAGER, FABRIC_DELIVERY_SINGLE_COMPLETE, false, FABRIC_SOURCE_LANE, 0},
        {FABRIC_FORM_LONG, FABRIC_DELIVERY_SINGLE_COMPLETE, true, FABRIC_SOURCE_SLOT, 1},
        {FABRIC_FORM_LONG, FABRIC_DELIVERY_SINGLE_COMPLETE, true, FABRIC_SOURCE_LANE, 0},
        {FABRIC_FORM_LONG, FABRIC_DELIVERY_SINGLE_COMPLETE, true, FABRIC_SOURCE_LANE, UINT32_MAX},
        /* Before it was admitted: the Lane it names is the one that this slot had last. */
        {FABRIC_FORM_LONG, FABRIC_DELIVERY_SINGLE_COMPLETE, false, FABRIC_SOURCE_LANE, 0},
        /* Dropped, with its Instance alive and no shutdown: nobody may do that. */
        {FABRIC_FORM_EAGER, FABRIC_DELIVERY_SINGLE_COMPLETE, false, FABRIC_SOURCE_NONE, 0},
        {FABRIC_FORM_LONG, FABRIC_DELIVERY_SINGLE_COMPLETE, false, FABRIC_SOURCE_NONE, 0},
        {FABRIC_FORM_LONG, FABRIC_DELIVERY_SINGLE_COMPLETE, true, FABRIC_SOURCE_NONE, 1},
        /* Complete rows where the members deliver partials. */
        {FABRIC_FORM_EAGER, FABRIC_DELIVERY_DIRECT_PARTIAL, false, FABRIC_SOURCE_SLOT, 0},
        {FABRIC_FORM_LONG, FABRIC_DELIVERY_DIRECT_PARTIAL, true, FABRIC_SOURCE_LANE, 1},
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        lone_start(&lone, bad[i].form, bad[i].delivery);
        if (bad[i].admitted) {
            lone_admit(&lone, 1, 1, 0);
            lone_wait_input(&lone);
        }
        lone_commit(&lone, 1, bad[i].source, bad[i].lane);
        char text[96];
        snprintf(text, sizeof(text), "model-0 layer 1: invalid Output Commit (source %u, Lane %u)",
                 bad[i].source, bad[i].lane);
        lone_expect_failure(&lone, text);
    }
    static const uint64_t foreign[] = {0, 2, UINT64_MAX};
    lone_start(&lone, FABRIC_FORM_EAGER, FABRIC_DELIVERY_SINGLE_COMPLETE);
    for (size_t i = 0; i < 3; i++) {
        lone_commit(&lone, foreign[i], FABRIC_SOURCE_SLOT, 99);
        lone_expect_nothing(&lone);
    }
    fill(&lone, lone.rig.observer->layout.slot_output[0], 700.0f);
    lone_commit(&lone, 1, FABRIC_SOURCE_SLOT, 0);
    lone_expect_rows(&lone, 700.0f, 1.0f);
}

static void test_bad_partial(void **state)
{
    static lone_t lone;
    static const struct {
        uint32_t form, lanes[2], blamed;
    } bad[] = {
        {FABRIC_FORM_EAGER, {2, 2}, 0},
        {FABRIC_FORM_EAGER, {0, UINT32_MAX}, 1},
        {FABRIC_FORM_EAGER, {0, 1}, 1}, /* two Lanes */
        {FABRIC_FORM_LONG, {1, 0}, 1},
        {FABRIC_FORM_LONG, {0, 0}, 0}, /* one Lane, which is not the one it was admitted to */
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        lone_start(&lone, bad[i].form, FABRIC_DELIVERY_DIRECT_PARTIAL);
        if (bad[i].form == FABRIC_FORM_LONG) {
            lone_admit(&lone, 1, 1, 0);
            lone_wait_input(&lone);
        }
        for (uint32_t member = 0; member < 2; member++)
            lone_partial(&lone, 1, member, bad[i].lanes[member]);
        char text[96];
        snprintf(text, sizeof(text), "model-0 layer 1: member %u's partial is in Lane %u",
                 bad[i].blamed, bad[i].lanes[bad[i].blamed]);
        lone_expect_failure(&lone, text);
    }
    for (uint32_t form = FABRIC_FORM_EAGER; form <= FABRIC_FORM_LONG; form++) {
        lone_start(&lone, form, FABRIC_DELIVERY_DIRECT_PARTIAL);
        if (form == FABRIC_FORM_LONG) {
            lone_admit(&lone, 1, 1, 0);
            lone_wait_input(&lone);
        }
        /* Of another Submission, and of FfnAgents that are no members: not looked at. */
        static const uint64_t foreign[] = {0, 2, UINT64_MAX};
        lone_partial(&lone, 1, 2, 99);
        lone_partial(&lone, 1, FABRIC_MAX_FFN - 1, 99);
        lone_partial(&lone, 1, 0, 1);
        for (size_t i = 0; i < 3; i++) {
            lone_partial(&lone, foreign[i], 1, 99);
            lone_expect_nothing(&lone);
        }
        const fabric_layout_t *layout = &lone.rig.observer->layout;
        for (uint32_t member = 0; member < 2; member++)
            fill(&lone, fabric_lane_partial(layout, 1, member), 300.0f);
        lone_partial(&lone, 1, 1, 1);
        lone_expect_rows(&lone, 300.0f, 2.0f);
    }
}

/* Tickets that are not the lease's, in a running Fabric: whoever waits for the right one goes on
 * waiting, and gets it. */
static void test_foreign_tickets(void **state)
{
    static rig_t rig;
    static const uint64_t foreign[] = {0, 1000000, UINT64_MAX};
    for (size_t i = 0; i < 3; i++) {
        rig_plan(&rig, 1, 2, 1, 2);
        rig.plan.lanes = 1;
        rig_start(&rig);
        rig_client_t client;
        rig_client_create(&rig, 0, 0, &client);
        rig_client_attach(&client);
        atomic_store(&rig.agents[2].executor.hold, true);
        float *in = client.in;
        memset(in, 0, RIG_HIDDEN * sizeof(float));
        transport_tensor_t input = rig_tensor(&client, in, 1),
                           out = rig_tensor(&client, client.out, 1);
        transport_request_t request = {.layer = 2, .rows = 1};
        assert_int_equal(transport_client_put(client.client, &request, &input), XP_OK);
        for (uint64_t until_ns = rig_in(10000);
             !atomic_load(&rig.agents[2].executor.calls) && xp_monotonic_ns() < until_ns;)
            usleep(200);
        uint64_t lane = fabric_lane_offset(&rig.observer->layout, 0);
        fabric_publish(rig.observer, 2,
                       lane + offsetof(fabric_lane_t, partial_ready) + sizeof(fabric_ticket_line_t),
                       &foreign[i], sizeof(foreign[i]));
        fabric_publish(rig.observer, 2, lane + offsetof(fabric_lane_t, completion), &foreign[i],
                       sizeof(foreign[i]));
        fabric_signal(rig.observer, 7);
        assert_int_equal(transport_client_wait(client.client, rig_in(20)), XP_TIMEOUT);
        atomic_store(&rig.agents[2].executor.hold, false);
        assert_int_equal(transport_client_wait(client.client, rig_in(10000)), XP_OK);
        assert_int_equal(transport_client_take(client.client, &out), XP_OK);
        for (uint32_t c = 0; c < RIG_HIDDEN; c++)
            assert_true(client.out[c] == rig_expected(2, 0, 2, 0, 0.0f));
        rig_client_destroy(&client);
        rig_stop(&rig);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bad_records),     cmocka_unit_test(test_bad_admission),
        cmocka_unit_test(test_bad_commit),      cmocka_unit_test(test_bad_partial),
        cmocka_unit_test(test_foreign_tickets),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
