/* SPDX-License-Identifier: MIT */
/*
 * The native Instance's HTTP interface: its routes, its life, and the small paths.
 *
 * Owns the server, the jobs and the subscription to the engine's events. Runs on the thread of its
 * event_base. It never computes; prompts are tokenized here, everything else is the engine's.
 */
#include "http/instance_server.h"

#include <event2/event.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "http/instance_private.h"

enum {
    PATH_CHAT = 0,
    PATH_COMPLETION,
    PATH_GENERATE,
    PATH_MODELS,
    PATH_MODEL,
    PATH_TOKENIZE,
    PATH_DETOKENIZE,
    PATH_FLUSH,
    PATH_HEALTH,
    PATH_METRICS,
    PATH_INFO,
};

static const http_route_t routes[] = {
    {"/v1/chat/completions", HTTP_ROUTE_POST, PATH_CHAT},
    {"/v1/completions", HTTP_ROUTE_POST, PATH_COMPLETION},
    {"/v1/models", HTTP_ROUTE_GET, PATH_MODELS},
    {"/v1/models/", HTTP_ROUTE_GET, PATH_MODEL},
    {"/generate", HTTP_ROUTE_POST, PATH_GENERATE},
    {"/tokenize", HTTP_ROUTE_POST, PATH_TOKENIZE},
    {"/detokenize", HTTP_ROUTE_POST, PATH_DETOKENIZE},
    {"/flush_cache", HTTP_ROUTE_GET | HTTP_ROUTE_POST, PATH_FLUSH},
    {"/health", HTTP_ROUTE_GET, PATH_HEALTH},
    {"/metrics", HTTP_ROUTE_GET, PATH_METRICS},
    {"/get_model_info", HTTP_ROUTE_GET, PATH_INFO},
    {NULL, 0, -1},
};

static void write_model(const http_instance_t *instance, http_text_t *text)
{
    http_text_puts(text, "{\"id\":");
    http_text_json_string(text, instance->model_id);
    http_text_printf(text,
                     ",\"object\":\"model\",\"created\":%lld,\"owned_by\":\"xpool\","
                     "\"max_model_len\":%u}",
                     (long long)instance->config.created,
                     engine_max_context(instance->config.engine));
}

static void models_path(http_instance_t *instance, http_request_t *request)
{
    http_text_t *text = &instance->text;
    http_text_clear(text);
    http_text_puts(text, "{\"object\":\"list\",\"data\":[");
    write_model(instance, text);
    http_text_puts(text, "]}\n");
    http_reply_text(request, 200, "application/json", text);
}

static void model_path(http_instance_t *instance, http_request_t *request)
{
    const char *id = http_request_path(request) + strlen("/v1/models/");
    if (strcmp(id, instance->model_id)) {
        http_reply_problem(request, 404, "model_not_found", "model",
                           "the model \"%.100s\" does not exist here; this is \"%.100s\"", id,
                           instance->model_id);
        return;
    }
    http_text_clear(&instance->text);
    write_model(instance, &instance->text);
    http_text_puts(&instance->text, "\n");
    http_reply_text(request, 200, "application/json", &instance->text);
}

static void health_path(http_instance_t *instance, http_request_t *request)
{
    if (instance->quiescing) {
        http_reply_problem(request, 503, NULL, NULL, "model %s is stopping", instance->model_id);
        return;
    }
    if (instance->engine_error[0]) {
        http_reply_problem(request, 503, NULL, NULL, "model %s failed: %s", instance->model_id,
                           instance->engine_error);
        return;
    }
    http_text_clear(&instance->text);
    http_text_puts(&instance->text, "{\"status\":\"ok\",\"model\":");
    http_text_json_string(&instance->text, instance->model_id);
    http_text_puts(&instance->text, "}\n");
    http_reply_text(request, 200, "application/json", &instance->text);
}

static void info_path(http_instance_t *instance, http_request_t *request)
{
    http_text_t *text = &instance->text;
    const chat_template_t *chat = instance->config.chat_template;
    http_text_clear(text);
    http_text_puts(text, "{\"model_path\":");
    http_text_json_string(text, instance->model_id);
    http_text_printf(text, ",\"is_generation\":true,\"max_model_len\":%u,\"vocab_size\":%u",
                     engine_max_context(instance->config.engine),
                     engine_spec(instance->config.engine)->vocab);
    http_text_printf(text, ",\"has_tokenizer\":%s,\"chat_template\":",
                     engine_tokenizer(instance->config.engine) ? "true" : "false");
    http_text_json_string(text, chat ? chat_template_name(chat) : NULL);
    http_text_puts(text, "}\n");
    http_reply_text(request, 200, "application/json", text);
}

