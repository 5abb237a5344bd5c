/* SPDX-License-Identifier: MIT */
/*
 * The daemon as seen from outside: /health, /ready, /v1/state, /metrics and a small live page; and
 * its own look at every Instance's /health. Runs on the daemon's event loop thread.
 */
#include <event2/buffer.h>
#include <jansson.h>
#include <netinet/in.h>
#include <arpa/inet.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "config/address.h"
#include "control/daemon_kv.h"
#include "control/daemon_private.h"

#define STATUS_MAX_BODY    1024
#define STATUS_MAX_HEADERS 16384
#define STATUS_TIMEOUT_S   10
/* The native engine's health is one cheap answer of its event loop. Another engine's may be a real
 * token (SGLang's is, unless it is told otherwise, as `xpool serve` does): once it has answered it
 * is asked seldom, and given time. */
#define PROBE_TIMEOUT_S          2
#define PROBE_INTERVAL_NS        (1000 * XP_NS_PER_MS)
#define LIBRARY_PROBE_TIMEOUT_S  20
#define LIBRARY_PROBE_HEALTHY_NS (5 * XP_NS_PER_S)

/* ---- helpers ----------------------------------------------------------------------------------
 */

static void reply(struct evhttp_request *request, int code, const char *type, const char *body,
                  size_t length)
{
    struct evbuffer *buffer = evbuffer_new();
    if (!buffer) {
        evhttp_send_error(request, 500, NULL);
        return;
    }
    evbuffer_add(buffer, body, length);
    struct evkeyvalq *headers = evhttp_request_get_output_headers(request);
    evhttp_add_header(headers, "Content-Type", type);
    evhttp_add_header(headers, "Cache-Control", "no-store");
    evhttp_send_reply(request, code, NULL, buffer);
    evbuffer_free(buffer);
}

static void reply_json(struct evhttp_request *request, int code, json_t *value)
{
    char *text = value ? json_dumps(value, JSON_INDENT(1) | JSON_SORT_KEYS) : NULL;
    json_decref(value);
    if (!text) {
        evhttp_send_error(request, 500, NULL);
        return;
    }
    reply(request, code, "application/json", text, strlen(text));
    free(text);
}

/* Texts that a process has told us, and that a buffer's end may have cut inside a character. */
static json_t *text_json(const char *text)
{
    json_t *json = json_string(text);
    char plain[1024];
    if (json)
        return json;
    snprintf(plain, sizeof(plain), "%s", text);
    for (char *at = plain; *at; at++)
        if ((unsigned char)*at >= 0x80)
            *at = '?';
    return json_string(plain);
}

static bool only_get(struct evhttp_request *request)
{
    enum evhttp_cmd_type command = evhttp_request_get_command(request);
    if (command == EVHTTP_REQ_GET || command == EVHTTP_REQ_HEAD)
        return true;
    evhttp_add_header(evhttp_request_get_output_headers(request), "Allow", "GET, HEAD");
    reply_json(request, 405, json_pack("{s:s}", "error", "this path answers GET only"));
    return false;
}

/* ---- JSON of the state -------------------------------------------------------------------------
 */

static json_t *verdict_json(const daemon_t *daemon, const daemon_verdict_t *verdict)
{
    json_t *reasons = json_array();
    for (uint32_t i = 0; i < verdict->reason_count; i++)
        json_array_append_new(reasons, text_json(verdict->reasons[i]));
    return json_pack("{s:b, s:b, s:b, s:s, s:o}", "fabric_executable", verdict->fabric_executable,
                     "system_ready", verdict->system_ready, "serving_healthy",
                     verdict->serving_healthy, "state", daemon_state_name(daemon->state), "reasons",
                     reasons);
}

static json_t *failure_json(const xpw_Failure *failure)
{
    if (!failure->generation)
        return json_null();
    return json_pack("{s:I, s:o, s:o, s:s}", "generation", (json_int_t)failure->generation, "who",
                     text_json(failure->who), "what", text_json(failure->what), "when",
                     failure->when);
}

static json_t *counters_json(const daemon_t *daemon, uint32_t pe)
{
    fabric_pe_counters_t c;
    daemon_pe_counters(daemon, pe, &c);
    return json_pack("{s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I}", "submissions",
                     (json_int_t)c.submissions, "invocations", (json_int_t)c.invocations, "rows",
                     (json_int_t)c.rows, "eager", (json_int_t)c.eager, "long",
                     (json_int_t)c.longform, "abandoned", (json_int_t)c.abandoned, "busy_ns",
                     (json_int_t)c.busy_ns, "queue_ns", (json_int_t)c.queue_ns, "sleeps",
                     (json_int_t)c.sleeps, "spins", (json_int_t)c.spins, "lanes_leased",
                     (json_int_t)c.lanes_leased, "lanes_peak", (json_int_t)c.lanes_peak,
                     "lanes_in_use", (json_int_t)c.lanes_in_use);
}

