/* SPDX-License-Identifier: MIT */
/*
 * FfnAgent of a GPU: weight shards, stages and scheduler on it. The event loop thread speaks with
 * the daemon and looks at the scheduler; worker threads load and start what takes long. Once the
 * scheduler runs, the loop makes only calls that no kernel can hold up.
 *
 *   Prepare ─ load ─▶ stages made and offered ─ partials of others mapped ─▶ start ─▶ Executable
 *
 * Everything that allocates or loads code is done before the first kernel stays on the device.
 */
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "agents/agents.h"
#include "agents/environment.h"
#include "agents/heap.h"
#include "agents/join.h"
#include "agents/loading.h"
#include "agents/usage.h"
#include "agents/worker.h"
#include "base/clock.h"
#include "base/log.h"
#include "control/gpus.h"
#include "control/participant.h"
#include "ffn/cuda_runtime.h"
#include "observe/observe.h"
#include "stage/stage.h"

#define LOOK_PERIOD_MS   5
#define LOOK_LIMIT_NS    (200 * XP_NS_PER_MS)
#define SILENCE_LIMIT_NS (5 * XP_NS_PER_S) /* of a device that does not tell */
#define STATS_PERIOD_NS  (500 * XP_NS_PER_MS)
#define ATTACH_LIMIT_NS  (2 * XP_NS_PER_S)
#define DETACH_STEP_NS   (20 * XP_NS_PER_MS)
#define STOP_LIMIT_NS    (2 * XP_NS_PER_S)
#define FAIL_LIMIT_NS    (300 * XP_NS_PER_MS)
#define RECORDS_AT_ONCE  256

typedef struct ffnagent {
    const config_t *config;
    const config_device_t *configured;
    uint32_t index;
    int ordinal;
    struct event_base *base;
    participant_t *participant;
    struct event *on_look;
    worker_t loader, starter;
    fabric_plan_t *plan;
    uint64_t memory_bytes; /* the plan's budget */
    int life_fd;           /* where the GPU has both roles: under MPS */
    bool keep;             /* Instances outlive the Generation */
    uint32_t life_index;
    cuda_device_t device;
    transport_cuda_life_t life;
    agent_heap_t heap; /* provider nvshmem */
    ffn_cuda_runtime_t *runtime;
    stage_ffn_t *stage;
    observe_t *observe;
    /* Partials of first members: those wanted, and those mapped, a bit an FfnAgent. */
    uint32_t wanted[FABRIC_MAX_INSTANCES], mapped[FABRIC_MAX_INSTANCES];
    /* Arenas of an Instance until all of its ranks' have come. */
    int arenas[FABRIC_MAX_INSTANCES][FABRIC_MAX_RANKS];
    bool resume[FABRIC_MAX_INSTANCES];     /* of a former Generation */
    int kept_stages[FABRIC_MAX_INSTANCES]; /* of a former FfnAgent; -1: none */
    uint64_t leases[FABRIC_MAX_INSTANCES];
    uint64_t attached;  /* bits of Instances */
    uint64_t dropped;   /* by the scheduler, to be detached */
    uint64_t detaching; /* the daemon waits for the answer */
    uint64_t detach_until_ns[FABRIC_MAX_INSTANCES];
    uint64_t answered_ns; /* when the device told last */
    uint64_t stats_ns;
    agent_loading_t loading;
    agent_usage_t usage;
    ffn_cuda_weights_t *kept; /* [FABRIC_MAX_INSTANCES], by a former FfnAgent; count 0: none */
    bool prepared, loaded, started, finalizing, failed;
} ffnagent_t;

static uint64_t within(uint64_t limit_ns)
{
    return xp_monotonic_ns() + limit_ns;
}

static void give_up(ffnagent_t *self)
{
    participant_fail(self->participant, xp_error_last()->text);
}

static bool shared(const ffnagent_t *self)
{
    return gpus_shared(self->config, self->configured);
}

/* ---- weights from one FfnAgent to the next ---------------------------------------------------
 */

static void forget_kept(ffn_cuda_weights_t *kept)
{
    for (uint32_t b = 0; b < kept->count; b++)
        close(kept->fd[b]);
    kept->count = 0;
}

