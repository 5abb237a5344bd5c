/* SPDX-License-Identifier: MIT */
/*
 * The whole engine, stepped by hand: golden tokens alone, in batches, with prefix cache, after
 * preemption; limits, cancellation, time limits, failure of the FFN, the bounded event ring.
 */
#include "engine_fixture.h"

static golden_t golden[8];
static uint32_t golden_count;

static int set_up(void **state)
{
    if (fixture_group_set_up(state) != 0)
        return -1;
    golden_count = golden_load(golden, 8);
    return 0;
}

static void one_request_is_golden(void **state)
{
    (void)state;
    engine_config_t config = fixture_config();
    fixture_open(&config);
    for (uint32_t i = 0; i < golden_count; i++) {
        engine_sampling_t sampling = greedy(golden[i].greedy_count);
        sampling.want_logprobs = true;
        outcome_t *outcome = submit(golden[i].ids, golden[i].count, &sampling);
        run_dry();
        assert_int_equal(outcome->token_count, golden[i].greedy_count);
        assert_golden(outcome, &golden[i]);
        xp_buf_t text;
        xp_buf_init(&text, 1 << 20);
        assert_int_equal(tokenizer_decode(engine_tokenizer(fixture->engine), outcome->tokens,
                                          outcome->token_count, true, &text),
                         XP_OK);
        assert_string_equal(outcome->text, text.data);
        xp_buf_fini(&text);
    }
    engine_stats_t now = stats();
    assert_int_equal(now.kv_pages_used, 0);
    assert_int_equal(now.finished, golden_count);
    assert_int_equal(now.ffn_calls, now.steps * 6);
    assert_int_equal(now.ttft_count, golden_count);
    fixture_close();
}

static void batch_equals_alone_bit_by_bit(void **state)
{
    (void)state;
    static outcome_t alone[8];
    engine_config_t config = fixture_config();
    config.prefix_cache = false;
    fixture_open(&config);
    for (uint32_t i = 0; i < golden_count; i++) {
        engine_sampling_t sampling = greedy(golden[i].greedy_count);
        sampling.want_logprobs = true;
        outcome_t *outcome = submit(golden[i].ids, golden[i].count, &sampling);
        run_dry();
        alone[i] = *outcome;
    }
    fixture_close();

    config = fixture_config();
    config.threads = 2;
    config.prefill_rows = 7; /* chunks that fall across pages */
    config.page_tokens = 5;
    fixture_open(&config);
    for (uint32_t i = 0; i < 3 * golden_count; i++) {
        engine_sampling_t sampling = greedy(golden[i % golden_count].greedy_count);
        sampling.want_logprobs = true;
        submit(golden[i % golden_count].ids, golden[i % golden_count].count, &sampling);
        engine_iterate(fixture->engine); /* arrivals at different times */
        drain();
    }
    run_dry();
    for (uint32_t i = 0; i < 3 * golden_count; i++) {
        outcome_t *outcome = &fixture->outcomes[i], *want = &alone[i % golden_count];
        assert_golden(outcome, &golden[i % golden_count]);
        assert_int_equal(outcome->token_count, want->token_count);
        assert_memory_equal(outcome->logprobs, want->logprobs,
                            want->token_count * sizeof want->logprobs[0]);
    }
    assert_true(fixture->most_rows > 8 && fixture->most_rows <= 8 + 7);
    assert_true(fixture->kinds[0] > 0 && fixture->kinds[2] > 0);
    assert_true(stats().cached_tokens > 0);
    fixture_close();
}

static void rows_of_a_call_are_bounded(void **state)
{
    (void)state;
    engine_config_t config = fixture_config();
    config.max_rows = 9;
    fixture_open(&config);
    for (uint32_t i = 0; i < 12; i++) {
        engine_sampling_t sampling = greedy(6);
        submit(golden[i % golden_count].ids, golden[i % golden_count].count, &sampling);
    }
    run_dry();
    for (uint32_t i = 0; i < 12; i++)
        assert_golden(&fixture->outcomes[i], &golden[i % golden_count]);
    assert_true(fixture->most_rows <= 9);
    fixture_close();
}

