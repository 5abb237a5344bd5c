/* SPDX-License-Identifier: MIT */
/*
 * Fuzzes what the HTTP interface parses: the first byte chooses the parser, the rest is its input.
 *
 * c, t, g: bodies of chat, text completions and /generate. h, r: heads of requests and responses.
 * k: a chunked body, decoded in one piece and byte by byte, which must agree. w: bytes through the
 * JSON writer, whose output must parse.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "http/http_api.h"
#include "http/http_message.h"

static void fuzz_body(http_api_kind_t kind, const char *data, size_t size)
{
    http_api_request_t request;
    http_problem_t problem = {0};
    if (http_api_parse(kind, data, size, &request, &problem) != XP_OK) {
        http_text_t text;
        json_t *root;
        XP_ASSERT(problem.status >= 400 && problem.message[0]);
        http_text_init(&text, 1u << 16);
        http_problem_write(&problem, &text);
        XP_ASSERT(http_json_parse_object(text.buf.data, text.buf.length, &root) == XP_OK);
        json_decref(root);
        http_text_fini(&text);
        return;
    }
    XP_ASSERT(request.n >= 1 && request.sampling_count >= 1);
    XP_ASSERT(request.sampling[0].stop_count <= ENGINE_MAX_STOPS);
    XP_ASSERT(request.sampling[0].top_logprobs <= ENGINE_MAX_LOGPROBS);
    XP_ASSERT(kind == HTTP_API_CHAT ? request.message_count > 0 : request.prompt_count > 0);
    http_api_request_fini(&request);
}

static void fuzz_head(bool response, const char *data, size_t size)
{
    http_head_t head;
    char path[256];
    size_t scanned = 0, length = http_head_find(data, size, &scanned);
    if (!length)
        return;
    XP_ASSERT(length <= size);
    xp_status_t status = response ? http_head_parse_response(data, length, &head)
                                  : http_head_parse_request(data, length, &head);
    if (status != XP_OK)
        return;
    for (uint32_t i = 0; i < head.header_count; i++) {
        const http_slice_t *value = &head.headers[i].value;
        XP_ASSERT(value->data >= data && value->data + value->length <= data + length);
    }
    if (!response) {
        (void)http_path_decode(head.target, path, sizeof(path));
        (void)http_query_value(head.target, "model", path, sizeof(path));
    }
}

static size_t decode(const char *data, size_t size, size_t step, char *out, bool *valid, bool *done)
{
    http_chunk_decoder_t decoder = {0};
    size_t used = 0, filled = 0;
    while (used < size && !decoder.done) {
        size_t part = size - used < step ? size - used : step, consumed;
        http_slice_t payload;
        *valid = http_chunk_decode(&decoder, data + used, part, &consumed, &payload) == XP_OK;
        if (!*valid)
            break;
        XP_ASSERT(consumed > 0 && consumed <= part);
        memcpy(out + filled, payload.data, payload.length);
        filled += payload.length;
        used += consumed;
    }
    *done = decoder.done;
    return filled;
}

static void fuzz_chunks(const char *data, size_t size)
{
    char *whole = malloc(size + 1), *bytes = malloc(size + 1);
    bool whole_valid = true, whole_done, bytes_valid = true, bytes_done;
    size_t a = decode(data, size, size ? size : 1, whole, &whole_valid, &whole_done);
    size_t b = decode(data, size, 1, bytes, &bytes_valid, &bytes_done);
    XP_ASSERT(whole_valid == bytes_valid && whole_done == bytes_done && a == b);
    XP_ASSERT(!memcmp(whole, bytes, a));
    free(whole);
    free(bytes);
}

static void fuzz_writer(const char *data, size_t size)
{
    http_text_t text;
    json_t *root;
    http_text_init(&text, 8 * size + 64);
    http_text_puts(&text, "{\"a\":");
    http_text_json(&text, data, size);
    http_text_puts(&text, "}");
    XP_ASSERT(text.status == XP_OK);
    /* A NUL is written correctly and refused by our own reader. */
    if (!memchr(data, 0, size)) {
        XP_ASSERT(http_json_parse_object(text.buf.data, text.buf.length, &root) == XP_OK);
        json_decref(root);
    }
    http_text_fini(&text);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    if (!size)
        return 0;
    const char *data = (const char *)bytes + 1;
    size--;
    switch (bytes[0]) {
    case 'c':
        fuzz_body(HTTP_API_CHAT, data, size);
        break;
    case 't':
        fuzz_body(HTTP_API_COMPLETION, data, size);
        break;
    case 'g':
        fuzz_body(HTTP_API_GENERATE, data, size);
        break;
    case 'h':
    case 'r':
        fuzz_head(bytes[0] == 'r', data, size);
        break;
    case 'k':
        fuzz_chunks(data, size);
        break;
    case 'w':
        fuzz_writer(data, size);
        break;
    default:
        break;
    }
    return 0;
}
