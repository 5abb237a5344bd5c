/* SPDX-License-Identifier: MIT */
/*
 * Router rules.
 *
 * softmax: scores are a softmax over all experts (Qwen3-MoE, DeepSeek-V2); a group's score is its
 * best expert. sigmoid: scores are independent sigmoids (GLM-4, DeepSeek-V3 style); the correction
 * bias is added for the choice, and a group's score is the sum of its two best. The chosen weights
 * are the scores without the bias, divided by their sum where the family says so, times the routed
 * scale. Pure functions on the executing thread; FP32.
 */
#include "ffn/route.h"

#include <math.h>

#include "kernels/kernels.h"

xp_status_t ffn_route_check(const model_ffn_t *rule)
{
    if (rule->experts < 1 || rule->experts > MODEL_MAX_EXPERTS)
        return xp_fail(XP_UNSUPPORTED, "%u experts; 1 to %d are supported", rule->experts,
                       MODEL_MAX_EXPERTS);
    if (rule->top_k < 1 || rule->top_k > rule->experts || rule->top_k > MODEL_MAX_TOP_K)
        return xp_fail(XP_INVALID, "top_k %u of %u experts (at most %d)", rule->top_k,
                       rule->experts, MODEL_MAX_TOP_K);
    uint32_t groups = rule->groups ? rule->groups : 1;
    uint32_t top_groups = rule->top_groups ? rule->top_groups : 1;
    if (rule->experts % groups || top_groups > groups)
        return xp_fail(XP_INVALID, "%u experts in %u groups, %u of them chosen", rule->experts,
                       groups, top_groups);
    if (rule->experts / groups * top_groups < rule->top_k)
        return xp_fail(XP_INVALID, "top_k %u, but %u groups of %u experts hold fewer", rule->top_k,
                       top_groups, rule->experts / groups);
    return XP_OK;
}

/* The best index below `count` that is not yet taken. There must be one. */
static uint32_t route_best(const float *scores, const bool *taken, uint32_t count)
{
    uint32_t best = count;
    for (uint32_t i = 0; i < count; i++)
        if (!taken[i] && (best == count || scores[i] > scores[best] ||
                          (isnan(scores[best]) && !isnan(scores[i]))))
            best = i;
    XP_ASSERT(best < count);
    return best;
}

static float route_group_score(const model_ffn_t *rule, const float *choice, uint32_t count)
{
    float first = -INFINITY, second = -INFINITY;
    for (uint32_t i = 0; i < count; i++) {
        if (choice[i] > first) {
            second = first;
            first = choice[i];
        } else if (choice[i] > second) {
            second = choice[i];
        }
    }
    return rule->router == MODEL_ROUTER_SIGMOID && count > 1 ? first + second : first;
}

/* Marks the experts of all but the best groups as taken. */
static void route_limit_groups(const model_ffn_t *rule, const float *choice, bool *taken)
{
    uint32_t size = rule->experts / rule->groups;
    float scores[MODEL_MAX_EXPERTS];
    bool kept[MODEL_MAX_EXPERTS] = {false};
    for (uint32_t g = 0; g < rule->groups; g++)
        scores[g] = route_group_score(rule, choice + g * size, size);
    for (uint32_t i = 0; i < rule->top_groups; i++)
        kept[route_best(scores, kept, rule->groups)] = true;
    for (uint32_t e = 0; e < rule->experts; e++)
        taken[e] = !kept[e / size];
}

void ffn_route_row(const model_ffn_t *rule, float *logits, const float *bias, uint32_t *chosen_out,
                   float *weights_out)
{
    float shifted[MODEL_MAX_EXPERTS];
    bool taken[MODEL_MAX_EXPERTS] = {false};
    const float *choice = logits;
    if (rule->router == MODEL_ROUTER_SIGMOID)
        for (uint32_t e = 0; e < rule->experts; e++)
            logits[e] = 1.0f / (1.0f + expf(-logits[e]));
    else
        kernels_softmax(logits, rule->experts);
    if (bias) {
        for (uint32_t e = 0; e < rule->experts; e++)
            shifted[e] = logits[e] + bias[e];
        choice = shifted;
    }
    if (rule->groups > 1 && rule->top_groups < rule->groups)
        route_limit_groups(rule, choice, taken);
    float sum = 0.0f;
    for (uint32_t i = 0; i < rule->top_k; i++) {
        uint32_t expert = route_best(choice, taken, rule->experts);
        taken[expert] = true;
        chosen_out[i] = expert;
        weights_out[i] = logits[expert];
        sum += logits[expert];
    }
    for (uint32_t i = 0; i < rule->top_k; i++) {
        if (rule->normalize_top_k)
            weights_out[i] /= sum + 1e-20f; /* the families' own guard against a zero sum */
        weights_out[i] *= (float)rule->routed_scale;
    }
}
