/* SPDX-License-Identifier: MIT */
/* Checks, digest and memory layout of a Fabric plan. Pure functions, any thread. */
#include "fabric/plan.h"

#include <string.h>

#include "fabric/records.h"

_Static_assert(FABRIC_MAX_PES <= DOORBELL_MAX_PES, "every PE has a doorbell");
_Static_assert(FABRIC_MAX_RANKS == MAILBOX_MAX_DP, "row counts of all ranks travel in a request");
_Static_assert(sizeof(fabric_submission_t) == 128 && sizeof(fabric_slot_t) % MAILBOX_LINE == 0, "");
_Static_assert(sizeof(fabric_execution_t) % MAILBOX_LINE == 0, "records start on lines");
_Static_assert(sizeof(fabric_lane_t) % MAILBOX_LINE == 0, "");
_Static_assert(sizeof(fabric_header_t) <= FABRIC_PAGE, "the header is one page");

#define PLAN_MAX_SPIN_NS 10000000u /* 10 ms: a longer spin is a mistake in units */

const char *fabric_plan_provider_name(uint32_t provider)
{
    static const char *const names[] = {"shm", "p2p", "p2p-relay", "nvshmem", "nvshmem-far"};
    return provider < sizeof(names) / sizeof(names[0]) ? names[provider] : "unknown";
}

const char *fabric_delivery_name(uint32_t delivery)
{
    static const char *const names[] = {"direct-partial", "single-complete", "replicated-complete"};
    return delivery < sizeof(names) / sizeof(names[0]) ? names[delivery] : "unknown";
}

static xp_status_t plan_check_instance(const fabric_plan_t *plan, uint32_t index)
{
    const fabric_plan_instance_t *instance = &plan->instances[index];
    if (!instance->id[0] || !memchr(instance->id, 0, sizeof(instance->id)))
        return xp_fail(XP_INVALID, "Fabric plan: Instance %u has no proper id", index);
    const char *id = instance->id;
    if (instance->weights >= plan->weights_count)
        return xp_fail(XP_INVALID, "Fabric plan: %s names weight set %u of %u", id,
                       instance->weights, plan->weights_count);
    if (instance->hidden == 0 || instance->hidden > MODEL_MAX_HIDDEN)
        return xp_fail(XP_INVALID, "Fabric plan: %s has rows of width %u", id, instance->hidden);
    if (instance->layers == 0 || instance->layers > MODEL_MAX_LAYERS)
        return xp_fail(XP_INVALID, "Fabric plan: %s has %u layers", id, instance->layers);
    if (plan->provider == FABRIC_PROVIDER_SHM && instance->dtype != XP_DTYPE_F32)
        return xp_fail(XP_INVALID, "Fabric plan: %s has activations of dtype %u; shm carries f32",
                       id, instance->dtype);
    if (plan->provider != FABRIC_PROVIDER_SHM && instance->dtype != XP_DTYPE_BF16 &&
        instance->dtype != XP_DTYPE_F16)
        return xp_fail(XP_INVALID,
                       "Fabric plan: %s has activations of dtype %u; p2p carries bf16 and f16", id,
                       instance->dtype);
    if (instance->atn_tp == 0 || instance->atn_tp > FABRIC_MAX_RANKS || instance->atn_dp == 0 ||
        instance->atn_dp > FABRIC_MAX_RANKS || fabric_plan_ranks(instance) > FABRIC_MAX_RANKS)
        return xp_fail(XP_INVALID, "Fabric plan: %s has attention TP %u and DP %u", id,
                       instance->atn_tp, instance->atn_dp);
    if (instance->max_rows == 0 ||
        (uint64_t)instance->max_rows * instance->atn_dp > FABRIC_MAX_ROWS)
        return xp_fail(XP_INVALID, "Fabric plan: %s has %u rows a rank; at most %d over DP ranks",
                       id, instance->max_rows, FABRIC_MAX_ROWS);
    for (uint32_t rank = 0; rank < fabric_plan_ranks(instance); rank++)
        if (instance->rank_atn[rank] >= plan->atn_count)
            return xp_fail(XP_INVALID, "Fabric plan: %s rank %u is on AtnAgent %u of %u", id, rank,
                           instance->rank_atn[rank], plan->atn_count);
    if (instance->delivery > FABRIC_DELIVERY_REPLICATED_COMPLETE)
        return xp_fail(XP_INVALID, "Fabric plan: %s has unknown delivery kind %u", id,
                       instance->delivery);
    if (instance->delivery == FABRIC_DELIVERY_SINGLE_COMPLETE && instance->atn_tp > 1)
        return xp_fail(XP_INVALID, "Fabric plan: %s delivers to one consumer but has TP %u", id,
                       instance->atn_tp);
    if (instance->form > FABRIC_FORM_LONG)
        return xp_fail(XP_INVALID, "Fabric plan: %s has unknown form %u", id, instance->form);
    if (instance->form == FABRIC_FORM_EAGER && fabric_plan_ranks(instance) > 1)
        return xp_fail(XP_INVALID, "Fabric plan: %s has %u ranks; eager Submission needs one", id,
                       fabric_plan_ranks(instance));
    for (uint32_t layer = 0; layer < instance->layers; layer++)
        if (!instance->layer_group[layer] || instance->layer_group[layer] >> plan->ffn_count)
            return xp_fail(XP_INVALID, "Fabric plan: %s layer %u has Execution Group %#x of %u", id,
                           layer, instance->layer_group[layer], plan->ffn_count);
    return XP_OK;
}

