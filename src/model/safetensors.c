/* SPDX-License-Identifier: MIT */
/*
 * safetensors: one header, and a folder of one file or of shards with an index. Owns nothing past a
 * call. Rules are those of the format's description: an 8-byte little-endian length, that many
 * bytes of JSON, then data that the tensors cover without holes or overlaps. Sizes are checked
 * against shapes before anything is believed.
 */
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "model/checkpoint_private.h"
#include "model/source.h"

/* The reference implementation has the same limit. */
#define SAFETENSORS_MAX_HEADER_BYTES 100000000u
#define SAFETENSORS_MAX_INDEX_BYTES  (64u << 20)

static const struct {
    const char *name;
    xp_dtype_t dtype; /* XP_DTYPE_COUNT: known, not read by us */
    uint32_t bits;
} safetensors_types[] = {
    {"F32", XP_DTYPE_F32, 32},      {"F16", XP_DTYPE_F16, 16},      {"BF16", XP_DTYPE_BF16, 16},
    {"F64", XP_DTYPE_COUNT, 64},    {"I64", XP_DTYPE_COUNT, 64},    {"U64", XP_DTYPE_COUNT, 64},
    {"I32", XP_DTYPE_COUNT, 32},    {"U32", XP_DTYPE_COUNT, 32},    {"I16", XP_DTYPE_COUNT, 16},
    {"U16", XP_DTYPE_COUNT, 16},    {"I8", XP_DTYPE_COUNT, 8},      {"U8", XP_DTYPE_COUNT, 8},
    {"BOOL", XP_DTYPE_COUNT, 8},    {"F8_E4M3", XP_DTYPE_COUNT, 8}, {"F8_E5M2", XP_DTYPE_COUNT, 8},
    {"F8_E8M0", XP_DTYPE_COUNT, 8}, {"C64", XP_DTYPE_COUNT, 64},
};

typedef struct safetensors_span {
    uint64_t begin, end;
    const char *name;
} safetensors_span_t;

static int safetensors_compare_spans(const void *left, const void *right)
{
    const safetensors_span_t *a = left, *b = right;
    if (a->begin != b->begin)
        return a->begin > b->begin ? 1 : -1;
    return (a->end > b->end) - (a->end < b->end);
}

/* The data part must be covered from its first to its last byte. */
static xp_status_t safetensors_check_cover(safetensors_span_t *spans, size_t count, uint64_t bytes,
                                           const char *where)
{
    uint64_t at = 0;
    qsort(spans, count, sizeof(*spans), safetensors_compare_spans);
    for (size_t i = 0; i < count; i++) {
        if (spans[i].end > bytes)
            return xp_fail(XP_INVALID,
                           "%s: tensor \"%s\" ends at data byte %" PRIu64
                           ", but the file holds %" PRIu64 " (truncated?)",
                           where, spans[i].name, spans[i].end, bytes);
        if (spans[i].begin < at)
            return xp_fail(XP_INVALID, "%s: tensors \"%s\" and \"%s\" overlap", where,
                           spans[i - 1].name, spans[i].name);
        if (spans[i].begin > at)
            return xp_fail(XP_INVALID,
                           "%s: data bytes %" PRIu64 " to %" PRIu64
                           " before tensor \"%s\" belong to no tensor",
                           where, at, spans[i].begin, spans[i].name);
        at = spans[i].end;
    }
    if (at != bytes)
        return xp_fail(XP_INVALID,
                       "%s: the tensors end at data byte %" PRIu64 ", the file at %" PRIu64, where,
                       at, bytes);
    return XP_OK;
}

static xp_status_t safetensors_number(const json_t *value, const char *where, const char *name,
                                      const char *field, uint64_t *number_out)
{
    if (!json_is_integer(value) || json_integer_value(value) < 0)
        return xp_fail(XP_INVALID, "%s: tensor \"%s\": \"%s\" holds something that is no size",
                       where, name, field);
    *number_out = (uint64_t)json_integer_value(value);
    return XP_OK;
}

