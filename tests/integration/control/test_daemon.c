/* SPDX-License-Identifier: MIT */
/*
 * The daemon as a real process, spoken to over its socket by made-up participants: what it refuses,
 * how the three verdicts come apart, leases of arenas, canonical failures and the ordered end. No
 * agent and no weight is involved; the checkpoint is only planned with.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/memfd.h"
#include "control/client.h"
#include "control/daemon.h"
#include "control/planner.h"
#include "transport/transport.h"
#include "wire/wire.h"

#define PATIENCE_NS (10 * XP_NS_PER_S)

typedef struct fixture {
    char folder[64], file[96];
    config_t *config;
    plan_result_t *plan;
    pid_t daemon;
} fixture_t;

static void sleep_ms(long milliseconds)
{
    nanosleep(
        &(struct timespec){.tv_sec = milliseconds / 1000, .tv_nsec = milliseconds % 1000 * 1000000},
        NULL);
}

static int setup_with(void **state, const char *deadlines)
{
    fixture_t *f = calloc(1, sizeof(*f));
    strcpy(f->folder, "/tmp/xpool-daemon-XXXXXX");
    assert_non_null(mkdtemp(f->folder));
    snprintf(f->file, sizeof(f->file), "%s/c.toml", f->folder);
    FILE *out = fopen(f->file, "w");
    assert_non_null(out);
    fprintf(out,
            "[daemon]\nsocket = \"%s/d.sock\"\nhttp = \"127.0.0.1:0\"\n"
            "[gateway]\nhttp = \"127.0.0.1:1\"\n"
            "[devices.\"cpu:0\"]\nmemory = \"256MiB\"\nthreads = 1\n"
            "[devices.\"cpu:1\"]\nmemory = \"256MiB\"\nthreads = 1\n"
            "[deadlines]\n%s\n"
            "[[models]]\nid = \"m\"\npath = \"%s/models/tales/qwen3-moe\"\n",
            f->folder, deadlines, XPOOL_SOURCE_DIR);
    fclose(out);
    config_overrides_t overrides = {.config_path = f->file};
    assert_int_equal(config_load(&overrides, &f->config), XP_OK);
    assert_int_equal(planner_make(f->config, 1, &f->plan), XP_OK);
    f->daemon = fork();
    if (f->daemon == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        xp_log_configure(XP_LOG_ERROR, XP_LOG_TEXT, XP_COLOR_NEVER);
        int null = open("/dev/null", O_WRONLY);
        dup2(null, STDERR_FILENO);
        _exit(daemon_run(f->config));
    }
    int socket = -1;
    for (int i = 0; i < 1000 && wire_connect(f->config->daemon.socket, &socket) != XP_OK; i++)
        sleep_ms(10);
    assert_true(socket >= 0);
    close(socket);
    *state = f;
    return 0;
}

static int setup(void **state)
{
    return setup_with(state, "drain = 1.0\nstop = 1.0");
}

static int setup_short(void **state)
{
    return setup_with(state, "drain = 1.0\nstop = 1.0\nstartup = 1.0\nregistration = 1.5");
}

static int setup_reform(void **state)
{
    return setup_with(state, "drain = 1.0\nstop = 1.0\nreform = 3.0");
}

static int teardown(void **state)
{
    fixture_t *f = *state;
    if (f->daemon) {
        kill(f->daemon, SIGKILL);
        waitpid(f->daemon, NULL, 0);
    }
    planner_free(f->plan);
    config_destroy(f->config);
    char command[128];
    snprintf(command, sizeof(command), "rm -rf %s", f->folder);
    int ignored = system(command);
    (void)ignored;
    free(f);
    return 0;
}

/* ---- participants -----------------------------------------------------------------------------
 */

static int join_in(fixture_t *f)
{
    int socket;
    assert_int_equal(wire_connect(f->config->daemon.socket, &socket), XP_OK);
    return socket;
}

static xpw_Envelope hello_of(const fixture_t *f, xpw_Role role, const char *name)
{
    xpw_Envelope envelope = {.which_body = xpw_Envelope_hello_tag};
    xpw_Hello *hello = &envelope.body.hello;
    hello->abi = WIRE_ABI;
    strcpy(hello->version, XPOOL_VERSION);
    hello->role = role;
    snprintf(hello->name, sizeof(hello->name), "%s", name);
    memcpy(hello->digest, f->config->digest, sizeof(hello->digest));
    return envelope;
}

/* The next message; which_body 0 after the peer closed or within `wait_ms` nothing came. */
static xpw_Envelope next(int socket, wire_descriptors_t *fds_out, int wait_ms)
{
    xpw_Envelope envelope = {0};
    wire_descriptors_t fds = {.count = 0};
    struct pollfd waiting = {.fd = socket, .events = POLLIN};
    if (poll(&waiting, 1, wait_ms) == 1 && wire_receive(socket, &envelope, &fds) != XP_OK)
        envelope.which_body = 0;
    if (fds_out)
        *fds_out = fds;
    else
        wire_descriptors_close(&fds);
    return envelope;
}

