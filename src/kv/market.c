/* SPDX-License-Identifier: MIT */
/*
 * The market's books. What a rank writes is input: numbers are bounded before they are used, and a
 * completion that no command allows is a fault of its Instance, never a credit.
 */
#include "kv/market.h"

#include <string.h>

#define RECHECK_NS 100000000ull  /* while a demand is open: a report may have changed unrung */
#define REMIND_NS  500000000ull  /* a shrink that stands still though its live requests have left */
#define PAUSE_NS   1000000000ull /* after a grant that the system had no memory for */
#define MOST_BYTES (1ull << 50)  /* no device has more free: what a rank says is input */

static kv_policy_group_t *book(kv_market_t *market, uint32_t group)
{
    return &market->snapshot.groups[group];
}

/* What the two sides tell each other. */
static kv_group_entry_t *entry_of(kv_market_t *market, uint32_t group)
{
    return &market->channel->groups[group];
}

/* What never changes. */
static const kv_group_entry_t *plan_of(const kv_market_t *market, uint32_t group)
{
    return &market->plan.groups[group];
}

const char *kv_market_state_name(kv_market_state_t state)
{
    static const char *const names[] = {"absent", "starting", "present", "leaving"};
    return names[state];
}

void kv_market_init(kv_market_t *market, kv_channel_t *channel,
                    const kv_market_settings_t *settings)
{
    memset(market, 0, sizeof(*market));
    market->channel = channel;
    market->plan = *channel;
    market->settings = *settings;
    kv_policy_snapshot_t *snapshot = &market->snapshot;
    snapshot->patience_ns = settings->patience_ns;
    snapshot->hold_ns = settings->hold_ns;
    snapshot->mode = settings->mode;
    snapshot->pool_count = channel->pool_count;
    snapshot->group_count = channel->group_count;
    for (uint32_t p = 0; p < channel->pool_count; p++)
        snapshot->pool_bytes[p] = channel->pools[p].bytes;
    for (uint32_t g = 0; g < channel->group_count; g++) {
        const kv_group_entry_t *entry = &channel->groups[g];
        kv_policy_group_t *group = book(market, g);
        group->bundle_bytes = entry->bundle_bytes;
        group->member_count = entry->partition_count;
        for (uint32_t m = 0; m < entry->partition_count; m++)
            group->pools[m] = channel->partitions[entry->first_partition + m].pool;
        group->floor_bundles = group->floor_wanted = entry->floor_bundles;
        group->ceiling_bundles = entry->ceiling_bundles;
    }
    for (uint32_t p = 0; p < channel->pool_count; p++)
        XP_ASSERT(kv_market_charged_bytes(market, p) <= snapshot->pool_bytes[p]);
}

uint64_t kv_market_charged_bytes(const kv_market_t *market, uint32_t pool)
{
    uint64_t bytes = 0;
    for (uint32_t g = 0; g < market->snapshot.group_count; g++) {
        const kv_policy_group_t *group = &market->snapshot.groups[g];
        bytes += kv_policy_charge(group) * kv_policy_bundle_on(group, pool);
    }
    return bytes;
}

static uint32_t wanted_floor(const kv_policy_group_t *group)
{
    return group->floor_wanted > group->floor_bundles ? group->floor_wanted : group->floor_bundles;
}

uint32_t kv_market_possible_bundles(const kv_market_t *market, uint32_t group)
{
    const kv_policy_snapshot_t *snapshot = &market->snapshot;
    uint64_t most = plan_of(market, group)->reserved_bundles;
    for (uint32_t p = 0; p < snapshot->pool_count; p++) {
        uint64_t unit = kv_policy_bundle_on(&snapshot->groups[group], p), left;
        if (!unit)
            continue;
        left = snapshot->pool_bytes[p];
        for (uint32_t g = 0; g < snapshot->group_count; g++) {
            uint64_t floor =
                wanted_floor(&snapshot->groups[g]) * kv_policy_bundle_on(&snapshot->groups[g], p);
            /* An observation may have made the pool smaller than what was promised of it. */
            if (g != group)
                left -= floor < left ? floor : left;
        }
        if (left / unit < most)
            most = left / unit;
    }
    return (uint32_t)most;
}

