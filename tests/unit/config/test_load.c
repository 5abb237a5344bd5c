/* SPDX-License-Identifier: MIT */
/* Resolution: precedence in every pair, provenance, values of every type, aliases, paths, digest.
 */
#include "config_test.h"

#include <sys/stat.h>

static int set_up(void **state)
{
    clear_environment();
    return 0;
}

/* ---- precedence --------------------------------------------------------------------------------
 */

static void precedence_in_every_pair(void **state)
{
    static const char file[] = "[daemon]\nhttp = \"127.0.0.1:3\"\n";
    static const char *const cli[] = {"daemon.http=127.0.0.1:1", NULL};
    static const struct {
        bool cli, env, file;
        const char *value, *origin;
    } cases[] = {
        {false, false, false, "127.0.0.1:8200", "default"},
        {false, false, true, "127.0.0.1:3", "f.toml:2:8"},
        {false, true, false, "127.0.0.1:2", "env XPOOL_DAEMON_HTTP"},
        {false, true, true, "127.0.0.1:2", "env XPOOL_DAEMON_HTTP"},
        {true, false, false, "127.0.0.1:1", "cli"},
        {true, false, true, "127.0.0.1:1", "cli"},
        {true, true, false, "127.0.0.1:1", "cli"},
        {true, true, true, "127.0.0.1:1", "cli"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        clear_environment();
        if (cases[i].env)
            setenv("XPOOL_DAEMON_HTTP", "127.0.0.1:2", 1);
        config_t *config =
            load_text(cases[i].file ? file : NULL, cases[i].cli ? cli : NULL, NULL, 0);
        assert_string_equal(config->daemon.http, cases[i].value);
        assert_string_equal(origin_of(config, "daemon.http", 0), cases[i].origin);
        config_destroy(config);
    }
}

static void every_allowed_variable_is_read(void **state)
{
    static const struct {
        const char *key, *value, *literal;
    } expected[] = {
        {"daemon.socket", "/tmp/x/s.sock", "\"/tmp/x/s.sock\""},
        {"daemon.http", "localhost:81", "\"localhost:81\""},
        {"gateway.http", "[::1]:82", "\"[::1]:82\""},
        {"vendor.model_base_uri", "file:///srv/a%20b", "\"/srv/a b\""},
        {"fabric.nvshmem_root", "/opt/nvshmem", "\"/opt/nvshmem\""},
        {"cache.root", "/tmp/cache", "\"/tmp/cache\""},
        {"observe.folder", "/tmp/observe", "\"/tmp/observe\""},
        {"logging.level", "warn", "\"warning\""},
        {"logging.format", "json", "\"json\""},
        {"logging.color", "never", "\"never\""},
    };
    uint32_t variables = 0;
    for (uint32_t i = 0; i < config_setting_count; i++)
        variables += config_settings[i].environment != NULL;
    assert_int_equal(variables, sizeof(expected) / sizeof(expected[0]));
    for (uint32_t i = 0; i < variables; i++) {
        const config_setting_t *setting = config_setting_find(expected[i].key);
        char origin[64];
        xp_buf_t literal;
        clear_environment();
        setenv(setting->environment, expected[i].value, 1);
        config_t *config = load(NULL);
        xp_buf_init(&literal, 4096);
        assert_int_equal(config_setting_literal(setting, config, &literal), XP_OK);
        assert_string_equal(literal.data, expected[i].literal);
        snprintf(origin, sizeof(origin), "env %s", setting->environment);
        assert_string_equal(origin_of(config, setting->key, 0), origin);
        xp_buf_fini(&literal);
        config_destroy(config);
        setenv(setting->environment, "", 1); /* an empty variable is not set */
        config = load(NULL);
        assert_string_equal(origin_of(config, setting->key, 0), "default");
        config_destroy(config);
    }
}

static void other_variables_set_nothing(void **state)
{
    setenv("XPOOL_SCHEDULER_FFN_CONCURRENCY", "7", 1);
    setenv("XPOOL_LOG_LEVLE", "debug", 1);
    config_t *config = load(NULL);
    assert_int_equal(config->scheduler.ffn_concurrency, 2);
    assert_int_equal(config->logging.level, XP_LOG_INFO);
    bool warned = false;
    for (uint32_t i = 0; i < config_warning_count(config); i++) {
        warned |= strstr(config_warning(config, i), "XPOOL_LOG_LEVLE is ignored; did you mean "
                                                    "XPOOL_LOG_LEVEL?") != NULL;
        assert_null(strstr(config_warning(config, i), "SCHEDULER"));
    }
    assert_true(warned);
    config_destroy(config);
    unsetenv("XPOOL_SCHEDULER_FFN_CONCURRENCY");
    unsetenv("XPOOL_LOG_LEVLE");
}

/* ---- values ------------------------------------------------------------------------------------
 */

static void defaults(void **state)
{
    config_t *config = load(TEST_MODEL);
    const config_model_t *model = &config->models[0];
    char socket[64];
    snprintf(socket, sizeof(socket), "/tmp/xpool-%u/daemon.sock", (unsigned)getuid());
    assert_string_equal(config->daemon.socket, socket);
    assert_string_equal(config->daemon.http, "127.0.0.1:8200");
    assert_string_equal(config->gateway.http, "127.0.0.1:8000");
    assert_string_equal(config->fabric_provider, "auto");
    assert_int_equal(config->model_count, 1);
    assert_string_equal(model->path, TEST_FOLDER "/qwen3-moe");
    assert_int_equal(model->engine, CONFIG_ENGINE_NATIVE);
    assert_int_equal(model->dtype, XP_DTYPE_AUTO);
    assert_int_equal(model->load_format, CONFIG_LOAD_AUTO);
    assert_int_equal(model->port, 0);
    assert_int_equal(model->ffn_tp_size, 1);
    assert_int_equal(model->attention_tp, 1);
    assert_int_equal(model->attention_dp, 1);
    assert_int_equal(model->decode_rows, 32);
    assert_int_equal(model->prefill_rows, 128);
    assert_int_equal(model->max_context, 0);
    assert_int_equal(model->engine_arg_count, 0);
    assert_true(model->slo.ttft_ms == 2000 && model->slo.tbt_ms == 200);
    assert_int_equal(config->scheduler.ffn_concurrency, 2);
    assert_int_equal(config->scheduler.ffn_policy, CONFIG_POLICY_DEADLINE);
    assert_true(config->deadlines.registration == 120 && config->deadlines.startup == 600);
    assert_true(config->deadlines.submission == 30 && config->deadlines.request == 600);
    assert_true(config->deadlines.queue == 60 && config->deadlines.drain == 30);
    assert_true(config->deadlines.stop == 10);
    assert_int_equal(config->atn_count, 1);
    assert_int_equal(config->ffn_count, 1);
    assert_string_equal(config->atn[0].name, "cpu:0");
    assert_string_equal(config->ffn[0].name, "cpu:1");
    assert_in_range(config->atn[0].threads, 1, 256);
    assert_true(config->atn[0].memory_bytes >= 1 << 20);
    assert_int_equal(config->atn[0].memory_bytes % (1 << 20), 0);
    assert_int_equal(config->atn[0].cpu_count, 0);
    char folder[1024], cache[1100];
    assert_non_null(getcwd(folder, sizeof(folder)));
    snprintf(cache, sizeof(cache), "%s/.xpool-cache", folder);
    assert_string_equal(config->cache_root, cache);
    config_destroy(config);
}

static void every_setting_from_a_file(void **state)
{
    config_t *config = load(
        "[daemon]\nsocket = \"run/d.sock\"\nhttp = \"0.0.0.0:1\"\n"
        "[gateway]\nhttp = \"[::]:2\"\n"
        "[vendor]\nmodel_base_uri = \"file://" TEST_FOLDER "\"\n"
        "[atn]\ndevices = [\"cpu:0\", \"cpu:2\"]\ndevice_memory_utilization = 0.5\n"
        "[ffn]\ndevices = [\"cpu:5\", \"cpu:4\"]\nloader.parallelism = 3\n"
        "placement = { parallelism = 2, timeout_seconds = 1.5 }\n"
        "device_memory_extra_margin_bytes = \"64MiB\"\n"
        "device_memory_calibration = \"README.md\"\n"
        "[devices.\"cpu:0\"]\nthreads = 2\nmemory = \"1.5GiB\"\ncpus = \"0-2,5\"\n"
        "[devices.\"cpu:4\"]\nmemory = 16777216\ncpus = [1, 0]\n"
        "[fabric]\nprovider = \"shm\"\n"
        "[scheduler]\nffn_concurrency = 4\natn_concurrency = 5\nffn_policy = \"random\"\n"
        "slo = { ttft_ms = 10, tbt_ms = 0.5 }\n"
        "[deadlines]\nregistration = 1\nstartup = 2\nsubmission = 3\nrequest = 4\nqueue = 5\n"
        "drain = 6\nstop = 7.25\n"
        "[cache]\nroot = \"c\"\n"
        "[logging]\nlevel = \"error\"\nformat = \"json\"\ncolor = \"always\"\n"
        "[[models]]\nid = \"qwen3-moe\"\nengine = \"sglang\"\nport = 9000\ndtype = \"bfloat16\"\n"
        "load_format = \"dummy\"\nchat_template = \"chatml\"\npython = \"../venv/bin/python\"\n"
        "engine_args = [\"--a\", \"b c\"]\nmax_context = 4096\nffn_tp_size = 2\nattention_tp = 2\n"
        "attention_dp = 1\ndecode_rows = 8\nprefill_rows = 64\nkv_floor_tokens = 100\n"
        "kv_ceiling_tokens = 200\nslo.ttft_ms = 99\nidle_unload_seconds = 60\n"
        "[[models]]\nid = \"org/model-2\"\npath = \"" TEST_FOLDER "/deepseek-v2\"\n");
    const config_model_t *model = &config->models[0];
    assert_string_equal(config->daemon.socket, TEST_FOLDER "/run/d.sock");
    assert_string_equal(config->daemon.http, "0.0.0.0:1");
    assert_string_equal(config->gateway.http, "[::]:2");
    assert_string_equal(config->model_base_uri, TEST_FOLDER);
    assert_int_equal(config->atn_count, 2);
    assert_string_equal(config->atn[1].name, "cpu:2");
    assert_int_equal(config->atn[1].index, 2);
    assert_string_equal(config->ffn[0].name, "cpu:5"); /* the order is the user's */
    assert_true(config->atn_memory_utilization == 0.5);
    assert_int_equal(config->loader_parallelism, 3);
    assert_int_equal(config->placement_parallelism, 2);
    assert_true(config->placement_timeout_s == 1.5);
    assert_int_equal(config->ffn_extra_margin_bytes, 64 << 20);
    assert_string_equal(config->ffn_calibration, TEST_FOLDER "/README.md");
    assert_int_equal(config->atn[0].threads, 2);
    assert_true(config->atn[0].memory_bytes == 3ull << 29);
    assert_int_equal(config->atn[0].cpu_count, 4);
    assert_int_equal(config->atn[0].cpus[3], 5);
    assert_int_equal(config->ffn[1].memory_bytes, 16777216);
    assert_int_equal(config->ffn[1].threads, 2); /* as many as CPUs it is pinned to */
    assert_int_equal(config->ffn[1].cpus[0], 1);
    assert_string_equal(config->fabric_provider, "shm");
    assert_int_equal(config->scheduler.ffn_concurrency, 4);
    assert_int_equal(config->scheduler.atn_concurrency, 5);
    assert_int_equal(config->scheduler.ffn_policy, CONFIG_POLICY_RANDOM);
    assert_true(config->deadlines.registration == 1 && config->deadlines.stop == 7.25);
    assert_string_equal(config->cache_root, TEST_FOLDER "/c");
    assert_int_equal(config->logging.level, XP_LOG_ERROR);
    assert_int_equal(config->logging.format, XP_LOG_JSON);
    assert_int_equal(config->logging.color, XP_COLOR_ALWAYS);
    assert_string_equal(model->path, TEST_FOLDER "/qwen3-moe");
    assert_string_equal(origin_of(config, "models[].path", 0), "f.toml:7:18");
    assert_int_equal(model->engine, CONFIG_ENGINE_SGLANG);
    assert_int_equal(model->port, 9000);
    assert_int_equal(model->dtype, XP_DTYPE_BF16);
    assert_int_equal(model->load_format, CONFIG_LOAD_DUMMY);
    assert_string_equal(model->chat_template, "chatml");
    assert_string_equal(model->python, XPOOL_SOURCE_DIR "/models/venv/bin/python");
    assert_int_equal(model->engine_arg_count, 2);
    assert_string_equal(model->engine_args[1], "b c");
    assert_int_equal(model->max_context, 4096);
    assert_int_equal(model->ffn_tp_size, 2);
    assert_int_equal(model->kv_floor_tokens, 100);
    assert_int_equal(model->kv_ceiling_tokens, 200);
    assert_true(model->slo.ttft_ms == 99 && model->slo.tbt_ms == 0.5);
    assert_string_equal(origin_of(config, "models[].slo.tbt_ms", 0),
                        origin_of(config, "scheduler.slo.tbt_ms", 0));
    assert_int_equal(model->idle_unload_seconds, 60);

    const char *path = NULL;
    assert_int_equal(config_model_path_of(config, "org/model-2", &path), XP_OK);
    assert_string_equal(path, TEST_FOLDER "/deepseek-v2");
    assert_int_equal(config_model_path_of(config, "qwen3-mo", &path), XP_NOT_FOUND);
    assert_non_null(strstr(xp_error_last()->text, "did you mean qwen3-moe?"));
    uint32_t index = 99;
    assert_ptr_equal(config_device_find(config, true, "cpu:4", &index), &config->ffn[1]);
    assert_int_equal(index, 1);
    assert_null(config_device_find(config, false, "cpu:4", NULL));
    config_destroy(config);
}

static void command_line_values(void **state)
{
    static const char *const settings[] = {
        "atn.devices=cpu:3, cpu:4",
        "ffn.devices=[\"cuda:1\"]",
        "models[0].max_context=77",
        "models[0].id=123",
        "models[1]={id=\"second\", path=\"" TEST_FOLDER "/qwen3-moe\"}",
        "models[1].slo={tbt_ms=7}",
        "devices.\"cpu:3\".memory=2GiB",
        "devices.cpu:3={threads=3}",
        "scheduler.slo={ttft_ms=5}",
        "daemon.socket=rel.sock",
        "deadlines.stop=3",
        "deadlines.stop=4", /* the last one counts */
        NULL,
    };
    char folder[1024], socket[1100];
    config_t *config = load_text(TEST_MODEL, settings, NULL, 0);
    assert_int_equal(config->atn_count, 2);
    assert_string_equal(config->atn[1].name, "cpu:4");
    assert_string_equal(config->ffn[0].name, "cuda:1");
    assert_int_equal(config->ffn[0].kind, CONFIG_DEVICE_CUDA);
    assert_int_equal(config->models[0].max_context, 77);
    assert_string_equal(config->models[0].id, "123");
    assert_string_equal(origin_of(config, "models[].id", 0), "cli");
    assert_string_equal(origin_of(config, "models[].path", 0), "f.toml:3:8");
    assert_int_equal(config->model_count, 2);
    assert_string_equal(config->models[1].id, "second");
    assert_true(config->models[1].slo.tbt_ms == 7 && config->models[1].slo.ttft_ms == 5);
    assert_true(config->atn[0].memory_bytes == 2ull << 30);
    assert_int_equal(config->atn[0].threads, 3);
    assert_true(config->deadlines.stop == 4);
    assert_non_null(getcwd(folder, sizeof(folder)));
    snprintf(socket, sizeof(socket), "%s/rel.sock", folder);
    assert_string_equal(config->daemon.socket, socket);
    config_destroy(config);
}

static void a_value_cannot_smuggle_in_a_second_one(void **state)
{
    static const char *const settings[] = {"models[0].chat_template=\"x\"\ndaemon = 1", NULL};
    config_t *config = load_text(TEST_MODEL, settings, NULL, 0);
    assert_string_equal(config->models[0].chat_template, "\"x\"\ndaemon = 1");
    config_destroy(config);
}

static void letters_beyond_ascii(void **state)
{
    static const char *const settings[] = {"cache.root=/tmp/\xc3\xa9t\xc3\xa9", NULL};
    config_t *config = load_text(
        TEST_MODEL "chat_template = \"\"\"a\\\n  \xc3\xa9\"\"\" # \xc3\xa9\n", settings, NULL, 0);
    assert_string_equal(config->models[0].chat_template, "a\xc3\xa9");
    assert_string_equal(config->cache_root, "/tmp/\xc3\xa9t\xc3\xa9");
    config_destroy(config);
}

static void device_aliases(void **state)
{
    config_t *config = load("[devices]\natn_cuda_devices = [0, 3]\nffn_cuda_devices = [1]\n");
    assert_int_equal(config->atn_count, 2);
    assert_string_equal(config->atn[1].name, "cuda:3");
    assert_int_equal(config->atn[1].kind, CONFIG_DEVICE_CUDA);
    assert_string_equal(config->ffn[0].name, "cuda:1");
    assert_string_equal(origin_of(config, "atn.devices", 0), "f.toml:2:20");
    config_destroy(config);
    static const char *const settings[] = {"devices.atn_cuda_devices=2,4", NULL};
    config = load_text(NULL, settings, NULL, 0);
    assert_string_equal(config->atn[1].name, "cuda:4");
    config_destroy(config);
}

/* The memory of a GPU is what the configuration says, else to be asked for: 0, "auto" in the
 * digest. */
static void gpu_memory(void **state)
{
    static const char devices[] = "atn.devices = ['cuda:0']\nffn.devices = ['cuda:1']\n";
    char text[256];
    config_t *config = load(devices);
    assert_true(config->atn[0].memory_bytes == 0 && config->ffn[0].memory_bytes == 0);
    assert_string_equal(origin_of(config, "devices.\"cuda:N\".memory", 1), "default");
    uint8_t digest[32];
    memcpy(digest, config->digest, sizeof(digest));
    config_destroy(config);
    snprintf(text, sizeof(text), "%s[devices.'cuda:1']\nmemory = '80GiB'\n", devices);
    config = load(text);
    assert_true(config->atn[0].memory_bytes == 0 && config->ffn[0].memory_bytes == 80ull << 30);
    assert_memory_not_equal(config->digest, digest, sizeof(digest));
    config_destroy(config);
}

static void shared_roles(void **state)
{
    config_t *config = load("[atn]\ndevices = [\"cpu:7\"]\n[ffn]\ndevices = [\"cpu:7\"]\n"
                            "[devices]\nallow_shared_roles = true\n"
                            "[devices.\"cpu:7\"]\nthreads = 1\nmemory = \"1GiB\"\n");
    assert_int_equal(config->ffn[0].threads, 1);
    assert_int_equal(config->ffn[0].memory_bytes, 1 << 30);
    assert_int_equal(config->record->device_count, 1);
    config_destroy(config);
}

static void runtime_folder(void **state)
{
    char folder[] = "/tmp/xpool-config-XXXXXX", expected[128];
    assert_non_null(mkdtemp(folder));
    setenv("XDG_RUNTIME_DIR", folder, 1);
    config_t *config = load(NULL);
    snprintf(expected, sizeof(expected), "%s/xpool/daemon.sock", folder);
    assert_string_equal(config->daemon.socket, expected);
    config_destroy(config);
    rmdir(folder);
    config = load(NULL);
    assert_memory_equal(config->daemon.socket, "/tmp/xpool-", 11);
    assert_null(strstr(config->daemon.socket, folder));
    config_destroy(config);
    unsetenv("XDG_RUNTIME_DIR");
}

/* ---- files -------------------------------------------------------------------------------------
 */

static void write_file(const char *path, const char *text)
{
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}

static void files_and_relative_paths(void **state)
{
    char folder[] = "/tmp/xpool-config-XXXXXX", path[128], link[128], expected[1200], name[256];
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof(path), "%s/sub", folder);
    mkdir(path, 0700);
    snprintf(path, sizeof(path), "%s/m.gguf", folder);
    write_file(path, "");
    snprintf(path, sizeof(path), "%s/sub/c.toml", folder);
    write_file(path, "[[models]]\nid = \"m\"\npath = \"./../m.gguf\"\n");
    /* Through a link, ../ counts from where the file really is. */
    snprintf(link, sizeof(link), "%s/link", folder);
    assert_int_equal(symlink("sub", link), 0);
    snprintf(link, sizeof(link), "%s/link/c.toml", folder);
    const char *const names[] = {path, link};
    for (int i = 0; i < 3; i++) {
        config_overrides_t overrides = {.config_path = i < 2 ? names[i] : NULL};
        config_t *config = NULL;
        setenv("XPOOL_CONFIG", i < 2 ? "/nonexistent.toml" : path, 1);
        if (config_load(&overrides, &config) != XP_OK)
            fail_msg("%s", xp_error_last()->text);
        snprintf(expected, sizeof(expected), "%s/m.gguf", folder);
        assert_string_equal(config->models[0].path, expected);
        assert_string_equal(config->source_path, path);
        snprintf(name, sizeof(name), "%s:2:6", i < 2 ? names[i] : path);
        assert_string_equal(origin_of(config, "models[].id", 0), name);
        config_destroy(config);
    }
    config_t *config = NULL;
    setenv("XPOOL_CONFIG", "/nonexistent.toml", 1);
    assert_int_equal(config_load(NULL, &config), XP_NOT_FOUND);
    assert_non_null(strstr(xp_error_last()->text, "/nonexistent.toml"));
    setenv("XPOOL_CONFIG", folder, 1);
    assert_int_equal(config_load(NULL, &config), XP_INVALID);
    assert_non_null(strstr(xp_error_last()->text, "is a folder"));
    unsetenv("XPOOL_CONFIG");
    assert_null(config);
    assert_int_equal(config_load(NULL, &config), XP_OK);
    assert_string_equal(config->source_path, "");
    config_destroy(config);
    unlink(path);
    snprintf(path, sizeof(path), "%s/link", folder);
    unlink(path);
    snprintf(path, sizeof(path), "%s/m.gguf", folder);
    unlink(path);
    snprintf(path, sizeof(path), "%s/sub", folder);
    rmdir(path);
    assert_int_equal(rmdir(folder), 0);
}

