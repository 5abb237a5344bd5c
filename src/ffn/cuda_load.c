/* SPDX-License-Identifier: MIT */
/*
 * Parallel readers from a checkpoint into device memory.
 *
 * Each reader takes the next matrix from a counter and brings it over in pieces of whole rows: read
 * this shard's rows or columns from the file straight into pinned memory (through a buffer where
 * type or width change), queue the copy, go on with the other of its two pieces. So files and bus
 * work at once, and host memory beyond that is bounded: three pieces a reader. Nothing else of the
 * checkpoint is read. Readers live for one cuda_shard_load(); no kernel spins on the device then.
 */
#include "ffn/cuda_load.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ffn/dummy.h"
#include "ffn/load_share.h"
#include "kernels/kernels.h"

#define LOAD_PIECE_BYTES  ((uint64_t)8 << 20)
#define LOAD_PIECES       2
#define LOAD_MAX_READERS  32
#define LOAD_LIMIT_NS     (120 * XP_NS_PER_S) /* for what was queued */
#define LOAD_FILL_BATCH   256                 /* launches queued at once */
#define LOAD_FILL_THREADS 256
#define LOAD_FILL_BLOCKS  2048

typedef struct load_job {
    const cuda_loader_t *loader;
    load_share_t share;
    const checkpoint_t *checkpoint;
    const cuda_layout_t *layout;
    const cuda_shard_t *shard;
    uint64_t piece_bytes;
} load_job_t;

typedef struct load_reader {
    load_job_t *job;
    pthread_t thread;
    bool started;
    uint8_t *piece[LOAD_PIECES]; /* pinned */
    cuda_stream_t stream[LOAD_PIECES];
    uint32_t turn;
    uint8_t *buffer; /* of file rows that are converted or padded */
} load_reader_t;

static xp_status_t load_wait(const cuda_device_t *device, cuda_stream_t stream)
{
    const xp_clock_t clock = xp_clock_system();
    return cuda_stream_wait(device, stream, &clock, xp_monotonic_ns() + LOAD_LIMIT_NS);
}

/* Rows [row, row + rows) of the item as the device holds them, into `out`. */
static xp_status_t load_compose(load_reader_t *reader, const layout_item_t *item,
                                const cuda_item_t *placed, uint64_t row, uint64_t rows,
                                uint8_t *out)
{
    const load_job_t *job = reader->job;
    const xp_dtype_t found = item->tensor->dtype, wanted = cuda_dtype_plain(placed->dtype);
    const uint32_t rank = job->share.install->tp_rank;
    const uint64_t first_row = item->axis == LAYOUT_ROWS ? (uint64_t)rank * item->rows : 0;
    const uint64_t first_column = item->axis == LAYOUT_COLUMNS ? (uint64_t)rank * item->columns : 0;
    const size_t pitch = xp_dtype_row_bytes(wanted, placed->columns);
    const size_t found_bytes = xp_dtype_row_bytes(found, item->columns);
    const size_t live_bytes = xp_dtype_row_bytes(wanted, item->columns);
    uint64_t live = row < item->rows ? item->rows - row : 0;
    live = live < rows ? live : rows;
    const bool straight = found == wanted && live_bytes == pitch;
    if (live)
        XP_TRY(checkpoint_read_rows(job->checkpoint, item->tensor, first_row + row, live,
                                    first_column, item->columns, straight ? out : reader->buffer));
    for (uint64_t r = 0; !straight && r < live; r++) {
        if (found == wanted)
            memcpy(out + r * pitch, reader->buffer + r * found_bytes, live_bytes);
        else
            kernels_convert(found, reader->buffer + r * found_bytes, wanted, out + r * pitch,
                            item->columns);
        memset(out + r * pitch + live_bytes, 0, pitch - live_bytes);
    }
    memset(out + live * pitch, 0, (rows - live) * pitch);
    return XP_OK;
}

