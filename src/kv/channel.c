/* SPDX-License-Identifier: MIT */
/*
 * Making, checking and resetting the KV control channel; the seqlock of the report. Stateless: the
 * daemon calls create and reset on its loop, a rank map and unmap on the thread that owns its KV.
 */
#include "kv/channel.h"

#include <errno.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/memfd.h"

#define REPORT_TRIES 64 /* a report is a dozen stores; more tries mean a dead or frozen leader */

/* Every word is stored with release and loaded with acquire, so that no fence is needed: whoever
 * loads a word of a newer report also sees the odd sequence stored before it, and the second load
 * of the sequence differs from the first. */
void kv_group_report_write(kv_group_entry_t *group, const kv_report_t *report)
{
    const uint64_t *words = (const uint64_t *)report;
    uint64_t sequence = PROTOCOL_LOAD_RELAXED(&group->report_sequence) | 1;
    PROTOCOL_STORE_RELAXED(&group->report_sequence, sequence);
    for (uint32_t i = 0; i < KV_REPORT_WORDS; i++)
        PROTOCOL_STORE_RELEASE(&group->report[i], words[i]);
    PROTOCOL_PUBLISH(&group->report_sequence, sequence + 1);
}

bool kv_group_report_read(const kv_group_entry_t *group, kv_report_t *report_out)
{
    for (uint32_t attempt = 0; attempt < REPORT_TRIES; attempt++) {
        kv_report_t copy;
        uint64_t *words = (uint64_t *)&copy;
        uint64_t before = PROTOCOL_LOAD_ACQUIRE(&group->report_sequence);
        if (before & 1)
            continue;
        for (uint32_t i = 0; i < KV_REPORT_WORDS; i++)
            words[i] = PROTOCOL_LOAD_ACQUIRE(&group->report[i]);
        if (PROTOCOL_LOAD_RELAXED(&group->report_sequence) != before)
            continue;
        *report_out = copy;
        return true;
    }
    return false;
}

xp_status_t kv_bell_create(int *fd_out)
{
    int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (fd < 0)
        return xp_fail_errno(XP_IO, "cannot make an eventfd for the KV control channel");
    *fd_out = fd;
    return XP_OK;
}

void kv_bell_ring(int fd)
{
    uint64_t one = 1;
    while (write(fd, &one, sizeof(one)) < 0 && errno == EINTR)
        ;
}

void kv_bell_clear(int fd)
{
    uint64_t count;
    while (read(fd, &count, sizeof(count)) < 0 && errno == EINTR)
        ;
}

static bool group_is_sound(const kv_group_plan_t *group, uint32_t pools)
{
    bool sound = group->partition_count >= 1 && group->partition_count <= KV_MAX_RANKS &&
                 group->bundle_tokens > 0 && group->page_tokens > 0 &&
                 group->bundle_tokens % group->page_tokens == 0 &&
                 group->bundle_bytes == group->bundle_tokens * group->token_bytes &&
                 group->floor_bundles >= 1 && group->floor_bundles <= group->ceiling_bundles &&
                 group->ceiling_bundles <= group->reserved_bundles &&
                 group->reserved_bundles < KV_MAX_BUNDLES;
    for (uint32_t p = 0; p < group->partition_count && sound; p++)
        sound = group->pools[p] < pools;
    return sound;
}

