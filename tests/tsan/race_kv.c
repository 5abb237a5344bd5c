/* SPDX-License-Identifier: MIT */
/*
 * The KV control channel between threads, for ThreadSanitizer: the daemon's market, a group of two
 * ranks on two pools, and a group of one rank that shares the first pool. The first group has its
 * memory from the beginning of each pool, the second from the end, so that what one gives and the
 * other gets is the same plain memory, handed over by nothing but the channel. With
 * XPOOL_WEAKEN_RELEASE the sanitizer must speak.
 */
#include <pthread.h>
#include <sched.h>
#include <stdio.h>

#include "kv/market.h"
#include "kv/rank.h"

#define POOL    32u
#define FLOOR   2u
#define CEILING 28u
#define STEPS   200000u
#define MS      1000000ull

typedef struct member {
    uint32_t partition, pool, id; /* id: of its group; 2 begins at the end */
    kv_rank_t rank;
    uint32_t mapped, live, until, want;
    uint64_t random, since_ns;
    uint64_t grants, wrong;
} member_t;

static uint32_t memory[2][POOL]; /* whose it is; plain */
static pthread_barrier_t step_barrier;
static kv_market_t market;
static uint32_t stop;
static int channel_fd;

static uint32_t dice(uint64_t *state, uint32_t sides)
{
    *state = *state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(*state >> 33) % sides;
}

static void *daemon_run(void *argument)
{
    static kv_market_step_t step;
    uint64_t now_ns = 1000 * MS, faults = 0;
    while (!PROTOCOL_LOAD_RELAXED(&stop)) {
        now_ns += MS;
        kv_market_step(&market, now_ns, &step);
        for (uint32_t g = 0; g < 2; g++)
            faults += step.faults[g] == KV_FAULT_BROKEN;
        sched_yield();
    }
    return faults ? &stop : NULL;
}

static uint32_t *unit(const member_t *member, uint32_t bundle)
{
    return &memory[member->pool][member->id == 2 ? POOL - 1 - bundle : bundle];
}

static void resize(member_t *member, uint32_t bundles)
{
    for (; member->mapped < bundles; member->mapped++)
        *unit(member, member->mapped) = member->id;
    member->mapped = bundles;
    kv_rank_complete(&member->rank, bundles);
}

static void follow_commands(member_t *member, uint32_t step)
{
    kv_command_t command;
    if (kv_rank_pending(&member->rank))
        kv_rank_poll(&member->rank, step, member->live, &command);
    uint32_t goal = member->rank.goal, least = member->live > goal ? member->live : goal;
    if (goal > member->mapped) {
        member->grants++;
        resize(member, goal);
    } else {
        resize(member, least < member->mapped ? least : member->mapped);
    }
}

/* Requests come, wait for memory, hold it and go; the ranks of a group throw the same dice. */
static void live_on(member_t *member, uint32_t step)
{
    uint32_t usable = member->rank.goal < member->mapped ? member->rank.goal : member->mapped;
    if (member->live && step >= member->until)
        member->live = 0;
    if (!member->live && !member->want) {
        member->want = 1 + dice(&member->random, CEILING);
        member->since_ns = step + 1;
    }
    if (member->want && member->want <= usable) {
        member->live = member->want;
        member->want = 0;
        member->until = step + dice(&member->random, 20);
    }
    kv_report_t report = {.live_bundles = member->live ? member->live : 1,
                          .running = member->live != 0,
                          .last_activity_ns = step,
                          .earliest_deadline_ns = KV_NO_DEADLINE};
    if (member->want) {
        report.demand_kind = KV_DEMAND_PREFILL;
        report.demand_bundles = member->want;
        report.demand_since_ns = member->since_ns;
        report.demand_deadline_ns = member->since_ns + 1;
    }
    kv_rank_report(&member->rank, &report);
}

static void *rank_run(void *argument)
{
    member_t *member = argument;
    uint32_t bundles;
    if (kv_rank_open(channel_fd, -1, -1, member->partition, &member->rank) != XP_OK ||
        kv_rank_start(&member->rank, &bundles) != XP_OK)
        return member;
    for (; member->mapped < bundles; member->mapped++)
        *unit(member, member->mapped) = member->id;
    if (kv_rank_ready(&member->rank, 16, 16, bundles) != XP_OK)
        return member;
    for (uint32_t step = 0; step < STEPS; step++) {
        if (member->id == 1)
            pthread_barrier_wait(&step_barrier); /* in lock step, as tensor parallel ranks are */
        follow_commands(member, step);
        live_on(member, step);
        for (uint32_t bundle = 0; bundle < member->mapped; bundle++)
            member->wrong += *unit(member, bundle) != member->id;
        sched_yield();
    }
    return member->wrong ? member : NULL;
}

int main(void)
{
    const uint64_t pools[2] = {POOL * 16, POOL * 16};
    kv_group_plan_t groups[2] = {{.partition_count = 2,
                                  .pools = {0, 1},
                                  .bundle_bytes = 16,
                                  .token_bytes = 1,
                                  .bundle_tokens = 16,
                                  .page_tokens = 16,
                                  .floor_bundles = FLOOR,
                                  .ceiling_bundles = CEILING,
                                  .reserved_bundles = CEILING,
                                  .elastic = true}};
    groups[1] = groups[0];
    groups[1].instance = groups[1].partition_count = 1;
    member_t members[3] = {{.partition = 0, .pool = 0, .id = 1, .random = 7},
                           {.partition = 1, .pool = 1, .id = 1, .random = 7},
                           {.partition = 2, .pool = 0, .id = 2, .random = 8}};
    const kv_market_settings_t settings = {.patience_ns = 50 * MS, .answer_ns = UINT64_MAX / 4};
    kv_channel_t *channel;
    if (kv_channel_create(1, pools, 2, groups, 2, &channel_fd, &channel) != XP_OK)
        return 1;
    kv_market_init(&market, channel, &settings);
    kv_market_start(&market, 0, 0);
    kv_market_start(&market, 1, 0);
    pthread_barrier_init(&step_barrier, NULL, 2);
    pthread_t daemon, ranks[3];
    void *failed = NULL, *result;
    if (pthread_create(&daemon, NULL, daemon_run, NULL))
        return 1;
    for (uint32_t m = 0; m < 3; m++)
        if (pthread_create(&ranks[m], NULL, rank_run, &members[m]))
            return 1;
    for (uint32_t m = 0; m < 3; m++) {
        pthread_join(ranks[m], &result);
        failed = failed ? failed : result;
    }
    PROTOCOL_STORE_RELAXED(&stop, 1u);
    pthread_join(daemon, &result);
    failed = failed ? failed : result;
    printf("%llu and %llu grants\n", (unsigned long long)members[0].grants,
           (unsigned long long)members[2].grants);
    /* Fewer would have shown nothing. */
    return failed || members[0].grants < 20 || members[2].grants < 20;
}
