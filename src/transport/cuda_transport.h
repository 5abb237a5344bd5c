/* SPDX-License-Identifier: MIT */
/*
 * Transport on a CUDA device: the same mailbox (transport/mailbox.h), in device memory.
 *
 * The arena is one VMM allocation on the attention GPU, made by the Instance and passed by
 * descriptor: Instance -> daemon -> AtnAgent, which maps it on the same GPU. put, wait and take are
 * launches on the caller's stream and never touch the host, so eager calls and a captured outer
 * graph behave alike. Kernels poll device memory only, but for the life word
 * (transport/cuda_life.h).
 *
 * Where kernels spin: no legacy default stream, no synchronising allocation, no module load. So
 * everything is taken by the create calls, before the first kernel runs.
 */
#ifndef XPOOL_TRANSPORT_CUDA_TRANSPORT_H
#define XPOOL_TRANSPORT_CUDA_TRANSPORT_H

#include "cuda/stream.h"
#include "cuda/vmm.h"
#include "transport/cuda_device.h"
#include "transport/transport.h"

/* The page of life words as kernels see it, and this process's word. One a process; all zero =
 * none. */
typedef struct transport_cuda_life {
    const cuda_device_t *device;
    life_page_t *page;
    cuda_address_t address;
    uint32_t index;
    transport_life_hold_t *hold;
} transport_cuda_life_t;
/* Maps and registers the page, and holds word `index`. */
xp_status_t transport_cuda_life_open(const cuda_device_t *device, int life_fd, uint32_t index,
                                     transport_cuda_life_t *life_out);
/* The address of this process's word. */
cuda_address_t transport_cuda_life_word(const transport_cuda_life_t *life);
void transport_cuda_life_close(transport_cuda_life_t *life); /* no kernel of ours may run */

/* Bytes of device memory that an arena takes; they are charged to the attention device. */
uint64_t transport_cuda_arena_bytes(const cuda_device_t *device,
                                    const transport_geometry_t *geometry);

/* The same before it is rounded up to the device's granularity: a pure function. */
uint64_t transport_cuda_plain_bytes(const transport_geometry_t *geometry);
/* Where the areas lie; of the partials: the first, and from one to the next. */
uint64_t transport_cuda_input_offset(const transport_geometry_t *geometry);
uint64_t transport_cuda_output_offset(const transport_geometry_t *geometry);
uint64_t transport_cuda_partial_offset(const transport_geometry_t *geometry);
uint64_t transport_cuda_partial_bytes(const transport_geometry_t *geometry);

/* ---- Instance side: one thread at a time ------------------------------------------------ */
typedef struct transport_cuda_client transport_cuda_client_t;

/* limit_ns: of one wait, but for pauses; pause_ns: of one pause. Pauses included, no wait is longer
 * than TRANSPORT_WAIT_MAX_NS. dtype BF16 or F16. */
xp_status_t transport_cuda_client_create(const cuda_device_t *device,
                                         const transport_geometry_t *geometry,
                                         const transport_cuda_life_t *life, uint64_t limit_ns,
                                         uint64_t pause_ns, transport_cuda_client_t **client_out);
/* Closes the arena first. The caller's streams must be idle. Accepts NULL. */
void transport_cuda_client_destroy(transport_cuda_client_t *client);
/* A descriptor of the arena, the caller's. */
xp_status_t transport_cuda_client_export(const transport_cuda_client_t *client, int *fd_out);

/* Device memory of the record that the kernels read the live rows from. A captured graph is
 * replayed after transport_cuda_client_live_write() on the same stream, or after the caller wrote
 * it itself. */
cuda_address_t transport_cuda_client_live(const transport_cuda_client_t *client);
xp_status_t transport_cuda_client_live_write(transport_cuda_client_t *client,
                                             const transport_live_t *live, cuda_stream_t stream);

/* Launches on `stream`, also while it captures. The tensor's rows are the capacity of this launch;
 * the live rows are read on the device, and rows past them never travel. XP_INVALID with nothing
 * launched when layer or tensor is wrong. live: 0 = the client's own record. */
xp_status_t transport_cuda_client_put(transport_cuda_client_t *client, uint32_t layer,
                                      cuda_address_t live, const transport_tensor_t *input,
                                      cuda_stream_t stream);
xp_status_t transport_cuda_client_wait(transport_cuda_client_t *client, cuda_stream_t stream);
xp_status_t transport_cuda_client_take(transport_cuda_client_t *client,
                                       const transport_tensor_t *output, cuda_stream_t stream);
/* put + wait + take; both tensors are checked before anything is launched. A single launch where
 * one block moves the rows (16 KiB), as in decoding. */
xp_status_t transport_cuda_client_call(transport_cuda_client_t *client, uint32_t layer,
                                       cuda_address_t live, const transport_tensor_t *input,
                                       const transport_tensor_t *output, cuda_stream_t stream);

