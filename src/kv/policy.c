/* SPDX-License-Identifier: MIT */
/*
 * The KV policy. Any thread; everything lies on the stack. Loops are bounded by KV_MAX_GROUPS and
 * KV_MAX_POOLS.
 */
#include "kv/policy.h"

#include <string.h>

typedef struct decide {
    const kv_policy_snapshot_t *snapshot;
    kv_policy_decisions_t *out;
    int64_t free_bytes[KV_MAX_POOLS];     /* not spoken for by a demand that was looked at */
    int64_t expected_bytes[KV_MAX_POOLS]; /* that unanswered shrinks will bring */
    bool shrinking[KV_MAX_POOLS];         /* a shrink is unanswered there */
    bool kept[KV_MAX_POOLS];              /* an overdue demand waits for all that comes */
    bool commanded[KV_MAX_GROUPS];
    bool served[KV_MAX_GROUPS]; /* a demand ahead in the order that is being met: no donor */
    uint64_t unit[KV_MAX_GROUPS][KV_MAX_POOLS]; /* kv_policy_bundle_on() */
} decide_t;

uint32_t kv_policy_charge(const kv_policy_group_t *group)
{
    uint32_t charge = group->floor_bundles;
    if (group->mapped_bundles > charge)
        charge = group->mapped_bundles;
    return group->goal_bundles > charge ? group->goal_bundles : charge;
}

uint64_t kv_policy_bundle_on(const kv_policy_group_t *group, uint32_t pool)
{
    uint64_t members = 0;
    for (uint32_t m = 0; m < group->member_count; m++)
        members += group->pools[m] == pool;
    return members * group->bundle_bytes;
}

/* A raised floor that has not been mapped yet goes before everything else. */
static bool only_floor(const kv_policy_group_t *group)
{
    return group->goal_bundles < group->floor_wanted;
}

bool kv_policy_only_cache(const kv_policy_group_t *group)
{
    return group->demand_kind == KV_DEMAND_CACHE && !only_floor(group);
}

uint32_t kv_policy_need(const kv_policy_group_t *group)
{
    uint32_t need = 0;
    if (group->demand_kind != KV_DEMAND_NONE &&
        (group->demand_kind != KV_DEMAND_CACHE || !only_floor(group)))
        need = group->demand_bundles < group->ceiling_bundles ? group->demand_bundles
                                                              : group->ceiling_bundles;
    if (need < group->floor_wanted)
        need = group->floor_wanted; /* a raised floor is a demand by itself */
    return need > group->goal_bundles ? need : 0;
}

static uint64_t add_saturated(uint64_t a, uint64_t b)
{
    return a > UINT64_MAX - b ? UINT64_MAX : a + b;
}

uint64_t kv_policy_deadline_ns(const kv_policy_snapshot_t *snapshot, const kv_policy_group_t *group)
{
    if (only_floor(group))
        return 0;
    if (kv_policy_only_cache(group))
        return UINT64_MAX;
    uint64_t patient = add_saturated(group->demand_since_ns, snapshot->patience_ns);
    if (snapshot->mode == KV_POLICY_ARRIVAL || group->demand_deadline_ns > patient)
        return patient;
    return group->demand_deadline_ns;
}

const char *kv_policy_reason_name(kv_policy_reason_t reason)
{
    static const char *const names[] = {[KV_REASON_NONE] = "none",
                                        [KV_REASON_GRANT] = "grant",
                                        [KV_REASON_FUND] = "fund",
                                        [KV_REASON_CEILING] = "ceiling",
                                        [KV_REASON_FLOOR] = "floor",
                                        [KV_REASON_TRIM] = "trim",
                                        [KV_REASON_SHORT] = "short of memory"};
    return (unsigned)reason < sizeof(names) / sizeof(names[0]) ? names[reason] : "unknown";
}

