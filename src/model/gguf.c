/* SPDX-License-Identifier: MIT */
/*
 * GGUF container: header, metadata and tensor directory of versions 2 and 3, little endian. A
 * parsed file is immutable and may be used by several threads. It owns a copy of the front part of
 * the file (everything before the tensor data), into which its strings point, and never reads
 * tensor data.
 *
 * Layout, from the GGUF format description and the gguf Python package (gguf/gguf_reader.py):
 *   "GGUF" u32 version u64 tensors u64 pairs
 *   pairs:   string key, u32 type, value         string: u64 length, bytes
 *   tensors: string name, u32 dimensions, u64 shape[], u32 type, u64 offset in the data part
 *   padding to general.alignment, then the data part
 */
#include "model/gguf.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define GGUF_MAX_FRONT_BYTES (256ull << 20)
#define GGUF_FIRST_READ      (1ull << 20)
#define GGUF_MAX_PAIRS       65536
#define GGUF_MAX_TENSORS     262144
#define GGUF_MAX_KEY_BYTES   1024
#define GGUF_MAX_NAME_BYTES  256
#define GGUF_MAX_ELEMENTS    (1ull << 48)

enum {
    GGUF_UINT8 = 0,
    GGUF_INT8,
    GGUF_UINT16,
    GGUF_INT16,
    GGUF_UINT32,
    GGUF_INT32,
    GGUF_FLOAT32,
    GGUF_BOOL,
    GGUF_STRING,
    GGUF_ARRAY,
    GGUF_UINT64,
    GGUF_INT64,
    GGUF_FLOAT64,
    GGUF_TYPE_COUNT
};

static const struct {
    const char *name;
    uint32_t bytes; /* 0 for strings and arrays */
} gguf_types[GGUF_TYPE_COUNT] = {
    {"uint8", 1},  {"int8", 1},    {"uint16", 2},  {"int16", 2},  {"uint32", 4},
    {"int32", 4},  {"float32", 4}, {"bool", 1},    {"string", 0}, {"array", 0},
    {"uint64", 8}, {"int64", 8},   {"float64", 8},
};

typedef struct gguf_pair {
    const char *key; /* not NUL-terminated */
    uint32_t key_length;
    uint32_t type;
    uint32_t element_type; /* arrays */
    uint64_t count;        /* elements of an array, bytes of a string */
    const uint8_t *data;
    uint32_t *string_offsets; /* string arrays: where each length word lies, from `data` */
} gguf_pair_t;

struct gguf_file {
    char *path;
    uint8_t *front;
    gguf_pair_t *pairs;   /* in file order */
    uint32_t *pair_order; /* indices sorted by key */
    size_t pair_count;
    gguf_tensor_t *tensors;
    size_t tensor_count;
    char *names; /* NUL-terminated tensor names */
};

/* A reading position. `file_bytes` may be larger than `length`: then running out means that more of
 * the file must be read, which `short_read` records, and otherwise that the file is cut off. */
typedef struct gguf_cursor {
    const uint8_t *data;
    size_t length, at;
    uint64_t file_bytes;
    const char *where;
    bool short_read;
} gguf_cursor_t;

static xp_status_t gguf_need(gguf_cursor_t *cursor, uint64_t bytes, const char *what)
{
    if (bytes <= cursor->length - cursor->at)
        return XP_OK;
    if (bytes > cursor->file_bytes - cursor->at)
        return xp_fail(XP_INVALID,
                       "%s: %s at byte %zu needs %" PRIu64 " bytes, but the file ends at %" PRIu64
                       " (truncated?)",
                       cursor->where, what, cursor->at, bytes, cursor->file_bytes);
    cursor->short_read = true;
    return xp_fail(XP_INVALID, "%s: %s at byte %zu lies past the %zu bytes given", cursor->where,
                   what, cursor->at, cursor->length);
}

