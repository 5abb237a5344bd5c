/* SPDX-License-Identifier: MIT */
/*
 * Division of the attention devices' remaining memory among KV Caches. Pure computation on the
 * caller's thread.
 */
#include "control/planner_kv.h"

#include <stdio.h>

#define LEAST_CONTEXT  128 /* an Instance that cannot hold this many tokens is refused */
#define MODEST_CONTEXT 512 /* a floor by default, where it fits */
/* A pool of a few MiB is still divided into this many bundles a rank. */
#define LEAST_BUNDLES 32
#define PAGE_TOKENS   16
#define NO_LIMIT      UINT32_MAX

bool planner_kv_ranges(const config_t *config, const plan_result_t *result)
{
    return !result->cuda || config->scheduler.kv_policy != CONFIG_KV_STATIC;
}

static uint32_t ranks_on(const plan_model_t *model, uint32_t device)
{
    uint32_t count = 0;
    for (uint32_t r = 0; r < model->ranks; r++)
        count += model->rank_atn[r] == device;
    return count;
}

static uint64_t taken_bytes(const plan_device_t *device)
{
    return device->weight_bytes + device->workspace_bytes + device->arena_bytes;
}

/* ---- shares -----------------------------------------------------------------------------------
 */

/* Tokens that a model's requests can use, or its configured ceiling. */
static uint32_t useful_tokens(const config_model_t *configured, const plan_model_t *model)
{
    uint64_t tokens = configured->kv_ceiling_tokens
                          ? configured->kv_ceiling_tokens
                          : (uint64_t)model->max_context * configured->decode_rows;
    return tokens < NO_LIMIT ? (uint32_t)tokens : NO_LIMIT;
}

/* Gives one attention device's remaining bytes to the ranks on it: in equal parts, none above its
 * ceiling. All ranks of an Instance have the same capacity, so a model keeps the least that any of
 * its devices gives. */
static xp_status_t divide_device(const config_t *config, plan_result_t *result, uint32_t d)
{
    plan_device_t *device = &result->atn[d];
    uint64_t taken = taken_bytes(device);
    char need[32], have[32];
    if (taken > device->budget_bytes)
        return xp_fail(XP_NO_MEMORY,
                       "attention device %s: weights, workspaces and arenas need %s of its %s; "
                       "raise devices.\"%s\".memory, lower its threads or the models' "
                       "prefill_rows, or move models to another device",
                       device->device->name, planner_human(taken, need),
                       planner_human(device->budget_bytes, have), device->device->name);
    uint64_t left = device->budget_bytes - taken;
    bool settled[CONFIG_MAX_MODELS] = {false};
    uint32_t open = 0;
    uint64_t tokens[CONFIG_MAX_MODELS] = {0};
    for (uint32_t m = 0; m < config->model_count; m++)
        open += ranks_on(&result->models[m], d);
    /* Whoever's ceiling is below an equal part takes its ceiling; the others share the rest. */
    for (bool changed = true; changed && open;) {
        changed = false;
        uint64_t part = left / open;
        for (uint32_t m = 0; m < config->model_count; m++) {
            const plan_model_t *model = &result->models[m];
            uint32_t here = ranks_on(model, d);
            if (!here || settled[m])
                continue;
            uint64_t ceiling = useful_tokens(&config->models[m], model);
            if (ceiling * model->kv_bytes_per_token > part)
                continue;
            tokens[m] = ceiling;
            left -= ceiling * model->kv_bytes_per_token * here;
            settled[m] = changed = true;
            open -= here;
            break;
        }
    }
    for (uint32_t m = 0; m < config->model_count; m++) {
        plan_model_t *model = &result->models[m];
        if (!ranks_on(model, d))
            continue;
        if (!settled[m])
            tokens[m] = left / open / model->kv_bytes_per_token;
        if (tokens[m] < model->kv_tokens)
            model->kv_tokens = (uint32_t)tokens[m];
    }
    return XP_OK;
}

/* ---- floors -----------------------------------------------------------------------------------
 */

static uint32_t floor_tokens(const config_model_t *configured, const plan_model_t *model,
                             uint32_t by_default)
{
    if (configured->kv_floor_tokens)
        return configured->kv_floor_tokens > LEAST_CONTEXT ? configured->kv_floor_tokens
                                                           : LEAST_CONTEXT;
    uint32_t tokens = by_default < model->max_context ? by_default : model->max_context;
    uint32_t ceiling = configured->kv_ceiling_tokens;
    return ceiling && ceiling < tokens && ceiling >= LEAST_CONTEXT ? ceiling : tokens;
}

