/* SPDX-License-Identifier: MIT */
/* Sockets, packets and descriptor passing of the control channel. Holds no state. */
#include "wire/wire.h"

#include <errno.h>
#include <fcntl.h>
#include <pb_decode.h>
#include <pb_encode.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define WIRE_BACKLOG  128
#define LOCK_ATTEMPTS 16

_Static_assert(xpw_Envelope_size <= WIRE_MAX_BYTES, "a message may not outgrow a packet");

static xp_status_t wire_address(const char *path, struct sockaddr_un *address_out)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof(address.sun_path))
        return xp_fail(XP_INVALID, "daemon.socket: the path %s is longer than %zu bytes", path,
                       sizeof(address.sun_path) - 1);
    strcpy(address.sun_path, path);
    *address_out = address;
    return XP_OK;
}

/* Creates the folders above `path`, each with mode 0700. */
static xp_status_t make_parents(const char *path)
{
    char folder[128];
    snprintf(folder, sizeof(folder), "%s", path);
    for (char *at = folder + 1; (at = strchr(at, '/')) != NULL; at++) {
        *at = '\0';
        if (mkdir(folder, 0700) != 0 && errno != EEXIST)
            return xp_fail_errno(XP_IO, "cannot create the folder %s for the daemon's socket",
                                 folder);
        *at = '/';
    }
    return XP_OK;
}

xp_status_t wire_claim(const char *path, int *lock_out)
{
    struct sockaddr_un address;
    XP_TRY(wire_address(path, &address));
    XP_TRY(make_parents(path));

    xp_status_t status;
    char lock_path[160];
    snprintf(lock_path, sizeof(lock_path), "%s.lock", path);
    /* The owner removes the lock file when it leaves, so the file that was opened may be a removed
     * one by the time it is locked: only a lock on the file that the path names counts. */
    for (int attempt = 0;; attempt++) {
        int lock = open(lock_path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
        if (lock < 0)
            return xp_fail_errno(XP_IO, "cannot open %s", lock_path);
        if (flock(lock, LOCK_EX | LOCK_NB) != 0) {
            status =
                errno == EWOULDBLOCK
                    ? xp_fail(XP_INVALID,
                              "another daemon is running at %s (its lock is held); stop it with "
                              "`xpool down` or choose another daemon.socket",
                              path)
                    : xp_fail_errno(XP_IO, "cannot lock %s", lock_path);
            close(lock);
            return status;
        }
        struct stat held, named;
        if (fstat(lock, &held) == 0 && lstat(lock_path, &named) == 0 &&
            held.st_ino == named.st_ino && held.st_dev == named.st_dev) {
            *lock_out = lock;
            return XP_OK;
        }
        close(lock);
        if (attempt == LOCK_ATTEMPTS)
            return xp_fail(XP_IO, "%s is replaced again and again", lock_path);
    }
}

xp_status_t wire_open(const char *path, int *socket_out)
{
    struct sockaddr_un address;
    struct stat info;
    XP_TRY(wire_address(path, &address));
    if (lstat(path, &info) == 0) {
        if (!S_ISSOCK(info.st_mode))
            return xp_fail(XP_INVALID, "daemon.socket: %s exists and is not a socket", path);
        if (unlink(path) != 0)
            return xp_fail_errno(XP_IO, "cannot remove the stale socket %s", path);
    }
    int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (listener < 0)
        return xp_fail_errno(XP_IO, "cannot make a socket");
    mode_t old_mask = umask(0177);
    int bound = bind(listener, (struct sockaddr *)&address, sizeof(address));
    umask(old_mask);
    if (bound != 0 || listen(listener, WIRE_BACKLOG) != 0) {
        xp_status_t status = xp_fail_errno(XP_IO, "cannot listen at %s", path);
        close(listener);
        return status;
    }
    *socket_out = listener;
    return XP_OK;
}

xp_status_t wire_listen(const char *path, int *socket_out, int *lock_out)
{
    int lock;
    XP_TRY(wire_claim(path, &lock));
    xp_status_t status = wire_open(path, socket_out);
    if (status == XP_OK)
        *lock_out = lock;
    else
        close(lock);
    return status;
}

void wire_unlisten(const char *path, int socket, int lock)
{
    if (lock >= 0) {
        char lock_path[160];
        snprintf(lock_path, sizeof(lock_path), "%s.lock", path);
        if (socket >= 0)
            unlink(path);
        unlink(lock_path);
        close(lock);
    }
    if (socket >= 0)
        close(socket);
}

xp_status_t wire_connect(const char *path, int *socket_out)
{
    struct sockaddr_un address;
    XP_TRY(wire_address(path, &address));
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return xp_fail_errno(XP_IO, "cannot make a socket");
    if (connect(fd, (struct sockaddr *)&address, sizeof(address)) != 0) {
        bool retry = errno == ENOENT || errno == ECONNREFUSED || errno == EAGAIN;
        xp_status_t status =
            xp_fail_errno(retry ? XP_RETRY : XP_IO, "cannot reach the daemon at %s", path);
        close(fd);
        return status;
    }
    *socket_out = fd;
    return XP_OK;
}

xp_status_t wire_peer(int socket, pid_t *pid_out, uid_t *uid_out)
{
    struct ucred credentials;
    socklen_t length = sizeof(credentials);
    if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0)
        return xp_fail_errno(XP_IO, "cannot read the peer's credentials");
    *pid_out = credentials.pid;
    *uid_out = credentials.uid;
    return XP_OK;
}