/* The first model that has this weight set. */
static const char *weights_name(const daemon_t *daemon, uint32_t weights)
{
    for (uint32_t i = 0; i < daemon->config->model_count; i++)
        if (daemon->planned->models[i].weights == weights)
            return daemon->config->models[i].id;
    return "";
}

/* What routers chose, one entry a weight set with experts. */
static json_t *experts_json(const daemon_t *daemon, const daemon_participant_t *agent)
{
    json_t *all = json_array();
    for (uint32_t w = 0; w < FABRIC_MAX_INSTANCES; w++) {
        const xpw_ExpertUsage *one = &agent->usage[w];
        if (one->places == 0)
            continue;
        json_t *bins = json_array();
        for (uint32_t b = 0; b < one->bins_count; b++)
            json_array_append_new(bins, json_integer((json_int_t)one->bins[b]));
        json_array_append_new(
            all,
            json_pack("{s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:o}", "model",
                      weights_name(daemon, w), "executions", (json_int_t)one->executions, "rows",
                      (json_int_t)one->rows, "experts_read", (json_int_t)one->experts, "places",
                      (json_int_t)one->places, "chosen", (json_int_t)one->chosen, "least",
                      (json_int_t)one->least, "most", (json_int_t)one->most, "bins", bins));
    }
    return all;
}

static json_t *agent_json(const daemon_t *daemon, const plan_device_t *device,
                          const daemon_participant_t *agent, uint32_t pe)
{
    json_t *json = json_pack(
        "{s:s, s:s, s:i, s:i, s:b, s:I, s:I, s:I, s:I, s:I, s:o}", "device", device->device->name,
        "role", device->ffn_role ? "ffn" : "attention", "pe", (int)pe, "threads",
        (int)device->device->threads, "registered", agent != NULL, "budget_bytes",
        (json_int_t)device->budget_bytes, "planned_weight_bytes", (json_int_t)device->weight_bytes,
        "planned_workspace_bytes", (json_int_t)device->workspace_bytes, "planned_kv_bytes",
        (json_int_t)device->kv_bytes, "planned_arena_bytes", (json_int_t)device->arena_bytes,
        "counters", counters_json(daemon, pe));
    if (agent) {
        json_object_set_new(json, "pid", json_integer(agent->pid));
        json_object_set_new(json, "joined", json_boolean(agent->joined));
        json_object_set_new(json, "kernels", json_string(agent->kernels));
        if (device->ffn_role) {
            json_object_set_new(json, "executable", json_boolean(agent->executable));
            json_object_set_new(json, "loaded_bytes",
                                json_integer((json_int_t)agent->progress_done));
            json_object_set_new(json, "weight_bytes",
                                json_integer((json_int_t)agent->execution.weight_bytes));
            json_object_set_new(json, "workspace_bytes",
                                json_integer((json_int_t)agent->execution.workspace_bytes));
            json_object_set_new(json, "signatures", json_integer(agent->execution.signatures));
            json_object_set_new(json, "templates", json_integer(agent->execution.templates));
            json_object_set_new(json, "read_bytes",
                                json_integer((json_int_t)agent->execution.read_bytes));
            json_object_set_new(json, "adopted_bytes",
                                json_integer((json_int_t)agent->execution.adopted_bytes));
            json_object_set_new(json, "experts", experts_json(daemon, agent));
        }
    }
    return json;
}

static uint64_t held_weight_bytes(const daemon_t *daemon, uint32_t weights)
{
    uint64_t bytes = 0;
    for (uint32_t f = 0; f < daemon->config->ffn_count; f++)
        if (daemon->ffn[f] && weights < daemon->ffn[f]->execution.weights_count)
            bytes += daemon->ffn[f]->execution.weights[weights];
    return bytes;
}

static json_t *rank_json(const daemon_t *daemon, const daemon_instance_t *instance, uint32_t index)
{
    static const char *const states[] = {
        [RANK_ABSENT] = "absent",          [RANK_HELLO] = "registering",
        [RANK_ADMITTED] = "loading",       [RANK_OFFERED] = "waiting for its AtnAgent",
        [RANK_ATTACHED] = "attached",      [RANK_INITIALIZING] = "initialising",
        [RANK_INITIALIZED] = "initialised"};
    const daemon_rank_t *rank = &instance->ranks[index];
    uint32_t device = daemon->planned->models[instance->index].rank_atn[index];
    json_t *json = json_pack("{s:i, s:s, s:s}", "rank", (int)index, "attention_device",
                             daemon->config->atn[device].name, "state", states[rank->state]);
    if (rank->participant) {
        json_object_set_new(json, "pid", json_integer(rank->participant->pid));
        json_object_set_new(json, "attention_weight_bytes",
                            json_integer((json_int_t)rank->weight_bytes));
        json_object_set_new(json, "kv_bytes", json_integer((json_int_t)rank->kv_bytes));
    }
    return json;
}