static void command(decide_t *decide, uint32_t group, uint32_t bundles, uint32_t for_group,
                    kv_policy_reason_t reason)
{
    decide->commanded[group] = true;
    decide->out->commands[decide->out->command_count++] = (kv_policy_command_t){
        .group = group, .bundles = bundles, .for_group = for_group, .reason = reason};
}

/* ---- order of demands ------------------------------------------------------------------------ */

/* A demand is late when it is overdue for longer than its whole target was: what it could keep is
 * lost. It starves when it has waited STARVING_TARGETS times its target. */
#define STARVING_TARGETS 8

/* In order: who is served first. */
typedef enum urgency { URGENCY_STARVING, URGENCY_OVERDUE, URGENCY_IN_TIME, URGENCY_LATE } urgency_t;

/* From the request's arrival to its deadline; 0 where that is not known. What live work lacks has a
 * deadline of its last token, which says nothing of how long it may wait. */
static uint64_t target_ns(const kv_policy_snapshot_t *snapshot, const kv_policy_group_t *group)
{
    uint64_t deadline = kv_policy_deadline_ns(snapshot, group);
    if (group->demand_kind != KV_DEMAND_PREFILL || deadline <= group->demand_since_ns)
        return 0;
    return deadline - group->demand_since_ns;
}

/* Others' new prefills wait for it from then on. A group that was given something lately does not
 * starve: under overload every queue is long, and all would only take turns in emptying the pool.
 */
static bool starving(const decide_t *decide, uint32_t g)
{
    const kv_policy_snapshot_t *snapshot = decide->snapshot;
    const kv_policy_group_t *group = &snapshot->groups[g];
    if (only_floor(group))
        return true;
    uint64_t target = target_ns(snapshot, group), wait = snapshot->patience_ns;
    if (target && target < wait / STARVING_TARGETS)
        wait = target * STARVING_TARGETS;
    uint64_t from =
        group->granted_ns > group->demand_since_ns ? group->granted_ns : group->demand_since_ns;
    return add_saturated(from, wait) <= snapshot->now_ns;
}

static urgency_t urgency_of(const decide_t *decide, uint32_t g)
{
    const kv_policy_snapshot_t *snapshot = decide->snapshot;
    const kv_policy_group_t *group = &snapshot->groups[g];
    uint64_t deadline = kv_policy_deadline_ns(snapshot, group);
    uint64_t target = target_ns(snapshot, group);
    if (deadline > snapshot->now_ns)
        return URGENCY_IN_TIME;
    if (starving(decide, g))
        return URGENCY_STARVING;
    return target && snapshot->now_ns - deadline > target ? URGENCY_LATE : URGENCY_OVERDUE;
}

static bool goes_before(const decide_t *decide, uint32_t a, uint32_t b)
{
    const kv_policy_snapshot_t *snapshot = decide->snapshot;
    const kv_policy_group_t *left = &snapshot->groups[a], *right = &snapshot->groups[b];
    if (only_floor(left) != only_floor(right))
        return only_floor(left);
    if (kv_policy_only_cache(left) != kv_policy_only_cache(right))
        return kv_policy_only_cache(right);
    if (snapshot->mode == KV_POLICY_DEADLINE) {
        urgency_t urgency = urgency_of(decide, a), other = urgency_of(decide, b);
        if (urgency != other)
            return urgency < other;
        if ((urgency == URGENCY_STARVING || urgency == URGENCY_OVERDUE) &&
            left->granted_ns != right->granted_ns)
            return left->granted_ns < right->granted_ns;
        if (urgency == URGENCY_LATE && left->demand_since_ns != right->demand_since_ns)
            return left->demand_since_ns < right->demand_since_ns;
        uint64_t left_ns = kv_policy_deadline_ns(snapshot, left);
        uint64_t right_ns = kv_policy_deadline_ns(snapshot, right);
        if (left_ns != right_ns)
            return left_ns < right_ns;
    }
    if (left->demand_since_ns != right->demand_since_ns)
        return left->demand_since_ns < right->demand_since_ns;
    return a < b;
}

