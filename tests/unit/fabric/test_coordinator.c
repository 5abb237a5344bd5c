/* SPDX-License-Identifier: MIT */
/*
 * The Coordinator by hand: its one thread, a clock that the test moves, records written as
 * AtnAgents and FfnAgents would. Timeouts and who is blamed, time that does not count, drops,
 * Lanes.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "fabric/coordinator.h"

#define SECOND XP_NS_PER_S

static fabric_plan_t plan;
static fabric_descriptors_t made;
static fabric_t *fabric; /* PE of the first FfnAgent */
static fabric_coordinator_t *coordinator;
static uint64_t now_ns;
static uint32_t lanes = 1;

static uint64_t fake_now(void *context)
{
    return now_ns;
}

/* Two AtnAgents, two FfnAgents. Instance 0: TP 2 in the long form, group of both; 1 and 2: eager on
 * FfnAgent 1. */
static void begin(void)
{
    memset(&plan, 0, sizeof(plan));
    plan.magic = FABRIC_PLAN_MAGIC;
    plan.version = FABRIC_PLAN_VERSION;
    plan.bytes = sizeof(plan);
    plan.atn_count = plan.ffn_count = 2;
    plan.lanes = lanes;
    plan.submission_timeout_ns = 10 * SECOND;
    plan.instance_count = 3;
    plan.weights_count = 1;
    for (uint32_t i = 0; i < 3; i++) {
        fabric_plan_instance_t *instance = &plan.instances[i];
        snprintf(instance->id, sizeof(instance->id), "m%u", i);
        instance->hidden = 4;
        instance->layers = 2;
        instance->max_rows = 4;
        instance->dtype = XP_DTYPE_F32;
        instance->atn_tp = instance->atn_dp = 1;
        instance->delivery = FABRIC_DELIVERY_REPLICATED_COMPLETE;
        instance->layer_group[0] = instance->layer_group[1] = i ? 2 : 3;
    }
    plan.instances[0].atn_tp = 2;
    plan.instances[0].rank_atn[1] = 1;
    xp_clock_t clock = {.now_ns = fake_now};
    now_ns = 1000 * SECOND;
    assert_int_equal(fabric_shm_make(&plan, &made), XP_OK);
    assert_int_equal(fabric_attach("shm", &plan, &made, 2, &fabric), XP_OK);
    assert_int_equal(fabric_coordinator_create(fabric, clock, &coordinator), XP_OK);
}

static void end(void)
{
    fabric_coordinator_destroy(coordinator);
    fabric_detach(fabric);
    close(made.arena_fd);
    close(made.doorbell_fd);
}

static void submit(uint32_t instance, uint32_t rank, uint64_t sequence)
{
    fabric_submission_t submission = {
        .sequence = sequence,
        .request = sequence,
        .layer = 1,
        .rows = 2,
        .form = instance ? FABRIC_FORM_EAGER : FABRIC_FORM_LONG,
        .dp_rows = {2},
    };
    fabric_publish(fabric, 4,
                   fabric_slot_offset(&fabric->layout, instance, rank) +
                       offsetof(fabric_slot_t, submission),
                   &submission, sizeof(submission));
}

static void slot_word(uint32_t instance, uint32_t rank, size_t field, uint64_t sequence)
{
    fabric_publish(fabric, 4, fabric_slot_offset(&fabric->layout, instance, rank) + field,
                   &sequence, sizeof(sequence));
}

static void any_lane_word(uint32_t lane, size_t field, uint64_t ticket)
{
    fabric_publish(fabric, 4, fabric_lane_offset(&fabric->layout, lane) + field, &ticket,
                   sizeof(ticket));
}

static void any_lane_route(uint32_t lane, uint64_t ticket, uint32_t rows)
{
    fabric_routing_t routing = {.ticket = ticket, .mode = FABRIC_ROUTING_REPEAT, .rows = rows};
    fabric_publish(fabric, 4,
                   fabric_lane_offset(&fabric->layout, lane) + offsetof(fabric_lane_t, routing),
                   &routing, sizeof(routing));
}

static void lane_word(size_t field, uint64_t ticket)
{
    any_lane_word(0, field, ticket);
}

