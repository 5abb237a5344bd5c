/* SPDX-License-Identifier: MIT */
/*
 * A whole data plane in miniature: AtnAgents and FfnAgents as threads (or, in test_processes.c, as
 * processes), Transport clients, and an executor whose result is known in closed form. Shared by
 * the Fabric's integration tests, the thread sanitizer program and the hop benchmark.
 */
#ifndef XPOOL_TESTS_FABRIC_RIG_H
#define XPOOL_TESTS_FABRIC_RIG_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "fabric/fabric.h"
#include "transport/transport.h"

#define RIG_CHECK(condition)                                                                       \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s; last error: %s\n", __FILE__, __LINE__, #condition,         \
                    xp_error_last()->text);                                                        \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

#define RIG_HIDDEN 24

typedef struct rig_executor {
    const fabric_plan_t *plan;
    uint32_t ffn;
    atomic_uint_fast64_t calls;
    _Atomic bool hold; /* compute does not return while this is set */
    _Atomic bool fail;
    bool by_order;    /* partials 1e8, 1, -1e8: their sum tells the order of the reduction */
    uint32_t spin_ns; /* pretended compute */
    atomic_uint logged;
    uint32_t log[64]; /* weight sets in the order of execution */
} rig_executor_t;

/* The complete FFN of the rig, all small integers, so that every sum of partials is exact:
 * y[row][column] = 2 x + 3 layer + 1000 weights + row + 5 (FfnAgents of the group - 1). Member 0
 * contributes all but the last term, each other member 5. `row` counts within the Invocation. */
static inline float rig_partial(uint32_t member, uint32_t weights, uint32_t layer, uint32_t row,
                                float x)
{
    return member ? 5.0f : 2.0f * x + 3.0f * (float)layer + 1000.0f * (float)weights + (float)row;
}

static inline float rig_expected(uint32_t members, uint32_t weights, uint32_t layer, uint32_t row,
                                 float x)
{
    return rig_partial(0, weights, layer, row, x) + 5.0f * (float)(members - 1);
}

static inline xp_status_t rig_execute(void *context, uint32_t lane, uint32_t weights,
                                      uint32_t layer, uint32_t rows, const float *in, float *out)
{
    rig_executor_t *executor = context;
    uint32_t group = 0, hidden = 0;
    for (uint32_t i = 0; i < executor->plan->instance_count; i++)
        if (executor->plan->instances[i].weights == weights) {
            group = executor->plan->instances[i].layer_group[layer];
            hidden = executor->plan->instances[i].hidden;
        }
    uint32_t member = (uint32_t)__builtin_popcount(group & ((1u << executor->ffn) - 1));
    uint32_t entry = atomic_fetch_add(&executor->logged, 1);
    if (entry < 64)
        executor->log[entry] = weights;
    atomic_fetch_add(&executor->calls, 1);
    while (atomic_load(&executor->hold))
        usleep(200);
    if (atomic_load(&executor->fail))
        return xp_fail(XP_FATAL, "the rig's executor was told to fail");
    if (executor->spin_ns) {
        uint64_t until = xp_monotonic_ns() + executor->spin_ns;
        while (xp_monotonic_ns() < until) {
        }
    }
    for (uint32_t i = 0; executor->by_order && i < rows * hidden; i++)
        out[i] = member == 0 ? 1e8f : member == 1 ? 1.0f : -1e8f;
    for (uint32_t row = 0; !executor->by_order && row < rows; row++)
        for (uint32_t c = 0; c < hidden; c++)
            out[row * hidden + c] = rig_partial(member, weights, layer, row, in[row * hidden + c]);
    return XP_OK;
}

typedef struct rig_agent {
    pthread_t thread;
    bool started, is_ffn;
    fabric_t *fabric;
    fabric_atn_t *atn;
    fabric_ffn_t *ffn;
    rig_executor_t executor;
    xp_status_t result;
    char text[XP_ERROR_TEXT_MAX];
    uint64_t left_ns;
} rig_agent_t;

