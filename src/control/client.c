/* SPDX-License-Identifier: MIT */
/* One blocking question to the daemon. */
#include "control/client.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"

xp_status_t client_ask(const config_t *config, const char *name, const xpw_Envelope *question,
                       pb_size_t answer_tag, uint64_t timeout_ns, xpw_Envelope *answer_out)
{
    int fd;
    XP_TRY(client_ask_for(config, name, question, answer_tag, timeout_ns, answer_out, &fd));
    if (fd >= 0)
        close(fd);
    return XP_OK;
}

xp_status_t client_ask_for(const config_t *config, const char *name, const xpw_Envelope *question,
                           pb_size_t answer_tag, uint64_t timeout_ns, xpw_Envelope *answer_out,
                           int *fd_out)
{
    int socket;
    XP_TRY(wire_connect(config->daemon.socket, &socket));
    xp_status_t status;
    uint64_t deadline = xp_monotonic_ns() + timeout_ns;
    xpw_Envelope hello = {.which_body = xpw_Envelope_hello_tag};
    hello.body.hello.abi = WIRE_ABI;
    hello.body.hello.role = xpw_Role_ROLE_CLIENT;
    snprintf(hello.body.hello.version, sizeof(hello.body.hello.version), "%s", XPOOL_VERSION);
    snprintf(hello.body.hello.name, sizeof(hello.body.hello.name), "%s", name);
    memcpy(hello.body.hello.digest, config->digest, sizeof(config->digest));
    XP_TRY_GOTO(status, done, wire_send(socket, &hello, NULL, 0));
    XP_TRY_GOTO(status, done, wire_send(socket, question, NULL, 0));
    for (;;) {
        uint64_t now = xp_monotonic_ns();
        if (now >= deadline) {
            status = xp_fail(XP_TIMEOUT, "the daemon did not answer in time");
            goto done;
        }
        struct pollfd waiting = {.fd = socket, .events = POLLIN};
        int ready = poll(&waiting, 1, (int)((deadline - now) / XP_NS_PER_MS) + 1);
        if (ready < 0 && errno == EINTR) {
            status = xp_fail(XP_CANCELLED, "interrupted");
            goto done;
        }
        wire_descriptors_t fds = {.count = 0};
        status = wire_receive(socket, answer_out, &fds);
        if (status == XP_RETRY)
            continue;
        if (status != XP_OK)
            goto done;
        if (answer_out->which_body == answer_tag) {
            *fd_out = wire_descriptors_take(&fds, 0);
            wire_descriptors_close(&fds);
            goto done;
        }
        wire_descriptors_close(&fds);
        if (answer_out->which_body == xpw_Envelope_refused_tag) {
            status = xp_fail(XP_INVALID, "the daemon refused: %s", answer_out->body.refused.reason);
            goto done;
        }
    }
done:
    close(socket);
    return status;
}
