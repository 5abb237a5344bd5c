/* SPDX-License-Identifier: MIT */
/*
 * The CUDA runtime's models, memory and life. See cuda_runtime.h; the host thread is cuda_serve.c.
 *
 * Device memory: `words` (dispatch, queue, counters; made by create), a few allocations a shard
 * (made by install), `tables` and `lanes` (made by start, when all signatures are known).
 */
#include "ffn/cuda_runtime.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ffn/cuda/decode_shape.h"
#include "ffn/cuda_private.h"
#include "ffn/load_share.h"

CUDA_IMAGE_DECLARE(ffn_dispatch);

#define RUNTIME_LINE       256u /* of device memory; words that are polled do not share one */
#define RUNTIME_QUIET_NS   (2 * XP_NS_PER_MS)
#define RUNTIME_CLOCK_TIES 5
#define RUNTIME_STOP_NS    (5 * XP_NS_PER_S)    /* for a destroy without a stop */
#define STATS_LIMIT_NS     (200 * XP_NS_PER_MS) /* the event loop of the FfnAgent asks */

static const char *const dispatch_names[DISPATCH_KERNELS] = {
    [DISPATCH_GATHER] = "ffn_gather",   [DISPATCH_PIECE] = "ffn_piece",
    [DISPATCH_PUBLISH] = "ffn_publish", [DISPATCH_FILL] = "ffn_fill",
    [DISPATCH_DIGEST] = "ffn_digest",   [DISPATCH_CLOCK] = "ffn_clock",
};

typedef struct runtime_carve {
    cuda_address_t base;
    uint64_t used;
} runtime_carve_t;

static cuda_address_t runtime_take(runtime_carve_t *carve, uint64_t bytes)
{
    const cuda_address_t at = carve->base + carve->used;
    carve->used += (bytes + RUNTIME_LINE - 1) / RUNTIME_LINE * RUNTIME_LINE;
    return at;
}

static uint64_t runtime_granules(uint64_t bytes)
{
    return (bytes + FFN_CUDA_GRANULE - 1) / FFN_CUDA_GRANULE * FFN_CUDA_GRANULE;
}

static uint64_t runtime_carve_words(ffn_cuda_runtime_t *runtime, cuda_address_t base)
{
    runtime_carve_t carve = {.base = base};
    runtime->dispatch_at = runtime_take(&carve, sizeof(ffn_cuda_dispatch_t));
    runtime->queue_at = runtime_take(&carve, sizeof(ffn_cuda_queue_t));
    runtime->counters_at = runtime_take(&carve, sizeof(ffn_cuda_counters_t));
    runtime->lease_at = runtime_take(&carve, sizeof(uint32_t));
    runtime->failure_at = runtime_take(&carve, sizeof(uint32_t));
    runtime->word_at = runtime_take(&carve, sizeof(uint64_t));
    if (runtime->config.cuts && runtime->config.resident)
        runtime->aside_at =
            runtime_take(&carve, (uint64_t)runtime->kernels.blocks * FFN_CUDA_ASIDE_BYTES);
    return carve.used;
}

/* ---- create and destroy ----------------------------------------------------------------------
 */
static xp_status_t create_check(const ffn_cuda_config_t *config)
{
    if (config->lanes < 1 || config->lanes > FFN_CUDA_MAX_LANES || config->max_rows < 1)
        return xp_fail(XP_INVALID, "%u Executor Lanes of %u rows; 1 to %u Lanes of 1 row or more",
                       config->lanes, config->max_rows, FFN_CUDA_MAX_LANES);
    if (config->resident && config->shared_role)
        return xp_fail(XP_INVALID, "the resident decode kernel needs a GPU without another role");
    return XP_OK;
}

static xp_status_t create_host(ffn_cuda_runtime_t *runtime)
{
    const cuda_device_t *device = runtime->device;
    void *address;
    XP_TRY(cuda_host_alloc(device, sizeof(*runtime->staging), &address));
    runtime->staging = address;
    memset(address, 0, sizeof(*runtime->staging));
    XP_TRY(cuda_host_alloc(device, sizeof(*runtime->ring), &address));
    runtime->ring = address;
    memset(address, 0, sizeof(*runtime->ring));
    XP_TRY(CUDA_CALL(device->driver, cuMemHostGetDevicePointer, &runtime->ring_at, address, 0));
    return ffn_cuda_records_open(device, runtime->config.records, &runtime->records);
}

static xp_status_t runtime_wait(ffn_cuda_runtime_t *runtime)
{
    const xp_clock_t clock = xp_clock_system();
    return cuda_stream_wait(runtime->device, runtime->control, &clock,
                            xp_monotonic_ns() + CUDA_LIMIT_NS);
}

/* By the owner, before start. */
static xp_status_t runtime_write(ffn_cuda_runtime_t *runtime, cuda_address_t to, const void *from,
                                 uint64_t bytes)
{
    for (uint64_t done = 0, piece; done < bytes; done += piece) {
        piece = bytes - done < CUDA_UPLOAD_BYTES ? bytes - done : CUDA_UPLOAD_BYTES;
        memcpy(runtime->staging->upload, (const uint8_t *)from + done, piece);
        XP_TRY(CUDA_CALL(runtime->device->driver, cuMemcpyHtoDAsync, to + done,
                         runtime->staging->upload, piece, runtime->control));
        XP_TRY(runtime_wait(runtime));
    }
    return XP_OK;
}

static xp_status_t runtime_zero(ffn_cuda_runtime_t *runtime, const cuda_block_t *block)
{
    XP_TRY(CUDA_CALL(runtime->device->driver, cuMemsetD8Async, block->address, 0, block->bytes,
                     runtime->control));
    return runtime_wait(runtime);
}

