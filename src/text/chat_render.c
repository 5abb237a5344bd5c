/* SPDX-License-Identifier: MIT */
/*
 * The renderers, each the equal of one family's Jinja template. Pure functions over the caller's
 * messages; they write only the caller's buffer.
 */
#include "text/chat_private.h"

#include <string.h>

#include "text/unicode.h"

/* ---- helpers ---- */

typedef struct slice {
    const char *text;
    size_t length;
} slice_t;

static const char *content_of(const chat_message_t *message)
{
    return message->content ? message->content : "";
}

static bool role_is(const chat_message_t *message, const char *role)
{
    return !strcmp(message->role, role);
}

static slice_t strip_newlines(slice_t slice, bool front, bool back)
{
    while (front && slice.length && slice.text[0] == '\n') {
        slice.text++;
        slice.length--;
    }
    while (back && slice.length && slice.text[slice.length - 1] == '\n')
        slice.length--;
    return slice;
}

static xp_status_t append_slice(xp_buf_t *out, slice_t slice)
{
    return xp_buf_append(out, slice.text, slice.length);
}

static xp_status_t append_texts(xp_buf_t *out, const char *const *texts)
{
    for (; *texts; texts++)
        XP_TRY(xp_buf_append_text(out, *texts));
    return XP_OK;
}
#define append_all(out, ...) append_texts((out), (const char *const[]){__VA_ARGS__, NULL})

static xp_status_t append_turn(xp_buf_t *out, const chat_message_t *message)
{
    return append_all(out, "<|im_start|>", message->role, "\n", content_of(message),
                      "<|im_end|>\n");
}

/* ---- chatml, smollm2, qwen2 ---- */

static xp_status_t render_chatml(const chat_input_t *input, xp_buf_t *out)
{
    for (size_t i = 0; i < input->count; i++)
        XP_TRY(append_turn(out, &input->messages[i]));
    return input->options->add_generation_prompt ? append_all(out, "<|im_start|>assistant\n")
                                                 : XP_OK;
}

static xp_status_t render_with_default(const chat_input_t *input, const char *system, xp_buf_t *out)
{
    if (input->count && !role_is(&input->messages[0], "system"))
        XP_TRY(append_all(out, "<|im_start|>system\n", system, "<|im_end|>\n"));
    return render_chatml(input, out);
}

static xp_status_t render_smollm2(const chat_input_t *input, xp_buf_t *out)
{
    return render_with_default(
        input, "You are a helpful AI assistant named SmolLM, trained by Hugging Face", out);
}

static xp_status_t render_qwen2(const chat_input_t *input, xp_buf_t *out)
{
    return render_with_default(input, "You are a helpful assistant.", out);
}

/* ---- Qwen ---- */

static xp_status_t append_tools(const chat_input_t *input, xp_buf_t *out)
{
    XP_TRY(append_all(out, "# Tools\n\nYou may call one or more functions to assist with the user "
                           "query.\n\nYou are provided with function signatures within "
                           "<tools></tools> XML tags:\n<tools>"));
    for (size_t i = 0; i < json_array_size(input->tools); i++) {
        XP_TRY(xp_buf_append(out, "\n", 1));
        XP_TRY(chat_append_json(json_array_get(input->tools, i), out));
    }
    return append_all(out,
                      "\n</tools>\n\nFor each function call, return a json object with function "
                      "name and arguments within <tool_call></tool_call> XML tags:\n"
                      "<tool_call>\n{\"name\": <function-name>, \"arguments\": "
                      "<args-json-object>}\n</tool_call><|im_end|>\n");
}

static bool is_true(const json_t *value)
{
    if (!value)
        return false;
    switch (json_typeof(value)) {
    case JSON_OBJECT:
        return json_object_size(value) > 0;
    case JSON_ARRAY:
        return json_array_size(value) > 0;
    case JSON_STRING:
        return json_string_length(value) > 0;
    case JSON_INTEGER:
        return json_integer_value(value) != 0;
    case JSON_REAL:
        return json_real_value(value) != 0;
    default:
        return json_is_true(value);
    }
}

