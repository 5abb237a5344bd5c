/* SPDX-License-Identifier: MIT */
/*
 * An engine on models/tales/qwen3-moe with the plain FFN of reference_ffn.h and a clock the test
 * moves. Tests step it by hand (engine_iterate()) unless they start its thread.
 */
#ifndef XPOOL_TESTS_ENGINE_FIXTURE_H
#define XPOOL_TESTS_ENGINE_FIXTURE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <jansson.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/engine_private.h"
#include "reference_ffn.h"

#define TALES XPOOL_SOURCE_DIR "/models/tales/qwen3-moe"

#define FIXTURE_REQUESTS 64
#define FIXTURE_TOKENS   512

/* What one request's events added up to. */
typedef struct outcome {
    uint64_t request;
    int32_t tokens[FIXTURE_TOKENS];
    float logprobs[FIXTURE_TOKENS];
    uint32_t token_count;
    char text[8192];
    engine_event_t prompt[FIXTURE_TOKENS];
    uint32_t prompt_count;
    engine_event_t finish;
    bool finished;
} outcome_t;

typedef struct fixture {
    reference_ffn_t ffn;
    engine_t *engine;
    atomic_uint_least64_t now_ns;
    uint64_t step_ns;        /* the clock moves on by this at each FFN call of layer 0 */
    xp_status_t ffn_status;  /* what the FFN answers from now on */
    atomic_bool ffn_blocked; /* the FFN waits while this is set */
    atomic_uint ffn_layer0_calls;
    uint32_t most_rows;
    uint32_t kinds[3]; /* steps of each kind */
    outcome_t outcomes[FIXTURE_REQUESTS];
    uint32_t outcome_count;
} fixture_t;

static fixture_t *fixture;

static uint64_t fixture_now(void *context)
{
    return atomic_load(&((fixture_t *)context)->now_ns);
}

static xp_status_t fixture_ffn(void *context, uint32_t layer, uint32_t rows, uint32_t kind,
                               uint64_t slo_deadline_ns, const float *in, float *out)
{
    fixture_t *f = context;
    if (layer == 0) {
        atomic_fetch_add(&f->now_ns, f->step_ns);
        atomic_fetch_add(&f->ffn_layer0_calls, 1);
        f->kinds[kind]++;
        if (rows > f->most_rows)
            f->most_rows = rows;
    }
    while (atomic_load(&f->ffn_blocked))
        usleep(200);
    if (f->ffn_status != XP_OK)
        return xp_fail(f->ffn_status, "the test broke the FFN");
    return reference_ffn_call(&f->ffn, layer, rows, kind, slo_deadline_ns, in, out);
}

static engine_config_t fixture_config(void)
{
    return (engine_config_t){.model_id = "tales",
                             .path = TALES,
                             .threads = 1,
                             .decode_rows = 8,
                             .prefill_rows = 32,
                             .prefix_cache = true,
                             .queue_limit = 16,
                             .ffn = {.call = fixture_ffn, .context = fixture},
                             .clock = {.now_ns = fixture_now, .context = fixture}};
}

static void fixture_open(const engine_config_t *config)
{
    fixture->step_ns = 0;
    fixture->ffn_status = XP_OK;
    fixture->most_rows = 0;
    memset(fixture->kinds, 0, sizeof fixture->kinds);
    fixture->outcome_count = 0;
    atomic_store(&fixture->now_ns, 1000 * XP_NS_PER_S);
    xp_status_t status = engine_create(config, &fixture->engine);
    if (status != XP_OK)
        fail_msg("engine_create: %s", xp_error_last()->text);
}

static void fixture_close(void)
{
    engine_destroy(fixture->engine);
    fixture->engine = NULL;
}

static int fixture_group_set_up(void **state)
{
    (void)state;
    fixture = calloc(1, sizeof *fixture);
    if (!fixture || kernels_select() != XP_OK)
        return -1;
    reference_ffn_load(&fixture->ffn, TALES);
    return 0;
}

static int fixture_group_tear_down(void **state)
{
    (void)state;
    reference_ffn_free(&fixture->ffn);
    free(fixture);
    return 0;
}

static engine_sampling_t greedy(uint32_t new_tokens)
{
    engine_sampling_t sampling;
    engine_sampling_default(&sampling);
    sampling.temperature = 0;
    sampling.ignore_eos = true;
    sampling.max_new_tokens = new_tokens;
    return sampling;
}

