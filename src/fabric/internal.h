/* SPDX-License-Identifier: MIT */
/* Private to src/fabric: the joined Fabric as its services see it. */
#ifndef XPOOL_FABRIC_INTERNAL_H
#define XPOOL_FABRIC_INTERNAL_H

#include "fabric/provider.h"

/* Services look around at least this often while they sleep: the backstop for a PE that dies
 * between publishing and ringing, the grain of timeouts, and the bound on leaving after failure or
 * shutdown. */
#define FABRIC_TICK_NS (50 * XP_NS_PER_MS)
/* A service that did not look around for longer was stopped or busy itself: that time is not held
 * against those it waits for. */
#define FABRIC_GAP_NS (500 * XP_NS_PER_MS)

/* Index of a counter in fabric_pe_record_t; the order of fabric_pe_counters_t. */
typedef enum fabric_counter {
    FABRIC_COUNT_SUBMISSIONS = 0,
    FABRIC_COUNT_INVOCATIONS,
    FABRIC_COUNT_ROWS,
    FABRIC_COUNT_EAGER,
    FABRIC_COUNT_LONGFORM,
    FABRIC_COUNT_ABANDONED,
    FABRIC_COUNT_BUSY_NS,
    FABRIC_COUNT_QUEUE_NS,
    FABRIC_COUNT_SLEEPS,
    FABRIC_COUNT_SPINS,
    FABRIC_COUNT_LANES_LEASED,
    FABRIC_COUNT_LANES_PEAK,
    FABRIC_COUNT_LANES_IN_USE,
    FABRIC_COUNT_COUNT
} fabric_counter_t;

struct fabric {
    fabric_provider_t *provider;
    fabric_layout_t layout;
    uint32_t pe; /* or FABRIC_PE_OBSERVER */
    fabric_plan_t plan;
};

/* A record's first word. acquire: pairs with the release store of the provider's publish. */
static inline uint64_t fabric_word(const fabric_t *fabric, uint64_t offset)
{
    return PROTOCOL_LOAD_ACQUIRE((const uint64_t *)(const void *)(fabric->provider->base + offset));
}

/* Copies a record after fabric_word has shown its sequence: each 8-byte word is loaded once. */
static inline void fabric_record_load(const fabric_t *fabric, uint64_t offset, size_t bytes,
                                      void *record_out)
{
    const uint64_t *from = (const uint64_t *)(const void *)(fabric->provider->base + offset);
    uint64_t *to = record_out;
    for (size_t i = 0; i < bytes / sizeof(uint64_t); i++)
        to[i] = PROTOCOL_LOAD_RELAXED(&from[i]);
}

static inline void fabric_publish(fabric_t *fabric, uint32_t targets, uint64_t offset,
                                  const void *record, size_t bytes)
{
    fabric->provider->ops->publish(fabric->provider, targets, offset, record, bytes);
}

static inline void fabric_signal(fabric_t *fabric, uint32_t targets)
{
    fabric->provider->ops->signal(fabric->provider, targets);
}

static inline void *fabric_local(const fabric_t *fabric, uint64_t offset)
{
    return fabric->provider->base + offset;
}

/* One look of the AtnAgent's loop over its inbox and slots, without waiting: for tests and
 * benchmarks that drive it by hand. */
xp_status_t fabric_atn_look(fabric_atn_t *atn, bool *moved_out);

/* Adds to a counter of this PE. */
void fabric_count(fabric_t *fabric, fabric_counter_t counter, uint64_t amount);
void fabric_count_set(fabric_t *fabric, fabric_counter_t counter, uint64_t value);
void fabric_count_instance(fabric_t *fabric, uint32_t instance, uint64_t rows);

void fabric_set_state(fabric_t *fabric, fabric_pe_state_t state);
fabric_pe_state_t fabric_get_state(const fabric_t *fabric, uint32_t pe);
bool fabric_is_shutdown(const fabric_t *fabric);
bool fabric_has_failed(const fabric_t *fabric);

/* out[elements] = the sum of a Lane's partials in PE order, in FP32, from `first` bytes into each.
 */
void fabric_reduce(const fabric_t *fabric, uint32_t lane, uint32_t members, uint64_t first,
                   uint64_t elements, float *out);

/* Makes `format` the canonical failure (if it is the first) and returns XP_FATAL with the canonical
 * text recorded. */
xp_status_t fabric_fail_now(fabric_t *fabric, const char *format, ...)
    __attribute__((format(printf, 2, 3), cold));
#endif
