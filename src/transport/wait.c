/* SPDX-License-Identifier: MIT */
/*
 * Bounded spinning before a futex wait. Runs on the waiting thread; holds no state but the
 * waiter's. Never sleeps without having declared itself a sleeper, never spins longer than the
 * waiter's limit.
 */
#include "transport/wait.h"

#include <sched.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/futex.h"
#include "base/pool.h"

/* Pauses between two looks at the clock. A look costs about 20 ns, a pause 10 to 50. */
#define WAIT_PAUSES_PER_ROUND 16
/* The first part of a spin keeps the core; after it each round offers the core to others. */
#define WAIT_YIELD_AFTER_NS 1000u
/* Other waiters that spin, and the short computations of our own threads, take a yielded core for
 * less than this; a longer absence means that something else wants the core for a whole time slice.
 */
#define WAIT_CONTENDED_YIELD_NS 1000000u
/* After such an absence so many waits go straight to the futex: a woken thread is scheduled before
 * one that computes, one that has given way only after it. */
#define WAIT_HOLD 256
/* Below this a spin is not worth its clock reads. */
#define WAIT_SPIN_FLOOR_NS 500u
/* Every so many sleeps in turn one full spin finds out whether waits have become short. */
#define WAIT_PROBE_PERIOD 16

static inline void cpu_pause(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Spinning needs a second core for the one that is waited for. A process that is pinned to one core
 * of several has that; one whose machine or quota is a single core has not. */
static bool wait_may_spin(void)
{
    cpu_set_t allowed;
    if (xp_usable_cpus() > 1)
        return true;
    bool pinned = sched_getaffinity(0, sizeof(allowed), &allowed) == 0 && CPU_COUNT(&allowed) == 1;
    return pinned && sysconf(_SC_NPROCESSORS_ONLN) > 1;
}

void transport_waiter_init(transport_waiter_t *waiter, uint32_t spin_ns)
{
    uint32_t limit = wait_may_spin() ? spin_ns : 0;
    *waiter = (transport_waiter_t){.limit_ns = limit, .spin_ns = limit};
}

void transport_bell_ring(mailbox_bell_t *bell)
{
    if (mailbox_bell_ring(bell))
        xp_futex_wake_all(&bell->counter);
}

/* True when the bell moved. Sets *contended_out when another thread kept the core that was offered.
 */
static bool bell_spin(const mailbox_bell_t *bell, uint32_t seen, uint64_t start_ns,
                      uint64_t until_ns, bool *contended_out)
{
    for (;;) {
        for (int i = 0; i < WAIT_PAUSES_PER_ROUND; i++) {
            if (mailbox_bell_observe(bell) != seen)
                return true;
            cpu_pause();
        }
        uint64_t now_ns = xp_monotonic_ns();
        if (now_ns >= until_ns)
            return false;
        if (now_ns - start_ns < WAIT_YIELD_AFTER_NS)
            continue;
        sched_yield();
        if (xp_monotonic_ns() - now_ns > WAIT_CONTENDED_YIELD_NS) {
            *contended_out = true;
            return mailbox_bell_observe(bell) != seen;
        }
    }
}

/* What the next wait spins: nothing for a while when cores are short, the limit after a success,
 * half after a failure. */
static void waiter_learn(transport_waiter_t *waiter, bool spun, bool contended)
{
    if (contended)
        waiter->hold = WAIT_HOLD;
    else if (spun)
        waiter->spin_ns = waiter->limit_ns;
    else
        waiter->spin_ns /= 2;
    if (waiter->spin_ns < WAIT_SPIN_FLOOR_NS)
        waiter->spin_ns = 0;
}

bool transport_bell_wait(transport_waiter_t *waiter, mailbox_bell_t *bell, uint32_t seen,
                         uint64_t deadline_ns)
{
    if (mailbox_bell_observe(bell) != seen)
        return true;
    uint64_t start_ns = xp_monotonic_ns();
    bool moved = false;
    if (waiter->hold) {
        waiter->hold--;
    } else if (waiter->limit_ns) {
        bool contended = false;
        uint32_t spin_ns = waiter->spin_ns;
        /* A sleep hides how short the wait could have been, so now and then a full spin probes it.
         */
        if (waiter->sleeps_in_turn % WAIT_PROBE_PERIOD == WAIT_PROBE_PERIOD - 1)
            spin_ns = waiter->limit_ns;
        if (spin_ns) {
            uint64_t until_ns = start_ns + spin_ns;
            moved = bell_spin(bell, seen, start_ns, until_ns < deadline_ns ? until_ns : deadline_ns,
                              &contended);
            waiter_learn(waiter, moved, contended);
        }
    }
    if (moved) {
        waiter->spins++;
        waiter->sleeps_in_turn = 0;
    } else {
        waiter->sleeps++;
        waiter->sleeps_in_turn++;
        if (mailbox_bell_sleep(bell, seen))
            xp_futex_wait(&bell->counter, seen, deadline_ns);
        mailbox_bell_awake(bell);
        moved = mailbox_bell_observe(bell) != seen;
    }
    waiter->wait_ns += xp_monotonic_ns() - start_ns;
    return moved;
}
