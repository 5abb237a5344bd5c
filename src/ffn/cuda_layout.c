/* SPDX-License-Identifier: MIT */
/* Places a shard's matrices in device memory and lists their addresses. See cuda_layout.h. */
#include "ffn/cuda_layout.h"

#include <stdlib.h>
#include <string.h>

#include "ffn/cuda/kernels.h"
#include "ffn/dummy.h"
#include "model/digest.h"

#define LAYOUT_PIECE_UNIT  FFN_CUDA_TILE_ROWS
#define LAYOUT_PIECE_MOST  4096u /* dense */
#define LAYOUT_EXPERT_ROWS 8192u

static uint32_t layout_pad(uint32_t width)
{
    const uint32_t unit = FFN_CUDA_WIDTH_MULTIPLE;
    return (width + unit - 1) / unit * unit;
}

xp_dtype_t cuda_dtype_plain(uint32_t dtype)
{
    return dtype == FFN_CUDA_BF16  ? XP_DTYPE_BF16
           : dtype == FFN_CUDA_F16 ? XP_DTYPE_F16
                                   : XP_DTYPE_F32;
}

/* The type of the shard's weights when the configuration leaves it to the checkpoint. */
static uint32_t layout_choose(const model_spec_t *spec, const layout_t *layout)
{
    for (size_t i = 0; i < layout->count; i++)
        if (layout->items[i].role == LAYOUT_GATE && layout->items[i].tensor)
            return layout->items[i].tensor->dtype == XP_DTYPE_F16 ? FFN_CUDA_F16 : FFN_CUDA_BF16;
    return spec->checkpoint_dtype == XP_DTYPE_F16 ? FFN_CUDA_F16 : FFN_CUDA_BF16;
}

static xp_status_t layout_check(const model_spec_t *spec, const layout_t *layout, xp_dtype_t dtype)
{
    if (dtype == XP_DTYPE_F32)
        return xp_fail(XP_UNSUPPORTED,
                       "dtype float32: FFN weights on a GPU are bfloat16 or float16; leave dtype "
                       "out, or place the model on CPU devices");
    if (spec->hidden % FFN_CUDA_WIDTH_MULTIPLE)
        return xp_fail(XP_UNSUPPORTED, "hidden size %u: the GPU kernels take multiples of %u",
                       spec->hidden, FFN_CUDA_WIDTH_MULTIPLE);
    for (size_t i = 0; i < layout->count; i++)
        if (xp_dtype_is_quantized(layout->items[i].dtype))
            return xp_fail(XP_UNSUPPORTED,
                           "%s is quantised (%s): FFN weights on a GPU come from F32, F16 or BF16 "
                           "files; place the model on CPU devices or use such a file",
                           layout->items[i].name, xp_dtype_name(layout->items[i].dtype));
    return XP_OK;
}

static void layout_item(const cuda_layout_t *layout, const layout_item_t *item, cuda_item_t *out)
{
    cuda_item_t made = {.rows = item->rows, .columns = item->columns, .dtype = layout->dtype};
    switch (item->role) {
    case LAYOUT_GATE:
    case LAYOUT_UP:
        made.rows = layout_pad(item->rows);
        break;
    case LAYOUT_DOWN:
        made.columns = layout_pad(item->columns);
        break;
    case LAYOUT_ROUTER:
        /* It decides which experts run: another type than the weights' is kept as FP32. */
        if (item->dtype != cuda_dtype_plain(layout->dtype))
            made.dtype = FFN_CUDA_F32;
        break;
    case LAYOUT_BIAS:
        made.dtype = FFN_CUDA_F32;
        break;
    }
    made.bytes = (uint64_t)made.rows * made.columns * (made.dtype == FFN_CUDA_F32 ? 4 : 2);
    *out = made;
}

