/* SPDX-License-Identifier: MIT */
/*
 * xpool tokenize, detokenize and chat-template: the text layer by itself, so that anyone can
 * compare it with another implementation. Main thread only; reads a checkpoint's tokenizer, never
 * its weights.
 */
#include "cli/cli.h"

#include <ctype.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "text/chat_template.h"
#include "text/tokenizer.h"

/* A text of the largest size, every byte of it written as \u00XX. */
#define LINE_MAX_BYTES   (6ull * TOKENIZER_MAX_TEXT_BYTES + (1u << 20))
#define OUTPUT_MAX_BYTES (512ull << 20)

static const char TOKENIZE_HELP[] =
    "usage: xpool tokenize --model PATH [--no-special-tokens] [--pieces] [TEXT ...]\n"
    "       xpool tokenize --model PATH --jsonl < LINES\n\n"
    "Turns texts into token ids. PATH is a folder with tokenizer.json or one .gguf, or such a "
    "file.\n"
    "Without TEXT, standard input is one text.\n\n"
    "  --no-special-tokens  leave out what the post-processor adds (BOS, EOS)\n"
    "  --pieces             one line a token: its id and its text\n"
    "  --jsonl              reads lines {\"text\": ..., \"add_special_tokens\": true,\n"
    "                       \"parse_special\": true} (the last two optional), writes {\"ids\": "
    "[...]};\n"
    "                       a bad line gives {\"error\": ...} and exit code 1 at the end\n";

static const char DETOKENIZE_HELP[] =
    "usage: xpool detokenize --model PATH [--skip-special-tokens] ID ...\n"
    "       xpool detokenize --model PATH --jsonl < LINES\n\n"
    "Turns token ids into text.\n\n"
    "  --skip-special-tokens  leave special tokens out\n"
    "  --jsonl                reads lines {\"ids\": [...], \"skip_special_tokens\": false}, "
    "writes\n"
    "                         {\"text\": ...}; with \"stream\": true, {\"pieces\": [...]}: what a\n"
    "                         streaming answer is made of, one piece a token and one at the end\n";

static const char CHAT_HELP[] =
    "usage: xpool chat-template --model PATH [--template NAME] [--system TEXT] TEXT ...\n"
    "       xpool chat-template --model PATH [--template NAME] --jsonl < LINES\n\n"
    "Shows the text a model sees for a conversation. Each TEXT is one turn, the user's first.\n\n"
    "  --template NAME  use this template instead of recognising the checkpoint's\n"
    "  --name           print the template's name and stop\n"
    "  --jsonl          reads lines {\"messages\": [...], \"add_generation_prompt\": true,\n"
    "                   \"enable_thinking\": ..., \"tools\": [...]}, writes {\"text\": ...}\n";

/* ---- lines of JSON ---- */

/* Handles one parsed line; the answer is put into `answer`, a fresh object. */
typedef xp_status_t (*line_function_t)(void *context, const json_t *line, json_t *answer);

static void print_json(const json_t *value)
{
    char *text = json_dumps(value, JSON_COMPACT);
    puts(text ? text : "{\"error\":\"no memory\"}");
    free(text);
}

/* Error messages may quote cut characters, which JSON cannot hold. */
static void print_error_line(void)
{
    char text[XP_ERROR_TEXT_MAX];
    snprintf(text, sizeof(text), "%s", xp_error_last()->text);
    json_t *message = json_string(text);
    for (size_t i = 0; !message && text[i]; i++) {
        if ((unsigned char)text[i] >= 0x80)
            text[i] = '?';
    }
    if (!message)
        message = json_string(text);
    json_t *answer = json_pack("{s:o}", "error", message ? message : json_null());
    print_json(answer);
    json_decref(answer);
}

static xp_status_t handle_line(const char *text, size_t length, line_function_t function,
                               void *context)
{
    json_error_t error;
    if (length > LINE_MAX_BYTES)
        return xp_fail(XP_INVALID, "a line of %zu bytes is too long", length);
    json_t *line = json_loadb(text, length, JSON_ALLOW_NUL, &error);
    if (!line)
        return xp_fail(XP_INVALID, "not a JSON object: %s", error.text);
    json_t *answer = json_object();
    xp_status_t status = json_is_object(line) ? function(context, line, answer)
                                              : xp_fail(XP_INVALID, "a line must be a JSON object");
    if (status == XP_OK)
        print_json(answer);
    json_decref(answer);
    json_decref(line);
    return status;
}

