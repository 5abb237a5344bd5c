/* SPDX-License-Identifier: MIT */
/*
 * The CUDA runtime's execution over the fake driver, with the test as the device's scheduler: all
 * families and row counts through the host ring and the resident kernel, against the CPU runtime;
 * pieces, gathering and delivery; the lease; records and figures; failures and stopping.
 */
#include "cuda_scene.h"

static const uint32_t row_counts[] = {0, 1, 5, 16, 17, 64, 65, 300};

/* Both sides have routed the same rows: 300 of them in three pieces here, in one there. */
static void compare_usage(ffn_cuda_runtime_t *runtime, ffn_runtime_t *cpu, const model_spec_t *spec)
{
    ffn_usage_t ours, want;
    uint64_t moe = 0, rows = 0;
    assert_int_equal(ffn_cuda_runtime_usage(runtime, 4, &ours), XP_INVALID);
    assert_int_equal(ffn_cuda_runtime_usage(runtime, 3, &ours), XP_OK);
    assert_int_equal(ffn_runtime_usage(cpu, 0, &want), XP_OK);
    for (uint32_t l = 0; l < spec->layers; l++)
        moe += spec->ffn[l].kind == MODEL_FFN_MOE;
    for (uint32_t i = 0; i < sizeof(row_counts) / sizeof(row_counts[0]); i++)
        rows += row_counts[i];
    assert_int_equal(ours.rows, moe * rows);
    assert_int_equal(ours.executions, moe * 9);
    assert_int_equal(want.executions, moe * 7);
    assert_true(ours.experts >= want.experts);
    /* The rest is the same, whatever the pieces. */
    want.executions = ours.executions;
    want.experts = ours.experts;
    assert_memory_equal(&ours, &want, sizeof(ours));
}

/* One family, all layers, all row counts, through the ring. */
static void run_family(model_architecture_t architecture, xp_dtype_t dtype)
{
    fixture_t *f = family_of(architecture, dtype);
    scene_t scene;
    scene_create(&scene, false);
    /* A wide layer's bulk work is cut into pieces that share the Lane's workspace: here 300 rows
     * into 128, 128 and 44. */
    scene.config.piece_rows = 128;
    scene_open(&scene);
    scene_install(&scene, f, 3);
    scene_start(&scene);
    ffn_runtime_t *cpu = runtime_make(1, 1, 300);
    ffn_install_t install = install_of(f);
    install.dtype = dtype == XP_DTYPE_F32 ? XP_DTYPE_BF16 : XP_DTYPE_AUTO;
    install_ok(cpu, &install);
    const uint32_t hidden = f->spec.hidden, type = scene.dispatch->models[3].dtype;
    float *x = calloc(300 * hidden, sizeof(*x)), *want = calloc(300 * hidden, sizeof(*want));
    void *out = calloc(300 * hidden, sizeof(float));
    for (uint32_t l = 0; l < f->spec.layers; l++)
        for (uint32_t i = 0; i < sizeof(row_counts) / sizeof(row_counts[0]); i++) {
            const uint32_t rows = row_counts[i];
            const bool partial = (i + l) % 2;
            uint16_t *in = rows_of(rows, hidden, type, x, l * 100 + i + 1);
            uint64_t word = 0;
            ffn_cuda_answer_t *answer = scene_fill(&scene, i % 2, 3, l, rows, in,
                                                   partial ? NULL : out, partial ? out : NULL);
            answer->consumer_count = 1;
            answer->consumers[0] = (ffn_cuda_consumer_t){.word = &word, .value = 77 + i};
            ffn_cuda_request_post(scene.dispatch, &scene.poster, i % 2, rows <= 16);
            if (!scene_done(&scene, i % 2))
                fail_msg("not done: %s", scene.text);
            assert_int_equal(word, 77 + i);
            assert_int_equal(ffn_runtime_execute(cpu, 0, 0, l, rows, x, want), XP_OK);
            compare(want, out, partial, type, rows, hidden, model_architecture_name(architecture));
            free(in);
        }
    assert_true(fake_decodes > 0 && fake_bulks > 0 && fake_pieces > 0);
    assert_int_equal(fake_fews, 0); /* those are test_shared_role()'s */
    ffn_cuda_stats_t stats;
    /* `done` comes before the books; after the stop they are complete. */
    assert_int_equal(ffn_cuda_runtime_stop(scene.runtime, xp_monotonic_ns() + XP_NS_PER_S), XP_OK);
    assert_int_equal(ffn_cuda_runtime_stats(scene.runtime, &stats), XP_OK);
    assert_int_equal(stats.invocations, f->spec.layers * 8);
    assert_int_equal(stats.resident_invocations, 0);
    /* One graph launch an Invocation. */
    assert_int_equal(stats.host_launches, stats.invocations);
    compare_usage(scene.runtime, cpu, &f->spec);
    scene_close(&scene);
    ffn_runtime_destroy(cpu);
    free(x);
    free(want);
    free(out);
    fixture_close(f);
}

static void test_families(void **state)
{
    (void)state;
    SKIP_WITHOUT_DEVICE_CODE();
    for (uint32_t a = 0; a < MODEL_ARCH_COUNT; a++) {
        const xp_dtype_t dtype = a % 3 == 0   ? XP_DTYPE_F32
                                 : a % 3 == 1 ? XP_DTYPE_BF16
                                              : XP_DTYPE_F16;
        run_family((model_architecture_t)a, dtype);
    }
}

