/* SPDX-License-Identifier: MIT */
/* Router rules against an independent double implementation, ties, and rules that cannot be met. */
#include "support.h"

#include "ffn/route.h"

static const model_ffn_t rules[] = {
    {.experts = 16, .top_k = 4, .router = MODEL_ROUTER_SOFTMAX, .normalize_top_k = true},
    {.experts = 16, .top_k = 4, .router = MODEL_ROUTER_SOFTMAX},
    {.experts = 64, .top_k = 6, .router = MODEL_ROUTER_SOFTMAX, .groups = 8, .top_groups = 3},
    {.experts = 60, .top_k = 1, .router = MODEL_ROUTER_SOFTMAX, .groups = 4, .top_groups = 1},
    {.experts = 32, .top_k = 8, .router = MODEL_ROUTER_SIGMOID, .normalize_top_k = true},
    {.experts = 64,
     .top_k = 8,
     .router = MODEL_ROUTER_SIGMOID,
     .normalize_top_k = true,
     .groups = 8,
     .top_groups = 4},
    {.experts = 512, .top_k = 32, .router = MODEL_ROUTER_SIGMOID, .groups = 512, .top_groups = 64},
};

static void test_rules(void **state)
{
    (void)state;
    uint64_t seed = 1;
    for (size_t i = 0; i < sizeof(rules) / sizeof(rules[0]); i++)
        for (int variant = 0; variant < 400; variant++) {
            model_ffn_t rule = rules[i];
            rule.routed_scale = variant % 3 == 0 ? 1.0 : 1.8;
            if (!rule.groups)
                rule.groups = rule.top_groups = 1;
            assert_int_equal(ffn_route_check(&rule), XP_OK);
            float logits[MODEL_MAX_EXPERTS], bias[MODEL_MAX_EXPERTS];
            double exact_logits[MODEL_MAX_EXPERTS], exact_bias[MODEL_MAX_EXPERTS];
            double exact[MODEL_MAX_EXPERTS];
            bool biased = variant % 2;
            for (uint32_t e = 0; e < rule.experts; e++) {
                exact_logits[e] = (double)(logits[e] = 4 * reference_uniform(&seed));
                exact_bias[e] = (double)(bias[e] = 0.2f * reference_uniform(&seed));
            }
            double gap = reference_route(&rule, exact_logits, biased ? exact_bias : NULL, exact);
            uint32_t chosen[MODEL_MAX_TOP_K];
            float weights[MODEL_MAX_TOP_K];
            ffn_route_row(&rule, logits, biased ? bias : NULL, chosen, weights);
            bool seen[MODEL_MAX_EXPERTS] = {false};
            for (uint32_t k = 0; k < rule.top_k; k++) {
                assert_true(chosen[k] < rule.experts && !seen[chosen[k]]);
                seen[chosen[k]] = true;
                if (gap > 1e-6)
                    assert_true(fabs((double)weights[k] - exact[chosen[k]]) <=
                                2e-6 * exact[chosen[k]] + 1e-9);
            }
        }
}

static void test_ties_take_the_lowest_expert(void **state)
{
    (void)state;
    model_ffn_t rule = {.experts = 8, .top_k = 3, .routed_scale = 1, .groups = 1, .top_groups = 1};
    float logits[8] = {1, 2, 2, 1, 2, 2, 1, 0}, weights[3];
    uint32_t chosen[3];
    ffn_route_row(&rule, logits, NULL, chosen, weights);
    assert_int_equal(chosen[0], 1);
    assert_int_equal(chosen[1], 2);
    assert_int_equal(chosen[2], 4);
    assert_true(weights[0] == weights[2]);
}

static void test_not_a_number_still_chooses_distinct_experts(void **state)
{
    (void)state;
    for (int router = 0; router < 2; router++) {
        model_ffn_t rule = {.experts = 8,
                            .top_k = 8,
                            .router = (model_router_t)router,
                            .routed_scale = 1,
                            .groups = 4,
                            .top_groups = 4};
        float logits[8] = {NAN, 2, NAN, 1, INFINITY, -INFINITY, 1, 0}, weights[8];
        uint32_t chosen[8], seen = 0;
        ffn_route_row(&rule, logits, NULL, chosen, weights);
        for (uint32_t k = 0; k < 8; k++)
            seen |= 1u << chosen[k];
        assert_int_equal(seen, 0xff);
        rule.top_k = 2;
        rule.top_groups = 1;
        float again[8] = {NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN};
        ffn_route_row(&rule, again, NULL, chosen, weights);
        assert_true(chosen[0] < 8 && chosen[1] < 8 && chosen[0] != chosen[1]);
    }
}

static void test_impossible_rules(void **state)
{
    (void)state;
    const model_ffn_t bad[] = {
        {.experts = 0, .top_k = 1},
        {.experts = MODEL_MAX_EXPERTS + 1, .top_k = 1},
        {.experts = 8, .top_k = 0},
        {.experts = 8, .top_k = 9},
        {.experts = 64, .top_k = MODEL_MAX_TOP_K + 1},
        {.experts = 8, .top_k = 2, .groups = 3, .top_groups = 1},
        {.experts = 8, .top_k = 2, .groups = 2, .top_groups = 3},
        {.experts = 8, .top_k = 3, .groups = 4, .top_groups = 1},
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_true(ffn_route_check(&bad[i]) != XP_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rules),
        cmocka_unit_test(test_ties_take_the_lowest_expert),
        cmocka_unit_test(test_not_a_number_still_chooses_distinct_experts),
        cmocka_unit_test(test_impossible_rules),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
