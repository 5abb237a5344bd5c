/* SPDX-License-Identifier: MIT */
/* KV Caches in the plan: pools, floors that are admitted, ceilings, fixed shares, groups. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "control/planner_kv.h"

static char folder[256];

static int make_folder(void **state)
{
    char command[512];
    (void)state;
    snprintf(folder, sizeof(folder), "/tmp/xpool-planner-kv-%d", (int)getpid());
    snprintf(command, sizeof(command),
             "mkdir -p %s && cp " XPOOL_SOURCE_DIR "/fuzz/corpus/config_json/qwen3.json "
             "%s/config.json",
             folder, folder);
    return system(command);
}

static int remove_folder(void **state)
{
    char command[512];
    (void)state;
    snprintf(command, sizeof(command), "rm -r %s", folder);
    return system(command);
}

/* `count` models of that checkpoint on one attention device of `memory` bytes. */
static config_t *make_config(uint32_t count, uint64_t memory)
{
    config_t *config = calloc(1, sizeof(*config));
    assert_non_null(config);
    snprintf(config->fabric_provider, sizeof(config->fabric_provider), "auto");
    config->model_count = count;
    for (uint32_t m = 0; m < count; m++) {
        config_model_t *model = &config->models[m];
        snprintf(model->id, sizeof(model->id), "m%u", m);
        snprintf(model->path, sizeof(model->path), "%s", folder);
        model->load_format = CONFIG_LOAD_DUMMY;
        model->ffn_tp_size = model->attention_tp = model->attention_dp = 1;
        model->decode_rows = 32;
        model->prefill_rows = 128;
        model->slo = (config_slo_t){2000, 200};
    }
    config->atn_count = config->ffn_count = 1;
    snprintf(config->atn[0].name, sizeof(config->atn[0].name), "cpu:0");
    snprintf(config->ffn[0].name, sizeof(config->ffn[0].name), "cpu:1");
    config->ffn[0].index = 1;
    config->atn[0].threads = config->ffn[0].threads = 1;
    config->atn[0].memory_bytes = memory;
    config->ffn[0].memory_bytes = 64u << 20;
    config->scheduler.ffn_concurrency = 2;
    config->atn_memory_utilization = 1.0;
    config->placement_timeout_s = 5;
    config->deadlines.submission = 30;
    return config;
}

static plan_result_t *plan(const config_t *config)
{
    plan_result_t *result = NULL;
    if (planner_make(config, 1, &result) != XP_OK)
        fail_msg("%s", xp_error_last()->text);
    return result;
}

static uint64_t left_on(const plan_device_t *device)
{
    return device->budget_bytes - device->weight_bytes - device->workspace_bytes -
           device->arena_bytes;
}

/* What weights and workspaces of one model take here; the tests give memory beyond it. */
static uint64_t taken_by(uint32_t count)
{
    config_t *config = make_config(count, 64u << 20);
    plan_result_t *result = plan(config);
    uint64_t taken = result->atn[0].budget_bytes - left_on(&result->atn[0]);
    planner_free(result);
    free(config);
    return taken;
}

static void check(const config_t *config, const plan_result_t *result)
{
    for (uint32_t d = 0; d < result->atn_count; d++) {
        uint64_t floors = 0;
        for (uint32_t m = 0; m < result->model_count; m++)
            for (uint32_t r = 0; r < result->models[m].ranks; r++)
                if (result->models[m].rank_atn[r] == d)
                    floors +=
                        result->models[m].kv_floor_bundles * result->models[m].kv_bundle_bytes;
        assert_true(floors <= result->atn[d].kv_bytes);
        assert_true(result->atn[d].kv_bytes <= left_on(&result->atn[d]));
    }
    for (uint32_t m = 0; m < result->model_count; m++) {
        const plan_model_t *model = &result->models[m];
        assert_true(model->kv_floor_bundles >= 1);
        assert_true(model->kv_floor_bundles <= model->kv_ceiling_bundles);
        assert_true(model->kv_bundle_bytes == model->kv_bundle_tokens * model->kv_bytes_per_token);
        assert_true(model->kv_tokens == model->kv_ceiling_bundles * model->kv_bundle_tokens);
        assert_true(model->max_context <= model->kv_tokens);
        if (model->kv_elastic)
            assert_true(model->kv_bundle_bytes % 4096 == 0 && model->kv_bundle_tokens % 16 == 0);
    }
    /* The channel takes it as it is. */
    kv_group_plan_t groups[KV_MAX_GROUPS];
    uint32_t count;
    uint64_t pools[KV_MAX_POOLS];
    kv_channel_t *channel;
    int fd;
    for (uint32_t d = 0; d < result->atn_count; d++)
        pools[d] = result->atn[d].kv_bytes;
    assert_int_equal(planner_kv_groups(result, config, groups, &count), XP_OK);
    assert_int_equal(kv_channel_create(1, pools, result->atn_count, groups, count, &fd, &channel),
                     XP_OK);
    for (uint32_t m = 0; m < result->model_count; m++)
        for (uint32_t r = 0; r < result->models[m].ranks; r++) {
            uint32_t partition = planner_kv_partition(result, m, r);
            assert_int_equal(channel->groups[channel->partitions[partition].group].instance, m);
            assert_int_equal(channel->partitions[partition].pool, result->models[m].rank_atn[r]);
        }
    kv_channel_unmap(channel);
    close(fd);
}

