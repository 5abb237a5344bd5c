/* SPDX-License-Identifier: MIT */
/*
 * Loads the attention side of a checkpoint. Runs once, on the thread that creates the engine. One
 * walk over the tensors serves three purposes: checking, measuring and reading, so that the ledger
 * cannot differ from what is allocated.
 */
#include "engine/weights.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define READ_BLOCK_BYTES (4u << 20)
#define ALIGNMENT        64u

typedef struct loader {
    const model_spec_t *spec;
    const checkpoint_t *checkpoint; /* NULL: seeded random weights */
    xp_dtype_t dtype;
    char *region; /* NULL while measuring */
    size_t used;
    engine_weights_progress_t progress;
    void *progress_context;
    uint64_t done_bytes, total_bytes;
    void *block; /* READ_BLOCK_BYTES, for conversions */
} loader_t;

static void *region_take(loader_t *loader, size_t bytes)
{
    size_t offset = (loader->used + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    loader->used = offset + bytes;
    return loader->region ? loader->region + offset : NULL;
}

static void report(loader_t *loader, uint64_t bytes)
{
    loader->done_bytes += bytes;
    if (loader->progress)
        loader->progress(loader->progress_context, loader->done_bytes, loader->total_bytes);
}

static bool is_plain(xp_dtype_t dtype)
{
    return dtype == XP_DTYPE_F32 || dtype == XP_DTYPE_F16 || dtype == XP_DTYPE_BF16;
}

/* Type in memory of a tensor that has `stored` in the file: only plain types are converted. */
static xp_dtype_t target_dtype(const loader_t *loader, xp_dtype_t stored)
{
    return loader->dtype == XP_DTYPE_AUTO || !is_plain(stored) ? stored : loader->dtype;
}

/* ---- seeded random weights ------------------------------------------------------------------- */

static uint64_t mix(uint64_t x)
{
    x += 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

static uint64_t name_seed(const char *name)
{
    uint64_t seed = 1;
    for (; *name; name++)
        seed = mix(seed ^ (uint8_t)*name);
    return seed;
}

static void dummy_fill(const char *name, xp_dtype_t dtype, size_t count, void *out)
{
    uint64_t seed = name_seed(name);
    float block[1024];
    for (size_t done = 0; done < count;) {
        size_t part = count - done < 1024 ? count - done : 1024;
        for (size_t i = 0; i < part; i++) {
            /* Uniform with a standard deviation of 0.02, the usual scale of initial weights. */
            double unit = (double)(mix(seed + done + i) >> 11) * 0x1p-53;
            block[i] = (float)((unit - 0.5) * 0.0692820323);
        }
        kernels_convert(XP_DTYPE_F32, block, dtype,
                        (char *)out + done * xp_dtype_block_bytes(dtype), part);
        done += part;
    }
}

/* ---- one tensor ------------------------------------------------------------------------------ */

static xp_dtype_t dummy_dtype(const loader_t *loader)
{
    if (loader->dtype != XP_DTYPE_AUTO)
        return loader->dtype;
    return is_plain(loader->spec->checkpoint_dtype) ? loader->spec->checkpoint_dtype
                                                    : XP_DTYPE_BF16;
}

/* Finds and checks a [rows][columns] tensor and says its type in memory. */
static xp_status_t matrix_require(const loader_t *loader, const char *name, uint32_t rows,
                                  uint32_t columns, const checkpoint_tensor_t **tensor_out,
                                  xp_dtype_t *dtype_out)
{
    if (!loader->checkpoint) {
        *tensor_out = NULL;
        *dtype_out = dummy_dtype(loader);
        return XP_OK;
    }
    const uint64_t shape[2] = {rows, columns};
    XP_TRY(checkpoint_tensor_require(loader->checkpoint, name, 2, shape, tensor_out));
    *dtype_out = target_dtype(loader, (*tensor_out)->dtype);
    return XP_OK;
}

static xp_status_t matrix_read(loader_t *loader, const char *name,
                               const checkpoint_tensor_t *tensor, xp_dtype_t dtype, uint32_t rows,
                               uint32_t columns, char *out)
{
    const size_t row_bytes = xp_dtype_row_bytes(dtype, columns);
    if (!tensor) {
        dummy_fill(name, dtype, (size_t)rows * columns, out);
        report(loader, rows * row_bytes);
        return XP_OK;
    }
    const size_t stored_bytes = xp_dtype_row_bytes(tensor->dtype, columns);
    uint32_t step = (uint32_t)(READ_BLOCK_BYTES / stored_bytes);
    if (step == 0)
        return xp_fail(XP_UNSUPPORTED, "tensor %s: rows of %zu bytes", name, stored_bytes);
    for (uint32_t row = 0; row < rows; row += step) {
        uint32_t part = rows - row < step ? rows - row : step;
        char *target = out + row * row_bytes;
        void *read_to = tensor->dtype == dtype ? target : loader->block;
        XP_TRY(checkpoint_read_rows(loader->checkpoint, tensor, row, part, 0, columns, read_to));
        if (tensor->dtype != dtype)
            kernels_convert(tensor->dtype, loader->block, dtype, target, (size_t)part * columns);
        report(loader, part * row_bytes);
    }
    return XP_OK;
}

static xp_status_t matrix_load(loader_t *loader, const char *name, uint32_t rows, uint32_t columns,
                               kernels_matrix_t *matrix_out)
{
    const checkpoint_tensor_t *tensor;
    xp_dtype_t dtype;
    XP_TRY(matrix_require(loader, name, rows, columns, &tensor, &dtype));
    void *data = region_take(loader, kernels_matrix_bytes(dtype, rows, columns));
    if (data)
        XP_TRY(matrix_read(loader, name, tensor, dtype, rows, columns, data));
    *matrix_out =
        (kernels_matrix_t){.dtype = dtype, .rows = rows, .columns = columns, .data = data};
    return data ? kernels_matrix_pack(matrix_out) : XP_OK;
}

static xp_status_t vector_read(loader_t *loader, const char *name, uint32_t count,
                               float dummy_value, float *out)
{
    const checkpoint_tensor_t *tensor = NULL;
    if (loader->checkpoint) {
        const uint64_t shape[1] = {count};
        XP_TRY(checkpoint_tensor_require(loader->checkpoint, name, 1, shape, &tensor));
    }
    if (!loader->region)
        return XP_OK;
    if (tensor)
        XP_TRY(checkpoint_read_f32(loader->checkpoint, tensor, out));
    else
        for (uint32_t i = 0; i < count; i++)
            out[i] = dummy_value;
    report(loader, count * sizeof(float));
    return XP_OK;
}

static xp_status_t vector_load(loader_t *loader, const char *name, uint32_t count,
                               float dummy_value, float **vector_out)
{
    float *data = region_take(loader, count * sizeof(float));
    XP_TRY(vector_read(loader, name, count, dummy_value, data));
    *vector_out = data;
    return XP_OK;
}

/* ---- one layer ------------------------------------------------------------------------------- */

static xp_status_t qkv_load(loader_t *loader, uint32_t index, engine_layer_t *layer)
{
    static const char *const parts[3] = {"q_proj", "k_proj", "v_proj"};
    const model_spec_t *spec = loader->spec;
    const uint32_t q_dim = spec->heads * spec->head_dim, kv_dim = spec->kv_heads * spec->head_dim;
    const uint32_t rows[3] = {q_dim, kv_dim, kv_dim};
    char names[3][96];
    const checkpoint_tensor_t *tensors[3];
    xp_dtype_t dtypes[3];
    for (uint32_t i = 0; i < 3; i++) {
        snprintf(names[i], sizeof names[i], "model.layers.%u.self_attn.%s.weight", index, parts[i]);
        XP_TRY(matrix_require(loader, names[i], rows[i], spec->hidden, &tensors[i], &dtypes[i]));
    }
    if (dtypes[0] != dtypes[1] || dtypes[0] != dtypes[2]) {
        layer->qkv_count = 3;
        for (uint32_t i = 0; i < 3; i++)
            XP_TRY(matrix_load(loader, names[i], rows[i], spec->hidden, &layer->qkv[i]));
    } else {
        /* Row-major matrices of one type stack without gaps, and one product needs one barrier. */
        const uint32_t total = q_dim + 2 * kv_dim;
        const size_t row_bytes = xp_dtype_row_bytes(dtypes[0], spec->hidden);
        char *data = region_take(loader, kernels_matrix_bytes(dtypes[0], total, spec->hidden));
        uint32_t row = 0;
        for (uint32_t i = 0; i < 3; i++) {
            if (data)
                XP_TRY(matrix_read(loader, names[i], tensors[i], dtypes[i], rows[i], spec->hidden,
                                   data + row * row_bytes));
            row += rows[i];
        }
        layer->qkv_count = 1;
        layer->qkv[0] = (kernels_matrix_t){
            .dtype = dtypes[0], .rows = total, .columns = spec->hidden, .data = data};
        if (data)
            XP_TRY(kernels_matrix_pack(&layer->qkv[0]));
    }
    if (!spec->qkv_bias)
        return XP_OK;
    float *bias = region_take(loader, (q_dim + 2 * kv_dim) * sizeof(float));
    layer->qkv_bias = bias;
    for (uint32_t i = 0, at = 0; i < 3; at += rows[i], i++) {
        char name[96];
        snprintf(name, sizeof name, "model.layers.%u.self_attn.%s.bias", index, parts[i]);
        XP_TRY(vector_read(loader, name, rows[i], 0.0f, bias ? bias + at : NULL));
    }
    return XP_OK;
}

static xp_status_t layer_load(loader_t *loader, uint32_t index, engine_layer_t *layer)
{
    const model_spec_t *spec = loader->spec;
    char name[96];
#define LAYER_NAME(part) (snprintf(name, sizeof name, "model.layers.%u." part, index), name)
    XP_TRY(vector_load(loader, LAYER_NAME("input_layernorm.weight"), spec->hidden, 1.0f,
                       &layer->attention_norm));
    XP_TRY(qkv_load(loader, index, layer));
    if (spec->qk_norm) {
        XP_TRY(vector_load(loader, LAYER_NAME("self_attn.q_norm.weight"), spec->head_dim, 1.0f,
                           &layer->q_norm));
        XP_TRY(vector_load(loader, LAYER_NAME("self_attn.k_norm.weight"), spec->head_dim, 1.0f,
                           &layer->k_norm));
    }
    XP_TRY(matrix_load(loader, LAYER_NAME("self_attn.o_proj.weight"), spec->hidden,
                       spec->heads * spec->head_dim, &layer->o));
    if (spec->o_bias)
        XP_TRY(vector_load(loader, LAYER_NAME("self_attn.o_proj.bias"), spec->hidden, 0.0f,
                           &layer->o_bias));
    XP_TRY(vector_load(loader, LAYER_NAME("post_attention_layernorm.weight"), spec->hidden, 1.0f,
                       &layer->ffn_norm));
#undef LAYER_NAME
    return XP_OK;
}

static xp_status_t walk(loader_t *loader, engine_weights_t *weights)
{
    const model_spec_t *spec = loader->spec;
    XP_TRY(matrix_load(loader, "model.embed_tokens.weight", spec->vocab, spec->hidden,
                       &weights->embedding));
    for (uint32_t i = 0; i < spec->layers; i++)
        XP_TRY(layer_load(loader, i, &weights->layers[i]));
    XP_TRY(vector_load(loader, "model.norm.weight", spec->hidden, 1.0f, &weights->final_norm));
    if (spec->tied_embeddings)
        weights->head = weights->embedding;
    else
        XP_TRY(matrix_load(loader, "lm_head.weight", spec->vocab, spec->hidden, &weights->head));
    return XP_OK;
}

/* ---- whole ----------------------------------------------------------------------------------- */

static xp_status_t layers_create(const model_spec_t *spec, engine_weights_t *weights)
{
    weights->layer_count = spec->layers;
    weights->layers = calloc(spec->layers, sizeof *weights->layers);
    if (!weights->layers)
        return xp_fail(XP_NO_MEMORY, "tables of %u layers", spec->layers);
    return XP_OK;
}

xp_status_t engine_weights_measure(const model_spec_t *spec, const checkpoint_t *checkpoint,
                                   xp_dtype_t dtype, uint64_t *bytes_out)
{
    engine_weights_t weights = {0};
    loader_t loader = {.spec = spec, .checkpoint = checkpoint, .dtype = dtype};
    XP_TRY(layers_create(spec, &weights));
    xp_status_t status = walk(&loader, &weights);
    free(weights.layers);
    if (status == XP_OK)
        *bytes_out = loader.used;
    return status;
}

xp_status_t engine_weights_load(const model_spec_t *spec, const checkpoint_t *checkpoint,
                                xp_dtype_t dtype, engine_weights_progress_t progress,
                                void *progress_context, engine_weights_t *weights_out)
{
    engine_weights_t weights = {0};
    loader_t loader = {.spec = spec,
                       .checkpoint = checkpoint,
                       .dtype = dtype,
                       .progress = progress,
                       .progress_context = progress_context};
    xp_status_t status = XP_OK;
    XP_TRY_GOTO(status, fail, engine_weights_measure(spec, checkpoint, dtype, &loader.total_bytes));
    XP_TRY_GOTO(status, fail, layers_create(spec, &weights));
    weights.bytes = loader.total_bytes;
    weights.region = mmap(NULL, weights.bytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (weights.region == MAP_FAILED) {
        weights.region = NULL;
        status = xp_fail_errno(XP_NO_MEMORY, "%zu bytes of attention weights", weights.bytes);
        goto fail;
    }
    /* Best effort: large pages save TLB misses while the weights stream by. */
    madvise(weights.region, weights.bytes, MADV_HUGEPAGE);
    loader.region = weights.region;
    loader.block = malloc(READ_BLOCK_BYTES);
    if (!loader.block) {
        status = xp_fail(XP_NO_MEMORY, "a read block of %u bytes", READ_BLOCK_BYTES);
        goto fail;
    }
    XP_TRY_GOTO(status, fail, walk(&loader, &weights));
    XP_ASSERT(loader.used == weights.bytes);
    /* Padding between tensors is not reported tensor by tensor. */
    report(&loader, loader.total_bytes - loader.done_bytes);
    free(loader.block);
    *weights_out = weights;
    return XP_OK;

fail:
    free(loader.block);
    engine_weights_fini(&weights);
    return status;
}

void engine_weights_fini(engine_weights_t *weights)
{
    if (weights->region)
        munmap(weights->region, weights->bytes);
    free(weights->layers);
    memset(weights, 0, sizeof *weights);
}
