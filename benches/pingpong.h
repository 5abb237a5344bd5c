/* SPDX-License-Identifier: MIT */
/*
 * What the CPU benchmarks share: a core for each role, percentiles, and the floor: a word passed to
 * and fro between two processes, spinning or over futex wakes. Included by one C file a program.
 */
#ifndef BENCHES_PINGPONG_H
#define BENCHES_PINGPONG_H

#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/futex.h"
#include "base/process.h"
#include "base/status.h"

#define BENCH_WARM_UP 2000
#define BENCH_END_NS  (10 * XP_NS_PER_S)
#define BENCH_PASS_NS (10 * XP_NS_PER_S)
#define BENCH_LOOKS   (1u << 20)

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s: %s failed (line %d): %s\n", __FILE__, #condition, __LINE__,       \
                    xp_error_last()->text);                                                        \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static cpu_set_t all_cpus;

/* The n-th allowed CPU, when there are enough for `roles` to have one each. */
static void bench_pin(uint32_t n, uint32_t roles)
{
    cpu_set_t one;
    CPU_ZERO(&one);
    if ((uint32_t)CPU_COUNT(&all_cpus) < roles)
        return;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, &all_cpus) && n-- == 0) {
            CPU_SET(cpu, &one);
            sched_setaffinity(0, sizeof(one), &one);
            return;
        }
}

static void bench_unpin(void)
{
    sched_setaffinity(0, sizeof(all_cpus), &all_cpus);
}

static pid_t bench_fork(uint32_t cpu, uint32_t roles)
{
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        bench_pin(cpu, roles);
    }
    return pid;
}

static int compare_ns(const void *a, const void *b)
{
    uint64_t left = *(const uint64_t *)a, right = *(const uint64_t *)b;
    return left < right ? -1 : left > right;
}

typedef struct bench_times {
    double p50_us, p99_us;
} bench_times_t;

static bench_times_t bench_summary(uint64_t *samples, uint32_t count)
{
    qsort(samples, count, sizeof(samples[0]), compare_ns);
    return (bench_times_t){(double)samples[count / 2] / 1e3,
                           (double)samples[count - 1 - count / 100] / 1e3};
}

/* ---- raw ping-pong -------------------------------------------------------------------------- */
typedef struct bench_ball {
    uint32_t ping, pad0[31], pong, pad1[31];
} bench_ball_t;

static void raw_pass(uint32_t *mine, const uint32_t *theirs, uint32_t value, bool sleeping)
{
    if (mine) {
        __atomic_store_n(mine, value, __ATOMIC_SEQ_CST);
        if (sleeping)
            xp_futex_wake(mine, 1);
    }
    uint64_t until_ns = sleeping ? xp_monotonic_ns() + BENCH_PASS_NS : 0;
    for (uint64_t looks = 1; theirs && __atomic_load_n(theirs, __ATOMIC_ACQUIRE) != value;
         looks++) {
        if (sleeping)
            xp_futex_wait(theirs, value - 1, until_ns);
        else
            __builtin_ia32_pause();
        /* A spinner looks at the clock too seldom to be slower for it. */
        if (!sleeping && looks % BENCH_LOOKS == 0 && !until_ns)
            until_ns = xp_monotonic_ns() + BENCH_PASS_NS;
        CHECK((!sleeping && looks % BENCH_LOOKS) || xp_monotonic_ns() < until_ns);
    }
}

/* A child that has nothing more to do; killed, and a failure, when it does not end. */
static inline void bench_reap(pid_t child)
{
    int wait_status = 0;
    if (child > 0)
        CHECK(xp_child_reap(child, xp_monotonic_ns() + BENCH_END_NS, &wait_status) == XP_OK);
}

/* Round trip between two processes with a core each, or placed by the kernel, which may wake a
 * sleeper on the core of its waker. */
static bench_times_t raw_ping_pong(bool sleeping, bool pinned, uint64_t *samples, uint32_t count)
{
    uint32_t roles = pinned ? 2 : UINT32_MAX;
    bench_ball_t *ball =
        mmap(NULL, sizeof(*ball), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(ball != MAP_FAILED);
    pid_t peer = bench_fork(1, roles);
    if (peer == 0) {
        for (uint32_t i = 1; i <= BENCH_WARM_UP + count; i++) {
            raw_pass(NULL, &ball->ping, i, sleeping);
            raw_pass(&ball->pong, NULL, i, sleeping);
        }
        _exit(0);
    }
    bench_pin(0, roles);
    for (uint32_t i = 1; i <= BENCH_WARM_UP + count; i++) {
        uint64_t start_ns = xp_monotonic_ns();
        raw_pass(&ball->ping, &ball->pong, i, sleeping);
        if (i > BENCH_WARM_UP)
            samples[i - BENCH_WARM_UP - 1] = xp_monotonic_ns() - start_ns;
    }
    bench_reap(peer);
    bench_unpin();
    munmap(ball, sizeof(*ball));
    return bench_summary(samples, count);
}
#endif
