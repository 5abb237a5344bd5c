/* SPDX-License-Identifier: MIT */
/*
 * The KV market as seen from outside: JSON for `xpool kv` and /v1/state, Prometheus metrics, and
 * the records. Reads what daemon_kv.c keeps; event loop thread only.
 */
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/memfd.h"
#include "control/daemon_kv_private.h"

/* ---- records ----------------------------------------------------------------------------------
 */

xp_status_t daemon_kv_records_start(daemon_kv_t *kv)
{
    XP_TRY(kv_record_ring_init(kv->channel->pool_count, kv->channel->group_count, &kv->records));
    kv->market.record = kv_record_ring_add;
    kv->market.record_context = &kv->records;
    return XP_OK;
}

void daemon_kv_records_stop(daemon_kv_t *kv)
{
    kv_record_ring_fini(&kv->records);
}

xp_status_t daemon_kv_records_write(daemon_kv_t *kv, int *fd_out, uint64_t *bytes_out)
{
    uint64_t bytes = kv_record_ring_bytes(&kv->records);
    void *to;
    int fd;
    XP_TRY(xp_memfd_create("xpool-kv-record", bytes, &fd));
    xp_status_t status = xp_memfd_map(fd, bytes, &to);
    if (status != XP_OK) {
        close(fd);
        return status;
    }
    kv_record_ring_write(&kv->records, to);
    xp_memfd_unmap(to);
    *fd_out = fd;
    *bytes_out = bytes;
    return XP_OK;
}

/* ---- one group --------------------------------------------------------------------------------
 */

typedef struct group_view {
    const kv_group_entry_t *plan;
    const kv_market_group_t *state;
    const kv_policy_group_t *book;
    uint64_t backed_tokens, used_tokens, cached_tokens, floor_tokens, ceiling_tokens;
    uint64_t token_bytes; /* of all ranks of the group */
    bool demand;
    uint64_t demand_age_ns;
} group_view_t;

static group_view_t view_of(const daemon_kv_t *kv, uint32_t g)
{
    const kv_group_entry_t *entry = &kv->channel->groups[g], *plan = &kv->market.plan.groups[g];
    const kv_market_group_t *state = &kv->market.groups[g];
    const kv_policy_group_t *book = &kv->market.snapshot.groups[g];
    const xpw_InstanceStats *stats = &kv->daemon->instances[plan->instance].stats;
    uint64_t now_ns = xp_monotonic_ns(), unit = plan->bundle_tokens;
    group_view_t view = {.plan = plan,
                         .state = state,
                         .book = book,
                         .backed_tokens = book->mapped_bundles * unit,
                         .used_tokens = state->report.live_tokens,
                         .cached_tokens = state->report.cached_tokens,
                         .floor_tokens = PROTOCOL_LOAD_RELAXED(&entry->floor_bundles) * unit,
                         .ceiling_tokens = PROTOCOL_LOAD_RELAXED(&entry->ceiling_bundles) * unit,
                         .token_bytes = plan->token_bytes * plan->partition_count,
                         .demand = book->present && kv_policy_need(book) > 0 &&
                                   !kv_policy_only_cache(book)};
    if (!plan->elastic && kv->daemon->instances[plan->instance].state == INSTANCE_SERVING) {
        /* A fixed one reports by its engine's statistics, if at all. */
        view.backed_tokens = view.ceiling_tokens;
        if (state->report.live_tokens == 0 && state->report.cached_tokens == 0) {
            view.used_tokens = (uint64_t)stats->kv_pages_used * stats->page_tokens;
            view.cached_tokens = (uint64_t)stats->kv_pages_cached * stats->page_tokens;
        }
    }
    if (view.demand && now_ns > book->demand_since_ns && book->demand_since_ns)
        view.demand_age_ns = now_ns - book->demand_since_ns;
    return view;
}

static json_t *size_json(uint64_t tokens, uint64_t token_bytes)
{
    return json_pack("{s:I, s:I}", "tokens", (json_int_t)tokens, "bytes",
                     (json_int_t)(tokens * token_bytes));
}

