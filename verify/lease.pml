/* SPDX-License-Identifier: MIT */
/*
 * The resident kernel's lease: ffn/cuda/dispatch.h (scheduler), ffn/cuda_serve.c (host thread) and
 * command_wait of ffn/cuda/command.cuh (each block of a resident kernel).
 *
 * The scheduler has an Invocation in each of two Lanes, each for the resident kernel or, by its own
 * choice, for the host: so it chooses for what the kernel of this lease does not take. The host offers the lease when it has nothing to do, launches the kernel
 * when the offer was seen and what it fired meanwhile has ended, gives the lease up when it is asked for something, and may fail at any time: then it only stops the kernel. Blocks meet within
 * a command. Claims: each Invocation is executed once, by all blocks or by the host and never
 * beside the kernel; no command is lost between two leases; the kernel always leaves; nobody waits
 * for ever.
 */
#define INVOCATIONS 4
#define LANES       2
#define LEASES      2
#define BLOCKS      2
#define ENTRIES     3 /* more than Lanes */
#define LEFT        255

byte lease, seen;       /* words of the host and of the scheduler */
byte sequence[ENTRIES]; /* the queue */
byte item[ENTRIES];     /* which Invocation a command is */
bool stop;
byte running;               /* blocks */
byte under_way;             /* fired by the host, not ended */
byte leases;                /* taken so far */
byte part[INVOCATIONS + 1]; /* blocks that have begun it */
byte times[INVOCATIONS + 1];
byte ring, asked[INVOCATIONS]; /* requests to the host */
bool over, failed;

proctype Block()
{
    byte n = 1, found, which;
    do
    :: (sequence[(n - 1) % ENTRIES] == n || sequence[(n - 1) % ENTRIES] == LEFT || stop) ->
        found = sequence[(n - 1) % ENTRIES];
        if
        :: found == n ->
            which = item[(n - 1) % ENTRIES];
            part[which]++;
            /* The blocks of a command meet: alone, one would wait for ever. */
            atomic {
                part[which] >= BLOCKS ->
                if
                :: part[which] == BLOCKS -> part[which]++; times[which]++
                :: else
                fi
            }
            n++
        :: found == LEFT -> break
        :: found != n && found != LEFT && stop ->
#ifdef BUG_LEAVE_ALONE
            break
#else
            atomic {
                if
                :: sequence[(n - 1) % ENTRIES] == found -> sequence[(n - 1) % ENTRIES] = LEFT
                :: else
                fi
            }
#endif
        :: else
        fi
    od;
    running--
}

/* What the host has fired begins only where the kernel is not: both need all multiprocessors. */
proctype Fired(byte which)
{
    atomic { running == 0 -> times[which]++; under_way-- }
}

active proctype Host()
{
    byte taken, i;
    bool may_fail;
    /* Decided at once: a failure must not cover up that somebody waits for ever. */
    if
    :: may_fail = true
    :: may_fail = false
    fi;
    do
    :: (lease % 2 == 0 && leases < LEASES && !over && ring == taken) ->
#ifdef BUG_OFFER_FIRST
        lease++;
#endif
        i = 0;
        do
        :: i < ENTRIES -> sequence[i] = 0; i++
        :: else -> break
        od;
        stop = false;
        leases++;
#ifndef BUG_OFFER_FIRST
        lease++;
#endif
        /* What was asked for before the offer was seen is the host's. */
        do
        :: ring != taken -> under_way++; run Fired(asked[taken]); taken++
        :: (seen == lease || over) -> break
        :: may_fail -> break
        od;
        do
        :: ring != taken -> under_way++; run Fired(asked[taken]); taken++
        :: else -> break
        od;
#ifndef BUG_BESIDE
        (under_way == 0);
#endif
        running = BLOCKS;
        i = 0;
        do
        :: i < BLOCKS -> run Block(); i++
        :: else -> break
        od
    :: (ring != taken || (over && lease % 2 == 1)) ->
        if
        :: lease % 2 == 1 ->
            lease++;
#ifndef BUG_DO_NOT_WAIT
            (seen == lease || over);
#endif
            stop = true;
            (running == 0)
        :: else
        fi;
        if
        :: ring != taken ->
            assert(running == 0);
            times[asked[taken]]++;
            taken++
        :: else
        fi
    :: (over && lease % 2 == 0 && ring == taken) -> break
    :: may_fail -> failed = true; stop = true; (running == 0); break
    od
}

active proctype Scheduler()
{
    byte mine, commands, found, now = 1;
    bool gone, posted;

    do
    :: now <= INVOCATIONS ->
        /* A Lane is free. */
        if
        :: now > LANES ->
            do
            :: (times[now - LANES] > 0 || failed) -> break
            :: (lease != mine && times[now - LANES] == 0) ->
                mine = lease; gone = false; commands = 0; seen = mine
            od
        :: else
        fi;
        if
        :: failed -> break
        :: else
        fi;
        /* ffn_cuda_lease_look */
        found = lease;
        if
        :: found != mine -> mine = found; gone = false; commands = 0; seen = found
        :: else
        fi;
        posted = false;
        if
        :: (mine % 2 == 1 && !gone) ->
            /* ffn_cuda_command_post */
            found = (commands >= ENTRIES -> commands + 1 - ENTRIES : 0);
            item[commands % ENTRIES] = now;
#ifdef BUG_STORE
            sequence[commands % ENTRIES] = commands + 1;
            posted = true;
#else
            atomic {
                if
                :: sequence[commands % ENTRIES] == found ->
                    sequence[commands % ENTRIES] = commands + 1;
                    posted = true
                :: else
                fi
            }
#endif
            if
            :: posted -> commands++
            :: else -> gone = true
            fi
        :: true /* more rows than the resident kernel takes, or no lease */
        fi;
        if
        :: !posted -> asked[ring] = now; ring++
        :: else
        fi;
        now++
    :: else -> break
    od;
    do
    :: now > 1 ->
        do
        :: (times[now - 1] > 0 || failed) -> break
        :: (lease != mine && times[now - 1] == 0) -> mine = lease; seen = mine
        od;
        assert(times[now - 1] <= 1);
        now--
    :: else -> break
    od;
    over = true
}
