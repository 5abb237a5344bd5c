/* SPDX-License-Identifier: MIT */
/*
 * Matrix products over a range of output columns and over a pool.
 *
 * Splits the work into what the variant's few kernels do: direct streaming of packed panels for few
 * rows, otherwise decoding one block of a panel into scratch and a register-tiled product over all
 * rows. Keeps the order of additions stated in ops.h. Any thread; takes no memory.
 */
#include <stdatomic.h>
#include <string.h>

#include "kernels/dispatch.h"
#include "kernels/quant.h"

#define MATMUL_MAX_PANELS     2
#define MATMUL_MAX_MICRO_ROWS 14
#define MATMUL_X_BYTES        (sizeof(float) * KERNELS_ROW_CHUNK * KERNELS_X_STRIDE)
#define MATMUL_TILE_BYTES     (sizeof(float) * KERNELS_K_BLOCK * KERNELS_PANEL * MATMUL_MAX_PANELS)
#define MATMUL_ITEMS_A_THREAD 4
/* Weights that stay in a first cache of 32 KiB beside the rows. */
#define MATMUL_GROUP_BYTES (24u << 10)
/* Products below this many multiply-adds cost less than waking a team. */
#define MATMUL_SINGLE_LIMIT (128u * 1024u)

typedef struct matmul_input {
    const float *x;
    size_t stride;
    const uint32_t *ids; /* NULL: row r is row r */
    uint32_t rows;
} matmul_input_t;

static const float *matmul_row(const matmul_input_t *input, uint32_t row)
{
    return input->x + (input->ids ? input->ids[row] : row) * input->stride;
}

/* Out of line on purpose: where the compiler knows that a row is short it copies with string
 * instructions, whose start costs more than such a row. */
#ifdef __clang__
__attribute__((noinline))
#else
__attribute__((noinline, noclone))
#endif
static void
matmul_copy(float *to, const float *from, size_t bytes)
{
    memcpy(to, from, bytes);
}

size_t kernels_matrix_bytes(xp_dtype_t dtype, uint32_t rows, uint32_t columns)
{
    return (xp_dtype_row_bytes(dtype, columns) * rows + 63) & ~(size_t)63;
}

size_t kernels_scratch_bytes(uint32_t max_rows, uint32_t max_columns)
{
    /* Bounded by the block sizes, whatever the shapes: rows go through in chunks. */
    (void)max_rows;
    (void)max_columns;
    return (MATMUL_X_BYTES + MATMUL_TILE_BYTES + 64 + 4095) & ~(size_t)4095;
}

uint32_t kernels_split_chunk(uint32_t rows, uint32_t threads)
{
    uint32_t chunk = rows / (threads * MATMUL_ITEMS_A_THREAD);
    chunk = (chunk + 2 * KERNELS_SPLIT - 1) / (2 * KERNELS_SPLIT) * (2 * KERNELS_SPLIT);
    return chunk < 2 * KERNELS_SPLIT ? 2 * KERNELS_SPLIT : chunk;
}

/* Rows [first_row, ...) in checkpoint order into one panel of a tile; missing lanes become zero. */
static void matmul_decode_rows(const kernels_matrix_t *w, uint32_t first_row, uint32_t lanes,
                               uint32_t k0, uint32_t count, float *tile, size_t stride)
{
    size_t row_bytes = xp_dtype_row_bytes(w->dtype, w->columns);
    float values[KERNELS_K_BLOCK];
    for (uint32_t lane = 0; lane < KERNELS_PANEL; lane++) {
        if (lane < lanes)
            quant_decode_row(w->dtype, (const uint8_t *)w->data + (first_row + lane) * row_bytes,
                             k0, count, values);
        else
            memset(values, 0, sizeof(values));
        for (uint32_t k = 0; k < count; k++)
            tile[k * stride + lane] = values[k];
    }
}

static void matmul_decode_tile(const kernels_ops_t *ops, const kernels_matrix_t *w, uint32_t row,
                               uint32_t panels, uint32_t k0, uint32_t count, float *tile)
{
    size_t panel_bytes = xp_dtype_row_bytes(w->dtype, w->columns) * KERNELS_PANEL;
    size_t stride = (size_t)panels * KERNELS_PANEL;
    for (uint32_t p = 0; p < panels; p++, row += KERNELS_PANEL, tile += KERNELS_PANEL) {
        uint32_t lanes = w->rows > row ? w->rows - row : 0;
        if (w->packed && lanes >= KERNELS_PANEL)
            ops->decode(w->dtype, (const uint8_t *)w->data + row / KERNELS_PANEL * panel_bytes, k0,
                        count, tile, stride, panels * panel_bytes);
        else
            matmul_decode_rows(w, row, lanes < KERNELS_PANEL ? lanes : KERNELS_PANEL, k0, count,
                               tile, stride);
    }
}

