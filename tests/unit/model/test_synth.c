/* SPDX-License-Identifier: MIT */
/*
 * Synthetic checkpoints: complete for their spec, the same in every format and sharding, refused
 * where they would overwrite. That transformers loads them is checked by
 * tests/reference/model_check.py.
 */
#include "support.h"

#include <math.h>

#include "model/checkpoint.h"
#include "model/inventory.h"
#include "model/synth.h"

static char folder[64];

static int set_up(void **state)
{
    (void)state;
    make_folder(folder);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    remove_folder(folder);
    return 0;
}

typedef struct opened {
    model_spec_t spec;
    checkpoint_t *checkpoint;
    size_t count;
} opened_t;

static xp_status_t require_tensor(void *context, const inventory_tensor_t *wanted)
{
    opened_t *opened = context;
    const checkpoint_tensor_t *tensor;
    opened->count++;
    return checkpoint_tensor_require(opened->checkpoint, wanted->name, wanted->dimensions,
                                     wanted->shape, &tensor);
}

static opened_t *write_and_open(const synth_options_t *options, const char *name)
{
    char path[128];
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    opened_t *opened = calloc(1, sizeof(*opened));
    check_ok(model_synth_write(options, path));
    check_ok(model_spec_load(path, &opened->spec));
    check_ok(checkpoint_open(path, &opened->spec, &opened->checkpoint));
    check_ok(model_inventory_visit(&opened->spec, require_tensor, opened));
    assert_int_equal(checkpoint_tensor_count(opened->checkpoint), opened->count);
    return opened;
}

static void close_opened(opened_t *opened)
{
    checkpoint_close(opened->checkpoint);
    free(opened);
}

static float *read_tensor(const checkpoint_t *checkpoint, const char *name, size_t *count)
{
    const checkpoint_tensor_t *tensor = checkpoint_tensor_find(checkpoint, name);
    assert_non_null(tensor);
    *count = tensor->shape[0] * (tensor->dimensions == 2 ? tensor->shape[1] : 1);
    float *values = malloc(*count * sizeof(float));
    check_ok(checkpoint_read_f32(checkpoint, tensor, values));
    return values;
}

/* Every tensor of `a` equals that of `b` within `tolerance`. */
static void assert_equal_weights(const opened_t *a, const opened_t *b, float tolerance)
{
    assert_int_equal(checkpoint_tensor_count(a->checkpoint),
                     checkpoint_tensor_count(b->checkpoint));
    for (size_t i = 0; i < checkpoint_tensor_count(a->checkpoint); i++) {
        const char *name = checkpoint_tensor_at(a->checkpoint, i)->name;
        size_t count, other;
        float *left = read_tensor(a->checkpoint, name, &count);
        float *right = read_tensor(b->checkpoint, name, &other);
        assert_int_equal(count, other);
        for (size_t k = 0; k < count; k++)
            assert_true(fabsf(left[k] - right[k]) <= tolerance);
        free(left);
        free(right);
    }
}

static void test_every_family(void **state)
{
    (void)state;
    for (unsigned i = 0; i < MODEL_ARCH_COUNT; i++) {
        synth_options_t options;
        model_synth_defaults((model_architecture_t)i, &options);
        const char *name = model_synth_architecture_name((model_architecture_t)i);
        opened_t *opened = write_and_open(&options, name);
        assert_int_equal(opened->spec.architecture, i);
        assert_true(opened->spec.layers >= 4);
        bool moe = opened->spec.ffn[3].kind == MODEL_FFN_MOE;
        assert_int_equal(moe, i >= MODEL_ARCH_QWEN3_MOE);
        assert_true(!moe || opened->spec.ffn[3].experts >= 8);
        /* Weights have the promised spread. */
        size_t count;
        float *values = read_tensor(opened->checkpoint, "lm_head.weight", &count);
        double sum = 0, squares = 0;
        for (size_t k = 0; k < count; k++) {
            sum += (double)values[k];
            squares += (double)values[k] * (double)values[k];
        }
        free(values);
        double deviation = sqrt(squares / (double)count);
        assert_true(fabs(sum / (double)count) < 0.01);
        assert_true(fabs(deviation - 1.5 / sqrt(128)) < 0.005);
        close_opened(opened);
        assert_int_equal(model_synth_architecture(name), i);
    }
    assert_int_equal(model_synth_architecture("gpt-9"), MODEL_ARCH_COUNT);
}

