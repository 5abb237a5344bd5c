/* SPDX-License-Identifier: MIT */
/* A Generation of GPUs walked through by agents and ranks that are sockets of a test:
 * configuration, the daemon in a process of its own, what each side says and expects. */
#ifndef XPOOL_TEST_PLANE_SUPPORT_H
#define XPOOL_TEST_PLANE_SUPPORT_H
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/memfd.h"
#include "control/client.h"
#include "control/gpus.h"
#include "control/planner.h"
#include "cuda/mps.h"
#include "kv/channel.h"
#include "model/digest.h"
#include "stage/stage.h"
#include "transport/cuda_life.h"
#include "wire/wire.h"
#include "forked_daemon.h"

#define PATIENCE_NS (20 * XP_NS_PER_S)
#define MODEL       XPOOL_SOURCE_DIR "/models/tales/qwen3-moe"
#define MEMORY                                                                                     \
    "[devices.'cuda:0']\nmemory = '80GiB'\n[devices.'cuda:1']\nmemory = '80GiB'\n"                 \
    "[devices.'cuda:2']\nmemory = '80GiB'\n"

static char scratch[64];

static config_t *configuration(const char *text)
{
    char path[128];
    snprintf(path, sizeof(path), "%s/c.toml", scratch);
    FILE *file = fopen(path, "w");
    fputs(text, file);
    fclose(file);
    config_overrides_t overrides = {.config_path = path};
    config_t *config = NULL;
    if (config_load(&overrides, &config) != XP_OK)
        fail_msg("%s", xp_error_last()->text);
    return config;
}

static config_t *deployment(const char *atn, const char *ffn, const char *more, const char *model)
{
    char text[2048];
    snprintf(text, sizeof(text),
             "daemon.socket = '%s/d.sock'\ndaemon.http = '127.0.0.1:0'\nlogging.level = 'error'\n"
             "deadlines.drain = 5\natn.devices = [%s]\nffn.devices = [%s]\n%s\n[[models]]\n"
             "id = 'm'\npath = '" MODEL "'\nengine = 'sglang'\n%s\n",
             scratch, atn, ffn, more, model);
    return configuration(text);
}

static plan_result_t *plan_of(const config_t *config)
{
    plan_result_t *plan = NULL;
    if (planner_make(config, 1, &plan) != XP_OK)
        fail_msg("%s", xp_error_last()->text);
    return plan;
}

/* ---- a Generation -----------------------------------------------------------------------------
 */

#define FFN_COUNT 2
typedef struct fixture {
    config_t *config;
    plan_result_t *plan;
    pid_t daemon;
    int atn[2], ffn[FFN_COUNT];
    uint32_t atn_count;
    life_page_t *life;
    uint8_t digest[MODEL_DIGEST_BYTES];
} fixture_t;

static xpw_Envelope *expect_with(int fd, pb_size_t body, wire_descriptors_t *fds)
{
    static xpw_Envelope envelope;
    uint64_t deadline = xp_monotonic_ns() + PATIENCE_NS;
    xp_status_t status;
    fds->count = 0;
    while ((status = wire_receive(fd, &envelope, fds)) == XP_RETRY) {
        if (xp_monotonic_ns() > deadline)
            fail_msg("the daemon says nothing instead of %s", wire_body_name(body));
        struct pollfd waiting = {.fd = fd, .events = POLLIN};
        poll(&waiting, 1, 100);
    }
    if (status != XP_OK)
        fail_msg("the daemon closed instead of sending %s", wire_body_name(body));
    if (envelope.which_body != body)
        fail_msg("%s instead of %s: %s", wire_body_name(envelope.which_body), wire_body_name(body),
                 envelope.which_body == xpw_Envelope_refused_tag   ? envelope.body.refused.reason
                 : envelope.which_body == xpw_Envelope_failure_tag ? envelope.body.failure.what
                                                                   : "");
    return &envelope;
}

static xpw_Envelope *expect(int fd, pb_size_t body, uint32_t descriptors)
{
    wire_descriptors_t fds;
    xpw_Envelope *envelope = expect_with(fd, body, &fds);
    assert_int_equal(fds.count, descriptors);
    wire_descriptors_close(&fds);
    return envelope;
}

