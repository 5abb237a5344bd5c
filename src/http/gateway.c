/* SPDX-License-Identifier: MIT */
/*
 * The gateway: its routes, the table of backends, and the answers it gives itself.
 *
 * Owns the server and the table. Runs on the thread of its event_base. It reads a body only to find
 * `model`, and never changes it.
 */
#include "http/gateway.h"

#include <event2/event.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "http/gateway_private.h"

enum {
    PATH_BODY = 0, /* routed by `model` in the JSON body */
    PATH_QUERY,    /* routed by ?model= */
    PATH_MODELS,
    PATH_MODEL,
    PATH_HEALTH,
    PATH_METRICS,
};

static const http_route_t routes[] = {
    {"/v1/chat/completions", HTTP_ROUTE_POST, PATH_BODY},
    {"/v1/completions", HTTP_ROUTE_POST, PATH_BODY},
    {"/generate", HTTP_ROUTE_POST, PATH_BODY},
    {"/tokenize", HTTP_ROUTE_POST, PATH_BODY},
    {"/detokenize", HTTP_ROUTE_POST, PATH_BODY},
    {"/flush_cache", HTTP_ROUTE_GET | HTTP_ROUTE_POST, PATH_QUERY},
    {"/get_model_info", HTTP_ROUTE_GET, PATH_QUERY},
    {"/v1/models", HTTP_ROUTE_GET, PATH_MODELS},
    {"/v1/models/", HTTP_ROUTE_GET, PATH_MODEL},
    {"/health", HTTP_ROUTE_GET, PATH_HEALTH},
    {"/metrics", HTTP_ROUTE_GET, PATH_METRICS},
    {NULL, 0, -1},
};

static const char *state_name(http_backend_state_t state)
{
    static const char *const names[] = {"up", "starting", "down"};
    return names[state];
}

static gateway_backend_t *backend_find(http_gateway_t *gateway, const char *model_id)
{
    gateway_backend_t *backend;
    TAILQ_FOREACH(backend, &gateway->backends, entry)
    {
        if (!strcmp(backend->model, model_id))
            return backend;
    }
    return NULL;
}

/* "a", "b", ...: as many as fit; for messages. */
static void list_models(const http_gateway_t *gateway, char *out, size_t out_bytes)
{
    gateway_backend_t *backend;
    size_t used = 0;
    snprintf(out, out_bytes, "%s", gateway->backend_count ? "" : "none");
    TAILQ_FOREACH(backend, &gateway->backends, entry)
    {
        int length =
            snprintf(out + used, out_bytes - used, "%s\"%s\"", used ? ", " : "", backend->model);
        if (length < 0 || (size_t)length >= out_bytes - used) {
            snprintf(out + used, out_bytes - used, "...");
            return;
        }
        used += (size_t)length;
    }
}

static void reply_unavailable(http_request_t *request, const gateway_backend_t *backend)
{
    http_reply_problem(request, 503, "model_unavailable", "model", "model %s is %s%s%s",
                       backend->model, state_name(backend->state), backend->reason[0] ? ": " : "",
                       backend->reason);
}

static void reply_unknown_model(http_gateway_t *gateway, http_request_t *request, const char *id)
{
    char models[512];
    list_models(gateway, models, sizeof(models));
    http_reply_problem(request, 404, "model_not_found", "model",
                       "the model \"%.100s\" does not exist; there are: %s", id, models);
}

/* Sends the request to the model's backend, or says why not. */
static void route_to(http_gateway_t *gateway, http_request_t *request, const char *model)
{
    gateway_backend_t *backend;
    if (!model && gateway->backend_count == 1) {
        backend = TAILQ_FIRST(&gateway->backends);
    } else if (!model) {
        char models[512];
        list_models(gateway, models, sizeof(models));
        http_reply_problem(request, 400, "missing_required_parameter", "model",
                           "'model' is missing; there are: %s", models);
        return;
    } else {
        backend = backend_find(gateway, model);
    }
    if (!backend) {
        reply_unknown_model(gateway, request, model);
        return;
    }
    if (backend->state != HTTP_BACKEND_UP) {
        reply_unavailable(request, backend);
        return;
    }
    gateway_exchange_start(gateway, backend, request);
}

static void route_by_body(http_gateway_t *gateway, http_request_t *request)
{
    http_slice_t body = http_request_body(request);
    json_t *root;
    if (http_json_parse_object(body.data, body.length, &root) != XP_OK) {
        http_reply_problem(request, 400, "invalid_json", NULL, "%s", xp_error_last()->text);
        return;
    }
    const json_t *model = json_object_get(root, "model");
    if (!model || json_is_null(model) || json_is_string(model))
        route_to(gateway, request, json_string_value(model));
    else
        http_reply_problem(request, 400, NULL, "model", "'model' must be a string");
    json_decref(root);
}

