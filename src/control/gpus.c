/* SPDX-License-Identifier: MIT */
/* Lists and memory of the configuration's GPUs. One thread; starts a child process where the driver
 * has to be asked, and waits for it with a limit. */
#include "control/gpus.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/process.h"
#include "cuda/mps.h"

#define ASK_LIMIT_NS   (30 * XP_NS_PER_S) /* the first use of a driver may wait for its daemon */
#define ASK_TEXT_BYTES 65536

extern char **environ;

static uint64_t ask_limit_ns; /* 0: it cannot be asked */

void gpus_ask_own_program(uint64_t limit_ns)
{
    ask_limit_ns = limit_ns ? limit_ns : ASK_LIMIT_NS;
}

uint32_t gpus_list(const config_t *config, const config_device_t *list_out[GPUS_MAX])
{
    uint32_t count = 0;
    for (uint32_t side = 0; side < 2; side++) {
        const config_device_t *devices = side ? config->ffn : config->atn;
        for (uint32_t d = 0; d < (side ? config->ffn_count : config->atn_count); d++) {
            bool twin = side && config_device_find(config, false, devices[d].name, NULL);
            if (devices[d].kind == CONFIG_DEVICE_CUDA && !twin)
                list_out[count++] = &devices[d];
        }
    }
    return count;
}

bool gpus_used(const config_t *config, bool ffn_role)
{
    const config_device_t *devices = ffn_role ? config->ffn : config->atn;
    for (uint32_t d = 0; d < (ffn_role ? config->ffn_count : config->atn_count); d++)
        if (devices[d].kind == CONFIG_DEVICE_CUDA)
            return true;
    return false;
}

bool gpus_shared(const config_t *config, const config_device_t *device)
{
    return config_device_find(config, false, device->name, NULL) &&
           config_device_find(config, true, device->name, NULL);
}

/* ---- visibility -------------------------------------------------------------------------------
 */

static xp_status_t append(char out[GPUS_TEXT_BYTES], const char *item, size_t length)
{
    size_t used = strlen(out);
    if (used + length + 2 > GPUS_TEXT_BYTES)
        return xp_fail(XP_INVALID, "the list of GPUs is too long");
    snprintf(out + used, GPUS_TEXT_BYTES - used, "%s%.*s", used ? "," : "", (int)length, item);
    return XP_OK;
}

/* The index-th item of a list with commas. */
static const char *list_item(const char *list, uint32_t index, size_t *length_out)
{
    for (; index; index--) {
        list = strchr(list, ',');
        if (!list)
            return NULL;
        list++;
    }
    list += strspn(list, " ");
    *length_out = strcspn(list, ", ");
    return *length_out ? list : NULL;
}

xp_status_t gpus_controller_list(const config_t *config, char out[GPUS_TEXT_BYTES])
{
    const config_device_t *list[GPUS_MAX];
    const char *shown = getenv("CUDA_VISIBLE_DEVICES");
    uint32_t count = gpus_list(config, list);
    out[0] = '\0';
    for (uint32_t i = 0; i < count; i++) {
        char number[16];
        size_t length = (size_t)snprintf(number, sizeof(number), "%u", list[i]->index);
        const char *item = number;
        if (shown)
            item = list_item(shown, list[i]->index, &length);
        if (!item)
            return xp_fail(XP_NOT_FOUND, "%s: CUDA_VISIBLE_DEVICES=%s shows no such GPU",
                           list[i]->name, shown);
        XP_TRY(append(out, item, length));
    }
    return XP_OK;
}

xp_status_t gpus_client_list(const config_t *config, const config_device_t *const *first,
                             uint32_t count, char out[GPUS_TEXT_BYTES])
{
    const config_device_t *list[GPUS_MAX];
    uint32_t total = gpus_list(config, list);
    out[0] = '\0';
    for (uint32_t pass = 0; pass < 2; pass++) {
        for (uint32_t i = 0; i < (pass ? total : count); i++) {
            const config_device_t *device = pass ? list[i] : first[i];
            uint32_t position = 0, earlier = 0;
            while (position < total && strcmp(list[position]->name, device->name) != 0)
                position++;
            while (earlier < (pass ? count : i) && strcmp(first[earlier]->name, device->name) != 0)
                earlier++;
            if (position == total)
                return xp_fail(XP_INVALID, "%s is no GPU of the configuration", device->name);
            if (earlier < (pass ? count : i))
                continue;
            char number[16];
            int length = snprintf(number, sizeof(number), "%u", position);
            XP_TRY(append(out, number, (size_t)length));
        }
    }
    return XP_OK;
}

