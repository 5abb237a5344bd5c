/* SPDX-License-Identifier: MIT */
/*
 * Jobs: what the scheduler's block does to rows by itself. One source for C and CUDA.
 *
 *   COPY    a Lane's rows to consumers, each its slice (several consumers of the resident kernel)
 *   REDUCE  the members' FP32 partials, added in PE order and cast once, to consumers
 *   ECHO    stands for an execution: member m of a group gives input * (m + 1), member 0 adds the
 *           layer; a single member casts that. For tests and benchmarks without weights.
 *
 * A job is done in chunks of elements, so that a long one never keeps a short one waiting; any
 * number of threads share a chunk. Elements are numbered over all rows of the Invocation.
 */
#ifndef XPOOL_STAGE_JOB_H
#define XPOOL_STAGE_JOB_H

#include "base/protocol_atomics.h"
#include "ffn/cuda/tables.h"

#ifdef __CUDACC__
#include <cuda_fp16.h>
#else
#include <string.h>
#endif

#define STAGE_JOB_CHUNK     (64u << 10) /* elements; a multiple of 8 */
#define STAGE_JOB_CONSUMERS 8u

typedef enum stage_job_kind {
    STAGE_JOB_NONE = 0,
    STAGE_JOB_COPY,
    STAGE_JOB_REDUCE,
    STAGE_JOB_ECHO
} stage_job_kind_t;

typedef struct stage_job_to {
    void *rows;            /* gets its slice from the start; NULL: nothing to write */
    uint64_t begin, count; /* elements */
} stage_job_to_t;

typedef struct stage_job {
    uint32_t kind;
    uint32_t dtype;   /* ffn_cuda_dtype_t of 16-bit rows */
    uint32_t wide;    /* consumers get FP32: COPY of a partial, ECHO of one member of several */
    uint32_t narrow;  /* elements are not in eights, or addresses not aligned */
    uint32_t member;  /* ECHO */
    uint32_t members; /* REDUCE */
    uint32_t layer;   /* ECHO */
    uint32_t consumers;
    const void *from;  /* COPY, ECHO: rows; REDUCE: the first member's partial */
    uint64_t stride;   /* REDUCE: elements from one member's partial to the next */
    uint64_t elements; /* in all */
    uint64_t next;     /* first element that no chunk has covered */
    stage_job_to_t to[STAGE_JOB_CONSUMERS];
} stage_job_t;

typedef struct
#ifdef __CUDACC__
    __align__(16)
#else
    __attribute__((aligned(16)))
#endif
        stage_eight
{
    uint16_t value[8];
}
stage_eight_t;
typedef struct
#ifdef __CUDACC__
    __align__(16)
#else
    __attribute__((aligned(16)))
#endif
        stage_four
{
    float value[4];
}
stage_four_t;

/* Values of 16-bit elements; to nearest, ties to even. */
PROTOCOL_FUNCTION float stage_value(uint16_t bits, uint32_t dtype)
{
#ifdef __CUDA_ARCH__
    return dtype == FFN_CUDA_BF16 ? __uint_as_float((uint32_t)bits << 16)
                                  : __half2float(__ushort_as_half(bits));
#elif defined(__CUDACC__)
    return (float)bits; /* never called on the host side of a CUDA build */
#else
    if (dtype == FFN_CUDA_BF16) {
        uint32_t wide = (uint32_t)bits << 16;
        float value;
        memcpy(&value, &wide, sizeof(value));
        return value;
    }
    _Float16 half;
    memcpy(&half, &bits, sizeof(half));
    return (float)half;
#endif
}

PROTOCOL_FUNCTION uint16_t stage_bits(float value, uint32_t dtype)
{
#ifdef __CUDA_ARCH__
    if (dtype != FFN_CUDA_BF16)
        return __half_as_ushort(__float2half_rn(value));
    uint32_t wide = __float_as_uint(value);
#elif defined(__CUDACC__)
    uint32_t wide = (uint32_t)value;
#else
    if (dtype != FFN_CUDA_BF16) {
        _Float16 half = (_Float16)value;
        uint16_t bits;
        memcpy(&bits, &half, sizeof(bits));
        return bits;
    }
    uint32_t wide;
    memcpy(&wide, &value, sizeof(wide));
#endif
    if ((wide & 0x7fffffffu) > 0x7f800000u) /* not a number stays one */
        return (uint16_t)(wide >> 16 | 0x40u);
    return (uint16_t)((wide + 0x7fffu + (wide >> 16 & 1u)) >> 16);
}

