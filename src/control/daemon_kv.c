/* SPDX-License-Identifier: MIT */
/*
 * Owns the KV control channel, its bells and the market, and watches the process of every rank by a
 * pidfd of its own: bytes return when the process has ended, not when its socket has closed. Event
 * loop thread only.
 */
#include "control/daemon_kv.h"

#include <poll.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/failpoint.h"
#include "base/log.h"
#include "base/memfd.h"
#include "control/daemon_kv_private.h"
#include "control/planner_kv.h"

/* A grant that its Instance was just given is not taken back for so long; an engine uses it in the
 * step in which it sees it. */
#define HOLD_NS (250 * XP_NS_PER_MS)

static void work(daemon_kv_t *kv);

static uint32_t group_of(const daemon_kv_t *kv, uint32_t partition)
{
    return kv->market.plan.partitions[partition].group;
}

static void describe(const daemon_kv_t *kv, uint32_t group, char *out, size_t size)
{
    const kv_group_entry_t *plan = &kv->market.plan.groups[group];
    const config_model_t *model = &kv->daemon->config->models[plan->instance];
    if (model->attention_dp > 1)
        snprintf(out, size, "model %s, attention DP rank %u", model->id, plan->dp_rank);
    else
        snprintf(out, size, "model %s", model->id);
}

/* ---- life of the processes --------------------------------------------------------------------
 */

static void forget_process(daemon_kv_process_t *process)
{
    if (process->on_end)
        event_free(process->on_end);
    if (process->pidfd >= 0)
        close(process->pidfd);
    process->on_end = NULL;
    process->pidfd = -1;
    process->held = false;
}

/* It mapped memory and has not said that it gave all of it back. */
static bool may_hold(const daemon_kv_t *kv, uint32_t partition)
{
    const kv_partition_entry_t *entry = &kv->channel->partitions[partition];
    return PROTOCOL_LOAD_ACQUIRE(&entry->state) == KV_PARTITION_OPEN;
}

/* The group's bytes return once none of its processes is left. */
static void end_group_if_alone(daemon_kv_t *kv, uint32_t group)
{
    const kv_group_entry_t *plan = &kv->market.plan.groups[group];
    for (uint32_t m = 0; m < plan->partition_count; m++)
        if (kv->processes[plan->first_partition + m].held)
            return;
    kv_market_end(&kv->market, group);
}

static void process_ended(daemon_kv_t *kv, uint32_t partition)
{
    forget_process(&kv->processes[partition]);
    kv_market_leave(&kv->market, group_of(kv, partition));
    end_group_if_alone(kv, group_of(kv, partition));
}

static void on_process_end(evutil_socket_t fd, short events, void *context)
{
    daemon_kv_process_t *process = context;
    daemon_kv_t *kv = process->kv;
    process_ended(kv, process->partition);
    work(kv);
    event_active(kv->daemon->on_tick, EV_TIMEOUT, 0); /* its successor may wait */
}

static bool has_ended(const daemon_kv_process_t *process)
{
    struct pollfd state = {.fd = process->pidfd, .events = POLLIN};
    return poll(&state, 1, 0) == 1;
}

bool daemon_kv_vacant(daemon_t *daemon, uint32_t model)
{
    daemon_kv_t *kv = daemon->kv;
    bool vacant = true;
    for (uint32_t r = 0; r < daemon->planned->models[model].ranks; r++) {
        uint32_t partition = planner_kv_partition(daemon->planned, model, r);
        const daemon_kv_process_t *process = &kv->processes[partition];
        if (!process->held || kv->market.groups[group_of(kv, partition)].state != KV_MARKET_LEAVING)
            continue;
        if (has_ended(process) || !may_hold(kv, partition))
            process_ended(kv, partition); /* its event is on the way, if any */
        else
            vacant = false;
    }
    return vacant;
}

static xp_status_t hold_process(daemon_kv_process_t *process, pid_t pid)
{
    forget_process(process);
    process->pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (process->pidfd < 0)
        return xp_fail_errno(XP_IO,
                             "process %d has no pidfd, so nobody would know when its KV memory is "
                             "free again",
                             (int)pid);
    process->on_end =
        event_new(process->kv->daemon->base, process->pidfd, EV_READ, on_process_end, process);
    if (!process->on_end || event_add(process->on_end, NULL) != 0) {
        forget_process(process);
        return xp_fail(XP_NO_MEMORY, "no memory to watch process %d", (int)pid);
    }
    process->held = true;
    return XP_OK;
}