static outcome_t *submit(const int32_t *ids, uint32_t count, const engine_sampling_t *sampling)
{
    assert_true(fixture->outcome_count < FIXTURE_REQUESTS);
    outcome_t *outcome = &fixture->outcomes[fixture->outcome_count++];
    memset(outcome, 0, sizeof *outcome);
    xp_status_t status = engine_submit(fixture->engine, ids, count, sampling, &outcome->request);
    if (status != XP_OK)
        fail_msg("engine_submit: %s", xp_error_last()->text);
    return outcome;
}

static void outcome_add(const engine_event_t *event)
{
    outcome_t *outcome = NULL;
    for (uint32_t i = 0; i < fixture->outcome_count; i++)
        if (fixture->outcomes[i].request == event->request)
            outcome = &fixture->outcomes[i];
    assert_non_null(outcome);
    assert_false(outcome->finished); /* nothing follows FINISH */
    /* A token may be the byte 0. */
    assert_true(strlen(event->text) <= event->text_length);
    assert_int_equal(event->text[event->text_length], 0);
    strncat(outcome->text, event->text, sizeof outcome->text - strlen(outcome->text) - 1);
    switch (event->type) {
    case ENGINE_EVENT_TOKEN:
        if (event->token < 0)
            break; /* surplus text only */
        outcome->logprobs[outcome->token_count] = event->logprob.logprob;
        outcome->tokens[outcome->token_count++] = event->token;
        assert_int_equal(event->completion_tokens, outcome->token_count);
        break;
    case ENGINE_EVENT_PROMPT:
        assert_int_equal(outcome->token_count, 0);
        outcome->prompt[outcome->prompt_count++] = *event;
        break;
    default:
        assert_int_not_equal(event->finish, ENGINE_FINISH_NONE);
        assert_int_equal(event->completion_tokens, outcome->token_count);
        outcome->finish = *event;
        outcome->finished = true;
    }
}

static uint32_t drain(void)
{
    static engine_event_t events[50];
    uint32_t got = engine_drain(fixture->engine, events, 50);
    for (uint32_t i = 0; i < got; i++)
        outcome_add(&events[i]);
    return got;
}

/* Steps by hand until nothing is left to do. */
static void run_dry(void)
{
    for (uint32_t turn = 0; turn < 20000; turn++) {
        bool done = engine_iterate(fixture->engine);
        if (drain() == 0 && !done)
            return;
    }
    fail_msg("the engine does not come to rest");
}

static engine_stats_t stats(void)
{
    engine_stats_t now;
    engine_stats(fixture->engine, &now);
    return now;
}

/* Prompts and the tokens transformers gave for them. */
typedef struct golden {
    int32_t ids[FIXTURE_TOKENS], greedy[FIXTURE_TOKENS];
    uint32_t count, greedy_count;
} golden_t;

static inline uint32_t golden_load(golden_t *golden, uint32_t most)
{
    json_t *root = json_load_file(TALES "/golden.json", 0, NULL);
    const json_t *prompts = json_object_get(root, "prompts");
    uint32_t count = 0;
    for (; count < most && count < json_array_size(prompts); count++) {
        const json_t *prompt = json_array_get(prompts, count);
        const json_t *ids = json_object_get(prompt, "ids");
        const json_t *tokens = json_object_get(prompt, "greedy_ids");
        golden[count].count = (uint32_t)json_array_size(ids);
        golden[count].greedy_count = (uint32_t)json_array_size(tokens);
        for (uint32_t i = 0; i < golden[count].count; i++)
            golden[count].ids[i] = (int32_t)json_integer_value(json_array_get(ids, i));
        for (uint32_t i = 0; i < golden[count].greedy_count; i++)
            golden[count].greedy[i] = (int32_t)json_integer_value(json_array_get(tokens, i));
    }
    json_decref(root);
    assert_true(count > 0);
    return count;
}

static inline void assert_golden(const outcome_t *outcome, const golden_t *golden)
{
    assert_true(outcome->finished);
    assert_int_equal(outcome->finish.finish, ENGINE_FINISH_LENGTH);
    assert_memory_equal(outcome->tokens, golden->greedy, outcome->token_count * sizeof(int32_t));
}
#endif