static xp_status_t load_item(load_reader_t *reader, size_t index)
{
    load_job_t *job = reader->job;
    const layout_item_t *item = &job->layout->layout.items[index];
    const cuda_item_t *placed = &job->layout->items[index];
    const cuda_device_t *device = job->loader->device;
    const uint64_t pitch = placed->bytes / placed->rows, step = job->piece_bytes / pitch;
    for (uint64_t row = 0; row < placed->rows && !atomic_load(&job->share.failed); row += step) {
        const uint64_t rows = placed->rows - row < step ? placed->rows - row : step;
        uint8_t *piece = reader->piece[reader->turn];
        cuda_stream_t stream = reader->stream[reader->turn];
        reader->turn = (reader->turn + 1) % LOAD_PIECES;
        XP_TRY(load_wait(device, stream));
        if (item->role == LAYOUT_BIAS)
            XP_TRY(checkpoint_read_f32(job->checkpoint, item->tensor, (float *)piece));
        else
            XP_TRY(load_compose(reader, item, placed, row, rows, piece));
        XP_TRY(CUDA_CALL(device->driver, cuMemcpyHtoDAsync,
                         job->shard->base[placed->block] + placed->offset + row * pitch, piece,
                         rows * pitch, stream));
        load_share_report(&job->share, rows * pitch);
    }
    return XP_OK;
}

static void reader_fini(load_reader_t *reader)
{
    const cuda_device_t *device = reader->job->loader->device;
    for (uint32_t i = 0; i < LOAD_PIECES; i++)
        cuda_stream_destroy(device, reader->stream[i]);
    cuda_host_free(device, reader->piece[0]);
    free(reader->buffer);
}

/* By the reader's own thread: pinning takes a good part of what reading a small shard does. */
static xp_status_t reader_init(load_reader_t *reader)
{
    const load_job_t *job = reader->job;
    const cuda_device_t *device = job->loader->device;
    void *pinned;
    /* F32 files have twice the bytes of a piece. */
    reader->buffer = malloc(2 * job->piece_bytes);
    if (!reader->buffer)
        return xp_fail(XP_NO_MEMORY, "no memory for a read buffer of %llu bytes",
                       (unsigned long long)(2 * job->piece_bytes));
    XP_TRY(cuda_host_alloc(device, LOAD_PIECES * job->piece_bytes, &pinned));
    for (uint32_t i = 0; i < LOAD_PIECES; i++)
        reader->piece[i] = (uint8_t *)pinned + i * job->piece_bytes;
    for (uint32_t i = 0; i < LOAD_PIECES; i++)
        XP_TRY(cuda_stream_create(device, false, &reader->stream[i]));
    return XP_OK;
}

static void *load_read(void *context)
{
    load_reader_t *reader = context;
    load_job_t *job = reader->job;
    xp_status_t status = cuda_device_use(job->loader->device);
    while (status == XP_OK && !atomic_load(&job->share.failed)) {
        size_t index = atomic_fetch_add(&job->share.next, 1);
        if (index >= job->layout->layout.count)
            break;
        if (!reader->buffer)
            status = reader_init(reader);
        if (status == XP_OK)
            status = load_item(reader, index);
    }
    for (uint32_t i = 0; i < LOAD_PIECES && status == XP_OK && reader->buffer; i++)
        status = load_wait(job->loader->device, reader->stream[i]);
    if (status != XP_OK)
        load_share_fail(&job->share, status);
    reader_fini(reader);
    return NULL;
}

/* A piece holds at least one row of every matrix, and no more than a small shard needs. */
static uint64_t load_piece_bytes(const cuda_layout_t *layout)
{
    uint64_t bytes = layout->bytes < LOAD_PIECE_BYTES ? layout->bytes : LOAD_PIECE_BYTES;
    for (size_t i = 0; i < layout->layout.count; i++) {
        const uint64_t row = layout->items[i].bytes / layout->items[i].rows;
        bytes = bytes < row ? row : bytes;
    }
    return (bytes + 4095) / 4096 * 4096;
}

