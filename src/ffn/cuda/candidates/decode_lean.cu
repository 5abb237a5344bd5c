// SPDX-License-Identifier: MIT
// A candidate for the decode kernel, which tests load in its place: see README.md.
#define DECODE_NAME   ffn_decode_lean
#define DECODE_BOUNDS __maxnreg__(DECODE_MOST_REGISTERS)
#define DECODE_LEAN 1
#include "ffn/cuda/decode.cu"
