// SPDX-License-Identifier: MIT
// Router and plan of few rows without a GPU: src/ffn/cuda/few_route.cuh, whole, over emulated.h,
// against choices by sums in double; blocks and threads in random order, launches one after the
// other over the same counters, a row alone and among others.
//
// usage: route_emulated [SEED]
#include "emulated.h"

#include "ffn/cuda/few_route.cuh"

#include "values.h"

typedef few_route_t<FEW_ROUTE_THREADS / 32> route_t;
static ffn_cuda_signature_t signature;
static ffn_cuda_layer_t layer;
static bytes_t router, input, usage;
static std::vector<float> router_value, input_value, bias;
static uint32_t compared, unfair;

// What a launch reads and writes; kept from one to the next, as on a device.
struct workspace_t {
    std::vector<uint32_t> chosen, pair_at, row_ids, tile_count;
    std::vector<uint64_t> arrived;
    std::vector<float> weights, products;
    std::vector<ffn_cuda_tile_t> tiles;
    ffn_cuda_lane_t lane;
};

static void workspace_make(workspace_t *w)
{
    const uint64_t pairs = (uint64_t)FEW_ROWS_MOST * signature.top_k;
    memset((void *)&w->lane, 0, sizeof(w->lane));
    w->chosen.assign(pairs, 0xffffffff);
    w->pair_at = w->row_ids = w->chosen;
    w->weights.assign(pairs, NAN);
    w->products.assign((uint64_t)FEW_ROWS_MOST * signature.experts, NAN);
    w->tile_count.assign(2, 0xffffffff);
    w->arrived.assign(FEW_ROUTE_ARRIVED, 0);
    w->tiles.assign(pairs / FEW_TILE_ROWS + signature.experts + FEW_ROWS_MOST / FEW_TILE_ROWS + 1,
                    {0, 0, 0, 0});
    emulated_allow(w->chosen.data(), pairs * 4);
    emulated_allow(w->products.data(), w->products.size() * 4);
    emulated_allow(w->arrived.data(), w->arrived.size() * 8);
    ffn_cuda_workspace_t &to = w->lane.workspace;
    to.chosen = w->chosen.data();
    to.pair_at = w->pair_at.data();
    to.row_ids = w->row_ids.data();
    to.weights = w->weights.data();
    to.products = w->products.data();
    to.tile_count = w->tile_count.data();
    to.arrived = w->arrived.data();
    to.tiles = w->tiles.data();
    w->lane.layers = &layer;
}

static void launch(workspace_t *w, uint32_t first, uint32_t rows, uint32_t capacity, uint64_t order)
{
    const uint32_t blocks = few_parts(signature.experts, FEW_ROUTE_EXPERTS) *
                            few_parts(capacity ? capacity : 1, FEW_ROUTE_ROWS);
    w->lane.input = input.data() + (uint64_t)first * signature.hidden * 2;
    w->lane.rows = rows;
    emulated_run(blocks ? blocks : 1, FEW_ROUTE_THREADS, sizeof(route_t), EMULATED_EARLY, order,
                 [w] { few_route(*(route_t *)ptx_dynamic_shared(), &w->lane); });
    for (uint64_t counter : w->arrived)
        EMULATED_CHECK(counter == 0, "a counter is left at %llu", (unsigned long long)counter);
}

