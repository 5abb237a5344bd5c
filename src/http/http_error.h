/* SPDX-License-Identifier: MIT */
/*
 * Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}}.
 *
 * http_problem_t is what a request handler fills where it detects the error; one table gives each
 * HTTP status its type and default code.
 */
#ifndef XPOOL_HTTP_HTTP_ERROR_H
#define XPOOL_HTTP_HTTP_ERROR_H

#include "base/status.h"
#include "http/http_json.h"

typedef struct http_problem {
    int status;       /* HTTP; 0 = none */
    const char *code; /* static text; NULL: the status's default */
    char param[96];   /* the request's field; "" when none */
    char message[XP_ERROR_TEXT_MAX];
} http_problem_t;

/* Fills `problem` and records the same message as the thread's error. Returns XP_INVALID, so that a
 * parser ends with `return http_problem_set(...)`. `code` and `param` may be NULL. */
xp_status_t http_problem_set(http_problem_t *problem, int status, const char *code,
                             const char *param, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
/* Appends the error object without a line end. */
void http_problem_write(const http_problem_t *problem, http_text_t *text);
/* Headers for a status: Retry-After where a client may try again, else "". Whole lines with CRLF.
 */
const char *http_problem_headers(int status);
#endif
