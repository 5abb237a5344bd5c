/* SPDX-License-Identifier: MIT */
/* xpool config dump, check and docs. Main thread; starts nothing. */
#include "cli/cli.h"
#include "control/gpus.h"
#include "control/planner.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "config/docs.h"
#include "config/dump.h"

#define TEXT_MAX_BYTES (64u * 1024 * 1024)

#define CONFIG_OPTIONS                                                                             \
    "  --config FILE    the TOML file; otherwise XPOOL_CONFIG names it\n"                          \
    "  --set KEY=VALUE  one setting; may be repeated\n"                                            \
    "  --KEY VALUE      the same for settings outside [[models]] and devices\n"                    \
    "xpool help settings lists the keys.\n"

static int fail(char **argv)
{
    fprintf(stderr, "%s: %s\n", argv[0], xp_error_last()->text);
    return CLI_EXIT_FAILED;
}

int cmd_config_dump(int argc, char **argv)
{
    static const char help[] =
        "usage: xpool config dump [--json] [CONFIGURATION]\n\n"
        "Prints every setting in force and where it came from: default, env VARIABLE, cli or\n"
        "FILE:LINE:COLUMN. The text form is TOML that can be loaded again.\n\n"
        "  --json           as JSON: source, digest, values, origins, warnings\n" CONFIG_OPTIONS;
    config_t *config = NULL;
    xp_buf_t text;
    if (cli_wants_help(argc, argv, help))
        return CLI_EXIT_OK;
    bool json = cli_take_flag(&argc, argv, "--json");
    int code = cli_load_config(&argc, argv, &config);
    if (code != CLI_EXIT_OK)
        return code;
    xp_buf_init(&text, TEXT_MAX_BYTES);
    if (cli_leftover(argc, argv, 1)) {
        code = CLI_EXIT_USAGE;
        goto done;
    }
    if ((json ? config_dump_json : config_dump_toml)(config, &text) != XP_OK) {
        code = fail(argv);
        goto done;
    }
    fwrite(text.data, 1, text.length, stdout);
done:
    xp_buf_fini(&text);
    config_destroy(config);
    return code;
}

static int print_json(json_t *value)
{
    char *text = value ? json_dumps(value, JSON_INDENT(2)) : NULL;
    json_decref(value);
    if (!text) {
        fprintf(stderr, "xpool: no memory to write JSON\n");
        return CLI_EXIT_FAILED;
    }
    puts(text);
    free(text);
    return CLI_EXIT_OK;
}

/* {"ok": false, "errors": ["f.toml:1:2: ...", ...]} */
static int check_failed_json(const char *report)
{
    json_t *errors = json_array();
    while (errors && *report) {
        size_t length = strcspn(report, "\n");
        json_t *line = json_stringn(report, length);
        json_array_append_new(errors, line ? line : json_string("a text that is not UTF-8"));
        report += length + (report[length] == '\n');
    }
    int code = print_json(json_pack("{s:b, s:o}", "ok", 0, "errors", errors));
    return code == CLI_EXIT_OK ? CLI_EXIT_USAGE : code;
}

static json_t *device_list(const config_device_t *devices, uint32_t count)
{
    json_t *list = json_array();
    for (uint32_t i = 0; i < count; i++)
        json_array_append_new(list, json_pack("{s:s, s:i, s:I}", "name", devices[i].name, "threads",
                                              (int)devices[i].threads, "memory_bytes",
                                              (json_int_t)devices[i].memory_bytes));
    return list;
}

static int check_passed_json(const config_t *config)
{
    char hex[65];
    config_digest_hex(config, hex);
    json_t *models = json_array(), *warnings = json_array();
    for (uint32_t i = 0; i < config->model_count; i++)
        json_array_append_new(models, json_pack("{s:s, s:s}", "id", config->models[i].id, "path",
                                                config->models[i].path));
    for (uint32_t i = 0; i < config_warning_count(config); i++)
        json_array_append_new(warnings, json_string(config_warning(config, i)));
    return print_json(json_pack("{s:b, s:s, s:s, s:o, s:o, s:o, s:o}", "ok", 1, "source",
                                config->source_path, "digest", hex, "models", models, "atn",
                                device_list(config->atn, config->atn_count), "ffn",
                                device_list(config->ffn, config->ffn_count), "warnings", warnings));
}

static void print_devices(const char *role, const config_device_t *devices, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        printf("%s device %s", role, devices[i].name);
        if (devices[i].kind == CONFIG_DEVICE_CPU)
            printf(": %u threads, %.1f GiB", devices[i].threads,
                   (double)devices[i].memory_bytes / (1024.0 * 1024 * 1024));
        printf("\n");
    }
}

/* What the plan would refuse is no configuration that can be used. Reads checkpoint headers only.
 */
