/* SPDX-License-Identifier: MIT */
/*
 * A deployment of GPUs without a GPU: what is planned and refused, what of the driver's answers is
 * understood, and a Generation walked through by agents and ranks that are sockets of this test.
 * The MPS controller is this program itself, started under NVIDIA's name; descriptors of device
 * memory are memfds.
 */
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

/* ---- the fake MPS controller ------------------------------------------------------------------
 */

static int fake_mps(int argc, char **argv)
{
    char path[PATH_MAX], line[128] = "";
    int controller = 0;
    snprintf(path, sizeof(path), "%s/control.pid", getenv("CUDA_MPS_PIPE_DIRECTORY"));
    if (argc > 1 && strcmp(argv[1], "-f") == 0) {
        const char *delay = getenv("XPOOL_TEST_MPS_DELAY_MS"); /* tests/cuda/soak_on_device */
        alarm(delay ? 120 : 60); /* never outlives a broken test for long */
        usleep(delay ? (useconds_t)strtoul(delay, NULL, 10) * 1000 : 0);
        FILE *file = fopen(path, "w");
        fprintf(file, "%d %s\n", (int)getpid(), getenv("CUDA_VISIBLE_DEVICES"));
        fclose(file);
        for (;;)
            pause();
    }
    FILE *file = fopen(path, "r");
    snprintf(path, sizeof(path), "%s/hangs", getenv("CUDA_MPS_PIPE_DIRECTORY"));
    if (access(path, F_OK) == 0) {
        alarm(60);
        for (;;)
            pause();
    }
    if (!file || fscanf(file, "%d", &controller) != 1 || kill(controller, 0) != 0 ||
        !fgets(line, sizeof(line), stdin))
        return 1;
    if (strncmp(line, "quit", 4) == 0)
        kill(controller, SIGKILL);
    return 0;
}

/* ---- the fake `xpool devices --json` ----------------------------------------------------------
 */

/* Never ends by itself. */
static int fake_devices(void)
{
    alarm(60);
    if (!getenv("TEST_MUTE")) {
        printf("{\"devices\": [{\"device\": \"cuda:0\", \"memory_bytes\": 4096}]}\n");
        fclose(stdout);
    }
    pause();
    return 1;
}

/* ---- plans ------------------------------------------------------------------------------------
 */

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

static void refused(config_t *config, const char *text)
{
    plan_result_t *plan = NULL;
    if (planner_make(config, 1, &plan) == XP_OK)
        fail_msg("planned, but not refused with \"%s\"", text);
    if (!strstr(xp_error_last()->text, text))
        fail_msg("\"%s\" says nothing of \"%s\"", xp_error_last()->text, text);
    config_destroy(config);
}

static void gpus_are_planned_with_the_memory_that_is_given(void **state)
{
    config_t *config = deployment("'cuda:0'", "'cuda:1', 'cuda:2'", MEMORY, "ffn_tp_size = 2");
    plan_result_t *plan = plan_of(config);
    const fabric_plan_instance_t *instance = &plan->plan.instances[0];
    const plan_model_t *model = &plan->models[0];
    assert_true(plan->cuda);
    assert_int_equal(plan->plan.provider, FABRIC_PROVIDER_P2P);
    assert_int_equal(instance->dtype, XP_DTYPE_BF16);
    assert_int_equal(instance->delivery, FABRIC_DELIVERY_DIRECT_PARTIAL);
    assert_int_equal(instance->layer_group[0], 3);
    assert_true(plan->atn[0].budget_bytes == (uint64_t)(0.9 * (double)(80ull << 30)));
    assert_true(plan->ffn[0].budget_bytes == (80ull << 30) - (1ull << 30));
    /* Of the KV Cache: two bytes an element, K and V of every layer. */
    uint64_t token = 2ull * 2 * model->spec.layers * model->spec.kv_heads * model->spec.head_dim;
    assert_true(model->kv_bytes_per_token == token);
    assert_true(model->kv_bytes == model->kv_tokens * token);
    assert_true(model->arena_bytes >= 2ull * model->max_rows * model->spec.hidden * 2);
    assert_true(model->arena_bytes == stage_arena_bytes(instance));
    stage_bytes_t stages;
    for (uint32_t f = 0; f < 2; f++) {
        const plan_device_t *device = &plan->ffn[f];
        stage_ffn_bytes(&plan->plan, f, &stages);
        assert_true(device->arena_bytes == stages.stages + stages.partials);
        assert_true(device->weight_bytes == plan->weights[0].shard_bytes && device->weight_bytes);
        assert_true(device->workspace_bytes >= stages.tables);
    }
    assert_true(plan->fabric_bytes == 0);
    planner_free(plan);
    config_destroy(config);

    /* Without tensor parallel FFNs nothing is to be added up; under attention TP everybody gets
     * all. */
    config = deployment("'cuda:0'", "'cuda:1'", "fabric.provider = 'p2p-relay'\n" MEMORY, "");
    plan = plan_of(config);
    assert_int_equal(plan->plan.provider, FABRIC_PROVIDER_P2P_RELAY);
    assert_int_equal(plan->plan.instances[0].delivery, FABRIC_DELIVERY_SINGLE_COMPLETE);
    planner_free(plan);
    config_destroy(config);
    config =
        deployment("'cuda:0', 'cuda:1'", "'cuda:2'", MEMORY, "attention_tp = 2\ndtype = 'float16'");
    plan = plan_of(config);
    assert_int_equal(plan->plan.instances[0].delivery, FABRIC_DELIVERY_REPLICATED_COMPLETE);
    assert_int_equal(plan->plan.instances[0].dtype, XP_DTYPE_F16);
    planner_free(plan);
    config_destroy(config);
}

