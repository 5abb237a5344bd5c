/* SPDX-License-Identifier: MIT */
/*
 * Readers of OpenAI's chat and text completions.
 *
 * Owns nothing of its own; fills an http_api_request_t. Runs on the HTTP thread. Ranges are
 * OpenAI's; top_k, min_p, repetition_penalty, ignore_eos, min_tokens, stop_token_ids and
 * chat_template_kwargs are the extensions that SGLang's and vLLM's users send in `extra_body`.
 */
#include <float.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "http/http_api_private.h"

static const char *const unsupported[] = {
    "audio",           "prediction",   "web_search_options", "functions",
    "guided_json",     "guided_regex", "guided_choice",      "guided_grammar",
    "regex",           "ebnf",         "json_schema",        "structured_outputs",
    "use_beam_search", "lora_path",    "prompt_logprobs",    "continue_final_message",
    "chat_template",   NULL,
};

static xp_status_t parse_logit_bias(const json_t *root, engine_sampling_t *sampling,
                                    http_problem_t *problem)
{
    const json_t *map = http_api_get(root, "logit_bias");
    if (!map)
        return XP_OK;
    if (!json_is_object(map))
        return http_api_type_error(map, "logit_bias", "an object", problem);
    if (json_object_size(map) > ENGINE_MAX_BIAS)
        return http_problem_set(problem, 400, NULL, "logit_bias",
                                "'logit_bias' holds more than %d tokens", ENGINE_MAX_BIAS);
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)map, key, value)
    {
        char *end;
        long id = strtol(key, &end, 10);
        if (key[0] < '0' || key[0] > '9' || *end || id < 0 || id > INT32_MAX)
            return http_problem_set(problem, 400, NULL, "logit_bias",
                                    "'logit_bias' has the key \"%.40s\", which is no token id",
                                    key);
        double bias = json_is_number(value) ? json_number_value(value) : 1000;
        if (!(bias >= -100 && bias <= 100))
            return http_problem_set(problem, 400, NULL, "logit_bias",
                                    "'logit_bias' of token %ld must be a number from -100 to 100",
                                    id);
        sampling->bias[sampling->bias_count].id = (int32_t)id;
        sampling->bias[sampling->bias_count++].bias = (float)bias;
    }
    return XP_OK;
}

static xp_status_t parse_sampling(const json_t *root, engine_sampling_t *sampling,
                                  http_problem_t *problem)
{
    double temperature = 1, top_p = 1, min_p = 0, presence = 0, frequency = 0, repetition = 1;
    int64_t top_k = 0, seed = 0, min_tokens = 0;
    XP_TRY(http_api_number(root, "temperature", 0, 2, &temperature, problem));
    XP_TRY(http_api_number(root, "top_p", 0, 1, &top_p, problem));
    XP_TRY(http_api_number(root, "min_p", 0, 1, &min_p, problem));
    XP_TRY(http_api_number(root, "presence_penalty", -2, 2, &presence, problem));
    XP_TRY(http_api_number(root, "frequency_penalty", -2, 2, &frequency, problem));
    XP_TRY(http_api_number(root, "repetition_penalty", 0.01, 10, &repetition, problem));
    XP_TRY(http_api_integer(root, "top_k", -1, INT32_MAX, &top_k, problem));
    XP_TRY(http_api_integer(root, "seed", INT64_MIN, INT64_MAX, &seed, problem));
    XP_TRY(http_api_integer(root, "min_tokens", 0, INT32_MAX, &min_tokens, problem));
    XP_TRY(http_api_bool(root, "ignore_eos", &sampling->ignore_eos, problem));
    XP_TRY(http_api_bool(root, "skip_special_tokens", &sampling->skip_special_tokens, problem));
    XP_TRY(http_api_bool(root, "include_stop_str_in_output", &sampling->include_stop, problem));
    sampling->temperature = (float)temperature;
    /* 0 keeps the likeliest token only. */
    sampling->top_p = top_p > 0 ? (float)top_p : FLT_MIN;
    sampling->top_k = (int32_t)top_k;
    sampling->min_p = (float)min_p;
    sampling->presence_penalty = (float)presence;
    sampling->frequency_penalty = (float)frequency;
    sampling->repetition_penalty = (float)repetition;
    sampling->has_seed = http_api_get(root, "seed") != NULL;
    sampling->seed = (uint64_t)seed;
    sampling->min_new_tokens = (uint32_t)min_tokens;
    XP_TRY(http_api_stops(http_api_get(root, "stop"), "stop", sampling, problem));
    XP_TRY(http_api_stop_ids(http_api_get(root, "stop_token_ids"), "stop_token_ids", sampling,
                             problem));
    return parse_logit_bias(root, sampling, problem);
}