static uint32_t order_demands(const decide_t *decide, uint32_t order_out[KV_MAX_GROUPS])
{
    const kv_policy_snapshot_t *snapshot = decide->snapshot;
    uint32_t count = 0;
    for (uint32_t g = 0; g < snapshot->group_count; g++) {
        const kv_policy_group_t *group = &snapshot->groups[g];
        if (!group->present || !group->answered || kv_policy_need(group) == 0 ||
            snapshot->now_ns < group->not_before_ns)
            continue;
        uint32_t at = count++;
        for (; at > 0 && goes_before(decide, g, order_out[at - 1]); at--)
            order_out[at] = order_out[at - 1];
        order_out[at] = g;
    }
    return count;
}

/* ---- donors -----------------------------------------------------------------------------------
 */

/* What the group must keep when others need memory. */
static uint32_t kept_bundles(const decide_t *decide, const kv_policy_group_t *group)
{
    uint32_t keep =
        group->live_bundles > group->floor_bundles ? group->live_bundles : group->floor_bundles;
    /* Granted a moment ago, not used yet. */
    if (group->demand_kind != KV_DEMAND_NONE && group->demand_kind != KV_DEMAND_CACHE &&
        group->demand_bundles <= group->goal_bundles && group->demand_bundles > keep &&
        group->granted_ns != 0 &&
        decide->snapshot->now_ns < add_saturated(group->granted_ns, decide->snapshot->hold_ns))
        keep = group->demand_bundles;
    return keep;
}

static uint32_t surplus_bundles(const decide_t *decide, uint32_t donor, uint32_t borrower)
{
    const kv_policy_group_t *group = &decide->snapshot->groups[donor];
    if (donor == borrower || !group->present || !group->answered || decide->commanded[donor] ||
        decide->served[donor])
        return 0;
    /* It still releases, as its live requests leave: asking again would bring nothing sooner. */
    if (group->mapped_bundles > group->goal_bundles)
        return 0;
    uint32_t keep = kept_bundles(decide, group), charge = kv_policy_charge(group);
    return charge > keep ? charge - keep : 0;
}

static bool touches_shrinking(const decide_t *decide, uint32_t group)
{
    for (uint32_t p = 0; p < decide->snapshot->pool_count; p++)
        if (decide->unit[group][p] && decide->shrinking[p])
            return true;
    return false;
}

static bool gives_before(const kv_policy_group_t *left, const kv_policy_group_t *right)
{
    if (left->idle != right->idle)
        return left->idle;
    if (left->idle)
        return left->last_activity_ns < right->last_activity_ns;
    return left->earliest_deadline_ns > right->earliest_deadline_ns;
}

/* ---- one demand -------------------------------------------------------------------------------
 */

typedef struct want {
    uint32_t group, need;
    int64_t extra_bytes[KV_MAX_POOLS]; /* beyond its charge */
} want_t;

/* False when floors alone leave no room for it: it can never be met as things are configured. */
static bool possible(const decide_t *decide, const want_t *want)
{
    const kv_policy_snapshot_t *snapshot = decide->snapshot;
    for (uint32_t p = 0; p < snapshot->pool_count; p++) {
        uint64_t unit = decide->unit[want->group][p], taken = want->need * unit;
        if (!unit)
            continue;
        for (uint32_t g = 0; g < snapshot->group_count; g++)
            if (g != want->group)
                taken += snapshot->groups[g].floor_bundles * decide->unit[g][p];
        if (taken > snapshot->pool_bytes[p])
            return false;
    }
    return true;
}

static bool free_covers(const decide_t *decide, const want_t *want)
{
    for (uint32_t p = 0; p < decide->snapshot->pool_count; p++)
        if (decide->unit[want->group][p] && decide->free_bytes[p] < want->extra_bytes[p])
            return false;
    return true;
}