static void prefix_cache_skips_rows(void **state)
{
    (void)state;
    engine_config_t config = fixture_config();
    config.page_tokens = 4;
    fixture_open(&config);
    engine_sampling_t sampling = greedy(8);
    submit(golden[0].ids, golden[0].count, &sampling);
    run_dry();
    uint64_t first_rows = stats().ffn_rows;
    outcome_t *again = submit(golden[0].ids, golden[0].count, &sampling);
    run_dry();
    assert_golden(again, &golden[0]);
    uint32_t pages = (golden[0].count - 1) / 4;
    assert_int_equal(again->finish.cached_tokens, pages * 4);
    assert_int_equal(stats().ffn_rows - first_rows, first_rows - 6ull * pages * 4);
    assert_int_equal(stats().kv_pages_used, 0);
    assert_true(stats().kv_pages_cached > 0);

    engine_flush_cache(fixture->engine);
    assert_int_equal(stats().kv_pages_cached, 0);
    outcome_t *cold = submit(golden[0].ids, golden[0].count, &sampling);
    run_dry();
    assert_int_equal(cold->finish.cached_tokens, 0);
    /* A longer conversation reuses generated tokens as well. */
    int32_t longer[FIXTURE_TOKENS];
    uint32_t count = golden[0].count;
    memcpy(longer, golden[0].ids, count * sizeof *longer);
    memcpy(longer + count, golden[0].greedy, 8 * sizeof *longer);
    outcome_t *next = submit(longer, count + 8, &sampling);
    run_dry();
    assert_int_equal(next->finish.cached_tokens, (count + 7) / 4 * 4);
    assert_memory_equal(next->tokens, golden[0].greedy + 8, 8 * sizeof(int32_t));
    fixture_close();
}

/* KV for far fewer tokens than eight requests want: some are preempted, none changes a token. */
static void preemption_keeps_tokens(void **state)
{
    (void)state;
    for (uint32_t cache = 0; cache < 2; cache++) {
        engine_config_t config = fixture_config();
        config.prefix_cache = cache;
        config.page_tokens = 4;
        config.kv_tokens = 160;
        config.max_context = 96;
        fixture_open(&config);
        for (uint32_t i = 0; i < 8; i++) {
            engine_sampling_t sampling = greedy(40);
            submit(golden[i % golden_count].ids, golden[i % golden_count].count, &sampling);
        }
        run_dry();
        for (uint32_t i = 0; i < 8; i++) {
            assert_int_equal(fixture->outcomes[i].token_count, 40);
            assert_golden(&fixture->outcomes[i], &golden[i % golden_count]);
        }
        assert_true(fixture->engine->scheduler.preemptions > 0);
        assert_int_equal(stats().kv_pages_used, 0);
        assert_int_equal(stats().generated_tokens, 8 * 40);
        fixture_close();
    }
}

static void sampling_survives_preemption_and_company(void **state)
{
    (void)state;
    engine_sampling_t sampling;
    engine_sampling_default(&sampling);
    sampling.temperature = 0.9f;
    sampling.top_p = 0.95f;
    sampling.frequency_penalty = 0.3f;
    sampling.ignore_eos = true;
    sampling.has_seed = true;
    sampling.max_new_tokens = 40;
    static int32_t want[8][40];
    for (uint32_t round = 0; round < 2; round++) {
        engine_config_t config = fixture_config();
        config.page_tokens = 4;
        config.kv_tokens = round == 0 ? 2000 : 160;
        config.max_context = 96;
        fixture_open(&config);
        for (uint32_t i = 0; i < 8; i++) {
            sampling.seed = 77 + i;
            outcome_t *outcome =
                submit(golden[i % golden_count].ids, golden[i % golden_count].count, &sampling);
            if (round == 0) {
                run_dry();
                memcpy(want[i], outcome->tokens, sizeof want[i]);
            }
        }
        run_dry();
        for (uint32_t i = 0; i < 8; i++) {
            assert_int_equal(fixture->outcomes[i].token_count, 40);
            assert_memory_equal(fixture->outcomes[i].tokens, want[i], sizeof want[i]);
        }
        assert_true(round == 0 || fixture->engine->scheduler.preemptions > 0);
        fixture_close();
    }
    assert_memory_not_equal(want[0], want[4], sizeof want[0]); /* same prompt, another seed */
}