/* ---- digest ------------------------------------------------------------------------------------
 */

static bool same_digest(const char *left_text, const char *const *left, const char *right_text,
                        const char *const *right)
{
    config_t *a = load_text(left_text, left, NULL, 0), *b = load_text(right_text, right, NULL, 0);
    bool same = memcmp(a->digest, b->digest, sizeof(a->digest)) == 0;
    config_destroy(a);
    config_destroy(b);
    return same;
}

static void digest_follows_values_not_sources(void **state)
{
    static const char *const cli[] = {"daemon.http=127.0.0.1:77", NULL};
    static const char file[] = "# a comment\n[daemon]\nhttp = '127.0.0.1:77'\n" TEST_MODEL;
    assert_true(same_digest(TEST_MODEL, cli, file, NULL));
    setenv("XPOOL_DAEMON_HTTP", "127.0.0.1:77", 1);
    config_t *a = load(TEST_MODEL);
    clear_environment();
    config_t *b = load(file);
    assert_memory_equal(a->digest, b->digest, 32);
    config_destroy(a);
    config_destroy(b);
    /* A default spelt out is the same configuration; so are two spellings of one size. */
    assert_true(same_digest(TEST_MODEL, NULL, "scheduler.ffn_concurrency = 2\n" TEST_MODEL, NULL));
    assert_true(same_digest("devices.\"cpu:0\".memory = \"1GiB\"", NULL,
                            "devices.\"cpu:0\".memory = 1073741824", NULL));
    /* Logging does not count. */
    assert_true(same_digest(TEST_MODEL, NULL,
                            "logging = {level = 'debug', format = 'json', color = 'never'}\n" //
                            TEST_MODEL,
                            NULL));
}