static void on_request(void *context, http_request_t *request)
{
    http_instance_t *instance = context;
    int path = http_route_find(routes, request);
    if (path < 0)
        return;
    if (instance->quiescing && path <= PATH_GENERATE) {
        http_reply_problem(request, 503, NULL, NULL, "model %s is stopping", instance->model_id);
        return;
    }
    switch (path) {
    case PATH_CHAT:
        instance_job_start(instance, request, HTTP_API_CHAT);
        break;
    case PATH_COMPLETION:
        instance_job_start(instance, request, HTTP_API_COMPLETION);
        break;
    case PATH_GENERATE:
        instance_job_start(instance, request, HTTP_API_GENERATE);
        break;
    case PATH_MODELS:
        models_path(instance, request);
        break;
    case PATH_MODEL:
        model_path(instance, request);
        break;
    case PATH_TOKENIZE:
        instance_tokenize_path(instance, request);
        break;
    case PATH_DETOKENIZE:
        instance_detokenize_path(instance, request);
        break;
    case PATH_FLUSH:
        engine_flush_cache(instance->config.engine);
        http_request_reply(request, 200, "text/plain; charset=utf-8", NULL, "Cache flushed.\n", 15);
        break;
    case PATH_HEALTH:
        health_path(instance, request);
        break;
    case PATH_METRICS:
        instance_metrics_path(instance, request);
        break;
    default:
        info_path(instance, request);
        break;
    }
}

xp_status_t http_instance_create(const http_instance_config_t *config, struct event_base *base,
                                 http_instance_t **instance_out)
{
    xp_status_t status = XP_OK;
    http_instance_t *instance = calloc(1, sizeof(*instance));
    if (!instance)
        return xp_fail(XP_NO_MEMORY, "no memory for an Instance's HTTP server");
    TAILQ_INIT(&instance->jobs);
    http_text_init(&instance->text, 2 * INSTANCE_MAX_TEXT_BYTES);
    instance->config = *config;
    if (!instance->config.max_requests)
        instance->config.max_requests = 512;
    instance->model_id = strdup(config->model_id);
    instance->chat_reason = strdup(config->chat_template_reason ? config->chat_template_reason
                                                                : "it has no chat template");
    instance->events = calloc(INSTANCE_DRAIN_EVENTS, sizeof(*instance->events));
    if (!instance->model_id || !instance->chat_reason || !instance->events)
        XP_TRY_GOTO(status, fail, xp_fail(XP_NO_MEMORY, "no memory for an Instance's HTTP server"));
    instance->longest_token_bytes = instance_longest_token(instance);
    if (getrandom(&instance->id_seed, sizeof(instance->id_seed), GRND_NONBLOCK) < 0)
        instance->id_seed = xp_monotonic_ns();
    instance->engine_event = event_new(base, engine_event_fd(config->engine), EV_READ | EV_PERSIST,
                                       instance_on_engine, instance);
    if (!instance->engine_event || event_add(instance->engine_event, NULL))
        XP_TRY_GOTO(status, fail, xp_fail(XP_NO_MEMORY, "no memory for the engine's event"));
    http_server_config_t server = {
        .host = config->host,
        .port = config->port,
        .max_connections = config->max_connections,
        .max_body_bytes = config->max_body_bytes,
        .max_output_bytes = config->max_output_bytes,
        .head_timeout_ms = config->head_timeout_ms,
        .body_timeout_ms = config->body_timeout_ms,
        .idle_timeout_ms = config->idle_timeout_ms,
        .write_timeout_ms = config->write_timeout_ms,
        .on_request = on_request,
        .context = instance,
    };
    XP_TRY_GOTO(status, fail, http_server_create(&server, base, &instance->server));
    *instance_out = instance;
    return XP_OK;
fail:
    http_instance_destroy(instance);
    return status;
}

void http_instance_destroy(http_instance_t *instance)
{
    if (!instance)
        return;
    http_server_destroy(instance->server); /* every open job loses its client and is cancelled */
    if (instance->engine_event)
        event_free(instance->engine_event);
    while (!TAILQ_EMPTY(&instance->jobs))
        instance_job_free(TAILQ_FIRST(&instance->jobs));
    http_text_fini(&instance->text);
    free(instance->events);
    free(instance->model_id);
    free(instance->chat_reason);
    free(instance);
}

uint16_t http_instance_port(const http_instance_t *instance)
{
    return http_server_port(instance->server);
}

void http_instance_quiesce(http_instance_t *instance)
{
    instance->quiescing = true;
    http_server_quiesce(instance->server);
}

uint32_t http_instance_open_requests(const http_instance_t *instance)
{
    const instance_job_t *job;
    uint32_t count = http_server_open_answers(instance->server);
    TAILQ_FOREACH(job, &instance->jobs, entry)
    {
        count += !job->request; /* the others are among the server's */
    }
    return count;
}
