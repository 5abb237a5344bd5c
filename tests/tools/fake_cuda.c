/* SPDX-License-Identifier: MIT */
/*
 * A libcuda.so.1 without a GPU, for tests of whole processes: the fake driver under the driver's
 * own names. Memory is shared between processes as on a device; kernels compute nothing, but for
 * those by which hosts speak with each other and with the scheduler, whose answers are given at
 * once. It also stands for CUPTI: it loads the library that CUDA_INJECTION64_PATH names, and calls
 * back for what launches and reads.
 *
 * XPOOL_FAKE_ECHO: an Instance's calls, the scheduler and the relay are threads that do what the
 * GPU's kernels do, over the same memory, and die with their process at whatever they are doing;
 * the FFN is an echo, a member's part of x in layer l being (member + 1) x, and l from the first.
 * Launches of one stream are not in order then: whoever calls waits for the answer before the next.
 *
 * XPOOL_FAKE_STEPS: all kernels of module stage do what the GPU's do, each to its end before its
 * launch returns, as under tools that run one kernel at a time. One process.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <time.h>

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

static uint64_t clock_ns(void);
/* It counts from 1970 on a GPU. */
#define HOST_KERNELS_NOW_NS() (clock_ns() + 1790000000000000000u)
#include "../unit/stage/host_kernels.h"
#include "stage/courier.h"
#include "stage/scheduler_steps.h"
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

/* ---- echo -------------------------------------------------------------------------------------
 */
static bool echoes(void)
{
    return getenv("XPOOL_FAKE_ECHO") != NULL;
}
static uint64_t clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}
/* Gives way: there are more such threads than processors. */
static void nap(void)
{
    nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
}
static void begin_thread(void *(*run)(void *context), void *context)
{
    pthread_t thread;
    if (pthread_create(&thread, NULL, run, context) == 0)
        pthread_detach(thread);
    else
        abort();
}

static bool scheduler_runs, relay_runs;
static void *scheduler_main(void *context)
{
    static stage_scheduler_t s;
    stage_scheduler_begin(&s, context);
    for (bool goes_on = true; goes_on;) {
        uint32_t changed[STAGE_LINES / 32] = {0};
        for (uint32_t i = 0; i < s.line_count; i++)
            if (stage_scheduler_line_changed(&s, i))
                changed[i / 32] |= 1u << i % 32;
        goes_on = stage_scheduler_turn(&s, changed, stage_scheduler_lanes_ended(&s), clock_ns());
        if (stage_scheduler_chunk(&s)) {
            nap(); /* where it may be killed */
            stage_job_run(&s.chunk.job, s.chunk.begin, s.chunk.end, 0, 1);
            nap();
            stage_scheduler_chunk_done(&s, clock_ns());
        } else if (s.turn % STAGE_LOOK_TURNS == 0) {
            nap();
        }
    }
    __atomic_store_n(&scheduler_runs, false, __ATOMIC_RELEASE);
    return NULL;
}
static stage_relay_t *relay_context;
static void *relay_main(void *context)
{
    while (!PROTOCOL_LOAD_ACQUIRE(&relay->stop)) {
        for (uint32_t i = 0; i < relay->slots; i++)
            host_relay_round(relay, relay_context, i);
        nap();
    }
    __atomic_store_n(&relay_runs, false, __ATOMIC_RELEASE);
    return NULL;
}

static _Thread_local bool in_order; /* this thread is a graph's */
static void call(const fake_launch_t *launch)
{
    stage_put_t put;
    stage_take_t take;
    transport_patience_t patience;
    transport_clock_t clock;
    void *pointers[5]; /* arena, state, live, input, output */
    uint32_t direct = word(launch, 7);
    memcpy(&put, launch->values[0], sizeof(put));
    memcpy(&take, launch->values[1], sizeof(take));
    memcpy(&patience, launch->values[8], sizeof(patience));
    for (int i = 0; i < 5; i++)
        memcpy(&pointers[i], launch->values[2 + i], sizeof(pointers[i]));
    transport_device_state_t state = *(transport_device_state_t *)pointers[1];
    host_put(&put, &state, pointers[2], pointers[3]);
    uint32_t missing = direct;
    transport_device_wait_start(&clock, clock_ns());
    if (!transport_device_wait_begin(&state))
        while (!stage_device_wait_look(pointers[0], &state, direct, &missing) &&
               !transport_device_wait_life(&patience, &state, &clock, clock_ns()))
            nap();
    /* Who waits for the rows may call at once: the state is there before. */
    transport_device_state_t after = state;
    transport_device_take(&after);
    *(transport_device_state_t *)pointers[1] = after;
    host_take(&take, &state, pointers[4]);
}
static void *call_main(void *context)
{
    call(context);
    free(context);
    return NULL;
}
static bool steps(void);
static void call_whole(const fake_launch_t *launch);
static void run_call(const fake_launch_t *launch)
{
    if (steps()) {
        call_whole(launch);
        return;
    }
    if (!echoes())
        return;
    if (in_order) {
        call(launch);
        return;
    }
    fake_launch_t *own = malloc(sizeof(*own));
    *own = *launch;
    begin_thread(call_main, own);
}
static void *graph_main(void *context)
{
    in_order = true;
    base_cuGraphLaunch(context, NULL);
    return NULL;
}