static xp_status_t on_kept(ffnagent_t *self, const xpw_KeptWeights *message,
                           wire_descriptors_t *fds)
{
    _Static_assert(FFN_CUDA_WEIGHT_BLOCKS == 32, "as many as the daemon keeps of a shard");
    ffn_cuda_weights_t *kept = &self->kept[message->weights % FABRIC_MAX_INSTANCES];
    if (self->prepared || message->weights >= FABRIC_MAX_INSTANCES || fds->count != 1 ||
        message->blocks > FFN_CUDA_WEIGHT_BLOCKS || message->block >= message->blocks ||
        message->block != kept->count)
        return xp_fail(XP_PEER, "KeptWeights out of order");
    kept->fd[kept->count] = wire_descriptors_take(fds, 0);
    kept->bytes[kept->count++] = message->bytes;
    kept->identity = message->identity;
    kept->content = message->content;
    return XP_OK;
}

static xp_status_t offer_shard(ffnagent_t *self, uint32_t model)
{
    ffn_cuda_weights_t weights;
    xp_status_t status = XP_OK;
    XP_TRY(ffn_cuda_runtime_export(self->runtime, model, &weights));
    for (uint32_t b = 0; b < weights.count && status == XP_OK; b++) {
        xpw_Envelope envelope = {.which_body = xpw_Envelope_kept_weights_tag};
        envelope.body.kept_weights = (xpw_KeptWeights){.weights = model,
                                                       .block = b,
                                                       .blocks = weights.count,
                                                       .bytes = weights.bytes[b],
                                                       .identity = weights.identity,
                                                       .content = weights.content};
        status = participant_send(self->participant, &envelope, &weights.fd[b], 1);
    }
    forget_kept(&weights);
    return status;
}

/* What was loaded here outlives this process with the daemon. */
static xp_status_t offer_weights(ffnagent_t *self)
{
    for (uint32_t w = 0; self->config->deadlines.reform > 0 && w < self->plan->weights_count; w++)
        if (!(self->loading.adopted >> w & 1) && ffn_cuda_runtime_model_bytes(self->runtime, w))
            XP_TRY(offer_shard(self, w));
    return XP_OK;
}

static xp_status_t install(ffnagent_t *self, uint32_t weights)
{
    uint32_t first = 0, group = agent_loading_group(self->plan, weights, &first);
    if (!(group & 1u << self->index))
        return XP_OK;
    const fabric_plan_instance_t *instance = &self->plan->instances[first];
    const config_model_t *model = config_model_find(self->config, instance->id);
    if (!model)
        return xp_fail(XP_INVALID, "the plan names model %s, the configuration does not",
                       instance->id);
    agent_loading_next(&self->loading, weights, model->id);
    ffn_install_t shard = {.model = weights,
                           .model_id = model->id,
                           .path = model->path,
                           .dtype = (xp_dtype_t)instance->dtype,
                           .dummy = model->load_format == CONFIG_LOAD_DUMMY,
                           .tp_rank =
                               (uint32_t)__builtin_popcount(group & ((1u << self->index) - 1)),
                           .tp_size = (uint32_t)__builtin_popcount(group),
                           .readers = self->config->loader_parallelism,
                           .progress = agent_loading_count,
                           .progress_context = &self->loading,
                           .refused = agent_loading_refuse,
                           .refused_context = &self->loading};
    ffn_cuda_load_report_t report;
    ffn_cuda_weights_t *kept = self->kept[weights].count ? &self->kept[weights] : NULL;
    xp_status_t status = ffn_cuda_runtime_install(self->runtime, &shard, kept, &report);
    if (status != XP_OK)
        return xp_fail_context(status, "model %s", model->id);
    forget_kept(&self->kept[weights]);
    agent_loading_installed(&self->loading, report.bytes, report.bytes, report.adopted, report.read,
                            report.took_ns);
    return XP_OK;
}

static xp_status_t open_device(ffnagent_t *self)
{
    const cuda_driver_t *driver;
    XP_TRY(cuda_driver_load(&driver));
    XP_TRY(cuda_device_open(driver, self->ordinal, &self->device));
    xp_log_info("%s is %s (%s)", self->configured->name, self->device.info.name,
                self->device.info.bus_id);
    if (!shared(self))
        return XP_OK;
    return transport_cuda_life_open(&self->device, self->life_fd, self->life_index, &self->life);
}

/* Whether the plan puts weights here; without any the device is left alone. */
static bool used(const ffnagent_t *self)
{
    for (uint32_t i = 0; i < self->plan->instance_count; i++)
        if (stage_members(&self->plan->instances[i]) & 1u << self->index)
            return true;
    return false;
}