static bool silent(int fd)
{
    struct pollfd waiting = {.fd = fd, .events = POLLIN};
    return poll(&waiting, 1, 150) == 0;
}

/* In place of device memory; its size tells whose it is. */
static int memory(uint32_t bytes)
{
    int fd = memfd_create("memory", MFD_CLOEXEC);
    assert_true(fd >= 0 && ftruncate(fd, bytes) == 0);
    return fd;
}

static void expect_size(int fd, off_t bytes)
{
    assert_int_equal(lseek(fd, 0, SEEK_END), bytes);
}

static int connect_as(const fixture_t *f, xpw_Role role, const char *name, uint32_t rank)
{
    return daemon_hello(f->config, role, name, rank, role == xpw_Role_ROLE_INSTANCE);
}

/* An Instance Rank of a process of its own, which holds the life word as libxpool does. */
typedef struct rank {
    pid_t pid;
    int fd, life_fd;
    uint32_t life_index;
} rank_t;

static void send_fd(int socket, int fd)
{
    char byte = 0, control[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = control,
                             .msg_controllen = sizeof(control)};
    struct cmsghdr *item = CMSG_FIRSTHDR(&message);
    item->cmsg_level = SOL_SOCKET;
    item->cmsg_type = SCM_RIGHTS;
    item->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(item), &fd, sizeof(fd));
    assert_int_equal(sendmsg(socket, &message, 0), 1);
}

static int receive_fd(int socket)
{
    char byte, control[CMSG_SPACE(sizeof(int))];
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = control,
                             .msg_controllen = sizeof(control)};
    int fd = -1;
    assert_int_equal(recvmsg(socket, &message, MSG_CMSG_CLOEXEC), 1);
    assert_non_null(CMSG_FIRSTHDR(&message));
    memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(fd));
    return fd;
}

static void start_rank(const fixture_t *f, uint32_t number, rank_t *rank)
{
    int pair[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0, pair), 0);
    rank->pid = fork();
    if (rank->pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        int fd = connect_as(f, xpw_Role_ROLE_INSTANCE, "m", number);
        send_fd(pair[1], fd);
        close(fd);
        for (;;)
            pause();
    }
    rank->fd = receive_fd(pair[0]);
    close(pair[0]);
    close(pair[1]);
    const config_model_t *model = &f->config->models[0];
    xpw_Envelope envelope = {.which_body = xpw_Envelope_workload_tag};
    xpw_Workload *w = &envelope.body.workload;
    snprintf(w->engine, sizeof(w->engine), "test");
    memcpy(w->checkpoint, f->digest, sizeof(w->checkpoint));
    w->hidden = f->plan->models[0].spec.hidden;
    w->layers = f->plan->models[0].spec.layers;
    w->attention_tp = model->attention_tp;
    w->attention_dp = model->attention_dp;
    w->decode_rows = 32;
    w->prefill_rows = 128;
    say(rank->fd, &envelope, NULL, 0);
    wire_descriptors_t fds;
    xpw_Envelope *plane = expect_with(rank->fd, xpw_Envelope_device_plane_tag, &fds);
    rank->life_index = plane->body.device_plane.life_index;
    assert_true(rank->life_index > 0);
    assert_int_equal(fds.count, 2);
    fabric_plan_t planned;
    assert_int_equal(pread(fds.fds[1], &planned, sizeof(planned), 0), sizeof(planned));
    assert_int_equal(fabric_plan_check(&planned, sizeof(planned)), XP_OK);
    assert_string_equal(planned.instances[0].id, "m");
    wire_descriptors_close(&fds);
    expect(rank->fd, xpw_Envelope_admitted_tag, KV_DESCRIPTORS);
}

static void offer_arena(const fixture_t *f, const rank_t *rank, uint32_t bytes, uint32_t dtype)
{
    xpw_Envelope offer = {.which_body = xpw_Envelope_arena_offer_tag};
    offer.body.arena_offer.hidden = f->plan->models[0].spec.hidden;
    offer.body.arena_offer.max_rows = f->plan->models[0].max_rows;
    offer.body.arena_offer.dtype = dtype;
    int fd = memory(bytes);
    say(rank->fd, &offer, &fd, 1);
    close(fd);
}

