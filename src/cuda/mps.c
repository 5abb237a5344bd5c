/* SPDX-License-Identifier: MIT */
/*
 * The daemon's MPS controller. Owns its folder under a lock, the pidfd, and the record by which the
 * next daemon knows the controller again. Runs on the daemon's thread; every command has a limit.
 */
#include "cuda/mps.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/process.h"
#include "cuda/mps_private.h"

#define MPS_NAP_NS     (10 * XP_NS_PER_MS)
#define MPS_END_NS     (2 * XP_NS_PER_S)
#define MPS_LOCK_TRIES 8
#define MPS_ENDED_MAX  64

struct mps {
    char root[PATH_MAX], folder[PATH_MAX], pipe[PATH_MAX], log[PATH_MAX];
    char program[PATH_MAX], proc[PATH_MAX];
    char pipe_variable[PATH_MAX + 32], log_variable[PATH_MAX + 32], devices_variable[320];
    char **environment;
    uint64_t start_limit_ns, command_limit_ns, stop_limit_ns;
    int lock_fd, pidfd;
    mps_process_t controller; /* pid 0: none */
    bool child, adopted;
};

static xp_status_t format_path(char out[PATH_MAX], const char *folder, const char *name)
{
    int length = snprintf(out, PATH_MAX, "%s/%s", folder, name);
    if (length < 0 || length >= PATH_MAX)
        return xp_fail(XP_INVALID, "path too long: %s/%s", folder, name);
    return XP_OK;
}

static void root_path(const char *root, char out[PATH_MAX])
{
    if (root)
        snprintf(out, PATH_MAX, "%s", root);
    else
        snprintf(out, PATH_MAX, "/tmp/xpool-mps-%u", (unsigned)getuid());
}

/* /tmp is everybody's: a folder there is ours only if nobody else could have put anything in it. */
static xp_status_t folder_make(const char *path)
{
    struct stat info;
    if (mkdir(path, 0700) != 0 && errno != EEXIST)
        return xp_fail_errno(XP_IO, "cannot make the folder %s", path);
    if (lstat(path, &info) != 0)
        return xp_fail_errno(XP_IO, "cannot inspect %s", path);
    if (!S_ISDIR(info.st_mode))
        return xp_fail(XP_INVALID, "%s is no folder; remove it", path);
    if (info.st_uid != getuid())
        return xp_fail(XP_INVALID, "%s belongs to user %u, not to %u; remove it", path,
                       (unsigned)info.st_uid, (unsigned)getuid());
    if (info.st_mode & 077)
        return xp_fail(XP_INVALID, "%s is open to others (mode %03o); chmod 700 or remove it", path,
                       (unsigned)(info.st_mode & 0777));
    return XP_OK;
}

/* The lock of `folder`. A lock file that its last holder removed is no lock: look again. */
static xp_status_t folder_lock(const char *folder, int *fd_out)
{
    char path[PATH_MAX];
    XP_TRY(format_path(path, folder, "lock"));
    for (int i = 0; i < MPS_LOCK_TRIES; i++) {
        struct stat held, named;
        int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
        if (fd < 0)
            return xp_fail_errno(XP_IO, "cannot open %s", path);
        if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
            close(fd);
            return xp_fail(XP_INVALID, "another daemon of this user holds %s", path);
        }
        if (fstat(fd, &held) == 0 && stat(path, &named) == 0 && held.st_ino == named.st_ino) {
            *fd_out = fd;
            return XP_OK;
        }
        close(fd);
    }
    return xp_fail(XP_RETRY, "%s changes hands all the time", path);
}

static int remove_one(const char *path, const struct stat *info, int kind, struct FTW *where)
{
    (void)info, (void)kind, (void)where;
    return remove(path);
}

static void folder_remove(const char *path)
{
    /* Depth first, and links are removed, not followed. */
    nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS | FTW_MOUNT);
}

