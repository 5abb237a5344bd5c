/* SPDX-License-Identifier: MIT */
/* Admission, batch forming and preemption, stepped by hand without a model. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "engine/scheduler.h"

#define PAGE      4u
#define SEQUENCES 16u
#define CONTEXT   64u

typedef struct bench {
    engine_pages_t pages;
    engine_scheduler_t scheduler;
    engine_batch_t batch;
    engine_sequence_t sequences[SEQUENCES];
    int32_t tokens[SEQUENCES][CONTEXT + 1];
    uint32_t tables[SEQUENCES][CONTEXT / PAGE];
    uint32_t count;
} bench_t;

static bench_t bench;

static void open_bench(uint32_t pages, uint32_t decode_rows, uint32_t prefill_rows,
                       uint32_t max_rows, uint64_t ttft_ns, uint64_t tbt_ns)
{
    memset(&bench, 0, sizeof bench);
    assert_int_equal(engine_pages_init(pages, PAGE, &bench.pages), XP_OK);
    assert_int_equal(engine_scheduler_init(&bench.pages, true, SEQUENCES, decode_rows, prefill_rows,
                                           max_rows, 6, ttft_ns, tbt_ns, &bench.scheduler),
                     XP_OK);
    assert_int_equal(engine_batch_init(decode_rows, &bench.batch), XP_OK);
}

static void close_bench(void)
{
    for (uint32_t i = 0; i < bench.count; i++)
        if (bench.sequences[i].state != ENGINE_SEQUENCE_ENDING)
            engine_scheduler_remove(&bench.scheduler, &bench.sequences[i]);
    assert_int_equal(engine_pages_available(&bench.pages), bench.pages.count);
    engine_batch_fini(&bench.batch);
    engine_scheduler_fini(&bench.scheduler);
    engine_pages_fini(&bench.pages);
}

/* A request of `count` tokens that no other request begins with. */
static engine_sequence_t *add(uint32_t count, uint64_t arrival_ns)
{
    engine_sequence_t *sequence = &bench.sequences[bench.count];
    sequence->tokens = bench.tokens[bench.count];
    sequence->pages = bench.tables[bench.count];
    for (uint32_t i = 0; i < count; i++)
        sequence->tokens[i] = (int32_t)(100 * bench.count + i);
    sequence->request = ++bench.count;
    sequence->prompt_count = sequence->count = count;
    sequence->arrival_ns = arrival_ns;
    engine_sampling_default(&sequence->sampling);
    engine_scheduler_add(&bench.scheduler, sequence);
    return sequence;
}

/* One step: what reaches its last token gets another one. */
static void step(void)
{
    engine_scheduler_admit(&bench.scheduler, 0);
    engine_scheduler_pick(&bench.scheduler, &bench.batch);
    engine_scheduler_computed(&bench.scheduler, &bench.batch);
    for (uint32_t i = 0; i < bench.batch.count; i++) {
        engine_sequence_t *sequence = bench.batch.sequences[i];
        assert_true(sequence->page_count * PAGE >= sequence->computed);
        if (sequence->computed == sequence->count)
            sequence->tokens[sequence->count++] = 7;
    }
}

static uint32_t rows_of(const engine_sequence_t *sequence)
{
    for (uint32_t i = 0; i < bench.batch.count; i++)
        if (bench.batch.sequences[i] == sequence)
            return bench.batch.spans[i].rows;
    return 0;
}

static void decode_first_then_chunks(void **state)
{
    (void)state;
    open_bench(64, 4, 8, 12, 0, 0);
    engine_sequence_t *a = add(5, 1), *b = add(20, 2), *c = add(6, 3);
    step();
    assert_int_equal(rows_of(a), 5);
    assert_int_equal(rows_of(b), 3); /* what is left of the chunk */
    assert_int_equal(rows_of(c), 0);
    assert_int_equal(bench.batch.kind, 1);
    step();
    assert_int_equal(rows_of(a), 1);
    assert_int_equal(rows_of(b), 8);
    assert_int_equal(bench.batch.kind, 2);
    assert_int_equal(bench.batch.spans[0].position, 5); /* decode rows lead the batch */
    step();
    assert_int_equal(rows_of(b), 8);
    step();
    assert_int_equal(rows_of(b), 1);
    assert_int_equal(rows_of(c), 6);
    step();
    assert_int_equal(bench.batch.kind, 0);
    assert_int_equal(bench.batch.rows, 3);
    assert_int_equal(bench.batch.slo_deadline_ns, 0);
    close_bench();
}

static void earliest_deadline_gets_the_chunk(void **state)
{
    (void)state;
    open_bench(64, 4, 8, 12, 1000, 10);
    engine_sequence_t *a = add(20, 500), *b = add(12, 100);
    step();
    assert_int_equal(rows_of(a), 0);
    assert_int_equal(rows_of(b), 8);
    assert_int_equal(bench.batch.slo_deadline_ns, 1100);
    step();
    assert_int_equal(rows_of(b), 4);
    assert_int_equal(rows_of(a), 4);
    b->last_token_ns = 2000;
    step();
    assert_int_equal(bench.batch.slo_deadline_ns, 1500); /* a's TTFT before b's 2010 */
    close_bench();
}

