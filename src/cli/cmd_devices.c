/* SPDX-License-Identifier: MIT */
/* `xpool devices`: what this machine has to compute on. The one command that asks the driver; the
 * daemon and the planner run it as a child, so that they touch no device. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/pool.h"
#include "cli/cli.h"
#include "control/gpus.h"
#include "cuda/device.h"
#include "ffn/cuda/kernels.h"
#include "stage/heap.h"

typedef struct machine {
    uint32_t cpus, gpu_count;
    uint64_t memory_bytes;
    int driver_version;                  /* 0: none */
    char unavailable[XP_ERROR_TEXT_MAX]; /* why there is no GPU */
    stage_heap_place_t nvshmem;          /* of provider nvshmem; host "": not here */
    char no_nvshmem[XP_ERROR_TEXT_MAX];
    cuda_device_info_t gpus[CUDA_DEVICES_MAX]; /* as cuda:0, cuda:1, ... */
} machine_t;

/* Where the agents of that configuration look; without one, beside the interpreter of the
 * environment. */
static void look_for_nvshmem(machine_t *machine, const config_t *config)
{
    const char *python = getenv("XPOOL_PYTHON");
    xp_status_t status = config ? gpus_nvshmem(config, &machine->nvshmem)
                                : stage_heap_find(NULL, &python, 1, &machine->nvshmem);
    if (status != XP_OK)
        snprintf(machine->no_nvshmem, sizeof(machine->no_nvshmem), "%s", xp_error_last()->text);
}

static void look(machine_t *machine)
{
    const cuda_driver_t *driver = NULL;
    machine->cpus = xp_usable_cpus();
    long pages = sysconf(_SC_PHYS_PAGES), page_bytes = sysconf(_SC_PAGESIZE);
    machine->memory_bytes = pages > 0 ? (uint64_t)pages * (uint64_t)page_bytes : 0;
    /* By the PCI address, as everywhere in CrossPool: it does not change with what is fastest. */
    setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID", 1);
    uint32_t count = 0;
    if (cuda_driver_load(&driver) != XP_OK ||
        cuda_devices_list(driver, machine->gpus, CUDA_DEVICES_MAX, &count) != XP_OK) {
        snprintf(machine->unavailable, sizeof(machine->unavailable), "%s", xp_error_last()->text);
        return;
    }
    machine->driver_version = driver->version;
    machine->gpu_count = count < CUDA_DEVICES_MAX ? count : CUDA_DEVICES_MAX;
}

/* Whether the FFN kernels run there; attention is the engine's. */
static bool computes_ffn(const cuda_device_info_t *gpu)
{
    return gpu->vmm && gpu->capability == FFN_CUDA_CAPABILITY;
}

static void print_text(const machine_t *machine)
{
    printf("%-8s %10s  %s\n", "device", "MiB", "what");
    printf("%-8s %10.0f  %u usable processors; cpu:N is any budget of them\n", "cpu:N",
           (double)machine->memory_bytes / 1048576.0, machine->cpus);
    for (uint32_t i = 0; i < machine->gpu_count; i++) {
        const cuda_device_info_t *gpu = &machine->gpus[i];
        char name[16];
        snprintf(name, sizeof(name), "cuda:%u", i);
        printf("%-8s %10.0f  %s, compute capability %d.%d, %s%s\n", name,
               (double)gpu->memory_bytes / 1048576.0, gpu->name, gpu->capability / 10,
               gpu->capability % 10, gpu->bus_id,
               !gpu->vmm           ? ", cannot share memory by descriptor: not usable"
               : computes_ffn(gpu) ? ""
                                   : ", for attention only: FFN kernels need 9.0");
    }
    if (machine->driver_version)
        printf("NVIDIA driver for CUDA %d.%d\n", machine->driver_version / 1000,
               machine->driver_version % 1000 / 10);
    else
        printf("no GPU: %s\n", machine->unavailable);
    if (machine->no_nvshmem[0])
        printf("NVSHMEM is unavailable: %s\n", machine->no_nvshmem);
    else
        printf("NVSHMEM: %s\n", machine->nvshmem.host);
}