static json_t *demand_json(const daemon_kv_t *kv, uint32_t g, const group_view_t *view)
{
    if (!view->demand)
        return json_null();
    uint64_t deadline_ns = kv_policy_deadline_ns(&kv->market.snapshot, view->book);
    uint64_t now_ns = xp_monotonic_ns();
    return json_pack("{s:s, s:I, s:f, s:f, s:b}", "kind",
                     view->book->demand_kind == KV_DEMAND_DECODE    ? "decode"
                     : view->book->demand_kind == KV_DEMAND_PREFILL ? "prefill"
                                                                    : "floor",
                     "tokens", (json_int_t)kv_policy_need(view->book) * view->plan->bundle_tokens,
                     "age_ms", (double)view->demand_age_ns / 1e6, "due_ms",
                     deadline_ns > now_ns ? (double)(deadline_ns - now_ns) / 1e6
                                          : -(double)(now_ns - deadline_ns) / 1e6,
                     "refused", kv->market.decisions.refused[g]);
}

static json_t *last_json(const group_view_t *view)
{
    const kv_market_group_t *state = view->state;
    if (state->sequence == 0)
        return json_null();
    return json_pack("{s:I, s:I, s:s, s:b, s:f}", "sequence", (json_int_t)state->sequence, "tokens",
                     (json_int_t)state->last.bundles * view->plan->bundle_tokens, "reason",
                     kv_policy_reason_name(state->last.reason), "answered", view->book->answered,
                     "longest_answer_ms", (double)state->longest_answer_ns / 1e6);
}

static json_t *group_json(const daemon_kv_t *kv, uint32_t g)
{
    group_view_t view = view_of(kv, g);
    const daemon_t *daemon = kv->daemon;
    json_t *devices = json_array();
    for (uint32_t m = 0; m < view.book->member_count; m++)
        json_array_append_new(devices, json_string(daemon->config->atn[view.book->pools[m]].name));
    return json_pack(
        "{s:s, s:i, s:o, s:s, s:b, s:I, s:I, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:b, s:I, s:I}",
        "model", daemon->config->models[view.plan->instance].id, "dp_rank", (int)view.plan->dp_rank,
        "devices", devices, "state",
        !view.plan->elastic && view.state->state == KV_MARKET_STARTING
            ? "fixed" /* its engine has no part in the market */
            : kv_market_state_name(view.state->state),
        "elastic", view.plan->elastic != 0, "bundle_tokens", (json_int_t)view.plan->bundle_tokens,
        "bundle_bytes", (json_int_t)view.plan->bundle_bytes, "backed",
        size_json(view.backed_tokens, view.token_bytes), "used",
        size_json(view.used_tokens, view.token_bytes), "cached",
        size_json(view.cached_tokens, view.token_bytes), "floor",
        size_json(view.floor_tokens, view.token_bytes), "ceiling",
        size_json(view.ceiling_tokens, view.token_bytes), "demand", demand_json(kv, g, &view),
        "last_command", last_json(&view), "squeezed", view.book->squeezed, "grants",
        (json_int_t)view.state->grants, "shrinks", (json_int_t)view.state->shrinks);
}

/* ---- whole ------------------------------------------------------------------------------------
 */

static const char *mode_name(kv_policy_mode_t mode)
{
    return mode == KV_POLICY_STATIC ? "static" : mode == KV_POLICY_ARRIVAL ? "arrival" : "deadline";
}

json_t *daemon_kv_json(const daemon_t *daemon)
{
    const daemon_kv_t *kv = daemon->kv;
    json_t *pools = json_array(), *groups = json_array();
    for (uint32_t p = 0; p < kv->market.plan.pool_count; p++) {
        uint64_t bytes = kv->market.snapshot.pool_bytes[p];
        uint64_t charged = kv_market_charged_bytes(&kv->market, p);
        json_array_append_new(
            pools,
            json_pack("{s:s, s:I, s:I, s:I, s:I, s:b}", "device", daemon->config->atn[p].name,
                      "bytes", (json_int_t)bytes, "charged_bytes", (json_int_t)charged,
                      "free_bytes", (json_int_t)(bytes - charged), "planned_bytes",
                      (json_int_t)kv->market.plan.pools[p].bytes, "formed",
                      !kv->market.settings.observe || kv->market.formed_bytes[p] != 0));
    }
    for (uint32_t g = 0; g < kv->market.plan.group_count; g++)
        json_array_append_new(groups, group_json(kv, g));
    return json_pack("{s:s, s:o, s:o, s:I}", "policy", mode_name(kv->market.settings.mode), "pools",
                     pools, "groups", groups, "commands", (json_int_t)kv->market.decision_count);
}

