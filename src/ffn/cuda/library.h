/* SPDX-License-Identifier: MIT */
/*
 * Dense bulk FFNs by cuBLASLt, which is loaded at run time: nothing links it, and a host without it
 * runs ffn_cuda_bulk() instead.
 *
 * A plan is made once for a (signature, rows): it holds the algorithms that the library chose.
 * Pointers are given at each call and frozen where the call is captured, so a captured bulk FFN
 * belongs to one layer, Capacity and Lane. Plans are constant and may be used by several threads
 * with different scratch.
 */
#ifndef XPOOL_FFN_CUDA_LIBRARY_H
#define XPOOL_FFN_CUDA_LIBRARY_H

#include "ffn/cuda/kernels.h"

typedef struct ffn_library ffn_library_t;
typedef struct ffn_library_plan ffn_library_plan_t;

/* XP_UNSUPPORTED, with the reason, where there is no libcublasLt of major version 13. */
xp_status_t ffn_library_open(const ffn_cuda_kernels_t *kernels, ffn_library_t **library_out);
void ffn_library_close(ffn_library_t *library); /* accepts NULL */

/* For dense layers of `signature` and `rows` >= 1. multiprocessors: how many the products may take
 * (0 = all), so that decode finds room beside them. */
xp_status_t ffn_library_plan_make(ffn_library_t *library, const ffn_cuda_signature_t *signature,
                                  uint32_t rows, uint32_t multiprocessors,
                                  ffn_library_plan_t **plan_out);
void ffn_library_plan_free(ffn_library_plan_t *plan); /* accepts NULL */
/* Device memory of one run: activations of gate and up, and the library's own. */
uint64_t ffn_library_scratch_bytes(const ffn_library_plan_t *plan);
/* The same before there is a plan (planner's ledger). */
uint64_t ffn_library_scratch_bound(const ffn_cuda_signature_t *signature, uint32_t rows);

/* output [rows][hidden] of the weights' type, or with `partial` FP32 (the other is 0), from input
 * [rows][hidden]; part holds device addresses. scratch: aligned to 256 bytes. */
xp_status_t ffn_library_run(const ffn_library_plan_t *plan, const ffn_cuda_part_t *part,
                            cuda_address_t input, cuda_address_t output, cuda_address_t partial,
                            cuda_address_t scratch, cuda_stream_t stream);
#endif
