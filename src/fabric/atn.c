/* SPDX-License-Identifier: MIT */
/*
 * AtnAgent service: carries the requests of its Transport arenas into the Fabric and the rows back.
 * Owns the attached arenas and this AtnAgent's half of each slot; one thread runs it. Attach and
 * detach come from other threads through an inbox under a lock, which the loop touches only when
 * there is something in it. Allocates nothing once created; never waits for anything but its
 * doorbell.
 *
 *   IDLE ──request──▶ WAIT_COMMIT (eager)                                  ──rows copied──▶ IDLE
 *     └──request──▶ WAIT_ADMISSION ──rows into the Lane──▶ WAIT_COMMIT (long)  ──rows, ack──▶ IDLE
 *
 * An arena that is detached in mid-Submission leaves its slot going through the same states without
 * rows, so that the Lane comes back; only then does the slot serve a new arena.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "fabric/internal.h"

typedef enum atn_state { ATN_IDLE = 0, ATN_WAIT_ADMISSION, ATN_WAIT_COMMIT } atn_state_t;

typedef struct atn_slot {
    uint32_t instance, rank;
    uint64_t offset; /* of the slot's records */
    /* Inbox, under the lock. */
    bool occupied;                /* attached, and neither detached nor dropped since */
    bool dropped;                 /* the service gave the last arena up before it was detached */
    bool detach;                  /* give up what the service has */
    transport_server_t *incoming; /* take this next */
    /* The service thread's. */
    transport_server_t *server; /* NULL: none, or detached while the slot finishes */
    atn_state_t state;
    bool abandoned;
    uint64_t sequence; /* of this slot; survives arenas */
    uint64_t submitted_ns;
    transport_pending_t pending;
    uint32_t group, lane, row_offset;
} atn_slot_t;

struct fabric_atn {
    fabric_t *fabric;
    xp_clock_t clock;
    transport_waiter_t waiter;
    observe_t *observe; /* NULL: nobody looks */
    bool keep;          /* arenas stay open after a failure */
    uint64_t last_look_ns;
    pthread_mutex_t lock;
    uint32_t inbox; /* not 0: some slot's inbox has news */
    uint32_t slot_count;
    atn_slot_t slots[]; /* those of this AtnAgent's ranks */
};

xp_status_t fabric_atn_create(fabric_t *fabric, xp_clock_t clock, fabric_atn_t **atn_out)
{
    if (fabric->pe >= fabric->plan.atn_count)
        return xp_fail(XP_INVALID, "PE %u is no AtnAgent", fabric->pe);
    fabric_atn_t *atn = calloc(1, sizeof(*atn) + fabric->layout.slot_count * sizeof(atn_slot_t));
    if (!atn)
        return xp_fail(XP_NO_MEMORY, "no memory for the AtnAgent service");
    atn->fabric = fabric;
    atn->clock = clock;
    pthread_mutex_init(&atn->lock, NULL);
    transport_waiter_init(&atn->waiter, fabric->plan.spin_ns);
    for (uint32_t i = 0; i < fabric->plan.instance_count; i++) {
        const fabric_plan_instance_t *instance = &fabric->plan.instances[i];
        for (uint32_t rank = 0; rank < fabric_plan_ranks(instance); rank++) {
            if (instance->rank_atn[rank] != fabric->pe)
                continue;
            uint64_t offset = fabric_slot_offset(&fabric->layout, i, rank);
            atn->slots[atn->slot_count++] =
                (atn_slot_t){.instance = i, .rank = rank, .offset = offset};
        }
    }
    *atn_out = atn;
    return XP_OK;
}

void fabric_atn_observe(fabric_atn_t *atn, observe_t *observe)
{
    atn->observe = observe;
    for (uint32_t i = 0; observe && i < atn->fabric->plan.instance_count; i++)
        observe_name_instance(observe, i, atn->fabric->plan.instances[i].id);
}

void fabric_atn_keep_arenas(fabric_atn_t *atn)
{
    atn->keep = true;
}

static void atn_drop_server(transport_server_t *server, xp_status_t reason)
{
    if (!server)
        return;
    transport_server_close(server, reason);
    transport_server_destroy(server);
}

