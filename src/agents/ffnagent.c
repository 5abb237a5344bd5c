/* SPDX-License-Identifier: MIT */
/*
 * FfnAgent: owns one FFN device, the weight shards on it and their execution. The event loop thread
 * speaks with the daemon; one worker thread loads weights, a second one then runs the data plane
 * (fabric_ffn_run), on which the first FfnAgent also runs the Coordinator.
 */
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "agents/agents.h"
#include "agents/join.h"
#include "agents/loading.h"
#include "agents/usage.h"
#include "agents/worker.h"
#include "base/clock.h"
#include "base/log.h"
#include "control/participant.h"
#include "ffn/ffn.h"
#include "kernels/kernels.h"

#define SERVICE_JOIN_MS 2000
#define USAGE_PERIOD_MS 500

typedef struct ffnagent {
    const config_t *config;
    const config_device_t *device;
    uint32_t index;
    struct event_base *base;
    participant_t *participant;
    fabric_plan_t *plan;
    uint64_t memory_bytes; /* the plan's budget: a default one differs from process to process */
    fabric_t *fabric;
    fabric_ffn_t *service;
    ffn_runtime_t *runtime;
    observe_t *observe;
    worker_t loader, worker;
    agent_loading_t loading;
    struct event *on_usage;
    agent_usage_t usage;
    ffn_weights_t kept[FABRIC_MAX_INSTANCES]; /* by a former FfnAgent; fd -1: none */
    bool finalizing, loading_done;
} ffnagent_t;

static xp_status_t execute(void *context, uint32_t lane, uint32_t weights, uint32_t layer,
                           uint32_t rows, const float *in, float *out)
{
    ffnagent_t *self = context;
    return ffn_runtime_execute(self->runtime, lane, weights, layer, rows, in, out);
}

static void describe(void *context, uint32_t weights, uint32_t layer, uint32_t rows,
                     observe_record_t *record)
{
    ffnagent_t *self = context;
    uint32_t template, capacity;
    if (ffn_runtime_describe(self->runtime, weights, layer, rows, &template, &capacity) != XP_OK)
        return;
    record->graph_template = (uint16_t) template;
    record->capacity = capacity;
}

static xp_status_t service_job(void *context)
{
    ffnagent_t *self = context;
    return fabric_ffn_run(self->service);
}

static void service_done(void *context, xp_status_t status, const char *error)
{
    ffnagent_t *self = context;
    if (status == XP_CLOSED || status == XP_OK)
        participant_bye(self->participant, "the Fabric was shut down");
    else
        participant_fail(self->participant, error);
}

/* ---- loading ----------------------------------------------------------------------------------
 */

/* The kept shard is another one: the daemon is to let go of it before as much is loaded anew. */
static void note_refused(void *context)
{
    ffnagent_t *self = context;
    ffn_weights_t *kept = &self->kept[self->loading.weights];
    close(kept->fd);
    kept->fd = -1;
    agent_loading_refuse(&self->loading);
}

static void take_kept(ffnagent_t *self, const xpw_KeptWeights *message, wire_descriptors_t *fds)
{
    if (self->loader.started || message->weights >= FABRIC_MAX_INSTANCES || message->blocks != 1 ||
        fds->count != 1 || self->kept[message->weights].fd >= 0) {
        participant_fail(self->participant, "KeptWeights out of order");
        return;
    }
    self->kept[message->weights] = (ffn_weights_t){.fd = wire_descriptors_take(fds, 0),
                                                   .bytes = message->bytes,
                                                   .identity = message->identity,
                                                   .content = message->content};
}

/* What was loaded here outlives this process with the daemon. */
static xp_status_t offer_weights(ffnagent_t *self)
{
    for (uint32_t w = 0; self->config->deadlines.reform > 0 && w < self->plan->weights_count; w++) {
        ffn_weights_t weights;
        if ((self->loading.adopted >> w & 1) || !ffn_runtime_model_bytes(self->runtime, w))
            continue;
        XP_TRY(ffn_runtime_export(self->runtime, w, &weights));
        xpw_Envelope envelope = {.which_body = xpw_Envelope_kept_weights_tag};
        envelope.body.kept_weights = (xpw_KeptWeights){.weights = w,
                                                       .blocks = 1,
                                                       .bytes = weights.bytes,
                                                       .identity = weights.identity,
                                                       .content = weights.content};
        xp_status_t status = participant_send(self->participant, &envelope, &weights.fd, 1);
        close(weights.fd);
        if (status != XP_OK)
            return status;
    }
    return XP_OK;
}

static void plan_widths(const ffnagent_t *self, uint32_t *max_rows)
{
    *max_rows = 1;
    for (uint32_t i = 0; i < self->plan->instance_count; i++) {
        const fabric_plan_instance_t *instance = &self->plan->instances[i];
        uint32_t rows = instance->max_rows * instance->atn_dp;
        if (rows > *max_rows)
            *max_rows = rows;
    }
}

