/* SPDX-License-Identifier: MIT */
/*
 * Coordinator. Owns the queue and the Lane leases; runs on the first FfnAgent's service thread (or
 * its helper while that computes, see ffn.c). Inspects records and never waits for one. The queue
 * is bounded by construction: an Instance has at most one live Invocation.
 *
 *   per Instance   GATHERING ──all ranks' Submissions agree──▶ QUEUED ──Lane leased──▶ LEASED
 *                      ▲  └── abandoned: dropped                └── abandoned: dropped   │
 *                      └───────────────── completed and acknowledged ◀───────────────────┘
 */
#include "fabric/coordinator.h"

#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "fabric/policy.h"

typedef enum coordinator_state {
    COORDINATOR_GATHERING = 0,
    COORDINATOR_QUEUED,
    COORDINATOR_LEASED
} coordinator_state_t;

typedef struct coordinator_instance {
    coordinator_state_t state;
    uint32_t ranks, form;
    uint32_t gathered; /* ranks whose Submission is in submissions[] */
    uint32_t lane;
    uint64_t handled[FABRIC_MAX_RANKS]; /* last sequence dropped or leased */
    fabric_submission_t submissions[FABRIC_MAX_RANKS];
    uint64_t first_ns; /* first Submission of the set seen */
    fabric_waiting_t waiting;
} coordinator_instance_t;

typedef struct coordinator_lane {
    bool leased;
    uint32_t instance, layer, group, rows;
    uint64_t ticket;
} coordinator_lane_t;

struct fabric_coordinator {
    fabric_t *fabric;
    xp_clock_t clock;
    uint64_t arrivals, tickets, random_state;
    uint64_t last_step_ns, last_check_ns;
    uint32_t queued, leased, leased_peak;
    coordinator_lane_t lanes[FABRIC_MAX_LANES];
    coordinator_instance_t instances[FABRIC_MAX_INSTANCES];
};

xp_status_t fabric_coordinator_create(fabric_t *fabric, xp_clock_t clock,
                                      fabric_coordinator_t **coordinator_out)
{
    fabric_coordinator_t *c = calloc(1, sizeof(*c));
    if (!c)
        return xp_fail(XP_NO_MEMORY, "no memory for the Coordinator");
    c->fabric = fabric;
    c->clock = clock;
    c->random_state = fabric->plan.seed;
    c->last_step_ns = c->last_check_ns = xp_clock_now_ns(&clock);
    for (uint32_t i = 0; i < fabric->plan.instance_count; i++) {
        c->instances[i].ranks = fabric_plan_ranks(&fabric->plan.instances[i]);
        c->instances[i].form = fabric_instance_form(&fabric->plan.instances[i]);
    }
    *coordinator_out = c;
    return XP_OK;
}

void fabric_coordinator_destroy(fabric_coordinator_t *coordinator)
{
    free(coordinator);
}

static uint32_t rank_pe(const fabric_coordinator_t *c, uint32_t index, uint32_t rank)
{
    return c->fabric->plan.instances[index].rank_atn[rank];
}

/* Says NONE to a rank whose Submission will not be executed. */
static void coordinator_drop(fabric_coordinator_t *c, uint32_t index, uint32_t rank)
{
    coordinator_instance_t *instance = &c->instances[index];
    uint32_t target = 1u << rank_pe(c, index, rank);
    fabric_commit_t commit = {.sequence = instance->submissions[rank].sequence,
                              .source = FABRIC_SOURCE_NONE};
    instance->handled[rank] = commit.sequence;
    instance->gathered &= ~(1u << rank);
    if (instance->state == COORDINATOR_QUEUED) {
        instance->state = COORDINATOR_GATHERING;
        c->queued--;
    }
    fabric_publish(c->fabric, target,
                   fabric_slot_offset(&c->fabric->layout, index, rank) +
                       offsetof(fabric_slot_t, commit),
                   &commit, sizeof(commit));
    fabric_signal(c->fabric, target);
}