static void route(uint64_t ticket, uint32_t rows)
{
    any_lane_route(0, ticket, rows);
}

static fabric_execution_t execution_of(uint32_t ffn)
{
    fabric_execution_t execution;
    fabric_record_load(fabric,
                       fabric_lane_offset(&fabric->layout, 0) + offsetof(fabric_lane_t, execution) +
                           ffn * sizeof(execution),
                       sizeof(execution), &execution);
    return execution;
}

static uint64_t commit_of(uint32_t instance, uint32_t rank, uint32_t *source_out)
{
    fabric_commit_t commit;
    fabric_record_load(fabric,
                       fabric_slot_offset(&fabric->layout, instance, rank) +
                           offsetof(fabric_slot_t, commit),
                       sizeof(commit), &commit);
    *source_out = commit.source;
    return commit.sequence;
}

/* Steps until nothing moves; a bound, since something that always moves would be a bug. */
static xp_status_t settle(void)
{
    for (int i = 0; i < 20; i++) {
        xp_status_t status = fabric_coordinator_step(coordinator);
        if (status != XP_OK)
            return status;
    }
    fail_msg("the Coordinator does not come to rest");
    return XP_OK;
}

/* Time passes in steps in which the Coordinator looks around. */
static xp_status_t pass(uint64_t seconds)
{
    xp_status_t status = XP_RETRY;
    for (uint64_t i = 0; i < seconds * 10 && status == XP_RETRY; i++) {
        now_ns += SECOND / 10;
        status = settle();
    }
    return status;
}

static void expect_failure(const char *text)
{
    assert_int_equal(pass(3), XP_FATAL);
    uint32_t pe;
    assert_int_equal(fabric_failure(fabric, &pe), XP_FATAL);
    assert_string_equal(xp_error_last()->text, text);
    assert_int_equal(pe, 2);
    end();
}

static void test_blames(void **state)
{
    /* The second rank never submits. */
    begin();
    submit(0, 0, 1);
    assert_int_equal(pass(9), XP_RETRY);
    expect_failure("m0 layer 1: no answer in 10000 ms, waiting for Submission of AtnAgent PE 1");

    /* Its rows never land. */
    begin();
    submit(0, 0, 1);
    submit(0, 1, 1);
    assert_int_equal(pass(9), XP_RETRY);
    slot_word(0, 0, offsetof(fabric_slot_t, input_ready), 1);
    expect_failure("m0 layer 1: no answer in 10000 ms, waiting for rows or acknowledgement of "
                   "AtnAgent PE 1");

    /* The other member has not delivered its partial. */
    begin();
    submit(0, 0, 1);
    submit(0, 1, 1);
    for (uint32_t rank = 0; rank < 2; rank++)
        slot_word(0, rank, offsetof(fabric_slot_t, input_ready), 1);
    assert_int_equal(pass(9), XP_RETRY);
    expect_failure("m0 layer 1: no answer in 10000 ms, waiting for FfnAgent PE 3");

    /* It has, so what is missing is this FfnAgent's own work: no failure. */
    begin();
    submit(0, 0, 1);
    submit(0, 1, 1);
    for (uint32_t rank = 0; rank < 2; rank++)
        slot_word(0, rank, offsetof(fabric_slot_t, input_ready), 1);
    settle();
    lane_word(offsetof(fabric_lane_t, partial_ready) + sizeof(fabric_ticket_line_t), 1);
    assert_int_equal(pass(60), XP_RETRY);
    /* Done, and one rank does not acknowledge. */
    route(1, 2);
    lane_word(offsetof(fabric_lane_t, completion), 1);
    slot_word(0, 0, offsetof(fabric_slot_t, output_ack), 1);
    expect_failure("m0 layer 1: no answer in 10000 ms, waiting for rows or acknowledgement of "
                   "AtnAgent PE 1");

    /* An eager one whose only member is the other FfnAgent; another waits for the Lane behind it.
     */
    begin();
    submit(1, 0, 1);
    assert_int_equal(settle(), XP_RETRY);
    submit(2, 0, 1);
    assert_int_equal(pass(9), XP_RETRY);
    expect_failure("m1 layer 1: no answer in 10000 ms, waiting for FfnAgent PE 3");
}