/* ---- other processes ----------------------------------------------------------------------- */
typedef struct found {
    const char *pipe;    /* processes of this pipe folder */
    const char *devices; /* or controllers elsewhere, of one of these devices */
    const char *root;    /* ... but not below here */
    mps_process_t list[MPS_ENDED_MAX];
    uint32_t count;
} found_t;

static bool visit_ours(void *context, const mps_process_t *one)
{
    found_t *found = context;
    if (!strcmp(one->pipe_folder, found->pipe) && found->count < MPS_ENDED_MAX)
        found->list[found->count++] = *one;
    return true;
}

static bool visit_foreign(void *context, const mps_process_t *one)
{
    found_t *found = context;
    size_t length = strlen(found->root);
    if (!one->controller)
        return true;
    /* Ours, of another device or of this one. */
    if (!strncmp(one->pipe_folder, found->root, length) && one->pipe_folder[length] == '/')
        return true;
    if (one->devices_named && !mps_devices_overlap(one->devices, found->devices))
        return true;
    found->list[found->count++] = *one;
    return false;
}

static xp_status_t refuse_foreign(const mps_t *mps, const char *devices)
{
    found_t *found = calloc(1, sizeof(*found));
    if (!found)
        return xp_fail(XP_NO_MEMORY, "no memory to look for MPS controllers");
    found->root = mps->root;
    found->devices = devices;
    xp_status_t status = mps_processes(mps->proc, visit_foreign, found);
    if (status == XP_OK && found->count) {
        const mps_process_t *one = &found->list[0];
        status = xp_fail(
            XP_INVALID,
            "an MPS controller that is not CrossPool's holds a device that is wanted (%s): pid %d, "
            "pipe folder %s, devices %s; end it (echo quit | CUDA_MPS_PIPE_DIRECTORY=... %s) or "
            "configure other devices",
            devices, one->pid,
            !one->environment_known ? "unknown (another user's)"
            : one->pipe_folder[0]   ? one->pipe_folder
                                    : "/tmp/nvidia-mps",
            one->devices_named ? one->devices : "all", MPS_CONTROL_PROGRAM);
    }
    free(found);
    return status;
}

/* Ends every controller and server whose pipe folder is `pipe`, but for pid `keep`. */
static xp_status_t end_processes(const char *proc, const char *pipe, pid_t keep,
                                 uint32_t *ended_out)
{
    found_t *found = calloc(1, sizeof(*found));
    if (!found)
        return xp_fail(XP_NO_MEMORY, "no memory to look for MPS processes");
    found->pipe = pipe;
    xp_status_t status = mps_processes(proc, visit_ours, found);
    uint32_t ended = 0;
    for (uint32_t i = 0; status == XP_OK && i < found->count; i++)
        if (found->list[i].pid != keep) {
            status = mps_process_end(proc, &found->list[i], MPS_END_NS);
            ended++;
        }
    free(found);
    if (status == XP_OK && ended_out)
        *ended_out += ended;
    return status;
}

/* ---- the record ------------------------------------------------------------------------------ */
static xp_status_t record_write(const mps_t *mps)
{
    char path[PATH_MAX], next[PATH_MAX];
    XP_TRY(format_path(path, mps->folder, "record"));
    XP_TRY(format_path(next, mps->folder, "record.new"));
    FILE *file = fopen(next, "we");
    if (!file)
        return xp_fail_errno(XP_IO, "cannot write %s", next);
    fprintf(file, "%d %llu\n", mps->controller.pid, (unsigned long long)mps->controller.start_time);
    if (fclose(file) != 0 || rename(next, path) != 0)
        return xp_fail_errno(XP_IO, "cannot write %s", path);
    return XP_OK;
}