static void test_formats_agree(void **state)
{
    (void)state;
    for (unsigned i = 0; i <= MODEL_ARCH_QWEN3_MOE; i++) {
        char name[32];
        synth_options_t options;
        model_synth_defaults((model_architecture_t)i, &options);
        options.seed = 42;
        snprintf(name, sizeof(name), "plain%u", i);
        opened_t *plain = write_and_open(&options, name);
        options.shards = 3;
        snprintf(name, sizeof(name), "shards%u", i);
        opened_t *shards = write_and_open(&options, name);
        assert_equal_weights(plain, shards, 0);
        close_opened(shards);
        options.shards = 1;
        options.gguf = true;
        snprintf(name, sizeof(name), "gguf%u", i);
        opened_t *gguf = write_and_open(&options, name);
        assert_true(gguf->spec.is_gguf);
        assert_equal_weights(plain, gguf, 0);
        assert_int_equal(gguf->spec.heads, plain->spec.heads);
        assert_int_equal(gguf->spec.head_dim, plain->spec.head_dim);
        assert_int_equal(gguf->spec.qkv_bias, plain->spec.qkv_bias);
        assert_memory_equal(gguf->spec.ffn, plain->spec.ffn, sizeof(plain->spec.ffn));
        close_opened(gguf);
        options.quant = XP_DTYPE_Q8_0;
        snprintf(name, sizeof(name), "q8%u", i);
        gguf = write_and_open(&options, name);
        assert_equal_weights(plain, gguf, 0.01f);
        close_opened(gguf);
        options.gguf = false;
        options.quant = XP_DTYPE_AUTO;
        options.dtype = XP_DTYPE_BF16;
        snprintf(name, sizeof(name), "bf16%u", i);
        opened_t *bf16 = write_and_open(&options, name);
        assert_equal_weights(plain, bf16, 0.008f);
        assert_int_equal(bf16->spec.checkpoint_dtype, XP_DTYPE_BF16);
        close_opened(bf16);
        close_opened(plain);
    }
}

static void test_seeds_differ(void **state)
{
    (void)state;
    synth_options_t options;
    size_t count;
    model_synth_defaults(MODEL_ARCH_LLAMA, &options);
    opened_t *one = write_and_open(&options, "one");
    options.seed = 1;
    opened_t *two = write_and_open(&options, "two");
    float *left = read_tensor(one->checkpoint, "model.norm.weight", &count);
    float *right = read_tensor(two->checkpoint, "model.norm.weight", &count);
    size_t equal = 0;
    for (size_t i = 0; i < count; i++)
        equal += left[i] == right[i];
    assert_true(equal < count / 10);
    free(left);
    free(right);
    close_opened(one);
    close_opened(two);
}

static void test_rotary_scaling(void **state)
{
    (void)state;
    for (unsigned rope = MODEL_ROPE_LINEAR; rope <= MODEL_ROPE_YARN; rope++) {
        char name[32];
        synth_options_t options;
        model_synth_defaults(MODEL_ARCH_LLAMA, &options);
        options.rope = (model_rope_scaling_t)rope;
        snprintf(name, sizeof(name), "rope%u", rope);
        opened_t *plain = write_and_open(&options, name);
        assert_int_equal(plain->spec.rope.scaling, rope);
        char path[128];
        snprintf(path, sizeof(path), "%s/rope-gguf%u", folder, rope);
        options.gguf = true;
        check_ok(model_synth_write(&options, path));
        model_spec_t spec;
        check_ok(model_spec_load(path, &spec));
        assert_memory_equal(&spec.rope, &plain->spec.rope, sizeof(spec.rope));
        close_opened(plain);
    }
}

/* What only DeepSeek-V2 and GLM have arrives in the spec as it was asked for. */
static void test_routing_options(void **state)
{
    (void)state;
    for (unsigned i = MODEL_ARCH_DEEPSEEK_V2; i <= MODEL_ARCH_GLM4_MOE_LITE; i++) {
        char name[32];
        synth_options_t options;
        model_synth_defaults((model_architecture_t)i, &options);
        options.experts = 12;
        options.groups = 3;
        options.top_groups = 2;
        options.shared_experts = 3;
        options.routed_scale = 0.125;
        snprintf(name, sizeof(name), "routing%u", i);
        opened_t *opened = write_and_open(&options, name);
        const model_ffn_t *ffn = &opened->spec.ffn[3];
        assert_int_equal(opened->spec.ffn[0].kind, MODEL_FFN_DENSE);
        assert_int_equal(ffn->groups, 3);
        assert_int_equal(ffn->top_groups, 2);
        assert_int_equal(ffn->shared_intermediate, 3 * options.moe_intermediate);
        assert_true(ffn->routed_scale == 0.125);
        close_opened(opened);
        options.groups = options.top_groups = 1;
        snprintf(name, sizeof(name), "ungrouped%u", i);
        opened = write_and_open(&options, name);
        assert_int_equal(opened->spec.ffn[3].groups, 1);
        close_opened(opened);
    }
    /* YaRN as the published DeepSeek-V2 files write it. */
    synth_options_t options;
    model_synth_defaults(MODEL_ARCH_DEEPSEEK_V2, &options);
    options.rope = MODEL_ROPE_YARN;
    opened_t *opened = write_and_open(&options, "yarn");
    assert_int_equal(opened->spec.rope.scaling, MODEL_ROPE_YARN);
    assert_true(opened->spec.rope.mscale == 0.707);
    assert_true(opened->spec.rope.mscale_all_dim == 0.707);
    assert_true(opened->spec.rope.original_max_positions == 512);
    close_opened(opened);
}

