/* SPDX-License-Identifier: MIT */
/*
 * The host thread of a CUDA runtime: fires what the scheduler asks for in the host ring, and holds
 * or gives up the resident kernel's lease.
 *
 *              a request            no bulk for quiet_ns,          the scheduler has seen
 *      lease ─────────────▶ none ──────────────────────▶ offered ───────────────────────▶ lease
 *                                nothing under way                 it, the ring is empty
 *
 * The kernel is launched only when the scheduler has seen the offer: what it asked for before is
 * fired then, and what decodes has ended, for a launch that needs all multiprocessors does not
 * begin beside the kernel. What is asked for from then on (bulk, or what the other kernel takes)
 * waits for the launch: fired before it, steady work of that kind would keep the kernel waiting for
 * ever. So steady decoding finds its way back to the resident kernel without a pause. There are two
 * (ffn/cuda/dispatch.h); the lease is offered for the one that the latest request could have had. A
 * lease that was short doubles quiet_ns, one that was long sets it back, so mixed work does not
 * spend its time in changes. The thread looks without rest for SERVE_SPIN_NS after the last work
 * and naps in between after that; the device never has to wake it. It is the only one that launches
 * after start. It never waits without a limit; whatever fails ends the runtime with one text.
 */
#include <errno.h>
#include <sched.h>
#include <string.h>
#include <sys/prctl.h>

#include "base/futex.h"
#include "ffn/cuda_private.h"

#define SERVE_SPIN_NS          (5 * XP_NS_PER_MS)
#define SERVE_NAP_NS           (50 * XP_NS_PER_US)
#define SERVE_SLACK_NS         1000ul
#define SERVE_LOOK_NS          (20 * XP_NS_PER_US)  /* between two looks at the streams */
#define SERVE_WORD_LIMIT_NS    (1 * XP_NS_PER_S)    /* for a copied word */
#define SERVE_SEEN_LIMIT_NS    (200 * XP_NS_PER_MS) /* for the scheduler's answer */
#define SERVE_RESIDENT_NS      (1 * XP_NS_PER_S)    /* for the resident kernel to leave */
#define SERVE_QUIET_NS         (2 * XP_NS_PER_MS)
#define SERVE_QUIET_MOST_NS    (64 * XP_NS_PER_MS)
#define SERVE_LEASE_SHORT      8 /* times quiet_ns */
#define SERVE_FAILURE_LIMIT_NS (100 * XP_NS_PER_MS)

static xp_status_t serve_wait(ffn_cuda_runtime_t *runtime, cuda_stream_t stream, uint64_t limit_ns)
{
    const xp_clock_t clock = xp_clock_system();
    return cuda_stream_wait(runtime->device, stream, &clock, xp_monotonic_ns() + limit_ns);
}

static void serve_count(ffn_cuda_runtime_t *runtime, uint32_t launches)
{
    atomic_fetch_add_explicit(&runtime->host_launches, launches, memory_order_relaxed);
}

/* Copies a staged word to the device; it is there when this returns. */
static xp_status_t serve_word(ffn_cuda_runtime_t *runtime, cuda_address_t to, const uint32_t *word)
{
    XP_TRY(CUDA_CALL(runtime->device->driver, cuMemcpyHtoDAsync, to, word, sizeof(*word),
                     runtime->control));
    return serve_wait(runtime, runtime->control, SERVE_WORD_LIMIT_NS);
}

/* lease: the next number. */
static xp_status_t serve_lease_write(ffn_cuda_runtime_t *runtime, uint32_t lease)
{
    runtime->staging->lease = runtime->lease = lease;
    return serve_word(runtime, runtime->lease_at, &runtime->staging->lease);
}

static xp_status_t serve_lease_offer(ffn_cuda_runtime_t *runtime)
{
    cuda_staging_t *staging = runtime->staging;
    /* Nobody posts: the last lease's end was seen, and this one's word is not written yet. */
    memset(&staging->queue, 0, sizeof(staging->queue));
    staging->queue.counters = cuda_pointer(runtime->counters_at);
    staging->queue.aside = cuda_pointer(runtime->aside_at);
    XP_TRY(CUDA_CALL(runtime->device->driver, cuMemcpyHtoDAsync, runtime->queue_at, &staging->queue,
                     sizeof(staging->queue), runtime->control));
    XP_TRY(serve_wait(runtime, runtime->control, SERVE_WORD_LIMIT_NS));
    runtime->offered = true;
    /* The number, odd, says of which kernel it is. */
    uint32_t lease = runtime->lease + 1;
    if (ffn_cuda_lease_few(lease) != runtime->few_wanted)
        lease += 2;
    return serve_lease_write(runtime, lease);
}

