/* SPDX-License-Identifier: MIT */
/*
 * Ring and file of the KV market's records. The ring belongs to the daemon's loop thread; replay
 * takes any bytes and reads nothing past them.
 */
#include "control/kv_record.h"

#include <stdlib.h>
#include <string.h>

#define RING_BYTES   (4u << 20)
#define RING_RECORDS 8192u
#define BYTES_MAX    (1ull << 48) /* of a pool or a group, in a record that makes sense */

typedef struct record_head {
    uint64_t now_ns, patience_ns, hold_ns;
    uint32_t mode, command_count;
} record_head_t;

typedef struct record_flags {
    uint8_t refused, squeezed;
} record_flags_t;

/* A record: head, pool bytes, groups, commands (room for one a group), flags of each group. */
static uint64_t record_bytes(const kv_record_header_t *header)
{
    uint64_t bytes = sizeof(record_head_t) + header->pool_count * sizeof(uint64_t) +
                     header->group_count * (sizeof(kv_policy_group_t) +
                                            sizeof(kv_policy_command_t) + sizeof(record_flags_t));
    return (bytes + 7) / 8 * 8;
}

xp_status_t kv_record_ring_init(uint32_t pool_count, uint32_t group_count,
                                kv_record_ring_t *ring_out)
{
    kv_record_ring_t ring = {.header = {.magic = KV_RECORD_MAGIC,
                                        .version = KV_RECORD_VERSION,
                                        .group_bytes = sizeof(kv_policy_group_t),
                                        .command_bytes = sizeof(kv_policy_command_t),
                                        .pool_count = pool_count,
                                        .group_count = group_count}};
    ring.capacity = RING_BYTES / record_bytes(&ring.header);
    if (ring.capacity > RING_RECORDS)
        ring.capacity = RING_RECORDS;
    ring.records = calloc(ring.capacity, record_bytes(&ring.header));
    if (!ring.records)
        return xp_fail(XP_NO_MEMORY, "no memory for the KV market's records");
    *ring_out = ring;
    return XP_OK;
}

void kv_record_ring_fini(kv_record_ring_t *ring)
{
    free(ring->records);
    ring->records = NULL;
}

static uint8_t *put(uint8_t *at, const void *from, size_t bytes)
{
    memcpy(at, from, bytes);
    return at + bytes;
}

void kv_record_ring_add(void *context, const kv_policy_snapshot_t *snapshot,
                        const kv_policy_decisions_t *decisions)
{
    kv_record_ring_t *ring = context;
    const kv_record_header_t *header = &ring->header;
    uint64_t slot = ring->written++ % ring->capacity;
    uint8_t *at = ring->records + slot * record_bytes(header);
    record_head_t head = {.now_ns = snapshot->now_ns,
                          .patience_ns = snapshot->patience_ns,
                          .hold_ns = snapshot->hold_ns,
                          .mode = snapshot->mode,
                          .command_count = decisions->command_count};
    at = put(at, &head, sizeof(head));
    at = put(at, snapshot->pool_bytes, header->pool_count * sizeof(uint64_t));
    at = put(at, snapshot->groups, header->group_count * sizeof(kv_policy_group_t));
    at = put(at, decisions->commands, header->group_count * sizeof(kv_policy_command_t));
    for (uint32_t g = 0; g < header->group_count; g++) {
        record_flags_t flags = {decisions->refused[g], decisions->squeezed[g]};
        at = put(at, &flags, sizeof(flags));
    }
}

static uint64_t held(const kv_record_ring_t *ring)
{
    return ring->written < ring->capacity ? ring->written : ring->capacity;
}

uint64_t kv_record_ring_bytes(const kv_record_ring_t *ring)
{
    return sizeof(ring->header) + held(ring) * record_bytes(&ring->header);
}

void kv_record_ring_write(const kv_record_ring_t *ring, void *to)
{
    kv_record_header_t header = ring->header;
    header.record_count = held(ring);
    uint64_t bytes = record_bytes(&header), first = ring->written - header.record_count;
    uint8_t *at = put(to, &header, sizeof(header));
    for (uint64_t r = 0; r < header.record_count; r++)
        at = put(at, ring->records + (first + r) % ring->capacity * bytes, bytes);
}

/* ---- replay -----------------------------------------------------------------------------------
 */

static bool flag_is_sound(const bool *flag)
{
    uint8_t byte;
    memcpy(&byte, flag, 1);
    return byte <= 1;
}