static xp_status_t check_ceiling(const config_model_t *configured, uint32_t floor)
{
    if (!configured->kv_ceiling_tokens || configured->kv_ceiling_tokens >= floor)
        return XP_OK;
    return xp_fail(
        XP_INVALID, "models[%s].kv_ceiling_tokens: %u tokens are below the floor of %u (%s)",
        configured->id, configured->kv_ceiling_tokens, floor,
        configured->kv_floor_tokens ? "kv_floor_tokens" : "the least an Instance can work with");
}

/* A share is the whole KV Cache: nothing grows later. */
static xp_status_t check_share(const config_t *config, const plan_result_t *result, uint32_t m)
{
    const plan_model_t *model = &result->models[m];
    const config_model_t *configured = &config->models[m];
    const char *device = result->atn[model->rank_atn[0]].device->name;
    char need[32], have[32];
    uint32_t floor = floor_tokens(configured, model, LEAST_CONTEXT);
    XP_TRY(check_ceiling(configured, floor));
    if (model->kv_tokens < floor)
        return xp_fail(XP_NO_MEMORY,
                       "models[%s]: its KV Cache would get %u tokens (%s) of attention "
                       "device %s, below its floor of %u (%s); raise "
                       "devices.\"%s\".memory or lower kv_floor_tokens",
                       configured->id, model->kv_tokens,
                       planner_human(model->kv_tokens * model->kv_bytes_per_token, have), device,
                       floor, planner_human(floor * model->kv_bytes_per_token, need), device);
    return XP_OK;
}

static uint64_t floors_on(const plan_result_t *result, uint32_t d)
{
    uint64_t bytes = 0;
    for (uint32_t m = 0; m < result->model_count; m++) {
        const plan_model_t *model = &result->models[m];
        bytes += ranks_on(model, d) * model->kv_floor_bundles * model->kv_bundle_bytes;
    }
    return bytes;
}

static void choose_bundles(const config_model_t *configured, const plan_result_t *result,
                           plan_model_t *model)
{
    uint64_t target = result->cuda ? KV_BUNDLE_TARGET_BYTES_CUDA : KV_BUNDLE_TARGET_BYTES_CPU;
    uint64_t granule = result->cuda ? KV_BUNDLE_GRANULE_BYTES_CUDA : KV_BUNDLE_GRANULE_BYTES_CPU;
    uint64_t useful = useful_tokens(configured, model) * model->kv_bytes_per_token;
    if (useful / LEAST_BUNDLES < target)
        target = useful / LEAST_BUNDLES;
    for (uint32_t r = 0; r < model->ranks; r++) {
        uint32_t d = model->rank_atn[r], ranks = 0;
        const plan_device_t *device = &result->atn[d];
        for (uint32_t m = 0; m < result->model_count; m++)
            ranks += ranks_on(&result->models[m], d);
        uint64_t part = (device->budget_bytes - taken_bytes(device)) / ranks / LEAST_BUNDLES;
        if (part < target)
            target = part;
    }
    model->kv_page_tokens = PAGE_TOKENS;
    model->kv_bundle_tokens =
        kv_bundle_tokens(model->kv_bytes_per_token, PAGE_TOKENS, target, granule);
    model->kv_bundle_bytes = model->kv_bundle_tokens * model->kv_bytes_per_token;
}

/* On GPUs the ranks keep a few handles ready, which no other can have. */
static xp_status_t take_ready_handles(const config_t *config, plan_result_t *result)
{
    for (uint32_t d = 0; d < config->atn_count && result->cuda; d++) {
        plan_device_t *device = &result->atn[d];
        uint64_t bytes = 0;
        char need[32], have[32];
        for (uint32_t m = 0; m < config->model_count; m++) {
            const plan_model_t *model = &result->models[m];
            if (model->kv_elastic)
                bytes += ranks_on(model, d) * KV_READY_BUNDLES_CUDA * model->kv_bundle_bytes;
        }
        uint64_t left = device->budget_bytes - taken_bytes(device);
        if (bytes > left)
            return xp_fail(
                XP_NO_MEMORY,
                "attention device %s: the handles that its ranks keep ready need %s, "
                "weights, workspaces and arenas leave %s; raise devices.\"%s\".memory or "
                "set scheduler.kv_policy = \"static\"",
                device->device->name, planner_human(bytes, need), planner_human(left, have),
                device->device->name);
        device->workspace_bytes += bytes;
    }
    return XP_OK;
}

