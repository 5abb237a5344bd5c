/* SPDX-License-Identifier: MIT */
/* What the planner makes of SGLang Instances: ranks, ledger and refusals, from config.json alone
 * (load_format = "dummy" needs no weights). The expected bytes are counted by hand here. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "control/planner.h"

static char folder[256];

/* A checkpoint folder that is one of the fuzzing corpus's config.json. */
static const char *checkpoint(const char *family)
{
    static char path[512];
    char command[1024];
    snprintf(path, sizeof(path), "%s/%s", folder, family);
    snprintf(command, sizeof(command),
             "mkdir -p %s && cp " XPOOL_SOURCE_DIR
             "/fuzz/corpus/config_json/%s.json %s/config.json",
             path, family, path);
    assert_int_equal(system(command), 0);
    return path;
}

typedef struct wanted {
    const char *family;
    config_engine_t engine;
    uint32_t tp, dp, decode_rows, prefill_rows;
    xp_dtype_t dtype;
} wanted_t;

static config_t *make_config(const wanted_t *models, uint32_t count, uint32_t attention_devices)
{
    config_t *config = calloc(1, sizeof(*config));
    assert_non_null(config);
    snprintf(config->fabric_provider, sizeof(config->fabric_provider), "auto");
    config->model_count = count;
    for (uint32_t m = 0; m < count; m++) {
        config_model_t *model = &config->models[m];
        const wanted_t *want = &models[m];
        snprintf(model->id, sizeof(model->id), "m%u", m);
        snprintf(model->path, sizeof(model->path), "%s", checkpoint(want->family));
        model->engine = want->engine;
        model->load_format = CONFIG_LOAD_DUMMY;
        model->dtype = want->dtype;
        model->ffn_tp_size = 1;
        model->attention_tp = want->tp ? want->tp : 1;
        model->attention_dp = want->dp ? want->dp : 1;
        model->decode_rows = want->decode_rows ? want->decode_rows : 32;
        model->prefill_rows = want->prefill_rows ? want->prefill_rows : 128;
        model->slo = (config_slo_t){2000, 200};
    }
    config->atn_count = attention_devices;
    config->ffn_count = 1;
    for (uint32_t d = 0; d < attention_devices + 1; d++) {
        config_device_t *device = d < attention_devices ? &config->atn[d] : &config->ffn[0];
        snprintf(device->name, sizeof(device->name), "cpu:%u", d);
        device->index = d;
        device->threads = 1;
        device->memory_bytes = 64u << 20;
    }
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

static void expect_refused(const wanted_t *want, uint32_t devices, const char *text)
{
    config_t *config = make_config(want, 1, devices);
    plan_result_t *result = NULL;
    assert_int_not_equal(planner_make(config, 1, &result), XP_OK);
    if (!strstr(xp_error_last()->text, text))
        fail_msg("\"%s\" says nothing of \"%s\"", xp_error_last()->text, text);
    free(config);
}

static void one_rank_holds_everything_but_the_ffn(void **state)
{
    (void)state;
    /* qwen3.json: hidden 16, 1 layer, 2 heads and 2 KV heads of 8, vocabulary 259 (padded to 320),
     * not tied; q, k, v, o 16 x 16 each, two norms of 16 and two of 8, the last norm. */
    const uint64_t elements = 2 * 320 * 16 + 4 * 16 * 16 + 2 * 16 + 2 * 8 + 16;
    wanted_t want = {.family = "qwen3", .engine = CONFIG_ENGINE_SGLANG, .dtype = XP_DTYPE_BF16};
    config_t *config = make_config(&want, 1, 1);
    plan_result_t *result = plan(config);
    const plan_model_t *model = &result->models[0];
    assert_int_equal(model->ranks, 1);
    assert_int_equal(model->dtype, XP_DTYPE_BF16);
    assert_int_equal(model->attention_bytes, 2 * elements);
    assert_int_equal(model->kv_bytes_per_token, 2 * 2 * 8 * 2); /* K and V, 2 heads of 8, bf16 */
    assert_int_equal(model->max_rows, 128); /* the larger of both steps, not their sum */
    assert_int_equal(result->plan.instances[0].delivery, FABRIC_DELIVERY_SINGLE_COMPLETE);
    planner_free(result);
    free(config);
}

static void native_steps_hold_both_kinds_of_rows(void **state)
{
    (void)state;
    wanted_t want = {.family = "qwen3", .engine = CONFIG_ENGINE_NATIVE};
    config_t *config = make_config(&want, 1, 1);
    plan_result_t *result = plan(config);
    assert_int_equal(result->models[0].max_rows, 160);
    planner_free(result);
    free(config);
}

static void checkpoint_dtype_is_named(void **state)
{
    (void)state;
    wanted_t want = {.family = "qwen3", .engine = CONFIG_ENGINE_SGLANG};
    config_t *config = make_config(&want, 1, 1);
    plan_result_t *result = plan(config);
    assert_int_equal(result->models[0].dtype, XP_DTYPE_F32); /* torch_dtype of the file */
    planner_free(result);
    free(config);
}

static void tensor_parallel_ranks_share_heads_and_get_the_whole_sum(void **state)
{
    (void)state;
    wanted_t wants[] = {
        {.family = "qwen3", .engine = CONFIG_ENGINE_SGLANG, .tp = 2, .dtype = XP_DTYPE_BF16},
        {.family = "qwen3", .engine = CONFIG_ENGINE_NATIVE},
        {.family = "qwen3", .engine = CONFIG_ENGINE_SGLANG, .tp = 2, .dtype = XP_DTYPE_BF16}};
    config_t *config = make_config(wants, 3, 3);
    plan_result_t *result = plan(config);
    const plan_model_t *model = &result->models[0];
    const uint64_t elements = 2 * 192 * 16 + 4 * 16 * 8 + 2 * 16 + 2 * 8 + 16; /* 259/2 -> 192 */
    assert_int_equal(model->ranks, 2);
    assert_int_equal(model->attention_bytes, 2 * elements);
    assert_int_equal(model->kv_bytes_per_token, 2 * 1 * 8 * 2);
    assert_int_equal(result->plan.instances[0].delivery, FABRIC_DELIVERY_REPLICATED_COMPLETE);
    /* Devices in turn: 0 1, then 2, then 0 1 again. */
    const uint32_t devices[][2] = {{0, 1}, {2, 0}, {0, 1}};
    for (uint32_t m = 0; m < 3; m++)
        for (uint32_t r = 0; r < result->models[m].ranks; r++) {
            assert_int_equal(result->models[m].rank_atn[r], devices[m][r]);
            assert_int_equal(result->plan.instances[m].rank_atn[r], devices[m][r]);
        }
    /* Every device's ledger has its own ranks. */
    assert_int_equal(result->atn[0].weight_bytes, 2 * model->attention_bytes);
    assert_int_equal(result->atn[1].weight_bytes, 2 * model->attention_bytes);
    assert_int_equal(result->atn[2].weight_bytes, result->models[1].attention_bytes);
    for (uint32_t d = 0; d < 3; d++)
        assert_true(result->atn[d].weight_bytes + result->atn[d].workspace_bytes +
                        result->atn[d].kv_bytes + result->atn[d].arena_bytes <=
                    result->atn[d].budget_bytes);
    planner_free(result);
    free(config);
}

static void ranks_of_one_model_have_the_same_capacity(void **state)
{
    (void)state;
    wanted_t want = {.family = "qwen3", .engine = CONFIG_ENGINE_SGLANG, .tp = 2};
    config_t *config = make_config(&want, 1, 2);
    config->models[0].decode_rows = 4096;
    config->models[0].prefill_rows = 1;
    config->atn[1].memory_bytes = 8u << 20;
    plan_result_t *result = plan(config);
    const plan_model_t *model = &result->models[0];
    assert_true(model->kv_tokens > 0 && model->kv_bytes <= 8u << 20);
    assert_int_equal(result->atn[0].kv_bytes, model->kv_bytes);
    assert_int_equal(result->atn[1].kv_bytes, model->kv_bytes);
    planner_free(result);
    free(config);
}

static void latents_are_whole_on_every_rank(void **state)
{
    (void)state;
    const char *const families[] = {"deepseek-v2", "glm4-moe-lite"};
    for (int f = 0; f < 2; f++)
        for (uint32_t tp = 1; tp <= 2; tp++) {
            wanted_t want = {.family = families[f],
                             .engine = CONFIG_ENGINE_SGLANG,
                             .tp = tp,
                             .dtype = XP_DTYPE_F32};
            config_t *config = make_config(&want, 1, 2);
            plan_result_t *result = plan(config);
            const plan_model_t *model = &result->models[0];
            assert_int_equal(model->kv_bytes_per_token,
                             (4 + 4) * 4); /* latent 4, rope 4, float32 */
            /* heads 2 of 8 + 4; v 8; hidden 16. q: 24 x 16, or 8 x 16, norm 8, 24 x 8. kv_a: 8 x
             * 16, norm 4; kv_b: 2 x (8 + 8) x 4, twice; o: 16 x 16. Norms 16, 16, 16. */
            uint64_t vocabulary = tp == 1 ? 320 : 192;
            uint64_t query = f == 0 ? 24 / tp * 16 : 8 * 16 + 8 + 24 / tp * 8;
            uint64_t elements = 2 * vocabulary * 16 + query + 8 * 16 + 4 + 2 * (32 / tp * 4) +
                                16 * 16 / tp + 3 * 16;
            assert_int_equal(model->attention_bytes, 4 * elements);
            planner_free(result);
            free(config);
        }
}

static void data_parallel_ranks_hold_everything_and_their_own_rows(void **state)
{
    (void)state;
    wanted_t want = {.family = "deepseek-v2",
                     .engine = CONFIG_ENGINE_SGLANG,
                     .dp = 2,
                     .decode_rows = 16,
                     .prefill_rows = 64,
                     .dtype = XP_DTYPE_F32};
    config_t *config = make_config(&want, 1, 2);
    plan_result_t *result = plan(config);
    const fabric_plan_instance_t *instance = &result->plan.instances[0];
    assert_int_equal(result->models[0].ranks, 2);
    assert_int_equal(instance->atn_tp, 1);
    assert_int_equal(instance->atn_dp, 2);
    assert_int_equal(instance->max_rows, 64);
    assert_int_equal(instance->delivery, FABRIC_DELIVERY_SINGLE_COMPLETE);
    /* Only lm_head is shared: 192 of its rows here, all 320 of the embedding's. */
    uint64_t rest = 24 * 16 + 8 * 16 + 4 + 2 * 32 * 4 + 16 * 16 + 3 * 16;
    assert_int_equal(result->models[0].attention_bytes, 4 * ((320 + 192) * 16 + rest));
    planner_free(result);
    char *own_head = "--enable-dp-lm-head";
    config->models[0].engine_args[0] = own_head;
    config->models[0].engine_arg_count = 1;
    result = plan(config);
    assert_int_equal(result->models[0].attention_bytes, 4 * ((320 + 320) * 16 + rest));
    planner_free(result);
    free(config);
}

static void refusals_name_the_setting(void **state)
{
    (void)state;
    expect_refused(&(wanted_t){.family = "deepseek-v2", .engine = CONFIG_ENGINE_NATIVE}, 1,
                   "engine = \"sglang\"");
    expect_refused(&(wanted_t){.family = "qwen3", .engine = CONFIG_ENGINE_NATIVE, .tp = 2}, 2,
                   "attention_tp");
    expect_refused(&(wanted_t){.family = "llama", .engine = CONFIG_ENGINE_SGLANG, .dp = 2}, 2,
                   "attention_dp");
    expect_refused(
        &(wanted_t){.family = "qwen3-moe", .engine = CONFIG_ENGINE_SGLANG, .tp = 2, .dp = 2}, 4,
        "attention_tp = 2 with attention_dp = 2");
    expect_refused(&(wanted_t){.family = "qwen3", .engine = CONFIG_ENGINE_SGLANG, .tp = 3}, 3,
                   "models[m0].attention_tp");
    expect_refused(
        &(wanted_t){
            .family = "qwen3-moe", .engine = CONFIG_ENGINE_SGLANG, .dp = 2, .prefill_rows = 8000},
        2, "models[m0].prefill_rows");
    wanted_t want = {.family = "qwen3", .engine = CONFIG_ENGINE_SGLANG};
    config_t *config = make_config(&want, 1, 1);
    plan_result_t *result;
    config->models[0].port = 60000;
    assert_int_equal(planner_make(config, 1, &result), XP_INVALID);
    assert_non_null(strstr(xp_error_last()->text, "models[m0].port"));
    config->models[0].port = 0;
    snprintf(config->models[0].chat_template, sizeof(config->models[0].chat_template), "chatml");
    assert_int_equal(planner_make(config, 1, &result), XP_UNSUPPORTED);
    assert_non_null(strstr(xp_error_last()->text, "chat_template"));
    free(config);
}

static int make_folder(void **state)
{
    (void)state;
    snprintf(folder, sizeof(folder), "/tmp/xpool-planner-XXXXXX");
    return mkdtemp(folder) ? 0 : -1;
}

static int remove_folder(void **state)
{
    (void)state;
    char command[512];
    snprintf(command, sizeof(command), "rm -rf %s", folder);
    return system(command);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_rank_holds_everything_but_the_ffn),
        cmocka_unit_test(native_steps_hold_both_kinds_of_rows),
        cmocka_unit_test(checkpoint_dtype_is_named),
        cmocka_unit_test(tensor_parallel_ranks_share_heads_and_get_the_whole_sum),
        cmocka_unit_test(ranks_of_one_model_have_the_same_capacity),
        cmocka_unit_test(latents_are_whole_on_every_rank),
        cmocka_unit_test(data_parallel_ranks_hold_everything_and_their_own_rows),
        cmocka_unit_test(refusals_name_the_setting),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