xp_status_t daemon_kv_admit(daemon_t *daemon, uint32_t model, uint32_t rank, pid_t pid,
                            xpw_Admitted *admitted_out, int fds_out[KV_DESCRIPTORS])
{
    daemon_kv_t *kv = daemon->kv;
    uint32_t partition = planner_kv_partition(daemon->planned, model, rank);
    uint32_t group = group_of(kv, partition);
    XP_TRY(hold_process(&kv->processes[partition], pid));
    if (kv->market.groups[group].state == KV_MARKET_ABSENT)
        kv_market_start(&kv->market, group, 0);
    kv_bell_clear(kv->bells[partition]);
    admitted_out->kv_partition = partition;
    fds_out[0] = kv->channel_fd;
    fds_out[1] = kv->bell;
    fds_out[2] = kv->bells[partition];
    xp_failpoint("kv.daemon.admitted");
    work(kv);
    return XP_OK;
}

void daemon_kv_leave(daemon_t *daemon, uint32_t model, uint32_t rank, bool gone)
{
    daemon_kv_t *kv = daemon->kv;
    if (!kv)
        return;
    uint32_t partition = planner_kv_partition(daemon->planned, model, rank);
    if (!kv->processes[partition].held)
        return;
    kv_market_leave(&kv->market, group_of(kv, partition));
    if (has_ended(&kv->processes[partition]) || (gone && !may_hold(kv, partition)))
        process_ended(kv, partition);
    work(kv);
}

/* ---- stepping ---------------------------------------------------------------------------------
 */

static void ring(daemon_kv_t *kv, uint32_t group)
{
    const kv_group_entry_t *plan = &kv->market.plan.groups[group];
    for (uint32_t m = 0; m < plan->partition_count; m++)
        kv_bell_ring(kv->bells[plan->first_partition + m]);
}

static void log_commands(const daemon_kv_t *kv)
{
    const kv_policy_decisions_t *decisions = &kv->market.decisions;
    for (uint32_t c = 0; c < decisions->command_count; c++) {
        const kv_policy_command_t *command = &decisions->commands[c];
        char who[160];
        describe(kv, command->group, who, sizeof(who));
        xp_log_debug("KV: %s to %u bundles (%s)", who, command->bundles,
                     kv_policy_reason_name(command->reason));
    }
}

static void log_pools(const daemon_kv_t *kv)
{
    for (uint32_t p = 0; p < kv->market.plan.pool_count; p++) {
        char is[32], planned[32];
        if (kv->step.formed[p])
            xp_log_info("KV: the pool of %s is %s (planned %s), by the memory that was free when "
                        "graphs were captured",
                        kv->daemon->config->atn[p].name,
                        planner_human(kv->market.formed_bytes[p], is),
                        planner_human(kv->market.plan.pools[p].bytes, planned));
    }
}

static void set_timer(daemon_kv_t *kv, uint64_t now_ns, uint64_t next_ns)
{
    event_del(kv->on_time);
    if (next_ns == UINT64_MAX)
        return;
    uint64_t wait_us = next_ns > now_ns ? (next_ns - now_ns) / XP_NS_PER_US + 1 : 1;
    struct timeval wait = {.tv_sec = (time_t)(wait_us / 1000000),
                           .tv_usec = (suseconds_t)(wait_us % 1000000)};
    event_add(kv->on_time, &wait);
}

static void take_faults(daemon_kv_t *kv, const kv_market_step_t *step)
{
    bool failed[CONFIG_MAX_MODELS] = {false};
    const char *texts[CONFIG_MAX_MODELS] = {NULL};
    for (uint32_t g = 0; g < kv->market.plan.group_count; g++) {
        if (step->faults[g] == KV_FAULT_NONE)
            continue;
        char who[160];
        describe(kv, g, who, sizeof(who));
        if (step->faults[g] == KV_FAULT_LATE) {
            xp_log_warn("KV: %s: %s (%g s)", who, step->fault_text[g],
                        kv->daemon->config->deadlines.kv);
            continue;
        }
        failed[kv->market.plan.groups[g].instance] = true;
        texts[kv->market.plan.groups[g].instance] = step->fault_text[g];
    }
    for (uint32_t m = 0; m < kv->daemon->config->model_count; m++)
        if (failed[m])
            daemon_instance_kill(&kv->daemon->instances[m], texts[m]);
}

