/* SPDX-License-Identifier: MIT */
/*
 * Runs one layer for the rows of one Invocation.
 *
 * Two parallel regions a layer: gate and up with the activation, then down. Work items are (part,
 * block of columns), taken from one counter; a part is one expert with all its rows, so an expert's
 * weights are streamed once. In the down region an item is a block of output columns and adds its
 * parts in ascending expert order, the shared experts last: a row's sum depends on nothing but the
 * row. Runs on the caller's thread and the team; allocates nothing, never fails.
 */
#include <string.h>

#include "ffn/private.h"
#include "ffn/route.h"

typedef struct execute_job {
    const ffn_runtime_t *runtime;
    const ffn_lane_t *lane;
    const ffn_signature_t *signature;
    const ffn_capacity_t *capacity;
    uint32_t rows, parts;
    const float *in;
    float *out;
    uint32_t items;
    _Atomic uint32_t next; /* only counts items; results are published by the region's end */
} execute_job_t;

static uint32_t execute_blocks(uint32_t width, uint32_t columns)
{
    return (width + columns - 1) / columns;
}

static void *execute_scratch(const ffn_runtime_t *runtime, uint32_t member)
{
    return runtime->kernels_scratch + member * kernels_scratch_bytes(0, 0);
}

static float *execute_tile(const ffn_runtime_t *runtime, uint32_t member)
{
    return runtime->tiles + member * runtime->tile_floats;
}

static void execute_gate_item(execute_job_t *job, const ffn_active_t *active, uint32_t first,
                              uint32_t last, uint32_t member)
{
    const ffn_signature_t *s = job->signature;
    void *scratch = execute_scratch(job->runtime, member);
    float *tile = execute_tile(job->runtime, member);
    float *activations = job->lane->activations + active->activations + first;
    kernels_matmul_gather_range(&active->triple->gate, job->in, s->hidden, active->row_ids,
                                active->rows, activations, active->width, first, last, scratch);
    kernels_matmul_gather_range(&active->triple->up, job->in, s->hidden, active->row_ids,
                                active->rows, tile, FFN_TILE_COLUMNS, first, last, scratch);
    for (uint32_t r = 0; r < active->rows; r++) {
        float *gate = activations + (size_t)r * active->width;
        const float *up = tile + (size_t)r * FFN_TILE_COLUMNS;
        if (s->activation == MODEL_ACT_GELU_TANH)
            kernels_gelu_tanh_mul(gate, up, gate, last - first);
        else
            kernels_silu_mul(gate, up, gate, last - first);
    }
}

static void execute_gate_member(void *context, uint32_t member, uint32_t members)
{
    (void)members;
    execute_job_t *job = context;
    uint32_t columns = job->capacity->gate_columns;
    uint32_t part = 0, part_start = 0; /* items before `part_start` belong to earlier parts */
    for (;;) {
        uint32_t item = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
        if (item >= job->items)
            return;
        const ffn_active_t *active = &job->lane->active[part];
        while (item - part_start >= execute_blocks(active->width, columns)) {
            part_start += execute_blocks(active->width, columns);
            active = &job->lane->active[++part];
        }
        uint32_t first = (item - part_start) * columns;
        uint32_t last = active->width - first < columns ? active->width : first + columns;
        execute_gate_item(job, active, first, last, member);
    }
}

static void execute_down_item(execute_job_t *job, uint32_t first, uint32_t last, uint32_t member)
{
    uint32_t hidden = job->signature->hidden;
    void *scratch = execute_scratch(job->runtime, member);
    float *tile = execute_tile(job->runtime, member);
    if (job->signature->kind == MODEL_FFN_DENSE) {
        const ffn_active_t *active = &job->lane->active[0];
        kernels_matmul_gather_range(&active->triple->down, job->lane->activations, active->width,
                                    NULL, job->rows, job->out + first, hidden, first, last,
                                    scratch);
        return;
    }
    for (uint32_t r = 0; r < job->rows; r++)
        memset(job->out + (size_t)r * hidden + first, 0, (last - first) * sizeof(float));
    for (uint32_t part = 0; part < job->parts; part++) {
        const ffn_active_t *active = &job->lane->active[part];
        kernels_matmul_gather_range(
            &active->triple->down, job->lane->activations + active->activations, active->width,
            NULL, active->rows, tile, FFN_TILE_COLUMNS, first, last, scratch);
        for (uint32_t r = 0; r < active->rows; r++) {
            uint32_t row = active->row_ids ? active->row_ids[r] : r;
            float weight = active->row_weights ? active->row_weights[r] : 1.0f;
            kernels_axpy(job->out + (size_t)row * hidden + first, weight,
                         tile + (size_t)r * FFN_TILE_COLUMNS, last - first);
        }
    }
}