/* A Submission is checked like any record from a peer before a field of it is used. */
static xp_status_t coordinator_check(fabric_coordinator_t *c, uint32_t index, uint32_t rank)
{
    const fabric_plan_instance_t *plan = &c->fabric->plan.instances[index];
    const coordinator_instance_t *instance = &c->instances[index];
    const fabric_submission_t *submission = &instance->submissions[rank];
    uint32_t dp = rank / plan->atn_tp;
    bool valid = submission->sequence == instance->handled[rank] + 1 &&
                 submission->layer < plan->layers && submission->form == instance->form &&
                 submission->kind < MAILBOX_KIND_COUNT &&
                 submission->rows == submission->dp_rows[dp];
    for (uint32_t i = 0; i < plan->atn_dp; i++)
        valid = valid && submission->dp_rows[i] <= plan->max_rows;
    if (!valid)
        return fabric_fail_now(
            c->fabric,
            "AtnAgent PE %u published an invalid Submission for %.24s (sequence %llu, layer %u, "
            "rows %u)",
            rank_pe(c, index, rank), plan->id, (unsigned long long)submission->sequence,
            submission->layer, submission->rows);
    if (!instance->gathered)
        return XP_OK;
    uint32_t first = (uint32_t)__builtin_ctz(instance->gathered);
    const fabric_submission_t *other = &instance->submissions[first];
    if (submission->request != other->request || submission->layer != other->layer ||
        submission->kind != other->kind ||
        memcmp(submission->dp_rows, other->dp_rows, plan->atn_dp * sizeof(uint32_t)) != 0)
        return fabric_fail_now(
            c->fabric,
            "%.20s: AtnAgent PE %u (layer %u, request %llu, %u rows) and PE %u (layer %u, request "
            "%llu, %u rows) disagree",
            plan->id, rank_pe(c, index, first), other->layer, (unsigned long long)other->request,
            other->rows, rank_pe(c, index, rank), submission->layer,
            (unsigned long long)submission->request, submission->rows);
    return XP_OK;
}

static void coordinator_queue(fabric_coordinator_t *c, uint32_t index)
{
    coordinator_instance_t *instance = &c->instances[index];
    uint64_t deadline_ns = 0;
    for (uint32_t rank = 0; rank < instance->ranks; rank++) {
        uint64_t rank_ns = instance->submissions[rank].slo_deadline_ns;
        if (rank_ns && (!deadline_ns || rank_ns < deadline_ns))
            deadline_ns = rank_ns;
    }
    instance->state = COORDINATOR_QUEUED;
    instance->waiting =
        (fabric_waiting_t){.arrival = ++c->arrivals, .deadline_ns = deadline_ns, .instance = index};
    c->queued++;
}

static xp_status_t coordinator_gather(fabric_coordinator_t *c, uint32_t index, uint64_t now_ns)
{
    fabric_t *fabric = c->fabric;
    coordinator_instance_t *instance = &c->instances[index];
    bool moved = false;
    for (uint32_t rank = 0; rank < instance->ranks; rank++) {
        uint64_t slot = fabric_slot_offset(&fabric->layout, index, rank);
        if (!(instance->gathered & 1u << rank)) {
            uint64_t at = slot + offsetof(fabric_slot_t, submission);
            if (fabric_word(fabric, at) == instance->handled[rank])
                continue;
            fabric_record_load(fabric, at, sizeof(fabric_submission_t),
                               &instance->submissions[rank]);
            XP_TRY(coordinator_check(c, index, rank));
            if (!instance->gathered)
                instance->first_ns = now_ns;
            instance->gathered |= 1u << rank;
            moved = true;
        }
        if (fabric_word(fabric, slot + offsetof(fabric_slot_t, abandon)) >=
            instance->submissions[rank].sequence) {
            coordinator_drop(c, index, rank);
            moved = true;
        }
    }
    uint32_t all = (1u << instance->ranks) - 1;
    if (instance->state == COORDINATOR_GATHERING && instance->gathered == all)
        coordinator_queue(c, index);
    if (instance->state == COORDINATOR_GATHERING && instance->gathered &&
        fabric_is_shutdown(fabric)) {
        /* The others may have stopped accepting requests: this set will never be complete. */
        for (uint32_t rank = 0; rank < instance->ranks; rank++)
            if (instance->gathered & 1u << rank)
                coordinator_drop(c, index, rank);
        moved = true;
    }
    return moved ? XP_OK : XP_RETRY;
}

