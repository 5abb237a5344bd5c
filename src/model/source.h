/* SPDX-License-Identifier: MIT */
/*
 * What a checkpoint path stands for: a Hugging Face folder or a GGUF file. Private to src/model, so
 * that the spec and the checkpoint always decide alike.
 */
#ifndef XPOOL_MODEL_SOURCE_H
#define XPOOL_MODEL_SOURCE_H

#include <stdbool.h>

#include "base/status.h"

#define MODEL_PATH_MAX 4096

typedef struct model_source {
    bool is_gguf;
    char path[MODEL_PATH_MAX]; /* the folder, or the .gguf file itself */
} model_source_t;

/* A folder with safetensors is Hugging Face even when a .gguf lies beside; a folder with exactly
 * one .gguf and no safetensors is GGUF. */
xp_status_t model_source_resolve(const char *path, model_source_t *source_out);
/* "folder/name"; XP_INVALID when it does not fit. `out` holds MODEL_PATH_MAX bytes. */
xp_status_t model_source_join(const char *folder, const char *name, char *out);
#endif
