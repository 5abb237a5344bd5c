/* SPDX-License-Identifier: MIT */
/* The mailbox by hand, both sides on one thread: checks, states, closing, untrusted records. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/memfd.h"
#include "transport/arena.h"
#include "transport/doorbell.h"
#include "transport/transport.h"

#define HIDDEN 8
#define ROWS   4

static const transport_geometry_t geometry = {
    .hidden = HIDDEN, .max_rows = ROWS, .dtype = XP_DTYPE_F32, .dp_size = 1};

typedef struct pair {
    transport_client_t *client;
    transport_server_t *server;
    mailbox_arena_t *arena; /* as a misbehaving peer sees it */
    float in[ROWS * HIDDEN], out[ROWS * HIDDEN];
} pair_t;

static void pair_make(pair_t *pair)
{
    void *address;
    memset(pair, 0, sizeof(*pair));
    assert_int_equal(transport_client_create(&geometry, 0, &pair->client), XP_OK);
    assert_int_equal(
        transport_server_create(transport_client_fd(pair->client), &geometry, &pair->server),
        XP_OK);
    assert_int_equal(
        xp_memfd_map(transport_client_fd(pair->client), sizeof(mailbox_arena_t), &address), XP_OK);
    pair->arena = address;
}

static void pair_free(pair_t *pair)
{
    xp_memfd_unmap(pair->arena);
    transport_server_destroy(pair->server);
    transport_client_destroy(pair->client);
}

static transport_tensor_t tensor(float *data, uint32_t rows)
{
    return (transport_tensor_t){.data = data,
                                .dtype = XP_DTYPE_F32,
                                .rank = 2,
                                .rows = rows,
                                .width = HIDDEN,
                                .row_stride = HIDDEN};
}

static void test_round_trip(void **state)
{
    pair_t pair;
    pair_make(&pair);
    for (uint32_t rows = 0; rows <= ROWS; rows++) {
        transport_pending_t pending;
        transport_tensor_t in = tensor(pair.in, rows), out = tensor(pair.out, rows);
        transport_request_t request = {
            .layer = rows + 1, .rows = rows, .kind = TRANSPORT_PREFILL, .slo_deadline_ns = 99};
        for (uint32_t i = 0; i < rows * HIDDEN; i++)
            pair.in[i] = (float)(rows * 100 + i);
        assert_int_equal(transport_server_poll(pair.server, &pending), XP_RETRY);
        assert_int_equal(transport_client_put(pair.client, &request, &in), XP_OK);
        memset(pair.in, 0, sizeof(pair.in)); /* the caller's storage is free after put */
        for (int twice = 0; twice < 2; twice++) {
            assert_int_equal(transport_server_poll(pair.server, &pending), XP_OK);
            assert_int_equal(pending.sequence, rows + 1);
            assert_int_equal(pending.layer, rows + 1);
            assert_int_equal(pending.rows, rows);
            assert_int_equal(pending.kind, TRANSPORT_PREFILL);
            assert_int_equal(pending.slo_deadline_ns, 99);
            assert_int_equal(pending.dp_rows[0], rows);
        }
        const float *seen = pending.input;
        float *answer = pending.output;
        for (uint32_t i = 0; i < rows * HIDDEN; i++) {
            assert_true(seen[i] == (float)(rows * 100 + i));
            answer[i] = seen[i] + 0.5f;
        }
        assert_int_equal(transport_client_take(pair.client, &out), XP_INVALID);
        assert_int_equal(transport_client_wait(pair.client, 0), XP_TIMEOUT);
        transport_server_complete(pair.server, pending.sequence, XP_OK);
        assert_int_equal(transport_server_poll(pair.server, &pending), XP_RETRY);
        assert_int_equal(transport_client_wait(pair.client, 0), XP_OK);
        assert_int_equal(transport_client_wait(pair.client, 0), XP_OK);
        assert_int_equal(transport_client_put(pair.client, &request, &in), XP_RETRY);
        assert_int_equal(transport_client_take(pair.client, &out), XP_OK);
        for (uint32_t i = 0; i < rows * HIDDEN; i++)
            assert_true(pair.out[i] == (float)(rows * 100 + i) + 0.5f);
    }
    transport_stats_t stats;
    transport_client_stats(pair.client, &stats);
    assert_int_equal(stats.requests, ROWS + 1);
    assert_int_equal(stats.rows, ROWS * (ROWS + 1) / 2);
    pair_free(&pair);
}

