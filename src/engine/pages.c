/* SPDX-License-Identifier: MIT */
/*
 * Owns page ids, references and the radix prefix cache. Runs on the engine thread only; allocates
 * nothing after init. Never touches KV memory itself.
 */
#include "engine/pages.h"

#include <stdlib.h>
#include <string.h>

static uint32_t page_hash(uint32_t parent, const int32_t *tokens, uint32_t count)
{
    /* The parent's id stands for the whole prefix: ids are unique among live nodes. */
    uint64_t hash = 0x9E3779B97F4A7C15ull ^ parent;
    for (uint32_t i = 0; i < count; i++) {
        hash = (hash ^ (uint32_t)tokens[i]) * 0xD6E8FEB86659FD93ull;
        hash ^= hash >> 32;
    }
    return (uint32_t)hash;
}

xp_status_t engine_pages_init(uint32_t count, uint32_t page_tokens, engine_pages_t *pages_out)
{
    XP_ASSERT(count > 0 && count < ENGINE_PAGE_NONE && page_tokens > 0);
    engine_pages_t pages = {.count = count,
                            .page_tokens = page_tokens,
                            .oldest = ENGINE_PAGE_NONE,
                            .newest = ENGINE_PAGE_NONE};
    uint64_t buckets = 16;
    while (buckets < 2ull * count)
        buckets *= 2;
    pages.bucket_mask = (uint32_t)(buckets - 1);
    pages.nodes = calloc(count, sizeof *pages.nodes);
    pages.tokens = calloc((size_t)count * page_tokens, sizeof *pages.tokens);
    pages.free_stack = calloc(count, sizeof *pages.free_stack);
    pages.buckets = malloc(buckets * sizeof *pages.buckets);
    if (!pages.nodes || !pages.tokens || !pages.free_stack || !pages.buckets) {
        engine_pages_fini(&pages);
        return xp_fail(XP_NO_MEMORY, "page tables of %u KV pages", count);
    }
    memset(pages.buckets, 0xff, buckets * sizeof *pages.buckets);
    /* The lowest ids lie on top and are reused first, so that memory is touched only as it is
     * needed. */
    for (uint32_t i = 0; i < count; i++)
        pages.free_stack[i] = count - 1 - i;
    pages.free_count = count;
    *pages_out = pages;
    return XP_OK;
}

void engine_pages_fini(engine_pages_t *pages)
{
    free(pages->nodes);
    free(pages->tokens);
    free(pages->free_stack);
    free(pages->buckets);
    memset(pages, 0, sizeof *pages);
}

uint32_t engine_pages_available(const engine_pages_t *pages)
{
    return pages->free_count + pages->idle_count;
}

static void lru_remove(engine_pages_t *pages, uint32_t page)
{
    engine_page_node_t *node = &pages->nodes[page];
    if (node->older != ENGINE_PAGE_NONE)
        pages->nodes[node->older].newer = node->newer;
    else
        pages->oldest = node->newer;
    if (node->newer != ENGINE_PAGE_NONE)
        pages->nodes[node->newer].older = node->older;
    else
        pages->newest = node->older;
    pages->idle_count--;
}

static void lru_append(engine_pages_t *pages, uint32_t page)
{
    engine_page_node_t *node = &pages->nodes[page];
    node->older = pages->newest;
    node->newer = ENGINE_PAGE_NONE;
    if (pages->newest != ENGINE_PAGE_NONE)
        pages->nodes[pages->newest].newer = page;
    else
        pages->oldest = page;
    pages->newest = page;
    pages->idle_count++;
}

static void page_make_free(engine_pages_t *pages, uint32_t page)
{
    XP_ASSERT(pages->free_count < pages->count);
    pages->nodes[page].taken = false;
    pages->free_stack[pages->free_count++] = page;
}