/* acquire: what the scheduler asked for before it saw the offer is in the ring then. */
static bool serve_lease_is_seen(const ffn_cuda_runtime_t *runtime)
{
    return PROTOCOL_LOAD_ACQUIRE(&runtime->ring->lease_seen) == runtime->lease;
}

static xp_status_t serve_lease_take(ffn_cuda_runtime_t *runtime)
{
    const bool few = ffn_cuda_lease_few(runtime->lease);
    if (few)
        XP_TRY(ffn_cuda_few_resident(&runtime->kernels, runtime->queue_at, runtime->resident));
    else
        XP_TRY(ffn_cuda_resident(&runtime->kernels, runtime->queue_at, true, runtime->resident));
    serve_count(runtime, 1);
    runtime->offered = false;
    runtime->lease_since_ns = xp_monotonic_ns();
    atomic_fetch_add(&runtime->leases, 1);
    atomic_store(&runtime->lease_in_force, few ? FFN_CUDA_LEASE_FEW : FFN_CUDA_LEASE_DECODE);
    return XP_OK;
}

/* The scheduler has seen that the lease ended: every command it posted is in the queue. */
static xp_status_t serve_lease_seen(ffn_cuda_runtime_t *runtime)
{
    const uint64_t deadline = xp_monotonic_ns() + SERVE_SEEN_LIMIT_NS;
    while (!serve_lease_is_seen(runtime)) {
        if (atomic_load(&runtime->stop) || atomic_load(&runtime->failed))
            return XP_OK; /* it may be gone; what it posts now is refused by a kernel that left */
        if (xp_monotonic_ns() > deadline)
            return xp_fail(
                XP_FATAL, "the scheduler of cuda:%d did not see the lease's end in %llu ms",
                runtime->device->ordinal, (unsigned long long)(SERVE_SEEN_LIMIT_NS / XP_NS_PER_MS));
    }
    return XP_OK;
}

static xp_status_t serve_lease_give(ffn_cuda_runtime_t *runtime)
{
    const uint64_t lasted = xp_monotonic_ns() - runtime->lease_since_ns;
    if (lasted > SERVE_LEASE_SHORT * runtime->quiet_ns)
        runtime->quiet_ns = runtime->config.quiet_ns;
    else if (runtime->quiet_ns < SERVE_QUIET_MOST_NS)
        runtime->quiet_ns *= 2;
    XP_TRY(serve_lease_write(runtime, runtime->lease + 1));
    atomic_store(&runtime->lease_in_force, 0);
    XP_TRY(serve_lease_seen(runtime));
    runtime->staging->stop = 1;
    XP_TRY(serve_word(runtime, runtime->queue_at + offsetof(ffn_cuda_queue_t, stop),
                      &runtime->staging->stop));
    xp_status_t status = serve_wait(runtime, runtime->resident, SERVE_RESIDENT_NS);
    return status == XP_OK ? XP_OK : xp_fail_context(status, "the resident kernel");
}

/* Rows [first, first + those of the plan) of the request. */
static xp_status_t serve_library_piece(ffn_cuda_runtime_t *runtime, const ffn_library_plan_t *plan,
                                       const ffn_cuda_request_t *request, uint64_t first)
{
    const cuda_template_t *template = &runtime->template[runtime->layer_template[request->layer]];
    const ffn_cuda_part_t *part = &runtime->part[runtime->layer_part[request->layer]];
    const uint64_t skipped = first * template->signature.hidden;
    serve_count(runtime, 4);
    return ffn_library_run(plan, part, request->input + skipped * 2,
                           request->output ? request->output + skipped * 2 : 0,
                           request->partial ? request->partial + skipped * 4 : 0,
                           runtime->library_at, runtime->bulk);
}

/* Dense bulk through the library: whole pieces with their addresses as arguments, the rest with a
 * plan for so few rows, or through the grouped products. */
