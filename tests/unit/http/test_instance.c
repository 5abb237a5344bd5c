/* SPDX-License-Identifier: MIT */
/*
 * The Instance's paths over real sockets, with a stand-in for the engine.
 *
 * Expected bodies are written out here by hand from OpenAI's and SGLang's published forms.
 */
#include "http_client.h"

#include "fake_engine.h"
#include "http/instance_server.h"

typedef struct fixture {
    loop_t loop;
    engine_t *engine;
    http_instance_t *instance;
    uint16_t port;
} fixture_t;

static fixture_t f;

static void start(const http_instance_config_t *change)
{
    http_instance_config_t config = change ? *change : (http_instance_config_t){0};
    memset(&f, 0, sizeof(f));
    loop_init(&f.loop);
    f.engine = fake_engine_new();
    config.engine = f.engine;
    config.model_id = "tiny/model";
    config.created = 1700000000;
    if (!config.chat_template_reason)
        config.chat_template = &fake_chat_template;
    assert_int_equal(http_instance_create(&config, f.loop.base, &f.instance), XP_OK);
    f.port = http_instance_port(f.instance);
    assert_true(f.port > 0);
    loop_start(&f.loop);
}

static int set_up(void **state)
{
    start(NULL);
    return 0;
}

static int tear_down(void **state)
{
    loop_stop(&f.loop);
    http_instance_destroy(f.instance);
    /* A connection whose callback is still due is freed behind it. */
    event_base_loop(f.loop.base, EVLOOP_NONBLOCK);
    event_base_free(f.loop.base);
    engine_destroy(f.engine);
    return 0;
}

static void do_open_requests(void *context)
{
    *(uint32_t *)context = http_instance_open_requests(f.instance);
}

static uint32_t open_requests(void)
{
    uint32_t count;
    loop_do(&f.loop, do_open_requests, &count);
    return count;
}

static json_t *post(const char *path, const char *body, int status)
{
    response_t r = client_request(f.port, "POST", path, body);
    if (r.status != status)
        print_error("%s %s: %s\n", path, body, r.text);
    assert_int_equal(r.status, status);
    assert_true(r.complete);
    json_t *root = response_json(&r);
    response_free(&r);
    return root;
}

static void expect_error(const char *path, const char *body, int status, const char *param,
                         const char *code, const char *part)
{
    json_t *root = post(path, body, status);
    json_t *error = json_at(root, "error");
    assert_true(json_is_string(json_at(error, "type")));
    if (param)
        assert_string_equal(json_text_at(error, "param"), param);
    else
        assert_true(json_is_null(json_at(error, "param")));
    if (code)
        assert_string_equal(json_text_at(error, "code"), code);
    if (part && !strstr(json_text_at(error, "message"), part))
        fail_msg("\"%s\" does not say \"%s\"", json_text_at(error, "message"), part);
    json_decref(root);
}

/* Replaces what differs from run to run, so that whole bodies can be compared. */
static void mask(char *text, const char *key)
{
    for (char *at = text; (at = strstr(at, key));) {
        char *from = at + strlen(key), *to = from;
        while (*to && *to != '"' && *to != ',' && *to != '}')
            to++;
        *from = '#';
        memmove(from + 1, to, strlen(to) + 1);
        at = from;
    }
}

static void chat_has_openais_form(void **state)
{
    response_t r = client_request(
        f.port, "POST", "/v1/chat/completions",
        "{\"model\":\"tiny/model\",\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}");
    mask(r.body, "\"id\":\"chatcmpl-");
    mask(r.body, "\"created\":");
    assert_string_equal(
        r.body, "{\"id\":\"chatcmpl-#\",\"object\":\"chat.completion\",\"created\":#,"
                "\"model\":\"tiny/model\",\"system_fingerprint\":null,\"choices\":[{\"index\":0,"
                "\"message\":{\"role\":\"assistant\",\"content\":\"Hello \xe2\x82\xac world. \","
                "\"refusal\":null},\"logprobs\":null,\"finish_reason\":\"stop\"}],\"usage\":{"
                "\"prompt_tokens\":18,\"completion_tokens\":18,\"total_tokens\":36,"
                "\"prompt_tokens_details\":{\"cached_tokens\":9}}}\n");
    /* "user:hi\nassistant:" without a BOS: the template writes special tokens itself. */
    assert_int_equal(f.engine->last_count, 18);
    assert_int_equal(f.engine->last_ids[0], 'u');
    assert_true(f.engine->last_sampling.temperature == 1);
    assert_int_equal(f.engine->last_sampling.max_new_tokens, 0);
    response_free(&r);
}