static void kill_rank(rank_t *rank)
{
    kill(rank->pid, SIGKILL);
    assert_int_equal(waitpid(rank->pid, NULL, 0), rank->pid);
    close(rank->fd);
}

static uint64_t expect_arena(int agent, uint32_t rank, off_t bytes)
{
    wire_descriptors_t fds;
    xpw_Envelope *attach = expect_with(agent, xpw_Envelope_arena_attach_tag, &fds);
    assert_int_equal(attach->body.arena_attach.rank, rank);
    assert_int_equal(attach->body.arena_attach.dtype, XP_DTYPE_BF16);
    assert_true(attach->body.arena_attach.life_index > 0);
    assert_int_equal(fds.count, 1);
    expect_size(fds.fds[0], bytes);
    wire_descriptors_close(&fds);
    return attach->body.arena_attach.lease;
}

static void attached(int agent, uint32_t rank, uint64_t lease, const char *error)
{
    xpw_Envelope envelope = {.which_body = xpw_Envelope_arena_attached_tag};
    envelope.body.arena_attached.rank = rank;
    envelope.body.arena_attached.lease = lease;
    snprintf(envelope.body.arena_attached.error, sizeof(envelope.body.arena_attached.error), "%s",
             error);
    say(agent, &envelope, NULL, 0);
}

static void detached(int agent, uint32_t rank)
{
    xpw_Envelope envelope = {.which_body = xpw_Envelope_arena_detached_tag};
    envelope.body.arena_detached.rank = rank;
    say(agent, &envelope, NULL, 0);
}

static void expect_stage(int fd, xpw_StageKind kind, uint32_t ffn, off_t bytes)
{
    wire_descriptors_t fds;
    xpw_Envelope *grant = expect_with(fd, xpw_Envelope_stage_grant_tag, &fds);
    assert_int_equal(grant->body.stage_grant.kind, kind);
    assert_int_equal(grant->body.stage_grant.instance, 0);
    assert_int_equal(grant->body.stage_grant.ffn, ffn);
    assert_int_equal(fds.count, 1);
    expect_size(fds.fds[0], bytes);
    wire_descriptors_close(&fds);
}

static void offer_stage(int agent, xpw_StageKind kind, uint32_t rank, uint32_t bytes)
{
    xpw_Envelope offer = {.which_body = xpw_Envelope_stage_offer_tag};
    offer.body.stage_offer.kind = kind;
    offer.body.stage_offer.rank = rank;
    int fd = memory(bytes);
    say(agent, &offer, &fd, 1);
    close(fd);
}

static void initialized(int fd)
{
    xpw_Envelope envelope = {.which_body = xpw_Envelope_initialized_tag};
    say(fd, &envelope, NULL, 0);
}

static void wait_verdict(const fixture_t *f, const char *text)
{
    uint64_t deadline = xp_monotonic_ns() + PATIENCE_NS;
    for (;;) {
        xpw_Envelope question = {.which_body = xpw_Envelope_check_tag}, answer;
        if (client_ask(f->config, "test", &question, xpw_Envelope_verdict_tag, XP_NS_PER_S,
                       &answer) == XP_OK) {
            const xpw_Verdict *verdict = &answer.body.verdict;
            if (!text && verdict->system_ready)
                return;
            for (pb_size_t i = 0; text && i < verdict->reasons_count; i++)
                if (strstr(verdict->reasons[i], text))
                    return;
            if (xp_monotonic_ns() > deadline)
                fail_msg("not %s but %s", text ? text : "ready",
                         verdict->reasons_count ? verdict->reasons[0] : "ready");
        } else if (xp_monotonic_ns() > deadline) {
            fail_msg("no verdict: %s", xp_error_last()->text);
        }
        nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    }
}

static int greet(fixture_t *f, xpw_Role role, const char *name)
{
    return connect_as(f, role, name, 0);
}

static void expect_plane(fixture_t *f, int agent, bool relay)
{
    wire_descriptors_t fds;
    xpw_Envelope *plane = expect_with(agent, xpw_Envelope_device_plane_tag, &fds);
    assert_int_equal(plane->body.device_plane.relay, relay);
    assert_int_equal(fds.count, 1);
    if (!f->life)
        assert_int_equal(transport_life_map(fds.fds[0], &f->life), XP_OK);
    wire_descriptors_close(&fds);
}

