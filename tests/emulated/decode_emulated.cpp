// SPDX-License-Identifier: MIT
// The decode kernel, whole, without a GPU: src/ffn/cuda/decode.cu over emulated.h, against sums in
// double. Layers of all kinds, any number of rows, uneven shares, the resident kernel over a filled
// queue; copies that arrive early, late and mixed, threads in random order.
//
// usage: decode_emulated [SEED]
#include "emulated.h"

#include "ffn/cuda/decode.cu"

#include "model.h"

// ---- Lanes
// ---------------------------------------------------------------------------------------
struct lane_t {
    ffn_cuda_lane_t lane;
    bytes_t input, output, partial, activations;
    std::vector<float> values;
    std::vector<uint64_t> logits;
    ffn_cuda_meeting_t meeting;
    uint32_t shares[2][FFN_CUDA_MAX_BLOCKS + 1], cycles[2][FFN_CUDA_MAX_BLOCKS];
};

// Not moved afterwards.
static void lane_make(lane_t *l, uint32_t layer, uint32_t rows, bool partial, uint64_t seed)
{
    const ffn_cuda_signature_t &s = signature = signatures[layer];
    const uint32_t chosen = s.experts ? std::min(32 * s.top_k, s.experts) : 1;
    const uint64_t pitch =
        (uint64_t)chosen * s.intermediate + (s.experts ? s.shared_intermediate : 0);
    memset((void *)&l->lane, 0, sizeof(l->lane));
    memset((void *)&l->meeting, 0, sizeof(l->meeting));
    memset(l->shares, 0, sizeof(l->shares));
    fill((uint64_t)rows * s.hidden, seed, 1.0f, s.dtype, &l->input, &l->values);
    l->output.assign((uint64_t)rows * s.hidden * 2, 0xff);
    l->partial.assign((uint64_t)rows * s.hidden * 4, 0xff);
    l->activations.assign(32 * pitch * 2, 0xff);
    l->logits.assign(32 * (s.experts + 1), 0);
    emulated_allow(l->activations.data(), l->activations.size());
    emulated_allow(l->logits.data(), l->logits.size() * 8);
    emulated_allow(&l->meeting, sizeof(l->meeting));
    l->lane.layers = layer_table.data();
    l->lane.layer = layer;
    l->lane.rows = rows;
    l->lane.input = l->input.data();
    l->lane.output = partial ? NULL : l->output.data();
    l->lane.partial = partial ? (float *)l->partial.data() : NULL;
    l->lane.workspace.meeting = &l->meeting;
    l->lane.workspace.shares = l->shares;
    l->lane.workspace.cycles = l->cycles;
    l->lane.workspace.logits = l->logits.data();
    l->lane.workspace.decode_activations = l->activations.data();
    l->lane.workspace.decode_pitch = pitch;
}

static void uneven(lane_t *l, uint32_t blocks)
{
    for (uint32_t phase = 0; phase < 2; phase++) {
        uint64_t sum = 0, at = 0;
        for (uint32_t i = 0; i < blocks; i++)
            sum += 10 + (i * 7919 + phase) % 11;
        for (uint32_t i = 0; i < blocks; i++) {
            l->shares[phase][i] = (uint32_t)(at * FFN_CUDA_SHARE_ONE / sum);
            at += 10 + (i * 7919 + phase) % 11;
        }
        l->shares[phase][blocks] = FFN_CUDA_SHARE_ONE;
    }
}

static void launch(lane_t *l, uint32_t blocks, emulated_copies_t copies, uint64_t order)
{
    emulated_run(blocks, DECODE_THREADS, DECODE_SHARED_BYTES, copies, order,
                 [l] { ffn_decode(&l->lane, NULL, 0); });
}

static void compare(const lane_t &l, const char *what)
{
    compare_rows(l.lane, l.values, what);
}

