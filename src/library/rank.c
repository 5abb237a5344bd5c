/* SPDX-License-Identifier: MIT */
/*
 * libxpool: one Instance Rank of somebody else's engine.
 *
 * Two threads meet here. The library's own thread runs the event loop that speaks with the daemon:
 * it owns base, participant and events, makes the arena when the daemon has admitted the rank, and
 * is the only one that calls back. The engine's threads open, wait, call and close; one at a time
 * is in the arena. What both look at is under `lock`, or an atomic. The loop thread never waits for
 * the engine, and an engine waits for the loop thread only with a deadline.
 */
#include <errno.h>
#include <event2/event.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "config/config.h"
#include "control/participant.h"
#include "fabric/plan.h"
#include "kv/channel.h"
#include "library/convert.h"
#include "library/device.h"
#include "library/private.h"
#include "model/digest.h"
#include "observe/observe.h"
#include "transport/transport.h"

#define STATS_PERIOD_MS 500
/* Between the close of the arena and the words for it lie one message and one wake. */
#define FAILURE_TEXT_WAIT_NS (2 * XP_NS_PER_S)
#define LOOK_PERIOD_MS       100
#define LOOK_LIMIT_NS        (50 * XP_NS_PER_MS)
#define COUNT_LIMIT_NS       (2 * XP_NS_PER_S) /* where streams are idle */
#define CLOSE_POLL_NS        (1 * XP_NS_PER_MS)
#define CLOSE_WAIT_NS        (5 * XP_NS_PER_S) /* for a call in flight, whose arena is closed */

struct xpool_rank {
    pid_t pid;
    /* Set by open, constant afterwards. */
    char model_id[CONFIG_MAX_ID];
    uint32_t rank, layers, hidden, atn_tp, atn_dp;
    double startup_seconds;
    char observe_folder[CONFIG_MAX_PATH];
    uint32_t observe_records;
    void (*on_end)(void *context, uint32_t end, uint32_t seconds, const char *text);
    void *context;
    /* The loop thread's. */
    pthread_t thread;
    bool has_thread;
    struct event_base *base;
    participant_t *participant;
    struct event *on_wake, *on_stats, *on_look;
    uint64_t weight_bytes, kv_bytes;
    uint32_t told; /* kinds of end that on_end has been told, a bit each */
    /* Written by the loop thread before `admitted`, constant afterwards. */
    transport_client_t *client; /* on a CPU device */
    library_device_t *device;   /* on a GPU; set by open, constant afterwards */
    observe_t *observe;
    uint32_t max_rows;
    uint64_t patience_ns;
    wire_descriptors_t kv_fds; /* channel, the daemon's bell, this rank's bell; none: no account */
    uint32_t kv_partition;

    pthread_mutex_t lock; /* of everything down to `failure` */
    pthread_cond_t changed;
    bool admitted, attached, initialize, serving;
    bool send_serving, send_failure, close; /* orders to the loop thread */
    xpw_Initialized initialized;
    char own_failure[256];
    xp_status_t how; /* XP_OK, or how the connection ended */
    uint32_t ended;  /* 0 or xpool_end_t */
    char failure[512];
    int wake_fd;

    atomic_bool executable, busy;
    _Atomic uint64_t calls, rows, steps, wait_ns;
};

/* ---- loop thread ------------------------------------------------------------------------------
 */

static void tell_engine(xpool_rank_t *rank, xpool_end_t end, uint32_t seconds, const char *text)
{
    if (!rank->on_end || rank->told & 1u << end)
        return;
    rank->told |= 1u << end;
    rank->on_end(rank->context, end, seconds, text);
}

/* Ends whoever waits in the arena. */
static void close_arena(xpool_rank_t *rank, xp_status_t reason)
{
    if (rank->device)
        library_device_close(rank->device, reason);
    else if (rank->client)
        transport_arena_close(transport_client_fd(rank->client), reason);
}

/* Before anybody who waits in the arena is woken, the daemon's Failure may not have come: those
 * wait a moment for `on_ended`. */
static void on_failed(void *context)
{
    close_arena(context, XP_FATAL);
}

static void on_ended(void *context, xp_status_t how, const char *text)
{
    xpool_rank_t *rank = context;
    bool failed = how != XP_CLOSED;
    pthread_mutex_lock(&rank->lock);
    if (rank->how == XP_OK) {
        rank->how = how;
        rank->ended = failed ? XPOOL_END_FAILED : XPOOL_END_NOW;
        snprintf(rank->failure, sizeof(rank->failure), "%s", text);
    }
    bool admitted = rank->admitted, closing = rank->close;
    pthread_cond_broadcast(&rank->changed);
    pthread_mutex_unlock(&rank->lock);
    /* Before admission xpool_rank_open() itself returns the reason. */
    if (admitted && !closing)
        tell_engine(rank, failed ? XPOOL_END_FAILED : XPOOL_END_NOW, 0, text);
}

static void on_stop(void *context, xpw_StopPhase phase, uint32_t seconds)
{
    xpool_rank_t *rank = context;
    if (phase == xpw_StopPhase_STOP_QUIESCE)
        return; /* the gateway sends no more; what is open goes on */
    bool drain = phase == xpw_StopPhase_STOP_DRAIN;
    xpool_end_t end = drain ? XPOOL_END_DRAIN : XPOOL_END_NOW;
    pthread_mutex_lock(&rank->lock);
    /* After a failure of its own the daemon's Stop says nothing new. */
    bool failed = rank->ended == XPOOL_END_FAILED, closing = rank->close;
    if (!failed)
        rank->ended = end;
    pthread_cond_broadcast(&rank->changed);
    pthread_mutex_unlock(&rank->lock);
    if (!failed && !closing)
        tell_engine(rank, end, seconds,
                    drain ? "the daemon asked this Instance to finish its requests and end"
                          : "the daemon asked this Instance to end now");
    /* Between two Generations nobody answers what is open, and the engine could not leave it. */
    if (!drain && rank->device && library_device_paused(rank->device))
        close_arena(rank, XP_CLOSED);
}