static void chat_stream_has_openais_form(void **state)
{
    response_t r = client_request(
        f.port, "POST", "/v1/chat/completions",
        "{\"model\":\"tiny/model\",\"stream\":true,\"stream_options\":{\"include_usage\":true},"
        "\"max_tokens\":3,\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}");
    assert_non_null(strstr(r.text, "Content-Type: text/event-stream"));
    mask(r.body, "\"id\":\"chatcmpl-");
    mask(r.body, "\"created\":");
#define CHUNK                                                                                      \
    "data: {\"id\":\"chatcmpl-#\",\"object\":\"chat.completion.chunk\",\"created\":#,"             \
    "\"model\":\"tiny/model\",\"system_fingerprint\":null,\"choices\":["
#define TAIL ",\"logprobs\":null,\"finish_reason\":null}],\"usage\":null}\n\n"
    assert_string_equal(
        r.body, CHUNK "{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}" TAIL CHUNK
                      "{\"index\":0,\"delta\":{\"content\":\"H\"}" TAIL CHUNK
                      "{\"index\":0,\"delta\":{\"content\":\"e\"}" TAIL CHUNK
                      "{\"index\":0,\"delta\":{\"content\":\"l\"}" TAIL CHUNK
                      "{\"index\":0,\"delta\":{},\"logprobs\":null,\"finish_reason\":\"length\"}],"
                      "\"usage\":null}\n\n" CHUNK "],\"usage\":{\"prompt_tokens\":18,"
                      "\"completion_tokens\":3,\"total_tokens\":21,\"prompt_tokens_details\":{"
                      "\"cached_tokens\":9}}}\n\ndata: [DONE]\n\n");
    assert_true(r.complete);
    response_free(&r);
}

static void characters_are_never_split(void **state)
{
    response_t r = client_request(f.port, "POST", "/v1/completions",
                                  "{\"prompt\":\"x\",\"stream\":true,\"max_tokens\":12}");
    assert_non_null(strstr(r.body, "\"text\":\"\xe2\x82\xac\""));
    assert_null(strstr(r.body, "\\ufffd"));
    response_free(&r);
}

static void chat_logprobs(void **state)
{
    json_t *root = post("/v1/chat/completions",
                        "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"logprobs\":true,"
                        "\"top_logprobs\":2,\"max_tokens\":8}",
                        200);
    json_t *content = json_at(root, "choices.0.logprobs.content");
    assert_int_equal(json_array_size(content), 8);
    assert_string_equal(json_text_at(content, "0.token"), "H");
    assert_true(json_number_value(json_at(content, "1.logprob")) == -1.25);
    assert_int_equal(json_int_at(content, "0.bytes.0"), 'H');
    assert_int_equal(json_array_size(json_at(content, "0.top_logprobs")), 2);
    assert_string_equal(json_text_at(content, "0.top_logprobs.1.token"), "I");
    /* A token that is part of a character: replaced in the text, exact in the bytes. */
    assert_string_equal(json_text_at(content, "6.token"), "\xef\xbf\xbd");
    assert_int_equal(json_int_at(content, "6.bytes.0"), 0xe2);
    json_decref(root);
    /* The end token is no content. */
    f.engine->eos_after = 2;
    root = post("/v1/chat/completions",
                "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"logprobs\":true}", 200);
    assert_int_equal(json_array_size(json_at(root, "choices.0.logprobs.content")), 2);
    assert_int_equal(json_int_at(root, "usage.completion_tokens"), 3);
    json_decref(root);
}

static void completion_with_echo_and_logprobs(void **state)
{
    response_t r = client_request(
        f.port, "POST", "/v1/completions",
        "{\"model\":\"tiny/model\",\"prompt\":\"ab\",\"max_tokens\":2,\"logprobs\":1,"
        "\"echo\":true}");
    mask(r.body, "\"id\":\"cmpl-");
    mask(r.body, "\"created\":");
    assert_string_equal(
        r.body,
        "{\"id\":\"cmpl-#\",\"object\":\"text_completion\",\"created\":#,\"model\":\"tiny/model\","
        "\"system_fingerprint\":null,\"choices\":[{\"index\":0,\"text\":\"abHe\",\"logprobs\":{"
        "\"tokens\":[\"<bos>\",\"a\",\"b\",\"H\",\"e\"],"
        "\"token_logprobs\":[null,-1.25,-2.25,-0.25,-1.25],"
        "\"top_logprobs\":[null,{\"a\":-1.25},{\"b\":-2.25},{\"H\":-0.25},{\"e\":-1.25}],"
        "\"text_offset\":[0,0,1,2,3]},\"finish_reason\":\"length\"}],\"usage\":{"
        "\"prompt_tokens\":3,\"completion_tokens\":2,\"total_tokens\":5,"
        "\"prompt_tokens_details\":{\"cached_tokens\":1}}}\n");
    response_free(&r);
    /* Only the prompt's log-probabilities, as evaluation harnesses ask for them. */
    json_t *root =
        post("/v1/completions",
             "{\"prompt\":[97,98,99],\"max_tokens\":0,\"logprobs\":0,\"echo\":true}", 200);
    assert_string_equal(json_text_at(root, "choices.0.text"), "abc");
    assert_int_equal(json_array_size(json_at(root, "choices.0.logprobs.tokens")), 3);
    assert_true(json_is_null(json_at(root, "choices.0.logprobs.top_logprobs")));
    assert_string_equal(json_text_at(root, "choices.0.finish_reason"), "length");
    assert_int_equal(json_int_at(root, "usage.completion_tokens"), 0);
    json_decref(root);
}