xp_status_t wire_send(int socket, const xpw_Envelope *envelope, const int *fds, uint32_t fd_count)
{
    uint8_t bytes[WIRE_MAX_BYTES];
    pb_ostream_t stream = pb_ostream_from_buffer(bytes, sizeof(bytes));
    if (!pb_encode(&stream, xpw_Envelope_fields, envelope))
        return xp_fail(XP_INVALID, "cannot encode %s: %s", wire_body_name(envelope->which_body),
                       PB_GET_ERROR(&stream));
    XP_ASSERT(fd_count <= WIRE_MAX_DESCRIPTORS);
    struct iovec part = {.iov_base = bytes, .iov_len = stream.bytes_written};
    union {
        char bytes[CMSG_SPACE(sizeof(int) * WIRE_MAX_DESCRIPTORS)];
        struct cmsghdr align;
    } control;
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (fd_count) {
        memset(&control, 0, sizeof(control));
        message.msg_control = control.bytes;
        message.msg_controllen = CMSG_SPACE(sizeof(int) * fd_count);
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int) * fd_count);
        memcpy(CMSG_DATA(header), fds, sizeof(int) * fd_count);
    }
    for (;;) {
        if (sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0)
            return XP_OK;
        if (errno == EINTR)
            continue;
        if (errno == EAGAIN || errno == ENOBUFS)
            return XP_RETRY;
        if (errno == EPIPE || errno == ECONNRESET || errno == ENOTCONN)
            return xp_fail(XP_CLOSED, "the other side closed the control channel");
        return xp_fail_errno(XP_IO, "cannot send %s", wire_body_name(envelope->which_body));
    }
}

xp_status_t wire_decode(const void *bytes, size_t length, xpw_Envelope *envelope_out)
{
    memset(envelope_out, 0, sizeof(*envelope_out));
    pb_istream_t stream = pb_istream_from_buffer(bytes, length);
    if (!pb_decode(&stream, xpw_Envelope_fields, envelope_out))
        return xp_fail(XP_PEER, "a packet of %zu bytes is no message: %s", length,
                       PB_GET_ERROR(&stream));
    if (envelope_out->which_body == 0)
        return xp_fail(XP_PEER, "a packet of %zu bytes holds no known message", length);
    return XP_OK;
}

