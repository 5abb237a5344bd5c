/* SPDX-License-Identifier: MIT */
/*
 * Between text and ids: tokenizing prompts, rendering chats, token bytes, log-probability lists,
 * and the paths /tokenize and /detokenize.
 *
 * Owns nothing; runs on the HTTP thread; never submits anything.
 */
#include "http/instance_private.h"

#include <stdlib.h>
#include <string.h>

xp_status_t instance_logprobs_add(instance_logprobs_t *list, const engine_logprob_t *chosen,
                                  const engine_logprob_t *top, uint32_t top_count)
{
    if (list->count == list->capacity) {
        uint32_t capacity = list->capacity ? list->capacity * 2 : 128;
        size_t stride = list->stride ? list->stride : 1;
        engine_logprob_t *new_chosen = realloc(list->chosen, capacity * sizeof(*new_chosen));
        if (new_chosen)
            list->chosen = new_chosen;
        engine_logprob_t *new_top = realloc(list->top, capacity * stride * sizeof(*new_top));
        if (new_top)
            list->top = new_top;
        uint8_t *new_count = realloc(list->top_count, capacity);
        if (new_count)
            list->top_count = new_count;
        if (!new_chosen || !new_top || !new_count)
            return xp_fail(XP_NO_MEMORY, "no memory for log-probabilities");
        list->capacity = capacity;
    }
    if (top_count > list->stride)
        top_count = list->stride;
    list->chosen[list->count] = *chosen;
    list->top_count[list->count] = (uint8_t)top_count;
    if (top_count)
        memcpy(list->top + (size_t)list->count * list->stride, top, top_count * sizeof(*top));
    list->count++;
    return XP_OK;
}

void instance_logprobs_fini(instance_logprobs_t *list)
{
    free(list->chosen);
    free(list->top);
    free(list->top_count);
    memset(list, 0, sizeof(*list));
}

http_slice_t instance_token_bytes(const http_instance_t *instance, int32_t id)
{
    const tokenizer_t *tokenizer = engine_tokenizer(instance->config.engine);
    http_slice_t bytes = {"", 0};
    if (!tokenizer || id < 0 || (uint32_t)id >= tokenizer_vocab_size(tokenizer) ||
        !tokenizer_token_text(tokenizer, id))
        return bytes;
    bytes.length = tokenizer_token_bytes(tokenizer, id, &bytes.data);
    return bytes;
}

size_t instance_longest_token(const http_instance_t *instance)
{
    const tokenizer_t *tokenizer = engine_tokenizer(instance->config.engine);
    size_t longest = 0;
    for (uint32_t id = 0; tokenizer && id < tokenizer_vocab_size(tokenizer); id++) {
        http_slice_t bytes = instance_token_bytes(instance, (int32_t)id);
        longest = bytes.length > longest ? bytes.length : longest;
    }
    return longest;
}

bool instance_ends_content(const instance_sequence_t *sequence, int32_t token)
{
    const instance_job_t *job = sequence->job;
    const http_api_request_t *api = &job->api;
    const engine_sampling_t *sampling =
        &api->sampling[api->sampling_count > 1 ? sequence->index / api->n : 0];
    const model_spec_t *spec = engine_spec(job->instance->config.engine);
    if (sampling->include_stop)
        return false;
    for (uint32_t i = 0; i < spec->eos_count && !sampling->ignore_eos; i++)
        if (spec->eos_tokens[i] == token)
            return true;
    for (uint32_t i = 0; i < sampling->stop_id_count; i++)
        if (sampling->stop_ids[i] == token)
            return true;
    return false;
}

static xp_status_t need_tokenizer(const http_instance_t *instance, const tokenizer_t **out,
                                  http_problem_t *problem)
{
    *out = engine_tokenizer(instance->config.engine);
    if (!*out)
        return http_problem_set(problem, 400, "no_tokenizer", NULL,
                                "model %s has no tokenizer; send token ids", instance->model_id);
    return XP_OK;
}