/* A Lane has rows of its own where several ranks get what one member computes, and nowhere else. */
static void lanes_have_rows_of_their_own_where_one_member_serves_several_ranks(void **state)
{
    static const char *const models[] = {"ffn_tp_size = 2", "ffn_tp_size = 2\nattention_tp = 2",
                                         "attention_tp = 2", ""};
    uint64_t workspace[4], rows = 0;
    for (uint32_t i = 0; i < 4; i++) {
        char model[128];
        snprintf(model, sizeof(model), "prefill_rows = 1024\n%s", models[i]);
        config_t *config = deployment("'cuda:0', 'cuda:1'", "'cuda:2', 'cuda:3'",
                                      "scheduler.ffn_concurrency = 8\n" MEMORY
                                      "[devices.'cuda:3']\nmemory = '80GiB'\n",
                                      model);
        plan_result_t *plan = plan_of(config);
        workspace[i] = plan->ffn[0].workspace_bytes;
        rows = (uint64_t)plan->models[0].max_rows * plan->models[0].spec.hidden * 2;
        planner_free(plan);
        config_destroy(config);
    }
    assert_true(workspace[1] == workspace[0]);
    assert_true(workspace[2] >= workspace[3] + rows);
}

static void a_gpu_may_have_both_roles_where_that_is_allowed(void **state)
{
    config_t *config = deployment("'cuda:0'", "'cuda:0'",
                                  "devices.allow_shared_roles = true\n"
                                  "devices.'cuda:0'.memory = '80GiB'\n",
                                  "");
    plan_result_t *plan = plan_of(config);
    assert_true(plan->atn[0].budget_bytes == (uint64_t)(0.9 * (double)(40ull << 30)));
    assert_true(plan->ffn[0].budget_bytes == 39ull << 30);
    planner_free(plan);
    config_destroy(config);
}

static void what_cannot_be_planned_is_refused_by_name(void **state)
{
    refused(deployment("'cuda:0'", "'cpu:1'", MEMORY, ""),
            "ffn.devices has cpu:1, atn.devices has cuda:0: the devices of one system");
    refused(deployment("'cpu:0', 'cuda:0'", "'cpu:1'", MEMORY, ""), "atn.devices has cuda:0");
    refused(deployment("'cuda:0'", "'cuda:1'", "fabric.provider = 'shm'\n" MEMORY, ""),
            "\"shm\" does not go with CUDA devices; use \"p2p\"");
    refused(deployment("'cpu:0'", "'cpu:1'", "fabric.provider = 'p2p'\n", ""),
            "\"p2p\" does not go with CPU devices; use \"shm\"");
    refused(deployment("'cpu:0'", "'cpu:1'", "fabric.provider = 'nvshmem'\n", ""),
            "\"nvshmem\" does not go with CPU devices; use \"shm\"");
    refused(deployment("'cuda:0'", "'cuda:1'", "fabric.provider = 'ucx'\n" MEMORY, ""),
            "\"ucx\" is not part of this build");
    refused(deployment("'cuda:0'", "'cuda:1'", MEMORY, "dtype = 'float32'"),
            "models[m].dtype: GPUs compute in bfloat16 or float16");
    refused(
        deployment("'cuda:0'", "'cuda:1'", "ffn.device_memory_calibration = 'c.toml'\n" MEMORY, ""),
        "ffn.device_memory_calibration");
    config_t *config = deployment("'cuda:0'", "'cuda:1'", MEMORY, "");
    config->models[0].engine = CONFIG_ENGINE_NATIVE;
    refused(config, "models[m].engine: the native engine computes on CPU devices, and cuda:0");
    config = deployment("'cuda:0'", "'cuda:1'", MEMORY, "");
    config->ffn[0].memory_bytes = (1ull << 30) + (1ull << 20); /* past the context, one MiB */
    refused(config, "FFN weights do not fit");
    /* Nobody has said how much memory there is, and this program is not to ask itself. */
    refused(deployment("'cuda:0'", "'cuda:1'", "", ""), "set devices.\"cuda:0\".memory");
}

