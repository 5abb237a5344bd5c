/* SPDX-License-Identifier: MIT */
/* What a plan means for stages: sizes, members, types. Pure functions, host only, any thread. */
#include "fabric/records.h"
#include "stage/control.h"
#include "stage/heap.h"

static uint64_t round_up(uint64_t bytes)
{
    return (bytes + STAGE_GRANULARITY_BYTES - 1) / STAGE_GRANULARITY_BYTES *
           STAGE_GRANULARITY_BYTES;
}

uint32_t stage_members(const fabric_plan_instance_t *instance)
{
    uint32_t members = 0;
    for (uint32_t layer = 0; layer < instance->layers; layer++)
        members |= instance->layer_group[layer];
    return members;
}

uint32_t stage_uniform_group(const fabric_plan_instance_t *instance)
{
    for (uint32_t layer = 1; layer < instance->layers; layer++)
        if (instance->layer_group[layer] != instance->layer_group[0])
            return 0;
    return instance->layers ? instance->layer_group[0] : 0;
}

/* Members of the largest group; only those that FfnAgent `first` is first of, unless
 * STAGE_MAX_MEMBERS. */
static uint32_t largest_group(const fabric_plan_instance_t *instance, uint32_t first)
{
    uint32_t most = 0;
    for (uint32_t layer = 0; layer < instance->layers; layer++) {
        uint32_t group = instance->layer_group[layer], size = fabric_group_size(group);
        if (group && (first == STAGE_MAX_MEMBERS || fabric_group_first(group) == first) &&
            size > most)
            most = size;
    }
    return most;
}

uint32_t stage_reducers(const fabric_plan_instance_t *instance)
{
    uint32_t reducers = 0;
    for (uint32_t ffn = 0; ffn < FABRIC_MAX_FFN; ffn++)
        if (stage_partials_members(instance, ffn))
            reducers |= 1u << ffn;
    return reducers;
}

uint32_t stage_partials_members(const fabric_plan_instance_t *instance, uint32_t ffn)
{
    if (instance->delivery == FABRIC_DELIVERY_DIRECT_PARTIAL)
        return 0;
    uint32_t members = largest_group(instance, ffn);
    return members > 1 ? members : 0;
}

uint64_t stage_page_bytes(const fabric_plan_instance_t *instance)
{
    return STAGE_HEADER_BYTES +
           stage_total_rows(instance) *
               xp_dtype_row_bytes((xp_dtype_t)instance->dtype, instance->hidden);
}

uint64_t stage_partials_bytes(const fabric_plan_instance_t *instance, uint32_t ffn)
{
    uint32_t members = stage_partials_members(instance, ffn);
    return members ? STAGE_HEADER_BYTES + members * stage_partial_stride(instance) * sizeof(float)
                   : 0;
}

uint64_t stage_scratch_bytes(const fabric_plan_instance_t *instance, uint32_t ffn)
{
    if (instance->delivery != FABRIC_DELIVERY_DIRECT_PARTIAL || fabric_plan_ranks(instance) == 1)
        return 0;
    for (uint32_t layer = 0; layer < instance->layers; layer++) {
        uint32_t group = instance->layer_group[layer];
        if ((group >> ffn & 1) && fabric_group_size(group) > 1)
            return stage_partial_stride(instance) * sizeof(float);
    }
    return 0;
}

void stage_ffn_bytes(const fabric_plan_t *plan, uint32_t ffn, stage_bytes_t *bytes_out)
{
    const bool heap = fabric_provider_heap(plan->provider);
    stage_bytes_t bytes = {.tables = sizeof(stage_table_t)};
    if (heap)
        bytes.stages = stage_heap_bytes(plan) + STAGE_HEAP_OWN_BYTES;
    for (uint32_t i = 0; i < plan->instance_count; i++) {
        const fabric_plan_instance_t *instance = &plan->instances[i];
        if (!(stage_members(instance) >> ffn & 1))
            continue;
        bytes.partials += round_up(stage_scratch_bytes(instance, ffn));
        if (!heap) {
            bytes.stages += round_up(stage_page_bytes(instance));
            bytes.partials += round_up(stage_partials_bytes(instance, ffn));
        }
        bytes.tables += sizeof(uint32_t) * instance->layers;
    }
    bytes.tables = round_up(bytes.tables);
    *bytes_out = bytes;
}

uint32_t stage_max_rows(const fabric_plan_t *plan, uint32_t ffn)
{
    uint64_t most = 0;
    for (uint32_t i = 0; i < plan->instance_count; i++)
        if ((stage_members(&plan->instances[i]) >> ffn & 1) &&
            stage_total_rows(&plan->instances[i]) > most)
            most = stage_total_rows(&plan->instances[i]);
    return (uint32_t)most;
}

uint32_t stage_buffer_rows(const fabric_plan_t *plan, uint32_t ffn)
{
    uint64_t most = 0;
    for (uint32_t i = 0; i < plan->instance_count; i++) {
        const fabric_plan_instance_t *instance = &plan->instances[i];
        if (fabric_plan_ranks(instance) == 1 || stage_total_rows(instance) <= most)
            continue;
        for (uint32_t layer = 0; layer < instance->layers; layer++)
            if (instance->layer_group[layer] == 1u << ffn)
                most = stage_total_rows(instance);
    }
    return (uint32_t)most;
}