static void work(daemon_kv_t *kv)
{
    if (kv->working) { /* a fault killed an Instance, whose end comes back here */
        kv->again = true;
        return;
    }
    kv->working = true;
    /* Each round is caused by the death of an Instance, so there are few. */
    for (uint32_t round = 0; round <= CONFIG_MAX_MODELS; round++) {
        uint64_t now_ns = xp_monotonic_ns();
        kv->again = false;
        kv->market.paused = kv->daemon->reforming;
        kv_market_step(&kv->market, now_ns, &kv->step);
        xp_failpoint("kv.daemon.commanded");
        for (uint32_t g = 0; g < kv->market.plan.group_count; g++)
            if (kv->step.ring[g])
                ring(kv, g);
        log_commands(kv);
        log_pools(kv);
        set_timer(kv, now_ns, kv->step.next_ns);
        take_faults(kv, &kv->step);
        if (!kv->again)
            break;
    }
    kv->working = false;
}

static void on_bell(evutil_socket_t fd, short events, void *context)
{
    daemon_kv_t *kv = context;
    kv_bell_clear(kv->bell);
    xp_failpoint("kv.daemon.rung");
    work(kv);
}

static void on_time(evutil_socket_t fd, short events, void *context)
{
    work(context);
}

/* ---- start and end ----------------------------------------------------------------------------
 */

static xp_status_t make_bells(daemon_kv_t *kv)
{
    XP_TRY(kv_bell_create(&kv->bell));
    for (uint32_t p = 0; p < kv->channel->partition_count; p++)
        XP_TRY(kv_bell_create(&kv->bells[p]));
    return XP_OK;
}

/* Devices of which the plan is an estimate: an engine's context, graphs and activations are its
 * own. What utilisation leaves of a device stays free. */
static void observe_pools(const config_t *config, const plan_result_t *planned,
                          const kv_group_plan_t *groups, uint32_t group_count,
                          kv_market_settings_t *settings)
{
    settings->observe = planner_kv_ranges(config, planned);
    for (uint32_t a = 0; a < config->atn_count; a++) {
        double memory = (double)planned->atn[a].budget_bytes / config->atn_memory_utilization;
        settings->kept_bytes[a] = (uint64_t)memory - planned->atn[a].budget_bytes;
    }
    for (uint32_t g = 0; g < group_count; g++) {
        const plan_model_t *model = &planned->models[groups[g].instance];
        settings->rank_bytes[g] = model->attention_bytes + model->workspace_bytes +
                                  model->arena_bytes +
                                  KV_READY_BUNDLES_CUDA * groups[g].bundle_bytes;
    }
}

xp_status_t daemon_kv_start(daemon_t *daemon)
{
    const config_t *config = daemon->config;
    const plan_result_t *planned = daemon->planned;
    kv_group_plan_t groups[KV_MAX_GROUPS];
    uint64_t pool_bytes[KV_MAX_POOLS] = {0};
    uint32_t group_count;
    daemon_kv_t *kv = calloc(1, sizeof(*kv));
    if (!kv)
        return xp_fail(XP_NO_MEMORY, "no memory for the KV market");
    daemon->kv = kv;
    kv->daemon = daemon;
    kv->channel_fd = kv->bell = -1;
    for (uint32_t p = 0; p < KV_MAX_PARTITIONS; p++) {
        kv->bells[p] = -1;
        kv->processes[p] = (daemon_kv_process_t){.kv = kv, .partition = p, .pidfd = -1};
    }
    XP_TRY(planner_kv_groups(planned, config, groups, &group_count));
    for (uint32_t a = 0; a < config->atn_count; a++)
        pool_bytes[a] = planned->atn[a].kv_bytes;
    XP_TRY(kv_channel_create(planned->plan.generation, pool_bytes, config->atn_count, groups,
                             group_count, &kv->channel_fd, &kv->channel));
    XP_TRY(make_bells(kv));
    kv_market_settings_t settings = {
        .mode = config->scheduler.kv_policy == CONFIG_KV_STATIC    ? KV_POLICY_STATIC
                : config->scheduler.kv_policy == CONFIG_KV_ARRIVAL ? KV_POLICY_ARRIVAL
                                                                   : KV_POLICY_DEADLINE,
        /* A request that has waited half of its time in the queue gets its turn. */
        .patience_ns = (uint64_t)(config->deadlines.queue * (double)XP_NS_PER_S / 2),
        .hold_ns = HOLD_NS,
        .answer_ns = (uint64_t)(config->deadlines.kv * (double)XP_NS_PER_S),
    };
    if (planned->cuda)
        observe_pools(config, planned, groups, group_count, &settings);
    kv_market_init(&kv->market, kv->channel, &settings);
    XP_TRY(daemon_kv_records_start(kv));
    kv->on_bell = event_new(daemon->base, kv->bell, EV_READ | EV_PERSIST, on_bell, kv);
    kv->on_time = evtimer_new(daemon->base, on_time, kv);
    if (!kv->on_bell || !kv->on_time || event_add(kv->on_bell, NULL))
        return xp_fail(XP_NO_MEMORY, "no memory for the KV market's events");
    return XP_OK;
}

