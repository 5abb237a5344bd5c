/* SPDX-License-Identifier: MIT */
/*
 * FfnAgent service: executes this device's shard of leased Lanes, reduces and commits as the
 * group's first member, and on the first FfnAgent runs the Coordinator in the same loop. One thread
 * runs it; compute happens on that thread through the given function. Allocates nothing once
 * created.
 *
 * The Coordinator must not wait for a long compute when other FfnAgents depend on it. So with
 * several FfnAgents a helper thread steps it while this one computes more than a few rows. The lock
 * decides who steps; the helper sleeps otherwise.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/futex.h"
#include "fabric/coordinator.h"

/* Computes of at least so many rows are long beside the few microseconds that waking the helper
 * costs. */
#define FFN_HELPER_ROWS 4

typedef enum ffn_lane_state {
    FFN_LANE_EMPTY = 0,
    FFN_LANE_WAIT_INPUT,
    FFN_LANE_WAIT_PARTIALS /* first member only: own partial is there */
} ffn_lane_state_t;

typedef struct ffn_lane {
    ffn_lane_state_t state;
    uint64_t ticket; /* of the last Lane Execution taken */
    uint32_t rows, group;
    fabric_execution_t execution;
} ffn_lane_t;

struct fabric_ffn {
    fabric_t *fabric;
    xp_clock_t clock;
    fabric_execute_t execute;
    void *execute_context;
    observe_t *observe; /* NULL: nobody looks */
    fabric_describe_t describe;
    uint32_t index; /* of this FfnAgent */
    transport_waiter_t waiter, helper_waiter;
    fabric_coordinator_t *coordinator; /* first FfnAgent only */
    pthread_mutex_t coordinator_lock;
    bool has_helper;
    pthread_t helper;
    uint32_t helper_word; /* even: helper idle, odd: helper steps the Coordinator */
    uint32_t helper_stop;
    ffn_lane_t lanes[FABRIC_MAX_LANES];
};

xp_status_t fabric_ffn_create(fabric_t *fabric, xp_clock_t clock, fabric_execute_t execute,
                              void *execute_context, fabric_ffn_t **ffn_out)
{
    const fabric_plan_t *plan = &fabric->plan;
    if (fabric->pe < plan->atn_count || fabric->pe >= plan->atn_count + plan->ffn_count)
        return xp_fail(XP_INVALID, "PE %u is no FfnAgent", fabric->pe);
    fabric_ffn_t *ffn = calloc(1, sizeof(*ffn));
    if (!ffn)
        return xp_fail(XP_NO_MEMORY, "no memory for the FfnAgent service");
    ffn->fabric = fabric;
    ffn->clock = clock;
    ffn->execute = execute;
    ffn->execute_context = execute_context;
    ffn->index = fabric->pe - plan->atn_count;
    pthread_mutex_init(&ffn->coordinator_lock, NULL);
    transport_waiter_init(&ffn->waiter, plan->spin_ns);
    /* Here, not in the helper's thread: it allocates. */
    transport_waiter_init(&ffn->helper_waiter, 0);
    if (fabric->pe == fabric_coordinator_pe(plan)) {
        xp_status_t status = fabric_coordinator_create(fabric, clock, &ffn->coordinator);
        if (status != XP_OK) {
            fabric_ffn_destroy(ffn);
            return status;
        }
    }
    *ffn_out = ffn;
    return XP_OK;
}

void fabric_ffn_destroy(fabric_ffn_t *ffn)
{
    if (!ffn)
        return;
    fabric_coordinator_destroy(ffn->coordinator);
    pthread_mutex_destroy(&ffn->coordinator_lock);
    free(ffn);
}

void fabric_ffn_observe(fabric_ffn_t *ffn, observe_t *observe, fabric_describe_t describe)
{
    ffn->observe = observe;
    ffn->describe = describe;
    for (uint32_t i = 0; observe && i < ffn->fabric->plan.instance_count; i++)
        observe_name_instance(observe, i, ffn->fabric->plan.instances[i].id);
}

static const fabric_plan_instance_t *lane_instance(const fabric_ffn_t *ffn, const ffn_lane_t *lane)
{
    return &ffn->fabric->plan.instances[lane->execution.instance];
}

static uint64_t rank_slot(const fabric_ffn_t *ffn, const ffn_lane_t *lane, uint32_t rank)
{
    return fabric_slot_offset(&ffn->fabric->layout, lane->execution.instance, rank);
}

