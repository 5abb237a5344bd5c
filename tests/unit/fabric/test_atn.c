/* SPDX-License-Identifier: MIT */
/*
 * The AtnAgent's service by hand: looks on the test's thread and a clock that the test moves. Its
 * patience, what arenas it takes, and how they leave.
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
#include "fabric/internal.h"

#define HIDDEN 8
#define ROWS   4

static fabric_plan_t plan;
static fabric_descriptors_t made;
static fabric_t *fabric; /* the AtnAgent's */
static fabric_atn_t *atn;
static uint64_t now_ns;

static uint64_t fake_now(void *context)
{
    return now_ns;
}

static void begin(uint64_t submission_timeout_ns)
{
    memset(&plan, 0, sizeof(plan));
    plan.magic = FABRIC_PLAN_MAGIC;
    plan.version = FABRIC_PLAN_VERSION;
    plan.bytes = sizeof(plan);
    plan.atn_count = plan.ffn_count = plan.lanes = 1;
    plan.submission_timeout_ns = submission_timeout_ns;
    plan.instance_count = plan.weights_count = 1;
    fabric_plan_instance_t *instance = &plan.instances[0];
    snprintf(instance->id, sizeof(instance->id), "m0");
    instance->hidden = HIDDEN;
    instance->layers = 1;
    instance->max_rows = ROWS;
    instance->dtype = XP_DTYPE_F32;
    instance->atn_tp = instance->atn_dp = 1;
    instance->layer_group[0] = 1;
    now_ns = 1000 * XP_NS_PER_S;
    assert_int_equal(fabric_shm_make(&plan, &made), XP_OK);
    assert_int_equal(fabric_attach("shm", &plan, &made, 0, &fabric), XP_OK);
    assert_int_equal(fabric_atn_create(fabric, (xp_clock_t){.now_ns = fake_now}, &atn), XP_OK);
}

static void end(void)
{
    fabric_atn_destroy(atn);
    fabric_detach(fabric);
    close(made.arena_fd);
    close(made.doorbell_fd);
}

static xp_status_t attach(const transport_geometry_t *geometry, transport_client_t **client_out)
{
    transport_server_t *server;
    assert_int_equal(transport_client_create(geometry, 0, client_out), XP_OK);
    assert_int_equal(transport_server_create(transport_client_fd(*client_out), geometry, &server),
                     XP_OK);
    xp_status_t status = fabric_atn_attach(atn, 0, 0, server);
    if (status != XP_OK)
        transport_server_destroy(server);
    return status;
}

static const transport_geometry_t planned = {
    .hidden = HIDDEN, .max_rows = ROWS, .dtype = XP_DTYPE_F32, .dp_size = 1};

static xp_status_t put_one_row(transport_client_t *client)
{
    float row[HIDDEN] = {0};
    transport_tensor_t in = {
        .data = row, .dtype = XP_DTYPE_F32, .rank = 2, .rows = 1, .width = HIDDEN};
    in.row_stride = HIDDEN;
    transport_request_t request = {.rows = 1};
    return transport_client_put(client, &request, &in);
}

static xp_status_t look(void)
{
    bool moved = true;
    xp_status_t status = XP_OK;
    for (int i = 0; i < 10 && moved && status == XP_OK; i++)
        status = fabric_atn_look(atn, &moved);
    return status;
}

/* The AtnAgent gives up after the Coordinator would have and well before its caller does. */
static void test_patience(void **state)
{
    static const uint64_t timeouts_ns[] = {1, XP_NS_PER_MS, 20 * XP_NS_PER_S, 600 * XP_NS_PER_S};
    for (size_t i = 0; i < sizeof(timeouts_ns) / sizeof(timeouts_ns[0]); i++) {
        uint64_t timeout_ns = timeouts_ns[i];
        transport_client_t *client;
        begin(timeout_ns);
        assert_int_equal(look(), XP_OK);
        assert_int_equal(attach(&planned, &client), XP_OK);
        assert_int_equal(put_one_row(client), XP_OK);
        assert_int_equal(look(), XP_OK);
        uint64_t start_ns = now_ns, patience_ns = fabric_plan_caller_patience_ns(timeout_ns);
        xp_status_t status = XP_OK;
        while (status == XP_OK && now_ns - start_ns <= patience_ns) {
            now_ns += FABRIC_TICK_NS;
            status = look();
        }
        assert_int_equal(status, XP_FATAL);
        assert_non_null(strstr(xp_error_last()->text, "waiting for Coordinator PE 1"));
        uint64_t took_ns = now_ns - start_ns;
        assert_true(took_ns >= timeout_ns + timeout_ns / 4);
        assert_true(took_ns + 4 * XP_NS_PER_S < patience_ns); /* time to close the arena */
        transport_client_destroy(client);
        end();
    }
}