static xpw_Envelope expect(int socket, pb_size_t tag, wire_descriptors_t *fds_out)
{
    for (int i = 0; i < 50; i++) {
        xpw_Envelope envelope = next(socket, fds_out, 5000);
        if (envelope.which_body == tag)
            return envelope;
        if (envelope.which_body == 0)
            break;
        if (fds_out)
            wire_descriptors_close(fds_out);
    }
    fail_msg("no %s came", wire_body_name(tag));
    return (xpw_Envelope){0};
}

static int say_hello(fixture_t *f, xpw_Role role, const char *name)
{
    int socket = join_in(f);
    xpw_Envelope hello = hello_of(f, role, name);
    assert_int_equal(wire_send(socket, &hello, NULL, 0), XP_OK);
    return socket;
}

static void expect_refusal(fixture_t *f, const xpw_Envelope *hello, const char *part)
{
    int socket = join_in(f);
    assert_int_equal(wire_send(socket, hello, NULL, 0), XP_OK);
    xpw_Envelope answer = expect(socket, xpw_Envelope_refused_tag, NULL);
    if (!strstr(answer.body.refused.reason, part))
        fail_msg("\"%s\" does not say \"%s\"", answer.body.refused.reason, part);
    close(socket);
}

static xpw_Verdict check(fixture_t *f)
{
    xpw_Envelope question = {.which_body = xpw_Envelope_check_tag}, answer;
    assert_int_equal(
        client_ask(f->config, "test", &question, xpw_Envelope_verdict_tag, PATIENCE_NS, &answer),
        XP_OK);
    return answer.body.verdict;
}

static void simple(int socket, pb_size_t tag)
{
    xpw_Envelope envelope = {.which_body = tag};
    assert_int_equal(wire_send(socket, &envelope, NULL, 0), XP_OK);
}

static bool has_reason(const xpw_Verdict *verdict, const char *part)
{
    for (pb_size_t i = 0; i < verdict->reasons_count; i++)
        if (strstr(verdict->reasons[i], part))
            return true;
    return false;
}

static void form(int atn, int ffn)
{
    wire_descriptors_t fds;
    expect(atn, xpw_Envelope_join_tag, &fds);
    assert_int_equal(fds.count, 3);
    wire_descriptors_close(&fds);
    expect(ffn, xpw_Envelope_join_tag, NULL);
    simple(atn, xpw_Envelope_joined_tag);
    simple(ffn, xpw_Envelope_joined_tag);
    expect(ffn, xpw_Envelope_prepare_tag, NULL);
    simple(ffn, xpw_Envelope_executable_tag);
}

/* All agents joined and executable. */
static void agents(fixture_t *f, int *atn_out, int *ffn_out)
{
    *atn_out = say_hello(f, xpw_Role_ROLE_ATNAGENT, "cpu:0");
    *ffn_out = say_hello(f, xpw_Role_ROLE_FFNAGENT, "cpu:1");
    form(*atn_out, *ffn_out);
}

/* A participant whose process is a child of this one, which has its socket too: of the child's end
 * only the end of its process tells. */
static pid_t fork_peer(fixture_t *f, xpw_Role role, const char *name, int *socket_out)
{
    int ready[2];
    assert_int_equal(pipe(ready), 0);
    pid_t pid = (pid_t)syscall(SYS_clone, CLONE_FILES | SIGCHLD, NULL, NULL, NULL, NULL);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        int socket = say_hello(f, role, name);
        if (write(ready[1], &socket, sizeof(socket)) == sizeof(socket))
            for (;;)
                pause();
        _exit(1);
    }
    assert_true(pid > 0);
    assert_int_equal(read(ready[0], socket_out, sizeof(*socket_out)), sizeof(*socket_out));
    close(ready[0]);
    close(ready[1]);
    return pid;
}

/* A successor's Hello, which the daemon reads before it hears of `former`'s death. */
static int succeed(fixture_t *f, pid_t former, xpw_Role role, const char *name)
{
    int wait_status, socket = join_in(f);
    xpw_Envelope hello = hello_of(f, role, name);
    check(f); /* the connection was taken */
    assert_int_equal(kill(f->daemon, SIGSTOP), 0);
    assert_int_equal(waitpid(f->daemon, &wait_status, WUNTRACED), f->daemon);
    assert_int_equal(wire_send(socket, &hello, NULL, 0), XP_OK);
    assert_int_equal(kill(former, SIGKILL), 0);
    assert_int_equal(waitpid(former, &wait_status, 0), former);
    assert_int_equal(kill(f->daemon, SIGCONT), 0);
    return socket;
}

static int exit_code(fixture_t *f)
{
    int status = -1;
    for (int i = 0; i < 1000; i++) {
        if (waitpid(f->daemon, &status, WNOHANG) == f->daemon) {
            f->daemon = 0;
            return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        }
        sleep_ms(10);
    }
    fail_msg("the daemon did not end");
    return -1;
}

/* ---- tests ------------------------------------------------------------------------------------
 */