xp_status_t fabric_plan_check(const fabric_plan_t *plan, uint64_t bytes)
{
    if (!plan || bytes < sizeof(*plan) || plan->magic != FABRIC_PLAN_MAGIC)
        return xp_fail(XP_INVALID, "not a Fabric plan (%llu bytes)", (unsigned long long)bytes);
    if (plan->version != FABRIC_PLAN_VERSION || plan->bytes != sizeof(*plan))
        return xp_fail(
            XP_INVALID, "Fabric plan of version %u and %llu bytes; this build has %u, %zu",
            plan->version, (unsigned long long)plan->bytes, FABRIC_PLAN_VERSION, sizeof(*plan));
    if (plan->atn_count == 0 || plan->atn_count > FABRIC_MAX_ATN || plan->ffn_count == 0 ||
        plan->ffn_count > FABRIC_MAX_FFN)
        return xp_fail(XP_INVALID, "Fabric plan with %u AtnAgents and %u FfnAgents; 1 to %d each",
                       plan->atn_count, plan->ffn_count, FABRIC_MAX_ATN);
    if (plan->lanes == 0 || plan->lanes > FABRIC_MAX_LANES)
        return xp_fail(XP_INVALID, "Fabric plan with %u Lanes; allowed are 1 to %d", plan->lanes,
                       FABRIC_MAX_LANES);
    if (plan->provider > FABRIC_PROVIDER_NVSHMEM_FAR)
        return xp_fail(XP_INVALID, "Fabric plan with unknown provider %u", plan->provider);
    if (plan->policy > FABRIC_POLICY_DEADLINE)
        return xp_fail(XP_INVALID, "Fabric plan with unknown policy %u", plan->policy);
    if (plan->submission_timeout_ns == 0)
        return xp_fail(XP_INVALID, "Fabric plan without a submission timeout");
    if (plan->spin_ns > PLAN_MAX_SPIN_NS)
        return xp_fail(XP_INVALID, "Fabric plan spins %u ns; at most %u", plan->spin_ns,
                       PLAN_MAX_SPIN_NS);
    if (plan->instance_count > FABRIC_MAX_INSTANCES || plan->weights_count > FABRIC_MAX_INSTANCES)
        return xp_fail(XP_INVALID, "Fabric plan with %u Instances and %u weight sets; at most %d",
                       plan->instance_count, plan->weights_count, FABRIC_MAX_INSTANCES);
    for (uint32_t i = 0; i < plan->instance_count; i++)
        XP_TRY(plan_check_instance(plan, i));
    return XP_OK;
}

