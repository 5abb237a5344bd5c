/* SPDX-License-Identifier: MIT */
/*
 * The KV Cache's memory: one memfd-backed mapping for the whole capacity, token-major.
 *
 * Layout: token slot -> layer -> K, V -> kv_heads x head_dim floats. A page is `page_tokens`
 * consecutive slots, so page p covers one contiguous byte range and elastic KV can map and unmap by
 * range. The mapping is sparse: a page costs memory only once its rows are written.
 */
#ifndef XPOOL_ENGINE_KV_H
#define XPOOL_ENGINE_KV_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef struct engine_kv {
    int fd;
    float *base;
    size_t bytes;
    uint32_t pages, page_tokens, layers;
    uint32_t row_floats; /* kv_heads * head_dim */
    size_t token_floats; /* layers * 2 * row_floats */
} engine_kv_t;

/* `id` names the memfd "xpool-kv:<id>". XP_NO_MEMORY / XP_IO when the mapping cannot be made. */
xp_status_t engine_kv_create(const char *id, uint32_t pages, uint32_t page_tokens, uint32_t layers,
                             uint32_t row_floats, engine_kv_t *kv_out);
void engine_kv_fini(engine_kv_t *kv); /* accepts a zeroed object */

/* K row of `slot` (page * page_tokens + offset) in `layer`; V follows row_floats later. */
static inline float *engine_kv_row(const engine_kv_t *kv, uint32_t layer, size_t slot)
{
    return kv->base + slot * kv->token_floats + (size_t)layer * 2 * kv->row_floats;
}
#endif
