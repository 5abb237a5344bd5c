/* SPDX-License-Identifier: MIT */
/*
 * From one row of logits to one token.
 *
 * Order: log-probabilities of the untouched logits; repetition penalty (HF: over prompt and
 * generated tokens, divides positive and multiplies negative logits); frequency and presence
 * penalty (OpenAI: over generated tokens); logit bias; EOS and stop ids masked while fewer than
 * min_new_tokens were generated; then greedy, or temperature, top-k, top-p over what top-k left,
 * min-p, and a draw by (seed, position). Equal logits order by id.
 */
#ifndef XPOOL_ENGINE_SAMPLER_H
#define XPOOL_ENGINE_SAMPLER_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "engine/engine.h"

typedef struct engine_sample_input {
    const engine_sampling_t *sampling;
    const int32_t *tokens; /* prompt, then generated */
    uint32_t prompt_count, count;
    uint64_t seed;
    const int32_t *eos;
    uint32_t eos_count;
} engine_sample_input_t;

typedef struct engine_sample {
    int32_t token;
    float logprob; /* NAN unless logprobs were asked for */
    uint32_t top_count;
    engine_logprob_t top[ENGINE_MAX_LOGPROBS];
} engine_sample_t;

/* Working space of one thread; zeroed once before its first use. */
size_t engine_sampler_space_bytes(uint32_t vocab);

/* Overwrites `logits`. XP_INVALID when they hold no finite maximum (a broken model): no token is
 * better than garbage. */
xp_status_t engine_sampler_run(const engine_sample_input_t *input, uint32_t vocab, float *logits,
                               void *space, engine_sample_t *sample_out);

/* Log-probability of `token` and the `top_count` most likely tokens, from untouched logits. */
xp_status_t engine_sampler_logprobs(const float *logits, uint32_t vocab, int32_t token,
                                    uint32_t top_count, void *space, engine_sample_t *sample_out);

/* XP_INVALID, with the field named, when a value is out of its bounds. */
xp_status_t engine_sampling_check(const engine_sampling_t *sampling, uint32_t vocab);
#endif
