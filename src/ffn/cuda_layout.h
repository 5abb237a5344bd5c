/* SPDX-License-Identifier: MIT */
/*
 * How a shard lies in device memory: the matrices of ffn/layout.h in the form that the kernels take
 * (one 16-bit type, widths padded to FFN_CUDA_WIDTH_MULTIPLE), packed into few large allocations,
 * and the tables over them. Pure functions: no driver, no weights are read.
 */
#ifndef XPOOL_FFN_CUDA_LAYOUT_H
#define XPOOL_FFN_CUDA_LAYOUT_H

#include "ffn/cuda_runtime.h"
#include "ffn/layout.h"

#define CUDA_LAYOUT_ALIGNMENT 256u

/* layout.items[i] on the device: row-major [rows][columns], rows and columns of the shard first,
 * zeros after them. */
typedef struct cuda_item {
    uint32_t rows, columns; /* padded */
    uint32_t block;         /* which allocation */
    uint32_t dtype;         /* ffn_cuda_dtype_t */
    uint64_t offset, bytes; /* in it */
} cuda_item_t;

typedef struct cuda_layout {
    layout_t layout;
    cuda_item_t *items;
    uint32_t blocks;
    uint64_t block_bytes[FFN_CUDA_WEIGHT_BLOCKS]; /* multiples of CUDA_LAYOUT_ALIGNMENT */
    uint64_t bytes;                               /* their sum */
    uint32_t dtype;                               /* of weights and activations */
} cuda_layout_t;

/* dtype AUTO: FP16 where the checkpoint has that, else BF16. block_limit: most bytes of one
 * allocation (a larger matrix gets one of its own); 0 = FFN_CUDA_WEIGHT_BLOCK_SIZE. */
xp_status_t cuda_layout_make(const model_spec_t *spec, const checkpoint_t *checkpoint,
                             xp_dtype_t dtype, uint32_t tp_size, uint64_t block_limit,
                             cuda_layout_t *layout_out);
void cuda_layout_fini(cuda_layout_t *layout); /* accepts all zero */

/* What names this shard: everything that decides which bytes lie where. */
uint64_t cuda_layout_identity(const cuda_layout_t *layout, const ffn_install_t *install);

/* The type as base/dtype.h names it. */
xp_dtype_t cuda_dtype_plain(uint32_t dtype);

/* The signature of layer `layer` of that shard. */
void cuda_layout_signature(const cuda_layout_t *layout, const model_spec_t *spec, uint32_t layer,
                           uint32_t tp_size, ffn_cuda_signature_t *signature_out);

/* Parts of a layer: 1, or the experts and the shared part. */
uint32_t cuda_layout_parts(const model_ffn_t *ffn);

/* Fills the layers' addresses: layers[spec->layers] and, one layer after the other, their parts;
 * base[b] is the device address of allocation b. Signatures and `parts` addresses are the
 * caller's. */
void cuda_layout_tables(const cuda_layout_t *layout, const model_spec_t *spec, const uint64_t *base,
                        ffn_cuda_layer_t *layers, ffn_cuda_part_t *parts);

/* Rows of one piece of bulk work. Dense: no launch of it takes much more than FFN_CUDA_PIECE_NS;
 * the launches of a piece of experts are shares of it. */
uint32_t cuda_layout_piece_rows(const ffn_cuda_signature_t *signature, uint32_t max_rows);
#endif
