/* SPDX-License-Identifier: MIT */
/* Page ids, references and the prefix cache: rules one by one, then against a plain model. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/pages.h"

#define PAGE 4u

static engine_pages_t make(uint32_t count)
{
    engine_pages_t pages;
    assert_int_equal(engine_pages_init(count, PAGE, &pages), XP_OK);
    return pages;
}

/* Takes pages for `count` full pages of tokens and puts them into the cache. */
static void fill(engine_pages_t *pages, const int32_t *tokens, uint32_t count, uint32_t *held)
{
    uint32_t parent = ENGINE_PAGE_NONE;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t page;
        assert_int_equal(engine_pages_take(pages, &page), XP_OK);
        held[i] = parent = engine_pages_insert(pages, parent, tokens + i * PAGE, page);
    }
}

static void release_all(engine_pages_t *pages, const uint32_t *held, uint32_t count)
{
    while (count > 0)
        engine_pages_release(pages, held[--count]);
}

static void low_ids_come_first(void **state)
{
    (void)state;
    engine_pages_t pages = make(3);
    uint32_t page;
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(engine_pages_take(&pages, &page), XP_OK);
        assert_int_equal(page, i);
    }
    assert_int_equal(engine_pages_take(&pages, &page), XP_RETRY);
    engine_pages_release(&pages, 1);
    assert_int_equal(engine_pages_take(&pages, &page), XP_OK);
    assert_int_equal(page, 1);
    engine_pages_fini(&pages);
}

static void prefix_is_found_and_shared(void **state)
{
    (void)state;
    engine_pages_t pages = make(8);
    int32_t tokens[12] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
    uint32_t held[3], found[3];
    fill(&pages, tokens, 3, held);
    assert_int_equal(engine_pages_match(&pages, tokens, 3, found), 3);
    assert_memory_equal(held, found, sizeof held);
    assert_int_equal(pages.nodes[held[2]].references, 2);
    tokens[5] = 99;
    uint32_t other[3];
    assert_int_equal(engine_pages_match(&pages, tokens, 3, other), 1);
    assert_int_equal(other[0], held[0]);
    /* The same page content after another prefix is another node. */
    int32_t moved[8] = {5, 6, 7, 8, 1, 2, 3, 4};
    assert_int_equal(engine_pages_match(&pages, moved, 2, other + 1), 0);
    release_all(&pages, other, 1);
    release_all(&pages, found, 3);
    release_all(&pages, held, 3);
    assert_int_equal(engine_pages_available(&pages), 8);
    assert_int_equal(pages.idle_count, 3);
    engine_pages_flush(&pages);
    assert_int_equal(pages.free_count, 8);
    assert_int_equal(engine_pages_match(&pages, tokens, 3, found), 0);
    engine_pages_fini(&pages);
}

