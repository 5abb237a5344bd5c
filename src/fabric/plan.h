/* SPDX-License-Identifier: MIT */
/*
 * The Fabric plan of one Generation: plain data, immutable once made. The daemon writes it, every
 * participant receives the same bytes in a sealed memfd; the Fabric copies what it needs into its
 * plan tables.
 *
 * PE order: AtnAgents 0 .. atn_count-1, then FfnAgents atn_count .. atn_count+ffn_count-1. The
 * first FfnAgent hosts the Coordinator.
 */
#ifndef XPOOL_FABRIC_PLAN_H
#define XPOOL_FABRIC_PLAN_H

#include <stdbool.h>
#include <stdint.h>

#include "model/spec.h"

#define FABRIC_PLAN_MAGIC    0x31504658u /* "XFP1" */
#define FABRIC_PLAN_VERSION  1u
#define FABRIC_MAX_ATN       16
#define FABRIC_MAX_FFN       16
#define FABRIC_MAX_PES       (FABRIC_MAX_ATN + FABRIC_MAX_FFN)
#define FABRIC_MAX_LANES     16
#define FABRIC_MAX_INSTANCES 64
#define FABRIC_MAX_RANKS     8 /* attention TP x DP of one Instance */
#define FABRIC_MAX_ROWS      8192

/* SHM: CPU devices, rows of F32. P2P: GPUs of one host (module stage), rows of BF16 or F16,
 * straight between Instance and FfnAgents; P2P_RELAY: the same by way of the AtnAgents; NVSHMEM: as
 * P2P_RELAY, with stages and relay arenas in the symmetric heap of all agents; NVSHMEM_FAR: the
 * same as between hosts, where no PE's memory is mapped by another. */
typedef enum fabric_plan_provider {
    FABRIC_PROVIDER_SHM = 0,
    FABRIC_PROVIDER_P2P,
    FABRIC_PROVIDER_P2P_RELAY,
    FABRIC_PROVIDER_NVSHMEM,
    FABRIC_PROVIDER_NVSHMEM_FAR,
} fabric_plan_provider_t;

typedef enum fabric_policy {
    FABRIC_POLICY_FIFO = 0,
    FABRIC_POLICY_RANDOM,
    FABRIC_POLICY_DEADLINE,
} fabric_policy_t;

/* How an Invocation's result reaches the AtnAgents.
 * DIRECT_PARTIAL: every FfnAgent of the group delivers its partial to the consumer, which reduces
 * in PE order. SINGLE_COMPLETE: the group's first FfnAgent reduces and delivers the complete rows
 * to the one consumer (or, under attention DP, each consumer's own rows to it).
 * REPLICATED_COMPLETE: the complete rows go to every consumer (attention TP). */
typedef enum fabric_delivery {
    FABRIC_DELIVERY_DIRECT_PARTIAL = 0,
    FABRIC_DELIVERY_SINGLE_COMPLETE,
    FABRIC_DELIVERY_REPLICATED_COMPLETE,
} fabric_delivery_t;
/* By way of the AtnAgents? */
static inline bool fabric_provider_relays(uint32_t provider)
{
    return provider >= FABRIC_PROVIDER_P2P_RELAY;
}
/* In the symmetric heap of NVSHMEM? */
static inline bool fabric_provider_heap(uint32_t provider)
{
    return provider == FABRIC_PROVIDER_NVSHMEM || provider == FABRIC_PROVIDER_NVSHMEM_FAR;
}
/* "shm", "p2p", "p2p-relay", "nvshmem", "nvshmem-far", "unknown". */
const char *fabric_plan_provider_name(uint32_t provider);
/* "direct-partial", "single-complete", "replicated-complete", "unknown". */
const char *fabric_delivery_name(uint32_t delivery);

/* AUTO: eager for one participant, long otherwise. LONG and EAGER force one (tests, benchmarks);
 * EAGER with several participants is refused. */
typedef enum fabric_form {
    FABRIC_FORM_AUTO = 0,
    FABRIC_FORM_EAGER,
    FABRIC_FORM_LONG
} fabric_form_t;

typedef struct fabric_plan_instance {
    char id[96];
    uint32_t weights; /* index of the weight set; ids of one checkpoint share it */
    uint32_t hidden, layers;
    uint32_t max_rows; /* rows of one Transport request, at most */
    uint32_t dtype;    /* xp_dtype_t of activations; F32 on CPU, BF16 or F16 on CUDA */
    uint32_t atn_tp, atn_dp;
    uint32_t rank_atn[FABRIC_MAX_RANKS];    /* AtnAgent index of rank = dp * atn_tp + tp */
    uint32_t delivery;                      /* fabric_delivery_t */
    uint32_t form;                          /* fabric_form_t */
    uint64_t ttft_ns, tbt_ns;               /* SLO, for the deadline policy */
    uint32_t layer_group[MODEL_MAX_LAYERS]; /* bit i: FfnAgent i belongs to the Execution Group */
} fabric_plan_instance_t;

typedef struct fabric_plan {
    uint32_t magic, version;
    uint64_t bytes; /* sizeof(fabric_plan_t) */
    uint64_t generation;
    uint32_t atn_count, ffn_count;
    uint32_t lanes;                 /* Executor Lanes (scheduler.ffn_concurrency) */
    uint32_t policy;                /* fabric_policy_t */
    uint64_t seed;                  /* of the random policy */
    uint64_t submission_timeout_ns; /* one Invocation, from Submission to commit */
    uint32_t spin_ns;               /* bounded spinning before a futex wait; 0 = never spin */
    uint32_t instance_count;
    uint32_t weights_count;
    uint32_t provider; /* fabric_plan_provider_t */
    fabric_plan_instance_t instances[FABRIC_MAX_INSTANCES];
} fabric_plan_t;

static inline uint32_t fabric_plan_ranks(const fabric_plan_instance_t *instance)
{
    return instance->atn_tp * instance->atn_dp;
}

/* Who waits for an Invocation gives up the later, the less it knows of what went wrong: first the
 * Coordinator, after the submission timeout; then the AtnAgent; the caller behind the arena last.
 * So the canonical failure is named by the one who can name the culprit, and has reached the caller
 * before its own patience ends. */
#define FABRIC_CALLER_SLACK_NS                                                                     \
    5000000000u /* for noticing and closing the arena on a loaded machine */

static inline uint64_t fabric_plan_atn_patience_ns(uint64_t submission_timeout_ns)
{
    return submission_timeout_ns + submission_timeout_ns / 4;
}
/* What a caller waits for the answer of one request, at least. */
static inline uint64_t fabric_plan_caller_patience_ns(uint64_t submission_timeout_ns)
{
    return fabric_plan_atn_patience_ns(submission_timeout_ns) + FABRIC_CALLER_SLACK_NS;
}

/* Checks bounds and consistency of a plan that came from a peer. plan.c. */
xp_status_t fabric_plan_check(const fabric_plan_t *plan, uint64_t bytes);
#endif
