/* SPDX-License-Identifier: MIT */
/*
 * Finding, ending and running NVIDIA's MPS programs. Reads /proc, which is input like any other:
 * every file has a limit. No state of its own.
 */
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/process.h"
#include "cuda/mps_private.h"

#define PROCESS_FILE_MAX (256u << 10) /* an environment */

extern char **environ;

/* A file of /proc/PID, ended by NUL; NULL: gone, or not for us (errno). */
static char *process_file(const char *proc, pid_t pid, const char *name, size_t *bytes_out)
{
    char path[PATH_MAX];
    snprintf(path, sizeof(path), "%s/%d/%s", proc, pid, name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return NULL;
    size_t bytes = 0, room = 4096;
    char *text = malloc(room);
    while (text) {
        ssize_t count = read(fd, text + bytes, room - bytes - 1);
        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0)
            break;
        bytes += (size_t)count;
        if (bytes + 1 < room)
            continue;
        if (room >= PROCESS_FILE_MAX)
            break;
        char *more = realloc(text, room * 2);
        if (!more) {
            free(text);
            text = NULL;
            break;
        }
        text = more;
        room *= 2;
    }
    close(fd);
    if (text)
        text[bytes] = 0;
    *bytes_out = bytes;
    return text;
}

static uint64_t start_time_of(const char *proc, pid_t pid)
{
    size_t bytes;
    char *text = process_file(proc, pid, "stat", &bytes);
    uint64_t ticks = 0;
    /* The name may hold anything, ')' too: fields are counted from its last one. */
    char *at = text ? strrchr(text, ')') : NULL;
    for (int field = 2; at && field < 22; field++)
        at = strchr(at + 1, ' ');
    if (at)
        ticks = strtoull(at, NULL, 10);
    free(text);
    return ticks;
}

static const char *variable_in(const char *block, size_t bytes, const char *name)
{
    size_t length = strlen(name);
    for (size_t at = 0; at < bytes; at += strlen(block + at) + 1)
        if (!strncmp(block + at, name, length) && block[at + length] == '=')
            return block + at + length + 1;
    return NULL;
}

xp_status_t mps_process_read(const char *proc, pid_t pid, mps_process_t *process_out)
{
    size_t bytes;
    mps_process_t process = {.pid = pid};
    char *line = process_file(proc, pid, "cmdline", &bytes);
    if (!line)
        return XP_NOT_FOUND;
    const char *slash = strrchr(line, '/'), *name = slash ? slash + 1 : line;
    process.server = !strcmp(name, MPS_SERVER_PROGRAM);
    /* Without an option it is the front end of somebody's command, gone in a moment. */
    if (!strcmp(name, MPS_CONTROL_PROGRAM))
        for (size_t at = strlen(line) + 1; at < bytes; at += strlen(line + at) + 1)
            if (line[at] == '-')
                process.controller = true;
    free(line);
    if (!process.server && !process.controller)
        return XP_NOT_FOUND;
    process.start_time = start_time_of(proc, pid);
    if (!process.start_time)
        return XP_NOT_FOUND;
    char *block = process_file(proc, pid, "environ", &bytes);
    if (block) {
        /* A process that is ending has no environment any more. */
        process.environment_known = bytes > 0;
        const char *folder = variable_in(block, bytes, "CUDA_MPS_PIPE_DIRECTORY");
        const char *devices = variable_in(block, bytes, "CUDA_VISIBLE_DEVICES");
        if (folder)
            snprintf(process.pipe_folder, sizeof(process.pipe_folder), "%s", folder);
        if (devices && strlen(devices) < sizeof(process.devices)) {
            process.devices_named = true;
            strcpy(process.devices, devices);
        }
        free(block);
    }
    *process_out = process;
    return XP_OK;
}

