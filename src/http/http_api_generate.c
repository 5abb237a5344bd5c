/* SPDX-License-Identifier: MIT */
/*
 * Reader of SGLang's native /generate.
 *
 * Owns nothing of its own; fills an http_api_request_t. Runs on the HTTP thread. Names, defaults
 * and ranges are SGLang's: max_new_tokens 128, temperature 1, top_k -1 for off.
 */
#include <stdlib.h>

#include "http/http_api_private.h"

static const char *const unsupported[] = {
    "input_embeds",
    "image_data",
    "audio_data",
    "video_data",
    "lora_path",
    "session_params",
    "return_hidden_states",
    "custom_logit_processor",
    "token_ids_logprob",
    NULL,
};

static const char *const unsupported_sampling[] = {
    "regex", "json_schema", "ebnf", "structural_tag", "stop_regex", NULL,
};

static xp_status_t parse_sampling(const json_t *object, engine_sampling_t *sampling, int64_t *n,
                                  http_problem_t *problem)
{
    double temperature = 1, top_p = 1, min_p = 0, presence = 0, frequency = 0, repetition = 1;
    int64_t top_k = -1, seed = 0, minimum = 0, maximum = 128;
    bool keep_stop = true;
    if (!json_is_object(object))
        return http_api_type_error(object, "sampling_params", "an object", problem);
    XP_TRY(http_api_refuse(object, unsupported_sampling, problem));
    XP_TRY(http_api_number(object, "temperature", 0, 1000, &temperature, problem));
    XP_TRY(http_api_number(object, "top_p", 1e-6, 1, &top_p, problem));
    XP_TRY(http_api_number(object, "min_p", 0, 1, &min_p, problem));
    XP_TRY(http_api_number(object, "presence_penalty", -2, 2, &presence, problem));
    XP_TRY(http_api_number(object, "frequency_penalty", -2, 2, &frequency, problem));
    XP_TRY(http_api_number(object, "repetition_penalty", 0.01, 10, &repetition, problem));
    XP_TRY(http_api_integer(object, "top_k", -1, INT32_MAX, &top_k, problem));
    XP_TRY(http_api_integer(object, "seed", INT64_MIN, INT64_MAX, &seed, problem));
    XP_TRY(http_api_integer(object, "sampling_seed", INT64_MIN, INT64_MAX, &seed, problem));
    XP_TRY(http_api_integer(object, "min_new_tokens", 0, INT32_MAX, &minimum, problem));
    XP_TRY(http_api_integer(object, "max_new_tokens", 0, INT32_MAX, &maximum, problem));
    XP_TRY(http_api_integer(object, "n", 1, HTTP_API_MAX_CHOICES, n, problem));
    XP_TRY(http_api_bool(object, "ignore_eos", &sampling->ignore_eos, problem));
    XP_TRY(http_api_bool(object, "skip_special_tokens", &sampling->skip_special_tokens, problem));
    XP_TRY(http_api_bool(object, "spaces_between_special_tokens", &keep_stop, problem));
    XP_TRY(http_api_bool(object, "no_stop_trim", &sampling->include_stop, problem));
    XP_TRY(http_api_stops(http_api_get(object, "stop"), "stop", sampling, problem));
    XP_TRY(http_api_stop_ids(http_api_get(object, "stop_token_ids"), "stop_token_ids", sampling,
                             problem));
    sampling->temperature = (float)temperature;
    sampling->top_p = (float)top_p;
    sampling->min_p = (float)min_p;
    sampling->presence_penalty = (float)presence;
    sampling->frequency_penalty = (float)frequency;
    sampling->repetition_penalty = (float)repetition;
    sampling->top_k = (int32_t)top_k;
    sampling->has_seed = http_api_get(object, "seed") || http_api_get(object, "sampling_seed");
    sampling->seed = (uint64_t)seed;
    sampling->min_new_tokens = (uint32_t)minimum;
    sampling->max_new_tokens = (uint32_t)maximum;
    return XP_OK;
}

