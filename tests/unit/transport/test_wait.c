/* SPDX-License-Identifier: MIT */
/* Waiting on a bell: no wake-up is lost, deadlines hold, spinning follows what it is worth. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/pool.h"
#include "transport/wait.h"

#define ROUNDS 20000

typedef struct table {
    mailbox_bell_t bells[2];
    uint64_t balls[2];
    uint32_t spin_ns;
    uint64_t lost; /* waits that ended by their deadline although the bell had rung */
} table_t;

static table_t table;

static void play(uint32_t me, uint32_t spin_ns)
{
    transport_waiter_t waiter;
    transport_waiter_init(&waiter, spin_ns);
    for (uint64_t i = 1; i <= ROUNDS; i++) {
        if (me == 0) {
            PROTOCOL_STORE_RELEASE(&table.balls[0], i);
            transport_bell_ring(&table.bells[1]);
        }
        for (;;) {
            uint32_t seen = mailbox_bell_observe(&table.bells[me]);
            if (PROTOCOL_LOAD_ACQUIRE(&table.balls[1 - me]) >= i)
                break;
            uint64_t deadline_ns = xp_monotonic_ns() + 5 * XP_NS_PER_S;
            /* A sleep may also end early, by a ring that was meant for the wait before. */
            if (!transport_bell_wait(&waiter, &table.bells[me], seen, deadline_ns) &&
                xp_monotonic_ns() >= deadline_ns)
                table.lost++;
        }
        if (me == 1) {
            PROTOCOL_STORE_RELEASE(&table.balls[1], i);
            transport_bell_ring(&table.bells[0]);
        }
    }
}

static void *other_side(void *context)
{
    play(1, table.spin_ns);
    return context;
}

/* Two threads that hand a ball to each other; a lost wake-up would cost a deadline. */
static void test_no_lost_wakeup(void **state)
{
    static const uint32_t spins[] = {0, 1000, 50000};
    for (uint32_t i = 0; i < 3; i++) {
        pthread_t thread;
        table = (table_t){.spin_ns = spins[i]};
        assert_int_equal(pthread_create(&thread, NULL, other_side, NULL), 0);
        play(0, spins[i]);
        pthread_join(thread, NULL);
        assert_int_equal(table.lost, 0);
        assert_int_equal(table.bells[0].sleepers, 0);
        assert_int_equal(table.bells[1].sleepers, 0);
    }
}

static void test_deadline(void **state)
{
    mailbox_bell_t bell = {0};
    transport_waiter_t waiter;
    transport_waiter_init(&waiter, 50000);
    uint64_t start_ns = xp_monotonic_ns(), deadline_ns = start_ns + 20 * XP_NS_PER_MS;
    assert_false(transport_bell_wait(&waiter, &bell, 0, deadline_ns));
    assert_true(xp_monotonic_ns() >= deadline_ns);
    assert_false(transport_bell_wait(&waiter, &bell, 0, start_ns)); /* long past */
    assert_true(transport_bell_wait(&waiter, &bell, 7, start_ns));  /* has moved already */
    assert_int_equal(bell.sleepers, 0);
}

/* Spins that fail get shorter until there are none but the probe of every sixteenth wait. */
static void test_adapts(void **state)
{
    mailbox_bell_t bell = {0};
    transport_waiter_t waiter;
    transport_waiter_init(&waiter, 64000);
    if (waiter.limit_ns == 0) {
        assert_int_equal(xp_usable_cpus(), 1);
        skip();
    }
    assert_int_equal(waiter.spin_ns, 64000);
    uint32_t last = waiter.spin_ns;
    for (uint32_t i = 0; i < 10; i++) {
        assert_false(transport_bell_wait(&waiter, &bell, 0, xp_monotonic_ns() + 200000));
        /* On a loaded machine the waiter may have found that its core is wanted. */
        assert_true(waiter.spin_ns < last || waiter.spin_ns == 0 || waiter.hold);
        last = waiter.spin_ns;
    }
    assert_true(waiter.spin_ns == 0 || waiter.hold);
    assert_int_equal(waiter.sleeps, 10);
    assert_int_equal(waiter.spins, 0);
    /* With sleep only, the waiter never spins. */
    transport_waiter_init(&waiter, 0);
    for (uint32_t i = 0; i < 40; i++)
        assert_false(transport_bell_wait(&waiter, &bell, 0, xp_monotonic_ns() + 1000));
    assert_int_equal(waiter.spins, 0);
    assert_int_equal(waiter.sleeps, 40);
}

static void *compute(void *stop)
{
    volatile uint64_t work = 0;
    while (!__atomic_load_n((int *)stop, __ATOMIC_ACQUIRE))
        work++;
    return NULL;
}

/* Another thread that computes on this core: the waiter notices within a few waits and stops
 * spinning. */
static void test_gives_way(void **state)
{
    cpu_set_t before, one;
    assert_int_equal(sched_getaffinity(0, sizeof(before), &before), 0);
    int cpu = 0;
    while (!CPU_ISSET(cpu, &before))
        cpu++;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    assert_int_equal(sched_setaffinity(0, sizeof(one), &one), 0); /* inherited by the thread */
    mailbox_bell_t bell = {0};
    transport_waiter_t waiter;
    transport_waiter_init(&waiter, 1000000);
    if (waiter.limit_ns) {
        pthread_t thread;
        int stop = 0;
        assert_int_equal(pthread_create(&thread, NULL, compute, &stop), 0);
        uint32_t waits = 0;
        for (; waits < 500 && !waiter.hold; waits++)
            transport_bell_wait(&waiter, &bell, 0, xp_monotonic_ns() + 2000000);
        uint32_t hold = waiter.hold;
        assert_true(hold > 0);
        uint64_t spins = waiter.spins;
        transport_bell_wait(&waiter, &bell, 0, xp_monotonic_ns() + 1000);
        assert_int_equal(waiter.hold, hold - 1);
        assert_int_equal(waiter.spins, spins);
        __atomic_store_n(&stop, 1, __ATOMIC_RELEASE);
        pthread_join(thread, NULL);
    }
    assert_int_equal(sched_setaffinity(0, sizeof(before), &before), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_no_lost_wakeup),
        cmocka_unit_test(test_deadline),
        cmocka_unit_test(test_adapts),
        cmocka_unit_test(test_gives_way),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
