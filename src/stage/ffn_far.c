/* SPDX-License-Identifier: MIT */
/*
 * What an FfnAgent has more where other PEs' memory is not mapped (provider nvshmem-far): outboxes
 * and mirrors in its own heap, and the courier's routes from them. Used by ffn.c's thread.
 */
#include "stage/ffn_far.h"

#include <stddef.h>

#include "fabric/records.h"
#include "stage/records.h"
#include "transport/arena.h"

/* Positions (bits) that the FfnAgent has in groups of several; only in those whose first member is
 * `first`, unless STAGE_MAX_MEMBERS. */
static uint32_t positions(const fabric_plan_instance_t *instance, uint32_t ffn, uint32_t first)
{
    uint32_t bits = 0;
    for (uint32_t layer = 0; layer < instance->layers; layer++) {
        uint32_t group = instance->layer_group[layer];
        if (!(group >> ffn & 1) || fabric_group_size(group) == 1 ||
            (first != STAGE_MAX_MEMBERS && fabric_group_first(group) != first))
            continue;
        bits |= 1u << fabric_group_size(group & ((1u << ffn) - 1));
    }
    return bits;
}

static cuda_address_t at(const stage_far_t *far, stage_heap_kind_t kind, uint32_t instance,
                         uint32_t owner, uint32_t further)
{
    return stage_heap_at(far->heap, stage_heap_offset(far->plan, kind, instance, owner, further));
}

cuda_address_t stage_far_outbox(const stage_far_t *far, uint32_t instance, uint32_t rank)
{
    return at(far, STAGE_HEAP_OUTBOX, instance, far->ffn, rank);
}

cuda_address_t stage_far_mirror(const stage_far_t *far, uint32_t instance, uint32_t first)
{
    return at(far, STAGE_HEAP_MIRROR, instance, far->ffn, first);
}

/* A route whose word and rows lie at the same places here and there. */
static xp_status_t add(stage_courier_t *courier, stage_route_t route, cuda_address_t here,
                       cuda_address_t there, uint64_t word, uint64_t rows)
{
    route.word = here + word;
    route.to_word = there + word;
    route.rows = here + rows;
    route.to_rows = there + rows;
    return stage_courier_add(courier, &route);
}

static xp_status_t routes_of_rank(const stage_far_t *far, uint32_t index, uint32_t rank)
{
    const fabric_plan_instance_t *plan = &far->plan->instances[index];
    const transport_geometry_t geometry = stage_geometry(plan);
    const cuda_address_t here = stage_far_outbox(far, index, rank);
    const cuda_address_t there = at(far, STAGE_HEAP_RELAY, index, rank, 0);
    const stage_route_t route = {
        .line = at(far, STAGE_HEAP_PAGE, index, far->ffn, 0) + offsetof(stage_page_t, lines) +
                rank * sizeof(stage_line_t),
        .row_bytes = transport_row_bytes(&geometry),
        .kind = STAGE_ROUTE_ROWS,
        .pe = plan->rank_atn[rank],
        .unit = index,
        .dp = rank / plan->atn_tp,
        .dp_size = plan->atn_dp,
        .max_rows = plan->max_rows,
    };
    stage_route_t closed = route, partial = route;
    closed.kind = STAGE_ROUTE_CLOSED;
    partial.row_bytes = plan->hidden * sizeof(float);
    XP_TRY(add(far->courier, route, here, there,
               offsetof(mailbox_arena_t, response) + offsetof(mailbox_response_t, sequence),
               transport_cuda_output_offset(&geometry)));
    XP_TRY(add(far->courier, closed, here, there, offsetof(mailbox_arena_t, closed), 0));
    if (plan->delivery != FABRIC_DELIVERY_DIRECT_PARTIAL)
        return XP_OK;
    for (uint32_t left = positions(plan, far->ffn, STAGE_MAX_MEMBERS); left; left &= left - 1) {
        uint32_t m = fabric_group_first(left);
        XP_TRY(add(far->courier, partial, here, there,
                   MAILBOX_PARTIALS_START + m * sizeof(mailbox_partial_t),
                   transport_cuda_partial_offset(&geometry) +
                       m * transport_cuda_partial_bytes(&geometry)));
    }
    return XP_OK;
}

static xp_status_t routes_of_first(const stage_far_t *far, uint32_t index, uint32_t first)
{
    const fabric_plan_instance_t *plan = &far->plan->instances[index];
    const stage_route_t route = {
        .line = at(far, STAGE_HEAP_PAGE, index, far->ffn, 0) + offsetof(stage_page_t, lines),
        .row_bytes = plan->hidden * sizeof(float),
        .kind = STAGE_ROUTE_ALL,
        .pe = far->plan->atn_count + first,
        .unit = index,
        .dp_size = plan->atn_dp,
        .max_rows = plan->max_rows,
    };
    for (uint32_t left = positions(plan, far->ffn, first); left; left &= left - 1) {
        uint32_t m = fabric_group_first(left);
        XP_TRY(add(far->courier, route, stage_far_mirror(far, index, first),
                   at(far, STAGE_HEAP_PARTIALS, index, first, 0),
                   offsetof(stage_partials_t, ready) + m * sizeof(mailbox_partial_t),
                   STAGE_HEADER_BYTES + m * stage_partial_stride(plan) * sizeof(float)));
    }
    return XP_OK;
}

xp_status_t stage_far_routes(const stage_far_t *far, uint32_t instance)
{
    const fabric_plan_instance_t *plan = &far->plan->instances[instance];
    for (uint32_t rank = 0; rank < fabric_plan_ranks(plan); rank++)
        XP_TRY(routes_of_rank(far, instance, rank));
    for (uint32_t first = 0; first < far->plan->ffn_count; first++)
        if (first != far->ffn && stage_partials_members(plan, first) &&
            positions(plan, far->ffn, first))
            XP_TRY(routes_of_first(far, instance, first));
    return XP_OK;
}

xp_status_t stage_far_clear(const stage_far_t *far, stage_control_t *control, uint32_t instance,
                            uint64_t deadline_ns)
{
    const fabric_plan_instance_t *plan = &far->plan->instances[instance];
    const transport_geometry_t geometry = stage_geometry(plan);
    const mailbox_arena_t header = transport_cuda_header(&geometry);
    const cuda_driver_t *driver = control->device->driver;
    for (uint32_t rank = 0; rank < fabric_plan_ranks(plan); rank++) {
        cuda_address_t outbox = stage_far_outbox(far, instance, rank);
        XP_TRY(
            CUDA_CALL(driver, cuMemsetD8Async, outbox, 0, MAILBOX_HEADER_BYTES, control->stream));
        XP_TRY(stage_control_write(control, outbox, &header, sizeof(header), deadline_ns));
    }
    for (uint32_t first = 0; first < far->plan->ffn_count; first++)
        if (stage_heap_offset(far->plan, STAGE_HEAP_MIRROR, instance, far->ffn, first) !=
            STAGE_HEAP_NOWHERE)
            XP_TRY(CUDA_CALL(driver, cuMemsetD8Async, stage_far_mirror(far, instance, first), 0,
                             STAGE_HEADER_BYTES, control->stream));
    return XP_OK;
}