static xp_status_t create_device(ffn_cuda_runtime_t *runtime)
{
    const cuda_device_t *device = runtime->device;
    const uint32_t all = (uint32_t)device->info.multiprocessors;
    const uint32_t blocks = runtime->config.blocks ? runtime->config.blocks : all - 1;
    cuda_stream_t *const streams[] = {&runtime->control, &runtime->decode, &runtime->bulk,
                                      &runtime->resident, &runtime->watch};
    XP_TRY(ffn_cuda_kernels_load(device, blocks, &runtime->kernels));
    XP_TRY(cuda_module_load(device, &cuda_image_ffn_dispatch, dispatch_names, DISPATCH_KERNELS,
                            &runtime->module, runtime->function));
    for (uint32_t i = 0; i < 5; i++)
        XP_TRY(cuda_stream_create(device, streams[i] != &runtime->bulk, streams[i]));
    XP_TRY(create_host(runtime));
    XP_TRY(cuda_block_create(device, runtime_carve_words(runtime, 0), &runtime->words));
    runtime_carve_words(runtime, runtime->words.address);
    XP_TRY(runtime_zero(runtime, &runtime->words));
    /* A host without the library computes all products with our own kernels. */
    if (runtime->config.library && ffn_library_open(&runtime->kernels, &runtime->library) != XP_OK)
        runtime->library = NULL;
    return XP_OK;
}

xp_status_t ffn_cuda_runtime_create(const ffn_cuda_config_t *config,
                                    ffn_cuda_runtime_t **runtime_out)
{
    XP_TRY(create_check(config));
    ffn_cuda_runtime_t *runtime = calloc(1, sizeof(*runtime));
    if (!runtime)
        return xp_fail(XP_NO_MEMORY, "no memory for the FFN runtime");
    runtime->config = *config;
    runtime->device = config->device;
    if (runtime->config.quiet_ns == 0)
        runtime->config.quiet_ns = RUNTIME_QUIET_NS;
    pthread_mutex_init(&runtime->failure_lock, NULL);
    pthread_mutex_init(&runtime->stats_lock, NULL);
    xp_status_t status = create_device(runtime);
    if (status != XP_OK) {
        ffn_cuda_runtime_destroy(runtime);
        return status;
    }
    *runtime_out = runtime;
    return XP_OK;
}

static void model_release(cuda_model_t *model)
{
    cuda_shard_release(&model->shard);
    free(model->template);
    free(model->layer);
    free(model->part);
    free(model->first_part);
    *model = (cuda_model_t){0};
}

void ffn_cuda_runtime_destroy(ffn_cuda_runtime_t *runtime)
{
    if (!runtime)
        return;
    const cuda_device_t *device = runtime->device;
    if (runtime->running)
        (void)ffn_cuda_runtime_stop(runtime, xp_monotonic_ns() + RUNTIME_STOP_NS);
    /* Kernels that did not end may use any of it. */
    if (runtime->stuck)
        return;
    for (uint32_t t = 0; t < runtime->templates; t++)
        cuda_template_release(runtime, t);
    for (uint32_t m = 0; m < FFN_CUDA_MAX_MODELS; m++)
        model_release(&runtime->model[m]);
    cuda_block_destroy(&runtime->lanes);
    cuda_block_destroy(&runtime->tables);
    cuda_block_destroy(&runtime->words);
    ffn_library_close(runtime->library);
    cuda_host_free(device, runtime->usage);
    ffn_cuda_records_close(&runtime->records);
    cuda_host_free(device, runtime->ring);
    cuda_host_free(device, runtime->staging);
    cuda_stream_destroy(device, runtime->watch);
    cuda_stream_destroy(device, runtime->resident);
    cuda_stream_destroy(device, runtime->bulk);
    cuda_stream_destroy(device, runtime->decode);
    cuda_stream_destroy(device, runtime->control);
    cuda_module_unload(&runtime->module);
    ffn_cuda_kernels_unload(&runtime->kernels);
    free(runtime->layer_template);
    free(runtime->layer_part);
    free(runtime->part);
    pthread_mutex_destroy(&runtime->stats_lock);
    pthread_mutex_destroy(&runtime->failure_lock);
    free(runtime);
}

/* ---- install ---------------------------------------------------------------------------------
 */
static uint64_t runtime_used(const ffn_cuda_runtime_t *runtime)
{
    uint64_t bytes = runtime->words.bytes + runtime->tables.bytes + runtime->lanes.bytes;
    for (uint32_t m = 0; m < FFN_CUDA_MAX_MODELS; m++)
        bytes += runtime->model[m].bytes;
    return bytes;
}

static xp_status_t runtime_admit(const ffn_cuda_runtime_t *runtime, uint64_t bytes,
                                 const char *what)
{
    const uint64_t budget = runtime->config.memory_bytes, used = runtime_used(runtime);
    const uint64_t left = budget > used ? budget - used : 0;
    if (budget && bytes > left)
        return xp_fail(XP_NO_MEMORY,
                       "%s needs %llu bytes of cuda:%d, but %llu of the %llu it may take are left",
                       what, (unsigned long long)bytes, runtime->device->ordinal,
                       (unsigned long long)left, (unsigned long long)budget);
    return XP_OK;
}

/* Index of the GraphTemplate of that signature, made if it is new. */
static xp_status_t install_template(ffn_cuda_runtime_t *runtime,
                                    const ffn_cuda_signature_t *signature, uint32_t *index_out)
{
    for (uint32_t t = 0; t < runtime->templates; t++)
        if (!memcmp(&runtime->template[t].signature, signature, sizeof(*signature))) {
            *index_out = t;
            return XP_OK;
        }
    if (runtime->templates == CUDA_MAX_SIGNATURES)
        return xp_fail(XP_NO_MEMORY, "more than %d different layer structures on cuda:%d",
                       CUDA_MAX_SIGNATURES, runtime->device->ordinal);
    cuda_template_plan(&runtime->config, signature, &runtime->template[runtime->templates]);
    *index_out = runtime->templates++;
    return XP_OK;
}

