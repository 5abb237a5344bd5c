/* SPDX-License-Identifier: MIT */
/*
 * Text of one request: whole characters from token ids, cut at stop strings. Text that might begin
 * a stop string is held back until the next tokens decide.
 */
#ifndef XPOOL_ENGINE_TEXT_H
#define XPOOL_ENGINE_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "engine/engine.h"
#include "text/tokenizer.h"

#define ENGINE_TEXT_MAX_BYTES (1u << 20)

typedef struct engine_text {
    tokenizer_stream_t stream;
    xp_buf_t pending; /* not yet taken */
    size_t ready;     /* bytes of it that may go out */
    bool has_tokenizer;
} engine_text_t;

/* Takes the buffer's first memory, so that later tokens allocate nothing. */
xp_status_t engine_text_init(engine_text_t *text);
void engine_text_fini(engine_text_t *text);
/* Starts a request; `tokenizer` may be NULL: all text is empty then. */
void engine_text_begin(engine_text_t *text, const tokenizer_t *tokenizer,
                       const engine_sampling_t *sampling);

/* Adds one token. With check_stops the result may match sampling->stops: *stop_out is its index,
 * and the text ends there; else -1. */
xp_status_t engine_text_push(engine_text_t *text, int32_t token, const engine_sampling_t *sampling,
                             bool check_stops, int32_t *stop_out);
/* No more tokens: an unfinished character becomes U+FFFD and held text may go out, unless a stop
 * string ended the text. */
xp_status_t engine_text_finish(engine_text_t *text, bool stopped);
/* Moves up to size - 1 ready bytes, whole characters, into `out` and NUL-terminates. */
uint32_t engine_text_take(engine_text_t *text, char *out, size_t size);
#endif
