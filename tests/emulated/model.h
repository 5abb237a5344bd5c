// SPDX-License-Identifier: MIT
// Layers for the emulated kernels, and what they give by sums in double.
#ifndef XPOOL_TESTS_EMULATED_MODEL_H
#define XPOOL_TESTS_EMULATED_MODEL_H

#include "values.h"

struct shape_t {
    ffn_cuda_signature_t signature;
    bool bias;
};

struct part_t {
    uint32_t width;
    bytes_t matrix[3];
    std::vector<float> value[3];
};

struct layer_t {
    std::vector<part_t> parts;
    std::vector<ffn_cuda_part_t> table;
    bytes_t router;
    std::vector<float> router_value, bias;
};

#define MODEL_LAYERS 4u
static ffn_cuda_signature_t signatures[MODEL_LAYERS]; // of each layer
static ffn_cuda_signature_t signature;                // of what is looked at
static std::vector<layer_t> layers;
static std::vector<ffn_cuda_layer_t> layer_table;
static uint32_t compared, unfair;
static double worst;

// Layers of both shapes in turn.
static void model_make(const shape_t &even, const shape_t &odd, uint32_t layer_count, uint64_t seed)
{
    EMULATED_CHECK(layer_count <= MODEL_LAYERS, "%u layers", layer_count);
    emulated_forbid_all();
    emulated_allow(signatures, sizeof(signatures));
    signature = even.signature;
    layers.assign(layer_count, {});
    layer_table.assign(layer_count, {});
    emulated_allow(layer_table.data(), layer_count * sizeof(layer_table[0]));
    for (uint32_t l = 0; l < layer_count; l++) {
        layer_t &layer = layers[l];
        const shape_t &shape = l % 2 ? odd : even;
        const ffn_cuda_signature_t &s = signatures[l] = shape.signature;
        const uint32_t count = s.experts ? s.experts + (s.shared_intermediate != 0) : 1;
        layer.parts.resize(count);
        for (uint32_t p = 0; p < count; p++) {
            part_t &part = layer.parts[p];
            part.width = s.experts && p == s.experts ? s.shared_intermediate : s.intermediate;
            for (uint32_t i = 0; i < 3; i++)
                fill((uint64_t)part.width * s.hidden, seed + (l * 1024 + p) * 8 + i,
                     2.5f / sqrtf((float)(i == 2 ? part.width : s.hidden)), s.dtype,
                     &part.matrix[i], &part.value[i]);
            layer.table.push_back(
                {part.matrix[0].data(), part.matrix[1].data(), part.matrix[2].data()});
        }
        emulated_allow(layer.table.data(), count * sizeof(layer.table[0]));
        fill((uint64_t)s.experts * s.hidden, seed + (l * 1024 + 1000) * 8 + 3,
             2.5f / sqrtf((float)s.hidden), s.router_dtype, &layer.router, &layer.router_value);
        layer.bias.resize(s.experts);
        for (uint32_t e = 0; e < s.experts; e++)
            layer.bias[e] = 0.2f * ffn_kit_value(seed + (l * 1024 + 1000) * 8 + 4, e);
        emulated_allow(layer.bias.data(), s.experts * 4);
        layer_table[l].signature = &signatures[l];
        layer_table[l].parts = layer.table.data();
        layer_table[l].router = layer.router.data();
        layer_table[l].bias = shape.bias ? layer.bias.data() : NULL;
        layer_table[l].next = (l + 1) % layer_count;
    }
}

static void model_make(const shape_t &shape, uint32_t layer_count, uint64_t seed)
{
    model_make(shape, shape, layer_count, seed);
}

static double dot(const float *x, const float *w, uint32_t count)
{
    double sum = 0;
    for (uint32_t i = 0; i < count; i++)
        sum += (double)x[i] * w[i];
    return sum;
}

