/* SPDX-License-Identifier: MIT */
/* What an FfnAgent has more with provider nvshmem-far. Private to this module; ffn.c's thread. */
#ifndef XPOOL_STAGE_FFN_FAR_H
#define XPOOL_STAGE_FFN_FAR_H

#include "stage/courier_host.h"

typedef struct stage_far {
    const fabric_plan_t *plan;
    const stage_heap_t *heap;
    stage_courier_t *courier; /* NULL: other PEs' memory is mapped */
    uint32_t ffn;
} stage_far_t;

/* In place of the relay arena of a rank; of the partials of another first member. */
cuda_address_t stage_far_outbox(const stage_far_t *far, uint32_t instance, uint32_t rank);
cuda_address_t stage_far_mirror(const stage_far_t *far, uint32_t instance, uint32_t first);
/* Gives the courier the ways of an Instance, before it is launched. */
xp_status_t stage_far_routes(const stage_far_t *far, uint32_t instance);
/* No words of an earlier Instance in outboxes and mirrors. */
xp_status_t stage_far_clear(const stage_far_t *far, stage_control_t *control, uint32_t instance,
                            uint64_t deadline_ns);
#endif