static void test_launches(uint32_t blocks, uint64_t seed)
{
    const ffn_cuda_signature_t &s = signature;
    static const uint32_t counts[] = {1, 3, 8, 9, 16, 27, 32};
    const uint32_t most = s.experts ? FFN_CUDA_DECODE_ROWS : FFN_CUDA_DENSE_ROWS;
    for (uint32_t i = (uint32_t)seed % 2; i < 7 && counts[i] <= most; i += 2) {
        const emulated_copies_t copies = (emulated_copies_t)((i + seed) % 3);
        lane_t all, one;
        lane_make(&all, i % layers.size(), counts[i], false, seed + 100 + i);
        launch(&all, blocks, copies, seed + i);
        compare(all, "launch");
        // A row gives the same bits alone, with other shares, other blocks, another order.
        const uint32_t row = counts[i] * 7 / 9;
        lane_make(&one, i % layers.size(), counts[i], false, seed + 100 + i);
        one.lane.input = (const char *)one.lane.input + (uint64_t)row * s.hidden * 2;
        one.lane.rows = 1;
        uneven(&one, blocks + 1);
        launch(&one, blocks + 1, (emulated_copies_t)((copies + 1) % 3), seed + 50 + i);
        EMULATED_CHECK(
            memcmp(one.output.data(), &all.output[(uint64_t)row * s.hidden * 2], s.hidden * 2) == 0,
            "hidden %u width %u experts %u rows %u: row %u alone has other bits", s.hidden,
            s.intermediate, s.experts, counts[i], row);
    }
}

static void test_resident(uint32_t blocks, bool look_ahead, uint64_t seed)
{
    enum { LANES = 5 };
    static const uint32_t rows[LANES] = {1, 16, 0, 7, 12};
    static ffn_cuda_queue_t queue;
    lane_t lanes[LANES];
    memset((void *)&queue, 0, sizeof(queue));
    emulated_allow(&queue, sizeof(queue));
    for (uint32_t i = 0; i < LANES; i++) {
        lane_make(&lanes[i], (uint32_t)((i + i / 4) % layers.size()), rows[i], i % 2,
                  seed + 300 + i);
        if (i % 2)
            uneven(&lanes[i], blocks);
    }
    for (uint32_t i = 0; i <= 2 * LANES; i++) {
        ffn_cuda_command_t &command = queue.entries[i];
        command.sequence = i + 1;
        if (i == 2 * LANES)
            break;
        lane_t &l = lanes[i % LANES];
        command.lane = &l.lane;
        command.layers = l.lane.layers;
        command.input = l.lane.input;
        command.output = l.lane.output;
        command.partial = l.lane.partial;
        command.layer = l.lane.layer;
        command.rows = l.lane.rows;
        command.lane_number = i % 2; // two Lanes may have one number
    }
    emulated_run(blocks, DECODE_THREADS, DECODE_SHARED_BYTES, (emulated_copies_t)(seed % 3), seed,
                 [look_ahead] { ffn_decode(NULL, &queue, look_ahead); });
    EMULATED_CHECK(queue.answered == 2 * LANES, "%llu answers", (unsigned long long)queue.answered);
    for (uint32_t i = 0; i < LANES; i++)
        compare(lanes[i], look_ahead ? "resident, looking ahead" : "resident");
}

// ---- cuts
// ----------------------------------------------------------------------------------------
// Commands and cuts posted at any moment, as the scheduler posts them; each has the bits that its
// Lane has alone. At the end the kernel is told to leave, by a command or by the word.
static uint32_t all_cuts, all_stops; // posted; blocks that were cut in the middle of a command
// Moments at which a command that has not ended was cut twice, both cuts being done.
static uint32_t all_seconds;

struct cuts_scene_t {
    static constexpr uint32_t LANES = 7, LONG = 3, POSTS = 16; // the first LONG Lanes are long ones
    lane_t lanes[LANES];
    std::vector<unsigned char> want[LANES];
    ffn_cuda_queue_t queue;
    ffn_cuda_dispatch_t dispatch;
    ffn_cuda_poster_t poster;
    uint64_t done[LANES], tickets[LANES];
    uint32_t posts, often, cuts;
    bool by_word, told;
};

static bytes_t &scene_bytes(lane_t *l)
{
    return l->lane.output ? l->output : l->partial;
}

