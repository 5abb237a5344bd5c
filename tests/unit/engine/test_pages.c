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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(low_ids_come_first),
        cmocka_unit_test(prefix_is_found_and_shared),
        cmocka_unit_test(twin_pages_merge),
        cmocka_unit_test(least_recently_used_leaf_goes_first),
        cmocka_unit_test(random_against_plain_counts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
