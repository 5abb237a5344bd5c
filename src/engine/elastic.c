/* SPDX-License-Identifier: MIT */
/*
 * Elastic KV of one engine: carries out the daemon's commands between steps and reports what is
 * used and missed. Engine thread only. Everything that takes long, mapping and moving, is done in
 * pieces of a bounded size, so that those who decode wait for one piece at most.
 *
 * A shrink ends no request. Pages above the goal that nobody refers to are forgotten; the others
 * move into free ids below, the highest first, also where they cannot get below the goal, so that
 * one long-lived request at the end holds no more than its own size. What is left then is given
 * back, and the rest follows as requests end.
 */
#include <stdio.h>
#include <string.h>

#include "base/failpoint.h"
#include "engine/engine_private.h"

/* A few milliseconds of clearing or copying. */
#define PIECE_BYTES (16ull << 20)
/* The KV Cache asks for more before its free pages run out: for an eighth of what it has, or a
 * piece where that is less. */
#define SLACK_SHARE 8
/* How long a stalled sequence waits for a daemon that does not answer. */
#define PATIENCE_NS (2 * XP_NS_PER_S)
/* Grants in a row that the machine had no memory for, after which a request that could go on with
 * nothing else ends. The daemon tries once a second. */
#define TRIES 5

xp_status_t engine_elastic_prepare(engine_t *engine)
{
    engine_config_t *config = &engine->config;
    engine->elastic.rank = config->kv_rank;
    if (!config->kv_rank)
        return XP_OK;
    const kv_group_entry_t *group = config->kv_rank->group;
    const uint64_t tokens = (uint64_t)group->reserved_bundles * group->bundle_tokens;
    if (tokens > UINT32_MAX)
        return xp_fail(XP_PEER, "%s: a KV Cache of %llu tokens is more than %u", engine->model_id,
                       (unsigned long long)tokens, UINT32_MAX);
    config->kv_bytes = 0;
    config->kv_tokens = (uint32_t)tokens;
    config->page_tokens = group->page_tokens;
    return kv_rank_start(config->kv_rank, &engine->elastic.start_bundles);
}

static uint32_t pages_of(const engine_t *engine, uint32_t bundles)
{
    return bundles * engine->kv.bundle_pages;
}

static uint32_t bundles_for(const engine_t *engine, uint32_t pages)
{
    const uint32_t each = engine->kv.bundle_pages;
    /* Page 0 always has memory. */
    return pages == 0 ? 1 : pages / each + (pages % each != 0);
}

/* What there can be at most, with everything lent. */
static uint32_t most_bundles(const engine_t *engine)
{
    const kv_rank_t *rank = engine->elastic.rank;
    const uint32_t ceiling = PROTOCOL_LOAD_RELAXED(&rank->group->ceiling_bundles);
    if (!rank->group->elastic)
        return engine->elastic.start_bundles;
    return ceiling == 0                              ? 1
           : ceiling > rank->group->reserved_bundles ? rank->group->reserved_bundles
                                                     : ceiling;
}

uint32_t engine_elastic_context(const engine_t *engine)
{
    if (!engine->elastic.rank)
        return engine->max_context;
    const uint64_t tokens =
        (uint64_t)most_bundles(engine) * engine->elastic.rank->group->bundle_tokens;
    return tokens < engine->max_context ? (uint32_t)tokens : engine->max_context;
}

xp_status_t engine_elastic_open(engine_t *engine)
{
    if (!engine->elastic.rank)
        return XP_OK;
    XP_TRY(engine_kv_resize(&engine->kv, engine->elastic.start_bundles));
    engine_pages_set_limit(&engine->pages, pages_of(engine, engine->elastic.start_bundles));
    return XP_OK;
}

xp_status_t engine_elastic_start(engine_t *engine)
{
    if (!engine->elastic.rank)
        return XP_OK;
    return kv_rank_ready(engine->elastic.rank, kv_backing_bundle_bytes(engine->kv.backing),
                         engine->kv.bundle_pages * engine->kv.page_tokens,
                         engine_kv_mapped_bundles(&engine->kv));
}

/* ---- commands -------------------------------------------------------------------------------- */

static void begin(engine_t *engine, const kv_command_t *command)
{
    const uint32_t mapped = engine_kv_mapped_bundles(&engine->kv);
    if (command->trim)
        engine_pages_flush(&engine->pages);
    engine_pages_set_limit(&engine->pages,
                           pages_of(engine, command->bundles < mapped ? command->bundles : mapped));
    engine->elastic.open = true;
    xp_failpoint(command->bundles < mapped ? "kv.rank.withdrawn" : "kv.rank.seen");
}

