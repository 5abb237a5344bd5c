/* SPDX-License-Identifier: MIT */
/*
 * The daemon's side of Instances with ranks and with engines behind libxpool. A real daemon runs in
 * a child process; agents and ranks are sockets of this test that speak the control channel by
 * hand.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <jansson.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <netinet/in.h>
#include <arpa/inet.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "config/config.h"
#include "control/client.h"
#include "control/planner.h"
#include "model/digest.h"
#include "transport/transport.h"
#include "wire/wire.h"
#include "forked_daemon.h"

#define PATIENCE_NS (20 * XP_NS_PER_S)
#define ATN         2
#define RESTARTS    20
#define HEAVY_BYTES (64u << 20)
#define MODEL       XPOOL_SOURCE_DIR "/models/tales/qwen3-moe"

typedef struct fixture {
    char folder[64];
    config_t *config;
    plan_result_t *plan;
    pid_t daemon;
    int agents[ATN + 1]; /* AtnAgents, then the FfnAgent */
    uint8_t digest[MODEL_DIGEST_BYTES];
} fixture_t;

/* ---- the wire, by hand -------------------------------------------------------------------- */

/* The next message but `skipped`; false when the daemon closed. */
static bool hear(int fd, xpw_Envelope *envelope, wire_descriptors_t *fds)
{
    uint64_t deadline = xp_monotonic_ns() + PATIENCE_NS;
    for (;;) {
        fds->count = 0;
        xp_status_t status = wire_receive(fd, envelope, fds);
        if (status == XP_OK)
            return true;
        if (status != XP_RETRY)
            return false;
        if (xp_monotonic_ns() > deadline)
            fail_msg("the daemon says nothing");
        struct pollfd waiting = {.fd = fd, .events = POLLIN};
        poll(&waiting, 1, 100);
    }
}

static xpw_Envelope expect_with(int fd, pb_size_t body, wire_descriptors_t *fds)
{
    static xpw_Envelope envelope;
    if (!hear(fd, &envelope, fds))
        fail_msg("the daemon closed instead of sending %s", wire_body_name(body));
    if (envelope.which_body != body)
        fail_msg("%s instead of %s: %s", wire_body_name(envelope.which_body), wire_body_name(body),
                 envelope.which_body == xpw_Envelope_refused_tag ? envelope.body.refused.reason
                                                                 : "");
    return envelope;
}

static xpw_Envelope expect(int fd, pb_size_t body)
{
    wire_descriptors_t fds;
    xpw_Envelope envelope = expect_with(fd, body, &fds);
    wire_descriptors_close(&fds);
    return envelope;
}

static int connect_as(const fixture_t *f, xpw_Role role, const char *name, uint32_t rank,
                      bool library)
{
    return daemon_hello(f->config, role, name, rank, library);
}

static void expect_refused(int fd, const char *text)
{
    xpw_Envelope envelope = expect(fd, xpw_Envelope_refused_tag);
    if (!strstr(envelope.body.refused.reason, text))
        fail_msg("\"%s\" says nothing of \"%s\"", envelope.body.refused.reason, text);
    close(fd);
}

static xpw_Envelope workload(const fixture_t *f, uint32_t tp, uint32_t dp)
{
    xpw_Envelope envelope = {.which_body = xpw_Envelope_workload_tag};
    xpw_Workload *w = &envelope.body.workload;
    snprintf(w->engine, sizeof(w->engine), "a \"strange\" name");
    memcpy(w->checkpoint, f->digest, sizeof(w->checkpoint));
    snprintf(w->path, sizeof(w->path), "/somewhere");
    w->hidden = f->plan->models[0].spec.hidden;
    w->layers = f->plan->models[0].spec.layers;
    w->attention_tp = tp;
    w->attention_dp = dp;
    w->decode_rows = 32;
    w->prefill_rows = 128;
    return envelope;
}

