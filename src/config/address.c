/* SPDX-License-Identifier: MIT */
/*
 * Takes HOST:PORT apart. Pure functions for any thread; they resolve no name and open no socket.
 */
#include "config/address.h"

#include <stdlib.h>
#include <string.h>

#include "config/resolve.h"

xp_status_t config_address_split(const char *address, char host_out[CONFIG_MAX_HOST],
                                 uint16_t *port_out)
{
    /* What the registry accepts has its last colon before the port, and fits. */
    if (!config_address_valid(address))
        return xp_fail(XP_INVALID, "\"%.100s\" is no HOST:PORT", address);
    const char *colon = strrchr(address, ':');
    size_t length = (size_t)(colon - address);
    if (address[0] == '[') {
        address++;
        length -= 2;
    }
    memcpy(host_out, address, length);
    host_out[length] = '\0';
    *port_out = (uint16_t)atoi(colon + 1);
    return XP_OK;
}