static xp_status_t safetensors_tensor(const json_t *value, const char *where, const char *name,
                                      uint64_t data_begin, checkpoint_tensor_t *tensor,
                                      char type_name[16], safetensors_span_t *span)
{
    const json_t *type = json_object_get(value, "dtype");
    const json_t *shape = json_object_get(value, "shape");
    const json_t *offsets = json_object_get(value, "data_offsets");
    if (!json_is_string(type) || !json_is_array(shape) || !json_is_array(offsets) ||
        json_array_size(offsets) != 2)
        return xp_fail(XP_INVALID,
                       "%s: tensor \"%s\" lacks a \"dtype\" string, a \"shape\" array or two "
                       "\"data_offsets\"",
                       where, name);
    snprintf(type_name, 16, "%s", json_string_value(type));
    uint32_t bits = 0;
    tensor->dtype = XP_DTYPE_COUNT;
    for (size_t i = 0; i < sizeof(safetensors_types) / sizeof(safetensors_types[0]); i++) {
        if (strcmp(json_string_value(type), safetensors_types[i].name) == 0) {
            tensor->dtype = safetensors_types[i].dtype;
            bits = safetensors_types[i].bits;
        }
    }
    uint64_t elements = 1;
    size_t dimensions = json_array_size(shape);
    for (size_t i = 0; i < dimensions; i++) {
        uint64_t size = 0;
        XP_TRY(safetensors_number(json_array_get(shape, i), where, name, "shape", &size));
        if (__builtin_mul_overflow(elements, size, &elements) || elements > (1ull << 56))
            return xp_fail(XP_INVALID, "%s: tensor \"%s\" has an impossible shape", where, name);
        if (i < CHECKPOINT_MAX_DIMENSIONS)
            tensor->shape[i] = size;
    }
    tensor->dimensions = (uint32_t)dimensions;
    if (dimensions > CHECKPOINT_MAX_DIMENSIONS) {
        /* Nothing of ours has so many; it is an error only if somebody asks for it. */
        tensor->dtype = XP_DTYPE_COUNT;
        tensor->dimensions = 0;
        snprintf(type_name, 16, "%.5s[%zu-d]", json_string_value(type), dimensions);
    }
    XP_TRY(
        safetensors_number(json_array_get(offsets, 0), where, name, "data_offsets", &span->begin));
    XP_TRY(safetensors_number(json_array_get(offsets, 1), where, name, "data_offsets", &span->end));
    if (span->end < span->begin)
        return xp_fail(XP_INVALID, "%s: tensor \"%s\" ends before it begins", where, name);
    if (bits && (span->end - span->begin) != elements * (bits / 8))
        return xp_fail(XP_INVALID,
                       "%s: tensor \"%s\" takes %" PRIu64 " bytes, but its shape and type %s need "
                       "%" PRIu64,
                       where, name, span->end - span->begin, json_string_value(type),
                       elements * (bits / 8));
    span->name = name;
    tensor->bytes = span->end - span->begin;
    tensor->offset = data_begin + span->begin;
    return XP_OK;
}

xp_status_t safetensors_parse(const char *header, size_t length, uint64_t file_bytes,
                              const char *where, safetensors_visit_t visit, void *context)
{
    json_error_t error;
    safetensors_span_t *spans = NULL;
    xp_status_t status;
    if (length == 0 || header[0] != '{')
        return xp_fail(XP_INVALID, "%s: the header does not begin with {", where);
    if (file_bytes < 8 || file_bytes - 8 < length)
        return xp_fail(XP_INVALID, "%s: the header of %zu bytes does not fit in the file", where,
                       length);
    json_t *root = json_loadb(header, length, JSON_REJECT_DUPLICATES, &error);
    if (!root)
        return xp_fail(XP_INVALID, "%s: the header is not valid JSON (byte %d): %s", where,
                       error.position, error.text);
    size_t count = 0;
    if (json_object_size(root) > CHECKPOINT_MAX_TENSORS) {
        status = xp_fail(XP_INVALID, "%s: %zu tensors, the limit is %d", where,
                         json_object_size(root), CHECKPOINT_MAX_TENSORS);
        goto done;
    }
    spans = malloc((json_object_size(root) + 1) * sizeof(*spans));
    if (!spans) {
        status =
            xp_fail(XP_NO_MEMORY, "%s: no memory for %zu tensors", where, json_object_size(root));
        goto done;
    }
    const char *name;
    json_t *value;
    json_object_foreach(root, name, value)
    {
        checkpoint_tensor_t tensor = {0};
        char type_name[16];
        if (strcmp(name, "__metadata__") == 0)
            continue;
        if (strlen(name) > CHECKPOINT_MAX_NAME) {
            status = xp_fail(XP_INVALID, "%s: a tensor name is longer than %d bytes", where,
                             CHECKPOINT_MAX_NAME);
            goto done;
        }
        XP_TRY_GOTO(
            status, done,
            safetensors_tensor(value, where, name, 8 + length, &tensor, type_name, &spans[count]));
        count++;
        XP_TRY_GOTO(status, done, visit(context, name, &tensor, type_name));
    }
    status = safetensors_check_cover(spans, count, file_bytes - 8 - length, where);
done:
    free(spans);
    json_decref(root);
    return status;
}

