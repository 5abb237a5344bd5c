/* SPDX-License-Identifier: MIT */
/*
 * The MPS controller's owner against a fake control program: this program itself, started under
 * NVIDIA's names through links in a scratch folder.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "cuda/mps_private.h"
#include "cuda/mps_watch.h"

static char scratch[64], program[PATH_MAX], root[PATH_MAX], devices[64];

/* ---- the fake: XPOOL_FAKE_MPS holds letters: d dies at once, m answers nothing, q does not quit,
 * s has a server ------------------------------------------------------------------------------ */
static bool fake_mode(char letter)
{
    const char *mode = getenv("XPOOL_FAKE_MPS");
    return mode && strchr(mode, letter);
}

static void fake_file(const char *name, const char *mode, const char *text, char *out)
{
    char path[PATH_MAX + 64];
    snprintf(path, sizeof(path), "%s/%s", getenv("CUDA_MPS_PIPE_DIRECTORY"), name);
    FILE *file = fopen(path, mode);
    if (out)
        out[0] = 0;
    if (!file)
        return;
    if (out)
        out[fread(out, 1, 255, file)] = 0;
    else
        fputs(text, file);
    fclose(file);
}

static int fake_controller(void)
{
    char text[64];
    alarm(60); /* never outlives a broken test for long */
    if (fake_mode('d')) {
        printf("first line\nthis GPU is not for you\n");
        return 1;
    }
    if (fake_mode('s')) {
        pid_t server = fork();
        if (server == 0) {
            execl(program, "/x/" MPS_SERVER_PROGRAM, (char *)NULL);
            _exit(1);
        }
        snprintf(text, sizeof(text), "%d\n", server);
        fake_file("servers", "w", text, NULL);
    }
    if (!fake_mode('m')) {
        snprintf(text, sizeof(text), "%d\n", getpid());
        fake_file("control.pid", "w", text, NULL);
    }
    for (;;)
        pause();
}

static int fake_front_end(void)
{
    char line[128] = "", text[256], first[64] = "";
    int a = 0, b = 0;
    if (!fgets(line, sizeof(line), stdin))
        return 2;
    fake_file("control.pid", "r", NULL, text);
    pid_t controller = atoi(text);
    if (!controller || kill(controller, 0) != 0) {
        printf("Cannot find MPS control daemon process\n");
        return 1;
    }
    sscanf(line, "%63s %d %d", first, &a, &b);
    if (!strcmp(first, "get_server_list")) {
        fake_file("servers", "r", NULL, text);
        fputs(text, stdout);
    } else if (!strcmp(first, "get_client_list")) {
        printf("4711\n4712\n");
    } else if (!strcmp(first, "terminate_client")) {
        fake_file("terminated", "a", line, NULL);
    } else if (!strcmp(first, "shutdown_server")) {
        kill(a, SIGKILL);
    } else if (!strcmp(first, "quit")) {
        if (!fake_mode('q'))
            kill(controller, SIGKILL);
    } else {
        return 3;
    }
    return 0;
}

/* ---- helpers -------------------------------------------------------------------------------- */
static mps_options_t options(void)
{
    return (mps_options_t){.root = root,
                           .name = "cuda-0",
                           .devices = devices,
                           .program = program,
                           .start_limit_ns = 5 * XP_NS_PER_S,
                           .command_limit_ns = 5 * XP_NS_PER_S,
                           .stop_limit_ns = 5 * XP_NS_PER_S};
}

static bool count_ours(void *context, const mps_process_t *one)
{
    if (!strncmp(one->pipe_folder, root, strlen(root)))
        ++*(uint32_t *)context;
    return true;
}

static uint32_t processes(void)
{
    uint32_t count = 0;
    assert_int_equal(mps_processes("/proc", count_ours, &count), XP_OK);
    return count;
}

static bool exists(const char *path)
{
    struct stat info;
    return lstat(path, &info) == 0;
}

static int setup(void **state)
{
    setenv("XPOOL_FAKE_MPS", "s", 1);
    return 0;
}

static int teardown(void **state)
{
    uint32_t ended;
    int status =
        mps_sweep(root, NULL, &ended) == XP_OK && processes() == 0 && !exists(root) ? 0 : -1;
    while (waitpid(-1, NULL, WNOHANG) > 0)
        continue;
    return status;
}