static json_t *model_json(const daemon_t *daemon, uint32_t index)
{
    const daemon_instance_t *instance = &daemon->instances[index];
    const plan_model_t *planned = &daemon->planned->models[index];
    const plan_weights_t *weights = &daemon->planned->weights[planned->weights];
    const config_model_t *configured = &daemon->config->models[index];
    const daemon_participant_t *first = instance->ranks[0].participant;
    const xpw_InstanceStats *s = &instance->stats;
    uint64_t invocations, rows;
    daemon_instance_counters(daemon, index, &invocations, &rows);
    json_t *group = json_array();
    for (uint32_t f = 0; f < daemon->config->ffn_count; f++)
        if (weights->group & (1u << f))
            json_array_append_new(group, json_string(daemon->config->ffn[f].name));
    /* The first rank's device, or all of them, one entry a rank. */
    json_t *ranks = json_array();
    for (uint32_t r = 0; r < instance->rank_count; r++)
        json_array_append_new(ranks, rank_json(daemon, instance, r));
    json_t *kv = json_pack("{s:I, s:I, s:I, s:I, s:I}", "reserved_bytes", (json_int_t)s->kv_bytes,
                           "page_tokens", (json_int_t)s->page_tokens, "pages",
                           (json_int_t)s->kv_pages, "pages_used", (json_int_t)s->kv_pages_used,
                           "pages_cached", (json_int_t)s->kv_pages_cached);
    json_object_update_new(kv, daemon_kv_model_json(daemon, index));
    json_t *json = json_pack(
        "{s:s, s:s, s:s, s:o, s:s, s:o, s:o, s:i, s:I, s:I, s:I, s:I, s:b, s:o, s:I, s:I, s:i}",
        "id", configured->id, "architecture", planned->spec.architecture_name, "state",
        daemon_instance_state_name(instance->state), "reason", text_json(instance->absence),
        "attention_device", daemon->config->atn[planned->rank_atn[0]].name, "ranks", ranks,
        "execution_group", group, "weight_set", (int)planned->weights, "ffn_weight_bytes",
        (json_int_t)held_weight_bytes(daemon, planned->weights), "attention_weight_bytes",
        (json_int_t)daemon_instance_weight_bytes(instance), "max_context",
        (json_int_t)instance->max_context, "max_rows", (json_int_t)planned->max_rows, "healthy",
        instance->healthy, "kv", kv, "invocations", (json_int_t)invocations, "invocation_rows",
        (json_int_t)rows, "layers", (int)planned->spec.layers);
    json_object_set_new(json, "engine_name",
                        json_string(instance->engine[0] ? instance->engine
                                                        : config_engine_name(configured->engine)));
    json_object_set_new(json, "attention_tp", json_integer(configured->attention_tp));
    json_object_set_new(json, "attention_dp", json_integer(configured->attention_dp));
    if (first)
        json_object_set_new(json, "pid", json_integer(first->pid));
    if (instance->port) {
        json_object_set_new(json, "host", json_string(instance->host));
        json_object_set_new(json, "port", json_integer(instance->port));
    }
    json_t *engine = json_pack(
        "{s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I}", "steps", (json_int_t)s->steps,
        "ffn_calls", (json_int_t)s->ffn_calls, "ffn_rows", (json_int_t)s->ffn_rows, "prompt_tokens",
        (json_int_t)s->prompt_tokens, "generated_tokens", (json_int_t)s->generated_tokens,
        "cached_tokens", (json_int_t)s->cached_tokens, "requests", (json_int_t)s->requests,
        "finished", (json_int_t)s->finished, "aborted", (json_int_t)s->aborted, "failed",
        (json_int_t)s->failed, "rejected", (json_int_t)s->rejected, "running",
        (json_int_t)s->running, "waiting", (json_int_t)s->waiting);
    if (daemon->planned->cuda)
        json_object_update_new(engine,
                               json_pack("{s:I,s:I,s:I,s:I,s:I}", "eager_decode_calls",
                                         (json_int_t)s->eager_decode_calls, "eager_prefill_calls",
                                         (json_int_t)s->eager_prefill_calls, "captured_calls",
                                         (json_int_t)s->captured_calls, "replayed_calls",
                                         (json_int_t)s->replayed_calls, "ffn_wait_ns",
                                         (json_int_t)s->ffn_wait_ns));
    json_object_set_new(json, "engine", engine);
    json_object_set_new(json, "ttft",
                        json_pack("{s:f,s:f,s:f}", "p50_ms", s->ttft_p50_ms, "p99_ms",
                                  s->ttft_p99_ms, "slo_ms", configured->slo.ttft_ms));
    json_object_set_new(json, "tbt",
                        json_pack("{s:f,s:f,s:f}", "p50_ms", s->tbt_p50_ms, "p99_ms", s->tbt_p99_ms,
                                  "slo_ms", configured->slo.tbt_ms));
    return json;
}