/* The verdict of the passes so far; call it when the stream that carried them is idle. Not XP_OK:
 * the outputs since are not to be used. After an answered error (XP_INVALID, XP_UNSUPPORTED,
 * XP_RETRY) the client goes on with the next pass; every other status is its end. */
xp_status_t transport_cuda_client_finish(transport_cuda_client_t *client, uint64_t deadline_ns);
xp_status_t transport_cuda_client_state(transport_cuda_client_t *client, uint64_t deadline_ns,
                                        transport_device_state_t *state_out);
/* Terminal, also while a wait of ours spins. */
xp_status_t transport_cuda_client_close(transport_cuda_client_t *client, xp_status_t reason);

/* Not only by the thread that uses the client: no launch, no call on the driver. A pause begins or
 * ends (by one thread): nobody answers, and waits go on for pause_ns. The end is for good: waits
 * return with `reason` (not XP_OK), also while nothing can be launched; the first one stays. */
void transport_cuda_client_pause(transport_cuda_client_t *client, bool paused);
void transport_cuda_client_end(transport_cuda_client_t *client, xp_status_t reason);

/* For module stage, whose launches take the place of put, wait and take on the same arena. */
typedef struct transport_cuda_parts {
    cuda_address_t arena, state;
    transport_patience_t patience;
} transport_cuda_parts_t;
transport_cuda_parts_t transport_cuda_client_parts(const transport_cuda_client_t *client);
/* The checks that put and take make; input and output may be NULL. */
xp_status_t transport_cuda_client_check(const transport_cuda_client_t *client, uint32_t layer,
                                        const transport_tensor_t *input,
                                        const transport_tensor_t *output);

/* ---- AtnAgent side: one thread ------------------------------------------------------------ */
typedef struct transport_cuda_server transport_cuda_server_t;

/* Launches the resident kernel `function` (transport/cuda_resident.cuh) with `slots` slots and the
 * handler's context. */
xp_status_t transport_cuda_server_create(const cuda_device_t *device,
                                         const transport_cuda_life_t *life, uint32_t slots,
                                         cuda_function_t function, cuda_address_t context,
                                         transport_cuda_server_t **server_out);
/* Maps a received arena and hands it to a warp; life_index: the Instance's word. Checks magic, ABI
 * and geometry: XP_PEER. XP_NO_MEMORY when no slot is free. */
xp_status_t transport_cuda_server_attach(transport_cuda_server_t *server, int arena_fd,
                                         const transport_geometry_t *expected, uint32_t life_index,
                                         uint64_t deadline_ns, uint32_t *slot_out);
/* The slot that the next attach takes, for a handler that has to know of it before. XP_NO_MEMORY
 * when none is free. */
xp_status_t transport_cuda_server_next(const transport_cuda_server_t *server, uint32_t *slot_out);
/* Compares the header of an arena, read from device memory, with what was planned: XP_PEER. */
xp_status_t transport_cuda_header_check(const mailbox_arena_t *header,
                                        const transport_geometry_t *expected);
/* The header of a fresh arena. */
mailbox_arena_t transport_cuda_header(const transport_geometry_t *geometry);
/* The last answer in an arena that is not attached. XP_PEER: not what was planned. */
xp_status_t transport_cuda_server_look(transport_cuda_server_t *server, int arena_fd,
                                       const transport_geometry_t *expected, uint64_t deadline_ns,
                                       uint64_t *answered_out);
/* Hands the answer in `ahead` on to `behind`, which waits for just that one and whose warp is not
 * there yet; `ahead` may be on another GPU, and have its warp. XP_PEER: nothing of that waits. */
xp_status_t transport_cuda_server_carry(transport_cuda_server_t *server, int ahead_fd,
                                        int behind_fd, const transport_geometry_t *expected,
                                        uint64_t deadline_ns);
/* Takes the arena from its warp, with what is in flight there, and unmaps it. */
xp_status_t transport_cuda_server_detach(transport_cuda_server_t *server, uint32_t slot,
                                         uint64_t deadline_ns);
/* Terminal close of a slot's arena. */
xp_status_t transport_cuda_server_close(transport_cuda_server_t *server, uint32_t slot,
                                        xp_status_t reason);
typedef struct transport_cuda_report {
    uint32_t now;       /* transport_slot_state_t */
    xp_status_t reason; /* when dropped */
    uint64_t requests, rows;
    /* As it was attached: the last answer in the arena, and whether a request was open then. */
    uint64_t found_answered;
    bool found_open;
} transport_cuda_report_t;
xp_status_t transport_cuda_server_report(transport_cuda_server_t *server, uint32_t slot,
                                         uint64_t deadline_ns, transport_cuda_report_t *report_out);
/* Ends the resident kernel; XP_TIMEOUT when it has not left by the deadline. */
xp_status_t transport_cuda_server_stop(transport_cuda_server_t *server, uint64_t deadline_ns);
/* Stops (within a second) and frees. Accepts NULL. Arenas stay open: they are the Instances'. */
void transport_cuda_server_destroy(transport_cuda_server_t *server);
#endif
