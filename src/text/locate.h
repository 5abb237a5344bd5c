/* SPDX-License-Identifier: MIT */
/* Where a checkpoint keeps what this module reads (private to src/text). */
#ifndef XPOOL_TEXT_LOCATE_H
#define XPOOL_TEXT_LOCATE_H

#include <stdbool.h>

#include "base/status.h"

#define TEXT_MAX_PATH 4096

typedef struct text_location {
    enum { TEXT_FOLDER = 0, TEXT_FILE, TEXT_GGUF } kind;
    char path[TEXT_MAX_PATH];
} text_location_t;

/* A folder stays a folder unless it has no tokenizer.json and exactly one .gguf, which is named
 * then. */
xp_status_t text_locate(const char *path, text_location_t *location_out);
/* Writes "folder/name"; true when it is a regular file. */
bool text_path_exists(const char *folder, const char *name, char path_out[TEXT_MAX_PATH]);
#endif
