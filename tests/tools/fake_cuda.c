/* SPDX-License-Identifier: MIT */
/*
 * A libcuda.so.1 without a GPU, for tests of whole processes: the fake driver under the driver's
 * own names. Memory is shared between processes as on a device; kernels compute nothing, but for
 * those by which hosts speak with each other and with the scheduler, whose answers are given at
 * once. It also stands for CUPTI: it loads the library that CUDA_INJECTION64_PATH names, and calls
 * back for what launches and reads.
 */
#include <dlfcn.h>

#define FAKE_OBJECTS                   4096
#define fake_cuModuleGetFunction       unused_cuModuleGetFunction
#define fake_cuLaunchKernel            base_cuLaunchKernel
#define fake_cuLaunchCooperativeKernel base_cuLaunchCooperativeKernel
#define fake_cuGraphLaunch             base_cuGraphLaunch
#define fake_cuMemcpyDtoHAsync         base_cuMemcpyDtoHAsync
#define fake_cuInit                    base_cuInit
#define fake_cuDeviceGetAttribute      base_cuDeviceGetAttribute
#include "../unit/cuda/fake_driver.h"
#undef fake_cuModuleGetFunction
#undef fake_cuLaunchKernel
#undef fake_cuLaunchCooperativeKernel
#undef fake_cuGraphLaunch
#undef fake_cuMemcpyDtoHAsync
#undef fake_cuInit
#undef fake_cuDeviceGetAttribute

#include "stage/courier.h"
#include "stage/table.h"

#define NAMES_MAX 256

static cuda_stream_t scheduler_stream, relay_stream, courier_stream;
static stage_courier_table_t *courier;
static stage_table_t *table;
static transport_resident_t *relay; /* the AtnAgent's resident kernel */

static void *address(const fake_launch_t *launch)
{
    void *at;
    memcpy(&at, launch->values[0], sizeof(at));
    return at;
}

static uint32_t word(const fake_launch_t *launch, int index)
{
    uint32_t value;
    memcpy(&value, launch->values[index], sizeof(value));
    return value;
}

static void run_nothing(const fake_launch_t *launch)
{
}
static void run_scheduler(const fake_launch_t *launch)
{
    table = address(launch);
}
static void run_post(const fake_launch_t *launch)
{
    PROTOCOL_STORE_RELEASE((uint32_t *)address(launch), word(launch, 1));
    for (uint32_t i = 0; courier && i < FABRIC_MAX_INSTANCES; i++)
        if (address(launch) == &courier->unit[i].wanted)
            PROTOCOL_STORE_RELEASE(&courier->unit[i].now, word(launch, 1));
}
static void run_courier(const fake_launch_t *launch)
{
    courier = address(launch);
}
/* An order to the AtnAgent's resident kernel is answered at once. */
static void run_transport_post(const fake_launch_t *launch)
{
    run_post(launch);
    for (uint32_t i = 0; relay && i < TRANSPORT_RESIDENT_SLOTS; i++)
        if (address(launch) == &relay->slot[i].wanted)
            PROTOCOL_STORE_RELEASE(&relay->slot[i].now, word(launch, 1));
}
static void run_slot_describe(const fake_launch_t *launch)
{
    transport_slot_t value, *slot = address(launch);
    memcpy(&value, launch->values[1], sizeof(value));
    memcpy(slot, &value, offsetof(transport_slot_t, pad0));
    PROTOCOL_STORE_RELEASE(&slot->now, value.wanted);
}
static void run_relay(const fake_launch_t *launch)
{
    relay = address(launch);
    PROTOCOL_STORE_RELEASE(&relay->running, 1u);
}
/* XPOOL_FAKE_BUSY: a scheduler that is still executing for whoever is to be detached, and is seen
 * to have left a moment after it was shut down. */