/* ---- commands ---------------------------------------------------------------------------------
 */

static void publish(kv_market_t *market, uint32_t g, const kv_policy_command_t *command, bool trim,
                    uint64_t now_ns, kv_market_step_t *step)
{
    kv_market_group_t *state = &market->groups[g];
    kv_policy_group_t *group = book(market, g);
    XP_ASSERT(group->answered || state->sequence == 0);
    group->goal_bundles = command->bundles;
    group->answered = false;
    state->sequence++;
    state->commanded_ns = now_ns;
    state->reported_late = false;
    state->last = *command;
    kv_group_command_publish(entry_of(market, g), state->sequence, command->bundles, trim);
    if (step)
        step->ring[g] = true;
}

/* ---- life -------------------------------------------------------------------------------------
 */

void kv_market_start(kv_market_t *market, uint32_t g, uint32_t bundles)
{
    kv_market_group_t *state = &market->groups[g];
    kv_policy_group_t *group = book(market, g);
    XP_ASSERT(state->state == KV_MARKET_ABSENT && group->mapped_bundles == 0);
    /* What was granted to the former Instance is no merit of the new one. */
    group->granted_ns = 0;
    kv_channel_reset_group(market->channel, plan_of(market, g), g);
    state->state = KV_MARKET_STARTING;
    state->sequence = 0;
    kv_policy_command_t first = {.group = g,
                                 .bundles = bundles ? bundles : group->floor_bundles,
                                 .for_group = g,
                                 .reason = KV_REASON_FLOOR};
    publish(market, g, &first, false, 0, NULL);
}

void kv_market_leave(kv_market_t *market, uint32_t g)
{
    kv_market_group_t *state = &market->groups[g];
    kv_policy_group_t *group = book(market, g);
    if (state->state == KV_MARKET_ABSENT)
        return;
    state->state = KV_MARKET_LEAVING;
    state->trim_wanted = false;
    group->present = false;
    group->demand_kind = KV_DEMAND_NONE;
    group->live_bundles = 0;
    group->idle = true;
    /* The open command may have been carried out or not: both sizes stay charged until the end. */
}

void kv_market_end(kv_market_t *market, uint32_t g)
{
    kv_market_group_t *state = &market->groups[g];
    kv_policy_group_t *group = book(market, g);
    kv_market_leave(market, g);
    state->state = KV_MARKET_ABSENT;
    state->sequence = 0;
    memset(&state->report, 0, sizeof(state->report));
    memset(&state->last, 0, sizeof(state->last));
    group->mapped_bundles = group->goal_bundles = 0;
    group->answered = false;
    group->squeezed = false;
}

/* ---- reading ----------------------------------------------------------------------------------
 */

static uint32_t bounded(uint64_t value, uint32_t most)
{
    return value < most ? (uint32_t)value : most;
}

static void read_report(kv_market_t *market, uint32_t g)
{
    kv_market_group_t *state = &market->groups[g];
    kv_policy_group_t *group = book(market, g);
    kv_report_t report;
    if (!kv_group_report_read(entry_of(market, g), &report))
        return;
    state->report = report;
    group->demand_kind =
        report.demand_kind <= KV_DEMAND_CACHE ? (uint32_t)report.demand_kind : KV_DEMAND_NONE;
    group->demand_bundles = bounded(report.demand_bundles, KV_MAX_BUNDLES);
    group->demand_deadline_ns = report.demand_deadline_ns;
    group->demand_since_ns = report.demand_since_ns;
    group->live_bundles = bounded(report.live_bundles, kv_policy_charge(group));
    group->idle = report.running == 0 && report.waiting == 0;
    group->earliest_deadline_ns = report.earliest_deadline_ns;
    group->last_activity_ns = report.last_activity_ns;
}

