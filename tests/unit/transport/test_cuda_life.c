/* SPDX-License-Identifier: MIT */
/* Life words and the thread that watches processes, with real processes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/memfd.h"
#include "transport/cuda_life.h"

static uint32_t dead[LIFE_WORDS];
static void on_death(void *context, uint32_t index)
{
    assert_ptr_equal(context, dead);
    __atomic_fetch_add(&dead[index], 1, __ATOMIC_RELEASE);
}

static pid_t sleeper(int *pidfd)
{
    pid_t parent = getpid(), pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent)
            _exit(1);
        for (;;)
            pause();
    }
    *pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
    assert_true(*pidfd >= 0);
    return pid;
}

static bool await_word(const life_page_t *page, uint32_t index)
{
    uint64_t deadline_ns = xp_monotonic_ns() + 5 * XP_NS_PER_S;
    while (!life_word_look(&page->word[index]))
        if (xp_monotonic_ns() > deadline_ns)
            return false;
    return true;
}

static void test_words(void **state)
{
    int fd, other;
    life_page_t *page, *same;
    assert_int_equal(transport_life_make(&fd), XP_OK);
    assert_int_equal(transport_life_map(fd, &page), XP_OK);
    assert_int_equal(transport_life_map(fd, &same), XP_OK);
    assert_int_equal(life_word_look(&page->word[3]), 0);
    assert_int_equal(life_word_end(&page->word[3]), 1);
    assert_int_equal(life_word_end(&same->word[3]), 0);
    assert_int_equal(life_word_look(&same->word[3]), LIFE_ENDED);
    assert_int_equal(life_word_look(&page->word[2]), 0);
    transport_life_renew(page, 3);
    assert_int_equal(life_word_look(&page->word[3]), 0);
    page->abi++;
    assert_int_equal(transport_life_map(fd, &same), XP_PEER);
    xp_memfd_unmap(page);
    xp_memfd_unmap(same);
    close(fd);
    assert_int_equal(xp_memfd_create("other", 8192, &other), XP_OK);
    assert_int_equal(transport_life_map(other, &page), XP_PEER);
    close(other);
    assert_int_equal(transport_life_map(-1, &page), XP_PEER);
}

/* A process that holds word 7 and sleeps, or ends the way it is told. */
static pid_t holder(int life_fd, int ready_fd, const char *end)
{
    pid_t parent = getpid(), pid = fork();
    if (pid != 0)
        return pid;
    life_page_t *page;
    transport_life_hold_t *hold;
    char one = 1;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent || transport_life_map(life_fd, &page) != XP_OK ||
        transport_life_hold(page, 7, &hold) != XP_OK || write(ready_fd, &one, 1) != 1)
        _exit(1);
    if (end[0] == 'e')
        _exit(0);
    if (end[0] == 'x')
        execl("/bin/sleep", "sleep", "100", (char *)NULL);
    for (;;)
        pause();
}

static void test_hold(void **state)
{
    int fd, ready[2];
    char one;
    life_page_t *page;
    transport_life_hold_t *hold, *second;
    assert_int_equal(transport_life_make(&fd), XP_OK);
    assert_int_equal(transport_life_map(fd, &page), XP_OK);
    assert_int_equal(pipe(ready), 0);
    /* In order. */
    assert_int_equal(transport_life_hold(page, 7, &hold), XP_OK);
    assert_int_equal(life_word_look(&page->word[7]), 0);
    assert_int_equal(transport_life_hold(page, 7, &second), XP_INVALID);
    assert_int_equal(transport_life_hold(page, LIFE_WORDS, &second), XP_INVALID);
    assert_int_equal(life_word_look(&page->word[7]), 0);
    transport_life_release(hold);
    assert_int_equal(life_word_look(&page->word[7]), LIFE_ENDED);
    assert_int_equal(transport_life_hold(page, 7, &second), XP_INVALID);
    transport_life_release(NULL);
    /* Killed, exiting, and leaving by exec: nobody but Linux does anything. */
    const char *const ends[] = {"kill", "exit", "xexec", "kill"};
    for (int i = 0; i < 4; i++) {
        transport_life_renew(page, 7);
        pid_t pid = holder(fd, ready[1], ends[i]);
        assert_int_equal(read(ready[0], &one, 1), 1);
        if (ends[i][0] == 'k') {
            assert_int_equal(life_word_look(&page->word[7]), 0);
            kill(pid, SIGKILL);
        }
        assert_true(await_word(page, 7));
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
    }
    /* One that was ended by somebody else before stays so. */
    transport_life_renew(page, 7);
    pid_t pid = holder(fd, ready[1], "kill");
    assert_int_equal(read(ready[0], &one, 1), 1);
    assert_int_equal(life_word_end(&page->word[7]), 1);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    assert_int_equal(life_word_look(&page->word[7]), LIFE_ENDED);
    close(ready[0]);
    close(ready[1]);
    close(fd);
    xp_memfd_unmap(page);
}

static void test_watch(void **state)
{
    enum { PROCESSES = 5 };
    int fd, pidfds[PROCESSES];
    pid_t pids[PROCESSES];
    life_page_t *page;
    transport_life_watch_t *watch;
    assert_int_equal(transport_life_make(&fd), XP_OK);
    assert_int_equal(transport_life_map(fd, &page), XP_OK);
    assert_int_equal(transport_life_watch_create(page, on_death, dead, &watch), XP_OK);
    for (uint32_t i = 0; i < PROCESSES; i++) {
        pids[i] = sleeper(&pidfds[i]);
        assert_int_equal(transport_life_watch_add(watch, pidfds[i], i * 10), XP_OK);
    }
    assert_int_equal(transport_life_watch_add(watch, pidfds[0], 0), XP_INVALID);
    assert_int_equal(transport_life_watch_add(watch, pidfds[0], LIFE_WORDS), XP_INVALID);
    assert_int_equal(transport_life_watch_add(watch, fd, 1), XP_IO); /* no pidfd */
    /* One that is no longer watched dies unnoticed; the others are told apart. */
    transport_life_watch_remove(watch, 40);
    transport_life_watch_remove(watch, 40);
    transport_life_watch_remove(watch, LIFE_WORDS);
    kill(pids[4], SIGKILL);
    kill(pids[2], SIGKILL);
    assert_true(await_word(page, 20));
    kill(pids[0], SIGTERM);
    assert_true(await_word(page, 0));
    assert_int_equal(life_word_look(&page->word[10]), 0);
    assert_int_equal(life_word_look(&page->word[40]), 0);
    /* A word is used again. */
    transport_life_renew(page, 20);
    pid_t next = sleeper(&fd);
    assert_int_equal(transport_life_watch_add(watch, fd, 20), XP_OK);
    kill(next, SIGKILL);
    assert_true(await_word(page, 20));
    /* A process that is dead already. */
    assert_int_equal(transport_life_watch_add(watch, pidfds[0], 50), XP_OK);
    assert_true(await_word(page, 50));
    transport_life_watch_destroy(watch);
    transport_life_watch_destroy(NULL);
    assert_int_equal(dead[20], 2);
    assert_int_equal(dead[40], 0);
    for (uint32_t i = 0; i < PROCESSES; i++) {
        kill(pids[i], SIGKILL);
        waitpid(pids[i], NULL, 0);
        close(pidfds[i]);
    }
    waitpid(next, NULL, 0);
    close(fd);
    xp_memfd_unmap(page);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_words), cmocka_unit_test(test_hold),
                                       cmocka_unit_test(test_watch)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
