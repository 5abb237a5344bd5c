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

typedef struct PROTOCOL_ALIGNED_16 stage_eight {
    uint16_t value[8];
} stage_eight_t;
typedef struct PROTOCOL_ALIGNED_16 stage_four {
    float value[4];
} stage_four_t;

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

/* What every element needs of a job, kept in registers: behind a store of rows the job's own memory
 * would be read again. */
typedef struct stage_job_form {
    uint32_t kind, dtype, wide, consumers;
    float times, plus; /* ECHO */
    stage_job_to_t first;
} stage_job_form_t;

/* Eight elements, from position i, to all who get them. `bits` for 16-bit rows, `sum` for FP32. */
PROTOCOL_FUNCTION void stage_job_store(const stage_job_t *job, const stage_job_form_t *form,
                                       uint64_t i, const float sum[8], stage_eight_t bits)
{
    for (uint32_t c = 0; c < form->consumers; c++) {
        const stage_job_to_t to = c ? job->to[c] : form->first;
        if (!to.rows || i < to.begin || i - to.begin >= to.count)
            continue;
        if (form->wide) {
            stage_four_t *four = (stage_four_t *)((float *)to.rows + (i - to.begin));
            stage_four_t low, high;
            for (int k = 0; k < 4; k++) {
                low.value[k] = sum[k];
                high.value[k] = sum[k + 4];
            }
            four[0] = low;
            four[1] = high;
        } else {
            *(stage_eight_t *)((uint16_t *)to.rows + (i - to.begin)) = bits;
        }
    }
}

/* From 16-bit rows: COPY and ECHO. */
PROTOCOL_FUNCTION void stage_job_eight(const stage_job_t *job, const stage_job_form_t *form,
                                       uint64_t i, stage_eight_t bits)
{
    float sum[8] = {0};
    if (form->kind == STAGE_JOB_ECHO)
        for (int k = 0; k < 8; k++) {
            sum[k] = stage_value(bits.value[k], form->dtype) * form->times + form->plus;
            bits.value[k] = stage_bits(sum[k], form->dtype);
        }
    stage_job_store(job, form, i, sum, bits);
}

/* From FP32 rows: REDUCE, and COPY of a partial. */
PROTOCOL_FUNCTION void stage_job_eight_wide(const stage_job_t *job, const stage_job_form_t *form,
                                            uint64_t i, const float sum[8])
{
    stage_eight_t bits = {{0}};
    if (!form->wide)
        for (int k = 0; k < 8; k++)
            bits.value[k] = stage_bits(sum[k], form->dtype);
    stage_job_store(job, form, i, sum, bits);
}

/* 16-byte loads in flight a thread: rows of one consumer; other 16-bit rows; and positions of 32
 * bytes, each of several members. */
#define STAGE_JOB_LOADS        8u
#define STAGE_JOB_LOADS_SPREAD 4u
#define STAGE_JOB_LOADS_WIDE   2u
#ifdef __CUDACC__
#define STAGE_UNROLL _Pragma("unroll")
#else
#define STAGE_UNROLL
#endif

typedef struct PROTOCOL_ALIGNED_16 stage_pairs {
    uint32_t pair[4]; /* two elements each, the first in the low half */
} stage_pairs_t;

PROTOCOL_FUNCTION uint32_t stage_job_echo_pair(const stage_job_form_t *form, uint32_t pair)
{
    const float low = stage_value((uint16_t)pair, form->dtype) * form->times + form->plus;
    const float high = stage_value((uint16_t)(pair >> 16), form->dtype) * form->times + form->plus;
    return (uint32_t)stage_bits(high, form->dtype) << 16 | stage_bits(low, form->dtype);
}

/* 16-bit rows to one consumer, who gets all of them: decoding. */
PROTOCOL_FUNCTION void stage_job_run_plain(const stage_job_form_t *form, const void *from_rows,
                                           uint64_t begin, uint64_t end, uint64_t thread,
                                           uint64_t threads)
{
    const stage_pairs_t *from = (const stage_pairs_t *)from_rows;
    stage_pairs_t *to = (stage_pairs_t *)form->first.rows;
    const uint64_t last = end / 8;
    for (uint64_t i = begin / 8 + thread; i < last; i += STAGE_JOB_LOADS * threads) {
        stage_pairs_t part[STAGE_JOB_LOADS];
        STAGE_UNROLL
        for (uint32_t n = 0; n < STAGE_JOB_LOADS; n++)
            if (i + n * threads < last)
                part[n] = from[i + n * threads];
        STAGE_UNROLL
        for (uint32_t n = 0; n < STAGE_JOB_LOADS; n++)
            if (i + n * threads < last) {
                if (form->kind == STAGE_JOB_ECHO)
                    STAGE_UNROLL
                for (int k = 0; k < 4; k++)
                    part[n].pair[k] = stage_job_echo_pair(form, part[n].pair[k]);
                to[i + n * threads] = part[n];
            }
    }
}

