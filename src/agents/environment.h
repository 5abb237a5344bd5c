/* SPDX-License-Identifier: MIT */
/* The environment in which another engine's process finds CrossPool: configuration, plugin,
 * devices. Changes this process's own environment, for an exec that follows. One thread. */
#ifndef XPOOL_AGENTS_ENVIRONMENT_H
#define XPOOL_AGENTS_ENVIRONMENT_H

#include "config/config.h"

/* What the user has set stays, but for XPOOL_CONFIG, XPOOL_SET and XPOOL_MODEL_ID, which say what
 * is in force here. `overrides`: the command line's settings. `model` may be NULL: not known. */
xp_status_t environment_prepare(const config_t *config, const config_overrides_t *overrides,
                                const config_model_t *model);

/* For an agent of a GPU, before it loads the driver: order and visibility of devices, MPS where an
 * attention device is concerned. `ordinal_out`: the device's number in this process. */
xp_status_t environment_agent(const config_t *config, const config_device_t *device, bool ffn_role,
                              int *ordinal_out);
#endif