/* Everything that is wrong with a tensor or request is said before anything is published. */
static void test_checks_before_publishing(void **state)
{
    pair_t pair;
    pair_make(&pair);
    transport_request_t request = {.layer = 1, .rows = 2};
    transport_tensor_t good = tensor(pair.in, 2), bad[8];
    for (uint32_t i = 0; i < 8; i++)
        bad[i] = good;
    bad[0].data = NULL;
    bad[1].dtype = XP_DTYPE_BF16;
    bad[2].rank = 3;
    bad[3].rows = 3;
    bad[4].width = HIDDEN + 1;
    bad[5].row_stride = HIDDEN + 1;
    bad[6].rows = 0;
    bad[7].rows = UINT64_MAX;
    for (uint32_t i = 0; i < 8; i++) {
        assert_int_equal(transport_client_put(pair.client, &request, &bad[i]), XP_INVALID);
        assert_int_equal(transport_client_call(pair.client, &request, &good, &bad[i], 0),
                         XP_INVALID);
        assert_int_equal(__atomic_load_n(&pair.arena->request.sequence, __ATOMIC_ACQUIRE), 0);
    }
    transport_request_t wrong[3] = {request, request, request};
    wrong[0].layer = MAILBOX_LAYER_LIMIT;
    wrong[1].rows = ROWS + 1;
    wrong[2].kind = MAILBOX_KIND_COUNT;
    for (uint32_t i = 0; i < 3; i++)
        assert_int_equal(transport_client_put(pair.client, &wrong[i], &good), XP_INVALID);
    assert_int_equal(transport_client_put(pair.client, NULL, &good), XP_INVALID);
    assert_int_equal(transport_client_put(pair.client, &request, NULL), XP_INVALID);
    assert_int_equal(transport_client_wait(pair.client, 0), XP_INVALID);
    assert_int_equal(__atomic_load_n(&pair.arena->request.sequence, __ATOMIC_ACQUIRE), 0);
    assert_int_equal(transport_client_put(pair.client, &request, &good), XP_OK);
    pair_free(&pair);

    transport_client_t *client;
    transport_geometry_t dp = geometry;
    dp.dp_size = 2;
    assert_int_equal(transport_client_create(&dp, 0, &client), XP_OK);
    assert_int_equal(transport_client_put(client, &request, &good), XP_INVALID);
    uint32_t counts[2] = {2, ROWS + 1};
    request.dp_rows = counts;
    assert_int_equal(transport_client_put(client, &request, &good), XP_INVALID);
    counts[1] = ROWS;
    assert_int_equal(transport_client_put(client, &request, &good), XP_OK);
    transport_client_destroy(client);
}

static void test_geometry(void **state)
{
    transport_client_t *client;
    transport_geometry_t bad[6];
    for (uint32_t i = 0; i < 6; i++)
        bad[i] = geometry;
    bad[0].hidden = 0;
    bad[1].hidden = MAILBOX_MAX_HIDDEN + 1;
    bad[2].max_rows = 0;
    bad[3].dtype = XP_DTYPE_BF16;
    bad[4].dp_size = 0;
    bad[5].dp_size = MAILBOX_MAX_DP + 1;
    for (uint32_t i = 0; i < 6; i++)
        assert_int_equal(transport_client_create(&bad[i], 0, &client), XP_INVALID);
    assert_int_equal(transport_client_create(NULL, 0, &client), XP_INVALID);
}

/* A received descriptor is not trusted: size, seals, magic, ABI and shape have to be as planned. */
static void test_received_arena(void **state)
{
    pair_t pair;
    transport_server_t *server;
    pair_make(&pair);
    int fd = transport_client_fd(pair.client);
    transport_geometry_t other = transport_server_geometry(pair.server);
    assert_int_equal(other.hidden, HIDDEN);
    assert_int_equal(other.max_rows, ROWS);
    assert_int_equal(other.dtype, XP_DTYPE_F32);
    assert_int_equal(other.dp_size, 1);
    other.hidden = HIDDEN * 2;
    assert_int_equal(transport_server_create(fd, &other, &server), XP_PEER);
    other = geometry;
    other.dp_size = 2;
    assert_int_equal(transport_server_create(fd, &other, &server), XP_PEER);
    pair.arena->abi = 9;
    assert_int_equal(transport_server_create(fd, &geometry, &server), XP_PEER);
    pair.arena->abi = MAILBOX_ABI;
    pair.arena->magic = 0;
    assert_int_equal(transport_server_create(fd, &geometry, &server), XP_PEER);
    assert_int_equal(transport_arena_close(fd, XP_CLOSED), XP_PEER);
    pair_free(&pair);

    int loose = memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_int_equal(ftruncate(loose, (off_t)transport_arena_bytes(&geometry)), 0);
    assert_int_equal(transport_server_create(loose, &geometry, &server), XP_PEER);
    assert_int_equal(transport_arena_close(loose, XP_CLOSED), XP_PEER);
    close(loose);
    assert_int_equal(transport_server_create(-1, &geometry, &server), XP_PEER);
    int null = open("/dev/null", O_RDWR);
    assert_int_equal(transport_server_create(null, &geometry, &server), XP_PEER);
    close(null);
}