/* One decoded tile times all copied rows. `lanes` < 16 * panels at the end of the range only. */
static void matmul_tile(const kernels_ops_t *ops, uint32_t rows, uint32_t panels, uint32_t lanes,
                        uint32_t count, const float *x, const float *tile, float *y,
                        size_t y_stride, bool accumulate)
{
    uint32_t blocks = (rows + ops->micro_rows - 1) / ops->micro_rows;
    for (uint32_t b = 0, r = 0; b < blocks; b++) {
        uint32_t take = (rows - r + (blocks - b) - 1) / (blocks - b);
        const float *x_block = x + (size_t)r * KERNELS_X_STRIDE;
        float *c = y + r * y_stride;
        if (lanes == panels * KERNELS_PANEL) {
            ops->micro(take, panels, count, x_block, tile, c, y_stride, accumulate);
        } else {
            _Alignas(64) float edge[MATMUL_MAX_MICRO_ROWS * MATMUL_MAX_PANELS * KERNELS_PANEL];
            size_t edge_stride = (size_t)panels * KERNELS_PANEL;
            ops->micro(take, panels, count, x_block, tile, edge, edge_stride, false);
            for (uint32_t i = 0; i < take; i++)
                for (uint32_t n = 0; n < lanes; n++)
                    c[i * y_stride + n] = accumulate
                                              ? c[i * y_stride + n] + edge[i * edge_stride + n]
                                              : edge[i * edge_stride + n];
        }
        r += take;
    }
}

/* Few enough rows for decoding and multiplying in one pass: whole packed panels of one block of
 * columns. Returns the first output column not done. */
static uint32_t matmul_fused(const kernels_ops_t *ops, const kernels_matrix_t *w, uint32_t rows,
                             uint32_t k0, uint32_t count, float *x, float *y, size_t y_stride,
                             uint32_t first, uint32_t last)
{
    size_t panel_bytes = xp_dtype_row_bytes(w->dtype, w->columns) * KERNELS_PANEL;
    uint32_t end = last / KERNELS_PANEL, panel = first / KERNELS_PANEL;
    if (end > w->rows / KERNELS_PANEL)
        end = w->rows / KERNELS_PANEL;
    if (!w->packed || rows > ops->fused_rows || end <= panel)
        return first;
    for (uint32_t r = rows; r < ops->fused_rows; r++) /* computed, never stored: ordinary numbers */
        matmul_copy(x + (size_t)r * KERNELS_X_STRIDE, x, count * sizeof(float));
    ops->fused(w->dtype, (const uint8_t *)w->data + panel * panel_bytes, panel_bytes, end - panel,
               k0, count, rows, x, y, y_stride);
    return end * KERNELS_PANEL;
}

static void matmul_gemm(const kernels_ops_t *ops, const kernels_matrix_t *w,
                        const matmul_input_t *input, float *y, size_t y_stride, uint32_t first,
                        uint32_t last, void *scratch)
{
    float *x_copy = (float *)(((uintptr_t)scratch + 63) & ~(uintptr_t)63);
    float *tile = x_copy + KERNELS_ROW_CHUNK * KERNELS_X_STRIDE;
    for (uint32_t r0 = 0; r0 < input->rows; r0 += KERNELS_ROW_CHUNK) {
        uint32_t rows = input->rows - r0;
        if (rows > KERNELS_ROW_CHUNK)
            rows = KERNELS_ROW_CHUNK;
        float *y_chunk = y + r0 * y_stride;
        for (uint32_t k0 = 0; k0 < w->columns; k0 += KERNELS_K_BLOCK) {
            uint32_t count = w->columns - k0;
            if (count > KERNELS_K_BLOCK)
                count = KERNELS_K_BLOCK;
            for (uint32_t r = 0; r < rows; r++)
                matmul_copy(x_copy + (size_t)r * KERNELS_X_STRIDE, matmul_row(input, r0 + r) + k0,
                            count * sizeof(float));
            uint32_t n =
                matmul_fused(ops, w, rows, k0, count, x_copy, y_chunk, y_stride, first, last);
            while (n < last) {
                uint32_t panels = (last - n + KERNELS_PANEL - 1) / KERNELS_PANEL;
                if (panels > ops->micro_panels)
                    panels = ops->micro_panels;
                uint32_t lanes = panels * KERNELS_PANEL;
                if (lanes > last - n)
                    lanes = last - n;
                matmul_decode_tile(ops, w, n, panels, k0, count, tile);
                matmul_tile(ops, rows, panels, lanes, count, x_copy, tile, y_chunk + (n - first),
                            y_stride, k0 > 0);
                n += panels * KERNELS_PANEL;
            }
        }
    }
}

/* Most rows worth streaming directly. */
static uint32_t matmul_direct_limit(const kernels_ops_t *ops, const kernels_matrix_t *w)
{
    if (!ops->direct || !w->packed)
        return 0;
    bool plain = w->dtype == XP_DTYPE_F32 || w->dtype == XP_DTYPE_F16 || w->dtype == XP_DTYPE_BF16;
    return plain ? ops->direct_limit : ops->direct_rows;
}