static void start(mps_t **mps)
{
    mps_options_t wanted = options();
    if (mps_start(&wanted, mps) != XP_OK)
        fail_msg("%s", xp_error_last()->text);
}

static int unlink_terminated(mps_t *mps)
{
    char path[PATH_MAX + 16];
    snprintf(path, sizeof(path), "%s/terminated", mps_pipe_folder(mps));
    return unlink(path);
}

/* ---- tests ---------------------------------------------------------------------------------- */
static void test_life(void **state)
{
    mps_t *mps;
    pid_t server, clients[4];
    uint32_t count;
    struct stat info;
    start(&mps);
    assert_false(mps_adopted(mps));
    assert_int_equal(mps_check(mps), XP_OK);
    assert_int_equal(processes(), 2);
    assert_int_equal(stat(root, &info), 0);
    assert_int_equal(info.st_mode & 0777, 0700);
    assert_true(mps_pidfd(mps) >= 0 && mps_pid(mps) > 0);
    assert_non_null(strstr(mps_pipe_folder(mps), "/cuda-0/pipe"));
    assert_non_null(strstr(mps_log_folder(mps), "/cuda-0/log"));
    assert_int_equal(mps_server(mps, &server), XP_OK);
    assert_true(server > 0);
    assert_int_equal(mps_clients(mps, clients, 4, &count), XP_OK);
    assert_int_equal(count, 2);
    assert_int_equal(clients[1], 4712);
    assert_int_equal(mps_terminate_client(mps, 4712), XP_OK);
    assert_int_equal(mps_terminate_client(mps, 4713), XP_NOT_FOUND);
    assert_int_equal(unlink_terminated(mps), 0);
    /* The same beside the caller's thread, which never waits. */
    mps_watch_t *watch;
    assert_int_equal(mps_watch_create(mps, 60 * XP_NS_PER_S, &watch), XP_OK);
    for (pid_t client = 4712; client <= 4713; client++) {
        uint64_t until_ns = xp_monotonic_ns() + 10 * XP_NS_PER_S;
        while (!mps_watch_terminate(watch, client)) {
            assert_true(xp_monotonic_ns() < until_ns);
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        }
    }
    for (pid_t client = 1; client <= MPS_CLIENTS_MAX; client++)
        assert_false(mps_watch_terminate(watch, 5000 + client));
    assert_true(mps_watch_terminate(watch, 6000)); /* no room: it is killed without */
    mps_watch_destroy(watch);
    char path[PATH_MAX + 16], text[64] = "", wanted[64];
    snprintf(path, sizeof(path), "%s/terminated", mps_pipe_folder(mps));
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    assert_non_null(fgets(text, sizeof(text), file));
    fclose(file);
    snprintf(wanted, sizeof(wanted), "terminate_client %d 4712\n", server);
    assert_string_equal(text, wanted);
    assert_int_equal(mps_stop(mps), XP_OK);
    assert_int_equal(processes(), 0);
    assert_false(exists(root));
    mps_destroy(mps);
    mps_destroy(NULL);
}

static void test_no_program(void **state)
{
    mps_t *mps = NULL;
    char *path = strdup(getenv("PATH"));
    mps_options_t wanted = options();
    wanted.program = NULL;
    setenv("PATH", "/nowhere::/", 1);
    assert_int_equal(mps_start(&wanted, &mps), XP_NOT_FOUND);
    assert_non_null(strstr(xp_error_last()->text, "nvidia-cuda-mps-control is not on PATH"));
    assert_null(mps);
    /* Found by PATH. */
    setenv("PATH", scratch, 1);
    assert_int_equal(mps_start(&wanted, &mps), XP_OK);
    assert_int_equal(mps_stop(mps), XP_OK);
    mps_destroy(mps);
    setenv("PATH", path, 1);
    free(path);
}

static void refused(const mps_options_t *wanted, xp_status_t status, const char *text)
{
    mps_t *mps = NULL;
    assert_int_equal(mps_start(wanted, &mps), status);
    if (!strstr(xp_error_last()->text, text))
        fail_msg("'%s' does not say '%s'", xp_error_last()->text, text);
    assert_null(mps);
}

