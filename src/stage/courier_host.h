/* SPDX-License-Identifier: MIT */
/* The host side of the courier (stage/courier.h): its routes, its kernel, its orders. One thread.
 */
#ifndef XPOOL_STAGE_COURIER_HOST_H
#define XPOOL_STAGE_COURIER_HOST_H

#include "stage/control.h"
#include "stage/courier.h"
#include "stage/heap.h"

typedef struct stage_courier stage_courier_t;

/* Takes device memory and loads the plug-in's code; the arguments outlive the object. life: NULL
 * where no MPS is used. */
xp_status_t stage_courier_create(const cuda_device_t *device, stage_control_t *control,
                                 stage_heap_t *heap, const transport_cuda_life_t *life,
                                 stage_courier_t **courier_out);
/* Before launch. XP_UNSUPPORTED past STAGE_ROUTES_MAX. */
xp_status_t stage_courier_add(stage_courier_t *courier, const stage_route_t *route);
xp_status_t stage_courier_launch(stage_courier_t *courier);
/* The routes of an Instance begin (their words are clear), or end: what they sent has arrived then.
 * XP_TIMEOUT: it does not answer. */
xp_status_t stage_courier_order(stage_courier_t *courier, uint32_t instance, bool attach,
                                uint64_t deadline_ns);
xp_status_t stage_courier_stop(stage_courier_t *courier, uint64_t deadline_ns);
void stage_courier_destroy(stage_courier_t *courier); /* stops within a second; accepts NULL */
#endif