static void coordinator_lease(fabric_coordinator_t *c, uint32_t lane_index, uint32_t index,
                              uint64_t now_ns)
{
    fabric_t *fabric = c->fabric;
    const fabric_plan_instance_t *plan = &fabric->plan.instances[index];
    coordinator_instance_t *instance = &c->instances[index];
    const fabric_submission_t *first = &instance->submissions[0];
    coordinator_lane_t *lane = &c->lanes[lane_index];
    *lane = (coordinator_lane_t){.leased = true,
                                 .instance = index,
                                 .layer = first->layer,
                                 .group = plan->layer_group[first->layer],
                                 .ticket = ++c->tickets};
    instance->state = COORDINATOR_LEASED;
    instance->lane = lane_index;
    c->queued--;
    c->leased++;
    fabric_count(fabric, FABRIC_COUNT_LANES_LEASED, 1);
    fabric_count_set(fabric, FABRIC_COUNT_LANES_IN_USE, c->leased);
    if (now_ns > first->submitted_ns)
        fabric_count(fabric, FABRIC_COUNT_QUEUE_NS, now_ns - first->submitted_ns);
    if (c->leased > c->leased_peak) {
        c->leased_peak = c->leased;
        fabric_count_set(fabric, FABRIC_COUNT_LANES_PEAK, c->leased);
    }

    fabric_execution_t execution = {.ticket = lane->ticket,
                                    .instance = index,
                                    .layer = lane->layer,
                                    .form = instance->form,
                                    .ranks = instance->ranks};
    memcpy(execution.dp_rows, first->dp_rows, sizeof(execution.dp_rows));
    uint32_t signal = fabric_group_pes(&fabric->plan, lane->group);
    uint32_t row_offset = 0;
    for (uint32_t i = 0; i < plan->atn_dp; i++)
        lane->rows += first->dp_rows[i];
    for (uint32_t rank = 0; rank < instance->ranks; rank++) {
        execution.sequences[rank] = instance->submissions[rank].sequence;
        instance->handled[rank] = execution.sequences[rank];
        if (rank && rank % plan->atn_tp == 0)
            row_offset += first->dp_rows[rank / plan->atn_tp - 1];
        if (instance->form == FABRIC_FORM_EAGER)
            continue;
        fabric_admission_t admission = {
            .sequence = execution.sequences[rank], .lane = lane_index, .row_offset = row_offset};
        uint32_t target = 1u << plan->rank_atn[rank];
        fabric_publish(fabric, target,
                       fabric_slot_offset(&fabric->layout, index, rank) +
                           offsetof(fabric_slot_t, admission),
                       &admission, sizeof(admission));
        signal |= target;
    }
    for (uint32_t group = lane->group; group; group &= group - 1) {
        uint32_t ffn = fabric_group_first(group);
        fabric_publish(fabric, 1u << (fabric->plan.atn_count + ffn),
                       fabric_lane_offset(&fabric->layout, lane_index) +
                           offsetof(fabric_lane_t, execution) + ffn * sizeof(fabric_execution_t),
                       &execution, sizeof(execution));
    }
    /* This FfnAgent's own loop looks at its Lanes after this step anyway. */
    fabric_signal(fabric, signal & ~(1u << fabric->pe));
}

static bool coordinator_admit(fabric_coordinator_t *c, uint64_t now_ns)
{
    bool moved = false;
    for (uint32_t lane = 0; c->queued && lane < c->fabric->plan.lanes; lane++) {
        if (c->lanes[lane].leased)
            continue;
        fabric_waiting_t waiting[FABRIC_MAX_INSTANCES];
        uint32_t count = 0;
        for (uint32_t i = 0; i < c->fabric->plan.instance_count; i++)
            if (c->instances[i].state == COORDINATOR_QUEUED)
                waiting[count++] = c->instances[i].waiting;
        uint32_t chosen = fabric_policy_choose((fabric_policy_t)c->fabric->plan.policy,
                                               &c->random_state, waiting, count);
        for (uint32_t i = 0; i < count; i++)
            c->instances[waiting[i].instance].waiting.passes = waiting[i].passes;
        coordinator_lease(c, lane, waiting[chosen].instance, now_ns);
        moved = true;
    }
    return moved;
}

