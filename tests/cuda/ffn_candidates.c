/* SPDX-License-Identifier: MIT */
/* Loads candidates for the decode kernel; one table says which there are. */
#include "ffn_candidates.h"

#include <string.h>

#include "ffn/cuda/decode_shape.h"

CUDA_IMAGE_DECLARE(candidates_decode_dense6);
CUDA_IMAGE_DECLARE(candidates_decode_short);

static const struct {
    const char *name, *kernel;
    const cuda_image_t *image;
} table[] = {
    {"dense6", "ffn_decode_dense6", &cuda_image_candidates_decode_dense6},
    {"short", "ffn_decode_short", &cuda_image_candidates_decode_short},
};
enum { TABLE_COUNT = sizeof(table) / sizeof(table[0]) };

static bool named(const char *wanted, const char *name)
{
    const size_t length = strlen(name);
    if (strcmp(wanted, "all") == 0)
        return true;
    for (const char *at = wanted; (at = strstr(at, name)); at += length)
        if ((at == wanted || at[-1] == ',') && (at[length] == ',' || at[length] == '\0'))
            return true;
    return false;
}

void ffn_candidates_load(ffn_kit_t *kit, const char *wanted, ffn_candidates_t *candidates_out)
{
    ffn_candidates_t *c = candidates_out;
    uint32_t asked = 1;
    memset(c, 0, sizeof(*c));
    c->name[0] = "used";
    c->function[0] = kit->kernels.function[FFN_KERNEL_DECODE];
    c->count = 1;
    for (uint32_t i = 0; i < TABLE_COUNT; i++) {
        const uint32_t at = c->count;
        int registers;
        if (!named(wanted, table[i].name))
            continue;
        CHECK(at < FFN_CANDIDATES_MOST);
        CHECK_OK(cuda_module_load(&kit->device, table[i].image, &table[i].kernel, 1, &c->module[at],
                                  &c->function[at]));
        CHECK_OK(CUDA_CALL(kit->device.driver, cuFuncSetAttribute, c->function[at],
                           CUDA_FUNCTION_MAX_DYNAMIC_SHARED_BYTES, DECODE_SHARED_BYTES));
        CHECK_OK(CUDA_CALL(kit->device.driver, cuFuncGetAttribute, &registers,
                           CUDA_FUNCTION_REGISTERS, c->function[at]));
        printf("# candidate %s: %d registers\n", table[i].name, registers);
        /* What posts to the resident kernel needs some on the same multiprocessor. */
        CHECK(registers <= (int)DECODE_MOST_REGISTERS);
        c->name[at] = table[i].name;
        c->count++;
    }
    for (const char *at = wanted; *at && strcmp(wanted, "all") != 0; at++)
        asked += *at == ',' || at == wanted;
    CHECK(c->count >= asked);
}

void ffn_candidates_use(ffn_kit_t *kit, const ffn_candidates_t *candidates, uint32_t which)
{
    CHECK(which < candidates->count);
    kit->kernels.function[FFN_KERNEL_DECODE] = candidates->function[which];
}

void ffn_candidates_unload(ffn_kit_t *kit, ffn_candidates_t *candidates)
{
    ffn_candidates_use(kit, candidates, 0);
    for (uint32_t i = 1; i < candidates->count; i++)
        cuda_module_unload(&candidates->module[i]);
    candidates->count = 0;
}