static bool executes(void)
{
    return getenv("XPOOL_FAKE_BUSY") != NULL;
}
static void run_describe(const fake_launch_t *launch)
{
    stage_instance_t *entry = address(launch);
    memcpy(&entry->about, launch->values[1], sizeof(entry->about));
    entry->wanted = word(launch, 2);
    if (!executes() || transport_slot_state(entry->wanted) != TRANSPORT_SLOT_EMPTY)
        entry->now = entry->wanted;
}
static void run_page_start(const fake_launch_t *launch)
{
    memset(address(launch), 0, sizeof(stage_page_t));
    memcpy(address(launch), launch->values[1], sizeof(stage_head_t));
}
static void run_partials_start(const fake_launch_t *launch)
{
    stage_partials_t *partials = address(launch);
    memset(partials, 0, sizeof(*partials));
    partials->magic = STAGE_PARTIALS_MAGIC;
    partials->abi = STAGE_ABI;
    memcpy(&partials->bytes, launch->values[1], sizeof(partials->bytes));
    partials->instance = word(launch, 2);
    partials->ffn = word(launch, 3);
    partials->members = word(launch, 4);
    partials->rows = word(launch, 5);
    partials->hidden = word(launch, 6);
}
static void run_arena_start(const fake_launch_t *launch)
{
    memcpy(address(launch), launch->values[1], sizeof(mailbox_arena_t));
}
static void run_close(const fake_launch_t *launch)
{
    mailbox_close(address(launch), word(launch, 1));
}
static void run_live_write(const fake_launch_t *launch)
{
    memcpy(address(launch), launch->values[1], sizeof(transport_live_t));
}

static const fake_kernel_t known[] = {
    {"stage_scheduler", run_scheduler, {8, 8}},
    {"stage_post", run_post, {8, 4}},
    {"stage_describe", run_describe, {8, sizeof(stage_about_t), 4}},
    {"stage_page_start", run_page_start, {8, sizeof(stage_head_t)}},
    {"stage_partials_start", run_partials_start, {8, 8, 4, 4, 4, 4, 4}},
    {"stage_close", run_close, {8, 4}},
    {"stage_relay", run_relay, {8, 8, 8}},
    {"stage_relay_nvshmem", run_relay, {8, 8, 8}},
    {"stage_courier", run_courier, {8, 8}},
    {"transport_post", run_transport_post, {8, 4}},
    {"transport_slot_describe", run_slot_describe, {8, sizeof(transport_slot_t)}},
    {"transport_arena_start", run_arena_start, {8, sizeof(mailbox_arena_t)}},
    {"transport_close", run_close, {8, 4}},
    {"transport_live_write", run_live_write, {8, sizeof(transport_live_t)}},
};
static fake_kernel_t others[NAMES_MAX];
static uint32_t other_count;

static bool is_busy(cuda_stream_t stream)
{
    if (relay && stream == relay_stream)
        return !PROTOCOL_LOAD_ACQUIRE(&relay->stop);
    if (courier && stream == courier_stream)
        return !PROTOCOL_LOAD_ACQUIRE(&courier->stop);
    if (!table || stream != scheduler_stream || PROTOCOL_LOAD_ACQUIRE(&table->stop))
        return false;
    if (!PROTOCOL_LOAD_ACQUIRE(&table->shutdown))
        return true;
    static uint32_t looks;
    return executes() && looks++ == 0;
}

/* ---- profiler ----------------------------------------------------------------------------------
 */
typedef struct profiled_call {
    int site;
    const char *name;
} profiled_call_t;
typedef void (*profiler_t)(void *context, int domain, uint32_t id, const void *call);
static _Atomic(profiler_t) profiler;

static void tell_profiler(uint32_t id, const char *name)
{
    const profiled_call_t call = {.name = name};
    profiler_t told = profiler;
    if (told)
        told(NULL, 1, id, &call);
}

__attribute__((visibility("default"))) int cuptiSubscribe(void **subscriber, profiler_t function,
                                                          void *context);
int cuptiSubscribe(void **subscriber, profiler_t function, void *context)
{
    *subscriber = context;
    profiler = function;
    return 0;
}
__attribute__((visibility("default"))) int cuptiEnableDomain(uint32_t enable, void *subscriber,
                                                             int domain);
int cuptiEnableDomain(uint32_t enable, void *subscriber, int domain)
{
    return 0;
}

