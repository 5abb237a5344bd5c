/* SPDX-License-Identifier: MIT */
/*
 * The conformance suite of Fabric providers: what every provider must do, over its name. Results
 * are compared with the closed form of the rig's executor, never with another run.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "base/memfd.h"
#include "fabric/internal.h"
#include "rig.h"

/* Bounds in time hold for machines that have a core free now and then. */
#ifdef __SANITIZE_ADDRESS__
#define XPOOL_TEST_SLOWNESS 20
#else
#define XPOOL_TEST_SLOWNESS 3
#endif

static const char *const providers[] = {"shm"};
#define FOR_EACH_PROVIDER(rig_provider)                                                            \
    for (size_t provider_index_ = 0; provider_index_ < sizeof(providers) / sizeof(providers[0]) && \
                                     ((rig_provider) = providers[provider_index_], true);          \
         provider_index_++)

#define ALL_RANKS_MAX (FABRIC_MAX_INSTANCES * FABRIC_MAX_RANKS)

/* Every rank of every Instance makes `calls` calls, all at once, each rank on a thread. */
static void drive(rig_t *rig, uint32_t calls, bool uneven)
{
    static rig_client_t clients[ALL_RANKS_MAX];
    uint32_t count = 0;
    for (uint32_t i = 0; i < rig->plan.instance_count; i++)
        for (uint32_t rank = 0; rank < fabric_plan_ranks(&rig->plan.instances[i]); rank++) {
            rig_client_t *client = &clients[count++];
            rig_client_create(rig, i, rank, client);
            rig_client_attach(client);
            client->calls = calls;
            client->uneven = uneven;
        }
    for (uint32_t i = 0; i < count; i++)
        assert_int_equal(pthread_create(&clients[i].thread, NULL, rig_client_main, &clients[i]), 0);
    for (uint32_t i = 0; i < count; i++) {
        pthread_join(clients[i].thread, NULL);
        rig_client_destroy(&clients[i]);
    }
}

/* Counters must tell exactly what happened. */
static void check_counters(const rig_t *rig, uint64_t calls_per_instance)
{
    uint64_t led = 0, shards = 0, expected_shards = 0;
    uint32_t pes = rig->plan.atn_count + rig->plan.ffn_count;
    for (uint32_t pe = rig->plan.atn_count; pe < pes; pe++) {
        fabric_pe_counters_t counters;
        fabric_counters(rig->observer, pe, &counters);
        led += counters.invocations;
        shards += counters.submissions;
        assert_int_equal(counters.eager + counters.longform, counters.invocations);
    }
    for (uint32_t i = 0; i < rig->plan.instance_count; i++) {
        uint64_t invocations, rows;
        fabric_instance_counters(rig->observer, i, &invocations, &rows);
        assert_int_equal(invocations, calls_per_instance);
        expected_shards += calls_per_instance *
                           (uint64_t)__builtin_popcount(rig->plan.instances[i].layer_group[0]);
    }
    assert_int_equal(led, calls_per_instance * rig->plan.instance_count);
    assert_int_equal(shards, expected_shards);
    uint64_t submissions = 0, expected_submissions = 0;
    for (uint32_t pe = 0; pe < rig->plan.atn_count; pe++) {
        fabric_pe_counters_t counters;
        fabric_counters(rig->observer, pe, &counters);
        submissions += counters.submissions;
        assert_int_equal(counters.submissions, counters.invocations);
        assert_int_equal(counters.abandoned, 0);
    }
    for (uint32_t i = 0; i < rig->plan.instance_count; i++)
        expected_submissions += calls_per_instance * fabric_plan_ranks(&rig->plan.instances[i]);
    assert_int_equal(submissions, expected_submissions);
}