static xp_status_t serve_library(ffn_cuda_runtime_t *runtime, uint32_t index,
                                 const ffn_cuda_request_t *request)
{
    const cuda_template_t *template = &runtime->template[index];
    const uint32_t lane = request->lane, piece = template->piece_rows;
    uint32_t done = 0;
    XP_TRY(cuda_template_gather(runtime, template, lane, request->rows, runtime->bulk));
    for (; done + piece <= request->rows; done += piece)
        XP_TRY(serve_library_piece(runtime, template->plan, request, done));
    const ffn_library_plan_t *few = cuda_template_few_plan(template, request->rows - done);
    if (few) {
        XP_TRY(serve_library_piece(runtime, few, request, done));
    } else if (done < request->rows) {
        XP_TRY(cuda_template_piece(runtime, template, lane, done, request->rows - done,
                                   runtime->bulk));
        serve_count(runtime, 5);
    }
    serve_count(runtime, 2);
    return cuda_template_publish(runtime, index, lane, request->rows, runtime->bulk);
}

/* A dense layer of few rows through the library, whole. Each of the two streams has its scratch. */
static xp_status_t serve_library_few(ffn_cuda_runtime_t *runtime, uint32_t index,
                                     const ffn_cuda_request_t *request,
                                     const ffn_library_plan_t *plan)
{
    const cuda_template_t *template = &runtime->template[index];
    const ffn_cuda_part_t *part = &runtime->part[runtime->layer_part[request->layer]];
    cuda_stream_t stream = request->urgent ? runtime->decode : runtime->bulk;
    XP_TRY(cuda_template_gather(runtime, template, request->lane, request->rows, stream));
    XP_TRY(ffn_library_run(plan, part, request->input, request->output, request->partial,
                           request->urgent ? runtime->library_few_at : runtime->library_at,
                           stream));
    serve_count(runtime, 6);
    return cuda_template_publish(runtime, index, request->lane, request->rows, stream);
}

static xp_status_t serve_fire(ffn_cuda_runtime_t *runtime, const ffn_cuda_request_t *request)
{
    if (request->lane >= runtime->config.lanes || request->layer >= runtime->layers ||
        request->rows > runtime->config.max_rows || (!request->output && !request->partial))
        return xp_fail(XP_FATAL,
                       "request %llu of the scheduler on cuda:%d is nonsense: lane %u of %u, layer "
                       "%u of %u, %u rows of %u",
                       (unsigned long long)request->sequence, runtime->device->ordinal,
                       request->lane, runtime->config.lanes, request->layer, runtime->layers,
                       request->rows, runtime->config.max_rows);
    const uint32_t index = runtime->layer_template[request->layer];
    const cuda_template_t *template = &runtime->template[index];
    if (template->plan && request->rows >= template->piece_rows)
        return serve_library(runtime, index, request);
    const ffn_library_plan_t *few = cuda_template_few_plan(template, request->rows);
    if (few)
        return serve_library_few(runtime, index, request, few);
    const uint32_t capacity = cuda_template_capacity(template, request->rows);
    /* What computes in the shared workspace keeps the order of one stream. */
    const bool urgent =
        request->urgent && !cuda_template_shares(runtime, template, template->capacity[capacity]);
    serve_count(runtime, 1);
    return cuda_graph_launch(runtime->device, template->exec[capacity][request->lane],
                             urgent ? runtime->decode : runtime->bulk);
}

/* The model that the layer is of. */
static const ffn_cuda_dispatch_model_t *serve_model(const ffn_cuda_runtime_t *runtime,
                                                    uint32_t layer)
{
    for (uint32_t m = 0; m < FFN_CUDA_MAX_MODELS; m++) {
        const ffn_cuda_dispatch_model_t *model = &runtime->dispatch.models[m];
        if (layer - model->first_layer < model->layers)
            return model;
    }
    return NULL;
}

/* Which resident kernel such a request would have. False: none. */
static bool serve_resident(ffn_cuda_runtime_t *runtime, const ffn_cuda_request_t *request)
{
    const ffn_cuda_dispatch_model_t *model = serve_model(runtime, request->layer);
    if (!model || (request->rows > model->decode_rows && request->rows > model->few_rows))
        return false;
    if (request->rows)
        runtime->few_wanted = request->rows > model->decode_rows;
    return true;
}