xp_status_t kv_channel_create(uint64_t generation, const uint64_t *pool_bytes, uint32_t pools,
                              const kv_group_plan_t *groups, uint32_t group_count, int *fd_out,
                              kv_channel_t **channel_out)
{
    if (pools > KV_MAX_POOLS || group_count > KV_MAX_GROUPS)
        return xp_fail(XP_INVALID,
                       "the KV control channel takes %u attention devices and %u KV Capacity "
                       "Groups, the plan has %u and %u",
                       KV_MAX_POOLS, KV_MAX_GROUPS, pools, group_count);
    uint32_t partitions = 0;
    for (uint32_t g = 0; g < group_count; g++) {
        if (!group_is_sound(&groups[g], pools))
            return xp_fail(XP_INVALID, "KV Capacity Group %u of the plan has no valid geometry", g);
        partitions += groups[g].partition_count;
    }
    if (partitions > KV_MAX_PARTITIONS)
        return xp_fail(XP_INVALID,
                       "the KV control channel takes %u Instance Ranks, the plan has %u",
                       KV_MAX_PARTITIONS, partitions);
    int fd;
    kv_channel_t *channel;
    XP_TRY(xp_memfd_create("xpool-kv-channel", sizeof(*channel), &fd));
    xp_status_t status = xp_memfd_map(fd, sizeof(*channel), (void **)&channel);
    if (status != XP_OK) {
        close(fd);
        return status;
    }
    for (uint32_t p = 0; p < pools; p++)
        channel->pools[p].bytes = pool_bytes[p];
    uint32_t next = 0;
    for (uint32_t g = 0; g < group_count; g++) {
        const kv_group_plan_t *plan = &groups[g];
        kv_group_entry_t *entry = &channel->groups[g];
        entry->instance = plan->instance;
        entry->dp_rank = plan->dp_rank;
        entry->first_partition = next;
        entry->partition_count = plan->partition_count;
        entry->bundle_bytes = plan->bundle_bytes;
        entry->token_bytes = plan->token_bytes;
        entry->bundle_tokens = plan->bundle_tokens;
        entry->page_tokens = plan->page_tokens;
        entry->reserved_bundles = plan->reserved_bundles;
        entry->elastic = plan->elastic;
        entry->floor_bundles = plan->floor_bundles;
        entry->ceiling_bundles = plan->ceiling_bundles;
        entry->admit_bundles = UINT32_MAX;
        for (uint32_t p = 0; p < plan->partition_count; p++, next++) {
            channel->partitions[next].group = g;
            channel->partitions[next].pool = plan->pools[p];
        }
    }
    channel->pool_count = pools;
    channel->group_count = group_count;
    channel->partition_count = partitions;
    channel->generation = generation;
    channel->bytes = sizeof(*channel);
    channel->abi = KV_CHANNEL_ABI;
    channel->magic = KV_CHANNEL_MAGIC;
    *fd_out = fd;
    *channel_out = channel;
    return XP_OK;
}

static xp_status_t check(const kv_channel_t *channel, uint32_t partition)
{
    if (channel->magic != KV_CHANNEL_MAGIC || channel->abi != KV_CHANNEL_ABI ||
        channel->bytes != sizeof(*channel))
        return xp_fail(XP_PEER,
                       "the descriptor is no KV control channel of ABI %u (magic %08x, ABI %u)",
                       KV_CHANNEL_ABI, channel->magic, channel->abi);
    if (channel->partition_count > KV_MAX_PARTITIONS || channel->group_count > KV_MAX_GROUPS ||
        partition >= channel->partition_count ||
        channel->partitions[partition].group >= channel->group_count)
        return xp_fail(XP_PEER, "the KV control channel has no partition %u", partition);
    const kv_group_entry_t *group = &channel->groups[channel->partitions[partition].group];
    if (partition < group->first_partition || group->partition_count == 0 ||
        group->partition_count > KV_MAX_RANKS ||
        partition - group->first_partition >= group->partition_count || group->page_tokens == 0 ||
        group->bundle_tokens == 0 || group->bundle_tokens % group->page_tokens != 0 ||
        group->bundle_bytes != group->bundle_tokens * group->token_bytes ||
        group->reserved_bundles == 0 || group->reserved_bundles >= KV_MAX_BUNDLES)
        return xp_fail(XP_PEER, "the KV control channel's group of partition %u is nonsense",
                       partition);
    return XP_OK;
}

