/* SPDX-License-Identifier: MIT */
/*
 * The Instance's /metrics: one table from engine_stats_t and the server's counters to Prometheus
 * text.
 *
 * Owns nothing; runs on the HTTP thread; never waits for the engine.
 */
#include <string.h>

#include "http/instance_private.h"

typedef struct metric_row {
    const char *name, *type, *help;
    double value;
} metric_row_t;

void instance_metrics_path(http_instance_t *instance, http_request_t *request)
{
    engine_stats_t e;
    http_server_stats_t s;
    memset(&e, 0, sizeof(e));
    engine_stats(instance->config.engine, &e);
    http_server_stats(instance->server, &s);
    const metric_row_t rows[] = {
        {"steps_total", "counter", "Steps of the engine.", (double)e.steps},
        {"ffn_calls_total", "counter", "FFN calls, one a layer and step.", (double)e.ffn_calls},
        {"ffn_rows_total", "counter", "Rows in those calls.", (double)e.ffn_rows},
        {"prompt_tokens_total", "counter", "Prompt tokens accepted.", (double)e.prompt_tokens},
        {"generated_tokens_total", "counter", "Tokens generated.", (double)e.generated_tokens},
        {"cached_tokens_total", "counter", "Prompt tokens found in the prefix cache.",
         (double)e.cached_tokens},
        {"requests_total", "counter", "Sequences submitted.", (double)e.requests},
        {"requests_finished_total", "counter", "Sequences that ended by themselves.",
         (double)e.finished},
        {"requests_aborted_total", "counter", "Sequences cancelled.", (double)e.aborted},
        {"requests_failed_total", "counter", "Sequences ended by an error.", (double)e.failed},
        {"requests_rejected_total", "counter", "Sequences refused because the queue was full.",
         (double)e.rejected},
        {"requests_running", "gauge", "Sequences being computed.", e.running},
        {"requests_waiting", "gauge", "Sequences in the queue.", e.waiting},
        {"kv_pages", "gauge", "Pages of the KV Cache.", e.kv_pages},
        {"kv_pages_used", "gauge", "Pages of running sequences.", e.kv_pages_used},
        {"kv_pages_cached", "gauge", "Pages held by the prefix cache only.", e.kv_pages_cached},
        {"kv_page_tokens", "gauge", "Tokens a page.", e.page_tokens},
        {"kv_bytes", "gauge", "Bytes that the KV Cache can come to have.", (double)e.kv_bytes},
        {"kv_backed_bytes", "gauge", "Bytes of it that have memory.", (double)e.kv_backed_bytes},
        {"kv_backed_tokens", "gauge", "Tokens that fit in what may be used now.",
         (double)e.kv_backed_pages * e.page_tokens},
        {"kv_used_tokens", "gauge", "Tokens in pages of running sequences.",
         (double)e.kv_pages_used * e.page_tokens},
        {"kv_cached_tokens", "gauge", "Tokens in pages held by the prefix cache only.",
         (double)e.kv_pages_cached * e.page_tokens},
        {"kv_moved_pages_total", "counter", "Live pages moved so that memory could be given back.",
         (double)e.kv_moved_pages},
        {"kv_evicted_pages_total", "counter", "Pages dropped from the prefix cache.",
         (double)e.kv_evicted_pages},
        {"kv_stalls_total", "counter", "Times a sequence waited for memory to be lent.",
         (double)e.kv_stalls},
        {"kv_grow_failures_total", "counter", "Grants that the system had no memory for.",
         (double)e.kv_grow_failures},
        {"preemptions_total", "counter", "Sequences put back to make room for others.",
         (double)e.preemptions},
        {"weight_bytes", "gauge", "Bytes of the attention side's weights.", (double)e.weight_bytes},
        {"ttft_seconds_sum", "counter", "Sum of times to the first token.",
         (double)e.ttft_sum_ns / 1e9},
        {"ttft_seconds_count", "counter", "Times to the first token measured.",
         (double)e.ttft_count},
        {"tbt_seconds_sum", "counter", "Sum of times between tokens.", (double)e.tbt_sum_ns / 1e9},
        {"tbt_seconds_count", "counter", "Times between tokens measured.", (double)e.tbt_count},
        {"ttft_p50_milliseconds", "gauge", "Median over the last 1024.", e.ttft_p50_ms},
        {"ttft_p99_milliseconds", "gauge", "99th percentile over the last 1024.", e.ttft_p99_ms},
        {"tbt_p50_milliseconds", "gauge", "Median over the last 1024.", e.tbt_p50_ms},
        {"tbt_p99_milliseconds", "gauge", "99th percentile over the last 1024.", e.tbt_p99_ms},
        {"http_requests_total", "counter", "HTTP requests read.", (double)s.requests},
        {"http_bad_requests_total", "counter", "Requests that were no valid HTTP or over a limit.",
         (double)s.bad_requests},
        {"http_rejected_total", "counter", "Requests answered 429.", (double)instance->rejected},
        {"http_disconnects_total", "counter", "Clients that left before their answer.",
         (double)instance->disconnected},
        {"http_slow_readers_total", "counter", "Clients dropped because they did not read.",
         (double)s.slow_readers},
        {"http_open_requests", "gauge", "Generating requests not over.", instance->job_count},
        {"http_open_requests_limit", "gauge", "Their limit.", instance->config.max_requests},
        {"http_connections", "gauge", "Open connections.", s.connections},
        {"http_connections_limit", "gauge", "Their limit.", s.max_connections},
        {"http_body_bytes", "gauge", "Bytes of request bodies being held.", (double)s.body_bytes},
    };
    http_text_t *text = &instance->text;
    http_text_clear(text);
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        http_text_printf(text, "# HELP xpool_instance_%s %s\n# TYPE xpool_instance_%s %s\n",
                         rows[i].name, rows[i].help, rows[i].name, rows[i].type);
        http_text_printf(text, "xpool_instance_%s{model=", rows[i].name);
        http_text_json_string(text, instance->model_id);
        http_text_printf(text, "} %.15g\n", rows[i].value);
    }
    http_reply_text(request, 200, "text/plain; version=0.0.4", text);
}
