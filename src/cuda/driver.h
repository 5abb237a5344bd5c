/* SPDX-License-Identifier: MIT */
/*
 * The CUDA driver as a table of functions, filled at run time.
 *
 * Nothing links libcuda: a program starts where there is no GPU, and cuda_driver_load() answers
 * XP_UNSUPPORTED there, an ordinary status. The types below are our own declarations of the
 * driver's binary interface, so that no toolkit is needed to build; tests/cuda/driver_abi.c
 * compares them with the toolkit's header where there is one.
 *
 * A test puts another table in the driver's place (tests/unit/cuda/fake_driver.h). The table is
 * constant after it was filled and may be used from every thread.
 */
#ifndef XPOOL_CUDA_DRIVER_H
#define XPOOL_CUDA_DRIVER_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* CUDA 13.0: the oldest driver interface that is used, as major * 1000 + minor * 10. */
#define CUDA_DRIVER_VERSION_MIN 13000
#define CUDA_DRIVER_LIBRARY     "libcuda.so.1"

typedef uint64_t cuda_address_t; /* in device address space */
typedef uint64_t cuda_memory_handle_t;
typedef struct cuda_context_object *cuda_context_t;
typedef struct cuda_module_object *cuda_module_handle_t;
typedef struct cuda_function_object *cuda_function_t;
typedef struct cuda_stream_object *cuda_stream_t;
typedef struct cuda_event_object *cuda_event_t;
typedef struct cuda_graph_object *cuda_graph_t;
typedef struct cuda_graph_exec_object *cuda_graph_exec_t;

typedef struct cuda_uuid {
    unsigned char bytes[16];
} cuda_uuid_t;
typedef struct cuda_ipc_memory {
    char reserved[64];
} cuda_ipc_memory_t;
typedef struct cuda_location {
    int32_t type, id;
} cuda_location_t;
/* One attribute of a launch; `value` is as wide as the widest. */
typedef struct cuda_allocation_properties {
    int32_t type, handle_types;
    cuda_location_t location;
    void *windows_only;
    struct {
        uint8_t compression, rdma_capable;
        uint16_t usage;
        uint8_t reserved[4];
    } flags;
} cuda_allocation_properties_t;
typedef struct cuda_access {
    cuda_location_t location;
    int32_t flags;
} cuda_access_t;

typedef struct cuda_tensor_map {
    _Alignas(128) uint64_t opaque[16];
} cuda_tensor_map_t;

enum {
    CUDA_RESULT_SUCCESS = 0,
    CUDA_RESULT_INVALID_VALUE = 1,
    CUDA_RESULT_OUT_OF_MEMORY = 2,
    CUDA_RESULT_NO_DEVICE = 100,
    CUDA_RESULT_INVALID_DEVICE = 101,
    CUDA_RESULT_NO_BINARY_FOR_GPU = 209,
    CUDA_RESULT_INVALID_HANDLE = 400,
    CUDA_RESULT_NOT_FOUND = 500,
    CUDA_RESULT_NOT_READY = 600,
    CUDA_RESULT_ILLEGAL_ADDRESS = 700,
    CUDA_RESULT_LAUNCH_FAILED = 719,
    CUDA_RESULT_NOT_SUPPORTED = 801,
    CUDA_RESULT_MPS_CONNECTION_FAILED = 805,
    CUDA_RESULT_MPS_RPC_FAILURE = 806,
    CUDA_RESULT_MPS_SERVER_NOT_READY = 807,
    CUDA_RESULT_MPS_MAX_CLIENTS = 808,
    CUDA_RESULT_MPS_MAX_CONNECTIONS = 809,
    CUDA_RESULT_MPS_CLIENT_TERMINATED = 810,
};
enum {
    CUDA_ATTRIBUTE_MULTIPROCESSORS = 16,
    CUDA_ATTRIBUTE_L2_BYTES = 38,
    CUDA_ATTRIBUTE_CAPABILITY_MAJOR = 75,
    CUDA_ATTRIBUTE_CAPABILITY_MINOR = 76,
    CUDA_ATTRIBUTE_COOPERATIVE_LAUNCH = 95,
    CUDA_ATTRIBUTE_VMM = 102,
    CUDA_ATTRIBUTE_VMM_DESCRIPTORS = 103,
    CUDA_ATTRIBUTE_MPS = 133,
};
enum {
    CUDA_FUNCTION_SHARED_BYTES = 1,
    CUDA_FUNCTION_LOCAL_BYTES = 3,
    CUDA_FUNCTION_REGISTERS = 4,
    CUDA_FUNCTION_MAX_DYNAMIC_SHARED_BYTES = 8,
};
#define CUDA_STREAM_NON_BLOCKING     1u
#define CUDA_EVENT_DISABLE_TIMING    2u
#define CUDA_HOST_ALLOC_PORTABLE     1u
#define CUDA_HOST_ALLOC_MAPPED       2u
#define CUDA_HOST_REGISTER_PORTABLE  1u
#define CUDA_HOST_REGISTER_MAPPED    2u
#define CUDA_CAPTURE_THREAD_LOCAL    1
#define CUDA_CAPTURE_RELAXED         2
#define CUDA_ALLOCATION_PINNED       1
#define CUDA_LOCATION_DEVICE         1
#define CUDA_HANDLE_DESCRIPTOR       1
#define CUDA_ACCESS_READ_WRITE       3
#define CUDA_GRANULARITY_MINIMUM     0
#define CUDA_GRANULARITY_RECOMMENDED 1
#define CUDA_LOADING_EAGER           1
#define CUDA_IPC_LAZY_PEER_ACCESS    1u
#define CUDA_MAP_UINT16              1
#define CUDA_MAP_NOT_INTERLEAVED     0
#define CUDA_MAP_SWIZZLE_128         3
#define CUDA_MAP_L2_128              2
#define CUDA_MAP_FILL_ZEROS          0

