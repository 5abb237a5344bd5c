/* SPDX-License-Identifier: MIT */
/*
 * What routers chose, counted in device memory by the kernels that choose: one source for C and
 * CUDA. A layer of experts has one ffn_cuda_usage_t followed by a count for each expert; a layer
 * without (its address is NULL) is not counted.
 *
 * Additions only, relaxed: nobody waits for them, and a reader sees each counter some time later.
 * Who counts sees live rows only, so what a padded row would choose never appears.
 */
#ifndef XPOOL_FFN_CUDA_USAGE_H
#define XPOOL_FFN_CUDA_USAGE_H

#include "base/protocol_atomics.h"
#include "ffn/cuda/tables.h"

/* Bytes of a layer's counters; 0 for a dense layer. */
PROTOCOL_FUNCTION uint64_t ffn_cuda_usage_bytes(uint32_t experts)
{
    return experts ? sizeof(ffn_cuda_usage_t) + experts * sizeof(uint64_t) : 0;
}

/* [experts] rows that chose each. */
PROTOCOL_FUNCTION uint64_t *ffn_cuda_usage_chosen(ffn_cuda_usage_t *usage)
{
    return (uint64_t *)(usage + 1);
}

/* `rows` rows of one execution chose this expert; 0 adds nothing. */
PROTOCOL_FUNCTION void ffn_cuda_usage_expert(ffn_cuda_usage_t *usage, uint32_t expert,
                                             uint32_t rows)
{
    if (!usage || !rows)
        return;
    PROTOCOL_COUNT(&ffn_cuda_usage_chosen(usage)[expert], (uint64_t)rows);
}

/* One execution: its live rows, and the distinct experts whose weights it reads. */
PROTOCOL_FUNCTION void ffn_cuda_usage_execution(ffn_cuda_usage_t *usage, uint32_t rows,
                                                uint32_t experts)
{
    if (!usage || !rows)
        return;
    PROTOCOL_COUNT(&usage->executions, (uint64_t)1);
    PROTOCOL_COUNT(&usage->rows, (uint64_t)rows);
    PROTOCOL_COUNT(&usage->experts, (uint64_t)experts);
}
#endif