static xp_status_t install_tables(ffn_cuda_runtime_t *runtime, const ffn_install_t *install,
                                  const model_spec_t *spec, const cuda_layout_t *layout,
                                  cuda_model_t *model)
{
    snprintf(model->id, sizeof(model->id), "%s", install->model_id);
    model->layers = spec->layers;
    model->hidden = spec->hidden;
    model->dtype = layout->dtype;
    for (uint32_t l = 0; l < spec->layers; l++)
        model->parts += cuda_layout_parts(&spec->ffn[l]);
    model->template = calloc(spec->layers, sizeof(*model->template));
    model->layer = calloc(spec->layers, sizeof(*model->layer));
    model->first_part = calloc(spec->layers, sizeof(*model->first_part));
    model->part = calloc(model->parts, sizeof(*model->part));
    if (!model->template || !model->layer || !model->first_part || !model->part)
        return xp_fail(XP_NO_MEMORY, "no memory for the tables of model %s", install->model_id);
    for (uint32_t l = 1; l < spec->layers; l++)
        model->first_part[l] = model->first_part[l - 1] + cuda_layout_parts(&spec->ffn[l - 1]);
    cuda_layout_tables(layout, spec, model->shard.base, model->layer, model->part);
    for (uint32_t l = 0; l < spec->layers; l++) {
        ffn_cuda_signature_t signature;
        cuda_layout_signature(layout, spec, l, install->tp_size, &signature);
        XP_TRY(install_template(runtime, &signature, &model->template[l]));
    }
    return XP_OK;
}

static xp_status_t install_check(const ffn_cuda_runtime_t *runtime, const ffn_install_t *install)
{
    if (runtime->started)
        return xp_fail(XP_INVALID, "model %s: the runtime of cuda:%d has started",
                       install->model_id, runtime->device->ordinal);
    bool held = install->model < FFN_CUDA_MAX_MODELS && runtime->model[install->model].installed;
    return load_check_install(install, FFN_CUDA_MAX_MODELS,
                              held ? runtime->model[install->model].id : NULL);
}

static xp_status_t install_shard(ffn_cuda_runtime_t *runtime, const ffn_install_t *install,
                                 const checkpoint_t *checkpoint, const cuda_layout_t *layout,
                                 const ffn_cuda_weights_t *kept, cuda_shard_t *shard_out,
                                 ffn_cuda_load_report_t *report)
{
    const cuda_loader_t loader = {
        .device = runtime->device,
        .fill = runtime->function[DISPATCH_FILL],
        .digest = runtime->function[DISPATCH_DIGEST],
        .stream = runtime->control,
        .word = runtime->word_at,
        .word_staged = &runtime->staging->word,
    };
    report->bytes = layout->bytes;
    if (kept) {
        xp_status_t status = cuda_shard_adopt(&loader, install, layout, kept, shard_out);
        report->adopted = status == XP_OK;
        /* Anything else than "not that shard" would not be better by reading. */
        if (status != XP_INVALID && status != XP_PEER)
            return status;
        if (install->refused)
            install->refused(install->refused_context);
    }
    report->read = checkpoint ? layout->bytes : 0;
    return cuda_shard_load(&loader, install, checkpoint, layout, shard_out);
}

xp_status_t ffn_cuda_runtime_install(ffn_cuda_runtime_t *runtime, const ffn_install_t *install,
                                     const ffn_cuda_weights_t *kept,
                                     ffn_cuda_load_report_t *report_out)
{
    xp_status_t status;
    checkpoint_t *checkpoint = NULL;
    cuda_layout_t layout = {0};
    cuda_model_t model = {0};
    ffn_cuda_load_report_t report = {0};
    const uint64_t start = xp_monotonic_ns();
    XP_TRY(install_check(runtime, install));
    model_spec_t *spec = malloc(sizeof(*spec));
    if (!spec)
        return xp_fail(XP_NO_MEMORY, "no memory for the spec of model %s", install->model_id);
    XP_TRY_GOTO(status, done, model_spec_load(install->path, spec));
    if (!install->dummy)
        XP_TRY_GOTO(status, done, checkpoint_open(install->path, spec, &checkpoint));
    XP_TRY_GOTO(status, done,
                cuda_layout_make(spec, checkpoint, install->dtype, install->tp_size,
                                 runtime->config.block_bytes, &layout));
    for (uint32_t b = 0; b < layout.blocks; b++)
        model.bytes += cuda_vmm_round_up(runtime->device, layout.block_bytes[b]);
    XP_TRY_GOTO(status, done, runtime_admit(runtime, model.bytes, install->model_id));
    XP_TRY_GOTO(status, done,
                install_shard(runtime, install, checkpoint, &layout, kept, &model.shard, &report));
    XP_TRY_GOTO(status, done, install_tables(runtime, install, spec, &layout, &model));
    model.installed = true;
    runtime->model[install->model] = model;
    if (report_out) {
        report.took_ns = xp_monotonic_ns() - start;
        *report_out = report;
    }
done:
    if (status != XP_OK)
        model_release(&model);
    cuda_layout_fini(&layout);
    checkpoint_close(checkpoint);
    free(spec);
    return status;
}

xp_status_t ffn_cuda_runtime_export(ffn_cuda_runtime_t *runtime, uint32_t model,
                                    ffn_cuda_weights_t *weights_out)
{
    if (model >= FFN_CUDA_MAX_MODELS || !runtime->model[model].installed)
        return xp_fail(XP_INVALID, "no model %u is installed on cuda:%d", model,
                       runtime->device->ordinal);
    return cuda_shard_export(&runtime->model[model].shard, weights_out);
}