static bool grow(engine_t *engine, uint32_t mapped, uint32_t goal)
{
    engine_elastic_t *elastic = &engine->elastic;
    uint64_t piece = PIECE_BYTES / kv_backing_bundle_bytes(engine->kv.backing);
    uint32_t to = piece >= goal - mapped ? goal : mapped + (piece ? (uint32_t)piece : 1);
    if (engine_kv_resize(&engine->kv, to) != XP_OK) {
        /* The daemon takes back what the system does not have, and says so. */
        elastic->grow_failures++;
        snprintf(elastic->grow_error, sizeof elastic->grow_error, "%.159s", xp_error_last()->text);
        elastic->open = false;
        kv_rank_complete(elastic->rank, mapped);
        return true;
    }
    elastic->failures_before = elastic->grow_failures;
    xp_failpoint("kv.rank.grown");
    engine_pages_set_limit(&engine->pages, pages_of(engine, to));
    if (to == goal) {
        elastic->open = false;
        kv_rank_complete(elastic->rank, goal);
    }
    return true;
}

/* Moves pages out of the suffix; true when there is more to move than one piece. */
static bool move_pages(engine_t *engine, uint32_t *moved_out)
{
    uint64_t piece = PIECE_BYTES / (engine->kv.page_floats * sizeof(float));
    const uint32_t most = piece < 1 ? 1 : (uint32_t)piece;
    const uint32_t end = pages_of(engine, engine_kv_mapped_bundles(&engine->kv));
    uint32_t moved = 0, from, to;
    while (moved < most && engine_pages_move(&engine->pages, end, &from, &to)) {
        engine_kv_copy_page(&engine->kv, from, to);
        moved++;
    }
    if (moved > 0) {
        engine_scheduler_rename_pages(&engine->scheduler);
        engine_pages_settle(&engine->pages);
        xp_failpoint("kv.rank.moved");
    }
    *moved_out = moved;
    return moved == most;
}

static bool shrink(engine_t *engine, uint32_t mapped, uint32_t goal)
{
    engine_elastic_t *elastic = &engine->elastic;
    uint32_t moved;
    engine->scheduler.hold = move_pages(engine, &moved);
    if (engine->scheduler.hold)
        return true;
    uint32_t kept = bundles_for(engine, engine_pages_end(&engine->pages, pages_of(engine, mapped)));
    if (kept < goal)
        kept = goal;
    /* When the system refuses to take memory back, it is charged on and tried again. */
    if (kept < mapped) {
        (void)engine_kv_resize(&engine->kv, kept);
        xp_failpoint("kv.rank.released");
    }
    const uint32_t now = engine_kv_mapped_bundles(&engine->kv);
    elastic->open = now > goal;
    kv_rank_complete(elastic->rank, now);
    xp_failpoint("kv.rank.returned");
    return moved > 0 || now < mapped;
}

/* While the daemon keeps memory for another group, this one begins nothing above its floor. */
static uint32_t admitted_pages(const engine_t *engine)
{
    const uint32_t bundles = PROTOCOL_LOAD_RELAXED(&engine->elastic.rank->group->admit_bundles);
    return bundles >= engine->kv.pages / engine->kv.bundle_pages ? UINT32_MAX
                                                                 : pages_of(engine, bundles);
}

bool engine_elastic_apply(engine_t *engine)
{
    engine_elastic_t *elastic = &engine->elastic;
    kv_rank_t *rank = elastic->rank;
    kv_command_t command;
    if (!rank)
        return false;
    if (kv_rank_pending(rank) &&
        kv_rank_poll(rank, (uint32_t)engine->steps, bundles_for(engine, engine->pages.live_count),
                     &command))
        begin(engine, &command);
    engine->scheduler.hold = false;
    engine->scheduler.most_pages =
        rank->group->elastic ? pages_of(engine, most_bundles(engine)) : 0;
    engine->scheduler.admit_pages = admitted_pages(engine);
    engine->scheduler.patience_ns = PATIENCE_NS;
    engine->scheduler.refused = kv_rank_refused(rank);
    engine->scheduler.growing = elastic->open && rank->goal > engine_kv_mapped_bundles(&engine->kv);
    if (!elastic->open)
        return false;
    const uint32_t mapped = engine_kv_mapped_bundles(&engine->kv);
    return rank->goal > mapped ? grow(engine, mapped, rank->goal)
                               : shrink(engine, mapped, rank->goal);
}

/* Who has begun, is alone, and cannot go on. */
static engine_sequence_t *who_is_stuck(const engine_scheduler_t *scheduler)
{
    if (scheduler->running_count == 1 && scheduler->running[0]->stalled)
        return scheduler->running[0];
    if (scheduler->running_count == 0 && scheduler->waiting_count > 0 &&
        scheduler->waiting[0]->admitted_before)
        return scheduler->waiting[0];
    return NULL;
}

