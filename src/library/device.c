/* SPDX-License-Identifier: MIT */
/* One Instance Rank's device. Launches and returns; waits only where a deadline is given. */
#include "library/device.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "stage/stage.h"

#define MARKS     64u /* passes whose end may be looked at; an engine has two in flight */
#define MARK_OPEN UINT32_MAX

/* Totals. */
typedef struct counters {
    uint64_t eager[XPOOL_MIXED + 1], eager_rows, captured; /* what was queued */
    stage_client_counters_t device;                        /* what it told last */
} counters_t;

struct library_device {
    cuda_device_t device;
    transport_cuda_life_t life;
    fabric_plan_t *plan; /* NULL before DevicePlane */
    bool relay;
    uint64_t pause_ns;                      /* 0: no pauses */
    bool paused;                            /* the loop thread's */
    const fabric_plan_instance_t *instance; /* in `plan`; NULL before Admitted */
    pthread_mutex_t lock;
    stage_client_t *client; /* NULL before Admitted */
    /* What the record of live rows holds, when only we have written it. */
    bool live_known, live_lent;
    transport_live_t live;
    cuda_stream_t live_stream;       /* that it was written on last */
    transport_device_state_t *marks; /* pinned; a ring of MARKS, written by the engine's streams */
    uint64_t mark_count;
    counters_t counters, base;
};

/* ---- contexts ---------------------------------------------------------------------------------
 */

xp_status_t library_context_enter(const cuda_device_t *device, cuda_context_t *before_out)
{
    XP_TRY(CUDA_CALL(device->driver, cuCtxGetCurrent, before_out));
    if (*before_out == device->context)
        return XP_OK;
    return cuda_device_use(device);
}

void library_context_leave(const cuda_device_t *device, cuda_context_t before)
{
    if (before != device->context)
        CUDA_IGNORE(device->driver, cuCtxSetCurrent, before);
}

xp_status_t library_device_create(int ordinal, library_device_t **device_out)
{
    const cuda_driver_t *driver;
    cuda_context_t before = NULL;
    XP_TRY(cuda_driver_load(&driver));
    XP_TRY(CUDA_CALL(driver, cuCtxGetCurrent, &before));
    library_device_t *device = calloc(1, sizeof(*device));
    if (!device)
        return xp_fail(XP_NO_MEMORY, "no memory for an Instance Rank's device");
    xp_status_t status = cuda_device_open(driver, ordinal, &device->device);
    if (status != XP_OK) {
        free(device);
        return status;
    }
    pthread_mutex_init(&device->lock, NULL);
    library_context_leave(&device->device, before);
    *device_out = device;
    return XP_OK;
}

const cuda_device_t *library_device_cuda(const library_device_t *device)
{
    return &device->device;
}

xp_status_t library_device_use(library_device_t *device)
{
    int relaxed = CUDA_CAPTURE_RELAXED;
    XP_TRY(cuda_device_use(&device->device));
    return CUDA_CALL(device->device.driver, cuThreadExchangeStreamCaptureMode, &relaxed);
}

void library_device_destroy(library_device_t *device)
{
    if (!device)
        return;
    cuda_context_t before = NULL;
    (void)library_context_enter(&device->device, &before);
    stage_client_destroy(device->client);
    if (device->marks)
        CUDA_IGNORE(device->device.driver, cuMemFreeHost, device->marks);
    transport_cuda_life_close(&device->life);
    library_context_leave(&device->device, before);
    cuda_device_close(&device->device);
    pthread_mutex_destroy(&device->lock);
    free(device->plan);
    free(device);
}

/* ---- messages ---------------------------------------------------------------------------------
 */

static xp_status_t read_plan(int fd, fabric_plan_t **plan_out)
{
    struct stat info;
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || !(seals & F_SEAL_WRITE) || fstat(fd, &info) != 0 ||
        (uint64_t)info.st_size != sizeof(fabric_plan_t))
        return xp_fail(XP_PEER, "the daemon's plan is no sealed plan of this version");
    fabric_plan_t *plan = malloc(sizeof(*plan));
    if (!plan)
        return xp_fail(XP_NO_MEMORY, "no memory for the Fabric plan");
    xp_status_t status = XP_OK;
    for (size_t done = 0; done < sizeof(*plan) && status == XP_OK;) {
        ssize_t got = pread(fd, (char *)plan + done, sizeof(*plan) - done, (off_t)done);
        if (got > 0)
            done += (size_t)got;
        else if (got == 0 || errno != EINTR)
            status = xp_fail_errno(XP_IO, "cannot read the Fabric plan");
    }
    if (status == XP_OK)
        status = fabric_plan_check(plan, sizeof(*plan));
    if (status != XP_OK) {
        free(plan);
        return status;
    }
    *plan_out = plan;
    return XP_OK;
}