// Of input row `row`, which is row `at` of the launch.
static void compare_row(const workspace_t &w, uint32_t row, uint32_t at)
{
    const ffn_cuda_signature_t &s = signature;
    std::vector<std::pair<double, uint32_t>> order;
    std::vector<double> score(s.experts);
    double most = -1e30, sum = 0, total = 0;
    for (uint32_t e = 0; e < s.experts; e++) {
        for (uint32_t k = 0; k < s.hidden; k++)
            score[e] += (double)input_value[(uint64_t)row * s.hidden + k] *
                        router_value[(uint64_t)e * s.hidden + k];
        most = std::max(most, score[e]);
    }
    for (uint32_t e = 0; e < s.experts; e++)
        sum += exp(score[e] - most);
    std::vector<double> choice(s.experts);
    for (uint32_t e = 0; e < s.experts; e++) {
        score[e] = s.router ? 1 / (1 + exp(-score[e])) : exp(score[e] - most) / sum;
        choice[e] = score[e] + (layer.bias ? bias[e] : 0);
    }
    // Of a group counts its best, or the sum of its best two.
    const uint32_t size = s.experts / s.groups;
    std::vector<std::pair<double, uint32_t>> groups;
    for (uint32_t g = 0; g < s.groups; g++) {
        std::vector<double> best(choice.begin() + g * size, choice.begin() + (g + 1) * size);
        std::sort(best.begin(), best.end(), std::greater<double>());
        groups.push_back({-(best[0] + (s.router && size > 1 ? best[1] : 0)), g});
    }
    std::sort(groups.begin(), groups.end());
    for (uint32_t g = 0; g < s.top_groups; g++)
        for (uint32_t e = groups[g].second * size; e < (groups[g].second + 1) * size; e++)
            order.push_back({-choice[e], e});
    std::sort(order.begin(), order.end());
    const auto close = [](const std::vector<std::pair<double, uint32_t>> &of, uint32_t n) {
        return n < of.size() && of[n].first - of[n - 1].first < 2e-6 * fabs(of[n].first);
    };
    if (close(groups, s.top_groups) || close(order, s.top_k)) {
        unfair++;
        return;
    }
    order.resize(s.top_k);
    std::sort(order.begin(), order.end(),
              [](const auto &a, const auto &b) { return a.second < b.second; });
    for (const auto &each : order)
        total += score[each.second];
    for (uint32_t k = 0; k < s.top_k; k++) {
        const uint32_t expert = order[k].second;
        const double want = score[expert] / (s.normalize ? total : 1) * s.routed_scale;
        EMULATED_CHECK(w.chosen[at * s.top_k + k] == expert, "row %u: expert %u for %u", row,
                       w.chosen[at * s.top_k + k], expert);
        EMULATED_CHECK(fabs(w.weights[at * s.top_k + k] - want) <= 2e-5 * fabs(want) + 1e-9,
                       "row %u: weight %g for %g", row, w.weights[at * s.top_k + k], want);
    }
    compared++;
}

// Every pair has one place among those of its expert, and the tiles hold all of them once.
static void compare_plan(const workspace_t &w, uint32_t rows)
{
    const ffn_cuda_signature_t &s = signature;
    const uint32_t pairs = s.experts ? rows * s.top_k : 0;
    std::vector<uint32_t> of(pairs, 0xffffffff), begin(s.experts + 1, 0);
    for (uint32_t pair = 0; pair < pairs; pair++) {
        const uint32_t at = w.pair_at[pair];
        EMULATED_CHECK(at < pairs && of[at] == 0xffffffff, "pair %u at %u", pair, at);
        of[at] = w.chosen[pair];
        EMULATED_CHECK(w.row_ids[at] == pair / s.top_k, "pair %u is of another row", pair);
        begin[w.chosen[pair] + 1]++;
    }
    uint32_t tile = 0, distinct = 0;
    for (uint32_t e = 0; e < s.experts; e++) {
        const uint32_t count = begin[e + 1];
        begin[e + 1] += begin[e];
        distinct += count != 0;
        for (uint32_t i = 0; i < count; i++)
            EMULATED_CHECK(of[begin[e] + i] == e, "expert %u has another's pair", e);
        for (uint32_t done = 0; done < count; done += FEW_TILE_ROWS, tile++)
            EMULATED_CHECK(w.tiles[tile].part == e && w.tiles[tile].first == begin[e] + done &&
                               w.tiles[tile].rows == min(FEW_TILE_ROWS, count - done),
                           "tile %u", tile);
    }
    EMULATED_CHECK(w.tile_count[0] == tile, "%u tiles for %u", w.tile_count[0], tile);
    const uint32_t width = s.experts ? s.shared_intermediate : s.intermediate;
    const uint32_t last = width ? few_parts(rows, FEW_TILE_ROWS) : 0;
    EMULATED_CHECK(w.tile_count[1] == last, "%u tiles of the last part", w.tile_count[1]);
    for (uint32_t i = 0; i < last; i++, tile++)
        EMULATED_CHECK(w.tiles[tile].part == s.experts &&
                           w.tiles[tile].first == i * FEW_TILE_ROWS &&
                           w.tiles[tile].rows == min(FEW_TILE_ROWS, rows - i * FEW_TILE_ROWS),
                       "tile %u", tile);
    if (s.experts == 0)
        return;
    const ffn_cuda_usage_t *counted = (const ffn_cuda_usage_t *)usage.data();
    EMULATED_CHECK(counted->rows == rows && counted->executions == (rows != 0) &&
                       counted->experts == (rows ? distinct : 0),
                   "usage of %llu rows", (unsigned long long)counted->rows);
    for (uint32_t e = 0; e < s.experts; e++)
        EMULATED_CHECK(ffn_cuda_usage_chosen((ffn_cuda_usage_t *)usage.data())[e] ==
                           begin[e + 1] - begin[e],
                       "usage of expert %u", e);
}

