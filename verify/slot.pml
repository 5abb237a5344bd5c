/* SPDX-License-Identifier: MIT */
/* A slot of the resident kernel (transport/cuda_device.h): the host's orders in `wanted`, the warp's
 * answers in `now`, both a turn and a state in one word. The host unmaps an arena only when the warp has
 * answered this very detach; a host that gives up waiting for an attach detaches as well.
 *
 *   Host   transport_cuda_server_attach, transport_cuda_server_detach
 *   Warp   transport_resident_serve
 *
 * BUG_NO_TURN             answers are told apart by state alone
 * BUG_UNMAP_AT_TIMEOUT    a host that gives up unmaps without an answer
 * BUG_KEEP_AFTER_DETACH   the warp answers a detach and looks at the arena once more
 */
#define EMPTY    0
#define ATTACHED 1
#define DROPPED  2
#define ROUNDS   3

#define WORD(turn, state) ((turn) * 4 + (state))
#define STATE(word)       ((word) % 4)
#ifdef BUG_NO_TURN
#define SAME_TURN(a, b) true
#define NEXT_TURN(turn) skip
#else
#define SAME_TURN(a, b) ((a) / 4 == (b) / 4)
#define NEXT_TURN(turn) turn++
#endif

byte wanted = 0, now = 0;
bool mapped = false, done = false;

active proctype Host()
{
    byte turn = 0, round = 0;
    do
    :: round < ROUNDS ->
        mapped = true;
        NEXT_TURN(turn);
        wanted = WORD(turn, ATTACHED);
        if
        :: SAME_TURN(now, wanted) && STATE(now) != EMPTY -> skip /* attached, or dropped at once */
        :: true -> /* the deadline */
#ifdef BUG_UNMAP_AT_TIMEOUT
            mapped = false
#endif
        fi;
        NEXT_TURN(turn);
        wanted = WORD(turn, EMPTY);
        SAME_TURN(now, wanted) && STATE(now) == EMPTY;
        mapped = false;
        round++
    :: else -> break
    od;
    done = true
}

active proctype Warp()
{
    byte order = 0, mine = 0;
    bool arena = false, looked = false;
    do
    :: done -> break
    :: !done && (wanted != mine || (arena && !looked)) ->
        order = wanted;
        if
#ifdef BUG_NO_TURN
        :: STATE(order) == EMPTY && STATE(mine) != EMPTY ||
           STATE(order) == ATTACHED && STATE(mine) == EMPTY ->
#else
        :: !SAME_TURN(order, mine) ->
#endif
            if
            :: STATE(order) == ATTACHED ->
                assert(mapped); /* reads the last answer's sequence */
                arena = true
            :: else ->
                arena = false
            fi;
            mine = order;
            now = mine;
            looked = false;
#ifdef BUG_KEEP_AFTER_DETACH
            if
            :: STATE(mine) == EMPTY -> assert(mapped)
            :: else -> skip
            fi
#endif
        :: else ->
            if
            :: arena ->
                assert(mapped); /* looks for a request, answers it */
                if
                :: true -> skip
                :: true -> /* nonsense, closed, or the Instance's end */
                    arena = false;
                    mine = WORD(mine / 4, DROPPED);
                    now = mine
                fi;
                looked = true
            :: else -> /* dropped: nothing to do until the next order */
                if
                :: done
                :: STATE(mine) != DROPPED || wanted != order
                fi
            fi
        fi
    od
}