xp_status_t library_device_plane(library_device_t *device, const xpw_DevicePlane *plane,
                                 const wire_descriptors_t *fds)
{
    if (device->plan || fds->count != 2)
        return xp_fail(XP_PEER, "the daemon's DevicePlane came out of order");
    XP_TRY(read_plan(fds->fds[1], &device->plan));
    device->relay = plane->relay;
    device->pause_ns = plane->pause_ns;
    return transport_cuda_life_open(&device->device, fds->fds[0], plane->life_index, &device->life);
}

xp_status_t library_device_admit(library_device_t *device, const xpw_Admitted *admitted,
                                 uint32_t rank, uint64_t patience_ns, xpw_ArenaOffer *offer_out,
                                 int *arena_fd_out)
{
    if (!device->plan || device->client || admitted->instance >= device->plan->instance_count)
        return xp_fail(XP_PEER, "the daemon's Admitted came out of order");
    const fabric_plan_instance_t *instance = &device->plan->instances[admitted->instance];
    if (instance->hidden != admitted->hidden || instance->max_rows != admitted->max_rows ||
        rank >= fabric_plan_ranks(instance))
        return xp_fail(XP_PEER, "the daemon's Admitted is not what its plan says");
    stage_client_config_t config = {.device = &device->device,
                                    .instance = instance,
                                    .index = admitted->instance,
                                    .generation = device->plan->generation,
                                    .rank = rank,
                                    .path = device->relay ? STAGE_RELAY : STAGE_DIRECT,
                                    .life = &device->life,
                                    .limit_ns = patience_ns,
                                    .pause_ns = device->pause_ns};
    stage_client_t *client;
    XP_TRY(CUDA_CALL(device->device.driver, cuMemHostAlloc, (void **)&device->marks,
                     MARKS * sizeof(*device->marks), CUDA_HOST_ALLOC_PORTABLE));
    XP_TRY(stage_client_create(&config, &client));
    xp_status_t status = stage_client_export(client, arena_fd_out);
    if (status != XP_OK) {
        stage_client_destroy(client);
        return status;
    }
    offer_out->hidden = instance->hidden;
    offer_out->max_rows = instance->max_rows;
    offer_out->dtype = instance->dtype;
    pthread_mutex_lock(&device->lock);
    device->instance = instance;
    device->client = client;
    pthread_mutex_unlock(&device->lock);
    return XP_OK;
}

xp_status_t library_device_stage(library_device_t *device, const xpw_StageGrant *grant,
                                 const wire_descriptors_t *fds)
{
    if (!device->client || fds->count != 1 || grant->kind != xpw_StageKind_STAGE_ROWS ||
        grant->ffn >= device->plan->ffn_count)
        return xp_fail(XP_PEER, "the daemon's StageGrant came out of order");
    return stage_client_open(device->client, grant->ffn, fds->fds[0]);
}

/* ---- calls ------------------------------------------------------------------------------------
 */

static uint32_t dtype_of(xp_dtype_t dtype)
{
    return dtype == XP_DTYPE_BF16 ? XPOOL_BF16 : XPOOL_F16;
}

/* Under the lock. */
static xp_status_t write_live(library_device_t *device, const transport_live_t *live,
                              cuda_stream_t stream)
{
    XP_TRY(stage_client_live_write(device->client, live, stream));
    device->live = *live;
    device->live_stream = stream;
    device->live_known = !device->live_lent;
    return XP_OK;
}

static void fill_live(const library_device_t *device, uint32_t rows, uint32_t step,
                      uint64_t deadline_ns, const uint32_t *dp_rows, transport_live_t *live)
{
    *live = (transport_live_t){.rows = rows, .kind = step, .slo_deadline_ns = deadline_ns};
    for (uint32_t i = 0; dp_rows && i < device->instance->atn_dp; i++)
        live->dp_rows[i] = dp_rows[i];
}

static xp_status_t check_rows(const library_device_t *device, uint32_t rows, uint32_t step,
                              const uint32_t *dp_rows)
{
    if (!device->client)
        return xp_fail(XP_RETRY, "not executable yet: call xpool_rank_wait_executable first");
    if (rows > device->instance->max_rows)
        return xp_fail(XP_INVALID, "%u live rows, the plan has room for %u", rows,
                       device->instance->max_rows);
    if (step > XPOOL_MIXED)
        return xp_fail(XP_INVALID, "step %u: no such kind", step);
    if (device->instance->atn_dp > 1 && !dp_rows)
        return xp_fail(XP_INVALID, "attention DP of %u ranks needs dp_rows",
                       device->instance->atn_dp);
    return XP_OK;
}

