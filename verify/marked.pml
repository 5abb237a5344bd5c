/* SPDX-License-Identifier: MIT */
/* The marked way of the direct lane (stage/marked.h): rows of one or two words, each with its mark and
 * its elements, from an Instance to an FfnAgent and back, in areas of two words a side. Words and brief
 * become visible in any order. The Instance may die between any two of its words; then the host
 * detaches it, clears the areas and attaches a successor whose sequences begin anew. Marks are small
 * here, so that they come to their end: from then on the plain way, in one step, goes on.
 *
 *   Instance   stage_marked_announce, stage_marked_store; its look for the answer
 *   Agent      stage_scheduler_line (marked), stage_marked_run, stage_scheduler_chunk_again, _order
 *   Host       stage_ffn_attach, stage_ffn_detach
 *
 * Planted mistakes, each of which Spin must find:
 *   BUG_BRIEF_ALONE     the agent takes what the brief announces without a look at the marks
 *   BUG_MARK_APART      a mark is stored apart from what it marks, and first
 *   BUG_MARK_AGAIN      the marked way does not end when marks come again
 *   BUG_KEEP_WORDS      the areas keep the words of the predecessor
 *   BUG_WAIT_FOR_WORDS  a detach waits until all words have come
 *   BUG_FIRST_WORD      the Instance takes the first word of the answer for all of them
 */
#define WORDS  2
#define MARKS  3 /* sequences 1 .. MARKS have marks of their own */
#define ROUNDS 5
#define LIVES  2
#define VALUE(l, s, w) ((l) * 32 + (s) * 4 + (w))
#ifdef BUG_MARK_AGAIN
#define MARK(s)      (((s) - 1) % MARKS + 1)
#define BY_MARKS(s)  true
#else
#define MARK(s)      (s)
#define BY_MARKS(s)  ((s) <= MARKS)
#endif

#define EMPTY    0
#define ATTACHED 1

/* The stage's area and the arena's: mark and elements of a word are one. */
byte in_mark[WORDS], in_value[WORDS], out_mark[WORDS], out_value[WORDS];
byte brief, brief_words; /* one word */
byte plain;              /* the plain way: rows and line as one, since their order is stage.pml's */
byte answer;             /* its answer's word */
byte life, wanted, now, dead;
bool ended;

inline store_in(w, m, v)
{
#ifdef BUG_MARK_APART
    in_mark[w] = m;
    in_value[w] = v
#else
    d_step { in_mark[w] = m; in_value[w] = v }
#endif
}

proctype Instance()
{
    byte mine = 0, sequence, words, stored, w;
    bool told;
    do
    :: mine == LIVES -> break
    :: mine < LIVES && life == mine + 1 ->
        mine++;
        sequence = 0;
        do
        :: sequence == ROUNDS -> break
        :: sequence < ROUNDS ->
            sequence++;
            if
            :: BY_MARKS(sequence) ->
                if
                :: words = 1
                :: words = 2
                fi;
                told = false;
                stored = 0; /* bits */
                do
                :: !told -> d_step { brief = sequence; brief_words = words }; told = true
                :: !(stored & 1) -> store_in(0, MARK(sequence), VALUE(mine, sequence, 0)); stored = stored | 1
                :: words == 2 && !(stored & 2) ->
                    store_in(1, MARK(sequence), VALUE(mine, sequence, 1)); stored = stored | 2
                :: told && (stored & 1) && (words == 1 || (stored & 2)) -> break
                :: true -> goto dies
                od;
                w = 0;
                do
                :: w == words -> break
                :: w < words ->
                    if
#ifdef BUG_FIRST_WORD
                    :: out_mark[0] == MARK(sequence) ->
#else
                    :: out_mark[w] == MARK(sequence) ->
#endif
                        assert(out_value[w] == VALUE(mine, sequence, w));
                        w++
                    :: true -> goto dies
                    fi
                od
            :: else ->
                plain = sequence;
                if
                :: answer == sequence
                :: true -> goto dies
                fi
            fi
        od;
dies:   dead = mine
    od
}

proctype Agent()
{
    byte taken = 0, live, words, seen, w, from, value, served = 0;
    bool by_marks, attached = false;
    live = 0;
    do
    :: ended -> break
    :: wanted != now && wanted == ATTACHED -> attached = true; taken = 0; served++; now = ATTACHED
#ifdef BUG_WAIT_FOR_WORDS
    :: wanted != now && wanted == EMPTY && live == 0 ->
#else
    :: wanted != now && wanted == EMPTY ->
#endif
        live = 0; attached = false; now = EMPTY
    :: attached && wanted == now && live == 0 && brief != taken && brief > taken ->
        d_step { live = brief; words = brief_words; by_marks = true; seen = 0 }
    :: attached && wanted == now && live == 0 && plain > taken && plain > brief ->
        d_step { live = plain; by_marks = false }
#ifdef BUG_WAIT_FOR_WORDS
    :: attached && live != 0 && by_marks ->
#else
    :: attached && live != 0 && by_marks && wanted == now ->
#endif
        /* One look: words that are there are answered, the others looked for again. */
        w = 0;
        do
        :: w == words -> break
        :: w < words ->
            d_step { from = in_mark[w]; value = in_value[w] }
            if
#ifdef BUG_BRIEF_ALONE
            :: true ->
#else
            :: from == MARK(live) ->
#endif
                assert(value == VALUE(served, live, w));
                d_step { out_mark[w] = MARK(live); out_value[w] = value };
                seen = seen | (1 << w)
#ifndef BUG_BRIEF_ALONE
            :: else -> skip
#endif
            fi;
            w++
        od;
        if
        :: (seen & 1) && (words == 1 || (seen & 2)) -> taken = live; live = 0
        :: else -> /* the next look, once something has changed */
            if
#ifndef BUG_WAIT_FOR_WORDS
            :: wanted != now
#endif
            :: in_mark[0] == MARK(live) && (words == 1 || in_mark[1] == MARK(live))
            fi
        fi
    :: attached && live != 0 && !by_marks -> taken = live; answer = live; live = 0
    od
}

active proctype Host()
{
    byte n = 0;
    run Instance();
    run Agent();
    do
    :: n == LIVES -> break
    :: n < LIVES ->
        n++;
        d_step {
            brief = 0; plain = 0; answer = 0;
#ifndef BUG_KEEP_WORDS
            in_mark[0] = 0; in_mark[1] = 0; out_mark[0] = 0; out_mark[1] = 0
#endif
        };
        wanted = ATTACHED;
        now == ATTACHED;
        life = n;
        dead == n;
        wanted = EMPTY;
        now == EMPTY
    od;
    ended = true
}