static xp_status_t load_job(void *context)
{
    ffnagent_t *self = context;
    stage_bytes_t stages;
    if (getenv("XPOOL_TEST_ZERO_FFN"))
        return xp_fail(XP_UNSUPPORTED, "XPOOL_TEST_ZERO_FFN is for FfnAgents on CPU devices");
    if (!used(self))
        return XP_OK;
    XP_TRY(self->heap.heap ? cuda_device_use(&self->device) : open_device(self));
    stage_ffn_bytes(self->plan, self->index, &stages);
    uint64_t taken = stages.stages + stages.partials + stages.tables;
    ffn_cuda_config_t config = {
        .device = &self->device,
        .lanes = self->plan->lanes,
        .max_rows = stage_max_rows(self->plan, self->index),
        .buffer_rows = stage_buffer_rows(self->plan, self->index),
        .memory_bytes = self->memory_bytes > taken ? self->memory_bytes - taken : 1,
        /* The courier needs a multiprocessor, and the resident kernel leaves none. */
        .resident = !shared(self) && self->plan->provider != FABRIC_PROVIDER_NVSHMEM_FAR,
        .cuts = true,
        .shared_role = shared(self),
        .library = true,
        .records = self->config->observe.folder[0] ? self->config->observe.records : 0,
        .cpu = -1};
    XP_TRY(ffn_cuda_runtime_create(&config, &self->runtime));
    for (uint32_t w = 0; w < self->plan->weights_count; w++)
        XP_TRY(install(self, w));
    return XP_OK;
}

/* ---- stages -----------------------------------------------------------------------------------
 */

static void forget_kept_stages(ffnagent_t *self)
{
    for (uint32_t i = 0; i < FABRIC_MAX_INSTANCES; i++) {
        if (self->kept_stages[i] >= 0)
            close(self->kept_stages[i]);
        self->kept_stages[i] = -1;
    }
}

static xp_status_t on_kept_stage(ffnagent_t *self, const xpw_KeptStage *message,
                                 wire_descriptors_t *fds)
{
    if (self->prepared || message->instance >= FABRIC_MAX_INSTANCES || fds->count != 1 ||
        self->kept_stages[message->instance] >= 0)
        return xp_fail(XP_PEER, "KeptStage out of order");
    self->kept_stages[message->instance] = wire_descriptors_take(fds, 0);
    return XP_OK;
}

static xp_status_t offer(ffnagent_t *self, xpw_StageKind kind, uint32_t instance, int fd)
{
    xpw_Envelope envelope = {.which_body = xpw_Envelope_stage_offer_tag};
    envelope.body.stage_offer.kind = kind;
    envelope.body.stage_offer.instance = instance;
    envelope.body.stage_offer.adopted =
        kind == xpw_StageKind_STAGE_ROWS && stage_ffn_adopted(self->stage, instance);
    xp_status_t status = participant_send(self->participant, &envelope, &fd, 1);
    close(fd);
    return status;
}

/* First members that reduce for layers on which this FfnAgent is another member. */
static uint32_t reducers_of(const ffnagent_t *self, const fabric_plan_instance_t *instance)
{
    uint32_t firsts = 0, own = 1u << self->index;
    for (uint32_t l = 0; l < instance->layers; l++) {
        uint32_t group = instance->layer_group[l], first = group & -group;
        if ((group & own) && first != own)
            firsts |= first;
    }
    return firsts & stage_reducers(instance);
}

static xp_status_t make_stages(ffnagent_t *self)
{
    stage_ffn_config_t config = {.device = &self->device,
                                 .plan = self->plan,
                                 .ffn = self->index,
                                 .life = shared(self) ? &self->life : NULL,
                                 .heap = self->heap.heap,
                                 .kept = self->kept_stages,
                                 .dispatch = ffn_cuda_runtime_dispatch(self->runtime)};
    XP_TRY(cuda_device_use(&self->device));
    xp_status_t status = stage_ffn_create(&config, &self->stage);
    forget_kept_stages(self);
    XP_TRY(status);
    if (self->heap.heap)
        return XP_OK; /* everybody knows where it lies */
    for (uint32_t i = 0; i < self->plan->instance_count; i++) {
        const fabric_plan_instance_t *instance = &self->plan->instances[i];
        int fd;
        if (!(stage_members(instance) & 1u << self->index))
            continue;
        XP_TRY(stage_ffn_export(self->stage, i, &fd));
        XP_TRY(offer(self, xpw_StageKind_STAGE_ROWS, i, fd));
        if (stage_reducers(instance) & 1u << self->index) {
            XP_TRY(stage_ffn_export_partials(self->stage, i, &fd));
            XP_TRY(offer(self, xpw_StageKind_STAGE_PARTIALS, i, fd));
        }
        self->wanted[i] = reducers_of(self, instance);
    }
    return XP_OK;
}