static void test_untrusted_records(void **state)
{
    for (uint32_t kind = 0; kind < 7; kind++) {
        pair_t pair;
        transport_pending_t pending;
        pair_make(&pair);
        mailbox_request_t *record = &pair.arena->request;
        record->sequence = 1;
        switch (kind) {
        case 0:
            record->sequence = 2;
            break;
        case 1:
            record->sequence = UINT64_MAX;
            break;
        case 2:
            record->rows = ROWS + 1;
            break;
        case 3:
            record->rows = UINT32_MAX;
            break;
        case 4:
            record->layer = UINT32_MAX;
            break;
        case 5:
            record->kind = 3;
            break;
        default: /* other people's row counts mean nothing without attention DP */
            record->dp_rows[3] = UINT32_MAX;
            assert_int_equal(transport_server_poll(pair.server, &pending), XP_OK);
            pair_free(&pair);
            continue;
        }
        assert_int_equal(transport_server_poll(pair.server, &pending), XP_PEER);
        pair_free(&pair);
    }

    /* The Instance does not trust the AtnAgent either. */
    pair_t pair;
    pair_make(&pair);
    transport_request_t request = {.rows = 1};
    transport_tensor_t in = tensor(pair.in, 1);
    assert_int_equal(transport_client_put(pair.client, &request, &in), XP_OK);
    __atomic_store_n(&pair.arena->response.sequence, 5u, __ATOMIC_RELEASE);
    assert_int_equal(transport_client_wait(pair.client, 0), XP_PEER);
    pair.arena->response.status = 1000;
    __atomic_store_n(&pair.arena->response.sequence, 1u, __ATOMIC_RELEASE);
    assert_int_equal(transport_client_wait(pair.client, 0), XP_PEER);
    pair_free(&pair);
}

static void test_refused_request(void **state)
{
    pair_t pair;
    transport_pending_t pending;
    pair_make(&pair);
    transport_request_t request = {.rows = 1};
    transport_tensor_t in = tensor(pair.in, 1), out = tensor(pair.out, 1);
    assert_int_equal(transport_client_put(pair.client, &request, &in), XP_OK);
    assert_int_equal(transport_server_poll(pair.server, &pending), XP_OK);
    transport_server_complete(pair.server, pending.sequence, XP_INVALID);
    assert_int_equal(transport_client_wait(pair.client, 0), XP_INVALID);
    assert_int_equal(transport_client_take(pair.client, &out), XP_INVALID);
    /* The mailbox is free again. */
    assert_int_equal(transport_client_put(pair.client, &request, &in), XP_OK);
    pair_free(&pair);
}