/* Every delivery kind x group size x attention shape x form. */
static void test_matrix(void **state)
{
    static const struct {
        uint32_t tp, dp;
    } shapes[] = {{1, 1}, {2, 1}, {1, 2}, {2, 2}};
    static rig_t rig;
    const char *provider;
    uint32_t combinations = 0;
    FOR_EACH_PROVIDER(provider)
    for (uint32_t delivery = 0; delivery < 3; delivery++)
        for (uint32_t group = 1; group <= 2; group++)
            for (uint32_t shape = 0; shape < 4; shape++)
                for (uint32_t form = FABRIC_FORM_AUTO; form <= FABRIC_FORM_LONG; form++) {
                    uint32_t ranks = shapes[shape].tp * shapes[shape].dp;
                    rig_plan(&rig, ranks > 1 ? 2 : 1, 2, 1, group);
                    rig.provider = provider;
                    fabric_plan_instance_t *instance = &rig.plan.instances[0];
                    instance->atn_tp = shapes[shape].tp;
                    instance->atn_dp = shapes[shape].dp;
                    instance->delivery = delivery;
                    instance->form = form;
                    for (uint32_t rank = 0; rank < ranks; rank++)
                        instance->rank_atn[rank] = rank % rig.plan.atn_count;
                    if (fabric_plan_check(&rig.plan, sizeof(rig.plan)) != XP_OK) {
                        assert_true(
                            (form == FABRIC_FORM_EAGER && ranks > 1) ||
                            (delivery == FABRIC_DELIVERY_SINGLE_COMPLETE && instance->atn_tp > 1));
                        continue;
                    }
                    rig_start(&rig);
                    drive(&rig, 60, instance->atn_dp > 1);
                    check_counters(&rig, 60);
                    fabric_pe_counters_t counters;
                    fabric_counters(rig.observer, 0, &counters);
                    bool eager = form != FABRIC_FORM_LONG && ranks == 1;
                    assert_int_equal(counters.eager != 0, eager);
                    assert_int_equal(counters.longform != 0, !eager);
                    rig_stop(&rig);
                    combinations++;
                }
    assert_int_equal(combinations, 2 * (5 + 9 + 9));
}

/* Several Instances at once under each policy, Lanes fewer than Instances, layers on alternate
 * FfnAgents. */
static void test_instances(void **state)
{
    static rig_t rig;
    const char *provider;
    FOR_EACH_PROVIDER(provider)
    for (uint32_t policy = 0; policy < 3; policy++)
        for (uint32_t lanes = 1; lanes <= 3; lanes += 2) {
            rig_plan(&rig, 2, 2, 5, 1);
            rig.provider = provider;
            rig.plan.policy = policy;
            rig.plan.lanes = lanes;
            rig.plan.instances[4].form = FABRIC_FORM_LONG;
            rig.plan.instances[3].atn_dp = 2;
            rig.plan.instances[3].rank_atn[0] = 1;
            rig.plan.instances[3].rank_atn[1] = 0;
            rig_start(&rig);
            drive(&rig, 150, true);
            check_counters(&rig, 150);
            fabric_pe_counters_t counters;
            fabric_counters(rig.observer, rig.plan.atn_count, &counters);
            assert_int_equal(counters.lanes_leased, 5 * 150);
            for (uint64_t until_ns = rig_in(5000); /* the last acknowledgement may be on its way */
                 counters.lanes_in_use && xp_monotonic_ns() < until_ns; usleep(500))
                fabric_counters(rig.observer, rig.plan.atn_count, &counters);
            assert_int_equal(counters.lanes_in_use, 0);
            assert_true(counters.lanes_peak >= 1 && counters.lanes_peak <= lanes);
            rig_stop(&rig);
        }
}

/* 0 rows and all the rows there are, in both forms, and DP ranks of which one has nothing. */
static void test_row_bounds(void **state)
{
    static rig_t rig;
    const char *provider;
    FOR_EACH_PROVIDER(provider)
    for (uint32_t form = FABRIC_FORM_EAGER; form <= FABRIC_FORM_LONG; form++)
        for (uint32_t group = 1; group <= 2; group++)
            for (uint32_t delivery = 0; delivery < 3; delivery++) {
                rig_plan(&rig, 1, 2, 1, group);
                rig.provider = provider;
                rig.plan.instances[0].form = form;
                rig.plan.instances[0].delivery = delivery;
                rig_start(&rig);
                rig_client_t client;
                rig_client_create(&rig, 0, 0, &client);
                rig_client_attach(&client);
                static const uint32_t rows[] = {0, 16, 0, 1, 16, 0};
                for (uint32_t i = 0; i < 6; i++)
                    assert_int_equal(rig_call_rows(&client, i % 4, &rows[i], rig_in(5000)), XP_OK);
                rig_client_destroy(&client);
                rig_stop(&rig);
            }
}

/* FP32 in PE order: (1e8 + 1) - 1e8 is 0 in that order only, and 1 when the large ones meet first.
 */
