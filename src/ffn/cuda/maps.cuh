// SPDX-License-Identifier: MIT
// Tensor maps of a layer for the grouped products (FFN_CUDA_MAPS in ffn/cuda/tables.h). Needs sm_90a.
#ifndef XPOOL_FFN_CUDA_MAPS_CUH
#define XPOOL_FFN_CUDA_MAPS_CUH

#include "ffn/cuda/bulk_shape.h"
#include "ffn/cuda/ptx.cuh"
#include "ffn/cuda/tables.h"

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
// A warp: the map of that number, of those that exist. form: one of the same boxes over anything.
static __device__ __forceinline__ void map_make(const ffn_cuda_lane_t *lane,
                                                const ffn_cuda_signature_t &s,
                                                const ffn_cuda_map_t &form, uint32_t number)
{
    __shared__ __align__(128) ffn_cuda_map_t maps[BULK_PLAN_THREADS / 32];
    const ffn_cuda_workspace_t &w = lane->workspace;
    const uint32_t warp = threadIdx.x / 32, l = threadIdx.x % 32;
    const uint32_t part = number / 3, kind = number % 3;
    const bool rows = part > s.experts;                        // of activations
    const bool last = rows ? kind == 1 : part == s.experts; // of the part behind the experts
    const uint32_t last_width = s.experts ? s.shared_intermediate : s.intermediate;
    const uint32_t width = last ? last_width : s.intermediate;
    const uint64_t pairs = s.experts ? (uint64_t)lane->rows * s.top_k : 0;
    if (number >= FFN_CUDA_MAPS(s.experts) || width == 0 || (!last && s.experts == 0))
        return;
    const void *from;
    uint32_t along = s.hidden, count = width;
    if (rows) {
        from = (const char *)w.activations + (last ? pairs * s.intermediate * 2 : 0);
        along = width;
        count = last ? lane->rows : (uint32_t)pairs;
    } else {
        const ffn_cuda_part_t &at = lane->layers[lane->layer].parts[part];
        from = kind == 0 ? at.gate : (kind == 1 ? at.up : at.down);
        if (kind == 2) {
            along = width;
            count = s.hidden;
        }
    }
    if (l < 16)
        maps[warp].words[l] = form.words[l];
    __syncwarp();
    if (l == 0)
        ptx_map_replace(ptx_shared(&maps[warp]), from, along, max(count, 1u));
    __syncwarp();
    ptx_map_publish(w.maps + number, ptx_shared(&maps[warp]));
}
#else
static __device__ __forceinline__ void map_make(const ffn_cuda_lane_t *, const ffn_cuda_signature_t &,
                                                const ffn_cuda_map_t &, uint32_t)
{
    __trap();
}
#endif
#endif