void daemon_kv_stop(daemon_t *daemon)
{
    daemon_kv_t *kv = daemon->kv;
    if (!kv)
        return;
    if (kv->on_bell)
        event_free(kv->on_bell);
    if (kv->on_time)
        event_free(kv->on_time);
    for (uint32_t p = 0; p < KV_MAX_PARTITIONS; p++) {
        forget_process(&kv->processes[p]);
        if (kv->bells[p] >= 0)
            close(kv->bells[p]);
    }
    if (kv->bell >= 0)
        close(kv->bell);
    kv_channel_unmap(kv->channel);
    if (kv->channel_fd >= 0)
        close(kv->channel_fd);
    daemon_kv_records_stop(kv);
    free(kv);
    daemon->kv = NULL;
}

/* ---- questions of `xpool kv` ------------------------------------------------------------------
 */

static xp_status_t set_model(daemon_kv_t *kv, uint32_t model, const xpw_KvAsk *ask)
{
    kv_market_size_t sizes[KV_MAX_GROUPS];
    uint32_t count = 0;
    for (uint32_t g = 0; g < kv->market.plan.group_count; g++) {
        const kv_group_entry_t *plan = &kv->market.plan.groups[g];
        if (plan->instance != model)
            continue;
        /* As they were set: what the channel says of the ceiling may be less. */
        uint32_t floor = kv->market.snapshot.groups[g].floor_wanted;
        uint32_t ceiling = kv->market.snapshot.groups[g].ceiling_bundles;
        uint32_t unit = plan->bundle_tokens;
        if (ask->has_floor)
            floor = (uint32_t)(((uint64_t)ask->floor_tokens + unit - 1) / unit);
        if (ask->has_ceiling)
            ceiling = (uint32_t)(((uint64_t)ask->ceiling_tokens + unit - 1) / unit);
        sizes[count++] = (kv_market_size_t){g, floor, ceiling};
    }
    return kv_market_set(&kv->market, sizes, count);
}

/* What holds now, of the first DP rank: rounded to bundles, cut by others' floors, and how far
 * memory has come. */
static void describe_set(const daemon_kv_t *kv, uint32_t model, char *text, size_t size)
{
    const kv_market_t *market = &kv->market;
    uint32_t g = 0;
    while (g < market->plan.group_count && market->plan.groups[g].instance != model)
        g++;
    if (g == market->plan.group_count)
        return;
    const kv_policy_group_t *group = &market->snapshot.groups[g];
    const uint64_t unit = market->plan.groups[g].bundle_tokens;
    const uint64_t most = kv_market_possible_bundles(market, g);
    const uint64_t floor = group->floor_wanted * unit, ceiling = group->ceiling_bundles * unit;
    const uint64_t backed = group->mapped_bundles * unit;
    size_t used =
        (size_t)snprintf(text, size, "model %s: floor %" PRIu64 ", ceiling %" PRIu64 " tokens",
                         kv->daemon->config->models[model].id, floor, ceiling);
    if (most * unit < ceiling && used < size)
        used += (size_t)snprintf(text + used, size - used,
                                 ", of which others' floors leave %" PRIu64, most * unit);
    if (backed < floor && used < size)
        snprintf(text + used, size - used, "; %" PRIu64 " of them have memory so far (xpool kv)",
                 backed);
}

static xp_status_t trim_models(daemon_kv_t *kv, const config_model_t *model, uint32_t *done_out)
{
    uint32_t done = 0;
    for (uint32_t g = 0; g < kv->market.plan.group_count; g++) {
        if (model && &kv->daemon->config->models[kv->market.plan.groups[g].instance] != model)
            continue;
        xp_status_t status = kv_market_trim(&kv->market, g);
        if (status != XP_OK && model)
            return status;
        done += status == XP_OK;
    }
    *done_out = done;
    return XP_OK;
}