static void answers_of_the_driver_are_understood(void **state)
{
    uint64_t bytes = 0;
    static const char two[] = "{\"devices\": [{\"device\": \"cpu:N\", \"memory_bytes\": 5},"
                              " {\"device\": \"cuda:0\", \"memory_bytes\": 150754820096},"
                              " {\"device\": \"cuda:1\", \"memory_bytes\": 7}]}";
    assert_int_equal(gpus_memory_parse(two, 1, &bytes), XP_OK);
    assert_true(bytes == 7);
    assert_int_equal(gpus_memory_parse(two, 0, &bytes), XP_OK);
    assert_true(bytes == 150754820096ull);
    assert_int_equal(gpus_memory_parse(two, 2, &bytes), XP_NOT_FOUND);
    assert_non_null(strstr(xp_error_last()->text, "shows no such GPU"));
    assert_int_equal(
        gpus_memory_parse("{\"devices\": [], \"cuda_unavailable\": \"no libcuda\"}", 0, &bytes),
        XP_NOT_FOUND);
    assert_non_null(strstr(xp_error_last()->text, "cuda:0: no libcuda"));
    assert_int_equal(gpus_memory_parse("{", 0, &bytes), XP_PEER);
    assert_int_equal(gpus_memory_parse("[]", 0, &bytes), XP_NOT_FOUND);

    config_t *config = deployment("'cuda:0'", "'cuda:1'", "devices.'cuda:1'.memory = '1GiB'\n", "");
    setenv(GPUS_MEMORY_VARIABLE, "3=1,0=4096", 1);
    assert_int_equal(gpus_memory(&config->atn[0], &bytes), XP_OK);
    assert_true(bytes == 4096);
    assert_int_equal(gpus_memory(&config->ffn[0], &bytes), XP_OK);
    assert_true(bytes == 1ull << 30); /* the configuration comes first */
    assert_int_equal(gpus_memory_hand_on(config), XP_OK);
    assert_string_equal(getenv(GPUS_MEMORY_VARIABLE), "0=4096");
    setenv(GPUS_MEMORY_VARIABLE, "nonsense", 1);
    assert_int_equal(gpus_memory(&config->atn[0], &bytes), XP_UNSUPPORTED);
    unsetenv(GPUS_MEMORY_VARIABLE);
    config_destroy(config);
}