/* One element as FP32, before any cast. */
PROTOCOL_FUNCTION float stage_job_element(const stage_job_t *job, uint64_t i)
{
    if (job->kind == STAGE_JOB_REDUCE) {
        const float *partial = (const float *)job->from + i;
        float sum = partial[0];
        for (uint32_t m = 1; m < job->members; m++)
            sum += partial[m * job->stride];
        return sum;
    }
    if (job->kind == STAGE_JOB_ECHO)
        return stage_value(((const uint16_t *)job->from)[i], job->dtype) *
                   (float)(job->member + 1) +
               (job->member ? 0.0f : (float)job->layer);
    return job->wide ? ((const float *)job->from)[i]
                     : stage_value(((const uint16_t *)job->from)[i], job->dtype);
}

PROTOCOL_FUNCTION void stage_job_run_narrow(const stage_job_t *job, uint64_t begin, uint64_t end,
                                            uint64_t thread, uint64_t threads)
{
    for (uint64_t i = begin + thread; i < end; i += threads) {
        const float value = stage_job_element(job, i);
        const uint16_t bits = job->kind == STAGE_JOB_COPY && !job->wide
                                  ? ((const uint16_t *)job->from)[i]
                                  : stage_bits(value, job->dtype);
        for (uint32_t c = 0; c < job->consumers; c++) {
            const stage_job_to_t *to = &job->to[c];
            if (!to->rows || i < to->begin || i - to->begin >= to->count)
                continue;
            if (job->wide)
                ((float *)to->rows)[i - to->begin] = value;
            else
                ((uint16_t *)to->rows)[i - to->begin] = bits;
        }
    }
}

/* Eight elements a step: 16-byte accesses. Slices begin and end at rows, which are eights here. */
PROTOCOL_FUNCTION void stage_job_run_wide(const stage_job_t *job, uint64_t begin, uint64_t end,
                                          uint64_t thread, uint64_t threads)
{
    for (uint64_t i = begin + thread * 8; i < end; i += threads * 8) {
        float sum[8] = {0};
        stage_eight_t bits;
        if (job->kind == STAGE_JOB_REDUCE || (job->kind == STAGE_JOB_COPY && job->wide)) {
            const float *partial = (const float *)job->from + i;
            const uint32_t members = job->kind == STAGE_JOB_REDUCE ? job->members : 1;
            for (uint32_t m = 0; m < members; m++) {
                const stage_four_t *four = (const stage_four_t *)(partial + m * job->stride);
                const stage_four_t low = four[0], high = four[1];
                for (int k = 0; k < 4; k++) {
                    sum[k] = m ? sum[k] + low.value[k] : low.value[k];
                    sum[k + 4] = m ? sum[k + 4] + high.value[k] : high.value[k];
                }
            }
        } else {
            bits = *(const stage_eight_t *)((const uint16_t *)job->from + i);
            for (int k = 0; k < 8 && job->kind == STAGE_JOB_ECHO; k++)
                sum[k] = stage_value(bits.value[k], job->dtype) * (float)(job->member + 1) +
                         (job->member ? 0.0f : (float)job->layer);
        }
        if (!job->wide && job->kind != STAGE_JOB_COPY)
            for (int k = 0; k < 8; k++)
                bits.value[k] = stage_bits(sum[k], job->dtype);
        for (uint32_t c = 0; c < job->consumers; c++) {
            const stage_job_to_t *to = &job->to[c];
            if (!to->rows || i < to->begin || i - to->begin >= to->count)
                continue;
            if (job->wide) {
                stage_four_t *four = (stage_four_t *)((float *)to->rows + (i - to->begin));
                stage_four_t low, high;
                for (int k = 0; k < 4; k++) {
                    low.value[k] = sum[k];
                    high.value[k] = sum[k + 4];
                }
                four[0] = low;
                four[1] = high;
            } else {
                *(stage_eight_t *)((uint16_t *)to->rows + (i - to->begin)) = bits;
            }
        }
    }
}

/* Thread `thread` of `threads` does its part of elements [begin, end). */
PROTOCOL_FUNCTION void stage_job_run(const stage_job_t *job, uint64_t begin, uint64_t end,
                                     uint64_t thread, uint64_t threads)
{
    if (job->narrow)
        stage_job_run_narrow(job, begin, end, thread, threads);
    else
        stage_job_run_wide(job, begin, end, thread, threads);
}
#endif