transport_geometry_t stage_geometry(const fabric_plan_instance_t *instance)
{
    uint32_t members = largest_group(instance, STAGE_MAX_MEMBERS);
    bool direct = instance->delivery == FABRIC_DELIVERY_DIRECT_PARTIAL && members > 1;
    return (transport_geometry_t){.hidden = instance->hidden,
                                  .max_rows = instance->max_rows,
                                  .dtype = (xp_dtype_t)instance->dtype,
                                  .dp_size = instance->atn_dp,
                                  .partials = direct ? members : 0};
}

uint64_t stage_arena_bytes(const fabric_plan_instance_t *instance)
{
    transport_geometry_t geometry = stage_geometry(instance);
    return round_up(transport_cuda_plain_bytes(&geometry));
}

xp_status_t stage_dtype(const fabric_plan_instance_t *instance, uint32_t *dtype_out)
{
    switch ((xp_dtype_t)instance->dtype) {
    case XP_DTYPE_BF16:
        *dtype_out = FFN_CUDA_BF16;
        return XP_OK;
    case XP_DTYPE_F16:
        *dtype_out = FFN_CUDA_F16;
        return XP_OK;
    default:
        return xp_fail(
            XP_UNSUPPORTED,
            "%.48s: rows between CUDA devices are bf16 or f16, not %s; set models[].dtype",
            instance->id, xp_dtype_name((xp_dtype_t)instance->dtype));
    }
}

xp_status_t stage_plan_check(const fabric_plan_instance_t *instance)
{
    uint32_t dtype;
    XP_TRY(stage_dtype(instance, &dtype));
    if (instance->atn_tp == 0 || instance->atn_dp == 0 ||
        fabric_plan_ranks(instance) > FABRIC_MAX_RANKS)
        return xp_fail(XP_INVALID, "%.48s: attention TP %u x DP %u; allowed are 1 to %d ranks",
                       instance->id, instance->atn_tp, instance->atn_dp, FABRIC_MAX_RANKS);
    if (instance->layers == 0 || instance->layers > MODEL_MAX_LAYERS)
        return xp_fail(XP_INVALID, "%.48s has %u layers; allowed are 1 to %d", instance->id,
                       instance->layers, MODEL_MAX_LAYERS);
    for (uint32_t layer = 0; layer < instance->layers; layer++)
        if (instance->layer_group[layer] == 0 ||
            instance->layer_group[layer] >> FABRIC_MAX_FFN != 0)
            return xp_fail(XP_INVALID, "%.48s: layer %u has no Execution Group (%#x)", instance->id,
                           layer, instance->layer_group[layer]);
    return XP_OK;
}

xp_status_t stage_head_check(const stage_head_t *head, const fabric_plan_instance_t *instance,
                             uint32_t index, uint64_t generation, uint32_t ffn)
{
    if (head->magic != STAGE_MAGIC)
        return xp_fail(XP_PEER, "descriptor is no stage (magic %#x)", head->magic);
    if (head->abi != STAGE_ABI)
        return xp_fail(XP_PEER, "stage has ABI %u, this build %u", head->abi, STAGE_ABI);
    if (head->instance != index || head->ffn != ffn || head->generation != generation)
        return xp_fail(XP_PEER,
                       "stage of FfnAgent %u for Instance %u in Generation %llu; expected was that "
                       "of FfnAgent %u for Instance %u in Generation %llu",
                       head->ffn, head->instance, (unsigned long long)head->generation, ffn, index,
                       (unsigned long long)generation);
    if (head->ranks != fabric_plan_ranks(instance) || head->dp_size != instance->atn_dp ||
        head->hidden != instance->hidden || head->max_rows != instance->max_rows ||
        head->dtype != instance->dtype || head->bytes != stage_page_bytes(instance))
        return xp_fail(XP_PEER,
                       "stage of FfnAgent %u: %u ranks, DP %u, %u x %u, dtype %u; planned are "
                       "%u ranks, DP %u, %u x %u, dtype %u",
                       ffn, head->ranks, head->dp_size, head->max_rows, head->hidden, head->dtype,
                       fabric_plan_ranks(instance), instance->atn_dp, instance->max_rows,
                       instance->hidden, instance->dtype);
    return XP_OK;
}

xp_status_t stage_partials_check(const stage_partials_t *partials,
                                 const fabric_plan_instance_t *instance, uint32_t index,
                                 uint32_t ffn)
{
    if (partials->magic != STAGE_PARTIALS_MAGIC || partials->abi != STAGE_ABI)
        return xp_fail(XP_PEER, "descriptor holds no partials of ABI %u (magic %#x, ABI %u)",
                       STAGE_ABI, partials->magic, partials->abi);
    if (partials->instance != index || partials->ffn != ffn ||
        partials->members != stage_partials_members(instance, ffn) ||
        partials->rows != stage_total_rows(instance) || partials->hidden != instance->hidden ||
        partials->bytes != stage_partials_bytes(instance, ffn))
        return xp_fail(XP_PEER,
                       "partials of FfnAgent %u for Instance %u: %u members, %u x %u; planned are "
                       "FfnAgent %u, Instance %u: %u members, %llu x %u",
                       partials->ffn, partials->instance, partials->members, partials->rows,
                       partials->hidden, ffn, index, stage_partials_members(instance, ffn),
                       (unsigned long long)stage_total_rows(instance), instance->hidden);
    return XP_OK;
}