static void fault(kv_market_step_t *step, uint32_t g, kv_market_fault_t kind, const char *text)
{
    step->faults[g] = kind;
    step->fault_text[g] = text;
}

static void credit(kv_market_t *market, uint32_t g, uint32_t mapped, uint64_t now_ns)
{
    kv_market_group_t *state = &market->groups[g];
    kv_policy_group_t *group = book(market, g);
    if (mapped < group->mapped_bundles)
        state->released_bundles += group->mapped_bundles - mapped;
    else
        state->granted_bundles += mapped - group->mapped_bundles;
    if (!group->answered) {
        uint64_t took = now_ns - state->commanded_ns;
        if (state->sequence > 1 && took > state->longest_answer_ns)
            state->longest_answer_ns = took;
        if (state->last.reason == KV_REASON_GRANT)
            group->granted_ns = now_ns;
    }
    if (mapped != group->mapped_bundles)
        state->credited_ns = now_ns;
    group->mapped_bundles = mapped;
    group->answered = true;
}

/* Completions of all ranks; false when one of them is no answer that the command allows. */
static bool read_completions(kv_market_t *market, uint32_t g, uint64_t now_ns,
                             kv_market_step_t *step)
{
    kv_market_group_t *state = &market->groups[g];
    kv_policy_group_t *group = book(market, g);
    const kv_group_entry_t *plan = plan_of(market, g);
    uint32_t most = 0, least = UINT32_MAX;
    uint32_t charged =
        group->mapped_bundles > group->goal_bundles ? group->mapped_bundles : group->goal_bundles;
    for (uint32_t m = 0; m < plan->partition_count; m++) {
        const kv_partition_entry_t *partition =
            &market->channel->partitions[plan->first_partition + m];
        if (PROTOCOL_LOAD_ACQUIRE(&partition->state) != KV_PARTITION_OPEN)
            return true; /* still loads */
        if (PROTOCOL_LOAD_RELAXED(&partition->bundle_bytes) != plan->bundle_bytes ||
            PROTOCOL_LOAD_RELAXED(&partition->bundle_tokens) != plan->bundle_tokens) {
            fault(step, g, KV_FAULT_BROKEN, "its KV bundles differ in size from the plan's");
            return false;
        }
        uint64_t cell = kv_partition_completion(partition);
        if (KV_CELL_SEQUENCE(cell) != state->sequence) {
            if (KV_CELL_SEQUENCE(cell) > state->sequence) {
                fault(step, g, KV_FAULT_BROKEN, "it completed a KV command that was never given");
                return false;
            }
            return true;
        }
        uint32_t value = KV_CELL_VALUE(cell);
        if (value == 0 || value > charged) {
            fault(step, g, KV_FAULT_BROKEN,
                  "it completed a KV command with a size that was never granted");
            return false;
        }
        most = value > most ? value : most;
        least = value < least ? value : least;
    }
    if (group->answered && most == group->mapped_bundles)
        return true;
    credit(market, g, most, now_ns);
    if (state->state == KV_MARKET_STARTING) {
        state->state = KV_MARKET_PRESENT;
        group->present = plan->elastic != 0;
        state->commanded_ns = now_ns;
    }
    /* The system had no memory for the whole grant, on one rank or all: nobody keeps more than the
     * least, and the rest is free again. */
    if (least < group->goal_bundles) {
        kv_policy_command_t less = {
            .group = g, .bundles = least, .for_group = g, .reason = KV_REASON_SHORT};
        group->not_before_ns = now_ns + PAUSE_NS;
        publish(market, g, &less, false, now_ns, step);
    }
    return true;
}