static json_t *state_json(const daemon_t *daemon)
{
    daemon_verdict_t verdict;
    daemon_verdict(daemon, &verdict);
    json_t *agents = json_array(), *models = json_array();
    for (uint32_t a = 0; a < daemon->config->atn_count; a++)
        json_array_append_new(agents,
                              agent_json(daemon, &daemon->planned->atn[a], daemon->atn[a], a));
    for (uint32_t f = 0; f < daemon->config->ffn_count; f++)
        json_array_append_new(agents, agent_json(daemon, &daemon->planned->ffn[f], daemon->ffn[f],
                                                 daemon->config->atn_count + f));
    for (uint32_t i = 0; i < daemon->config->model_count; i++)
        json_array_append_new(models, model_json(daemon, i));
    json_t *gateway = json_null(), *state;
    if (daemon->gateway)
        gateway = json_pack("{s:i, s:s, s:i, s:I, s:i, s:I}", "pid", (int)daemon->gateway->pid,
                            "host", daemon->gateway_host, "port", (int)daemon->gateway_port,
                            "requests", (json_int_t)daemon->gateway_stats.requests, "open",
                            (int)daemon->gateway_stats.open, "errors",
                            (json_int_t)daemon->gateway_stats.errors);
    state =
        json_pack("{s:s, s:I, s:f, s:o, s:o, s:o, s:o, s:o, s:I, s:i}", "version", XPOOL_VERSION,
                  "generation", (json_int_t)daemon->planned->plan.generation, "uptime_seconds",
                  (double)(xp_monotonic_ns() - daemon->started_ns) / 1e9, "verdict",
                  verdict_json(daemon, &verdict), "failure", failure_json(&daemon->failure),
                  "agents", agents, "models", models, "gateway", gateway, "fabric_bytes",
                  (json_int_t)daemon->planned->fabric_bytes, "pid", (int)getpid());
    json_object_set_new(state, "kv", daemon_kv_json(daemon));
    json_object_set_new(state, "reforms",
                        json_pack("{s:I, s:b, s:f, s:o}", "count", (json_int_t)daemon->reforms,
                                  "under_way", daemon->reforming, "last_pause_seconds",
                                  daemon->last_pause_s, "last_failure",
                                  failure_json(&daemon->last_failure)));
    return state;
}

/* ---- paths ------------------------------------------------------------------------------------
 */

static void on_health(struct evhttp_request *request, void *context)
{
    if (only_get(request))
        reply_json(request, 200, json_pack("{s:s}", "status", "ok"));
}

static void on_ready(struct evhttp_request *request, void *context)
{
    daemon_t *daemon = context;
    if (!only_get(request))
        return;
    daemon_verdict_t verdict;
    daemon_verdict(daemon, &verdict);
    json_t *json = verdict_json(daemon, &verdict);
    json_object_set_new(json, "failure", failure_json(&daemon->failure));
    reply_json(request, verdict.system_ready ? 200 : 503, json);
}

static void on_state(struct evhttp_request *request, void *context)
{
    if (!only_get(request))
        return;
    daemon_kv_look(context);
    reply_json(request, 200, state_json(context));
}

static void metric_head(struct evbuffer *out, const char *name, const char *kind, const char *help)
{
    evbuffer_add_printf(out, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, kind);
}

/* A counter of 8 bytes in a struct. */
typedef struct field_metric {
    const char *name, *kind, *help;
    size_t offset;
} field_metric_t;

static unsigned long long field_value(const field_metric_t *metric, const void *from)
{
    uint64_t value;
    memcpy(&value, (const char *)from + metric->offset, sizeof(value));
    return value;
}