static void cancel_frees_kv_at_the_next_step(void **state)
{
    (void)state;
    engine_config_t config = fixture_config();
    config.prefix_cache = false;
    fixture_open(&config);
    engine_sampling_t sampling = greedy(200);
    outcome_t *stay = submit(golden[0].ids, golden[0].count, &sampling);
    outcome_t *leave = submit(golden[1].ids, golden[1].count, &sampling);
    for (uint32_t i = 0; i < 10; i++)
        engine_iterate(fixture->engine);
    assert_true(stats().running == 2 && stats().kv_pages_used > 3);
    engine_cancel(fixture->engine, leave->request);
    engine_cancel(fixture->engine, leave->request);
    engine_cancel(fixture->engine, 0);
    engine_cancel(fixture->engine, UINT64_MAX);
    engine_iterate(fixture->engine);
    drain();
    assert_true(leave->finished);
    assert_int_equal(leave->finish.finish, ENGINE_FINISH_ABORT);
    assert_int_equal(stats().running, 1);
    uint32_t tokens = golden[0].count + stay->token_count;
    assert_true(stats().kv_pages_used <= (tokens + 15) / 16);
    engine_cancel(fixture->engine, leave->request); /* no longer known */
    engine_cancel(fixture->engine, stay->request);
    run_dry();
    assert_true(stay->finished);
    assert_int_equal(stats().kv_pages_used, 0);
    assert_int_equal(stats().aborted, 2);
    fixture_close();
}

static void queue_is_bounded(void **state)
{
    (void)state;
    engine_config_t config = fixture_config();
    config.decode_rows = 1;
    config.queue_limit = 2;
    fixture_open(&config);
    engine_sampling_t sampling = greedy(3);
    for (uint32_t i = 0; i < 3; i++)
        submit(golden[0].ids, golden[0].count, &sampling);
    uint64_t request = 5;
    assert_int_equal(
        engine_submit(fixture->engine, golden[0].ids, golden[0].count, &sampling, &request),
        XP_RETRY);
    assert_int_equal(request, 5);
    engine_iterate(fixture->engine);
    assert_int_equal(stats().waiting, 2);
    assert_int_equal(stats().running, 1);
    assert_int_equal(stats().rejected, 1);
    run_dry();
    submit(golden[0].ids, golden[0].count, &sampling);
    run_dry();
    assert_int_equal(stats().finished, 4);
    fixture_close();
}

static void bad_requests_are_refused(void **state)
{
    (void)state;
    engine_config_t config = fixture_config();
    config.max_context = 64;
    fixture_open(&config);
    engine_sampling_t sampling = greedy(3);
    int32_t ids[70] = {0};
    uint64_t request;
    engine_t *engine = fixture->engine;
    assert_int_equal(engine_submit(engine, ids, 0, &sampling, &request), XP_INVALID);
    assert_int_equal(engine_submit(engine, ids, 64, &sampling, &request), XP_INVALID);
    assert_non_null(strstr(xp_error_last()->text, "context of 64"));
    ids[3] = 4096;
    assert_int_equal(engine_submit(engine, ids, 5, &sampling, &request), XP_INVALID);
    assert_non_null(strstr(xp_error_last()->text, "4096"));
    ids[3] = -1;
    assert_int_equal(engine_submit(engine, ids, 5, &sampling, &request), XP_INVALID);
    ids[3] = 0;
    sampling.top_p = 2;
    assert_int_equal(engine_submit(engine, ids, 5, &sampling, &request), XP_INVALID);
    fixture_close();

    config.kv_tokens = 40;
    fixture_open(&config);
    sampling = greedy(3);
    assert_int_equal(engine_max_context(fixture->engine), 32);
    assert_int_equal(engine_submit(fixture->engine, ids, 32, &sampling, &request), XP_INVALID);
    assert_non_null(strstr(xp_error_last()->text, "KV Cache holds 32"));
    outcome_t *last = submit(ids, 31, &sampling);
    run_dry();
    assert_int_equal(last->token_count, 1);
    assert_int_equal(last->finish.finish, ENGINE_FINISH_LENGTH);
    fixture_close();
}

static void context_end_and_one_token_prompts(void **state)
{
    (void)state;
    engine_config_t config = fixture_config();
    config.max_context = 40;
    fixture_open(&config);
    engine_sampling_t sampling = greedy(0); /* until the context ends */
    outcome_t *outcome = submit(golden[0].ids, 1, &sampling);
    run_dry();
    assert_int_equal(outcome->token_count, 39);
    assert_int_equal(outcome->finish.finish, ENGINE_FINISH_LENGTH);
    assert_int_equal(outcome->finish.prompt_tokens, 1);
    fixture_close();
}