/* ---- start -----------------------------------------------------------------------------------
 */
static uint64_t tables_bytes(uint32_t layers, uint32_t parts, uint64_t usage_bytes)
{
    runtime_carve_t carve = {0};
    runtime_take(&carve, CUDA_MAX_SIGNATURES * sizeof(ffn_cuda_signature_t));
    runtime_take(&carve, (uint64_t)layers * sizeof(ffn_cuda_layer_t));
    runtime_take(&carve, (uint64_t)parts * sizeof(ffn_cuda_part_t));
    runtime_take(&carve, usage_bytes);
    return carve.used;
}

/* Gives each model its part of the counters; returns their bytes. */
static uint64_t start_plan_usage(ffn_cuda_runtime_t *runtime)
{
    uint64_t bytes = 0;
    for (uint32_t m = 0; m < FFN_CUDA_MAX_MODELS; m++) {
        cuda_model_t *model = &runtime->model[m];
        model->usage_first = bytes;
        for (uint32_t l = 0; l < model->layers; l++)
            bytes += ffn_cuda_usage_bytes(runtime->template[model->template[l]].signature.experts);
        model->usage_bytes = bytes - model->usage_first;
    }
    return bytes;
}

static xp_status_t start_usage(ffn_cuda_runtime_t *runtime)
{
    uint64_t most = 0;
    for (uint32_t m = 0; m < FFN_CUDA_MAX_MODELS; m++)
        most = runtime->model[m].usage_bytes > most ? runtime->model[m].usage_bytes : most;
    return most ? cuda_host_alloc(runtime->device, most, &runtime->usage) : XP_OK;
}

static void tables_most(uint64_t bytes, uint32_t *most)
{
    const uint64_t kib = (bytes + 1023) / 1024;
    *most = *most < kib ? (uint32_t)kib : *most;
}

/* What such a layer's Invocations read, where it is more than that of the layers before. */
static void tables_kib(const ffn_cuda_signature_t *s, ffn_cuda_dispatch_model_t *model)
{
    const uint64_t part = 6ull * s->hidden * s->intermediate; /* three matrices, 16 bit */
    if (s->experts == 0) {
        tables_most(part, &model->dense_kib);
        return;
    }
    tables_most(6ull * s->hidden * s->shared_intermediate, &model->shared_kib);
    tables_most(part * s->top_k, &model->row_kib);
    tables_most(part * s->experts, &model->experts_kib);
}

/* All models' layers and parts behind one another, with device addresses. */
static void start_fill_tables(ffn_cuda_runtime_t *runtime, cuda_address_t signatures,
                              cuda_address_t parts, ffn_cuda_layer_t *layers)
{
    uint32_t next_layer = 0, next_part = 0;
    for (uint32_t m = 0; m < FFN_CUDA_MAX_MODELS; m++) {
        cuda_model_t *model = &runtime->model[m];
        if (!model->installed)
            continue;
        model->first_layer = next_layer;
        runtime->dispatch.models[m] = (ffn_cuda_dispatch_model_t){
            .first_layer = next_layer,
            .layers = model->layers,
            .hidden = model->hidden,
            .dtype = model->dtype,
            .decode_rows = FFN_CUDA_DECODE_ROWS,
            .few_rows = FEW_ROWS_MOST,
        };
        bool experts = false;
        uint32_t dense = 0;
        uint64_t usage = model->usage_first;
        for (uint32_t l = 0; l < model->layers; l++) {
            const uint32_t part = next_part + model->first_part[l];
            ffn_cuda_layer_t *layer = &layers[next_layer + l];
            *layer = model->layer[l];
            layer->signature =
                (const ffn_cuda_signature_t *)cuda_pointer(signatures) + model->template[l];
            layer->parts = (const ffn_cuda_part_t *)cuda_pointer(parts) + part;
            /* After a token's last layer comes its first one. */
            layer->next = next_layer + (l + 1) % model->layers;
            const uint64_t counters =
                ffn_cuda_usage_bytes(runtime->template[model->template[l]].signature.experts);
            layer->usage = counters ? cuda_pointer(runtime->usage_at + usage) : NULL;
            usage += counters;
            runtime->layer_template[next_layer + l] = model->template[l];
            runtime->layer_part[next_layer + l] = part;
            const cuda_template_t *template = &runtime->template[model->template[l]];
            const uint32_t rows = ffn_cuda_streamed_rows(&template->signature);
            const uint32_t few = cuda_template_few_rows(template);
            if (rows < runtime->dispatch.models[m].decode_rows)
                runtime->dispatch.models[m].decode_rows = rows;
            if (few < runtime->dispatch.models[m].few_rows)
                runtime->dispatch.models[m].few_rows = few;
            experts = experts || template->signature.experts;
            dense += !experts;
            tables_kib(&template->signature, &runtime->dispatch.models[m]);
        }
        runtime->dispatch.models[m].dense_layers = dense;
        /* Of dense layers the grouped products of more rows are as fast, and need no lease. */
        if (!experts || !runtime->config.resident)
            runtime->dispatch.models[m].few_rows = 0;
        memcpy(runtime->part + next_part, model->part, model->parts * sizeof(*model->part));
        next_layer += model->layers;
        next_part += model->parts;
    }
}

