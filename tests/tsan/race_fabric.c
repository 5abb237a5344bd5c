/* SPDX-License-Identifier: MIT */
/*
 * 4 Instances x 2 AtnAgents x 2 FfnAgents as threads of one process on one mapping, for the thread
 * sanitizer: every form and delivery kind, an Instance that comes and goes, an observer that reads
 * counters, an ordered end and a failure. tests/tsan/run.sh builds it as it is and with a planted
 * mistake.
 */
#include "../integration/fabric/rig.h"

#define CALLS 400

static rig_t rig;
static rig_client_t clients[8];
static _Atomic bool done;

static void *observer_main(void *context)
{
    while (!atomic_load(&done)) {
        fabric_pe_counters_t counters;
        uint64_t invocations, rows;
        for (uint32_t pe = 0; pe < 4; pe++)
            fabric_counters(rig.observer, pe, &counters);
        for (uint32_t i = 0; i < 4; i++)
            fabric_instance_counters(rig.observer, i, &invocations, &rows);
        RIG_CHECK(fabric_failure(rig.observer, NULL) == XP_OK);
        usleep(500);
    }
    return context;
}

static void plan_scene(void)
{
    rig_plan(&rig, 2, 2, 4, 2);
    rig.plan.policy = FABRIC_POLICY_DEADLINE;
    fabric_plan_instance_t *instances = rig.plan.instances;
    for (uint32_t layer = 0; layer < 4; layer++)
        instances[0].layer_group[layer] = 1 + layer % 3; /* alone, alone, both, alone */
    instances[1].delivery = FABRIC_DELIVERY_DIRECT_PARTIAL;
    instances[2].atn_tp = 2;
    instances[2].rank_atn[1] = 1;
    instances[2].delivery = FABRIC_DELIVERY_REPLICATED_COMPLETE;
    instances[3].atn_dp = 2;
    instances[3].rank_atn[1] = 0;
    instances[3].delivery = FABRIC_DELIVERY_DIRECT_PARTIAL;
}

int main(void)
{
    pthread_t observer;
    uint32_t count = 0;
    plan_scene();
    rig_start(&rig);
    for (uint32_t i = 0; i < 4; i++)
        for (uint32_t rank = 0; rank < rig.plan.instances[i].atn_tp * rig.plan.instances[i].atn_dp;
             rank++) {
            rig_client_create(&rig, i, rank, &clients[count]);
            rig_client_attach(&clients[count]);
            clients[count].uneven = true;
            clients[count++].calls = CALLS;
        }
    RIG_CHECK(pthread_create(&observer, NULL, observer_main, NULL) == 0);
    for (uint32_t i = 0; i < count; i++)
        if (clients[i].instance != 1)
            RIG_CHECK(pthread_create(&clients[i].thread, NULL, rig_client_main, &clients[i]) == 0);
    /* Instance 1 comes and goes, mostly in the middle of a call. */
    rig_client_t *coming = &clients[1];
    for (uint32_t round = 0; round < 40; round++) {
        for (uint32_t i = 0; i < round % 3; i++)
            RIG_CHECK(rig_call(coming, rig_in(20000)) == XP_OK);
        memset(coming->in, 0, RIG_HIDDEN * sizeof(float));
        transport_tensor_t in = rig_tensor(coming, coming->in, 1);
        transport_request_t request = {.layer = round % 4, .rows = 1};
        RIG_CHECK(transport_client_put(coming->client, &request, &in) == XP_OK);
        usleep(round % 7 * 20);
        RIG_CHECK(fabric_atn_detach(rig.agents[1].atn, 1, 0) == XP_OK);
        xp_status_t status = transport_client_wait(coming->client, rig_in(20000));
        RIG_CHECK(status == XP_OK || status == XP_CLOSED);
        rig_client_destroy(coming);
        rig_client_create(&rig, 1, 0, coming);
        rig_client_attach(coming);
    }
    for (uint32_t i = 0; i < count; i++)
        if (clients[i].instance != 1)
            pthread_join(clients[i].thread, NULL);
    atomic_store(&done, true);
    pthread_join(observer, NULL);
    for (uint32_t i = 0; i < count; i++)
        rig_client_destroy(&clients[i]);
    rig_stop(&rig);

    plan_scene();
    rig_start(&rig);
    fabric_fail(rig.observer, FABRIC_PE_OBSERVER, "planned");
    rig_join(&rig, xp_monotonic_ns());
    for (uint32_t pe = 0; pe < 4; pe++)
        RIG_CHECK(rig.agents[pe].result == XP_FATAL);
    rig_free(&rig);
    return 0;
}
