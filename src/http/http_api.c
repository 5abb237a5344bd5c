/* SPDX-License-Identifier: MIT */
/*
 * Reading request fields: typed getters with bounds, prompts, stops, ids; and the entry point.
 *
 * Owns the parsed request until http_api_request_fini(). Runs on the HTTP thread. It never asks
 * engine or tokenizer anything, so that it can be fuzzed alone.
 */
#include "http/http_api.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "http/http_api_private.h"

static const char *type_name(const json_t *value)
{
    switch (json_typeof(value)) {
    case JSON_OBJECT:
        return "an object";
    case JSON_ARRAY:
        return "an array";
    case JSON_STRING:
        return "a string";
    case JSON_INTEGER:
        return "an integer";
    case JSON_REAL:
        return "a number";
    case JSON_TRUE:
    case JSON_FALSE:
        return "a boolean";
    default:
        return "null";
    }
}

xp_status_t http_api_type_error(const json_t *value, const char *param, const char *wanted,
                                http_problem_t *problem)
{
    return http_problem_set(problem, 400, NULL, param, "'%s' must be %s, not %s", param, wanted,
                            type_name(value));
}

const json_t *http_api_get(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);
    return json_is_null(value) ? NULL : value;
}

xp_status_t http_api_bool(const json_t *object, const char *key, bool *value,
                          http_problem_t *problem)
{
    const json_t *found = http_api_get(object, key);
    if (!found)
        return XP_OK;
    if (!json_is_boolean(found))
        return http_api_type_error(found, key, "a boolean", problem);
    *value = json_is_true(found);
    return XP_OK;
}

xp_status_t http_api_number(const json_t *object, const char *key, double low, double high,
                            double *value, http_problem_t *problem)
{
    const json_t *found = http_api_get(object, key);
    if (!found)
        return XP_OK;
    if (!json_is_number(found))
        return http_api_type_error(found, key, "a number", problem);
    double number = json_number_value(found);
    if (!(number >= low && number <= high))
        return http_problem_set(problem, 400, NULL, key,
                                "'%s' must be from %g to %g, and %g is not", key, low, high,
                                number);
    *value = number;
    return XP_OK;
}

xp_status_t http_api_integer(const json_t *object, const char *key, int64_t low, int64_t high,
                             int64_t *value, http_problem_t *problem)
{
    const json_t *found = http_api_get(object, key);
    if (!found)
        return XP_OK;
    int64_t number;
    if (json_is_integer(found)) {
        number = json_integer_value(found);
    } else if (json_is_real(found) && fabs(json_real_value(found)) < 9e15 &&
               json_real_value(found) == floor(json_real_value(found))) {
        number = (int64_t)json_real_value(found);
    } else {
        return http_api_type_error(found, key, "an integer", problem);
    }
    if (number < low || number > high)
        return http_problem_set(problem, 400, NULL, key,
                                "'%s' must be from %lld to %lld, and %lld is not", key,
                                (long long)low, (long long)high, (long long)number);
    *value = number;
    return XP_OK;
}

xp_status_t http_api_string(const json_t *object, const char *key, const char **value,
                            http_problem_t *problem)
{
    const json_t *found = http_api_get(object, key);
    if (!found)
        return XP_OK;
    if (!json_is_string(found))
        return http_api_type_error(found, key, "a string", problem);
    *value = json_string_value(found);
    return XP_OK;
}

xp_status_t http_api_ids(const json_t *array, const char *param, int32_t **ids_out,
                         uint32_t *count_out, http_problem_t *problem)
{
    size_t count = json_array_size(array);
    int32_t *ids = malloc((count ? count : 1) * sizeof(*ids));
    if (!ids)
        return http_problem_set(problem, 503, NULL, NULL, "no memory for %zu token ids", count);
    for (size_t i = 0; i < count; i++) {
        const json_t *item = json_array_get(array, i);
        if (!json_is_integer(item) || json_integer_value(item) < 0 ||
            json_integer_value(item) > INT32_MAX) {
            free(ids);
            return http_problem_set(problem, 400, NULL, param,
                                    "'%s' must hold token ids, and item %zu is none", param, i);
        }
        ids[i] = (int32_t)json_integer_value(item);
    }
    *ids_out = ids;
    *count_out = (uint32_t)count;
    return XP_OK;
}

static xp_status_t stop_add(const json_t *value, const char *param, engine_sampling_t *sampling,
                            http_problem_t *problem)
{
    if (!json_is_string(value))
        return http_api_type_error(value, param, "a string or an array of strings", problem);
    size_t length = json_string_length(value);
    if (!length)
        return http_problem_set(problem, 400, NULL, param, "'%s' holds an empty string", param);
    if (length >= ENGINE_MAX_STOP_BYTES)
        return http_problem_set(problem, 400, NULL, param,
                                "'%s' holds a string of %zu bytes; the limit is %d", param, length,
                                ENGINE_MAX_STOP_BYTES - 1);
    if (sampling->stop_count == ENGINE_MAX_STOPS)
        return http_problem_set(problem, 400, NULL, param, "'%s' holds more than %d strings", param,
                                ENGINE_MAX_STOPS);
    memcpy(sampling->stops[sampling->stop_count++], json_string_value(value), length + 1);
    return XP_OK;
}

xp_status_t http_api_stops(const json_t *value, const char *param, engine_sampling_t *sampling,
                           http_problem_t *problem)
{
    if (!value)
        return XP_OK;
    if (!json_is_array(value))
        return stop_add(value, param, sampling, problem);
    for (size_t i = 0; i < json_array_size(value); i++)
        XP_TRY(stop_add(json_array_get(value, i), param, sampling, problem));
    return XP_OK;
}

