/* SPDX-License-Identifier: MIT */
/*
 * KV Caches in the plan: what of each attention device's memory is its KV Capacity Pool, and the
 * floor, ceiling and bundle of every KV Capacity Group.
 *
 * The pool is what weights, workspaces and arenas leave. Floors are admitted: their sum fits every
 * pool. Where the engine takes part in elastic KV (planner_kv_elastic()), everything between floor
 * and ceiling is lent on demand; elsewhere, and with scheduler.kv_policy = "static", floor and
 * ceiling are one equal share.
 */
#ifndef XPOOL_CONTROL_PLANNER_KV_H
#define XPOOL_CONTROL_PLANNER_KV_H

#include "control/planner.h"
#include "kv/channel.h"

/* Fills kv_* and max_context of every model and kv_bytes of every attention device; needs
 * everything else of the ledger. */
xp_status_t planner_kv(const config_t *config, plan_result_t *result);
/* Whether the models' KV Caches are ranges of ours. With scheduler.kv_policy = "static" those on
 * GPUs are the engine's own. */
bool planner_kv_ranges(const config_t *config, const plan_result_t *result);
/* The groups, in order of models, then of attention DP ranks; returns their number. Rank r of model
 * m is partition planner_kv_partition(m, r). XP_UNSUPPORTED past the channel's limits. */
xp_status_t planner_kv_groups(const plan_result_t *result, const config_t *config,
                              kv_group_plan_t groups_out[KV_MAX_GROUPS], uint32_t *count_out);
uint32_t planner_kv_partition(const plan_result_t *result, uint32_t model, uint32_t rank);
#endif
