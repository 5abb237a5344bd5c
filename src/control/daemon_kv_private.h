/* SPDX-License-Identifier: MIT */
/* The state that daemon_kv*.c share; the daemon's event loop thread owns it. */
#ifndef XPOOL_CONTROL_DAEMON_KV_PRIVATE_H
#define XPOOL_CONTROL_DAEMON_KV_PRIVATE_H

#include "control/daemon_kv.h"
#include "control/kv_record.h"
#include "kv/market.h"

typedef struct daemon_kv daemon_kv_t;

/* The process behind one partition. */
typedef struct daemon_kv_process {
    daemon_kv_t *kv;
    uint32_t partition;
    bool held; /* it may hold memory */
    int pidfd; /* -1: not held */
    struct event *on_end;
} daemon_kv_process_t;

struct daemon_kv {
    daemon_t *daemon;
    kv_channel_t *channel;
    int channel_fd, bell;
    int bells[KV_MAX_PARTITIONS];
    struct event *on_bell, *on_time;
    daemon_kv_process_t processes[KV_MAX_PARTITIONS];
    bool working, again;
    kv_record_ring_t records;
    kv_market_t market;
    kv_market_step_t step; /* here for its size */
};

xp_status_t daemon_kv_records_start(daemon_kv_t *kv);
void daemon_kv_records_stop(daemon_kv_t *kv);
xp_status_t daemon_kv_records_write(daemon_kv_t *kv, int *fd_out, uint64_t *bytes_out);
#endif