/* The recorded controller, when it still lives. */
static bool record_read(const mps_t *mps, mps_process_t *process_out)
{
    char path[PATH_MAX];
    int pid;
    unsigned long long start_time;
    mps_process_t process;
    if (format_path(path, mps->folder, "record") != XP_OK)
        return false;
    FILE *file = fopen(path, "re");
    if (!file)
        return false;
    bool read = fscanf(file, "%d %llu", &pid, &start_time) == 2;
    fclose(file);
    if (!read || mps_process_read(mps->proc, pid, &process) != XP_OK || !process.controller ||
        process.start_time != start_time || strcmp(process.pipe_folder, mps->pipe) != 0)
        return false;
    *process_out = process;
    return true;
}

/* ---- commands -------------------------------------------------------------------------------- */
static xp_status_t command(const mps_t *mps, uint64_t limit_ns, char output[MPS_OUTPUT_MAX],
                           const char *format, ...) __attribute__((format(printf, 4, 5)));
static xp_status_t command(const mps_t *mps, uint64_t limit_ns, char output[MPS_OUTPUT_MAX],
                           const char *format, ...)
{
    char text[128];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(text, sizeof(text) - 1, format, arguments);
    va_end(arguments);
    XP_ASSERT(length > 0 && (size_t)length < sizeof(text) - 1);
    strcpy(text + length, "\n");
    return mps_program_run(mps->program, (const char *const *)mps->environment, text, limit_ns,
                           output);
}

/* Numbers at the starts of lines. */
static uint32_t parse_pids(const char *text, pid_t *pids, uint32_t limit)
{
    uint32_t count = 0;
    for (const char *at = text; *at && count < limit;) {
        char *end;
        long value = strtol(at, &end, 10);
        if (end != at && value > 0 && value <= INT_MAX)
            pids[count++] = (pid_t)value;
        at += strcspn(at, "\n");
        at += *at == '\n';
    }
    return count;
}

static bool controller_gone(const mps_t *mps)
{
    struct pollfd wait = {.fd = mps->pidfd, .events = POLLIN};
    return mps->pidfd < 0 || poll(&wait, 1, 0) > 0;
}

/* The last line of the controller's own words. */
static void log_tail(const mps_t *mps, char out[256])
{
    char path[PATH_MAX], text[1024] = "";
    snprintf(out, 256, "nothing in its log");
    if (format_path(path, mps->log, "controller.log") != XP_OK)
        return;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    off_t size = lseek(fd, 0, SEEK_END);
    lseek(fd, size > 1000 ? size - 1000 : 0, SEEK_SET);
    ssize_t count = read(fd, text, sizeof(text) - 1);
    close(fd);
    while (count > 0 && (text[count - 1] == '\n' || text[count - 1] == ' '))
        text[--count] = 0;
    if (count > 0) {
        char *line = strrchr(text, '\n');
        snprintf(out, 256, "%.255s", line ? line + 1 : text);
    }
}

/* ---- life -------------------------------------------------------------------------------------
 */
static xp_status_t hold_controller(mps_t *mps, const mps_process_t *process)
{
    int fd = (int)syscall(SYS_pidfd_open, process->pid, 0);
    if (fd < 0)
        return xp_fail_errno(XP_IO, "cannot hold the MPS controller, pid %d", process->pid);
    mps->pidfd = fd;
    mps->controller = *process;
    return XP_OK;
}

static xp_status_t await_ready(mps_t *mps)
{
    uint64_t deadline_ns = xp_monotonic_ns() + mps->start_limit_ns;
    char output[MPS_OUTPUT_MAX], tail[256];
    for (;;) {
        if (controller_gone(mps)) {
            log_tail(mps, tail);
            return xp_fail(XP_IO, "the MPS controller ended at once: %s", tail);
        }
        xp_status_t status = command(mps, mps->command_limit_ns, output, "get_server_list");
        if (status == XP_OK)
            return XP_OK;
        if (xp_monotonic_ns() >= deadline_ns) {
            log_tail(mps, tail);
            return xp_fail(XP_TIMEOUT,
                           "the MPS controller (pid %d) does not answer after %llu ms: %s",
                           mps->controller.pid,
                           (unsigned long long)(mps->start_limit_ns / XP_NS_PER_MS), tail);
        }
        struct timespec nap = {.tv_nsec = MPS_NAP_NS};
        nanosleep(&nap, NULL);
    }
}

