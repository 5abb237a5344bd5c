/* SPDX-License-Identifier: MIT */
/* What the parts of the synthetic checkpoint writer share. */
#ifndef XPOOL_MODEL_SYNTH_PRIVATE_H
#define XPOOL_MODEL_SYNTH_PRIVATE_H

#include <stdio.h>

#include "base/buf.h"
#include "model/inventory.h"
#include "model/synth.h"

#define SYNTH_MAX_FILE_TEXT (256u << 20)
#define SYNTH_SPECIALS      3u
#define SYNTH_MIN_VOCAB     (SYNTH_SPECIALS + 256u)

extern const char synth_chat_template[];

/* A file written under a temporary name and renamed when whole. */
typedef struct synth_file {
    FILE *stream;
    char *path, *part;
    uint64_t written;
} synth_file_t;

xp_status_t synth_file_open(const char *folder, const char *name, synth_file_t *file_out);
xp_status_t synth_file_write(synth_file_t *file, const void *data, size_t bytes);
xp_status_t synth_file_commit(synth_file_t *file);
void synth_file_abandon(synth_file_t *file); /* after commit: does nothing */
xp_status_t synth_write_text(const char *folder, const char *name, const xp_buf_t *text);

typedef struct synth_job {
    const synth_options_t *options;
    const model_spec_t *spec;
    const char *folder;
    uint64_t done_bytes, total_bytes;
} synth_job_t;

/* Row `row` of the tensor called `name`: the same whatever rows were made before. */
void synth_row(const synth_options_t *options, const inventory_tensor_t *tensor, uint64_t row,
               uint64_t columns, float *out);
/* Writes rows of one tensor, converted; `stored_row(row)` gives which row stands at that place. */
typedef uint64_t (*synth_order_t)(const void *context, uint64_t place);
xp_status_t synth_write_tensor(synth_job_t *job, synth_file_t *file,
                               const inventory_tensor_t *tensor, xp_dtype_t dtype,
                               synth_order_t order, const void *order_context);

/* Token text in the byte-level alphabet (UTF-8, NUL-terminated); `out` holds 64 bytes. */
void synth_token_text(uint32_t id, char out[64]);
/* The two parts of merge `index`, the one that makes token SYNTH_MIN_VOCAB + index. */
void synth_merge(uint32_t index, char left[64], char right[64]);

xp_status_t synth_config_json(const synth_options_t *options, xp_buf_t *text);
xp_status_t synth_tokenizer_json(uint32_t vocab, xp_buf_t *text);
xp_status_t synth_tokenizer_config_json(uint32_t context, xp_buf_t *text);
xp_status_t synth_write_safetensors(synth_job_t *job);
xp_status_t synth_write_gguf(synth_job_t *job);
#endif
