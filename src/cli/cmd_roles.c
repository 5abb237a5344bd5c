/* SPDX-License-Identifier: MIT */
/* The subcommands that run a role: daemon serve, atnagent, ffnagent, serve, gateway, up. */
#include <stdio.h>
#include <string.h>

#include "agents/agents.h"
#include "base/log.h"
#include "cli/cli.h"
#include "control/daemon.h"

#define CONFIG_HELP                                                                                \
    "  --config FILE      configuration (else XPOOL_CONFIG)\n"                                     \
    "  --set KEY=VALUE    one setting, above environment and file; repeatable\n"                   \
    "  -h, --help         this text\n"

static bool no_models(const config_t *config)
{
    if (config->model_count)
        return false;
    fprintf(stderr,
            "xpool: nothing to serve: name a configuration with [[models]] by --config FILE "
            "or XPOOL_CONFIG; configs/demo.toml is one\n");
    return true;
}

/* Loads the configuration, runs `body` on what is left of the words, and frees it: the frame of
 * every role. */
static int with_config(int argc, char **argv, const char *help,
                       int (*body)(int argc, char **argv, const config_t *config))
{
    if (cli_wants_help(argc, argv, help))
        return CLI_EXIT_OK;
    config_t *config;
    int code = cli_load_config(&argc, argv, &config);
    if (code)
        return code;
    code = body(argc, argv, config);
    config_destroy(config);
    return code;
}

static int run_daemon(int argc, char **argv, const config_t *config)
{
    if (cli_leftover(argc, argv, 1) || no_models(config))
        return CLI_EXIT_USAGE;
    xp_log_identify("daemon", "");
    return daemon_run(config);
}

static int run_agent(int argc, char **argv, const config_t *config, bool ffn)
{
    const char *device = cli_take_option(&argc, argv, "--device");
    /* With one device of that role there is nothing to choose. */
    uint32_t count = ffn ? config->ffn_count : config->atn_count;
    if (!device && count == 1)
        device = ffn ? config->ffn[0].name : config->atn[0].name;
    if (cli_leftover(argc, argv, 1))
        return CLI_EXIT_USAGE;
    if (!device) {
        fprintf(stderr, "xpool: %s.devices lists %u devices: say which with --device\n",
                ffn ? "ffn" : "atn", count);
        return CLI_EXIT_USAGE;
    }
    return ffn ? ffnagent_run(config, device) : atnagent_run(config, device);
}

static int run_atnagent(int argc, char **argv, const config_t *config)
{
    return run_agent(argc, argv, config, false);
}

static int run_ffnagent(int argc, char **argv, const config_t *config)
{
    return run_agent(argc, argv, config, true);
}

static int run_instance(int argc, char **argv, const config_t *config)
{
    if (argc < 2 && config->model_count == 1)
        return instance_run(config, config->models[0].id);
    if (argc < 2) {
        fprintf(stderr, "xpool: say which model: xpool serve MODEL_ID\n");
        return CLI_EXIT_USAGE;
    }
    return cli_leftover(argc, argv, 2) ? CLI_EXIT_USAGE : instance_run(config, argv[1]);
}

static int run_gateway(int argc, char **argv, const config_t *config)
{
    return cli_leftover(argc, argv, 1) ? CLI_EXIT_USAGE : gateway_run(config);
}

int cmd_daemon_serve(int argc, char **argv)
{
    return with_config(argc, argv,
                       "usage: xpool daemon serve [--config FILE]\n\n"
                       "Runs the control plane: registration, plan, readiness, failure, orderly "
                       "end.\nStops in order on Ctrl-C, SIGTERM or `xpool down`; exits 0 only if "
                       "every participant\nended by itself.\n\n" CONFIG_HELP,
                       run_daemon);
}

int cmd_atnagent(int argc, char **argv)
{
    return with_config(
        argc, argv,
        "usage: xpool atnagent [--device NAME] [--config FILE]\n\n"
        "Owns one attention device's Transport arenas and its place in the Fabric.\n\n"
        "  --device NAME      one of atn.devices (default: the only one)\n" CONFIG_HELP,
        run_atnagent);
}

int cmd_ffnagent(int argc, char **argv)
{
    return with_config(
        argc, argv,
        "usage: xpool ffnagent [--device NAME] [--config FILE]\n\n"
        "Owns one FFN device, the weight shards on it and their execution.\n\n"
        "  --device NAME      one of ffn.devices (default: the only one)\n" CONFIG_HELP,
        run_ffnagent);
}

int cmd_serve(int argc, char **argv)
{
    return with_config(argc, argv,
                       "usage: xpool serve MODEL_ID [--config FILE]\n\n"
                       "Serves one model of the configuration: attention, KV Cache, sampling and "
                       "its own HTTP;\nthe FFN of every layer is executed by the FfnAgents.\n\n"
                       "  MODEL_ID           one of models[].id\n" CONFIG_HELP,
                       run_instance);
}

int cmd_gateway(int argc, char **argv)
{
    return with_config(
        argc, argv,
        "usage: xpool gateway [--config FILE]\n\n"
        "The one door: routes requests to the Instances by their `model`.\n\n" CONFIG_HELP,
        run_gateway);
}

int cmd_up(int argc, char **argv)
{
    if (cli_wants_help(
            argc, argv,
            "usage: xpool up [--config FILE]\n\n"
            "Starts the daemon, every agent, every Instance and the gateway, waits until "
            "the system is\nready, and stops all of it in order on Ctrl-C, SIGTERM or "
            "`xpool down`.\n\n" CONFIG_HELP))
        return CLI_EXIT_OK;
    /* The children resolve the same configuration from the same words. */
    char *words[160];
    int count = 0;
    for (int i = 1; i < argc && count < 159; i++)
        words[count++] = argv[i];
    words[count] = NULL;
    config_t *config;
    int code = cli_load_config(&argc, argv, &config);
    if (code)
        return code;
    code = cli_leftover(argc, argv, 1) || no_models(config) ? CLI_EXIT_USAGE
                                                            : up_run(config, "xpool", words);
    config_destroy(config);
    return code;
}