static void eos_and_stop_ids_end(void **state)
{
    (void)state;
    engine_config_t config = fixture_config();
    fixture_open(&config);
    engine_sampling_t sampling = greedy(30);
    sampling.stop_id_count = 1;
    sampling.stop_ids[0] = golden[0].greedy[6];
    uint32_t first = 0;
    while (golden[0].greedy[first] != sampling.stop_ids[0])
        first++;
    outcome_t *outcome = submit(golden[0].ids, golden[0].count, &sampling);
    run_dry();
    assert_int_equal(outcome->finish.finish, ENGINE_FINISH_STOP);
    assert_int_equal(outcome->finish.stop_token, sampling.stop_ids[0]);
    assert_int_equal(outcome->token_count,
                     first + 1); /* the stop token counts, its text does not */
    xp_buf_t text;
    xp_buf_init(&text, 4096);
    tokenizer_decode(engine_tokenizer(fixture->engine), outcome->tokens, first, true, &text);
    assert_string_equal(outcome->text, text.data);
    xp_buf_fini(&text);

    sampling.min_new_tokens = 12;
    outcome = submit(golden[0].ids, golden[0].count, &sampling);
    run_dry();
    assert_true(outcome->token_count > 12 || outcome->finish.finish == ENGINE_FINISH_LENGTH);
    for (uint32_t i = 0; i < 12; i++)
        assert_int_not_equal(outcome->tokens[i], sampling.stop_ids[0]);

    /* A bias makes EOS certain. */
    engine_sampling_t eos = greedy(30);
    eos.ignore_eos = false;
    eos.bias_count = 1;
    eos.bias[0].id = 2;
    eos.bias[0].bias = 1000;
    outcome = submit(golden[0].ids, golden[0].count, &eos);
    run_dry();
    assert_int_equal(outcome->token_count, 1);
    assert_int_equal(outcome->finish.finish, ENGINE_FINISH_STOP);
    assert_int_equal(outcome->finish.stop_token, 2);
    assert_string_equal(outcome->text, "");
    fixture_close();
}

static void stop_strings_end_and_are_cut(void **state)
{
    (void)state;
    engine_config_t config = fixture_config();
    fixture_open(&config);
    engine_sampling_t sampling = greedy(48);
    outcome_t *whole = submit(golden[0].ids, golden[0].count, &sampling);
    run_dry();
    /* A piece of the known text, across token borders. */
    sampling.stop_count = 2;
    strcpy(sampling.stops[0], "never in here");
    memcpy(sampling.stops[1], whole->text + 21, 9);
    const size_t at = (size_t)(strstr(whole->text, sampling.stops[1]) - whole->text);
    outcome_t *outcome = submit(golden[0].ids, golden[0].count, &sampling);
    run_dry();
    assert_int_equal(outcome->finish.finish, ENGINE_FINISH_STOP);
    assert_string_equal(outcome->finish.stop_text, sampling.stops[1]);
    assert_int_equal(outcome->finish.stop_token, -1);
    assert_int_equal(strlen(outcome->text), at);
    assert_memory_equal(outcome->text, whole->text, at);
    assert_true(outcome->token_count < whole->token_count);

    sampling.include_stop = true;
    outcome = submit(golden[0].ids, golden[0].count, &sampling);
    run_dry();
    assert_int_equal(strlen(outcome->text), at + 9);
    sampling.min_new_tokens = 48;
    outcome = submit(golden[0].ids, golden[0].count, &sampling);
    run_dry();
    assert_int_equal(outcome->finish.finish, ENGINE_FINISH_LENGTH);
    assert_string_equal(outcome->text, whole->text);
    /* Held text is not lost when the tokens run out in the middle of a stop string. */
    sampling = greedy(48);
    sampling.stop_count = 1;
    snprintf(sampling.stops[0], sizeof sampling.stops[0], "%sZ",
             whole->text + strlen(whole->text) - 12);
    outcome = submit(golden[0].ids, golden[0].count, &sampling);
    run_dry();
    assert_int_equal(outcome->finish.finish, ENGINE_FINISH_LENGTH);
    assert_string_equal(outcome->text, whole->text);
    fixture_close();
}

