/* SPDX-License-Identifier: MIT */
/* Sampling of one row. Any member of the engine's team; owns nothing, allocates nothing. */
#include "engine/sampler.h"

#include <math.h>
#include <string.h>

#include "engine/random.h"
#include "kernels/kernels.h"

/* Temperatures below this are greedy: the division would only overflow. */
#define GREEDY_TEMPERATURE 1e-5f
/* First guess of how unlikely, against the likeliest, a token of the nucleus can be. */
#define LIKELY_RATIO 1e-3f
#define PROMPT_MARK  0x80000000u

typedef struct space {
    uint32_t *counts; /* [vocab], zero between calls */
    uint32_t *order;  /* [vocab] */
    float *work;      /* [vocab] */
} space_t;

size_t engine_sampler_space_bytes(uint32_t vocab)
{
    return (size_t)vocab * (2 * sizeof(uint32_t) + sizeof(float));
}

static space_t space_of(void *memory, uint32_t vocab)
{
    uint32_t *counts = memory;
    return (space_t){
        .counts = counts, .order = counts + vocab, .work = (float *)(counts + 2 * (size_t)vocab)};
}

void engine_sampling_default(engine_sampling_t *sampling)
{
    memset(sampling, 0, sizeof *sampling);
    sampling->temperature = 1.0f;
    sampling->top_p = 1.0f;
    sampling->repetition_penalty = 1.0f;
    sampling->skip_special_tokens = true;
}

xp_status_t engine_sampling_check(const engine_sampling_t *s, uint32_t vocab)
{
    if (!(s->temperature >= 0) || !isfinite(s->temperature))
        return xp_fail(XP_INVALID, "temperature %g: want a number >= 0", s->temperature);
    if (!(s->top_p > 0 && s->top_p <= 1))
        return xp_fail(XP_INVALID, "top_p %g: want a number in (0, 1]", s->top_p);
    if (!(s->min_p >= 0 && s->min_p <= 1))
        return xp_fail(XP_INVALID, "min_p %g: want a number in [0, 1]", s->min_p);
    if (!(fabsf(s->presence_penalty) <= 100))
        return xp_fail(XP_INVALID, "presence_penalty %g: want a number in [-100, 100]",
                       s->presence_penalty);
    if (!(fabsf(s->frequency_penalty) <= 100))
        return xp_fail(XP_INVALID, "frequency_penalty %g: want a number in [-100, 100]",
                       s->frequency_penalty);
    if (!(s->repetition_penalty > 0) || !isfinite(s->repetition_penalty))
        return xp_fail(XP_INVALID, "repetition_penalty %g: want a number > 0",
                       s->repetition_penalty);
    if (s->top_logprobs > ENGINE_MAX_LOGPROBS)
        return xp_fail(XP_INVALID, "top_logprobs %u: want at most %d", s->top_logprobs,
                       ENGINE_MAX_LOGPROBS);
    if (s->stop_count > ENGINE_MAX_STOPS)
        return xp_fail(XP_INVALID, "stop: %u strings, at most %d", s->stop_count, ENGINE_MAX_STOPS);
    for (uint32_t i = 0; i < s->stop_count; i++) {
        size_t length = strnlen(s->stops[i], ENGINE_MAX_STOP_BYTES);
        if (length == 0 || length == ENGINE_MAX_STOP_BYTES)
            return xp_fail(XP_INVALID, "stop: string %u has to have 1 to %d bytes", i,
                           ENGINE_MAX_STOP_BYTES - 1);
    }
    if (s->stop_id_count > ENGINE_MAX_STOP_IDS)
        return xp_fail(XP_INVALID, "stop token ids: %u, at most %d", s->stop_id_count,
                       ENGINE_MAX_STOP_IDS);
    if (s->bias_count > ENGINE_MAX_BIAS)
        return xp_fail(XP_INVALID, "logit_bias: %u entries, at most %d", s->bias_count,
                       ENGINE_MAX_BIAS);
    for (uint32_t i = 0; i < s->bias_count; i++)
        if (s->bias[i].id < 0 || (uint32_t)s->bias[i].id >= vocab || !isfinite(s->bias[i].bias))
            return xp_fail(XP_INVALID, "logit_bias: token %d with bias %g; ids are 0 to %u",
                           s->bias[i].id, s->bias[i].bias, vocab - 1);
    return XP_OK;
}

/* First index of the largest value; NaN is never largest. Lanes let the compiler use vector maxima.
 */
static uint32_t argmax(const float *values, uint32_t count)
{
    float lanes[16], largest = -INFINITY;
    for (uint32_t j = 0; j < 16; j++)
        lanes[j] = -INFINITY;
    uint32_t i = 0;
    for (; i + 16 <= count; i += 16)
        for (uint32_t j = 0; j < 16; j++)
            lanes[j] = values[i + j] > lanes[j] ? values[i + j] : lanes[j];
    for (; i < count; i++)
        largest = values[i] > largest ? values[i] : largest;
    for (uint32_t j = 0; j < 16; j++)
        largest = lanes[j] > largest ? lanes[j] : largest;
    for (i = 0; i < count; i++)
        if (values[i] == largest)
            return i;
    return 0;
}