static void each_may_have_what_floors_leave(void **state)
{
    (void)state;
    config_t *config = make_config(3, taken_by(3) + (3u << 20));
    plan_result_t *result = plan(config);
    const plan_model_t *model = &result->models[0];
    check(config, result);
    assert_true(model->kv_elastic);
    uint64_t bundle = model->kv_bundle_bytes;
    uint64_t others = 2 * model->kv_floor_bundles * bundle;
    uint64_t useful = (uint64_t)model->spec.max_positions * 32 * model->kv_bytes_per_token;
    uint64_t possible = (left_on(&result->atn[0]) - others) / bundle;
    assert_true(
        model->kv_ceiling_bundles == possible ||
        (model->kv_ceiling_bundles < possible && model->kv_ceiling_bundles * bundle >= useful));
    planner_free(result);
    /* Static: equal shares, nothing to lend. */
    config->scheduler.kv_policy = CONFIG_KV_STATIC;
    result = plan(config);
    check(config, result);
    for (uint32_t m = 0; m < 3; m++) {
        assert_false(result->models[m].kv_elastic);
        assert_int_equal(result->models[m].kv_floor_bundles, result->models[m].kv_ceiling_bundles);
        assert_int_equal(result->models[m].kv_tokens, result->models[0].kv_tokens);
    }
    planner_free(result);
    free(config);
}

static void configured_floors_and_ceilings_hold(void **state)
{
    (void)state;
    config_t *config = make_config(2, taken_by(2) + (8u << 20));
    config->models[0].kv_floor_tokens = 1000;
    config->models[1].kv_ceiling_tokens = 700;
    plan_result_t *result = plan(config);
    check(config, result);
    const plan_model_t *first = &result->models[0], *second = &result->models[1];
    assert_in_range(first->kv_floor_tokens, 1000, 1000 + first->kv_bundle_tokens - 1);
    assert_in_range(second->kv_tokens, 700, 700 + second->kv_bundle_tokens - 1);
    planner_free(result);
    free(config);
}

static void expect_refused(const config_t *config, const char *text)
{
    plan_result_t *result = NULL;
    assert_int_not_equal(planner_make(config, 1, &result), XP_OK);
    if (!strstr(xp_error_last()->text, text))
        fail_msg("\"%s\" says nothing of \"%s\"", xp_error_last()->text, text);
}

static void floors_that_do_not_fit_are_refused_by_name(void **state)
{
    (void)state;
    config_t *config = make_config(2, taken_by(2) + (1u << 20));
    config->models[1].kv_floor_tokens = 100000;
    expect_refused(config, "models[m1]");
    expect_refused(config, "lower kv_floor_tokens");
    config->models[1].kv_floor_tokens = 500;
    config->models[1].kv_ceiling_tokens = 300;
    expect_refused(config, "models[m1].kv_ceiling_tokens: 300 tokens are below the floor of 500");
    free(config);
    config = make_config(2, taken_by(2) - 1);
    expect_refused(config, "attention device cpu:0: weights, workspaces and arenas need");
    free(config);
    config = make_config(2, taken_by(2) + 4096);
    expect_refused(config, "the floors of its KV Caches need");
    free(config);
}

static void a_small_pool_still_has_a_floor_each(void **state)
{
    (void)state;
    /* Two floors of 512 tokens do not fit; of 128 they do. A token takes 128 bytes here. */
    config_t *config = make_config(2, taken_by(2) + 72 * 1024);
    plan_result_t *result = plan(config);
    check(config, result);
    assert_in_range(result->models[0].kv_floor_tokens, 128, 511);
    planner_free(result);
    free(config);
}