/* Fires all requests there are; worked_out: whether there was one. */
static xp_status_t serve_ring(ffn_cuda_runtime_t *runtime, bool *worked_out)
{
    *worked_out = false;
    for (uint32_t i = 0; i < FFN_CUDA_RING_ENTRIES; i++) {
        const ffn_cuda_request_t *entry =
            &runtime->ring->entries[runtime->taken % FFN_CUDA_RING_ENTRIES];
        if (PROTOCOL_LOAD_ACQUIRE(&entry->sequence) != runtime->taken + 1)
            return XP_OK;
        const ffn_cuda_request_t request = *entry;
        const bool leased = atomic_load(&runtime->lease_in_force);
        if (leased)
            XP_TRY(serve_lease_give(runtime));
        XP_TRY(serve_fire(runtime, &request));
        runtime->taken++;
        /* Work that no resident kernel takes, or not the one that had its lease. */
        if (!serve_resident(runtime, &request) || leased)
            runtime->last_bulk_ns = xp_monotonic_ns();
        *worked_out = true;
    }
    return XP_OK;
}

/* Whether what was launched on the stream is under way; or the device's error. */
static xp_status_t serve_busy(const ffn_cuda_runtime_t *runtime, cuda_stream_t stream,
                              bool *busy_out)
{
    const xp_status_t status = CUDA_CALL(runtime->device->driver, cuStreamQuery, stream);
    *busy_out = status == XP_RETRY;
    return status == XP_RETRY ? XP_OK : status;
}

/* Looks for device errors; idle_out: nothing that was fired is under way. */
static xp_status_t serve_look(ffn_cuda_runtime_t *runtime, bool *idle_out)
{
    bool decoding, bulk, resident;
    XP_TRY(serve_busy(runtime, runtime->decode, &decoding));
    XP_TRY(serve_busy(runtime, runtime->bulk, &bulk));
    *idle_out = !decoding && !bulk;
    if (bulk)
        runtime->last_bulk_ns = xp_monotonic_ns();
    if (!atomic_load(&runtime->lease_in_force))
        return XP_OK;
    XP_TRY(serve_busy(runtime, runtime->resident, &resident));
    return resident ? XP_OK
                    : xp_fail(XP_FATAL, "the resident kernel of cuda:%d ended by itself",
                              runtime->device->ordinal);
}

static void serve_nap(ffn_cuda_runtime_t *runtime)
{
    const uint32_t seen = __atomic_load_n(&runtime->ring->bell, __ATOMIC_ACQUIRE);
    if (atomic_load(&runtime->stop) || atomic_load(&runtime->failed))
        return;
    xp_futex_wait(&runtime->ring->bell, seen, xp_monotonic_ns() + SERVE_NAP_NS);
}

/* Once in a while: errors of the device, and whether the lease may be offered. */
static xp_status_t serve_consider(ffn_cuda_runtime_t *runtime, uint64_t now)
{
    bool idle;
    XP_TRY(serve_look(runtime, &idle));
    if (!idle) {
        runtime->last_work_ns = now;
        return XP_OK;
    }
    if (runtime->config.resident && !runtime->offered && !atomic_load(&runtime->lease_in_force) &&
        now - runtime->last_bulk_ns >= runtime->quiet_ns)
        XP_TRY(serve_lease_offer(runtime));
    return XP_OK;
}

/* One turn. */
static xp_status_t serve_turn(ffn_cuda_runtime_t *runtime, uint64_t *looked_ns)
{
    bool worked = false, decoding = false;
    /* Before the ring: see serve_lease_is_seen. */
    const bool seen = runtime->offered && serve_lease_is_seen(runtime);
    if (!seen || !runtime->drained)
        XP_TRY(serve_ring(runtime, &worked));
    runtime->drained = seen;
    if (seen)
        XP_TRY(serve_busy(runtime, runtime->decode, &decoding));
    if (seen && !decoding) {
        runtime->drained = false;
        XP_TRY(serve_lease_take(runtime));
        /* Bulk that came while the offer was out would wait behind the kernel for ever: it executes
         * what was posted to it, and leaves. */
        bool busy;
        XP_TRY(serve_busy(runtime, runtime->bulk, &busy));
        if (busy)
            XP_TRY(serve_lease_give(runtime));
    }
    const uint64_t now = xp_monotonic_ns();
    if (worked)
        runtime->last_work_ns = now;
    if (now - *looked_ns >= SERVE_LOOK_NS) {
        *looked_ns = now;
        XP_TRY(serve_consider(runtime, now));
    }
    /* An offer is answered within a turn of the scheduler, if there is one. */
    if (now - runtime->last_work_ns > SERVE_SPIN_NS)
        serve_nap(runtime);
    return XP_OK;
}

/* Tells the device of a failure: scheduler and resident kernel look at their words. What cannot be
 * told to a broken device needs no telling. */
