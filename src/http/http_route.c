/* SPDX-License-Identifier: MIT */
/*
 * Routing by path and method.
 *
 * Owns nothing; runs on the HTTP thread; never looks into a body.
 */
#include "http/http_route.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static bool route_matches(const http_route_t *route, const char *path)
{
    size_t length = strlen(route->path);
    if (length > 1 && route->path[length - 1] == '/')
        return !strncmp(route->path, path, length) && path[length];
    return !strcmp(route->path, path);
}

static bool is_json_type(http_slice_t type)
{
    const char *semicolon = memchr(type.data, ';', type.length);
    if (semicolon)
        type.length = (size_t)(semicolon - type.data);
    while (type.length && type.data[type.length - 1] == ' ')
        type.length--;
    /* What `curl -d` says unless told otherwise: the body is then read as JSON all the same. */
    if (http_slice_equals_case(type, "application/json") ||
        http_slice_equals_case(type, "application/x-www-form-urlencoded"))
        return true;
    http_slice_t end = {type.data + type.length - 5, 5};
    return type.length > 5 && http_slice_equals_case(end, "+json");
}

void http_reply_problem(http_request_t *request, int status, const char *code, const char *param,
                        const char *format, ...)
{
    http_problem_t problem = {.status = status, .code = code};
    snprintf(problem.param, sizeof(problem.param), "%s", param ? param : "");
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(problem.message, sizeof(problem.message), format, arguments);
    va_end(arguments);
    http_request_fail(request, &problem);
}

void http_reply_text(http_request_t *request, int status, const char *content_type,
                     http_text_t *text)
{
    if (text->status != XP_OK)
        http_reply_problem(request, 500, NULL, NULL, "the answer is too large");
    else
        http_request_reply(request, status, content_type, NULL,
                           text->buf.data ? text->buf.data : "", text->buf.length);
    http_text_clear(text);
}

static void reply_405(http_request_t *request, const http_route_t *route)
{
    const char *allow = route->methods == HTTP_ROUTE_GET    ? "GET, HEAD"
                        : route->methods == HTTP_ROUTE_POST ? "POST"
                                                            : "GET, HEAD, POST";
    http_slice_t method = http_request_head(request)->method;
    http_problem_t problem = {.status = 405};
    char headers[64];
    snprintf(problem.message, sizeof(problem.message),
             "method %.*s is not allowed for %.200s; use %s", (int)method.length, method.data,
             route->path, allow);
    snprintf(headers, sizeof(headers), "Allow: %s\r\n", allow);
    http_text_t text;
    http_text_init(&text, 16 * 1024);
    http_problem_write(&problem, &text);
    http_text_append(&text, "\n", 1);
    http_request_reply(request, 405, "application/json", headers, text.buf.data, text.buf.length);
    http_text_fini(&text);
}

int http_route_find(const http_route_t *routes, http_request_t *request)
{
    const char *path = http_request_path(request);
    const http_head_t *head = http_request_head(request);
    const http_route_t *route = routes;
    while (route->path && !route_matches(route, path))
        route++;
    if (!route->path) {
        http_reply_problem(request, 404, NULL, NULL, "there is no %.200s here", path);
        return -1;
    }
    unsigned method = http_slice_equals(head->method, "GET") || http_request_is_head(request)
                          ? HTTP_ROUTE_GET
                      : http_slice_equals(head->method, "POST") ? HTTP_ROUTE_POST
                                                                : 0;
    if (!(method & route->methods)) {
        reply_405(request, route);
        return -1;
    }
    const http_slice_t *type = http_head_header(head, "content-type");
    if (method == HTTP_ROUTE_POST && type && http_request_body(request).length &&
        !is_json_type(*type)) {
        http_reply_problem(request, 415, NULL, NULL,
                           "the body's Content-Type is %.*s; send application/json",
                           (int)(type->length < 80 ? type->length : 80), type->data);
        return -1;
    }
    return route->id;
}
