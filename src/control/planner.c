/* SPDX-License-Identifier: MIT */
/*
 * The plan and memory admission; placement is placement.c's. Pure computation over the
 * configuration and checkpoint headers; runs on the caller's thread.
 */
#include "control/planner.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "control/planner_cuda.h"
#include "control/planner_kv.h"
#include "control/planner_sglang.h"
#include "engine/engine.h"
#include "ffn/ffn.h"
#include "fabric/fabric.h"
#include "model/checkpoint.h"
#include "text/chat_template.h"

/* Longer than one layer's FFN of a small model, so that the waiters of a token in flight stay
 * awake; waking an idle core costs tens of microseconds on a virtual machine. */
#define PLANNER_SPIN_NS       1000000u
#define PLANNER_LEAST_CONTEXT 16u /* a configured context below this is a mistake */

/* ---- ledger -----------------------------------------------------------------------------------
 */

const char *planner_human(uint64_t bytes, char out[32])
{
    if (bytes >= (1ull << 30))
        snprintf(out, 32, "%.2f GiB", (double)bytes / (double)(1ull << 30));
    else
        snprintf(out, 32, "%.1f MiB", (double)bytes / (double)(1ull << 20));
    return out;
}

static bool same_weights(const config_model_t *a, const config_model_t *b)
{
    return strcmp(a->path, b->path) == 0 && a->dtype == b->dtype &&
           a->load_format == b->load_format && a->ffn_tp_size == b->ffn_tp_size;
}

static xp_status_t check_native(const config_model_t *model, const model_spec_t *spec)
{
    if (!model_architecture_has_native_engine(spec->architecture))
        return xp_fail(XP_UNSUPPORTED,
                       "models[%s]: the native engine does not serve %s; it serves "
                       "LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM and "
                       "Qwen3MoeForCausalLM; engine = \"sglang\" serves the others too",
                       model->id, spec->architecture_name);
    if (model->chat_template[0]) {
        const char *const *name = chat_template_names();
        while (*name && strcmp(*name, model->chat_template) != 0)
            name++;
        if (!*name)
            return xp_fail(XP_INVALID,
                           "models[%s].chat_template: there is no template \"%s\"; `xpool help "
                           "chat-template` names them",
                           model->id, model->chat_template);
    }
    if (model->attention_tp * model->attention_dp != 1)
        return xp_fail(XP_UNSUPPORTED,
                       "models[%s]: the native engine runs with attention_tp = 1 and attention_dp "
                       "= 1 (found %u and %u)",
                       model->id, model->attention_tp, model->attention_dp);
    return XP_OK;
}

static xp_status_t check_supported(const config_model_t *model, const model_spec_t *spec)
{
    xp_status_t status = model->engine == CONFIG_ENGINE_SGLANG ? planner_check_sglang(model, spec)
                                                               : check_native(model, spec);
    if (status != XP_OK)
        return status;
    /* One Invocation carries the rows of all attention DP ranks. */
    uint64_t rows = (uint64_t)planner_max_rows(model) * model->attention_dp;
    if (rows > FABRIC_MAX_ROWS)
        return xp_fail(XP_INVALID,
                       "models[%s].prefill_rows: one layer's rows over all attention DP ranks are "
                       "%llu (decode_rows %u, prefill_rows %u, attention_dp %u), the Fabric takes "
                       "%d; lower prefill_rows or decode_rows",
                       model->id, (unsigned long long)rows, model->decode_rows, model->prefill_rows,
                       model->attention_dp, FABRIC_MAX_ROWS);
    return XP_OK;
}

/* The native engine computes decoding sequences and a prompt's chunk in one step; SGLang, without
 * its mixed chunks, the one or the other. */
uint32_t planner_max_rows(const config_model_t *model)
{
    if (model->engine == CONFIG_ENGINE_NATIVE)
        return model->decode_rows + model->prefill_rows;
    return model->decode_rows > model->prefill_rows ? model->decode_rows : model->prefill_rows;
}