/* More held text than an event takes goes out in text-only TOKEN events before FINISH. */
static void surplus_text_is_not_lost(void **state)
{
    (void)state;
    engine_config_t config = fixture_config();
    fixture_open(&config);
    engine_sampling_t sampling = greedy(10);
    outcome_t *outcome = submit(golden[0].ids, golden[0].count, &sampling);
    engine_iterate(fixture->engine);
    drain();
    size_t before = strlen(outcome->text);
    engine_text_t *text = &fixture->engine->scheduler.running[0]->text;
    for (uint32_t i = 0; i < 4000; i++)
        assert_int_equal(xp_buf_append_text(&text->pending, "\xE2\x82\xAC"), XP_OK);
    run_dry();
    assert_int_equal(outcome->token_count, 10);
    for (uint32_t i = 0; i < 2000; i++)
        assert_memory_equal(outcome->text + before + 3 * i, "\xE2\x82\xAC", 3);
    fixture_close();
}

static void queue_and_request_time_limits(void **state)
{
    (void)state;
    engine_config_t config = fixture_config();
    config.decode_rows = 1;
    config.queue_timeout_ns = 2 * XP_NS_PER_S;
    config.request_timeout_ns = 10 * XP_NS_PER_S;
    fixture_open(&config);
    fixture->step_ns = XP_NS_PER_S;
    engine_sampling_t sampling = greedy(100);
    outcome_t *runs = submit(golden[0].ids, golden[0].count, &sampling);
    outcome_t *waits = submit(golden[1].ids, golden[1].count, &sampling);
    for (uint32_t i = 0; i < 5; i++)
        engine_iterate(fixture->engine);
    drain();
    assert_true(waits->finished);
    assert_int_equal(waits->finish.finish, ENGINE_FINISH_TIMEOUT);
    assert_non_null(strstr(waits->finish.error, "queue"));
    assert_int_equal(waits->token_count, 0);
    assert_false(runs->finished);
    run_dry();
    assert_int_equal(runs->finish.finish, ENGINE_FINISH_TIMEOUT);
    assert_true(runs->token_count >= 9 && runs->token_count <= 11);
    assert_true(runs->finish.total_ns > 10 * XP_NS_PER_S);
    assert_int_equal(stats().kv_pages_used, 0);
    fixture_close();
}

static void ffn_failure_ends_everything(void **state)
{
    (void)state;
    static const xp_status_t kinds[] = {XP_FATAL, XP_CLOSED, XP_TIMEOUT};
    for (uint32_t i = 0; i < 3; i++) {
        engine_config_t config = fixture_config();
        config.decode_rows = 2;
        fixture_open(&config);
        engine_sampling_t sampling = greedy(100);
        for (uint32_t j = 0; j < 4; j++)
            submit(golden[j % golden_count].ids, golden[j % golden_count].count, &sampling);
        for (uint32_t j = 0; j < 6; j++)
            engine_iterate(fixture->engine);
        fixture->ffn_status = kinds[i];
        run_dry();
        for (uint32_t j = 0; j < 4; j++) {
            assert_true(fixture->outcomes[j].finished);
            assert_int_equal(fixture->outcomes[j].finish.finish, ENGINE_FINISH_ERROR);
            assert_non_null(strstr(fixture->outcomes[j].finish.error, "the test broke the FFN"));
        }
        fixture->ffn_status = XP_OK;
        uint64_t request;
        assert_int_equal(
            engine_submit(fixture->engine, golden[0].ids, golden[0].count, &sampling, &request),
            XP_CLOSED);
        assert_non_null(strstr(xp_error_last()->text, "the test broke the FFN"));
        assert_int_equal(stats().kv_pages_used, 0);
        assert_int_equal(stats().failed, 4);
        fixture_close();
    }
}

static void full_event_ring_pauses(void **state)
{
    (void)state;
    engine_config_t config = fixture_config();
    config.queue_limit = 2000;
    fixture_open(&config);
    engine_sampling_t sampling = greedy(48);
    for (uint32_t i = 0; i < 20; i++)
        submit(golden[i % golden_count].ids, golden[i % golden_count].count, &sampling);
    uint32_t turns = 0;
    while (engine_iterate(fixture->engine) && turns < 5000)
        turns++;
    assert_true(turns < 5000); /* it paused: nobody drains */
    assert_true(fixture->engine->event_count <= fixture->engine->event_capacity);
    assert_true(stats().running > 0);
    /* While paused, a cancellation still frees KV. */
    uint32_t used = stats().kv_pages_used;
    engine_cancel(fixture->engine, fixture->engine->scheduler.running[0]->request);
    engine_iterate(fixture->engine);
    assert_true(stats().kv_pages_used < used);
    run_dry();
    uint32_t aborted = 0;
    for (uint32_t i = 0; i < 20; i++) {
        assert_true(fixture->outcomes[i].finished);
        if (fixture->outcomes[i].finish.finish == ENGINE_FINISH_ABORT)
            aborted++;
        else
            assert_golden(&fixture->outcomes[i], &golden[i % golden_count]);
    }
    assert_int_equal(aborted, 1);
    fixture_close();
}