static xp_status_t text_to_memfd(const char *text, size_t length, int *fd_out)
{
    int fd;
    void *to;
    XP_TRY(xp_memfd_create("xpool-kv-answer", length ? length : 1, &fd));
    xp_status_t status = xp_memfd_map(fd, length ? length : 1, &to);
    if (status != XP_OK) {
        close(fd);
        return status;
    }
    memcpy(to, text, length);
    xp_memfd_unmap(to);
    *fd_out = fd;
    return XP_OK;
}

static xp_status_t state_to_memfd(const daemon_t *daemon, int *fd_out, uint64_t *bytes_out)
{
    json_t *json = daemon_kv_json(daemon);
    char *text = json ? json_dumps(json, JSON_INDENT(1)) : NULL;
    json_decref(json);
    if (!text)
        return xp_fail(XP_NO_MEMORY, "no memory for the answer");
    xp_status_t status = text_to_memfd(text, strlen(text), fd_out);
    *bytes_out = strlen(text);
    free(text);
    return status;
}

static xp_status_t answer(daemon_kv_t *kv, const xpw_KvAsk *ask, xpw_KvAnswer *answer_out,
                          int *fd_out)
{
    const config_model_t *model = config_model_find(kv->daemon->config, ask->model);
    uint32_t trimmed;
    if (ask->model[0] && !model) {
        char known[384] = "";
        for (uint32_t m = 0; m < kv->daemon->config->model_count; m++) {
            size_t used = strlen(known);
            snprintf(known + used, sizeof(known) - used, "%s%s", m ? ", " : "",
                     kv->daemon->config->models[m].id);
        }
        return xp_fail(XP_NOT_FOUND, "there is no model %s; there are %s", ask->model, known);
    }
    switch (ask->verb) {
    case xpw_KvVerb_KV_SHOW:
        return state_to_memfd(kv->daemon, fd_out, &answer_out->bytes);
    case xpw_KvVerb_KV_RECORD:
        return daemon_kv_records_write(kv, fd_out, &answer_out->bytes);
    case xpw_KvVerb_KV_SET:
        if (!model)
            return xp_fail(XP_INVALID, "kv set needs a model");
        XP_TRY(set_model(kv, (uint32_t)(model - kv->daemon->config->models), ask));
        describe_set(kv, (uint32_t)(model - kv->daemon->config->models), answer_out->text,
                     sizeof(answer_out->text));
        return XP_OK;
    case xpw_KvVerb_KV_TRIM:
        XP_TRY(trim_models(kv, model, &trimmed));
        snprintf(answer_out->text, sizeof(answer_out->text), "%u KV Capacity Group(s) trimmed",
                 trimmed);
        return XP_OK;
    case xpw_KvVerb_KV_POLICY:
        if (ask->order != xpw_KvOrder_KV_ORDER_DEADLINE &&
            ask->order != xpw_KvOrder_KV_ORDER_ARRIVAL)
            return xp_fail(XP_INVALID, "no such order of demands");
        XP_TRY(kv_market_order(&kv->market, ask->order == xpw_KvOrder_KV_ORDER_ARRIVAL
                                                ? KV_POLICY_ARRIVAL
                                                : KV_POLICY_DEADLINE));
        snprintf(answer_out->text, sizeof(answer_out->text), "demands are met in order of %s",
                 ask->order == xpw_KvOrder_KV_ORDER_ARRIVAL ? "arrival" : "deadlines");
        return XP_OK;
    default:
        return xp_fail(XP_INVALID, "no such question about the KV Caches");
    }
}

void daemon_kv_look(daemon_t *daemon)
{
    work(daemon->kv);
}

void daemon_kv_ask(daemon_participant_t *client, const xpw_KvAsk *ask)
{
    daemon_kv_t *kv = client->daemon->kv;
    work(kv); /* usage alone rings no bell */
    xpw_Envelope envelope = {.which_body = xpw_Envelope_kv_answer_tag};
    xpw_KvAnswer *out = &envelope.body.kv_answer;
    int fd = -1;
    out->ok = answer(kv, ask, out, &fd) == XP_OK;
    if (!out->ok)
        snprintf(out->text, sizeof(out->text), "%.500s", xp_error_last()->text);
    wire_channel_send(client->channel, &envelope, &fd, fd >= 0 ? 1 : 0);
    if (fd >= 0)
        close(fd);
    work(kv);
}