static void test_root(void **state)
{
    mps_options_t wanted = options();
    assert_int_equal(mkdir(root, 0755), 0);
    chmod(root, 0755);
    refused(&wanted, XP_INVALID, "is open to others (mode 755)");
    assert_int_equal(rmdir(root), 0);
    assert_int_equal(symlink(scratch, root), 0);
    refused(&wanted, XP_INVALID, "is no folder");
    assert_int_equal(unlink(root), 0);
    wanted.name = "../x";
    refused(&wanted, XP_INVALID, "is no name");
    wanted = options();
    wanted.devices = "";
    refused(&wanted, XP_INVALID, "needs its device");
    char longer[PATH_MAX];
    snprintf(longer, sizeof(longer), "%s/%090d", scratch, 0);
    wanted = options();
    wanted.root = longer;
    refused(&wanted, XP_INVALID, "is too long for the sockets");
}

static void test_does_not_start(void **state)
{
    mps_options_t wanted = options();
    setenv("XPOOL_FAKE_MPS", "d", 1);
    refused(&wanted, XP_IO, "this GPU is not for you");
    setenv("XPOOL_FAKE_MPS", "ms", 1);
    wanted.start_limit_ns = 300 * XP_NS_PER_MS;
    refused(&wanted, XP_TIMEOUT, "does not answer");
    assert_int_equal(processes(), 0);
    assert_false(exists(root));
}

static void test_does_not_quit(void **state)
{
    mps_t *mps;
    mps_options_t wanted = options();
    wanted.stop_limit_ns = 300 * XP_NS_PER_MS;
    setenv("XPOOL_FAKE_MPS", "sq", 1);
    assert_int_equal(mps_start(&wanted, &mps), XP_OK);
    assert_int_equal(mps_stop(mps), XP_TIMEOUT);
    assert_int_equal(processes(), 0);
    assert_false(exists(root));
    mps_destroy(mps);
}

static void test_next_daemon(void **state)
{
    mps_t *mps, *second = NULL;
    start(&mps);
    pid_t pid = mps_pid(mps);
    mps_options_t wanted = options();
    refused(&wanted, XP_INVALID, "another daemon of this user holds");
    /* The daemon dies; the controller goes on; the next one takes it over. */
    mps_destroy(mps);
    start(&second);
    assert_true(mps_adopted(second));
    assert_int_equal(mps_pid(second), pid);
    assert_int_equal(mps_check(second), XP_OK);
    assert_int_equal(mps_stop(second), XP_OK);
    mps_destroy(second);
    assert_int_equal(processes(), 0);
}

static void test_killed(void **state)
{
    mps_t *mps;
    pid_t first, server;
    start(&mps);
    first = mps_pid(mps);
    assert_int_equal(mps_server(mps, &server), XP_OK);
    kill(first, SIGKILL);
    waitpid(first, NULL, 0);
    assert_int_equal(mps_check(mps), XP_PEER);
    mps_destroy(mps);
    assert_int_equal(processes(), 1); /* its server */
    start(&mps);
    assert_false(mps_adopted(mps));
    assert_int_not_equal(mps_pid(mps), first);
    mps_process_t gone; /* perhaps not reaped yet by its new parent */
    assert_int_equal(mps_process_read("/proc", server, &gone), XP_NOT_FOUND);
    assert_int_equal(mps_stop(mps), XP_OK);
    mps_destroy(mps);
    /* Everything but MPS was killed, and nobody starts again here. */
    uint32_t ended;
    start(&mps);
    assert_int_equal(mps_sweep(root, NULL, &ended), XP_OK);
    assert_int_equal(ended, 0); /* a daemon lives */
    assert_int_equal(mps_check(mps), XP_OK);
    mps_destroy(mps);
    assert_int_equal(mps_sweep(root, NULL, &ended), XP_OK);
    assert_int_equal(ended, 2);
    assert_int_equal(processes(), 0);
}

