/* SPDX-License-Identifier: MIT */
/* Both ends of the orders to a test's AtnAgent. Every wait has a limit. */
#include "agent.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "transport/arena.h"

enum {
    ORDER_ATTACH = 1,
    ORDER_DETACH,
    ORDER_CLOSE,
    ORDER_REPORT,
    ORDER_HOLD,
    ORDER_PING_PONG,
    ORDER_OWN_END,
    ORDER_STOP
};
typedef struct order {
    uint32_t what, a, b;
    transport_geometry_t geometry;
} order_t;
typedef struct answer {
    xp_status_t status;
    uint32_t slot;
    uint64_t ns;
    transport_cuda_report_t report;
    char text[256];
} answer_t;

mps_t *agent_mps_begin(void)
{
    mps_options_t options = {.name = "cuda-0", .devices = "0"};
    mps_t *mps;
    if (mps_start(&options, &mps) != XP_OK) {
        printf("without MPS: %s\n", xp_error_last()->text);
        return NULL;
    }
    setenv("CUDA_MPS_PIPE_DIRECTORY", mps_pipe_folder(mps), 1);
    setenv("CUDA_MPS_LOG_DIRECTORY", mps_log_folder(mps), 1);
    return mps;
}

void agent_mps_end(mps_t *mps)
{
    if (!mps)
        return;
    xp_status_t status = mps_stop(mps);
    printf("MPS stopped: %s\n", status == XP_OK ? "in order" : xp_error_last()->text);
    mps_destroy(mps);
}

bool kit_send(int socket, const void *message, size_t bytes, int fd)
{
    struct iovec part = {(void *)message, bytes};
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    struct msghdr header = {.msg_iov = &part, .msg_iovlen = 1};
    if (fd >= 0) {
        header.msg_control = &control;
        header.msg_controllen = sizeof(control);
        struct cmsghdr *item = CMSG_FIRSTHDR(&header);
        item->cmsg_level = SOL_SOCKET;
        item->cmsg_type = SCM_RIGHTS;
        item->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(item), &fd, sizeof(int));
    }
    return sendmsg(socket, &header, MSG_NOSIGNAL) == (ssize_t)bytes;
}

bool kit_receive(int socket, void *message, size_t bytes, int *fd_out)
{
    struct iovec part = {message, bytes};
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    struct msghdr header = {.msg_iov = &part,
                            .msg_iovlen = 1,
                            .msg_control = &control,
                            .msg_controllen = sizeof(control)};
    ssize_t count;
    do {
        count = recvmsg(socket, &header, MSG_CMSG_CLOEXEC);
    } while (count < 0 && errno == EINTR);
    if (fd_out)
        *fd_out = -1;
    if (count != (ssize_t)bytes)
        return false;
    struct cmsghdr *item = CMSG_FIRSTHDR(&header);
    if (item && item->cmsg_type == SCM_RIGHTS) {
        int fd;
        memcpy(&fd, CMSG_DATA(item), sizeof(int));
        if (fd_out)
            *fd_out = fd;
        else
            close(fd);
    }
    return true;
}

void agent_spawn(const char *name, int life_fd, uint32_t a, uint32_t b, agent_t *agent_out)
{
    int pair[2];
    char socket_text[16], life_text[16], a_text[16], b_text[16];
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
    struct timeval limit = {.tv_sec = 30};
    CHECK(setsockopt(pair[0], SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)) == 0);
    snprintf(a_text, sizeof(a_text), "%u", a);
    snprintf(b_text, sizeof(b_text), "%u", b);
    pid_t parent = getpid(), pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent)
            _exit(1);
        /* dup() leaves out close-on-exec. */
        snprintf(socket_text, sizeof(socket_text), "%d", dup(pair[1]));
        snprintf(life_text, sizeof(life_text), "%d", dup(life_fd));
        execl("/proc/self/exe", name, name, socket_text, life_text, a_text, b_text, (char *)NULL);
        _exit(127);
    }
    close(pair[1]);
    *agent_out = (agent_t){pid, pair[0]};
}

