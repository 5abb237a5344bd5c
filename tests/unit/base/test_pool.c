/* SPDX-License-Identifier: MIT */
/* The pool: every member of every region exactly once, no lost wake-up, whatever the load. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <pthread.h>
#include <cmocka.h>

#include "base/clock.h"
#include "base/cpus.h"
#include "base/pool.h"

#define MOST 16

typedef struct region {
    uint32_t members;
    uint64_t values[MOST]; /* plain on purpose: the region's end must publish them */
    _Atomic uint32_t calls[MOST];
    uint64_t input;
    bool sleepy;
} region_t;

static void count_member(void *context, uint32_t member, uint32_t members)
{
    region_t *region = context;
    region->members = member == 0 ? members : region->members;
    region->values[member] += region->input * (member + 1);
    atomic_fetch_add(&region->calls[member], 1);
    if (region->sleepy && member % 2)
        nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
}

static void run_regions(uint32_t threads, uint32_t regions, uint32_t pause_every)
{
    xp_pool_t *pool = NULL;
    region_t region = {0};
    uint64_t sum = 0;
    assert_int_equal(xp_pool_create(threads, NULL, 0, &pool), XP_OK);
    assert_int_equal(xp_pool_threads(pool), threads);
    for (uint32_t i = 1; i <= regions; i++) {
        region.input = i;
        sum += i;
        xp_pool_run(pool, count_member, &region);
        assert_int_equal(region.members, threads);
        for (uint32_t m = 0; m < threads; m++) {
            assert_int_equal(atomic_load(&region.calls[m]), i);
            assert_int_equal(region.values[m], sum * (m + 1));
        }
        /* Pauses long enough for the workers to fall asleep, and short ones around that time. */
        if (pause_every && i % pause_every == 0)
            nanosleep(&(struct timespec){.tv_nsec = (long)(i % 7) * 30000}, NULL);
    }
    for (uint32_t m = threads; m < MOST; m++)
        assert_int_equal(atomic_load(&region.calls[m]), 0);
    xp_pool_destroy(pool);
}

static void test_every_member_once(void **state)
{
    (void)state;
    run_regions(1, 100, 0);
    run_regions(2, 20000, 0);
    run_regions(2, 2000, 1);
    run_regions(3, 3000, 5);
    run_regions(MOST, 500, 3); /* more threads than cores on most machines */
}

static void *burn(void *context)
{
    _Atomic bool *stop = context;
    volatile uint64_t x = 1;
    while (!atomic_load_explicit(stop, memory_order_relaxed))
        for (int i = 0; i < 1000; i++)
            x = x * 3 + 1;
    return NULL;
}

/* With every core taken by somebody else the pool must still come through, and quickly: late
 * workers' parts are run by the caller. */
static void test_busy_machine(void **state)
{
    (void)state;
    _Atomic bool stop = false;
    pthread_t burners[MOST];
    uint32_t count = xp_usable_cpus() < MOST ? xp_usable_cpus() : MOST;
    for (uint32_t i = 0; i < count; i++)
        assert_int_equal(pthread_create(&burners[i], NULL, burn, &stop), 0);
    uint64_t start = xp_monotonic_ns();
    run_regions(2, 200, 0);
    run_regions(4, 200, 0);
    uint64_t elapsed = xp_monotonic_ns() - start;
    atomic_store(&stop, true);
    for (uint32_t i = 0; i < count; i++)
        pthread_join(burners[i], NULL);
    /* A scheduler slice or so a region at the very worst. */
    assert_true(elapsed < 20 * XP_NS_PER_S);
}

static void test_slow_members(void **state)
{
    (void)state;
    xp_pool_t *pool = NULL;
    region_t region = {.sleepy = true, .input = 1};
    assert_int_equal(xp_pool_create(4, NULL, 0, &pool), XP_OK);
    for (uint32_t i = 1; i <= 50; i++) {
        xp_pool_run(pool, count_member, &region);
        for (uint32_t m = 0; m < 4; m++)
            assert_int_equal(atomic_load(&region.calls[m]), i);
    }
    xp_pool_destroy(pool);
}