static void completion_batches_and_n(void **state)
{
    json_t *root = post("/v1/completions",
                        "{\"prompt\":[\"a\",\"bb\"],\"n\":2,\"seed\":0,\"max_tokens\":2}", 200);
    static const char *const texts[] = {"He", "el", "He", "el"};
    assert_int_equal(json_array_size(json_at(root, "choices")), 4);
    for (int i = 0; i < 4; i++) {
        char at[32];
        sprintf(at, "choices.%d.index", i);
        assert_int_equal(json_int_at(root, at), i);
        sprintf(at, "choices.%d.text", i);
        assert_string_equal(json_text_at(root, at), texts[i]);
    }
    assert_int_equal(json_int_at(root, "usage.prompt_tokens"), 5);
    assert_int_equal(json_int_at(root, "usage.completion_tokens"), 8);
    json_decref(root);
    root = post("/v1/completions", "{\"prompt\":[[97],[98,99]]}", 200);
    assert_int_equal(json_array_size(json_at(root, "choices")), 2);
    assert_int_equal(f.engine->last_sampling.max_new_tokens, 16);
    json_decref(root);
}

/* More answers than the engine's queue takes at once wait inside the request. */
static void a_batch_may_exceed_the_queue(void **state)
{
    f.engine->queue_limit = 3;
    json_t *root = post("/v1/completions", "{\"prompt\":\"a\",\"n\":20,\"max_tokens\":3}", 200);
    assert_int_equal(json_array_size(json_at(root, "choices")), 20);
    json_decref(root);
    assert_int_equal(f.engine->submitted, 20);
}

static void stop_strings(void **state)
{
    json_t *root = post("/v1/completions",
                        "{\"prompt\":\"a\",\"stop\":[\"zzz\",\"lo\"],\"max_tokens\":10}", 200);
    assert_string_equal(json_text_at(root, "choices.0.text"), "Hel");
    assert_string_equal(json_text_at(root, "choices.0.finish_reason"), "stop");
    json_decref(root);
}

static void all_sampling_fields_arrive(void **state)
{
    json_decref(post("/v1/chat/completions",
                     "{\"messages\":[{\"role\":\"developer\",\"content\":[{\"type\":\"text\","
                     "\"text\":\"a\"},{\"type\":\"text\",\"text\":\"b\"}]},{\"role\":\"user\","
                     "\"content\":\"c\"}],\"temperature\":0.5,\"top_p\":0.9,\"top_k\":7,"
                     "\"min_p\":0.25,\"presence_penalty\":1,\"frequency_penalty\":-1,"
                     "\"repetition_penalty\":1.5,\"seed\":-3,\"max_completion_tokens\":4,"
                     "\"min_tokens\":2,\"ignore_eos\":true,\"stop_token_ids\":[5],"
                     "\"logit_bias\":{\"65\":-100,\"66\":2.5},\"user\":\"u\",\"store\":true,"
                     "\"tools\":[],\"chat_template_kwargs\":{\"enable_thinking\":false}}",
                     200));
    const engine_sampling_t *s = &f.engine->last_sampling;
    assert_true(s->temperature == 0.5f && s->top_p == 0.9f && s->min_p == 0.25f);
    assert_true(s->presence_penalty == 1 && s->frequency_penalty == -1);
    assert_true(s->repetition_penalty == 1.5f && s->top_k == 7);
    assert_true(s->has_seed && s->seed == (uint64_t)-3);
    assert_int_equal(s->max_new_tokens, 4);
    assert_int_equal(s->min_new_tokens, 2);
    assert_true(s->ignore_eos && s->stop_id_count == 1 && s->stop_ids[0] == 5);
    assert_int_equal(s->bias_count, 2);
    assert_true(s->bias[0].id == 65 && s->bias[0].bias == -100);
    char prompt[64];
    for (uint32_t i = 0; i < f.engine->last_count; i++)
        prompt[i] = (char)f.engine->last_ids[i];
    prompt[f.engine->last_count] = '\0';
    assert_string_equal(prompt, "system:a\nb\nuser:c\nthinking:0\nassistant:");
}