static uint64_t gguf_load(const uint8_t *data, uint32_t bytes)
{
    uint64_t value = 0;
    for (uint32_t i = 0; i < bytes; i++)
        value |= (uint64_t)data[i] << (8 * i);
    return value;
}

static xp_status_t gguf_take_word(gguf_cursor_t *cursor, uint32_t bytes, const char *what,
                                  uint64_t *value_out)
{
    XP_TRY(gguf_need(cursor, bytes, what));
    *value_out = gguf_load(cursor->data + cursor->at, bytes);
    cursor->at += bytes;
    return XP_OK;
}

static xp_status_t gguf_take_string(gguf_cursor_t *cursor, const char *what, uint64_t maximum,
                                    const char **text_out, uint64_t *length_out)
{
    uint64_t length = 0;
    size_t start = cursor->at;
    XP_TRY(gguf_take_word(cursor, 8, what, &length));
    if (length > maximum)
        return xp_fail(XP_INVALID,
                       "%s: %s at byte %zu claims %" PRIu64 " bytes, the limit is %" PRIu64,
                       cursor->where, what, start, length, maximum);
    XP_TRY(gguf_need(cursor, length, what));
    *text_out = (const char *)cursor->data + cursor->at;
    *length_out = length;
    cursor->at += length;
    return XP_OK;
}

/* Walks over a string array and records where each string lies, for random access later. */
static xp_status_t gguf_take_string_array(gguf_cursor_t *cursor, gguf_pair_t *pair)
{
    const char *text = NULL;
    uint64_t length = 0;
    size_t start = cursor->at;
    /* Each string takes at least its length word, so this bounds the table before it is made. */
    XP_TRY(gguf_need(cursor, pair->count * 8, "a string array"));
    pair->string_offsets = malloc(pair->count ? pair->count * sizeof(uint32_t) : 1);
    if (!pair->string_offsets)
        return xp_fail(XP_NO_MEMORY, "%s: no memory for an array of %" PRIu64 " strings",
                       cursor->where, pair->count);
    for (uint64_t i = 0; i < pair->count; i++) {
        pair->string_offsets[i] = (uint32_t)(cursor->at - start);
        XP_TRY(
            gguf_take_string(cursor, "a string of an array", GGUF_MAX_FRONT_BYTES, &text, &length));
    }
    return XP_OK;
}

static xp_status_t gguf_take_value(gguf_cursor_t *cursor, gguf_pair_t *pair)
{
    const char *text = NULL;
    uint64_t word = 0;
    XP_TRY(gguf_take_word(cursor, 4, "a value type", &word));
    if (word >= GGUF_TYPE_COUNT)
        return xp_fail(XP_INVALID, "%s: key \"%.*s\" has the unknown value type %" PRIu64,
                       cursor->where, (int)pair->key_length, pair->key, word);
    pair->type = (uint32_t)word;
    pair->data = cursor->data + cursor->at;
    if (pair->type == GGUF_STRING) {
        XP_TRY(
            gguf_take_string(cursor, "a string value", GGUF_MAX_FRONT_BYTES, &text, &pair->count));
        pair->data = (const uint8_t *)text;
        return XP_OK;
    }
    if (pair->type != GGUF_ARRAY) {
        XP_TRY(gguf_need(cursor, gguf_types[pair->type].bytes, "a value"));
        cursor->at += gguf_types[pair->type].bytes;
        return XP_OK;
    }
    XP_TRY(gguf_take_word(cursor, 4, "an array's element type", &word));
    XP_TRY(gguf_take_word(cursor, 8, "an array's length", &pair->count));
    if (word >= GGUF_TYPE_COUNT || word == GGUF_ARRAY)
        return xp_fail(XP_INVALID, "%s: key \"%.*s\" is an array of the unsupported type %" PRIu64,
                       cursor->where, (int)pair->key_length, pair->key, word);
    pair->element_type = (uint32_t)word;
    if (pair->count > GGUF_MAX_FRONT_BYTES)
        return xp_fail(XP_INVALID, "%s: key \"%.*s\" claims %" PRIu64 " elements", cursor->where,
                       (int)pair->key_length, pair->key, pair->count);
    pair->data = cursor->data + cursor->at;
    if (pair->element_type == GGUF_STRING)
        return gguf_take_string_array(cursor, pair);
    uint64_t bytes = pair->count * gguf_types[pair->element_type].bytes;
    XP_TRY(gguf_need(cursor, bytes, "an array"));
    cursor->at += bytes;
    return XP_OK;
}