static int print_json(const machine_t *machine)
{
    json_t *devices = json_array();
    json_array_append_new(devices,
                          json_pack("{s:s, s:I, s:i}", "device", "cpu:N", "memory_bytes",
                                    (json_int_t)machine->memory_bytes, "cpus", (int)machine->cpus));
    for (uint32_t i = 0; i < machine->gpu_count; i++) {
        const cuda_device_info_t *gpu = &machine->gpus[i];
        char name[16], capability[16];
        snprintf(name, sizeof(name), "cuda:%u", i);
        snprintf(capability, sizeof(capability), "%d.%d", gpu->capability / 10,
                 gpu->capability % 10);
        json_array_append_new(
            devices, json_pack("{s:s, s:I, s:s, s:s, s:s, s:s, s:i, s:b, s:b, s:b}", "device", name,
                               "memory_bytes", (json_int_t)gpu->memory_bytes, "name", gpu->name,
                               "compute_capability", capability, "uuid", gpu->uuid, "pci_bus_id",
                               gpu->bus_id, "multiprocessors", gpu->multiprocessors, "usable",
                               gpu->vmm, "ffn", computes_ffn(gpu), "mps_client", gpu->mps));
    }
    json_t *root = json_pack("{s:o}", "devices", devices);
    char version[16];
    snprintf(version, sizeof(version), "%d.%d", machine->driver_version / 1000,
             machine->driver_version % 1000 / 10);
    if (machine->driver_version)
        json_object_set_new(root, "cuda_driver", json_string(version));
    else
        json_object_set_new(root, "cuda_unavailable", json_string(machine->unavailable));
    json_object_set_new(
        root, machine->no_nvshmem[0] ? "nvshmem_unavailable" : "nvshmem",
        json_string(machine->no_nvshmem[0] ? machine->no_nvshmem : machine->nvshmem.host));
    char *text = json_dumps(root, JSON_INDENT(1));
    json_decref(root);
    if (!text)
        return CLI_EXIT_FAILED;
    puts(text);
    free(text);
    return CLI_EXIT_OK;
}

int cmd_devices(int argc, char **argv)
{
    int code = CLI_EXIT_OK;
    if (cli_wants_help(
            argc, argv,
            "usage: xpool devices [--json] [--config FILE]\n\n"
            "Lists what this machine has to compute on: its processors, and the GPUs "
            "that the NVIDIA\ndriver shows (CUDA_VISIBLE_DEVICES restricts them), in "
            "the order of their PCI addresses:\nthe N-th is cuda:N of atn.devices and "
            "ffn.devices. Says whether NVSHMEM and the plug-in for it are\nhere: where the "
            "configuration has agents look for them, without one (--config, "
            "XPOOL_CONFIG)\nbeside the Python of XPOOL_PYTHON, of an active virtual "
            "environment, and of the system. Exits 0 where\nthere is no GPU, too.\n\n"
            "  --json             as JSON\n" CLI_CONFIG_HELP))
        return CLI_EXIT_OK;
    bool json = cli_take_flag(&argc, argv, "--json");
    config_overrides_t overrides = {.config_path = cli_take_option(&argc, argv, "--config")};
    if (cli_leftover(argc, argv, 1))
        return CLI_EXIT_USAGE;
    static machine_t machine;
    config_t *config = NULL;
    bool named = overrides.config_path || getenv("XPOOL_CONFIG");
    if (named && config_load(&overrides, &config) != XP_OK) {
        /* One in the environment may be for something else. */
        if (overrides.config_path) {
            fprintf(stderr, "%s: %s\n", argv[0], xp_error_last()->text);
            return CLI_EXIT_USAGE;
        }
        snprintf(machine.no_nvshmem, sizeof(machine.no_nvshmem), "%s", xp_error_last()->text);
    } else {
        look_for_nvshmem(&machine, config);
    }
    look(&machine);
    if (json)
        code = print_json(&machine);
    else
        print_text(&machine);
    config_destroy(config);
    return code;
}
