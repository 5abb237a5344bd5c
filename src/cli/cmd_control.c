/* SPDX-License-Identifier: MIT */
/* The subcommands that talk to a running daemon or plan without one: daemon check, down, plan. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "cli/cli.h"
#include "control/client.h"
#include "control/planner.h"

#define CHECK_TIMEOUT_NS (3 * XP_NS_PER_S)

static int no_daemon(const config_t *config, bool json)
{
    const char *text = xp_error_last()->text;
    if (json)
        printf("{\"system_ready\": false, \"error\": \"no daemon answers at %s\"}\n",
               config->daemon.socket);
    else
        fprintf(stderr,
                "xpool: %s; is it running? start it with `xpool up` or `xpool daemon serve`\n",
                text);
    return CLI_EXIT_FAILED;
}

static int print_verdict(const xpw_Verdict *verdict, bool json)
{
    if (json) {
        json_t *reasons = json_array();
        for (pb_size_t i = 0; i < verdict->reasons_count; i++)
            json_array_append_new(reasons, json_string(verdict->reasons[i]));
        json_t *all =
            json_pack("{s:s, s:b, s:b, s:b, s:o, s:s, s:i}", "state", verdict->state,
                      "fabric_executable", verdict->fabric_executable, "system_ready",
                      verdict->system_ready, "serving_healthy", verdict->serving_healthy, "reasons",
                      reasons, "failure", verdict->failure, "http_port", (int)verdict->http_port);
        char *text = json_dumps(all, JSON_INDENT(1));
        puts(text ? text : "{}");
        free(text);
        json_decref(all);
    } else {
        printf("%-18s %s\n", "state", verdict->state);
        printf("%-18s %s\n", "Fabric Executable", verdict->fabric_executable ? "yes" : "no");
        printf("%-18s %s\n", "System Ready", verdict->system_ready ? "yes" : "no");
        printf("%-18s %s\n", "Serving Healthy", verdict->serving_healthy ? "yes" : "no");
        for (pb_size_t i = 0; i < verdict->reasons_count; i++)
            printf("waits for: %s\n", verdict->reasons[i]);
        if (verdict->failure[0])
            printf("canonical failure: %s\n", verdict->failure);
    }
    return verdict->system_ready ? CLI_EXIT_OK : CLI_EXIT_FAILED;
}

int cmd_daemon_check(int argc, char **argv)
{
    if (cli_wants_help(argc, argv,
                       "usage: xpool daemon check [--json] [--config FILE]\n\n"
                       "Exits 0 exactly when the system is ready, otherwise says what it waits "
                       "for.\nReports three verdicts apart: Fabric Executable (agents), System "
                       "Ready, Serving Healthy\n(every Instance's HTTP health answered).\n\n"
                       "  --json             as JSON\n" CLI_CONFIG_HELP))
        return CLI_EXIT_OK;
    bool json = cli_take_flag(&argc, argv, "--json");
    config_t *config;
    int code = cli_load_config_running(&argc, argv, &config);
    if (code)
        return code;
    if (cli_leftover(argc, argv, 1)) {
        config_destroy(config);
        return CLI_EXIT_USAGE;
    }
    xpw_Envelope question = {.which_body = xpw_Envelope_check_tag}, answer;
    if (client_ask(config, "check", &question, xpw_Envelope_verdict_tag, CHECK_TIMEOUT_NS,
                   &answer) != XP_OK)
        code = no_daemon(config, json);
    else
        code = print_verdict(&answer.body.verdict, json);
    config_destroy(config);
    return code;
}

int cmd_down(int argc, char **argv)
{
    if (cli_wants_help(argc, argv,
                       "usage: xpool down [--config FILE]\n\n"
                       "Stops a running system in order and waits for its end. Exits 0 only if "
                       "every participant\nended by itself before its deadline "
                       "(deadlines.drain, deadlines.stop).\n\n" CLI_CONFIG_HELP))
        return CLI_EXIT_OK;
    config_t *config;
    int code = cli_load_config_running(&argc, argv, &config);
    if (code)
        return code;
    if (cli_leftover(argc, argv, 1)) {
        config_destroy(config);
        return CLI_EXIT_USAGE;
    }
    xpw_Envelope question = {.which_body = xpw_Envelope_down_tag}, answer;
    double patience = config->deadlines.drain + 2 * config->deadlines.stop + 10;
    xp_status_t status = client_ask(config, "down", &question, xpw_Envelope_down_done_tag,
                                    (uint64_t)(patience * (double)XP_NS_PER_S), &answer);
    if (status == XP_RETRY) {
        code = no_daemon(config, false);
    } else if (status != XP_OK) {
        fprintf(stderr, "xpool: %s\n", xp_error_last()->text);
        code = CLI_EXIT_FAILED;
    } else if (!answer.body.down_done.clean) {
        fprintf(stderr, "xpool: the end was not clean: %s\n", answer.body.down_done.text);
        code = CLI_EXIT_FAILED;
    } else {
        puts("stopped: every participant ended by itself");
    }
    config_destroy(config);
    return code;
}

/* ---- plan -------------------------------------------------------------------------------------
 */

