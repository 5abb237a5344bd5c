/* SPDX-License-Identifier: MIT */
/*
 * The CUDA side of an Instance Rank: device, life word, arena, stages, and the launches of its FFN
 * calls. Links no CUDA: the driver's table is loaded by the first rank on a GPU.
 *
 * Made by the thread that opens the rank; then the library's loop thread takes the messages and
 * looks, and the engine's thread launches. What both use is under the object's lock, which nobody
 * holds while waiting for the engine's streams.
 */
#ifndef XPOOL_LIBRARY_DEVICE_H
#define XPOOL_LIBRARY_DEVICE_H

#include <stdbool.h>

#include "base/status.h"
#include "cuda/device.h"
#include "wire/wire.h"
#include "xpool/xpool.h"

typedef struct library_device library_device_t;

/* Opens device `ordinal`, as this process sees it; the calling thread's current context stays what
 * it is. XP_UNSUPPORTED where there is no usable driver. */
xp_status_t library_device_create(int ordinal, library_device_t **device_out);
/* Closes the arena first. The engine's streams must be idle. Accepts NULL. */
void library_device_destroy(library_device_t *device);
/* Once, on the loop thread: the device is current there, and captures of other threads do not
 * forbid it anything. */
xp_status_t library_device_use(library_device_t *device);

const cuda_device_t *library_device_cuda(const library_device_t *device);
/* Makes the device current for the calling thread; what was so before comes back by leave. */
xp_status_t library_context_enter(const cuda_device_t *device, cuda_context_t *before_out);
void library_context_leave(const cuda_device_t *device, cuda_context_t before);

/* DevicePlane, with the page of life words and the plan. */
xp_status_t library_device_plane(library_device_t *device, const xpw_DevicePlane *plane,
                                 const wire_descriptors_t *fds);
/* Admitted: makes the arena; its descriptor is the caller's. patience_ns: of one wait. */
xp_status_t library_device_admit(library_device_t *device, const xpw_Admitted *admitted,
                                 uint32_t rank, uint64_t patience_ns, xpw_ArenaOffer *offer_out,
                                 int *arena_fd_out);
/* StageGrant. */
xp_status_t library_device_stage(library_device_t *device, const xpw_StageGrant *grant,
                                 const wire_descriptors_t *fds);

/* Queues the FFN of one layer on the caller's stream; `call` is checked but for its tensors. */
xp_status_t library_device_ffn(library_device_t *device, const xpool_ffn_call_t *call);
/* Writes the record of live rows on the stream (NULL: only tells where it is). */
xp_status_t library_device_live(library_device_t *device, const xpool_live_t *live,
                                uint64_t *record_out);
/* The verdict of what was queued so far and has run; XP_RETRY: the device does not tell now. */
xp_status_t library_device_finish(library_device_t *device, uint64_t deadline_ns);
/* Remembers on the stream how what it carried before has ended; no wait. `mark_out`: its number. */
xp_status_t library_device_mark(library_device_t *device, void *stream, uint64_t *mark_out);
/* What the mark says; XP_RETRY: the stream has not passed it yet. Not XP_OK: as _finish, which
 * `deadline_ns` is for. */
xp_status_t library_device_look(library_device_t *device, uint64_t mark, uint64_t deadline_ns);
/* Since library_device_count_anew(). Executed calls are known to the device alone. */
typedef struct library_device_counts {
    uint64_t eager_decode, eager_prefill; /* queued outside captures */
    uint64_t captured;                    /* queued into captures; all there were */
    uint64_t replayed;                    /* executed by replayed graphs */
    uint64_t calls, rows;                 /* eager and replayed ones; live rows in them */
    uint64_t wait_ns;                     /* of kernels, for answers */
} library_device_counts_t;
/* What the device does not tell until the deadline is what it told last. */
void library_device_counts(library_device_t *device, uint64_t deadline_ns,
                           library_device_counts_t *counts_out);
xp_status_t library_device_count_anew(library_device_t *device, uint64_t deadline_ns);
/* Terminal: kernels that wait in the arena end. Also on an object without one. */
void library_device_close(library_device_t *device, xp_status_t reason);
/* The loop thread's. A pause begins (false: there is none, the Generation's end is the Instance's)
 * or ends (false: there was none). Requests stay open in it. */
bool library_device_pause(library_device_t *device, bool paused);
bool library_device_paused(const library_device_t *device);
#endif