/* ---- Files ------------------------------------------------------------------------------------
 */

typedef struct safetensors_file {
    checkpoint_t *checkpoint;
    const char *path;
    uint32_t file;
    const json_t *weight_map; /* NULL without an index */
    const char *shard;        /* this file's name in the map */
    size_t taken;
} safetensors_file_t;

static xp_status_t safetensors_take(void *context, const char *name,
                                    const checkpoint_tensor_t *tensor, const char *type_name)
{
    safetensors_file_t *file = context;
    checkpoint_tensor_t placed = *tensor;
    if (file->weight_map) {
        /* A tensor the index places elsewhere, or does not know, is not part of the model. */
        const char *shard = json_string_value(json_object_get(file->weight_map, name));
        if (!shard || strcmp(shard, file->shard) != 0)
            return XP_OK;
    }
    placed.file = file->file;
    file->taken++;
    return checkpoint_add_tensor(file->checkpoint, name, &placed, type_name);
}

static xp_status_t safetensors_load_file(safetensors_file_t *file)
{
    uint64_t bytes = 0;
    uint8_t word[8];
    char *header = NULL;
    XP_TRY(checkpoint_add_file(file->checkpoint, file->path, &file->file, &bytes));
    if (bytes < 8)
        return xp_fail(XP_INVALID, "%s: %" PRIu64 " bytes are no safetensors file (truncated?)",
                       file->path, bytes);
    XP_TRY(checkpoint_pread(file->checkpoint, file->file, 0, 8, "the header", word));
    uint64_t length = 0;
    for (int i = 0; i < 8; i++)
        length |= (uint64_t)word[i] << (8 * i);
    if (length > SAFETENSORS_MAX_HEADER_BYTES || length > bytes - 8)
        return xp_fail(XP_INVALID,
                       "%s: the header claims %" PRIu64 " bytes, but the file has %" PRIu64
                       " and the limit is %u (truncated, or no safetensors file?)",
                       file->path, length, bytes, SAFETENSORS_MAX_HEADER_BYTES);
    header = malloc(length + 1);
    if (!header)
        return xp_fail(XP_NO_MEMORY, "%s: no memory for a header of %" PRIu64 " bytes", file->path,
                       length);
    xp_status_t status =
        checkpoint_pread(file->checkpoint, file->file, 8, length, "the header", header);
    if (status == XP_OK)
        status = safetensors_parse(header, length, bytes, file->path, safetensors_take, file);
    free(header);
    return status;
}

/* Which tensors of the map the shards did not hold; called only when some are missing. */
static xp_status_t safetensors_report_missing(const checkpoint_t *checkpoint,
                                              const json_t *weight_map, const char *folder,
                                              const char *shard)
{
    const char *name;
    json_t *value;
    json_object_foreach((json_t *)weight_map, name, value)
    {
        if (strcmp(json_string_value(value), shard) != 0)
            continue;
        bool found = false;
        for (size_t i = checkpoint->entry_count; i > 0 && !found; i--)
            found = strcmp(checkpoint->names + (uintptr_t)checkpoint->entries[i - 1].tensor.name,
                           name) == 0;
        if (!found)
            return xp_fail(XP_INVALID,
                           "%s/%s: tensor \"%s\" is missing, though model.safetensors.index.json "
                           "places it there",
                           folder, shard, name);
    }
    return XP_OK;
}