/* Streams whole packed panels for few rows; y points at column `first`, a panel's border. Returns
 * the first column not done. */
static uint32_t matmul_direct(const kernels_ops_t *ops, const kernels_matrix_t *w,
                              const matmul_input_t *input, float *y, size_t y_stride,
                              uint32_t first, uint32_t last)
{
    size_t panel_bytes = xp_dtype_row_bytes(w->dtype, w->columns) * KERNELS_PANEL;
    uint32_t end = last / KERNELS_PANEL, panel = first / KERNELS_PANEL;
    if (end > w->rows / KERNELS_PANEL)
        end = w->rows / KERNELS_PANEL;
    if (end <= panel)
        return first;
    const uint32_t passes = (input->rows + ops->direct_rows - 1) / ops->direct_rows;
    uint32_t group = end - panel; /* panels that stay in the first cache between passes */
    if (passes > 1 && group * panel_bytes > MATMUL_GROUP_BYTES) {
        group = (uint32_t)(MATMUL_GROUP_BYTES / panel_bytes) & ~1u; /* the kernel takes pairs */
        group = group ? group : 2;
    }
    for (; panel < end; panel += group) {
        uint32_t panels = end - panel < group ? end - panel : group;
        float *y_group = y + (size_t)panel * KERNELS_PANEL - first;
        for (uint32_t pass = 0, r = 0; pass < passes; pass++) {
            const float *x[KERNELS_DIRECT_ROWS];
            uint32_t rows = (input->rows - r + (passes - pass) - 1) / (passes - pass);
            for (uint32_t i = 0; i < rows; i++)
                x[i] = matmul_row(input, r + i);
            ops->direct(w->dtype, (const uint8_t *)w->data + panel * panel_bytes, panel_bytes,
                        panels, w->columns, rows, x, y_group + r * y_stride, y_stride);
            r += rows;
        }
    }
    return end * KERNELS_PANEL;
}

void kernels_matmul_gather_range(const kernels_matrix_t *w, const float *x, size_t x_stride,
                                 const uint32_t *row_ids, uint32_t x_rows, float *y,
                                 size_t y_stride, uint32_t first, uint32_t last, void *scratch)
{
    XP_ASSERT(first % KERNELS_PANEL == 0 && last <= w->rows);
    const kernels_ops_t *ops = kernels_ops_selected();
    matmul_input_t input = {x, x_stride, row_ids, x_rows};
    uint32_t done = first;
    if (x_rows == 0)
        return;
    if (x_rows <= matmul_direct_limit(ops, w))
        done = matmul_direct(ops, w, &input, y, y_stride, first, last);
    if (done < last)
        matmul_gemm(ops, w, &input, y + (done - first), y_stride, done, last, scratch);
}

void kernels_matmul_range(const kernels_matrix_t *w, const float *x, size_t x_stride,
                          uint32_t x_rows, float *y, size_t y_stride, uint32_t first, uint32_t last,
                          void *scratch)
{
    kernels_matmul_gather_range(w, x, x_stride, NULL, x_rows, y + first, y_stride, first, last,
                                scratch);
}

typedef struct matmul_job {
    const kernels_matrix_t *w;
    const float *x;
    float *y;
    size_t x_stride, y_stride;
    uint32_t x_rows, chunk;
    uint8_t *scratch;
    _Atomic uint32_t next; /* first column nobody has taken; only counts, carries no data */
} matmul_job_t;

static void matmul_member(void *context, uint32_t member, uint32_t members)
{
    matmul_job_t *job = context;
    uint8_t *scratch = job->scratch + member * kernels_scratch_bytes(0, 0);
    for (;;) {
        uint32_t first = atomic_fetch_add_explicit(&job->next, job->chunk, memory_order_relaxed);
        if (first >= job->w->rows)
            return;
        uint32_t last = job->w->rows - first < job->chunk ? job->w->rows : first + job->chunk;
        kernels_matmul_range(job->w, job->x, job->x_stride, job->x_rows, job->y, job->y_stride,
                             first, last, scratch);
    }
}

void kernels_matmul(xp_pool_t *pool, const kernels_matrix_t *w, const float *x, size_t x_stride,
                    uint32_t x_rows, float *y, size_t y_stride, void *scratch)
{
    uint32_t threads = xp_pool_threads(pool);
    uint64_t work = (uint64_t)x_rows * w->rows * w->columns;
    if (threads == 1 || work < MATMUL_SINGLE_LIMIT || w->rows < 2 * KERNELS_SPLIT) {
        kernels_matmul_range(w, x, x_stride, x_rows, y, y_stride, 0, w->rows, scratch);
        return;
    }
    matmul_job_t job = {.w = w,
                        .x = x,
                        .y = y,
                        .x_stride = x_stride,
                        .y_stride = y_stride,
                        .x_rows = x_rows,
                        .chunk = kernels_split_chunk(w->rows, threads),
                        .scratch = scratch};
    xp_pool_run(pool, matmul_member, &job);
}