static int run_lines(line_function_t function, void *context)
{
    char *line = NULL;
    size_t capacity = 0;
    ssize_t length;
    int code = CLI_EXIT_OK;
    while ((length = getline(&line, &capacity, stdin)) >= 0) {
        while (length > 0 && isspace((unsigned char)line[length - 1]))
            length--;
        if (!length)
            continue;
        if (handle_line(line, (size_t)length, function, context) != XP_OK) {
            print_error_line();
            code = CLI_EXIT_FAILED;
        }
    }
    free(line);
    return code;
}

static xp_status_t get_bool(const json_t *line, const char *key, bool fallback, bool *value_out)
{
    const json_t *value = json_object_get(line, key);
    if (value && !json_is_boolean(value))
        return xp_fail(XP_INVALID, "\"%s\" must be true or false", key);
    *value_out = value ? json_is_true(value) : fallback;
    return XP_OK;
}

static int fail(const char *command)
{
    fprintf(stderr, "xpool %s: %s\n", command, xp_error_last()->text);
    return CLI_EXIT_FAILED;
}

/* Takes --model and loads it; an exit code, or -1 to go on. */
static int take_model(int *argc, char **argv, const char **path_out)
{
    *path_out = cli_take_option(argc, argv, "--model");
    if (*path_out)
        return -1;
    fprintf(stderr, "xpool %s: --model PATH is needed (see --help)\n", argv[0]);
    return CLI_EXIT_USAGE;
}

/* True, after a message, when an option is left that nobody has taken. Behind "--" all is text. */
static bool unknown_option(int argc, char **argv)
{
    for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++) {
        if (argv[i][0] != '-' || !argv[i][1] || isdigit((unsigned char)argv[i][1]))
            continue;
        fprintf(stderr, "xpool %s: unknown option \"%s\" (see --help; text goes behind --)\n",
                argv[0], argv[i]);
        return true;
    }
    return false;
}

static void drop_separator(int *argc, char **argv)
{
    for (int i = 1; i < *argc; i++) {
        if (strcmp(argv[i], "--") != 0)
            continue;
        memmove(&argv[i], &argv[i + 1], (size_t)(*argc - i) * sizeof(*argv));
        --*argc;
        return;
    }
}

/* ---- tokenize ---- */

static xp_status_t tokenize_line(void *context, const json_t *line, json_t *answer)
{
    const json_t *text = json_object_get(line, "text");
    bool specials = true, parse = true;
    int32_t *ids = NULL;
    size_t count = 0;
    if (!json_is_string(text))
        return xp_fail(XP_INVALID, "\"text\" must be a string");
    XP_TRY(get_bool(line, "add_special_tokens", true, &specials));
    XP_TRY(get_bool(line, "parse_special", true, &parse));
    XP_TRY(tokenizer_encode(context, json_string_value(text), json_string_length(text), specials,
                            parse, &ids, &count));
    json_t *list = json_array();
    for (size_t i = 0; i < count; i++)
        json_array_append_new(list, json_integer(ids[i]));
    free(ids);
    json_object_set_new(answer, "ids", list);
    return XP_OK;
}

static xp_status_t print_ids(const tokenizer_t *tokenizer, const char *text, size_t length,
                             bool specials, bool pieces)
{
    int32_t *ids = NULL;
    size_t count = 0;
    XP_TRY(tokenizer_encode(tokenizer, text, length, specials, true, &ids, &count));
    for (size_t i = 0; i < count; i++) {
        if (pieces)
            printf("%d\t%s\n", ids[i], tokenizer_token_text(tokenizer, ids[i]));
        else
            printf(i ? " %d" : "%d", ids[i]);
    }
    if (!pieces)
        putchar('\n');
    free(ids);
    return XP_OK;
}