/* ---- start ------------------------------------------------------------------------------------
 */

static xp_status_t start_job(void *context)
{
    ffnagent_t *self = context;
    XP_TRY(cuda_device_use(&self->device));
    return ffn_cuda_runtime_start(self->runtime);
}

static void send_executable(ffnagent_t *self, const ffn_cuda_stats_t *stats)
{
    xpw_Envelope envelope = {.which_body = xpw_Envelope_executable_tag};
    xpw_Executable *executable = &envelope.body.executable;
    executable->weight_bytes = stats->weight_bytes;
    executable->workspace_bytes = stats->workspace_bytes + stats->table_bytes;
    executable->signatures = stats->signatures;
    executable->templates = stats->templates;
    executable->read_bytes = self->loading.read_bytes;
    executable->adopted_bytes = self->loading.adopted_bytes;
    executable->weights_count = (pb_size_t)self->plan->weights_count;
    for (uint32_t w = 0; w < self->plan->weights_count; w++)
        executable->weights[w] = self->runtime ? ffn_cuda_runtime_model_bytes(self->runtime, w) : 0;
    participant_send(self->participant, &envelope, NULL, 0);
    xp_log_info("executable: %.1f MiB of weights, %u signature(s), %u template(s)",
                (double)stats->weight_bytes / 1048576.0, stats->signatures, stats->templates);
}

static void start_done(void *context, xp_status_t status, const char *error)
{
    ffnagent_t *self = context;
    ffn_cuda_stats_t stats;
    struct timeval period = {.tv_usec = LOOK_PERIOD_MS * 1000};
    if (self->failed)
        return;
    if (self->finalizing) {
        participant_bye(self->participant, "stopped while starting");
        return;
    }
    if (status != XP_OK) {
        participant_fail(self->participant, error);
        return;
    }
    if (ffn_cuda_runtime_stats(self->runtime, &stats) != XP_OK ||
        stage_ffn_start(self->stage) != XP_OK || event_add(self->on_look, &period) != 0) {
        give_up(self);
        return;
    }
    self->started = true;
    self->answered_ns = xp_monotonic_ns();
    send_executable(self, &stats);
}

/* When all is loaded and the partials of the others are mapped. */
static void start_when_complete(ffnagent_t *self)
{
    if (!self->loaded || self->starter.started || self->finalizing)
        return;
    for (uint32_t i = 0; i < self->plan->instance_count; i++)
        if (self->wanted[i] & ~self->mapped[i])
            return;
    if (worker_start(&self->starter, self->base, start_job, start_done, self) != XP_OK)
        give_up(self);
}

static void load_done(void *context, xp_status_t status, const char *error)
{
    ffnagent_t *self = context;
    agent_loading_end(&self->loading);
    if (self->failed)
        return;
    if (self->finalizing) {
        participant_bye(self->participant, "stopped while loading");
        return;
    }
    if (status != XP_OK) {
        participant_fail(self->participant, error);
        return;
    }
    if (!used(self)) { /* nothing comes here: no stage, no scheduler */
        send_executable(self, &(ffn_cuda_stats_t){0});
        return;
    }
    if (observe_open(self->config->observe.folder, OBSERVE_FFN, self->configured->name,
                     self->config->observe.records, &self->observe) != XP_OK ||
        offer_weights(self) != XP_OK || make_stages(self) != XP_OK) {
        give_up(self);
        return;
    }
    for (uint32_t i = 0; i < self->plan->instance_count; i++)
        observe_name_instance(self->observe, i, self->plan->instances[i].id);
    self->loaded = true;
    start_when_complete(self);
}

/* ---- arenas -----------------------------------------------------------------------------------
 */

static void answer_attach(ffnagent_t *self, uint32_t instance, uint32_t rank, xp_status_t status,
                          uint64_t answered, bool open)
{
    xpw_Envelope envelope = {.which_body = xpw_Envelope_arena_attached_tag};
    xpw_ArenaAttached *attached = &envelope.body.arena_attached;
    attached->instance = instance;
    attached->rank = rank;
    attached->lease = self->leases[instance];
    attached->answered = answered;
    attached->open = open;
    if (status != XP_OK)
        snprintf(attached->error, sizeof(attached->error), "%.255s", xp_error_last()->text);
    participant_send(self->participant, &envelope, NULL, 0);
}