/* Closed is terminal, the first reason stays, an answer that came before is still an answer. */
static void test_close(void **state)
{
    for (uint32_t fatal = 0; fatal < 2; fatal++) {
        xp_status_t reason = fatal ? XP_FATAL : XP_CLOSED;
        pair_t pair;
        transport_pending_t pending;
        transport_request_t request = {.rows = 1};
        pair_make(&pair);
        transport_tensor_t in = tensor(pair.in, 1), out = tensor(pair.out, 1);
        assert_int_equal(transport_client_put(pair.client, &request, &in), XP_OK);
        assert_int_equal(transport_server_poll(pair.server, &pending), XP_OK);
        transport_server_complete(pair.server, pending.sequence, XP_OK);
        assert_int_equal(transport_arena_close(transport_client_fd(pair.client), reason), XP_OK);
        assert_int_equal(
            transport_arena_close(transport_client_fd(pair.client), fatal ? XP_CLOSED : XP_FATAL),
            XP_OK);
        assert_int_equal(transport_client_wait(pair.client, 0), XP_OK);
        assert_int_equal(transport_client_take(pair.client, &out), XP_OK);
        assert_int_equal(transport_client_put(pair.client, &request, &in), reason);
        assert_int_equal(transport_server_poll(pair.server, &pending), XP_CLOSED);
        pair_free(&pair);

        pair_make(&pair);
        assert_int_equal(transport_client_put(pair.client, &request, &in), XP_OK);
        transport_server_close(pair.server, reason);
        assert_int_equal(transport_client_wait(pair.client, UINT64_MAX), reason);
        pair_free(&pair);
    }
    pair_t pair;
    transport_pending_t pending;
    pair_make(&pair);
    assert_int_equal(transport_arena_close(transport_client_fd(pair.client), XP_OK), XP_INVALID);
    transport_client_destroy(pair.client);
    pair.client = NULL;
    assert_int_equal(transport_server_poll(pair.server, &pending), XP_CLOSED);
    pair_free(&pair);
}

/* The arena outlives AtnAgents: the next one finds the unanswered request and no answered one. */
static void test_next_atnagent(void **state)
{
    pair_t pair;
    transport_pending_t pending;
    transport_request_t request = {.rows = 1, .layer = 3};
    pair_make(&pair);
    transport_tensor_t in = tensor(pair.in, 1), out = tensor(pair.out, 1);
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(transport_client_put(pair.client, &request, &in), XP_OK);
        assert_int_equal(transport_server_poll(pair.server, &pending), XP_OK);
        transport_server_destroy(pair.server);
        assert_int_equal(
            transport_server_create(transport_client_fd(pair.client), &geometry, &pair.server),
            XP_OK);
        assert_int_equal(transport_server_poll(pair.server, &pending), XP_OK);
        assert_int_equal(pending.sequence, i + 1);
        assert_int_equal(pending.layer, 3);
        transport_server_complete(pair.server, pending.sequence, XP_OK);
        assert_int_equal(transport_client_wait(pair.client, 0), XP_OK);
        assert_int_equal(transport_client_take(pair.client, &out), XP_OK);
        transport_server_destroy(pair.server);
        assert_int_equal(
            transport_server_create(transport_client_fd(pair.client), &geometry, &pair.server),
            XP_OK);
        assert_int_equal(transport_server_poll(pair.server, &pending), XP_RETRY);
    }
    pair_free(&pair);
}

/* Two ranks of one Instance, of which one has its answer: the other gets the same rows. */
static void test_carry(void **state)
{
    pair_t ahead, behind;
    transport_pending_t pending;
    transport_request_t request = {.rows = 2, .layer = 3};
    pair_make(&ahead);
    pair_make(&behind);
    int ahead_fd = transport_client_fd(ahead.client),
        behind_fd = transport_client_fd(behind.client);
    transport_tensor_t in = tensor(ahead.in, 2), out = tensor(behind.out, 2);
    uint64_t answered;
    bool waiting;
    assert_int_equal(transport_arena_carry(ahead_fd, behind_fd, &geometry), XP_PEER); /* level */
    assert_int_equal(transport_client_put(ahead.client, &request, &in), XP_OK);
    assert_int_equal(transport_client_put(behind.client, &request, &in), XP_OK);
    assert_int_equal(transport_arena_carry(ahead_fd, behind_fd, &geometry),
                     XP_PEER); /* no answer */
    assert_int_equal(transport_server_poll(ahead.server, &pending), XP_OK);
    for (uint32_t i = 0; i < 2 * HIDDEN; i++)
        ((float *)pending.output)[i] = (float)i + 0.5f;
    transport_server_complete(ahead.server, 1, XP_OK);
    assert_int_equal(transport_arena_look(ahead_fd, &answered, &waiting), XP_OK);
    assert_true(answered == 1 && !waiting);
    assert_int_equal(transport_arena_look(behind_fd, &answered, &waiting), XP_OK);
    assert_true(answered == 0 && waiting);
    transport_geometry_t other = geometry;
    other.max_rows++;
    assert_int_equal(transport_arena_carry(ahead_fd, behind_fd, &other), XP_PEER);
    assert_int_equal(transport_arena_carry(behind_fd, ahead_fd, &geometry), XP_PEER);
    assert_int_equal(transport_arena_carry(ahead_fd, behind_fd, &geometry), XP_OK);
    assert_int_equal(transport_client_wait(behind.client, 0), XP_OK);
    assert_int_equal(transport_client_take(behind.client, &out), XP_OK);
    for (uint32_t i = 0; i < 2 * HIDDEN; i++)
        assert_true(behind.out[i] == (float)i + 0.5f);
    assert_int_equal(transport_arena_carry(ahead_fd, behind_fd, &geometry), XP_PEER); /* again */

    /* Rows beyond the arena are nonsense, not read. */
    assert_int_equal(transport_client_put(behind.client, &request, &in), XP_OK);
    behind.arena->request.rows = ROWS + 1;
    ahead.arena->response.sequence = 2;
    assert_int_equal(transport_arena_carry(ahead_fd, behind_fd, &geometry), XP_PEER);
    pair_free(&ahead);
    pair_free(&behind);
}