static void test_reduction_order(void **state)
{
    static rig_t rig;
    const char *provider;
    FOR_EACH_PROVIDER(provider)
    for (uint32_t delivery = 0; delivery < 3; delivery++)
        for (uint32_t form = FABRIC_FORM_EAGER; form <= FABRIC_FORM_LONG; form++) {
            rig_plan(&rig, 1, 3, 1, 3);
            rig.provider = provider;
            rig.plan.instances[0].delivery = delivery;
            rig.plan.instances[0].form = form;
            for (uint32_t pe = 1; pe < 4; pe++)
                rig.agents[pe].executor.by_order = true;
            rig_start(&rig);
            rig_client_t client;
            rig_client_create(&rig, 0, 0, &client);
            rig_client_attach(&client);
            for (uint32_t i = 0; i < 50; i++) {
                transport_tensor_t in = rig_tensor(&client, client.in, 2);
                transport_tensor_t out = rig_tensor(&client, client.out, 2);
                transport_request_t request = {.layer = i % 4, .rows = 2};
                memset(client.in, 0, 2 * RIG_HIDDEN * sizeof(float));
                assert_int_equal(
                    transport_client_call(client.client, &request, &in, &out, rig_in(5000)), XP_OK);
                volatile float expected = 1e8f;
                expected += 1.0f;
                expected += -1e8f;
                for (uint32_t c = 0; c < 2 * RIG_HIDDEN; c++)
                    assert_true(client.out[c] == expected);
            }
            rig_client_destroy(&client);
            rig_stop(&rig);
        }
}

typedef struct one_call {
    rig_client_t *client;
    uint32_t layer;
    uint64_t slo_deadline_ns;
    uint32_t timeout_ms;
    pthread_t thread;
    xp_status_t status;
    char text[XP_ERROR_TEXT_MAX];
} one_call_t;

static void *one_call_main(void *context)
{
    one_call_t *call = context;
    uint32_t dp_rows[FABRIC_MAX_RANKS] = {3, 3, 3, 3, 3, 3, 3, 3};
    call->status = rig_call_rows(call->client, call->layer, dp_rows, rig_in(call->timeout_ms));
    snprintf(call->text, sizeof(call->text), "%s", xp_error_last()->text);
    return NULL;
}

static void one_call_start(one_call_t *call, rig_client_t *client, uint32_t layer)
{
    *call = (one_call_t){.client = client, .layer = layer, .timeout_ms = 10000};
    assert_int_equal(pthread_create(&call->thread, NULL, one_call_main, call), 0);
}

static xp_status_t one_call_end(one_call_t *call)
{
    pthread_join(call->thread, NULL);
    return call->status;
}

static void hold(rig_t *rig, bool on)
{
    for (uint32_t pe = rig->plan.atn_count; pe < rig->plan.atn_count + rig->plan.ffn_count; pe++)
        atomic_store(&rig->agents[pe].executor.hold, on);
}

static void wait_for_calls(const rig_t *rig, uint64_t calls)
{
    uint64_t sum = 0;
    for (uint64_t until_ns = rig_in(10000); sum < calls && xp_monotonic_ns() < until_ns;) {
        usleep(500);
        sum = 0;
        for (uint32_t pe = rig->plan.atn_count; pe < FABRIC_MAX_PES; pe++)
            sum += atomic_load(&rig->agents[pe].executor.calls);
    }
    assert_true(sum >= calls);
}

static uint64_t atn_submissions(const rig_t *rig)
{
    uint64_t sum = 0;
    for (uint32_t pe = 0; pe < rig->plan.atn_count; pe++) {
        fabric_pe_counters_t counters;
        fabric_counters(rig->observer, pe, &counters);
        sum += counters.submissions;
    }
    return sum;
}

static void wait_for_submissions(const rig_t *rig, uint64_t count)
{
    for (uint64_t until_ns = rig_in(10000);
         atn_submissions(rig) < count && xp_monotonic_ns() < until_ns;)
        usleep(500);
    assert_int_equal(atn_submissions(rig), count);
}

/* An Instance is detached while its Invocation executes, or while it waits for a Lane: its own call
 * ends closed, the other's is exact, the Lane and the place come back. */