/* What is still missing on each pool after free bytes and what is on its way. */
static bool missing(const decide_t *decide, const want_t *want, int64_t short_bytes[KV_MAX_POOLS])
{
    bool any = false;
    for (uint32_t p = 0; p < decide->snapshot->pool_count; p++) {
        short_bytes[p] = 0;
        if (!decide->unit[want->group][p])
            continue;
        int64_t lacks = want->extra_bytes[p] - decide->free_bytes[p] - decide->expected_bytes[p];
        if (lacks > 0) {
            short_bytes[p] = lacks;
            any = true;
        }
    }
    return any;
}

/* Whether all that donors have covers what is missing; `startable` counts only donors on whose
 * pools no shrink is under way. */
static bool donors_cover(const decide_t *decide, const want_t *want,
                         const int64_t short_bytes[KV_MAX_POOLS], bool startable)
{
    int64_t left[KV_MAX_POOLS];
    memcpy(left, short_bytes, sizeof(left));
    for (uint32_t d = 0; d < decide->snapshot->group_count; d++) {
        uint32_t surplus = surplus_bundles(decide, d, want->group);
        if (!surplus || (startable && touches_shrinking(decide, d)))
            continue;
        for (uint32_t p = 0; p < decide->snapshot->pool_count; p++)
            left[p] -= (int64_t)(surplus * decide->unit[d][p]);
    }
    for (uint32_t p = 0; p < decide->snapshot->pool_count; p++)
        if (short_bytes[p] > 0 && left[p] > 0)
            return false;
    return true;
}

static void begin_funding(decide_t *decide, const want_t *want, int64_t short_bytes[KV_MAX_POOLS])
{
    const kv_policy_snapshot_t *snapshot = decide->snapshot;
    bool looked[KV_MAX_GROUPS] = {false};
    uint32_t chosen[KV_MAX_GROUPS], chosen_count = 0;
    for (uint32_t round = 0; round < snapshot->group_count; round++) {
        uint32_t best = UINT32_MAX;
        for (uint32_t d = 0; d < snapshot->group_count; d++) {
            if (looked[d] || !surplus_bundles(decide, d, want->group) ||
                touches_shrinking(decide, d))
                continue;
            if (best == UINT32_MAX || gives_before(&snapshot->groups[d], &snapshot->groups[best]))
                best = d;
        }
        if (best == UINT32_MAX)
            break;
        looked[best] = true;
        uint32_t surplus = surplus_bundles(decide, best, want->group);
        uint64_t give = 0;
        for (uint32_t p = 0; p < snapshot->pool_count; p++) {
            uint64_t unit = decide->unit[best][p];
            if (!unit || short_bytes[p] <= 0)
                continue;
            uint64_t wanted = ((uint64_t)short_bytes[p] + unit - 1) / unit;
            if (wanted > give)
                give = wanted;
        }
        if (!give)
            continue;
        if (give > surplus)
            give = surplus;
        command(decide, best, kv_policy_charge(&snapshot->groups[best]) - (uint32_t)give,
                want->group, KV_REASON_FUND);
        chosen[chosen_count++] = best;
        for (uint32_t p = 0; p < snapshot->pool_count; p++) {
            short_bytes[p] -= (int64_t)(give * decide->unit[best][p]);
            decide->expected_bytes[p] += (int64_t)(give * decide->unit[best][p]);
        }
    }
    /* Marked last: the donors of one attempt share pools. */
    for (uint32_t p = 0; p < snapshot->pool_count; p++)
        for (uint32_t c = 0; c < chosen_count; c++)
            if (decide->unit[chosen[c]][p])
                decide->shrinking[p] = true;
}

