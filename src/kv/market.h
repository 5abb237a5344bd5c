/* SPDX-License-Identifier: MIT */
/*
 * The daemon's side of the KV control channel: reads reports and completions, keeps what is
 * charged, asks the policy, writes commands. One owner thread; no clock (time is passed in), no
 * descriptor, no allocation: the caller rings the bells and kills whom the result names. The
 * simulator drives this object and the real channel exactly as the daemon does.
 *
 * A group's life:  ABSENT ── start ──▶ STARTING ── all ranks open and answered ──▶ PRESENT
 *                     ▲                    └───────── leave (a rank is gone) ──────────┤
 *                     └── end (its last process is gone: every byte is back) ── LEAVING ◀┘
 * Until `end` the bytes stay charged: a process that has been told to end still holds its memory.
 *
 * A pool of a GPU is formed by observation. Until every rank there that has started has captured
 * its graphs, nobody gets more than its floor; then the pool is what the last of them saw free,
 * beside what the KV Caches had, less what is kept free and what models that are not there will
 * take; never more than planned. The last one sees what all have taken, and no memory moves before,
 * so Instances that start together count each other's memory neither twice nor not at all. Each
 * Instance that comes later is an observation again, of which one is left out that memory moved
 * after.
 */
#ifndef XPOOL_KV_MARKET_H
#define XPOOL_KV_MARKET_H

#include "kv/policy.h"

typedef enum kv_market_state {
    KV_MARKET_ABSENT = 0,
    KV_MARKET_STARTING,
    KV_MARKET_PRESENT,
    KV_MARKET_LEAVING,
} kv_market_state_t;

typedef struct kv_market_group {
    kv_market_state_t state;
    uint32_t sequence; /* of the newest command; 0 while absent */
    uint64_t commanded_ns;
    kv_policy_command_t last; /* the newest command and why */
    bool trim_wanted;
    bool ring_wanted; /* its ceiling has changed */
    bool reported_late;
    kv_report_t report; /* the newest whole one */
    uint64_t grants, shrinks, trims, late;
    uint64_t granted_bundles, released_bundles;
    uint64_t longest_answer_ns;
    uint64_t credited_ns; /* when its mapped size changed last */
} kv_market_group_t;

typedef struct kv_market_settings {
    kv_policy_mode_t mode;
    uint64_t patience_ns, hold_ns;
    uint64_t answer_ns;                 /* deadlines.kv */
    bool observe;                       /* GPUs: pools are formed by observation */
    uint64_t kept_bytes[KV_MAX_POOLS];  /* stays free on that device */
    uint64_t rank_bytes[KV_MAX_GROUPS]; /* what a rank of that group takes beside its KV Cache */
} kv_market_settings_t;

/* Called with each snapshot that led to a decision, for records. */
typedef void (*kv_market_record_t)(void *context, const kv_policy_snapshot_t *snapshot,
                                   const kv_policy_decisions_t *decisions);

typedef struct kv_market {
    kv_channel_t *channel;
    kv_channel_t plan; /* its constant parts, kept here: every rank can write the shared ones */
    kv_market_settings_t settings;
    kv_policy_snapshot_t snapshot; /* the policy's groups are the market's books */
    kv_policy_decisions_t decisions;
    kv_market_group_t groups[KV_MAX_GROUPS];
    /* Instances wait for the next Generation in the middle of a step: who has not answered is not
     * late, and has all its time again afterwards. */
    bool paused;
    uint64_t observed_ns[KV_MAX_POOLS];  /* of the newest observation looked at; 0: none */
    uint64_t formed_bytes[KV_MAX_POOLS]; /* 0: not formed */
    kv_market_record_t record;
    void *record_context;
    uint64_t decision_count;
} kv_market_t;

typedef enum kv_market_fault {
    KV_FAULT_NONE = 0,
    KV_FAULT_LATE,   /* has not answered within answer_ns; said once a command */
    KV_FAULT_SILENT, /* nor within twice that: treat its Instance as failed */
    KV_FAULT_BROKEN, /* its cells are nonsense: treat its Instance as failed */
} kv_market_fault_t;

typedef struct kv_market_step {
    bool ring[KV_MAX_GROUPS];  /* new command: ring the bell of every rank */
    bool formed[KV_MAX_POOLS]; /* formed just now, or anew */
    kv_market_fault_t faults[KV_MAX_GROUPS];
    const char *fault_text[KV_MAX_GROUPS]; /* static; set with a fault */
    uint64_t
        next_ns; /* step again by then, whatever rings; UINT64_MAX: only when something rings */
} kv_market_step_t;

/* The channel must outlive the market; it was just made, and no rank has it yet. */
void kv_market_init(kv_market_t *market, kv_channel_t *channel,
                    const kv_market_settings_t *settings);
/* Before the first rank of the group is admitted. ABSENT only. `bundles`: what it begins with; 0:
 * its floor. */
void kv_market_start(kv_market_t *market, uint32_t group, uint32_t bundles);
/* One of its ranks is gone or told to end; accepts every state. */
void kv_market_leave(kv_market_t *market, uint32_t group);
/* None of its processes is left; accepts every state. */
void kv_market_end(kv_market_t *market, uint32_t group);
/* Everything that is due at now_ns. Cheap when nothing changed. */
void kv_market_step(kv_market_t *market, uint64_t now_ns, kv_market_step_t *step_out);

/* Live changes, in bundles: of all these groups, each named once, or of none. XP_INVALID and
 * XP_NO_MEMORY say what is allowed. Take effect at the next step. */
typedef struct kv_market_size {
    uint32_t group, floor_bundles, ceiling_bundles;
} kv_market_size_t;
xp_status_t kv_market_set(kv_market_t *market, const kv_market_size_t *sizes, uint32_t count);
/* The order in which demands are met from the next step on: KV_POLICY_DEADLINE or
 * KV_POLICY_ARRIVAL. XP_UNSUPPORTED where KV Caches have a fixed size. */
xp_status_t kv_market_order(kv_market_t *market, kv_policy_mode_t mode);
/* At the next step at which no command is open: shrink to what live requests use, and drop the
 * prefix cache. XP_RETRY while the group is not PRESENT, XP_UNSUPPORTED when it is not elastic. */
xp_status_t kv_market_trim(kv_market_t *market, uint32_t group);

uint64_t kv_market_charged_bytes(const kv_market_t *market, uint32_t pool);
/* Most bundles that the group could ever get with the floors of now. */
uint32_t kv_market_possible_bundles(const kv_market_t *market, uint32_t group);
const char *kv_market_state_name(kv_market_state_t state);
#endif
