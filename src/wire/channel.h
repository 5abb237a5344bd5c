/* SPDX-License-Identifier: MIT */
/*
 * A control channel on an event loop: receives packets and calls back, queues what the socket does
 * not take at once (bounded: a peer that stops reading is dropped, it never blocks the loop).
 *
 * Belongs to one event loop thread. A callback may destroy the channel; nothing of it is touched
 * afterwards.
 */
#ifndef XPOOL_WIRE_CHANNEL_H
#define XPOOL_WIRE_CHANNEL_H

#include <event2/event.h>

#include "wire/wire.h"

#define WIRE_CHANNEL_QUEUE 512 /* packets that may wait for one peer */

typedef struct wire_channel wire_channel_t;

/* `fds` are closed after the call unless taken. */
typedef void (*wire_message_t)(void *context, wire_channel_t *channel, const xpw_Envelope *envelope,
                               wire_descriptors_t *fds);
/* The peer closed (XP_CLOSED), broke the protocol (XP_PEER) or its queue overflowed (XP_PEER).
 * Called once; the owner destroys the channel in or after it. */
typedef void (*wire_closed_t)(void *context, wire_channel_t *channel, xp_status_t status);

/* Takes ownership of `socket`. */
xp_status_t wire_channel_create(struct event_base *base, int socket, wire_message_t on_message,
                                wire_closed_t on_closed, void *context,
                                wire_channel_t **channel_out);
void wire_channel_destroy(wire_channel_t *channel); /* accepts NULL */

/* Sends or queues; descriptors are duplicated when queued, the caller keeps its own. */
xp_status_t wire_channel_send(wire_channel_t *channel, const xpw_Envelope *envelope, const int *fds,
                              uint32_t fd_count);
uint32_t wire_channel_queued(const wire_channel_t *channel);
int wire_channel_socket(const wire_channel_t *channel);
#endif