static xp_status_t ffn_step_coordinator(fabric_ffn_t *ffn)
{
    pthread_mutex_lock(&ffn->coordinator_lock);
    xp_status_t status = fabric_coordinator_step(ffn->coordinator);
    pthread_mutex_unlock(&ffn->coordinator_lock);
    return status;
}

/* Runs only between helper_begin and helper_end; a failure it meets is in the failure word, where
 * the main loop finds it. */
static void *helper_main(void *context)
{
    fabric_ffn_t *ffn = context;
    const fabric_provider_ops_t *ops = ffn->fabric->provider->ops;
    while (!PROTOCOL_LOAD_ACQUIRE(&ffn->helper_stop)) {
        uint32_t word = PROTOCOL_LOAD_ACQUIRE(&ffn->helper_word);
        if (!(word & 1)) {
            xp_futex_wait(&ffn->helper_word, word, xp_monotonic_ns() + XP_NS_PER_S);
            continue;
        }
        uint32_t seen = ops->observe(ffn->fabric->provider);
        if (fabric_has_failed(ffn->fabric) || ffn_step_coordinator(ffn) != XP_OK)
            ops->wait(ffn->fabric->provider, &ffn->helper_waiter, seen,
                      xp_monotonic_ns() + FABRIC_TICK_NS);
    }
    return NULL;
}

static bool helper_begin(fabric_ffn_t *ffn, uint32_t rows)
{
    if (!ffn->has_helper || rows < FFN_HELPER_ROWS)
        return false;
    PROTOCOL_ADD_TOTAL(&ffn->helper_word, 1u);
    xp_futex_wake(&ffn->helper_word, 1);
    return true;
}

static void helper_end(fabric_ffn_t *ffn)
{
    PROTOCOL_ADD_TOTAL(&ffn->helper_word, 1u);
    fabric_signal(ffn->fabric, 1u << ffn->fabric->pe); /* it may sleep on the doorbell */
}

static xp_status_t helper_start(fabric_ffn_t *ffn)
{
    if (!ffn->coordinator || ffn->fabric->plan.ffn_count == 1)
        return XP_OK;
    ffn->helper_stop = 0;
    if (pthread_create(&ffn->helper, NULL, helper_main, ffn) != 0)
        return xp_fail(XP_NO_MEMORY, "cannot start the Coordinator's helper thread");
    ffn->has_helper = true;
    return XP_OK;
}

static void helper_stop(fabric_ffn_t *ffn)
{
    if (!ffn->has_helper)
        return;
    PROTOCOL_STORE_RELEASE(&ffn->helper_stop, 1u);
    PROTOCOL_ADD_TOTAL(&ffn->helper_word, 2u);
    xp_futex_wake(&ffn->helper_word, 1);
    fabric_signal(ffn->fabric, 1u << ffn->fabric->pe);
    pthread_join(ffn->helper, NULL);
    ffn->has_helper = false;
}

/* Takes a Lane Execution, checked like any record from a peer. */
static xp_status_t ffn_take_execution(fabric_ffn_t *ffn, uint32_t lane_index, uint64_t at)
{
    fabric_t *fabric = ffn->fabric;
    ffn_lane_t *lane = &ffn->lanes[lane_index];
    fabric_execution_t *execution = &lane->execution;
    fabric_record_load(fabric, at, sizeof(*execution), execution);
    bool valid = execution->ticket > lane->ticket && lane->state == FFN_LANE_EMPTY &&
                 execution->instance < fabric->plan.instance_count;
    uint64_t rows = 0;
    if (valid) {
        const fabric_plan_instance_t *instance = lane_instance(ffn, lane);
        valid = execution->layer < instance->layers &&
                execution->ranks == fabric_plan_ranks(instance) &&
                execution->form == fabric_instance_form(instance) &&
                instance->layer_group[execution->layer] & 1u << ffn->index;
        for (uint32_t i = 0; i < instance->atn_dp; i++)
            rows += execution->dp_rows[i];
        valid = valid && rows <= (uint64_t)instance->max_rows * instance->atn_dp;
        if (valid)
            lane->group = instance->layer_group[execution->layer];
    }
    if (!valid)
        return fabric_fail_now(fabric,
                               "the Coordinator published an invalid Lane Execution (Lane %u, "
                               "ticket %llu, Instance %u, layer %u)",
                               lane_index, (unsigned long long)execution->ticket,
                               execution->instance, execution->layer);
    lane->ticket = execution->ticket;
    lane->rows = (uint32_t)rows;
    lane->state = FFN_LANE_WAIT_INPUT;
    return XP_OK;
}

