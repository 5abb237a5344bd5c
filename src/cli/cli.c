/* SPDX-License-Identifier: MIT */
/* What the subcommands share: taking options out of argv, and loading the configuration. Main
 * thread only. Everything behind a lone "--" belongs to somebody else and is never looked at. */
#include "cli/cli.h"

#include <stdio.h>
#include <string.h>

#include "config/settings.h"

/* Options end at "--". */
static int option_end(int argc, char **argv)
{
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], "--") == 0)
            return i;
    return argc;
}

static void remove_arguments(int *argc, char **argv, int first, int count)
{
    for (int i = first; i + count < *argc; i++)
        argv[i] = argv[i + count];
    *argc -= count;
    argv[*argc] = NULL;
}

static const char *without_dashes(const char *name)
{
    return name + (strncmp(name, "--", 2) == 0 ? 2 : 0);
}

/* Where option `name` stands before `end`, and its value; 0 when absent. `*count_out`: arguments it
 * takes up. A missing value is reported and counts as absent, so that the caller's check for
 * leftovers ends the program. */
static int find_option(int argc, char **argv, const char *name, const char **value_out,
                       int *count_out)
{
    size_t length = strlen(name);
    int end = option_end(argc, argv);
    for (int i = 1; i < end; i++) {
        if (strncmp(argv[i], "--", 2) != 0 || strncmp(argv[i] + 2, name, length) != 0)
            continue;
        if (argv[i][2 + length] == '=') {
            *value_out = argv[i] + 2 + length + 1;
            *count_out = 1;
            return i;
        }
        if (argv[i][2 + length])
            continue;
        if (i + 1 >= end) {
            fprintf(stderr, "%s: --%s needs a value\n", argv[0], name);
            return 0;
        }
        *value_out = argv[i + 1];
        *count_out = 2;
        return i;
    }
    return 0;
}

const char *cli_take_option(int *argc, char **argv, const char *name)
{
    const char *value = NULL;
    int count = 0, at = find_option(*argc, argv, without_dashes(name), &value, &count);
    if (at)
        remove_arguments(argc, argv, at, count);
    return at ? value : NULL;
}

bool cli_take_flag(int *argc, char **argv, const char *name)
{
    int end = option_end(*argc, argv);
    for (int i = 1; i < end; i++) {
        if (strncmp(argv[i], "--", 2) != 0 || strcmp(argv[i] + 2, without_dashes(name)) != 0)
            continue;
        remove_arguments(argc, argv, i, 1);
        return true;
    }
    return false;
}

bool cli_leftover(int argc, char **argv, int used)
{
    if (argc <= used)
        return false;
    fprintf(stderr, "%s: unexpected argument \"%s\"", argv[0], argv[used]);
    char key[96], nearest[160];
    if (strncmp(argv[used], "--", 2) == 0 && strchr(argv[used], '.')) {
        snprintf(key, sizeof(key), "%.*s", (int)strcspn(argv[used] + 2, "="), argv[used] + 2);
        if (config_setting_nearest(key, nearest, sizeof(nearest)) && strcmp(key, nearest) != 0)
            fprintf(stderr, "; did you mean --%s?", nearest);
    }
    fprintf(stderr, " (xpool help %s)\n", argv[0]);
    return true;
}

bool cli_wants_help(int argc, char **argv, const char *help)
{
    int end = option_end(argc, argv);
    for (int i = 1; i < end; i++) {
        if (strcmp(argv[i], "--help") != 0 && strcmp(argv[i], "-h") != 0)
            continue;
        size_t length = strlen(help);
        printf("%s%s", help, length && help[length - 1] == '\n' ? "" : "\n");
        return true;
    }
    return false;
}

static int too_many(char **argv)
{
    fprintf(stderr, "%s: more than 64 settings on the command line\n", argv[0]);
    return CLI_EXIT_USAGE;
}