/* An arena that is not the planned Instance's is refused, and disturbs nothing. The type of the
 * rows cannot differ on this device, where all is f32. */
static void test_geometry(void **state)
{
    static const struct {
        transport_geometry_t geometry;
        const char *text;
    } others[] = {
        {{.hidden = HIDDEN * 2, .max_rows = ROWS, .dtype = XP_DTYPE_F32, .dp_size = 1},
         "the arena for rank 0 of m0 is 4 x 16, dtype f32, DP 1; the Fabric plan says 4 x 8, dtype "
         "f32, DP 1"},
        {{.hidden = HIDDEN, .max_rows = ROWS - 1, .dtype = XP_DTYPE_F32, .dp_size = 1},
         "the arena for rank 0 of m0 is 3 x 8, dtype f32, DP 1; the Fabric plan says 4 x 8, dtype "
         "f32, DP 1"},
        {{.hidden = HIDDEN, .max_rows = ROWS, .dtype = XP_DTYPE_F32, .dp_size = 2},
         "the arena for rank 0 of m0 is 4 x 8, dtype f32, DP 2; the Fabric plan says 4 x 8, dtype "
         "f32, DP 1"},
    };
    begin(XP_NS_PER_S);
    transport_client_t *client;
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++) {
        assert_int_equal(attach(&others[i].geometry, &client), XP_INVALID);
        assert_string_equal(xp_error_last()->text, others[i].text);
        transport_client_destroy(client);
    }
    assert_int_equal(attach(&planned, &client), XP_OK);
    assert_int_equal(fabric_atn_detach(atn, 0, 0), XP_OK);
    transport_client_destroy(client);
    end();
}

static void test_detach_after_drop(void **state)
{
    transport_client_t *first, *second, *third;
    begin(XP_NS_PER_S);
    assert_int_equal(fabric_atn_detach(atn, 0, 0), XP_NOT_FOUND); /* never had one */
    assert_int_equal(attach(&planned, &first), XP_OK);
    assert_int_equal(look(), XP_OK);
    assert_int_equal(transport_arena_close(transport_client_fd(first), XP_CLOSED), XP_OK);
    assert_int_equal(look(), XP_OK);
    assert_int_equal(fabric_atn_detach(atn, 0, 0), XP_OK);
    assert_int_equal(fabric_atn_detach(atn, 0, 0), XP_NOT_FOUND);

    /* Dropped again, and followed by a new one: that is then what a detach is about. */
    transport_client_destroy(first);
    assert_int_equal(attach(&planned, &first), XP_OK);
    assert_int_equal(look(), XP_OK);
    assert_int_equal(transport_arena_close(transport_client_fd(first), XP_CLOSED), XP_OK);
    assert_int_equal(look(), XP_OK);
    assert_int_equal(attach(&planned, &second), XP_OK);
    assert_int_equal(look(), XP_OK);
    assert_int_equal(fabric_atn_detach(atn, 0, 0), XP_OK);
    assert_int_equal(look(), XP_OK);
    assert_int_equal(put_one_row(second), XP_CLOSED);

    /* Closed by its Instance after the detach was asked for: one end, not two. */
    assert_int_equal(attach(&planned, &third), XP_OK);
    assert_int_equal(look(), XP_OK);
    assert_int_equal(transport_arena_close(transport_client_fd(third), XP_CLOSED), XP_OK);
    assert_int_equal(fabric_atn_detach(atn, 0, 0), XP_OK);
    assert_int_equal(look(), XP_OK);
    assert_int_equal(fabric_atn_detach(atn, 0, 0), XP_NOT_FOUND);

    assert_int_equal(fabric_atn_detach(atn, 1, 0), XP_NOT_FOUND); /* not in the plan */
    assert_int_equal(fabric_atn_detach(atn, 0, 1), XP_NOT_FOUND);
    transport_client_destroy(first);
    transport_client_destroy(second);
    transport_client_destroy(third);
    end();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_patience),
        cmocka_unit_test(test_geometry),
        cmocka_unit_test(test_detach_after_drop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
