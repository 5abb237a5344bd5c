/* SPDX-License-Identifier: MIT */
/*
 * The program: finds the subcommand in one table and runs it on the main thread. A command whose
 * file is not part of the build is a weak symbol without an address and is not listed.
 */
#include "cli/cli.h"

#include <stdio.h>
#include <string.h>

#include "config/settings.h"
#include "control/gpus.h"

#define WEAK_COMMAND(name) int name(int argc, char **argv) __attribute__((weak))
WEAK_COMMAND(cmd_config_dump);
WEAK_COMMAND(cmd_config_check);
WEAK_COMMAND(cmd_config_docs);
WEAK_COMMAND(cmd_tokenize);
WEAK_COMMAND(cmd_detokenize);
WEAK_COMMAND(cmd_chat_template);
WEAK_COMMAND(cmd_model_inspect);
WEAK_COMMAND(cmd_model_synth);
WEAK_COMMAND(cmd_daemon_serve);
WEAK_COMMAND(cmd_daemon_check);
WEAK_COMMAND(cmd_atnagent);
WEAK_COMMAND(cmd_ffnagent);
WEAK_COMMAND(cmd_serve);
WEAK_COMMAND(cmd_exec);
WEAK_COMMAND(cmd_gateway);
WEAK_COMMAND(cmd_up);
WEAK_COMMAND(cmd_down);
WEAK_COMMAND(cmd_plan);
WEAK_COMMAND(cmd_kv);
WEAK_COMMAND(cmd_kv_set);
WEAK_COMMAND(cmd_kv_policy);
WEAK_COMMAND(cmd_kv_trim);
WEAK_COMMAND(cmd_devices);
WEAK_COMMAND(cmd_trace);
WEAK_COMMAND(cmd_bench);

typedef struct command {
    const char *name; /* one or two words */
    int (*run)(int argc, char **argv);
    const char *summary;
} command_t;

static const command_t commands[] = {
    {"up", cmd_up, "start the whole system and stay with it"},
    {"down", cmd_down, "stop a running system in order"},
    {"daemon serve", cmd_daemon_serve, "run the daemon alone"},
    {"daemon check", cmd_daemon_check,
     "exit 0 when the system is ready, else say what it waits for"},
    {"atnagent", cmd_atnagent, "run the AtnAgent of one attention device"},
    {"ffnagent", cmd_ffnagent, "run the FfnAgent of one FFN device"},
    {"serve", cmd_serve, "run the Instance of one model"},
    {"exec", cmd_exec, "become another program, in an engine's environment"},
    {"gateway", cmd_gateway, "run the one HTTP door to all models"},
    {"plan", cmd_plan, "show what fits where, without starting anything"},
    {"devices", cmd_devices, "list processors and GPUs of this machine"},
    {"kv set", cmd_kv_set, "change a model's floor and ceiling while it runs"},
    {"kv policy", cmd_kv_policy, "change the order in which demands for KV memory are met"},
    {"kv trim", cmd_kv_trim, "shrink KV Caches to what live requests use"},
    {"kv", cmd_kv, "show how the KV Caches share their devices' memory"},
    {"config dump", cmd_config_dump, "print every setting in force and where it came from"},
    {"config check", cmd_config_check, "check a configuration"},
    {"config docs", cmd_config_docs, "write or check the files generated from the settings"},
    {"model inspect", cmd_model_inspect, "show what a checkpoint holds"},
    {"model synth", cmd_model_synth, "write a small seeded checkpoint"},
    {"tokenize", cmd_tokenize, "text to token ids"},
    {"detokenize", cmd_detokenize, "token ids to text"},
    {"chat-template", cmd_chat_template, "messages to the text a model sees"},
    {"trace", cmd_trace, "print what observers recorded, as JSON lines"},
    {"bench", cmd_bench, "measure"},
};
#define COMMAND_COUNT (sizeof(commands) / sizeof(commands[0]))

static void print_commands(FILE *out, const char *first_word)
{
    size_t length = first_word ? strlen(first_word) : 0;
    for (size_t i = 0; i < COMMAND_COUNT; i++) {
        const command_t *command = &commands[i];
        if (!command->run || (first_word && (strncmp(command->name, first_word, length) != 0 ||
                                             command->name[length] != ' ')))
            continue;
        fprintf(out, "  %-15s %s\n", command->name, command->summary);
    }
}

static void print_help(FILE *out)
{
    fprintf(out, "usage: xpool COMMAND [OPTIONS]\n\n"
                 "Serves many language models from few devices.\n\ncommands:\n");
    print_commands(out, NULL);
    fprintf(out, "\nOptions of every command that reads a configuration:\n"
                 "  --config FILE    the TOML file; otherwise XPOOL_CONFIG names it\n"
                 "  --set KEY=VALUE  one setting, before environment and file; may be repeated\n"
                 "  --KEY VALUE      the same for settings outside [[models]] and devices\n\n"
                 "xpool help COMMAND shows a command's own options, xpool help settings all "
                 "settings.\n");
}