static void test_detach_in_flight(void **state)
{
    static rig_t rig;
    const char *provider;
    FOR_EACH_PROVIDER(provider)
    for (uint32_t delivery = 0; delivery < 3; delivery++)
        for (uint32_t form = FABRIC_FORM_EAGER; form <= FABRIC_FORM_LONG; form++)
            for (uint32_t queued = 0; queued < 2; queued++) {
                rig_plan(&rig, 1, 2, 2, 2);
                rig.provider = provider;
                rig.plan.lanes = 1;
                for (uint32_t i = 0; i < 2; i++) {
                    rig.plan.instances[i].delivery = delivery;
                    rig.plan.instances[i].form = form;
                }
                rig_start(&rig);
                rig_client_t clients[2];
                one_call_t calls[2];
                for (uint32_t i = 0; i < 2; i++) {
                    rig_client_create(&rig, i, 0, &clients[i]);
                    rig_client_attach(&clients[i]);
                }
                hold(&rig, true);
                /* The first takes the Lane, the second waits for it; `queued` says which goes. */
                one_call_start(&calls[0], &clients[0], 1);
                wait_for_calls(&rig, 1);
                one_call_start(&calls[1], &clients[1], 2);
                wait_for_submissions(&rig, 2);
                assert_int_equal(fabric_atn_detach(rig.agents[0].atn, queued, 0), XP_OK);
                assert_int_equal(one_call_end(&calls[queued]), XP_CLOSED);
                assert_int_equal(fabric_atn_detach(rig.agents[0].atn, queued, 0), XP_NOT_FOUND);
                hold(&rig, false);
                assert_int_equal(one_call_end(&calls[!queued]), XP_OK);
                /* A new process of the same Instance takes the place. */
                rig_client_destroy(&clients[queued]);
                rig_client_create(&rig, queued, 0, &clients[queued]);
                rig_client_attach(&clients[queued]);
                for (uint32_t i = 0; i < 20; i++) {
                    assert_int_equal(rig_call(&clients[0], rig_in(5000)), XP_OK);
                    assert_int_equal(rig_call(&clients[1], rig_in(5000)), XP_OK);
                }
                fabric_pe_counters_t counters;
                fabric_counters(rig.observer, 0, &counters);
                assert_int_equal(counters.abandoned, 1);
                rig_client_destroy(&clients[0]);
                rig_client_destroy(&clients[1]);
                rig_stop(&rig);
            }
}

/* A new arena is attached while the abandoned Submission of the old one still executes: the slot is
 * not used before that has come back. */
static void test_reattach_in_flight(void **state)
{
    static rig_t rig;
    rig_plan(&rig, 1, 1, 1, 1);
    rig_start(&rig);
    rig_client_t old, fresh;
    one_call_t lost, next;
    rig_client_create(&rig, 0, 0, &old);
    rig_client_attach(&old);
    hold(&rig, true);
    one_call_start(&lost, &old, 1);
    wait_for_calls(&rig, 1);
    assert_int_equal(fabric_atn_detach(rig.agents[0].atn, 0, 0), XP_OK);
    assert_int_equal(one_call_end(&lost), XP_CLOSED);
    rig_client_create(&rig, 0, 0, &fresh);
    rig_client_attach(&fresh);
    one_call_start(&next, &fresh, 2);
    usleep(30000);
    assert_int_equal(atn_submissions(&rig), 1);
    hold(&rig, false);
    assert_int_equal(one_call_end(&next), XP_OK);
    rig_client_destroy(&old);
    rig_client_destroy(&fresh);
    rig_stop(&rig);
}

