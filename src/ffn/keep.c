/* SPDX-License-Identifier: MIT */
/* See keep.h. Threads of its own live for one call only. */
#include "ffn/keep.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>

#include "base/memfd.h"
#include "ffn/dummy.h"
#include "kernels/kernels.h"
#include "model/digest.h"

#define KEEP_FORM        1u /* raised when the packed form or the layout's meaning changes */
#define KEEP_MAX_READERS 16
#define KEEP_PLACE       0x9e3779b97f4a7c15u

static uint64_t identity_add(uint64_t identity, uint64_t value)
{
    return ffn_dummy_mix(identity + value + KEEP_PLACE);
}

uint64_t keep_identity(const ffn_install_t *install, const layout_t *layout)
{
    uint64_t identity = ffn_dummy_seed(install->path);
    identity = identity_add(identity, KEEP_FORM);
    identity = identity_add(identity, ffn_dummy_seed(kernels_variant_name(kernels_selected())));
    identity = identity_add(identity, (uint64_t)install->tp_rank << 32 | install->tp_size);
    identity = identity_add(identity, install->dummy);
    /* A checkpoint that was written anew is another one. */
    identity = identity_add(identity, model_checkpoint_stamp(install->path));
    for (size_t i = 0; i < layout->count; i++) {
        const layout_item_t *item = &layout->items[i];
        identity = identity_add(identity, ffn_dummy_seed(item->name));
        identity = identity_add(identity, (uint64_t)item->rows << 32 | item->columns);
        identity = identity_add(identity, (uint64_t)item->dtype << 56 ^ item->offset);
        if (item->tensor)
            identity = identity_add(identity, (uint64_t)item->tensor->file << 48 ^
                                                  (uint64_t)item->tensor->dtype << 56 ^
                                                  item->tensor->offset);
    }
    return identity;
}

typedef struct keep_part {
    const uint64_t *words;
    uint64_t first, count, sum;
} keep_part_t;

static void *content_of_part(void *context)
{
    keep_part_t *part = context;
    uint64_t sum = 0;
    for (uint64_t i = part->first; i < part->first + part->count; i++) {
        uint64_t word = part->words[i] ^ i * KEEP_PLACE;
        sum += (word ^ word >> 29) * 0xbf58476d1ce4e5b9u;
    }
    part->sum = sum;
    return NULL;
}

uint64_t keep_content(const void *memory, uint64_t bytes, uint32_t readers)
{
    keep_part_t parts[KEEP_MAX_READERS];
    pthread_t threads[KEEP_MAX_READERS];
    bool started[KEEP_MAX_READERS] = {false};
    uint64_t words = bytes / 8, sum = 0;
    uint32_t count = readers < 1 ? 1 : readers > KEEP_MAX_READERS ? KEEP_MAX_READERS : readers;
    for (uint32_t p = 0; p < count; p++) {
        uint64_t first = words / count * p;
        uint64_t end = p + 1 == count ? words : words / count * (p + 1);
        parts[p] = (keep_part_t){.words = memory, .first = first, .count = end - first};
        /* The last part is the caller's, and so is each for which there is no thread. */
        started[p] =
            p + 1 < count && pthread_create(&threads[p], NULL, content_of_part, &parts[p]) == 0;
        if (!started[p])
            content_of_part(&parts[p]);
    }
    for (uint32_t p = 0; p < count; p++) {
        if (started[p])
            pthread_join(threads[p], NULL);
        sum += parts[p].sum;
    }
    return sum;
}

static void advise(void *address, uint64_t bytes)
{
    madvise(address, bytes, MADV_HUGEPAGE); /* best effort */
}

xp_status_t keep_freeze(int fd, uint64_t bytes, uint64_t identity, uint32_t readers, void **address,
                        ffn_weights_t *weights_out)
{
    xp_memfd_unmap(*address);
    *address = NULL;
    XP_TRY(xp_memfd_freeze(fd));
    XP_TRY(xp_memfd_map_frozen(fd, bytes, address));
    advise(*address, bytes);
    *weights_out = (ffn_weights_t){.fd = fd,
                                   .bytes = bytes,
                                   .identity = identity,
                                   .content = keep_content(*address, bytes, readers)};
    return XP_OK;
}

xp_status_t keep_adopt(const ffn_weights_t *kept, uint64_t bytes, uint64_t identity,
                       uint32_t readers, void **address_out)
{
    void *address;
    if (kept->identity != identity || kept->bytes != bytes)
        return xp_fail(XP_INVALID, "the kept weights are of another shard");
    XP_TRY(xp_memfd_check_frozen(kept->fd, bytes));
    XP_TRY(xp_memfd_map_frozen(kept->fd, bytes, &address));
    advise(address, bytes);
    if (keep_content(address, bytes, readers) != kept->content) {
        xp_memfd_unmap(address);
        return xp_fail(XP_INVALID, "the kept weights are not what they were when complete");
    }
    *address_out = address;
    return XP_OK;
}