static void route_by_query(http_gateway_t *gateway, http_request_t *request)
{
    char model[HTTP_GATEWAY_MAX_ID];
    bool given = http_query_value(http_request_query(request), "model", model, sizeof(model));
    route_to(gateway, request, given ? model : NULL);
}

static void write_model(const gateway_backend_t *backend, http_text_t *text)
{
    http_text_puts(text, "{\"id\":");
    http_text_json_string(text, backend->model);
    http_text_printf(text,
                     ",\"object\":\"model\",\"created\":%lld,\"owned_by\":\"xpool\","
                     "\"state\":\"%s\"}",
                     (long long)backend->created, state_name(backend->state));
}

/* Every model, also those that are not up: a client sees what is configured and in which state. */
static void models_path(http_gateway_t *gateway, http_request_t *request)
{
    http_text_t *text = &gateway->text;
    gateway_backend_t *backend;
    http_text_clear(text);
    http_text_puts(text, "{\"object\":\"list\",\"data\":[");
    TAILQ_FOREACH(backend, &gateway->backends, entry)
    {
        if (backend != TAILQ_FIRST(&gateway->backends))
            http_text_puts(text, ",");
        write_model(backend, text);
    }
    http_text_puts(text, "]}\n");
    http_reply_text(request, 200, "application/json", text);
}

static void model_path(http_gateway_t *gateway, http_request_t *request)
{
    const char *id = http_request_path(request) + strlen("/v1/models/");
    const gateway_backend_t *backend = backend_find(gateway, id);
    if (!backend) {
        reply_unknown_model(gateway, request, id);
    } else if (backend->state != HTTP_BACKEND_UP) {
        reply_unavailable(request, backend);
    } else {
        http_text_clear(&gateway->text);
        write_model(backend, &gateway->text);
        http_text_puts(&gateway->text, "\n");
        http_reply_text(request, 200, "application/json", &gateway->text);
    }
}

static void health_path(http_gateway_t *gateway, http_request_t *request)
{
    http_text_t *text = &gateway->text;
    gateway_backend_t *backend;
    if (gateway->quiescing) {
        http_reply_problem(request, 503, NULL, NULL, "the gateway is stopping");
        return;
    }
    http_text_clear(text);
    http_text_puts(text, "{\"status\":\"ok\",\"models\":{");
    TAILQ_FOREACH(backend, &gateway->backends, entry)
    {
        if (backend != TAILQ_FIRST(&gateway->backends))
            http_text_puts(text, ",");
        http_text_json_string(text, backend->model);
        http_text_printf(text, ":\"%s\"", state_name(backend->state));
    }
    http_text_puts(text, "}}\n");
    http_reply_text(request, 200, "application/json", text);
}

static void write_metric(http_text_t *text, const char *name, const char *type, const char *help)
{
    http_text_printf(text, "# HELP xpool_gateway_%s %s\n# TYPE xpool_gateway_%s %s\n", name, help,
                     name, type);
}

static void write_single(http_text_t *text, const char *name, const char *type, const char *help,
                         uint64_t value)
{
    write_metric(text, name, type, help);
    http_text_printf(text, "xpool_gateway_%s %llu\n", name, (unsigned long long)value);
}

static void metrics_path(http_gateway_t *gateway, http_request_t *request)
{
    http_text_t *text = &gateway->text;
    http_server_stats_t server;
    static const char *const per_model[][3] = {
        {"model_up", "gauge", "1 when the model serves."},
        {"requests_total", "counter", "Requests routed to the model."},
        {"errors_total", "counter", "Answers of the model that failed."},
        {"open_requests", "gauge", "Requests being answered by the model."},
    };
    http_server_stats(gateway->server, &server);
    http_text_clear(text);
    for (int i = 0; i < 4; i++) {
        gateway_backend_t *b;
        write_metric(text, per_model[i][0], per_model[i][1], per_model[i][2]);
        TAILQ_FOREACH(b, &gateway->backends, entry)
        {
            uint64_t values[] = {b->state == HTTP_BACKEND_UP, b->requests, b->errors, b->open};
            http_text_printf(text, "xpool_gateway_%s{model=", per_model[i][0]);
            http_text_json_string(text, b->model);
            http_text_printf(text, "} %llu\n", (unsigned long long)values[i]);
        }
    }
    write_single(text, "disconnects_total", "counter", "Clients that left before their answer.",
                 gateway->disconnects);
    write_single(text, "connect_retries_total", "counter", "Backend connections tried again.",
                 gateway->retries);
    write_single(text, "http_requests_total", "counter", "HTTP requests read.", server.requests);
    write_single(text, "http_bad_requests_total", "counter",
                 "Requests that were no valid HTTP or over a limit.", server.bad_requests);
    write_single(text, "http_connections", "gauge", "Open connections.", server.connections);
    write_single(text, "http_connections_limit", "gauge", "Their limit.", server.max_connections);
    write_single(text, "http_body_bytes", "gauge", "Bytes of request bodies being held.",
                 server.body_bytes);
    http_reply_text(request, 200, "text/plain; version=0.0.4", text);
}

