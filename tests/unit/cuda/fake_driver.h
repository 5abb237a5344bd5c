/* SPDX-License-Identifier: MIT */
/*
 * A driver without a GPU: a table of functions over ordinary memory, for tests of host logic.
 *
 * "Device" memory is host memory: handles are memfds, an address range is an mmap, so mapping,
 * export and import behave as on a device, and reading what is not mapped or not accessible faults.
 * Launches run at once, as functions that the test registers under the kernels' names; a stream
 * that captures keeps them for the graph. Every call can be made to fail: the n-th one from now, or
 * one by name. Counters of live objects show what a clean-up ladder forgot.
 */
#ifndef XPOOL_TESTS_FAKE_DRIVER_H
#define XPOOL_TESTS_FAKE_DRIVER_H

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cuda/driver.h"

#define FAKE_GRANULARITY (64u << 10)
#ifndef FAKE_OBJECTS
#define FAKE_OBJECTS 64
#endif
#define FAKE_LAUNCHES   512
#define FAKE_PARAMETERS 12
#define FAKE_VALUE_MAX  512

typedef struct fake_launch fake_launch_t;
typedef struct fake_kernel {
    const char *name;
    void (*run)(const fake_launch_t *launch);
    uint32_t sizes[FAKE_PARAMETERS]; /* bytes of each argument; 0 ends */
} fake_kernel_t;
struct fake_launch {
    const fake_kernel_t *kernel;
    uint32_t blocks, threads;
    unsigned char values[FAKE_PARAMETERS][FAKE_VALUE_MAX];
};

/* Of a launch: the argument, which has 8 bytes or fewer; the same as an address. */
static inline uint64_t fake_argument(const fake_launch_t *launch, int index)
{
    uint64_t value = 0;
    memcpy(&value, launch->values[index], launch->kernel->sizes[index]);
    return value;
}
static inline void *fake_pointer(const fake_launch_t *launch, int index)
{
    return (void *)(uintptr_t)fake_argument(launch, index);
}

struct cuda_stream_object {
    bool used, capturing, busy;
};
struct cuda_graph_object {
    bool used;
    uint32_t count;
    fake_launch_t *launches;
};
struct cuda_event_object {
    bool used;
    cuda_stream_t stream; /* recorded there last */
};

static struct fake {
    /* What the test sets. */
    uint64_t fail_at; /* the fail_at-th call from now fails; 0: none */
    const char *fail_name;
    int fail_result; /* 0: out of memory */
    int devices, version;
    const fake_kernel_t *kernels;
    uint32_t kernel_count;
    cuda_stream_t graph_stream; /* of the latest graph launch */
    void (*after_launch)(const fake_launch_t *launch);
    void (*before_read)(void);
    bool (*busy)(cuda_stream_t stream); /* what cuStreamQuery says */
    char garbage; /* what new device memory holds, as its last owner left it */
    /* What it sees. */
    uint64_t calls;
    const char *failed; /* the last call that was made to fail */
    int handles, ranges, mapped, contexts, modules, streams, events, graphs, host_blocks,
        registrations, blocks, loads;
    /* Inside. */
    cuda_context_t current;
    int memory[FAKE_OBJECTS]; /* descriptors; 0: free */
    struct cuda_stream_object stream[FAKE_OBJECTS];
    struct cuda_graph_object graph[FAKE_OBJECTS];
    struct cuda_event_object event[FAKE_OBJECTS];
    struct cuda_graph_object capture;
    struct {
        cuda_address_t at;
        size_t bytes; /* 0: free */
    } mapping[FAKE_OBJECTS];
} fake;

