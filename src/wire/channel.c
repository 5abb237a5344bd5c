/* SPDX-License-Identifier: MIT */
/* A control channel on an event loop; runs on that loop's thread only. */
#include "wire/channel.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHANNEL_MAGIC 0x4e484357u /* "WCHN" */
#define CHANNEL_BURST 64 /* packets handled in one wake-up, so that no peer starves others */

typedef struct queued_packet {
    struct queued_packet *next;
    xpw_Envelope envelope;
    int fds[WIRE_MAX_DESCRIPTORS];
    uint32_t fd_count;
} queued_packet_t;

struct wire_channel {
    uint32_t magic;
    int socket;
    struct event *readable, *writable;
    wire_message_t on_message;
    wire_closed_t on_closed;
    void *context;
    queued_packet_t *first, *last;
    uint32_t queued;
    bool closed;
    bool overflowed;
    bool in_callback, doomed; /* a callback may destroy the channel: freed when it returns */
};

static void packet_free(queued_packet_t *packet)
{
    for (uint32_t i = 0; i < packet->fd_count; i++)
        close(packet->fds[i]);
    free(packet);
}

static void channel_report_closed(wire_channel_t *channel, xp_status_t status)
{
    if (channel->closed)
        return;
    channel->closed = true;
    event_del(channel->readable);
    event_del(channel->writable);
    channel->on_closed(channel->context, channel, status);
}

static void channel_readable(evutil_socket_t socket, short events, void *argument)
{
    wire_channel_t *channel = argument;
    XP_ASSERT(channel->magic == CHANNEL_MAGIC);
    channel->in_callback = true;
    if (channel->overflowed && !channel->closed)
        channel_report_closed(
            channel,
            xp_fail(XP_PEER, "the peer does not read: %u messages wait for it", channel->queued));
    for (int i = 0; i < CHANNEL_BURST && !channel->closed; i++) {
        xpw_Envelope envelope;
        wire_descriptors_t fds = {.count = 0};
        xp_status_t status = wire_receive(socket, &envelope, &fds);
        if (status == XP_RETRY)
            break;
        if (status != XP_OK) {
            channel_report_closed(channel, status);
            break;
        }
        channel->on_message(channel->context, channel, &envelope, &fds);
        wire_descriptors_close(&fds);
    }
    channel->in_callback = false;
    if (channel->doomed)
        wire_channel_destroy(channel);
}

static void channel_drop_queue(wire_channel_t *channel)
{
    while (channel->first) {
        queued_packet_t *packet = channel->first;
        channel->first = packet->next;
        packet_free(packet);
    }
    channel->last = NULL;
    channel->queued = 0;
}

static void channel_writable(evutil_socket_t socket, short events, void *argument)
{
    wire_channel_t *channel = argument;
    XP_ASSERT(channel->magic == CHANNEL_MAGIC);
    while (channel->first) {
        queued_packet_t *packet = channel->first;
        xp_status_t status = wire_send(socket, &packet->envelope, packet->fds, packet->fd_count);
        if (status == XP_RETRY)
            return;
        if (status != XP_OK) {
            /* Nobody will read the rest. The reading side first hands on what the peer still said,
             * then reports the end. */
            channel_drop_queue(channel);
            break;
        }
        channel->first = packet->next;
        if (!channel->first)
            channel->last = NULL;
        channel->queued--;
        packet_free(packet);
    }
    event_del(channel->writable);
}

xp_status_t wire_channel_create(struct event_base *base, int socket, wire_message_t on_message,
                                wire_closed_t on_closed, void *context,
                                wire_channel_t **channel_out)
{
    wire_channel_t *channel = calloc(1, sizeof(*channel));
    if (!channel)
        return xp_fail(XP_NO_MEMORY, "no memory for a control channel");
    channel->magic = CHANNEL_MAGIC;
    channel->socket = socket;
    channel->on_message = on_message;
    channel->on_closed = on_closed;
    channel->context = context;
    channel->readable = event_new(base, socket, EV_READ | EV_PERSIST, channel_readable, channel);
    channel->writable = event_new(base, socket, EV_WRITE | EV_PERSIST, channel_writable, channel);
    if (!channel->readable || !channel->writable || event_add(channel->readable, NULL) != 0) {
        channel->socket = -1; /* stays the caller's on failure */
        wire_channel_destroy(channel);
        return xp_fail(XP_NO_MEMORY, "no memory for a control channel's events");
    }
    *channel_out = channel;
    return XP_OK;
}

void wire_channel_destroy(wire_channel_t *channel)
{
    if (!channel)
        return;
    XP_ASSERT(channel->magic == CHANNEL_MAGIC);
    if (channel->in_callback) {
        channel->closed = true;
        channel->doomed = true;
        return;
    }
    if (channel->readable)
        event_free(channel->readable);
    if (channel->writable)
        event_free(channel->writable);
    channel_drop_queue(channel);
    if (channel->socket >= 0)
        close(channel->socket);
    channel->magic = 0;
    free(channel);
}

static xp_status_t channel_queue(wire_channel_t *channel, const xpw_Envelope *envelope,
                                 const int *fds, uint32_t fd_count)
{
    if (channel->queued >= WIRE_CHANNEL_QUEUE) {
        /* Reported from the loop, so that a sender never finds its peer gone under its hands. */
        channel->overflowed = true;
        event_active(channel->readable, EV_READ, 0);
        return xp_fail(XP_PEER, "the peer does not read: %u messages wait for it", channel->queued);
    }
    queued_packet_t *packet = calloc(1, sizeof(*packet));
    if (!packet)
        return xp_fail(XP_NO_MEMORY, "no memory to queue a message");
    packet->envelope = *envelope;
    for (uint32_t i = 0; i < fd_count; i++) {
        int copy = fcntl(fds[i], F_DUPFD_CLOEXEC, 3);
        if (copy < 0) {
            packet_free(packet);
            return xp_fail_errno(XP_IO, "cannot duplicate a descriptor");
        }
        packet->fds[packet->fd_count++] = copy;
    }
    if (channel->last)
        channel->last->next = packet;
    else
        channel->first = packet;
    channel->last = packet;
    channel->queued++;
    event_add(channel->writable, NULL);
    return XP_OK;
}

xp_status_t wire_channel_send(wire_channel_t *channel, const xpw_Envelope *envelope, const int *fds,
                              uint32_t fd_count)
{
    XP_ASSERT(channel->magic == CHANNEL_MAGIC);
    if (channel->closed)
        return XP_CLOSED;
    if (!channel->first) {
        xp_status_t status = wire_send(channel->socket, envelope, fds, fd_count);
        if (status != XP_RETRY)
            return status;
    }
    return channel_queue(channel, envelope, fds, fd_count);
}

uint32_t wire_channel_queued(const wire_channel_t *channel)
{
    return channel->queued;
}

int wire_channel_socket(const wire_channel_t *channel)
{
    return channel->socket;
}