static void on_request(void *context, http_request_t *request)
{
    http_gateway_t *gateway = context;
    int path = http_route_find(routes, request);
    if (path < 0)
        return;
    if (gateway->quiescing && path <= PATH_QUERY) {
        http_reply_problem(request, 503, NULL, NULL, "the gateway is stopping");
        return;
    }
    switch (path) {
    case PATH_BODY:
        route_by_body(gateway, request);
        break;
    case PATH_QUERY:
        route_by_query(gateway, request);
        break;
    case PATH_MODELS:
        models_path(gateway, request);
        break;
    case PATH_MODEL:
        model_path(gateway, request);
        break;
    case PATH_HEALTH:
        health_path(gateway, request);
        break;
    default:
        metrics_path(gateway, request);
        break;
    }
}

static void on_gone(evutil_socket_t fd, short events, void *context)
{
    gateway_exchanges_end_gone(context);
}

xp_status_t http_gateway_create(const http_gateway_config_t *config, struct event_base *base,
                                http_gateway_t **gateway_out)
{
    http_gateway_t *gateway = calloc(1, sizeof(*gateway));
    if (!gateway)
        return xp_fail(XP_NO_MEMORY, "no memory for a gateway");
    TAILQ_INIT(&gateway->backends);
    TAILQ_INIT(&gateway->exchanges);
    http_text_init(&gateway->text, 1u << 20);
    gateway->base = base;
    gateway->config = *config;
    http_gateway_config_t *c = &gateway->config;
    c->max_output_bytes = c->max_output_bytes ? c->max_output_bytes : 256u * 1024;
    c->connect_timeout_ms = c->connect_timeout_ms ? c->connect_timeout_ms : 2000;
    c->response_timeout_ms = c->response_timeout_ms ? c->response_timeout_ms : 600000;
    c->retry_delay_ms = c->retry_delay_ms ? c->retry_delay_ms : 50;
    c->gone_timeout_ms = c->gone_timeout_ms ? c->gone_timeout_ms : 1000;
    gateway->gone_timer = evtimer_new(base, on_gone, gateway);
    if (!gateway->gone_timer) {
        http_gateway_destroy(gateway);
        return xp_fail(XP_NO_MEMORY, "no memory for a gateway");
    }
    http_server_config_t server = {
        .host = c->host,
        .port = c->port,
        .max_connections = c->max_connections,
        .max_body_bytes = c->max_body_bytes,
        .max_output_bytes = c->max_output_bytes,
        .head_timeout_ms = c->head_timeout_ms,
        .body_timeout_ms = c->body_timeout_ms,
        .idle_timeout_ms = c->idle_timeout_ms,
        .write_timeout_ms = c->write_timeout_ms,
        .on_request = on_request,
        .context = gateway,
    };
    xp_status_t status = http_server_create(&server, base, &gateway->server);
    c->host = NULL; /* the caller's, and no longer needed */
    if (status != XP_OK) {
        http_gateway_destroy(gateway);
        return status;
    }
    *gateway_out = gateway;
    return XP_OK;
}

void http_gateway_destroy(http_gateway_t *gateway)
{
    if (!gateway)
        return;
    http_server_destroy(gateway->server); /* closing the clients ends every exchange */
    XP_ASSERT(TAILQ_EMPTY(&gateway->exchanges));
    while (!TAILQ_EMPTY(&gateway->backends))
        http_gateway_remove_backend(gateway, TAILQ_FIRST(&gateway->backends)->model);
    if (gateway->gone_timer)
        event_free(gateway->gone_timer);
    http_text_fini(&gateway->text);
    free(gateway);
}

uint16_t http_gateway_port(const http_gateway_t *gateway)
{
    return http_server_port(gateway->server);
}