static xp_status_t start_tables(ffn_cuda_runtime_t *runtime)
{
    uint32_t parts = 0;
    xp_status_t status = XP_OK;
    ffn_cuda_signature_t signatures[CUDA_MAX_SIGNATURES] = {0};
    for (uint32_t m = 0; m < FFN_CUDA_MAX_MODELS; m++) {
        runtime->layers += runtime->model[m].layers;
        parts += runtime->model[m].parts;
    }
    if (runtime->layers == 0)
        return xp_fail(XP_INVALID, "no model is installed on cuda:%d", runtime->device->ordinal);
    ffn_cuda_layer_t *layers = calloc(runtime->layers, sizeof(*layers));
    runtime->layer_template = calloc(runtime->layers, sizeof(*runtime->layer_template));
    runtime->layer_part = calloc(runtime->layers, sizeof(*runtime->layer_part));
    runtime->part = calloc(parts, sizeof(*runtime->part));
    if (!layers || !runtime->layer_template || !runtime->layer_part || !runtime->part) {
        status = xp_fail(XP_NO_MEMORY, "no memory for tables of %u layers", runtime->layers);
        goto done;
    }
    const uint64_t usage_bytes = start_plan_usage(runtime);
    const uint64_t bytes = tables_bytes(runtime->layers, parts, usage_bytes);
    XP_TRY_GOTO(status, done,
                runtime_admit(runtime, cuda_vmm_round_up(runtime->device, bytes), "the tables"));
    XP_TRY_GOTO(status, done, cuda_block_create(runtime->device, bytes, &runtime->tables));
    XP_TRY_GOTO(status, done, runtime_zero(runtime, &runtime->tables));
    XP_TRY_GOTO(status, done, start_usage(runtime));
    runtime_carve_t carve = {.base = runtime->tables.address};
    const cuda_address_t signatures_at = runtime_take(&carve, sizeof(signatures));
    const cuda_address_t layers_at = runtime_take(&carve, runtime->layers * sizeof(*layers));
    const cuda_address_t parts_at = runtime_take(&carve, parts * sizeof(*runtime->part));
    runtime->usage_at = runtime_take(&carve, usage_bytes);
    for (uint32_t t = 0; t < runtime->templates; t++)
        signatures[t] = runtime->template[t].signature;
    start_fill_tables(runtime, signatures_at, parts_at, layers);
    XP_TRY_GOTO(status, done,
                runtime_write(runtime, signatures_at, signatures, sizeof(signatures)));
    XP_TRY_GOTO(status, done,
                runtime_write(runtime, layers_at, layers, runtime->layers * sizeof(*layers)));
    XP_TRY_GOTO(status, done,
                runtime_write(runtime, parts_at, runtime->part, parts * sizeof(*runtime->part)));
    runtime->dispatch.layers = cuda_pointer(layers_at);
    runtime->dispatch.layer_count = runtime->layers;
done:
    free(layers);
    return status;
}

/* What the Lanes' memory must hold: a workspace each, and one that they share. */
typedef struct lanes_shape {
    ffn_cuda_limits_t own, shared; /* shared.bulk_rows 0: there is none */
    uint64_t library_bytes, library_few_bytes;
} lanes_shape_t;

/* One Lane after the other, then the workspace that they share, then the library's scratch, of bulk
 * and of few rows. */
static uint64_t lanes_carve(const lanes_shape_t *shape, uint32_t lanes, uint32_t buffer_rows,
                            cuda_address_t base, cuda_lane_t *lane, cuda_address_t *shared_out,
                            cuda_address_t library_out[2])
{
    runtime_carve_t carve = {.base = base};
    const uint64_t rows_bytes = (uint64_t)buffer_rows * shape->own.hidden * 2;
    for (uint32_t i = 0; i < lanes; i++) {
        lane[i].lane = runtime_take(&carve, sizeof(ffn_cuda_lane_t));
        lane[i].piece = runtime_take(&carve, sizeof(ffn_cuda_lane_t));
        lane[i].answer = runtime_take(&carve, sizeof(ffn_cuda_answer_t));
        lane[i].run = runtime_take(&carve, sizeof(ffn_cuda_run_t));
        lane[i].done = runtime_take(&carve, sizeof(uint64_t));
        lane[i].input = rows_bytes ? runtime_take(&carve, rows_bytes) : 0;
        lane[i].output = rows_bytes ? runtime_take(&carve, rows_bytes) : 0;
        lane[i].workspace = runtime_take(&carve, ffn_cuda_workspace_bytes(&shape->own));
    }
    *shared_out = shape->shared.bulk_rows
                      ? runtime_take(&carve, ffn_cuda_workspace_bytes(&shape->shared))
                      : 0;
    library_out[0] = shape->library_bytes ? runtime_take(&carve, shape->library_bytes) : 0;
    library_out[1] = shape->library_few_bytes ? runtime_take(&carve, shape->library_few_bytes) : 0;
    return carve.used;
}

/* What the workspaces must hold for these signatures too. */
static void lanes_add(lanes_shape_t *shape, const ffn_cuda_signature_t *signature,
                      uint32_t piece_rows)
{
    const uint32_t own = piece_rows < CUDA_OWN_ROWS ? piece_rows : CUDA_OWN_ROWS;
    ffn_cuda_limits_add(&shape->own, signature);
    ffn_cuda_limits_add(&shape->shared, signature);
    shape->shared.decode_rows = shape->shared.decode_elements = 0;
    if (shape->own.bulk_rows < own)
        shape->own.bulk_rows = own;
    if (piece_rows > CUDA_OWN_ROWS && shape->shared.bulk_rows < piece_rows)
        shape->shared.bulk_rows = piece_rows;
}

static void most_bytes(uint64_t bytes, uint64_t *most)
{
    *most = *most < bytes ? bytes : *most;
}