static bool ffn_inputs_ready(const fabric_ffn_t *ffn, const ffn_lane_t *lane)
{
    if (lane->execution.form == FABRIC_FORM_EAGER)
        return true; /* the rows were there before the Submission */
    for (uint32_t rank = 0; rank < lane->execution.ranks; rank++)
        if (fabric_word(ffn->fabric,
                        rank_slot(ffn, lane, rank) + offsetof(fabric_slot_t, input_ready)) <
            lane->execution.sequences[rank])
            return false;
    return true;
}

/* PE bits of the Invocation's AtnAgents. */
static uint32_t lane_consumers(const fabric_ffn_t *ffn, const ffn_lane_t *lane)
{
    uint32_t consumers = 0;
    for (uint32_t rank = 0; rank < lane->execution.ranks; rank++)
        consumers |= 1u << lane_instance(ffn, lane)->rank_atn[rank];
    return consumers;
}

static uint64_t lane_output_offset(const fabric_ffn_t *ffn, uint32_t lane_index)
{
    const ffn_lane_t *lane = &ffn->lanes[lane_index];
    return lane->execution.form == FABRIC_FORM_EAGER
               ? ffn->fabric->layout.slot_output[lane->execution.instance]
               : fabric_lane_output(&ffn->fabric->layout, lane_index);
}

/* First member: the complete rows are in place. Completion goes first, so that the Lane is free
 * when the next Submission arrives. */
static void ffn_commit(fabric_ffn_t *ffn, uint32_t lane_index)
{
    fabric_t *fabric = ffn->fabric;
    ffn_lane_t *lane = &ffn->lanes[lane_index];
    uint32_t coordinator = 1u << fabric_coordinator_pe(&fabric->plan);
    uint32_t consumers = lane_consumers(ffn, lane);
    fabric_count(fabric, FABRIC_COUNT_INVOCATIONS, 1);
    fabric_count(fabric, FABRIC_COUNT_ROWS, lane->rows);
    fabric_count(
        fabric,
        lane->execution.form == FABRIC_FORM_EAGER ? FABRIC_COUNT_EAGER : FABRIC_COUNT_LONGFORM, 1);
    fabric_count_instance(fabric, lane->execution.instance, lane->rows);
    lane->state = FFN_LANE_EMPTY;
    if (fabric_is_direct(lane_instance(ffn, lane), lane->group))
        return; /* the partials have been delivered; the consumers' acknowledgements end the lease
                 */
    fabric_publish(fabric, coordinator,
                   fabric_lane_offset(&fabric->layout, lane_index) +
                       offsetof(fabric_lane_t, completion),
                   &lane->ticket, sizeof(lane->ticket));
    for (uint32_t rank = 0; rank < lane->execution.ranks; rank++) {
        fabric_commit_t commit = {.sequence = lane->execution.sequences[rank],
                                  .source = lane->execution.form == FABRIC_FORM_EAGER
                                                ? FABRIC_SOURCE_SLOT
                                                : FABRIC_SOURCE_LANE,
                                  .lane = lane_index};
        fabric_publish(fabric, 1u << lane_instance(ffn, lane)->rank_atn[rank],
                       rank_slot(ffn, lane, rank) + offsetof(fabric_slot_t, commit), &commit,
                       sizeof(commit));
    }
    fabric_signal(fabric, (consumers | coordinator) & ~(1u << fabric->pe));
}

