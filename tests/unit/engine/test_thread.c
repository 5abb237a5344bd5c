/* SPDX-License-Identifier: MIT */
/* The engine with its thread: events by eventfd, many submitters, stop with and without patience, a
 * stalled FFN, and no allocation while tokens flow. */
#include <pthread.h>

#include "engine_fixture.h"

static golden_t golden[8];
static uint32_t golden_count;

/* Counts every allocation of the process while armed. The sanitizer brings its own allocator, so
 * the count is only taken without it. */
static atomic_bool counting;
static atomic_uint allocations;
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define COUNTS_ALLOCATIONS 1
void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *old, size_t size);
void *malloc(size_t size)
{
    if (atomic_load(&counting))
        atomic_fetch_add(&allocations, 1);
    return __libc_malloc(size);
}
void *calloc(size_t count, size_t size)
{
    if (atomic_load(&counting))
        atomic_fetch_add(&allocations, 1);
    return __libc_calloc(count, size);
}
void *realloc(void *old, size_t size)
{
    if (atomic_load(&counting))
        atomic_fetch_add(&allocations, 1);
    return __libc_realloc(old, size);
}
#else
#define COUNTS_ALLOCATIONS 0
#endif

static int set_up(void **state)
{
    if (fixture_group_set_up(state) != 0)
        return -1;
    golden_count = golden_load(golden, 8);
    return 0;
}

static void wait_events(void)
{
    struct pollfd wait = {.fd = engine_event_fd(fixture->engine), .events = POLLIN};
    assert_int_equal(poll(&wait, 1, 20000), 1);
    drain();
}

static bool all_finished(void)
{
    for (uint32_t i = 0; i < fixture->outcome_count; i++)
        if (!fixture->outcomes[i].finished)
            return false;
    return true;
}

static void events_arrive_by_eventfd(void **state)
{
    (void)state;
    static const uint32_t cpus[2] = {0, 1};
    engine_config_t config = fixture_config();
    config.threads = 2;
    config.cpus = cpus; /* which may not exist here: pinning is best effort */
    config.cpu_count = 2;
    fixture_open(&config);
    assert_int_equal(engine_start(fixture->engine), XP_OK);
    for (uint32_t round = 0; round < 3; round++) {
        for (uint32_t i = 0; i < golden_count; i++) {
            engine_sampling_t sampling = greedy(golden[i].greedy_count);
            submit(golden[i].ids, golden[i].count, &sampling);
        }
        while (!all_finished())
            wait_events();
    }
    for (uint32_t i = 0; i < fixture->outcome_count; i++)
        assert_golden(&fixture->outcomes[i], &golden[i % golden_count]);
    struct pollfd idle = {.fd = engine_event_fd(fixture->engine), .events = POLLIN};
    assert_int_equal(poll(&idle, 1, 0), 0); /* drained: not readable */
    engine_stop(fixture->engine, UINT64_MAX);
    fixture_close();
}

static void stop_lets_running_requests_finish(void **state)
{
    (void)state;
    engine_config_t config = fixture_config();
    fixture_open(&config);
    assert_int_equal(engine_start(fixture->engine), XP_OK);
    for (uint32_t i = 0; i < golden_count; i++) {
        engine_sampling_t sampling = greedy(20);
        submit(golden[i].ids, golden[i].count, &sampling);
    }
    engine_stop(fixture->engine, UINT64_MAX);
    uint64_t request;
    engine_sampling_t sampling = greedy(1);
    assert_int_equal(engine_submit(fixture->engine, golden[0].ids, 2, &sampling, &request),
                     XP_CLOSED);
    while (drain() > 0)
        ;
    assert_true(all_finished());
    for (uint32_t i = 0; i < golden_count; i++)
        assert_golden(&fixture->outcomes[i], &golden[i]);
    fixture_close();
}

/* A deadline that has passed, a full ring and no consumer: stop returns, and every FINISH is there
 * afterwards. */
static void stop_aborts_at_the_deadline(void **state)
{
    (void)state;
    engine_config_t config = fixture_config();
    config.queue_limit = 40;
    fixture_open(&config);
    assert_int_equal(engine_start(fixture->engine), XP_OK);
    for (uint32_t i = 0; i < 40; i++) {
        engine_sampling_t sampling = greedy(400);
        submit(golden[i % golden_count].ids, golden[i % golden_count].count, &sampling);
    }
    for (uint32_t i = 0; i < 10000; i++) {
        pthread_mutex_lock(&fixture->engine->lock);
        bool paused = fixture->engine->paused;
        pthread_mutex_unlock(&fixture->engine->lock);
        if (paused)
            break;
        usleep(1000);
    }
    engine_stop(fixture->engine, 0);
    while (drain() > 0)
        ;
    assert_true(all_finished());
    assert_int_equal(stats().aborted, 40);
    assert_int_equal(stats().kv_pages_used, 0);
    fixture_close();
}

