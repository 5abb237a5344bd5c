/* SPDX-License-Identifier: MIT */
/*
 * The FFN runtime of one device: installed models, workspaces, and the door to execution.
 *
 * Owned by the FfnAgent. Install and uninstall are called by one thread at a time; execute may be
 * called by one thread a lane, and takes the team lock for the length of one layer. Execute takes
 * no memory.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/memfd.h"
#include "ffn/keep.h"
#include "ffn/layout.h"
#include "ffn/load.h"
#include "ffn/load_share.h"
#include "ffn/private.h"

#define USAGE_TRIES 20 /* a millisecond each: the event loop of the FfnAgent asks */

typedef struct workspace_shape {
    uint32_t threads, lanes, rows; /* rows: computed at once */
    uint32_t width, experts;
} workspace_shape_t;

static size_t workspace_align(size_t bytes)
{
    return (bytes + 63) & ~(size_t)63;
}

static size_t workspace_activation_floats(const workspace_shape_t *shape)
{
    /* One row more than computed at once: then the routed and the shared experts of a single row
     * always fit together (each alone fits the width). */
    return ((size_t)shape->rows + 1) * shape->width;
}

static size_t workspace_lane_bytes(const workspace_shape_t *shape)
{
    size_t bytes = workspace_align(workspace_activation_floats(shape) * sizeof(float));
    if (shape->experts)
        bytes += workspace_align((size_t)shape->rows * shape->experts * sizeof(float)) +
                 4 * workspace_align((size_t)shape->rows * MODEL_MAX_TOP_K * sizeof(float));
    return bytes;
}

static size_t workspace_tile_floats(const workspace_shape_t *shape)
{
    return (size_t)shape->rows * FFN_TILE_COLUMNS;
}

static size_t workspace_shape_bytes(const workspace_shape_t *shape)
{
    size_t thread = kernels_scratch_bytes(0, 0) + workspace_tile_floats(shape) * sizeof(float);
    return shape->threads * thread + shape->lanes * workspace_lane_bytes(shape);
}

static workspace_shape_t workspace_shape(uint32_t threads, uint32_t lanes, uint32_t max_rows,
                                         uint32_t width, uint32_t experts)
{
    return (workspace_shape_t){.threads = threads,
                               .lanes = lanes,
                               .rows = max_rows < FFN_ROW_CHUNK ? max_rows : FFN_ROW_CHUNK,
                               .width = width,
                               .experts = experts};
}

uint64_t ffn_workspace_bytes(uint32_t threads, uint32_t lanes, uint32_t max_rows,
                             uint32_t max_hidden, uint32_t max_intermediate, uint32_t max_experts)
{
    (void)max_hidden; /* hidden states belong to the Fabric; tiles have a fixed width */
    workspace_shape_t shape =
        workspace_shape(threads, lanes, max_rows, max_intermediate, max_experts);
    return workspace_shape_bytes(&shape) + lanes * sizeof(ffn_lane_t);
}

uint32_t ffn_workspace_width(const model_spec_t *spec, uint32_t tp_size)
{
    uint32_t widest = 0;
    for (uint32_t l = 0; l < spec->layers; l++) {
        const model_ffn_t *ffn = &spec->ffn[l];
        uint32_t width = ffn->intermediate / tp_size;
        if (ffn->kind == MODEL_FFN_MOE) {
            width *= ffn->top_k;
            if (ffn->shared_intermediate / tp_size > width)
                width = ffn->shared_intermediate / tp_size;
        }
        widest = width > widest ? width : widest;
    }
    return widest;
}

static uint32_t runtime_max_experts(const model_spec_t *spec)
{
    uint32_t most = 0;
    for (uint32_t l = 0; l < spec->layers; l++)
        if (spec->ffn[l].kind == MODEL_FFN_MOE && spec->ffn[l].experts > most)
            most = spec->ffn[l].experts;
    return most;
}

