/* SPDX-License-Identifier: MIT */
/*
 * The KV market and its policy, as the daemon links them, against a simulated world: Instance Ranks
 * that map and release bundle by bundle on the real channel, requests that come, grow and end,
 * completions in any order, deaths at any moment, floors and ceilings that are changed, trims.
 *
 * After every step it must hold:
 *   - no unit of a pool has two owners, so bytes never exceed the pool (an owner map, kept apart
 *     from the market's books);
 *   - no command goes below a floor, and no donor gives what its live requests use;
 *   - the demand that is first in order, by a comparison written anew here, gets what an oracle
 *     that takes everything from everybody says it can get: at once from free bytes, else by
 *     shrinks that begin at once unless shrinks of its pools are still unanswered; else it is
 *     refused;
 *   - between two events of the world there are few commands (no livelock);
 *   - no demand waits longer than patience + groups * (L + 3 A): L the longest life of a live
 *     request seen, A the longest answer to a command (no starvation);
 *   - when everybody has died, every byte is back, once.
 *
 * With arguments: STEPS [SEED [arrival]] runs that many steps.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "kv/market.h"

#define UNIT_BYTES   16u /* a bundle is one or more units of this size */
#define POOL_UNITS   400
#define MAX_REQUESTS 24
#define MAX_QUEUE    8
#define MS           1000000ull
#define RUN_STEPS    4000 /* of one world */
#define PATIENCE_NS  (400 * MS)
#define HOLD_NS      (20 * MS)
#define ANSWER_NS    (100000 * MS) /* ranks of the simulation are slow, never silent */

typedef struct request {
    uint32_t bundles, growth; /* what it holds, and will still ask for */
    uint64_t work_ns;         /* left, while it is not blocked */
    uint64_t born_ns, deadline_ns;
    uint32_t wants; /* in the queue: bundles at its start */
} request_t;

typedef enum phase { RANK_GONE, RANK_LOADING, RANK_IDLE, RANK_MOVING } phase_t;

typedef struct sim_rank {
    phase_t phase;
    uint32_t mapped, sequence, goal;
    bool told_short; /* completed this shrink before it was done */
} sim_rank_t;

typedef struct sim_group {
    bool running;   /* has been started and not ended */
    bool dying;     /* one rank has gone */
    uint64_t since; /* when it may start again */
    sim_rank_t ranks[KV_MAX_RANKS];
    request_t live[MAX_REQUESTS], queue[MAX_QUEUE];
    uint32_t live_count, queue_count, held; /* held: bundles of live requests */
    kv_report_t report;
    uint64_t refused_since_ns, waits_ns; /* when the open demand began; 0: none */
} sim_group_t;

typedef struct sim {
    uint64_t seed, now;
    kv_channel_t *channel;
    int fd;
    kv_market_t market;
    kv_market_step_t step;
    sim_group_t groups[KV_MAX_GROUPS];
    uint16_t owner[KV_MAX_POOLS][POOL_UNITS]; /* partition + 1 */
    uint32_t pool_units[KV_MAX_POOLS];
    uint64_t longest_life, longest_answer, longest_wait;
    uint32_t commands_since_event;
    uint64_t commands, grants, deaths, met, missed, preempted;
    bool failed;
    char why[256];
} sim_t;