static void every_process_sees_the_gpus_under_numbers_of_its_own(void **state)
{
    char list[GPUS_TEXT_BYTES];
    config_t *config = deployment("'cuda:3', 'cuda:1'", "'cuda:2', 'cuda:1'",
                                  "devices.allow_shared_roles = true\n", "");
    unsetenv("CUDA_VISIBLE_DEVICES");
    assert_int_equal(gpus_controller_list(config, list), XP_OK);
    assert_string_equal(list, "3,1,2"); /* attention devices first */
    setenv("CUDA_VISIBLE_DEVICES", "7, GPU-aa,5,6", 1);
    assert_int_equal(gpus_controller_list(config, list), XP_OK);
    assert_string_equal(list, "6,GPU-aa,5");
    setenv("CUDA_VISIBLE_DEVICES", "7,8", 1);
    assert_int_equal(gpus_controller_list(config, list), XP_NOT_FOUND);
    assert_non_null(strstr(xp_error_last()->text, "CUDA_VISIBLE_DEVICES=7,8 shows no such GPU"));
    unsetenv("CUDA_VISIBLE_DEVICES");
    const config_device_t *first[] = {&config->atn[1], &config->atn[0]};
    assert_int_equal(gpus_client_list(config, first, 2, list), XP_OK);
    assert_string_equal(list, "1,0,2");
    assert_int_equal(gpus_client_list(config, first, 1, list), XP_OK);
    assert_string_equal(list, "1,0,2");
    first[0] = &config->ffn[0];
    assert_int_equal(gpus_client_list(config, first, 1, list), XP_OK);
    assert_string_equal(list, "2,0,1");
    char name[64], pipe[PATH_MAX], log[PATH_MAX], wanted[PATH_MAX];
    assert_int_equal(gpus_mps_folders(config, name, pipe, log), XP_OK);
    assert_string_equal(name, "cuda-1-3");
    snprintf(wanted, sizeof(wanted), "%s/cuda-1-3/pipe", getenv(GPUS_MPS_ROOT_VARIABLE));
    assert_string_equal(pipe, wanted);
    assert_true(gpus_shared(config, &config->atn[1]) && !gpus_shared(config, &config->atn[0]));
    config_destroy(config);
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

static void say(int fd, const xpw_Envelope *envelope, const int *fds, uint32_t count)
{
    assert_int_equal(wire_send(fd, envelope, fds, count), XP_OK);
}

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
    int fd;
    assert_int_equal(wire_connect(f->config->daemon.socket, &fd), XP_OK);
    xpw_Envelope envelope = {.which_body = xpw_Envelope_hello_tag};
    xpw_Hello *hello = &envelope.body.hello;
    hello->abi = WIRE_ABI;
    snprintf(hello->version, sizeof(hello->version), "%s", XPOOL_VERSION);
    hello->role = role;
    snprintf(hello->name, sizeof(hello->name), "%s", name);
    hello->rank = rank;
    hello->library = role == xpw_Role_ROLE_INSTANCE;
    memcpy(hello->digest, f->config->digest, sizeof(hello->digest));
    say(fd, &envelope, NULL, 0);
    return fd;
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
    for (uint32_t a = 0; a < atn_count; a++)
        f->atn[a] = greet(f, xpw_Role_ROLE_ATNAGENT, f->config->atn[a].name);
    for (uint32_t i = 0; i < FFN_COUNT; i++)
        f->ffn[i] = greet(f, xpw_Role_ROLE_FFNAGENT, f->config->ffn[i].name);
    for (uint32_t p = 0; p < atn_count + FFN_COUNT; p++) {
        expect_plane(f, agent_of(f, p), fabric_provider_relays(f->plan->plan.provider));
        expect(agent_of(f, p), xpw_Envelope_join_tag, 1);
    }
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

static void an_instance_gets_the_stages_when_every_member_has_its_arena(void **state)
{
    fixture_t f;
    rank_t rank, next;
    start(&f, "'cuda:0'", 1, "", "ffn_tp_size = 2");
    int mps = controller();
    assert_true(mps > 0 && kill(mps, 0) == 0);
    start_rank(&f, 0, &rank);
    offer_arena(&f, &rank, 100, XP_DTYPE_BF16);
    offer_stage(f.ffn[0], xpw_StageKind_STAGE_ROWS, 0, 200);
    offer_stage(f.ffn[1], xpw_StageKind_STAGE_ROWS, 0, 201);
    assert_true(silent(f.ffn[0])); /* nobody can execute yet */
    wait_verdict(&f, "ffnagent cuda:2 loads weights");
    executable(&f);
    uint64_t lease = expect_arena(f.ffn[0], 0, 100);
    assert_true(expect_arena(f.ffn[1], 0, 100) == lease);
    attached(f.ffn[0], 0, lease, "");
    assert_true(silent(rank.fd)); /* the other member has not answered */
    attached(f.ffn[1], 0, lease - 1, "");
    assert_true(silent(rank.fd)); /* that was of another attachment */
    attached(f.ffn[1], 0, lease, "");
    expect_stage(rank.fd, xpw_StageKind_STAGE_ROWS, 0, 200);
    expect_stage(rank.fd, xpw_StageKind_STAGE_ROWS, 1, 201);
    expect(rank.fd, xpw_Envelope_attached_tag, 0);
    expect(rank.fd, xpw_Envelope_initialize_tag, 0);
    initialized(rank.fd);
    wait_verdict(&f, NULL);
    assert_true(silent(f.atn[0])); /* no row goes by it */

    /* Its counters are what the agents tell. */
    xpw_Envelope stats = {.which_body = xpw_Envelope_plane_stats_tag};
    stats.body.plane_stats.invocations = 11;
    say(f.ffn[0], &stats, NULL, 0);

    /* It dies: its word ends, and its successor waits until nobody has anything of it any more. */
    assert_true(!life_word_look(&f.life->word[rank.life_index]));
    kill_rank(&rank);
    expect(f.ffn[0], xpw_Envelope_arena_detach_tag, 0);
    expect(f.ffn[1], xpw_Envelope_arena_detach_tag, 0);
    assert_true(life_word_look(&f.life->word[rank.life_index]));
    start_rank(&f, 0, &next);
    assert_int_not_equal(next.life_index, rank.life_index);
    offer_arena(&f, &next, 101, XP_DTYPE_BF16);
    detached(f.ffn[0], 0);
    assert_true(silent(f.ffn[0]));
    detached(f.ffn[1], 0);
    uint64_t later = expect_arena(f.ffn[0], 0, 101);
    assert_true(later != lease);
    expect_arena(f.ffn[1], 0, 101);
    attached(f.ffn[0], 0, later, "no room");
    xpw_Envelope *stop = expect(next.fd, xpw_Envelope_stop_tag, 0);
    assert_int_equal(stop->body.stop.phase, xpw_StopPhase_STOP_FINALIZE);
    wait_verdict(&f, "its arena was not attached by ffnagent cuda:2: no room");
    expect(f.ffn[0], xpw_Envelope_arena_detach_tag, 0);
    expect(f.ffn[1], xpw_Envelope_arena_detach_tag, 0);
    kill_rank(&next);

    assert_int_equal(kill(f.daemon, SIGTERM), 0);
    assert_int_equal(finish(&f), 0);
    assert_true(kill(mps, 0) != 0 && errno == ESRCH); /* it ended with the system, in order */
}

static void members_get_the_partials_of_their_first(void **state)
{
    fixture_t f;
    rank_t ranks[2];
    start(&f, "'cuda:0', 'cuda:1'", 2, "", "ffn_tp_size = 2\nattention_tp = 2");
    offer_stage(f.ffn[0], xpw_StageKind_STAGE_PARTIALS, 0, 300);
    offer_stage(f.ffn[0], xpw_StageKind_STAGE_ROWS, 0, 200);
    assert_true(silent(f.ffn[1])); /* it still loads, and has nothing to map them into */
    offer_stage(f.ffn[1], xpw_StageKind_STAGE_ROWS, 0, 201);
    expect_stage(f.ffn[1], xpw_StageKind_STAGE_PARTIALS, 0, 300);
    executable(&f);
    start_rank(&f, 1, &ranks[1]);
    offer_arena(&f, &ranks[1], 101, XP_DTYPE_BF16);
    assert_true(silent(f.ffn[0])); /* all ranks or none */
    start_rank(&f, 0, &ranks[0]);
    offer_arena(&f, &ranks[0], 100, XP_DTYPE_BF16);
    for (uint32_t i = 0; i < FFN_COUNT; i++) {
        uint64_t lease = expect_arena(f.ffn[i], 0, 100);
        assert_true(expect_arena(f.ffn[i], 1, 101) == lease);
        attached(f.ffn[i], 0, lease, "");
    }
    for (uint32_t r = 0; r < 2; r++) {
        expect_stage(ranks[r].fd, xpw_StageKind_STAGE_ROWS, 0, 200);
        expect_stage(ranks[r].fd, xpw_StageKind_STAGE_ROWS, 1, 201);
        expect(ranks[r].fd, xpw_Envelope_attached_tag, 0);
    }
    /* The controller is one, for both attention devices; without it nothing can go on. */
    char path[PATH_MAX];
    int pid = 0;
    snprintf(path, sizeof(path), "%s/mps/cuda-0-1/pipe/control.pid", scratch);
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    assert_int_equal(fscanf(file, "%d", &pid), 1);
    fclose(file);
    assert_int_equal(kill(pid, SIGKILL), 0);
    xpw_Envelope *failure = expect(f.ffn[1], xpw_Envelope_failure_tag, 0);
    assert_string_equal(failure->body.failure.who, "mps");
    assert_non_null(strstr(failure->body.failure.what, "the MPS controller"));
    for (uint32_t r = 0; r < 2; r++)
        kill_rank(&ranks[r]);
    for (uint32_t p = 0; p < 2; p++) {
        close(f.atn[p]);
        close(f.ffn[p]);
    }
    assert_int_equal(wait_daemon(&f), 1);
}

static void with_the_relay_the_agents_arenas_take_the_place_of_the_instances(void **state)
{
    fixture_t f;
    rank_t rank;
    start(&f, "'cuda:0'", 1, "fabric.provider = 'p2p-relay'\n", "ffn_tp_size = 2");
    start_rank(&f, 0, &rank);
    offer_arena(&f, &rank, 100, XP_DTYPE_BF16);
    offer_stage(f.ffn[0], xpw_StageKind_STAGE_ROWS, 0, 200);
    offer_stage(f.ffn[1], xpw_StageKind_STAGE_ROWS, 0, 201);
    executable(&f);
    assert_true(silent(f.ffn[0])); /* what is it to attach? */
    offer_stage(f.atn[0], xpw_StageKind_STAGE_RELAY, 0, 400);
    uint64_t lease = 0;
    for (uint32_t i = 0; i < FFN_COUNT; i++) {
        lease = expect_arena(f.ffn[i], 0, 400);
        attached(f.ffn[i], 0, lease, "");
    }
    expect_stage(f.atn[0], xpw_StageKind_STAGE_ROWS, 0, 200);
    expect_stage(f.atn[0], xpw_StageKind_STAGE_ROWS, 1, 201);
    assert_true(expect_arena(f.atn[0], 0, 100) == lease);
    assert_true(silent(rank.fd));
    attached(f.atn[0], 0, lease, "");
    expect(rank.fd, xpw_Envelope_attached_tag, 0); /* no stages: it puts into its own arena */
    expect(rank.fd, xpw_Envelope_initialize_tag, 0);
    kill_rank(&rank);
    expect(f.atn[0], xpw_Envelope_arena_detach_tag, 0);
    expect(f.ffn[0], xpw_Envelope_arena_detach_tag, 0);
    expect(f.ffn[1], xpw_Envelope_arena_detach_tag, 0);
    assert_int_equal(kill(f.daemon, SIGTERM), 0);
    assert_int_equal(finish(&f), 0);
}

/* The sockets that are the agents here say what PE 0 and the others say. */
static void agents_of_a_symmetric_heap_join_with_one_id(void **state)
{
    fixture_t f;
    rank_t rank;
    begin(&f, "'cuda:0', 'cuda:1'", 2, "fabric.provider = 'nvshmem'\n", "ffn_tp_size = 2");
    assert_true(silent(f.atn[1]) && silent(f.ffn[0]) && silent(f.ffn[1]));
    xpw_Envelope envelope = {.which_body = xpw_Envelope_fabric_id_tag};
    envelope.body.fabric_id.generation = 1;
    for (uint32_t i = 0; i < sizeof(envelope.body.fabric_id.id); i++)
        envelope.body.fabric_id.id[i] = (uint8_t)(200 - i);
    say(f.atn[0], &envelope, NULL, 0);
    int others[] = {f.atn[1], f.ffn[0], f.ffn[1]};
    for (uint32_t i = 0; i < 3; i++) {
        xpw_Envelope *id = expect(others[i], xpw_Envelope_fabric_id_tag, 0);
        assert_int_equal(id->body.fabric_id.generation, 1);
        assert_memory_equal(id->body.fabric_id.id, envelope.body.fabric_id.id, 128);
    }
    assert_true(silent(f.atn[0]));
    join(&f);
    start_rank(&f, 0, &rank);
    offer_arena(&f, &rank, 100, XP_DTYPE_BF16);
    executable(&f);
    /* FfnAgents know where everything is; the rank's own arena goes to its AtnAgent, last. */
    uint64_t lease = 0;
    for (uint32_t i = 0; i < FFN_COUNT; i++) {
        xpw_Envelope *attach = expect(f.ffn[i], xpw_Envelope_arena_attach_tag, 0);
        lease = attach->body.arena_attach.lease;
        assert_true(silent(f.atn[0]));
        attached(f.ffn[i], 0, lease, "");
    }
    assert_true(expect_arena(f.atn[0], 0, 100) == lease);
    attached(f.atn[0], 0, lease, "");
    expect(rank.fd, xpw_Envelope_attached_tag, 0);
    expect(rank.fd, xpw_Envelope_initialize_tag, 0);
    assert_true(silent(f.atn[1]));
    kill_rank(&rank);
    expect(f.atn[0], xpw_Envelope_arena_detach_tag, 0);
    expect(f.ffn[0], xpw_Envelope_arena_detach_tag, 0);
    expect(f.ffn[1], xpw_Envelope_arena_detach_tag, 0);
    assert_int_equal(kill(f.daemon, SIGTERM), 0);
    assert_int_equal(finish(&f), 0);
}

static void an_atnagent_that_dies_while_arenas_are_attached_is_the_failure(void **state)
{
    fixture_t f;
    rank_t rank;
    start(&f, "'cuda:0'", 1, "fabric.provider = 'p2p-relay'\n", "ffn_tp_size = 2");
    start_rank(&f, 0, &rank);
    offer_arena(&f, &rank, 100, XP_DTYPE_BF16);
    offer_stage(f.ffn[0], xpw_StageKind_STAGE_ROWS, 0, 200);
    offer_stage(f.ffn[1], xpw_StageKind_STAGE_ROWS, 0, 201);
    executable(&f);
    offer_stage(f.atn[0], xpw_StageKind_STAGE_RELAY, 0, 400);
    uint64_t lease = 0;
    for (uint32_t i = 0; i < FFN_COUNT; i++)
        lease = expect_arena(f.ffn[i], 0, 400);
    attached(f.ffn[0], 0, lease, "");
    shutdown(f.atn[0], SHUT_RDWR); /* the rank's process holds it too */
    xpw_Envelope *failure = expect(f.ffn[1], xpw_Envelope_failure_tag, 0);
    assert_string_equal(failure->body.failure.who, "atnagent cuda:0");
    attached(f.ffn[1], 0, lease, ""); /* on its way when the other died */
    kill_rank(&rank);
    close(f.atn[0]);
    close(f.ffn[0]);
    close(f.ffn[1]);
    assert_int_equal(wait_daemon(&f), 1);
}

static void an_agent_that_cannot_let_go_ends_the_generation(void **state)
{
    fixture_t f;
    start(&f, "'cuda:0'", 1, "", "");
    xpw_Envelope envelope = {.which_body = xpw_Envelope_arena_detached_tag};
    snprintf(envelope.body.arena_detached.error, sizeof(envelope.body.arena_detached.error),
             "still in flight");
    say(f.ffn[0], &envelope, NULL, 0);
    xpw_Envelope *failure = expect(f.atn[0], xpw_Envelope_failure_tag, 0);
    assert_string_equal(failure->body.failure.who, "ffnagent cuda:2");
    assert_non_null(strstr(failure->body.failure.what, "still in flight"));
    close(f.atn[0]);
    close(f.ffn[0]);
    close(f.ffn[1]);
    assert_int_equal(wait_daemon(&f), 1);
}

/* It is asked beside the event loop, which goes on. */
static void a_controller_that_hangs_holds_up_nobody(void **state)
{
    fixture_t f;
    char path[PATH_MAX];
    start(&f, "'cuda:0'", 1, "", "");
    snprintf(path, sizeof(path), "%s/mps/cuda-0/pipe/hangs", scratch);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fclose(file);
    uint64_t longest_ns = 0, until_ns = xp_monotonic_ns() + PATIENCE_NS;
    for (bool told = false; !told;) {
        uint64_t began_ns = xp_monotonic_ns();
        assert_true(began_ns < until_ns);
        xpw_Envelope question = {.which_body = xpw_Envelope_check_tag}, answer;
        assert_int_equal(client_ask(f.config, "test", &question, xpw_Envelope_verdict_tag,
                                    5 * XP_NS_PER_S, &answer),
                         XP_OK);
        if (xp_monotonic_ns() - began_ns > longest_ns)
            longest_ns = xp_monotonic_ns() - began_ns;
        for (pb_size_t i = 0; i < answer.body.verdict.reasons_count; i++)
            told = told || strstr(answer.body.verdict.reasons[i], "did not answer");
        nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    }
    assert_true(longest_ns < 700 * XP_NS_PER_MS);
    assert_int_equal(unlink(path), 0);
    executable(&f);
    wait_verdict(&f, "model m: its Instance is not registered");
    until_ns = xp_monotonic_ns() + PATIENCE_NS;
    for (bool told = true; told;) { /* it answers again */
        xpw_Envelope question = {.which_body = xpw_Envelope_check_tag}, answer;
        assert_int_equal(client_ask(f.config, "test", &question, xpw_Envelope_verdict_tag,
                                    5 * XP_NS_PER_S, &answer),
                         XP_OK);
        told = answer.body.verdict.reasons_count > 1;
        assert_true(xp_monotonic_ns() < until_ns);
        nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    }
    assert_int_equal(kill(f.daemon, SIGTERM), 0);
    assert_int_equal(finish(&f), 0);
}

static void without_mps_there_is_no_daemon(void **state)
{
    fixture_t f = {.atn_count = 1};
    f.config = deployment("'cuda:0'", "'cuda:1'", MEMORY, "");
    char *path = strdup(getenv("PATH"));
    setenv("PATH", "/nonexistent", 1);
    assert_int_equal(daemon_run(f.config), 1);
    assert_non_null(strstr(xp_error_last()->text, MPS_CONTROL_PROGRAM));
    setenv("PATH", path, 1);
    free(path);
    config_destroy(f.config);
}

/* Neither for its answer nor, once that is there, for its end. */
static void nobody_waits_for_the_driver_without_a_limit(void **state)
{
    uint64_t bytes = 0, began_ns = xp_monotonic_ns();
    config_t *config = deployment("'cuda:0'", "'cuda:1'", "devices.'cuda:1'.memory = '1GiB'\n", "");
    gpus_ask_own_program(500 * XP_NS_PER_MS);
    assert_int_equal(gpus_memory(&config->atn[0], &bytes), XP_OK);
    assert_true(bytes == 4096);
    setenv("TEST_MUTE", "1", 1);
    assert_int_equal(gpus_memory(&config->atn[0], &bytes), XP_UNSUPPORTED);
    assert_non_null(strstr(xp_error_last()->text, "did not answer within 0.5 s"));
    unsetenv("TEST_MUTE");
    assert_true(xp_monotonic_ns() - began_ns < 5 * XP_NS_PER_S);
    config_destroy(config);
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "devices") == 0)
        return fake_devices();
    const char *name = strrchr(argv[0], '/');
    if (strcmp(name ? name + 1 : argv[0], MPS_CONTROL_PROGRAM) == 0)
        return fake_mps(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gpus_are_planned_with_the_memory_that_is_given),
        cmocka_unit_test(lanes_have_rows_of_their_own_where_one_member_serves_several_ranks),
        cmocka_unit_test(a_gpu_may_have_both_roles_where_that_is_allowed),
        cmocka_unit_test(what_cannot_be_planned_is_refused_by_name),
        cmocka_unit_test(answers_of_the_driver_are_understood),
        cmocka_unit_test(every_process_sees_the_gpus_under_numbers_of_its_own),
        cmocka_unit_test(an_instance_gets_the_stages_when_every_member_has_its_arena),
        cmocka_unit_test(members_get_the_partials_of_their_first),
        cmocka_unit_test(with_the_relay_the_agents_arenas_take_the_place_of_the_instances),
        cmocka_unit_test(agents_of_a_symmetric_heap_join_with_one_id),
        cmocka_unit_test(an_atnagent_that_dies_while_arenas_are_attached_is_the_failure),
        cmocka_unit_test(an_agent_that_cannot_let_go_ends_the_generation),
        cmocka_unit_test(a_controller_that_hangs_holds_up_nobody),
        cmocka_unit_test(without_mps_there_is_no_daemon),
        cmocka_unit_test(nobody_waits_for_the_driver_without_a_limit),
    };
    char own[PATH_MAX], link[PATH_MAX], path[8192], command[512];
    unsetenv("XPOOL_UNDER_UP");
    unsetenv("CUDA_VISIBLE_DEVICES");
    unsetenv(GPUS_MEMORY_VARIABLE);
    signal(SIGPIPE, SIG_IGN);
    snprintf(scratch, sizeof(scratch), "/tmp/xpool-plane-XXXXXX");
    ssize_t length = readlink("/proc/self/exe", own, sizeof(own) - 1);
    if (!mkdtemp(scratch) || length <= 0)
        return 1;
    own[length] = '\0';
    snprintf(link, sizeof(link), "%s/" MPS_CONTROL_PROGRAM, scratch);
    if (symlink(own, link) != 0)
        return 1;
    snprintf(path, sizeof(path), "%s:%s", scratch, getenv("PATH"));
    setenv("PATH", path, 1);
    snprintf(path, sizeof(path), "%s/mps", scratch);
    setenv(GPUS_MPS_ROOT_VARIABLE, path, 1);
    /* The daemon looks whether NVSHMEM is there, and loads nothing of it. */
    snprintf(path, sizeof(path), "%s/wheel", scratch);
    setenv(STAGE_HEAP_ROOT_VARIABLE, path, 1);
    setenv(STAGE_HEAP_PLUGIN_VARIABLE, own, 1);
    snprintf(command, sizeof(command), "mkdir -p %s/lib && : > %s/lib/libnvshmem_host.so.3", path,
             path);
    if (system(command) != 0)
        return 1;
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    snprintf(command, sizeof(command), "rm -rf %s", scratch);
    return system(command) ? 1 : failed;
}