static xp_status_t launch_controller(mps_t *mps)
{
    char path[PATH_MAX];
    XP_TRY(format_path(path, mps->log, "controller.log"));
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions, 1, path, O_WRONLY | O_CREAT | O_APPEND, 0600);
    posix_spawn_file_actions_adddup2(&actions, 1, 2);
    char *const arguments[] = {mps->program, "-f", NULL};
    pid_t pid;
    int error = xp_child_spawn(mps->program, &actions, true, arguments, mps->environment, &pid);
    posix_spawn_file_actions_destroy(&actions);
    if (error) {
        errno = error;
        return xp_fail_errno(XP_IO, "cannot run %s", mps->program);
    }
    mps->child = true;
    /* Not reaped before mps_check or mps_stop, so the pid cannot be another's. */
    mps_process_t process = {.pid = pid, .controller = true};
    XP_TRY(hold_controller(mps, &process));
    XP_TRY(await_ready(mps));
    mps_process_t read;
    if (mps_process_read(mps->proc, pid, &read) == XP_OK)
        mps->controller.start_time = read.start_time;
    return record_write(mps);
}

static xp_status_t prepare(mps_t *mps, const mps_options_t *options)
{
    if (!options->name || !options->name[0] || strlen(options->name) >= MPS_NAME_MAX ||
        strchr(options->name, '/') || options->name[0] == '.')
        return xp_fail(XP_INVALID, "'%s' is no name for an MPS folder",
                       options->name ? options->name : "");
    if (!options->devices || !options->devices[0] || strlen(options->devices) >= MPS_DEVICES_MAX)
        return xp_fail(XP_INVALID, "an MPS controller needs its device");
    root_path(options->root, mps->root);
    snprintf(mps->proc, sizeof(mps->proc), "%s", options->proc ? options->proc : "/proc");
    XP_TRY(format_path(mps->folder, mps->root, options->name));
    XP_TRY(format_path(mps->pipe, mps->folder, "pipe"));
    XP_TRY(format_path(mps->log, mps->folder, "log"));
    if (strlen(mps->pipe) > MPS_PATH_MAX)
        return xp_fail(XP_INVALID, "the path %s is too long for the sockets of MPS (%zu, limit %d)",
                       mps->pipe, strlen(mps->pipe), MPS_PATH_MAX);
    XP_TRY(
        mps_program_find(options->program ? options->program : MPS_CONTROL_PROGRAM, mps->program));
    mps->start_limit_ns = options->start_limit_ns ? options->start_limit_ns : 10 * XP_NS_PER_S;
    mps->command_limit_ns = options->command_limit_ns ? options->command_limit_ns : 5 * XP_NS_PER_S;
    mps->stop_limit_ns = options->stop_limit_ns ? options->stop_limit_ns : 10 * XP_NS_PER_S;
    snprintf(mps->pipe_variable, sizeof(mps->pipe_variable), "CUDA_MPS_PIPE_DIRECTORY=%s",
             mps->pipe);
    snprintf(mps->log_variable, sizeof(mps->log_variable), "CUDA_MPS_LOG_DIRECTORY=%s", mps->log);
    snprintf(mps->devices_variable, sizeof(mps->devices_variable), "CUDA_VISIBLE_DEVICES=%s",
             options->devices);
    const char *variables[] = {mps->pipe_variable, mps->log_variable, mps->devices_variable};
    mps->environment = mps_environment(variables, 3);
    if (!mps->environment)
        return xp_fail(XP_NO_MEMORY, "no memory for the environment of %s", mps->program);
    XP_TRY(folder_make(mps->root));
    XP_TRY(folder_make(mps->folder));
    return folder_lock(mps->folder, &mps->lock_fd);
}