/* Who starts before the MPS controller is no client of it, as on a machine with GPUs. */
static bool mps_client;

static int fake_cuDeviceGetAttribute(int *value, int attribute, int device)
{
    if (attribute != CUDA_ATTRIBUTE_MPS)
        return base_cuDeviceGetAttribute(value, attribute, device);
    *value = mps_client;
    return 0;
}

static bool controller_is_there(void)
{
    char path[4096];
    const char *pipe = getenv("CUDA_MPS_PIPE_DIRECTORY");
    snprintf(path, sizeof(path), "%s/control.pid", pipe ? pipe : "");
    return access(path, F_OK) == 0;
}

static int fake_cuInit(unsigned flags)
{
    const char *path = getenv("CUDA_INJECTION64_PATH");
    void *library = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    int (*begin)(void) = library ? (int (*)(void))dlsym(library, "InitializeInjection") : NULL;
    if (begin)
        begin();
    mps_client = controller_is_there();
    return base_cuInit(flags);
}

static int fake_cuGraphLaunch(cuda_graph_exec_t exec, cuda_stream_t stream)
{
    tell_profiler(3, "cuGraphLaunch");
    return base_cuGraphLaunch(exec, stream);
}

static int fake_cuMemcpyDtoHAsync(void *to, cuda_address_t from, size_t bytes, cuda_stream_t stream)
{
    tell_profiler(4, "cuMemcpyDtoHAsync_v2");
    return base_cuMemcpyDtoHAsync(to, from, bytes, stream);
}

/* ---- kernels ----------------------------------------------------------------------------------
 */
static int fake_cuModuleGetFunction(cuda_function_t *function, cuda_module_handle_t module,
                                    const char *name)
{
    const fake_kernel_t *found = NULL;
    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++)
        if (!strcmp(known[i].name, name))
            found = &known[i];
    if (!found) {
        if (other_count == NAMES_MAX)
            return CUDA_RESULT_NOT_FOUND;
        others[other_count] = (fake_kernel_t){strdup(name), run_nothing, {0}};
        found = &others[other_count++];
    }
    *function = (cuda_function_t)(uintptr_t)found;
    return 0;
}

static int fake_cuLaunchKernel(cuda_function_t function, unsigned gx, unsigned gy, unsigned gz,
                               unsigned bx, unsigned by, unsigned bz, unsigned shared,
                               cuda_stream_t stream, void **parameters, void **extra)
{
    tell_profiler(1, "cuLaunchKernel");
    if (((const fake_kernel_t *)function)->run == run_scheduler)
        scheduler_stream = stream;
    if (((const fake_kernel_t *)function)->run == run_relay)
        relay_stream = stream;
    if (((const fake_kernel_t *)function)->run == run_courier)
        courier_stream = stream;
    return base_cuLaunchKernel(function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra);
}

/* A client of MPS shares its GPU: the blocks of others may keep a cooperative grid from starting,
 * or wait behind it, so no process of ours may launch one there. */
static int fake_cuLaunchCooperativeKernel(cuda_function_t function, unsigned gx, unsigned gy,
                                          unsigned gz, unsigned bx, unsigned by, unsigned bz,
                                          unsigned shared, cuda_stream_t stream, void **parameters)
{
    const char *pipe = getenv("CUDA_MPS_PIPE_DIRECTORY");
    tell_profiler(2, "cuLaunchCooperativeKernel");
    if (pipe && access(pipe, F_OK) == 0)
        return CUDA_RESULT_NOT_SUPPORTED;
    return base_cuLaunchCooperativeKernel(function, gx, gy, gz, bx, by, bz, shared, stream,
                                          parameters);
}

__attribute__((constructor)) static void begin(void)
{
    fake_reset(NULL, 0);
    fake.devices = 4;
    fake.busy = is_busy;
}

#define X(name, exported, parameters)                                                              \
    __attribute__((visibility("default"), alias("fake_" #name))) int exported parameters;
CUDA_DRIVER_FUNCTIONS(X)
#undef X
