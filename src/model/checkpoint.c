/* SPDX-License-Identifier: MIT */
/*
 * A checkpoint as named tensors: opening, looking up, checking, reading. An opened checkpoint is
 * immutable; reading uses pread(2) into the caller's memory (and a bounded scratch where rows must
 * be cut or put in another order), so any number of threads may read at once. It never maps a file.
 */
#include "model/checkpoint.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "model/checkpoint_private.h"
#include "model/convert.h"
#include "model/source.h"

/* Scratch for one pass over rows that need cutting or reordering. */
#define CHECKPOINT_SCRATCH_BYTES (1u << 20)
/* A column range at least this wide is read by itself rather than cut out of whole rows. */
#define CHECKPOINT_WIDE_SLICE_BYTES (16u << 10)

static const char *const ggml_names[] = {
    "F32",     "F16",    "Q4_0",    "Q4_1",  "4",      "5",     "Q5_0",  "Q5_1",
    "Q8_0",    "Q8_1",   "Q2_K",    "Q3_K",  "Q4_K",   "Q5_K",  "Q6_K",  "Q8_K",
    "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS",
    "I8",      "I16",    "I32",     "I64",   "F64",    "IQ1_M", "BF16",
};

/* ---- Building ---------------------------------------------------------------------------------
 */

xp_status_t checkpoint_add_file(checkpoint_t *checkpoint, const char *path, uint32_t *file_out,
                                uint64_t *bytes_out)
{
    struct stat info;
    uint32_t count = checkpoint->file_count;
    if (count >= CHECKPOINT_MAX_FILES)
        return xp_fail(XP_INVALID, "%s: more than %d files in one checkpoint", path,
                       CHECKPOINT_MAX_FILES);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return xp_fail_errno(errno == ENOENT ? XP_NOT_FOUND : XP_IO, "cannot open %s", path);
    if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
        close(fd);
        return xp_fail(XP_INVALID, "%s is no regular file", path);
    }
    char **paths = realloc(checkpoint->paths, (count + 1) * sizeof(*paths));
    if (paths)
        checkpoint->paths = paths;
    int *fds = realloc(checkpoint->fds, (count + 1) * sizeof(*fds));
    if (fds)
        checkpoint->fds = fds;
    char *copy = strdup(path);
    if (!paths || !fds || !copy) {
        free(copy);
        close(fd);
        return xp_fail(XP_NO_MEMORY, "%s: no memory to open the file", path);
    }
    paths[count] = copy;
    fds[count] = fd;
    checkpoint->file_count = count + 1;
    *file_out = count;
    *bytes_out = (uint64_t)info.st_size;
    return XP_OK;
}

/* The layer number of "model.layers.N.rest", and where the rest begins; NULL for other names. */
static const char *checkpoint_layer_rest(const char *name, uint32_t *layer_out)
{
    static const char prefix[] = "model.layers.";
    if (strncmp(name, prefix, sizeof(prefix) - 1) != 0)
        return NULL;
    const char *digit = name + sizeof(prefix) - 1, *start = digit;
    uint32_t layer = 0;
    for (; *digit >= '0' && *digit <= '9' && digit - start < 8; digit++)
        layer = layer * 10 + (uint32_t)(*digit - '0');
    if (digit == start || *digit != '.')
        return NULL;
    *layer_out = layer;
    return digit + 1;
}

