/* SPDX-License-Identifier: MIT */
/* A shard's weights in device memory: loaded from a checkpoint, made up, or adopted. */
#ifndef XPOOL_FFN_CUDA_LOAD_H
#define XPOOL_FFN_CUDA_LOAD_H

#include "cuda/stream.h"
#include "cuda/vmm.h"
#include "ffn/cuda_layout.h"

/* What loading uses of its runtime. */
typedef struct cuda_loader {
    const cuda_device_t *device;
    cuda_function_t fill, digest;
    cuda_stream_t stream;
    cuda_address_t word;   /* 8 bytes of device memory */
    uint64_t *word_staged; /* 8 bytes of pinned memory */
} cuda_loader_t;

typedef struct cuda_shard {
    uint32_t blocks;
    cuda_block_t block[FFN_CUDA_WEIGHT_BLOCKS];
    uint64_t base[FFN_CUDA_WEIGHT_BLOCKS];  /* device addresses */
    uint64_t bytes[FFN_CUDA_WEIGHT_BLOCKS]; /* used; what is mapped is rounded up */
    uint64_t identity, content;
} cuda_shard_t;

/* Takes the shard's allocations and fills them; nothing is left when it fails. */
xp_status_t cuda_shard_load(const cuda_loader_t *loader, const ffn_install_t *install,
                            const checkpoint_t *checkpoint, const cuda_layout_t *layout,
                            cuda_shard_t *shard_out);
/* Maps `kept` without reading files. XP_INVALID: it is another shard's, or its bytes are not what
 * they were when it was complete. */
xp_status_t cuda_shard_adopt(const cuda_loader_t *loader, const ffn_install_t *install,
                             const cuda_layout_t *layout, const ffn_cuda_weights_t *kept,
                             cuda_shard_t *shard_out);
/* New descriptors, the caller's. */
xp_status_t cuda_shard_export(const cuda_shard_t *shard, ffn_cuda_weights_t *weights_out);
void cuda_shard_release(cuda_shard_t *shard); /* accepts all zero */
#endif
