/* SPDX-License-Identifier: MIT */
/*
 * Weights of synthetic checkpoints, and their files. A row depends on nothing but seed, tensor name
 * and row number, so that formats that order rows or tensors differently hold the same model.
 * Values are sums of four uniform numbers: near enough to normal, and free of the mathematics
 * library, so that every machine makes the same ones.
 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "model/convert.h"
#include "model/source.h"
#include "model/synth_private.h"

/* ---- Files ------------------------------------------------------------------------------------
 */

xp_status_t synth_file_open(const char *folder, const char *name, synth_file_t *file_out)
{
    synth_file_t file = {0};
    char path[MODEL_PATH_MAX];
    XP_TRY(model_source_join(folder, name, path));
    size_t length = strlen(path);
    file.path = strdup(path);
    file.part = malloc(length + 6);
    if (!file.path || !file.part) {
        free(file.path);
        free(file.part);
        return xp_fail(XP_NO_MEMORY, "no memory to write %s", path);
    }
    snprintf(file.part, length + 6, "%s.part", path);
    file.stream = fopen(file.part, "wbe");
    if (!file.stream) {
        xp_status_t status = xp_fail_errno(XP_IO, "cannot write %s", file.part);
        free(file.path);
        free(file.part);
        return status;
    }
    *file_out = file;
    return XP_OK;
}

xp_status_t synth_file_write(synth_file_t *file, const void *data, size_t bytes)
{
    if (bytes && fwrite(data, 1, bytes, file->stream) != bytes)
        return xp_fail_errno(XP_IO, "cannot write %s", file->part);
    file->written += bytes;
    return XP_OK;
}

void synth_file_abandon(synth_file_t *file)
{
    if (file->stream) {
        fclose(file->stream);
        unlink(file->part);
    }
    free(file->path);
    free(file->part);
    *file = (synth_file_t){0};
}

xp_status_t synth_file_commit(synth_file_t *file)
{
    FILE *stream = file->stream;
    xp_status_t status = XP_OK;
    file->stream = NULL;
    if (fclose(stream) != 0)
        status = xp_fail_errno(XP_IO, "cannot write %s", file->part);
    else if (rename(file->part, file->path) != 0)
        status = xp_fail_errno(XP_IO, "cannot rename %s", file->part);
    if (status != XP_OK)
        unlink(file->part);
    synth_file_abandon(file);
    return status;
}

xp_status_t synth_write_text(const char *folder, const char *name, const xp_buf_t *text)
{
    synth_file_t file;
    XP_TRY(synth_file_open(folder, name, &file));
    xp_status_t status = synth_file_write(&file, text->data, text->length);
    if (status == XP_OK)
        return synth_file_commit(&file);
    synth_file_abandon(&file);
    return status;
}

/* ---- Weights ----------------------------------------------------------------------------------
 */

/* splitmix64 (Steele, Lea, Flood 2014): every counter value gives an independent word. */
static uint64_t synth_mix(uint64_t value)
{
    value += 0x9e3779b97f4a7c15ull;
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
    return value ^ (value >> 31);
}

/* FNV-1a. */
static uint64_t synth_hash(const char *text)
{
    uint64_t hash = 0xcbf29ce484222325ull;
    for (; *text; text++)
        hash = (hash ^ (uint8_t)*text) * 0x100000001b3ull;
    return hash;
}

/* Mean 0, variance 1: four uniform 16-bit numbers have the variance 4/12. */
static float synth_gauss(uint64_t word)
{
    int32_t sum = (int32_t)(word & 0xffff) + (int32_t)(word >> 16 & 0xffff) +
                  (int32_t)(word >> 32 & 0xffff) + (int32_t)(word >> 48);
    return (float)(sum - 2 * 0xffff) * (1.7320508f / 65536.0f);
}

/* Scales under which the FFN decides which token wins: linear maps gain a little (1.5 over the root
 * of their inputs), embeddings stay small beside what the layers add. */
static void synth_scale(const inventory_tensor_t *tensor, float *mean, float *deviation)
{
    *mean = 0;
    *deviation = 0;
    switch (tensor->role) {
    case INVENTORY_EMBEDDING:
        *deviation = 0.3f;
        break;
    case INVENTORY_NORM:
        *mean = 1;
        *deviation = 0.1f;
        break;
    case INVENTORY_LINEAR:
        *deviation = 1.5f / sqrtf((float)tensor->shape[1]);
        break;
    case INVENTORY_BIAS:
        *deviation = 0.2f;
        break;
    case INVENTORY_CORRECTION:
        *deviation = 0.1f;
        break;
    }
}

void synth_row(const synth_options_t *options, const inventory_tensor_t *tensor, uint64_t row,
               uint64_t columns, float *out)
{
    float mean, deviation;
    synth_scale(tensor, &mean, &deviation);
    uint64_t state = synth_mix(synth_mix(options->seed ^ synth_hash(tensor->name)) + row);
    for (uint64_t i = 0; i < columns; i++)
        out[i] = mean + deviation * synth_gauss(synth_mix(state + i));
}

xp_status_t synth_write_tensor(synth_job_t *job, synth_file_t *file,
                               const inventory_tensor_t *tensor, xp_dtype_t dtype,
                               synth_order_t order, const void *order_context)
{
    bool vector = tensor->dimensions == 1;
    uint64_t rows = vector ? 1 : tensor->shape[0];
    uint64_t columns = vector ? tensor->shape[0] : tensor->shape[1];
    size_t row_bytes = xp_dtype_row_bytes(dtype, columns);
    float *values = malloc(columns * sizeof(float));
    float *ordered = malloc(columns * sizeof(float));
    char *stored = malloc(row_bytes + 1);
    xp_status_t status = XP_OK;
    if (!values || !ordered || !stored)
        status = xp_fail(XP_NO_MEMORY, "no memory for a row of %s", tensor->name);
    for (uint64_t place = 0; place < rows && status == XP_OK; place++) {
        synth_row(job->options, tensor, order && !vector ? order(order_context, place) : place,
                  columns, values);
        if (order && vector) {
            for (uint64_t i = 0; i < columns; i++)
                ordered[i] = values[order(order_context, i)];
        }
        convert_from_f32(dtype, order && vector ? ordered : values, columns, stored);
        status = synth_file_write(file, stored, row_bytes);
        job->done_bytes += row_bytes;
        if (job->options->progress && (place % 64 == 0 || place + 1 == rows))
            job->options->progress(job->options->progress_context, job->done_bytes,
                                   job->total_bytes);
    }
    free(values);
    free(ordered);
    free(stored);
    return status;
}
