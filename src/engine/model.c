/* SPDX-License-Identifier: MIT */
/*
 * Forward pass of the attention side. Driven by the engine thread; parallel regions run on its
 * team. All memory is taken by init; a step allocates nothing. Every row's arithmetic is
 * independent of the other rows, so a sequence gets the same bits alone and in a batch.
 */
#include "engine/model.h"

#include <math.h>
#include <string.h>
#include <sys/mman.h>

#include "engine/rope.h"
#include "engine/sampler.h"

/* Below this many floats a region costs more than it saves. */
#define PARALLEL_FLOATS 8192u
/* What beginning a row costs beside touching its floats: an embedding gathered column by column out
 * of packed panels, and the angles. */
#define BEGIN_WORK 4u
/* Members take rows of their own through a layer's attention half where each gets this many, so
 * that the kernels are at their best, and where the half's weights stay in every member's cache. */
#define OWN_ROWS         4u
#define OWN_WEIGHT_BYTES (1u << 20)
#define ALIGNMENT        64u

/* ---- workspace ------------------------------------------------------------------------------- */

/* Lays the workspace out; with region NULL it only measures. */
static size_t workspace_lay_out(engine_model_t *model, char *region)
{
    const model_spec_t *spec = model->spec;
    const size_t rows = model->max_rows;
    const size_t half = spec->head_dim / 2;
    const uint32_t group = spec->heads / spec->kv_heads;
    const uint32_t widest = spec->hidden > model->q_dim ? spec->hidden : model->q_dim;
    size_t used = 0;
    model->scores_floats = engine_attention_scratch_floats(group, model->max_context);
    model->sampler_bytes = engine_sampler_space_bytes(spec->vocab);
    const uint32_t scratch_rows =
        model->max_rows > ENGINE_LOGIT_ROWS ? model->max_rows : ENGINE_LOGIT_ROWS;
#define TAKE(field, bytes)                                                                         \
    do {                                                                                           \
        used = (used + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;                                     \
        model->field = region ? (void *)(region + used) : NULL;                                    \
        used += (bytes);                                                                           \
    } while (0)
    TAKE(x, rows * spec->hidden * sizeof(float));
    TAKE(h, rows * spec->hidden * sizeof(float));
    TAKE(qkv, rows * model->qkv_dim * sizeof(float));
    TAKE(mixed, rows * widest * sizeof(float));
    TAKE(cosine, rows * half * sizeof(float));
    TAKE(sine, rows * half * sizeof(float));
    TAKE(gathered, (size_t)ENGINE_LOGIT_ROWS * spec->hidden * sizeof(float));
    TAKE(logits, (size_t)ENGINE_LOGIT_ROWS * spec->vocab * sizeof(float));
    TAKE(scores, model->threads * model->scores_floats * sizeof(float));
    TAKE(scratch, model->threads * kernels_scratch_bytes(scratch_rows, widest));
    TAKE(sampler, model->threads * model->sampler_bytes);
    TAKE(positions, rows * sizeof(uint32_t));
    TAKE(pages, rows * sizeof(uint32_t));
    TAKE(offsets, rows * sizeof(uint32_t));
    TAKE(row_tokens, rows * sizeof(int32_t));
    TAKE(tiles, rows * sizeof(engine_attention_tile_t));
#undef TAKE
    return used;
}

static void model_shape(engine_model_t *model, const model_spec_t *spec, uint32_t threads,
                        uint32_t max_rows, uint32_t max_context)
{
    model->spec = spec;
    model->threads = threads;
    model->max_rows = max_rows;
    model->max_context = max_context;
    model->q_dim = spec->heads * spec->head_dim;
    model->kv_dim = spec->kv_heads * spec->head_dim;
    model->qkv_dim = model->q_dim + 2 * model->kv_dim;
}

uint64_t engine_workspace_bytes(const model_spec_t *spec, uint32_t threads, uint32_t max_rows,
                                uint32_t max_context)
{
    engine_model_t model = {0};
    if (!spec->kv_heads || !spec->heads)
        return 0;
    model_shape(&model, spec, threads, max_rows, max_context);
    return workspace_lay_out(&model, NULL);
}

xp_status_t engine_model_init(const model_spec_t *spec, const engine_weights_t *weights,
                              const engine_kv_t *kv, xp_pool_t *pool, const engine_ffn_t *ffn,
                              uint32_t max_rows, uint32_t max_context, engine_model_t *model_out)
{
    engine_model_t *model = model_out;
    memset(model, 0, sizeof *model);
    model_shape(model, spec, xp_pool_threads(pool), max_rows, max_context);
    model->weights = weights;
    model->kv = kv;
    model->pool = pool;
    model->ffn = *ffn;
    XP_TRY(engine_rope_frequencies(&spec->rope, spec->head_dim, model->rope_inverse,
                                   &model->rope_scale));
    const uint32_t group = spec->heads / spec->kv_heads;
    model->attention =
        (engine_attention_t){.ops = engine_attention_select(),
                             .kv = kv,
                             .heads = spec->heads,
                             .kv_heads = spec->kv_heads,
                             .head_dim = spec->head_dim,
                             .scale = (float)(1.0 / sqrt((double)spec->head_dim)),
                             .score_stride = (max_context + ENGINE_ATTENTION_BLOCK - 1) /
                                             ENGINE_ATTENTION_BLOCK * ENGINE_ATTENTION_BLOCK,
                             .tile_rows = engine_attention_tile_rows(group, max_context)};

    size_t bytes = workspace_lay_out(model, NULL);
    void *region = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (region == MAP_FAILED)
        return xp_fail_errno(XP_NO_MEMORY, "%zu bytes of engine workspace", bytes);
    model->region = region;
    model->region_bytes = bytes;
    workspace_lay_out(model, region);
    return XP_OK;
}

void engine_model_fini(engine_model_t *model)
{
    if (model->region)
        munmap(model->region, model->region_bytes);
    memset(model, 0, sizeof *model);
}

/* ---- parallel regions ------------------------------------------------------------------------ */

/* Runs function(model, row) for every row, on the team where that pays. */
typedef void (*row_function_t)(engine_model_t *model, uint32_t row);
typedef struct row_region {
    engine_model_t *model;
    row_function_t function;
} row_region_t;

static void row_region_run(void *context, uint32_t member, uint32_t members)
{
    const row_region_t *region = context;
    const uint64_t rows = region->model->rows;
    uint32_t first = (uint32_t)(rows * member / members);
    uint32_t last = (uint32_t)(rows * (member + 1) / members);
    for (uint32_t row = first; row < last; row++)
        region->function(region->model, row);
}

static void for_each_row(engine_model_t *model, uint32_t floats, row_function_t function)
{
    row_region_t region = {.model = model, .function = function};
    if (model->threads == 1 || (uint64_t)model->rows * floats < PARALLEL_FLOATS)
        row_region_run(&region, 0, 1);
    else
        xp_pool_run(model->pool, row_region_run, &region);
}

static void row_begin(engine_model_t *model, uint32_t row)
{
    const uint32_t hidden = model->spec->hidden, half = model->spec->head_dim / 2;
    float *x = model->x + (size_t)row * hidden;
    kernels_dequantize_row(&model->weights->embedding, (uint32_t)model->row_tokens[row], x);
    engine_rope_angles(model->rope_inverse, model->rope_scale, half, model->positions[row],
                       model->cosine + (size_t)row * half, model->sine + (size_t)row * half);
    kernels_rms_norm(x, model->weights->layers[0].attention_norm, model->spec->norm_epsilon,
                     model->h + (size_t)row * hidden, hidden);
}

/* Bias, q/k norm and rotation; K and V go to the cache. */
static void row_attend_prepare(engine_model_t *model, uint32_t row)
{
    const model_spec_t *spec = model->spec;
    const engine_layer_t *layer = &model->weights->layers[model->layer];
    const uint32_t head_dim = spec->head_dim, half = head_dim / 2;
    const float *cosine = model->cosine + (size_t)row * half;
    const float *sine = model->sine + (size_t)row * half;
    float *qkv = model->qkv + (size_t)row * model->qkv_dim;
    if (layer->qkv_bias)
        kernels_add(qkv, layer->qkv_bias, model->qkv_dim);
    for (uint32_t head = 0; head < spec->heads + spec->kv_heads; head++) {
        float *part = qkv + (size_t)head * head_dim;
        const float *norm = head < spec->heads ? layer->q_norm : layer->k_norm;
        if (norm)
            kernels_rms_norm(part, norm, spec->norm_epsilon, part, head_dim);
        engine_rope_rotate(part, half, cosine, sine);
    }
    engine_kv_store(model->kv, model->layer, model->pages[row], model->offsets[row],
                    qkv + model->q_dim, qkv + model->q_dim + model->kv_dim);
}

static void row_add_attention(engine_model_t *model, uint32_t row)
{
    const engine_layer_t *layer = &model->weights->layers[model->layer];
    const uint32_t hidden = model->spec->hidden;
    float *x = model->x + (size_t)row * hidden, *h = model->h + (size_t)row * hidden;
    if (layer->o_bias)
        kernels_add(h, layer->o_bias, hidden);
    kernels_add(x, h, hidden);
    kernels_rms_norm(x, layer->ffn_norm, model->spec->norm_epsilon, h, hidden);
}

static void row_add_ffn(engine_model_t *model, uint32_t row)
{
    const uint32_t hidden = model->spec->hidden;
    float *x = model->x + (size_t)row * hidden;
    kernels_add(x, model->mixed + (size_t)row * hidden, hidden);
    if (model->layer + 1 < model->spec->layers)
        kernels_rms_norm(x, model->weights->layers[model->layer + 1].attention_norm,
                         model->spec->norm_epsilon, model->h + (size_t)row * hidden, hidden);
}

static void attention_region(void *context, uint32_t member, uint32_t members)
{
    engine_model_t *model = context;
    const model_spec_t *spec = model->spec;
    const uint32_t group = spec->heads / spec->kv_heads;
    const uint32_t split = model->head_split, heads = group / split;
    const uint32_t per_tile = spec->kv_heads * split;
    const uint32_t items = model->tile_count * per_tile;
    float *scores = model->scores + member * model->scores_floats;
    (void)members;
    for (;;) {
        uint32_t item = atomic_fetch_add_explicit(&model->next_item, 1, memory_order_relaxed);
        if (item >= items)
            return;
        /* Last tiles first: they see the most positions, so the team ends together. */
        const engine_attention_tile_t *tile =
            &model->tiles[model->tile_count - 1 - item / per_tile];
        uint32_t kv_head = item % per_tile / split;
        uint32_t first_head = kv_head * group + item % split * heads;
        engine_attention_run(&model->attention, model->layer, tile, kv_head, first_head, heads,
                             model->qkv, model->qkv_dim, model->mixed, model->q_dim, scores);
    }
}

static void attend(engine_model_t *model)
{
    const model_spec_t *spec = model->spec;
    const uint32_t group = spec->heads / spec->kv_heads;
    /* A KV head's query heads share its rows in cache, unless that leaves members idle. */
    model->head_split =
        model->tile_count * spec->kv_heads >= 4 * model->threads || model->threads == 1 ? 1 : group;
    atomic_store_explicit(&model->next_item, 0, memory_order_relaxed);
    if (model->threads == 1)
        attention_region(model, 0, 1);
    else
        xp_pool_run(model->pool, attention_region, model);
}

/* ---- rows of one's own ------------------------------------------------------------------------
 */

static bool rows_are_own(const engine_model_t *model, uint32_t span_count)
{
    const engine_layer_t *layer = &model->weights->layers[0];
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < layer->qkv_count; i++)
        bytes +=
            kernels_matrix_bytes(layer->qkv[i].dtype, layer->qkv[i].rows, layer->qkv[i].columns);
    bytes += kernels_matrix_bytes(layer->o.dtype, layer->o.rows, layer->o.columns);
    /* One row a sequence: no row needs K and V that another member is about to write. */
    return model->threads > 1 && span_count == model->rows &&
           model->rows >= OWN_ROWS * model->threads && bytes <= OWN_WEIGHT_BYTES;
}

