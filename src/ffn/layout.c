/* SPDX-License-Identifier: MIT */
/*
 * Lists the FFN matrices of a model's shard. Reads no weights; runs on the planner's or the
 * loader's thread.
 */
#include "ffn/layout.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ffn/private.h"
#include "ffn/route.h"

#define LAYOUT_PAGE 4096u

typedef struct layout_maker {
    const model_spec_t *spec;
    const checkpoint_t *checkpoint;
    xp_dtype_t dtype;
    uint32_t tp_size;
    size_t capacity;
    layout_t layout;
} layout_maker_t;

static uint64_t layout_round(uint64_t bytes, uint64_t unit)
{
    return (bytes + unit - 1) / unit * unit;
}

/* The dtype kept in memory. Only the large matrices are converted: the router decides which experts
 * run and stays as precise as the checkpoint has it. */
static xp_dtype_t layout_dtype(const layout_maker_t *maker, const layout_item_t *item)
{
    if (item->role == LAYOUT_BIAS)
        return XP_DTYPE_F32;
    xp_dtype_t found = item->tensor ? item->tensor->dtype : maker->spec->checkpoint_dtype;
    if (found == XP_DTYPE_AUTO)
        found = XP_DTYPE_BF16;
    bool convert = maker->dtype != XP_DTYPE_AUTO && item->role != LAYOUT_ROUTER &&
                   !xp_dtype_is_quantized(found);
    return convert ? maker->dtype : found;
}

static xp_status_t layout_add(layout_maker_t *maker, layout_item_t *item)
{
    layout_t *layout = &maker->layout;
    uint32_t tp = maker->tp_size;
    uint64_t shape[2] = {item->whole_rows, item->whole_columns};
    if (maker->checkpoint) {
        bool vector = item->role == LAYOUT_BIAS;
        XP_TRY(checkpoint_tensor_require(maker->checkpoint, item->name, vector ? 1 : 2,
                                         vector ? shape + 1 : shape, &item->tensor));
    }
    item->rows = item->whole_rows;
    item->columns = item->whole_columns;
    uint32_t *split = item->axis == LAYOUT_ROWS      ? &item->rows
                      : item->axis == LAYOUT_COLUMNS ? &item->columns
                                                     : NULL;
    if (split && *split % tp)
        return xp_fail(XP_INVALID, "%s: %u %s do not divide by a tensor parallel size of %u",
                       item->name, *split, item->axis == LAYOUT_ROWS ? "rows" : "columns", tp);
    if (split)
        *split /= tp;
    item->dtype = layout_dtype(maker, item);
    uint32_t block = xp_dtype_block_elements(item->dtype);
    if (item->columns % block)
        return xp_fail(XP_UNSUPPORTED,
                       "%s: %u columns a shard do not divide into %s blocks of %u; use a smaller "
                       "tensor parallel size",
                       item->name, item->columns, xp_dtype_name(item->dtype), block);
    item->bytes = kernels_matrix_bytes(item->dtype, item->rows, item->columns);
    item->offset = layout->weight_bytes;
    layout->weight_bytes += item->bytes;
    XP_ASSERT(layout->count < maker->capacity);
    layout->items[layout->count++] = *item;
    return XP_OK;
}

static xp_status_t layout_add_triple(layout_maker_t *maker, uint32_t layer, uint32_t part,
                                     const char *prefix, uint32_t intermediate)
{
    static const struct {
        const char *name;
        layout_role_t role;
        layout_axis_t axis;
    } parts[] = {
        {"gate_proj", LAYOUT_GATE, LAYOUT_ROWS},
        {"up_proj", LAYOUT_UP, LAYOUT_ROWS},
        {"down_proj", LAYOUT_DOWN, LAYOUT_COLUMNS},
    };
    for (uint32_t i = 0; i < 3; i++) {
        bool down = parts[i].role == LAYOUT_DOWN;
        layout_item_t item = {
            .role = parts[i].role,
            .axis = parts[i].axis,
            .layer = layer,
            .part = part,
            .whole_rows = down ? maker->spec->hidden : intermediate,
            .whole_columns = down ? intermediate : maker->spec->hidden,
        };
        snprintf(item.name, sizeof(item.name), "model.layers.%u.mlp.%s%s.weight", layer, prefix,
                 parts[i].name);
        XP_TRY(layout_add(maker, &item));
    }
    maker->layout.triples++;
    return XP_OK;
}