/* Hello, Workload, Admitted, ArenaOffer, ArenaAttach (answered), Attached. */
static int join_rank(const fixture_t *f, uint32_t rank, uint32_t tp, uint32_t dp)
{
    int fd = connect_as(f, xpw_Role_ROLE_INSTANCE, "m", rank, true);
    xpw_Envelope envelope = workload(f, tp, dp);
    say(fd, &envelope, NULL, 0);
    xpw_Envelope answer = expect(fd, xpw_Envelope_admitted_tag);
    const xpw_Admitted *admitted = &answer.body.admitted;
    assert_int_equal(admitted->atn_index, rank);
    assert_int_equal(admitted->dp_size, dp);
    assert_int_equal(admitted->max_rows, 128);
    transport_geometry_t geometry = {.hidden = admitted->hidden,
                                     .max_rows = admitted->max_rows,
                                     .dtype = XP_DTYPE_F32,
                                     .dp_size = dp};
    transport_client_t *transport;
    assert_int_equal(transport_client_create(&geometry, 0, &transport), XP_OK);
    xpw_Envelope offer = {.which_body = xpw_Envelope_arena_offer_tag};
    offer.body.arena_offer.hidden = geometry.hidden;
    offer.body.arena_offer.max_rows = geometry.max_rows;
    offer.body.arena_offer.dtype = XP_DTYPE_F32;
    int arena = transport_client_fd(transport);
    say(fd, &offer, &arena, 1);
    wire_descriptors_t fds;
    xpw_Envelope attach = expect_with(f->agents[rank], xpw_Envelope_arena_attach_tag, &fds);
    assert_int_equal(fds.count, 1);
    wire_descriptors_close(&fds);
    assert_int_equal(attach.body.arena_attach.rank, rank);
    assert_int_equal(attach.body.arena_attach.dp_size, dp);
    xpw_Envelope attached = {.which_body = xpw_Envelope_arena_attached_tag};
    attached.body.arena_attached.rank = rank;
    attached.body.arena_attached.lease = attach.body.arena_attach.lease;
    say(f->agents[rank], &attached, NULL, 0);
    xpw_Envelope doorbell = expect(fd, xpw_Envelope_attached_tag);
    assert_int_equal(doorbell.body.attached.atn_pe, rank);
    transport_client_destroy(transport);
    return fd;
}

static void initialized(int fd, uint16_t port)
{
    xpw_Envelope envelope = {.which_body = xpw_Envelope_initialized_tag};
    snprintf(envelope.body.initialized.host, sizeof(envelope.body.initialized.host), "0.0.0.0");
    envelope.body.initialized.port = port;
    envelope.body.initialized.weight_bytes = 1000;
    say(fd, &envelope, NULL, 0);
}

static bool silent(int fd)
{
    struct pollfd waiting = {.fd = fd, .events = POLLIN};
    return poll(&waiting, 1, 200) == 0;
}

static xpw_Verdict verdict_of(const fixture_t *f)
{
    static xpw_Envelope answer;
    xpw_Envelope question = {.which_body = xpw_Envelope_check_tag};
    assert_int_equal(client_ask(f->config, "test", &question, xpw_Envelope_verdict_tag,
                                5 * XP_NS_PER_S, &answer),
                     XP_OK);
    return answer.body.verdict;
}

static void wait_reason(const fixture_t *f, const char *text)
{
    uint64_t deadline = xp_monotonic_ns() + PATIENCE_NS;
    for (;;) {
        xpw_Verdict verdict = verdict_of(f);
        if (!text && verdict.system_ready)
            return;
        for (pb_size_t i = 0; text && i < verdict.reasons_count; i++)
            if (strstr(verdict.reasons[i], text))
                return;
        if (xp_monotonic_ns() > deadline)
            fail_msg("not %s, but: %s", text ? text : "ready",
                     verdict.reasons_count ? verdict.reasons[0] : "ready");
        nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    }
}

/* ---- a health that answers when it is told to --------------------------------------------------
 */

static int listen_health(uint16_t *port_out)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof(address);
    assert_int_equal(bind(fd, (struct sockaddr *)&address, size), 0);
    assert_int_equal(listen(fd, 8), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&address, &size), 0);
    *port_out = ntohs(address.sin_port);
    return fd;
}

static void answer_health(int listener, const char *line)
{
    char request[1024], answer[128];
    struct pollfd waiting = {.fd = listener, .events = POLLIN};
    assert_int_equal(poll(&waiting, 1, 20000), 1);
    int fd = accept(listener, NULL, NULL);
    ssize_t got = read(fd, request, sizeof(request) - 1);
    assert_true(got > 0);
    request[got] = '\0';
    assert_non_null(strstr(request, "GET /health "));
    int length = snprintf(answer, sizeof(answer), "HTTP/1.1 %s\r\nContent-Length: 0\r\n\r\n", line);
    assert_int_equal(write(fd, answer, (size_t)length), length);
    close(fd);
}

/* ---- system ------------------------------------------------------------------------------------
 */