static void digest_sees_every_other_setting(void **state)
{
    static const char base[] = "vendor.model_base_uri = \"" TEST_FOLDER "\"\n" TEST_MODEL;
    static const char *const changes[] = {
        "daemon.socket=/tmp/other.sock",
        "daemon.http=127.0.0.1:1",
        "gateway.http=127.0.0.1:2",
        "vendor.model_base_uri=/srv",
        "models[0].id=b",
        "models[0].path=" TEST_FOLDER "/deepseek-v2",
        "models[0].engine=sglang",
        "models[0].port=1",
        "models[0].dtype=float32",
        "models[0].load_format=dummy",
        "models[0].chat_template=x",
        "models[0].python=py",
        "models[0].engine_args=[\"x\"]",
        "models[0].max_context=1",
        "models[0].ffn_tp_size=2",
        "models[0].attention_tp=2",
        "models[0].attention_dp=2",
        "models[0].decode_rows=1",
        "models[0].prefill_rows=1",
        "models[0].kv_floor_tokens=1",
        "models[0].kv_ceiling_tokens=1",
        "models[0].slo.ttft_ms=1",
        "models[0].slo.tbt_ms=1",
        "models[0].idle_unload_seconds=1",
        "atn.devices=cpu:2,cpu:0",
        "atn.device_memory_utilization=0.8",
        "ffn.devices=cpu:3,cpu:1",
        "ffn.loader.parallelism=1",
        "ffn.placement.parallelism=2",
        "ffn.placement.timeout_seconds=1",
        "ffn.device_memory_extra_margin_bytes=1",
        "ffn.device_memory_calibration=" TEST_FOLDER "/README.md",
        "devices.allow_shared_roles=true",
        "devices.\"cpu:0\".threads=1",
        "devices.\"cpu:0\".memory=1GiB",
        "devices.\"cpu:0\".cpus=0",
        "devices.\"cuda:9\".memory=1GiB",
        "fabric.provider=shm",
        "fabric.nvshmem_root=/opt/nvshmem",
        "scheduler.ffn_concurrency=1",
        "scheduler.atn_concurrency=1",
        "scheduler.ffn_policy=fifo",
        "scheduler.kv_policy=static",
        "scheduler.slo.ttft_ms=1",
        "scheduler.slo.tbt_ms=1",
        "deadlines.registration=1",
        "deadlines.startup=1",
        "deadlines.submission=1",
        "deadlines.request=1",
        "deadlines.queue=1",
        "deadlines.reform=1",
        "fabric.keep_requests=false",
        "deadlines.drain=1",
        "deadlines.stop=1",
        "deadlines.kv=1",
        "cache.root=/tmp/other",
        "observe.folder=/tmp/other",
        "observe.records=1",
    };
    uint32_t settings = 0;
    for (uint32_t i = 0; i < config_setting_count; i++)
        settings +=
            strncmp(config_settings[i].key, "logging.", 8) != 0 && !config_settings[i].alias_of;
    assert_int_equal(settings, sizeof(changes) / sizeof(changes[0]));
    for (uint32_t i = 0; i < settings; i++) {
        /* Ranks need devices to stand on, in both configurations alike. */
        const char *const devices[] = {"atn.devices=cpu:0,cpu:2", "ffn.devices=cpu:1,cpu:3,cuda:9",
                                       NULL};
        const char *const changed[] = {devices[0], devices[1], changes[i], NULL};
        if (same_digest(base, devices, base, changed))
            fail_msg("%s does not change the digest", changes[i]);
    }
}

