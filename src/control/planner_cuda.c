/* SPDX-License-Identifier: MIT */
/* Placement of roles on GPUs and the ledger of their memory. Pure computation on the caller's
 * thread. */
#include "control/planner_cuda.h"

#include <stdlib.h>
#include <string.h>

#include "control/gpus.h"
#include "control/planner_sglang.h"
#include "ffn/cuda_runtime.h"
#include "stage/stage.h"

/* A device with both roles is divided between them. */
#define SHARED_PARTS 2u

/* ---- devices ----------------------------------------------------------------------------------
 */

/* NVSHMEM's PEs on shared GPUs agree on what MPS gives them, and those with a GPU of their own take
 * no part in that: joining would never return. */
static xp_status_t check_pes(const config_t *config)
{
    const char *both = NULL, *one = NULL;
    for (uint32_t side = 0; side < 2; side++)
        for (uint32_t d = 0; d < (side ? config->ffn_count : config->atn_count); d++) {
            const config_device_t *device = side ? &config->ffn[d] : &config->atn[d];
            *(gpus_shared(config, device) ? &both : &one) = device->name;
        }
    if (both && one)
        return xp_fail(XP_UNSUPPORTED,
                       "fabric.provider: with \"%s\" all GPUs have both roles or none has; %s has "
                       "both and %s has one",
                       config->fabric_provider, both, one);
    return XP_OK;
}

static xp_status_t check_provider(const config_t *config, plan_result_t *result)
{
    const char *name = config->fabric_provider;
    bool cuda = result->cuda, any = strcmp(name, "auto") == 0;
    if (strcmp(name, "ucx") == 0)
        return xp_fail(
            XP_UNSUPPORTED,
            "fabric.provider: \"%s\" is not part of this build; it has \"shm\" for CPUs, "
            "\"p2p\", \"p2p-relay\" and \"nvshmem\" for GPUs, and \"auto\"",
            name);
    if (!any && cuda != (strcmp(name, "shm") != 0))
        return xp_fail(
            XP_INVALID,
            "fabric.provider: \"%s\" does not go with %s devices; use \"%s\" or \"auto\"", name,
            cuda ? "CUDA" : "CPU", cuda ? "p2p" : "shm");
    result->plan.provider = !cuda                              ? FABRIC_PROVIDER_SHM
                            : strcmp(name, "nvshmem-far") == 0 ? FABRIC_PROVIDER_NVSHMEM_FAR
                            : strcmp(name, "nvshmem") == 0     ? FABRIC_PROVIDER_NVSHMEM
                            : strcmp(name, "p2p-relay") == 0   ? FABRIC_PROVIDER_P2P_RELAY
                                                               : FABRIC_PROVIDER_P2P;
    return fabric_provider_heap(result->plan.provider) ? check_pes(config) : XP_OK;
}

xp_status_t planner_check_devices(const config_t *config, plan_result_t *result)
{
    const config_device_t *first = &config->atn[0];
    result->cuda = first->kind == CONFIG_DEVICE_CUDA;
    for (uint32_t side = 0; side < 2; side++) {
        const config_device_t *devices = side ? config->ffn : config->atn;
        for (uint32_t d = 0; d < (side ? config->ffn_count : config->atn_count); d++) {
            if (devices[d].kind != first->kind)
                return xp_fail(XP_UNSUPPORTED,
                               "%s.devices has %s, atn.devices has %s: the devices of one system "
                               "are all CPUs or all GPUs; name devices of one kind in both lists",
                               side ? "ffn" : "atn", devices[d].name, first->name);
            if (!side || !config_device_find(config, false, devices[d].name, NULL))
                continue;
            if (!result->cuda)
                return xp_fail(XP_UNSUPPORTED,
                               "device %s is in atn.devices and ffn.devices: on the CPU give each "
                               "role a budget of its own (cpu:0 and cpu:1 may name the same cores)",
                               devices[d].name);
            if (!config->allow_shared_roles)
                return xp_fail(XP_INVALID,
                               "device %s is in atn.devices and ffn.devices; a GPU has one role "
                               "unless devices.allow_shared_roles is true",
                               devices[d].name);
        }
    }
    XP_TRY(check_provider(config, result));
    if (config->ffn_calibration[0])
        return xp_fail(XP_UNSUPPORTED, "ffn.device_memory_calibration: %s; remove the setting",
                       result->cuda
                           ? "measured envelopes are not part of this build, whose ledger of GPU "
                             "memory is exact but for a fixed allowance"
                           : "CPU devices have an exact ledger, there is nothing to calibrate");
    return XP_OK;
}