xp_status_t ffn_runtime_create(const ffn_runtime_config_t *config, ffn_runtime_t **runtime_out)
{
    if (config->lanes < 1 || config->max_rows < 1)
        return xp_fail(XP_INVALID, "an FFN runtime needs lanes and rows (found %u and %u)",
                       config->lanes, config->max_rows);
    xp_status_t status;
    ffn_runtime_t *runtime = calloc(1, sizeof(*runtime));
    if (!runtime)
        return xp_fail(XP_NO_MEMORY, "no memory for the FFN runtime");
    runtime->config = *config;
    for (uint32_t m = 0; m < FFN_MAX_MODELS; m++)
        runtime->model[m].kept.fd = -1;
    runtime->config.cpus = NULL; /* the caller's; the pool has used it by then */
    pthread_mutex_init(&runtime->team, NULL);
    runtime->lane = calloc(config->lanes, sizeof(ffn_lane_t));
    if (!runtime->lane) {
        status = xp_fail(XP_NO_MEMORY, "no memory for %u Executor Lanes", config->lanes);
        goto fail;
    }
    XP_TRY_GOTO(status, fail,
                xp_pool_create(config->threads, config->cpus, config->cpu_count, &runtime->pool));
    *runtime_out = runtime;
    return XP_OK;
fail:
    ffn_runtime_destroy(runtime);
    return status;
}

static void runtime_release_model(ffn_runtime_t *runtime, ffn_model_t *model)
{
    for (uint32_t l = 0; model->layer && l < model->layers; l++)
        if (model->layer[l].template)
            ffn_template_release(runtime, model->layer[l].template);
    xp_memfd_unmap(model->weights);
    if (model->kept.fd >= 0)
        close(model->kept.fd);
    free(model->layer);
    free(model->triples);
    free(model->usage);
    memset(model, 0, sizeof(*model));
    model->kept.fd = -1;
}

void ffn_runtime_destroy(ffn_runtime_t *runtime)
{
    if (!runtime)
        return;
    xp_pool_destroy(runtime->pool);
    for (uint32_t m = 0; m < FFN_MAX_MODELS; m++)
        runtime_release_model(runtime, &runtime->model[m]);
    free(runtime->workspace);
    free(runtime->lane);
    pthread_mutex_destroy(&runtime->team);
    free(runtime);
}

/* Points lanes and threads into a workspace of this shape. */
static void workspace_assign(ffn_runtime_t *runtime, const workspace_shape_t *shape)
{
    uint8_t *at = runtime->workspace;
    runtime->kernels_scratch = at;
    at += shape->threads * kernels_scratch_bytes(0, 0);
    runtime->tiles = (float *)at;
    runtime->tile_floats = workspace_tile_floats(shape);
    at += shape->threads * runtime->tile_floats * sizeof(float);
    runtime->activation_floats = workspace_activation_floats(shape);
    size_t pairs = workspace_align((size_t)shape->rows * MODEL_MAX_TOP_K * sizeof(float));
    for (uint32_t l = 0; l < shape->lanes; l++) {
        ffn_lane_t *lane = &runtime->lane[l];
        lane->activations = (float *)at;
        at += workspace_align(runtime->activation_floats * sizeof(float));
        if (!shape->experts)
            continue;
        lane->logits = (float *)at;
        at += workspace_align((size_t)shape->rows * shape->experts * sizeof(float));
        lane->row_ids = (uint32_t *)at;
        lane->row_weights = (float *)(at + pairs);
        lane->chosen = (uint32_t *)(at + 2 * pairs);
        lane->chosen_weights = (float *)(at + 3 * pairs);
        at += 4 * pairs;
    }
}

typedef struct install_need {
    workspace_shape_t shape;
    uint64_t workspace_bytes, model_bytes;
} install_need_t;

