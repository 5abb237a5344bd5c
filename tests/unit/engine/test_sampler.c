/* SPDX-License-Identifier: MIT */
/* The sampler against a straightforward reference in double, and its random numbers against the
 * known answers of the Philox publication. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/random.h"
#include "engine/sampler.h"

#define VOCAB 333u

static void *space;

static int set_up(void **state)
{
    (void)state;
    space = calloc(1, engine_sampler_space_bytes(VOCAB));
    return space ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    free(space);
    return 0;
}

static double uniform(void)
{
    return (double)rand() / RAND_MAX;
}

static void random_logits(float *logits, double spread)
{
    for (uint32_t i = 0; i < VOCAB; i++)
        logits[i] = (float)((uniform() + uniform() + uniform() - 1.5) * spread);
}

static void philox_known_answers(void **state)
{
    (void)state;
    /* Known-answer vectors published with Random123 for philox4x32, 10 rounds. */
    const uint32_t zero[4] = {0}, ones[4] = {~0u, ~0u, ~0u, ~0u};
    const uint32_t pi[4] = {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344};
    const uint32_t pi_key[2] = {0xa4093822, 0x299f31d0};
    const uint32_t want[3][4] = {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
                                 {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd},
                                 {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}};
    uint32_t out[4];
    engine_philox(zero, zero, out);
    assert_memory_equal(out, want[0], sizeof out);
    engine_philox(ones, ones, out);
    assert_memory_equal(out, want[1], sizeof out);
    engine_philox(pi_key, pi, out);
    assert_memory_equal(out, want[2], sizeof out);
}

/* ---- the reference ----------------------------------------------------------------------------
 */

typedef struct entry {
    uint32_t id;
    double p;
} entry_t;

static int by_likelihood(const void *a, const void *b)
{
    const entry_t *x = a, *y = b;
    if (x->p != y->p)
        return x->p > y->p ? -1 : 1;
    return x->id < y->id ? -1 : 1;
}

static void reference_adjust(const engine_sample_input_t *input, double *logits)
{
    const engine_sampling_t *s = input->sampling;
    for (uint32_t id = 0; id < VOCAB; id++) {
        uint32_t generated = 0, seen = 0;
        for (uint32_t i = 0; i < input->count; i++)
            if (input->tokens[i] == (int32_t)id) {
                seen++;
                generated += i >= input->prompt_count;
            }
        if (seen && s->repetition_penalty != 1)
            logits[id] = logits[id] < 0 ? logits[id] * (double)s->repetition_penalty
                                        : logits[id] / (double)s->repetition_penalty;
        if (generated)
            logits[id] -= (double)s->frequency_penalty * generated + (double)s->presence_penalty;
        for (uint32_t i = 0; i < s->bias_count; i++)
            if (s->bias[i].id == (int32_t)id)
                logits[id] += (double)s->bias[i].bias;
    }
    if (input->count - input->prompt_count < s->min_new_tokens) {
        for (uint32_t i = 0; i < input->eos_count && !s->ignore_eos; i++)
            logits[input->eos[i]] = -INFINITY;
        for (uint32_t i = 0; i < s->stop_id_count; i++)
            logits[s->stop_ids[i]] = -INFINITY;
    }
}

/* Fills kept[] with the ids that may be drawn and their renormalised probabilities. */
static uint32_t reference_kept(const engine_sampling_t *s, const double *logits, entry_t *kept)
{
    double top = -INFINITY, total = 0, mass = 0, cumulative = 0;
    for (uint32_t i = 0; i < VOCAB; i++)
        top = fmax(top, logits[i]);
    for (uint32_t i = 0; i < VOCAB; i++) {
        kept[i] = (entry_t){i, exp((logits[i] - top) / (double)s->temperature)};
        total += kept[i].p;
    }
    for (uint32_t i = 0; i < VOCAB; i++)
        kept[i].p /= total;
    qsort(kept, VOCAB, sizeof *kept, by_likelihood);
    uint32_t k = s->top_k > 0 && s->top_k < (int32_t)VOCAB ? (uint32_t)s->top_k : VOCAB;
    for (uint32_t i = 0; i < k; i++)
        mass += kept[i].p;
    uint32_t count = 0;
    while (count < k) {
        if (count > 0 && s->top_p < 1 && cumulative >= (double)s->top_p * mass)
            break;
        if (count > 0 && kept[count].p < (double)s->min_p * kept[0].p)
            break;
        cumulative += kept[count++].p;
    }
    for (uint32_t i = 0; i < count; i++)
        kept[i].p /= cumulative;
    return count;
}

static engine_sample_t run(const engine_sample_input_t *input, const float *logits)
{
    float copy[VOCAB];
    engine_sample_t sample;
    memcpy(copy, logits, sizeof copy);
    assert_int_equal(engine_sampler_run(input, VOCAB, copy, space, &sample), XP_OK);
    return sample;
}

