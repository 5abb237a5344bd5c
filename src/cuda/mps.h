/* SPDX-License-Identifier: MIT */
/*
 * A private MPS controller for the GPUs of one system, owned by the daemon. Host only: needs no
 * driver.
 *
 * Everything lies under <root>/<name>/ (root: /tmp/xpool-mps-<uid>, 0700, ours): pipe/ and log/ for
 * NVIDIA's programs, and a record of the controller's pid and start time, by which a later daemon
 * takes over a controller that lives, or clears what a killed one left. The controller runs in a
 * session of its own, so that it outlives a daemon that is killed while the data plane serves.
 *
 * A controller that is not ours, on a device that we want, is refused by name: pid, pipe folder,
 * devices. One thread uses an mps_t.
 */
#ifndef XPOOL_CUDA_MPS_H
#define XPOOL_CUDA_MPS_H

#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/status.h"

#define MPS_CONTROL_PROGRAM "nvidia-cuda-mps-control"
#define MPS_SERVER_PROGRAM  "nvidia-cuda-mps-server"
#define MPS_CLIENTS_MAX     64
#define MPS_NAME_MAX        32
#define MPS_PATH_MAX        96 /* a socket's path has 107 characters; its name needs some */

typedef struct mps_options {
    const char *root;    /* NULL: /tmp/xpool-mps-<uid> */
    const char *name;    /* e.g. "cuda-0"; the folder's name */
    const char *devices; /* CUDA_VISIBLE_DEVICES of the controller: ordinals or UUIDs */
    const char *program; /* NULL: nvidia-cuda-mps-control on PATH */
    const char *proc;    /* NULL: /proc; for tests */
    uint64_t start_limit_ns, command_limit_ns, stop_limit_ns; /* 0: 10 s, 5 s, 10 s */
} mps_options_t;

typedef struct mps mps_t;

/* Starts the controller, or takes over the one that an earlier daemon of ours left running. Returns
 * when it answers commands. XP_NOT_FOUND: no such program; XP_INVALID: a root, name or device that
 * cannot be used, or a foreign controller; XP_IO, XP_TIMEOUT: it did not start, with the end of its
 * log. */
xp_status_t mps_start(const mps_options_t *options, mps_t **mps_out);
/* Lives and answers? XP_PEER when it is gone or silent. */
xp_status_t mps_check(mps_t *mps);
/* Ends server and controller and clears the folder. XP_TIMEOUT when something had to be killed;
 * then it is gone too. `mps` stays valid for mps_destroy(). */
xp_status_t mps_stop(mps_t *mps);
/* Frees; a controller that was not stopped goes on. Accepts NULL. */
void mps_destroy(mps_t *mps);

/* Where the clients of the controller `name` below `root` (NULL as above) find it:
 * CUDA_MPS_PIPE_DIRECTORY and CUDA_MPS_LOG_DIRECTORY. Looks at nothing. */
xp_status_t mps_folders(const char *root, const char *name, char pipe_out[PATH_MAX],
                        char log_out[PATH_MAX]);

pid_t mps_pid(const mps_t *mps);
int mps_pidfd(const mps_t *mps); /* borrowed; readable when the controller has died */
bool mps_adopted(const mps_t *mps);
const char *mps_pipe_folder(const mps_t *mps); /* CUDA_MPS_PIPE_DIRECTORY of clients */
const char *mps_log_folder(const mps_t *mps);  /* CUDA_MPS_LOG_DIRECTORY of clients */

/* Pid of our server, 0 while there is none (it starts with the first client). */
xp_status_t mps_server(mps_t *mps, pid_t *server_out);
xp_status_t mps_clients(mps_t *mps, pid_t *pids, uint32_t limit, uint32_t *count_out);
/* Ends a client's work on the device without harm to the others, before the process is ended.
 * XP_NOT_FOUND when the server does not know it. */
xp_status_t mps_terminate_client(mps_t *mps, pid_t client);

/* Kills what a killed system left under `root` (NULL as above): controllers and servers whose pipe
 * folder lies there, and removes their folders. Never touches anything else. For use while no
 * daemon of this user runs. */
xp_status_t mps_sweep(const char *root, const char *proc, uint32_t *ended_out);
#endif
