/* SPDX-License-Identifier: MIT */
/*
 * libxpool: the elastic KV Cache of somebody else's engine. Commands from the control channel
 * become memory behind the range; what the engine says of its slots becomes completions and
 * reports.
 *
 * Used by one thread of the engine at a time. Never waits for the daemon or for other ranks; on a
 * GPU, for a bounded time, for the clearing of new memory and for what may still use memory that
 * goes.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/failpoint.h"
#include "cuda/stream.h"
#include "kv/backing.h"
#include "kv/rank.h"
#include "library/device.h"
#include "library/private.h"

/* How long a release looks for the end of work that was queued before it. */
#define RELEASE_PATIENCE_NS (200 * XP_NS_PER_MS)

struct xpool_kv {
    pid_t pid;
    const cuda_device_t *device; /* the rank's GPU; NULL on a CPU */
    cuda_event_t fence;
    kv_rank_t rank;
    kv_backing_t *backing;
    uint32_t bundle_tokens;
    /* Rank 0 of several: a grow is mapped here, and told when it is mapped everywhere. */
    bool growing, growing_trim;
};

static uint32_t bundles_of(const xpool_kv_t *kv, uint32_t tokens)
{
    return tokens / kv->bundle_tokens + (tokens % kv->bundle_tokens != 0);
}

static uint32_t tokens_of(const xpool_kv_t *kv, uint32_t bundles)
{
    return bundles * kv->bundle_tokens;
}

/* ---- opening and closing ----------------------------------------------------------------------
 */

static xp_status_t check_geometry(const kv_group_entry_t *group, uint64_t token_bytes, bool cuda)
{
    uint64_t tokens, granule = cuda ? KV_BUNDLE_GRANULE_BYTES_CUDA : KV_BUNDLE_GRANULE_BYTES_CPU;
    /* On a GPU a token may have padding behind it. */
    if (group->token_bytes != token_bytes &&
        (!cuda || group->token_bytes != kv_token_stride(token_bytes, granule)))
        return xp_fail(XP_INVALID,
                       "a token's KV takes %" PRIu64 " bytes in the engine and %" PRIu64
                       " in the plan: is the KV Cache's dtype models[].dtype?",
                       token_bytes, group->token_bytes);
    if (group->bundle_tokens == 0 ||
        group->bundle_bytes != group->bundle_tokens * group->token_bytes ||
        __builtin_mul_overflow((uint64_t)group->reserved_bundles, group->bundle_tokens, &tokens) ||
        tokens > UINT32_MAX)
        return xp_fail(XP_PEER,
                       "the KV control channel has bundles of %" PRIu64 " bytes for %u tokens of "
                       "%" PRIu64 " bytes",
                       group->bundle_bytes, group->bundle_tokens, group->token_bytes);
    return XP_OK;
}

static xp_status_t map_first(xpool_kv_t *kv, const library_kv_place_t *place)
{
    const kv_group_entry_t *group = kv->rank.group;
    kv_backing_options_t options = {.name = place->name,
                                    .room_bytes = place->room_bytes,
                                    .bundle_bytes = group->bundle_bytes,
                                    .ceiling_bundles = group->reserved_bundles};
    uint32_t bundles;
    XP_TRY(kv_rank_start(&kv->rank, &bundles));
    if (kv->device) {
        options.ready_bundles = group->elastic ? KV_READY_BUNDLES_CUDA : 0;
        XP_TRY(cuda_event_create(kv->device, false, &kv->fence));
        XP_TRY(kv_backing_create_cuda(&options, kv->device, &kv->backing));
    } else {
        XP_TRY(kv_backing_create_memfd(&options, &kv->backing));
    }
    XP_TRY(kv_backing_resize(kv->backing, bundles));
    return kv_rank_ready(&kv->rank, group->bundle_bytes, group->bundle_tokens, bundles);
}

/* The rank's device, where it has one, becomes current; `before` comes back by leave(). */
static xp_status_t enter(const xpool_kv_t *kv, cuda_context_t *before)
{
    return kv->device ? library_context_enter(kv->device, before) : XP_OK;
}

static void leave(const xpool_kv_t *kv, cuda_context_t before)
{
    if (kv->device)
        library_context_leave(kv->device, before);
}

