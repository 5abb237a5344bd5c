/* SPDX-License-Identifier: MIT */
/*
 * A rank's place in the KV control channel: commands in, votes, completions and reports out. Never
 * maps memory; never blocks. What the daemon and the other ranks wrote is loaded once and checked.
 */
#include "kv/rank.h"

#include <inttypes.h>
#include <string.h>
#include <unistd.h>

#include "base/failpoint.h"
#include "base/memfd.h"

xp_status_t kv_rank_open(int channel_fd, int daemon_bell, int bell, uint32_t partition,
                         kv_rank_t *rank_out)
{
    kv_rank_t rank = {.daemon_bell = -1, .bell = -1};
    XP_TRY(kv_channel_map(channel_fd, partition, &rank.channel));
    xp_status_t status = XP_OK;
    if (daemon_bell >= 0)
        XP_TRY_GOTO(status, close, xp_fd_duplicate(daemon_bell, &rank.daemon_bell));
    if (bell >= 0)
        XP_TRY_GOTO(status, close, xp_fd_duplicate(bell, &rank.bell));
    rank.partition = &rank.channel->partitions[partition];
    rank.group = &rank.channel->groups[rank.partition->group];
    rank.first = rank.group->first_partition;
    rank.count = rank.group->partition_count;
    rank.index = partition - rank.first;
    if (rank.index >= rank.count || rank.count > KV_MAX_RANKS ||
        rank.first + rank.count > KV_MAX_PARTITIONS) {
        status = xp_fail(XP_PEER, "KV partition %u is not one of its group's", partition);
        goto close;
    }
    *rank_out = rank;
    return XP_OK;
close:
    kv_rank_close(&rank);
    return status;
}

void kv_rank_close(kv_rank_t *rank)
{
    if (!rank->channel)
        return;
    if (rank->applied)
        kv_partition_close(rank->partition);
    kv_channel_unmap(rank->channel);
    if (rank->daemon_bell >= 0)
        close(rank->daemon_bell);
    if (rank->bell >= 0)
        close(rank->bell);
    memset(rank, 0, sizeof(*rank));
}

static void ring(const kv_rank_t *rank)
{
    if (rank->daemon_bell >= 0)
        kv_bell_ring(rank->daemon_bell);
}

xp_status_t kv_rank_start(const kv_rank_t *rank, uint32_t *bundles_out)
{
    kv_command_t command = kv_group_command(rank->group);
    if (command.sequence == 0 || command.bundles == 0 ||
        command.bundles > rank->group->reserved_bundles)
        return xp_fail(XP_PEER,
                       "the KV control channel's first command says %u of %u bundles "
                       "(sequence %u)",
                       command.bundles, rank->group->reserved_bundles, command.sequence);
    *bundles_out = command.bundles;
    return XP_OK;
}

xp_status_t kv_rank_ready(kv_rank_t *rank, uint64_t bundle_bytes, uint32_t bundle_tokens,
                          uint32_t bundles)
{
    if (bundle_bytes != rank->group->bundle_bytes || bundle_tokens != rank->group->bundle_tokens)
        return xp_fail(XP_PEER,
                       "a KV bundle has %" PRIu64 " bytes for %u tokens here, and %" PRIu64
                       " bytes for %u tokens in the plan",
                       bundle_bytes, bundle_tokens, rank->group->bundle_bytes,
                       rank->group->bundle_tokens);
    kv_partition_open(rank->partition, bundle_bytes, bundle_tokens);
    /* A newer command than the one started from is applied in the ordinary way. */
    rank->applied = rank->answered = 1;
    rank->goal = bundles;
    kv_rank_complete(rank, bundles);
    return XP_OK;
}

/* ---- commands -------------------------------------------------------------------------------- */

static uint32_t clamp(const kv_rank_t *rank, uint32_t bundles)
{
    const uint32_t most = rank->group->reserved_bundles;
    return bundles > most ? most : bundles == 0 ? 1 : bundles;
}

static void answer(kv_rank_t *rank, uint32_t sequence, uint32_t bundles, bool trim)
{
    kv_partition_vote(rank->partition, sequence, bundles | (trim ? KV_COMMAND_TRIM : 0));
    rank->answered = sequence;
}

static uint32_t reach(const kv_rank_t *rank, uint32_t wanted, uint32_t least)
{
    /* A grow asks for nothing that a rank could refuse beforehand; it may complete with less. */
    if (wanted >= rank->goal || wanted >= least)
        return wanted;
    return least < rank->goal ? least : rank->goal;
}

static bool all_completed(const kv_rank_t *rank, uint32_t sequence)
{
    for (uint32_t p = 0; p < rank->count; p++) {
        const kv_partition_entry_t *partition = &rank->channel->partitions[rank->first + p];
        if (KV_CELL_SEQUENCE(kv_partition_completion(partition)) != sequence)
            return false;
    }
    return true;
}