/* A member's share of the rows through the attention half of a layer. Where every row is a sequence
 * of its own this takes one region instead of four, and a sequence's KV Cache stays with one core.
 */
static void own_rows_region(void *context, uint32_t member, uint32_t members)
{
    engine_model_t *model = context;
    const model_spec_t *spec = model->spec;
    const engine_layer_t *layer = &model->weights->layers[model->layer];
    const uint32_t hidden = spec->hidden, group = spec->heads / spec->kv_heads;
    const uint32_t first = (uint32_t)((uint64_t)model->rows * member / members);
    const uint32_t last = (uint32_t)((uint64_t)model->rows * (member + 1) / members);
    float *scores = model->scores + member * model->scores_floats;
    void *scratch = (char *)model->scratch + member * kernels_scratch_bytes(0, 0);
    for (uint32_t i = 0, column = 0; i < layer->qkv_count; i++) {
        kernels_matmul_range(&layer->qkv[i], model->h + (size_t)first * hidden, hidden,
                             last - first, model->qkv + (size_t)first * model->qkv_dim + column,
                             model->qkv_dim, 0, layer->qkv[i].rows, scratch);
        column += layer->qkv[i].rows;
    }
    for (uint32_t row = first; row < last; row++) {
        row_attend_prepare(model, row);
        for (uint32_t kv_head = 0; kv_head < spec->kv_heads; kv_head++)
            engine_attention_run(&model->attention, model->layer, &model->tiles[row], kv_head,
                                 kv_head * group, group, model->qkv, model->qkv_dim, model->mixed,
                                 model->q_dim, scores);
    }
    kernels_matmul_range(&layer->o, model->mixed + (size_t)first * model->q_dim, model->q_dim,
                         last - first, model->h + (size_t)first * hidden, hidden, 0, hidden,
                         scratch);
    for (uint32_t row = first; row < last; row++)
        row_add_attention(model, row);
}