int cmd_tokenize(int argc, char **argv)
{
    const char *path;
    tokenizer_t *tokenizer = NULL;
    if (cli_wants_help(argc, argv, TOKENIZE_HELP))
        return CLI_EXIT_OK;
    bool lines = cli_take_flag(&argc, argv, "--jsonl");
    bool specials = !cli_take_flag(&argc, argv, "--no-special-tokens");
    bool pieces = cli_take_flag(&argc, argv, "--pieces");
    int code = take_model(&argc, argv, &path);
    if (code >= 0)
        return code;
    if (unknown_option(argc, argv) || (lines && cli_leftover(argc, argv, 1)))
        return CLI_EXIT_USAGE;
    drop_separator(&argc, argv);
    if (tokenizer_load(path, &tokenizer) != XP_OK)
        return fail("tokenize");
    xp_status_t status = XP_OK;
    code = CLI_EXIT_OK;
    if (lines) {
        code = run_lines(tokenize_line, tokenizer);
    } else if (argc > 1) {
        for (int i = 1; i < argc && status == XP_OK; i++)
            status = print_ids(tokenizer, argv[i], strlen(argv[i]), specials, pieces);
    } else {
        char *text;
        size_t length;
        status = xp_file_read("/dev/stdin", TOKENIZER_MAX_TEXT_BYTES, &text, &length);
        if (status == XP_OK) {
            status = print_ids(tokenizer, text, length, specials, pieces);
            free(text);
        }
    }
    tokenizer_destroy(tokenizer);
    return status == XP_OK ? code : fail("tokenize");
}

/* ---- detokenize ---- */

static xp_status_t read_ids(const json_t *list, int32_t **ids_out)
{
    if (!json_is_array(list))
        return xp_fail(XP_INVALID, "\"ids\" must be a list of token ids");
    size_t count = json_array_size(list);
    int32_t *ids = malloc((count + 1) * sizeof(*ids));
    if (!ids)
        return xp_fail(XP_NO_MEMORY, "no memory for %zu ids", count);
    for (size_t i = 0; i < count; i++) {
        const json_t *id = json_array_get(list, i);
        json_int_t value = json_integer_value(id);
        if (!json_is_integer(id) || value < 0 || value > INT32_MAX) {
            free(ids);
            return xp_fail(XP_INVALID, "ids[%zu] is no token id", i);
        }
        ids[i] = (int32_t)value;
    }
    *ids_out = ids;
    return XP_OK;
}

static xp_status_t add_text(const xp_buf_t *text, json_t *list)
{
    json_t *string = json_stringn(text->data ? text->data : "", text->length);
    if (!string)
        return xp_fail(XP_FATAL, "the text is not whole UTF-8 characters");
    json_array_append_new(list, string);
    return XP_OK;
}

static xp_status_t stream_pieces(const tokenizer_t *tokenizer, const int32_t *ids, size_t count,
                                 bool skip, json_t *pieces)
{
    xp_buf_t text;
    xp_status_t status = XP_OK;
    tokenizer_stream_t stream;
    xp_buf_init(&text, OUTPUT_MAX_BYTES);
    tokenizer_stream_init(&stream, tokenizer, skip);
    for (size_t i = 0; i <= count && status == XP_OK; i++) {
        xp_buf_clear(&text);
        status = i < count ? tokenizer_stream_push(&stream, ids[i], &text)
                           : tokenizer_stream_finish(&stream, &text);
        if (status == XP_OK)
            status = add_text(&text, pieces);
    }
    xp_buf_fini(&text);
    return status;
}

