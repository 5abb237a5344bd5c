/* SPDX-License-Identifier: MIT */
/* Packets, descriptor passing, the lock on the socket path, and the bounded queue of a channel. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "wire/channel.h"
#include "wire/wire.h"

static void pair(int fds[2])
{
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds), 0);
}

static xpw_Envelope failure_message(void)
{
    xpw_Envelope envelope = {.which_body = xpw_Envelope_failure_tag};
    envelope.body.failure.generation = 7;
    strcpy(envelope.body.failure.who, "ffnagent cpu:1");
    strcpy(envelope.body.failure.what, "its process died");
    strcpy(envelope.body.failure.when, "2026-01-01T00:00:00.000Z");
    return envelope;
}

static void packet_arrives_whole_with_its_descriptors(void **state)
{
    int fds[2];
    pair(fds);
    int memory = memfd_create("test", MFD_CLOEXEC);
    assert_int_equal(write(memory, "hello", 5), 5);
    xpw_Envelope sent = failure_message(), got;
    assert_int_equal(wire_send(fds[0], &sent, &memory, 1), XP_OK);
    wire_descriptors_t received = {.count = 0};
    assert_int_equal(wire_receive(fds[1], &got, &received), XP_OK);
    assert_int_equal(got.which_body, xpw_Envelope_failure_tag);
    assert_int_equal(got.body.failure.generation, 7);
    assert_string_equal(got.body.failure.who, "ffnagent cpu:1");
    assert_int_equal(received.count, 1);
    char text[8] = {0};
    assert_int_equal(pread(received.fds[0], text, 5, 0), 5);
    assert_string_equal(text, "hello");
    assert_true(fcntl(received.fds[0], F_GETFD) & FD_CLOEXEC);
    int taken = wire_descriptors_take(&received, 0);
    wire_descriptors_close(&received);
    assert_true(fcntl(taken, F_GETFD) >= 0);
    close(taken);
    close(memory);
    assert_int_equal(wire_receive(fds[1], &got, &received), XP_RETRY);
    close(fds[0]);
    assert_int_equal(wire_receive(fds[1], &got, &received), XP_CLOSED);
    close(fds[1]);
}

static void nonsense_is_a_peer_error_and_leaks_no_descriptor(void **state)
{
    int fds[2];
    pair(fds);
    const uint8_t junk[] = {0xff, 0x01, 0x02, 0x03};
    xpw_Envelope got;
    wire_descriptors_t received = {.count = 0};
    assert_int_equal(send(fds[0], junk, sizeof(junk), 0), sizeof(junk));
    assert_int_equal(wire_receive(fds[1], &got, &received), XP_PEER);
    static uint8_t large[WIRE_MAX_BYTES + 1];
    assert_int_equal(send(fds[0], large, sizeof(large), 0), sizeof(large));
    assert_int_equal(wire_receive(fds[1], &got, &received), XP_PEER);
    /* An overlong string in a field with a stated maximum. */
    uint8_t overlong[400] = {0};
    size_t at = 0; /* field 20 (failure), length-delimited */
    overlong[at++] = 0xa2;
    overlong[at++] = 0x01;
    overlong[at++] = 0x83;
    overlong[at++] = 0x02; /* 259 bytes */
    overlong[at++] = 0x12;
    overlong[at++] = 0x80;
    overlong[at++] = 0x02; /* who: 256 bytes, allowed are 127 */
    memset(overlong + at, 'x', 256);
    assert_int_equal(wire_decode(overlong, at + 256, &got), XP_PEER);
    close(fds[0]);
    close(fds[1]);
}