/* FP32 rows: REDUCE, and COPY of a partial. */
PROTOCOL_FUNCTION void stage_job_run_sum(const stage_job_t *job, const stage_job_form_t *form,
                                         uint64_t begin, uint64_t end, uint64_t thread,
                                         uint64_t threads)
{
    const uint64_t step = threads * 8, stride = job->stride;
    const float *from = (const float *)job->from;
    const uint32_t members = form->kind == STAGE_JOB_REDUCE ? job->members : 1;
    for (uint64_t i = begin + thread * 8; i < end; i += STAGE_JOB_LOADS_WIDE * step) {
        float sum[STAGE_JOB_LOADS_WIDE][8];
        for (uint32_t m = 0; m < members; m++) {
            stage_four_t low[STAGE_JOB_LOADS_WIDE], high[STAGE_JOB_LOADS_WIDE];
            STAGE_UNROLL
            for (uint32_t n = 0; n < STAGE_JOB_LOADS_WIDE; n++)
                if (i + n * step < end) {
                    const stage_four_t *four =
                        (const stage_four_t *)(from + m * stride + i + n * step);
                    low[n] = four[0];
                    high[n] = four[1];
                }
            STAGE_UNROLL
            for (uint32_t n = 0; n < STAGE_JOB_LOADS_WIDE; n++)
                if (i + n * step < end)
                    STAGE_UNROLL
            for (int k = 0; k < 4; k++) {
                sum[n][k] = m ? sum[n][k] + low[n].value[k] : low[n].value[k];
                sum[n][k + 4] = m ? sum[n][k + 4] + high[n].value[k] : high[n].value[k];
            }
        }
        STAGE_UNROLL
        for (uint32_t n = 0; n < STAGE_JOB_LOADS_WIDE; n++)
            if (i + n * step < end)
                stage_job_eight_wide(job, form, i + n * step, sum[n]);
    }
}

PROTOCOL_FUNCTION void stage_job_form_make(const stage_job_t *job, stage_job_form_t *form_out)
{
    form_out->kind = job->kind;
    form_out->dtype = job->dtype;
    form_out->wide = job->wide;
    form_out->consumers = job->consumers;
    form_out->times = (float)(job->member + 1);
    form_out->plus = job->member ? 0.0f : (float)job->layer;
    form_out->first = job->to[0];
}

/* May stage_job_run_plain() do elements up to `end`? */
PROTOCOL_FUNCTION int stage_job_is_plain(const stage_job_t *job, uint64_t end)
{
    return job->kind != STAGE_JOB_REDUCE && !job->wide && !job->narrow && job->consumers == 1 &&
           job->to[0].rows && job->to[0].begin == 0 && job->to[0].count >= end;
}

/* Eight elements a step: 16-byte accesses, several steps' loads before the first store. Slices
 * begin and end at rows, which are eights here. */
PROTOCOL_FUNCTION void stage_job_run_wide(const stage_job_t *job, uint64_t begin, uint64_t end,
                                          uint64_t thread, uint64_t threads)
{
    stage_job_form_t form;
    stage_job_form_make(job, &form);
    const uint64_t step = threads * 8;
    if (form.kind == STAGE_JOB_REDUCE || (form.kind == STAGE_JOB_COPY && form.wide)) {
        stage_job_run_sum(job, &form, begin, end, thread, threads);
        return;
    }
    const uint16_t *from = (const uint16_t *)job->from;
    if (stage_job_is_plain(job, end)) {
        stage_job_run_plain(&form, from, begin, end, thread, threads);
        return;
    }
    for (uint64_t i = begin + thread * 8; i < end; i += STAGE_JOB_LOADS_SPREAD * step) {
        stage_eight_t part[STAGE_JOB_LOADS_SPREAD];
        STAGE_UNROLL
        for (uint32_t n = 0; n < STAGE_JOB_LOADS_SPREAD; n++)
            if (i + n * step < end)
                part[n] = *(const stage_eight_t *)(from + i + n * step);
        STAGE_UNROLL
        for (uint32_t n = 0; n < STAGE_JOB_LOADS_SPREAD; n++)
            if (i + n * step < end)
                stage_job_eight(job, &form, i + n * step, part[n]);
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
