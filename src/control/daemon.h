/* SPDX-License-Identifier: MIT */
/*
 * The daemon: host-only control plane. One event loop thread owns all of it: registration, the
 * Generation and its states, the canonical failure, leases of Transport arenas, verdicts, HTTP.
 */
#ifndef XPOOL_CONTROL_DAEMON_H
#define XPOOL_CONTROL_DAEMON_H

#include "config/config.h"

/* Serves until stopped. Returns the exit code: 0 after an ordered end in which every participant
 * ended by itself, 1 after a canonical failure, a start that failed or an end that needed force. */
int daemon_run(const config_t *config);
#endif
