/* SPDX-License-Identifier: MIT */
/*
 * KV pages by id: the free list, and the radix prefix cache over full pages.
 *
 * A page is in one of three states. Free. Private: taken by one sequence, being filled. Cached:
 * full and a node of the radix tree, found by (parent node, its tokens); sequences that use it hold
 * a reference. A cached page without references stays until the free list is empty and it is the
 * least recently used one. Private and referenced pages are live.
 *
 * A sequence that refers to a node refers to all its ancestors too, and gives them back deepest
 * first (engine_pages_release()), so in LRU order a node always stands before its parent: the
 * oldest unreferenced node never has a child.
 *
 * Only ids below `limit` are handed out, the lowest first, so that what is in use stays near the
 * beginning. Lowering the limit withdraws a suffix: cached pages there are evicted, live ones stay
 * until their users leave or engine_pages_move() gives them another id.
 */
#ifndef XPOOL_ENGINE_PAGES_H
#define XPOOL_ENGINE_PAGES_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

#define ENGINE_PAGE_NONE UINT32_MAX

typedef struct engine_page_node {
    uint64_t name;        /* of a cached page: stands for its prefix, whatever its id becomes */
    uint32_t parent;      /* ENGINE_PAGE_NONE at the root */
    uint32_t child;       /* one of them */
    uint32_t left, right; /* siblings; those at the root have none */
    uint32_t references;
    uint32_t hash_next;    /* chain of one bucket */
    uint32_t older, newer; /* LRU links, valid while references is 0 */
    uint32_t hash;
    bool cached;
    bool taken; /* private; guards against a page given back twice */
} engine_page_node_t;

/* Levels of 64-way words over all ids: a bit is set where something below it is. */
#define ENGINE_PAGE_SET_LEVELS 6
typedef struct engine_page_set {
    uint64_t *words[ENGINE_PAGE_SET_LEVELS]; /* [0]: one bit an id; the last level is one word */
    uint32_t levels;
} engine_page_set_t;

typedef struct engine_pages {
    uint32_t count, page_tokens;
    uint32_t limit; /* <= count; ids at or above it are not handed out */
    engine_page_node_t *nodes;
    int32_t *tokens;        /* [count][page_tokens], of cached pages */
    engine_page_set_t free; /* all free ids, those above the limit too */
    uint32_t free_count;    /* below the limit */
    uint32_t *buckets;
    uint32_t bucket_mask;
    uint32_t oldest, newest; /* LRU list of unreferenced cached pages */
    uint32_t idle_count;     /* its length */
    uint32_t live_count;
    uint32_t idle_above, live_above; /* of them, at or above the limit */
    uint32_t *moved;                 /* [count]: where a page went, since engine_pages_settle() */
    uint64_t next_name, evictions, moves;
} engine_pages_t;

xp_status_t engine_pages_init(uint32_t count, uint32_t page_tokens, engine_pages_t *pages_out);
void engine_pages_fini(engine_pages_t *pages); /* accepts a zeroed object */

/* Pages engine_pages_take() can deliver: free ones and unreferenced cached ones, below the limit.
 */
uint32_t engine_pages_available(const engine_pages_t *pages);
/* A private page. XP_RETRY, without a message, when none is available: a scheduling miss. */
xp_status_t engine_pages_take(engine_pages_t *pages, uint32_t *page_out);
/* Gives back what a sequence holds of one page, private or cached. Call from the last page to the
 * first. */
void engine_pages_release(engine_pages_t *pages, uint32_t page);

/* Longest chain of cached pages that begins `tokens`, at most max_pages; each is referenced.
 * Returns their number. */
uint32_t engine_pages_match(engine_pages_t *pages, const int32_t *tokens, uint32_t max_pages,
                            uint32_t *pages_out);
/* Makes the full private `page` a child of `parent` (a cached page the caller refers to, or NONE).
 * When the same node exists already, `page` becomes free and the existing one is referenced
 * instead. Returns the page the caller now holds. */
uint32_t engine_pages_insert(engine_pages_t *pages, uint32_t parent, const int32_t *tokens,
                             uint32_t page);
/* Frees every unreferenced cached page. */
void engine_pages_flush(engine_pages_t *pages);

/* From now on ids below `limit` (1 .. count) are handed out. Unreferenced cached pages at or above
 * it are evicted in LRU order; one that cached pages below it follow stays for engine_pages_move(),
 * which keeps those pages findable. */
void engine_pages_set_limit(engine_pages_t *pages, uint32_t limit);
/* The end of what is in use: one more than the highest id that is not free. `from`: where to begin
 * looking, an id that is known to be at or above it. */
uint32_t engine_pages_end(const engine_pages_t *pages, uint32_t from);
/* Gives the highest page in use, if it is at or above the limit, the lowest id that can be had; for
 * a live page unreferenced cached ones below the limit are evicted. False when there is nothing to
 * move, or no lower id. The caller copies the page's rows before anything else, and before the next
 * step puts engine_pages_moved() of every id that a sequence holds in its place, then calls
 * engine_pages_settle(). `from`: as for engine_pages_end(). */
bool engine_pages_move(engine_pages_t *pages, uint32_t from, uint32_t *from_out, uint32_t *to_out);
uint32_t engine_pages_moved(const engine_pages_t *pages, uint32_t page);
void engine_pages_settle(engine_pages_t *pages);
#endif
