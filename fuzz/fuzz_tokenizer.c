/* SPDX-License-Identifier: MIT */
/*
 * Fuzz target: a tokenizer.json, a zero byte, a text. What loads must encode and decode the text
 * without harm, and its streams must add up to what it decodes. Without a zero byte the input is
 * also read as a chat template.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "model/gguf.h"
#include "text/chat_private.h"
#include "text/internal.h"

#define MAX_TEXT 4096

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* A run of byte tokens longer than a stream holds may be given out before it goes wrong. */
static void check_stream(const tokenizer_t *tokenizer, const int32_t *ids, size_t count,
                         const xp_buf_t *decoded)
{
    xp_buf_t sum;
    tokenizer_stream_t stream;
    xp_buf_init(&sum, 64u << 20);
    XP_ASSERT(xp_buf_append(&sum, "", 0) == XP_OK); /* from here on there is a place to point at */
    tokenizer_stream_init(&stream, tokenizer, false);
    for (size_t i = 0; i < count; i++) {
        size_t before = sum.length;
        XP_ASSERT(tokenizer_stream_push(&stream, ids[i], &sum) == XP_OK);
        XP_ASSERT(text_utf8_valid(sum.data + before, sum.length - before));
    }
    XP_ASSERT(tokenizer_stream_finish(&stream, &sum) == XP_OK);
    XP_ASSERT(text_utf8_valid(sum.data, sum.length));
    if (!tokenizer->decoder.byte_fallback || count <= TOKENIZER_STREAM_HELD)
        XP_ASSERT(sum.length == decoded->length &&
                  (!sum.length || !memcmp(sum.data, decoded->data, sum.length)));
    xp_buf_fini(&sum);
}

static void use(const tokenizer_t *tokenizer, const char *text, size_t length, bool parse_special)
{
    int32_t *ids;
    size_t count;
    xp_buf_t decoded;
    if (tokenizer_encode(tokenizer, text, length, true, parse_special, &ids, &count) != XP_OK)
        return;
    xp_buf_init(&decoded, 64u << 20);
    if (tokenizer_decode(tokenizer, ids, count, false, &decoded) == XP_OK)
        check_stream(tokenizer, ids, count, &decoded);
    xp_buf_fini(&decoded);
    free(ids);
}

static void use_gguf(const uint8_t *data, size_t size)
{
    static const char text[] = "Once <s> upon\n a   t\xC3\xA9me 12345 \xE4\xB8\x96 ab";
    gguf_file_t *file;
    tokenizer_t *tokenizer;
    if (gguf_parse(data, size, size, "fuzz", &file) != XP_OK)
        return;
    if (tokenizer_build_gguf(file, &tokenizer) == XP_OK) {
        use(tokenizer, text, sizeof(text) - 1, true);
        tokenizer_destroy(tokenizer);
    }
    gguf_close(file);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size > 4 && !memcmp(data, "GGUF", 4)) {
        use_gguf(data, size);
        return 0;
    }
    const char *json = (const char *)data;
    const char *zero = memchr(json, '\0', size);
    size_t length = zero ? (size_t)(zero - json) : size;
    const char *text = zero ? zero + 1 : json;
    size_t text_length = size - (size_t)(text - json);
    tokenizer_t *tokenizer;
    uint64_t fingerprint;
    if (!zero)
        (void)chat_fingerprint(json, size, &fingerprint);
    if (tokenizer_parse_json(json, length, "fuzz", &tokenizer) != XP_OK)
        return 0;
    if (text_length > MAX_TEXT)
        text_length = MAX_TEXT;
    use(tokenizer, text, text_length, true);
    use(tokenizer, text, text_length, false);
    tokenizer_destroy(tokenizer);
    return 0;
}