static xp_status_t start_library(ffn_cuda_runtime_t *runtime, lanes_shape_t *shape)
{
    for (uint32_t t = 0; runtime->library && t < runtime->templates; t++) {
        cuda_template_t *template = &runtime->template[t];
        if (template->signature.experts || template->piece_rows <= FFN_CUDA_DENSE_ROWS)
            continue;
        XP_TRY(ffn_library_plan_make(runtime->library, &template->signature, template->piece_rows,
                                     0, &template->plan));
        most_bytes(ffn_library_scratch_bytes(template->plan), &shape->library_bytes);
        for (uint32_t i = 0; i < CUDA_FEW_PLANS; i++) {
            const uint32_t rows = FFN_CUDA_DENSE_ROWS + 1 + i;
            if (rows > runtime->config.max_rows || rows >= template->piece_rows)
                break;
            const xp_status_t status = ffn_library_plan_make(runtime->library, &template->signature,
                                                             rows, 0, &template->few_plan[i]);
            if (status == XP_UNSUPPORTED)
                continue; /* the grouped products do it */
            XP_TRY(status);
            most_bytes(ffn_library_scratch_bytes(template->few_plan[i]), &shape->library_few_bytes);
        }
    }
    return XP_OK;
}

static xp_status_t start_lane(ffn_cuda_runtime_t *runtime, uint32_t index)
{
    const cuda_lane_t *own = &runtime->lane[index];
    ffn_cuda_lane_t lane = {.layers = runtime->dispatch.layers};
    ffn_cuda_workspace_carve(&runtime->limits, own->workspace, &lane.workspace);
    XP_TRY(runtime_write(runtime, own->lane, &lane, sizeof(lane)));
    /* Pieces and their Lane take turns, pieces of all Lanes in the shared workspace as well. */
    if (runtime->shared_at)
        ffn_cuda_workspace_carve(&runtime->shared_limits, runtime->shared_at, &lane.workspace);
    XP_TRY(runtime_write(runtime, own->piece, &lane, sizeof(lane)));
    runtime->dispatch.lanes[index] = (ffn_cuda_dispatch_lane_t){
        .lane = cuda_pointer(own->lane),
        .answer = cuda_pointer(own->answer),
        .done = cuda_pointer(own->done),
        .input = cuda_pointer(own->input),
        .output = cuda_pointer(own->output),
    };
    return XP_OK;
}

static xp_status_t start_lanes(ffn_cuda_runtime_t *runtime)
{
    const ffn_cuda_config_t *config = &runtime->config;
    lanes_shape_t shape = {0};
    for (uint32_t t = 0; t < runtime->templates; t++)
        lanes_add(&shape, &runtime->template[t].signature, runtime->template[t].piece_rows);
    runtime->limits = shape.own;
    runtime->shared_limits = shape.shared;
    cuda_address_t library_at[2];
    XP_TRY(start_library(runtime, &shape));
    const uint64_t bytes = lanes_carve(&shape, config->lanes, config->buffer_rows, 0, runtime->lane,
                                       &runtime->shared_at, library_at);
    XP_TRY(runtime_admit(runtime, cuda_vmm_round_up(runtime->device, bytes), "the Executor Lanes"));
    XP_TRY(cuda_block_create(runtime->device, bytes, &runtime->lanes));
    XP_TRY(runtime_zero(runtime, &runtime->lanes));
    lanes_carve(&shape, config->lanes, config->buffer_rows, runtime->lanes.address, runtime->lane,
                &runtime->shared_at, library_at);
    runtime->library_at = library_at[0];
    runtime->library_few_at = library_at[1];
    for (uint32_t i = 0; i < config->lanes; i++)
        XP_TRY(start_lane(runtime, i));
    return XP_OK;
}

/* Each plan once: the library loads its kernels at their first use, and a kernel that is loaded
 * behind a spinning one is a deadlock. What is computed is of no interest. */
static xp_status_t start_warm(ffn_cuda_runtime_t *runtime)
{
    ffn_cuda_workspace_t workspace;
    if (runtime->shared_at)
        ffn_cuda_workspace_carve(&runtime->shared_limits, runtime->shared_at, &workspace);
    else
        ffn_cuda_workspace_carve(&runtime->limits, runtime->lane[0].workspace, &workspace);
    for (uint32_t l = 0; l < runtime->layers; l++) {
        cuda_template_t *template = &runtime->template[runtime->layer_template[l]];
        if (!template->plan || template->warm)
            continue;
        /* Sums of piece_rows rows in FP32: room for as many 16-bit inputs and outputs. */
        const cuda_address_t at = (cuda_address_t)(uintptr_t)workspace.products;
        const cuda_address_t input =
            at + (uint64_t) template->piece_rows * template->signature.hidden * 2;
        const ffn_cuda_part_t *part = &runtime->part[runtime->layer_part[l]];
        XP_TRY(ffn_library_run(template->plan, part, input, at, 0, runtime->library_at,
                               runtime->control));
        XP_TRY(ffn_library_run(template->plan, part, input, 0, at, runtime->library_at,
                               runtime->control));
        for (uint32_t i = 0; i < CUDA_FEW_PLANS; i++) {
            if (!template->few_plan[i])
                continue;
            XP_TRY(ffn_library_run(template->few_plan[i], part, input, at, 0,
                                   runtime->library_few_at, runtime->control));
            XP_TRY(ffn_library_run(template->few_plan[i], part, input, 0, at,
                                   runtime->library_few_at, runtime->control));
        }
        template->warm = true;
    }
    return runtime_wait(runtime);
}

/* The device's clock beside ours. */
static xp_status_t start_clock(ffn_cuda_runtime_t *runtime)
{
    for (uint32_t i = 0; i < RUNTIME_CLOCK_TIES; i++) {
        cuda_address_t at = runtime->word_at;
        void *parameters[] = {&at};
        const uint64_t before = xp_monotonic_ns();
        XP_TRY(cuda_launch(runtime->device, runtime->function[DISPATCH_CLOCK], 1, 1,
                           runtime->control, parameters));
        XP_TRY(CUDA_CALL(runtime->device->driver, cuMemcpyDtoHAsync, &runtime->staging->clock, at,
                         sizeof(uint64_t), runtime->control));
        XP_TRY(runtime_wait(runtime));
        ffn_cuda_records_tie(&runtime->records, before, xp_monotonic_ns(), runtime->staging->clock);
    }
    return XP_OK;
}