xp_status_t mps_processes(const char *proc, bool (*visit)(void *context, const mps_process_t *one),
                          void *context)
{
    DIR *folder = opendir(proc);
    if (!folder)
        return xp_fail_errno(XP_IO, "cannot read %s", proc);
    struct dirent *entry;
    while ((entry = readdir(folder))) {
        mps_process_t one;
        if (!isdigit((unsigned char)entry->d_name[0]))
            continue;
        if (mps_process_read(proc, (pid_t)strtol(entry->d_name, NULL, 10), &one) != XP_OK)
            continue;
        if (!visit(context, &one))
            break;
    }
    closedir(folder);
    return XP_OK;
}

xp_status_t mps_process_end(const char *proc, const mps_process_t *process, uint64_t limit_ns)
{
    int fd = (int)syscall(SYS_pidfd_open, process->pid, 0);
    if (fd < 0)
        return errno == ESRCH ? XP_OK : xp_fail_errno(XP_IO, "cannot hold pid %d", process->pid);
    xp_status_t status = XP_OK;
    /* Looked at after it is held: now it is that process or it is gone. */
    if (start_time_of(proc, process->pid) != process->start_time)
        goto done;
    if (syscall(SYS_pidfd_send_signal, fd, SIGKILL, NULL, 0) != 0 && errno != ESRCH) {
        status = xp_fail_errno(XP_IO, "cannot end pid %d", process->pid);
        goto done;
    }
    struct pollfd wait = {.fd = fd, .events = POLLIN};
    if (poll(&wait, 1, (int)(limit_ns / XP_NS_PER_MS)) <= 0)
        status = xp_fail(XP_TIMEOUT, "pid %d does not end, although it was killed", process->pid);
    else
        waitpid(process->pid, NULL, WNOHANG); /* if it is a child of ours */
done:
    close(fd);
    return status;
}

static bool devices_all_ordinals(const char *list)
{
    return list[strspn(list, "0123456789, ")] == 0;
}

bool mps_devices_overlap(const char *a, const char *b)
{
    if (devices_all_ordinals(a) != devices_all_ordinals(b))
        return true;
    for (const char *x = a; *x;) {
        size_t x_length = strcspn(x, ",");
        for (const char *y = b; *y;) {
            size_t y_length = strcspn(y, ",");
            if (x_length && x_length == y_length && !strncasecmp(x, y, x_length))
                return true;
            y += y_length + (y[y_length] == ',');
        }
        x += x_length + (x[x_length] == ',');
    }
    return false;
}

xp_status_t mps_program_find(const char *program, char path_out[PATH_MAX])
{
    if (strchr(program, '/')) {
        if (access(program, X_OK) != 0)
            return xp_fail_errno(XP_NOT_FOUND, "cannot run %s", program);
        snprintf(path_out, PATH_MAX, "%s", program);
        return XP_OK;
    }
    const char *path = getenv("PATH");
    for (const char *at = path ? path : ""; *at;) {
        size_t length = strcspn(at, ":");
        char candidate[PATH_MAX];
        if (length && length + strlen(program) + 2 < PATH_MAX) {
            snprintf(candidate, sizeof(candidate), "%.*s/%s", (int)length, at, program);
            if (access(candidate, X_OK) == 0) {
                memcpy(path_out, candidate, sizeof(candidate));
                return XP_OK;
            }
        }
        at += length + (at[length] == ':');
    }
    return xp_fail(
        XP_NOT_FOUND,
        "%s is not on PATH: it comes with the NVIDIA driver (Debian and Ubuntu: package "
        "nvidia-compute-utils or nvidia-cuda-mps); several processes on one attention GPU "
        "need it",
        program);
}

char **mps_environment(const char *const *variables, uint32_t count)
{
    size_t have = 0, used = 0;
    while (environ[have])
        have++;
    char **list = calloc(have + count + 1, sizeof(*list));
    if (!list)
        return NULL;
    for (size_t i = 0; i < have; i++) {
        bool replaced = false;
        for (uint32_t v = 0; v < count && !replaced; v++)
            replaced = !strncmp(environ[i], variables[v], strcspn(variables[v], "=") + 1);
        if (!replaced)
            list[used++] = environ[i];
    }
    for (uint32_t v = 0; v < count; v++)
        list[used++] = (char *)variables[v];
    return list;
}

