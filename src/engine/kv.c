/* SPDX-License-Identifier: MIT */
/*
 * Owns the KV Cache's backing and its layout. Created and freed by the thread that owns the engine;
 * resized by the engine thread between steps; the rows are written and read by the engine thread's
 * team. Never decides which page belongs to whom (pages.c does), nor how much is mapped
 * (elastic.c).
 */
#include "engine/kv.h"

#include <stdio.h>
#include <string.h>

static xp_status_t create(const char *id, uint32_t bundles, kv_backing_options_t *options,
                          engine_kv_t *kv, engine_kv_t *kv_out)
{
    char name[128];
    kv->part_floats = (size_t)kv->page_tokens * kv->head_dim;
    kv->page_floats = (size_t)kv->layers * kv->kv_heads * 2 * kv->part_floats;
    if (__builtin_mul_overflow(bundles, kv->bundle_pages, &kv->pages) ||
        __builtin_mul_overflow((size_t)kv->pages, kv->page_floats * sizeof(float), &kv->bytes) ||
        kv->bytes == 0)
        return xp_fail(XP_INVALID, "KV Cache of %u times %u pages of %u tokens has no valid size",
                       bundles, kv->bundle_pages, kv->page_tokens);
    snprintf(name, sizeof name, "xpool-kv:%s", id);
    options->name = name;
    options->ceiling_bundles = bundles;
    options->bundle_bytes = kv->bundle_pages * kv->page_floats * sizeof(float);
    options->behind_bytes = (size_t)ENGINE_KV_READ_AHEAD_ROWS * kv->head_dim * sizeof(float);
    XP_TRY(kv_backing_create_memfd(options, &kv->backing));
    kv->base = (float *)(uintptr_t)kv_backing_address(kv->backing);
    *kv_out = *kv;
    return XP_OK;
}

xp_status_t engine_kv_create(const char *id, uint32_t pages, uint32_t page_tokens, uint32_t layers,
                             uint32_t kv_heads, uint32_t head_dim, engine_kv_t *kv_out)
{
    engine_kv_t kv = {.bundle_pages = 1,
                      .page_tokens = page_tokens,
                      .layers = layers,
                      .kv_heads = kv_heads,
                      .head_dim = head_dim};
    kv_backing_options_t options = {.lazy = true};
    XP_TRY(create(id, pages, &options, &kv, &kv));
    xp_status_t status = engine_kv_resize(&kv, pages);
    if (status != XP_OK) {
        engine_kv_fini(&kv);
        return status;
    }
    *kv_out = kv;
    return XP_OK;
}

xp_status_t engine_kv_create_elastic(const char *id, uint32_t bundles, uint32_t bundle_pages,
                                     uint32_t page_tokens, uint32_t layers, uint32_t kv_heads,
                                     uint32_t head_dim, uint64_t (*room_bytes)(void *context),
                                     void *room_context, engine_kv_t *kv_out)
{
    engine_kv_t kv = {.bundle_pages = bundle_pages,
                      .page_tokens = page_tokens,
                      .layers = layers,
                      .kv_heads = kv_heads,
                      .head_dim = head_dim};
    kv_backing_options_t options = {.room_bytes = room_bytes, .room_context = room_context};
    return create(id, bundles, &options, &kv, kv_out);
}

void engine_kv_fini(engine_kv_t *kv)
{
    kv_backing_destroy(kv->backing);
    memset(kv, 0, sizeof *kv);
}

xp_status_t engine_kv_resize(engine_kv_t *kv, uint32_t bundles)
{
    return kv_backing_resize(kv->backing, bundles);
}

uint32_t engine_kv_mapped_bundles(const engine_kv_t *kv)
{
    return kv_backing_mapped(kv->backing);
}

void engine_kv_copy_page(const engine_kv_t *kv, uint32_t from, uint32_t to)
{
    memcpy(kv->base + to * kv->page_floats, kv->base + from * kv->page_floats,
           kv->page_floats * sizeof(float));
}

void engine_kv_store(const engine_kv_t *kv, uint32_t layer, uint32_t page, uint32_t offset,
                     const float *keys, const float *values)
{
    const size_t width = kv->head_dim;
    for (uint32_t head = 0; head < kv->kv_heads; head++) {
        float *to = engine_kv_part(kv, layer, page, head) + offset * width;
        memcpy(to, keys + head * width, width * sizeof(float));
        memcpy(to + kv->part_floats, values + head * width, width * sizeof(float));
    }
}
