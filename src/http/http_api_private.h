/* SPDX-License-Identifier: MIT */
/* What the readers of request bodies share among themselves. */
#ifndef XPOOL_HTTP_HTTP_API_PRIVATE_H
#define XPOOL_HTTP_HTTP_API_PRIVATE_H

#include "http/http_api.h"

/* The member, or NULL when it is absent or null. */
const json_t *http_api_get(const json_t *object, const char *key);
xp_status_t http_api_type_error(const json_t *value, const char *param, const char *wanted,
                                http_problem_t *problem);
/* Refuses each named field that is given and not empty or false. `names` ends with NULL. */
xp_status_t http_api_refuse(const json_t *root, const char *const *names, http_problem_t *problem);
xp_status_t http_api_make_sampling(http_api_request_t *request, uint32_t count,
                                   http_problem_t *problem);
xp_status_t http_api_check_sequences(const http_api_request_t *request, http_problem_t *problem);
/* The reader of chat and text completions; request->root and ->kind are set. */
xp_status_t http_api_parse_openai(http_api_request_t *request, http_problem_t *problem);
#endif