/* Under the lock, with the device current. */
static xp_status_t queue_call(library_device_t *device, const xpool_ffn_call_t *call)
{
    cuda_stream_t stream = call->stream;
    int capturing = 0;
    if (stream) /* the legacy default stream cannot capture */
        XP_TRY(CUDA_CALL(device->device.driver, cuStreamIsCapturing, stream, &capturing));
    /* In a captured graph the record counts that is there when it is replayed. */
    if (!call->live_on_device && !capturing) {
        transport_live_t live;
        fill_live(device, call->rows, call->step, call->slo_deadline_ns, call->dp_rows, &live);
        if (!device->live_known || memcmp(&live, &device->live, sizeof(live)) != 0)
            XP_TRY(write_live(device, &live, stream));
    }
    transport_tensor_t input = {.data = (void *)(uintptr_t)call->input,
                                .dtype = (xp_dtype_t)device->instance->dtype,
                                .rank = 2,
                                .rows = call->rows,
                                .width = device->instance->hidden,
                                .row_stride = device->instance->hidden};
    transport_tensor_t output = input;
    output.data = call->output;
    XP_TRY(stage_client_call(device->client, call->layer, 0, &input, &output, stream));
    if (capturing) {
        device->counters.captured++;
    } else {
        device->counters.eager[call->step]++;
        device->counters.eager_rows += call->live_on_device ? device->live.rows : call->rows;
    }
    return XP_OK;
}

xp_status_t library_device_ffn(library_device_t *device, const xpool_ffn_call_t *call)
{
    cuda_context_t before;
    if (!device->instance || call->dtype != dtype_of((xp_dtype_t)device->instance->dtype))
        return xp_fail(XP_INVALID, "tensors of %s on a GPU: the plan has %s (models[].dtype)",
                       call->dtype == XPOOL_F32    ? "float32"
                       : call->dtype == XPOOL_BF16 ? "bfloat16"
                                                   : "float16",
                       !device->instance                          ? "no such rank"
                       : device->instance->dtype == XP_DTYPE_BF16 ? "bfloat16"
                                                                  : "float16");
    XP_TRY(library_context_enter(&device->device, &before));
    pthread_mutex_lock(&device->lock);
    xp_status_t status = queue_call(device, call);
    pthread_mutex_unlock(&device->lock);
    library_context_leave(&device->device, before);
    return status;
}

xp_status_t library_device_live(library_device_t *device, const xpool_live_t *live,
                                uint64_t *record_out)
{
    cuda_context_t before;
    if (live)
        XP_TRY(check_rows(device, live->rows, live->step, live->dp_rows));
    else
        XP_TRY(check_rows(device, 0, 0, (const uint32_t[FABRIC_MAX_RANKS]){0}));
    XP_TRY(library_context_enter(&device->device, &before));
    pthread_mutex_lock(&device->lock);
    xp_status_t status = XP_OK;
    if (live) {
        transport_live_t record;
        fill_live(device, live->rows, live->step, live->slo_deadline_ns, live->dp_rows, &record);
        /* What was written before on the same stream needs no second launch. */
        if (!device->live_known || device->live_stream != live->stream ||
            memcmp(&record, &device->live, sizeof(record)) != 0)
            status = write_live(device, &record, live->stream);
    }
    if (status == XP_OK && record_out) {
        *record_out = stage_client_live(device->client);
        device->live_lent = true; /* from now on others may write it too */
        device->live_known = false;
    }
    pthread_mutex_unlock(&device->lock);
    library_context_leave(&device->device, before);
    return status;
}

xp_status_t library_device_finish(library_device_t *device, uint64_t deadline_ns)
{
    cuda_context_t before;
    if (!device->client)
        return XP_RETRY;
    XP_TRY(library_context_enter(&device->device, &before));
    pthread_mutex_lock(&device->lock);
    xp_status_t status = stage_client_finish(device->client, deadline_ns);
    /* A device that does not tell in time is busy; a wait that ended by its limit says so. */
    if (status == XP_TIMEOUT && xp_monotonic_ns() >= deadline_ns)
        status = XP_RETRY;
    pthread_mutex_unlock(&device->lock);
    library_context_leave(&device->device, before);
    return status;
}

static xp_status_t queue_mark(library_device_t *device, cuda_stream_t stream, uint64_t *mark_out)
{
    int capturing = 0;
    if (stream)
        XP_TRY(CUDA_CALL(device->device.driver, cuStreamIsCapturing, stream, &capturing));
    if (capturing)
        return xp_fail(XP_INVALID, "a mark cannot be captured: it is for one pass");
    transport_device_state_t *to = &device->marks[device->mark_count % MARKS];
    __atomic_store_n(&to->status, MARK_OPEN, __ATOMIC_RELEASE);
    XP_TRY(stage_client_state_copy(device->client, to, stream));
    *mark_out = device->mark_count++;
    return XP_OK;
}