static xp_status_t layout_place(cuda_layout_t *layout, uint64_t limit)
{
    for (size_t i = 0; i < layout->layout.count; i++) {
        cuda_item_t *item = &layout->items[i];
        const uint64_t bytes = (item->bytes + CUDA_LAYOUT_ALIGNMENT - 1) / CUDA_LAYOUT_ALIGNMENT *
                               CUDA_LAYOUT_ALIGNMENT;
        uint64_t *block = layout->blocks ? &layout->block_bytes[layout->blocks - 1] : NULL;
        if (!block || (*block && *block + bytes > limit)) {
            if (layout->blocks == FFN_CUDA_WEIGHT_BLOCKS)
                return xp_fail(XP_UNSUPPORTED, "a shard of more than %d allocations",
                               FFN_CUDA_WEIGHT_BLOCKS);
            block = &layout->block_bytes[layout->blocks++];
        }
        item->block = layout->blocks - 1;
        item->offset = *block;
        *block += bytes;
        layout->bytes += bytes;
    }
    return XP_OK;
}

xp_status_t cuda_layout_make(const model_spec_t *spec, const checkpoint_t *checkpoint,
                             xp_dtype_t dtype, uint32_t tp_size, uint64_t block_limit,
                             cuda_layout_t *layout_out)
{
    cuda_layout_t made = {0};
    xp_status_t status;
    XP_TRY(layout_make(spec, checkpoint, dtype, tp_size, &made.layout));
    XP_TRY_GOTO(status, failed, layout_check(spec, &made.layout, dtype));
    made.dtype = dtype == XP_DTYPE_F16    ? FFN_CUDA_F16
                 : dtype == XP_DTYPE_BF16 ? FFN_CUDA_BF16
                                          : layout_choose(spec, &made.layout);
    made.items = calloc(made.layout.count ? made.layout.count : 1, sizeof(*made.items));
    if (!made.items) {
        status =
            xp_fail(XP_NO_MEMORY, "no memory for the list of %zu FFN matrices", made.layout.count);
        goto failed;
    }
    for (size_t i = 0; i < made.layout.count; i++)
        layout_item(&made, &made.layout.items[i], &made.items[i]);
    XP_TRY_GOTO(status, failed,
                layout_place(&made, block_limit ? block_limit : FFN_CUDA_WEIGHT_BLOCK_SIZE));
    for (uint32_t l = 0; l < spec->layers; l++) {
        ffn_cuda_signature_t signature;
        cuda_layout_signature(&made, spec, l, tp_size, &signature);
        status = ffn_cuda_signature_check(&signature);
        if (status != XP_OK) {
            xp_fail_context(status, "layer %u", l);
            goto failed;
        }
    }
    *layout_out = made;
    return XP_OK;
failed:
    cuda_layout_fini(&made);
    return status;
}

void cuda_layout_fini(cuda_layout_t *layout)
{
    layout_fini(&layout->layout);
    free(layout->items);
    *layout = (cuda_layout_t){0};
}

static uint64_t identity_add(uint64_t identity, uint64_t value)
{
    return ffn_dummy_mix(identity + value + 0x9e3779b97f4a7c15u);
}

uint64_t cuda_layout_identity(const cuda_layout_t *layout, const ffn_install_t *install)
{
    uint64_t identity = ffn_dummy_seed(install->path);
    identity = identity_add(identity, FFN_CUDA_DISPATCH_ABI);
    identity = identity_add(identity, layout->dtype);
    identity = identity_add(identity, ((uint64_t)install->tp_rank << 32) | install->tp_size);
    identity = identity_add(identity, install->dummy);
    /* A checkpoint that was written anew is another one. */
    identity = identity_add(identity, model_checkpoint_stamp(install->path));
    for (size_t i = 0; i < layout->layout.count; i++) {
        const layout_item_t *item = &layout->layout.items[i];
        const cuda_item_t *placed = &layout->items[i];
        identity = identity_add(identity, ffn_dummy_seed(item->name));
        identity = identity_add(identity, ((uint64_t)item->rows << 32) | item->columns);
        identity = identity_add(identity, ((uint64_t)placed->block << 48) | placed->offset);
        if (item->tensor)
            identity = identity_add(identity, ((uint64_t)item->tensor->file << 48) ^
                                                  ((uint64_t)item->tensor->dtype << 56) ^
                                                  item->tensor->offset);
    }
    return identity;
}