/* The daemon, and agents that joined and can execute. `root`: more settings; `setting`: more of the
 * [[models]] entry. */
static void start_with(fixture_t *f, const char *root, const char *setting)
{
    char path[128], socket_path[128];
    *f = (fixture_t){.daemon = 0};
    snprintf(f->folder, sizeof(f->folder), "/tmp/xpool-ranks-XXXXXX");
    assert_non_null(mkdtemp(f->folder));
    snprintf(path, sizeof(path), "%s/c.toml", f->folder);
    snprintf(socket_path, sizeof(socket_path), "%s/d.sock", f->folder);
    FILE *file = fopen(path, "w");
    fprintf(file,
            "daemon.socket = '%s'\ndaemon.http = '127.0.0.1:0'\natn.devices = ['cpu:0', 'cpu:1']\n"
            "ffn.devices = ['cpu:2']\nlogging.level = 'error'\ndeadlines.drain = 5\n%s\n"
            "[devices.'cpu:0']\nmemory = '256MiB'\n[devices.'cpu:1']\nmemory = '256MiB'\n"
            "[devices.'cpu:2']\nmemory = '256MiB'\n"
            "[[models]]\nid = 'm'\npath = '%s'\n%s\n",
            socket_path, root, MODEL, setting);
    fclose(file);
    config_overrides_t overrides = {.config_path = path};
    assert_int_equal(config_load(&overrides, &f->config), XP_OK);
    assert_int_equal(planner_make(f->config, 1, &f->plan), XP_OK);
    assert_int_equal(model_checkpoint_digest(MODEL, f->digest), XP_OK);
    f->daemon = daemon_fork(f->config, PATIENCE_NS);
    for (uint32_t a = 0; a < ATN; a++)
        f->agents[a] = connect_as(f, xpw_Role_ROLE_ATNAGENT, f->config->atn[a].name, 0, false);
    f->agents[ATN] = connect_as(f, xpw_Role_ROLE_FFNAGENT, f->config->ffn[0].name, 0, false);
    for (uint32_t a = 0; a <= ATN; a++) {
        expect(f->agents[a], xpw_Envelope_join_tag);
        xpw_Envelope joined = {.which_body = xpw_Envelope_joined_tag};
        joined.body.joined.generation = 1;
        say(f->agents[a], &joined, NULL, 0);
    }
    expect(f->agents[ATN], xpw_Envelope_prepare_tag);
    xpw_Envelope executable = {.which_body = xpw_Envelope_executable_tag};
    say(f->agents[ATN], &executable, NULL, 0);
}

static void start(fixture_t *f, const char *setting)
{
    start_with(f, "", setting);
}

static void send_down(const fixture_t *f)
{
    assert_int_equal(kill(f->daemon, SIGTERM), 0);
}

/* The agents end in order; the daemon's exit code. */
static int finish(fixture_t *f)
{
    for (uint32_t a = 0; a <= ATN; a++) {
        xpw_Envelope stop;
        do
            stop = expect(f->agents[a], xpw_Envelope_stop_tag);
        while (stop.body.stop.phase != xpw_StopPhase_STOP_FINALIZE);
        xpw_Envelope bye = {.which_body = xpw_Envelope_bye_tag};
        say(f->agents[a], &bye, NULL, 0);
        close(f->agents[a]);
    }
    int wait_status = 0;
    assert_int_equal(waitpid(f->daemon, &wait_status, 0), f->daemon);
    char command[128];
    snprintf(command, sizeof(command), "rm -rf %s", f->folder);
    assert_int_equal(system(command), 0);
    planner_free(f->plan);
    config_destroy(f->config);
    return WIFEXITED(wait_status) ? WEXITSTATUS(wait_status) : -1;
}

static void expect_stop(int fd, xpw_StopPhase phase)
{
    xpw_Envelope stop = expect(fd, xpw_Envelope_stop_tag);
    assert_int_equal(stop.body.stop.phase, phase);
}

static void expect_detached(int agent, uint32_t rank)
{
    xpw_Envelope detach = expect(agent, xpw_Envelope_arena_detach_tag);
    assert_int_equal(detach.body.arena_detach.rank, rank);
}

