/* SPDX-License-Identifier: MIT */
/*
 * Framing and sockets of the control channel.
 *
 * One packet of a Unix SOCK_SEQPACKET socket is one Envelope; up to WIRE_MAX_DESCRIPTORS file
 * descriptors travel with it by SCM_RIGHTS. Every received descriptor that the caller does not take
 * is closed. Messages are validated by nanopb against the schema's fixed maxima, so nothing a peer
 * sends can grow past WIRE_MAX_BYTES.
 */
#ifndef XPOOL_WIRE_WIRE_H
#define XPOOL_WIRE_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/status.h"
#include "wire/messages.pb.h"

#define WIRE_ABI             5u
#define WIRE_MAX_DESCRIPTORS 8
#define WIRE_MAX_BYTES       16384

typedef enum wire_backend_state {
    WIRE_BACKEND_STARTING = 0,
    WIRE_BACKEND_UP,
    WIRE_BACKEND_DOWN,
} wire_backend_state_t;

typedef struct wire_descriptors {
    int fds[WIRE_MAX_DESCRIPTORS];
    uint32_t count;
} wire_descriptors_t;

/* A listening socket at `path`. Takes over a stale path: `path`.lock is held with flock for as long
 * as the returned lock descriptor is open, so only one daemon can own the path, and whoever holds
 * the lock may replace what a killed predecessor left. Creates missing parent folders with mode
 * 0700. */
xp_status_t wire_listen(const char *path, int *socket_out, int *lock_out);
/* The same in two steps: the path is ours, and nobody can connect before the second one. */
xp_status_t wire_claim(const char *path, int *lock_out);
xp_status_t wire_open(const char *path, int *socket_out);
/* Removes the path if it is still ours, then closes both; -1: claimed, not open. */
void wire_unlisten(const char *path, int socket, int lock);

/* Connects; XP_RETRY when nobody listens (yet), XP_IO otherwise. The socket is non-blocking. */
xp_status_t wire_connect(const char *path, int *socket_out);
/* Pid and uid of the peer (SO_PEERCRED). */
xp_status_t wire_peer(int socket, pid_t *pid_out, uid_t *uid_out);

/* One packet. XP_RETRY: the socket would block. XP_CLOSED: the peer is gone. */
xp_status_t wire_send(int socket, const xpw_Envelope *envelope, const int *fds, uint32_t fd_count);
/* XP_RETRY: nothing there. XP_CLOSED: end of stream. XP_PEER: not a message of this schema. */
xp_status_t wire_receive(int socket, xpw_Envelope *envelope_out, wire_descriptors_t *fds_out);
void wire_descriptors_close(wire_descriptors_t *fds);
/* Takes descriptor `index` out (the caller owns it then); -1 when absent. */
int wire_descriptors_take(wire_descriptors_t *fds, uint32_t index);

/* Decodes one packet's bytes (fuzz target and wire_receive). */
xp_status_t wire_decode(const void *bytes, size_t length, xpw_Envelope *envelope_out);

const char *wire_role_name(xpw_Role role);
const char *wire_body_name(pb_size_t which_body);
#endif
