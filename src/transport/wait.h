/* SPDX-License-Identifier: MIT */
/*
 * Waiting on a bell from a CPU thread: bounded spinning, then a futex.
 *
 * A waiter belongs to one thread and carries what it has learnt. Spinning pays only when the answer
 * comes soon and a core is free for it. So a spin that failed is followed by one of half the
 * length, one that succeeded by one of full length, and every sixteenth wait in a row that slept
 * begins with a full spin to find out. Where giving way showed that a thread of somebody else
 * wanted this core for a whole time slice, the next waits do not spin at all. With a single core,
 * by machine or quota, a waiter never spins.
 */
#ifndef XPOOL_TRANSPORT_WAIT_H
#define XPOOL_TRANSPORT_WAIT_H

#include <stdbool.h>
#include <stdint.h>

#include "transport/mailbox.h"

typedef struct transport_waiter {
    uint32_t limit_ns; /* configured bound of one spin */
    uint32_t spin_ns;  /* what it spins now */
    uint32_t sleeps_in_turn;
    uint32_t hold;    /* waits that will not spin, since cores are short */
    uint64_t spins;   /* waits that ended while spinning */
    uint64_t sleeps;  /* waits that went to the futex */
    uint64_t wait_ns; /* total, both kinds */
} transport_waiter_t;

void transport_waiter_init(transport_waiter_t *waiter, uint32_t spin_ns);

/* Waits until the bell's counter is no longer `seen`, or deadline_ns. Returns true when it moved.
 */
bool transport_bell_wait(transport_waiter_t *waiter, mailbox_bell_t *bell, uint32_t seen,
                         uint64_t deadline_ns);

/* Rings, with a system call only when someone sleeps. */
void transport_bell_ring(mailbox_bell_t *bell);
#endif