/* The answer of one of the daemon's own paths holds this text. */
static void expect_http(const fixture_t *f, const char *path, const char *text)
{
    static char answer[65536];
    char request[128];
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    address.sin_port = htons((uint16_t)verdict_of(f).http_port);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&address, sizeof(address)), 0);
    int length = snprintf(request, sizeof(request), "GET %s HTTP/1.0\r\n\r\n", path);
    assert_int_equal(write(fd, request, (size_t)length), length);
    size_t used = 0;
    ssize_t got;
    while (used < sizeof(answer) - 1 &&
           (got = read(fd, answer + used, sizeof(answer) - 1 - used)) > 0)
        used += (size_t)got;
    answer[used] = '\0';
    close(fd);
    if (!strstr(answer, text))
        fail_msg("%s does not say %s: %s", path, text, answer);
}

/* ---- tests -------------------------------------------------------------------------------------
 */

static void
an_instance_serves_when_all_ranks_are_past_the_barrier_and_its_health_answered(void **state)
{
    (void)state;
    fixture_t f;
    uint16_t port;
    int listener = listen_health(&port);
    start(&f, "engine = 'sglang'\nattention_tp = 2");
    int first = join_rank(&f, 0, 2, 1);
    assert_true(silent(first)); /* its calls would wait for the other's */
    int second = join_rank(&f, 1, 2, 1);
    expect(first, xpw_Envelope_initialize_tag);
    expect(second, xpw_Envelope_initialize_tag);
    initialized(first, port);
    wait_reason(&f, "initialising");
    initialized(second, port);
    wait_reason(&f, "waiting for its HTTP /health");
    answer_health(listener, "503 Service Unavailable");
    wait_reason(&f, "waiting for its HTTP /health");
    answer_health(listener, "200 OK");
    wait_reason(&f, NULL);
    assert_true(verdict_of(&f).serving_healthy);

    /* The ordered end: a library's ranks go without a word, and that is in order. */
    send_down(&f);
    expect_stop(first, xpw_StopPhase_STOP_QUIESCE);
    expect_stop(first, xpw_StopPhase_STOP_DRAIN);
    expect_stop(second, xpw_StopPhase_STOP_QUIESCE);
    expect_stop(second, xpw_StopPhase_STOP_DRAIN);
    /* Until its socket closes a rank keeps its arena, whatever it says. */
    xpw_Envelope bye = {.which_body = xpw_Envelope_bye_tag};
    say(first, &bye, NULL, 0);
    assert_true(silent(f.agents[0]));
    close(second);
    expect_detached(f.agents[1], 1);
    expect_detached(f.agents[0], 0);
    close(first);
    assert_int_equal(finish(&f), 0);
    close(listener);
}

static void one_ranks_death_is_the_instances(void **state)
{
    (void)state;
    fixture_t f;
    start(&f, "engine = 'sglang'\nattention_dp = 2");
    int first = join_rank(&f, 0, 1, 2), second = join_rank(&f, 1, 1, 2);
    expect(first, xpw_Envelope_initialize_tag);
    expect(second, xpw_Envelope_initialize_tag);
    initialized(first, 0);
    initialized(second, 0); /* an engine without HTTP has no health to wait for */
    wait_reason(&f, NULL);

    close(second);
    expect_detached(f.agents[1], 1);
    expect_detached(f.agents[0], 0);
    expect_stop(first, xpw_StopPhase_STOP_FINALIZE);
    wait_reason(&f, "rank 1");

    /* Its successor waits until the last of its ranks has ended. */
    int next[2];
    xpw_Envelope envelope = workload(&f, 1, 2);
    for (uint32_t r = 0; r < 2; r++) {
        next[r] = connect_as(&f, xpw_Role_ROLE_INSTANCE, "m", r, true);
        say(next[r], &envelope, NULL, 0);
        assert_true(silent(next[r]));
    }
    close(first);
    for (uint32_t r = 0; r < 2; r++)
        expect(next[r], xpw_Envelope_admitted_tag);
    close(next[0]);
    expect_stop(next[1], xpw_StopPhase_STOP_FINALIZE);
    wait_reason(&f, "rank 0");

    /* One that waits may leave, and does not keep an ordered end waiting. */
    int leaving = connect_as(&f, xpw_Role_ROLE_INSTANCE, "m", 0, true);
    int late = connect_as(&f, xpw_Role_ROLE_INSTANCE, "m", 1, true);
    assert_true(silent(leaving) && silent(late));
    xpw_Envelope leave = {.which_body = xpw_Envelope_leave_tag};
    say(leaving, &leave, NULL, 0);
    expect_stop(leaving, xpw_StopPhase_STOP_FINALIZE);
    close(leaving);
    send_down(&f);
    xpw_Envelope refused = expect(late, xpw_Envelope_refused_tag);
    assert_true(refused.body.refused.stopping);
    close(late);
    expect_stop(next[1], xpw_StopPhase_STOP_QUIESCE);
    close(next[1]);
    assert_int_equal(finish(&f), 0);
}

