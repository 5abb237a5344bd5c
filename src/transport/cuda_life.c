/* SPDX-License-Identifier: MIT */
/*
 * The page of life words and the thread that watches pidfds. The table of watched processes is
 * under a mutex that the watching thread takes only to translate an event; it never waits for a
 * device.
 */
#include "transport/cuda_life.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/memfd.h"

_Static_assert(sizeof(life_page_t) == MAILBOX_HEADER_BYTES, "the life words are one page");
_Static_assert(LIFE_ENDED == FUTEX_OWNER_DIED, "Linux ends a word with this bit");

#define WATCH_EVENTS   16
#define WATCH_STOP     UINT32_MAX
#define WATCH_PRIORITY 10

struct transport_life_watch {
    life_page_t *page;
    transport_life_dead_t dead;
    void *context;
    int epoll_fd, stop_fd;
    pthread_t thread;
    bool started, realtime;
    pthread_mutex_t lock;
    uint32_t watched;
    int pidfds[LIFE_WORDS]; /* -1: not watched */
};

xp_status_t transport_life_make(int *fd_out)
{
    int fd;
    void *address;
    XP_TRY(xp_memfd_create("xpool-life", MAILBOX_HEADER_BYTES, &fd));
    xp_status_t status = xp_memfd_map(fd, MAILBOX_HEADER_BYTES, &address);
    if (status != XP_OK) {
        close(fd);
        return status;
    }
    life_page_t *page = address;
    page->magic = LIFE_MAGIC;
    page->abi = LIFE_ABI;
    page->words = LIFE_WORDS;
    xp_memfd_unmap(address);
    *fd_out = fd;
    return XP_OK;
}

xp_status_t transport_life_map(int fd, life_page_t **page_out)
{
    uint64_t bytes;
    void *address;
    XP_TRY(xp_memfd_check(fd, &bytes));
    if (bytes != MAILBOX_HEADER_BYTES)
        return xp_fail(XP_PEER, "a page of life words has %llu bytes", (unsigned long long)bytes);
    XP_TRY(xp_memfd_map(fd, MAILBOX_HEADER_BYTES, &address));
    life_page_t *page = address;
    if (PROTOCOL_LOAD_RELAXED(&page->magic) != LIFE_MAGIC ||
        PROTOCOL_LOAD_RELAXED(&page->abi) != LIFE_ABI ||
        PROTOCOL_LOAD_RELAXED(&page->words) != LIFE_WORDS) {
        xp_memfd_unmap(address);
        return xp_fail(XP_PEER, "descriptor is no page of life words of ABI %u", LIFE_ABI);
    }
    *page_out = page;
    return XP_OK;
}

void transport_life_renew(life_page_t *page, uint32_t index)
{
    XP_ASSERT(index < LIFE_WORDS);
    PROTOCOL_STORE_RELEASE(&page->word[index], 0u);
}

/* ---- the owner ----------------------------------------------------------------------------- */
struct transport_life_hold {
    uint32_t *word;
    pthread_t thread;
    sem_t answer, release;
    bool owned;
    struct robust_list_head head; /* this thread's list, read by Linux at its end */
    struct robust_list node;
};

static void *hold_run(void *argument)
{
    transport_life_hold_t *hold = argument;
    uint32_t nobody = 0, self = (uint32_t)syscall(SYS_gettid);
    hold->head.list.next = &hold->head.list;
    hold->head.futex_offset = (long)((uintptr_t)hold->word - (uintptr_t)&hold->node);
    hold->head.list_op_pending = NULL;
    /* In place of the C library's own list for this thread, which takes no robust mutex. */
    if (syscall(SYS_set_robust_list, &hold->head, sizeof(hold->head)) == 0) {
        /* Pending before owned: killed in between, the word is still seen to. */
        hold->node.next = &hold->head.list;
        __atomic_store_n(&hold->head.list_op_pending, &hold->node, __ATOMIC_SEQ_CST);
        hold->owned = PROTOCOL_CAS(hold->word, &nobody, self);
        if (hold->owned)
            __atomic_store_n(&hold->head.list.next, &hold->node, __ATOMIC_SEQ_CST);
        __atomic_store_n(&hold->head.list_op_pending, NULL, __ATOMIC_SEQ_CST);
    }
    sem_post(&hold->answer);
    while (hold->owned && sem_wait(&hold->release) != 0)
        continue;
    if (hold->owned)
        life_word_end(hold->word);
    return NULL;
}

