/* SPDX-License-Identifier: MIT */
/*
 * A checkpoint as a set of named tensors: safetensors (one file or sharded with an index) or GGUF.
 *
 * Names are Hugging Face names whatever the format: GGUF's blk.0.ffn_gate.weight appears as
 * model.layers.0.mlp.gate_proj.weight, its merged expert tensors as one tensor an expert
 * (model.layers.0.mlp.experts.E.gate_proj.weight), its router as model.layers.0.mlp.gate.weight.
 * GGUF's permuted Llama q and k rows are put back in Hugging Face order by checkpoint_read_rows().
 * Tied embeddings are always model.embed_tokens.weight, never lm_head.weight, whatever the file
 * says; tensors of layers past the spec's (multi-token prediction) are not listed.
 *
 * Opening reads headers only. Tensor bytes are read with pread(2), never mapped, so that a process
 * holds only what it asked for. A checkpoint may be read by several threads at once.
 */
#ifndef XPOOL_MODEL_CHECKPOINT_H
#define XPOOL_MODEL_CHECKPOINT_H

#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"
#include "base/status.h"
#include "model/spec.h"

typedef struct checkpoint checkpoint_t;

#define CHECKPOINT_MAX_DIMENSIONS 4

typedef struct checkpoint_tensor {
    const char *name; /* lives as long as the checkpoint */
    xp_dtype_t dtype;
    uint32_t dimensions;
    uint64_t shape[CHECKPOINT_MAX_DIMENSIONS]; /* row-major, slowest first (HF order) */
    uint64_t bytes;
    uint32_t file; /* internal: which file, where in it */
    uint64_t offset;
    uint32_t permute_heads; /* internal: 0, or heads of GGUF's q/k permutation */
} checkpoint_tensor_t;

/* `spec` gives the architecture (needed for GGUF names); it is copied. */
xp_status_t checkpoint_open(const char *path, const model_spec_t *spec,
                            checkpoint_t **checkpoint_out);
void checkpoint_close(checkpoint_t *checkpoint); /* accepts NULL */

size_t checkpoint_tensor_count(const checkpoint_t *checkpoint);
const checkpoint_tensor_t *checkpoint_tensor_at(const checkpoint_t *checkpoint, size_t index);
/* NULL when absent. */
const checkpoint_tensor_t *checkpoint_tensor_find(const checkpoint_t *checkpoint, const char *name);

/* Finds `name` and checks dimensions and shape; XP_INVALID names file, tensor, wanted and found
 * shape and, when it is missing, the nearest name. Every dtype of base/dtype.h is accepted. */
xp_status_t checkpoint_tensor_require(const checkpoint_t *checkpoint, const char *name,
                                      uint32_t dimensions, const uint64_t *shape,
                                      const checkpoint_tensor_t **tensor_out);

/* Reads whole rows [first_row, first_row + rows) of a matrix (or elements of a vector as one row)
 * into `out`, kept in the tensor's dtype, and for a column range [first_column,
 * first_column+columns) of every row, which must fall on block borders for quantised types. out
 * holds rows * xp_dtype_row_bytes(dtype, columns) bytes. Short files are XP_INVALID naming file and
 * tensor. */
xp_status_t checkpoint_read_rows(const checkpoint_t *checkpoint, const checkpoint_tensor_t *tensor,
                                 uint64_t first_row, uint64_t rows, uint64_t first_column,
                                 uint64_t columns, void *out);

/* Reads the whole tensor converted to F32 (norms, biases, small tensors). */
xp_status_t checkpoint_read_f32(const checkpoint_t *checkpoint, const checkpoint_tensor_t *tensor,
                                float *out);

/* GGUF metadata access, for the tokenizer: NULL / XP_NOT_FOUND when the checkpoint is not GGUF. */
typedef struct gguf_file gguf_file_t;
const gguf_file_t *checkpoint_gguf(const checkpoint_t *checkpoint);

/* Sum of file bytes of every tensor for which the predicate holds (ledger, `model inspect`). */
typedef bool (*checkpoint_predicate_t)(const checkpoint_tensor_t *tensor, void *context);
uint64_t checkpoint_bytes(const checkpoint_t *checkpoint, checkpoint_predicate_t predicate,
                          void *context);
/* True for tensors the FFN side owns (everything under .mlp. of a layer; norms are not). */
bool checkpoint_tensor_is_ffn(const checkpoint_tensor_t *tensor);
#endif
