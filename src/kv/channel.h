/* SPDX-License-Identifier: MIT */
/*
 * The KV control channel: one sealed memfd a Generation, made by the daemon, mapped by every
 * Instance Rank that takes part in elastic KV. Layout, who writes what, and every operation on it.
 *
 * How a rank gets it: the daemon's Admitted travels with three descriptors and one number,
 *   fds[0]  the channel's memfd          -> kv_channel_map()
 *   fds[1]  the daemon's bell (eventfd)  -> kv_bell_ring() after a report with a new demand and
 *                                           after every completion; never needed for usage alone
 *   fds[2]  this rank's bell (eventfd, non-blocking): readable after each new command; watch it on
 *           an event loop, empty it with kv_bell_clear(), then wake the engine thread
 *   admitted.kv_partition                -> index of the rank's entry in `partitions`; its group is
 *                                           partitions[i].group, its TP rank i - first_partition
 * Without descriptors (Admitted with none) there is no channel: the rank keeps admitted.kv_tokens
 * for good. admitted.kv_tokens is always the reserved capacity: reserved_bundles * bundle_tokens.
 *
 * One operation, from command to completion:
 *   1. The daemon publishes (sequence, bundles) in the group's command cell and rings every rank.
 *      Sequence 1 is published before Admitted: the rank maps that many bundles at its start (the
 *      floor), sets its partition OPEN and completes sequence 1.
 *   2. A rank looks between steps (kv_group_command(): one load). `bundles` is from now on the
 *      *goal*: ids at or above bundles * bundle_tokens are not handed out any more, and new
 *      prefills take only what lies below. A newer command replaces an older one at any time.
 *   3. Grow: map, then expose, then complete (sequence, mapped). mapped < bundles is legal when the
 *      system has no more memory; the daemon takes back what is missing.
 *   4. Shrink: withdraw the suffix, evict prefix nodes there, move live pages below, release, then
 *      complete (sequence, mapped). When live requests hold more than the goal, complete at once
 *      with what could be released (bundles <= mapped), and again with the *same* sequence and a
 *      smaller number each time that live requests have left more; never with a larger one. Live
 *      requests may not take ids above the goal but keep those that they have.
 *   5. The daemon credits bytes only from completions of all ranks of the group (their largest
 *      number); until then it charges the larger of old and new size.
 * The *first* completion of a sequence must come within deadlines.kv.
 *
 * Two words of the daemon's bound what a rank does in between: admit_bundles (new prefills wait
 * while live bundles would pass it; decoding goes on) and refused_since_ns (the demand with that
 * demand_since_ns cannot be met now, so an engine that can make no progress at all may preempt).
 *
 * TP ranks (partition_count > 1) do the same at the same step: each publishes a vote (sequence,
 * bundles it can reach) when it has seen the command; the leader, once all votes for the sequence
 * are there, publishes the switch (sequence, step): at the start of that scheduler step every rank
 * applies the command with the largest vote of a shrink, the smallest of a grow. Ranks in lock step
 * differ by less than KV_SWITCH_STEPS steps, so all see the switch before its step.
 *
 * Who writes what: the daemon everything in header, pools, and the first two lines of a group; the
 * leader (TP rank 0) the group's report and switch; each rank its own partition. Every field of a
 * peer is loaded once and checked before use. Times are CLOCK_MONOTONIC.
 */
#ifndef XPOOL_KV_CHANNEL_H
#define XPOOL_KV_CHANNEL_H

#include <stdbool.h>
#include <stdint.h>

#include "base/protocol_atomics.h"
#include "base/status.h"

#define KV_CHANNEL_MAGIC  0x31564b58u /* "XKV1" */
#define KV_CHANNEL_ABI    1u
#define KV_MAX_POOLS      16
#define KV_MAX_GROUPS     128
#define KV_MAX_PARTITIONS 128
#define KV_MAX_RANKS      8 /* partitions of one group */
#define KV_MAX_BUNDLES    (1u << 30)
#define KV_SWITCH_STEPS   2 /* from the step in which the leader publishes to the one it names */
#define KV_NO_DEADLINE    UINT64_MAX
#define KV_LINE           64
#define KV_DESCRIPTORS    3 /* that travel with Admitted */

/* ---- cells ------------------------------------------------------------------------------------
 */

