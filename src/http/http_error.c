/* SPDX-License-Identifier: MIT */
/*
 * The table of HTTP errors and their JSON form.
 *
 * Owns nothing; runs on any thread; never sends anything.
 */
#include "http/http_error.h"

#include <stdarg.h>
#include <stdio.h>

typedef struct error_row {
    int status;
    const char *type, *code; /* NULL code: null */
    const char *headers;
} error_row_t;

static const error_row_t error_table[] = {
    {400, "invalid_request_error", NULL, ""},
    {404, "invalid_request_error", "not_found", ""},
    {405, "invalid_request_error", "method_not_allowed", ""},
    {408, "timeout_error", "request_timeout", ""},
    {413, "invalid_request_error", "request_too_large", ""},
    {415, "invalid_request_error", "unsupported_media_type", ""},
    {429, "rate_limit_error", "rate_limit_exceeded", "Retry-After: 1\r\n"},
    {431, "invalid_request_error", "headers_too_large", ""},
    {500, "server_error", "internal_error", ""},
    {501, "invalid_request_error", "not_implemented", ""},
    {502, "server_error", "backend_failed", ""},
    {503, "server_error", "service_unavailable", "Retry-After: 2\r\n"},
    {504, "server_error", "timeout", ""},
    {505, "invalid_request_error", "http_version", ""},
};

static const error_row_t *error_row(int status)
{
    static const error_row_t other = {0, "server_error", NULL, ""};
    for (size_t i = 0; i < sizeof(error_table) / sizeof(error_table[0]); i++)
        if (error_table[i].status == status)
            return &error_table[i];
    return &other;
}

xp_status_t http_problem_set(http_problem_t *problem, int status, const char *code,
                             const char *param, const char *format, ...)
{
    problem->status = status;
    problem->code = code;
    snprintf(problem->param, sizeof(problem->param), "%s", param ? param : "");
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(problem->message, sizeof(problem->message), format, arguments);
    va_end(arguments);
    return xp_fail(XP_INVALID, "%s", problem->message);
}

void http_problem_write(const http_problem_t *problem, http_text_t *text)
{
    const error_row_t *row = error_row(problem->status);
    http_text_puts(text, "{\"error\":{\"message\":");
    http_text_json_string(text, problem->message);
    http_text_puts(text, ",\"type\":");
    http_text_json_string(text, row->type);
    http_text_puts(text, ",\"param\":");
    http_text_json_string(text, problem->param[0] ? problem->param : NULL);
    http_text_puts(text, ",\"code\":");
    http_text_json_string(text, problem->code ? problem->code : row->code);
    http_text_puts(text, "}}");
}

const char *http_problem_headers(int status)
{
    return error_row(status)->headers;
}