/* Time in which the Coordinator was stopped or computing counts for nobody. */
static void test_gap(void **state)
{
    begin();
    submit(1, 0, 1);
    assert_int_equal(pass(9), XP_RETRY);
    for (int i = 0; i < 5; i++) {
        now_ns += 100 * SECOND;
        assert_int_equal(settle(), XP_RETRY);
    }
    expect_failure("m1 layer 1: no answer in 10000 ms, waiting for FfnAgent PE 3");
}

/* Traffic that never lets a step find nothing to do hides no Lane that is stuck. */
static void test_stuck_under_load(void **state)
{
    lanes = 2;
    begin();
    lanes = 1;
    uint64_t start_ns = now_ns, ticket = 1, steps = 0;
    submit(1, 0, 1);
    xp_status_t status = fabric_coordinator_step(coordinator); /* Lane 0, and stays there */
    for (uint64_t sequence = 1; status == XP_OK && sequence < 2000; sequence++) {
        submit(2, 0, sequence);
        now_ns += 10 * XP_NS_PER_MS;
        status = fabric_coordinator_step(coordinator);
        if (status != XP_OK)
            break;
        any_lane_route(1, ++ticket, 2);
        any_lane_word(1, offsetof(fabric_lane_t, completion), ticket);
        status = fabric_coordinator_step(coordinator);
        steps++;
    }
    assert_true(steps > 900);
    assert_int_equal(status, XP_FATAL);
    assert_true(now_ns - start_ns > 10 * SECOND);
    assert_true(now_ns - start_ns <= 10 * SECOND + 2 * FABRIC_TICK_NS);
    assert_string_equal(xp_error_last()->text,
                        "m1 layer 1: no answer in 10000 ms, waiting for FfnAgent PE 3");
    end();
}

static fabric_pe_counters_t counters_now(void)
{
    fabric_pe_counters_t counters;
    fabric_counters(fabric, 2, &counters);
    return counters;
}

/* The Lane goes on only after completion and, in the long form, every acknowledgement. */
static void test_lease(void **state)
{
    begin();
    submit(0, 1, 1);
    assert_int_equal(settle(), XP_RETRY);
    assert_int_equal(execution_of(0).ticket, 0);
    assert_int_equal(counters_now().lanes_in_use, 0);
    submit(0, 0, 1);
    assert_int_equal(settle(), XP_RETRY);
    submit(1, 0, 1);
    assert_int_equal(settle(), XP_RETRY);
    for (uint32_t ffn = 0; ffn < 2; ffn++) {
        fabric_execution_t execution = execution_of(ffn);
        assert_int_equal(execution.ticket, 1);
        assert_int_equal(execution.instance, 0);
        assert_int_equal(execution.layer, 1);
        assert_int_equal(execution.ranks, 2);
        assert_int_equal(execution.sequences[1], 1);
        assert_int_equal(execution.dp_rows[0], 2);
    }
    route(1, 2);
    lane_word(offsetof(fabric_lane_t, completion), 1);
    slot_word(0, 1, offsetof(fabric_slot_t, output_ack), 1);
    assert_int_equal(settle(), XP_RETRY);
    assert_int_equal(execution_of(1).ticket, 1);
    slot_word(0, 0, offsetof(fabric_slot_t, output_ack), 1);
    assert_int_equal(settle(), XP_RETRY);
    assert_int_equal(execution_of(1).ticket, 2);
    assert_int_equal(execution_of(1).instance, 1);
    assert_int_equal(execution_of(0).ticket, 1); /* no member of that group: not told */
    /* Eager: completion alone ends the lease. */
    submit(2, 0, 1);
    assert_int_equal(settle(), XP_RETRY);
    route(2, 2);
    lane_word(offsetof(fabric_lane_t, completion), 2);
    assert_int_equal(settle(), XP_RETRY);
    assert_int_equal(execution_of(1).ticket, 3);
    assert_int_equal(execution_of(1).instance, 2);
    assert_int_equal(counters_now().lanes_in_use, 1);
    route(3, 2);
    lane_word(offsetof(fabric_lane_t, completion), 3);
    assert_int_equal(settle(), XP_RETRY);
    fabric_pe_counters_t counters = counters_now();
    assert_int_equal(counters.lanes_leased, 3); /* a total, which never falls */
    assert_int_equal(counters.lanes_peak, 1);
    assert_int_equal(counters.lanes_in_use, 0);
    end();
}