static xp_status_t parse_all_sampling(http_api_request_t *request, http_problem_t *problem)
{
    const json_t *value = http_api_get(request->root, "sampling_params");
    XP_TRY(http_api_make_sampling(request, request->prompt_count, problem));
    if (json_is_array(value) && json_array_size(value) != request->prompt_count)
        return http_problem_set(problem, 400, NULL, "sampling_params",
                                "'sampling_params' holds %zu objects for %u prompts",
                                json_array_size(value), request->prompt_count);
    json_t *none = value ? NULL : json_object();
    xp_status_t status = XP_OK;
    int64_t n = 1;
    for (uint32_t i = 0; i < request->prompt_count && status == XP_OK; i++) {
        int64_t own_n = 1;
        const json_t *object = !value                 ? none
                               : json_is_array(value) ? json_array_get(value, i)
                                                      : value;
        status = parse_sampling(object, &request->sampling[i], &own_n, problem);
        if (status == XP_OK && i && own_n != n)
            status = http_problem_set(problem, 400, NULL, "n",
                                      "'n' must be the same for all prompts of a batch");
        n = own_n;
    }
    json_decref(none);
    XP_TRY(status);
    request->n = (uint32_t)n;
    /* 0 asks for the prompt's log-probabilities only; the engine counts from 1. */
    uint32_t zeros = 0;
    for (uint32_t i = 0; i < request->prompt_count; i++)
        zeros += request->sampling[i].max_new_tokens == 0;
    if (zeros && zeros < request->prompt_count)
        return http_problem_set(
            problem, 400, NULL, "max_new_tokens",
            "'max_new_tokens' must be 0 for all prompts of a batch or for none");
    request->discard_generated = zeros > 0;
    for (uint32_t i = 0; zeros && i < request->prompt_count; i++)
        request->sampling[i].max_new_tokens = 1;
    return XP_OK;
}

xp_status_t http_api_parse_generate(http_api_request_t *request, http_problem_t *problem)
{
    const json_t *root = request->root;
    const json_t *text = http_api_get(root, "text");
    const json_t *ids = http_api_get(root, "input_ids");
    int64_t top = 0, start = -1;
    XP_TRY(http_api_refuse(root, unsupported, problem));
    if (!text == !ids)
        return http_problem_set(problem, 400, "missing_required_parameter",
                                text ? "input_ids" : "text",
                                "exactly one of 'text' and 'input_ids' must be given");
    if (text && !json_is_string(text) && !json_is_string(json_array_get(text, 0)))
        return http_api_type_error(text, "text", "a string or an array of strings", problem);
    if (ids && !json_is_array(ids))
        return http_api_type_error(ids, "input_ids", "an array of token ids", problem);
    XP_TRY(http_api_prompts(request, text ? text : ids, text ? "text" : "input_ids", problem));
    XP_TRY(parse_all_sampling(request, problem));
    XP_TRY(http_api_bool(root, "return_logprob", &request->logprobs, problem));
    XP_TRY(http_api_integer(root, "top_logprobs_num", 0, ENGINE_MAX_LOGPROBS, &top, problem));
    XP_TRY(http_api_integer(root, "logprob_start_len", -1, INT32_MAX, &start, problem));
    XP_TRY(http_api_bool(root, "return_text_in_logprobs", &request->text_in_logprobs, problem));
    request->top_logprobs = request->logprobs ? (uint32_t)top : 0;
    request->logprob_start = request->logprobs ? start : -1;
    request->batch = request->batch || request->n > 1;
    for (uint32_t i = 0; i < request->sampling_count; i++) {
        request->sampling[i].want_logprobs = request->logprobs;
        request->sampling[i].top_logprobs = request->top_logprobs;
        request->sampling[i].prompt_logprobs = request->logprob_start >= 0;
    }
    return XP_OK;
}
