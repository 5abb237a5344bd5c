/* SPDX-License-Identifier: MIT */
/*
 * The KV Cache's memory: one memfd-backed mapping for the whole capacity, page-major.
 *
 * Layout: page -> layer -> KV head -> K, V -> token -> head_dim floats. A page is `page_tokens`
 * consecutive slots and one contiguous byte range, so elastic KV can map and unmap by range. Inside
 * it the rows that one attention work item reads lie one behind the other: a token-major layout
 * costs a TLB miss and a cold cache line for every token, which the processor cannot foresee.
 * The mapping is sparse: a page costs memory only once its rows are written.
 */
#ifndef XPOOL_ENGINE_KV_H
#define XPOOL_ENGINE_KV_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef struct engine_kv {
    int fd;
    float *base;
    size_t bytes;        /* of all pages */
    size_t mapped_bytes; /* and of the rows that may be read behind the last one */
    uint32_t pages, page_tokens, layers, kv_heads, head_dim;
    size_t part_floats; /* K or V of one page, layer and KV head: page_tokens * head_dim */
    size_t page_floats; /* layers * kv_heads * 2 * part_floats */
} engine_kv_t;

/* Rows behind any row of the cache that may be read, though not used. */
#define ENGINE_KV_READ_AHEAD_ROWS 16

/* `id` names the memfd "xpool-kv:<id>". XP_NO_MEMORY / XP_IO when the mapping cannot be made. */
xp_status_t engine_kv_create(const char *id, uint32_t pages, uint32_t page_tokens, uint32_t layers,
                             uint32_t kv_heads, uint32_t head_dim, engine_kv_t *kv_out);
void engine_kv_fini(engine_kv_t *kv); /* accepts a zeroed object */

/* K rows of one page, layer and KV head: [page_tokens][head_dim]. V rows follow part_floats later.
 */
static inline float *engine_kv_part(const engine_kv_t *kv, uint32_t layer, uint32_t page,
                                    uint32_t kv_head)
{
    return kv->base + page * kv->page_floats +
           ((size_t)layer * kv->kv_heads + kv_head) * 2 * kv->part_floats;
}

/* Writes K and V, each [kv_heads][head_dim], of the token at `offset` of a page. */
void engine_kv_store(const engine_kv_t *kv, uint32_t layer, uint32_t page, uint32_t offset,
                     const float *keys, const float *values);
#endif