/* A (sequence, value) pair in one 8-byte word: sequence in the high half. */
#define KV_CELL(sequence, value) ((uint64_t)(sequence) << 32 | (uint32_t)(value))
#define KV_CELL_SEQUENCE(cell)   ((uint32_t)((cell) >> 32))
#define KV_CELL_VALUE(cell)      ((uint32_t)(cell))
/* In a command's value: drop the whole prefix cache first. The rest are the bundles. */
#define KV_COMMAND_TRIM 0x80000000u

typedef struct kv_command {
    uint32_t sequence; /* 0: none yet */
    uint32_t bundles;  /* the goal of every rank of the group */
    bool trim;
} kv_command_t;

/* ---- report -----------------------------------------------------------------------------------
 */

typedef enum kv_demand_kind {
    KV_DEMAND_NONE = 0,
    KV_DEMAND_PREFILL, /* a request that has not begun waits for room */
    KV_DEMAND_DECODE,  /* live work cannot go on */
    KV_DEMAND_CACHE,   /* nobody waits: more would keep prefixes that are about to be forgotten */
} kv_demand_kind_t;

/* What the leader says of its group, all in units of one rank. */
typedef struct kv_report {
    uint64_t demand_kind;        /* kv_demand_kind_t */
    uint64_t demand_bundles;     /* needed in all, not in addition; <= ceiling */
    uint64_t demand_deadline_ns; /* KV_NO_DEADLINE without an SLO */
    uint64_t demand_since_ns;    /* when the blocked request came (or blocked): names the demand */
    uint64_t live_bundles;       /* least that holds every live request (bundle of page 0 counts) */
    uint64_t live_tokens;        /* slots that live requests hold */
    uint64_t cached_tokens;      /* slots that only the prefix cache holds */
    uint64_t running, waiting;   /* requests; both 0: the group is idle */
    uint64_t last_activity_ns;   /* last step with work */
    uint64_t earliest_deadline_ns; /* of live work; KV_NO_DEADLINE */
} kv_report_t;
#define KV_REPORT_WORDS (sizeof(kv_report_t) / sizeof(uint64_t))

/* ---- layout -----------------------------------------------------------------------------------
 */

typedef struct kv_pool_entry {
    uint64_t bytes; /* for KV on this attention device, as planned */
    /* GPU: what the daemon made of it when the ranks had captured their graphs; 0 until then. */
    uint64_t observed_bytes;
    uint8_t pad[KV_LINE - 16];
} kv_pool_entry_t;

typedef struct kv_group_entry {
    /* Constant from creation on; the daemon's. */
    uint32_t instance, dp_rank; /* Instance by its index in the configuration */
    uint32_t first_partition, partition_count;
    uint64_t bundle_bytes, token_bytes; /* of one rank */
    uint32_t bundle_tokens, page_tokens;
    uint32_t reserved_bundles; /* of the virtual range; no command passes it */
    uint32_t elastic;          /* 0: sequence 1 is the only command there will be */
    uint8_t pad0[KV_LINE - 48];
    /* The daemon's. */
    uint64_t command;          /* cell */
    uint64_t refused_since_ns; /* demand_since_ns of a demand that cannot be met now; 0: none */
    uint32_t floor_bundles, ceiling_bundles; /* of now; `xpool kv set` changes them */
    /* New prefills are admitted only while the live bundles stay within this: UINT32_MAX, or the
     * floor while another group's starving demand waits for live requests of this one to end. */
    uint32_t admit_bundles;
    uint32_t reserved;
    uint8_t pad1[KV_LINE - 32];
    /* The leader's. */
    uint64_t report_sequence; /* seqlock: odd while the leader writes */
    uint64_t report[KV_REPORT_WORDS];
    uint64_t switch_cell; /* (sequence, step) */
    uint8_t pad2[2 * KV_LINE - 8 * (KV_REPORT_WORDS + 2)];
} kv_group_entry_t;

typedef enum kv_partition_state {
    KV_PARTITION_ABSENT = 0,
    KV_PARTITION_OPEN, /* geometry confirmed, sequence 1 mapped */
} kv_partition_state_t;