/* `quote_strings`: arguments that are a string already are written as a JSON string. */
static xp_status_t append_call(const json_t *call, bool quote_strings, xp_buf_t *out)
{
    const json_t *function = json_object_get(call, "function");
    if (quote_strings ? function != NULL : is_true(function))
        call = function;
    const json_t *name = json_object_get(call, "name");
    const json_t *arguments = json_object_get(call, "arguments");
    if (!json_is_string(name))
        return xp_fail(XP_INVALID, "a tool call without a name");
    if (!arguments)
        return xp_fail(XP_INVALID, "tool call \"%.64s\" has no arguments", json_string_value(name));
    XP_TRY(append_all(out, "<tool_call>\n{\"name\": \""));
    XP_TRY(xp_buf_append(out, json_string_value(name), json_string_length(name)));
    XP_TRY(append_all(out, "\", \"arguments\": "));
    if (json_is_string(arguments) && !quote_strings)
        XP_TRY(xp_buf_append(out, json_string_value(arguments), json_string_length(arguments)));
    else
        XP_TRY(chat_append_json(arguments, out));
    return append_all(out, "}\n</tool_call>");
}

/* Neighbouring answers of tools share one user turn. */
static xp_status_t append_tool_answer(const chat_input_t *input, size_t at, xp_buf_t *out)
{
    if (at == 0 || !role_is(&input->messages[at - 1], "tool"))
        XP_TRY(append_all(out, "<|im_start|>user"));
    XP_TRY(append_all(out, "\n<tool_response>\n", content_of(&input->messages[at]),
                      "\n</tool_response>"));
    if (at + 1 == input->count || !role_is(&input->messages[at + 1], "tool"))
        XP_TRY(append_all(out, "<|im_end|>\n"));
    return XP_OK;
}

static xp_status_t render_qwen25(const chat_input_t *input, xp_buf_t *out)
{
    if (!input->count)
        return xp_fail(XP_INVALID, "this chat template needs at least one message");
    bool has_system = role_is(&input->messages[0], "system");
    XP_TRY(append_all(out, "<|im_start|>system\n",
                      has_system ? content_of(&input->messages[0])
                                 : "You are Qwen, created by Alibaba Cloud. You are a helpful "
                                   "assistant."));
    if (input->tools) {
        XP_TRY(append_all(out, "\n\n"));
        XP_TRY(append_tools(input, out));
    } else {
        XP_TRY(append_all(out, "<|im_end|>\n"));
    }
    for (size_t i = 0; i < input->count; i++) {
        const chat_message_t *message = &input->messages[i];
        bool assistant = role_is(message, "assistant");
        if (role_is(message, "user") || (role_is(message, "system") && i > 0) ||
            (assistant && !input->calls[i])) {
            XP_TRY(append_turn(out, message));
        } else if (assistant) {
            XP_TRY(append_all(out, "<|im_start|>assistant"));
            if (content_of(message)[0])
                XP_TRY(append_all(out, "\n", content_of(message)));
            for (size_t k = 0; k < json_array_size(input->calls[i]); k++) {
                XP_TRY(xp_buf_append(out, "\n", 1));
                XP_TRY(append_call(json_array_get(input->calls[i], k), true, out));
            }
            XP_TRY(append_all(out, "<|im_end|>\n"));
        } else if (role_is(message, "tool")) {
            XP_TRY(append_tool_answer(input, i, out));
        }
    }
    return input->options->add_generation_prompt ? append_all(out, "<|im_start|>assistant\n")
                                                 : XP_OK;
}

static bool begins_with(const char *text, const char *begin)
{
    return !strncmp(text, begin, strlen(begin));
}

static bool ends_with(const char *text, const char *end)
{
    size_t length = strlen(text), tail = strlen(end);
    return length >= tail && !strcmp(text + length - tail, end);
}

/* The last user message that is no tool's answer; reasoning is shown only behind it. */
static size_t last_query(const chat_input_t *input)
{
    for (size_t i = input->count; i > 0; i--) {
        const char *content = content_of(&input->messages[i - 1]);
        if (role_is(&input->messages[i - 1], "user") &&
            !(begins_with(content, "<tool_response>") && ends_with(content, "</tool_response>")))
            return i - 1;
    }
    return input->count - 1;
}

/* What follows the last `mark` in `slice`; all of it without one. */
static slice_t after_last(slice_t slice, const char *mark)
{
    size_t size = strlen(mark);
    for (size_t at = slice.length >= size ? slice.length - size + 1 : 0; at > 0; at--) {
        if (!memcmp(slice.text + at - 1, mark, size))
            return (slice_t){slice.text + at - 1 + size, slice.length - (at - 1) - size};
    }
    return slice;
}