static void test_doorbell(void **state)
{
    int fd;
    doorbell_page_t *page;
    pair_t pair;
    transport_request_t request = {.rows = 1};
    pair_make(&pair);
    transport_tensor_t in = tensor(pair.in, 1);
    assert_int_equal(transport_doorbell_make(0, &fd), XP_INVALID);
    assert_int_equal(transport_doorbell_make(DOORBELL_MAX_PES + 1, &fd), XP_INVALID);
    assert_int_equal(transport_doorbell_make(3, &fd), XP_OK);
    assert_int_equal(transport_doorbell_map(fd, 2, &page), XP_OK);
    assert_int_equal(transport_client_set_doorbell(pair.client, fd, 3), XP_PEER);
    assert_int_equal(
        transport_client_set_doorbell(pair.client, transport_client_fd(pair.client), 0), XP_PEER);
    assert_int_equal(transport_client_set_doorbell(pair.client, fd, 2), XP_OK);
    assert_int_equal(mailbox_bell_observe(&page->lines[2].bell), 0);
    assert_int_equal(transport_client_put(pair.client, &request, &in), XP_OK);
    assert_int_equal(mailbox_bell_observe(&page->lines[2].bell), 1);
    /* A doorbell that comes after the request is rung for it. */
    assert_int_equal(transport_client_set_doorbell(pair.client, fd, 1), XP_OK);
    assert_int_equal(mailbox_bell_observe(&page->lines[1].bell), 1);
    assert_int_equal(mailbox_bell_observe(&page->lines[0].bell), 0);
    pair_free(&pair);
    assert_int_equal(mailbox_bell_observe(&page->lines[1].bell), 2); /* closing rings too */
    xp_memfd_unmap(page);
    close(fd);
}

static void test_memfd(void **state)
{
    int fd, copy;
    uint64_t bytes;
    void *a, *b;
    assert_int_equal(xp_memfd_create("test", 8192, &fd), XP_OK);
    assert_int_equal(xp_memfd_check(fd, &bytes), XP_OK);
    assert_int_equal(bytes, 8192);
    assert_int_not_equal(ftruncate(fd, 4096), 0); /* sealed */
    assert_int_not_equal(ftruncate(fd, 16384), 0);
    assert_true(fcntl(fd, F_GETFD) & FD_CLOEXEC);
    assert_int_equal(xp_memfd_map(fd, 8193, &a), XP_PEER);
    assert_int_equal(xp_memfd_map(fd, 0, &a), XP_PEER);
    assert_int_equal(xp_memfd_map(fd, 8192, &a), XP_OK);
    assert_int_equal(xp_fd_duplicate(fd, &copy), XP_OK);
    assert_int_equal(xp_memfd_map(copy, 4096, &b), XP_OK);
    assert_ptr_equal(a, b);
    close(fd);
    close(copy);
    xp_memfd_unmap(a);
    memset(b, 1, 8192); /* still mapped for the other user */
    xp_memfd_unmap(b);
    xp_memfd_unmap(NULL);
    assert_int_equal(xp_fd_duplicate(-1, &copy), XP_IO);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_checks_before_publishing),
        cmocka_unit_test(test_geometry),
        cmocka_unit_test(test_received_arena),
        cmocka_unit_test(test_untrusted_records),
        cmocka_unit_test(test_refused_request),
        cmocka_unit_test(test_close),
        cmocka_unit_test(test_next_atnagent),
        cmocka_unit_test(test_carry),
        cmocka_unit_test(test_doorbell),
        cmocka_unit_test(test_memfd),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