/* ---- step ------------------------------------------------------------------------------------ */

/* The attention half of a layer for all rows, the team in step. */
static void attention_half(engine_model_t *model)
{
    const uint32_t hidden = model->spec->hidden;
    const engine_layer_t *layer = &model->weights->layers[model->layer];
    for (uint32_t i = 0, column = 0; i < layer->qkv_count; i++) {
        kernels_matmul(model->pool, &layer->qkv[i], model->h, hidden, model->rows,
                       model->qkv + column, model->qkv_dim, model->scratch);
        column += layer->qkv[i].rows;
    }
    for_each_row(model, model->qkv_dim, row_attend_prepare);
    attend(model);
    kernels_matmul(model->pool, &layer->o, model->mixed, model->q_dim, model->rows, model->h,
                   hidden, model->scratch);
    for_each_row(model, hidden, row_add_attention);
}

static void step_set_rows(engine_model_t *model, const engine_span_t *spans, uint32_t span_count)
{
    const uint32_t page_tokens = model->kv->page_tokens;
    uint32_t row = 0, tiles = 0;
    for (uint32_t s = 0; s < span_count; s++) {
        const engine_span_t *span = &spans[s];
        XP_ASSERT(span->rows > 0 && span->rows <= model->max_rows - row &&
                  span->position + span->rows <= model->max_context);
        for (uint32_t i = 0; i < span->rows; i++) {
            uint32_t position = span->position + i;
            if (i % model->attention.tile_rows == 0)
                model->tiles[tiles++] = (engine_attention_tile_t){
                    .first_row = row, .rows = 0, .position = position, .pages = span->pages};
            model->tiles[tiles - 1].rows++;
            model->row_tokens[row] = span->tokens[i];
            model->positions[row] = position;
            model->pages[row] = span->pages[position / page_tokens];
            model->offsets[row] = position % page_tokens;
            row++;
        }
    }
    model->rows = row;
    model->tile_count = tiles;
}