static int gguf_compare_text(const char *a, size_t a_length, const char *b, size_t b_length)
{
    size_t shorter = a_length < b_length ? a_length : b_length;
    int order = memcmp(a, b, shorter);
    return order ? order : (a_length > b_length) - (a_length < b_length);
}

static int gguf_compare_pairs(const void *left, const void *right, void *context)
{
    const gguf_file_t *file = context;
    const gguf_pair_t *a = &file->pairs[*(const uint32_t *)left];
    const gguf_pair_t *b = &file->pairs[*(const uint32_t *)right];
    return gguf_compare_text(a->key, a->key_length, b->key, b->key_length);
}

static const gguf_pair_t *gguf_find(const gguf_file_t *file, const char *key)
{
    size_t low = 0, high = file->pair_count, length = strlen(key);
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        const gguf_pair_t *pair = &file->pairs[file->pair_order[middle]];
        int order = gguf_compare_text(pair->key, pair->key_length, key, length);
        if (order == 0)
            return pair;
        if (order < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return NULL;
}

static xp_status_t gguf_take_pairs(gguf_cursor_t *cursor, uint64_t count, gguf_file_t *file)
{
    if (count > GGUF_MAX_PAIRS)
        return xp_fail(XP_INVALID, "%s: the header claims %" PRIu64 " keys, the limit is %d",
                       cursor->where, count, GGUF_MAX_PAIRS);
    file->pairs = calloc(count ? count : 1, sizeof(*file->pairs));
    file->pair_order = calloc(count ? count : 1, sizeof(*file->pair_order));
    if (!file->pairs || !file->pair_order)
        return xp_fail(XP_NO_MEMORY, "%s: no memory for %" PRIu64 " keys", cursor->where, count);
    for (uint64_t i = 0; i < count; i++) {
        gguf_pair_t *pair = &file->pairs[i];
        uint64_t length = 0;
        XP_TRY(gguf_take_string(cursor, "a key", GGUF_MAX_KEY_BYTES, &pair->key, &length));
        pair->key_length = (uint32_t)length;
        file->pair_order[i] = (uint32_t)i;
        file->pair_count = i + 1; /* so that destroy sees the string table of a broken pair */
        XP_TRY(gguf_take_value(cursor, pair));
    }
    qsort_r(file->pair_order, count, sizeof(uint32_t), gguf_compare_pairs, file);
    for (uint64_t i = 1; i < count; i++) {
        if (gguf_compare_pairs(&file->pair_order[i - 1], &file->pair_order[i], file) == 0) {
            const gguf_pair_t *pair = &file->pairs[file->pair_order[i]];
            return xp_fail(XP_INVALID, "%s: the key \"%.*s\" appears twice", cursor->where,
                           (int)pair->key_length, pair->key);
        }
    }
    return XP_OK;
}

static xp_dtype_t gguf_dtype(uint32_t type)
{
    switch (type) {
    case 0:
        return XP_DTYPE_F32;
    case 1:
        return XP_DTYPE_F16;
    case 2:
        return XP_DTYPE_Q4_0;
    case 3:
        return XP_DTYPE_Q4_1;
    case 8:
        return XP_DTYPE_Q8_0;
    case 12:
        return XP_DTYPE_Q4_K;
    case 14:
        return XP_DTYPE_Q6_K;
    case 30:
        return XP_DTYPE_BF16;
    default:
        return XP_DTYPE_COUNT;
    }
}

static xp_status_t gguf_take_shape(gguf_cursor_t *cursor, gguf_tensor_t *tensor)
{
    uint64_t word = 0, elements = 1;
    XP_TRY(gguf_take_word(cursor, 4, "a tensor's dimension count", &word));
    if (word < 1 || word > 4)
        return xp_fail(XP_INVALID,
                       "%s: tensor \"%s\" has %" PRIu64 " dimensions, allowed are 1 to 4",
                       cursor->where, tensor->name, word);
    tensor->dimensions = (uint32_t)word;
    for (uint32_t i = 0; i < tensor->dimensions; i++) {
        XP_TRY(gguf_take_word(cursor, 8, "a tensor's shape", &word));
        if (word < 1 || word > GGUF_MAX_ELEMENTS / elements)
            return xp_fail(XP_INVALID, "%s: tensor \"%s\" has the impossible dimension %" PRIu64,
                           cursor->where, tensor->name, word);
        tensor->shape[i] = word;
        elements *= word;
    }
    XP_TRY(gguf_take_word(cursor, 4, "a tensor's type", &word));
    tensor->type = (uint32_t)word;
    tensor->dtype = gguf_dtype(tensor->type);
    if (tensor->dtype != XP_DTYPE_COUNT) {
        uint32_t block = xp_dtype_block_elements(tensor->dtype);
        if (tensor->shape[0] % block)
            return xp_fail(XP_INVALID,
                           "%s: tensor \"%s\" has rows of %" PRIu64 ", no multiple of the %s block "
                           "of %u",
                           cursor->where, tensor->name, tensor->shape[0],
                           xp_dtype_name(tensor->dtype), block);
        tensor->bytes = elements / block * xp_dtype_block_bytes(tensor->dtype);
    }
    return gguf_take_word(cursor, 8, "a tensor's offset", &tensor->offset);
}

/* Names are copied behind one another into file->names, NUL-terminated. */
static xp_status_t gguf_take_tensors(gguf_cursor_t *cursor, uint64_t count, gguf_file_t *file)
{
    /* name length, dimension count, one dimension, type, offset */
    enum { SMALLEST_ENTRY = 8 + 4 + 8 + 4 + 8 };
    if (count > GGUF_MAX_TENSORS)
        return xp_fail(XP_INVALID, "%s: the header claims %" PRIu64 " tensors, the limit is %d",
                       cursor->where, count, GGUF_MAX_TENSORS);
    XP_TRY(gguf_need(cursor, count * SMALLEST_ENTRY, "the tensor directory"));
    size_t names_capacity = cursor->length - cursor->at + 1, names_used = 0;
    file->tensors = calloc(count ? count : 1, sizeof(*file->tensors));
    file->names = malloc(names_capacity);
    if (!file->tensors || !file->names)
        return xp_fail(XP_NO_MEMORY, "%s: no memory for %" PRIu64 " tensors", cursor->where, count);
    for (uint64_t i = 0; i < count; i++) {
        gguf_tensor_t *tensor = &file->tensors[i];
        const char *name = NULL;
        uint64_t length = 0;
        XP_TRY(gguf_take_string(cursor, "a tensor name", GGUF_MAX_NAME_BYTES, &name, &length));
        if (length == 0 || memchr(name, '\0', length))
            return xp_fail(XP_INVALID, "%s: the name of tensor %" PRIu64 " is empty or holds NUL",
                           cursor->where, i);
        /* Each entry's fixed part is longer than the NUL, so the names always fit. */
        char *copy = file->names + names_used;
        memcpy(copy, name, length);
        copy[length] = '\0';
        names_used += length + 1;
        tensor->name = copy;
        XP_TRY(gguf_take_shape(cursor, tensor));
    }
    file->tensor_count = count;
    return XP_OK;
}

static int gguf_compare_offsets(const void *left, const void *right)
{
    const gguf_tensor_t *a = *(const gguf_tensor_t *const *)left;
    const gguf_tensor_t *b = *(const gguf_tensor_t *const *)right;
    return (a->offset > b->offset) - (a->offset < b->offset);
}

static int gguf_compare_names(const void *left, const void *right)
{
    const gguf_tensor_t *a = *(const gguf_tensor_t *const *)left;
    const gguf_tensor_t *b = *(const gguf_tensor_t *const *)right;
    return strcmp(a->name, b->name);
}

/* Makes offsets absolute and checks that the data of every tensor lies in the file, apart from
 * every other's. Sizes of types we do not read are unknown, so only their beginnings are checked.
 */
static xp_status_t gguf_check_tensors(const gguf_cursor_t *cursor, gguf_file_t *file)
{
    uint64_t alignment = 32;
    if (gguf_find(file, "general.alignment"))
        XP_TRY(gguf_get_u64(file, "general.alignment", &alignment));
    if (alignment == 0 || (alignment & (alignment - 1)) || alignment > (1u << 20))
        return xp_fail(XP_INVALID, "%s: \"general.alignment\" %" PRIu64 " is no power of two",
                       cursor->where, alignment);
    uint64_t base = (cursor->at + alignment - 1) & ~(alignment - 1);
    size_t count = file->tensor_count;
    const gguf_tensor_t **order = malloc(count ? count * sizeof(*order) : 1);
    if (!order)
        return xp_fail(XP_NO_MEMORY, "%s: no memory for %zu tensors", cursor->where, count);
    xp_status_t status = XP_OK;
    for (size_t i = 0; i < count && status == XP_OK; i++) {
        gguf_tensor_t *tensor = &file->tensors[i];
        order[i] = tensor;
        if (tensor->offset % alignment) {
            status = xp_fail(
                XP_INVALID, "%s: tensor \"%s\" has the offset %" PRIu64 ", no multiple of %" PRIu64,
                cursor->where, tensor->name, tensor->offset, alignment);
        } else if (base > cursor->file_bytes || tensor->offset > cursor->file_bytes - base ||
                   tensor->bytes > cursor->file_bytes - base - tensor->offset) {
            status = xp_fail(XP_INVALID,
                             "%s: tensor \"%s\" (offset %" PRIu64 ", %" PRIu64
                             " bytes) lies past the end of the file at %" PRIu64 " (truncated?)",
                             cursor->where, tensor->name, tensor->offset, tensor->bytes,
                             cursor->file_bytes);
        } else {
            tensor->offset += base;
        }
    }
    if (status == XP_OK) {
        qsort(order, count, sizeof(*order), gguf_compare_offsets);
        for (size_t i = 1; i < count && status == XP_OK; i++) {
            if (order[i - 1]->offset + order[i - 1]->bytes > order[i]->offset)
                status = xp_fail(XP_INVALID, "%s: tensors \"%s\" and \"%s\" overlap", cursor->where,
                                 order[i - 1]->name, order[i]->name);
        }
    }
    if (status == XP_OK) {
        qsort(order, count, sizeof(*order), gguf_compare_names);
        for (size_t i = 1; i < count && status == XP_OK; i++) {
            if (strcmp(order[i - 1]->name, order[i]->name) == 0)
                status = xp_fail(XP_INVALID, "%s: tensor \"%s\" appears twice", cursor->where,
                                 order[i]->name);
        }
    }
    free(order);
    return status;
}

static xp_status_t gguf_parse_front(gguf_cursor_t *cursor, gguf_file_t *file)
{
    uint64_t magic = 0, version = 0, tensors = 0, pairs = 0;
    XP_TRY(gguf_take_word(cursor, 4, "the magic number", &magic));
    if (magic != 0x46554747u)
        return xp_fail(XP_INVALID, "%s: no GGUF file (the first four bytes are not \"GGUF\")",
                       cursor->where);
    XP_TRY(gguf_take_word(cursor, 4, "the version", &version));
    if (version != 2 && version != 3)
        return xp_fail(
            XP_UNSUPPORTED, "%s: GGUF version %" PRIu64 " is not supported, only 2 and 3%s",
            cursor->where, version, (version & 0xffffu) == 0 && version ? " (big endian?)" : "");
    XP_TRY(gguf_take_word(cursor, 8, "the tensor count", &tensors));
    XP_TRY(gguf_take_word(cursor, 8, "the key count", &pairs));
    XP_TRY(gguf_take_pairs(cursor, pairs, file));
    XP_TRY(gguf_take_tensors(cursor, tensors, file));
    return gguf_check_tensors(cursor, file);
}

static void gguf_reset(gguf_file_t *file)
{
    for (size_t i = 0; i < file->pair_count; i++)
        free(file->pairs[i].string_offsets);
    free(file->pairs);
    free(file->pair_order);
    free(file->tensors);
    free(file->names);
    file->pairs = NULL;
    file->pair_order = NULL;
    file->pair_count = 0;
    file->tensors = NULL;
    file->tensor_count = 0;
    file->names = NULL;
}

void gguf_close(gguf_file_t *file)
{
    if (!file)
        return;
    gguf_reset(file);
    free(file->front);
    free(file->path);
    free(file);
}

static xp_status_t gguf_create(const char *where, gguf_file_t **file_out)
{
    gguf_file_t *file = calloc(1, sizeof(*file));
    if (file)
        file->path = strdup(where);
    if (!file || !file->path) {
        free(file);
        return xp_fail(XP_NO_MEMORY, "%s: no memory to open the file", where);
    }
    *file_out = file;
    return XP_OK;
}

xp_status_t gguf_parse(const void *data, size_t length, uint64_t file_bytes, const char *where,
                       gguf_file_t **file_out)
{
    gguf_file_t *file = NULL;
    XP_TRY(gguf_create(where, &file));
    file->front = malloc(length ? length : 1);
    if (!file->front) {
        gguf_close(file);
        return xp_fail(XP_NO_MEMORY, "%s: no memory for %zu bytes", where, length);
    }
    if (length)
        memcpy(file->front, data, length);
    gguf_cursor_t cursor = {.data = file->front,
                            .length = length,
                            .file_bytes = file_bytes < length ? length : file_bytes,
                            .where = where};
    xp_status_t status = gguf_parse_front(&cursor, file);
    if (status != XP_OK) {
        gguf_close(file);
        return status;
    }
    *file_out = file;
    return XP_OK;
}

static xp_status_t gguf_read_until(int fd, gguf_file_t *file, size_t have, size_t want)
{
    uint8_t *front = realloc(file->front, want);
    if (!front)
        return xp_fail(XP_NO_MEMORY, "%s: no memory for %zu bytes of metadata", file->path, want);
    file->front = front;
    while (have < want) {
        ssize_t got = pread(fd, front + have, want - have, (off_t)have);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return xp_fail_errno(XP_IO, "cannot read %s", file->path);
        if (got == 0)
            return xp_fail(XP_INVALID, "%s: the file became shorter while it was read", file->path);
        have += (size_t)got;
    }
    return XP_OK;
}

xp_status_t gguf_open(const char *path, gguf_file_t **file_out)
{
    gguf_file_t *file = NULL;
    struct stat info;
    xp_status_t status;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return xp_fail_errno(errno == ENOENT ? XP_NOT_FOUND : XP_IO, "cannot open %s", path);
    XP_TRY_GOTO(status, done, gguf_create(path, &file));
    if (fstat(fd, &info) != 0) {
        status = xp_fail_errno(XP_IO, "cannot stat %s", path);
        goto done;
    }
    if (!S_ISREG(info.st_mode)) {
        status = xp_fail(XP_INVALID, "%s is no regular file", path);
        goto done;
    }
    if (info.st_size == 0) {
        status = xp_fail(XP_INVALID, "%s is empty", path);
        goto done;
    }
    /* The front part's length is not written anywhere, so read more until it parses. Doubling keeps
     * the repeated work below twice the last pass. */
    uint64_t file_bytes = (uint64_t)info.st_size, have = 0, want = GGUF_FIRST_READ;
    for (;;) {
        want = want < file_bytes ? want : file_bytes;
        XP_TRY_GOTO(status, done, gguf_read_until(fd, file, have, want));
        have = want;
        gguf_cursor_t cursor = {
            .data = file->front, .length = have, .file_bytes = file_bytes, .where = path};
        status = gguf_parse_front(&cursor, file);
        if (status == XP_OK || !cursor.short_read)
            break;
        gguf_reset(file);
        if (want >= GGUF_MAX_FRONT_BYTES) {
            status = xp_fail(XP_INVALID, "%s: the metadata is larger than %llu bytes", path,
                             GGUF_MAX_FRONT_BYTES);
            break;
        }
        want *= 2;
    }
    if (status == XP_OK)
        xp_error_clear();
done:
    close(fd);
    if (status == XP_OK)
        *file_out = file;
    else
        gguf_close(file);
    return status;
}

/* ---- Access -----------------------------------------------------------------------------------
 */

static xp_status_t gguf_require(const gguf_file_t *file, const char *key,
                                const gguf_pair_t **pair_out)
{
    const gguf_pair_t *pair = gguf_find(file, key);
    if (!pair)
        return xp_fail(XP_NOT_FOUND, "%s: the key \"%s\" is missing", file->path, key);
    *pair_out = pair;
    return XP_OK;
}

static xp_status_t gguf_wrong_type(const gguf_file_t *file, const char *key, uint32_t type,
                                   const char *wanted)
{
    return xp_fail(XP_INVALID, "%s: the key \"%s\" is of type %s, wanted %s", file->path, key,
                   gguf_types[type].name, wanted);
}

static bool gguf_is_signed(uint32_t type)
{
    return type == GGUF_INT8 || type == GGUF_INT16 || type == GGUF_INT32 || type == GGUF_INT64;
}

static bool gguf_is_unsigned(uint32_t type)
{
    return type == GGUF_UINT8 || type == GGUF_UINT16 || type == GGUF_UINT32 || type == GGUF_UINT64;
}

static int64_t gguf_load_signed(const uint8_t *data, uint32_t type)
{
    uint32_t bits = gguf_types[type].bytes * 8;
    uint64_t value = gguf_load(data, bits / 8);
    if (bits < 64 && (value >> (bits - 1)))
        value |= ~0ull << bits;
    return (int64_t)value;
}

/* Any numeric type as a double; false for strings, arrays and booleans. */
static bool gguf_number(const uint8_t *data, uint32_t type, double *value_out)
{
    if (type == GGUF_FLOAT32) {
        uint32_t bits = (uint32_t)gguf_load(data, 4);
        float value;
        memcpy(&value, &bits, sizeof(value));
        *value_out = (double)value;
    } else if (type == GGUF_FLOAT64) {
        uint64_t bits = gguf_load(data, 8);
        memcpy(value_out, &bits, sizeof(*value_out));
    } else if (gguf_is_signed(type)) {
        *value_out = (double)gguf_load_signed(data, type);
    } else if (gguf_is_unsigned(type)) {
        *value_out = (double)gguf_load(data, gguf_types[type].bytes);
    } else {
        return false;
    }
    return true;
}

xp_status_t gguf_get_u64(const gguf_file_t *file, const char *key, uint64_t *value_out)
{
    const gguf_pair_t *pair = NULL;
    XP_TRY(gguf_require(file, key, &pair));
    if (gguf_is_signed(pair->type)) {
        int64_t value = gguf_load_signed(pair->data, pair->type);
        if (value < 0)
            return xp_fail(XP_INVALID, "%s: the key \"%s\" is %" PRId64 ", which is negative",
                           file->path, key, value);
        *value_out = (uint64_t)value;
        return XP_OK;
    }
    if (!gguf_is_unsigned(pair->type))
        return gguf_wrong_type(file, key, pair->type, "an integer");
    *value_out = gguf_load(pair->data, gguf_types[pair->type].bytes);
    return XP_OK;
}

xp_status_t gguf_get_f64(const gguf_file_t *file, const char *key, double *value_out)
{
    const gguf_pair_t *pair = NULL;
    XP_TRY(gguf_require(file, key, &pair));
    if (!gguf_number(pair->data, pair->type, value_out))
        return gguf_wrong_type(file, key, pair->type, "a number");
    return XP_OK;
}

xp_status_t gguf_get_bool(const gguf_file_t *file, const char *key, bool *value_out)
{
    const gguf_pair_t *pair = NULL;
    XP_TRY(gguf_require(file, key, &pair));
    if (pair->type != GGUF_BOOL)
        return gguf_wrong_type(file, key, pair->type, "bool");
    *value_out = pair->data[0] != 0;
    return XP_OK;
}

xp_status_t gguf_get_string(const gguf_file_t *file, const char *key, const char **text_out,
                            size_t *length_out)
{
    const gguf_pair_t *pair = NULL;
    XP_TRY(gguf_require(file, key, &pair));
    if (pair->type != GGUF_STRING)
        return gguf_wrong_type(file, key, pair->type, "string");
    *text_out = (const char *)pair->data;
    *length_out = pair->count;
    return XP_OK;
}

static xp_status_t gguf_require_array(const gguf_file_t *file, const char *key,
                                      const gguf_pair_t **pair_out)
{
    const gguf_pair_t *pair = NULL;
    XP_TRY(gguf_require(file, key, &pair));
    if (pair->type != GGUF_ARRAY)
        return gguf_wrong_type(file, key, pair->type, "array");
    *pair_out = pair;
    return XP_OK;
}

xp_status_t gguf_array_count(const gguf_file_t *file, const char *key, size_t *count_out)
{
    const gguf_pair_t *pair = NULL;
    XP_TRY(gguf_require_array(file, key, &pair));
    *count_out = pair->count;
    return XP_OK;
}

static xp_status_t gguf_require_element(const gguf_file_t *file, const char *key, size_t index,
                                        const gguf_pair_t **pair_out)
{
    const gguf_pair_t *pair = NULL;
    XP_TRY(gguf_require_array(file, key, &pair));
    if (index >= pair->count)
        return xp_fail(XP_INVALID, "%s: the array \"%s\" has %" PRIu64 " elements, none at %zu",
                       file->path, key, pair->count, index);
    *pair_out = pair;
    return XP_OK;
}

xp_status_t gguf_array_string(const gguf_file_t *file, const char *key, size_t index,
                              const char **text_out, size_t *length_out)
{
    const gguf_pair_t *pair = NULL;
    XP_TRY(gguf_require_element(file, key, index, &pair));
    if (pair->element_type != GGUF_STRING)
        return gguf_wrong_type(file, key, pair->element_type, "an array of strings");
    const uint8_t *entry = pair->data + pair->string_offsets[index];
    *text_out = (const char *)entry + 8;
    *length_out = gguf_load(entry, 8);
    return XP_OK;
}

xp_status_t gguf_array_f64(const gguf_file_t *file, const char *key, size_t index,
                           double *value_out)
{
    const gguf_pair_t *pair = NULL;
    XP_TRY(gguf_require_element(file, key, index, &pair));
    if (pair->element_type == GGUF_BOOL) {
        *value_out = pair->data[index] != 0;
        return XP_OK;
    }
    const uint8_t *entry = pair->data + index * gguf_types[pair->element_type].bytes;
    if (!gguf_number(entry, pair->element_type, value_out))
        return gguf_wrong_type(file, key, pair->element_type, "an array of numbers");
    return XP_OK;
}

size_t gguf_tensor_count(const gguf_file_t *file)
{
    return file->tensor_count;
}

const gguf_tensor_t *gguf_tensor_at(const gguf_file_t *file, size_t index)
{
    return index < file->tensor_count ? &file->tensors[index] : NULL;
}

const char *gguf_path(const gguf_file_t *file)
{
    return file->path;
}