typedef struct kv_partition_entry {
    uint32_t group, pool; /* the daemon's, constant */
    /* The rank's. */
    uint32_t state;         /* published after the geometry */
    uint32_t bundle_tokens; /* the geometry it computes with: must equal its group's */
    uint64_t bundle_bytes;
    uint64_t completion; /* cell */
    uint64_t vote;       /* cell */
    /* GPU, once its graphs are captured and all it takes is taken: when, and how many bytes the
     * device had free then. captured_ns is published last; 0: not yet. */
    uint64_t captured_free_bytes, captured_ns;
    uint8_t pad[KV_LINE - 56];
} kv_partition_entry_t;

typedef struct kv_channel {
    uint32_t magic, abi;
    uint64_t bytes, generation;
    uint32_t pool_count, group_count, partition_count, reserved;
    uint8_t pad[KV_LINE - 40];
    kv_pool_entry_t pools[KV_MAX_POOLS];
    kv_group_entry_t groups[KV_MAX_GROUPS];
    kv_partition_entry_t partitions[KV_MAX_PARTITIONS];
} kv_channel_t;

_Static_assert(sizeof(kv_pool_entry_t) == KV_LINE, "one line a pool");
_Static_assert(sizeof(kv_group_entry_t) == 4 * KV_LINE, "each writer has lines of its own");
_Static_assert(sizeof(kv_partition_entry_t) == KV_LINE, "one line a rank");

/* ---- operations of the daemon -----------------------------------------------------------------
 */

/* release: pairs with kv_group_command(). */
static inline void kv_group_command_publish(kv_group_entry_t *group, uint32_t sequence,
                                            uint32_t bundles, bool trim)
{
    uint32_t value = bundles | (trim ? KV_COMMAND_TRIM : 0);
    PROTOCOL_PUBLISH(&group->command, KV_CELL(sequence, value));
}

/* True with a copy that was whole at one moment. False when the leader was writing at every try: it
 * is busy or died in the middle; the caller keeps what it had. */
bool kv_group_report_read(const kv_group_entry_t *group, kv_report_t *report_out);

/* acquire: pairs with kv_partition_complete(); what the rank released before is released. */
static inline uint64_t kv_partition_completion(const kv_partition_entry_t *partition)
{
    return PROTOCOL_LOAD_ACQUIRE(&partition->completion);
}

/* ---- operations of a rank ---------------------------------------------------------------------
 */

/* The newest command. acquire: pairs with kv_group_command_publish(). */
static inline kv_command_t kv_group_command(const kv_group_entry_t *group)
{
    uint64_t cell = PROTOCOL_LOAD_ACQUIRE(&group->command);
    return (kv_command_t){.sequence = KV_CELL_SEQUENCE(cell),
                          .bundles = KV_CELL_VALUE(cell) & ~KV_COMMAND_TRIM,
                          .trim = (KV_CELL_VALUE(cell) & KV_COMMAND_TRIM) != 0};
}

/* Once, before the first completion: the geometry it computes with. */
static inline void kv_partition_open(kv_partition_entry_t *partition, uint64_t bundle_bytes,
                                     uint32_t bundle_tokens)
{
    PROTOCOL_STORE_RELAXED(&partition->bundle_bytes, bundle_bytes);
    PROTOCOL_STORE_RELAXED(&partition->bundle_tokens, bundle_tokens);
    PROTOCOL_PUBLISH(&partition->state, (uint32_t)KV_PARTITION_OPEN);
}

/* At an orderly end in a process that lives on, after everything has been unmapped; where the
 * process ends it need not be called. */
static inline void kv_partition_close(kv_partition_entry_t *partition)
{
    PROTOCOL_PUBLISH(&partition->state, (uint32_t)KV_PARTITION_ABSENT);
}

/* release: everything that this rank unmapped is unmapped before anyone sees the number. */
static inline void kv_partition_complete(kv_partition_entry_t *partition, uint32_t sequence,
                                         uint32_t mapped_bundles)
{
    PROTOCOL_PUBLISH(&partition->completion, KV_CELL(sequence, mapped_bundles));
}

/* release: pairs with kv_partition_captured(). */
static inline void kv_partition_capture(kv_partition_entry_t *partition, uint64_t free_bytes,
                                        uint64_t now_ns)
{
    PROTOCOL_STORE_RELAXED(&partition->captured_free_bytes, free_bytes);
    PROTOCOL_PUBLISH(&partition->captured_ns, now_ns);
}

