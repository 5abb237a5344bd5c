/* SPDX-License-Identifier: MIT */
/* Settings handed on through the environment: the same configuration, by its digest. And which
 * interpreter an SGLang Instance gets. */
#include "config_test.h"

#include <sys/stat.h>

#include "config/handoff.h"

static config_overrides_t overrides_of(const char *const *settings)
{
    config_overrides_t overrides = {0};
    for (; settings && settings[overrides.count]; overrides.count++) {
        overrides.keys[overrides.count] = settings[overrides.count];
        overrides.values[overrides.count] = strchr(settings[overrides.count], '=') + 1;
    }
    return overrides;
}

static config_t *load_with(const char *const *settings)
{
    config_overrides_t overrides = overrides_of(settings);
    config_t *config = NULL;
    if (config_load(&overrides, &config) != XP_OK)
        fail_msg("%s", xp_error_last()->text);
    return config;
}

static void handed_on_settings_give_the_same_digest(void **state)
{
    (void)state;
    const char *const settings[] = {"scheduler.ffn_concurrency=3", "cache.root='/tmp/a = b'",
                                    "daemon.socket=/tmp/x/d.sock", NULL};
    clear_environment();
    unsetenv(CONFIG_HANDOFF_VARIABLE);
    config_t *above = load_with(settings), *without = load_with(NULL);
    config_overrides_t overrides = overrides_of(settings);
    xp_buf_t text;
    xp_buf_init(&text, 4096);
    assert_int_equal(config_handoff_write(&overrides, &text), XP_OK);
    setenv(CONFIG_HANDOFF_VARIABLE, text.data, 1);
    config_t *below = load_with(NULL);
    assert_memory_equal(above->digest, below->digest, sizeof(above->digest));
    assert_memory_not_equal(above->digest, without->digest, sizeof(above->digest));
    assert_string_equal(below->cache_root, "/tmp/a = b");
    /* A process's own words are above those it was handed. */
    const char *const own[] = {"scheduler.ffn_concurrency=4", NULL};
    config_t *last = load_with(own);
    assert_int_equal(last->scheduler.ffn_concurrency, 4);
    assert_string_equal(last->cache_root, "/tmp/a = b");
    unsetenv(CONFIG_HANDOFF_VARIABLE);
    config_destroy(above);
    config_destroy(without);
    config_destroy(below);
    config_destroy(last);
    xp_buf_fini(&text);
}

static void what_cannot_be_handed_on_is_refused(void **state)
{
    (void)state;
    const char *const broken[] = {"cache.root='a\nb'", NULL};
    config_overrides_t overrides = overrides_of(broken), merged;
    char *memory = NULL;
    xp_buf_t text;
    xp_buf_init(&text, 4096);
    assert_int_equal(config_handoff_write(&overrides, &text), XP_INVALID);
    assert_non_null(strstr(xp_error_last()->text, "cache.root"));
    xp_buf_fini(&text);
    assert_int_equal(config_handoff_read("=1\n", NULL, &memory, &merged), XP_INVALID);
    assert_int_equal(config_handoff_read("no equals sign", NULL, &memory, &merged), XP_INVALID);
    assert_non_null(strstr(xp_error_last()->text, CONFIG_HANDOFF_VARIABLE));
    assert_null(memory);
    char many[(CONFIG_MAX_OVERRIDES + 1) * 4 + 1] = "";
    for (int i = 0; i <= CONFIG_MAX_OVERRIDES; i++)
        memcpy(many + 4 * i, "a=1\n", 5);
    assert_int_equal(config_handoff_read(many, NULL, &memory, &merged), XP_INVALID);
    assert_int_equal(config_handoff_read("\n", NULL, &memory, &merged), XP_OK);
    assert_int_equal(merged.count, 0);
    free(memory);
}

static void the_interpreter_is_the_nearest_that_is_named(void **state)
{
    (void)state;
    char folder[] = "/tmp/xpool-python-XXXXXX", command[256], python[CONFIG_MAX_PATH];
    char text[512], wanted[CONFIG_MAX_PATH];
    assert_non_null(mkdtemp(folder));
    clear_environment();
    unsetenv("XPOOL_PYTHON");
    snprintf(text, sizeof(text), "cache.root = '%s'\n" TEST_MODEL, folder);
    config_t *config = load(text);
    config_model_python(config, &config->models[0], python, sizeof(python));
    assert_string_equal(python, "python3");
    snprintf(command, sizeof(command),
             "mkdir -p %s/venv-test/bin && ln -s /bin/true %s/venv-test/bin/python", folder,
             folder);
    assert_int_equal(system(command), 0);
    config_model_python(config, &config->models[0], python, sizeof(python));
    snprintf(wanted, sizeof(wanted), "%s/venv-test/bin/python", folder);
    assert_string_equal(python, wanted);
    setenv("XPOOL_PYTHON", "/elsewhere/python", 1);
    config_model_python(config, &config->models[0], python, sizeof(python));
    assert_string_equal(python, "/elsewhere/python");
    config_destroy(config);
    /* Named in the configuration, even as what the default is. */
    strcat(text, "python = 'python3'\n");
    config = load(text);
    config_model_python(config, &config->models[0], python, sizeof(python));
    assert_string_equal(python, "python3");
    config_destroy(config);
    unsetenv("XPOOL_PYTHON");
    snprintf(command, sizeof(command), "rm -rf %s", folder);
    assert_int_equal(system(command), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(handed_on_settings_give_the_same_digest),
        cmocka_unit_test(what_cannot_be_handed_on_is_refused),
        cmocka_unit_test(the_interpreter_is_the_nearest_that_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
