/* SPDX-License-Identifier: MIT */
/*
 * The planner: from a configuration and the checkpoints' headers to one Fabric plan and one ledger
 * of bytes. Host-only, starts nothing, reads no weight; `xpool plan` and the daemon share it.
 *
 * Placement is exact: first every weight set uses as few device groups as possible (one), then the
 * largest sum of admitted bytes on any FFN device is as small as possible. Among those that are
 * equal in that, the first device holds the foremost weight sets that it can, then the second, and
 * so on; foremost is the larger one, the earlier one of the configuration among equals. A search
 * that passes ffn.placement.timeout_seconds is an error, never a worse answer.
 */
#ifndef XPOOL_CONTROL_PLANNER_H
#define XPOOL_CONTROL_PLANNER_H

#include "config/config.h"
#include "fabric/plan.h"
#include "model/spec.h"

typedef struct plan_weights {
    uint32_t first_model; /* index in config of the first model that uses this set */
    uint32_t group;       /* bit i: FfnAgent i holds a shard */
    uint32_t tp_size;
    uint64_t shard_bytes; /* on each member of the group */
} plan_weights_t;

typedef struct plan_model {
    model_spec_t spec;
    uint32_t weights;                    /* index in plan_result_t.weights */
    uint32_t ranks;                      /* attention TP x DP */
    uint32_t rank_atn[FABRIC_MAX_RANKS]; /* attention device of each rank */
    xp_dtype_t dtype;  /* of attention weights and KV Cache in memory; AUTO: as stored (native) */
    uint32_t max_rows; /* of one FFN call of one rank */
    uint32_t max_context; /* tokens one request may have */
    /* KV Cache of each rank: between floor and ceiling in whole bundles, each on its rank's device.
     * kv_tokens and kv_bytes are the ceiling's; floor and ceiling are one where it is not elastic.
     */
    bool kv_elastic;
    uint32_t kv_tokens, kv_floor_tokens;
    uint32_t kv_page_tokens, kv_bundle_tokens, kv_floor_bundles, kv_ceiling_bundles;
    uint64_t kv_bundle_bytes;
    /* Of each rank, on its own device. */
    uint64_t kv_bytes_per_token, kv_bytes;
    uint64_t attention_bytes, workspace_bytes, arena_bytes;
} plan_model_t;

typedef struct plan_device {
    const config_device_t *device;
    bool ffn_role;
    uint64_t budget_bytes; /* memory times utilisation, minus margins */
    uint64_t weight_bytes, workspace_bytes, arena_bytes;
    uint64_t kv_bytes; /* attention: its KV Capacity Pool */
} plan_device_t;

typedef struct plan_result {
    fabric_plan_t plan;
    bool cuda;             /* all devices are GPUs (else all are CPUs) */
    uint64_t fabric_bytes; /* the Fabric arena, host memory outside the devices' budgets */
    uint32_t model_count, weights_count, atn_count, ffn_count;
    plan_model_t models[CONFIG_MAX_MODELS];
    plan_weights_t weights[CONFIG_MAX_MODELS];
    plan_device_t atn[CONFIG_MAX_DEVICES], ffn[CONFIG_MAX_DEVICES];
} plan_result_t;

/* `result_out` is heap-allocated (about 5 MiB); planner_free(). Errors say what does not fit, by
 * how many bytes, and which setting to change. */
xp_status_t planner_make(const config_t *config, uint64_t generation, plan_result_t **result_out);
void planner_free(plan_result_t *result);
/* The attention devices of one model's ranks; how many ranks it has. Reads no checkpoint. */
uint32_t planner_rank_devices(const config_t *config, uint32_t model,
                              uint32_t rank_atn_out[FABRIC_MAX_RANKS]);
/* "1.5 MiB"; returns `out`. */
const char *planner_human(uint64_t bytes, char out[32]);
/* Most rows of one FFN call of one rank. */
uint32_t planner_max_rows(const config_model_t *model);

/* placement.c: the assignment alone: items of `bytes[i]` on each of exactly `tp[i]` devices; writes
 * masks. XP_NO_MEMORY: no assignment fits.
 * XP_TIMEOUT: the search passed deadline_ns. */
xp_status_t planner_place(const uint64_t *bytes, const uint32_t *tp, uint32_t items,
                          const uint64_t *capacity, uint32_t devices, uint64_t deadline_ns,
                          uint32_t *masks_out);
#endif
