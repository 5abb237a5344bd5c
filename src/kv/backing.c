/* SPDX-License-Identifier: MIT */
/*
 * The calls common to both kinds of backing, and the memfd of the CPU.
 *
 * The part without memory is mapped from the zero page, read-only: a row that is read ahead costs
 * nothing there, and a write that should not be is a fault at the culprit rather than memory that
 * nobody granted. Owned by one thread at a time; never decides how much is mapped.
 */
#include "kv/backing.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kv/backing_private.h"

#define PAGE_BYTES 4096u
/* What stays free for everybody else when a grow asks how much room there is. */
#define ROOM_MARGIN_BYTES (64ull << 20)

/* ---- both kinds ------------------------------------------------------------------------------ */

xp_status_t kv_backing_measure(const kv_backing_options_t *options, uint64_t *bytes_out)
{
    uint64_t bytes;
    if (options->bundle_bytes == 0 || options->ceiling_bundles == 0 ||
        __builtin_mul_overflow(options->bundle_bytes, options->ceiling_bundles, &bytes) ||
        bytes > INT64_MAX / 2 || options->behind_bytes > INT64_MAX / 2)
        return xp_fail(XP_INVALID,
                       "a KV Cache of %u bundles of %" PRIu64 " bytes has no valid size",
                       options->ceiling_bundles, options->bundle_bytes);
    *bytes_out = bytes;
    return XP_OK;
}

xp_status_t kv_backing_resize(kv_backing_t *backing, uint32_t bundles)
{
    if (bundles > backing->ceiling)
        return xp_fail(XP_INVALID, "%u KV bundles where the ceiling is %u", bundles,
                       backing->ceiling);
    if (bundles > backing->mapped)
        XP_TRY(backing->kind->grow(backing, bundles));
    else if (bundles < backing->mapped)
        XP_TRY(backing->kind->shrink(backing, bundles));
    backing->mapped = bundles;
    return XP_OK;
}

bool kv_backing_prepare(kv_backing_t *backing)
{
    return backing->kind->prepare ? backing->kind->prepare(backing) : false;
}

void kv_backing_trim(kv_backing_t *backing)
{
    if (backing->kind->trim)
        backing->kind->trim(backing);
}

void kv_backing_destroy(kv_backing_t *backing)
{
    if (backing)
        backing->kind->destroy(backing);
}

uint64_t kv_backing_address(const kv_backing_t *backing)
{
    return backing->address;
}

uint32_t kv_backing_mapped(const kv_backing_t *backing)
{
    return backing->mapped;
}

uint32_t kv_backing_ceiling(const kv_backing_t *backing)
{
    return backing->ceiling;
}

uint64_t kv_backing_bundle_bytes(const kv_backing_t *backing)
{
    return backing->bundle_bytes;
}

uint64_t kv_backing_reserved_bytes(const kv_backing_t *backing)
{
    return backing->reserved_bytes;
}

uint64_t kv_backing_resident_bytes(const kv_backing_t *backing)
{
    return backing->mapped * backing->bundle_bytes + backing->extra_bytes;
}

int kv_backing_fd(const kv_backing_t *backing)
{
    return backing->fd;
}

/* ---- memfd ----------------------------------------------------------------------------------- */

typedef struct memfd_backing {
    kv_backing_t backing; /* first: the public pointer is this one */
    uint64_t (*room_bytes)(void *context);
    void *room_context;
    bool lazy;
    char name[96];
} memfd_backing_t;