static void generate_has_sglangs_form(void **state)
{
    response_t r = client_request(
        f.port, "POST", "/generate",
        "{\"input_ids\":[65,66],\"return_logprob\":true,\"top_logprobs_num\":2,"
        "\"sampling_params\":{\"temperature\":0,\"max_new_tokens\":2,\"ignore_eos\":true}}");
    mask(r.body, "\"meta_info\":{\"id\":\"");
    assert_string_equal(r.body,
                        "{\"text\":\"He\",\"output_ids\":[72,101],\"meta_info\":{\"id\":\"#\","
                        "\"finish_reason\":{\"type\":\"length\",\"length\":2},\"prompt_tokens\":2,"
                        "\"completion_tokens\":2,\"cached_tokens\":1,\"input_token_logprobs\":[],"
                        "\"output_token_logprobs\":[[-0.25,72,null],[-1.25,101,null]],"
                        "\"input_top_logprobs\":[],\"output_top_logprobs\":[[[-0.25,72,null],"
                        "[-2.25,73,null]],[[-1.25,101,null],[-3.25,102,null]]],"
                        "\"e2e_latency\":0.001000}}\n");
    response_free(&r);
    assert_true(f.engine->last_sampling.temperature == 0 && f.engine->last_sampling.ignore_eos);
    f.engine->eos_after = 1;
    json_t *root = post("/generate",
                        "{\"text\":[\"a\",\"b\"],\"return_logprob\":true,\"logprob_start_len\":0,"
                        "\"return_text_in_logprobs\":true,\"sampling_params\":{}}",
                        200);
    assert_int_equal(json_array_size(root), 2);
    assert_int_equal(json_int_at(root, "1.output_ids.1"), FAKE_EOS);
    assert_string_equal(json_text_at(root, "0.meta_info.finish_reason.type"), "stop");
    assert_int_equal(json_int_at(root, "0.meta_info.finish_reason.matched"), FAKE_EOS);
    assert_true(json_is_null(json_at(root, "0.meta_info.input_token_logprobs.0.0")));
    assert_string_equal(json_text_at(root, "0.meta_info.input_token_logprobs.1.2"), "a");
    json_decref(root);
    assert_int_equal(f.engine->last_sampling.max_new_tokens, 128);
    assert_true(f.engine->last_sampling.temperature == 1);
}

static void generate_streams_cumulative_text(void **state)
{
    response_t r =
        client_request(f.port, "POST", "/generate",
                       "{\"text\":\"a\",\"stream\":true,\"sampling_params\":{\"max_new_tokens\":3,"
                       "\"stop\":\"l\"}}");
    assert_non_null(strstr(r.body, "data: {\"text\":\"H\",\"output_ids\":[72],"));
    assert_non_null(strstr(r.body, "data: {\"text\":\"He\",\"output_ids\":[72,101],"));
    assert_non_null(strstr(r.body, "\"finish_reason\":{\"type\":\"stop\",\"matched\":\"l\"}"));
    assert_non_null(strstr(r.body, "data: [DONE]\n\n"));
    response_free(&r);
}

static void bad_requests_name_the_field(void **state)
{
    static const struct {
        const char *body, *param, *code, *part;
    } chat[] = {
        {"", NULL, "invalid_json", "line 1"},
        {"[]", NULL, "invalid_json", "object"},
        {"{\"a\":1,\n\"a\":2}", NULL, "invalid_json", "line 2"},
        {"{\"temperature\":NaN}", NULL, "invalid_json", "column"},
        {"{\"seed\":99999999999999999999}", NULL, "invalid_json", "column"},
        {"{\"temperature\":1e999}", NULL, "invalid_json", "column"},
        {"{\"messages\":[]} x", NULL, "invalid_json", "line 1"},
        {"{}", "messages", "missing_required_parameter", NULL},
        {"{\"messages\":[]}", "messages", NULL, NULL},
        {"{\"messages\":[{\"role\":\"robot\",\"content\":\"\"}]}", "messages[0].role", NULL,
         "robot"},
        {"{\"messages\":[{\"role\":\"user\"}]}", "messages[0]", NULL, "content"},
        {"{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\"}]}]}",
         "messages[0].content[0]", NULL, "image_url"},
#define HI "\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]"
        {"{" HI ",\"temperature\":3}", "temperature", NULL, "0 to 2"},
        {"{" HI ",\"temperature\":\"1\"}", "temperature", NULL, "a number, not a string"},
        {"{" HI ",\"top_p\":1.5}", "top_p", NULL, NULL},
        {"{" HI ",\"n\":0}", "n", NULL, NULL},
        {"{" HI ",\"n\":1.5}", "n", NULL, "integer"},
        {"{" HI ",\"max_tokens\":0}", "max_tokens", NULL, NULL},
        {"{" HI ",\"stop\":[\"\"]}", "stop", NULL, "empty"},
        {"{" HI ",\"stop\":5}", "stop", NULL, NULL},
        {"{" HI ",\"logit_bias\":{\"x\":1}}", "logit_bias", NULL, NULL},
        {"{" HI ",\"logit_bias\":{\"260\":1}}", "logit_bias", NULL, "vocabulary"},
        {"{" HI ",\"top_logprobs\":2}", "top_logprobs", NULL, NULL},
        {"{" HI ",\"logprobs\":true,\"top_logprobs\":21}", "top_logprobs", NULL, NULL},
        {"{" HI ",\"stream_options\":{\"include_usage\":true}}", "stream_options", NULL, NULL},
        {"{" HI ",\"response_format\":{\"type\":\"json_object\"}}", "response_format", NULL, NULL},
        {"{" HI ",\"tools\":[{\"type\":\"function\"}]}", "tools", NULL, "no tools"},
        {"{" HI ",\"tool_choice\":\"required\"}", "tool_choice", NULL, NULL},
        {"{" HI ",\"modalities\":[\"audio\"]}", "modalities", NULL, NULL},
        {"{" HI ",\"audio\":{\"voice\":\"x\"}}", "audio", "unsupported_parameter", NULL},
    };
    for (size_t i = 0; i < sizeof(chat) / sizeof(chat[0]); i++)
        expect_error("/v1/chat/completions", chat[i].body, 400, chat[i].param, chat[i].code,
                     chat[i].part);
    expect_error("/v1/completions", "{\"prompt\":\"a\",\"suffix\":\"b\"}", 400, "suffix", NULL,
                 NULL);
    expect_error("/v1/completions", "{\"prompt\":\"a\",\"best_of\":2}", 400, "best_of", NULL, NULL);
    expect_error("/v1/completions", "{\"prompt\":[\"a\",1]}", 400, "prompt", NULL, "mixes");
    expect_error("/v1/completions", "{\"prompt\":[1,\"a\"]}", 400, "prompt", NULL, "item 1");
    expect_error("/v1/completions", "{\"prompt\":[]}", 400, "prompt", NULL, "empty");
    expect_error("/v1/completions", "{\"prompt\":\"\"}", 400, NULL, NULL, "empty");
    expect_error("/generate", "{}", 400, "text", NULL, NULL);
    expect_error("/generate", "{\"text\":\"a\",\"input_ids\":[1]}", 400, "input_ids", NULL, NULL);
    expect_error("/generate", "{\"text\":\"a\",\"sampling_params\":{\"regex\":\"a*\"}}", 400,
                 "regex", NULL, NULL);
    expect_error("/generate", "{\"text\":\"a\",\"image_data\":\"x\"}", 400, "image_data", NULL,
                 NULL);
    assert_int_equal(f.engine->submitted, 0);
}

