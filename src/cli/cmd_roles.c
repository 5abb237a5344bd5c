/* SPDX-License-Identifier: MIT */
/* The subcommands that run a role: daemon serve, atnagent, ffnagent, serve, exec, gateway, up. */
#include <stdio.h>
#include <string.h>

#include "agents/agents.h"
#include "base/log.h"
#include "cli/cli.h"
#include "control/daemon.h"

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
 * every role. `running`: as cli_load_config_running(); agents may come to a system that keeps their
 * weights, and what is wrong with the files is the daemon's to say. */
static int with_config(int argc, char **argv, const char *help, bool running,
                       int (*body)(int argc, char **argv, const config_t *config))
{
    if (cli_wants_help(argc, argv, help))
        return CLI_EXIT_OK;
    config_t *config;
    int code = (running ? cli_load_config_running : cli_load_config)(&argc, argv, &config);
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

static int run_instance(int argc, char **argv, const config_t *config,
                        const config_overrides_t *overrides)
{
    const char *id = argc > 1 ? argv[1] : config->model_count == 1 ? config->models[0].id : NULL;
    if (!id) {
        fprintf(stderr, "xpool: say which model: xpool serve MODEL_ID\n");
        return CLI_EXIT_USAGE;
    }
    if (cli_leftover(argc, argv, 2))
        return CLI_EXIT_USAGE;
    const config_model_t *model = config_model_find(config, id);
    return model && model->engine == CONFIG_ENGINE_SGLANG ? sglang_run(config, overrides, id)
                                                          : instance_run(config, id);
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
                       "every participant\nended by itself.\n\n" CLI_CONFIG_HELP,
                       false, run_daemon);
}

int cmd_atnagent(int argc, char **argv)
{
    return with_config(
        argc, argv,
        "usage: xpool atnagent [--device NAME] [--config FILE]\n\n"
        "Owns one attention device's Transport arenas and its place in the Fabric.\n\n"
        "  --device NAME      one of atn.devices (default: the only one)\n" CLI_CONFIG_HELP,
        true, run_atnagent);
}

int cmd_ffnagent(int argc, char **argv)
{
    return with_config(
        argc, argv,
        "usage: xpool ffnagent [--device NAME] [--config FILE]\n\n"
        "Owns one FFN device, the weight shards on it and their execution.\n\n"
        "  --device NAME      one of ffn.devices (default: the only one)\n" CLI_CONFIG_HELP,
        true, run_ffnagent);
}

int cmd_serve(int argc, char **argv)
{
    if (cli_wants_help(argc, argv,
                       "usage: xpool serve MODEL_ID [--config FILE]\n\n"
                       "Serves one model of the configuration: attention, KV Cache, sampling and "
                       "its own HTTP;\nthe FFN of every layer is executed by the FfnAgents. With "
                       "models[].engine = \"sglang\" this\nprocess becomes SGLang's server "
                       "(models[].python, models[].engine_args).\n\n"
                       "  MODEL_ID           one of models[].id\n" CLI_CONFIG_HELP))
        return CLI_EXIT_OK;
    config_overrides_t overrides;
    config_t *config;
    int code = cli_load_config_with(&argc, argv, &overrides, &config);
    if (code)
        return code;
    code = run_instance(argc, argv, config, &overrides);
    config_destroy(config);
    return code;
}

int cmd_exec(int argc, char **argv)
{
    if (cli_wants_help(
            argc, argv,
            "usage: xpool exec [--model ID] [--config FILE] -- COMMAND [ARGUMENT...]\n\n"
            "Becomes COMMAND, in the environment that an engine's process needs: the same "
            "process, process\ngroup and descriptors, the arguments untouched, the exit code "
            "COMMAND's own (127: not found,\n126: not executable). For example\n\n"
            "  xpool exec --model m -- python -m sglang.launch_server --model-path /models/m "
            "...\n\n"
            "Set, unless they are set already, but for the first three:\n"
            "  XPOOL_CONFIG, XPOOL_SET   this configuration, and settings of this command line\n"
            "  XPOOL_MODEL_ID            ID, or the only configured model\n"
            "  SGLANG_PLUGINS            xpool is added to what is there\n"
            "  PYTHONPATH                the folder of the plugin, in front, where it lies beside "
            "xpool's\n"
            "  SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0, and on CPU devices\n"
            "  SGLANG_USE_CPU_ENGINE=1, TORCHDYNAMO_DISABLE=1, OMP_NUM_THREADS, empty\n"
            "  CUDA_VISIBLE_DEVICES, and with several ranks SGLANG_CPU_OMP_THREADS_BIND and\n"
            "  SGLANG_NCCL_SO_PATH\n\n"
            "  --model ID         one of models[].id\n" CLI_CONFIG_HELP))
        return CLI_EXIT_OK;
    config_overrides_t overrides;
    config_t *config;
    int code = cli_load_config_with(&argc, argv, &overrides, &config);
    if (code)
        return code;
    const char *model = cli_take_option(&argc, argv, "--model");
    if (argc > 1 && strcmp(argv[1], "--") != 0) {
        fprintf(stderr,
                "xpool exec: unexpected \"%s\": the command stands behind --, as in "
                "xpool exec -- %s\n",
                argv[1], argv[1]);
        code = CLI_EXIT_USAGE;
    } else if (argc < 2) {
        fprintf(stderr, "xpool exec: the command stands behind --, as in xpool exec -- COMMAND\n");
        code = CLI_EXIT_USAGE;
    } else if (argc < 3) {
        fprintf(stderr, "xpool exec: there is no command behind --\n");
        code = AGENTS_EXIT_NOT_FOUND;
    } else {
        code = exec_run(config, &overrides, model, argv + 2);
    }
    config_destroy(config);
    return code;
}

int cmd_gateway(int argc, char **argv)
{
    return with_config(
        argc, argv,
        "usage: xpool gateway [--config FILE]\n\n"
        "The one door: routes requests to the Instances by their `model`.\n\n" CLI_CONFIG_HELP,
        false, run_gateway);
}

int cmd_up(int argc, char **argv)
{
    if (cli_wants_help(
            argc, argv,
            "usage: xpool up [--config FILE]\n\n"
            "Starts the daemon, every agent, every Instance and the gateway, waits until "
            "the system is\nready, and stops all of it in order on Ctrl-C, SIGTERM or "
            "`xpool down`.\n\n" CLI_CONFIG_HELP))
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