xp_status_t instance_tokenize(const http_instance_t *instance, const char *text, size_t length,
                              bool add_special_tokens, int32_t **ids_out, uint32_t *count_out,
                              http_problem_t *problem)
{
    const tokenizer_t *tokenizer;
    XP_TRY(need_tokenizer(instance, &tokenizer, problem));
    int32_t *ids;
    size_t count;
    if (tokenizer_encode(tokenizer, text, length, add_special_tokens, true, &ids, &count) != XP_OK)
        return http_problem_set(problem, 400, NULL, NULL, "%s", xp_error_last()->text);
    if (!ids || count > UINT32_MAX) {
        free(ids);
        ids = calloc(1, sizeof(*ids));
        count = 0;
        if (!ids)
            return http_problem_set(problem, 503, NULL, NULL, "no memory for token ids");
    }
    *ids_out = ids;
    *count_out = (uint32_t)count;
    return XP_OK;
}

xp_status_t instance_render_chat(const http_instance_t *instance, const http_api_request_t *request,
                                 xp_buf_t *text_out, http_problem_t *problem)
{
    const chat_template_t *chat = instance->config.chat_template;
    if (!chat)
        return http_problem_set(problem, 400, "no_chat_template", "messages",
                                "model %s takes no chat requests: %.500s", instance->model_id,
                                instance->chat_reason);
    xp_status_t status = chat_template_render(chat, request->messages, request->message_count,
                                              &request->options, text_out);
    if (status != XP_OK)
        return http_problem_set(
            problem, 400, NULL,
            status == XP_UNSUPPORTED && request->options.tools_json ? "tools" : "messages", "%s",
            xp_error_last()->text);
    return XP_OK;
}

static void write_ids(http_text_t *text, const int32_t *ids, uint32_t count)
{
    http_text_puts(text, "[");
    for (uint32_t i = 0; i < count; i++)
        http_text_printf(text, i ? ",%d" : "%d", ids[i]);
    http_text_puts(text, "]");
}

static xp_status_t check_model(const http_instance_t *instance, const json_t *root,
                               http_problem_t *problem)
{
    const char *model = NULL;
    XP_TRY(http_api_string(root, "model", &model, problem));
    if (model && strcmp(model, instance->model_id))
        return http_problem_set(problem, 404, "model_not_found", "model",
                                "the model \"%.100s\" does not exist here; this is \"%.100s\"",
                                model, instance->model_id);
    return XP_OK;
}

/* Answers {"tokens", "count"} for one text, or lists of both for an array of texts. */
static xp_status_t tokenize_texts(http_instance_t *instance, const json_t *value, const char *param,
                                  bool special, http_problem_t *problem)
{
    http_text_t *text = &instance->text;
    bool batch = json_is_array(value);
    size_t count = batch ? json_array_size(value) : 1;
    http_text_t counts;
    http_text_init(&counts, 1u << 20);
    xp_status_t status = XP_OK;
    http_text_puts(text, batch ? "{\"tokens\":[" : "{\"tokens\":");
    for (size_t i = 0; i < count && status == XP_OK; i++) {
        const json_t *item = batch ? json_array_get(value, i) : value;
        int32_t *ids;
        uint32_t id_count;
        if (!json_is_string(item)) {
            status = http_problem_set(problem, 400, NULL, param,
                                      "'%s' must be a string or an array of strings", param);
            break;
        }
        status = instance_tokenize(instance, json_string_value(item), json_string_length(item),
                                   special, &ids, &id_count, problem);
        if (status != XP_OK)
            break;
        if (i)
            http_text_puts(text, ",");
        write_ids(text, ids, id_count);
        http_text_printf(&counts, i ? ",%u" : "%u", id_count);
        free(ids);
    }
    http_text_puts(text, batch ? "],\"count\":[" : ",\"count\":");
    http_text_append(text, counts.buf.data ? counts.buf.data : "", counts.buf.length);
    http_text_printf(text, "%s,\"max_model_len\":%u}\n", batch ? "]" : "",
                     engine_max_context(instance->config.engine));
    http_text_fini(&counts);
    return status;
}

