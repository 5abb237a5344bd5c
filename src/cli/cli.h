/* SPDX-License-Identifier: MIT */
/*
 * The program's subcommands. Each lives in its own cmd_<name>.c as one function and is listed in
 * the table of main.c, from which --help is made. argv[0] is the subcommand's own name ("config
 * dump").
 *
 * Exit codes: 0 success, 1 the thing asked for failed or is not so, 2 wrong usage or configuration,
 * 130 interrupted.
 */
#ifndef XPOOL_CLI_CLI_H
#define XPOOL_CLI_CLI_H

#include "config/config.h"

#define CLI_EXIT_OK     0
#define CLI_EXIT_FAILED 1
#define CLI_EXIT_USAGE  2

/* In each such command's --help. */
#define CLI_CONFIG_HELP                                                                            \
    "  --config FILE      configuration (else XPOOL_CONFIG)\n"                                     \
    "  --set KEY=VALUE    one setting, above environment and file; repeatable\n"                   \
    "  -h, --help         this text\n"

/* Options every command that reads a configuration takes: --config FILE, --set KEY=VALUE
 * (repeatable), and --<registry key> VALUE for keys that allow the command line. Consumes those it
 * knows from argv (compacting it) and leaves the rest. Prints and returns CLI_EXIT_USAGE on error,
 * else 0. */
int cli_take_config_options(int *argc, char **argv, config_overrides_t *overrides_out);
/* As above, then config_load() and log set-up; prints errors. */
int cli_load_config(int *argc, char **argv, config_t **config_out);
/* The same for a system that runs, which must be steered and stopped although a model's files are
 * gone. */
int cli_load_config_running(int *argc, char **argv, config_t **config_out);
/* The same, and tells which settings the command line gave; they point into argv. */
int cli_load_config_with(int *argc, char **argv, config_overrides_t *overrides_out,
                         config_t **config_out);
/* "--name VALUE" or "--name=VALUE"; removes it from argv; returns NULL when absent. */
const char *cli_take_option(int *argc, char **argv, const char *name);
bool cli_take_flag(int *argc, char **argv, const char *name);
/* True, after printing "unexpected argument", when anything is left past argv[used]. */
bool cli_leftover(int argc, char **argv, int used);
/* Prints `help` to stdout and returns true when --help or -h is in argv. */
bool cli_wants_help(int argc, char **argv, const char *help);

int cmd_config_dump(int argc, char **argv);
int cmd_config_check(int argc, char **argv);
int cmd_config_docs(int argc, char **argv); /* writes the generated files; used by scripts */
int cmd_tokenize(int argc, char **argv);
int cmd_detokenize(int argc, char **argv);
int cmd_chat_template(int argc, char **argv);
int cmd_model_inspect(int argc, char **argv);
int cmd_model_synth(int argc, char **argv);
int cmd_daemon_serve(int argc, char **argv);
int cmd_daemon_check(int argc, char **argv);
int cmd_atnagent(int argc, char **argv);
int cmd_ffnagent(int argc, char **argv);
int cmd_serve(int argc, char **argv);
int cmd_exec(int argc, char **argv);
int cmd_gateway(int argc, char **argv);
int cmd_up(int argc, char **argv);
int cmd_down(int argc, char **argv);
int cmd_plan(int argc, char **argv);
int cmd_kv(int argc, char **argv);
int cmd_kv_set(int argc, char **argv);
int cmd_kv_policy(int argc, char **argv);
int cmd_kv_trim(int argc, char **argv);
int cmd_devices(int argc, char **argv);
int cmd_trace(int argc, char **argv);
int cmd_bench(int argc, char **argv);
#endif