static void watch_answer(kv_market_t *market, uint32_t g, uint64_t now_ns, kv_market_step_t *step)
{
    kv_market_group_t *state = &market->groups[g];
    const kv_policy_group_t *group = book(market, g);
    if (group->answered)
        return;
    if (market->paused)
        state->commanded_ns = now_ns;
    uint64_t waited = now_ns - state->commanded_ns;
    uint64_t limit = market->settings.answer_ns;
    if (waited >= 2 * limit) {
        fault(step, g, KV_FAULT_SILENT,
              "it has not answered a KV command within twice deadlines.kv");
        return;
    }
    if (waited >= limit && !state->reported_late) {
        state->reported_late = true;
        state->late++;
        fault(step, g, KV_FAULT_LATE, "it has not answered a KV command within deadlines.kv");
    }
}

/* ---- pools of GPUs ----------------------------------------------------------------------------
 */

static void publish_ceiling(kv_market_t *market, uint32_t g);

typedef struct observation {
    uint64_t at_ns, free_bytes; /* of the last rank that captured */
    uint64_t held_bytes;        /* of KV Caches, at least */
    uint64_t coming_bytes;      /* what models that are not there will take */
    uint64_t moved_ns;          /* when memory moved last */
} observation_t;

/* False while a rank that has started has not captured, or one that ended still has its memory. */
static bool observe_group(const kv_market_t *market, uint32_t g, uint32_t pool,
                          observation_t *observation)
{
    const kv_group_entry_t *plan = plan_of(market, g);
    const kv_policy_group_t *group = &market->snapshot.groups[g];
    const kv_market_group_t *state = &market->groups[g];
    for (uint32_t m = 0; m < group->member_count; m++) {
        uint64_t free_bytes, at_ns;
        if (group->pools[m] != pool)
            continue;
        if (state->state == KV_MARKET_ABSENT) {
            observation->coming_bytes += market->settings.rank_bytes[g];
            continue;
        }
        at_ns = kv_partition_captured(&market->channel->partitions[plan->first_partition + m],
                                      &free_bytes);
        if (state->state == KV_MARKET_LEAVING || at_ns == 0)
            return false;
        if (at_ns > observation->at_ns) {
            observation->at_ns = at_ns;
            observation->free_bytes = free_bytes < MOST_BYTES ? free_bytes : MOST_BYTES;
        }
        /* An open command has been carried out or not. */
        uint32_t least = group->mapped_bundles < group->goal_bundles ? group->mapped_bundles
                                                                     : group->goal_bundles;
        observation->held_bytes += least * group->bundle_bytes;
        if (state->credited_ns > observation->moved_ns)
            observation->moved_ns = state->credited_ns;
    }
    return true;
}

static void form_pool(kv_market_t *market, uint32_t pool, kv_market_step_t *step)
{
    observation_t seen = {0};
    for (uint32_t g = 0; g < market->snapshot.group_count; g++)
        if (!observe_group(market, g, pool, &seen))
            return;
    if (seen.at_ns == 0 || seen.at_ns == market->observed_ns[pool])
        return;
    market->observed_ns[pool] = seen.at_ns;
    if (market->formed_bytes[pool] && seen.moved_ns >= seen.at_ns)
        return;
    const uint64_t all = seen.held_bytes + seen.free_bytes;
    const uint64_t others = seen.coming_bytes + market->settings.kept_bytes[pool];
    const uint64_t planned = market->plan.pools[pool].bytes;
    uint64_t bytes = all > others ? all - others : 0;
    bytes = bytes < planned ? bytes : planned;
    market->formed_bytes[pool] = bytes ? bytes : 1;
    PROTOCOL_STORE_RELEASE(&market->channel->pools[pool].observed_bytes,
                           market->formed_bytes[pool]);
    step->formed[pool] = true;
}

static void form_pools(kv_market_t *market, kv_market_step_t *step)
{
    bool formed = false;
    for (uint32_t p = 0; p < market->snapshot.pool_count; p++) {
        form_pool(market, p, step);
        /* What was promised or granted stays, though it be more than there is. */
        uint64_t charged = kv_market_charged_bytes(market, p);
        uint64_t bytes = market->formed_bytes[p];
        market->snapshot.pool_bytes[p] = bytes > charged ? bytes : charged;
        formed = formed || step->formed[p];
    }
    for (uint32_t g = 0; g < market->snapshot.group_count && formed; g++)
        if (plan_of(market, g)->elastic)
            publish_ceiling(market, g);
}