/* {"messages": ...}: the ids a chat request of these messages would start from. */
static xp_status_t tokenize_messages(http_instance_t *instance, json_t *root, bool special,
                                     http_problem_t *problem)
{
    http_api_request_t request = {.kind = HTTP_API_CHAT, .n = 1, .root = json_incref(root)};
    request.options.add_generation_prompt = true;
    request.options.enable_thinking = -1;
    xp_buf_t rendered;
    xp_buf_init(&rendered, TOKENIZER_MAX_TEXT_BYTES);
    int32_t *ids = NULL;
    uint32_t count = 0;
    xp_status_t status = http_api_parse_messages(&request, problem);
    if (status == XP_OK)
        status = instance_render_chat(instance, &request, &rendered, problem);
    if (status == XP_OK)
        status = instance_tokenize(instance, rendered.data ? rendered.data : "", rendered.length,
                                   special, &ids, &count, problem);
    if (status == XP_OK) {
        http_text_puts(&instance->text, "{\"tokens\":");
        write_ids(&instance->text, ids, count);
        http_text_printf(&instance->text, ",\"count\":%u,\"max_model_len\":%u}\n", count,
                         engine_max_context(instance->config.engine));
        free(ids);
    }
    xp_buf_fini(&rendered);
    http_api_request_fini(&request);
    return status;
}

static xp_status_t tokenize(http_instance_t *instance, json_t *root, http_problem_t *problem)
{
    const char *names[] = {"prompt", "text", "messages"};
    for (size_t i = 0; i < 3; i++) {
        const json_t *value = json_object_get(root, names[i]);
        if (!value || json_is_null(value))
            continue;
        bool special = i < 2;
        XP_TRY(http_api_bool(root, "add_special_tokens", &special, problem));
        return i < 2 ? tokenize_texts(instance, value, names[i], special, problem)
                     : tokenize_messages(instance, root, special, problem);
    }
    return http_problem_set(problem, 400, "missing_required_parameter", "prompt",
                            "one of 'prompt', 'text' and 'messages' must be given");
}

static xp_status_t detokenize(http_instance_t *instance, json_t *root, http_problem_t *problem)
{
    const tokenizer_t *tokenizer;
    bool skip = true;
    int32_t *ids;
    uint32_t count;
    XP_TRY(need_tokenizer(instance, &tokenizer, problem));
    XP_TRY(http_api_bool(root, "skip_special_tokens", &skip, problem));
    const json_t *tokens = json_object_get(root, "tokens");
    if (!json_is_array(tokens))
        return http_problem_set(problem, 400, "missing_required_parameter", "tokens",
                                "'tokens' must be an array of token ids");
    XP_TRY(http_api_ids(tokens, "tokens", &ids, &count, problem));
    xp_buf_t decoded;
    xp_buf_init(&decoded, INSTANCE_MAX_TEXT_BYTES);
    xp_status_t status = tokenizer_decode(tokenizer, ids, count, skip, &decoded);
    if (status != XP_OK) {
        status = http_problem_set(problem, 400, NULL, "tokens", "%s", xp_error_last()->text);
    } else {
        const char *names[] = {"{\"text\":", ",\"prompt\":"};
        for (size_t i = 0; i < 2; i++) {
            http_text_puts(&instance->text, names[i]);
            http_text_json(&instance->text, decoded.data ? decoded.data : "", decoded.length);
        }
        http_text_puts(&instance->text, "}\n");
    }
    xp_buf_fini(&decoded);
    free(ids);
    return status;
}

static void json_path(http_instance_t *instance, http_request_t *request,
                      xp_status_t (*answer)(http_instance_t *, json_t *, http_problem_t *))
{
    http_slice_t body = http_request_body(request);
    http_problem_t problem = {0};
    json_t *root = NULL;
    xp_status_t status = http_json_parse_object(body.data, body.length, &root);
    if (status != XP_OK)
        status = http_problem_set(&problem, 400, "invalid_json", NULL, "%s", xp_error_last()->text);
    if (status == XP_OK)
        status = check_model(instance, root, &problem);
    http_text_clear(&instance->text);
    if (status == XP_OK)
        status = answer(instance, root, &problem);
    json_decref(root);
    if (status == XP_OK) {
        http_reply_text(request, 200, "application/json", &instance->text);
    } else {
        http_text_clear(&instance->text);
        http_request_fail(request, &problem);
    }
}

void instance_tokenize_path(http_instance_t *instance, http_request_t *request)
{
    json_path(instance, request, tokenize);
}

void instance_detokenize_path(http_instance_t *instance, http_request_t *request)
{
    json_path(instance, request, detokenize);
}