void fabric_atn_destroy(fabric_atn_t *atn)
{
    if (!atn)
        return;
    bool keep = atn->keep && fabric_has_failed(atn->fabric);
    for (uint32_t i = 0; i < atn->slot_count; i++) {
        transport_server_t *servers[] = {atn->slots[i].server, atn->slots[i].incoming};
        for (uint32_t s = 0; s < 2; s++)
            if (keep)
                transport_server_destroy(servers[s]);
            else
                atn_drop_server(servers[s], XP_CLOSED);
    }
    pthread_mutex_destroy(&atn->lock);
    free(atn);
}

static xp_status_t atn_find(fabric_atn_t *atn, uint32_t instance, uint32_t rank,
                            atn_slot_t **slot_out)
{
    for (uint32_t i = 0; i < atn->slot_count; i++) {
        atn_slot_t *slot = &atn->slots[i];
        if (slot->instance == instance && slot->rank == rank) {
            *slot_out = slot;
            return XP_OK;
        }
    }
    return xp_fail(XP_NOT_FOUND, "AtnAgent PE %u does not serve rank %u of Instance %u",
                   atn->fabric->pe, rank, instance);
}

static void atn_post(fabric_atn_t *atn)
{
    /* release: pairs with the acquire load in atn_take_inbox; the lock orders the rest. */
    PROTOCOL_STORE_RELEASE(&atn->inbox, 1u);
    fabric_signal(atn->fabric, 1u << atn->fabric->pe);
}

/* An arena of another shape would be read and written beyond its rows. */
static xp_status_t atn_check_geometry(const fabric_plan_instance_t *instance, uint32_t rank,
                                      const transport_server_t *server)
{
    if (!server)
        return xp_fail(XP_INVALID, "no arena for rank %u of %s", rank, instance->id);
    transport_geometry_t has = transport_server_geometry(server);
    if (has.hidden != instance->hidden || has.max_rows != instance->max_rows ||
        has.dp_size != instance->atn_dp || (uint32_t)has.dtype != instance->dtype)
        return xp_fail(XP_INVALID,
                       "the arena for rank %u of %s is %u x %u, dtype %s, DP %u; the Fabric plan "
                       "says %u x %u, dtype %s, DP %u",
                       rank, instance->id, has.max_rows, has.hidden, xp_dtype_name(has.dtype),
                       has.dp_size, instance->max_rows, instance->hidden,
                       xp_dtype_name((xp_dtype_t)instance->dtype), instance->atn_dp);
    return XP_OK;
}

xp_status_t fabric_atn_attach(fabric_atn_t *atn, uint32_t instance, uint32_t rank,
                              transport_server_t *server)
{
    atn_slot_t *slot = NULL;
    xp_status_t status = XP_OK;
    XP_TRY(atn_find(atn, instance, rank, &slot));
    XP_TRY(atn_check_geometry(&atn->fabric->plan.instances[instance], rank, server));
    pthread_mutex_lock(&atn->lock);
    if (slot->occupied) {
        status = xp_fail(XP_INVALID, "rank %u of %s has an arena already", rank,
                         atn->fabric->plan.instances[instance].id);
    } else {
        slot->occupied = true;
        slot->dropped = false;
        slot->incoming = server;
        atn_post(atn);
    }
    pthread_mutex_unlock(&atn->lock);
    return status;
}

xp_status_t fabric_atn_detach(fabric_atn_t *atn, uint32_t instance, uint32_t rank)
{
    atn_slot_t *slot = NULL;
    xp_status_t status = XP_OK;
    XP_TRY(atn_find(atn, instance, rank, &slot));
    pthread_mutex_lock(&atn->lock);
    if (slot->dropped) {
        slot->dropped = false;
    } else if (!slot->occupied) {
        status = xp_fail(XP_NOT_FOUND, "rank %u of %s has no arena", rank,
                         atn->fabric->plan.instances[instance].id);
    } else {
        slot->occupied = false;
        if (slot->incoming) {
            atn_drop_server(slot->incoming, XP_CLOSED);
            slot->incoming = NULL;
        } else {
            slot->detach = true;
            atn_post(atn);
        }
    }
    pthread_mutex_unlock(&atn->lock);
    return status;
}

/* Parts with the slot's arena. What is in flight goes on without it. */
static void atn_abandon(fabric_atn_t *atn, atn_slot_t *slot, xp_status_t reason)
{
    atn_drop_server(slot->server, reason);
    slot->server = NULL;
    if (slot->state == ATN_IDLE || slot->abandoned)
        return;
    uint32_t coordinator = 1u << fabric_coordinator_pe(&atn->fabric->plan);
    slot->abandoned = true;
    fabric_count(atn->fabric, FABRIC_COUNT_ABANDONED, 1);
    fabric_publish(atn->fabric, coordinator, slot->offset + offsetof(fabric_slot_t, abandon),
                   &slot->sequence, sizeof(slot->sequence));
    fabric_signal(atn->fabric, coordinator);
}