/* What the device holds with this model, and whether that is within the budget. */
static xp_status_t install_admit(const ffn_runtime_t *runtime, const ffn_install_t *install,
                                 const model_spec_t *spec, const layout_t *layout,
                                 install_need_t *need_out)
{
    uint32_t width = ffn_workspace_width(spec, install->tp_size);
    uint32_t experts = runtime_max_experts(spec);
    install_need_t need = {
        .shape = workspace_shape(runtime->config.threads, runtime->config.lanes,
                                 runtime->config.max_rows,
                                 width > runtime->max_width ? width : runtime->max_width,
                                 experts > runtime->max_experts ? experts : runtime->max_experts),
        .model_bytes = layout->weight_bytes + layout->table_bytes,
    };
    need.workspace_bytes =
        ffn_workspace_bytes(need.shape.threads, need.shape.lanes, runtime->config.max_rows, 0,
                            need.shape.width, need.shape.experts);
    uint64_t growth = need.workspace_bytes > runtime->stats.workspace_bytes
                          ? need.workspace_bytes - runtime->stats.workspace_bytes
                          : 0;
    uint64_t used = runtime->stats.weight_bytes + runtime->stats.workspace_bytes;
    uint64_t budget = runtime->config.memory_bytes;
    uint64_t left = budget > used ? budget - used : 0;
    if (budget && need.model_bytes + growth > left)
        return xp_fail(
            XP_NO_MEMORY,
            "model %s needs %llu bytes of FFN weights and %llu of workspace, but %llu of "
            "the device's %llu bytes are left",
            install->model_id, (unsigned long long)need.model_bytes, (unsigned long long)growth,
            (unsigned long long)left, (unsigned long long)budget);
    *need_out = need;
    return XP_OK;
}

static kernels_matrix_t install_matrix(const layout_item_t *item, uint8_t *memory, bool packed)
{
    return (kernels_matrix_t){.dtype = item->dtype,
                              .rows = item->rows,
                              .columns = item->columns,
                              .packed = packed,
                              .data = memory + item->offset};
}

/* Fills layers and triples from the loaded items. */
static void install_tables(ffn_model_t *model, const model_spec_t *spec, const layout_t *layout,
                           const bool *packed)
{
    uint32_t next_triple = 0;
    uint64_t next_usage = 0;
    for (uint32_t l = 0; l < spec->layers; l++) {
        const model_ffn_t *ffn = &spec->ffn[l];
        const uint64_t usage_bytes = ffn_chosen_bytes(ffn);
        model->layer[l].rule = *ffn;
        if (usage_bytes)
            model->layer[l].usage = (ffn_chosen_t *)(void *)(model->usage + next_usage);
        next_usage += usage_bytes;
        model->layer[l].triples = model->triples + next_triple;
        next_triple +=
            ffn->kind == MODEL_FFN_MOE ? ffn->experts + (ffn->shared_intermediate > 0) : 1;
    }
    for (size_t i = 0; i < layout->count; i++) {
        const layout_item_t *item = &layout->items[i];
        ffn_layer_t *layer = &model->layer[item->layer];
        kernels_matrix_t matrix = install_matrix(item, model->weights, packed[i]);
        switch (item->role) {
        case LAYOUT_GATE:
            layer->triples[item->part].gate = matrix;
            break;
        case LAYOUT_UP:
            layer->triples[item->part].up = matrix;
            break;
        case LAYOUT_DOWN:
            layer->triples[item->part].down = matrix;
            break;
        case LAYOUT_ROUTER:
            layer->router = matrix;
            break;
        case LAYOUT_BIAS:
            layer->bias = matrix.data;
            break;
        }
    }
}

static void install_signature(const model_spec_t *spec, const ffn_layer_t *layer, uint32_t tp_size,
                              ffn_signature_t *signature)
{
    const model_ffn_t *ffn = &layer->rule;
    memset(signature, 0, sizeof(*signature));
    signature->kind = ffn->kind;
    signature->activation = ffn->activation;
    signature->hidden = spec->hidden;
    signature->intermediate = ffn->intermediate / tp_size;
    signature->gate_dtype = layer->triples[0].gate.dtype;
    signature->up_dtype = layer->triples[0].up.dtype;
    signature->down_dtype = layer->triples[0].down.dtype;
    if (ffn->kind != MODEL_FFN_MOE)
        return;
    signature->router_dtype = layer->router.dtype;
    signature->experts = ffn->experts;
    signature->top_k = ffn->top_k;
    signature->router = ffn->router;
    signature->normalize = ffn->normalize_top_k;
    signature->correction_bias = layer->bias != NULL;
    signature->groups = ffn->groups;
    signature->top_groups = ffn->top_groups;
    signature->routed_scale = ffn->routed_scale;
    if (ffn->shared_intermediate) {
        const ffn_triple_t *shared = &layer->triples[ffn->experts];
        signature->shared_intermediate = ffn->shared_intermediate / tp_size;
        signature->shared_gate_dtype = shared->gate.dtype;
        signature->shared_up_dtype = shared->up.dtype;
        signature->shared_down_dtype = shared->down.dtype;
    }
}

