/* SPDX-License-Identifier: MIT */
/* The bell of transport/mailbox.h with the futex behind it, as inline steps for the models.
 *
 *   OBSERVE   mailbox_bell_observe
 *   RING      mailbox_bell_ring, then xp_futex_wake_all when it says so (transport_bell_ring)
 *   SLEEP     mailbox_bell_sleep, xp_futex_wait, mailbox_bell_awake (transport_bell_wait)
 *
 * Each shared access is a step of its own; only the futex's compare-and-enqueue is one step, as the
 * kernel makes it. */
typedef Bell {
    byte counter;
    byte sleepers;
    bool asleep
};

#define OBSERVE(bell, seen) seen = bell.counter

inline RING(bell)
{
#ifdef BUG_SLEEPERS_FIRST
    if
    :: bell.sleepers > 0 -> bell.counter++; bell.asleep = false
    :: else -> bell.counter++
    fi
#else
    bell.counter++;
    if
    :: bell.sleepers > 0 -> bell.asleep = false
    :: else -> skip
    fi
#endif
}

inline SLEEP(bell, seen)
{
#ifndef BUG_UNDECLARED_SLEEPER
    bell.sleepers++;
#endif
    if
    :: bell.counter == seen ->
#ifdef BUG_FUTEX_WITHOUT_COMPARE
        bell.asleep = true;
#else
        atomic {
            if
            :: bell.counter == seen -> bell.asleep = true
            :: else -> skip
            fi
        }
#endif
#ifdef BUG_UNDECLARED_SLEEPER
        bell.sleepers++;
#endif
        !bell.asleep;
        bell.sleepers--
    :: else ->
#ifndef BUG_UNDECLARED_SLEEPER
        bell.sleepers--
#else
        skip
#endif
    fi
}
