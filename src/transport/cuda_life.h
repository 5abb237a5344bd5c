/* SPDX-License-Identifier: MIT */
/*
 * Life words: one page that says which processes are at their end.
 *
 * The daemon makes the page and gives each process a word in it. The page is a memfd that every
 * process maps and, where there is a GPU, registers as mapped host memory: a kernel that waits
 * looks at its own process's word at least every LIFE_LOOK_NS and returns when it says so. That
 * keeps the other clients of an MPS server alive when one is killed: a unit of the dead client's
 * work that still runs some 5 ms later takes all of them with it.
 *
 * A death has to be seen within that time, and a pidfd is too late: it becomes readable when the
 * process has given back its device, after 70 ms (measured) or, with a kernel that waits, 300 ms.
 * So the word is a robust futex, owned by a thread that does nothing else (transport_life_hold):
 * Linux itself sets LIFE_ENDED in it as the first thing that happens to a thread that was killed,
 * and no other process has to notice anything. Whoever watches pidfds (transport_life_watch) ends
 * the words of those that died before they held one.
 *
 * Word: 0 = no owner yet, else the owner's thread id; LIFE_ENDED set = at its end, for good.
 * Layout and word functions compile as C and as CUDA.
 */
#ifndef XPOOL_TRANSPORT_CUDA_LIFE_H
#define XPOOL_TRANSPORT_CUDA_LIFE_H

#include "transport/mailbox.h"

#define LIFE_MAGIC   0x31464c58u /* "XLF1" */
#define LIFE_ABI     1u
#define LIFE_WORDS   1008
#define LIFE_LOOK_NS 50000u
#define LIFE_ENDED   0x40000000u /* Linux's FUTEX_OWNER_DIED */

typedef struct life_page {
    uint32_t magic, abi, words;
    uint8_t pad[MAILBOX_LINE - 12];
    uint32_t word[LIFE_WORDS];
} life_page_t;

/* Not 0 when the process is at its end. acquire: pairs with the compare-and-swap in life_word_end.
 */
PROTOCOL_FUNCTION uint32_t life_word_look(const uint32_t *word)
{
    return PROTOCOL_LOAD_ACQUIRE(word) & LIFE_ENDED;
}

/* Returns 1 for the call that ended it. Only the owner's coming and its end write the word too, so
 * the loop is short. */
PROTOCOL_FUNCTION int life_word_end(uint32_t *word)
{
    uint32_t seen = PROTOCOL_LOAD_RELAXED(word);
    while (!(seen & LIFE_ENDED))
        if (PROTOCOL_CAS(word, &seen, seen | LIFE_ENDED))
            return 1;
    return 0;
}

#ifndef __CUDACC__
#include "base/status.h"

/* Makes the page (memfd "xpool-life"), all alive. */
xp_status_t transport_life_make(int *fd_out);
/* Maps a page; XP_PEER when the descriptor is none. xp_memfd_unmap() ends it. */
xp_status_t transport_life_map(int fd, life_page_t **page_out);
/* For the page's maker only, once no process and no kernel looks at the word any more. */
void transport_life_renew(life_page_t *page, uint32_t index);

/* Owns word `index` for this process, by a thread that sleeps until the release: from now on every
 * end of the process, however it comes, ends the word within microseconds. Call it in the process
 * that uses the device, after exec and fork. XP_INVALID when the word has an owner or is ended. */
typedef struct transport_life_hold transport_life_hold_t;
xp_status_t transport_life_hold(life_page_t *page, uint32_t index,
                                transport_life_hold_t **hold_out);
/* Ends the word, in order. Accepts NULL. */
void transport_life_release(transport_life_hold_t *hold);

/*
 * Watches processes from a thread of its own, of real-time priority where the system allows it, and
 * ends the word of each that dies at once. Daemon and AtnAgent both run one, so that neither has to
 * be there. Calls from any thread; a callback runs on the watching thread and must be short.
 */
typedef struct transport_life_watch transport_life_watch_t;
typedef void (*transport_life_dead_t)(void *context, uint32_t index);
#define LIFE_WATCH_MAX 256

xp_status_t transport_life_watch_create(life_page_t *page, transport_life_dead_t dead,
                                        void *context, transport_life_watch_t **watch_out);
void transport_life_watch_destroy(transport_life_watch_t *watch); /* accepts NULL */
/* True when the thread got real-time priority. */
int transport_life_watch_is_realtime(const transport_life_watch_t *watch);
/* `pidfd` is duplicated. XP_INVALID for an index that is out of range or watched already. */
xp_status_t transport_life_watch_add(transport_life_watch_t *watch, int pidfd, uint32_t index);
void transport_life_watch_remove(transport_life_watch_t *watch, uint32_t index);
#endif
#endif