static xp_status_t load_job(void *context)
{
    ffnagent_t *self = context;
    const char *zero = getenv("XPOOL_TEST_ZERO_FFN");
    ffn_runtime_config_t runtime_config = {
        .threads = self->device->threads,
        .cpus = self->device->cpu_count ? self->device->cpus : NULL,
        .cpu_count = self->device->cpu_count,
        .lanes = self->plan->lanes,
        .memory_bytes = self->memory_bytes,
        .zero_output = zero && strcmp(zero, "1") == 0,
        .zero_path = zero && zero[0] == '/' ? zero : NULL,
    };
    if (runtime_config.zero_output)
        xp_log_warn("XPOOL_TEST_ZERO_FFN is set: every FFN result is zero, the text is garbage");
    if (runtime_config.zero_path)
        xp_log_warn("XPOOL_TEST_ZERO_FFN is set: FFN results are zero while %s exists", zero);
    plan_widths(self, &runtime_config.max_rows);
    XP_TRY(ffn_runtime_create(&runtime_config, &self->runtime));
    for (uint32_t w = 0; w < self->plan->weights_count; w++) {
        uint32_t first = 0;
        uint32_t group = agent_loading_group(self->plan, w, &first);
        if (!(group & (1u << self->index)))
            continue;
        const config_model_t *model =
            config_model_find(self->config, self->plan->instances[first].id);
        if (!model)
            return xp_fail(XP_INVALID, "the plan names model %s, the configuration does not",
                           self->plan->instances[first].id);
        agent_loading_next(&self->loading, w, model->id);
        ffn_load_report_t report;
        ffn_install_t install = {
            .model = w,
            .model_id = model->id,
            .path = model->path,
            .dtype = model->dtype,
            .dummy = model->load_format == CONFIG_LOAD_DUMMY,
            .tp_rank = (uint32_t)__builtin_popcount(group & ((1u << self->index) - 1)),
            .tp_size = (uint32_t)__builtin_popcount(group),
            .readers = self->config->loader_parallelism,
            .progress = agent_loading_count,
            .progress_context = &self->loading,
            .kept = self->kept[w].fd >= 0 ? &self->kept[w] : NULL,
            .refused = note_refused,
            .refused_context = self,
            .report = &report,
        };
        xp_status_t status = ffn_runtime_install(self->runtime, &install);
        if (status != XP_OK)
            return xp_fail_context(status, "model %s", model->id);
        agent_loading_installed(&self->loading, ffn_runtime_model_bytes(self->runtime, w),
                                report.adopted, report.read, report.took_ns);
    }
    return XP_OK;
}

static void send_usage(evutil_socket_t fd, short events, void *context)
{
    ffnagent_t *self = context;
    for (uint32_t w = 0; w < self->plan->weights_count; w++) {
        ffn_usage_t usage;
        /* A device that computes all the time is asked again. */
        if (ffn_runtime_model_bytes(self->runtime, w) &&
            ffn_runtime_usage(self->runtime, w, &usage) == XP_OK)
            agent_usage_send(&self->usage, self->participant, w, &usage);
    }
}

static void load_done(void *context, xp_status_t status, const char *error)
{
    ffnagent_t *self = context;
    self->loading_done = true;
    agent_loading_end(&self->loading);
    if (self->finalizing) {
        participant_bye(self->participant, "stopped while loading");
        return;
    }
    if (status != XP_OK) {
        participant_fail(self->participant, error);
        return;
    }
    if (observe_open(self->config->observe.folder, OBSERVE_FFN, self->device->name,
                     self->config->observe.records, &self->observe) != XP_OK ||
        fabric_ffn_create(self->fabric, xp_clock_system(), execute, self, &self->service) !=
            XP_OK) {
        participant_fail(self->participant, xp_error_last()->text);
        return;
    }
    fabric_ffn_observe(self->service, self->observe, describe);
    struct timeval period = {.tv_usec = USAGE_PERIOD_MS * 1000};
    if (event_add(self->on_usage, &period) != 0 ||
        worker_start(&self->worker, self->base, service_job, service_done, self) != XP_OK) {
        participant_fail(self->participant, xp_error_last()->text);
        return;
    }
    if (offer_weights(self) != XP_OK) {
        participant_fail(self->participant, xp_error_last()->text);
        return;
    }
    ffn_stats_t stats;
    ffn_runtime_stats(self->runtime, &stats);
    xpw_Envelope envelope = {.which_body = xpw_Envelope_executable_tag};
    xpw_Executable *executable = &envelope.body.executable;
    executable->weight_bytes = stats.weight_bytes;
    executable->workspace_bytes = stats.workspace_bytes;
    executable->signatures = stats.signatures;
    executable->templates = stats.templates;
    executable->read_bytes = self->loading.read_bytes;
    executable->adopted_bytes = self->loading.adopted_bytes;
    executable->weights_count = (pb_size_t)self->plan->weights_count;
    for (uint32_t w = 0; w < self->plan->weights_count; w++)
        executable->weights[w] = ffn_runtime_model_bytes(self->runtime, w);
    participant_send(self->participant, &envelope, NULL, 0);
    xp_log_info("executable: %.1f MiB of weights, %u signature(s), %u template(s)",
                (double)stats.weight_bytes / 1048576.0, stats.signatures, stats.templates);
}