static xp_status_t load_read_all(load_job_t *job)
{
    load_reader_t reader[LOAD_MAX_READERS];
    memset(reader, 0, sizeof(reader));
    uint32_t readers = job->share.install->readers < 1 ? 1 : job->share.install->readers;
    if (readers > LOAD_MAX_READERS)
        readers = LOAD_MAX_READERS;
    job->piece_bytes = load_piece_bytes(job->layout);
    for (uint32_t i = 0; i < readers; i++)
        reader[i].job = job;
    /* Fewer threads than asked for only make it slower: the caller reads too. */
    for (uint32_t i = 1; i < readers; i++)
        reader[i].started = pthread_create(&reader[i].thread, NULL, load_read, &reader[i]) == 0;
    load_read(&reader[0]);
    for (uint32_t i = 1; i < readers; i++)
        if (reader[i].started)
            pthread_join(reader[i].thread, NULL);
    return load_share_status(&job->share);
}

static xp_status_t load_fill(const cuda_loader_t *loader, const load_job_t *job, size_t index)
{
    const layout_item_t *item = &job->layout->layout.items[index];
    const cuda_item_t *placed = &job->layout->items[index];
    const uint32_t rank = job->share.install->tp_rank;
    cuda_address_t to = job->shard->base[placed->block] + placed->offset;
    uint32_t dtype = placed->dtype, padded_rows = placed->rows, pitch = placed->columns;
    uint32_t rows = item->rows, columns = item->columns;
    uint64_t first_row = item->axis == LAYOUT_ROWS ? (uint64_t)rank * item->rows : 0;
    uint64_t first_column = item->axis == LAYOUT_COLUMNS ? (uint64_t)rank * item->columns : 0;
    uint64_t whole_columns = item->whole_columns, seed = ffn_dummy_seed(item->name);
    float scale = ffn_dummy_scale(item->whole_columns);
    void *parameters[] = {&to,        &dtype,        &padded_rows,   &pitch, &rows, &columns,
                          &first_row, &first_column, &whole_columns, &seed,  &scale};
    const uint64_t blocks = (uint64_t)padded_rows * pitch / (LOAD_FILL_THREADS * 4) + 1;
    return cuda_launch(loader->device, loader->fill,
                       blocks < LOAD_FILL_BLOCKS ? (uint32_t)blocks : LOAD_FILL_BLOCKS,
                       LOAD_FILL_THREADS, loader->stream, parameters);
}

static xp_status_t load_fill_all(load_job_t *job)
{
    const size_t count = job->layout->layout.count;
    uint64_t bytes = 0;
    for (size_t i = 0; i < count; i++) {
        XP_TRY(load_fill(job->loader, job, i));
        bytes += job->layout->items[i].bytes;
        if (i % LOAD_FILL_BATCH == LOAD_FILL_BATCH - 1 || i + 1 == count) {
            XP_TRY(load_wait(job->loader->device, job->loader->stream));
            load_share_report(&job->share, bytes);
            bytes = 0;
        }
    }
    return XP_OK;
}

static xp_status_t shard_digest(const cuda_loader_t *loader, const cuda_shard_t *shard,
                                uint64_t *content_out)
{
    const cuda_driver_t *driver = loader->device->driver;
    cuda_address_t word = loader->word;
    uint64_t first = 0;
    *loader->word_staged = 0;
    XP_TRY(CUDA_CALL(driver, cuMemcpyHtoDAsync, word, loader->word_staged, 8, loader->stream));
    for (uint32_t b = 0; b < shard->blocks; b++) {
        cuda_address_t at = shard->base[b];
        uint64_t count = shard->bytes[b] / 8;
        void *parameters[] = {&at, &count, &first, &word};
        const uint64_t blocks = count / (LOAD_FILL_THREADS * 8) + 1;
        XP_TRY(cuda_launch(loader->device, loader->digest,
                           blocks < LOAD_FILL_BLOCKS ? (uint32_t)blocks : LOAD_FILL_BLOCKS,
                           LOAD_FILL_THREADS, loader->stream, parameters));
        first += count;
    }
    XP_TRY(CUDA_CALL(driver, cuMemcpyDtoHAsync, loader->word_staged, word, 8, loader->stream));
    XP_TRY(load_wait(loader->device, loader->stream));
    *content_out = *loader->word_staged;
    return XP_OK;
}

