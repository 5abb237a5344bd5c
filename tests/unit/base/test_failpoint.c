/* SPDX-License-Identifier: MIT */
/* Failpoints: nothing without the environment, death or delay at the named passage with it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/failpoint.h"

/* Passes "test.here" until it dies, at most ten times, in a process of its own. Returns how often
 * it came through, and the signal that ended it. */
static int passages(const char *given, int *signal_out, uint64_t *took_ns_out)
{
    int ends[2], status, count = 0;
    char byte;
    assert_int_equal(pipe(ends), 0);
    uint64_t began = xp_monotonic_ns();
    pid_t child = fork();
    if (child == 0) {
        if (given)
            setenv("XPOOL_FAILPOINTS", given, 1);
        else
            unsetenv("XPOOL_FAILPOINTS");
        for (int i = 0; i < 10; i++) {
            xp_failpoint("test.elsewhere");
            xp_failpoint("test.here");
            if (write(ends[1], "x", 1) != 1)
                _exit(2);
        }
        _exit(0);
    }
    close(ends[1]);
    while (read(ends[0], &byte, 1) == 1)
        count++;
    close(ends[0]);
    assert_int_equal(waitpid(child, &status, 0), child);
    *took_ns_out = xp_monotonic_ns() - began;
    *signal_out = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    return count;
}

static void only_what_is_named_happens(void **state)
{
    (void)state;
    int by;
    uint64_t took;
    assert_int_equal(passages(NULL, &by, &took), 10);
    assert_int_equal(by, 0);
    assert_int_equal(passages("", &by, &took), 10);
    assert_int_equal(passages("test.her=kill", &by, &took), 10);
    assert_int_equal(passages("test.here=kill", &by, &took), 0);
    assert_int_equal(by, SIGKILL);
    assert_int_equal(passages("test.other=kill,test.here=kill@4", &by, &took), 3);
    assert_int_equal(by, SIGKILL);
    assert_int_equal(passages("test.here=sleep:30@2", &by, &took), 10);
    assert_true(took >= 30 * XP_NS_PER_MS);
    assert_int_equal(passages("test.here=sleep:4", &by, &took), 10);
    assert_true(took >= 40 * XP_NS_PER_MS);
}

static void what_makes_no_sense_arms_nothing(void **state)
{
    (void)state;
    const char *const mistakes[] = {
        "test.here",         "test.here=",          "test.here=die",
        "test.here=kill@",   "test.here=kill@0",    "test.here=sleep",
        "test.here=sleep:0", "test.here=sleep:9ms", "test.here=kill@1x"};
    for (size_t i = 0; i < sizeof(mistakes) / sizeof(mistakes[0]); i++) {
        int by;
        uint64_t took;
        assert_int_equal(passages(mistakes[i], &by, &took), 10);
        assert_int_equal(by, 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(only_what_is_named_happens),
        cmocka_unit_test(what_makes_no_sense_arms_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