static void stalled_ffn_gives_no_token_and_loses_none(void **state)
{
    (void)state;
    engine_config_t config = fixture_config();
    fixture_open(&config);
    atomic_store(&fixture->ffn_blocked, true);
    assert_int_equal(engine_start(fixture->engine), XP_OK);
    engine_sampling_t sampling = greedy(30);
    outcome_t *outcome = submit(golden[0].ids, golden[0].count, &sampling);
    outcome_t *cancelled = submit(golden[1].ids, golden[1].count, &sampling);
    struct pollfd wait = {.fd = engine_event_fd(fixture->engine), .events = POLLIN};
    assert_int_equal(poll(&wait, 1, 200), 0);
    engine_cancel(fixture->engine, cancelled->request); /* during the stall */
    engine_stats_t now = stats();                       /* and the counters can be read */
    assert_int_equal(now.generated_tokens, 0);
    atomic_store(&fixture->ffn_blocked, false);
    while (!all_finished())
        wait_events();
    assert_golden(outcome, &golden[0]);
    assert_int_equal(cancelled->finish.finish, ENGINE_FINISH_ABORT);
    fixture_close();
}

typedef struct client {
    pthread_t thread;
    uint32_t index, submitted, refused;
} client_t;

static void *client_main(void *context)
{
    client_t *client = context;
    for (uint32_t i = 0; i < 200; i++) {
        engine_sampling_t sampling = greedy(1 + i % 3);
        uint64_t request;
        xp_status_t status = engine_submit(fixture->engine, golden[0].ids, 3, &sampling, &request);
        if (status == XP_OK) {
            client->submitted++;
            if (i % 5 == 0)
                engine_cancel(fixture->engine, request);
        } else {
            client->refused += status == XP_RETRY;
            usleep(500);
        }
        stats();
    }
    return NULL;
}

static void many_submitters(void **state)
{
    (void)state;
    engine_config_t config = fixture_config();
    fixture_open(&config);
    assert_int_equal(engine_start(fixture->engine), XP_OK);
    client_t clients[4] = {0};
    for (uint32_t i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&clients[i].thread, NULL, client_main, &clients[i]), 0);
    static engine_event_t events[64];
    uint32_t finished = 0, submitted = 0, refused = 0;
    bool joined = false;
    while (!joined || finished < submitted) {
        struct pollfd wait = {.fd = engine_event_fd(fixture->engine), .events = POLLIN};
        poll(&wait, 1, 50);
        uint32_t got = engine_drain(fixture->engine, events, 64);
        for (uint32_t i = 0; i < got; i++)
            finished += events[i].type == ENGINE_EVENT_FINISH;
        uint64_t open = stats().requests + stats().rejected;
        if (!joined && open == 4 * 200) {
            for (uint32_t i = 0; i < 4; i++) {
                pthread_join(clients[i].thread, NULL);
                submitted += clients[i].submitted;
                refused += clients[i].refused;
            }
            joined = true;
        }
    }
    assert_int_equal(finished, submitted);
    assert_int_equal(submitted + refused, 800);
    assert_int_equal(stats().kv_pages_used, 0);
    fixture_close();
}

static xp_status_t quiet_ffn(void *context, uint32_t layer, uint32_t rows, uint32_t kind,
                             uint64_t slo_deadline_ns, const float *in, float *out)
{
    memcpy(out, in, (size_t)rows * 192 * sizeof *out);
    return XP_OK;
}

static void tokens_allocate_nothing(void **state)
{
    (void)state;
    if (!COUNTS_ALLOCATIONS)
        skip();
    engine_config_t config = fixture_config();
    config.threads = 2;
    config.page_tokens = 4;
    config.kv_tokens = 400;
    config.ffn.call = quiet_ffn; /* the reference FFN allocates */
    fixture_open(&config);
    for (uint32_t round = 0; round < 2; round++) {
        /* The first round warms up what the C library and the tokenizer keep. */
        atomic_store(&counting, round == 1);
        for (uint32_t i = 0; i < 12; i++) {
            engine_sampling_t sampling = greedy(40);
            sampling.temperature = 0.8f;
            sampling.top_p = 0.9f;
            sampling.repetition_penalty = 1.1f;
            sampling.want_logprobs = true;
            sampling.top_logprobs = 5;
            sampling.stop_count = 1;
            strcpy(sampling.stops[0], "never in here");
            submit(golden[i % golden_count].ids, golden[i % golden_count].count, &sampling);
        }
        run_dry();
        atomic_store(&counting, false);
    }
    assert_true(all_finished());
    assert_int_equal(atomic_load(&allocations), 0);
    fixture_close();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(events_arrive_by_eventfd),
        cmocka_unit_test(stop_lets_running_requests_finish),
        cmocka_unit_test(stop_aborts_at_the_deadline),
        cmocka_unit_test(stalled_ffn_gives_no_token_and_loses_none),
        cmocka_unit_test(many_submitters),
        cmocka_unit_test(tokens_allocate_nothing),
    };
    return cmocka_run_group_tests(tests, set_up, fixture_group_tear_down);
}