static void scene_check(cuts_scene_t *scene, uint32_t lane)
{
    lane_t *l = &scene->lanes[lane];
    const bytes_t &got = scene_bytes(l);
    if (scene->tickets[lane])
        EMULATED_CHECK(memcmp(got.data(), scene->want[lane].data(), got.size()) == 0,
                       "Lane %u of %u rows has other bits after %u cuts", lane, l->lane.rows,
                       scene->cuts);
}

static void scene_step(cuts_scene_t *scene)
{
    const ffn_cuda_poster_t &poster = scene->poster;
    all_seconds += poster.long_cuts > 1 && scene->queue.cuts_answered == poster.cuts &&
                   scene->done[poster.long_lane] != poster.long_ticket;
    if (emulated_random() % scene->often || scene->told)
        return;
    if (scene->posts == cuts_scene_t::POSTS) {
        scene->told = true;
        if (scene->by_word) {
            scene->queue.stop = 1;
            return;
        }
        ffn_cuda_command_t &command =
            scene->queue.entries[scene->poster.commands % FFN_CUDA_QUEUE_ENTRIES];
        memset((void *)&command, 0, sizeof(command));
        command.cuts = scene->poster.cuts;
        command.sequence = scene->poster.commands + 1;
        return;
    }
    const uint32_t lane = emulated_random() % cuts_scene_t::LANES;
    if (scene->done[lane] != scene->tickets[lane])
        return;
    scene_check(scene, lane);
    bytes_t &bytes = scene_bytes(&scene->lanes[lane]);
    std::fill(bytes.begin(), bytes.end(), (unsigned char)0xff);
    const uint32_t before = scene->poster.cuts;
    scene->tickets[lane]++;
    EMULATED_CHECK(ffn_cuda_command_post(&scene->dispatch, &scene->poster, lane,
                                         lane < cuts_scene_t::LONG ? 100 : 10, scene->tickets[lane],
                                         NULL, 0),
                   "a post was refused");
    scene->cuts += scene->poster.cuts - before;
    scene->posts++;
}

static void test_cuts(uint32_t blocks, bool look_ahead, uint64_t seed)
{
    static const uint32_t rows[cuts_scene_t::LANES] = {16, 9, 8, 1, 2, 0, 1};
    static cuts_scene_t scene;
    static std::vector<unsigned char> aside;
    aside.assign(blocks * FFN_CUDA_ASIDE_BYTES, 0xff);
    scene.posts = scene.cuts = 0;
    scene.by_word = seed % 2;
    scene.told = false;
    scene.often = 1u << (8 + seed % 7);
    memset((void *)&scene.queue, 0, sizeof(scene.queue));
    memset((void *)&scene.dispatch, 0, sizeof(scene.dispatch));
    memset((void *)&scene.poster, 0, sizeof(scene.poster));
    emulated_allow(&scene.queue, sizeof(scene.queue));
    emulated_allow(scene.done, sizeof(scene.done));
    scene.queue.aside = aside.data();
    scene.dispatch.cuts = 1;
    scene.dispatch.layers = layer_table.data();
    scene.dispatch.queue = &scene.queue;
    scene.poster.lease = 1;
    for (uint32_t i = 0; i < cuts_scene_t::LANES; i++) {
        const uint32_t layer = i % layers.size();
        lane_make(&scene.lanes[i], layer, rows[i], i % 2, seed + 700 + i);
        if (i % 2)
            uneven(&scene.lanes[i], blocks);
        launch(&scene.lanes[i], blocks, EMULATED_MIXED, seed + i);
        compare(scene.lanes[i], "before cuts");
        scene.want[i] = scene_bytes(&scene.lanes[i]);
        scene.dispatch.lanes[i].lane = &scene.lanes[i].lane;
        scene.dispatch.lanes[i].done = &scene.done[i];
        scene.done[i] = scene.tickets[i] = 0;
    }
    emulated.outside = [] { scene_step(&scene); };
    emulated_run(blocks, DECODE_THREADS, DECODE_SHARED_BYTES, (emulated_copies_t)(seed % 3), seed,
                 [look_ahead] { ffn_decode(NULL, &scene.queue, look_ahead); });
    emulated.outside = nullptr;
    EMULATED_CHECK(scene.queue.answered == scene.poster.commands &&
                       scene.queue.cuts_answered == scene.poster.cuts,
                   "%llu of %llu commands, %llu of %u cuts",
                   (unsigned long long)scene.queue.answered,
                   (unsigned long long)scene.poster.commands,
                   (unsigned long long)scene.queue.cuts_answered, scene.poster.cuts);
    for (uint32_t i = 0; i < cuts_scene_t::LANES; i++)
        scene_check(&scene, i);
    all_cuts += scene.cuts;
    // Put aside at least once a stop, whole.
    for (uint64_t i = 0; i + 8 <= aside.size(); i += FFN_CUDA_ASIDE_BYTES)
        all_stops += memcmp(&aside[i], "\xff\xff\xff\xff\xff\xff\xff\xff", 8) != 0;
}