static uint32_t bundles_of(const plan_model_t *model, uint32_t tokens)
{
    return (uint32_t)(((uint64_t)tokens + model->kv_bundle_tokens - 1) / model->kv_bundle_tokens);
}

/* A fixed KV Cache: one share, in bundles of its own size where the engine maps bundles, else one
 * bundle of everything. */
static void fix_group(const config_t *config, const plan_result_t *result,
                      const config_model_t *configured, plan_model_t *model)
{
    uint32_t bundles = 0;
    if (planner_kv_ranges(config, result)) {
        choose_bundles(configured, result, model);
        bundles = model->kv_tokens / model->kv_bundle_tokens;
    }
    if (bundles == 0) {
        model->kv_page_tokens = 1;
        model->kv_bundle_tokens = model->kv_tokens;
        model->kv_bundle_bytes = model->kv_tokens * model->kv_bytes_per_token;
        bundles = 1;
    }
    model->kv_floor_bundles = model->kv_ceiling_bundles = bundles;
}

/* The first device on which the floors do not fit; atn_count when all do. */
static uint32_t set_floors(const config_t *config, plan_result_t *result, uint32_t by_default)
{
    for (uint32_t m = 0; m < config->model_count; m++) {
        plan_model_t *model = &result->models[m];
        if (model->kv_elastic)
            model->kv_floor_bundles =
                bundles_of(model, floor_tokens(&config->models[m], model, by_default));
    }
    for (uint32_t d = 0; d < config->atn_count; d++)
        if (floors_on(result, d) > result->atn[d].budget_bytes - taken_bytes(&result->atn[d]))
            return d;
    return config->atn_count;
}

static xp_status_t admit_floors(const config_t *config, plan_result_t *result)
{
    uint32_t d = set_floors(config, result, MODEST_CONTEXT);
    if (d < config->atn_count)
        d = set_floors(config, result, LEAST_CONTEXT);
    if (d == config->atn_count)
        return XP_OK;
    const plan_device_t *device = &result->atn[d];
    char need[32], have[32], largest_text[32];
    uint32_t largest = 0;
    uint64_t most = 0;
    for (uint32_t m = 0; m < config->model_count; m++) {
        const plan_model_t *model = &result->models[m];
        uint64_t bytes = ranks_on(model, d) * model->kv_floor_bundles * model->kv_bundle_bytes;
        if (bytes > most) {
            most = bytes;
            largest = m;
        }
    }
    return xp_fail(XP_NO_MEMORY,
                   "attention device %s: the floors of its KV Caches need %s, weights, workspaces "
                   "and arenas leave %s; the largest is that of models[%s] (%s, its floor of %u "
                   "tokens); raise devices.\"%s\".memory or lower kv_floor_tokens",
                   device->device->name, planner_human(floors_on(result, d), need),
                   planner_human(device->budget_bytes - taken_bytes(device), have),
                   config->models[largest].id, planner_human(most, largest_text),
                   result->models[largest].kv_floor_bundles *
                       result->models[largest].kv_bundle_tokens,
                   device->device->name);
}

/* Everything that floors of others leave on each of its devices, shared by its own ranks there. */
static void set_ceiling(const config_t *config, const plan_result_t *result, uint32_t m,
                        plan_model_t *model)
{
    uint64_t most = bundles_of(model, useful_tokens(&config->models[m], model));
    for (uint32_t r = 0; r < model->ranks; r++) {
        uint32_t d = model->rank_atn[r];
        const plan_device_t *device = &result->atn[d];
        uint32_t here = ranks_on(model, d);
        uint64_t own = here * model->kv_floor_bundles * model->kv_bundle_bytes;
        uint64_t others = floors_on(result, d) - own;
        /* Ranks of one group move together; those of other DP ranks keep their floors. */
        uint32_t groups_here =
            config->models[m].attention_dp < here ? config->models[m].attention_dp : here;
        uint32_t together = here / groups_here;
        others += (here - together) * model->kv_floor_bundles * model->kv_bundle_bytes;
        uint64_t possible = (device->budget_bytes - taken_bytes(device) - others) /
                            (together * model->kv_bundle_bytes);
        if (possible < most)
            most = possible;
    }
    model->kv_ceiling_bundles =
        most > model->kv_floor_bundles ? (uint32_t)most : model->kv_floor_bundles;
}

