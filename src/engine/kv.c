/* SPDX-License-Identifier: MIT */
/*
 * Owns the KV Cache's memfd and mapping. Created and freed by the thread that owns the engine; the
 * rows are written and read by the engine thread's team. Never decides which page belongs to whom
 * (pages.c does).
 */
#include "engine/kv.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

xp_status_t engine_kv_create(const char *id, uint32_t pages, uint32_t page_tokens, uint32_t layers,
                             uint32_t kv_heads, uint32_t head_dim, engine_kv_t *kv_out)
{
    engine_kv_t kv = {.fd = -1,
                      .pages = pages,
                      .page_tokens = page_tokens,
                      .layers = layers,
                      .kv_heads = kv_heads,
                      .head_dim = head_dim,
                      .part_floats = (size_t)page_tokens * head_dim};
    kv.page_floats = (size_t)layers * kv_heads * 2 * kv.part_floats;
    const size_t behind = (size_t)ENGINE_KV_READ_AHEAD_ROWS * head_dim * sizeof(float);
    if (__builtin_mul_overflow((size_t)pages, kv.page_floats * sizeof(float), &kv.bytes) ||
        kv.bytes == 0 || __builtin_add_overflow(kv.bytes, behind, &kv.mapped_bytes))
        return xp_fail(XP_INVALID, "KV Cache of %u pages of %u tokens has no valid size", pages,
                       page_tokens);

    char name[128];
    snprintf(name, sizeof name, "xpool-kv:%s", id);
    kv.fd = memfd_create(name, MFD_CLOEXEC);
    if (kv.fd < 0)
        return xp_fail_errno(XP_IO, "memfd_create(%s)", name);
    xp_status_t status = XP_OK;
    if (ftruncate(kv.fd, (off_t)kv.mapped_bytes) != 0) {
        status = xp_fail_errno(XP_NO_MEMORY, "%s: %zu bytes", name, kv.mapped_bytes);
        goto close_fd;
    }
    void *base =
        mmap(NULL, kv.mapped_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, kv.fd, 0);
    if (base == MAP_FAILED) {
        status = xp_fail_errno(XP_NO_MEMORY, "%s: mapping %zu bytes", name, kv.mapped_bytes);
        goto close_fd;
    }
    kv.base = base;
    *kv_out = kv;
    return XP_OK;

close_fd:
    close(kv.fd);
    return status;
}

void engine_kv_fini(engine_kv_t *kv)
{
    if (!kv->base)
        return;
    munmap(kv->base, kv->mapped_bytes);
    close(kv->fd);
    memset(kv, 0, sizeof *kv);
    kv->fd = -1;
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
