/* SPDX-License-Identifier: MIT */
/*
 * The KV Cache's memory: one mapping for the whole capacity, page-major, over kv/backing.h.
 *
 * Layout: page -> layer -> KV head -> K, V -> token -> head_dim floats. A page is `page_tokens`
 * consecutive slots and one contiguous byte range, and a bundle a whole number of pages, so that
 * memory comes and goes by range. Inside a page the rows that one attention work item reads lie one
 * behind the other: a token-major layout costs a TLB miss and a cold cache line for every token,
 * which the processor cannot foresee.
 */
#ifndef XPOOL_ENGINE_KV_H
#define XPOOL_ENGINE_KV_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "kv/backing.h"

typedef struct engine_kv {
    kv_backing_t *backing;
    float *base;
    size_t bytes; /* of all pages */
    uint32_t pages, page_tokens, layers, kv_heads, head_dim;
    uint32_t bundle_pages;
    size_t part_floats; /* K or V of one page, layer and KV head: page_tokens * head_dim */
    size_t page_floats; /* layers * kv_heads * 2 * part_floats */
} engine_kv_t;

/* Rows behind any row of the cache that may be read, though not used. */
#define ENGINE_KV_READ_AHEAD_ROWS 16

/* All pages may be used at once; a page costs memory only once its rows are written. `id` names the
 * memfd "xpool-kv:<id>". XP_NO_MEMORY / XP_IO when the mapping cannot be made. */
xp_status_t engine_kv_create(const char *id, uint32_t pages, uint32_t page_tokens, uint32_t layers,
                             uint32_t kv_heads, uint32_t head_dim, engine_kv_t *kv_out);
/* As above, in bundles of bundle_pages pages, none of which may be used before
 * engine_kv_resize(). room_bytes: as in kv_backing_options_t; NULL: not known. */
xp_status_t engine_kv_create_elastic(const char *id, uint32_t bundles, uint32_t bundle_pages,
                                     uint32_t page_tokens, uint32_t layers, uint32_t kv_heads,
                                     uint32_t head_dim, uint64_t (*room_bytes)(void *context),
                                     void *room_context, engine_kv_t *kv_out);
void engine_kv_fini(engine_kv_t *kv); /* accepts a zeroed object */

/* As kv_backing_resize(): pages of the first `bundles` bundles may be used, and read as zeroes when
 * they are new. */
xp_status_t engine_kv_resize(engine_kv_t *kv, uint32_t bundles);
uint32_t engine_kv_mapped_bundles(const engine_kv_t *kv);
/* Copies all rows of one page. */
void engine_kv_copy_page(const engine_kv_t *kv, uint32_t from, uint32_t to);

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