json_t *daemon_kv_model_json(const daemon_t *daemon, uint32_t model)
{
    const daemon_kv_t *kv = daemon->kv;
    uint64_t backed = 0, used = 0, cached = 0, floor = 0, ceiling = 0, bytes = 0;
    bool elastic = false, waits = false;
    for (uint32_t g = 0; g < kv->market.plan.group_count; g++) {
        if (kv->market.plan.groups[g].instance != model)
            continue;
        group_view_t view = view_of(kv, g);
        backed += view.backed_tokens;
        used += view.used_tokens;
        cached += view.cached_tokens;
        floor += view.floor_tokens;
        ceiling += view.ceiling_tokens;
        bytes += view.backed_tokens * view.token_bytes;
        elastic = elastic || view.plan->elastic;
        waits = waits || view.demand;
    }
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:b, s:b}", "backed_tokens",
                     (json_int_t)backed, "used_tokens", (json_int_t)used, "cached_tokens",
                     (json_int_t)cached, "floor_tokens", (json_int_t)floor, "ceiling_tokens",
                     (json_int_t)ceiling, "backed_bytes", (json_int_t)bytes, "elastic", elastic,
                     "demand_open", waits);
}

/* ---- metrics ----------------------------------------------------------------------------------
 */

static void head(struct evbuffer *out, const char *name, const char *kind, const char *help)
{
    evbuffer_add_printf(out, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, kind);
}

void daemon_kv_metrics(const daemon_t *daemon, struct evbuffer *out)
{
    const daemon_kv_t *kv = daemon->kv;
    head(out, "xpool_kv_pool_bytes", "gauge", "Bytes of a KV Capacity Pool, all, charged and free");
    for (uint32_t p = 0; p < kv->market.plan.pool_count; p++) {
        uint64_t bytes = kv->market.snapshot.pool_bytes[p];
        uint64_t charged = kv_market_charged_bytes(&kv->market, p);
        const char *device = daemon->config->atn[p].name;
        evbuffer_add_printf(out,
                            "xpool_kv_pool_bytes{device=\"%s\",kind=\"all\"} %llu\n"
                            "xpool_kv_pool_bytes{device=\"%s\",kind=\"charged\"} %llu\n"
                            "xpool_kv_pool_bytes{device=\"%s\",kind=\"free\"} %llu\n",
                            device, (unsigned long long)bytes, device, (unsigned long long)charged,
                            device, (unsigned long long)(bytes - charged));
    }
    static const struct {
        const char *name, *kind, *help;
    } metrics[] = {
        {"xpool_kv_tokens_backed", "gauge", "KV Cache tokens that have memory"},
        {"xpool_kv_tokens_used", "gauge", "KV Cache tokens that live requests hold"},
        {"xpool_kv_tokens_cached", "gauge", "KV Cache tokens that only the prefix cache holds"},
        {"xpool_kv_tokens_floor", "gauge", "Tokens that the group always keeps"},
        {"xpool_kv_tokens_ceiling", "gauge", "Tokens that the group may hold at most"},
        {"xpool_kv_token_bytes", "gauge", "Bytes of one token over all ranks of the group"},
        {"xpool_kv_demand_tokens", "gauge", "Tokens in all of the open demand, 0 without one"},
        {"xpool_kv_demand_age_seconds", "gauge", "How long the open demand has waited"},
        {"xpool_kv_squeezed", "gauge", "1 while no new prefill is admitted above the floor"},
        {"xpool_kv_grants_total", "counter", "Commands to grow"},
        {"xpool_kv_shrinks_total", "counter", "Commands to shrink"},
        {"xpool_kv_late_answers_total", "counter", "Commands not answered within deadlines.kv"},
        {"xpool_kv_answer_seconds_max", "gauge", "Longest time to an answer"},
    };
    for (size_t i = 0; i < sizeof(metrics) / sizeof(metrics[0]); i++) {
        head(out, metrics[i].name, metrics[i].kind, metrics[i].help);
        for (uint32_t g = 0; g < kv->market.plan.group_count; g++) {
            group_view_t view = view_of(kv, g);
            const double values[] = {
                (double)view.backed_tokens,
                (double)view.used_tokens,
                (double)view.cached_tokens,
                (double)view.floor_tokens,
                (double)view.ceiling_tokens,
                (double)view.token_bytes,
                view.demand ? (double)kv_policy_need(view.book) * view.plan->bundle_tokens : 0,
                (double)view.demand_age_ns / 1e9,
                view.book->squeezed,
                (double)view.state->grants,
                (double)view.state->shrinks,
                (double)view.state->late,
                (double)view.state->longest_answer_ns / 1e9,
            };
            evbuffer_add_printf(out, "%s{model=\"%s\",dp_rank=\"%u\"} %.17g\n", metrics[i].name,
                                daemon->config->models[view.plan->instance].id, view.plan->dp_rank,
                                values[i]);
        }
    }
}