xp_status_t gpus_mps_folders(const config_t *config, char name_out[64], char pipe_out[PATH_MAX],
                             char log_out[PATH_MAX])
{
    const config_device_t *first = NULL, *last = NULL;
    for (uint32_t d = 0; d < config->atn_count; d++) {
        const config_device_t *device = &config->atn[d];
        if (device->kind != CONFIG_DEVICE_CUDA)
            continue;
        if (!first || device->index < first->index)
            first = device;
        if (!last || device->index > last->index)
            last = device;
    }
    if (!first)
        return xp_fail(XP_NOT_FOUND, "no attention device is a GPU");
    /* Two systems of one user on different GPUs have controllers of their own. */
    if (first == last)
        snprintf(name_out, 64, "cuda-%u", first->index);
    else
        snprintf(name_out, 64, "cuda-%u-%u", first->index, last->index);
    return mps_folders(getenv(GPUS_MPS_ROOT_VARIABLE), name_out, pipe_out, log_out);
}

/* ---- memory -----------------------------------------------------------------------------------
 */

static const char *text_of(const json_t *object, const char *key)
{
    const char *text = json_string_value(json_object_get(object, key));
    return text ? text : "unknown";
}

xp_status_t gpus_memory_parse(const char *json, uint32_t index, bool ffn_role, uint64_t *bytes_out)
{
    json_error_t error;
    json_t *root = json_loads(json, 0, &error);
    if (!root)
        return xp_fail(XP_PEER, "`xpool devices --json` printed no JSON: %s", error.text);
    char name[32];
    snprintf(name, sizeof(name), "cuda:%u", index);
    json_t *devices = json_object_get(root, "devices"), *item;
    size_t i;
    xp_status_t status;
    const char *problem = json_string_value(json_object_get(root, "cuda_unavailable"));
    if (problem)
        status = xp_fail(XP_NOT_FOUND, "%s: %.600s", name, problem);
    else
        status = xp_fail(XP_NOT_FOUND, "%s: `xpool devices` shows no such GPU", name);
    json_array_foreach(devices, i, item)
    {
        const char *device = json_string_value(json_object_get(item, "device"));
        json_t *bytes = json_object_get(item, "memory_bytes");
        if (device && strcmp(device, name) == 0 && json_is_integer(bytes) &&
            json_integer_value(bytes) > 0) {
            if (ffn_role && json_is_false(json_object_get(item, "ffn"))) {
                status = xp_fail(XP_UNSUPPORTED,
                                 "%s is in ffn.devices, and %.100s of compute capability %.10s "
                                 "cannot run the FFN kernels, which need 9.0 (H100, H200)",
                                 name, text_of(item, "name"), text_of(item, "compute_capability"));
                continue;
            }
            *bytes_out = (uint64_t)json_integer_value(bytes);
            status = XP_OK;
        }
    }
    json_decref(root);
    return status;
}

/* What the child prints, until it closes its output or the limit. */
static xp_status_t collect(pid_t pid, int fd, char *text)
{
    uint64_t deadline = xp_monotonic_ns() + ask_limit_ns;
    size_t used = 0;
    xp_status_t status = XP_OK;
    for (;;) {
        uint64_t now = xp_monotonic_ns();
        struct pollfd waiting = {.fd = fd, .events = POLLIN};
        int left_ms = now < deadline ? (int)((deadline - now) / XP_NS_PER_MS) : 0;
        int ready = poll(&waiting, 1, left_ms);
        if (ready < 0 && errno == EINTR)
            continue;
        if (ready <= 0) {
            status = xp_fail(XP_TIMEOUT, "`xpool devices` did not answer within %g s",
                             (double)ask_limit_ns / (double)XP_NS_PER_S);
            break;
        }
        ssize_t got = read(fd, text + used, ASK_TEXT_BYTES - 1 - used);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            break;
        used += (size_t)got;
    }
    text[used] = '\0';
    /* What it printed counts, also when it does not end after that. */
    int wait_status;
    (void)xp_child_reap(pid, status == XP_OK ? deadline : 0, &wait_status);
    return status;
}