xp_status_t library_kv_open(const library_kv_place_t *place, uint64_t token_bytes,
                            xpool_kv_t **kv_out)
{
    xp_status_t status;
    cuda_context_t before = NULL;
    xpool_kv_t *kv = calloc(1, sizeof(*kv));
    if (!kv)
        return xp_fail(XP_NO_MEMORY, "no memory for an elastic KV Cache");
    kv->pid = getpid();
    kv->device = place->device;
    XP_TRY_GOTO(status, fail,
                kv_rank_open(place->channel_fd, place->daemon_bell, place->bell, place->partition,
                             &kv->rank));
    XP_TRY_GOTO(status, fail, check_geometry(kv->rank.group, token_bytes, kv->device != NULL));
    kv->bundle_tokens = kv->rank.group->bundle_tokens;
    XP_TRY_GOTO(status, fail, enter(kv, &before));
    status = map_first(kv, place);
    leave(kv, before);
    if (status != XP_OK)
        goto fail;
    *kv_out = kv;
    return XP_OK;
fail:;
    /* Closing must not lose the reason. */
    xp_error_t why = *xp_error_last();
    xpool_kv_close(kv);
    return xp_fail(status, "%s", why.text);
}

xpool_status_t xpool_kv_open(xpool_rank_t *rank, const xpool_kv_options_t *given,
                             xpool_kv_t **kv_out)
{
    xpool_kv_options_t options;
    library_kv_place_t place;
    if (!rank || !given || !kv_out)
        return library_status(xp_fail(XP_INVALID, "xpool_kv_open needs its arguments"));
    xp_status_t status = library_take_struct(given, given->struct_bytes,
                                             LIBRARY_BYTES_TO(xpool_kv_options_t, token_bytes),
                                             "xpool_kv_options_t", &options, sizeof(options));
    if (status == XP_OK)
        status = library_rank_kv_place(rank, &place);
    if (status == XP_OK)
        status = library_kv_open(&place, options.token_bytes, kv_out);
    return library_status(status);
}

void xpool_kv_close(xpool_kv_t *kv)
{
    cuda_context_t before = NULL;
    if (!kv || kv->pid != getpid() || enter(kv, &before) != XP_OK)
        return; /* a device that is lost has lost the memory too, and tells the daemon nothing */
    kv_backing_destroy(kv->backing);
    if (kv->device)
        cuda_event_destroy(kv->device, kv->fence);
    leave(kv, before);
    kv_rank_close(&kv->rank);
    free(kv);
}

static xp_status_t check_kv(const xpool_kv_t *kv, const void *argument, const char *what)
{
    if (!kv || !argument)
        return xp_fail(XP_INVALID, "%s needs its arguments", what);
    return library_check_process(kv->pid);
}

xpool_status_t xpool_kv_info(const xpool_kv_t *kv, xpool_kv_info_t *info_out)
{
    xpool_kv_info_t info;
    xp_status_t status = check_kv(kv, info_out, "xpool_kv_info");
    if (status == XP_OK)
        status = library_take_struct(info_out, info_out->struct_bytes,
                                     LIBRARY_BYTES_TO(xpool_kv_info_t, bell), "xpool_kv_info_t",
                                     &info, sizeof(info));
    if (status != XP_OK)
        return library_status(status);
    kv_group_entry_t *group = kv->rank.group;
    info.elastic = group->elastic != 0;
    info.leader = kv_rank_leads(&kv->rank);
    info.address = (void *)(uintptr_t)kv_backing_address(kv->backing);
    info.reserved_bytes = kv_backing_reserved_bytes(kv->backing);
    info.token_bytes = group->token_bytes;
    info.bundle_tokens = kv->bundle_tokens;
    info.reserved_tokens = tokens_of(kv, kv_backing_ceiling(kv->backing));
    info.floor_tokens = tokens_of(kv, PROTOCOL_LOAD_RELAXED(&group->floor_bundles));
    info.ceiling_tokens = tokens_of(kv, PROTOCOL_LOAD_RELAXED(&group->ceiling_bundles));
    info.mapped_tokens = tokens_of(kv, kv_backing_mapped(kv->backing));
    info.bell = kv_rank_bell(&kv->rank);
    const uint32_t admitted = PROTOCOL_LOAD_RELAXED(&group->admit_bundles);
    info.admit_tokens =
        admitted < kv_backing_ceiling(kv->backing) ? tokens_of(kv, admitted) : UINT32_MAX;
    info.device = kv->device ? kv->device->ordinal : -1;
    info.goal_tokens = tokens_of(kv, kv->rank.goal);
    library_give_struct(&info, sizeof(info), info_out, info_out->struct_bytes);
    return XPOOL_OK;
}