// False: which experts are chosen hangs on the last bits.
static bool choose(const layer_t &layer, const float *x,
                   std::vector<std::pair<uint32_t, double>> *out)
{
    const ffn_cuda_signature_t &s = signature;
    std::vector<double> score(s.experts);
    std::vector<std::pair<double, uint32_t>> order;
    double most = -1e30, sum = 0;
    for (uint32_t e = 0; e < s.experts; e++) {
        score[e] = dot(x, layer.router_value.data() + (uint64_t)e * s.hidden, s.hidden);
        most = std::max(most, score[e]);
    }
    for (uint32_t e = 0; e < s.experts; e++) {
        score[e] = s.router ? 1 / (1 + exp(-score[e])) : exp(score[e] - most);
        sum += score[e];
    }
    for (uint32_t e = 0; e < s.experts; e++) {
        score[e] /= s.router ? 1 : sum;
        order.push_back(
            {-(score[e] + (layer_table[&layer - layers.data()].bias ? layer.bias[e] : 0)), e});
    }
    std::sort(order.begin(), order.end());
    double total = 0;
    for (uint32_t k = 0; k < s.top_k; k++)
        total += score[order[k].second];
    for (uint32_t k = 0; k < s.top_k; k++)
        out->push_back(
            {order[k].second, score[order[k].second] / (s.normalize ? total : 1) * s.routed_scale});
    return s.top_k == s.experts ||
           order[s.top_k].first - order[s.top_k - 1].first > 2e-6 * fabs(order[s.top_k].first);
}

static bool reference(const layer_t &layer, const float *x, std::vector<double> *output)
{
    const ffn_cuda_signature_t &s = signature;
    std::vector<std::pair<uint32_t, double>> parts;
    bool fair = true;
    output->assign(s.hidden, 0);
    if (s.experts)
        fair = choose(layer, x, &parts);
    if (!s.experts || s.shared_intermediate)
        parts.push_back({s.experts, 1});
    for (const auto &chosen : parts) {
        const part_t &part = layer.parts[chosen.first];
        std::vector<float> act(part.width);
        for (uint32_t i = 0; i < part.width; i++) {
            const double gate = dot(x, &part.value[0][(uint64_t)i * s.hidden], s.hidden);
            const double up = dot(x, &part.value[1][(uint64_t)i * s.hidden], s.hidden);
            const double inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate);
            act[i] = (float)(chosen.second * (s.activation ? 0.5 * gate * (1 + tanh(inner)) * up
                                                           : gate / (1 + exp(-gate)) * up));
        }
        for (uint32_t h = 0; h < s.hidden; h++)
            (*output)[h] += dot(act.data(), &part.value[2][(uint64_t)h * part.width], part.width);
    }
    return fair;
}

// What a Lane's layer has written, for rows whose elements are `values`.
static void compare_rows(const ffn_cuda_lane_t &lane, const std::vector<float> &values,
                         const char *what)
{
    const ffn_cuda_signature_t &s = signature = signatures[lane.layer];
    for (uint32_t row = 0; row < lane.rows; row++) {
        std::vector<double> want;
        double error = 0, size = 0;
        if (!reference(layers[lane.layer], &values[(uint64_t)row * s.hidden], &want)) {
            unfair++;
            continue;
        }
        for (uint32_t h = 0; h < s.hidden; h++) {
            const uint64_t at = (uint64_t)row * s.hidden + h;
            const double got = lane.output ? unpack(((const uint16_t *)lane.output)[at], s.dtype)
                                           : lane.partial[at];
            error += (got - want[h]) * (got - want[h]);
            size += want[h] * want[h];
        }
        const double limit = s.dtype == FFN_CUDA_BF16 ? 4e-3 : 6e-4;
        error = sqrt(error / size);
        EMULATED_CHECK(error <= limit,
                       "%s: hidden %u width %u experts %u top %u shared %u rows %u: row %u is off "
                       "by %.2e",
                       what, s.hidden, s.intermediate, s.experts, s.top_k, s.shared_intermediate,
                       lane.rows, row, error);
        compared++;
        worst = std::max(worst, error / limit);
    }
}

static ffn_cuda_signature_t dense(uint32_t hidden, uint32_t width, uint32_t dtype)
{
    ffn_cuda_signature_t s = {};
    s.hidden = hidden;
    s.intermediate = width;
    s.dtype = dtype;
    s.routed_scale = 1.0f;
    return s;
}

static ffn_cuda_signature_t moe(uint32_t hidden, uint32_t width, uint32_t experts, uint32_t top_k,
                                uint32_t shared)
{
    ffn_cuda_signature_t s = dense(hidden, width, FFN_CUDA_BF16);
    s.experts = experts;
    s.top_k = top_k;
    s.normalize = shared == 0;
    s.groups = s.top_groups = 1;
    s.shared_intermediate = shared;
    return s;
}
#endif