typedef struct rig {
    const char *provider;
    fabric_plan_t plan;
    fabric_descriptors_t descriptors;
    fabric_t *observer;
    rig_agent_t agents[FABRIC_MAX_PES];
} rig_t;

/* A plan of `instances` alike Instances; the caller changes it before rig_start. Layers alternate
 * between all FfnAgents of group size `group`. */
static inline void rig_plan(rig_t *rig, uint32_t atn, uint32_t ffn, uint32_t instances,
                            uint32_t group)
{
    memset(rig, 0, sizeof(*rig));
    rig->provider = "shm";
    fabric_plan_t *plan = &rig->plan;
    plan->magic = FABRIC_PLAN_MAGIC;
    plan->version = FABRIC_PLAN_VERSION;
    plan->bytes = sizeof(*plan);
    plan->generation = 1;
    plan->atn_count = atn;
    plan->ffn_count = ffn;
    plan->lanes = 2;
    plan->seed = 7;
    plan->submission_timeout_ns = 60 * XP_NS_PER_S;
    plan->spin_ns = 2000;
    plan->instance_count = instances;
    plan->weights_count = instances;
    for (uint32_t i = 0; i < instances; i++) {
        fabric_plan_instance_t *instance = &plan->instances[i];
        snprintf(instance->id, sizeof(instance->id), "model-%u", i);
        instance->weights = i;
        instance->hidden = RIG_HIDDEN;
        instance->layers = 4;
        instance->max_rows = 16;
        instance->dtype = XP_DTYPE_F32;
        instance->atn_tp = instance->atn_dp = 1;
        instance->rank_atn[0] = i % atn;
        instance->delivery = FABRIC_DELIVERY_SINGLE_COMPLETE;
        for (uint32_t layer = 0; layer < instance->layers; layer++)
            instance->layer_group[layer] =
                group == 1 ? 1u << ((i + layer) % ffn) : (1u << group) - 1;
    }
}

static inline void *rig_agent_main(void *context)
{
    rig_agent_t *agent = context;
    agent->result = agent->is_ffn ? fabric_ffn_run(agent->ffn) : fabric_atn_run(agent->atn);
    agent->left_ns = xp_monotonic_ns();
    snprintf(agent->text, sizeof(agent->text), "%s", xp_error_last()->text);
    return NULL;
}

static inline void rig_join_agent(rig_t *rig, uint32_t pe)
{
    rig_agent_t *agent = &rig->agents[pe];
    agent->is_ffn = pe >= rig->plan.atn_count;
    RIG_CHECK(fabric_attach(rig->provider, &rig->plan, &rig->descriptors, pe, &agent->fabric) ==
              XP_OK);
    if (agent->is_ffn) {
        agent->executor.plan = &rig->plan;
        agent->executor.ffn = pe - rig->plan.atn_count;
        RIG_CHECK(fabric_ffn_create(agent->fabric, xp_clock_system(), rig_execute, &agent->executor,
                                    &agent->ffn) == XP_OK);
    } else {
        RIG_CHECK(fabric_atn_create(agent->fabric, xp_clock_system(), &agent->atn) == XP_OK);
    }
}

static inline void rig_make(rig_t *rig)
{
    RIG_CHECK(fabric_shm_make(&rig->plan, &rig->descriptors) == XP_OK);
    RIG_CHECK(fabric_attach(rig->provider, &rig->plan, &rig->descriptors, FABRIC_PE_OBSERVER,
                            &rig->observer) == XP_OK);
}

/* All agents as threads. */
static inline void rig_start(rig_t *rig)
{
    rig_make(rig);
    for (uint32_t pe = 0; pe < rig->plan.atn_count + rig->plan.ffn_count; pe++) {
        rig_join_agent(rig, pe);
        RIG_CHECK(pthread_create(&rig->agents[pe].thread, NULL, rig_agent_main, &rig->agents[pe]) ==
                  0);
        rig->agents[pe].started = true;
    }
}