/* When; 0: not yet. acquire: the free bytes are those of then. */
static inline uint64_t kv_partition_captured(const kv_partition_entry_t *partition,
                                             uint64_t *free_bytes_out)
{
    uint64_t at_ns = PROTOCOL_LOAD_ACQUIRE(&partition->captured_ns);
    *free_bytes_out = PROTOCOL_LOAD_RELAXED(&partition->captured_free_bytes);
    return at_ns;
}

static inline void kv_partition_vote(kv_partition_entry_t *partition, uint32_t sequence,
                                     uint32_t bundles)
{
    PROTOCOL_PUBLISH(&partition->vote, KV_CELL(sequence, bundles));
}

static inline uint64_t kv_partition_vote_read(const kv_partition_entry_t *partition)
{
    return PROTOCOL_LOAD_ACQUIRE(&partition->vote);
}

/* Leader. acquire/release pair between the two. */
static inline void kv_group_switch_publish(kv_group_entry_t *group, uint32_t sequence,
                                           uint32_t step)
{
    PROTOCOL_PUBLISH(&group->switch_cell, KV_CELL(sequence, step));
}

static inline uint64_t kv_group_switch(const kv_group_entry_t *group)
{
    return PROTOCOL_LOAD_ACQUIRE(&group->switch_cell);
}

/* Leader: replaces the whole report. One writer only. */
void kv_group_report_write(kv_group_entry_t *group, const kv_report_t *report);

/* ---- bells ------------------------------------------------------------------------------------
 */

/* A non-blocking eventfd. */
xp_status_t kv_bell_create(int *fd_out);
void kv_bell_ring(int fd);  /* never blocks; a full counter is a rung bell */
void kv_bell_clear(int fd); /* never blocks */

/* ---- life -------------------------------------------------------------------------------------
 */

typedef struct kv_group_plan {
    uint32_t instance, dp_rank, partition_count;
    uint32_t pools[KV_MAX_RANKS]; /* of each partition */
    uint64_t bundle_bytes, token_bytes;
    uint32_t bundle_tokens, page_tokens;
    uint32_t floor_bundles, ceiling_bundles, reserved_bundles;
    bool elastic;
} kv_group_plan_t;

/* The daemon: a sealed memfd with all constant parts. Partitions follow in the order of groups. */
xp_status_t kv_channel_create(uint64_t generation, const uint64_t *pool_bytes, uint32_t pools,
                              const kv_group_plan_t *groups, uint32_t group_count, int *fd_out,
                              kv_channel_t **channel_out);
/* A rank: maps and checks a received descriptor. XP_PEER when it is no channel of this ABI or its
 * entry is nonsense. The descriptor may be closed afterwards. */
xp_status_t kv_channel_map(int fd, uint32_t partition, kv_channel_t **channel_out);
void kv_channel_unmap(kv_channel_t *channel); /* accepts NULL */
/* The daemon, when no rank of the group is left: the ranks' cells and the report are as new. It
 * then publishes sequence 1 for whoever starts next. `plan`: the group's constant part as the
 * daemon made it; that of the channel may have been written by anyone. */
void kv_channel_reset_group(kv_channel_t *channel, const kv_group_entry_t *plan, uint32_t group);

/* ---- geometry ---------------------------------------------------------------------------------
 */

/* Tokens of one bundle: whole pages of page_tokens, about target_bytes, at least one page, and such
 * that its bytes are a multiple of granule_bytes (a power of two; 4096 on the CPU). */
uint32_t kv_bundle_tokens(uint64_t token_bytes, uint32_t page_tokens, uint64_t target_bytes,
                          uint64_t granule_bytes);
/* Bytes from one token to the next such that bundles of whole tokens and whole granules stay within
 * KV_BUNDLE_MOST_BYTES: token_bytes, or a little more. */
uint64_t kv_token_stride(uint64_t token_bytes, uint64_t granule_bytes);
#define KV_BUNDLE_TARGET_BYTES_CPU  (1ull << 20)
#define KV_BUNDLE_GRANULE_BYTES_CPU 4096u
/* CUDA: a handle a bundle; one of 512 times 2 MiB costs 150 times what one of 1 GiB does. */
#define KV_BUNDLE_TARGET_BYTES_CUDA  (32ull << 20)
#define KV_BUNDLE_GRANULE_BYTES_CUDA (2u << 20)
#define KV_BUNDLE_MOST_BYTES         (64ull << 20)
/* Handles that a rank on a GPU keeps ready; taken off its device's pool by the plan. */
#define KV_READY_BUNDLES_CUDA 2u
#endif