xp_status_t cuda_shard_load(const cuda_loader_t *loader, const ffn_install_t *install,
                            const checkpoint_t *checkpoint, const cuda_layout_t *layout,
                            cuda_shard_t *shard_out)
{
    cuda_shard_t shard = {.identity = cuda_layout_identity(layout, install)};
    load_job_t job = {.loader = loader,
                      .share = LOAD_SHARE(install, layout->bytes),
                      .checkpoint = checkpoint,
                      .layout = layout,
                      .shard = &shard};
    xp_status_t status;
    for (uint32_t b = 0; b < layout->blocks; b++) {
        XP_TRY_GOTO(status, failed,
                    cuda_block_create(loader->device, layout->block_bytes[b], &shard.block[b]));
        shard.base[b] = shard.block[b].address;
        shard.bytes[b] = layout->block_bytes[b];
        shard.blocks = b + 1;
        /* Between tensors too: the same files give the same sum, whenever they are read. */
        XP_TRY_GOTO(status, failed,
                    CUDA_CALL(loader->device->driver, cuMemsetD8Async, shard.base[b], 0,
                              shard.bytes[b], loader->stream));
    }
    XP_TRY_GOTO(status, failed, load_wait(loader->device, loader->stream));
    XP_TRY_GOTO(status, failed, checkpoint ? load_read_all(&job) : load_fill_all(&job));
    XP_TRY_GOTO(status, failed, shard_digest(loader, &shard, &shard.content));
    *shard_out = shard;
    return XP_OK;
failed:
    cuda_shard_release(&shard);
    return status;
}

static xp_status_t adopt_check(const cuda_layout_t *layout, uint64_t identity,
                               const ffn_cuda_weights_t *kept)
{
    if (kept->identity != identity || kept->count != layout->blocks)
        return xp_fail(XP_INVALID, "the kept weights are of another shard");
    for (uint32_t b = 0; b < kept->count; b++)
        if (kept->bytes[b] != layout->block_bytes[b])
            return xp_fail(XP_INVALID,
                           "allocation %u of the kept weights has %llu bytes; the shard's has %llu",
                           b, (unsigned long long)kept->bytes[b],
                           (unsigned long long)layout->block_bytes[b]);
    return XP_OK;
}

xp_status_t cuda_shard_adopt(const cuda_loader_t *loader, const ffn_install_t *install,
                             const cuda_layout_t *layout, const ffn_cuda_weights_t *kept,
                             cuda_shard_t *shard_out)
{
    cuda_shard_t shard = {.identity = cuda_layout_identity(layout, install)};
    xp_status_t status;
    XP_TRY(adopt_check(layout, shard.identity, kept));
    for (uint32_t b = 0; b < kept->count; b++) {
        XP_TRY_GOTO(
            status, failed,
            cuda_block_import(loader->device, kept->fd[b], kept->bytes[b], &shard.block[b]));
        shard.base[b] = shard.block[b].address;
        shard.bytes[b] = layout->block_bytes[b];
        shard.blocks = b + 1;
    }
    XP_TRY_GOTO(status, failed, shard_digest(loader, &shard, &shard.content));
    if (shard.content != kept->content) {
        status = xp_fail(XP_INVALID, "the kept weights are not what they were when complete");
        goto failed;
    }
    *shard_out = shard;
    return XP_OK;
failed:
    cuda_shard_release(&shard);
    return status;
}

xp_status_t cuda_shard_export(const cuda_shard_t *shard, ffn_cuda_weights_t *weights_out)
{
    ffn_cuda_weights_t weights = {.identity = shard->identity, .content = shard->content};
    for (uint32_t b = 0; b < shard->blocks; b++) {
        xp_status_t status =
            cuda_vmm_export(shard->block[b].device, shard->block[b].handle, &weights.fd[b]);
        if (status != XP_OK) {
            while (weights.count)
                close(weights.fd[--weights.count]);
            return status;
        }
        weights.count = b + 1;
    }
    memcpy(weights.bytes, shard->bytes, sizeof(weights.bytes));
    *weights_out = weights;
    return XP_OK;
}

void cuda_shard_release(cuda_shard_t *shard)
{
    for (uint32_t b = 0; b < FFN_CUDA_WEIGHT_BLOCKS; b++)
        cuda_block_destroy(&shard->block[b]);
    *shard = (cuda_shard_t){0};
}
