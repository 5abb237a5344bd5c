/* SPDX-License-Identifier: MIT */
/* The marked way (stage/marked.h) turn by turn: rows after rows of any length, words that are
 * missing, stale or late, sequences that come to their end, deaths between two words, refusals. */
#include "scheduler_rig.h"

static uint64_t response_of(uint32_t i)
{
    return ((const mailbox_arena_t *)rig.instance[i].rank[0].arena)->response.sequence;
}

static void pass_marked(uint32_t i, uint32_t layer, uint32_t rows, uint64_t number)
{
    uint64_t wrong = 1;
    assert_true(rig_put_marked(&rig, i, layer, rows, number, UINT32_MAX));
    for (uint32_t n = 0; !rig_take_marked(&rig, i, &wrong); n++) {
        assert_true(n < 100);
        turns(1);
    }
    assert_int_equal(wrong, 0);
    turns(4);
}

/* Two Instances of one rank at one FfnAgent that echoes. */
static void make_marked(uint32_t instances)
{
    rig.ffns = 1;
    for (uint32_t i = 0; i < instances; i++)
        shape(i, 1, 1, FABRIC_DELIVERY_SINGLE_COMPLETE, 1);
    make(false, FABRIC_POLICY_FIFO);
    attach_all();
}

/* Any number of rows after any other, both ways in turn, alone and beside another Instance. */
static void test_marked(void **state)
{
    (void)state;
    make_marked(2);
    uint64_t number = 0;
    for (uint32_t before = 0; before <= RIG_ROWS; before++)
        for (uint32_t rows = 0; rows <= RIG_ROWS; rows++) {
            pass_marked(0, number % RIG_LAYERS, before, number);
            const uint64_t answered = response_of(0);
            number++;
            pass_marked(0, number % RIG_LAYERS, rows, number);
            assert_int_equal(response_of(0), answered); /* no word follows marked answers */
            number++;
            if (rows % 2)
                pass(0, number % RIG_LAYERS, rows_of[rows % ROWS_OF], number);
            number++;
        }
    for (uint32_t n = 0; n < 40; n++) {
        uint64_t wrong = 1, over = 0;
        assert_true(rig_put_marked(&rig, 0, n % RIG_LAYERS, n % 7, n, UINT32_MAX));
        assert_true(rig_put_marked(&rig, 1, (n + 1) % RIG_LAYERS, (n + 3) % 7, n, UINT32_MAX));
        for (uint32_t turn = 0; over != 3; turn++) {
            assert_true(turn < 100);
            turns(1);
            for (uint32_t i = 0; i < 2; i++)
                if (!(over >> i & 1) && rig_take_marked(&rig, i, &wrong)) {
                    assert_int_equal(wrong, 0);
                    over |= 1u << i;
                }
        }
        turns(n % 3);
    }
    assert_int_equal(rig.ffn[0].table->failure.kind, STAGE_FAILURE_NONE);
    assert_int_equal(rig.ffn[0].scheduler->counts.dropped, 0);
}

/* Words that are missing: nothing of an earlier, longer put stands for them, others go on
 * meanwhile, and when they come the answer does. */
static void test_marked_words_missing(void **state)
{
    (void)state;
    uint64_t wrong = 1;
    make_marked(2);
    pass_marked(0, 1, RIG_ROWS, 1);
    pass_marked(0, 2, 2, 2);
    for (uint32_t words = 0; words < RIG_ROWS * RIG_HIDDEN / STAGE_MARKED_ELEMENTS; words += 5) {
        const transport_device_state_t before = rig.instance[0].rank[0].state;
        assert_true(rig_put_marked(&rig, 0, 3, RIG_ROWS, 10 + words, words));
        turns(20);
        assert_false(rig_take_marked(&rig, 0, &wrong));
        pass(1, 0, rows_of[1], words);
        pass_marked(1, 1, 4, words);
        assert_false(rig_take_marked(&rig, 0, &wrong));
        rig.instance[0].rank[0].state = before;
        pass_marked(0, 3, RIG_ROWS, 10 + words); /* the same sequence, now with all words */
    }
    assert_int_equal(rig.ffn[0].scheduler->counts.dropped, 0);
}

/* The marked way ends before a mark would come again; the plain way goes on. */
static void test_marked_sequence_ends(void **state)
{
    (void)state;
    make_marked(1);
    pass_marked(0, 0, RIG_ROWS, 1);
    rig.instance[0].rank[0].state.sequence = 0xfffffffcu;
    rig.ffn[0].scheduler->work[0].taken = 0xfffffffcu;
    ((mailbox_arena_t *)rig.instance[0].rank[0].arena)->response.sequence = 0xfffffffcu;
    for (uint32_t n = 0; n < 3; n++)
        pass_marked(0, n, 1 + n, n);
    assert_int_equal(rig.instance[0].rank[0].state.sequence, 0xffffffffu);
    for (uint32_t n = 0; n < 4; n++) {
        const transport_device_state_t before = rig.instance[0].rank[0].state;
        assert_false(rig_put_marked(&rig, 0, n, 1, n, UINT32_MAX));
        assert_memory_equal(&rig.instance[0].rank[0].state, &before, sizeof(before));
        pass(0, n, rows_of[0], n);
    }
    assert_int_equal(rig.instance[0].rank[0].state.sequence, 0x100000003u);
    /* Who announces marked rows there is dropped: its low half would have come before. */
    stage_line_t line = {.sequence = 0x100000004u, .rows = 1, .dp_rows = {1}};
    stage_marked_announce(&((stage_page_t *)rig.ffn[0].stage[0])->lines[0],
                          stage_brief_make(&line));
    turns(SETTLE);
    assert_int_equal(rig.ffn[0].scheduler->counts.dropped, 1);
}

