/* SPDX-License-Identifier: MIT */
/* What the parts of the checkpoint share: the directory being built, and its entries. */
#ifndef XPOOL_MODEL_CHECKPOINT_PRIVATE_H
#define XPOOL_MODEL_CHECKPOINT_PRIVATE_H

#include "model/checkpoint.h"
#include "model/gguf.h"

#define CHECKPOINT_MAX_FILES   1024
#define CHECKPOINT_MAX_TENSORS 1000000
#define CHECKPOINT_MAX_NAME    512

/* A tensor and what only messages need. `tensor` is first: the public pointer is this one. */
typedef struct checkpoint_entry {
    checkpoint_tensor_t tensor;
    char type_name[16]; /* as the file calls it, for tensors we cannot read */
} checkpoint_entry_t;

struct checkpoint {
    char **paths;
    int *fds;
    uint32_t file_count;
    checkpoint_entry_t *entries; /* sorted by name once finished */
    size_t entry_count, entry_capacity;
    /* Names while building are offsets into this block, since it moves as it grows. */
    char *names;
    size_t names_length, names_capacity;
    gguf_file_t *gguf;
    /* from the spec */
    model_architecture_t architecture;
    uint32_t layers, heads, kv_heads;
    bool tied;
};

/* Adds a file and opens it; its index and size come out. */
xp_status_t checkpoint_add_file(checkpoint_t *checkpoint, const char *path, uint32_t *file_out,
                                uint64_t *bytes_out);
/* Adds a tensor; `name` is copied. Tensors of layers past the spec's (MTP) are left out. */
xp_status_t checkpoint_add_tensor(checkpoint_t *checkpoint, const char *name,
                                  const checkpoint_tensor_t *tensor, const char *type_name);
/* Reads exactly `bytes` at `offset`; `what` is the tensor's name or "the header". */
xp_status_t checkpoint_pread(const checkpoint_t *checkpoint, uint32_t file, uint64_t offset,
                             uint64_t bytes, const char *what, void *out);

/* Fill an empty checkpoint from a folder with safetensors, or from an opened GGUF file. */
xp_status_t checkpoint_load_safetensors(checkpoint_t *checkpoint, const char *folder);
xp_status_t checkpoint_load_gguf(checkpoint_t *checkpoint, const char *path);

/* One safetensors header, for the loader, the fuzz target and tests. Each tensor is handed to
 * `visit`, with its offset from the beginning of the file. */
typedef xp_status_t (*safetensors_visit_t)(void *context, const char *name,
                                           const checkpoint_tensor_t *tensor,
                                           const char *type_name);
/* `header` is the JSON text of `length` bytes that follows the length word; `file_bytes` is the
 * whole file's size. */
xp_status_t safetensors_parse(const char *header, size_t length, uint64_t file_bytes,
                              const char *where, safetensors_visit_t visit, void *context);
#endif
