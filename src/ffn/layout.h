/* SPDX-License-Identifier: MIT */
/*
 * Which matrices a shard of a model consists of: checkpoint names, whole and shard shapes, dtypes,
 * and where each lies in the shard's memory.
 */
#ifndef XPOOL_FFN_LAYOUT_H
#define XPOOL_FFN_LAYOUT_H

#include "model/checkpoint.h"

typedef enum layout_axis { LAYOUT_WHOLE = 0, LAYOUT_ROWS, LAYOUT_COLUMNS } layout_axis_t;
typedef enum layout_role {
    LAYOUT_GATE = 0,
    LAYOUT_UP,
    LAYOUT_DOWN,
    LAYOUT_ROUTER,
    LAYOUT_BIAS, /* a vector of experts, kept as F32 */
} layout_role_t;

#define LAYOUT_NAME_BYTES 128

typedef struct layout_item {
    char name[LAYOUT_NAME_BYTES];
    const checkpoint_tensor_t *tensor; /* NULL for dummy weights */
    layout_role_t role;
    layout_axis_t axis;   /* what tensor parallelism splits */
    uint32_t layer, part; /* part: expert, or `experts` for the shared one; dense 0 */
    uint32_t whole_rows, whole_columns;
    uint32_t rows, columns; /* of the shard */
    xp_dtype_t dtype;       /* as kept in memory */
    uint64_t offset, bytes; /* in the shard's memory; 64-byte aligned */
} layout_item_t;

typedef struct layout {
    layout_item_t *items;
    size_t count;
    uint64_t weight_bytes; /* of the memfd, a multiple of the page */
    uint64_t table_bytes;  /* layers, matrices and counters on the heap */
    uint64_t usage_bytes;  /* of these, the counters */
    uint32_t triples;
} layout_t;

/* Lists the shard's matrices; checks presence, shapes, dtypes and divisibility. `checkpoint` NULL:
 * dummy weights of `dtype` (AUTO: the config's dtype, or BF16). */
xp_status_t layout_make(const model_spec_t *spec, const checkpoint_t *checkpoint, xp_dtype_t dtype,
                        uint32_t tp_size, layout_t *layout_out);
void layout_fini(layout_t *layout);
#endif
