/* SPDX-License-Identifier: MIT */
/*
 * Native Instance: one served model. The event loop thread speaks with the daemon and serves HTTP;
 * the engine's own thread computes; a worker thread loads the attention side and warms up through
 * real FFN execution. The FFN of every layer goes through the Transport arena that this process
 * owns.
 */
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "agents/agents.h"
#include "agents/worker.h"
#include "base/clock.h"
#include "base/log.h"
#include "control/participant.h"
#include "engine/engine.h"
#include "fabric/plan.h"
#include "http/instance_server.h"
#include "kernels/kernels.h"
#include "kv/rank.h"
#include "model/spec.h"
#include "text/chat_template.h"
#include "transport/transport.h"

#define STATS_PERIOD_MS 500
#define DRAIN_PERIOD_MS 20
#define INSTANCE_HOST   "127.0.0.1"
#define QUEUE_PER_ROW   8 /* waiting requests allowed for each decode row */
#define QUEUE_LEAST     128
#define FLUSH_NS        (500 * XP_NS_PER_MS) /* for the last words of aborted requests */

typedef struct instance {
    const config_t *config;
    const config_model_t *model;
    const config_device_t *device;
    struct event_base *base;
    participant_t *participant;
    xpw_Admitted admitted;
    transport_client_t *transport;
    observe_t *observe;
    kv_rank_t kv_rank; /* all zero: no elastic KV */
    engine_t *engine;
    chat_template_t *chat_template;
    char no_template[XP_ERROR_TEXT_MAX];
    http_instance_t *http;
    worker_t loader, warmer;
    struct event *on_stats, *on_drain, *on_kv;
    uint64_t kv_grow_failures; /* logged so far */
    bool loaded, attached, told_to_initialize, serving, draining, flushing;
    uint64_t drain_deadline_ns;
    atomic_bool ffn_failed;
    char ffn_error[XP_ERROR_TEXT_MAX]; /* written before ffn_failed is set */
} instance_t;

/* ---- the FFN, elsewhere -----------------------------------------------------------------------
 */

static xp_status_t ffn_call(void *context, uint32_t layer, uint32_t rows, uint32_t kind,
                            uint64_t slo_deadline_ns, const float *in, float *out)
{
    instance_t *self = context;
    transport_request_t request = {
        .layer = layer, .rows = rows, .kind = kind, .slo_deadline_ns = slo_deadline_ns};
    transport_tensor_t input = {.data = (void *)in, /* only read */
                                .dtype = XP_DTYPE_F32,
                                .rank = 2,
                                .rows = rows,
                                .width = self->admitted.hidden,
                                .row_stride = self->admitted.hidden};
    transport_tensor_t output = input;
    output.data = out;
    uint64_t deadline = xp_monotonic_ns() +
                        fabric_plan_caller_patience_ns(self->admitted.submission_timeout_ns) +
                        self->admitted.pause_ns;
    xp_status_t status =
        transport_client_call(self->transport, &request, &input, &output, deadline);
    if (status != XP_OK && !atomic_load(&self->ffn_failed)) {
        snprintf(self->ffn_error, sizeof(self->ffn_error), "FFN of layer %u: %s", layer,
                 xp_error_last()->text);
        atomic_store(&self->ffn_failed, true);
    }
    return status;
}

/* ---- elastic KV -------------------------------------------------------------------------------
 */

/* The daemon has written a command: the engine may be asleep. */
static void on_kv(evutil_socket_t fd, short events, void *context)
{
    instance_t *self = context;
    kv_rank_rung(&self->kv_rank);
    if (self->serving)
        engine_kv_look(self->engine);
}

static xp_status_t kv_open(instance_t *self, const wire_descriptors_t *fds)
{
    if (fds->count == 0)
        return XP_OK;
    if (fds->count != KV_DESCRIPTORS)
        return xp_fail(XP_PEER, "Admitted came with %u descriptors where %u are expected",
                       fds->count, KV_DESCRIPTORS);
    XP_TRY(kv_rank_open(fds->fds[0], fds->fds[1], fds->fds[2], self->admitted.kv_partition,
                        &self->kv_rank));
    self->on_kv =
        event_new(self->base, kv_rank_bell(&self->kv_rank), EV_READ | EV_PERSIST, on_kv, self);
    if (!self->on_kv || event_add(self->on_kv, NULL) != 0)
        return xp_fail(XP_NO_MEMORY, "cannot watch the KV control channel's bell");
    return XP_OK;
}

/* ---- loading ----------------------------------------------------------------------------------
 */

