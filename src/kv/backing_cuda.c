/* SPDX-License-Identifier: MIT */
/*
 * Backing of a device: one physical handle a bundle, mapped into one reserved range.
 *
 * A grant maps its handles piece by piece, makes a piece accessible with one call and clears it
 * while the next one is mapped; a handle's memory may have been anybody's. Handles given up go to
 * the ready pool first, up to its size, the rest to the driver. Calls come from one thread that has
 * the device's context; nothing here waits for the caller's kernels, only for its own clearing.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/stream.h"
#include "cuda/vmm.h"
#include "kv/backing.h"
#include "kv/backing_private.h"

#define CLEAR_PATIENCE_NS (5 * XP_NS_PER_S)
#define CLEAR_THREADS     1024

CUDA_IMAGE_DECLARE(kv_clear);

static kv_clearing_t clearing = {.blocks = 16, .piece_mib = 256};

typedef struct cuda_backing {
    kv_backing_t backing; /* first: the public pointer is this one */
    const cuda_device_t *device;
    cuda_stream_t stream; /* of clearing */
    cuda_module_t module; /* with `clear`, where the build has device code */
    cuda_function_t clear;
    cuda_memory_handle_t *handles; /* [ceiling], of the mapped bundles */
    cuda_memory_handle_t *ready;   /* [ready_wanted] */
    uint32_t ready_count, ready_wanted;
} cuda_backing_t;

static uint64_t address_of(const cuda_backing_t *self, uint32_t bundle)
{
    return self->backing.address + bundle * self->backing.bundle_bytes;
}

static xp_status_t handle_take(cuda_backing_t *self, cuda_memory_handle_t *handle_out)
{
    if (self->ready_count == 0)
        return cuda_vmm_create(self->device, self->backing.bundle_bytes, handle_out);
    *handle_out = self->ready[--self->ready_count];
    self->backing.extra_bytes -= self->backing.bundle_bytes;
    return XP_OK;
}

static void handle_give(cuda_backing_t *self, cuda_memory_handle_t handle)
{
    if (self->ready_count == self->ready_wanted) {
        cuda_vmm_release(self->device, handle);
        return;
    }
    self->ready[self->ready_count++] = handle;
    self->backing.extra_bytes += self->backing.bundle_bytes;
}

static xp_status_t bundle_map(cuda_backing_t *self, uint32_t bundle)
{
    cuda_memory_handle_t handle;
    XP_TRY(handle_take(self, &handle));
    xp_status_t status = cuda_vmm_map_only(self->device, address_of(self, bundle),
                                           self->backing.bundle_bytes, handle);
    if (status != XP_OK) {
        handle_give(self, handle);
        return status;
    }
    self->handles[bundle] = handle;
    return XP_OK;
}

/* One call for all of them: each one stops the device for a moment. */
static xp_status_t bundles_unmap(cuda_backing_t *self, uint32_t first, uint32_t end)
{
    if (first == end)
        return XP_OK;
    XP_TRY(cuda_vmm_unmap(self->device, address_of(self, first),
                          (end - first) * self->backing.bundle_bytes));
    while (end > first) {
        handle_give(self, self->handles[--end]);
        self->handles[end] = 0;
    }
    return XP_OK;
}

static xp_status_t range_clear(cuda_backing_t *self, uint64_t address, uint64_t bytes)
{
    if (self->clear && clearing.blocks) {
        uint64_t count = bytes / 16;
        void *parameters[] = {&address, &count};
        return cuda_launch(self->device, self->clear, clearing.blocks, CLEAR_THREADS, self->stream,
                           parameters);
    }
    const uint64_t most = clearing.memset_mib ? (uint64_t)clearing.memset_mib << 20 : bytes;
    for (uint64_t at = 0; at < bytes; at += most)
        XP_TRY(CUDA_CALL(self->device->driver, cuMemsetD8Async, address + at, 0,
                         bytes - at < most ? bytes - at : most, self->stream));
    return XP_OK;
}

static xp_status_t range_open(cuda_backing_t *self, uint32_t first, uint32_t end)
{
    const uint64_t bytes = (end - first) * self->backing.bundle_bytes;
    XP_TRY(cuda_vmm_access(self->device, address_of(self, first), bytes));
    return range_clear(self, address_of(self, first), bytes);
}

static uint32_t piece_bundles(const cuda_backing_t *self, uint32_t bundles)
{
    const uint64_t piece = ((uint64_t)clearing.piece_mib << 20) / self->backing.bundle_bytes;
    return piece && piece < bundles ? (uint32_t)piece : bundles;
}