static void greedy_is_the_first_maximum(void **state)
{
    (void)state;
    float logits[VOCAB];
    engine_sampling_t s;
    engine_sampling_default(&s);
    s.temperature = 0;
    const int32_t token = 1;
    engine_sample_input_t input = {.sampling = &s, .tokens = &token, .prompt_count = 1, .count = 1};
    for (uint32_t turn = 0; turn < 200; turn++) {
        random_logits(logits, 4);
        logits[rand() % VOCAB] = NAN;
        uint32_t at = (uint32_t)rand() % (VOCAB - 9);
        logits[at] = logits[at + 8] = 50;
        assert_int_equal(run(&input, logits).token, at);
    }
}

static void broken_logits_give_no_token(void **state)
{
    (void)state;
    float logits[VOCAB];
    engine_sampling_t s;
    engine_sampling_default(&s);
    const int32_t token = 1;
    engine_sample_input_t input = {.sampling = &s, .tokens = &token, .prompt_count = 1, .count = 1};
    for (uint32_t kind = 0; kind < 3; kind++)
        for (uint32_t mode = 0; mode < 2; mode++) {
            s.temperature = mode ? 1 : 0;
            for (uint32_t i = 0; i < VOCAB; i++)
                logits[i] = kind == 0 ? NAN : kind == 1 ? -INFINITY : 1;
            if (kind == 2)
                logits[5] = INFINITY;
            engine_sample_t sample;
            assert_int_equal(engine_sampler_run(&input, VOCAB, logits, space, &sample), XP_INVALID);
        }
}

static void adjustments_match_the_reference(void **state)
{
    (void)state;
    float logits[VOCAB];
    double wanted[VOCAB];
    int32_t tokens[60];
    const int32_t eos[2] = {3, 7};
    for (uint32_t turn = 0; turn < 300; turn++) {
        engine_sampling_t s;
        engine_sampling_default(&s);
        s.temperature = 0;
        random_logits(logits, 2);
        for (uint32_t i = 0; i < 60; i++)
            tokens[i] = rand() % 40;
        for (uint32_t i = 0; i < 40; i++)
            logits[i] += 2; /* so that the penalised tokens are the candidates */
        if (turn & 1)
            s.repetition_penalty = (float)(0.5 + uniform());
        if (turn & 2)
            s.presence_penalty = (float)(uniform() - 0.3);
        if (turn & 4)
            s.frequency_penalty = (float)(uniform() - 0.3);
        if (turn & 8) {
            s.bias_count = 5;
            for (uint32_t i = 0; i < 5; i++) {
                s.bias[i].id = rand() % (int32_t)VOCAB;
                s.bias[i].bias = (float)(uniform() * 6 - 3);
            }
        }
        if (turn & 16) {
            s.min_new_tokens = 41;
            s.stop_id_count = 1;
            s.stop_ids[0] = 11;
            logits[3] = logits[7] = logits[11] = 30;
        }
        engine_sample_input_t input = {.sampling = &s,
                                       .tokens = tokens,
                                       .prompt_count = 20,
                                       .count = 60,
                                       .eos = eos,
                                       .eos_count = 2};
        for (uint32_t i = 0; i < VOCAB; i++)
            wanted[i] = (double)logits[i];
        reference_adjust(&input, wanted);
        int32_t token = run(&input, logits).token;
        for (uint32_t i = 0; i < VOCAB; i++)
            assert_true(wanted[token] >= wanted[i] - 1e-5);
        for (uint32_t i = 0; i < VOCAB; i++)
            assert_int_equal(((uint32_t *)space)[i], 0); /* counters were put back */
    }
}

static void logprobs_are_of_the_untouched_distribution(void **state)
{
    (void)state;
    float logits[VOCAB];
    const int32_t tokens[3] = {4, 5, 5};
    for (uint32_t turn = 0; turn < 100; turn++) {
        engine_sampling_t s;
        engine_sampling_default(&s);
        s.temperature = (float)(turn % 3) * 0.7f;
        s.repetition_penalty = 1.3f;
        s.want_logprobs = true;
        s.top_logprobs = turn % (ENGINE_MAX_LOGPROBS + 1);
        random_logits(logits, 8);
        logits[9] = -INFINITY;
        engine_sample_input_t input = {
            .sampling = &s, .tokens = tokens, .prompt_count = 1, .count = 3, .seed = turn};
        engine_sample_t sample = run(&input, logits);
        double total = 0;
        entry_t order[VOCAB];
        for (uint32_t i = 0; i < VOCAB; i++)
            total += exp((double)logits[i]);
        for (uint32_t i = 0; i < VOCAB; i++)
            order[i] = (entry_t){i, (double)logits[i] - log(total)};
        assert_true(fabs((double)sample.logprob - order[sample.token].p) < 2e-6 * 20);
        qsort(order, VOCAB, sizeof *order, by_likelihood);
        assert_int_equal(sample.top_count, s.top_logprobs);
        for (uint32_t i = 0; i < sample.top_count; i++) {
            assert_int_equal(sample.top[i].id, order[i].id);
            assert_true(fabs((double)sample.top[i].logprob - order[i].p) < 2e-6 * 20);
        }
    }
}