static xp_status_t load_job(void *context)
{
    instance_t *self = context;
    const config_model_t *model = self->model;
    engine_config_t config = {
        .model_id = model->id,
        .path = model->path,
        .dtype = model->dtype,
        .dummy = model->load_format == CONFIG_LOAD_DUMMY,
        .threads = self->device->threads,
        .cpus = self->device->cpu_count ? self->device->cpus : NULL,
        .cpu_count = self->device->cpu_count,
        .decode_rows = model->decode_rows,
        .prefill_rows = model->prefill_rows,
        .max_rows = self->admitted.max_rows,
        .max_context = self->admitted.max_context,
        .kv_tokens = self->admitted.kv_tokens,
        .kv_rank = self->kv_rank.channel ? &self->kv_rank : NULL,
        .kv_room_bytes = config_machine_room,
        .prefix_cache = true,
        .queue_limit = model->decode_rows * QUEUE_PER_ROW > QUEUE_LEAST
                           ? model->decode_rows * QUEUE_PER_ROW
                           : QUEUE_LEAST,
        .queue_timeout_ns = (uint64_t)(self->config->deadlines.queue * (double)XP_NS_PER_S),
        .request_timeout_ns = (uint64_t)(self->config->deadlines.request * (double)XP_NS_PER_S),
        .ttft_ns = (uint64_t)(model->slo.ttft_ms * (double)XP_NS_PER_MS),
        .tbt_ns = (uint64_t)(model->slo.tbt_ms * (double)XP_NS_PER_MS),
        .ffn = {.call = ffn_call, .context = self},
        .clock = xp_clock_system(),
    };
    XP_TRY(engine_create(&config, &self->engine));
    const char *override = model->chat_template[0] ? model->chat_template : NULL;
    xp_status_t status = chat_template_load(model->path, override, &self->chat_template);
    if (status == XP_NOT_FOUND || status == XP_UNSUPPORTED) {
        /* Chat requests are answered with this reason; completions work. */
        snprintf(self->no_template, sizeof(self->no_template), "%s", xp_error_last()->text);
        xp_log_warn("no chat template: %s", self->no_template);
        status = XP_OK;
    }
    return status;
}

/* One token through every layer: real FFN execution, before the first user pays for it. */
static xp_status_t warm_job(void *context)
{
    instance_t *self = context;
    const model_spec_t *spec = engine_spec(self->engine);
    float *logits = malloc(sizeof(float) * spec->vocab);
    if (!logits)
        return xp_fail(XP_NO_MEMORY, "no memory for the warm-up's logits");
    int32_t token = spec->bos_token >= 0 ? spec->bos_token : 0;
    xp_status_t status = engine_forward(self->engine, &token, 1, logits);
    for (uint32_t i = 0; i < spec->vocab && status == XP_OK; i++)
        if (!(logits[i] > -1e30f && logits[i] < 1e30f))
            status = xp_fail(XP_INVALID,
                             "the warm-up gave a logit that is no finite number (token %u): the "
                             "checkpoint's weights are damaged",
                             i);
    free(logits);
    return status;
}

static void warm_done(void *context, xp_status_t status, const char *error);
static void on_stats(evutil_socket_t fd, short events, void *context);

static void maybe_warm(instance_t *self)
{
    if (!self->loaded || !self->attached || !self->told_to_initialize || self->warmer.started ||
        self->draining)
        return;
    if (worker_start(&self->warmer, self->base, warm_job, warm_done, self) != XP_OK)
        participant_fail(self->participant, xp_error_last()->text);
}

static void load_done(void *context, xp_status_t status, const char *error)
{
    instance_t *self = context;
    if (status != XP_OK) {
        xp_log_err("cannot load model %s: %s", self->model->id, error);
        participant_fail(self->participant, error);
        return;
    }
    self->loaded = true;
    engine_stats_t stats;
    engine_stats(self->engine, &stats);
    xp_log_info("loaded the attention side: %.1f MiB; KV Cache for %u tokens, %u of them backed",
                (double)stats.weight_bytes / 1048576.0, stats.kv_pages * stats.page_tokens,
                stats.kv_backed_pages * stats.page_tokens);
    maybe_warm(self);
}

static void warm_done(void *context, xp_status_t status, const char *error)
{
    instance_t *self = context;
    if (self->draining)
        return;
    if (status != XP_OK) {
        participant_fail(self->participant, error);
        return;
    }
    http_instance_config_t http = {
        .host = INSTANCE_HOST,
        .port = self->model->port,
        .model_id = self->model->id,
        .engine = self->engine,
        .chat_template = self->chat_template,
        .chat_template_reason = self->no_template,
        .created = (int64_t)time(NULL),
    };
    if (engine_start(self->engine) != XP_OK ||
        http_instance_create(&http, self->base, &self->http) != XP_OK) {
        participant_fail(self->participant, xp_error_last()->text);
        return;
    }
    self->serving = true;
    engine_stats_t stats;
    engine_stats(self->engine, &stats);
    xpw_Envelope envelope = {.which_body = xpw_Envelope_initialized_tag};
    xpw_Initialized *initialized = &envelope.body.initialized;
    snprintf(initialized->host, sizeof(initialized->host), "%s", INSTANCE_HOST);
    initialized->port = http_instance_port(self->http);
    initialized->weight_bytes = stats.weight_bytes;
    initialized->kv_bytes = stats.kv_bytes;
    initialized->max_context = engine_max_context(self->engine);
    participant_send(self->participant, &envelope, NULL, 0);
    xp_log_info("serving on http://%s:%u", INSTANCE_HOST, initialized->port);
    on_stats(-1, 0, self);
}

