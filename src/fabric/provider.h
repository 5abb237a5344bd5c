/* SPDX-License-Identifier: MIT */
/*
 * What carries the Fabric: a table of operations over memory that every PE has under the same
 * offsets. Coordinator and services are written over this table only, so that a provider brings its
 * own way of moving bytes and ringing, and nothing else. tests/integration/fabric/ is the
 * conformance suite that each provider passes.
 *
 * Reading is always local: base + offset is this PE's own copy of what others put and published to
 * it. `targets` is a set of PE bits. All operations are non-blocking but wait, and allocate nothing
 * after map. They are called by the service thread, except fail, shutdown and signal: any thread.
 */
#ifndef XPOOL_FABRIC_PROVIDER_H
#define XPOOL_FABRIC_PROVIDER_H

#include <stdbool.h>
#include <stddef.h>

#include "fabric/fabric.h"
#include "fabric/records.h"
#include "transport/wait.h"

typedef struct fabric_provider fabric_provider_t;

typedef struct fabric_provider_ops {
    const char *name;
    xp_status_t (*bytes)(const fabric_plan_t *plan, uint64_t *bytes_out);
    xp_status_t (*make)(const fabric_plan_t *plan, fabric_descriptors_t *descriptors_out);
    xp_status_t (*map)(const fabric_plan_t *plan, const fabric_descriptors_t *descriptors,
                       uint32_t pe, fabric_provider_t **provider_out);
    void (*unmap)(fabric_provider_t *provider);

    /* Copies payload rows to `offset` of all targets. */
    void (*put)(fabric_provider_t *provider, uint32_t targets, uint64_t offset, const void *source,
                size_t bytes);
    /* Where this PE may write payload in place for all targets, or NULL: compute elsewhere and put.
     */
    void *(*direct)(fabric_provider_t *provider, uint32_t targets, uint64_t offset);
    /* Publishes a record (its first word last, with release). Payload that this PE has put or
     * written in place before, to whichever target, is visible to whoever has seen the record or
     * one that was published because of it. `bytes` is a multiple of 8. */
    void (*publish)(fabric_provider_t *provider, uint32_t targets, uint64_t offset,
                    const void *record, size_t bytes);
    /* Rings the targets' doorbells. */
    void (*signal)(fabric_provider_t *provider, uint32_t targets);
    /* Own doorbell: observe before looking, wait after looking in vain. */
    uint32_t (*observe)(const fabric_provider_t *provider);
    bool (*wait)(fabric_provider_t *provider, transport_waiter_t *waiter, uint32_t seen,
                 uint64_t deadline_ns);
    /* Claims the failure word for all PEs; true for the first. Then everyone is signalled. */
    bool (*fail)(fabric_provider_t *provider, uint32_t pe, const char *text);
    void (*shutdown)(fabric_provider_t *provider);
} fabric_provider_ops_t;

struct fabric_provider {
    const fabric_provider_ops_t *ops;
    char *base; /* this PE's copy of the Fabric arena; begins with fabric_header_t */
};

extern const fabric_provider_ops_t fabric_shm_ops;
/* NULL when there is none of that name. */
const fabric_provider_ops_t *fabric_provider_find(const char *name);
#endif
