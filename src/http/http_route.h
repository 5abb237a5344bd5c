/* SPDX-License-Identifier: MIT */
/* Which handler a request goes to, and the answers every server gives alike: 404, 405, 415, JSON.
 */
#ifndef XPOOL_HTTP_HTTP_ROUTE_H
#define XPOOL_HTTP_HTTP_ROUTE_H

#include "http/http_server.h"

#define HTTP_ROUTE_GET  1u
#define HTTP_ROUTE_POST 2u

typedef struct http_route {
    const char *path; /* exact, or a prefix when it ends in '/' */
    unsigned methods;
    int id; /* >= 0 */
} http_route_t;

/* Finds the route (`routes` ends with a NULL path). When there is none, the method is wrong, or a
 * POST body is declared to be something else than JSON, the request is answered and -1 returned.
 * HEAD counts as GET. */
int http_route_find(const http_route_t *routes, http_request_t *request);
/* Sends and clears `text`; a text that failed to grow becomes a 500. */
void http_reply_text(http_request_t *request, int status, const char *content_type,
                     http_text_t *text);
void http_reply_problem(http_request_t *request, int status, const char *code, const char *param,
                        const char *format, ...) __attribute__((format(printf, 5, 6)));
#endif