static void forget_arenas(ffnagent_t *self, uint32_t instance)
{
    for (uint32_t r = 0; r < FABRIC_MAX_RANKS; r++) {
        if (self->arenas[instance][r] >= 0)
            close(self->arenas[instance][r]);
        self->arenas[instance][r] = -1;
    }
}

static void attach_all(ffnagent_t *self, uint32_t instance, uint32_t rank, const int *arenas,
                       uint32_t ranks)
{
    uint64_t answered = 0;
    bool open = false;
    xp_status_t status =
        self->resume[instance]
            ? stage_ffn_resume(self->stage, instance, arenas, ranks, within(ATTACH_LIMIT_NS),
                               &answered, &open)
            : stage_ffn_attach(self->stage, instance, arenas, ranks, within(ATTACH_LIMIT_NS));
    if (status == XP_OK)
        self->attached |= (uint64_t)1 << instance;
    else
        xp_log_error("cannot attach the arenas of an Instance");
    answer_attach(self, instance, rank, status, answered, open);
}

static xp_status_t on_attach(ffnagent_t *self, const xpw_ArenaAttach *attach,
                             wire_descriptors_t *fds)
{
    if (!self->started || attach->instance >= self->plan->instance_count ||
        fds->count != (self->heap.heap ? 0 : 1) ||
        attach->rank >= fabric_plan_ranks(&self->plan->instances[attach->instance]))
        return xp_fail(XP_PEER, "ArenaAttach out of order or without its descriptor");
    uint32_t i = attach->instance, ranks = fabric_plan_ranks(&self->plan->instances[i]);
    if (attach->lease != self->leases[i])
        forget_arenas(self, i); /* of ranks that went before all had come */
    self->leases[i] = attach->lease;
    self->resume[i] = attach->resume;
    if (self->heap.heap) {
        attach_all(self, i, attach->rank, NULL, ranks);
        return XP_OK;
    }
    if (self->arenas[i][attach->rank] >= 0)
        return xp_fail(XP_PEER, "a second arena of the same rank");
    self->arenas[i][attach->rank] = wire_descriptors_take(fds, 0);
    for (uint32_t r = 0; r < ranks; r++)
        if (self->arenas[i][r] < 0)
            return XP_OK;
    attach_all(self, i, attach->rank, self->arenas[i], ranks);
    forget_arenas(self, i);
    return XP_OK;
}

static void answer_detach(ffnagent_t *self, uint32_t instance, const char *error)
{
    xpw_Envelope envelope = {.which_body = xpw_Envelope_arena_detached_tag};
    envelope.body.arena_detached.instance = instance;
    snprintf(envelope.body.arena_detached.error, sizeof(envelope.body.arena_detached.error),
             "%.255s", error);
    participant_send(self->participant, &envelope, NULL, 0);
}

/* Lets go of one Instance if nothing of it is in flight any more; asked again at the next look. */
static void try_detach(ffnagent_t *self, uint32_t instance)
{
    uint64_t bit = (uint64_t)1 << instance;
    xp_status_t status = self->attached & bit
                             ? stage_ffn_detach(self->stage, instance, within(DETACH_STEP_NS))
                             : XP_OK;
    if (status == XP_TIMEOUT && xp_monotonic_ns() < self->detach_until_ns[instance])
        return;
    if (status == XP_CLOSED && self->finalizing)
        status = XP_OK; /* the scheduler has left in order: nothing is in flight */
    self->attached &= ~bit;
    self->dropped &= ~bit;
    if (self->detaching & bit)
        answer_detach(self, instance,
                      status == XP_OK || status == XP_NOT_FOUND ? "" : xp_error_last()->text);
    self->detaching &= ~bit;
}

static void begin_detach(ffnagent_t *self, uint32_t instance)
{
    if (!((self->dropped | self->detaching) >> instance & 1))
        self->detach_until_ns[instance] = within(self->plan->submission_timeout_ns);
}

static xp_status_t on_detach(ffnagent_t *self, const xpw_ArenaDetach *detach)
{
    if (!self->started || detach->instance >= self->plan->instance_count)
        return xp_fail(XP_PEER, "ArenaDetach out of order");
    begin_detach(self, detach->instance);
    forget_arenas(self, detach->instance);
    self->detaching |= (uint64_t)1 << detach->instance;
    try_detach(self, detach->instance);
    return XP_OK;
}

