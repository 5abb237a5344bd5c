/* SPDX-License-Identifier: MIT */
/* Fuzz target: config.json to model spec. Any text gives a spec or an error. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "base/status.h"
#include "model/spec.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static model_spec_t spec;
    if (model_spec_parse((const char *)data, size, "fuzz.json", &spec) == XP_OK) {
        /* What the parser lets through must keep its promises to the code behind it. */
        XP_ASSERT(spec.layers >= 1 && spec.layers <= MODEL_MAX_LAYERS);
        XP_ASSERT(spec.kv_heads >= 1 && spec.heads % spec.kv_heads == 0);
        XP_ASSERT(spec.eos_count <= MODEL_MAX_EOS);
        for (uint32_t i = 0; i < spec.layers; i++) {
            const model_ffn_t *ffn = &spec.ffn[i];
            XP_ASSERT(ffn->intermediate >= 1);
            XP_ASSERT(ffn->kind == MODEL_FFN_DENSE ||
                      (ffn->top_k >= 1 && ffn->top_k <= ffn->experts &&
                       ffn->experts <= MODEL_MAX_EXPERTS && ffn->top_k <= MODEL_MAX_TOP_K));
        }
    }
    return 0;
}
