/* SPDX-License-Identifier: MIT */
/*
 * Records of the KV market: the newest snapshots that led to commands, with what was decided. A
 * record replays: the policy over a recorded snapshot must decide the same again.
 *
 * A file is a header and equally long records, in the byte order and layout of the build that wrote
 * it (both are checked).
 */
#ifndef XPOOL_CONTROL_KV_RECORD_H
#define XPOOL_CONTROL_KV_RECORD_H

#include <stddef.h>

#include "kv/policy.h"

#define KV_RECORD_MAGIC   0x31525658u /* "XVR1" */
#define KV_RECORD_VERSION 1u

typedef struct kv_record_header {
    uint32_t magic, version;
    uint32_t group_bytes, command_bytes; /* sizes of the structs within */
    uint32_t pool_count, group_count;
    uint64_t record_count;
} kv_record_header_t;

/* Bounded memory, taken at the start; the oldest record is overwritten. One owner. */
typedef struct kv_record_ring {
    kv_record_header_t header;
    uint8_t *records;
    uint64_t capacity, written;
} kv_record_ring_t;

xp_status_t kv_record_ring_init(uint32_t pool_count, uint32_t group_count,
                                kv_record_ring_t *ring_out);
void kv_record_ring_fini(kv_record_ring_t *ring); /* accepts all zero */
/* A kv_market_record_t whose context is the ring. */
void kv_record_ring_add(void *ring, const kv_policy_snapshot_t *snapshot,
                        const kv_policy_decisions_t *decisions);
/* Bytes of the whole file, and the file, oldest record first. */
uint64_t kv_record_ring_bytes(const kv_record_ring_t *ring);
void kv_record_ring_write(const kv_record_ring_t *ring, void *to);

typedef struct kv_record_replay {
    uint64_t records, commands, different; /* records that decide otherwise now */
    uint64_t first_different;              /* its number; valid when different > 0 */
    uint64_t span_ns;                      /* from the first record to the last */
} kv_record_replay_t;
/* XP_INVALID when the bytes are no record of this build's layout. */
xp_status_t kv_record_replay(const void *bytes, size_t length, kv_record_replay_t *replay_out);
#endif
