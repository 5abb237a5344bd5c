/* SPDX-License-Identifier: MIT */
/* Reads a sealed plan and attaches to the Fabric. */
#include "agents/join.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

xp_status_t agent_join(const xpw_Join *join, const wire_descriptors_t *fds,
                       fabric_plan_t **plan_out, fabric_t **fabric_out)
{
    if (fds->count != 3 && fds->count != 1)
        return xp_fail(XP_PEER, "Join came with %u descriptors, not 3 or 1", fds->count);
    int seals = fcntl(fds->fds[0], F_GET_SEALS);
    struct stat info;
    if (seals < 0 || !(seals & F_SEAL_WRITE) || fstat(fds->fds[0], &info) != 0 ||
        (uint64_t)info.st_size != sizeof(fabric_plan_t))
        return xp_fail(XP_PEER, "Join's plan is not a sealed plan of this version");
    fabric_plan_t *plan = malloc(sizeof(*plan));
    if (!plan)
        return xp_fail(XP_NO_MEMORY, "no memory for the Fabric plan");
    xp_status_t status;
    for (size_t done = 0; done < sizeof(*plan);) {
        ssize_t got = pread(fds->fds[0], (char *)plan + done, sizeof(*plan) - done, (off_t)done);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0) {
            status = xp_fail_errno(XP_IO, "cannot read the Fabric plan");
            goto fail;
        }
        done += (size_t)got;
    }
    XP_TRY_GOTO(status, fail, fabric_plan_check(plan, sizeof(*plan)));
    if (plan->generation != join->generation) {
        status =
            xp_fail(XP_PEER, "Join of Generation %llu carries the plan of %llu",
                    (unsigned long long)join->generation, (unsigned long long)plan->generation);
        goto fail;
    }
    if ((plan->provider == FABRIC_PROVIDER_SHM) != (fds->count == 3) ||
        !fabric_out != (fds->count == 1)) {
        status = xp_fail(XP_PEER, "Join's plan is for other devices than this agent's");
        goto fail;
    }
    fabric_descriptors_t descriptors = {.arena_fd = fds->fds[1], .doorbell_fd = fds->fds[2]};
    if (fabric_out)
        XP_TRY_GOTO(status, fail, fabric_attach("shm", plan, &descriptors, join->pe, fabric_out));
    *plan_out = plan;
    return XP_OK;
fail:
    free(plan);
    return status;
}
