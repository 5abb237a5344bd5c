/* SPDX-License-Identifier: MIT */
/*
 * Records of what a GPU did, in a ring in mapped host memory: kernels write them with
 * ffn_cuda_record_end() (ffn/cuda/dispatch_steps.h), one host thread takes them. Whoever is slow
 * loses the oldest and is told how many.
 */
#ifndef XPOOL_FFN_CUDA_RECORDS_H
#define XPOOL_FFN_CUDA_RECORDS_H

#include "cuda/stream.h"
#include "ffn/cuda/tables.h"

typedef struct ffn_cuda_records {
    const cuda_device_t *device;
    ffn_cuda_record_place_t *places; /* or NULL */
    cuda_address_t at;               /* of the places, for kernels */
    uint64_t capacity, taken;
    uint64_t tied_ns, tie_took_ns;
    int64_t clock_offset_ns; /* CLOCK_MONOTONIC minus the device's clock */
} ffn_cuda_records_t;

/* capacity: records kept; 0 makes an empty object. Before kernels spin: host memory is mapped. */
xp_status_t ffn_cuda_records_open(const cuda_device_t *device, uint32_t capacity,
                                  ffn_cuda_records_t *records_out);
void ffn_cuda_records_close(ffn_cuda_records_t *records); /* accepts all zero */

/* The device's clock said device_ns some time between before_ns and after_ns of CLOCK_MONOTONIC. Of
 * all calls of a minute the one that leaves least doubt counts: the two clocks drift apart. */
void ffn_cuda_records_tie(ffn_cuda_records_t *records, uint64_t before_ns, uint64_t after_ns,
                          uint64_t device_ns);

/* Up to `limit` records that were not taken yet, oldest first; how many. end_ns is of
 * CLOCK_MONOTONIC then. skipped_out: records that were overwritten before. */
uint32_t ffn_cuda_records_take(ffn_cuda_records_t *records, ffn_cuda_record_t *records_out,
                               uint32_t limit, uint64_t *skipped_out);
#endif