uint32_t planner_rank_devices(const config_t *config, uint32_t model,
                              uint32_t rank_atn_out[FABRIC_MAX_RANKS])
{
    /* Devices are taken in turn: the same number of ranks on each, and those of one Instance on
     * different ones. */
    uint32_t before = 0;
    for (uint32_t m = 0; m < model; m++)
        before += config->models[m].attention_tp * config->models[m].attention_dp;
    uint32_t ranks = config->models[model].attention_tp * config->models[model].attention_dp;
    for (uint32_t r = 0; r < ranks; r++)
        rank_atn_out[r] = (before + r) % config->atn_count;
    return ranks;
}

/* What one rank of the attention side holds beside its KV Cache, and a token's KV bytes. */
static void ledger_of_rank(const config_t *config, const config_model_t *model,
                           const checkpoint_t *checkpoint, plan_model_t *planned)
{
    planned->arena_bytes = 8192 + 2ull * planned->max_rows * planned->spec.hidden * sizeof(float);
    if (model->engine == CONFIG_ENGINE_SGLANG) {
        planner_sglang_ledger(model, planned);
        return;
    }
    planned->dtype = model->dtype;
    planned->kv_bytes_per_token = model_kv_bytes_per_token(&planned->spec, XP_DTYPE_F32);
    planned->attention_bytes = engine_weight_bytes(&planned->spec, checkpoint, model->dtype);
    const config_device_t *device = &config->atn[planned->rank_atn[0]];
    planned->workspace_bytes = engine_workspace_bytes(&planned->spec, device->threads,
                                                      planned->max_rows, planned->max_context);
}

/* Reads one model's headers and fills everything that does not depend on the other models. */
static xp_status_t plan_one_model(const config_t *config, uint32_t index, plan_result_t *result,
                                  uint64_t *ffn_bytes_out)
{
    const config_model_t *model = &config->models[index];
    plan_model_t *planned = &result->models[index];
    checkpoint_t *checkpoint = NULL;
    xp_status_t status;

    status = model_spec_load(model->path, &planned->spec);
    if (status != XP_OK)
        return xp_fail_context(status, "models[%s]", model->id);
    XP_TRY(check_supported(model, &planned->spec));
    if (model->load_format != CONFIG_LOAD_DUMMY) {
        status = checkpoint_open(model->path, &planned->spec, &checkpoint);
        if (status != XP_OK)
            return xp_fail_context(status, "models[%s]", model->id);
    }
    planned->max_rows = planner_max_rows(model);
    planned->max_context = planned->spec.max_positions;
    if (model->max_context && model->max_context < planned->max_context)
        planned->max_context = model->max_context;
    else if (model->max_context > planned->spec.max_positions) {
        status = xp_fail(XP_INVALID,
                         "models[%s].max_context: %u tokens, but the checkpoint allows %u at most",
                         model->id, model->max_context, planned->spec.max_positions);
        goto done;
    }
    if (planned->max_context < PLANNER_LEAST_CONTEXT) {
        status = xp_fail(XP_INVALID, "models[%s].max_context: %u tokens; at least %u are needed",
                         model->id, planned->max_context, PLANNER_LEAST_CONTEXT);
        goto done;
    }
    if (result->cuda) {
        status = planner_cuda_ledger(config, model, checkpoint, planned, ffn_bytes_out);
        goto done;
    }
    ledger_of_rank(config, model, checkpoint, planned);
    status = ffn_install_bytes(&planned->spec, checkpoint, model->dtype, model->ffn_tp_size,
                               ffn_bytes_out);
    if (status != XP_OK)
        xp_fail_context(status, "models[%s]", model->id);
done:
    checkpoint_close(checkpoint);
    return status;
}