static void serve_tell_failure(ffn_cuda_runtime_t *runtime)
{
    cuda_staging_t *staging = runtime->staging;
    staging->failure = atomic_load(&runtime->failed);
    staging->stop = 1;
    const cuda_driver_t *driver = runtime->device->driver;
    CUDA_IGNORE(driver, cuMemcpyHtoDAsync, runtime->failure_at, &staging->failure, 4,
                runtime->control);
    CUDA_IGNORE(driver, cuMemcpyHtoDAsync, runtime->queue_at + offsetof(ffn_cuda_queue_t, stop),
                &staging->stop, 4, runtime->control);
    /* The text of the first failure is kept elsewhere; this thread's own record may change. */
    (void)serve_wait(runtime, runtime->control, SERVE_FAILURE_LIMIT_NS);
    atomic_store(&runtime->lease_in_force, 0);
    runtime->failure_told = 1;
}

static void serve_pin(const ffn_cuda_runtime_t *runtime)
{
    cpu_set_t set;
    pthread_setname_np(pthread_self(), "xpool-ffn-fire");
    prctl(PR_SET_TIMERSLACK, SERVE_SLACK_NS); /* a nap is as short as it says */
    if (runtime->config.cpu < 0 || runtime->config.cpu >= CPU_SETSIZE)
        return;
    CPU_ZERO(&set);
    CPU_SET(runtime->config.cpu, &set);
    (void)pthread_setaffinity_np(pthread_self(), sizeof(set), &set); /* a wish */
}

static void *serve_main(void *context)
{
    ffn_cuda_runtime_t *runtime = context;
    uint64_t looked_ns = 0;
    serve_pin(runtime);
    xp_status_t status = cuda_device_use(runtime->device);
    runtime->quiet_ns = runtime->config.quiet_ns;
    if (status == XP_OK && runtime->config.resident)
        status = serve_lease_offer(runtime);
    while (status == XP_OK && !atomic_load(&runtime->stop) && !atomic_load(&runtime->failed))
        status = serve_turn(runtime, &looked_ns);
    if (status == XP_OK && !atomic_load(&runtime->failed) && atomic_load(&runtime->lease_in_force))
        status = serve_lease_give(runtime);
    if (status != XP_OK)
        ffn_cuda_runtime_fail(runtime, status, xp_error_last()->text);
    if (atomic_load(&runtime->failed))
        serve_tell_failure(runtime);
    __atomic_store_n(&runtime->ended, 1, __ATOMIC_RELEASE);
    xp_futex_wake(&runtime->ended, 1);
    return NULL;
}

xp_status_t cuda_serve_start(ffn_cuda_runtime_t *runtime)
{
    runtime->last_work_ns = xp_monotonic_ns();
    const int error = pthread_create(&runtime->thread, NULL, serve_main, runtime);
    if (error) {
        errno = error;
        return xp_fail_errno(XP_IO, "no thread for the FFN launches of cuda:%d",
                             runtime->device->ordinal);
    }
    runtime->running = true;
    return XP_OK;
}

xp_status_t cuda_serve_stop(ffn_cuda_runtime_t *runtime, uint64_t deadline_ns)
{
    const cuda_stream_t streams[] = {runtime->decode, runtime->bulk, runtime->resident};
    const xp_clock_t clock = xp_clock_system();
    xp_status_t status = XP_OK;
    if (!runtime->running)
        return XP_OK;
    atomic_store(&runtime->stop, 1);
    __atomic_fetch_add(&runtime->ring->bell, 1, __ATOMIC_RELEASE);
    xp_futex_wake(&runtime->ring->bell, 1);
    while (!__atomic_load_n(&runtime->ended, __ATOMIC_ACQUIRE))
        if (xp_futex_wait(&runtime->ended, 0, deadline_ns) == ETIMEDOUT) {
            runtime->stuck = true;
            return xp_fail(XP_TIMEOUT, "the launching thread of cuda:%d did not end in time",
                           runtime->device->ordinal);
        }
    pthread_join(runtime->thread, NULL);
    runtime->running = false;
    for (uint32_t i = 0; i < 3 && status == XP_OK; i++)
        status = cuda_stream_wait(runtime->device, streams[i], &clock, deadline_ns);
    /* After a device error nothing runs any more; the error itself was told already. */
    if (status == XP_TIMEOUT)
        runtime->stuck = true;
    return status == XP_TIMEOUT ? status : XP_OK;
}