static bool runs_here(const config_t *config)
{
    plan_result_t *plan = NULL;
    stage_heap_place_t place;
    bool runs = config->model_count == 0 || planner_make(config, 1, &plan) == XP_OK;
    if (runs && plan && fabric_provider_heap(plan->plan.provider))
        runs = gpus_nvshmem(config, &place) == XP_OK;
    planner_free(plan);
    return runs;
}

int cmd_config_check(int argc, char **argv)
{
    static const char help[] =
        "usage: xpool config check [--json] [CONFIGURATION]\n\n"
        "Reads a configuration and prints \"ok\" with a summary, or every mistake in it.\n"
        "Exit code 0 when it can be used, 2 when not.\n\n"
        "  --json           as JSON\n" CONFIG_OPTIONS;
    config_t *config = NULL;
    config_overrides_t overrides;
    if (cli_wants_help(argc, argv, help))
        return CLI_EXIT_OK;
    bool json = cli_take_flag(&argc, argv, "--json");
    if (!json) {
        int code = cli_load_config(&argc, argv, &config);
        if (code != CLI_EXIT_OK)
            return code;
        if (cli_leftover(argc, argv, 1)) {
            config_destroy(config);
            return CLI_EXIT_USAGE;
        }
        if (!runs_here(config)) {
            fprintf(stderr, "xpool: %s\n", xp_error_last()->text);
            config_destroy(config);
            return CLI_EXIT_USAGE;
        }
        printf("ok\n");
        for (uint32_t i = 0; i < config->model_count; i++)
            printf("model %s: %s\n", config->models[i].id, config->models[i].path);
        print_devices("attention", config->atn, config->atn_count);
        print_devices("FFN", config->ffn, config->ffn_count);
        config_destroy(config);
        return CLI_EXIT_OK;
    }
    int code = cli_take_config_options(&argc, argv, &overrides);
    if (code != CLI_EXIT_OK || cli_leftover(argc, argv, 1))
        return CLI_EXIT_USAGE;
    xp_buf_t report;
    xp_buf_init(&report, 65536);
    if (config_load_report(&overrides, &config, &report) == XP_OK && runs_here(config))
        code = check_passed_json(config);
    else
        code = check_failed_json(report.data ? report.data : xp_error_last()->text);
    xp_buf_fini(&report);
    config_destroy(config);
    return code;
}

static xp_status_t write_document(const char *path, const xp_buf_t *text)
{
    FILE *file = fopen(path, "we");
    if (!file)
        return xp_fail_errno(XP_IO, "cannot write %s", path);
    size_t written = fwrite(text->data, 1, text->length, file);
    if (fclose(file) != 0 || written != text->length)
        return xp_fail_errno(XP_IO, "cannot write %s", path);
    return XP_OK;
}

/* True when the file holds exactly this text. */
static bool is_current(const char *path, const xp_buf_t *text)
{
    char *found = NULL;
    size_t length = 0;
    if (xp_file_read(path, TEXT_MAX_BYTES, &found, &length) != XP_OK) {
        fprintf(stderr, "config docs: %s\n", xp_error_last()->text);
        return false;
    }
    bool same = length == text->length && memcmp(found, text->data, length) == 0;
    free(found);
    if (!same)
        fprintf(stderr, "config docs: %s is not current; run xpool config docs --write\n", path);
    return same;
}

int cmd_config_docs(int argc, char **argv)
{
    static const char help[] =
        "usage: xpool config docs --write DIR | --check DIR\n\n"
        "Writes docs/configuration.md, configs/xpool.example.toml and .env.example below DIR, or\n"
        "with --check exits 1 when one of them is not what would be written.\n";
    if (cli_wants_help(argc, argv, help))
        return CLI_EXIT_OK;
    const char *write_folder = cli_take_option(&argc, argv, "--write");
    const char *check_folder = cli_take_option(&argc, argv, "--check");
    if (cli_leftover(argc, argv, 1))
        return CLI_EXIT_USAGE;
    if (!write_folder == !check_folder) {
        fprintf(stderr, "%s: give either --write DIR or --check DIR\n", argv[0]);
        return CLI_EXIT_USAGE;
    }
    int code = CLI_EXIT_OK;
    for (const config_document_t *document = config_documents; document->path; document++) {
        char path[CONFIG_MAX_PATH];
        xp_buf_t text;
        if (snprintf(path, sizeof(path), "%s/%s", write_folder ? write_folder : check_folder,
                     document->path) >= (int)sizeof(path)) {
            fprintf(stderr, "%s: the folder's name is too long\n", argv[0]);
            return CLI_EXIT_USAGE;
        }
        xp_buf_init(&text, TEXT_MAX_BYTES);
        if (document->write(&text) != XP_OK)
            code = fail(argv);
        else if (check_folder && !is_current(path, &text))
            code = CLI_EXIT_FAILED;
        else if (write_folder && write_document(path, &text) != XP_OK)
            code = fail(argv);
        else if (write_folder)
            printf("%s\n", path);
        xp_buf_fini(&text);
    }
    return code;
}
