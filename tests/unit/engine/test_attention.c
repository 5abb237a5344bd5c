/* SPDX-License-Identifier: MIT */
/* Attention of every variant against the formula in double; the same bits however the rows of a
 * sequence are cut into tiles and its tokens into pages. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/attention.h"
#include "kernels/kernels.h"

static float value(void)
{
    return (float)rand() / (float)RAND_MAX * 2 - 1;
}

typedef struct scene {
    uint32_t heads, kv_heads, head_dim, tokens;
    float *query, *keys, *values; /* [tokens][heads or kv_heads][head_dim] */
} scene_t;

static float *random_block(size_t count)
{
    float *block = malloc(count * sizeof *block);
    for (size_t i = 0; i < count; i++)
        block[i] = value() * 2;
    return block;
}

static scene_t scene_make(uint32_t heads, uint32_t kv_heads, uint32_t head_dim, uint32_t tokens)
{
    scene_t scene = {heads, kv_heads, head_dim, tokens, NULL, NULL, NULL};
    scene.query = random_block((size_t)tokens * heads * head_dim);
    scene.keys = random_block((size_t)tokens * kv_heads * head_dim);
    scene.values = random_block((size_t)tokens * kv_heads * head_dim);
    return scene;
}

static void scene_free(scene_t *scene)
{
    free(scene->query);
    free(scene->keys);
    free(scene->values);
}

static void reference(const scene_t *scene, double scale, double *out)
{
    const uint32_t d = scene->head_dim, group = scene->heads / scene->kv_heads;
    double *p = malloc(scene->tokens * sizeof *p);
    for (uint32_t row = 0; row < scene->tokens; row++)
        for (uint32_t head = 0; head < scene->heads; head++) {
            const float *q = scene->query + ((size_t)row * scene->heads + head) * d;
            double top = -INFINITY, total = 0;
            for (uint32_t j = 0; j <= row; j++) {
                const float *k = scene->keys + ((size_t)j * scene->kv_heads + head / group) * d;
                p[j] = 0;
                for (uint32_t i = 0; i < d; i++)
                    p[j] += (double)q[i] * (double)k[i];
                p[j] *= scale;
                top = fmax(top, p[j]);
            }
            for (uint32_t j = 0; j <= row; j++)
                total += p[j] = exp(p[j] - top);
            for (uint32_t i = 0; i < d; i++) {
                double sum = 0;
                for (uint32_t j = 0; j <= row; j++)
                    sum +=
                        p[j] / total *
                        (double)scene->values[((size_t)j * scene->kv_heads + head / group) * d + i];
                out[((size_t)row * scene->heads + head) * d + i] = sum;
            }
        }
    free(p);
}

/* Computes all rows with tiles of `tile` rows, heads of a group in parts of `split`. */
static void compute(const scene_t *scene, const engine_attention_ops_t *ops, uint32_t page_tokens,
                    uint32_t tile, uint32_t split, float *out)
{
    const uint32_t d = scene->head_dim, group = scene->heads / scene->kv_heads, layers = 2;
    const uint32_t pages = (scene->tokens + page_tokens - 1) / page_tokens;
    engine_kv_t kv;
    assert_int_equal(engine_kv_create("test", pages, page_tokens, layers, scene->kv_heads, d, &kv),
                     XP_OK);
    uint32_t *table = malloc(pages * sizeof *table);
    for (uint32_t i = 0; i < pages; i++)
        table[i] = pages - 1 - i; /* pages out of order */
    const size_t row = (size_t)scene->kv_heads * d;
    for (uint32_t t = 0; t < scene->tokens; t++) {
        engine_kv_store(&kv, 1, table[t / page_tokens], t % page_tokens, scene->keys + t * row,
                        scene->values + t * row);
    }
    engine_attention_t attention = {.ops = ops,
                                    .kv = &kv,
                                    .heads = scene->heads,
                                    .kv_heads = scene->kv_heads,
                                    .head_dim = d,
                                    .scale = (float)(1 / sqrt((double)d)),
                                    .score_stride = (scene->tokens + 15) / 16 * 16,
                                    .tile_rows = engine_attention_tile_rows(group, scene->tokens)};
    float *scores = malloc(engine_attention_scratch_floats(group, scene->tokens) * sizeof *scores);
    const size_t stride = (size_t)scene->heads * d;
    for (uint32_t first = 0; first < scene->tokens; first += tile) {
        engine_attention_tile_t part = {.first_row = first,
                                        .rows = scene->tokens - first < tile ? scene->tokens - first
                                                                             : tile,
                                        .position = first,
                                        .pages = table};
        for (uint32_t kv_head = 0; kv_head < scene->kv_heads; kv_head++)
            for (uint32_t h = 0; h < group; h += split)
                engine_attention_run(&attention, 1, &part, kv_head, kv_head * group + h,
                                     group - h < split ? group - h : split, scene->query, stride,
                                     out, stride, scores);
    }
    free(scores);
    free(table);
    engine_kv_fini(&kv);
}

static const engine_attention_ops_t *ops_of(kernels_variant_t variant)
{
    assert_int_equal(kernels_select_variant(variant), XP_OK);
    return engine_attention_select();
}

static void every_variant_and_cut(void **state)
{
    (void)state;
    static const uint32_t shapes[][3] = {{9, 3, 64}, {4, 2, 16},   {6, 1, 24}, {8, 8, 20},
                                         {4, 4, 80}, {16, 2, 128}, {2, 1, 6},  {3, 1, 100}};
    for (kernels_variant_t variant = 0; variant < KERNELS_VARIANT_COUNT; variant++) {
        if (!kernels_variant_supported(variant))
            continue;
        const engine_attention_ops_t *ops = ops_of(variant);
        for (uint32_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
            scene_t scene = scene_make(shapes[s][0], shapes[s][1], shapes[s][2], 75);
            const size_t count = (size_t)scene.tokens * scene.heads * scene.head_dim;
            const uint32_t group = scene.heads / scene.kv_heads;
            double *want = malloc(count * sizeof *want);
            float *whole = malloc(count * sizeof *whole), *other = malloc(count * sizeof *other);
            reference(&scene, 1 / sqrt((double)scene.head_dim), want);
            compute(&scene, ops, 16, 1, group, whole);
            for (size_t i = 0; i < count; i++)
                assert_true(fabs((double)whole[i] - want[i]) < 3e-6);
            static const uint32_t cuts[][3] = {{16, 16, 0}, {1, 7, 1}, {5, 13, 2}, {128, 4, 1}};
            for (uint32_t c = 0; c < 4; c++) {
                memset(other, 0xff, count * sizeof *other);
                compute(&scene, ops, cuts[c][0], cuts[c][1], cuts[c][2] ? cuts[c][2] : group,
                        other);
                assert_memory_equal(whole, other, count * sizeof *other);
            }
            free(want);
            free(whole);
            free(other);
            scene_free(&scene);
        }
    }
}

static void long_contexts_shrink_the_tile(void **state)
{
    (void)state;
    assert_int_equal(engine_attention_tile_rows(1, 16), 16);
    assert_int_equal(engine_attention_tile_rows(8, 131072), 1);
    assert_true(engine_attention_scratch_floats(4, 8192) * sizeof(float) <= 4u << 20);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_variant_and_cut),
        cmocka_unit_test(long_contexts_shrink_the_tile),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
