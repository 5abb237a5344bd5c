/* SPDX-License-Identifier: MIT */
/*
 * The marked way of the direct lane: rows whose every word carries its own sequence. One source for
 * C and CUDA.
 *
 * A word of 8 bytes is two elements and, above them, the mark: the low half of the Transport's
 * sequence. It is stored and loaded whole, so who finds the mark has the elements, and nothing has
 * to be waited for: neither a release after the rows nor a word that follows it. The brief goes
 * ahead of the rows, without order, and says all that a line says of a rank that is alone. Rows
 * travel in twice their bytes, so this is for few of them.
 *
 *   Instance → FfnAgent   the stage's marked area; the brief with STAGE_BRIEF_MARKED
 *   FfnAgent → Instance   the arena's marked area (its input area, which the direct lane does not
 *                         use); no word follows
 *
 * Why no word is mistaken for another: an area holds marked words alone and is cleared before its
 * Instance is attached, and a mark comes once in an Instance's life, since the marked way ends with
 * the last sequence that fits it (stage_marked_allowed); the plain way goes on. An area is written
 * again only after every word of the sequence before has been read: the answer's words are made
 * from the words of the rows, and the next rows follow the whole answer.
 *
 * Marks say nothing about other memory: what is published by them is in the words alone.
 */
#ifndef XPOOL_STAGE_MARKED_H
#define XPOOL_STAGE_MARKED_H

#include "stage/job.h"
#include "stage/records.h"

/* Looks at words that have not come, in one go of one thread; then others get their turn. */
#define STAGE_MARKED_LOOKS 32u
#define STAGE_MARKED_LOADS 16u /* of 16 bytes, in flight a thread */

/* Two words: four elements. */
typedef struct
#ifdef __CUDACC__
    __align__(16)
#else
    __attribute__((aligned(16)))
#endif
        stage_marked
{
    uint64_t word[2];
}
stage_marked_t;
#define STAGE_MARKED_ELEMENTS 4u

/* May a put of this sequence and brief go the marked way, of `most` rows? */
PROTOCOL_FUNCTION int stage_marked_allowed(uint64_t sequence, uint64_t brief, uint32_t rows,
                                           uint32_t most)
{
    return sequence != 0 && sequence >> 32 == 0 && !(brief & STAGE_BRIEF_LONG) && rows <= most;
}

/* Stored relaxed, each word whole: pairs with stage_marked_load by its mark. */
PROTOCOL_FUNCTION void stage_marked_store(stage_marked_t *to, uint32_t first, uint32_t second,
                                          uint32_t mark)
{
    const uint64_t above = (uint64_t)mark << 32;
#ifdef __CUDA_ARCH__
    asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(above | first),
                 "l"(above | second)
                 : "memory");
#elif defined(XPOOL_WEAKEN_RELEASE)
    /* The planted mistake of tests/tsan: the mark apart from what it marks. */
    uint32_t *half = (uint32_t *)to;
    half[1] = half[3] = mark;
    half[0] = first;
    half[2] = second;
#else
    PROTOCOL_STORE_RELAXED(&to->word[0], above | first);
    PROTOCOL_STORE_RELAXED(&to->word[1], above | second);
#endif
}

PROTOCOL_FUNCTION stage_marked_t stage_marked_read(const stage_marked_t *from)
{
    stage_marked_t seen;
#ifdef __CUDA_ARCH__
    asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];"
                 : "=l"(seen.word[0]), "=l"(seen.word[1])
                 : "l"(from)
                 : "memory");
#else
    seen.word[0] = PROTOCOL_LOAD_RELAXED(&from->word[0]);
    seen.word[1] = PROTOCOL_LOAD_RELAXED(&from->word[1]);
#endif
    return seen;
}

/* Are both words of that mark? Then their elements are whole. */
PROTOCOL_FUNCTION int stage_marked_is(stage_marked_t seen, uint32_t mark)
{
    return (uint32_t)(seen.word[0] >> 32) == mark && (uint32_t)(seen.word[1] >> 32) == mark;
}

/* Instance: before or while the rows are stored. Nothing is ordered by it. */
PROTOCOL_FUNCTION void stage_marked_announce(stage_line_t *line, uint64_t brief)
{
    PROTOCOL_STORE_RELAXED(stage_line_brief(line), brief | STAGE_BRIEF_MARKED);
}

/* FfnAgent: the echo of elements [begin, end), whole rows of eights, from marked words to marked
 * words, by thread `thread` of `threads`. Returns 0 when words were missing after
 * STAGE_MARKED_LOOKS looks: what was there has been answered, and the same call may be made again.
 */
PROTOCOL_FUNCTION int stage_marked_run(const stage_job_t *job, uint64_t begin, uint64_t end,
                                       uint64_t thread, uint64_t threads)
{
    stage_job_form_t form;
    stage_job_form_make(job, &form);
    const stage_marked_t *from = (const stage_marked_t *)job->from;
    stage_marked_t *to = (stage_marked_t *)form.first.rows;
    const uint32_t mark = job->mark;
    const uint64_t last = end / STAGE_MARKED_ELEMENTS;
    uint32_t looks = STAGE_MARKED_LOOKS;
    for (uint64_t i = begin / STAGE_MARKED_ELEMENTS + thread; i < last;
         i += STAGE_MARKED_LOADS * threads) {
        stage_marked_t part[STAGE_MARKED_LOADS];
        int there;
        do {
            there = 1;
            STAGE_UNROLL
            for (uint32_t n = 0; n < STAGE_MARKED_LOADS; n++)
                if (i + n * threads < last)
                    part[n] = stage_marked_read(from + i + n * threads);
            STAGE_UNROLL
            for (uint32_t n = 0; n < STAGE_MARKED_LOADS; n++)
                there = there && (i + n * threads >= last || stage_marked_is(part[n], mark));
        } while (!there && --looks);
        if (!there)
            return 0;
        STAGE_UNROLL
        for (uint32_t n = 0; n < STAGE_MARKED_LOADS; n++)
            if (i + n * threads < last)
                stage_marked_store(to + i + n * threads,
                                   stage_job_echo_pair(&form, (uint32_t)part[n].word[0]),
                                   stage_job_echo_pair(&form, (uint32_t)part[n].word[1]), mark);
    }
    return 1;
}
#endif