xp_status_t transport_life_hold(life_page_t *page, uint32_t index, transport_life_hold_t **hold_out)
{
    if (index >= LIFE_WORDS)
        return xp_fail(XP_INVALID, "life word %u; there are %d", index, LIFE_WORDS);
    transport_life_hold_t *hold = calloc(1, sizeof(*hold));
    if (!hold)
        return xp_fail(XP_NO_MEMORY, "no memory to hold a life word");
    hold->word = &page->word[index];
    sem_init(&hold->answer, 0, 0);
    sem_init(&hold->release, 0, 0);
    /* No handler runs on this thread: its only event is the end. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&hold->thread, NULL, hold_run, hold);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error) {
        free(hold);
        errno = error;
        return xp_fail_errno(XP_IO, "cannot start the thread that holds a life word");
    }
    struct sched_param parameter = {.sched_priority = WATCH_PRIORITY};
    (void)pthread_setschedparam(hold->thread, SCHED_FIFO, &parameter);
    while (sem_wait(&hold->answer) != 0)
        continue;
    if (!hold->owned) {
        pthread_join(hold->thread, NULL);
        free(hold);
        return xp_fail(XP_INVALID, "life word %u has an owner already, or is at its end", index);
    }
    *hold_out = hold;
    return XP_OK;
}

void transport_life_release(transport_life_hold_t *hold)
{
    if (!hold)
        return;
    sem_post(&hold->release);
    pthread_join(hold->thread, NULL);
    sem_destroy(&hold->answer);
    sem_destroy(&hold->release);
    free(hold);
}

/* ---- the watch ------------------------------------------------------------------------------- */
static void watch_died(transport_life_watch_t *watch, uint32_t index)
{
    pthread_mutex_lock(&watch->lock);
    int pidfd = watch->pidfds[index];
    /* Removed between the event and now: its word may be somebody else's already. */
    bool ours = pidfd >= 0;
    if (ours) {
        life_word_end(&watch->page->word[index]);
        epoll_ctl(watch->epoll_fd, EPOLL_CTL_DEL, pidfd, NULL);
        close(pidfd);
        watch->pidfds[index] = -1;
        watch->watched--;
    }
    pthread_mutex_unlock(&watch->lock);
    if (ours && watch->dead)
        watch->dead(watch->context, index);
}

static void *watch_run(void *argument)
{
    transport_life_watch_t *watch = argument;
    struct epoll_event events[WATCH_EVENTS];
    for (;;) {
        int count = epoll_wait(watch->epoll_fd, events, WATCH_EVENTS, -1);
        if (count < 0 && errno != EINTR)
            return NULL;
        for (int i = 0; i < count; i++) {
            if (events[i].data.u32 == WATCH_STOP)
                return NULL;
            watch_died(watch, events[i].data.u32);
        }
    }
}

xp_status_t transport_life_watch_create(life_page_t *page, transport_life_dead_t dead,
                                        void *context, transport_life_watch_t **watch_out)
{
    transport_life_watch_t *watch = calloc(1, sizeof(*watch));
    if (!watch)
        return xp_fail(XP_NO_MEMORY, "no memory to watch processes");
    xp_status_t status;
    watch->page = page;
    watch->dead = dead;
    watch->context = context;
    watch->stop_fd = -1;
    pthread_mutex_init(&watch->lock, NULL);
    for (uint32_t i = 0; i < LIFE_WORDS; i++)
        watch->pidfds[i] = -1;
    watch->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (watch->epoll_fd >= 0)
        watch->stop_fd = eventfd(0, EFD_CLOEXEC);
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = WATCH_STOP};
    if (watch->stop_fd < 0 ||
        epoll_ctl(watch->epoll_fd, EPOLL_CTL_ADD, watch->stop_fd, &event) != 0) {
        status = xp_fail_errno(XP_IO, "cannot watch processes");
        goto fail;
    }
    int error = pthread_create(&watch->thread, NULL, watch_run, watch);
    if (error) {
        errno = error;
        status = xp_fail_errno(XP_IO, "cannot start the thread that watches processes");
        goto fail;
    }
    watch->started = true;
    /* Refused to ordinary users without RLIMIT_RTPRIO: then it is an ordinary thread. */
    struct sched_param parameter = {.sched_priority = WATCH_PRIORITY};
    watch->realtime = pthread_setschedparam(watch->thread, SCHED_FIFO, &parameter) == 0;
    *watch_out = watch;
    return XP_OK;
fail:
    transport_life_watch_destroy(watch);
    return status;
}

void transport_life_watch_destroy(transport_life_watch_t *watch)
{
    if (!watch)
        return;
    if (watch->started) {
        uint64_t one = 1;
        ssize_t written = write(watch->stop_fd, &one, sizeof(one));
        XP_ASSERT(written == sizeof(one));
        pthread_join(watch->thread, NULL);
    }
    for (uint32_t i = 0; i < LIFE_WORDS; i++)
        if (watch->pidfds[i] >= 0)
            close(watch->pidfds[i]);
    if (watch->stop_fd >= 0)
        close(watch->stop_fd);
    if (watch->epoll_fd >= 0)
        close(watch->epoll_fd);
    pthread_mutex_destroy(&watch->lock);
    free(watch);
}

int transport_life_watch_is_realtime(const transport_life_watch_t *watch)
{
    return watch->realtime;
}

xp_status_t transport_life_watch_add(transport_life_watch_t *watch, int pidfd, uint32_t index)
{
    if (index >= LIFE_WORDS)
        return xp_fail(XP_INVALID, "life word %u; there are %d", index, LIFE_WORDS);
    int copy;
    XP_TRY(xp_fd_duplicate(pidfd, &copy));
    xp_status_t status = XP_OK;
    pthread_mutex_lock(&watch->lock);
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = index};
    if (watch->pidfds[index] >= 0) {
        status = xp_fail(XP_INVALID, "life word %u has a process already", index);
    } else if (watch->watched == LIFE_WATCH_MAX) {
        status = xp_fail(XP_NO_MEMORY, "more than %d processes to watch", LIFE_WATCH_MAX);
    } else if (epoll_ctl(watch->epoll_fd, EPOLL_CTL_ADD, copy, &event) != 0) {
        status = xp_fail_errno(XP_IO, "cannot watch a process");
    } else {
        watch->pidfds[index] = copy;
        watch->watched++;
        copy = -1;
    }
    pthread_mutex_unlock(&watch->lock);
    if (copy >= 0)
        close(copy);
    return status;
}

void transport_life_watch_remove(transport_life_watch_t *watch, uint32_t index)
{
    if (index >= LIFE_WORDS)
        return;
    pthread_mutex_lock(&watch->lock);
    if (watch->pidfds[index] >= 0) {
        epoll_ctl(watch->epoll_fd, EPOLL_CTL_DEL, watch->pidfds[index], NULL);
        close(watch->pidfds[index]);
        watch->pidfds[index] = -1;
        watch->watched--;
    }
    pthread_mutex_unlock(&watch->lock);
}
