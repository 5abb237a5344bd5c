/* SPDX-License-Identifier: MIT */
/*
 * The GPUs of a configuration, for processes that touch none themselves: which of them a process
 * sees and under which numbers, where the MPS controller lives, how much memory each has.
 *
 * `cuda:N` is the N-th device of those that the system's own environment shows
 * (CUDA_VISIBLE_DEVICES), in the order of their PCI addresses. All clients of the MPS controller
 * see the configuration's devices only, attention devices first: the order of gpus_list().
 */
#ifndef XPOOL_CONTROL_GPUS_H
#define XPOOL_CONTROL_GPUS_H

#include <limits.h>

#include "config/config.h"
#include "stage/heap.h"

#define GPUS_MAX        (2 * CONFIG_MAX_DEVICES)
#define GPUS_TEXT_BYTES 2048
/* "0=150754820096,1=...": memory of cuda:N, handed to child processes so that one asks for all. */
#define GPUS_MEMORY_VARIABLE "XPOOL_CUDA_MEMORY"
/* Another root of the MPS controller's folder; for tests. */
#define GPUS_MPS_ROOT_VARIABLE "XPOOL_TEST_MPS_ROOT"

/* The distinct GPUs of the configuration, attention devices first; how many. */
uint32_t gpus_list(const config_t *config, const config_device_t *list_out[GPUS_MAX]);
bool gpus_used(const config_t *config, bool ffn_role); /* any in that role */
/* Whether the device holds both roles. */
bool gpus_shared(const config_t *config, const config_device_t *device);

/* CUDA_VISIBLE_DEVICES of the MPS controller: the devices as the system's environment names them.
 */
xp_status_t gpus_controller_list(const config_t *config, char out[GPUS_TEXT_BYTES]);
/* Of a client of the controller: `first` in this order, then the others. */
xp_status_t gpus_client_list(const config_t *config, const config_device_t *const *first,
                             uint32_t count, char out[GPUS_TEXT_BYTES]);

/* Where NVSHMEM and the plug-in are: fabric.nvshmem_root, else beside the models' interpreters,
 * else in the system's Python. XP_UNSUPPORTED says what is missing. */
xp_status_t gpus_nvshmem(const config_t *config, stage_heap_place_t *place_out);

/* The controller's name, and where its clients find it. */
xp_status_t gpus_mps_folders(const config_t *config, char name_out[64], char pipe_out[PATH_MAX],
                             char log_out[PATH_MAX]);

/* Memory of the device: devices."cuda:N".memory, else what the environment hands on, else what
 * `xpool devices --json` says, as a child process of this program. XP_UNSUPPORTED: no such GPU
 * here, with the reason and what to set instead, or, where it was asked, one that cannot have the
 * role of an FFN device that it is given. */
xp_status_t gpus_memory(const config_t *config, const config_device_t *device, uint64_t *bytes_out);
/* Writes what is known of all devices into the environment, for children. */
xp_status_t gpus_memory_hand_on(const config_t *config);
/* Parses the output of `xpool devices --json`; XP_NOT_FOUND, with the reason, when it
 * has no cuda:index, XP_UNSUPPORTED when that is no FFN device and is to be one. */
xp_status_t gpus_memory_parse(const char *json, uint32_t index, bool ffn_role, uint64_t *bytes_out);
/* This program can be asked: it is `xpool` itself (called by the command line program, not by the
 * library inside somebody else's process). `limit_ns`: how long it may take; 0: 30 s. */
void gpus_ask_own_program(uint64_t limit_ns);
#endif