/* ---- deciding ---------------------------------------------------------------------------------
 */

static void apply(kv_market_t *market, uint64_t now_ns, kv_market_step_t *step)
{
    const kv_policy_decisions_t *decisions = &market->decisions;
    for (uint32_t c = 0; c < decisions->command_count; c++) {
        const kv_policy_command_t *command = &decisions->commands[c];
        kv_market_group_t *state = &market->groups[command->group];
        if (command->bundles > book(market, command->group)->goal_bundles)
            state->grants++;
        else
            state->shrinks++;
        publish(market, command->group, command, false, now_ns, step);
    }
    for (uint32_t g = 0; g < market->snapshot.group_count; g++) {
        kv_policy_group_t *group = book(market, g);
        kv_group_entry_t *entry = entry_of(market, g);
        group->squeezed = decisions->squeezed[g];
        uint32_t admit = group->squeezed ? group->floor_bundles : UINT32_MAX;
        if (PROTOCOL_LOAD_RELAXED(&entry->admit_bundles) != admit) {
            PROTOCOL_STORE_RELEASE(&entry->admit_bundles, admit);
            step->ring[g] = true; /* who waits for room may go on, or knows why not */
        }
        uint64_t refused = decisions->refused[g] ? group->demand_since_ns : 0;
        if (PROTOCOL_LOAD_RELAXED(&entry->refused_since_ns) != refused) {
            PROTOCOL_STORE_RELEASE(&entry->refused_since_ns, refused);
            step->ring[g] = true;
        }
    }
}

static void trim(kv_market_t *market, uint32_t g, uint64_t now_ns, kv_market_step_t *step)
{
    kv_market_group_t *state = &market->groups[g];
    const kv_policy_group_t *group = book(market, g);
    if (!state->trim_wanted || !group->present || !group->answered)
        return;
    uint32_t to =
        group->live_bundles > group->floor_bundles ? group->live_bundles : group->floor_bundles;
    if (to > group->goal_bundles)
        to = group->goal_bundles;
    kv_policy_command_t command = {
        .group = g, .bundles = to, .for_group = g, .reason = KV_REASON_TRIM};
    state->trim_wanted = false;
    state->trims++;
    publish(market, g, &command, true, now_ns, step);
}

static uint32_t least_held(const kv_policy_group_t *group)
{
    uint32_t least = group->goal_bundles;
    if (group->live_bundles > least)
        least = group->live_bundles;
    return group->floor_bundles > least ? group->floor_bundles : least;
}

/* TP ranks agree on the size that all of them reach at that moment, and keep it. */
static bool stands_still(const kv_market_t *market, uint32_t g)
{
    const kv_policy_group_t *group = &market->snapshot.groups[g];
    return group->present && group->answered && group->mapped_bundles > least_held(group);
}

static void remind(kv_market_t *market, uint32_t g, uint64_t now_ns, kv_market_step_t *step)
{
    kv_market_group_t *state = &market->groups[g];
    if (!stands_still(market, g) || now_ns < state->commanded_ns + REMIND_NS)
        return;
    kv_policy_command_t command = state->last;
    command.bundles = least_held(book(market, g));
    publish(market, g, &command, false, now_ns, step);
}

/* A raised floor is a promise from the moment that nobody else holds its bytes. */
static void raise_floor(kv_market_t *market, uint32_t g)
{
    kv_policy_group_t *group = book(market, g);
    if (group->floor_wanted <= group->floor_bundles)
        return;
    kv_policy_group_t raised = *group;
    raised.floor_bundles = group->floor_wanted;
    uint64_t more = kv_policy_charge(&raised) - kv_policy_charge(group);
    for (uint32_t p = 0; p < market->snapshot.pool_count; p++)
        if (kv_market_charged_bytes(market, p) + more * kv_policy_bundle_on(group, p) >
            market->snapshot.pool_bytes[p])
            return;
    group->floor_bundles = group->floor_wanted;
}

