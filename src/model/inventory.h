/* SPDX-License-Identifier: MIT */
/*
 * Every tensor a model of a given spec consists of, under its Hugging Face name: what a checkpoint
 * must hold, what `model inspect` checks and what `model synth` writes.
 */
#ifndef XPOOL_MODEL_INVENTORY_H
#define XPOOL_MODEL_INVENTORY_H

#include <stdint.h>

#include "base/status.h"
#include "model/spec.h"

typedef enum inventory_role {
    INVENTORY_EMBEDDING = 0, /* [vocab, hidden] */
    INVENTORY_NORM,          /* vectors near one */
    INVENTORY_LINEAR,        /* [out, in], lm_head and router too */
    INVENTORY_BIAS,          /* [out] */
    INVENTORY_CORRECTION,    /* [experts], always F32 */
} inventory_role_t;

typedef struct inventory_tensor {
    const char *name; /* valid during the visit */
    inventory_role_t role;
    uint32_t dimensions; /* 1 or 2 */
    uint64_t shape[2];
} inventory_tensor_t;

typedef xp_status_t (*inventory_visit_t)(void *context, const inventory_tensor_t *tensor);

/* Visits in the model's own order; stops at the first status other than XP_OK and returns it. */
xp_status_t model_inventory_visit(const model_spec_t *spec, inventory_visit_t visit, void *context);
#endif