/* An arena that ended by itself (its Instance closed it, or wrote nonsense) frees its place. */
static void atn_lost(fabric_atn_t *atn, atn_slot_t *slot, xp_status_t reason)
{
    pthread_mutex_lock(&atn->lock);
    if (slot->occupied && !slot->incoming) { /* else it was being detached already */
        slot->occupied = false;
        slot->dropped = true;
    }
    slot->detach = false;
    pthread_mutex_unlock(&atn->lock);
    atn_abandon(atn, slot, reason);
}

static bool atn_take_inbox(fabric_atn_t *atn)
{
    if (!PROTOCOL_LOAD_ACQUIRE(&atn->inbox))
        return false;
    bool moved = false, left = false;
    pthread_mutex_lock(&atn->lock);
    for (uint32_t i = 0; i < atn->slot_count; i++) {
        atn_slot_t *slot = &atn->slots[i];
        if (slot->detach) {
            slot->detach = false;
            atn_abandon(atn, slot, XP_CLOSED);
            moved = true;
        }
        if (!slot->incoming)
            continue;
        if (slot->state == ATN_IDLE) {
            slot->server = slot->incoming;
            slot->incoming = NULL;
            moved = true;
        } else {
            left = true; /* the abandoned Submission has to come back first */
        }
    }
    PROTOCOL_STORE_RELEASE(&atn->inbox, left ? 1u : 0u);
    pthread_mutex_unlock(&atn->lock);
    return moved;
}

static void atn_submit(fabric_atn_t *atn, atn_slot_t *slot, uint32_t form)
{
    fabric_t *fabric = atn->fabric;
    const fabric_plan_instance_t *instance = &fabric->plan.instances[slot->instance];
    const transport_pending_t *pending = &slot->pending;
    uint32_t coordinator = 1u << fabric_coordinator_pe(&fabric->plan);
    slot->group = instance->layer_group[pending->layer];
    slot->submitted_ns = xp_clock_now_ns(&atn->clock);
    slot->abandoned = false;
    slot->state = form == FABRIC_FORM_EAGER ? ATN_WAIT_COMMIT : ATN_WAIT_ADMISSION;
    if (form == FABRIC_FORM_EAGER)
        fabric->provider->ops->put(fabric->provider, fabric_group_pes(&fabric->plan, slot->group),
                                   fabric->layout.slot_input[slot->instance], pending->input,
                                   pending->rows * fabric_row_bytes(instance));
    fabric_submission_t submission = {.sequence = ++slot->sequence,
                                      .request = pending->sequence,
                                      .slo_deadline_ns = pending->slo_deadline_ns,
                                      .submitted_ns = slot->submitted_ns,
                                      .layer = pending->layer,
                                      .rows = pending->rows,
                                      .kind = pending->kind,
                                      .form = form};
    memcpy(submission.dp_rows, pending->dp_rows, sizeof(submission.dp_rows));
    fabric_publish(fabric, coordinator, slot->offset + offsetof(fabric_slot_t, submission),
                   &submission, sizeof(submission));
    fabric_signal(fabric, coordinator);
    fabric_count(fabric, FABRIC_COUNT_SUBMISSIONS, 1);
}

/* IDLE: is there a request? */
static bool atn_accept(fabric_atn_t *atn, atn_slot_t *slot)
{
    if (!slot->server)
        return false;
    const fabric_plan_instance_t *instance = &atn->fabric->plan.instances[slot->instance];
    xp_status_t status = transport_server_poll(slot->server, &slot->pending);
    if (status == XP_RETRY)
        return false;
    if (status != XP_OK) {
        atn_lost(atn, slot, status == XP_CLOSED ? XP_CLOSED : XP_PEER);
        return true;
    }
    /* Good for this arena's shape but not for this model: the caller's mistake, and only its. */
    if (slot->pending.layer >= instance->layers ||
        slot->pending.rows != slot->pending.dp_rows[slot->rank / instance->atn_tp]) {
        transport_server_complete(slot->server, slot->pending.sequence, XP_INVALID);
        return true;
    }
    atn_submit(atn, slot, fabric_instance_form(instance));
    return true;
}