/* The kernel drops what finds no place; who reads the message must not look for a broken peer. */
static void a_process_without_descriptors_is_told_so(void **state)
{
    int fds[2];
    struct rlimit before, none;
    pair(fds);
    xpw_Envelope sent = failure_message(), got;
    wire_descriptors_t received = {.count = 0};
    assert_int_equal(wire_send(fds[0], &sent, &fds[0], 1), XP_OK);
    int lowest = dup(fds[0]);
    close(lowest);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    none = (struct rlimit){.rlim_cur = (rlim_t)lowest, .rlim_max = before.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
    xp_status_t status = wire_receive(fds[1], &got, &received);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    assert_int_equal(status, XP_PEER);
    assert_non_null(strstr(xp_error_last()->text, "ulimit -n"));
    assert_int_equal(received.count, 0);
    close(fds[0]);
    close(fds[1]);
}

/* The peer said Bye and closed without reading what was sent to it: the kernel then reports a
 * reset. */
static void last_words_are_read_although_the_peer_left_packets_unread(void **state)
{
    int fds[2];
    pair(fds);
    xpw_Envelope envelope = failure_message(), got;
    assert_int_equal(wire_send(fds[0], &envelope, NULL, 0), XP_OK);
    xpw_Envelope bye = {.which_body = xpw_Envelope_bye_tag};
    assert_int_equal(wire_send(fds[1], &bye, NULL, 0), XP_OK);
    close(fds[1]);
    wire_descriptors_t received = {.count = 0};
    assert_int_equal(wire_receive(fds[0], &got, &received), XP_OK);
    assert_int_equal(got.which_body, xpw_Envelope_bye_tag);
    assert_int_equal(wire_receive(fds[0], &got, &received), XP_CLOSED);
    close(fds[0]);
}

static void every_truncation_of_a_message_is_refused_or_shorter(void **state)
{
    int fds[2];
    pair(fds);
    xpw_Envelope sent = failure_message(), got;
    assert_int_equal(wire_send(fds[0], &sent, NULL, 0), XP_OK);
    uint8_t bytes[WIRE_MAX_BYTES];
    ssize_t length = recv(fds[1], bytes, sizeof(bytes), 0);
    assert_true(length > 10);
    for (ssize_t cut = 0; cut < length; cut++)
        assert_int_equal(wire_decode(bytes, (size_t)cut, &got), XP_PEER);
    close(fds[0]);
    close(fds[1]);
}

static void the_socket_path_has_one_owner_and_is_taken_over_when_stale(void **state)
{
    char folder[] = "/tmp/xpool-wire-XXXXXX";
    assert_non_null(mkdtemp(folder));
    char path[128];
    snprintf(path, sizeof(path), "%s/deep/er/daemon.sock", folder);
    int client;
    assert_int_equal(wire_connect(path, &client), XP_RETRY);
    int listener, lock, second, second_lock;
    assert_int_equal(wire_listen(path, &listener, &lock), XP_OK);
    assert_int_equal(wire_connect(path, &client), XP_OK);
    close(client);
    assert_int_equal(wire_listen(path, &second, &second_lock), XP_INVALID);
    assert_non_null(strstr(xp_error_last()->text, "xpool down"));
    /* As after SIGKILL: the descriptors are gone, the path is left. */
    close(listener);
    close(lock);
    assert_int_equal(wire_connect(path, &client), XP_RETRY);
    assert_int_equal(wire_listen(path, &listener, &lock), XP_OK);
    wire_unlisten(path, listener, lock);
    struct stat info;
    assert_int_not_equal(stat(path, &info), 0);
    /* Claimed is not yet open. */
    assert_int_equal(wire_claim(path, &lock), XP_OK);
    assert_int_equal(wire_listen(path, &second, &second_lock), XP_INVALID);
    assert_int_equal(wire_connect(path, &client), XP_RETRY);
    assert_int_equal(wire_open(path, &listener), XP_OK);
    assert_int_equal(wire_connect(path, &client), XP_OK);
    close(client);
    wire_unlisten(path, listener, lock);
    assert_int_not_equal(stat(path, &info), 0);
    char command[200];
    snprintf(command, sizeof(command), "rm -r %s", folder);
    assert_int_equal(system(command), 0);
}

static void a_path_that_is_no_socket_is_left_alone(void **state)
{
    char path[] = "/tmp/xpool-wire-file-XXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    int listener, lock;
    assert_int_equal(wire_listen(path, &listener, &lock), XP_INVALID);
    assert_non_null(strstr(xp_error_last()->text, "not a socket"));
    assert_int_equal(wire_claim(path, &lock), XP_OK);
    assert_int_equal(wire_open(path, &listener), XP_INVALID);
    wire_unlisten(path, -1, lock);
    assert_int_equal(unlink(path), 0);
    char lock_path[64];
    snprintf(lock_path, sizeof(lock_path), "%s.lock", path);
    unlink(lock_path);
}

typedef struct seen {
    uint32_t messages, closed;
    xp_status_t status;
    bool destroy_at_once;
} seen_t;

static void on_message(void *context, wire_channel_t *channel, const xpw_Envelope *envelope,
                       wire_descriptors_t *fds)
{
    seen_t *seen = context;
    seen->messages++;
    if (seen->destroy_at_once)
        wire_channel_destroy(channel);
}

static void on_closed(void *context, wire_channel_t *channel, xp_status_t status)
{
    seen_t *seen = context;
    seen->closed++;
    seen->status = status;
}

static void a_channel_queues_up_to_its_limit_and_delivers_in_order(void **state)
{
    int fds[2];
    pair(fds);
    struct event_base *base = event_base_new();
    seen_t here = {0}, there = {0};
    wire_channel_t *a, *b;
    assert_int_equal(wire_channel_create(base, fds[0], on_message, on_closed, &here, &a), XP_OK);
    xpw_Envelope envelope = failure_message();
    uint32_t accepted = 0;
    for (; wire_channel_queued(a) < WIRE_CHANNEL_QUEUE / 2; accepted++)
        assert_int_equal(wire_channel_send(a, &envelope, NULL, 0), XP_OK);
    assert_int_equal(wire_channel_create(base, fds[1], on_message, on_closed, &there, &b), XP_OK);
    for (int i = 0; i < 1000 && there.messages < accepted; i++)
        event_base_loop(base, EVLOOP_ONCE | EVLOOP_NONBLOCK);
    assert_int_equal(there.messages, accepted);
    assert_int_equal(wire_channel_queued(a), 0);
    wire_channel_destroy(a);
    event_base_loop(base, EVLOOP_ONCE);
    assert_int_equal(there.closed, 1);
    assert_int_equal(there.status, XP_CLOSED);
    wire_channel_destroy(b);
    event_base_free(base);
}

static void a_peer_that_does_not_read_is_dropped_from_the_loop(void **state)
{
    int fds[2];
    pair(fds);
    struct event_base *base = event_base_new();
    seen_t here = {0};
    wire_channel_t *a;
    assert_int_equal(wire_channel_create(base, fds[0], on_message, on_closed, &here, &a), XP_OK);
    xpw_Envelope envelope = failure_message();
    xp_status_t status = XP_OK;
    for (uint32_t i = 0; i < 100000 && status == XP_OK; i++)
        status = wire_channel_send(a, &envelope, NULL, 0);
    assert_int_equal(status, XP_PEER);
    assert_int_equal(wire_channel_queued(a), WIRE_CHANNEL_QUEUE);
    assert_int_equal(here.closed, 0); /* not under the sender's hands */
    event_base_loop(base, EVLOOP_ONCE);
    assert_int_equal(here.closed, 1);
    assert_int_equal(here.status, XP_PEER);
    wire_channel_destroy(a);
    close(fds[1]);
    event_base_free(base);
}

static void a_callback_may_destroy_its_channel(void **state)
{
    int fds[2];
    pair(fds);
    struct event_base *base = event_base_new();
    seen_t seen = {.destroy_at_once = true};
    wire_channel_t *channel;
    assert_int_equal(wire_channel_create(base, fds[0], on_message, on_closed, &seen, &channel),
                     XP_OK);
    xpw_Envelope envelope = failure_message();
    assert_int_equal(wire_send(fds[1], &envelope, NULL, 0), XP_OK);
    assert_int_equal(wire_send(fds[1], &envelope, NULL, 0), XP_OK);
    event_base_loop(base, EVLOOP_ONCE);
    assert_int_equal(seen.messages, 1);
    assert_int_equal(seen.closed, 0);
    close(fds[1]);
    event_base_free(base);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(packet_arrives_whole_with_its_descriptors),
        cmocka_unit_test(a_process_without_descriptors_is_told_so),
        cmocka_unit_test(nonsense_is_a_peer_error_and_leaks_no_descriptor),
        cmocka_unit_test(last_words_are_read_although_the_peer_left_packets_unread),
        cmocka_unit_test(every_truncation_of_a_message_is_refused_or_shorter),
        cmocka_unit_test(the_socket_path_has_one_owner_and_is_taken_over_when_stale),
        cmocka_unit_test(a_path_that_is_no_socket_is_left_alone),
        cmocka_unit_test(a_channel_queues_up_to_its_limit_and_delivers_in_order),
        cmocka_unit_test(a_peer_that_does_not_read_is_dropped_from_the_loop),
        cmocka_unit_test(a_callback_may_destroy_its_channel),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
