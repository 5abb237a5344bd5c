/* SPDX-License-Identifier: MIT */
/* Creating an engine: broken and unsupported checkpoints, configuration bounds, dummy weights, the
 * ledger, and KV memory that grows only with use. */
#include <dirent.h>
#include <sys/stat.h>

#include "engine_fixture.h"

static char folder[256];

static int set_up(void **state)
{
    snprintf(folder, sizeof folder, "/tmp/xpool-engine-XXXXXX");
    return fixture_group_set_up(state) != 0 || !mkdtemp(folder) ? -1 : 0;
}

static void folder_clear(void)
{
    DIR *list = opendir(folder);
    struct dirent *entry;
    while (list && (entry = readdir(list)) != NULL) {
        char path[600];
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        unlink(path);
    }
    closedir(list);
}

static int tear_down(void **state)
{
    folder_clear();
    rmdir(folder);
    return fixture_group_tear_down(state);
}

static void link_file(const char *name)
{
    char from[512], to[512];
    snprintf(from, sizeof from, "%s/%s", TALES, name);
    snprintf(to, sizeof to, "%s/%s", folder, name);
    assert_int_equal(symlink(from, to), 0);
}

/* The tales checkpoint with one key of config.json replaced. */
static void variant_make(const char *key, json_t *value)
{
    folder_clear();
    link_file("model.safetensors");
    link_file("tokenizer.json");
    json_t *config = json_load_file(TALES "/config.json", 0, NULL);
    json_object_set_new(config, key, value);
    char path[512];
    snprintf(path, sizeof path, "%s/config.json", folder);
    assert_int_equal(json_dump_file(config, path, 0), 0);
    json_decref(config);
}

static void assert_refused(const engine_config_t *config, xp_status_t status, const char *word)
{
    engine_t *engine = NULL;
    assert_int_equal(engine_create(config, &engine), status);
    assert_null(engine);
    if (!strstr(xp_error_last()->text, word))
        fail_msg("\"%s\" is not in: %s", word, xp_error_last()->text);
}

static void broken_checkpoints_name_file_and_tensor(void **state)
{
    (void)state;
    engine_config_t config = fixture_config();
    config.path = folder;
    variant_make("num_hidden_layers", json_integer(7));
    assert_refused(&config, XP_INVALID, "model.layers.6.");
    assert_non_null(strstr(xp_error_last()->text, "model.safetensors"));
    variant_make("num_key_value_heads", json_integer(1));
    assert_refused(&config, XP_INVALID, "model.layers.0.self_attn.k_proj.weight");
    variant_make("vocab_size", json_integer(4095));
    assert_refused(&config, XP_INVALID, "model.embed_tokens.weight");
    variant_make("attention_bias", json_true());
    assert_refused(&config, XP_INVALID, "bias");
    folder_clear();
    link_file("config.json");
    engine_t *engine = NULL;
    assert_int_not_equal(engine_create(&config, &engine), XP_OK);
    assert_non_null(strstr(xp_error_last()->text, folder));
}

static void truncated_weights_are_named(void **state)
{
    (void)state;
    folder_clear();
    link_file("config.json");
    char path[512];
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    FILE *from = fopen(TALES "/model.safetensors", "rb"), *to = fopen(path, "wb");
    static char bytes[6 << 20];
    assert_int_equal(fread(bytes, 1, sizeof bytes, from), sizeof bytes);
    fwrite(bytes, 1, sizeof bytes, to);
    fclose(from);
    fclose(to);
    engine_config_t config = fixture_config();
    config.path = folder;
    assert_refused(&config, XP_INVALID, "model.safetensors");
}

static void other_attention_is_unsupported_by_name(void **state)
{
    (void)state;
    engine_config_t config = fixture_config();
    config.path = XPOOL_SOURCE_DIR "/models/tales/deepseek-v2";
    assert_refused(&config, XP_UNSUPPORTED, "DeepseekV2ForCausalLM");
    config.path = XPOOL_SOURCE_DIR "/models/tales/glm4-moe-lite";
    assert_refused(&config, XP_UNSUPPORTED, "Glm4MoeLiteForCausalLM");
}

static void configuration_is_checked(void **state)
{
    (void)state;
    engine_config_t config = fixture_config();
    config.decode_rows = 0;
    assert_refused(&config, XP_INVALID, "decode_rows");
    config = fixture_config();
    config.max_rows = 7;
    assert_refused(&config, XP_INVALID, "decode_rows 8");
    config = fixture_config();
    config.queue_limit = 1000000;
    assert_refused(&config, XP_INVALID, "queue limit");
    config = fixture_config();
    config.max_context = 4096;
    assert_refused(&config, XP_INVALID, "max_context 4096");
    config = fixture_config();
    config.kv_tokens = 15;
    assert_refused(&config, XP_INVALID, "KV Cache");
    config = fixture_config();
    config.dtype = XP_DTYPE_Q4_0;
    assert_refused(&config, XP_INVALID, "dtype");
    config = fixture_config();
    config.page_tokens = 1 << 20;
    assert_refused(&config, XP_INVALID, "KV page");
}

