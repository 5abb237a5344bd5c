/* SPDX-License-Identifier: MIT */
/*
 * Counters and latencies of one engine. The engine thread publishes after each iteration; any
 * thread may read. Everything moves under the engine's lock, so a reader never sees halves of two
 * steps.
 */
#include <stdlib.h>
#include <string.h>

#include "engine/engine_private.h"

void engine_latency_add(engine_latencies_t *latencies, uint64_t ns)
{
    latencies->samples[latencies->count++ % ENGINE_LATENCIES] = ns;
    latencies->sum_ns += ns;
}

void engine_stats_publish(engine_t *engine)
{
    engine_stats_t *stats = &engine->stats;
    const engine_pages_t *pages = &engine->pages;
    stats->steps = engine->steps;
    stats->ffn_calls = engine->model.ffn_calls;
    stats->ffn_rows = engine->model.ffn_rows;
    stats->running = engine->scheduler.running_count;
    stats->waiting = engine->scheduler.waiting_count;
    stats->kv_pages = pages->count;
    stats->kv_pages_cached = pages->idle_count;
    stats->kv_pages_used = pages->live_count;
    stats->page_tokens = pages->page_tokens;
    stats->kv_bytes = engine->kv.bytes;
    stats->kv_backed_bytes =
        engine_kv_mapped_bundles(&engine->kv) * kv_backing_bundle_bytes(engine->kv.backing);
    stats->kv_backed_pages = pages->limit;
    stats->kv_moved_pages = pages->moves;
    stats->kv_evicted_pages = pages->evictions;
    stats->kv_stalls = engine->scheduler.stalls;
    stats->preemptions = engine->scheduler.preemptions;
    stats->kv_grow_failures = engine->elastic.grow_failures;
    memcpy(stats->kv_grow_error, engine->elastic.grow_error, sizeof stats->kv_grow_error);
    stats->weight_bytes = engine->weights.bytes;
}

static int compare_u64(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

static void percentiles(engine_latencies_t *latencies, double *p50_out, double *p99_out)
{
    uint32_t count =
        latencies->count < ENGINE_LATENCIES ? (uint32_t)latencies->count : ENGINE_LATENCIES;
    if (count == 0) {
        *p50_out = *p99_out = 0;
        return;
    }
    qsort(latencies->samples, count, sizeof latencies->samples[0], compare_u64);
    *p50_out = (double)latencies->samples[(count - 1) / 2] / (double)XP_NS_PER_MS;
    *p99_out = (double)latencies->samples[(uint64_t)(count - 1) * 99 / 100] / (double)XP_NS_PER_MS;
}

void engine_stats(const engine_t *engine_const, engine_stats_t *stats_out)
{
    /* The lock is the one part of a const engine that a reader has to touch. */
    engine_t *engine = (engine_t *)(uintptr_t)engine_const;
    engine_latencies_t ttft, tbt;
    engine_stats_t stats;
    pthread_mutex_lock(&engine->lock);
    stats = engine->stats;
    stats.waiting += engine->inbox_count;
    ttft = engine->ttft;
    tbt = engine->tbt;
    pthread_mutex_unlock(&engine->lock);
    stats.ttft_sum_ns = ttft.sum_ns;
    stats.ttft_count = ttft.count;
    stats.tbt_sum_ns = tbt.sum_ns;
    stats.tbt_count = tbt.count;
    percentiles(&ttft, &stats.ttft_p50_ms, &stats.ttft_p99_ms);
    percentiles(&tbt, &stats.tbt_p50_ms, &stats.tbt_p99_ms);
    *stats_out = stats;
}