static void ffn_deliver_partial(fabric_ffn_t *ffn, uint32_t lane_index, uint32_t member)
{
    fabric_t *fabric = ffn->fabric;
    ffn_lane_t *lane = &ffn->lanes[lane_index];
    uint32_t first = fabric_group_first(lane->group);
    if (fabric_is_direct(lane_instance(ffn, lane), lane->group)) {
        for (uint32_t rank = 0; rank < lane->execution.ranks; rank++) {
            fabric_direct_partial_t partial = {.sequence = lane->execution.sequences[rank],
                                               .lane = lane_index};
            fabric_publish(fabric, 1u << lane_instance(ffn, lane)->rank_atn[rank],
                           rank_slot(ffn, lane, rank) + offsetof(fabric_slot_t, partial_ready) +
                               member * sizeof(partial),
                           &partial, sizeof(partial));
        }
        uint32_t consumers = lane_consumers(ffn, lane);
        if (ffn->index == first)
            ffn_commit(ffn, lane_index);
        else
            lane->state = FFN_LANE_EMPTY;
        fabric_signal(fabric, consumers);
        return;
    }
    if (ffn->index == first) {
        lane->state = FFN_LANE_WAIT_PARTIALS;
        return;
    }
    uint32_t target = 1u << (fabric->plan.atn_count + first);
    lane->state = FFN_LANE_EMPTY;
    fabric_publish(fabric, target,
                   fabric_lane_offset(&fabric->layout, lane_index) +
                       offsetof(fabric_lane_t, partial_ready) +
                       member * sizeof(fabric_ticket_line_t),
                   &lane->ticket, sizeof(lane->ticket));
    fabric_signal(fabric, target);
}

static void ffn_observe_lane(fabric_ffn_t *ffn, uint32_t lane_index, uint64_t duration_ns)
{
    const ffn_lane_t *lane = &ffn->lanes[lane_index];
    observe_record_t record = {.end_ns = xp_clock_now_ns(&ffn->clock),
                               .duration_ns = duration_ns,
                               .sequence = lane->ticket,
                               .layer = lane->execution.layer,
                               .rows = lane->rows,
                               .instance = (uint16_t)lane->execution.instance,
                               .lane = (uint16_t)lane_index,
                               .graph_template = OBSERVE_NONE};
    if (ffn->describe)
        ffn->describe(ffn->execute_context, lane_instance(ffn, lane)->weights,
                      lane->execution.layer, lane->rows, &record);
    observe_write(ffn->observe, &record);
}

static xp_status_t ffn_execute(fabric_ffn_t *ffn, uint32_t lane_index)
{
    fabric_t *fabric = ffn->fabric;
    ffn_lane_t *lane = &ffn->lanes[lane_index];
    const fabric_plan_instance_t *instance = lane_instance(ffn, lane);
    uint32_t member = fabric_group_member(lane->group, ffn->index);
    bool alone = fabric_group_size(lane->group) == 1;
    uint64_t in = lane->execution.form == FABRIC_FORM_EAGER
                      ? fabric->layout.slot_input[lane->execution.instance]
                      : fabric_lane_input(&fabric->layout, lane_index);
    uint64_t out = alone ? lane_output_offset(ffn, lane_index)
                         : fabric_lane_partial(&fabric->layout, lane_index, member);
    if (ffn->index == fabric_group_first(lane->group)) {
        fabric_routing_t routing = {
            .ticket = lane->ticket, .mode = FABRIC_ROUTING_REPEAT, .rows = lane->rows};
        fabric_publish(fabric,
                       fabric_group_pes(&fabric->plan, lane->group) |
                           1u << fabric_coordinator_pe(&fabric->plan),
                       fabric_lane_offset(&fabric->layout, lane_index) +
                           offsetof(fabric_lane_t, routing),
                       &routing, sizeof(routing));
    }
    uint64_t duration_ns = 0;
    if (lane->rows) {
        bool helped = helper_begin(ffn, lane->rows);
        uint64_t start_ns = xp_clock_now_ns(&ffn->clock);
        xp_status_t status =
            ffn->execute(ffn->execute_context, lane_index, instance->weights, lane->execution.layer,
                         lane->rows, fabric_local(fabric, in), fabric_local(fabric, out));
        duration_ns = xp_clock_now_ns(&ffn->clock) - start_ns;
        fabric_count(fabric, FABRIC_COUNT_BUSY_NS, duration_ns);
        if (helped)
            helper_end(ffn);
        if (status != XP_OK)
            return fabric_fail_now(fabric, "FfnAgent PE %u cannot execute %.24s layer %u: %s",
                                   fabric->pe, instance->id, lane->execution.layer,
                                   xp_error_last()->text);
    }
    fabric_count(fabric, FABRIC_COUNT_SUBMISSIONS, 1);
    if (ffn->observe)
        ffn_observe_lane(ffn, lane_index, duration_ns);
    if (alone)
        ffn_commit(ffn, lane_index);
    else
        ffn_deliver_partial(ffn, lane_index, member);
    return XP_OK;
}

