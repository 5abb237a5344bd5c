/* SPDX-License-Identifier: MIT */
/*
 * The team of threads behind xp_pool_run().
 *
 * A region is announced by raising `epoch`. Every member index has a slot; whoever moves the slot's
 * `claimed` from epoch-1 to epoch runs that index, exactly once. Workers claim their own slot; the
 * caller, when its own part is done, claims the slots of workers that have not come yet and runs
 * their parts itself. So a worker that the scheduler keeps waiting delays a region only if it was
 * taken off its core in the middle of its part, and a loaded machine degrades smoothly.
 *
 * Waiting is in three steps: a few pauses, then sched_yield() until a time limit, then a futex. A
 * yield that takes long means that another thread wanted the core: the pool then stops spinning for
 * the next CONTENDED_REGIONS regions.
 *
 * Memory order. `function` and `context` are plain fields: written before the release of `epoch`,
 * read after its acquire and a successful claim; the next write comes after the caller has seen
 * every claimed slot's `done` (acquire of the worker's release). Sleeping is the usual pair: the
 * sleeper raises its count and then checks the word, the waker changes the word and then checks the
 * count, all sequentially consistent, so one of the two sees the other; the kernel checks the word
 * once more under its own lock.
 */
#include "base/pool.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/clock.h"

#define POOL_MAX_THREADS 256
/* Longest spinning before the futex: longer than the other side of a layer takes, since waking an
 * idle core costs as much as a region of a small model. */
#define POOL_SPIN_NS (1000 * XP_NS_PER_US)
#define POOL_PAUSES  64 /* pauses before the first yield */
/* Our own other threads take a yielded core for less than this; a longer absence means that
 * somebody else wants it for a whole time slice. */
#define POOL_YIELD_CONTENDED   (1000 * XP_NS_PER_US)
#define POOL_CONTENDED_REGIONS 256

typedef struct pool_slot {
    _Alignas(64) _Atomic uint32_t claimed; /* last epoch whose part somebody took */
    _Atomic uint32_t done;                 /* last epoch whose part the worker finished; futex */
    _Atomic uint32_t awaited;              /* the caller sleeps on `done` */
    uint32_t member;
    struct xp_pool *pool;
    pthread_t thread;
} pool_slot_t;

struct xp_pool {
    _Alignas(64) _Atomic uint32_t epoch; /* futex of sleeping workers */
    _Atomic uint32_t sleepers;
    _Atomic bool stopping;
    xp_pool_function_t function;
    void *context;
    uint32_t threads;
    bool may_spin;                           /* the team fits the usable cores */
    _Alignas(64) _Atomic uint32_t contended; /* regions for which nobody spins */
    pool_slot_t *slots;                      /* [threads]; slot 0 is unused */
};

static void pool_futex_wait(_Atomic uint32_t *word, uint32_t value)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void pool_futex_wake(_Atomic uint32_t *word, int count)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
}

