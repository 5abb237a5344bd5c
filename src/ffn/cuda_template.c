/* SPDX-License-Identifier: MIT */
/*
 * GraphTemplates on a GPU: for each Execution Signature, Capacity and Lane one captured executable,
 *
 *   gather inputs -> products -> publish
 *
 * whose launches read layer, rows and addresses from the Lane. Up to ffn_cuda_streamed_rows() rows
 * the products are the decode kernel; above, and instead of it on a GPU that holds another role,
 * those of few rows where they gain (template_few()), then the grouped products in pieces of
 * piece_rows rows, so that the urgent stream gets its turn between two launches. Captured by the
 * owner, before the host thread starts.
 */
#include "ffn/cuda_private.h"

#define TEMPLATE_STEP  4u  /* from one Capacity to the next */
#define TEMPLATE_FIRST 64u /* the first above decode */
/* Measured for an executable of few launches, and reckoned for eight launches more. */
#define TEMPLATE_EXEC_BYTES  ((uint64_t)136 << 10)
#define TEMPLATE_PIECE_BYTES ((uint64_t)16 << 10)
#define TEMPLATE_THREADS     256u
#define TEMPLATE_BLOCK_BYTES ((uint64_t)32 << 10) /* copied by one block */
#define TEMPLATE_BLOCKS      2u                   /* a multiprocessor, at most */

/* Whether that Capacity is ffn_cuda_few()'s. Beside the grouped products (H200) layers of experts
 * take 0.68 of the time at 1 row, 0.89 at 4, 1.03 at 8 and 1.06 to 1.11 from 16 rows on; dense ones
 * 0.86 at 8 rows and 1.02 at 16. */
static bool template_few(const cuda_template_t *template, uint32_t capacity)
{
    return capacity == 0 && template->capacity[0] <= ffn_cuda_few_rows(&template->signature);
}

void cuda_template_plan(const ffn_cuda_config_t *config, const ffn_cuda_signature_t *signature,
                        cuda_template_t *template_out)
{
    *template_out = (cuda_template_t){.signature = *signature};
    template_out->piece_rows = cuda_layout_piece_rows(signature, config->max_rows);
    if (config->piece_rows && config->piece_rows < template_out->piece_rows)
        template_out->piece_rows = config->piece_rows;
    uint32_t rows = ffn_cuda_streamed_rows(signature);
    template_out->capacity[template_out->capacities++] = rows;
    while (rows < config->max_rows) {
        const uint32_t before = rows;
        for (rows = TEMPLATE_FIRST; rows <= before;)
            rows *= TEMPLATE_STEP;
        /* The last one but one would be large already: then the largest takes its rows too. */
        if (rows > config->max_rows || template_out->capacities + 1 == CUDA_MAX_CAPACITIES)
            rows = config->max_rows;
        template_out->capacity[template_out->capacities++] = rows;
    }
}

uint32_t cuda_template_capacity(const cuda_template_t *template, uint32_t rows)
{
    uint32_t c = 0;
    while (c + 1 < template->capacities && template->capacity[c] < rows)
        c++;
    return c;
}

static bool template_pieces(const cuda_template_t *template, uint32_t rows)
{
    return rows > template->piece_rows || rows > CUDA_OWN_ROWS;
}

uint32_t cuda_template_few_rows(const cuda_template_t *template)
{
    const uint32_t most = template->capacity[template->capacities - 1];
    const uint32_t rows = ffn_cuda_few_rows(&template->signature);
    if (template_pieces(template, rows < most ? rows : most))
        return 0;
    return rows < most ? rows : most;
}

const ffn_library_plan_t *cuda_template_few_plan(const cuda_template_t *template, uint32_t rows)
{
    const uint32_t index = rows - FFN_CUDA_DENSE_ROWS - 1;
    return index < CUDA_FEW_PLANS ? template->few_plan[index] : NULL;
}

bool cuda_template_shares(const ffn_cuda_runtime_t *runtime, const cuda_template_t *template,
                          uint32_t capacity_rows)
{
    return runtime->shared_at && template_pieces(template, capacity_rows);
}

uint64_t cuda_template_bytes(const ffn_cuda_config_t *config, const ffn_cuda_signature_t *signature)
{
    cuda_template_t template;
    uint64_t bytes = 0;
    cuda_template_plan(config, signature, &template);
    for (uint32_t c = 0; c < template.capacities; c++) {
        const uint32_t pieces = template.capacity[c] / template.piece_rows + 1;
        bytes += TEMPLATE_EXEC_BYTES + (uint64_t)pieces * TEMPLATE_PIECE_BYTES;
    }
    return bytes * config->lanes;
}

static uint32_t template_blocks(const ffn_cuda_runtime_t *runtime, uint64_t bytes)
{
    const uint64_t most = (uint64_t)runtime->device->info.multiprocessors * TEMPLATE_BLOCKS;
    const uint64_t blocks = bytes / TEMPLATE_BLOCK_BYTES + 1;
    return (uint32_t)(blocks < most ? blocks : most);
}

xp_status_t cuda_template_gather(ffn_cuda_runtime_t *runtime, const cuda_template_t *template,
                                 uint32_t lane, uint32_t capacity_rows, cuda_stream_t stream)
{
    cuda_lane_t *own = &runtime->lane[lane];
    void *parameters[] = {&own->lane, &own->answer, &own->run};
    /* Without rows of its own a Lane has no sources: only the clock is read. */
    const uint64_t bytes =
        runtime->config.buffer_rows ? (uint64_t)capacity_rows * template->signature.hidden * 2 : 0;
    return cuda_launch(runtime->device, runtime->function[DISPATCH_GATHER],
                       template_blocks(runtime, bytes), TEMPLATE_THREADS, stream, parameters);
}