static xp_status_t parse_stream_options(http_api_request_t *request, http_problem_t *problem)
{
    const json_t *options = http_api_get(request->root, "stream_options");
    if (!options)
        return XP_OK;
    if (!json_is_object(options))
        return http_api_type_error(options, "stream_options", "an object", problem);
    if (!request->stream)
        return http_problem_set(problem, 400, NULL, "stream_options",
                                "'stream_options' is only allowed when 'stream' is true");
    return http_api_bool(options, "include_usage", &request->include_usage, problem);
}

static xp_status_t parse_response_format(const json_t *root, http_problem_t *problem)
{
    const json_t *format = http_api_get(root, "response_format");
    if (!format)
        return XP_OK;
    const char *type = json_string_value(json_object_get(format, "type"));
    if (type && !strcmp(type, "text"))
        return XP_OK;
    return http_problem_set(
        problem, 400, "unsupported_parameter", "response_format",
        "'response_format' of type \"%.40s\" is not supported; only \"text\" is", type ? type : "");
}

/* Remembers a string for http_api_request_fini(). Takes `string` over, also on failure. */
static xp_status_t own(http_api_request_t *request, char *string, http_problem_t *problem)
{
    if (string && request->owned_count == request->owned_capacity) {
        uint32_t capacity = request->owned_capacity ? request->owned_capacity * 2 : 16;
        char **owned = realloc(request->owned, capacity * sizeof(*owned));
        if (owned) {
            request->owned = owned;
            request->owned_capacity = capacity;
        } else {
            free(string);
            string = NULL;
        }
    }
    if (!string)
        return http_problem_set(problem, 503, NULL, NULL, "no memory for a message");
    request->owned[request->owned_count++] = string;
    return XP_OK;
}

static xp_status_t parse_tools(http_api_request_t *request, http_problem_t *problem)
{
    const json_t *tools = http_api_get(request->root, "tools");
    const json_t *choice = http_api_get(request->root, "tool_choice");
    const char *word = json_string_value(choice);
    if (choice && !(word && (!strcmp(word, "none") || !strcmp(word, "auto"))))
        return http_problem_set(
            problem, 400, "unsupported_parameter", "tool_choice",
            "'tool_choice' must be \"none\" or \"auto\"; a call cannot be forced");
    if (!tools)
        return XP_OK;
    if (!json_is_array(tools))
        return http_api_type_error(tools, "tools", "an array", problem);
    if (!json_array_size(tools) || (word && !strcmp(word, "none")))
        return XP_OK;
    XP_TRY(own(request, json_dumps(tools, JSON_PRESERVE_ORDER | JSON_ENCODE_ANY), problem));
    request->options.tools_json = request->owned[request->owned_count - 1];
    return XP_OK;
}

/* content: a string, or an array of {"type": "text", "text": ...} parts, joined by line feeds. */
static xp_status_t parse_content(http_api_request_t *request, const json_t *content, size_t index,
                                 chat_message_t *message, http_problem_t *problem)
{
    char param[64];
    if (json_is_string(content)) {
        message->content = json_string_value(content);
        return XP_OK;
    }
    snprintf(param, sizeof(param), "messages[%zu].content", index);
    if (!json_is_array(content))
        return http_api_type_error(content, param, "a string or an array of text parts", problem);
    size_t count = json_array_size(content), total = 1;
    for (size_t i = 0; i < count; i++) {
        const json_t *part = json_array_get(content, i);
        const char *type = json_string_value(json_object_get(part, "type"));
        const json_t *text = json_object_get(part, "text");
        snprintf(param, sizeof(param), "messages[%zu].content[%zu]", index, i);
        if (!type || strcmp(type, "text"))
            return http_problem_set(problem, 400, NULL, param,
                                    "'%s' is of type \"%.40s\"; this model takes only \"text\"",
                                    param, type ? type : "");
        if (!json_is_string(text))
            return http_problem_set(problem, 400, NULL, param, "'%s' has no string 'text'", param);
        total += json_string_length(text) + 1;
    }
    char *joined = malloc(total), *end = joined;
    XP_TRY(own(request, joined, problem));
    for (size_t i = 0; i < count; i++) {
        const json_t *text = json_object_get(json_array_get(content, i), "text");
        if (i)
            *end++ = '\n';
        memcpy(end, json_string_value(text), json_string_length(text));
        end += json_string_length(text);
    }
    *end = '\0';
    message->content = joined;
    return XP_OK;
}