xp_status_t checkpoint_add_tensor(checkpoint_t *checkpoint, const char *name,
                                  const checkpoint_tensor_t *tensor, const char *type_name)
{
    uint32_t layer;
    if (checkpoint_layer_rest(name, &layer) && layer >= checkpoint->layers)
        return XP_OK;
    size_t length = strlen(name) + 1;
    if (checkpoint->entry_count == checkpoint->entry_capacity) {
        size_t capacity = checkpoint->entry_capacity ? checkpoint->entry_capacity * 2 : 256;
        checkpoint_entry_t *entries =
            realloc(checkpoint->entries, capacity * sizeof(*checkpoint->entries));
        if (!entries)
            return xp_fail(XP_NO_MEMORY, "no memory for %zu tensors", capacity);
        checkpoint->entries = entries;
        checkpoint->entry_capacity = capacity;
    }
    if (checkpoint->entry_count >= CHECKPOINT_MAX_TENSORS)
        return xp_fail(XP_INVALID, "%s: more than %d tensors in one checkpoint",
                       checkpoint->paths[tensor->file], CHECKPOINT_MAX_TENSORS);
    if (checkpoint->names_capacity - checkpoint->names_length < length) {
        size_t capacity = checkpoint->names_capacity * 2 + 4096 + length;
        char *names = realloc(checkpoint->names, capacity);
        if (!names)
            return xp_fail(XP_NO_MEMORY, "no memory for %zu bytes of tensor names", capacity);
        checkpoint->names = names;
        checkpoint->names_capacity = capacity;
    }
    memcpy(checkpoint->names + checkpoint->names_length, name, length);
    checkpoint_entry_t *entry = &checkpoint->entries[checkpoint->entry_count++];
    entry->tensor = *tensor;
    entry->tensor.name = (const char *)(uintptr_t)checkpoint->names_length;
    snprintf(entry->type_name, sizeof(entry->type_name), "%s", type_name);
    checkpoint->names_length += length;
    return XP_OK;
}

static int checkpoint_compare_entries(const void *left, const void *right)
{
    const checkpoint_entry_t *a = left, *b = right;
    return strcmp(a->tensor.name, b->tensor.name);
}

/* With tied embeddings one matrix serves twice. Files may hold it under either name or under both
 * (safetensors drops the second of two shared tensors, whichever that is), so it is always listed
 * as the embedding and never as the head. */
static void checkpoint_tie(checkpoint_t *checkpoint)
{
    static const char embedding_name[] = "model.embed_tokens.weight";
    checkpoint_entry_t *embedding = NULL, *head = NULL;
    for (size_t i = 0; i < checkpoint->entry_count; i++) {
        checkpoint_entry_t *entry = &checkpoint->entries[i];
        if (strcmp(entry->tensor.name, embedding_name) == 0)
            embedding = entry;
        else if (strcmp(entry->tensor.name, "lm_head.weight") == 0)
            head = entry;
    }
    if (head && embedding)
        *head = checkpoint->entries[--checkpoint->entry_count];
    else if (head)
        head->tensor.name = embedding_name;
}

static xp_status_t checkpoint_finish(checkpoint_t *checkpoint)
{
    for (size_t i = 0; i < checkpoint->entry_count; i++) {
        checkpoint_tensor_t *tensor = &checkpoint->entries[i].tensor;
        tensor->name = checkpoint->names + (uintptr_t)tensor->name;
    }
    if (checkpoint->tied)
        checkpoint_tie(checkpoint);
    if (checkpoint->entry_count)
        qsort(checkpoint->entries, checkpoint->entry_count, sizeof(*checkpoint->entries),
              checkpoint_compare_entries);
    for (size_t i = 1; i < checkpoint->entry_count; i++) {
        const checkpoint_tensor_t *tensor = &checkpoint->entries[i].tensor;
        if (strcmp(checkpoint->entries[i - 1].tensor.name, tensor->name) == 0)
            return xp_fail(XP_INVALID, "%s: tensor \"%s\" appears twice",
                           checkpoint->paths[tensor->file], tensor->name);
    }
    return XP_OK;
}

xp_status_t checkpoint_open(const char *path, const model_spec_t *spec,
                            checkpoint_t **checkpoint_out)
{
    xp_status_t status;
    model_source_t *source = calloc(1, sizeof(*source));
    checkpoint_t *checkpoint = calloc(1, sizeof(*checkpoint));
    if (!source || !checkpoint) {
        status = xp_fail(XP_NO_MEMORY, "%s: no memory to open the checkpoint", path);
        goto fail;
    }
    checkpoint->architecture = spec->architecture;
    checkpoint->layers = spec->layers;
    checkpoint->heads = spec->heads;
    checkpoint->kv_heads = spec->kv_heads;
    checkpoint->tied = spec->tied_embeddings;
    XP_TRY_GOTO(status, fail, model_source_resolve(path, source));
    XP_TRY_GOTO(status, fail,
                source->is_gguf ? checkpoint_load_gguf(checkpoint, source->path)
                                : checkpoint_load_safetensors(checkpoint, source->path));
    XP_TRY_GOTO(status, fail, checkpoint_finish(checkpoint));
    free(source);
    *checkpoint_out = checkpoint;
    return XP_OK;
fail:
    checkpoint_close(checkpoint);
    free(source);
    return status;
}