static void a_long_prompt_is_told_apart(void **state)
{
    char body[1200] = "{\"prompt\":\"";
    memset(body + strlen(body), 'a', FAKE_CONTEXT);
    strcat(body, "\"}");
    expect_error("/v1/completions", body, 400, NULL, "context_length_exceeded",
                 "512 tokens, and the prompt has at least 513");
    /* So long that it is refused without being tokenized: 5 bytes is the longest token, times 4. */
    char *huge = calloc(1, 30000);
    strcpy(huge, "{\"messages\":[{\"role\":\"user\",\"content\":\"");
    memset(huge + strlen(huge), 'a', 20000);
    strcat(huge, "\"}]}");
    expect_error("/v1/chat/completions", huge, 400, "messages", "context_length_exceeded",
                 "at least 1000");
    free(huge);
}

static void deep_nesting_is_refused(void **state)
{
    char body[2048] = "{\"messages\":";
    memset(body + strlen(body), '[', 1000);
    expect_error("/v1/chat/completions", body, 400, NULL, "invalid_json", "deeper");
}

static void unknown_models_paths_and_methods(void **state)
{
    expect_error("/v1/chat/completions", "{\"model\":\"other\"," HI "}", 404, "model",
                 "model_not_found", "tiny/model");
    expect_error("/v1/nothing", "{}", 404, NULL, "not_found", "/v1/nothing");
    response_t r = client_request(f.port, "GET", "/generate", "");
    assert_int_equal(r.status, 405);
    assert_non_null(strstr(r.text, "\r\nAllow: POST\r\n"));
    response_free(&r);
    int fd = client_connect(f.port);
    client_send(fd, "POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\n"
                    "Content-Length: 2\r\n\r\n{}");
    r = client_receive(fd);
    assert_int_equal(r.status, 415);
    response_free(&r);
    close(fd);
}

static void models_and_small_paths(void **state)
{
    response_t r = client_request(f.port, "GET", "/v1/models", "");
    assert_string_equal(r.body, "{\"object\":\"list\",\"data\":[{\"id\":\"tiny/model\",\"object\":"
                                "\"model\",\"created\":1700000000,\"owned_by\":\"xpool\","
                                "\"max_model_len\":512}]}\n");
    response_free(&r);
    r = client_request(f.port, "GET", "/v1/models/tiny%2Fmodel", "");
    assert_int_equal(r.status, 200);
    response_free(&r);
    r = client_request(f.port, "GET", "/v1/models/tiny/other", "");
    assert_int_equal(r.status, 404);
    response_free(&r);
    r = client_request(f.port, "GET", "/health", "");
    assert_int_equal(r.status, 200);
    response_free(&r);
    r = client_request(f.port, "GET", "/metrics", "");
    assert_non_null(strstr(r.body, "\nxpool_instance_requests_total{model=\"tiny/model\"} 0\n"));
    response_free(&r);
    r = client_request(f.port, "GET", "/get_model_info", "");
    assert_int_equal(r.status, 200);
    response_free(&r);
    r = client_request(f.port, "POST", "/flush_cache", "");
    assert_int_equal(r.status, 200);
    assert_int_equal(f.engine->flushed, 1);
    response_free(&r);
    r = client_request(f.port, "POST", "/tokenize", "{\"prompt\":\"ab\"}");
    assert_string_equal(r.body, "{\"tokens\":[257,97,98],\"count\":3,\"max_model_len\":512}\n");
    response_free(&r);
    r = client_request(f.port, "POST", "/tokenize",
                       "{\"text\":[\"a\",\"bc\"],\"add_special_tokens\":false}");
    assert_string_equal(r.body,
                        "{\"tokens\":[[97],[98,99]],\"count\":[1,2],\"max_model_len\":512}\n");
    response_free(&r);
    r = client_request(f.port, "POST", "/tokenize", "{" HI "}");
    json_t *root = response_json(&r);
    assert_int_equal(json_int_at(root, "count"), 18);
    json_decref(root);
    response_free(&r);
    r = client_request(f.port, "POST", "/detokenize", "{\"tokens\":[257,97,98]}");
    assert_string_equal(r.body, "{\"text\":\"ab\",\"prompt\":\"ab\"}\n");
    response_free(&r);
    expect_error("/detokenize", "{\"tokens\":[5000]}", 400, "tokens", NULL, "5000");
    expect_error("/detokenize", "{}", 400, "tokens", NULL, NULL);
    expect_error("/tokenize", "{}", 400, "prompt", NULL, NULL);
}

