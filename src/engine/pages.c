/* SPDX-License-Identifier: MIT */
/*
 * Owns page ids, references and the radix prefix cache. Runs on the engine thread only; allocates
 * nothing after init. Never touches KV memory itself.
 */
#include "engine/pages.h"

#include <stdlib.h>
#include <string.h>

/* ---- set of ids ------------------------------------------------------------------------------ */

static xp_status_t set_init(uint32_t count, engine_page_set_t *set)
{
    uint64_t words = count;
    do {
        words = (words + 63) / 64;
        XP_ASSERT(set->levels < ENGINE_PAGE_SET_LEVELS);
        set->words[set->levels] = calloc(words, sizeof(uint64_t));
        if (!set->words[set->levels++])
            return xp_fail(XP_NO_MEMORY, "a set of %u KV pages", count);
    } while (words > 1);
    return XP_OK;
}

static void set_fini(engine_page_set_t *set)
{
    for (uint32_t level = 0; level < set->levels; level++)
        free(set->words[level]);
}

static void set_add(engine_page_set_t *set, uint32_t id)
{
    for (uint32_t level = 0; level < set->levels; level++, id /= 64)
        set->words[level][id / 64] |= 1ull << id % 64;
}

static void set_remove(engine_page_set_t *set, uint32_t id)
{
    for (uint32_t level = 0; level < set->levels; level++, id /= 64)
        if ((set->words[level][id / 64] &= ~(1ull << id % 64)) != 0)
            return;
}

static bool set_holds(const engine_page_set_t *set, uint32_t id)
{
    return (set->words[0][id / 64] >> id % 64 & 1) != 0;
}

/* The lowest id, ENGINE_PAGE_NONE of an empty set. */
static uint32_t set_lowest(const engine_page_set_t *set)
{
    uint32_t at = 0;
    if (set->words[set->levels - 1][0] == 0)
        return ENGINE_PAGE_NONE;
    for (uint32_t level = set->levels; level-- > 0;)
        at = at * 64 + (uint32_t)__builtin_ctzll(set->words[level][at]);
    return at;
}

/* ---- creation -------------------------------------------------------------------------------- */

static uint32_t page_hash(uint64_t parent_name, const int32_t *tokens, uint32_t count)
{
    /* The parent's name stands for the whole prefix: no two nodes ever have the same. */
    uint64_t hash = 0x9E3779B97F4A7C15ull ^ parent_name;
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
                            .limit = count,
                            .free_count = count,
                            .oldest = ENGINE_PAGE_NONE,
                            .newest = ENGINE_PAGE_NONE};
    uint64_t buckets = 16;
    while (buckets < 2ull * count)
        buckets *= 2;
    pages.bucket_mask = (uint32_t)(buckets - 1);
    xp_status_t status = set_init(count, &pages.free);
    pages.nodes = calloc(count, sizeof *pages.nodes);
    pages.tokens = calloc((size_t)count * page_tokens, sizeof *pages.tokens);
    pages.moved = malloc(count * sizeof *pages.moved);
    pages.buckets = malloc(buckets * sizeof *pages.buckets);
    if (status != XP_OK || !pages.nodes || !pages.tokens || !pages.moved || !pages.buckets) {
        engine_pages_fini(&pages);
        return xp_fail(XP_NO_MEMORY, "page tables of %u KV pages", count);
    }
    memset(pages.buckets, 0xff, buckets * sizeof *pages.buckets);
    engine_pages_settle(&pages);
    for (uint32_t i = 0; i < count; i++)
        set_add(&pages.free, i);
    *pages_out = pages;
    return XP_OK;
}

void engine_pages_fini(engine_pages_t *pages)
{
    free(pages->nodes);
    free(pages->tokens);
    free(pages->moved);
    set_fini(&pages->free);
    free(pages->buckets);
    memset(pages, 0, sizeof *pages);
}

uint32_t engine_pages_available(const engine_pages_t *pages)
{
    return pages->free_count + pages->idle_count - pages->idle_above;
}

/* ---- states ---------------------------------------------------------------------------------- */

static void count_live(engine_pages_t *pages, uint32_t page, uint32_t change)
{
    pages->live_count += change;
    if (page >= pages->limit)
        pages->live_above += change;
}

static void count_idle(engine_pages_t *pages, uint32_t page, uint32_t change)
{
    pages->idle_count += change;
    if (page >= pages->limit)
        pages->idle_above += change;
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
    count_idle(pages, page, -1u);
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
    count_idle(pages, page, 1);
}

static void page_make_free(engine_pages_t *pages, uint32_t page)
{
    XP_ASSERT(!set_holds(&pages->free, page));
    pages->nodes[page].taken = false;
    set_add(&pages->free, page);
    if (page < pages->limit)
        pages->free_count++;
}

