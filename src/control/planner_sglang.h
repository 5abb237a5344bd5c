/* SPDX-License-Identifier: MIT */
/* What the planner knows of SGLang: which models it serves, and what one of its ranks holds. Pure
 * functions, any thread. */
#ifndef XPOOL_CONTROL_PLANNER_SGLANG_H
#define XPOOL_CONTROL_PLANNER_SGLANG_H

#include "control/planner.h"

/* Refuses, by the setting's name, what SGLang with the plugin cannot serve. */
xp_status_t planner_check_sglang(const config_model_t *model, const model_spec_t *spec);
/* Fills dtype, attention_bytes, workspace_bytes and kv_bytes_per_token of one rank. */
void planner_sglang_ledger(const config_model_t *model, plan_model_t *planned);
#endif