static void a_full_queue_is_429(void **state)
{
    f.engine->queue_limit = 0;
    response_t r = client_request(f.port, "POST", "/v1/completions", "{\"prompt\":\"a\"}");
    assert_int_equal(r.status, 429);
    assert_non_null(strstr(r.text, "\r\nRetry-After: 1\r\n"));
    assert_non_null(strstr(r.body, "\"type\":\"rate_limit_error\""));
    response_free(&r);
    assert_int_equal(open_requests(), 0);
}

static void engine_failures(void **state)
{
    f.engine->fail_after = 2;
    f.engine->fail_finish = ENGINE_FINISH_ERROR;
    expect_error("/v1/completions", "{\"prompt\":\"a\"}", 500, NULL, NULL, "the FFN side is gone");
    response_t r = client_request(f.port, "GET", "/health", "");
    assert_int_equal(r.status, 503);
    response_free(&r);
    r = client_request(f.port, "POST", "/v1/completions", "{\"prompt\":\"a\",\"stream\":true}");
    assert_int_equal(r.status, 200);
    assert_non_null(
        strstr(r.body, "data: {\"error\":{\"message\":\"model tiny/model failed: the FFN"));
    assert_null(strstr(r.body, "[DONE]"));
    assert_true(r.complete);
    response_free(&r);
    /* Before the first token a stream can still have its own status. */
    f.engine->fail_after = 0;
    expect_error("/v1/completions", "{\"prompt\":\"a\",\"stream\":true}", 500, NULL, NULL, NULL);
    f.engine->fail_finish = ENGINE_FINISH_ABORT;
    expect_error("/v1/completions", "{\"prompt\":\"a\"}", 503, NULL, NULL, "stopping");
    f.engine->closed = true;
    expect_error("/v1/completions", "{\"prompt\":\"a\"}", 503, NULL, NULL,
                 "the engine was stopped");
}

static void expect_health(int status)
{
    response_t r = client_request(f.port, "GET", "/health", "");
    assert_int_equal(r.status, status);
    response_free(&r);
}

/* What ends one request, the sampler or the text, says nothing about the next one. */
static void a_requests_own_error_leaves_the_model_healthy(void **state)
{
    f.engine->fail_after = 2;
    f.engine->fail_finish = ENGINE_FINISH_ERROR;
    f.engine->fail_text = "a logit is no number";
    expect_error("/v1/completions", "{\"prompt\":\"a\"}", 500, NULL, NULL, "a logit is no number");
    expect_health(200);
    f.engine->fail_after = -1;
    f.engine->closed = true;
    expect_error("/v1/completions", "{\"prompt\":\"a\"}", 503, NULL, NULL, "was stopped");
    expect_health(503);
}

/* The engine says which limit it was; how many tokens there are does not. */
static void time_limits_are_told_apart(void **state)
{
    f.engine->fail_finish = ENGINE_FINISH_TIMEOUT;
    f.engine->fail_after = 0;
    f.engine->fail_text = "the request waited longer than the queue time limit";
    expect_error("/v1/completions", "{\"prompt\":\"a\"}", 503, NULL, "queue_timeout",
                 "longer than the queue time limit");
    f.engine->fail_text = "the request took longer than its time limit";
    for (int tokens = 0; tokens < 2; tokens++) {
        f.engine->fail_after = tokens;
        expect_error("/v1/completions", "{\"prompt\":\"a\"}", 504, NULL, NULL,
                     "took longer than its time limit");
    }
    expect_health(200);
}

/* The same answer as for a prompt that was too long from the start, streaming or not. */
static void a_prompt_that_does_not_fit_any_more_is_400(void **state)
{
    static const char *const bodies[] = {"{\"prompt\":\"a\"}",
                                         "{\"prompt\":\"a\",\"stream\":true}"};
    f.engine->fail_finish = ENGINE_FINISH_TOO_LONG;
    f.engine->fail_after = 0;
    f.engine->fail_text = "the prompt does not fit any more";
    for (size_t i = 0; i < 2; i++)
        expect_error("/v1/completions", bodies[i], 400, NULL, "context_length_exceeded",
                     "does not fit any more");
    expect_error("/generate", "{\"text\":\"a\",\"stream\":true}", 400, NULL,
                 "context_length_exceeded", "does not fit any more");
    expect_health(200);
}