/* ---- messages ---------------------------------------------------------------------------------
 */

static void on_message(void *context, const xpw_Envelope *envelope, wire_descriptors_t *fds)
{
    ffnagent_t *self = context;
    switch (envelope->which_body) {
    case xpw_Envelope_join_tag: {
        if (self->fabric) {
            participant_fail(self->participant, "a second Join");
            return;
        }
        if (agent_join(&envelope->body.join, fds, &self->plan, &self->fabric) != XP_OK) {
            participant_fail(self->participant, xp_error_last()->text);
            return;
        }
        xpw_Envelope answer = {.which_body = xpw_Envelope_joined_tag};
        answer.body.joined.generation = envelope->body.join.generation;
        participant_send(self->participant, &answer, NULL, 0);
        break;
    }
    case xpw_Envelope_kept_weights_tag:
        take_kept(self, &envelope->body.kept_weights, fds);
        break;
    case xpw_Envelope_prepare_tag: {
        if (!self->fabric || self->loader.started) {
            participant_fail(self->participant, "Prepare out of order");
            return;
        }
        self->memory_bytes = envelope->body.prepare.memory_bytes;
        if (agent_loading_begin(&self->loading, self->participant) != XP_OK ||
            worker_start(&self->loader, self->base, load_job, load_done, self) != XP_OK)
            participant_fail(self->participant, xp_error_last()->text);
        break;
    }
    default:
        xp_log_warn("ignored %s", wire_body_name(envelope->which_body));
    }
}

static void on_stop(void *context, xpw_StopPhase phase, uint32_t seconds)
{
    ffnagent_t *self = context;
    if (phase != xpw_StopPhase_STOP_FINALIZE || self->finalizing)
        return;
    self->finalizing = true;
    if (self->service)
        fabric_shutdown(self->fabric); /* the service ends and says goodbye */
    else if (!self->loader.started || self->loading_done)
        participant_bye(self->participant, "stopped before it was executable");
    else
        participant_bye(self->participant, "stopped while loading");
}

static void on_failed(void *context)
{
    ffnagent_t *self = context;
    if (self->fabric)
        fabric_fail(self->fabric, FABRIC_PE_OBSERVER, "the control channel reported a failure");
}

int ffnagent_run(const config_t *config, const char *device)
{
    const config_device_t *configured = config_device_find(config, true, device, NULL);
    if (configured && configured->kind == CONFIG_DEVICE_CUDA)
        return ffnagent_cuda_run(config, device);
    participant_bind_to_parent();
    signal(SIGPIPE, SIG_IGN);
    xp_log_identify("ffnagent", device);
    int exit_code = 1;
    ffnagent_t *self = calloc(1, sizeof(*self));
    if (!self)
        return 1;
    participant_handlers_t handlers = {
        .message = on_message, .stop = on_stop, .failed = on_failed, .context = self};
    self->loader.event_fd = self->worker.event_fd = self->loading.refused_fd = -1;
    for (uint32_t w = 0; w < FABRIC_MAX_INSTANCES; w++)
        self->kept[w].fd = -1;
    self->config = config;
    self->device = config_device_find(config, true, device, &self->index);
    if (!self->device) {
        xp_log_err("device %s is not in ffn.devices", device);
        exit_code = 2;
        goto done;
    }
    if (kernels_select() != XP_OK) {
        xp_log_error("cannot start");
        exit_code = 2;
        goto done;
    }
    self->base = event_base_new();
    if (self->base)
        self->on_usage = event_new(self->base, -1, EV_PERSIST, send_usage, self);
    if (!self->base || !self->on_usage || agent_loading_init(&self->loading, self->base) != XP_OK ||
        participant_create(self->base, config, xpw_Role_ROLE_FFNAGENT, device, 0,
                           kernels_variant_name(kernels_selected()), &handlers,
                           &self->participant) != XP_OK) {
        exit_code = participant_start_error();
        goto done;
    }
    event_base_dispatch(self->base);
    exit_code = participant_exit_code(self->participant);
    /* Reading weights cannot be interrupted; nothing it holds outlives the process. */
    if (!worker_join(&self->loader, 0))
        _exit(exit_code);
    if (!worker_join(&self->worker, exit_code ? SERVICE_JOIN_MS / 10 : SERVICE_JOIN_MS)) {
        xp_log_err("the data plane did not stop");
        _exit(exit_code ? exit_code : 1);
    }
    worker_fini(&self->loader);
    worker_fini(&self->worker);
done:
    participant_destroy(self->participant);
    fabric_ffn_destroy(self->service);
    observe_close(self->observe);
    fabric_detach(self->fabric);
    ffn_runtime_destroy(self->runtime);
    for (uint32_t w = 0; w < FABRIC_MAX_INSTANCES; w++)
        if (self->kept[w].fd >= 0)
            close(self->kept[w].fd);
    free(self->plan);
    agent_loading_fini(&self->loading);
    if (self->on_usage)
        event_free(self->on_usage);
    if (self->base)
        event_base_free(self->base);
    free(self);
    return exit_code;
}