static void test_pinning_and_bounds(void **state)
{
    (void)state;
    xp_pool_t *pool = NULL;
    assert_int_equal(xp_pool_create(0, NULL, 0, &pool), XP_INVALID);
    assert_int_equal(xp_pool_create(257, NULL, 0, &pool), XP_INVALID);
    assert_null(pool);
    xp_pool_destroy(NULL);
    const uint32_t cpus[] = {0, 99999}; /* one that exists, one that does not: best effort */
    assert_int_equal(xp_pool_create(4, cpus, 2, &pool), XP_OK);
    region_t region = {.input = 1};
    xp_pool_run(pool, count_member, &region);
    assert_int_equal(region.values[3], 4);
    xp_pool_destroy(pool);
    for (int i = 0; i < 50; i++) { /* created and destroyed without a region */
        assert_int_equal(xp_pool_create(3, NULL, 0, &pool), XP_OK);
        xp_pool_destroy(pool);
    }
}

static void write_file(const char *root, const char *folder, const char *file, const char *text)
{
    char path[512];
    snprintf(path, sizeof(path), "%s%s", root, folder);
    for (char *at = path + strlen(root); *at; at++)
        if (*at == '/' && at > path + strlen(root)) {
            *at = '\0';
            mkdir(path, 0755);
            *at = '/';
        }
    mkdir(path, 0755);
    snprintf(path, sizeof(path), "%s%s/%s", root, folder, file);
    FILE *out = fopen(path, "w");
    assert_non_null(out);
    fputs(text, out);
    fclose(out);
}

static void test_quota(void **state)
{
    (void)state;
    char root[] = "/tmp/xpool-cpus-XXXXXX", command[64];
    assert_non_null(mkdtemp(root));
    assert_int_equal(xp_cpus_quota("0::/a/b\n", root), 0);
    write_file(root, "/a/b", "cpu.max", "max 100000\n");
    assert_int_equal(xp_cpus_quota("0::/a/b\n", root), 0);
    write_file(root, "/a", "cpu.max", "350000 100000\n"); /* the parent limits, rounded up */
    assert_int_equal(xp_cpus_quota("0::/a/b\n", root), 4);
    write_file(root, "/a/b", "cpu.max", "150000 100000\n");
    assert_int_equal(xp_cpus_quota("0::/a/b\n", root), 2);
    assert_int_equal(xp_cpus_quota("0::/elsewhere/c\n", root), 0);
    write_file(root, "", "cpu.max", "50000 100000\n"); /* as a container sees its own root */
    assert_int_equal(xp_cpus_quota("0::/\n", root), 1);
    assert_int_equal(xp_cpus_quota("0::/../../x\n", root), 1);
    write_file(root, "/cpu,cpuacct/job", "cpu.cfs_quota_us", "250000\n");
    write_file(root, "/cpu,cpuacct/job", "cpu.cfs_period_us", "100000\n");
    assert_int_equal(xp_cpus_quota("5:memory:/job\n4:cpu,cpuacct:/job\n", root), 3);
    write_file(root, "/cpu,cpuacct/job", "cpu.cfs_quota_us", "-1\n");
    assert_int_equal(xp_cpus_quota("4:cpu,cpuacct:/job\n", root), 0);
    assert_int_equal(xp_cpus_quota("", root), 0);
    assert_int_equal(xp_cpus_quota("nonsense\n:\n::\n", root), 1); /* "::" is a version 2 line */
    snprintf(command, sizeof(command), "rm -r %s", root);
    assert_int_equal(system(command), 0);
    assert_true(xp_usable_cpus() >= 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_member_once),  cmocka_unit_test(test_busy_machine),
        cmocka_unit_test(test_slow_members),       cmocka_unit_test(test_quota),
        cmocka_unit_test(test_pinning_and_bounds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