xp_status_t http_api_stop_ids(const json_t *value, const char *param, engine_sampling_t *sampling,
                              http_problem_t *problem)
{
    if (!value)
        return XP_OK;
    if (!json_is_array(value))
        return http_api_type_error(value, param, "an array of token ids", problem);
    if (json_array_size(value) > ENGINE_MAX_STOP_IDS)
        return http_problem_set(problem, 400, NULL, param, "'%s' holds more than %d ids", param,
                                ENGINE_MAX_STOP_IDS);
    int32_t *ids;
    uint32_t count;
    XP_TRY(http_api_ids(value, param, &ids, &count, problem));
    memcpy(sampling->stop_ids, ids, count * sizeof(*ids));
    sampling->stop_id_count = count;
    free(ids);
    return XP_OK;
}

static xp_status_t prompt_from(const json_t *value, const char *param, http_api_prompt_t *prompt,
                               http_problem_t *problem)
{
    if (json_is_string(value)) {
        prompt->text = json_string_value(value);
        prompt->length = json_string_length(value);
        return XP_OK;
    }
    if (!json_is_array(value))
        return http_api_type_error(value, param, "a string or an array of token ids", problem);
    return http_api_ids(value, param, &prompt->ids, &prompt->id_count, problem);
}

xp_status_t http_api_prompts(http_api_request_t *request, const json_t *value, const char *param,
                             http_problem_t *problem)
{
    /* An array of strings or arrays is a batch; an array of integers is one prompt of ids. */
    const json_t *first = json_is_array(value) ? json_array_get(value, 0) : NULL;
    bool batch = first && (json_is_string(first) || json_is_array(first));
    if (json_is_array(value) && !first)
        return http_problem_set(problem, 400, NULL, param, "'%s' is empty", param);
    size_t count = batch ? json_array_size(value) : 1;
    if (count > HTTP_API_MAX_SEQUENCES)
        return http_problem_set(problem, 400, NULL, param,
                                "'%s' holds %zu prompts; the limit is %d", param, count,
                                HTTP_API_MAX_SEQUENCES);
    request->prompts = calloc(count, sizeof(*request->prompts));
    if (!request->prompts)
        return http_problem_set(problem, 503, NULL, NULL, "no memory for %zu prompts", count);
    request->prompt_count = (uint32_t)count;
    request->batch = batch;
    for (size_t i = 0; i < count; i++) {
        const json_t *item = batch ? json_array_get(value, i) : value;
        if (batch && json_typeof(item) != json_typeof(first))
            return http_problem_set(problem, 400, NULL, param, "'%s' mixes texts and token ids",
                                    param);
        XP_TRY(prompt_from(item, param, &request->prompts[i], problem));
    }
    return XP_OK;
}

xp_status_t http_api_check_sequences(const http_api_request_t *request, http_problem_t *problem)
{
    uint32_t prompts = request->prompt_count ? request->prompt_count : 1;
    if (prompts * request->n > HTTP_API_MAX_SEQUENCES)
        return http_problem_set(problem, 400, NULL, "n",
                                "%u prompts with n = %u are more than %d answers", prompts,
                                request->n, HTTP_API_MAX_SEQUENCES);
    return XP_OK;
}

xp_status_t http_api_refuse(const json_t *root, const char *const *names, http_problem_t *problem)
{
    for (; *names; names++) {
        const json_t *value = http_api_get(root, *names);
        bool empty = !value || json_is_false(value) ||
                     (json_is_array(value) && !json_array_size(value)) ||
                     (json_is_object(value) && !json_object_size(value)) ||
                     (json_is_string(value) && !json_string_length(value));
        if (!empty)
            return http_problem_set(problem, 400, "unsupported_parameter", *names,
                                    "'%s' is not supported by this server", *names);
    }
    return XP_OK;
}

xp_status_t http_api_make_sampling(http_api_request_t *request, uint32_t count,
                                   http_problem_t *problem)
{
    request->sampling = calloc(count, sizeof(*request->sampling));
    if (!request->sampling)
        return http_problem_set(problem, 503, NULL, NULL, "no memory for sampling parameters");
    request->sampling_count = count;
    for (uint32_t i = 0; i < count; i++)
        engine_sampling_default(&request->sampling[i]);
    return XP_OK;
}

xp_status_t http_api_parse(http_api_kind_t kind, const char *body, size_t length,
                           http_api_request_t *request_out, http_problem_t *problem_out)
{
    http_api_request_t request = {.kind = kind, .n = 1, .logprob_start = -1};
    request.options.add_generation_prompt = true;
    request.options.enable_thinking = -1;
    xp_status_t status = http_json_parse_object(body, length, &request.root);
    if (status != XP_OK)
        return http_problem_set(problem_out, 400, "invalid_json", NULL, "%s",
                                xp_error_last()->text);
    status = http_api_string(request.root, "model", &request.model, problem_out);
    if (status == XP_OK)
        status = http_api_bool(request.root, "stream", &request.stream, problem_out);
    if (status == XP_OK)
        status = kind == HTTP_API_GENERATE ? http_api_parse_generate(&request, problem_out)
                                           : http_api_parse_openai(&request, problem_out);
    if (status == XP_OK)
        status = http_api_check_sequences(&request, problem_out);
    if (status != XP_OK) {
        http_api_request_fini(&request);
        return status;
    }
    *request_out = request;
    return XP_OK;
}

void http_api_request_fini(http_api_request_t *request)
{
    for (uint32_t i = 0; i < request->prompt_count; i++)
        free(request->prompts[i].ids);
    free(request->prompts);
    free(request->sampling);
    free(request->messages);
    for (uint32_t i = 0; i < request->owned_count; i++)
        free(request->owned[i]);
    free(request->owned);
    json_decref(request->root);
    memset(request, 0, sizeof(*request));
}