static void digest_is_sha256_of_the_text(void **state)
{
    /* The text is the contract between processes; sha256sum is the independent reference. */
    config_t *config = load("devices.\"cpu:0\".threads = 1\n" TEST_MODEL);
    xp_buf_t text;
    char hex[65], found[65] = "", path[] = "/tmp/xpool-digest-XXXXXX", command[128];
    xp_buf_init(&text, 1 << 20);
    assert_int_equal(config_digest_text(config, &text), XP_OK);
    assert_non_null(strstr(text.data, "\ndevices.\"cpu:0\".threads = 1\n"));
    assert_non_null(strstr(text.data, "\ndevices.\"cpu:1\".threads = auto\n"));
    assert_non_null(strstr(text.data, "\ndevices.\"cpu:0\".memory = auto\n"));
    assert_non_null(strstr(text.data, "\ncache.root = auto\n"));
    assert_null(strstr(text.data, "logging"));
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text.data, text.length), (ssize_t)text.length);
    close(fd);
    snprintf(command, sizeof(command), "sha256sum %s", path);
    FILE *pipe = popen(command, "r");
    assert_non_null(pipe);
    assert_int_equal(fscanf(pipe, "%64s", found), 1);
    pclose(pipe);
    unlink(path);
    config_digest_hex(config, hex);
    assert_string_equal(hex, found);
    xp_buf_fini(&text);
    config_destroy(config);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(precedence_in_every_pair, set_up),
        cmocka_unit_test_setup(every_allowed_variable_is_read, set_up),
        cmocka_unit_test_setup(other_variables_set_nothing, set_up),
        cmocka_unit_test_setup(defaults, set_up),
        cmocka_unit_test_setup(every_setting_from_a_file, set_up),
        cmocka_unit_test_setup(command_line_values, set_up),
        cmocka_unit_test_setup(a_value_cannot_smuggle_in_a_second_one, set_up),
        cmocka_unit_test_setup(letters_beyond_ascii, set_up),
        cmocka_unit_test_setup(device_aliases, set_up),
        cmocka_unit_test_setup(gpu_memory, set_up),
        cmocka_unit_test_setup(shared_roles, set_up),
        cmocka_unit_test_setup(runtime_folder, set_up),
        cmocka_unit_test_setup(files_and_relative_paths, set_up),
        cmocka_unit_test_setup(digest_follows_values_not_sources, set_up),
        cmocka_unit_test_setup(digest_sees_every_other_setting, set_up),
        cmocka_unit_test_setup(digest_is_sha256_of_the_text, set_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