static void test_overwriting(void **state)
{
    (void)state;
    synth_options_t options;
    char path[128];
    model_synth_defaults(MODEL_ARCH_QWEN3, &options);
    options.shards = 2;
    close_opened(write_and_open(&options, "deep/er"));
    snprintf(path, sizeof(path), "%s/deep/er", folder);
    check_fails(model_synth_write(&options, path), XP_INVALID, "deep/er/config.json|--force");
    options.force = true;
    options.shards = 1;
    options.tied = true;
    opened_t *opened = write_and_open(&options, "deep/er");
    assert_true(opened->spec.tied_embeddings);
    close_opened(opened);
    options.gguf = true;
    opened = write_and_open(&options, "deep/er");
    assert_true(opened->spec.is_gguf);
    assert_true(opened->spec.tied_embeddings);
    close_opened(opened);
}

static void test_bad_options(void **state)
{
    (void)state;
    synth_options_t options;
    char path[128];
    snprintf(path, sizeof(path), "%s/bad", folder);
    model_synth_defaults(MODEL_ARCH_QWEN3_MOE, &options);
    options.vocab = 258;
    check_fails(model_synth_write(&options, path), XP_INVALID, "258|259");
    model_synth_defaults(MODEL_ARCH_QWEN3_MOE, &options);
    options.top_k = 9;
    check_fails(model_synth_write(&options, path), XP_INVALID, "9 of 8");
    model_synth_defaults(MODEL_ARCH_QWEN3_MOE, &options);
    options.layers = 0;
    check_fails(model_synth_write(&options, path), XP_INVALID, "num_hidden_layers");
    model_synth_defaults(MODEL_ARCH_QWEN3_MOE, &options);
    options.quant = XP_DTYPE_Q4_0;
    check_fails(model_synth_write(&options, path), XP_INVALID, "GGUF");
    options.gguf = true;
    options.quant = XP_DTYPE_Q4_K;
    check_fails(model_synth_write(&options, path), XP_INVALID, "q4_k|256");
    model_synth_defaults(MODEL_ARCH_GLM4_MOE_LITE, &options);
    options.gguf = true;
    check_fails(model_synth_write(&options, path), XP_UNSUPPORTED, "glm4-moe-lite");
    options.gguf = false;
    options.rope = MODEL_ROPE_YARN;
    check_fails(model_synth_write(&options, path), XP_UNSUPPORTED, "rotary scaling|glm4-moe-lite");
    options.rope = MODEL_ROPE_NONE;
    options.shared_experts = 0;
    check_fails(model_synth_write(&options, path), XP_UNSUPPORTED, "shared experts");
    model_synth_defaults(MODEL_ARCH_DEEPSEEK_V2, &options);
    options.groups = 3;
    check_fails(model_synth_write(&options, path), XP_INVALID, "3|8");
    model_synth_defaults(MODEL_ARCH_QWEN3_MOE, &options);
    options.groups = 2;
    check_fails(model_synth_write(&options, path), XP_UNSUPPORTED, "qwen3-moe|groups");
    model_synth_defaults(MODEL_ARCH_LLAMA, &options);
    options.shards = 999;
    check_fails(model_synth_write(&options, path), XP_INVALID, "999");
    options.shards = 1;
    check_fails(model_synth_write(&options, "/proc/nowhere"), XP_IO, "/proc/nowhere");
    /* Nothing half-written stays behind. */
    char command[256];
    snprintf(command, sizeof(command), "test -z \"$(find %s -type f)\"", folder);
    assert_int_equal(system(command), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_every_family, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_formats_agree, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_seeds_differ, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_rotary_scaling, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_routing_options, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_overwriting, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_bad_options, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