/* A controller in a /proc of our own making. */
static void make_process(const char *proc, int pid, const char *line, size_t line_bytes,
                         const char *environment, size_t environment_bytes)
{
    char path[PATH_MAX], text[256];
    snprintf(path, sizeof(path), "%s/%d", proc, pid);
    assert_int_equal(mkdir(path, 0700), 0);
    const struct {
        const char *name, *data;
        size_t bytes;
    } files[] = {{"cmdline", line, line_bytes},
                 {"environ", environment, environment_bytes},
                 {"stat", text, 0}};
    int length =
        snprintf(text, sizeof(text),
                 "%d (a ) b) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 987654 20\n", pid);
    for (int i = 0; i < 3; i++) {
        snprintf(path, sizeof(path), "%s/%d/%s", proc, pid, files[i].name);
        FILE *file = fopen(path, "w");
        assert_non_null(file);
        size_t bytes = i == 2 ? (size_t)length : files[i].bytes;
        assert_int_equal(fwrite(files[i].data, 1, bytes, file), bytes);
        fclose(file);
    }
}
#define LINE(text) text, sizeof(text)

static void test_foreign(void **state)
{
    char proc[PATH_MAX], command[PATH_MAX + 16];
    mps_options_t wanted = options();
    snprintf(proc, sizeof(proc), "%s/proc", scratch);
    assert_int_equal(mkdir(proc, 0700), 0);
    wanted.proc = proc;
    wanted.devices = "1";
    /* No harm: a front end, another device, another name. */
    make_process(proc, 10, LINE("/usr/bin/nvidia-cuda-mps-control"), LINE(""));
    make_process(proc, 11, LINE("nvidia-cuda-mps-control\0-d"),
                 LINE("A=b\0CUDA_VISIBLE_DEVICES=0,2\0CUDA_MPS_PIPE_DIRECTORY=/a/pipe"));
    make_process(proc, 12, LINE("bash\0nvidia-cuda-mps-control\0-d"), LINE(""));
    mps_process_t read;
    assert_int_equal(mps_process_read(proc, 11, &read), XP_OK);
    assert_int_equal(read.start_time, 987654);
    assert_true(read.controller && !read.server && read.devices_named);
    assert_string_equal(read.pipe_folder, "/a/pipe");
    assert_int_equal(mps_process_read(proc, 10, &read), XP_NOT_FOUND);
    assert_int_equal(mps_process_read(proc, 12, &read), XP_NOT_FOUND);
    make_process(proc, 13, LINE("nvidia-cuda-mps-control\0-d"),
                 LINE("CUDA_VISIBLE_DEVICES=1\0CUDA_MPS_PIPE_DIRECTORY=/b/pipe"));
    refused(&wanted, XP_INVALID, "pid 13, pipe folder /b/pipe, devices 1");
    snprintf(command, sizeof(command), "%s/13/environ", proc);
    assert_int_equal(truncate(command, 0), 0);
    refused(&wanted, XP_INVALID, "pid 13, pipe folder unknown (another user's), devices all");
}

static void test_overlap(void **state)
{
    assert_true(mps_devices_overlap("0", "0"));
    assert_true(mps_devices_overlap("2,0", "1,0"));
    assert_false(mps_devices_overlap("0", "1"));
    assert_false(mps_devices_overlap("1", "10"));
    assert_false(mps_devices_overlap("", "0"));
    assert_true(mps_devices_overlap("GPU-aa,GPU-bb", "gpu-BB"));
    assert_false(mps_devices_overlap("GPU-aa", "GPU-bb"));
    assert_true(mps_devices_overlap("GPU-aa", "0")); /* who knows */
}

/* What the line `name` of a process's status says. */
static uint64_t signals_of(pid_t pid, const char *name)
{
    char path[64], line[256];
    unsigned long long found = UINT64_MAX;
    snprintf(path, sizeof(path), "/proc/%d/status", pid);
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    while (fgets(line, sizeof(line), file))
        if (!strncmp(line, name, strlen(name)))
            found = strtoull(line + strlen(name) + 1, NULL, 16);
    fclose(file);
    return found;
}

/* The daemon starts it before it can act on signals, its watching thread asks with all of them
 * blocked: none of that is handed on. */
