/* SPDX-License-Identifier: MIT */
/* The environment of `xpool exec` and of `xpool serve` for SGLang. One thread, before an exec. */
#include "agents/environment.h"

#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "config/handoff.h"
#include "control/gpus.h"
#include "control/participant.h"
#include "control/planner.h"

#define ENVIRONMENT_MAX_BYTES (512u * 1024)
#define PLUGIN_NAME           "xpool"

static xp_status_t set_variable(const char *name, const char *value, bool replace)
{
    if (setenv(name, value, replace) != 0)
        return xp_fail_errno(XP_NO_MEMORY, "cannot set %s", name);
    return XP_OK;
}

static bool list_has(const char *list, char separator, const char *item)
{
    size_t length = strlen(item);
    for (const char *at = list; at; at = strchr(at, separator)) {
        at += *at == separator;
        at += strspn(at, " ");
        const char *end = at + length;
        if (strncmp(at, item, length) == 0) {
            end += strspn(end, " ");
            if (*end == separator || !*end)
                return true;
        }
    }
    return false;
}

/* Adds `item` to a list-valued variable, in front or behind; what is there stays. */
static xp_status_t add_to_list(const char *name, char separator, const char *item, bool front)
{
    const char *old = getenv(name);
    if (!old || !old[0])
        return set_variable(name, item, true);
    if (list_has(old, separator, item))
        return XP_OK;
    xp_buf_t text;
    xp_buf_init(&text, ENVIRONMENT_MAX_BYTES);
    xp_status_t status =
        xp_buf_printf(&text, "%s%c%s", front ? item : old, separator, front ? old : item);
    if (status == XP_OK)
        status = set_variable(name, text.data, true);
    xp_buf_fini(&text);
    return status;
}

/* A build, or a folder copied to another machine, has the Python package beside the program's own
 * folder; a wheel has it in site-packages. */
static xp_status_t add_package(void)
{
    char program[PATH_MAX], folder[PATH_MAX + 16], resolved[PATH_MAX];
    ssize_t length = readlink("/proc/self/exe", program, sizeof(program) - 1);
    if (length <= 0)
        return XP_OK;
    program[length] = '\0';
    char *slash = strrchr(program, '/');
    if (!slash)
        return XP_OK;
    *slash = '\0';
    snprintf(folder, sizeof(folder), "%s/../python", program);
    if (!realpath(folder, resolved))
        return XP_OK;
    snprintf(folder, sizeof(folder), "%.4000s/xpool", resolved);
    return access(folder, R_OK) == 0 ? add_to_list("PYTHONPATH", ':', resolved, true) : XP_OK;
}

static xp_status_t hand_on(const config_overrides_t *own)
{
    config_overrides_t merged;
    char *memory = NULL;
    xp_buf_t text;
    xp_buf_init(&text, ENVIRONMENT_MAX_BYTES);
    xp_status_t status =
        config_handoff_read(getenv(CONFIG_HANDOFF_VARIABLE), own, &memory, &merged);
    if (status == XP_OK && merged.count)
        status = config_handoff_write(&merged, &text);
    if (status == XP_OK && merged.count)
        status = set_variable(CONFIG_HANDOFF_VARIABLE, text.data, true);
    xp_buf_fini(&text);
    free(memory);
    return status;
}

/* "0,1|2,3": the processors of each rank, as SGLang wants them told where several ranks share a
 * machine: the device's own, or, where it is not pinned, the usable ones in turn. */
static xp_status_t bind_ranks(const config_t *config, const uint32_t *rank_atn, uint32_t ranks)
{
    cpu_set_t usable;
    if (sched_getaffinity(0, sizeof(usable), &usable) != 0)
        return xp_fail_errno(XP_IO, "cannot read the processors this process may use");
    uint32_t cpus[CPU_SETSIZE], count = 0, next = 0;
    for (uint32_t cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, &usable))
            cpus[count++] = cpu;
    xp_buf_t text;
    xp_buf_init(&text, ENVIRONMENT_MAX_BYTES);
    xp_status_t status = XP_OK;
    for (uint32_t r = 0; r < ranks && status == XP_OK; r++) {
        const config_device_t *device = &config->atn[rank_atn[r]];
        uint32_t own = device->cpu_count ? device->cpu_count : device->threads;
        if (!device->cpu_count && own > count)
            own = count;
        for (uint32_t i = 0; i < own && status == XP_OK; i++)
            status = xp_buf_printf(&text, "%s%u",
                                   i   ? ","
                                   : r ? "|"
                                       : "",
                                   device->cpu_count ? device->cpus[i] : cpus[next++ % count]);
    }
    if (status == XP_OK && text.data)
        status = set_variable("SGLANG_CPU_OMP_THREADS_BIND", text.data, false);
    xp_buf_fini(&text);
    return status;
}