/* Attention TP: both ranks of a dying Instance go, one after the other; it comes back whole. */
static void test_detach_ranks(void **state)
{
    static rig_t rig;
    for (uint32_t admitted = 0; admitted < 2; admitted++) {
        rig_plan(&rig, 2, 1, 2, 1);
        rig.plan.lanes = 1;
        rig.plan.instances[0].atn_tp = 2;
        rig.plan.instances[0].rank_atn[1] = 1;
        rig.plan.instances[0].delivery = FABRIC_DELIVERY_REPLICATED_COMPLETE;
        rig_start(&rig);
        rig_client_t ranks[2], other;
        one_call_t calls[2];
        for (uint32_t rank = 0; rank < 2; rank++) {
            rig_client_create(&rig, 0, rank, &ranks[rank]);
            rig_client_attach(&ranks[rank]);
        }
        rig_client_create(&rig, 1, 0, &other);
        rig_client_attach(&other);
        hold(&rig, true);
        one_call_start(&calls[0], &ranks[0], 0);
        if (admitted) {
            one_call_start(&calls[1], &ranks[1], 0);
            wait_for_calls(&rig, 1);
        } else {
            wait_for_submissions(&rig, 1); /* the other rank dies before it submits */
        }
        for (uint32_t rank = 0; rank < 2; rank++)
            assert_int_equal(fabric_atn_detach(rig.agents[rank].atn, 0, rank), XP_OK);
        assert_int_equal(one_call_end(&calls[0]), XP_CLOSED);
        if (admitted)
            assert_int_equal(one_call_end(&calls[1]), XP_CLOSED);
        hold(&rig, false);
        assert_int_equal(rig_call(&other, rig_in(5000)), XP_OK);
        usleep(20000);
        for (uint32_t rank = 0; rank < 2; rank++) {
            rig_client_destroy(&ranks[rank]);
            rig_client_create(&rig, 0, rank, &ranks[rank]);
            rig_client_attach(&ranks[rank]);
        }
        one_call_start(&calls[0], &ranks[0], 3);
        one_call_start(&calls[1], &ranks[1], 3);
        assert_int_equal(one_call_end(&calls[0]), XP_OK);
        assert_int_equal(one_call_end(&calls[1]), XP_OK);
        rig_client_destroy(&ranks[0]);
        rig_client_destroy(&ranks[1]);
        rig_client_destroy(&other);
        rig_stop(&rig);
    }
}

/* Everyone ends with the first failure's text, soon, and so do the waiting Instances. */
static void check_failed(rig_t *rig, uint64_t start_ns, const char *expected)
{
    uint64_t took_ns = rig_join(rig, start_ns);
    uint32_t pe = 99;
    assert_int_equal(fabric_failure(rig->observer, &pe), XP_FATAL);
    char canonical[XP_ERROR_TEXT_MAX];
    snprintf(canonical, sizeof(canonical), "%s", xp_error_last()->text);
    if (!strstr(canonical, expected))
        fprintf(stderr, "canonical failure: %s\n", canonical);
    assert_non_null(strstr(canonical, expected));
    for (pe = 0; pe < rig->plan.atn_count + rig->plan.ffn_count; pe++)
        if (rig->agents[pe].started) {
            assert_int_equal(rig->agents[pe].result, XP_FATAL);
            assert_string_equal(rig->agents[pe].text, canonical);
        }
    assert_true(took_ns < XP_NS_PER_S * XPOOL_TEST_SLOWNESS);
}

static void test_failure(void **state)
{
    static rig_t rig;
    const char *provider;
    FOR_EACH_PROVIDER(provider)
    {
        rig_plan(&rig, 2, 2, 2, 1);
        rig.provider = provider;
        rig_start(&rig);
        rig_client_t client;
        rig_client_create(&rig, 0, 0, &client);
        one_call_t call;
        one_call_start(&call, &client, 0); /* no arena attached: it can only wait */
        rig_client_attach(&client);
        assert_int_equal(one_call_end(&call), XP_OK);
        one_call_t waiting;
        hold(&rig, true);
        one_call_start(&waiting, &client, 1);
        wait_for_calls(&rig, 2);
        assert_int_equal(fabric_failure(rig.observer, NULL), XP_OK);
        uint64_t start_ns = xp_monotonic_ns();
        assert_true(fabric_fail(rig.observer, 3, "the daemon saw PE 3 die"));
        assert_false(fabric_fail(rig.observer, 2, "a later one"));
        assert_int_equal(one_call_end(&waiting), XP_FATAL);
        hold(&rig, false);
        check_failed(&rig, start_ns, "the daemon saw PE 3 die");
        uint32_t pe = 0;
        assert_int_equal(fabric_failure(rig.observer, &pe), XP_FATAL);
        assert_int_equal(pe, 3);
        rig_client_destroy(&client);
        rig_free(&rig);
    }
}

static void test_executor_failure(void **state)
{
    static rig_t rig;
    rig_plan(&rig, 1, 2, 1, 2);
    rig_start(&rig);
    rig_client_t client;
    rig_client_create(&rig, 0, 0, &client);
    rig_client_attach(&client);
    atomic_store(&rig.agents[2].executor.fail, true);
    uint32_t rows = 1;
    assert_int_equal(rig_call_rows(&client, 2, &rows, rig_in(10000)), XP_FATAL);
    check_failed(&rig, xp_monotonic_ns(),
                 "FfnAgent PE 2 cannot execute model-0 layer 2: the rig's executor was told to");
    rig_client_destroy(&client);
    rig_free(&rig);
}