static void mib(uint64_t bytes)
{
    printf(" %10.1f", (double)bytes / 1048576.0);
}

/* The attention devices of an Instance's ranks: cpu:0+cpu:1. */
static void attention_devices(const config_t *config, const plan_model_t *model, char *out,
                              size_t size)
{
    out[0] = '\0';
    for (uint32_t r = 0; r < model->ranks; r++) {
        size_t used = strlen(out);
        snprintf(out + used, size - used, "%s%s", used ? "+" : "",
                 config->atn[model->rank_atn[r]].name);
    }
}

static void print_plan(const config_t *config, const plan_result_t *plan)
{
    printf("%-24s %-22s %-8s %-10s %-14s %10s %10s %10s %8s %8s\n", "model", "architecture",
           "engine", "attention", "FFN", "atn MiB", "KV floor", "KV ceiling", "bundle", "context");
    for (uint32_t m = 0; m < plan->model_count; m++) {
        const plan_model_t *model = &plan->models[m];
        const plan_weights_t *weights = &plan->weights[model->weights];
        char group[128] = "";
        for (uint32_t f = 0; f < plan->ffn_count; f++)
            if (weights->group & (1u << f)) {
                size_t used = strlen(group);
                snprintf(group + used, sizeof(group) - used, "%s%s", used ? "+" : "",
                         config->ffn[f].name);
            }
        char devices[128];
        attention_devices(config, model, devices, sizeof(devices));
        printf("%-24s %-22.22s %-8s %-10s %-14s", config->models[m].id,
               model->spec.architecture_name, config_engine_name(config->models[m].engine), devices,
               group);
        mib(model->attention_bytes);
        printf(" %10u %10u %8u %8u\n", model->kv_floor_tokens, model->kv_tokens,
               model->kv_elastic ? model->kv_bundle_tokens : 0, model->max_context);
    }
    printf("KV floor, ceiling and bundle in tokens of one rank; bundle 0: the KV Cache is fixed\n");
    printf("\n%-12s %-10s %10s %10s %10s %10s %10s\n", "device", "role", "budget", "weights",
           "workspace", "KV pool", "left MiB");
    for (uint32_t i = 0; i < plan->atn_count + plan->ffn_count; i++) {
        const plan_device_t *device =
            i < plan->atn_count ? &plan->atn[i] : &plan->ffn[i - plan->atn_count];
        uint64_t used =
            device->weight_bytes + device->workspace_bytes + device->kv_bytes + device->arena_bytes;
        printf("%-12s %-10s", device->device->name, device->ffn_role ? "ffn" : "attention");
        mib(device->budget_bytes);
        mib(device->weight_bytes);
        mib(device->workspace_bytes + device->arena_bytes);
        mib(device->kv_bytes);
        mib(device->budget_bytes > used ? device->budget_bytes - used : 0);
        putchar('\n');
    }
    if (plan->cuda)
        printf("\nprovider %s: stages are in the FFN devices' workspace",
               fabric_plan_provider_name(plan->plan.provider));
    else
        printf("\nFabric arena: %.1f MiB of host memory", (double)plan->fabric_bytes / 1048576.0);
    printf("; %u weight set(s) for %u model(s)\n", plan->weights_count, plan->model_count);
}

