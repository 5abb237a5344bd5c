/* SPDX-License-Identifier: MIT */
/*
 * The stage protocol between threads, for ThreadSanitizer: 3 FfnAgents (a scheduler and a runtime
 * each), 4 Instances of all shapes whose ranks come and go, dying now and then with a line live and
 * no one waiting. Every answer is checked. With XPOOL_WEAKEN_RELEASE the sanitizer must speak.
 */
#include <pthread.h>
#include <sched.h>
#include <stdio.h>

#include "stage_rig.h"

#define LIVES  40
#define PASSES 60

static rig_t rig;
static uint32_t stop;

static uint64_t dice(uint64_t *state)
{
    return stage_random_next(state);
}
/* Other interleavings than those of the machine's own rhythm. */
static void dawdle(uint64_t *state)
{
    uint64_t what = dice(state) % 16;
    if (what < 3)
        sched_yield();
    else if (what == 3)
        for (volatile uint32_t n = 0; n < 2000; n++)
            ;
}

static void *scheduler_run(void *argument)
{
    uint32_t f = (uint32_t)(uintptr_t)argument;
    uint64_t random = f + 1;
    /* Time stands still: no age, whatever the machine does. */
    while (rig_turn(&rig, f, 1000))
        dawdle(&random);
    return NULL;
}

static void *runtime_run(void *argument)
{
    uint32_t f = (uint32_t)(uintptr_t)argument;
    uint64_t random = 100 + f;
    while (!PROTOCOL_LOAD_ACQUIRE(&stop)) {
        if (!rig_runtime(&rig, f))
            sched_yield();
        dawdle(&random);
    }
    return NULL;
}

typedef struct rank_life {
    uint32_t instance, rank, passes;
    uint64_t seed; /* of the Instance: what it does in each pass */
    int dies_live;
    uint64_t wrong;
} rank_life_t;

static void *rank_run(void *argument)
{
    rank_life_t *life = argument;
    uint64_t shared = life->seed, own = life->seed * 31 + life->rank;
    for (uint32_t n = 0; n < life->passes; n++) {
        uint32_t layer = (uint32_t)(dice(&shared) % RIG_LAYERS), dp_rows[RIG_RANKS];
        for (uint32_t d = 0; d < RIG_RANKS; d++)
            dp_rows[d] = (uint32_t)(dice(&shared) % (RIG_ROWS + 1));
        dawdle(&own);
        rig_put(&rig, life->instance, life->rank, layer, dp_rows, n);
        if (life->dies_live && n + 1 == life->passes)
            return NULL;
        while (!rig_look(&rig, life->instance, life->rank))
            sched_yield();
        life->wrong += rig_take(&rig, life->instance, life->rank);
    }
    return NULL;
}

static void order_all(uint32_t i, uint32_t state)
{
    for (uint32_t f = 0; f < rig.ffns; f++)
        rig_order(&rig, f, i, state);
    for (uint32_t f = 0; f < rig.ffns; f++)
        while (!rig_ordered(&rig, f, i))
            sched_yield();
}

static void *instance_run(void *argument)
{
    uint32_t i = (uint32_t)(uintptr_t)argument, ranks = rig_ranks(&rig.instance[i]);
    uint64_t random = 1000 + i, wrong = 0;
    for (uint32_t n = 0; n < LIVES; n++) {
        rank_life_t lives[RIG_RANKS];
        pthread_t threads[RIG_RANKS];
        uint64_t seed = dice(&random);
        int dies = (int)(dice(&random) % 3);
        order_all(i, TRANSPORT_SLOT_ATTACHED);
        for (uint32_t r = 0; r < ranks; r++) {
            /* All ranks die with a live line, or only the first: its Invocation never forms. */
            lives[r] = (rank_life_t){.instance = i,
                                     .rank = r,
                                     .passes = PASSES - (dies == 2 && r),
                                     .seed = seed,
                                     .dies_live = dies == 1 || (dies == 2 && r == 0)};
            if (pthread_create(&threads[r], NULL, rank_run, &lives[r]) != 0)
                abort();
        }
        for (uint32_t r = 0; r < ranks; r++) {
            pthread_join(threads[r], NULL);
            wrong += lives[r].wrong;
        }
        order_all(i, TRANSPORT_SLOT_EMPTY);
        for (uint32_t r = 0; r < ranks; r++) {
            memset(rig.instance[i].rank[r].arena, 0, 4096);
            memset(&rig.instance[i].rank[r].state, 0, sizeof(transport_device_state_t));
        }
    }
    return (void *)(uintptr_t)wrong;
}

int main(void)
{
    static const uint32_t shapes[RIG_INSTANCES][3] = {{1, 1, FABRIC_DELIVERY_DIRECT_PARTIAL},
                                                      {2, 1, FABRIC_DELIVERY_REPLICATED_COMPLETE},
                                                      {1, 3, FABRIC_DELIVERY_SINGLE_COMPLETE},
                                                      {2, 2, FABRIC_DELIVERY_DIRECT_PARTIAL}};
    pthread_t schedulers[RIG_FFN], runtimes[RIG_FFN], instances[RIG_INSTANCES];
    uint64_t wrong = 0;
    rig.ffns = RIG_FFN;
    rig.instances = RIG_INSTANCES;
    for (uint32_t i = 0; i < RIG_INSTANCES; i++) {
        rig.instance[i].tp = shapes[i][0];
        rig.instance[i].dp = shapes[i][1];
        rig.instance[i].delivery = shapes[i][2];
        for (uint32_t layer = 0; layer < RIG_LAYERS; layer++)
            rig.instance[i].group[layer] = i == 0 ? 3 : 1 + (layer + i) % 7;
    }
    rig_make(&rig, true, FABRIC_POLICY_DEADLINE);
    for (uint32_t f = 0; f < RIG_FFN; f++) {
        rig.ffn[f].lease = f % 2; /* resident on one, host launches on the others */
        if (pthread_create(&schedulers[f], NULL, scheduler_run, (void *)(uintptr_t)f) != 0 ||
            pthread_create(&runtimes[f], NULL, runtime_run, (void *)(uintptr_t)f) != 0)
            abort();
    }
    for (uint32_t i = 0; i < RIG_INSTANCES; i++)
        if (pthread_create(&instances[i], NULL, instance_run, (void *)(uintptr_t)i) != 0)
            abort();
    for (uint32_t i = 0; i < RIG_INSTANCES; i++) {
        void *result;
        pthread_join(instances[i], &result);
        wrong += (uint64_t)(uintptr_t)result;
    }
    for (uint32_t f = 0; f < RIG_FFN; f++)
        PROTOCOL_STORE_RELEASE(&rig.ffn[f].table->shutdown, 1u);
    uint64_t invocations = 0, abandoned = 0, failures = 0;
    for (uint32_t f = 0; f < RIG_FFN; f++) {
        pthread_join(schedulers[f], NULL);
        invocations += rig.ffn[f].scheduler->counts.invocations;
        abandoned += rig.ffn[f].scheduler->counts.abandoned;
        failures += rig.ffn[f].table->failure.kind != STAGE_FAILURE_NONE;
    }
    PROTOCOL_STORE_RELEASE(&stop, 1u);
    for (uint32_t f = 0; f < RIG_FFN; f++)
        pthread_join(runtimes[f], NULL);
    rig_free(&rig);
    printf("%llu Invocations, %llu abandoned, %llu wrong elements, %llu failures\n",
           (unsigned long long)invocations, (unsigned long long)abandoned,
           (unsigned long long)wrong, (unsigned long long)failures);
    return wrong || failures || !abandoned;
}