static void a_disconnect_cancels(void **state)
{
    static const char *const bodies[] = {
        "{\"prompt\":\"a\",\"n\":3,\"ignore_eos\":true,\"max_tokens\":500}",
        "{\"prompt\":\"a\",\"n\":3,\"ignore_eos\":true,\"max_tokens\":500,\"stream\":true}"};
    f.engine->tick_us = 20000;
    for (int i = 0; i < 6; i++) {
        /* Waiting or streaming; closed, half-closed, or reset. */
        char text[512];
        const char *body = bodies[i % 2];
        int fd = client_connect(f.port);
        f.engine->cancelled = 0;
        sprintf(text, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %zu\r\n\r\n%s",
                strlen(body), body);
        client_send(fd, text);
        wait_for(f.engine->open == 3);
        if (i / 2 == 1) {
            shutdown(fd, SHUT_WR);
        } else {
            struct linger reset = {1, 0};
            if (i / 2 == 2)
                setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
            close(fd);
        }
        wait_for(f.engine->cancelled == 3);
        wait_for(f.engine->open == 0);
        wait_for(open_requests() == 0);
        if (i / 2 == 1)
            close(fd);
    }
}

/* A half-closed client whose answer needs no waiting still gets it. */
static void half_close_after_a_quick_request(void **state)
{
    int fd = client_connect(f.port);
    client_send(fd, "GET /health HTTP/1.1\r\nHost: x\r\n\r\n");
    shutdown(fd, SHUT_WR);
    response_t r = client_receive(fd);
    assert_int_equal(r.status, 200);
    response_free(&r);
    assert_true(client_closed(fd, 2000));
    close(fd);
}

/* A request whose answer goes through small buffers, so that not reading it holds it up. */
static int client_post_small(const char *path, const char *body)
{
    int fd = client_connect_small(f.port);
    client_send_post(fd, path, body);
    return fd;
}

static void a_slow_reader_is_dropped(void **state)
{
    tear_down(state);
    start(&(http_instance_config_t){.max_output_bytes = 64 * 1024});
    f.engine->tick_us = 20;
    static const char body[] = "{\"prompt\":\"a\",\"n\":60,\"ignore_eos\":true,\"max_tokens\":510,"
                               "\"stream\":true,\"logprobs\":20}";
    int fd = client_post_small("/v1/completions", body);
    wait_for(f.engine->cancelled > 0); /* all may be over before we look */
    wait_for(f.engine->open == 0);
    wait_for(open_requests() == 0);
    response_t r = client_request(f.port, "GET", "/metrics", "");
    assert_non_null(
        strstr(r.body, "xpool_instance_http_slow_readers_total{model=\"tiny/model\"} 1"));
    response_free(&r);
    close(fd);
}

/* /generate streams all of the answer in each event: who reads slowly gets fewer, and the end. */
static void a_slow_reader_of_whole_answers_gets_the_end(void **state)
{
    static const char body[] =
        "{\"text\":[\"a\",\"b\",\"c\",\"d\",\"e\",\"f\",\"g\",\"h\",\"i\",\"j\",\"k\",\"l\"],"
        "\"stream\":true,\"sampling_params\":{\"max_new_tokens\":510,\"ignore_eos\":true}}";
    static const char end[] = "data: [DONE]\n\n\r\n0\r\n\r\n";
    char tail[sizeof(end)];
    tear_down(state);
    start(&(http_instance_config_t){.max_output_bytes = 256 * 1024});
    f.engine->tick_us = 20;
    int fd = client_post_small("/generate", body);
    wait_for(f.engine->submitted > 0);
    wait_for(f.engine->open == 0); /* not a byte is read until all of it was made */
    client_read_tail(fd, tail, sizeof(end) - 1);
    assert_string_equal(tail, end);
    assert_int_equal(f.engine->cancelled, 0);
    wait_for(open_requests() == 0);
    close(fd);
}

static void quiesce(void *context)
{
    http_instance_quiesce(f.instance);
}

static void quiescing_refuses_new_and_ends_old(void **state)
{
    f.engine->paused = true;
    int fd = client_connect(f.port);
    client_send(fd, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 30\r\n\r\n"
                    "{\"prompt\":\"a\",\"max_tokens\":16}");
    wait_for(f.engine->open == 1);
    loop_do(&f.loop, quiesce, NULL);
    expect_error("/v1/completions", "{\"prompt\":\"a\"}", 503, NULL, NULL, "stopping");
    f.engine->paused = false;
    response_t r = client_receive(fd);
    assert_int_equal(r.status, 200);
    assert_non_null(strstr(r.text, "\r\nConnection: close\r\n"));
    response_free(&r);
    assert_true(client_closed(fd, 2000));
    close(fd);
    wait_for(open_requests() == 0);
}