/* This rank cannot go on, for a reason of its own, which the daemon's answer does not replace. */
static void fail_rank(xpool_rank_t *rank, const char *reason)
{
    char text[sizeof(rank->failure)];
    snprintf(text, sizeof(text), "%s", reason);
    pthread_mutex_lock(&rank->lock);
    if (rank->ended != XPOOL_END_FAILED) {
        rank->ended = XPOOL_END_FAILED;
        snprintf(rank->failure, sizeof(rank->failure), "%s", text);
    }
    bool admitted = rank->admitted, closing = rank->close;
    pthread_cond_broadcast(&rank->changed);
    pthread_mutex_unlock(&rank->lock);
    on_failed(rank);
    participant_fail(rank->participant, text);
    /* Before admission xpool_rank_open() itself returns the reason. */
    if (admitted && !closing)
        tell_engine(rank, XPOOL_END_FAILED, 0, text);
}

static void take_kv_place(xpool_rank_t *rank, const xpw_Admitted *admitted, wire_descriptors_t *fds)
{
    for (uint32_t i = 0; i < KV_DESCRIPTORS && fds->count >= KV_DESCRIPTORS; i++)
        rank->kv_fds.fds[rank->kv_fds.count++] = wire_descriptors_take(fds, i);
    rank->kv_partition = admitted->kv_partition;
}

static void offer_arena(xpool_rank_t *rank, const xpw_ArenaOffer *offer, int fd)
{
    xpw_Envelope envelope = {.which_body = xpw_Envelope_arena_offer_tag};
    envelope.body.arena_offer = *offer;
    participant_send(rank->participant, &envelope, &fd, 1);
    pthread_mutex_lock(&rank->lock);
    rank->admitted = true;
    pthread_cond_broadcast(&rank->changed);
    pthread_mutex_unlock(&rank->lock);
}

static void on_admitted_device(xpool_rank_t *rank, const xpw_Admitted *admitted)
{
    xpw_ArenaOffer offer = xpw_ArenaOffer_init_zero;
    int fd;
    uint64_t patience_ns = fabric_plan_caller_patience_ns(admitted->submission_timeout_ns);
    if (library_device_use(rank->device) != XP_OK ||
        library_device_admit(rank->device, admitted, rank->rank, patience_ns, &offer, &fd) !=
            XP_OK) {
        fail_rank(rank, xp_error_last()->text);
        return;
    }
    rank->max_rows = admitted->max_rows;
    rank->patience_ns = patience_ns;
    struct timeval period = {.tv_usec = LOOK_PERIOD_MS * 1000};
    event_add(rank->on_look, &period);
    offer_arena(rank, &offer, fd);
    close(fd);
}

/* What kernels of the engine's streams met, told to an engine that does not ask. */
static void on_look(evutil_socket_t fd, short events, void *context)
{
    xpool_rank_t *rank = context;
    xp_status_t status = library_device_finish(rank->device, xp_monotonic_ns() + LOOK_LIMIT_NS);
    if (status == XP_OK || status == XP_RETRY)
        return;
    event_del(rank->on_look);
    /* An end that somebody else brought about: its words come by the daemon. */
    if (status != XP_CLOSED && status != XP_FATAL && status != XP_CANCELLED)
        fail_rank(rank, xp_error_last()->text);
}

static void on_admitted(xpool_rank_t *rank, const xpw_Admitted *admitted, wire_descriptors_t *fds)
{
    uint32_t dp_size = admitted->dp_size ? admitted->dp_size : 1;
    const bool again = rank->admitted || rank->client || rank->kv_fds.count;
    if (again || admitted->hidden != rank->hidden || dp_size != rank->atn_dp) {
        fail_rank(rank, again ? "a second Admitted" : "an Admitted of another workload");
        return;
    }
    if (rank->device) {
        take_kv_place(rank, admitted, fds);
        on_admitted_device(rank, admitted);
        return;
    }
    transport_geometry_t geometry = {.hidden = admitted->hidden,
                                     .max_rows = admitted->max_rows,
                                     .dtype = XP_DTYPE_F32,
                                     .dp_size = dp_size};
    char name[CONFIG_MAX_ID + 16];
    snprintf(name, sizeof(name), "%s.%u", rank->model_id, rank->rank);
    if (observe_open(rank->observe_folder, OBSERVE_RANK, name, rank->observe_records,
                     &rank->observe) != XP_OK ||
        transport_client_create(&geometry, admitted->spin_ns, &rank->client) != XP_OK) {
        fail_rank(rank, xp_error_last()->text);
        return;
    }
    observe_name_instance(rank->observe, admitted->instance, rank->model_id);
    transport_client_observe(rank->client, rank->observe, admitted->instance, rank->rank);
    take_kv_place(rank, admitted, fds);
    rank->max_rows = admitted->max_rows;
    rank->patience_ns =
        fabric_plan_caller_patience_ns(admitted->submission_timeout_ns) + admitted->pause_ns;
    xpw_ArenaOffer offer = {.hidden = geometry.hidden,
                            .max_rows = geometry.max_rows,
                            .dtype = (uint32_t)geometry.dtype};
    offer_arena(rank, &offer, transport_client_fd(rank->client));
}