static bool group_is_sound(const kv_policy_group_t *group, uint32_t pool_count)
{
    if (group->member_count > KV_MAX_RANKS || !flag_is_sound(&group->present) ||
        !flag_is_sound(&group->answered) || !flag_is_sound(&group->squeezed) ||
        !flag_is_sound(&group->idle))
        return false;
    for (uint32_t m = 0; m < group->member_count; m++)
        if (group->pools[m] >= pool_count)
            return false;
    const uint32_t sizes[] = {group->floor_bundles,  group->floor_wanted, group->ceiling_bundles,
                              group->mapped_bundles, group->goal_bundles, group->demand_bundles,
                              group->live_bundles};
    /* All sums of the policy stay far within 63 bits. */
    if (group->bundle_bytes == 0 || group->bundle_bytes > BYTES_MAX)
        return false;
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++)
        if (sizes[i] > KV_MAX_BUNDLES || sizes[i] > BYTES_MAX / group->bundle_bytes)
            return false;
    return true;
}

static bool same(const kv_policy_decisions_t *decisions, const record_head_t *head,
                 const uint8_t *commands, const uint8_t *flags, uint32_t group_count)
{
    if (decisions->command_count != head->command_count)
        return false;
    for (uint32_t c = 0; c < head->command_count; c++) {
        kv_policy_command_t was;
        memcpy(&was, commands + c * sizeof(was), sizeof(was));
        const kv_policy_command_t *now = &decisions->commands[c];
        if (was.group != now->group || was.bundles != now->bundles ||
            was.for_group != now->for_group || was.reason != now->reason)
            return false;
    }
    for (uint32_t g = 0; g < group_count; g++) {
        record_flags_t was;
        memcpy(&was, flags + g * sizeof(was), sizeof(was));
        if (was.refused != decisions->refused[g] || was.squeezed != decisions->squeezed[g])
            return false;
    }
    return true;
}

xp_status_t kv_record_replay(const void *bytes, size_t length, kv_record_replay_t *replay_out)
{
    kv_record_header_t header;
    if (length < sizeof(header))
        return xp_fail(XP_INVALID, "%zu bytes are no record of a KV market", length);
    memcpy(&header, bytes, sizeof(header));
    if (header.magic != KV_RECORD_MAGIC || header.version != KV_RECORD_VERSION ||
        header.group_bytes != sizeof(kv_policy_group_t) ||
        header.command_bytes != sizeof(kv_policy_command_t) || header.pool_count > KV_MAX_POOLS ||
        header.group_count > KV_MAX_GROUPS)
        return xp_fail(XP_INVALID, "the file is no record of a KV market, or another version's");
    uint64_t record = record_bytes(&header);
    if (header.record_count != (length - sizeof(header)) / record ||
        (length - sizeof(header)) % record != 0)
        return xp_fail(XP_INVALID, "the record says it has %llu entries, its size says otherwise",
                       (unsigned long long)header.record_count);
    kv_policy_snapshot_t *snapshot = calloc(1, sizeof(*snapshot));
    kv_policy_decisions_t *decisions = calloc(1, sizeof(*decisions));
    kv_record_replay_t replay = {0};
    xp_status_t status = XP_OK;
    uint64_t first_ns = 0;
    if (!snapshot || !decisions) {
        status = xp_fail(XP_NO_MEMORY, "no memory for a replay");
        goto done;
    }
    snapshot->pool_count = header.pool_count;
    snapshot->group_count = header.group_count;
    for (uint64_t r = 0; r < header.record_count; r++) {
        const uint8_t *at = (const uint8_t *)bytes + sizeof(header) + r * record;
        record_head_t head;
        memcpy(&head, at, sizeof(head));
        at += sizeof(head);
        memcpy(snapshot->pool_bytes, at, header.pool_count * sizeof(uint64_t));
        at += header.pool_count * sizeof(uint64_t);
        memcpy(snapshot->groups, at, header.group_count * sizeof(kv_policy_group_t));
        at += header.group_count * sizeof(kv_policy_group_t);
        bool sound = head.mode <= KV_POLICY_STATIC && head.command_count <= header.group_count;
        for (uint32_t p = 0; p < header.pool_count; p++)
            sound = sound && snapshot->pool_bytes[p] <= BYTES_MAX;
        for (uint32_t g = 0; g < header.group_count && sound; g++)
            sound = group_is_sound(&snapshot->groups[g], header.pool_count);
        if (!sound) {
            status =
                xp_fail(XP_INVALID, "entry %llu of the record is damaged", (unsigned long long)r);
            goto done;
        }
        snapshot->now_ns = head.now_ns;
        snapshot->patience_ns = head.patience_ns;
        snapshot->hold_ns = head.hold_ns;
        snapshot->mode = (kv_policy_mode_t)head.mode;
        kv_policy_decide(snapshot, decisions);
        if (!same(decisions, &head, at, at + header.group_count * sizeof(kv_policy_command_t),
                  header.group_count)) {
            if (replay.different++ == 0)
                replay.first_different = r;
        }
        if (r == 0)
            first_ns = head.now_ns;
        replay.span_ns = head.now_ns - first_ns;
        replay.commands += head.command_count;
        replay.records++;
    }
    *replay_out = replay;
done:
    free(snapshot);
    free(decisions);
    return status;
}
