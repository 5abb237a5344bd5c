/* SPDX-License-Identifier: MIT */
/*
 * The KV market in the daemon: makes the control channel, hands it to the ranks, and steps
 * kv/market.h whenever a rank rings, an Instance comes or goes, or a time is due. Everything runs
 * on the daemon's event loop thread.
 */
#ifndef XPOOL_CONTROL_DAEMON_KV_H
#define XPOOL_CONTROL_DAEMON_KV_H

#include <event2/buffer.h>
#include <jansson.h>

#include "control/daemon_private.h"
#include "kv/channel.h"

xp_status_t daemon_kv_start(daemon_t *daemon);
void daemon_kv_stop(daemon_t *daemon); /* accepts a daemon that was not started */

/* False while a process of the former Instance still holds its memory. */
bool daemon_kv_vacant(daemon_t *daemon, uint32_t model);
/* Starts the rank's group when it is the first; fills what travels with Admitted. The descriptors
 * stay the market's. Not XP_OK: the end of the process cannot be watched; nothing has been done. */
xp_status_t daemon_kv_admit(daemon_t *daemon, uint32_t model, uint32_t rank, pid_t pid,
                            xpw_Admitted *admitted_out, int fds_out[KV_DESCRIPTORS]);
/* The rank is told to end (`gone` false) or its connection has closed: it takes no part any more.
 * Its bytes return when its process has ended, or has closed its partition of the channel. */
void daemon_kv_leave(daemon_t *daemon, uint32_t model, uint32_t rank, bool gone);

/* Reads what the ranks say now; before anything is shown. */
void daemon_kv_look(daemon_t *daemon);
void daemon_kv_ask(daemon_participant_t *client, const xpw_KvAsk *ask);
json_t *daemon_kv_json(const daemon_t *daemon);
/* What one model's groups hold together, for its entry in /v1/state. */
json_t *daemon_kv_model_json(const daemon_t *daemon, uint32_t model);
void daemon_kv_metrics(const daemon_t *daemon, struct evbuffer *out);
#endif