static void test_signals(void **state)
{
    mps_t *mps;
    sigset_t all, before;
    char output[MPS_OUTPUT_MAX];
    const char *environment[] = {"PATH=/usr/bin:/bin", NULL};
    struct sigaction ignored = {.sa_handler = SIG_IGN}, former;
    sigfillset(&all);
    assert_int_equal(sigaction(SIGPIPE, &ignored, &former), 0);
    assert_int_equal(sigprocmask(SIG_SETMASK, &all, &before), 0);
    start(&mps);
    xp_status_t status =
        mps_program_run("/bin/sh", environment, "grep -E 'SigBlk|SigIgn' /proc/self/status\n",
                        XP_NS_PER_S * 5, output);
    assert_int_equal(sigprocmask(SIG_SETMASK, &before, NULL), 0);
    assert_int_equal(sigaction(SIGPIPE, &former, NULL), 0);
    assert_int_equal(signals_of(mps_pid(mps), "SigBlk"), 0);
    assert_int_equal(signals_of(mps_pid(mps), "SigIgn") & 1ull << (SIGPIPE - 1), 0);
    assert_int_equal(status, XP_OK);
    assert_non_null(strstr(output, "SigBlk:\t0000000000000000"));
    /* So an administrator's kill ends it. */
    assert_int_equal(kill(mps_pid(mps), SIGTERM), 0);
    const uint64_t until_ns = xp_monotonic_ns() + 10 * XP_NS_PER_S;
    while (mps_check(mps) == XP_OK) {
        assert_true(xp_monotonic_ns() < until_ns);
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    assert_int_equal(mps_stop(mps), XP_OK);
    mps_destroy(mps);
}

static void test_run_limits(void **state)
{
    char output[MPS_OUTPUT_MAX];
    const char *environment[] = {"PATH=/usr/bin:/bin", NULL};
    uint64_t start_ns = xp_monotonic_ns();
    assert_int_equal(mps_program_run("/bin/sh", environment, "echo begun; sleep 20\n",
                                     200 * XP_NS_PER_MS, output),
                     XP_TIMEOUT);
    assert_true(xp_monotonic_ns() - start_ns < 5 * XP_NS_PER_S);
    assert_string_equal(output, "begun\n");
    assert_int_equal(
        mps_program_run("/bin/sh", environment, "echo no; exit 3\n", XP_NS_PER_S * 5, output),
        XP_IO);
    assert_non_null(strstr(xp_error_last()->text, "no"));
    assert_int_equal(
        mps_program_run("/bin/sh", environment, "yes | head -c 100000\n", XP_NS_PER_S * 5, output),
        XP_OK);
    assert_int_equal(strlen(output), MPS_OUTPUT_MAX - 1);
}

int main(int argc, char **argv)
{
    const char *slash = strrchr(argv[0], '/'), *last = slash ? slash + 1 : argv[0];
    ssize_t length = readlink("/proc/self/exe", program, sizeof(program) - 1);
    if (length < 0)
        return 1;
    program[length] = 0;
    if (!strcmp(last, MPS_SERVER_PROGRAM)) {
        alarm(60);
        for (;;)
            pause();
    }
    if (!strcmp(last, MPS_CONTROL_PROGRAM))
        return argc > 1 ? fake_controller() : fake_front_end();

    snprintf(scratch, sizeof(scratch), "/tmp/xpool-test-mps-XXXXXX");
    if (!mkdtemp(scratch))
        return 1;
    char link[PATH_MAX];
    snprintf(link, sizeof(link), "%s/%s", scratch, MPS_CONTROL_PROGRAM);
    if (symlink(program, link) != 0)
        return 1;
    snprintf(program, sizeof(program), "%s", link);
    snprintf(root, sizeof(root), "%s/r", scratch);
    snprintf(devices, sizeof(devices), "GPU-test-%d", getpid());
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_life),           TEST(test_no_program),    TEST(test_root),
        TEST(test_does_not_start), TEST(test_does_not_quit), TEST(test_next_daemon),
        TEST(test_killed),         TEST(test_foreign),       TEST(test_overlap),
        TEST(test_run_limits),     TEST(test_signals),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    char remove_all[PATH_MAX];
    snprintf(remove_all, sizeof(remove_all), "rm -rf %s", scratch);
    return system(remove_all) == 0 && failed == 0 ? 0 : 1;
}
