/* SPDX-License-Identifier: MIT */
/*
 * The KV policy: which KV Capacity Group grows and which shrinks. A pure function of a snapshot: no
 * clock, no allocation, no state, no I/O. The daemon and the simulator link this object, and a
 * recorded snapshot gives the same decisions again.
 *
 * Charge. A group is charged the largest of floor, mapped and goal on each of its pools, so both
 * sizes count while an operation is open and a floor is kept even for an Instance that is not
 * there. Free bytes are what is left of a pool.
 *
 * Order of demands. A raised floor goes first, then those that starve and those that are overdue,
 * oldest grant first, then the others by earliest deadline; last, by arrival, those that are late.
 * A demand is also overdue once it has waited patience_ns, so that one without a deadline gets its
 * turn. A prefill is late when it is overdue for longer than its whole target was (from arrival to
 * deadline): nothing is left to keep, and under overload it would cost another one its target. A
 * demand starves when, since it came and since its group's last grant, eight targets or patience_ns
 * have passed, whichever is less; without a known target patience_ns.
 *
 * Funding, in that order of demands, each from free bytes first, then from donors: what they hold
 * above floor and live requests, idle groups first (longest idle first), then those whose live work
 * has the latest deadline. No donor is a group ahead in the order whose own demand is being
 * met, nor one that still releases for an earlier command, nor, for hold_ns, one that was just
 * granted what it asked for. Only a demand that can be met
 * as a whole is funded. While shrinks of one pool are unanswered no further shrink touches it (one
 * funding attempt at a time per pool); pools without a group in common proceed independently.
 *
 * A prefix cache is no reason to take memory from anybody: such a demand comes after all others and
 * gets free bytes only.
 *
 * What cannot be met. A demand that free bytes and donors do not cover is refused for now, and
 * looked at again at every decision. When it starves it also keeps its pools: later prefills get
 * nothing there, and as many groups as are needed (those already chosen first, then the latest
 * deadline) are squeezed: they admit no new prefill above their floor until it is met. Decodes of
 * live work are still served, since they are what it waits for. So from then on it waits at most
 * for live requests to end, and each other group goes ahead of it at most once. Not before: a pool
 * that is kept is empty in part, and under overload every queue is overdue.
 */
#ifndef XPOOL_KV_POLICY_H
#define XPOOL_KV_POLICY_H

#include "kv/channel.h"

typedef enum kv_policy_mode {
    KV_POLICY_DEADLINE = 0,
    KV_POLICY_ARRIVAL, /* elastic, in order of arrival; for comparison */
    KV_POLICY_STATIC   /* never any decision */
} kv_policy_mode_t;

typedef struct kv_policy_group {
    uint64_t bundle_bytes; /* of one member */
    uint32_t member_count;
    uint32_t pools[KV_MAX_RANKS]; /* of each member; one pool may occur several times */
    uint32_t floor_bundles;       /* reserved: charged even while nothing is mapped */
    uint32_t floor_wanted;        /* a raised floor becomes the floor once it is funded */
    uint32_t ceiling_bundles;
    uint32_t mapped_bundles; /* the most that any member may have mapped */
    uint32_t goal_bundles;   /* of the newest command */
    bool present;            /* takes part: commands may be given */
    bool answered;           /* every member has completed the newest command at least once */
    bool squeezed;           /* as the last decision left it */
    /* The leader's report, within bounds. */
    uint32_t demand_kind, demand_bundles, live_bundles;
    bool idle;
    uint64_t demand_deadline_ns, demand_since_ns, earliest_deadline_ns, last_activity_ns;
    uint64_t granted_ns;    /* when its last grant was completed; 0: never */
    uint64_t not_before_ns; /* the system lately had no memory for its grant: none until then */
} kv_policy_group_t;

typedef struct kv_policy_snapshot {
    uint64_t now_ns, patience_ns, hold_ns;
    kv_policy_mode_t mode;
    uint32_t pool_count, group_count;
    uint64_t pool_bytes[KV_MAX_POOLS];
    kv_policy_group_t groups[KV_MAX_GROUPS];
} kv_policy_snapshot_t;

typedef enum kv_policy_reason {
    KV_REASON_NONE = 0,
    KV_REASON_GRANT,   /* grow to what for_group (itself) asked for */
    KV_REASON_FUND,    /* shrink to fund for_group */
    KV_REASON_CEILING, /* shrink below a lowered ceiling */
    KV_REASON_FLOOR,   /* grow to a raised floor */
    /* The market's own. */
    KV_REASON_TRIM,  /* shrink, and drop the prefix cache */
    KV_REASON_SHORT, /* the system had no memory for the whole grant */
} kv_policy_reason_t;

typedef struct kv_policy_command {
    uint32_t group, bundles, for_group;
    kv_policy_reason_t reason;
} kv_policy_command_t;

typedef struct kv_policy_decisions {
    uint32_t command_count; /* at most one a group */
    kv_policy_command_t commands[KV_MAX_GROUPS];
    bool refused[KV_MAX_GROUPS];  /* its demand cannot be met now */
    bool squeezed[KV_MAX_GROUPS]; /* admits no new prefill above its floor */
} kv_policy_decisions_t;

/* The snapshot's counts and pool indexes must be within bounds (asserted). */
void kv_policy_decide(const kv_policy_snapshot_t *snapshot, kv_policy_decisions_t *decisions_out);

/* What a group is charged, in bundles of each member. */
uint32_t kv_policy_charge(const kv_policy_group_t *group);
/* What it wants in all, at most its ceiling; 0 without a demand beyond its goal. */
uint32_t kv_policy_need(const kv_policy_group_t *group);
/* Its demand is for its prefix cache alone: nobody waits for it. */
bool kv_policy_only_cache(const kv_policy_group_t *group);
/* From when its demand is overdue. */
uint64_t kv_policy_deadline_ns(const kv_policy_snapshot_t *snapshot,
                               const kv_policy_group_t *group);
/* Bytes of one bundle of the group on a pool: bundle_bytes times its members there. */
uint64_t kv_policy_bundle_on(const kv_policy_group_t *group, uint32_t pool);
const char *kv_policy_reason_name(kv_policy_reason_t reason);
#endif