/* Attention TP ranks that ask for different things. */
static void test_disagreement(void **state)
{
    static rig_t rig;
    rig_plan(&rig, 2, 1, 1, 1);
    rig.plan.instances[0].atn_tp = 2;
    rig.plan.instances[0].rank_atn[1] = 1;
    rig.plan.instances[0].delivery = FABRIC_DELIVERY_REPLICATED_COMPLETE;
    rig_start(&rig);
    rig_client_t ranks[2];
    one_call_t calls[2];
    for (uint32_t rank = 0; rank < 2; rank++) {
        rig_client_create(&rig, 0, rank, &ranks[rank]);
        rig_client_attach(&ranks[rank]);
        one_call_start(&calls[rank], &ranks[rank], rank);
    }
    for (uint32_t rank = 0; rank < 2; rank++)
        assert_int_equal(one_call_end(&calls[rank]), XP_FATAL);
    check_failed(&rig, xp_monotonic_ns(), "disagree");
    char text[FABRIC_FAILURE_TEXT];
    snprintf(text, sizeof(text), "%s", rig.agents[0].text);
    assert_non_null(strstr(text, "model-0"));
    assert_non_null(strstr(text, "PE 0"));
    assert_non_null(strstr(text, "PE 1"));
    rig_client_destroy(&ranks[0]);
    rig_client_destroy(&ranks[1]);
    rig_free(&rig);
}

/* The timeout names Instance, layer and the PE that is waited for. The Coordinator tells first if
 * it runs within the quarter that AtnAgents wait longer: 200 ms. */
static void test_timeout(void **state)
{
    static rig_t rig;
    /* A rank that never submits. */
    rig_plan(&rig, 2, 1, 1, 1);
    rig.plan.submission_timeout_ns = 800 * XP_NS_PER_MS;
    rig.plan.instances[0].atn_tp = 2;
    rig.plan.instances[0].rank_atn[1] = 1;
    rig.plan.instances[0].delivery = FABRIC_DELIVERY_REPLICATED_COMPLETE;
    rig_start(&rig);
    rig_client_t client;
    rig_client_create(&rig, 0, 0, &client);
    rig_client_attach(&client);
    uint32_t rows[8] = {2};
    assert_int_equal(rig_call_rows(&client, 3, rows, rig_in(10000)), XP_FATAL);
    check_failed(&rig, xp_monotonic_ns(),
                 "model-0 layer 3: no answer in 800 ms, waiting for Submission of AtnAgent PE 1");
    rig_client_destroy(&client);
    rig_free(&rig);

    /* A member that does not run: its own, and as the first member's mate, in all deliveries. */
    for (uint32_t delivery = 0; delivery < 3; delivery++) {
        rig_plan(&rig, 1, 2, 1, 2);
        rig.plan.submission_timeout_ns = 800 * XP_NS_PER_MS;
        rig.plan.instances[0].delivery = delivery;
        rig_make(&rig);
        for (uint32_t pe = 0; pe < 2; pe++) {
            rig_join_agent(&rig, pe);
            pthread_create(&rig.agents[pe].thread, NULL, rig_agent_main, &rig.agents[pe]);
            rig.agents[pe].started = true;
        }
        rig_client_create(&rig, 0, 0, &client);
        rig_client_attach(&client);
        assert_int_equal(rig_call_rows(&client, 1, rows, rig_in(10000)), XP_FATAL);
        check_failed(&rig, xp_monotonic_ns(),
                     "model-0 layer 1: no answer in 800 ms, waiting for FfnAgent PE 2");
        rig_client_destroy(&client);
        rig_free(&rig);
    }

    /* Nobody at the Coordinator's place. */
    rig_plan(&rig, 1, 1, 1, 1);
    rig.plan.submission_timeout_ns = 150 * XP_NS_PER_MS;
    rig_make(&rig);
    rig_join_agent(&rig, 0);
    pthread_create(&rig.agents[0].thread, NULL, rig_agent_main, &rig.agents[0]);
    rig.agents[0].started = true;
    rig_client_create(&rig, 0, 0, &client);
    rig_client_attach(&client);
    assert_int_equal(rig_call_rows(&client, 1, rows, rig_in(10000)), XP_FATAL);
    check_failed(&rig, xp_monotonic_ns(), "waiting for Coordinator PE 1");
    rig_client_destroy(&client);
    rig_free(&rig);
}

