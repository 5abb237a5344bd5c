// SPDX-License-Identifier: MIT
// The layers of few rows without a GPU: src/ffn/cuda/few.cu over emulated.h, against sums in
// double. The resident kernel over a filled queue, whole, and the launches up to the products,
// which must have the same bits; copies that arrive early, late and mixed, threads in random order.
//
// usage: few_emulated [SEED]
#include "emulated.h"

#include "ffn/cuda/few.cu"

#include "model.h"

// A Lane and its workspace; not moved once it is made.
struct lane_t {
    ffn_cuda_lane_t lane;
    bytes_t input, output, partial, activations;
    std::vector<float> values, weights, products;
    std::vector<uint32_t> chosen, pair_at, row_ids, tile_count;
    std::vector<uint64_t> arrived;
    std::vector<ffn_cuda_tile_t> tiles;
    ffn_cuda_meeting_t meeting;
};

template <typename V> static V *made(std::vector<V> *of, uint64_t count, V value)
{
    of->assign(count, value);
    emulated_allow(of->data(), count * sizeof(V));
    return of->data();
}

static void lane_make(lane_t *l, uint32_t layer, uint32_t rows, bool partial, uint64_t seed)
{
    const ffn_cuda_signature_t &s = signature;
    const uint64_t pairs = (uint64_t)FEW_ROWS_MOST * s.top_k;
    const uint64_t last = s.experts ? s.shared_intermediate : s.intermediate;
    memset((void *)&l->lane, 0, sizeof(l->lane));
    memset((void *)&l->meeting, 0, sizeof(l->meeting));
    emulated_allow(&l->meeting, sizeof(l->meeting));
    fill((uint64_t)rows * s.hidden, seed, 1.0f, s.dtype, &l->input, &l->values);
    l->lane.layers = layer_table.data();
    l->lane.layer = layer;
    l->lane.rows = rows;
    l->lane.input = l->input.data();
    const unsigned char none = 0xff;
    unsigned char *output = made(&l->output, (uint64_t)rows * s.hidden * 2, none);
    unsigned char *sums = made(&l->partial, (uint64_t)rows * s.hidden * 4, none);
    l->lane.output = partial ? NULL : output;
    l->lane.partial = partial ? (float *)sums : NULL;
    ffn_cuda_workspace_t &w = l->lane.workspace;
    w.meeting = &l->meeting;
    w.chosen = made(&l->chosen, pairs, 0xffffffffu);
    w.pair_at = made(&l->pair_at, pairs, 0xffffffffu);
    w.row_ids = made(&l->row_ids, pairs, 0xffffffffu);
    w.weights = made(&l->weights, pairs, NAN);
    w.tile_count = made(&l->tile_count, 2, 0xffffffffu);
    w.arrived = made(&l->arrived, FEW_ROUTE_ARRIVED, (uint64_t)0);
    w.tiles = made(&l->tiles, pairs / FEW_TILE_ROWS + s.experts + FEW_ROWS_MOST / FEW_TILE_ROWS + 1,
                   {0, 0, 0, 0});
    w.activations =
        made(&l->activations, (pairs * s.intermediate + FEW_ROWS_MOST * last) * 2, none);
    w.products = made(
        &l->products,
        std::max((pairs + FEW_ROWS_MOST) * s.hidden, (uint64_t)FEW_ROWS_MOST * s.experts), NAN);
}

// ---- launches
// ------------------------------------------------------------------------------------
static void launch_all(lane_t *l, uint32_t blocks, emulated_copies_t copies, uint64_t order)
{
    const uint32_t units =
        few_parts(signature.experts, FEW_ROUTE_EXPERTS) * few_parts(l->lane.rows, FEW_ROUTE_ROWS);
    typedef few_route_t<FEW_ROUTE_THREADS / 32> route_t;
    emulated_run(units ? units : 1, FEW_ROUTE_THREADS, sizeof(route_t), copies, order,
                 [l] { few_route(*(route_t *)ptx_dynamic_shared(), &l->lane); });
    for (uint32_t down = 0; down < 2; down++)
        emulated_run(blocks, FEW_THREADS, FEW_SHARED_BYTES, copies, order + down, [l, down] {
            if (signature.dtype == FFN_CUDA_BF16)
                few<__nv_bfloat16>(&l->lane, down);
            else
                few<__half>(&l->lane, down);
            ptx_copies_wait<0>(); // those past the end, of nothing
        });
}

// What ffn_bulk_reduce() adds, in its order.
static void launches_sum(lane_t *l)
{
    const ffn_cuda_signature_t &s = signature;
    const uint32_t rows = l->lane.rows, top_k = s.experts ? s.top_k : 0;
    for (uint32_t row = 0; row < rows; row++)
        for (uint32_t h = 0; h < s.hidden; h++) {
            float sum = 0;
            for (uint32_t k = 0; k < top_k; k++)
                sum = fmaf(l->weights[row * top_k + k],
                           l->products[(uint64_t)l->pair_at[row * top_k + k] * s.hidden + h], sum);
            if (s.experts == 0 || s.shared_intermediate)
                sum = fmaf(1.0f, l->products[((uint64_t)rows * top_k + row) * s.hidden + h], sum);
            const uint64_t at = (uint64_t)row * s.hidden + h;
            if (l->lane.output)
                ((uint16_t *)l->lane.output)[at] = pack(sum, s.dtype);
            else
                l->lane.partial[at] = sum;
        }
}

