/* SPDX-License-Identifier: MIT */
/*
 * Chat templates: texts written out by hand from the published templates, what is recognised and
 * what is refused. The comparison with Jinja2 itself is tests/reference/text_templates.py.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "text/chat_private.h"
#include "text/chat_template.h"

#define TALES XPOOL_SOURCE_DIR "/models/tales/qwen3-moe"

static chat_template_t *load(const char *name)
{
    chat_template_t *chat_template = NULL;
    xp_status_t status = chat_template_load(TALES, name, &chat_template);
    if (status != XP_OK)
        print_error("%s\n", xp_error_last()->text);
    assert_int_equal(status, XP_OK);
    return chat_template;
}

static void check(const char *name, const chat_message_t *messages, size_t count,
                  chat_options_t options, const char *wanted)
{
    chat_template_t *chat_template = load(name);
    xp_buf_t text;
    xp_buf_init(&text, 1 << 20);
    assert_int_equal(chat_template_render(chat_template, messages, count, &options, &text), XP_OK);
    assert_string_equal(text.data, wanted);
    xp_buf_fini(&text);
    chat_template_destroy(chat_template);
}

static const chat_options_t ASK = {.add_generation_prompt = true, .enable_thinking = -1};
static const chat_options_t TELL = {.add_generation_prompt = false, .enable_thinking = -1};

static void chatml(void **state)
{
    (void)state;
    const chat_message_t messages[] = {{.role = "system", .content = "Be kind."},
                                       {.role = "user", .content = "H\u00e9"},
                                       {.role = "odd"}};
    check(NULL, messages, 3, ASK,
          "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nH\u00e9<|im_end|>\n"
          "<|im_start|>odd\n<|im_end|>\n<|im_start|>assistant\n");
    check("", messages + 1, 1, TELL, "<|im_start|>user\nH\u00e9<|im_end|>\n");
    check("chatml", NULL, 0, TELL, "");
}

static void default_systems(void **state)
{
    (void)state;
    const chat_message_t user = {.role = "user", .content = "Hi"};
    check("smollm2", &user, 1, ASK,
          "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
          "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
    check("qwen2", &user, 1, TELL,
          "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nHi"
          "<|im_end|>\n");
    check("qwen2.5", &user, 1, TELL,
          "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
          "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n");
    const chat_message_t padded = {.role = "user", .content = "\n\u00a0Hi \x1f"};
    check("llama3", &padded, 1, ASK,
          "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
          "<|start_header_id|>assistant<|end_header_id|>\n\n");
}

static void qwen3_thinking(void **state)
{
    (void)state;
    const chat_message_t messages[] = {
        {.role = "user", .content = "1?"},
        {.role = "assistant", .content = "<think>\nhm\n</think>\n\none"},
        {.role = "user", .content = "2?"},
        {.role = "assistant", .content = "two", .reasoning = "\nso\n"},
    };
    check("qwen3", messages, 4, TELL,
          "<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n"
          "<|im_start|>user\n2?<|im_end|>\n<|im_start|>assistant\n<think>\nso\n</think>\n\ntwo"
          "<|im_end|>\n");
    chat_options_t plain = ASK;
    plain.enable_thinking = 0;
    check("qwen3", messages, 1, plain,
          "<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n");
    plain.enable_thinking = 1;
    check("qwen3", messages, 1, plain, "<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\n");
}

static void qwen3_tools(void **state)
{
    (void)state;
    const chat_message_t messages[] = {
        {.role = "system", .content = "S"},
        {.role = "user", .content = "weather?"},
        {.role = "assistant",
         .content = "",
         .tool_calls_json = "[{\"function\":{\"name\":\"w\",\"arguments\":{\"at\":\"K\u00f6ln\","
                            "\"n\":[1,2.0,null]}}},{\"name\":\"v\",\"arguments\":\"{}\"}]"},
        {.role = "tool", .content = "rain"},
        {.role = "tool", .content = "snow"},
    };
    chat_options_t options = ASK;
    options.tools_json = "[{\"type\":\"function\",\"x\":1e3}]";
    check(
        "qwen3", messages, 5, options,
        "<|im_start|>system\nS\n\n# Tools\n\nYou may call one or more functions to assist with the "
        "user query.\n\nYou are provided with function signatures within <tools></tools> XML "
        "tags:\n"
        "<tools>\n{\"type\": \"function\", \"x\": 1000.0}\n</tools>\n\nFor each function call, "
        "return "
        "a json object with function name and arguments within <tool_call></tool_call> XML tags:\n"
        "<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>"
        "<|im_end|>\n<|im_start|>user\nweather?<|im_end|>\n<|im_start|>assistant\n<tool_call>\n"
        "{\"name\": \"w\", \"arguments\": {\"at\": \"K\u00f6ln\", \"n\": [1, 2.0, null]}}\n"
        "</tool_call>\n<tool_call>\n{\"name\": \"v\", \"arguments\": {}}\n</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nrain\n</tool_response>\n<tool_response>\nsnow\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\n");
}

/* Numbers as Python writes them. */
static void python_numbers(void **state)
{
    (void)state;
    static const struct {
        const char *json, *wanted;
    } cases[] = {
        {"0.0", "0.0"},
        {"-0.0", "-0.0"},
        {"1e15", "1000000000000000.0"},
        {"1e16", "1e+16"},
        {"1e-4", "0.0001"},
        {"1e-5", "1e-05"},
        {"1.5e300", "1.5e+300"},
        {"0.1", "0.1"},
        {"123456.789", "123456.789"},
        {"5e-324", "5e-324"},
        {"-7", "-7"},
        {"9223372036854775807", "9223372036854775807"},
        {"\"a\\u0001\\u007f\\/\\\\\"", "\"a\\u0001\x7f/\\\\\""},
        {"[true, {}]", "[true, {}]"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        xp_buf_t text;
        json_t *value = json_loads(cases[i].json, JSON_DECODE_ANY, NULL);
        xp_buf_init(&text, 1000);
        assert_non_null(value);
        assert_int_equal(chat_append_json(value, &text), XP_OK);
        assert_string_equal(text.data, cases[i].wanted);
        xp_buf_fini(&text);
        json_decref(value);
    }
}

static uint64_t fingerprint(const char *text)
{
    uint64_t value = 0;
    assert_int_equal(chat_fingerprint(text, strlen(text), &value), XP_OK);
    return value;
}

static void same_and_different(void **state)
{
    (void)state;
    /* Same output, other spelling. */
    static const char *const same[] = {
        "{% if a %}{{ 'x' + m['role'] + \"y\" }}{% endif %}",
        "{%- if a -%}\n{{- 'x' }}{{ m.role }}y\n{%- endif %}\n",
        "{% if a %}\nx{{ m [ 'role' ] + 'y' }}{#- note -#}\n   {% endif %}",
        "{%if a%}{{'x'+m.role}}{{'y'}}{%endif%}",
    };
    static const char *const other[] = {
        "{% if a %} {{ 'x' + m['role'] + \"y\" }}{% endif %}",
        "{% if a %}{{ 'x' + m['role'] + \"y\" }}{% endif %}\n\n\n",
        "{% if a %}{{ 'x' + m['role'] | trim + \"y\" }}{% endif %}",
        "{% if a %}{{ 'x' + m['rule'] + \"y\" }}{% endif %}",
        "{% if a %}{{ 'x' + m['role'] }}{% endif %}{{ 'y' }}",
        "{% if not a %}{{ 'x' + m['role'] + \"y\" }}{% endif %}",
        "{% if a %}{{ 'x' + m['role'] + y }}{% endif %}",
        "{% if a %}{{ ('x' + m['role'] + \"y\") | upper }}{% endif %}",
        "{% if a %}{{ 'x' + m['role'] + \"y\" if b }}{% endif %}",
        "{% if a %}\n {{ 'x' + m['role'] + \"y\" }}{% endif %}",
    };
    for (size_t i = 1; i < sizeof(same) / sizeof(same[0]); i++)
        assert_int_equal(fingerprint(same[i]), fingerprint(same[0]));
    for (size_t i = 0; i < sizeof(other) / sizeof(other[0]); i++)
        assert_int_not_equal(fingerprint(other[i]), fingerprint(same[0]));
    /* Numbers must not be put out one by one. */
    assert_int_not_equal(fingerprint("{{ a + b }}"), fingerprint("{{ a }}{{ b }}"));
    static const char *const broken[] = {"{{",      "{% if",       "{# x", "{{ 'x }}",
                                         "{{ 'x\\", "{{ '\\q' }}", "a\rb", "{{ x +}}"};
    for (size_t i = 0; i < sizeof(broken) / sizeof(broken[0]); i++) {
        uint64_t value;
        assert_int_equal(chat_fingerprint(broken[i], strlen(broken[i]), &value), XP_INVALID);
    }
}

static void write_file(const char *folder, const char *name, const char *text)
{
    char path[512];
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}

static void expect_load(const char *folder, xp_status_t status, const char *words)
{
    chat_template_t *chat_template = NULL;
    xp_error_clear();
    assert_int_equal(chat_template_load(folder, NULL, &chat_template), status);
    if (status == XP_OK)
        assert_string_equal(chat_template_name(chat_template), words);
    else
        assert_non_null(strstr(xp_error_last()->text, words));
    chat_template_destroy(chat_template);
}

#define CHATML_TEXT                                                                                \
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\\\n' + "                 \
    "message['content'] + '<|im_end|>' + '\\\\n'}}{% endfor %}{% if add_generation_prompt %}"      \
    "{{ '<|im_start|>assistant\\\\n' }}{% endif %}"

static void sources(void **state)
{
    (void)state;
    char folder[] = "/tmp/xpool-chat-XXXXXX";
    assert_non_null(mkdtemp(folder));
    expect_load(folder, XP_NOT_FOUND, "models[].chat_template");
    write_file(folder, "tokenizer_config.json",
               "{\"bos_token\":null,\"model_max_length\":1000000000000000019884624838656}");
    expect_load(folder, XP_NOT_FOUND, folder);
    write_file(folder, "tokenizer_config.json", "{");
    expect_load(folder, XP_INVALID, "tokenizer_config.json:1");
    write_file(folder, "tokenizer_config.json", "{\"chat_template\":7}");
    expect_load(folder, XP_INVALID, "chat_template");
    write_file(folder, "tokenizer_config.json", "{\"chat_template\":\"" CHATML_TEXT "\"}");
    expect_load(folder, XP_OK, "chatml");
    write_file(folder, "tokenizer_config.json",
               "{\"chat_template\":[{\"name\":\"rag\",\"template\":\"{{ 1 }}\"},{\"name\":"
               "\"default\",\"template\":\"" CHATML_TEXT "\"}]}");
    expect_load(folder, XP_OK, "chatml");
    /* A file of its own goes before the configuration. */
    write_file(folder, "chat_template.jinja", "{{ messages }}");
    expect_load(folder, XP_UNSUPPORTED, "chat_template.jinja");
    expect_load("/nonexistent/model", XP_NOT_FOUND, "/nonexistent/model");

    chat_template_t *chat_template = NULL;
    assert_int_equal(chat_template_load(folder, "qwen3", &chat_template), XP_OK);
    assert_string_equal(chat_template_name(chat_template), "qwen3");
    chat_template_destroy(chat_template);
    chat_template = NULL;
    assert_int_equal(chat_template_load(folder, "nonsense", &chat_template), XP_INVALID);
    assert_non_null(strstr(xp_error_last()->text, "smollm2"));
    assert_null(chat_template);
    char path[512];
    snprintf(path, sizeof(path), "%s/tokenizer_config.json", folder);
    unlink(path);
    snprintf(path, sizeof(path), "%s/chat_template.jinja", folder);
    unlink(path);
    rmdir(folder);
    for (const char *const *name = chat_template_names(); *name; name++)
        chat_template_destroy(load(*name));
}

static void refused(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        chat_message_t message;
        size_t count;
        const char *tools, *words;
    } cases[] = {
        {"qwen3", {.role = "user"}, 0, NULL, "message"},
        {"qwen2.5", {.role = "user"}, 0, NULL, "message"},
        {"chatml", {.role = NULL}, 1, NULL, "role"},
        {"chatml", {.role = "user", .content = "\xFF"}, 1, NULL, "UTF-8"},
        {"qwen3", {.role = "user"}, 1, "{", "tools"},
        {"qwen3", {.role = "user"}, 1, "{}", "tools"},
        {"qwen3", {.role = "user"}, 1, "[123456789012345678901234567890]", "tools"},
        {"qwen3", {.role = "assistant", .tool_calls_json = "[1]"}, 1, NULL, "name"},
        {"qwen3", {.role = "assistant", .tool_calls_json = "[{\"name\":\"f\"}]"}, 1, NULL, "\"f\""},
        {"qwen3", {.role = "assistant", .tool_calls_json = "nonsense"}, 1, NULL, "tool_calls"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        chat_template_t *chat_template = load(cases[i].name);
        chat_options_t options = {.tools_json = cases[i].tools, .enable_thinking = -1};
        xp_buf_t text;
        xp_buf_init(&text, 1 << 20);
        assert_int_equal(xp_buf_append_text(&text, "kept"), XP_OK);
        assert_int_equal(
            chat_template_render(chat_template, &cases[i].message, cases[i].count, &options, &text),
            XP_INVALID);
        assert_non_null(strstr(xp_error_last()->text, cases[i].words));
        assert_string_equal(text.data, "kept");
        xp_buf_fini(&text);
        chat_template_destroy(chat_template);
    }
    chat_template_t *chat_template = load("chatml");
    const chat_message_t message = {.role = "user", .content = "a long message"};
    xp_buf_t text;
    xp_buf_init(&text, 20);
    assert_int_equal(chat_template_render(chat_template, &message, 1, &ASK, &text), XP_NO_MEMORY);
    assert_int_equal(text.length, 0);
    xp_buf_fini(&text);
    chat_template_destroy(chat_template);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(chatml),         cmocka_unit_test(default_systems),
        cmocka_unit_test(qwen3_thinking), cmocka_unit_test(qwen3_tools),
        cmocka_unit_test(python_numbers), cmocka_unit_test(same_and_different),
        cmocka_unit_test(sources),        cmocka_unit_test(refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
