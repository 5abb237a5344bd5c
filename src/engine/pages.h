/* SPDX-License-Identifier: MIT */
/*
 * KV pages by id: the free list, and the radix prefix cache over full pages.
 *
 * A page is in one of three states. Free. Private: taken by one sequence, being filled. Cached:
 * full and a node of the radix tree, found by (parent node, its tokens); sequences that use it hold
 * a reference. A cached page without references stays until the free list is empty and it is the
 * least recently used one.
 *
 * A sequence that refers to a node refers to all its ancestors too, and gives them back deepest
 * first (engine_pages_release()), so in LRU order a node always stands before its parent: the
 * oldest unreferenced node never has a child.
 */
#ifndef XPOOL_ENGINE_PAGES_H
#define XPOOL_ENGINE_PAGES_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

#define ENGINE_PAGE_NONE UINT32_MAX

typedef struct engine_page_node {
    uint32_t parent; /* ENGINE_PAGE_NONE at the root */
    uint32_t references;
    uint32_t hash_next;    /* chain of one bucket */
    uint32_t older, newer; /* LRU links, valid while references is 0 */
    uint32_t hash;
    bool cached;
    bool taken; /* private; guards against a page given back twice */
} engine_page_node_t;

typedef struct engine_pages {
    uint32_t count, page_tokens;
    engine_page_node_t *nodes;
    int32_t *tokens; /* [count][page_tokens], of cached pages */
    uint32_t *free_stack;
    uint32_t free_count;
    uint32_t *buckets;
    uint32_t bucket_mask;
    uint32_t oldest, newest; /* LRU list of unreferenced cached pages */
    uint32_t idle_count;     /* its length */
    uint64_t evictions;
} engine_pages_t;

xp_status_t engine_pages_init(uint32_t count, uint32_t page_tokens, engine_pages_t *pages_out);
void engine_pages_fini(engine_pages_t *pages); /* accepts a zeroed object */

/* Pages engine_pages_take() can deliver: free ones and unreferenced cached ones. */
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
#endif