static void execute_down_member(void *context, uint32_t member, uint32_t members)
{
    (void)members;
    execute_job_t *job = context;
    uint32_t columns = job->capacity->down_columns, hidden = job->signature->hidden;
    for (;;) {
        uint32_t item = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
        if (item >= job->items)
            return;
        uint32_t first = item * columns;
        execute_down_item(job, first, hidden - first < columns ? hidden : first + columns, member);
    }
}

static void execute_region(ffn_runtime_t *runtime, xp_pool_function_t function, execute_job_t *job,
                           uint32_t items, bool inline_here)
{
    job->items = items;
    atomic_store_explicit(&job->next, 0, memory_order_relaxed);
    if (inline_here || items == 1)
        function(job, 0, 1);
    else
        xp_pool_run(runtime->pool, function, job);
}

/* Routes the rows and groups them by expert; returns the number of parts. */
static uint32_t execute_route(ffn_runtime_t *runtime, ffn_lane_t *lane, const ffn_layer_t *layer,
                              uint32_t rows, const float *in)
{
    const ffn_signature_t *s = &layer->template->signature;
    const uint32_t top_k = s->top_k, experts = s->experts;
    kernels_matmul(runtime->pool, &layer->router, in, s->hidden, rows, lane->logits, experts,
                   runtime->kernels_scratch);
    memset(lane->offsets, 0, sizeof(lane->offsets[0]) * (experts + 1));
    for (uint32_t r = 0; r < rows; r++) {
        ffn_route_row(&layer->rule, lane->logits + (size_t)r * experts, layer->bias,
                      lane->chosen + r * top_k, lane->chosen_weights + r * top_k);
        for (uint32_t i = 0; i < top_k; i++)
            lane->offsets[lane->chosen[r * top_k + i] + 1]++;
    }
    uint32_t parts = 0;
    for (uint32_t e = 0; e < experts; e++) {
        uint32_t first = lane->offsets[e], count = lane->offsets[e + 1];
        lane->offsets[e + 1] += first;
        if (count == 0)
            continue;
        layer->usage->chosen[e] += count;
        lane->active[parts++] = (ffn_active_t){
            .triple = &layer->triples[e],
            .row_ids = lane->row_ids + first,
            .row_weights = lane->row_weights + first,
            .rows = count,
            .width = s->intermediate,
            .activations = (size_t)first * s->intermediate,
        };
    }
    layer->usage->executions++;
    layer->usage->rows += rows;
    layer->usage->experts += parts;
    /* offsets[e] is now the first free place of expert e. */
    for (uint32_t r = 0; r < rows; r++)
        for (uint32_t i = 0; i < top_k; i++) {
            uint32_t at = lane->offsets[lane->chosen[r * top_k + i]]++;
            lane->row_ids[at] = r;
            lane->row_weights[at] = lane->chosen_weights[r * top_k + i];
        }
    if (s->shared_intermediate)
        lane->active[parts++] = (ffn_active_t){
            .triple = &layer->triples[experts],
            .rows = rows,
            .width = s->shared_intermediate,
            .activations = (size_t)rows * top_k * s->intermediate,
        };
    return parts;
}

static void execute_piece(ffn_runtime_t *runtime, ffn_lane_t *lane, const ffn_layer_t *layer,
                          const ffn_capacity_t *capacity, uint32_t rows, const float *in,
                          float *out)
{
    const ffn_signature_t *s = &layer->template->signature;
    execute_job_t job = {.runtime = runtime,
                         .lane = lane,
                         .signature = s,
                         .capacity = capacity,
                         .rows = rows,
                         .parts = 1,
                         .in = in,
                         .out = out};
    if (s->kind == MODEL_FFN_MOE)
        job.parts = execute_route(runtime, lane, layer, rows, in);
    else
        lane->active[0] =
            (ffn_active_t){.triple = layer->triples, .rows = rows, .width = s->intermediate};
    uint32_t items = 0;
    for (uint32_t part = 0; part < job.parts; part++)
        items += execute_blocks(lane->active[part].width, capacity->gate_columns);
    execute_region(runtime, execute_gate_member, &job, items, capacity->gate_inline);
    execute_region(runtime, execute_down_member, &job,
                   execute_blocks(s->hidden, capacity->down_columns), capacity->down_inline);
}

void ffn_execute_layer(ffn_runtime_t *runtime, ffn_lane_t *lane, const ffn_layer_t *layer,
                       uint32_t rows, const float *in, float *out)
{
    const ffn_template_t *template = layer->template;
    size_t hidden = template->signature.hidden;
    const ffn_capacity_t *capacity = ffn_template_capacity(template, rows);
    for (uint32_t done = 0; done < rows; done += capacity->piece_rows) {
        uint32_t piece = rows - done < capacity->piece_rows ? rows - done : capacity->piece_rows;
        execute_piece(runtime, lane, layer, capacity, piece, in + done * hidden,
                      out + done * hidden);
    }
}
