/* SPDX-License-Identifier: MIT */
/*
 * GraphTemplates: one prepared plan for all layers with one Execution Signature.
 *
 * On CPU a plan is how each Execution Capacity is cut into work items and pieces. Changed only by
 * install and uninstall, under the runtime's team lock.
 */
#include <string.h>

#include "ffn/private.h"

/* A parallel region costs a few microseconds; below this many multiply-adds one thread is faster.
 */
#define TEMPLATE_INLINE_WORK (192u * 1024u)

static uint32_t template_columns(uint32_t width, uint32_t parts, uint32_t threads)
{
    /* `parts` experts share the team; the more there are, the coarser their items may be. */
    uint32_t share = (threads + parts - 1) / parts;
    uint32_t columns = kernels_split_chunk(width, share);
    return columns > FFN_TILE_COLUMNS ? FFN_TILE_COLUMNS : columns;
}

void ffn_template_plan(const ffn_runtime_t *runtime, ffn_template_t *template)
{
    const ffn_signature_t *s = &template->signature;
    uint32_t threads = runtime->config.threads;
    bool moe = s->kind == MODEL_FFN_MOE;
    template->row_floats =
        moe ? s->top_k * s->intermediate + s->shared_intermediate : s->intermediate;
    template->capacities = 0;
    for (uint32_t rows = 1;; rows *= 2) {
        ffn_capacity_t *capacity = &template->capacity[template->capacities++];
        size_t fit = runtime->activation_floats / template->row_floats;
        capacity->rows = rows < runtime->config.max_rows ? rows : runtime->config.max_rows;
        capacity->piece_rows = capacity->rows < FFN_ROW_CHUNK ? capacity->rows : FFN_ROW_CHUNK;
        if (capacity->piece_rows > fit)
            capacity->piece_rows = (uint32_t)fit;
        XP_ASSERT(capacity->piece_rows >= 1);
        uint32_t parts = moe ? (rows * s->top_k < s->experts ? rows * s->top_k : s->experts) : 1;
        capacity->gate_columns = template_columns(s->intermediate, parts, threads);
        capacity->down_columns = template_columns(s->hidden, 1, threads);
        uint64_t work = (uint64_t)capacity->rows * template->row_floats * s->hidden;
        capacity->gate_inline = threads == 1 || 2 * work < TEMPLATE_INLINE_WORK;
        capacity->down_inline = threads == 1 || work < TEMPLATE_INLINE_WORK;
        if (rows >= runtime->config.max_rows || template->capacities == FFN_MAX_CAPACITIES)
            break;
    }
}

xp_status_t ffn_template_acquire(ffn_runtime_t *runtime, const ffn_signature_t *signature,
                                 ffn_template_t **template_out)
{
    ffn_template_t *free_slot = NULL;
    for (uint32_t t = 0; t < FFN_MAX_TEMPLATES; t++) {
        ffn_template_t *template = &runtime->template[t];
        if (template->users == 0) {
            free_slot = free_slot ? free_slot : template;
        } else if (!memcmp(&template->signature, signature, sizeof(*signature))) {
            template->users++;
            *template_out = template;
            return XP_OK;
        }
    }
    if (!free_slot)
        return xp_fail(XP_NO_MEMORY, "more than %d different layer structures on one FFN device",
                       FFN_MAX_TEMPLATES);
    memset(free_slot, 0, sizeof(*free_slot));
    memcpy(&free_slot->signature, signature, sizeof(*signature));
    free_slot->users = 1;
    ffn_template_plan(runtime, free_slot);
    *template_out = free_slot;
    return XP_OK;
}

void ffn_template_release(ffn_runtime_t *runtime, ffn_template_t *template)
{
    (void)runtime;
    XP_ASSERT(template->users > 0);
    template->users--;
}