/* Live requests have to end before this demand can be met: no new ones meanwhile. */
static void keep_pools(decide_t *decide, const want_t *want, int64_t short_bytes[KV_MAX_POOLS])
{
    const kv_policy_snapshot_t *snapshot = decide->snapshot;
    /* What donors have anyway needs no squeeze. */
    for (uint32_t d = 0; d < snapshot->group_count; d++) {
        uint32_t surplus = surplus_bundles(decide, d, want->group);
        for (uint32_t p = 0; p < snapshot->pool_count; p++)
            short_bytes[p] -= (int64_t)(surplus * decide->unit[d][p]);
    }
    bool looked[KV_MAX_GROUPS] = {false};
    for (uint32_t round = 0; round < snapshot->group_count; round++) {
        uint32_t best = UINT32_MAX;
        for (uint32_t d = 0; d < snapshot->group_count; d++) {
            const kv_policy_group_t *group = &snapshot->groups[d];
            if (looked[d] || d == want->group || !group->present ||
                group->live_bundles <= group->floor_bundles)
                continue;
            if (best == UINT32_MAX) {
                best = d;
                continue;
            }
            const kv_policy_group_t *former = &snapshot->groups[best];
            if (group->squeezed != former->squeezed ? group->squeezed : gives_before(group, former))
                best = d;
        }
        if (best == UINT32_MAX)
            break;
        looked[best] = true;
        bool helps = false;
        for (uint32_t p = 0; p < snapshot->pool_count; p++)
            helps = helps ||
                    (decide->unit[best][p] && decide->unit[want->group][p] && short_bytes[p] > 0);
        if (!helps)
            continue;
        decide->out->squeezed[best] = true;
        const kv_policy_group_t *group = &snapshot->groups[best];
        for (uint32_t p = 0; p < snapshot->pool_count; p++)
            short_bytes[p] -=
                (int64_t)((group->live_bundles - group->floor_bundles) * decide->unit[best][p]);
    }
    for (uint32_t p = 0; p < snapshot->pool_count; p++)
        if (decide->unit[want->group][p])
            decide->kept[p] = true;
}

/* What is free now, and on its way, is this demand's; later ones do not count on it. */
static void reserve(decide_t *decide, const want_t *want)
{
    for (uint32_t p = 0; p < decide->snapshot->pool_count; p++) {
        if (!decide->unit[want->group][p])
            continue;
        int64_t extra = want->extra_bytes[p];
        int64_t from_free = decide->free_bytes[p] > 0 ? decide->free_bytes[p] : 0;
        if (from_free > extra)
            from_free = extra;
        int64_t from_expected = decide->expected_bytes[p];
        if (from_expected > extra - from_free)
            from_expected = extra - from_free;
        decide->free_bytes[p] -= from_free;
        decide->expected_bytes[p] -= from_expected;
    }
}

static void serve(decide_t *decide, uint32_t g)
{
    const kv_policy_snapshot_t *snapshot = decide->snapshot;
    const kv_policy_group_t *group = &snapshot->groups[g];
    if (decide->commanded[g])
        return; /* it has just become a donor for a demand ahead of it */
    want_t want = {.group = g, .need = kv_policy_need(group)};
    uint32_t charge = kv_policy_charge(group);
    uint32_t extra = want.need > charge ? want.need - charge : 0;
    bool cache = kv_policy_only_cache(group);
    bool prefill = cache || (group->demand_kind == KV_DEMAND_PREFILL && !only_floor(group));
    bool stands_behind = false;
    for (uint32_t p = 0; p < snapshot->pool_count; p++) {
        want.extra_bytes[p] = (int64_t)(extra * decide->unit[g][p]);
        stands_behind = stands_behind || (prefill && decide->unit[g][p] && decide->kept[p]);
    }
    if (stands_behind || !possible(decide, &want)) {
        decide->out->refused[g] = true;
        return;
    }
    if (free_covers(decide, &want)) {
        command(decide, g, want.need, g, only_floor(group) ? KV_REASON_FLOOR : KV_REASON_GRANT);
        decide->served[g] = true;
        reserve(decide, &want);
        return;
    }
    int64_t short_bytes[KV_MAX_POOLS];
    if (cache) {
        decide->out->refused[g] = true;
        return;
    }
    if (missing(decide, &want, short_bytes) && !donors_cover(decide, &want, short_bytes, false)) {
        decide->out->refused[g] = true;
        if (starving(decide, g))
            keep_pools(decide, &want, short_bytes);
        return;
    }
    /* Free bytes, what is on its way and donors cover it. */
    decide->served[g] = true;
    if (missing(decide, &want, short_bytes) && !touches_shrinking(decide, g) &&
        donors_cover(decide, &want, short_bytes, true))
        begin_funding(decide, &want, short_bytes);
    reserve(decide, &want);
}