/* The trained checkpoints of the repository. */
static void test_tales(void **state)
{
    (void)state;
    SKIP_WITHOUT_DEVICE_CODE();
    static const char *const names[] = {"qwen3-moe", "deepseek-v2", "glm4-moe-lite"};
    for (uint32_t i = 0; i < 3; i++) {
        char path[512];
        snprintf(path, sizeof(path), XPOOL_SOURCE_DIR "/models/tales/%s", names[i]);
        fixture_t *f = calloc(1, sizeof(*f));
        fixture_open(f, path);
        scene_t scene;
        scene_create(&scene, false);
        scene_open(&scene);
        scene_install(&scene, f, 0);
        scene_start(&scene);
        ffn_runtime_t *cpu = runtime_make(1, 1, 4);
        ffn_install_t install = install_of(f);
        install.dtype = cuda_dtype_plain(scene.dispatch->models[0].dtype);
        install_ok(cpu, &install);
        const uint32_t hidden = f->spec.hidden, type = scene.dispatch->models[0].dtype;
        float *x = calloc(3 * hidden, sizeof(*x)), *want = calloc(3 * hidden, sizeof(*want));
        uint16_t *out = calloc(3 * hidden, 2);
        for (uint32_t l = 0; l < f->spec.layers; l++) {
            uint16_t *in = rows_of(3, hidden, type, x, l + 1);
            scene_fill(&scene, 0, 0, l, 3, in, out, NULL);
            ffn_cuda_request_post(scene.dispatch, &scene.poster, 0, 1);
            assert_true(scene_done(&scene, 0));
            assert_int_equal(ffn_runtime_execute(cpu, 0, 0, l, 3, x, want), XP_OK);
            compare(want, out, false, type, 3, hidden, names[i]);
            free(in);
        }
        scene_close(&scene);
        ffn_runtime_destroy(cpu);
        free(x);
        free(want);
        free(out);
        fixture_close(f);
    }
}

static void test_pieces(void **state)
{
    (void)state;
    SKIP_WITHOUT_DEVICE_CODE();
    ffn_cuda_signature_t wide = {.hidden = 8192, .intermediate = 28672};
    assert_int_equal(cuda_layout_piece_rows(&wide, 8192), 128);
    ffn_cuda_signature_t narrow = {.hidden = 512, .intermediate = 512};
    assert_int_equal(cuda_layout_piece_rows(&narrow, 100000), 4096);
    assert_int_equal(cuda_layout_piece_rows(&narrow, 99), 99);
    ffn_cuda_signature_t experts = {
        .hidden = 2048, .intermediate = 768, .experts = 128, .top_k = 8};
    assert_int_equal(cuda_layout_piece_rows(&experts, 8192), 8192);
    /* 14B's layer: hidden 5120, width 17408. */
    ffn_cuda_signature_t dense = {.hidden = 5120, .intermediate = 17408};
    assert_int_equal(cuda_layout_piece_rows(&dense, 8192), 384);

    ffn_cuda_lane_t lane = {0}, piece = {0};
    ffn_cuda_layer_t layer = {.signature = &narrow};
    lane.layers = &layer;
    lane.rows = 300;
    lane.input = (void *)0x100000;
    lane.output = (void *)0x200000;
    ffn_cuda_piece_set(&lane, &piece, 256, 128);
    assert_int_equal(piece.rows, 44);
    assert_int_equal((uintptr_t)piece.input, 0x100000 + 256 * 512 * 2);
    assert_int_equal((uintptr_t)piece.output, 0x200000 + 256 * 512 * 2);
    assert_null(piece.partial);
    ffn_cuda_piece_set(&lane, &piece, 384, 128);
    assert_int_equal(piece.rows, 0);
    lane.output = NULL;
    lane.partial = (float *)0x300000;
    ffn_cuda_piece_set(&lane, &piece, 128, 128);
    assert_int_equal((uintptr_t)piece.partial, 0x300000 + 128 * 512 * 4);
    assert_null(piece.output);
    assert_int_equal(piece.rows, 128);
}

/* Rows from several sources, the result to several consumers, each its slice. */
static void test_gather_and_deliver(void **state)
{
    (void)state;
    SKIP_WITHOUT_DEVICE_CODE();
    fixture_t *f = family_of(MODEL_ARCH_QWEN3_MOE, XP_DTYPE_BF16);
    scene_t scene;
    scene_begin(&scene, f, false);
    const uint32_t hidden = f->spec.hidden, first = 30, second = 12;
    float *x = calloc(42 * hidden, sizeof(*x));
    uint16_t *in = rows_of(42, hidden, FFN_CUDA_BF16, x, 5), *whole = calloc(42 * hidden, 2);
    uint16_t *one = calloc(first * hidden, 2), *two = calloc(second * hidden, 2);
    uint64_t words[2] = {0};
    scene_fill(&scene, 0, 0, 1, 42, in, whole, NULL);
    ffn_cuda_request_post(scene.dispatch, &scene.poster, 0, 0);
    assert_true(scene_done(&scene, 0));
    const ffn_cuda_dispatch_lane_t *own = &scene.dispatch->lanes[1];
    assert_non_null(own->input);
    ffn_cuda_answer_t *answer = scene_fill(&scene, 1, 0, 1, 42, own->input, own->output, NULL);
    answer->source_count = answer->consumer_count = 2;
    answer->sources[0] = (ffn_cuda_source_t){in, 0, first};
    answer->sources[1] = (ffn_cuda_source_t){in + first * hidden, first, second};
    answer->consumers[0] = (ffn_cuda_consumer_t){one, &words[0], 5, 0, first};
    answer->consumers[1] = (ffn_cuda_consumer_t){two, &words[1], 6, first, second};
    ffn_cuda_request_post(scene.dispatch, &scene.poster, 1, 0);
    assert_true(scene_done(&scene, 1));
    assert_memory_equal(one, whole, first * hidden * 2);
    assert_memory_equal(two, whole + first * hidden, second * hidden * 2);
    assert_int_equal(words[0], 5);
    assert_int_equal(words[1], 6);
    scene_close(&scene);
    free(x);
    free(in);
    free(whole);
    free(one);
    free(two);
    fixture_close(f);
}