xp_status_t cuda_template_piece(ffn_cuda_runtime_t *runtime, const cuda_template_t *template,
                                uint32_t lane, uint32_t first, uint32_t rows, cuda_stream_t stream)
{
    cuda_lane_t *own = &runtime->lane[lane];
    void *parameters[] = {&own->lane, &own->piece, &first, &rows};
    XP_TRY(
        cuda_launch(runtime->device, runtime->function[DISPATCH_PIECE], 1, 1, stream, parameters));
    return ffn_cuda_bulk(&runtime->kernels, &template->signature, rows, 0, own->piece, stream);
}

xp_status_t cuda_template_publish(ffn_cuda_runtime_t *runtime, uint32_t index, uint32_t lane,
                                  uint32_t capacity_rows, cuda_stream_t stream)
{
    const cuda_lane_t *own = &runtime->lane[lane];
    if (runtime->config.publish)
        return runtime->config.publish(runtime->config.publish_context, lane, capacity_rows,
                                       stream);
    ffn_cuda_publishing_t publishing = {
        .lane = cuda_pointer(own->lane),
        .answer = cuda_pointer(own->answer),
        .run = cuda_pointer(own->run),
        .done = cuda_pointer(own->done),
        .counters = cuda_pointer(runtime->counters_at),
        .capacity = capacity_rows,
        .lane_number = (uint16_t)lane,
        .graph_template = (uint16_t)index,
    };
    void *parameters[] = {&publishing};
    const uint64_t bytes = (uint64_t)capacity_rows * runtime->template[index].signature.hidden * 2;
    return cuda_launch(runtime->device, runtime->function[DISPATCH_PUBLISH],
                       template_blocks(runtime, bytes), TEMPLATE_THREADS, stream, parameters);
}

static xp_status_t template_products(ffn_cuda_runtime_t *runtime, const cuda_template_t *template,
                                     uint32_t capacity, uint32_t lane, cuda_stream_t stream)
{
    const uint32_t rows = template->capacity[capacity];
    const cuda_address_t at = runtime->lane[lane].lane;
    if (capacity == 0 && !runtime->config.shared_role)
        return ffn_cuda_decode(&runtime->kernels, at, stream);
    const bool pieces = template_pieces(template, rows);
    if (!pieces && template_few(template, capacity))
        return ffn_cuda_few(&runtime->kernels, &template->signature, rows, 0, at, stream);
    if (!pieces)
        return ffn_cuda_bulk(&runtime->kernels, &template->signature, rows, 0, at, stream);
    for (uint32_t first = 0; first < rows; first += template->piece_rows) {
        const uint32_t left = rows - first;
        XP_TRY(cuda_template_piece(runtime, template, lane, first,
                                   left < template->piece_rows ? left : template->piece_rows,
                                   stream));
    }
    return XP_OK;
}

static xp_status_t template_capture_one(ffn_cuda_runtime_t *runtime, uint32_t index,
                                        uint32_t capacity, uint32_t lane)
{
    cuda_template_t *template = &runtime->template[index];
    const uint32_t rows = template->capacity[capacity];
    /* The priority of a captured launch is that of the stream it was captured on. */
    cuda_stream_t stream = capacity == 0 ? runtime->decode : runtime->bulk;
    cuda_graph_exec_t exec;
    XP_TRY(cuda_capture_begin(runtime->device, stream));
    xp_status_t status = cuda_template_gather(runtime, template, lane, rows, stream);
    if (status == XP_OK)
        status = template_products(runtime, template, capacity, lane, stream);
    if (status == XP_OK)
        status = cuda_template_publish(runtime, index, lane, rows, stream);
    /* A capture that failed is ended too; the first error is the one that counts. */
    if (status != XP_OK) {
        const xp_error_t first = *xp_error_last();
        if (cuda_capture_end(runtime->device, stream, &exec) == XP_OK)
            cuda_graph_destroy(runtime->device, exec);
        return xp_fail_at(status, first.file, first.line, "%s", first.text);
    }
    XP_TRY(cuda_capture_end(runtime->device, stream, &exec));
    template->exec[capacity][lane] = exec;
    runtime->captured++;
    /* The first launch would bring it to the device otherwise. */
    return CUDA_CALL(runtime->device->driver, cuGraphUpload, exec, stream);
}

xp_status_t cuda_template_capture(ffn_cuda_runtime_t *runtime, uint32_t index)
{
    const cuda_template_t *template = &runtime->template[index];
    for (uint32_t c = 0; c < template->capacities; c++)
        for (uint32_t lane = 0; lane < runtime->config.lanes; lane++) {
            xp_status_t status = template_capture_one(runtime, index, c, lane);
            if (status != XP_OK)
                return xp_fail_context(status, "capture of %u rows of FFN %u to %u (%u experts)",
                                       template->capacity[c], template->signature.hidden,
                                       template->signature.intermediate,
                                       template->signature.experts);
        }
    return XP_OK;
}

void cuda_template_release(ffn_cuda_runtime_t *runtime, uint32_t index)
{
    cuda_template_t *template = &runtime->template[index];
    for (uint32_t c = 0; c < CUDA_MAX_CAPACITIES; c++)
        for (uint32_t lane = 0; lane < FFN_CUDA_MAX_LANES; lane++)
            cuda_graph_destroy(runtime->device, template->exec[c][lane]);
    ffn_library_plan_free(template->plan);
    for (uint32_t i = 0; i < CUDA_FEW_PLANS; i++)
        ffn_library_plan_free(template->few_plan[i]);
    *template = (cuda_template_t){0};
}