/* Joins all threads; returns how long after start_ns the last one left. */
static inline uint64_t rig_join(rig_t *rig, uint64_t start_ns)
{
    uint64_t last_ns = 0;
    for (uint32_t pe = 0; pe < rig->plan.atn_count + rig->plan.ffn_count; pe++) {
        rig_agent_t *agent = &rig->agents[pe];
        if (agent->started)
            pthread_join(agent->thread, NULL);
        if (agent->left_ns > last_ns)
            last_ns = agent->left_ns;
    }
    return last_ns > start_ns ? last_ns - start_ns : 0;
}

static inline void rig_free(rig_t *rig)
{
    for (uint32_t pe = 0; pe < FABRIC_MAX_PES; pe++) {
        fabric_atn_destroy(rig->agents[pe].atn);
        fabric_ffn_destroy(rig->agents[pe].ffn);
        fabric_detach(rig->agents[pe].fabric);
    }
    fabric_detach(rig->observer);
    close(rig->descriptors.arena_fd);
    close(rig->descriptors.doorbell_fd);
}

/* Ordered end; every service must say closed. Returns the time it took. */
static inline uint64_t rig_stop(rig_t *rig)
{
    uint64_t start_ns = xp_monotonic_ns();
    fabric_shutdown(rig->observer);
    uint64_t took_ns = rig_join(rig, start_ns);
    for (uint32_t pe = 0; pe < rig->plan.atn_count + rig->plan.ffn_count; pe++)
        if (rig->agents[pe].started) {
            if (rig->agents[pe].result != XP_CLOSED)
                fprintf(stderr, "PE %u ended with: %s\n", pe, rig->agents[pe].text);
            RIG_CHECK(rig->agents[pe].result == XP_CLOSED);
        }
    rig_free(rig);
    return took_ns;
}

/* ---- Instance ranks ------------------------------------------------------------------------- */
typedef struct rig_client {
    rig_t *rig;
    uint32_t instance, rank;
    transport_client_t *client;
    float *in, *out;
    uint64_t random;
    pthread_t thread;
    uint32_t calls; /* for rig_client_main */
    uint64_t step;
    bool uneven; /* DP ranks bring different row counts */
} rig_client_t;

static inline uint32_t rig_random(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33);
}

static inline const fabric_plan_instance_t *rig_instance(const rig_client_t *client)
{
    return &client->rig->plan.instances[client->instance];
}

static inline transport_geometry_t rig_geometry(const fabric_plan_instance_t *instance)
{
    return (transport_geometry_t){.hidden = instance->hidden,
                                  .max_rows = instance->max_rows,
                                  .dtype = XP_DTYPE_F32,
                                  .dp_size = instance->atn_dp};
}

static inline void rig_client_create(rig_t *rig, uint32_t instance, uint32_t rank,
                                     rig_client_t *client_out)
{
    *client_out = (rig_client_t){.rig = rig, .instance = instance, .rank = rank};
    const fabric_plan_instance_t *planned = rig_instance(client_out);
    transport_geometry_t geometry = rig_geometry(planned);
    RIG_CHECK(transport_client_create(&geometry, rig->plan.spin_ns, &client_out->client) == XP_OK);
    RIG_CHECK(transport_client_set_doorbell(client_out->client, rig->descriptors.doorbell_fd,
                                            planned->rank_atn[rank]) == XP_OK);
    size_t bytes = (size_t)planned->max_rows * planned->hidden * sizeof(float);
    client_out->in = malloc(bytes);
    client_out->out = malloc(bytes);
    RIG_CHECK(client_out->in && client_out->out);
}

static inline void rig_client_attach(rig_client_t *client)
{
    transport_geometry_t geometry = rig_geometry(rig_instance(client));
    transport_server_t *server;
    fabric_atn_t *atn = client->rig->agents[rig_instance(client)->rank_atn[client->rank]].atn;
    RIG_CHECK(transport_server_create(transport_client_fd(client->client), &geometry, &server) ==
              XP_OK);
    RIG_CHECK(fabric_atn_attach(atn, client->instance, client->rank, server) == XP_OK);
}