/* The last step: grows the workspace, forms signatures and templates, makes the model visible. */
static xp_status_t install_commit(ffn_runtime_t *runtime, const ffn_install_t *install,
                                  const model_spec_t *spec, const install_need_t *need,
                                  ffn_model_t *model)
{
    xp_status_t status = XP_OK;
    pthread_mutex_lock(&runtime->team);
    size_t bytes = workspace_shape_bytes(&need->shape);
    if (bytes > runtime->workspace_bytes) {
        uint8_t *workspace = aligned_alloc(4096, (bytes + 4095) & ~(size_t)4095);
        if (!workspace) {
            status = xp_fail(XP_NO_MEMORY, "no memory for FFN workspaces of %zu bytes", bytes);
            goto done;
        }
        free(runtime->workspace);
        runtime->workspace = workspace;
        runtime->workspace_bytes = bytes;
    }
    runtime->max_width = need->shape.width;
    runtime->max_experts = need->shape.experts;
    workspace_assign(runtime, &need->shape);
    runtime->stats.workspace_bytes = need->workspace_bytes;
    for (uint32_t t = 0; t < FFN_MAX_TEMPLATES; t++)
        if (runtime->template[t].users)
            ffn_template_plan(runtime, &runtime->template[t]);
    for (uint32_t l = 0; l < spec->layers; l++) {
        ffn_signature_t signature;
        install_signature(spec, &model->layer[l], install->tp_size, &signature);
        XP_TRY_GOTO(status, done,
                    ffn_template_acquire(runtime, &signature, &model->layer[l].template));
    }
    model->installed = true;
    runtime->model[install->model] = *model;
    runtime->stats.weight_bytes += model->bytes;
done:
    pthread_mutex_unlock(&runtime->team);
    return status;
}

static xp_status_t install_load(const ffn_install_t *install, const checkpoint_t *checkpoint,
                                const layout_t *layout, uint64_t identity, ffn_model_t *model,
                                bool *packed)
{
    char name[128];
    int fd = -1;
    uint64_t bytes = layout->weight_bytes;
    snprintf(name, sizeof(name), "xpool-ffn:%s", install->model_id);
    XP_TRY(xp_memfd_create_fillable(name, bytes, &fd));
    xp_status_t status;
    XP_TRY_GOTO(status, fail, xp_memfd_map(fd, bytes, &model->weights));
    madvise(model->weights, bytes, MADV_HUGEPAGE); /* best effort */
    XP_TRY_GOTO(status, fail, load_shard(install, checkpoint, layout, model->weights, packed));
    XP_TRY_GOTO(status, fail,
                keep_freeze(fd, bytes, identity, install->readers, &model->weights, &model->kept));
    return XP_OK;
fail:
    close(fd);
    return status;
}

/* What load_shard() would have found out while packing. */
static xp_status_t install_adopt(const ffn_install_t *install, const layout_t *layout,
                                 uint64_t identity, ffn_model_t *model, bool *packed)
{
    ffn_weights_t kept = *install->kept;
    XP_TRY(keep_adopt(install->kept, layout->weight_bytes, identity, install->readers,
                      &model->weights));
    if (xp_fd_duplicate(install->kept->fd, &kept.fd) != XP_OK) {
        xp_memfd_unmap(model->weights);
        model->weights = NULL;
        return XP_IO;
    }
    model->kept = kept;
    for (size_t i = 0; i < layout->count; i++)
        packed[i] = layout->items[i].role != LAYOUT_BIAS &&
                    kernels_pack_supported(layout->items[i].dtype, layout->items[i].columns);
    return XP_OK;
}

