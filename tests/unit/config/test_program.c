/* SPDX-License-Identifier: MIT */
/* The program's frame, from outside: exit codes and what is printed where. Skips where the program
 * was not built. */
#include "config_test.h"

#include <sys/wait.h>

#define PROGRAM XPOOL_BINARY_DIR "/bin/xpool"
#define EXAMPLE "--config " XPOOL_SOURCE_DIR "/configs/xpool.example.toml"

static char output[1 << 18];

/* Runs `xpool ARGUMENTS` by the shell; stdout and stderr together in `output`. */
static int run(const char *arguments)
{
    char command[4096];
    snprintf(command, sizeof(command), "%s %s 2>&1 </dev/null", PROGRAM, arguments);
    FILE *pipe = popen(command, "r");
    assert_non_null(pipe);
    output[fread(output, 1, sizeof(output) - 1, pipe)] = '\0';
    int status = pclose(pipe);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 255;
}

static void expect(const char *arguments, int code, const char *text)
{
    int found = run(arguments);
    if (found != code || !strstr(output, text))
        fail_msg("xpool %s: exit %d, wanted %d and \"%s\" in:\n%s", arguments, found, code, text,
                 output);
}

static int set_up(void **state)
{
    clear_environment();
    return 0;
}

static void need_program(void)
{
    if (access(PROGRAM, X_OK) != 0)
        skip();
}

static void finding_commands(void **state)
{
    need_program();
    expect("", 2, "usage: xpool COMMAND");
    expect("--help", 0, "config check");
    expect("--version", 0, "xpool " XPOOL_VERSION "\n");
    expect("help", 0, "config check");
    expect("help config", 0, "config dump");
    expect("help config dump", 0, "usage: xpool config dump");
    expect("config dump --help", 0, "usage: xpool config dump");
    expect("config --help", 0, "config dump");
    expect("config", 2, "\"config\" needs a second word");
    expect("config dmup", 2, "unknown command \"config dmup\"");
    expect("confg dump", 2, "did you mean \"config dump\"?");
    expect("xyzzy", 2, "unknown command \"xyzzy\"");
    expect("--config x config dump", 2, "the command comes first");
    expect("help settings", 0, "scheduler.ffn_policy\n");
    expect("help xyzzy", 2, "unknown command");
    /* What DESIGN names but does not exist yet is not listed. */
    run("--help");
    assert_null(strstr(output, "memory-profile"));
}

static void options(void **state)
{
    need_program();
    expect("config dump " EXAMPLE " --daemon.http=127.0.0.1:9", 0, "daemon.http = \"127.0.0.1:9\"");
    expect("config dump " EXAMPLE " --scheduler.ffn_policy fifo", 0,
           "scheduler.ffn_policy = \"fifo\"");
    expect("config dump " EXAMPLE " --set models[0].max_context=5", 0, "max_context = 5 ");
    expect("config dump " EXAMPLE " --set devices.cpu:0.threads=3 --atn.devices cpu:0", 0,
           "devices.\"cpu:0\".threads = 3 ");
    expect("config dump --daemon.htp 1", 2, "did you mean --daemon.http?");
    expect("config dump --daemon.http", 2, "--daemon.http needs a value");
    expect("config dump --config", 2, "--config needs a value");
    expect("config dump --set x", 2, "--set takes KEY=VALUE, not \"x\"");
    expect("config dump --set =x", 2, "--set takes KEY=VALUE");
    expect("config dump extra", 2, "unexpected argument \"extra\"");
    expect("config dump --config /nonexistent.toml", 2, "cannot open /nonexistent.toml");
    expect("config docs", 2, "--write DIR or --check DIR");
    expect("config docs --check", 2, "--check needs a value");
    char many[4096] = "config dump";
    for (int i = 0; i < 65; i++)
        strcat(many, " --set a=1");
    expect(many, 2, "more than 64 settings");
}

static void config_commands(void **state)
{
    need_program();
    expect("config check " EXAMPLE, 0, "ok\nmodel tales-qwen3-moe: ");
    expect("config check --json " EXAMPLE, 0, "\"ok\": true");
    expect("config check --set daemon.http=1 --set scheduler.ffn_policy=x", 2,
           "config check: cli: daemon.http: found integer 1");
    assert_non_null(strstr(output, "\nconfig check: cli: scheduler.ffn_policy: "));
    expect("config check --json --set daemon.http=1", 2, "\"ok\": false");
    expect("config dump --json " EXAMPLE, 0, "\"origins\": {");
    expect("config docs --check " XPOOL_SOURCE_DIR, 0, "");
    expect("config docs --check /nonexistent", 1, "cannot open");
    expect("config dump >/dev/full", 1, "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(finding_commands, set_up),
        cmocka_unit_test_setup(options, set_up),
        cmocka_unit_test_setup(config_commands, set_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