/* The Generation has failed and the next one forms: what is open waits. */
static void on_pause(xpool_rank_t *rank)
{
    if (!rank->device || !rank->attached || !library_device_pause(rank->device, true))
        fail_rank(rank, "the daemon's Pause came out of order");
}

/* Who had been attached is so again. */
static bool end_pause(xpool_rank_t *rank)
{
    return rank->device && rank->attached && library_device_pause(rank->device, false);
}

/* The AtnAgent's doorbell; on a GPU nobody is to be woken. */
static bool take_attached(xpool_rank_t *rank, const xpw_Envelope *envelope,
                          const wire_descriptors_t *fds)
{
    if (rank->device)
        return rank->admitted;
    return rank->client && fds->count == 1 &&
           transport_client_set_doorbell(rank->client, fds->fds[0],
                                         envelope->body.attached.atn_pe) == XP_OK;
}

static void on_message(void *context, const xpw_Envelope *envelope, wire_descriptors_t *fds)
{
    xpool_rank_t *rank = context;
    switch (envelope->which_body) {
    case xpw_Envelope_admitted_tag:
        on_admitted(rank, &envelope->body.admitted, fds);
        return;
    case xpw_Envelope_device_plane_tag:
        if (!rank->device || library_device_use(rank->device) != XP_OK ||
            library_device_plane(rank->device, &envelope->body.device_plane, fds) != XP_OK)
            fail_rank(rank, rank->device ? xp_error_last()->text
                                         : "the daemon's plan is for GPUs, this process's is not");
        return;
    case xpw_Envelope_stage_grant_tag:
        if (rank->device &&
            library_device_stage(rank->device, &envelope->body.stage_grant, fds) != XP_OK)
            fail_rank(rank, xp_error_last()->text);
        return;
    case xpw_Envelope_pause_tag:
        on_pause(rank);
        return;
    case xpw_Envelope_attached_tag:
        if (end_pause(rank))
            return;
        if (rank->attached || !take_attached(rank, envelope, fds)) {
            fail_rank(rank, "the daemon's Attached came out of order");
            return;
        }
        pthread_mutex_lock(&rank->lock);
        rank->attached = true;
        break;
    case xpw_Envelope_initialize_tag:
        pthread_mutex_lock(&rank->lock);
        rank->initialize = true;
        break;
    default:
        return; /* a newer daemon's news, of no use to us */
    }
    if (rank->attached && rank->initialize)
        atomic_store(&rank->executable, true);
    pthread_cond_broadcast(&rank->changed);
    pthread_mutex_unlock(&rank->lock);
}

static void fill_device_stats(const xpool_rank_t *rank, xpw_InstanceStats *stats)
{
    library_device_counts_t counts;
    library_device_counts(rank->device, xp_monotonic_ns() + LOOK_LIMIT_NS, &counts);
    stats->ffn_calls = counts.calls;
    stats->ffn_rows = counts.rows;
    stats->eager_decode_calls = counts.eager_decode;
    stats->eager_prefill_calls = counts.eager_prefill;
    stats->captured_calls = counts.captured;
    stats->replayed_calls = counts.replayed;
    stats->ffn_wait_ns = counts.wait_ns;
}

static void on_stats(evutil_socket_t fd, short events, void *context)
{
    xpool_rank_t *rank = context;
    xpw_Envelope envelope = {.which_body = xpw_Envelope_instance_stats_tag};
    envelope.body.instance_stats = (xpw_InstanceStats){.steps = atomic_load(&rank->steps),
                                                       .ffn_calls = atomic_load(&rank->calls),
                                                       .ffn_rows = atomic_load(&rank->rows),
                                                       .kv_bytes = rank->kv_bytes,
                                                       .weight_bytes = rank->weight_bytes};
    if (rank->device)
        fill_device_stats(rank, &envelope.body.instance_stats);
    participant_send(rank->participant, &envelope, NULL, 0);
}

static void send_serving(xpool_rank_t *rank, const xpw_Initialized *initialized)
{
    xpw_Envelope envelope = {.which_body = xpw_Envelope_initialized_tag};
    envelope.body.initialized = *initialized;
    rank->weight_bytes = initialized->weight_bytes;
    rank->kv_bytes = initialized->kv_bytes;
    participant_send(rank->participant, &envelope, NULL, 0);
    struct timeval period = {.tv_usec = STATS_PERIOD_MS * 1000};
    event_add(rank->on_stats, &period);
}

/* An order of the engine's threads. */
static void on_wake(evutil_socket_t fd, short events, void *context)
{
    xpool_rank_t *rank = context;
    uint64_t count;
    if (read(rank->wake_fd, &count, sizeof(count)) < 0 && errno != EAGAIN)
        return;
    pthread_mutex_lock(&rank->lock);
    bool serving = rank->send_serving, failure = rank->send_failure, bye = rank->close;
    char own_failure[sizeof(rank->own_failure)];
    memcpy(own_failure, rank->own_failure, sizeof(own_failure));
    rank->send_serving = rank->send_failure = false;
    xpw_Initialized initialized = rank->initialized;
    pthread_mutex_unlock(&rank->lock);
    if (serving)
        send_serving(rank, &initialized);
    if (failure)
        fail_rank(rank, own_failure);
    if (bye)
        participant_bye(rank->participant, "closed by its engine");
}

