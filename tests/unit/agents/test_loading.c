/* SPDX-License-Identifier: MIT */
/* What an FfnAgent tells of its loading: the daemon's end of the control channel is a socket here.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "agents/loading.h"
#include "base/clock.h"

#define PATIENCE_MS 10000

typedef struct fixture {
    char folder[32], socket[64];
    config_t config;
    int listener, lock, peer;
    struct event_base *base;
    participant_t *participant;
    agent_loading_t loading;
} fixture_t;

static void on_message(void *context, const xpw_Envelope *envelope, wire_descriptors_t *fds)
{
}

static void on_stop(void *context, xpw_StopPhase phase, uint32_t seconds)
{
}

static xpw_Envelope next_message(const fixture_t *f)
{
    static xpw_Envelope envelope;
    wire_descriptors_t fds = {0};
    for (int left = PATIENCE_MS; left > 0; left -= 10) {
        xp_status_t status = wire_receive(f->peer, &envelope, &fds);
        wire_descriptors_close(&fds);
        if (status == XP_OK)
            return envelope;
        assert_int_equal(status, XP_RETRY);
        event_base_loop(f->base, EVLOOP_NONBLOCK);
        poll(&(struct pollfd){.fd = f->peer, .events = POLLIN}, 1, 10);
    }
    fail_msg("no message");
    return envelope;
}

static int begin(void **state)
{
    static fixture_t fixture;
    fixture_t *f = &fixture;
    *f = (fixture_t){.folder = "/tmp/xpool-loading-XXXXXX"};
    assert_non_null(mkdtemp(f->folder));
    snprintf(f->socket, sizeof(f->socket), "%s/d.sock", f->folder);
    snprintf(f->config.daemon.socket, sizeof(f->config.daemon.socket), "%s", f->socket);
    f->config.deadlines.registration = 10;
    assert_int_equal(wire_listen(f->socket, &f->listener, &f->lock), XP_OK);
    assert_non_null(f->base = event_base_new());
    participant_handlers_t handlers = {.message = on_message, .stop = on_stop};
    assert_int_equal(participant_create(f->base, &f->config, xpw_Role_ROLE_FFNAGENT, "cpu:1", 0, "",
                                        &handlers, &f->participant),
                     XP_OK);
    assert_true((f->peer = accept4(f->listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0);
    assert_int_equal(next_message(f).which_body, xpw_Envelope_hello_tag);
    assert_int_equal(agent_loading_init(&f->loading, f->base), XP_OK);
    assert_int_equal(agent_loading_begin(&f->loading, f->participant), XP_OK);
    *state = f;
    return 0;
}

static int end(void **state)
{
    fixture_t *f = *state;
    agent_loading_fini(&f->loading);
    participant_destroy(f->participant);
    event_base_free(f->base);
    close(f->peer);
    wire_unlisten(f->socket, f->listener, f->lock);
    char lock[80];
    snprintf(lock, sizeof(lock), "%s.lock", f->socket);
    unlink(lock);
    return rmdir(f->folder);
}

static void *loader(void *context)
{
    fixture_t *f = context;
    agent_loading_next(&f->loading, 3, "one");
    agent_loading_refuse(&f->loading);
    agent_loading_next(&f->loading, 5, "two");
    agent_loading_refuse(&f->loading);
    agent_loading_count(&f->loading, 70, 100);
    return NULL;
}

static void run_loader(fixture_t *f)
{
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, loader, f), 0);
    pthread_join(thread, NULL);
}

/* As much memory again is about to be taken; a period of the timer is too late. */
static void a_refused_shard_is_told_before_the_timer(void **state)
{
    fixture_t *f = *state;
    event_del(f->loading.on_progress);
    run_loader(f);
    for (uint32_t weights = 3; weights <= 5; weights += 2) {
        xpw_Envelope envelope = next_message(f);
        assert_int_equal(envelope.which_body, xpw_Envelope_kept_weights_tag);
        assert_true(envelope.body.kept_weights.refused);
        assert_int_equal(envelope.body.kept_weights.weights, weights);
    }
}

static void the_end_tells_what_is_left_and_nothing_twice(void **state)
{
    fixture_t *f = *state;
    run_loader(f);
    agent_loading_installed(&f->loading, 90, true, 0, 1000);
    agent_loading_end(&f->loading);
    for (uint32_t weights = 3; weights <= 5; weights += 2)
        assert_int_equal(next_message(f).body.kept_weights.weights, weights);
    xpw_Envelope envelope = next_message(f);
    assert_int_equal(envelope.which_body, xpw_Envelope_progress_tag);
    assert_int_equal(envelope.body.progress.done_bytes, 90);
    assert_string_equal(envelope.body.progress.what, "two");
    assert_int_equal(f->loading.adopted, 1u << 5);
    assert_int_equal(f->loading.adopted_bytes, 90);
    event_base_loop(f->base, EVLOOP_NONBLOCK);
    assert_int_equal(poll(&(struct pollfd){.fd = f->peer, .events = POLLIN}, 1, 0), 0);
}

static void progress_is_told_by_the_timer(void **state)
{
    fixture_t *f = *state;
    agent_loading_next(&f->loading, 0, "one");
    agent_loading_count(&f->loading, 70, 100);
    xpw_Envelope envelope = next_message(f);
    assert_int_equal(envelope.which_body, xpw_Envelope_progress_tag);
    assert_int_equal(envelope.body.progress.done_bytes, 70);
    assert_string_equal(envelope.body.progress.what, "one");
}

static void the_group_of_a_weight_set_is_over_layers_and_instances(void **state)
{
    static fabric_plan_t plan;
    uint32_t first = 99;
    plan.instance_count = 3;
    plan.instances[0] = (fabric_plan_instance_t){.weights = 1, .layers = 1, .layer_group = {8}};
    plan.instances[1] = (fabric_plan_instance_t){.weights = 0, .layers = 2, .layer_group = {1, 2}};
    plan.instances[2] = (fabric_plan_instance_t){.weights = 0, .layers = 1, .layer_group = {4}};
    assert_int_equal(agent_loading_group(&plan, 0, &first), 7);
    assert_int_equal(first, 1);
    assert_int_equal(agent_loading_group(&plan, 2, &first), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_refused_shard_is_told_before_the_timer, begin, end),
        cmocka_unit_test_setup_teardown(the_end_tells_what_is_left_and_nothing_twice, begin, end),
        cmocka_unit_test_setup_teardown(progress_is_told_by_the_timer, begin, end),
        cmocka_unit_test(the_group_of_a_weight_set_is_over_layers_and_instances),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