static xp_status_t device_memory(const config_t *config, const config_device_t *device,
                                 uint64_t *bytes_out)
{
    uint64_t bytes = device->memory_bytes;
    if (device->kind == CONFIG_DEVICE_CUDA)
        XP_TRY(gpus_memory(config, device, &bytes));
    *bytes_out = gpus_shared(config, device) ? bytes / SHARED_PARTS : bytes;
    return XP_OK;
}

xp_status_t planner_budgets(const config_t *config, plan_result_t *result)
{
    for (uint32_t d = 0; d < config->atn_count; d++) {
        uint64_t memory;
        XP_TRY(device_memory(config, &config->atn[d], &memory));
        result->atn[d].device = &config->atn[d];
        result->atn[d].budget_bytes = (uint64_t)((double)memory * config->atn_memory_utilization);
    }
    for (uint32_t d = 0; d < config->ffn_count; d++) {
        uint64_t memory, kept = config->ffn_extra_margin_bytes;
        XP_TRY(device_memory(config, &config->ffn[d], &memory));
        if (result->cuda)
            kept += PLANNER_CUDA_CONTEXT_BYTES;
        result->ffn[d].device = &config->ffn[d];
        result->ffn[d].ffn_role = true;
        result->ffn[d].budget_bytes = memory > kept ? memory - kept : 0;
    }
    return XP_OK;
}

/* ---- one model --------------------------------------------------------------------------------
 */

static xp_dtype_t dtype_of(const config_model_t *model, const model_spec_t *spec)
{
    if (model->dtype != XP_DTYPE_AUTO)
        return model->dtype;
    return spec->checkpoint_dtype == XP_DTYPE_F16 ? XP_DTYPE_F16 : XP_DTYPE_BF16;
}

static uint32_t delivery_of(uint32_t attention_tp, uint32_t ranks, uint32_t members)
{
    if (attention_tp > 1)
        return FABRIC_DELIVERY_REPLICATED_COMPLETE;
    /* A single consumer adds the partials itself: no hop between the members. */
    return ranks == 1 && members > 1 ? FABRIC_DELIVERY_DIRECT_PARTIAL
                                     : FABRIC_DELIVERY_SINGLE_COMPLETE;
}

/* As the Fabric plan will have it, for what its sizes depend on; `group` of all layers. */
static void describe_instance(const config_model_t *model, const plan_model_t *planned,
                              uint32_t group, fabric_plan_instance_t *instance)
{
    instance->hidden = planned->spec.hidden;
    instance->layers = planned->spec.layers;
    instance->max_rows = planned->max_rows;
    instance->dtype = planned->dtype;
    instance->atn_tp = model->attention_tp;
    instance->atn_dp = model->attention_dp;
    memcpy(instance->rank_atn, planned->rank_atn, sizeof(instance->rank_atn));
    instance->delivery =
        delivery_of(model->attention_tp, planned->ranks, (uint32_t)__builtin_popcount(group));
    for (uint32_t l = 0; l < planned->spec.layers; l++)
        instance->layer_group[l] = group;
}

xp_status_t planner_cuda_ledger(const config_t *config, const config_model_t *model,
                                const checkpoint_t *checkpoint, plan_model_t *planned,
                                uint64_t *ffn_bytes_out)
{
    const config_device_t *device = &config->atn[planned->rank_atn[0]];
    if (model->engine == CONFIG_ENGINE_NATIVE)
        return xp_fail(XP_UNSUPPORTED,
                       "models[%s].engine: the native engine computes on CPU devices, and %s is a "
                       "GPU; use engine = \"sglang\"",
                       model->id, device->name);
    xp_dtype_t dtype = dtype_of(model, &planned->spec);
    if (dtype != XP_DTYPE_BF16 && dtype != XP_DTYPE_F16)
        return xp_fail(XP_UNSUPPORTED,
                       "models[%s].dtype: GPUs compute in bfloat16 or float16, not in float32; set "
                       "one of these, or leave it out",
                       model->id);
    config_model_t typed = *model;
    typed.dtype = dtype;
    planner_sglang_ledger(&typed, planned);
    fabric_plan_instance_t instance = {0};
    describe_instance(model, planned, (1u << model->ffn_tp_size) - 1, &instance);
    planned->arena_bytes = stage_arena_bytes(&instance);
    if (strcmp(config->fabric_provider, "p2p-relay") == 0)
        planned->arena_bytes *= 2; /* the AtnAgent's own */
    xp_status_t status =
        ffn_cuda_weight_bytes(&planned->spec, checkpoint, dtype, model->ffn_tp_size, ffn_bytes_out);
    return status == XP_OK ? XP_OK : xp_fail_context(status, "models[%s]", model->id);
}