/* X(name without version, exported symbol, parameters). Every function returns a result code. */
#define CUDA_DRIVER_FUNCTIONS(X)                                                                   \
    X(cuInit, cuInit, (unsigned flags))                                                            \
    X(cuDriverGetVersion, cuDriverGetVersion, (int *version))                                      \
    X(cuGetErrorName, cuGetErrorName, (int result, const char **name))                             \
    X(cuGetErrorString, cuGetErrorString, (int result, const char **text))                         \
    X(cuDeviceGetCount, cuDeviceGetCount, (int *count))                                            \
    X(cuDeviceGet, cuDeviceGet, (int *device, int ordinal))                                        \
    X(cuDeviceGetName, cuDeviceGetName, (char *name, int bytes, int device))                       \
    X(cuDeviceGetUuid, cuDeviceGetUuid_v2, (cuda_uuid_t * uuid, int device))                       \
    X(cuDeviceGetPCIBusId, cuDeviceGetPCIBusId, (char *text, int bytes, int device))               \
    X(cuDeviceTotalMem, cuDeviceTotalMem_v2, (size_t * bytes, int device))                         \
    X(cuDeviceGetAttribute, cuDeviceGetAttribute, (int *value, int attribute, int device))         \
    X(cuDeviceCanAccessPeer, cuDeviceCanAccessPeer, (int *can, int device, int peer))              \
    X(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, (cuda_context_t * context, int device))  \
    X(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, (int device))                       \
    X(cuCtxSetCurrent, cuCtxSetCurrent, (cuda_context_t context))                                  \
    X(cuCtxGetCurrent, cuCtxGetCurrent, (cuda_context_t * context))                                \
    X(cuCtxSynchronize, cuCtxSynchronize, (void))                                                  \
    X(cuCtxGetStreamPriorityRange, cuCtxGetStreamPriorityRange, (int *least, int *greatest))       \
    X(cuModuleGetLoadingMode, cuModuleGetLoadingMode, (int *mode))                                 \
    X(cuModuleLoadData, cuModuleLoadData, (cuda_module_handle_t * module, const void *image))      \
    X(cuModuleUnload, cuModuleUnload, (cuda_module_handle_t module))                               \
    X(cuModuleGetFunction, cuModuleGetFunction,                                                    \
      (cuda_function_t * function, cuda_module_handle_t module, const char *name))                 \
    X(cuFuncLoad, cuFuncLoad, (cuda_function_t function))                                          \
    X(cuFuncGetAttribute, cuFuncGetAttribute,                                                      \
      (int *value, int attribute, cuda_function_t function))                                       \
    X(cuFuncSetAttribute, cuFuncSetAttribute,                                                      \
      (cuda_function_t function, int attribute, int value))                                        \
    X(cuOccupancyMaxActiveBlocksPerMultiprocessor, cuOccupancyMaxActiveBlocksPerMultiprocessor,    \
      (int *blocks, cuda_function_t function, int threads, size_t dynamic_shared_bytes))           \
    X(cuLaunchKernel, cuLaunchKernel,                                                              \
      (cuda_function_t function, unsigned grid_x, unsigned grid_y, unsigned grid_z,                \
       unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,                \
       cuda_stream_t stream, void **parameters, void **extra))                                     \
    X(cuLaunchCooperativeKernel, cuLaunchCooperativeKernel,                                        \
      (cuda_function_t function, unsigned grid_x, unsigned grid_y, unsigned grid_z,                \
       unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,                \
       cuda_stream_t stream, void **parameters))                                                   \
    X(cuTensorMapEncodeTiled, cuTensorMapEncodeTiled,                                              \
      (cuda_tensor_map_t * map, int type, uint32_t rank, void *address, const uint64_t *size,      \
       const uint64_t *pitch, const uint32_t *box, const uint32_t *step, int interleave,           \
       int swizzle, int l2, int fill))                                                             \
    X(cuMemAlloc, cuMemAlloc_v2, (cuda_address_t * address, size_t bytes))                         \
    X(cuMemFree, cuMemFree_v2, (cuda_address_t address))                                           \
    X(cuMemGetInfo, cuMemGetInfo_v2, (size_t * free_bytes, size_t * total_bytes))                  \
    X(cuMemHostAlloc, cuMemHostAlloc, (void **address, size_t bytes, unsigned flags))              \
    X(cuMemFreeHost, cuMemFreeHost, (void *address))                                               \
    X(cuMemHostRegister, cuMemHostRegister_v2, (void *address, size_t bytes, unsigned flags))      \
    X(cuMemHostUnregister, cuMemHostUnregister, (void *address))                                   \
    X(cuMemHostGetDevicePointer, cuMemHostGetDevicePointer_v2,                                     \
      (cuda_address_t * device_address, void *address, unsigned flags))                            \
    X(cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2,                                                     \
      (cuda_address_t to, const void *from, size_t bytes, cuda_stream_t stream))                   \
    X(cuMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2,                                                     \
      (void *to, cuda_address_t from, size_t bytes, cuda_stream_t stream))                         \
    X(cuMemcpyDtoDAsync, cuMemcpyDtoDAsync_v2,                                                     \
      (cuda_address_t to, cuda_address_t from, size_t bytes, cuda_stream_t stream))                \
    X(cuMemsetD8Async, cuMemsetD8Async,                                                            \
      (cuda_address_t to, unsigned char value, size_t count, cuda_stream_t stream))                \
    X(cuIpcGetMemHandle, cuIpcGetMemHandle, (cuda_ipc_memory_t * handle, cuda_address_t address))  \
    X(cuIpcOpenMemHandle, cuIpcOpenMemHandle_v2,                                                   \
      (cuda_address_t * address, cuda_ipc_memory_t handle, unsigned flags))                        \
    X(cuIpcCloseMemHandle, cuIpcCloseMemHandle, (cuda_address_t address))                          \
    X(cuMemGetAllocationGranularity, cuMemGetAllocationGranularity,                                \
      (size_t * bytes, const cuda_allocation_properties_t *properties, int option))                \
    X(cuMemAddressReserve, cuMemAddressReserve,                                                    \
      (cuda_address_t * address, size_t bytes, size_t alignment, cuda_address_t fixed,             \
       unsigned long long flags))                                                                  \
    X(cuMemAddressFree, cuMemAddressFree, (cuda_address_t address, size_t bytes))                  \
    X(cuMemCreate, cuMemCreate,                                                                    \
      (cuda_memory_handle_t * handle, size_t bytes,                                                \
       const cuda_allocation_properties_t *properties, unsigned long long flags))                  \
    X(cuMemRelease, cuMemRelease, (cuda_memory_handle_t handle))                                   \
    X(cuMemMap, cuMemMap,                                                                          \
      (cuda_address_t address, size_t bytes, size_t offset, cuda_memory_handle_t handle,           \
       unsigned long long flags))                                                                  \
    X(cuMemUnmap, cuMemUnmap, (cuda_address_t address, size_t bytes))                              \
    X(cuMemSetAccess, cuMemSetAccess,                                                              \
      (cuda_address_t address, size_t bytes, const cuda_access_t *access, size_t count))           \
    X(cuMemExportToShareableHandle, cuMemExportToShareableHandle,                                  \
      (void *shareable, cuda_memory_handle_t handle, int type, unsigned long long flags))          \
    X(cuMemImportFromShareableHandle, cuMemImportFromShareableHandle,                              \
      (cuda_memory_handle_t * handle, void *shareable, int type))                                  \
    X(cuStreamCreateWithPriority, cuStreamCreateWithPriority,                                      \
      (cuda_stream_t * stream, unsigned flags, int priority))                                      \
    X(cuStreamDestroy, cuStreamDestroy_v2, (cuda_stream_t stream))                                 \
    X(cuStreamSynchronize, cuStreamSynchronize, (cuda_stream_t stream))                            \
    X(cuStreamQuery, cuStreamQuery, (cuda_stream_t stream))                                        \
    X(cuStreamWaitEvent, cuStreamWaitEvent,                                                        \
      (cuda_stream_t stream, cuda_event_t event, unsigned flags))                                  \
    X(cuStreamBeginCapture, cuStreamBeginCapture_v2, (cuda_stream_t stream, int mode))             \
    X(cuStreamEndCapture, cuStreamEndCapture, (cuda_stream_t stream, cuda_graph_t * graph))        \
    X(cuStreamIsCapturing, cuStreamIsCapturing, (cuda_stream_t stream, int *capturing))            \
    X(cuThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode, (int *mode))           \
    X(cuEventCreate, cuEventCreate, (cuda_event_t * event, unsigned flags))                        \
    X(cuEventDestroy, cuEventDestroy_v2, (cuda_event_t event))                                     \
    X(cuEventRecord, cuEventRecord, (cuda_event_t event, cuda_stream_t stream))                    \
    X(cuEventQuery, cuEventQuery, (cuda_event_t event))                                            \
    X(cuEventSynchronize, cuEventSynchronize, (cuda_event_t event))                                \
    X(cuEventElapsedTime, cuEventElapsedTime_v2,                                                   \
      (float *milliseconds, cuda_event_t start, cuda_event_t end))                                 \
    X(cuGraphInstantiate, cuGraphInstantiateWithFlags,                                             \
      (cuda_graph_exec_t * exec, cuda_graph_t graph, unsigned long long flags))                    \
    X(cuGraphUpload, cuGraphUpload, (cuda_graph_exec_t exec, cuda_stream_t stream))                \
    X(cuGraphLaunch, cuGraphLaunch, (cuda_graph_exec_t exec, cuda_stream_t stream))                \
    X(cuGraphExecDestroy, cuGraphExecDestroy, (cuda_graph_exec_t exec))                            \
    X(cuGraphDestroy, cuGraphDestroy, (cuda_graph_t graph))

