/* SPDX-License-Identifier: MIT */
/*
 * Streams, events, graphs and host memory that the device sees.
 *
 * All streams are non-blocking: the legacy default stream waits for every other one, and a spinning
 * kernel would never let it go. Waits have a deadline and sleep in between; the driver's own
 * synchronising calls have none.
 */
#ifndef XPOOL_CUDA_STREAM_H
#define XPOOL_CUDA_STREAM_H

#include "base/clock.h"
#include "cuda/device.h"

/* urgent: the device's highest priority, else the lowest. */
xp_status_t cuda_stream_create(const cuda_device_t *device, bool urgent, cuda_stream_t *stream_out);
void cuda_stream_destroy(const cuda_device_t *device, cuda_stream_t stream); /* accepts NULL */
/* Until everything queued on the stream has ended, or deadline_ns of `clock` (XP_TIMEOUT). */
xp_status_t cuda_stream_wait(const cuda_device_t *device, cuda_stream_t stream,
                             const xp_clock_t *clock, uint64_t deadline_ns);

xp_status_t cuda_event_create(const cuda_device_t *device, bool timing, cuda_event_t *event_out);
/* Until what was queued before the event has ended; else as cuda_stream_wait(). */
xp_status_t cuda_event_wait(const cuda_device_t *device, cuda_event_t event,
                            const xp_clock_t *clock, uint64_t deadline_ns);
void cuda_event_destroy(const cuda_device_t *device, cuda_event_t event); /* accepts NULL */

/* Capture of what is queued on `stream` between begin and end, for this thread only. A capture that
 * failed in between is ended too, and reported by cuda_capture_end(). */
xp_status_t cuda_capture_begin(const cuda_device_t *device, cuda_stream_t stream);
xp_status_t cuda_capture_end(const cuda_device_t *device, cuda_stream_t stream,
                             cuda_graph_exec_t *exec_out);
xp_status_t cuda_graph_launch(const cuda_device_t *device, cuda_graph_exec_t exec,
                              cuda_stream_t stream);
void cuda_graph_destroy(const cuda_device_t *device, cuda_graph_exec_t exec); /* accepts NULL */

/* Pinned host memory; never while kernels spin, the call may wait for the device. */
xp_status_t cuda_host_alloc(const cuda_device_t *device, uint64_t bytes, void **address_out);
void cuda_host_free(const cuda_device_t *device, void *address); /* accepts NULL */

/* Makes host pages (a mapped memfd) visible to the device, at device_address_out. */
xp_status_t cuda_host_register(const cuda_device_t *device, void *address, uint64_t bytes,
                               cuda_address_t *device_address_out);
void cuda_host_unregister(const cuda_device_t *device, void *address);
#endif
