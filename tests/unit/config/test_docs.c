/* SPDX-License-Identifier: MIT */
/* Generated files are current and usable; dumps are complete and load again. */
#include "config_test.h"

#include <jansson.h>

#include "config/docs.h"

static int set_up(void **state)
{
    clear_environment();
    return 0;
}

static void generated_files_are_current(void **state)
{
    for (const config_document_t *document = config_documents; document->path; document++) {
        char path[1024], *found = NULL;
        size_t length = 0;
        xp_buf_t text;
        xp_buf_init(&text, 1 << 20);
        assert_int_equal(document->write(&text), XP_OK);
        snprintf(path, sizeof(path), "%s/%s", XPOOL_SOURCE_DIR, document->path);
        if (xp_file_read(path, 1 << 20, &found, &length) != XP_OK)
            fail_msg("%s", xp_error_last()->text);
        if (length != text.length || memcmp(found, text.data, length) != 0)
            fail_msg("%s is not current; run xpool config docs --write .", document->path);
        free(found);
        xp_buf_fini(&text);
    }
}

static void every_setting_is_documented(void **state)
{
    for (const config_document_t *document = config_documents; document->path; document++) {
        xp_buf_t text;
        xp_buf_init(&text, 1 << 20);
        assert_int_equal(document->write(&text), XP_OK);
        for (uint32_t i = 0; i < config_setting_count; i++) {
            const config_setting_t *setting = &config_settings[i];
            if (strcmp(document->path, "docs/configuration.md") == 0)
                assert_non_null(strstr(text.data, setting->key));
            if (strcmp(document->path, ".env.example") == 0 && setting->environment)
                assert_non_null(strstr(text.data, setting->environment));
            if (strcmp(document->path, "configs/xpool.example.toml") == 0)
                assert_non_null(strstr(text.data, strrchr(setting->key, '.') + 1));
        }
        xp_buf_fini(&text);
    }
    xp_buf_t help;
    xp_buf_init(&help, 1 << 20);
    assert_int_equal(config_settings_help(&help), XP_OK);
    for (uint32_t i = 0; i < config_setting_count; i++)
        assert_non_null(strstr(help.data, config_settings[i].key));
    xp_buf_fini(&help);
}

static void the_example_loads_as_it_is(void **state)
{
    config_overrides_t overrides = {.config_path = XPOOL_SOURCE_DIR "/configs/xpool.example.toml"};
    config_t *config = NULL;
    if (config_load(&overrides, &config) != XP_OK)
        fail_msg("%s", xp_error_last()->text);
    assert_int_equal(config_warning_count(config), 0);
    assert_int_equal(config->model_count, 1);
    config_destroy(config);
}

static void the_example_loads_with_every_line_active(void **state)
{
    xp_buf_t text, active;
    xp_buf_init(&text, 1 << 20);
    xp_buf_init(&active, 1 << 20);
    assert_int_equal(config_documents[1].write(&text), XP_OK);
    for (char *line = strtok(text.data, "\n"); line; line = strtok(NULL, "\n")) {
        /* "#key = value" is an inactive setting, "# words" is not. What needs files or stands for
         * another setting stays as it is. */
        bool skip = strstr(line, "_cuda_devices") || strstr(line, "device_memory_calibration");
        const char *from = line[0] == '#' && line[1] != ' ' && !skip ? line + 1 : line;
        assert_int_equal(xp_buf_printf(&active, "%s\n", from), XP_OK);
    }
    char report[4096];
    config_overrides_t overrides = {0};
    config_t *config = NULL;
    xp_buf_t errors;
    xp_buf_init(&errors, sizeof(report));
    if (config_load_text(active.data, active.length, "example", XPOOL_SOURCE_DIR "/configs",
                         &overrides, &config, &errors) != XP_OK)
        fail_msg("%s", errors.data);
    assert_int_equal(config->ffn[0].memory_bytes, 8ull << 30);
    assert_string_equal(config->models[0].chat_template, "chatml");
    config_destroy(config);
    xp_buf_fini(&errors);
    xp_buf_fini(&text);
    xp_buf_fini(&active);
}