xp_status_t engine_model_step(engine_model_t *model, const engine_span_t *spans,
                              uint32_t span_count, uint32_t kind, uint64_t slo_deadline_ns)
{
    const model_spec_t *spec = model->spec;
    const uint32_t hidden = spec->hidden;
    step_set_rows(model, spans, span_count);
    const bool own_rows = rows_are_own(model, span_count);
    for_each_row(model, BEGIN_WORK * hidden, row_begin);
    for (uint32_t index = 0; index < spec->layers; index++) {
        model->layer = index;
        if (own_rows)
            xp_pool_run(model->pool, own_rows_region, model);
        else
            attention_half(model);
        XP_TRY(model->ffn.call(model->ffn.context, index, model->rows, kind, slo_deadline_ns,
                               model->h, model->mixed));
        model->ffn_calls++;
        model->ffn_rows += model->rows;
        for_each_row(model, hidden, row_add_ffn);
    }
    return XP_OK;
}

float *engine_model_logits(engine_model_t *model, const uint32_t *rows, uint32_t count)
{
    const model_spec_t *spec = model->spec;
    XP_ASSERT(count > 0 && count <= ENGINE_LOGIT_ROWS);
    for (uint32_t i = 0; i < count; i++) {
        XP_ASSERT(rows[i] < model->rows);
        kernels_rms_norm(model->x + (size_t)rows[i] * spec->hidden, model->weights->final_norm,
                         spec->norm_epsilon, model->gathered + (size_t)i * spec->hidden,
                         spec->hidden);
    }
    kernels_matmul(model->pool, &model->weights->head, model->gathered, spec->hidden, count,
                   model->logits, spec->vocab, model->scratch);
    return model->logits;
}