static void what_is_refused_says_why(void **state)
{
    fixture_t *f = *state;
    xpw_Envelope hello = hello_of(f, xpw_Role_ROLE_FFNAGENT, "cpu:1");
    hello.body.hello.abi++;
    expect_refusal(f, &hello, "ABI");
    hello = hello_of(f, xpw_Role_ROLE_FFNAGENT, "cpu:1");
    strcpy(hello.body.hello.version, "0.0.0");
    expect_refusal(f, &hello, "version 0.0.0");
    hello = hello_of(f, xpw_Role_ROLE_FFNAGENT, "cpu:1");
    hello.body.hello.digest[5] ^= 1;
    expect_refusal(f, &hello, "configuration differs");
    hello = hello_of(f, xpw_Role_ROLE_FFNAGENT, "cpu:7");
    expect_refusal(f, &hello, "cpu:7 is not in ffn.devices");
    hello = hello_of(f, xpw_Role_ROLE_ATNAGENT, "cpu:1");
    expect_refusal(f, &hello, "cpu:1 is not in atn.devices");
    hello = hello_of(f, xpw_Role_ROLE_INSTANCE, "nobody");
    expect_refusal(f, &hello, "nobody");
    hello = hello_of(f, xpw_Role_ROLE_INSTANCE, "m");
    hello.body.hello.rank = 3;
    expect_refusal(f, &hello, "rank 3");
    hello = hello_of(f, (xpw_Role)77, "m");
    expect_refusal(f, &hello, "role");

    int first = say_hello(f, xpw_Role_ROLE_FFNAGENT, "cpu:1");
    xpw_Verdict verdict = check(f); /* by now the first one is registered */
    assert_false(has_reason(&verdict, "ffnagent cpu:1 is not registered"));
    hello = hello_of(f, xpw_Role_ROLE_FFNAGENT, "cpu:1");
    expect_refusal(f, &hello, "already has its agent");
    close(first);
}

static void a_refused_peer_is_heard_no_more_and_then_dropped(void **state)
{
    fixture_t *f = *state;
    int socket = join_in(f);
    xpw_Envelope wrong = hello_of(f, xpw_Role_ROLE_INSTANCE, "nobody");
    for (int i = 0; i < 5; i++)
        assert_int_equal(wire_send(socket, &wrong, NULL, 0), XP_OK);
    expect(socket, xpw_Envelope_refused_tag, NULL);
    wire_descriptors_t fds;
    assert_int_equal(next(socket, &fds, 4000).which_body, 0); /* closed, without a second answer */
    close(socket);
    assert_string_equal(check(f).state, "REGISTERING");
}

static void verdicts_come_apart(void **state)
{
    fixture_t *f = *state;
    xpw_Verdict verdict = check(f);
    assert_false(verdict.fabric_executable || verdict.system_ready || verdict.serving_healthy);
    assert_true(has_reason(&verdict, "atnagent cpu:0 is not registered"));
    assert_true(has_reason(&verdict, "ffnagent cpu:1 is not registered"));
    assert_true(has_reason(&verdict, "model m"));

    int atn, ffn;
    agents(f, &atn, &ffn);
    verdict = check(f);
    assert_true(verdict.fabric_executable);
    assert_false(verdict.system_ready);
    assert_false(verdict.serving_healthy);
    assert_string_equal(verdict.state, "EXECUTABLE");

    int instance = say_hello(f, xpw_Role_ROLE_INSTANCE, "m");
    xpw_Admitted admitted = expect(instance, xpw_Envelope_admitted_tag, NULL).body.admitted;
    assert_int_equal(admitted.hidden, 192);
    assert_int_equal(admitted.max_rows, f->plan->models[0].max_rows);
    transport_geometry_t geometry = {.hidden = admitted.hidden,
                                     .max_rows = admitted.max_rows,
                                     .dtype = XP_DTYPE_F32,
                                     .dp_size = 1};
    transport_client_t *client;
    assert_int_equal(transport_client_create(&geometry, 0, &client), XP_OK);
    xpw_Envelope offer = {.which_body = xpw_Envelope_arena_offer_tag};
    offer.body.arena_offer.hidden = geometry.hidden;
    offer.body.arena_offer.max_rows = geometry.max_rows;
    offer.body.arena_offer.dtype = XP_DTYPE_F32;
    int arena = transport_client_fd(client);
    assert_int_equal(wire_send(instance, &offer, &arena, 1), XP_OK);
    wire_descriptors_t fds;
    xpw_ArenaAttach attach = expect(atn, xpw_Envelope_arena_attach_tag, &fds).body.arena_attach;
    assert_int_equal(fds.count, 1);
    wire_descriptors_close(&fds);
    xpw_Envelope attached = {.which_body = xpw_Envelope_arena_attached_tag};
    attached.body.arena_attached.lease = attach.lease + 1; /* of another attachment: ignored */
    assert_int_equal(wire_send(atn, &attached, NULL, 0), XP_OK);
    verdict = check(f);
    assert_true(has_reason(&verdict, "waiting for its AtnAgent"));
    attached.body.arena_attached.lease = attach.lease;
    assert_int_equal(wire_send(atn, &attached, NULL, 0), XP_OK);
    expect(instance, xpw_Envelope_attached_tag, NULL);
    expect(instance, xpw_Envelope_initialize_tag, NULL);
    xpw_Envelope initialized = {.which_body = xpw_Envelope_initialized_tag};
    strcpy(initialized.body.initialized.host, "127.0.0.1");
    initialized.body.initialized.port = 9; /* nobody answers there */
    assert_int_equal(wire_send(instance, &initialized, NULL, 0), XP_OK);
    sleep_ms(200);
    verdict = check(f);
    assert_true(verdict.fabric_executable && verdict.system_ready);
    assert_false(verdict.serving_healthy); /* its own HTTP did not answer */
    assert_string_equal(verdict.state, "READY");

    /* The Instance leaves without a word: its model is named, the rest stands, the arena is closed.
     */
    close(instance);
    expect(atn, xpw_Envelope_arena_detach_tag, NULL);
    verdict = check(f);
    assert_true(verdict.fabric_executable);
    assert_false(verdict.system_ready);
    assert_true(has_reason(&verdict, "died"));
    float row[192] = {0};
    transport_request_t request = {.rows = 1};
    transport_tensor_t tensor = {row, XP_DTYPE_F32, 2, 1, 192, 192};
    assert_int_equal(transport_client_put(client, &request, &tensor), XP_CLOSED);
    transport_client_destroy(client);
    close(atn);
    close(ffn);
}