static void expert_metrics(const daemon_t *daemon, struct evbuffer *out)
{
    static const field_metric_t metrics[] = {
        {"xpool_ffn_expert_executions_total", "counter", "Executions of layers of experts",
         offsetof(xpw_ExpertUsage, executions)},
        {"xpool_ffn_expert_rows_total", "counter", "Rows routed, over these executions",
         offsetof(xpw_ExpertUsage, rows)},
        {"xpool_ffn_experts_read_total", "counter",
         "Distinct experts whose weights an execution read, summed",
         offsetof(xpw_ExpertUsage, experts)},
        {"xpool_ffn_experts", "gauge", "Experts installed, over all layers",
         offsetof(xpw_ExpertUsage, places)},
        {"xpool_ffn_experts_chosen", "gauge", "Of these, chosen by a row at least once",
         offsetof(xpw_ExpertUsage, chosen)},
        {"xpool_ffn_expert_least_rows", "gauge", "Rows that chose the expert chosen least",
         offsetof(xpw_ExpertUsage, least)},
        {"xpool_ffn_expert_most_rows", "gauge", "Rows that chose the expert chosen most",
         offsetof(xpw_ExpertUsage, most)},
    };
    for (size_t m = 0; m < sizeof(metrics) / sizeof(metrics[0]); m++) {
        metric_head(out, metrics[m].name, metrics[m].kind, metrics[m].help);
        for (uint32_t f = 0; f < daemon->config->ffn_count; f++)
            for (uint32_t w = 0; daemon->ffn[f] && w < FABRIC_MAX_INSTANCES; w++) {
                const xpw_ExpertUsage *one = &daemon->ffn[f]->usage[w];
                if (one->places > 0)
                    evbuffer_add_printf(out, "%s{device=\"%s\",model=\"%s\"} %llu\n",
                                        metrics[m].name, daemon->config->ffn[f].name,
                                        weights_name(daemon, w), field_value(&metrics[m], one));
            }
    }
}