/* The common goal of all votes for `sequence`; false while one is missing. */
static bool votes_agree(const kv_rank_t *rank, uint32_t sequence, kv_command_t *command_out)
{
    uint32_t most = 0, fewest = UINT32_MAX;
    bool trim = false, shrinks = false;
    for (uint32_t p = 0; p < rank->count; p++) {
        uint64_t vote = kv_partition_vote_read(&rank->channel->partitions[rank->first + p]);
        uint32_t bundles = KV_CELL_VALUE(vote) & ~KV_COMMAND_TRIM;
        if (KV_CELL_SEQUENCE(vote) != sequence)
            return false;
        if (p == 0) {
            trim = (KV_CELL_VALUE(vote) & KV_COMMAND_TRIM) != 0;
            shrinks = bundles < rank->goal;
        }
        most = bundles > most ? bundles : most;
        fewest = bundles < fewest ? bundles : fewest;
    }
    *command_out = (kv_command_t){
        .sequence = sequence, .bundles = clamp(rank, shrinks ? most : fewest), .trim = trim};
    return true;
}

static bool is_newer(uint32_t sequence, uint32_t than)
{
    return (int32_t)(sequence - than) > 0;
}

static void lead(kv_rank_t *rank, uint32_t step, uint32_t least)
{
    if (rank->answered == rank->applied) {
        kv_command_t command = kv_group_command(rank->group);
        if (is_newer(command.sequence, rank->applied) && all_completed(rank, rank->applied))
            answer(rank, command.sequence, reach(rank, clamp(rank, command.bundles), least),
                   command.trim);
        return;
    }
    kv_command_t agreed;
    if (KV_CELL_SEQUENCE(kv_group_switch(rank->group)) != rank->answered &&
        votes_agree(rank, rank->answered, &agreed))
        kv_group_switch_publish(rank->group, rank->answered, step + KV_SWITCH_STEPS);
}

static void follow(kv_rank_t *rank, uint32_t least)
{
    uint64_t proposal = kv_partition_vote_read(&rank->channel->partitions[rank->first]);
    uint32_t bundles = clamp(rank, KV_CELL_VALUE(proposal) & ~KV_COMMAND_TRIM);
    if (rank->answered == rank->applied && is_newer(KV_CELL_SEQUENCE(proposal), rank->applied))
        answer(rank, KV_CELL_SEQUENCE(proposal), reach(rank, bundles, least),
               (KV_CELL_VALUE(proposal) & KV_COMMAND_TRIM) != 0);
}

bool kv_rank_poll(kv_rank_t *rank, uint32_t step, uint32_t least, kv_command_t *command_out)
{
    kv_command_t command;
    if (rank->count == 1) {
        command = kv_group_command(rank->group);
        if (!is_newer(command.sequence, rank->applied))
            return false;
        command.bundles = clamp(rank, command.bundles);
    } else {
        if (kv_rank_leads(rank))
            lead(rank, step, least);
        else
            follow(rank, least);
        uint64_t cell = kv_group_switch(rank->group);
        if (rank->answered == rank->applied || KV_CELL_SEQUENCE(cell) != rank->answered ||
            is_newer(KV_CELL_VALUE(cell), step) || !votes_agree(rank, rank->answered, &command))
            return false;
    }
    rank->applied = rank->answered = command.sequence;
    rank->goal = command.bundles;
    *command_out = command;
    return true;
}

void kv_rank_complete(kv_rank_t *rank, uint32_t mapped_bundles)
{
    if (KV_CELL_SEQUENCE(rank->completion) == rank->applied &&
        KV_CELL_VALUE(rank->completion) <= mapped_bundles)
        return;
    rank->completion = KV_CELL(rank->applied, mapped_bundles);
    kv_partition_complete(rank->partition, rank->applied, mapped_bundles);
    xp_failpoint("kv.rank.completed");
    ring(rank);
}

void kv_rank_captured(kv_rank_t *rank, uint64_t free_bytes, uint64_t now_ns)
{
    kv_partition_capture(rank->partition, free_bytes, now_ns);
    ring(rank);
}

/* ---- reports --------------------------------------------------------------------------------- */

void kv_rank_report(kv_rank_t *rank, const kv_report_t *report)
{
    if (!kv_rank_leads(rank) ||
        (rank->reported && memcmp(report, &rank->report, sizeof(*report)) == 0))
        return;
    const kv_report_t *old = &rank->report;
    const bool news = report->demand_kind != KV_DEMAND_NONE &&
                      (!rank->reported || report->demand_kind != old->demand_kind ||
                       report->demand_bundles != old->demand_bundles ||
                       report->demand_deadline_ns != old->demand_deadline_ns ||
                       report->demand_since_ns != old->demand_since_ns);
    kv_group_report_write(rank->group, report);
    rank->report = *report;
    rank->reported = true;
    if (!news)
        return;
    xp_failpoint("kv.rank.demanded");
    ring(rank);
}

bool kv_rank_refused(const kv_rank_t *rank)
{
    uint64_t refused = PROTOCOL_LOAD_ACQUIRE(&rank->group->refused_since_ns);
    return refused != 0 && rank->report.demand_kind != KV_DEMAND_NONE &&
           refused == rank->report.demand_since_ns;
}

int kv_rank_bell(const kv_rank_t *rank)
{
    return rank->bell;
}

void kv_rank_rung(const kv_rank_t *rank)
{
    if (rank->bell >= 0)
        kv_bell_clear(rank->bell);
}
