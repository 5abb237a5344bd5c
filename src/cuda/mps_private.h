/* SPDX-License-Identifier: MIT */
/* Private to src/cuda: other processes as /proc shows them, and running a program with a limit. */
#ifndef XPOOL_CUDA_MPS_PRIVATE_H
#define XPOOL_CUDA_MPS_PRIVATE_H

#include "cuda/mps.h"

#define MPS_OUTPUT_MAX  16384
#define MPS_DEVICES_MAX 256

/* A controller or server of MPS. */
typedef struct mps_process {
    pid_t pid;
    uint64_t start_time; /* clock ticks since boot: with the pid, an identity */
    bool controller, server;
    bool environment_known;     /* false: another user's */
    char pipe_folder[PATH_MAX]; /* "" = NVIDIA's default */
    char devices[MPS_DEVICES_MAX];
    bool devices_named; /* false: all of them */
} mps_process_t;

/* Reads one process. XP_NOT_FOUND when it is gone or no program of MPS. */
xp_status_t mps_process_read(const char *proc, pid_t pid, mps_process_t *process_out);
/* Calls `visit` for every controller and server, until it returns false. */
xp_status_t mps_processes(const char *proc, bool (*visit)(void *context, const mps_process_t *one),
                          void *context);
/* SIGKILLs this process, and no other that got its pid meanwhile; returns when it is gone. */
xp_status_t mps_process_end(const char *proc, const mps_process_t *process, uint64_t limit_ns);
/* Could two lists of devices (CUDA_VISIBLE_DEVICES) name the same one? An ordinal and a UUID could.
 */
bool mps_devices_overlap(const char *a, const char *b);

/* Absolute path of `program`: itself when it has a slash, else by PATH. */
xp_status_t mps_program_find(const char *program, char path_out[PATH_MAX]);
/* Runs `path` with `text` as its input; what it prints (cut at MPS_OUTPUT_MAX) ends in output_out.
 * XP_TIMEOUT after limit_ns, and then it is killed; XP_IO when it fails. */
xp_status_t mps_program_run(const char *path, const char *const *environment, const char *text,
                            uint64_t limit_ns, char output_out[MPS_OUTPUT_MAX]);
/* This process's environment with `count` variables ("NAME=value") in place of its own; free() the
 * array. NULL: no memory. */
char **mps_environment(const char *const *variables, uint32_t count);
#endif