/* An engine without a part in elastic KV keeps a share beside those that have one. */
static void fixed_beside_elastic(void **state)
{
    (void)state;
    config_t *config = make_config(3, taken_by(3) + (6u << 20));
    config->models[1].engine = CONFIG_ENGINE_SGLANG;
    config->models[1].kv_ceiling_tokens = 777;
    plan_result_t *result = plan(config);
    check(config, result);
    if (!result->models[1].kv_elastic) {
        assert_int_equal(result->models[1].kv_tokens, 777);
        assert_int_equal(result->models[1].kv_floor_bundles, 1);
    }
    assert_true(result->models[0].kv_elastic && result->models[2].kv_elastic);
    planner_free(result);
    free(config);
}

static void ranks_on_several_devices(void **state)
{
    (void)state;
    config_t *config = make_config(2, 16u << 20);
    config->atn_count = 2;
    config->atn[1] = config->atn[0];
    snprintf(config->atn[1].name, sizeof(config->atn[1].name), "cpu:2");
    config->atn[1].index = 2;
    config->models[0].engine = CONFIG_ENGINE_SGLANG;
    config->models[0].attention_tp = 2;
    plan_result_t *result = plan(config);
    check(config, result);
    kv_group_plan_t groups[KV_MAX_GROUPS];
    uint32_t count;
    assert_int_equal(planner_kv_groups(result, config, groups, &count), XP_OK);
    assert_int_equal(count, 2);
    assert_int_equal(groups[0].partition_count, 2);
    assert_true(groups[0].pools[0] != groups[0].pools[1]);
    planner_free(result);
    free(config);
}

/* GPUs: bundles are handles of the driver, tokens may have padding, each rank keeps handles ready
 * outside the pool; "static" leaves the KV Cache to the engine. */
static void gpus_move_handles(void **state)
{
    (void)state;
    config_t *config = make_config(2, 20ull << 30);
    for (uint32_t side = 0; side < 2; side++) {
        config_device_t *device = side ? &config->ffn[0] : &config->atn[0];
        device->kind = CONFIG_DEVICE_CUDA;
        device->memory_bytes = 20ull << 30;
        snprintf(device->name, sizeof(device->name), "cuda:%u", side);
    }
    for (uint32_t m = 0; m < 2; m++)
        config->models[m].engine = CONFIG_ENGINE_SGLANG;
    plan_result_t *result = plan(config);
    check(config, result);
    uint64_t ready = 0, per_token[2];
    for (uint32_t m = 0; m < 2; m++) {
        const plan_model_t *model = &result->models[m];
        per_token[m] = model->kv_bytes_per_token;
        assert_true(model->kv_elastic && planner_kv_ranges(config, result));
        assert_int_equal(model->kv_bundle_bytes % (2u << 20), 0);
        assert_in_range(model->kv_bundle_bytes, 2u << 20, 64u << 20);
        assert_int_equal(kv_token_stride(per_token[m], 2u << 20), per_token[m]);
        assert_true(model->kv_floor_tokens >= 512);
        ready += KV_READY_BUNDLES_CUDA * model->kv_bundle_bytes;
    }
    uint64_t workspace = result->atn[0].workspace_bytes;
    planner_free(result);

    config->scheduler.kv_policy = CONFIG_KV_STATIC;
    result = plan(config);
    check(config, result);
    assert_false(planner_kv_ranges(config, result));
    assert_int_equal(result->models[0].kv_floor_bundles, 1);
    assert_int_equal(result->atn[0].workspace_bytes, workspace - ready);
    assert_true(result->models[0].kv_bytes_per_token <= per_token[0]);
    uint64_t taken = result->atn[0].budget_bytes - left_on(&result->atn[0]);
    planner_free(result);

    config->scheduler.kv_policy = CONFIG_KV_DEADLINE;
    config->atn[0].memory_bytes = taken + (3u << 20);
    expect_refused(config, "handles that its ranks keep ready need");
    free(config);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_may_have_what_floors_leave),
        cmocka_unit_test(configured_floors_and_ceilings_hold),
        cmocka_unit_test(floors_that_do_not_fit_are_refused_by_name),
        cmocka_unit_test(a_small_pool_still_has_a_floor_each),
        cmocka_unit_test(fixed_beside_elastic),
        cmocka_unit_test(ranks_on_several_devices),
        cmocka_unit_test(gpus_move_handles),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