/* Takes the least recently used unreferenced node out of the tree. */
static void evict_oldest(engine_pages_t *pages)
{
    uint32_t page = pages->oldest;
    engine_page_node_t *node = &pages->nodes[page];
    XP_ASSERT(node->cached && node->references == 0);
    lru_remove(pages, page);
    uint32_t *link = &pages->buckets[node->hash & pages->bucket_mask];
    while (*link != page)
        link = &pages->nodes[*link].hash_next;
    *link = node->hash_next;
    node->cached = false;
    pages->evictions++;
    page_make_free(pages, page);
}

xp_status_t engine_pages_take(engine_pages_t *pages, uint32_t *page_out)
{
    if (pages->free_count == 0) {
        if (pages->idle_count == 0)
            return XP_RETRY;
        evict_oldest(pages);
    }
    uint32_t page = pages->free_stack[--pages->free_count];
    engine_page_node_t *node = &pages->nodes[page];
    XP_ASSERT(!node->cached && !node->taken);
    node->taken = true;
    *page_out = page;
    return XP_OK;
}

void engine_pages_release(engine_pages_t *pages, uint32_t page)
{
    XP_ASSERT(page < pages->count);
    engine_page_node_t *node = &pages->nodes[page];
    if (!node->cached) {
        XP_ASSERT(node->taken);
        page_make_free(pages, page);
        return;
    }
    XP_ASSERT(node->references > 0);
    if (--node->references == 0)
        lru_append(pages, page);
}

static void page_reference(engine_pages_t *pages, uint32_t page)
{
    engine_page_node_t *node = &pages->nodes[page];
    if (node->references++ == 0)
        lru_remove(pages, page);
}

static uint32_t page_find(const engine_pages_t *pages, uint32_t parent, const int32_t *tokens,
                          uint32_t hash)
{
    uint32_t page = pages->buckets[hash & pages->bucket_mask];
    while (page != ENGINE_PAGE_NONE) {
        const engine_page_node_t *node = &pages->nodes[page];
        if (node->hash == hash && node->parent == parent &&
            memcmp(pages->tokens + (size_t)page * pages->page_tokens, tokens,
                   pages->page_tokens * sizeof *tokens) == 0)
            return page;
        page = node->hash_next;
    }
    return ENGINE_PAGE_NONE;
}

uint32_t engine_pages_match(engine_pages_t *pages, const int32_t *tokens, uint32_t max_pages,
                            uint32_t *pages_out)
{
    uint32_t parent = ENGINE_PAGE_NONE, matched = 0;
    while (matched < max_pages) {
        const int32_t *part = tokens + (size_t)matched * pages->page_tokens;
        uint32_t hash = page_hash(parent, part, pages->page_tokens);
        uint32_t page = page_find(pages, parent, part, hash);
        if (page == ENGINE_PAGE_NONE)
            break;
        page_reference(pages, page);
        pages_out[matched++] = page;
        parent = page;
    }
    return matched;
}

uint32_t engine_pages_insert(engine_pages_t *pages, uint32_t parent, const int32_t *tokens,
                             uint32_t page)
{
    engine_page_node_t *node = &pages->nodes[page];
    XP_ASSERT(node->taken && !node->cached);
    uint32_t hash = page_hash(parent, tokens, pages->page_tokens);
    uint32_t existing = page_find(pages, parent, tokens, hash);
    if (existing != ENGINE_PAGE_NONE) {
        page_reference(pages, existing);
        page_make_free(pages, page);
        return existing;
    }
    memcpy(pages->tokens + (size_t)page * pages->page_tokens, tokens,
           pages->page_tokens * sizeof *tokens);
    uint32_t *bucket = &pages->buckets[hash & pages->bucket_mask];
    *node = (engine_page_node_t){.parent = parent,
                                 .references = 1,
                                 .hash_next = *bucket,
                                 .hash = hash,
                                 .cached = true,
                                 .older = ENGINE_PAGE_NONE,
                                 .newer = ENGINE_PAGE_NONE};
    *bucket = page;
    return page;
}

void engine_pages_flush(engine_pages_t *pages)
{
    while (pages->idle_count > 0)
        evict_oldest(pages);
}