static xp_status_t ask(char *text)
{
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0)
        return xp_fail_errno(XP_IO, "cannot make a pipe");
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], 1);
    char *const words[] = {"xpool", "devices", "--json", NULL};
    pid_t pid;
    int error = xp_child_spawn("/proc/self/exe", &actions, false, words, environ, &pid);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    xp_status_t status;
    if (error) {
        errno = error;
        status = xp_fail_errno(XP_IO, "cannot run `xpool devices`");
    } else {
        status = collect(pid, ends[0], text);
    }
    close(ends[0]);
    return status;
}

/* From GPUS_MEMORY_VARIABLE; 0 when it says nothing of the device. */
static uint64_t handed_on(uint32_t index)
{
    const char *at = getenv(GPUS_MEMORY_VARIABLE);
    while (at && *at) {
        char *end;
        unsigned long number = strtoul(at, &end, 10);
        if (*end != '=')
            return 0;
        unsigned long long bytes = strtoull(end + 1, &end, 10);
        if (number == index)
            return bytes;
        at = *end == ',' ? end + 1 : NULL;
    }
    return 0;
}

xp_status_t gpus_memory(const config_t *config, const config_device_t *device, uint64_t *bytes_out)
{
    uint64_t bytes = device->memory_bytes ? device->memory_bytes : handed_on(device->index);
    xp_status_t status = XP_OK;
    if (!bytes && !ask_limit_ns) {
        status =
            xp_fail(XP_UNSUPPORTED, "this process cannot ask for the memory of %s", device->name);
    } else if (!bytes) {
        char *text = malloc(ASK_TEXT_BYTES);
        status = text ? ask(text) : xp_fail(XP_NO_MEMORY, "no memory to ask for GPUs");
        if (status == XP_OK)
            status = gpus_memory_parse(
                text, device->index, config_device_find(config, true, device->name, NULL), &bytes);
        free(text);
        if (status == XP_UNSUPPORTED)
            return status; /* it is there, and not for that */
    }
    if (status != XP_OK) {
        char why[XP_ERROR_TEXT_MAX];
        snprintf(why, sizeof(why), "%s", xp_error_last()->text);
        return xp_fail(XP_UNSUPPORTED,
                       "%.700s; set devices.\"%s\".memory to plan without the GPU, and start "
                       "engines through `xpool serve` or `xpool exec`",
                       why, device->name);
    }
    *bytes_out = bytes;
    return XP_OK;
}

xp_status_t gpus_memory_hand_on(const config_t *config)
{
    const config_device_t *list[GPUS_MAX];
    uint32_t count = gpus_list(config, list);
    char text[GPUS_TEXT_BYTES] = "";
    for (uint32_t i = 0; i < count; i++) {
        uint64_t bytes;
        char item[64];
        if (list[i]->memory_bytes)
            continue;
        XP_TRY(gpus_memory(config, list[i], &bytes));
        int length =
            snprintf(item, sizeof(item), "%u=%llu", list[i]->index, (unsigned long long)bytes);
        XP_TRY(append(text, item, (size_t)length));
    }
    if (text[0] && setenv(GPUS_MEMORY_VARIABLE, text, 1) != 0)
        return xp_fail_errno(XP_NO_MEMORY, "cannot set %s", GPUS_MEMORY_VARIABLE);
    return XP_OK;
}

/* ---- NVSHMEM ----------------------------------------------------------------------------------
 */

xp_status_t gpus_nvshmem(const config_t *config, stage_heap_place_t *place_out)
{
    char own[CONFIG_MAX_PATH + 32];
    const char *pythons[CONFIG_MAX_MODELS + 2];
    uint32_t count = 0;
    for (uint32_t m = 0; m < config->model_count; m++)
        if (config->models[m].python[0])
            pythons[count++] = config->models[m].python;
    pythons[count++] = getenv("XPOOL_PYTHON");
    snprintf(own, sizeof(own), "%s/venv-test/bin/python", config->cache_root);
    pythons[count++] = own;
    xp_status_t status = stage_heap_find(config->nvshmem_root, pythons, count, place_out);
    return status == XP_OK ? XP_OK : xp_fail_context(status, "fabric.provider: nvshmem");
}