xpool_status_t xpool_kv_captured(xpool_kv_t *kv)
{
    cuda_context_t before;
    size_t free_bytes = 0, total_bytes;
    xp_status_t status = check_kv(kv, kv, "xpool_kv_captured");
    if (status != XP_OK || !kv->device)
        return library_status(status);
    status = enter(kv, &before);
    if (status != XP_OK)
        return library_status(status);
    for (uint32_t i = 0; i < KV_READY_BUNDLES_CUDA; i++) /* they count as taken */
        (void)kv_backing_prepare(kv->backing);
    status = CUDA_CALL(kv->device->driver, cuMemGetInfo, &free_bytes, &total_bytes);
    leave(kv, before);
    if (status == XP_OK)
        kv_rank_captured(&kv->rank, free_bytes, xp_monotonic_ns());
    return library_status(status);
}

/* ---- commands ---------------------------------------------------------------------------------
 */

/* The bundles that every rank of the group has mapped for the command applied last; false while one
 * of them has not answered. */
static bool mapped_everywhere(const xpool_kv_t *kv, uint32_t *bundles_out)
{
    const kv_rank_t *rank = &kv->rank;
    uint32_t fewest = UINT32_MAX;
    for (uint32_t p = 0; p < rank->count; p++) {
        uint64_t cell = kv_partition_completion(&rank->channel->partitions[rank->first + p]);
        if (KV_CELL_SEQUENCE(cell) != rank->applied)
            return false;
        if (KV_CELL_VALUE(cell) < fewest)
            fewest = KV_CELL_VALUE(cell);
    }
    *bundles_out = fewest;
    return true;
}

/* Takes the command over; XP_RETRY when the engine is not told of it now. */
static xp_status_t apply(xpool_kv_t *kv, const kv_command_t *command, xpool_kv_command_t *out)
{
    const uint32_t mapped = kv_backing_mapped(kv->backing);
    if (command->bundles < mapped || (command->bundles == mapped && command->trim)) {
        xp_failpoint("kv.rank.withdrawn");
        out->order = XPOOL_KV_SHRINK;
        out->tokens = tokens_of(kv, command->bundles);
        out->trim = command->trim;
        return XP_OK;
    }
    xp_failpoint("kv.rank.seen");
    /* Where the system has no memory, less than was granted is mapped, and the daemon sees it. */
    if (kv_backing_resize(kv->backing, command->bundles) == XP_FATAL)
        return XP_FATAL;
    xp_failpoint("kv.rank.grown");
    kv_rank_complete(&kv->rank, kv_backing_mapped(kv->backing));
    if (kv->rank.count > 1) {
        kv->growing = kv_rank_leads(&kv->rank);
        kv->growing_trim = command->trim;
        return XP_RETRY;
    }
    out->order = XPOOL_KV_GROW;
    out->tokens = tokens_of(kv, kv_backing_mapped(kv->backing));
    out->trim = command->trim;
    return XP_OK;
}

static xp_status_t poll_command(xpool_kv_t *kv, uint32_t step, uint32_t least_tokens,
                                xpool_kv_command_t *out)
{
    kv_command_t command;
    uint32_t bundles;
    kv_rank_rung(&kv->rank);
    if (kv->growing) {
        if (!mapped_everywhere(kv, &bundles) || bundles == 0 ||
            bundles > kv_backing_mapped(kv->backing))
            return XP_RETRY;
        kv->growing = false;
        out->order = XPOOL_KV_GROW;
        out->tokens = tokens_of(kv, bundles);
        out->trim = kv->growing_trim;
        return XP_OK;
    }
    if (!kv_rank_pending(&kv->rank)) {
        (void)kv_backing_prepare(kv->backing); /* at most one handle a step */
        return XP_RETRY;
    }
    if (!kv_rank_poll(&kv->rank, step, bundles_of(kv, least_tokens), &command))
        return XP_RETRY;
    return apply(kv, &command, out);
}

xpool_status_t xpool_kv_poll(xpool_kv_t *kv, uint32_t step, uint32_t least_tokens,
                             xpool_kv_command_t *command_out)
{
    xp_status_t status = check_kv(kv, command_out, "xpool_kv_poll");
    xpool_kv_command_t command = {0};
    if (status == XP_OK)
        status = library_take_struct(command_out, command_out->struct_bytes,
                                     LIBRARY_BYTES_TO(xpool_kv_command_t, trim),
                                     "xpool_kv_command_t", &command, sizeof(command));
    if (status != XP_OK)
        return library_status(status);
    cuda_context_t before;
    status = enter(kv, &before);
    if (status != XP_OK)
        return library_status(status);
    status = poll_command(kv, step, least_tokens, &command);
    leave(kv, before);
    if (status != XP_OK)
        return status == XP_RETRY ? XPOOL_RETRY : library_status(status);
    library_give_struct(&command, sizeof(command), command_out, command_out->struct_bytes);
    return XPOOL_OK;
}