static inline void pool_pause(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Spins until the word differs from `value` or spinning is no longer worth it. */
static bool pool_spin(xp_pool_t *pool, _Atomic uint32_t *word, uint32_t value)
{
    if (!pool->may_spin || atomic_load_explicit(&pool->contended, memory_order_relaxed) > 0)
        return atomic_load_explicit(word, memory_order_acquire) != value;
    for (int i = 0; i < POOL_PAUSES; i++) {
        if (atomic_load_explicit(word, memory_order_acquire) != value)
            return true;
        pool_pause();
    }
    uint64_t start = xp_monotonic_ns(), before = start;
    while (before - start < POOL_SPIN_NS) {
        sched_yield();
        uint64_t after = xp_monotonic_ns();
        if (after - before > POOL_YIELD_CONTENDED) {
            atomic_store_explicit(&pool->contended, POOL_CONTENDED_REGIONS, memory_order_relaxed);
            return atomic_load_explicit(word, memory_order_acquire) != value;
        }
        for (int i = 0; i < 16; i++) {
            if (atomic_load_explicit(word, memory_order_acquire) != value)
                return true;
            pool_pause();
        }
        before = after;
    }
    return false;
}

static uint32_t pool_wait_epoch(xp_pool_t *pool, uint32_t seen)
{
    if (!pool_spin(pool, &pool->epoch, seen)) {
        atomic_fetch_add(&pool->sleepers, 1);
        while (atomic_load(&pool->epoch) == seen)
            pool_futex_wait(&pool->epoch, seen);
        atomic_fetch_sub(&pool->sleepers, 1);
    }
    return atomic_load_explicit(&pool->epoch, memory_order_acquire);
}

static bool pool_claim(pool_slot_t *slot, uint32_t epoch)
{
    uint32_t expected = epoch - 1;
    return atomic_compare_exchange_strong_explicit(&slot->claimed, &expected, epoch,
                                                   memory_order_acq_rel, memory_order_relaxed);
}

static void *pool_worker(void *argument)
{
    pool_slot_t *slot = argument;
    xp_pool_t *pool = slot->pool;
    uint32_t seen = 0;
    for (;;) {
        seen = pool_wait_epoch(pool, seen);
        /* The last epoch is announced with `stopping` set before it. */
        if (atomic_load_explicit(&pool->stopping, memory_order_relaxed))
            return NULL;
        if (!pool_claim(slot, seen))
            continue; /* too late: the caller took this part */
        pool->function(pool->context, slot->member, pool->threads);
        atomic_store(&slot->done, seen);
        if (atomic_exchange(&slot->awaited, 0))
            pool_futex_wake(&slot->done, 1);
    }
}

static void pool_announce(xp_pool_t *pool)
{
    atomic_fetch_add(&pool->epoch, 1);
    if (atomic_load(&pool->sleepers) > 0)
        pool_futex_wake(&pool->epoch, POOL_MAX_THREADS);
}

static void pool_await_slot(xp_pool_t *pool, pool_slot_t *slot, uint32_t epoch)
{
    for (;;) {
        uint32_t done = atomic_load_explicit(&slot->done, memory_order_acquire);
        if (done == epoch || pool_spin(pool, &slot->done, done))
            break;
        atomic_store(&slot->awaited, 1);
        if (atomic_load(&slot->done) == done)
            pool_futex_wait(&slot->done, done);
        atomic_store(&slot->awaited, 0);
    }
}

void xp_pool_run(xp_pool_t *pool, xp_pool_function_t function, void *context)
{
    if (pool->threads == 1) {
        function(context, 0, 1);
        return;
    }
    /* Only a hint, so a setting lost between this load and store does no harm. */
    uint32_t contended = atomic_load_explicit(&pool->contended, memory_order_relaxed);
    if (contended > 0)
        atomic_store_explicit(&pool->contended, contended - 1, memory_order_relaxed);
    pool->function = function;
    pool->context = context;
    uint32_t epoch = atomic_load_explicit(&pool->epoch, memory_order_relaxed) + 1;
    pool_announce(pool);
    function(context, 0, pool->threads);
    for (uint32_t member = 1; member < pool->threads; member++)
        if (pool_claim(&pool->slots[member], epoch)) {
            function(context, member, pool->threads);
            /* The slot counts as done, so that the next region starts from equal slots. */
            atomic_store_explicit(&pool->slots[member].done, epoch, memory_order_relaxed);
        }
    for (uint32_t member = 1; member < pool->threads; member++)
        pool_await_slot(pool, &pool->slots[member], epoch);
}

static void pool_pin(pthread_t thread, uint32_t cpu)
{
    /* Best effort: a CPU outside the process's mask leaves the thread where it may run. */
    cpu_set_t set;
    if (cpu >= CPU_SETSIZE)
        return;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_setaffinity_np(thread, sizeof(set), &set);
}

xp_status_t xp_pool_create(uint32_t threads, const uint32_t *cpus, uint32_t cpu_count,
                           xp_pool_t **pool_out)
{
    if (threads < 1 || threads > POOL_MAX_THREADS)
        return xp_fail(XP_INVALID, "a pool has 1 to %d threads, not %u", POOL_MAX_THREADS, threads);
    xp_status_t status = XP_OK;
    xp_pool_t *pool = aligned_alloc(64, sizeof(*pool));
    if (!pool)
        return xp_fail(XP_NO_MEMORY, "no memory for a pool of %u threads", threads);
    memset(pool, 0, sizeof(*pool));
    pool->threads = threads;
    pool->may_spin = threads <= xp_usable_cpus();
    pool->slots = aligned_alloc(64, threads * sizeof(pool_slot_t));
    if (!pool->slots) {
        free(pool);
        return xp_fail(XP_NO_MEMORY, "no memory for a pool of %u threads", threads);
    }
    memset(pool->slots, 0, threads * sizeof(pool_slot_t));
    uint32_t started = 1;
    for (; started < threads; started++) {
        pool_slot_t *slot = &pool->slots[started];
        slot->member = started;
        slot->pool = pool;
        int error = pthread_create(&slot->thread, NULL, pool_worker, slot);
        if (error) {
            errno = error;
            status = xp_fail_errno(XP_IO, "cannot start thread %u of %u", started + 1, threads);
            break;
        }
        if (cpus && cpu_count)
            pool_pin(slot->thread, cpus[started % cpu_count]);
    }
    if (status != XP_OK) {
        pool->threads = started;
        xp_pool_destroy(pool);
        return status;
    }
    *pool_out = pool;
    return XP_OK;
}

void xp_pool_destroy(xp_pool_t *pool)
{
    if (!pool)
        return;
    if (pool->threads > 1) {
        atomic_store_explicit(&pool->stopping, true, memory_order_relaxed);
        pool_announce(pool);
        for (uint32_t member = 1; member < pool->threads; member++)
            pthread_join(pool->slots[member].thread, NULL);
    }
    free(pool->slots);
    free(pool);
}

uint32_t xp_pool_threads(const xp_pool_t *pool)
{
    return pool->threads;
}