/* ---- log-probabilities ----------------------------------------------------------------------- */

/* Fills the sample's top list and says log(sum(exp(logits))). */
static xp_status_t raw_logprobs(const float *logits, uint32_t vocab, uint32_t top_count,
                                float *work, engine_sample_t *sample, double *log_sum_out)
{
    uint32_t best = argmax(logits, vocab);
    if (!isfinite(logits[best]))
        return xp_fail(XP_INVALID, "the model's logits are not finite");
    /* log(sum exp(l)) = l_max - log(p_max): p_max is the one probability that cannot underflow. */
    memcpy(work, logits, vocab * sizeof(float));
    kernels_softmax(work, vocab);
    const double log_sum = (double)logits[best] - log((double)work[best]);
    if (!isfinite(log_sum))
        return xp_fail(XP_INVALID, "the model's logits are not finite");

    engine_logprob_t *top = sample->top;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < vocab && top_count > 0; i++) {
        if (kept == top_count && !(logits[i] > top[kept - 1].logprob))
            continue;
        uint32_t at = kept < top_count ? kept++ : kept - 1;
        for (; at > 0 && logits[i] > top[at - 1].logprob; at--)
            top[at] = top[at - 1];
        top[at] = (engine_logprob_t){.id = (int32_t)i, .logprob = logits[i]};
    }
    for (uint32_t i = 0; i < kept; i++)
        top[i].logprob = (float)((double)top[i].logprob - log_sum);
    sample->top_count = kept;
    *log_sum_out = log_sum;
    return XP_OK;
}

xp_status_t engine_sampler_logprobs(const float *logits, uint32_t vocab, int32_t token,
                                    uint32_t top_count, void *memory, engine_sample_t *sample_out)
{
    double log_sum;
    XP_TRY(
        raw_logprobs(logits, vocab, top_count, space_of(memory, vocab).work, sample_out, &log_sum));
    sample_out->token = token;
    sample_out->logprob = token >= 0 ? (float)((double)logits[token] - log_sum) : NAN;
    return XP_OK;
}

/* ---- adjustments ----------------------------------------------------------------------------- */

static void penalize(const engine_sample_input_t *input, float *logits, uint32_t *counts)
{
    const engine_sampling_t *s = input->sampling;
    const bool repetition = s->repetition_penalty != 1.0f;
    const bool additive = s->presence_penalty != 0.0f || s->frequency_penalty != 0.0f;
    if (!repetition && !additive)
        return;
    const uint32_t first = repetition ? 0 : input->prompt_count;
    for (uint32_t i = first; i < input->count; i++) {
        uint32_t *count = &counts[input->tokens[i]];
        if (i < input->prompt_count)
            *count |= PROMPT_MARK;
        else
            ++*count;
    }
    for (uint32_t i = first; i < input->count; i++) {
        int32_t id = input->tokens[i];
        uint32_t count = counts[id];
        if (count == 0)
            continue; /* an earlier occurrence was handled */
        counts[id] = 0;
        if (repetition)
            logits[id] = logits[id] < 0 ? logits[id] * s->repetition_penalty
                                        : logits[id] / s->repetition_penalty;
        uint32_t generated = count & ~PROMPT_MARK;
        if (additive && generated > 0)
            logits[id] -= s->frequency_penalty * (float)generated + s->presence_penalty;
    }
}

static void mask_ids(const int32_t *ids, uint32_t count, uint32_t vocab, float *logits)
{
    for (uint32_t i = 0; i < count; i++)
        if (ids[i] >= 0 && (uint32_t)ids[i] < vocab)
            logits[ids[i]] = -INFINITY;
}

static void adjust(const engine_sample_input_t *input, uint32_t vocab, float *logits,
                   uint32_t *counts)
{
    const engine_sampling_t *s = input->sampling;
    penalize(input, logits, counts);
    for (uint32_t i = 0; i < s->bias_count; i++)
        logits[s->bias[i].id] += s->bias[i].bias;
    if (input->count - input->prompt_count < s->min_new_tokens) {
        if (!s->ignore_eos)
            mask_ids(input->eos, input->eos_count, vocab, logits);
        mask_ids(s->stop_ids, s->stop_id_count, vocab, logits);
    }
}

/* ---- the draw -------------------------------------------------------------------------------- */

/* A binary heap of ids, the likeliest on top: only as much is sorted as the cut needs. */
static inline bool before(const float *p, uint32_t a, uint32_t b)
{
    return p[a] > p[b] || (p[a] == p[b] && a < b);
}