/* ---- whole ------------------------------------------------------------------------------------
 */

static void look_at_pools(decide_t *decide)
{
    const kv_policy_snapshot_t *snapshot = decide->snapshot;
    for (uint32_t p = 0; p < snapshot->pool_count; p++)
        decide->free_bytes[p] = (int64_t)snapshot->pool_bytes[p];
    for (uint32_t g = 0; g < snapshot->group_count; g++) {
        const kv_policy_group_t *group = &snapshot->groups[g];
        uint32_t charge = kv_policy_charge(group);
        uint32_t least =
            group->goal_bundles > group->floor_bundles ? group->goal_bundles : group->floor_bundles;
        XP_ASSERT(group->member_count <= KV_MAX_RANKS);
        for (uint32_t m = 0; m < group->member_count; m++) {
            XP_ASSERT(group->pools[m] < snapshot->pool_count);
            decide->unit[g][group->pools[m]] += group->bundle_bytes;
        }
        for (uint32_t p = 0; p < snapshot->pool_count; p++) {
            uint64_t unit = decide->unit[g][p];
            decide->free_bytes[p] -= (int64_t)(charge * unit);
            if (unit && !group->answered && group->goal_bundles < group->mapped_bundles) {
                decide->shrinking[p] = true;
                decide->expected_bytes[p] += (int64_t)((charge - least) * unit);
            }
        }
    }
}

static void shrink_to_ceilings(decide_t *decide)
{
    const kv_policy_snapshot_t *snapshot = decide->snapshot;
    for (uint32_t g = 0; g < snapshot->group_count; g++) {
        const kv_policy_group_t *group = &snapshot->groups[g];
        uint32_t top = group->ceiling_bundles;
        if (group->live_bundles > top)
            top = group->live_bundles;
        if (group->floor_bundles > top)
            top = group->floor_bundles;
        if (!group->present || !group->answered || group->goal_bundles <= top ||
            touches_shrinking(decide, g))
            continue;
        uint32_t charge = kv_policy_charge(group);
        command(decide, g, top, g, KV_REASON_CEILING);
        for (uint32_t p = 0; p < snapshot->pool_count; p++) {
            decide->expected_bytes[p] += (int64_t)((charge - top) * decide->unit[g][p]);
            if (decide->unit[g][p])
                decide->shrinking[p] = true;
        }
    }
}

void kv_policy_decide(const kv_policy_snapshot_t *snapshot, kv_policy_decisions_t *decisions_out)
{
    XP_ASSERT(snapshot->pool_count <= KV_MAX_POOLS && snapshot->group_count <= KV_MAX_GROUPS);
    memset(decisions_out, 0, sizeof(*decisions_out));
    if (snapshot->mode == KV_POLICY_STATIC)
        return;
    decide_t decide = {.snapshot = snapshot, .out = decisions_out};
    uint32_t order[KV_MAX_GROUPS];
    look_at_pools(&decide);
    shrink_to_ceilings(&decide);
    uint32_t count = order_demands(&decide, order);
    for (uint32_t i = 0; i < count; i++)
        serve(&decide, order[i]);
}
