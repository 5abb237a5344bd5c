/* SPDX-License-Identifier: MIT */
/* What both kinds of backing share: the sizes, and the calls that differ. */
#ifndef XPOOL_KV_BACKING_PRIVATE_H
#define XPOOL_KV_BACKING_PRIVATE_H

#include <stdbool.h>

#include "kv/backing.h"

typedef struct kv_backing_kind {
    xp_status_t (*grow)(kv_backing_t *backing, uint32_t bundles);
    xp_status_t (*shrink)(kv_backing_t *backing, uint32_t bundles);
    bool (*prepare)(kv_backing_t *backing);
    void (*trim)(kv_backing_t *backing);
    void (*destroy)(kv_backing_t *backing);
} kv_backing_kind_t;

struct kv_backing {
    const kv_backing_kind_t *kind;
    uint64_t address, reserved_bytes, bundle_bytes, extra_bytes; /* extra: ready, not mapped */
    uint32_t ceiling, mapped;
    int fd;
};

/* Checks the sizes that both kinds have; bytes_out: of all bundles. */
xp_status_t kv_backing_measure(const kv_backing_options_t *options, uint64_t *bytes_out);
#endif