/* ---- from one Generation to the next ----------------------------------------------------------
 */

typedef struct served {
    int socket;
    transport_client_t *client;
    uint64_t lease;
} served_t;

/* The Instance of model m, up to READY. */
static served_t serve(fixture_t *f, int atn)
{
    served_t self = {.socket = say_hello(f, xpw_Role_ROLE_INSTANCE, "m")};
    xpw_Admitted admitted = expect(self.socket, xpw_Envelope_admitted_tag, NULL).body.admitted;
    assert_true(admitted.pause_ns == 3 * XP_NS_PER_S);
    transport_geometry_t geometry = {.hidden = admitted.hidden,
                                     .max_rows = admitted.max_rows,
                                     .dtype = XP_DTYPE_F32,
                                     .dp_size = 1};
    assert_int_equal(transport_client_create(&geometry, 0, &self.client), XP_OK);
    xpw_Envelope envelope = {.which_body = xpw_Envelope_arena_offer_tag};
    envelope.body.arena_offer.hidden = geometry.hidden;
    envelope.body.arena_offer.max_rows = geometry.max_rows;
    envelope.body.arena_offer.dtype = XP_DTYPE_F32;
    int arena = transport_client_fd(self.client);
    assert_int_equal(wire_send(self.socket, &envelope, &arena, 1), XP_OK);
    self.lease = expect(atn, xpw_Envelope_arena_attach_tag, NULL).body.arena_attach.lease;
    envelope = (xpw_Envelope){.which_body = xpw_Envelope_arena_attached_tag};
    envelope.body.arena_attached.lease = self.lease;
    assert_int_equal(wire_send(atn, &envelope, NULL, 0), XP_OK);
    wire_descriptors_t fds;
    expect(self.socket, xpw_Envelope_attached_tag, &fds);
    assert_int_equal(transport_client_set_doorbell(self.client, fds.fds[0], 0), XP_OK);
    wire_descriptors_close(&fds);
    expect(self.socket, xpw_Envelope_initialize_tag, NULL);
    envelope = (xpw_Envelope){.which_body = xpw_Envelope_initialized_tag};
    strcpy(envelope.body.initialized.host, "127.0.0.1");
    envelope.body.initialized.port = 9;
    assert_int_equal(wire_send(self.socket, &envelope, NULL, 0), XP_OK);
    for (int i = 0; i < 500 && strcmp(check(f).state, "READY") != 0; i++)
        sleep_ms(10);
    assert_string_equal(check(f).state, "READY");
    return self;
}

static ino_t inode_of(int fd)
{
    struct stat info;
    assert_int_equal(fstat(fd, &info), 0);
    return info.st_ino;
}

/* Closes it, as its end would. */
static void told_of_failure(int *socket, uint64_t generation, const char *who)
{
    xpw_Failure failure = expect(*socket, xpw_Envelope_failure_tag, NULL).body.failure;
    assert_true(failure.generation == generation);
    assert_string_equal(failure.who, who);
    close(*socket);
    *socket = -1;
}

static void offer_weights(int ffn, int fd, uint32_t block)
{
    xpw_Envelope envelope = {.which_body = xpw_Envelope_kept_weights_tag};
    envelope.body.kept_weights = (xpw_KeptWeights){
        .block = block, .blocks = 2, .bytes = 4096, .identity = 11, .content = 22};
    assert_int_equal(wire_send(ffn, &envelope, &fd, 1), XP_OK);
}