static bool fake_fails(const char *name)
{
    fake.calls++;
    if ((fake.fail_at && --fake.fail_at == 0) ||
        (fake.fail_name && !strcmp(fake.fail_name, name))) {
        fake.failed = name;
        return true;
    }
    return false;
}
#define FAKE_CALL(name)                                                                            \
    if (fake_fails(#name))                                                                         \
    return fake.fail_result ? fake.fail_result : CUDA_RESULT_OUT_OF_MEMORY

static int fake_cuInit(unsigned flags)
{
    FAKE_CALL(cuInit);
    return 0;
}
static int fake_cuDriverGetVersion(int *version)
{
    FAKE_CALL(cuDriverGetVersion);
    *version = fake.version;
    return 0;
}
static int fake_cuGetErrorName(int result, const char **name)
{
    *name = result == CUDA_RESULT_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_FAKE";
    return 0;
}
static int fake_cuGetErrorString(int result, const char **text)
{
    *text = "the fake driver was told to";
    return 0;
}
static int fake_cuDeviceGetCount(int *count)
{
    FAKE_CALL(cuDeviceGetCount);
    *count = fake.devices;
    return 0;
}
static int fake_cuDeviceGet(int *device, int ordinal)
{
    FAKE_CALL(cuDeviceGet);
    *device = ordinal;
    return 0;
}
static int fake_cuDeviceGetName(char *name, int bytes, int device)
{
    FAKE_CALL(cuDeviceGetName);
    snprintf(name, (size_t)bytes, "Fake %d", device);
    return 0;
}
static int fake_cuDeviceGetUuid(cuda_uuid_t *uuid, int device)
{
    FAKE_CALL(cuDeviceGetUuid);
    for (int i = 0; i < 16; i++)
        uuid->bytes[i] = (unsigned char)(i * 16 + device);
    return 0;
}
static int fake_cuDeviceGetPCIBusId(char *text, int bytes, int device)
{
    FAKE_CALL(cuDeviceGetPCIBusId);
    snprintf(text, (size_t)bytes, "0000:%02x:00.0", device);
    return 0;
}
static int fake_cuDeviceTotalMem(size_t *bytes, int device)
{
    FAKE_CALL(cuDeviceTotalMem);
    *bytes = (size_t)1 << 30;
    return 0;
}
static int fake_cuDeviceGetAttribute(int *value, int attribute, int device)
{
    FAKE_CALL(cuDeviceGetAttribute);
    *value = attribute == CUDA_ATTRIBUTE_CAPABILITY_MAJOR   ? 9
             : attribute == CUDA_ATTRIBUTE_CAPABILITY_MINOR ? 0
             : attribute == CUDA_ATTRIBUTE_MULTIPROCESSORS  ? 132
                                                            : 1;
    return 0;
}
static int fake_cuDeviceCanAccessPeer(int *can, int device, int peer)
{
    FAKE_CALL(cuDeviceCanAccessPeer);
    *can = device != peer;
    return 0;
}
static int fake_cuDevicePrimaryCtxRetain(cuda_context_t *context, int device)
{
    FAKE_CALL(cuDevicePrimaryCtxRetain);
    fake.contexts++;
    *context = (cuda_context_t)&fake;
    return 0;
}
static int fake_cuDevicePrimaryCtxRelease(int device)
{
    fake.contexts--;
    return 0;
}
static int fake_cuCtxSetCurrent(cuda_context_t context)
{
    FAKE_CALL(cuCtxSetCurrent);
    fake.current = context;
    return 0;
}
static int fake_cuCtxGetCurrent(cuda_context_t *context)
{
    *context = fake.current;
    return 0;
}
static int fake_cuCtxSynchronize(void)
{
    return 0;
}
static int fake_cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    FAKE_CALL(cuCtxGetStreamPriorityRange);
    *least = 0;
    *greatest = -5;
    return 0;
}
static int fake_cuModuleGetLoadingMode(int *mode)
{
    *mode = CUDA_LOADING_EAGER;
    return 0;
}
static int fake_cuModuleLoadData(cuda_module_handle_t *module, const void *image)
{
    FAKE_CALL(cuModuleLoadData);
    fake.modules++;
    *module = (cuda_module_handle_t)&fake;
    return 0;
}
static int fake_cuModuleUnload(cuda_module_handle_t module)
{
    fake.modules--;
    return 0;
}
static int fake_cuModuleGetFunction(cuda_function_t *function, cuda_module_handle_t module,
                                    const char *name)
{
    FAKE_CALL(cuModuleGetFunction);
    for (uint32_t i = 0; i < fake.kernel_count; i++)
        if (!strcmp(fake.kernels[i].name, name)) {
            *function = (cuda_function_t)(uintptr_t)&fake.kernels[i];
            return 0;
        }
    return CUDA_RESULT_NOT_FOUND;
}
static int fake_cuFuncLoad(cuda_function_t function)
{
    FAKE_CALL(cuFuncLoad);
    fake.loads++;
    return 0;
}
static int fake_cuFuncGetAttribute(int *value, int attribute, cuda_function_t function)
{
    *value = 1;
    return 0;
}
static int fake_cuFuncSetAttribute(cuda_function_t function, int attribute, int value)
{
    return 0;
}
static int fake_cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, cuda_function_t function,
                                                            int threads, size_t shared)
{
    *blocks = 1;
    return 0;
}
static int fake_cuTensorMapEncodeTiled(cuda_tensor_map_t *map, int type, uint32_t rank,
                                       void *address, const uint64_t *size, const uint64_t *pitch,
                                       const uint32_t *box, const uint32_t *step, int interleave,
                                       int swizzle, int l2, int fill)
{
    FAKE_CALL(cuTensorMapEncodeTiled);
    memset(map, 0, sizeof(*map));
    return 0;
}
static int fake_cuLaunchKernel(cuda_function_t function, unsigned gx, unsigned gy, unsigned gz,
                               unsigned bx, unsigned by, unsigned bz, unsigned shared,
                               cuda_stream_t stream, void **parameters, void **extra)
{
    FAKE_CALL(cuLaunchKernel);
    static _Thread_local fake_launch_t launch;
    memset(&launch, 0, sizeof(launch));
    launch.kernel = (const fake_kernel_t *)function;
    launch.blocks = gx * gy * gz;
    launch.threads = bx * by * bz;
    for (int i = 0; i < FAKE_PARAMETERS && launch.kernel->sizes[i]; i++)
        memcpy(launch.values[i], parameters[i], launch.kernel->sizes[i]);
    if (stream && stream->capturing) {
        if (fake.capture.count == FAKE_LAUNCHES)
            return CUDA_RESULT_OUT_OF_MEMORY;
        fake.capture.launches[fake.capture.count++] = launch;
        return 0;
    }
    launch.kernel->run(&launch);
    if (fake.after_launch)
        fake.after_launch(&launch);
    return 0;
}
static int fake_cuLaunchCooperativeKernel(cuda_function_t function, unsigned gx, unsigned gy,
                                          unsigned gz, unsigned bx, unsigned by, unsigned bz,
                                          unsigned shared, cuda_stream_t stream, void **parameters)
{
    return fake_cuLaunchKernel(function, gx, gy, gz, bx, by, bz, shared, stream, parameters, NULL);
}
static int fake_cuMemAlloc(cuda_address_t *address, size_t bytes)
{
    FAKE_CALL(cuMemAlloc);
    void *memory = aligned_alloc(256, (bytes + 255) / 256 * 256);
    if (!memory)
        return CUDA_RESULT_OUT_OF_MEMORY;
    memset(memory, 0xab, bytes);
    fake.blocks++;
    *address = (cuda_address_t)(uintptr_t)memory;
    return 0;
}
static int fake_cuMemFree(cuda_address_t address)
{
    free((void *)(uintptr_t)address);
    fake.blocks--;
    return 0;
}
static int fake_cuMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    FAKE_CALL(cuMemGetInfo);
    *free_bytes = *total_bytes = (size_t)1 << 30;
    return 0;
}
static int fake_cuMemHostAlloc(void **address, size_t bytes, unsigned flags)
{
    FAKE_CALL(cuMemHostAlloc);
    *address = calloc(1, bytes);
    __atomic_fetch_add(&fake.host_blocks, 1, __ATOMIC_RELAXED);
    return *address ? 0 : CUDA_RESULT_OUT_OF_MEMORY;
}
static int fake_cuMemFreeHost(void *address)
{
    free(address);
    __atomic_fetch_sub(&fake.host_blocks, 1, __ATOMIC_RELAXED);
    return 0;
}
static int fake_cuMemHostRegister(void *address, size_t bytes, unsigned flags)
{
    FAKE_CALL(cuMemHostRegister);
    fake.registrations++;
    return 0;
}
static int fake_cuMemHostUnregister(void *address)
{
    fake.registrations--;
    return 0;
}
static int fake_cuMemHostGetDevicePointer(cuda_address_t *device_address, void *address,
                                          unsigned flags)
{
    FAKE_CALL(cuMemHostGetDevicePointer);
    *device_address = (cuda_address_t)(uintptr_t)address;
    return 0;
}
static int fake_cuMemcpyHtoDAsync(cuda_address_t to, const void *from, size_t bytes,
                                  cuda_stream_t stream)
{
    FAKE_CALL(cuMemcpyHtoDAsync);
    memcpy((void *)(uintptr_t)to, from, bytes);
    return 0;
}
static int fake_cuMemcpyDtoHAsync(void *to, cuda_address_t from, size_t bytes, cuda_stream_t stream)
{
    FAKE_CALL(cuMemcpyDtoHAsync);
    if (fake.before_read)
        fake.before_read();
    memcpy(to, (const void *)(uintptr_t)from, bytes);
    return 0;
}
static int fake_cuMemcpyDtoDAsync(cuda_address_t to, cuda_address_t from, size_t bytes,
                                  cuda_stream_t stream)
{
    FAKE_CALL(cuMemcpyDtoDAsync);
    memmove((void *)(uintptr_t)to, (const void *)(uintptr_t)from, bytes);
    return 0;
}
static int fake_cuMemsetD8Async(cuda_address_t to, unsigned char value, size_t count,
                                cuda_stream_t stream)
{
    FAKE_CALL(cuMemsetD8Async);
    memset((void *)(uintptr_t)to, value, count);
    return 0;
}
static int fake_cuIpcGetMemHandle(cuda_ipc_memory_t *handle, cuda_address_t address)
{
    return CUDA_RESULT_NOT_SUPPORTED;
}
static int fake_cuIpcOpenMemHandle(cuda_address_t *address, cuda_ipc_memory_t handle,
                                   unsigned flags)
{
    return CUDA_RESULT_NOT_SUPPORTED;
}
static int fake_cuIpcCloseMemHandle(cuda_address_t address)
{
    return CUDA_RESULT_NOT_SUPPORTED;
}
static int fake_cuMemGetAllocationGranularity(size_t *bytes,
                                              const cuda_allocation_properties_t *properties,
                                              int option)
{
    FAKE_CALL(cuMemGetAllocationGranularity);
    *bytes = FAKE_GRANULARITY;
    return 0;
}
static int fake_cuMemAddressReserve(cuda_address_t *address, size_t bytes, size_t alignment,
                                    cuda_address_t fixed, unsigned long long flags)
{
    FAKE_CALL(cuMemAddressReserve);
    if (bytes == 0 || bytes % FAKE_GRANULARITY)
        return CUDA_RESULT_INVALID_VALUE;
    void *range = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED)
        return CUDA_RESULT_OUT_OF_MEMORY;
    fake.ranges++;
    *address = (cuda_address_t)(uintptr_t)range;
    return 0;
}
static int fake_cuMemAddressFree(cuda_address_t address, size_t bytes)
{
    fake.ranges--;
    return munmap((void *)(uintptr_t)address, bytes) == 0 ? 0 : CUDA_RESULT_INVALID_VALUE;
}
static int fake_memory_new(int fd, cuda_memory_handle_t *handle)
{
    for (uint64_t i = 0; i < FAKE_OBJECTS; i++)
        if (!fake.memory[i]) {
            fake.memory[i] = fd;
            fake.handles++;
            *handle = i + 1;
            return 0;
        }
    close(fd);
    return CUDA_RESULT_OUT_OF_MEMORY;
}
static int fake_cuMemCreate(cuda_memory_handle_t *handle, size_t bytes,
                            const cuda_allocation_properties_t *properties,
                            unsigned long long flags)
{
    FAKE_CALL(cuMemCreate);
    if (bytes == 0 || bytes % FAKE_GRANULARITY ||
        properties->handle_types != CUDA_HANDLE_DESCRIPTOR)
        return CUDA_RESULT_INVALID_VALUE;
    int fd = memfd_create("fake-device-memory", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0)
        return CUDA_RESULT_OUT_OF_MEMORY;
    char piece[4096];
    memset(piece, fake.garbage, sizeof(piece));
    for (size_t at = 0; fake.garbage && at < bytes; at += sizeof(piece))
        if (pwrite(fd, piece, sizeof(piece), (off_t)at) != (ssize_t)sizeof(piece))
            return CUDA_RESULT_OUT_OF_MEMORY;
    return fake_memory_new(fd, handle);
}
static int fake_cuMemRelease(cuda_memory_handle_t handle)
{
    close(fake.memory[handle - 1]);
    fake.memory[handle - 1] = 0;
    fake.handles--;
    return 0;
}
static int fake_cuMemMap(cuda_address_t address, size_t bytes, size_t offset,
                         cuda_memory_handle_t handle, unsigned long long flags)
{
    FAKE_CALL(cuMemMap);
    struct stat info;
    if (fstat(fake.memory[handle - 1], &info) != 0 || (size_t)info.st_size != bytes)
        return CUDA_RESULT_INVALID_VALUE;
    void *at = mmap((void *)(uintptr_t)address, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED,
                    fake.memory[handle - 1], 0);
    if (at == MAP_FAILED)
        return CUDA_RESULT_INVALID_VALUE;
    for (int i = 0; i < FAKE_OBJECTS; i++)
        if (!fake.mapping[i].bytes) {
            fake.mapping[i].at = address;
            fake.mapping[i].bytes = bytes;
            fake.mapped++;
            return 0;
        }
    return CUDA_RESULT_OUT_OF_MEMORY;
}
/* Of whole mappings, one or several. */
static int fake_cuMemUnmap(cuda_address_t address, size_t bytes)
{
    size_t found = 0;
    for (int i = 0; i < FAKE_OBJECTS; i++)
        if (fake.mapping[i].bytes && fake.mapping[i].at >= address &&
            fake.mapping[i].at + fake.mapping[i].bytes <= address + bytes) {
            found += fake.mapping[i].bytes;
            fake.mapping[i].bytes = 0;
            fake.mapped--;
        }
    if (found != bytes)
        return CUDA_RESULT_INVALID_VALUE;
    void *at = mmap((void *)(uintptr_t)address, bytes, PROT_NONE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    return at == MAP_FAILED ? CUDA_RESULT_INVALID_VALUE : 0;
}
static int fake_cuMemSetAccess(cuda_address_t address, size_t bytes, const cuda_access_t *access,
                               size_t count)
{
    FAKE_CALL(cuMemSetAccess);
    return mprotect((void *)(uintptr_t)address, bytes, PROT_READ | PROT_WRITE) == 0
               ? 0
               : CUDA_RESULT_INVALID_VALUE;
}
static int fake_cuMemExportToShareableHandle(void *shareable, cuda_memory_handle_t handle, int type,
                                             unsigned long long flags)
{
    FAKE_CALL(cuMemExportToShareableHandle);
    *(int *)shareable = dup(fake.memory[handle - 1]);
    return 0;
}
static int fake_cuMemImportFromShareableHandle(cuda_memory_handle_t *handle, void *shareable,
                                               int type)
{
    FAKE_CALL(cuMemImportFromShareableHandle);
    int fd = dup((int)(intptr_t)shareable);
    return fd < 0 ? CUDA_RESULT_INVALID_VALUE : fake_memory_new(fd, handle);
}
static int fake_cuStreamCreateWithPriority(cuda_stream_t *stream, unsigned flags, int priority)
{
    FAKE_CALL(cuStreamCreateWithPriority);
    if (flags != CUDA_STREAM_NON_BLOCKING)
        return CUDA_RESULT_INVALID_VALUE;  /* never the kind that waits for others */
    for (int i = 0; i < FAKE_OBJECTS; i++) /* several threads at a time */
        if (!__atomic_test_and_set(&fake.stream[i].used, __ATOMIC_ACQUIRE)) {
            fake.stream[i].capturing = fake.stream[i].busy = false;
            __atomic_fetch_add(&fake.streams, 1, __ATOMIC_RELAXED);
            *stream = &fake.stream[i];
            return 0;
        }
    return CUDA_RESULT_OUT_OF_MEMORY;
}
static int fake_cuStreamDestroy(cuda_stream_t stream)
{
    __atomic_fetch_sub(&fake.streams, 1, __ATOMIC_RELAXED);
    __atomic_clear(&stream->used, __ATOMIC_RELEASE);
    return 0;
}
static int fake_cuStreamSynchronize(cuda_stream_t stream)
{
    FAKE_CALL(cuStreamSynchronize);
    return 0;
}
static int fake_cuStreamQuery(cuda_stream_t stream)
{
    FAKE_CALL(cuStreamQuery);
    return fake.busy && fake.busy(stream) ? CUDA_RESULT_NOT_READY : 0;
}
static int fake_cuStreamWaitEvent(cuda_stream_t stream, cuda_event_t event, unsigned flags)
{
    FAKE_CALL(cuStreamWaitEvent);
    return 0;
}
static int fake_cuStreamBeginCapture(cuda_stream_t stream, int mode)
{
    FAKE_CALL(cuStreamBeginCapture);
    stream->capturing = true;
    fake.capture.count = 0;
    fake.capture.launches = calloc(FAKE_LAUNCHES, sizeof(fake_launch_t));
    return 0;
}
static int fake_graph_new(const struct cuda_graph_object *from, cuda_graph_t *graph)
{
    for (int i = 0; i < FAKE_OBJECTS; i++)
        if (!fake.graph[i].used) {
            fake.graph[i] = *from;
            fake.graph[i].used = true;
            fake.graphs++;
            *graph = &fake.graph[i];
            return 0;
        }
    return CUDA_RESULT_OUT_OF_MEMORY;
}
static int fake_cuStreamEndCapture(cuda_stream_t stream, cuda_graph_t *graph)
{
    stream->capturing = false;
    if (fake_fails("cuStreamEndCapture")) {
        free(fake.capture.launches);
        return fake.fail_result ? fake.fail_result : CUDA_RESULT_OUT_OF_MEMORY;
    }
    return fake_graph_new(&fake.capture, graph);
}
static int fake_cuThreadExchangeStreamCaptureMode(int *mode)
{
    FAKE_CALL(cuThreadExchangeStreamCaptureMode);
    *mode = 0; /* what every thread begins with */
    return 0;
}
static int fake_cuStreamIsCapturing(cuda_stream_t stream, int *capturing)
{
    *capturing = stream->capturing;
    return 0;
}
static int fake_cuEventCreate(cuda_event_t *event, unsigned flags)
{
    FAKE_CALL(cuEventCreate);
    for (int i = 0; i < FAKE_OBJECTS; i++)
        if (!fake.event[i].used) {
            fake.event[i].used = true;
            fake.events++;
            *event = &fake.event[i];
            return 0;
        }
    return CUDA_RESULT_OUT_OF_MEMORY;
}
static int fake_cuEventDestroy(cuda_event_t event)
{
    event->used = false;
    fake.events--;
    return 0;
}
static int fake_cuEventRecord(cuda_event_t event, cuda_stream_t stream)
{
    FAKE_CALL(cuEventRecord);
    event->stream = stream;
    return 0;
}
static int fake_cuEventQuery(cuda_event_t event)
{
    FAKE_CALL(cuEventQuery);
    return fake.busy && fake.busy(event->stream) ? CUDA_RESULT_NOT_READY : 0;
}
static int fake_cuEventSynchronize(cuda_event_t event)
{
    FAKE_CALL(cuEventSynchronize);
    return 0;
}
static int fake_cuEventElapsedTime(float *milliseconds, cuda_event_t start, cuda_event_t end)
{
    *milliseconds = 0;
    return 0;
}
static int fake_cuGraphInstantiate(cuda_graph_exec_t *exec, cuda_graph_t graph,
                                   unsigned long long flags)
{
    FAKE_CALL(cuGraphInstantiate);
    struct cuda_graph_object copy = *graph;
    copy.launches = calloc(FAKE_LAUNCHES, sizeof(fake_launch_t));
    memcpy(copy.launches, graph->launches, graph->count * sizeof(fake_launch_t));
    return fake_graph_new(&copy, (cuda_graph_t *)exec);
}
static int fake_cuGraphUpload(cuda_graph_exec_t exec, cuda_stream_t stream)
{
    FAKE_CALL(cuGraphUpload);
    return 0;
}
static int fake_cuGraphLaunch(cuda_graph_exec_t exec, cuda_stream_t stream)
{
    FAKE_CALL(cuGraphLaunch);
    const struct cuda_graph_object *graph = (const struct cuda_graph_object *)exec;
    fake.graph_stream = stream;
    for (uint32_t i = 0; i < graph->count; i++) {
        graph->launches[i].kernel->run(&graph->launches[i]);
        if (fake.after_launch)
            fake.after_launch(&graph->launches[i]);
    }
    return 0;
}
static int fake_cuGraphDestroy(cuda_graph_t graph)
{
    free(graph->launches);
    *graph = (struct cuda_graph_object){0};
    fake.graphs--;
    return 0;
}
static int fake_cuGraphExecDestroy(cuda_graph_exec_t exec)
{
    return fake_cuGraphDestroy((cuda_graph_t)exec);
}

static const cuda_driver_t fake_driver = {
#define X(name, symbol, parameters) .name = fake_##name,
    CUDA_DRIVER_FUNCTIONS(X)
#undef X
        .version = CUDA_DRIVER_VERSION_MIN,
};

/* As dlsym would: by exported symbol. context: a symbol that is missing, or NULL. */
static inline void *fake_find(void *context, const char *symbol)
{
    if (context && !strcmp(context, symbol))
        return NULL;
#define X(name, exported, parameters)                                                              \
    if (!strcmp(symbol, #exported))                                                                \
        return *(void **)(uintptr_t)&fake_driver.name;
    CUDA_DRIVER_FUNCTIONS(X)
#undef X
    return NULL;
}

static inline void fake_reset(const fake_kernel_t *kernels, uint32_t count)
{
    memset(&fake, 0, sizeof(fake));
    fake.devices = 2;
    fake.version = CUDA_DRIVER_VERSION_MIN;
    fake.kernels = kernels;
    fake.kernel_count = count;
}

/* Live objects, but for the context. */
static inline int fake_objects(void)
{
    return fake.handles + fake.ranges + fake.mapped + fake.modules + fake.streams + fake.events +
           fake.graphs + fake.host_blocks + fake.registrations + fake.blocks;
}
#endif