xp_status_t library_device_mark(library_device_t *device, void *stream, uint64_t *mark_out)
{
    cuda_context_t before;
    if (!device->client)
        return xp_fail(XP_RETRY, "not executable yet: call xpool_rank_wait_executable first");
    XP_TRY(library_context_enter(&device->device, &before));
    pthread_mutex_lock(&device->lock);
    xp_status_t status = queue_mark(device, stream, mark_out);
    pthread_mutex_unlock(&device->lock);
    library_context_leave(&device->device, before);
    return status;
}

xp_status_t library_device_look(library_device_t *device, uint64_t mark, uint64_t deadline_ns)
{
    pthread_mutex_lock(&device->lock);
    uint64_t count = device->mark_count;
    uint32_t found = MARK_OPEN;
    bool kept = mark < count && count - mark <= MARKS;
    if (kept)
        found = __atomic_load_n(&device->marks[mark % MARKS].status, __ATOMIC_ACQUIRE);
    pthread_mutex_unlock(&device->lock);
    if (!kept)
        return xp_fail(XP_INVALID, "mark %llu: the last %u of %llu are kept",
                       (unsigned long long)mark, MARKS, (unsigned long long)count);
    if (found == MARK_OPEN)
        return xp_fail(XP_RETRY, "the stream of mark %llu has not passed it yet",
                       (unsigned long long)mark);
    if (found == XP_OK)
        return XP_OK;
    XP_TRY(library_device_finish(device, deadline_ns));
    /* Somebody else has looked in between, and what was answered with an error is over. */
    return xp_fail(found < XP_STATUS_COUNT ? (xp_status_t)found : XP_PEER,
                   "the pass of mark %llu ended with status %u", (unsigned long long)mark, found);
}

static xp_status_t count(library_device_t *device, uint64_t deadline_ns, bool anew,
                         counters_t *counters_out, counters_t *base_out)
{
    cuda_context_t before;
    if (!device->client)
        return XP_RETRY;
    XP_TRY(library_context_enter(&device->device, &before));
    pthread_mutex_lock(&device->lock);
    xp_status_t status =
        stage_client_counters(device->client, deadline_ns, &device->counters.device);
    if (anew && status == XP_OK)
        device->base = device->counters;
    *counters_out = device->counters;
    *base_out = device->base;
    pthread_mutex_unlock(&device->lock);
    library_context_leave(&device->device, before);
    return status;
}

void library_device_counts(library_device_t *device, uint64_t deadline_ns,
                           library_device_counts_t *counts_out)
{
    counters_t now = {0}, base = {0};
    (void)count(device, deadline_ns, false, &now, &base);
    library_device_counts_t counts = {
        .eager_decode = now.eager[XPOOL_DECODE] - base.eager[XPOOL_DECODE],
        .eager_prefill = now.eager[XPOOL_PREFILL] + now.eager[XPOOL_MIXED] -
                         base.eager[XPOOL_PREFILL] - base.eager[XPOOL_MIXED],
        .captured = now.captured,
        .wait_ns = now.device.wait_ns - base.device.wait_ns};
    uint64_t eager = counts.eager_decode + counts.eager_prefill;
    uint64_t executed = now.device.requests - base.device.requests;
    /* Eager calls that are queued still have not been executed. */
    counts.replayed = executed > eager ? executed - eager : 0;
    counts.calls = eager + counts.replayed;
    counts.rows = executed ? now.device.rows - base.device.rows : now.eager_rows - base.eager_rows;
    *counts_out = counts;
}

xp_status_t library_device_count_anew(library_device_t *device, uint64_t deadline_ns)
{
    counters_t now, base;
    xp_status_t status = count(device, deadline_ns, true, &now, &base);
    if (status == XP_RETRY || status == XP_TIMEOUT)
        return xp_fail(XP_RETRY, "the device does not tell how many calls it has executed");
    return status;
}

void library_device_close(library_device_t *device, xp_status_t reason)
{
    cuda_context_t before;
    if (!device->client)
        return;
    /* What waits is told first: an engine whose launches wait for it may hold the lock. */
    stage_client_end(device->client, reason);
    if (library_context_enter(&device->device, &before) != XP_OK)
        return;
    pthread_mutex_lock(&device->lock);
    (void)stage_client_close(device->client, reason);
    pthread_mutex_unlock(&device->lock);
    library_context_leave(&device->device, before);
}

bool library_device_pause(library_device_t *device, bool paused)
{
    if (!device->client || !device->pause_ns || device->paused == paused)
        return false;
    stage_client_pause(device->client, paused);
    device->paused = paused;
    return true;
}

bool library_device_paused(const library_device_t *device)
{
    return device->paused;
}