static xp_status_t cuda_grow(kv_backing_t *backing, uint32_t bundles)
{
    cuda_backing_t *self = (cuda_backing_t *)backing;
    const uint32_t first = backing->mapped, piece = piece_bundles(self, bundles - first);
    uint32_t at = first, open = first; /* before `open`: perhaps being cleared */
    xp_status_t status = XP_OK;
    while (at < bundles && status == XP_OK) {
        const uint32_t end = bundles - at < piece ? bundles : at + piece;
        for (; at < end && status == XP_OK; at += status == XP_OK)
            status = bundle_map(self, at);
        if (status == XP_OK) {
            status = range_open(self, open, end);
            open = end;
        }
    }
    xp_error_t why = *xp_error_last();
    if (open > first) {
        xp_clock_t clock = xp_clock_system();
        xp_status_t cleared = cuda_stream_wait(self->device, self->stream, &clock,
                                               xp_monotonic_ns() + CLEAR_PATIENCE_NS);
        /* Clearing that is late may still be writing: those bundles stay mapped, out of everybody's
         * sight, and the next grow finds them gone with the process at the latest. */
        if (cleared == XP_TIMEOUT)
            return xp_fail_context(XP_FATAL, "clearing %u KV bundles", open - first);
        if (status == XP_OK && cleared != XP_OK) {
            status = cleared;
            why = *xp_error_last();
        }
    }
    if (status == XP_OK)
        return XP_OK;
    (void)bundles_unmap(self, first, at);
    return xp_fail(status == XP_NO_MEMORY || status == XP_FATAL ? status : XP_IO, "%s", why.text);
}

static xp_status_t cuda_shrink(kv_backing_t *backing, uint32_t bundles)
{
    cuda_backing_t *self = (cuda_backing_t *)backing;
    XP_TRY(bundles_unmap(self, bundles, backing->mapped));
    backing->mapped = bundles;
    return XP_OK;
}

static bool cuda_prepare(kv_backing_t *backing)
{
    cuda_backing_t *self = (cuda_backing_t *)backing;
    cuda_memory_handle_t handle;
    if (self->ready_count == self->ready_wanted ||
        self->ready_count + backing->mapped >= backing->ceiling)
        return false;
    if (cuda_vmm_create(self->device, backing->bundle_bytes, &handle) != XP_OK)
        return false; /* a grant will say so, if it comes to one */
    handle_give(self, handle);
    return self->ready_count < self->ready_wanted &&
           self->ready_count + backing->mapped < backing->ceiling;
}

static void cuda_trim(kv_backing_t *backing)
{
    cuda_backing_t *self = (cuda_backing_t *)backing;
    while (self->ready_count > 0)
        cuda_vmm_release(self->device, self->ready[--self->ready_count]);
    backing->extra_bytes = 0;
}

static void cuda_destroy(kv_backing_t *backing)
{
    cuda_backing_t *self = (cuda_backing_t *)backing;
    if (self->handles && self->ready) {
        (void)cuda_shrink(backing, 0);
        cuda_trim(backing);
    }
    if (backing->address)
        cuda_vmm_unreserve(self->device, backing->address, backing->reserved_bytes);
    cuda_stream_destroy(self->device, self->stream);
    cuda_module_unload(&self->module);
    free(self->handles);
    free(self->ready);
    free(self);
}

static const kv_backing_kind_t cuda_kind = {.grow = cuda_grow,
                                            .shrink = cuda_shrink,
                                            .prepare = cuda_prepare,
                                            .trim = cuda_trim,
                                            .destroy = cuda_destroy};

void kv_backing_clearing(kv_clearing_t way)
{
    clearing = way;
}

xp_status_t kv_backing_create_cuda(const kv_backing_options_t *options, const cuda_device_t *device,
                                   kv_backing_t **backing_out)
{
    uint64_t bytes;
    XP_TRY(kv_backing_measure(options, &bytes));
    if (options->bundle_bytes % device->granularity_bytes)
        return xp_fail(XP_INVALID,
                       "a KV bundle of %" PRIu64 " bytes on cuda:%d; it has to be a multiple of "
                       "%" PRIu64,
                       options->bundle_bytes, device->ordinal, device->granularity_bytes);
    cuda_backing_t *self = calloc(1, sizeof(*self));
    if (!self)
        return xp_fail(XP_NO_MEMORY, "backing of %s", options->name);
    self->device = device;
    self->ready_wanted = options->ready_bundles;
    self->backing = (kv_backing_t){.kind = &cuda_kind,
                                   .bundle_bytes = options->bundle_bytes,
                                   .ceiling = options->ceiling_bundles,
                                   .reserved_bytes = bytes,
                                   .fd = -1};
    xp_status_t status = XP_OK;
    self->handles = calloc(options->ceiling_bundles, sizeof(*self->handles));
    self->ready = calloc(options->ready_bundles + 1u, sizeof(*self->ready));
    if (!self->handles || !self->ready) {
        status = xp_fail(XP_NO_MEMORY, "tables of %u KV bundles", options->ceiling_bundles);
        goto destroy;
    }
    static const char *const clear_name = "kv_clear";
    cuda_address_t address;
    XP_TRY_GOTO(status, destroy, cuda_stream_create(device, false, &self->stream));
    /* A build without device code clears by the driver's memset. */
    if (cuda_image_kv_clear.begin != cuda_image_kv_clear.end)
        XP_TRY_GOTO(status, destroy,
                    cuda_module_load(device, &cuda_image_kv_clear, &clear_name, 1, &self->module,
                                     &self->clear));
    XP_TRY_GOTO(status, destroy, cuda_vmm_reserve(device, bytes, &address));
    self->backing.address = address;
    *backing_out = &self->backing;
    return XP_OK;
destroy:
    cuda_destroy(&self->backing);
    return status;
}