static void split_reasoning(const chat_message_t *message, slice_t *content, slice_t *reasoning)
{
    static const char close[] = "</think>";
    *content = (slice_t){content_of(message), strlen(content_of(message))};
    *reasoning = (slice_t){"", 0};
    if (message->reasoning) {
        *reasoning = (slice_t){message->reasoning, strlen(message->reasoning)};
        return;
    }
    const char *end = strstr(content->text, close);
    if (!end)
        return;
    slice_t before = {content->text, (size_t)(end - content->text)};
    *content = strip_newlines(after_last(*content, close), true, false);
    before = after_last(strip_newlines(before, false, true), "<think>");
    *reasoning = strip_newlines(before, true, false);
}

static xp_status_t append_qwen3_answer(const chat_input_t *input, size_t at, size_t query,
                                       xp_buf_t *out)
{
    slice_t content, reasoning;
    split_reasoning(&input->messages[at], &content, &reasoning);
    XP_TRY(append_all(out, "<|im_start|>assistant\n"));
    if (at > query && (at + 1 == input->count || reasoning.length)) {
        XP_TRY(append_all(out, "<think>\n"));
        XP_TRY(append_slice(out, strip_newlines(reasoning, true, true)));
        XP_TRY(append_all(out, "\n</think>\n\n"));
        XP_TRY(append_slice(out, strip_newlines(content, true, false)));
    } else {
        XP_TRY(append_slice(out, content));
    }
    for (size_t k = 0; input->calls[at] && k < json_array_size(input->calls[at]); k++) {
        if (k > 0 || content.length)
            XP_TRY(xp_buf_append(out, "\n", 1));
        XP_TRY(append_call(json_array_get(input->calls[at], k), false, out));
    }
    return append_all(out, "<|im_end|>\n");
}

static xp_status_t render_qwen3(const chat_input_t *input, xp_buf_t *out)
{
    if (!input->count)
        return xp_fail(XP_INVALID, "this chat template needs at least one message");
    bool has_system = role_is(&input->messages[0], "system");
    if (input->tools) {
        XP_TRY(append_all(out, "<|im_start|>system\n"));
        if (has_system)
            XP_TRY(append_all(out, content_of(&input->messages[0]), "\n\n"));
        XP_TRY(append_tools(input, out));
    } else if (has_system) {
        XP_TRY(append_turn(out, &input->messages[0]));
    }
    size_t query = last_query(input);
    for (size_t i = 0; i < input->count; i++) {
        const chat_message_t *message = &input->messages[i];
        if (role_is(message, "user") || (role_is(message, "system") && i > 0))
            XP_TRY(append_turn(out, message));
        else if (role_is(message, "assistant"))
            XP_TRY(append_qwen3_answer(input, i, query, out));
        else if (role_is(message, "tool"))
            XP_TRY(append_tool_answer(input, i, out));
    }
    if (!input->options->add_generation_prompt)
        return XP_OK;
    XP_TRY(append_all(out, "<|im_start|>assistant\n"));
    return input->options->enable_thinking == 0 ? append_all(out, "<think>\n\n</think>\n\n")
                                                : XP_OK;
}

/* ---- Llama 3 ---- */

/* White space of Python's str.strip(). */
static bool python_space(uint32_t code_point)
{
    return text_is_space(code_point) || (code_point >= 0x1C && code_point <= 0x1F);
}

static slice_t trim(const char *text)
{
    slice_t slice = {text, strlen(text)};
    size_t step;
    while (slice.length && python_space(text_utf8_decode(slice.text, &step))) {
        slice.text += step;
        slice.length -= step;
    }
    while (slice.length &&
           python_space(text_utf8_decode_before(slice.text, slice.text + slice.length, &step)))
        slice.length -= step;
    return slice;
}

static xp_status_t render_llama3(const chat_input_t *input, xp_buf_t *out)
{
    for (size_t i = 0; i < input->count; i++) {
        const chat_message_t *message = &input->messages[i];
        XP_TRY(append_all(out, i ? "" : input->bos, "<|start_header_id|>", message->role,
                          "<|end_header_id|>\n\n"));
        XP_TRY(append_slice(out, trim(content_of(message))));
        XP_TRY(append_all(out, "<|eot_id|>"));
    }
    return input->options->add_generation_prompt
               ? append_all(out, "<|start_header_id|>assistant<|end_header_id|>\n\n")
               : XP_OK;
}

/* clang-format off */
const chat_renderer_t chat_renderers[] = {
    {"chatml", render_chatml, false},
    {"smollm2", render_smollm2, false},
    {"qwen2", render_qwen2, false},
    {"qwen2.5", render_qwen25, true},
    {"qwen3", render_qwen3, true},
    {"llama3", render_llama3, false},
    {NULL, NULL, false},
};