static void page_make_used(engine_pages_t *pages, uint32_t page)
{
    XP_ASSERT(set_holds(&pages->free, page));
    set_remove(&pages->free, page);
    if (page < pages->limit)
        pages->free_count--;
}

/* ---- tree ------------------------------------------------------------------------------------ */

static void tree_link(engine_pages_t *pages, uint32_t page)
{
    engine_page_node_t *node = &pages->nodes[page];
    node->left = node->right = ENGINE_PAGE_NONE;
    if (node->parent == ENGINE_PAGE_NONE)
        return;
    engine_page_node_t *parent = &pages->nodes[node->parent];
    node->right = parent->child;
    if (node->right != ENGINE_PAGE_NONE)
        pages->nodes[node->right].left = page;
    parent->child = page;
}

static void tree_unlink(engine_pages_t *pages, uint32_t page)
{
    const engine_page_node_t *node = &pages->nodes[page];
    if (node->right != ENGINE_PAGE_NONE)
        pages->nodes[node->right].left = node->left;
    if (node->left != ENGINE_PAGE_NONE)
        pages->nodes[node->left].right = node->right;
    else if (node->parent != ENGINE_PAGE_NONE)
        pages->nodes[node->parent].child = node->right;
}

/* What refers to `page` in its bucket's chain. */
static uint32_t *bucket_link(engine_pages_t *pages, uint32_t page)
{
    uint32_t *link = &pages->buckets[pages->nodes[page].hash & pages->bucket_mask];
    while (*link != page)
        link = &pages->nodes[*link].hash_next;
    return link;
}

/* Takes an unreferenced node without children out of the tree. */
static void evict(engine_pages_t *pages, uint32_t page)
{
    engine_page_node_t *node = &pages->nodes[page];
    XP_ASSERT(node->cached && node->references == 0 && node->child == ENGINE_PAGE_NONE);
    lru_remove(pages, page);
    *bucket_link(pages, page) = node->hash_next;
    tree_unlink(pages, page);
    node->cached = false;
    pages->evictions++;
    page_make_free(pages, page);
}

/* An unreferenced node, and all that follow it: they are unreferenced too. */
static void evict_branch(engine_pages_t *pages, uint32_t page)
{
    for (uint32_t at = page; pages->nodes[page].cached;) {
        const uint32_t child = pages->nodes[at].child, parent = pages->nodes[at].parent;
        if (child != ENGINE_PAGE_NONE) {
            at = child;
            continue;
        }
        evict(pages, at);
        at = parent;
    }
}

/* ---- taking and giving ----------------------------------------------------------------------- */

xp_status_t engine_pages_take(engine_pages_t *pages, uint32_t *page_out)
{
    while (pages->free_count == 0) {
        if (pages->idle_count == pages->idle_above)
            return XP_RETRY;
        evict(pages, pages->oldest); /* perhaps one above the limit: then the next */
    }
    uint32_t page = set_lowest(&pages->free);
    engine_page_node_t *node = &pages->nodes[page];
    XP_ASSERT(page < pages->limit && !node->cached && !node->taken);
    page_make_used(pages, page);
    count_live(pages, page, 1);
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
        count_live(pages, page, -1u);
        page_make_free(pages, page);
        return;
    }
    XP_ASSERT(node->references > 0);
    if (--node->references > 0)
        return;
    count_live(pages, page, -1u);
    lru_append(pages, page);
    if (page >= pages->limit && node->child == ENGINE_PAGE_NONE)
        evict(pages, page); /* it stayed for its users only */
}

static void page_reference(engine_pages_t *pages, uint32_t page)
{
    engine_page_node_t *node = &pages->nodes[page];
    if (node->references++ > 0)
        return;
    lru_remove(pages, page);
    count_live(pages, page, 1);
}

/* ---- prefix cache ---------------------------------------------------------------------------- */

static uint64_t page_name(const engine_pages_t *pages, uint32_t page)
{
    return page == ENGINE_PAGE_NONE ? 0 : pages->nodes[page].name;
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
        uint32_t hash = page_hash(page_name(pages, parent), part, pages->page_tokens);
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
    uint32_t hash = page_hash(page_name(pages, parent), tokens, pages->page_tokens);
    uint32_t existing = page_find(pages, parent, tokens, hash);
    if (existing != ENGINE_PAGE_NONE) {
        page_reference(pages, existing);
        count_live(pages, page, -1u);
        page_make_free(pages, page);
        return existing;
    }
    memcpy(pages->tokens + (size_t)page * pages->page_tokens, tokens,
           pages->page_tokens * sizeof *tokens);
    uint32_t *bucket = &pages->buckets[hash & pages->bucket_mask];
    *node = (engine_page_node_t){.name = ++pages->next_name,
                                 .parent = parent,
                                 .child = ENGINE_PAGE_NONE,
                                 .references = 1,
                                 .hash_next = *bucket,
                                 .hash = hash,
                                 .cached = true,
                                 .older = ENGINE_PAGE_NONE,
                                 .newer = ENGINE_PAGE_NONE};
    *bucket = page;
    tree_link(pages, page);
    return page;
}

