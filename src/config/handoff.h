/* SPDX-License-Identifier: MIT */
/* Settings of the command line on their way to a program that this process becomes. */
#ifndef XPOOL_CONFIG_HANDOFF_H
#define XPOOL_CONFIG_HANDOFF_H

#include "base/buf.h"
#include "config/config.h"

#define CONFIG_HANDOFF_VARIABLE "XPOOL_SET"

/* Appends one KEY=VALUE a line. */
xp_status_t config_handoff_write(const config_overrides_t *overrides, xp_buf_t *text_out);
/* The settings of `text` (the variable's value, or NULL), followed by the process's own. The result
 * points into *memory_out (free() it after loading; may be NULL) and into `own`. */
xp_status_t config_handoff_read(const char *text, const config_overrides_t *own, char **memory_out,
                                config_overrides_t *merged_out);
#endif