static xp_status_t layout_add_moe(layout_maker_t *maker, uint32_t layer, const model_ffn_t *ffn)
{
    xp_status_t status = ffn_route_check(ffn);
    if (status != XP_OK)
        return xp_fail_context(status, "layer %u", layer);
    layout_item_t router = {.role = LAYOUT_ROUTER,
                            .layer = layer,
                            .whole_rows = ffn->experts,
                            .whole_columns = maker->spec->hidden};
    snprintf(router.name, sizeof(router.name), "model.layers.%u.mlp.gate.weight", layer);
    XP_TRY(layout_add(maker, &router));
    if (ffn->correction_bias) {
        layout_item_t bias = {
            .role = LAYOUT_BIAS, .layer = layer, .whole_rows = 1, .whole_columns = ffn->experts};
        snprintf(bias.name, sizeof(bias.name), "model.layers.%u.mlp.gate.e_score_correction_bias",
                 layer);
        XP_TRY(layout_add(maker, &bias));
    }
    for (uint32_t e = 0; e < ffn->experts; e++) {
        char prefix[32];
        snprintf(prefix, sizeof(prefix), "experts.%u.", e);
        XP_TRY(layout_add_triple(maker, layer, e, prefix, ffn->intermediate));
    }
    if (ffn->shared_intermediate)
        XP_TRY(layout_add_triple(maker, layer, ffn->experts, "shared_experts.",
                                 ffn->shared_intermediate));
    return XP_OK;
}

xp_status_t layout_make(const model_spec_t *spec, const checkpoint_t *checkpoint, xp_dtype_t dtype,
                        uint32_t tp_size, layout_t *layout_out)
{
    layout_maker_t maker = {
        .spec = spec, .checkpoint = checkpoint, .dtype = dtype, .tp_size = tp_size};
    if (tp_size < 1)
        return xp_fail(XP_INVALID, "tensor parallel size 0");
    if ((unsigned)dtype >= XP_DTYPE_COUNT || xp_dtype_is_quantized(dtype))
        return xp_fail(XP_INVALID, "dtype %s: weights can be converted to plain types only",
                       xp_dtype_name(dtype));
    for (uint32_t l = 0; l < spec->layers; l++)
        maker.capacity +=
            spec->ffn[l].kind == MODEL_FFN_MOE ? 3 * ((size_t)spec->ffn[l].experts + 1) + 2 : 3;
    maker.layout.items = calloc(maker.capacity ? maker.capacity : 1, sizeof(layout_item_t));
    if (!maker.layout.items)
        return xp_fail(XP_NO_MEMORY, "no memory for the list of %zu FFN matrices", maker.capacity);
    xp_status_t status = XP_OK;
    for (uint32_t l = 0; l < spec->layers; l++) {
        const model_ffn_t *ffn = &spec->ffn[l];
        maker.layout.usage_bytes += ffn_chosen_bytes(ffn);
        XP_TRY_GOTO(status, fail,
                    ffn->kind == MODEL_FFN_MOE
                        ? layout_add_moe(&maker, l, ffn)
                        : layout_add_triple(&maker, l, 0, "", ffn->intermediate));
    }
    maker.layout.weight_bytes = layout_round(maker.layout.weight_bytes, LAYOUT_PAGE);
    maker.layout.table_bytes = spec->layers * sizeof(ffn_layer_t) +
                               (uint64_t)maker.layout.triples * sizeof(ffn_triple_t) +
                               maker.layout.usage_bytes;
    *layout_out = maker.layout;
    return XP_OK;
fail:
    free(maker.layout.items);
    return status;
}

void layout_fini(layout_t *layout)
{
    free(layout->items);
    layout->items = NULL;
}

xp_status_t ffn_install_bytes(const model_spec_t *spec, const checkpoint_t *checkpoint,
                              xp_dtype_t dtype, uint32_t tp_size, uint64_t *bytes_out)
{
    layout_t layout;
    XP_TRY(layout_make(spec, checkpoint, dtype, tp_size, &layout));
    *bytes_out = layout.weight_bytes + layout.table_bytes;
    layout_fini(&layout);
    return XP_OK;
}