static void a_successor_waits_no_longer_than_it_would_for_a_daemon(void **state)
{
    (void)state;
    fixture_t f;
    start_with(&f, "deadlines.registration = 2", "engine = 'sglang'\nattention_dp = 2");
    int first = join_rank(&f, 0, 1, 2), second = join_rank(&f, 1, 1, 2);
    expect(first, xpw_Envelope_initialize_tag);
    close(second);
    expect_stop(first, xpw_StopPhase_STOP_FINALIZE);
    uint64_t since_ns = xp_monotonic_ns();
    int next = connect_as(&f, xpw_Role_ROLE_INSTANCE, "m", 0, true);
    expect_refused(next, "has not ended within 1.75 s (deadlines.registration)");
    assert_true(xp_monotonic_ns() - since_ns > 1700 * XP_NS_PER_MS);
    close(first);
    send_down(&f);
    expect_detached(f.agents[1], 1);
    expect_detached(f.agents[0], 0);
    assert_int_equal(finish(&f), 0);
}

/* Registers as the Instance, says so through the pipe, and lives until it is killed. Its memory
 * makes its end take a while. */
static pid_t fork_instance(const fixture_t *f)
{
    int ready[2];
    char byte;
    assert_int_equal(pipe(ready), 0);
    pid_t pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        char *memory = malloc(HEAVY_BYTES);
        memset(memory, 1, HEAVY_BYTES);
        int fd = connect_as(f, xpw_Role_ROLE_INSTANCE, "m", 0, false);
        expect(fd, xpw_Envelope_admitted_tag);
        if (write(ready[1], memory, 1) == 1)
            for (;;)
                pause();
        _exit(1);
    }
    close(ready[1]);
    assert_int_equal(read(ready[0], &byte, 1), 1);
    close(ready[0]);
    return pid;
}

static void an_instance_is_started_in_the_moment_of_its_predecessors_kill(void **state)
{
    (void)state;
    fixture_t f;
    start(&f, "");
    for (int i = 0; i < RESTARTS; i++) {
        pid_t former = fork_instance(&f);
        assert_int_equal(kill(former, SIGKILL), 0);
        int next = connect_as(&f, xpw_Role_ROLE_INSTANCE, "m", 0, false);
        expect(next, xpw_Envelope_admitted_tag);
        int wait_status;
        assert_int_equal(waitpid(former, &wait_status, 0), former);
        close(next);
        wait_reason(&f, "died");
    }
    send_down(&f);
    assert_int_equal(finish(&f), 0);
}

/* It is over when it says so, not when its processes have gone. */
static void a_ranks_failure_is_the_instances(void **state)
{
    (void)state;
    fixture_t f;
    start(&f, "engine = 'sglang'\nattention_tp = 2");
    int first = join_rank(&f, 0, 2, 1), second = join_rank(&f, 1, 2, 1);
    expect(first, xpw_Envelope_initialize_tag);
    expect(second, xpw_Envelope_initialize_tag);
    initialized(first, 0);
    initialized(second, 0);
    wait_reason(&f, NULL);
    xpw_Envelope report = {.which_body = xpw_Envelope_fail_report_tag};
    snprintf(report.body.fail_report.what, sizeof(report.body.fail_report.what), "a bad\xff step");
    say(second, &report, NULL, 0);
    expect_stop(first, xpw_StopPhase_STOP_FINALIZE);
    expect_stop(second, xpw_StopPhase_STOP_FINALIZE);
    expect_detached(f.agents[0], 0);
    expect_detached(f.agents[1], 1);
    wait_reason(&f, "a bad\xff step");
    /* Whatever a process says, the daemon's answers are JSON. */
    expect_http(&f, "/v1/state", "\"reason\": \"a bad? step\"");
    expect_http(&f, "/ready", "m: a bad? step");
    expect_http(&f, "/metrics", "release=\"a _strange_ name\"");
    close(second);
    close(first);
    send_down(&f);
    assert_int_equal(finish(&f), 0);
}

/* A rank that is killed for its silence takes the others along, but in their own time: this process
 * is one of them. */
