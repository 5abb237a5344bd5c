/* SPDX-License-Identifier: MIT */
/*
 * Synthetic checkpoints as safetensors: one file, or shards of about equal size with an index. Two
 * walks over the inventory: one lays tensors out, one writes them. Owns its files until they are
 * committed.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "model/synth_private.h"

typedef struct synth_shards {
    synth_job_t *job;
    uint32_t shard;       /* being laid out or written */
    uint64_t shard_bytes; /* a shard that has this many is full */
    uint64_t used;        /* bytes of the shard so far */
    xp_buf_t header;
    xp_buf_t index;
    synth_file_t file;
    bool laying_out;
    uint64_t tensors;
} synth_shards_t;

static xp_dtype_t synth_shards_dtype(const synth_options_t *options,
                                     const inventory_tensor_t *tensor)
{
    /* The published GLM files keep the correction bias in F32 whatever the rest is. */
    return tensor->role == INVENTORY_CORRECTION ? XP_DTYPE_F32 : options->dtype;
}

static uint64_t synth_shards_bytes(const synth_options_t *options, const inventory_tensor_t *tensor)
{
    uint64_t elements = tensor->shape[0] * (tensor->dimensions == 2 ? tensor->shape[1] : 1);
    return elements * xp_dtype_block_bytes(synth_shards_dtype(options, tensor));
}

static void synth_shards_name(uint32_t shard, uint32_t shards, char out[64])
{
    if (shards == 1)
        snprintf(out, 64, "model.safetensors");
    else
        snprintf(out, 64, "model-%05u-of-%05u.safetensors", shard + 1, shards);
}

/* A tensor goes to the next shard when this one is full; the last takes the rest. */
static void synth_shards_place(synth_shards_t *shards, uint64_t bytes)
{
    if (shards->used > 0 && shards->used + bytes / 2 > shards->shard_bytes &&
        shards->shard + 1 < shards->job->options->shards) {
        shards->shard++;
        shards->used = 0;
    }
}

static xp_status_t synth_shards_count(void *context, const inventory_tensor_t *tensor)
{
    synth_shards_t *shards = context;
    shards->job->total_bytes += synth_shards_bytes(shards->job->options, tensor);
    shards->tensors++;
    return XP_OK;
}

/* Header entries of the shard `shard`, and the index of all. */
typedef struct synth_layout {
    synth_shards_t *shards;
    uint32_t wanted;
    bool write;
} synth_layout_t;

static xp_status_t synth_shards_header_entry(void *context, const inventory_tensor_t *tensor)
{
    static const char *const names[] = {
        [XP_DTYPE_F32] = "F32", [XP_DTYPE_F16] = "F16", [XP_DTYPE_BF16] = "BF16"};
    synth_layout_t *layout = context;
    synth_shards_t *shards = layout->shards;
    uint64_t bytes = synth_shards_bytes(shards->job->options, tensor);
    synth_shards_place(shards, bytes);
    if (shards->shard == layout->wanted) {
        xp_dtype_t dtype = synth_shards_dtype(shards->job->options, tensor);
        XP_TRY(xp_buf_printf(&shards->header, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[%" PRIu64,
                             tensor->name, names[dtype], tensor->shape[0]));
        if (tensor->dimensions == 2)
            XP_TRY(xp_buf_printf(&shards->header, ",%" PRIu64, tensor->shape[1]));
        XP_TRY(xp_buf_printf(&shards->header, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}",
                             shards->used, shards->used + bytes));
        char name[64];
        synth_shards_name(shards->shard, shards->job->options->shards, name);
        XP_TRY(xp_buf_printf(&shards->index, "%s    \"%s\": \"%s\"",
                             shards->index.length ? ",\n" : "", tensor->name, name));
    }
    shards->used += bytes;
    return XP_OK;
}

static xp_status_t synth_shards_data(void *context, const inventory_tensor_t *tensor)
{
    synth_layout_t *layout = context;
    synth_shards_t *shards = layout->shards;
    uint64_t bytes = synth_shards_bytes(shards->job->options, tensor);
    synth_shards_place(shards, bytes);
    shards->used += bytes;
    if (shards->shard != layout->wanted)
        return XP_OK;
    return synth_write_tensor(shards->job, &shards->file, tensor,
                              synth_shards_dtype(shards->job->options, tensor), NULL, NULL);
}

static xp_status_t synth_shards_write(synth_shards_t *shards, uint32_t wanted)
{
    char name[64];
    synth_layout_t layout = {.shards = shards, .wanted = wanted};
    synth_shards_name(wanted, shards->job->options->shards, name);
    xp_buf_clear(&shards->header);
    XP_TRY(xp_buf_append_text(&shards->header, "{\"__metadata__\":{\"format\":\"pt\"}"));
    shards->shard = 0;
    shards->used = 0;
    XP_TRY(model_inventory_visit(shards->job->spec, synth_shards_header_entry, &layout));
    if (shards->shard + 1 != shards->job->options->shards)
        return xp_fail(XP_INVALID, "the tensors fill only %u of %u shards; ask for fewer",
                       shards->shard + 1, shards->job->options->shards);
    XP_TRY(xp_buf_append_text(&shards->header, "}"));
    while (shards->header.length % 8)
        XP_TRY(xp_buf_append_text(&shards->header, " "));
    XP_TRY(synth_file_open(shards->job->folder, name, &shards->file));
    uint8_t length[8];
    for (int i = 0; i < 8; i++)
        length[i] = (uint8_t)((uint64_t)shards->header.length >> (8 * i));
    XP_TRY(synth_file_write(&shards->file, length, sizeof(length)));
    XP_TRY(synth_file_write(&shards->file, shards->header.data, shards->header.length));
    shards->shard = 0;
    shards->used = 0;
    XP_TRY(model_inventory_visit(shards->job->spec, synth_shards_data, &layout));
    return synth_file_commit(&shards->file);
}

xp_status_t synth_write_safetensors(synth_job_t *job)
{
    synth_shards_t shards = {.job = job};
    xp_buf_t text;
    xp_status_t status;
    xp_buf_init(&shards.header, SYNTH_MAX_FILE_TEXT);
    xp_buf_init(&shards.index, SYNTH_MAX_FILE_TEXT);
    xp_buf_init(&text, SYNTH_MAX_FILE_TEXT);
    XP_TRY_GOTO(status, done, model_inventory_visit(job->spec, synth_shards_count, &shards));
    if (job->options->shards > shards.tensors) {
        status = xp_fail(XP_INVALID, "%u shards are more than the %" PRIu64 " tensors",
                         job->options->shards, shards.tensors);
        goto done;
    }
    shards.shard_bytes = (job->total_bytes + job->options->shards - 1) / job->options->shards;
    for (uint32_t i = 0; i < job->options->shards; i++)
        XP_TRY_GOTO(status, done, synth_shards_write(&shards, i));
    if (job->options->shards > 1) {
        XP_TRY_GOTO(status, done,
                    xp_buf_printf(&text,
                                  "{\n  \"metadata\": {\"total_size\": %" PRIu64
                                  "},\n  \"weight_map\": {\n",
                                  job->total_bytes));
        XP_TRY_GOTO(status, done, xp_buf_append(&text, shards.index.data, shards.index.length));
        XP_TRY_GOTO(status, done, xp_buf_append_text(&text, "\n  }\n}\n"));
        XP_TRY_GOTO(status, done,
                    synth_write_text(job->folder, "model.safetensors.index.json", &text));
    }
done:
    synth_file_abandon(&shards.file);
    xp_buf_fini(&shards.header);
    xp_buf_fini(&shards.index);
    xp_buf_fini(&text);
    return status;
}