static xp_status_t parse_role(const json_t *item, size_t index, chat_message_t *message,
                              http_problem_t *problem)
{
    static const char *const roles[][2] = {
        {"system", "system"},       {"developer", "system"}, {"user", "user"},
        {"assistant", "assistant"}, {"tool", "tool"},
    };
    char param[64];
    snprintf(param, sizeof(param), "messages[%zu].role", index);
    const char *role = json_string_value(json_object_get(item, "role"));
    for (size_t i = 0; role && i < sizeof(roles) / sizeof(roles[0]); i++) {
        if (!strcmp(role, roles[i][0])) {
            message->role = roles[i][1];
            return XP_OK;
        }
    }
    if (!role)
        return http_problem_set(problem, 400, NULL, param, "'%s' is missing or no string", param);
    return http_problem_set(
        problem, 400, NULL, param,
        "'%s' is \"%.40s\"; it must be system, developer, user, assistant or tool", param, role);
}

static xp_status_t parse_message(http_api_request_t *request, const json_t *item, size_t index,
                                 http_problem_t *problem)
{
    chat_message_t *message = &request->messages[index];
    char param[64];
    snprintf(param, sizeof(param), "messages[%zu]", index);
    if (!json_is_object(item))
        return http_api_type_error(item, param, "an object", problem);
    XP_TRY(parse_role(item, index, message, problem));
    const json_t *calls = http_api_get(item, "tool_calls");
    if (calls && json_array_size(calls)) {
        XP_TRY(own(request, json_dumps(calls, JSON_PRESERVE_ORDER | JSON_ENCODE_ANY), problem));
        message->tool_calls_json = request->owned[request->owned_count - 1];
    }
    const json_t *reasoning = http_api_get(item, "reasoning_content");
    if (json_is_string(reasoning))
        message->reasoning = json_string_value(reasoning);
    const json_t *content = http_api_get(item, "content");
    if (content)
        return parse_content(request, content, index, message, problem);
    if (strcmp(message->role, "assistant"))
        return http_problem_set(problem, 400, NULL, param, "'%s' has no content", param);
    return XP_OK;
}

xp_status_t http_api_parse_messages(http_api_request_t *request, http_problem_t *problem)
{
    const json_t *list = http_api_get(request->root, "messages");
    if (!list)
        return http_problem_set(problem, 400, "missing_required_parameter", "messages",
                                "'messages' is missing");
    if (!json_is_array(list))
        return http_api_type_error(list, "messages", "an array", problem);
    size_t count = json_array_size(list);
    if (!count || count > HTTP_API_MAX_MESSAGES)
        return http_problem_set(problem, 400, NULL, "messages",
                                "'messages' must hold 1 to %d messages", HTTP_API_MAX_MESSAGES);
    request->messages = calloc(count, sizeof(*request->messages));
    if (!request->messages)
        return http_problem_set(problem, 503, NULL, NULL, "no memory for %zu messages", count);
    request->message_count = (uint32_t)count;
    for (size_t i = 0; i < count; i++)
        XP_TRY(parse_message(request, json_array_get(list, i), i, problem));
    XP_TRY(parse_tools(request, problem));
    XP_TRY(http_api_bool(request->root, "add_generation_prompt",
                         &request->options.add_generation_prompt, problem));
    const json_t *arguments = http_api_get(request->root, "chat_template_kwargs");
    if (!arguments)
        return XP_OK;
    if (!json_is_object(arguments))
        return http_api_type_error(arguments, "chat_template_kwargs", "an object", problem);
    bool thinking = false;
    XP_TRY(http_api_bool(arguments, "enable_thinking", &thinking, problem));
    if (http_api_get(arguments, "enable_thinking"))
        request->options.enable_thinking = thinking;
    return XP_OK;
}