static void sift_down(const float *p, uint32_t *heap, uint32_t count, uint32_t at)
{
    uint32_t id = heap[at];
    for (;;) {
        uint32_t child = 2 * at + 1;
        if (child >= count)
            break;
        if (child + 1 < count && before(p, heap[child + 1], heap[child]))
            child++;
        if (!before(p, heap[child], id))
            break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = id;
}

static void heap_build(const float *p, uint32_t *heap, uint32_t count)
{
    for (uint32_t i = count / 2; i-- > 0;)
        sift_down(p, heap, count, i);
}

/* Moves the likeliest remaining id behind the shrinking heap: heap[count - 1] after the call. */
static uint32_t heap_pop(const float *p, uint32_t *heap, uint32_t count)
{
    uint32_t top = heap[0];
    heap[0] = heap[count - 1];
    heap[count - 1] = top;
    if (count > 1)
        sift_down(p, heap, count - 1, 0);
    return top;
}

/* Collects ids with p >= limit. */
static uint32_t collect(const float *p, uint32_t vocab, float limit, uint32_t *ids, double *sum_out)
{
    uint32_t count = 0;
    double sum = 0;
    for (uint32_t i = 0; i < vocab; i++)
        if (p[i] >= limit) {
            ids[count++] = i;
            sum += p[i];
        }
    *sum_out = sum;
    return count;
}

static int32_t draw_unfiltered(const float *p, uint32_t vocab, double unit)
{
    double total = 0, passed = 0;
    for (uint32_t i = 0; i < vocab; i++)
        total += p[i];
    uint32_t last = 0;
    for (uint32_t i = 0; i < vocab; i++) {
        if (!(p[i] > 0))
            continue;
        last = i;
        passed += p[i];
        if (passed > unit * total)
            break;
    }
    return (int32_t)last;
}

static int32_t draw_filtered(const engine_sampling_t *s, const float *p, uint32_t vocab,
                             float largest, uint32_t *heap, double unit)
{
    const uint32_t top_k = s->top_k > 0 && (uint32_t)s->top_k < vocab ? (uint32_t)s->top_k : vocab;
    /* A nucleus rarely holds anything a thousand times less likely than its head; look at the whole
     * vocabulary only when it might. */
    double all = 0;
    for (uint32_t i = 0; i < vocab; i++)
        all += p[i];
    double sum;
    uint32_t candidates = collect(p, vocab, largest * LIKELY_RATIO, heap, &sum);
    bool enough = (top_k < vocab && candidates >= top_k) ||
                  (s->top_p < 1 && sum >= s->top_p * all) || s->min_p >= LIKELY_RATIO;
    if (!enough)
        candidates = collect(p, vocab, 0.0f, heap, &sum);
    heap_build(p, heap, candidates);

    /* Popped ids gather at the end of the array, the likeliest last. */
    const uint32_t limit = top_k < candidates ? top_k : candidates;
    uint32_t kept = 0;
    double mass = all;
    if (top_k < vocab && s->top_p < 1) {
        mass = 0;
        for (; kept < limit; kept++)
            mass += p[heap_pop(p, heap, candidates - kept)];
    }
    double cumulative = 0;
    uint32_t count = 0;
    for (; count < limit; count++) {
        if (count > 0 && s->top_p < 1 && cumulative >= s->top_p * mass)
            break;
        if (count == kept) {
            heap_pop(p, heap, candidates - kept);
            kept++;
        }
        float next = p[heap[candidates - 1 - count]];
        if (count > 0 && (next < s->min_p * largest || !(next > 0)))
            break;
        cumulative += next;
    }
    double passed = 0;
    for (uint32_t i = 0; i + 1 < count; i++) {
        passed += p[heap[candidates - 1 - i]];
        if (passed > unit * cumulative)
            return (int32_t)heap[candidates - 1 - i];
    }
    return (int32_t)heap[candidates - count];
}

xp_status_t engine_sampler_run(const engine_sample_input_t *input, uint32_t vocab, float *logits,
                               void *memory, engine_sample_t *sample_out)
{
    const engine_sampling_t *s = input->sampling;
    space_t space = space_of(memory, vocab);
    engine_sample_t sample = {.token = -1, .logprob = NAN};
    const bool logprobs = s->want_logprobs || s->top_logprobs > 0;
    double log_sum = 0;
    if (logprobs) {
        XP_TRY(raw_logprobs(logits, vocab, s->top_logprobs, space.work, &sample, &log_sum));
        /* The untouched logits are still needed when the token is known. */
        memcpy(space.work, logits, vocab * sizeof(float));
    }
    adjust(input, vocab, logits, space.counts);
    uint32_t best = argmax(logits, vocab);
    if (!isfinite(logits[best]))
        return xp_fail(XP_INVALID, "the model's logits are not finite");

    sample.token = (int32_t)best;
    if (s->temperature >= GREEDY_TEMPERATURE && s->top_k != 1) {
        const float top = logits[best], scale = 1.0f / s->temperature;
        for (uint32_t i = 0; i < vocab; i++) {
            float shifted = (logits[i] - top) * scale;
            logits[i] = isnan(shifted) ? -INFINITY : shifted;
        }
        kernels_softmax(logits, vocab);
        double unit = engine_random_unit(input->seed, input->count);
        const bool filtered =
            (s->top_k > 0 && (uint32_t)s->top_k < vocab) || s->top_p < 1 || s->min_p > 0;
        sample.token = filtered ? draw_filtered(s, logits, vocab, logits[best], space.order, unit)
                                : draw_unfiltered(logits, vocab, unit);
    }
    if (logprobs)
        sample.logprob = (float)((double)space.work[sample.token] - log_sum);
    *sample_out = sample;
    return XP_OK;
}