/* An answer counts as open until its last byte has left, however slowly the client reads. */
static void an_unsent_answer_is_open(void **state)
{
    static const char body[] = "{\"prompt\":\"a\",\"n\":16,\"ignore_eos\":true,\"max_tokens\":500,"
                               "\"stream\":true,\"logprobs\":20}";
    static const char end[] = "data: [DONE]\n\n\r\n0\r\n\r\n";
    char tail[sizeof(end)];
    tear_down(state);
    start(&(http_instance_config_t){.max_output_bytes = 256u << 20});
    f.engine->tick_us = 20;
    int fd = client_post_small("/v1/completions", body);
    wait_for(f.engine->submitted > 0);
    loop_do(&f.loop, quiesce, NULL);
    for (int seconds = 0; f.engine->open && seconds < 60; seconds++)
        sleep(1);
    assert_int_equal(f.engine->open, 0);
    usleep(300000); /* the job is over; only its bytes are left */
    assert_int_equal(open_requests(), 1);
    client_read_tail(fd, tail, sizeof(end) - 1);
    assert_string_equal(tail, end);
    wait_for(open_requests() == 0);
    close(fd);
}

static void destroying_with_open_requests(void **state)
{
    f.engine->paused = true;
    int fd = client_connect(f.port);
    client_send(fd, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 14\r\n\r\n"
                    "{\"prompt\":\"a\"}");
    wait_for(f.engine->open == 1);
    tear_down(state);
    assert_true(client_closed(fd, 2000));
    close(fd);
    start(NULL);
}

static void too_many_requests(void **state)
{
    tear_down(state);
    start(&(http_instance_config_t){.max_requests = 2});
    f.engine->paused = true;
    int fds[2];
    for (int i = 0; i < 2; i++) {
        fds[i] = client_connect(f.port);
        client_send(fds[i], "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 14\r\n\r\n"
                            "{\"prompt\":\"a\"}");
    }
    wait_for(f.engine->open == 2);
    expect_error("/v1/completions", "{\"prompt\":\"a\"}", 429, NULL, NULL, "open");
    close(fds[0]);
    close(fds[1]);
}

static void a_model_without_tokenizer_or_template(void **state)
{
    tear_down(state);
    start(&(http_instance_config_t){.chat_template_reason = "it is a base model"});
    expect_error("/v1/chat/completions", "{" HI "}", 400, "messages", "no_chat_template",
                 "it is a base model");
    f.engine->no_tokenizer = true;
    expect_error("/v1/completions", "{\"prompt\":\"a\"}", 400, NULL, "no_tokenizer", "token ids");
    expect_error("/tokenize", "{\"prompt\":\"a\"}", 400, NULL, "no_tokenizer", NULL);
    json_t *root = post("/generate", "{\"input_ids\":[65],\"return_logprob\":true}", 200);
    assert_int_equal(json_int_at(root, "output_ids.0"), 'H');
    json_decref(root);
}

static void many_clients_at_once(void **state)
{
    int fds[48];
    static const char body[] = "{\"prompt\":\"a\",\"max_tokens\":9,\"stream\":true}";
    char text[256];
    sprintf(text, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %zu\r\n\r\n%s",
            sizeof(body) - 1, body);
    for (int i = 0; i < 48; i++) {
        fds[i] = client_connect(f.port);
        client_send(fds[i], text);
    }
    for (int i = 0; i < 48; i++) {
        response_t r = client_receive(fds[i]);
        assert_int_equal(r.status, 200);
        assert_non_null(strstr(r.body, "[DONE]"));
        response_free(&r);
        close(fds[i]);
    }
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(chat_has_openais_form),
        CASE(chat_stream_has_openais_form),
        CASE(characters_are_never_split),
        CASE(chat_logprobs),
        CASE(completion_with_echo_and_logprobs),
        CASE(completion_batches_and_n),
        CASE(a_batch_may_exceed_the_queue),
        CASE(stop_strings),
        CASE(all_sampling_fields_arrive),
        CASE(generate_has_sglangs_form),
        CASE(generate_streams_cumulative_text),
        CASE(bad_requests_name_the_field),
        CASE(a_long_prompt_is_told_apart),
        CASE(deep_nesting_is_refused),
        CASE(unknown_models_paths_and_methods),
        CASE(models_and_small_paths),
        CASE(a_full_queue_is_429),
        CASE(engine_failures),
        CASE(a_requests_own_error_leaves_the_model_healthy),
        CASE(time_limits_are_told_apart),
        CASE(a_prompt_that_does_not_fit_any_more_is_400),
        CASE(a_disconnect_cancels),
        CASE(half_close_after_a_quick_request),
        CASE(a_slow_reader_is_dropped),
        CASE(a_slow_reader_of_whole_answers_gets_the_end),
        CASE(quiescing_refuses_new_and_ends_old),
        CASE(an_unsent_answer_is_open),
        CASE(destroying_with_open_requests),
        CASE(too_many_requests),
        CASE(a_model_without_tokenizer_or_template),
        CASE(many_clients_at_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