void checkpoint_close(checkpoint_t *checkpoint)
{
    if (!checkpoint)
        return;
    for (uint32_t i = 0; i < checkpoint->file_count; i++) {
        close(checkpoint->fds[i]);
        free(checkpoint->paths[i]);
    }
    free(checkpoint->fds);
    free(checkpoint->paths);
    free(checkpoint->entries);
    free(checkpoint->names);
    gguf_close(checkpoint->gguf);
    free(checkpoint);
}

/* ---- Looking up -------------------------------------------------------------------------------
 */

size_t checkpoint_tensor_count(const checkpoint_t *checkpoint)
{
    return checkpoint->entry_count;
}

const checkpoint_tensor_t *checkpoint_tensor_at(const checkpoint_t *checkpoint, size_t index)
{
    return index < checkpoint->entry_count ? &checkpoint->entries[index].tensor : NULL;
}

const checkpoint_tensor_t *checkpoint_tensor_find(const checkpoint_t *checkpoint, const char *name)
{
    size_t low = 0, high = checkpoint->entry_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        int order = strcmp(checkpoint->entries[middle].tensor.name, name);
        if (order == 0)
            return &checkpoint->entries[middle].tensor;
        if (order < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return NULL;
}

const gguf_file_t *checkpoint_gguf(const checkpoint_t *checkpoint)
{
    return checkpoint->gguf;
}

/* Edits between two names; names longer than the table are compared on their first part. */
static uint32_t checkpoint_distance(const char *a, const char *b)
{
    enum { LIMIT = 128 };
    uint32_t row[LIMIT + 1];
    size_t a_length = strnlen(a, LIMIT), b_length = strnlen(b, LIMIT);
    for (size_t j = 0; j <= b_length; j++)
        row[j] = (uint32_t)j;
    for (size_t i = 1; i <= a_length; i++) {
        uint32_t diagonal = row[0];
        row[0] = (uint32_t)i;
        for (size_t j = 1; j <= b_length; j++) {
            uint32_t replace = diagonal + (a[i - 1] != b[j - 1]);
            uint32_t shift = (row[j] < row[j - 1] ? row[j] : row[j - 1]) + 1;
            diagonal = row[j];
            row[j] = replace < shift ? replace : shift;
        }
    }
    return row[b_length];
}

static xp_status_t checkpoint_missing(const checkpoint_t *checkpoint, const char *name)
{
    const char *nearest = NULL;
    uint32_t best = UINT32_MAX;
    for (size_t i = 0; i < checkpoint->entry_count; i++) {
        uint32_t distance = checkpoint_distance(checkpoint->entries[i].tensor.name, name);
        if (distance < best) {
            best = distance;
            nearest = checkpoint->entries[i].tensor.name;
        }
    }
    const char *path = checkpoint->file_count ? checkpoint->paths[0] : "?";
    const char *more = checkpoint->file_count > 1 ? " and its sibling shards" : "";
    if (!nearest)
        return xp_fail(XP_INVALID, "%s%s: tensor \"%s\" is missing; there are no tensors", path,
                       more, name);
    return xp_fail(XP_INVALID, "%s%s: tensor \"%s\" is missing; the nearest name is \"%s\"", path,
                   more, name, nearest);
}

static void checkpoint_shape_text(uint32_t dimensions, const uint64_t *shape, char out[96])
{
    size_t length = (size_t)snprintf(out, 96, "[");
    for (uint32_t i = 0; i < dimensions && length < 90; i++)
        length +=
            (size_t)snprintf(out + length, 96 - length, "%s%" PRIu64, i ? ", " : "", shape[i]);
    if (length < 95)
        snprintf(out + length, 96 - length, "]");
}

/* Fails when the tensor's type is none of base/dtype.h. */
static xp_status_t checkpoint_check_type(const checkpoint_t *checkpoint,
                                         const checkpoint_tensor_t *tensor)
{
    if (tensor->dtype > XP_DTYPE_AUTO && tensor->dtype < XP_DTYPE_COUNT)
        return XP_OK;
    const char *type = ((const checkpoint_entry_t *)tensor)->type_name;
    unsigned number;
    if (sscanf(type, "ggml %u", &number) == 1 &&
        number < sizeof(ggml_names) / sizeof(ggml_names[0]))
        type = ggml_names[number];
    return xp_fail(
        XP_UNSUPPORTED, "%s: tensor \"%s\" has the type %s, which is not supported; known are %s",
        checkpoint->paths[tensor->file], tensor->name, type,
        checkpoint->gguf ? "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K, Q6_K" : "F32, F16, BF16");
}

xp_status_t checkpoint_tensor_require(const checkpoint_t *checkpoint, const char *name,
                                      uint32_t dimensions, const uint64_t *shape,
                                      const checkpoint_tensor_t **tensor_out)
{
    const checkpoint_tensor_t *tensor = checkpoint_tensor_find(checkpoint, name);
    if (!tensor)
        return checkpoint_missing(checkpoint, name);
    XP_TRY(checkpoint_check_type(checkpoint, tensor));
    bool equal = tensor->dimensions == dimensions;
    for (uint32_t i = 0; equal && i < dimensions; i++)
        equal = tensor->shape[i] == shape[i];
    if (!equal) {
        char found[96], wanted[96];
        checkpoint_shape_text(tensor->dimensions, tensor->shape, found);
        checkpoint_shape_text(dimensions, shape, wanted);
        return xp_fail(XP_INVALID, "%s: tensor \"%s\" has the shape %s, wanted %s",
                       checkpoint->paths[tensor->file], name, found, wanted);
    }
    *tensor_out = tensor;
    return XP_OK;
}

uint64_t checkpoint_bytes(const checkpoint_t *checkpoint, checkpoint_predicate_t predicate,
                          void *context)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < checkpoint->entry_count; i++) {
        if (!predicate || predicate(&checkpoint->entries[i].tensor, context))
            bytes += checkpoint->entries[i].tensor.bytes;
    }
    return bytes;
}