static uint64_t page_up(uint64_t bytes)
{
    return (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
}

/* Bytes that have memory when so many bundles are mapped. */
static uint64_t prefix_bytes(const kv_backing_t *backing, uint32_t bundles)
{
    return page_up(bundles * backing->bundle_bytes);
}

static void *address_at(const kv_backing_t *backing, uint64_t offset)
{
    return (char *)(uintptr_t)backing->address + offset;
}

/* Takes memory away from [from, to), which nobody uses. When it fails the addresses still reach the
 * file, so the range stays usable, empty or not. */
static xp_status_t range_drop(memfd_backing_t *self, uint64_t from, uint64_t to)
{
    if (from == to)
        return XP_OK;
    while (fallocate(self->backing.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)from,
                     (off_t)(to - from)) != 0)
        if (errno != EINTR)
            return xp_fail_errno(XP_IO, "%s: giving %" PRIu64 " bytes back", self->name, to - from);
    void *at = mmap(address_at(&self->backing, from), to - from, PROT_READ,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    if (at == MAP_FAILED)
        return xp_fail_errno(XP_IO, "%s: taking %" PRIu64 " bytes out of use", self->name,
                             to - from);
    return XP_OK;
}

/* Takes memory for [from, to) and only then makes it reachable. The first touch of a page still
 * costs a fault, spread over the steps that use it, but never memory: that is what may run out. */
static xp_status_t memfd_grow(kv_backing_t *backing, uint32_t bundles)
{
    memfd_backing_t *self = (memfd_backing_t *)backing;
    const uint64_t from = prefix_bytes(backing, backing->mapped);
    const uint64_t to = prefix_bytes(backing, bundles);
    if (from == to)
        return XP_OK;
    const uint64_t room =
        self->room_bytes && !self->lazy ? self->room_bytes(self->room_context) : UINT64_MAX;
    if (room < to - from || room - (to - from) < ROOM_MARGIN_BYTES)
        return xp_fail(XP_NO_MEMORY,
                       "%s: no room for %" PRIu64 " bytes: the machine or container has %" PRIu64
                       ", %llu MiB stay free; lower devices.<name>.memory",
                       self->name, to - from, room, ROOM_MARGIN_BYTES >> 20);
    while (!self->lazy && fallocate(backing->fd, 0, (off_t)from, (off_t)(to - from)) != 0)
        if (errno != EINTR)
            return xp_fail_errno(XP_NO_MEMORY, "%s: no memory for %" PRIu64 " bytes", self->name,
                                 to - from);
    void *at = mmap(address_at(backing, from), to - from, PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_NORESERVE | MAP_FIXED, backing->fd, (off_t)from);
    if (at == MAP_FAILED) {
        xp_status_t status =
            xp_fail_errno(XP_NO_MEMORY, "%s: mapping %" PRIu64 " bytes", self->name, to - from);
        (void)fallocate(backing->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)from,
                        (off_t)(to - from));
        return status;
    }
    return XP_OK;
}

static xp_status_t memfd_shrink(kv_backing_t *backing, uint32_t bundles)
{
    const uint64_t end = bundles * backing->bundle_bytes;
    const uint64_t from = prefix_bytes(backing, bundles);
    /* The last page stays, but not what the bundle given up wrote there. */
    memset(address_at(backing, end), 0, from - end);
    return range_drop((memfd_backing_t *)backing, from, prefix_bytes(backing, backing->mapped));
}

static void memfd_destroy(kv_backing_t *backing)
{
    if (backing->address)
        munmap(address_at(backing, 0), backing->reserved_bytes);
    if (backing->fd >= 0)
        close(backing->fd);
    free(backing);
}

static const kv_backing_kind_t memfd_kind = {
    .grow = memfd_grow, .shrink = memfd_shrink, .destroy = memfd_destroy};

xp_status_t kv_backing_create_memfd(const kv_backing_options_t *options, kv_backing_t **backing_out)
{
    uint64_t bytes;
    XP_TRY(kv_backing_measure(options, &bytes));
    memfd_backing_t *self = calloc(1, sizeof(*self));
    if (!self)
        return xp_fail(XP_NO_MEMORY, "backing of %s", options->name);
    snprintf(self->name, sizeof(self->name), "%s", options->name);
    self->room_bytes = options->room_bytes;
    self->room_context = options->room_context;
    self->lazy = options->lazy;
    self->backing =
        (kv_backing_t){.kind = &memfd_kind,
                       .bundle_bytes = options->bundle_bytes,
                       .ceiling = options->ceiling_bundles,
                       .reserved_bytes = page_up(bytes) + page_up(options->behind_bytes)};
    xp_status_t status = XP_OK;
    self->backing.fd = memfd_create(self->name, MFD_CLOEXEC);
    if (self->backing.fd < 0) {
        status = xp_fail_errno(XP_IO, "memfd_create(%s)", self->name);
        goto destroy;
    }
    if (ftruncate(self->backing.fd, (off_t)self->backing.reserved_bytes) != 0) {
        status = xp_fail_errno(XP_NO_MEMORY, "%s: %" PRIu64 " bytes", self->name,
                               self->backing.reserved_bytes);
        goto destroy;
    }
    void *range = mmap(NULL, self->backing.reserved_bytes, PROT_READ,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) {
        status = xp_fail_errno(XP_NO_MEMORY, "%s: reserving %" PRIu64 " bytes of addresses",
                               self->name, self->backing.reserved_bytes);
        goto destroy;
    }
    self->backing.address = (uint64_t)(uintptr_t)range;
    *backing_out = &self->backing;
    return XP_OK;
destroy:
    memfd_destroy(&self->backing);
    return status;
}