static xp_status_t install_weights(const ffn_install_t *install, const checkpoint_t *checkpoint,
                                   const layout_t *layout, ffn_model_t *model, bool *packed)
{
    uint64_t identity = keep_identity(install, layout), start_ns = xp_monotonic_ns();
    ffn_load_report_t report = {.bytes = layout->weight_bytes};
    if (install->kept) {
        report.adopted = install_adopt(install, layout, identity, model, packed) == XP_OK;
        if (!report.adopted && install->refused)
            install->refused(install->refused_context);
    }
    if (!report.adopted)
        XP_TRY(install_load(install, checkpoint, layout, identity, model, packed));
    report.read = report.adopted || install->dummy ? 0 : layout->weight_bytes;
    report.took_ns = xp_monotonic_ns() - start_ns;
    if (install->report)
        *install->report = report;
    return XP_OK;
}

static xp_status_t install_check(const ffn_runtime_t *runtime, const ffn_install_t *install)
{
    bool held = install->model < FFN_MAX_MODELS && runtime->model[install->model].installed;
    return load_check_install(install, FFN_MAX_MODELS,
                              held ? runtime->model[install->model].id : NULL);
}

xp_status_t ffn_runtime_install(ffn_runtime_t *runtime, const ffn_install_t *install)
{
    xp_status_t status;
    checkpoint_t *checkpoint = NULL;
    layout_t layout = {0};
    ffn_model_t model = {.kept.fd = -1};
    install_need_t need = {0};
    bool *packed = NULL;
    XP_TRY(install_check(runtime, install));
    model_spec_t *spec = malloc(sizeof(*spec));
    if (!spec)
        return xp_fail(XP_NO_MEMORY, "no memory for the spec of model %s", install->model_id);
    XP_TRY_GOTO(status, done, model_spec_load(install->path, spec));
    if (!install->dummy)
        XP_TRY_GOTO(status, done, checkpoint_open(install->path, spec, &checkpoint));
    XP_TRY_GOTO(status, done,
                layout_make(spec, checkpoint, install->dtype, install->tp_size, &layout));
    XP_TRY_GOTO(status, done, install_admit(runtime, install, spec, &layout, &need));

    snprintf(model.id, sizeof(model.id), "%s", install->model_id);
    model.hidden = spec->hidden;
    model.layers = spec->layers;
    model.bytes = need.model_bytes;
    model.layer = calloc(spec->layers, sizeof(ffn_layer_t));
    model.triples = calloc(layout.triples, sizeof(ffn_triple_t));
    model.usage = calloc(1, layout.usage_bytes + 1);
    packed = calloc(layout.count, sizeof(bool));
    if (!model.layer || !model.triples || !model.usage || !packed) {
        status = xp_fail(XP_NO_MEMORY, "no memory for the tables of model %s", install->model_id);
        goto done;
    }
    XP_TRY_GOTO(status, done, install_weights(install, checkpoint, &layout, &model, packed));
    install_tables(&model, spec, &layout, packed);
    XP_TRY_GOTO(status, done, install_commit(runtime, install, spec, &need, &model));
done:
    if (status != XP_OK) {
        pthread_mutex_lock(&runtime->team);
        runtime_release_model(runtime, &model);
        pthread_mutex_unlock(&runtime->team);
    }
    free(packed);
    layout_fini(&layout);
    checkpoint_close(checkpoint);
    free(spec);
    return status;
}

xp_status_t ffn_runtime_export(const ffn_runtime_t *runtime, uint32_t model,
                               ffn_weights_t *weights_out)
{
    if (model >= FFN_MAX_MODELS || !runtime->model[model].installed)
        return xp_fail(XP_NOT_FOUND, "no model %u is installed", model);
    ffn_weights_t weights = runtime->model[model].kept;
    XP_TRY(xp_fd_duplicate(weights.fd, &weights.fd));
    *weights_out = weights;
    return XP_OK;
}

void ffn_runtime_uninstall(ffn_runtime_t *runtime, uint32_t model)
{
    if (model >= FFN_MAX_MODELS || !runtime->model[model].installed)
        return;
    pthread_mutex_lock(&runtime->team);
    runtime->stats.weight_bytes -= runtime->model[model].bytes;
    runtime_release_model(runtime, &runtime->model[model]);
    pthread_mutex_unlock(&runtime->team);
}