static xp_status_t plan_ffn(const config_t *config, plan_result_t *result,
                            const uint64_t *ffn_bytes)
{
    uint32_t max_rows = 0, max_hidden = 0, max_intermediate = 0, max_experts = 0;
    for (uint32_t m = 0; m < config->model_count; m++) {
        const plan_model_t *model = &result->models[m];
        if (model->max_rows > max_rows)
            max_rows = model->max_rows;
        if (model->spec.hidden > max_hidden)
            max_hidden = model->spec.hidden;
        for (uint32_t l = 0; l < model->spec.layers; l++) {
            const model_ffn_t *ffn = &model->spec.ffn[l];
            uint32_t width = ffn->kind == MODEL_FFN_MOE
                                 ? ffn->intermediate * (ffn->top_k ? ffn->top_k : 1)
                                 : ffn->intermediate;
            if (ffn->shared_intermediate > width)
                width = ffn->shared_intermediate;
            if (width > max_intermediate)
                max_intermediate = width;
            if (ffn->experts > max_experts)
                max_experts = ffn->experts;
        }
    }
    uint64_t bytes[CONFIG_MAX_MODELS], capacity[CONFIG_MAX_DEVICES], largest = 0;
    uint32_t tp[CONFIG_MAX_MODELS], masks[CONFIG_MAX_MODELS];
    for (uint32_t w = 0; w < result->weights_count; w++) {
        uint32_t first = result->weights[w].first_model;
        bytes[w] = ffn_bytes[first];
        tp[w] = config->models[first].ffn_tp_size;
        if (tp[w] > config->ffn_count)
            return xp_fail(XP_INVALID,
                           "models[%s].ffn_tp_size: %u, but ffn.devices lists %u device(s)",
                           config->models[first].id, tp[w], config->ffn_count);
        if (bytes[w] > largest)
            largest = bytes[w];
    }
    for (uint32_t d = 0; d < config->ffn_count; d++) {
        plan_device_t *device = &result->ffn[d];
        if (result->cuda)
            XP_TRY(planner_cuda_workspace(config, result, &device->workspace_bytes));
        else
            device->workspace_bytes =
                ffn_workspace_bytes(device->device->threads, config->scheduler.ffn_concurrency,
                                    max_rows, max_hidden, max_intermediate, max_experts);
        capacity[d] = device->budget_bytes > device->workspace_bytes
                          ? device->budget_bytes - device->workspace_bytes
                          : 0;
    }
    uint64_t deadline =
        xp_monotonic_ns() + (uint64_t)(config->placement_timeout_s * (double)XP_NS_PER_S);
    xp_status_t status = planner_place(bytes, tp, result->weights_count, capacity,
                                       config->ffn_count, deadline, masks);
    if (status == XP_NO_MEMORY) {
        uint64_t need = 0, have = 0;
        for (uint32_t w = 0; w < result->weights_count; w++)
            need += bytes[w] * tp[w];
        for (uint32_t d = 0; d < config->ffn_count; d++)
            have += capacity[d];
        char need_text[32], have_text[32], largest_text[32];
        return xp_fail(XP_NO_MEMORY,
                       "FFN weights do not fit: %u weight set(s) need %s in all (the largest shard "
                       "%s), and the FFN devices have %s after workspaces; raise "
                       "devices.\"...\".memory, add a device to ffn.devices, or configure fewer "
                       "models",
                       result->weights_count, planner_human(need, need_text),
                       planner_human(largest, largest_text), planner_human(have, have_text));
    }
    XP_TRY(status);
    for (uint32_t w = 0; w < result->weights_count; w++) {
        result->weights[w].group = masks[w];
        result->weights[w].tp_size = tp[w];
        result->weights[w].shard_bytes = bytes[w];
        for (uint32_t d = 0; d < config->ffn_count; d++)
            if (masks[w] & (1u << d))
                result->ffn[d].weight_bytes += bytes[w];
    }
    return XP_OK;
}