/* Large Invocations of all Lanes compute in one workspace, on one stream, whatever their hurry;
 * small ones each in their Lane's. */
static void test_shared_workspace(void **state)
{
    (void)state;
    SKIP_WITHOUT_DEVICE_CODE();
    enum { MOST = 1500 };
    fixture_t *f = family_of(MODEL_ARCH_QWEN3_MOE, XP_DTYPE_BF16);
    scene_t scene;
    scene_create(&scene, false);
    scene.config.max_rows = MOST;
    scene.config.buffer_rows = 0;
    scene_open(&scene);
    scene_install(&scene, f, 0);
    scene_start(&scene);
    ffn_runtime_t *cpu = runtime_make(1, 1, MOST);
    ffn_install_t install = install_of(f);
    install_ok(cpu, &install);
    const uint32_t hidden = f->spec.hidden;
    float *x = calloc(MOST * hidden, sizeof(*x)), *want = calloc(MOST * hidden, sizeof(*want));
    uint16_t *out = calloc(MOST * hidden, 2);
    const void *products[2][2];
    cuda_stream_t stream[2][2];
    for (uint32_t large = 0; large < 2; large++)
        for (uint32_t lane = 0; lane < 2; lane++) {
            const uint32_t rows = large ? MOST - lane * 300 : 900;
            uint16_t *in = rows_of(rows, hidden, FFN_CUDA_BF16, x, 7 + large * 2 + lane);
            scene_fill(&scene, lane, 0, 0, rows, in, out, NULL);
            ffn_cuda_request_post(scene.dispatch, &scene.poster, lane, lane);
            assert_true(scene_done(&scene, lane));
            assert_int_equal(ffn_runtime_execute(cpu, 0, 0, 0, rows, x, want), XP_OK);
            compare(want, out, false, FFN_CUDA_BF16, rows, hidden, "shared workspace");
            products[large][lane] = fake_products;
            stream[large][lane] = fake.graph_stream;
            free(in);
        }
    assert_ptr_not_equal(products[0][0], products[0][1]);
    assert_ptr_equal(products[1][0], products[1][1]);
    assert_ptr_not_equal(products[1][0], products[0][0]);
    assert_ptr_not_equal(products[1][0], products[0][1]);
    assert_ptr_not_equal(stream[0][0], stream[0][1]); /* the second one is urgent */
    assert_ptr_equal(stream[1][0], stream[1][1]);
    scene_close(&scene);
    ffn_runtime_destroy(cpu);
    free(x);
    free(want);
    free(out);
    fixture_close(f);
}

/* Decode work that the host fired while its offer was out ends before the resident kernel begins:
 * neither could have all multiprocessors beside the other. */
static void test_lease_after_decode(void **state)
{
    (void)state;
    SKIP_WITHOUT_DEVICE_CODE();
    fixture_t *f = family_of(MODEL_ARCH_QWEN3_MOE, XP_DTYPE_BF16);
    scene_t scene;
    ffn_cuda_stats_t stats;
    scene_begin(&scene, f, true);
    const uint32_t hidden = f->spec.hidden;
    float *x = calloc(20 * hidden, sizeof(*x));
    uint16_t *in = rows_of(20, hidden, FFN_CUDA_BF16, x, 11), *out = calloc(20 * hidden, 2);
    uint16_t *many = calloc(20 * hidden, 2);
    for (const uint64_t limit = xp_monotonic_ns() + TEST_LIMIT_NS;
         PROTOCOL_LOAD_ACQUIRE(scene.dispatch->lease) % 2 == 0;)
        assert_true(xp_monotonic_ns() < limit);
    /* Asked for before the offer is seen; fired, and not ended when it is. */
    __atomic_store_n(&fake_decoding, 1, __ATOMIC_RELEASE);
    scene_fill(&scene, 0, 0, 1, 1, in, out, NULL);
    ffn_cuda_request_post(scene.dispatch, &scene.poster, 0, 1);
    assert_true(ffn_cuda_lease_look(scene.dispatch, &scene.poster));
    assert_true(scene_done(&scene, 0));
    for (const uint64_t end = xp_monotonic_ns() + 30 * XP_NS_PER_MS; xp_monotonic_ns() < end;) {
        assert_int_equal(ffn_cuda_runtime_stats(scene.runtime, &stats), XP_OK);
        assert_int_equal(stats.lease_in_force, 0);
    }
    /* What only the host can have waits from then on, or it would keep the kernel waiting. */
    const uint64_t launches = stats.host_launches;
    scene_fill(&scene, 0, 0, 1, 20, in, many, NULL);
    ffn_cuda_request_post(scene.dispatch, &scene.poster, 0, 1);
    const uint64_t later = scene.ticket;
    for (const uint64_t end = xp_monotonic_ns() + 30 * XP_NS_PER_MS; xp_monotonic_ns() < end;) {
        assert_int_equal(ffn_cuda_runtime_stats(scene.runtime, &stats), XP_OK);
        assert_int_equal(stats.host_launches, launches);
    }
    /* What was posted to the kernel meanwhile is executed once it is there. */
    scene_fill(&scene, 1, 0, 0, 1, in, out, NULL);
    assert_true(scene_post(&scene, 1, NULL, 0));
    __atomic_store_n(&fake_decoding, 0, __ATOMIC_RELEASE);
    assert_true(scene_done(&scene, 1));
    scene.ticket = later;
    assert_true(scene_done(&scene, 0));
    scene_lease(&scene);
    assert_int_equal(fake_stuck, 0);
    free(x);
    free(in);
    free(out);
    free(many);
    scene_close(&scene);
    fixture_close(f);
}