/* A test aid; without it there is no system call. */
static bool runtime_writes_zeros(const ffn_runtime_t *runtime)
{
    return runtime->config.zero_output ||
           (runtime->config.zero_path && access(runtime->config.zero_path, F_OK) == 0);
}

xp_status_t ffn_runtime_execute(ffn_runtime_t *runtime, uint32_t lane, uint32_t model,
                                uint32_t layer, uint32_t rows, const float *in, float *out)
{
    if (lane >= runtime->config.lanes || model >= FFN_MAX_MODELS || rows > runtime->config.max_rows)
        return xp_fail(XP_INVALID, "lane %u of %u, model %u of %d, %u rows of %u", lane,
                       runtime->config.lanes, model, FFN_MAX_MODELS, rows,
                       runtime->config.max_rows);
    xp_status_t status = XP_OK;
    pthread_mutex_lock(&runtime->team);
    const ffn_model_t *target = &runtime->model[model];
    if (!target->installed || layer >= target->layers) {
        status = xp_fail(XP_INVALID, "no layer %u of model %u is installed", layer, model);
        goto done;
    }
    uint64_t start = xp_monotonic_ns();
    if (runtime_writes_zeros(runtime))
        memset(out, 0, (size_t)rows * target->hidden * sizeof(float));
    else if (rows > 0)
        ffn_execute_layer(runtime, &runtime->lane[lane], &target->layer[layer], rows, in, out);
    runtime->stats.executions++;
    runtime->stats.rows += rows;
    runtime->stats.busy_ns += xp_monotonic_ns() - start;
done:
    pthread_mutex_unlock(&runtime->team);
    return status;
}

void ffn_runtime_stats(const ffn_runtime_t *runtime, ffn_stats_t *stats_out)
{
    /* The lock is part of the observed object's upkeep, not of its value. */
    ffn_runtime_t *locked = (ffn_runtime_t *)runtime;
    pthread_mutex_lock(&locked->team);
    ffn_stats_t stats = runtime->stats;
    for (uint32_t t = 0; t < FFN_MAX_TEMPLATES; t++)
        stats.templates += runtime->template[t].users > 0;
    stats.signatures = stats.templates; /* one each, by construction */
    pthread_mutex_unlock(&locked->team);
    *stats_out = stats;
}

xp_status_t ffn_runtime_usage(ffn_runtime_t *runtime, uint32_t model, ffn_usage_t *usage_out)
{
    ffn_usage_t usage = {0};
    xp_status_t status = XP_OK;
    for (uint32_t tries = 0; pthread_mutex_trylock(&runtime->team) != 0; tries++) {
        if (tries == USAGE_TRIES)
            return xp_fail(XP_RETRY, "the device computes");
        nanosleep(&(struct timespec){.tv_nsec = XP_NS_PER_MS}, NULL);
    }
    if (model < FFN_MAX_MODELS && runtime->model[model].installed) {
        const ffn_model_t *own = &runtime->model[model];
        for (uint32_t l = 0; l < own->layers; l++) {
            const ffn_chosen_t *one = own->layer[l].usage;
            if (one)
                ffn_usage_add(one->executions, one->rows, one->experts, one->chosen,
                              own->layer[l].rule.experts, &usage);
        }
        *usage_out = usage;
    } else {
        status = xp_fail(XP_INVALID, "no model %u is installed", model);
    }
    pthread_mutex_unlock(&runtime->team);
    return status;
}

uint64_t ffn_runtime_model_bytes(const ffn_runtime_t *runtime, uint32_t model)
{
    return model < FFN_MAX_MODELS ? runtime->model[model].bytes : 0;
}

xp_status_t ffn_runtime_describe(const ffn_runtime_t *runtime, uint32_t model, uint32_t layer,
                                 uint32_t rows, uint32_t *template_out, uint32_t *capacity_out)
{
    if (model >= FFN_MAX_MODELS || !runtime->model[model].installed ||
        layer >= runtime->model[model].layers)
        return xp_fail(XP_INVALID, "no layer %u of model %u is installed", layer, model);
    const ffn_template_t *template = runtime->model[model].layer[layer].template;
    *template_out = (uint32_t)(template - runtime->template);
    *capacity_out = ffn_template_capacity(template, rows)->rows;
    return XP_OK;
}