/* ---- while it runs ----------------------------------------------------------------------------
 */

static void send_stats(ffnagent_t *self)
{
    stage_ffn_counters_t counters;
    ffn_cuda_stats_t runtime;
    if (stage_ffn_counters(self->stage, within(LOOK_LIMIT_NS), &counters) != XP_OK ||
        ffn_cuda_runtime_stats(self->runtime, &runtime) != XP_OK)
        return; /* the next look tells what is wrong */
    xpw_Envelope envelope = {.which_body = xpw_Envelope_plane_stats_tag};
    xpw_PlaneStats *stats = &envelope.body.plane_stats;
    *stats = (xpw_PlaneStats){.submissions = counters.invocations,
                              .invocations = counters.invocations,
                              .rows = counters.rows,
                              .abandoned = counters.abandoned,
                              .busy_ns = runtime.busy_ns,
                              .queue_ns = counters.queue_ns,
                              .lanes_peak = counters.lanes_peak,
                              .lanes_in_use = counters.lanes_in_use,
                              .resident = counters.resident,
                              .host_launches = runtime.host_launches};
    stats->instance_invocations_count = stats->instance_rows_count =
        (pb_size_t)self->plan->instance_count;
    for (uint32_t i = 0; i < self->plan->instance_count; i++)
        if (stage_members(&self->plan->instances[i]) & 1u << self->index)
            (void)stage_ffn_instance_counters(self->stage, i, within(LOOK_LIMIT_NS),
                                              &stats->instance_invocations[i],
                                              &stats->instance_rows[i]);
    participant_send(self->participant, &envelope, NULL, 0);
    for (uint32_t w = 0; w < self->plan->weights_count; w++) {
        ffn_usage_t usage;
        if (ffn_cuda_runtime_model_bytes(self->runtime, w) &&
            ffn_cuda_runtime_usage(self->runtime, w, &usage) == XP_OK)
            agent_usage_send(&self->usage, self->participant, w, &usage);
    }
}

static void drain_records(ffnagent_t *self)
{
    static ffn_cuda_record_t records[RECORDS_AT_ONCE];
    uint64_t skipped = 0;
    if (!self->observe)
        return;
    uint32_t count = ffn_cuda_runtime_records(self->runtime, records, RECORDS_AT_ONCE, &skipped);
    for (uint32_t i = 0; i < count; i++) {
        const ffn_cuda_record_t *one = &records[i];
        observe_record_t record = {.end_ns = one->end_ns,
                                   .duration_ns = one->duration_ns,
                                   .sequence = one->ticket,
                                   .layer = one->layer,
                                   .rows = one->rows,
                                   .capacity = one->capacity,
                                   .instance = one->instance,
                                   .rank = one->rank,
                                   .lane = one->lane,
                                   .graph_template = one->graph_template,
                                   .step = one->kind};
        observe_write(self->observe, &record);
    }
}

static void end_in_order(ffnagent_t *self)
{
    event_del(self->on_look);
    drain_records(self);
    if (ffn_cuda_runtime_stop(self->runtime, within(STOP_LIMIT_NS)) != XP_OK)
        give_up(self);
    else
        participant_bye(self->participant, "the scheduler was shut down");
}

static void on_look(evutil_socket_t fd, short events, void *context)
{
    ffnagent_t *self = context;
    uint64_t dropped = 0, now = xp_monotonic_ns();
    xp_status_t status = ffn_cuda_runtime_health(self->runtime);
    if (status == XP_OK)
        status = stage_ffn_look(self->stage, within(LOOK_LIMIT_NS), &dropped);
    else if (status != XP_FATAL)
        status = xp_fail_context(XP_FATAL, "FFN execution");
    if (status == XP_TIMEOUT && now - self->answered_ns < SILENCE_LIMIT_NS)
        return;
    if (status == XP_CLOSED && self->finalizing) {
        end_in_order(self);
        return;
    }
    if (status != XP_OK) {
        event_del(self->on_look);
        give_up(self);
        return;
    }
    self->answered_ns = now;
    dropped &= self->attached;
    for (uint32_t i = 0; i < self->plan->instance_count; i++) {
        uint64_t bit = (uint64_t)1 << i;
        if (dropped & bit) {
            xp_log_warn(
                "model %s: its arenas are closed or hold nonsense; taken from the scheduler",
                self->plan->instances[i].id);
            begin_detach(self, i);
            self->dropped |= bit;
        }
        if ((self->dropped | self->detaching) & bit)
            try_detach(self, i);
    }
    drain_records(self);
    if (now - self->stats_ns >= STATS_PERIOD_NS) {
        self->stats_ns = now;
        send_stats(self);
    }
}

