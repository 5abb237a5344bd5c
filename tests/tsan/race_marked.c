/* SPDX-License-Identifier: MIT */
/*
 * The marked way between threads, for ThreadSanitizer: an FfnAgent's scheduler that echoes,
 * Instances that put marked and plain rows in any order and die now and then between their words,
 * so that their successors' sequences begin where theirs did. Every answer is checked. With
 * XPOOL_WEAKEN_RELEASE a mark is stored apart from what it marks, and the sanitizer must speak.
 */
#include <pthread.h>
#include <sched.h>
#include <stdio.h>

#include "race_dice.h"
#include "stage_rig.h"

#define LIVES  60
#define PASSES 80

static rig_t rig;

static void *scheduler_run(void *argument)
{
    uint64_t random = 1;
    (void)argument;
    while (rig_turn(&rig, 0, 1000)) /* time stands still: no age */
        dawdle(&random);
    return NULL;
}

static void order(uint32_t i, uint32_t state)
{
    rig_order(&rig, 0, i, state);
    while (!rig_ordered(&rig, 0, i))
        sched_yield();
}

static uint64_t one_pass(uint32_t i, uint64_t *random, uint64_t n)
{
    const uint32_t layer = (uint32_t)(dice(random) % RIG_LAYERS);
    const uint32_t rows[RIG_RANKS] = {(uint32_t)(dice(random) % (RIG_ROWS + 1))};
    uint64_t wrong = 0;
    if (dice(random) % 4 == 0) {
        rig_put(&rig, i, 0, layer, rows, n);
        while (!rig_look(&rig, i, 0))
            sched_yield();
        return rig_take(&rig, i, 0);
    }
    if (!rig_put_marked(&rig, i, layer, rows[0], n, UINT32_MAX))
        return 1;
    while (!rig_take_marked(&rig, i, &wrong))
        sched_yield();
    return wrong;
}

static void *instance_run(void *argument)
{
    uint32_t i = (uint32_t)(uintptr_t)argument;
    uint64_t random = 1000 + i, wrong = 0;
    for (uint32_t n = 0; n < LIVES; n++) {
        order(i, TRANSPORT_SLOT_ATTACHED);
        for (uint64_t p = 0; p < PASSES; p++) {
            dawdle(&random);
            wrong += one_pass(i, &random, p);
        }
        if (dice(&random) % 2) /* dies: some of its words are never written */
            rig_put_marked(&rig, i, 1, RIG_ROWS, n, (uint32_t)(dice(&random) % 24));
        order(i, TRANSPORT_SLOT_EMPTY);
        memset(rig.instance[i].rank[0].arena, 0, sizeof(rig_arena_t));
        memset(&rig.instance[i].rank[0].state, 0, sizeof(transport_device_state_t));
    }
    return (void *)(uintptr_t)wrong;
}

int main(void)
{
    pthread_t scheduler, instances[RIG_INSTANCES];
    uint64_t wrong = 0;
    rig.ffns = 1;
    rig.instances = RIG_INSTANCES;
    for (uint32_t i = 0; i < RIG_INSTANCES; i++) {
        rig.instance[i].tp = rig.instance[i].dp = 1;
        rig.instance[i].delivery = FABRIC_DELIVERY_SINGLE_COMPLETE;
        for (uint32_t layer = 0; layer < RIG_LAYERS; layer++)
            rig.instance[i].group[layer] = 1;
    }
    rig_make(&rig, false, FABRIC_POLICY_FIFO);
    if (pthread_create(&scheduler, NULL, scheduler_run, NULL) != 0)
        abort();
    for (uint32_t i = 0; i < RIG_INSTANCES; i++)
        if (pthread_create(&instances[i], NULL, instance_run, (void *)(uintptr_t)i) != 0)
            abort();
    for (uint32_t i = 0; i < RIG_INSTANCES; i++) {
        void *result;
        pthread_join(instances[i], &result);
        wrong += (uint64_t)(uintptr_t)result;
    }
    PROTOCOL_STORE_RELEASE(&rig.ffn[0].table->shutdown, 1u);
    pthread_join(scheduler, NULL);
    const uint64_t invocations = rig.ffn[0].scheduler->counts.invocations;
    const uint64_t abandoned = rig.ffn[0].scheduler->counts.abandoned;
    const bool failed = rig.ffn[0].table->failure.kind != STAGE_FAILURE_NONE;
    rig_free(&rig);
    printf("%llu Invocations, %llu abandoned, %llu wrong elements%s\n",
           (unsigned long long)invocations, (unsigned long long)abandoned,
           (unsigned long long)wrong, failed ? ", failed" : "");
    return wrong || failed || !abandoned;
}