xp_status_t kv_channel_map(int fd, uint32_t partition, kv_channel_t **channel_out)
{
    uint64_t bytes;
    kv_channel_t *channel;
    XP_TRY(xp_memfd_check(fd, &bytes));
    if (bytes < sizeof(*channel))
        return xp_fail(XP_PEER, "the KV control channel has %llu bytes, %zu are needed",
                       (unsigned long long)bytes, sizeof(*channel));
    XP_TRY(xp_memfd_map(fd, sizeof(*channel), (void **)&channel));
    xp_status_t status = check(channel, partition);
    if (status != XP_OK) {
        xp_memfd_unmap(channel);
        return status;
    }
    *channel_out = channel;
    return XP_OK;
}

void kv_channel_unmap(kv_channel_t *channel)
{
    xp_memfd_unmap(channel);
}

void kv_channel_reset_group(kv_channel_t *channel, const kv_group_entry_t *plan, uint32_t group)
{
    kv_group_entry_t *entry = &channel->groups[group];
    for (uint32_t p = 0; p < plan->partition_count; p++) {
        kv_partition_entry_t *partition = &channel->partitions[plan->first_partition + p];
        PROTOCOL_STORE_RELAXED(&partition->state, (uint32_t)KV_PARTITION_ABSENT);
        PROTOCOL_STORE_RELAXED(&partition->bundle_tokens, 0u);
        PROTOCOL_STORE_RELAXED(&partition->bundle_bytes, (uint64_t)0);
        PROTOCOL_STORE_RELAXED(&partition->completion, (uint64_t)0);
        PROTOCOL_STORE_RELAXED(&partition->vote, (uint64_t)0);
        PROTOCOL_STORE_RELAXED(&partition->captured_free_bytes, (uint64_t)0);
        PROTOCOL_STORE_RELAXED(&partition->captured_ns, (uint64_t)0);
    }
    for (uint32_t i = 0; i < KV_REPORT_WORDS; i++)
        PROTOCOL_STORE_RELAXED(&entry->report[i], (uint64_t)0);
    PROTOCOL_STORE_RELAXED(&entry->switch_cell, (uint64_t)0);
    PROTOCOL_STORE_RELAXED(&entry->refused_since_ns, (uint64_t)0);
    PROTOCOL_STORE_RELAXED(&entry->admit_bundles, UINT32_MAX);
    /* A leader that died while it wrote left the sequence odd. */
    PROTOCOL_STORE_RELEASE(&entry->report_sequence, (uint64_t)0);
}

uint32_t kv_bundle_tokens(uint64_t token_bytes, uint32_t page_tokens, uint64_t target_bytes,
                          uint64_t granule_bytes)
{
    uint64_t page_bytes = token_bytes * page_tokens;
    XP_ASSERT(page_bytes > 0 && granule_bytes > 0 && (granule_bytes & (granule_bytes - 1)) == 0);
    /* Pages until the bytes are whole granules: the granule over the power of two in a page. */
    uint64_t power = page_bytes & -page_bytes;
    uint64_t unit = power >= granule_bytes ? 1 : granule_bytes / power;
    uint64_t pages = target_bytes / page_bytes / unit * unit;
    return (uint32_t)((pages ? pages : unit) * page_tokens);
}

uint64_t kv_token_stride(uint64_t token_bytes, uint64_t granule_bytes)
{
    XP_ASSERT(token_bytes > 0 && granule_bytes > 0 && (granule_bytes & (granule_bytes - 1)) == 0);
    /* A coarser unit leaves fewer tokens to a whole granule; at the latest one as large as it. */
    for (uint64_t unit = token_bytes & -token_bytes;; unit *= 2) {
        uint64_t stride = (token_bytes + unit - 1) / unit * unit;
        uint64_t power = stride & -stride;
        if (power >= granule_bytes || stride <= KV_BUNDLE_MOST_BYTES / (granule_bytes / power) ||
            unit >= granule_bytes)
            return stride;
    }
}