/* Steady decoding needs no host; bulk work ends the lease, quiet brings it back. */
static void test_lease(void **state)
{
    (void)state;
    SKIP_WITHOUT_DEVICE_CODE();
    fixture_t *f = family_of(MODEL_ARCH_DEEPSEEK_V2, XP_DTYPE_BF16);
    scene_t scene;
    ffn_cuda_stats_t stats;
    scene_create(&scene, true);
    scene.config.records = 65536;
    scene.config.quiet_ns = 20 * XP_NS_PER_MS;
    scene_open(&scene);
    scene_install(&scene, f, 0);
    scene_start(&scene);
    const uint32_t hidden = f->spec.hidden;
    float *x = calloc(80 * hidden, sizeof(*x));
    uint16_t *in = rows_of(80, hidden, FFN_CUDA_BF16, x, 9);
    uint16_t *out = calloc(80 * hidden, 2), *again = calloc(80 * hidden, 2);
    for (uint32_t round = 0; round < 3; round++) {
        scene_lease(&scene);
        assert_int_equal(ffn_cuda_runtime_stats(scene.runtime, &stats), XP_OK);
        const uint64_t launches = stats.host_launches, before = stats.resident_invocations;
        for (uint32_t i = 0; i < 200; i++) {
            uint64_t word = 0;
            scene_fill(&scene, i % 2, 0, i % 3, i % 4, in, out, NULL);
            assert_true(ffn_cuda_lease_look(scene.dispatch, &scene.poster));
            assert_true(scene_post(&scene, i % 2, &word, i + 1));
            assert_true(scene_done(&scene, i % 2));
            assert_int_equal(word, i + 1);
        }
        /* `done` comes before the books. */
        const uint64_t limit = xp_monotonic_ns() + TEST_LIMIT_NS;
        do
            assert_int_equal(ffn_cuda_runtime_stats(scene.runtime, &stats), XP_OK);
        while (stats.resident_invocations != before + 200 && xp_monotonic_ns() < limit);
        assert_int_equal(stats.host_launches, launches);
        assert_int_equal(stats.resident_invocations, before + 200);
        /* The same rows, fired by the host: the lease is given up for it. */
        scene_fill(&scene, 0, 0, 2, 3, in, out, NULL);
        assert_true(scene_post(&scene, 0, NULL, 0));
        assert_true(scene_done(&scene, 0));
        scene_fill(&scene, 1, 0, 2, 65, in, again, NULL);
        ffn_cuda_request_post(scene.dispatch, &scene.poster, 1, 0);
        assert_true(scene_done(&scene, 1));
        assert_memory_equal(out, again, 3 * hidden * 2);
    }
    /* Decoding that never pauses goes to the host now, and finds its way back by itself. */
    uint32_t fired = 0;
    for (const uint64_t limit = xp_monotonic_ns() + TEST_LIMIT_NS;; fired++) {
        scene_fill(&scene, 0, 0, 2, 1, in, out, NULL);
        if (ffn_cuda_lease_look(scene.dispatch, &scene.poster) && scene_post(&scene, 0, NULL, 0))
            break;
        ffn_cuda_request_post(scene.dispatch, &scene.poster, 0, 1);
        assert_true(scene_done(&scene, 0));
        assert_true(xp_monotonic_ns() < limit);
    }
    assert_true(scene_done(&scene, 0));
    scene_lease(&scene);
    assert_int_equal(ffn_cuda_runtime_stats(scene.runtime, &stats), XP_OK);
    assert_int_equal(stats.leases, 4);
    /* A record each, in order, with what the scheduler said of it. */
    ffn_cuda_record_t records[1000];
    uint64_t skipped;
    uint32_t count = ffn_cuda_runtime_records(scene.runtime, records, 1000, &skipped);
    assert_in_range(count, 3 * 202 + (fired < 390 ? fired : 390), 1000);
    assert_int_equal(skipped, 0);
    for (uint32_t i = 0; i < count; i++) {
        assert_int_equal(records[i].ticket, i + 1);
        if (i < 3 * 202)
            assert_int_equal(records[i].resident, i % 202 != 201);
        assert_int_equal(records[i].instance, 10);
        assert_true(records[i].end_ns <= xp_monotonic_ns() + XP_NS_PER_MS);
        assert_true(records[i].end_ns + 60 * XP_NS_PER_S > xp_monotonic_ns());
    }
    while (ffn_cuda_runtime_records(scene.runtime, records, 1000, &skipped))
        assert_int_equal(skipped, 0);
    const uint64_t start = xp_monotonic_ns();
    assert_int_equal(ffn_cuda_runtime_stop(scene.runtime, start + XP_NS_PER_S), XP_OK);
    assert_true(xp_monotonic_ns() - start < XP_NS_PER_S);
    /* The kernel has left: a late command is refused. */
    scene_fill(&scene, 0, 0, 0, 1, in, out, NULL);
    assert_false(scene_post(&scene, 0, NULL, 0));
    scene_close(&scene);
    free(x);
    free(in);
    free(out);
    free(again);
    fixture_close(f);
}