/* Draws with many seeds: only kept tokens appear, each as often as its probability says. */
static void draws_follow_the_reference_distribution(void **state)
{
    (void)state;
    float logits[VOCAB];
    double wanted[VOCAB];
    entry_t kept[VOCAB];
    const int32_t token = 1;
    for (uint32_t turn = 0; turn < 40; turn++) {
        engine_sampling_t s;
        engine_sampling_default(&s);
        s.temperature = (float)(0.3 + uniform());
        random_logits(logits, turn % 2 ? 12 : 3);
        if (turn & 1)
            s.top_k = 2 + rand() % 30;
        if (turn & 2)
            s.top_p = (float)(0.2 + 0.79 * uniform());
        if (turn & 4)
            s.min_p = (float)(uniform() * (turn & 8 ? 0.3 : 1e-4));
        engine_sample_input_t input = {
            .sampling = &s, .tokens = &token, .prompt_count = 1, .count = 1};
        for (uint32_t i = 0; i < VOCAB; i++)
            wanted[i] = (double)logits[i];
        uint32_t count = reference_kept(&s, wanted, kept);
        uint32_t drawn[VOCAB] = {0};
        const uint32_t draws = 4000;
        for (uint32_t i = 0; i < draws; i++) {
            input.seed = 1000003ull * turn + i;
            drawn[run(&input, logits).token]++;
        }
        double chi = 0;
        uint32_t degrees = 0, inside = 0;
        for (uint32_t i = 0; i < count; i++) {
            double expected = kept[i].p * draws;
            inside += drawn[kept[i].id];
            if (expected < 8)
                continue;
            double off = drawn[kept[i].id] - expected;
            chi += off * off / expected;
            degrees++;
        }
        /* A border token may fall on either side of a cut by rounding, no more. */
        assert_true(draws - inside <= (count < VOCAB ? draws / 200 : 0));
        assert_true(chi < degrees + 6 * sqrt(2.0 * degrees) + 6);
    }
}

static void same_seed_same_token(void **state)
{
    (void)state;
    float logits[VOCAB];
    engine_sampling_t s;
    engine_sampling_default(&s);
    int32_t tokens[2] = {1, 2};
    engine_sample_input_t input = {
        .sampling = &s, .tokens = tokens, .prompt_count = 1, .count = 2, .seed = 42};
    random_logits(logits, 1);
    int32_t first = run(&input, logits).token;
    uint32_t other = 0;
    for (uint32_t i = 0; i < 20; i++) {
        assert_int_equal(run(&input, logits).token, first);
        engine_sample_input_t moved = input;
        moved.count = 1 + i % 2;
        moved.seed = 43 + i;
        other += run(&moved, logits).token != first;
    }
    assert_true(other > 10);
}

static void bad_parameters_are_named(void **state)
{
    (void)state;
    engine_sampling_t s;
#define REFUSED(word, change)                                                                      \
    do {                                                                                           \
        engine_sampling_default(&s);                                                               \
        change;                                                                                    \
        assert_int_equal(engine_sampling_check(&s, VOCAB), XP_INVALID);                            \
        assert_non_null(strstr(xp_error_last()->text, word));                                      \
    } while (0)
    engine_sampling_default(&s);
    assert_int_equal(engine_sampling_check(&s, VOCAB), XP_OK);
    REFUSED("temperature", s.temperature = -1);
    REFUSED("temperature", s.temperature = NAN);
    REFUSED("temperature", s.temperature = INFINITY);
    REFUSED("top_p", s.top_p = 0);
    REFUSED("top_p", s.top_p = NAN);
    REFUSED("min_p", s.min_p = 1.5f);
    REFUSED("presence_penalty", s.presence_penalty = INFINITY);
    REFUSED("frequency_penalty", s.frequency_penalty = NAN);
    REFUSED("repetition_penalty", s.repetition_penalty = 0);
    REFUSED("top_logprobs", s.top_logprobs = ENGINE_MAX_LOGPROBS + 1);
    REFUSED("stop", s.stop_count = 1); /* empty string */
    REFUSED("stop", s.stop_count = ENGINE_MAX_STOPS + 1);
    REFUSED("stop", (s.stop_count = 1, memset(s.stops[0], 'a', sizeof s.stops[0])));
    REFUSED("stop token", s.stop_id_count = ENGINE_MAX_STOP_IDS + 1);
    REFUSED("logit_bias", s.bias_count = ENGINE_MAX_BIAS + 1);
    REFUSED("logit_bias", (s.bias_count = 1, s.bias[0].id = VOCAB));
    REFUSED("logit_bias", (s.bias_count = 1, s.bias[0].bias = NAN));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(philox_known_answers),
        cmocka_unit_test(greedy_is_the_first_maximum),
        cmocka_unit_test(broken_logits_give_no_token),
        cmocka_unit_test(adjustments_match_the_reference),
        cmocka_unit_test(logprobs_are_of_the_untouched_distribution),
        cmocka_unit_test(draws_follow_the_reference_distribution),
        cmocka_unit_test(same_seed_same_token),
        cmocka_unit_test(bad_parameters_are_named),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
