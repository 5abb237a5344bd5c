/* SPDX-License-Identifier: MIT */
/* Monotonic time, injected so that a test can move it. */
#ifndef XPOOL_BASE_CLOCK_H
#define XPOOL_BASE_CLOCK_H

#include <stdint.h>
#include <time.h>

typedef struct xp_clock {
    uint64_t (*now_ns)(void *context);
    void *context;
} xp_clock_t;

static inline uint64_t xp_monotonic_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static inline uint64_t xp_clock_system_now(void *context)
{
    (void)context;
    return xp_monotonic_ns();
}

static inline xp_clock_t xp_clock_system(void)
{
    return (xp_clock_t){.now_ns = xp_clock_system_now, .context = 0};
}

static inline uint64_t xp_clock_now_ns(const xp_clock_t *clock)
{
    return clock->now_ns(clock->context);
}

#define XP_NS_PER_US 1000ull
#define XP_NS_PER_MS 1000000ull
#define XP_NS_PER_S  1000000000ull

#endif