/* FNV-1a, 64 bits: constants from the published algorithm (offset basis and prime). It tells plans
 * apart by mistake, not by malice: the plan itself travels in a sealed memfd. */
uint64_t fabric_plan_digest(const fabric_plan_t *plan)
{
    const unsigned char *bytes = (const unsigned char *)plan;
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < sizeof(*plan); i++)
        hash = (hash ^ bytes[i]) * 0x100000001b3u;
    return hash;
}

static uint64_t layout_take(fabric_layout_t *layout, uint64_t bytes)
{
    uint64_t at = layout->bytes;
    layout->bytes += (bytes + FABRIC_PAGE - 1) / FABRIC_PAGE * FABRIC_PAGE;
    return at;
}

void fabric_layout_compute(const fabric_plan_t *plan, fabric_layout_t *layout_out)
{
    fabric_layout_t layout = {0};
    layout_take(&layout, sizeof(fabric_header_t));
    layout.plan = layout_take(&layout, sizeof(fabric_plan_t));
    layout.pes = layout_take(&layout, (uint64_t)(plan->atn_count + plan->ffn_count) *
                                          sizeof(fabric_pe_record_t));
    layout.instances =
        layout_take(&layout, FABRIC_MAX_INSTANCES * sizeof(fabric_instance_record_t));
    uint64_t long_bytes = 0;
    for (uint32_t i = 0; i < plan->instance_count; i++) {
        const fabric_plan_instance_t *instance = &plan->instances[i];
        uint64_t bytes = instance->atn_dp * instance->max_rows * fabric_row_bytes(instance);
        layout.slot_base[i] = layout.slot_count;
        layout.slot_count += fabric_plan_ranks(instance);
        if (fabric_instance_form(instance) == FABRIC_FORM_LONG && bytes > long_bytes)
            long_bytes = bytes;
        for (uint32_t layer = 0; layer < instance->layers; layer++) {
            uint32_t members = fabric_group_size(instance->layer_group[layer]);
            if (members == 1)
                continue;
            if (members > layout.lane_partials)
                layout.lane_partials = members;
            if (bytes > layout.lane_partial_bytes)
                layout.lane_partial_bytes = bytes;
        }
    }
    layout.slots = layout_take(&layout, (uint64_t)layout.slot_count * sizeof(fabric_slot_t));
    layout.lanes = layout_take(&layout, (uint64_t)plan->lanes * sizeof(fabric_lane_t));
    /* Rows start on lines of their own. */
    layout.lane_rows_bytes = (long_bytes + MAILBOX_LINE - 1) / MAILBOX_LINE * MAILBOX_LINE;
    layout.lane_partial_bytes =
        (layout.lane_partial_bytes + MAILBOX_LINE - 1) / MAILBOX_LINE * MAILBOX_LINE;
    layout.lane_input = layout_take(&layout, plan->lanes * layout.lane_rows_bytes);
    layout.lane_output = layout_take(&layout, plan->lanes * layout.lane_rows_bytes);
    layout.lane_partial =
        layout_take(&layout, plan->lanes * layout.lane_partials * layout.lane_partial_bytes);
    for (uint32_t i = 0; i < plan->instance_count; i++) {
        const fabric_plan_instance_t *instance = &plan->instances[i];
        if (fabric_instance_form(instance) != FABRIC_FORM_EAGER)
            continue;
        uint64_t bytes = instance->max_rows * fabric_row_bytes(instance);
        layout.slot_input[i] = layout_take(&layout, bytes);
        layout.slot_output[i] = layout_take(&layout, bytes);
    }
    *layout_out = layout;
}
