/* SPDX-License-Identifier: MIT */
/*
 * Our declarations of the driver's interface (src/cuda/driver.h) beside the toolkit's header:
 * sizes, offsets, constants, and that each symbol of the table is one that the header knows under
 * that name. Built where there is a toolkit; needs no GPU.
 */
#include <stdio.h>
#include <string.h>

#include "cuda/driver.h"

/* The table's symbols as strings, before the header's macros rename functions. */
static const char *const symbols[] = {
#define X(name, symbol, parameters) #symbol,
    CUDA_DRIVER_FUNCTIONS(X)
#undef X
};

#include <cuda.h>

#define SAME_SIZE(ours, theirs) _Static_assert(sizeof(ours) == sizeof(theirs), #theirs)
#define SAME_PLACE(ours, our_field, theirs, their_field)                                           \
    _Static_assert(offsetof(ours, our_field) == offsetof(theirs, their_field), #their_field)
#define SAME(ours, theirs) _Static_assert((int)(ours) == (int)(theirs), #theirs)

SAME_SIZE(cuda_address_t, CUdeviceptr);
SAME_SIZE(cuda_memory_handle_t, CUmemGenericAllocationHandle);
SAME_SIZE(cuda_context_t, CUcontext);
SAME_SIZE(cuda_uuid_t, CUuuid);
SAME_SIZE(cuda_ipc_memory_t, CUipcMemHandle);
SAME_SIZE(cuda_location_t, CUmemLocation);
SAME_PLACE(cuda_location_t, id, CUmemLocation, id);
SAME_SIZE(cuda_allocation_properties_t, CUmemAllocationProp);
SAME_PLACE(cuda_allocation_properties_t, handle_types, CUmemAllocationProp, requestedHandleTypes);
SAME_PLACE(cuda_allocation_properties_t, location, CUmemAllocationProp, location);
SAME_PLACE(cuda_allocation_properties_t, windows_only, CUmemAllocationProp, win32HandleMetaData);
SAME_PLACE(cuda_allocation_properties_t, flags, CUmemAllocationProp, allocFlags);
SAME_PLACE(cuda_allocation_properties_t, flags.usage, CUmemAllocationProp, allocFlags.usage);
SAME_SIZE(cuda_access_t, CUmemAccessDesc);
SAME_PLACE(cuda_access_t, flags, CUmemAccessDesc, flags);
SAME_SIZE(int, CUdevice);
SAME_SIZE(int, CUresult);

SAME(CUDA_RESULT_INVALID_VALUE, CUDA_ERROR_INVALID_VALUE);
SAME(CUDA_RESULT_OUT_OF_MEMORY, CUDA_ERROR_OUT_OF_MEMORY);
SAME(CUDA_RESULT_NO_DEVICE, CUDA_ERROR_NO_DEVICE);
SAME(CUDA_RESULT_INVALID_DEVICE, CUDA_ERROR_INVALID_DEVICE);
SAME(CUDA_RESULT_NO_BINARY_FOR_GPU, CUDA_ERROR_NO_BINARY_FOR_GPU);
SAME(CUDA_RESULT_INVALID_HANDLE, CUDA_ERROR_INVALID_HANDLE);
SAME(CUDA_RESULT_NOT_FOUND, CUDA_ERROR_NOT_FOUND);
SAME(CUDA_RESULT_NOT_READY, CUDA_ERROR_NOT_READY);
SAME(CUDA_RESULT_ILLEGAL_ADDRESS, CUDA_ERROR_ILLEGAL_ADDRESS);
SAME(CUDA_RESULT_LAUNCH_FAILED, CUDA_ERROR_LAUNCH_FAILED);
SAME(CUDA_RESULT_NOT_SUPPORTED, CUDA_ERROR_NOT_SUPPORTED);
SAME(CUDA_RESULT_MPS_CONNECTION_FAILED, CUDA_ERROR_MPS_CONNECTION_FAILED);
SAME(CUDA_RESULT_MPS_RPC_FAILURE, CUDA_ERROR_MPS_RPC_FAILURE);
SAME(CUDA_RESULT_MPS_SERVER_NOT_READY, CUDA_ERROR_MPS_SERVER_NOT_READY);
SAME(CUDA_RESULT_MPS_MAX_CLIENTS, CUDA_ERROR_MPS_MAX_CLIENTS_REACHED);
SAME(CUDA_RESULT_MPS_MAX_CONNECTIONS, CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED);
SAME(CUDA_RESULT_MPS_CLIENT_TERMINATED, CUDA_ERROR_MPS_CLIENT_TERMINATED);
SAME(CUDA_ATTRIBUTE_MULTIPROCESSORS, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
SAME(CUDA_ATTRIBUTE_L2_BYTES, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
SAME(CUDA_ATTRIBUTE_CAPABILITY_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
SAME(CUDA_ATTRIBUTE_CAPABILITY_MINOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
SAME(CUDA_ATTRIBUTE_COOPERATIVE_LAUNCH, CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH);
SAME(CUDA_ATTRIBUTE_VMM, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
SAME(CUDA_ATTRIBUTE_VMM_DESCRIPTORS,
     CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
SAME(CUDA_ATTRIBUTE_MPS, CU_DEVICE_ATTRIBUTE_MPS_ENABLED);
SAME(CUDA_FUNCTION_SHARED_BYTES, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES);
SAME(CUDA_FUNCTION_LOCAL_BYTES, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES);
SAME(CUDA_FUNCTION_REGISTERS, CU_FUNC_ATTRIBUTE_NUM_REGS);
SAME(CUDA_FUNCTION_MAX_DYNAMIC_SHARED_BYTES, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
SAME(CUDA_STREAM_NON_BLOCKING, CU_STREAM_NON_BLOCKING);
SAME(CUDA_EVENT_DISABLE_TIMING, CU_EVENT_DISABLE_TIMING);
SAME(CUDA_HOST_ALLOC_PORTABLE, CU_MEMHOSTALLOC_PORTABLE);
SAME(CUDA_HOST_ALLOC_MAPPED, CU_MEMHOSTALLOC_DEVICEMAP);
SAME(CUDA_HOST_REGISTER_PORTABLE, CU_MEMHOSTREGISTER_PORTABLE);
SAME(CUDA_HOST_REGISTER_MAPPED, CU_MEMHOSTREGISTER_DEVICEMAP);
SAME(CUDA_CAPTURE_THREAD_LOCAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
SAME(CUDA_CAPTURE_RELAXED, CU_STREAM_CAPTURE_MODE_RELAXED);
SAME(CUDA_ALLOCATION_PINNED, CU_MEM_ALLOCATION_TYPE_PINNED);
SAME(CUDA_LOCATION_DEVICE, CU_MEM_LOCATION_TYPE_DEVICE);
SAME(CUDA_HANDLE_DESCRIPTOR, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
SAME(CUDA_ACCESS_READ_WRITE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
SAME(CUDA_GRANULARITY_MINIMUM, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
SAME(CUDA_GRANULARITY_RECOMMENDED, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
SAME(CUDA_LOADING_EAGER, CU_MODULE_EAGER_LOADING);
SAME(CUDA_IPC_LAZY_PEER_ACCESS, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);

#define TEXT(name)  TEXT_(name)
#define TEXT_(name) #name
static const char *const header_symbols[] = {
#define X(name, symbol, parameters) TEXT(name),
    CUDA_DRIVER_FUNCTIONS(X)
#undef X
};

/* What the header's names stand for is what the table loads. */
int main(void)
{
    int wrong = 0;
    for (size_t i = 0; i < sizeof(symbols) / sizeof(symbols[0]); i++)
        if (strcmp(symbols[i], header_symbols[i]) != 0) {
            printf("the table loads %s, the header means %s\n", symbols[i], header_symbols[i]);
            wrong = 1;
        }
    return wrong;
}