static void twin_pages_merge(void **state)
{
    (void)state;
    engine_pages_t pages = make(8);
    const int32_t tokens[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    uint32_t first[2], second[2];
    fill(&pages, tokens, 2, first);
    fill(&pages, tokens, 2, second); /* computed by another sequence at the same time */
    assert_memory_equal(first, second, sizeof first);
    assert_int_equal(pages.free_count, 6);
    release_all(&pages, first, 2);
    assert_int_equal(pages.idle_count, 0);
    release_all(&pages, second, 2);
    assert_int_equal(pages.idle_count, 2);
    engine_pages_fini(&pages);
}

static void least_recently_used_leaf_goes_first(void **state)
{
    (void)state;
    engine_pages_t pages = make(4);
    const int32_t a[8] = {1, 1, 1, 1, 2, 2, 2, 2}, b[8] = {3, 3, 3, 3, 4, 4, 4, 4};
    uint32_t held_a[2], held_b[2], page, found[2];
    fill(&pages, a, 2, held_a);
    fill(&pages, b, 2, held_b);
    release_all(&pages, held_a, 2);
    release_all(&pages, held_b, 2);
    assert_int_equal(engine_pages_take(&pages, &page), XP_OK);
    assert_int_equal(page, held_a[1]); /* the leaf of the older chain, not its root */
    assert_int_equal(engine_pages_match(&pages, a, 2, found), 1);
    engine_pages_release(&pages, found[0]); /* used again: now the youngest */
    uint32_t next;
    assert_int_equal(engine_pages_take(&pages, &next), XP_OK);
    assert_int_equal(next, held_b[1]);
    assert_int_equal(engine_pages_match(&pages, a, 1, found), 1);
    engine_pages_release(&pages, found[0]);
    engine_pages_fini(&pages);
}

/* Random sequences come, grow, share and go; a plain list of what is held is the reference. */
static void random_against_plain_counts(void **state)
{
    (void)state;
    enum { PAGES = 24, SEQUENCES = 6, LONGEST = 6 };
    engine_pages_t pages = make(PAGES);
    uint32_t held[SEQUENCES][LONGEST], length[SEQUENCES] = {0};
    int32_t tokens[SEQUENCES][LONGEST * PAGE];
    srand(3);
    for (uint32_t turn = 0; turn < 20000; turn++) {
        uint32_t s = (uint32_t)rand() % SEQUENCES;
        if (length[s] > 0) {
            if (rand() % 2) {
                release_all(&pages, held[s], length[s]);
                length[s] = 0;
            }
        } else {
            uint32_t want = 1 + (uint32_t)rand() % LONGEST;
            for (uint32_t i = 0; i < want * PAGE; i++)
                tokens[s][i] = i % PAGE == 0 ? rand() % 3 : 7; /* few contents: many hits */
            uint32_t got = engine_pages_match(&pages, tokens[s], want, held[s]);
            for (uint32_t i = 0; i < got; i++)
                assert_memory_equal(pages.tokens + held[s][i] * PAGE, tokens[s] + i * PAGE,
                                    PAGE * sizeof(int32_t));
            while (got < want) {
                uint32_t page;
                if (engine_pages_take(&pages, &page) != XP_OK)
                    break;
                held[s][got] =
                    engine_pages_insert(&pages, got ? held[s][got - 1] : ENGINE_PAGE_NONE,
                                        tokens[s] + got * PAGE, page);
                got++;
            }
            length[s] = got;
        }
        uint32_t counts[PAGES] = {0}, used = 0;
        for (uint32_t i = 0; i < SEQUENCES; i++)
            for (uint32_t j = 0; j < length[i]; j++)
                used += counts[held[i][j]]++ == 0;
        for (uint32_t i = 0; i < PAGES; i++)
            assert_int_equal(pages.nodes[i].cached ? pages.nodes[i].references : 0, counts[i]);
        assert_int_equal(engine_pages_available(&pages), PAGES - used);
    }
    engine_pages_fini(&pages);
}

/* ---- limit and moves ------------------------------------------------------------------------- */

/* Moves all there is to move; what the test keeps as rows is copied, held ids are renamed. */
static uint32_t move_all(engine_pages_t *pages, int32_t *rows, uint32_t *const *held,
                         const uint32_t *lengths, uint32_t holders)
{
    uint32_t from, to, moves = 0;
    while (engine_pages_move(pages, pages->count, &from, &to)) {
        assert_true(to < from);
        assert_true(++moves <= pages->count);
        if (rows)
            memcpy(rows + to * PAGE, rows + from * PAGE, PAGE * sizeof *rows);
    }
    for (uint32_t h = 0; h < holders; h++)
        for (uint32_t i = 0; i < lengths[h]; i++)
            held[h][i] = engine_pages_moved(pages, held[h][i]);
    engine_pages_settle(pages);
    return moves;
}

static void nothing_above_the_limit_is_handed_out(void **state)
{
    (void)state;
    engine_pages_t pages = make(200);
    uint32_t page;
    engine_pages_set_limit(&pages, 70);
    assert_int_equal(engine_pages_available(&pages), 70);
    for (uint32_t i = 0; i < 70; i++) {
        assert_int_equal(engine_pages_take(&pages, &page), XP_OK);
        assert_int_equal(page, i);
    }
    assert_int_equal(engine_pages_take(&pages, &page), XP_RETRY);
    engine_pages_set_limit(&pages, 72);
    assert_int_equal(engine_pages_take(&pages, &page), XP_OK);
    assert_int_equal(page, 70);
    engine_pages_release(&pages, 13); /* the lowest free id comes first, whatever was freed last */
    engine_pages_release(&pages, 5);
    assert_int_equal(engine_pages_take(&pages, &page), XP_OK);
    assert_int_equal(page, 5);
    assert_int_equal(engine_pages_end(&pages, 200), 71);
    engine_pages_fini(&pages);
}

/* Two finished prompts below, one above, and a request that still runs at the very end. */
static void a_live_tail_moves_and_only_the_suffix_is_forgotten(void **state)
{
    (void)state;
    engine_pages_t pages = make(16);
    const int32_t a[8] = {1, 1, 1, 1, 2, 2, 2, 2}, b[8] = {3, 3, 3, 3, 4, 4, 4, 4};
    const int32_t c[8] = {5, 5, 5, 5, 6, 6, 6, 6}, d[8] = {7, 7, 7, 7, 8, 8, 8, 8};
    uint32_t held[4][2], gap[4], found[2];
    fill(&pages, a, 2, held[0]);
    fill(&pages, b, 2, held[1]);
    for (uint32_t i = 0; i < 4; i++)
        assert_int_equal(engine_pages_take(&pages, &gap[i]), XP_OK);
    fill(&pages, c, 2, held[2]);
    fill(&pages, d, 2, held[3]);
    release_all(&pages, held[0], 2);
    release_all(&pages, held[1], 2);
    release_all(&pages, held[2], 2);
    release_all(&pages, gap, 4);
    assert_int_equal(engine_pages_end(&pages, 16), 12);

    engine_pages_set_limit(&pages, 6); /* 4 cached, 2 free below; c and the live d above */
    uint32_t *holders[1] = {held[3]}, lengths[1] = {2};
    assert_int_equal(move_all(&pages, NULL, holders, lengths, 1), 2);
    assert_int_equal(engine_pages_end(&pages, 16), 6);
    assert_int_equal(pages.evictions, 2);
    assert_int_equal(engine_pages_match(&pages, c, 2, found), 0);
    assert_int_equal(engine_pages_match(&pages, a, 2, found), 2);
    release_all(&pages, found, 2);
    assert_int_equal(engine_pages_match(&pages, b, 2, found), 2);
    release_all(&pages, found, 2);
    /* The moved request is found under its new ids. */
    assert_int_equal(engine_pages_match(&pages, d, 2, found), 2);
    assert_memory_equal(found, held[3], sizeof found);
    release_all(&pages, found, 2);

    /* Further down than a live request and the cache fit: the oldest of the cache gives way. */
    engine_pages_set_limit(&pages, 3);
    move_all(&pages, NULL, holders, lengths, 1);
    assert_int_equal(engine_pages_end(&pages, 16), 3);
    assert_int_equal(engine_pages_match(&pages, d, 2, found), 2);
    release_all(&pages, found, 2);
    /* Further down than live requests alone: they are as low as they can be, and stay. */
    engine_pages_set_limit(&pages, 1);
    move_all(&pages, NULL, holders, lengths, 1);
    assert_int_equal(engine_pages_end(&pages, 16), 2);
    assert_int_equal(pages.live_count, 2);
    assert_int_equal(engine_pages_available(&pages), 0);
    release_all(&pages, held[3], 2);
    assert_int_equal(engine_pages_available(&pages), 1);
    engine_pages_fini(&pages);
}

/* A cached page above the limit whose continuation lies below keeps that findable: it moves where
 * there is room, and takes its branch along where there is none. */
static void a_parent_above_moves_or_takes_its_branch_along(void **state)
{
    (void)state;
    const int32_t a[8] = {1, 1, 1, 1, 2, 2, 2, 2};
    for (uint32_t room = 0; room < 2; room++) {
        engine_pages_t pages = make(8);
        uint32_t low[4], parent, child, found[2];
        for (uint32_t i = 0; i < 4; i++)
            assert_int_equal(engine_pages_take(&pages, &low[i]), XP_OK);
        assert_int_equal(engine_pages_take(&pages, &parent), XP_OK);
        parent = engine_pages_insert(&pages, ENGINE_PAGE_NONE, a, parent);
        engine_pages_release(&pages, low[1]);
        assert_int_equal(engine_pages_take(&pages, &child), XP_OK);
        child = engine_pages_insert(&pages, parent, a + PAGE, child);
        assert_int_equal(parent, 4);
        assert_int_equal(child, 1);
        engine_pages_release(&pages, child);
        engine_pages_release(&pages, parent);
        if (room)
            engine_pages_release(&pages, low[3]);
        engine_pages_set_limit(&pages, 4);
        move_all(&pages, NULL, NULL, NULL, 0);
        assert_true(engine_pages_end(&pages, 8) <= 4);
        assert_int_equal(engine_pages_match(&pages, a, 2, found), room ? 2 : 0);
        assert_int_equal(pages.evictions, room ? 0 : 2);
        engine_pages_fini(&pages);
    }
}

enum { M_PAGES = 40, M_SEQUENCES = 7, M_LONGEST = 7 };

typedef struct history {
    engine_pages_t pages;
    int32_t rows[M_PAGES * PAGE]; /* what the KV Cache would hold of each page */
    uint32_t held[M_SEQUENCES][M_LONGEST], length[M_SEQUENCES], full[M_SEQUENCES];
    int32_t tokens[M_SEQUENCES][M_LONGEST * PAGE];
} history_t;

static void history_begin(history_t *h, uint32_t s)
{
    uint32_t want = 1 + (uint32_t)rand() % M_LONGEST;
    for (uint32_t i = 0; i < want * PAGE; i++)
        h->tokens[s][i] = i % PAGE == 0 ? rand() % 3 : 7;
    uint32_t got = engine_pages_match(&h->pages, h->tokens[s], want, h->held[s]);
    h->full[s] = got;
    while (got < want && engine_pages_take(&h->pages, &h->held[s][got]) == XP_OK) {
        assert_true(h->held[s][got] < h->pages.limit);
        memcpy(h->rows + h->held[s][got] * PAGE, h->tokens[s] + got * PAGE, PAGE * sizeof(int32_t));
        got++;
    }
    h->length[s] = got;
}

static void history_check(const history_t *h)
{
    uint32_t users[M_PAGES] = {0}, live = 0, live_below = 0;
    for (uint32_t s = 0; s < M_SEQUENCES; s++)
        for (uint32_t i = 0; i < h->length[s]; i++) {
            const uint32_t page = h->held[s][i];
            /* Its own rows, wherever they are by now; nobody else's. */
            assert_memory_equal(h->rows + page * PAGE, h->tokens[s] + i * PAGE,
                                PAGE * sizeof(int32_t));
            if (users[page]++ == 0) {
                live++;
                live_below += page < h->pages.limit;
            }
        }
    assert_int_equal(h->pages.live_count, live);
    assert_int_equal(h->pages.live_above, live - live_below);
    assert_int_equal(engine_pages_available(&h->pages), h->pages.limit - live_below);
    uint32_t idle = 0;
    for (uint32_t page = 0; page < M_PAGES; page++) {
        const engine_page_node_t *node = &h->pages.nodes[page];
        assert_int_equal(node->cached ? node->references : node->taken, users[page]);
        if (!node->cached)
            continue;
        assert_memory_equal(h->pages.tokens + page * PAGE, h->rows + page * PAGE,
                            PAGE * sizeof(int32_t));
        if (node->parent != ENGINE_PAGE_NONE)
            assert_true(h->pages.nodes[node->parent].cached);
        for (uint32_t child = node->child; child != ENGINE_PAGE_NONE;
             child = h->pages.nodes[child].right)
            assert_int_equal(h->pages.nodes[child].parent, page);
        idle += node->references == 0;
    }
    assert_int_equal(h->pages.idle_count, idle);
}

static void random_histories_with_a_moving_limit(void **state)
{
    (void)state;
    static history_t h;
    memset(&h, 0, sizeof h);
    h.pages = make(M_PAGES);
    uint32_t *holders[M_SEQUENCES], hits = 0;
    for (uint32_t s = 0; s < M_SEQUENCES; s++)
        holders[s] = h.held[s];
    srand(5);
    for (uint32_t turn = 0; turn < 60000; turn++) {
        const uint32_t s = (uint32_t)rand() % M_SEQUENCES;
        switch (rand() % 6) {
        case 0:
        case 1:
            if (h.length[s] == 0) {
                history_begin(&h, s);
                hits += h.full[s];
            }
            break;
        case 2:
            release_all(&h.pages, h.held[s], h.length[s]);
            h.length[s] = h.full[s] = 0;
            break;
        case 3: /* the next page is full */
            if (h.full[s] < h.length[s]) {
                const uint32_t at = h.full[s]++;
                h.held[s][at] =
                    engine_pages_insert(&h.pages, at > 0 ? h.held[s][at - 1] : ENGINE_PAGE_NONE,
                                        h.tokens[s] + at * PAGE, h.held[s][at]);
            }
            break;
        case 4:
            if (rand() % 4 == 0)
                engine_pages_set_limit(&h.pages, 1 + (uint32_t)rand() % M_PAGES);
            break;
        default:
            move_all(&h.pages, h.rows, holders, h.length, M_SEQUENCES);
            const uint32_t end = engine_pages_end(&h.pages, M_PAGES);
            assert_true(end <= h.pages.limit || end == h.pages.live_count);
            break;
        }
        history_check(&h);
    }
    assert_true(hits > 1000 && h.pages.moves > 1000 && h.pages.evictions > 1000);
    for (uint32_t s = 0; s < M_SEQUENCES; s++)
        release_all(&h.pages, h.held[s], h.length[s]);
    engine_pages_flush(&h.pages);
    assert_int_equal(engine_pages_end(&h.pages, M_PAGES), 0);
    engine_pages_fini(&h.pages);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(low_ids_come_first),
        cmocka_unit_test(prefix_is_found_and_shared),
        cmocka_unit_test(twin_pages_merge),
        cmocka_unit_test(least_recently_used_leaf_goes_first),
        cmocka_unit_test(random_against_plain_counts),
        cmocka_unit_test(nothing_above_the_limit_is_handed_out),
        cmocka_unit_test(a_live_tail_moves_and_only_the_suffix_is_forgotten),
        cmocka_unit_test(a_parent_above_moves_or_takes_its_branch_along),
        cmocka_unit_test(random_histories_with_a_moving_limit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