static void *loop_main(void *context)
{
    xpool_rank_t *rank = context;
    event_base_dispatch(rank->base);
    /* The socket closes here: a Bye alone gives nothing back. */
    participant_destroy(rank->participant);
    rank->participant = NULL;
    return NULL;
}

/* ---- opening and closing ----------------------------------------------------------------------
 */

static void wake_loop(xpool_rank_t *rank)
{
    uint64_t one = 1;
    while (write(rank->wake_fd, &one, sizeof(one)) < 0 && errno == EINTR)
        ;
}

/* Every signal belongs to the engine's threads. */
static xp_status_t start_loop(xpool_rank_t *rank)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&rank->thread, NULL, loop_main, rank);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error)
        return xp_fail(XP_NO_MEMORY, "cannot start the library's thread: %s", strerror(error));
    rank->has_thread = true;
    return XP_OK;
}

static void stop_loop(xpool_rank_t *rank)
{
    if (!rank->has_thread)
        return;
    pthread_mutex_lock(&rank->lock);
    rank->close = true;
    pthread_mutex_unlock(&rank->lock);
    wake_loop(rank);
    pthread_join(rank->thread, NULL);
    rank->has_thread = false;
}

static void rank_free(xpool_rank_t *rank)
{
    participant_destroy(rank->participant);
    transport_client_destroy(rank->client);
    library_device_destroy(rank->device);
    observe_close(rank->observe);
    if (rank->on_look)
        event_free(rank->on_look);
    if (rank->on_wake)
        event_free(rank->on_wake);
    if (rank->on_stats)
        event_free(rank->on_stats);
    if (rank->base)
        event_base_free(rank->base);
    if (rank->wake_fd >= 0)
        close(rank->wake_fd);
    wire_descriptors_close(&rank->kv_fds);
    pthread_cond_destroy(&rank->changed);
    pthread_mutex_destroy(&rank->lock);
    free(rank);
}

static xp_status_t check_options(const xpool_config_t *config, const xpool_rank_options_t *options,
                                 const config_model_t **model_out)
{
    if (!options->model_id || !options->checkpoint || !options->engine)
        return xp_fail(XP_INVALID,
                       "xpool_rank_options_t needs model_id, engine and checkpoint (what the "
                       "engine loads)");
    const config_model_t *model = config_model_find(config->config, options->model_id);
    if (!model)
        return xp_fail(XP_NOT_FOUND, "model %s is not in the configuration (models[].id)",
                       options->model_id);
    if (options->attention_tp != model->attention_tp ||
        options->attention_dp != model->attention_dp)
        return xp_fail(XP_INVALID,
                       "model %s: the engine runs attention TP %u, DP %u, the configuration says "
                       "%u and %u (models[].attention_tp, models[].attention_dp)",
                       model->id, options->attention_tp, options->attention_dp, model->attention_tp,
                       model->attention_dp);
    if (options->rank >= options->attention_tp * options->attention_dp)
        return xp_fail(XP_INVALID, "model %s: rank %u of attention TP %u, DP %u", model->id,
                       options->rank, options->attention_tp, options->attention_dp);
    if (!library_dtype_bytes(options->dtype))
        return xp_fail(XP_INVALID, "xpool_rank_options_t.dtype %u is no xpool_dtype_t",
                       options->dtype);
    *model_out = model;
    return XP_OK;
}

static bool on_gpu(const config_t *config, const config_model_t *model, uint32_t rank)
{
    uint32_t devices[FABRIC_MAX_RANKS];
    planner_rank_devices(config, (uint32_t)(model - config->models), devices);
    return config->atn[devices[rank]].kind == CONFIG_DEVICE_CUDA;
}

static xp_status_t fill_workload(const xpool_rank_options_t *options, xpw_Workload *workload)
{
    uint8_t digest[MODEL_DIGEST_BYTES];
    XP_TRY(model_checkpoint_digest(options->checkpoint, digest));
    *workload = (xpw_Workload){.hidden = options->hidden,
                               .layers = options->layers,
                               .attention_tp = options->attention_tp,
                               .attention_dp = options->attention_dp,
                               .decode_rows = options->decode_rows,
                               .prefill_rows = options->prefill_rows};
    memcpy(workload->checkpoint, digest, sizeof(workload->checkpoint));
    snprintf(workload->engine, sizeof(workload->engine), "%s", options->engine);
    snprintf(workload->path, sizeof(workload->path), "%s", options->checkpoint);
    return XP_OK;
}

static xp_status_t make_rank(const config_t *config, const xpool_rank_options_t *options,
                             xpool_rank_t **rank_out)
{
    xpool_rank_t *rank = calloc(1, sizeof(*rank));
    if (!rank)
        return xp_fail(XP_NO_MEMORY, "no memory for an Instance Rank");
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&rank->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    pthread_mutex_init(&rank->lock, NULL);
    rank->pid = getpid();
    rank->rank = options->rank;
    rank->hidden = options->hidden;
    rank->layers = options->layers;
    rank->atn_tp = options->attention_tp;
    rank->atn_dp = options->attention_dp;
    rank->on_end = options->on_end;
    rank->context = options->context;
    rank->startup_seconds = config->deadlines.startup;
    rank->observe_records = config->observe.records;
    snprintf(rank->observe_folder, sizeof(rank->observe_folder), "%s", config->observe.folder);
    snprintf(rank->model_id, sizeof(rank->model_id), "%s", options->model_id);
    rank->base = event_base_new();
    rank->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (rank->base && rank->wake_fd >= 0) {
        rank->on_wake = event_new(rank->base, rank->wake_fd, EV_READ | EV_PERSIST, on_wake, rank);
        rank->on_stats = event_new(rank->base, -1, EV_PERSIST, on_stats, rank);
        rank->on_look = event_new(rank->base, -1, EV_PERSIST, on_look, rank);
    }
    if (!rank->on_wake || !rank->on_stats || !rank->on_look ||
        event_add(rank->on_wake, NULL) != 0) {
        rank_free(rank);
        return xp_fail(XP_NO_MEMORY, "no memory for an Instance Rank's event loop");
    }
    *rank_out = rank;
    return XP_OK;
}