/* ---- messages ---------------------------------------------------------------------------------
 */

static xp_status_t on_plane(ffnagent_t *self, const xpw_DevicePlane *plane, wire_descriptors_t *fds)
{
    if (self->life_fd >= 0 || fds->count != 1)
        return xp_fail(XP_PEER, "DevicePlane out of order");
    self->life_fd = wire_descriptors_take(fds, 0);
    self->life_index = plane->life_index;
    self->keep = plane->keep;
    return XP_OK;
}

static xp_status_t send_joined(ffnagent_t *self)
{
    xpw_Envelope answer = {.which_body = xpw_Envelope_joined_tag};
    answer.body.joined.generation = self->plan->generation;
    return participant_send(self->participant, &answer, NULL, 0);
}

static void heap_joined(void *context, xp_status_t status, const char *error)
{
    ffnagent_t *self = context;
    if (status != XP_OK)
        participant_fail(self->participant, error);
    else if (send_joined(self) != XP_OK)
        give_up(self);
}

static xp_status_t on_join(ffnagent_t *self, const xpw_Join *join, wire_descriptors_t *fds)
{
    if (self->plan || self->life_fd < 0)
        return xp_fail(XP_PEER, "Join out of order");
    XP_TRY(agent_join(join, fds, &self->plan, NULL));
    if (!fabric_provider_heap(self->plan->provider))
        return send_joined(self);
    XP_TRY(open_device(self)); /* with or without weights: all PEs join */
    self->heap = (agent_heap_t){.device = &self->device,
                                .pe = join->pe,
                                .base = self->base,
                                .done = heap_joined,
                                .context = self};
    return agent_heap_begin(&self->heap, self->config, self->plan, self->participant);
}

static xp_status_t on_prepare(ffnagent_t *self, const xpw_Prepare *prepare)
{
    if (!self->plan || self->prepared)
        return xp_fail(XP_PEER, "Prepare out of order");
    self->prepared = true;
    self->memory_bytes = prepare->memory_bytes;
    XP_TRY(agent_loading_begin(&self->loading, self->participant));
    return worker_start(&self->loader, self->base, load_job, load_done, self);
}

static xp_status_t on_partials(ffnagent_t *self, const xpw_StageGrant *grant,
                               wire_descriptors_t *fds)
{
    if (!self->loaded || grant->kind != xpw_StageKind_STAGE_PARTIALS || fds->count != 1 ||
        grant->instance >= self->plan->instance_count || grant->ffn >= self->plan->ffn_count)
        return xp_fail(XP_PEER, "StageGrant out of order");
    XP_TRY(stage_ffn_import_partials(self->stage, grant->instance, grant->ffn, fds->fds[0]));
    self->mapped[grant->instance] |= 1u << grant->ffn;
    start_when_complete(self);
    return XP_OK;
}

static void on_message(void *context, const xpw_Envelope *envelope, wire_descriptors_t *fds)
{
    ffnagent_t *self = context;
    xp_status_t status = XP_OK;
    switch (envelope->which_body) {
    case xpw_Envelope_device_plane_tag:
        status = on_plane(self, &envelope->body.device_plane, fds);
        break;
    case xpw_Envelope_join_tag:
        status = on_join(self, &envelope->body.join, fds);
        break;
    case xpw_Envelope_kept_weights_tag:
        status = on_kept(self, &envelope->body.kept_weights, fds);
        break;
    case xpw_Envelope_kept_stage_tag:
        status = on_kept_stage(self, &envelope->body.kept_stage, fds);
        break;
    case xpw_Envelope_fabric_id_tag:
        status = agent_heap_on_id(&self->heap, &envelope->body.fabric_id);
        break;
    case xpw_Envelope_prepare_tag:
        status = on_prepare(self, &envelope->body.prepare);
        break;
    case xpw_Envelope_stage_grant_tag:
        status = on_partials(self, &envelope->body.stage_grant, fds);
        break;
    case xpw_Envelope_arena_attach_tag:
        status = on_attach(self, &envelope->body.arena_attach, fds);
        break;
    case xpw_Envelope_arena_detach_tag:
        status = on_detach(self, &envelope->body.arena_detach);
        break;
    default:
        xp_log_warn("ignored %s", wire_body_name(envelope->which_body));
    }
    if (status != XP_OK)
        give_up(self);
}