/* Posts it the way that the scheduler does. True: to the resident kernel. */
static bool scene_post_rows(scene_t *scene, uint32_t lane, uint32_t rows)
{
    const ffn_cuda_dispatch_model_t *model = &scene->dispatch->models[0];
    ffn_cuda_lease_look(scene->dispatch, &scene->poster);
    if (ffn_cuda_lease_takes(&scene->poster, rows, model->decode_rows, model->few_rows) &&
        scene_post(scene, lane, NULL, 0))
        return true;
    ffn_cuda_request_post(scene->dispatch, &scene->poster, lane, 1);
    return false;
}

/* Invocations of so many rows until a resident kernel has some of them; out: of the first one,
 * which the others must equal. */
static void scene_turn_to(scene_t *scene, uint32_t rows, uint32_t hidden, const uint16_t *in,
                          uint16_t *out, uint16_t *again)
{
    const uint64_t limit = xp_monotonic_ns() + TEST_LIMIT_NS;
    for (uint32_t i = 0, resident = 0; resident < 20; i++) {
        ffn_cuda_stats_t stats;
        scene_fill(scene, i % 2, 0, 1, rows, in, i ? again : out, NULL);
        resident += scene_post_rows(scene, i % 2, rows);
        assert_true(scene_done(scene, i % 2));
        assert_true(xp_monotonic_ns() < limit);
        assert_memory_equal(out, i ? again : out, (size_t)rows * hidden * 2);
        assert_int_equal(ffn_cuda_runtime_stats(scene->runtime, &stats), XP_OK);
        if (resident)
            assert_int_equal(stats.lease_in_force,
                             rows > 16 ? FFN_CUDA_LEASE_FEW : FFN_CUDA_LEASE_DECODE);
    }
}

/* A short Invocation cuts a long one that has not ended, with the same results, and not for ever;
 * the end of a lease leaves none behind. */
static void test_cuts(void **state)
{
    (void)state;
    SKIP_WITHOUT_DEVICE_CODE();
    fixture_t *f = family_of(MODEL_ARCH_DEEPSEEK_V2, XP_DTYPE_BF16);
    scene_t scene;
    scene_create(&scene, true);
    scene.config.lanes = 3;
    scene_open(&scene);
    scene_install(&scene, f, 0);
    scene_start(&scene);
    const ffn_cuda_dispatch_model_t *model = &scene.dispatch->models[0];
    const uint32_t hidden = f->spec.hidden, last = f->spec.layers - 1, rows[2] = {16, 1};
    const model_ffn_t *ffn = &f->spec.ffn[last];
    assert_int_equal(model->dense_layers, 1);
    assert_int_equal(ffn_cuda_invocation_kib(model, 0, 1), ffn_cuda_invocation_kib(model, 0, 9));
    const uint64_t part = 6ull * hidden * ffn->intermediate;
    const uint32_t shared = (6ull * hidden * ffn->shared_intermediate + 1023) / 1024;
    const uint32_t some = shared + (part * ffn->top_k + 1023) / 1024;
    const uint32_t all = shared + (part * ffn->experts + 1023) / 1024;
    assert_int_equal(ffn_cuda_invocation_kib(model, last, 1), some);
    assert_int_equal(ffn_cuda_invocation_kib(model, last, 1000), all);
    float *x = calloc(80 * hidden, sizeof(*x));
    uint16_t *in = rows_of(80, hidden, FFN_CUDA_BF16, x, 9), *out[3], *want[3];
    for (uint32_t i = 0; i < 3; i++) {
        out[i] = calloc(80 * hidden, 2);
        want[i] = calloc(80 * hidden, 2);
    }
    scene_lease(&scene);
    for (uint32_t i = 0; i < 2; i++) {
        scene_fill(&scene, i, 0, last - i, rows[i], in + i * hidden, want[i], NULL);
        assert_true(scene_post(&scene, i, NULL, 0));
        assert_true(scene_done(&scene, i));
        assert_int_equal(scene.poster.cuts, 0); /* nothing else is under way */
    }
    for (uint32_t round = 0; round < 3; round++) {
        uint64_t tickets[2], words[2] = {0};
        scene_lease(&scene);
        const uint32_t cuts = scene.poster.cuts;
        /* The kernel stands still. */
        pthread_mutex_lock(&fake_resident.lock);
        for (uint32_t i = 0; i < 2; i++) {
            scene_fill(&scene, i, 0, last - i, rows[i], in + i * hidden, out[i], NULL);
            tickets[i] = scene.ticket;
            assert_true(scene_post(&scene, i, &words[i], round + 1));
        }
        assert_int_equal(scene.poster.cuts, cuts + 1);
        if (round == 2) { /* this ends the lease */
            scene_fill(&scene, 2, 0, last, 65, in, out[2], NULL);
            ffn_cuda_request_post(scene.dispatch, &scene.poster, 2, 0);
        }
        const uint64_t latest = scene.ticket;
        pthread_mutex_unlock(&fake_resident.lock);
        for (uint32_t i = 0; i < 2; i++) {
            scene.ticket = tickets[i];
            assert_true(scene_done(&scene, i));
            assert_int_equal(words[i], round + 1);
            assert_memory_equal(out[i], want[i], rows[i] * hidden * 2);
            memset(out[i], 0, 80 * hidden * 2);
        }
        scene.ticket = latest;
        assert_true(round < 2 || scene_done(&scene, 2));
    }
    /* As many as may cut one command; the next one waits behind it. */
    scene_lease(&scene);
    pthread_mutex_lock(&fake_resident.lock);
    scene_fill(&scene, 0, 0, last, 16, in, out[0], NULL);
    const uint64_t ticket = scene.ticket;
    assert_true(scene_post(&scene, 0, NULL, 0));
    const uint64_t commands = scene.poster.commands;
    for (uint32_t i = 0; i <= FFN_CUDA_CUTS_MOST; i++) {
        scene_fill(&scene, 1, 0, last, 1, in, out[1], NULL);
        assert_true(scene_post(&scene, 1, NULL, 0));
        assert_int_equal(scene.poster.commands, commands + (i == FFN_CUDA_CUTS_MOST));
    }
    const uint64_t latest = scene.ticket;
    pthread_mutex_unlock(&fake_resident.lock);
    scene.ticket = ticket;
    assert_true(scene_done(&scene, 0));
    scene.ticket = latest;
    assert_true(scene_done(&scene, 1));
    assert_int_equal(ffn_cuda_runtime_stop(scene.runtime, xp_monotonic_ns() + XP_NS_PER_S), XP_OK);
    /* The kernel has left: neither a command nor a cut is taken. */
    ffn_cuda_poster_t poster = scene.poster;
    ffn_cuda_invocation_t given = {.layer = 1, .rows = 1, .kib = 1};
    assert_int_equal(ffn_cuda_cut_post(scene.dispatch, &poster, 1, &given, 1, NULL, 0), 0);
    scene_close(&scene);
    for (uint32_t i = 0; i < 3; i++) {
        free(out[i]);
        free(want[i]);
    }
    free(x);
    free(in);
    fixture_close(f);
}