bool checkpoint_tensor_is_ffn(const checkpoint_tensor_t *tensor)
{
    uint32_t layer;
    const char *rest = checkpoint_layer_rest(tensor->name, &layer);
    return rest && strncmp(rest, "mlp.", 4) == 0;
}

/* ---- Reading ----------------------------------------------------------------------------------
 */

xp_status_t checkpoint_pread(const checkpoint_t *checkpoint, uint32_t file, uint64_t offset,
                             uint64_t bytes, const char *what, void *out)
{
    char *at = out;
    while (bytes > 0) {
        size_t piece = bytes < (1u << 30) ? (size_t)bytes : (1u << 30);
        ssize_t got = pread(checkpoint->fds[file], at, piece, (off_t)offset);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return xp_fail_errno(XP_IO, "%s: cannot read %s", checkpoint->paths[file], what);
        if (got == 0)
            return xp_fail(XP_INVALID,
                           "%s: the file ends at byte %" PRIu64 ", inside %s (truncated?)",
                           checkpoint->paths[file], offset, what);
        at += got;
        offset += (uint64_t)got;
        bytes -= (uint64_t)got;
    }
    return XP_OK;
}

/* A tensor seen as a matrix: vectors are one row, and further dimensions run together. A permuted
 * vector (a bias) is a column of one-element rows, so that its order can be put back like rows. */
typedef struct checkpoint_matrix {
    uint64_t rows, columns;
} checkpoint_matrix_t;

