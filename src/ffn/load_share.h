/* SPDX-License-Identifier: MIT */
/*
 * What the readers of one shard share, whatever they load it into: which item is next, how far all
 * of them are, and the first error.
 */
#ifndef XPOOL_FFN_LOAD_SHARE_H
#define XPOOL_FFN_LOAD_SHARE_H

#include <pthread.h>
#include <stdatomic.h>

#include "ffn/ffn.h"

typedef struct load_share {
    const ffn_install_t *install;
    uint64_t total_bytes;
    _Atomic size_t next; /* next item nobody has taken */
    _Atomic uint64_t done_bytes;
    _Atomic bool failed;
    pthread_mutex_t error_lock;
    xp_error_t error; /* the first one; statuses are recorded by thread */
} load_share_t;

#define LOAD_SHARE(wanted, bytes)                                                                  \
    {                                                                                              \
        .install = (wanted), .total_bytes = (bytes), .error_lock = PTHREAD_MUTEX_INITIALIZER       \
    }

/* This thread's last error ends the loading; others stop at their next item. */
void load_share_fail(load_share_t *share, xp_status_t status);
void load_share_report(load_share_t *share, uint64_t bytes); /* so many more are done */
/* Once all readers have ended: XP_OK, or the first error, recorded for the caller's thread. */
xp_status_t load_share_status(load_share_t *share);

/* XP_INVALID: no place for it among `most`, one that `held_id` has already (or NULL), or no shard.
 */
xp_status_t load_check_install(const ffn_install_t *install, uint32_t most, const char *held_id);
#endif