static xp_status_t parse_modalities(const json_t *root, http_problem_t *problem)
{
    const json_t *list = http_api_get(root, "modalities");
    for (size_t i = 0; i < json_array_size(list); i++) {
        const char *word = json_string_value(json_array_get(list, i));
        if (!word || strcmp(word, "text"))
            return http_problem_set(problem, 400, "unsupported_parameter", "modalities",
                                    "'modalities' must be [\"text\"]");
    }
    return XP_OK;
}

static xp_status_t parse_chat(http_api_request_t *request, http_problem_t *problem)
{
    const json_t *root = request->root;
    int64_t tokens = 0, top = 0;
    XP_TRY(http_api_parse_messages(request, problem));
    XP_TRY(parse_modalities(root, problem));
    XP_TRY(http_api_integer(root, "max_tokens", 1, INT32_MAX, &tokens, problem));
    XP_TRY(http_api_integer(root, "max_completion_tokens", 1, INT32_MAX, &tokens, problem));
    request->sampling[0].max_new_tokens = (uint32_t)tokens;
    XP_TRY(http_api_bool(root, "logprobs", &request->logprobs, problem));
    XP_TRY(http_api_integer(root, "top_logprobs", 0, ENGINE_MAX_LOGPROBS, &top, problem));
    if (top && !request->logprobs)
        return http_problem_set(problem, 400, NULL, "top_logprobs",
                                "'top_logprobs' needs 'logprobs' to be true");
    request->top_logprobs = (uint32_t)top;
    return XP_OK;
}

static xp_status_t parse_completion(http_api_request_t *request, http_problem_t *problem)
{
    const json_t *root = request->root;
    const json_t *prompt = http_api_get(root, "prompt");
    int64_t tokens = 16, best_of = request->n, top = 0;
    static const char *const refused[] = {"suffix", NULL};
    if (!prompt)
        return http_problem_set(problem, 400, "missing_required_parameter", "prompt",
                                "'prompt' is missing");
    XP_TRY(http_api_prompts(request, prompt, "prompt", problem));
    XP_TRY(http_api_refuse(root, refused, problem));
    XP_TRY(http_api_integer(root, "max_tokens", 0, INT32_MAX, &tokens, problem));
    XP_TRY(http_api_bool(root, "echo", &request->echo, problem));
    XP_TRY(http_api_integer(root, "best_of", 1, HTTP_API_MAX_CHOICES, &best_of, problem));
    if (best_of != request->n)
        return http_problem_set(problem, 400, "unsupported_parameter", "best_of",
                                "'best_of' must equal 'n'");
    const json_t *logprobs = http_api_get(root, "logprobs");
    request->logprobs = logprobs && !json_is_false(logprobs);
    if (request->logprobs)
        XP_TRY(http_api_integer(root, "logprobs", 0, ENGINE_MAX_LOGPROBS, &top, problem));
    request->top_logprobs = (uint32_t)top;
    request->discard_generated = tokens == 0;
    request->sampling[0].max_new_tokens = tokens ? (uint32_t)tokens : 1;
    request->sampling[0].prompt_logprobs = request->echo && request->logprobs;
    return XP_OK;
}

xp_status_t http_api_parse_openai(http_api_request_t *request, http_problem_t *problem)
{
    const json_t *root = request->root;
    int64_t n = 1;
    XP_TRY(http_api_refuse(root, unsupported, problem));
    XP_TRY(http_api_integer(root, "n", 1, HTTP_API_MAX_CHOICES, &n, problem));
    request->n = (uint32_t)n;
    XP_TRY(parse_stream_options(request, problem));
    XP_TRY(parse_response_format(root, problem));
    XP_TRY(http_api_make_sampling(request, 1, problem));
    XP_TRY(parse_sampling(root, &request->sampling[0], problem));
    XP_TRY(request->kind == HTTP_API_CHAT ? parse_chat(request, problem)
                                          : parse_completion(request, problem));
    request->sampling[0].want_logprobs = request->logprobs;
    request->sampling[0].top_logprobs = request->logprobs ? request->top_logprobs : 0;
    return XP_OK;
}