/* WAIT_ADMISSION: the Lane is ours, the rows go into it. */
static xp_status_t atn_deliver_input(fabric_atn_t *atn, atn_slot_t *slot)
{
    fabric_t *fabric = atn->fabric;
    const fabric_plan_instance_t *instance = &fabric->plan.instances[slot->instance];
    fabric_admission_t admission;
    fabric_record_load(fabric, slot->offset + offsetof(fabric_slot_t, admission), sizeof(admission),
                       &admission);
    uint64_t end = (uint64_t)admission.row_offset + slot->pending.rows;
    if (admission.lane >= fabric->plan.lanes || end > instance->max_rows * instance->atn_dp)
        return fabric_fail_now(fabric, "the Coordinator admitted %.32s to Lane %u, rows from %u",
                               instance->id, admission.lane, admission.row_offset);
    slot->lane = admission.lane;
    slot->row_offset = admission.row_offset;
    uint32_t group = fabric_group_pes(&fabric->plan, slot->group);
    uint64_t row_bytes = fabric_row_bytes(instance);
    /* Attention TP ranks hold the same rows: the first one's are used. */
    if (slot->server && slot->rank % instance->atn_tp == 0)
        fabric->provider->ops->put(fabric->provider, group,
                                   fabric_lane_input(&fabric->layout, slot->lane) +
                                       slot->row_offset * row_bytes,
                                   slot->pending.input, slot->pending.rows * row_bytes);
    fabric_publish(fabric, group, slot->offset + offsetof(fabric_slot_t, input_ready),
                   &slot->sequence, sizeof(slot->sequence));
    fabric_signal(fabric, group);
    slot->state = ATN_WAIT_COMMIT;
    return XP_OK;
}

static void atn_observe_slot(fabric_atn_t *atn, const atn_slot_t *slot, uint32_t lane)
{
    uint64_t now_ns = xp_clock_now_ns(&atn->clock);
    observe_record_t record = {.end_ns = now_ns,
                               .duration_ns = now_ns - slot->submitted_ns,
                               .sequence = slot->sequence,
                               .request = slot->pending.sequence,
                               .layer = slot->pending.layer,
                               .rows = slot->pending.rows,
                               .instance = (uint16_t)slot->instance,
                               .rank = (uint16_t)slot->rank,
                               .lane = (uint16_t)lane,
                               .graph_template = OBSERVE_NONE,
                               .step = (uint8_t)slot->pending.kind};
    observe_write(atn->observe, &record);
}

/* The rows have been taken (or are not wanted any more): the slot is free, the Lane acknowledged.
 */
static void atn_finish(fabric_atn_t *atn, atn_slot_t *slot, xp_status_t status, uint32_t lane,
                       bool acknowledge)
{
    fabric_t *fabric = atn->fabric;
    bool is_long =
        fabric_instance_form(&fabric->plan.instances[slot->instance]) == FABRIC_FORM_LONG;
    if (status == XP_OK && !slot->abandoned) {
        fabric_count(fabric, FABRIC_COUNT_INVOCATIONS, 1);
        fabric_count(fabric, FABRIC_COUNT_ROWS, slot->pending.rows);
        fabric_count(fabric, is_long ? FABRIC_COUNT_LONGFORM : FABRIC_COUNT_EAGER, 1);
    }
    if (slot->server && !slot->abandoned)
        transport_server_complete(slot->server, slot->pending.sequence, status);
    if (atn->observe && status == XP_OK && !slot->abandoned)
        atn_observe_slot(atn, slot, lane);
    slot->state = ATN_IDLE;
    slot->abandoned = false;
    if (!acknowledge)
        return;
    uint32_t coordinator = 1u << fabric_coordinator_pe(&fabric->plan);
    fabric_publish(fabric, coordinator, slot->offset + offsetof(fabric_slot_t, output_ack),
                   &slot->sequence, sizeof(slot->sequence));
    fabric_signal(fabric, coordinator);
}