/* The registry key of "--daemon.http" or "--daemon.http=..."; NULL for other options. */
static const char *setting_key(const char *argument)
{
    if (strncmp(argument, "--", 2) != 0)
        return NULL;
    size_t length = strcspn(argument + 2, "=");
    for (uint32_t i = 0; i < config_setting_count; i++) {
        const config_setting_t *setting = &config_settings[i];
        if (setting->scope == CONFIG_SCOPE_ROOT && (setting->sources & CONFIG_SOURCE_CLI) &&
            strlen(setting->key) == length && memcmp(setting->key, argument + 2, length) == 0)
            return setting->key;
    }
    return NULL;
}

int cli_take_config_options(int *argc, char **argv, config_overrides_t *overrides_out)
{
    config_overrides_t overrides = {0};
    const uint32_t limit = sizeof(overrides.keys) / sizeof(overrides.keys[0]);
    for (int i = 1; i < option_end(*argc, argv);) {
        const char *argument = argv[i], *equals = strchr(argument, '=');
        const char *key = setting_key(argument);
        bool is_set = strcmp(argument, "--set") == 0 || strncmp(argument, "--set=", 6) == 0;
        bool is_file = strcmp(argument, "--config") == 0 || strncmp(argument, "--config=", 9) == 0;
        if (!key && !is_set && !is_file) {
            i++;
            continue;
        }
        const char *value = equals ? equals + 1 : NULL;
        int count = 1;
        if (!value) {
            if (i + 1 >= option_end(*argc, argv)) {
                fprintf(stderr, "%s: %s needs a value\n", argv[0], argument);
                return CLI_EXIT_USAGE;
            }
            value = argv[i + 1];
            count = 2;
        }
        if (is_file) {
            overrides.config_path = value;
        } else if (overrides.count == limit) {
            return too_many(argv);
        } else if (is_set) {
            /* The key ends at the '=' inside the text itself: argv is not written to. */
            equals = strchr(value, '=');
            if (!equals || equals == value) {
                fprintf(stderr, "%s: --set takes KEY=VALUE, not \"%s\"\n", argv[0], value);
                return CLI_EXIT_USAGE;
            }
            overrides.keys[overrides.count] = value;
            overrides.values[overrides.count++] = equals + 1;
        } else {
            overrides.keys[overrides.count] = key;
            overrides.values[overrides.count++] = value;
        }
        remove_arguments(argc, argv, i, count);
    }
    *overrides_out = overrides;
    return CLI_EXIT_OK;
}

static int load_config(int *argc, char **argv, bool running, config_overrides_t *overrides_out,
                       config_t **config_out)
{
    config_overrides_t overrides;
    config_t *config = NULL;
    int code = cli_take_config_options(argc, argv, &overrides);
    if (code != CLI_EXIT_OK)
        return code;
    overrides.running = running;
    xp_buf_t report;
    xp_buf_init(&report, 65536);
    if (config_load_report(&overrides, &config, &report) != XP_OK) {
        const char *line = report.data ? report.data : xp_error_last()->text;
        while (line && *line) {
            size_t length = strcspn(line, "\n");
            fprintf(stderr, "%s: %.*s\n", argv[0], (int)length, line);
            line += length + (line[length] == '\n');
        }
        xp_buf_fini(&report);
        return CLI_EXIT_USAGE;
    }
    xp_buf_fini(&report);
    xp_log_configure(config->logging.level, config->logging.format, config->logging.color);
    for (uint32_t i = 0; i < config_warning_count(config); i++)
        xp_log_warn("configuration: %s", config_warning(config, i));
    *overrides_out = overrides;
    *config_out = config;
    return CLI_EXIT_OK;
}

int cli_load_config(int *argc, char **argv, config_t **config_out)
{
    config_overrides_t overrides;
    return cli_load_config_with(argc, argv, &overrides, config_out);
}

int cli_load_config_running(int *argc, char **argv, config_t **config_out)
{
    config_overrides_t overrides;
    return load_config(argc, argv, true, &overrides, config_out);
}

int cli_load_config_with(int *argc, char **argv, config_overrides_t *overrides_out,
                         config_t **config_out)
{
    return load_config(argc, argv, false, overrides_out, config_out);
}