/* What was queued on `stream` before has ended. XP_RETRY: not within patience. */
static xp_status_t wait_for(xpool_kv_t *kv, cuda_stream_t stream)
{
    const uint64_t deadline_ns = xp_monotonic_ns() + RELEASE_PATIENCE_NS;
    xp_clock_t clock = xp_clock_system();
    XP_TRY(CUDA_CALL(kv->device->driver, cuEventRecord, kv->fence, stream));
    xp_status_t status = cuda_event_wait(kv->device, kv->fence, &clock, deadline_ns);
    return status == XP_TIMEOUT ? xp_fail_context(XP_RETRY, "KV slots are still in use") : status;
}

static xp_status_t release(xpool_kv_t *kv, uint32_t tokens, bool wait, cuda_stream_t stream)
{
    const uint32_t mapped = kv_backing_mapped(kv->backing);
    if (tokens == 0 || bundles_of(kv, tokens) > mapped)
        return xp_fail(XP_INVALID, "%u KV slots are to stay of %u that have memory", tokens,
                       tokens_of(kv, mapped));
    if (wait && bundles_of(kv, tokens) < mapped)
        XP_TRY(wait_for(kv, stream));
    xp_status_t status = kv_backing_resize(kv->backing, bundles_of(kv, tokens));
    xp_failpoint("kv.rank.released");
    if (status == XP_OK)
        kv_rank_complete(&kv->rank, kv_backing_mapped(kv->backing));
    return status;
}

static xpool_status_t release_from(xpool_kv_t *kv, uint32_t tokens, bool wait, void *stream)
{
    cuda_context_t before;
    xp_status_t status = check_kv(kv, kv, "xpool_kv_release");
    if (status == XP_OK)
        status = enter(kv, &before);
    if (status != XP_OK)
        return library_status(status);
    status = release(kv, tokens, wait && kv->device, stream);
    leave(kv, before);
    return library_status(status);
}

xpool_status_t xpool_kv_release(xpool_kv_t *kv, uint32_t tokens)
{
    return release_from(kv, tokens, false, NULL);
}

xpool_status_t xpool_kv_release_after(xpool_kv_t *kv, uint32_t tokens, void *stream)
{
    return release_from(kv, tokens, true, stream);
}

/* ---- reports ----------------------------------------------------------------------------------
 */

xpool_status_t xpool_kv_report(xpool_kv_t *kv, const xpool_kv_report_t *given)
{
    xpool_kv_report_t from;
    xp_status_t status = check_kv(kv, given, "xpool_kv_report");
    if (status == XP_OK)
        status = library_take_struct(given, given->struct_bytes,
                                     LIBRARY_BYTES_TO(xpool_kv_report_t, earliest_deadline_ns),
                                     "xpool_kv_report_t", &from, sizeof(from));
    if (status == XP_OK && from.demand > XPOOL_KV_DECODE)
        status =
            xp_fail(XP_INVALID, "xpool_kv_report_t.demand %u is no xpool_kv_demand_t", from.demand);
    if (status != XP_OK)
        return library_status(status);
    const uint32_t ceiling = PROTOCOL_LOAD_RELAXED(&kv->rank.group->ceiling_bundles);
    const uint32_t wanted = bundles_of(kv, from.demand_tokens);
    kv_report_t report = {.live_bundles = bundles_of(kv, from.live_tokens),
                          .live_tokens = from.live_tokens,
                          .cached_tokens = from.cached_tokens,
                          .running = from.running,
                          .waiting = from.waiting,
                          .last_activity_ns = from.last_activity_ns,
                          .earliest_deadline_ns = from.earliest_deadline_ns};
    if (from.demand != XPOOL_KV_NONE) {
        report.demand_kind = from.demand == XPOOL_KV_PREFILL ? KV_DEMAND_PREFILL : KV_DEMAND_DECODE;
        report.demand_bundles = wanted < ceiling ? wanted : ceiling;
        report.demand_deadline_ns = from.demand_deadline_ns;
        report.demand_since_ns = from.demand_since_ns;
    }
    kv_rank_report(&kv->rank, &report);
    return XPOOL_OK;
}

int xpool_kv_refused(const xpool_kv_t *kv)
{
    return check_kv(kv, kv, "xpool_kv_refused") == XP_OK && kv_rank_refused(&kv->rank);
}