void engine_elastic_end_stuck(engine_t *engine)
{
    engine_elastic_t *elastic = &engine->elastic;
    engine_sequence_t *sequence = elastic->rank ? who_is_stuck(&engine->scheduler) : NULL;
    if (!sequence)
        elastic->failures_before = elastic->grow_failures;
    else if (elastic->grow_failures - elastic->failures_before >= TRIES) {
        char text[sizeof((engine_event_t){0}.error)];
        snprintf(text, sizeof text,
                 "this request alone needs more KV Cache than there is memory for, after %u "
                 "tokens and %d tries: %.140s",
                 sequence->count, TRIES, elastic->grow_error);
        elastic->failures_before = elastic->grow_failures;
        engine_sequence_end(engine, sequence, ENGINE_FINISH_ERROR, text);
    }
}

/* ---- reports --------------------------------------------------------------------------------- */

/* Pages that would keep the prefix cache from losing what it has to those who run, and spare them a
 * stall at the next boundary; 0 when there are enough. Nobody waits for them. */
static uint32_t pages_to_keep_the_cache(const engine_t *engine)
{
    const engine_pages_t *pages = &engine->pages;
    const uint64_t piece = PIECE_BYTES / (engine->kv.page_floats * sizeof(float));
    uint64_t slack = pages->limit / SLACK_SHARE;
    if (slack > piece)
        slack = piece;
    if (slack < engine->kv.bundle_pages)
        slack = engine->kv.bundle_pages;
    if (engine->scheduler.running_count == 0 || engine->elastic.open || pages->free_count >= slack)
        return 0;
    const uint64_t wanted = pages->live_count + pages->idle_count + 2 * slack;
    return wanted < engine->scheduler.most_pages ? (uint32_t)wanted : engine->scheduler.most_pages;
}

static void note_demand(engine_t *engine, uint64_t now_ns, kv_report_t *report)
{
    static const uint64_t kinds[] = {[ENGINE_SHORTAGE_NONE] = KV_DEMAND_NONE,
                                     [ENGINE_SHORTAGE_PREFILL] = KV_DEMAND_PREFILL,
                                     [ENGINE_SHORTAGE_DECODE] = KV_DEMAND_DECODE,
                                     [ENGINE_SHORTAGE_CACHE] = KV_DEMAND_CACHE};
    engine_elastic_t *elastic = &engine->elastic;
    const kv_report_t *former = &elastic->rank->report;
    engine_shortage_t shortage = engine_scheduler_shortage(&engine->scheduler);
    if (!elastic->rank->group->elastic)
        return;
    if (shortage.kind == ENGINE_SHORTAGE_NONE) {
        const uint32_t pages = pages_to_keep_the_cache(engine);
        if (bundles_for(engine, pages) <= engine_kv_mapped_bundles(&engine->kv)) {
            elastic->cache_since_ns = 0;
            return;
        }
        if (elastic->cache_since_ns == 0)
            elastic->cache_since_ns = now_ns;
        shortage = (engine_shortage_t){.kind = ENGINE_SHORTAGE_CACHE,
                                       .pages = pages,
                                       .deadline_ns = UINT64_MAX,
                                       .since_ns = elastic->cache_since_ns};
    }
    report->demand_kind = kinds[shortage.kind];
    report->demand_bundles = bundles_for(engine, shortage.pages);
    report->demand_deadline_ns = shortage.deadline_ns;
    report->demand_since_ns = shortage.since_ns;
    /* A refused one is no news for having become larger. */
    if (shortage.kind == ENGINE_SHORTAGE_CACHE && kv_rank_refused(elastic->rank) &&
        former->demand_kind == KV_DEMAND_CACHE && former->demand_since_ns == shortage.since_ns &&
        former->demand_bundles > engine_kv_mapped_bundles(&engine->kv))
        report->demand_bundles = former->demand_bundles;
}

void engine_elastic_report(engine_t *engine, uint64_t now_ns)
{
    const engine_scheduler_t *scheduler = &engine->scheduler;
    engine_elastic_t *elastic = &engine->elastic;
    if (!elastic->rank)
        return;
    if (engine->batch.rows > 0)
        elastic->last_activity_ns = now_ns;
    /* Those who run come to need a page each: what is taken from them would be asked back. */
    uint32_t pages = engine->pages.live_count + scheduler->running_count;
    if (pages > engine->pages.count)
        pages = engine->pages.count;
    kv_report_t report = {
        .live_bundles = bundles_for(engine, pages),
        .live_tokens = (uint64_t)engine->pages.live_count * engine->pages.page_tokens,
        .cached_tokens = (uint64_t)engine->pages.idle_count * engine->pages.page_tokens,
        .running = scheduler->running_count,
        .waiting = scheduler->waiting_count,
        .last_activity_ns = elastic->last_activity_ns,
        .earliest_deadline_ns = engine_scheduler_earliest_deadline_ns(scheduler),
    };
    note_demand(engine, now_ns, &report);
    kv_rank_report(elastic->rank, &report);
}