/* ---- periodic ---------------------------------------------------------------------------------
 */

static void on_stats(evutil_socket_t fd, short events, void *context)
{
    instance_t *self = context;
    if (atomic_load(&self->ffn_failed) && !self->draining) {
        participant_fail(self->participant, self->ffn_error);
        return;
    }
    if (!self->serving)
        return;
    engine_stats_t s;
    engine_stats(self->engine, &s);
    if (s.kv_grow_failures > self->kv_grow_failures)
        xp_log_warn("the system had no memory for a grant to the KV Cache: %s", s.kv_grow_error);
    self->kv_grow_failures = s.kv_grow_failures;
    xpw_Envelope envelope = {.which_body = xpw_Envelope_instance_stats_tag};
    envelope.body.instance_stats = (xpw_InstanceStats){
        .steps = s.steps,
        .ffn_calls = s.ffn_calls,
        .ffn_rows = s.ffn_rows,
        .prompt_tokens = s.prompt_tokens,
        .generated_tokens = s.generated_tokens,
        .cached_tokens = s.cached_tokens,
        .requests = s.requests,
        .finished = s.finished,
        .aborted = s.aborted,
        .failed = s.failed,
        .rejected = s.rejected,
        .running = s.running,
        .waiting = s.waiting,
        .kv_pages = s.kv_pages,
        .kv_pages_used = s.kv_pages_used,
        .kv_pages_cached = s.kv_pages_cached,
        .page_tokens = s.page_tokens,
        .kv_bytes = s.kv_bytes,
        .weight_bytes = s.weight_bytes,
        .ttft_p50_ms = s.ttft_p50_ms,
        .ttft_p99_ms = s.ttft_p99_ms,
        .tbt_p50_ms = s.tbt_p50_ms,
        .tbt_p99_ms = s.tbt_p99_ms,
    };
    participant_send(self->participant, &envelope, NULL, 0);
}

static void on_drain(evutil_socket_t fd, short events, void *context)
{
    instance_t *self = context;
    uint32_t open = self->http ? http_instance_open_requests(self->http) : 0;
    if (open && xp_monotonic_ns() < self->drain_deadline_ns)
        return;
    if (open && !self->flushing) {
        /* Their clients are told: the engine aborts them, and the answers get a moment to leave. */
        xp_log_warn("%u request(s) were still open when the drain deadline passed", open);
        self->flushing = true;
        self->drain_deadline_ns = xp_monotonic_ns() + FLUSH_NS;
        engine_stop(self->engine, xp_monotonic_ns());
        return;
    }
    participant_bye(self->participant, "drained");
}

/* ---- messages ---------------------------------------------------------------------------------
 */

static void on_admitted(instance_t *self, const xpw_Admitted *admitted,
                        const wire_descriptors_t *fds)
{
    if (self->transport) {
        participant_fail(self->participant, "a second Admitted");
        return;
    }
    if (admitted->atn_index >= self->config->atn_count) {
        participant_fail(self->participant, "Admitted names no device of atn.devices");
        return;
    }
    self->admitted = *admitted;
    self->device = &self->config->atn[admitted->atn_index];
    transport_geometry_t geometry = {.hidden = admitted->hidden,
                                     .max_rows = admitted->max_rows,
                                     .dtype = XP_DTYPE_F32,
                                     .dp_size = 1};
    char name[CONFIG_MAX_ID + 8];
    snprintf(name, sizeof(name), "%s.0", self->model->id);
    if (observe_open(self->config->observe.folder, OBSERVE_RANK, name,
                     self->config->observe.records, &self->observe) != XP_OK ||
        kv_open(self, fds) != XP_OK ||
        transport_client_create(&geometry, admitted->spin_ns, &self->transport) != XP_OK) {
        participant_fail(self->participant, xp_error_last()->text);
        return;
    }
    observe_name_instance(self->observe, admitted->instance, self->model->id);
    transport_client_observe(self->transport, self->observe, admitted->instance, 0);
    if (worker_start(&self->loader, self->base, load_job, load_done, self) != XP_OK) {
        participant_fail(self->participant, xp_error_last()->text);
        return;
    }
    xpw_Envelope envelope = {.which_body = xpw_Envelope_arena_offer_tag};
    envelope.body.arena_offer.hidden = geometry.hidden;
    envelope.body.arena_offer.max_rows = geometry.max_rows;
    envelope.body.arena_offer.dtype = (uint32_t)geometry.dtype;
    int fd = transport_client_fd(self->transport);
    participant_send(self->participant, &envelope, &fd, 1);
}

