/* SPDX-License-Identifier: MIT */
/*
 * Dense layers by cuBLASLt over the fake driver and a fake of the library (fake/cublaslt.c): whole
 * pieces, and few rows with a plan for just that number.
 */
#include <dlfcn.h>

#include "cuda_scene.h"

/* The runtime finds by its name what was loaded before. */
static uint32_t *fake_library(const char *counter)
{
    void *library = dlopen(XPOOL_BINARY_DIR "/tests/fake/libcublasLt.so.13", RTLD_NOW | RTLD_LOCAL);
    if (!library)
        fail_msg("%s", dlerror());
    return dlsym(library, counter);
}

typedef struct library_case {
    uint32_t rows, products, pieces; /* what the library multiplies, pieces of grouped products */
    uint32_t bulks;
} library_case_t;

static void run_family(xp_dtype_t dtype, bool resident)
{
    static const library_case_t cases[] = {
        {16, 0, 0, 0},  {17, 3, 0, 0},  {40, 3, 0, 0},  {64, 3, 0, 0},  {99, 3, 0, 0},
        {100, 3, 0, 0}, {110, 3, 1, 1}, {128, 6, 0, 0}, {217, 9, 0, 0},
    };
    enum { MOST = 300, PIECE = 100 };
    fixture_t *f = family_of(MODEL_ARCH_QWEN3, dtype);
    uint32_t *const products = fake_library("fake_cublaslt_products");
    uint32_t *const mixed = fake_library("fake_cublaslt_mixed");
    scene_t scene;
    scene_create(&scene, resident);
    scene.config.library = true;
    scene.config.piece_rows = PIECE;
    scene_open(&scene);
    scene_install(&scene, f, 0);
    scene_start(&scene);
    /* Nothing of the library may be loaded later: each plan has run, to rows and to sums. */
    assert_int_equal(*products % 6, 0);
    assert_true(*products >= (1 + PIECE - FFN_CUDA_DENSE_ROWS - 1) * 6);
    ffn_runtime_t *cpu = runtime_make(1, 1, MOST);
    ffn_install_t install = install_of(f);
    install.dtype = XP_DTYPE_AUTO;
    install_ok(cpu, &install);
    const uint32_t hidden = f->spec.hidden, type = scene.dispatch->models[0].dtype;
    float *x = calloc(MOST * hidden, sizeof(*x)), *want = calloc(MOST * hidden, sizeof(*want));
    void *out = calloc(MOST * hidden, sizeof(float));
    for (uint32_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        for (uint32_t partial = 0; partial < 2; partial++) {
            const uint32_t rows = cases[i].rows, layer = i % f->spec.layers;
            uint16_t *in = rows_of(rows, hidden, type, x, 100 + i);
            const uint32_t before = *products, pieces = fake_pieces, bulks = fake_bulks;
            uint64_t word = 0;
            scene_fill(&scene, i % 2, 0, layer, rows, in, partial ? NULL : out,
                       partial ? out : NULL);
            scene.dispatch->lanes[i % 2].answer->consumer_count = 1;
            scene.dispatch->lanes[i % 2].answer->consumers[0] =
                (ffn_cuda_consumer_t){.word = &word, .value = i + 1, .count = rows};
            ffn_cuda_request_post(scene.dispatch, &scene.poster, i % 2, i % 3 == 0);
            assert_true(scene_done(&scene, i % 2));
            assert_int_equal(word, i + 1);
            assert_int_equal(ffn_runtime_execute(cpu, 0, 0, layer, rows, x, want), XP_OK);
            /* Gate and up are rounded to 16 bits too, before the activation. */
            compare_within(8e-3, want, out, partial, type, rows, hidden, "by the library");
            assert_int_equal(*products - before, cases[i].products);
            assert_int_equal(fake_pieces - pieces, cases[i].pieces);
            assert_int_equal(fake_bulks - bulks, cases[i].bulks);
            free(in);
        }
    assert_int_equal(*mixed, 0); /* urgent work and bulk do not wait for each other */
    ffn_runtime_destroy(cpu);
    scene_close(&scene);
    free(x);
    free(want);
    free(out);
    fixture_close(f);
}

static void test_dense(void **state)
{
    (void)state;
    SKIP_WITHOUT_DEVICE_CODE();
    run_family(XP_DTYPE_BF16, false);
    run_family(XP_DTYPE_F16, true);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_dense),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