/* WAIT_COMMIT under DIRECT_PARTIAL: reduces in PE order once every member's partial is there. */
static xp_status_t atn_take_partials(fabric_atn_t *atn, atn_slot_t *slot, bool *moved_out)
{
    fabric_t *fabric = atn->fabric;
    const fabric_plan_instance_t *instance = &fabric->plan.instances[slot->instance];
    bool is_long = fabric_instance_form(instance) == FABRIC_FORM_LONG;
    uint32_t members = fabric_group_size(slot->group), lane = 0;
    for (uint32_t member = 0; member < members; member++) {
        fabric_direct_partial_t partial;
        uint64_t at = slot->offset + offsetof(fabric_slot_t, partial_ready) +
                      member * sizeof(fabric_direct_partial_t);
        if (fabric_word(fabric, at) != slot->sequence)
            return XP_OK;
        fabric_record_load(fabric, at, sizeof(partial), &partial);
        if (partial.lane >= fabric->plan.lanes || (member && partial.lane != lane) ||
            (is_long && partial.lane != slot->lane))
            return fabric_fail_now(fabric, "%.32s layer %u: member %u's partial is in Lane %u",
                                   instance->id, slot->pending.layer, member, partial.lane);
        lane = partial.lane;
    }
    *moved_out = true;
    if (!slot->abandoned) {
        uint64_t first = slot->row_offset * fabric_row_bytes(instance);
        uint64_t elements = (uint64_t)slot->pending.rows * instance->hidden;
        fabric_reduce(fabric, lane, members, first, elements, slot->pending.output);
    }
    atn_finish(atn, slot, XP_OK, lane, true);
    return XP_OK;
}

/* WAIT_COMMIT: the complete rows. */
static xp_status_t atn_take_commit(fabric_atn_t *atn, atn_slot_t *slot)
{
    fabric_t *fabric = atn->fabric;
    const fabric_plan_instance_t *instance = &fabric->plan.instances[slot->instance];
    uint64_t row_bytes = fabric_row_bytes(instance), from;
    bool is_long = fabric_instance_form(instance) == FABRIC_FORM_LONG;
    fabric_commit_t commit;
    fabric_record_load(fabric, slot->offset + offsetof(fabric_slot_t, commit), sizeof(commit),
                       &commit);
    /* Only what lost its Instance, or is cut off by the shutdown, is dropped. */
    if (commit.source == FABRIC_SOURCE_NONE && (slot->abandoned || fabric_is_shutdown(fabric))) {
        atn_finish(atn, slot, XP_CLOSED, OBSERVE_NONE, false);
        return XP_OK;
    }
    /* Complete rows come neither before this rank's rows could be in the Lane nor where members
     * deliver partials. */
    bool expected = slot->state == ATN_WAIT_COMMIT && !fabric_is_direct(instance, slot->group);
    if (expected && commit.source == FABRIC_SOURCE_SLOT && !is_long)
        from = fabric->layout.slot_output[slot->instance];
    else if (expected && commit.source == FABRIC_SOURCE_LANE && is_long &&
             commit.lane == slot->lane)
        from = fabric_lane_output(&fabric->layout, slot->lane) + slot->row_offset * row_bytes;
    else
        return fabric_fail_now(fabric, "%.32s layer %u: invalid Output Commit (source %u, Lane %u)",
                               instance->id, slot->pending.layer, commit.source, commit.lane);
    if (!slot->abandoned && slot->pending.rows)
        memcpy(slot->pending.output, fabric_local(fabric, from), slot->pending.rows * row_bytes);
    atn_finish(atn, slot, XP_OK, commit.lane, is_long);
    return XP_OK;
}

static xp_status_t atn_step_slot(fabric_atn_t *atn, atn_slot_t *slot, bool accepting,
                                 bool *moved_out)
{
    fabric_t *fabric = atn->fabric;
    uint64_t commit_at = slot->offset + offsetof(fabric_slot_t, commit);
    switch (slot->state) {
    case ATN_IDLE:
        if (accepting && atn_accept(atn, slot))
            *moved_out = true;
        return XP_OK;
    case ATN_WAIT_ADMISSION:
        if (fabric_word(fabric, slot->offset + offsetof(fabric_slot_t, admission)) ==
            slot->sequence) {
            *moved_out = true;
            return atn_deliver_input(atn, slot);
        }
        break;
    case ATN_WAIT_COMMIT:
        if (fabric_is_direct(&fabric->plan.instances[slot->instance], slot->group)) {
            bool moved = false;
            XP_TRY(atn_take_partials(atn, slot, &moved));
            if (moved) {
                *moved_out = true;
                return XP_OK;
            }
        }
        break;
    }
    if (fabric_word(fabric, commit_at) == slot->sequence) {
        *moved_out = true;
        return atn_take_commit(atn, slot);
    }
    return XP_OK;
}