static bool has_group(const char *word)
{
    size_t length = strlen(word);
    for (size_t i = 0; i < COMMAND_COUNT; i++)
        if (commands[i].run && strncmp(commands[i].name, word, length) == 0 &&
            commands[i].name[length] == ' ')
            return true;
    return false;
}

/* The command that argv[1] and, for names of two words, argv[2] spell; `*words_out` is how many. */
static const command_t *find_command(int argc, char **argv, int *words_out)
{
    for (size_t i = 0; i < COMMAND_COUNT; i++) {
        const command_t *command = &commands[i];
        const char *space = strchr(command->name, ' ');
        size_t length = space ? (size_t)(space - command->name) : strlen(command->name);
        if (!command->run || argc < 2 || strlen(argv[1]) != length ||
            memcmp(argv[1], command->name, length) != 0)
            continue;
        if (space && (argc < 3 || strcmp(argv[2], space + 1) != 0))
            continue;
        *words_out = space ? 2 : 1;
        return command;
    }
    return NULL;
}

static int unknown_command(int argc, char **argv)
{
    char text[128];
    const char *names[2 * COMMAND_COUNT];
    uint32_t count = 0;
    if (has_group(argv[1])) {
        fprintf(stderr,
                argc > 2 && argv[2][0] != '-' ? "xpool: unknown command \"%s %s\"; "
                                              : "xpool: \"%s\" needs a second word; ",
                argv[1], argc > 2 ? argv[2] : "");
        fprintf(stderr, "commands:\n");
        print_commands(stderr, argv[1]);
        return CLI_EXIT_USAGE;
    }
    for (size_t i = 0; i < COMMAND_COUNT; i++)
        if (commands[i].run)
            names[count++] = commands[i].name;
    snprintf(text, sizeof(text), "%.60s %.60s", argv[1], argc > 2 ? argv[2] : "");
    const char *nearest = argc > 2 ? config_text_nearest(text, names, count) : NULL;
    if (!nearest)
        nearest = config_text_nearest(argv[1], names, count);
    if (argv[1][0] == '-')
        fprintf(stderr, "xpool: the command comes first, options follow it (xpool --help)\n");
    else
        fprintf(stderr, "xpool: unknown command \"%s\"%s%s%s\n", argv[1],
                nearest ? "; did you mean \"" : "", nearest ? nearest : "",
                nearest ? "\"?" : " (xpool --help)");
    return CLI_EXIT_USAGE;
}

static int run_help(int argc, char **argv)
{
    if (argc < 2) {
        print_help(stdout);
        return CLI_EXIT_OK;
    }
    if (strcmp(argv[1], "settings") == 0) {
        xp_buf_t text;
        xp_buf_init(&text, 1 << 20);
        bool good = config_settings_help(&text) == XP_OK;
        if (good)
            fputs(text.data, stdout);
        else
            fprintf(stderr, "xpool: %s\n", xp_error_last()->text);
        xp_buf_fini(&text);
        return good ? CLI_EXIT_OK : CLI_EXIT_FAILED;
    }
    int words = 0;
    const command_t *command = find_command(argc, argv, &words);
    if (!command && has_group(argv[1]) && argc == 2) {
        print_commands(stdout, argv[1]);
        return CLI_EXIT_OK;
    }
    if (!command)
        return unknown_command(argc, argv);
    char *arguments[] = {(char *)command->name, (char *)"--help", NULL};
    return command->run(2, arguments);
}

static int run(int argc, char **argv)
{
    int words = 0;
    if (argc < 2) {
        print_help(stderr);
        return CLI_EXIT_USAGE;
    }
    if (strcmp(argv[1], "help") == 0)
        return run_help(argc - 1, argv + 1);
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0) {
        print_help(stdout);
        return CLI_EXIT_OK;
    }
    if (strcmp(argv[1], "--version") == 0 || strcmp(argv[1], "version") == 0) {
        printf("xpool %s\n", XPOOL_VERSION);
        return CLI_EXIT_OK;
    }
    const command_t *command = find_command(argc, argv, &words);
    if (!command && has_group(argv[1]) && argc > 2 &&
        (strcmp(argv[2], "--help") == 0 || strcmp(argv[2], "-h") == 0)) {
        print_commands(stdout, argv[1]);
        return CLI_EXIT_OK;
    }
    if (!command)
        return unknown_command(argc, argv);
    argv += words;
    argv[0] = (char *)command->name;
    return command->run(argc - words, argv);
}

int main(int argc, char **argv)
{
    gpus_ask_own_program(0);
    int code = run(argc, argv);
    /* A full disk or a closed pipe must not look like success. */
    if (fflush(stdout) != 0 || ferror(stdout)) {
        fprintf(stderr, "xpool: cannot write to standard output\n");
        return code ? code : CLI_EXIT_FAILED;
    }
    return code;
}