static void the_others_of_a_killed_rank_may_end_by_themselves(void **state)
{
    (void)state;
    fixture_t f;
    start(&f, "engine = 'sglang'\nattention_tp = 2");
    pid_t silent_rank = fork();
    if (silent_rank == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        connect_as(&f, xpw_Role_ROLE_INSTANCE, "m", 0, true);
        for (;;)
            pause();
    }
    int second = join_rank(&f, 1, 2, 1);
    expect_stop(second, xpw_StopPhase_STOP_FINALIZE);
    int wait_status;
    assert_int_equal(waitpid(silent_rank, &wait_status, 0), silent_rank);
    assert_true(WIFSIGNALED(wait_status) && WTERMSIG(wait_status) == SIGKILL);
    wait_reason(&f, "sent no Workload");
    close(second);
    expect_detached(f.agents[1], 1);
    send_down(&f);
    assert_int_equal(finish(&f), 0);
}

static void workloads_that_differ_are_refused_by_name(void **state)
{
    (void)state;
    fixture_t f;
    start(&f, "engine = 'sglang'");
    expect_refused(connect_as(&f, xpw_Role_ROLE_INSTANCE, "m", 0, false), "models[m].engine");
    expect_refused(connect_as(&f, xpw_Role_ROLE_INSTANCE, "x", 0, true), "models[].id");
    expect_refused(connect_as(&f, xpw_Role_ROLE_INSTANCE, "m", 1, true), "attention_tp");
    static const char *const texts[] = {
        "models[m].path",   "layers of width",        "layers of width",       "attention_tp = 1",
        "attention_dp = 1", "--max-running-requests", "--chunked-prefill-size"};
    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
        int fd = connect_as(&f, xpw_Role_ROLE_INSTANCE, "m", 0, true);
        xpw_Envelope envelope = workload(&f, 1, 1);
        xpw_Workload *w = &envelope.body.workload;
        w->checkpoint[5] ^= i == 0;
        w->hidden += i == 1;
        w->layers += i == 2;
        w->attention_tp += i == 3;
        w->attention_dp += i == 4;
        w->decode_rows = i == 5 ? 129 : 32;
        w->prefill_rows = i == 6 ? 129 : 128;
        say(fd, &envelope, NULL, 0);
        expect_refused(fd, texts[i]);
    }
    wait_reason(&f, "chunked-prefill-size"); /* the model says why it is not there */
    int first = join_rank(&f, 0, 1, 1);
    expect_refused(connect_as(&f, xpw_Role_ROLE_INSTANCE, "m", 0, true),
                   "already has its Instance");
    close(first);
    expect_detached(f.agents[0], 0);
    send_down(&f);
    assert_int_equal(finish(&f), 0);
}

/* A connection of a process that has ended: the daemon gets no pidfd of it. */
static int connect_as_nobody(const fixture_t *f)
{
    int pair[2];
    wire_descriptors_t fds = {0};
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
    pid_t child = fork();
    if (child == 0) {
        int fd;
        xpw_Envelope envelope = {.which_body = xpw_Envelope_attached_tag};
        _exit(wire_connect(f->config->daemon.socket, &fd) == XP_OK &&
                      wire_send(pair[1], &envelope, &fd, 1) == XP_OK
                  ? 0
                  : 1);
    }
    assert_int_equal(waitpid(child, NULL, 0), child);
    expect_with(pair[0], xpw_Envelope_attached_tag, &fds);
    assert_int_equal(fds.count, 1);
    close(pair[0]);
    close(pair[1]);
    return wire_descriptors_take(&fds, 0);
}

/* Its KV memory would be counted as free while it holds it. */
static void who_cannot_be_watched_is_refused(void **state)
{
    (void)state;
    for (int library = 0; library < 2; library++) {
        fixture_t f;
        start(&f, library ? "engine = 'sglang'\n" : "");
        int fd = connect_as_nobody(&f);
        say_hello(fd, f.config, xpw_Role_ROLE_INSTANCE, "m", 0, library);
        if (library) {
            xpw_Envelope envelope = workload(&f, 1, 1);
            say(fd, &envelope, NULL, 0);
        }
        expect_refused(fd, "nobody would know when its KV memory is free");
        /* The place is free for another one. */
        fd = connect_as(&f, xpw_Role_ROLE_INSTANCE, "m", 0, library);
        if (library) {
            xpw_Envelope envelope = workload(&f, 1, 1);
            say(fd, &envelope, NULL, 0);
        }
        expect(fd, xpw_Envelope_admitted_tag);
        close(fd);
        send_down(&f);
        assert_int_equal(finish(&f), 0);
    }
}