static void joins(int socket, uint64_t generation)
{
    assert_true(expect(socket, xpw_Envelope_join_tag, NULL).body.join.generation == generation);
    simple(socket, xpw_Envelope_joined_tag);
}

static void a_request_and_the_weights_outlive_their_generation(void **state)
{
    fixture_t *f = *state;
    int atn, ffn, weights[2];
    agents(f, &atn, &ffn);
    for (uint32_t b = 0; b < 2; b++) {
        assert_int_equal(xp_memfd_create("weights", 4096, &weights[b]), XP_OK);
        offer_weights(ffn, weights[b], b);
    }
    served_t served = serve(f, atn);
    float row[192] = {1.5f}, out[192] = {0};
    transport_request_t request = {.rows = 1, .layer = 2};
    transport_tensor_t input = {row, XP_DTYPE_F32, 2, 1, 192, 192}, output = input;
    output.data = out;
    assert_int_equal(transport_client_put(served.client, &request, &input), XP_OK);

    close(ffn);
    told_of_failure(&atn, 1, "ffnagent cpu:1");
    xpw_Verdict verdict = check(f);
    assert_string_equal(verdict.state, "REGISTERING");
    assert_true(has_reason(&verdict, "Generation 1 failed (ffnagent cpu:1"));
    assert_true(has_reason(&verdict, "its open requests wait for the next Generation"));
    assert_false(verdict.system_ready || verdict.serving_healthy || verdict.fabric_executable);
    assert_int_equal(next(served.socket, NULL, 100).which_body, 0); /* it is told nothing */
    assert_int_equal(transport_client_wait(served.client, xp_monotonic_ns()), XP_TIMEOUT);

    /* One that dies before the Generation has formed leaves its place, and that is all. */
    atn = say_hello(f, xpw_Role_ROLE_ATNAGENT, "cpu:0");
    check(f);
    close(atn);
    sleep_ms(50);
    atn = say_hello(f, xpw_Role_ROLE_ATNAGENT, "cpu:0");
    ffn = say_hello(f, xpw_Role_ROLE_FFNAGENT, "cpu:1");
    joins(atn, 2);
    joins(ffn, 2);
    wire_descriptors_t fds;
    for (uint32_t b = 0; b < 2; b++) {
        xpw_KeptWeights kept = expect(ffn, xpw_Envelope_kept_weights_tag, &fds).body.kept_weights;
        assert_int_equal(fds.count, 1);
        assert_true(inode_of(fds.fds[0]) == inode_of(weights[b]) && kept.block == b &&
                    kept.blocks == 2 && kept.bytes == 4096 && kept.identity == 11 &&
                    kept.content == 22);
        wire_descriptors_close(&fds);
    }
    expect(ffn, xpw_Envelope_prepare_tag, NULL);
    xpw_ArenaAttach attach = expect(atn, xpw_Envelope_arena_attach_tag, &fds).body.arena_attach;
    assert_true(attach.lease != served.lease);
    assert_true(inode_of(fds.fds[0]) == inode_of(transport_client_fd(served.client)));
    transport_geometry_t geometry = {
        .hidden = attach.hidden, .max_rows = attach.max_rows, .dtype = XP_DTYPE_F32, .dp_size = 1};
    transport_server_t *server;
    assert_int_equal(transport_server_create(fds.fds[0], &geometry, &server), XP_OK);
    wire_descriptors_close(&fds);
    xpw_Envelope attached = {.which_body = xpw_Envelope_arena_attached_tag};
    attached.body.arena_attached.lease = attach.lease;
    assert_int_equal(wire_send(atn, &attached, NULL, 0), XP_OK);
    simple(ffn, xpw_Envelope_executable_tag);
    transport_pending_t pending;
    assert_int_equal(transport_server_poll(server, &pending), XP_OK);
    assert_true(pending.sequence == 1 && pending.layer == 2 && pending.rows == 1);
    ((float *)pending.output)[0] = 2 * ((const float *)pending.input)[0];
    transport_server_complete(server, 1, XP_OK);
    assert_int_equal(transport_client_wait(served.client, xp_monotonic_ns() + PATIENCE_NS), XP_OK);
    assert_int_equal(transport_client_take(served.client, &output), XP_OK);
    assert_true(out[0] == 3.0f);
    for (int i = 0; i < 500 && !check(f).system_ready; i++)
        sleep_ms(10);
    verdict = check(f);
    assert_true(verdict.system_ready);
    assert_string_equal(verdict.state, "READY");
    assert_int_equal(next(served.socket, NULL, 100).which_body, 0);

    /* Nobody comes: at the deadline it is everybody's failure, and the arena is closed. */
    assert_int_equal(transport_client_put(served.client, &request, &input), XP_OK);
    close(atn);
    told_of_failure(&ffn, 2, "atnagent cpu:0");
    xpw_Failure last = expect(served.socket, xpw_Envelope_failure_tag, NULL).body.failure;
    assert_true(last.generation == 3);
    assert_non_null(strstr(last.what, "deadlines.reform"));
    assert_int_equal(transport_client_wait(served.client, xp_monotonic_ns() + PATIENCE_NS),
                     XP_FATAL);
    close(served.socket);
    assert_int_equal(exit_code(f), 1);
    transport_server_destroy(server);
    transport_client_destroy(served.client);
    close(weights[0]);
    close(weights[1]);
}