static json_t *plan_json(const config_t *config, const plan_result_t *plan)
{
    json_t *models = json_array(), *devices = json_array();
    for (uint32_t m = 0; m < plan->model_count; m++) {
        const plan_model_t *model = &plan->models[m];
        const plan_weights_t *weights = &plan->weights[model->weights];
        json_t *group = json_array();
        for (uint32_t f = 0; f < plan->ffn_count; f++)
            if (weights->group & (1u << f))
                json_array_append_new(group, json_string(config->ffn[f].name));
        json_t *ranks = json_array();
        for (uint32_t r = 0; r < model->ranks; r++)
            json_array_append_new(ranks, json_string(config->atn[model->rank_atn[r]].name));
        json_array_append_new(
            models,
            json_pack(
                "{s:s,s:s,s:s,s:o,s:o,s:s,s:i,s:i,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:b,s:I,s:I,s:I}",
                "id", config->models[m].id, "architecture", model->spec.architecture_name, "engine",
                config_engine_name(config->models[m].engine), "attention_devices", ranks,
                "execution_group", group, "delivery",
                fabric_delivery_name(plan->plan.instances[m].delivery), "weight_set",
                (int)model->weights, "ffn_tp_size", (int)weights->tp_size, "ffn_shard_bytes",
                (json_int_t)weights->shard_bytes, "attention_bytes",
                (json_int_t)model->attention_bytes, "workspace_bytes",
                (json_int_t)model->workspace_bytes, "kv_bytes", (json_int_t)model->kv_bytes,
                "kv_tokens", (json_int_t)model->kv_tokens, "max_context",
                (json_int_t)model->max_context, "max_rows", (json_int_t)model->max_rows,
                "kv_elastic", model->kv_elastic, "kv_floor_tokens",
                (json_int_t)model->kv_floor_tokens, "kv_bundle_tokens",
                (json_int_t)model->kv_bundle_tokens, "kv_bundle_bytes",
                (json_int_t)model->kv_bundle_bytes));
    }
    for (uint32_t i = 0; i < plan->atn_count + plan->ffn_count; i++) {
        const plan_device_t *device =
            i < plan->atn_count ? &plan->atn[i] : &plan->ffn[i - plan->atn_count];
        json_array_append_new(
            devices,
            json_pack("{s:s,s:s,s:I,s:I,s:I,s:I,s:I}", "device", device->device->name, "role",
                      device->ffn_role ? "ffn" : "attention", "budget_bytes",
                      (json_int_t)device->budget_bytes, "weight_bytes",
                      (json_int_t)device->weight_bytes, "workspace_bytes",
                      (json_int_t)device->workspace_bytes, "kv_bytes", (json_int_t)device->kv_bytes,
                      "arena_bytes", (json_int_t)device->arena_bytes));
    }
    return json_pack("{s:o,s:o,s:I,s:s}", "models", models, "devices", devices, "fabric_bytes",
                     (json_int_t)plan->fabric_bytes, "provider",
                     fabric_plan_provider_name(plan->plan.provider));
}

int cmd_plan(int argc, char **argv)
{
    if (cli_wants_help(
            argc, argv,
            "usage: xpool plan [--json] [--config FILE]\n\n"
            "Shows, without starting anything, what fits, where every byte goes, and what "
            "to change\nwhen it does not fit. Reads checkpoint headers only.\n\n"
            "  --json             as JSON\n" CLI_CONFIG_HELP))
        return CLI_EXIT_OK;
    bool json = cli_take_flag(&argc, argv, "--json");
    config_t *config;
    int code = cli_load_config(&argc, argv, &config);
    if (code)
        return code;
    plan_result_t *plan = NULL;
    if (cli_leftover(argc, argv, 1)) {
        code = CLI_EXIT_USAGE;
    } else if (planner_make(config, 1, &plan) != XP_OK) {
        fprintf(stderr, "xpool: %s\n", xp_error_last()->text);
        code = CLI_EXIT_FAILED;
    } else if (json) {
        json_t *value = plan_json(config, plan);
        char *text = json_dumps(value, JSON_INDENT(1));
        puts(text ? text : "{}");
        free(text);
        json_decref(value);
    } else {
        print_plan(config, plan);
    }
    planner_free(plan);
    config_destroy(config);
    return code;
}
