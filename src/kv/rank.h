/* SPDX-License-Identifier: MIT */
/*
 * An Instance Rank's side of the KV control channel (kv/channel.h has the layout and the rules).
 *
 * A rank opens the channel, maps the first command's bundles, and from then on asks between steps:
 *
 *     if (kv_rank_pending(rank) && kv_rank_poll(rank, step, least, &command))
 *         goal = command.bundles;                    (apply: grow, or withdraw and shrink)
 *     kv_rank_complete(rank, mapped);                (whenever fewer are mapped, or all that will
 * be) kv_rank_report(rank, &report);                 (leader)
 *
 * The ranks of one group switch together: the leader proposes what it can reach, the others answer
 * with what they can, and when all have answered the leader names the step. Until every rank has
 * completed it nothing newer is proposed, so no answer is overwritten while somebody still needs
 * it.
 *
 * Used by the thread that owns the rank's KV; kv_rank_bell() and kv_rank_rung() by any.
 */
#ifndef XPOOL_KV_RANK_H
#define XPOOL_KV_RANK_H

#include "kv/channel.h"

typedef struct kv_rank {
    kv_channel_t *channel;
    kv_group_entry_t *group;
    kv_partition_entry_t *partition;
    uint32_t first, count, index; /* partitions of the group; this rank's place among them */
    int daemon_bell, bell;        /* own copies; -1: none */

    uint32_t goal;     /* bundles of the last command applied */
    uint32_t applied;  /* its sequence; 0: none yet */
    uint32_t answered; /* the newest sequence voted for */
    uint64_t completion;
    kv_report_t report; /* the last one written */
    bool reported;
} kv_rank_t;

/* Maps the channel and duplicates the bells; the descriptors stay the caller's. Bells of -1 are for
 * tests without a daemon. XP_PEER when it is no channel or the partition is not there. */
xp_status_t kv_rank_open(int channel_fd, int daemon_bell, int bell, uint32_t partition,
                         kv_rank_t *rank_out);
/* After the rank's memory has been unmapped: the daemon counts on it. Accepts all zero. */
void kv_rank_close(kv_rank_t *rank);

/* The bundles to map before serving, those of command 1. XP_PEER when the daemon published none, or
 * one that the geometry does not allow. */
xp_status_t kv_rank_start(const kv_rank_t *rank, uint32_t *bundles_out);
/* The rank computes with this geometry and has mapped `bundles`: completes command 1. XP_PEER when
 * it is not the group's geometry. */
xp_status_t kv_rank_ready(kv_rank_t *rank, uint64_t bundle_bytes, uint32_t bundle_tokens,
                          uint32_t bundles);

static inline bool kv_rank_leads(const kv_rank_t *rank)
{
    return rank->index == 0;
}

/* One load: false as long as the command applied last is the newest. */
static inline bool kv_rank_pending(const kv_rank_t *rank)
{
    return KV_CELL_SEQUENCE(PROTOCOL_LOAD_RELAXED(&rank->group->command)) != rank->applied;
}
/* True once for a command that is to be applied now, at the start of scheduler step `step`.
 * `least`: fewest bundles that live requests leave this rank able to reach by moving pages.
 * command_out's bundles are the group's common goal. With one rank a command is applied where it is
 * seen. */
bool kv_rank_poll(kv_rank_t *rank, uint32_t step, uint32_t least, kv_command_t *command_out);

/* Says how much is really mapped. Publishes, and rings, only what is news: the first completion of
 * a command, and later smaller ones. */
void kv_rank_complete(kv_rank_t *rank, uint32_t mapped_bundles);

/* GPU: this rank has captured its graphs and takes no more memory than it has; the device has so
 * many bytes free now. Rings. */
void kv_rank_captured(kv_rank_t *rank, uint64_t free_bytes, uint64_t now_ns);

/* Leader (ignored elsewhere): what the group uses and wants. Rings when the demand is a new one. */
void kv_rank_report(kv_rank_t *rank, const kv_report_t *report);
/* The daemon has said that the demand reported last cannot be met now. */
bool kv_rank_refused(const kv_rank_t *rank);

/* Readable after each command; kv_rank_rung() empties it. -1: none. */
int kv_rank_bell(const kv_rank_t *rank);
void kv_rank_rung(const kv_rank_t *rank);
#endif