static void deadline_time(uint64_t deadline_ns, struct timespec *out)
{
    out->tv_sec = (time_t)(deadline_ns / XP_NS_PER_S);
    out->tv_nsec = (long)(deadline_ns % XP_NS_PER_S);
}

static uint64_t seconds_from_now(double seconds)
{
    return xp_monotonic_ns() + (uint64_t)(seconds * (double)XP_NS_PER_S);
}

/* Under the lock: why this rank is not what somebody waits for. XP_OK while it may still become so.
 */
static xp_status_t ended_status(const xpool_rank_t *rank)
{
    if (rank->how != XP_OK || rank->ended == XPOOL_END_FAILED)
        return xp_fail(rank->how == XP_OK ? XP_FATAL : rank->how, "%s", rank->failure);
    if (rank->ended)
        return xp_fail(XP_CLOSED, "the daemon has asked this Instance to end");
    return XP_OK;
}

static xp_status_t wait_admitted(xpool_rank_t *rank, uint64_t deadline_ns)
{
    struct timespec until;
    deadline_time(deadline_ns, &until);
    xp_status_t status = XP_OK;
    bool late = false;
    pthread_mutex_lock(&rank->lock);
    for (;;) {
        if (rank->admitted)
            break;
        status = ended_status(rank);
        if (status != XP_OK)
            break;
        if (late) {
            status = xp_fail(XP_TIMEOUT,
                             "the daemon has not admitted rank %u of %s within "
                             "deadlines.registration",
                             rank->rank, rank->model_id);
            break;
        }
        late = pthread_cond_timedwait(&rank->changed, &rank->lock, &until) == ETIMEDOUT;
    }
    pthread_mutex_unlock(&rank->lock);
    return status;
}

xpool_status_t xpool_rank_open(const xpool_config_t *config, const xpool_rank_options_t *given,
                               xpool_rank_t **rank_out)
{
    xpool_rank_options_t options;
    const config_model_t *model;
    xpw_Workload workload;
    xpool_rank_t *rank = NULL;
    xp_status_t status;
    bool connected = false;
    if (!config || !given || !rank_out)
        return library_status(
            xp_fail(XP_INVALID, "xpool_rank_open needs a configuration, options and rank_out"));
    XP_TRY_GOTO(status, fail, library_check_process(config->pid));
    XP_TRY_GOTO(status, fail,
                library_take_struct(given, given->struct_bytes,
                                    LIBRARY_BYTES_TO(xpool_rank_options_t, context),
                                    "xpool_rank_options_t", &options, sizeof(options)));
    XP_TRY_GOTO(status, fail, check_options(config, &options, &model));
    XP_TRY_GOTO(status, fail, fill_workload(&options, &workload));
    XP_TRY_GOTO(status, fail, make_rank(config->config, &options, &rank));
    if (on_gpu(config->config, model, options.rank))
        XP_TRY_GOTO(status, fail, library_device_create((int)options.device, &rank->device));
    uint64_t deadline_ns = seconds_from_now(config->config->deadlines.registration);
    participant_handlers_t handlers = {.message = on_message,
                                       .stop = on_stop,
                                       .failed = on_failed,
                                       .ended = on_ended,
                                       .context = rank};
    XP_TRY_GOTO(status, fail,
                participant_create_library(rank->base, config->config, model->id, options.rank,
                                           &workload, &handlers, &rank->participant));
    connected = true;
    XP_TRY_GOTO(status, fail, start_loop(rank));
    XP_TRY_GOTO(status, fail, wait_admitted(rank, deadline_ns));
    *rank_out = rank;
    return XPOOL_OK;
fail:;
    /* The words are this thread's last error; taking the rank down must not lose them. */
    xpool_status_t answer = library_status(status);
    if (rank) {
        char text[XP_ERROR_TEXT_MAX];
        snprintf(text, sizeof(text), "%s", xp_error_last()->text);
        if (connected && status == XP_INVALID)
            answer = XPOOL_REFUSED;
        stop_loop(rank);
        rank_free(rank);
        (void)xp_fail(status, "%s", text);
    }
    return answer;
}

void xpool_rank_close(xpool_rank_t *rank)
{
    if (!rank || rank->pid != getpid() || pthread_equal(rank->thread, pthread_self()))
        return;
    /* Ends a call in flight, which then leaves the arena before it goes. */
    close_arena(rank, XP_CLOSED);
    stop_loop(rank);
    uint64_t deadline_ns = xp_monotonic_ns() + CLOSE_WAIT_NS;
    while (atomic_exchange(&rank->busy, true)) {
        if (xp_monotonic_ns() > deadline_ns)
            return; /* a thread was stopped inside a call: what it may touch stays */
        nanosleep(&(struct timespec){.tv_nsec = (long)CLOSE_POLL_NS}, NULL);
    }
    rank_free(rank);
}

