/* SPDX-License-Identifier: MIT */
/* Progress of a loader, told by the event loop's thread. */
#include "agents/loading.h"

#include <stdio.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/log.h"
#include "stage/stage.h"

#define PROGRESS_PERIOD_MS 250

static void tell_refused(agent_loading_t *loading)
{
    uint64_t refused = atomic_load(&loading->refused);
    for (uint64_t left = refused & ~loading->told; left; left &= left - 1) {
        xpw_Envelope envelope = {.which_body = xpw_Envelope_kept_weights_tag};
        envelope.body.kept_weights.weights = (uint32_t)__builtin_ctzll(left);
        envelope.body.kept_weights.refused = true;
        participant_send(loading->participant, &envelope, NULL, 0);
    }
    loading->told = refused;
}

static void tell_progress(agent_loading_t *loading)
{
    xpw_Envelope envelope = {.which_body = xpw_Envelope_progress_tag};
    envelope.body.progress.done_bytes = atomic_load(&loading->done_bytes);
    const char *what = atomic_load(&loading->model);
    snprintf(envelope.body.progress.what, sizeof(envelope.body.progress.what), "%s",
             what ? what : "");
    participant_send(loading->participant, &envelope, NULL, 0);
}

static void on_progress(evutil_socket_t fd, short events, void *context)
{
    tell_progress(context);
}

static void on_refused(evutil_socket_t fd, short events, void *context)
{
    uint64_t count;
    if (read(fd, &count, sizeof(count)) == sizeof(count))
        tell_refused(context);
}

xp_status_t agent_loading_init(agent_loading_t *loading, struct event_base *base)
{
    *loading = (agent_loading_t){.refused_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
    if (loading->refused_fd < 0)
        return xp_fail_errno(XP_IO, "cannot make an eventfd");
    loading->on_progress = event_new(base, -1, EV_PERSIST, on_progress, loading);
    loading->on_refused =
        event_new(base, loading->refused_fd, EV_READ | EV_PERSIST, on_refused, loading);
    if (loading->on_progress && loading->on_refused)
        return XP_OK;
    agent_loading_fini(loading);
    return xp_fail(XP_NO_MEMORY, "no memory for the loader's events");
}

void agent_loading_fini(agent_loading_t *loading)
{
    if (loading->on_progress)
        event_free(loading->on_progress);
    if (loading->on_refused)
        event_free(loading->on_refused);
    if (loading->refused_fd >= 0)
        close(loading->refused_fd);
    loading->on_progress = loading->on_refused = NULL;
    loading->refused_fd = -1;
}

xp_status_t agent_loading_begin(agent_loading_t *loading, participant_t *participant)
{
    struct timeval period = {.tv_usec = PROGRESS_PERIOD_MS * 1000};
    loading->participant = participant;
    if (event_add(loading->on_refused, NULL) != 0 || event_add(loading->on_progress, &period) != 0)
        return xp_fail(XP_NO_MEMORY, "no memory for the loader's events");
    return XP_OK;
}

void agent_loading_end(agent_loading_t *loading)
{
    event_del(loading->on_progress);
    event_del(loading->on_refused);
    tell_refused(loading);
    tell_progress(loading);
}

void agent_loading_next(agent_loading_t *loading, uint32_t weights, const char *model_id)
{
    loading->weights = weights;
    atomic_store(&loading->model, model_id);
}

void agent_loading_count(void *context, uint64_t done_bytes, uint64_t total_bytes)
{
    agent_loading_t *loading = context;
    atomic_store(&loading->done_bytes, atomic_load(&loading->done_before) + done_bytes);
}

void agent_loading_refuse(void *context)
{
    agent_loading_t *loading = context;
    atomic_fetch_or(&loading->refused, (uint64_t)1 << loading->weights);
    uint64_t one = 1;
    ssize_t wrote = write(loading->refused_fd, &one, sizeof(one));
    (void)wrote; /* far below an eventfd's limit */
}

void agent_loading_installed(agent_loading_t *loading, uint64_t bytes, bool adopted,
                             uint64_t read_bytes, uint64_t took_ns)
{
    xp_log_info("model %s: %llu bytes adopted, %llu read, in %.2f s (%.2f GB/s)",
                atomic_load(&loading->model), (unsigned long long)(adopted ? bytes : 0),
                (unsigned long long)read_bytes, (double)took_ns / 1e9,
                took_ns ? (double)bytes / (double)took_ns : 0.0);
    loading->adopted |= (uint64_t)adopted << loading->weights;
    loading->adopted_bytes += adopted ? bytes : 0;
    loading->read_bytes += read_bytes;
    atomic_fetch_add(&loading->done_before, bytes);
    atomic_store(&loading->done_bytes, atomic_load(&loading->done_before));
}

uint32_t agent_loading_group(const fabric_plan_t *plan, uint32_t weights, uint32_t *instance_out)
{
    uint32_t group = 0;
    for (uint32_t i = plan->instance_count; i-- > 0;) {
        if (plan->instances[i].weights != weights)
            continue;
        *instance_out = i;
        group |= stage_members(&plan->instances[i]);
    }
    return group;
}