int agent_reap(agent_t *agent)
{
    int status = -1; /* neither exited nor killed */
    close(agent->socket);
    for (uint32_t i = 0; i < 1000 && waitpid(agent->pid, &status, WNOHANG) == 0; i++)
        usleep(10000);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

void agent_ended(agent_t *agent)
{
    CHECK(agent_reap(agent) == 0);
}

int kit_role_socket(char **argv)
{
    return atoi(argv[2]);
}

int kit_role_life(char **argv)
{
    return atoi(argv[3]);
}

uint32_t kit_role_number(char **argv, int which)
{
    return (uint32_t)strtoul(argv[4 + which], NULL, 10);
}

/* ---- the role --------------------------------------------------------------------------- */
static answer_t answer_of(xp_status_t status)
{
    answer_t answer = {.status = status};
    if (status != XP_OK)
        snprintf(answer.text, sizeof(answer.text), "%s", xp_error_last()->text);
    return answer;
}

static xp_status_t serve_ping_pong(kit_t *kit, int fd, const order_t *order, cuda_block_t *block)
{
    uint64_t bytes = transport_cuda_arena_bytes(&kit->device, &order->geometry);
    uint32_t count = order->a, first = 0;
    cuda_address_t none = 0;
    XP_TRY(cuda_block_import(&kit->device, fd, bytes, block));
    cuda_address_t words = block->address + transport_arena_output_offset(&order->geometry);
    void *parameters[] = {&words, &count, &first, &none};
    return cuda_launch(&kit->device, kit->kernels[KIT_PING_PONG], 1, 1, kit->stream, parameters);
}

void agent_main(int argc, char **argv)
{
    if (argc < 6 || strcmp(argv[1], "agent") != 0)
        return;
    const int socket = kit_role_socket(argv);
    const uint32_t life_index = kit_role_number(argv, 0), slots = kit_role_number(argv, 1);
    kit_t kit;
    transport_cuda_life_t life;
    transport_cuda_server_t *server;
    cuda_block_t words = {0};
    kit_open(&kit, 1 << 20);
    CHECK_OK(transport_cuda_life_open(&kit.device, kit_role_life(argv), life_index, &life));
    CHECK_OK(transport_cuda_server_create(&kit.device, &life, slots, kit.kernels[KIT_ECHO],
                                          kit.hold, &server));
    answer_t ready = {.status = XP_OK};
    CHECK(kit_send(socket, &ready, sizeof(ready), -1));
    order_t order;
    int fd;
    while (kit_receive(socket, &order, sizeof(order), &fd)) {
        answer_t answer = {.status = XP_OK};
        uint64_t start_ns = xp_monotonic_ns();
        switch (order.what) {
        case ORDER_ATTACH:
            answer = answer_of(transport_cuda_server_attach(server, fd, &order.geometry, order.a,
                                                            kit_in(10), &order.b));
            answer.slot = order.b;
            break;
        case ORDER_DETACH:
            answer = answer_of(transport_cuda_server_detach(server, order.a, kit_in(10)));
            break;
        case ORDER_CLOSE:
            answer = answer_of(transport_cuda_server_close(server, order.a, (xp_status_t)order.b));
            break;
        case ORDER_REPORT: {
            transport_cuda_report_t report = {0};
            answer = answer_of(transport_cuda_server_report(server, order.a, kit_in(10), &report));
            answer.report = report;
            break;
        }
        case ORDER_HOLD:
            kit_hold(&kit, order.a);
            break;
        case ORDER_PING_PONG:
            /* The block of the last one is kept until then: unmapping needs no kernel on it. */
            cuda_block_destroy(&words);
            answer = answer_of(serve_ping_pong(&kit, fd, &order, &words));
            break;
        case ORDER_OWN_END:
            life_word_end(&life.page->word[life_index]);
            CHECK_OK(transport_cuda_server_stop(server, kit_in(1)));
            break;
        case ORDER_STOP:
            CHECK_OK(transport_cuda_server_stop(server, kit_in(1)));
            break;
        }
        answer.ns = xp_monotonic_ns() - start_ns;
        if (fd >= 0)
            close(fd);
        CHECK(kit_send(socket, &answer, sizeof(answer), -1));
        if (order.what == ORDER_STOP || order.what == ORDER_OWN_END)
            break;
    }
    cuda_block_destroy(&words);
    transport_cuda_server_destroy(server);
    transport_cuda_life_close(&life);
    kit_close(&kit);
    exit(0);
}

/* ---- the other end ------------------------------------------------------------------------- */
static answer_t agent_order(agent_t *agent, const order_t *order, int fd)
{
    answer_t answer;
    CHECK(kit_send(agent->socket, order, sizeof(*order), fd));
    if (!kit_receive(agent->socket, &answer, sizeof(answer), NULL)) {
        fprintf(stderr, "the AtnAgent (pid %d) does not answer order %u\n", agent->pid,
                order->what);
        exit(1);
    }
    if (answer.status != XP_OK)
        xp_fail(answer.status, "AtnAgent: %s", answer.text);
    return answer;
}

void agent_start(int life_fd, uint32_t life_index, uint32_t slots, agent_t *agent_out)
{
    answer_t ready;
    agent_spawn("agent", life_fd, life_index, slots, agent_out);
    if (!kit_receive(agent_out->socket, &ready, sizeof(ready), NULL)) {
        int status = 0;
        kill(agent_out->pid, SIGKILL);
        waitpid(agent_out->pid, &status, 0);
        fprintf(stderr, "the AtnAgent did not start\n");
        exit(WIFEXITED(status) && WEXITSTATUS(status) == KIT_SKIP ? KIT_SKIP : 1);
    }
}

xp_status_t agent_attach(agent_t *agent, int arena_fd, const transport_geometry_t *geometry,
                         uint32_t life_index, uint32_t *slot_out)
{
    order_t order = {.what = ORDER_ATTACH, .a = life_index, .geometry = *geometry};
    answer_t answer = agent_order(agent, &order, arena_fd);
    if (answer.status == XP_OK)
        *slot_out = answer.slot;
    return answer.status;
}

xp_status_t agent_detach(agent_t *agent, uint32_t slot)
{
    order_t order = {.what = ORDER_DETACH, .a = slot};
    return agent_order(agent, &order, -1).status;
}

xp_status_t agent_close(agent_t *agent, uint32_t slot, xp_status_t reason)
{
    order_t order = {.what = ORDER_CLOSE, .a = slot, .b = (uint32_t)reason};
    return agent_order(agent, &order, -1).status;
}

xp_status_t agent_report(agent_t *agent, uint32_t slot, transport_cuda_report_t *report_out)
{
    order_t order = {.what = ORDER_REPORT, .a = slot};
    answer_t answer = agent_order(agent, &order, -1);
    *report_out = answer.report;
    return answer.status;
}

void agent_hold(agent_t *agent, uint32_t mask)
{
    order_t order = {.what = ORDER_HOLD, .a = mask};
    CHECK_OK(agent_order(agent, &order, -1).status);
}

xp_status_t agent_ping_pong(agent_t *agent, int arena_fd, const transport_geometry_t *geometry,
                            uint32_t count)
{
    order_t order = {.what = ORDER_PING_PONG, .a = count, .geometry = *geometry};
    return agent_order(agent, &order, arena_fd).status;
}

static uint64_t agent_last_order(agent_t *agent, uint32_t what)
{
    order_t order = {.what = what};
    uint64_t ns = agent_order(agent, &order, -1).ns;
    agent_ended(agent);
    return ns;
}

uint64_t agent_stop(agent_t *agent)
{
    return agent_last_order(agent, ORDER_STOP);
}

uint64_t agent_own_end(agent_t *agent)
{
    return agent_last_order(agent, ORDER_OWN_END);
}

void agent_kill(agent_t *agent)
{
    kill(agent->pid, SIGKILL);
    waitpid(agent->pid, NULL, 0);
    close(agent->socket);
}