static xp_status_t start_dispatch(ffn_cuda_runtime_t *runtime)
{
    const ffn_cuda_counters_t counters = {.records = cuda_pointer(runtime->records.at),
                                          .record_capacity = runtime->config.records};
    ffn_cuda_dispatch_t *dispatch = &runtime->dispatch;
    dispatch->abi = FFN_CUDA_DISPATCH_ABI;
    dispatch->lane_count = runtime->config.lanes;
    dispatch->cuts = runtime->aside_at != 0;
    dispatch->max_rows = runtime->config.max_rows;
    dispatch->buffer_rows = runtime->config.buffer_rows;
    dispatch->max_hidden = runtime->limits.hidden;
    dispatch->queue = cuda_pointer(runtime->queue_at);
    dispatch->lease = cuda_pointer(runtime->lease_at);
    dispatch->failure = cuda_pointer(runtime->failure_at);
    dispatch->ring = cuda_pointer(runtime->ring_at);
    XP_TRY(runtime_write(runtime, runtime->counters_at, &counters, sizeof(counters)));
    return runtime_write(runtime, runtime->dispatch_at, dispatch, sizeof(*dispatch));
}

/* The executables' uploads are queued on the streams that they were captured on. */
static xp_status_t start_uploaded(ffn_cuda_runtime_t *runtime)
{
    const xp_clock_t clock = xp_clock_system();
    const uint64_t deadline = xp_monotonic_ns() + CUDA_LIMIT_NS;
    XP_TRY(cuda_stream_wait(runtime->device, runtime->decode, &clock, deadline));
    XP_TRY(cuda_stream_wait(runtime->device, runtime->bulk, &clock, deadline));
    return runtime_wait(runtime);
}

xp_status_t ffn_cuda_runtime_start(ffn_cuda_runtime_t *runtime)
{
    if (runtime->started)
        return xp_fail(XP_INVALID, "the runtime of cuda:%d has started", runtime->device->ordinal);
    /* Also when it fails: what is half made is given back by destroy. */
    runtime->started = true;
    XP_TRY(start_tables(runtime));
    XP_TRY(start_lanes(runtime));
    XP_TRY(start_warm(runtime));
    XP_TRY(start_clock(runtime));
    for (uint32_t t = 0; t < runtime->templates; t++)
        XP_TRY(cuda_template_capture(runtime, t));
    XP_TRY(start_dispatch(runtime));
    XP_TRY(start_uploaded(runtime));
    return cuda_serve_start(runtime);
}

xp_status_t ffn_cuda_runtime_stop(ffn_cuda_runtime_t *runtime, uint64_t deadline_ns)
{
    return cuda_serve_stop(runtime, deadline_ns);
}

cuda_address_t ffn_cuda_runtime_dispatch(const ffn_cuda_runtime_t *runtime)
{
    return runtime->dispatch_at;
}

const ffn_cuda_dispatch_t *ffn_cuda_runtime_tables(const ffn_cuda_runtime_t *runtime)
{
    return &runtime->dispatch;
}

/* ---- failure and figures ---------------------------------------------------------------------
 */
void ffn_cuda_runtime_fail(ffn_cuda_runtime_t *runtime, xp_status_t status, const char *text)
{
    pthread_mutex_lock(&runtime->failure_lock);
    const bool first = !atomic_load(&runtime->failed);
    if (first) {
        /* A copy: `text` may be this thread's own record. */
        runtime->failure.status = status == XP_OK ? XP_FATAL : status;
        snprintf(runtime->failure.text, sizeof(runtime->failure.text), "%s", text);
        atomic_store(&runtime->failed, runtime->failure.status);
    }
    pthread_mutex_unlock(&runtime->failure_lock);
    if (first && runtime->config.failed)
        runtime->config.failed(runtime->config.failed_context, runtime->failure.status,
                               runtime->failure.text);
}

xp_status_t ffn_cuda_runtime_health(const ffn_cuda_runtime_t *runtime)
{
    /* The text is constant once `failed` is set. */
    if (atomic_load(&((ffn_cuda_runtime_t *)runtime)->failed) == XP_OK)
        return XP_OK;
    return xp_fail(runtime->failure.status, "%s", runtime->failure.text);
}

xp_status_t ffn_cuda_runtime_stats(ffn_cuda_runtime_t *runtime, ffn_cuda_stats_t *stats_out)
{
    ffn_cuda_stats_t stats = {
        .workspace_bytes = runtime->lanes.bytes,
        .table_bytes = runtime->tables.bytes + runtime->words.bytes,
        .signatures = runtime->templates,
        .templates = runtime->captured,
        .host_launches = atomic_load(&runtime->host_launches),
        .leases = atomic_load(&runtime->leases),
        .lease_in_force = atomic_load(&runtime->lease_in_force),
    };
    const xp_clock_t clock = xp_clock_system();
    for (uint32_t m = 0; m < FFN_CUDA_MAX_MODELS; m++)
        stats.weight_bytes += runtime->model[m].bytes;
    XP_TRY(cuda_device_use(runtime->device));
    pthread_mutex_lock(&runtime->stats_lock);
    ffn_cuda_counters_t *staged = &runtime->staging->counters;
    xp_status_t status = CUDA_CALL(runtime->device->driver, cuMemcpyDtoHAsync, staged,
                                   runtime->counters_at, sizeof(*staged), runtime->watch);
    if (status == XP_OK)
        status = cuda_stream_wait(runtime->device, runtime->watch, &clock,
                                  xp_monotonic_ns() + STATS_LIMIT_NS);
    if (status == XP_OK) {
        stats.invocations = staged->invocations + staged->resident_invocations;
        stats.rows = staged->rows + staged->resident_rows;
        stats.busy_ns = staged->busy_ns + staged->resident_busy_ns;
        stats.resident_invocations = staged->resident_invocations;
        *stats_out = stats;
    }
    pthread_mutex_unlock(&runtime->stats_lock);
    return status;
}