xp_status_t wire_receive(int socket, xpw_Envelope *envelope_out, wire_descriptors_t *fds_out)
{
    uint8_t bytes[WIRE_MAX_BYTES];
    union {
        char bytes[CMSG_SPACE(sizeof(int) * WIRE_MAX_DESCRIPTORS)];
        struct cmsghdr align;
    } control;
    struct iovec part = {.iov_base = bytes, .iov_len = sizeof(bytes)};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = control.bytes,
                             .msg_controllen = sizeof(control.bytes)};
    ssize_t length;
    /* A peer that closed with unread packets leaves ECONNRESET as a pending error that one call
     * reports and clears; what it had sent before, its Bye among it, is still there to be read. */
    int resets = 0;
    do {
        length = recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    } while (length < 0 && (errno == EINTR || (errno == ECONNRESET && resets++ == 0)));
    if (length < 0) {
        if (errno == EAGAIN)
            return XP_RETRY;
        if (errno == ECONNRESET)
            return xp_fail(XP_CLOSED, "the other side closed the control channel");
        return xp_fail_errno(XP_IO, "cannot receive on the control channel");
    }

    wire_descriptors_t fds = {.count = 0};
    for (struct cmsghdr *header = CMSG_FIRSTHDR(&message); header;
         header = CMSG_NXTHDR(&message, header)) {
        if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS)
            continue;
        size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
            if (fds.count < WIRE_MAX_DESCRIPTORS)
                fds.fds[fds.count++] = fd;
            else
                close(fd);
        }
    }
    xp_status_t status;
    if (length == 0)
        status = xp_fail(XP_CLOSED, "the other side closed the control channel");
    else if (message.msg_flags & MSG_TRUNC)
        status = xp_fail(XP_PEER, "a packet larger than %d bytes", WIRE_MAX_BYTES);
    else if (message.msg_flags & MSG_CTRUNC)
        status = xp_fail(XP_PEER,
                         "a packet with more descriptors than %d, or than this process "
                         "may still have (ulimit -n)",
                         WIRE_MAX_DESCRIPTORS);
    else
        status = wire_decode(bytes, (size_t)length, envelope_out);
    if (status != XP_OK) {
        wire_descriptors_close(&fds);
        return status;
    }
    *fds_out = fds;
    return XP_OK;
}

void wire_descriptors_close(wire_descriptors_t *fds)
{
    for (uint32_t i = 0; i < fds->count; i++)
        if (fds->fds[i] >= 0)
            close(fds->fds[i]);
    fds->count = 0;
}

int wire_descriptors_take(wire_descriptors_t *fds, uint32_t index)
{
    if (index >= fds->count)
        return -1;
    int fd = fds->fds[index];
    fds->fds[index] = -1;
    return fd;
}

const char *wire_role_name(xpw_Role role)
{
    switch (role) {
    case xpw_Role_ROLE_ATNAGENT:
        return "atnagent";
    case xpw_Role_ROLE_FFNAGENT:
        return "ffnagent";
    case xpw_Role_ROLE_INSTANCE:
        return "instance";
    case xpw_Role_ROLE_GATEWAY:
        return "gateway";
    case xpw_Role_ROLE_CLIENT:
        return "client";
    default:
        return "unknown role";
    }
}

const char *wire_body_name(pb_size_t which_body)
{
    static const char *const names[] = {"nothing",
                                        "Hello",
                                        "Refused",
                                        "Admitted",
                                        "ArenaOffer",
                                        "ArenaAttach",
                                        "ArenaAttached",
                                        "ArenaDetach",
                                        "Attached",
                                        "Join",
                                        "Joined",
                                        "Prepare",
                                        "Progress",
                                        "Executable",
                                        "Initialize",
                                        "Initialized",
                                        "Listening",
                                        "Backend",
                                        "InstanceStats",
                                        "GatewayStats",
                                        "Failure",
                                        "FailReport",
                                        "Stop",
                                        "Bye",
                                        "Leave",
                                        "Check",
                                        "Verdict",
                                        "Down",
                                        "DownDone",
                                        "Workload",
                                        [xpw_Envelope_kv_ask_tag] = "KvAsk",
                                        [xpw_Envelope_kv_answer_tag] = "KvAnswer",
                                        [xpw_Envelope_agent_ended_tag] = "AgentEnded",
                                        [xpw_Envelope_device_plane_tag] = "DevicePlane",
                                        [xpw_Envelope_stage_offer_tag] = "StageOffer",
                                        [xpw_Envelope_stage_grant_tag] = "StageGrant",
                                        [xpw_Envelope_arena_detached_tag] = "ArenaDetached",
                                        [xpw_Envelope_plane_stats_tag] = "PlaneStats",
                                        [xpw_Envelope_expert_usage_tag] = "ExpertUsage",
                                        [xpw_Envelope_kept_weights_tag] = "KeptWeights",
                                        [xpw_Envelope_fabric_id_tag] = "FabricId",
                                        [xpw_Envelope_pause_tag] = "Pause",
                                        [xpw_Envelope_kept_stage_tag] = "KeptStage"};
    bool known = which_body < sizeof(names) / sizeof(names[0]) && names[which_body];
    return known ? names[which_body] : "unknown message";
}