static xp_status_t detokenize_line(void *context, const json_t *line, json_t *answer)
{
    const json_t *list = json_object_get(line, "ids");
    bool skip = false, stream = false;
    int32_t *ids = NULL;
    xp_buf_t text;
    XP_TRY(get_bool(line, "skip_special_tokens", false, &skip));
    XP_TRY(get_bool(line, "stream", false, &stream));
    XP_TRY(read_ids(list, &ids));
    json_t *pieces = json_array();
    xp_buf_init(&text, OUTPUT_MAX_BYTES);
    xp_status_t status = stream
                             ? stream_pieces(context, ids, json_array_size(list), skip, pieces)
                             : tokenizer_decode(context, ids, json_array_size(list), skip, &text);
    if (status == XP_OK && !stream)
        status = add_text(&text, pieces);
    if (status == XP_OK)
        json_object_set(answer, stream ? "pieces" : "text",
                        stream ? pieces : json_array_get(pieces, 0));
    json_decref(pieces);
    xp_buf_fini(&text);
    free(ids);
    return status;
}

static xp_status_t print_text(const tokenizer_t *tokenizer, char **words, int count, bool skip)
{
    xp_status_t status = XP_OK;
    xp_buf_t text;
    int32_t *ids = calloc((size_t)count + 1, sizeof(*ids));
    if (!ids)
        return xp_fail(XP_NO_MEMORY, "no memory for %d ids", count);
    xp_buf_init(&text, OUTPUT_MAX_BYTES);
    for (int i = 0; i < count; i++) {
        char *end;
        long value = strtol(words[i], &end, 10);
        if (*end || end == words[i] || value < 0 || value > INT32_MAX) {
            status = xp_fail(XP_INVALID, "\"%s\" is no token id", words[i]);
            goto done;
        }
        ids[i] = (int32_t)value;
    }
    status = tokenizer_decode(tokenizer, ids, (size_t)count, skip, &text);
    if (status == XP_OK) {
        fwrite(text.data ? text.data : "", 1, text.length, stdout);
        putchar('\n');
    }
done:
    xp_buf_fini(&text);
    free(ids);
    return status;
}

int cmd_detokenize(int argc, char **argv)
{
    const char *path;
    tokenizer_t *tokenizer = NULL;
    if (cli_wants_help(argc, argv, DETOKENIZE_HELP))
        return CLI_EXIT_OK;
    bool lines = cli_take_flag(&argc, argv, "--jsonl");
    bool skip = cli_take_flag(&argc, argv, "--skip-special-tokens");
    int code = take_model(&argc, argv, &path);
    if (code >= 0)
        return code;
    if (unknown_option(argc, argv) || (lines && cli_leftover(argc, argv, 1)))
        return CLI_EXIT_USAGE;
    if (tokenizer_load(path, &tokenizer) != XP_OK)
        return fail("detokenize");
    xp_status_t status = XP_OK;
    code = CLI_EXIT_OK;
    if (lines)
        code = run_lines(detokenize_line, tokenizer);
    else
        status = print_text(tokenizer, argv + 1, argc - 1, skip);
    tokenizer_destroy(tokenizer);
    return status == XP_OK ? code : fail("detokenize");
}

/* ---- chat-template ---- */

static xp_status_t message_text(const json_t *message, const char *key, const char **text_out)
{
    const json_t *value = json_object_get(message, key);
    *text_out = NULL;
    if (!value || json_is_null(value))
        return XP_OK;
    if (!json_is_string(value))
        return xp_fail(XP_INVALID, "a message's \"%s\" must be a string", key);
    if (strlen(json_string_value(value)) != json_string_length(value))
        return xp_fail(XP_INVALID, "a message's \"%s\" holds a NUL", key);
    *text_out = json_string_value(value);
    return XP_OK;
}

/* The JSON of a member; NULL when it is absent or null. free() it. */
static char *member_json(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);
    return value && !json_is_null(value) ? json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT) : NULL;
}

static xp_status_t read_message(const json_t *json, chat_message_t *message)
{
    if (!json_is_object(json))
        return xp_fail(XP_INVALID, "a message must be a JSON object");
    XP_TRY(message_text(json, "role", &message->role));
    XP_TRY(message_text(json, "content", &message->content));
    XP_TRY(message_text(json, "reasoning_content", &message->reasoning));
    if (!message->role)
        return xp_fail(XP_INVALID, "a message has no \"role\"");
    message->tool_calls_json = member_json(json, "tool_calls");
    return XP_OK;
}