void cuda_layout_signature(const cuda_layout_t *layout, const model_spec_t *spec, uint32_t layer,
                           uint32_t tp_size, ffn_cuda_signature_t *signature_out)
{
    const model_ffn_t *ffn = &spec->ffn[layer];
    /* Zeroed first: signatures are compared by their bytes. */
    memset(signature_out, 0, sizeof(*signature_out));
    signature_out->hidden = spec->hidden;
    signature_out->intermediate = layout_pad(ffn->intermediate / tp_size);
    signature_out->dtype = layout->dtype;
    signature_out->activation = ffn->activation;
    if (ffn->kind != MODEL_FFN_MOE)
        return;
    signature_out->experts = ffn->experts;
    signature_out->top_k = ffn->top_k;
    signature_out->router = ffn->router;
    signature_out->normalize = ffn->normalize_top_k;
    signature_out->groups = ffn->groups ? ffn->groups : 1;
    signature_out->top_groups = ffn->top_groups ? ffn->top_groups : 1;
    signature_out->shared_intermediate = layout_pad(ffn->shared_intermediate / tp_size);
    signature_out->routed_scale = (float)ffn->routed_scale;
    for (size_t i = 0; i < layout->layout.count; i++)
        if (layout->layout.items[i].layer == layer && layout->layout.items[i].role == LAYOUT_ROUTER)
            signature_out->router_dtype = layout->items[i].dtype;
}

uint32_t cuda_layout_parts(const model_ffn_t *ffn)
{
    return ffn->kind == MODEL_FFN_MOE ? ffn->experts + (ffn->shared_intermediate != 0) : 1;
}

void cuda_layout_tables(const cuda_layout_t *layout, const model_spec_t *spec, const uint64_t *base,
                        ffn_cuda_layer_t *layers, ffn_cuda_part_t *parts)
{
    uint32_t first[MODEL_MAX_LAYERS], next = 0;
    for (uint32_t l = 0; l < spec->layers; l++) {
        first[l] = next;
        next += cuda_layout_parts(&spec->ffn[l]);
    }
    for (size_t i = 0; i < layout->layout.count; i++) {
        const layout_item_t *item = &layout->layout.items[i];
        const cuda_item_t *placed = &layout->items[i];
        const void *at = (const void *)(uintptr_t)(base[placed->block] + placed->offset);
        ffn_cuda_part_t *part = &parts[first[item->layer] + item->part];
        switch (item->role) {
        case LAYOUT_GATE:
            part->gate = at;
            break;
        case LAYOUT_UP:
            part->up = at;
            break;
        case LAYOUT_DOWN:
            part->down = at;
            break;
        case LAYOUT_ROUTER:
            layers[item->layer].router = at;
            break;
        case LAYOUT_BIAS:
            layers[item->layer].bias = at;
            break;
        }
    }
}

uint32_t cuda_layout_piece_rows(const ffn_cuda_signature_t *s, uint32_t max_rows)
{
    /* Every piece streams the experts once more: it is as large as may be, and its launches are
     * shares of the products (ffn_cuda_bulk). */
    if (s->experts)
        return LAYOUT_EXPERT_ROWS < max_rows ? LAYOUT_EXPERT_ROWS : max_rows;
    /* The larger of the two launches is gate and up. */
    const uint64_t macs = 2 * (uint64_t)s->intermediate * s->hidden;
    uint64_t rows = (uint64_t)FFN_CUDA_MACS_NS * FFN_CUDA_PIECE_NS / (macs ? macs : 1);
    rows = rows / LAYOUT_PIECE_UNIT * LAYOUT_PIECE_UNIT;
    if (rows < LAYOUT_PIECE_UNIT)
        rows = LAYOUT_PIECE_UNIT;
    if (rows > LAYOUT_PIECE_MOST)
        rows = LAYOUT_PIECE_MOST;
    return rows < max_rows ? (uint32_t)rows : max_rows;
}

xp_status_t ffn_cuda_weight_bytes(const model_spec_t *spec, const checkpoint_t *checkpoint,
                                  xp_dtype_t dtype, uint32_t tp_size, uint64_t *bytes_out)
{
    cuda_layout_t layout;
    uint64_t bytes = 0;
    XP_TRY(cuda_layout_make(spec, checkpoint, dtype, tp_size, 0, &layout));
    for (uint32_t b = 0; b < layout.blocks; b++)
        bytes +=
            (layout.block_bytes[b] + FFN_CUDA_GRANULE - 1) / FFN_CUDA_GRANULE * FFN_CUDA_GRANULE;
    cuda_layout_fini(&layout);
    *bytes_out = bytes;
    return XP_OK;
}
