/* SPDX-License-Identifier: MIT */
/*
 * What a plan for GPUs has of its own: which devices go together, the ledger of GPU memory, the
 * Fabric plan's provider, delivery kinds and element types. Pure computation over configuration and
 * headers, but for the memory of a GPU that the configuration does not name (control/gpus.h).
 */
#ifndef XPOOL_CONTROL_PLANNER_CUDA_H
#define XPOOL_CONTROL_PLANNER_CUDA_H

#include "control/planner.h"
#include "model/checkpoint.h"

/* Taken off every FFN device: the driver's context, the code of all kernels, the library's own. */
#define PLANNER_CUDA_CONTEXT_BYTES (1024ull << 20)

/* All devices are CPUs or all are GPUs, the provider is one of theirs, and roles are shared only
 * where that is allowed. Fills result->cuda and the Fabric plan's provider. */
xp_status_t planner_check_devices(const config_t *config, plan_result_t *result);
/* The budgets of the devices: memory, less what is kept free. */
xp_status_t planner_budgets(const config_t *config, plan_result_t *result);

/* The attention side of one rank, and the bytes of the model's FFN shard on each member of its
 * group. `checkpoint` NULL: dummy weights. Needs planned->max_rows. */
xp_status_t planner_cuda_ledger(const config_t *config, const config_model_t *model,
                                const checkpoint_t *checkpoint, plan_model_t *planned,
                                uint64_t *ffn_bytes_out);
/* Provider nvshmem: adds the symmetric heap of the AtnAgents to the attention devices, for any
 * placement. */
xp_status_t planner_cuda_heap(const config_t *config, plan_result_t *result);
/* What an FFN device holds beside the weights, if every model were on it: before placement, so
 * never less than what placement then says. */
xp_status_t planner_cuda_workspace(const config_t *config, const plan_result_t *result,
                                   uint64_t *bytes_out);
/* Element types, delivery and provider in the Fabric plan; the stages of each FFN device. */
void planner_cuda_finish(const config_t *config, plan_result_t *result);
#endif