/* ---- after admission --------------------------------------------------------------------------
 */

static xp_status_t check_rank(const xpool_rank_t *rank, const void *argument, const char *what)
{
    if (!rank || !argument)
        return xp_fail(XP_INVALID, "%s needs its arguments", what);
    return library_check_process(rank->pid);
}

xp_status_t library_rank_kv_place(const xpool_rank_t *rank, library_kv_place_t *place_out)
{
    XP_TRY(library_check_process(rank->pid));
    if (rank->kv_fds.count != KV_DESCRIPTORS)
        return xp_fail(XP_UNSUPPORTED, "the daemon keeps no account of the KV Cache of %s",
                       rank->model_id);
    *place_out = (library_kv_place_t){.channel_fd = rank->kv_fds.fds[0],
                                      .daemon_bell = rank->kv_fds.fds[1],
                                      .bell = rank->kv_fds.fds[2],
                                      .partition = rank->kv_partition,
                                      .room_bytes = config_machine_room};
    if (rank->device)
        place_out->device = library_device_cuda(rank->device);
    snprintf(place_out->name, sizeof(place_out->name), "xpool-kv:%s.%u", rank->model_id,
             rank->rank);
    return XP_OK;
}

xpool_status_t xpool_rank_wait_executable(xpool_rank_t *rank, double timeout_seconds)
{
    xp_status_t status = check_rank(rank, rank, "xpool_rank_wait_executable");
    if (status == XP_OK && !(timeout_seconds >= 0 && timeout_seconds <= 1e6))
        status = xp_fail(XP_INVALID, "a timeout of %g seconds", timeout_seconds);
    if (status != XP_OK)
        return library_status(status);
    if (timeout_seconds == 0)
        timeout_seconds = rank->startup_seconds;
    struct timespec until;
    deadline_time(seconds_from_now(timeout_seconds), &until);
    bool late = false;
    pthread_mutex_lock(&rank->lock);
    for (;;) {
        status = ended_status(rank);
        if (status != XP_OK || (rank->attached && rank->initialize))
            break;
        if (late) {
            status = xp_fail(XP_TIMEOUT,
                             "the FFN side of %s is not executable after %g s (%s; see `xpool "
                             "daemon check`)",
                             rank->model_id, timeout_seconds,
                             rank->attached ? "the weights are not all in place"
                                            : "the arena is not attached");
            break;
        }
        late = pthread_cond_timedwait(&rank->changed, &rank->lock, &until) == ETIMEDOUT;
    }
    pthread_mutex_unlock(&rank->lock);
    return library_status(status);
}

xpool_status_t xpool_rank_serving(xpool_rank_t *rank, const xpool_serving_t *given)
{
    xpool_serving_t serving;
    xp_status_t status = check_rank(rank, given, "xpool_rank_serving");
    if (status == XP_OK)
        status = library_take_struct(given, given->struct_bytes,
                                     LIBRARY_BYTES_TO(xpool_serving_t, max_context),
                                     "xpool_serving_t", &serving, sizeof(serving));
    if (status == XP_OK &&
        (serving.port > UINT16_MAX || (serving.port && (!serving.host || !serving.host[0]))))
        status = xp_fail(XP_INVALID, "xpool_serving_t needs the host and port of the engine's HTTP "
                                     "server, or port 0 for none");
    if (status == XP_OK && !atomic_load(&rank->executable))
        status = xp_fail(XP_RETRY, "not executable yet: call xpool_rank_wait_executable first");
    if (status == XP_OK && rank->device)
        status = library_device_count_anew(rank->device, xp_monotonic_ns() + COUNT_LIMIT_NS);
    if (status != XP_OK)
        return library_status(status);
    pthread_mutex_lock(&rank->lock);
    status = ended_status(rank);
    if (status == XP_OK && rank->serving)
        status = xp_fail(XP_INVALID, "xpool_rank_serving was called before");
    if (status == XP_OK) {
        rank->serving = rank->send_serving = true;
        rank->initialized = (xpw_Initialized){.port = serving.port,
                                              .weight_bytes = serving.weight_bytes,
                                              .kv_bytes = serving.kv_bytes,
                                              .max_context = serving.max_context};
        snprintf(rank->initialized.host, sizeof(rank->initialized.host), "%s",
                 serving.host ? serving.host : "");
    }
    pthread_mutex_unlock(&rank->lock);
    if (status == XP_OK)
        wake_loop(rank);
    return library_status(status);
}

/* ---- the FFN of one layer ---------------------------------------------------------------------
 */

static xp_status_t check_call(const xpool_rank_t *rank, const xpool_ffn_call_t *call)
{
    if (call->layer >= rank->layers)
        return xp_fail(XP_INVALID, "layer %u of %u", call->layer, rank->layers);
    if (call->rows > rank->max_rows)
        return xp_fail(XP_INVALID,
                       "%u rows in one call, the plan has room for %u: raise "
                       "models[].prefill_rows or decode_rows, or send fewer",
                       call->rows, rank->max_rows);
    if (!library_dtype_bytes(call->dtype))
        return xp_fail(XP_INVALID, "dtype %u is no xpool_dtype_t", call->dtype);
    if (call->step > XPOOL_MIXED || call->execution > XPOOL_PREFILL_GRAPH)
        return xp_fail(XP_INVALID, "step %u, execution %u: no such kind", call->step,
                       call->execution);
    if (call->rows && (!call->input || !call->output))
        return xp_fail(XP_INVALID, "%u rows without input or output", call->rows);
    if (rank->atn_dp == 1 || (rank->device && call->live_on_device))
        return XP_OK;
    if (!call->dp_rows)
        return xp_fail(XP_INVALID, "attention DP of %u ranks needs dp_rows", rank->atn_dp);
    if (call->dp_rows[rank->rank / rank->atn_tp] != call->rows)
        return xp_fail(XP_INVALID, "%u rows, but dp_rows says %u of this rank", call->rows,
                       call->dp_rows[rank->rank / rank->atn_tp]);
    return XP_OK;
}