static const char rich[] =
    "[atn]\ndevices = [\"cpu:0\"]\n[ffn]\ndevices = [\"cuda:0\", \"cpu:1\"]\n"
    "[devices.\"cpu:0\"]\nthreads = 1\nmemory = \"1GiB\"\ncpus = \"0\"\n"
    "[devices.\"cpu:1\"]\nthreads = 2\nmemory = 5000001\n"
    "[cache]\nroot = \"/tmp/cache\"\n"
    "[scheduler.slo]\nttft_ms = 0.1\n"
    "[[models]]\nid = \"a\"\npath = \"qwen3-moe\"\nengine_args = [\"\\\"quoted\\\"\", "
    "\"\\t\\u00e9\"]\n"
    "[[models]]\nid = \"b\"\npath = \"qwen3-moe\"\nslo.tbt_ms = 33.3\n";

static void toml_dump_loads_again(void **state)
{
    config_t *config = load(rich), *again = NULL;
    xp_buf_t text;
    xp_buf_init(&text, 1 << 20);
    assert_int_equal(config_dump_toml(config, &text), XP_OK);
    again = load(text.data);
    assert_memory_equal(config->digest, again->digest, sizeof(config->digest));
    assert_string_equal(again->models[0].engine_args[1], "\t\xc3\xa9");
    assert_non_null(strstr(text.data, "scheduler.slo.ttft_ms = 0.1 "));
    assert_non_null(strstr(text.data, " # f.toml:7:10\n"));
    config_destroy(config);
    config_destroy(again);
    xp_buf_fini(&text);
}

static void json_dump_has_every_value_and_origin(void **state)
{
    setenv("XPOOL_LOG_LEVEL", "debug", 1);
    static const char *const settings[] = {"gateway.http=[::1]:9", NULL};
    config_t *config = load_text(rich, settings, NULL, 0);
    xp_buf_t text;
    json_error_t error;
    xp_buf_init(&text, 1 << 20);
    assert_int_equal(config_dump_json(config, &text), XP_OK);
    json_t *root = json_loads(text.data, 0, &error);
    assert_non_null(root);
    json_t *values = json_object_get(root, "values"), *origins = json_object_get(root, "origins");
    json_t *logging = json_object_get(values, "logging");
    assert_string_equal(json_string_value(json_object_get(logging, "level")), "debug");
    assert_string_equal(json_string_value(json_object_get(origins, "logging.level")),
                        "env XPOOL_LOG_LEVEL");
    assert_string_equal(json_string_value(json_object_get(origins, "gateway.http")), "cli");
    assert_string_equal(json_string_value(json_object_get(origins, "daemon.http")), "default");
    assert_string_equal(json_string_value(json_object_get(origins, "models[1].id")), "f.toml:21:6");
    json_t *device = json_object_get(json_object_get(values, "devices"), "cpu:1");
    assert_int_equal(json_integer_value(json_object_get(device, "memory")), 5000001);
    json_t *model = json_array_get(json_object_get(values, "models"), 1);
    json_t *slo = json_object_get(model, "slo");
    assert_true(json_real_value(json_object_get(slo, "tbt_ms")) == 33.3);
    assert_true(json_real_value(json_object_get(slo, "ttft_ms")) == 0.1);
    assert_int_equal(strlen(json_string_value(json_object_get(root, "digest"))), 64);
    uint32_t expected = 0;
    for (uint32_t i = 0; i < config_setting_count; i++)
        if (!config_settings[i].alias_of)
            for (uint32_t item = 0; item < config_scope_items(config, config_settings[i].scope);
                 item++)
                expected += config_setting_applies(config, &config_settings[i], item);
    assert_int_equal(json_object_size(origins), expected);
    json_decref(root);
    config_destroy(config);
    xp_buf_fini(&text);
}

static void a_configuration_made_by_hand_is_no_dump(void **state)
{
    config_t *config = calloc(1, sizeof(*config));
    xp_buf_t text;
    xp_buf_init(&text, 1 << 20);
    assert_non_null(config);
    assert_int_equal(config_dump_toml(config, &text), XP_INVALID);
    assert_int_equal(config_dump_json(config, &text), XP_INVALID);
    assert_int_equal(config_warning_count(config), 0);
    config_destroy(config);
    config_destroy(NULL);
    xp_buf_fini(&text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(generated_files_are_current, set_up),
        cmocka_unit_test_setup(every_setting_is_documented, set_up),
        cmocka_unit_test_setup(the_example_loads_as_it_is, set_up),
        cmocka_unit_test_setup(the_example_loads_with_every_line_active, set_up),
        cmocka_unit_test_setup(toml_dump_loads_again, set_up),
        cmocka_unit_test_setup(json_dump_has_every_value_and_origin, set_up),
        cmocka_unit_test_setup(a_configuration_made_by_hand_is_no_dump, set_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