/* Each new Generation fails with the request unanswered, the last one that may after others were
 * answered: the Instance is given up, and the rest goes on. */
static void a_request_that_ends_generations_ends_its_instance(void **state)
{
    fixture_t *f = *state;
    int atn, ffn;
    agents(f, &atn, &ffn);
    served_t served = serve(f, atn);
    float row[192] = {0};
    transport_request_t request = {.rows = 1};
    transport_tensor_t input = {row, XP_DTYPE_F32, 2, 1, 192, 192};
    assert_int_equal(transport_client_put(served.client, &request, &input), XP_OK);
    for (uint64_t generation = 1; generation <= 4; generation++) {
        close(ffn);
        told_of_failure(&atn, generation, "ffnagent cpu:1");
        atn = say_hello(f, xpw_Role_ROLE_ATNAGENT, "cpu:0");
        ffn = say_hello(f, xpw_Role_ROLE_FFNAGENT, "cpu:1");
        joins(atn, generation + 1);
        joins(ffn, generation + 1);
        expect(ffn, xpw_Envelope_prepare_tag, NULL);
        if (generation <= 3) {
            xpw_Envelope attached = {.which_body = xpw_Envelope_arena_attached_tag};
            attached.body.arena_attached.lease =
                expect(atn, xpw_Envelope_arena_attach_tag, NULL).body.arena_attach.lease;
            assert_int_equal(wire_send(atn, &attached, NULL, 0), XP_OK);
        }
        simple(ffn, xpw_Envelope_executable_tag);
        for (int i = 0; i < 500 && !check(f).fabric_executable; i++)
            sleep_ms(10);
    }
    expect(served.socket, xpw_Envelope_stop_tag, NULL);
    assert_int_equal(transport_client_wait(served.client, xp_monotonic_ns() + PATIENCE_NS),
                     XP_CLOSED);
    xpw_Verdict verdict = check(f);
    assert_true(verdict.fabric_executable);
    assert_true(has_reason(&verdict, "Generations in a row failed over its request 1"));
    close(served.socket);
    transport_client_destroy(served.client);
    close(atn);
    close(ffn);
}

/* Descriptors of the daemon that name this. */
static uint32_t holds(const fixture_t *f, const char *part)
{
    char folder[64], path[PATH_MAX], link[PATH_MAX];
    uint32_t found = 0;
    snprintf(folder, sizeof(folder), "/proc/%d/fd", (int)f->daemon);
    for (int fd = 0; fd < 1024; fd++) {
        snprintf(path, sizeof(path), "%s/%d", folder, fd);
        ssize_t length = readlink(path, link, sizeof(link) - 1);
        link[length > 0 ? length : 0] = 0;
        found += strstr(link, part) != NULL;
    }
    return found;
}

static void an_agent_that_comes_before_the_news_of_a_death_is_of_the_next_generation(void **state)
{
    fixture_t *f = *state;
    int ffn, atn = say_hello(f, xpw_Role_ROLE_ATNAGENT, "cpu:0");
    pid_t former = fork_peer(f, xpw_Role_ROLE_FFNAGENT, "cpu:1", &ffn);
    form(atn, ffn);
    int half;
    assert_int_equal(xp_memfd_create("half-a-shard", 4096, &half), XP_OK);
    offer_weights(ffn, half, 0); /* of two */
    close(half);
    served_t served = serve(f, atn);
    assert_int_equal(holds(f, "half-a-shard"), 1);
    int successor = succeed(f, former, xpw_Role_ROLE_FFNAGENT, "cpu:1");
    told_of_failure(&atn, 1, "ffnagent cpu:1");
    close(ffn);
    atn = say_hello(f, xpw_Role_ROLE_ATNAGENT, "cpu:0");
    joins(atn, 2);
    joins(successor, 2);
    /* What nobody can adopt is not held against it. */
    assert_int_equal(next(successor, NULL, 5000).which_body, xpw_Envelope_prepare_tag);
    assert_int_equal(holds(f, "half-a-shard"), 0);
    close(served.socket);
    transport_client_destroy(served.client);
    close(atn);
    close(successor);
}

static void an_instance_that_comes_before_the_news_of_a_death_waits_for_it(void **state)
{
    fixture_t *f = *state;
    int socket;
    pid_t former = fork_peer(f, xpw_Role_ROLE_INSTANCE, "m", &socket);
    expect(socket, xpw_Envelope_admitted_tag, NULL);
    int successor = succeed(f, former, xpw_Role_ROLE_INSTANCE, "m");
    expect(successor, xpw_Envelope_admitted_tag, NULL);
    close(socket);
    close(successor);
}