/* Whoever comes first, a difference in any agreed field is found and names both. */
static void test_ranks_disagree(void **state)
{
    for (uint32_t order = 0; order < 2; order++)
        for (uint32_t field = 0; field < 4; field++) {
            begin();
            submit(0, order, 1);
            settle();
            fabric_submission_t other = {.sequence = 1,
                                         .request = field == 0 ? 2 : 1,
                                         .layer = field == 1 ? 0 : 1,
                                         .rows = field == 3 ? 1 : 2,
                                         .kind = field == 2 ? 1 : 0,
                                         .form = FABRIC_FORM_LONG,
                                         .dp_rows = {field == 3 ? 1 : 2}};
            fabric_publish(fabric, 4,
                           fabric_slot_offset(&fabric->layout, 0, !order) +
                               offsetof(fabric_slot_t, submission),
                           &other, sizeof(other));
            assert_int_equal(settle(), XP_FATAL);
            assert_non_null(strstr(xp_error_last()->text, "m0: AtnAgent PE"));
            assert_non_null(strstr(xp_error_last()->text, "PE 0"));
            assert_non_null(strstr(xp_error_last()->text, "PE 1"));
            assert_non_null(strstr(xp_error_last()->text, "disagree"));
            end();
        }
}

static void test_routing_disagrees(void **state)
{
    begin();
    submit(1, 0, 1);
    settle();
    route(1, 3);
    lane_word(offsetof(fabric_lane_t, completion), 1);
    assert_int_equal(settle(), XP_FATAL);
    assert_string_equal(xp_error_last()->text, "m1 layer 1: FfnAgent PE 3 routed 3 rows, not 2");
    end();
}

/* What lost its Instance before it got a Lane is dropped, and the slot told so. */
static void test_abandon(void **state)
{
    begin();
    uint32_t source;
    submit(1, 0, 1);
    settle(); /* has the Lane */
    submit(2, 0, 1);
    settle(); /* queued */
    slot_word(2, 0, offsetof(fabric_slot_t, abandon), 1);
    settle();
    assert_int_equal(commit_of(2, 0, &source), 1);
    assert_int_equal(source, FABRIC_SOURCE_NONE);
    /* Gathered only: one rank of two. */
    submit(0, 1, 1);
    settle();
    slot_word(0, 1, offsetof(fabric_slot_t, abandon), 1);
    settle();
    assert_int_equal(commit_of(0, 1, &source), 1);
    assert_int_equal(source, FABRIC_SOURCE_NONE);
    /* With a Lane: it runs to its end. */
    slot_word(1, 0, offsetof(fabric_slot_t, abandon), 1);
    settle();
    assert_int_equal(commit_of(1, 0, &source), 0);
    route(1, 2);
    lane_word(offsetof(fabric_lane_t, completion), 1);
    settle();
    /* All of them come again. */
    submit(2, 0, 2);
    settle();
    assert_int_equal(execution_of(1).instance, 2);
    assert_int_equal(execution_of(1).ticket, 2);
    /* Nothing waits for ever for what was dropped. */
    route(2, 2);
    lane_word(offsetof(fabric_lane_t, completion), 2);
    assert_int_equal(pass(60), XP_RETRY);
    end();
}

static void test_shutdown_drops_incomplete(void **state)
{
    begin();
    uint32_t source;
    submit(0, 0, 1);
    settle();
    fabric_shutdown(fabric);
    settle();
    assert_int_equal(commit_of(0, 0, &source), 1);
    assert_int_equal(source, FABRIC_SOURCE_NONE);
    /* A complete one is still served. */
    submit(1, 0, 1);
    settle();
    assert_int_equal(execution_of(1).instance, 1);
    end();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_blames),           cmocka_unit_test(test_gap),
        cmocka_unit_test(test_stuck_under_load), cmocka_unit_test(test_lease),
        cmocka_unit_test(test_ranks_disagree),   cmocka_unit_test(test_routing_disagrees),
        cmocka_unit_test(test_abandon),          cmocka_unit_test(test_shutdown_drops_incomplete),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