static void test_shape(const ffn_cuda_signature_t &s, bool with_bias, uint64_t seed)
{
    static const uint32_t counts[] = {0, 1, 7, 8, 9, 17, 32, 33, 64};
    workspace_t w, alone;
    signature = s;
    emulated_forbid_all();
    fill((uint64_t)s.experts * s.hidden, seed, 2.5f / sqrtf((float)s.hidden), s.router_dtype,
         &router, &router_value);
    fill((uint64_t)FEW_ROWS_MOST * s.hidden, seed + 1, 1.0f, s.dtype, &input, &input_value);
    bias.resize(s.experts);
    for (uint32_t e = 0; e < s.experts; e++)
        bias[e] = 0.2f * ffn_kit_value(seed + 2, e);
    memset((void *)&layer, 0, sizeof(layer));
    layer.signature = &signature;
    layer.router = router.data();
    layer.bias = with_bias ? bias.data() : NULL;
    workspace_make(&w);
    workspace_make(&alone);
    for (uint32_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        const uint32_t rows = counts[i], capacity = i % 2 ? FEW_ROWS_MOST : rows;
        usage.assign(ffn_cuda_usage_bytes(s.experts), 0);
        layer.usage = s.experts ? (ffn_cuda_usage_t *)usage.data() : NULL;
        launch(&w, 0, rows, capacity, seed + i);
        for (uint32_t row = 0; s.experts && row < rows; row++)
            compare_row(w, row, row);
        compare_plan(w, rows);
        if (rows < 2 || s.experts == 0)
            continue;
        const uint32_t row = rows * 5 / 7;
        layer.usage = NULL;
        launch(&alone, row, 1, i % 3 ? 1 : 16, seed + 100 + i);
        EMULATED_CHECK(
            memcmp(&alone.products[0], &w.products[(uint64_t)row * s.experts], s.experts * 4) ==
                    0 &&
                memcmp(&alone.weights[0], &w.weights[(uint64_t)row * s.top_k], s.top_k * 4) == 0,
            "row %u alone has other bits", row);
    }
    printf("hidden %u experts %u top %u router %u: right\n", s.hidden, s.experts, s.top_k,
           s.router_dtype);
}

int main(int count, char **arguments)
{
    const uint64_t seed = count > 1 ? strtoull(arguments[1], NULL, 10) : 1;
    static const struct {
        uint32_t hidden, experts, top_k, dtype, router_dtype, router, normalize, shared, groups,
            top_groups;
        bool bias;
    } shapes[] = {
        {2048, 128, 8, FFN_CUDA_BF16, FFN_CUDA_BF16, 0, 1, 0, 1, 1, false},
        {2056, 40, 4, FFN_CUDA_F16, FFN_CUDA_F16, 0, 0, 24, 1, 1, false},
        {72, 160, 6, FFN_CUDA_BF16, FFN_CUDA_F32, 1, 1, 16, 8, 3, true},
        {520, 24, 1, FFN_CUDA_F16, FFN_CUDA_F32, 1, 0, 0, 1, 1, true},
        {64, 512, 32, FFN_CUDA_BF16, FFN_CUDA_BF16, 0, 1, 0, 1, 1, false},
        {64, 0, 0, FFN_CUDA_BF16, FFN_CUDA_BF16, 0, 0, 0, 1, 1, false},
    };
    for (uint32_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        ffn_cuda_signature_t s = {};
        s.hidden = shapes[i].hidden;
        s.intermediate = 64;
        s.experts = shapes[i].experts;
        s.top_k = shapes[i].top_k;
        s.dtype = shapes[i].dtype;
        s.router_dtype = shapes[i].router_dtype;
        s.router = shapes[i].router;
        s.normalize = shapes[i].normalize;
        s.shared_intermediate = shapes[i].shared;
        s.groups = shapes[i].groups;
        s.top_groups = shapes[i].top_groups;
        s.routed_scale = 1.5f;
        test_shape(s, shapes[i].bias, seed * 1000 + i * 10);
    }
    printf("%u rows compared, %u not comparable\n", compared, unfair);
    return compared > 4 * unfair ? 0 : 1;
}
