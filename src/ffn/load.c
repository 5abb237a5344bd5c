/* SPDX-License-Identifier: MIT */
/*
 * Parallel readers of a shard's weights.
 *
 * Each reader takes the next matrix from a counter, reads its rows or columns of this shard
 * straight into place (through a small buffer where the dtype changes), and packs it for the
 * kernels. Readers live for one load_shard(); memory beyond the shard is one buffer a reader and,
 * while packing, 16 rows. Nothing else of the checkpoint is read.
 */
#include "ffn/load.h"

#include <stdlib.h>
#include <string.h>

#include "ffn/dummy.h"
#include "ffn/load_share.h"
#include "kernels/kernels.h"

#define LOAD_BUFFER_BYTES (1u << 20)
#define LOAD_MAX_READERS  64

typedef struct load_job {
    load_share_t share;
    const checkpoint_t *checkpoint;
    const layout_t *layout;
    uint8_t *memory;
    bool *packed;
} load_job_t;

static xp_status_t load_read_item(load_job_t *job, const layout_item_t *item, uint8_t *out,
                                  uint8_t *buffer)
{
    xp_dtype_t found = item->tensor->dtype;
    uint32_t rank = job->share.install->tp_rank;
    uint64_t first_row = item->axis == LAYOUT_ROWS ? (uint64_t)rank * item->rows : 0;
    uint64_t first_column = item->axis == LAYOUT_COLUMNS ? (uint64_t)rank * item->columns : 0;
    size_t found_bytes = xp_dtype_row_bytes(found, item->columns);
    size_t row_bytes = xp_dtype_row_bytes(item->dtype, item->columns);
    uint64_t step = LOAD_BUFFER_BYTES / found_bytes;
    step = step ? step : 1;
    for (uint64_t row = 0; row < item->rows && !atomic_load(&job->share.failed); row += step) {
        uint64_t rows = item->rows - row < step ? item->rows - row : step;
        uint8_t *at = out + row * row_bytes;
        uint8_t *target = found == item->dtype ? at : buffer;
        XP_TRY(checkpoint_read_rows(job->checkpoint, item->tensor, first_row + row, rows,
                                    first_column, item->columns, target));
        if (target == buffer)
            kernels_convert(found, buffer, item->dtype, at, rows * item->columns);
        load_share_report(&job->share, rows * row_bytes);
    }
    return XP_OK;
}

static void load_make_up(load_job_t *job, const layout_item_t *item, uint8_t *out,
                         float *row_buffer)
{
    uint32_t rank = job->share.install->tp_rank;
    uint64_t first_row = item->axis == LAYOUT_ROWS ? (uint64_t)rank * item->rows : 0;
    uint64_t first_column = item->axis == LAYOUT_COLUMNS ? (uint64_t)rank * item->columns : 0;
    size_t row_bytes = xp_dtype_row_bytes(item->dtype, item->columns);
    float scale = ffn_dummy_scale(item->whole_columns);
    uint64_t seed = ffn_dummy_seed(item->name);
    for (uint64_t row = 0; row < item->rows && !atomic_load(&job->share.failed); row++) {
        uint64_t first = (first_row + row) * item->whole_columns + first_column;
        for (uint32_t k = 0; k < item->columns; k++)
            row_buffer[k] = ffn_dummy_value(seed, first + k, scale);
        kernels_convert(XP_DTYPE_F32, row_buffer, item->dtype, out + row * row_bytes,
                        item->columns);
    }
    load_share_report(&job->share, item->rows * row_bytes);
}

static xp_status_t load_item(load_job_t *job, size_t index, uint8_t *buffer)
{
    const layout_item_t *item = &job->layout->items[index];
    uint8_t *out = job->memory + item->offset;
    if (!item->tensor)
        load_make_up(job, item, out, (float *)buffer);
    else if (item->role == LAYOUT_BIAS)
        XP_TRY(checkpoint_read_f32(job->checkpoint, item->tensor, (float *)out));
    else
        XP_TRY(load_read_item(job, item, out, buffer));
    if (item->role == LAYOUT_BIAS)
        return XP_OK;
    kernels_matrix_t matrix = {
        .dtype = item->dtype, .rows = item->rows, .columns = item->columns, .data = out};
    XP_TRY(kernels_matrix_pack(&matrix));
    job->packed[index] = matrix.packed;
    return XP_OK;
}

/* A row must fit the buffer, in FP32 for made-up weights and in its own dtype otherwise. */
static size_t load_buffer_bytes(const layout_t *layout)
{
    size_t bytes = LOAD_BUFFER_BYTES;
    for (size_t i = 0; i < layout->count; i++)
        if (layout->items[i].columns * sizeof(float) > bytes)
            bytes = layout->items[i].columns * sizeof(float);
    return bytes;
}

static void *load_reader(void *context)
{
    load_job_t *job = context;
    size_t bytes = load_buffer_bytes(job->layout);
    uint8_t *buffer = malloc(bytes);
    xp_status_t status =
        buffer ? XP_OK : xp_fail(XP_NO_MEMORY, "no memory for a read buffer of %zu bytes", bytes);
    while (status == XP_OK && !atomic_load(&job->share.failed)) {
        size_t index = atomic_fetch_add(&job->share.next, 1);
        if (index >= job->layout->count)
            break;
        status = load_item(job, index, buffer);
    }
    if (status != XP_OK)
        load_share_fail(&job->share, status);
    free(buffer);
    return NULL;
}

xp_status_t load_shard(const ffn_install_t *install, const checkpoint_t *checkpoint,
                       const layout_t *layout, uint8_t *memory, bool *packed_out)
{
    load_job_t job = {.share = LOAD_SHARE(install, 0),
                      .checkpoint = checkpoint,
                      .layout = layout,
                      .memory = memory,
                      .packed = packed_out};
    for (size_t i = 0; i < layout->count; i++)
        if (layout->items[i].role != LAYOUT_BIAS || !layout->items[i].tensor)
            job.share.total_bytes +=
                layout->items[i].rows *
                xp_dtype_row_bytes(layout->items[i].dtype, layout->items[i].columns);
    uint32_t readers = install->readers < 1 ? 1 : install->readers;
    if (readers > LOAD_MAX_READERS)
        readers = LOAD_MAX_READERS;
    pthread_t threads[LOAD_MAX_READERS];
    uint32_t started = 0;
    /* Fewer threads than asked for only make it slower: the caller reads too. */
    while (started + 1 < readers && pthread_create(&threads[started], NULL, load_reader, &job) == 0)
        started++;
    load_reader(&job);
    for (uint32_t i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
    return load_share_status(&job.share);
}