typedef struct cuda_driver {
#define X(name, symbol, parameters) int(*name) parameters;
    CUDA_DRIVER_FUNCTIONS(X)
#undef X
    int version; /* of the driver's interface */
} cuda_driver_t;

/* Where symbols come from: the loaded library, or a test. */
typedef struct cuda_symbols {
    void *(*find)(void *context, const char *symbol); /* NULL: not there */
    void *context;
} cuda_symbols_t;

/* The process's driver: loads libcuda.so.1 once, fills the table, initialises. Eager loading of
 * device code is asked for unless the environment says otherwise: a kernel that is loaded behind a
 * spinning one is a deadlock. XP_UNSUPPORTED, with the reason, where there is no usable driver or
 * no device; the answer is remembered. Any thread. */
xp_status_t cuda_driver_load(const cuda_driver_t **driver_out);

/* Fills `driver` from symbols and initialises it; the parts of cuda_driver_load() that a test can
 * reach. */
xp_status_t cuda_driver_fill(const cuda_symbols_t *symbols, cuda_driver_t *driver_out);

/* Status of a result code; for an error, the message names call, code and the driver's text. Out of
 * memory is XP_NO_MEMORY; not ready XP_RETRY (no message: it is an answer); an unsupported thing or
 * a missing device XP_UNSUPPORTED; a bad argument XP_INVALID; an MPS server that is not there or
 * full XP_PEER; everything that leaves the context unusable XP_FATAL; the rest XP_IO. */
xp_status_t cuda_check_at(const cuda_driver_t *driver, int result, const char *call,
                          const char *file, int line);

/* CUDA_CALL(driver, cuMemUnmap, address, bytes): calls and checks. */
#define CUDA_CALL(driver, call, ...)                                                               \
    cuda_check_at((driver), (driver)->call(__VA_ARGS__), #call, __FILE__, __LINE__)
/* For clean-up paths: the first error is already recorded, another one adds nothing. */
#define CUDA_IGNORE(driver, call, ...) ((void)(driver)->call(__VA_ARGS__))
#endif