/* When time alone changes what the policy says: a demand becomes overdue or starves, a grant's
 * hold ends. */
static void note_next(kv_market_t *market, uint32_t g, uint64_t now_ns, kv_market_step_t *step)
{
    const kv_policy_group_t *group = book(market, g);
    uint64_t next = UINT64_MAX, limit = market->settings.answer_ns;
    const kv_market_group_t *state = &market->groups[g];
    if (state->state != KV_MARKET_PRESENT)
        return;
    if (!group->answered)
        next = state->commanded_ns + (state->reported_late ? 2 * limit : limit);
    else if (stands_still(market, g))
        next = state->commanded_ns + REMIND_NS;
    else if (kv_policy_need(group)) {
        uint64_t deadline = kv_policy_deadline_ns(&market->snapshot, group);
        next = deadline > now_ns && deadline < now_ns + RECHECK_NS ? deadline : now_ns + RECHECK_NS;
    } else if (group->goal_bundles > group->ceiling_bundles) {
        next = now_ns + RECHECK_NS;
    }
    if (next < step->next_ns)
        step->next_ns = next;
}

void kv_market_step(kv_market_t *market, uint64_t now_ns, kv_market_step_t *step_out)
{
    kv_policy_snapshot_t *snapshot = &market->snapshot;
    memset(step_out, 0, sizeof(*step_out));
    step_out->next_ns = UINT64_MAX;
    snapshot->now_ns = now_ns;
    for (uint32_t g = 0; g < snapshot->group_count; g++)
        raise_floor(market, g);
    for (uint32_t g = 0; g < snapshot->group_count; g++) {
        kv_market_group_t *state = &market->groups[g];
        step_out->ring[g] = state->ring_wanted;
        state->ring_wanted = false;
        if (state->state != KV_MARKET_STARTING && state->state != KV_MARKET_PRESENT)
            continue;
        if (!read_completions(market, g, now_ns, step_out))
            continue;
        if (state->state == KV_MARKET_PRESENT) {
            read_report(market, g);
            watch_answer(market, g, now_ns, step_out);
            trim(market, g, now_ns, step_out);
            remind(market, g, now_ns, step_out);
        }
    }
    if (market->settings.observe)
        form_pools(market, step_out);
    kv_policy_decide(snapshot, &market->decisions);
    if (market->record && market->decisions.command_count)
        market->record(market->record_context, snapshot, &market->decisions);
    market->decision_count += market->decisions.command_count;
    apply(market, now_ns, step_out);
    for (uint32_t g = 0; g < snapshot->group_count; g++)
        note_next(market, g, now_ns, step_out);
    for (uint32_t p = 0; p < snapshot->pool_count; p++)
        XP_ASSERT(kv_market_charged_bytes(market, p) <= snapshot->pool_bytes[p]);
}

/* ---- steering ---------------------------------------------------------------------------------
 */

/* What others have as floors a group can never get, whatever its ceiling: it hears of the smaller,
 * so that it refuses what would wait for ever. */
static void publish_ceiling(kv_market_t *market, uint32_t g)
{
    kv_group_entry_t *entry = entry_of(market, g);
    uint32_t ceiling = book(market, g)->ceiling_bundles;
    uint32_t most = kv_market_possible_bundles(market, g);
    if (most < ceiling)
        ceiling = most > book(market, g)->floor_bundles ? most : book(market, g)->floor_bundles;
    if (PROTOCOL_LOAD_RELAXED(&entry->ceiling_bundles) == ceiling)
        return;
    PROTOCOL_STORE_RELEASE(&entry->ceiling_bundles, ceiling);
    market->groups[g].ring_wanted = true;
}