/* A call has met the end of the Generation: its words are on their way. */
static xp_status_t canonical_failure(xpool_rank_t *rank, const char *met)
{
    struct timespec until;
    deadline_time(xp_monotonic_ns() + FAILURE_TEXT_WAIT_NS, &until);
    char text[XP_ERROR_TEXT_MAX];
    snprintf(text, sizeof(text), "%s", met);
    pthread_mutex_lock(&rank->lock);
    while (rank->how == XP_OK && rank->ended != XPOOL_END_FAILED)
        if (pthread_cond_timedwait(&rank->changed, &rank->lock, &until) == ETIMEDOUT)
            break;
    if (rank->failure[0])
        snprintf(text, sizeof(text), "%s", rank->failure);
    pthread_mutex_unlock(&rank->lock);
    return xp_fail(XP_FATAL, "%s", text);
}

/* The answer did not come in time: the daemon learns it, and this rank is over. */
static xp_status_t give_up(xpool_rank_t *rank, uint32_t layer)
{
    close_arena(rank, XP_FATAL);
    pthread_mutex_lock(&rank->lock);
    if (rank->ended != XPOOL_END_FAILED) {
        rank->ended = XPOOL_END_FAILED;
        rank->send_failure = true;
        snprintf(rank->own_failure, sizeof(rank->own_failure),
                 "FFN of layer %u: no answer from the FFN tier within %llu ms", layer,
                 (unsigned long long)(rank->patience_ns / XP_NS_PER_MS));
        snprintf(rank->failure, sizeof(rank->failure), "%s", rank->own_failure);
    }
    pthread_cond_broadcast(&rank->changed);
    char text[sizeof(rank->failure)];
    snprintf(text, sizeof(text), "%s", rank->failure);
    pthread_mutex_unlock(&rank->lock);
    wake_loop(rank);
    return xp_fail(XP_TIMEOUT, "%s", text);
}

static xp_status_t carry(xpool_rank_t *rank, const xpool_ffn_call_t *call)
{
    transport_client_t *client = rank->client;
    size_t elements = (size_t)call->rows * rank->hidden;
    transport_request_t request = {.layer = call->layer,
                                   .rows = call->rows,
                                   .kind = call->step,
                                   .slo_deadline_ns = call->slo_deadline_ns,
                                   .dp_rows = rank->atn_dp > 1 ? call->dp_rows : NULL,
                                   .execution = (uint8_t)call->execution};
    transport_tensor_t tensor = {.data = transport_client_input(client),
                                 .dtype = XP_DTYPE_F32,
                                 .rank = 2,
                                 .rows = call->rows,
                                 .width = rank->hidden,
                                 .row_stride = rank->hidden};
    if (elements)
        library_rows_to_f32(call->dtype, call->input, elements, tensor.data);
    XP_TRY(transport_client_put(client, &request, &tensor));
    XP_TRY(transport_client_wait(client, xp_monotonic_ns() + rank->patience_ns));
    const float *answer = transport_client_output(client);
    if (elements)
        library_rows_from_f32(call->dtype, answer, elements, call->output);
    tensor.data = (void *)(uintptr_t)answer; /* take() only compares it */
    return transport_client_take(client, &tensor);
}

/* Queued: how it ends is for xpool_rank_finish(). */
static xp_status_t queue_ffn(xpool_rank_t *rank, const xpool_ffn_call_t *call)
{
    xp_status_t status = library_device_ffn(rank->device, call);
    /* Where an engine writes live rows itself, a step is one such record. */
    if (call->layer == 0 && !call->live_on_device)
        atomic_fetch_add_explicit(&rank->steps, 1, memory_order_relaxed);
    if (status == XP_FATAL)
        return canonical_failure(rank, xp_error_last()->text);
    return status;
}

static xp_status_t ffn(xpool_rank_t *rank, const xpool_ffn_call_t *call)
{
    if (rank->device)
        return queue_ffn(rank, call);
    xp_status_t status = carry(rank, call);
    transport_stats_t stats;
    transport_client_stats(rank->client, &stats);
    atomic_store_explicit(&rank->calls, stats.requests, memory_order_relaxed);
    atomic_store_explicit(&rank->rows, stats.rows, memory_order_relaxed);
    atomic_store_explicit(&rank->wait_ns, stats.wait_ns, memory_order_relaxed);
    if (call->layer == 0)
        atomic_fetch_add_explicit(&rank->steps, 1, memory_order_relaxed);
    if (status == XP_OK || status == XP_INVALID)
        return status;
    if (status == XP_TIMEOUT)
        return give_up(rank, call->layer);
    if (status == XP_CLOSED)
        return status;
    char met[XP_ERROR_TEXT_MAX];
    snprintf(met, sizeof(met), "%s", xp_error_last()->text);
    return canonical_failure(rank, met);
}

