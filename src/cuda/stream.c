/* SPDX-License-Identifier: MIT */
/* Thin over the driver; the only loop is the bounded wait. */
#include "cuda/stream.h"

/* A wait looks this often first, then sleeps this long between looks. */
#define STREAM_WAIT_LOOKS    2000
#define STREAM_WAIT_SLEEP_NS (100 * XP_NS_PER_US)

xp_status_t cuda_stream_create(const cuda_device_t *device, bool urgent, cuda_stream_t *stream_out)
{
    int least, greatest;
    XP_TRY(CUDA_CALL(device->driver, cuCtxGetStreamPriorityRange, &least, &greatest));
    return CUDA_CALL(device->driver, cuStreamCreateWithPriority, stream_out,
                     CUDA_STREAM_NON_BLOCKING, urgent ? greatest : least);
}

void cuda_stream_destroy(const cuda_device_t *device, cuda_stream_t stream)
{
    if (stream)
        CUDA_IGNORE(device->driver, cuStreamDestroy, stream);
}

/* Of the event, or of everything on the stream. */
static xp_status_t wait_until(const cuda_device_t *device, cuda_stream_t stream, cuda_event_t event,
                              const xp_clock_t *clock, uint64_t deadline_ns)
{
    for (uint32_t looks = 0;; looks++) {
        xp_status_t status = event ? CUDA_CALL(device->driver, cuEventQuery, event)
                                   : CUDA_CALL(device->driver, cuStreamQuery, stream);
        if (status != XP_RETRY)
            return status;
        if (xp_clock_now_ns(clock) >= deadline_ns)
            return xp_fail(XP_TIMEOUT, "work on cuda:%d did not end before its deadline",
                           device->ordinal);
        if (looks >= STREAM_WAIT_LOOKS) {
            struct timespec pause = {.tv_nsec = STREAM_WAIT_SLEEP_NS};
            nanosleep(&pause, NULL);
        }
    }
}

xp_status_t cuda_stream_wait(const cuda_device_t *device, cuda_stream_t stream,
                             const xp_clock_t *clock, uint64_t deadline_ns)
{
    return wait_until(device, stream, NULL, clock, deadline_ns);
}

xp_status_t cuda_event_wait(const cuda_device_t *device, cuda_event_t event,
                            const xp_clock_t *clock, uint64_t deadline_ns)
{
    return wait_until(device, NULL, event, clock, deadline_ns);
}

xp_status_t cuda_event_create(const cuda_device_t *device, bool timing, cuda_event_t *event_out)
{
    return CUDA_CALL(device->driver, cuEventCreate, event_out,
                     timing ? 0 : CUDA_EVENT_DISABLE_TIMING);
}

void cuda_event_destroy(const cuda_device_t *device, cuda_event_t event)
{
    if (event)
        CUDA_IGNORE(device->driver, cuEventDestroy, event);
}

xp_status_t cuda_capture_begin(const cuda_device_t *device, cuda_stream_t stream)
{
    return CUDA_CALL(device->driver, cuStreamBeginCapture, stream, CUDA_CAPTURE_THREAD_LOCAL);
}

xp_status_t cuda_capture_end(const cuda_device_t *device, cuda_stream_t stream,
                             cuda_graph_exec_t *exec_out)
{
    cuda_graph_t graph = NULL;
    xp_status_t status = CUDA_CALL(device->driver, cuStreamEndCapture, stream, &graph);
    if (status == XP_OK)
        status = CUDA_CALL(device->driver, cuGraphInstantiate, exec_out, graph, 0);
    /* The executable does not need the graph it was made from. */
    if (graph)
        CUDA_IGNORE(device->driver, cuGraphDestroy, graph);
    return status;
}

xp_status_t cuda_graph_launch(const cuda_device_t *device, cuda_graph_exec_t exec,
                              cuda_stream_t stream)
{
    return CUDA_CALL(device->driver, cuGraphLaunch, exec, stream);
}

void cuda_graph_destroy(const cuda_device_t *device, cuda_graph_exec_t exec)
{
    if (exec)
        CUDA_IGNORE(device->driver, cuGraphExecDestroy, exec);
}

xp_status_t cuda_host_alloc(const cuda_device_t *device, uint64_t bytes, void **address_out)
{
    return CUDA_CALL(device->driver, cuMemHostAlloc, address_out, bytes,
                     CUDA_HOST_ALLOC_PORTABLE | CUDA_HOST_ALLOC_MAPPED);
}

void cuda_host_free(const cuda_device_t *device, void *address)
{
    if (address)
        CUDA_IGNORE(device->driver, cuMemFreeHost, address);
}

xp_status_t cuda_host_register(const cuda_device_t *device, void *address, uint64_t bytes,
                               cuda_address_t *device_address_out)
{
    XP_TRY(CUDA_CALL(device->driver, cuMemHostRegister, address, bytes,
                     CUDA_HOST_REGISTER_PORTABLE | CUDA_HOST_REGISTER_MAPPED));
    xp_status_t status =
        CUDA_CALL(device->driver, cuMemHostGetDevicePointer, device_address_out, address, 0);
    if (status != XP_OK)
        CUDA_IGNORE(device->driver, cuMemHostUnregister, address);
    return status;
}

void cuda_host_unregister(const cuda_device_t *device, void *address)
{
    CUDA_IGNORE(device->driver, cuMemHostUnregister, address);
}
