/* SPDX-License-Identifier: MIT */
/* A CUDA runtime over the fake driver, with the test as the device's scheduler. */
#ifndef XPOOL_TESTS_FFN_CUDA_SCENE_H
#define XPOOL_TESTS_FFN_CUDA_SCENE_H

#include "cuda_support.h"

#define TEST_LIMIT_NS (60 * XP_NS_PER_S)

typedef struct scene {
    cuda_device_t device;
    ffn_cuda_config_t config;
    ffn_cuda_runtime_t *runtime;
    ffn_cuda_dispatch_t *dispatch; /* "device" memory */
    ffn_cuda_poster_t poster;
    uint64_t ticket;
    uint32_t kib; /* of what was filled last */
    uint32_t failures;
    char text[256];
} scene_t;

static inline void scene_failed(void *context, xp_status_t status, const char *text)
{
    scene_t *scene = context;
    (void)status;
    scene->failures++;
    snprintf(scene->text, sizeof(scene->text), "%s", text);
}

static inline void scene_create(scene_t *scene, bool resident)
{
    memset(scene, 0, sizeof(*scene));
    fake_ffn_reset();
    device_ok(&scene->device);
    scene->config = (ffn_cuda_config_t){
        .device = &scene->device,
        .lanes = 2,
        .max_rows = 300,
        .buffer_rows = 300,
        .resident = resident,
        .cuts = resident,
        .records = 8,
        .cpu = -1,
        .failed = scene_failed,
        .failed_context = scene,
    };
}

static inline void scene_open(scene_t *scene)
{
    if (ffn_cuda_runtime_create(&scene->config, &scene->runtime) != XP_OK)
        fail_msg("create: %s", xp_error_last()->text);
}

static inline void scene_install(scene_t *scene, const fixture_t *f, uint32_t model)
{
    ffn_install_t install = install_of(f);
    install.model = model;
    if (ffn_cuda_runtime_install(scene->runtime, &install, NULL, NULL) != XP_OK)
        fail_msg("install: %s", xp_error_last()->text);
}

static inline void scene_start(scene_t *scene)
{
    if (ffn_cuda_runtime_start(scene->runtime) != XP_OK)
        fail_msg("start: %s", xp_error_last()->text);
    scene->dispatch = (ffn_cuda_dispatch_t *)(uintptr_t)ffn_cuda_runtime_dispatch(scene->runtime);
    assert_int_equal(scene->dispatch->abi, FFN_CUDA_DISPATCH_ABI);
}

static inline void scene_close(scene_t *scene)
{
    ffn_cuda_runtime_destroy(scene->runtime);
    cuda_device_close(&scene->device);
    assert_int_equal(fake_objects(), 0);
}

/* Fills a Lane as the scheduler does. */
static inline ffn_cuda_answer_t *scene_fill(scene_t *scene, uint32_t lane, uint32_t model,
                                            uint32_t layer, uint32_t rows, const void *input,
                                            void *output, float *partial)
{
    const ffn_cuda_dispatch_lane_t *own = &scene->dispatch->lanes[lane];
    own->lane->layer = scene->dispatch->models[model].first_layer + layer;
    own->lane->rows = rows;
    own->lane->input = input;
    own->lane->output = output;
    own->lane->partial = partial;
    memset(own->answer, 0, sizeof(*own->answer));
    own->answer->ticket = ++scene->ticket;
    own->answer->instance = model + 10;
    own->answer->layer_of_model = layer;
    scene->kib = ffn_cuda_invocation_kib(&scene->dispatch->models[model], layer, rows);
    return own->answer;
}

static inline bool scene_post(scene_t *scene, uint32_t lane, uint64_t *word, uint64_t value)
{
    return ffn_cuda_command_post(scene->dispatch, &scene->poster, lane, scene->kib, scene->ticket,
                                 word, value);
}

/* Until `done`; false after the limit or once the runtime has failed. */
static inline bool scene_done(scene_t *scene, uint32_t lane)
{
    const uint64_t limit = xp_monotonic_ns() + TEST_LIMIT_NS;
    while (!ffn_cuda_lane_done(scene->dispatch, lane, scene->ticket)) {
        ffn_cuda_lease_look(scene->dispatch, &scene->poster);
        if (scene->failures || xp_monotonic_ns() > limit)
            return false;
    }
    return true;
}

/* Waits until the resident kernel runs, looking as the scheduler does. */
static inline void scene_lease(scene_t *scene)
{
    const uint64_t limit = xp_monotonic_ns() + TEST_LIMIT_NS;
    ffn_cuda_stats_t stats = {0};
    while (!ffn_cuda_lease_look(scene->dispatch, &scene->poster) || !stats.lease_in_force) {
        assert_int_equal(ffn_cuda_runtime_stats(scene->runtime, &stats), XP_OK);
        if (xp_monotonic_ns() > limit)
            fail_msg("the lease is not taken");
    }
}

static inline uint16_t *rows_of(uint32_t rows, uint32_t hidden, uint32_t dtype, float *as_float,
                                uint64_t seed)
{
    float *x = random_rows(rows ? rows : 1, hidden, seed);
    uint16_t *packed = calloc((size_t)rows * hidden + 1, 2);
    kernels_convert(XP_DTYPE_F32, x, cuda_dtype_plain(dtype), packed, (size_t)rows * hidden);
    kernels_convert(cuda_dtype_plain(dtype), packed, XP_DTYPE_F32, as_float, (size_t)rows * hidden);
    free(x);
    return packed;
}

/* tolerance: of a row's norm. */
static inline void compare_within(double tolerance, const float *want, const void *got,
                                  bool partial, uint32_t dtype, uint32_t rows, uint32_t hidden,
                                  const char *what)
{
    for (uint32_t r = 0; r < rows; r++) {
        double error = 0, norm = 0;
        for (uint32_t h = 0; h < hidden; h++) {
            const uint64_t at = (uint64_t)r * hidden + h;
            const float g = partial ? ((const float *)got)[at] : fake_load(got, at, dtype);
            error += (g - want[at]) * (double)(g - want[at]);
            norm += want[at] * (double)want[at];
        }
        if (sqrt(error) > sqrt(norm) * tolerance + 1e-6)
            fail_msg("%s, row %u of %u: off by %g of %g", what, r, rows, sqrt(error), sqrt(norm));
    }
}

static inline void compare(const float *want, const void *got, bool partial, uint32_t dtype,
                           uint32_t rows, uint32_t hidden, const char *what)
{
    compare_within(partial ? 1e-4 : 8e-3, want, got, partial, dtype, rows, hidden, what);
}

/* Create to start, with one model and nothing else asked for. */
static inline void scene_begin(scene_t *scene, fixture_t *f, bool resident)
{
    scene_create(scene, resident);
    scene_open(scene);
    scene_install(scene, f, 0);
    scene_start(scene);
}
#endif