/* ---- FFN devices ------------------------------------------------------------------------------
 */

/* Every model on the first FFN devices: no placement needs more of one of them, since a group's
 * first member holds more than the others. */
static xp_status_t widest_plan(const config_t *config, const plan_result_t *result,
                               fabric_plan_t **plan_out)
{
    fabric_plan_t *plan = calloc(1, sizeof(*plan));
    if (!plan)
        return xp_fail(XP_NO_MEMORY, "no memory for a plan");
    plan->atn_count = config->atn_count;
    plan->ffn_count = config->ffn_count;
    plan->lanes = config->scheduler.ffn_concurrency;
    plan->provider = result->plan.provider;
    plan->instance_count = result->model_count;
    for (uint32_t m = 0; m < result->model_count; m++)
        describe_instance(&config->models[m], &result->models[m],
                          (1u << config->models[m].ffn_tp_size) - 1, &plan->instances[m]);
    *plan_out = plan;
    return XP_OK;
}

xp_status_t planner_cuda_heap(const config_t *config, plan_result_t *result)
{
    fabric_plan_t *plan;
    if (!fabric_provider_heap(result->plan.provider))
        return XP_OK;
    XP_TRY(widest_plan(config, result, &plan));
    for (uint32_t d = 0; d < config->atn_count; d++)
        result->atn[d].arena_bytes += stage_heap_bytes(plan) + STAGE_HEAP_OWN_BYTES;
    free(plan);
    return XP_OK;
}

xp_status_t planner_cuda_workspace(const config_t *config, const plan_result_t *result,
                                   uint64_t *bytes_out)
{
    const model_spec_t *specs[CONFIG_MAX_MODELS];
    uint32_t tp_sizes[CONFIG_MAX_MODELS];
    fabric_plan_t *plan;
    for (uint32_t m = 0; m < result->model_count; m++) {
        specs[m] = &result->models[m].spec;
        tp_sizes[m] = config->models[m].ffn_tp_size;
    }
    XP_TRY(widest_plan(config, result, &plan));
    ffn_cuda_ledger_t ledger;
    stage_bytes_t stage;
    xp_status_t status =
        ffn_cuda_runtime_bytes(specs, tp_sizes, result->model_count, plan->lanes,
                               stage_max_rows(plan, 0), stage_buffer_rows(plan, 0), true, &ledger);
    stage_ffn_bytes(plan, 0, &stage);
    free(plan);
    XP_TRY(status);
    *bytes_out = ledger.table_bytes + ledger.lane_bytes + ledger.workspace_bytes +
                 ledger.graph_bytes + stage.stages + stage.partials + stage.tables;
    return XP_OK;
}

void planner_cuda_finish(const config_t *config, plan_result_t *result)
{
    fabric_plan_t *plan = &result->plan;
    for (uint32_t m = 0; m < result->model_count; m++) {
        const plan_model_t *model = &result->models[m];
        fabric_plan_instance_t *instance = &plan->instances[m];
        uint32_t group = result->weights[model->weights].group;
        describe_instance(&config->models[m], model, group, instance);
    }
    for (uint32_t f = 0; f < config->ffn_count; f++) {
        plan_device_t *device = &result->ffn[f];
        stage_bytes_t stage;
        stage_ffn_bytes(plan, f, &stage);
        uint64_t stages = stage.stages + stage.partials;
        /* workspace_bytes so far is the bound for any placement. */
        device->workspace_bytes -= stages < device->workspace_bytes ? stages : 0;
        device->arena_bytes = stages;
    }
}