xp_status_t mps_start(const mps_options_t *options, mps_t **mps_out)
{
    mps_t *mps = calloc(1, sizeof(*mps));
    if (!mps)
        return xp_fail(XP_NO_MEMORY, "no memory for an MPS controller");
    mps->lock_fd = mps->pidfd = -1;
    xp_status_t status;
    mps_process_t recorded;
    XP_TRY_GOTO(status, fail, prepare(mps, options));
    XP_TRY_GOTO(status, fail, refuse_foreign(mps, options->devices));
    if (record_read(mps, &recorded)) {
        XP_TRY_GOTO(status, fail, hold_controller(mps, &recorded));
        mps->adopted = true;
        if (mps_check(mps) == XP_OK) {
            *mps_out = mps;
            return XP_OK;
        }
        close(mps->pidfd);
        mps->pidfd = -1;
        mps->controller = (mps_process_t){0};
        mps->adopted = false;
    }
    /* What is left in our folder is of a controller that is dead, silent or was never recorded. */
    XP_TRY_GOTO(status, fail, end_processes(mps->proc, mps->pipe, 0, NULL));
    folder_remove(mps->pipe);
    XP_TRY_GOTO(status, fail, folder_make(mps->pipe));
    XP_TRY_GOTO(status, fail, folder_make(mps->log));
    status = launch_controller(mps);
    if (status == XP_OK) {
        *mps_out = mps;
        return XP_OK;
    }
    xp_error_t error = *xp_error_last();
    (void)mps_stop(mps);
    status = xp_fail(status, "%s", error.text);
fail:
    mps_destroy(mps);
    return status;
}

xp_status_t mps_check(mps_t *mps)
{
    char output[MPS_OUTPUT_MAX];
    if (controller_gone(mps))
        return xp_fail(XP_PEER, "the MPS controller (pid %d) is gone", mps->controller.pid);
    xp_status_t status = command(mps, mps->command_limit_ns, output, "get_server_list");
    return status == XP_OK
               ? XP_OK
               : xp_fail_context(XP_PEER, "the MPS controller (pid %d)", mps->controller.pid);
}

xp_status_t mps_server(mps_t *mps, pid_t *server_out)
{
    char output[MPS_OUTPUT_MAX];
    pid_t pids[1] = {0};
    XP_TRY(command(mps, mps->command_limit_ns, output, "get_server_list"));
    parse_pids(output, pids, 1);
    *server_out = pids[0];
    return XP_OK;
}

xp_status_t mps_clients(mps_t *mps, pid_t *pids, uint32_t limit, uint32_t *count_out)
{
    char output[MPS_OUTPUT_MAX];
    pid_t server;
    uint32_t count = 0;
    XP_TRY(mps_server(mps, &server));
    if (server) {
        XP_TRY(command(mps, mps->command_limit_ns, output, "get_client_list %d", server));
        count = parse_pids(output, pids, limit);
    }
    *count_out = count;
    return XP_OK;
}

xp_status_t mps_terminate_client(mps_t *mps, pid_t client)
{
    char output[MPS_OUTPUT_MAX];
    pid_t server, pids[MPS_CLIENTS_MAX];
    uint32_t count, i = 0;
    XP_TRY(mps_server(mps, &server));
    XP_TRY(mps_clients(mps, pids, MPS_CLIENTS_MAX, &count));
    while (i < count && pids[i] != client)
        i++;
    if (!server || i == count)
        return xp_fail(XP_NOT_FOUND, "pid %d is no client of the MPS server", client);
    return command(mps, mps->command_limit_ns, output, "terminate_client %d %d", server, client);
}

