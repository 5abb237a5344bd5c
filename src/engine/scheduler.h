/* SPDX-License-Identifier: MIT */
/*
 * Which sequences run, and which of their rows the next step carries. Pure state, no threads and no
 * clock of its own: the engine thread drives it, tests step it by hand.
 *
 * Waiting requests are admitted in order of arrival, as soon as KV pages for all their tokens can
 * be had. A step carries one row of every decoding sequence, then prefill chunks, earliest SLO
 * deadline first. When a decoding sequence needs a page and none is left, the youngest running
 * sequence goes back to waiting; the oldest is preempted only when it is alone, so one always gets
 * on.
 *
 * Where pages can be lent (most_pages), a shortage is first a demand: the sequence stalls, it keeps
 * its pages, the others go on, and engine_scheduler_shortage() says what would help. It ends in a
 * preemption after all when no grant can come: when most_pages would be passed; when the demand was
 * refused, and nobody else runs or it has stalled for ENGINE_REFUSED_NS; when there was neither
 * grant nor refusal for patience_ns.
 */
#ifndef XPOOL_ENGINE_SCHEDULER_H
#define XPOOL_ENGINE_SCHEDULER_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "engine/engine.h"
#include "engine/model.h"
#include "engine/pages.h"
#include "engine/text.h"

/* How long a refused demand waits for others of this Instance to end. */
#define ENGINE_REFUSED_NS (100 * XP_NS_PER_MS)
/* How long an admission that would cost cached prefixes waits for free memory instead. */
#define ENGINE_ASK_NS (20 * XP_NS_PER_MS)

typedef enum engine_sequence_state {
    ENGINE_SEQUENCE_FREE = 0,
    ENGINE_SEQUENCE_SUBMITTED, /* in the inbox */
    ENGINE_SEQUENCE_WAITING,
    ENGINE_SEQUENCE_RUNNING,
    ENGINE_SEQUENCE_ENDING, /* holds no KV; its last events wait for room */
} engine_sequence_state_t;

typedef struct engine_sequence {
    /* Set by the submitter. */
    uint64_t request; /* rises with arrival; 0 = the slot is free */
    engine_sampling_t sampling;
    uint64_t seed, arrival_ns;
    int32_t *tokens; /* [max_context + 1]: prompt, then generated */
    uint32_t prompt_count;
    bool cancel; /* under the engine's lock */

    /* Engine thread. */
    engine_sequence_state_t state;
    bool admitted_before, counted;
    bool stalled;      /* running, but its next row has no page */
    uint32_t count;    /* tokens known */
    uint32_t computed; /* of them with K and V in the cache */
    uint32_t *pages;   /* [pages of max_context] */
    uint32_t page_count;
    uint32_t tree_pages;    /* the first so many pages are nodes of the prefix cache */
    uint32_t cached_tokens; /* found in the prefix cache at first admission */
    uint32_t prompt_sent;   /* PROMPT events produced */
    uint32_t preemptions;
    uint64_t admitted_ns, first_token_ns, last_token_ns, stalled_ns;
    uint64_t asked_ns; /* since when its admission spares the prefix cache; 0: it does not */
    engine_text_t text;

    /* How it ended. */
    engine_finish_t finish;
    int32_t stop_token, stop_string; /* -1 = none */
    char error[256];
} engine_sequence_t;

/* What more pages would do: for a decoding sequence that stalls, or else for the request that waits
 * first in line. */
typedef struct engine_shortage {
    enum {
        ENGINE_SHORTAGE_NONE = 0,
        ENGINE_SHORTAGE_PREFILL,
        ENGINE_SHORTAGE_DECODE,
        ENGINE_SHORTAGE_CACHE, /* it could be admitted, at the cost of cached prefixes */
    } kind;
    uint32_t pages;       /* that would end it; in all, not in addition */
    uint64_t deadline_ns; /* UINT64_MAX without an SLO */
    uint64_t since_ns;    /* arrival, or when it stalled */
} engine_shortage_t;

typedef struct engine_scheduler {
    engine_pages_t *pages;
    bool prefix_cache;
    uint32_t max_running, prefill_rows, max_rows, prompt_rows;
    uint64_t ttft_ns, tbt_ns;
    engine_sequence_t **waiting, **running; /* each in order of arrival */
    uint32_t waiting_count, running_count, capacity;
    uint64_t preemptions, stalls;
    /* Set by the engine between steps. */
    uint32_t most_pages;  /* that there can ever be, with what is lent; 0: nothing is lent */
    uint32_t admit_pages; /* new requests wait while live pages would pass it */
    uint64_t patience_ns; /* for an answer to a demand */
    bool refused;         /* the demand reported last cannot be met now */
    bool growing;         /* a grant is being mapped */
    bool hold;            /* nobody is admitted: pages are about to move */
    uint64_t now_ns;      /* of the last engine_scheduler_admit() */
    engine_shortage_t decode_shortage, prefill_shortage;
    uint64_t prefill_row_ns; /* what one more prefill row costs a step; 0 = not known yet */
} engine_scheduler_t;

typedef struct engine_batch {
    engine_sequence_t **sequences; /* of each span */
    engine_span_t *spans;
    uint32_t count, rows;
    uint32_t kind;            /* transport_kind_t */
    uint64_t slo_deadline_ns; /* 0 = none */
} engine_batch_t;

/* capacity: most sequences at once; prompt_rows: most rows a step that PROMPT events are wanted
 * for. */
xp_status_t engine_scheduler_init(engine_pages_t *pages, bool prefix_cache, uint32_t capacity,
                                  uint32_t decode_rows, uint32_t prefill_rows, uint32_t max_rows,
                                  uint32_t prompt_rows, uint64_t ttft_ns, uint64_t tbt_ns,
                                  engine_scheduler_t *scheduler_out);
void engine_scheduler_fini(engine_scheduler_t *scheduler);
xp_status_t engine_batch_init(uint32_t decode_rows, engine_batch_t *batch_out);
void engine_batch_fini(engine_batch_t *batch);

void engine_scheduler_add(engine_scheduler_t *scheduler, engine_sequence_t *sequence);
/* Waiting to running, while pages and places last. */
void engine_scheduler_admit(engine_scheduler_t *scheduler, uint64_t now_ns);
/* Forms the next step's batch; may preempt. An empty batch means that nothing can run. */
void engine_scheduler_pick(engine_scheduler_t *scheduler, engine_batch_t *batch);
/* Tells how long the step of this batch took, so that later chunks keep tbt_ns for those who
 * decode. */
void engine_scheduler_took(engine_scheduler_t *scheduler, const engine_batch_t *batch,
                           uint64_t step_ns);
/* After the step: the batch's rows are computed; full pages enter the prefix cache. */
void engine_scheduler_computed(engine_scheduler_t *scheduler, const engine_batch_t *batch);
/* Of the last admit and pick. */
engine_shortage_t engine_scheduler_shortage(const engine_scheduler_t *scheduler);
/* Of all running and waiting sequences; UINT64_MAX: none. */
uint64_t engine_scheduler_earliest_deadline_ns(const engine_scheduler_t *scheduler);
/* Page ids have changed (engine_pages_move()): the new ones replace the old in every table. */
void engine_scheduler_rename_pages(engine_scheduler_t *scheduler);
/* Takes a sequence out of whatever list it is in and gives its pages back. */
void engine_scheduler_remove(engine_scheduler_t *scheduler, engine_sequence_t *sequence);
#endif
