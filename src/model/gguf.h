/* SPDX-License-Identifier: MIT */
/*
 * GGUF container: header, typed metadata, tensor directory (versions 2 and 3, little endian).
 * Reads with pread into its own bounded buffers; never maps, never reads tensor data.
 */
#ifndef XPOOL_MODEL_GGUF_H
#define XPOOL_MODEL_GGUF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"
#include "base/status.h"

typedef struct gguf_file gguf_file_t;

xp_status_t gguf_open(const char *path, gguf_file_t **file_out);
/* For fuzzing and tests: parse the front part of a file held in memory (copied). */
xp_status_t gguf_parse(const void *data, size_t length, uint64_t file_bytes, const char *where,
                       gguf_file_t **file_out);
void gguf_close(gguf_file_t *file);

/* Metadata. XP_NOT_FOUND when absent, XP_INVALID when of another type. Integers of any width and
 * sign convert when they fit. Strings are not NUL-terminated and live as long as the file. */
xp_status_t gguf_get_u64(const gguf_file_t *file, const char *key, uint64_t *value_out);
xp_status_t gguf_get_f64(const gguf_file_t *file, const char *key, double *value_out);
xp_status_t gguf_get_bool(const gguf_file_t *file, const char *key, bool *value_out);
xp_status_t gguf_get_string(const gguf_file_t *file, const char *key, const char **text_out,
                            size_t *length_out);
/* Arrays: count, then element access (strings, or numbers as f64). */
xp_status_t gguf_array_count(const gguf_file_t *file, const char *key, size_t *count_out);
xp_status_t gguf_array_string(const gguf_file_t *file, const char *key, size_t index,
                              const char **text_out, size_t *length_out);
xp_status_t gguf_array_f64(const gguf_file_t *file, const char *key, size_t index,
                           double *value_out);

typedef struct gguf_tensor {
    const char *name; /* GGUF name, NUL-terminated */
    xp_dtype_t dtype; /* XP_DTYPE_COUNT when the type is one we do not read */
    uint32_t type;    /* the raw ggml type number, for messages */
    uint32_t dimensions;
    uint64_t shape[4]; /* in GGUF order: fastest first */
    uint64_t offset;   /* absolute in the file */
    uint64_t bytes;
} gguf_tensor_t;
size_t gguf_tensor_count(const gguf_file_t *file);
const gguf_tensor_t *gguf_tensor_at(const gguf_file_t *file, size_t index);
const char *gguf_path(const gguf_file_t *file);
#endif