/* A long compute of the Coordinator's own FfnAgent is no timeout, and does not keep the other
 * FfnAgent from work. */
static void test_long_compute(void **state)
{
    static rig_t rig;
    rig_plan(&rig, 1, 2, 2, 1);
    rig_start(&rig);
    rig_client_t clients[2];
    for (uint32_t i = 0; i < 2; i++) {
        rig_client_create(&rig, i, 0, &clients[i]);
        rig_client_attach(&clients[i]);
    }
    uint32_t rows = 8;
    transport_tensor_t in = rig_tensor(&clients[0], clients[0].in, rows);
    transport_tensor_t out = rig_tensor(&clients[0], clients[0].out, rows);
    transport_request_t request = {.layer = 0, .rows = rows};
    atomic_store(&rig.agents[1].executor.hold, true);
    memset(clients[0].in, 0, rows * RIG_HIDDEN * sizeof(float));
    assert_int_equal(transport_client_put(clients[0].client, &request, &in), XP_OK);
    wait_for_calls(&rig, 1);
    for (uint32_t i = 0; i < 50; i++) /* model-1's even layers are on the other FfnAgent */
        assert_int_equal(rig_call_rows(&clients[1], (i % 2) * 2, &rows, rig_in(5000)), XP_OK);
    assert_int_equal(atomic_load(&rig.agents[1].executor.calls), 1);
    atomic_store(&rig.agents[1].executor.hold, false);
    assert_int_equal(transport_client_wait(clients[0].client, rig_in(5000)), XP_OK);
    assert_int_equal(transport_client_take(clients[0].client, &out), XP_OK);
    rig_client_destroy(&clients[0]);
    rig_client_destroy(&clients[1]);
    rig_stop(&rig);
}

static void test_shutdown(void **state)
{
    static rig_t rig;
    const char *provider;
    FOR_EACH_PROVIDER(provider)
    {
        /* Idle, with one rank of two waiting for the other for ever, and an Instance at rest. */
        rig_plan(&rig, 2, 2, 2, 1);
        rig.provider = provider;
        rig.plan.instances[0].atn_dp = 2;
        rig.plan.instances[0].rank_atn[1] = 1;
        rig_start(&rig);
        rig_client_t client, resting;
        rig_client_create(&rig, 0, 0, &client);
        rig_client_attach(&client);
        rig_client_create(&rig, 1, 0, &resting);
        rig_client_attach(&resting);
        assert_int_equal(rig_call(&resting, rig_in(5000)), XP_OK);
        one_call_t call;
        one_call_start(&call, &client, 0);
        wait_for_submissions(&rig, 2);
        uint64_t took_ns = rig_stop(&rig);
        assert_int_equal(one_call_end(&call), XP_CLOSED);
        assert_true(took_ns < XP_NS_PER_S * XPOOL_TEST_SLOWNESS);
        assert_int_equal(rig_call(&resting, rig_in(5000)), XP_CLOSED);
        rig_client_destroy(&client);
        rig_client_destroy(&resting);

        /* What executes is finished first. */
        rig_plan(&rig, 1, 2, 1, 2);
        rig.provider = provider;
        rig_start(&rig);
        rig_client_create(&rig, 0, 0, &client);
        rig_client_attach(&client);
        hold(&rig, true);
        one_call_start(&call, &client, 0);
        wait_for_calls(&rig, 1);
        fabric_shutdown(rig.observer);
        usleep(20000);
        hold(&rig, false);
        assert_int_equal(one_call_end(&call), XP_OK);
        rig_stop(&rig);
        rig_client_destroy(&client);
    }
}