xpool_status_t xpool_rank_ffn(xpool_rank_t *rank, const xpool_ffn_call_t *given)
{
    xpool_ffn_call_t call;
    xp_status_t status = check_rank(rank, given, "xpool_rank_ffn");
    if (status == XP_OK)
        status = library_take_struct(given, given->struct_bytes,
                                     LIBRARY_BYTES_TO(xpool_ffn_call_t, output), "xpool_ffn_call_t",
                                     &call, sizeof(call));
    if (status == XP_OK)
        status = check_call(rank, &call);
    if (status == XP_OK && !atomic_load_explicit(&rank->executable, memory_order_acquire))
        status = xp_fail(XP_RETRY, "not executable yet: call xpool_rank_wait_executable first");
    if (status != XP_OK)
        return library_status(status);
    if (atomic_exchange_explicit(&rank->busy, true, memory_order_acquire))
        return library_status(xp_fail(XP_RETRY, "another thread is in a call of this rank"));
    status = ffn(rank, &call);
    atomic_store_explicit(&rank->busy, false, memory_order_release);
    return library_status(status);
}

static xp_status_t check_device(const xpool_rank_t *rank, const char *what)
{
    XP_TRY(check_rank(rank, rank, what));
    if (!rank->device)
        return xp_fail(XP_UNSUPPORTED, "%s is for ranks on a GPU; this one is on a CPU device",
                       what);
    if (!atomic_load_explicit(&((xpool_rank_t *)(uintptr_t)rank)->executable, memory_order_acquire))
        return xp_fail(XP_RETRY, "not executable yet: call xpool_rank_wait_executable first");
    return XP_OK;
}

xpool_status_t xpool_rank_live(xpool_rank_t *rank, const xpool_live_t *given, uint64_t *record_out)
{
    xpool_live_t live;
    xp_status_t status = check_device(rank, "xpool_rank_live");
    if (status == XP_OK && given)
        status =
            library_take_struct(given, given->struct_bytes, LIBRARY_BYTES_TO(xpool_live_t, stream),
                                "xpool_live_t", &live, sizeof(live));
    if (status == XP_OK)
        status = library_device_live(rank->device, given ? &live : NULL, record_out);
    if (status == XP_OK && given)
        atomic_fetch_add_explicit(&rank->steps, 1, memory_order_relaxed);
    return library_status(status);
}

xpool_status_t xpool_rank_finish(xpool_rank_t *rank, double timeout_seconds)
{
    xp_status_t status = check_device(rank, "xpool_rank_finish");
    if (status == XP_OK && !(timeout_seconds >= 0 && timeout_seconds <= 1e6))
        status = xp_fail(XP_INVALID, "a timeout of %g seconds", timeout_seconds);
    if (status == XP_OK)
        status = library_device_finish(rank->device, seconds_from_now(timeout_seconds));
    if (status == XP_RETRY)
        status = xp_fail(XP_RETRY, "the device did not tell within %g s", timeout_seconds);
    if (status == XP_FATAL)
        status = canonical_failure(rank, xp_error_last()->text);
    return library_status(status);
}

xpool_status_t xpool_rank_mark(xpool_rank_t *rank, void *stream, uint64_t *mark_out)
{
    xp_status_t status = check_device(rank, "xpool_rank_mark");
    if (status == XP_OK && !mark_out)
        status = xp_fail(XP_INVALID, "xpool_rank_mark needs mark_out");
    if (status == XP_OK)
        status = library_device_mark(rank->device, stream, mark_out);
    return library_status(status);
}

xpool_status_t xpool_rank_look(xpool_rank_t *rank, uint64_t mark)
{
    xp_status_t status = check_device(rank, "xpool_rank_look");
    if (status == XP_OK)
        status = library_device_look(rank->device, mark, xp_monotonic_ns() + COUNT_LIMIT_NS);
    if (status == XP_FATAL)
        status = canonical_failure(rank, xp_error_last()->text);
    return library_status(status);
}

void xpool_rank_state(const xpool_rank_t *rank, xpool_rank_state_t *state_out)
{
    xpool_rank_state_t state = {0};
    if (check_rank(rank, state_out, "xpool_rank_state") != XP_OK ||
        library_take_struct(state_out, state_out->struct_bytes,
                            LIBRARY_BYTES_TO(xpool_rank_state_t, failure), "xpool_rank_state_t",
                            &state, sizeof(state)) != XP_OK)
        return;
    xpool_rank_t *self = (xpool_rank_t *)(uintptr_t)rank; /* its lock is not const */
    state = (xpool_rank_state_t){.max_rows = rank->max_rows,
                                 .hidden = rank->hidden,
                                 .executable = atomic_load(&self->executable),
                                 .ffn_calls = atomic_load(&self->calls),
                                 .ffn_rows = atomic_load(&self->rows),
                                 .ffn_wait_ns = atomic_load(&self->wait_ns)};
    if (self->device) {
        library_device_counts_t counts;
        library_device_counts(self->device, xp_monotonic_ns() + LOOK_LIMIT_NS, &counts);
        state.ffn_calls = counts.calls;
        state.ffn_rows = counts.rows;
        state.ffn_wait_ns = counts.wait_ns;
        state.eager_decode_calls = counts.eager_decode;
        state.eager_prefill_calls = counts.eager_prefill;
        state.captured_calls = counts.captured;
        state.replayed_calls = counts.replayed;
    }
    pthread_mutex_lock(&self->lock);
    state.ended = self->ended;
    snprintf(state.failure, sizeof(state.failure), "%s", self->failure);
    pthread_mutex_unlock(&self->lock);
    library_give_struct(&state, sizeof(state), state_out, state_out->struct_bytes);
}