/* Before it ends after a crash, SGLang would hold its memory for 65 s to dump its state. */
static xp_status_t set_no_dumps(void)
{
    XP_TRY(set_variable("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "0", false));
    return set_variable("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "0", false);
}

static xp_status_t prepare_cpu(const config_t *config, const uint32_t *rank_atn, uint32_t ranks)
{
    char threads[16];
    snprintf(threads, sizeof(threads), "%u", config->atn[rank_atn[0]].threads);
    XP_TRY(set_variable("SGLANG_USE_CPU_ENGINE", "1", false));
    /* Otherwise the first request of some models waits for a compiler. */
    XP_TRY(set_variable("TORCHDYNAMO_DISABLE", "1", false));
    XP_TRY(set_variable("OMP_NUM_THREADS", threads, false));
    XP_TRY(set_variable("CUDA_VISIBLE_DEVICES", "", false));
    XP_TRY(set_no_dumps());
    if (ranks == 1)
        return XP_OK;
    XP_TRY(bind_ranks(config, rank_atn, ranks));
    /* A library that is not there: SGLang would ask it for a GPU. */
    return set_variable("SGLANG_NCCL_SO_PATH", "/nonexistent", false);
}

/* What every client of the MPS controller needs: its folders, and the GPUs under its numbers. */
static xp_status_t join_mps(const config_t *config, const config_device_t *const *first,
                            uint32_t count)
{
    char name[64], pipe[PATH_MAX], log[PATH_MAX], list[GPUS_TEXT_BYTES];
    XP_TRY(gpus_mps_folders(config, name, pipe, log));
    XP_TRY(gpus_client_list(config, first, count, list));
    XP_TRY(set_variable("CUDA_MPS_PIPE_DIRECTORY", pipe, true));
    XP_TRY(set_variable("CUDA_MPS_LOG_DIRECTORY", log, true));
    return set_variable("CUDA_VISIBLE_DEVICES", list, true);
}

/* A kernel that is loaded behind a resident one of the same process is a deadlock, so agents load
 * eagerly. An engine has no resident kernel: what its waits wait for comes from other processes,
 * and the user may choose. */
static xp_status_t prepare_driver(bool resident)
{
    XP_TRY(set_variable("CUDA_DEVICE_ORDER", "PCI_BUS_ID", true));
    return set_variable("CUDA_MODULE_LOADING", "EAGER", resident);
}

static xp_status_t prepare_cuda(const config_t *config, const uint32_t *rank_atn, uint32_t ranks)
{
    const config_device_t *devices[FABRIC_MAX_RANKS];
    for (uint32_t r = 0; r < ranks; r++)
        devices[r] = &config->atn[rank_atn[r]];
    /* While the numbers are still those of the system. */
    XP_TRY(gpus_memory_hand_on(config));
    XP_TRY(prepare_driver(false));
    XP_TRY(set_no_dumps());
    /* GPUs are shared, with FfnAgents too: what is free differs from one to the next. */
    XP_TRY(set_variable("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", "0", false));
    XP_TRY(join_mps(config, devices, ranks));
    /* A process that opens its GPU before there is a controller is never a client of it. */
    return participant_await_daemon(config);
}

xp_status_t environment_agent(const config_t *config, const config_device_t *device, bool ffn_role,
                              int *ordinal_out)
{
    XP_TRY(prepare_driver(true));
    /* Two PEs on one GPU: NVSHMEM supports all it has only if their parts make no more than it. */
    if (gpus_shared(config, device) && strncmp(config->fabric_provider, "nvshmem", 7) == 0)
        XP_TRY(set_variable("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "50", true));
    if (!ffn_role || gpus_shared(config, device)) {
        XP_TRY(join_mps(config, &device, 1));
        *ordinal_out = 0;
        return XP_OK;
    }
    /* Alone on its GPU: a controller that somebody else runs is none of its business. */
    XP_TRY(set_variable("CUDA_MPS_PIPE_DIRECTORY", "/nonexistent", true));
    *ordinal_out = (int)device->index;
    return XP_OK;
}

xp_status_t environment_prepare(const config_t *config, const config_overrides_t *overrides,
                                const config_model_t *model)
{
    uint32_t rank_atn[FABRIC_MAX_RANKS] = {0}, ranks = 1;
    if (config->source_path[0])
        XP_TRY(set_variable("XPOOL_CONFIG", config->source_path, true));
    XP_TRY(hand_on(overrides));
    if (model) {
        XP_TRY(set_variable("XPOOL_MODEL_ID", model->id, true));
        ranks = planner_rank_devices(config, (uint32_t)(model - config->models), rank_atn);
    }
    XP_TRY(add_to_list("SGLANG_PLUGINS", ',', PLUGIN_NAME, false));
    XP_TRY(add_package());
    /* The daemon asks /health for good; a token each time would be one FFN pass each time. */
    XP_TRY(set_variable("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "0", false));
    /* The child's parent is `up` in name only: libxpool must not bind itself to it again. */
    unsetenv("XPOOL_UNDER_UP");
    return config->atn[rank_atn[0]].kind == CONFIG_DEVICE_CPU
               ? prepare_cpu(config, rank_atn, ranks)
               : prepare_cuda(config, rank_atn, ranks);
}