/* The lease goes to the kernel that takes what comes; what it does not take ends it. */
static void test_lease_kinds(void **state)
{
    (void)state;
    SKIP_WITHOUT_DEVICE_CODE();
    fixture_t *f = family_of(MODEL_ARCH_QWEN3_MOE, XP_DTYPE_BF16);
    scene_t scene;
    ffn_cuda_stats_t stats;
    scene_begin(&scene, f, true);
    const uint32_t hidden = f->spec.hidden;
    static const uint32_t rows[] = {3, 32, 64, 16, 17, 1};
    float *x = calloc(80 * hidden, sizeof(*x));
    uint16_t *in = rows_of(80, hidden, FFN_CUDA_BF16, x, 9);
    uint16_t *out = calloc(80 * hidden, 2), *again = calloc(80 * hidden, 2);
    assert_int_equal(scene.dispatch->models[0].decode_rows, FFN_CUDA_DENSE_ROWS);
    assert_int_equal(scene.dispatch->models[0].few_rows, FEW_ROWS_MOST);
    scene_lease(&scene);
    for (uint32_t i = 0; i < 6; i++)
        scene_turn_to(&scene, rows[i], hidden, in, out, again);
    assert_true(fake_resident.commands[0] >= 60 && fake_resident.commands[1] >= 60);
    /* Both kinds and bulk in turns: nothing is lost, whoever executes it. */
    for (uint32_t i = 0; i < 300; i++) {
        const uint32_t count = i % 7 == 6 ? 70 : i % 2 ? 40 : 5;
        scene_fill(&scene, i % 2, 0, i % 3, count, in, again, NULL);
        scene_post_rows(&scene, i % 2, count);
        assert_true(scene_done(&scene, i % 2));
    }
    /* Such a pair of kinds has no lease at most times, and none is offered again and again. */
    assert_int_equal(ffn_cuda_runtime_stats(scene.runtime, &stats), XP_OK);
    assert_in_range(stats.leases, 5, 60);
    assert_int_equal(fake_stuck, 0);
    scene_close(&scene);
    free(x);
    free(in);
    free(out);
    free(again);
    fixture_close(f);
}

/* More Invocations than the record ring holds, unread: what was lost is counted. */
static void test_records_lost(void **state)
{
    (void)state;
    SKIP_WITHOUT_DEVICE_CODE();
    fixture_t *f = family_of(MODEL_ARCH_LLAMA, XP_DTYPE_BF16);
    scene_t scene;
    scene_begin(&scene, f, false);
    float *x = calloc(f->spec.hidden, sizeof(*x));
    uint16_t *in = rows_of(1, f->spec.hidden, FFN_CUDA_BF16, x, 9);
    uint16_t *out = calloc(f->spec.hidden, 2);
    for (uint32_t i = 0; i < 29; i++) {
        scene_fill(&scene, 0, 0, 0, 1, in, out, NULL);
        ffn_cuda_request_post(scene.dispatch, &scene.poster, 0, 1);
        assert_true(scene_done(&scene, 0));
    }
    /* `done` comes before the record. */
    assert_int_equal(ffn_cuda_runtime_stop(scene.runtime, xp_monotonic_ns() + XP_NS_PER_S), XP_OK);
    ffn_cuda_record_t records[32];
    uint64_t skipped;
    uint32_t count = ffn_cuda_runtime_records(scene.runtime, records, 32, &skipped);
    assert_int_equal(count + skipped, 29);
    assert_true(count >= 4 && count <= 8);
    assert_int_equal(records[count - 1].ticket, 29);
    assert_int_equal(records[count - 1].lane, 0);
    assert_int_equal(records[count - 1].capacity, FFN_CUDA_DENSE_ROWS);
    scene_close(&scene);
    free(x);
    free(in);
    free(out);
    fixture_close(f);
}

