/* SPDX-License-Identifier: MIT */
/* What the files of libxpool share. */
#ifndef XPOOL_LIBRARY_PRIVATE_H
#define XPOOL_LIBRARY_PRIVATE_H

#include <pthread.h>
#include <stdbool.h>
#include <string.h>
#include <sys/types.h>

#include "base/status.h"
#include "config/config.h"
#include "control/planner.h"
#include "cuda/device.h"
#include "xpool/xpool.h"

/* Immutable but for what is worked out on first use, under the lock. */
struct xpool_config {
    pid_t pid;
    config_t *config;
    pthread_mutex_t lock;
    plan_result_t *planned;                 /* NULL until asked for */
    model_spec_t *specs[CONFIG_MAX_MODELS]; /* the same */
};

/* XP_OK in the process that opened the object, XP_INVALID in a forked child of it. */
xp_status_t library_check_process(pid_t opened_by);
/* The interface's status for ours. */
xpool_status_t library_status(xp_status_t status);

/* A struct that the caller may have from an older or a newer header: `bytes` of it are valid. Too
 * small a struct is XP_INVALID. */
xp_status_t library_take_struct(const void *from, uint32_t bytes, uint32_t least, const char *name,
                                void *to, size_t size);
/* Copies as much of `from` as the caller's struct has, keeping its struct_bytes. */
void library_give_struct(const void *from, size_t size, void *to, uint32_t bytes);

/* The rank's place in the KV control channel; descriptors stay the rank's. */
typedef struct library_kv_place {
    int channel_fd, daemon_bell, bell;
    uint32_t partition;
    char name[96];                         /* of the memory */
    uint64_t (*room_bytes)(void *context); /* as in kv_backing_options_t */
    const cuda_device_t *device;           /* the rank's GPU, lives as long; NULL on a CPU */
} library_kv_place_t;
/* XP_UNSUPPORTED: the daemon gave it none. */
xp_status_t library_rank_kv_place(const xpool_rank_t *rank, library_kv_place_t *place_out);
/* What xpool_kv_open() does when the place is known. */
xp_status_t library_kv_open(const library_kv_place_t *place, uint64_t token_bytes,
                            xpool_kv_t **kv_out);

/* Size of a struct up to and with `member`: what the first release had. */
#define LIBRARY_BYTES_TO(type, member)                                                             \
    ((uint32_t)(offsetof(type, member) + sizeof(((type *)0)->member)))
#endif