static void on_metrics(struct evhttp_request *request, void *context)
{
    daemon_t *daemon = context;
    if (!only_get(request))
        return;
    struct evbuffer *out = evbuffer_new();
    if (!out) {
        evhttp_send_error(request, 500, NULL);
        return;
    }
    daemon_verdict_t verdict;
    daemon_verdict(daemon, &verdict);
    metric_head(out, "xpool_system_ready", "gauge", "1 when the system is ready");
    evbuffer_add_printf(out, "xpool_system_ready %d\n", verdict.system_ready);
    metric_head(out, "xpool_fabric_executable", "gauge", "1 when the agents can execute");
    evbuffer_add_printf(out, "xpool_fabric_executable %d\n", verdict.fabric_executable);
    metric_head(out, "xpool_generation", "gauge", "Current Generation");
    evbuffer_add_printf(out, "xpool_generation %llu\n",
                        (unsigned long long)daemon->planned->plan.generation);
    metric_head(out, "xpool_reforms_total", "counter", "Generations that failed and were replaced");
    evbuffer_add_printf(out, "xpool_reforms_total %llu\n", (unsigned long long)daemon->reforms);
    metric_head(out, "xpool_reform_pause_seconds", "gauge",
                "From the last such failure until the next Generation executed");
    evbuffer_add_printf(out, "xpool_reform_pause_seconds %.6f\n", daemon->last_pause_s);
    static const char *const weights[][2] = {
        {"xpool_ffn_weights_read_bytes", "FFN weights that the FfnAgent has read from files"},
        {"xpool_ffn_weights_adopted_bytes",
         "FFN weights taken over from a former FfnAgent without reading"},
        {"xpool_ffn_weights_kept_bytes", "FFN weights whose descriptors the daemon holds"},
    };
    for (uint32_t m = 0; m < 3; m++) {
        metric_head(out, weights[m][0], "gauge", weights[m][1]);
        for (uint32_t f = 0; f < daemon->config->ffn_count; f++) {
            const daemon_participant_t *agent = daemon->ffn[f];
            uint64_t values[] = {agent ? agent->execution.read_bytes : 0,
                                 agent ? agent->execution.adopted_bytes : 0,
                                 daemon_generation_kept_bytes(daemon, f)};
            evbuffer_add_printf(out, "%s{device=\"%s\"} %llu\n", weights[m][0],
                                daemon->config->ffn[f].name, (unsigned long long)values[m]);
        }
    }

    static const field_metric_t pe_metrics[] = {
        {"xpool_fabric_submissions_total", "counter", "Submissions or executed shards of a PE",
         offsetof(fabric_pe_counters_t, submissions)},
        {"xpool_fabric_invocations_total", "counter", "Invocations completed by a PE",
         offsetof(fabric_pe_counters_t, invocations)},
        {"xpool_fabric_rows_total", "counter", "Rows over all Invocations of a PE",
         offsetof(fabric_pe_counters_t, rows)},
        {"xpool_fabric_abandoned_total", "counter",
         "Submissions given up because their Instance went away",
         offsetof(fabric_pe_counters_t, abandoned)},
        {"xpool_fabric_busy_nanoseconds_total", "counter", "Time in FFN execution",
         offsetof(fabric_pe_counters_t, busy_ns)},
        {"xpool_fabric_queue_nanoseconds_total", "counter", "Submission to Lane, summed",
         offsetof(fabric_pe_counters_t, queue_ns)},
        {"xpool_fabric_lanes_in_use", "gauge", "Executor Lanes in use",
         offsetof(fabric_pe_counters_t, lanes_in_use)},
        {"xpool_fabric_lanes_leased_total", "counter", "Leases of Executor Lanes",
         offsetof(fabric_pe_counters_t, lanes_leased)},
        {"xpool_fabric_lanes_peak", "gauge", "Most Executor Lanes ever in use at once",
         offsetof(fabric_pe_counters_t, lanes_peak)},
    };
    uint32_t pes = daemon->config->atn_count + daemon->config->ffn_count;
    for (size_t m = 0; m < sizeof(pe_metrics) / sizeof(pe_metrics[0]); m++) {
        metric_head(out, pe_metrics[m].name, pe_metrics[m].kind, pe_metrics[m].help);
        for (uint32_t pe = 0; pe < pes; pe++) {
            fabric_pe_counters_t counters;
            daemon_pe_counters(daemon, pe, &counters);
            bool ffn = pe >= daemon->config->atn_count;
            const config_device_t *device =
                ffn ? &daemon->config->ffn[pe - daemon->config->atn_count]
                    : &daemon->config->atn[pe];
            evbuffer_add_printf(out, "%s{device=\"%s\",role=\"%s\"} %llu\n", pe_metrics[m].name,
                                device->name, ffn ? "ffn" : "attention",
                                field_value(&pe_metrics[m], &counters));
        }
    }

    expert_metrics(daemon, out);
    daemon_kv_look(daemon);
    daemon_kv_metrics(daemon, out);
    struct model_metric {
        const char *name, *kind, *help;
    } const model_metrics[] = {
        {"xpool_model_up", "gauge", "1 when the model's Instance serves"},
        {"xpool_model_ranks", "gauge", "Instance Ranks that are past the initialisation barrier"},
        {"xpool_model_running_requests", "gauge", "Requests in the running batch"},
        {"xpool_model_waiting_requests", "gauge", "Requests in the queue"},
        {"xpool_model_prompt_tokens_total", "counter", "Prompt tokens computed"},
        {"xpool_model_generated_tokens_total", "counter", "Tokens generated"},
        {"xpool_model_cached_tokens_total", "counter", "Prompt tokens taken from the prefix cache"},
        {"xpool_model_kv_pages", "gauge", "Pages of the KV Cache"},
        {"xpool_model_kv_pages_used", "gauge", "Pages held by running requests"},
        {"xpool_model_kv_pages_cached", "gauge", "Pages held by the prefix cache only"},
        {"xpool_model_kv_bytes", "gauge",
         "Address space reserved for the KV Cache; its pages cost memory once used"},
        {"xpool_model_ffn_weight_bytes", "gauge", "FFN weights held for the model by FfnAgents"},
        {"xpool_model_attention_weight_bytes", "gauge", "Weights held by the Instance"},
        {"xpool_model_eager_decode_calls_total", "counter",
         "FFN calls of decode steps that were queued outside graphs (GPUs)"},
        {"xpool_model_eager_prefill_calls_total", "counter",
         "FFN calls of prefill steps that were queued outside graphs (GPUs)"},
        {"xpool_model_replayed_calls_total", "counter",
         "FFN calls executed by replayed graphs (GPUs)"},
        {"xpool_model_ttft_p99_milliseconds", "gauge", "TTFT P99 over the last requests"},
        {"xpool_model_tbt_p99_milliseconds", "gauge", "TBT P99 over the last tokens"},
    };
    for (size_t m = 0; m < sizeof(model_metrics) / sizeof(model_metrics[0]); m++) {
        metric_head(out, model_metrics[m].name, model_metrics[m].kind, model_metrics[m].help);
        for (uint32_t i = 0; i < daemon->config->model_count; i++) {
            const daemon_instance_t *instance = &daemon->instances[i];
            const xpw_InstanceStats *s = &instance->stats;
            double values[] = {
                instance->state == INSTANCE_SERVING,
                daemon_instance_ranks_initialized(instance),
                s->running,
                s->waiting,
                (double)s->prompt_tokens,
                (double)s->generated_tokens,
                (double)s->cached_tokens,
                s->kv_pages,
                s->kv_pages_used,
                s->kv_pages_cached,
                (double)s->kv_bytes,
                (double)held_weight_bytes(daemon, daemon->planned->models[i].weights),
                (double)daemon_instance_weight_bytes(instance),
                (double)s->eager_decode_calls,
                (double)s->eager_prefill_calls,
                (double)s->replayed_calls,
                s->ttft_p99_ms,
                s->tbt_p99_ms,
            };
            evbuffer_add_printf(out, "%s{model=\"%s\"} %.17g\n", model_metrics[m].name,
                                daemon->config->models[i].id, values[m]);
        }
    }
    metric_head(out, "xpool_model_info", "gauge", "1; the labels say what serves the model");
    for (uint32_t i = 0; i < daemon->config->model_count; i++) {
        const daemon_instance_t *instance = &daemon->instances[i];
        const config_model_t *configured = &daemon->config->models[i];
        evbuffer_add_printf(out,
                            "xpool_model_info{model=\"%s\",engine=\"%s\",release=\"%s\","
                            "attention_tp=\"%u\",attention_dp=\"%u\"} 1\n",
                            configured->id, config_engine_name(configured->engine),
                            instance->engine, configured->attention_tp, configured->attention_dp);
    }
    struct evkeyvalq *headers = evhttp_request_get_output_headers(request);
    evhttp_add_header(headers, "Content-Type", "text/plain; version=0.0.4");
    evhttp_send_reply(request, 200, NULL, out);
    evbuffer_free(out);
}