/* ---- one kernel at a time ---------------------------------------------------------------------
 */
static bool steps(void)
{
    return getenv("XPOOL_FAKE_STEPS") != NULL;
}
static void wait_by_looking(const mailbox_arena_t *arena, transport_device_state_t *state,
                            uint32_t direct, const transport_patience_t *patience)
{
    uint32_t missing = direct;
    transport_clock_t clock;
    if (transport_device_wait_begin(state))
        return;
    transport_device_wait_start(&clock, clock_ns());
    do
        state->looks++;
    while (!stage_device_wait_look(arena, state, direct, &missing) &&
           !transport_device_wait_life(patience, state, &clock, clock_ns()));
}
static void run_put(const fake_launch_t *launch)
{
    stage_put_t put;
    memcpy(&put, launch->values[0], sizeof(put));
    if (steps())
        host_put(&put, fake_pointer(launch, 1), fake_pointer(launch, 2), fake_pointer(launch, 3));
}
static void run_wait(const fake_launch_t *launch)
{
    transport_patience_t patience;
    memcpy(&patience, launch->values[3], sizeof(patience));
    if (steps())
        wait_by_looking(address(launch), fake_pointer(launch, 1), word(launch, 2), &patience);
}
static void run_take(const fake_launch_t *launch)
{
    stage_take_t take;
    memcpy(&take, launch->values[0], sizeof(take));
    if (steps())
        host_take(&take, fake_pointer(launch, 1), fake_pointer(launch, 2));
}
static void call_whole(const fake_launch_t *launch)
{
    stage_put_t put;
    stage_take_t take;
    transport_patience_t patience;
    transport_device_state_t *state = fake_pointer(launch, 3);
    memcpy(&put, launch->values[0], sizeof(put));
    memcpy(&take, launch->values[1], sizeof(take));
    memcpy(&patience, launch->values[8], sizeof(patience));
    host_put(&put, state, fake_pointer(launch, 4), fake_pointer(launch, 5));
    wait_by_looking(fake_pointer(launch, 2), state, word(launch, 7), &patience);
    host_take(&take, state, fake_pointer(launch, 6));
}
static void scheduler_whole(stage_table_t *own, const life_page_t *life)
{
    static stage_scheduler_t s;
    PROTOCOL_STORE_RELEASE(&own->running, 1u);
    stage_scheduler_begin(&s, own);
    for (bool goes_on = true; goes_on;) {
        uint32_t changed[STAGE_LINES / 32] = {0};
        if (life && life_word_look(&life->word[own->own_life]))
            PROTOCOL_STORE_RELEASE(&own->ended, 1u);
        for (uint32_t i = 0; i < s.line_count; i++)
            if (stage_scheduler_line_changed(&s, i))
                changed[i / 32] |= 1u << i % 32;
        goes_on = stage_scheduler_turn(&s, changed, stage_scheduler_lanes_ended(&s), clock_ns());
        if (goes_on && stage_scheduler_chunk(&s))
            stage_scheduler_chunk_run(&s, clock_ns());
    }
    own->counts = s.counts;
    PROTOCOL_STORE_RELEASE(&own->running, 0u);
}
static void relay_whole(transport_resident_t *own, const life_page_t *life, stage_relay_t *relayed)
{
    memset(host_relay_busy, 0, sizeof(host_relay_busy));
    PROTOCOL_STORE_RELEASE(&own->running, 1u);
    while (!PROTOCOL_LOAD_ACQUIRE(&own->stop) && !life_word_look(&life->word[own->own_life]))
        for (uint32_t i = 0; i < own->slots; i++)
            host_relay_round(own, relayed, i);
    PROTOCOL_STORE_RELEASE(&own->running, 0u);
}

