/* SPDX-License-Identifier: MIT */
/* Addresses as the configuration writes them, taken apart for those who listen or connect. */
#ifndef XPOOL_CONFIG_ADDRESS_H
#define XPOOL_CONFIG_ADDRESS_H

#include <stdint.h>

#include "base/status.h"

#define CONFIG_MAX_HOST 64

/* "HOST:PORT" as config_t has it. The brackets of an IPv6 address belong to the notation and not to
 * the host: "[::1]:8000" gives "::1" and 8000. XP_INVALID for what is no such address. */
xp_status_t config_address_split(const char *address, char host_out[CONFIG_MAX_HOST],
                                 uint16_t *port_out);
#endif