static void on_message(void *context, const xpw_Envelope *envelope, wire_descriptors_t *fds)
{
    instance_t *self = context;
    switch (envelope->which_body) {
    case xpw_Envelope_admitted_tag:
        on_admitted(self, &envelope->body.admitted, fds);
        break;
    case xpw_Envelope_attached_tag:
        if (!self->transport || fds->count != 1 ||
            transport_client_set_doorbell(self->transport, fds->fds[0],
                                          envelope->body.attached.atn_pe) != XP_OK) {
            participant_fail(self->participant, xp_error_last()->text);
            return;
        }
        self->attached = true;
        maybe_warm(self);
        break;
    case xpw_Envelope_initialize_tag:
        self->told_to_initialize = true;
        maybe_warm(self);
        break;
    default:
        xp_log_warn("ignored %s", wire_body_name(envelope->which_body));
    }
}

static void on_stop(void *context, xpw_StopPhase phase, uint32_t seconds)
{
    instance_t *self = context;
    if (self->http)
        http_instance_quiesce(self->http);
    if (phase == xpw_StopPhase_STOP_QUIESCE)
        return;
    if (phase == xpw_StopPhase_STOP_FINALIZE || !self->serving) {
        self->draining = true;
        participant_bye(self->participant, "told to end");
        return;
    }
    if (self->draining)
        return;
    self->draining = true;
    self->drain_deadline_ns = xp_monotonic_ns() + seconds * XP_NS_PER_S;
    struct timeval period = {.tv_usec = DRAIN_PERIOD_MS * 1000};
    event_add(self->on_drain, &period);
    on_drain(-1, 0, self);
}

static void on_failed(void *context)
{
    instance_t *self = context;
    if (self->transport)
        transport_arena_close(transport_client_fd(self->transport), XP_FATAL);
}

int instance_run(const config_t *config, const char *model_id)
{
    participant_bind_to_parent();
    signal(SIGPIPE, SIG_IGN);
    xp_log_identify("instance", model_id);
    int exit_code = 1;
    instance_t *self = calloc(1, sizeof(*self));
    if (!self)
        return 1;
    self->config = config;
    self->loader.event_fd = self->warmer.event_fd = -1;
    participant_handlers_t handlers = {
        .message = on_message, .stop = on_stop, .failed = on_failed, .context = self};
    self->model = config_model_find(config, model_id);
    if (!self->model) {
        xp_log_err("model %s is not in the configuration (models[].id)", model_id);
        exit_code = 2;
        goto done;
    }
    if (kernels_select() != XP_OK) {
        xp_log_error("cannot start");
        exit_code = 2;
        goto done;
    }
    self->base = event_base_new();
    if (self->base) {
        self->on_stats = event_new(self->base, -1, EV_PERSIST, on_stats, self);
        self->on_drain = event_new(self->base, -1, EV_PERSIST, on_drain, self);
    }
    struct timeval period = {.tv_usec = STATS_PERIOD_MS * 1000};
    if (!self->base || !self->on_stats || !self->on_drain ||
        event_add(self->on_stats, &period) != 0 ||
        participant_create(self->base, config, xpw_Role_ROLE_INSTANCE, model_id, 0,
                           kernels_variant_name(kernels_selected()), &handlers,
                           &self->participant) != XP_OK) {
        exit_code = participant_start_error();
        goto done;
    }
    event_base_dispatch(self->base);
    exit_code = participant_exit_code(self->participant);
    /* Loading and an FFN wait that nobody answers cannot be interrupted; what they hold ends with
     * the process. */
    if (exit_code != 0 || !worker_join(&self->loader, 0) || !worker_join(&self->warmer, 0))
        _exit(exit_code);
    if (self->serving && !self->flushing)
        engine_stop(self->engine, xp_monotonic_ns());
    worker_fini(&self->loader);
    worker_fini(&self->warmer);
done:
    participant_destroy(self->participant);
    http_instance_destroy(self->http);
    engine_destroy(self->engine);
    if (self->on_kv)
        event_free(self->on_kv);
    kv_rank_close(&self->kv_rank);
    chat_template_destroy(self->chat_template);
    transport_client_destroy(self->transport);
    observe_close(self->observe);
    if (self->on_stats)
        event_free(self->on_stats);
    if (self->on_drain)
        event_free(self->on_drain);
    if (self->base)
        event_base_free(self->base);
    free(self);
    return exit_code;
}