static inline void rig_client_destroy(rig_client_t *client)
{
    transport_client_destroy(client->client);
    free(client->in);
    free(client->out);
}

/* What rank `rank` brings in step `step`: the same on every rank's side. */
static inline uint32_t rig_rows(const rig_client_t *client, uint64_t step, uint32_t dp)
{
    uint64_t state = step * 2654435761u + client->instance * 97 + (client->uneven ? dp : 0);
    return rig_random(&state) % (rig_instance(client)->max_rows + 1);
}

static inline float rig_input(uint64_t step, uint32_t dp, uint32_t row, uint32_t column)
{
    return (float)((step * 7 + dp * 31 + row * 3 + column) % 512);
}

static inline transport_tensor_t rig_tensor(const rig_client_t *client, float *data, uint32_t rows)
{
    uint32_t hidden = rig_instance(client)->hidden;
    return (transport_tensor_t){.data = data,
                                .dtype = XP_DTYPE_F32,
                                .rank = 2,
                                .rows = rows,
                                .width = hidden,
                                .row_stride = hidden};
}

/* One call with the given rows of every DP rank, checked against the closed form. */
static inline xp_status_t rig_call_rows(rig_client_t *client, uint32_t layer,
                                        const uint32_t *dp_rows, uint64_t deadline_ns)
{
    const fabric_plan_instance_t *instance = rig_instance(client);
    uint32_t dp = client->rank / instance->atn_tp, rows = dp_rows[dp], offset = 0;
    uint32_t members = (uint32_t)__builtin_popcount(instance->layer_group[layer]);
    for (uint32_t i = 0; i < dp; i++)
        offset += dp_rows[i];
    for (uint32_t row = 0; row < rows; row++)
        for (uint32_t c = 0; c < instance->hidden; c++) {
            client->in[row * instance->hidden + c] = rig_input(client->step, dp, row, c);
            client->out[row * instance->hidden + c] = -1.0f;
        }
    transport_tensor_t in = rig_tensor(client, client->in, rows);
    transport_tensor_t out = rig_tensor(client, client->out, rows);
    transport_request_t request = {.layer = layer,
                                   .rows = rows,
                                   .kind = TRANSPORT_MIXED,
                                   .slo_deadline_ns =
                                       client->step % 3 ? 1000000 + client->step * 1000 : 0,
                                   .dp_rows = dp_rows};
    xp_status_t status = transport_client_call(client->client, &request, &in, &out, deadline_ns);
    if (status != XP_OK)
        return status;
    for (uint32_t row = 0; row < rows; row++)
        for (uint32_t c = 0; c < instance->hidden; c++) {
            float expected = rig_expected(members, instance->weights, layer, row + offset,
                                          client->in[row * instance->hidden + c]);
            if (client->out[row * instance->hidden + c] != expected) {
                fprintf(stderr,
                        "instance %u rank %u step %llu layer %u row %u column %u: %g, not %g\n",
                        client->instance, client->rank, (unsigned long long)client->step, layer,
                        row, c, (double)client->out[row * instance->hidden + c], (double)expected);
                abort();
            }
        }
    return XP_OK;
}

static inline xp_status_t rig_call(rig_client_t *client, uint64_t deadline_ns)
{
    uint32_t dp_rows[FABRIC_MAX_RANKS] = {0};
    client->step++;
    for (uint32_t dp = 0; dp < rig_instance(client)->atn_dp; dp++)
        dp_rows[dp] = rig_rows(client, client->step, dp);
    uint32_t layer = (uint32_t)(client->step % rig_instance(client)->layers);
    return rig_call_rows(client, layer, dp_rows, deadline_ns);
}

static inline uint64_t rig_in(uint64_t ms)
{
    return xp_monotonic_ns() + ms * XP_NS_PER_MS;
}

static inline void *rig_client_main(void *context)
{
    rig_client_t *client = context;
    for (uint32_t i = 0; i < client->calls; i++)
        RIG_CHECK(rig_call(client, rig_in(20000)) == XP_OK);
    return NULL;
}
#endif