static xp_status_t atn_check_timeouts(fabric_atn_t *atn, uint64_t now_ns, uint64_t gap_ns)
{
    uint64_t limit_ns = fabric_plan_atn_patience_ns(atn->fabric->plan.submission_timeout_ns);
    for (uint32_t i = 0; i < atn->slot_count; i++) {
        atn_slot_t *slot = &atn->slots[i];
        if (slot->state == ATN_IDLE)
            continue;
        if (gap_ns > FABRIC_GAP_NS)
            slot->submitted_ns += gap_ns;
        if (now_ns > slot->submitted_ns && now_ns - slot->submitted_ns > limit_ns)
            return fabric_fail_now(
                atn->fabric, "%.32s layer %u: no answer in %llu ms, waiting for Coordinator PE %u",
                atn->fabric->plan.instances[slot->instance].id, slot->pending.layer,
                (unsigned long long)(limit_ns / XP_NS_PER_MS),
                fabric_coordinator_pe(&atn->fabric->plan));
    }
    return XP_OK;
}

static bool atn_in_flight(const fabric_atn_t *atn)
{
    for (uint32_t i = 0; i < atn->slot_count; i++)
        if (atn->slots[i].state != ATN_IDLE)
            return true;
    return false;
}

xp_status_t fabric_atn_look(fabric_atn_t *atn, bool *moved_out)
{
    fabric_t *fabric = atn->fabric;
    uint64_t now_ns = xp_clock_now_ns(&atn->clock), gap_ns = now_ns - atn->last_look_ns;
    atn->last_look_ns = now_ns;
    if (fabric_has_failed(fabric))
        return fabric_failure(fabric, NULL);
    bool ending = fabric_is_shutdown(fabric);
    bool moved = atn_take_inbox(atn);
    for (uint32_t i = 0; i < atn->slot_count; i++)
        XP_TRY(atn_step_slot(atn, &atn->slots[i], !ending, &moved));
    XP_TRY(atn_check_timeouts(atn, now_ns, gap_ns));
    /* With the Coordinator gone nothing in flight can come back. */
    if (!moved && ending &&
        (!atn_in_flight(atn) ||
         fabric_get_state(fabric, fabric_coordinator_pe(&fabric->plan)) != FABRIC_PE_RUNNING))
        return xp_fail(XP_CLOSED, "the Fabric has been shut down");
    *moved_out = moved;
    return XP_OK;
}

static xp_status_t atn_loop(fabric_atn_t *atn)
{
    fabric_t *fabric = atn->fabric;
    const fabric_provider_ops_t *ops = fabric->provider->ops;
    for (;;) {
        uint32_t seen = ops->observe(fabric->provider);
        bool moved = false;
        XP_TRY(fabric_atn_look(atn, &moved));
        if (moved)
            continue;
        ops->wait(fabric->provider, &atn->waiter, seen, xp_monotonic_ns() + FABRIC_TICK_NS);
        fabric_count_set(fabric, FABRIC_COUNT_SPINS, atn->waiter.spins);
        fabric_count_set(fabric, FABRIC_COUNT_SLEEPS, atn->waiter.sleeps);
    }
}

xp_status_t fabric_atn_run(fabric_atn_t *atn)
{
    atn->last_look_ns = xp_clock_now_ns(&atn->clock);
    fabric_set_state(atn->fabric, FABRIC_PE_RUNNING);
    xp_status_t status = atn_loop(atn);
    xp_status_t reason = status == XP_CLOSED ? XP_CLOSED : XP_FATAL;
    pthread_mutex_lock(&atn->lock);
    for (uint32_t i = 0; i < atn->slot_count && !(atn->keep && reason == XP_FATAL); i++) {
        if (atn->slots[i].server)
            transport_server_close(atn->slots[i].server, reason);
        if (atn->slots[i].incoming)
            transport_server_close(atn->slots[i].incoming, reason);
    }
    pthread_mutex_unlock(&atn->lock);
    fabric_set_state(atn->fabric, FABRIC_PE_LEFT);
    /* Those who wait for this AtnAgent to leave look again. */
    uint32_t pes = fabric_group_pes(&atn->fabric->plan, (1u << atn->fabric->plan.ffn_count) - 1);
    fabric_signal(atn->fabric, pes);
    return status;
}