/* In tokens, of the KV Capacity Groups of model m. */
static uint32_t floors(const fixture_t *f, uint32_t *floors_out)
{
    static xpw_Envelope answer;
    xpw_Envelope question = {.which_body = xpw_Envelope_kv_ask_tag};
    int fd = -1;
    assert_int_equal(client_ask_for(f->config, "test", &question, xpw_Envelope_kv_answer_tag,
                                    5 * XP_NS_PER_S, &answer, &fd),
                     XP_OK);
    json_t *kv = json_loadfd(fd, JSON_DISABLE_EOF_CHECK, NULL), *group;
    assert_non_null(kv);
    close(fd);
    size_t index;
    uint32_t count = 0;
    json_array_foreach(json_object_get(kv, "groups"), index, group)
    {
        if (strcmp(json_string_value(json_object_get(group, "model")), "m") == 0)
            floors_out[count++] = (uint32_t)json_integer_value(
                json_object_get(json_object_get(group, "floor"), "tokens"));
    }
    json_decref(kv);
    return count;
}

static bool set_floor(const fixture_t *f, const char *model, uint32_t tokens)
{
    static xpw_Envelope answer;
    xpw_Envelope question = {.which_body = xpw_Envelope_kv_ask_tag};
    xpw_KvAsk *ask = &question.body.kv_ask;
    ask->verb = xpw_KvVerb_KV_SET;
    snprintf(ask->model, sizeof(ask->model), "%s", model);
    ask->has_floor = true;
    ask->floor_tokens = tokens;
    assert_int_equal(client_ask(f->config, "test", &question, xpw_Envelope_kv_answer_tag,
                                5 * XP_NS_PER_S, &answer),
                     XP_OK);
    return answer.body.kv_answer.ok;
}

/* Model o holds nearly all of the second device, so the second DP rank of m has no room there for
 * what fits the first. */
static void the_dp_ranks_of_a_model_are_set_together_or_not_at_all(void **state)
{
    (void)state;
    fixture_t f;
    uint32_t before[2], after[2];
    start(&f, "engine = 'sglang'\nattention_dp = 2\n"
              "[[models]]\nid = 'n'\npath = '" MODEL "'\nkv_floor_tokens = 128\n"
              "[[models]]\nid = 'o'\npath = '" MODEL "'\nkv_floor_tokens = 30000\n");
    assert_int_equal(floors(&f, before), 2);
    assert_int_equal(before[0], before[1]);
    assert_true(set_floor(&f, "o", 32800));
    assert_false(set_floor(&f, "m", 14448));
    floors(&f, after);
    assert_memory_equal(before, after, sizeof(before));
    assert_true(set_floor(&f, "m", before[0] * 2));
    floors(&f, after);
    assert_true(after[0] == before[0] * 2 && after[1] == before[0] * 2);
    send_down(&f);
    assert_int_equal(finish(&f), 0);
}

static void another_engine_cannot_be_the_native_one(void **state)
{
    (void)state;
    fixture_t f;
    start(&f, "");
    expect_refused(connect_as(&f, xpw_Role_ROLE_INSTANCE, "m", 0, true), "\"native\"");
    send_down(&f);
    assert_int_equal(finish(&f), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(
            an_instance_serves_when_all_ranks_are_past_the_barrier_and_its_health_answered),
        cmocka_unit_test(one_ranks_death_is_the_instances),
        cmocka_unit_test(a_successor_waits_no_longer_than_it_would_for_a_daemon),
        cmocka_unit_test(an_instance_is_started_in_the_moment_of_its_predecessors_kill),
        cmocka_unit_test(a_ranks_failure_is_the_instances),
        cmocka_unit_test(the_others_of_a_killed_rank_may_end_by_themselves),
        cmocka_unit_test(workloads_that_differ_are_refused_by_name),
        cmocka_unit_test(the_dp_ranks_of_a_model_are_set_together_or_not_at_all),
        cmocka_unit_test(another_engine_cannot_be_the_native_one),
        cmocka_unit_test(who_cannot_be_watched_is_refused),
    };
    unsetenv("XPOOL_UNDER_UP");
    signal(SIGPIPE, SIG_IGN);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
