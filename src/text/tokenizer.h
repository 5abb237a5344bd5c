/* SPDX-License-Identifier: MIT */
/*
 * Tokenizers: an immutable object shared by threads, plus caller-owned state for streaming.
 *
 * Sources: tokenizer.json (Hugging Face) or GGUF metadata. Models: byte-level BPE, and
 * SentencePiece-style BPE (metaspace, byte fallback). Exact against the `tokenizers` library.
 */
#ifndef XPOOL_TEXT_TOKENIZER_H
#define XPOOL_TEXT_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/status.h"

typedef struct tokenizer tokenizer_t;

#define TOKENIZER_MAX_TEXT_BYTES (16u << 20)

/* `path`: a folder with tokenizer.json (tokenizer_config.json used if present), a folder holding
 * one .gguf, a tokenizer.json file, or a .gguf file. */
xp_status_t tokenizer_load(const char *path, tokenizer_t **tokenizer_out);
/* From a tokenizer.json text. */
xp_status_t tokenizer_parse_json(const char *json, size_t length, const char *where,
                                 tokenizer_t **tokenizer_out);
void tokenizer_destroy(tokenizer_t *tokenizer);

uint32_t tokenizer_vocab_size(const tokenizer_t *tokenizer); /* highest id + 1 */
/* -1 when the token does not exist. */
int32_t tokenizer_token_id(const tokenizer_t *tokenizer, const char *content, size_t length);
/* The token as stored (byte-level alphabet for BPE); NULL for a hole. */
const char *tokenizer_token_text(const tokenizer_t *tokenizer, int32_t id);
bool tokenizer_token_is_special(const tokenizer_t *tokenizer, int32_t id);
/* Raw bytes one token stands for (may be part of a UTF-8 character). Returns the byte count;
 * `*bytes_out` lives as long as the tokenizer. Special tokens give their content. */
size_t tokenizer_token_bytes(const tokenizer_t *tokenizer, int32_t id, const char **bytes_out);

/* Encodes UTF-8 text (invalid sequences are replaced by U+FFFD first). Special and added tokens in
 * the text are recognised when parse_special, as the `tokenizers` library does. add_special_tokens
 * runs the post-processor (BOS/EOS). `*ids_out` is malloc'd. */
xp_status_t tokenizer_encode(const tokenizer_t *tokenizer, const char *text, size_t length,
                             bool add_special_tokens, bool parse_special, int32_t **ids_out,
                             size_t *count_out);
/* Appends the text of ids, as tokenizers' decode(ids, skip_special_tokens). Unknown ids are
 * XP_INVALID. */
xp_status_t tokenizer_decode(const tokenizer_t *tokenizer, const int32_t *ids, size_t count,
                             bool skip_special_tokens, xp_buf_t *text_out);

/* Streaming: push ids one by one, get text that is always whole UTF-8 characters. What the pieces
 * add up to equals tokenizer_decode() of all ids. One limit: with byte fallback, where one wrong
 * byte spoils the whole run of byte tokens, a run is held until it ends, but no more than
 * TOKENIZER_STREAM_HELD bytes of it; a valid run that goes wrong only later has been given out by
 * then. */
#define TOKENIZER_STREAM_HELD 64
typedef struct tokenizer_stream {
    const tokenizer_t *tokenizer;
    bool skip_special_tokens;
    bool started;     /* a token has been decoded: the first one is treated differently */
    bool spoiled;     /* byte fallback: this run of bytes holds invalid UTF-8 */
    uint8_t stripped; /* SentencePiece: leading spaces removed; 255 = no more */
    uint8_t held_count;
    char held[TOKENIZER_STREAM_HELD]; /* bytes of an unfinished character or of a run */
} tokenizer_stream_t;
void tokenizer_stream_init(tokenizer_stream_t *stream, const tokenizer_t *tokenizer,
                           bool skip_special_tokens);
/* Appends zero or more whole characters. */
xp_status_t tokenizer_stream_push(tokenizer_stream_t *stream, int32_t id, xp_buf_t *text_out);
/* Appends what is held, as U+FFFD where unfinished. */
xp_status_t tokenizer_stream_finish(tokenizer_stream_t *stream, xp_buf_t *text_out);
#endif