static int agent_of(const fixture_t *f, uint32_t p)
{
    return p < f->atn_count ? f->atn[p] : f->ffn[p - f->atn_count];
}

static void register_all(fixture_t *f)
{
    for (uint32_t a = 0; a < f->atn_count; a++)
        f->atn[a] = greet(f, xpw_Role_ROLE_ATNAGENT, f->config->atn[a].name);
    for (uint32_t i = 0; i < FFN_COUNT; i++)
        f->ffn[i] = greet(f, xpw_Role_ROLE_FFNAGENT, f->config->ffn[i].name);
    for (uint32_t p = 0; p < f->atn_count + FFN_COUNT; p++) {
        expect_plane(f, agent_of(f, p), fabric_provider_relays(f->plan->plan.provider));
        expect(agent_of(f, p), xpw_Envelope_join_tag, 1);
    }
}

/* The daemon, and agents that have registered. */
static void begin(fixture_t *f, const char *atn, uint32_t atn_count, const char *more,
                  const char *model)
{
    char text[1024];
    *f = (fixture_t){.atn_count = atn_count};
    snprintf(text, sizeof(text),
             "%s[devices.'cuda:0']\nmemory = '80GiB'\n[devices.'cuda:1']\nmemory = '80GiB'\n"
             "[devices.'cuda:2']\nmemory = '80GiB'\n[devices.'cuda:3']\nmemory = '80GiB'\n",
             more);
    f->config = deployment(atn, "'cuda:2', 'cuda:3'", text, model);
    f->plan = plan_of(f->config);
    assert_int_equal(model_checkpoint_digest(MODEL, f->digest), XP_OK);
    f->daemon = daemon_fork(f->config, PATIENCE_NS);
    register_all(f);
}

/* All of them have joined; FfnAgents are told to load. */
static void join(fixture_t *f)
{
    for (uint32_t p = 0; p < f->atn_count + FFN_COUNT; p++) {
        xpw_Envelope joined = {.which_body = xpw_Envelope_joined_tag};
        joined.body.joined.generation = 1;
        say(agent_of(f, p), &joined, NULL, 0);
    }
    for (uint32_t i = 0; i < FFN_COUNT; i++) {
        xpw_Envelope *prepare = expect(f->ffn[i], xpw_Envelope_prepare_tag, 0);
        assert_true(prepare->body.prepare.memory_bytes == f->plan->ffn[i].budget_bytes);
    }
}

static void start(fixture_t *f, const char *atn, uint32_t atn_count, const char *more,
                  const char *model)
{
    begin(f, atn, atn_count, more, model);
    join(f);
}

static void executable(const fixture_t *f)
{
    xpw_Envelope envelope = {.which_body = xpw_Envelope_executable_tag};
    for (uint32_t i = 0; i < FFN_COUNT; i++)
        say(f->ffn[i], &envelope, NULL, 0);
}

static int wait_daemon(fixture_t *f)
{
    int wait_status = 0;
    assert_int_equal(waitpid(f->daemon, &wait_status, 0), f->daemon);
    xp_memfd_unmap(f->life);
    planner_free(f->plan);
    config_destroy(f->config);
    return WIFEXITED(wait_status) ? WEXITSTATUS(wait_status) : -1;
}

static int finish(fixture_t *f)
{
    for (uint32_t p = 0; p < f->atn_count + FFN_COUNT; p++) {
        int agent = agent_of(f, p);
        while (expect(agent, xpw_Envelope_stop_tag, 0)->body.stop.phase !=
               xpw_StopPhase_STOP_FINALIZE)
            ;
        xpw_Envelope bye = {.which_body = xpw_Envelope_bye_tag};
        say(agent, &bye, NULL, 0);
        close(agent);
    }
    return wait_daemon(f);
}

static int controller(void)
{
    char path[PATH_MAX], devices[64] = "";
    int pid = 0;
    snprintf(path, sizeof(path), "%s/mps/cuda-0/pipe/control.pid", scratch);
    FILE *file = fopen(path, "r");
    if (!file)
        return 0;
    assert_int_equal(fscanf(file, "%d %63s", &pid, devices), 2);
    fclose(file);
    assert_string_equal(devices, "0,2,3");
    return pid;
}
#endif