void engine_pages_flush(engine_pages_t *pages)
{
    while (pages->idle_count > 0)
        evict(pages, pages->oldest);
}

/* ---- limit ----------------------------------------------------------------------------------- */

static void recount(engine_pages_t *pages)
{
    pages->free_count = pages->idle_above = pages->live_above = 0;
    for (uint32_t page = 0; page < pages->count; page++) {
        const engine_page_node_t *node = &pages->nodes[page];
        if (set_holds(&pages->free, page))
            pages->free_count += page < pages->limit;
        else if (page >= pages->limit && node->cached && node->references == 0)
            pages->idle_above++;
        else if (page >= pages->limit)
            pages->live_above++;
    }
}

void engine_pages_set_limit(engine_pages_t *pages, uint32_t limit)
{
    XP_ASSERT(limit > 0 && limit <= pages->count);
    pages->limit = limit;
    recount(pages);
    for (uint32_t page = pages->oldest, next; page != ENGINE_PAGE_NONE; page = next) {
        next = pages->nodes[page].newer;
        if (page >= limit && pages->nodes[page].child == ENGINE_PAGE_NONE)
            evict(pages, page);
    }
}

uint32_t engine_pages_end(const engine_pages_t *pages, uint32_t from)
{
    uint32_t end = from < pages->count ? from : pages->count;
    while (end > 0 && set_holds(&pages->free, end - 1))
        end--;
    return end;
}

/* `page` takes the free id `to`, with all that refers to it here. */
static void page_rename(engine_pages_t *pages, uint32_t page, uint32_t to)
{
    engine_page_node_t *node = &pages->nodes[page];
    const bool idle = node->cached && node->references == 0;
    page_make_used(pages, to);
    if (idle)
        count_idle(pages, to, 1);
    else
        count_live(pages, to, 1);
    if (node->cached) {
        *bucket_link(pages, page) = to;
        memcpy(pages->tokens + (size_t)to * pages->page_tokens,
               pages->tokens + (size_t)page * pages->page_tokens,
               pages->page_tokens * sizeof *pages->tokens);
        for (uint32_t child = node->child; child != ENGINE_PAGE_NONE;
             child = pages->nodes[child].right)
            pages->nodes[child].parent = to;
        if (node->right != ENGINE_PAGE_NONE)
            pages->nodes[node->right].left = to;
        if (node->left != ENGINE_PAGE_NONE)
            pages->nodes[node->left].right = to;
        else if (node->parent != ENGINE_PAGE_NONE)
            pages->nodes[node->parent].child = to;
    }
    if (idle) {
        *(node->older != ENGINE_PAGE_NONE ? &pages->nodes[node->older].newer : &pages->oldest) = to;
        *(node->newer != ENGINE_PAGE_NONE ? &pages->nodes[node->newer].older : &pages->newest) = to;
        count_idle(pages, page, -1u);
    } else {
        count_live(pages, page, -1u);
    }
    pages->nodes[to] = *node;
    node->cached = false;
    page_make_free(pages, page);
    pages->moved[page] = to;
    pages->moves++;
}

bool engine_pages_move(engine_pages_t *pages, uint32_t from, uint32_t *from_out, uint32_t *to_out)
{
    for (;;) {
        const uint32_t end = engine_pages_end(pages, from);
        if (end <= pages->limit)
            return false;
        const uint32_t page = end - 1;
        const engine_page_node_t *node = &pages->nodes[page];
        if (node->cached && node->references == 0 && pages->free_count <= pages->live_above) {
            /* The free ids are for those that cannot be done without. */
            evict_branch(pages, page);
            continue;
        }
        while (pages->free_count == 0 && pages->idle_count > 0)
            evict(pages, pages->oldest);
        const uint32_t to = set_lowest(&pages->free);
        if (to > page) /* also when there is none */
            return false;
        page_rename(pages, page, to);
        *from_out = page;
        *to_out = to;
        return true;
    }
}

uint32_t engine_pages_moved(const engine_pages_t *pages, uint32_t page)
{
    while (pages->moved[page] != ENGINE_PAGE_NONE)
        page = pages->moved[page];
    return page;
}

void engine_pages_settle(engine_pages_t *pages)
{
    memset(pages->moved, 0xff, pages->count * sizeof *pages->moved);
}
