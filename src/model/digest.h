/* SPDX-License-Identifier: MIT */
/* Whether two paths hold the same checkpoint, told without reading gigabytes. */
#ifndef XPOOL_MODEL_DIGEST_H
#define XPOOL_MODEL_DIGEST_H

#include <stdint.h>

#include "base/status.h"

#define MODEL_DIGEST_BYTES 32

/* SHA-256 over config.json and, of every weight file in order of names: name, size, its first MiB
 * (the header and what follows) and 64 pieces spread evenly over the rest, so that checkpoints of
 * one shape but other weights differ. A single changed weight may pass. Takes a Hugging Face folder
 * or a .gguf file, as model_spec_load(); a folder without weights is its config.json. Independent
 * of where the folder lies. */
xp_status_t model_checkpoint_digest(const char *path, uint8_t digest_out[MODEL_DIGEST_BYTES]);

/* From inode, size and time of change of each file, without opening one: the same number means
 * that nothing was written there since. 0: there is nothing at `path`. */
uint64_t model_checkpoint_stamp(const char *path);
#endif