static void prompt_logprobs_match_forward(void **state)
{
    (void)state;
    engine_config_t config = fixture_config();
    config.prefill_rows = 5;
    fixture_open(&config);
    const golden_t *g = &golden[1];
    float *logits = malloc((size_t)g->count * 4096 * sizeof *logits);
    assert_int_equal(engine_forward(fixture->engine, g->ids, g->count, logits), XP_OK);
    assert_int_equal(stats().kv_pages_used, 0);
    engine_sampling_t plain = greedy(4), sampling = plain;
    submit(g->ids, g->count, &plain); /* fills the prefix cache */
    run_dry();
    sampling.prompt_logprobs = true;
    sampling.want_logprobs = true;
    sampling.top_logprobs = 2;
    outcome_t *outcome = submit(g->ids, g->count, &sampling);
    run_dry();
    assert_golden(outcome, g);
    assert_int_equal(outcome->prompt_count, g->count);
    for (uint32_t p = 0; p < g->count; p++) {
        const engine_event_t *event = &outcome->prompt[p];
        assert_int_equal(event->position, p);
        assert_int_equal(event->token, g->ids[p]);
        if (p == 0) {
            assert_true(isnan(event->logprob.logprob));
            continue;
        }
        const float *row = logits + (size_t)(p - 1) * 4096;
        double total = 0;
        uint32_t best = 0;
        for (uint32_t i = 0; i < 4096; i++) {
            total += exp((double)row[i]);
            best = row[i] > row[best] ? i : best;
        }
        double want = (double)row[g->ids[p]] - log(total);
        assert_true(fabs((double)event->logprob.logprob - want) < 1e-4);
        assert_int_equal(event->top_count, 2);
        assert_int_equal(event->top[0].id, best);
    }
    free(logits);
    fixture_close();
}

static void slo_deadlines_reach_the_ffn(void **state)
{
    (void)state;
    engine_config_t config = fixture_config();
    config.ttft_ns = 5 * XP_NS_PER_S;
    config.tbt_ns = XP_NS_PER_S;
    fixture_open(&config);
    engine_sampling_t sampling = greedy(4);
    submit(golden[0].ids, golden[0].count, &sampling);
    engine_iterate(fixture->engine);
    assert_int_equal(fixture->engine->batch.slo_deadline_ns, 1005 * XP_NS_PER_S);
    fixture->step_ns = XP_NS_PER_MS;
    engine_iterate(fixture->engine);
    assert_int_equal(fixture->engine->batch.slo_deadline_ns, 1001 * XP_NS_PER_S);
    run_dry();
    assert_true(stats().tbt_p50_ms > 0.9 && stats().tbt_p50_ms < 1.1);
    fixture_close();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_request_is_golden),
        cmocka_unit_test(batch_equals_alone_bit_by_bit),
        cmocka_unit_test(rows_of_a_call_are_bounded),
        cmocka_unit_test(prefix_cache_skips_rows),
        cmocka_unit_test(preemption_keeps_tokens),
        cmocka_unit_test(sampling_survives_preemption_and_company),
        cmocka_unit_test(cancel_frees_kv_at_the_next_step),
        cmocka_unit_test(queue_is_bounded),
        cmocka_unit_test(bad_requests_are_refused),
        cmocka_unit_test(context_end_and_one_token_prompts),
        cmocka_unit_test(eos_and_stop_ids_end),
        cmocka_unit_test(stop_strings_end_and_are_cut),
        cmocka_unit_test(surplus_text_is_not_lost),
        cmocka_unit_test(queue_and_request_time_limits),
        cmocka_unit_test(ffn_failure_ends_everything),
        cmocka_unit_test(full_event_ring_pauses),
        cmocka_unit_test(prompt_logprobs_match_forward),
        cmocka_unit_test(slo_deadlines_reach_the_ffn),
    };
    return cmocka_run_group_tests(tests, set_up, fixture_group_tear_down);
}