static void finish_model(const config_model_t *configured, plan_model_t *model)
{
    uint64_t tokens = (uint64_t)model->kv_ceiling_bundles * model->kv_bundle_tokens;
    model->kv_tokens = tokens < NO_LIMIT ? (uint32_t)tokens : NO_LIMIT;
    model->kv_floor_tokens = model->kv_floor_bundles * model->kv_bundle_tokens;
    if (model->max_context > model->kv_tokens)
        model->max_context = model->kv_tokens;
    model->kv_bytes = model->kv_tokens * model->kv_bytes_per_token;
}

xp_status_t planner_kv(const config_t *config, plan_result_t *result)
{
    for (uint32_t m = 0; m < config->model_count; m++) {
        plan_model_t *model = &result->models[m];
        model->kv_tokens = NO_LIMIT;
        model->kv_elastic = config->scheduler.kv_policy != CONFIG_KV_STATIC;
        if (result->cuda && model->kv_elastic)
            model->kv_bytes_per_token =
                kv_token_stride(model->kv_bytes_per_token, KV_BUNDLE_GRANULE_BYTES_CUDA);
    }
    for (uint32_t d = 0; d < config->atn_count; d++)
        XP_TRY(divide_device(config, result, d));
    for (uint32_t m = 0; m < config->model_count; m++) {
        plan_model_t *model = &result->models[m];
        if (model->kv_elastic) {
            XP_TRY(check_ceiling(&config->models[m],
                                 floor_tokens(&config->models[m], model, LEAST_CONTEXT)));
            choose_bundles(&config->models[m], result, model);
        } else {
            XP_TRY(check_share(config, result, m));
            fix_group(config, result, &config->models[m], model);
        }
    }
    XP_TRY(take_ready_handles(config, result));
    XP_TRY(admit_floors(config, result));
    for (uint32_t m = 0; m < config->model_count; m++) {
        plan_model_t *model = &result->models[m];
        if (model->kv_elastic)
            set_ceiling(config, result, m, model);
        finish_model(&config->models[m], model);
    }
    for (uint32_t d = 0; d < config->atn_count; d++) {
        plan_device_t *device = &result->atn[d];
        uint64_t ceilings = 0, left = device->budget_bytes - taken_bytes(device);
        for (uint32_t m = 0; m < config->model_count; m++)
            ceilings += ranks_on(&result->models[m], d) * result->models[m].kv_bytes;
        device->kv_bytes = ceilings < left ? ceilings : left;
    }
    return XP_OK;
}

/* ---- groups of the channel --------------------------------------------------------------------
 */

uint32_t planner_kv_partition(const plan_result_t *result, uint32_t model, uint32_t rank)
{
    uint32_t before = 0;
    for (uint32_t m = 0; m < model; m++)
        before += result->models[m].ranks;
    return before + rank; /* rank = dp * attention_tp + tp, as the groups follow each other */
}

xp_status_t planner_kv_groups(const plan_result_t *result, const config_t *config,
                              kv_group_plan_t groups_out[KV_MAX_GROUPS], uint32_t *count_out)
{
    uint32_t count = 0;
    for (uint32_t m = 0; m < result->model_count; m++) {
        const plan_model_t *model = &result->models[m];
        uint32_t tp = config->models[m].attention_tp;
        for (uint32_t dp = 0; dp < config->models[m].attention_dp; dp++) {
            if (count == KV_MAX_GROUPS)
                return xp_fail(XP_UNSUPPORTED,
                               "the models have more than %d KV Capacity Groups (Instances times "
                               "attention_dp); configure fewer",
                               KV_MAX_GROUPS);
            kv_group_plan_t *group = &groups_out[count++];
            *group = (kv_group_plan_t){.instance = m,
                                       .dp_rank = dp,
                                       .partition_count = tp,
                                       .bundle_bytes = model->kv_bundle_bytes,
                                       .token_bytes = model->kv_bytes_per_token,
                                       .bundle_tokens = model->kv_bundle_tokens,
                                       .page_tokens = model->kv_page_tokens,
                                       .floor_bundles = model->kv_floor_bundles,
                                       .ceiling_bundles = model->kv_ceiling_bundles,
                                       .reserved_bundles = model->kv_ceiling_bundles,
                                       .elastic = model->kv_elastic};
            for (uint32_t t = 0; t < tp; t++)
                group->pools[t] = model->rank_atn[dp * tp + t];
        }
    }
    *count_out = count;
    return XP_OK;
}
