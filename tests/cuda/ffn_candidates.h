/* SPDX-License-Identifier: MIT */
/* Candidates for the decode kernel (src/ffn/cuda/candidates), run in the place of the one in use.
 */
#ifndef XPOOL_TESTS_CUDA_FFN_CANDIDATES_H
#define XPOOL_TESTS_CUDA_FFN_CANDIDATES_H

#include "ffn_kit.h"

#define FFN_CANDIDATES_MOST 8u

typedef struct ffn_candidates {
    uint32_t count; /* of which the first, "used", is the kernel in use */
    const char *name[FFN_CANDIDATES_MOST];
    cuda_module_t module[FFN_CANDIDATES_MOST];
    cuda_function_t function[FFN_CANDIDATES_MOST];
} ffn_candidates_t;

/* Loads the candidates that `wanted` names, separated by commas ("all": all), before anything
 * spins. One that is not known, that does not fit beside another block's registers or that the
 * device refuses ends the process. */
void ffn_candidates_load(ffn_kit_t *kit, const char *wanted, ffn_candidates_t *candidates_out);
/* Later launches of `kit` are of the which-th. */
void ffn_candidates_use(ffn_kit_t *kit, const ffn_candidates_t *candidates, uint32_t which);
void ffn_candidates_unload(ffn_kit_t *kit, ffn_candidates_t *candidates);
#endif