/* An Instance dies between its words: the detach is carried out, and its successor, whose sequences
 * begin anew, meets none of them. */
static void test_marked_death(void **state)
{
    (void)state;
    uint64_t wrong = 1;
    make_marked(2);
    for (uint32_t words = 0; words < 8; words++) {
        pass_marked(0, 1, RIG_ROWS, words);
        assert_true(rig_put_marked(&rig, 0, 1, RIG_ROWS, words, words));
        turns(words);
        rig_order(&rig, 0, 0, TRANSPORT_SLOT_EMPTY);
        turns(SETTLE);
        assert_true(rig_ordered(&rig, 0, 0));
        pass_marked(1, 2, 3, words);
        memset(rig.instance[0].rank[0].arena, 0, sizeof(rig_arena_t));
        memset(&rig.instance[0].rank[0].state, 0, sizeof(transport_device_state_t));
        rig_order(&rig, 0, 0, TRANSPORT_SLOT_ATTACHED);
        turns(SETTLE);
        assert_true(rig_ordered(&rig, 0, 0));
        /* Its first two sequences are those of its predecessor. */
        assert_true(rig_put_marked(&rig, 0, 1, RIG_ROWS, words, 0));
        turns(20);
        assert_false(rig_take_marked(&rig, 0, &wrong));
        memset(&rig.instance[0].rank[0].state, 0, sizeof(transport_device_state_t));
        pass_marked(0, 1, RIG_ROWS, words + 1);
    }
    assert_int_equal(rig.ffn[0].scheduler->counts.lanes_in_use, 0);
}

/* Rows that never come: the Instance is dropped when its arena is closed or the time is over, and
 * nobody else hears of it. */
static void test_marked_late(void **state)
{
    (void)state;
    for (uint32_t closes = 0; closes < 2; closes++) {
        make_marked(2);
        mailbox_arena_t *arena = (mailbox_arena_t *)rig.instance[0].rank[0].arena;
        assert_true(rig_put_marked(&rig, 0, 1, 2, 1, 3));
        turns(40);
        if (closes)
            mailbox_close(arena, XP_CANCELLED);
        rig.now_ns += closes ? STAGE_CLOSED_NS : rig.ffn[0].table->submission_timeout_ns;
        turns(SETTLE);
        assert_int_equal(mailbox_closed(arena), closes ? XP_CANCELLED : XP_TIMEOUT);
        assert_int_equal(transport_slot_state(rig.ffn[0].table->instance[0].now),
                         TRANSPORT_SLOT_DROPPED);
        assert_int_equal(rig.ffn[0].table->failure.kind, STAGE_FAILURE_NONE);
        assert_int_equal(rig.ffn[0].scheduler->counts.lanes_in_use, 0);
        pass_marked(1, 1, 5, 3);
        (void)teardown(NULL);
    }
    make_marked(1);
}

static void test_marked_refused(void **state)
{
    (void)state;
    const stage_line_t lines[] = {{.sequence = 1, .rows = RIG_ROWS + 1, .dp_rows = {RIG_ROWS + 1}},
                                  {.sequence = 1, .layer = RIG_LAYERS, .rows = 1, .dp_rows = {1}},
                                  {.sequence = 1, .rows = 1, .dp_rows = {2}}, /* long */
                                  {.sequence = 1, .rows = 1, .dp_rows = {1}}};
    for (uint32_t n = 0; n < 4; n++) {
        rig.ffns = 1;
        shape(0, 1, 1, FABRIC_DELIVERY_SINGLE_COMPLETE, 1);
        make(n == 3, FABRIC_POLICY_FIFO); /* a runtime computes from plain rows */
        attach_all();
        stage_marked_announce(&((stage_page_t *)rig.ffn[0].stage[0])->lines[0],
                              stage_brief_make(&lines[n]));
        turns(SETTLE);
        assert_int_equal(mailbox_closed((mailbox_arena_t *)rig.instance[0].rank[0].arena), XP_PEER);
        assert_int_equal(rig.ffn[0].scheduler->counts.dropped, 1);
        if (n < 3)
            (void)teardown(NULL);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_marked, teardown),
        cmocka_unit_test_teardown(test_marked_words_missing, teardown),
        cmocka_unit_test_teardown(test_marked_sequence_ends, teardown),
        cmocka_unit_test_teardown(test_marked_death, teardown),
        cmocka_unit_test_teardown(test_marked_late, teardown),
        cmocka_unit_test_teardown(test_marked_refused, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