xp_status_t ffn_cuda_runtime_usage(ffn_cuda_runtime_t *runtime, uint32_t model,
                                   ffn_usage_t *usage_out)
{
    const xp_clock_t clock = xp_clock_system();
    ffn_usage_t usage = {0};
    if (model >= FFN_CUDA_MAX_MODELS || !runtime->model[model].installed || !runtime->started)
        return xp_fail(XP_INVALID, "no model %u has started on cuda:%d", model,
                       runtime->device->ordinal);
    const cuda_model_t *own = &runtime->model[model];
    if (own->usage_bytes == 0) {
        *usage_out = usage;
        return XP_OK;
    }
    XP_TRY(cuda_device_use(runtime->device));
    pthread_mutex_lock(&runtime->stats_lock);
    xp_status_t status =
        CUDA_CALL(runtime->device->driver, cuMemcpyDtoHAsync, runtime->usage,
                  runtime->usage_at + own->usage_first, own->usage_bytes, runtime->watch);
    if (status == XP_OK)
        status = cuda_stream_wait(runtime->device, runtime->watch, &clock,
                                  xp_monotonic_ns() + STATS_LIMIT_NS);
    uint64_t at = 0;
    for (uint32_t l = 0; status == XP_OK && l < own->layers; l++) {
        const uint32_t experts = runtime->template[own->template[l]].signature.experts;
        ffn_cuda_usage_t *one = (ffn_cuda_usage_t *)((uint8_t *)runtime->usage + at);
        if (experts)
            ffn_usage_add(one->executions, one->rows, one->experts, ffn_cuda_usage_chosen(one),
                          experts, &usage);
        at += ffn_cuda_usage_bytes(experts);
    }
    pthread_mutex_unlock(&runtime->stats_lock);
    if (status == XP_OK)
        *usage_out = usage;
    return status;
}

uint32_t ffn_cuda_runtime_records(ffn_cuda_runtime_t *runtime, ffn_cuda_record_t *records_out,
                                  uint32_t limit, uint64_t *skipped_out)
{
    return ffn_cuda_records_take(&runtime->records, records_out, limit, skipped_out);
}

uint64_t ffn_cuda_runtime_model_bytes(const ffn_cuda_runtime_t *runtime, uint32_t model)
{
    return model < FFN_CUDA_MAX_MODELS ? runtime->model[model].bytes : 0;
}

/* ---- ledger ----------------------------------------------------------------------------------
 */
xp_status_t ffn_cuda_runtime_bytes(const model_spec_t *const *specs, const uint32_t *tp_sizes,
                                   uint32_t models, uint32_t lanes, uint32_t max_rows,
                                   uint32_t buffer_rows, bool library,
                                   ffn_cuda_ledger_t *ledger_out)
{
    ffn_cuda_ledger_t ledger = {0};
    lanes_shape_t memory = {0};
    uint32_t layers = 0, parts = 0, templates = 0;
    uint64_t usage_bytes = 0;
    ffn_cuda_signature_t seen[CUDA_MAX_SIGNATURES];
    const ffn_cuda_config_t config = {.lanes = lanes, .max_rows = max_rows};
    cuda_lane_t *lane = calloc(lanes ? lanes : 1, sizeof(*lane));
    ffn_cuda_runtime_t *shape = calloc(1, sizeof(*shape));
    cuda_address_t shared, library_at[2];
    xp_status_t status = XP_OK;
    if (!lane || !shape) {
        status = xp_fail(XP_NO_MEMORY, "no memory for a ledger of %u Lanes", lanes);
        goto done;
    }
    shape->config.cuts = shape->config.resident = true;
    shape->kernels.blocks = FFN_CUDA_MAX_BLOCKS;
    for (uint32_t m = 0; m < models; m++) {
        cuda_layout_t none = {0};
        layers += specs[m]->layers;
        for (uint32_t l = 0; l < specs[m]->layers; l++) {
            ffn_cuda_signature_t signature;
            cuda_layout_signature(&none, specs[m], l, tp_sizes[m], &signature);
            parts += cuda_layout_parts(&specs[m]->ffn[l]);
            usage_bytes += ffn_cuda_usage_bytes(signature.experts);
            const uint32_t piece = cuda_layout_piece_rows(&signature, max_rows);
            lanes_add(&memory, &signature, piece);
            uint32_t t = 0;
            while (t < templates && memcmp(&seen[t], &signature, sizeof(signature)))
                t++;
            if (t == templates && templates < CUDA_MAX_SIGNATURES) {
                seen[templates++] = signature;
                ledger.graph_bytes += cuda_template_bytes(&config, &signature);
            }
            if (library && !signature.experts) {
                const uint32_t few = CUDA_LIBRARY_ROWS < piece ? CUDA_LIBRARY_ROWS : piece;
                most_bytes(ffn_library_scratch_bound(&signature, piece), &memory.library_bytes);
                most_bytes(ffn_library_scratch_bound(&signature, few), &memory.library_few_bytes);
            }
        }
    }
    ledger.table_bytes = runtime_granules(runtime_carve_words(shape, 0)) +
                         runtime_granules(tables_bytes(layers, parts, usage_bytes));
    const uint64_t all = lanes_carve(&memory, lanes, buffer_rows, 0, lane, &shared, library_at);
    ledger.lane_bytes = (uint64_t)lanes * 2 * buffer_rows * memory.own.hidden * 2;
    ledger.workspace_bytes = runtime_granules(all) - ledger.lane_bytes;
    *ledger_out = ledger;
done:
    free(shape);
    free(lane);
    return status;
}