xp_status_t mps_stop(mps_t *mps)
{
    char output[MPS_OUTPUT_MAX];
    xp_status_t status = XP_OK;
    uint64_t deadline_ns = xp_monotonic_ns() + mps->stop_limit_ns;
    if (mps->controller.pid && !controller_gone(mps)) {
        pid_t server = 0;
        uint64_t limit_ns = mps->command_limit_ns;
        /* "quit" alone waits for clients. */
        if (mps_server(mps, &server) == XP_OK && server)
            (void)command(mps, limit_ns, output, "shutdown_server %d -f", server);
        (void)command(mps, limit_ns, output, "quit");
        uint64_t now_ns = xp_monotonic_ns();
        struct pollfd wait = {.fd = mps->pidfd, .events = POLLIN};
        int left_ms = now_ns < deadline_ns ? (int)((deadline_ns - now_ns) / XP_NS_PER_MS) : 0;
        if (poll(&wait, 1, left_ms) <= 0)
            status = xp_fail(XP_TIMEOUT, "the MPS controller (pid %d) did not end; it was killed",
                             mps->controller.pid);
    }
    xp_error_t error = *xp_error_last();
    xp_status_t ended = end_processes(mps->proc, mps->pipe, 0, NULL);
    if (mps->child)
        waitpid(mps->controller.pid, NULL, controller_gone(mps) ? 0 : WNOHANG);
    mps->child = false;
    mps->controller = (mps_process_t){0};
    if (mps->pidfd >= 0)
        close(mps->pidfd);
    mps->pidfd = -1;
    if (ended != XP_OK)
        return ended;
    if (mps->lock_fd >= 0) {
        folder_remove(mps->folder);
        rmdir(mps->root); /* the last one; otherwise it is not empty */
    }
    return status == XP_OK ? XP_OK : xp_fail(status, "%s", error.text);
}

void mps_destroy(mps_t *mps)
{
    if (!mps)
        return;
    if (mps->pidfd >= 0)
        close(mps->pidfd);
    if (mps->lock_fd >= 0)
        close(mps->lock_fd);
    free(mps->environment);
    free(mps);
}

xp_status_t mps_folders(const char *root, const char *name, char pipe_out[PATH_MAX],
                        char log_out[PATH_MAX])
{
    char path[PATH_MAX], folder[PATH_MAX];
    root_path(root, path);
    XP_TRY(format_path(folder, path, name));
    XP_TRY(format_path(pipe_out, folder, "pipe"));
    return format_path(log_out, folder, "log");
}

pid_t mps_pid(const mps_t *mps)
{
    return mps->controller.pid;
}

int mps_pidfd(const mps_t *mps)
{
    return mps->pidfd;
}

bool mps_adopted(const mps_t *mps)
{
    return mps->adopted;
}

const char *mps_pipe_folder(const mps_t *mps)
{
    return mps->pipe;
}

const char *mps_log_folder(const mps_t *mps)
{
    return mps->log;
}

xp_status_t mps_sweep(const char *root, const char *proc, uint32_t *ended_out)
{
    char path[PATH_MAX], folder[PATH_MAX], pipe[PATH_MAX];
    uint32_t ended = 0;
    root_path(root, path);
    DIR *list = opendir(path);
    if (!list && errno == ENOENT) {
        *ended_out = 0;
        return XP_OK;
    }
    if (!list)
        return xp_fail_errno(XP_IO, "cannot read %s", path);
    xp_status_t status = folder_make(path); /* refuses one that is not ours */
    struct dirent *entry;
    while (status == XP_OK && (entry = readdir(list))) {
        int lock_fd;
        if (entry->d_name[0] == '.')
            continue;
        XP_TRY_GOTO(status, done, format_path(folder, path, entry->d_name));
        XP_TRY_GOTO(status, done, format_path(pipe, folder, "pipe"));
        struct stat info;
        if (lstat(folder, &info) != 0 || !S_ISDIR(info.st_mode))
            continue;
        if (folder_lock(folder, &lock_fd) != XP_OK)
            continue; /* a daemon lives there */
        status = end_processes(proc ? proc : "/proc", pipe, 0, &ended);
        if (status == XP_OK)
            folder_remove(folder);
        close(lock_fd);
    }
done:
    closedir(list);
    if (status == XP_OK) {
        rmdir(path);
        *ended_out = ended;
    }
    return status;
}