static void wait_failed(scene_t *scene)
{
    const uint64_t limit = xp_monotonic_ns() + TEST_LIMIT_NS;
    while (!__atomic_load_n(&scene->failures, __ATOMIC_ACQUIRE))
        if (xp_monotonic_ns() > limit)
            fail_msg("no failure was told");
}

/* Whatever fails becomes one text, the device is told, and stopping still works. */
static void test_failures(void **state)
{
    (void)state;
    SKIP_WITHOUT_DEVICE_CODE();
    fixture_t *f = family_of(MODEL_ARCH_LLAMA, XP_DTYPE_BF16);
    static const struct {
        const char *call, *text;
        bool resident, nonsense;
    } cases[] = {
        {"cuGraphLaunch", "cuGraphLaunch", false, false},
        {"cuStreamQuery", "cuStreamQuery", true, false},
        {NULL, "nonsense", false, true},
        {NULL, "ended by itself", true, false},
        {NULL, "told from outside", true, false},
    };
    for (uint32_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        scene_t scene;
        scene_create(&scene, cases[i].resident);
        scene_open(&scene);
        scene_install(&scene, f, 0);
        scene_start(&scene);
        if (cases[i].resident)
            scene_lease(&scene);
        uint16_t row[1024] = {0}, out[1024];
        fake.fail_result = 719;
        fake.fail_name = cases[i].call;
        if (!cases[i].resident) {
            scene_fill(&scene, 0, 0, 0, 1, row, out, NULL);
            if (cases[i].nonsense)
                scene.dispatch->lanes[0].lane->rows = 301;
            ffn_cuda_request_post(scene.dispatch, &scene.poster, 0, 1);
        } else if (i == 3) {
            pthread_mutex_lock(&fake_resident.lock);
            fake_resident.queue = NULL;
            pthread_mutex_unlock(&fake_resident.lock);
        } else if (i == 4) {
            ffn_cuda_runtime_fail(scene.runtime, XP_FATAL, "told from outside");
            ffn_cuda_runtime_fail(scene.runtime, XP_FATAL, "too late");
        }
        wait_failed(&scene);
        fake.fail_name = NULL;
        assert_int_equal(ffn_cuda_runtime_stop(scene.runtime, xp_monotonic_ns() + XP_NS_PER_S),
                         XP_OK);
        assert_int_equal(scene.failures, 1);
        if (!strstr(scene.text, cases[i].text))
            fail_msg("case %u: \"%s\"", i, scene.text);
        assert_int_not_equal(ffn_cuda_runtime_health(scene.runtime), XP_OK);
        assert_string_equal(xp_error_last()->text, scene.text);
        assert_int_not_equal(*scene.dispatch->failure, 0);
        assert_int_equal(scene.dispatch->queue->stop, 1);
        scene_close(&scene);
    }
    fixture_close(f);
}

/* A scheduler that does not answer is named; a stopped runtime does not wait for it. */
static void test_scheduler_is_gone(void **state)
{
    (void)state;
    SKIP_WITHOUT_DEVICE_CODE();
    fixture_t *f = family_of(MODEL_ARCH_LLAMA, XP_DTYPE_BF16);
    for (uint32_t stops = 0; stops < 2; stops++) {
        scene_t scene;
        scene_create(&scene, true);
        scene_open(&scene);
        scene_install(&scene, f, 0);
        scene_start(&scene);
        scene_lease(&scene);
        if (!stops) {
            uint16_t row[1024] = {0}, out[1024];
            scene_fill(&scene, 0, 0, 0, 1, row, out, NULL);
            ffn_cuda_request_post(scene.dispatch, &scene.poster, 0, 1);
            wait_failed(&scene);
            assert_non_null(strstr(scene.text, "did not see the lease's end"));
        }
        assert_int_equal(ffn_cuda_runtime_stop(scene.runtime, xp_monotonic_ns() + XP_NS_PER_S),
                         XP_OK);
        assert_int_equal(scene.failures, !stops);
        scene_close(&scene);
    }
    fixture_close(f);
}

static void test_bad_configurations(void **state)
{
    (void)state;
    SKIP_WITHOUT_DEVICE_CODE();
    scene_t scene;
    scene_create(&scene, true);
    scene.config.shared_role = true;
    assert_int_equal(ffn_cuda_runtime_create(&scene.config, &scene.runtime), XP_INVALID);
    scene.config.resident = false;
    scene.config.lanes = FFN_CUDA_MAX_LANES + 1;
    assert_int_equal(ffn_cuda_runtime_create(&scene.config, &scene.runtime), XP_INVALID);
    scene.config.lanes = 1;
    scene_open(&scene);
    assert_int_equal(ffn_cuda_runtime_start(scene.runtime), XP_INVALID);
    assert_non_null(strstr(xp_error_last()->text, "no model"));
    scene_close(&scene);
}