static void the_first_failure_is_told_to_all_and_ends_the_daemon_with_1(void **state)
{
    fixture_t *f = *state;
    int atn, ffn;
    agents(f, &atn, &ffn);
    xpw_Envelope report = {.which_body = xpw_Envelope_fail_report_tag};
    strcpy(report.body.fail_report.what, "the first reason");
    assert_int_equal(wire_send(ffn, &report, NULL, 0), XP_OK);
    strcpy(report.body.fail_report.what, "a later reason");
    assert_int_equal(wire_send(atn, &report, NULL, 0), XP_OK);
    xpw_Failure a = expect(atn, xpw_Envelope_failure_tag, NULL).body.failure;
    xpw_Failure b = expect(ffn, xpw_Envelope_failure_tag, NULL).body.failure;
    assert_string_equal(a.what, b.what);
    assert_string_equal(a.when, b.when);
    assert_string_equal(a.who, b.who);
    assert_non_null(strstr(a.what, "reason"));
    close(atn);
    close(ffn);
    assert_int_equal(exit_code(f), 1);
}

static void last_words_count_more_than_the_death(void **state)
{
    fixture_t *f = *state;
    int atn, ffn;
    agents(f, &atn, &ffn);
    xpw_Envelope report = {.which_body = xpw_Envelope_fail_report_tag};
    strcpy(report.body.fail_report.what, "cannot read tensor x");
    assert_int_equal(wire_send(ffn, &report, NULL, 0), XP_OK);
    close(ffn);
    assert_string_equal(expect(atn, xpw_Envelope_failure_tag, NULL).body.failure.what,
                        "cannot read tensor x");
    close(atn);
    assert_int_equal(exit_code(f), 1);
}

static void an_ordered_end_asks_everyone_and_exits_0(void **state)
{
    fixture_t *f = *state;
    int atn, ffn;
    agents(f, &atn, &ffn);
    kill(f->daemon, SIGTERM);
    int all[2] = {atn, ffn};
    for (int i = 0; i < 2; i++) {
        xpw_Envelope stop = expect(all[i], xpw_Envelope_stop_tag, NULL);
        assert_int_equal(stop.body.stop.phase, xpw_StopPhase_STOP_FINALIZE);
        simple(all[i], xpw_Envelope_bye_tag);
        close(all[i]);
    }
    assert_int_equal(exit_code(f), 0);
}

static void an_instance_that_never_starts_serving_is_dropped_by_its_deadline(void **state)
{
    fixture_t *f = *state;
    int atn, ffn;
    agents(f, &atn, &ffn);
    /* A process of its own, since the daemon kills it. */
    pid_t child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        say_hello(f, xpw_Role_ROLE_INSTANCE, "m");
        for (;;)
            pause();
    }
    int status = 0;
    pid_t ended = 0;
    for (int i = 0; i < 600 && !ended; i++) {
        ended = waitpid(child, &status, WNOHANG);
        sleep_ms(10);
    }
    assert_int_equal(ended, child);
    assert_true(WIFSIGNALED(status));
    xpw_Verdict verdict = check(f);
    assert_true(has_reason(&verdict, "deadlines.startup"));
    close(atn);
    close(ffn);
}

/* `xpool up` says so; an agent that had registered is not counted once more. */
static xpw_Verdict agent_ended(fixture_t *f, xpw_Role role, const char *device, uint32_t pid)
{
    xpw_Envelope report = {.which_body = xpw_Envelope_agent_ended_tag}, answer;
    report.body.agent_ended.role = role;
    report.body.agent_ended.pid = pid;
    snprintf(report.body.agent_ended.device, sizeof(report.body.agent_ended.device), "%s", device);
    snprintf(report.body.agent_ended.how, sizeof(report.body.agent_ended.how),
             "ended with exit code 2");
    assert_int_equal(
        client_ask(f->config, "test", &report, xpw_Envelope_verdict_tag, PATIENCE_NS, &answer),
        XP_OK);
    return answer.body.verdict;
}

static void agents_that_end_before_they_register_are_counted(void **state)
{
    fixture_t *f = *state;
    int atn, ffn;
    agents(f, &atn, &ffn);
    served_t served = serve(f, atn);
    agent_ended(f, xpw_Role_ROLE_FFNAGENT, "cpu:1", 1); /* this Generation has all that it needs */
    assert_string_equal(check(f).state, "READY");
    close(ffn);
    expect(atn, xpw_Envelope_failure_tag, NULL);
    close(atn);
    close(served.socket); /* the end of all is not to be this process's */
    transport_client_destroy(served.client);
    for (int i = 0; i < 10; i++) {
        agent_ended(f, xpw_Role_ROLE_FFNAGENT, "cpu:1", (uint32_t)getpid());
        agent_ended(f, xpw_Role_ROLE_FFNAGENT, "cpu:7", 1);
        agent_ended(f, xpw_Role_ROLE_GATEWAY, "cpu:1", 1);
    }
    int others = 0;
    xpw_Verdict verdict = {.failure = ""};
    while (!verdict.failure[0] && others++ < 10)
        verdict = agent_ended(f, xpw_Role_ROLE_FFNAGENT, "cpu:1", 1);
    assert_in_range(others, 3, 6);
    if (!strstr(verdict.failure, "ffnagent cpu:1") || !strstr(verdict.failure, "exit code 2") ||
        !strstr(verdict.failure, "before it had registered") ||
        !strstr(verdict.failure, "attempts at Generations that computed nothing"))
        fail_msg("\"%s\" does not say what happened", verdict.failure);
    assert_int_equal(exit_code(f), 1);
}