int main(int count, char **arguments)
{
    const uint64_t seed = count > 1 ? strtoull(arguments[1], NULL, 10) : 1;
    std::vector<std::pair<shape_t, uint32_t>> shapes = {
        {{dense(256, 512, FFN_CUDA_BF16), false}, 3},
        {{dense(136, 88, FFN_CUDA_F16), false}, 12},
        {{dense(1032, 328, FFN_CUDA_BF16), false}, 2},
        {{dense(64, 2600, FFN_CUDA_F16), false}, 4}, // several passes and rounds
        {{dense(520, 8, FFN_CUDA_BF16), false}, 5},
        {{moe(128, 64, 8, 2, 0), false}, 3},
        {{moe(192, 72, 16, 4, 72), true}, 5}, // as GLM: sigmoid, bias, FP32 router
        {{moe(264, 136, 40, 1, 0), false}, 7},
        {{moe(128, 1608, 5, 2, 1608), false}, 3}, // parts in pieces
        {{moe(256, 128, 24, 6, 256), false}, 4},  // as DeepSeek-V2
        {{moe(136, 72, 8, 8, 0), false}, 9},      // all choose all
        {{moe(64, 40, 96, 22, 48), false}, 2},    // several windows
        {{moe(136, 64, 72, 8, 0), false}, 6},
    };
    shapes[2].first.signature.activation = 1;
    shapes[6].first.signature.router = 1;
    shapes[6].first.signature.router_dtype = FFN_CUDA_F32;
    shapes[6].first.signature.routed_scale = 1.8f;
    shapes[10].first.signature.dtype = FFN_CUDA_F16;
    shapes[10].first.signature.router_dtype = FFN_CUDA_F16;
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (size_t i = 0; i < shapes.size(); i++) {
        const ffn_cuda_signature_t s = shapes[i].first.signature;
        model_make(shapes[i].first, 2, seed * 1000000 + i * 10000);
        test_launches(shapes[i].second, seed * 77 + i);
        for (uint32_t ahead = 0; ahead < 2; ahead++)
            test_resident(shapes[i].second, ahead != 0, seed * 99 + i * 2 + ahead);
        // Of another model, and of the same one.
        test_cuts(shapes[i].second, (i + seed) % 2, seed * 55 + i);
        model_make(shapes[i].first, shapes[(i * 5 + seed) % shapes.size()].first, 4, seed * 77 + i);
        test_cuts(2 + i % 4, (i + seed) % 2, seed * 55 + i + 1);
        printf("hidden %u width %u experts %u top %u shared %u: right\n", s.hidden, s.intermediate,
               s.experts, s.top_k, s.shared_intermediate);
    }
    printf("%u rows compared, %u not comparable, largest error %.2f of the tolerance\n", compared,
           unfair, worst);
    printf("%u cuts, %u blocks were in the middle of a command; a second one was done %s\n",
           all_cuts, all_stops, all_seconds ? "before it ended" : "too late");
    return compared == 0 || unfair * 10 > compared || all_cuts == 0 || all_stops == 0 ||
           all_seconds == 0;
}