/* Beside another role nothing is launched that needs the whole GPU at once: rows that would be the
 * decode kernel's take the products of few rows, in layers of experts and dense ones; more rows the
 * grouped ones. */
static void test_shared_role(void **state)
{
    (void)state;
    SKIP_WITHOUT_DEVICE_CODE();
    static const model_architecture_t of[] = {MODEL_ARCH_QWEN3_MOE, MODEL_ARCH_LLAMA};
    for (uint32_t i = 0; i < 2; i++) {
        fixture_t *f = family_of(of[i], XP_DTYPE_F16);
        scene_t scene;
        scene_create(&scene, false);
        scene.config.shared_role = true;
        scene_open(&scene);
        scene_install(&scene, f, 0);
        scene_start(&scene);
        float *x = calloc(17 * f->spec.hidden, sizeof(*x));
        void *out = calloc(17 * f->spec.hidden, 2);
        for (uint32_t r = 0; r < 3; r++) {
            static const uint32_t counts[] = {2, 16, 17};
            const uint32_t rows = counts[r];
            const uint32_t fews = fake_fews, bulks = fake_bulks;
            uint16_t *in = rows_of(rows, f->spec.hidden, FFN_CUDA_F16, x, 1);
            scene_fill(&scene, 0, 0, 0, rows, in, out, NULL);
            ffn_cuda_request_post(scene.dispatch, &scene.poster, 0, 1);
            assert_true(scene_done(&scene, 0));
            assert_int_equal(fake_fews - fews, rows <= 16);
            assert_int_equal(fake_bulks - bulks, 1); /* the launch that sums is that of both */
            free(in);
        }
        assert_int_equal(fake_decodes, 0);
        scene_close(&scene);
        free(x);
        free(out);
        fixture_close(f);
    }
}

/* A place that is being written anew gives no record, whichever of its words are there already; all
 * fields come back as they were. */
static void test_records_are_whole(void **state)
{
    (void)state;
    ffn_cuda_record_place_t places[8] = {0};
    ffn_cuda_counters_t counters = {.records = places, .record_capacity = 8};
    const ffn_cuda_record_t record = {.end_ns = 0x00ffffffffffffffull,
                                      .duration_ns = 12345678901,
                                      .ticket = 1ull << 40,
                                      .layer = 93,
                                      .rows = 0xffffffff,
                                      .capacity = 0xfffffffe,
                                      .instance = 0xfedc,
                                      .rank = 7,
                                      .lane = 0xffff,
                                      .graph_template = 0xfffe,
                                      .kind = 2,
                                      .resident = 1};
    for (uint64_t number = 0; number < 8 * 300; number++) {
        ffn_cuda_record_t got = {0};
        ffn_cuda_record_place_t *place = &places[number % 8];
        ffn_cuda_record_end(&counters, &record);
        assert_int_equal(place->index, number + 1);
        assert_true(ffn_cuda_record_unpack(place, number, 8, &got));
        assert_memory_equal(&got, &record, sizeof(got));
        for (uint32_t mixed = 1; mixed < 1u << FFN_CUDA_RECORD_WORDS; mixed++) {
            ffn_cuda_record_place_t next = *place;
            uint64_t words[FFN_CUDA_RECORD_WORDS];
            ffn_cuda_record_pack(&record, number + 8, 8, words);
            for (uint32_t i = 0; i < FFN_CUDA_RECORD_WORDS; i++)
                if (mixed >> i & 1)
                    next.words[i] = words[i];
            assert_false(ffn_cuda_record_unpack(&next, number, 8, &got));
        }
    }
}

static bool never_ends(cuda_stream_t stream)
{
    return true;
}

/* The FfnAgent's event loop asks for figures: a device that does not tell costs it a moment. */
static void test_stats_of_a_silent_device(void **state)
{
    (void)state;
    SKIP_WITHOUT_DEVICE_CODE();
    fixture_t *f = family_of(MODEL_ARCH_LLAMA, XP_DTYPE_BF16);
    scene_t scene;
    ffn_cuda_stats_t stats = {0};
    scene_begin(&scene, f, false);
    assert_int_equal(ffn_cuda_runtime_stop(scene.runtime, xp_monotonic_ns() + XP_NS_PER_S), XP_OK);
    fake.busy = never_ends;
    const uint64_t began_ns = xp_monotonic_ns();
    assert_int_equal(ffn_cuda_runtime_stats(scene.runtime, &stats), XP_TIMEOUT);
    assert_true(xp_monotonic_ns() - began_ns < XP_NS_PER_S);
    fake.busy = NULL;
    assert_int_equal(ffn_cuda_runtime_stats(scene.runtime, &stats), XP_OK);
    scene_close(&scene);
    fixture_close(f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_stats_of_a_silent_device),
        cmocka_unit_test(test_records_are_whole),
        cmocka_unit_test(test_families),
        cmocka_unit_test(test_tales),
        cmocka_unit_test(test_pieces),
        cmocka_unit_test(test_gather_and_deliver),
        cmocka_unit_test(test_shared_workspace),
        cmocka_unit_test(test_lease_after_decode),
        cmocka_unit_test(test_lease),
        cmocka_unit_test(test_cuts),
        cmocka_unit_test(test_lease_kinds),
        cmocka_unit_test(test_records_lost),
        cmocka_unit_test(test_failures),
        cmocka_unit_test(test_scheduler_is_gone),
        cmocka_unit_test(test_bad_configurations),
        cmocka_unit_test(test_shared_role),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