// ---- the resident kernel
// -------------------------------------------------------------------------
static void resident_run(std::vector<lane_t *> order, uint32_t blocks, emulated_copies_t copies,
                         uint64_t seed)
{
    static ffn_cuda_queue_t queue;
    static std::vector<uint64_t> words;
    memset((void *)&queue, 0, sizeof(queue));
    emulated_allow(&queue, sizeof(queue));
    made(&words, order.size() * 2, (uint64_t)0);
    for (size_t i = 0; i <= order.size(); i++) {
        ffn_cuda_command_t &command = queue.entries[i];
        command.sequence = i + 1;
        if (i == order.size())
            break; // without a Lane: leave
        ffn_cuda_lane_t &lane = order[i]->lane;
        command.lane = &lane;
        command.layers = lane.layers;
        command.input = lane.input;
        command.output = lane.output;
        command.partial = lane.partial;
        command.layer = lane.layer;
        command.rows = lane.rows;
        command.answer = i % 3 ? &words[2 * i] : NULL;
        command.answer_value = 1000 + i;
        command.done = &words[2 * i + 1];
        command.done_value = 2000 + i;
    }
    emulated_run(blocks, FEW_THREADS, FEW_SHARED_BYTES + sizeof(few_call_t), copies, seed, [] {
        few_resident(*(few_call_t *)(ptx_dynamic_shared() + FEW_SHARED_BYTES), ptx_dynamic_shared(),
                     &queue);
    });
    EMULATED_CHECK(queue.answered == order.size(), "%llu answers",
                   (unsigned long long)queue.answered);
    for (size_t i = 0; i < order.size(); i++)
        EMULATED_CHECK(words[2 * i] == (i % 3 ? 1000 + i : 0) && words[2 * i + 1] == 2000 + i,
                       "the words of command %zu", i);
}

static void test_shape(uint32_t blocks, uint64_t seed)
{
    enum { LANES = 6 };
    const ffn_cuda_signature_t &s = signature;
    const uint32_t rows[LANES] = {17, (uint32_t)(1 + seed % 8), 0, 33, 64, 24};
    std::vector<lane_t> lanes(LANES), other(LANES);
    std::vector<lane_t *> order;
    for (uint32_t i = 0; i < LANES; i++) {
        lane_make(&lanes[i], (uint32_t)(i % layers.size()), rows[i], i % 2, seed + i);
        lane_make(&other[i], (uint32_t)(i % layers.size()), rows[i], i % 2, seed + i);
    }
    for (uint32_t i = 0; i < LANES; i++)
        order.push_back(&lanes[(i + seed) % LANES]);
    order.push_back(&lanes[4]); // a Lane again, after others and right after itself
    order.push_back(&lanes[0]);
    order.push_back(&lanes[0]);
    resident_run(order, blocks, (emulated_copies_t)(seed % 3), seed);
    for (uint32_t i = 0; i < LANES; i++) {
        compare_rows(lanes[i].lane, lanes[i].values, "resident");
        for (uint64_t counter : lanes[i].arrived)
            EMULATED_CHECK(counter == 0, "a counter is left at %llu", (unsigned long long)counter);
        if (rows[i] == 0)
            continue;
        launch_all(&other[i], blocks + 2, (emulated_copies_t)((seed + i) % 3), seed + 50 + i);
        launches_sum(&other[i]);
        EMULATED_CHECK(lanes[i].output == other[i].output && lanes[i].partial == other[i].partial,
                       "%u rows have other bits by launches", rows[i]);
    }
    printf("hidden %u width %u experts %u top %u shared %u: right\n", s.hidden, s.intermediate,
           s.experts, s.top_k, s.shared_intermediate);
}

int main(int count, char **arguments)
{
    const uint64_t seed = count > 1 ? strtoull(arguments[1], NULL, 10) : 1;
    std::vector<std::pair<shape_t, uint32_t>> shapes = {
        {{moe(128, 64, 8, 2, 0), false}, 2},
        {{moe(264, 72, 40, 4, 40), false}, 3}, // widths that fill no item
        {{moe(192, 72, 16, 4, 72), true}, 5},  // as GLM: sigmoid, bias, FP32 router
        {{moe(64, 136, 160, 6, 0), false}, 7}, // fewer units than blocks at times
        {{moe(136, 64, 24, 8, 0), false}, 1},  // a block alone
        {{moe(72, 40, 8, 8, 24), false}, 4},   // all choose all: tiles of 32 rows
        {{dense(136, 88, FFN_CUDA_F16), false}, 3},
    };
    shapes[2].first.signature.router = 1;
    shapes[2].first.signature.router_dtype = FFN_CUDA_F32;
    shapes[2].first.signature.routed_scale = 1.8f;
    shapes[4].first.signature.dtype = FFN_CUDA_F16;
    shapes[4].first.signature.router_dtype = FFN_CUDA_F16;
    shapes[1].first.signature.activation = 1;
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (size_t i = 0; i < shapes.size(); i++) {
        model_make(shapes[i].first, 2, seed * 1000000 + i * 10000);
        test_shape(shapes[i].second, seed * 131 + i);
    }
    printf("%u rows compared, %u not comparable, largest error %.2f of the tolerance\n", compared,
           unfair, worst);
    return compared == 0 || unfair * 10 > compared;
}