static const char page[] =
    "<!doctype html><meta charset=utf-8><title>CrossPool</title><style>"
    "body{font:14px system-ui,sans-serif;margin:2em;max-width:70em}"
    "table{border-collapse:collapse;margin:1em 0}td,th{padding:.3em .8em;text-align:right;"
    "border-bottom:1px solid #ccc}td:first-child,th:first-child{text-align:left}"
    ".bad{color:#b00}.good{color:#070}</style><h1>CrossPool</h1><p id=verdict></p>"
    "<ul id=reasons></ul><h2>Models</h2><table id=models></table><h2>KV Caches</h2>"
    "<p id=pools></p><table id=kv></table><h2>Devices</h2><table id=agents></table><script>"
    "const MiB=b=>(b/1048576).toFixed(1);"
    "function row(t,cells,head){const r=t.insertRow();for(const c of cells){"
    "const d=document.createElement(head?'th':'td');d.textContent=c;r.append(d)}}"
    "async function go(){try{const s=await(await fetch('/v1/state')).json();"
    "const v=s.verdict;verdict.textContent=`Generation ${s.generation}: ${v.state}`;"
    "verdict.className=v.system_ready?'good':'bad';reasons.replaceChildren(...v.reasons.map(r=>{"
    "const l=document.createElement('li');l.textContent=r;return l}));"
    "models.replaceChildren();row(models,['model','state','running','waiting','tokens out',"
    "'KV pages used / cached / all','attention MiB','FFN MiB','TTFT p50 ms','TBT p50 ms'],1);"
    "for(const m of s.models)row(models,[m.id,m.state,m.engine.running,m.engine.waiting,"
    "m.engine.generated_tokens,`${m.kv.pages_used} / ${m.kv.pages_cached} / ${m.kv.pages}`,"
    "MiB(m.attention_weight_bytes),MiB(m.ffn_weight_bytes),m.ttft.p50_ms.toFixed(1),"
    "m.tbt.p50_ms.toFixed(1)]);"
    "pools.textContent=s.kv.pools.map(p=>`${p.device}: ${MiB(p.charged_bytes)} of "
    "${MiB(p.bytes)} MiB given out`).join(', ')+`; policy ${s.kv.policy}`;"
    "kv.replaceChildren();row(kv,['model','state','backed','used','cached','floor','ceiling',"
    "'backed MiB','waits for','since ms'],1);for(const g of s.kv.groups)row(kv,[g.model+"
    "(g.dp_rank?' DP '+g.dp_rank:''),g.state,g.backed.tokens,g.used.tokens,g.cached.tokens,"
    "g.floor.tokens,g.ceiling.tokens,MiB(g.backed.bytes),g.demand?g.demand.tokens:'',"
    "g.demand?g.demand.age_ms.toFixed(0):'']);"
    "agents.replaceChildren();row(agents,['device','role','registered','threads','Invocations',"
    "'rows','budget MiB','weights MiB'],1);for(const a of s.agents)row(agents,[a.device,a.role,"
    "a.registered?'yes':'no',a.threads,a.counters.invocations,a.counters.rows,"
    "MiB(a.budget_bytes),MiB(a.planned_weight_bytes)]);"
    "}catch(e){verdict.textContent='the daemon does not answer';verdict.className='bad'}}"
    "go();setInterval(go,1000)</script>";

static void on_other(struct evhttp_request *request, void *context)
{
    if (!only_get(request))
        return;
    const char *path = evhttp_uri_get_path(evhttp_request_get_evhttp_uri(request));
    if (path && strcmp(path, "/") == 0) {
        reply(request, 200, "text/html; charset=utf-8", page, sizeof(page) - 1);
        return;
    }
    reply_json(request, 404,
               json_pack("{s:s}", "error",
                         "no such path; there are /, /health, /ready, /v1/state and /metrics"));
}

/* ---- the Instances' health ---------------------------------------------------------------------
 */

typedef struct probe {
    daemon_instance_t *instance;
    uint64_t admitted_ns; /* names this life of the Instance */
} probe_t;

