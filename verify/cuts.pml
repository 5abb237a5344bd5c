/* SPDX-License-Identifier: MIT */
/*
 * Cuts of the resident kernel: ffn_cuda_invocation_post and ffn_cuda_cut_post of ffn/cuda/dispatch.h
 * (scheduler), command_turn, cut_or_leave and the places where a layer stops of ffn/cuda/decode.cu
 * (each block).
 *
 * The scheduler posts commands and, into the latest one, cuts. Blocks meet twice within a command and within a
 * cut: when experts are chosen, deaf to cuts, and after the first part. They look for a cut in a command's
 * first part, where they wait for each other after it, and between commands. The host says stop when the scheduler has seen the lease's end, or at any
 * time when it fails. Claims: each command and each cut that was posted is executed once and by all
 * blocks, or is refused; the kernel always leaves; nobody waits for ever.
 */
#define COMMANDS 3
#define CUTS     3
#define BLOCKS   2
#define ENTRIES  2
#define LEFT     255

byte sequence[ENTRIES], count[ENTRIES]; /* commands: entry and the cuts posted before it */
byte cut[ENTRIES], inside[ENTRIES];     /* cuts: entry and the command it is posted into */
bool stop, over;
byte running;
byte routed[COMMANDS + 1], cut_routed[CUTS + 1];
byte met[COMMANDS + 1], cut_met[CUTS + 1]; /* blocks */
byte times[COMMANDS + 1], cut_times[CUTS + 1];
byte posted, cuts_posted;

/* One word on the device. */
#ifdef BUG_ANY_COMMAND
#define CUT_IS_THERE (cut[k % ENTRIES] == k + 1)
#else
#define CUT_IS_THERE (cut[k % ENTRIES] == k + 1 && inside[k % ENTRIES] == n)
#endif

inline execute_cut()
{
    k++;
    cut_routed[k]++;
    (cut_routed[k] >= BLOCKS);
    cut_met[k]++;
    (cut_met[k] >= BLOCKS);
    atomic {
        ended = cut_times[k] % 16 + 1;
        cut_times[k] = (ended == BLOCKS -> 16 : ended)
    }
}

proctype Block()
{
    byte n, k, ended; /* begun, executed */
    do
    :: sequence[n % ENTRIES] == n + 1 ->
        if
#ifndef BUG_NO_COUNT
        :: count[n % ENTRIES] != k -> execute_cut()
#endif
#ifdef BUG_NO_COUNT
        :: true ->
#else
        :: else ->
#endif
            n++;
#ifdef BUG_EARLY
            if
            :: CUT_IS_THERE -> execute_cut()
            :: true
            fi;
#endif
            routed[n]++;
            (routed[n] >= BLOCKS);
            /* The first part, with a look or without. */
            if
            :: CUT_IS_THERE -> execute_cut()
            :: true
            fi;
            met[n]++;
            do
            :: met[n] >= BLOCKS -> break
#ifndef BUG_DEAF
            :: (met[n] < BLOCKS && CUT_IS_THERE) -> execute_cut()
#endif
            od;
            atomic {
                ended = times[n] % 16 + 1;
                times[n] = (ended == BLOCKS -> 16 : ended)
            }
        fi
    :: (n > 0 && CUT_IS_THERE) -> execute_cut()
    :: sequence[n % ENTRIES] == LEFT ->
        /* cut_or_leave */
        if
        :: CUT_IS_THERE -> execute_cut()
        :: else ->
#ifdef BUG_LEAVE_ALONE
            break
#else
            atomic {
                if
                :: CUT_IS_THERE -> skip
                :: else -> cut[k % ENTRIES] = LEFT
                fi
            }
            if
            :: cut[k % ENTRIES] == LEFT -> break
            :: else
            fi
#endif
        fi
    :: (stop && sequence[n % ENTRIES] != LEFT && sequence[n % ENTRIES] != n + 1) ->
        atomic {
            if
            :: sequence[n % ENTRIES] != n + 1 -> sequence[n % ENTRIES] = LEFT
            :: else
            fi
        }
    od;
    running--
}

active proctype Host()
{
    bool may_fail;
    running = BLOCKS;
    run Block();
    run Block();
    if
    :: may_fail = true
    :: may_fail = false
    fi;
    if
    :: may_fail
    :: over
    fi;
    stop = true;
    (running == 0 && over)
    byte i = 1;
    do
    :: i <= posted -> assert(times[i] == 16); i++
    :: else -> break
    od;
    i = 1;
    do
    :: i <= cuts_posted -> assert(cut_times[i] == 16); i++
    :: else -> break
    od
}

active proctype Scheduler()
{
    byte before;
    do
    :: posted < COMMANDS ->
        /* Its entry holds the command of the round before, which has ended. */
        if
        :: posted >= ENTRIES ->
            if
            :: times[posted + 1 - ENTRIES] == 16
            :: stop -> break
            fi
        :: else
        fi;
        before = (posted >= ENTRIES -> posted + 1 - ENTRIES : 0);
        count[posted % ENTRIES] = cuts_posted;
        atomic {
            if
            :: sequence[posted % ENTRIES] == before ->
                sequence[posted % ENTRIES] = posted + 1;
                posted++
            :: else -> break
            fi
        }
    :: (posted > 0 && cuts_posted < CUTS &&
        (cuts_posted < ENTRIES || cut_times[cuts_posted + 1 - ENTRIES] == 16)) ->
        before = cut[cuts_posted % ENTRIES];
        if
        :: before == LEFT -> break
        :: else
        fi;
        atomic {
            if
            :: cut[cuts_posted % ENTRIES] == before ->
                inside[cuts_posted % ENTRIES] = posted;
                cut[cuts_posted % ENTRIES] = cuts_posted + 1;
                cuts_posted++
            :: else -> break
            fi
        }
    :: true -> break
    od;
    over = true
}
