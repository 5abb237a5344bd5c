/* SPDX-License-Identifier: MIT */
/* Fuzz target: the JSON header of a safetensors file. The first byte of the input says how long the
 * data part behind it is, in units of 16 bytes. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "model/checkpoint_private.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static xp_status_t visit(void *context, const char *name, const checkpoint_tensor_t *tensor,
                         const char *type_name)
{
    uint64_t file_bytes = *(const uint64_t *)context;
    (void)name;
    (void)type_name;
    XP_ASSERT(tensor->dimensions <= CHECKPOINT_MAX_DIMENSIONS);
    XP_ASSERT(tensor->bytes <= UINT64_MAX - tensor->offset);
    return file_bytes == 0 ? XP_INVALID : XP_OK;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 1)
        return 0;
    size_t length = size - 1;
    uint64_t file_bytes = 8 + length + 16ull * data[0];
    (void)safetensors_parse((const char *)data + 1, length, file_bytes, "fuzz.safetensors", visit,
                            &file_bytes);
    return 0;
}