static void rows_never_pass_the_limit(void **state)
{
    (void)state;
    open_bench(64, 6, 8, 6, 0, 0);
    for (uint32_t i = 0; i < 6; i++)
        add(9, i);
    for (uint32_t i = 0; i < 40; i++) {
        step();
        assert_true(bench.batch.rows >= 1 && bench.batch.rows <= 6);
    }
    for (uint32_t i = 0; i < 6; i++)
        assert_true(bench.sequences[i].count > 9);
    close_bench();
}

static void head_of_the_queue_is_not_overtaken(void **state)
{
    (void)state;
    open_bench(8, 4, 32, 36, 0, 0);
    engine_sequence_t *a = add(20, 1), *big = add(16, 2), *small = add(2, 3);
    step();
    assert_int_equal(a->state, ENGINE_SEQUENCE_RUNNING);
    assert_int_equal(big->state, ENGINE_SEQUENCE_WAITING);
    assert_int_equal(small->state, ENGINE_SEQUENCE_WAITING);
    engine_scheduler_remove(&bench.scheduler, a);
    a->state = ENGINE_SEQUENCE_ENDING;
    step();
    assert_int_equal(big->state, ENGINE_SEQUENCE_RUNNING);
    assert_int_equal(small->state, ENGINE_SEQUENCE_RUNNING);
    close_bench();
}

static void the_youngest_makes_room(void **state)
{
    (void)state;
    open_bench(8, 4, 32, 36, 0, 0);
    engine_sequence_t *old = add(8, 1), *middle = add(4, 2), *young = add(4, 3);
    step();
    assert_int_equal(bench.scheduler.running_count, 3);
    bool middle_waited = false;
    for (uint32_t i = 0; i < 20; i++) {
        uint32_t before = old->count;
        step();
        assert_int_equal(old->count, before + 1); /* the oldest gets on in every step */
        assert_int_equal(old->preemptions, 0);
        if (middle->state == ENGINE_SEQUENCE_WAITING && !middle_waited) {
            middle_waited = true;
            assert_int_equal(young->state, ENGINE_SEQUENCE_WAITING); /* went before it */
            assert_ptr_equal(bench.scheduler.waiting[0], middle);    /* and stands behind it */
        }
    }
    assert_true(young->preemptions > 0 && middle_waited);
    engine_scheduler_remove(&bench.scheduler, old);
    old->state = ENGINE_SEQUENCE_ENDING;
    uint32_t known = middle->count;
    step();
    assert_int_equal(middle->state, ENGINE_SEQUENCE_RUNNING);
    assert_true(middle->count > known);
    close_bench();
}

static void chunks_leave_time_for_decoding(void **state)
{
    (void)state;
    open_bench(64, 4, 60, 64, 0, 4000);
    engine_sequence_t *a = add(60, 1);
    step();
    assert_int_equal(rows_of(a), 60);
    engine_scheduler_took(&bench.scheduler, &bench.batch, 6000); /* 100 ns a row */
    engine_sequence_t *b = add(62, 2);
    step();
    assert_int_equal(rows_of(a), 1);
    assert_int_equal(rows_of(b), 40); /* 4000 ns */
    engine_scheduler_took(&bench.scheduler, &bench.batch, 410000);
    engine_sequence_t *c = add(62, 3);
    step();
    assert_int_equal(rows_of(b), 22);
    assert_int_equal(rows_of(c), 32 - 22); /* never below a useful chunk */
    engine_scheduler_remove(&bench.scheduler, a);
    engine_scheduler_remove(&bench.scheduler, b);
    a->state = b->state = ENGINE_SEQUENCE_ENDING;
    step();
    assert_int_equal(rows_of(c), 52); /* nobody decodes: a whole chunk */
    close_bench();
}

static void prompt_logprob_rows_are_bounded(void **state)
{
    (void)state;
    open_bench(64, 4, 32, 36, 0, 0);
    engine_sequence_t *a = add(20, 1), *b = add(20, 2), *c = add(10, 3);
    a->sampling.prompt_logprobs = b->sampling.prompt_logprobs = true;
    step();
    assert_int_equal(rows_of(a), 6);
    assert_int_equal(rows_of(b), 0);
    assert_int_equal(rows_of(c), 10);
    close_bench();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(decode_first_then_chunks),
        cmocka_unit_test(earliest_deadline_gets_the_chunk),
        cmocka_unit_test(rows_never_pass_the_limit),
        cmocka_unit_test(head_of_the_queue_is_not_overtaken),
        cmocka_unit_test(the_youngest_makes_room),
        cmocka_unit_test(chunks_leave_time_for_decoding),
        cmocka_unit_test(prompt_logprob_rows_are_bounded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