static void fill_fabric_plan(const config_t *config, uint64_t generation, plan_result_t *result)
{
    fabric_plan_t *plan = &result->plan;
    plan->magic = FABRIC_PLAN_MAGIC;
    plan->version = FABRIC_PLAN_VERSION;
    plan->bytes = sizeof(*plan);
    plan->generation = generation;
    plan->atn_count = config->atn_count;
    plan->ffn_count = config->ffn_count;
    plan->lanes = config->scheduler.ffn_concurrency;
    plan->policy = config->scheduler.ffn_policy == CONFIG_POLICY_RANDOM     ? FABRIC_POLICY_RANDOM
                   : config->scheduler.ffn_policy == CONFIG_POLICY_DEADLINE ? FABRIC_POLICY_DEADLINE
                                                                            : FABRIC_POLICY_FIFO;
    plan->seed = 0x9e3779b97f4a7c15ull ^ generation;
    plan->submission_timeout_ns = (uint64_t)(config->deadlines.submission * (double)XP_NS_PER_S);
    plan->spin_ns = PLANNER_SPIN_NS;
    plan->instance_count = config->model_count;
    plan->weights_count = result->weights_count;
    for (uint32_t m = 0; m < config->model_count; m++) {
        const config_model_t *configured = &config->models[m];
        const plan_model_t *model = &result->models[m];
        fabric_plan_instance_t *instance = &plan->instances[m];
        snprintf(instance->id, sizeof(instance->id), "%s", configured->id);
        instance->weights = model->weights;
        instance->hidden = model->spec.hidden;
        instance->layers = model->spec.layers;
        instance->max_rows = model->max_rows;
        instance->dtype = XP_DTYPE_F32;
        instance->atn_tp = configured->attention_tp;
        instance->atn_dp = configured->attention_dp;
        memcpy(instance->rank_atn, model->rank_atn, sizeof(instance->rank_atn));
        /* A consumer of its own rows gets a complete result from the group's first member; ranks of
         * attention TP hold the same rows, and each needs the whole sum. */
        instance->delivery = configured->attention_tp > 1 ? FABRIC_DELIVERY_REPLICATED_COMPLETE
                                                          : FABRIC_DELIVERY_SINGLE_COMPLETE;
        instance->form = FABRIC_FORM_AUTO;
        instance->ttft_ns = (uint64_t)(configured->slo.ttft_ms * (double)XP_NS_PER_MS);
        instance->tbt_ns = (uint64_t)(configured->slo.tbt_ms * (double)XP_NS_PER_MS);
        for (uint32_t l = 0; l < model->spec.layers; l++)
            instance->layer_group[l] = result->weights[model->weights].group;
    }
}

xp_status_t planner_make(const config_t *config, uint64_t generation, plan_result_t **result_out)
{
    xp_status_t status;
    plan_result_t *result = calloc(1, sizeof(*result));
    if (!result)
        return xp_fail(XP_NO_MEMORY, "no memory for a plan");
    result->model_count = config->model_count;
    result->atn_count = config->atn_count;
    result->ffn_count = config->ffn_count;
    XP_TRY_GOTO(status, fail, planner_check_devices(config, result));
    XP_TRY_GOTO(status, fail, planner_budgets(config, result));

    uint64_t ffn_bytes[CONFIG_MAX_MODELS];
    for (uint32_t m = 0; m < config->model_count; m++) {
        plan_model_t *model = &result->models[m];
        model->ranks = planner_rank_devices(config, m, model->rank_atn);
        XP_TRY_GOTO(status, fail, plan_one_model(config, m, result, &ffn_bytes[m]));
        for (uint32_t r = 0; r < model->ranks; r++) {
            plan_device_t *device = &result->atn[model->rank_atn[r]];
            device->weight_bytes += model->attention_bytes;
            device->workspace_bytes += model->workspace_bytes;
            device->arena_bytes += model->arena_bytes;
        }
        uint32_t w = 0;
        while (w < result->weights_count &&
               !same_weights(&config->models[result->weights[w].first_model], &config->models[m]))
            w++;
        if (w == result->weights_count)
            result->weights[result->weights_count++].first_model = m;
        model->weights = w;
    }
    XP_TRY_GOTO(status, fail, planner_cuda_heap(config, result));
    XP_TRY_GOTO(status, fail, planner_kv(config, result));
    XP_TRY_GOTO(status, fail, plan_ffn(config, result, ffn_bytes));
    fill_fabric_plan(config, generation, result);
    if (result->cuda)
        planner_cuda_finish(config, result);
    XP_TRY_GOTO(status, fail, fabric_plan_check(&result->plan, sizeof(result->plan)));
    if (!result->cuda) /* the stages are in the FFN devices' own memory */
        XP_TRY_GOTO(status, fail, fabric_shm_bytes(&result->plan, &result->fabric_bytes));
    *result_out = result;
    return XP_OK;
fail:
    free(result);
    return status;
}

void planner_free(plan_result_t *result)
{
    free(result);
}