static xp_status_t safetensors_check_map(const json_t *map, const char *where)
{
    const char *name;
    json_t *value;
    if (!json_is_object(map))
        return xp_fail(XP_INVALID, "%s: \"weight_map\" is missing or no object", where);
    if (json_object_size(map) > CHECKPOINT_MAX_TENSORS)
        return xp_fail(XP_INVALID, "%s: %zu tensors, the limit is %d", where, json_object_size(map),
                       CHECKPOINT_MAX_TENSORS);
    json_object_foreach((json_t *)map, name, value)
    {
        const char *file = json_string_value(value);
        if (!file)
            return xp_fail(XP_INVALID, "%s: tensor \"%s\" is placed in no file name", where, name);
        /* The index names files of its own folder; a path would reach out of it. */
        if (!file[0] || strchr(file, '/') || file[0] == '.')
            return xp_fail(XP_INVALID,
                           "%s: tensor \"%s\" is placed in \"%.128s\", which is no plain "
                           "file name",
                           where, name, file);
    }
    return XP_OK;
}

static xp_status_t safetensors_load_shards(checkpoint_t *checkpoint, const char *folder,
                                           const char *index_path, const json_t *map)
{
    char path[MODEL_PATH_MAX];
    const char *name;
    json_t *value;
    json_t *shards = json_object(); /* file name to the number of tensors placed there */
    xp_status_t status = XP_OK;
    if (!shards)
        return xp_fail(XP_NO_MEMORY, "%s: no memory for the shard list", index_path);
    json_object_foreach((json_t *)map, name, value)
    {
        const char *shard = json_string_value(value);
        json_int_t count = json_integer_value(json_object_get(shards, shard));
        if (json_object_set_new(shards, shard, json_integer(count + 1)) != 0) {
            status = xp_fail(XP_NO_MEMORY, "%s: no memory for the shard list", index_path);
            goto done;
        }
    }
    json_object_foreach(shards, name, value)
    {
        XP_TRY_GOTO(status, done, model_source_join(folder, name, path));
        safetensors_file_t file = {
            .checkpoint = checkpoint, .path = path, .weight_map = map, .shard = name};
        status = safetensors_load_file(&file);
        if (status == XP_NOT_FOUND)
            status = xp_fail_context(XP_INVALID, "%s names a shard that is not there", index_path);
        if (status != XP_OK)
            goto done;
        if (file.taken != (size_t)json_integer_value(value))
            XP_TRY_GOTO(status, done, safetensors_report_missing(checkpoint, map, folder, name));
    }
done:
    json_decref(shards);
    return status;
}

xp_status_t checkpoint_load_safetensors(checkpoint_t *checkpoint, const char *folder)
{
    char path[MODEL_PATH_MAX];
    char *text = NULL;
    size_t length = 0;
    json_error_t error;
    json_t *root = NULL;
    XP_TRY(model_source_join(folder, "model.safetensors", path));
    safetensors_file_t single = {.checkpoint = checkpoint, .path = path};
    xp_status_t status = safetensors_load_file(&single);
    if (status != XP_NOT_FOUND)
        return status;
    XP_TRY(model_source_join(folder, "model.safetensors.index.json", path));
    status = xp_file_read(path, SAFETENSORS_MAX_INDEX_BYTES, &text, &length);
    if (status == XP_NOT_FOUND)
        return xp_fail(XP_NOT_FOUND,
                       "%s holds neither model.safetensors nor model.safetensors.index.json",
                       folder);
    if (status != XP_OK)
        return status;
    root = json_loadb(text, length, JSON_REJECT_DUPLICATES, &error);
    if (!root) {
        status = xp_fail(XP_INVALID, "%s:%d:%d: not valid JSON: %s", path, error.line, error.column,
                         error.text);
        goto done;
    }
    const json_t *map = json_object_get(root, "weight_map");
    XP_TRY_GOTO(status, done, safetensors_check_map(map, path));
    status = safetensors_load_shards(checkpoint, folder, path, map);
done:
    json_decref(root);
    free(text);
    return status;
}