static checkpoint_matrix_t checkpoint_as_matrix(const checkpoint_tensor_t *tensor)
{
    checkpoint_matrix_t matrix = {1, 1};
    if (tensor->dimensions == 1)
        matrix.columns = tensor->shape[0];
    if (tensor->dimensions >= 2) {
        matrix.rows = tensor->shape[0];
        for (uint32_t i = 1; i < tensor->dimensions; i++)
            matrix.columns *= tensor->shape[i];
    }
    return matrix;
}

/* Rows [first, first + rows) of a permuted matrix. GGUF stores the rows of each head as
 * (pair, half), Hugging Face as (half, pair): row half*d/2 + pair lies at pair*2 + half. */
static xp_status_t checkpoint_read_permuted(const checkpoint_t *checkpoint,
                                            const checkpoint_tensor_t *tensor, uint64_t all_rows,
                                            size_t row_bytes, uint64_t first, uint64_t rows,
                                            size_t skip_bytes, size_t take_bytes, char *out)
{
    uint64_t width = all_rows / tensor->permute_heads, half = width / 2;
    char *scratch = malloc(width * row_bytes);
    if (!scratch)
        return xp_fail(XP_NO_MEMORY, "%s: no memory to reorder tensor \"%s\"",
                       checkpoint->paths[tensor->file], tensor->name);
    xp_status_t status = XP_OK;
    uint64_t loaded = UINT64_MAX;
    for (uint64_t i = 0; i < rows; i++) {
        uint64_t row = first + i, head = row / width, within = row % width;
        if (head != loaded) {
            status = checkpoint_pread(checkpoint, tensor->file,
                                      tensor->offset + head * width * row_bytes, width * row_bytes,
                                      tensor->name, scratch);
            if (status != XP_OK)
                break;
            loaded = head;
        }
        uint64_t stored = within % half * 2 + within / half;
        memcpy(out + i * take_bytes, scratch + stored * row_bytes + skip_bytes, take_bytes);
    }
    free(scratch);
    return status;
}

/* Narrow column ranges are cut out of whole rows read many at a time; wide ones are read one by
 * one. */
static xp_status_t checkpoint_read_cut(const checkpoint_t *checkpoint,
                                       const checkpoint_tensor_t *tensor, size_t row_bytes,
                                       uint64_t first, uint64_t rows, size_t skip_bytes,
                                       size_t take_bytes, char *out)
{
    uint64_t at = tensor->offset + first * row_bytes;
    if (take_bytes >= CHECKPOINT_WIDE_SLICE_BYTES || row_bytes > CHECKPOINT_SCRATCH_BYTES) {
        for (uint64_t i = 0; i < rows; i++)
            XP_TRY(checkpoint_pread(checkpoint, tensor->file, at + i * row_bytes + skip_bytes,
                                    take_bytes, tensor->name, out + i * take_bytes));
        return XP_OK;
    }
    uint64_t batch = CHECKPOINT_SCRATCH_BYTES / row_bytes;
    batch = batch < rows ? batch : rows;
    char *scratch = malloc(batch * row_bytes);
    if (!scratch)
        return xp_fail(XP_NO_MEMORY, "%s: no memory to read tensor \"%s\"",
                       checkpoint->paths[tensor->file], tensor->name);
    xp_status_t status = XP_OK;
    for (uint64_t done = 0; done < rows && status == XP_OK; done += batch) {
        uint64_t count = rows - done < batch ? rows - done : batch;
        status = checkpoint_pread(checkpoint, tensor->file, at + done * row_bytes,
                                  count * row_bytes, tensor->name, scratch);
        for (uint64_t i = 0; i < count && status == XP_OK; i++)
            memcpy(out + (done + i) * take_bytes, scratch + i * row_bytes + skip_bytes, take_bytes);
    }
    free(scratch);
    return status;
}