static void run_scheduler(const fake_launch_t *launch)
{
    if (steps()) {
        scheduler_whole(address(launch), fake_pointer(launch, 1));
        return;
    }
    table = address(launch);
    if (!echoes())
        return;
    table->dispatch = 0;
    scheduler_runs = true;
    begin_thread(scheduler_main, table);
}
static void run_relay_describe(const fake_launch_t *launch)
{
    stage_relay_slot_t *slot = address(launch);
    memcpy(slot, launch->values[1], sizeof(*slot));
    memset(mailbox_partial_at((mailbox_arena_t *)(uintptr_t)slot->arena, 0), 0,
           MAILBOX_MAX_PARTIALS * sizeof(mailbox_partial_t));
    memcpy((char *)(uintptr_t)slot->arena, launch->values[2], sizeof(mailbox_arena_t));
    uint64_t *clock;
    memcpy(&clock, launch->values[3], sizeof(clock));
    *clock = HOST_KERNELS_NOW_NS();
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
        if (address(launch) == &relay->slot[i].wanted && !echoes())
            PROTOCOL_STORE_RELEASE(&relay->slot[i].now, word(launch, 1));
}
static void run_slot_describe(const fake_launch_t *launch)
{
    transport_slot_t value, *slot = address(launch);
    memcpy(&value, launch->values[1], sizeof(value));
    slot->hidden = value.hidden;
    memcpy(&slot->max_rows, &value.max_rows,
           offsetof(transport_slot_t, pad0) - offsetof(transport_slot_t, max_rows));
    PROTOCOL_STORE_RELEASE(&slot->wanted, value.wanted);
    if (!echoes())
        PROTOCOL_STORE_RELEASE(&slot->now, value.wanted);
}
static void run_relay(const fake_launch_t *launch)
{
    if (steps()) {
        relay_whole(address(launch), fake_pointer(launch, 1), fake_pointer(launch, 2));
        return;
    }
    relay = address(launch);
    PROTOCOL_STORE_RELEASE(&relay->running, 1u);
    if (!echoes())
        return;
    memcpy(&relay_context, launch->values[2], sizeof(relay_context));
    relay_runs = true;
    begin_thread(relay_main, NULL);
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
    entry->reason = 0;
    PROTOCOL_STORE_RELEASE(&entry->wanted, word(launch, 2));
    if (echoes() || steps())
        return;
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
static void run_carry(const fake_launch_t *launch)
{
    mailbox_arena_t *ahead;
    uint64_t at[3];
    memcpy(&ahead, launch->values[1], sizeof(ahead));
    for (int i = 0; i < 3; i++)
        memcpy(&at[i], launch->values[2 + i], sizeof(at[i]));
    host_carry(address(launch), ahead, at[0], at[1], at[2], word(launch, 5));
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
    {"stage_put", run_put, {sizeof(stage_put_t), 8, 8, 8}},
    {"stage_wait", run_wait, {8, 8, 4, sizeof(transport_patience_t)}},
    {"stage_take", run_take, {sizeof(stage_take_t), 8, 8}},
    {"stage_call",
     run_call,
     {sizeof(stage_put_t), sizeof(stage_take_t), 8, 8, 8, 8, 8, 4, sizeof(transport_patience_t)}},
    {"stage_relay_describe",
     run_relay_describe,
     {8, sizeof(stage_relay_slot_t), sizeof(mailbox_arena_t), 8}},
    {"stage_relay", run_relay, {8, 8, 8}},
    {"stage_relay_nvshmem", run_relay, {8, 8, 8}},
    {"stage_courier", run_courier, {8, 8}},
    {"transport_post", run_transport_post, {8, 4}},
    {"transport_slot_describe", run_slot_describe, {8, sizeof(transport_slot_t)}},
    {"transport_arena_start", run_arena_start, {8, sizeof(mailbox_arena_t)}},
    {"transport_close", run_close, {8, 4}},
    {"transport_carry", run_carry, {8, 8, 8, 8, 8, 4}},
    {"transport_live_write", run_live_write, {8, sizeof(transport_live_t)}},
};
static fake_kernel_t others[NAMES_MAX];
static uint32_t other_count;

static bool is_busy(cuda_stream_t stream)
{
    if (echoes() && relay && stream == relay_stream)
        return __atomic_load_n(&relay_runs, __ATOMIC_ACQUIRE);
    if (echoes() && table && stream == scheduler_stream)
        return __atomic_load_n(&scheduler_runs, __ATOMIC_ACQUIRE);
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
    if (echoes()) {
        begin_thread(graph_main, exec);
        return 0;
    }
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