static bool slot_word_reached(const fabric_coordinator_t *c, uint32_t index, uint32_t rank,
                              size_t field)
{
    uint64_t at = fabric_slot_offset(&c->fabric->layout, index, rank) + field;
    return fabric_word(c->fabric, at) >= c->instances[index].handled[rank];
}

static bool lane_completed(const fabric_coordinator_t *c, uint32_t lane_index)
{
    uint64_t at =
        fabric_lane_offset(&c->fabric->layout, lane_index) + offsetof(fabric_lane_t, completion);
    return fabric_word(c->fabric, at) == c->lanes[lane_index].ticket;
}

/* Gives the Lane back once nobody reads or writes it any more: members are done when the first one
 * has completed (or, under DIRECT_PARTIAL, all consumers have reduced), consumers when they have
 * acknowledged. Eager outputs lie in the slot, which the next Submission frees. */
static xp_status_t coordinator_release(fabric_coordinator_t *c, uint32_t lane_index)
{
    coordinator_lane_t *lane = &c->lanes[lane_index];
    const fabric_plan_instance_t *plan = &c->fabric->plan.instances[lane->instance];
    coordinator_instance_t *instance = &c->instances[lane->instance];
    bool direct = fabric_is_direct(plan, lane->group);
    if (!direct && !lane_completed(c, lane_index))
        return XP_RETRY;
    if (direct || instance->form == FABRIC_FORM_LONG)
        for (uint32_t rank = 0; rank < instance->ranks; rank++)
            if (!slot_word_reached(c, lane->instance, rank, offsetof(fabric_slot_t, output_ack)))
                return XP_RETRY;
    /* The shards' partials belong together only if all routed the same rows in the same way. */
    fabric_routing_t routing;
    fabric_record_load(c->fabric,
                       fabric_lane_offset(&c->fabric->layout, lane_index) +
                           offsetof(fabric_lane_t, routing),
                       sizeof(routing), &routing);
    if (routing.ticket != lane->ticket || routing.rows != lane->rows ||
        routing.mode != FABRIC_ROUTING_REPEAT)
        return fabric_fail_now(c->fabric, "%.32s layer %u: FfnAgent PE %u routed %u rows, not %u",
                               plan->id, lane->layer,
                               c->fabric->plan.atn_count + fabric_group_first(lane->group),
                               routing.rows, lane->rows);
    lane->leased = false;
    c->leased--;
    fabric_count_set(c->fabric, FABRIC_COUNT_LANES_IN_USE, c->leased);
    instance->state = COORDINATOR_GATHERING;
    instance->gathered = 0;
    return XP_OK;
}

/* The PE that a leased Invocation waits for. */
static uint32_t coordinator_blames(const fabric_coordinator_t *c, uint32_t lane_index)
{
    const coordinator_lane_t *lane = &c->lanes[lane_index];
    const fabric_plan_instance_t *plan = &c->fabric->plan.instances[lane->instance];
    const coordinator_instance_t *instance = &c->instances[lane->instance];
    uint32_t atn_count = c->fabric->plan.atn_count;
    for (uint32_t rank = 0; instance->form == FABRIC_FORM_LONG && rank < instance->ranks; rank++)
        if (!slot_word_reached(c, lane->instance, rank, offsetof(fabric_slot_t, input_ready)))
            return plan->rank_atn[rank];
    bool direct = fabric_is_direct(plan, lane->group);
    if (direct || !lane_completed(c, lane_index)) {
        uint32_t first = fabric_group_first(lane->group);
        for (uint32_t group = lane->group; group; group &= group - 1) {
            uint32_t ffn = fabric_group_first(group);
            uint32_t member = fabric_group_member(lane->group, ffn);
            uint64_t at, expected;
            if (direct) {
                at = fabric_slot_offset(&c->fabric->layout, lane->instance, 0) +
                     offsetof(fabric_slot_t, partial_ready) +
                     member * sizeof(fabric_direct_partial_t);
                expected = instance->handled[0];
            } else {
                at = fabric_lane_offset(&c->fabric->layout, lane_index) +
                     offsetof(fabric_lane_t, partial_ready) + member * sizeof(fabric_ticket_line_t);
                expected = lane->ticket;
            }
            if ((direct || ffn != first) && fabric_word(c->fabric, at) != expected)
                return atn_count + ffn;
        }
        if (!direct)
            return atn_count + first;
    }
    for (uint32_t rank = 0; rank < instance->ranks; rank++)
        if (!slot_word_reached(c, lane->instance, rank, offsetof(fabric_slot_t, output_ack)))
            return plan->rank_atn[rank];
    return c->fabric->pe;
}