static void progress(void *context, uint64_t done_bytes, uint64_t total_bytes)
{
    uint64_t *seen = context;
    assert_true(done_bytes >= seen[0] && done_bytes <= total_bytes);
    seen[0] = done_bytes;
    seen[1] = total_bytes;
}

static void ledger_is_exact_and_progress_ends_at_it(void **state)
{
    (void)state;
    static model_spec_t spec;
    checkpoint_t *checkpoint;
    assert_int_equal(model_spec_load(TALES, &spec), XP_OK);
    assert_int_equal(checkpoint_open(TALES, &spec, &checkpoint), XP_OK);
    static const xp_dtype_t dtypes[] = {XP_DTYPE_AUTO, XP_DTYPE_F32, XP_DTYPE_F16};
    for (uint32_t i = 0; i < 3; i++) {
        uint64_t seen[2] = {0};
        engine_config_t config = fixture_config();
        config.dtype = dtypes[i];
        config.progress = progress;
        config.progress_context = seen;
        fixture_open(&config);
        uint64_t ledger = engine_weight_bytes(&spec, checkpoint, dtypes[i]);
        assert_int_equal(stats().weight_bytes, ledger);
        assert_int_equal(seen[0], ledger);
        assert_int_equal(seen[1], ledger);
        assert_int_equal(fixture->engine->model.region_bytes,
                         engine_workspace_bytes(&spec, 1, 8 + 32, 1024));
        fixture_close();
    }
    checkpoint_close(checkpoint);
}

static void dummy_weights_need_no_checkpoint(void **state)
{
    (void)state;
    folder_clear();
    link_file("config.json");
    engine_config_t config = fixture_config();
    config.path = folder;
    config.dummy = true;
    static int32_t first[12];
    for (uint32_t round = 0; round < 2; round++) {
        fixture_open(&config);
        assert_null(engine_tokenizer(fixture->engine));
        const int32_t ids[3] = {5, 6, 7};
        engine_sampling_t sampling = greedy(12);
        uint64_t request;
        sampling.stop_count = 1;
        strcpy(sampling.stops[0], "x");
        assert_int_equal(engine_submit(fixture->engine, ids, 3, &sampling, &request), XP_INVALID);
        assert_non_null(strstr(xp_error_last()->text, "tokenizer"));
        sampling.stop_count = 0;
        outcome_t *outcome = submit(ids, 3, &sampling);
        run_dry();
        assert_int_equal(outcome->token_count, 12);
        assert_string_equal(outcome->text, "");
        if (round == 0)
            memcpy(first, outcome->tokens, sizeof first);
        assert_memory_equal(first, outcome->tokens, sizeof first); /* seeded */
        fixture_close();
    }
}

/* Resident bytes of the KV mapping, from smaps. */
static uint64_t kv_resident(void)
{
    FILE *file = fopen("/proc/self/smaps", "r");
    char line[512];
    bool inside = false;
    uint64_t resident = 0, value;
    while (file && fgets(line, sizeof line, file)) {
        if (strchr(line, '-') && strstr(line, " rw"))
            inside = strstr(line, "xpool-kv:tales") != NULL;
        if (inside && sscanf(line, "Rss: %lu kB", &value) == 1)
            resident += value * 1024;
    }
    fclose(file);
    return resident;
}

static void kv_memory_grows_with_use(void **state)
{
    (void)state;
    engine_config_t config = fixture_config();
    config.kv_bytes = 256u << 20;
    fixture_open(&config);
    assert_true(stats().kv_bytes > 255u << 20 && stats().kv_bytes <= 256u << 20);
    assert_int_equal(kv_resident(), 0);
    static int32_t ids[600];
    for (uint32_t i = 0; i < 600; i++)
        ids[i] = (int32_t)(i % 97) + 3;
    engine_sampling_t sampling = greedy(2);
    submit(ids, 100, &sampling);
    run_dry();
    const uint64_t token = 6ull * 2 * 2 * 64 * sizeof(float);
    uint64_t little = kv_resident();
    /* Whole KV pages of 16 tokens: the rows of one lie apart by layer and head. */
    assert_true(little >= 101 * token && little <= 112 * token + (64 << 10));
    submit(ids + 1, 500, &sampling);
    run_dry();
    /* The first request's unfinished page was free again. */
    assert_true(kv_resident() >= little + (500 - 16) * token);
    engine_flush_cache(fixture->engine);
    uint64_t most = kv_resident();
    submit(ids + 2, 400, &sampling); /* reuses the pages that were touched */
    run_dry();
    assert_int_equal(kv_resident(), most);
    fixture_close();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(broken_checkpoints_name_file_and_tensor),
        cmocka_unit_test(truncated_weights_are_named),
        cmocka_unit_test(other_attention_is_unsupported_by_name),
        cmocka_unit_test(configuration_is_checked),
        cmocka_unit_test(ledger_is_exact_and_progress_ends_at_it),
        cmocka_unit_test(dummy_weights_need_no_checkpoint),
        cmocka_unit_test(kv_memory_grows_with_use),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