xp_status_t checkpoint_read_rows(const checkpoint_t *checkpoint, const checkpoint_tensor_t *tensor,
                                 uint64_t first_row, uint64_t rows, uint64_t first_column,
                                 uint64_t columns, void *out)
{
    XP_TRY(checkpoint_check_type(checkpoint, tensor));
    checkpoint_matrix_t matrix = checkpoint_as_matrix(tensor);
    uint32_t block = xp_dtype_block_elements(tensor->dtype);
    if (first_row > matrix.rows || rows > matrix.rows - first_row ||
        first_column > matrix.columns || columns > matrix.columns - first_column)
        return xp_fail(XP_INVALID,
                       "%s: tensor \"%s\" is %" PRIu64 " x %" PRIu64 "; rows %" PRIu64 " + %" PRIu64
                       ", columns %" PRIu64 " + %" PRIu64 " do not lie in it",
                       checkpoint->paths[tensor->file], tensor->name, matrix.rows, matrix.columns,
                       first_row, rows, first_column, columns);
    if (first_column % block || columns % block)
        return xp_fail(XP_INVALID,
                       "%s: tensor \"%s\": columns %" PRIu64 " + %" PRIu64
                       " do not fall on the %s block of %u",
                       checkpoint->paths[tensor->file], tensor->name, first_column, columns,
                       xp_dtype_name(tensor->dtype), block);
    if (rows == 0 || columns == 0)
        return XP_OK;
    if (tensor->permute_heads && tensor->dimensions == 1) {
        size_t element = xp_dtype_block_bytes(tensor->dtype);
        return checkpoint_read_permuted(checkpoint, tensor, matrix.columns, element, first_column,
                                        columns, 0, element, out);
    }
    size_t row_bytes = xp_dtype_row_bytes(tensor->dtype, matrix.columns);
    size_t skip_bytes = xp_dtype_row_bytes(tensor->dtype, first_column);
    size_t take_bytes = xp_dtype_row_bytes(tensor->dtype, columns);
    if (tensor->permute_heads)
        return checkpoint_read_permuted(checkpoint, tensor, matrix.rows, row_bytes, first_row, rows,
                                        skip_bytes, take_bytes, out);
    if (take_bytes == row_bytes)
        return checkpoint_pread(checkpoint, tensor->file, tensor->offset + first_row * row_bytes,
                                rows * row_bytes, tensor->name, out);
    return checkpoint_read_cut(checkpoint, tensor, row_bytes, first_row, rows, skip_bytes,
                               take_bytes, out);
}

xp_status_t checkpoint_read_f32(const checkpoint_t *checkpoint, const checkpoint_tensor_t *tensor,
                                float *out)
{
    XP_TRY(checkpoint_check_type(checkpoint, tensor));
    checkpoint_matrix_t matrix = checkpoint_as_matrix(tensor);
    if (tensor->dtype == XP_DTYPE_F32)
        return checkpoint_read_rows(checkpoint, tensor, 0, matrix.rows, 0, matrix.columns, out);
    size_t row_bytes = xp_dtype_row_bytes(tensor->dtype, matrix.columns);
    /* A permuted tensor is read in whole heads, so that none is loaded twice. */
    uint64_t step =
        tensor->permute_heads && tensor->dimensions > 1 ? matrix.rows / tensor->permute_heads : 1;
    uint64_t batch = CHECKPOINT_SCRATCH_BYTES / (row_bytes ? row_bytes : 1) / step * step;
    batch = batch < step ? step : (batch > matrix.rows ? matrix.rows : batch);
    char *scratch = malloc(batch * row_bytes + 1);
    if (!scratch)
        return xp_fail(XP_NO_MEMORY, "%s: no memory to read tensor \"%s\"",
                       checkpoint->paths[tensor->file], tensor->name);
    xp_status_t status = XP_OK;
    for (uint64_t row = 0; row < matrix.rows && status == XP_OK; row += batch) {
        uint64_t count = matrix.rows - row < batch ? matrix.rows - row : batch;
        status = checkpoint_read_rows(checkpoint, tensor, row, count, 0, matrix.columns, scratch);
        if (status == XP_OK)
            convert_to_f32(tensor->dtype, scratch, count * matrix.columns,
                           out + row * matrix.columns);
    }
    free(scratch);
    return status;
}