/* A process that wants to leave and stays: the end of its process, by whom. */
static void expect_killed(pid_t pid)
{
    int status = 0;
    for (int i = 0; i < 500; i++) {
        pid_t ended = waitpid(pid, &status, WNOHANG);
        if (ended == pid) {
            assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
            return;
        }
        assert_int_equal(ended, 0);
        sleep_ms(10);
    }
    kill(pid, SIGKILL);
    waitpid(pid, &status, 0);
    fail_msg("a process that was told to end is still there");
}

static void who_leaves_alone_has_a_deadline_too(void **state)
{
    fixture_t *f = *state;
    int first, waiting, gateway;
    pid_t first_pid = fork_peer(f, xpw_Role_ROLE_INSTANCE, "m", &first);
    expect(first, xpw_Envelope_admitted_tag, NULL);
    simple(first, xpw_Envelope_leave_tag);
    assert_int_equal(expect(first, xpw_Envelope_stop_tag, NULL).body.stop.phase,
                     xpw_StopPhase_STOP_DRAIN);
    /* Its successor waits for its end, and leaves as well. */
    pid_t waiting_pid = fork_peer(f, xpw_Role_ROLE_INSTANCE, "m", &waiting);
    simple(waiting, xpw_Envelope_leave_tag);
    assert_int_equal(expect(waiting, xpw_Envelope_stop_tag, NULL).body.stop.phase,
                     xpw_StopPhase_STOP_FINALIZE);
    pid_t gateway_pid = fork_peer(f, xpw_Role_ROLE_GATEWAY, "127.0.0.1:1", &gateway);
    simple(gateway, xpw_Envelope_leave_tag);
    expect_killed(waiting_pid);
    expect_killed(gateway_pid);
    expect_killed(first_pid);
    close(first);
    close(waiting);
    close(gateway);
    sleep_ms(200);
    xpw_Verdict verdict = check(f);
    assert_true(has_reason(&verdict, "model m"));
    assert_string_equal(verdict.failure, "");
    /* An agent without Instances as well; the daemon stays. */
    int agent;
    pid_t agent_pid = fork_peer(f, xpw_Role_ROLE_ATNAGENT, "cpu:0", &agent);
    simple(agent, xpw_Envelope_leave_tag);
    expect_killed(agent_pid);
    close(agent);
    assert_int_equal(kill(f->daemon, SIGTERM), 0);
    assert_int_equal(exit_code(f), 0);
}

static void agents_that_never_register_fail_the_generation(void **state)
{
    fixture_t *f = *state;
    int atn = say_hello(f, xpw_Role_ROLE_ATNAGENT, "cpu:0");
    xpw_Failure failure = expect(atn, xpw_Envelope_failure_tag, NULL).body.failure;
    assert_non_null(strstr(failure.what, "deadlines.registration"));
    assert_non_null(strstr(failure.what, "ffnagent cpu:1 is not registered"));
    close(atn);
    assert_int_equal(exit_code(f), 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(what_is_refused_says_why, setup, teardown),
        cmocka_unit_test_setup_teardown(a_refused_peer_is_heard_no_more_and_then_dropped, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(verdicts_come_apart, setup, teardown),
        cmocka_unit_test_setup_teardown(a_request_and_the_weights_outlive_their_generation,
                                        setup_reform, teardown),
        cmocka_unit_test_setup_teardown(a_request_that_ends_generations_ends_its_instance,
                                        setup_reform, teardown),
        cmocka_unit_test_setup_teardown(
            an_agent_that_comes_before_the_news_of_a_death_is_of_the_next_generation, setup_reform,
            teardown),
        cmocka_unit_test_setup_teardown(
            an_instance_that_comes_before_the_news_of_a_death_waits_for_it, setup, teardown),
        cmocka_unit_test_setup_teardown(the_first_failure_is_told_to_all_and_ends_the_daemon_with_1,
                                        setup, teardown),
        cmocka_unit_test_setup_teardown(last_words_count_more_than_the_death, setup, teardown),
        cmocka_unit_test_setup_teardown(an_ordered_end_asks_everyone_and_exits_0, setup, teardown),
        cmocka_unit_test_setup_teardown(
            an_instance_that_never_starts_serving_is_dropped_by_its_deadline, setup_short,
            teardown),
        cmocka_unit_test_setup_teardown(agents_that_end_before_they_register_are_counted,
                                        setup_reform, teardown),
        cmocka_unit_test_setup_teardown(who_leaves_alone_has_a_deadline_too, setup, teardown),
        cmocka_unit_test_setup_teardown(agents_that_never_register_fail_the_generation, setup_short,
                                        teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