static xp_status_t check_size(const kv_market_t *market, const kv_market_size_t *size)
{
    const kv_group_entry_t *plan = plan_of(market, size->group);
    if (!plan->elastic)
        return xp_fail(
            XP_UNSUPPORTED,
            "its KV Cache has a fixed size; only elastic ones can be set while they run");
    if (size->floor_bundles < 1 || size->floor_bundles > size->ceiling_bundles ||
        size->ceiling_bundles > plan->reserved_bundles)
        return xp_fail(XP_INVALID,
                       "a floor of %llu and a ceiling of %llu tokens; allowed are 1 <= floor <= "
                       "ceiling <= %llu (the ceiling it was started with)",
                       (unsigned long long)size->floor_bundles * plan->bundle_tokens,
                       (unsigned long long)size->ceiling_bundles * plan->bundle_tokens,
                       (unsigned long long)plan->reserved_bundles * plan->bundle_tokens);
    return XP_OK;
}

/* Whether all floors fit their pools together. */
static xp_status_t check_floors(const kv_market_t *market, const kv_market_size_t *sizes,
                                uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        const kv_group_entry_t *plan = plan_of(market, sizes[i].group);
        uint32_t most = kv_market_possible_bundles(market, sizes[i].group);
        if (sizes[i].floor_bundles > most)
            return xp_fail(XP_NO_MEMORY,
                           "a floor of %llu tokens; with the floors of the others its devices have "
                           "room for %llu at most",
                           (unsigned long long)sizes[i].floor_bundles * plan->bundle_tokens,
                           (unsigned long long)most * plan->bundle_tokens);
    }
    return XP_OK;
}

xp_status_t kv_market_set(kv_market_t *market, const kv_market_size_t *sizes, uint32_t count)
{
    kv_policy_group_t before[KV_MAX_GROUPS];
    XP_ASSERT(count <= KV_MAX_GROUPS);
    for (uint32_t i = 0; i < count; i++)
        XP_TRY(check_size(market, &sizes[i]));
    for (uint32_t i = 0; i < count; i++) {
        kv_policy_group_t *group = book(market, sizes[i].group);
        before[i] = *group;
        group->floor_wanted = sizes[i].floor_bundles;
        if (sizes[i].floor_bundles < group->floor_bundles)
            group->floor_bundles = sizes[i].floor_bundles;
        group->ceiling_bundles = sizes[i].ceiling_bundles;
    }
    xp_status_t status = check_floors(market, sizes, count);
    if (status != XP_OK) {
        for (uint32_t i = 0; i < count; i++)
            *book(market, sizes[i].group) = before[i];
        return status;
    }
    for (uint32_t i = 0; i < count; i++)
        PROTOCOL_STORE_RELEASE(&entry_of(market, sizes[i].group)->floor_bundles,
                               sizes[i].floor_bundles);
    for (uint32_t other = 0; other < market->snapshot.group_count; other++)
        if (plan_of(market, other)->elastic)
            publish_ceiling(market, other);
    return XP_OK;
}

xp_status_t kv_market_order(kv_market_t *market, kv_policy_mode_t mode)
{
    XP_ASSERT(mode != KV_POLICY_STATIC);
    if (market->settings.mode == KV_POLICY_STATIC)
        return xp_fail(XP_UNSUPPORTED, "the KV Caches have fixed sizes (scheduler.kv_policy is "
                                       "\"static\"); nothing moves between them");
    market->settings.mode = market->snapshot.mode = mode;
    return XP_OK;
}

xp_status_t kv_market_trim(kv_market_t *market, uint32_t g)
{
    if (!plan_of(market, g)->elastic)
        return xp_fail(XP_UNSUPPORTED, "its KV Cache has a fixed size; it cannot be trimmed");
    if (market->groups[g].state != KV_MARKET_PRESENT)
        return xp_fail(XP_RETRY, "it is %s; it can be trimmed once it serves",
                       kv_market_state_name(market->groups[g].state));
    market->groups[g].trim_wanted = true;
    return XP_OK;
}