static void on_probe_done(struct evhttp_request *request, void *context)
{
    probe_t *probe = context;
    daemon_instance_t *instance = probe->instance;
    instance->probing = false;
    if (instance->port && instance->admitted_ns == probe->admitted_ns) {
        instance->healthy = request && evhttp_request_get_response_code(request) == 200;
        instance->healthy_at_ns = xp_monotonic_ns();
        if (instance->healthy && !instance->was_healthy) {
            instance->was_healthy = true;
            daemon_instance_refresh(instance);
            daemon_advance(instance->daemon);
        }
    }
    /* The connection frees itself (evhttp_connection_free_on_completion). */
    free(probe);
}

static void probe_instance(daemon_t *daemon, daemon_instance_t *instance)
{
    const daemon_participant_t *first = instance->ranks[0].participant;
    bool library = first && first->library;
    uint64_t interval_ns =
        library && instance->healthy ? LIBRARY_PROBE_HEALTHY_NS : PROBE_INTERVAL_NS;
    if ((instance->state != INSTANCE_SERVING && instance->state != INSTANCE_INITIALIZED) ||
        instance->probing || !instance->port ||
        (instance->healthy_at_ns && xp_monotonic_ns() - instance->healthy_at_ns < interval_ns))
        return;
    probe_t *probe = calloc(1, sizeof(*probe));
    struct evhttp_connection *connection =
        probe ? evhttp_connection_base_new(daemon->base, NULL, instance->host,
                                           (uint16_t)instance->port)
              : NULL;
    struct evhttp_request *request = connection ? evhttp_request_new(on_probe_done, probe) : NULL;
    if (!request) {
        if (connection)
            evhttp_connection_free(connection);
        free(probe);
        return;
    }
    probe->instance = instance;
    probe->admitted_ns = instance->admitted_ns;
    instance->probing = true;
    evhttp_connection_set_timeout(connection, library ? LIBRARY_PROBE_TIMEOUT_S : PROBE_TIMEOUT_S);
    evhttp_connection_free_on_completion(connection);
    evhttp_add_header(evhttp_request_get_output_headers(request), "Host", instance->host);
    evhttp_add_header(evhttp_request_get_output_headers(request), "Connection", "close");
    if (evhttp_make_request(connection, request, EVHTTP_REQ_GET, "/health") != 0)
        instance->probing = false; /* freed by libevent; the callback is not called */
}

void daemon_status_probe(daemon_t *daemon)
{
    for (uint32_t i = 0; i < daemon->config->model_count; i++)
        probe_instance(daemon, &daemon->instances[i]);
}

/* ---- start and end ----------------------------------------------------------------------------
 */

xp_status_t daemon_status_start(daemon_t *daemon)
{
    const char *address = daemon->config->daemon.http;
    char host[CONFIG_MAX_HOST];
    uint16_t port;
    XP_TRY(config_address_split(address, host, &port));
    daemon->http = evhttp_new(daemon->base);
    if (!daemon->http)
        return xp_fail(XP_NO_MEMORY, "no memory for the daemon's HTTP");
    evhttp_set_max_body_size(daemon->http, STATUS_MAX_BODY);
    evhttp_set_max_headers_size(daemon->http, STATUS_MAX_HEADERS);
    evhttp_set_timeout(daemon->http, STATUS_TIMEOUT_S);
    evhttp_set_allowed_methods(daemon->http, EVHTTP_REQ_GET | EVHTTP_REQ_HEAD | EVHTTP_REQ_POST |
                                                 EVHTTP_REQ_PUT | EVHTTP_REQ_DELETE);
    struct evhttp_bound_socket *bound = evhttp_bind_socket_with_handle(daemon->http, host, port);
    if (!bound)
        return xp_fail_errno(XP_IO,
                             "daemon.http: cannot listen on %s; is another daemon running, or the "
                             "port taken? choose another daemon.http",
                             address);
    daemon_descriptors_guard(daemon, bound);
    struct sockaddr_storage name;
    socklen_t size = sizeof(name);
    if (getsockname(evhttp_bound_socket_get_fd(bound), (struct sockaddr *)&name, &size) == 0)
        daemon->http_port =
            ntohs(name.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&name)->sin6_port
                                             : ((struct sockaddr_in *)&name)->sin_port);
    evhttp_set_cb(daemon->http, "/health", on_health, daemon);
    evhttp_set_cb(daemon->http, "/ready", on_ready, daemon);
    evhttp_set_cb(daemon->http, "/v1/state", on_state, daemon);
    evhttp_set_cb(daemon->http, "/metrics", on_metrics, daemon);
    evhttp_set_gencb(daemon->http, on_other, daemon);
    return XP_OK;
}

void daemon_status_stop(daemon_t *daemon)
{
    if (daemon->http)
        evhttp_free(daemon->http);
    daemon->http = NULL;
}