static void on_stop(void *context, xpw_StopPhase phase, uint32_t seconds)
{
    ffnagent_t *self = context;
    if (phase != xpw_StopPhase_STOP_FINALIZE || self->finalizing)
        return;
    self->finalizing = true;
    if (self->started) {
        if (stage_ffn_shutdown(self->stage) != XP_OK) /* the next looks see it leave */
            give_up(self);
    } else {
        participant_bye(self->participant, "nothing runs here");
    }
}

static void on_failed(void *context)
{
    ffnagent_t *self = context;
    self->failed = true;
    if (!self->started)
        return;
    /* Who waits for this device must not wait any longer, nor who waits in an arena, unless it is
     * kept. */
    (void)stage_ffn_fail(self->stage, self->keep);
    ffn_cuda_runtime_fail(self->runtime, XP_FATAL, "the control channel reported a failure");
}

/* Workers that still load or start hold the device: nothing can be freed under them. What the
 * process has on the GPU goes with it. */
static void leave_at_once(ffnagent_t *self, int exit_code)
{
    if (self->stage && self->started)
        (void)stage_ffn_stop(self->stage, within(FAIL_LIMIT_NS));
    agent_heap_end(&self->heap, exit_code);
    _exit(exit_code);
}

static void free_all(ffnagent_t *self, int exit_code)
{
    if (self->device.driver)
        (void)cuda_device_use(&self->device);
    stage_ffn_destroy(self->stage);
    ffn_cuda_runtime_destroy(self->runtime);
    transport_cuda_life_close(&self->life);
    agent_heap_end(&self->heap, exit_code);
    cuda_device_close(&self->device);
    observe_close(self->observe);
    if (self->life_fd >= 0)
        close(self->life_fd);
    for (uint32_t i = 0; i < FABRIC_MAX_INSTANCES; i++)
        forget_arenas(self, i);
    for (uint32_t w = 0; self->kept && w < FABRIC_MAX_INSTANCES; w++)
        forget_kept(&self->kept[w]);
    forget_kept_stages(self);
    free(self->kept);
    free(self->plan);
}

int ffnagent_cuda_run(const config_t *config, const char *device)
{
    participant_bind_to_parent();
    signal(SIGPIPE, SIG_IGN);
    xp_log_identify("ffnagent", device);
    int exit_code = 1;
    ffnagent_t *self = calloc(1, sizeof(*self));
    if (!self)
        return 1;
    participant_handlers_t handlers = {
        .message = on_message, .stop = on_stop, .failed = on_failed, .context = self};
    self->loader.event_fd = self->starter.event_fd = self->loading.refused_fd = -1;
    self->config = config;
    self->life_fd = -1;
    memset(self->arenas, 0xff, sizeof(self->arenas)); /* -1: none */
    memset(self->kept_stages, 0xff, sizeof(self->kept_stages));
    self->kept = calloc(FABRIC_MAX_INSTANCES, sizeof(*self->kept));
    self->configured = config_device_find(config, true, device, &self->index);
    XP_ASSERT(self->configured);
    if (!self->kept) {
        xp_log_err("no memory for kept weights");
        goto done;
    }
    if (environment_agent(config, self->configured, true, &self->ordinal) != XP_OK) {
        xp_log_error("cannot start");
        goto done;
    }
    self->base = event_base_new();
    if (self->base)
        self->on_look = event_new(self->base, -1, EV_PERSIST, on_look, self);
    if (!self->base || !self->on_look || agent_loading_init(&self->loading, self->base) != XP_OK ||
        participant_create(self->base, config, xpw_Role_ROLE_FFNAGENT, device, 0, "cuda", &handlers,
                           &self->participant) != XP_OK) {
        exit_code = participant_start_error();
        goto done;
    }
    event_base_dispatch(self->base);
    exit_code = participant_exit_code(self->participant);
    if (exit_code || !worker_join(&self->heap.worker, 0) || !worker_join(&self->loader, 0) ||
        !worker_join(&self->starter, 0))
        leave_at_once(self, exit_code);
    worker_fini(&self->loader);
    worker_fini(&self->starter);
done:
    participant_destroy(self->participant);
    free_all(self, exit_code);
    agent_loading_fini(&self->loading);
    if (self->on_look)
        event_free(self->on_look);
    if (self->base)
        event_base_free(self->base);
    free(self);
    return exit_code;
}