/* Fails the Generation when an Invocation has waited too long for another PE. What waits for this
 * FfnAgent itself is not late: it is about to be done. */
static xp_status_t coordinator_check_timeouts(fabric_coordinator_t *c, uint64_t now_ns)
{
    uint64_t limit_ns = c->fabric->plan.submission_timeout_ns;
    for (uint32_t i = 0; i < c->fabric->plan.instance_count; i++) {
        coordinator_instance_t *instance = &c->instances[i];
        if (!instance->gathered || now_ns - instance->first_ns <= limit_ns)
            continue;
        uint32_t known = (uint32_t)__builtin_ctz(instance->gathered), blamed = c->fabric->pe;
        const char *what = "";
        if (instance->state == COORDINATOR_LEASED) {
            blamed = coordinator_blames(c, instance->lane);
            what = blamed < c->fabric->plan.atn_count ? "rows or acknowledgement of AtnAgent"
                                                      : "FfnAgent";
        } else if (instance->state == COORDINATOR_GATHERING) {
            for (uint32_t rank = 0; rank < instance->ranks; rank++)
                if (!(instance->gathered & 1u << rank))
                    blamed = rank_pe(c, i, rank);
            what = "Submission of AtnAgent";
        }
        if (blamed == c->fabric->pe)
            continue;
        return fabric_fail_now(c->fabric,
                               "%.32s layer %u: no answer in %llu ms, waiting for %s PE %u",
                               c->fabric->plan.instances[i].id, instance->submissions[known].layer,
                               (unsigned long long)(limit_ns / XP_NS_PER_MS), what, blamed);
    }
    return XP_OK;
}

xp_status_t fabric_coordinator_step(fabric_coordinator_t *c)
{
    uint64_t now_ns = xp_clock_now_ns(&c->clock);
    uint64_t gap_ns = now_ns - c->last_step_ns;
    bool moved = false;
    c->last_step_ns = now_ns;
    for (uint32_t i = 0; gap_ns > FABRIC_GAP_NS && i < c->fabric->plan.instance_count; i++)
        c->instances[i].first_ns += gap_ns;
    for (uint32_t lane = 0; c->leased && lane < c->fabric->plan.lanes; lane++)
        if (c->lanes[lane].leased) {
            xp_status_t status = coordinator_release(c, lane);
            if (status == XP_FATAL)
                return status;
            moved |= status == XP_OK;
        }
    for (uint32_t i = 0; i < c->fabric->plan.instance_count; i++) {
        if (c->instances[i].state == COORDINATOR_LEASED)
            continue;
        xp_status_t status = coordinator_gather(c, i, now_ns);
        if (status == XP_FATAL)
            return status;
        moved |= status == XP_OK;
    }
    /* Under load every step moves something: ages are looked at once a tick all the same. Before
     * Lanes are leased, since whoever gets one now has not kept anybody waiting in it. */
    if (!moved || now_ns - c->last_check_ns >= FABRIC_TICK_NS) {
        c->last_check_ns = now_ns;
        XP_TRY(coordinator_check_timeouts(c, now_ns));
    }
    moved |= coordinator_admit(c, now_ns);
    return moved ? XP_OK : XP_RETRY;
}