static xp_status_t resolve(const char *host, uint16_t port, gateway_backend_t *backend)
{
    char service[8];
    struct addrinfo hints = {
        .ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV};
    struct addrinfo *found = NULL;
    snprintf(service, sizeof(service), "%u", port);
    int error = getaddrinfo(host, service, &hints, &found);
    if (error)
        return xp_fail(XP_INVALID, "backend host \"%s\": %s", host, gai_strerror(error));
    memcpy(&backend->address, found->ai_addr, found->ai_addrlen);
    backend->address_length = found->ai_addrlen;
    bool bare_v6 = found->ai_family == AF_INET6 && strchr(host, ':');
    snprintf(backend->host, sizeof(backend->host), bare_v6 ? "[%.100s]:%u" : "%.100s:%u", host,
             port);
    freeaddrinfo(found);
    return XP_OK;
}

xp_status_t http_gateway_set_backend(http_gateway_t *gateway, const char *model_id,
                                     const char *host, uint16_t port, http_backend_state_t state,
                                     const char *reason)
{
    size_t length = strlen(model_id);
    gateway_backend_t target = {0};
    if (!length || length >= HTTP_GATEWAY_MAX_ID)
        return xp_fail(XP_INVALID, "a model's id must have 1 to %d bytes", HTTP_GATEWAY_MAX_ID - 1);
    if (host && port)
        XP_TRY(resolve(host, port, &target));
    else if (state == HTTP_BACKEND_UP)
        return xp_fail(XP_INVALID, "model %s is up but has no address", model_id);
    gateway_backend_t *backend = backend_find(gateway, model_id);
    if (!backend) {
        if (gateway->backend_count == HTTP_GATEWAY_MAX_MODELS)
            return xp_fail(XP_NO_MEMORY, "the gateway holds %d models at most",
                           HTTP_GATEWAY_MAX_MODELS);
        backend = calloc(1, sizeof(*backend));
        if (!backend)
            return xp_fail(XP_NO_MEMORY, "no memory for a backend");
        memcpy(backend->model, model_id, length + 1);
        backend->references = 1;
        backend->created = (int64_t)time(NULL);
        TAILQ_INSERT_TAIL(&gateway->backends, backend, entry);
        gateway->backend_count++;
    }
    if (target.address_length) {
        backend->address = target.address;
        backend->address_length = target.address_length;
        memcpy(backend->host, target.host, sizeof(backend->host));
    }
    bool went_down = backend->state == HTTP_BACKEND_UP && state == HTTP_BACKEND_DOWN;
    backend->state = state;
    snprintf(backend->reason, sizeof(backend->reason), "%s", reason ? reason : "");
    if (went_down)
        gateway_exchanges_gone(gateway, backend);
    return XP_OK;
}

void http_gateway_remove_backend(http_gateway_t *gateway, const char *model_id)
{
    gateway_backend_t *backend = backend_find(gateway, model_id);
    if (!backend)
        return;
    TAILQ_REMOVE(&gateway->backends, backend, entry);
    gateway->backend_count--;
    gateway_backend_release(backend);
}

void http_gateway_fail(http_gateway_t *gateway, const char *reason, uint32_t milliseconds)
{
    gateway_backend_t *backend;
    gateway->config.gone_timeout_ms = milliseconds;
    event_del(gateway->gone_timer); /* it may have been set for longer */
    TAILQ_FOREACH(backend, &gateway->backends, entry)
    {
        backend->state = HTTP_BACKEND_DOWN;
        snprintf(backend->reason, sizeof(backend->reason), "%s", reason);
        gateway_exchanges_gone(gateway, backend);
    }
}

void http_gateway_quiesce(http_gateway_t *gateway)
{
    gateway->quiescing = true;
    http_server_quiesce(gateway->server);
}

uint32_t http_gateway_open_requests(const http_gateway_t *gateway)
{
    /* The client of every exchange is among them. */
    return http_server_open_answers(gateway->server);
}

void http_gateway_stats(const http_gateway_t *gateway, http_gateway_stats_t *stats_out)
{
    http_server_stats_t server;
    gateway_backend_t *backend;
    http_server_stats(gateway->server, &server);
    memset(stats_out, 0, sizeof(*stats_out));
    stats_out->requests = gateway->requests;
    stats_out->errors = gateway->errors;
    stats_out->disconnects = gateway->disconnects;
    stats_out->retries = gateway->retries;
    stats_out->open = gateway->open;
    stats_out->connections = server.connections;
    TAILQ_FOREACH(backend, &gateway->backends, entry)
    {
        http_gateway_model_stats_t *m = &stats_out->models[stats_out->model_count++];
        memcpy(m->model, backend->model, sizeof(m->model));
        m->state = backend->state;
        m->requests = backend->requests;
        m->errors = backend->errors;
        m->open = backend->open;
    }
}