/* What is wrong with one Instance stays with it. */
static void test_bad_instance(void **state)
{
    static rig_t rig;
    rig_plan(&rig, 1, 1, 2, 1);
    rig_start(&rig);
    rig_client_t bad, good;
    rig_client_create(&rig, 0, 0, &bad);
    rig_client_attach(&bad);
    rig_client_create(&rig, 1, 0, &good);
    rig_client_attach(&good);
    uint32_t rows = 1;
    transport_tensor_t in = rig_tensor(&bad, bad.in, 1), out = rig_tensor(&bad, bad.out, 1);
    transport_request_t request = {.layer = 4, .rows = 1}; /* the model has 4 layers */
    memset(bad.in, 0, RIG_HIDDEN * sizeof(float));
    assert_int_equal(transport_client_call(bad.client, &request, &in, &out, rig_in(5000)),
                     XP_INVALID);
    assert_int_equal(rig_call_rows(&bad, 3, &rows, rig_in(5000)), XP_OK);

    /* Nonsense in the arena: the arena is dropped, its Instance told, the place free again. */
    mailbox_arena_t *arena = NULL;
    assert_int_equal(xp_memfd_map(transport_client_fd(bad.client), sizeof(*arena), (void **)&arena),
                     XP_OK);
    __atomic_store_n(&arena->request.sequence, 77u, __ATOMIC_RELEASE);
    xp_memfd_unmap(arena);
    assert_int_equal(rig_call(&good, rig_in(5000)), XP_OK);
    for (uint64_t until_ns = rig_in(5000);
         transport_client_put(bad.client, &request, &in) == XP_OK && xp_monotonic_ns() < until_ns;)
        usleep(1000);
    rig_client_destroy(&bad);
    usleep(10000);
    /* Whoever attached it may detach it all the same, once. */
    assert_int_equal(fabric_atn_detach(rig.agents[0].atn, 0, 0), XP_OK);
    assert_int_equal(fabric_atn_detach(rig.agents[0].atn, 0, 0), XP_NOT_FOUND);
    rig_client_create(&rig, 0, 0, &bad);
    rig_client_attach(&bad);
    assert_int_equal(rig_call(&bad, rig_in(5000)), XP_OK);
    assert_int_equal(rig_call(&good, rig_in(5000)), XP_OK);
    rig_client_destroy(&bad);
    rig_client_destroy(&good);
    rig_stop(&rig);
}

/* The deadline policy admits by deadline, the fifo policy by arrival. */
static void test_policies(void **state)
{
    static rig_t rig;
    static const uint64_t deadlines[] = {0, 900, 0, 300, 600};
    static const uint32_t by_deadline[] = {0, 3, 4, 1, 2}, by_arrival[] = {0, 1, 2, 3, 4};
    for (uint32_t policy = 0; policy < 3; policy++) {
        rig_plan(&rig, 1, 1, 5, 1);
        rig.plan.lanes = 1;
        rig.plan.policy = policy;
        rig_start(&rig);
        rig_client_t clients[5];
        hold(&rig, true);
        for (uint32_t i = 0; i < 5; i++) {
            rig_client_create(&rig, i, 0, &clients[i]);
            rig_client_attach(&clients[i]);
            transport_tensor_t in = rig_tensor(&clients[i], clients[i].in, 1);
            transport_request_t request = {.rows = 1, .slo_deadline_ns = deadlines[i]};
            memset(clients[i].in, 0, RIG_HIDDEN * sizeof(float));
            assert_int_equal(transport_client_put(clients[i].client, &request, &in), XP_OK);
            wait_for_submissions(&rig, i + 1);
            if (i == 0)
                wait_for_calls(&rig, 1);
        }
        hold(&rig, false);
        for (uint32_t i = 0; i < 5; i++)
            assert_int_equal(transport_client_wait(clients[i].client, rig_in(5000)), XP_OK);
        const uint32_t *log = rig.agents[1].executor.log;
        if (policy == FABRIC_POLICY_FIFO)
            assert_memory_equal(log, by_arrival, sizeof(by_arrival));
        if (policy == FABRIC_POLICY_DEADLINE)
            assert_memory_equal(log, by_deadline, sizeof(by_deadline));
        for (uint32_t i = 0; i < 5; i++)
            rig_client_destroy(&clients[i]);
        rig_stop(&rig);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_matrix),           cmocka_unit_test(test_instances),
        cmocka_unit_test(test_row_bounds),       cmocka_unit_test(test_reduction_order),
        cmocka_unit_test(test_detach_in_flight), cmocka_unit_test(test_reattach_in_flight),
        cmocka_unit_test(test_detach_ranks),     cmocka_unit_test(test_failure),
        cmocka_unit_test(test_executor_failure), cmocka_unit_test(test_disagreement),
        cmocka_unit_test(test_timeout),          cmocka_unit_test(test_long_compute),
        cmocka_unit_test(test_shutdown),         cmocka_unit_test(test_bad_instance),
        cmocka_unit_test(test_policies),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