/* Input is a memfd, not a pipe: a program that dies first costs us no SIGPIPE. */
static int input_of(const char *text)
{
    int fd = memfd_create("xpool-mps-command", MFD_CLOEXEC);
    size_t bytes = strlen(text);
    if (fd >= 0 && (write(fd, text, bytes) != (ssize_t)bytes || lseek(fd, 0, SEEK_SET) != 0)) {
        close(fd);
        fd = -1;
    }
    return fd;
}

static xp_status_t output_read(int fd, uint64_t deadline_ns, char output[MPS_OUTPUT_MAX])
{
    size_t bytes = 0;
    for (;;) {
        uint64_t now_ns = xp_monotonic_ns();
        struct pollfd wait = {.fd = fd, .events = POLLIN};
        int left_ms = now_ns < deadline_ns ? (int)((deadline_ns - now_ns) / XP_NS_PER_MS) : 0;
        int ready = poll(&wait, 1, left_ms);
        if (ready < 0 && errno == EINTR)
            continue;
        if (ready <= 0)
            return XP_TIMEOUT;
        char rest[512];
        size_t room = MPS_OUTPUT_MAX - 1 - bytes;
        ssize_t count = read(fd, room ? output + bytes : rest, room ? room : sizeof(rest));
        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0)
            return XP_OK;
        if (room)
            bytes += (size_t)count;
        output[bytes] = 0;
    }
}

xp_status_t mps_program_run(const char *path, const char *const *environment, const char *text,
                            uint64_t limit_ns, char output_out[MPS_OUTPUT_MAX])
{
    uint64_t deadline_ns = xp_monotonic_ns() + limit_ns;
    int output[2] = {-1, -1}, input = input_of(text);
    pid_t pid;
    char *const arguments[] = {(char *)path, NULL};
    posix_spawn_file_actions_t actions;
    xp_status_t status = XP_OK;
    output_out[0] = 0;
    posix_spawn_file_actions_init(&actions);
    if (input < 0 || pipe2(output, O_CLOEXEC) != 0) {
        status = xp_fail_errno(XP_IO, "cannot prepare to run %s", path);
        goto done;
    }
    posix_spawn_file_actions_adddup2(&actions, input, 0);
    posix_spawn_file_actions_adddup2(&actions, output[1], 1);
    posix_spawn_file_actions_adddup2(&actions, output[1], 2);
    int error = xp_child_spawn(path, &actions, false, arguments, (char *const *)environment, &pid);
    if (error) {
        errno = error;
        status = xp_fail_errno(XP_IO, "cannot run %s", path);
        goto done;
    }
    close(output[1]);
    output[1] = -1;
    status = output_read(output[0], deadline_ns, output_out);
    int result = 0;
    if (xp_child_reap(pid, status == XP_OK ? deadline_ns : 0, &result) != XP_OK)
        status = XP_TIMEOUT;
    if (status != XP_OK)
        status =
            xp_fail(XP_TIMEOUT, "%s did not answer '%.*s' within %llu ms", path,
                    (int)strcspn(text, "\n"), text, (unsigned long long)(limit_ns / XP_NS_PER_MS));
    else if (!WIFEXITED(result) || WEXITSTATUS(result) != 0)
        status = xp_fail(XP_IO, "%s failed at '%.*s': %.*s", path, (int)strcspn(text, "\n"), text,
                         (int)strcspn(output_out, "\n"), output_out);
done:
    posix_spawn_file_actions_destroy(&actions);
    if (input >= 0)
        close(input);
    if (output[0] >= 0)
        close(output[0]);
    if (output[1] >= 0)
        close(output[1]);
    return status;
}
