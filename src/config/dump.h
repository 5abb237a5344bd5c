/* SPDX-License-Identifier: MIT */
/* Showing a resolved configuration: every value and where it came from. */
#ifndef XPOOL_CONFIG_DUMP_H
#define XPOOL_CONFIG_DUMP_H

#include "base/buf.h"
#include "config/config.h"

/* As TOML that can be loaded again; the origin of each value stands in a comment behind it. */
xp_status_t config_dump_toml(const config_t *config, xp_buf_t *text_out);
/* {"source", "digest", "values": {nested}, "origins": {"daemon.http": "default", ...}, "warnings"}.
 */
xp_status_t config_dump_json(const config_t *config, xp_buf_t *text_out);
/* The digest as 64 lower-case hex digits. */
void config_digest_hex(const config_t *config, char hex_out[65]);
#endif