/* First member: reduces once every other member's partial is there. */
static bool ffn_reduce(fabric_ffn_t *ffn, uint32_t lane_index)
{
    fabric_t *fabric = ffn->fabric;
    ffn_lane_t *lane = &ffn->lanes[lane_index];
    uint32_t members = fabric_group_size(lane->group);
    for (uint32_t member = 1; member < members; member++)
        if (fabric_word(fabric, fabric_lane_offset(&fabric->layout, lane_index) +
                                    offsetof(fabric_lane_t, partial_ready) +
                                    member * sizeof(fabric_ticket_line_t)) != lane->ticket)
            return false;
    uint64_t elements = (uint64_t)lane->rows * lane_instance(ffn, lane)->hidden;
    if (elements)
        fabric_reduce(fabric, lane_index, members, 0, elements,
                      fabric_local(fabric, lane_output_offset(ffn, lane_index)));
    ffn_commit(ffn, lane_index);
    return true;
}

static xp_status_t ffn_step_lanes(fabric_ffn_t *ffn, bool *moved_out)
{
    fabric_t *fabric = ffn->fabric;
    uint32_t chosen = FABRIC_MAX_LANES;
    for (uint32_t i = 0; i < fabric->plan.lanes; i++) {
        ffn_lane_t *lane = &ffn->lanes[i];
        uint64_t at = fabric_lane_offset(&fabric->layout, i) + offsetof(fabric_lane_t, execution) +
                      ffn->index * sizeof(fabric_execution_t);
        if (fabric_word(fabric, at) != lane->ticket)
            XP_TRY(ffn_take_execution(ffn, i, at));
        if (lane->state == FFN_LANE_WAIT_PARTIALS && ffn_reduce(ffn, i))
            *moved_out = true;
        /* Leases are executed in the order in which the policy granted them. */
        if (lane->state == FFN_LANE_WAIT_INPUT && ffn_inputs_ready(ffn, lane) &&
            (chosen == FABRIC_MAX_LANES || lane->ticket < ffn->lanes[chosen].ticket))
            chosen = i;
    }
    if (chosen == FABRIC_MAX_LANES)
        return XP_OK;
    *moved_out = true;
    return ffn_execute(ffn, chosen);
}

static bool ffn_atns_have_left(const fabric_ffn_t *ffn)
{
    for (uint32_t pe = 0; pe < ffn->fabric->plan.atn_count; pe++)
        if (fabric_get_state(ffn->fabric, pe) == FABRIC_PE_RUNNING)
            return false;
    return true;
}

static xp_status_t ffn_loop(fabric_ffn_t *ffn)
{
    fabric_t *fabric = ffn->fabric;
    const fabric_provider_ops_t *ops = fabric->provider->ops;
    for (;;) {
        uint32_t seen = ops->observe(fabric->provider);
        if (fabric_has_failed(fabric))
            return fabric_failure(fabric, NULL);
        /* Read before the look: what was in flight when the last AtnAgent left is then seen. */
        bool ending = fabric_is_shutdown(fabric) && ffn_atns_have_left(ffn), moved = false;
        if (ffn->coordinator) {
            xp_status_t status = ffn_step_coordinator(ffn);
            if (status == XP_FATAL)
                return status;
            moved = status == XP_OK;
        }
        XP_TRY(ffn_step_lanes(ffn, &moved));
        if (moved)
            continue;
        if (ending)
            return xp_fail(XP_CLOSED, "the Fabric has been shut down");
        ops->wait(fabric->provider, &ffn->waiter, seen, xp_monotonic_ns() + FABRIC_TICK_NS);
        fabric_count_set(fabric, FABRIC_COUNT_SPINS, ffn->waiter.spins);
        fabric_count_set(fabric, FABRIC_COUNT_SLEEPS, ffn->waiter.sleeps);
    }
}

xp_status_t fabric_ffn_run(fabric_ffn_t *ffn)
{
    XP_TRY(helper_start(ffn));
    fabric_set_state(ffn->fabric, FABRIC_PE_RUNNING);
    xp_status_t status = ffn_loop(ffn);
    fabric_set_state(ffn->fabric, FABRIC_PE_LEFT);
    helper_stop(ffn);
    uint32_t everyone =
        fabric_group_pes(&ffn->fabric->plan, (1u << ffn->fabric->plan.ffn_count) - 1) |
        ((1u << ffn->fabric->plan.atn_count) - 1);
    fabric_signal(ffn->fabric, everyone & ~(1u << ffn->fabric->pe));
    return status;
}