static uint64_t next_random(sim_t *sim)
{
    uint64_t z = (sim->seed += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

static uint32_t below(sim_t *sim, uint32_t bound)
{
    return (uint32_t)(next_random(sim) % bound);
}

static bool chance(sim_t *sim, uint32_t one_in)
{
    return below(sim, one_in) == 0;
}

static void fail_sim(sim_t *sim, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void fail_sim(sim_t *sim, const char *format, ...)
{
    if (sim->failed)
        return;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(sim->why, sizeof(sim->why), format, arguments);
    va_end(arguments);
    sim->failed = true;
}

static kv_group_entry_t *entry_of(sim_t *sim, uint32_t g)
{
    return &sim->channel->groups[g];
}

static void event(sim_t *sim)
{
    sim->commands_since_event = 0;
}

/* ---- physical memory --------------------------------------------------------------------------
 */

static bool take_bundle(sim_t *sim, uint32_t partition)
{
    const kv_partition_entry_t *entry = &sim->channel->partitions[partition];
    uint32_t units = (uint32_t)(sim->channel->groups[entry->group].bundle_bytes / UNIT_BYTES);
    uint16_t *owner = sim->owner[entry->pool];
    for (uint32_t u = 0; u < sim->pool_units[entry->pool] && units; u++)
        if (owner[u] == 0) {
            owner[u] = (uint16_t)(partition + 1);
            units--;
        }
    if (units)
        fail_sim(sim, "partition %u maps a bundle and pool %u has no unit left", partition,
                 entry->pool);
    return units == 0;
}

static void give_bundle(sim_t *sim, uint32_t partition)
{
    const kv_partition_entry_t *entry = &sim->channel->partitions[partition];
    uint32_t units = (uint32_t)(sim->channel->groups[entry->group].bundle_bytes / UNIT_BYTES);
    uint16_t *owner = sim->owner[entry->pool];
    for (uint32_t u = 0; u < sim->pool_units[entry->pool] && units; u++)
        if (owner[u] == partition + 1) {
            owner[u] = 0;
            units--;
        }
    if (units)
        fail_sim(sim, "partition %u releases what it does not own", partition);
}

/* ---- ranks ------------------------------------------------------------------------------------
 */

static uint32_t usable(const sim_t *sim, uint32_t g)
{
    const sim_group_t *group = &sim->groups[g];
    uint32_t least = UINT32_MAX;
    for (uint32_t m = 0; m < sim->channel->groups[g].partition_count; m++) {
        const sim_rank_t *rank = &group->ranks[m];
        if (rank->phase == RANK_GONE || rank->phase == RANK_LOADING)
            return 0;
        uint32_t here = rank->mapped < rank->goal ? rank->mapped : rank->goal;
        least = here < least ? here : least;
    }
    return least;
}

static void rank_acts(sim_t *sim, uint32_t g, uint32_t m)
{
    sim_group_t *group = &sim->groups[g];
    sim_rank_t *rank = &group->ranks[m];
    kv_group_entry_t *entry = entry_of(sim, g);
    uint32_t partition = entry->first_partition + m;
    kv_partition_entry_t *cell = &sim->channel->partitions[partition];
    kv_command_t command = kv_group_command(entry);
    if (rank->phase == RANK_GONE)
        return;
    if (rank->phase == RANK_LOADING) {
        if (rank->mapped < command.bundles) {
            rank->mapped += take_bundle(sim, partition);
            return;
        }
        rank->sequence = command.sequence;
        rank->goal = command.bundles;
        rank->phase = RANK_IDLE;
        kv_partition_open(cell, entry->bundle_bytes, entry->bundle_tokens);
        kv_partition_complete(cell, command.sequence, rank->mapped);
        return;
    }
    if (command.sequence != rank->sequence) {
        rank->sequence = command.sequence;
        rank->goal = command.bundles;
        rank->phase = RANK_MOVING;
        rank->told_short = false;
        return; /* acts on it in a later step */
    }
    if (rank->phase != RANK_MOVING)
        return;
    uint32_t keep = rank->goal > group->held ? rank->goal : group->held;
    if (rank->mapped < rank->goal) {
        if (chance(sim, 400)) { /* the system has no memory */
            rank->phase = RANK_IDLE;
            kv_partition_complete(cell, rank->sequence, rank->mapped);
            return;
        }
        rank->mapped += take_bundle(sim, partition);
    } else if (rank->mapped > keep) {
        give_bundle(sim, partition);
        rank->mapped--;
    } else if (rank->mapped > rank->goal) {
        /* Live requests hold the rest: says so once, and goes on as they leave. */
        if (!rank->told_short ||
            KV_CELL_VALUE(PROTOCOL_LOAD_RELAXED(&cell->completion)) != rank->mapped)
            kv_partition_complete(cell, rank->sequence, rank->mapped);
        rank->told_short = true;
    } else {
        rank->phase = RANK_IDLE;
        kv_partition_complete(cell, rank->sequence, rank->mapped);
    }
}

/* ---- requests: the leader's engine ------------------------------------------------------------
 */

static void end_request(sim_t *sim, sim_group_t *group, uint32_t index)
{
    uint64_t life = sim->now - group->live[index].born_ns;
    if (life > sim->longest_life)
        sim->longest_life = life;
    group->held -= group->live[index].bundles;
    group->live[index] = group->live[--group->live_count];
    event(sim);
}

static void arrive(sim_t *sim, uint32_t g)
{
    sim_group_t *group = &sim->groups[g];
    if (group->queue_count == MAX_QUEUE)
        return;
    uint32_t most = entry_of(sim, g)->reserved_bundles;
    uint32_t wants = chance(sim, 6) ? 1 + below(sim, most) : 1 + below(sim, most / 4 + 1);
    group->queue[group->queue_count++] = (request_t){
        .wants = wants,
        .growth = below(sim, 3),
        .work_ns = (1 + below(sim, 200)) * MS,
        .born_ns = sim->now,
        .deadline_ns = chance(sim, 5) ? KV_NO_DEADLINE : sim->now + (1 + below(sim, 300)) * MS};
    event(sim);
}

static void engine_steps(sim_t *sim, uint32_t g, uint64_t passed_ns)
{
    sim_group_t *group = &sim->groups[g];
    kv_group_entry_t *entry = entry_of(sim, g);
    kv_report_t report = {.demand_deadline_ns = KV_NO_DEADLINE,
                          .earliest_deadline_ns = KV_NO_DEADLINE,
                          .last_activity_ns = group->report.last_activity_ns};
    uint32_t room = usable(sim, g);
    uint64_t blocked_ns = 0;
    for (uint32_t i = group->live_count; i-- > 0;) {
        request_t *request = &group->live[i];
        bool grows = request->growth && request->work_ns < (uint64_t)request->growth * 30 * MS;
        if (grows && group->held < room) {
            request->growth--;
            request->bundles++;
            group->held++;
            request->deadline_ns = sim->now + 20 * MS;
            event(sim);
        } else if (grows) {
            report.demand_kind = KV_DEMAND_DECODE;
            report.demand_bundles = group->held + 1;
            if (request->deadline_ns < report.demand_deadline_ns)
                report.demand_deadline_ns = request->deadline_ns;
            blocked_ns = request->deadline_ns - 20 * MS;
            continue;
        }
        if (request->work_ns <= passed_ns)
            end_request(sim, group, i);
        else
            request->work_ns -= passed_ns;
    }
    if (report.demand_kind == KV_DEMAND_DECODE && group->live_count) {
        report.demand_since_ns = group->report.demand_kind == KV_DEMAND_DECODE
                                     ? group->report.demand_since_ns
                                     : sim->now;
        (void)blocked_ns;
        /* Nobody can help: the youngest starts anew. */
        bool refused = PROTOCOL_LOAD_RELAXED(&entry->refused_since_ns) == report.demand_since_ns;
        if (!refused)
            group->refused_since_ns = sim->now;
        else if (sim->now - group->refused_since_ns > 50 * MS) {
            sim->preempted++;
            end_request(sim, group, group->live_count - 1);
            group->refused_since_ns = sim->now;
        }
        /* Its need is what it is now. */
        report.demand_bundles = group->held + 1;
    }
    uint32_t admit = PROTOCOL_LOAD_RELAXED(&entry->admit_bundles);
    uint32_t ceiling = PROTOCOL_LOAD_RELAXED(&entry->ceiling_bundles);
    while (group->queue_count && group->live_count < MAX_REQUESTS &&
           report.demand_kind == KV_DEMAND_NONE) {
        request_t *first = &group->queue[0];
        if (first->wants > ceiling) { /* never: refused with 400 */
            memmove(first, first + 1, --group->queue_count * sizeof(*first));
            event(sim);
            continue;
        }
        uint32_t need = group->held + first->wants;
        if (need <= room && need <= admit) {
            request_t admitted = *first;
            admitted.bundles = admitted.wants;
            admitted.born_ns = sim->now;
            if (first->deadline_ns != KV_NO_DEADLINE) {
                sim->met += sim->now <= first->deadline_ns;
                sim->missed += sim->now > first->deadline_ns;
            }
            admitted.deadline_ns = sim->now + 20 * MS;
            memmove(first, first + 1, --group->queue_count * sizeof(*first));
            group->live[group->live_count++] = admitted;
            group->held = need;
            event(sim);
            continue;
        }
        if (need > ceiling)
            break; /* waits for its own requests */
        report.demand_kind = KV_DEMAND_PREFILL;
        report.demand_bundles = need;
        report.demand_deadline_ns = first->deadline_ns;
        report.demand_since_ns = first->born_ns;
    }
    report.live_bundles = group->held;
    report.running = group->live_count;
    report.waiting = group->queue_count;
    if (group->live_count)
        report.last_activity_ns = sim->now;
    for (uint32_t i = 0; i < group->live_count; i++)
        if (group->live[i].deadline_ns < report.earliest_deadline_ns)
            report.earliest_deadline_ns = group->live[i].deadline_ns;
    group->report = report;
    if (chance(sim, 500)) { /* frozen in the middle of a report for a while */
        entry->report_sequence |= 1;
        return;
    }
    kv_group_report_write(entry, &report);
}

/* ---- life -------------------------------------------------------------------------------------
 */

static void start_group(sim_t *sim, uint32_t g)
{
    sim_group_t *group = &sim->groups[g];
    memset(group, 0, sizeof(*group));
    group->running = true;
    kv_market_start(&sim->market, g, 0);
    for (uint32_t m = 0; m < entry_of(sim, g)->partition_count; m++)
        group->ranks[m].phase = RANK_LOADING;
    event(sim);
}

static void kill_one(sim_t *sim, uint32_t g, uint32_t m)
{
    sim_group_t *group = &sim->groups[g];
    sim_rank_t *rank = &group->ranks[m];
    if (rank->phase == RANK_GONE)
        return;
    for (; rank->mapped; rank->mapped--)
        give_bundle(sim, entry_of(sim, g)->first_partition + m);
    rank->phase = RANK_GONE;
    sim->deaths++;
    if (chance(sim, 3))
        entry_of(sim, g)->report_sequence |= 1; /* in the middle of a report */
    kv_market_leave(&sim->market, g);
    group->dying = true;
    for (uint32_t o = 0; o < entry_of(sim, g)->partition_count; o++)
        if (group->ranks[o].phase != RANK_GONE)
            return;
    kv_market_end(&sim->market, g);
    group->running = group->dying = false;
    group->live_count = group->queue_count = group->held = 0;
    group->waits_ns = 0;
    group->since = sim->now + below(sim, 50) * MS;
    event(sim);
}

/* ---- the oracle -------------------------------------------------------------------------------
 */

static uint64_t deadline_of(const kv_policy_snapshot_t *s, const kv_policy_group_t *group)
{
    uint64_t patient = group->demand_since_ns + s->patience_ns;
    if (group->goal_bundles < group->floor_wanted)
        return 0;
    return s->mode == KV_POLICY_ARRIVAL || group->demand_deadline_ns > patient
               ? patient
               : group->demand_deadline_ns;
}

/* 0: starves, 1: overdue, 2: in time, 3: late by more than its target. */
static int class_of(const kv_policy_snapshot_t *s, const kv_policy_group_t *group)
{
    uint64_t due = deadline_of(s, group), since = group->demand_since_ns;
    if (group->goal_bundles < group->floor_wanted)
        return 0;
    bool has_target = group->demand_kind == KV_DEMAND_PREFILL && due > since;
    if (due > s->now_ns)
        return 2;
    uint64_t starves = s->patience_ns;
    if (has_target && 8 * (due - since) < starves)
        starves = 8 * (due - since);
    if (s->now_ns >= since + starves && s->now_ns >= group->granted_ns + starves)
        return 0;
    return has_target && s->now_ns > due + (due - since) ? 3 : 1;
}

/* The order of demands, as the documents say it. */
static bool first_of(const kv_policy_snapshot_t *s, uint32_t a, uint32_t b)
{
    const kv_policy_group_t *x = &s->groups[a], *y = &s->groups[b];
    bool x_floor = x->goal_bundles < x->floor_wanted, y_floor = y->goal_bundles < y->floor_wanted;
    if (x_floor != y_floor)
        return x_floor;
    if (s->mode != KV_POLICY_ARRIVAL) {
        int xc = class_of(s, x), yc = class_of(s, y);
        uint64_t dx = deadline_of(s, x), dy = deadline_of(s, y);
        if (xc != yc)
            return xc < yc;
        if (xc < 2 && x->granted_ns != y->granted_ns)
            return x->granted_ns < y->granted_ns;
        if (xc != 3 && dx != dy)
            return dx < dy;
    }
    if (x->demand_since_ns != y->demand_since_ns)
        return x->demand_since_ns < y->demand_since_ns;
    if (s->mode != KV_POLICY_ARRIVAL && deadline_of(s, x) != deadline_of(s, y))
        return deadline_of(s, x) < deadline_of(s, y); /* both are late */
    return a < b;
}

static uint32_t members_on(const kv_policy_group_t *group, uint32_t pool)
{
    uint32_t count = 0;
    for (uint32_t m = 0; m < group->member_count; m++)
        count += group->pools[m] == pool;
    return count;
}

static bool connected(const kv_policy_snapshot_t *s, uint32_t a, uint32_t b)
{
    bool pools[KV_MAX_POOLS] = {false}, groups[KV_MAX_GROUPS] = {false};
    groups[a] = true;
    for (uint32_t round = 0; round <= s->group_count; round++)
        for (uint32_t g = 0; g < s->group_count; g++)
            for (uint32_t p = 0; p < s->pool_count; p++)
                if (members_on(&s->groups[g], p)) {
                    if (groups[g])
                        pools[p] = true;
                    if (pools[p])
                        groups[g] = true;
                }
    return groups[b];
}

static uint32_t max_of(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

static uint32_t charged(const kv_policy_group_t *group)
{
    return max_of(group->floor_bundles, max_of(group->mapped_bundles, group->goal_bundles));
}

static bool demands(const kv_policy_snapshot_t *s, uint32_t g)
{
    return s->groups[g].present && s->groups[g].answered && kv_policy_need(&s->groups[g]) &&
           s->now_ns >= s->groups[g].not_before_ns;
}

/* What everybody else could give at most, and whether it is enough. */
static bool can_be_met(const kv_policy_snapshot_t *s, uint32_t g, bool from_free_only)
{
    const kv_policy_group_t *borrower = &s->groups[g];
    uint32_t need = kv_policy_need(borrower);
    for (uint32_t p = 0; p < s->pool_count; p++) {
        if (!members_on(borrower, p))
            continue;
        uint64_t least = 0; /* bytes that stay with the others */
        for (uint32_t d = 0; d < s->group_count; d++) {
            const kv_policy_group_t *group = &s->groups[d];
            uint32_t stays = charged(group);
            if (d == g)
                stays = max_of(need, stays);
            else if (!from_free_only && group->present && group->answered &&
                     group->mapped_bundles <= group->goal_bundles) {
                stays = max_of(group->floor_bundles, group->live_bundles);
                if (group->demand_kind && group->demand_bundles <= group->goal_bundles &&
                    group->granted_ns && s->now_ns < group->granted_ns + s->hold_ns)
                    stays = max_of(stays, group->demand_bundles);
            } else if (!from_free_only && group->goal_bundles < group->mapped_bundles &&
                       !group->answered)
                stays = max_of(group->floor_bundles, group->goal_bundles); /* on its way */
            least += (uint64_t)stays * members_on(group, p) * group->bundle_bytes;
        }
        if (least > s->pool_bytes[p])
            return false;
    }
    return true;
}

static bool shrinks_under_way(const kv_policy_snapshot_t *s, uint32_t g)
{
    for (uint32_t d = 0; d < s->group_count; d++)
        if (!s->groups[d].answered && s->groups[d].goal_bundles < s->groups[d].mapped_bundles &&
            connected(s, g, d))
            return true;
    return false;
}

static void judge(void *context, const kv_policy_snapshot_t *s, const kv_policy_decisions_t *d)
{
    sim_t *sim = context;
    uint32_t ceiling_shrinks = 0;
    for (uint32_t c = 0; c < d->command_count; c++) {
        const kv_policy_command_t *command = &d->commands[c];
        const kv_policy_group_t *group = &s->groups[command->group];
        ceiling_shrinks += command->reason == KV_REASON_CEILING;
        if (!group->present || !group->answered)
            fail_sim(sim, "a command to a group that takes none");
        if (command->bundles < group->floor_bundles)
            fail_sim(sim, "a command below the floor");
        if (command->bundles < group->goal_bundles && command->bundles < group->live_bundles)
            fail_sim(sim, "a donor gives what its live requests use");
        if (command->bundles >
                max_of(group->ceiling_bundles, max_of(group->live_bundles, group->floor_wanted)) &&
            command->reason != KV_REASON_FUND)
            fail_sim(sim, "a command above the ceiling");
    }
    for (uint32_t g = 0; g < s->group_count; g++) {
        if (!demands(s, g))
            continue;
        bool first = true;
        for (uint32_t o = 0; o < s->group_count && first; o++)
            first = o == g || !demands(s, o) || !connected(s, g, o) || first_of(s, g, o);
        if (!first || ceiling_shrinks) /* those go before, and may take part of what it counts */
            continue;
        bool grows = false, funded = false;
        for (uint32_t c = 0; c < d->command_count; c++) {
            grows = grows || (d->commands[c].group == g &&
                              d->commands[c].bundles == kv_policy_need(&s->groups[g]));
            funded = funded || (d->commands[c].for_group == g && d->commands[c].group != g);
        }
        if (can_be_met(s, g, true)) {
            if (!grows)
                fail_sim(sim, "free bytes cover the first demand and it gets nothing");
        } else if (can_be_met(s, g, false)) {
            if (!funded && !shrinks_under_way(s, g))
                fail_sim(sim, "donors cover the first demand and none is asked");
            if (d->refused[g])
                fail_sim(sim, "the first demand can be met and is refused");
        } else if (!d->refused[g] || grows || funded) {
            fail_sim(sim, "the first demand cannot be met and is not refused");
        }
    }
}

/* ---- the world --------------------------------------------------------------------------------
 */

static void check_waits(sim_t *sim)
{
    for (uint32_t g = 0; g < sim->channel->group_count; g++) {
        sim_group_t *group = &sim->groups[g];
        const kv_policy_group_t *book = &sim->market.snapshot.groups[g];
        bool waits = book->present && group->report.demand_kind != KV_DEMAND_NONE &&
                     kv_policy_need(book) > 0 &&
                     kv_policy_need(book) <= kv_market_possible_bundles(&sim->market, g);
        if (!waits) {
            group->waits_ns = 0;
            continue;
        }
        if (group->waits_ns == 0)
            group->waits_ns = sim->now;
        uint64_t waited = sim->now - group->waits_ns;
        if (waited > sim->longest_wait)
            sim->longest_wait = waited;
        for (uint32_t i = 0; i < group->live_count; i++)
            if (sim->now - group->live[i].born_ns > sim->longest_life)
                sim->longest_life = sim->now - group->live[i].born_ns;
    }
}

static void record(void *context, const kv_policy_snapshot_t *snapshot,
                   const kv_policy_decisions_t *decisions)
{
    judge(context, snapshot, decisions);
}

static void market_steps(sim_t *sim)
{
    kv_market_step(&sim->market, sim->now, &sim->step);
    uint32_t commands = sim->market.decisions.command_count;
    sim->commands += commands;
    sim->commands_since_event += commands;
    if (sim->commands_since_event > 8 * sim->channel->group_count)
        fail_sim(sim, "%u commands and nothing else happened", sim->commands_since_event);
    if (!commands) /* else record() has judged, before they changed the snapshot */
        judge(sim, &sim->market.snapshot, &sim->market.decisions);
    for (uint32_t g = 0; g < sim->channel->group_count; g++) {
        if (sim->step.faults[g])
            fail_sim(sim, "group %u: %s", g, sim->step.fault_text[g]);
        const kv_market_group_t *state = &sim->market.groups[g];
        const kv_policy_group_t *book = &sim->market.snapshot.groups[g];
        if (state->state == KV_MARKET_PRESENT && !book->answered &&
            sim->now - state->commanded_ns > sim->longest_answer)
            sim->longest_answer = sim->now - state->commanded_ns;
        /* What a rank has is never more than its group is charged. */
        for (uint32_t m = 0; m < sim->channel->groups[g].partition_count; m++)
            if (sim->groups[g].ranks[m].mapped > charged(book))
                fail_sim(sim, "a rank of group %u has more than it is charged", g);
    }
    check_waits(sim);
}

static void make_world(sim_t *sim, uint64_t seed, kv_policy_mode_t mode)
{
    memset(sim, 0, sizeof(*sim));
    sim->seed = seed;
    sim->now = 1000 * MS;
    uint32_t pools = 1 + below(sim, 3), count = 2 + below(sim, 5);
    uint64_t pool_bytes[KV_MAX_POOLS];
    uint32_t floors[KV_MAX_POOLS] = {0};
    kv_group_plan_t plans[KV_MAX_GROUPS];
    for (uint32_t p = 0; p < pools; p++)
        sim->pool_units[p] = 60 + below(sim, POOL_UNITS - 60);
    for (uint32_t g = 0; g < count; g++) {
        uint32_t units = 1 + below(sim, 3), members = 1 + (chance(sim, 2) ? below(sim, pools) : 0);
        plans[g] = (kv_group_plan_t){.instance = g,
                                     .partition_count = members,
                                     .bundle_tokens = 16,
                                     .page_tokens = 16,
                                     .token_bytes = units,
                                     .bundle_bytes = units * UNIT_BYTES,
                                     .floor_bundles = 1 + below(sim, 2),
                                     .elastic = true};
        uint32_t at = below(sim, pools);
        for (uint32_t m = 0; m < members; m++) {
            plans[g].pools[m] = (at + m) % pools;
            floors[plans[g].pools[m]] += plans[g].floor_bundles * units;
        }
    }
    for (uint32_t g = 0; g < count; g++) {
        uint32_t units = (uint32_t)plans[g].token_bytes, most = UINT32_MAX;
        for (uint32_t m = 0; m < plans[g].partition_count; m++) {
            uint32_t p = plans[g].pools[m];
            uint32_t left = sim->pool_units[p] - (floors[p] - plans[g].floor_bundles * units);
            most = left / units < most ? left / units : most;
        }
        plans[g].reserved_bundles = plans[g].ceiling_bundles = most;
    }
    for (uint32_t p = 0; p < pools; p++)
        pool_bytes[p] = (uint64_t)sim->pool_units[p] * UNIT_BYTES;
    assert_int_equal(kv_channel_create(1, pool_bytes, pools, plans, count, &sim->fd, &sim->channel),
                     XP_OK);
    kv_market_settings_t settings = {
        .mode = mode, .patience_ns = PATIENCE_NS, .hold_ns = HOLD_NS, .answer_ns = ANSWER_NS};
    kv_market_init(&sim->market, sim->channel, &settings);
    sim->market.record = record;
    sim->market.record_context = sim;
}

static void steer(sim_t *sim, uint32_t g)
{
    const kv_group_entry_t *entry = entry_of(sim, g);
    if (chance(sim, 2)) {
        kv_market_trim(&sim->market, g);
    } else {
        uint32_t ceiling = 2 + below(sim, entry->reserved_bundles);
        if (chance(sim, 2))
            ceiling = entry->reserved_bundles;
        const kv_market_size_t size = {g, 1 + below(sim, 3), ceiling};
        kv_market_set(&sim->market, &size, 1);
    }
    event(sim);
}

static void run_world(sim_t *sim, uint32_t steps)
{
    uint32_t busy = 0; /* a group that gets most of the load for a while */
    uint32_t count = sim->channel->group_count;
    for (uint32_t step = 0; step < steps && !sim->failed; step++) {
        uint64_t passed_ns = below(sim, 3) * MS / 2;
        sim->now += passed_ns;
        if (chance(sim, 300))
            busy = below(sim, count);
        for (uint32_t g = 0; g < count; g++) {
            sim_group_t *group = &sim->groups[g];
            uint32_t members = entry_of(sim, g)->partition_count;
            if (!group->running) {
                if (sim->now >= group->since)
                    start_group(sim, g);
                continue;
            }
            for (uint32_t m = 0; m < members; m++)
                for (uint32_t again = below(sim, 4); again-- > 0;)
                    rank_acts(sim, g, m);
            if (chance(sim, group->dying ? 20 : 1500))
                kill_one(sim, g, below(sim, members));
            if (group->dying || !group->running)
                continue;
            if (chance(sim, g == busy ? 10 : 120))
                arrive(sim, g);
            if (usable(sim, g))
                engine_steps(sim, g, passed_ns);
            if (chance(sim, 700))
                steer(sim, g);
        }
        market_steps(sim);
    }
}

static void end_world(sim_t *sim)
{
    uint64_t bound = PATIENCE_NS + sim->channel->group_count *
                                       (sim->longest_life + 3 * sim->longest_answer + 1000 * MS);
    if (sim->longest_wait > bound)
        fail_sim(sim, "a demand waited %.0f ms, the bound is %.0f", (double)sim->longest_wait / 1e6,
                 (double)bound / 1e6);
    for (uint32_t g = 0; g < sim->channel->group_count; g++)
        for (uint32_t m = 0; m < entry_of(sim, g)->partition_count; m++)
            kill_one(sim, g, m);
    for (uint32_t p = 0; p < sim->channel->pool_count; p++) {
        uint64_t floors = 0;
        for (uint32_t g = 0; g < sim->channel->group_count; g++)
            floors += sim->market.snapshot.groups[g].floor_bundles *
                      kv_policy_bundle_on(&sim->market.snapshot.groups[g], p);
        if (kv_market_charged_bytes(&sim->market, p) != floors)
            fail_sim(sim, "pool %u did not get back every byte", p);
        for (uint32_t u = 0; u < sim->pool_units[p]; u++)
            if (sim->owner[p][u])
                fail_sim(sim, "unit %u of pool %u still has an owner", u, p);
    }
    kv_channel_unmap(sim->channel);
    close(sim->fd);
}

static bool simulate(uint64_t steps, uint64_t seed, kv_policy_mode_t mode, bool tell)
{
    static sim_t sim;
    uint64_t commands = 0, deaths = 0, met = 0, missed = 0, preempted = 0, wait = 0;
    for (uint64_t done = 0; done < steps; done += RUN_STEPS, seed++) {
        make_world(&sim, seed, mode);
        run_world(&sim, RUN_STEPS);
        end_world(&sim);
        if (sim.failed) {
            printf("seed %llu: %s\n", (unsigned long long)seed, sim.why);
            return false;
        }
        commands += sim.commands;
        deaths += sim.deaths;
        met += sim.met;
        missed += sim.missed;
        preempted += sim.preempted;
        wait = sim.longest_wait > wait ? sim.longest_wait : wait;
    }
    if (tell)
        printf("%llu steps: %llu commands, %llu deaths, %llu deadlines met, %llu missed, %llu "
               "preempted, longest wait %.0f ms\n",
               (unsigned long long)steps, (unsigned long long)commands, (unsigned long long)deaths,
               (unsigned long long)met, (unsigned long long)missed, (unsigned long long)preempted,
               (double)wait / 1e6);
    assert_true(commands > steps / 100 && deaths > 0 && met > 0);
    return true;
}

static void test_worlds(void **state)
{
    assert_true(simulate(120000, 1, KV_POLICY_DEADLINE, true));
}

static void test_worlds_in_order_of_arrival(void **state)
{
    assert_true(simulate(40000, 1, KV_POLICY_ARRIVAL, true));
}

/* ---- deadlines that some order can keep, this order keeps -------------------------------------
 */

#define JOBS 5

typedef struct job {
    uint64_t since_ns, deadline_ns;
} job_t;

/* Every job needs all that can be lent, for HOLD; is there an order that begins each in time? */
static bool some_order_fits(const job_t *jobs, uint32_t count, uint32_t used, uint64_t now,
                            uint64_t hold_ns)
{
    if (used == (1u << count) - 1)
        return true;
    for (uint32_t j = 0; j < count; j++)
        if (!(used & (1u << j)) && now <= jobs[j].deadline_ns &&
            some_order_fits(jobs, count, used | (1u << j), now + hold_ns, hold_ns))
            return true;
    return false;
}

/* How many of them begin in time under the policy. The world answers every command at once. */
static uint32_t begun_in_time(const job_t *jobs, kv_policy_mode_t mode, uint64_t hold_ns)
{
    static kv_policy_snapshot_t s;
    static kv_policy_decisions_t d;
    uint64_t until[JOBS] = {0};
    bool begun[JOBS] = {false};
    uint32_t in_time = 0;
    memset(&s, 0, sizeof(s));
    s.mode = mode;
    s.patience_ns = 1000000 * MS;
    s.pool_count = 1;
    s.pool_bytes[0] = 100 + JOBS - 1;
    s.group_count = JOBS;
    for (uint32_t j = 0; j < JOBS; j++)
        s.groups[j] = (kv_policy_group_t){.bundle_bytes = 1,
                                          .member_count = 1,
                                          .floor_bundles = 1,
                                          .floor_wanted = 1,
                                          .ceiling_bundles = 100,
                                          .mapped_bundles = 1,
                                          .goal_bundles = 1,
                                          .present = true,
                                          .answered = true,
                                          .idle = true,
                                          .earliest_deadline_ns = KV_NO_DEADLINE,
                                          .demand_kind = KV_DEMAND_PREFILL,
                                          .demand_bundles = 100,
                                          .demand_since_ns = jobs[j].since_ns,
                                          .demand_deadline_ns = jobs[j].deadline_ns};
    for (s.now_ns = 1000 * MS; s.now_ns < 1000 * MS + 2 * JOBS * hold_ns; s.now_ns += MS) {
        for (uint32_t j = 0; j < JOBS; j++)
            if (begun[j] && s.now_ns >= until[j])
                s.groups[j].live_bundles = 0;
        for (uint32_t round = 0; round < 4; round++) {
            kv_policy_decide(&s, &d);
            for (uint32_t c = 0; c < d.command_count; c++) {
                kv_policy_group_t *group = &s.groups[d.commands[c].group];
                uint32_t j = d.commands[c].group;
                group->mapped_bundles = group->goal_bundles = d.commands[c].bundles;
                if (d.commands[c].bundles == 100 && !begun[j]) {
                    begun[j] = true;
                    in_time += s.now_ns <= jobs[j].deadline_ns;
                    until[j] = s.now_ns + hold_ns;
                    group->demand_kind = KV_DEMAND_NONE;
                    group->live_bundles = 100;
                    group->granted_ns = s.now_ns;
                }
            }
        }
    }
    return in_time;
}

static bool deadline_order_holds(kv_policy_mode_t mode)
{
    sim_t dice = {.seed = 7};
    uint64_t hold_ns = 20 * MS;
    uint32_t possible = 0, kept = 0;
    for (uint32_t trial = 0; trial < 400; trial++) {
        job_t jobs[JOBS];
        for (uint32_t j = 0; j < JOBS; j++) {
            jobs[j].since_ns = 900 * MS + below(&dice, 100) * MS;
            /* A millisecond more than the grid, so that a boundary is nobody's. */
            jobs[j].deadline_ns = 1001 * MS + below(&dice, 6) * hold_ns + MS / 2;
        }
        if (!some_order_fits(jobs, JOBS, 0, 1000 * MS, hold_ns))
            continue;
        possible++;
        kept += begun_in_time(jobs, mode, hold_ns) == JOBS;
    }
    assert_true(possible > 20);
    return kept == possible;
}

static void test_deadline_order_keeps_what_some_order_keeps(void **state)
{
    assert_true(deadline_order_holds(KV_POLICY_DEADLINE));
}

/* The test above sees it when the order goes. */
static void test_without_deadline_order_that_fails(void **state)
{
    assert_false(deadline_order_holds(KV_POLICY_ARRIVAL));
}

int main(int argc, char **argv)
{
    if (argc > 1) {
        uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 0) : 1;
        bool arrival = argc > 3 && strcmp(argv[3], "arrival") == 0;
        return simulate(strtoull(argv[1], NULL, 0), seed,
                        arrival ? KV_POLICY_ARRIVAL : KV_POLICY_DEADLINE, true)
                   ? 0
                   : 1;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_worlds),
        cmocka_unit_test(test_worlds_in_order_of_arrival),
        cmocka_unit_test(test_deadline_order_keeps_what_some_order_keeps),
        cmocka_unit_test(test_without_deadline_order_that_fails),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