static xp_status_t chat_line(void *context, const json_t *line, json_t *answer)
{
    const json_t *list = json_object_get(line, "messages");
    const json_t *thinking = json_object_get(line, "enable_thinking");
    size_t count = json_array_size(list);
    chat_options_t options = {.enable_thinking = -1};
    xp_status_t status = XP_OK;
    xp_buf_t text;
    if (!json_is_array(list))
        return xp_fail(XP_INVALID, "\"messages\" must be a list");
    XP_TRY(get_bool(line, "add_generation_prompt", true, &options.add_generation_prompt));
    if (thinking && !json_is_boolean(thinking) && !json_is_null(thinking))
        return xp_fail(XP_INVALID, "\"enable_thinking\" must be true or false");
    if (json_is_boolean(thinking))
        options.enable_thinking = json_is_true(thinking);
    chat_message_t *messages = calloc(count + 1, sizeof(*messages));
    if (!messages)
        return xp_fail(XP_NO_MEMORY, "no memory for %zu messages", count);
    options.tools_json = member_json(line, "tools");
    xp_buf_init(&text, OUTPUT_MAX_BYTES);
    for (size_t i = 0; i < count; i++)
        XP_TRY_GOTO(status, done, read_message(json_array_get(list, i), &messages[i]));
    XP_TRY_GOTO(status, done, chat_template_render(context, messages, count, &options, &text));
    json_object_set_new(answer, "text", json_stringn(text.data ? text.data : "", text.length));
done:
    for (size_t i = 0; i < count; i++)
        free((char *)messages[i].tool_calls_json);
    free((char *)options.tools_json);
    free(messages);
    xp_buf_fini(&text);
    return status;
}

static xp_status_t print_chat(const chat_template_t *chat_template, const char *system,
                              char **turns, int turn_count)
{
    chat_options_t options = {.add_generation_prompt = turn_count % 2 == 1, .enable_thinking = -1};
    chat_message_t *messages = calloc((size_t)turn_count + 1, sizeof(*messages));
    size_t count = 0;
    xp_buf_t text;
    if (!messages)
        return xp_fail(XP_NO_MEMORY, "no memory for %d messages", turn_count);
    xp_buf_init(&text, OUTPUT_MAX_BYTES);
    if (system)
        messages[count++] = (chat_message_t){.role = "system", .content = system};
    for (int i = 0; i < turn_count; i++)
        messages[count++] =
            (chat_message_t){.role = i % 2 ? "assistant" : "user", .content = turns[i]};
    xp_status_t status = chat_template_render(chat_template, messages, count, &options, &text);
    if (status == XP_OK)
        fwrite(text.data ? text.data : "", 1, text.length, stdout);
    xp_buf_fini(&text);
    free(messages);
    return status;
}

int cmd_chat_template(int argc, char **argv)
{
    const char *path;
    chat_template_t *chat_template = NULL;
    if (cli_wants_help(argc, argv, CHAT_HELP))
        return CLI_EXIT_OK;
    bool lines = cli_take_flag(&argc, argv, "--jsonl");
    bool name_only = cli_take_flag(&argc, argv, "--name");
    const char *name = cli_take_option(&argc, argv, "--template");
    const char *system = cli_take_option(&argc, argv, "--system");
    int code = take_model(&argc, argv, &path);
    if (code >= 0)
        return code;
    if (unknown_option(argc, argv) || ((lines || name_only) && cli_leftover(argc, argv, 1)))
        return CLI_EXIT_USAGE;
    drop_separator(&argc, argv);
    if (!lines && !name_only && argc < 2) {
        fprintf(stderr, "xpool chat-template: a conversation is needed (see --help)\n");
        return CLI_EXIT_USAGE;
    }
    if (chat_template_load(path, name, &chat_template) != XP_OK)
        return fail("chat-template");
    xp_status_t status = XP_OK;
    code = CLI_EXIT_OK;
    if (name_only)
        printf("%s\n", chat_template_name(chat_template));
    else if (lines)
        code = run_lines(chat_line, chat_template);
    else
        status = print_chat(chat_template, system, argv + 1, argc - 1);
    chat_template_destroy(chat_template);
    return status == XP_OK ? code : fail("chat-template");
}
